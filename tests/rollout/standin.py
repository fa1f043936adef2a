"""Stand-in servers: the routes of vLLM, and those of SGLang, in a thread of the test, with faults to order.

They write tokens that depend on the seed alone, one a `latency`, wait while paused, take weights over gloo for real,
and keep what they were asked.
"""

import asyncio
import base64
import io
import threading
from collections import Counter
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from aiohttp import web

from rlkit.rollout.servers.weight_transfer import gloo_group

WORDS = range(20, 200)  # what the stand-ins write


def written(seed: int, count: int) -> list[int]:
    """The tokens that a stand-in generates for a seed."""
    return np.random.default_rng(seed).integers(WORDS.start, WORDS.stop, count).tolist()


class Standin:
    """A server; `with Standin() as server: server.url`.

    Attributes:
        latency: seconds a token.
        faults: what happens to the next generations, in order: "drop" cuts the connection before the response, "500"
            responses so, "hang" never responses, "die" is the end of the server.
        left_out: routes that it does not have (`pages`).
        broken: routes that answer 500.
        bodies: what it was asked to generate.
        answered: seeds of the generations that it answered.
        calls: how often each route was called, and in what order.
        weights: what has been sent to it.
        now, most, steps: responses that it is writing, at most wrote at once, and steps that all of them took.
        holds: called with a request's body and the number of tokens written for it; while it returns True, the next
            token is not written. Tests use it in place of a latency where something has to happen during generation.
        clients: the connection of each request.
    """

    def __init__(
        self,
        *,
        latency=0.0,
        model="tiny",
        release="0.32.0",
        context=512,
        logprobs="processed",
        faults=(),
        pages=(),
        broken=(),
    ):
        self.latency, self.model, self.release, self.context, self.logprobs = latency, model, release, context, logprobs
        self.faults, self.left_out, self.broken = list(faults), set(pages), set(broken)
        self.bodies, self.answered, self.order, self.weights = [], [], [], {}
        self.version, self.paused, self.now, self.most, self.steps = "default", False, 0, 0, 0
        self.group = None
        self.expanded = {}  # compact prompt -> what it is expanded to
        self.taken_by = ""  # another trainer
        self.dtype = ""  # that it says it computes in
        self.max_num_seqs, self.v2_model_runner = 128, False  # the most samples of one request; which runner it has
        self.resets = True  # its prefix cache, when it is told to
        self.adapter, self.pauses, self.slept = None, [], []  # the file that was sent last; how it paused and slept
        self.holds, self.clients = lambda body, tokens: False, []
        self.routing = None  # response -> the experts that it, its prompt before it, went to, as numpy has them

    @property
    def calls(self):
        return Counter(self.order)

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self.loop).result(60)
        return self

    def __exit__(self, *_):
        asyncio.run_coroutine_threadsafe(self._end(), self.loop).result(60)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(60)

    async def _start(self, port=0):
        app = web.Application(client_max_size=1 << 30, middlewares=[self._note])
        for path, handler in self.pages().items():
            if path not in self.left_out:
                app.router.add_route("*", path, handler)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", port)
        await site.start()
        self.port = self.runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def _end(self):
        self.paused = False
        for connection in list(self.runner.server.connections if self.runner.server else ()):
            if connection.transport is not None:
                connection.transport.abort()
        await self.runner.cleanup()

    def die(self):
        """Cut all connections and listen no more."""
        asyncio.run_coroutine_threadsafe(self._end(), self.loop).result(60)

    def come_back(self):
        """Listen again on the same port, with the weights of the start."""
        self.version, self.weights, self.group = "default", {}, None
        asyncio.run_coroutine_threadsafe(self._start(self.port), self.loop).result(60)

    @web.middleware
    async def _note(self, request, handler):
        self.order.append(request.path)
        self.clients.append(request.protocol)
        if request.path in self.broken:
            raise web.HTTPInternalServerError(text='{"error": {"message": "out of luck"}}')
        return await handler(request)

    async def _fault(self, request):
        """Do what is to happen next; True if the response is to be lost."""
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "500":
            raise web.HTTPInternalServerError(text='{"error": {"message": "out of luck"}}')
        if fault == "die":
            asyncio.ensure_future(self._end())
        if fault == "hang":
            await asyncio.sleep(3600)
        return fault == "drop"

    async def _write(self, seeds, count, body):
        """Tokens and the versions that wrote them, of several responses at once."""
        self.now += len(seeds)
        self.most = max(self.most, self.now)
        try:
            versions = []
            for tokens in range(count):
                await asyncio.sleep(self.latency)
                while self.paused or self.holds(body, tokens):
                    await asyncio.sleep(0.002)
                versions.append(self.version)
                self.steps += 1
            return [written(seed, count) for seed in seeds], versions
        finally:
            self.now -= len(seeds)

    async def _in_thread(self, function, *args):
        return await asyncio.get_running_loop().run_in_executor(None, function, *args)

    def _receive(self, names, dtypes, shapes):
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast(weight.view(-1).view(torch.uint8), 0).wait()
            self.weights[name] = weight


