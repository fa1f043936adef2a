"""Groups of `rlkit.losses` on [B, T] tensors: a loss is reduced to its scalar and differentiated by the logprobs.

verl's losses and TRL's compute the metrics they log in the same call; "with metrics" our `ratio_stats` does so too.
Where the value says nothing (DPPO: verl's is times the log-probability) the gradients alone are compared.
"""

import math
from functools import partial

import functions_formulas as formulas
import functions_loops as loops
import torch
from functions_common import (
    GROUP,
    LARGE,
    PEERS,
    SMALL,
    Batch,
    Contestants,
    group,
    trl_trainer,
    verl_config,
    with_gradient,
)

from rlkit.losses import (
    cispo_loss,
    clip_cov_loss,
    clipped_policy_loss,
    clipped_value_loss,
    dppo_kl_loss,
    dppo_tv_loss,
    dro_loss,
    fixed_length_mean,
    geometric_rejection_mask,
    gmpo_loss,
    gpg_loss,
    group_token_counts,
    gspo_loss,
    importance_weights,
    kl_cov_loss,
    kl_k3,
    masked_importance_weights,
    prompt_mean,
    ratio_stats,
    rejection_mask,
    sapo_loss,
    sequence_importance_weights,
    sequence_mean,
    sequence_rejection_mask,
    sequence_sum_mean,
    token_mean,
    token_sum,
    vespo_loss,
)

if "verl" in PEERS:
    from verl.trainer.ppo import core_algos as verl
    from verl.trainer.ppo import rollout_corr_helper as verl_mismatch


def verl_loss(b: Batch, name: str, advantages, mode="token-mean", gradient_alone=False, **settings):
    """verl's registered loss and its gradient; its config is made on the first call, before the timing."""
    made = []

    def run():
        if not made:
            made.extend((verl_config(**settings), verl.get_policy_loss_fn(name)))
        loss, _ = made[1](b.old, b.logprobs, advantages, b.mask, mode, made[0])
        loss, gradient = with_gradient(loss, b.logprobs)
        return gradient if gradient_alone else (loss, gradient)

    return run


def trl_loss(b: Batch, advantages, loss_type: str, **settings):
    made = []
    inputs = dict(
        prompt_ids=torch.zeros(b.b, 0), prompt_mask=torch.zeros(b.b, 0), completion_ids=torch.zeros(b.b, b.t),
        completion_mask=b.attended.long(), tool_mask=b.long_mask, advantages=advantages, old_per_token_logps=b.old,
        num_items_in_batch=b.mask.sum(),
    )  # fmt: skip

    def run():
        if not made:
            made.append(trl_trainer(b.logprobs, loss_type=loss_type, **settings))
        return with_gradient(made[0](inputs), b.logprobs)

    return run


def by_formula(b: Batch, formula, advantages, reduce=formulas.mean_of_tokens, gradient_alone=False):
    def run():
        loss = reduce(formula(b.logprobs, b.old, advantages, b.mask), b.mask)
        loss, gradient = with_gradient(loss, b.logprobs)
        return gradient if gradient_alone else (loss, gradient)

    return run


def clipped(dual: float | None):
    """With the dual clip against verl, which cannot go without it; without it against TRL, which has none."""

    def build(b: Batch) -> Contestants:
        lists = b.nested("logprobs", "old", "advantages", "mask")

        def ours():
            loss = clipped_policy_loss(b.logprobs, b.old, b.advantages, b.mask, dual_clip=dual)
            return with_gradient(token_mean(loss, b.mask), b.logprobs)

        return {
            "rlkit": ours,
            "loop": lambda: loops.by_token(loops.clipped(0.2, 0.2, dual), *lists, loops.token_weights(lists[3])),
            "verl": verl_loss(b, "vanilla", b.advantages),
            "trl": trl_loss(b, b.advantages, "bnpo"),
            "formula": by_formula(b, formulas.clipped(0.2, 0.2, dual), b.advantages),
        }

    return build


