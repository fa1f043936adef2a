"""Every function equals its plain loop, in value and in every gradient."""

import inspect
import math
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from test_every_function import EVERY, B, T, V, arguments, floats, results, total

WITHOUT = {"pf_ppo_indices"}  # a random draw
NAMES = [name for name in EVERY if name not in WITHOUT]
SIGNED = {"advantages", "rewards", "greedy_rewards", "values", "old_values", "returns", "loss", "x", "baselines"}
LAMBDAS = torch.tensor([0.2, 1.0, 0.0, 0.95], dtype=torch.float64)  # one for each row
DISCOUNTS = torch.linspace(0, 1, B * T, dtype=torch.float64).view(B, T)
KEPT = torch.rand(B, T, V, generator=torch.Generator().manual_seed(4)) > 0.3
SEVERAL = torch.randint(V, (B, T, 3), generator=torch.Generator().manual_seed(5))
OPTIONS = {  # beside the defaults
    "clipped_policy_loss": [dict(clip_low=0.1, clip_high=0.4), dict(dual_clip=1.2), dict(clip_low=0.0, dual_clip=1.05)],
    "cispo_loss": [dict(clip_low=1.0, clip_high=0.1)],
    "gppo_loss": [dict(clip_low=0.1, clip_high=0.4)],
    "sapo_loss": [dict(tau_pos=3.0, tau_neg=0.5)],
    "gspo_loss": [dict(clip_low=0.1, clip_high=0.1), dict(clip_low=0.1, clip_high=0.1, dual_clip=1.05)],
    "gspo_token_loss": [dict(clip_low=0.1, clip_high=0.1), dict(clip_low=0.1, clip_high=0.1, dual_clip=1.05)],
    "luspo_loss": [dict(clip_low=0.1, clip_high=0.1)],
    "sequence_sapo_loss": [dict(tau_pos=3.0, tau_neg=0.5)],
    "flash_reinforce_loss": [dict(high=0.1), dict(high=math.inf)],
    "m2po_loss": [dict(high=0.0), dict(high=0.2), dict(high=math.inf)],
    "gmpo_loss": [dict(log_clip_low=0.1, log_clip_high=0.3)],
    "clip_cov_loss": [dict(share=0.2, cov_low=0.01, clip_low=0.3, clip_high=0.3), dict(share=0.0)],
    "kl_cov_loss": [dict(share=0.3, kl_coef=0.7), dict(share=0.0)],
    "dppo_tv_loss": [dict(delta_low=0.1, delta_high=0.2, ratio_high=1.3)],
    "dppo_kl_loss": [dict(delta_low=0.02, delta_high=0.01, ratio_high=1.3)],
    "dro_loss": [dict(kl_coef=2.0)],
    "vespo_loss": [dict(k_pos=1.0, lambda_pos=0.5, k_neg=0.0, lambda_neg=1.0)],
    "clipped_value_loss": [dict(clip=0.1), dict(clip=math.inf)],
    "kl_k1": [dict(mask=None)],
    "kl_k3": [dict(mask=None)],
    "kl_binary": [dict(mask=None)],
    "full_vocabulary_kl": [dict(mask=None, temperature=0.7)],
    "token_mean": [dict(total=7), dict(total=0)],
    "sequence_mean": [dict(total=7), dict(total=0)],
    "sequence_sum_mean": [dict(total=torch.tensor(7))],
    "fixed_length_mean": [dict(total=3, length=5)],
    "prompt_mean": [dict(total=7), dict(total=0)],
    "preference_mean": [dict(total=7), dict(total=0)],
    "top_entropy_mask": [dict(share=0.5), dict(share=1.0)],
    "importance_weights": [dict(low=0.8, high=1.2)],
    "sequence_importance_weights": [dict(low=0.8, high=1.2)],
    "geometric_importance_weights": [dict(low=0.95, high=1.05)],
    "masked_importance_weights": [dict(low=0.8, high=1.2)],
    "sequence_masked_importance_weights": [dict(low=0.7, high=1.4)],
    "token_rejection_mask": [dict(low=0.8, high=1.2), dict(veto=0.6)],
    "rejection_mask": [dict(low=0.8, high=1.2)],
    "sequence_rejection_mask": [dict(low=0.7, high=1.4), dict(veto=0.6)],
    "geometric_rejection_mask": [dict(low=0.95, high=1.05), dict(veto=0.6)],
    "token_divergence_mask": [dict(high=0.5)],
    "sequence_mean_divergence_mask": [dict(high=0.5)],
    "sequence_max_divergence_mask": [dict(high=0.9)],
    "off_policy_sequence_mask": [dict(high=0.05)],
    "ratio_stats": [dict(advantages=None), dict(total=100)],
    "sequence_ratio_stats": [dict(advantages=None), dict(total=100), dict(clip_low=0.1, clip_high=0.1)],
    "value_stats": [dict(clip=0.1, total=100), dict(clip=math.inf)],
    "mismatch_stats": [dict(total=100)],
    "sequence_mismatch_stats": [dict(total=100)],
    "token_logprobs": [dict(temperature=0.7)],
    "target_logprobs": [dict(temperature=0.7), dict(keep=KEPT), dict(targets=SEVERAL, keep=KEPT)],
    "token_entropy": [dict(temperature=0.7)],
    "sum_pi_squared": [dict(temperature=0.7)],
    "linear_logprobs": [dict(temperature=0.7, bias=torch.linspace(0, 1, V).double(), suppress=torch.tensor([1, 4]))],
    "forward_kl_loss": [dict(temperature=0.7), dict(mask=None)],
    "reverse_kl_loss": [dict(temperature=0.7), dict(mask=None)],
    "jsd_loss": [dict(beta=0.3, temperature=0.7), dict(mask=None)],
    "topk_forward_kl_loss": [dict(temperature=0.7), dict(mask=None)],
    "topk_reverse_kl_loss": [dict(temperature=0.7), dict(mask=None)],
    "topk_jsd_loss": [dict(beta=0.3, temperature=0.7), dict(mask=None)],
    "dpo_loss": [dict(beta=2.0, label_smoothing=0.2)],
    "robust_dpo_loss": [dict(beta=2.0, label_smoothing=0.3)],
    "slic_loss": [dict(margin=0.1)],
    "hinge_dpo_loss": [dict(beta=3.0)],
    "kto_loss": [dict(beta=2.0, desirable_weight=0.5, undesirable_weight=1.5)],
    "bradley_terry_loss": [dict(margin=torch.tensor([0.1, 0.5, 0.0, 1.0]).double())],
    "preference_stats": [dict(total=9), dict(total=0)],
    "exo_loss": [dict(beta=2.0, label_smoothing=0.1)],
    "discopop_loss": [dict(beta=2.0, tau=0.5)],
    "alphapo_loss": [dict(alpha=0.0), dict(alpha=-0.5, beta=1.0, gamma=0.3)],
    "alpha_divergence_dpo_loss": [dict(alpha=0.0), dict(alpha=1.5, beta=1.0)],
    "tpo_loss": [dict(beta=2.0, alpha=0.5, gamma=0.3), dict(alpha=0.0)],
    "a_star_po_loss": [dict(beta=1.0)],
    "adaptive_entropy_coef": [dict(entropy=3.0), dict(entropy_coef=0.0, entropy=3.0), dict(step=5.0, high=2.0)],
    "chord_mu": [dict(step=0), dict(step=10), dict(step=20), dict(step=60), dict(step=99), dict(decay=0)],
    "load_balancing_loss": [dict(top_k=1), dict(top_k=V), dict(total=100), dict(total=0)],
    "aot_loss": [dict(beta=2.0, label_smoothing=0.2)],
    "aot_unpaired_loss": [dict(beta=2.0, label_smoothing=0.2)],
    "ld_sequence_logprobs": [dict(alpha=0.0), dict(alpha=1.0)],
    "gae": [dict(gamma=0.9, lam=0.5), dict(lam=LAMBDAS), dict(lam=torch.tensor(0.3))],
    "vtrace": [dict(gamma=0.9, lam=0.5, rho_bar=0.8, c_bar=1.1), dict(lam=LAMBDAS)],
    "discounted_returns": [dict(gamma=0.9)],
    "length_adaptive_lambda": [dict(alpha=0.4)],
    "n_step_returns": [dict(n=1, gamma=0.9), dict(n=3, gamma=DISCOUNTS, bootstrap=LAMBDAS), dict(n=99, gamma=0.8)],
    "fipo_advantages": [dict(gamma=0.5, low=0.9, high=1.0), dict(high=2.0, ratio_high=1.1), dict(safe_ratio=0.9)],
    "entropy_advantages": [dict(alpha=0.0), dict(alpha=2.0, kappa=1.5)],
    "leave_one_out_grpo_advantages": [dict(eps=0.5)],
    "rae_advantages": [dict(decay=0.0), dict(decay=1.0), dict(decay=0.5)],
    "optimal_values": [dict(beta=0.1)],
    "gigpo_advantages": [dict(gamma=1.0, step_weight=0.3), dict(eps=0.5)],
    "hgpo_advantages": [dict(gamma=1.0, history=0), dict(history=4, alpha=0.0), dict(eps=0.5)],
    "masked_whiten": [dict(eps=0.5)],
    "grpo_advantages": [dict(eps=0.5)],
    "passk_advantages": [dict(k=1, eps=0.1), dict(threshold=0.1)],
    "pf_ppo_weights": [dict(best=0.4, worst=0.3)],
    "pf_ppo_power_weights": [dict(power=1.0), dict(power=0.0)],
    "reinforce_plus_plus_advantages": [dict(gamma=0.9, eps=0.5)],
    "reinforce_plus_plus_baseline_advantages": [dict(lengths=torch.tensor([3, 0, 2, 5])), dict(eps=0.5)],
    "gdpo_advantages": [dict(lengths=torch.tensor([3, 0, 2, 5]), weights=torch.tensor([0.5, 2.0]).double())],
    "lite_ppo_advantages": [dict(eps=0.5)],
    "optimal_token_baseline_advantages": [dict(baseline_alone=True, eps=0.5)],
    "overlong_penalty": [dict(buffer=0, max_length=3, penalty=2.0), dict(max_length=4, buffer=3)],
    "scaled_rewards": [dict(mean=0.3, std=0.5, clip=1.0)],
    "adaptive_kl_coef": [dict(kl=5.0, steps=2), dict(kl=1.1)],
}  # fmt: skip
HOLED = [[True] * T, [False] * T, [True] + [False] * (T - 1), [False, True] * 3 + [True]]
MASKS = (None, torch.tensor(HOLED))  # the one of `arguments`, and one with a row without tokens


