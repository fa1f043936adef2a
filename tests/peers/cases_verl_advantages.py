"""Our advantages and reward shaping beside verl 0.9.1's; see cases_verl.py."""

from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from case import Case
from cases_verl_policy import random_mask

from rlkit import advantages as A
from rlkit import losses as L

GROUPS = [4, 1, 4, 7, 1, 4, 2, 2]  # one alone, row 3; rows 6 and 7 tie; row 5 of three has no token


def outcome(g, groups=GROUPS):
    """Rewards with ties and a 0, one a sample; row 1 beats row 4, so that one group has a best."""
    rewards = torch.randint(5, (8,), generator=g) / 4 - 0.25
    rewards[[1, 3, 4, 6, 7]] = torch.tensor([1.0, 0.75, 0.0, 1.0, 1.0])
    return {"rewards": rewards, "mask": random_mask(g), "group_ids": torch.tensor(groups)}


def no_singleton(g):
    return outcome(g, groups=[4, 1, 4, 1, 1, 4, 2, 2])


def alone(group_ids):
    return (group_ids[:, None] == group_ids).sum(1) == 1


def group_std(rewards, group_ids):
    return torch.stack([rewards[group_ids == k].std() for k in group_ids])


def last_column(rewards, mask):
    """[B, T]: verl sums token rewards, wherever they stand."""
    return F.pad(rewards[:, None], (mask.shape[1] - 1, 0))


def outcome_case(name, estimator, ours, why="", inputs=outcome, **options):
    def peer(rewards, mask, group_ids):
        from verl.trainer.ppo.core_algos import get_adv_estimator_fn

        given = {"token_level_rewards": last_column(rewards, mask), "response_mask": mask.long()}
        return {"advantages": get_adv_estimator_fn(estimator)(**given, index=group_ids.numpy(), **options)[0]}

    def ours_(rewards, mask, group_ids):
        return {"advantages": A.expand_to_tokens(ours(rewards, group_ids, mask), mask)}

    return Case(name, inputs, peer, ours_, why=why)


ALONE = "verl gives a group of one its raw reward, we give 0: with nothing to compare with, it would only push up"
WHITE_ALONE = "as in the case without a group of one, whose raw reward verl whitens along with the others"


def plus_alone(function, scale=1.0):
    return lambda r, ids, mask: function(r, ids) + alone(ids) * r * scale


def gpg(rewards, group_ids, mask):
    alpha = len(rewards) / rewards.count_nonzero()
    return alpha * (A.dr_grpo_advantages(rewards, group_ids) + alone(group_ids) * rewards)


def opo(rewards, group_ids, mask):
    return A.opo_advantages(rewards, group_ids, mask.sum(1)) + alone(group_ids) * rewards


def white(advantages, mask):
    """One a sample, whitened over tokens."""
    return A.masked_whiten(A.expand_to_tokens(advantages, mask), mask).sum(1) / mask.sum(1).clamp(min=1)


OUTCOME = [
    outcome_case("grpo", "grpo", plus_alone(A.grpo_advantages, 1 / (1 + 1e-6)), ALONE),
    outcome_case("grpo_no_singleton", "grpo", lambda r, ids, m: A.grpo_advantages(r, ids), inputs=no_singleton),
    outcome_case(
        "grpo_epsilon", "grpo", plus_alone(lambda r, i: A.grpo_advantages(r, i, eps=0.1), 1 / 1.1), ALONE, epsilon=0.1
    ),
    outcome_case("dr_grpo", "grpo", plus_alone(A.dr_grpo_advantages), ALONE, norm_adv_by_std_in_grpo=False),
    outcome_case("grpo_vectorized", "grpo_vectorized", plus_alone(A.grpo_advantages, 1 / (1 + 1e-6)), ALONE),
    outcome_case(
        "dr_grpo_vectorized", "grpo_vectorized", plus_alone(A.dr_grpo_advantages), ALONE, norm_adv_by_std_in_grpo=False
    ),
    outcome_case("rloo", "rloo", plus_alone(A.rloo_advantages), ALONE),
    outcome_case("rloo_vectorized", "rloo_vectorized", lambda r, ids, m: A.rloo_advantages(r, ids)),
    outcome_case("opo", "opo", opo, ALONE),
    outcome_case(
        "gpg",
        "gpg",
        gpg,
        "verl's alpha is B over the rewards that are not 0, so it moves when all rewards are shifted; the paper's, our "
        "default, counts samples of groups that teach something. " + ALONE,
    ),
    outcome_case(
        "grpo_passk",
        "grpo_passk",
        lambda r, ids, m: A.passk_leave_one_out_advantages(r, ids),
        inputs=no_singleton,
        config={"norm_adv_by_std_in_grpo": False},
    ),
    outcome_case(
        "grpo_passk_norm",
        "grpo_passk",
        lambda r, ids, m: A.passk_leave_one_out_advantages(r, ids) / (group_std(r, ids) + 1e-6),
        "verl divides by the group's deviation by default; the paper has no such division, and neither have we",
        inputs=no_singleton,
        config={"norm_adv_by_std_in_grpo": True},
    ),
    outcome_case(
        "reinforce_plus_plus_baseline",
        "reinforce_plus_plus_baseline",
        lambda r, ids, m: A.reinforce_plus_plus_baseline_advantages(r, ids, lengths=m.sum(1)),
        inputs=no_singleton,
    ),
    outcome_case(
        "reinforce_plus_plus_baseline_singleton",
        "reinforce_plus_plus_baseline",
        lambda r, ids, m: white(A.dr_grpo_advantages(r, ids) + alone(ids) * r, m),
        WHITE_ALONE,
    ),
    outcome_case(
        "gdpo_one_reward",
        "gdpo",
        lambda r, ids, m: A.gdpo_advantages(r[:, None], ids, lengths=m.sum(1)),
        inputs=no_singleton,
    ),
    outcome_case(
        "gdpo_singleton",
        "gdpo",
        lambda r, ids, m: white(A.grpo_advantages(r, ids) + alone(ids) * r / (1 + 1e-6), m),
        WHITE_ALONE,
    ),
]


