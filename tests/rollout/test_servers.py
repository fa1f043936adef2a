"""The client of vLLM servers against stand-ins: sharing out, retries, faults, weights, and what errors say."""

import asyncio
import base64
import io
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.applications import Starlette
from transformers import AutoConfig, PreTrainedConfig
from waiting import until

from rlkit.data import load_task
from rlkit.data.media import Audio, Video
from rlkit.data.samples import prompt_sample
from rlkit.engines import make_engine
from rlkit.rollout import Sampling
from rlkit.rollout.serve import command, environment, serving
from rlkit.rollout.servers.arrays import arrays_of
from rlkit.rollout.servers.media import image_data_url
from rlkit.rollout.servers.pool import ServerPool, ServerUnavailable
from rlkit.rollout.servers.shared_load import SharedLoad
from rlkit.rollout.servers.weight_dtype import WEIGHT_DTYPE_ROUTE, WeightDtypeMiddleware
from rlkit.rollout.servers.weight_transfer import GlooGroup, buckets, send_weights
from rlkit.rollout.vllm_requests import request_seed
from rlkit.vlm import encode_prompt, load_model
from rlkit.vlm.loading import load_config

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
from family_configs import BASE, TEXT
from standin import VllmStandin, written

SAMPLING = Sampling(4, seed=(7,))


def prompts(count):
    return [prompt_sample([10 + i, 11], group_id=i) for i in range(count)]


def check(samples, requests, n, sampling=SAMPLING):
    """Each prompt has all of its responses, once and in order."""
    assert [(s.group_id, s.number) for s in samples] == [(r.group_id, i) for r in requests for i in range(n)]
    for sample in samples:
        request = requests[sample.group_id]
        seed = request_seed(sampling.seed, request) + sample.number
        assert sample.token_ids == request.token_ids + written(seed, sampling.max_new_tokens)
        assert sample.response_ids == sample.compact_ids[len(request.compact_ids) :]
        assert sample.logprobs[-1] == -1.0 - sample.token_ids[-1] / 100
        assert sample.versions == [sample.version] * sampling.max_new_tokens


def weights(scale=1.0):
    rng = torch.Generator().manual_seed(0)
    made = [(f"layers.{i}", scale * torch.randn(16, 5, generator=rng)) for i in range(12)]
    return [
        *made,
        ("half", torch.full((3,), scale).bfloat16()),
        ("scalar", torch.tensor(scale)),
        ("big", torch.ones(2000)),
    ]


def arrived(server, sent):
    return set(server.weights) == {name for name, _ in sent} and all(torch.equal(server.weights[k], w) for k, w in sent)


def test_responses_are_distributed_over_servers_and_returned_in_order(connect):
    """A request for more responses than a server takes at once is split, with different seeds."""
    with VllmStandin() as a, VllmStandin() as b:
        rollout, finished = connect(a, b, max_sequences=4), {}
        a.holds = b.holds = lambda *_: len(a.answered + b.answered) >= 50 and not finished
        requests = prompts(12)

        def tell(i, group):
            assert i not in finished
            finished[i] = group, len(a.answered + b.answered)

        samples = rollout.generate(requests, SAMPLING, n=6, on_finished=tell)
        check(samples, requests, 6)
        assert [finished[i][0] for i in range(12)] == [samples[6 * i : 6 * i + 6] for i in range(12)]
        assert min(answered for _, answered in finished.values()) < 72  # before others were written
        assert a.answered and b.answered and len(a.answered + b.answered) == 72
        assert max(a.most, b.most) <= 4
        assert sorted({body["sampling_params"]["n"] for body in a.bodies + b.bodies}) == [2, 4]
        assert rollout.generate([], SAMPLING, n=3) == []
        a.answered.clear()
        connect(a, b).generate(requests, SAMPLING, n=1)  # room for all of them on either
        assert len(a.answered) == 6


def test_requests_have_no_more_samples_than_a_server_takes(connect):
    """vLLM refuses n above its max_num_seqs, of which a server that rlkit started tells."""
    with VllmStandin() as a, VllmStandin() as b:
        a.dtype = b.dtype = "float32"
        b.max_num_seqs = 5
        requests = prompts(2)
        check(connect(a, b, max_sequences=8).generate(requests, SAMPLING, n=12), requests, 12)
        assert sorted(body["sampling_params"]["n"] for body in a.bodies + b.bodies) == [2, 2, 5, 5, 5, 5]


def test_a_server_tells_its_settings():
    model, device = SimpleNamespace(dtype=torch.bfloat16), SimpleNamespace(device_type="cuda")
    app = Starlette()
    app.state.vllm_config = SimpleNamespace(
        model_config=model,
        device_config=device,
        scheduler_config=SimpleNamespace(max_num_seqs=64),
        use_v2_model_runner=True,
    )
    app.add_middleware(WeightDtypeMiddleware)
    sent = []

    async def ask():
        async def send(message):
            sent.append(message)

        await app({"type": "http", "method": "GET", "path": WEIGHT_DTYPE_ROUTE, "headers": []}, None, send)

    asyncio.run(ask())
    settings = {"dtype": "bfloat16", "device": "cuda", "max_num_seqs": 64, "v2_model_runner": True}
    assert json.loads(sent[-1]["body"]) == settings


