"""Recurrent layers in packed rows: gated delta rule, state-space models and short convolutions.

Such a layer carries a state from token to token, and so across the boundaries of packed sequences. transformers can
pass the boundaries (`cu_seq_lens_q`) to GPU kernels, but its plain torch layers ignore them. Here, forward hooks unpack
the layer's input into a batch with one row per sequence, so that the state starts at zero in each row. All other layers
compute the packed row. No model code changes.

If answers share a prompt, layers with the gated delta rule compute the prompt once, and each answer continues from the
state in which the prompt ended. In other recurrent layers, each row is the prompt followed by one answer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rlkit.engines.packing.layout import PackedLayout
from rlkit.engines.packing.rows import Rows
from rlkit.vlm.families import DELTA_RULE_CLASSES, recurrent_layers


def use_separate_sequences(model: Any) -> None:
    """Make each recurrent layer of the model treat the sequences of a packed row separately."""
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    for layer in recurrent_layers(model):
        SeparateSequences(parents[id(layer)], layer)


class SeparateSequences:
    """Forward hooks that split the packed row into sequences before a recurrent layer, and join the outputs after it.

    Sequences of similar length form a block. The layer's own call computes the first block, and `join` calls the
    layer's `forward` for each further block.

    Args:
        decoder_layer: the layer to which transformers passes `packed_layout`. A hook reads the layout in every call,
            because gradient checkpointing calls the decoder layer again during the backward pass.
        recurrent_layer: a causal module inside the decoder layer, [B, T, H] -> [B, T, H].
    """

    def __init__(self, decoder_layer: nn.Module, recurrent_layer: nn.Module) -> None:
        self.layout: PackedLayout | None = None
        self.packed: Tensor | None = None
        decoder_layer.register_forward_pre_hook(self.read_layout, with_kwargs=True)
        recurrent_layer.register_forward_pre_hook(self.split, with_kwargs=True)
        recurrent_layer.register_forward_hook(self.join, with_kwargs=True)

    def read_layout(self, decoder_layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.layout = kwargs.get("packed_layout")

    def split(self, layer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Forward pre-hook: replace the packed row by the first block of rows."""
        if self.layout is None:
            return None
        kwargs = {name: value for name, value in kwargs.items() if name != "packed_layout"}
        packed = kwargs.pop("hidden_states") if "hidden_states" in kwargs else args[0]
        self.packed = pad(packed[0], (0, 0, 0, 1))  # [N + 1, H]: padding has index N, and is zeros
        self.layout.recurrent_calls += 1
        if _continues(layer, self.layout):
            kwargs["cache_params"] = PromptStates(layer.layer_idx)
        return (_select(self.packed, _rows(layer, self.layout).blocks[0].tokens),), kwargs

    def join(self, layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        """Forward hook: compute the other blocks, and join the outputs of all blocks into a packed row."""
        if self.layout is None or self.packed is None:
            return None
        packed, self.packed = self.packed, None
        rows, outputs = _rows(layer, self.layout), [output]
        for block in rows.blocks[1:]:
            if block.prompts is not None:
                kwargs["cache_params"].continue_from(block.prompts)
            outputs.append(layer.forward(_select(packed, block.tokens), **kwargs))
        return torch.cat([x.flatten(0, 1) for x in outputs]).index_select(0, rows.outputs)[None]


class PromptStates:
    """The last states of shared prompts in one layer with the gated delta rule, from which their answers continue.

    It stands in for transformers' cache, which copies states into buffers and has no gradient through them. Calls of
    the layer first collect the last state of each of their rows; after `continue_from` they start from these states.
    The other names are those that the layers call or read.
    """

    def __init__(self, layer_idx: int) -> None:
        self.layers = {layer_idx: self}
        self.last_inputs: list[Tensor] = []  # of the convolution, [S, C, kernel size]
        self.last_states: list[Tensor] = []  # [S, heads, key size, value size]
        self.conv_states: list[Tensor] = []
        self.recurrent_states: list[Tensor] = []

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
    """Whether the layer computes answers from the state in which their shared prompt ended."""
    return layout.has_shared_prompts and type(layer).__name__ in DELTA_RULE_CLASSES


def _rows(layer: nn.Module, layout: PackedLayout) -> Rows:
    return layout.rows_that_continue if _continues(layer, layout) else layout.rows_with_prefixes


def _select(packed: Tensor, tokens: Tensor) -> Tensor:
    """[N + 1, H] -> [S, K, H]: the rows of a block."""
    return packed.index_select(0, tokens.flatten()).unflatten(0, tokens.shape)
