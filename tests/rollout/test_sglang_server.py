"""The client of SGLang servers, against stand-ins that speak the documented protocol; SGLang itself wants a GPU."""

import base64
import io
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from transformers import AutoConfig, Qwen2Config
from waiting import until

from rlkit.data import load_task
from rlkit.data.media import Audio, Video
from rlkit.data.samples import prompt_sample
from rlkit.rollout import Sampling, make_rollout
from rlkit.rollout.sampling import sample_name
from rlkit.rollout.servers.sglang import SglangGroup, group_store
from rlkit.vlm import encode_prompt, load_processor

sys.path.insert(0, str(Path(__file__).parent))
from standin import SglangStandin, written

SAMPLING = Sampling(4, temperature=0.7)
WEIGHTS = [(f"layers.{i}", torch.full((20, 4), float(i))) for i in range(9)] + [("half", torch.ones(3).bfloat16())]


@pytest.fixture(scope="module")
def processor(tiny_dir):
    return load_processor(tiny_dir)


@pytest.fixture
def connect(tiny_dir, processor):
    made = []

    def connect(*servers, **options):
        options = {"model": tiny_dir, "processor": processor, "timeout": 100.0, **options}
        made.append(make_rollout("sglang", urls=[server.url for server in servers], **options))
        made[-1].pool.backoff = 0.01
        return made[-1]

    yield connect
    for rollout in made:
        rollout.close()


def test_responses_are_distributed_over_servers_and_returned_in_order(connect, processor):
    requests = [prompt_sample([10 + i, 11], group_id=i) for i in range(10)]
    with SglangStandin(faults=["500", "drop"]) as a, SglangStandin(faults=["", "die"]) as b:
        rollout = connect(a, b, max_sequences=4)
        samples = rollout.generate(requests, SAMPLING, n=3)
        assert [(s.group_id, s.number) for s in samples] == [(i, k) for i in range(10) for k in range(3)]
        for sample in samples:
            request = requests[sample.group_id]
            ids = written(sum(request.token_ids) + 1000 * sample.number, 4)
            assert sample.token_ids == request.token_ids + ids and sample.finish_reason == "length"
            assert sample.logprobs == [0.0, 0.0, *(-1.0 - t / 100 for t in ids)] and sample.version == 0
        rule = a.bodies[0]["sampling_params"]
        assert rule["temperature"] == 0.7 and rule["stop_token_ids"] == [processor.tokenizer.eos_token_id]
        assert {int(token) for token in rule["logit_bias"]} == set(rollout.suppressed_token_ids)
        assert rule["top_p"] == rule["repetition_penalty"] == 1.0 and rule["top_k"] == -1  # whatever the model's are
        (one,) = rollout.generate(requests[:1], SAMPLING)
        assert one.finish_reason == "length"
        rollout.end_token_ids = one.response_ids[1:2]
        (ended,) = rollout.generate(requests[:1], SAMPLING)
        assert ended.finish_reason == "stop" and ended.response_ids == one.response_ids[:2]


def test_weights_arrive_and_caches_go(connect):
    with SglangStandin() as a, SglangStandin() as b:
        rollout = connect(a, b, bucket_bytes=1000)
        for version in (1, 2):
            sent = [(name, weight * version) for name, weight in WEIGHTS]
            rollout.update_weights(iter(sent))
            for server in (a, b):
                assert all(torch.equal(server.weights[name], weight) for name, weight in sent)
                assert server.version == str(version) and not server.paused
        paths = [path for path in a.order if path in ROUTES]
        assert paths == [ROUTES[-1], ROUTES[0], *[*ROUTES[1:2], *[ROUTES[2]] * 3, *ROUTES[3:]] * 2]
        assert {s.version for s in rollout.generate([prompt_sample([10])], SAMPLING, n=2)} == {2}
        b.version = "default"
        with pytest.raises(RuntimeError, match=r"expected tokens of weight version 2, got \[0\]"):
            rollout.generate([prompt_sample([10 + i], group_id=i) for i in range(9)], SAMPLING)


@pytest.mark.parametrize(
    ("of_server", "of_config", "expected"),
    [
        ("bfloat16", "float32", torch.bfloat16),
        ("half", "bfloat16", torch.float16),
        ("auto", "bfloat16", torch.bfloat16),
        ("auto", "float32", None),  # SGLang replaces float32, by a dtype that depends on the family
        ("", "bfloat16", None),
    ],
)
def test_the_dtype_of_a_server(connect, monkeypatch, of_server, of_config, expected):
    with SglangStandin() as server:
        server.dtype = of_server
        config = Qwen2Config(dtype=of_config)
        monkeypatch.setattr("rlkit.rollout.servers.rollout.load_config", lambda *_, **__: config)
        assert connect(server).weight_dtype == expected


