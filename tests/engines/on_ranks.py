"""Run by `test_ranks.py`: the same global batch on one process and on two, with the fsdp2 and fsdp1 engines.

on_ranks.py MODEL_DIR BIG_MODEL_DIR OUT_DIR NAME...

One process imports everything and forks the ranks, because importing on each rank would take longer than its work. The
ranks have the environment variables that torchrun sets, except for the process without a launcher.
"""

import copy
import json
import os
import socket
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.debug import CommDebugMode

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import test_families  # noqa: E402
from family_configs import BASE, TEXT, VISION  # noqa: E402
from isolated_cases import case as isolated  # noqa: E402
from memory import peak  # noqa: E402
from one_gradient import OUTPUTS, POLICY, VALUE, columns, full_tensor, sft_loss, topk, train, with_teacher  # noqa: E402
from rows import make_batch  # noqa: E402

from rlkit.data import append_response, collate, prompt_sample  # noqa: E402
from rlkit.engines import make_engine  # noqa: E402
from rlkit.engines.balance import rebalance_across_ranks  # noqa: E402
from rlkit.engines.distributed import init_distributed  # noqa: E402
from rlkit.engines.fsdp import fsdp1, fsdp1_loading, fsdp2  # noqa: E402, F401
from rlkit.engines.value_head import load_value_model  # noqa: E402
from rlkit.runs.sampling import PolicySampler  # noqa: E402
from rlkit.vlm import freeze, load_model, load_processor, lora, merged_parameters, quantize_base, vision_tower_pattern  # noqa: E402

fsdp1_loading.ELEMENTS_AT_ONCE = 1000  # so that the parameters of a tiny model take several exchanges
ROWS = 9  # row 3 is text only, the others have images


@dataclass
class Case:
    layout: str
    reference: str  # the case of one process that it is compared with
    rows: list = field(default_factory=lambda: [slice(0, None, 2), slice(1, None, 2)])  # of each rank
    losses: tuple = POLICY
    budget: int = 16384
    on_meta: bool = False  # each rank reads only its part of the weights
    backend: str = "fsdp2"
    fused: bool | None = None  # AdamW
    rebalance: bool = False
    offload: bool = False  # weights and optimizer state to the host between calls

    @property
    def has_empty_rank(self):
        return any(rows == slice(0) for rows in self.rows)


CONVERTED = ["kimi_linear", "kimi_k25", "ernie4_5_vl_moe", "qwen3_vl_moe", "qwen3_vl_moe_transposed"]
ALL, NONE = slice(None), slice(0)
ALONE = {
    "one_process": Case("1 process", "one_process", [ALL]),
    "row_by_row": Case("1 process, micro-batches of one row", "one_process", [ALL], budget=1),
    "micro_batches": Case("1 process, micro-batches of a few rows", "one_process", [ALL], budget=120),
    "frozen": Case("1 process", "frozen", [ALL], budget=120),
    "projector": Case("1 process", "projector", [[0, 1, 2, 4, 5, 6]], budget=120),
    "lora": Case("1 process", "lora", [ALL], budget=120),
    "nf4": Case("1 process", "nf4", [ALL], budget=120),
    "value": Case("1 process", "value", [ALL], VALUE),
    "value_row_by_row": Case("1 process, micro-batches of one row", "value", [ALL], VALUE, budget=1),
    "value_micro_batches": Case("1 process, micro-batches of a few rows", "value", [ALL], VALUE, budget=120),
    "fsdp1": Case("FSDP1, 1 process", "one_process", [ALL], budget=120, backend="fsdp1"),
}
LAUNCHED = {"torchrun": Case("1 process", "one_process", [ALL])}
TWO = {
    "data_2": Case("DP 2", "one_process", budget=120),
    "data_2_frozen": Case("DP 2", "frozen", budget=120),
    "data_2_projector": Case("DP 2", "projector", [[0, 2, 5], [1, 4, 6]], budget=120),
    "data_2_lora": Case("DP 2", "lora", budget=120, offload=True),
    "data_2_nf4": Case("DP 2", "nf4", budget=120),
    "data_2_nf4_on_meta": Case("DP 2", "nf4", budget=120, on_meta=True, offload=True),
    "text_rank": Case("DP 2", "one_process", [[0, 1, 2, 4, 5, 6, 7, 8], [3]], budget=120),
    "empty_rank": Case("DP 2", "one_process", [ALL, NONE], fused=True),
    "rebalanced": Case("DP 2", "one_process", [ALL, NONE], budget=120, rebalance=True),
    "data_2_on_meta": Case("DP 2", "one_process", budget=120, on_meta=True),
    "data_2_value": Case("DP 2", "value", losses=VALUE, budget=120, on_meta=True, offload=True),
    "value_empty_rank": Case("DP 2", "value", [ALL, NONE], VALUE, budget=120),
    "fsdp1_data_2": Case("FSDP1, DP 2", "one_process", budget=120, backend="fsdp1"),
    "fsdp1_frozen": Case(
        "FSDP1, DP 2", "frozen", [[0, 1, 2, 4, 5, 6, 7, 8], [3]], budget=120, on_meta=True, backend="fsdp1"
    ),
    "fsdp1_value": Case("FSDP1, DP 2", "value", [ALL, NONE], VALUE, budget=120, on_meta=True, backend="fsdp1"),
}
CASES = {**ALONE, **LAUNCHED, **TWO}
# all cases by the number of ranks (0: without a launcher); later ones load checkpoints of earlier ones
NAMES = {
    0: [*ALONE],
    1: [*LAUNCHED, "killed"],
    2: [
        "loading",
        "converted",
        *TWO,
        "rebalancing",
        "experts",
        "sent",
        "adapted",
        "resumed.fsdp2",
        "resumed.fsdp1",
        "exported.fsdp2",
        "exported.fsdp1",
    ],
}


