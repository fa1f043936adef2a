"""Value and reward models: any causal language or vision-language model whose output layer is one scalar.

    model = with_value_head(load_model(path))                              # a critic made of a language model
    engine = make_engine("fsdp2", "value_model", model=model, optimizer=...)
    values = engine.infer_batch(batch, ("values",))["values"]              # [B, T], of the prefix before each token

A reward model is the same model, read once per sequence, after its last token:

    scores = engine.infer_batch(scoring_batch(batch), ("values",))["values"].sum(1)      # [B]

transformers' own `...ForTokenClassification` has no classes for the vision-language families, has a dropout of 0.1 on
the hidden states by default, and computes the head at every position.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError
from torch import Tensor, nn

from rlkit.data.samples import Batch
from rlkit.vlm.families import LOGIT_SCALES, SOFT_CAPS
from rlkit.vlm.loading import empty_model, load_config, load_model, model_path, read_pretrained
from rlkit.vlm.weight_files import check_trainable, weight_files

NO_CAP = 2.0**40  # NO_CAP * tanh(x / NO_CAP) is x in float32; Gemma 3n's config takes no None


class ValueHead(nn.Linear):
    """Linear(hidden, 1) without bias, in float32: bfloat16 would round values, and small updates of the weight away."""

    def __init__(self, hidden_size: int, device: torch.device | str) -> None:
        super().__init__(hidden_size, 1, bias=False, device=device, dtype=torch.float32)
        nn.init.zeros_(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.float())


def with_value_head(model: Any) -> Any:
    """Replace the model's output layer by a `ValueHead`, initialised to 0; returns the same model.

    With zeros the first values are exactly 0, which is better than a random critic, and all ranks make the same head
    without a seed. The gradient of the head itself is not 0, so the other weights have a gradient from the second step
    on.

    Args:
        model: from transformers, not yet in an engine. To use adapters, call `lora` first, which freezes all weights
            that exist, and this function after it.

    Returns:
        The model. Its embeddings are no longer tied to the output layer and keep their values, its values are not
        soft-capped or scaled as logits are, and its config has `value_head`, by which `load_value_model` recognises an
        export.

    Raises:
        ValueError: a model without an output layer.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    old = base.get_output_embeddings()
    if old is None:
        raise ValueError(f"model: expected a causal LM or VLM, got {type(base).__name__}, which has no output layer")
    device = "cpu" if old.weight.is_meta else old.weight.device  # the head has its values even if weights are not read
    head = ValueHead(old.in_features, device)
    for config in (base.config, base.config.get_text_config()):
        config.tie_word_embeddings = False  # otherwise `tie_weights` would replace the head by the embedding
    _undo_logit_transforms(base)
    base.set_output_embeddings(head)
    base.config.value_head = True
    return model


def _undo_logit_transforms(model: Any) -> None:
    """Have a model return what its output layer computes, as a classifier does: without soft cap and scale of logits.

    Configs say what they are; Cohere's models and the body of Falcon-H1 have copied it.
    """
    text = model.config.get_text_config()
    if text.model_type == "minicpm3":  # its scale is hidden_size / dim_model_base, of the hidden states
        text.dim_model_base = text.hidden_size
    for place in (model.config, text, model, model.base_model):
        for names, neutral in ((SOFT_CAPS, NO_CAP), (LOGIT_SCALES, 1.0)):
            for name in names:
                if getattr(place, name, None) not in (None, neutral):
                    setattr(place, name, neutral)


def has_value_head(model: Any) -> bool:
    """Whether the output layer of a transformers model is a single scalar."""
    return getattr(model.get_output_embeddings(), "out_features", None) == 1


def check_head_trains(model: Any) -> None:
    """Raise a ValueError if the value head of a transformers model is frozen: below zeros nothing would learn."""
    if not model.get_output_embeddings().weight.requires_grad:
        raise ValueError(
            "model: expected a value head that trains, got a frozen one; add it after lora(...), and leave it out of "
            "what freeze(...) matches"
        )


CLASSIFIER_HEAD = "score.weight"


def as_classifier(model: Any, tokenizer: Any = None) -> tuple[Any, dict[str, str]]:
    """A value model in the form that `AutoModelForSequenceClassification` reads, with one label.

    Its score is that of the last token which is not padding, so it needs to know the padding token.

    Args:
        model: with a value head; its weights are not used.
        tokenizer: names the padding token, if the model's config does not.

    Returns:
        An empty classifier, and new names of weights by old ones. The model itself and no names if the family has no
        such class.
    """
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as CLASSES

    kind: Any = CLASSES.get(type(model.config), None)
    if kind is None:
        return model, {}
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    if config.get_text_config().pad_token_id is None:
        config.get_text_config().pad_token_id = getattr(tokenizer, "pad_token_id", None)
    with init_empty_weights():
        classifier = kind._from_config(config, dtype=model.dtype)
    head = head_name(model)
    names = {CLASSIFIER_HEAD if name == head else name for name in model.state_dict()}
    if names != set(classifier.state_dict()):  # a head of several layers, say
        return model, {}
    return classifier, {head: CLASSIFIER_HEAD}