def test_the_context_of_each_server_is_known(connect):
    with VllmStandin(context=40) as a, VllmStandin(context=128) as b:
        rollout = connect(a, b)
        assert sorted(rollout.context_lengths) == [40, 128] and rollout.max_model_len == 40


def test_windows_that_a_server_leaves_out_are_refused(connect, tmp_path, processor):
    windows = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    vocab_size = len(processor.tokenizer)
    AutoConfig.for_model("qwen2_moe", vocab_size=vocab_size, **windows).save_pretrained(tmp_path)
    with VllmStandin(model=str(tmp_path), context=65) as server:
        with pytest.raises(ValueError, match="^max_model_len: expected at most the sliding window of 64 .*, got 65"):
            connect(server, model=str(tmp_path))


def test_a_window_that_transformers_ignores_needs_a_server_that_was_started_without(connect, tmp_path, processor):
    """As `rlkit.rollout.serve` starts them."""
    AutoConfig.for_model("llama", vocab_size=len(processor.tokenizer), sliding_window=64).save_pretrained(tmp_path)
    with VllmStandin(model=str(tmp_path), context=65) as server:
        with pytest.raises(ValueError, match="started, or a context of at most 64 tokens, .* transformers ignores"):
            connect(server, model=str(tmp_path))
        server.context = 64
        connect(server, model=str(tmp_path)).close()
        server.context, server.dtype = 65, "float32"
        connect(server, model=str(tmp_path))


def test_greedy_responses_are_generated_once(connect):
    """vLLM refuses n > 1 at temperature 0, where all responses are the same."""
    with VllmStandin() as a:
        first, second = connect(a).generate(prompts(1), Sampling(4, temperature=0.0), n=2)
        assert first.token_ids == second.token_ids and [first.number, second.number] == [0, 1]
        assert [body["sampling_params"]["n"] for body in a.bodies] == [1]


def test_each_request_has_its_own_sampling_parameters(connect):
    with VllmStandin() as a:
        how = [Sampling(4, 0.7, (1,)), Sampling(2, 0.0, (2,), stop=(5, 6))]
        first, second = connect(a).generate(prompts(2), how)
        assert [len(first.response_ids), len(second.response_ids)] == [4, 2]
        cold, warm = sorted((body["sampling_params"] for body in a.bodies), key=lambda rule: rule["temperature"])
        assert warm["temperature"] == 0.7 and cold["stop_token_ids"] == [*warm["stop_token_ids"], 5, 6]
        assert warm["seed"] == request_seed((1,), prompts(1)[0])


@pytest.fixture
def ranks():
    """A function from numbers of ranks and servers, and a limit, to the pools of the ranks, which share a store."""
    made = []

    def make(count, servers, **options):
        store, urls = torch.distributed.HashStore(), [f"http://127.0.0.1:{9000 + i}" for i in range(servers)]
        made.extend(ServerPool(urls, store=store, rank_and_ranks=(i, count), **options) for i in range(count))
        return made[-count:]

    yield make
    for pool in made:
        pool.close()


async def wait_for(condition):
    """Wait until a condition holds, without blocking the event loop."""
    async with asyncio.timeout(100):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("per_rank", "most"), [(1, 1), (2, 1), (4, 2)])
def test_ranks_share_out_their_requests_over_all_servers(ranks, per_rank, most):
    """Four ranks, eight servers: with a count of its own and the same order, each rank began with the first server."""
    busy, peaks, requested, lock = Counter(), Counter(), [], threading.Lock()

    async def attempt(server, job):
        with lock:
            busy[server.url] += 1
            peaks[server.url] = max(peaks[server.url], busy[server.url])
            requested.append(job)
        await wait_for(lambda: len(requested) == 4 * per_rank)
        with lock:
            busy[server.url] -= 1

    pools = ranks(4, 8)
    started = [pool.start(pool.run_jobs(range(per_rank), lambda job: 16, attempt)) for pool in pools]
    for pool, work in zip(pools, started, strict=True):
        pool.wait(work)
    assert len(peaks) == min(8, 4 * per_rank) and max(peaks.values()) <= most
    assert set(pools[0].load.read().values()) == {0}


def test_a_rank_notices_that_another_took_the_same_server_since_it_looked():
    store, urls = torch.distributed.HashStore(), ["http://a", "http://b"]
    one, other = SharedLoad(urls, store), SharedLoad(urls, store)
    seen = one.read()
    assert other.reserve("http://a", 2, seen["http://a"])
    assert not one.reserve("http://a", 1, seen["http://a"])
    assert one.read() == {"http://a": 2, "http://b": 0}  # nothing is left of the attempt
    assert one.reserve("http://a", 1, 2) and other.read() == {"http://a": 3, "http://b": 0}
    other.add("http://a", -2)
    assert one.reserve("http://a", 1, 3)  # less than it saw is no obstacle
    alone = SharedLoad(urls)
    assert alone.reserve("http://b", 4, 0) and alone.read() == {"http://a": 0, "http://b": 4}


