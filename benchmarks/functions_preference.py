"""Groups of preference losses on 4096 pairs of responses: the mean of the losses and its gradient by both sides.

TRL's CPO and ORPO trainers have their formulas in methods of their own, which are called; given log-ratios, CPO's are
DPO's. What stands in the middle of the steps of the DPO and KTO trainers, among models and metrics, is left out. Loops
are plain Python, with derivatives worked out by hand: a rule takes one pair's numbers, and returns its loss and the
derivatives by the first of them.
"""

import math
from functools import partial
from types import SimpleNamespace

import torch
from functions_common import PEERS, group, with_gradient

from rlkit.losses import (
    a_star_po_loss,
    alpha_divergence_dpo_loss,
    alphapo_loss,
    aot_loss,
    aot_unpaired_loss,
    apo_down_loss,
    apo_zero_loss,
    bco_loss,
    bradley_terry_loss,
    discopop_loss,
    dpo_loss,
    exo_loss,
    forward_kl_dpo_loss,
    hinge_dpo_loss,
    ipo_loss,
    js_dpo_loss,
    kto_kl_estimate,
    kto_loss,
    nca_loss,
    orpo_loss,
    preference_mean,
    preference_stats,
    reward_centring_loss,
    robust_dpo_loss,
    simpo_loss,
    slic_loss,
    sppo_loss,
    tpo_loss,
)

if "trl" in PEERS:
    from trl import RewardTrainer
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

P = 4096
BETA = 0.5
SIDES = ("chosen", "rejected")
REFERENCE = (*SIDES, "ref_chosen", "ref_rejected")
LENGTHS = (*SIDES, "chosen_lengths", "rejected_lengths")


