"""What samplers do on GPUs alone: memory freed while the trainer works, weights over NCCL. Not run yet."""

import functools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rlkit.data import collate
from rlkit.data.samples import prompt_sample
from rlkit.engines import make_engine
from rlkit.rollout import Sampling, make_rollout
from rlkit.rollout.serve import serving
from rlkit.vlm import encode_prompt, load_model, load_processor, lora, suppressed_token_ids

sys.path.insert(0, str(Path(__file__).parent))
from free_ports import free_ports
from vllm_models import EXPERTS, build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SAMPLING = Sampling(16, temperature=0.8, seed=(1,))
OPTIONS = ["--gpu-memory-utilization", "0.4", "--max-model-len", "512"]  # of servers
PROMPTS = [prompt_sample([10 + i, 11, 12], group_id=i) for i in range(8)]


def prompts_with_images(processor):
    """The same, but each of the last two has an image of its own size."""
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in ((56, 56), (84, 56))]
    rows = [{"question": "What digit is this?", "images": [image]} for image in images]
    return PROMPTS[:6] + [encode_prompt(processor, row, group_id=6 + i) for i, row in enumerate(rows)]


def in_own_process(test):
    """Run a test by a pytest of its own: vLLM's allocator for sleep mode serves one engine in a process."""

    @functools.wraps(test)
    def run(**fixtures):
        if os.environ.get("IN_OWN_PROCESS"):
            return test(**fixtures)
        command = [sys.executable, "-m", "pytest", "-m", "gpu", f"{__file__}::{test.__name__}"]
        env = {**os.environ, "IN_OWN_PROCESS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)
        assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-5000:] + done.stderr[-5000:]

    return run


def new_engine(tiny_dir, processor, *, lora_rank=0, **more):
    model = load_model(tiny_dir)
    optimizer = {"optimizer": lambda weights: torch.optim.SGD(weights, lr=2.0)}
    if lora_rank:
        model = lora(model, lora_rank, 8)
        optimizer = {"optimizer": lambda weights: torch.optim.Adam(weights, lr=0.05)}
    suppressed = suppressed_token_ids(model.config, getattr(processor, "tokenizer", processor))
    options = {"suppressed_token_ids": suppressed, "temperature": 0.8, **optimizer, **more}
    return make_engine("fsdp2", model=model, device="cuda", **options)


def train(engine, samples):
    engine.train_batch(collate(samples), lambda out, mb: ((out.logprobs * mb.mask).sum() / mb.total_tokens, {}))


def mean_gap(engine, samples):
    """Mismatch of sampler and trainer in bfloat16: a few hundredths from rounding, tenths with other weights or without
    an image. Of the means over rows with and without images, the larger one."""
    batch = collate(samples)
    gaps = (engine.infer_batch(batch)["logprobs"] - batch.rollout_logprobs).abs()
    has_image = torch.tensor([bool(sample.vision) for sample in samples])
    return max(gaps[rows][batch.mask[rows]].mean() for rows in (has_image, ~has_image) if rows.any())


@in_own_process
def test_a_sleeping_sampler_leaves_its_memory_to_the_trainer(tiny_dir):
    processor = load_processor(tiny_dir)
    prompts = prompts_with_images(processor)
    engine = new_engine(tiny_dir, processor)
    rollout = make_rollout("vllm", model=tiny_dir, processor=processor, gpu_memory_utilization=0.4)
    samples = rollout.generate(prompts, SAMPLING, n=4)
    assert mean_gap(engine, samples) < 0.05
    awake, whole = torch.cuda.mem_get_info()
    rollout.sleep()
    assert torch.cuda.mem_get_info()[0] - awake > 0.2 * whole
    torch.empty(int(0.7 * whole), dtype=torch.uint8, device="cuda")  # of a step: it goes, and the allocator keeps it
    with pytest.raises(RuntimeError, match="asleep"):
        rollout.generate(prompts, SAMPLING)
    train(engine, samples)
    rollout.wake_up()
    rollout.update_weights(engine.get_per_tensor_param())
    assert mean_gap(engine, rollout.generate(prompts, SAMPLING, n=4)) < 0.05
    assert mean_gap(engine, samples) > 0.1  # of the weights before
    rollout.close()