def test_a_server_with_short_responses_takes_what_waits(ranks):
    """One server is slow; a rank whose own requests are there takes no place of the other rank's on the fast one."""
    done = Counter()

    async def attempt(server, job):
        if server.url.endswith("9000"):
            await wait_for(lambda: done["http://127.0.0.1:9001"] == 7)
        done[server.url] += 1

    pools = ranks(2, 2, max_sequences=1)
    started = [pool.start(pool.run_jobs(range(4), lambda job: 1, attempt)) for pool in pools]
    for pool, work in zip(pools, started, strict=True):
        pool.wait(work)
    assert done["http://127.0.0.1:9000"] == 1 and done["http://127.0.0.1:9001"] == 7


def test_a_rank_goes_on_when_the_store_is_gone(caplog):
    class Gone(torch.distributed.Store):
        def add(self, key, value):
            raise torch.distributed.DistNetworkError("connection reset")

    load = SharedLoad(["http://a", "http://b"], Gone())
    load.add("http://b", 3)
    assert load.read() == {"http://a": 0, "http://b": 3} and not load.is_shared
    assert len(caplog.records) == 1


def test_a_slow_server_does_not_hold_up_the_other(connect):
    with VllmStandin() as slow, VllmStandin() as fast:
        slow.holds = lambda *_: len(fast.answered) < 76  # it has room for two requests of two responses each
        requests = prompts(40)
        check(connect(slow, fast, max_sequences=4).generate(requests, SAMPLING, n=2), requests, 2)
        assert len(slow.answered) == 4


@pytest.mark.parametrize("fault", ["500", "drop"])
def test_a_request_is_retried_after_a_passing_fault(connect, fault):
    with VllmStandin(faults=[fault, "", fault, fault]) as a, VllmStandin() as b:
        requests = prompts(10)
        check(connect(a, b).generate(requests, SAMPLING, n=2), requests, 2)
        written_twice = len(a.answered + b.answered) - 20  # a response that was cut off had been written
        assert not a.faults and (written_twice > 0) == (fault == "drop")


def test_routing_comes_with_its_response(connect):
    with VllmStandin() as a:
        a.routing = lambda ids: np.array(ids[:1] * 4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2)
        rollout = connect(a)
        for sample in rollout.generate(prompts(2), SAMPLING, n=2):
            assert sample.routed_experts.dtype == torch.int16 and sample.routed_experts.shape == (4, 3, 2)
            assert set(sample.routed_experts.flatten().tolist()) == {sample.response_ids[0]}


def test_no_request_goes_into_a_connection_that_a_server_is_about_to_close(connect, monkeypatch):
    """Seen with vLLM between steps of five seconds: every request was sent twice."""
    monkeypatch.setattr("rlkit.rollout.servers.pool.KEEPALIVE_SECONDS", 0.1)
    with VllmStandin() as a:
        rollout = connect(a)
        for _ in range(2):
            rollout.generate(prompts(1), SAMPLING)
            time.sleep(0.3)
        *_, first, second = (one for one, path in zip(a.clients, a.order, strict=True) if path.endswith("/generate"))
        assert first is not second


def test_a_request_that_times_out_goes_to_another_server(connect):
    with VllmStandin(faults=["hang"]) as a, VllmStandin() as b:
        requests = prompts(4)
        check(connect(a, b, timeout=2.0).generate(requests, SAMPLING, n=1), requests, 1)


def test_a_failed_request_goes_to_another_server(connect):
    with VllmStandin(faults=["500"] * 99) as a, VllmStandin() as b:
        check(connect(a, b).generate(prompts(6), SAMPLING), prompts(6), 1)
        assert len(b.answered) == 6 and not a.answered


def test_a_request_fails_after_several_faults(connect):
    with VllmStandin(faults=["500"] * 99) as a:
        rollout = connect(a)
        with pytest.raises(
            RuntimeError, match=f"expected a response within 4 attempts, got none; the last: {a.url}.*500: out of luck"
        ):
            rollout.generate(prompts(1), SAMPLING)
        assert a.faults.count("500") == 95
        a.faults.clear()
        assert len(rollout.generate(prompts(1), SAMPLING)) == 1


def test_a_server_that_dies_is_named_and_the_other_takes_over(connect, caplog):
    with VllmStandin(latency=0.005) as a, VllmStandin(latency=0.005, faults=["", "", "die"]) as b:
        rollout = connect(a, b, max_sequences=4)
        requests = prompts(20)
        check(rollout.generate(requests, SAMPLING, n=2), requests, 2)
        assert [bool(server.failure) for server in rollout.pool.servers] == [False, True]
        assert f"{b.url} is excluded" in caplog.text
        a.die()
        with pytest.raises(
            RuntimeError,
            match=rf"expected at least one that responds, got none \({a.url}: .*; {b.url}: .*\)\. Start servers with",
        ):
            rollout.generate(requests, SAMPLING)


