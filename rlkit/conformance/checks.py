"""The checks. Each gets an adapter. It returns None or a sentence about the trainer's choice, or raises `Bug`.

A choice is a published or documented alternative. A bug spoils a run, or makes results depend on something that must
not matter: how a batch is split, which values masked entries have, in which order rows come. Each check looks for one
kind of bug. Where possible it compares the trainer with itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkit.advantages.naive.returns import gae
from rlkit.conformance.adapter import Split
from rlkit.losses.naive.logprobs import token_entropy, token_logprobs
from rlkit.losses.naive.policy import clipped_policy_loss

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
TOLERANCE = 2e-5


class Bug(AssertionError):
    """A sentence that says what the trainer computes wrongly."""


class Check(NamedTuple):
    """One check of an adapter.

    Attributes:
        method: the adapter's method under test.
        question: what the check asks.
        run: the check itself; see the module's docstring for its result.
    """

    name: str
    method: str
    question: str
    run: Callable[[Any], str | None]


CHECKS: list[Check] = []


def check(method: str, question: str) -> Callable[[Callable[[Any], str | None]], Callable[[Any], str | None]]:
    """Add a function to CHECKS under its own name."""

    def add(run: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
        CHECKS.append(Check(run.__name__, method, question, run))
        return run

    return add


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Bug(otherwise)


def close(x: Tensor, y: Tensor, tolerance: float = TOLERANCE) -> bool:
    return bool(torch.allclose(x.detach().double(), y.detach().double(), rtol=tolerance, atol=tolerance))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- log-probabilities and entropy


def _logits_and_tokens() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(7, (3, 6), generator=torch.Generator().manual_seed(1))
    return 2 * random(3, 6, 7), tokens


@check("token_logprobs", "Does column t hold the log-probability of token t?")
def logprob_alignment(trainer: Any) -> None:
    logits, tokens = _logits_and_tokens()
    found, wanted = trainer.token_logprobs(logits.clone(), tokens, 1.0), token_logprobs(logits, tokens)
    if close(found[:, 1:], wanted[:, 1:]):
        return
    same = torch.log_softmax(logits, -1).gather(-1, tokens[..., None])[..., 0]
    require(not close(found[:, 1:], same[:, 1:]), "token t is scored by the logits at t, which have already seen it")
    raise Bug("the log-probabilities are not log softmax(logits)[t - 1, token t]")


@check("token_logprobs", "Is the sampling temperature applied?")
def temperature(trainer: Any) -> None:
    logits, tokens = _logits_and_tokens()
    found = trainer.token_logprobs(logits.clone(), tokens, 0.5)[:, 1:]
    at_1 = trainer.token_logprobs(logits.clone(), tokens, 1.0)[:, 1:]
    require(not close(found, at_1), "the temperature is ignored: sampler and trainer score different distributions")
    divided = trainer.token_logprobs(logits / 0.5, tokens, 1.0)[:, 1:]
    require(close(found, divided), "the logits are not divided by the temperature")


@check("token_logprobs", "Is a log-probability never above 0?")
def logprob_nonpositive(trainer: Any) -> None:
    logits, tokens = _logits_and_tokens()
    found = trainer.token_logprobs(3000 * logits, tokens, 1.0)[:, 1:]
    require(bool(found.isfinite().all()), "large logits give nan or inf")
    require(bool((found <= 0).all()), f"large logits give a log-probability of {found.max().item():g}, above 0")


@check("token_logprobs", "Do tokens that cannot be sampled (logit -inf) leave values and gradients finite?")
def impossible_tokens(trainer: Any) -> None:
    logits, tokens = _logits_and_tokens()
    logits[..., 6] = -math.inf
    tokens = tokens.clamp(max=5)
    logits.requires_grad_()
    found = trainer.token_logprobs(logits.clone(), tokens, 1.0)[:, 1:]
    without = trainer.token_logprobs(logits.detach()[..., :6].clone(), tokens, 1.0)[:, 1:]
    require(close(found, without), "values change or are nan")
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    require(bool(gradient.isfinite().all()), "the gradient is nan: 0 * inf in the backward pass")


@check("token_entropy", "Is the entropy right?")
def entropy(trainer: Any) -> None:
    logits, _ = _logits_and_tokens()
    require(close(trainer.token_entropy(logits.clone()), token_entropy(logits)), "it is not -sum p log p")


@check("token_entropy", "Is the entropy finite where a token cannot be sampled (logit -inf)?")
def entropy_of_impossible_tokens(trainer: Any) -> None:
    logits, _ = _logits_and_tokens()
    without = trainer.token_entropy(logits[..., :6].clone())
    logits[..., 6] = -math.inf
    found = trainer.token_entropy(logits.clone())
    require(
        bool(found.isfinite().all()),
        "it is nan: 0 * -inf, so it can be neither logged nor rewarded where a token is suppressed",
    )
    require(close(found, without), "a token of probability 0 changes the entropy")


# --- the policy loss


class Rows(NamedTuple):
    """Eight responses of different lengths. One has tool output between its tokens. Some ratios are clipped."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor

    def select(self, rows: slice) -> Rows:
        return Rows(*(x[rows] for x in self))

    def split(self, micro_batches: int = 1, ranks: int = 1) -> Split:
        return Split(int(self.mask.sum()), int(self.mask.any(1).sum()), micro_batches, ranks)


