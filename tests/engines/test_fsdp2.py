"""The fsdp2 engine in one process, against transformers' own padded forward and its own other layouts."""

import math
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import peft
import pytest
import torch
from PIL import Image
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor
from transformers import AutoModelForImageTextToText, Qwen2Config, Qwen2ForCausalLM, core_model_loading

from rlkit.data import append_response, collate, prompt_sample
from rlkit.engines import make_engine, offload, register_engine, sampler_dtype
from rlkit.engines.distributed import init_distributed
from rlkit.engines.fsdp.sharding import make_device_mesh, reduce_unused_experts
from rlkit.engines.packing import attention
from rlkit.engines.packing.attention import AttentionOptions, varlen_attention
from rlkit.engines.packing.inputs import prepare_model_inputs
from rlkit.engines.packing.layout import PackedLayout
from rlkit.engines.packing.shared_prompts import shared_prompt_groups
from rlkit.losses import clipped_policy_loss, token_mean
from rlkit.vlm import (
    encode_prompt,
    encode_responses,
    freeze,
    load_model,
    load_processor,
    lora,
    suppressed_token_ids,
    vision_tower_pattern,
)
from rlkit.vlm.checkpoint_weights import checkpoint_parameters

sys.path.insert(0, str(Path(__file__).parent))
from rows import make_batch, make_samples

LAYOUTS = {
    "shared": {},
    "packed": {"share_prompts": False},
    "padded": {"use_remove_padding": False},
    "micro_batches": {"micro_batch_tokens": 90},
    "fused": {"use_fused_kernels": True},
    "fused_padded": {"use_fused_kernels": True, "use_remove_padding": False},
    "checkpointing": {"enable_gradient_checkpointing": True},
}


@pytest.fixture(scope="module")
def processor(tiny_dir):
    return load_processor(tiny_dir)


def engine_for(tiny_dir, *, backend="fsdp2", model=None, lr=1e-2, **options):
    options.setdefault("optimizer", lambda params: torch.optim.AdamW(params, lr=lr, eps=1e-4))
    options = {"keep_gradients": True, **options}
    return make_engine(backend, "language_model", model=model or load_model(tiny_dir), **options)


def weighted_loss(out, mb):
    """Uses both outputs, so that both gradients are compared."""
    weights = mb.advantages[:, None] * out.logprobs + 0.3 * out.entropy
    return token_mean(weights, mb.mask, mb.total_tokens), {}


def gradients(engine):
    return {
        n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for n, p in engine.module.named_parameters()
        if p.grad is not None
    }


@pytest.fixture(scope="module")
def plain(tiny_dir, processor):
    """transformers' own forward, row by row, with its own position ids: logprobs, entropy, gradients."""
    model = AutoModelForImageTextToText.from_pretrained(tiny_dir, dtype=torch.float32)
    batch = make_batch(processor)
    suppressed = suppressed_token_ids(model.config, processor.tokenizer)
    logprobs, entropy, loss = torch.zeros(batch.tokens.shape), torch.zeros(batch.tokens.shape), 0.0
    for b, length in enumerate(batch.lengths):
        ids = batch.tokens[b : b + 1, :length]
        kinds = (ids == model.config.image_token_id).int()
        logits = model(input_ids=ids, mm_token_type_ids=kinds, **batch.vision[b]).logits[0]
        logits[:, suppressed] = -1e30
        scores = (logits / 1.3).log_softmax(-1)
        for t in range(1, length):
            if batch.mask[b, t]:
                logprobs[b, t] = scores[t - 1, ids[0, t]]
                entropy[b, t] = -(scores[t - 1].exp() * scores[t - 1]).sum()
    weights = batch.advantages[:, None] * logprobs + 0.3 * entropy
    loss = weights[batch.mask].sum() / batch.mask.sum()
    loss.backward()
    return logprobs.detach(), entropy.detach(), {n: p.grad for n, p in model.named_parameters()}, loss.item()


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_equals_transformers(tiny_dir, processor, plain, name):
    logprobs, entropy, expected, loss = plain
    suppressed = suppressed_token_ids(load_model(tiny_dir).config, processor.tokenizer)
    engine = engine_for(tiny_dir, temperature=1.3, suppressed_token_ids=suppressed, max_grad_norm=1e9, **LAYOUTS[name])
    batch = make_batch(processor)
    scores = engine.infer_batch(batch, ("logprobs", "entropy"))
    torch.testing.assert_close(scores["logprobs"], logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores["entropy"], entropy, atol=1e-5, rtol=1e-5)
    metrics = engine.train_batch(batch, weighted_loss, ("logprobs", "entropy"))
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    assert gradients(engine).keys() == expected.keys()
    for parameter, gradient in gradients(engine).items():
        torch.testing.assert_close(gradient, expected[parameter], atol=1e-5, rtol=1e-4, msg=parameter)


def test_pad_equals_eos_and_its_embedding_is_trained():
    """transformers gives the input embedding of config.pad_token_id no gradient."""
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False)
    samples = [
        append_response(prompt_sample([3, 7, 5]), [4, 7], [-1.0] * 2),
        append_response(prompt_sample([7]), [6], [-1.0]),
    ]
    batch, found = collate(samples, advantages=torch.tensor([1.0, -2.0])), []
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    for pad in (None, 7):
        config.pad_token_id = pad
        same = Qwen2ForCausalLM(config)
        same.load_state_dict(model.state_dict())
        engine = engine_for("", model=same, max_grad_norm=math.inf)
        engine.train_batch(batch, weighted_loss, ("logprobs", "entropy"))
        found.append(gradients(engine)["model.embed_tokens.weight"])
    assert found[0][7].norm() > 1e-3 and torch.equal(*found)


