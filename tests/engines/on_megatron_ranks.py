"""Run by `test_megatron.py`: the same global batches with fsdp2 on one process and with Megatron in many layouts.

on_megatron_ranks.py OUT_DIR NAME...

One process imports everything and forks the ranks, because importing on each rank would take longer than its work.
"""

import gc
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from megatron.core import parallel_state

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "plan")]
from forked_ranks import fork_ranks  # noqa: E402
from isolated_cases import case as isolated  # noqa: E402
from one_gradient import (  # noqa: E402
    OUTPUTS,
    POLICY,
    VALUE,
    columns,
    full_tensor,
    topk,
    train,
    with_teacher,
)
from sent_bytes import Sent  # noqa: E402

from rlkit.data import append_response, collate, prompt_sample  # noqa: E402
from rlkit.engines import make_engine  # noqa: E402
from rlkit.engines.fsdp.fsdp2 import Fsdp2Engine  # noqa: E402
from rlkit.engines.megatron import engine as megatron_engine  # noqa: E402, F401
from rlkit.engines.megatron.optimizer import gather_state  # noqa: E402
from rlkit.engines.megatron.supported import ParallelDims  # noqa: E402
from rlkit.engines.megatron.weights import is_tied_copy, megatron_to_hf  # noqa: E402
from rlkit.engines.value_head import load_value_model, with_value_head  # noqa: E402
from rlkit.plan import megatron as plan  # noqa: E402
from rlkit.plan import megatron_links  # noqa: E402
from rlkit.vlm import load_model  # noqa: E402
from rlkit.vlm.checkpoint_weights import checkpoint_parameters  # noqa: E402

VISION, GROUP = ("vl", "shared-vl"), 4  # kinds of model with images; responses to each prompt of the "shared" kinds
ROWS, VOCABULARY, IMAGE, SUPPRESSED = 8, 95, 93, [40, 94]  # tensor ranks share 95 tokens as 48 and 47
VIDEO, IMAGE_KEYS = IMAGE - 1, ("pixel_values", "image_grid_thw")
TENSOR, PIPE, CONTEXT = {"tensor": 2}, {"pipeline": 2}, {"context": 2}
OFFLOAD = {"offload_between_phases": True}
SEQUENCE, EXPERT = {**TENSOR, "sequence_parallel": True}, {"expert": 2}
# ranks, model, which ranks have rows ("all", "split" or "empty": only one data-parallel rank), options
CASES = {
    "one": (1, "qwen2", "all", {}),
    "one-qwen3": (1, "qwen3", "all", {}),
    "one-llama": (1, "llama", "all", {"enable_gradient_checkpointing": True}),
    "tp2": (2, "qwen2", "all", TENSOR),
    "pp2": (2, "qwen2", "all", PIPE),
    "sp2-qwen3": (2, "qwen3", "all", SEQUENCE),
    "cp2": (2, "qwen2", "all", CONTEXT),
    "dp2-qwen3": (2, "qwen3", "empty", {}),
    "tp2-pp2": (4, "qwen2", "all", {**TENSOR, **PIPE}),
    "sp2-cp2-qwen3": (4, "qwen3", "all", {**SEQUENCE, **CONTEXT}),
    "pp2-dp2": (4, "qwen2", "empty", PIPE),
    "moe-one": (1, "moe", "all", {}),
    "moe-pp2-ep2": (4, "moe", "empty", {**PIPE, **EXPERT}),
    "moe-sp2-ep2-dp2": (4, "moe", "split", {**SEQUENCE, **EXPERT, **OFFLOAD}),
    "routed-one": (1, "routed", "all", {"enable_gradient_checkpointing": True}),
    "routed-pp2-ep2": (4, "routed", "empty", {**PIPE, **EXPERT, "enable_gradient_checkpointing": True}),
    "routed-sp2-ep2": (2, "routed", "all", {**SEQUENCE, **EXPERT}),
    "vl-one": (1, "vl", "all", {}),
    "vl-tp2": (2, "vl", "all", TENSOR),
    "vl-dp2": (2, "vl", "split", {}),
    "vl-cp2": (2, "vl", "all", CONTEXT),
    "vl-pp2": (2, "vl", "all", PIPE),
    "vl-sp2": (2, "vl", "all", SEQUENCE),
    "vl-tp2-pp2": (4, "vl", "split", {**TENSOR, **PIPE, **OFFLOAD}),
    "vl-sp2-pp2": (4, "vl", "all", {**SEQUENCE, **PIPE}),
    "shared-one": (1, "shared", "all", {}),
    "shared-sp2-cp2": (4, "shared", "all", {**SEQUENCE, **CONTEXT}),
    "shared-vl-cp2": (2, "shared-vl", "all", CONTEXT),
    "value-one": (1, "value", "all", {}),
    "value-dp2": (2, "value", "empty", {}),
    "value-tp2": (2, "value", "all", TENSOR),
    "value-pp2": (2, "value", "all", PIPE),
    "value-sp2": (2, "value", "all", SEQUENCE),
    "value-cp2": (2, "value", "all", CONTEXT),
    "value-tp2-pp2": (4, "value", "all", {**TENSOR, **PIPE}),
}
# the same, and the case whose checkpoint after the first step is resumed
RESUMED = {
    "same-layout": (2, "qwen2", "all", TENSOR, "tp2"),
    "more-ranks": (2, "qwen3", "split", OFFLOAD, "one-qwen3"),
    "from-fsdp2": (2, "qwen2", "all", PIPE, "fsdp2-qwen2"),
    "other-layout": (4, "qwen2", "split", SEQUENCE, "pp2"),
    "moe-from-fsdp2": (2, "moe", "all", {**SEQUENCE, **EXPERT}, "fsdp2-moe"),
}
# cases whose checkpoints the tests resume with the fsdp2 engine, in one process
TO_FSDP2 = ("tp2-pp2", "moe-pp2-ep2", "vl-sp2-pp2", "value-tp2-pp2")
SAVED = {*TO_FSDP2, "fsdp2-qwen3", *(source for *_, source in RESUMED.values())}
EXPORTED = ("fsdp2-qwen2", "tp2-pp2", "sp2-cp2-qwen3", "value-tp2-pp2", "moe-pp2-ep2", "vl-sp2-pp2")
REFERENCES = ("qwen2", "qwen3", "llama", "moe", "routed", "vl", "shared", "shared-vl", "value")
FAMILIES = {"qwen2": "Qwen2", "value": "Qwen2", "qwen3": "Qwen3", "shared": "Qwen3", "llama": "Llama"}
FAMILIES |= {"moe": "Qwen3Moe", "routed": "Qwen3Moe"}
SHORT = {"tensor": "TP", "pipeline": "PP", "context": "CP", "expert": "EP"}
SENT = {"sent-pp2": ("qwen3", PIPE), "sent-ep2": ("routed", EXPERT)}  # on two ranks
# all cases; later ones resume checkpoints of earlier ones
NAMES = [*(f"fsdp2-{kind}" for kind in REFERENCES), "errors", *CASES, *RESUMED, *SENT]