def _rows() -> Rows:
    lengths = torch.tensor([9, 3, 6, 8, 2, 7, 4, 5])
    mask = (torch.arange(10) >= 1) & (torch.arange(10) < 1 + lengths[:, None])
    mask[3, 3:5] = False  # tool output
    old = -1.0 - random(8, 10, seed=2).abs()
    drift = 0.4 * random(8, 10, seed=3)
    advantages = torch.tensor([1.0, -0.5, 0.75, -1.25, 0.5, -1.0, 1.5, -0.25])
    return Rows(old + drift, old, advantages, mask)


def _loss(trainer: Any, rows: Rows, split: Split | None = None) -> tuple[Tensor, Tensor]:
    """The trainer's loss of one micro-batch, and its gradient with respect to the log-probabilities."""
    logprobs = rows.logprobs.clone().requires_grad_()
    given = (rows.old_logprobs.clone(), rows.advantages.clone(), rows.mask.clone())
    loss = trainer.policy_loss(logprobs, *given, split or rows.split(), CLIP_LOW, CLIP_HIGH)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), gradient


def _reductions(mask: Tensor) -> dict[str, Tensor]:
    """Published reductions by name, as the [B, T] weights of the token losses."""
    tokens = mask.sum(1, keepdim=True).clamp(min=1)
    with_tokens = mask.any(1).sum()
    return {
        "the mean over all tokens": mask / mask.sum(),
        "the mean over responses of the mean over their tokens": mask / tokens / with_tokens,
        "the mean over responses of the sum over their tokens": mask / with_tokens,
        "the sum over tokens by responses times the padded width": mask / (len(mask) * mask.shape[1]),
    }


def _reference(rows: Rows, weights: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = rows.logprobs.clone().requires_grad_()
    per_token = clipped_policy_loss(logprobs, rows.old_logprobs, rows.advantages, rows.mask, CLIP_LOW, CLIP_HIGH)
    loss = (per_token * weights).sum()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), gradient


def _within_the_clip(rows: Rows) -> Rows:
    """The same rows with a ratio of 1.01 everywhere."""
    return rows._replace(logprobs=rows.old_logprobs + math.log(1.01))


def _reduction_of(trainer: Any) -> str:
    """The name of the reduction that explains the trainer's gradient; empty if none of them does."""
    rows = _within_the_clip(_rows())
    _, gradient = _loss(trainer, rows)
    for name, weights in _reductions(rows.mask).items():
        if close(gradient, _reference(rows, weights)[1]):
            return name
    return ""


@check("policy_loss", "Is the ratio 1, and nothing clipped, on the first pass over a batch?")
def on_policy_ratio_is_one(trainer: Any) -> None:
    rows = _rows()._replace(logprobs=_rows().old_logprobs)
    _, gradient = _loss(trainer, rows)
    per_token = torch.where(rows.mask, gradient, 0.0) / -rows.advantages[:, None]
    for weights in _reductions(rows.mask).values():
        if close(per_token, weights):
            return
    raise Bug("the gradient is not -advantage / denominator where old and new log-probabilities are equal")


