"""A vLLM plug-in: the server's side of weight transfer over gloo, for servers without a GPU.

vLLM finds it through the entry point `vllm.general_plugins` of an installed rlkit. A server uses it if it was started
with `--weight-transfer-config '{"backend": "rlkit_gloo"}'`, as `rlkit.rollout.serve` does. The trainer's side is
`rlkit.rollout.servers.weight_transfer`. Only numbers and tensors are received; nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rlkit.rollout import media_connector
from rlkit.rollout.servers.weight_transfer import gloo_group, local_address
from rlkit.rollout.vllm_cpu import repack_weights
from rlkit.rollout.vllm_families import register_models


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Address of the trainer, and which ranks of its process group belong to this server."""

    host: str
    port: int
    rank_offset: int
    world_size: int
    timeout: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """The tensors of the next bucket, in the order in which they are sent."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives weights under their Hugging Face names, and loads them layer by layer."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    group: Any = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        host, size, timeout = init_info.host, init_info.world_size, init_info.timeout
        store = dist.TCPStore(host, init_info.port, size, False, timedelta(seconds=timeout), wait_for_workers=False)
        self.group = gloo_group(store, rank, size, local_address(host), timeout)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        if self.group is None:
            raise RuntimeError("receive_weights: expected init_transfer_engine before it, got none")
        model: Any = self.model
        model.load_weights(self._receive(update_info))

    def _receive(self, info: GlooUpdateInfo) -> Iterator[tuple[str, Tensor]]:
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast(weight.view(-1).view(torch.uint8), 0).wait()
            yield name, weight

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if next(self.model.parameters()).is_cpu:
            repack_weights(self.model)

    def shutdown(self) -> None:
        self.group = None


def register() -> None:
    """Register rlkit's extensions with vLLM, which calls this in each of its processes.

    These are the weight transfer `rlkit_gloo`, the media connector, and rlkit's models.
    """
    media_connector.register()
    register_models()
    with suppress(ValueError):  # it is registered already: vLLM may load its plug-ins twice
        WeightTransferEngineFactory.register_engine("rlkit_gloo", GlooWeightTransferEngine)
