"""Run by `test_ulysses.py`: the same global batches in one process, and shared by two and four.

on_ulysses_ranks.py OUT_DIR
"""

import json
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForImageTextToText

sys.path.insert(0, str(Path(__file__).parent))
import test_families  # noqa: E402
from rows import make_batch  # noqa: E402

from rlkit.data import collate, extend  # noqa: E402
from rlkit.data.samples import prompt  # noqa: E402
from rlkit.engines import make_engine  # noqa: E402
from rlkit.engines.attention import use_packed_attention  # noqa: E402
from rlkit.engines.packer import pack  # noqa: E402
from rlkit.engines.ulysses import gather, share_rows  # noqa: E402
from rlkit.engines.value_head import with_value_head  # noqa: E402
from rlkit.losses import clipped_policy_loss, clipped_value_loss, sequence_mean, token_mean  # noqa: E402
from rlkit.vlm import lora  # noqa: E402
from rlkit.vlm.inputs import position_spec  # noqa: E402
from rlkit.vlm.tiny import tiny_config, tiny_processor, tiny_tokenizer  # noqa: E402

CPU = torch.device("cpu")
EXPERTS = {**test_families.EXPERTS, "decoder_sparse_step": 1}


def token_loss(out, mb):
    loss = clipped_policy_loss(out.logprobs, out.logprobs.detach(), mb.advantages, mb.mask)
    entropy = token_mean(out.entropy, mb.mask, mb.total_tokens)
    least = torch.nn.functional.pad(out.logprobs.flatten(), (0, 1)).amin()  # of a rank without rows: 0
    metrics = {"entropy": entropy, "surprise/max": -least, "rows": len(mb)}
    return token_mean(loss, mb.mask, mb.total_tokens) - 0.01 * entropy, metrics


def sequence_loss(out, mb):
    loss = clipped_policy_loss(out.logprobs, mb.rollout_logprobs - 4, mb.advantages, mb.mask)
    return sequence_mean(loss, mb.mask, mb.total_sequences), {}


def value_loss(out, mb):
    returns = mb.advantages[:, None].expand(mb.mask.shape)
    loss = clipped_value_loss(out.values, torch.zeros_like(out.values), returns, mb.mask)
    return token_mean(loss, mb.mask, mb.total_tokens), {"value": token_mean(out.values, mb.mask, mb.total_tokens)}


@dataclass
class Case:
    model: str
    loss_fn: object = token_loss
    config: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    lora: bool = False
    first_group_has_all: bool = False


CHECKPOINTED = {"enable_gradient_checkpointing": True}
CASES = {
    "qwen2": Case("qwen2", config={"num_key_value_heads": 1}, options={"micro_batch_tokens": 40}),
    "qwen2_sequences": Case("qwen2", sequence_loss, options=CHECKPOINTED),
    "qwen2_values": Case("qwen2", value_loss, options={"micro_batch_tokens": 40}),
    "qwen2_fused": Case("qwen2", options={"use_fused_kernels": True, "share_prompts": False}),
    "qwen2_no_rows": Case("qwen2", options={"micro_batch_tokens": 40}, first_group_has_all=True),
    "qwen3_moe": Case("qwen3_moe", config=EXPERTS),
    "qwen2_5_vl": Case("qwen2_5_vl", options={"micro_batch_tokens": 110}),
    "qwen2_5_vl_lora": Case("qwen2_5_vl", sequence_loss, options=CHECKPOINTED, lora=True),
    "qwen3_vl": Case("qwen3_vl", sequence_loss, options={**CHECKPOINTED, "micro_batch_tokens": 110}),
}
SPLITS = {  # ranks, how many of them share their rows
    "alone": (1, 1, list(CASES)),
    "ulysses_2": (2, 2, [name for name in CASES if name != "qwen2_no_rows"]),
    "data_2_ulysses_2": (4, 2, ["qwen2", "qwen2_no_rows", "qwen2_5_vl", "qwen3_vl"]),
    "ulysses_4": (4, 4, ["qwen2", "qwen3_moe"]),
    "families": (2, 2, []),
}


ORDER = [5, 0, 8, 3, 1, 7, 2, 6, 4]  # answers to one prompt do not follow each other


def make_processor():
    return tiny_processor(tiny_tokenizer(["What digit is this?", "user assistant system"]))


def make_model(case, processor=None):
    if processor is None:
        return test_families.text_model(case.model, case.config)
    config = tiny_config(processor.tokenizer, hidden=32, vision_hidden=32)
    if case.model == "qwen3_vl":
        vision = {
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 14,
            "out_hidden_size": 32, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64,
        }  # fmt: skip
        rope = {**config.text_config.rope_parameters, "mrope_interleaved": True}
        text = {**test_families.BASE, "vocab_size": config.text_config.vocab_size, "rope_parameters": rope}
        ids = {name: value for name, value in config.to_dict().items() if name.endswith("token_id")}
        config = AutoConfig.for_model("qwen3_vl", **{**ids, "text_config": text, "vision_config": vision})
    return test_families.seeded(lambda: AutoModelForImageTextToText.from_config(config))


