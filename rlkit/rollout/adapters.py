"""LoRA adapters for vLLM, in the trainer's process or on a server: sent as bytes, loaded from files in memory.

A server takes them if it was started with this middleware, as `python -m rlkit.rollout.serve --enable-lora` does:

    vllm serve MODEL --enable-lora --max-lora-rank 32 --middleware rlkit.rollout.adapters.AdapterMiddleware

vLLM's own route takes a path on the server's machine, and reads the files again for every batch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

ADAPTER_ROUTE = "/rlkit/adapter"
ADAPTER_CHECK_ROUTE = "/rlkit/adapter/check"
ADAPTER_NAME = "policy"  # a request that names it as its model is generated with the adapter
ADAPTER_ID = 1 << 20  # its integer id in vLLM, which numbers the adapters that a server was started with from 1 on
LANGUAGE_MODEL_PARTS = (".language_model.", ".text_model.", "lm_head")
EXPERTS_IN_ONE_TENSOR = r"\.experts\.(base_layer\.)?lora_"  # peft's names of adapters of all experts of a layer


def serialize_adapter(config: Any, weights: Iterable[tuple[str, Tensor]]) -> bytes:
    """An adapter as the content of one safetensors file, with peft's config in its header.

    Args:
        config: peft's config, and
        weights: (name in peft's files, full tensor); `engine.get_adapter()` returns both.
    """
    from safetensors.torch import save

    tensors = {name: weight.detach().cpu().contiguous() for name, weight in weights}
    return save(tensors, {"config": json.dumps(config.to_dict(), default=list)})


@contextmanager
def adapter_folder(file: bytes) -> Iterator[tuple[str, list[str], int]]:
    """A temporary folder in memory as peft would write it, the names of the adapter's tensors, and its rank."""
    from safetensors import safe_open

    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with TemporaryDirectory(prefix=f"adapter-{os.getpid()}-", dir=memory) as folder:
        path = Path(folder) / "adapter_model.safetensors"
        path.write_bytes(file)
        with safe_open(path, "pt") as opened:
            config, names = opened.metadata()["config"], list(opened.keys())
        (Path(folder) / "adapter_config.json").write_text(config)
        yield folder, names, json.loads(config)["r"]


def lora_request(path: str, *, load: bool = False) -> Any:
    """vLLM's handle of the adapter.

    Args:
        path: of its folder; not read unless `load`.
        load: read the adapter from the folder, in place of the one that vLLM has.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest(ADAPTER_NAME, ADAPTER_ID, path, load_inplace=load)


def check_adapter(vllm_config: Any, names: Iterable[str], rank: int, weights_replaced: bool) -> None:
    """Raise a ValueError unless vLLM can sample with the whole adapter, on the weights that it was trained on.

    Args:
        vllm_config: of the vLLM engine.
        names: of the adapter's tensors.
        rank: of the adapter.
        weights_replaced: whether the engine has received other weights than those it loaded.
    """
    model, lora = vllm_config.model_config, vllm_config.lora_config
    if model.is_moe and vllm_config.device_config.device_type == "cpu":
        raise ValueError(
            "update_adapter: expected a model without experts, as vLLM runs their adapters on GPUs only, got one with "
            "experts on a CPU: update_weights sends adapters merged"
        )
    if lora is None:
        raise ValueError("update_adapter: expected an engine made with enable_lora=True and max_lora_rank, got none")
    if rank > lora.max_lora_rank:
        raise ValueError(
            f"update_adapter: expected an adapter of at most rank {lora.max_lora_rank} (max_lora_rank), got {rank}"
        )
    if weights_replaced:
        raise ValueError(
            "update_adapter: expected the base weights that vLLM loaded, got those of a previous update_weights"
        )
    only_language_model = model.is_multimodal_model and not lora.enable_tower_connector_lora
    for name in names:
        if re.search(EXPERTS_IN_ONE_TENSOR, name):
            raise ValueError(
                f"update_adapter: expected adapters of linear layers, got {name}, of experts in one tensor, for "
                "which vLLM's layout depends on the family: train none there (exclude_modules), or use "
                "update_weights, which sends adapters merged"
            )
        if only_language_model and not any(part in name for part in LANGUAGE_MODEL_PARTS):
            raise ValueError(
                f"update_adapter: expected adapters of the language model only, got {name}: make the engine with "
                "enable_tower_connector_lora=True, or train none there (adapt_towers=False, exclude_modules)"
            )


class AdapterMiddleware:
    """ASGI middleware of a vLLM server: POST /rlkit/adapter takes a file of `serialize_adapter`.

    An adapter replaces the one before. Nothing is unpickled. All workers have to run on this machine, because they load
    the adapter from its memory. POST /rlkit/adapter/check says whether the server could take an adapter with these
    names and this rank.
    """

    def __init__(self, app: Any) -> None:
        self.app, self.weights_replaced = app, False

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        self.weights_replaced = self.weights_replaced or path == "/update_weights"
        if path not in (ADAPTER_ROUTE, ADAPTER_CHECK_ROUTE):
            return await self.app(scope, receive, send)
        from starlette.requests import Request
        from starlette.responses import JSONResponse

        state, request = scope["app"].state, Request(scope, receive)
        try:
            if path == ADAPTER_CHECK_ROUTE:
                check_adapter(
                    state.engine_client.vllm_config, **await request.json(), weights_replaced=self.weights_replaced
                )
            else:
                await self._load(state, await request.body())
            response = JSONResponse({"success": True})
        except Exception as error:  # whatever vLLM raises is reported to the sender
            response = JSONResponse({"error": str(error)}, 400)
        await response(scope, receive, send)

    async def _load(self, state: Any, file: bytes) -> None:
        engine = state.engine_client
        with adapter_folder(file) as (folder, names, rank):
            check_adapter(engine.vllm_config, names, rank, self.weights_replaced)
            await engine.add_lora(lora_request(folder, load=True))
        state.openai_serving_models.lora_requests[ADAPTER_NAME] = lora_request("in memory")  # the path is not read
