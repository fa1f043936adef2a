"""Saved rollouts, one bundle per training step: recompute a step on any machine, or train without sampling.

A recipe writes bundles with `--save_rollouts` and trains on them with `--from_rollouts`.
`python -m rlkit.replay BUNDLE` recomputes a step. `python -m rlkit.replay.dumps` converts the rollout dumps of verl and
TRL. See docs/replay.md.
"""
