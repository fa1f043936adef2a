"""Megatron-Core in every layout against fsdp2 on one process: the same losses, gradients and weights."""

import math
import shutil
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from isolated_cases import require, run_cases
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlkit.engines import make_engine, sampler_dtype
from rlkit.engines.flops import batch_flops, take_flops
from rlkit.vlm import freeze, load_model, lora, vision_tower_pattern
from rlkit.vlm.checkpoint_weights import checkpoint_parameters
from rlkit.vlm.routers import use_router_replay

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import on_megatron_ranks as ranks  # noqa: E402
from family_configs import BASE  # noqa: E402
from megatron_groups import destroy_megatron_groups  # noqa: E402
from memory import peak  # noqa: E402
from one_gradient import OUTPUTS, POLICY, sft_loss, train, with_teacher  # noqa: E402

from rlkit.engines.megatron import hf_tensors  # noqa: E402
from rlkit.engines.megatron.cpu import cuda_calls_on_host  # noqa: E402
from rlkit.engines.megatron.hf_tensors import files_to_module  # noqa: E402
from rlkit.engines.megatron.model import initialize_parallel_state  # noqa: E402
from rlkit.engines.megatron.optimizer import checkpoint_state  # noqa: E402
from rlkit.engines.megatron.supported import ParallelDims, check_supported  # noqa: E402
from rlkit.engines.megatron.weights import copy_local_part  # noqa: E402
from rlkit.engines.model_files import open_slices  # noqa: E402


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The folder with the results of all cases, which run in one launch."""
    folder = tmp_path_factory.mktemp("megatron")
    command = [sys.executable, str(HERE / "on_megatron_ranks.py"), str(folder)]
    run_cases(command, folder, ranks.NAMES, timeout=1800)
    return folder


@pytest.fixture
def alone():
    """For engines of this process: destroys Megatron's process groups afterwards."""
    yield
    destroy_megatron_groups()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def results(out, case):
    require(out, case)
    return torch.load(out / case / "results.pt", weights_only=True)


def assert_same(found, expected, tolerance=1e-5):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("case", ranks.CASES)
def test_every_layout_equals_fsdp2(out, case):
    found, expected = results(out, case), results(out, f"fsdp2-{ranks.CASES[case][1]}")
    for i, steps in enumerate(expected["steps"]):
        assert found["steps"][i] == pytest.approx(steps, abs=1e-5, rel=1e-5), i
    for gradients, expected_gradients in zip(found["gradients"], expected["gradients"], strict=True):
        assert_same(gradients, expected_gradients)
    assert_same(found["parameters"], expected["parameters"])
    torch.testing.assert_close(found["topk"], expected["topk"], atol=1e-3, rtol=1e-5)
    assert expected["steps"][0]["grad_norm"] > 0.5 > max(g.norm() for g in expected["gradients"][0].values())  # clipped
    moved = {name: (tensor - expected["imported"][name]).abs().max() for name, tensor in expected["parameters"].items()}
    assert min(moved.values()) > 1e-3


@pytest.mark.parametrize("case", [n for n, (_, kind, rows, _) in ranks.CASES.items() if rows == "all"])
def test_scores_equal_transformers(out, case):
    kind = ranks.CASES[case][1]
    model, batch = ranks.make_model(kind), ranks.make_batch(list(range(ranks.ROWS)), kind)
    if kind == "routed":
        use_router_replay(model)
    expected = {name: torch.zeros(batch.tokens.shape) for name in OUTPUTS[ranks.losses_of(kind)]}
    for b, length in enumerate(batch.lengths):
        inputs = {"input_ids": batch.tokens[b : b + 1, :length], **batch.vision[b]}
        if kind in ranks.VISION:
            types = {ranks.IMAGE: 1, ranks.VIDEO: 2}
            inputs["mm_token_type_ids"] = sum((inputs["input_ids"] == token) * n for token, n in types.items())
        if kind == "routed":
            inputs["routed_experts"] = batch.routed_experts[b, :length]
        with torch.no_grad():
            logits = model(**inputs).logits[0, :-1]
        mask = batch.mask[b, 1:length]
        if kind == "value":
            expected["values"][b, 1:length] = logits[:, 0] * mask
            continue
        logits[:, ranks.SUPPRESSED] = -1e30
        scores = (logits / 1.3).log_softmax(-1)
        chosen = scores.gather(1, batch.tokens[b, 1:length, None])[:, 0]
        expected["logprobs"][b, 1:length] = chosen.where(mask, 0.0)
        expected["entropy"][b, 1:length] = -(scores.exp() * scores).sum(1) * mask
    assert_same(results(out, case)["scores"], expected)


@pytest.mark.parametrize("case", ranks.CASES)
def test_imported_weights_are_exported_bit_for_bit(out, case):
    model = ranks.make_model(ranks.CASES[case][1])
    expected = dict(checkpoint_parameters(model, model.named_parameters()))
    imported = results(out, case)["imported"]
    assert imported.keys() == expected.keys()
    assert all(torch.equal(imported[name], expected[name]) for name in expected)


