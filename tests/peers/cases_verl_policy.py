"""Our policy losses beside verl 0.9.1's; see cases_verl.py."""

from unittest import mock

import torch
from case import Case

from rlkit import losses as L


def random_mask(g, gaps=True):
    """8 rows of up to 10 tokens, some with tool output in between; row 5 has no token at all."""
    position, lengths = torch.arange(10), torch.randint(4, 11, (8, 1), generator=g)
    mask = position < lengths
    if gaps:
        start = 1 + (torch.rand(8, 1, generator=g) * (lengths - 2)).long()
        mask &= (position != start) & ((position != start + 1) | (start + 2 >= lengths))
    mask[5] = False
    return mask


def tokens(g):
    """Log-probabilities that have moved little on half of the tokens and far on the others, on both sides."""
    old = -0.02 - 6 * torch.rand(8, 10, generator=g)
    near, wide = 0.05 * torch.randn(8, 10, generator=g), 3.2 * (2 * torch.rand(8, 10, generator=g) - 1)
    shift = torch.where(torch.rand(8, 10, generator=g) < 0.4, near, wide)
    return {
        "logprobs": (old + shift).clamp(max=-0.01),
        "old_logprobs": old,
        "advantages": torch.randn(8, 10, generator=g),
        "mask": random_mask(g),
    }


def sequences(g):
    """One advantage a sequence, of both signs; sequences that moved by little and by much."""
    x = tokens(g)
    scale = torch.linspace(0.02, 0.8, 8)[torch.randperm(8, generator=g), None]
    shift = scale * (torch.randn(8, 1, generator=g) + torch.randn(8, 10, generator=g))
    return x | {"logprobs": x["old_logprobs"] + shift, "advantages": torch.randn(8, generator=g)}


def far(g):
    """Some log-ratios of +-25, beyond what both sides hold."""
    x = tokens(g)
    jump = torch.randint(-1, 2, (8, 10), generator=g) * 25.0
    return x | {"old_logprobs": x["logprobs"] + jump}


def weighted(g):
    return tokens(g) | {"weights": 0.2 + torch.rand(8, 10, generator=g)}


def weighted_sequences(g):
    return sequences(g) | {"weights": 0.2 + torch.rand(8, 10, generator=g)}


def actor(policy_loss=None, **options):
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    policy = PolicyLossConfig(**(policy_loss or {}))
    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy, **options)


REDUCE = {
    "token-mean": L.token_mean,
    "token-sum": L.token_sum,
    "seq-mean-token-mean": L.sequence_mean,
    "seq-mean-token-sum": L.sequence_sum_mean,
    "seq-mean-token-sum-norm": lambda loss, mask: L.fixed_length_mean(loss, mask, mask.shape[1]),
}
TOKEN, SEQUENCE = "token-mean", "seq-mean-token-mean"


def policy(case, name, ours, mode=TOKEN, why="", inputs=tokens, clip=(0.2, 0.2), stats=False, **options):
    """`ours` takes (logprobs, old_logprobs, advantages, mask, *clip), and weights where the inputs have them."""

    def peer(logprobs, old_logprobs, advantages, mask, weights=None):
        from verl.trainer.ppo.core_algos import get_policy_loss_fn

        if advantages.ndim == 1:
            advantages = advantages[:, None].expand_as(mask)
        config = actor(clip_ratio_low=clip[0], clip_ratio_high=clip[1], **options)
        given = (old_logprobs, logprobs, advantages, mask.long(), mode, config, weights)
        # the order in which verl drops tokens is random; here it is that of the batch
        with mock.patch("torch.randperm", torch.arange):
            loss, metrics = get_policy_loss_fn(name)(*given)
        names = ("pg_clipfrac", "ppo_kl") if stats else ()
        return {"loss": loss} | {name: torch.tensor(metrics[f"actor/{name}"]) for name in names}

    def ours_(logprobs, old_logprobs, advantages, mask, **weights):
        out = {"loss": REDUCE[mode](ours(logprobs, old_logprobs, advantages, mask, *clip, **weights), mask)}
        if stats:
            found = L.ratio_stats(logprobs, old_logprobs, advantages, mask, *clip)
            out["pg_clipfrac"] = found["ratio/clip_fraction"]
            out["ppo_kl"] = L.token_mean(L.kl_k1(old_logprobs, logprobs.detach(), mask), mask)
        return out

    return Case(f"policy_loss_{case}", inputs, peer, ours_, grad=("logprobs",), why=why)


def clipped(logprobs, old_logprobs, advantages, mask, *clip, weights=1.0):
    clip = clip or (0.2, 0.2)
    return weights * L.clipped_policy_loss(logprobs, old_logprobs, advantages, mask, *clip, dual_clip=3.0)


