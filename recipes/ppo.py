"""PPO with a critic, on text or images: sample answers, value every token of them, take several clipped steps.

    torchrun --nproc-per-node=1 recipes/ppo.py                        # a tiny Qwen2.5-VL learns to read digits
    torchrun --nproc-per-node=8 recipes/ppo.py --model Qwen/Qwen2.5-VL-7B-Instruct --task train.jsonl \\
        --prompts_per_step 512 --mini_batches 4 --max_new_tokens 1024 --lr 1e-6 --critic_lr 1e-5 --kl_coef 0.001

How it differs from the paper (https://arxiv.org/abs/1707.06347) and from InstructGPT (arXiv 2203.02155):
- the critic is a model of its own; it starts as the policy with a head of zeros, not as the reward model.
- the loss is the mean over all tokens of a mini-batch, advantages are whitened over all tokens of the batch, and there
  is no entropy bonus. The KL to the model at the start is in the reward of each token, and off by default.
- an answer that could not be judged is left out; tokens that stand for images can be neither sampled nor scored.

VAPO (https://arxiv.org/abs/2504.05118) is `--critic_lam 1 --length_adaptive_alpha 0.05 --critic_warmup 50 --clip_high
0.28 --lm_coef 0.1`: its critic learns alone at first, from whole returns.
PF-PPO (https://arxiv.org/abs/2409.06957) is `--pf_ppo_best 0.5`: an answer's losses are weighted by how often it would
be drawn, where the paper draws.
"""

import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from rlkit.advantages import gae, kl_in_reward, length_adaptive_lambda, masked_whiten, pf_ppo_weights, rewards_to_tokens
from rlkit.data import Task, collate, judged, load_task, part_means, score, score_parts, step_rows
from rlkit.engines import make_engine
from rlkit.engines.checkpoint import checkpoints, keep_newest
from rlkit.engines.distributed import init_distributed, reduce_metrics
from rlkit.engines.flops import batch_flops
from rlkit.engines.value_head import load_value_model
from rlkit.losses import clipped_policy_loss, clipped_value_loss, kl_k1, kl_k3, token_mean, token_sum
from rlkit.losses.diagnostics import mismatch_stats, ratio_stats
from rlkit.losses.mismatch import importance_weights
from rlkit.report import write_report
from rlkit.rollout import Sampling, make_rollout
from rlkit.tracking import Run, new_directory
from rlkit.vlm import VISION_TOWER, build_tiny, freeze, load_model, lora, trainable_summary
from rlkit.vlm.processors import encode_rows, load_processor, unsampled_ids