@pytest.mark.parametrize("case", ranks.EXPORTED)
def test_export_contains_the_weights(out, case):
    expected = results(out, case)["exported"]
    family = type(ranks.make_model(ranks.CASES.get(case, (0, "qwen2"))[1]))
    exported = family.from_pretrained(out / case / "export", ignore_mismatched_sizes=True)
    tensors = dict(checkpoint_parameters(exported, exported.named_parameters()))
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        # for a value model transformers makes an output layer for the vocabulary instead of the value head
        if not (case.startswith("value") and name == "lm_head.weight"):
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("case", ranks.EXPORTED)
def test_weights_in_the_dtype_of_the_sampler(out, case):
    """Matrices are cast before they are gathered and sent to other stages; norms, biases and routers are not."""
    found = results(out, case)
    expected = {}
    for name, x in found["exported"].items():
        cast = x.ndim > 1 and len(x) > 1 and ".mlp.gate." not in name  # a value head has one row
        expected[name] = x.bfloat16() if cast else x
    assert found["for_sampler"].keys() == expected.keys()
    for name, x in found["for_sampler"].items():
        assert x.dtype == expected[name].dtype and torch.equal(x, expected[name]), name


@pytest.mark.parametrize("case", ranks.RESUMED)
def test_checkpoint_resumes_in_any_layout(out, case):
    resumed, expected = results(out, case), results(out, ranks.RESUMED[case][-1])
    for step, expected_step in zip(resumed["steps"], expected["steps"][1:], strict=True):
        assert step == pytest.approx(expected_step, abs=1e-5, rel=1e-5)
    assert_same(resumed["exported"], expected["exported"])


@pytest.mark.parametrize("case", ranks.TO_FSDP2)
def test_fsdp2_resumes_a_megatron_checkpoint(out, case):
    expected, kind = results(out, case), ranks.CASES[case][1]
    losses, engine = ranks.losses_of(kind), ranks.engine_for("fsdp2", kind)
    assert engine.load_checkpoint(out / case / "checkpoint") == {"step": 1}
    batch = with_teacher(ranks.make_batch(list(range(ranks.ROWS)), kind))
    for loss_fn, steps in zip(losses[1:], expected["steps"][1:], strict=True):
        assert train(engine, batch, loss_fn, losses) == pytest.approx(steps, abs=1e-5, rel=1e-5)
    assert_same(dict(engine.get_per_tensor_param()), expected["exported"])


@pytest.mark.parametrize("case", ranks.SENT)
def test_stages_and_experts_send_what_the_plan_counts(out, case):
    """Activations to the byte; gradients and weights up to the padding of Megatron's buffers, 4 % of a tiny model."""
    for rank in results(out, case):
        sent, calls = rank["sent"], ("reduce_scatter_tensor_coalesced_", "allgather_into_tensor_coalesced_")
        activations, states = sent.get("send", 0) + sent.get("alltoall_base_", 0), sum(sent[call] for call in calls)
        shapes = activations - rank["activations"]  # three integers for each packed row that goes to another stage
        assert shapes == (3 * 3 * 8 if case == "sent-pp2" else 0)
        assert states == pytest.approx(rank["states"], rel=0.05) and (states > 0) == (case == "sent-ep2")
        beside = sum(sent.values()) - activations - states  # metrics, the gradient norm and routing probabilities
        assert 0 < beside < 0.03 * activations


def test_an_impossible_layout_and_different_rows_are_errors_on_every_rank(out):
    require(out, "errors")
    messages = torch.load(out / "errors.pt", weights_only=True)
    assert len(messages) == 4 and messages.count(messages[0]) == 4
    heads, layers, world, rows = messages[0]
    assert heads == "tensor: expected a divisor of the 2 key-value heads, got 4"
    assert layers == "pipeline: expected a divisor of the 2 layers, got 4"
    product = "tensor * pipeline * context = 1 * 1 * 3"
    assert world == f"tensor, pipeline, context: expected a divisor of the 4 ranks, got {product}"
    assert rows.startswith("batch: expected the same rows on all ranks of a model-parallel group")


def error_of(dims, world=8, kind="qwen2", **changes):
    config = ranks.make_model(kind).config
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ValueError) as error:
        check_supported(config, dims, world)
    return str(error.value)


