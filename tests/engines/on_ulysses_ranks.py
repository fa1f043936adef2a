"""Run by `test_ulysses.py`: the same global batches on one process, and on two and four that share rows or matrices.

on_ulysses_ranks.py OUT_DIR NAME...
"""

import json
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForImageTextToText

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import family_configs  # noqa: E402
import test_families  # noqa: E402
from forked_ranks import fork_ranks  # noqa: E402
from isolated_cases import case as isolated  # noqa: E402
from one_gradient import OUTPUTS, POLICY, VALUE, columns, full_tensor, topk, train, with_teacher  # noqa: E402
from rows import make_batch  # noqa: E402

from rlkit.data import append_response, collate  # noqa: E402
from rlkit.data.samples import prompt_sample  # noqa: E402
from rlkit.engines import make_engine  # noqa: E402
from rlkit.engines.balance import rebalance_across_ranks  # noqa: E402
from rlkit.engines.packing.attention import use_packed_attention  # noqa: E402
from rlkit.engines.packing.inputs import prepare_model_inputs  # noqa: E402
from rlkit.engines.packing.ulysses import apply_ulysses, gather_outputs  # noqa: E402
from rlkit.engines.value_head import with_value_head  # noqa: E402
from rlkit.vlm import load_model, lora  # noqa: E402
from rlkit.vlm.families import VISION_EXPERT_FAMILIES  # noqa: E402
from rlkit.vlm.inputs import position_spec  # noqa: E402
from rlkit.vlm.tiny import tiny_config, tiny_processor, tiny_tokenizer  # noqa: E402

CPU = torch.device("cpu")
EXPERTS = {**family_configs.EXPERTS, "decoder_sparse_step": 1}
LONG_ROPE = {
    "original_max_position_embeddings": 12,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 5.0],
        "original_max_position_embeddings": 12,
    },
}  # fmt: skip


@dataclass
class Case:
    model: str
    losses: tuple = POLICY
    config: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    lora: bool = False
    rows_on_first_group: bool = False  # the other model-parallel groups have no rows
    rows: dict = field(default_factory=dict)  # options of `make_batch`, for a vision model


CHECKPOINTED = {"enable_gradient_checkpointing": True}
CASES = {
    "qwen2": Case("qwen2", config={"num_key_value_heads": 1}, options={"micro_batch_tokens": 40}),
    "qwen2_values": Case("qwen2", VALUE, options={"micro_batch_tokens": 40}),
    "qwen2_fused": Case("qwen2", options={"use_fused_kernels": True, "share_prompts": False}),
    "qwen2_no_rows": Case("qwen2", options={"micro_batch_tokens": 40}, rows_on_first_group=True),
    "qwen3": Case("qwen3", options={"micro_batch_tokens": 40}),
    "qwen3_moe": Case("qwen3_moe", config=EXPERTS),
    "qwen3_next": Case(  # recurrent layers
        "qwen3_next", config=test_families.TEXT["qwen3_next"], options={**CHECKPOINTED, "micro_batch_tokens": 40}
    ),
    "phi3_longrope": Case(  # long factors, also on a rank whose positions are below 12
        "phi3", config=LONG_ROPE, options={"longest_sequence": 40, "micro_batch_tokens": 40}
    ),
    "qwen2_5_vl": Case("qwen2_5_vl", options={"micro_batch_tokens": 110}),
    "qwen2_5_vl_no_rows": Case("qwen2_5_vl", options={"micro_batch_tokens": 110}, rows_on_first_group=True),
    "qwen2_5_vl_videos": Case("qwen2_5_vl", rows={"videos": (1,)}),  # one of two ranks has the video
    "qwen2_5_vl_lora": Case("qwen2_5_vl", options=CHECKPOINTED, lora=True),
    "qwen3_vl": Case("qwen3_vl", options={**CHECKPOINTED, "micro_batch_tokens": 110}),
}
SHALLOW = {"num_key_value_heads": 1, "num_hidden_layers": 1}
TENSOR = {"tensor": 2}
SHARED, HALVES = {"ulysses_sequence_parallel_size": 2}, {"fsdp_size": 2}
SPLITS = {  # ranks, the engine's options, cases
    "1 process": (1, {}, list(CASES)),
    "Ulysses 2": (2, SHARED, [name for name in CASES if "no_rows" not in name and name != "qwen3"]),
    "TP 2": (2, TENSOR, ["qwen2_values", "qwen3", "qwen2_5_vl"]),
    "DP 2 x TP 2": (4, TENSOR, ["qwen2_values", "qwen2_no_rows", "qwen3", "qwen2_5_vl"]),
    "DP 2": (2, {}, ["qwen2_no_rows", "qwen2_5_vl_videos"]),
    "DP 2 x Ulysses 2": (4, SHARED, ["qwen2", "qwen2_values", "qwen2_no_rows", "qwen2_5_vl", "qwen2_5_vl_no_rows"]),
    "Ulysses 4": (4, {"ulysses_sequence_parallel_size": 4}, ["qwen3_moe"]),
    "2 replicas x 2 shards": (4, HALVES, ["qwen2_values", "qwen2_no_rows", "qwen2_5_vl"]),
    "2 replicas x 2 shards, Ulysses 2": (4, {**SHARED, **HALVES}, ["qwen2"]),
}
IN_SHARDS = ("DP 2 x TP 2",)  # each rank reads its part of the weights; in the other layouts it has all of them first
NOT_SHARED = {*test_families.REFUSED, *VISION_EXPERT_FAMILIES}
FAMILIES = [name for name in [*test_families.TEXT, *test_families.VISION] if name not in NOT_SHARED]
ALONE = {}  # by family, what `one_by_one` gives, made before ranks are forked: once, and not on every rank
# all cases: one for each layout and model, each family on two ranks, and the errors
NAMES = [f"{split}/{name}" for split, (*_, names) in SPLITS.items() for name in names]
NAMES += [*(f"family/{family}" for family in FAMILIES), "errors", "rows_of_the_last_rank"]


