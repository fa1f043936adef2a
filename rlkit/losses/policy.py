"""Policy-gradient losses, one value per token."""

from torch import Tensor

from rlkit.losses._check import check_not_negative, check_per_token, fail
from rlkit.losses._numerics import choose, masked_cost, masked_log_ratio


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    r"""PPO's clipped surrogate as a loss, with separate bounds and an optional dual clip.

    $$L = -\min(r A,\ \mathrm{clip}(r, 1 - \epsilon_{low}, 1 + \epsilon_{high}) A), \quad
    r = \exp(\text{logprobs} - \text{old\_logprobs})$$
    and, with `dual_clip` c, $L \leftarrow \min(L, -c A)$ where A < 0.

    PPO, https://arxiv.org/abs/1707.06347 eq. 7; the higher upper bound, DAPO, https://arxiv.org/abs/2503.14476
    section 3.1; the dual clip, https://arxiv.org/abs/1912.09729 eq. 5.

    Choices: a log-ratio beyond +-20 counts as +-20 and gets gradient 0 (verl bounds it so too, TRL does not), as an
    overflowed ratio would give a nan gradient even where the clip binds. The dual clip is off unless asked for (verl
    has it on at 3). Nothing but `logprobs` gets a gradient, so `old_logprobs` may be the same tensor.

    Args:
        logprobs: [B, T], of the policy being trained.
        old_logprobs: [B, T], under the weights the batch was sampled with.
        advantages: [B] or [B, T].
        mask: bool [B, T], True on trained tokens.
        clip_low: the ratio's lower bound is 1 - clip_low; >= 0.
        clip_high: the ratio's upper bound is 1 + clip_high; >= 0.
        dual_clip: c > 1, or None for no dual clip.

    Returns:
        [B, T], to be minimised; exactly 0, with gradient 0, outside the mask whatever the inputs hold there.

    Raises:
        ValueError: for a wrong rank, shape or dtype, a negative clip, or dual_clip <= 1.
    """
    check_per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    check_not_negative(clip_low=clip_low, clip_high=clip_high)
    if dual_clip is not None and not dual_clip > 1:
        fail("dual_clip", dual_clip, "a number > 1, or None")
    ratio = masked_log_ratio(logprobs, old_logprobs.detach(), mask).exp()
    cost = masked_cost(advantages, mask)
    # bounded on the side that the advantage pushes to: where the other bound would bind, the minimum takes the ratio
    return cost * choose(cost < 0, ratio.clamp(max=1 + clip_high), ratio.clamp(1 - clip_low, dual_clip))
