"""token_logprobs, target_logprobs, token_entropy, suppress_tokens, linear_logprobs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.losses import _kernels as module
from rlkit.losses import (
    linear_logprobs,
    suppress_tokens,
    target_logprobs,
    token_entropy,
    token_logprobs,
)
from rlkit.losses.naive import logprobs as naive

FEW = settings(max_examples=25, deadline=None, derandomize=True)


def scalar_logprob_and_entropy(z, target, allowed):
    """The same from scalar torch operations over the allowed ids, for gradients."""
    total = sum(z[v].exp() for v in allowed)
    return z[target] - total.log(), -sum((z[v].exp() / total) * (z[v] - total.log()) for v in allowed)


def problem(n=7, h=5, v=11, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, h, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(v, h, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(v, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, v, (n,), generator=g)
    temperature = torch.rand(n, generator=g, dtype=torch.float64) + 0.5
    return hidden, weight, bias, targets, temperature


def test_logprob_alignment():
    logits = torch.randn(2, 4, 5, dtype=torch.float64)
    tokens = torch.tensor([[1, 4, 0, 2], [3, 3, 1, 0]])
    out = token_logprobs(logits, tokens)
    assert out.shape == (2, 4)
    torch.testing.assert_close(out, naive.token_logprobs(logits, tokens))
    assert (out[:, 0] == 0).all()


def test_alignment_golden():
    certain = [[0.0, 60.0, 0.0], [0.0, 0.0, 60.0], [math.log(2), 0.0, 0.0]]  # after token 0: 1; then 2; then half 0
    out = token_logprobs(torch.tensor([certain]), torch.tensor([[0, 1, 2]]))
    torch.testing.assert_close(out, torch.zeros(1, 3))
    out = token_logprobs(torch.tensor([[certain[2], certain[2], certain[2]]]), torch.tensor([[2, 0, 1]]))
    torch.testing.assert_close(out, torch.tensor([[0.0, -math.log(2), -math.log(4)]]))


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 1), (0, 0)])
def test_token_logprobs_of_little_or_nothing(shape):
    out = token_logprobs(torch.zeros(*shape, 5), torch.zeros(shape, dtype=torch.long))
    assert out.shape == shape and out.abs().sum() == 0


def test_temperature_applied_to_logprobs():
    logits = torch.tensor([[[0.0, math.log(3)], [0.0, 0.0]]], dtype=torch.float64)
    tokens = torch.tensor([[0, 1]])
    temperature = 0.5  # squares the odds: 9 to 1
    golden = math.log(9 / 10)
    entropy = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    assert token_logprobs(logits, tokens, temperature)[0, 1].item() == pytest.approx(golden)
    assert target_logprobs(logits[0, 0], tokens[0, 1], temperature).item() == pytest.approx(golden)
    assert token_entropy(logits, temperature)[0, 0].item() == pytest.approx(entropy)
    hidden, weight = torch.eye(2, dtype=torch.float64), torch.tensor([[0.0, 0], [math.log(3), 0]], dtype=torch.float64)
    for given_as in (temperature, torch.tensor([0.5, 1.0])):
        logprobs, ent = linear_logprobs(hidden, weight, torch.tensor([1, 1]), given_as)
        assert logprobs[0].item() == pytest.approx(golden) and ent[0].item() == pytest.approx(entropy)
        assert logprobs[1].item() == pytest.approx(-math.log(2))


def test_temperature_of_each_token():
    logits, targets = torch.randn(2, 3, 5), torch.randint(0, 5, (2, 3))
    temperature = torch.tensor([[0.5, 1.0, 2.0], [1.5, 0.7, 1.0]])
    out, entropy = target_logprobs(logits, targets, temperature), token_entropy(logits, temperature)
    aligned = token_logprobs(logits, targets, temperature)
    for b in range(2):
        for t in range(3):
            tau = temperature[b, t].item()
            torch.testing.assert_close(out[b, t], target_logprobs(logits[b, t], targets[b, t], tau))
            torch.testing.assert_close(entropy[b, t], token_entropy(logits[b, t], tau))
            if t:
                torch.testing.assert_close(aligned[b, t], target_logprobs(logits[b, t - 1], targets[b, t], tau))
    rows = token_logprobs(logits, targets, temperature[:, :1])
    torch.testing.assert_close(rows[1], token_logprobs(logits[1:], targets[1:], 1.5)[0])


def test_sampled_frequencies_are_the_logprobs():
    """What a sampler at temperature 0.6 with two suppressed tokens draws is what token_logprobs scores."""
    logits, ids = torch.tensor([1.0, 0.3, -0.5, 2.0]), torch.tensor([3, 1])
    p = torch.softmax(suppress_tokens(logits, ids) / 0.6, -1)
    drawn = torch.multinomial(p, 100_000, replacement=True, generator=torch.Generator().manual_seed(0))
    share = torch.bincount(drawn, minlength=4) / 100_000
    scored = target_logprobs(suppress_tokens(logits, ids).expand(4, 4), torch.arange(4), 0.6).exp()
    torch.testing.assert_close(share, scored, atol=5e-3, rtol=0)
    assert share[1] == share[3] == scored[1] == scored[3] == 0


def test_suppressed_tokens_leave_a_right_entropy_and_gradient():
    logits = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    ids, allowed, targets = torch.tensor([0, 4]), [1, 2, 3, 5], torch.tensor([1, 5, 2])
    masked = suppress_tokens(logits, ids)
    assert masked is not logits and logits.isfinite().all()
    entropy, logprobs = token_entropy(masked), target_logprobs(masked, targets)
    expected_entropy, expected_logprobs = [], []
    for n in range(3):
        lp, ent = scalar_logprob_and_entropy(logits[n], targets[n], allowed)
        expected_logprobs.append(lp)
        expected_entropy.append(ent)
    torch.testing.assert_close(entropy, torch.stack(expected_entropy))
    torch.testing.assert_close(logprobs, torch.stack(expected_logprobs))
    for actual, expected in ((entropy, expected_entropy), (logprobs, expected_logprobs)):
        weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
        (grad,) = torch.autograd.grad((actual * weights).sum(), logits, retain_graph=True)
        (loop,) = torch.autograd.grad(
            sum(e * w for e, w in zip(expected, weights, strict=True)), logits, retain_graph=True
        )
        torch.testing.assert_close(grad, loop)
        assert grad[:, ids].abs().max() == 0


def test_suppressed_target_is_impossible():
    logits = torch.randn(2, 5)
    assert target_logprobs(suppress_tokens(logits, torch.tensor([2])), torch.tensor([2, 2])).eq(-math.inf).all()
    hidden, weight, _, _, _ = problem(n=3)
    logprobs, entropy = linear_logprobs(hidden, weight, torch.tensor([4, 1, 4]), suppress=torch.tensor([4]))
    assert logprobs[[0, 2]].eq(-math.inf).all() and logprobs[1].isfinite()
    (logprobs[1] + entropy.sum()).backward()  # a loss that leaves the impossible tokens out
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


def test_suppression_has_the_gradient_of_the_materialised_form_even_on_impossible_targets():
    hidden, weight, bias, targets, _ = problem()
    ids = targets[:1]
    logprobs, entropy = linear_logprobs(hidden, weight, targets, bias=bias, suppress=ids, chunk=2)
    logits = suppress_tokens(hidden @ weight.t() + bias, ids)
    expected = target_logprobs(logits, targets).sum() + token_entropy(logits).sum()
    inputs = (hidden, weight, bias)
    grads = torch.autograd.grad(logprobs.sum() + entropy.sum(), inputs)
    for grad, ref in zip(grads, torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(grad, ref)


def test_bias_of_minus_infinity_is_suppression():
    hidden, weight, bias, targets, _ = problem()
    ids, targets = torch.tensor([2]), torch.where(targets == 2, 3, targets)
    closed = bias.detach().clone()
    closed[2] = -math.inf
    outputs = (
        linear_logprobs(hidden, weight, targets, bias=closed),
        linear_logprobs(hidden, weight, targets, bias=bias, suppress=ids),
    )
    torch.testing.assert_close(*outputs)
    grads = [torch.autograd.grad(lp.sum() + ent.sum(), (hidden, weight)) for lp, ent in outputs]
    torch.testing.assert_close(*grads)


def test_suppress_nothing():
    logits = torch.randn(2, 5)
    torch.testing.assert_close(suppress_tokens(logits, torch.zeros(0, dtype=torch.long)), logits)


def test_entropy_golden():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, -math.inf, 0.0, -math.inf], [7.0, -math.inf, -math.inf, -1e30]])
    torch.testing.assert_close(token_entropy(logits), torch.tensor([math.log(4), math.log(2), 0.0]))


@pytest.mark.parametrize("chunk", [1, 3, 7, 100, None])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("suppress", [None, torch.tensor([2, 9])])
@pytest.mark.parametrize("per_token", [False, True])
def test_linear_logprobs_equals_the_loop(chunk, with_bias, suppress, per_token):
    hidden, weight, bias, targets, temperature = problem()
    banned = [] if suppress is None else suppress.tolist()
    targets = torch.tensor([3 if y in banned else y for y in targets.tolist()])
    inputs = (hidden, weight, bias) if with_bias else (hidden, weight)
    tau = temperature if per_token else 0.8
    actual = linear_logprobs(
        hidden, weight, targets, tau, bias=bias if with_bias else None, suppress=suppress, chunk=chunk
    )
    loop = naive.linear_logprobs(
        hidden, weight, targets, tau, bias=bias if with_bias else None, suppress=suppress, chunk=chunk
    )
    torch.testing.assert_close(actual, loop)
    a, b = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad((actual[0] * a + actual[1] * b).sum(), inputs)
    torch.testing.assert_close(grads, torch.autograd.grad((loop[0] * a + loop[1] * b).sum(), inputs))


def test_linear_logprobs_gradcheck():
    hidden, weight, bias, targets, temperature = problem(n=3, h=2, v=4)
    ids = torch.tensor([(int(targets[0]) + 1) % 4])
    targets = torch.where(targets == ids, targets[0], targets)
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_logprobs(h, w, targets, temperature, bias=b, suppress=ids, chunk=2),
        (hidden, weight, bias),
    )


def test_linear_logprobs_needs_only_what_is_asked():
    hidden, weight, _, targets, _ = problem()
    (full,) = torch.autograd.grad(linear_logprobs(hidden, weight, targets)[0].sum(), hidden)
    (alone,) = torch.autograd.grad(linear_logprobs(hidden, weight.detach(), targets)[0].sum(), hidden)
    torch.testing.assert_close(full, alone)
    linear_logprobs(hidden.detach(), weight, targets)[1].sum().backward()
    assert weight.grad.isfinite().all()
    with torch.no_grad():
        assert not linear_logprobs(hidden, weight, targets)[0].requires_grad


def test_linear_logprobs_of_nothing():
    hidden, weight, bias, targets, _ = problem(n=0)
    logprobs, entropy = linear_logprobs(hidden, weight, targets, bias=bias)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.shape == (0, 5) and weight.grad.abs().sum() == 0 and bias.grad.abs().sum() == 0


def test_entropy_chunked_over_tokens_not_vocabulary(monkeypatch):
    """Entropy of a softmax over half a vocabulary is not half an entropy: every chunk sees all V and few tokens."""
    seen = []
    whole = module._chunk_logprobs

    def spy(*args):
        out = whole(*args)
        seen.append(tuple(out.shape))
        return out

    monkeypatch.setattr(module, "_chunk_logprobs", spy)
    monkeypatch.setattr(module, "CPU_CHUNK_BYTES", 3 * 11 * 8)  # three tokens of eleven float64 logits
    hidden, weight, _, targets, _ = problem()
    logprobs, entropy = linear_logprobs(hidden, weight, targets)
    assert seen == [(3, 11), (3, 11), (1, 11)]
    torch.testing.assert_close((logprobs, entropy), tuple(naive.linear_logprobs(hidden, weight, targets)))
    (logprobs.sum() + entropy.sum()).backward()
    assert seen[3:] == seen[:3]


def test_default_chunk_holds_512_mib_and_16_on_a_cpu():
    assert module.CHUNK_BYTES == 2**29 and module.CPU_CHUNK_BYTES == 2**24
    assert module.CHUNK_BYTES // (4 * 151_936) == 883


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0, 1e4])
def test_fused_logprob_nonpositive(dtype, size):
    g = torch.Generator().manual_seed(0)
    hidden = (torch.randn(64, 8, generator=g) * size).to(dtype)
    weight = torch.randn(300, 8, generator=g).to(dtype)
    best = (hidden @ weight.t()).float().argmax(1)
    logits = hidden @ weight.t()
    for targets in (best, torch.randint(0, 300, (64,), generator=g)):
        for tau in (1.0, 0.1):
            logprobs, entropy = linear_logprobs(hidden, weight, targets, tau, chunk=10)
            assert logprobs.max() <= 0 and entropy.min() >= 0
            assert target_logprobs(logits, targets, tau).max() <= 0
            torch.testing.assert_close(logprobs, target_logprobs(logits, targets, tau), rtol=1e-4, atol=1e-4)
    one, _ = linear_logprobs(hidden, weight[:1], torch.zeros(64, dtype=torch.long))
    assert one.abs().max() == 0  # a vocabulary of one token: certain


def test_bfloat16_inputs():
    hidden, weight, bias, targets, _ = problem(n=40, h=16, v=50, dtype=torch.bfloat16)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    expected = logits.float().log_softmax(-1)
    logprobs, entropy = linear_logprobs(hidden, weight, targets, bias=bias, chunk=7)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert target_logprobs(logits, targets).dtype == token_entropy(logits).dtype == torch.float32
    assert token_logprobs(logits[None], targets[None]).dtype == torch.float32
    assert suppress_tokens(logits, targets).dtype == torch.bfloat16
    torch.testing.assert_close(logprobs, expected.gather(1, targets[:, None])[:, 0], atol=0.05, rtol=0.01)
    grads = torch.autograd.grad((logprobs + 0.1 * entropy).sum(), (hidden, weight, bias))
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    lp, ent = linear_logprobs(wide[0], wide[1], targets, bias=wide[2])
    for grad, x, ref in zip(grads, wide, torch.autograd.grad((lp + 0.1 * ent).sum(), wide), strict=True):
        assert grad.dtype == torch.bfloat16 and grad.shape == x.shape
        assert (grad.double() - ref).norm() < 0.02 * ref.norm()


def test_bfloat16_weight_gradient_keeps_small_chunks():
    """A thousand equal contributions, one a chunk: added up in bfloat16 they would stop growing at 256 of them."""
    hidden = torch.ones(1000, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    linear_logprobs(hidden, weight, torch.zeros(1000, dtype=torch.long), chunk=1)[0].sum().backward()
    torch.testing.assert_close(weight.grad.float(), torch.tensor([[500.0], [-500.0]]))


def test_autocast_does_not_part_forward_and_backward():
    hidden, weight, _, targets, _ = problem(dtype=torch.float32)
    expected = linear_logprobs(hidden, weight, targets)[0]
    grads = torch.autograd.grad(expected.sum(), (hidden, weight))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = linear_logprobs(hidden, weight, targets)[0]
        came = torch.autograd.grad(actual.sum(), (hidden, weight))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(came, grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_temperature_may_have_more_digits_than_the_states(dtype):
    hidden, weight, _, targets, temperature = problem(dtype=dtype)
    found = []
    for exact in (temperature, temperature.float()):
        out = linear_logprobs(hidden, weight, targets, exact)
        assert out.logprobs.dtype == out.entropy.dtype == torch.float32
        found.append([*out, *torch.autograd.grad((out.logprobs + out.entropy).sum(), (hidden, weight))])
    torch.testing.assert_close(*found)


@FEW
@given(n=st.integers(0, 9), v=st.integers(1, 12), chunk=st.integers(1, 12), seed=st.integers(0, 99))
def test_linear_equals_materialised_for_any_chunk_and_order(n, v, chunk, seed):
    hidden, weight, bias, targets, temperature = problem(n, 3, v, seed)
    logits = hidden @ weight.t() + bias
    logprobs, entropy = linear_logprobs(hidden, weight, targets, temperature, bias=bias, chunk=chunk)
    torch.testing.assert_close(logprobs, target_logprobs(logits, targets, temperature))
    torch.testing.assert_close(entropy, token_entropy(logits, temperature))
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    shuffled, _ = linear_logprobs(hidden[order], weight, targets[order], temperature[order], bias=bias, chunk=chunk)
    torch.testing.assert_close(shuffled, logprobs[order])


@FEW
@given(scale=st.sampled_from([1.0, 1e3, 1e6, 1e30]), pad=st.integers(0, 4), seed=st.integers(0, 99))
def test_extreme_logits_and_padding(scale, pad, seed):
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(2, 4, 5, generator=g) * scale).requires_grad_()
    tokens = torch.randint(0, 5, (2, 4), generator=g)
    wide = torch.cat([logits, torch.randn(2, pad, 5, generator=g)], 1)
    wide_tokens = torch.nn.functional.pad(tokens, (0, pad), value=1)
    out = token_logprobs(wide, wide_tokens)
    torch.testing.assert_close(out[:, :4], token_logprobs(logits, tokens))
    (out.clamp(min=-1e6).sum() + token_entropy(wide).sum()).backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: token_logprobs(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)), "logits"),
        (lambda: token_logprobs(torch.zeros(2, 3, 4), torch.zeros(2, 2, dtype=torch.long)), "tokens"),
        (lambda: token_logprobs(torch.zeros(2, 3, 4), torch.zeros(2, 3)), "tokens"),
        (lambda: token_logprobs(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.long), 0.0), "temperature"),
        (
            lambda: token_logprobs(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.long), torch.ones(2)),
            "temperature",
        ),
        (lambda: target_logprobs(torch.zeros(3, 4), torch.zeros(4, dtype=torch.long)), "targets"),
        (lambda: target_logprobs(torch.zeros(3, 4, dtype=torch.long), torch.zeros(3, dtype=torch.long)), "logits"),
        (lambda: token_entropy(torch.zeros(3, 4), -1.0), "temperature"),
        (lambda: token_entropy(torch.zeros(3, 4), torch.ones(1, 3)), "temperature"),
        (lambda: suppress_tokens(torch.zeros(3, 4), torch.zeros(1, 1, dtype=torch.long)), "token_ids"),
        (lambda: suppress_tokens(torch.zeros(3, 4), torch.zeros(1)), "token_ids"),
        (lambda: linear_logprobs(torch.zeros(3), torch.zeros(4, 2), torch.zeros(3, dtype=torch.long)), "hidden"),
        (lambda: linear_logprobs(torch.zeros(3, 2), torch.zeros(4, 3), torch.zeros(3, dtype=torch.long)), "weight"),
        (lambda: linear_logprobs(torch.zeros(3, 2), torch.zeros(4, 2), torch.zeros(2, dtype=torch.long)), "targets"),
        (
            lambda: linear_logprobs(torch.zeros(3, 2), torch.zeros(4, 2).bfloat16(), torch.zeros(3, dtype=torch.long)),
            "weight",
        ),
        (
            lambda: linear_logprobs(
                torch.zeros(3, 2), torch.zeros(4, 2), torch.zeros(3, dtype=torch.long), bias=torch.zeros(3)
            ),
            "bias",
        ),
        (
            lambda: linear_logprobs(torch.zeros(3, 2), torch.zeros(4, 2), torch.zeros(3, dtype=torch.long), chunk=0),
            "chunk",
        ),
        (
            lambda: linear_logprobs(
                torch.zeros(3, 2), torch.zeros(4, 2), torch.zeros(3, dtype=torch.long), suppress=torch.zeros(1)
            ),
            "suppress",
        ),
    ],
)
def test_errors_name_the_argument(call, name):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        call()