group("clipped loss", "trl", "formula")(clipped(None))
group("clipped loss, dual clip", "verl", "formula")(clipped(3.0))
group("clipped loss, 1024 x 4096", "trl", "formula", size=LARGE)(clipped(None))
group("clipped loss, dual clip, 1024 x 4096", "verl", "formula", size=LARGE)(clipped(3.0))


@group("clipped loss, dual clip, forward alone", "verl")
def clipped_forward(b):
    lists, logprobs, m = b.nested("logprobs", "old", "advantages", "mask"), b.logprobs.detach(), b.mask
    config = verl_config() if "verl" in PEERS else None
    return {
        "rlkit": lambda: token_mean(clipped_policy_loss(logprobs, b.old, b.advantages, b.mask, dual_clip=3.0), b.mask),
        "loop": lambda: loops.by_token(loops.clipped(0.2, 0.2, 3.0), *lists, loops.token_weights(lists[3]))[0],
        "verl": lambda: verl.compute_policy_loss_vanilla(b.old, logprobs, b.advantages, m, config=config)[0],
    }


@group("clipped loss, dual clip, with metrics", "verl")
def clipped_with_metrics(b):
    contestants = clipped(3.0)(b)

    def ours():
        result = contestants["rlkit"]()
        for x in ratio_stats(b.logprobs, b.old, b.advantages, b.mask).values():
            x.item()  # as peers do
        return result

    return {**contestants, "rlkit": ours}


def policy_group(
    name, ours, loop, formula=None, verl=None, trl=None, reduce=token_mean, gradient_alone=False, a_row=False
):
    """A policy loss, reduced, and its gradient. `verl` is (name, settings) there and `trl` (loss type, settings).

    With `a_row` there is one advantage a sequence: [B] to us and TRL, [B, T] to verl.
    """

    given = {"verl": verl, "trl": trl, "formula": formula}

    @group(name, *(who for who, what in given.items() if what is not None))
    def build(b):
        advantages = b.advantages[:, 0].contiguous() if a_row else b.advantages
        expanded = advantages[:, None].expand(b.b, b.t).contiguous() if a_row else advantages
        logprobs, old, mask = b.nested("logprobs", "old", "mask")
        lists = (logprobs, old, advantages.tolist(), mask)
        weights = (loops.token_weights if reduce is token_mean else loops.sequence_weights)(mask)
        mode = "token-mean" if reduce is token_mean else "seq-mean-token-mean"
        pick = (lambda result: result[1]) if gradient_alone else (lambda result: result)

        def run():
            loss = ours(b.logprobs, b.old, advantages, b.mask)
            return pick(with_gradient(reduce(loss, b.mask), b.logprobs))

        contestants = {"rlkit": run, "loop": lambda: pick(loop(*lists, weights))}
        if verl is not None:
            contestants["verl"] = verl_loss(b, verl[0], expanded, mode, gradient_alone, **verl[1])
        if trl is not None:
            contestants["trl"] = trl_loss(b, advantages, trl[0], **trl[1])
        if formula is not None:
            mean = formulas.mean_of_tokens if reduce is token_mean else formulas.mean_of_sequences
            contestants["formula"] = by_formula(b, formula, advantages, mean, gradient_alone)
        return contestants


def by_token(rule):
    return lambda *lists: loops.by_token(rule, *lists)


def by_sequence(rule):
    return lambda p, q, a, m, _: loops.by_sequence(rule, p, q, a, m)


def bounds(low, high, **more):
    return dict(clip_ratio_low=low, clip_ratio_high=high, **more)


