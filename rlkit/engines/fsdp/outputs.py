"""The forward of a transformers model at the scored tokens of a micro-batch, and the outputs computed from it.

K, `logits_to_keep` and `output_indices` are those of `rlkit.engines.packing.inputs.ModelInputs`. Outputs are computed
from logits [K, V], or from hidden states [K, H], the input of the output layer; then the [K, V] logits never exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlkit.data.samples import Batch
from rlkit.engines.logit_functions import LogitFunction, apply_to_hidden_states, apply_to_logits, head_logits
from rlkit.engines.packing.inputs import ModelInputs
from rlkit.engines.packing.ulysses import UlyssesGroup, gather_outputs
from rlkit.losses.logprobs import linear_logprobs, suppress_tokens, target_logprobs, token_entropy, tokens_per_chunk


def model_logits(model: Any, inputs: ModelInputs) -> Tensor:
    """[K, V] logits at `logits_to_keep`."""
    return inputs.select_outputs(model(**inputs.kwargs, use_cache=False).logits)


def last_hidden_states(model: Any, head: nn.Module, inputs: ModelInputs) -> Tensor:
    """[K, H] inputs of the output layer `head` at `logits_to_keep`; the output layer itself gets no tokens."""
    captured: list[Tensor] = []

    def capture(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        captured.append(args[0])
        return (args[0][:, :0],)

    hook = head.register_forward_pre_hook(capture)
    try:
        model(**inputs.kwargs, use_cache=False)
    finally:
        hook.remove()
    return inputs.select_outputs(captured[0])


@dataclass(frozen=True)
class TokenFunctions:
    """Functions of the logits, and what they need, for the tokens that this rank scores.

    Attributes:
        by_name: the functions, by the names of their outputs.
        count: number of these tokens, which are the first of `logits_to_keep`.
        fields: `Batch.token_fields` at these tokens, [count, ...] by name, on the device.
    """

    by_name: Mapping[str, LogitFunction]
    count: int
    fields: Mapping[str, Tensor]


def token_functions(
    functions: Mapping[str, LogitFunction],
    batch: Batch,
    inputs: ModelInputs,
    ulysses: UlyssesGroup | None,
    device: torch.device,
) -> TokenFunctions:
    """`TokenFunctions` for a micro-batch and its inputs."""
    if not functions:
        return TokenFunctions({}, 0, {})
    indices = inputs.output_indices
    if ulysses is not None:
        indices = indices.split(inputs.outputs_per_rank)[ulysses.rank]
    tokens = batch.trained_token_index(indices)
    return TokenFunctions(
        functions, len(tokens), {name: x[tokens].to(device) for name, x in batch.token_fields.items()}
    )


def outputs_from_logits(
    logits: Tensor,
    targets: Tensor,
    outputs: Sequence[str],
    functions: TokenFunctions,
    *,
    temperature: float,
    suppress: Tensor | None,
) -> dict[str, Tensor]:
    """[K] of each output: those of the functions first, then `logprobs`, and `entropy` if it is asked for.

    Args:
        logits: [K, V].
        targets: [K] the scored tokens.
        outputs: names of what is asked for.
        functions: further outputs, with [count] values.
        temperature: of `logprobs` and `entropy`.
        suppress: token ids of probability 0, or None.
    """
    if suppress is not None:
        logits = suppress_tokens(logits, suppress)
    results = {
        name: apply_to_logits(function, logits[: functions.count], functions.fields)
        for name, function in functions.by_name.items()
    }
    results["logprobs"] = target_logprobs(logits, targets, temperature)
    if "entropy" in outputs:
        results["entropy"] = token_entropy(logits, temperature)
    return results


def outputs_from_hidden(
    hidden: Tensor,
    head: Any,
    targets: Tensor,
    outputs: Sequence[str],
    functions: TokenFunctions,
    *,
    temperature: float,
    suppress: Tensor | None,
) -> dict[str, Tensor]:
    """`outputs_from_logits` for the logits that the output layer `head` would compute from hidden states [K, H]."""
    options = {"bias": head.bias, "suppress": suppress}
    results = {
        name: apply_to_hidden_states(function, hidden[: functions.count], head.weight, functions.fields, **options)
        for name, function in functions.by_name.items()
    }
    results["logprobs"], entropy = linear_logprobs(hidden, head.weight, targets, temperature, **options)
    if "entropy" in outputs:
        results["entropy"] = entropy
    return results


def chunks_of_logits(logits: Tensor, suppress: Tensor | None) -> Iterator[Tensor]:
    """Logits [K, V] in chunks of tokens, -inf at suppressed tokens."""
    for chunk in logits.split(tokens_per_chunk(logits, logits.shape[1])):
        yield chunk if suppress is None else suppress_tokens(chunk, suppress)


def chunks_from_hidden(hidden: Tensor, head: Any, suppress: Tensor | None) -> Iterator[Tensor]:
    """`chunks_of_logits` for the logits that the output layer `head` computes from hidden states [K, H]."""
    for chunk in hidden.split(tokens_per_chunk(hidden, len(head.weight))):
        yield head_logits(chunk, head.weight, head.bias, suppress)


def gather_over_ulysses(
    results: dict[str, Tensor], inputs: ModelInputs, ulysses: UlyssesGroup | None
) -> dict[str, Tensor]:
    """Results [K, ...] of this rank -> those of all ranks that share the rows, in the order of `output_indices`."""
    if ulysses is None:
        return results
    return {name: gather_outputs(x, inputs.outputs_per_rank, ulysses) for name, x in results.items()}
