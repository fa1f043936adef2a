"""Which weights of a model are trained: freezing by name pattern, LoRA and 4-bit base weights; and dropout off."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from rlkit.data.lookup import requires_extra
from rlkit.vlm.families import ENCODERS_WITHOUT_CONFIG, recurrent_layers
from rlkit.vlm.nf4 import Nf4Linear, weight_counts

ROUTER_NOISE = {"jitter_noise", "input_jitter_noise", "moe_jitter_eps"}  # attributes of routers
# configurations from which modules read probabilities of dropout in each forward
READ_IN_EACH_FORWARD = frozenset(
    {"BltLocalEncoderConfig", "BltLocalDecoderConfig", "BltGlobalTransformerConfig", "FalconConfig", "GPTNeoConfig"}
)


def vision_tower_pattern(model: Any) -> str:
    """A regular expression that matches the names of the parameters in a model's vision tower, for `freeze`.

    The vision tower is the module whose own configuration is the model's `vision_config`. A projector or connector
    between it and the language model is not part of it, unless the family builds it into the tower, as Qwen does.

    Raises:
        ValueError: the model has no vision tower.
    """
    return _tower_pattern(model, "vision")


def audio_tower_pattern(model: Any) -> str:
    """A regular expression that matches the names of the parameters in a model's audio tower, for `freeze`.

    The audio tower is the module whose own configuration is the model's `audio_config`.

    Raises:
        ValueError: the model has no audio tower.
    """
    return _tower_pattern(model, "audio")


def _tower_pattern(model: Any, modality: str) -> str:
    """The pattern of the modules whose configuration is the model's `<modality>_config`: "vision" or "audio"."""
    kind = type(getattr(model.config, f"{modality}_config", None))
    without_config = ENCODERS_WITHOUT_CONFIG.get(model.config.model_type, {}).get(modality)
    names = [
        name
        for name in encoder_modules(model)
        if name == without_config or type(getattr(model.get_submodule(name), "config", None)) is kind
    ]
    if not names:
        raise ValueError(f"{modality} tower: expected a model that has one, got {model.config.model_type}")
    return _inside(names)


def encoder_modules(model: Any) -> list[str]:
    """The names of the modules that encode images, videos and audio.

    These are the outermost modules with a configuration of their own, other than the model's and its text model's; and
    the layers of Gemma 4 Unified that project patches and sound.
    """
    own = {type(model.config), type(model.config.get_text_config())}
    found: list[str] = []
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        is_encoder = hasattr(config, "model_type") and type(config) not in own
        if is_encoder and not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    without_config = ENCODERS_WITHOUT_CONFIG.get(model.config.model_type, {}).values()
    names = {name for name, _ in model.named_modules()}
    return [*found, *(name for name in without_config if name in names)]


def _fused_projections(model: Any) -> list[str]:
    """The names of layers of state-space models (Mamba) whose weights are arguments of a fused kernel.

    On a GPU the kernel reads the weights and would ignore adapters. peft refuses such layers for some families only.
    """
    names = {id(module): name for name, module in model.named_modules()}
    mixers = [layer for layer in recurrent_layers(model) if hasattr(layer, "D")]  # only state-space models have D
    return [names[id(part)] for layer in mixers for part in (layer.conv1d, layer.out_proj)]


def _unadaptable_layers(model: Any) -> dict[str, str]:
    """name -> reason, for each linear layer that LoRA cannot adapt."""
    routers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and type(module).__name__.endswith("Router")
    ]
    indexers = [name for name, module in model.named_modules() if type(module).__name__.endswith("Indexer")]
    in_indexers = [
        f"{indexer}.{name}"
        for indexer in indexers
        for name, module in model.get_submodule(indexer).named_modules()
        if isinstance(module, nn.Linear)
    ]
    return {
        **dict.fromkeys(_fused_projections(model), "a fused kernel computes with its weight alone"),
        **dict.fromkeys(routers, "a router returns more than its logits"),  # Llama 4
        **dict.fromkeys(in_indexers, "choosing the tokens of sparse attention has no gradient"),  # GLM-5
    }