def several_rewards(g):
    inputs = no_singleton(g)
    first = inputs.pop("rewards")
    other = torch.randint(2, (8,), generator=g).float(), torch.randint(-8, 9, (8,), generator=g) / 4
    return inputs | {"rewards": torch.stack([first, *other], 1)}


def gdpo_case(name, weights):
    def peer(rewards, mask, group_ids):
        from verl.trainer.ppo.core_algos import compute_gdpo_outcome_advantage

        keys = ["a", "b", "c"]
        advantages, _ = compute_gdpo_outcome_advantage(
            token_level_rewards=last_column(rewards.sum(1), mask),
            response_mask=mask.long(),
            index=group_ids.numpy(),
            config={"gdpo_reward_keys": keys, "gdpo_reward_weights": weights},
            non_tensor_batch=dict(zip(keys, rewards.T.numpy(), strict=True)),
            batch={"prompts": torch.zeros(8, 2), "attention_mask": F.pad(mask.long(), (2, 0), value=1)},
        )
        return {"advantages": advantages}

    def ours(rewards, mask, group_ids):
        w = None if weights is None else torch.tensor(weights)
        advantages = A.gdpo_advantages(rewards, group_ids, w, lengths=mask.sum(1))
        return {"advantages": A.expand_to_tokens(advantages, mask)}

    return Case(name, several_rewards, peer, ours)


def remax_inputs(g):
    inputs = outcome(g)
    del inputs["group_ids"]
    return inputs | {"greedy_rewards": torch.randint(3, (8,), generator=g) / 2}


def remax_peer(rewards, greedy_rewards, mask):
    from verl.trainer.ppo.core_algos import compute_remax_outcome_advantage

    m = mask.long()
    where = torch.where(mask.any(1), m.cumsum(1).argmax(1), 0)  # the last token
    scores = F.one_hot(where, m.shape[1]) * rewards[:, None]
    return {"advantages": compute_remax_outcome_advantage(scores, greedy_rewards, m)[0] * m}


def remax_ours(rewards, greedy_rewards, mask):
    return {"advantages": A.expand_to_tokens(A.remax_advantages(rewards, greedy_rewards), mask)}


def token_rewards(g, gaps=True):
    """Rewards along the way and at the end; values; and what the optimal baseline needs."""
    mask = random_mask(g, gaps)
    few = torch.rand(mask.shape, generator=g) < 0.3
    return {
        "rewards": torch.where(few | (mask.cumsum(1) == mask.sum(1, keepdim=True)), torch.randn(8, 10, generator=g), 0),
        "mask": mask,
        "values": torch.randn(8, 10, generator=g),
    }


def gae_case(name, gamma, lam):
    def peer(rewards, values, mask):
        from verl.trainer.ppo.core_algos import compute_gae_advantage_return

        advantages, returns = compute_gae_advantage_return(rewards, values, mask.long(), gamma, lam)
        return {"advantages": advantages * mask, "returns": returns * mask}

    def ours(rewards, values, mask):
        advantages, returns = A.gae(rewards, values, mask, gamma, lam)
        return {"advantages": A.masked_whiten(advantages, mask), "returns": returns}

    why = "verl whitens within its estimator, ours is a call of its own; on the mask, as verl leaves numbers outside it"
    return Case(name, token_rewards, peer, ours, why=why)


