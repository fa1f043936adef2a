"""Run by `more_smollm2.py`: one step of SmolLM2-135M on the same four responses, in several layouts.

on_smollm2_ranks.py OUT_DIR MODEL_DIR NAME...
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from forked_ranks import fork_ranks  # noqa: E402
from isolated_cases import case  # noqa: E402

from rlkit.data import append_response, collate, load_task  # noqa: E402
from rlkit.engines import make_engine  # noqa: E402
from rlkit.engines.megatron import engine as megatron_engine  # noqa: E402, F401  imported before the ranks are forked
from rlkit.losses import clipped_policy_loss, token_mean  # noqa: E402
from rlkit.vlm import encode_prompt, load_model, load_processor, lora  # noqa: E402

# ranks, engine, options, rank of the adapters (0: all weights are trained)
CASES = {
    "fsdp2": (1, "fsdp2", {}, 0),
    "fsdp2, two ranks": (2, "fsdp2", {}, 0),
    "megatron": (1, "megatron", {}, 0),
    "megatron, two stages": (2, "megatron", {"pipeline": 2}, 0),
    "adapters": (1, "fsdp2", {}, 8),
    "adapters, two ranks": (2, "fsdp2", {}, 8),
}


def four_responses(tokenizer):
    """Two responses of different lengths to each of two questions, with an end token and without."""
    samples = []
    for group, row in enumerate(list(load_task("addition").heldout)[:2]):
        prompt = encode_prompt(tokenizer, row, group_id=group)
        for text in (f"{row['question']} is {row['answer']}.<|im_end|>", "I think that it is about fifty"):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            samples.append(append_response(prompt, ids, [-1.0] * len(ids)))
    return samples


def loss_fn(out, mb):
    loss = clipped_policy_loss(out.logprobs, out.logprobs.detach(), mb.advantages, mb.mask)
    return token_mean(loss, mb.mask, mb.total_tokens), {}


def on_rank(out, path, names):
    for name in names:
        store = f"file://{out}/store.{name}"
        rank, world = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE"))
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
        with case(out, name):
            run(name, path, out)
        dist.destroy_process_group()


def run(name, path, out):
    """Log-probabilities before and after the step, and its loss and gradient norm; with adapters, also those of the
    reference model and of the merged weights, after the step."""
    _, backend, options, lora_rank = CASES[name]
    torch.manual_seed(0)
    model = load_model(path)
    lr = 1e-2 if lora_rank else 3e-4
    engine = make_engine(
        backend,
        model=lora(model, lora_rank, 2 * lora_rank) if lora_rank else model,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr, eps=1e-4, weight_decay=0.0),
        max_grad_norm=1.0,
        **options,
    )
    samples, advantages = four_responses(load_processor(path)), torch.tensor([1.0, -0.5, 0.7, -1.0])
    # stages of a pipeline have the same rows, ranks of fsdp2 each their own
    rows = list(range(4))[dist.get_rank() :: dist.get_world_size()] if backend == "fsdp2" else list(range(4))
    batch = collate([samples[i] for i in rows], advantages=advantages[rows])

    def logprobs():
        found = engine.infer_batch(batch)["logprobs"]
        return {i: found[j][batch.mask[j]] for j, i in enumerate(rows)}

    results = {"before": logprobs(), "step": engine.train_batch(batch, loss_fn), "after": logprobs()}
    if lora_rank:
        with engine.disable_adapter():
            results["reference"] = logprobs()
        merged = load_model(path)
        merged.load_state_dict(dict(engine.get_per_tensor_param()), strict=False)  # the head is the tied embedding
        engine = make_engine(backend, model=merged, **options)
        results["merged"] = logprobs()
    torch.save(results, out / f"{name}.{dist.get_rank()}.pt")


def main(out, path, *names):
    for world in (1, 2):
        if chosen := [name for name in names if CASES[name][0] == world]:
            fork_ranks(on_rank, world, Path(out), path, chosen)


if __name__ == "__main__":
    main(*sys.argv[1:])