def compared():
    for case in (case for name, case in CASES.items() if name != case.reference):
        yield case.layout, columns(case.losses, has_images=True, has_empty_rank=case.has_empty_rank)


@contextmanager
def parameters_with_gradients(engine):
    """The module's named parameters; FSDP1 gathers parameters and gradients within a context."""
    if isinstance(engine.module, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(engine.module, writeback=False, with_grads=True):
            yield [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    else:
        yield engine.module.named_parameters()


def run(model_dir, out, name):
    """Four steps: record their gradients, save a checkpoint after the second, and the parameters after the third."""
    case, processor = CASES[name], load_processor(model_dir)
    is_value = case.losses is VALUE
    model = (load_value_model if is_value else load_model)(model_dir, on_meta=case.on_meta)
    if case.reference == "frozen":
        freeze(model, vision_tower_pattern(model))
    if case.reference == "projector":
        freeze(model, r"language_model|lm_head|visual\.blocks")
    if case.reference in ("lora", "nf4"):
        torch.manual_seed(0)
        model = lora(model, 4, 8)
    if case.reference == "nf4":
        quantize_base(model)
    engine = make_engine(
        case.backend,
        "value_model" if is_value else "language_model",
        model=model,
        processor=processor,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4, fused=case.fused),
        micro_batch_tokens=case.budget,
        keep_gradients=True,
        **({"offload_between_phases": True} if case.offload else {}),
    )
    out.mkdir(parents=True, exist_ok=True)
    rows = case.rows[dist.get_rank()]
    batch = make_batch(processor, rows=list(range(ROWS))[rows] if isinstance(rows, slice) else rows)
    batch = batch if is_value else with_teacher(batch)
    batch = rebalance_across_ranks(batch, engine.data_parallel_group) if case.rebalance else batch
    outputs, steps, gradients = OUTPUTS[case.losses], [], []
    for step, loss_fn in enumerate(case.losses):
        steps.append(train(engine, batch, loss_fn, case.losses))
        with parameters_with_gradients(engine) as named:
            gradients.append({n: full_tensor(p.grad).clone() for n, p in named if p.grad is not None})
        if step == 1:
            engine.save_checkpoint(out / "checkpoint", {"step": 2})
        if step == 2:
            parameters = {n: x.clone() for n, x in engine.get_per_tensor_param(bucket_bytes=200_000)}
    scores = engine.infer_batch(batch, outputs[:1])[outputs[0]]
    scores = scores if is_value else torch.stack([scores, *topk(engine, batch)])
    total = engine.global_sum(scores.sum()).item()
    if dist.get_rank() == 0:
        torch.save({"gradients": gradients, "parameters": parameters}, out / "tensors.pt")
        (out / "steps.json").write_text(json.dumps({"steps": steps, "total": total}))


def resume(model_dir, out, backend):
    """The last two steps again, from the checkpoint that one process saved after the second step."""
    processor = load_processor(model_dir)
    adamw = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)
    offload = {"offload_between_phases": True} if backend == "fsdp2" else {}
    engine = make_engine(backend, model=load_model(model_dir), optimizer=adamw, **offload)
    engine.load_checkpoint(out / "one_process" / "checkpoint")
    batch = with_teacher(make_batch(processor, rows=list(range(ROWS))[dist.get_rank() :: dist.get_world_size()]))
    steps = [train(engine, batch, loss_fn, POLICY) for loss_fn in POLICY[2:]]
    (out / f"resumed.{backend}.{dist.get_rank()}.json").write_text(json.dumps(steps))