def test_what_is_not_supported_is_named():
    assert "divisor of the 4 attention heads" in error_of(ParallelDims(tensor=3))
    assert "divisor of the 47 neurons" in error_of(ParallelDims(tensor=2), intermediate_size=47)
    assert "pipeline: expected at least 1, got 0" in error_of(ParallelDims(pipeline=0))
    assert "sequence_parallel" in error_of(ParallelDims(sequence_parallel=True))
    assert "divisor of the 6 ranks" in error_of(ParallelDims(tensor=2, pipeline=2), world=6)
    for family in ("llava", "qwen2_5_omni_thinker"):
        assert f"got {family}; use the fsdp2 engine" in error_of(ParallelDims(), model_type=family)
    assert "attention_bias" in error_of(ParallelDims(), kind="llama", attention_bias=True)
    assert "sliding windows" in error_of(ParallelDims(), layer_types=["sliding_attention"])
    assert "divisor of the 4 experts" in error_of(ParallelDims(expert=3), kind="moe")
    assert "divisor of the 1 experts" in error_of(ParallelDims(expert=2))
    moe_error = error_of(ParallelDims(tensor=2, expert=2), kind="moe")
    assert "tensor: expected sequence_parallel and expert above 1 for a mixture of experts" in moe_error
    assert "divisor of the 6 ranks" in error_of(ParallelDims(pipeline=2, expert=2), kind="moe", world=6)
    sizes = error_of(ParallelDims(), kind="moe", moe_intermediate_size=20)
    assert "that 8 divides, for grouped matrix products, got 32 and 20; use the fsdp2 engine" in sizes
    assert "mlp_only_layers" in error_of(ParallelDims(), kind="moe", mlp_only_layers=[0])
    assert "'yarn'" in error_of(ParallelDims(), rope_parameters={"rope_type": "yarn"})


def test_a_wrong_model_or_call_is_named(alone):
    with pytest.raises(ValueError, match="model: expected no adapters in the megatron engine"):
        make_engine("megatron", model=lora(ranks.make_model("qwen2"), 2, 4))
    with pytest.raises(ValueError, match="model: expected no value head, got a value head"):
        make_engine("megatron", model=ranks.make_model("value"))
    expected = "optimizer: expected torch.optim.AdamW without amsgrad in the megatron engine, got SGD"
    with pytest.raises(ValueError, match=expected):
        make_engine("megatron", model=ranks.make_model("qwen2"), optimizer=torch.optim.SGD)
    engine = make_engine("megatron", model=ranks.make_model("qwen2"))
    batch = ranks.make_batch([0, 1])
    with pytest.raises(ValueError, match="disable_adapter: expected a model with adapters, got the megatron engine"):
        engine.disable_adapter()
    with pytest.raises(ValueError, match="output_layer: expected the fsdp2 engine, got megatron"):
        engine.output_layer()
    with pytest.raises(ValueError, match="optimizer: expected one for train_batch, got None"):
        engine.train_batch(batch, POLICY[0])
    with pytest.raises(ValueError, match="outputs: expected logprobs, entropy; got values"):
        engine.infer_batch(batch, ("values",))
    assert engine.infer_batch(ranks.make_batch([]))["logprobs"].shape[0] == 0
    assert engine.infer_batch(batch)["logprobs"].sum() < 0  # it scores all the same
    expected = r"expected \(1, 1, 1, 1\) as in an earlier engine of this process, got \(2, 1, 1, 1\)"
    with pytest.raises(ValueError, match=expected):
        initialize_parallel_state(ParallelDims(tensor=2), torch.device("cpu"))


@pytest.mark.parametrize("rows", [[], [0, 1]])
def test_a_batch_without_trained_tokens_changes_nothing(alone, rows):
    """Moments and weight decay would change the weights otherwise."""
    optimizer = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1)
    engine = make_engine("megatron", model=ranks.make_model("qwen2"), optimizer=optimizer)
    engine.train_batch(ranks.make_batch([0, 1]), POLICY[0], OUTPUTS[POLICY])
    before = {name: x.clone() for name, x in engine.get_per_tensor_param()}
    batch = ranks.make_batch(rows)
    batch.mask.zero_()
    metrics = engine.train_batch(batch, POLICY[0], OUTPUTS[POLICY])
    assert metrics["loss"] == metrics["grad_norm"] == metrics["skipped_steps"] == 0
    assert all(torch.equal(x, before[name]) for name, x in engine.get_per_tensor_param())


def test_an_option_of_another_engine_is_named(alone):
    model = ranks.make_model("qwen2")
    expected = "megatron engine: expected options model, processor, .*; got fsdp_size, colour"
    with pytest.raises(ValueError, match=expected):
        make_engine("megatron", model=model, fsdp_size=2, colour=3)
    with pytest.raises(ValueError, match="fsdp2 engine: expected options .* tensor, .*; got pipeline"):
        make_engine("fsdp2", model=model, pipeline=2)
    with pytest.raises(ValueError, match="use_remove_padding: expected True in the megatron engine, got False"):
        make_engine("megatron", model=model, use_remove_padding=False)
    with pytest.raises(ValueError, match="ulysses_.*: expected 1 in the megatron engine, got 2; use context=2"):
        make_engine("megatron", model=model, ulysses_sequence_parallel_size=2)
    with pytest.raises(ValueError, match="router_replay: expected a mixture of experts, got qwen2"):
        make_engine("megatron", model=model, router_replay=True)


def test_routed_experts_of_another_model_are_named(alone):
    engine, batch = ranks.engine_for("megatron", "routed"), ranks.make_batch([0, 1], "routed")
    batch.routed_experts[0, 0, 0, 0] = 4
    with pytest.raises(ValueError, match="routed_experts: expected expert ids below 4, got 4; is it of another model"):
        engine.infer_batch(batch)
    batch.fields["routed_experts"] = batch.routed_experts[..., :1]
    with pytest.raises(ValueError, match=r"expected \[B, T, 2 layers, 2 experts\], got \[B, T, 2, 1\]"):
        engine.infer_batch(batch)