def without_clip(function, **options):
    return lambda logprobs, old, advantages, mask, *clip: function(logprobs, old, advantages, mask, **options)


def dppo(function, cap):
    def ours(logprobs, old_logprobs, advantages, mask, *deltas):
        loss = function(logprobs, old_logprobs, advantages, mask, *deltas, cap)
        return loss - loss.detach() + loss.detach() * logprobs.detach()

    return ours


def clip_cov(share=0.0002):
    def ours(logprobs, old_logprobs, advantages, mask, *clip):
        uniform = torch.arange(mask.numel()).view(mask.shape) / mask.numel()  # draws the first ones
        return L.clip_cov_loss(logprobs, old_logprobs, advantages, mask, uniform, *clip, 0.05, 0.8, share)

    return ours


def geo_mean(logprobs, old_logprobs, advantages, mask, *clip, weights=None):
    loss = L.gmpo_loss(logprobs, old_logprobs, advantages, mask, *clip)
    if weights is not None:
        log_weights = torch.where(mask, (weights + 1e-10).log(), 0).sum(1, keepdim=True)
        loss = loss * (log_weights / mask.sum(1, keepdim=True).clamp(min=1)).exp()
    return loss * mask.any(1).sum() / len(mask)


NO_DUAL = "verl cannot switch the dual clip off, so its bound is put out of reach"
DPPO = "verl's value is times the log-probability, ours is the surrogate that the loss is named for; one gradient"
DPPO_CAP = "verl's cap of 20 is never reached, as its ActorConfig always has a clip_ratio_c, by default 3. " + DPPO
EMPTY = "verl counts a row without a token among the sequences here; we do not, and neither do verl's other losses"
GEO_WEIGHTS = "verl takes the geometric mean of the weights over the sequence; with us weights are the caller's. "
COV = {"clip_cov_lb": 0.05, "clip_cov_ub": 0.8}

POLICY = [
    policy("vanilla", "vanilla", clipped, stats=True),
    policy("token_sum", "vanilla", clipped, "token-sum"),
    policy("far", "vanilla", L.clipped_policy_loss, why=NO_DUAL, inputs=far, clip_ratio_c=1e12),
    policy("sequence_advantages", "vanilla", clipped, "seq-mean-token-sum", inputs=sequences),
    policy("rollout_weights", "vanilla", clipped, inputs=weighted),
    policy("clip_higher", "vanilla", clipped, SEQUENCE, clip=(0.1, 0.4), stats=True),
    policy("dual_clip", "vanilla", lambda *x: L.clipped_policy_loss(*x, dual_clip=1.5), clip_ratio_c=1.5),
    policy("no_dual_clip", "vanilla", L.clipped_policy_loss, why=NO_DUAL, clip_ratio_c=1e9),
    policy("dppo_tv", "dppo_tv", dppo(L.dppo_tv_loss, 20.0), why=DPPO, clip=(0.15, 0.15), clip_ratio_c=20.0),
    policy("dppo_tv_default_cap", "dppo_tv", dppo(L.dppo_tv_loss, 3.0), why=DPPO_CAP),
    policy(
        "dppo_tv_uneven",
        "dppo_tv",
        dppo(L.dppo_tv_loss, 1.5),
        "seq-mean-token-sum-norm",
        DPPO,
        clip=(0.3, 0.05),
        clip_ratio_c=1.5,
    ),
    policy("dppo_kl", "dppo_kl", dppo(L.dppo_kl_loss, 20.0), why=DPPO, clip=(0.05, 0.05), clip_ratio_c=20.0),
    policy("dppo_kl_uneven", "dppo_kl", dppo(L.dppo_kl_loss, 1.5), why=DPPO, clip=(0.2, 0.01), clip_ratio_c=1.5),
    policy("gspo", "gspo", L.gspo_loss, SEQUENCE, inputs=sequences, clip=(0.1, 0.15)),
    policy("gspo_paper_clip", "gspo", L.gspo_token_loss, SEQUENCE, inputs=sequences, clip=(3e-4, 4e-4)),
    policy("gspo_token", "gspo", L.gspo_token_loss, clip=(0.1, 0.15)),
    policy("sapo", "sapo", without_clip(L.sapo_loss), SEQUENCE),
    policy("sapo_tau", "sapo", without_clip(L.sapo_loss, tau_pos=2.0, tau_neg=0.5), SEQUENCE, tau_pos=2.0, tau_neg=0.5),
    policy("sapo_far", "sapo", without_clip(L.sapo_loss), SEQUENCE, inputs=far),
    policy("gpg", "gpg", without_clip(L.gpg_loss)),
    policy("cispo", "cispo", L.cispo_loss, clip=(0.2, 0.28)),
    policy("cispo_upper", "cispo", L.cispo_loss, clip=(1.0, 4.0)),
    policy("cispo_far", "cispo", L.cispo_loss, inputs=far),
    policy("dro", "dro", without_clip(L.dro_loss, kl_coef=0.3), policy_loss={"dro_beta": 0.3}),
    policy("clip_cov", "clip_cov", clip_cov(1.0), policy_loss=COV | {"clip_cov_ratio": 1.0}),
    policy("clip_cov_share", "clip_cov", clip_cov(0.1), clip=(1.0, 1.0), policy_loss=COV | {"clip_cov_ratio": 0.1}),
    policy("clip_cov_one", "clip_cov", clip_cov(), policy_loss=COV),
    policy("kl_cov_one", "kl_cov", without_clip(L.kl_cov_loss, kl_coef=0.1)),
    policy(
        "kl_cov",
        "kl_cov",
        without_clip(L.kl_cov_loss, share=0.2, kl_coef=2.0),
        policy_loss={"kl_cov_ratio": 0.2, "ppo_kl_coef": 2.0},
    ),
    policy("geo_mean", "geo_mean", geo_mean, SEQUENCE, EMPTY, sequences, (0.2, 0.3)),
    policy("geo_mean_tokens", "geo_mean", geo_mean, SEQUENCE, EMPTY, tokens, (0.2, 0.3)),
    policy(
        "geo_mean_rollout_weights", "geo_mean", geo_mean, SEQUENCE, GEO_WEIGHTS + EMPTY, weighted_sequences, (0.2, 0.3)
    ),
]


