"""Sharded tensors made whole on four ranks: the same bits, and little memory beside their own.

test_whole.py OUT_DIR runs the ranks.
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
    "copies of shards": ((2, 2), [Replicate(), Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "copies": ((4,), [Replicate()]),
    "rows of rows": ((2, 2), [Shard(0), Shard(0)]),
    "rows and columns": ((2, 2), [Shard(0), Shard(1)]),
    "shards of copies": ((2, 2), [Shard(0), Replicate()]),
    "one shard": ((4, 1), [Replicate(), Shard(0)]),
}
SHAPES = [(5, 3), (1, 2), (4, 1), (7, 2), (3, 2, 5), (8, 3), (0, 3), (12, 4)]  # the last three divide evenly
TYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


def bits(x):
    return x.reshape(-1).view(torch.uint8).tolist()


def given(dtype):
    """A tensor of each shape; any bits that its type has, nan among them."""
    g = torch.Generator().manual_seed(0)
    most = 2 if dtype == torch.bool else 256
    return [
        torch.randint(most, (*shape[:-1], shape[-1] * dtype.itemsize), generator=g).to(torch.uint8).view(dtype)
        for shape in SHAPES
    ]


def same(came, expected):
    pairs = zip(came, expected, strict=True)
    return all(x.shape == y.shape and x.dtype == y.dtype and bits(x) == bits(y) for x, y in pairs)


def in_layout(name, dtype):
    """Whether tensors come as they were: alone, together, and beside others that are not sharded or of another type."""
    ranks, placements = LAYOUTS[name]
    mesh = init_device_mesh("cpu", ranks)

    def cut(x, placements=placements):
        return distribute_tensor(x, mesh, placements, src_data_rank=None)

    tensors, more, scalar = given(dtype), given(torch.float64)[0], torch.tensor(3.0)
    parts = [cut(x) for x in tensors]
    return [
        same(map(full_tensor, parts), tensors),
        same(full_tensors(parts), tensors),
        same(full_tensors(parts[-3:]), tensors[-3:]),
        same(full_tensors([*parts, more]), [*tensors, more]),
        same(full_tensors([*parts, cut(more), cut(scalar, [Replicate()] * mesh.ndim)]), [*tensors, more, scalar]),
    ]


def taken():
    """Peak memory, over the size of what is made whole: of one tensor, whether it divides evenly or not, and of four
    together."""
    mesh = init_device_mesh("cpu", (RANKS,))

    def cut(rows):
        return distribute_tensor(torch.ones(rows, 1000), mesh, [Shard(0)], src_data_rank=None)

    rows = SIZE // 4000
    calls = {"even": [cut(rows)], "uneven": [cut(rows - 1)], "together": [cut(rows // 4) for _ in range(4)]}

    def drain(tensors):
        for tensor in full_tensors(tensors):
            del tensor

    return {name: peak(lambda tensors=tensors: drain(tensors))[0] / SIZE for name, tensors in calls.items()}


def on_rank(rank, port, out):
    torch.set_num_threads(1)
    of_torchrun = {"RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ.update({key: str(x) for key, x in of_torchrun.items()})
    init_distributed("cpu")
    found = {"taken": taken()}
    found |= {name: [in_layout(name, dtype) for dtype in TYPES] for name in LAYOUTS}
    found["shards"].append(in_layout("shards", torch.int16))  # which gloo does not know
    distributed.GATHERS_TWICE = ()
    found |= {f"{name}, as on GPUs": [in_layout(name, torch.float32)] for name in LAYOUTS}
    Path(out, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank found."""
    out = tmp_path_factory.mktemp("whole")
    at_once = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # glibc gives back what is freed
    command, env = [sys.executable, __file__, str(out)], {**os.environ, **at_once}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharded_tensors_come_whole(found, layout):
    for rank in found:
        came = rank[layout] + rank[f"{layout}, as on GPUs"]
        assert len(came) >= len(TYPES) + 1 and all(x == [True] * 5 for x in came), came


def test_little_memory_beside_their_own(found):
    """One tensor, or a bucket and a quarter: an all-gather takes two or three."""
    for rank in found:
        print({name: round(x, 2) for name, x in rank["taken"].items()})
        assert max(rank["taken"]["even"], rank["taken"]["uneven"]) < 1.3
        assert rank["taken"]["together"] < 1.5


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    mp.start_processes(on_rank, (port, sys.argv[1]), nprocs=RANKS, start_method="fork")