def export_buffers(out, backend):
    """A mixture of experts whose router has a buffer, as it is sent to a sampler and as it is exported."""
    config = transformers.AutoConfig.for_model("glm4_moe", **{**BASE, **TEXT["glm4_moe"]})
    engine = make_engine(backend, model=transformers.AutoModelForCausalLM.from_config(config))
    engine.export_hf(out / f"exported.{backend}")
    names = [name for name, _ in engine.get_per_tensor_param()]
    (out / f"exported.{backend}.{dist.get_rank()}.json").write_text(json.dumps(names))


class Receiver:
    """A sampling back end that keeps the weights it is sent."""

    weight_dtype, generate = torch.bfloat16, None

    def update_weights(self, weights):
        self.received = dict(weights)


def send(model_dir, out):
    """The weights that a recipe sends, the same gathered one by one, and the number of collectives of both."""
    engine, receiver = make_engine("fsdp2", model=load_model(model_dir)), Receiver()
    cfg, task = SimpleNamespace(reward_threads=0), SimpleNamespace(reward=None)
    sampler = PolicySampler(cfg, None, task, None, engine, receiver)
    with CommDebugMode() as in_buckets:
        sampler.send_weights(receiver)
    with CommDebugMode() as one_by_one:
        weights = dict(engine.get_per_tensor_param(0, torch.bfloat16))
    counts = [counted.get_total_counts() for counted in (in_buckets, one_by_one)]
    torch.save((receiver.received, weights, counts), out / f"sent.{dist.get_rank()}.pt")


def send_adapted(out):
    """Weights with adapters for a sampler in bfloat16, the bytes that were gathered, and what peft merges.

    Ranks have two and one of three experts. GPT-2 has transposed matrices. Base weights are in float32 or bfloat16.
    """
    found, half = [], torch.bfloat16
    for family, more in (("qwen3_moe", {"num_experts": 3}), ("gpt2", {}), ("qwen3_moe", {"dtype": half})):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(family, **{**BASE, **TEXT[family], **more})
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=config.dtype)
        adapted = lora(model, 4, 8)
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        # in bfloat16 peft rounds at other places
        ours = {} if config.dtype != half else {name: x.clone() for name, x in merged_parameters(adapted)}
        merged = ours or dict(copy.deepcopy(adapted).merge_and_unload().named_parameters())
        adapters = sum(p.nbytes for name, p in adapted.named_parameters() if ".lora_" in name)
        engine = make_engine("fsdp2", model=adapted)
        with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast:
            weights = dict(engine._weights(1 << 20, torch.bfloat16))
        gathered = sum(call.args[0].nbytes for call in broadcast.call_args_list)
        found.append((weights, {name: x.detach() for name, x in merged.items()}, gathered, adapters))
    torch.save(found, out / f"adapted.{dist.get_rank()}.pt")


class SeparateExperts(torch.nn.Module):
    """Two experts, each a module of its own as in models whose code comes from the Hub."""

    def __init__(self, mlp):
        super().__init__()
        self.experts = torch.nn.ModuleList([mlp, copy.deepcopy(mlp)])

    def forward(self, hidden):
        tokens = hidden.flatten(0, -2)
        result = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            chosen = (tokens[:, 0] > 0).long().eq(i).nonzero()[:, 0]
            if len(chosen):
                result = result.index_add(0, chosen, expert(tokens[chosen]))
        return result.view_as(hidden)


