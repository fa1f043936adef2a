"""vLLM through the adapter against vLLM alone, and what a hand-over of weights costs.

    OMP_NUM_THREADS=1 pytest benchmarks/test_vllm.py --benchmark-enable --benchmark-group-by=group -s

`generate`: the same engine, prompts, seeds and sampling parameters; bare is `vllm.LLM.generate` with prompts and
parameters made beforehand and nothing done with its outputs. `hand over`: `update_weights` beside one training step of
the same model, with the memory that the process took at most beyond what it had. One size: `-k 1M`.
"""

import time
from pathlib import Path
from statistics import median

import pytest
import torch
import transformers

from rlkit.data import collate
from rlkit.data.samples import append_response, prompt_sample
from rlkit.engines import make_engine
from rlkit.losses import reinforce_loss, token_mean
from rlkit.rollout import Sampling, make_rollout
from rlkit.rollout.vllm_requests import vllm_prompt, vllm_sampling_params
from rlkit.vlm import load_model, load_processor
from rlkit.vlm.tiny import tiny_tokenizer

SIZES = {"1M": (128, 4), "34M": (512, 8)}  # hidden, layers
PROMPTS, GROUP, LONG, NEW = 8, 8, 64, 32


@pytest.fixture(scope="module", params=SIZES)
def work(request, tmp_path_factory):
    """A text model of this size, its engine and its sampler."""
    hidden, layers = SIZES[request.param]
    path = str(tmp_path_factory.mktemp(request.param))
    tokenizer = tiny_tokenizer(["a few words"])
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, eos_token_id=tokenizer.eos_token_id,
        max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    engine = make_engine("fsdp2", model=load_model(path), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-6))
    rollout = make_rollout("vllm", model=path, processor=load_processor(path), max_num_seqs=64, max_model_len=512)
    rollout.end_token_ids = []  # every response has all its tokens
    rollout.size = f"{sum(p.numel() for p in engine.base.parameters()) / 1e6:.0f}M"
    yield engine, rollout
    rollout.close()


def prompts():
    numbers = torch.randint(20, 200, (PROMPTS, LONG), generator=torch.Generator().manual_seed(0)).tolist()
    return [prompt_sample(ids, group_id=i) for i, ids in enumerate(numbers)]


def test_generate(benchmark, work):
    """Both ways in turn, so that what else the machine does hits them alike; the same tokens, at 95 % of the speed."""
    from vllm import SamplingParams

    _, rollout = work
    benchmark.group = f"generate, {rollout.size}"
    requests, sampling = prompts(), Sampling(NEW)
    rule = {"n": GROUP, "suppressed_token_ids": rollout.suppressed_token_ids, "end_token_ids": rollout.end_token_ids}
    params = [SamplingParams(**vllm_sampling_params(sampling, request, **rule)) for request in requests]
    given = [vllm_prompt(request) for request in requests]
    seconds = {"rlkit": [], "vllm alone": []}

    def both():
        began = time.perf_counter()
        samples = rollout.generate(requests, sampling, GROUP)
        between = time.perf_counter()
        outputs = rollout.llm.generate(given, params, use_tqdm=False)
        seconds["vllm alone"].append(time.perf_counter() - between)
        seconds["rlkit"].append(between - began)
        return samples, outputs

    both()
    samples, outputs = benchmark.pedantic(both, rounds=7)
    assert [s.response_ids for s in samples] == [list(a.token_ids) for output in outputs for a in output.outputs]
    assert len(samples) == PROMPTS * GROUP and all(len(s.response_ids) == NEW for s in samples)
    if benchmark.stats:
        speeds = {way: PROMPTS * GROUP * NEW / median(times[1:]) for way, times in seconds.items()}
        benchmark.extra_info |= {f"tokens/s, {way}": round(speed) for way, speed in speeds.items()}
        print(f"{rollout.size}: {benchmark.extra_info}, {speeds['rlkit'] / speeds['vllm alone']:.1%}")
        assert speeds["rlkit"] > 0.95 * speeds["vllm alone"]


def test_weight_sync(benchmark, work):
    """Shorter than a training step of a batch that is a quarter of what is sampled."""
    engine, rollout = work
    benchmark.group = f"hand over, {rollout.size}"
    response = list(range(20, 20 + NEW))
    samples = [append_response(p, response, [-5.0] * NEW) for p in prompts() for _ in range(GROUP // 4)]
    batch = collate(samples, advantages=torch.randn(len(samples)))

    def loss(out, mb):
        losses = reinforce_loss(out.logprobs, out.logprobs.detach(), mb.advantages, mb.mask)
        return token_mean(losses, mb.mask, mb.total_tokens), {}

    def send_weights():
        rollout.update_weights(engine.get_per_tensor_param())
        if rollout.on_gpu:
            torch.cuda.synchronize()

    steps = []
    for _ in range(3):
        began = time.perf_counter()
        engine.train_batch(batch, loss)
        steps.append(time.perf_counter() - began)
    send_weights()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = resident("VmRSS")
    benchmark.pedantic(send_weights, rounds=5)
    parameters = list(engine.base.parameters())
    benchmark.extra_info |= {
        "training step s": round(median(steps[1:]), 3),
        "extra MB": round((resident("VmHWM") - before) / 1024),
        "model MB": round(sum(p.numel() for p in parameters) * 4 / 2**20),
        "largest tensor MB": round(max(p.numel() for p in parameters) * 4 / 2**20, 1),
    }
    if benchmark.stats:
        print(f"{rollout.size}: hand over {benchmark.stats.stats.median:.3f} s, {benchmark.extra_info}")
        assert benchmark.stats.stats.median < median(steps[1:])


def resident(field: str) -> int:
    """Memory of this process in KiB: now (VmRSS), or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))