def pairs() -> dict[str, torch.Tensor]:
    """Exact multiples of 1/512; no two log-ratios are equal and no two margins, so that all contestants sort alike."""
    g = torch.Generator().manual_seed(0)
    up, down, margin = ((torch.randperm(P, generator=g) - P // 2) / 512 for _ in range(3))
    ref_chosen = (-200 * torch.rand(P, generator=g)).mul_(512).round_() / 512 - 60
    chosen = ref_chosen + up
    rejected = chosen - 8 * margin
    made = dict(chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=rejected - down, zeros=0 * up)
    made |= dict(chosen_rewards=up, rejected_rewards=down, margin=margin.abs(), desirable=torch.arange(P) % 3 > 0)
    for name in ("chosen_lengths", "rejected_lengths"):
        made[name] = torch.randint(20, 400, (P,), generator=g)
    return made


def by_pair(rule, *columns):
    """The mean over pairs of the rule's losses, and its gradients."""
    losses, *gradients = zip(*(rule(*row) for row in zip(*columns, strict=True)), strict=True)
    return sum(losses) / P, *([x / P for x in gradient] for gradient in gradients)


def pair_group(name, ours, rule, columns, trl=None, loop=by_pair, sides=2):
    """`ours` takes the columns, and so does `trl`; the gradient is by the first `sides` of them."""

    @group(name, *["trl"] * (trl is not None))
    def build(_):
        given = [x.clone() for x in map(pairs().get, columns)]
        leaves = [x.requires_grad_() for x in given[:sides]]
        lists = [x.tolist() for x in given]

        def run(function, mean):
            loss = mean(function(*given))
            return loss, *torch.autograd.grad(loss, leaves)

        return {
            "rlkit": lambda: run(ours, preference_mean),
            "loop": lambda: loop(rule, *lists),
            "trl": lambda: run(trl, torch.mean),
        }


def cpo(given, **settings):
    """CPO's method, which returns two tensors to log as well; `given(*columns)` are its two arguments."""
    defaults = dict(alpha=0.0, beta=BETA, label_smoothing=0.0, accelerator=SimpleNamespace(device="cpu"))
    trainer = SimpleNamespace(**{**defaults, **settings})
    return lambda *columns: CPOTrainer.cpo_loss(trainer, *given(*columns))[0]


def ratios(chosen, rejected, ref_chosen, ref_rejected):
    return chosen - ref_chosen, rejected - ref_rejected


def means(chosen, rejected, chosen_lengths, rejected_lengths):
    return chosen / chosen_lengths, rejected / rejected_lengths


def trl_orpo(*columns):
    trainer = SimpleNamespace(beta=-1.0, accelerator=SimpleNamespace(device="cpu"))  # its losses have no minus
    return ORPOTrainer.odds_ratio_loss(trainer, *means(*columns))[0]


# --- rules of a pair's margin h: the loss and its derivative


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def soft(x):
    """-log sigmoid(x)."""
    return math.log1p(math.exp(-abs(x))) + max(-x, 0.0)


def of_margin(rule):
    def of_pair(w, v, ref_w, ref_v):
        loss, slope = rule(w - v - ref_w + ref_v)
        return loss, slope, -slope

    return of_pair


def dpo(h):
    return soft(BETA * h), -BETA * sigmoid(-BETA * h)


def robust(h, e=0.1):
    x = BETA * h
    loss = (1 - e) * soft(x) - e * soft(-x)
    return loss / (1 - 2 * e), BETA * (-(1 - e) * sigmoid(-x) - e * sigmoid(x)) / (1 - 2 * e)


def ipo(h):
    return (h - 0.5 / BETA) ** 2, 2 * (h - 0.5 / BETA)


def hinge(h):
    return (1 - BETA * h, -BETA) if BETA * h < 1 else (0.0, 0.0)


def exo(h, e=1e-3):
    q = sigmoid(BETA * h)
    win, lose = -soft(BETA * h) - math.log(1 - e), -soft(-BETA * h) - math.log(e)
    return q * win + (1 - q) * lose, BETA * q * (1 - q) * (win - lose)


def discopop(h, tau=0.5):
    x = BETA * h
    s, e = sigmoid(x / tau), math.exp(-x)
    turn = s * (1 - s) / tau
    return (1 - s) * soft(x) + s * e, BETA * (turn * (e - soft(x)) - (1 - s) * sigmoid(-x) - s * e)


# --- rules of both log-ratios, and of both means


def of_ratios(rule):
    return lambda w, v, ref_w, ref_v: rule(w - ref_w, v - ref_v)


def apo_zero(u, d):
    x, y = sigmoid(-BETA * u), sigmoid(BETA * d)
    return x + y, -BETA * x * (1 - x), BETA * y * (1 - y)


def apo_down(u, d):
    x, y = sigmoid(BETA * u), sigmoid(-BETA * (u - d))
    fall = BETA * y * (1 - y)
    return x + y, BETA * x * (1 - x) - fall, fall


def nca(u, d):
    x, y = BETA * u, BETA * d
    loss = soft(x) + 0.5 * soft(-x) + 0.5 * soft(-y)
    return loss, BETA * (0.5 * sigmoid(x) - sigmoid(-x)), BETA * 0.5 * sigmoid(y)


def sppo(u, d):
    x, y = u - 0.5 / BETA, d + 0.5 / BETA
    return x**2 + y**2, 2 * x, 2 * y


def bco(u, d, delta=0.2):
    x, y = BETA * u - delta, delta - BETA * d
    return soft(x) + soft(y), -BETA * sigmoid(-x), BETA * sigmoid(-y)


def of_rewards(reward, slope, beta=BETA, gamma=0.0):
    """-log sigmoid(beta (reward(u) - reward(d)) - gamma)."""

    def rule(u, d):
        x = beta * (reward(u) - reward(d)) - gamma
        return soft(x), -beta * sigmoid(-x) * slope(u), beta * sigmoid(-x) * slope(d)

    return rule


def power(alpha):
    return lambda x: (1 - math.exp(-alpha * x)) / alpha, lambda x: math.exp(-alpha * x)


def of_means(rule):
    def of_pair(w, v, n, m):
        loss, by_w, by_v = rule(w / n, v / m)
        return loss, by_w / n, by_v / m

    return of_pair


def log_odds(x):
    return x - math.log(1 - math.exp(x))


simpo = of_rewards(lambda x: x, lambda x: 1.0, 2.0, 1.0)
orpo = of_rewards(log_odds, lambda x: 1 / (1 - math.exp(x)), 1.0)

WITH_REFERENCE = (  # name, ours, the rule, TRL's loss type of CPO
    ("DPO", dpo_loss, of_margin(dpo), "sigmoid"),
    ("DPO, robust", robust_dpo_loss, of_margin(robust), None),
    ("IPO", ipo_loss, of_margin(ipo), "ipo"),
    ("DPO, hinge", hinge_dpo_loss, of_margin(hinge), "hinge"),
    ("EXO", exo_loss, of_margin(exo), None),
    ("DiscoPOP", partial(discopop_loss, tau=0.5), of_margin(discopop), None),
    ("APO-zero", apo_zero_loss, of_ratios(apo_zero), None),
    ("APO-down", apo_down_loss, of_ratios(apo_down), None),
    ("NCA", nca_loss, of_ratios(nca), None),
    ("SPPO", sppo_loss, of_ratios(sppo), None),
    ("BCO", partial(bco_loss, delta=0.2), of_ratios(bco), None),
    ("f-DPO, alpha", alpha_divergence_dpo_loss, of_ratios(of_rewards(*power(0.5))), None),
    ("f-DPO, forward KL", forward_kl_dpo_loss, of_ratios(of_rewards(*power(1.0))), None),
    ("f-DPO, Jensen-Shannon", js_dpo_loss, of_ratios(of_rewards(lambda x: -soft(x), lambda x: sigmoid(-x))), None),
)
for name, ours, rule, kind in WITH_REFERENCE:
    trl = cpo(ratios, loss_type=kind) if kind else None
    pair_group(name, partial(ours, beta=BETA), rule, REFERENCE, trl)

SIMPO, ALPHAPO = (dict(loss_type="simpo", beta=b, simpo_gamma=g) for b, g in ((2.0, 1.0), (2.5, 0.1)))
pair_group("SimPO", simpo_loss, of_means(simpo), LENGTHS, cpo(means, **SIMPO))
pair_group(
    "AlphaPO", alphapo_loss, of_means(of_rewards(*power(0.25), 2.5, 0.1)), LENGTHS, cpo(means, alpha=0.25, **ALPHAPO)
)
pair_group("ORPO", orpo_loss, of_means(orpo), LENGTHS, trl_orpo)
pair_group(
    "SLiC",
    slic_loss,
    lambda w, v: (1 - w + v, -1.0, 1.0) if w - v < 1 else (0.0, 0.0, 0.0),
    SIDES,
    cpo(lambda *sides: sides, loss_type="hinge", beta=1.0),
)


def sorted_loop(keys):
    """DPO of sorted numbers: `keys(row)` are those of the policy and what they are set against."""

    def loop(signs, *columns):
        first, second = zip(*map(keys, zip(*columns, strict=True)), strict=True)
        order, other = (sorted(range(P), key=x.__getitem__) for x in (first, second))
        loss, by_first, by_second = 0.0, [0.0] * P, [0.0] * P
        for i, j in zip(order, other, strict=True):
            x, slope = dpo(first[i] - second[j])
            loss, by_first[i], by_second[j] = loss + x / P, slope / P, -slope / P
        return loss, by_first, [-x for x in by_first] if signs == "margins" else by_second

    return loop


pair_group(
    "AOT",
    partial(aot_loss, beta=BETA),
    "margins",
    REFERENCE,
    loop=sorted_loop(lambda row: (row[0] - row[1], row[2] - row[3])),
)
pair_group(
    "AOT, unpaired",
    partial(aot_unpaired_loss, beta=BETA),
    "ratios",
    REFERENCE,
    loop=sorted_loop(lambda row: (row[0] - row[2], row[1] - row[3])),
)


# --- single responses, and rewards


@group("KTO and its baseline")
def kto(_):
    x = pairs()
    logprobs, ref, good = x["chosen"].requires_grad_(), x["ref_chosen"], x["desirable"]
    other, other_ref = x["rejected"], x["ref_rejected"] - 0.5
    lists = [y.tolist() for y in (logprobs, ref, good, other, other_ref)]

    def ours():
        kl = kto_kl_estimate(other, other_ref)
        return with_gradient(preference_mean(kto_loss(logprobs, ref, good, kl, BETA)), logprobs)

    def loop():
        kl = max(0.0, sum(x - y for x, y in zip(*lists[3:], strict=True)) / P)

        def rule(p, q, desirable):
            side = BETA if desirable else -BETA
            s = sigmoid(-side * (p - q - kl))
            return s, -side * s * (1 - s)

        return by_pair(rule, *lists[:3])

    return {"rlkit": ours, "loop": loop}


def bradley_terry(w, v, margin=0.0):
    slope = sigmoid(margin - w + v)
    return soft(w - v - margin), -slope, slope


REWARDS = ("chosen_rewards", "rejected_rewards")


def tpo(w, v, g):
    x = BETA * (w - v) - 0.3
    return soft(x) - 0.7 * g, -BETA * sigmoid(-x), BETA * sigmoid(-x), -0.7


def a_star_po(p, q, r, v):
    error = 0.1 * (p - q) - (r - v)
    return error**2, 2 * 0.1 * error


TPO = partial(tpo_loss, beta=BETA, alpha=0.7, gamma=0.3)
pair_group("TPO", TPO, tpo, (*SIDES, "ref_chosen"), sides=3)
A_STAR = ("chosen", "ref_chosen", "chosen_rewards", "zeros")
pair_group("A*-PO", partial(a_star_po_loss, beta=0.1), a_star_po, A_STAR, sides=1)
pair_group("Bradley-Terry, margins", bradley_terry_loss, bradley_terry, (*REWARDS, "margin"))


@group("Bradley-Terry, centred, with metrics", "trl")
def reward_model(_):
    x = pairs()
    rewards = torch.cat([x[name] for name in REWARDS])[:, None].requires_grad_()
    lists = [x[name].tolist() for name in REWARDS]
    inputs = dict(attention_mask=torch.ones(2 * P, 1))
    same = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x)
    args, mode = SimpleNamespace(center_rewards_coefficient=0.01), SimpleNamespace(training=False)
    names = ("num_tokens", "min_reward", "mean_reward", "max_reward", "accuracy", "margin")

    def ours():
        up, down = rewards[:, 0].chunk(2)
        loss = preference_mean(bradley_terry_loss(up, down)) + 0.01 * preference_mean(reward_centring_loss(up, down))
        for stat in preference_stats(up, down).values():
            stat.item()  # as TRL does
        return with_gradient(loss, rewards)

    def loop():
        def rule(w, v):
            loss, by_w, by_v = bradley_terry(w, v)
            return loss + 0.01 * (w + v) ** 2, by_w + 0.02 * (w + v), by_v + 0.02 * (w + v)

        loss, up, down = by_pair(rule, *lists)
        return loss, [[x] for x in (*up, *down)]

    def theirs():
        trainer = SimpleNamespace(model=mode, args=args, accelerator=same, _total_train_tokens=0)
        trainer._metrics = {"eval": {name: [] for name in names}}
        loss = RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=rewards), inputs)
        return with_gradient(loss, rewards)

    return {"rlkit": ours, "loop": loop, "trl": theirs}


@group("preference metrics")
def stats(_):
    up, down = (pairs()[name] for name in REWARDS)
    lists = up.tolist(), down.tolist()

    def loop():
        rows = [*zip(*lists, strict=True)]
        mean_up, mean_down = (sum(x) / P for x in lists)
        return sum(x > y for x, y in rows) / P, sum(x - y for x, y in rows) / P, mean_up, mean_down

    return {"rlkit": lambda: tuple(preference_stats(up, down).values()), "loop": loop}
