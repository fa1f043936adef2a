"""Our functions against plain loops, verl 0.9.1 and TRL 1.16 on the same inputs; what is not installed does not run.

    make bench-peers      # with verl and TRL, in their own environment; writes benchmarks/results/functions.md
    OMP_NUM_THREADS=1 pytest benchmarks/test_functions.py --benchmark-enable

One group a function, one thread. Before it is timed each contestant's result is compared with ours: `max_abs_diff` and
`max_rel_diff`, a share of the output's largest value, stand beside the time; without --benchmark-enable the comparison
is all that runs. Before the clock starts each contestant's inputs are made as its own trainer makes them. Masks are
bool for us and for verl's losses (verl/workers/utils/losses.py), int64 for verl's advantages and for TRL; "verl float
mask" is agg_loss with a float mask, which its trainer does not use. Groups are integers for us and string ids for verl.
The loops get lists of Python floats. `peak_extra_bytes` is what tensors took at the most beyond the inputs, results
included.
"""

import platform
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from functions_common import PEERS, batch, differences, every_group, peak_bytes, seconds  # noqa: E402

torch.set_num_threads(1)
BUDGET = 0.8  # seconds of timed rounds a contestant
CASES = [(g, name) for g in every_group().values() for name in g.contestants]
VERSIONS = {"python": platform.python_version(), **{name: version(name) for name in ("torch", *PEERS)}}


@pytest.fixture(scope="module", autouse=True)
def settled_allocator():
    """glibc keeps freed memory once it has seen such a large block freed; else who runs first pays for the pages."""
    torch.zeros(31 * 2**20, dtype=torch.uint8)


@pytest.mark.parametrize(("group", "name"), CASES, ids=[f"{g.name}-{name}" for g, name in CASES])
def test_function(benchmark, group, name):
    inputs = batch(group.size, group.mask)
    contestants = group.build(inputs)
    run = contestants[name]
    expected = contestants["rlkit"]()
    if name != "loop":
        run()
    took, result = seconds(run)
    absolute, relative = differences(result, expected, inputs.mask)
    assert relative <= group.tolerance, f"{relative:.1e} of the largest value apart, {absolute:.1e}"
    benchmark.group = group.name
    benchmark.extra_info.update(contestant=name, max_abs_diff=absolute, max_rel_diff=relative, versions=VERSIONS)
    del result, expected
    if group.memory and name != "loop":
        peak, largest = peak_bytes(run)
        benchmark.extra_info.update(peak_extra_bytes=peak, largest_tensor_bytes=largest)
    rounds = max(1 if took > BUDGET else 5, min(150, int(BUDGET / took)))
    benchmark.pedantic(run, rounds=rounds, warmup_rounds=0 if name == "loop" else 2)
