"""rlkit: composable functional modules for reinforcement learning of vision-language and language models."""

__version__ = "0.1.0"
