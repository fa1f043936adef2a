"""GRPOTrainer on two processes, for live_trl.py: each rank writes what it saw."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from live_trl import PROMPTS, grpo

from rlkit.advantages import opo_advantages
from rlkit.losses import clipped_policy_loss
from rlkit.vlm.tiny import tiny_text_tokenizer

if __name__ == "__main__":
    tokenizer = tiny_text_tokenizer(PROMPTS)
    found = {}
    for name, own in {"rlkit": {"loss": clipped_policy_loss}, "TRL": {}}.items():
        trainer = grpo(tokenizer, **own, num_iterations=2)
        trainer.train()
        found[name] = {key: x.detach().clone() for key, x in trainer.model.named_parameters()}
    seen_lengths = []

    def advantages(rewards, group_ids, lengths):
        seen_lengths.append(lengths)
        return opo_advantages(rewards, group_ids, lengths)

    trainer = grpo(tokenizer, advantages=advantages)
    trainer.train()
    found["rewards"] = list(trainer._logs["rewards"]["reward"])
    found["advantages"] = list(trainer._logs["advantages"])
    found["used"] = torch.cat([part["advantages"] for part in trainer.seen[2:]])
    found["all_lengths"] = seen_lengths[-1]
    torch.save(found, Path(sys.argv[1]) / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()