def tokens_of(engine, batch):
    """The tokens that the layers compute in `infer_batch`, and its log-probabilities."""
    counts = []
    engine.model.decoder.register_forward_hook(lambda module, args, out: counts.append(len(out)))
    logprobs = engine.infer_batch(batch)["logprobs"]
    return sum(counts), logprobs


def test_a_shared_prompt_is_computed_once(alone):
    batch = ranks.make_batch(list(range(ranks.ROWS)), "shared")
    once, logprobs = tokens_of(ranks.engine_for("megatron", "shared"), batch)
    each, expected = tokens_of(ranks.engine_for("megatron", "shared", share_prompts=False), batch)
    responses, prompts = batch.mask.sum(), sum(batch.lengths) - batch.mask.sum()
    assert each == responses + prompts
    assert responses + prompts / 4 <= once <= responses + prompts / 2  # the second group is split in two
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)


def test_passes_are_counted(alone):
    """As in the fsdp2 engine, see test_flops.py."""
    batch = ranks.make_batch(list(range(ranks.ROWS)), "shared")
    engine = ranks.engine_for("megatron", "shared")
    take_flops()
    engine.infer_batch(batch)
    engine.topk_logprobs(batch, 2)
    engine.train_batch(batch, sft_loss)
    assert take_flops() == 5 * batch_flops(engine.config, batch)


class NoReads(TorchFunctionMode):
    """Raises where a value of a tensor is read: on a GPU the host would wait for it."""

    READS = {Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.nonzero, torch.nonzero}
    READS |= {Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self.READS:
            raise AssertionError(f"{func} in the forward of a model")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["shared", "shared-vl"])
def test_the_layers_read_no_value_of_a_tensor(kind, alone):
    engine, modes = ranks.engine_for("megatron", kind), []

    def enter(module, args, kwargs):
        _ = kwargs["packed_seq_params"].layout.blocks  # its index tensors are made on the host
        modes.append(NoReads())
        modes[-1].__enter__()

    engine.model.decoder.register_forward_pre_hook(enter, with_kwargs=True)
    engine.model.decoder.register_forward_hook(lambda *_: modes[-1].__exit__(None, None, None))
    engine.infer_batch(ranks.make_batch(list(range(ranks.ROWS)), kind))
    assert len(modes) > 1


class Shapes(TorchDispatchMode):
    """The shapes of all tensors that are made."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.found |= {tuple(x.shape) for x in (out if isinstance(out, tuple | list) else (out,)) if torch.is_tensor(x)}
        return out


def test_only_scored_tokens_have_logits(alone):
    engine, batch = ranks.engine_for("megatron", "qwen2"), ranks.make_batch([3])
    batch.mask[:, :-2] = False
    with Shapes() as shapes:
        engine.infer_batch(batch)
    weight = (engine.config.hidden_size, ranks.VOCABULARY)  # transposed
    logits = {shape for shape in shapes.found if shape[-1:] == (ranks.VOCABULARY,)} - {weight}
    assert sum(batch.lengths) > 20 and (2, ranks.VOCABULARY) in logits
    assert {shape[0] for shape in logits if len(shape) > 1} == {2}


class Calls(TorchDispatchMode):
    """The names of all operations."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_the_experts_of_a_layer_are_two_matrix_products(alone):
    engine, calls = ranks.engine_for("megatron", "moe"), Calls()
    experts = engine.model.decoder.layers[0].mlp.experts
    experts.register_forward_pre_hook(lambda *_: calls.__enter__() and None)
    experts.register_forward_hook(lambda *_: calls.__exit__(None, None, None))
    engine.infer_batch(ranks.make_batch([0], "moe"))
    assert calls.found.count("_grouped_mm") == 2 and not {"mm", "addmm", "bmm"} & set(calls.found)


@pytest.mark.parametrize("kind", ["moe", "vl"])
def test_gathered_yields_the_transformers_model(kind, alone):
    model = ranks.make_model(kind)
    model.generation_config.eos_token_id = 7
    engine = make_engine("megatron", model=model, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
    metrics = engine.train_batch(ranks.make_batch([0, 1], kind), POLICY[2])
    weights = dict(engine.get_per_tensor_param())
    with engine.gathered() as module:
        assert metrics["skipped_steps"] == 0 and type(module) is type(model) and not module.training
        found = dict(checkpoint_parameters(module, module.named_parameters()))
        assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)
        assert module.generation_config.eos_token_id == 7
        tokens = torch.tensor([[1, 2, 3]])
        model.load_state_dict(module.state_dict())
        assert torch.equal(module(input_ids=tokens).logits, model(input_ids=tokens).logits)  # also buffers
    engine = make_engine("megatron", model=model, compute_dtype=torch.bfloat16)
    with engine.gathered() as module:
        assert {x.dtype for x in module.parameters()} == {torch.bfloat16}
        assert module(input_ids=tokens).logits.dtype == torch.bfloat16