def test_unfinished_responses_continue_under_new_weights(connect):
    """Each token has the version of its weights, and later turns keep the versions of earlier ones."""
    with SglangStandin() as a:
        rollout = connect(a)
        a.holds = lambda body, tokens: tokens >= 8 and a.version == "default"
        future = rollout.submit([prompt_sample([10])], Sampling(30), 2)
        until(lambda: a.steps == 8)
        rollout.update_weights(iter(WEIGHTS))
        first, second = future.result(100)
        assert set(first.versions) == {0, 1} and first.versions == sorted(first.versions) == second.versions
        assert first.version == 0 and len(first.versions) == 30
        (longer,) = rollout.generate([first], SAMPLING)
        assert longer.versions == [*first.versions, *[1] * 4] and longer.version == 0


def test_a_group_is_made_again_after_one_was_lost(connect, caplog):
    """SGLang refuses a second group with the same name: of another server, a failed update, an earlier trainer."""
    with SglangStandin() as a, SglangStandin() as b:
        connect(a, b).update_weights(iter(WEIGHTS))  # by a trainer that was then stopped while it sent weights
        a.paused = b.paused = True
        rollout = connect(a, b)
        rollout.update_weights(iter(WEIGHTS))
        b.die()
        rollout.update_weights(iter(WEIGHTS))
        b.come_back()

        def broken():
            yield WEIGHTS[0]
            raise RuntimeError("no memory")

        with pytest.raises(RuntimeError, match="update_weights: no memory"):
            rollout.update_weights(broken())
        assert a.paused and b.paused
        rollout.update_weights(iter(WEIGHTS))
        assert a.version == b.version == "4" and f"{b.url} is available again" in caplog.text
        assert {s.version for s in rollout.generate([prompt_sample([10])], SAMPLING, n=2)} == {4}


def test_a_server_that_restarted_unnoticed_gets_the_next_weights(connect, caplog):
    with SglangStandin() as a, SglangStandin() as b:
        rollout = connect(a, b)
        rollout.update_weights(iter(WEIGHTS))
        b.die()
        b.come_back()
        rollout.update_weights(iter(WEIGHTS))
        assert set(b.weights) == {name for name, _ in WEIGHTS} and a.version == b.version == "2"
        assert f"{b.url} is excluded: expected weight version 1, got 0" in caplog.text


ROUTES = [
    "/init_weights_update_group", "/pause_generation", "/update_weights_from_distributed", "/flush_cache",
    "/update_weight_version", "/continue_generation",
]  # fmt: skip


def test_the_group_is_the_one_that_torch_makes():
    """SGLang joins with torch's helper for named groups; our group uses the same keys in the store."""
    from torch.distributed.distributed_c10d import _new_process_group_helper

    ours = SglangGroup(1, backend="gloo")
    ours.connect()
    theirs = dist.HashStore()
    _new_process_group_helper(
        1, 0, [], "gloo", dist.PrefixStore("rlkit", theirs), group_name="rlkit", timeout=dist.default_pg_timeout
    )
    store = dist.HashStore()
    group_store(store, "cpu").set("key", "value")
    prefix = "rlkit/rlkit//cpu//"
    assert store.list_keys() == [f"{prefix}key"]
    assert theirs.num_keys() and all(key.startswith(prefix) for key in theirs.list_keys()), theirs.list_keys()


def test_videos_and_audios_are_refused_with_the_row(connect, processor):
    request = encode_prompt(processor, load_task("digits").train[0], group_id=0)
    video, audio = Video(np.zeros((2, 28, 28, 3), "uint8"), 2.0), Audio(np.zeros(100, "float32"), 16000)
    with SglangStandin() as a:
        for media in ({"videos": [video]}, {"audios": [audio]}):
            with pytest.raises(ValueError) as caught:
                connect(a).generate([replace(request, **media)], SAMPLING)
            assert str(caught.value).startswith(
                f"{sample_name(request)}: expected text and images for servers of this kind, got {[*media][0]}; use"
            )


