"""Our functions beside verl 0.9.1's: reductions, KL, values, the sampler's mismatch, log-probabilities, distillation.

Policy losses are in cases_verl_policy.py, advantages in cases_verl_advantages.py. verl's masks are integers and its
rewards [B, T]; where it leaves numbers outside the mask they are taken off, as no loss reads them.
"""

from types import SimpleNamespace

import torch
from case import Case
from cases_verl_advantages import CASES as ADVANTAGES
from cases_verl_advantages import filter_case
from cases_verl_policy import CASES as POLICY
from cases_verl_policy import REDUCE, random_mask, tokens

from rlkit import advantages as A
from rlkit import losses as L


def agg_case(mode, ours, case=None, why="", **options):
    def peer(loss, mask):
        from verl.trainer.ppo.core_algos import agg_loss

        return {"loss": agg_loss(loss, mask.long(), mode, **options)}

    def inputs(g):
        return {"loss": torch.randn(8, 10, generator=g), "mask": random_mask(g)}

    name = f"agg_loss_{case or mode}".replace("-", "_")
    return Case(name, inputs, peer, lambda loss, mask: {"loss": ours(loss, mask)}, grad=("loss",), why=why)


RANKS = "verl multiplies by the ranks, as FSDP averages over them; our engines sum"
REDUCTIONS = [
    *(agg_case(mode, reduction) for mode, reduction in REDUCE.items()),
    agg_case(
        "seq-mean-token-sum-norm",
        lambda x, m: L.fixed_length_mean(x, m, 100),
        "seq-mean-token-sum-norm-factor",
        loss_scale_factor=100,
    ),
    agg_case(
        "token-mean", lambda x, m: 2 * L.token_mean(x, m, 77), "token-mean-total", RANKS, dp_size=2, batch_num_tokens=77
    ),
    agg_case(
        "seq-mean-token-mean",
        lambda x, m: 2 * L.sequence_mean(x, m, 16),
        "seq-mean-token-mean-total",
        RANKS,
        dp_size=2,
        global_batch_size=16,
    ),
    agg_case(
        "seq-mean-token-sum",
        lambda x, m: 2 * L.sequence_sum_mean(x, m, 16),
        "seq-mean-token-sum-total",
        RANKS,
        dp_size=2,
        global_batch_size=16,
    ),
]


def kl_case(kind, ours, scale=0.8, case=None, why=""):
    def inputs(g):
        difference = scale * torch.randn(8, 10, generator=g).clamp(-2.4, 2.4)
        ref = -3 * torch.rand(8, 10, generator=g)
        return {"logprobs": ref + difference, "ref_logprobs": ref}

    def peer(logprobs, ref_logprobs):
        from verl.trainer.ppo.core_algos import kl_penalty

        return {"kl": kl_penalty(logprobs, ref_logprobs, kind)}

    name = f"kl_penalty_{case or kind}".replace("+", "_straight_through")
    return Case(name, inputs, peer, lambda **x: {"kl": ours(**x)}, grad=("logprobs",), why=why)


def straight_through(estimate):
    return lambda **x: L.kl_straight_through(value=estimate(**x), **x)


def beyond(logprobs, ref_logprobs):
    difference = logprobs - ref_logprobs
    return difference - difference.clamp(-20, 20)


BEYOND = "verl bounds the log-ratio of k3 alone, we that of every estimate, at +-20"
KL = [
    *(kl_case(kind, L.kl_k1) for kind in ("kl", "k1")),
    *(kl_case(kind, L.kl_k2) for kind in ("mse", "k2")),
    *(kl_case(kind, L.kl_k3) for kind in ("low_var_kl", "k3")),
    kl_case("abs", L.kl_abs),
    kl_case("k1+", straight_through(L.kl_k1)),
    kl_case("abs+", straight_through(L.kl_abs)),
    kl_case("k3+", straight_through(L.kl_k3)),
    kl_case("k2+", straight_through(L.kl_k2)),
    kl_case("k1", lambda **x: L.kl_k1(**x) + beyond(**x), 12.0, "k1_far", BEYOND),
    kl_case(
        "k3",
        lambda **x: L.kl_k3(**x).clamp(max=10),
        12.0,
        "k3_far",
        "verl also bounds the estimate to 10, which takes the gradient from the tokens that are farthest off",
    ),
]


def value_case(name, mode, clip):
    def inputs(g):
        names = ("values", "old_values", "returns")
        return {x: torch.randn(8, 10, generator=g) for x in names} | {"mask": random_mask(g)}

    def peer(values, old_values, returns, mask):
        from verl.trainer.ppo.core_algos import compute_value_loss

        return {"loss": compute_value_loss(values, returns, old_values, mask.long(), clip, mode)[0]}

    def ours(values, old_values, returns, mask):
        return {"loss": REDUCE[mode](L.clipped_value_loss(values, old_values, returns, mask, clip), mask)}

    return Case(name, inputs, peer, ours, grad=("values",))