@check("policy_loss", "Are ratios clipped where they should be, with bounds of their own on both sides?")
def clipping(trainer: Any) -> None:
    rows = _rows()
    _, gradient = _loss(trainer, rows)
    _, wanted = _reference(rows, rows.mask.float())
    stopped = rows.mask & (wanted == 0)
    require(bool((gradient[stopped] == 0).all()), "tokens beyond the clip still have a gradient")
    through = rows.mask & (wanted != 0)
    require(bool((gradient[through] != 0).all()), "tokens within the clip have no gradient")
    scale = gradient[through] / wanted[through]
    for weights in _reductions(rows.mask).values():
        if close(scale, weights[through]):
            return
    raise Bug("the gradient within the clip is not -advantage * ratio / denominator")


@check("policy_loss", "Which denominator does the loss have?")
def denominator(trainer: Any) -> str | None:
    name = _reduction_of(trainer)
    require(bool(name), "its weights of tokens are those of no published reduction")
    if name == "the mean over all tokens":
        return None
    if "padded width" in name:
        raise Bug("the divisor is the padded width, so that a longer response in the batch makes every step smaller")
    return f"{name}: a token of a long response has less weight"


@check("policy_loss", "Can nan and inf under the mask neither change the loss nor reach the gradient?")
def masked_nonfinite(trainer: Any) -> None:
    rows = _rows()
    loss, gradient = _loss(trainer, rows)
    for value in (math.inf, math.nan):
        for name in ("old_logprobs", "logprobs"):
            spoiled = rows._replace(**{name: torch.where(rows.mask, getattr(rows, name), value)})
            found, reached = _loss(trainer, spoiled)
            what = f"{value:g} in {name} where the mask is False"
            require(close(found, loss), f"{what} makes the loss {found.item():g}: 0 * {value:g} is nan")
            require(bool(reached.isfinite().all()), f"{what} makes the gradient nan while the loss is finite")
            require(close(reached, gradient), f"{what} changes the gradient")


@check("policy_loss", "Is the gradient the same however the batch is split into micro-batches?")
def micro_batches(trainer: Any) -> None:
    rows = _rows()
    _, whole = _loss(trainer, rows)
    for count in (2, 4):
        size = len(rows.mask) // count
        parts = [rows.select(slice(i * size, (i + 1) * size)) for i in range(count)]
        gradient_of_parts = torch.cat([_loss(trainer, part, rows.split(micro_batches=count))[1] for part in parts])
        _require_same_split(gradient_of_parts, whole, f"{count} micro-batches", count)


@check("policy_loss", "Is the gradient the same on any number of data-parallel ranks?")
def data_parallel_ranks(trainer: Any) -> None:
    rows = _rows()
    _, whole = _loss(trainer, rows)
    for count in (2, 4):
        size = len(rows.mask) // count
        parts = [rows.select(slice(i * size, (i + 1) * size)) for i in range(count)]
        gradient_of_parts = torch.cat([_loss(trainer, part, rows.split(ranks=count))[1] for part in parts])
        if getattr(trainer, "ranks_average", False):
            gradient_of_parts = gradient_of_parts / count
        _require_same_split(gradient_of_parts, whole, f"{count} ranks", count)


def _require_same_split(gradient_of_parts: Tensor, whole: Tensor, what: str, count: int) -> None:
    if close(gradient_of_parts, whole):
        return
    scale = (gradient_of_parts.norm() / whole.norm()).item()
    for name, factor in (("too small", 1 / count), ("too large", float(count))):
        require(not close(gradient_of_parts, factor * whole), f"on {what} the gradient is {count} times {name}")
    raise Bug(
        f"on {what} tokens have other weights than in one part (the gradient's norm is {scale:.2f} of it): each part "
        "divides by its own count"
    )


