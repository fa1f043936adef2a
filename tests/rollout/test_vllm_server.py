"""Two real vLLM servers beside the engine whose weights they are sent; the last test kills one of them."""

import math
import os
import shutil
import signal
import socket
import sys
import time
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import requests
import torch
from free_ports import free_ports
from PIL import Image

from rlkit.data import collate
from rlkit.data.samples import append_response, prompt_sample
from rlkit.engines import make_engine
from rlkit.losses import token_mean
from rlkit.rollout import Sampling, make_rollout
from rlkit.rollout.adapters import serialize_adapter
from rlkit.rollout.serve import serving
from rlkit.rollout.servers.teacher import VllmTeacher
from rlkit.rollout.servers.token import server_token
from rlkit.vlm import encode_prompt, encode_prompts, load_model, load_processor, lora, suppressed_token_ids
from rlkit.vlm.loading import load_config

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("engines", "recipes")]
import helpers  # noqa: E402
from rows import make_samples  # noqa: E402

OPTIONS = ["--kv-cache-memory-bytes", str(64 << 20), "--max-model-len", "512", "--max-num-seqs", "64"]
OPTIONS += ["--enable-lora", "--max-lora-rank", "8"]
SAMPLING = Sampling(6, temperature=0.8, seed=(1,))


@pytest.fixture(scope="module")
def processor(tiny_dir):
    return load_processor(tiny_dir)


def with_weights(tiny_dir, processor, weights=()):
    """An engine whose parameters are these."""
    model = load_model(tiny_dir)
    with torch.no_grad():
        for name, weight in weights:
            model.get_parameter(name).copy_(weight)
    return engine_of(model, processor)