def is_classifier(config: Any) -> bool:
    """Whether a model's files hold a `...ForSequenceClassification`."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def head_name(model: Any) -> str:
    """The name of the weight of a model's output layer."""
    head = model.get_output_embeddings()
    return next(f"{name}.weight" for name, module in model.named_modules() if module is head)


def load_value_model(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    on_meta: bool = False,
) -> Any:
    """Load a value model: an export with its trained head, a classifier with one label (as most reward models on the
    hub are), or any causal LM or VLM with a new head of zeros.

    Args: see `rlkit.vlm.load_model`.

    Raises:
        ValueError: as `rlkit.vlm.load_model`; weights of an export that are missing or have other shapes; a classifier
            with several labels.
    """
    path = str(path)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    config = load_config(path, trust_remote_code=trust_remote_code)
    if is_classifier(config) and config.num_labels != 1:
        raise ValueError(f"model {path!r}: expected a classifier with one label, got {config.num_labels}")
    check_trainable(model_path(path), config)
    if on_meta:
        return with_value_head(empty_model(path, config, **options))
    if is_classifier(config):
        return _read_classifier(path, config, **options)
    if not getattr(config, "value_head", False):
        return with_value_head(load_model(path, **options))
    # transformers makes an output layer for the vocabulary, and warns that the saved one has another shape
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        model, found = read_pretrained(path, config, ignore_mismatched_sizes=True, **options)
    finally:
        logging.set_verbosity(verbosity)
    head, name = model.get_output_embeddings(), head_name(model)
    mismatched = {(key, tuple(shape)) for key, shape, *_ in found["mismatched_keys"]}
    if wrong := found["missing_keys"] | {key for key, _ in mismatched ^ {(name, (1, head.in_features))}}:
        listed = ", ".join(sorted(wrong))
        raise ValueError(f"model {path!r}: expected every weight in its shape, got missing or different ones: {listed}")
    with_value_head(model).get_output_embeddings().weight.data.copy_(_read_tensor(model_path(path), name))
    return model


def _read_classifier(path: str, config: Any, **options: Any) -> Any:
    """A value model with the weights of a `...ForSequenceClassification`."""
    import transformers

    source = model_path(path)
    auto = transformers.AutoModelForSequenceClassification
    try:
        classifier, found = auto.from_pretrained(source, config=config, output_loading_info=True, **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"model {path!r}: {error}") from error
    if missing := sorted(found["missing_keys"]):
        listed = ", ".join(missing)
        raise ValueError(f"model {path!r}: expected every weight in its shape, got missing or different ones: {listed}")
    model = with_value_head(empty_model(path, config, **options))
    body = classifier.base_model.state_dict(prefix=f"{model.base_model_prefix}.")
    model.load_state_dict(body, strict=False, assign=True)  # without the head
    if weight_files(source):
        head = _read_tensor(source, CLASSIFIER_HEAD)
    else:  # pickled weights are read by transformers alone, which rounds the head to `dtype`
        head = classifier.get_parameter(CLASSIFIER_HEAD).data
    model.get_output_embeddings().weight.data.copy_(head)
    return model


def _read_tensor(path: str, name: str) -> Tensor:
    """One tensor from the files of a directory or hub id."""
    from safetensors import safe_open

    for file in weight_files(path):
        with safe_open(file, "pt") as weights:
            if name in weights.keys():
                return weights.get_tensor(name)
    raise ValueError(f"model {path!r}: expected a tensor {name}, got none")


def scoring_batch(batch: Batch) -> Batch:
    """A batch from which a value model computes one score per row, as a reward model.

    Each row gets one more token after its last, and only that token is in the mask. A token's value is that of the
    prefix before it, here the whole row. Attention is causal, so the extra token may be anything. It repeats the last
    one, since padding may have an embedding of zeros, for which gradients of Gemma 3n are nan. Each row of `values`
    then has one nonzero entry: `values.sum(1)` is `scores` [B], with gradient in a loss closure, e.g. for
    `bradley_terry_loss` (keep each pair in one micro-batch with a field `micro_batch_group`).

    Args:
        batch: rows of at least one token; its mask is ignored.

    Returns:
        A new batch, one column wider. Fields [B, T] are 0 in the new column; `total_sequences` counts the rows.
    """
    rows = torch.arange(len(batch), device=batch.tokens.device)
    lengths = torch.tensor(batch.lengths, dtype=torch.long, device=batch.tokens.device)

    def widen(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(len(x), 1)], 1) if x.ndim == 2 else x

    tokens = widen(batch.tokens)
    tokens[rows, lengths] = tokens[rows, lengths - 1]
    mask = torch.zeros_like(tokens, dtype=torch.bool).index_put((rows, lengths), torch.tensor(True, device=rows.device))
    # experts were chosen by the routers of another model
    fields = {name: widen(x) for name, x in batch.fields.items() if name != "routed_experts"}
    return Batch(tokens, mask, [length + 1 for length in batch.lengths], batch.vision, **fields)
