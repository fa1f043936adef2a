"""Layers that compute one sequence per row of their input, in packed rows.

Recurrent layers (gated delta rule, state-space models, short convolutions) carry a state from token to token, and so
across the boundaries of packed sequences. transformers can pass the boundaries (`cu_seq_lens_q`) to GPU kernels, but
its plain torch layers ignore them. In sparse attention an indexer chooses among all tokens of a row, and so among those
of other sequences. Here, forward hooks unpack the layer's inputs into a batch with one row per sequence. All other
layers compute the packed row. No model code changes.

If responses share a prompt, layers with the gated delta rule compute the prompt once, and each response continues from
the state in which the prompt ended. In all others, each row is the prompt followed by one response.

With Ulysses, each rank gathers the layer's inputs, computes the layer for all tokens, and keeps the outputs of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_map

from rlkit.engines.packing.layout import PackedLayout
from rlkit.engines.packing.rows import RowBlock, Rows
from rlkit.engines.packing.ulysses import gather_tokens
from rlkit.vlm.families import DELTA_RULE_CLASSES, INDEXED_ATTENTION_CLASSES, TAKES_PADDING_MASK, layers_by_sequence

CHOICE = "prev_topk_indices"  # argument with the tokens that an earlier layer's indexer has chosen, for each block


def use_separate_sequences(model: Any) -> None:
    """Make each of `layers_by_sequence` treat the sequences of a packed row separately."""
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    for layer in layers_by_sequence(model):
        SeparateSequences(parents[id(layer)], layer)


class SeparateSequences:
    """Forward hooks that split the packed row into sequences before a layer, and join the outputs after it.

    Sequences of similar length form a block. The layer's own call computes the first block, and `join` calls the
    layer's `forward` for each further block. A choice of tokens that a layer returns beside its output for later layers
    is a list with an entry for each block.

    Args:
        decoder_layer: the layer to which transformers passes `packed_layout`. A hook reads the layout in every call,
            because gradient checkpointing calls the decoder layer again during the backward pass.
        layer: a causal module inside the decoder layer, [B, T, H] -> [B, T, H].
    """

    def __init__(self, decoder_layer: nn.Module, layer: nn.Module) -> None:
        self.layout: PackedLayout | None = None
        self.inputs: dict[str, Any] = {}
        decoder_layer.register_forward_pre_hook(self.read_layout, with_kwargs=True)
        layer.register_forward_pre_hook(self.split, with_kwargs=True)
        layer.register_forward_hook(self.join, with_kwargs=True)

    def read_layout(self, decoder_layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.layout = kwargs.get("packed_layout")

    def split(self, layer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Forward pre-hook: replace the packed row by the first block of rows."""
        if self.layout is None:
            return None
        self.inputs = {**dict(zip(signature(layer.forward).parameters, args, strict=False)), **kwargs}
        self.inputs.pop("packed_layout", None)
        if self.layout.ulysses is not None:
            token_inputs = {name: x for name, x in self.inputs.items() if name != CHOICE}
            self.inputs |= tree_map(partial(_gather, layout=self.layout), token_inputs)
        if _continues(layer, self.layout):
            self.inputs["cache_params"] = PromptStates(layer.layer_idx)
        self.layout.calls_by_sequence += 1
        return (), self.inputs_of_block(layer, 0)

    def inputs_of_block(self, layer: nn.Module, number: int) -> dict[str, Any]:
        """The layer's inputs, of which those with an entry for each token are rows."""
        assert self.layout is not None
        block = _rows(layer, self.layout).blocks[number]
        inputs = tree_map(partial(_select, tokens=block.tokens, count=sum(self.layout.lengths)), self.inputs)
        if (choices := self.inputs.get(CHOICE)) is not None:
            inputs[CHOICE] = choices[number]
        if type(layer).__name__ in INDEXED_ATTENTION_CLASSES:
            inputs["attention_mask"] = _mask(layer, block)
        return inputs

    def join(self, layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Forward hook: compute the other blocks, and join the outputs of all blocks into a packed row."""
        if self.layout is None:
            return None
        rows, outputs = _rows(layer, self.layout), [output]
        for number, block in enumerate(rows.blocks[1:], 1):
            if block.prompts is not None:
                self.inputs["cache_params"].continue_from(block.prompts)
            outputs.append(layer.forward(**self.inputs_of_block(layer, number)))
        self.inputs = {}
        if isinstance(output, Tensor):
            return _joined(outputs, rows, self.layout)
        hidden, _, *choices = zip(*outputs, strict=True)  # the second would be attention weights
        return _joined(hidden, rows, self.layout), None, *map(list, choices)


class PromptStates:
    """The last states of shared prompts in one layer with the gated delta rule, from which their responses continue.

    It stands in for transformers' cache, which copies states into buffers and has no gradient through them. Calls of
    the layer first collect the last state of each of their rows; after `continue_from` they start from these states.
    The other names are those that the layers call or read.
    """

    def __init__(self, layer_idx: int) -> None:
        self.layer_idx = layer_idx
        self.last_inputs: list[Tensor] = []  # of the convolution, [S, C, kernel size]
        self.last_states: list[Tensor] = []  # [S, heads, key size, value size]
        self.conv_states: list[Tensor] = []
        self.recurrent_states: list[Tensor] = []

    @property
    def layers(self) -> dict[int, PromptStates]:
        """Made anew: an object that refers to itself would keep the states until Python's garbage collector runs."""
        return {self.layer_idx: self}

    def continue_from(self, prompts: Tensor) -> None:
        """Let row i of the next call start from the last state of row `prompts[i]` of all rows collected."""
        self.conv_states = [torch.cat(self.last_inputs).index_select(0, prompts)]
        self.recurrent_states = [torch.cat(self.last_states).index_select(0, prompts)]

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.recurrent_states)

    def update_conv_state(self, inputs: Tensor, layer_idx: int, conv_kernel_size: int) -> Tensor:
        """The inputs [S, C, K] of the convolution, after those of the prompt if the call continues from one."""
        if self.has_previous_state():
            return torch.cat([*self.conv_states, inputs], -1)
        self.last_inputs.append(pad(inputs, (conv_kernel_size - inputs.shape[-1], 0)))  # a negative number crops
        return inputs

    def update_recurrent_state(self, state: Tensor, layer_idx: int) -> None:
        if not self.has_previous_state():
            self.last_states.append(state)