def test_weights_arrive_in_buckets_everywhere(connect):
    with VllmStandin() as a, VllmStandin() as b:
        rollout, sent = connect(a, b, bucket_bytes=1000), weights()
        rollout.update_weights(iter(sent))
        for server in (a, b):
            assert arrived(server, sent) and server.version == "1"
            order = [path for path in server.order if path in ROUTES]
            assert order == [*ROUTES[:3], *["/update_weights"] * 5, *ROUTES[4:]]
        samples = rollout.generate(prompts(2), SAMPLING)
        assert [s.version for s in samples] == [1, 1]
        rollout.update_weights(iter(weights(2.0)))
        assert arrived(b, weights(2.0)) and a.calls["/init_weight_transfer_engine"] == 1


def test_weights_are_sent_in_the_dtype_of_the_servers(connect, tiny_dir):
    """Half of the bytes for servers in bfloat16; the servers' dtypes are asked for, unless an option says which."""
    with VllmStandin() as a, VllmStandin() as b:
        for a.dtype, b.dtype, option, expected in (
            ("bfloat16", "float32", None, torch.float32),
            ("bfloat16", "", None, None),  # a server that was not started by rlkit.rollout.serve
            ("", "", "float16", torch.float16),
            ("bfloat16", "bfloat16", None, torch.bfloat16),
        ):
            rollout = connect(a, b, weight_dtype=option)
            assert rollout.weight_dtype == expected
        with pytest.raises(ValueError, match="weight_dtype: expected one of bfloat16, float16, float32, got 'fp8'"):
            connect(a, b, weight_dtype="fp8")
        engine = make_engine("fsdp2", model=load_model(tiny_dir))
        own = dict(engine.get_per_tensor_param())
        rollout.update_weights(engine.get_per_tensor_param(dtype=rollout.weight_dtype))
        for server in (a, b):
            assert server.weights.keys() == own.keys()
            assert sum(x.nbytes for x in server.weights.values()) < 0.51 * sum(x.nbytes for x in own.values())
            for name, x in server.weights.items():
                assert torch.equal(x, own[name] if own[name].ndim == 1 else own[name].bfloat16()), name


ROUTES = [
    "/init_weight_transfer_engine", "/pause", "/start_weight_update", "/update_weights", "/finish_weight_update",
    "/reset_prefix_cache", "/reset_encoder_cache", "/resume",
]  # fmt: skip


def test_buckets_hold_little():
    found = [[name for name, _ in bucket] for bucket in buckets(weights(), 1000)]
    assert [len(bucket) for bucket in found] == [3, 3, 3, 5, 1] and found[-1] == ["big"]
    assert list(buckets([], 1000)) == []
    taken = []

    def watched():
        for name, weight in weights():
            taken.append(name)
            yield name, weight

    first = next(buckets(watched(), 1000))
    assert len(taken) == len(first) + 1  # one more was gathered than is sent


def test_the_next_bucket_is_gathered_while_one_is_sent():
    """In the thread that calls, one bucket ahead and no further; each bucket has room for one weight."""
    taken, sent, threads = [], [], set()
    complete = [threading.Event() for _ in range(4)]

    def watched():
        for i in range(4):
            if i:  # the bucket before is complete when a weight comes that does not fit into it
                complete[i - 1].set()
            taken.append(i)
            threads.add(threading.current_thread())
            yield f"w{i}", torch.ones(4)
        complete[3].set()

    class Group:
        def broadcast(self, bucket):
            following = min(len(sent) + 1, 3)
            assert complete[following].wait(5), "the next bucket was not gathered"
            time.sleep(0.05)
            assert len(taken) <= following + 2
            sent.append([name for name, _ in bucket])

        def close(self):
            pass

    loaded = Future()
    loaded.set_result(None)
    send_weights(watched(), Group(), lambda _: loaded, bucket_bytes=16, timeout=10)
    assert sent == [["w0"], ["w1"], ["w2"], ["w3"]] and threads == {threading.current_thread()}
    send_weights([], Group(), lambda _: loaded)  # nothing is sent
    assert len(sent) == 4


def test_unfinished_responses_continue_under_new_weights(connect):
    with VllmStandin() as a, VllmStandin() as b:
        rollout = connect(a, b)
        a.holds = b.holds = lambda body, tokens: tokens >= 8 and rollout.version == 0
        future = rollout.submit(prompts(4), Sampling(30), 2)
        until(lambda: a.steps == b.steps == 16)  # of two requests each
        rollout.update_weights(iter(weights()))
        samples = future.result(100)
        for sample in samples:
            assert set(sample.versions) == {0, 1} and sample.versions == sorted(sample.versions)
            assert sample.version == 0 and len(sample.versions) == 30
        assert {s.version for s in rollout.generate(prompts(2), SAMPLING)} == {1}


