"""Send the same tokens and images through sampler and trainer, and name the first part of the model that differs.

python -m rlkit.mismatch MODEL --rollout vllm [--task TASK | --bundle FOLDER]

The sampler answers the first prompt of the task. Then sampler and trainer each compute the whole sequence in one
forward pass, with the weights in the model's files. With --bundle (written by --save_rollouts) the sequence is the
bundle's first response. The comparison covers pixels, positions, the vision tower, the input of the first layer, each
layer and its router, the final norm, the logits, and how log-probabilities are computed from logits. The exit status is
1 if a part differs by more than rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from rlkit.data import load_task
from rlkit.data.samples import Sample
from rlkit.engines import make_engine
from rlkit.mismatch.compare import Part, compare_parts, describe, hf_parts, trainer_parts, vllm_parts
from rlkit.replay.bundles import read_bundle
from rlkit.rollout import Sampling, make_rollout
from rlkit.runs.command_line import command_parser
from rlkit.runs.start import one_sentence_errors
from rlkit.runs.vllm_options import longest_row
from rlkit.vlm import encode_prompt, load_model, load_processor, suppressed_token_ids
from rlkit.vlm.long_rope import has_long_factors

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table; the exit status is 1 if a part differs."""
    parser = command_parser("rlkit.mismatch", __doc__)
    parser.add_argument("model", help="directory or hub id")
    parser.add_argument("--rollout", default="vllm", choices=("vllm", "hf"), help="sampler to compare; default: vllm")
    parser.add_argument("--task", default="digits", help="its first row is the prompt; default: digits")
    parser.add_argument(
        "--bundle",
        default="",
        help="folder of a saved step; compares its first response. MODEL should have the weights of that step",
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="sampling temperature; default: 1")
    parser.add_argument("--max_new_tokens", type=int, default=8, help="most tokens in the response; default: 8")
    parser.add_argument(
        "--compute_dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="auto: bfloat16 on a GPU"
    )
    parser.add_argument("--tolerance", type=float, default=0.0, help="relative difference that counts as rounding")
    options = parser.parse_args(arguments)
    with one_sentence_errors("mismatch"):
        found = run(options)
    print(describe(found))
    sys.exit(int(any(part.differs for part in found)))


def run(options: Any) -> list[Part]:
    """Compare sampler and trainer.

    Raises:
        ValueError: the model, task or bundle cannot be used.
    """
    sample, temperature, longest = None, options.temperature, None
    if options.bundle:  # before the model is loaded, so that a bad bundle is reported at once
        sample, temperature, longest = _first_response(options.bundle)
    processor = load_processor(options.model)
    model = load_model(options.model)
    dtype = None if options.compute_dtype == "auto" else getattr(torch, options.compute_dtype)
    suppressed = suppressed_token_ids(model.config, getattr(processor, "tokenizer", processor))
    common = {"temperature": temperature, "suppressed_token_ids": suppressed, "compute_dtype": dtype}
    engine = make_engine(
        "fsdp2", "language_model", model=model, processor=processor, longest_sequence=longest, **common
    )
    more: dict[str, Any] = {} if options.rollout == "hf" else {"enforce_eager": True}
    if options.rollout == "vllm" and has_long_factors(model.config, longest):
        more["max_model_len"] = longest
    rollout = make_rollout(options.rollout, engine.gathered, model=options.model, processor=processor, **more)
    if sample is None:
        task = load_task(options.task)
        prompt = encode_prompt(processor, (task.train or task.heldout)[0])  # tasks of evaluation have no other rows
        (sample,) = rollout.generate([prompt], Sampling(options.max_new_tokens, temperature))
    elif sample.vision:
        prompt = encode_prompt(processor, sample.row)
        sample = replace(sample, images=prompt.images, videos=prompt.videos, audios=prompt.audios)
    sampler = vllm_parts(rollout, sample) if options.rollout == "vllm" else hf_parts(rollout, engine.base, sample)
    trainer, logprobs = trainer_parts(engine, sample)
    rollout.close()
    on_gpu = torch.cuda.is_available()
    tolerance = options.tolerance or TOLERANCE[dtype or (torch.bfloat16 if on_gpu else torch.float32)]
    return compare_parts(sampler, trainer, sample, engine, logprobs, tolerance)


def _first_response(bundle: str) -> tuple[Sample, float, int | None]:
    """The first response of a bundle, the temperature that it was sampled at, and `longest_row` of the run's
    options."""
    saved = read_bundle(bundle, updates=False)
    if saved.origin != "rlkit":
        raise ValueError(f"bundle {bundle!r}: expected one of a recipe, got one converted from {saved.origin}")
    for draw in saved.draws:
        if draw.samples:
            longest = longest_row(SimpleNamespace(**saved.options))
            return draw.samples[0], draw.sampling.get("temperature", 1.0), longest
    raise ValueError(f"bundle {bundle!r}: expected responses, got none")


if __name__ == "__main__":
    main()
