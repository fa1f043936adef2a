"""From per-token (or per-sequence) losses to a scalar, with the denominator in sight.

Every function takes `total`, the count over all micro-batches and all data-parallel ranks. With it the parts of a batch
add up to the loss of the whole batch, whatever the cut, so engines sum gradients and divide by nothing. The default
None takes this tensor's own count, which is right for a batch in one piece.

verl calls them token-sum, token-mean, seq-mean-token-mean, seq-mean-token-sum and seq-mean-token-sum-norm; TRL's loss
types grpo, bnpo/dapo and dr_grpo are `sequence_mean`, `token_mean` and `fixed_length_mean`.
"""

import torch
from torch import Tensor

from rlkit.losses._check import check_float, check_mask, check_not_negative, check_positive, check_rank, check_shape
from rlkit.losses._numerics import at_least_float32, masked_sums


def token_sum(loss: Tensor, mask: Tensor) -> Tensor:
    r"""Sum over the tokens of the mask: $\sum_{b,t} m_{b,t} L_{b,t}$.

    Args:
        loss: [B, T]; may hold anything outside the mask.
        mask: bool [B, T].

    Returns:
        0-d, float32 (float64 for a float64 loss).

    Raises:
        ValueError: for a wrong rank, shape or dtype.
    """
    check_rank("loss", loss, 2, "[B, T]")
    return _row_sums(loss, mask)[0].sum()


def token_mean(loss: Tensor, mask: Tensor, total: float | Tensor | None = None) -> Tensor:
    r"""Mean over tokens, every token with the same weight: $\sum_{b,t} m_{b,t} L_{b,t} / \text{total}$.

    DAPO, https://arxiv.org/abs/2503.14476 section 3.3. Long answers weigh more than short ones.

    Args:
        loss: [B, T]; may hold anything outside the mask.
        mask: bool [B, T].
        total: trained tokens over all micro-batches and ranks, a number or a 0-d tensor; None counts this mask; 0 gives
            0.

    Returns:
        0-d, float32 (float64 for a float64 loss).

    Raises:
        ValueError: for a wrong rank, shape or dtype, or a negative total.
    """
    check_rank("loss", loss, 2, "[B, T]")
    rows, lengths = _row_sums(loss, mask)
    return rows.sum() / lengths.sum().clamp(min=1) if total is None else divide(rows.sum(), total)


def sequence_mean(loss: Tensor, mask: Tensor, total: float | Tensor | None = None) -> Tensor:
    r"""Mean over sequences of each sequence's mean over its tokens.

    $$\frac{1}{\text{total}} \sum_b \frac{\sum_t m_{b,t} L_{b,t}}{\sum_t m_{b,t}}$$

    GRPO, https://arxiv.org/abs/2402.03300 eq. 3. A token of a short answer weighs more than one of a long answer. A row
    with no token in the mask adds nothing and is not counted.

    Args:
        loss: [B, T], or [B] where the loss is per sequence already; may hold anything outside the mask.
        mask: bool [B, T].
        total: sequences that have a token, over all micro-batches and ranks, a number or a 0-d tensor; None counts this
            mask; 0 gives 0.

    Returns:
        0-d, float32 (float64 for a float64 loss).

    Raises:
        ValueError: for a wrong rank, shape or dtype, or a negative total.
    """
    rows, lengths = _row_sums(loss, mask)
    if loss.ndim == 2:
        rows = rows / lengths.clamp(min=1)
    return rows.sum() / lengths.count_nonzero().clamp(min=1) if total is None else divide(rows.sum(), total)


def sequence_sum_mean(loss: Tensor, mask: Tensor, total: float | Tensor | None = None) -> Tensor:
    r"""Mean over sequences of each sequence's sum over its tokens: $\sum_{b,t} m_{b,t} L_{b,t} / \text{total}$.

    The policy gradient as it is derived, with the return of a whole sequence. A row with no token in the mask adds
    nothing and is not counted.

    Args:
        loss: [B, T], or [B] where the loss is per sequence already; may hold anything outside the mask.
        mask: bool [B, T].
        total: sequences that have a token, over all micro-batches and ranks, a number or a 0-d tensor; None counts this
            mask; 0 gives 0.

    Returns:
        0-d, float32 (float64 for a float64 loss).

    Raises:
        ValueError: for a wrong rank, shape or dtype, or a negative total.
    """
    rows, lengths = _row_sums(loss, mask)
    return rows.sum() / lengths.count_nonzero().clamp(min=1) if total is None else divide(rows.sum(), total)


def fixed_length_mean(loss: Tensor, mask: Tensor, length: float, total: float | Tensor | None = None) -> Tensor:
    r"""Mean over sequences of each sequence's token sum over a constant: no answer weighs more for its length.

    $$\frac{1}{\text{total}} \sum_b \frac{\sum_t m_{b,t} L_{b,t}}{\text{length}}$$

    Dr. GRPO, https://arxiv.org/abs/2503.20783 section 3.2 and listing 1. `length` is a constant of the run (the largest
    response length, say), so it must be given. verl falls back on the padded width, which moves with the batch.

    Args:
        loss: [B, T], or [B] where it is each sequence's token sum already; may hold anything outside the mask.
        mask: bool [B, T].
        length: the constant, in tokens; > 0.
        total: sequences that have a token, over all micro-batches and ranks, a number or a 0-d tensor; None counts this
            mask; 0 gives 0.

    Returns:
        0-d, float32 (float64 for a float64 loss).

    Raises:
        ValueError: for a wrong rank, shape or dtype, a length that is not positive, or a negative total.
    """
    check_positive(length=length)
    return sequence_sum_mean(loss, mask, total) / length


def _row_sums(loss: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """([B]: the sum of each row's tokens, or a [B] loss itself, 0 for a row without tokens; [B]: the tokens)."""
    check_float("loss", loss)
    check_mask(mask)
    loss = at_least_float32(loss)
    if loss.ndim == 1:
        check_shape("loss", loss, (mask.shape[0],), "or that of mask")
        lengths = mask.sum(1, dtype=torch.int32)  # a CPU takes twice as long to sum bools into int64
        return torch.where(lengths > 0, loss, 0.0), lengths
    check_shape("loss", loss, tuple(mask.shape), "as mask, or [B]")
    return masked_sums(loss, mask)


def divide(x: Tensor, total: float | Tensor) -> Tensor:
    """x / total, and 0 with gradient 0 where total is 0."""
    if not isinstance(total, Tensor):
        check_not_negative(total=total)
        if total > 0:
            return x / total
        total = x.new_zeros(())
    check_rank("total", total, 0, "(a number or a 0-d tensor)")
    total = total.to(x.device)
    some = total > 0
    return torch.where(some, x, 0.0) / torch.where(some, total, 1.0)