@check("policy_loss", "Is a response without a token in the mask left out?")
def empty_row(trainer: Any) -> str | None:
    rows = _within_the_clip(_rows())
    mask = rows.mask.clone()
    mask[2] = False
    rows = rows._replace(mask=mask)
    loss, gradient = _loss(trainer, rows)
    require(bool(loss.isfinite()) and bool(gradient.isfinite().all()), "it makes the loss nan")
    require(bool((gradient[2] == 0).all()), "it has a gradient")
    wanted = {name: _reference(rows, weights)[1] for name, weights in _reductions(rows.mask).items()}
    if any(close(gradient, x) for x in wanted.values()):
        return None
    counted = {name: x * rows.mask.any(1).sum() / len(rows.mask) for name, x in wanted.items() if "responses" in name}
    require(any(close(gradient, x) for x in counted.values()), "it changes the weights of other responses")
    return "it counts as a response with a loss of 0, so that the others have less weight"


# --- the KL term


@check("kl_loss", "On policy, is the expected gradient of the KL term that of KL(policy || reference)?")
def kl_gradient(trainer: Any) -> str | None:
    """The expectation is exact: a sum over a vocabulary of 7 tokens.

    All KL estimates are below 1, where some trainers clip them.
    """
    logits, ref = (0.4 * random(7, seed=4)).double().requires_grad_(), (0.4 * random(7, seed=5)).double()
    logp, logq = torch.log_softmax(logits, 0), torch.log_softmax(ref, 0)
    p = logp.exp().detach()
    (exact,) = torch.autograd.grad((logp.exp() * (logp - logq)).sum(), logits, retain_graph=True)
    (reverse,) = torch.autograd.grad((logq.exp() * (logq - logp)).sum(), logits, retain_graph=True)
    each = trainer.kl_loss(logp[None].float(), logq[None].float())[0].double()
    (found,) = torch.autograd.grad((p * each).sum(), logits)
    if close(found, exact, 1e-4):
        return None
    require(
        not close(found, torch.zeros_like(found), 1e-4), "it is 0: the estimate k1 in a loss does nothing on average"
    )
    if close(found, reverse, 1e-4):
        return "it is that of KL(reference || policy), as of the estimate k3 in GRPO's paper"
    raise Bug("it is that of neither KL(policy || reference) nor KL(reference || policy)")


# --- advantages

REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.25, 0.75, 0.0, 1.0, 0.5])
PAIRS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])


@check("group_advantages", "Which standard deviation divides the advantages?")
def standard_deviation(trainer: Any) -> str | None:
    found = trainer.group_advantages(REWARDS.clone(), PAIRS.clone())
    groups = [REWARDS[PAIRS == i] for i in range(2)]
    centred = torch.cat([group - group.mean() for group in groups])
    if close(found, torch.cat([(g - g.mean()) / g.std() for g in groups]), 1e-3):
        return None
    if close(found, torch.cat([(g - g.mean()) / g.std(correction=0) for g in groups]), 1e-3):
        return "that of the population (ddof 0), by which small groups have larger advantages"
    if close(found, centred, 1e-3):
        return "none: rewards are only centred (Dr. GRPO)"
    raise Bug("advantages are not (reward - mean of the group) / its standard deviation")


@check("group_advantages", "Do rows of a group belong together wherever they stand?")
def interleaved_groups(trainer: Any) -> None:
    wanted = trainer.group_advantages(REWARDS.clone(), PAIRS.clone())
    order = torch.tensor([3, 4, 0, 7, 5, 1, 6, 2])
    found = trainer.group_advantages(REWARDS[order], PAIRS[order])
    require(close(found, wanted[order]), "rows are grouped by their place, not by their group")


@check("group_advantages", "May groups have different sizes?")
def ragged_groups(trainer: Any) -> None:
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    found = trainer.group_advantages(REWARDS.clone(), ids)
    for i in range(2):
        alone = trainer.group_advantages(REWARDS[ids == i], torch.zeros_like(ids[ids == i]))
        require(close(found[ids == i], alone), "a group's advantages depend on the size of another")


@check("group_advantages", "What is the advantage of a response that is alone in its group?")
def singleton_group(trainer: Any) -> str | None:
    found = trainer.group_advantages(torch.tensor([1.0, 0.0, 0.75]), torch.tensor([0, 0, 1]))
    require(bool(found.isfinite().all()), "nan: the standard deviation of one number")
    if close(found[2], torch.tensor(0.0), 1e-3):
        return None
    if close(found[2], torch.tensor(0.75), 1e-3):
        return "its raw reward becomes its advantage"
    raise Bug(f"neither 0 nor its reward: {found[2].item():g} for a reward of 0.75")


