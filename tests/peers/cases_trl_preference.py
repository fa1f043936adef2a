"""DPO and its variants, KTO, reward models, CPO (SimPO, SLiC) and ORPO."""

from types import SimpleNamespace

import torch
from cases_trl_trainer import case, fused_head_output, last_metrics, stand_in

from rlkit.losses import (
    apo_zero_loss,
    bradley_terry_loss,
    dpo_loss,
    hinge_dpo_loss,
    ipo_loss,
    kto_kl_estimate,
    kto_loss,
    orpo_loss,
    preference_stats,
    reward_centring_loss,
    robust_dpo_loss,
    sequence_logprobs,
    sequence_mean_logprobs,
    simpo_loss,
    slic_loss,
    token_logprobs,
    token_mean,
)

P, T, V = 4, 9, 11
BETA = 0.5


def responses(g, rows=2 * P):
    """Masks: prompts and responses of several lengths."""
    first = torch.randint(1, 4, (rows, 1), generator=g)
    last = torch.randint(6, T + 1, (rows, 1), generator=g)
    place = torch.arange(T)
    return {"mask": (place >= first) & (place < last), "attended": (place < last).expand(rows, T)}


def pairs(g):
    """Margins on both sides of every target."""
    ref = -3 * torch.rand(2 * P, T, generator=g)
    drift = torch.cat([torch.linspace(-0.5, 1.0, P), torch.zeros(P)])[:, None]
    logprobs = ref + drift + 0.7 * torch.randn(2 * P, T, generator=g)
    return {"logprobs": logprobs, "ref_logprobs": ref, "mask": responses(g)["mask"]}


def labelled(shift):
    """Inputs of KTO; by the shift its baseline is above or below 0."""

    def inputs(g):
        made = pairs(g)
        other = -3 * torch.rand(2 * P, T, generator=g)
        desirable = torch.arange(2 * P) % 3 > 0
        return made | {"other_logprobs": other + shift, "other_ref_logprobs": other, "desirable": desirable}

    return inputs


def rewards(*names):
    def inputs(g):
        made = {"rewards": 2 * torch.randn(2 * P, 1, generator=g), "margin": torch.rand(P, generator=g)}
        return {name: made[name] for name in ("rewards", *names)}

    return inputs


def logits(g):
    return {
        "logits": 2 * torch.randn(2 * P, T, V, generator=g),
        "tokens": torch.randint(0, V, (2 * P, T), generator=g),
        **responses(g),
    }


def dpo(*loss_types, metrics=(), **options):
    def peer(logprobs, ref_logprobs, mask, sum_pi_squared=None):
        from trl import DPOConfig, DPOTrainer

        trainer = stand_in(DPOTrainer, DPOConfig, loss_type=list(loss_types), beta=BETA, **options)
        trainer.loss_types = trainer.args.loss_type
        trainer.loss_weights = trainer.args.loss_weights or [1.0]
        trainer.precompute_ref_logps = False
        trainer.ref_model = lambda **_: fused_head_output(ref_logprobs, mask)
        tokens = torch.ones_like(mask, dtype=torch.long)
        batch = {"input_ids": tokens, "attention_mask": tokens, "completion_mask": mask.long()}
        output = fused_head_output(logprobs, mask)
        if sum_pi_squared is not None:  # only WPO reads it
            output.log_sum_sq_probs = sum_pi_squared[:, 1:].log()
        loss = trainer._compute_loss(lambda **_: output, batch, return_outputs=False)
        return {"out": loss, **last_metrics(trainer, metrics)}

    return peer


def kto(**options):
    def peer(logprobs, ref_logprobs, mask, other_logprobs, other_ref_logprobs, desirable):
        from trl import KTOConfig, KTOTrainer

        def model(responses, others):
            return lambda input_ids, **_: fused_head_output(others if input_ids[0, 0] else responses, mask)

        trainer = stand_in(KTOTrainer, KTOConfig, beta=BETA, **options)
        trainer.precompute_ref_logps, trainer.calculate_KL = False, trainer.loss_type == "kto"
        trainer.ref_model = model(ref_logprobs, other_ref_logprobs)
        tokens = torch.zeros_like(mask, dtype=torch.long)
        batch = {"input_ids": tokens, "attention_mask": tokens, "completion_mask": mask.long(), "label": desirable}
        batch |= {"KL_input_ids": tokens + 1, "KL_attention_mask": tokens, "KL_completion_mask": mask.long()}
        return {"out": trainer._compute_loss(model(logprobs, other_logprobs), batch, return_outputs=False)}

    return peer