def _inside(names: Sequence[str]) -> str:
    """A regular expression for names inside these modules, also in a model wrapped by peft or an engine."""
    return rf"(^|\.)({'|'.join(map(re.escape, names))})\."


def freeze(model: nn.Module, pattern: str) -> list[str]:
    """Turn off gradients for every parameter whose name matches.

    Args:
        model: any module, not yet wrapped by an engine.
        pattern: regular expression, searched for in each name; `vision_tower_pattern(model)` for the vision tower,
            `audio_tower_pattern(model)` for the audio tower.

    Returns:
        The names of the frozen parameters.

    Raises:
        ValueError: no name matches. Otherwise a misspelt pattern would silently leave everything trainable.
    """
    names = [name for name, _ in model.named_parameters()]
    frozen = [name for name in names if re.search(pattern, name)]
    if not frozen:
        raise ValueError(
            f"freeze: expected a match in parameters of {sorted(set(map(_top_module, names)))}, got {pattern!r}"
        )
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return frozen


def disable_dropout(model: nn.Module) -> list[str]:
    """Set every probability of dropout in a model to 0, as TRL's option of that name does, and all noise of routers.

    A policy with dropout is another one in training than in sampling: its ratio and KL are noise. `nn.Dropout` modules
    and the attributes from which transformers' layers read a probability (`attention_dropout`, `drop_prob`,
    `layerdrop`) or the noise on a router's input are changed. Phi-MoE's routers, which draw experts at random in
    training mode, stay in evaluation mode. The model's configuration, and so an export, keeps its values, except in
    Falcon, BLT and GPT-Neo, which read it in each forward.

    Returns:
        The names of the probabilities that were not 0.
    """
    changed = []
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        for owner in [module, *([config] if type(config).__name__ in READ_IN_EACH_FORWARD else [])]:
            for name, value in vars(owner).items():
                is_noise = isinstance(module, nn.Dropout) or "drop" in name or name in ROUTER_NOISE
                if isinstance(value, float) and value and is_noise:
                    setattr(owner, name, 0.0)
                    changed.append(f"{path}.{name}")
        if type(module).__name__ == "PhimoeTopKRouter":
            module.register_forward_pre_hook(_in_evaluation_mode)
    return changed


def _in_evaluation_mode(module: nn.Module, _: Any) -> None:
    module.eval()


def _top_module(name: str) -> str:
    """The first two parts of a parameter's name, such as model.visual."""
    return ".".join(name.split(".")[:2])


def lora(
    model: Any,
    rank: int,
    alpha: int,
    target_modules: str | Sequence[str] = "all-linear",
    exclude_modules: str | None = None,
    *,
    adapt_towers: bool = False,
) -> Any:
    """Wrap a transformers model with LoRA adapters: W + alpha / rank * B A, with B initialised to zero.

    The paper is https://arxiv.org/abs/2106.09685, eq. 3.

    Args:
        model: from transformers.
        rank: r of the paper.
        alpha: alpha of the paper.
        target_modules: "all-linear", a regular expression that must match a module's full name, or a list of the last
            parts of modules' names.
        exclude_modules: modules without adapters, a regular expression that must match a module's full name.
        adapt_towers: also adapt the modules that encode images, videos and audio, see `encoder_modules`.

    Returns:
        A peft model. Only the adapters are trained; without them (`disable_adapter()`) it is the reference policy.

    Raises:
        ValueError: a rank below 1, or target modules that LoRA cannot adapt here: embeddings, output layers tied to
            them, routers, indexers of sparse attention, and projections inside fused kernels.
    """
    with requires_extra("vlm"):
        import peft
    if rank < 1:
        raise ValueError(f"rank: expected at least 1, got {rank}")
    excluded = [exclude_modules] if exclude_modules else []
    if not adapt_towers and (encoders := encoder_modules(model)):
        excluded.append(f".*{_inside(encoders)}.*")
    unadaptable = _unadaptable_layers(model)
    if unadaptable and target_modules == "all-linear":
        excluded.append("|".join(map(re.escape, unadaptable)))
    elif chosen := [name for name in unadaptable if _is_target(name, target_modules)]:
        why = unadaptable[chosen[0]]
        raise ValueError(f"target_modules: expected layers that LoRA can adapt, got {chosen[0]}: {why}")
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=target_modules if isinstance(target_modules, str) else list(target_modules),
        exclude_modules="|".join(f"({pattern})" for pattern in excluded) or None,
    )
    model = peft.get_peft_model(model, config, low_cpu_mem_usage=True)  # on the meta device: initialised below
    if embedding := next((name for name, _ in model.named_parameters() if ".lora_embedding_" in name), None):
        raise ValueError(
            f"target_modules: expected linear layers, whose adapters can be sent to a sampler, got an embedding: "
            f"{embedding}"
        )
    head = model.get_base_model().get_output_embeddings()
    if hasattr(head, "lora_A") and head.weight is model.get_input_embeddings().weight:
        raise ValueError("target_modules: expected no output layer that is tied to the embedding, got one")
    for layer in model.modules():
        if "default" in getattr(layer, "lora_A", ()):
            _initialise(layer)
    return model


