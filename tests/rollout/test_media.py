"""Media are encoded once, beside the event loop, and while requests are already sent."""

import base64
import io
import sys
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from aiohttp import web
from PIL import Image

from rlkit.data.samples import append_response, prompt_sample
from rlkit.rollout import Sampling
from rlkit.rollout.servers import media
from rlkit.rollout.servers.teacher import VllmTeacher

sys.path.insert(0, str(Path(__file__).parent))
from standin import VllmStandin

SAMPLING = Sampling(2, seed=(7,))
PLAIN = SimpleNamespace(architectures=[], model_type="plain")  # a config


def prompts(count):
    """With two images each, of widths that BMP pads; prompts 0 and 1 show the same second image."""
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (3, 5 + i, 3), dtype="uint8")) for i in range(2 * count)]
    images[3] = images[1]
    return [prompt_sample([10 + i, 11], images=images[2 * i : 2 * i + 2], group_id=i) for i in range(count)]


def pixels(part):
    file = base64.b64decode(part["url"].removeprefix("data:image/bmp;base64,"))
    return np.asarray(Image.open(io.BytesIO(file))).tolist()


@pytest.fixture
def encoded(monkeypatch):
    """How often each medium was encoded, and in which thread."""
    found, encode = Counter(), media.media_part

    def counted(kind, medium, name):
        found[id(medium), threading.current_thread().name] += 1
        return encode(kind, medium, name)

    monkeypatch.setattr(media, "media_part", counted)
    return found


def check(encoded, requests, bodies):
    ids = {id(image) for request in requests for image in request.images}
    assert len(ids) == 5 and encoded == {(medium, "media_0"): 1 for medium in ids}
    for body in bodies:
        request = requests[body["token_ids"][0] - 10]
        assert [pixels(part) for part in body["content_parts"]] == [np.asarray(x).tolist() for x in request.images]


def test_an_image_is_encoded_once_for_all_requests_servers_and_retries(connect, encoded):
    with VllmStandin(faults=["500", "drop"]) as a, VllmStandin() as b:
        requests = prompts(3)
        assert len(connect(a, b, max_sequences=2).generate(requests, SAMPLING, n=4)) == 12
        assert len(a.bodies + b.bodies) == 3 * 2 + 2 and a.bodies and b.bodies
        check(encoded, requests, a.bodies + b.bodies)


class TeacherStandin(VllmStandin):
    async def _generate(self, request):
        self.bodies.append(await request.json())
        await self._fault(request)
        ids = self.bodies[-1]["token_ids"]
        entries = [None] + [{str(token): {"logprob": -1.0}} for token in ids[1:]]
        return web.json_response({"prompt_token_ids": ids, "prompt_logprobs": entries})


def test_a_teacher_encodes_an_image_once_for_all_samples(encoded):
    requests = prompts(3)
    samples = [append_response(one, [30 + i], [0.0]) for one in requests for i in range(4)]
    with TeacherStandin() as a:
        teacher = VllmTeacher(model="tiny", urls=a.url, processor=object(), config=PLAIN)
        assert teacher.context_lengths == [512]
        a.bodies.clear()
        a.faults = ["500"]
        teacher.pool.backoff = 0.01
        assert teacher.infer_batch(samples)["logprobs"].tolist() == [[0.0, 0.0, -1.0]] * 12
        teacher.close()
        assert len(a.bodies) == 13
        check(encoded, requests, a.bodies)


def test_a_teacher_refuses_media_that_its_servers_would_compute_differently():
    request = prompts(2)[0]
    kimi = SimpleNamespace(architectures=["KimiK25ForConditionalGeneration"], model_type="kimi_k25")
    omni = type("Qwen3OmniMoeProcessor", (), {})()
    watching = prompt_sample([10, 11], videos=[object()], group_id=1)
    with TeacherStandin() as a:
        for sample, options, message in (
            (request, {}, "group 0.*: expected a VllmTeacher with its processor and config for samples with images"),
            (request, {"processor": object(), "config": kimi}, "expected none for KimiK25ForConditional.*"),
            (watching, {"processor": omni, "config": PLAIN}, "group 1.*: videos: expected none of Qwen-Omni"),
        ):
            teacher = VllmTeacher(model="tiny", urls=a.url, **options)
            a.bodies.clear()
            with pytest.raises(ValueError, match=message):
                teacher.infer_batch([append_response(sample, [30], [0.0])])
            teacher.close()
            assert not a.bodies


def test_the_first_request_is_sent_before_the_second_image_is_encoded(connect):
    first, second, _ = prompts(3)
    arrived = threading.Event()

    class Waits:
        def save(self, *args, **options):
            assert arrived.wait(20)
            second.images[0].save(*args, **options)

    with VllmStandin() as a:
        a.holds = lambda body, tokens: arrived.set()
        rollout = connect(a)
        future = rollout.submit([first, prompt_sample([11, 11], images=[Waits()], group_id=1)], SAMPLING)
        assert len(rollout.pool.wait(future)) == 2


def test_media_are_kept_until_their_last_request_is_with_response(connect, monkeypatch):
    kept, finished = [], media.MediaEncoder.finished

    def noted(self, request):
        finished(self, request)
        kept.append(len(self.encoded))

    monkeypatch.setattr(media.MediaEncoder, "finished", noted)
    with VllmStandin() as a:
        connect(a, max_sequences=1).generate(prompts(3), SAMPLING, n=2)
    assert kept == [2, 1, 2, 0, 2, 0]
