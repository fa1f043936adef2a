"""What holds for every function of rlkit.losses and rlkit.advantages; a new one is tested as soon as it is exported."""

import inspect
import math

import pytest
import torch
from torch import Tensor

import rlkit.advantages
import rlkit.losses

EVERY = {
    name: getattr(package, name)
    for package in (rlkit.losses, rlkit.advantages)
    for name in package.__all__
    if inspect.isfunction(getattr(package, name))
}
B, T, V, H, K = 4, 7, 11, 5, 3
NUMBERS = dict(
    high=2.0, low=0.5, threshold=0.5, length=10.0, kl_coef=0.1, max_length=10, buffer=4, k=2, count=5, mean=0.0
)
NUMBERS |= dict(n=2, top_k=2, step=30, warmup=20, decay=40, entropy_coef=0.1)
NUMBERS |= dict(std=1.0, target=1.0, horizon=10.0, delta=0.1, kl=0.2, w_mean=1.0, w2_mean=1.2)
BY_ROW = {"chosen", "rejected", "ref_chosen", "ref_rejected", "chosen_rewards", "rejected_rewards"}
BY_ROW |= {"rewards", "greedy_rewards", "advantages", "weights", "gold"}
ROW_OR_TOKEN = {  # the parameters that are something else in one function than in the others
    **{(name, "rewards"): (B, T) for name in ("gae", "vtrace", "discounted_returns", "kl_in_reward", "n_step_returns")},
    **{(name, "rewards"): (B, T) for name in ("gigpo_advantages", "hgpo_advantages")},
    **{("a_star_po_loss", x): (B,) for x in ("logprobs", "ref_logprobs", "values")},
    ("preference_mean", "loss"): (B,),
    **{(name, x): (B,) for name in ("kto_loss", "kto_kl_estimate") for x in ("logprobs", "ref_logprobs")},
    ("gdpo_advantages", "rewards"): (B, 2),
    ("kl_in_reward", "kl"): (B, T),
    ("linear_logprobs", "targets"): (B * T,),
    ("rae_advantages", "baselines"): (3,),
    ("load_balancing_loss", "router_logits"): (B, T, V),
}
PLAIN = {("adaptive_entropy_coef", "entropy"): 0.2}  # and a number in one function, a tensor in the others


def argument(function, name, generator):
    """A value that `function` takes for the parameter `name`."""

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    if (function, name) in PLAIN:
        return PLAIN[function, name]
    shape = ROW_OR_TOKEN.get((function, name))
    others = {
        "mask": torch.rand(B, T, generator=generator) > 0.4,
        "group_ids": torch.tensor([0, 1, 0, 1]),
        "roles": torch.tensor([2, 0, 2, 0]),
        "state_ids": torch.randint(2, (B, T), generator=generator),
        "group_tokens": torch.tensor([9, 7, 9, 7]),
        "desirable": torch.tensor([True, False, True, False]),
        "token_ids": torch.tensor([1, 2]),
        "tokens": torch.randint(V, (B, T), generator=generator),
        "targets": torch.randint(V, shape or (B, T), generator=generator),
        "teacher_indices": torch.arange(K).expand(B, T, K),
        "teacher_logprobs": uniform(B, T, V).log_softmax(-1)[..., :K],
        "hidden": uniform(B * T, H),
        "weight": uniform(V, H),
        "generator": generator,
        **{x: torch.tensor([3, 1, 2, 5]) for x in ("lengths", "chosen_lengths", "rejected_lengths", "shared_lengths")},
        **{x: uniform(B, T, V) for x in ("logits", "ref_logits", "student_logits", "teacher_logits")},
    }
    if name in others:
        return others[name]
    if name in NUMBERS and shape is None:
        return NUMBERS[name]
    values = uniform(*(shape or ((B,) if name in BY_ROW else (B, T))))
    return -values if "logprobs" in name else values


def arguments(function):
    """Everything that the function must be given, and a mask."""
    generator = torch.Generator().manual_seed(0)
    parameters = inspect.signature(EVERY[function]).parameters.items()
    needed = [name for name, x in parameters if x.default is inspect.Parameter.empty or name == "mask"]
    return {name: argument(function, name, generator) for name in needed}


def results(function, given):
    """The tensors that come out, in a list."""
    out = EVERY[function](**given)
    out = list(out.values()) if isinstance(out, dict) else out
    return [x for x in (out if isinstance(out, list | tuple) else [out]) if isinstance(x, Tensor)]