def mismatch(g):
    """Sequences far apart, next to each other and in between, so that every bound has something on both sides."""
    x = tokens(g)
    scale = torch.tensor([0.01, 1.0, 0.3, 0.05, 0.1, 1.0, 0.02, 0.5])[:, None]
    old = x["old_logprobs"]
    return {"logprobs": old + scale * torch.randn(old.shape, generator=g), "rollout_logprobs": old, "mask": x["mask"]}


def weights_case(name, ours, level, threshold, normalize=False, why=""):
    def peer(logprobs, rollout_logprobs, mask):
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

        weights, metrics = compute_rollout_correction_weights(
            logprobs - rollout_logprobs, mask.long(), level, threshold, rollout_is_batch_normalize=normalize
        )
        share = metrics["rollout_is_eff_sample_size"]
        return {"weights": weights} | ({} if normalize else {"effective_sample_size": torch.tensor(share)})

    def ours_(logprobs, rollout_logprobs, mask):
        weights = ours(logprobs, rollout_logprobs, mask)
        share = L.effective_sample_size(L.token_mean(weights, mask), L.token_mean(weights.square(), mask))
        return {"weights": weights} | ({} if normalize else {"effective_sample_size": share})

    return Case(name, mismatch, peer, ours_, why=why)


def normalized_tokens(logprobs, rollout_logprobs, mask):
    weights = L.importance_weights(logprobs, rollout_logprobs, mask)
    return weights / L.token_mean(weights, mask)


def normalized_sequences(logprobs, rollout_logprobs, mask):
    weights = L.sequence_importance_weights(logprobs, rollout_logprobs, mask)
    return weights / L.sequence_mean(weights, mask)


NORMALIZE = "verl can divide by the mean weight; we leave that to the caller, as it varies with the split of a batch"
REJECT = "verl bounds the negative log-ratio, against its own docs; its lower_upper is 1 / upper and 1 / lower here"


def rejection_case(name, function, option, low, high):
    def peer(logprobs, rollout_logprobs, mask):
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

        ratio = logprobs - rollout_logprobs
        return {"keep": compute_rollout_rejection_mask(ratio, mask.long(), option, f"{low}_{high}")[0].bool()}

    def ours(logprobs, rollout_logprobs, mask):
        return {"keep": function(logprobs, rollout_logprobs, mask, 1 / high, 1 / low)}

    return Case(name, mismatch, peer, ours, why=REJECT)


def off_policy_peer(logprobs, rollout_logprobs, mask):
    from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics

    metrics = compute_offpolicy_metrics(logprobs, rollout_logprobs, mask.long())
    return {name: torch.tensor(metrics[name]) for name in ("kl", "k3_kl", "chi2_token")}


def off_policy_ours(logprobs, rollout_logprobs, mask):
    stats = L.mismatch_stats(logprobs, rollout_logprobs, mask)
    kl = L.token_mean(L.kl_k1(rollout_logprobs, logprobs, mask), mask)
    return {"kl": kl, "k3_kl": stats["mismatch/kl"], "chi2_token": stats["mismatch/w2_mean"] - 1}


MISMATCH = [
    weights_case("importance_weights", L.importance_weights, "token", 2.0),
    weights_case("importance_weights_cap", lambda *x: L.importance_weights(*x, high=1.1), "token", 1.1),
    weights_case("sequence_importance_weights", L.sequence_importance_weights, "sequence", 2.0),
    weights_case(
        "sequence_importance_weights_cap", lambda *x: L.sequence_importance_weights(*x, high=1.01), "sequence", 1.01
    ),
    weights_case("importance_weights_normalized", normalized_tokens, "token", 2.0, True, NORMALIZE),
    weights_case("sequence_importance_weights_normalized", normalized_sequences, "sequence", 2.0, True, NORMALIZE),
    weights_case("icepop", lambda *x: L.masked_importance_weights(*x, 0.8, 1.3), "token", "0.8_1.3"),
    weights_case(
        "icepop_sequence", lambda *x: L.sequence_masked_importance_weights(*x, 0.8, 1.05), "sequence", "0.8_1.05"
    ),
    rejection_case("rejection_mask", L.rejection_mask, "token_k1", 0.8, 1.1),
    rejection_case("sequence_rejection_mask", L.sequence_rejection_mask, "seq_sum_k1", 0.8, 2.0),
    rejection_case("geometric_rejection_mask", L.geometric_rejection_mask, "seq_mean_k1", 0.95, 1.01),
    Case("offpolicy_metrics", mismatch, off_policy_peer, off_policy_ours),
]


