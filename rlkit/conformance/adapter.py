"""What an adapter may have, and reading one by its name."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from torch import Tensor

from rlkit.data.user_code import load_function


class Split(NamedTuple):
    """How the batch is split of which a loss gets one micro-batch.

    Attributes:
        tokens: in the mask, over all micro-batches and ranks.
        sequences: with a token in the mask, over all micro-batches and ranks.
        micro_batches: of each rank.
        ranks: of data parallelism.
    """

    tokens: int
    sequences: int
    micro_batches: int = 1
    ranks: int = 1


class Adapter:
    """A trainer's functions in one form. An adapter needs no base class and may leave out any method.

    All tensors are [B, T] over prompt and response, and entry t speaks of token t. A method gives the trainer what its
    own loop would give it, and nothing more: no mask that the trainer does not apply itself, no total that it does not
    count. It raises NotImplementedError with a reason for input that the trainer refuses.

    Attributes:
        name: with the version.
        ranks_average: whether gradients are averaged over data-parallel ranks, as by FSDP and DDP, or summed.
    """

    name = ""
    ranks_average = False

    def token_logprobs(self, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        """logits [B, T, V], tokens [B, T] -> [B, T]: column t is of tokens[:, t]; column 0 is ignored."""
        raise NotImplementedError

    def token_entropy(self, logits: Tensor) -> Tensor:
        """logits [B, T, V] -> [B, T], not shifted."""
        raise NotImplementedError

    def policy_loss(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        split: Split,
        clip_low: float,
        clip_high: float,
    ) -> Tensor:
        """PPO's clipped loss of one micro-batch, a scalar on which the trainer calls backward; advantages [B]."""
        raise NotImplementedError

    def kl_loss(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """[B, T]: what the trainer adds to its loss, by default, to keep the policy close to the reference."""
        raise NotImplementedError

    def group_advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """GRPO's advantages: rewards [B], group_ids [B] -> [B]."""
        raise NotImplementedError

    def gae(self, rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
        """Advantages [B, T], whitened or not; values[:, t] is the value of the prefix before token t."""
        raise NotImplementedError

    def accumulated_gradient(self, weight: Tensor, features: Tensor, mask: Tensor, micro_batches: int) -> Tensor:
        """The gradient of a training step, where there is one: of mean(features @ weight) over all tokens in the mask.

        features [B, T, K], weight [K]; the trainer splits the rows into so many micro-batches.
        """
        raise NotImplementedError


METHODS = tuple(name for name, x in vars(Adapter).items() if inspect.isfunction(x))


def load_adapter(name: str) -> Any:
    """An adapter by `module:Class` or `path/to/file.py:Class`.

    Raises:
        ValueError: no such class, it cannot be made, it has none of the methods, or public ones of another name.
    """
    found = load_function(name, "trainer")
    try:
        adapter = found() if inspect.isclass(found) else found
    except Exception as error:
        raise ValueError(
            f"trainer {name!r}: expected a class that can be made without arguments, got: {error}"
        ) from error
    public = {x for x in dir(adapter) if not x.startswith("_") and callable(getattr(adapter, x))}
    if not public & set(METHODS):
        raise ValueError(f"trainer {name!r}: expected some of the methods {', '.join(METHODS)}, got none of them")
    if unknown := sorted(public - set(METHODS)):
        raise ValueError(f"trainer {name!r}: expected only the methods {', '.join(METHODS)}, got {', '.join(unknown)}")
    return adapter


def provides(adapter: Any, method: str) -> bool:
    """Whether an adapter has a method of its own."""
    return hasattr(adapter, method) and getattr(type(adapter), method, None) is not getattr(Adapter, method)