@dataclass
class Config:
    model: str = "tiny"  # directory or hub id; "tiny" builds one of 0.7M parameters and warms it up for a few seconds
    critic_model: str = ""  # the same for the critic; `model` by default; an export of a value model keeps its head
    task: str = "digits"  # a built-in, a .jsonl or .parquet file (question, answer, image), or module:function
    rollout: str = "hf"  # what samples: hf (the trained model itself), vllm (in this process), vllm_server or sglang
    servers: tuple[str, ...] = ()  # URLs of the servers; python -m rlkit.rollout.serve starts some
    out: str = ""  # the run's directory; runs/ppo-<task>-seed<seed> by default, numbered if that holds a run
    resume: bool = False  # go on from the newest checkpoint in the run's directory
    trackers: tuple[str, ...] = ()  # told the metrics beside the run's own files: tensorboard, wandb, mlflow, trackio
    watchdog: float = 600.0  # seconds in one phase after which the phases of all ranks are printed; 0: never
    seed: int = 0  # of the data order, the sampling noise and the tiny model
    steps: int = 110  # batches that are sampled
    prompts_per_step: int = 64  # prompts in a batch, over all ranks
    group_size: int = 16  # answers to each prompt
    mini_batches: int = 2  # pieces of a batch, by prompts; each is a step of the policy and one of the critic
    ppo_epochs: int = 1  # passes over each batch
    critic_warmup: int = 0  # batches at the start on which the critic learns alone
    max_new_tokens: int = 4  # longest answer
    max_prompt_tokens: int = 0  # longest prompt, a longer one is skipped and counted; 0: what the context leaves
    temperature: float = 1.0  # of the sampler, and of the distribution that is trained
    lr: float = 7e-4  # peak learning rate; LoRA and large models want less, about 1e-5 and 1e-6
    critic_lr: float = 7e-4  # peak learning rate of the critic; large models want about 1e-5
    warmup_steps: int = 10  # linear warm-up in optimizer steps; after it the rates fall linearly to a twentieth
    clip_low: float = 0.2  # the ratio is clipped at 1 - clip_low
    clip_high: float = 0.2  # the ratio is clipped at 1 + clip_high
    cliprange_value: float = 0.5  # how far a value may move on one batch, in units of the reward
    gamma: float = 1.0  # discount of a token
    lam: float = 0.95  # lambda of the policy's advantages
    length_adaptive_alpha: float = 0.0  # if not 0, lambda is 1 - 1 / (alpha l) for l tokens instead; VAPO has 0.05
    critic_lam: float = 0.95  # lambda of the critic's targets; VAPO has 1
    lm_coef: float = 0.0  # weight of imitating the answers with a reward above 0.5; VAPO has 0.1
    pf_ppo_best: float = 0.0  # share of a group's weight on its best answers; with pf_ppo_worst 0: all weigh the same
    pf_ppo_worst: float = 0.0  # share on its worst answers
    tis_cap: float = 2.0  # weights that correct for a sampler unlike the trainer are cut here; they are 1 with hf
    kl_coef: float = 0.0  # weight of the KL to the start in the reward; 0: none is kept, `kl` is from the sampler
    max_grad_norm: float = 1.0  # gradients are scaled down to this norm
    freeze_vision_tower: bool = False  # train the language models alone
    lora_rank: int = 0  # of LoRA adapters in policy and critic; 0 trains the weights themselves
    lora_alpha: int = 32  # scale of the adapters, over their rank
    target_modules: str = "all-linear"  # modules that get adapters: all-linear, or a regular expression
    exclude_modules: str | None = ".*visual.*"  # regular expression of modules that get none
    use_remove_padding: bool = True  # pack rows without padding
    use_fused_kernels: bool = False  # logprobs from hidden states, without the logits tensor
    enable_gradient_checkpointing: bool = False  # recompute activations in backward
    micro_batch_tokens: int = 16384  # most tokens in one forward
    gpu_memory_utilization: float = 0.8  # share of a GPU's memory up to which the sampler's cache may fill it
    threads: int = 1  # CPU threads of a process; with more, sums round differently and no run repeats exactly
    trust_remote_code: bool = False  # run code that comes with the model
    save_every: int = 50  # steps between checkpoints; the newest two are kept
    max_unjudged: float = 0.2  # stop when a larger share of a batch's answers could not be judged
    max_mismatch: float = 0.3  # stop when sampler and trainer differ by more in mean |dlogp|: weights did not arrive


def estimates(rewards, values, mask, gamma, lam, critic_lam, global_sum):
    """Advantages [B, T], whitened over all ranks, and the critic's targets [B, T]; lam is a number or [B]."""
    advantages, _ = gae(rewards, values, mask, gamma, lam)
    _, returns = gae(rewards, values, mask, gamma, critic_lam)
    count = global_sum(mask.sum())
    mean = global_sum(token_sum(advantages, mask)) / count.clamp(min=1)
    var = global_sum(token_sum((advantages - mean).square(), mask)) / (count - 1).clamp(min=1)
    return masked_whiten(advantages, mask, mean=mean, var=var), returns