class InFile:
    """A tensor in a file; `read` lists the number of elements of each slice that is read."""

    def __init__(self, *shape):
        self.tensor, self.read = torch.rand(shape), []

    def get_shape(self):
        return list(self.tensor.shape)

    def __getitem__(self, key):
        self.read.append(self.tensor[key].numel())
        return self.tensor[key]


def test_a_rank_reads_only_its_slices(monkeypatch):
    """The second of two tensor ranks, which is the second of two expert ranks, too."""
    state = "rlkit.engines.megatron.weights.parallel_state.get_"
    monkeypatch.setattr(state + "tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(state + "tensor_model_parallel_rank", lambda: 1)
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    monkeypatch.setattr(state + "expert_model_parallel_group", lambda: group)
    config = SimpleNamespace(num_query_groups=2, tensor_model_parallel_size=2)

    def local_part(tensors, parameter, shape):
        part = torch.full(shape, math.nan)
        copy_local_part(part, tensors, parameter, config)
        return part

    rows = SimpleNamespace(tensor_model_parallel=True, partition_dim=0)
    columns = SimpleNamespace(tensor_model_parallel=True, partition_dim=1)
    q, k, v = InFile(8, 3), InFile(4, 3), InFile(4, 3)
    assert torch.equal(local_part([q, k, v], rows, (8, 3)), torch.cat([q.tensor[4:], k.tensor[2:], v.tensor[2:]]))
    down, odd, norm, experts = InFile(4, 6), InFile(5, 3), InFile(7), [InFile(2, 3) for _ in range(8)]
    assert torch.equal(local_part([down], columns, (4, 3)), down.tensor[:, 3:])
    assert torch.equal(local_part([odd], rows, (3, 3)), torch.cat([odd.tensor[3:], torch.zeros(1, 3)]))
    assert torch.equal(local_part([norm], SimpleNamespace(), (7,)), norm.tensor)
    part = local_part(experts, SimpleNamespace(is_expert=True), (8, 3))
    assert torch.equal(part, torch.cat([one.tensor for one in experts[4:]]))
    assert [one.read for one in (q, k, v, down, odd, norm)] == [[12], [6], [6], [12], [6], [7]]
    assert [sum(one.read) for one in experts] == [0] * 4 + [6] * 4


def test_files_of_another_model_are_named(out, tmp_path, alone):
    require(out, "one-qwen3")
    shutil.copytree(out / "models" / "qwen3", tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:7].clone()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    expected = "got missing or different ones: model.layers.1.mlp.up_proj.weight, model.norm.weight$"
    with pytest.raises(ValueError, match=expected):
        make_engine("megatron", model=load_model(str(tmp_path), on_meta=True))


def test_an_output_layer_beside_tied_embeddings_and_tensors_without_a_place(tmp_path, alone, capsys):
    """The first is used by transformers although config.json says that it is tied, and not by vLLM."""
    Qwen2ForCausalLM(Qwen2Config(**BASE, tie_word_embeddings=True)).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone(), "mtp.norm.weight": torch.ones(2)}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    make_engine("megatron", model=load_model(str(tmp_path), on_meta=True))
    assert "tensors in its files that are not used (1): mtp.norm.weight\n" in capsys.readouterr().out
    extra["lm_head.weight"][-1, -1] += 1
    save_file(tensors | extra, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="expected an output layer that equals the embedding"):
        make_engine("megatron", model=load_model(str(tmp_path), on_meta=True))


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_experts_that_are_one_tensor_in_the_files_are_read_one_by_one(tmp_path, alone, monkeypatch, prefix):
    ranks.make_model("moe").save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    stored = {name.replace("model.", prefix, 1): x for name, x in files_to_module(expected).items()}
    save_file(stored, tmp_path / "model.safetensors")
    read = []

    @dataclass
    class Watched:
        tensor: Any

        def get_shape(self):
            return self.tensor.get_shape()

        def __getitem__(self, index):
            read.append((self.get_shape(), self.tensor[index].shape))
            return self.tensor[index]

    @contextmanager
    def watched_slices(model):
        with open_slices(model) as slices:
            yield {name: Watched(x) if "experts" in name else x for name, x in slices.items()}

    monkeypatch.setattr(hf_tensors, "open_slices", watched_slices)
    engine = make_engine("megatron", model=load_model(str(tmp_path), on_meta=True))
    found = dict(engine.get_per_tensor_param())
    assert found.keys() == expected.keys() and all(torch.equal(found[name], x) for name, x in expected.items())
    assert len(read) == 3 * 4 * 2  # matrices of 4 experts in 2 layers
    assert all(len(stored) == 3 and len(shape) == 2 for stored, shape in read)