def with_adapters(tiny_dir, processor, **options):
    """An engine with adapters, none of them zero."""
    torch.manual_seed(1)
    model = lora(load_model(tiny_dir), 4, 8, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return engine_of(model, processor)


def engine_of(model, processor):
    suppressed = suppressed_token_ids(model.config, processor.tokenizer)
    sgd = {"optimizer": lambda weights: torch.optim.SGD(weights, lr=2.0)}
    return make_engine("fsdp2", model=model, suppressed_token_ids=suppressed, temperature=0.8, **sgd)


@pytest.fixture(scope="module")
def engine(tiny_dir, processor):
    return with_weights(tiny_dir, processor)


@pytest.fixture(scope="module")
def servers(tiny_dir, tmp_path_factory):
    logs = tmp_path_factory.mktemp("servers")
    with serving(tiny_dir, count=2, port=free_ports(2), logs=logs, options=OPTIONS) as servers:
        yield servers


def connected(tiny_dir, processor, servers):
    urls = list(servers)
    return make_rollout(
        "vllm_server", model=tiny_dir, processor=processor, urls=urls, bucket_bytes=1 << 20, timeout=200
    )


@pytest.fixture(scope="module")
def rollout(tiny_dir, processor, servers):
    rollout = connected(tiny_dir, processor, servers)
    yield rollout
    rollout.close()


@pytest.fixture(scope="module")
def prompts(processor):
    """Images of three sizes, a prompt without one, and one that fills several blocks of the cache."""
    rows = [(s.group_id, s.row) for s in make_samples(processor, responses=(1, 1, 1, 1))]
    return [*encode_prompts(processor, rows)[0], prompt_sample([10 + i % 200 for i in range(300)], group_id=9)]


def apart(engine, samples):
    """Largest and mean difference between the sampler's and the trainer's logprobs."""
    batch = collate(samples)
    gap = (engine.infer_batch(batch)["logprobs"] - batch.rollout_logprobs)[batch.mask].abs()
    return gap.max().item(), gap.mean().item()


def train(engine, samples):
    """One optimizer step; it moves the vision tower and the tied embedding too."""
    before = {name: weight.clone() for name, weight in engine.get_per_tensor_param()}

    def loss_fn(out, mb):
        return token_mean(out.logprobs * mb.rewards[:, None], mb.mask, mb.total_tokens), {}

    rewards = torch.tensor([1.0, -1.0]).repeat(len(samples))[: len(samples)]
    batch = collate(samples)
    batch.rewards.copy_(rewards)
    engine.train_batch(batch, loss_fn)
    moved = {name for name, weight in engine.get_per_tensor_param() if not torch.equal(before[name], weight)}
    assert {"visual", "embed_tokens"} <= {part for name in moved for part in name.split(".")}


def test_a_teacher_on_servers_is_the_teacher_in_this_process(tiny_dir, processor, prompts, servers, tmp_path):
    """Top-k and log-probabilities of responses with and without images; and what the recipe learns from it.

    This is the first test because the servers have the weights of the directory only until a trainer sends its own.
    """
    rollout = connected(tiny_dir, processor, servers)
    samples = rollout.generate(prompts, SAMPLING, n=2)
    rollout.close()
    config = load_config(tiny_dir)
    teacher = VllmTeacher(model=tiny_dir, urls=list(servers), top_k=8, processor=processor, config=config)
    engine, batch = make_engine("fsdp2", model=load_model(tiny_dir)), collate(samples)
    found, expected = teacher.topk_logprobs(samples, 8), engine.topk_logprobs(batch, 8)
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-4, rtol=1e-4)
    assert (found.ids == expected.ids).float().mean() > 0.99 and len(found.ids) == batch.mask.sum() > 50
    logprobs = teacher.infer_batch(samples)["logprobs"]
    torch.testing.assert_close(logprobs, engine.infer_batch(batch)["logprobs"], atol=1e-4, rtol=1e-4)
    with pytest.raises(
        ValueError, match="group .*: expected fewer than 512 tokens, the context of the teacher's servers"
    ):
        teacher.topk_logprobs([prompt_sample([5] * 512)], 8)
    teacher.close()
    with pytest.raises(
        ValueError, match="Requested prompt logprobs of 21, .* greater than max allowed: 20.*--max-logprobs"
    ):
        VllmTeacher(model=tiny_dir, urls=list(servers), top_k=21)
    with pytest.raises(ValueError, match="expected the teacher '/other/model', got '/"):
        VllmTeacher(model="/other/model", urls=list(servers))

    student = tmp_path / "student"
    shutil.copytree(tiny_dir, student)
    model = load_model(tiny_dir)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(student)
    options = ["--model", student, "--teacher", tiny_dir, "--task", "helpers:seen_shortly", "--lr", 1e-3]
    options += ["--loss", "reverse_kl", "--teacher_top_k", 8, "--steps", 2, "--prompts_per_step", 4, "--group_size", 2]
    helpers.run_here("distill", *options, "--teacher_servers", *servers, "--out", tmp_path / "servers")
    helpers.run_here("distill", *options, "--out", tmp_path / "in_process")
    divergences = [[row["divergence"] for row in helpers.rows(tmp_path / of)] for of in ("servers", "in_process")]
    # not to rounding: a server's 8 likeliest tokens may include suppressed ones, which then count for nothing
    assert min(divergences[0]) > 0.03 and divergences[0] == pytest.approx(divergences[1], rel=0.05)


def test_a_recipe_sends_adapters_alone_and_sends_them_again_after_a_resume(tiny_dir, servers, tmp_path):
    """Before other tests send these servers merged weights, after which they take no adapters."""
    options = ["--model", tiny_dir, "--task", "helpers:even_lengths", "--servers", *servers]
    options += ["--prompts_per_step", 8, "--group_size", 4, "--max_new_tokens", 3, "--lr", 0.02, "--warmup_steps", 1]
    options += ["--max_staleness", 0, "--save_every", 1, "--steps", 3, "--out", tmp_path / "run", "--sync_adapters"]
    helpers.stop_after(2, "grpo_async", *options, "--lora_rank", 4)
    helpers.run_here("grpo_async", *options, "--lora_rank", 4, "--resume")
    rows = helpers.numbers(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2] and all(row["grad_norm"] > 0 for row in rows)
    assert all(row["mismatch/abs_dlogp"] < 1e-5 and row["weight_sync/bytes"] < 150_000 for row in rows)
    options[-2] = tmp_path / "refused"
    with pytest.raises(SystemExit, match="grpo_async: .*expected an adapter of at most rank 8 .*, got 16.* start "):
        helpers.run_here("grpo_async", *options, "--lora_rank", 16)