def main(cfg: Config) -> None:
    torch.set_num_threads(cfg.threads)
    init_distributed()
    disable_progress_bar()  # of loading and saving; the run has its own
    rank, world = dist.get_rank(), dist.get_world_size()
    name = f"ppo-{Path(cfg.task).stem}-seed{cfg.seed}"
    try:
        if not 1 <= cfg.mini_batches <= cfg.prompts_per_step:
            raise ValueError(f"mini_batches: from 1 to the {cfg.prompts_per_step} prompts, came {cfg.mini_batches}")
        out = Path(cfg.out) if cfg.out else new_directory("runs", name, resume=cfg.resume)
        task = load_task(cfg.task)
        run = Run(out, asdict(cfg), resume=cfg.resume, writes=rank == 0, trackers=cfg.trackers, watchdog=cfg.watchdog)
        engine, critic, reference, rollout, processor = set_up(cfg, task, out)
        saved = checkpoints(out / "checkpoints") if cfg.resume else []
        start = engine.load_checkpoint(saved[-1])["step"] if saved else 0
        if saved:
            critic.load_checkpoint(out / "critic_checkpoints" / saved[-1].name)
    except ValueError as error:
        sys.exit(f"ppo: {error}")
    run.start_at(start)
    max_tokens = cfg.max_prompt_tokens or engine.config.get_text_config().max_position_embeddings - cfg.max_new_tokens
    heldout, bad = encode_rows(processor, list(enumerate(task.heldout))[rank::world], max_tokens=max_tokens)

    def generate(prompts, sampling, n=1, phase="generate"):
        """Answers under the weights of this moment; between times the sampler leaves a GPU to the trainer."""
        run.phase("hand_over")
        rollout.wake_up()
        rollout.update_weights(engine.get_per_tensor_param())
        run.phase(phase)
        answers = rollout.generate(prompts, sampling, n)
        rollout.sleep()
        return answers

    def evaluate(when: str) -> list:
        """Greedy answers to the held-out rows, shared among the ranks; a row that cannot be judged counts as wrong."""
        samples = generate(heldout, Sampling(cfg.max_new_tokens, temperature=0.0), phase="evaluate")
        rewards = score(task.reward, samples)
        right, count, lost = engine.global_sum(torch.tensor([rewards.nansum(), len(rewards), len(bad)])).tolist()
        accuracy = right / max(count, 1)
        run.evaluation(**{f"accuracy_{when}": accuracy}, heldout=int(count), heldout_skipped=int(lost))
        if rank == 0:
            print(f"held-out accuracy {when}: {accuracy:.3f} ({count:.0f} rows)", flush=True)
        return judged(samples, rewards)

    if start == 0:
        evaluate("before")

    def policy_loss(out, mb):  # out.logprobs [B, T]; mb.total_tokens counts the whole mini-batch, on all ranks
        old = mb.old_logprobs
        loss = clipped_policy_loss(out.logprobs, old, mb.advantages, mb.mask, cfg.clip_low, cfg.clip_high)
        imitation = token_sum(-out.logprobs * mb.lm_weights[:, None], mb.mask)
        loss = token_mean(loss * mb.weights[:, None] * mb.tis, mb.mask, mb.total_tokens) + cfg.lm_coef * imitation
        stats = ratio_stats(out.logprobs, old, mb.mask, mb.advantages, cfg.clip_low, cfg.clip_high, mb.total_tokens)
        return loss, {"entropy": token_mean(out.entropy, mb.mask, mb.total_tokens), **stats}

    def value_loss(out, mb):  # out.values [B, T]
        loss = clipped_value_loss(out.values, mb.values, mb.returns, mb.mask, cfg.cliprange_value)
        return token_mean(loss * mb.weights[:, None], mb.mask, mb.total_tokens), {}

    passes = 1 + cfg.ppo_epochs * (2 if cfg.lora_rank else 3)  # of each model through a batch, in forwards
    progress = tqdm(range(start, cfg.steps), initial=start, total=cfg.steps, unit="step", disable=rank != 0)
    for step in progress:
        rows = step_rows(task.train, step, cfg.prompts_per_step, cfg.seed)[rank::world]
        prompts, skipped = encode_rows(processor, rows, max_tokens=max_tokens)
        for message in skipped:
            progress.write(f"skipped: {message}")
        answers = generate(prompts, Sampling(cfg.max_new_tokens, cfg.temperature, (cfg.seed, step)), cfg.group_size)
        run.phase("reward")
        rewards, parts = score_parts(task.reward, answers)  # [B]; nan = could not be judged
        batch = collate(judged(answers, rewards))
        rewards, ids, mask = batch.rewards, batch.group_ids, batch.mask
        counts = [len(answers), len(batch), len(skipped), rewards.sum(), rewards.square().sum(), mask.sum()]
        counts += [batch_flops(engine.config, batch), batch_flops(critic.config, batch, head=False)]
        counts = engine.global_sum(torch.tensor(counts, dtype=torch.float64))
        asked, known, lost, total, squares, tokens, flops, critic_flops = counts.tolist()
        if known < max(1.0, (1 - cfg.max_unjudged) * asked):
            sys.exit(f"ppo: step {step}: only {known:.0f} of {asked:.0f} answers could be judged; see the log")
        run.phase("train")
        old, ref = engine.infer_batch(batch)["logprobs"], batch.rollout_logprobs
        if cfg.kl_coef:
            with engine.disable_adapter() if cfg.lora_rank else nullcontext():
                ref = reference.infer_batch(batch)["logprobs"]
        token_rewards = kl_in_reward(rewards_to_tokens(rewards, mask), kl_k1(old, ref, mask), cfg.kl_coef, mask)
        values = critic.infer_batch(batch)["values"]  # [B, T], of the prefix before each token
        lam = length_adaptive_lambda(mask, cfg.length_adaptive_alpha) if cfg.length_adaptive_alpha else cfg.lam
        advantages, returns = estimates(token_rewards, values, mask, cfg.gamma, lam, cfg.critic_lam, engine.global_sum)
        weights = torch.ones(len(batch))
        if cfg.pf_ppo_best or cfg.pf_ppo_worst:  # they are 1 on average over a group
            weights = pf_ppo_weights(rewards, ids, cfg.pf_ppo_best, cfg.pf_ppo_worst) * ids.bincount()[ids]
        tis = importance_weights(old, batch.rollout_logprobs, mask, cap=cfg.tis_cap)
        batch.add(old_logprobs=old, tis=tis, values=values, advantages=advantages, returns=returns, weights=weights)
        measured = reduce_metrics({
            "kl": token_mean(kl_k3(old, ref, mask), mask, tokens), "value/mean": token_mean(values, mask, tokens),
            "value/squared_error": token_mean((values - returns).square(), mask, tokens),
            **mismatch_stats(old, batch.rollout_logprobs, mask, tokens),
        })  # fmt: skip
        if measured["mismatch/abs_dlogp"] > cfg.max_mismatch:
            gap = f"{measured['mismatch/abs_dlogp']:.2f} a token: its weights are not the trainer's"
            sys.exit(f"ppo: step {step}: the sampler's logprobs differ from the trainer's by {gap}")
        updates = []
        for epoch in range(cfg.ppo_epochs):
            order = np.random.default_rng((cfg.seed, step, epoch)).permutation(cfg.prompts_per_step)
            for i in range(cfg.mini_batches):  # the same prompts in each, whatever the number of ranks
                part = batch.select([row for row, g in enumerate(ids.tolist()) if g in order[i :: cfg.mini_batches]])
                right = (part.rewards > 0.5).float()
                size, imitated = engine.global_sum(torch.stack([part.mask.sum(), (part.mask.sum(1) * right).sum()]))
                if size == 0:  # none of its prompts could be read or judged
                    continue
                part.add(lm_weights=right / imitated.clamp(min=1))
                found = critic.train_batch(part, value_loss)
                metrics = {f"critic/{name}": found[name] for name in ("loss", "grad_norm", "lr", "skipped_steps")}
                if step >= cfg.critic_warmup:
                    metrics |= engine.train_batch(part, policy_loss, outputs=("logprobs", "entropy"))
                updates.append(metrics)
        metrics = {n: (max if n.endswith("/max") else fmean)([u[n] for u in updates]) for n in updates[0]}
        mean = total / known
        run.log(step, {
            "reward/mean": mean, "reward/std": max(squares / known - mean**2, 0.0) ** 0.5,
            **part_means(parts, engine.global_sum), **metrics, **measured, "tokens": tokens, "skipped_rows": lost,
            "flops": flops * (passes + bool(cfg.kl_coef)) + critic_flops * passes, "unjudged": asked - known,
        })  # fmt: skip
        progress.set_postfix(reward=f"{mean:.2f}", value=f"{measured['value/mean']:.2f}")
        if (step + 1) % cfg.save_every == 0 or step + 1 == cfg.steps:
            run.phase("checkpoint")
            critic.save_checkpoint(out / "critic_checkpoints" / f"step_{step + 1}")  # first: the policy's says "done"
            engine.save_checkpoint(out / "checkpoints" / f"step_{step + 1}", {"step": step + 1})
            for folder in ("checkpoints", "critic_checkpoints"):
                keep_newest(out / folder, 2)
    shown = evaluate("after")
    engine.export_hf(out / "model")
    critic.export_hf(out / "critic")
    run.close()
    if rank == 0:
        page = write_report(out, sorted(shown, key=lambda s: s.reward)[:40], title=name)
        print(f"results: {page}, {out / 'metrics.jsonl'}; model: {out / 'model'}, critic: {out / 'critic'}")


