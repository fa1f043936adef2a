"""Saved rollouts: a bundle per training step, checked again on another machine or trained on without sampling.

A recipe writes bundles with `--save_rollouts` and reads them with `--from_rollouts`; `python -m rlkit.replay BUNDLE`
computes a step again; `python -m rlkit.replay.dumps` converts what verl and TRL log. See docs/replay.md.
"""
