"""The trainer's side of weight transfer: weights go to the servers through a process group, in buckets.

    group = GlooGroup(size=1 + workers)
    post(group.join_info(rank_offset=1))      # each server joins while ...
    group.connect()                           # ... the trainer, rank 0, waits for it
    send_weights(engine.get_per_tensor_param(), group, announce)

Only names, dtypes and shapes are sent by HTTP. The next bucket is gathered while one is sent, so rank 0 holds two
buckets, beside the one that its engine gathers.
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

from rlkit.rollout.background import in_daemon_thread

NamedTensor = tuple[str, Tensor]


class TransferGroup(Protocol):
    """A process group of the trainer (rank 0) and the servers' workers."""

    def join_info(self, rank_offset: int) -> dict[str, Any]:
        """The information that a server needs to join. Its workers get consecutive ranks from `rank_offset` on."""

    def connect(self) -> None:
        """Wait until all ranks have joined."""

    def broadcast(self, bucket: list[NamedTensor]) -> None:
        """Broadcast these tensors, in this order, from rank 0."""

    def close(self) -> None:
        """Leave the group."""


def buckets(weights: Iterable[NamedTensor], max_bytes: int) -> Iterator[list[NamedTensor]]:
    """Split tensors into lists of at most `max_bytes`. A larger tensor gets its own list."""
    bucket: list[NamedTensor] = []
    size = 0
    for name, weight in weights:
        if bucket and size + weight.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, weight.detach()))
        size += weight.nbytes
    if bucket:
        yield bucket


def describe(bucket: list[NamedTensor]) -> dict[str, list[Any]]:
    """Names, dtypes and shapes of a bucket, which the servers need before its tensors arrive."""
    return {
        "names": [name for name, _ in bucket],
        "dtype_names": [str(weight.dtype).removeprefix("torch.") for _, weight in bucket],
        "shapes": [list(weight.shape) for _, weight in bucket],
    }


def send_weights(
    weights: Iterable[NamedTensor],
    group: TransferGroup,
    announce: Callable[[dict[str, list[Any]]], Future[Any]],
    *,
    bucket_bytes: int = 256 << 20,
    timeout: float = 600.0,
) -> None:
    """Send every tensor to all servers of the group.

    Weights are gathered in the calling thread, in the order of all ranks, and sent in another one.

    Args:
        weights: (Hugging Face name, full tensor) of each weight. One bucket of them is gathered while the one before
            is sent.
        group: a connected group.
        announce: sends the description of the next bucket to all servers. Its future is done when they have loaded the
            bucket.
        bucket_bytes: size limit of a bucket.
        timeout: seconds for one bucket.

    Raises:
        RuntimeError: a server did not receive the weights. The group is closed and cannot be used again.
    """
    on_the_way: tuple[str, Future[Any], Future[Any]] | None = None
    for bucket in buckets(weights, bucket_bytes):
        if on_the_way:
            _wait_until_loaded(*on_the_way, group, timeout)
        on_the_way = bucket[0][0], announce(describe(bucket)), in_daemon_thread(group.broadcast, bucket)
        del bucket  # or it stays in memory until the next one is gathered, even if it has been sent before
    if on_the_way:
        _wait_until_loaded(*on_the_way, group, timeout)


def _wait_until_loaded(name: str, loaded: Future[Any], sent: Future[Any], group: TransferGroup, timeout: float) -> None:
    """Wait until the bucket that begins with this weight is sent and loaded; otherwise close the group and raise."""
    done, pending = wait((loaded, sent), timeout, FIRST_EXCEPTION)
    error = next((future.exception() for future in (loaded, sent) if future in done and future.exception()), None)
    if error or pending:
        loaded.cancel()
        group.close()
        problem = error or f"nothing within {timeout:g} s"
        raise RuntimeError(f"weights from {name} on: expected all servers to load them, got {problem}") from error


def local_address(host: str) -> str:
    """The local address from which this machine reaches `host`. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]


def listening_store(size: int, address: str, timeout: float) -> tuple[dist.TCPStore, int]:
    """A TCPStore for the rendezvous of `size` ranks, and its port. It listens on one address only."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    limit, fd = timedelta(seconds=timeout), listener.detach()
    return dist.TCPStore(address, port, size, True, limit, wait_for_workers=False, master_listen_fd=fd), port


def gloo_group(store: dist.Store, rank: int, size: int, address: str, timeout: float) -> Any:
    """A gloo process group, separate from the default one and bound to one address. All ranks call this together."""
    gloo: Any = dist.ProcessGroupGloo  # its type hints are incomplete
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=timeout)
    return gloo(store, rank, size, options)


class GlooGroup:
    """For servers without a GPU. `rlkit.rollout.gloo_transfer` is the server's side.

    Args:
        size: number of ranks, including the trainer.
        address: address under which the servers reach this machine; the only address that is listened on.
        timeout: seconds for joining, and for one tensor. If a rank dies, the others wait this long.
    """

    def __init__(self, size: int, address: str = "127.0.0.1", timeout: float = 60.0) -> None:
        self.size, self.address, self.timeout = size, address, timeout
        self.store, self.port = listening_store(size, address, timeout)
        self.group: Any = None

    def join_info(self, rank_offset: int) -> dict[str, Any]:
        return {
            "host": self.address,
            "port": self.port,
            "rank_offset": rank_offset,
            "world_size": self.size,
            "timeout": self.timeout,
        }

    def connect(self) -> None:
        self.group = gloo_group(self.store, 0, self.size, self.address, self.timeout)

    def broadcast(self, bucket: list[NamedTensor]) -> None:
        if self.group is None:
            raise RuntimeError("broadcast: expected connect() before it, got none")
        for _, weight in bucket:
            self.group.broadcast(weight.cpu().contiguous().view(-1).view(torch.uint8), 0).wait()

    def close(self) -> None:
        """Do nothing: gloo cannot cancel a broadcast. A pending one ends with its timeout."""


class NcclGroup:
    """For servers with GPUs: vLLM's packed, double-buffered transfer. The trainer's environment needs vLLM.

    `join_info` contains the NCCL unique id. vLLM's usual rendezvous would send it pickled through a store.
    """

    def __init__(self, size: int, address: str = "", timeout: float = 300.0) -> None:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        # the current device belongs to a thread, and `connect` runs in another one
        self.size, self.device = size, torch.cuda.current_device()
        self.id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        self.group: Any = None

    def join_info(self, rank_offset: int) -> dict[str, Any]:
        from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload

        return worker_init_payload(
            NCCLWeightTransferInitInfo(
                rank_offset=rank_offset,
                world_size=self.size,
                nccl_unique_id_b64=base64.b64encode(self.id).decode(),
                packed=True,
            )
        )

    def connect(self) -> None:
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        self.group = uid_init_process_group(self.id, 0, self.size, self.device)

    def broadcast(self, bucket: list[NamedTensor]) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        device = self.group.device
        torch.cuda.synchronize(device)  # the bucket was filled on another stream than the packing streams
        with torch.cuda.device(device):  # the current device of this thread
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