def compared():
    for layout, (*_, names) in SPLITS.items():
        for case in (CASES[name] for name in names if layout != "1 process"):
            yield layout, columns(case.losses, has_images=is_vision(case), has_empty_rank=case.rows_on_first_group)


def is_vision(case):
    return case.model.endswith("_vl")


ORDER = [5, 0, 8, 3, 1, 7, 2, 6, 4]  # responses to one prompt are not neighbours


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


def make_rows(processor, chosen, more=None):
    """Rows of unequal lengths, in groups of one prompt; for a vision model some have images."""
    if processor is not None:
        return make_batch(processor, rows=chosen, **(more or {}))
    g = torch.Generator().manual_seed(0)
    samples = []
    for group, (length, responses) in enumerate(((9, 2), (5, 1), (11, 3), (1, 1), (14, 2))):
        start = prompt_sample(torch.randint(3, 80, (length,), generator=g).tolist(), group_id=group)
        for _ in range(responses):
            response = torch.randint(3, 80, (int(torch.randint(1, 9, (1,), generator=g)),), generator=g).tolist()
            samples.append(append_response(start, response, [-1.0] * len(response)))
    advantages = torch.randn(len(samples), generator=g)
    return collate([samples[i] for i in chosen], advantages=advantages[chosen])


def make_case(case, processor=None, shards=None, **options):
    """An engine. With a folder `shards` the model is saved there, and each rank reads its part of the files."""
    model = make_model(case, processor)
    if shards is not None:
        if dist.get_rank() == 0:
            model.save_pretrained(shards)
        dist.barrier()
        model = load_model(str(shards), on_meta=True)
    if case.lora:
        model = lora(model, 4, 8)
    is_value = case.losses is VALUE
    return make_engine(
        "fsdp2",
        "value_model" if is_value else "language_model",
        model=with_value_head(model) if is_value else model,
        device="cpu",
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4, fused=True),  # as recipes on GPUs
        keep_gradients=True,
        **{**case.options, **options},
    )


