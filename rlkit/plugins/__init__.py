"""rlkit's losses and advantages inside other people's trainers; one module a trainer, and nothing is imported here.

- `rlkit.plugins.verl`: registers them in verl 0.9; verl loads it by itself where rlkit is installed
- `rlkit.plugins.trl`: GRPOTrainer and DPOTrainer of TRL 1.16 that take a loss
- `rlkit.plugins.hf_trainer`: a `compute_loss_func` for Hugging Face's Trainer

How to use each: docs/other_trainers.md. Where a trainer is not installed or has another version, its module raises an
ImportError that says so.
"""