policy_group("GPG / REINFORCE", gpg_loss, by_token(loops.reinforce), formulas.reinforce, verl=("gpg", {}))
policy_group(
    "CISPO",
    partial(cispo_loss, clip_low=0.2, clip_high=0.28),
    by_token(loops.cispo(0.2, 0.28)),
    formulas.cispo(0.2, 0.28),
    verl=("cispo", bounds(0.2, 0.28)),
)
policy_group(
    "CISPO, upper bound alone",
    partial(cispo_loss, clip_low=1.0, clip_high=0.28),
    by_token(loops.cispo(1.0, 0.28)),
    formulas.cispo(1.0, 0.28),
    trl=("cispo", dict(epsilon_high=1.28)),
)
policy_group(
    "SAPO",
    sapo_loss,
    by_token(loops.sapo(1.0, 1.05)),
    formulas.sapo,
    verl=("sapo", {}),
    trl=("sapo", {}),
    reduce=sequence_mean,
)
policy_group(
    "GSPO",
    partial(gspo_loss, clip_low=3e-4, clip_high=4e-4),
    by_sequence(loops.gspo(3e-4, 4e-4)),
    formulas.gspo(3e-4, 4e-4),
    verl=("gspo", bounds(3e-4, 4e-4)),
    trl=("grpo", dict(epsilon_low=3e-4, epsilon_high=4e-4, importance_sampling_level="sequence")),
    reduce=sequence_mean,
    a_row=True,
)
policy_group(
    "GMPO",
    partial(gmpo_loss, log_clip_low=0.1, log_clip_high=0.1),
    by_sequence(loops.gmpo(0.1, 0.1)),
    formulas.gmpo(0.1, 0.1),
    verl=("geo_mean", bounds(0.1, 0.1)),
    reduce=sequence_mean,
    a_row=True,
)
policy_group(
    "DPPO, total variation",
    partial(dppo_tv_loss, delta_low=0.15, delta_high=0.15, ratio_high=20.0),
    by_token(loops.dppo_tv(0.15, 20.0)),
    formulas.dppo_tv(0.15, 20.0),
    verl=("dppo_tv", bounds(0.15, 0.15, clip_ratio_c=20.0)),
    gradient_alone=True,
)
policy_group(
    "DPPO, KL",
    partial(dppo_kl_loss, delta_low=0.005, delta_high=0.005, ratio_high=20.0),
    by_token(loops.dppo_kl(0.005, 20.0)),
    verl=("dppo_kl", bounds(0.005, 0.005, clip_ratio_c=20.0)),
    gradient_alone=True,
)
policy_group(
    "DRO",
    partial(dro_loss, kl_coef=0.05),
    by_token(loops.dro(0.05)),
    formulas.dro(0.05),
    verl=("dro", dict(policy_loss=dict(dro_beta=0.05))),
)
policy_group(
    "VESPO",
    vespo_loss,
    partial(loops.vespo, k=(2.0, 3.0), decay=(3.0, 2.0)),
    formulas.vespo,
    trl=("vespo", {}),
    a_row=True,
)


@group("clip-cov", "verl")
def clip_cov(b):
    lists = b.nested("logprobs", "old", "advantages", "mask")
    uniform = torch.rand(b.b, b.t, generator=torch.Generator().manual_seed(1))
    found = sorted((c for c, *_ in loops.covariances(lists[0], lists[2], lists[3])), reverse=True)
    n = int(0.0002 * len(found))
    low = (found[n - 1] + found[n]) / 2  # so few candidates that all are dropped, whatever the draw

    def ours():
        loss = clip_cov_loss(b.logprobs, b.old, b.advantages, b.mask, uniform, 0.2, 0.2, low, math.inf)
        return with_gradient(token_mean(loss, b.mask), b.logprobs)

    def loop():
        rule = loops.clipped(0.2, 0.2)
        drop = loops.unless_bound(rule)
        chosen = {(i, t): drop for c, i, t in loops.covariances(lists[0], lists[2], lists[3]) if c > low}
        return loops.by_token(rule, *lists, loops.token_weights(lists[3]), chosen)

    return {
        "rlkit": ours,
        "loop": loop,
        "verl": verl_loss(b, "clip_cov", b.advantages, policy_loss=dict(clip_cov_lb=low, clip_cov_ub=math.inf)),
    }