def test_gradients_are_freed_between_steps(alone):
    """The steps are those of an engine that keeps them."""
    batch, steps = ranks.make_batch([0, 1], "moe"), {}
    for keep in (True, False):
        engine = make_engine("megatron", model=ranks.make_model("moe"), optimizer=adamw, keep_gradients=keep)
        buffers = engine.module.buffers + engine.module.expert_parallel_buffers
        held = [sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)]
        steps[keep] = []
        for _ in range(2):
            steps[keep].append(engine.train_batch(batch, POLICY[2]))
            held.append(sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers))
        assert all(size > 0 for size in held) if keep else not any(held)
        steps[keep].append(dict(engine.get_per_tensor_param()))
    assert steps[True][:2] == steps[False][:2] and steps[True][0]["grad_norm"] > 0
    assert_same(steps[False][2], steps[True][2], tolerance=0)


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float32, "qwen2"), (torch.bfloat16, "value")])
def test_weights_and_optimizer_leave_the_device_and_come_back(dtype, kind, alone):
    """What `to` does on a GPU. The optimizer has views of float32 weights, such as those of a value head."""
    of_kind, batch, found = ranks.losses_of(kind), ranks.make_batch([0, 1], kind), []
    model_type = "value_model" if kind == "value" else "language_model"
    for moves in (False, True):
        engine = make_engine("megatron", model_type, model=ranks.make_model(kind), optimizer=adamw, compute_dtype=dtype)
        steps = [engine.train_batch(batch, of_kind[0], OUTPUTS[of_kind])]
        if moves:
            engine._move(to_host=True, model=False, optimizer=True)
            assert engine.infer_batch(batch, OUTPUTS[of_kind])[OUTPUTS[of_kind][0]].any()
            engine._move(to_host=True, model=True, optimizer=False)
            groups, states = engine.optimizer.param_groups, engine.optimizer.state.values()
            held = [*engine.model.parameters(), *(p for group in groups for p in group["params"])]
            held += [x for state in states for x in state.values() if x.ndim]
            assert len(held) > 10 and not any(x.untyped_storage().nbytes() for x in held)
            engine._move(to_host=False, model=True, optimizer=True)
        steps += [engine.train_batch(batch, of_kind[0], OUTPUTS[of_kind]) for _ in range(2)]
        found.append((steps, dict(engine.get_per_tensor_param())))
    assert found[0][0] == found[1][0] and found[0][0][1] != found[0][0][2]
    assert_same(found[1][1], found[0][1], tolerance=0)


def test_only_the_first_weight_sync_looks_up_the_dtypes_of_a_sampler(alone, monkeypatch):
    """The names in the files are looked up when the engine is made."""
    engine = make_engine("megatron", model=ranks.make_model("moe"), compute_dtype=torch.float32)
    function, looked_up = sampler_dtype.kept_in_float32, []
    monkeypatch.setattr(sampler_dtype, "kept_in_float32", lambda *args: (looked_up.append(args), function(*args))[1])
    first = {name: x.dtype for name, x in engine.get_per_tensor_param(dtype=torch.bfloat16)}
    assert len(looked_up) == len(first) and set(first.values()) == {torch.bfloat16, torch.float32}
    looked_up.clear()
    assert {name: x.dtype for name, x in engine.get_per_tensor_param(dtype=torch.bfloat16)} == first
    assert not looked_up
    assert {x.dtype for _, x in engine.get_per_tensor_param()} == {torch.float32}


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float32, "moe"), (torch.bfloat16, "qwen2"), (torch.bfloat16, "value")]
)
def test_weights_and_optimizer_are_on_the_host_between_calls(dtype, kind, alone, tmp_path):
    """The same numbers as without; copied once for all calls in a context. Storages of tensors in use are not empty."""
    of_kind, batch, found = ranks.losses_of(kind), ranks.make_batch([0, 1], kind), []
    outputs = OUTPUTS[of_kind]
    options = {"optimizer": adamw, "compute_dtype": dtype}

    def tensors(engine):
        groups, states = engine.optimizer.param_groups, engine.optimizer.state.values()
        held = [*engine.model.parameters(), *(p for group in groups for p in group["params"])]
        return held + [x for state in states for x in state.values() if x.ndim]

    for offloads in (False, True):
        engine = make_engine(
            "megatron", "value_model" if kind == "value" else "language_model", model=ranks.make_model(kind),
            offload_between_phases=offloads, **options,
        )  # fmt: skip
        seen = []

        def call(method, *args, engine=engine, seen=seen, **more):
            result = getattr(engine, method)(*args, **more)
            seen.append(sum(x.untyped_storage().nbytes() for x in tensors(engine)))
            return result

        results = [call("infer_batch", batch, outputs), call("train_batch", batch, of_kind[0], outputs)]
        call("save_checkpoint", tmp_path / f"{offloads}")
        results += [call("train_batch", batch, of_kind[0], outputs)]
        assert all(size == 0 for size in seen) == offloads and len(tensors(engine)) > 10
        assert bool(engine.host_bytes) == offloads
        with engine.keep_on_device():
            results += [call("train_batch", batch, of_kind[0], outputs), call("infer_batch", batch, outputs)]
            assert seen[-1] > 0
        weights = {name: x.clone() for name, x in engine.get_per_tensor_param()}
        call("load_checkpoint", tmp_path / f"{offloads}")
        results += [call("train_batch", batch, of_kind[0], outputs)]
        assert (seen[-1] == 0) == offloads
        found.append((results, weights, dict(engine.get_per_tensor_param())))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(x, other[n]) if isinstance(x, torch.Tensor) else x == other[n] for n, x in one.items())
    assert found[0][0][2]["loss"] == found[0][0][-1]["loss"] != found[0][0][1]["loss"]  # resumed
    for i in (1, 2):
        assert_same(found[1][i], found[0][i], tolerance=0)
    with pytest.raises(ValueError, match="^to: expected no offload_between_phases"):
        engine.to("cpu")