def reward_model(**options):
    def peer(rewards, **margin):
        from trl import RewardConfig, RewardTrainer

        trainer = stand_in(RewardTrainer, RewardConfig, **options)
        batch = {"attention_mask": torch.ones(2 * P, T), **margin}
        return {"out": trainer.compute_loss(lambda **_: SimpleNamespace(logits=rewards), batch)}

    return peer


def whole_loss(name, **options):
    """A peer: the whole loss of CPO's or ORPO's trainer, from logits."""

    def peer(logits, tokens, mask, attended):
        from trl.experimental import cpo, orpo

        classes = {"cpo": (cpo.CPOTrainer, cpo.CPOConfig), "orpo": (orpo.ORPOTrainer, orpo.ORPOConfig)}[name]
        trainer = stand_in(*classes, beta=BETA, **options)
        trainer.is_encoder_decoder, trainer.pad_token_id, trainer.padding_value = False, 0, 0
        labels = tokens.masked_fill(~mask, -100)
        batch = {}
        for side, rows in (("chosen", slice(P)), ("rejected", slice(P, None))):
            batch[f"{side}_input_ids"], batch[f"{side}_labels"] = tokens[rows], labels[rows]
            batch[f"{side}_attention_mask"] = attended[rows].long()
        loss, _ = trainer.get_batch_loss_metrics(lambda *_, **__: SimpleNamespace(logits=logits), batch)
        return {"out": loss}

    return peer


def halves(x, of=sequence_logprobs):
    """Chosen and rejected, under the policy and under the reference."""
    return [*of(x.logprobs, x.mask).chunk(2), *of(x.ref_logprobs, x.mask).chunk(2)]


def with_stats(x):
    chosen, rejected, ref_chosen, ref_rejected = halves(x)
    stats = preference_stats(BETA * (chosen - ref_chosen), BETA * (rejected - ref_rejected))
    return {
        "out": dpo_loss(chosen, rejected, ref_chosen, ref_rejected, BETA).mean(),
        **{f"rewards.{theirs}": stats[f"preference/{ours}"] for theirs, ours in LOGGED.items()},
    }


LOGGED = {"accuracies": "accuracy", "margins": "margin", "chosen": "chosen", "rejected": "rejected"}


def kto_of_sums(x, **weights):
    logprobs, ref_logprobs = sequence_logprobs(x.logprobs, x.mask), sequence_logprobs(x.ref_logprobs, x.mask)
    kl = kto_kl_estimate(sequence_logprobs(x.other_logprobs, x.mask), sequence_logprobs(x.other_ref_logprobs, x.mask))
    return kto_loss(logprobs, ref_logprobs, x.desirable, kl, BETA, **weights).mean()


def unpaired_apo(x):
    logprobs, ref_logprobs = sequence_logprobs(x.logprobs, x.mask), sequence_logprobs(x.ref_logprobs, x.mask)
    return kto_loss(logprobs, ref_logprobs, x.desirable, 0.0, BETA).mean()


def scored(x, of=sequence_logprobs):
    """Chosen and rejected responses, their lengths, and the mean negative log-likelihood of the chosen tokens."""
    logprobs = token_logprobs(x.logits, x.tokens)
    return *of(logprobs, x.mask).chunk(2), *x.mask.sum(1).chunk(2), token_mean(-logprobs[:P], x.mask[:P])


def slic(x):
    chosen, rejected, *_ = scored(x)
    return slic_loss(BETA * chosen, BETA * rejected, margin=1.0).mean()


def simpo(x):
    *responses, nll = scored(x)
    return simpo_loss(*responses, beta=BETA, gamma=0.7).mean() + 0.3 * nll


def smoothed(x):
    chosen, rejected, *_ = scored(x)
    return dpo_loss(chosen, rejected, torch.zeros(P), torch.zeros(P), BETA, label_smoothing=0.1).mean()


def mean_ipo(x):
    chosen, rejected, *_ = scored(x, sequence_mean_logprobs)
    return ipo_loss(chosen, rejected, torch.zeros(P), torch.zeros(P), BETA).mean()


