"""Whether a run fits, and how long a step takes, known without a GPU.

    python -m rlkit.plan recipes/grpo_vlm.py --nproc 8 --gpu h100-80gb --model DIR --max_prompt_tokens 2048 ...

The recipe's own engines take a step on one of N simulated ranks, with tensors that have shapes and no memory; only the
model's config is read. A ledger counts what they would take, by phase and kind.
"""
