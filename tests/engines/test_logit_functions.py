"""A teacher's top-k and whole distributions against transformers' own padded forward and dense formulas, in every
layout."""

import functools
import sys
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from rlkit.engines import make_engine
from rlkit.engines.logit_functions import apply_to_hidden_states, apply_to_logits
from rlkit.losses import (
    forward_kl_loss,
    jsd_loss,
    reverse_kl_loss,
    token_mean,
    topk_forward_kl_loss,
    topk_jsd_loss,
    topk_reverse_kl_loss,
)
from rlkit.vlm import load_model, load_processor, suppressed_token_ids

sys.path.insert(0, str(Path(__file__).parent))
from rows import make_batch

TEMPERATURE, K = 1.3, 5
WHOLE = {"forward": forward_kl_loss, "reverse": reverse_kl_loss, "jsd": jsd_loss}
TOPK = {"forward": topk_forward_kl_loss, "reverse": topk_reverse_kl_loss, "jsd": topk_jsd_loss}
LAYOUTS = {
    "shared": {},
    "row by row": {"micro_batch_tokens": 1},
    "padded": {"use_remove_padding": False},
    "fused": {"use_fused_kernels": True, "micro_batch_tokens": 120},
    "checkpointing": {"enable_gradient_checkpointing": True, "share_prompts": False},
}


@pytest.fixture(scope="module")
def processor(tiny_dir):
    return load_processor(tiny_dir)