def orpo(x):
    *responses, _ = scored(x)
    logprobs = token_logprobs(x.logits, x.tokens)
    return BETA * orpo_loss(*responses).mean() + token_mean(-logprobs[:P, 1:], x.attended[:P, 1:])


def both(x):
    return x.rewards[:, 0].chunk(2)


CASES = [
    case("dpo_sigmoid", pairs, dpo("sigmoid", metrics=[f"rewards/{name}" for name in LOGGED]), with_stats),
    case("dpo_hinge", pairs, dpo("hinge"), lambda x: hinge_dpo_loss(*halves(x), BETA).mean()),
    case(
        "dpo_robust",
        pairs,
        dpo("robust", label_smoothing=0.2),
        lambda x: robust_dpo_loss(*halves(x), BETA, label_smoothing=0.2).mean(),
    ),
    case("dpo_apo_zero", pairs, dpo("apo_zero"), lambda x: apo_zero_loss(*halves(x), BETA).mean()),
    case(
        "dpo_ipo",
        pairs,
        dpo("ipo"),
        lambda x: ipo_loss(*halves(x, sequence_mean_logprobs), BETA).mean(),
        why="TRL divides by the responses' lengths, which ours leaves to the caller.",
    ),
    case(
        "dpo_sigmoid_norm",
        pairs,
        dpo("sigmoid_norm"),
        lambda x: dpo_loss(*halves(x, sequence_mean_logprobs), BETA).mean(),
    ),
    case(
        "dpo_sigmoid_and_sft",
        pairs,
        dpo("sigmoid", "sft", loss_weights=[0.8, 0.2]),
        lambda x: 0.8 * dpo_loss(*halves(x), BETA).mean() + 0.2 * token_mean(-x.logprobs[:P], x.mask[:P]),
    ),
    case("kto", labelled(0.2), kto(), kto_of_sums),
    case("kto_kl_below_zero", labelled(-0.2), kto(), kto_of_sums),
    case(
        "kto_weights",
        labelled(0.1),
        kto(desirable_weight=1.2, undesirable_weight=0.6),
        lambda x: kto_of_sums(x, desirable_weight=1.2, undesirable_weight=0.6),
    ),
    case(
        "kto_apo_zero_unpaired",
        labelled(0.0),
        kto(loss_type="apo_zero_unpaired"),
        unpaired_apo,
        why="Unpaired APO-zero is KTO's loss with a baseline of 0.",
    ),
    case("reward", rewards(), reward_model(), lambda x: bradley_terry_loss(*both(x)).mean(), grad=("rewards",)),
    case(
        "reward_margin",
        rewards("margin"),
        reward_model(),
        lambda x: bradley_terry_loss(*both(x), x.margin).mean(),
        grad=("rewards",),
    ),
    case(
        "reward_centred",
        rewards(),
        reward_model(center_rewards_coefficient=0.01),
        lambda x: (bradley_terry_loss(*both(x)) + 0.01 * reward_centring_loss(*both(x))).mean(),
        grad=("rewards",),
    ),
    case(
        "cpo_simpo",
        logits,
        whole_loss("cpo", loss_type="simpo", simpo_gamma=0.7, cpo_alpha=0.3),
        simpo,
        grad=("logits",),
    ),
    case(
        "cpo_hinge",
        logits,
        whole_loss("cpo", loss_type="hinge", cpo_alpha=0.0),
        slic,
        grad=("logits",),
        why="TRL scales the log-probabilities by beta where SLiC sets a margin.",
    ),
    case(
        "cpo_sigmoid",
        logits,
        whole_loss("cpo", loss_type="sigmoid", label_smoothing=0.1, cpo_alpha=0.0),
        smoothed,
        grad=("logits",),
        why="CPO is DPO without a reference, here zeros.",
    ),
    case(
        "cpo_ipo",
        logits,
        whole_loss("cpo", loss_type="ipo", cpo_alpha=0.0),
        mean_ipo,
        grad=("logits",),
        why="CPO takes means over tokens and no reference, here zeros.",
    ),
    case(
        "orpo",
        logits,
        whole_loss("orpo"),
        orpo,
        grad=("logits",),
        why="TRL adds a likelihood term that scores the prompt's tokens too.",
    ),
]