def reinforce_plus_plus_case(name, gamma):
    def peer(rewards, values, mask):
        from verl.trainer.ppo.core_algos import compute_reinforce_plus_plus_outcome_advantage as function

        advantages, returns = function(rewards, mask.long(), config=SimpleNamespace(gamma=gamma))
        return {"advantages": advantages, "returns": returns}

    def ours(rewards, values, mask):
        advantages = A.reinforce_plus_plus_advantages(rewards, mask, gamma)
        return {"advantages": advantages, "returns": A.discounted_returns(rewards, mask, gamma)}

    return Case(name, token_rewards, peer, ours)


def baseline_case(name, function, gaps, tail=True, weighted=False):
    def inputs(g):
        x = token_rewards(g, gaps)
        x |= {"group_ids": torch.tensor(GROUPS), "rollout_weights": 0.5 + torch.rand(8, 10, generator=g)}
        return x | {"logits": torch.randn(8, 10, 6, generator=g), "targets": torch.randint(6, (8, 10), generator=g)}

    def peer(rewards, values, mask, group_ids, rollout_weights, logits, targets):
        from verl.trainer.ppo import core_algos
        from verl.utils.torch_functional import calculate_sum_pi_squared_from_logits, logprobs_from_logits

        advantages, _ = getattr(core_algos, function)(
            rewards,
            mask.long(),
            group_ids.numpy(),
            old_log_probs=logprobs_from_logits(logits, targets),
            sum_pi_squared=calculate_sum_pi_squared_from_logits(logits),
            rollout_is_weights=rollout_weights if weighted else None,
            handle_zero_tail=tail,
        )
        return {"advantages": advantages}

    def ours(rewards, values, mask, group_ids, rollout_weights, logits, targets):
        advantages = A.optimal_token_baseline_advantages(
            rewards,
            group_ids,
            L.target_logprobs(logits, targets),
            L.sum_pi_squared(logits),
            mask,
            rollout_weights if weighted else None,
            baseline_alone=not tail,
        )
        return {"advantages": advantages + alone(group_ids)[:, None] * A.discounted_returns(rewards, mask)}

    return Case(name, inputs, peer, ours, why="verl gives a group of one its return, we give 0: nothing to compare it")


SINGLE, MULTI = "compute_optimal_token_baseline_advantage", "compute_multi_turn_optimal_token_baseline_advantage"

TOKEN = [
    gdpo_case("gdpo", None),
    gdpo_case("gdpo_weights", [1.0, 0.5, 2.0]),
    Case("remax", remax_inputs, remax_peer, remax_ours, why="on the mask: verl leaves the return on tool output"),
    gae_case("gae", 1.0, 0.95),
    gae_case("gae_discount", 0.9, 0.7),
    gae_case("gae_monte_carlo", 0.99, 1.0),
    reinforce_plus_plus_case("reinforce_plus_plus", 1.0),
    reinforce_plus_plus_case("reinforce_plus_plus_discount", 0.9),
    baseline_case("optimal_token_baseline", SINGLE, gaps=False),
    baseline_case("optimal_token_baseline_tail", SINGLE, gaps=False, tail=False),
    baseline_case("optimal_token_baseline_weights", SINGLE, gaps=False, weighted=True),
    baseline_case("optimal_token_baseline_turns", MULTI, gaps=True),
    baseline_case("optimal_token_baseline_turns_tail", MULTI, gaps=True, tail=False),
    baseline_case("optimal_token_baseline_turns_weights", MULTI, gaps=True, weighted=True),
]


def whiten_case(name, shift):
    def peer(values, mask):
        from verl.utils.torch_functional import masked_mean, masked_whiten

        return {"white": masked_whiten(values, mask, shift_mean=shift) * mask, "mean": masked_mean(values, mask)}

    def ours(values, mask):
        mean = L.token_mean(values, mask)
        return {"white": A.masked_whiten(values, mask) + (0 if shift else mean * mask), "mean": mean}

    def inputs(g):
        return {"values": 3 + 2 * torch.randn(8, 10, generator=g), "mask": random_mask(g)}

    why = "on the mask, as verl leaves numbers outside it" + (
        "" if shift else "; verl can put the mean back, we do not"
    )
    return Case(name, inputs, peer, ours, why=why)


def kl_reward_inputs(g):
    x = token_rewards(g)
    return {
        "scores": x["rewards"],
        "mask": x["mask"],
        "logprobs": -3 * torch.rand(8, 10, generator=g),
        "ref_logprobs": -3 * torch.rand(8, 10, generator=g),
    }


def kl_reward_peer(scores, mask, logprobs, ref_logprobs):
    from verl.trainer.ppo.core_algos import compute_rewards

    return {"rewards": compute_rewards(scores, logprobs, ref_logprobs, 0.3) * mask}