@group("KL-cov", "verl")
def kl_cov(b):
    lists = b.nested("logprobs", "old", "advantages", "mask")

    def loop():
        found = loops.covariances(lists[0], lists[2], lists[3])
        largest = sorted(found, reverse=True)[: max(int(0.0002 * len(found)), 1)]
        chosen = {(i, t): loops.surrogate(1.0) for _, i, t in largest}
        return loops.by_token(loops.surrogate(), *lists, loops.token_weights(lists[3]), chosen)

    return {
        "rlkit": lambda: with_gradient(
            token_mean(kl_cov_loss(b.logprobs, b.old, b.advantages, b.mask), b.mask), b.logprobs
        ),
        "loop": loop,
        "verl": verl_loss(b, "kl_cov", b.advantages, policy_loss=dict(ppo_kl_coef=1.0)),
    }


@group("clipped value loss", "verl", "formula")
def value_loss(b):
    new, targets = (b.values + 0.4 * b.dense).requires_grad_(), b.advantages
    lists = [x.tolist() for x in (new, b.values, targets)]
    mask, m = b.nested("mask"), b.mask
    return {
        "rlkit": lambda: with_gradient(token_mean(clipped_value_loss(new, b.values, targets, b.mask), b.mask), new),
        "loop": lambda: loops.by_token(loops.value(0.5), *lists, mask, loops.token_weights(mask)),
        "verl": lambda: with_gradient(verl.compute_value_loss(new, targets, b.values, m, 0.5)[0], new),
        "formula": lambda: with_gradient(
            formulas.mean_of_tokens(formulas.value(0.5)(new, b.values, targets, b.mask), b.mask), new
        ),
    }


@group("KL, k3", "verl", "formula")
def kl(b):
    lists = b.nested("logprobs", "old", "advantages", "mask")

    def theirs(m=b.mask):
        kl = verl.kl_penalty(b.logprobs, b.old, "low_var_kl")
        return with_gradient(verl.agg_loss(kl, m, "token-mean"), b.logprobs)

    return {
        "rlkit": lambda: with_gradient(token_mean(kl_k3(b.logprobs, b.old, b.mask), b.mask), b.logprobs),
        "loop": lambda: loops.by_token(loops.kl_k3, *lists, loops.token_weights(lists[3])),
        "verl": theirs,
        "formula": lambda: with_gradient(
            formulas.mean_of_tokens(formulas.kl_k3(b.logprobs, b.old, b.mask), b.mask), b.logprobs
        ),
    }


def loop_reduction(loss, mask, weights):
    gradient = [[w if on else 0.0 for on in m] for m, w in zip(mask, weights, strict=True)]
    return loops.total(loss, mask, weights), gradient


for name, ours, mode, weights in (
    ("token_mean", token_mean, "token-mean", loops.token_weights),
    ("token_sum", token_sum, "token-sum", lambda mask: [1.0] * len(mask)),
    ("sequence_mean", sequence_mean, "seq-mean-token-mean", loops.sequence_weights),
    ("sequence_sum_mean", sequence_sum_mean, "seq-mean-token-sum", lambda mask: [1 / len(mask)] * len(mask)),
    (
        "fixed_length_mean",
        partial(fixed_length_mean, length=SMALL[1]),
        "seq-mean-token-sum-norm",
        lambda mask: [1 / len(mask) / SMALL[1]] * len(mask),
    ),
):

    @group(name, "verl", "verl_float_mask")
    def reduction(b, ours=ours, mode=mode, weights=weights):
        loss, (x, mask), m = b.values.clone().requires_grad_(), b.nested("values", "mask"), b.mask.float()
        return {
            "rlkit": lambda: with_gradient(ours(loss, b.mask), loss),
            "loop": lambda: loop_reduction(x, mask, weights(mask)),
            # verl's trainer gives its losses a bool mask; elsewhere in these tables verl gets floats, its faster way
            "verl": lambda: with_gradient(verl.agg_loss(loss, b.mask, mode), loss),
            "verl_float_mask": lambda: with_gradient(verl.agg_loss(loss, m, mode), loss),
        }