def run(name, split, out, processor):
    """Scores at the start, four steps with their gradients, and a plain forward on gathered weights."""
    case = CASES[name]
    shards = out / f"{name}.model" if split in IN_SHARDS else None
    engine = make_case(case, processor if is_vision(case) else None, shards, **SPLITS[split][1])
    chosen = list(range(9))[engine.data_parallel_rank :: engine.data_parallel_size]
    if case.rows_on_first_group:
        chosen = [] if engine.data_parallel_rank else list(range(9))
    batch = make_rows(processor if is_vision(case) else None, [ORDER[i] for i in chosen], case.rows)
    outputs = OUTPUTS[case.losses]
    results = {"rows": chosen, "scores": engine.infer_batch(batch, outputs[:1])[outputs[0]]}
    if case.losses is POLICY:
        results["topk"] = topk(engine, with_teacher(batch))
    results |= {"steps": [], "gradients": []}
    for step, loss_fn in enumerate(case.losses):
        results["steps"].append(train(engine, batch, loss_fn, case.losses))
        named = engine.module.named_parameters()
        results["gradients"].append({n: full_tensor(p.grad).clone() for n, p in named if p.grad is not None})
        if name in ("qwen2", "qwen3") and step == 0:
            engine.save_checkpoint(out / f"{name}.checkpoint", {"step": 1})
        if step == 2:
            results["parameters"] = {n: x.clone() for n, x in engine.get_per_tensor_param(bucket_bytes=20_000)}
            with torch.no_grad(), engine.gathered() as module:
                results["gathered"] = module(input_ids=torch.arange(5, 40).view(1, -1)).logits
    if case.rows_on_first_group:
        rebalanced = rebalance_across_ranks(batch, engine.data_parallel_group)
        rows = [row[:length] for row, length in zip(rebalanced.tokens.tolist(), rebalanced.lengths, strict=True)]
        score = engine.infer_batch(rebalanced, outputs[:1])[outputs[0]].sum().item()
        results["rebalanced"] = engine.data_parallel_rank, rows, score
    results["total"] = engine.global_sum(len(batch)).item()
    torch.save(results, out / f"{name}.{dist.get_rank()}.pt")


def with_a_sequence_as_long_as_a_part():
    """Two ranks have 8 tokens each; the second sequence has 8, too, which both share."""
    samples = [append_response(prompt_sample([i]), [*range(10, 9 + i)], [-1.0] * (i - 1)) for i in (3, 8, 5)]
    batch = collate(samples)
    return batch, torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(0))


def one_by_one(family):
    """A family's model, rows and weights, and their logprobs and gradients, one sequence at a time on one rank."""
    if family in test_families.VISION:
        (batch, weights), model = test_families.rows(family), test_families.vision_model(family)
    else:
        model = test_families.text_model(family, test_families.TEXT[family], "eager")
        batch, weights = test_families.rows()
        # with all rows, no prompt would be on another rank than its responses
        batch = batch.select(range(1, len(batch)))
        weights = weights[1:, : batch.tokens.shape[1]]
    if family == "glm_moe_dsa":  # which hands choices of tokens from layer to layer
        batch, weights = with_a_sequence_as_long_as_a_part()
    return model, batch, weights, *test_families.one_at_a_time(model, batch, weights)


def run_family(family, ulysses_size):
    """The largest errors of logprobs and of gradients summed over ranks, compared with one sequence at a time."""
    model, batch, weights, expected, expected_gradients = ALONE.pop(family, None) or one_by_one(family)
    use_packed_attention(model, packed=True)
    ulysses = apply_ulysses(model, ulysses_size, CPU, packed=True)
    inputs = prepare_model_inputs(batch, position_spec(model.config), CPU, ulysses=ulysses)
    logits = inputs.select_outputs(model(**inputs.kwargs, use_cache=False).logits)
    local = logits.log_softmax(-1).gather(1, inputs.targets[:, None])[:, 0]
    logprobs = inputs.scatter(gather_outputs(local, inputs.outputs_per_rank, ulysses))
    errors = [(logprobs.detach() - expected).abs().max().item()]
    gradients = test_families.gradients(model, (weights * logprobs).sum())
    for name, gradient in expected_gradients.items():
        total = gradients.get(name, torch.zeros_like(gradient))
        dist.all_reduce(total, group=ulysses.group)
        errors.append(((total - gradient).abs().max() / gradient.abs().max().clamp(min=1)).item())
    return errors


