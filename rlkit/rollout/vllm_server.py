"""Sampling with vLLM servers: tokens in and tokens out by HTTP, weights through a process group.

    python -m rlkit.rollout.serve --model Qwen/Qwen2.5-VL-7B-Instruct --count 2 --port 8000       # or elsewhere

    rollout = make_rollout("vllm_server", model="Qwen/Qwen2.5-VL-7B-Instruct", processor=processor,
                           urls="http://127.0.0.1:8000,http://127.0.0.1:8001")

A prompt goes to one server with its images, which are processed once for all of its answers. A request whose server
died, or did not answer, is asked again of another one; an answer is taken once. Every answer says which weights wrote
it, and other weights than the expected ones are an error.

Nothing is pickled on the way: `/inference/v1/generate`, `/pause`, `/resume`, the routes of vLLM's native weight
transfer, those that reset caches, `/sleep` and `/wake_up` take and give JSON, and adapters travel as safetensors.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit.data.samples import Sample
from rlkit.rollout.adapters import NAME, ROUTE, packed
from rlkit.rollout.sampling import Sampling, where, with_routing
from rlkit.rollout.server_rollout import Job, ServerRollout, data_url, number
from rlkit.rollout.servers import Lost, Refused, Server
from rlkit.rollout.vllm_inputs import check_expansion, check_takes_weights, check_unsampled, sampling_options
from rlkit.rollout.weight_transfer import GlooGroup, NcclGroup

SUPPORTED = ((0, 32), (0, 33))  # versions of vLLM, from the first, below the second
WITH_ADAPTERS = "python -m rlkit.rollout.serve --model MODEL --enable-lora --max-lora-rank RANK"


class VllmServerRollout(ServerRollout):
    """Samples with vLLM servers that are given the trainer's weights; for the arguments see `ServerRollout`."""

    groups = {"nccl": NcclGroup, "gloo": GlooGroup}
    join = "/init_weight_transfer_engine"
    advice = "Start servers with: python -m rlkit.rollout.serve --model MODEL --count N --port PORT"
    adapter: str | None = None  # that requests name

    def _body(self, request: Sample, sampling: Sampling, start: int, count: int) -> dict[str, Any]:
        options = sampling_options(sampling, request, n=count, unsampled=self.unsampled, ends=self.ends)
        options["seed"] += start  # the server adds the number of the answer
        body = {"token_ids": request.compact_ids, "sampling_params": options, "return_token_ids": True, "stream": False}
        if self.adapter:
            body["model"] = self.adapter
        if request.images:
            name = where(request)
            body["content_parts"] = [{"type": "image_url", "url": data_url(image, name)} for image in request.images]
        return body

    async def _attempt(self, server: Server, job: Job) -> list[Sample]:
        oldest = self.version
        answer = await self._ask(server, "/inference/v1/generate", job)
        check_expansion(job.request, answer["prompt_token_ids"])
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if len(choices) != job.count:
            raise RuntimeError(f"{server.url}: {job.count} answers expected, came {len(choices)}")
        samples = []
        for i, choice in enumerate(choices):
            spans = choice.get("weight_versions") or []
            versions = [number(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
            self._check_versions(server, oldest, versions)
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            answered = choice["token_ids"], logprobs, choice["finish_reason"], versions
            sample = self._sample(server, job, i, *answered)
            if routing := choice.get("routed_experts"):  # started with --enable-return-routed-experts
                array = np.load(io.BytesIO(base64.b64decode(routing)), allow_pickle=False)
                sample = with_routing(sample, torch.from_numpy(array.astype("int16")))
            samples.append(sample)
        return samples

    def _invitation(self, invitation: dict[str, Any]) -> dict[str, Any]:
        return {"init_info": invitation}

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """As `ServerRollout.update_weights`; adapters that were sent are not used any more.

        Raises:
            ValueError: a family of which vLLM would keep some of the old weights.
            RuntimeError: the weights did not arrive everywhere. The servers wait then; call it again.
        """
        check_takes_weights(self.config.model_type)
        super().update_weights(weights)
        self.adapter = None

    def update_adapter(self, config: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send LoRA adapters, which are a hundredth of the weights; those beneath stay what the servers loaded.

        The servers must have been started by `rlkit.rollout.serve` with `--enable-lora` and `--max-lora-rank`. They
        read adapters from memory. Requests in flight go on with the new ones. All ranks iterate together, rank 0 sends.

        Args:
            config: peft's, and
            weights: (name in peft's files, whole tensor); together what `engine.get_adapter()` returns.

        Raises:
            RuntimeError: a server did not take them, or would sample without some of them, or on other weights than
                they were trained on. The servers wait then; call it again.
        """
        self._hand_over("update_adapter", weights, partial(self._send_adapter, config))
        self.adapter = NAME

    def _send_adapter(self, config: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
        file = packed(config, weights)
        self.servers.run(self._look_round())
        self._pause(NAME)
        try:
            self._post(ROUTE, file)
        except Refused as error:
            raise RuntimeError(f"{error}. Adapters need servers started with: {WITH_ADAPTERS}") from error
        self.coming = self.version + 1
        self._post("/update_weight_version", {"new_version": str(self.coming)})
        self._go_on()

    def _pause(self, adapter: str | None) -> None:
        """Requests in flight wait; those that would go on without the adapter, or with one that is gone, end first."""
        self._post(f"/pause?mode={'keep' if adapter == self.adapter else 'wait'}")

    def _begin(self) -> None:
        self._pause(None)
        self._post("/start_weight_update")

    async def _announce(self, description: dict[str, list[Any]]) -> None:
        await self.servers.ask_all("POST", "/update_weights", {"update_info": description})

    def _end(self) -> None:
        self._post("/finish_weight_update", {"weight_version": str(self.coming)})
        self._go_on()

    def _go_on(self) -> None:
        if self.asleep:
            torch.cuda.empty_cache()
            self._post("/wake_up?tags=kv_cache")
        reset = self._post("/reset_prefix_cache?reset_running_requests=true")
        if not all(answer["success"] for answer in reset):
            raise RuntimeError("a server could not reset its prefix cache, which has keys and values of old weights")
        self._post("/reset_encoder_cache")
        self._post("/resume")

    async def _give_up(self, server: Server) -> None:
        try:
            await self.servers.ask(server, "POST", "/finish_weight_update", timeout=30)
        except (Lost, Refused):
            pass  # it had ended already, or the server is gone; the next update will see

    def sleep(self) -> None:
        """Free the GPUs' memory, weights and cache, of servers that were started with `--enable-sleep-mode`."""
        if not self.asleep:  # 1 keeps the weights on the host, where adapters alone are sent, 2 nowhere
            self._tell(f"/sleep?level={1 if self.adapter else 2}&mode=wait")
            self.asleep = True

    def wake_up(self) -> None:
        """Take memory for the weights again; `update_weights` fills it, and takes that of the cache."""
        if self.asleep:
            torch.cuda.empty_cache()  # a server on the same GPU does not find what this process's allocator only keeps
            self._tell("/wake_up?tags=weights")

    async def _meet(self, server: Server) -> tuple[int, int]:
        ask = self.servers.ask
        check_unsampled(self.unsampled)
        try:
            version = (await ask(server, "GET", "/version"))["version"]
            card = (await ask(server, "GET", "/v1/models"))["data"][0]
            weights = number((await ask(server, "GET", "/weight_info"))["weight_version"])
            server.workers = (await ask(server, "GET", "/get_world_size"))["world_size"]
            if paused := (await ask(server, "GET", "/is_paused"))["is_paused"]:
                await self._take_over(server)
        except (Lost, Refused, KeyError, TypeError) as error:
            raise ValueError(f"{server.url} is no vLLM server for training: {error}. {self.advice}") from error
        if not SUPPORTED[0] <= tuple(int(part) for part in version.split(".")[:2]) < SUPPORTED[1]:
            low, high = (".".join(map(str, v)) for v in SUPPORTED)
            raise ValueError(f"{server.url} runs vLLM {version}; >={low},<{high} expected")
        if PurePath(card["id"]).name != PurePath(self.model).name:
            raise ValueError(f"{server.url} serves the model {card['id']!r}; {self.model!r} expected")
        if not paused:
            await self._check_logprobs(server)
        return card["max_model_len"], weights

    async def _take_over(self, server: Server) -> None:
        """A trainer that was stopped left the server asleep, or waiting for weights: it goes on when it has some."""
        await self._give_up(server)
        for path in ("/wake_up", "/resume"):
            try:
                await self.servers.ask(server, "POST", path)
            except Lost:  # the connection was the stopped update's; a second time does nothing more
                await self.servers.ask(server, "POST", path)
        self.torn = True

    async def _check_logprobs(self, server: Server) -> None:
        """Where one token alone may be sampled, its log-probability is 0, unless it is that of the raw logits."""
        rule = {"max_tokens": 1, "logprobs": 0, "allowed_token_ids": self.ends[:1], "ignore_eos": True}
        body = {"token_ids": self.ends[:1], "sampling_params": rule}
        try:
            answer = await self.servers.ask(server, "POST", "/inference/v1/generate", body)
        except (Lost, Refused) as error:
            raise ValueError(f"{server.url} does not take tokens: {error}. {self.advice}") from error
        if not math.isclose(answer["choices"][0]["logprobs"]["content"][0]["logprob"], 0.0, abs_tol=1e-3):
            raise ValueError(
                f"{server.url} gives logprobs of another distribution than it samples from; start it with "
                f"--logprobs-mode processed_logprobs. {self.advice}"
            )