def total(function, given):
    """A sum, with weights, of all that comes out, but for logits of tokens that are suppressed."""
    finite = [torch.where(x == -math.inf, 0.0, x).double().flatten() for x in results(function, given)]
    return sum(x @ torch.linspace(1, 2, len(x), dtype=torch.float64) for x in finite)


def floats(given):
    return {name: x for name, x in given.items() if isinstance(x, Tensor) and x.is_floating_point()}


@pytest.mark.parametrize("function", EVERY)
def test_what_is_no_tensor_is_named(function):
    """A list of numbers, as a reward function returns them, or nothing where a tensor is needed."""
    given = arguments(function)
    for name, x in given.items():
        optional = "None" in str(inspect.signature(EVERY[function]).parameters[name])
        for wrong in ([x.tolist()] if optional else [x.tolist(), None]) if isinstance(x, Tensor) else []:
            came = "None" if wrong is None else "a list"
            with pytest.raises(ValueError, match=rf"^{name}: expected a tensor, got {came}$"):
                EVERY[function](**given | {name: wrong})


@pytest.mark.parametrize("function", EVERY)
def test_functional_gradient_is_autograds(function):
    given = arguments(function)
    for name, x in floats(given).items():
        functional = torch.func.grad(lambda y, name=name: total(function, given | {name: y}))(x)
        assert functional.isfinite().all()
        y = x.clone().requires_grad_()
        out = total(function, given | {name: y})
        expected = torch.autograd.grad(out, y, materialize_grads=True)[0] if out.requires_grad else torch.zeros_like(x)
        torch.testing.assert_close(functional, expected)


@pytest.mark.parametrize("function", [x for x in EVERY if floats(arguments(x)) and "generator" not in arguments(x)])
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # some in-place operations, over the batch in turn
def test_vmap_is_one_call_after_the_other(function):
    """Over all that is floating point; the gradient too, as one a sample is taken."""
    given = arguments(function)
    stacks = {name: torch.stack([x, 0.9 * x]) for name, x in floats(given).items()}
    came = torch.func.vmap(lambda some: results(function, given | some))(stacks)
    gradient = torch.func.grad(lambda some: total(function, given | some))
    gradients = torch.func.vmap(gradient)(stacks)
    for i in range(2):
        some = {name: x[i] for name, x in stacks.items()}
        for x, expected in zip(came, results(function, given | some), strict=True):
            torch.testing.assert_close(x[i], expected)
        for name, expected in gradient(some).items():
            torch.testing.assert_close(gradients[name][i], expected)


@pytest.mark.parametrize("function", [name for name in EVERY if hasattr(rlkit.advantages, name)])
def test_gradients_of_advantages_equal_finite_differences(function):
    given = arguments(function)
    leaves = {name: x.requires_grad_() for name, x in floats(given).items()}
    if any(x.requires_grad for x in results(function, given)):  # the others are targets, which none flows through
        torch.autograd.gradcheck(
            lambda *x: results(function, given | dict(zip(leaves, x, strict=True))), [*leaves.values()]
        )


@pytest.mark.parametrize("function", EVERY)
def test_gradients_are_finite_where_all_values_are_equal(function):
    """Where a standard deviation is 0, and the square root under it has no gradient."""
    given = arguments(function)
    alike = {name: x[:1].expand_as(x).clone().requires_grad_() for name, x in floats(given).items()}
    out = total(function, given | alike)
    assert torch.as_tensor(out).isfinite()
    if alike and out.requires_grad:
        for grad in torch.autograd.grad(out, list(alike.values()), materialize_grads=True):
            assert grad.isfinite().all()


@pytest.mark.parametrize("function", [name for name, f in EVERY.items() if "mask" in inspect.signature(f).parameters])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_masked_values_reach_neither_value_nor_gradient(function, wrong):
    given = arguments(function)
    masked = ~given["mask"]
    spoilt = {
        name: x.masked_fill(masked if x.ndim == 2 else masked[..., None], wrong).requires_grad_()
        for name, x in floats(given).items()
        if x.shape[:2] == masked.shape and name not in ("logits", "ref_logits")  # these speak of the next token
    }
    out = total(function, given | spoilt)
    torch.testing.assert_close(out, total(function, given))
    if out.requires_grad:
        for grad in torch.autograd.grad(out, list(spoilt.values()), materialize_grads=True):
            assert grad.isfinite().all()


def test_every_function_compiles_in_one_graph():
    given = {name: arguments(name) for name in EVERY if name != "pf_ppo_indices"}

    def plain(given):
        return [results(name, given[name]) for name in given]

    compiled = torch.compile(plain, backend="eager", fullgraph=True)(given)
    torch.testing.assert_close(compiled, plain(given))
