"""The trainer's side of sending weights to servers: through a process group, in buckets, never through a disk.

    group = GlooGroup(size=1 + workers)
    tell(group.invitation(rank_offset=1))     # each server joins while ...
    group.open()                              # ... the trainer, rank 0, waits for it
    send_weights(engine.get_per_tensor_param(), group, announce)

Only names, types and shapes travel by HTTP. What is gathered and not yet sent is one bucket, never the whole model.
"""

from __future__ import annotations

import base64
import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlkit.rollout.threads import in_thread

Named = tuple[str, Tensor]


class Group(Protocol):
    """A process group of the trainer (rank 0) and the servers' workers."""

    def invitation(self, rank_offset: int) -> dict[str, Any]:
        """What a server is told in order to join; its workers have the ranks from `rank_offset` on."""

    def open(self) -> None:
        """Wait until all have joined."""

    def broadcast(self, bucket: list[Named]) -> None:
        """Send these tensors, in this order."""

    def close(self) -> None:
        """Leave."""


def buckets(weights: Iterable[Named], most_bytes: int) -> Iterator[list[Named]]:
    """Tensors in their order, together at most `most_bytes` large; one that is larger goes alone."""
    bucket: list[Named] = []
    size = 0
    for name, weight in weights:
        if bucket and size + weight.nbytes > most_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, weight.detach()))
        size += weight.nbytes
    if bucket:
        yield bucket


def description(bucket: list[Named]) -> dict[str, list[Any]]:
    """What the servers need to know before the tensors come."""
    return {
        "names": [name for name, _ in bucket],
        "dtype_names": [str(weight.dtype).removeprefix("torch.") for _, weight in bucket],
        "shapes": [list(weight.shape) for _, weight in bucket],
    }


def send_weights(
    weights: Iterable[Named],
    group: Group,
    announce: Callable[[dict[str, list[Any]]], Future[Any]],
    *,
    bucket_bytes: int = 256 << 20,
    timeout: float = 600.0,
) -> int:
    """Send every tensor to all servers of the group.

    Args:
        weights: (Hugging Face name, whole tensor); gathered one bucket at a time, in the calling thread.
        announce: tells all servers what comes next; its future is done when they have loaded it.
        timeout: seconds for one bucket.

    Returns:
        Bytes that were sent to each server.

    Raises:
        RuntimeError: a server did not take its weights. The group is closed then, and cannot be used again.
    """
    total = 0
    for bucket in buckets(weights, bucket_bytes):
        told = announce(description(bucket))
        sent = in_thread(group.broadcast, bucket)
        done, waiting = wait((told, sent), timeout, FIRST_EXCEPTION)
        error = next((future.exception() for future in (told, sent) if future in done and future.exception()), None)
        if error or waiting:
            told.cancel()
            group.close()
            said = error or f"not taken within {timeout:g} s"
            raise RuntimeError(f"weights from {bucket[0][0]} on did not arrive: {said}") from error
        total += sum(weight.nbytes for _, weight in bucket)
    return total


def local_address(host: str) -> str:
    """The address of this machine that another one, or this one, reaches it by; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]


def listening_store(size: int, address: str, timeout: float) -> tuple[dist.TCPStore, int]:
    """A store that `size` ranks meet at, and its port; it listens on one address alone."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    limit, fd = timedelta(seconds=timeout), listener.detach()
    return dist.TCPStore(address, port, size, True, limit, wait_for_workers=False, master_listen_fd=fd), port


def gloo_group(store: dist.Store, rank: int, size: int, address: str, timeout: float) -> Any:
    """A gloo group beside the default one, bound to one address; all ranks call this together."""
    gloo: Any = dist.ProcessGroupGloo  # its type hints are incomplete
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=timeout)
    return gloo(store, rank, size, options)


class GlooGroup:
    """For servers without a GPU; `rlkit.rollout.gloo_transfer` is their side.

    Args:
        size: ranks, the trainer's included.
        address: of this machine, as the servers reach it; nothing listens elsewhere.
        timeout: seconds for joining, and for one tensor; so long do those wait that another server let down.
    """

    def __init__(self, size: int, address: str = "127.0.0.1", timeout: float = 60.0) -> None:
        self.size, self.address, self.timeout = size, address, timeout
        self.store, self.port = listening_store(size, address, timeout)
        self.group: Any = None

    def invitation(self, rank_offset: int) -> dict[str, Any]:
        return {
            "host": self.address,
            "port": self.port,
            "rank_offset": rank_offset,
            "world_size": self.size,
            "timeout": self.timeout,
        }

    def open(self) -> None:
        self.group = gloo_group(self.store, 0, self.size, self.address, self.timeout)

    def broadcast(self, bucket: list[Named]) -> None:
        if self.group is None:
            raise RuntimeError("broadcast before open()")
        for _, weight in bucket:
            self.group.broadcast(weight.cpu().contiguous().view(-1).view(torch.uint8), 0).wait()

    def close(self) -> None:
        """Nothing: what waits in it ends with its timeout, gloo has no way to call it off; the rest with the object."""


class NcclGroup:
    """For servers with GPUs: vLLM's own transfer, packed and double-buffered; vLLM is needed beside the trainer.

    The group's id travels in the invitation. vLLM's usual rendezvous would send it pickled through a store.
    """

    def __init__(self, size: int, address: str = "", timeout: float = 300.0) -> None:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        self.size, self.device = size, torch.cuda.current_device()  # which is a thread's own: `open` has another
        self.id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        self.group: Any = None

    def invitation(self, rank_offset: int) -> dict[str, Any]:
        from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload

        return worker_init_payload(
            NCCLWeightTransferInitInfo(
                rank_offset=rank_offset,
                world_size=self.size,
                nccl_unique_id_b64=base64.b64encode(self.id).decode(),
                packed=True,
            )
        )

    def open(self) -> None:
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        self.group = uid_init_process_group(self.id, 0, self.size, self.device)

    def broadcast(self, bucket: list[Named]) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        device = self.group.device
        torch.cuda.synchronize(device)  # the bucket was filled on another stream than those that pack it
        with torch.cuda.device(device):  # of this thread
            packed_nccl_broadcast_producer(
                iterator=iter([(name, weight.to(device)) for name, weight in bucket]),
                group=self.group,
                src=0,
                post_iter_func=lambda named: named[1],
            )

    def close(self) -> None:
        if self.group is not None:
            self.group.destroy()
        self.group = None
