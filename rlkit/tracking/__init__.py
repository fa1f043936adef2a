"""Logging of a run to a directory of plain files and, optionally, to experiment trackers.

run = Run(out, asdict(cfg), trackers=("tensorboard", "wandb"), watchdog=600)
for step in range(steps):
    run.phase("generate")
    ...
    run.phase("train")
    ...
    run.log(step, {"reward/mean": mean, "tokens": tokens})     # time/generate, time/train, ... too
run.close()
"""

from rlkit.tracking.files import CONFIG, EVAL, METRICS, PHASES, SAMPLES, read_metrics, read_object, versions
from rlkit.tracking.run import Run
from rlkit.tracking.throughput import PEAK_FLOPS, peak_flops, rates
from rlkit.tracking.watchdog import describe_waits

__all__ = [
    "CONFIG",
    "EVAL",
    "METRICS",
    "PEAK_FLOPS",
    "PHASES",
    "Run",
    "SAMPLES",
    "describe_waits",
    "peak_flops",
    "rates",
    "read_metrics",
    "read_object",
    "versions",
]