def test_making_an_engine_leaves_random_states_alone(alone):
    model = ranks.make_model("value")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    make_engine("megatron", "value_model", model=model, optimizer=torch.optim.AdamW)
    assert torch.equal(torch.rand(3), expected)


def test_a_frozen_value_head_is_named(alone):
    """Its gradients would be left out, and with a head of zeros no other weight would have one."""
    model = ranks.make_model("value")
    freeze(model, "lm_head")
    with pytest.raises(ValueError, match="^model: expected a value head that trains, got a frozen one"):
        make_engine("megatron", "value_model", model=model, optimizer=torch.optim.AdamW)


def test_experts_whose_weights_do_not_add_up_to_one(alone):
    model, batch = ranks.make_model("moe"), ranks.make_batch([2])
    model.config.norm_topk_prob = False
    for layer in model.model.layers:
        layer.mlp.gate.norm_topk_prob = False
    scores = model(input_ids=batch.tokens).logits[0, :-1].log_softmax(-1)
    expected = scores.gather(1, batch.tokens[0, 1:, None])[:, 0] * batch.mask[0, 1:]
    logprobs = make_engine("megatron", model=model).infer_batch(batch)["logprobs"]
    torch.testing.assert_close(logprobs[0, 1:], expected.detach(), atol=1e-5, rtol=1e-5)


def test_checkpoint_of_another_model_is_named(out, alone):
    engine = ranks.engine_for("megatron", "qwen2")
    before = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}
    expected = r"fsdp2-qwen3/checkpoint: .*expected \[32, 32\] for .*o_proj.weight, got \[32, 48\]"
    with pytest.raises(ValueError, match=expected):
        engine.load_checkpoint(out / "fsdp2-qwen3" / "checkpoint")
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.get_per_tensor_param())


def test_an_fsdp2_checkpoint_without_moments_is_loaded(tmp_path, alone):
    """It was saved before the first update; this engine's moments and steps are 0 again."""
    of_fsdp2 = ranks.engine_for("fsdp2", "qwen3")
    of_fsdp2.save_checkpoint(tmp_path / "checkpoint", {"step": 0})
    engine, batch = ranks.engine_for("megatron", "qwen3"), ranks.make_batch(list(range(ranks.ROWS)), "qwen3")
    losses = ranks.losses_of("qwen3")
    for _ in range(2):
        assert ranks.train(engine, batch, losses[0], losses)["grad_norm"] > 0
        assert engine.load_checkpoint(tmp_path / "checkpoint") == {"step": 0}
    expected, found = (ranks.train(one, batch, losses[0], losses) for one in (of_fsdp2, engine))
    assert found == pytest.approx(expected, rel=1e-4)
    of_fsdp2, engine = (dict(one.get_per_tensor_param()) for one in (of_fsdp2, engine))
    assert_same(engine, of_fsdp2)


def test_a_checkpoint_of_parameters_that_are_frozen_is_named(tmp_path, alone):
    ranks.engine_for("megatron", "qwen3").save_checkpoint(tmp_path / "checkpoint")
    model = ranks.make_model("qwen3")
    freeze(model, "model.norm")
    engine = ranks.engine_for("megatron", "qwen3", model)
    with pytest.raises(ValueError, match="only parameters that this model trains, got 1 others such as model.norm.w"):
        engine.load_checkpoint(tmp_path / "checkpoint")