def _continues(layer: nn.Module, layout: PackedLayout) -> bool:
    """Whether the layer computes responses from the state in which their shared prompt ended."""
    return layout.has_shared_prompts and type(layer).__name__ in DELTA_RULE_CLASSES


def _rows(layer: nn.Module, layout: PackedLayout) -> Rows:
    return layout.rows_that_continue if _continues(layer, layout) else layout.rows_with_prefixes


def _joined(outputs: Sequence[Tensor], rows: Rows, layout: PackedLayout) -> Tensor:
    """The outputs [S, K, H] of all blocks as a packed row [1, N, H], or this rank's part of it."""
    indices = rows.outputs
    if layout.ulysses is not None:
        indices = indices.chunk(layout.ulysses.size)[layout.ulysses.rank]
    return torch.cat([x.flatten(0, 1) for x in outputs]).index_select(0, indices)[None]


def _gather(x: Any, layout: PackedLayout) -> Any:
    """[1, n, ...] of the tokens of one rank -> [1, N, ...]; other inputs as they are."""
    assert layout.ulysses is not None
    is_part = isinstance(x, Tensor) and x.shape[:2] == (1, sum(layout.lengths) // layout.ulysses.size)
    return gather_tokens(x, layout.ulysses) if is_part else x


def _select(x: Any, tokens: Tensor, count: int) -> Any:
    """[1, N, ...] -> [S, K, ...]: the rows of a block of a packed row of `count` tokens; other inputs as they are."""
    if not isinstance(x, Tensor) or x.shape[:2] != (1, count):
        return x
    with_padding = torch.cat([x[0], x.new_zeros(1, *x.shape[2:])])  # padding has index N, and is zeros
    return with_padding.index_select(0, tokens.flatten()).unflatten(0, tokens.shape)


def _mask(layer: nn.Module, block: RowBlock) -> Tensor:
    """What a layer of indexed attention takes as its mask: causal [S, 1, K, K], or of padding [S, K].

    Padding needs no mask of its own: it lies to the right, where no token of a sequence attends to it.
    """
    rows, columns = block.tokens.shape
    if type(layer).__name__ in TAKES_PADDING_MASK:
        return torch.ones_like(block.tokens, dtype=torch.bool)
    causal = torch.ones(columns, columns, dtype=torch.bool, device=block.tokens.device).tril()
    return causal.expand(rows, 1, columns, columns)