def test_a_server_comes_back_with_the_next_weights(connect, caplog):
    caplog.set_level(logging.WARNING)
    with VllmStandin() as a, VllmStandin(faults=["die"]) as b:
        rollout, requests = connect(a, b), prompts(6)
        rollout.update_weights(iter(weights()))
        check(rollout.generate(requests, SAMPLING, n=1), requests, 1)
        for scale in (2.0, 3.0):
            rollout.update_weights(iter(weights(scale)))  # to the one that is left
            assert arrived(a, weights(scale)) and a.calls["/init_weight_transfer_engine"] == 2  # one group for both
        b.come_back()

        def broken():
            yield from weights()
            raise RuntimeError("no memory")

        with pytest.raises(RuntimeError, match="update_weights: no memory"):
            rollout.update_weights(broken())
        assert rollout.pool.servers[1].failure and b.order[-1] == "/finish_weight_update"  # it can begin another
        rollout.update_weights(iter(weights(4.0)))
        assert arrived(a, weights(4.0)) and arrived(b, weights(4.0)) and a.version == b.version == "4"
        assert f"{b.url} is available again" in caplog.text
        check(rollout.generate(requests, SAMPLING, n=2), requests, 2)


def test_a_server_that_comes_back_gets_no_requests_before_the_weights(connect):
    """Those that wait for room would be sampled with the weights that it loaded itself, while it joins the group."""
    with VllmStandin() as a, VllmStandin(faults=["die"]) as b:
        rollout, requests, join = connect(a, b, max_sequences=2), prompts(8), VllmStandin._init
        rollout.update_weights(iter(weights()))
        check(rollout.generate(requests, SAMPLING), requests, 1)
        b.bodies.clear()
        a.answered.clear()
        a.holds = lambda *_: not b.calls["/init_weight_transfer_engine"] == 2

        async def join_later(request):
            while not b.bodies and len(a.answered) < 8:
                await asyncio.sleep(0.002)
            return await join(b, request)

        b._init = join_later
        b.come_back()
        future = rollout.submit(requests, SAMPLING, 1)
        until(lambda: a.now == 2)
        rollout.update_weights(iter(weights(2.0)))
        assert not b.bodies
        check(future.result(100), requests, 1)
        assert {s.version for s in rollout.generate(requests, SAMPLING)} == {2} and b.bodies


def test_a_server_that_restarted_unnoticed_gets_the_next_weights(connect, caplog):
    """No request was under way, so only its weight version tells that the process group has lost it."""
    caplog.set_level(logging.WARNING)
    with VllmStandin() as a, VllmStandin() as b:
        rollout = connect(a, b)
        rollout.update_weights(iter(weights()))
        b.die()
        b.come_back()
        rollout.update_weights(iter(weights(2.0)))
        assert arrived(a, weights(2.0)) and arrived(b, weights(2.0)) and a.version == b.version == "2"
        assert f"{b.url} is excluded: expected weight version 1, got 0" in caplog.text
        check(rollout.generate(prompts(4), SAMPLING), prompts(4), 1)
        rollout.update_weights(iter(weights(3.0)))
        assert a.calls["/init_weight_transfer_engine"] == 2  # a second group, and no third


def test_an_update_ends_with_the_servers_that_it_began_with(connect, caplog):
    """A job's health check in the middle of an update neither adds a server nor takes one away."""
    with VllmStandin() as a, VllmStandin() as b:
        rollout = connect(a, b, bucket_bytes=1000)
        servers = rollout.pool.servers
        respond = rollout.pool.request

        def silent(at, server):
            async def request(to, method, path, *rest, **options):
                if to is server and path == at:
                    raise ServerUnavailable(f"{to.url}: busy")
                return await respond(to, method, path, *rest, **options)

            return request

        def gathered(scale, then):
            for i, named in enumerate(weights(scale)):
                if i == 7:
                    rollout.pool.request = then
                    rollout.pool.run(rollout.pool.check_health(servers[1]))
                yield named

        rollout.pool.request = silent("/health", servers[1])
        rollout.update_weights(gathered(1.0, then=respond))  # it is silent at the beginning
        assert arrived(a, weights()) and not b.calls["/update_weights"] and servers[1].failure
        assert {s.version for s in rollout.generate(prompts(4), SAMPLING)} == {1}
        rollout.update_weights(gathered(2.0, then=silent("/health", servers[1])))  # it is silent in the middle
        assert arrived(a, weights(2.0)) and arrived(b, weights(2.0)) and a.version == b.version == "2"
        assert b.calls["/resume"] == a.calls["/resume"] - 1
        rollout.pool.request = respond
        rollout.update_weights(iter(weights(3.0)))
        assert arrived(b, weights(3.0)) and not servers[1].failure


