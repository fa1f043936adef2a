"""The client of SGLang servers, against stand-ins that speak the documented protocol; SGLang itself wants a GPU."""

import base64
import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from rlkit.data import load_task
from rlkit.data.samples import prompt
from rlkit.rollout import Sampling, make_rollout
from rlkit.rollout.sglang_server import SglangGroup, group_store
from rlkit.vlm import encode, load_processor

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
        options = {"model": tiny_dir, "processor": processor, "connect_timeout": 0.3, "timeout": 20.0, **options}
        made.append(make_rollout("sglang", urls=[server.url for server in servers], **options))
        made[-1].servers.backoff = 0.01
        return made[-1]

    yield connect
    for rollout in made:
        rollout.close()


def test_answers_are_shared_out_and_come_in_order(connect, processor):
    requests = [prompt([10 + i, 11], group_id=i) for i in range(10)]
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
        assert {int(token) for token in rule["logit_bias"]} == set(rollout.unsampled)
        assert len(rollout.generate(requests[:1], SAMPLING)) == 1


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
        assert paths == [ROUTES[0], *[*ROUTES[1:2], *[ROUTES[2]] * 3, *ROUTES[3:]] * 2]
        assert {s.version for s in rollout.generate([prompt([10])], SAMPLING, n=2)} == {2}
        b.version = "default"
        with pytest.raises(RuntimeError, match=r"an answer by weights of version \[0\], 2 expected"):
            rollout.generate([prompt([10 + i], group_id=i) for i in range(9)], SAMPLING)


ROUTES = [
    "/init_weights_update_group", "/pause_generation", "/update_weights_from_distributed", "/flush_cache",
    "/update_weight_version", "/continue_generation",
]  # fmt: skip


def test_the_group_is_the_one_that_torch_makes():
    """SGLang joins by torch's own helper for named groups; ours meets it at the same keys of the store."""
    from torch.distributed.distributed_c10d import _new_process_group_helper

    ours = SglangGroup(1, backend="gloo")
    ours.open()
    theirs = dist.HashStore()
    _new_process_group_helper(
        1, 0, [], "gloo", dist.PrefixStore("rlkit", theirs), group_name="rlkit", timeout=dist.default_pg_timeout
    )
    mine = dist.HashStore()
    group_store(mine, "cpu").set("key", "value")
    prefix = "rlkit/rlkit//cpu//"
    assert mine.list_keys() == [f"{prefix}key"]
    assert theirs.num_keys() and all(key.startswith(prefix) for key in theirs.list_keys()), theirs.list_keys()


def test_images_travel_once_a_prompt_and_pixel_for_pixel(connect, processor):
    request = encode(processor, load_task("digits").train[0], group_id=0)
    with SglangStandin() as a:
        a.expanded[tuple(request.compact_ids)] = request.token_ids
        assert len(connect(a).generate([request], SAMPLING, n=5)) == 5
        (body,) = a.bodies
        (image,) = body["image_data"]
        sent = Image.open(io.BytesIO(base64.b64decode(image.removeprefix("data:image/png;base64,"))))
        assert body["input_ids"] == request.compact_ids and body["sampling_params"]["n"] == 5
        assert np.array_equal(np.asarray(sent), np.asarray(request.images[0]))
        a.expanded[tuple(request.compact_ids)] = request.token_ids[1:]
        with pytest.raises(ValueError, match="expanded the prompt to 20 tokens, training has 21"):
            connect(a).generate([request], SAMPLING)


def test_sleep_and_wake(connect):
    with SglangStandin() as a:
        rollout = connect(a)
        rollout.sleep()
        rollout.wake_up()
        rollout.update_weights(iter(WEIGHTS))
        assert a.calls["/release_memory_occupation"] == 1 and a.calls["/resume_memory_occupation"] == 2


def test_bad_servers_are_named(connect):
    cases = [
        ({"model": "other"}, "serves the model '/models/other'; '.*tiny' expected"),
        ({"logprobs": "raw"}, "gives logprobs of another distribution than it samples from"),
        ({"pages": ["/get_model_info"]}, "is no SGLang server for training: .*answered 404"),
        ({"pages": ["/generate"]}, "does not take tokens: .*answered 404"),
    ]
    for options, message in cases:
        with SglangStandin(**options) as server, pytest.raises(ValueError, match=f"{server.url} {message}"):
            connect(server)
    with SglangStandin() as a:
        rollout = connect(a)
        with pytest.raises(ValueError, match="group 2: 510 prompt tokens and max_new_tokens 4 make 514, the"):
            rollout.generate([prompt([10] * 510, group_id=2)], SAMPLING)
        a.die()
        with pytest.raises(RuntimeError, match=r"no server is left \(.*\)\. Start servers with: python -m sglang"):
            rollout.generate([prompt([10])], SAMPLING)