def train_separate_experts(out):
    """Gradients if each rank has a row whose tokens go to another expert, and if each rank has both rows."""
    samples = [append_response(prompt_sample([4 + i, 8 + i]), [10 + i, 6 + i, 12 + i], [-1.0] * 3) for i in range(2)]
    found = []
    for rows in (samples, samples[dist.get_rank() :][:1]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("qwen2", **BASE))
        model.get_input_embeddings().weight.data[:, 0] = torch.arange(BASE["vocab_size"]) % 2 * 10.0 - 5.0
        for layer in model.model.layers:
            layer.mlp = SeparateExperts(layer.mlp)
        sgd = partial(torch.optim.SGD, lr=0.0)
        engine = make_engine("fsdp2", model=model, optimizer=sgd, keep_gradients=True, max_grad_norm=1e9)
        engine.train_batch(collate(rows), sft_loss)
        parameters = engine.module.named_parameters()
        found.append({name: full_tensor(p.grad).clone() for name, p in parameters if p.grad is not None})
    if dist.get_rank() == 0:
        torch.save(found, out / "experts.pt")


def peak_of_loading(model_dir, *, on_meta):
    """Peak memory of making an engine from a model's files, in bytes."""
    return peak(lambda: make_engine("fsdp2", model=load_model(model_dir, on_meta=on_meta)))


def compare_loading(model_dir, out):
    """Peak memory of loading a model in shards and in full, on each rank, and whether the weights are the same."""
    sharded, engine = peak_of_loading(model_dir, on_meta=True)
    weights = dict(engine.get_per_tensor_param())
    del engine
    full, engine = peak_of_loading(model_dir, on_meta=False)
    same = [torch.equal(weights[name], tensor) for name, tensor in engine.get_per_tensor_param()]
    size = sum(4 * x.numel() for x in weights.values())
    result = {"sharded": sharded, "full": full, "same": same, "size": size}
    (out / f"loading.{dist.get_rank()}.json").write_text(json.dumps(result))


def write_converted(folder):
    """Models whose files transformers converts; the experts of Qwen3-VL are stored in both orientations."""
    for family in CONVERTED:
        name = family.removesuffix("_transposed")
        model = test_families.vision_model(name) if name in VISION else test_families.text_model(name, TEXT[name])
        model.save_pretrained(folder / family)
    file = folder / "qwen3_vl_moe_transposed" / "model.safetensors"
    tensors = load_file(file)
    experts = {name: x.transpose(1, 2).contiguous() for name, x in tensors.items() if ".experts." in name}
    assert len(experts) == 4
    save_file({**tensors, **experts}, file, {"format": "pt"})


def compare_converted(out):
    """The number of weights, and the names of those that differ, of models that are read in shards and in full."""
    if dist.get_rank() == 0:
        write_converted(out / "converted")
    dist.barrier()
    found = {}
    for family in CONVERTED:
        path = str(out / "converted" / family)
        expected, model = load_model(path).state_dict(), load_model(path, on_meta=True)
        in_shards = make_engine("fsdp2", model=model, use_remove_padding=False)
        weights = {name: full_tensor(x) for name, x in model.state_dict().items()}
        found[f"{family}, fsdp2"] = len(weights), [n for n, x in expected.items() if not torch.equal(x, weights[n])]
        expected = dict(in_shards.get_per_tensor_param())
        engine = make_engine("fsdp1", model=load_model(path, on_meta=True), use_remove_padding=False)
        weights = dict(engine.get_per_tensor_param())
        found[f"{family}, fsdp1"] = len(weights), [n for n, x in expected.items() if not torch.equal(x, weights[n])]
    (out / f"converted.{dist.get_rank()}.json").write_text(json.dumps(found))