@pytest.mark.parametrize("n", [1, 5])
def test_images_are_sent_once_per_prompt_without_loss(connect, processor, n):
    digits = load_task("digits").train
    request = encode_prompt(processor, {**digits[0], "images": digits[0]["images"] + digits[1]["images"]}, group_id=0)
    with SglangStandin() as a:
        a.expanded[tuple(request.compact_ids)] = request.token_ids
        rollout = connect(a)
        assert len(rollout.generate([request], SAMPLING, n=n)) == n
        (body,) = a.bodies
        for url, image in zip(*body["image_data"], request.images, strict=True):
            sent = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/bmp;base64,"))))
            assert np.array_equal(np.asarray(sent), np.asarray(image))
        assert body["input_ids"] == [request.compact_ids] and body["sampling_params"]["n"] == n
        rollout.update_weights(iter(WEIGHTS))
        rollout.generate([request], SAMPLING, n=n)
        assert Counter(a.embeddings.values()) == {"default": 2, "1": 2}  # no image is taken from the cache of before
        a.expanded[tuple(request.compact_ids)] = [*request.token_ids[:-1], 9]
        with pytest.raises(
            ValueError,
            match=f"tokens, got {len(request.token_ids)}, the first difference at token {len(request.token_ids) - 1}:",
        ):
            connect(a).generate([request], SAMPLING)


def test_routing_comes_with_its_response(connect):
    with SglangStandin() as a:
        a.server["enable_return_routed_experts"] = True
        a.routing = lambda ids: np.array([[[t], [t + 1]] for t in ids[:-1]], dtype=np.int32)  # two layers, one expert
        for sample in connect(a).generate([prompt_sample([10, 11])], SAMPLING, n=2):
            assert sample.routed_experts.tolist() == [[[t], [t + 1]] for t in sample.token_ids[:-1]]
            assert sample.routed_experts.dtype == torch.int16
        assert a.bodies[0]["return_routed_experts"]


def test_routing_is_asked_of_servers_that_return_it(connect):
    with SglangStandin() as a, SglangStandin() as b:
        a.server["enable_return_routed_experts"] = True
        rollout = connect(a, b)
        rollout.generate([prompt_sample([10 + i, 11]) for i in range(4)], SAMPLING)
        assert [body["return_routed_experts"] for body in a.bodies] == [True] * 2
        assert [body["return_routed_experts"] for body in b.bodies] == [False] * 2


def test_sleep_and_wake(connect):
    with SglangStandin() as a:
        rollout = connect(a)
        rollout.sleep()
        assert a.asleep == {"weights", "kv_cache"}
        rollout.wake_up()
        assert a.asleep == {"kv_cache"}
        rollout.update_weights(iter(WEIGHTS))
        assert not a.asleep and rollout.generate([prompt_sample([10])], SAMPLING)[0].version == 1


@pytest.mark.parametrize("second", ["sliding_attention", "full_attention"])
def test_windows_that_sglang_leaves_out_are_refused(connect, tmp_path, processor, second):
    """Its class of Qwen2-MoE has none, also if all layers have one."""
    windows = {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["sliding_attention", second]}
    config = AutoConfig.for_model("qwen2_moe", vocab_size=len(processor.tokenizer), num_hidden_layers=2, **windows)
    config.save_pretrained(tmp_path)
    with SglangStandin(model=str(tmp_path), context=65) as server:
        with pytest.raises(ValueError, match="^max_model_len: .* whose windows SGLang leaves out, got 65"):
            connect(server, model=str(tmp_path))


def test_bad_servers_are_named(connect):
    cases = [
        ({"model": "other"}, "expected the model '.*tiny', got '/models/other'"),
        ({"logprobs": "raw"}, "expected logprobs of the sampled distribution, got those of the raw"),
        ({"pages": ["/server_info"]}, "expected an SGLang server for training, got .* got 404"),
        ({"pages": ["/generate"]}, "expected a server that takes token ids, got .* got 404"),
        (
            {"broken": ["/generate"]},
            "expected one sampled token, got .* 500: out of luck; see the output of the server",
        ),
    ]
    for options, message in cases:
        with SglangStandin(**options) as server, pytest.raises(ValueError, match=f"{server.url}: {message}"):
            connect(server)
    with SglangStandin() as a:
        a.server["dp_size"] = 2
        with pytest.raises(ValueError, match=f"{a.url}: expected dp_size 1 and pp_size 1, got 2 and 1"):
            connect(a)
        a.server["dp_size"] = 1
        rollout = connect(a)
        with pytest.raises(ValueError, match=r"group 2: expected at most 512 tokens .*, got 510 \+ 4 "):
            rollout.generate([prompt_sample([10] * 510, group_id=2)], SAMPLING)
        a.die()
        with pytest.raises(
            RuntimeError,
            match=r"expected at least one that responds, got none \(.*\)\. Start servers with: python -m sglang",
        ):
            rollout.generate([prompt_sample([10])], SAMPLING)
