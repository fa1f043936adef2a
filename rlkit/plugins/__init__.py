"""rlkit's losses and advantages in other trainers, one module for each. Importing this package imports none of them.

- `rlkit.plugins.verl`: registers them in verl 0.9, which loads it automatically where rlkit is installed
- `rlkit.plugins.trl`: GRPOTrainer and DPOTrainer of TRL 1.16 that take a loss
- `rlkit.plugins.hf_trainer`: a `compute_loss_func` for Hugging Face's Trainer

See docs/other_trainers.md. A module raises an ImportError if its trainer is not installed or has another version.
"""
