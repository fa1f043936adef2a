"""Recompute a saved training step, and name the first quantity that differs.

python -m rlkit.replay runs/NAME/rollouts/step_12 [--recipe FILE] [--checkpoint DIR] [options of the recipe]

The saved responses are scored again, and the recipe's file computes advantages, loss and gradient from them. The
weights come from the run's newest checkpoint before this step, or from the initial model. Steps in between are
recomputed from their bundles. Options of the recipe, such as --model or --task, override the saved ones, for example
where files have other paths on this machine. The exit status is 1 if something differs.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlkit.engines.checkpoint import checkpoints
from rlkit.plan.recipes import load_recipe
from rlkit.replay.bundles import Bundle, bundle_folder, bundle_path, bundle_steps, merge_rows, read_bundle
from rlkit.replay.compare import compare_bundles, describe
from rlkit.runs.command_line import command_parser, parse_options
from rlkit.runs.rollouts import Replay, replay_until
from rlkit.runs.start import one_sentence_errors

NEVER = 10**9
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}


def main(arguments: Sequence[str] | None = None) -> None:
    """Replay a bundle and print what differs; the exit status is 1 if something does."""
    parser = command_parser("rlkit.replay", __doc__)
    parser.add_argument("bundle", help="folder of a step, such as runs/NAME/rollouts/step_12")
    parser.add_argument("--recipe", default="", help="the recipe's file; default: its path at the time of the run")
    parser.add_argument(
        "--checkpoint", default="", help="checkpoint of this or an earlier step; default: the newest of these"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        help="differences up to TOLERANCE * (1 + |x|) count as rounding; 0, the default: by dtype",
    )
    options, rest = parser.parse_known_args(arguments)
    with one_sentence_errors("replay"):
        recorded = read_bundle(options.bundle)
        computed = replay(Path(options.bundle), recorded, options.recipe, options.checkpoint, rest)
    if dist.is_initialized() and dist.get_rank():
        return
    for name, old in recorded.versions.items():
        if (new := computed.versions.get(name)) != old:
            print(f"note: {name} was {old}, here it is {new}")
    if computed.recipe_sha256 != recorded.recipe_sha256:
        print(f"note: {computed.recipe} is not the file that the run was started with")
    dtypes = {recorded.options.get(name) for name in ("dtype", "compute_dtype")}
    low_precision = "bfloat16" in dtypes or not recorded.versions.get("device", "cpu").startswith("cpu")
    tolerance = options.tolerance or TOLERANCE["bfloat16" if low_precision else "float32"]
    found = compare_bundles(recorded, computed, tolerance)
    print(describe(found))
    sys.exit(int(any(one.differs for one in found)))


def replay(path: Path, recorded: Bundle, recipe: str, checkpoint: str, arguments: Sequence[str]) -> Bundle:
    """Run the recipe on the saved responses, on this machine, and return the new bundle with the rows of all ranks.

    Raises:
        ValueError: the recipe, the checkpoint or a bundle is missing, or the recipe does not have an option.
    """
    if recorded.origin != "rlkit":
        raise ValueError(f"bundle {str(path)!r}: expected one of a recipe, got one converted from {recorded.origin}")
    folder = bundle_folder(path).resolve().parent
    module = load_recipe(recipe or recorded.recipe)
    source = Path(checkpoint) if checkpoint else _newest_checkpoint(folder.parent, recorded.step)
    start = _finished_steps(source) if source else 0
    if start > recorded.step:
        raise ValueError(f"checkpoint {str(source)!r}: expected one of step {recorded.step} at the latest, got {start}")
    if missing := [step for step in range(start, recorded.step) if step not in bundle_steps(folder)]:
        raise ValueError(
            f"checkpoint: expected one of step {recorded.step}, or bundles from step {start} on in {folder}, got no "
            f"{bundle_path(folder, missing[0]).name}"
        )
    with tempfile.TemporaryDirectory() as out:
        cfg = _options(module, recorded, folder, Path(out), arguments, resume=source is not None)
        _link(folder.parent / "init", Path(out) / "init")  # where a run builds its tiny model
        if source:
            for kind in {path.parent.name for path in source.parent.parent.glob(f"*/{source.name}")}:
                _link(source.parent.parent / kind / source.name, Path(out) / kind / source.name)
        with replay_until(recorded.step) as replayed:
            module.main(cfg)
        return _of_all_ranks(replayed)


def _newest_checkpoint(run: Path, step: int) -> Path | None:
    usable = [path for path in checkpoints(run / "checkpoints") if _finished_steps(path) <= step]
    return usable[-1] if usable else None


def _finished_steps(checkpoint: Path) -> int:
    number = checkpoint.name.removeprefix("step_")
    if not checkpoint.is_dir() or not number.isdecimal():
        raise ValueError(f"checkpoint: expected a directory such as checkpoints/step_12, got {str(checkpoint)!r}")
    return int(number)


def _options(module: Any, recorded: Bundle, folder: Path, out: Path, arguments: Sequence[str], *, resume: bool) -> Any:
    """The saved options, overridden by the command line and then by the options that a replay fixes."""
    (config,) = inspect.signature(module.main, eval_str=True).parameters.values()
    saved = {name: x for name, x in recorded.options.items() if name not in ("config", "resume", "allow_changes")}
    file = out / "options.json"
    file.write_text(json.dumps(saved))
    cfg = parse_options(config.annotation, module.__doc__ or "", ["--config", str(file), *arguments])
    fixed = {
        "config": "",
        "out": str(out),
        "resume": resume,
        "epochs": 0.0,
        "trackers": (),
        "watchdog": 0.0,
        "report_seconds": 0.0,
        "save_every": NEVER,
        "rollout": "hf",
        "servers": (),
        "save_rollouts": True,
        "from_rollouts": str(folder),
        "keep_rewards": False,
        "max_mismatch": math.inf,
    }
    return dataclasses.replace(cfg, **fixed)


def _link(source: Path, target: Path) -> None:
    if source.exists() and not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(source.resolve())


def _of_all_ranks(replayed: Replay) -> Bundle:
    """The last bundle, with the rows of all ranks."""
    if not replayed.bundles:
        raise ValueError("bundle: expected a recipe that trains on its responses, got one that recorded no step")
    gathered = [replayed.bundles[-1]]
    if dist.is_initialized() and dist.get_world_size() > 1:
        gathered = gathered * dist.get_world_size()
        dist.all_gather_object(gathered, replayed.bundles[-1])
    rank_bundles = [one for one in gathered if one is not None]  # ranks that share rows have one bundle
    bundle = rank_bundles[0]
    for i, draw in enumerate(bundle.draws):
        draw.samples = [sample for one in rank_bundles for sample in one.draws[i].samples]
        draw.prompts = [prompt for one in rank_bundles for prompt in one.draws[i].prompts]
    for i, update in enumerate(bundle.updates):
        update.fields = merge_rows([one.updates[i].fields for one in rank_bundles])
    return bundle


if __name__ == "__main__":
    main()