def test_sharing_prompts_saves_tokens_and_images(processor, tiny_dir):
    batch, model = make_batch(processor), load_model(tiny_dir)
    from rlkit.vlm.inputs import position_spec

    spec, cpu = position_spec(model.config), torch.device("cpu")
    shared, plain = (prepare_model_inputs(batch, spec, cpu, share_prompts=share).kwargs for share in (True, False))
    assert shared_prompt_groups(batch) == [[0, 1, 2], [3], [4, 5], [6, 7, 8]]
    assert len(shared["image_grid_thw"]) == 3 and len(plain["image_grid_thw"]) == 8
    prompts = {i: batch.mask[i].int().argmax().item() for i in (0, 4, 6)}
    saved = 2 * prompts[0] + prompts[4] + 2 * prompts[6]
    assert plain["input_ids"].numel() - shared["input_ids"].numel() == saved


def test_same_prompt_with_another_image_is_not_shared(processor):
    one, other = (make_samples(processor, seed, responses=(1,), sizes=((56, 56),))[0] for seed in (0, 5))
    assert one.token_ids[:20] == other.token_ids[:20]
    assert shared_prompt_groups(collate([one, other])) == [[0], [1]]


def on_cuda(head, dtype=torch.bfloat16):
    return SimpleNamespace(is_cuda=True, shape=(2, 2, 9, head), dtype=dtype)


def test_grouped_heads_on_a_gpu_are_repeated_where_sdpa_would_hold_all_scores(monkeypatch):
    """The rule is that of transformers' own attention, and float32."""
    keys, mask = on_cuda(64), torch.ones(9, 9, dtype=torch.bool)
    assert not attention.math_kernel_for_groups(keys, keys, None) and attention.math_kernel_for_groups(keys, keys, mask)
    for one, other in ((on_cuda(512), on_cuda(512)), (on_cuda(192), on_cuda(128)), [on_cuda(64, torch.float32)] * 2):
        assert attention.math_kernel_for_groups(one, other, None)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 9, 8, generator=g) for heads in (4, 2, 2))
    assert not attention.math_kernel_for_groups(k, v, mask)
    options = AttentionOptions()
    expected = [attention._attend(q, k, v, x, options) for x in (None, mask.tril())]
    monkeypatch.setattr(attention, "math_kernel_for_groups", lambda *_: True)
    sdpa, grouped = torch.nn.functional.scaled_dot_product_attention, []
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **more: grouped.append(more["enable_gqa"]) or sdpa(*args, **more),
    )
    found = [attention._attend(q, k, v, x, options) for x in (None, mask.tril())]
    assert grouped == [False, False]
    torch.testing.assert_close(found, expected)