def damage(checkpoint, out):
    """Copy a checkpoint without a shard, with half of one, with wrong bytes in one, and with wrong metadata."""
    if dist.get_rank() == 0:
        for name in ("missing", "half", "corrupt", "no_metadata"):
            shutil.copytree(checkpoint, out / name)
            file = out / name / (".metadata" if name == "no_metadata" else "__1_0.distcp")
            size = file.stat().st_size
            file.write_bytes(file.read_bytes()[: size // 2] + b"x" * (size - size // 2) * (name != "half"))
        (out / "missing" / "__1_0.distcp").unlink()
    dist.barrier()


def errors(out):
    """The errors of this rank for everything that is not supported."""
    qwen2, rank = CASES["qwen2"], dist.get_rank()
    saved = out / "Ulysses 2" / "qwen2.checkpoint"
    damage(saved, out)
    engine = make_case(qwen2, **SHARED)
    attempts = {
        "fsdp_size": lambda: make_case(qwen2, fsdp_size=3),
        "tensor": lambda: make_case(qwen2, tensor=3),
        "key_value": lambda: make_case(qwen2, **TENSOR),
        "experts": lambda: make_case(CASES["qwen3_moe"], **TENSOR),
        "adapters": lambda: make_case(Case("qwen3", lora=True), **TENSOR),
        "plan": lambda: make_case(Case("gpt2"), **TENSOR),
        "both": lambda: make_case(qwen2, **TENSOR, **HALVES),
        "world": lambda: make_case(qwen2, ulysses_sequence_parallel_size=3),
        "heads": lambda: make_case(
            Case("qwen2", config={"num_attention_heads": 3, "num_key_value_heads": 1}), **SHARED
        ),
        "rope": lambda: make_case(
            Case("qwen2", config={"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}), **SHARED
        ),
        "recurrent_tensor": lambda: make_case(Case("lfm2", config=test_families.TEXT["lfm2"]), **TENSOR),
        "sparse_tensor": lambda: make_case(Case("gemma3n_text", config=test_families.TEXT["gemma3n_text"]), **TENSOR),
        "image_experts": lambda: apply_ulysses(test_families.vision_model("ernie4_5_vl_moe"), 2, CPU, packed=True),
        "padded": lambda: make_case(qwen2, **SHARED, use_remove_padding=False),
        "rows": lambda: engine.train_batch(make_rows(None, [rank, 5]), POLICY[0], OUTPUTS[POLICY]),
        "field": lambda: engine.infer_batch(make_rows(None, [0]).add(weight=torch.tensor([float(rank)]))),
        "size": lambda: engine.infer_batch(make_rows(None, [0, 1][: rank + 1])),
        "wider": lambda: make_case(replace(qwen2, config={"num_key_value_heads": 2})).load_checkpoint(saved),
        "shallower": lambda: make_case(replace(qwen2, config=SHALLOW)).load_checkpoint(saved),
        "deeper": lambda: make_case(replace(qwen2, config={**SHALLOW, "num_hidden_layers": 3})).load_checkpoint(saved),
        **{
            name: partial(engine.load_checkpoint, out / name)
            for name in ("missing", "half", "corrupt", "no_metadata", "none")
        },
    }
    messages = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except ValueError as error:
            messages[name] = str(error).replace(str(out), "OUT")
    return messages


def rows_of_the_last_rank():
    """This rank's tokens after rebalancing; before, the last rank has two groups and the others none."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    groups = [prompt_sample([group] * length, group_id=group) for group, length in ((1, 5), (2, 3))] if is_last else []
    return rebalance_across_ranks(collate([row for row in groups for _ in range(2)])).tokens.tolist()


def ranks_of(name):
    layout = name.partition("/")[0]
    return SPLITS[layout][0] if layout in SPLITS else 4 if name == "rows_of_the_last_rank" else 2


def run_case(name, out, processor):
    split, _, case = name.partition("/")
    if split in SPLITS:
        (out / split).mkdir(exist_ok=True)
        return run(case, split, out / split, processor)
    if name == "rows_of_the_last_rank":
        result = rows_of_the_last_rank()
    else:
        result = run_family(case, dist.get_world_size()) if split == "family" else errors(out)
    (out / f"{case or name}.{dist.get_rank()}.json").write_text(json.dumps(result))


def on_rank(out, names, processor):
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    for name in names:
        with isolated(out, name):
            run_case(name, out, processor)
    dist.destroy_process_group()


def main(out, *names):
    import peft  # noqa: F401  (here, and not on every rank, what is imported on first use)

    from rlkit.engines.fsdp import fsdp2  # noqa: F401

    processor = make_processor()
    for case in CASES.values():
        torch.optim.AdamW(make_model(case, processor if is_vision(case) else None).parameters())
    for family in FAMILIES:
        if f"family/{family}" in names:
            with suppress(Exception):  # the case of this family raises it again
                ALONE[family] = one_by_one(family)
    for world in (1, 2, 4):
        if chosen := [name for name in names if ranks_of(name) == world]:
            fork_ranks(on_rank, world, Path(out), chosen, processor)


if __name__ == "__main__":
    main(*sys.argv[1:])
