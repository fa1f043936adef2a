"""Recurrent layers in packed rows: gated delta rule, state-space models and short convolutions.

Such a layer carries a state from token to token, and so across the boundaries of packed sequences. transformers can
pass the boundaries (`cu_seq_lens_q`) to GPU kernels, but its plain torch layers ignore them. Here, forward hooks unpack
the layer's input into a batch with one row per sequence, so that the state starts at zero in each row. All other layers
compute the packed row. No model code changes.

If answers share a prompt, each of these rows is the prompt followed by one answer. Recurrent layers thus compute the
prompt once per answer, while the rest of the model computes it once.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rlkit.engines.packing.layout import AttentionBlock, PackedLayout
from rlkit.vlm.families import recurrent_layers


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

    def split(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Forward pre-hook: replace the packed row by the first block of sequences."""
        if self.layout is None:
            return None
        kwargs = {name: value for name, value in kwargs.items() if name != "packed_layout"}
        packed = kwargs.pop("hidden_states") if "hidden_states" in kwargs else args[0]
        self.packed, self.layout.recurrent_calls = packed, self.layout.recurrent_calls + 1
        return (_rows_of(packed, self.layout.blocks[0]),), kwargs

    def join(self, layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        """Forward hook: compute the other blocks, and join the outputs of all blocks into a packed row."""
        if self.layout is None or self.packed is None:
            return None
        first, *others = self.layout.blocks
        packed, self.packed = self.packed, None
        out = _put_back(output.new_zeros(packed.shape[1], output.shape[-1]), first, output)
        for block in others:
            out = _put_back(out, block, layer.forward(_rows_of(packed, block), **kwargs))
        return out[None]


def _rows_of(packed: Tensor, block: AttentionBlock) -> Tensor:
    """[1, N, H] -> [S, K, H]: the sequences of a block with their shared prompts, padded on the right."""
    return packed[0].index_select(0, block.key_indices.flatten()).unflatten(0, block.key_indices.shape)


def _put_back(out: Tensor, block: AttentionBlock, rows: Tensor) -> Tensor:
    """Copy the outputs [S, K, H] of a block to its own tokens in `out` [N, H], without padding and shared prompts."""
    own = rows.flatten(0, 1).index_select(0, block.own_keys)
    return out.index_copy(0, block.query_indices.flatten().index_select(0, block.valid_queries), own)