def test_attention_across_sequences_would_change_numbers():
    """A control: attention over a row as if it were one sequence gives other numbers."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, heads, 8, generator=g) for heads in (4, 2, 2))
    cpu = torch.device("cpu")
    separate = varlen_attention(q, k, v, PackedLayout([0, 4], [4, 5], [(0, 0)] * 2, cpu))
    joined = varlen_attention(q, k, v, PackedLayout([0], [9], [(0, 0)], cpu))
    torch.testing.assert_close(separate[:4], joined[:4])
    assert (separate[4:] - joined[4:]).abs().max() > 0.1


@pytest.mark.parametrize("window", [None, 3])
def test_varlen_attention_equals_loop(window):
    """Segments of different lengths, prefixes, grouped heads; the loop computes one query at a time."""
    g = torch.Generator().manual_seed(0)
    lengths, prefixes = [7, 2, 3, 1, 5, 40], [(0, 0), (0, 7), (0, 7), (0, 0), (12, 1), (0, 0)]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    n = sum(lengths)
    tensors = [torch.randn(n, heads, 8, generator=g, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    q, k, v = tensors
    rows = []
    for start, length, (begin, before) in zip(starts, lengths, prefixes, strict=True):
        keys = [*range(begin, begin + before), *range(start, start + length)]
        for t in range(length):
            seen = keys[: before + t + 1][-(window or 10**9) :]
            heads = []
            for h in range(4):
                scores = torch.stack([q[start + t, h] @ k[j, h // 2] for j in seen]) / math.sqrt(8)
                weights = scores.exp() / scores.exp().sum()
                heads.append(sum(w * v[j, h // 2] for w, j in zip(weights, seen, strict=True)))
            rows.append(torch.stack(heads))
    expected = torch.stack(rows)
    layout = PackedLayout(starts, lengths, prefixes, torch.device("cpu"))
    out = varlen_attention(q, k, v, layout, AttentionOptions(window=window))
    torch.testing.assert_close(out, expected)
    weight = torch.randn(expected.shape, generator=g, dtype=torch.float64)
    for gradient, expected_gradient in zip(
        torch.autograd.grad((out * weight).sum(), tensors),
        torch.autograd.grad((expected * weight).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(gradient, expected_gradient)


def test_layout_has_the_form_of_gpu_kernels():
    layout = PackedLayout([0, 7, 9, 12], [7, 2, 3, 1], [(0, 0), (0, 7), (0, 7), (0, 0)], torch.device("cpu"))
    assert layout.cu_seqlens_q.tolist() == [0, 7, 9, 12, 13] and layout.cu_seqlens_q.dtype == torch.int32
    assert layout.cu_seqlens_k.tolist() == [0, 7, 16, 26, 27]
    first = list(range(7))
    assert layout.key_indices.tolist() == [*first, *first, 7, 8, *first, 9, 10, 11, 12]
    assert PackedLayout([0, 4], [4, 5], [(0, 0)] * 2, torch.device("cpu")).key_indices is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_varlen_attention_on_a_gpu_equals_the_cpu():
    g = torch.Generator().manual_seed(0)
    lengths, prefixes = [7, 2, 3, 1, 5, 40], [(0, 0), (0, 7), (0, 7), (0, 0), (12, 1), (0, 0)]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    q, k, v = (torch.randn(sum(lengths), heads, 64, generator=g).bfloat16() for heads in (4, 2, 2))
    for window in (None, 3):
        options = AttentionOptions(window=window)
        layout = PackedLayout(starts, lengths, prefixes, torch.device("cpu"))
        cpu = varlen_attention(q.float(), k.float(), v.float(), layout, options)
        layout = PackedLayout(starts, lengths, prefixes, torch.device("cuda"))
        gpu = varlen_attention(q.cuda(), k.cuda(), v.cuda(), layout, options)
        torch.testing.assert_close(gpu.float().cpu(), cpu, atol=3e-2, rtol=3e-2)


def test_vision_tensors_follow_their_sample(tiny_dir, processor):
    engine = engine_for(tiny_dir, micro_batch_tokens=100)
    batch = make_batch(processor)
    in_order = engine.infer_batch(batch)["logprobs"]
    order = [5, 0, 8, 3, 1, 7, 2, 6, 4]
    shuffled = make_batch(processor, rows=order)
    logprobs = engine.infer_batch(shuffled)["logprobs"]
    torch.testing.assert_close(logprobs, in_order[order][:, : logprobs.shape[1]], atol=1e-5, rtol=1e-5)


def test_rows_of_a_micro_batch_group_stay_in_one_micro_batch(tiny_dir, processor):
    engine = engine_for(tiny_dir, micro_batch_tokens=80)
    batch = make_batch(processor).add(micro_batch_group=torch.tensor([0, 1, 2, 3, 3, 2, 1, 0, 4]))
    seen = []

    def loss_fn(out, mb):
        seen.append(mb.micro_batch_group.tolist())
        return token_mean(out.logprobs, mb.mask, mb.total_tokens), {}

    engine.train_batch(batch, loss_fn)
    assert len(seen) > 2
    assert sorted(x for part in seen for x in part) == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert all(set(a).isdisjoint(b) for i, a in enumerate(seen) for b in seen[:i])


def test_the_host_does_not_wait_for_each_micro_batch(tiny_dir, processor, monkeypatch):
    """On a GPU it prepares the next one meanwhile: results are copied once, and where they belong is known."""
    engine, batch, copied, to_host = (
        engine_for(tiny_dir, micro_batch_tokens=80),
        make_batch(processor),
        [],
        torch.Tensor.cpu,
    )
    assert len([*engine._micro_batches(batch)]) > 1
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: copied.append(x.shape) or to_host(x))
    engine.infer_batch(batch, ("logprobs", "entropy"))
    assert copied == [batch.tokens.shape] * 2
    inputs = prepare_model_inputs(batch, engine.spec, torch.device("meta"))
    assert inputs.output_indices.device.type == "cpu"
    assert inputs.scatter(torch.zeros(len(inputs.targets), device="meta")).shape == batch.tokens.shape


def test_results_are_placed_by_indices_on_the_device(tiny_dir, processor, monkeypatch):
    """torch would copy an index on the host to a GPU, and wait for that."""
    engine, batch, devices, put = engine_for(tiny_dir), make_batch(processor), [], torch.Tensor.__setitem__
    monkeypatch.setattr(engine, "device", torch.device("meta"))
    monkeypatch.setattr(
        engine, "_forward", lambda part, *_: SimpleNamespace(logprobs=torch.zeros(part.tokens.shape, device="meta"))
    )

    def recorded(x, key, value):
        if x.device.type == "meta":
            devices.append(key[0].device.type)
        put(x, key, value)

    monkeypatch.setattr(torch.Tensor, "__setitem__", recorded)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: x)
    engine.infer_batch(batch)
    assert devices and set(devices) == {"meta"}


def test_on_policy_ratio_is_one_in_the_engine(tiny_dir, processor):
    """A token's logprob is the same to rounding in `infer_batch` and `train_batch`, in different micro-batches."""
    engine = engine_for(tiny_dir, micro_batch_tokens=100, lr=0.0)
    batch = make_batch(processor)
    batch.add(old_logprobs=engine.infer_batch(batch)["logprobs"])
    ratios = []

    def loss_fn(out, mb):
        ratios.append((out.logprobs - mb.old_logprobs)[mb.mask].exp())
        return token_mean(clipped_policy_loss(out.logprobs, mb.old_logprobs, mb.advantages, mb.mask), mb.mask), {}

    engine.train_batch(batch, loss_fn)
    assert (torch.cat(ratios) - 1).abs().max() < 1e-5


def test_compiled_layers_have_the_same_numbers_and_names(tiny_dir, processor, tmp_path):
    """Compiled in place before the engine shards them in bfloat16; the graph of a layer breaks only at attention."""
    batch, steps, engines, dtype = make_batch(processor), [], [], torch.bfloat16
    counters.clear()
    for compiled in (False, True):
        model = load_model(tiny_dir)
        if compiled:  # only one layer, as it takes seconds; the eager backend is exact
            model.model.language_model.layers[1].compile(backend="eager")
        engines.append(engine_for(tiny_dir, model=model, compute_dtype=dtype))
        steps.append([engines[-1].train_batch(batch, weighted_loss, ("logprobs", "entropy")) for _ in range(2)])
    assert steps[1] == [pytest.approx(step, abs=1e-5, rel=1e-5) for step in steps[0]]
    assert counters["stats"]["unique_graphs"] > 1
    assert all("`<function packed_attention" in why for why in counters["graph_break"]), counters["graph_break"]
    plain, compiled = (dict(engine.get_per_tensor_param()) for engine in engines)
    assert plain.keys() == compiled.keys() <= engines[1].base.state_dict().keys()
    for name, tensor in compiled.items():
        torch.testing.assert_close(tensor, plain[name], atol=1e-5, rtol=1e-5, msg=name)
    engines[1].save_checkpoint(tmp_path / "step_2")
    other = engine_for(tiny_dir, compute_dtype=dtype)
    other.load_checkpoint(tmp_path / "step_2")
    assert all(torch.equal(tensor, compiled[name]) for name, tensor in other.get_per_tensor_param())