def compared():
    for ranks, kind, rows, options in CASES.values():
        parts = [f"{short} {options[name]}" for name, short in SHORT.items() if name in options]
        parts += [f"DP {ranks // math.prod(options.get(name, 1) for name in ('tensor', 'pipeline', 'context'))}"]
        layout = " x ".join(part for part in parts if part != "DP 1") or "1 process"
        layout += " + SP" if "sequence_parallel" in options else ""
        yield f"Megatron, {layout}", columns(losses_of(kind), has_images=kind in VISION, has_empty_rank=rows == "empty")


def losses_of(kind):
    return VALUE if kind == "value" else POLICY


def make_vision_model():
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        },
        vision_config={
            "depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32,
            "patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1],
        },
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=IMAGE - 2, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def make_model(kind):
    """A tiny model with random weights, also in biases and norms, so that no weight is exactly 0 or 1."""
    torch.manual_seed(0)
    model = make_vision_model() if kind in VISION else make_text_model(kind)
    if kind == "value":
        with_value_head(model)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


def make_text_model(kind):
    family = FAMILIES[kind]
    options = {"head_dim": 12} if family == "Qwen3" else {}
    if kind in ("moe", "routed"):
        options = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    if kind == "llama":
        options["rope_parameters"] = {
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }  # fmt: skip
    config = getattr(transformers, family + "Config")(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=kind == "qwen2", **options,
    )  # fmt: skip
    return getattr(transformers, family + "ForCausalLM")(config)


def make_batch(rows, kind="text"):
    """`rows` of eight rows of 3 to 40 random tokens with old logprobs and advantages.

    For a vision model the even rows begin with an image of random patches, and two odd ones with a video. In the
    "shared" kinds `GROUP` neighbours have the same prompt, and the same image.
    """
    draw = torch.Generator().manual_seed(1)
    samples, question = [], None
    for row in range(ROWS):
        start, length = 2 + 5 * row % 23, 1 + 7 * row % 18  # of the response
        tokens = torch.randint(0, IMAGE - 2, (start + length,), generator=draw)
        tokens = tokens.where(tokens != SUPPRESSED[0], 0).tolist()
        if kind.startswith("shared") and row % GROUP:
            samples.append(append_response(question, tokens[start:], [-1.0] * length))
            continue
        question = prompt_sample(tokens[:start])
        if kind in VISION and row % 4 != 3:
            question = with_medium(tokens[:start], row, draw)
        samples.append(append_response(question, tokens[start:], [-1.0] * length))
    advantages = torch.randn(ROWS, generator=draw)
    if kind == "routed":  # random experts for all but the last tokens
        samples = [replace(s, routed_experts=random_routing(len(s.token_ids) - 3, draw)) for s in samples]
    return collate([samples[i] for i in rows], advantages=advantages[rows])


