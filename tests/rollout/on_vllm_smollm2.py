"""Cases of `on_vllm.py`: SmolLM2-135M-Instruct beside its trainer, `smollm2/float32` and `smollm2/bfloat16`, and a
recipe with adapters on two ranks, `two_ranks/smollm2`."""

from pathlib import Path

import torch
import torch.distributed as dist
from helpers import numbers, run_here

from rlkit.data import collate, load_task
from rlkit.engines import make_engine
from rlkit.losses import token_mean
from rlkit.rollout import Sampling, make_rollout
from rlkit.vlm import encode_prompts, load_model, load_processor, lora, model_path

SAMPLING = Sampling(8, temperature=0.8, seed=(0, 1))
SIZE = {"max_model_len": 256, "max_num_seqs": 16, "kv_cache_memory_bytes": 64 << 20, "block_size": 32}
RUN = """
    --model smollm2 --task helpers:even_sums --heldout 0.001 --steps 3 --prompts_per_step 4 --group_size 4 --kl_coef 0
    --lora_rank 8 --lr 2e-3 --warmup_steps 1 --max_new_tokens 8 --max_prompt_tokens 120 --rollout vllm --sync_adapters
    --rollout_options kv_cache_memory_bytes 67108864 max_num_seqs 16
"""


def questions(tokenizer) -> list:
    """Three prompts of the task addition."""
    return encode_prompts(tokenizer, list(enumerate(list(load_task("addition").heldout)[:3])))[0]


def ascent(out, mb):
    """Minus the policy gradient: rewarded responses become less likely, which moves log-probabilities far."""
    return token_mean(mb.advantages[:, None] * out.logprobs, mb.mask, mb.total_tokens), {}


def facts_of(folder: Path, name: str) -> dict:
    """Largest and mean |sampler's - trainer's log-probability| at each stage.

    start: the weights of the files. unsynced: the trainer's adapters have moved. synced: the sampler has the merged
    weights. export: another sampler reads the export. adapter: another, which has the weights of the files, is sent
    the adapters alone. adapter_unsynced: they have moved again. adapter_again: and are sent again.
    """
    path, dtype = model_path("smollm2"), name.rpartition("/")[2]
    tokenizer = load_processor(path)
    prompts = questions(tokenizer)
    torch.manual_seed(0)
    engine = make_engine(
        "fsdp2",
        model=lora(load_model(path), 8, 16),
        processor=tokenizer,
        temperature=SAMPLING.temperature,
        compute_dtype=getattr(torch, dtype),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=5e-3, eps=1e-4),
    )

    def distance(sampler):
        samples = sampler.generate(prompts, SAMPLING, n=2)
        batch = collate(samples)
        gap = (engine.infer_batch(batch)["logprobs"] - batch.rollout_logprobs)[batch.mask].abs()
        return [gap.max().item(), gap.mean().item()], samples

    rollout = make_rollout("vllm", engine.gathered, model=path, processor=tokenizer, dtype=dtype, **SIZE)
    facts = {}
    facts["start"], samples = distance(rollout)
    batch = collate(samples, advantages=torch.tensor([1.0 if s.group_id else -1.0 for s in samples]))
    facts["grad_norm"] = engine.train_batch(batch, ascent)["grad_norm"]
    facts["unsynced"], _ = distance(rollout)
    rollout.update_weights(engine.get_per_tensor_param())
    facts["synced"], _ = distance(rollout)
    rollout.close()

    export = folder / f"export-{dtype}"
    engine.export_hf(export, getattr(torch, dtype))
    reader = make_rollout("vllm", engine.gathered, model=str(export), processor=tokenizer, dtype=dtype, **SIZE)
    facts["export"], _ = distance(reader)
    reader.close()

    beside = make_rollout(
        "vllm", model=path, processor=tokenizer, dtype=dtype, enable_lora=True, max_lora_rank=8, max_loras=1, **SIZE
    )
    facts["adapter_missing"], _ = distance(beside)
    beside.update_adapter(*engine.get_adapter())
    facts["adapter"], _ = distance(beside)
    engine.train_batch(batch, ascent)
    facts["adapter_unsynced"], _ = distance(beside)
    beside.update_adapter(*engine.get_adapter())
    facts["adapter_again"], _ = distance(beside)
    beside.close()
    return facts


def steps_of_two_ranks(folder: Path) -> dict:
    """GRPO with adapters, which are sent alone to an engine on each rank."""
    run_here("grpo_vlm", *RUN.split(), "--out", folder / "recipe")
    dist.barrier()
    return {"steps": numbers(folder / "recipe")}