def test_frozen_vision_tower_has_no_gradient_and_does_not_change(tiny_dir, processor):
    model = load_model(tiny_dir)
    names = freeze(model, vision_tower_pattern(model))
    assert names and all(".visual." in name for name in names)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    engine = engine_for(tiny_dir, model=model)
    for _ in range(2):
        engine.train_batch(make_batch(processor), weighted_loss, ("logprobs", "entropy"))
    assert not any(".visual." in name for name in gradients(engine))
    for name, tensor in engine.get_per_tensor_param():
        assert torch.equal(tensor, before[name]) == (".visual." in name), name


@pytest.mark.parametrize("backend", ["fsdp2", "fsdp1"])
def test_parameters_that_are_unfrozen_later_are_trained_or_refused(tiny_dir, processor, backend):
    """Added to the optimizer, they are trained as if they had been trainable from the start."""
    late, early = load_model(tiny_dir), load_model(tiny_dir)
    freeze(late, "visual")
    batch = make_batch(processor)
    engines = [engine_for(tiny_dir, backend=backend, model=model) for model in (late, early)]
    engines[0].module.requires_grad_(True)
    before = {n: p.detach().clone() for n, p in late.named_parameters()}
    with pytest.raises(ValueError, match=r"got none of 30 such as .*visual.*; add them with engine\.optimizer"):
        engines[0].train_batch(batch, weighted_loss, ("logprobs", "entropy"))
    assert all(torch.equal(p, before[n]) for n, p in late.named_parameters())
    tower = [p for name, p in engines[0].module.named_parameters() if "visual" in name]
    engines[0].optimizer.add_param_group({"params": tower})
    for engine in engines:
        engine.train_batch(batch, weighted_loss, ("logprobs", "entropy"))
    for (name, ours), (_, expected) in zip(late.named_parameters(), early.named_parameters(), strict=True):
        assert torch.equal(ours, expected) and not torch.equal(ours, before[name]), name


def test_frozen_layers_of_the_language_model_are_units(tiny_dir, processor):
    """A rank that trains the projector alone never gathers all of them. Frozen layers of the tower are not: some ranks
    may have no images."""
    model = load_model(tiny_dir)
    freeze(model, r"language_model|lm_head|visual\.blocks")
    engine = engine_for(tiny_dir, model=model, compute_dtype=torch.bfloat16)
    units = [name for name, module in engine.module.named_modules() if isinstance(module, FSDPModule)]
    layers = len(model.model.language_model.layers)
    assert units == ["", *(f"model.language_model.layers.{i}" for i in range(layers))]
    assert engine.train_batch(make_batch(processor), weighted_loss, ("logprobs", "entropy"))["grad_norm"] > 0
    assert all(".merger." in name or ".patch_embed." in name for name in gradients(engine))


def test_rows_of_text_have_no_gradient_if_only_the_projector_trains(tiny_dir, processor):
    grads = []
    for budget in (16384, 90):  # one micro-batch, and some of text alone
        model = load_model(tiny_dir)
        freeze(model, r"language_model|lm_head|visual\.(blocks|patch_embed)")
        engine = engine_for(tiny_dir, model=model, micro_batch_tokens=budget)
        engine.train_batch(make_batch(processor), weighted_loss, ("logprobs", "entropy"))
        grads.append(gradients(engine))
    assert grads[0].keys() == grads[1].keys() and all(".merger." in name for name in grads[0])
    for name, gradient in grads[0].items():
        torch.testing.assert_close(grads[1][name], gradient, msg=name)


def test_lora_trains_adapters_alone_and_merges(tiny_dir, processor):
    model = lora(load_model(tiny_dir), 4, 8)
    engine = engine_for(tiny_dir, model=model)
    batch = make_batch(processor)
    reference = engine.infer_batch(batch)["logprobs"]
    for _ in range(2):
        engine.train_batch(batch, weighted_loss, ("logprobs", "entropy"))
    trained = engine.infer_batch(batch)["logprobs"]
    assert (trained - reference).abs().max() > 1e-3
    assert all(".lora_" in name and ".visual." not in name for name in gradients(engine))
    with engine.disable_adapter():
        torch.testing.assert_close(engine.infer_batch(batch)["logprobs"], reference)
    plain = load_model(tiny_dir)
    merged = dict(engine.get_per_tensor_param())
    assert merged.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(merged, strict=False)
    again = engine_for(tiny_dir, model=plain).infer_batch(batch)["logprobs"]
    torch.testing.assert_close(again, trained, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("backend", "rank"), [("fsdp2", 0), ("fsdp2", 4), ("fsdp1", 0)])
