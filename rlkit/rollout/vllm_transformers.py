"""vLLM's models that run a family by transformers' own code, without the change to transformers' classes.

vLLM decorates the class of the decoder for torch.compile. In the trainer's process the trainer's model has that class,
too, and could no longer be called. Here no class is decorated, so vLLM does not compile these models. Servers, which
are processes of their own, use vLLM's models.
"""

from __future__ import annotations

from vllm import ModelRegistry
from vllm.model_executor.models import transformers as vllm_models


class _Undecorated:
    def _decorate_for_torch_compile(self) -> None:
        """Leave the classes of transformers as they are."""


# vLLM compares the names of classes, so these are vLLM's


class TransformersForCausalLM(_Undecorated, vllm_models.TransformersForCausalLM):
    """Language models."""


class TransformersMoEForCausalLM(_Undecorated, vllm_models.TransformersMoEForCausalLM):
    """Language models with experts."""


class TransformersMultiModalForCausalLM(_Undecorated, vllm_models.TransformersMultiModalForCausalLM):
    """Vision-language models."""


class TransformersMultiModalMoEForCausalLM(_Undecorated, vllm_models.TransformersMultiModalMoEForCausalLM):
    """Vision-language models with experts."""


MODELS = {
    cls.__name__: cls
    for cls in (
        TransformersForCausalLM,
        TransformersMoEForCausalLM,
        TransformersMultiModalForCausalLM,
        TransformersMultiModalMoEForCausalLM,
    )
}


def register() -> None:
    """Register these models with vLLM, in place of its own and under all names that it has for them."""
    for name, entry in list(ModelRegistry.models.items()):
        cls = getattr(entry, "model_cls", None)  # where it has been imported; otherwise its module is named
        module = cls.__module__ if cls else getattr(entry, "module_name", "")
        kind = cls.__name__ if cls else getattr(entry, "class_name", "")
        if module == vllm_models.__name__ and kind in MODELS:
            ModelRegistry.register_model(name, MODELS[kind])