def random_logits(g):
    return {
        "logits": torch.randn(4, 9, 13, generator=g),
        "tokens": torch.randint(13, (4, 9), generator=g),
        "mask": torch.rand(4, 9, generator=g) < 0.7,
    }


def logprobs_peer(logits, tokens, mask):
    from verl.utils import torch_functional as V

    return {
        "same_position": V.logprobs_from_logits(logits, tokens),
        "response": V.log_probs_from_logits_response(tokens, logits, 5),
        "entropy": V.entropy_from_logits(logits),
        "entropy_chunks": V.entropy_from_logits_with_chunking(logits.flatten(0, 1), 7).view(tokens.shape),
        "sum_pi_squared": V.calculate_sum_pi_squared_from_logits(logits.detach()),
    }


def logprobs_ours(logits, tokens, mask):
    return {
        "same_position": L.target_logprobs(logits, tokens),
        "response": L.token_logprobs(logits, tokens)[:, -5:],
        "entropy": L.token_entropy(logits),
        "entropy_chunks": L.token_entropy(logits),
        "sum_pi_squared": L.sum_pi_squared(logits),
    }


def entropy_loss_peer(logits, tokens, mask):
    from verl.trainer.ppo.core_algos import compute_entropy_loss

    return {"loss": compute_entropy_loss(logits, mask.long(), "seq-mean-token-mean")}


def entropy_loss_ours(logits, tokens, mask):
    return {"loss": L.sequence_mean(L.token_entropy(logits), mask)}


def linear_inputs(g):
    return {
        "hidden": torch.randn(23, 6, generator=g),
        "weight": 0.3 * torch.randn(17, 6, generator=g),
        "targets": torch.randint(17, (23,), generator=g),
    }


def linear_peer(hidden, weight, targets):
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    logprobs, entropy = FusedLinearForPPO(chunk_size=8)(hidden, weight, targets, temperature=0.7)
    return {"logprobs": logprobs, "entropy": entropy}


def linear_ours(hidden, weight, targets):
    return dict(zip(("logprobs", "entropy"), L.linear_logprobs(hidden, weight, targets, 0.7, chunk=5), strict=True))


def distill_case(name, k, ours, why="", chunked=False):
    """Two packed sequences; the teacher's k likeliest of 13 tokens."""

    def inputs(g):
        top = (2 * torch.randn(1, 9, 13, generator=g)).log_softmax(-1).topk(k, -1)
        student = 2 * torch.randn(1, 9, 13, generator=g)
        return {"student_logits": student, "teacher_logprobs": top.values, "teacher_indices": top.indices}

    def peer(student_logits, teacher_logprobs, teacher_indices):
        from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk

        rows = [x[0].split([4, 5]) for x in (teacher_logprobs, teacher_indices)]
        nest = [torch.nested.as_nested_tensor(list(x), layout=torch.jagged) for x in rows]
        setting = SimpleNamespace(log_prob_min_clamp=None, use_chunked_topk=chunked, chunked_topk_chunk_size=2)
        config = SimpleNamespace(distillation_loss=setting)
        return {"loss": compute_forward_kl_topk(student_logits, *nest, config, "thd")["distillation_losses"]}

    def ours_(student_logits, teacher_logprobs, teacher_indices):
        mask = torch.ones(1, 9, dtype=torch.bool)
        return {"loss": ours(student_logits, teacher_logprobs, teacher_indices, mask)}

    return Case(name, inputs, peer, ours_, grad=("student_logits",), why=why)


def without_rest(student_logits, teacher_logprobs, teacher_indices, mask):
    p = 1 - teacher_logprobs.exp().sum(-1)
    q = 1 - student_logits.log_softmax(-1).gather(-1, teacher_indices).exp().sum(-1)
    return L.topk_forward_kl_loss(student_logits, teacher_logprobs, teacher_indices, mask) - p * (p / q).log()


def whole_vocabulary(student_logits, teacher_logprobs, teacher_indices, mask):
    return L.forward_kl_loss(student_logits.gather(-1, teacher_indices), teacher_logprobs, mask)


