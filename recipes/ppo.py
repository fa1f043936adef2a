"""PPO with a critic, on text or images: sample answers, value every token of them, take several clipped steps.

    torchrun --nproc-per-node=1 recipes/ppo.py                        # a tiny Qwen2.5-VL learns to read digits
    torchrun --nproc-per-node=8 recipes/ppo.py --model Qwen/Qwen2.5-VL-7B-Instruct --task train.jsonl \\
        --prompts_per_step 512 --mini_batches 4 --max_new_tokens 1024 --lr 1e-6 --critic_lr 1e-5 --kl_coef 0.001

How it differs from the paper (https://arxiv.org/abs/1707.06347) and from InstructGPT (arXiv 2203.02155):
- the critic is a model of its own; it starts as the policy with a head of zeros, not as the reward model.
- the loss is the mean over all tokens of a mini-batch, advantages are whitened over all tokens of the batch, and there
  is no entropy bonus. The KL to the model at the start is in the reward of each token, and off by default.
- an answer that could not be judged is left out; tokens that stand for images can be neither sampled nor scored.
- right answers are imitated a little, as in VAPO; without that (`--lm_coef 0`) the default run ends at 0.83, not 0.92.

VAPO (https://arxiv.org/abs/2504.05118) is `--critic_lam 1 --length_adaptive_alpha 0.05 --critic_warmup 50 --clip_high
0.28`: its critic learns alone at first. PF-PPO (arXiv 2409.06957) is `--pf_ppo_best 0.5`: weights, where it draws.
"""

import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch.optim import AdamW, lr_scheduler
from transformers.utils.logging import disable_progress_bar