def test_suppressed_tokens_of_a_teacher_get_no_probability(monkeypatch):
    """Those among its likeliest tokens are no entries; the others share their probability."""
    teacher = VllmTeacher.__new__(VllmTeacher)
    teacher.suppressed = frozenset({7, 9})
    scores = [[(0.0, []), (-1.0, [(3, math.log(0.5)), (9, math.log(0.2)), (4, math.log(0.1))])]]
    monkeypatch.setattr(teacher, "_scores", lambda samples, k: scores)
    logprobs, ids = teacher.topk_logprobs([None], 4)
    assert ids.tolist() == [[0, 0, 0, 0], [3, 9, 4, 0]]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([[0.0] * 4, [0.5 / 0.8, 0.0, 0.1 / 0.8, 0.0]]))


def test_end_tokens_and_suppressed_tokens(engine, rollout, prompts, processor):
    samples = rollout.generate(prompts[:2], Sampling(24, seed=(5,)), n=32)
    end, suppressed = processor.tokenizer.eos_token_id, set(engine.suppressed_token_ids.tolist())
    reasons = Counter(s.finish_reason for s in samples)
    assert set(reasons) == {"stop", "length"}
    for s in samples:
        assert (s.finish_reason == "stop") == (s.response_ids[-1] == end) and end not in s.response_ids[:-1]
        assert not suppressed & set(s.response_ids)
        assert s.text == processor.tokenizer.decode(s.response_ids, skip_special_tokens=True)


