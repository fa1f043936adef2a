"""Sampling with SGLang servers, by their native protocol, behind the contract of the other samplers.

    SGLANG_VLM_CACHE_SIZE_MB=0 python -m sglang.launch_server --model-path Qwen/Qwen2.5-VL-7B-Instruct --port 30000

    rollout = make_rollout("sglang", model="Qwen/Qwen2.5-VL-7B-Instruct", processor=processor,
                           urls="http://127.0.0.1:30000")

**Tested against a stand-in that speaks this protocol, never yet against SGLang itself**, which wants a GPU. It was
written by the sources of SGLang 0.5.23 and
https://docs.sglang.io/basic_usage/sampling_params.html (`/generate`) and
https://docs.sglang.io/advanced_features/sglang_for_rl.html (weights, pausing, memory).

What is different from vLLM's servers: the noise is not keyed by a seed. No route empties the cache of encoded images,
so each image is given another name with each update; an answer that goes on under new weights would still find the old
ones, which is why that cache is switched off above (only for models whose vision tower is trained). With
`--enable-memory-saver` the servers can sleep, with `--enable-return-routed-experts` they say which experts a token went
to. A server holds one copy of the model; tensor parallelism is fine.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import timedelta
from hashlib import sha256
from pathlib import PurePath
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from rlkit.data.samples import Sample
from rlkit.rollout.sampling import Sampling, where, with_routing
from rlkit.rollout.server_rollout import Job, ServerRollout, data_url, number
from rlkit.rollout.servers import Lost, Refused, Server
from rlkit.rollout.vllm_inputs import NEVER, check_expansion
from rlkit.rollout.weight_transfer import Named, gloo_group, listening_store

NAME = "rlkit"  # of the process group
STRONG = 1e4  # as a logit bias, and as a temperature
WHOLE = {  # of the distribution, which logprobs are of; a server may have been started with other defaults
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "min_new_tokens": 0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}


class SglangGroup:
    """The process group that `/init_weights_update_group` joins: torch's own, met at a store of the trainer's.

    Args:
        size: ranks, the trainer's included.
        address: of this machine, as the servers reach it.
        backend: "nccl" or "gloo".
        timeout: seconds for joining, and with gloo for one tensor.
    """

    def __init__(self, size: int, address: str = "127.0.0.1", *, backend: str, timeout: float = 60.0) -> None:
        self.size, self.address, self.backend, self.timeout = size, address, backend, timeout
        self.device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", torch.cuda.current_device())
        self.store, self.port = listening_store(size, address, timeout)
        self.group: Any = None

    def invitation(self, rank_offset: int) -> dict[str, Any]:
        return {
            "master_address": self.address,
            "master_port": self.port,
            "rank_offset": rank_offset,
            "world_size": self.size,
            "group_name": NAME,
            "backend": self.backend,
        }

    def open(self) -> None:
        store = group_store(self.store, self.device.type)
        if self.backend == "gloo":
            self.group = gloo_group(store, 0, self.size, self.address, self.timeout)
        else:
            torch.cuda.set_device(self.device)  # of this thread
            nccl: Any = dist.ProcessGroupNCCL  # its type hints are incomplete
            self.group = nccl(store, 0, self.size, timedelta(seconds=self.timeout))

    def broadcast(self, bucket: list[Named]) -> None:
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
    """Where torch looks for the ranks of a group that SGLang makes: under its name, twice, and the kind of device."""
    return dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{NAME}/", dist.PrefixStore(NAME, store)))


class SglangRollout(ServerRollout):
    """Samples with SGLang servers that are given the trainer's weights; for the arguments see `ServerRollout`."""

    groups = {
        "nccl": lambda size, address: SglangGroup(size, address, backend="nccl"),
        "gloo": lambda size, address: SglangGroup(size, address, backend="gloo"),
    }
    join = "/init_weights_update_group"
    records = False  # experts, where a server was started so
    alive = "/model_info"  # /health samples a token, which a server that is paused or asleep cannot
    advice = "Start servers with: python -m sglang.launch_server --model-path MODEL --port PORT"

    def _body(self, request: Sample, sampling: Sampling, start: int, count: int) -> dict[str, Any]:
        rule = {
            "n": count,
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "logit_bias": {str(token): NEVER for token in self.unsampled},
            "stop_token_ids": [*self.ends, *sampling.stop],
            "ignore_eos": False,  # it would ignore `stop_token_ids` as well
            "no_stop_trim": True,  # the one that ended it is part of the answer
            "skip_special_tokens": False,
            **WHOLE,
        }
        body = {
            "input_ids": [request.compact_ids],  # a batch of one: a flat list of images would be one for each prompt
            "sampling_params": rule,
            "return_logprob": True,
            "return_prompt_token_ids": True,
            "stream": False,
        }
        if self.records:
            body["return_routed_experts"] = True
        if request.images:
            name = where(request)
            urls = [data_url(image, name) for image in request.images]
            # under another name with each update, as no route empties the cache of encoded images
            names = [sha256(f"{self.version} {url}".encode()).hexdigest()[:16] for url in urls]
            body |= {"image_data": [urls], "mm_hashes": [names]}
        return body

    async def _attempt(self, server: Server, job: Job) -> list[Sample]:
        oldest = self.version
        answers = await self._ask(server, "/generate", job)
        if len(answers) != job.count:
            raise RuntimeError(f"{server.url}: {job.count} answers expected, came {len(answers)}")
        samples = []
        for i, answer in enumerate(answers):
            check_expansion(job.request, answer["prompt_token_ids"])
            facts = answer["meta_info"]
            logprobs, ids = zip(*((entry[0], entry[1]) for entry in facts["output_token_logprobs"]), strict=True)
            versions = [number(v["version"]) for v in facts["weight_versions"] for _ in range(v["start"], v["end"])]
            self._check_versions(server, oldest, versions)
            answered = list(ids), list(logprobs), facts["finish_reason"]["type"], versions
            sample = self._sample(server, job, i, *answered)
            if recorded := facts.get("routed_experts"):  # [tokens but the last, layers, K]
                routing = np.frombuffer(base64.b64decode(recorded), dtype=np.int32)
                layers = self.config.get_text_config().num_hidden_layers
                routing = routing.reshape(len(sample.token_ids) - 1, layers, -1).astype("int16")
                sample = with_routing(sample, torch.from_numpy(routing))
            samples.append(sample)
        return samples

    async def _invite(self, live: Sequence[Server], group: Any) -> None:
        for server in live:  # a group of this name, of the servers that were alive before or of another trainer
            await self._give_up(server)
        await super()._invite(live, group)

    def _begin(self) -> None:
        self._post("/pause_generation", {"mode": "retract"})

    async def _announce(self, description: dict[str, list[Any]]) -> None:
        body = {"names": description["names"], "dtypes": description["dtype_names"], "shapes": description["shapes"]}
        await self.servers.ask_all(
            "POST", "/update_weights_from_distributed", {**body, "group_name": NAME, "flush_cache": False}
        )

    def _end(self) -> None:
        if self.asleep:
            self._post("/resume_memory_occupation", {"tags": ["kv_cache"]})
        self._post("/flush_cache?timeout=60")
        self._post("/update_weight_version", {"new_version": str(self.coming), "abort_all_requests": False})
        self._post("/continue_generation", {})

    async def _give_up(self, server: Server) -> None:
        try:
            await self.servers.ask(server, "POST", "/destroy_weights_update_group", {"group_name": NAME}, timeout=30)
        except (Lost, Refused):
            pass  # the server is gone; the next update will see

    def sleep(self) -> None:
        """Free the GPUs' memory, weights and cache, of servers that were started with `--enable-memory-saver`."""
        if not self.asleep:
            self._tell("/release_memory_occupation", {"tags": ["weights", "kv_cache"]})
            self.asleep = True

    def wake_up(self) -> None:
        """Take memory for the weights again; `update_weights` fills it, and takes that of the cache."""
        if self.asleep:
            self._tell("/resume_memory_occupation", {"tags": ["weights"]})

    async def _meet(self, server: Server) -> tuple[int, int]:
        ask = self.servers.ask
        try:
            model = await ask(server, "GET", "/model_info")
            info = await ask(server, "GET", "/server_info")
            weights = number(model["weight_version"])
            server.workers, copies = info["tp_size"], info["dp_size"] * info["pp_size"]
            self.records = self.records or info.get("enable_return_routed_experts", False)
            await ask(server, "POST", "/continue_generation", {})  # a trainer that was stopped may have left it paused
        except (Lost, Refused, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{server.url} is no SGLang server for training: {error!r}. {self.advice}") from error
        if copies != 1:
            raise ValueError(f"{server.url}: dp_size and pp_size 1 expected, SGLang gives no weights to others")
        if PurePath(model["model_path"]).name != PurePath(self.model).name:
            raise ValueError(f"{server.url} serves the model {model['model_path']!r}; {self.model!r} expected")
        await self._check_logprobs(server)
        longest = info.get("context_length") or self.config.get_text_config().max_position_embeddings
        return cast(int, longest), weights

    async def _check_logprobs(self, server: Server) -> None:
        """With a bias as large as the temperature no token is certain and none is next to impossible, unless
        log-probabilities are counted before the temperature."""
        rule = {**WHOLE, "max_new_tokens": 1, "temperature": STRONG, "logit_bias": {str(self.ends[0]): STRONG}}
        body = {"input_ids": self.ends[:1], "sampling_params": rule, "return_logprob": True}
        try:
            answer = await self.servers.ask(server, "POST", "/generate", body)
        except (Lost, Refused) as error:
            raise ValueError(f"{server.url} does not take tokens: {error}. {self.advice}") from error
        if "weight_versions" not in answer["meta_info"]:
            raise ValueError(f"{server.url} does not say which weights wrote a token; SGLang >=0.5.23 expected")
        if not -50 < answer["meta_info"]["output_token_logprobs"][0][0] < -0.1:
            raise ValueError(
                f"{server.url} gives logprobs of another distribution than it samples from; start it without "
                f"SGLANG_RETURN_ORIGINAL_LOGPROB. {self.advice}"
            )
