"""Rewards that are shaped before advantages are taken: KL in the reward, overlong answers, coefficients that adapt,
rewards on the scale of all rewards so far."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlkit import _check as check
from rlkit._numerics import GlobalSum, at_least_float32, masked, masked_advantages, one_rank
from rlkit.advantages._groups import in_dtype_of
from rlkit.advantages._tokens import rewards_per_token


@torch.no_grad()
def kl_in_reward(rewards: Tensor, kl: Tensor, mask: Tensor, kl_coef: float | Tensor) -> Tensor:
    r"""Each token's reward less the coefficient times its KL estimate: $r_t - \beta\, kl_t$ on the mask.

    Ziegler et al., https://arxiv.org/abs/1909.08593 eq. 2; per token as in InstructGPT,
    https://arxiv.org/abs/2203.02155 section 3.5.

    The estimate to use is `rlkit.losses.kl_k1`: in the reward its gradient is that of KL(policy || reference) over
    whole sequences, exactly; the other estimates bias it here. Take the advantages after this, not before.

    Args:
        rewards: [B, T], of each token, or [B], given to the last token of the mask.
        kl: [B, T], of the policy that sampled, against the reference.
        kl_coef: a number >= 0 or a 0-d tensor.

    Returns:
        [B, T], without gradient; 0 outside the mask.
    """
    check.per_token(mask, kl=kl)
    if isinstance(kl_coef, Tensor):
        check.rank("kl_coef", kl_coef, 0, "(a number or a 0-d tensor)")
    else:
        check.not_negative(kl_coef=kl_coef)
    return masked(rewards_per_token(rewards, mask) - kl_coef * at_least_float32(kl), mask)


def overlong_penalty(lengths: Tensor, max_length: float, buffer: float, penalty: float = 1.0) -> Tensor:
    r"""What an answer loses for its length: 0, then linearly down to -penalty over the last `buffer` tokens.

    $$-p \cdot \mathrm{clip}\Big(\frac{l - (L_{max} - L_{buffer})}{L_{buffer}}, 0, 1\Big)$$

    DAPO's soft overlong punishment, https://arxiv.org/abs/2503.14476 eq. 13. verl goes on below -penalty past
    `max_length`; the paper and we stop there. A buffer of 0 is a step: -penalty for every answer above `max_length`.

    Args:
        lengths: [B], tokens of each answer, such as `mask.sum(1)`; integers or floats.
        max_length: the length at which the whole penalty is reached; > 0.
        buffer: tokens over which it grows, in [0, max_length].
        penalty: >= 0.

    Returns:
        [B], float32 (float64 for float64 lengths), in [-penalty, 0]; add it to the rewards.
    """
    check.rank("lengths", lengths, 1, "[B]")
    check.positive(max_length=max_length)
    check.not_negative(penalty=penalty)
    if not 0 <= buffer <= max_length:
        check.fail("buffer", buffer, f"a number in [0, max_length], which is {max_length}")
    dtype = torch.promote_types(lengths.dtype, torch.float32)
    excess = lengths.to(dtype) - (max_length - buffer)
    return -penalty * (excess / buffer).clamp(0.0, 1.0) if buffer > 0 else -penalty * (excess > 0).to(dtype)


@torch.no_grad()
def entropy_advantages(
    advantages: Tensor, entropy: Tensor, mask: Tensor, alpha: float = 0.4, kappa: float = 2.0
) -> Tensor:
    r"""Advantages with a little more for tokens that the policy is unsure of, never so much that a sign changes.

    $$A'_t = A_t + \min\Big(\alpha\, \mathrm{sg}(H_t),\ \frac{|A_t|}{\kappa}\Big)$$

    Reasoning with exploration, https://arxiv.org/abs/2506.14758. It is no entropy bonus: the entropy gets no gradient.

    Args:
        advantages: [B] or [B, T].
        entropy: [B, T], in nats.
        alpha: >= 0; the paper's 0.4.
        kappa: > 1; the paper's 2.

    Returns:
        [B, T], 0 outside the mask.
    """
    check.per_token(mask, entropy=entropy)
    check.not_negative(alpha=alpha)
    if not kappa > 1:
        check.fail("kappa", kappa, "a number > 1")
    advantages = masked_advantages(advantages, mask)
    return advantages + torch.minimum(alpha * masked(entropy, mask), advantages.abs() / kappa)


@dataclass
class RunningMoments:
    """Mean and standard deviation of all rewards that a run has seen, for `scaled_rewards`.

    Save `vars(moments)`, restore with `RunningMoments(**saved)`. Before the first update mean and deviation are 0 and
    1, which leaves rewards as they are.

    Args:
        count: rewards so far.
        mean: theirs.
        square: the sum of their squared distances to it.
    """

    count: float = 0.0
    mean: float = 0.0
    square: float = 0.0

    @property
    def std(self) -> float:
        """The population's standard deviation; 1 where there is none, as no reward or all of them alike."""
        return (self.square / self.count) ** 0.5 if self.square > 0 else 1.0

    def update(self, rewards: Tensor, global_sum: GlobalSum = one_rank) -> "RunningMoments":
        """Add a batch's rewards [B], those that are not finite left out, over all ranks that `global_sum` sums over.

        Two passes (the batch's mean, then its squares) and Chan et al.'s way to join them: no square is lost next to a
        large mean.

        Returns:
            itself.

        Raises:
            ValueError: rewards that are not [B].
        """
        check.rank("rewards", rewards, 1, "[B]")
        known = rewards[rewards.isfinite()].double().cpu()
        total, count = global_sum(torch.stack([known.sum(), known.new_tensor(len(known))])).tolist()
        if count:
            mean = total / count
            square = global_sum((known - mean).square().sum()).item()
            gap, both = mean - self.mean, self.count + count
            self.square += square + gap**2 * self.count * count / both
            self.mean += gap * count / both
            self.count = both
        return self