def test_a_server_serves_its_own_user_and_one_trainer(rollout, servers):
    """No route but /health responses without the token, nothing listens beyond this machine, no path is an adapter."""
    url, process = next(iter(servers.items()))
    known = {"Authorization": f"Bearer {server_token(url)}"}
    routes = requests.get(f"{url}/openapi.json", headers=known).json()["paths"]
    assert {"/update_weights", "/sleep", "/pause", "/collective_rpc", "/v1/models"} & set(routes)
    for path in (*routes, "/rlkit/adapter", "/rlkit/claim", "/openapi.json"):
        assert requests.post(f"{url}{path}", json={}).status_code == (405 if path == "/health" else 401)
    for body in ({"lora_name": "x", "lora_path": "/tmp"}, {"lora_name": "../x", "lora_path": "../x"}):
        assert requests.post(f"{url}/v1/load_lora_adapter", json=body, headers=known).status_code == 404
    body = {"model": "/tmp", "token_ids": [10], "sampling_params": {"max_tokens": 1}}
    assert requests.post(f"{url}/inference/v1/generate", json=body, headers=known).status_code == 404
    own = psutil.Process(process.pid)
    sockets = [one for each in (own, *own.children(recursive=True)) for one in each.net_connections("inet")]
    assert {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
    body = {"id": "other", "owner": "other"}
    refused = requests.post(f"{url}/rlkit/claim", json=body, headers=known, timeout=30)
    assert refused.status_code == 409 and f"process {os.getpid()} on {socket.gethostname()}" in refused.json()["error"]


def test_adapters_alone_are_enough(tiny_dir, processor, engine, rollout, prompts):
    """Sent twice with a step in between; the base weights are not sent."""
    trainer = with_adapters(tiny_dir, processor)
    whole = sum(weight.nbytes for _, weight in trainer.get_per_tensor_param())
    assert len(serialize_adapter(*trainer.get_adapter())) < whole / 20
    samples = rollout.generate(prompts, SAMPLING, n=4)
    for version in (rollout.version + 1, rollout.version + 2):
        assert apart(trainer, samples)[0] > 0.05
        rollout.update_adapter(*trainer.get_adapter())
        samples = rollout.generate(prompts, SAMPLING, n=4)
        assert apart(trainer, samples)[0] < 1e-5
        assert {(s.version, *s.versions) for s in samples} == {
            (version, *[version] * len(s.response_ids)) for s in samples
        }
        trainer.train_batch(collate(samples), lambda out, mb: (token_mean(out.logprobs, mb.mask, mb.total_tokens), {}))
    with pytest.raises(RuntimeError, match="expected adapters of the language model only, got .*visual"):
        rollout.update_adapter(*with_adapters(tiny_dir, processor, adapt_towers=True).get_adapter())
    rollout.update_weights(engine.get_per_tensor_param())
    assert apart(engine, rollout.generate(prompts, SAMPLING))[0] < 1e-5  # nothing is added any more
    with pytest.raises(
        RuntimeError, match="expected the base weights that vLLM loaded, got those of a previous update_weights"
    ):
        rollout.update_adapter(*trainer.get_adapter())
    rollout.update_weights(engine.get_per_tensor_param())


def test_videos_are_sampled_with_the_frames_that_the_trainer_sees(engine, rollout, processor):
    """Alone, and beside an image and another video; the frames and times of each are its own."""
    pytest.importorskip("torchvision")
    rng = np.random.default_rng(0)
    clips = [
        {"frames": rng.integers(0, 256, (n, 56, 84, 3), dtype="uint8"), "fps": fps} for n, fps in ((3, 2.5), (6, 0.5))
    ]
    image = Image.fromarray(clips[0]["frames"][0])
    rows = [
        {"question": "What digit is this?", "video": clips[0]},
        {"question": "What <video> digit <image> is <video> this?", "images": [image], "videos": clips},
    ]
    prompts = [encode_prompt(processor, row, group_id=i) for i, row in enumerate(rows)]
    assert apart(engine, rollout.generate(prompts, SAMPLING, n=2))[0] < 1e-5
    (slower,) = encode_prompts(processor, [(0, {**rows[0], "video": {**clips[0], "fps": 0.2}})])[0]
    (sample,) = rollout.generate(prompts[:1], SAMPLING)
    moved = replace(sample, vision=slower.vision)  # the trainer's times are another video's
    assert apart(engine, [moved])[0] > 1e-4


def test_logprobs_are_the_trainers_whenever_weights_were_sent(engine, rollout, prompts):
    """With temperature, suppressed tokens and images. Prompts are repeated, so caches must be reset."""
    assert rollout.weight_dtype == torch.float32 and rollout.pool.servers[0].device == "cpu"
    samples, first = rollout.generate(prompts, SAMPLING, n=4), rollout.version
    assert apart(engine, samples)[0] < 1e-5
    assert [(s.group_id, s.number) for s in samples] == [(p.group_id, i) for p in prompts for i in range(4)]
    assert len({tuple(s.response_ids) for s in samples}) > 12 and all(s.version == first for s in samples)
    again = rollout.generate(prompts, SAMPLING, n=4)
    assert [s.response_ids for s in again] == [s.response_ids for s in samples]
    for version in (first + 1, first + 2):
        train(engine, samples)
        assert apart(engine, rollout.generate(prompts, SAMPLING, n=4))[0] > 0.1
        rollout.update_weights(engine.get_per_tensor_param())
        samples = rollout.generate(prompts, SAMPLING, n=4)
        assert apart(engine, samples)[0] < 1e-5
        assert {(s.version, *s.versions) for s in samples} == {
            (version, *[version] * len(s.response_ids)) for s in samples
        }


def test_caches_kept_by_a_server_are_caught(engine, rollout, prompts, monkeypatch):
    """Without a reset, keys, values and image features of the old weights are used again."""
    samples = rollout.generate(prompts, SAMPLING, n=4)
    train(engine, samples)
    post = rollout._post_all
    monkeypatch.setattr(rollout, "_post_all", lambda path, *body: post(path, *body) if "weight" in path else [])
    rollout.update_weights(engine.get_per_tensor_param())
    kept = {s.group_id: [] for s in samples}
    for sample in rollout.generate(prompts, SAMPLING, n=4):
        kept[sample.group_id].append(sample)
    assert apart(engine, kept[9])[0] > 1e-2  # the long prompt's keys and values
    assert apart(engine, kept[0])[0] > 1e-2  # the first prompt's image
    monkeypatch.undo()
    rollout.update_weights(engine.get_per_tensor_param())
    assert apart(engine, rollout.generate(prompts, SAMPLING, n=4))[0] < 1e-5


def test_unfinished_responses_continue_under_new_weights(tiny_dir, processor, engine, rollout, prompts):
    """Weights that arrive during generation: each token has the logprob of the weights that sampled it."""
    sets = [[(name, weight.clone()) for name, weight in engine.get_per_tensor_param()]]
    train(engine, [append_response(p, [20 + i, 30 + i], [0.0, 0.0]) for i, p in enumerate(prompts)])
    sets.append([(name, weight.clone()) for name, weight in engine.get_per_tensor_param()])
    for attempt in range(7):  # until weights came when some responses, not all, were written
        rollout.update_weights(iter(sets[0]))
        future = rollout.submit(prompts[:4], Sampling(400, temperature=0.8, seed=(3, attempt)), 8)
        time.sleep(0.1 * 2**attempt)
        rollout.update_weights(iter(sets[1]))
        old, new = rollout.version - 1, rollout.version
        samples = future.result(timeout=1000)
        assert all(list(s.versions) == sorted(s.versions) and s.version == s.versions[0] for s in samples)
        if mixed := [s for s in samples if set(s.versions) == {old, new}]:
            break
    batch = collate(mixed[:8])
    before = with_weights(tiny_dir, processor, sets[0])
    scored = {new: engine.infer_batch(batch)["logprobs"], old: before.infer_batch(batch)["logprobs"]}
    for row, sample in enumerate(mixed[:8]):
        at = batch.mask[row]
        versions, sampled = torch.tensor(sample.versions), batch.rollout_logprobs[row][at]
        for version in (old, new):
            gap = (scored[version][row][at] - sampled).abs()
            assert gap[versions == version].max() < 2e-5 and gap[versions != version].max() > 1e-3


def test_bad_input_is_named_by_a_real_server(tiny_dir, rollout, processor, servers):
    with pytest.raises(ValueError, match="group 3: expected at most 512 tokens .*, got 510 \+ 6 "):
        rollout.generate([prompt_sample([10] * 510, group_id=3)], SAMPLING)
    with pytest.raises(ValueError, match="group 4: http.*Token id 9999 is out of vocabulary"):
        rollout.generate([prompt_sample([9999], group_id=4)], SAMPLING)
    other = Path(tiny_dir).with_name("other")
    other.symlink_to(tiny_dir)
    with pytest.raises(ValueError, match="expected the model '.*/other', got '.*/tiny'"):
        make_rollout("vllm_server", model=str(other), processor=processor, urls=list(servers))


def test_the_next_batch_is_generated_during_training(engine, rollout, prompts, monkeypatch):
    generated, submit = [], rollout.submit  # (begin, end) of each batch

    def timed_submit(*arguments):
        began, future = time.perf_counter(), submit(*arguments)
        future.add_done_callback(lambda _: generated.append((began, time.perf_counter())))
        return future

    monkeypatch.setattr(rollout, "submit", timed_submit)

    def request(step):
        return rollout.submit(prompts[:3], Sampling(100, temperature=0.8, seed=(8, step)), 4)

    trained, staleness = [], []
    rollout.update_weights(engine.get_per_tensor_param())
    requested = deque([request(0), request(1)])
    for step in range(4):
        samples = requested.popleft().result(timeout=1000)
        began = time.perf_counter()
        staleness.append(max(rollout.version - sample.version for sample in samples))
        engine.train_batch(collate(samples), lambda out, mb: (token_mean(out.logprobs, mb.mask, mb.total_tokens), {}))
        trained.append((began, time.perf_counter()))
        rollout.update_weights(engine.get_per_tensor_param())
        if step < 2:
            requested.append(request(step + 2))
    assert staleness[0] == 0 and max(staleness) == 1
    overlaps = [min(end, last) - max(began, first) for began, end in trained for first, last in generated]
    assert max(overlaps) > 0  # which batches these are is the machine's affair


def test_a_server_killed_in_the_middle(engine, rollout, prompts, servers, caplog):
    """Each response is there once; the other server takes over the rest, and new weights afterwards."""
    many = [prompt_sample([10 + i, 11, 12], group_id=i) for i in range(24)]
    future = rollout.submit(many, Sampling(400, temperature=0.8, seed=(4,)), 4)
    url, process = list(servers.items())[1]
    victim = next(server for server in rollout.pool.servers if server.url == url)
    deadline = time.monotonic() + 60
    while not rollout.pool.load.read()[url] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert rollout.pool.load.read()[url] and not future.done()
    os.killpg(process.pid, signal.SIGKILL)
    samples = future.result(timeout=1000)
    assert [(s.group_id, s.number) for s in samples] == [(i, k) for i in range(24) for k in range(4)]
    assert apart(engine, samples)[0] < 2e-5
    assert victim.failure and f"{url} is excluded" in caplog.text
    rollout.update_weights(engine.get_per_tensor_param())
    samples = rollout.generate(prompts, SAMPLING, n=2)
    assert apart(engine, samples)[0] < 1e-5 and {s.version for s in samples} == {rollout.version}
