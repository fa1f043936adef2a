"""Faults put into one part of a trainer, and the part that is then named first. With any sampler in this process."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

import torch

from rlkit.engines.packing import inputs
from rlkit.mismatch.compare import compare_parts, trainer_parts
from rlkit.mismatch.trace import decoder_of

TOLERANCE = 1e-3


def first_differences(sampler, engine, sample):
    """{part with a fault: part that is named}; "" stands for none.

    Args:
        sampler: its parts over the sequence.
        sample: a response of this sampler, with weights equal to the trainer's.
    """
    named = {}
    for part, fault in {"": lambda: ExitStack(), **faults(engine, sample)}.items():
        with fault() as changed:
            trainer, logprobs = trainer_parts(engine, changed if hasattr(changed, "mask") else sample)
            found = compare_parts(sampler, trainer, sample, engine, logprobs, TOLERANCE)
        named[part] = next((one.name for one in found if one.differs), "")
    return named


def faults(engine, sample):
    """{part: context in which the trainer has a fault there}."""
    decoder = decoder_of(engine.base)
    last = len(decoder.layers) - 1
    names = dict(engine.base.named_parameters())
    down = [x for name, x in names.items() if "layers." in name and "mlp" in name and "down_proj" in name]
    made = {
        "injected features": lambda: scaled(decoder.embed_tokens.weight),
        "layer 0: attention": lambda: scaled(decoder.layers[0].self_attn.o_proj.weight),
        f"layer {last}: attention": lambda: scaled(decoder.layers[last].self_attn.v_proj.weight),
        "layer 0": lambda: scaled(down[0]),
        f"layer {last}": lambda: scaled(down[-1]),
        "final norm": lambda: scaled(decoder.norm.weight),
        "sampling transform": lambda: mock.patch.object(engine, "temperature", 1.25 * engine.temperature),
    }
    router = [name for name in names if name.endswith(f"layers.{last}.mlp.gate.weight")]
    if router:
        made[f"layer {last}: router"] = lambda: scaled(names[router[0]], 3.0)
    if engine.base.get_output_embeddings().weight is not decoder.embed_tokens.weight:
        made["logits"] = lambda: scaled(engine.base.get_output_embeddings().weight)
    if sample.vision:
        tower = [x for name, x in names.items() if "visual." in name and x.ndim == 2]
        made |= {
            "pixels": lambda: other_pixels(sample),
            "positions": lambda: mock.patch.object(inputs, POSITIONS, later(getattr(inputs, POSITIONS))),
            "vision tower": lambda: scaled(tower[-1]),
        }
    return made


POSITIONS = "position_ids"


@contextmanager
def scaled(parameter, by=1.1):
    with torch.no_grad():
        kept = parameter.detach().clone()
        parameter.mul_(by)
        try:
            yield
        finally:
            parameter.copy_(kept)


@contextmanager
def other_pixels(sample):
    yield replace(sample, vision={**sample.vision, "pixel_values": sample.vision["pixel_values"] * 1.01})


def later(position_ids):
    """Position ids of which the last one is off by one."""

    def changed(*args, **options):
        ids = position_ids(*args, **options).clone()
        ids[..., -1] += 1
        return ids

    return changed
