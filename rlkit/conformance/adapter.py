"""The methods that an adapter may have, and how an adapter is loaded by name."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from rlkit.data.user_code import load_function


class Split(NamedTuple):
    """How the whole batch is split. A loss gets one micro-batch of it.

    Attributes:
        tokens: number of tokens in the mask, over all micro-batches and ranks.
        sequences: number of sequences with a token in the mask, over all micro-batches and ranks.
        micro_batches: number of micro-batches of each rank.
        ranks: number of data-parallel ranks.
    """

    tokens: int
    sequences: int
    micro_batches: int = 1
    ranks: int = 1


class Refused(Exception):
    """The trainer does not take such an input. The message is its reason."""


class Adapter(Protocol):
    """The common interface for a trainer's functions. An adapter needs no base class and may leave out any method.

    All tensors are [B, T] over prompt and response, and entry t belongs to token t. A method passes the trainer's
    function the inputs that the trainer's own loop would pass, and nothing more: it applies no mask and computes no
    total that the trainer does not. For input that the trainer refuses, it raises `Refused`.

    Attributes:
        name: name and version of the trainer.
        ranks_average: True if gradients are averaged over data-parallel ranks, as in FSDP and DDP; False if summed.
    """

    name: str = ""
    ranks_average: bool = False

    def token_logprobs(self, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        """logits [B, T, V], tokens [B, T] -> [B, T]: column t belongs to tokens[:, t]; column 0 is ignored."""

    def token_entropy(self, logits: Tensor) -> Tensor:
        """logits [B, T, V] -> [B, T]: column t is the entropy of logits[:, t], without a shift."""

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
        """PPO's clipped loss of one micro-batch: the scalar on which the trainer calls backward. advantages is [B]."""

    def kl_loss(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """[B, T]: the trainer's default KL loss per token, which keeps the policy close to the reference."""

    def group_advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """GRPO's advantages: rewards [B], group_ids [B] -> [B]."""

    def gae(self, rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
        """Advantages [B, T], whitened or not; values[:, t] is the value of the prefix before token t."""

    def accumulated_gradient(self, weight: Tensor, features: Tensor, mask: Tensor, micro_batches: int) -> Tensor:
        """The gradient [K] that the trainer's training step accumulates for this model and loss.

        The loss is the mean of features @ weight over all tokens in the mask, with features [B, T, K] and weight [K].
        The trainer splits the rows into `micro_batches` micro-batches.
        """


METHODS = tuple(name for name, x in vars(Adapter).items() if inspect.isfunction(x) and not name.startswith("_"))


def load_adapter(name: str) -> Any:
    """Load an adapter by `module:Class` or `path/to/file.py:Class`, and instantiate it.

    Raises:
        ValueError: there is no such class, its constructor fails, it has none of the methods of `Adapter`, or it has
            public methods of another name.
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
    """Whether an adapter implements a method."""
    return hasattr(adapter, method) and getattr(type(adapter), method, None) is not getattr(Adapter, method)