def kl_reward_ours(scores, mask, logprobs, ref_logprobs):
    return {"rewards": A.kl_in_reward(scores, L.kl_k1(logprobs, ref_logprobs, mask), mask, 0.3)}


def controller_case(name, ours, kind):
    def peer(kl):
        from verl.trainer.ppo.core_algos import get_kl_controller

        controller = get_kl_controller(SimpleNamespace(type=kind, kl_coef=0.2, target_kl=0.1, horizon=100))
        return {"coef": torch.tensor([(controller.update(x, n_steps=8), controller.value)[1] for x in kl.tolist()])}

    def ours_(kl):
        controller = ours()
        return {"coef": torch.tensor([controller.update(x, 8) for x in kl.tolist()])}

    return Case(name, lambda g: {"kl": 0.1 + 0.05 * torch.randn(12, generator=g)}, peer, ours_)


def filter_case(name, method, ours, why):
    def peer(rewards, mask, group_ids):
        from verl import DataProto
        from verl.trainer.ppo.core_algos import compute_pf_ppo_reweight_data

        data = DataProto.from_dict(tensors={"token_level_scores": last_column(rewards, mask)})
        with mock.patch("torch.multinomial", return_value=torch.arange(8)) as draw:  # what it would draw by
            compute_pf_ppo_reweight_data(data, method)
        weights = draw.call_args.args[0]
        return {"probabilities": weights / weights.sum()}

    def ours_(rewards, mask, group_ids):
        best, worst = (rewards == rewards.max()).sum().item(), (rewards == rewards.min()).sum().item()
        return {"probabilities": ours(rewards, torch.zeros_like(group_ids), best, worst)}

    return Case(name, outcome, peer, ours_, why=why)


def overlong_case(name, longest, why=""):
    """Of 10 tokens at most, a buffer of 4 and a penalty of 0.5."""

    def peer(rewards, mask):
        import numpy as np
        from verl import DataProto
        from verl.workers.reward_manager.dapo import DAPORewardManager

        manager = DAPORewardManager(
            tokenizer=SimpleNamespace(decode=lambda ids, skip_special_tokens: "answer", eos_token="</s>"),
            num_examine=0,
            compute_score=lambda data_source, solution_str, ground_truth, extra_info: ground_truth,
            max_resp_len=longest,
            overlong_buffer_cfg=SimpleNamespace(enable=True, len=4, penalty_factor=0.5, log=False),
        )
        m, size = mask.long(), len(rewards)
        data = DataProto.from_dict(
            tensors={"prompts": torch.ones(size, 2), "responses": m, "attention_mask": F.pad(m, (2, 0), value=1)},
            non_tensors={
                "reward_model": np.array([{"ground_truth": x} for x in rewards.tolist()], dtype=object),
                "data_source": np.array(["set"] * size, dtype=object),
            },
        )
        return {"rewards": manager(data)}

    def ours(rewards, mask):
        lengths = mask.sum(1)
        beyond = 0.5 * (lengths - longest).clamp(min=0) / 4
        return {"rewards": A.rewards_to_tokens(rewards + A.overlong_penalty(lengths, longest, 4, 0.5) - beyond, mask)}

    def inputs(g):
        mask = random_mask(g, gaps=False)
        mask[:, 0] = True
        mask[0] = True
        return {"rewards": torch.randn(8, generator=g), "mask": mask}

    return Case(name, inputs, peer, ours, why=why)


SHAPING = [
    whiten_case("masked_whiten", True),
    whiten_case("masked_whiten_keep_mean", False),
    Case(
        "kl_in_reward",
        kl_reward_inputs,
        kl_reward_peer,
        kl_reward_ours,
        why="on the mask, as verl leaves the penalty outside it",
    ),
    controller_case("adaptive_kl_controller", lambda: A.AdaptiveKL(0.2, 0.1, 100), "adaptive"),
    controller_case("fixed_kl_controller", lambda: A.FixedKL(0.2), "fixed"),
    filter_case(
        "pf_ppo_max_min",
        "max_min",
        lambda r, ids, best, worst: A.pf_ppo_weights(r, ids, best / (best + worst), worst / (best + worst)),
        "in verl each of several best or worst counts in full, with us they share the paper's half",
    ),
    filter_case(
        "pf_ppo_max_random",
        "max_random",
        lambda r, ids, best, worst: A.pf_ppo_weights(r, ids, (3 * best + 1) / (3 * best + len(r))),
        "verl draws a best one 4 times as often as another, so the best one's share falls with the batch; the paper's, "
        "our default, is half",
    ),
    overlong_case("overlong_penalty", 10),
    overlong_case("overlong_penalty_beyond", 7, "verl goes on below -penalty, DAPO's eq. 13 and we stop there"),
]

CASES = [*OUTCOME, *TOKEN, *SHAPING]
