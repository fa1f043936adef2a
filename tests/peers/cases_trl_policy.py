"""GRPO's loss types and options, RLOO's loss and GMPO's, from the trainers' own batches."""

from collections import defaultdict
from types import SimpleNamespace

import torch
from cases_trl_trainer import case, last_metrics, stand_in

from rlkit.losses import (
    cispo_loss,
    clipped_policy_loss,
    fixed_length_mean,
    gmpo_loss,
    gspo_loss,
    gspo_token_loss,
    importance_weights,
    kl_k3,
    kl_k3_weighted,
    luspo_loss,
    masked_importance_weights,
    mismatch_stats,
    off_policy_sequence_mask,
    ratio_stats,
    sapo_loss,
    sequence_importance_weights,
    sequence_logprobs,
    sequence_masked_importance_weights,
    sequence_mean,
    sequence_sapo_loss,
    sequence_sum_mean,
    token_mean,
    top_entropy_mask,
    vespo_loss,
)

B, T, G = 8, 12, 4
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
GAMMA = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
SEQUENCE = {"importance_sampling_level": "sequence"}


def policy(*extra, drift=0.5, gaps=True, empty=False):
    """Inputs: ratios far below and above 1 on rows of either advantage sign, tool output between the tokens."""

    def inputs(g):
        lengths = torch.randint(6, T + 1, (B,), generator=g)
        lengths[0] = T
        mask = torch.arange(T) < lengths[:, None]
        if gaps:
            mask[::2, 2:4] = False
        if empty:
            mask[3] = False
        side = torch.tensor([-1.0, -1.0, -0.1, -0.1, 0.1, 0.1, 1.0, 1.0])[:, None]
        noise = torch.randn(4, B, T, generator=g)
        old = -3 * torch.rand(B, T, generator=g) - 0.05
        made = {
            "logprobs": old + drift * (side + 0.8 * noise[0]),
            "old_logprobs": old,
            "advantages": (0.2 + torch.rand(B, generator=g)) * torch.tensor([1.0, -1.0]).repeat(B // 2),
            "mask": mask,
            "rollout_logprobs": old + 0.25 * (side + noise[1]),
            "ref_logprobs": old - 0.6 * (side + noise[2]),
            "token_advantages": noise[3],
            "entropy": 2 * torch.rand(B, T, generator=g),
        }
        return {name: made[name] for name in ("logprobs", "old_logprobs", "advantages", "mask", *extra)}

    return inputs


def unscored(g):
    made = policy("rollout_logprobs")(g)
    made["rollout_logprobs"][1, 1] = made["rollout_logprobs"][4, 5] = torch.nan
    return made


def trainer_and_batch(
    name, rewards, old_logprobs, mask, rollout_logprobs=None, ref_logprobs=None, group_size=G, **options
):
    """A trainer, and the batch that its own code makes of these samples; generation and models are replaced."""
    import trl
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    classes = {
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
        "rloo": (trl.RLOOTrainer, trl.RLOOConfig),
        "gmpo": (GMPOTrainer, GMPOConfig),
    }[name]
    # two iterations over a batch, so that the old log-probabilities are needed
    count = len(rewards)
    common = {"per_device_train_batch_size": count, "num_generations": group_size, "num_iterations": 2, "beta": 0.0}
    if name == "grpo":
        common |= {"loss_type": "grpo", "epsilon_high": 0.28}
    if name != "rloo":
        common |= {"use_vllm": rollout_logprobs is not None}
    trainer = stand_in(*classes, **common | options)
    config = trainer.args
    trainer.epsilon_low = config.epsilon
    trainer.epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    trainer.current_gradient_accumulation_steps = config.gradient_accumulation_steps
    trainer._entropy_bonus_enabled = getattr(config, "entropy_coef", 0.0) != 0.0
    trainer.environment_factories = trainer.environments = trainer.tools = None
    trainer.reward_func_names = trainer.reward_funcs = [str(i) for i in range(rewards.shape[1])]
    trainer.reward_weights = torch.tensor(config.reward_weights or [1.0] * rewards.shape[1])
    trainer._tokenizer = SimpleNamespace(pad_token_id=0)
    trainer._pending_extra_logs, trainer._pending_metrics = {}, {}
    trainer._logs = defaultdict(list) | {"rewards": defaultdict(list)}

    lengths = (mask * torch.arange(1, mask.shape[1] + 1)).amax(1).clamp(min=1).tolist()

    def rows(x):
        return None if x is None else [row[:n] for row, n in zip(x.tolist(), lengths, strict=True)]

    prompts, tokens, texts = [[1]] * count, [[1] * n for n in lengths], [""] * count
    made = (prompts, tokens, rows(mask.long()), texts, rows(rollout_logprobs), {}, None, None)
    trainer._generate = lambda _: (prompts, tokens, texts) if name == "rloo" else made
    trainer._calculate_rewards = lambda *_: rewards.clone()
    trainer._get_per_token_logps_and_entropies = lambda model, *_, **__: (model.log_probs, model.entropy, None)
    trainer.model.log_probs, trainer.model.entropy = old_logprobs, None
    trainer.ref_model = SimpleNamespace(log_probs=ref_logprobs, entropy=None)
    return trainer, trainer._generate_and_score_completions([{"prompt": ""}] * count)


def loss_of(name="grpo", rows=B, metrics=(), **options):
    """A peer: the trainer's loss under these options, of the first rows of its batch, and the metrics it logs."""

    def peer(logprobs, old_logprobs, advantages, mask, token_advantages=None, entropy=None, **rest):
        trainer, batch = trainer_and_batch(name, advantages[:, None], old_logprobs, mask, **rest, **options)
        batch["advantages"] = advantages if token_advantages is None else token_advantages
        batch = {key: x[:rows] if x.ndim else x for key, x in batch.items()}
        entropy = torch.zeros_like(old_logprobs) if entropy is None else entropy
        loss = trainer._compute_loss(SimpleNamespace(log_probs=logprobs[:rows], entropy=entropy[:rows]), batch)
        return {"out": loss, **last_metrics(trainer, metrics)}

    return peer


def vllm(mode, low=None, high=3.0, **options):
    bounds = {"vllm_importance_sampling_clip_min": low, "vllm_importance_sampling_clip_max": high}
    return loss_of(vllm_importance_sampling_mode=mode, **bounds, **options)


def gamma_weights(logprobs, old_logprobs, advantages, mask):
    from trl import GRPOTrainer

    return {"out": GRPOTrainer.get_gamma_weights(advantages[:, None], logprobs - old_logprobs, mask, None)}


def high_entropy_mask(entropy, mask, **_):
    from trl import GRPOConfig, GRPOTrainer

    return {"out": stand_in(GRPOTrainer, GRPOConfig).get_high_entropy_mask(entropy, mask, 0.8)}


def of(x, formula=clipped_policy_loss, **options):
    return formula(x.logprobs, x.old_logprobs, x.advantages, x.mask, **options or CLIP)


def weighted(weights, **options):
    """Ours: the clipped loss under weights of trainer over sampler."""
    return lambda x: sequence_mean(of(x) * weights(x.old_logprobs, x.rollout_logprobs, x.mask, **options), x.mask)


def weighted_where_scored(x):
    x.rollout_logprobs = torch.where(x.rollout_logprobs.isnan(), x.old_logprobs, x.rollout_logprobs)
    return weighted(importance_weights, high=3.0)(x)


def dropped(x, keep):
    return sequence_mean(torch.where(keep, of(x), 0.0), x.mask)


def vespo_corrected(x):
    weights = importance_weights(x.old_logprobs, x.rollout_logprobs, x.mask, high=1.2)
    return token_mean(vespo_loss(x.logprobs, x.old_logprobs - weights.log(), x.advantages, x.mask), x.mask)


def gmpo_top(x):
    top = top_entropy_mask(x.entropy, x.mask, 0.2)
    loss = gmpo_loss(x.logprobs, x.old_logprobs, x.advantages, top)
    return sequence_mean(loss, top, total=B) - x.advantages[~top.any(1)].sum() / B


def rloo_loss(x):
    old, new = (sequence_logprobs(y, x.mask)[:, None] for y in (x.old_logprobs, x.logprobs))
    every = torch.ones(B, 1, dtype=torch.bool)
    return sequence_mean(clipped_policy_loss(new, old, x.advantages, every, **CLIP), every)


def logged(x):
    ratio = ratio_stats(x.logprobs, x.old_logprobs, x.advantages, x.mask, **CLIP)
    sampler = mismatch_stats(x.old_logprobs, x.rollout_logprobs, x.mask)
    kl = kl_k3(x.logprobs, x.ref_logprobs, x.mask)
    return {
        "out": weighted(importance_weights, high=1e9)(x) + 0.04 * sequence_mean(kl, x.mask),
        "kl": token_mean(kl, x.mask),
        "entropy": token_mean(x.entropy, x.mask),
        "clip_ratio.region_mean": ratio["ratio/clip_fraction"],
        "sampling.sampling_logp_difference.mean": sampler["mismatch/abs_dlogp"],
        "sampling.sampling_logp_difference.max": sampler["mismatch/abs_dlogp/max"],
        "sampling.importance_sampling_ratio.mean": sampler["mismatch/w_mean"],
    }


LOGGED = (
    "kl",
    "entropy",
    "clip_ratio/region_mean",
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/mean",
)


PLAIN, SLOW = policy(), policy(drift=0.1)
ROLLOUT, REFERENCE, ENTROPY = policy("rollout_logprobs"), policy("ref_logprobs"), policy("entropy")

LOSSES = [
    case("grpo", PLAIN, loss_of(), lambda x: sequence_mean(of(x), x.mask)),
    case("bnpo", PLAIN, loss_of(loss_type="bnpo"), lambda x: token_mean(of(x), x.mask)),
    case("dapo", PLAIN, loss_of(loss_type="dapo"), lambda x: token_mean(of(x), x.mask)),
    case(
        "dr_grpo",
        PLAIN,
        loss_of(loss_type="dr_grpo", max_completion_length=16),
        lambda x: fixed_length_mean(of(x), x.mask, 16),
    ),
    case(
        "dapo_micro_batch",
        PLAIN,
        loss_of(rows=4, loss_type="dapo", gradient_accumulation_steps=2, per_device_train_batch_size=4),
        lambda x: token_mean(of(x)[:4], x.mask[:4], total=x.mask.sum()),
    ),
    case(
        "grpo_row_without_tokens",
        policy(empty=True),
        loss_of(),
        lambda x: sequence_mean(of(x), x.mask, total=B),
        why="TRL's mean over sequences counts a row without tokens.",
    ),
    case(
        "grpo_token_advantages",
        policy("token_advantages"),
        loss_of(),
        lambda x: sequence_mean(
            clipped_policy_loss(x.logprobs, x.old_logprobs, x.token_advantages, x.mask, **CLIP), x.mask
        ),
    ),
    case("grpo_delta", PLAIN, loss_of(delta=1.5), lambda x: sequence_mean(of(x, **CLIP, dual_clip=1.5), x.mask)),
    case(
        "cispo",
        PLAIN,
        loss_of(loss_type="cispo", epsilon_high=1.5),
        lambda x: token_mean(of(x, cispo_loss, clip_low=1.0, clip_high=0.5), x.mask),
        why="TRL's epsilon_high is the largest weight itself, and there is no lower bound.",
    ),
    case(
        "sapo",
        PLAIN,
        loss_of(loss_type="sapo"),
        lambda x: sequence_mean(of(x, sapo_loss, tau_pos=1.0, tau_neg=1.05), x.mask),
    ),
    case("gspo", PLAIN, loss_of(**SEQUENCE), lambda x: sequence_mean(of(x, gspo_loss), x.mask)),
    case("gspo_token", PLAIN, loss_of(**SEQUENCE), lambda x: sequence_mean(of(x, gspo_token_loss), x.mask)),
    case("gspo_dapo", PLAIN, loss_of(loss_type="dapo", **SEQUENCE), lambda x: token_mean(of(x, gspo_loss), x.mask)),
    case("luspo", PLAIN, loss_of(loss_type="luspo", **SEQUENCE), lambda x: sequence_mean(of(x, luspo_loss), x.mask)),
    case(
        "luspo_token",
        PLAIN,
        loss_of(loss_type="luspo"),
        lambda x: sequence_sum_mean(of(x), x.mask),
        why="With token-level ratios, TRL's default, luspo is PPO's clip under the mean of sequence sums.",
    ),
    case("vespo", SLOW, loss_of(loss_type="vespo"), lambda x: token_mean(of(x, vespo_loss, **GAMMA), x.mask)),
    case(
        "vespo_corrected",
        policy("rollout_logprobs", drift=0.1),
        vllm("token_truncate", high=1.2, loss_type="vespo"),
        vespo_corrected,
        why="TRL multiplies truncated weights into the sequence's ratio; ours takes them with old_logprobs.",
    ),
    case(
        "vespo_gamma_weights",
        policy(drift=0.2),
        gamma_weights,
        lambda x: (of(x, vespo_loss, **GAMMA) / (-x.advantages[:, None] * x.logprobs))[:, :1],
        grad=(),
        why="TRL's function gives the weight alone; ours is taken out of the loss.",
    ),
    case(
        "gmpo",
        PLAIN,
        loss_of("gmpo", epsilon=0.3, epsilon_high=0.4),
        lambda x: sequence_mean(of(x, gmpo_loss, log_clip_low=0.3, log_clip_high=0.4), x.mask),
    ),
    case(
        "gmpo_high_entropy",
        ENTROPY,
        loss_of("gmpo", top_entropy_quantile=0.2),
        gmpo_top,
        why="A sequence left without tokens adds the constant -A to TRL's mean over sequences, 0 to ours.",
    ),
    case("rloo", policy(gaps=False, drift=0.1), loss_of("rloo", epsilon_high=0.28), rloo_loss),
]

TERMS = [
    case(
        "kl",
        REFERENCE,
        loss_of(beta=0.04, use_bias_correction_kl=False),
        lambda x: sequence_mean(of(x) + 0.04 * kl_k3(x.logprobs, x.ref_logprobs, x.mask), x.mask),
    ),
    case(
        "kl_bias_corrected",
        REFERENCE,
        loss_of(beta=0.04, use_bias_correction_kl=True),
        lambda x: sequence_mean(
            of(x) + 0.04 * kl_k3_weighted(x.logprobs, x.ref_logprobs, x.old_logprobs, x.mask), x.mask
        ),
    ),
    case(
        "kl_gmpo",
        REFERENCE,
        loss_of("gmpo", beta=0.04),
        lambda x: sequence_mean(of(x, gmpo_loss, log_clip_low=0.4) + 0.04 * kl_k3(x.logprobs, x.ref_logprobs), x.mask),
    ),
    case(
        "entropy_bonus",
        ENTROPY,
        loss_of(entropy_coef=0.1),
        lambda x: sequence_mean(of(x), x.mask) - 0.1 * token_mean(x.entropy, x.mask),
        grad=("logprobs", "entropy"),
    ),
    case(
        "off_policy_mask",
        PLAIN,
        loss_of(off_policy_mask_threshold=0.3),
        lambda x: dropped(x, of(x, off_policy_sequence_mask, high=0.3)),
    ),
    case(
        "off_policy_mask_of_the_sampler",
        policy("rollout_logprobs", drift=0.8),
        loss_of(off_policy_mask_threshold=0.3, vllm_importance_sampling_correction=False),
        lambda x: dropped(x, off_policy_sequence_mask(x.logprobs, x.rollout_logprobs, x.advantages, x.mask, 0.3)),
    ),
    case(
        "high_entropy",
        ENTROPY,
        loss_of(top_entropy_quantile=0.2),
        lambda x: dropped(x, top_entropy_mask(x.entropy, x.mask, 0.2)),
    ),
    case(
        "high_entropy_mask",
        ENTROPY,
        high_entropy_mask,
        lambda x: top_entropy_mask(x.entropy, x.mask, 0.2),
        grad=(),
    ),
]

SAMPLER = [
    case("token_truncate", ROLLOUT, vllm("token_truncate", high=1.3), weighted(importance_weights, high=1.3)),
    case(
        "token_truncate_low",
        ROLLOUT,
        vllm("token_truncate", low=0.8, high=1.3),
        weighted(importance_weights, low=0.8, high=1.3),
    ),
    case(
        "token_truncate_unscored",
        unscored,
        vllm("token_truncate"),
        weighted_where_scored,
        why="TRL gives a token whose sampler's log-probability is nan the weight 1; ours leaves that to the caller.",
    ),
    case("sequence_truncate", ROLLOUT, vllm("sequence_truncate"), weighted(sequence_importance_weights, high=3.0)),
    case(
        "token_mask",
        ROLLOUT,
        vllm("token_mask", low=0.7, high=1.3),
        weighted(masked_importance_weights, low=0.7, high=1.3),
    ),
    case(
        "sequence_mask",
        ROLLOUT,
        vllm("sequence_mask", low=0.1, high=5.0),
        weighted(sequence_masked_importance_weights, low=0.1, high=5.0),
    ),
    case(
        "metrics",
        policy("rollout_logprobs", "ref_logprobs", "entropy"),
        vllm("token_mask", high=None, beta=0.04, use_bias_correction_kl=False, metrics=LOGGED),
        logged,
        grad=(),
    ),
]

CASES = [*LOSSES, *TERMS, *SAMPLER]
SEQUENCE_GATES = [
    case(
        "sapo_sequence",
        PLAIN,
        loss_of(loss_type="sapo", **SEQUENCE),
        lambda x: sequence_mean(of(x, sequence_sapo_loss, tau_pos=1.0, tau_neg=1.05), x.mask),
    ),
    case(
        "gspo_delta",
        policy(drift=1.0),
        loss_of(delta=1.5, **SEQUENCE),
        lambda x: sequence_mean(of(x, gspo_loss, **CLIP, dual_clip=1.5), x.mask),
    ),
    case(
        "gspo_token_delta",
        policy(drift=1.0),
        loss_of(delta=1.5, **SEQUENCE),
        lambda x: sequence_mean(of(x, gspo_token_loss, **CLIP, dual_clip=1.5), x.mask),
    ),
]