@check("group_advantages", "Do equal rewards give advantages of 0?")
def equal_rewards(trainer: Any) -> None:
    for reward in (0.0, 0.1, 1.0):  # 0.1 has a mean that is rounded
        found = trainer.group_advantages(torch.full((4,), reward), torch.zeros(4, dtype=torch.long))
        require(bool(found.isfinite().all()), "they are nan: divided by a standard deviation of 0")
        require(
            bool((found.abs() < 0.05).all()), f"rewards of {reward:g} give {found.abs().max().item():g}: rounding grows"
        )


@check("group_advantages", "Does a reward of nan (not scored) leave other groups alone?")
def unscored_reward(trainer: Any) -> str | None:
    rewards = REWARDS.clone()
    rewards[1] = math.nan
    found = trainer.group_advantages(rewards, PAIRS.clone())
    wanted = trainer.group_advantages(REWARDS.clone(), PAIRS.clone())
    require(close(found[4:], wanted[4:]), "one reward of nan spoils the advantages of other prompts")
    if bool(found[:4].isnan().any()):
        return "all responses to its prompt have nan, which has to be masked before the loss"
    return None if found[1] == 0 else "it enters its group's statistics as a number, such as 0"


def _whitened(x: Tensor, mask: Tensor) -> Tensor:
    values = x[mask].double()
    return torch.where(mask, (x.double() - values.mean()) / values.std(), 0.0)


def _gae(trainer: Any, rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, trainer.gae(rewards, values, mask, 0.9, 0.8), 0.0)


@check("gae", "Is GAE right on responses without gaps, with a value of 0 after the last token?")
def generalised_advantages(trainer: Any) -> None:
    mask = torch.ones(4, 8, dtype=torch.bool)
    values, rewards = random(4, 8, seed=6), 0.3 * random(4, 8, seed=7)
    found, wanted = _gae(trainer, rewards, values, mask), gae(rewards, values, mask, 0.9, 0.8)[0]
    right = close(found, wanted, 1e-4) or close(found, _whitened(wanted, mask), 1e-3)
    require(right, "it is not the sum of discounted temporal differences, whitened or not")


@check("gae", "Does GAE end at the last token of a shorter response?")
def gae_ends_at_the_last_token(trainer: Any) -> None:
    mask = torch.arange(8) < torch.tensor([8, 5, 3, 6])[:, None]
    values, rewards = random(4, 8, seed=6), torch.where(mask, 0.3 * random(4, 8, seed=7), 0.0)
    other = torch.where(mask, values, values + 5)
    same = close(_gae(trainer, rewards, values, mask), _gae(trainer, rewards, other, mask), 1e-4)
    require(same, "values of padding leak into the advantages of tokens")


@check("gae", "Does GAE jump over tool output?")
def gae_skips_observations(trainer: Any) -> None:
    """Two columns of tool output must not change the advantages of the other tokens."""
    kept = torch.tensor([0, 1, 2, 5, 6, 7])
    mask = torch.zeros(4, 8, dtype=torch.bool)
    mask[:, kept] = True
    values, rewards = random(4, 8, seed=6), torch.where(mask, 0.3 * random(4, 8, seed=7), 0.0)
    found = _gae(trainer, rewards, values, mask)[:, kept]
    without = _gae(trainer, rewards[:, kept], values[:, kept], mask[:, kept])
    require(close(found, without, 1e-4), "values of tool output enter, or its tokens count as steps of discount")


# --- a training step


@check("accumulated_gradient", "Is the gradient of a training step the same with gradient accumulation?")
def gradient_accumulation(trainer: Any) -> None:
    rows = _rows()
    features, weight = random(8, 10, 3, seed=8), torch.zeros(3)
    wanted = features[rows.mask].mean(0)
    for count in (1, 2, 4):
        found = trainer.accumulated_gradient(weight.clone(), features.clone(), rows.mask.clone(), count)
        if count == 1:
            require(close(found, wanted), "the gradient of one micro-batch is not that of the mean over tokens")
        _require_same_split(found, wanted, f"{count} micro-batches", count)