REST = "verl drops the rest of the vocabulary, so its sum is no divergence and can be below 0; ours has it as a bucket"
LOGPROBS = [
    Case("logprobs_entropy", random_logits, logprobs_peer, logprobs_ours, grad=("logits",)),
    Case("entropy_loss", random_logits, entropy_loss_peer, entropy_loss_ours, grad=("logits",)),
    Case("linear_logprobs", linear_inputs, linear_peer, linear_ours, grad=("hidden", "weight")),
    distill_case("distill_topk", 4, without_rest, REST),
    distill_case("distill_topk_chunked", 4, without_rest, REST, chunked=True),
    distill_case("distill_topk_all", 13, L.topk_forward_kl_loss),
    distill_case("distill_forward_kl", 13, whole_vocabulary),
]


def divergence_case(name, function, high, level):
    """verl's {level}_k2 and {level}_k3."""

    def peer(logprobs, rollout_logprobs, mask):
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

        x = (logprobs - rollout_logprobs, mask.long())
        return {k: compute_rollout_rejection_mask(*x, f"{level}_{k}", high)[0].bool() for k in ("k2", "k3")}

    def ours(logprobs, rollout_logprobs, mask):
        estimates = {"k2": L.kl_k2, "k3": L.kl_k3}
        return {k: function(kl(rollout_logprobs, logprobs, mask), mask, high) for k, kl in estimates.items()}

    return Case(name, mismatch, peer, ours)


def both_divergences_peer(logprobs, rollout_logprobs, mask):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    ratio = logprobs - rollout_logprobs
    return {"keep": compute_rollout_rejection_mask(ratio, mask.long(), "seq_mean_k3,seq_max_k2", "0.1,0.5")[0].bool()}


def both_divergences_ours(logprobs, rollout_logprobs, mask):
    k2, k3 = (kl(rollout_logprobs, logprobs, mask) for kl in (L.kl_k2, L.kl_k3))
    return {"keep": L.sequence_mean_divergence_mask(k3, mask, 0.1) & L.sequence_max_divergence_mask(k2, mask, 0.5)}


def sequence_metrics_peer(logprobs, rollout_logprobs, mask):
    from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics

    metrics = compute_offpolicy_metrics(logprobs, rollout_logprobs, mask.long())
    return {name: torch.tensor(metrics[name]) for name in ("chi2_seq", "training_ppl", "rollout_ppl", "ppl_ratio")}


def sequence_metrics_ours(logprobs, rollout_logprobs, mask):
    stats = L.sequence_mismatch_stats(logprobs, rollout_logprobs, mask, total=len(mask))
    empty = (~mask.any(1)).sum() / len(mask)
    return {
        "chi2_seq": stats["mismatch/sequence_chi2"],
        "training_ppl": stats["mismatch/ppl"] + empty,
        "rollout_ppl": stats["mismatch/rollout_ppl"] + empty,
        "ppl_ratio": stats["mismatch/ppl_ratio"] + empty,
    }


DIVERGENCE = [
    divergence_case("divergence_rejection_mask", L.token_divergence_mask, 0.05, "token"),
    divergence_case("sum_divergence_rejection_mask", L.sequence_sum_divergence_mask, 0.5, "seq_sum"),
    divergence_case("mean_divergence_rejection_mask", L.sequence_mean_divergence_mask, 0.05, "seq_mean"),
    divergence_case("max_divergence_rejection_mask", L.sequence_max_divergence_mask, 0.2, "seq_max"),
    Case("divergence_rejection_combined", mismatch, both_divergences_peer, both_divergences_ours),
    Case(
        "sequence_offpolicy_metrics",
        mismatch,
        sequence_metrics_peer,
        sequence_metrics_ours,
        why="verl counts a row without tokens as a sequence of perplexity 1; ours leaves it out",
    ),
    filter_case(
        "pf_ppo_pow",
        "pow",
        lambda r, ids, best, worst: A.pf_ppo_power_weights(r, ids),
        "verl adds 1e-8 to each power, ours draws a reward of 0 only where all are 0",
    ),
]


def value_stats_case():
    one = value_case("value_clip_fraction", "token-mean", 0.5)

    def peer(values, old_values, returns, mask):
        from verl.trainer.ppo.core_algos import compute_value_loss

        return {"clip_fraction": compute_value_loss(values, returns, old_values, mask.long(), 0.5)[1]}

    def ours(**x):
        return {"clip_fraction": L.value_stats(**x)["value/clip_fraction"]}

    return Case("value_clip_fraction", one.inputs, peer, ours)


VALUES = [
    value_case("value_loss", "token-mean", 0.5),
    value_case("value_loss_sequence_mean", "seq-mean-token-mean", 0.1),
]

CASES = [*ADVANTAGES, *POLICY, *REDUCTIONS, *KL, *VALUES, *MISMATCH, *LOGPROBS, *DIVERGENCE, value_stats_case()]
assert len({case.name for case in CASES}) == len(CASES)
