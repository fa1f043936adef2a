"""Sampling with SGLang servers, through their native HTTP API.

    SGLANG_VLM_CACHE_SIZE_MB=0 python -m sglang.launch_server --model-path Qwen/Qwen2.5-VL-7B-Instruct --port 30000

    rollout = make_rollout("sglang", model="Qwen/Qwen2.5-VL-7B-Instruct", processor=processor,
                           urls="http://127.0.0.1:30000")

**Tested against a stand-in server that implements this API, not yet against SGLang itself**, which needs a GPU. The
module follows the source code of SGLang 0.5.23 and its documentation of `/generate`
(https://docs.sglang.io/basic_usage/sampling_params.html) and of weights, pausing and memory
(https://docs.sglang.io/advanced_features/sglang_for_rl.html).

Differences from vLLM servers:

- Requests have no seed, so samples are not reproducible.
- No route empties the cache of encoded images. Each image therefore gets a new cache key after each weight update. But
  a request in flight during an update keeps the encoding of the old weights. If the vision tower is trained, switch the
  cache off, as in the command above.
- Servers can sleep if they were started with `--enable-memory-saver`, and return routed experts if they were started
  with `--enable-return-routed-experts`.
- A server holds one copy of the model. Tensor parallelism works; data and pipeline parallelism do not.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from hashlib import sha256
from pathlib import PurePath
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from rlkit.data.samples import Sample
from rlkit.rollout.inference_requests import SUPPRESSED_LOGIT_BIAS, check_prompt_expansion
from rlkit.rollout.sampling import Sampling, with_routed_experts
from rlkit.rollout.servers.media import Part
from rlkit.rollout.servers.pool import RequestRejected, Server, ServerUnavailable
from rlkit.rollout.servers.rollout import Job, ServerRollout, version_number
from rlkit.rollout.servers.weight_transfer import NamedTensor, gloo_group, listening_store
from rlkit.rollout.vllm_families import check_windows_work

GROUP_NAME = "rlkit"
TEST_SCALE = 1e4  # temperature and logit bias of the request that checks logprobs
FULL_DISTRIBUTION = {  # explicit, because a server may have other defaults
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "min_new_tokens": 0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}


class SglangGroup:
    """The process group that `/init_weights_update_group` joins: one of torch, with a store in the trainer.

    Args:
        size: number of ranks, including the trainer.
        address: address under which the servers reach this machine.
        backend: "nccl" or "gloo".
        timeout: seconds for joining, and with gloo for one tensor.
    """

    def __init__(self, size: int, address: str = "127.0.0.1", *, backend: str, timeout: float = 60.0) -> None:
        self.size, self.address, self.backend, self.timeout = size, address, backend, timeout
        self.device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", torch.cuda.current_device())
        self.store, self.port = listening_store(size, address, timeout)
        self.group: Any = None

    def join_info(self, rank_offset: int) -> dict[str, Any]:
        return {
            "master_address": self.address,
            "master_port": self.port,
            "rank_offset": rank_offset,
            "world_size": self.size,
            "group_name": GROUP_NAME,
            "backend": self.backend,
        }

    def connect(self) -> None:
        store = group_store(self.store, self.device.type)
        if self.backend == "gloo":
            self.group = gloo_group(store, 0, self.size, self.address, self.timeout)
        else:
            torch.cuda.set_device(self.device)  # for this thread
            nccl: Any = dist.ProcessGroupNCCL  # its type hints are incomplete
            self.group = nccl(store, 0, self.size, timedelta(seconds=self.timeout))

    def broadcast(self, bucket: list[NamedTensor]) -> None:
        if self.backend == "nccl":
            torch.cuda.set_device(self.device)
            torch.cuda.synchronize(self.device)  # the bucket was filled on another stream
        for _, weight in bucket:
            self.group.broadcast(weight.to(self.device).contiguous(), 0).wait()
        if self.backend == "nccl":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        if self.group is not None and self.backend == "nccl":
            self.group.abort()


def group_store(store: dist.Store, device: str) -> dist.Store:
    """The store with the key prefixes that torch uses for a group made by SGLang: the name twice, then the device."""
    return dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{GROUP_NAME}/", dist.PrefixStore(GROUP_NAME, store)))


class SglangRollout(ServerRollout):
    """Samples with SGLang servers that receive the trainer's weights. For the arguments see `ServerRollout`."""

    transfer_groups = {
        "nccl": lambda size, address: SglangGroup(size, address, backend="nccl"),
        "gloo": lambda size, address: SglangGroup(size, address, backend="gloo"),
    }
    join_path = "/init_weights_update_group"
    health_path = "/model_info"  # /health samples a token, which a paused or sleeping server cannot do
    version_path = "/model_info"
    start_hint = "Start servers with: python -m sglang.launch_server --model-path MODEL --port PORT"

    def _request_body(self, request: Sample, sampling: Sampling, start: int, count: int) -> dict[str, Any]:
        params = {
            "n": count,
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "logit_bias": {str(token): SUPPRESSED_LOGIT_BIAS for token in self.suppressed_token_ids},
            "stop_token_ids": [*self.end_token_ids, *sampling.stop],
            "ignore_eos": False,  # True would ignore `stop_token_ids` as well
            "no_stop_trim": True,  # the response includes its end token
            "skip_special_tokens": False,
            **FULL_DISTRIBUTION,
        }
        return {
            "input_ids": [request.compact_ids],  # a batch of one: SGLang takes a flat list of images as one per prompt
            "sampling_params": params,
            "return_logprob": True,
            "return_prompt_token_ids": True,
            "stream": False,
        }

    def _media_body(self, parts: Sequence[Part]) -> dict[str, Any]:
        urls = [part["url"] for part in parts]
        # new cache keys after each update, because no route empties the cache of encoded images
        keys = [sha256(f"{self.version} {url}".encode()).hexdigest()[:16] for url in urls]
        return {"image_data": [urls], "mm_hashes": [keys]}

    async def _request_samples(self, server: Server, job: Job) -> list[Sample]:
        oldest = self.version
        job = replace(job, body={**job.body, "return_routed_experts": server.returns_routed_experts})
        responses = await self._post_job(server, "/generate", job)
        if len(responses) != job.count:
            raise RuntimeError(f"{server.url}: expected {job.count} samples, got {len(responses)}")
        samples = []
        for i, response in enumerate(responses):
            check_prompt_expansion(job.request, response["prompt_token_ids"])
            info = response["meta_info"]
            logprobs, token_ids = zip(*((entry[0], entry[1]) for entry in info["output_token_logprobs"]), strict=True)
            sample = self._make_sample(
                server,
                job,
                i,
                oldest,
                token_ids=list(token_ids),
                logprobs=list(logprobs),
                finish_reason=info["finish_reason"]["type"],
                versions=[
                    version_number(span["version"])
                    for span in info["weight_versions"]
                    for _ in range(span["start"], span["end"])
                ],
            )
            if encoded := info.get("routed_experts"):  # [all tokens but the last, layers, K]
                experts = np.frombuffer(base64.b64decode(encoded), dtype=np.int32)
                layers = self.config.get_text_config().num_hidden_layers
                experts = experts.reshape(len(sample.token_ids) - 1, layers, -1).astype("int16")
                sample = with_routed_experts(sample, torch.from_numpy(experts))
            samples.append(sample)
        return samples

    async def _join_group(self, servers: Sequence[Server], group: Any) -> None:
        for server in servers:  # a failed update or an earlier trainer may have left a group of this name
            await self._abort_update(server)
        await super()._join_group(servers, group)

    def _begin_update(self) -> None:
        self._post_all("/pause_generation", {"mode": "retract"})

    async def _announce_bucket(self, description: dict[str, list[Any]]) -> None:
        body = {"names": description["names"], "dtypes": description["dtype_names"], "shapes": description["shapes"]}
        await self.pool.request_all(
            self.receivers,
            "POST",
            "/update_weights_from_distributed",
            {**body, "group_name": GROUP_NAME, "flush_cache": False},
        )

    def _finish_update(self) -> None:
        if self.asleep:
            self._post_all("/resume_memory_occupation", {"tags": ["kv_cache"]})
        self._post_all("/flush_cache?timeout=60")
        self._post_all("/update_weight_version", {"new_version": str(self.sent_version), "abort_all_requests": False})
        self._post_all("/continue_generation", {})

    async def _abort_update(self, server: Server) -> None:
        body = {"group_name": GROUP_NAME}
        try:
            await self.pool.request(server, "POST", "/destroy_weights_update_group", body, timeout=30)
        except (ServerUnavailable, RequestRejected):
            pass  # there is no such group, or the server is gone and the next update will exclude it

    def sleep(self) -> None:
        """Free the GPU memory of weights and KV cache, on servers that were started with `--enable-memory-saver`."""
        if not self.asleep:
            self._post_from_rank_0("/release_memory_occupation", {"tags": ["weights", "kv_cache"]})
            self.asleep = True

    def wake_up(self) -> None:
        """Allocate memory for the weights. `update_weights` then fills it and allocates the KV cache."""
        if self.asleep:
            self._post_from_rank_0("/resume_memory_occupation", {"tags": ["weights"]})

    async def _handshake(self, server: Server) -> tuple[int, int]:
        request = self.pool.request
        try:
            model = await request(server, "GET", "/model_info")
            info = await request(server, "GET", "/server_info")
            weight_version = version_number(model["weight_version"])
            server.workers, copies = info["tp_size"], info["dp_size"] * info["pp_size"]
            server.dtype = compute_dtype(info.get("dtype"), self.config)
            server.returns_routed_experts = info.get("enable_return_routed_experts", False)
            await request(server, "POST", "/continue_generation", {})  # a stopped trainer may have left it paused
        except (ServerUnavailable, RequestRejected, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{server.url}: expected an SGLang server for training, got {error!r}. {self.start_hint}"
            ) from error
        if copies != 1:
            raise ValueError(
                f"{server.url}: expected dp_size 1 and pp_size 1, got {info['dp_size']} and {info['pp_size']}: SGLang "
                "sends new weights to no others"
            )
        if PurePath(model["model_path"]).name != PurePath(self.model).name:
            raise ValueError(f"{server.url}: expected the model {self.model!r}, got {model['model_path']!r}")
        await self._check_logprobs(server)
        max_model_len = info.get("context_length") or self.config.get_text_config().max_position_embeddings
        check_windows_work(self.config, max_model_len, "SGLang")
        return cast(int, max_model_len), weight_version

    async def _check_logprobs(self, server: Server) -> None:
        """Check that logprobs are those of the sampling distribution, after temperature and logit bias.

        Temperature and the bias of one token are both huge. Divided by the temperature, the bias is 1, so all logprobs
        are moderate. Without the division, this token would have logprob 0, and all others less than -50.
        """
        params = {
            **FULL_DISTRIBUTION,
            "max_new_tokens": 1,
            "temperature": TEST_SCALE,
            "logit_bias": {str(self.end_token_ids[0]): TEST_SCALE},
        }
        body = {"input_ids": self.end_token_ids[:1], "sampling_params": params, "return_logprob": True}
        response = await self._sample_one_token(server, "/generate", body)
        if "weight_versions" not in response["meta_info"]:
            raise ValueError(f"{server.url}: expected SGLang >=0.5.23, got one that returns no weight_versions")
        if not -50 < response["meta_info"]["output_token_logprobs"][0][0] < -0.1:
            raise ValueError(
                f"{server.url}: expected logprobs of the sampled distribution, got those of the raw logits; start it "
                f"without SGLANG_RETURN_ORIGINAL_LOGPROB. {self.start_hint}"
            )


def compute_dtype(option: str | None, config: Any) -> str | None:
    """Name of the dtype that a server computes in, from its option `dtype`; None if it is not known.

    With "auto" it is that of the model's config, unless that is float32, which SGLang replaces.
    """
    if option == "auto":
        dtype = config.get_text_config().dtype
        return str(dtype).removeprefix("torch.") if dtype in (torch.bfloat16, torch.float16) else None
    return {"half": "float16", "float": "float32"}.get(option or "", option)