def taking(*parameters):
    """The functions that take all of these."""
    return [name for name in NAMES if set(parameters) <= set(inspect.signature(EVERY[name]).parameters)]


def naive(name):
    module = EVERY[name].__module__.replace("rlkit.losses.", "rlkit.losses.naive.")
    return getattr(import_module(module.replace("rlkit.advantages.", "rlkit.advantages.naive.")), name)


def given(name, seed, mask=None, **changes):
    """Arguments of both signs where they may have both, of any floating point tensor that the function needs."""
    found, generator = arguments(name), torch.Generator().manual_seed(seed)
    for key, x in floats(found).items():
        fresh = torch.rand(x.shape, generator=generator, dtype=torch.float64)
        if key in SIGNED:
            fresh -= 0.5
        elif key == "teacher_logprobs":
            logits = torch.rand(B, T, V, generator=generator, dtype=torch.float64)
            fresh = logits.log_softmax(-1)[..., : x.shape[-1]]
        elif key == "sum_pi_squared":  # of a distribution that has the token's probability
            p = found.get("old_logprobs", found.get("logprobs")).exp()
            fresh = p**2 + fresh * (1 - p) ** 2
        elif "logprobs" in key or key in ("chosen", "rejected", "ref_chosen", "ref_rejected"):
            fresh = -fresh - 0.1
        found[key] = fresh
    if mask is not None and "mask" in found:
        found["mask"] = mask
    return found | changes