class VllmStandin(Standin):
    def pages(self):
        done = self._done
        return {
            "/health": done, "/version": self._version, "/v1/models": self._models, "/weight_info": self._weight_info,
            "/get_world_size": self._world, "/inference/v1/generate": self._generate, "/pause": self._pause,
            "/resume": self._resume, "/start_weight_update": done, "/reset_prefix_cache": self._reset,
            "/is_paused": self._is_paused, "/reset_encoder_cache": done, "/sleep": self._sleep, "/wake_up": done,
            "/init_weight_transfer_engine": self._init, "/update_weights": self._update,
            "/finish_weight_update": self._finish, "/rlkit/adapter": self._adapter,
            "/update_weight_version": self._new_version, "/rlkit/claim": self._claim,
            "/rlkit/weight_dtype": self._weight_dtype,
        }  # fmt: skip

    async def _done(self, request):
        return web.json_response({"success": True})

    async def _weight_dtype(self, request):
        if not self.dtype:
            raise web.HTTPNotFound
        settings = {"dtype": self.dtype, "device": "cpu", "max_num_seqs": self.max_num_seqs}
        return web.json_response({**settings, "v2_model_runner": self.v2_model_runner})

    async def _claim(self, request):
        if not self.taken_by:
            raise web.HTTPNotFound
        return web.json_response({"error": f"expected a free server, got one taken by {self.taken_by}"}, status=409)

    async def _version(self, request):
        return web.json_response({"version": self.release})

    async def _models(self, request):
        return web.json_response({"data": [{"id": self.model, "max_model_len": self.context}]})

    async def _weight_info(self, request):
        return web.json_response({"weight_version": self.version})

    async def _world(self, request):
        return web.json_response({"world_size": 1})

    async def _pause(self, request):
        self.paused = True
        self.pauses.append(request.query["mode"])
        return await self._done(request)

    async def _sleep(self, request):
        self.slept.append(request.query["level"])
        return await self._done(request)

    async def _adapter(self, request):
        assert self.paused
        self.adapter = await request.read()
        return await self._done(request)

    async def _new_version(self, request):
        assert self.paused
        self.version = (await request.json())["new_version"]
        return await self._done(request)

    async def _is_paused(self, request):
        return web.json_response({"is_paused": self.paused})

    async def _resume(self, request):
        self.paused = False
        return await self._done(request)

    async def _reset(self, request):
        return web.json_response({"success": self.resets})

    async def _generate(self, request):
        body = await request.json()
        rule = body["sampling_params"]
        if only := rule.get("allowed_token_ids"):  # the client tries how logprobs are counted
            while self.paused:
                await asyncio.sleep(0.002)
            logprob = 0.0 if self.logprobs == "processed" else -5.0
            return web.json_response(
                {"choices": [{"logprobs": {"content": [{"token_id": only[0], "logprob": logprob}]}}]}
            )
        self.bodies.append(body)
        connection_lost = await self._fault(request)
        if rule["n"] > self.max_num_seqs:
            raise web.HTTPBadRequest(text='{"error": {"message": "sampling_params.n must be at most"}}')
        if "model" in body and self.adapter is None:
            raise web.HTTPNotFound(text='{"error": {"message": "The model `policy` does not exist."}}')
        if max(body["token_ids"]) >= 10_000:
            raise web.HTTPBadRequest(text='{"error": {"message": "Token id 10000 is out of vocabulary"}}')
        seeds = [rule["seed"] + i for i in range(rule["n"])]
        responses, versions = await self._write(seeds, rule["max_tokens"], body)
        starts = [t for t in range(len(versions)) if t == 0 or versions[t] != versions[t - 1]]
        spans = [
            {"version": versions[a], "start": a, "end": b}
            for a, b in zip(starts, [*starts[1:], len(versions)], strict=True)
        ]
        self.answered += seeds
        if connection_lost:
            request.transport.abort()
        return web.json_response({
            "prompt_token_ids": self.expanded.get(tuple(body["token_ids"]), body["token_ids"]),
            "choices": [
                {
                    "index": i, "token_ids": ids, "finish_reason": "length", "weight_versions": spans,
                    "logprobs": {"content": [{"token_id": t, "logprob": -1.0 - t / 100} for t in ids]},
                    "routed_experts": self._npy(self.routing(ids)) if self.routing else None,
                }
                for i, ids in reversed(list(enumerate(responses)))
            ],
        })  # fmt: skip

    def _npy(self, array):  # as vLLM does
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        return base64.b64encode(buffer.getbuffer()).decode()

    async def _init(self, request):
        info = (await request.json())["init_info"]

        def join():
            size, limit = info["world_size"], timedelta(seconds=info["timeout"])
            store = dist.TCPStore(info["host"], info["port"], size, False, limit, wait_for_workers=False)
            return gloo_group(store, info["rank_offset"], size, "127.0.0.1", info["timeout"])

        self.group = await self._in_thread(join)
        return await self._done(request)

    async def _update(self, request):
        info = (await request.json())["update_info"]
        await self._in_thread(self._receive, info["names"], info["dtype_names"], info["shapes"])
        return await self._done(request)

    async def _finish(self, request):
        body = await request.json() if request.can_read_body else None
        if body:
            self.version = body["weight_version"]
        return await self._done(request)