def with_medium(tokens, row, draw):
    """A prompt that begins with an image or, in odd rows, with a video of two frames."""
    is_video, width = row % 2, 4
    height = 2 if is_video else 2 + row % 4
    token, pixels, grid = (VIDEO, "pixel_values_videos", "video_grid_thw") if is_video else (IMAGE, *IMAGE_KEYS)
    count = (1 + is_video) * height * width
    vision = {
        pixels: torch.randn(count * 4, 3 * 2 * 4 * 4, generator=draw),
        grid: torch.tensor([[1 + is_video, 2 * height, 2 * width]]),
        **({"second_per_grid_ts": torch.tensor([0.5])} if is_video else {}),
    }
    compact = [IMAGE - 2, token, *tokens]
    return prompt_sample([IMAGE - 2] + [token] * count + tokens, compact, vision=vision, placeholders={token: [count]})


def random_routing(tokens, draw):
    """[tokens, 2 layers, 2 of 4 experts]."""
    return torch.rand(tokens, 2, 4, generator=draw).argsort(-1)[..., :2].to(torch.int16)


def engine_for(backend, kind, model=None, **options):
    return make_engine(
        backend,
        "value_model" if kind == "value" else "language_model",
        model=make_model(kind) if model is None else model,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        micro_batch_tokens=48,
        max_grad_norm=0.5,
        **({} if kind == "value" else {"temperature": 1.3, "suppressed_token_ids": torch.tensor(SUPPRESSED)}),
        **({"router_replay": True} if kind == "routed" else {}),
        **options,
    )


def gradients(engine):
    """Clipped gradients under their Hugging Face names, on every rank."""
    if isinstance(engine, Fsdp2Engine):
        full = ((name, full_tensor(p.grad)) for name, p in engine.module.named_parameters())
        return dict(checkpoint_parameters(engine.base, full))
    found = {}
    for parameter, names in engine.parameters:
        full = gather_state(engine.distributed_optimizer, parameter, lambda tensors: tensors["param"].grad)
        if not is_tied_copy(parameter):
            found |= dict(zip(names, megatron_to_hf(full, len(names), parameter, engine.megatron_config), strict=True))
    stages = [None] * dist.get_world_size()
    dist.all_gather_object(stages, found)
    return {name: tensor for stage in stages for name, tensor in stage.items()}


def run(engine, kind, rows, out):
    """Four steps; weights and scores at the start, metrics and gradients of the steps, weights at the end."""
    batch, losses = make_batch(rows, kind), losses_of(kind)
    second = (torch.zeros(()), torch.zeros(())) if kind == "value" else topk(engine, with_teacher(batch))
    results = {"imported": {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}}
    results |= {"scores": engine.infer_batch(batch, OUTPUTS[losses]), "steps": [], "gradients": []}
    results["topk"] = engine.global_sum(torch.stack([x.sum() for x in second]))
    for step, loss_fn in enumerate(losses):
        results["steps"].append(train(engine, batch, loss_fn, losses))
        results["gradients"].append(gradients(engine))
        if step == 0 and out.name in SAVED:
            engine.save_checkpoint(out / "checkpoint", {"step": 1})
        if step == 2:
            results["parameters"] = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param(20_000)}
    if out.name in EXPORTED:
        engine.export_hf(out / "export")
    results["exported"] = dict(engine.get_per_tensor_param())
    if out.name in EXPORTED:
        results["for_sampler"] = dict(engine.get_per_tensor_param(20_000, torch.bfloat16))
    if dist.get_rank() == 0:
        torch.save(results, out / "results.pt")


def resume(engine, kind, rows, source, out):
    """The three steps after a checkpoint."""
    assert engine.load_checkpoint(source) == {"step": 1}
    batch, losses = with_teacher(make_batch(rows, kind)), losses_of(kind)
    steps = [train(engine, batch, loss_fn, losses) for loss_fn in losses[1:]]
    exported = dict(engine.get_per_tensor_param())
    if dist.get_rank() == 0:
        torch.save({"steps": steps, "exported": exported}, out / "results.pt")


