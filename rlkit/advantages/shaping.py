"""Changes of rewards before advantages are computed: KL in the reward, overlong responses, adaptive coefficients, and
scaling by the statistics of all rewards so far."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlkit import _check as check
from rlkit._numerics import GlobalSum, at_least_float32, masked, masked_advantages, one_rank
from rlkit.advantages._groups import in_dtype_of
from rlkit.advantages._tokens import rewards_per_token


@torch.no_grad()
def kl_in_reward(rewards: Tensor, kl: Tensor, mask: Tensor, kl_coef: float | Tensor) -> Tensor:
    r"""Each token's reward minus the coefficient times its KL estimate: $r_t - \beta\, kl_t$ on the mask.

    Ziegler et al., https://arxiv.org/abs/1909.08593 eq. 2; per token as in InstructGPT,
    https://arxiv.org/abs/2203.02155 section 3.5.

    The estimate to use is `rlkit.losses.kl_k1`: used in the reward, it gives exactly the gradient of KL(policy ||
    reference) over whole sequences; the other estimators are biased here. Compute advantages after this, not before.

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
    r"""Penalty for long responses: 0, then linearly down to -penalty over the last `buffer` tokens before `max_length`.

    $$-p \cdot \mathrm{clip}\Big(\frac{l - (L_{max} - L_{buffer})}{L_{buffer}}, 0, 1\Big)$$

    DAPO's soft overlong punishment, https://arxiv.org/abs/2503.14476 eq. 13. Beyond `max_length` the penalty stays
    constant, as in the paper; in verl it continues to grow. With a buffer of 0 every response longer than `max_length`
    gets -penalty.

    Args:
        lengths: [B], tokens of each response, such as `mask.sum(1)`; integers or floats.
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
    r"""Advantages plus a bonus for tokens with high entropy, which never changes the sign of an advantage.

    $$A'_t = A_t + \min\Big(\alpha\, \mathrm{sg}(H_t),\ \frac{|A_t|}{\kappa}\Big)$$

    Reasoning with exploration, https://arxiv.org/abs/2506.14758. Unlike an entropy bonus in the loss, it gives the
    entropy no gradient.

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

    Save `vars(moments)`, restore with `RunningMoments(**saved)`. Before the first update the mean is 0 and the
    deviation 1, which do not change rewards.

    Args:
        count: rewards so far.
        mean: the mean of these rewards.
        square: the sum of squared deviations from the mean.
    """

    count: float = 0.0
    mean: float = 0.0
    square: float = 0.0

    @property
    def std(self) -> float:
        """The population standard deviation; 1 if there are no rewards, or all are equal."""
        return (self.square / self.count) ** 0.5 if self.square > 0 else 1.0

    def update(self, rewards: Tensor, global_sum: GlobalSum = one_rank) -> "RunningMoments":
        """Add the finite rewards of a batch [B], over all ranks that `global_sum` sums over.

        Two passes (mean, then squared deviations), combined by the formula of Chan et al., which stays accurate if the
        mean is large.

        Returns:
            itself.

        Raises:
            ValueError: rewards that are not [B].
        """
        check.rank("rewards", rewards, 1, "[B]")
        scored = rewards[rewards.isfinite()].double().cpu()
        total, count = global_sum(torch.stack([scored.sum(), scored.new_tensor(len(scored))])).tolist()
        if count:
            mean = total / count
            square = global_sum((scored - mean).square().sum()).item()
            gap, both = mean - self.mean, self.count + count
            self.square += square + gap**2 * self.count * count / both
            self.mean += gap * count / both
            self.count = both
        return self


@torch.no_grad()
def scaled_rewards(rewards: Tensor, mean: float, std: float, clip: float = float("inf")) -> Tensor:
    r"""Standardised and clipped rewards: $\mathrm{clip}\big((r - \mu) / \sigma, -\delta, \delta\big)$.

    Reward normalisation and clipping of PPO-max (Zheng et al., Secrets of RLHF, part I),
    https://arxiv.org/abs/2307.04964, with the moments of all rewards so far (`RunningMoments`). With mean 0 and
    deviation 1 the rewards are only clipped.

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
    r"""The next KL coefficient of a proportional controller: larger where the KL is above its target, else smaller.

    $$\beta' = \beta (1 + K e), \quad e = \mathrm{clip}\Big(\frac{KL - \text{target}}{\text{target}}, -0.2, 0.2\Big),
    \quad K = \text{steps} / \text{horizon}$$

    Ziegler et al., https://arxiv.org/abs/1909.08593 section 2.2 (there K = 0.1 per update); K = steps / horizon is from
    their code, as in verl.

    Args:
        kl_coef: the present coefficient; >= 0.
        kl: the measured KL, in the unit of the target: mean per sequence or per token. An estimate may be negative.
        target: > 0.
        horizon: > 0, in the unit of `steps`.
        steps: samples, or updates, since the last call; in [0, 5 * horizon), as the factor could reach 0 above.

    Returns:
        The new coefficient.
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
    """A constant KL coefficient with the `update` method of `AdaptiveKL`, so that a recipe can use either.

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

    Save `vars(controller)`, restore with `AdaptiveKL(**saved)`: the coefficient is its only state.

    Args:
        kl_coef: at the start; >= 0.
        target: the KL to hold, in the unit of the measured KL; > 0.
        horizon: > 0, in the unit of `update`'s steps.
    """

    kl_coef: float
    target: float
    horizon: float

    def update(self, kl: float, steps: float = 1) -> float:
        """Move the coefficient by one measurement and return it. A 0-d tensor as the KL is read on the host."""
        self.kl_coef = adaptive_kl_coef(self.kl_coef, float(kl), self.target, self.horizon, steps)
        return self.kl_coef