@group("prompt mean")
def prompts(b):
    loss, (x, mask, ids) = b.values.clone().requires_grad_(), b.nested("values", "mask", "ids")
    counts = group_token_counts(b.mask, b.ids)

    def loop():
        n = [sum(sum(m) for m, k in zip(mask, ids, strict=True) if k == own) for own in ids]
        return loop_reduction(x, mask, [GROUP / len(ids) / y for y in n])

    return {"rlkit": lambda: with_gradient(prompt_mean(loss, b.mask, counts), loss), "loop": loop}


@group("tokens of a prompt's responses")
def prompt_tokens(b):
    mask, ids = b.nested("mask", "ids")

    def loop():
        return [sum(sum(m) for m, k in zip(mask, ids, strict=True) if k == own) for own in ids]

    return {"rlkit": lambda: group_token_counts(b.mask, b.ids), "loop": loop}


def mismatch_group(name, ours, loop, theirs):
    @group(name, "verl")
    def build(b):
        logprobs, m, lists = b.logprobs.detach(), b.long_mask, b.nested("logprobs", "old", "mask")
        return {
            "rlkit": lambda: ours(logprobs, b.old, b.mask),
            "loop": lambda: [loop(*rows) for rows in zip(*lists, strict=True)],
            "verl": lambda: theirs(logprobs - b.old, m)[0],
        }


def loop_weights(weigh):
    """`weigh(log-ratio)` on each token of a row."""
    return lambda p, q, m: [weigh(x - y) if on else 0.0 for x, y, on in zip(p, q, m, strict=True)]


def loop_row(keep, mean=False):
    """`keep(sum or mean of the row's log-ratios)` on each of its tokens."""

    def of_row(p, q, m):
        statistic = sum(x - y for x, y, on in zip(p, q, m, strict=True) if on) / (sum(m) if mean else 1)
        value = keep(statistic)
        return [value if on else 0.0 for on in m]

    return of_row


def weights_of(level, threshold):
    return lambda ratio, m: verl_mismatch.compute_rollout_correction_weights(ratio, m, level, threshold)


def mask_of(level, threshold):
    return lambda ratio, m: verl_mismatch.compute_rollout_rejection_mask(ratio, m, level, threshold)


def inside(x, low=0.8, high=1.25):
    return float(math.log(low) <= x <= math.log(high))


def exp20(x):
    return math.exp(min(max(x, -20.0), 20.0))


band = dict(low=0.8, high=1.25)
mismatch_group(
    "importance weights, token",
    importance_weights,
    loop_weights(lambda x: min(exp20(x), 2.0)),
    weights_of("token", 2.0),
)
mismatch_group(
    "importance weights, sequence",
    sequence_importance_weights,
    loop_row(lambda x: min(exp20(x), 2.0)),
    weights_of("sequence", 2.0),
)
mismatch_group(
    "importance weights, IcePop",
    partial(masked_importance_weights, **band),
    loop_weights(lambda x: inside(x) * exp20(x)),
    weights_of("token", "0.8_1.25"),
)
mismatch_group(
    "rejection mask, token", partial(rejection_mask, **band), loop_weights(inside), mask_of("token_k1", "0.8_1.25")
)
mismatch_group(
    "rejection mask, sequence",
    partial(sequence_rejection_mask, **band),
    loop_row(inside),
    mask_of("seq_sum_k1", "0.8_1.25"),
)
mismatch_group(
    "rejection mask, geometric mean",
    partial(geometric_rejection_mask, low=0.998, high=1 / 0.998),
    loop_row(lambda x: inside(x, 0.998, 1 / 0.998), mean=True),
    mask_of("seq_mean_k1", f"0.998_{1 / 0.998}"),
)
