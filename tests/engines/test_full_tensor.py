"""Full tensors of sharded ones on four ranks: the same bits, with little memory beside the result.

test_full_tensor.py OUT_DIR runs the ranks.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).parent))
from memory import peak

from rlkit.engines import distributed
from rlkit.engines.distributed import full_tensor, full_tensors, init_distributed

RANKS, SIZE = 4, 48_000_000  # bytes
LAYOUTS = {
    "shards": ((4,), [Shard(0)]),
    "replicated shards": ((2, 2), [Replicate(), Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "replicas": ((4,), [Replicate()]),
    "rows of rows": ((2, 2), [Shard(0), Shard(0)]),
    "rows and columns": ((2, 2), [Shard(0), Shard(1)]),
    "shards of replicas": ((2, 2), [Shard(0), Replicate()]),
    "one shard": ((4, 1), [Replicate(), Shard(0)]),
}
SHAPES = [(5, 3), (1, 2), (4, 1), (7, 2), (3, 2, 5), (8, 3), (0, 3), (12, 4)]  # the last three divide evenly
TYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


def bits(x):
    return x.reshape(-1).view(torch.uint8).tolist()


def make_tensors(dtype):
    """A tensor of each shape with random bits that are valid in its dtype, nan included."""
    g = torch.Generator().manual_seed(0)
    most = 2 if dtype == torch.bool else 256
    return [
        torch.randint(most, (*shape[:-1], shape[-1] * dtype.itemsize), generator=g).to(torch.uint8).view(dtype)
        for shape in SHAPES
    ]


def are_equal(tensors, expected):
    pairs = zip(tensors, expected, strict=True)
    return all(x.shape == y.shape and x.dtype == y.dtype and bits(x) == bits(y) for x, y in pairs)


def check_layout(name, dtype):
    """Whether tensors are restored: alone, together, and beside ones that are not sharded or of another dtype."""
    ranks, placements = LAYOUTS[name]
    mesh = init_device_mesh("cpu", ranks)

    def shard(x, placements=placements):
        return distribute_tensor(x, mesh, placements, src_data_rank=None)

    tensors, float64, scalar = make_tensors(dtype), make_tensors(torch.float64)[0], torch.tensor(3.0)
    shards = [shard(x) for x in tensors]
    others = [shard(float64), shard(scalar, [Replicate()] * mesh.ndim)]
    return [
        are_equal(map(full_tensor, shards), tensors),
        are_equal(full_tensors(shards), tensors),
        are_equal(full_tensors(shards[-3:]), tensors[-3:]),
        are_equal(full_tensors([*shards, float64]), [*tensors, float64]),
        are_equal(full_tensors([*shards, *others]), [*tensors, float64, scalar]),
    ]


def peak_memory():
    """Peak memory over the size of the result: one tensor, whether it divides evenly or not, and four together."""
    mesh = init_device_mesh("cpu", (RANKS,))

    def shard(rows):
        return distribute_tensor(torch.ones(rows, 1000), mesh, [Shard(0)], src_data_rank=None)

    rows = SIZE // 4000
    calls = {"even": [shard(rows)], "uneven": [shard(rows - 1)], "four": [shard(rows // 4) for _ in range(4)]}

    def drain(tensors):
        for tensor in full_tensors(tensors):
            del tensor

    return {name: peak(lambda tensors=tensors: drain(tensors))[0] / SIZE for name, tensors in calls.items()}


def on_rank(rank, port, out):
    torch.set_num_threads(1)
    of_torchrun = {"RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ.update({key: str(x) for key, x in of_torchrun.items()})
    init_distributed("cpu")
    results = {"peak": peak_memory()}
    results |= {name: [check_layout(name, dtype) for dtype in TYPES] for name in LAYOUTS}
    results["shards"].append(check_layout("shards", torch.int16))  # which gloo does not support
    distributed.GATHER_BY_BROADCAST = ()
    results |= {f"{name}, as on GPUs": [check_layout(name, torch.float32)] for name in LAYOUTS}
    Path(out, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of each rank."""
    out = tmp_path_factory.mktemp("full_tensor")
    freed_at_once = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # glibc returns freed memory to the system
    command, env = [sys.executable, __file__, str(out)], {**os.environ, **freed_at_once}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_full_tensors_are_the_tensors_that_were_sharded(results, layout):
    for rank in results:
        checks = rank[layout] + rank[f"{layout}, as on GPUs"]
        assert len(checks) >= len(TYPES) + 1 and all(x == [True] * 5 for x in checks), checks


def test_little_memory_beside_the_result(results):
    """One tensor, or a bucket and a quarter of it; an all-gather needs two or three times the result."""
    for rank in results:
        print({name: round(x, 2) for name, x in rank["peak"].items()})
        assert max(rank["peak"]["even"], rank["peak"]["uneven"]) < 1.3
        assert rank["peak"]["four"] < 1.5


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    mp.start_processes(on_rank, (port, sys.argv[1]), nprocs=RANKS, start_method="fork")
