"""Memory, speed and bandwidth of known GPUs, by name."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlkit.tracking import peak_flops

USABLE = 0.93  # share of a GPU's memory; assumption: CUDA, NCCL and fragmentation take the rest
NETWORK_BYTES_PER_SECOND = 50e9  # per GPU, between machines; assumption: a 400 Gbit/s adapter
HOST_BYTES_PER_SECOND = 50e9  # per GPU, from and to host memory; assumption: 50 of the 64 GB/s of PCIe 5.0 x16


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        name: as on the command line.
        memory: bytes.
        flops: dense bfloat16 FLOP/s.
        memory_bandwidth: bytes per second.
        link_bandwidth: bytes per second to other GPUs of the same machine, in one direction.
    """

    name: str
    memory: int
    flops: float
    memory_bandwidth: float
    link_bandwidth: float


# name -> (memory in GiB, memory bandwidth in TB/s, NVLink or PCIe bandwidth in GB/s in one direction), from the data
# sheets. Memory is the usable part with ECC on, where that is known (79.1 GiB of "80 GB").
DATA_SHEETS = {
    "h100-80gb": (79.1, 3.35, 450),
    "h200-141gb": (139.8, 4.8, 450),
    "h20-96gb": (95.0, 4.0, 450),
    "b200-180gb": (178.0, 7.7, 900),
    "a100-80gb": (79.2, 2.04, 300),
    "a100-40gb": (39.4, 1.56, 300),
    "l40s-48gb": (44.4, 0.86, 32),
    "l4-24gb": (22.0, 0.30, 32),
    "rtx-4090-24gb": (23.5, 1.01, 32),
}


def gpu_named(name: str, memory: float | None = None) -> Gpu:
    """A GPU by its name, e.g. "h100-80gb".

    Args:
        memory: GiB, in place of the data sheet's. With it a GPU may be unknown; its rates are then nan.

    Raises:
        ValueError: no such GPU.
    """
    if memory is not None and name not in DATA_SHEETS:
        return Gpu(name, int(memory * 2**30), math.nan, math.nan, math.nan)
    if name not in DATA_SHEETS:
        raise ValueError(f"gpu: expected one of {', '.join(sorted(DATA_SHEETS))}; got {name!r}")
    gib, bandwidth, link = DATA_SHEETS[name]
    flops = peak_flops(name.rpartition("-")[0])
    assert flops is not None
    return Gpu(name, int((memory or gib) * 2**30), flops, bandwidth * 1e12, link * 1e9)
