"""Sampling with vLLM servers: token ids by HTTP, weights through a process group.

    python -m rlkit.rollout.serve --model Qwen/Qwen2.5-VL-7B-Instruct --count 2 --port 8000

    rollout = make_rollout("vllm_server", model="Qwen/Qwen2.5-VL-7B-Instruct", processor=processor,
                           urls="http://127.0.0.1:8000,http://127.0.0.1:8001")

Each prompt with its images, videos and audios is sent to one server, and prefilled once for all of its samples. Frames
and audio samples are sent as they are; the server reads them with rlkit's media connector. If a server dies or does
not respond, its requests are sent to another server. Responses contain the weight version of each token, and an
unexpected version is an error.

Nothing is pickled: all routes exchange JSON, and adapters are sent as safetensors. The routes are
`/inference/v1/generate`, `/pause`, `/resume`, `/sleep`, `/wake_up`, those of vLLM's native weight transfer, and those
that reset caches.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit.data.messages import MEDIA
from rlkit.data.samples import Sample
from rlkit.rollout.adapters import ADAPTER_CHECK_ROUTE, ADAPTER_NAME, ADAPTER_ROUTE, serialize_adapter
from rlkit.rollout.inference_requests import check_prompt_expansion
from rlkit.rollout.sampling import Sampling, with_routed_experts
from rlkit.rollout.servers.media import Part
from rlkit.rollout.servers.pool import RequestRejected, Server, ServerUnavailable
from rlkit.rollout.servers.rollout import Job, ServerRollout, Weights, version_number
from rlkit.rollout.servers.weight_dtype import WEIGHT_DTYPE_ROUTE
from rlkit.rollout.servers.weight_transfer import GlooGroup, NcclGroup
from rlkit.rollout.vllm import SUPPORTED_RANGE, is_supported
from rlkit.rollout.vllm_families import NEED_OWN_MODEL, check_weight_updates_work, check_windows_work
from rlkit.rollout.vllm_requests import (
    as_trainer_tokens,
    check_server_media,
    check_suppressed_token_ids,
    vllm_sampling_params,
)
from rlkit.vlm.families import stray_window

START_WITH_ADAPTERS = "python -m rlkit.rollout.serve --model MODEL --enable-lora --max-lora-rank RANK"


class VllmServerRollout(ServerRollout):
    """Samples with vLLM servers that receive the trainer's weights. For the arguments see `ServerRollout`."""

    transfer_groups = {"nccl": NcclGroup, "gloo": GlooGroup}
    join_path = "/init_weight_transfer_engine"
    start_hint = "Start servers with: python -m rlkit.rollout.serve --model MODEL --count N --port PORT"
    accepted_media = MEDIA
    adapter: str | None = None  # sent as the model name of requests

    def _request_body(self, request: Sample, sampling: Sampling, start: int, count: int) -> dict[str, Any]:
        params = vllm_sampling_params(
            sampling, request, n=count, suppressed_token_ids=self.suppressed_token_ids, end_token_ids=self.end_token_ids
        )
        params["seed"] += start  # the server adds the index of the sample within the request
        body = {"token_ids": request.compact_ids, "sampling_params": params, "return_token_ids": True, "stream": False}
        if self.adapter:
            body["model"] = self.adapter
        on_cpu = any(server.device == "cpu" for server in self.pool.servers)
        check_server_media(request, self.processor, self.config, on_cpu=on_cpu)
        return body

    def _media_body(self, parts: Sequence[Part]) -> dict[str, Any]:
        return {"content_parts": parts}

    async def _request_samples(self, server: Server, job: Job) -> list[Sample]:
        oldest = self.version
        response = await self._post_job(server, "/inference/v1/generate", job)
        check_prompt_expansion(job.request, as_trainer_tokens(response["prompt_token_ids"], self.processor))
        choices = sorted(response["choices"], key=lambda choice: choice["index"])
        if len(choices) != (count := job.body["sampling_params"]["n"]):
            raise RuntimeError(f"{server.url}: expected {count} samples, got {len(choices)}")
        samples = []
        for i, choice in enumerate(choices * (job.count // count)):  # greedy decoding generates one
            spans = choice.get("weight_versions") or []
            sample = self._make_sample(
                server,
                job,
                i,
                oldest,
                token_ids=choice["token_ids"],
                logprobs=[entry["logprob"] for entry in choice["logprobs"]["content"]],
                finish_reason=choice["finish_reason"],
                versions=[version_number(span["version"]) for span in spans for _ in range(span["start"], span["end"])],
            )
            if encoded := choice.get("routed_experts"):  # the server was started with --enable-return-routed-experts
                experts = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
                sample = with_routed_experts(sample, torch.from_numpy(experts.astype("int16")))
            samples.append(sample)
        return samples

    def _join_body(self, join_info: dict[str, Any]) -> dict[str, Any]:
        return {"init_info": join_info}

    def update_weights(self, weights: Weights) -> None:
        """As `ServerRollout.update_weights`. An adapter that was sent before is no longer used.

        Raises:
            ValueError: vLLM's weight update would leave some old weights in place for this model family, or the files
                of the model are quantized.
            RuntimeError: a server did not receive the weights. The servers stay paused until another call succeeds.
        """
        on_cpu = all(server.device == "cpu" for server in self.pool.servers)
        check_weight_updates_work(self.config, on_cpu=on_cpu)
        with self._changed_adapter(None):
            super().update_weights(weights)

    def update_adapter(self, config: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send LoRA adapters only, about a hundredth of the weights. The base model stays as the servers loaded it.

        Start the servers by `rlkit.rollout.serve` with `--enable-lora` and `--max-lora-rank`. They load adapters from
        memory. Requests in flight continue with the new adapters; before the first adapters they are finished with the
        base model. All ranks iterate together, and rank 0 sends.

        Args:
            config: peft's config, from `engine.get_adapter()`.
            weights: (name in peft's files, full tensor) of every adapter weight, from `engine.get_adapter()`.

        Raises:
            RuntimeError: a server did not receive the adapters, cannot use all of them, or has base weights other than
                those that the adapters were trained on. The servers stay paused until another call succeeds.
        """
        with self._changed_adapter(ADAPTER_NAME):
            self._update("update_adapter", weights, partial(self._send_adapter, config))

    def check_adapter(self, names: Iterable[str], rank: int) -> None:
        """Raise a ValueError unless all servers can take an adapter with these tensor names and this rank."""
        try:
            self._post_all(ADAPTER_CHECK_ROUTE, {"names": list(names), "rank": rank})
        except (RequestRejected, ServerUnavailable) as error:
            raise ValueError(f"{error}. To take adapters, start servers with: {START_WITH_ADAPTERS}") from error

    def _send_adapter(self, config: Any, weights: Weights) -> None:
        file = serialize_adapter(config, weights)
        self._pause(ADAPTER_NAME)
        try:
            self._post_all(ADAPTER_ROUTE, file)
        except RequestRejected as error:
            raise RuntimeError(f"{error}. To take adapters, start servers with: {START_WITH_ADAPTERS}") from error
        self.sent_version = self.version + 1
        self._post_all("/update_weight_version", {"new_version": str(self.sent_version)})
        self._reset_caches_and_resume()

    @contextmanager
    def _changed_adapter(self, next_adapter: str | None) -> Iterator[None]:
        """Around an update: if requests name another adapter after it, those of this rank are finished before it, also
        those not sent yet, and other threads submit theirs after it.

        They would be sampled with the old weights, and called samples of the new version. Those that a failed update
        has paused are not waited for.
        """
        if next_adapter == self.adapter:
            yield
            return
        with self.submission:
            while not self.update_failed and (unfinished := [x for x in list(self.in_flight) if not x.done()]):
                wait(unfinished)
            yield
            self.adapter = next_adapter

    def _pause(self, next_adapter: str | None) -> None:
        """Pause generation. Requests in flight continue after the update if the adapter stays the same; otherwise they
        are finished first.

        Args:
            next_adapter: the adapter of requests after the update; None for the base model.
        """
        self._post_all(f"/pause?mode={'keep' if next_adapter == self.adapter else 'wait'}")

    def _begin_update(self) -> None:
        self._pause(None)
        self._post_all("/start_weight_update")

    async def _announce_bucket(self, description: dict[str, list[Any]]) -> None:
        await self.pool.request_all(self.receivers, "POST", "/update_weights", {"update_info": description})

    def _finish_update(self) -> None:
        self._post_all("/finish_weight_update", {"weight_version": str(self.sent_version)})
        self._reset_caches_and_resume()

    def _reset_caches_and_resume(self) -> None:
        if self.asleep:
            torch.cuda.empty_cache()
            self._post_all("/wake_up?tags=kv_cache")
        resets = self._post_all("/reset_prefix_cache?reset_running_requests=true")
        if not all(response["success"] for response in resets):
            raise RuntimeError(
                "/reset_prefix_cache: expected success on all servers, got a failure: keys and values of old weights "
                "would be used"
            )
        self._post_all("/reset_encoder_cache")
        self._post_all("/resume")

    async def _abort_update(self, server: Server) -> None:
        try:
            await self.pool.request(server, "POST", "/finish_weight_update", timeout=30)
        except (ServerUnavailable, RequestRejected):
            pass  # the update has ended already, or the server is gone and the next update will exclude it

    def sleep(self) -> None:
        """Free the GPU memory of weights and KV cache, on servers that were started with `--enable-sleep-mode`."""
        if not self.asleep:
            level = 1 if self.adapter else 2  # 1 keeps the weights in host memory, for adapters; 2 drops them
            self._post_from_rank_0(f"/sleep?level={level}&mode=wait")
            self.asleep = True

    def wake_up(self) -> None:
        """Allocate memory for the weights. `update_weights` then fills it and allocates the KV cache."""
        if self.asleep:
            torch.cuda.empty_cache()  # frees memory in this process's caching allocator for a server on the same GPU
            self._post_from_rank_0("/wake_up?tags=weights")

    async def _handshake(self, server: Server) -> tuple[int, int]:
        request = self.pool.request
        try:
            version = (await request(server, "GET", "/version"))["version"]
            card = (await request(server, "GET", "/v1/models"))["data"][0]
            weight_version = version_number((await request(server, "GET", "/weight_info"))["weight_version"])
            server.workers = (await request(server, "GET", "/get_world_size"))["world_size"]
            if paused := (await request(server, "GET", "/is_paused"))["is_paused"]:
                await self._recover_paused(server)
        except (ServerUnavailable, RequestRejected, KeyError, TypeError) as error:
            raise ValueError(
                f"{server.url}: expected a vLLM server for training, got {error}. {self.start_hint}"
            ) from error
        if not is_supported(version):
            raise ValueError(f"{server.url}: expected vLLM {SUPPORTED_RANGE}, got {version}")
        if PurePath(card["id"]).name != PurePath(self.model).name:
            raise ValueError(f"{server.url}: expected the model {self.model!r}, got {card['id']!r}")
        check_windows_work(self.config, card["max_model_len"])
        if not paused:
            await self._check_logprobs(server)
        await self._read_settings(server)
        if server.v2_model_runner:
            check_suppressed_token_ids(self.suppressed_token_ids)
        if server.device is None and self.config.model_type in NEED_OWN_MODEL:
            raise ValueError(
                f"{server.url}: expected a server that rlkit.rollout.serve started for {self.config.model_type}, of "
                f"which vLLM's own class leaves out weights, got another. {self.start_hint}"
            )
        window = stray_window(self.config)
        if server.device is None and window and card["max_model_len"] > window:
            raise ValueError(
                f"{server.url}: expected a server that rlkit.rollout.serve started, or a context of at most {window} "
                f"tokens, for a model whose sliding_window of {window} vLLM applies and transformers ignores, got "
                f"another server. {self.start_hint}"
            )
        return card["max_model_len"], weight_version

    async def _read_settings(self, server: Server) -> None:
        try:
            response = await self.pool.request(server, "GET", WEIGHT_DTYPE_ROUTE)
        except RequestRejected:
            return  # it was not started by rlkit.rollout.serve
        for name in ("dtype", "device", "max_num_seqs", "v2_model_runner"):
            if name in response:  # another version of rlkit may have started the server
                setattr(server, name, response[name])

    async def _recover_paused(self, server: Server) -> None:
        """Wake a server that a stopped trainer left asleep or paused. Its weights have to be updated first."""
        await self._abort_update(server)
        for path in ("/wake_up", "/resume"):
            try:
                await self.pool.request(server, "POST", path)
            except ServerUnavailable:  # the connection belonged to the aborted update; a repeated call is harmless
                await self.pool.request(server, "POST", path)
        self.update_failed = True

    async def _check_logprobs(self, server: Server) -> None:
        """Check that logprobs are those of the sampling distribution: with a single allowed token, its logprob is 0."""
        params = {"max_tokens": 1, "logprobs": 0, "allowed_token_ids": self.end_token_ids[:1], "ignore_eos": True}
        body = {"token_ids": self.end_token_ids[:1], "sampling_params": params}
        response = await self._sample_one_token(server, "/inference/v1/generate", body)
        logprob = response["choices"][0]["logprobs"]["content"][0]["logprob"]
        if not math.isclose(logprob, 0.0, abs_tol=1e-3):
            raise ValueError(
                f"{server.url}: expected logprobs of the sampled distribution, got those of the raw logits; start it "
                f"with --logprobs-mode processed_logprobs. {self.start_hint}"
            )
