"""Value and reward models: any causal language or vision-language model whose output layer is one scalar.

    model = with_value_head(load_model(path))                              # a critic out of a language model
    engine = make_engine("fsdp2", "value_model", model=model, optimizer=...)
    values = engine.infer_batch(batch, ("values",))["values"]              # [B, T], of the prefix before each token

A reward model is the same model, read once a sequence, behind its last token:

    scores = engine.infer_batch(scoring_batch(batch), ("values",))["values"].sum(1)      # [B]

transformers' own `...ForTokenClassification` has no classes for the vision-language families, drops out a tenth of the
hidden states by default, and works out the head at every position, wanted or not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlkit.data.samples import Batch
from rlkit.vlm.loading import empty_model, load_config, load_model, read_model


def with_value_head(model: Any) -> Any:
    """Put a Linear(hidden, 1) without bias, all zeros, where the model's output layer is; the same object comes back.

    Zeros: the first values are exactly 0, which is to have no critic yet instead of a wrong one, and every rank makes
    the same head without a seed. The head's own gradient is not 0, so that the rest has one from the second step on.

    Args:
        model: from transformers, not yet in an engine. With adapters: first `lora`, which freezes all there is, then
            this.

    Returns:
        The model: embeddings untied from the output layer (they stay as they were), no softcapping of the values, and
        `value_head` in its configuration, by which `load_value_model` knows an export.

    Raises:
        ValueError: a model without an output layer.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    old = base.get_output_embeddings()
    if old is None:
        raise ValueError(f"model: {type(base).__name__} has no output layer to replace; a causal LM or VLM expected")
    device = "cpu" if old.weight.is_meta else old.weight.device  # the zeros are there, whatever is still to be read
    head = nn.Linear(old.in_features, 1, bias=False, device=device, dtype=old.weight.dtype)
    nn.init.zeros_(head.weight)
    for config in {id(c): c for c in (base.config, base.config.get_text_config())}.values():
        config.tie_word_embeddings = False  # or `tie_weights` makes the embedding of it
        if getattr(config, "final_logit_softcapping", None) is not None:
            config.final_logit_softcapping = None
    base.set_output_embeddings(head)
    base.config.value_head = True
    return model


def has_value_head(model: Any) -> bool:
    """Whether a transformers model's output layer is a single scalar."""
    return getattr(model.get_output_embeddings(), "out_features", None) == 1


def load_value_model(
    path: str, *, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False, on_meta: bool = False
) -> Any:
    """A value model: an export with its head as trained, or any causal LM or VLM with a head of zeros.

    Args: as `rlkit.vlm.load_model`.

    Raises:
        ValueError: as `rlkit.vlm.load_model`; an export whose weights are not all there, or have other shapes.
    """
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    config = load_config(path, trust_remote_code=trust_remote_code)
    if on_meta:
        return with_value_head(empty_model(path, config, **options))
    if not getattr(config, "value_head", False):
        return with_value_head(load_model(path, **options))
    # transformers makes an output layer of the whole vocabulary, and warns that the saved one is of another shape
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        model, found = read_model(path, config, ignore_mismatched_sizes=True, output_loading_info=True, **options)
    finally:
        logging.set_verbosity(verbosity)
    old = model.get_output_embeddings()
    name = next(f"{name}.weight" for name, module in model.named_modules() if module is old)
    other_shapes = {(key, tuple(saved)) for key, saved, *_ in found["mismatched_keys"]}
    if wrong := found["missing_keys"] | {key for key, _ in other_shapes ^ {(name, (1, old.in_features))}}:
        raise ValueError(f"model {path!r}: missing, or of another shape: {', '.join(sorted(wrong))}")
    with_value_head(model).get_output_embeddings().weight.data.copy_(_saved(path, name))
    return model


def _saved(path: str, name: str) -> Tensor:
    """One tensor of a model directory or hub id."""
    from safetensors import safe_open
    from transformers.utils import cached_file

    try:
        file = cached_file(path, "model.safetensors")
    except OSError:  # in several files
        index = json.loads(Path(str(cached_file(path, "model.safetensors.index.json"))).read_text())
        file = cached_file(path, index["weight_map"][name])
    with safe_open(file, "pt") as weights:
        return weights.get_tensor(name)


def scoring_batch(batch: Batch) -> Batch:
    """The batch of which a reward model's values are the scores of whole rows: each has one more token behind its last,
    and that one alone in the mask.

    The value of a token is that of the prefix before it, here the whole row; attention is causal, so what the extra
    token is (padding) does not matter. Each row of `values` holds one number: `values.sum(1)` is `scores` [B], with
    gradient in a closure, e.g. for `bradley_terry_loss` (keep pairs in one micro-batch by a field `micro_batch_group`).

    Args:
        batch: rows of at least one token; its mask is not read.

    Returns:
        A new batch, one column wider: [B, T] fields are 0 there; `total_sequences` counts the rows.
    """
    rows = torch.arange(len(batch), device=batch.tokens.device)
    lengths = torch.tensor(batch.lengths, dtype=torch.long, device=batch.tokens.device)

    def widen(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(len(x), 1)], 1) if x.ndim == 2 else x

    tokens = widen(batch.tokens)
    mask = torch.zeros_like(tokens, dtype=torch.bool).index_put((rows, lengths), torch.tensor(True, device=rows.device))
    fields = {name: widen(x) for name, x in batch.fields.items() if name != "routed_experts"}  # those of another model
    return Batch(tokens, mask, [length + 1 for length in batch.lengths], batch.vision, **fields)