def set_up(cfg: Config, task: Task, out: Path):
    """The trained engine, the critic, the reference policy, the sampler and the processor."""
    path = str(out / "init") if cfg.model == "tiny" else cfg.model
    if cfg.model == "tiny":
        if dist.get_rank() == 0 and not Path(path).exists():
            build_tiny(path, task.train, seed=cfg.seed)
        dist.barrier()
    processor = load_processor(path, trust_remote_code=cfg.trust_remote_code)
    model = load_model(path, trust_remote_code=cfg.trust_remote_code)
    critic_model = load_value_model(cfg.critic_model or path, trust_remote_code=cfg.trust_remote_code)
    shared = {
        "processor": processor, "unsampled": unsampled_ids(model.config, getattr(processor, "tokenizer", processor)),
        "temperature": cfg.temperature, "micro_batch_tokens": cfg.micro_batch_tokens,
        "use_remove_padding": cfg.use_remove_padding, "use_fused_kernels": cfg.use_fused_kernels,
    }  # fmt: skip

    def trained(model_type: str, model, lr: float, steps: int):
        if cfg.freeze_vision_tower:
            freeze(model, VISION_TOWER)
        if cfg.lora_rank:
            model = lora(model, cfg.lora_rank, cfg.lora_alpha, cfg.target_modules, cfg.exclude_modules)
        if model_type == "value_model":
            model.get_output_embeddings().requires_grad_(True)  # adapters freeze all beside them
        if dist.get_rank() == 0:
            print(f"{model_type}: {trainable_summary(model)}", flush=True)
        updates, warm = max(1, steps * cfg.ppo_epochs * cfg.mini_batches), max(1, cfg.warmup_steps)
        return make_engine(
            "fsdp2", model_type, model=model,
            optimizer=lambda params: AdamW(params, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
            scheduler=lambda opt: LambdaLR(opt, lambda i: min((i + 1) / warm, max(0.05, 1 - i / updates))),
            max_grad_norm=cfg.max_grad_norm, enable_gradient_checkpointing=cfg.enable_gradient_checkpointing, **shared,
        )  # fmt: skip

    engine = trained("language_model", model, cfg.lr, cfg.steps - cfg.critic_warmup)
    critic = trained("value_model", critic_model, cfg.critic_lr, cfg.steps)
    reference = engine
    if cfg.kl_coef and not cfg.lora_rank:
        model = load_model(path, trust_remote_code=cfg.trust_remote_code)
        reference = make_engine("fsdp2", "language_model", model=model, **shared)
    rollout = make_rollout(
        cfg.rollout, engine.gathered, model=path, processor=processor, urls=cfg.servers,
        gpu_memory_utilization=cfg.gpu_memory_utilization,
    )  # fmt: skip
    return engine, critic, reference, rollout, processor


if __name__ == "__main__":
    main(tyro.cli(Config, use_underscores=True, description=__doc__))
    dist.destroy_process_group()