def describe(batch):
    """The contents of each row without padding, and the number of different image tensors."""
    rows = []
    for i, length in enumerate(batch.lengths):
        fields = [x for name, x in sorted(batch.fields.items()) if name != "micro_batch_group"]
        tensors = [batch.tokens, batch.mask, *fields]
        vision = {name: x.sum().item() for name, x in batch.vision[i].items()}
        rows.append([[x[i].tolist() if x.ndim == 1 else x[i, :length].tolist() for x in tensors], vision])
    images = {id(row["pixel_values"]) for row in batch.vision if row}
    return {"tokens": batch.lengths, "groups": batch.group_ids.tolist(), "rows": rows, "images": len(images)}


def rebalance(model_dir, out):
    """Rows before and after `rebalance_across_ranks`, and its error for ranks whose rows have different fields."""
    rank, processor = dist.get_rank(), load_processor(model_dir)
    batch = make_batch(processor, rows=([3, 2, 0, 7, 1, 8, 6], [4, 5])[rank])
    routed_experts = torch.rand(*batch.tokens.shape, 2, 3).mul(9).short()
    batch.add(micro_batch_group=batch.group_ids % 2, routed_experts=routed_experts)
    before = describe(batch)
    rebalanced = rebalance_across_ranks(batch)
    even = make_batch(processor, rows=[0])
    is_kept = rebalance_across_ranks(even) is even
    try:
        rebalance_across_ranks(make_batch(processor, rows=[rank]).add(**{f"field_{rank}": torch.zeros(1)}))
    except ValueError as raised:
        error = str(raised)
    result = {"before": before, "after": describe(rebalanced), "is_kept": is_kept, "error": error}
    result["micro_batch_group"] = rebalanced.micro_batch_group.tolist()
    (out / f"rebalancing.{rank}.json").write_text(json.dumps(result))


def save(model_dir, out):
    """Save a checkpoint, and the weights that it should contain."""
    engine = make_engine("fsdp2", model=load_model(model_dir), optimizer=torch.optim.AdamW)
    engine.save_checkpoint(out / "killed", {"step": 1})
    torch.save(dict(engine.get_per_tensor_param()), out / "killed.pt")
    return engine


def be_killed_while_saving(engine, out):
    """Overwrite the checkpoint with other weights; the process ends after the first shard, before the metadata."""
    for parameter in engine.module.parameters():
        parameter.data.zero_()
    os.fsync = lambda file: os._exit(0)
    engine.save_checkpoint(out / "killed", {"step": 2})


def run_case(name, model_dir, big_dir, out):
    if name in CASES:
        run(model_dir, out / name, name)
    elif name == "loading":
        peak_of_loading(model_dir, on_meta=True)  # so that imports are not counted
        compare_loading(big_dir, out)
    elif name == "converted":
        compare_converted(out)
    elif name == "rebalancing":
        rebalance(model_dir, out)
    elif name == "experts":
        train_separate_experts(out)
    elif name == "sent":
        send(model_dir, out)
    elif name == "adapted":
        send_adapted(out)
    elif name == "killed":
        return save(model_dir, out)
    elif name.startswith("exported."):
        export_buffers(out, name.removeprefix("exported."))
    else:
        resume(model_dir, out, name.removeprefix("resumed."))


def on_rank(rank, world, port, model_dir, big_dir, out, names):
    torch.set_num_threads(1)
    if world:
        set_by_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
        os.environ.update({"MASTER_ADDR": "localhost", **{k: str(v) for k, v in set_by_torchrun.items()}})
    if world == 2:
        init_distributed("cpu")
    for name in names:
        with isolated(out, name):
            result = run_case(name, model_dir, big_dir, Path(out))
    if "killed" in names:
        be_killed_while_saving(result, Path(out))
    dist.destroy_process_group()


def main(model_dir, big_dir, out, *names):
    import peft  # noqa: F401  (here, and not on every rank, what is imported on first use)

    load_processor(model_dir)
    torch.optim.AdamW(load_model(model_dir).parameters())
    for world, known in NAMES.items():
        if chosen := [name for name in known if name in names]:
            with socket.socket() as free:
                free.bind(("localhost", 0))
                port = free.getsockname()[1]
            arguments = (world, port, model_dir, big_dir, out, chosen)
            mp.start_processes(on_rank, arguments, nprocs=max(world, 1), start_method="fork")


if __name__ == "__main__":
    main(*sys.argv[1:])