def reinforce_peer(logprobs, old_logprobs, advantages, mask, weights):
    from verl.trainer.ppo.core_algos import compute_policy_loss_reinforce as function

    given = (old_logprobs, logprobs, advantages, mask.long(), "seq-mean-token-sum", actor())
    return {"plain": function(*given)[0], "weighted": function(*given, weights)[0]}


def reinforce_ours(logprobs, old_logprobs, advantages, mask, weights):
    loss = L.reinforce_loss(logprobs, old_logprobs, advantages, mask)
    return {"plain": L.sequence_sum_mean(loss, mask), "weighted": L.sequence_sum_mean(loss * weights, mask)}


def bypass_case(name, kind, ours):
    """The sampler's log-probabilities in the old ones' place, and a band of 0.5 to 2 on each token's ratio."""

    def peer(logprobs, old_logprobs, advantages, mask):
        from verl.trainer.config.algorithm import RolloutCorrectionConfig
        from verl.trainer.ppo.core_algos import get_policy_loss_fn

        correction = RolloutCorrectionConfig(
            loss_type=kind,
            rollout_is="token",
            rollout_is_threshold=1.5,
            rollout_rs="token_k1",
            rollout_rs_threshold="0.5_2.0",
        )
        config = actor(policy_loss={"rollout_correction": correction})
        function = get_policy_loss_fn("bypass_mode")
        return {"loss": function(old_logprobs, logprobs, advantages, mask.long(), "token-mean", config)[0]}

    def ours_(logprobs, old_logprobs, advantages, mask):
        keep = L.rejection_mask(logprobs, old_logprobs, mask, 0.5, 2.0)
        return {"loss": L.token_mean(ours(logprobs, old_logprobs, advantages, mask), keep)}

    why = "verl divides by the tokens that stay; our docs suggest all tokens, so that what is rejected counts as 0"
    return Case(f"policy_loss_{name}", tokens, peer, ours_, grad=("logprobs",), why=why)


def weighted_reinforce(logprobs, old_logprobs, advantages, mask):
    weights = L.importance_weights(logprobs, old_logprobs, mask, high=1.5)
    return weights * L.reinforce_loss(logprobs, old_logprobs, advantages, mask)


def deprecated_peer(logprobs, old_logprobs, advantages, mask):
    from verl.trainer.ppo.core_algos import compute_policy_loss

    return {"loss": compute_policy_loss(old_logprobs, logprobs, advantages, mask.long(), cliprange=0.2)[0]}


CASES = [
    *POLICY,
    Case("policy_loss_reinforce", weighted, reinforce_peer, reinforce_ours, grad=("logprobs",)),
    bypass_case("bypass_reinforce", "reinforce", weighted_reinforce),
    bypass_case("bypass_ppo_clip", "ppo_clip", clipped),
    Case(
        "policy_loss_deprecated",
        tokens,
        deprecated_peer,
        lambda **x: {"loss": L.token_mean(clipped(**x), x["mask"])},
        grad=("logprobs",),
    ),
]