def test_only_the_first_weight_sync_looks_up_names(tiny_dir, processor, backend, rank, monkeypatch):
    """For each weight: its name in the files, and the dtype that a sampler has it in."""
    model = lora(load_model(tiny_dir), rank, 8) if rank else load_model(tiny_dir)
    engine = make_engine(backend, model=model, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
    looked_up = []
    for module, name in ((core_model_loading, "revert_weight_conversion"), (sampler_dtype, "kept_in_float32")):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, f=function, n=name: (looked_up.append(n), f(*args))[1])
    first = {name: x.clone() for name, x in engine.get_per_tensor_param(dtype=torch.bfloat16)}
    assert Counter(looked_up) == {"revert_weight_conversion": len(first), "kept_in_float32": len(first)}
    looked_up.clear()
    engine.train_batch(make_batch(processor), weighted_loss, ("logprobs", "entropy"))
    second = dict(engine.get_per_tensor_param(dtype=torch.bfloat16))
    assert not looked_up
    assert [(name, x.dtype) for name, x in second.items()] == [(name, x.dtype) for name, x in first.items()]
    assert any(not torch.equal(x, first[name]) for name, x in second.items())
    in_float32 = dict(engine.get_per_tensor_param())
    assert list(in_float32) == list(first) and {x.dtype for x in in_float32.values()} == {torch.float32}


def test_hf_export_loads_with_processor(tiny_dir, processor, tmp_path):
    engine = engine_for(tiny_dir, processor=processor)
    batch = make_batch(processor)
    engine.train_batch(batch, weighted_loss, ("logprobs", "entropy"))
    logprobs = engine.infer_batch(batch)["logprobs"]
    for _ in range(2):  # the second replaces the first
        engine.export_hf(tmp_path / "model")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32)
    again = engine_for(tiny_dir, model=model).infer_batch(batch)["logprobs"]
    torch.testing.assert_close(again, logprobs, atol=1e-6, rtol=1e-6)
    loaded = load_processor(str(tmp_path / "model"))
    assert loaded.image_processor.merge_size == 2
    assert loaded.tokenizer("digit 7")["input_ids"] == processor.tokenizer("digit 7")["input_ids"]


def test_tied_embeddings_sync(tiny_dir, processor, tmp_path):
    """The output layer is the embedding: both change together, are exported once, and are tied again after loading."""
    engine = engine_for(tiny_dir, processor=processor)
    engine.train_batch(make_batch(processor), weighted_loss, ("logprobs", "entropy"))
    weights = dict(engine.get_per_tensor_param())
    assert "lm_head.weight" not in weights
    assert not torch.equal(weights["model.language_model.embed_tokens.weight"], load_model(tiny_dir).lm_head.weight)
    engine.export_hf(tmp_path / "model")
    model = load_model(str(tmp_path / "model"))
    assert model.lm_head.weight is model.get_input_embeddings().weight
    torch.testing.assert_close(model.lm_head.weight, weights["model.language_model.embed_tokens.weight"])


def test_nan_step_is_skipped_and_never_saved(tiny_dir, processor):
    engine = engine_for(tiny_dir)
    batch = make_batch(processor)
    before = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}

    def nan_loss(out, mb):
        return token_mean(out.logprobs, mb.mask, mb.total_tokens) * float("nan"), {}

    metrics = engine.train_batch(batch, nan_loss)
    assert metrics["skipped_steps"] == 1 and math.isnan(metrics["grad_norm"])
    for name, tensor in engine.get_per_tensor_param():
        assert torch.equal(tensor, before[name]), name
    assert engine.train_batch(batch, weighted_loss, ("logprobs", "entropy"))["skipped_steps"] == 0
    assert all(tensor.isfinite().all() for _, tensor in engine.get_per_tensor_param())


@pytest.mark.parametrize("rows", [[], [0, 1]])
def test_a_batch_without_trained_tokens_changes_nothing(tiny_dir, processor, rows):
    """No response of a step could be scored. Moments and weight decay would change the weights otherwise."""
    engine = engine_for(tiny_dir)

    def loss_fn(out, mb):
        loss, _ = weighted_loss(out, mb)
        return loss, {"logprob": token_mean(out.logprobs, mb.mask, mb.total_tokens)}

    engine.train_batch(make_batch(processor), loss_fn, ("logprobs", "entropy"))
    before = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}
    batch = make_batch(processor, rows=rows)
    batch.mask.zero_()
    metrics = engine.train_batch(batch, loss_fn, ("logprobs", "entropy"))
    assert metrics["loss"] == metrics["logprob"] == metrics["grad_norm"] == metrics["skipped_steps"] == 0
    for name, tensor in engine.get_per_tensor_param():
        assert torch.equal(tensor, before[name]), name