def errors():
    """The errors of each rank for an impossible layout and for different rows; no rank waits for another."""
    messages = []
    for options in ({"tensor": 4}, {"pipeline": 4}, {"context": 3}):
        try:
            engine_for("megatron", "qwen2", **options)
        except ValueError as error:
            messages.append(str(error))
    engine = make_engine("megatron", model=make_model("qwen2"), **TENSOR)
    try:
        engine.infer_batch(make_batch([int(dist.get_rank() == 3)]))
    except ValueError as error:
        messages.append(str(error))
    parallel_state.destroy_model_parallel()
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, messages)
    return ranks


def sent_and_planned(kind, model, options):
    """Bytes that each rank sends in a training step in bfloat16, by kind of call, and the plan of them.

    Half of the experts of a token are on each rank.
    """
    engine = engine_for("megatron", kind, model, compute_dtype=torch.bfloat16, **options)
    prompt, response, prompts = 9, 7, ROWS // engine.data_parallel_size
    draw = torch.Generator().manual_seed(engine.data_parallel_rank)
    tokens = torch.randint(0, SUPPRESSED[0], (prompts, prompt + response), generator=draw).tolist()
    samples = [append_response(prompt_sample(row[:prompt]), row[prompt:], [-1.0] * response) for row in tokens]
    if kind == "routed":  # experts 0 and 1 are on the first rank, 2 and 3 on the second
        one_each = torch.tensor([0, 2]) + torch.randint(0, 2, (prompts, prompt + response, 2, 2), generator=draw)
        samples = [replace(s, routed_experts=x.to(torch.int16)) for s, x in zip(samples, one_each, strict=True)]
    batch, losses = collate(samples, advantages=torch.ones(prompts)), losses_of(kind)
    with Sent() as sent:
        engine.train_batch(batch, losses[0], OUTPUTS[losses])
    dims, tokens = ParallelDims(**options), prompts * (prompt + response)
    groups = megatron_links.groups(dims, 2, 2)
    activations = megatron_links.activation_link_bytes(model.config, dims, groups, tokens, forwards=1, backwards=1)
    states = megatron_links.update_link_bytes(plan.model_size(model, dims, 2), groups)
    found = {"sent": sent.by_call, "activations": activations.machine, "states": states.machine}
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    return ranks


def rows_of(which, engine):
    rows = list(range(ROWS))
    if which == "all":
        return rows
    if which == "split":
        return rows[engine.data_parallel_rank :: engine.data_parallel_size]
    return rows if engine.data_parallel_rank == 0 else []


def ranks_of(name):
    if name == "errors":
        return 4
    if name in SENT:
        return 2
    return 1 if name.startswith("fsdp2-") else {**CASES, **RESUMED}[name][0]


def run_case(name, out):
    if name == "errors":
        messages = errors()
        if dist.get_rank() == 0:
            torch.save(messages, out / "errors.pt")
        return
    (out / name).mkdir(exist_ok=True)
    if name.startswith("fsdp2-"):
        kind = name.removeprefix("fsdp2-")
        engine = engine_for("fsdp2", kind, share_prompts=False, keep_gradients=True)
        return run(engine, kind, list(range(ROWS)), out / name)
    if name in SENT:
        kind, options = SENT[name]
        ranks = sent_and_planned(kind, load_model(str(out / "models" / kind), on_meta=True), options)
        if dist.get_rank() == 0:
            torch.save(ranks, out / name / "results.pt")
        return parallel_state.destroy_model_parallel()
    _, kind, which, options, *source = {**CASES, **RESUMED}[name]
    load = load_value_model if kind == "value" else load_model
    model = load(str(out / "models" / kind), on_meta=True)
    engine = engine_for("megatron", kind, model, keep_gradients=not source, **options)
    rows = rows_of(which, engine)
    if source:
        resume(engine, kind, rows, out / source[0] / "checkpoint", out / name)
    else:
        run(engine, kind, rows, out / name)
    parallel_state.destroy_model_parallel()


def on_rank(out, names):
    for name in names:  # a case makes up to twenty groups, each of which has a thread that wakes up every 10 ms
        store = f"file://{out}/store.{name}.{len(names)}"
        rank, world = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE"))
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
        with isolated(out, name):
            run_case(name, out)
        dist.destroy_process_group()
        gc.collect()  # the engine refers to itself, and to its groups


def main(out, *names):
    for kind in REFERENCES:
        model = make_model(kind)
        model.save_pretrained(Path(out) / "models" / kind)  # each rank reads its part of these files
        torch.optim.AdamW(model.parameters())  # import here, and not on every rank, what is imported on first use
    for world in (1, 2, 4):
        if chosen := [name for name in names if ranks_of(name) == world]:
            fork_ranks(on_rank, world, Path(out), chosen)


if __name__ == "__main__":
    main(*sys.argv[1:])
