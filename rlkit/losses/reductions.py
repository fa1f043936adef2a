"""From losses per token (or per sequence) to a scalar, with the denominator in sight.

Every function takes `total`, the count over all micro-batches and all data-parallel ranks. With it the parts of a batch
add up to the loss of the whole batch, whatever the cut, so engines sum gradients and divide by nothing. The default
None takes this tensor's own count, which is right for a batch in one piece. A total of 0 gives 0.

A loss may hold anything outside the mask. A row with no token in the mask adds nothing and is not counted. Results are
0-d, float32 (float64 for a float64 loss).

verl calls them token-sum, token-mean, seq-mean-token-mean, seq-mean-token-sum and seq-mean-token-sum-norm; TRL's loss
types grpo, bnpo/dapo and dr_grpo are `sequence_mean`, `token_mean` and `fixed_length_mean`.
"""

import torch
from torch import Tensor

from rlkit import _check as check
from rlkit._numerics import at_least_float32, divide, masked


def token_sum(loss: Tensor, mask: Tensor) -> Tensor:
    r"""Sum over the tokens of the mask: $\sum_{b,t} m_{b,t} L_{b,t}$.

    Args:
        loss: [B, T].

    Returns:
        0-d.
    """
    check.rank("loss", loss, 2, "[B, T]")
    return _row_sums(loss, mask).sum()


def token_mean(loss: Tensor, mask: Tensor, total: float | Tensor | None = None) -> Tensor:
    r"""Mean over tokens, every token with the same weight: $\sum_{b,t} m_{b,t} L_{b,t} / \text{total}$.

    DAPO, https://arxiv.org/abs/2503.14476 section 3.3. Long responses weigh more than short ones.

    Args:
        loss: [B, T].
        total: trained tokens over all micro-batches and ranks, a number or a 0-d tensor; None counts this mask.

    Returns:
        0-d.
    """
    return divide(token_sum(loss, mask), mask.sum() if total is None else total)


def sequence_mean(loss: Tensor, mask: Tensor, total: float | Tensor | None = None) -> Tensor:
    r"""Mean over sequences of each sequence's mean over its tokens.

    $$\frac{1}{\text{total}} \sum_b \frac{\sum_t m_{b,t} L_{b,t}}{\sum_t m_{b,t}}$$

    GRPO, https://arxiv.org/abs/2402.03300 eq. 3. A token of a short response weighs more than one of a long response.

    Args:
        loss: [B, T], or [B] where the loss is per sequence already.
        total: sequences that have a token, over all micro-batches and ranks, a number or a 0-d tensor; None counts this
            mask.

    Returns:
        0-d.
    """
    rows = _row_sums(loss, mask)
    if loss.ndim == 2:
        rows = rows / mask.sum(1).clamp(min=1)
    return divide(rows.sum(), _sequences(mask) if total is None else total)


def sequence_sum_mean(loss: Tensor, mask: Tensor, total: float | Tensor | None = None) -> Tensor:
    r"""Mean over sequences of each sequence's sum over its tokens: $\sum_{b,t} m_{b,t} L_{b,t} / \text{total}$.

    The policy gradient as it is derived, with the return of a whole sequence.

    Args:
        loss: [B, T], or [B] where the loss is per sequence already.
        total: as in `sequence_mean`.

    Returns:
        0-d.
    """
    return divide(_row_sums(loss, mask).sum(), _sequences(mask) if total is None else total)


def fixed_length_mean(loss: Tensor, mask: Tensor, length: float, total: float | Tensor | None = None) -> Tensor:
    r"""Mean over sequences of each sequence's token sum over a constant: no response weighs more for its length.

    $$\frac{1}{\text{total}} \sum_b \frac{\sum_t m_{b,t} L_{b,t}}{\text{length}}$$

    Dr. GRPO, https://arxiv.org/abs/2503.20783 section 3.2 and listing 1. `length` is a constant of the run (the largest
    response length, say), so it must be given. verl falls back on the padded width, which moves with the batch.

    Args:
        loss: [B, T], or [B] where it is each sequence's token sum already.
        length: the constant, in tokens; > 0.
        total: as in `sequence_mean`.

    Returns:
        0-d.
    """
    check.positive(length=length)
    return sequence_sum_mean(loss, mask, total) / length


def prompt_mean(loss: Tensor, mask: Tensor, group_tokens: Tensor, total: float | Tensor | None = None) -> Tensor:
    r"""Mean over prompts of the mean over all tokens of a prompt's responses: every prompt has the same weight.

    $$\frac{1}{\text{total}} \sum_{b,t} \frac{m_{b,t} L_{b,t}}{n_{p(b)}}, \quad n_p = \sum_{p(b) = p} \sum_t m_{b,t}$$

    ScaleRL's prompt average, https://arxiv.org/abs/2510.13786 section 3.2.

    Args:
        loss: [B, T].
        group_tokens: [B], n: trained tokens of all responses to the row's prompt, from `group_token_counts` of the
            batch before it is cut.
        total: prompts that have a token, over all micro-batches and ranks. None adds up these rows' shares of their
            prompts.

    Returns:
        0-d.
    """
    check.rank("loss", loss, 2, "[B, T]")
    check.shape("group_tokens", group_tokens, (len(loss),), "[B] as loss")
    group_tokens = group_tokens.clamp(min=1)
    rows = _row_sums(loss, mask) / group_tokens
    return divide(rows.sum(), (mask.sum(1) / group_tokens).sum() if total is None else total)


def group_token_counts(mask: Tensor, group_ids: Tensor) -> Tensor:
    """How many trained tokens all responses to a row's prompt have together, for `prompt_mean`.

    Args:
        group_ids: integer [B], equal for the responses to one prompt.

    Returns:
        integer [B].
    """
    check.token_mask(mask)
    check.groups(group_ids, lengths=mask.sum(1))
    lengths, index = mask.sum(1), torch.unique(group_ids, return_inverse=True)[1]
    return torch.zeros_like(lengths).index_add(0, index, lengths)[index]


def preference_mean(loss: Tensor, total: float | Tensor | None = None) -> Tensor:
    r"""Mean over pairs of responses, or over single responses, of a loss on preferences: $\sum_i L_i / \text{total}$.

    Args:
        loss: [P], one per pair, or [B], one per response.
        total: pairs, or responses, over all micro-batches and ranks; None counts these.

    Returns:
        0-d.
    """
    check.floating("loss", loss)
    check.rank("loss", loss, 1, "[P]")
    return divide(at_least_float32(loss).sum(), len(loss) if total is None else total)


def _sequences(mask: Tensor) -> Tensor:
    """0-d: the sequences that have a token."""
    return (mask.sum(1) > 0).sum()


def _row_sums(loss: Tensor, mask: Tensor) -> Tensor:
    """[B]: the sum of each row's tokens, or a [B] loss itself; 0 for a row with no token in the mask."""
    check.floating("loss", loss)
    check.token_mask(mask)
    if loss.ndim == 1:
        check.shape("loss", loss, (mask.shape[0],), "or that of mask")
        return masked(loss, mask.any(1))
    check.shape("loss", loss, tuple(mask.shape), "as mask, or [B]")
    return masked(loss, mask).sum(1)
