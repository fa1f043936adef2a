"""`rlkit.losses.value` token by token."""

from torch import Tensor

from rlkit.losses.naive._loops import constant, trained, zeros


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float = 0.5) -> Tensor:
    values, old, targets, loss = values.double(), constant(old_values), constant(returns), zeros(mask)
    for b, t in trained(mask):
        held = max(min(values[b, t], old[b, t] + clip), old[b, t] - clip)
        loss[b, t] = 0.5 * max((values[b, t] - targets[b, t]) ** 2, (held - targets[b, t]) ** 2)
    return loss
