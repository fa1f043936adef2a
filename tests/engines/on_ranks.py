"""Run by `test_ranks.py` in one process or several: the same global batch, whatever the number of ranks.

on_ranks.py MODEL_DIR OUT_DIR CASE [CASE ...]
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from rows import make_batch  # noqa: E402

from rlkit.engines import make_engine  # noqa: E402
from rlkit.engines.value_head import with_value_head  # noqa: E402
from rlkit.losses import clipped_policy_loss, clipped_value_loss, sequence_mean, token_mean  # noqa: E402
from rlkit.vlm import VISION_TOWER, freeze, load_model, load_processor, lora  # noqa: E402


def token_loss(out, mb):
    loss = clipped_policy_loss(out.logprobs, out.logprobs.detach(), mb.advantages, mb.mask)
    entropy = token_mean(out.entropy, mb.mask, mb.total_tokens)
    metrics = {"entropy": entropy, "logprob/max": (-out.logprobs).sum().detach()}
    return token_mean(loss, mb.mask, mb.total_tokens) - 0.01 * entropy, metrics


def sequence_loss(out, mb):
    old = mb.rollout_logprobs - 4  # so that some ratios are clipped, and the loss moves
    loss = clipped_policy_loss(out.logprobs, old, mb.advantages, mb.mask)
    return sequence_mean(loss, mb.mask, mb.total_sequences), {}


def value_loss(out, mb):
    returns = mb.advantages[:, None].expand(mb.mask.shape)
    loss = clipped_value_loss(out.values, torch.zeros_like(out.values), returns, mb.mask)
    return token_mean(loss, mb.mask, mb.total_tokens), {"value": token_mean(out.values, mb.mask, mb.total_tokens)}


def run(model_dir: str, out: Path, case: str) -> None:
    processor, model = load_processor(model_dir), load_model(model_dir)
    if case == "frozen":
        freeze(model, VISION_TOWER)
    if case == "lora":
        torch.manual_seed(0)
        model = lora(model, 4, 8, exclude_modules=".*visual.*")
    value = case.startswith("value")
    engine = make_engine(
        "fsdp2",
        "value_model" if value else "language_model",
        model=with_value_head(model) if value else model,
        processor=processor,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4),
        micro_batch_tokens=16384 if case in ("whole", "empty_rank") else 120,
    )
    rank, world = dist.get_rank(), dist.get_world_size()
    out.mkdir(parents=True, exist_ok=True)
    # rows 3 is text only, rows 0-2 and 4-8 have images
    mine = {
        "whole": list(range(9))[rank::world],
        "empty_rank": list(range(9)) if rank == 0 else [],
        "value_empty_rank": list(range(9)) if rank == 0 else [],
        "text_rank": [0, 1, 2, 4, 5, 6, 7, 8] if rank == 0 else [3],
    }.get(case, list(range(9))[rank::world])
    if world == 1:
        mine = list(range(9))
    batch = make_batch(processor, rows=mine)
    loss_fn = value_loss if value else sequence_loss if case == "sequences" else token_loss
    outputs = ("values",) if value else ("logprobs", "entropy")
    steps = [engine.train_batch(batch, loss_fn, outputs) for _ in range(2)]
    gradients = {n: _whole(p.grad) for n, p in engine.module.named_parameters() if p.grad is not None}
    engine.save_checkpoint(out / "checkpoint", {"step": 2})
    steps += [engine.train_batch(batch, loss_fn, outputs) for _ in range(2)]
    logprobs = engine.infer_batch(batch, outputs[:1])[outputs[0]]
    parameters = dict(engine.get_per_tensor_param())
    total = engine.global_sum(logprobs.sum()).item()
    if rank == 0:
        torch.save({"gradients": gradients, "parameters": parameters}, out / "tensors.pt")
        (out / "steps.json").write_text(json.dumps({"steps": steps, "logprobs": total}))
    dist.barrier()


def _whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[3:]:
        run(sys.argv[1], Path(sys.argv[2]) / name, name)
    dist.destroy_process_group()
