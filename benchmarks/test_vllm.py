"""vLLM through the adapter against vLLM alone, and what a hand-over of weights costs.

    OMP_NUM_THREADS=1 pytest benchmarks/test_vllm.py --benchmark-enable --benchmark-group-by=group

`generate`: the same engine, prompts, seeds and sampling parameters; bare is `vllm.LLM.generate` with prompts and
parameters made beforehand and nothing done with its outputs. `hand over`: `update_weights` beside one training step of
the same model, with the memory that the process took at most beyond what it had.
"""

from pathlib import Path

import pytest
import torch
import transformers

from rlkit.data import collate
from rlkit.data.samples import extend, prompt
from rlkit.engines import make_engine
from rlkit.losses import reinforce_loss, token_mean
from rlkit.rollout import Sampling, make_rollout
from rlkit.rollout.vllm_inputs import request_prompt, sampling_options
from rlkit.vlm import load_model, load_processor
from rlkit.vlm.tiny import tiny_tokenizer

SIZES = {"1M": (128, 4), "26M": (512, 8)}  # hidden, layers
PROMPTS, GROUP, LONG, NEW = 8, 8, 64, 64


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
    rollout.ends = []  # every answer has all its tokens
    rollout.size = f"{sum(p.numel() for p in engine.base.parameters()) / 1e6:.0f}M"
    yield engine, rollout
    rollout.close()


def prompts():
    numbers = torch.randint(20, 200, (PROMPTS, LONG), generator=torch.Generator().manual_seed(0)).tolist()
    return [prompt(ids, group_id=i) for i, ids in enumerate(numbers)]


@pytest.mark.parametrize("way", ["rlkit", "vllm alone"])
def test_generate(benchmark, work, way):
    from vllm import SamplingParams

    _, rollout = work
    benchmark.group = f"generate, {rollout.size}"
    requests, sampling = prompts(), Sampling(NEW)
    rule = {"n": GROUP, "unsampled": rollout.unsampled, "ends": rollout.ends}
    params = [SamplingParams(**sampling_options(sampling, request, **rule)) for request in requests]
    given = [request_prompt(request) for request in requests]
    ways = {
        "rlkit": lambda: [s.response_ids for s in rollout.generate(requests, sampling, GROUP)],
        "vllm alone": lambda: rollout.llm.generate(given, params, use_tqdm=False),
    }
    came = benchmark.pedantic(ways[way], rounds=9, warmup_rounds=1)
    if way == "vllm alone":
        came = [list(answer.token_ids) for output in came for answer in output.outputs]
    assert len(came) == PROMPTS * GROUP and all(len(ids) == NEW for ids in came)
    if benchmark.stats:
        benchmark.extra_info["tokens/s"] = round(PROMPTS * GROUP * NEW / benchmark.stats.stats.median)


@pytest.mark.parametrize("what", ["hand over", "training step"])
def test_hand_over(benchmark, work, what):
    engine, rollout = work
    benchmark.group = f"hand over, {rollout.size}"
    samples = [extend(p, list(range(20, 20 + NEW)), [-5.0] * NEW) for p in prompts() for _ in range(GROUP)]
    batch = collate(samples, advantages=torch.randn(len(samples)))

    def loss(out, mb):
        losses = reinforce_loss(out.logprobs, out.logprobs.detach(), mb.advantages, mb.mask)
        return token_mean(losses, mb.mask, mb.total_tokens), {}

    ways = {
        "hand over": lambda: rollout.update_weights(engine.get_per_tensor_param()),
        "training step": lambda: engine.train_batch(batch, loss),
    }
    ways[what]()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = resident("VmRSS")
    benchmark.pedantic(ways[what], rounds=5, warmup_rounds=1)
    benchmark.extra_info["extra MB"] = round((resident("VmHWM") - before) / 1024)


def resident(field: str) -> int:
    """Memory of this process in KiB: now (VmRSS), or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))
