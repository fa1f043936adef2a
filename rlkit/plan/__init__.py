"""Predicts, without a GPU, whether a run fits in memory and how long a step takes.

    python -m rlkit.plan recipes/grpo_vlm.py --nproc 8 --gpu h100-80gb --model DIR --max_prompt_tokens 2048 ...

The recipe's own engines take one step as rank 0 of N simulated ranks. Their tensors have shapes but no memory, and only
the model's config is read. A ledger counts the bytes that these tensors would take, by phase and kind.
"""
