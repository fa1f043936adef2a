"""The dtype in which servers want weights, so that a trainer casts them before it gathers and sends them.

Servers started by `rlkit.rollout.serve` have `WeightDtypeMiddleware`. Other vLLM servers lack the route. They are sent
weights in the trainer's dtype, unless the option `weight_dtype` of the rollout says another. A server casts what it
receives anyway.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

import torch

WEIGHT_DTYPE_ROUTE = "/rlkit/weight_dtype"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def dtype_by_name(name: str) -> torch.dtype:
    """A dtype that weights can be sent in.

    Raises:
        ValueError: another name.
    """
    if name not in DTYPES:
        raise ValueError(f"weight_dtype: expected one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def common_dtype(names: Iterable[str | None]) -> torch.dtype | None:
    """The dtype that loses nothing for servers that compute in these dtypes; None if one of them is not known."""
    dtypes = [DTYPES.get(name or "") for name in names]
    stated = [dtype for dtype in dtypes if dtype is not None]
    return reduce(torch.promote_types, stated) if dtypes and len(stated) == len(dtypes) else None


class WeightDtypeMiddleware:
    """ASGI middleware of a vLLM server: GET /rlkit/weight_dtype returns the dtype and the device that it computes in,
    the most samples that it takes in one request, and whether vLLM's runner V2 computes.

    vLLM's own /server_info contains them, too, but first runs commands that list all packages and devices.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope.get("path", "") != WEIGHT_DTYPE_ROUTE or scope["type"] != "http":
            return await self.app(scope, receive, send)
        from starlette.responses import JSONResponse

        config = scope["app"].state.vllm_config
        dtype, device = str(config.model_config.dtype).removeprefix("torch."), config.device_config.device_type
        settings = {
            "dtype": dtype,
            "device": device,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "v2_model_runner": config.use_v2_model_runner,
        }
        await JSONResponse(settings)(scope, receive, send)