def test_weights_that_do_not_arrive_stop_everything_until_they_do(connect):
    """A server that dies during an update is named, and nothing is sampled with incomplete weights."""
    with VllmStandin() as a, VllmStandin() as b:
        rollout, ended = connect(a, b, bucket_bytes=1000), []
        rollout.make_group = partial(GlooGroup, timeout=5.0)

        def gathered():
            for i, named in enumerate(weights()):
                if i == 7:
                    b.die()
                yield named
            ended.append(True)

        with pytest.raises(
            RuntimeError, match=f"update_weights: weights from layers.* expected all servers to load them, got {b.url}"
        ):
            rollout.update_weights(gathered())
        assert ended  # to the end: on other ranks it is a collective
        with pytest.raises(
            RuntimeError, match="got servers whose last weight update failed; call update_weights again"
        ):
            rollout.generate(prompts(1), SAMPLING)
        rollout.make_group = GlooGroup
        rollout.update_weights(iter(weights(2.0)))
        assert arrived(a, weights(2.0)) and rollout.version == 1
        assert [s.version for s in rollout.generate(prompts(1), SAMPLING)] == [1]


def test_an_update_fails_if_the_prefix_cache_is_not_reset(connect):
    with VllmStandin() as a:
        rollout = connect(a)
        a.resets = False
        with pytest.raises(
            RuntimeError, match="update_weights: /reset_prefix_cache: expected success on all servers, got a failure"
        ):
            rollout.update_weights(iter(weights()))
        with pytest.raises(RuntimeError, match="last weight update failed"):
            rollout.generate(prompts(1), SAMPLING)


def test_a_server_that_a_stopped_trainer_left_waiting_is_taken_over(connect):
    """It would hang without a message: its weights may be incomplete, or absent while it sleeps."""
    with VllmStandin() as a:
        a.paused = True
        rollout = connect(a)
        with pytest.raises(
            RuntimeError, match="got servers whose last weight update failed; call update_weights again"
        ):
            rollout.generate(prompts(1), SAMPLING)
        assert [path for path in a.order if path in ROUTES or path == "/wake_up"] == [
            "/finish_weight_update", "/wake_up", "/resume",
        ]  # fmt: skip
        rollout.update_weights(iter(weights()))
        check(rollout.generate(prompts(2), SAMPLING), prompts(2), 1)


def test_a_server_of_another_trainer_is_left_alone(connect):
    """Taking it over would abort the other trainer's update."""
    with VllmStandin() as a:
        a.paused, a.taken_by = True, "the run in /runs/first"
        with pytest.raises(ValueError, match=f"servers: {a.url}: .* taken by the run in /runs/first"):
            connect(a)
        assert set(a.order) == {"/health", "/rlkit/claim"}


def test_other_weights_than_expected_are_an_error(connect):
    with VllmStandin() as a:
        rollout = connect(a)
        rollout.update_weights(iter(weights()))
        for version in ("default", "5"):  # it was started again; another run sends it weights
            a.version = version
            with pytest.raises(RuntimeError, match=rf"{a.url}: expected tokens of weight version 1, got \[[05]\]"):
                rollout.generate(prompts(1), SAMPLING)
        assert connect(a).version == 5  # whoever comes next counts on


def test_images_that_attend_to_later_tokens_are_refused_by_servers_on_a_cpu(connect):
    """As by rollout `vllm` there. A server that does not say its device is given them."""
    request = prompt_sample([10, 11], images=[Image.new("RGB", (4, 4))])
    with VllmStandin() as server:
        for server.dtype in ("", "float32"):
            rollout = connect(server)
            rollout.config = AutoConfig.for_model("gemma3")
            assert len(rollout.generate(prompts(1), SAMPLING)) == 1
            if not server.dtype:
                assert len(rollout.generate([request], SAMPLING)) == 1
                continue
            with pytest.raises(ValueError, match="attend to earlier ones only, .* on a CPU, got gemma3; use rollout"):
                rollout.generate([request], SAMPLING)


def on_two_ranks(*arguments):
    """The lines that on_server_ranks.py prints."""
    script = str(Path(__file__).with_name("on_server_ranks.py"))
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr[-3000:]
    return sorted(done.stdout.split("\n"))[1:]


def test_ranks_agree(tiny_dir):
    """Rank 0 sends while both ranks gather; a failure on rank 0 is raised on both."""
    with VllmStandin() as a:
        assert on_two_ranks(tiny_dir, a.url) == [
            "0 1 True update_weights: sent on purpose",
            "1 1 True rank 0: expected a reply from the servers, got an error; see the message of rank 0",
        ]
        assert a.version == "1" and a.calls["/update_weights"] == 1


def test_all_ranks_exclude_the_servers_that_rank_0_excludes(tiny_dir):
    """From the beginning of an update, as their requests may wait for a server with room."""
    with VllmStandin() as a, VllmStandin() as b:
        excluded = [True, True, True, False, True, False]  # during and after each of three updates
        assert on_two_ranks(tiny_dir, f"{a.url},{b.url}") == [f"{rank} {excluded}" for rank in range(2)]
        assert a.version == b.version == "3" and b.calls["/resume"] == a.calls["/resume"] - 1