def same(name, inputs):
    leaves = {key: x.clone().requires_grad_() for key, x in floats(inputs).items()}
    fast, slow = (results_of(f, inputs | leaves) for f in (EVERY[name], naive(name)))
    assert len(fast) == len(slow)
    for x, expected in zip(fast, slow, strict=True):
        torch.testing.assert_close(x, expected, atol=1e-9, rtol=1e-7, check_dtype=False, equal_nan=True)
    grads = []
    for out in (fast, slow):
        value = weighted(out)
        if leaves and torch.is_tensor(value) and value.requires_grad:
            grads.append(torch.autograd.grad(value, list(leaves.values()), materialize_grads=True))
        else:
            grads.append([torch.zeros_like(x) for x in leaves.values()])
    for key, x, expected in zip(leaves, *grads, strict=True):
        torch.testing.assert_close(x, expected, atol=1e-8, rtol=1e-6, msg=lambda m, key=key: f"gradient of {key}: {m}")


def results_of(function, inputs):
    out = function(**inputs)
    out = list(out.values()) if isinstance(out, dict) else out
    out = out if isinstance(out, list | tuple) else [out]
    return [torch.as_tensor(x, dtype=None if torch.is_tensor(x) else torch.float64) for x in out]


def weighted(out):
    finite = [torch.where(x == -math.inf, 0.0, x).double().flatten() for x in out]
    return sum(x @ torch.linspace(1, 2, len(x), dtype=torch.float64) for x in finite)