def make_rows(processor, chosen):
    """Rows of unequal lengths, in groups of one prompt; of a vision model's some have images."""
    if processor is not None:
        return make_batch(processor, rows=chosen)
    g = torch.Generator().manual_seed(0)
    samples = []
    for group, (length, answers) in enumerate(((9, 2), (5, 1), (11, 3), (1, 1), (14, 2))):
        start = prompt(torch.randint(3, 80, (length,), generator=g).tolist(), group_id=group)
        for _ in range(answers):
            answer = torch.randint(3, 80, (int(torch.randint(1, 9, (1,), generator=g)),), generator=g).tolist()
            samples.append(extend(start, answer, [-1.0] * len(answer)))
    advantages = torch.randn(len(samples), generator=g)
    return collate([samples[i] for i in chosen], advantages=advantages[chosen])


def make_case(case, size, processor=None, **options):
    model = make_model(case, processor)
    if case.lora:
        model = lora(model, 4, 8, exclude_modules=".*visual.*")
    value = case.loss_fn is value_loss
    return make_engine(
        "fsdp2",
        "value_model" if value else "language_model",
        model=with_value_head(model) if value else model,
        device="cpu",
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4),
        **{"ulysses_sequence_parallel_size": size, **case.options, **options},
    )


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def run(name, size, out, processor):
    """Three steps; the gradients of the first; logprobs and a plain forward on gathered weights before and after."""
    case = CASES[name]
    processor = processor if case.model.endswith("_vl") else None
    engine = make_case(case, size, processor)
    chosen = list(range(9))[engine.data_rank :: engine.data_world]
    if case.first_group_has_all:
        chosen = [] if engine.data_rank else list(range(9))
    batch = make_rows(processor, [ORDER[i] for i in chosen])
    outputs = {token_loss: ("logprobs", "entropy"), sequence_loss: ("logprobs",), value_loss: ("values",)}[case.loss_fn]
    results = {"rows": chosen, "scored": engine.infer_batch(batch, outputs[:1])[outputs[0]]}
    results["steps"] = [engine.train_batch(batch, case.loss_fn, outputs)]
    results["gradients"] = {n: whole(p.grad).clone() for n, p in engine.module.named_parameters() if p.grad is not None}
    if name == "qwen2":
        engine.save_checkpoint(out / "checkpoint", {"step": 1})
    results["steps"] += [engine.train_batch(batch, case.loss_fn, outputs) for _ in range(2)]
    results["parameters"] = dict(engine.get_per_tensor_param())
    with torch.no_grad(), engine.gathered() as module:
        results["gathered"] = module(input_ids=torch.arange(5, 40).view(1, -1)).logits
    results["total"] = engine.global_sum(len(batch)).item()
    torch.save(results, out / f"{name}.{dist.get_rank()}.pt")


def run_family(family, ulysses_size):
    """Largest errors of logprobs and of gradients, summed over the ranks, against one sequence at a time."""
    if family in test_families.VISION:
        (batch, weights), model = test_families.rows(family), test_families.vision_model(family)
    else:
        model = test_families.text_model(family, test_families.TEXT[family], "eager")
        batch, weights = test_families.rows()
    expected, expected_gradients = test_families.one_at_a_time(model, batch, weights)
    use_packed_attention(model, packed=True)
    ulysses = share_rows(model, ulysses_size, CPU, packed=True)
    inputs = pack(batch, position_spec(model.config), CPU, ulysses=ulysses)
    logits = model(**inputs.kwargs, use_cache=False).logits.flatten(0, 1)
    own = logits.log_softmax(-1).gather(1, inputs.targets[:, None])[:, 0]
    logprobs = inputs.scatter(gather(own, inputs.counts, ulysses))
    errors = [(logprobs.detach() - expected).abs().max().item()]
    came = test_families.gradients(model, (weights * logprobs).sum())
    for name, gradient in expected_gradients.items():
        total = came.get(name, torch.zeros_like(gradient))
        dist.all_reduce(total, group=ulysses.group)
        errors.append(((total - gradient).abs().max() / gradient.abs().max().clamp(min=1)).item())
    return errors


def refusals():
    """What is said on this rank to what cannot be done."""
    qwen2, rank = CASES["qwen2"], dist.get_rank()
    engine = make_case(qwen2, 2)
    attempts = {
        "world": lambda: make_case(qwen2, 3),
        "heads": lambda: make_case(Case("qwen2", config={"num_attention_heads": 3, "num_key_value_heads": 1}), 2),
        "rope": lambda: make_case(
            Case("qwen2", config={"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}), 2
        ),
        "padded": lambda: make_case(qwen2, 2, use_remove_padding=False),
        "rows": lambda: engine.train_batch(make_rows(None, [rank, 5]), token_loss, ("logprobs", "entropy")),
        "field": lambda: engine.infer_batch(make_rows(None, [0]).add(weight=torch.tensor([float(rank)]))),
        "size": lambda: engine.infer_batch(make_rows(None, [0, 1][: rank + 1])),
    }
    said = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except ValueError as error:
            said[name] = str(error)
    return said


def work(rank, split, out):
    torch.set_num_threads(1)
    world, size, names = SPLITS[split]
    out = out / split
    out.mkdir(exist_ok=True)
    store = dist.FileStore(f"{out}.store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    processor = make_processor()
    for name in names:
        run(name, size, out, processor)
    if not names:
        families = {family: run_family(family, size) for family in (*test_families.TEXT, *test_families.VISION)}
        (out / f"said.{rank}.json").write_text(json.dumps({"families": families, "refusals": refusals()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    for split in sys.argv[2:] or SPLITS:
        Path(sys.argv[1], f"{split}.store").unlink(missing_ok=True)
        # forked: the imports are paid for once
        torch.multiprocessing.start_processes(work, (split, Path(sys.argv[1])), SPLITS[split][0], start_method="fork")
