"""Bytes that each GPU receives in collectives: from other GPUs of its machine, and over the network.

A group of n ranks has k of them on each of n / k = m machines. All groups of a kind communicate at once.

    collective                                     from the machine     over the network
    all-gather or reduce-scatter of S bytes        S (1 - 1 / k)        S (1 - 1 / m) / k
    all-reduce of S bytes                          2 S (1 - 1 / k)      2 S (1 - 1 / m) / k
    all-to-all, each rank receives S bytes in all  S (k - 1) / n        S (n - k) / n

A machine lacks S (1 - 1 / m) bytes before an all-gather. Its k GPUs fetch a k-th of them each, through their own
adapters, and then gather these parts from each other. On one machine (k = n) this is the factor (n - 1) / n of
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, and an all-reduce is a reduce-scatter and an
all-gather, as there. Switches that add up or multiply data (NVLink SHARP) are not assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Group(NamedTuple):
    """Ranks that communicate with each other.

    Attributes:
        size: number of ranks.
        per_machine: how many of them are on the same machine.
    """

    size: int
    per_machine: int


def group(size: int, stride: int, gpus_per_node: int) -> Group:
    """The group of `size` ranks r, r + stride, r + 2 stride, ...; `gpus_per_node` consecutive ranks are a machine.

    If its last machine has fewer of them than the others, e.g. 4 of 12 ranks on machines of 8, the bytes are those of a
    rank on a full machine. Ranks of the last one receive more over the network, so the plan underestimates.
    """
    return Group(size, min(size, max(1, gpus_per_node // stride)))


@dataclass(frozen=True)
class LinkBytes:
    """Bytes that a GPU receives.

    Attributes:
        machine: from other GPUs of its machine.
        network: from other machines.
    """

    machine: float = 0.0
    network: float = 0.0

    def __add__(self, other: LinkBytes) -> LinkBytes:
        return LinkBytes(self.machine + other.machine, self.network + other.network)

    def __rmul__(self, factor: float) -> LinkBytes:
        return LinkBytes(factor * self.machine, factor * self.network)


def all_gather(size: float, ranks: Group) -> LinkBytes:
    """An all-gather of a tensor of `size` bytes that the ranks share."""
    machines = ranks.size / ranks.per_machine
    return LinkBytes(size * (1 - 1 / ranks.per_machine), size * (1 - 1 / machines) / ranks.per_machine)


def reduce_scatter(size: float, ranks: Group) -> LinkBytes:
    """The sum of tensors of `size` bytes, of which each rank keeps its part."""
    return all_gather(size, ranks)


def all_reduce(size: float, ranks: Group) -> LinkBytes:
    """The sum of tensors of `size` bytes, which every rank keeps."""
    return reduce_scatter(size, ranks) + all_gather(size, ranks)


def all_to_all(size: float, ranks: Group) -> LinkBytes:
    """Each rank sends `size` bytes, equally many to every rank, itself included."""
    n, k = ranks
    return LinkBytes(size * (k - 1) / n, size * (n - k) / n)


def send(size: float, ranks: Group) -> LinkBytes:
    """Each rank sends `size` bytes to the next one of its group; at the border of a machine over the network."""
    if ranks.size == 1:
        return LinkBytes()
    return LinkBytes(machine=size) if ranks.per_machine == ranks.size else LinkBytes(network=size)
