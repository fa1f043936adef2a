"""DPO's less common losses, divergences and weightings, CPO's AlphaPO, and TPO."""

from types import SimpleNamespace

import torch
from cases_trl_preference import BETA, P, T, V, dpo, halves, logits, pairs, responses, scored, whole_loss
from cases_trl_trainer import case, stand_in

from rlkit.losses import (
    alpha_divergence_dpo_loss,
    alphapo_loss,
    aot_loss,
    aot_unpaired_loss,
    apo_down_loss,
    bco_loss,
    discopop_loss,
    dpo_loss,
    exo_loss,
    forward_kl_dpo_loss,
    js_dpo_loss,
    ld_sequence_logprobs,
    nca_loss,
    sequence_logprobs,
    sequence_mean_logprobs,
    sppo_loss,
    token_logprobs,
    token_mean,
    tpo_loss,
    wpo_weights,
)


def weighed(g):
    return pairs(g) | {"sum_pi_squared": torch.rand(2 * P, T, generator=g).clamp(min=0.05)}


def pairwise(name, loss, *, why="", ours=None, **options):
    """A case of one loss type: the mean over pairs, by default with TRL's options by their own names."""
    ours = options if ours is None else ours
    return case(
        f"dpo_{name}", pairs, dpo(name, **options), lambda x: loss(*halves(x), beta=BETA, **ours).mean(), why=why
    )


def divergence(kind, loss, *, why="", ours=None, **options):
    peer = dpo("sigmoid", f_divergence_type=kind, **options)
    return case(f"dpo_{kind}", pairs, peer, lambda x: loss(*halves(x), BETA, **(ours or {})).mean(), why=why)


def mpo(x):
    found = dpo_loss(*halves(x), BETA), bco_loss(*halves(x), 0.0, BETA)
    return 0.8 * found[0].mean() + 0.2 * found[1].mean() + token_mean(-x.logprobs[:P], x.mask[:P])


def ld_dpo(x):
    shared = torch.minimum(*x.mask.sum(1).chunk(2)).repeat(2)
    return dpo_loss(*halves(x, lambda logprobs, mask: ld_sequence_logprobs(logprobs, mask, shared, 0.3)), BETA).mean()


def wpo(x):
    chosen, rejected = wpo_weights(x.logprobs, x.sum_pi_squared, x.mask).chunk(2)
    return (chosen * rejected * nca_loss(*halves(x), BETA)).mean()


def alphapo(alpha):
    def ours(x):
        *responses, _ = scored(x)
        return alphapo_loss(*responses, alpha=alpha, beta=BETA, gamma=0.7).mean()

    peer = whole_loss("cpo", loss_type="alphapo", alpha=alpha, simpo_gamma=0.7)
    return case(f"cpo_alphapo_{alpha}", logits, peer, ours, grad=("logits",))


def smoothed_simpo(x):
    chosen, rejected, n, m, _ = scored(x)
    zeros = torch.zeros(P)
    return dpo_loss(chosen / n - 0.7 / BETA, rejected / m, zeros, zeros, BETA, label_smoothing=0.1).mean()


def triples(g):
    """Chosen, rejected and gold answers."""
    made = responses(g, 3 * P)
    made["logits"] = 2 * torch.randn(3 * P, T, V, generator=g)
    return made | {"tokens": torch.randint(0, V, (3 * P, T), generator=g)}


def tpo(name, scores, gamma=0.0, **options):
    """TRL's likelihood of the gold responses is a mean over all of their tokens."""

    def peer(logits, tokens, mask, attended):
        from trl.experimental.tpo import TPOConfig, TPOTrainer

        trainer = stand_in(TPOTrainer, TPOConfig, beta=BETA, tpo_alpha=0.7, **options)
        batch = {"input_ids": tokens, "attention_mask": attended.long(), "completion_mask": mask.long()}
        return {"out": trainer._compute_loss(lambda **_: SimpleNamespace(logits=logits), batch, return_outputs=False)}

    def ours(x):
        logprobs = token_logprobs(x.logits, x.tokens)
        chosen, rejected, _ = scores(logprobs, x.mask).chunk(3)
        gold = sequence_logprobs(logprobs, x.mask)[2 * P :] * P / x.mask[2 * P :].sum()
        return tpo_loss(chosen, rejected, gold, BETA, alpha=0.7, gamma=gamma).mean()

    return case(name, triples, peer, ours, grad=("logits",))


CASES = [
    pairwise("apo_down", apo_down_loss),
    pairwise("exo_pair", exo_loss, label_smoothing=0.01),
    pairwise("nca_pair", nca_loss),
    pairwise("sppo_hard", sppo_loss),
    pairwise("bco_pair", bco_loss, ours={"delta": 0.0}, why="TRL's BCO has no reward shift."),
    pairwise("discopop", discopop_loss, discopop_tau=0.7, ours={"tau": 0.7}),
    pairwise("aot", aot_loss, label_smoothing=0.1),
    pairwise("aot_unpaired", aot_unpaired_loss, label_smoothing=0.1),
    divergence("forward_kl", forward_kl_dpo_loss),
    divergence("js_divergence", js_dpo_loss),
    divergence(
        "alpha_divergence",
        alpha_divergence_dpo_loss,
        f_alpha_divergence_coef=0.7,
        ours={"alpha": 0.3},
        why="TRL's coefficient is 1 - alpha.",
    ),
    case("dpo_mpo", pairs, dpo("sigmoid", "bco_pair", "sft", loss_weights=[0.8, 0.2, 1.0]), mpo),
    case("dpo_ld", pairs, dpo("sigmoid", ld_alpha=0.3), ld_dpo),
    case(
        "dpo_wpo",
        weighed,
        dpo("nca_pair", use_weighting=True),
        wpo,
        why="TRL, unlike WPO's authors, lets the weight of a pair be above 1.",
    ),
    alphapo(0.25),
    alphapo(-0.5),
    case(
        "cpo_simpo_smoothed",
        logits,
        whole_loss("cpo", loss_type="simpo", simpo_gamma=0.7, cpo_alpha=0.0, label_smoothing=0.1),
        smoothed_simpo,
        grad=("logits",),
        why="SimPO with label smoothing is DPO of means, the margin taken off the chosen ones.",
    ),
]
TRIPLES = [
    tpo("tpo", sequence_logprobs),
    tpo("tpo_l", sequence_mean_logprobs, gamma=0.4, loss_type="tpo-l", tpo_l_gamma=0.4),
]