@pytest.mark.parametrize("name", NAMES)
def test_has_a_loop_with_the_same_arguments(name):
    fast, slow = inspect.signature(EVERY[name]), inspect.signature(naive(name))
    assert [str(x) for x in fast.parameters.values()] == [str(x) for x in slow.parameters.values()]
    assert fast.return_annotation == slow.return_annotation


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", (1, 2, 3))
def test_equals_the_loop(name, seed):
    for mask in MASKS:
        same(name, given(name, seed, mask))


@pytest.mark.parametrize(("name", "options"), [(name, o) for name in OPTIONS for o in OPTIONS[name]], ids=str)
@pytest.mark.parametrize("seed", (1, 2))
def test_equals_the_loop_with_options(name, options, seed):
    same(name, given(name, seed, **options))


@pytest.mark.parametrize("name", [n for n in taking("advantages", "mask") if n != "expand_to_tokens"])
def test_equals_the_loop_with_advantages_of_tokens(name):
    advantages = torch.randn(B, T, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    same(name, given(name, 3, advantages=advantages))
    for options in OPTIONS.get(name, []):
        same(name, given(name, 3, **{"advantages": advantages} | options))


@pytest.mark.parametrize("name", taking("rewards", "group_ids"))
@pytest.mark.parametrize("group_ids", [[5, 5, 5, 5], [0, 1, 2, 3], [7, -3, 7, 7]])
def test_equals_the_loop_with_groups_of_any_size(name, group_ids):
    same(name, given(name, 2, group_ids=torch.tensor(group_ids)))


@pytest.mark.parametrize("name", taking("rewards", "mask"))
def test_equals_the_loop_with_rewards_of_either_shape(name):
    for seed, shape in ((1, (B,)), (2, (B, T))):
        if name in ("gigpo_advantages", "hgpo_advantages"):
            continue  # each step has its own
        if name != "rewards_to_tokens" or len(shape) == 1:
            rewards = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            same(name, given(name, seed, rewards=rewards))


def test_results_and_total_are_those_of_test_every_function():
    """What this file says of results is what the other says."""
    inputs = arguments("gae")
    assert weighted(results("gae", inputs)) == total("gae", inputs)