def test_images_are_sent_once_per_prompt_without_loss(connect, processor):
    request = encode_prompt(processor, load_task("digits").train[0], group_id=0)
    with VllmStandin() as a:
        a.expanded[tuple(request.compact_ids)] = request.token_ids
        samples = connect(a).generate([request], SAMPLING, n=5)
        (body,) = a.bodies
        assert len(samples) == 5 and body["token_ids"] == request.compact_ids and body["sampling_params"]["n"] == 5
        (part,) = body["content_parts"]
        sent = Image.open(io.BytesIO(base64.b64decode(part["url"].removeprefix("data:image/bmp;base64,"))))
        assert part["type"] == "image_url" and np.array_equal(np.asarray(sent), np.asarray(request.images[0]))
        a.expanded[tuple(request.compact_ids)] = request.token_ids[1:]
        with pytest.raises(ValueError, match="the trainer's 21 tokens, got 20, the first difference at token 0"):
            connect(a).generate([request], SAMPLING)


def test_videos_and_audios_are_sent_as_arrays(connect, processor):
    pytest.importorskip("torchvision")
    request = encode_prompt(processor, load_task("digits").train[0], group_id=0)
    rng = np.random.default_rng(0)
    video = Video(rng.integers(0, 256, (2, 28, 28, 3), dtype="uint8"), 2.5)
    audio = Audio(rng.random(100, "float32"), 16000)
    with VllmStandin() as a:
        a.expanded[tuple(request.compact_ids)] = request.token_ids
        connect(a).generate([replace(request, videos=[video], audios=[audio])], SAMPLING)
        parts = a.bodies[0]["content_parts"]
        assert [part["type"] for part in parts] == ["image_url", "video_url", "audio_url"]
        frames, samples = (arrays_of(part["url"]) for part in parts[1:])
        assert np.array_equal(frames["frames"], video.frames) and frames["fps"] == 2.5
        assert np.array_equal(samples["samples"], audio.samples) and samples["rate"] == 16000
        assert arrays_of(parts[0]["url"]) is None


def test_videos_of_qwen_omni_are_refused_with_the_row(connect):
    """A vLLM server would assume a frame rate of its own."""
    video = Video(np.zeros((2, 28, 28, 3), "uint8"), 2.0)
    with VllmStandin() as a:
        rollout = connect(a)
        rollout.processor = type("Qwen3OmniMoeProcessor", (), {})()
        (request,) = prompts(1)
        for videos in ([video], [video, video._replace(fps=4.0)]):
            with pytest.raises(ValueError) as caught:
                rollout.generate([replace(request, videos=videos)], SAMPLING)
            assert ": videos: expected none of Qwen-Omni for a vLLM server, which takes no frame" in str(caught.value)


def test_sleep_and_wake(connect):
    with VllmStandin() as a:
        rollout = connect(a)
        rollout.wake_up()
        rollout.sleep()
        rollout.sleep()
        rollout.wake_up()
        rollout.update_weights(iter(weights()))
        assert [path for path in a.order if path in ("/sleep", "/wake_up", "/resume")] == [
            "/sleep", "/wake_up", "/wake_up", "/resume",
        ]  # fmt: skip


def test_a_server_that_died_while_asleep_is_left_out(connect):
    with VllmStandin() as a, VllmStandin() as b:
        rollout = connect(a, b)
        rollout.sleep()
        a.die()
        rollout.wake_up()
        rollout.update_weights(iter(weights()))
        check(rollout.generate(prompts(4), SAMPLING), prompts(4), 1)
        assert len(b.answered) == 4 and arrived(b, weights())
        b.die()
        with pytest.raises(RuntimeError, match="expected at least one that responds, got none"):
            rollout.update_weights(iter(weights()))


def test_cancelled_requests_are_aborted_on_the_server(connect):
    with VllmStandin() as a:
        rollout = connect(a)
        a.holds = lambda *_: True  # they never end
        future = rollout.submit(prompts(3), Sampling(400), 1)
        until(lambda: a.now == 3)
        future.cancel()
        until(lambda: a.now == 0 and not any(rollout.pool.load.read().values()), 50)
        with pytest.raises(ValueError, match="out of vocabulary"):
            rollout.generate([*prompts(3), prompt_sample([10_000])], Sampling(200))
        until(lambda: a.now == 0, 50)  # one that is refused cancels the others


def test_bad_servers_are_named(connect):
    with pytest.raises(
        ValueError,
        match=r"urls: expected a server at http://127.0.0.1:9 within 0.3 s, got none: .*Start servers with: python -m",
    ):
        connect("http://127.0.0.1:9", connect_timeout=0.3)
    cases = [
        ({"model": "other"}, "expected the model '.*tiny', got 'other'"),
        ({"release": "0.28.1"}, "expected vLLM >=0.32,<0.33, got 0.28.1"),
        (
            {"logprobs": "raw"},
            "expected logprobs of the sampled distribution, got those of the raw logits; start it with --logprobs",
        ),
        (
            {"pages": ["/weight_info"]},
            "expected a vLLM server for training, got .*weight_info: expected status 200, got 404",
        ),
        ({"pages": ["/inference/v1/generate"]}, "expected a server that takes token ids, got .* got 404"),
        (
            {"broken": ["/inference/v1/generate"]},
            "expected one sampled token, got .* 500: out of luck; see the output of the server",
        ),
    ]
    for options, message in cases:
        with VllmStandin(**options) as server, pytest.raises(ValueError, match=f"{server.url}: {message}"):
            connect(server)


