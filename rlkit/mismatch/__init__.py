"""Why do sampler and trainer give a token other log-probabilities? The first part of the model that differs.

`python -m rlkit.mismatch MODEL --rollout vllm` sends the same tokens and images through both and compares pixels,
positions, vision tower, injected features, each layer and its router, output head and sampling. See docs/mismatch.md.
"""