def test_a_checkpoint_is_loaded_tensor_by_tensor(tmp_path, alone):
    """Beside the engine there is room for the largest tensor, not for the weights and the optimizer's state."""
    options = {"vocab_size": 4000, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
    more = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = Qwen2ForCausalLM(Qwen2Config(**options, **more))
    engine = make_engine("megatron", model=model, optimizer=adamw)
    engine.save_checkpoint(tmp_path / "checkpoint")
    engine.load_checkpoint(tmp_path / "checkpoint")  # imports
    taken, _ = peak(lambda: engine.load_checkpoint(tmp_path / "checkpoint"))
    weights = 4 * sum(p.numel() for p in model.parameters())
    assert taken < weights / 2 < 20e6


def test_a_loss_without_gradient_is_named(alone):
    engine = ranks.engine_for("megatron", "qwen2")
    expected = r"expected a 0-d loss that requires grad, got shape \(\) and requires_grad=False"
    with pytest.raises(ValueError, match=expected):
        engine.train_batch(ranks.make_batch([0]), lambda out, mb: (out.logprobs.sum().detach(), {}))


def test_frozen_parameters_do_not_change(alone):
    model = ranks.make_model("qwen3")
    frozen = freeze(model, "embed_tokens|layers.0.self_attn.[qkv]_proj|layers.1.mlp.down_proj")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = make_engine("megatron", model=model, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
    engine.train_batch(ranks.make_batch(list(range(ranks.ROWS))), POLICY[1])
    after = dict(engine.get_per_tensor_param())
    assert len(frozen) == 5 and all(torch.equal(after[name], before[name]) == (name in frozen) for name in before)
    destroy_megatron_groups()
    model.get_parameter(frozen[1]).requires_grad_(True)
    expected = "model: expected .*q_proj.*, which are one matrix in Megatron, to be all frozen or all trained"
    with pytest.raises(ValueError, match=expected):
        make_engine("megatron", model=model)


def test_what_is_frozen_or_replaced_later_is_named(alone):
    """It would be trained on with its moments, or not at all."""
    model, batch = ranks.make_model("qwen3"), ranks.make_batch([0])
    freeze(model, "embed_tokens")
    engine = make_engine("megatron", model=model, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
    engine.train_batch(batch, POLICY[1])
    first = next(p for p in engine.module.parameters() if not p.requires_grad)
    last = [p for p in engine.module.parameters() if p.requires_grad][-1]
    for parameter, before in ((first, False), (last, True)):
        parameter.requires_grad_(not before)
        with pytest.raises(
            ValueError, match="model: expected the same trained parameters in all steps .* got 1 frozen"
        ):
            engine.train_batch(batch, POLICY[1])
        parameter.requires_grad_(before)
    engine.train_batch(batch, POLICY[1])
    engine.optimizer = torch.optim.AdamW([last])
    with pytest.raises(ValueError, match="optimizer: expected that of the built engine in the megatron engine, got an"):
        engine.train_batch(batch, POLICY[1])


def test_frozen_vision_tower_has_no_gradient_and_does_not_change(alone):
    model = ranks.make_model("vl")
    frozen = freeze(model, vision_tower_pattern(model))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = make_engine("megatron", model=model, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
    engine.train_batch(ranks.make_batch(list(range(ranks.ROWS)), "vl"), POLICY[1])
    assert all(parameter.grad is None for parameter in engine.model.visual.parameters())
    after = dict(engine.get_per_tensor_param())
    assert all(torch.equal(after[name], before[name]) == (name in frozen) for name in before)


def test_a_gradient_that_is_not_finite_changes_nothing(alone):
    engine = ranks.engine_for("megatron", "qwen2")
    before = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}
    metrics = engine.train_batch(ranks.make_batch([0]), lambda out, mb: (out.logprobs.sum() * float("inf"), {}))
    assert metrics["skipped_steps"] == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.get_per_tensor_param())


@pytest.mark.parametrize("kind", ["qwen2", "value"])
def test_bfloat16_keeps_float32_weights(kind, alone):
    """Steps too small for bfloat16 are not lost: the optimizer works and saves in float32, as does a value head."""
    model, of_kind = ranks.make_model(kind), ranks.losses_of(kind)
    model_type = "value_model" if kind == "value" else "language_model"
    options = {"compute_dtype": torch.bfloat16, "optimizer": lambda p: torch.optim.AdamW(p, lr=1e-6)}
    engine = make_engine("megatron", model_type, model=model, **options)

    def weights():
        optimizer, groups = engine.distributed_optimizer, engine.groups
        return checkpoint_state(engine.parameters, optimizer, groups, engine.megatron_config)["model"]

    before = dict(engine.get_per_tensor_param())["model.norm.weight"].clone()
    assert before.dtype == torch.bfloat16
    for name, tensor in weights().items():
        assert torch.equal(tensor, model.get_parameter(name)), name
    metrics = engine.train_batch(ranks.make_batch([0, 1], kind), of_kind[0], OUTPUTS[of_kind])
    assert metrics["grad_norm"] > 0
    moved = weights()["model.norm.weight"] - model.model.norm.weight
    assert 0.9e-6 < moved.abs().max() < 1.1e-6
    assert torch.equal(dict(engine.get_per_tensor_param())["model.norm.weight"], before)


def replaced_functions():
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    of_torch = torch.cuda.current_device, torch.cuda.synchronize, torch.Tensor.cuda
    of_megatron = random._get_cuda_rng_state, random._set_cuda_rng_state, MoEAlltoAllTokenDispatcher.cuda_dtoh_stream
    return of_torch, of_megatron


def test_cuda_calls_use_the_host_only_within_the_context():
    before = replaced_functions()
    with pytest.raises(KeyError), cuda_calls_on_host(torch.device("cpu")):
        assert torch.cuda.current_device() == torch.zeros(1, device="cuda").device == torch.device("cpu")
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor" and torch.zeros(1).cuda().device.type == "cpu"
        raise KeyError
    assert before == replaced_functions()
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_without_megatron_core_the_error_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "rlkit.engines.megatron.engine", raising=False)
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    expected = r"megatron engine: expected megatron-core, got none .*pip install -e '.\[megatron\]'"
    with pytest.raises(ImportError, match=expected):
        make_engine("megatron", model=None)