@in_own_process
def test_an_engine_can_be_started_after_one_that_was_closed_asleep(tiny_dir):
    processor = load_processor(tiny_dir)
    for _ in range(2):
        rollout = make_rollout("vllm", model=tiny_dir, processor=processor, gpu_memory_utilization=0.4)
        assert len(rollout.generate(PROMPTS, SAMPLING)) == len(PROMPTS)
        rollout.sleep()
        rollout.close()
        del rollout


@in_own_process
def test_adapters_alone_join_a_base_model_that_slept(tiny_dir):
    """Sleeping, vLLM keeps the base model in host memory; its memory on the GPU is the trainer's meanwhile."""
    processor = load_processor(tiny_dir)
    prompts = prompts_with_images(processor)
    engine = new_engine(tiny_dir, processor, lora_rank=4)
    options = {"gpu_memory_utilization": 0.4, "enable_lora": True, "max_lora_rank": 8}
    rollout = make_rollout("vllm", model=tiny_dir, processor=processor, **options)
    for _ in range(3):
        rollout.wake_up()
        rollout.update_adapter(*engine.get_adapter(1 << 20, torch.bfloat16))
        samples = rollout.generate(prompts, SAMPLING, n=4)
        fresh = mean_gap(engine, samples)
        awake, whole = torch.cuda.mem_get_info()
        rollout.sleep()
        assert torch.cuda.mem_get_info()[0] - awake > 0.2 * whole
        train(engine, samples)
        assert fresh < 0.05 and mean_gap(engine, samples) > 2 * fresh
    assert len(rollout.llm.llm_engine.list_loras()) == 1
    rollout.close()


def test_hf_samples_with_the_trained_weights(tiny_dir):
    processor = load_processor(tiny_dir)
    prompts = prompts_with_images(processor)
    engine = new_engine(tiny_dir, processor)
    rollout = make_rollout("hf", engine.gathered, model=tiny_dir, processor=processor)
    samples = rollout.generate(prompts, SAMPLING, n=4)
    assert mean_gap(engine, samples) < 0.05
    train(engine, samples)
    assert mean_gap(engine, rollout.generate(prompts, SAMPLING, n=4)) < 0.05
    assert mean_gap(engine, samples) > 0.1  # of the weights before


@in_own_process
def test_the_trainer_repeats_vllms_choice_of_experts(tmp_path):
    build("qwen3_moe", str(tmp_path))
    processor = load_processor(str(tmp_path))
    options = {"enable_return_routed_experts": True, "gpu_memory_utilization": 0.4}
    rollout = make_rollout("vllm", model=str(tmp_path), processor=processor, **options)
    samples = rollout.generate(PROMPTS, SAMPLING, n=4)
    rollout.close()
    check_replay(str(tmp_path), processor, samples)


def check_replay(path, processor, samples):
    """Recorded experts give the sampler's logprobs, other experts others."""
    assert all(len(sample.routed_experts) == len(sample.token_ids) - 1 for sample in samples)
    engine = new_engine(path, processor, router_replay=True)
    others = [
        replace(sample, routed_experts=(sample.routed_experts + 1) % EXPERTS["num_experts"]) for sample in samples
    ]
    assert mean_gap(engine, samples) < 0.05 and mean_gap(engine, others) > 0.1


@in_own_process
def test_an_fp8_sampler_quantises_what_arrives(tmp_path):
    build("qwen2", str(tmp_path))
    processor = load_processor(str(tmp_path))
    engine = new_engine(str(tmp_path), processor)
    options = {"quantization": "fp8", "gpu_memory_utilization": 0.4}
    rollout = make_rollout("vllm", model=str(tmp_path), processor=processor, **options)
    samples = rollout.generate(PROMPTS, SAMPLING, n=4)
    rounding = mean_gap(engine, samples)
    train(engine, samples)
    stale = mean_gap(engine, rollout.generate(PROMPTS, SAMPLING, n=4))
    rollout.update_weights(engine.get_per_tensor_param())
    fresh = mean_gap(engine, rollout.generate(PROMPTS, SAMPLING, n=4))
    assert rounding < 0.2 and fresh < 0.2 and fresh < 0.5 * stale
    rollout.close()