def test_a_connection_that_takes_too_long_is_named(monkeypatch):
    """The queue of a socket that nothing accepts from is full, so Linux responses no further connection."""
    monkeypatch.setattr("rlkit.rollout.servers.pool.CONNECT_SECONDS", 0.3)
    with ExitStack() as sockets:
        listener = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        pool = ServerPool(url)
        with pytest.raises(ServerUnavailable, match=f"^{url}/health: expected a connection within 0.3 s, got none$"):
            pool.run(pool.request(pool.servers[0], "GET", "/health"))
        pool.close()


def test_bad_input_is_named(connect, monkeypatch):
    with VllmStandin() as a:
        rollout = connect(a)
        with pytest.raises(
            ValueError, match="group 7: expected at most 512 tokens .*, got 510 \+ 4 \(max_new_tokens\)"
        ):
            rollout.generate([prompt_sample([10] * 510, group_id=7)], SAMPLING)
        with pytest.raises(ValueError, match=f"group 8: {a.url}.*400: Token id 10000 is out of vocabulary"):
            rollout.generate([prompt_sample([10_000], group_id=8)], SAMPLING)
        with pytest.raises(ValueError, match="row 3: expected an image that can be saved as BMP"):
            rollout.generate([prompt_sample([10], images=["nothing"], row={"where": "row 3"})], SAMPLING)
        assert not any(rollout.pool.load.read().values())
        monkeypatch.setattr("rlkit.rollout.servers.rollout.suppressed_token_ids", lambda *_: torch.arange(1025))
        with pytest.raises(
            ValueError, match="model: expected at most 1024 suppressed tokens.*, got 1025 .* vocabulary larger"
        ):
            connect(a)
        a.dtype = "float32"  # vLLM's runner V1 takes any number
        connect(a).close()
        a.v2_model_runner = True
        with pytest.raises(ValueError, match="got 1025 .*: set VLLM_USE_V2_MODEL_RUNNER=0 in the environment of vLLM"):
            connect(a)
        with pytest.raises(ValueError, match="transfer: expected one of nccl, gloo, got 'ucx'"):
            connect(a, transfer="ucx")
        with pytest.raises(ValueError, match="max_sequences, attempts: expected at least 1, got 0 and 4"):
            connect(a, max_sequences=0)
    for urls in ("127.0.0.1:8000", "", ["http://a", "http://a/"]):
        with pytest.raises(ValueError, match="urls: "):
            ServerPool(urls)
    with pytest.raises(ValueError, match="row 4: expected an image that can be saved as BMP"):
        image_data_url(None, "row 4")


def test_servers_listen_only_on_the_given_address():
    group = GlooGroup(2)
    socket.create_connection(("127.0.0.1", group.port), 5).close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", group.port), 5)
    flags = command("m", PreTrainedConfig(), "127.0.0.1", 8000, 1, on_gpu=False)
    assert flags[flags.index("--host") + 1] == "127.0.0.1" and "--kv-cache-memory-bytes" in flags
    env = environment("127.0.0.1", 2, on_gpu=False)
    assert env["VLLM_HOST_IP"] == "127.0.0.1" and "VLLM_ALLOW_INSECURE_SERIALIZATION" not in env


@pytest.mark.parametrize("tuned", [True, False])
def test_a_server_of_llama4_has_the_attention_temperature_of_its_config(tmp_path, tuned):
    """By default vLLM switches it off for sequences of up to 32,768 tokens, and on for longer ones."""
    config = {**BASE, **TEXT["llama4_text"], "attn_temperature_tuning": tuned}
    AutoConfig.for_model("llama4_text", **config).save_pretrained(tmp_path)
    flags = command(str(tmp_path), load_config(str(tmp_path)), "127.0.0.1", 8000, 1, on_gpu=False)
    assert json.loads(flags[flags.index("--override-generation-config") + 1]) == {"attn_temperature_tuning": tuned}
    option = '--override-generation-config={"top_k": 5}'
    with (
        pytest.raises(ValueError, match="override-generation-config: expected none for this model, which needs"),
        serving(str(tmp_path), options=[option]),
    ):
        pass


def test_a_group_that_nobody_joins_does_not_hang():
    group = GlooGroup(2, timeout=1.0)
    with pytest.raises(Exception, match="[Tt]imed? ?out|timeout"):
        group.connect()
    with pytest.raises(RuntimeError, match="weights from w on: .* got broadcast: expected connect\(\) before it"):
        send_weights([("w", torch.ones(3))], group, lambda _: Future())
