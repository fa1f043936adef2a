"""LoRA adapters on their way into vLLM, in the trainer's process or in a server: as bytes, then as files in memory.

A server takes them where it was started with this middleware, as `python -m rlkit.rollout.serve --enable-lora` does:

    vllm serve MODEL --enable-lora --max-lora-rank 32 --middleware rlkit.rollout.adapters.TakesAdapters

vLLM's own route reads a path of the server's machine, and then reads it again for every batch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

ROUTE = "/rlkit/adapter"
NAME = "policy"  # of the adapter; requests that name it as their model are answered with it
NUMBER = 1 << 20  # the same for vLLM, which counts those that a server was started with from 1 on
LANGUAGE = (".language_model.", ".text_model.", "lm_head")


def packed(config: Any, weights: Iterable[tuple[str, Tensor]]) -> bytes:
    """Adapters as one safetensors file, with their config in its header.

    Args:
        config: peft's, and
        weights: (name in peft's files, whole tensor); together what `engine.get_adapter()` returns.
    """
    from safetensors.torch import save

    tensors = {name: weight.detach().cpu().contiguous() for name, weight in weights}
    return save(tensors, {"config": json.dumps(config.to_dict(), default=list)})


@contextmanager
def unpacked(file: bytes) -> Iterator[tuple[str, list[str]]]:
    """A folder as peft writes it, in memory for as long as the context lasts, and the names of the tensors."""
    from safetensors import safe_open

    with TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        path = Path(folder) / "adapter_model.safetensors"
        path.write_bytes(file)
        with safe_open(path, "pt") as opened:
            config, names = opened.metadata()["config"], list(opened.keys())
        (Path(folder) / "adapter_config.json").write_text(config)
        yield folder, names


def request(path: str, *, load: bool = False) -> Any:
    """vLLM's word for the adapter: the one that it has, or one to be read from a folder."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(NAME, NUMBER, path, load_inplace=load)


def check_adapters(vllm_config: Any, names: Iterable[str], replaced: bool) -> None:
    """Raise a ValueError unless vLLM samples with all of these adapters, on the weights that they were trained on.

    Args:
        vllm_config: of the engine.
        names: of the adapters' tensors.
        replaced: whether the engine has been given other weights than those that it loaded.
    """
    model, lora = vllm_config.model_config, vllm_config.lora_config
    if model.is_moe and vllm_config.device_config.device_type == "cpu":
        raise ValueError("vllm: a model with experts takes no adapters on a CPU; update_weights sends them merged")
    if lora is None:
        raise ValueError("vllm: adapters need an engine made with enable_lora=True and max_lora_rank=...")
    if replaced:
        raise ValueError("vllm: adapters go onto the weights that were loaded, and update_weights has replaced them")
    if model.is_multimodal_model and not lora.enable_tower_connector_lora:
        for name in names:
            if not any(part in name for part in LANGUAGE):
                raise ValueError(
                    f"vllm: {name}: only with enable_tower_connector_lora=True are adapters outside of the language "
                    "model used; or train none there, with exclude_modules"
                )


class TakesAdapters:
    """Middleware (ASGI) of a vLLM server: POST /rlkit/adapter takes what `packed` made, in the place of the last one.

    Nothing is unpickled. All workers have to be on this machine, for its memory is where they read from.
    """

    def __init__(self, app: Any) -> None:
        self.app, self.replaced = app, False

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        self.replaced = self.replaced or path == "/update_weights"
        if path != ROUTE:
            return await self.app(scope, receive, send)
        from starlette.requests import Request
        from starlette.responses import JSONResponse

        try:
            await self._take(scope["app"].state, await Request(scope, receive).body())
            response = JSONResponse({"success": True})
        except Exception as error:  # the sender is told, whatever vLLM says
            response = JSONResponse({"error": str(error)}, 400)
        await response(scope, receive, send)

    async def _take(self, state: Any, file: bytes) -> None:
        engine = state.engine_client
        with unpacked(file) as (folder, names):
            check_adapters(engine.vllm_config, names, self.replaced)
            await engine.add_lora(request(folder, load=True))
        state.openai_serving_models.lora_requests[NAME] = request("in memory")  # which is not read any more