@in_own_process
def test_kimi_linear_is_sampled_as_it_is_scored(tmp_path):
    check_family("kimi_linear", tmp_path)


@in_own_process
def test_glm_moe_dsa_is_sampled_as_it_is_scored(tmp_path):
    """Of 200 tokens its indexer chooses 64."""
    check_family("glm_moe_dsa", tmp_path)


def check_family(family, path):
    """Responses have the logprobs of the trainer's weights, before an update and after it."""
    from on_vllm_families import build as build_family  # imports what the other tests do not need

    build_family(family, path)
    processor = load_processor(str(path))
    engine = new_engine(str(path), processor)
    size = {"gpu_memory_utilization": 0.4, "max_model_len": 256}
    rollout = make_rollout("vllm", model=str(path), processor=processor, **size)
    prompts = PROMPTS + [prompt_sample([10 + i % 20 for i in range(200)], group_id=len(PROMPTS))]
    samples = rollout.generate(prompts, SAMPLING, n=4)
    assert mean_gap(engine, samples) < 0.05
    train(engine, samples)
    assert mean_gap(engine, rollout.generate(prompts, SAMPLING, n=4)) > 0.1
    rollout.update_weights(engine.get_per_tensor_param())
    assert mean_gap(engine, rollout.generate(prompts, SAMPLING, n=4)) < 0.05
    rollout.close()


def send_weights(engine, rollout, *, asleep):
    """Responses have the logprobs of the weights that were sent; the server may sleep during training."""
    prompts = prompts_with_images(rollout.processor)
    samples = rollout.generate(prompts, SAMPLING, n=4)
    assert mean_gap(engine, samples) < 0.05
    awake, whole = torch.cuda.mem_get_info()
    if asleep:
        rollout.sleep()
        assert torch.cuda.mem_get_info()[0] - awake > 0.2 * whole
        torch.empty(int(0.7 * whole), dtype=torch.uint8, device="cuda")  # it goes, and the allocator keeps it
    train(engine, samples)
    if asleep:
        rollout.wake_up()
    else:
        assert mean_gap(engine, rollout.generate(prompts, SAMPLING, n=4)) > 0.1
    rollout.update_weights(engine.get_per_tensor_param())
    assert mean_gap(engine, rollout.generate(prompts, SAMPLING, n=4)) < 0.05
    assert mean_gap(engine, samples) > 0.1  # of the weights before


def test_a_server_sleeps_on_the_trainers_own_gpu(tiny_dir, tmp_path):
    """Its weights come over gloo: NCCL refuses two processes on one GPU."""
    processor = load_processor(tiny_dir)
    engine = new_engine(tiny_dir, processor)
    options = [*OPTIONS, "--weight-transfer-config", '{"backend": "rlkit_gloo"}']
    with serving(tiny_dir, port=free_ports(1), logs=tmp_path, options=options) as servers:
        rollout = make_rollout("vllm_server", model=tiny_dir, processor=processor, urls=list(servers), transfer="gloo")
        send_weights(engine, rollout, asleep=True)
        send_weights(engine, rollout, asleep=False)
        rollout.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_weights_go_to_a_server_over_nccl(tiny_dir, tmp_path):
    """The trainer has the first GPU, the server the last."""
    processor = load_processor(tiny_dir)
    engine = new_engine(tiny_dir, processor)
    with serving(tiny_dir, port=free_ports(1), logs=tmp_path, options=OPTIONS) as servers:
        rollout = make_rollout("vllm_server", model=tiny_dir, processor=processor, urls=list(servers))
        send_weights(engine, rollout, asleep=False)
        rollout.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("size", "sent"), [(1, "merged"), (2, "merged"), (2, "adapters")])
def test_vllm_on_two_ranks(tiny_dir, tmp_path, size, sent):
    """An engine on each rank, or one over both, is sent merged weights or adapters by a trainer that is offloaded."""
    script = [str(Path(__file__).with_name("on_vllm_gpu_ranks.py")), tiny_dir, str(tmp_path), str(size), sent, "cuda"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*torchrun, *script], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-5000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["groups"] == [i for i in range(rank, 8, 2) for _ in range(4)]
        assert found["start"] < 0.05 and found["synced"] < 0.05 and found["stale"] > 2 * found["synced"]
