"""Records and saves the rollouts of each step, or reads saved ones instead of sampling. See rlkit.replay.bundles."""

from __future__ import annotations

import errno
import hashlib
import inspect
import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlkit.data.samples import Batch, Sample, collate
from rlkit.replay.bundles import Bundle, Draw, Update, bundle_path, bundle_steps, read_bundle, write_bundle
from rlkit.rollout import Sampling
from rlkit.tracking import Run, versions

FOLDER = "rollouts"
_order = count()  # numbers the updates of all engines


@dataclass
class Replay:
    """Recomputed steps up to and including `last_step`, with this rank's rows in `bundles`.

    Of ranks that share rows, one has bundles; the others have None.
    """

    last_step: int
    bundles: list[Bundle | None] = field(default_factory=list)


class ReplayDone(Exception):
    """Ends a recipe's `main` after the last step of a replay."""


_replay: ContextVar[Replay | None] = ContextVar("replay", default=None)


@contextmanager
def replay_until(step: int) -> Iterator[Replay]:
    """Inside the `with` block, a recipe ends after this step. It keeps its bundles in memory, and saves nothing."""
    replay = Replay(step)
    token = _replay.set(replay)
    try:
        yield replay
    except ReplayDone:
        pass
    finally:
        _replay.reset(token)


def is_replay() -> bool:
    """Whether the recipe runs inside `replay_until`."""
    return _replay.get() is not None