def test_a_token_that_pads_is_trained_where_it_is_text():
    """As in many models, whose responses end with the token that pads: nn.Embedding drops the gradient of that row."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=40, hidden_size=32, num_hidden_layers=1, pad_token_id=9, **heads)
    chats = [append_response(prompt_sample([5, 9, 7]), ids, [0.0] * len(ids)) for ids in ([8, 9], [8, 6, 9])]
    gradients = []
    for packed in (True, False):
        torch.manual_seed(0)
        engine = engine_for(None, model=Qwen2ForCausalLM(config), use_remove_padding=packed)
        batch = collate(chats, pad_token_id=9, advantages=torch.tensor([1.0, -0.5]))
        engine.train_batch(batch, weighted_loss, ("logprobs", "entropy"))
        gradients.append(engine.module.get_input_embeddings().weight.grad)
    assert gradients[0][9].any()
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


def test_gathered_module_has_full_weights_and_is_sharded_again(tiny_dir, processor):
    """In bfloat16, because one process in float32 shards nothing."""
    engine, batch = engine_for(tiny_dir, compute_dtype=torch.bfloat16), make_batch(processor)
    for _ in range(2):
        engine.train_batch(batch, weighted_loss, ("logprobs", "entropy"))
        with engine.gathered() as module:
            gathered = {n: p.detach().clone() for n, p in module.named_parameters()}
        assert all(type(x) is torch.Tensor and x.dtype == torch.bfloat16 for x in gathered.values())
        assert all(isinstance(p, DTensor) for p in engine.module.parameters())
        for name, tensor in engine.get_per_tensor_param():
            assert torch.equal(tensor.bfloat16(), gathered[name]), name


def test_a_single_process_in_one_precision_is_not_sharded(tiny_dir):
    assert not any(isinstance(p, DTensor) for p in engine_for(tiny_dir).module.parameters())


@pytest.mark.parametrize("backend", ["fsdp2", "fsdp1"])
def test_exported_weights_have_full_precision(tiny_dir, processor, backend):
    """Also right after a forward in bfloat16, which leaves the root unit gathered in that precision."""
    engine = engine_for(tiny_dir, backend=backend, compute_dtype=torch.bfloat16)
    logprobs = engine.infer_batch(make_batch(processor))["logprobs"]
    exact = engine_for(tiny_dir, backend=backend).infer_batch(make_batch(processor))["logprobs"]
    assert 1e-5 < (logprobs - exact).abs().max() < 0.1
    expected = dict(load_model(tiny_dir).named_parameters())
    for name, tensor in engine.get_per_tensor_param():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected[name]), name


def test_metrics_are_summed_and_maxima_are_not(tiny_dir, processor):
    batch = make_batch(processor)

    def loss_fn(out, mb):
        largest = (mb.mask.sum(1).amax() if len(mb) else torch.tensor(0)).float()
        share = token_mean(torch.ones_like(out.logprobs), mb.mask, mb.total_tokens)
        metrics = {"share": share, "length/max": largest, "rows": len(mb)}
        return token_mean(out.logprobs, mb.mask, mb.total_tokens), metrics

    metrics = engine_for(tiny_dir, micro_batch_tokens=60).train_batch(batch, loss_fn)
    assert metrics["share"] == pytest.approx(1.0)
    assert metrics["length/max"] == batch.mask.sum(1).max()
    assert metrics["rows"] == len(batch)  # a metric may be a plain number


def test_bad_input_is_named(tiny_dir, processor):
    batch = make_batch(processor)
    with pytest.raises(ValueError, match="backend: expected fsdp1 .*; got 'zero3' for a 'language_model' on 'cpu'"):
        make_engine("zero3", model=None)
    with pytest.raises(ValueError, match=r"model: expected a plain module, got torch.compile\(model\)"):
        make_engine("fsdp2", model=torch.compile(load_model(tiny_dir)))
    engine = engine_for(tiny_dir, optimizer=None)
    with pytest.raises(ValueError, match="optimizer: expected one for train_batch, got None"):
        engine.train_batch(batch, weighted_loss)
    with pytest.raises(ValueError, match="outputs: expected logprobs, entropy; got value"):
        engine.infer_batch(batch, ("value",))
    with pytest.raises(ValueError, match="disable_adapter: expected a model with adapters, got none"):
        engine.disable_adapter()
    with pytest.raises(ValueError, match="loss_fn: expected a 0-d loss that requires grad"):
        engine_for(tiny_dir).train_batch(batch, lambda out, mb: (out.logprobs.detach().sum(), {}))


def test_a_back_end_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "rlkit.engines.megatron.engine", raising=False)
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    expected = r"megatron engine: expected megatron-core, got none .*pip install -e '.\[megatron\]'"
    with pytest.raises(ImportError, match=expected):
        make_engine("megatron", model=None)


def test_a_registered_engine(monkeypatch):
    monkeypatch.setitem(sys.modules, "elsewhere", type(sys)("elsewhere"))
    sys.modules["elsewhere"].Engine = lambda **options: options
    register_engine("language_model", "mine", "cpu", "elsewhere:Engine")
    assert make_engine("mine", device="cpu", lr=1) == {"device": "cpu", "lr": 1}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_eight_bit_optimizer_trains_shards_and_resumes(tiny_dir, processor, tmp_path):
    """Nearly like AdamW; its state is sharded like the weights, and saved."""
    kinds = {"8 bits": pytest.importorskip("torchao.optim").AdamW8bit, "32 bits": torch.optim.AdamW}
    batch, steps = make_batch(processor), {}
    for name, kind in kinds.items():
        engine = engine_for(tiny_dir, device="cuda", optimizer=partial(kind, lr=1e-3, weight_decay=0.0))
        train = partial(engine.train_batch, batch, weighted_loss, ("logprobs", "entropy"))
        steps[name] = [train()["loss"] for _ in range(4)]
        engine.save_checkpoint(tmp_path / name)
        steps[name] += [train()["loss"] for _ in range(2)]
        engine.load_checkpoint(tmp_path / name)
        assert [train()["loss"] for _ in range(2)] == pytest.approx(steps[name][4:], rel=1e-3)
        state = [x for one in engine.optimizer.state.values() for x in one.values() if isinstance(x, DTensor)]
        codes = [x for x in state if hasattr(x.to_local(), "codes")]
        assert state and bool(codes) == (name == "8 bits")
    assert steps["8 bits"] == pytest.approx(steps["32 bits"], abs=1e-2)
    assert len({round(x, 4) for x in steps["8 bits"]}) > 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_weights_gradients_and_optimizer_leave_the_gpu_and_come_back(tiny_dir, processor):
    batch, steps = make_batch(processor), []
    for moves in (False, True):
        engine = engine_for(tiny_dir, device="cuda")
        steps.append([])
        for _ in range(3):
            steps[-1].append(engine.train_batch(batch, weighted_loss, ("logprobs", "entropy")))
            if moves:
                engine.to("cpu")
                state = [
                    x for one in engine.optimizer.state.values() for x in one.values() if isinstance(x, torch.Tensor)
                ]
                held = [x for p in engine.module.parameters() for x in (p, p.grad) if x is not None]
                assert {x.device.type for x in [*state, *held]} == {"cpu"}
                engine.to("cuda")
    assert steps[1] == [pytest.approx(step, rel=1e-2, abs=1e-3) for step in steps[0]]  # flash kernels sum in any order


def test_a_tensor_made_of_others_leaves_the_device_and_comes_back():
    """As 8-bit state of torchao's optimizers, whose own storage has no memory: its copy was a segmentation fault."""
    parts = torch.arange(4.0), torch.arange(4.0) + 10
    state, kept = TwoTensor(*parts), offload.Offloaded()
    kept.unload([state])
    assert kept.host_bytes == 32 and not any(x.untyped_storage().nbytes() for x in parts)
    kept.load()
    assert state.a.tolist() == [0, 1, 2, 3] and state.b.tolist() == [10, 11, 12, 13]


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_weights_and_optimizer_are_on_the_host_between_calls(tiny_dir, processor, tmp_path, compute_dtype, monkeypatch):
    """Their memory is given back, and steps, scores, weights, checkpoints and sampling are as without."""
    monkeypatch.setattr(offload, "BLOCK_BYTES", 1 << 12)  # less than most tensors
    batch, found = make_batch(processor), []
    for offloads in (False, True):
        options = {"compute_dtype": compute_dtype, "keep_gradients": False, "offload_between_phases": offloads}
        engine = engine_for(tiny_dir, **options)

        def held(engine=engine):
            state = [x for one in engine.optimizer.state.values() for x in one.values() if x.ndim]
            tensors = [getattr(x, "_local_tensor", x) for x in (*engine.module.parameters(), *state)]
            return sum(x.untyped_storage().nbytes() for x in tensors)

        held_after = [held()]
        steps = [engine.train_batch(batch, weighted_loss, ("logprobs", "entropy")) for _ in range(2)]
        held_after.append(held())
        engine.save_checkpoint(tmp_path / str(offloads))
        steps.append(engine.train_batch(batch, weighted_loss, ("logprobs", "entropy")))
        engine.load_checkpoint(tmp_path / str(offloads))
        steps.append(engine.train_batch(batch, weighted_loss, ("logprobs", "entropy")))
        scores, weights = engine.infer_batch(batch)["logprobs"], dict(engine.get_per_tensor_param())
        with engine.gathered() as module, torch.no_grad():
            logits = module(input_ids=torch.tensor([[1, 2, 3]])).logits
        held_after.append(held())
        assert all(p.grad is None for p in engine.module.parameters())
        size = sum(x.nbytes for x in weights.values())
        assert not any(held_after) if offloads else held_after[-1] >= 3 * size
        assert engine.host_bytes == (held_after[-1] or 3 * size) * offloads
        offloaded = (engine._offloaded_weights, engine._offloaded_state)
        copies = [x for part in offloaded for x in part.on_host._blocks]
        assert sum(x.nbytes for x in copies) < engine.host_bytes + 2 * offload.BLOCK_BYTES
        found.append([torch.tensor([list(step.values()) for step in steps]), scores, logits, *weights.values()])
    assert found[0][0][2].tolist() == found[0][0][3].tolist()  # the third step, and again from the checkpoint
    for plain, offloaded in zip(*found, strict=True):
        assert torch.equal(plain, offloaded)
    with pytest.raises(ValueError, match="offload_between_phases"):
        engine.to("cpu")


