"""Check this machine before a run and, if given, a model, a task and servers.

    python -m rlkit.doctor
    python -m rlkit.doctor --model DIR --task train.jsonl --reward boxed --servers http://host:8000

The exit status is 1 if a line says FAIL. A missing optional package is not a failure.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlkit.doctor.findings import Finding, line
from rlkit.doctor.machine import check_devices, check_features
from rlkit.doctor.model import check_model
from rlkit.doctor.self_check import self_check
from rlkit.doctor.servers import check_servers
from rlkit.doctor.task import check_rewards, check_rows, show_rows
from rlkit.runs import ModelOptions, RewardOptions, TaskOptions, load_named_task, one_sentence_errors, parse_options
from rlkit.vlm import load_processor


@dataclass
class Options(TaskOptions, RewardOptions, ModelOptions):
    model: str = ""
    task: str = ""
    servers: tuple[str, ...] = ()
    """URLs of sampling servers to check."""
    self_check: bool = True
    """Train a tiny model for one step."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all findings. The exit status is 1 if a check failed."""
    with one_sentence_errors("doctor"):
        cfg = parse_options(Options, __doc__ or "", arguments, program="python -m rlkit.doctor")
        passed = [show("Devices", check_devices()), show("What can be used", check_features())]
        if cfg.self_check:
            passed.append(show("Self-check", self_check()))
        if cfg.model:
            passed.append(show(f"Model {cfg.model}", check_model(cfg.model, trust_remote_code=cfg.trust_remote_code)))
        if cfg.task:
            task = load_named_task(cfg, cfg.task)
            processor = load_processor(cfg.model, trust_remote_code=cfg.trust_remote_code) if cfg.model else None
            passed.append(show(f"Task {task.name}", check_rows(task, processor)))
            passed.append(show("Rewards", check_rewards(task)))
            print("\nThe first prompt", *show_rows(task, processor, 1), sep="\n")
        if cfg.servers:
            passed.append(show("Servers", check_servers(cfg.servers)))
    sys.exit(0 if all(passed) else 1)


def show(title: str, findings: Iterable[Finding]) -> bool:
    """Print a section, line by line as its checks finish. Returns whether none of them failed."""
    print(f"\n{title}", flush=True)
    passed = True
    for finding in findings:
        print(line(finding), flush=True)
        passed = passed and finding.ok is not False
    return passed


if __name__ == "__main__":
    main()