@torch.no_grad()
def scaled_rewards(rewards: Tensor, mean: float, std: float, clip: float = float("inf")) -> Tensor:
    r"""Rewards in deviations from a mean, cut: $\mathrm{clip}\big((r - \mu) / \sigma, -\delta, \delta\big)$.

    Reward normalisation and clipping of PPO-max (Zheng et al., Secrets of RLHF, part I),
    https://arxiv.org/abs/2307.04964, with the moments of all rewards so far (`RunningMoments`). A mean of 0 and a
    deviation of 1 only cut.

    Args:
        mean, std: in the unit of the rewards; std > 0.
        clip: > 0, in deviations.

    Returns:
        [B], float32 (float64 for float64 rewards).
    """
    check.rank("rewards", rewards, 1, "[B]")
    check.positive(std=std, clip=clip)
    scaled = (rewards.double() - mean) / std
    return in_dtype_of(rewards, scaled.clamp(-clip, clip))


def adaptive_kl_coef(kl_coef: float, kl: float, target: float, horizon: float, steps: float = 1) -> float:
    r"""The next KL coefficient of a proportional controller: up where the measured KL is above its target, else down.

    $$\beta' = \beta (1 + K e), \quad e = \mathrm{clip}\Big(\frac{KL - \text{target}}{\text{target}}, -0.2, 0.2\Big),
    \quad K = \text{steps} / \text{horizon}$$

    Ziegler et al., https://arxiv.org/abs/1909.08593 section 2.2 (there K = 0.1 an update); steps over horizon is their
    code's form, which verl keeps.

    Args:
        kl_coef: the present coefficient; >= 0.
        kl: measured, in the unit of the target: mean a sequence or a token. An estimate may be negative.
        target: > 0.
        horizon: > 0, in the unit of `steps`.
        steps: samples, or updates, since the last call; in [0, 5 * horizon), beyond which the factor could reach 0.

    Returns:
        The coefficient from here on.
    """
    check.not_negative(kl_coef=kl_coef)
    check.positive(target=target, horizon=horizon)
    if kl != kl:
        check.fail("kl", kl, "a number")
    if not 0 <= steps < 5 * horizon:
        check.fail("steps", steps, "a number in [0, 5 * horizon)")
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * steps / horizon)


@dataclass
class FixedKL:
    """A KL coefficient that stays, with the `update` of `AdaptiveKL` so that a recipe can hold either.

    Save `vars(controller)`, restore with `FixedKL(**saved)`.

    Args:
        kl_coef: the coefficient; >= 0.
    """

    kl_coef: float

    def update(self, kl: float, steps: float = 1) -> float:
        """The coefficient, unchanged."""
        return self.kl_coef


@dataclass
class AdaptiveKL:
    """A KL coefficient that follows `adaptive_kl_coef`; every rank must be given the same, global KL.

    Save `vars(controller)`, restore with `AdaptiveKL(**saved)`: the coefficient is all the state there is.

    Args:
        kl_coef: at the start; >= 0.
        target: the KL to hold, in the unit of what is measured; > 0.
        horizon: > 0, in the unit of `update`'s steps.
    """

    kl_coef: float
    target: float
    horizon: float

    def update(self, kl: float, steps: float = 1) -> float:
        """Move the coefficient by one measurement and return it. A 0-d tensor as the KL is read on the host."""
        self.kl_coef = adaptive_kl_coef(self.kl_coef, float(kl), self.target, self.horizon, steps)
        return self.kl_coef