class RecordingEngine:
    """A wrapper around an engine that keeps inputs and results of each `train_batch` for `save_rollouts`.

    All other attributes are those of the engine, also when they are set.

    Attributes:
        draws: responses of this step; only the policy's engine has them.
        updates: (position among the updates of all engines, fields of the batch, metrics) of each `train_batch`.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.draws: list[Draw] = []
        self.updates: list[tuple[int, dict[str, Tensor], dict[str, float]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_engine"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_engine", "draws", "updates"):
            super().__setattr__(name, value)
        else:
            setattr(self._engine, name, value)

    def train_batch(self, batch: Batch, loss_fn: Callable[..., Any], *args: Any, **options: Any) -> dict[str, float]:
        """`train_batch` of the engine. The outputs of the forward pass are recorded as well."""
        outputs: dict[str, Tensor] = {}
        rows = torch.arange(len(batch))
        numbered = Batch(batch.tokens, batch.mask, batch.lengths, batch.vision, **batch.fields, recorded_row=rows)
        numbered.add_token_fields(**batch.token_fields)

        def recording_loss(out: Any, mb: Batch) -> Any:
            for name, x in out.tensors.items():
                if x.shape == mb.mask.shape:
                    recorded_output = outputs.setdefault(name, torch.zeros(batch.mask.shape))
                    recorded_output[mb.recorded_row.cpu(), : x.shape[1]] = x.detach().float().cpu()
            return loss_fn(out, mb)

        metrics = self._engine.train_batch(numbered, recording_loss, *args, **options)
        batch.total_tokens, batch.total_sequences = numbered.total_tokens, numbered.total_sequences
        fields = {"tokens": batch.tokens, "mask": batch.mask, **batch.fields}
        fields |= {name: outputs[name] for name in ("values", "logprobs", "entropy") if name in outputs}
        fields = {name: x.detach().cpu().clone() for name, x in fields.items()}
        self.updates.append((next(_order), fields, dict(metrics)))
        return metrics


def recorded(cfg: Any, engine: Any) -> Any:
    """The engine, wrapped in a `RecordingEngine` if `cfg.save_rollouts` is set."""
    if not getattr(cfg, "save_rollouts", False):
        return engine
    _checksum(_recipe_of(cfg))  # of the code that runs: the file may be edited later
    return RecordingEngine(engine)


def record_draw(
    run: Run,
    engine: Any,
    prompts: Sequence[Sample],
    sampling: Sampling,
    phase: str,
    generated: Sequence[Sample],
    rewards: Tensor,
) -> None:
    """Keep the responses to some prompts, if the engine records and a step is running."""
    if isinstance(engine, RecordingEngine) and run.running_step is not None:
        samples = [replace(sample, reward=x) for sample, x in zip(generated, rewards.tolist(), strict=True)]
        engine.draws.append(Draw(samples, asdict(sampling), phase, list(prompts)))


def save_rollouts(cfg: Any, run: Run, step: int, engines: Mapping[str, Any]) -> None:
    """Write the recorded step as a bundle, or keep it in memory during a replay.

    The run ends with an error message if the bundle cannot be written.

    Args:
        engines: engines by checkpoint folder, as in `rlkit.runs.save`.
    """
    run.phase("checkpoint")
    bundle = Bundle(
        step,
        recipe=_recipe_of(cfg),
        recipe_sha256=_checksum(_recipe_of(cfg)),
        task=getattr(cfg, "task", ""),
        options=asdict(cfg),
        versions={**versions(), "device": _device_name()},
    )
    recording = {name: engine for name, engine in engines.items() if isinstance(engine, RecordingEngine)}
    updates = [
        (at, Update(name, fields, metrics)) for name, e in recording.items() for at, fields, metrics in e.updates
    ]
    bundle.updates = [update for _, update in sorted(updates, key=lambda x: x[0])]
    bundle.draws = [draw for engine in recording.values() for draw in engine.draws]
    for engine in recording.values():
        engine.draws, engine.updates = [], []
    first = next(iter(engines.values()))
    writes = first.model_parallel_group is None or dist.get_rank(first.model_parallel_group) == 0
    if (replay := _replay.get()) is not None:
        replay.bundles.append(bundle if writes else None)
        if step == replay.last_step:
            raise ReplayDone
        return
    if writes:
        try:
            place = bundle_path(run.out / FOLDER, step)
            write_bundle(place, bundle, rank=first.data_parallel_rank, ranks=first.data_parallel_size)
        except OSError as error:
            no_room = error.errno in (errno.ENOSPC, errno.EDQUOT)
            expected = "room for those of this step in" if no_room else "to write those of this step to"
            run.stop(f"rollouts: expected {expected} {run.out / FOLDER}, got: {error}")


def _recipe_of(cfg: Any) -> str:
    return inspect.getfile(type(cfg))


@cache
def _checksum(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu {platform.machine()}"


def check_rollouts(cfg: Any, *, samples_ahead: bool) -> None:
    """Raise a ValueError if saved rollouts are missing, or if this recipe can neither save nor read rollouts.

    Args:
        samples_ahead: the recipe is asynchronous: it samples during training, so responses belong to no single step.
    """
    folder, saves = getattr(cfg, "from_rollouts", ""), getattr(cfg, "save_rollouts", False)
    if samples_ahead and (folder or saves):
        name = "from_rollouts" if folder else "save_rollouts"
        raise ValueError(f"{name}: expected a recipe that samples and trains in turn, got one that samples ahead")
    if getattr(cfg, "keep_rewards", False) and not folder:
        raise ValueError("keep_rewards: expected saved rollouts (--from_rollouts), got none")
    if not folder or is_replay():
        return
    saved = bundle_steps(folder)
    if missing := [step for step in range(cfg.steps) if step not in saved]:
        raise ValueError(
            f"from_rollouts {folder!r}: expected a bundle of each of the {cfg.steps} steps (--steps), got "
            f"{len(saved)} bundles, none of them of step {missing[0]}"
        )


class SavedRollouts:
    """Reads the rollouts of another run, instead of sampling."""

    def __init__(self, cfg: Any, engine: Any) -> None:
        self.folder, self.engine = cfg.from_rollouts, engine
        self.step: int | None = None
        self.draws: list[Draw] = []

    def draw(self, step: int) -> list[list[Sample]]:
        """This rank's responses in the next draw of a step, as one list per prompt.

        If their log-probabilities are unknown, the trainer computes them with its current weights.
        """
        if step != self.step:
            self.step = step
            self.draws = read_bundle(bundle_path(self.folder, step), updates=False).draws
        if not self.draws:
            raise ValueError(f"from_rollouts {self.folder!r}: expected another draw of step {step}, got none")
        groups: dict[int, list[Sample]] = {}
        for sample in self.draws.pop(0).samples:
            groups.setdefault(sample.group_id, []).append(sample)
        unknown = any(math.isnan(x) for group in groups.values() for sample in group for x in sample.logprobs)
        local_groups = list(groups.values())[self.engine.data_parallel_rank :: self.engine.data_parallel_size]
        if not unknown:  # all ranks take the same branch, because each reads the whole bundle
            return local_groups
        samples = [sample for group in local_groups for sample in group]
        scored = iter(self.engine.infer_batch(collate(samples))["logprobs"].tolist())
        return [[replace(s, logprobs=next(scored)[: len(s.token_ids)]) for s in group] for group in local_groups]
