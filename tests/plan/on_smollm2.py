"""Run by `more_smollm2.py`, in a process of its own: the plan of a model's training, and what a real process takes.

on_smollm2.py CASE MODEL_DIR OUT_FILE
"""

import json
import sys

from on_fake_ranks import FEW_TOKENS, planned_and_taken, use_pieces_of_gpus

from rlkit.plan.recipes import load_recipe, recipe_options

RANKS = 2
CASES = {  # models beside the policy, options
    "all weights and a reference": (("reference",), []),
    "adapters": ((), ["--lora_rank", "16"]),
    "adapters, whose base is the reference": (("reference",), ["--lora_rank", "16"]),
}


def main(name, path, out):
    use_pieces_of_gpus()
    beside, options = CASES[name]
    options = ["--model", path, *FEW_TOKENS, "--no_enable_gradient_checkpointing", *options]
    cfg = recipe_options(load_recipe("recipes/grpo_vlm.py"), options)
    with open(out, "w") as file:
        json.dump(planned_and_taken(cfg, RANKS, beside), file)


if __name__ == "__main__":
    main(*sys.argv[1:])
