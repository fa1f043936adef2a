"""Memory, speed and bandwidth of known GPUs, by name."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlkit.runs.vllm_options import RESERVED
from rlkit.tracking import peak_flops

USABLE = 1 - RESERVED  # share of a GPU's memory
NETWORK_BANDWIDTH = 50e9  # bytes per second and GPU, between machines; assumption: each has a 400 Gbit/s adapter


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        name: as on the command line.
        memory: bytes.
        flops: dense bfloat16 FLOP/s.
        memory_bandwidth: bytes per second.
        link_bandwidth: bytes per second to other GPUs of the same machine, in one direction.
        host_bandwidth: bytes per second to and from host memory, in one direction.
    """

    name: str
    memory: int
    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    host_bandwidth: float


PCIE_4, PCIE_5 = 32, 64  # GB/s of 16 lanes in one direction
# name -> (memory in GiB, memory bandwidth in TB/s, NVLink or PCIe bandwidth in GB/s in one direction, PCIe bandwidth to
# the host), from the data sheets. Memory is the usable part with ECC on, where that is known (79.1 GiB of "80 GB").
DATA_SHEETS = {
    "h100-80gb": (79.1, 3.35, 450, PCIE_5),
    "h200-141gb": (139.8, 4.8, 450, PCIE_5),
    "h20-96gb": (95.0, 4.0, 450, PCIE_5),
    "b200-180gb": (178.0, 7.7, 900, PCIE_5),
    "a100-80gb": (79.2, 2.04, 300, PCIE_4),
    "a100-40gb": (39.4, 1.56, 300, PCIE_4),
    "l40s-48gb": (44.4, 0.86, PCIE_4, PCIE_4),
    "l4-24gb": (22.0, 0.30, PCIE_4, PCIE_4),
    "rtx-4090-24gb": (23.5, 1.01, PCIE_4, PCIE_4),
}


def gpu_named(name: str, memory: float | None = None) -> Gpu:
    """A GPU by its name, e.g. "h100-80gb".

    Args:
        memory: GiB, in place of the data sheet's. With it a GPU may be unknown; its rates are then nan.

    Raises:
        ValueError: no such GPU, or no memory.
    """
    if memory is not None and memory <= 0:
        raise ValueError(f"gpu_memory: expected more than 0 GiB, got {memory:g}")
    if memory is not None and name not in DATA_SHEETS:
        return Gpu(name, int(memory * 2**30), math.nan, math.nan, math.nan, math.nan)
    if name not in DATA_SHEETS:
        raise ValueError(f"gpu: expected one of {', '.join(sorted(DATA_SHEETS))}; got {name!r}")
    gib, bandwidth, link, host = DATA_SHEETS[name]
    flops = peak_flops(name.rpartition("-")[0])
    assert flops is not None
    gib = gib if memory is None else memory
    return Gpu(name, int(gib * 2**30), flops, bandwidth * 1e12, link * 1e9, host * 1e9)
