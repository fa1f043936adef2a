"""Finds out why sampler and trainer give different log-probabilities: the first part of the model that differs.

`python -m rlkit.mismatch MODEL --rollout vllm` sends the same tokens and images through both. It compares pixels,
positions, vision tower, input embeddings, each layer with its router, output head and sampling. See docs/mismatch.md.
"""