@pytest.fixture(scope="module")
def teacher_dir(tiny_dir, processor, tmp_path_factory):
    """The tiny model with other weights, so that the two disagree."""
    model = load_model(tiny_dir)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * parameter.std().nan_to_num(0) * torch.randn(parameter.shape, generator=generator))
        model.get_output_embeddings().weight.mul_(3)
    path = tmp_path_factory.mktemp("teacher")
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Three tokens at a time, so that each micro-batch has several pieces."""
    monkeypatch.setattr("rlkit.losses._kernels.CPU_CHUNK_BYTES", 3 * 4 * 512)


def plain_logits(model, batch, row):
    """[T, V] of one row by transformers alone."""
    ids = batch.tokens[row : row + 1, : batch.lengths[row]]
    kinds = (ids == model.config.image_token_id).int()
    return model(input_ids=ids, mm_token_type_ids=kinds, **batch.vision[row]).logits[0]


@pytest.fixture(scope="module")
def plain(tiny_dir, teacher_dir, processor):
    """Logits of student and teacher before each token of the mask [N, V], and the student."""
    batch = make_batch(processor)
    models = [
        AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32) for path in (tiny_dir, teacher_dir)
    ]
    suppressed = suppressed_token_ids(models[0].config, processor.tokenizer)
    logits = []
    for model in models:
        rows = []
        for row, length in enumerate(batch.lengths):
            rows.append(plain_logits(model, batch, row)[:-1][batch.mask[row, 1:length]])
        logits.append(torch.cat(rows).index_fill(1, suppressed, -1e4))
    return logits[0], logits[1].detach(), models[0]


def engine_for(path, processor, **options):
    model = load_model(path)
    suppressed = suppressed_token_ids(model.config, processor.tokenizer)
    options = {"temperature": TEMPERATURE, "suppressed_token_ids": suppressed, "max_grad_norm": 1e9, **options}
    return make_engine("fsdp2", model=model, **options)


def divergence(logits, teacher, loss, teacher_logits):
    mask = torch.ones(1, len(logits), dtype=torch.bool)
    if teacher_logits is not None:
        return loss(logits[None], teacher_logits(teacher["hidden"])[None], mask, temperature=TEMPERATURE)[0]
    top = teacher["logprobs"][None], teacher["ids"][None]
    return loss(logits[None], *top, mask, temperature=TEMPERATURE)[0]


def loss_fn(out, mb):
    """A weight for each row, so that rows cannot be mixed up, and a second output with a gradient of its own."""
    values = mb.advantages[:, None] * out.divergence + 0.1 * out.logprobs
    mean = token_mean(out.divergence, mb.mask, mb.total_tokens)
    return token_mean(values, mb.mask, mb.total_tokens), {"divergence": mean}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_teacher_outputs_equal_transformers(teacher_dir, processor, plain, layout):
    engine, batch = engine_for(teacher_dir, processor, **LAYOUTS[layout]), make_batch(processor)
    expected = (plain[1] / TEMPERATURE).log_softmax(1)
    top = engine.topk_logprobs(batch, K)
    assert top.logprobs.shape == (int(batch.mask.sum()), K) and top.ids.dtype == torch.int32
    torch.testing.assert_close(top.logprobs, expected.topk(K).values, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(expected.gather(1, top.ids.long()), top.logprobs, atol=1e-5, rtol=1e-5)
    logits = engine.output_layer()(engine.hidden_states(batch))
    torch.testing.assert_close((logits / TEMPERATURE).softmax(1), expected.exp(), atol=1e-5, rtol=1e-5)


def dense(name, q, p):
    """The divergence of student q and teacher p, [N, V] probabilities without zeros."""
    forward, reverse = ((x * (x / y).log()).sum(1) for x, y in ((p, q), (q, p)))
    middle = (p + q) / 2
    halves = (0.5 * (x * (x / middle).log()).sum(1) for x in (p, q))
    return {"forward": forward, "reverse": reverse, "jsd": sum(halves)}[name]


@pytest.fixture(scope="module")
def expected(processor, plain):
    """(mean divergence, gradients) of `loss_fn` by dense formulas, computed once for each divergence."""
    student_logits, teacher_logits, model = plain
    batch = make_batch(processor)
    weights = batch.advantages[:, None].expand(batch.mask.shape)[batch.mask]
    targets = batch.tokens[batch.mask][:, None]

    @functools.cache
    def compute(name, top_k):
        q, p = (((x.double() / TEMPERATURE).softmax(1) + 1e-30) for x in (student_logits, teacher_logits))
        logprobs = q.log().gather(1, targets)[:, 0]
        if top_k:
            ids = p.topk(top_k).indices
            q, p = (torch.cat([x.gather(1, ids), 1 - x.gather(1, ids).sum(1, keepdim=True)], 1) for x in (q, p))
        values = dense(name, q, p)
        model.zero_grad()
        (weights * values + 0.1 * logprobs).mean().backward(retain_graph=True)
        return values.mean().item(), {n: x.grad.clone() for n, x in model.named_parameters()}

    return compute


CASES = [(layout, *case) for layout in LAYOUTS for case in (("forward", K), ("jsd", 0))]
CASES += [
    ("shared", name, top_k) for name in WHOLE for top_k in (K, 0) if (name, top_k) not in (("forward", K), ("jsd", 0))
]


@pytest.mark.parametrize(("layout", "name", "top_k"), CASES)
def test_gradient_equals_dense_formulas(tiny_dir, teacher_dir, processor, expected, layout, name, top_k):
    value, gradients = expected(name, top_k)
    batch, options = make_batch(processor), LAYOUTS[layout]
    teacher = engine_for(teacher_dir, processor, **options)
    if top_k:
        batch.add_token_fields(**teacher.topk_logprobs(batch, top_k)._asdict())
    else:
        batch.add_token_fields(hidden=teacher.hidden_states(batch))
    sgd = partial(torch.optim.SGD, lr=0.0)
    engine = engine_for(tiny_dir, processor, optimizer=sgd, keep_gradients=True, **options)
    output_layer = None if top_k else teacher.output_layer()
    function = partial(divergence, loss=(TOPK if top_k else WHOLE)[name], teacher_logits=output_layer)
    metrics = engine.train_batch(batch, loss_fn, logit_functions={"divergence": function})
    assert value > 0.01 and metrics["divergence"] == pytest.approx(value, abs=1e-5)
    for parameter, found in engine.module.named_parameters():
        torch.testing.assert_close(found.grad, gradients[parameter], atol=1e-5, rtol=1e-4, msg=parameter)


@pytest.mark.parametrize("fused", [False, True])
def test_backward_keeps_no_distribution(tiny_dir, processor, fused):
    """Of several [n, V] tensors that a function saves, none is alive between forward and backward."""
    alive = weakref.WeakSet()

    def function(logits, _):
        logp = logits.log_softmax(1)
        alive.add(logp)
        return -(logp.exp() * logp).nan_to_num().sum(1)

    def loss_fn(out, mb):
        assert not alive
        return token_mean(out.surprise, mb.mask, mb.total_tokens), {}

    engine = engine_for(tiny_dir, processor, optimizer=partial(torch.optim.SGD, lr=0.0), use_fused_kernels=fused)
    engine.train_batch(make_batch(processor), loss_fn, logit_functions={"surprise": function})


@pytest.mark.parametrize("count", [0, 7])
def test_values_are_float32_and_gradients_in_the_dtype_of_the_logits(count):
    hidden, weight = torch.randn(7, 8).bfloat16()[:count].requires_grad_(), torch.randn(512, 8).bfloat16()
    seen = []

    def function(logits, tensors):
        seen.append(logits.dtype)
        return logits.logsumexp(1) + tensors["x"].to(logits.dtype)

    fields = {"x": torch.arange(count)}
    both = [
        apply_to_logits(function, hidden @ weight.T, fields),
        apply_to_hidden_states(function, hidden, weight, fields),
    ]
    for values in both:
        (gradient,) = torch.autograd.grad(values.sum(), hidden)
        assert values.dtype == torch.float32 and values.shape == (count,) and gradient.dtype == torch.bfloat16
    torch.testing.assert_close(*both)
    assert set(seen) <= {torch.bfloat16}  # no copy of the logits in float32


def test_bad_input_is_named(tiny_dir, processor):
    engine, batch = engine_for(tiny_dir, processor, optimizer=partial(torch.optim.SGD, lr=0.0)), make_batch(processor)
    with pytest.raises(ValueError, match=r"k: expected 1 to \d+, the size of the vocabulary, got 100000"):
        engine.topk_logprobs(batch, 100_000)
    with pytest.raises(ValueError, match=r"ids: expected \[\d+, ...\], one for each token of mask, got \(1, 4\)"):
        batch.add_token_fields(ids=torch.zeros(1, 4))
    with pytest.raises(ValueError, match=r"logit_functions: expected values of shape \[\d\], got \[\]"):
        engine.train_batch(batch, loss_fn, logit_functions={"divergence": lambda logits, _: logits.sum()})