def by_peft(tiny_dir, adapter="default", **options):
    """A model with adapters that peft made, none of whose parts is zero."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], **options}
    model = peft.get_peft_model(load_model(tiny_dir), peft.LoraConfig(**options), adapter_name=adapter)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) / 10)
    return model


@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True}, {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 32}}, {"bias": "lora_only"}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_lora_made_by_peft_is_sent_as_it_scores(tiny_dir, processor, options):
    engine, batch = engine_for(tiny_dir, model=by_peft(tiny_dir, **options)), make_batch(processor)
    sent, weights = load_model(tiny_dir), dict(engine.get_per_tensor_param())
    for name, tensor in checkpoint_parameters(sent, sent.named_parameters()):
        tensor.data.copy_(weights[name])
    expected = engine_for(tiny_dir, model=sent).infer_batch(batch)["logprobs"]
    torch.testing.assert_close(engine.infer_batch(batch)["logprobs"], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"adapter": "policy"}, "an adapter named 'policy'"),
        ({"target_modules": ["embed_tokens"]}, "adapters of embeddings"),
    ],
)
def test_adapters_with_more_than_lora_are_refused(tiny_dir, options, got):
    """What was sent had other weights than those that scored."""
    with pytest.raises(ValueError, match=f"^model: expected LoRA in an adapter named 'default', .* got {got}; "):
        engine_for(tiny_dir, model=by_peft(tiny_dir, **options))


def test_adapters_train_in_bfloat16_after_the_reference_has_scored(tiny_dir, processor):
    """FSDP looked up the dtype of gradients in its first forward, when `disable_adapter` had frozen the adapters."""
    engine = engine_for(tiny_dir, model=lora(load_model(tiny_dir), 4, 8), compute_dtype=torch.bfloat16)
    batch = make_batch(processor)
    with engine.disable_adapter():
        engine.infer_batch(batch)
    metrics = engine.train_batch(batch, weighted_loss, ("logprobs", "entropy"))
    assert metrics["skipped_steps"] == 0
    assert {x.dtype for x in gradients(engine).values()} == {torch.float32}


def test_training_without_the_adapters_is_refused(tiny_dir, processor):
    """It changed nothing, and its metrics did not say so."""
    engine, batch = engine_for(tiny_dir, model=lora(load_model(tiny_dir), 4, 8)), make_batch(processor)
    expected = "train_batch: expected enabled adapters, got disabled ones"
    with pytest.raises(ValueError, match=expected), engine.disable_adapter():
        engine.train_batch(batch, weighted_loss, ("logprobs", "entropy"))
    assert engine.train_batch(batch, weighted_loss, ("logprobs", "entropy"))["grad_norm"] > 0


def test_frozen_adapter_matrices_stay_frozen_after_the_reference_has_scored(tiny_dir, processor):
    """peft makes all weights of the adapters trainable when it enables them again."""
    model = lora(load_model(tiny_dir), 4, 8)
    freeze(model, "lora_A")
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    engine = engine_for(tiny_dir, model=model)
    with pytest.raises(ZeroDivisionError), engine.disable_adapter():
        _ = 1 / 0
    assert [name for name, p in engine.module.named_parameters() if p.requires_grad] == trainable


@pytest.mark.parametrize("backend", ["fsdp2", "fsdp1"])
def test_the_optimizer_has_exactly_the_trained_parameters(tiny_dir, processor, backend):
    model = load_model(tiny_dir)
    freeze(model, "visual")
    with pytest.raises(
        ValueError, match="optimizer: expected all parameters that require gradients, got none of 13 su"
    ):
        engine_for(tiny_dir, backend=backend, model=model, optimizer=lambda ps: torch.optim.SGD([*ps][::2], lr=0.0))
    engine = engine_for(tiny_dir, backend=backend)
    engine.optimizer.add_param_group({"params": [*torch.nn.Linear(2, 1).parameters()]})
    with pytest.raises(ValueError, match=r"optimizer: expected parameters of engine\.module, got 2 others, whose grad"):
        engine.train_batch(make_batch(processor), weighted_loss, ("logprobs", "entropy"))


def test_another_optimizer_has_its_own_scheduler(tiny_dir, processor):
    constant = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1.0)
    engine = engine_for(tiny_dir, scheduler=constant)
    engine.optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.25)
    with pytest.raises(ValueError, match=r"scheduler: expected one of engine\.optimizer, got one of another optimizer"):
        engine.train_batch(make_batch(processor), weighted_loss, ("logprobs", "entropy"))
    for scheduler in (constant(engine.optimizer), None):
        engine.scheduler = scheduler
        assert engine.train_batch(make_batch(processor), weighted_loss, ("logprobs", "entropy"))["lr"] == 0.25


def test_separate_experts_on_several_ranks_need_a_newer_torch(monkeypatch):
    """On two ranks with this torch: `test_ranks.py`."""
    init_distributed("cpu")
    experts = torch.nn.ModuleDict({"experts": torch.nn.ModuleList([torch.nn.Linear(2, 2)])})
    model = fully_shard(torch.nn.Sequential(experts), mesh=init_device_mesh("cpu", (1,)))
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params", raising=False)
    reduce_unused_experts(model)  # there is no other rank
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"torch: expected version 2\.13 or newer to train 0\.experts on"):
        reduce_unused_experts(model)
    reduce_unused_experts(model.requires_grad_(False))


def test_scoring_leaves_no_gathered_weights(tiny_dir, processor):
    """The root unit, with the embeddings and the output layer, stays gathered after a forward."""
    engine = engine_for(tiny_dir, compute_dtype=torch.bfloat16)
    engine.infer_batch(make_batch(processor))
    assert all(isinstance(parameter, DTensor) for parameter in engine.module.parameters())


def test_compiled_layers_give_the_same_gradient(tiny_dir, processor, monkeypatch):
    """In bfloat16, for which FSDP has its hooks on each layer. Inductor itself takes half a minute and is left out."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    batch, found = make_batch(processor), []
    for compiled in (False, True):
        counters.clear()
        engine = engine_for(tiny_dir, compute_dtype=torch.bfloat16, use_torch_compile=compiled)
        metrics = engine.train_batch(batch, weighted_loss, outputs=("logprobs", "entropy"))
        found.append((metrics["loss"], gradients(engine)))
        assert bool(counters["stats"]["unique_graphs"]) == compiled
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-6)


def test_pixel_values_in_the_dtype_of_the_computation_change_nothing(tiny_dir, processor):
    engine = engine_for(tiny_dir, compute_dtype=torch.bfloat16, optimizer=None)
    row = {"question": "Which digit?", "images": [Image.fromarray(np.arange(28 * 28, dtype=np.uint8).reshape(28, 28))]}
    found = []
    for dtype in (None, torch.bfloat16):
        prompt = encode_prompt(processor, row, dtype=dtype)
        (response,) = encode_responses(prompt, processor, ["7"], [processor.tokenizer.eos_token_id], 512)
        assert response.vision["pixel_values"].dtype == (dtype or torch.float32)
        assert response.vision["image_grid_thw"].dtype == torch.long
        found.append(engine.infer_batch(collate([response]))["logprobs"])
    assert torch.equal(*found) and found[0].any()


def test_engines_share_their_process_groups():
    """Three engines, as PPO has, would otherwise have three sets of connections, and of memory on a GPU."""
    device = init_distributed("cpu")
    assert make_device_mesh(device, 1, 1) is make_device_mesh(device, 1, 1)