class SglangStandin(Standin):
    """Speaks SGLang 0.5.23's `/generate`, weight updates, pausing and memory, and refuses what it refuses.

    Attributes:
        embeddings: encoded images by their names, and the version of the weights that did it; never emptied.
        server: what /server_info says.
    """

    def __init__(self, **options):
        super().__init__(**options)
        self.embeddings, self.asleep, self.flushed = {}, set(), True
        self.server = {"tp_size": 1, "dp_size": 1, "pp_size": 1, "context_length": self.context}

    def pages(self):
        return {
            "/health": self._health, "/model_info": self._model, "/server_info": self._info,
            "/generate": self._generate,
            "/init_weights_update_group": self._init, "/destroy_weights_update_group": self._destroy,
            "/update_weights_from_distributed": self._update, "/update_weight_version": self._new_version,
            "/pause_generation": self._pause, "/continue_generation": self._resume, "/flush_cache": self._flush,
            "/release_memory_occupation": self._release, "/resume_memory_occupation": self._take_again,
        }  # fmt: skip

    def _refuse(self, message):
        return web.json_response({"error": {"message": message}}, status=400)

    async def _done(self, request):
        return web.json_response({"success": True, "message": ""})

    async def _health(self, request):  # it samples a token
        while self.paused or self.asleep:
            await asyncio.sleep(0.01)
        return web.Response()

    async def _model(self, request):
        return web.json_response({"model_path": f"/models/{self.model}", "weight_version": self.version})

    async def _info(self, request):
        return web.json_response({**self.server, **({"dtype": self.dtype} if self.dtype else {})})

    async def _pause(self, request):
        assert (await request.json())["mode"] == "retract"  # "abort" loses responses, "in_place" keeps their cache
        self.paused = True
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _resume(self, request):
        assert await request.json() == {}
        self.paused = False
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, request):
        self.flushed = True
        return web.Response(text="Cache flushed.\nPlease check backend logs for more details.\n")  # no JSON

    async def _release(self, request):
        self.asleep |= set((await request.json())["tags"])
        return web.json_response(None)

    async def _take_again(self, request):
        self.asleep -= set((await request.json())["tags"])
        return web.json_response(None)

    async def _new_version(self, request):
        body = await request.json()
        assert body["abort_all_requests"] is False and self.paused
        self.version = body["new_version"]
        return await self._done(request)

    async def _generate(self, request):
        body = await request.json()
        rule, prompts = body["sampling_params"], body["input_ids"]
        assert set(body) <= BODY and set(rule) <= RULE and body["return_logprob"] and not body.get("stream")
        batch = isinstance(prompts[0], list) or rule.get("n", 1) > 1
        (prompt,) = prompts if isinstance(prompts[0], list) else [prompts]
        for field in ("image_data", "mm_hashes"):
            if batch and len(body.get(field, [prompt])) != 1:
                return self._refuse(f"The length of {field} should be equal to the batch size.")
        if max(rule["logit_bias"].values()) > 0:  # the client tries how logprobs are counted
            logits = np.full(self.context, 0.0)
            logits[[int(token) for token in rule["logit_bias"]]] = list(rule["logit_bias"].values())
            logits /= rule["temperature"] if self.logprobs == "processed" else 1.0
            token = int(np.argmin(logits))
            logprob = logits[token] - np.logaddexp.reduce(logits)
            return web.json_response(self._response(prompt, [token], [logprob], [self.version]))
        while self.paused:  # it waits before it is tokenised
            await asyncio.sleep(0.002)
        assert not self.asleep and self.flushed
        self.bodies.append(body)
        images, names = body.get("image_data", [[]])[0], body.get("mm_hashes", [[]])[0]
        for name, _ in zip(names, images, strict=True):
            self.embeddings.setdefault(f"{int(name, 16):016x}", self.version)
        connection_lost = await self._fault(request)
        seeds = [sum(prompt) + 1000 * i for i in range(rule.get("n", 1))]
        responses, versions = await self._write(seeds, rule["max_new_tokens"], body)
        self.answered += seeds
        if connection_lost:
            request.transport.abort()
        stops = set() if rule["ignore_eos"] else set(rule["stop_token_ids"])
        ends = [next((t + 1 for t, token in enumerate(ids) if token in stops), len(ids)) for ids in responses]
        seen = self.expanded.get(tuple(prompt), prompt)
        made = [
            self._response(seen, ids[:end], [-1.0 - t / 100 for t in ids[:end]], versions[:end], stops)
            for ids, end in zip(responses, ends, strict=True)
        ]
        return web.json_response(made if batch else made[0])

    def _response(self, prompt, ids, logprobs, versions, stops=()):
        starts = [t for t in range(len(ids)) if t == 0 or versions[t] != versions[t - 1]]
        ended = {"type": "stop", "matched": ids[-1]} if ids[-1] in stops else {"type": "length", "length": len(ids)}
        facts = {
            "finish_reason": ended, "prompt_tokens": len(prompt), "completion_tokens": len(ids),
            "weight_version": versions[-1],
            "weight_versions": [
                {"version": versions[a], "start": a, "end": b}
                for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)
            ],
            "output_token_logprobs": [[logprob, token, None] for token, logprob in zip(ids, logprobs, strict=True)],
        }  # fmt: skip
        if self.routing:
            facts["routed_experts"] = base64.b64encode(self.routing([*prompt, *ids]).tobytes()).decode()
        return {"text": "", "output_ids": ids, "prompt_token_ids": list(prompt), "meta_info": facts}

    async def _init(self, request):
        info = await request.json()
        if self.group is not None:
            return self._refuse("The specified group name has already been created")

        def join():  # as torch makes a group of this name: under the name, twice, and the kind of device
            size, name, limit = info["world_size"], info["group_name"], timedelta(seconds=60)
            store = dist.TCPStore(info["master_address"], info["master_port"], size, False, limit)
            for prefix in (name, f"{name}/", "cpu/"):
                store = dist.PrefixStore(prefix, store)
            return gloo_group(store, info["rank_offset"], size, "127.0.0.1", 60)

        assert info["backend"] == "gloo"
        self.group = await self._in_thread(join)
        return await self._done(request)

    async def _destroy(self, request):
        if self.group is None:
            return self._refuse("The group to be destroyed does not exist.")
        self.group = None
        return await self._done(request)

    async def _update(self, request):
        info = await request.json()
        assert info["group_name"] == "rlkit" and info["flush_cache"] is False
        assert self.paused and "weights" not in self.asleep
        self.flushed = False
        await self._in_thread(self._receive, info["names"], info["dtypes"], info["shapes"])
        return await self._done(request)


BODY = {  # what of GenerateReqInput, and of SamplingParams, the client may say
    "input_ids", "sampling_params", "return_logprob", "return_prompt_token_ids", "return_routed_experts", "stream",
    "image_data", "mm_hashes",
}  # fmt: skip
RULE = {
    "n", "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "min_new_tokens", "logit_bias", "stop_token_ids", "ignore_eos", "no_stop_trim",
    "skip_special_tokens",
}  # fmt: skip
