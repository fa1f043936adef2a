"""A training step on a tiny vision-language model: sampling, log-probabilities, a loss, an update, an export."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rlkit.advantages import grpo_advantages
from rlkit.data import collate, load_task
from rlkit.doctor.findings import Finding
from rlkit.engines import make_engine
from rlkit.engines.distributed import init_distributed
from rlkit.losses import clipped_policy_loss, token_mean
from rlkit.rollout import Sampling, make_rollout
from rlkit.vlm import build_tiny, encode_prompts, load_model, load_processor, suppressed_token_ids

LARGEST_DIFFERENCE = 1e-3  # between the log-probabilities of sampler and trainer, in float32


def self_check() -> Iterator[Finding]:
    """One GRPO step on images. Rewards are random, so that advantages are not all 0."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    start = time.perf_counter()
    device = init_distributed()
    rows = load_task("digits").train[:16]
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "tiny")
        build_tiny(path, rows, warm_up_steps=0)
        processor, model = load_processor(path), load_model(path)
        engine = make_engine(
            "fsdp2",
            model=model,
            processor=processor,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
            suppressed_token_ids=suppressed_token_ids(model.config, processor.tokenizer),
            compute_dtype=torch.float32,
        )
        rollout = make_rollout("hf", engine.gathered, processor=processor)
        yield Finding("model", f"a vision-language model of {sum(x.numel() for x in model.parameters())} parameters")
        prompts, _ = encode_prompts(processor, enumerate(rows[:4]))
        samples = rollout.generate(prompts, Sampling(8, seed=(0,)), n=4)
        yield Finding("sampling", f"{len(samples)} responses to {len(prompts)} prompts with images on {device}")
        batch = collate(samples)
        logprobs = engine.infer_batch(batch)["logprobs"].cpu()
        difference = ((logprobs - batch.rollout_logprobs) * batch.mask).abs().max().item()
        text = f"sampler and trainer differ by {difference:.1e}"
        yield Finding("log-probabilities", text, difference < LARGEST_DIFFERENCE)
        rewards = torch.rand(len(samples), generator=torch.Generator().manual_seed(0))
        batch.add(advantages=grpo_advantages(rewards, batch.group_ids))

        def loss_fn(out: Any, mb: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = clipped_policy_loss(out.logprobs, out.logprobs.detach(), mb.advantages, mb.mask)
            return token_mean(loss, mb.mask, total=mb.total_tokens), {}

        metrics = engine.train_batch(batch, loss_fn)
        changed = (engine.infer_batch(batch)["logprobs"].cpu() - logprobs).abs().max().item()
        finite = 0 < metrics["grad_norm"] < float("inf")
        yield Finding("training step", f"gradient norm {metrics['grad_norm']:.3g}", finite)
        yield Finding("update", f"log-probabilities changed by up to {changed:.2g}", changed > 0)
        engine.export_hf(Path(folder) / "exported")
        load_model(str(Path(folder) / "exported"))
        yield Finding("export", "can be loaded by transformers")
    yield Finding("time", f"{time.perf_counter() - start:.1f} s", None)