def _is_target(name: str, target_modules: str | Sequence[str]) -> bool:
    """Whether peft adapts the module of this name."""
    if isinstance(target_modules, str):
        return re.fullmatch(target_modules, name) is not None
    return any(f".{name}".endswith(f".{target}") for target in target_modules)


def _initialise(layer: Any) -> None:
    """Initialise adapters that peft has created on the meta device: beside the base weights, or on the CPU if these are
    not loaded yet. The random numbers are the same, so that a run does not depend on how it loads its weights."""
    device = next(layer.get_base_layer().parameters()).device
    for part in (layer.lora_A, layer.lora_B):
        part.to_empty(device="cpu" if device.type == "meta" else device)
        part["default"].reset_parameters()  # as the constructor of nn.Linear does; peft then overwrites it
    layer.reset_lora_parameters("default", True)


def quantize_base(model: Any) -> list[str]:
    """Replace the frozen linear layers of a language model by layers whose weights take 4.25 bits, see rlkit.vlm.nf4.

    The output layer, the encoders of images and audio, and routers keep their weights; so do embeddings, norms,
    convolutions and experts that are no linear layers.

    Args:
        model: wrapped by `lora`, not yet by an engine. Its weights may be on the meta device.

    Returns:
        The names of the layers.

    Raises:
        ValueError: the model has no such layers, for example because all its weights are trained.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    kept = [*encoder_modules(base), *_unadaptable_layers(base)]
    pattern = "|".join([r"(gate|router)\.", *([_inside(kept)] if kept else [])])
    linear = [(name, module) for name, module in base.named_modules() if type(module) is nn.Linear]
    names = [
        name
        for name, module in linear
        if not module.weight.requires_grad
        and module is not base.get_output_embeddings()
        and not re.search(pattern, f"{name}.")
    ]
    if not names:
        raise ValueError("model: expected frozen linear layers, as below LoRA adapters, got none")
    del linear  # each matrix is freed when its layer is replaced
    for name in names:
        base.set_submodule(name, Nf4Linear(base.get_submodule(name)))
    return names


def trainable_summary(model: nn.Module) -> str:
    """One line that says how many parameters are trained, and in which modules."""
    train = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(weight_counts(model))
    quantized = sum(x.in_features * x.out_features for x in model.modules() if isinstance(x, Nf4Linear))
    in_nf4 = f"; {quantized / total:.1%} are frozen in 4 bits" if quantized else ""
    parts = sorted({_trained_part(name) for name, p in model.named_parameters() if p.requires_grad})
    return (
        f"{train:,} of {total:,} parameters train ({train / max(total, 1):.1%}): {', '.join(parts) or 'none'}{in_nf4}"
    )


def _trained_part(name: str) -> str:
    return ("LoRA in " if ".lora_" in name else "") + _top_module(name.removeprefix("base_model.model."))