from rlkit.advantages import gae, kl_in_reward, length_adaptive_lambda, masked_whiten, pf_ppo_weights, rewards_to_tokens
from rlkit.advantages.shaping import RunningMoments, scaled_rewards
from rlkit.data import Judge, Task, collate, judged, load_task, part_means, reward_stats, step_rows
from rlkit.engines import make_engine
from rlkit.engines.balance import rebalance_across_ranks
from rlkit.engines.checkpoint import checkpoints, keep_newest
from rlkit.engines.distributed import init_distributed, reduce_metrics
from rlkit.engines.flops import batch_flops
from rlkit.engines.value_head import load_value_model
from rlkit.losses import clipped_policy_loss, clipped_value_loss, kl_k1, kl_k3, token_mean, token_sum
from rlkit.losses.diagnostics import mismatch_stats, ratio_stats
from rlkit.losses.mismatch import importance_weights
from rlkit.report import write_report
from rlkit.rollout import Canary, Sampling, make_rollout
from rlkit.tracking import Run, new_directory, progress_bar
from rlkit.vlm import VISION_TOWER, freeze, load_model, lora, model_or_tiny, trainable_summary
from rlkit.vlm.processors import encode_rows, load_processor, suppressed_token_ids


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
    reward_threads: int = 8  # prompts judged at once, while others are written; 0: behind them, in the main thread
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
    lm_coef: float = 0.1  # weight of imitating the answers with a reward above 0.5; PPO has 0
    normalise_rewards: bool = False  # by the mean and deviation of all rewards so far (PPO-max, arXiv 2307.04964)
    reward_clip: float = 0.0  # if not 0, rewards are cut to [-reward_clip, reward_clip], behind that
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
    engine: str = "fsdp2"  # what trains: fsdp2, megatron, or one of another package; see docs/engines.md
    parallel: dict[str, int] = field(default_factory=dict)  # ranks that share a model: tensor 2 pipeline 2
    use_remove_padding: bool = True  # pack rows without padding
    use_fused_kernels: bool = False  # logprobs from hidden states, without the logits tensor
    enable_gradient_checkpointing: bool = False  # recompute activations in backward
    micro_batch_tokens: int = 16384  # most tokens in one forward
    gpu_memory_utilization: float = 0.8  # share of a GPU's memory up to which the sampler's cache may fill it
    threads: int = 1  # CPU threads of a process; with more, sums round differently and no run repeats exactly
    trust_remote_code: bool = False  # run code that comes with the model
    save_every: int = 50  # steps between checkpoints; the newest two are kept
    max_unjudged: float = 0.2  # stop when a larger share of a batch's answers could not be judged
    max_mismatch: float = 0.3  # stop where sampler and trainer differ by more in mean |dlogp|, or ten times the first


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
    rank = dist.get_rank()
    try:
        if not 1 <= cfg.mini_batches <= cfg.prompts_per_step:
            raise ValueError(f"mini_batches: from 1 to the {cfg.prompts_per_step} prompts, came {cfg.mini_batches}")
        task = load_task(cfg.task)
        name = f"ppo-{task.name}-seed{cfg.seed}"
        out = Path(cfg.out) if cfg.out else new_directory("runs", name, resume=cfg.resume)
        judge = Judge(task.reward, threads=cfg.reward_threads)
        run = Run(out, asdict(cfg), resume=cfg.resume, writes=rank == 0, trackers=cfg.trackers, watchdog=cfg.watchdog)
        engine, critic, reference, rollout, processor = set_up(cfg, task, out)
        saved = checkpoints(out / "checkpoints") if cfg.resume else []
        state = engine.load_checkpoint(saved[-1]) if saved else {"step": 0, "moments": {}}
        start, seen = state["step"], RunningMoments(**state["moments"])
        if saved:
            critic.load_checkpoint(out / "critic_checkpoints" / saved[-1].name)
    except ValueError as error:
        sys.exit(f"ppo: {error}")
    run.start_at(start)
    mine = slice(engine.data_parallel_rank, None, engine.data_parallel_size)  # this rank's share of rows
    max_tokens = cfg.max_prompt_tokens or engine.config.get_text_config().max_position_embeddings - cfg.max_new_tokens
    heldout, bad = encode_rows(processor, list(enumerate(task.heldout))[mine], max_tokens=max_tokens)

    def generate(prompts, sampling, n=1, phase="generate"):
        """Answers under the weights of this moment, each judged while others are written: as of `Judge.result`."""
        run.phase("hand_over")
        rollout.wake_up()
        rollout.update_weights(engine.get_per_tensor_param())
        run.phase(phase)
        answers = rollout.generate(prompts, sampling, n, written=judge.take)
        rollout.sleep()  # between times the sampler leaves a GPU to the trainer
        run.phase("reward" if phase == "generate" else phase)  # what of it is not done yet
        return answers, *judge.result()

    def evaluate(when: str) -> list:
        """Greedy answers to the held-out rows, shared among the ranks; a row that cannot be judged counts as wrong."""
        samples, rewards, *_ = generate(heldout, Sampling(cfg.max_new_tokens, temperature=0.0), phase="evaluate")
        right, count, lost = engine.global_sum(torch.tensor([rewards.nansum(), len(rewards), len(bad)])).tolist()
        run.evaluation(**{f"accuracy_{when}": right / max(count, 1)}, heldout=int(count), heldout_skipped=int(lost))
        if rank == 0:
            print(f"held-out accuracy {when}: {right / max(count, 1):.3f} ({count:.0f} rows)", flush=True)
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
    canary = Canary(cfg.max_mismatch)
    progress = progress_bar(start, cfg.steps, show=rank == 0)
    for step in progress:
        rows = step_rows(task.train, step, cfg.prompts_per_step, cfg.seed)[mine]
        prompts, skipped = encode_rows(processor, rows, max_tokens=max_tokens)
        for message in skipped:
            progress.write(f"skipped: {message}")
        sampling = Sampling(cfg.max_new_tokens, cfg.temperature, seed=(cfg.seed, step))
        answers, rewards, parts, judging = generate(prompts, sampling, cfg.group_size)  # [B]; nan: not judged
        batch = collate(judged(answers, rewards))
        rewards, ids, mask = batch.rewards, batch.group_ids, batch.mask
        counts = [len(answers), len(batch), len(skipped), mask.sum()]
        counts += [batch_flops(engine.config, batch), batch_flops(critic.config, batch, head=False)]
        asked, known, lost, tokens, flops, more = engine.global_sum(torch.tensor(counts, dtype=torch.float64)).tolist()
        if known < max(1.0, (1 - cfg.max_unjudged) * asked):
            sys.exit(f"ppo: step {step}: only {known:.0f} of {asked:.0f} answers could be judged; see the log")
        run.phase("train")
        old, ref = engine.infer_batch(batch)["logprobs"], batch.rollout_logprobs
        if cfg.kl_coef:
            with engine.disable_adapter() if cfg.lora_rank else nullcontext():
                ref = reference.infer_batch(batch)["logprobs"]
        seen = seen.update(rewards, engine.global_sum) if cfg.normalise_rewards else seen
        scaled = scaled_rewards(rewards, seen.mean, seen.std, cfg.reward_clip or torch.inf)
        token_rewards = kl_in_reward(rewards_to_tokens(scaled, mask), kl_k1(old, ref, mask), cfg.kl_coef, mask)
        values = critic.infer_batch(batch)["values"]  # [B, T], of the prefix before each token
        lam = length_adaptive_lambda(mask, cfg.length_adaptive_alpha) if cfg.length_adaptive_alpha else cfg.lam
        advantages, returns = estimates(token_rewards, values, mask, cfg.gamma, lam, cfg.critic_lam, engine.global_sum)
        shares = cfg.pf_ppo_best, cfg.pf_ppo_worst
        weights = pf_ppo_weights(rewards, ids, *shares) * ids.bincount()[ids] if any(shares) else torch.ones(len(batch))
        tis = importance_weights(old, batch.rollout_logprobs, mask, cap=cfg.tis_cap)
        batch.add(old_logprobs=old, tis=tis, values=values, advantages=advantages, returns=returns, weights=weights)
        measured = reduce_metrics({
            "kl": token_mean(kl_k3(old, ref, mask), mask, tokens), "value/mean": token_mean(values, mask, tokens),
            "value/squared_error": token_mean((values - returns).square(), mask, tokens),
            **mismatch_stats(old, batch.rollout_logprobs, mask, tokens),
        }, engine.data_parallel_group)  # fmt: skip
        if wrong := canary(measured["mismatch/abs_dlogp"]):
            sys.exit(f"ppo: step {step}: {wrong}")
        updates = []
        for epoch in range(cfg.ppo_epochs):
            order = np.random.default_rng((cfg.seed, step, epoch)).permutation(cfg.prompts_per_step)
            for chosen in (order[i :: cfg.mini_batches] for i in range(cfg.mini_batches)):  # of any number of ranks
                part = batch.select(np.flatnonzero(np.isin(ids, chosen)))
                part = rebalance_across_ranks(part, engine.data_parallel_group)
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
        stats = reward_stats(rewards, ids, engine.global_sum) | part_means(parts, engine.global_sum)
        run.log(step, {
            **stats, **metrics, **measured, "tokens": tokens, "skipped_rows": lost, "unjudged": asked - known,
            "flops": flops * (passes + bool(cfg.kl_coef)) + more * passes, "time/judging": judging,
        })  # fmt: skip
        progress.set_postfix(reward=f"{stats['reward/mean']:.2f}", value=f"{measured['value/mean']:.2f}")
        if (step + 1) % cfg.save_every == 0 or step + 1 == cfg.steps:
            run.phase("checkpoint")
            critic.save_checkpoint(out / "critic_checkpoints" / f"step_{step + 1}")  # first: the policy's says "done"
            engine.save_checkpoint(out / "checkpoints" / f"step_{step + 1}", {"step": step + 1, "moments": vars(seen)})
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
    path = model_or_tiny(cfg.model, out / "init", task.train, seed=cfg.seed)
    processor = load_processor(path, trust_remote_code=cfg.trust_remote_code)
    model = load_model(path, trust_remote_code=cfg.trust_remote_code)
    critic_model = load_value_model(cfg.critic_model or path, trust_remote_code=cfg.trust_remote_code)
    shared = {
        "processor": processor, "temperature": cfg.temperature,
        "suppressed_token_ids": suppressed_token_ids(model.config, getattr(processor, "tokenizer", processor)),
        "micro_batch_tokens": cfg.micro_batch_tokens, "use_remove_padding": cfg.use_remove_padding,
        "use_fused_kernels": cfg.use_fused_kernels, **cfg.parallel,
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
            cfg.engine, model_type, model=model,
            optimizer=lambda params: AdamW(params, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
            scheduler=lambda opt: lr_scheduler.LambdaLR(opt, lambda i: min((i + 1) / warm, max(0.05, 1 - i / updates))),
            max_grad_norm=cfg.max_grad_norm, enable_gradient_checkpointing=cfg.enable_gradient_checkpointing, **shared,
        )  # fmt: skip

    engine = reference = trained("language_model", model, cfg.lr, cfg.steps - cfg.critic_warmup)
    critic = trained("value_model", critic_model, cfg.critic_lr, cfg.steps)
    if cfg.kl_coef and not cfg.lora_rank:
        model = load_model(path, trust_remote_code=cfg.trust_remote_code)
        reference = make_engine(cfg.engine, "language_model", model=model, **shared)
    rollout = make_rollout(
        cfg.rollout, engine.gathered, model=path, processor=processor, urls=cfg.servers,
        gpu_memory_utilization=cfg.gpu_memory_utilization, model_parallel_group=engine.model_parallel_group,
    )  # fmt: skip
    return engine, critic, reference, rollout, processor


if __name__ == "__main__":
    main(tyro.cli(Config, use_underscores=True, description=__doc__))
    dist.destroy_process_group()
