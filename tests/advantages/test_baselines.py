"""The functions of baselines, filtering, whitened and token_baseline against Python loops."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reward_batches import (
    ALL,
    BASELINES,
    BATCHWISE,
    FEW,
    LENGTHS,
    NAN,
    batch,
    close,
    gdpo_one,
    opo,
    token_batch,
)

from rlkit.advantages.baselines import (
    gpg_advantages,
    maxrl_advantages,
    opo_advantages,
    passk_advantages,
    passk_leave_one_out_advantages,
    remax_advantages,
    rloo_advantages,
)
from rlkit.advantages.filtering import informative_groups, pf_ppo_indices, pf_ppo_weights
from rlkit.advantages.group import dr_grpo_advantages, expand_to_tokens, grpo_advantages
from rlkit.advantages.token_baseline import optimal_token_baseline_advantages
from rlkit.advantages.whitened import (
    gdpo_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
)


def test_golden_baselines():
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 0.0, 6.0, 2.0]), torch.tensor([0, 0, 0, 0, 1, 1])
    close(rloo_advantages(rewards, groups), [1, -1 / 3, -1 / 3, -1 / 3, 4, -4])
    close(maxrl_advantages(rewards, groups), [3, -1, -1, -1, 0.5, -0.5])
    close(opo_advantages(rewards, groups, torch.tensor([2, 1, 1, 4, 3, 1])), [0.75, -0.25, -0.25, -0.25, 1, -3])
    close(passk_leave_one_out_advantages(rewards, groups), [1, 0, 0, 0, 4, 0])
    close(remax_advantages(rewards, torch.tensor([1.0, 1, 0, NAN, 2, 3])), [0, -1, 0, 0, 4, -1])


def test_golden_gpg():
    """Two of the eight scored samples are in a group of equal rewards: 8 / 6."""
    rewards = torch.tensor([1.0, 0, 0, 2, 2, 3, 5, 4, NAN])
    groups = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 1])
    a = 8 / 6
    close(gpg_advantages(rewards, groups), [a * 2 / 3, -a / 3, -a / 3, 0, 0, -a, a, 0, 0])
    other = torch.tensor([10.0, 0.0])  # ten samples on another rank, none of them informative: 18 / 6
    close(gpg_advantages(rewards, groups, lambda x: x + other), [2, -1, -1, 0, 0, -3, 3, 0, 0])


def test_golden_passk():
    """One pass of 4, k = 2: of 6 pairs 3 fail, f = 1/2, sigma = 1/2; a failure sits in 3 pairs, of which 2 fail."""
    rewards, groups = torch.tensor([1.0, 0, 0, 0]), torch.zeros(4, dtype=torch.long)
    close(passk_advantages(rewards, groups, 2, eps=0.0), [1, -1 / 3, -1 / 3, -1 / 3])
    close(passk_advantages(rewards, groups, 2, eps=0.5), [0.5, -1 / 6, -1 / 6, -1 / 6])
    close(passk_advantages(2 * rewards - 1, groups, 2, threshold=0.0, eps=0.0), [1, -1 / 3, -1 / 3, -1 / 3])
    assert passk_advantages(rewards, groups, 5).tolist() == [0, 0, 0, 0]  # no 5 of 4
    assert passk_advantages(1 - rewards, groups, 2).tolist() == [0, 0, 0, 0]  # every pair holds a pass


def test_golden_batch_normalised():
    rewards, groups = torch.tensor([1.0, 3.0, 0.0, 6.0]), torch.tensor([0, 0, 1, 1])  # centred -1, 1, -3, 3
    std = math.sqrt(20 / 3)
    out = reinforce_plus_plus_baseline_advantages(rewards, groups)
    close(out, [-1 / std, 1 / std, -3 / std, 3 / std])
    out = reinforce_plus_plus_baseline_advantages(rewards, groups, lengths=torch.tensor([1, 0, 1, 1]))
    std = math.sqrt(28 / 3)  # -1, -3, 3: mean -1/3, squares 4/9 + 64/9 + 100/9 over two
    close(out, [-2 / 3 / std, 0, -8 / 3 / std, 10 / 3 / std])
    # (0,1) (1,1) against (0,2) (0,0): GRPO of the sum sees the pairs alike, GDPO does not; +-h each, h = sqrt(1/2)
    rewards = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 2.0], [0.0, 0.0]])
    std = math.sqrt(4 * 0.5 / 3)
    h = math.sqrt(0.5) / std
    close(gdpo_advantages(rewards, groups, eps=0.0), [-h, h, h, -h])
    close(gdpo_advantages(rewards, groups, torch.tensor([2.0, 0.0]), eps=0.0), [-math.sqrt(1.5), math.sqrt(1.5), 0, 0])


# ---- identities


@FEW
@given(seed=st.integers(0, 999))
def test_kinship(seed):
    rewards, groups = batch(seed, 12)
    scored = ~rewards.isnan()
    count = torch.stack([((groups == g) & scored).sum() for g in groups]).double()
    centred = dr_grpo_advantages(rewards, groups)
    torch.testing.assert_close(rloo_advantages(rewards, groups), centred * count / (count - 1).clamp(min=1))
    torch.testing.assert_close(opo_advantages(rewards, groups, torch.full((12,), 3)), centred)
    informative = (scored & informative_groups(rewards, groups)).sum().clamp(min=1)
    torch.testing.assert_close(gpg_advantages(rewards, groups) * informative / scored.sum(), centred)
    passes, _ = batch(seed, 12, binary=True)
    population = ((count - 1) / count.clamp(min=1)).clamp(min=0).sqrt()
    population = torch.where(passes.isnan() != rewards.isnan(), NAN, population)
    if seed % 3 == 0:  # one set of nans, so the counts above hold
        ddof1 = grpo_advantages(passes, groups, eps=0.0)
        expected = torch.where(population > 0, ddof1 / population, 0.0)
        torch.testing.assert_close(passk_advantages(passes, groups, 1, eps=0.0), expected)
    for k in (1, 2, 3):
        out = passk_advantages(rewards, groups, k)
        for group in groups.unique():
            assert abs(out[groups == group].sum()) < 1e-9
    weights = pf_ppo_weights(rewards, groups, 0.3, 0.2)
    for group in groups.unique():
        has = (scored & (groups == group)).any()
        assert weights[groups == group].sum().item() == pytest.approx(1.0 if has else 0.0)


def test_whitened_means_mean_0_and_variance_1():
    rewards, mask = token_batch(1, 5, 40)
    out = reinforce_plus_plus_advantages(rewards, mask, 0.9)[mask]
    assert abs(out.mean()) < 1e-9 and out.var().item() == pytest.approx(1.0, abs=1e-6)
    rewards, groups = batch(4)
    out = reinforce_plus_plus_baseline_advantages(rewards, groups)[~rewards.isnan()]
    assert abs(out.mean()) < 1e-9 and out.var().item() == pytest.approx(1.0, abs=1e-6)


@FEW
@given(seed=st.integers(0, 999))
def test_whitened_by_tokens_is_reinforce_plus_plus_of_the_centred_rewards(seed):
    rewards, groups = batch(seed, 6)
    _, mask = token_batch(seed, 6, 8)
    centred = dr_grpo_advantages(rewards, groups).masked_fill(rewards.isnan(), NAN)
    expected = reinforce_plus_plus_advantages(centred, mask)
    out = reinforce_plus_plus_baseline_advantages(rewards, groups, lengths=mask.sum(1))
    torch.testing.assert_close(expand_to_tokens(out, mask), expected)


def test_ranks_agree():
    """Two ranks with the same rows have the statistics of these rows twice."""

    def two_ranks(x):
        return 2 * x

    rewards, groups = batch(5)
    _, mask = token_batch(5, 14, 6)
    twice, ids = torch.cat([rewards, rewards]), torch.cat([groups, groups + 1])  # whole groups a rank
    masks = torch.cat([mask, mask])
    for gamma in (1.0, 0.8):
        out = reinforce_plus_plus_advantages(rewards, mask, gamma, global_sum=two_ranks)
        torch.testing.assert_close(out, reinforce_plus_plus_advantages(twice, masks, gamma)[:14])
    for function in (reinforce_plus_plus_baseline_advantages, gdpo_advantages):
        shape = (-1,) if function is reinforce_plus_plus_baseline_advantages else (-1, 1)
        one = function(rewards.view(shape), groups, lengths=LENGTHS, global_sum=two_ranks)
        both = function(twice.view(shape), ids, lengths=torch.cat([LENGTHS, LENGTHS]))
        torch.testing.assert_close(one, both[:14])


def test_every_rank_takes_part_in_the_sums():
    calls = []

    def recorded(x):
        calls.append(x.shape)
        return x

    for b in (0, 3):
        calls.clear()
        reinforce_plus_plus_advantages(torch.zeros(b), torch.zeros(b, 2, dtype=torch.bool), global_sum=recorded)
        assert calls == [(2,), ()]


@pytest.mark.parametrize("function", ALL)
@FEW
@given(seed=st.integers(0, 9999), b=st.integers(0, 14))
def test_group_order_interleaved(function, seed, b):
    rewards, groups = batch(seed, b)
    out = function(rewards, groups)
    order = torch.randperm(b, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(function(rewards[order], groups[order]), out[order])
    renamed = torch.unique(groups, return_inverse=True)[1] * -5 + 2
    torch.testing.assert_close(function(rewards, renamed), out)


@pytest.mark.parametrize("function", ALL)
@FEW
@given(seed=st.integers(0, 9999))
def test_nan_or_none_reward_isolated(function, seed):
    rewards, groups = batch(seed)
    scored = ~rewards.isnan()
    out = function(rewards, groups)
    torch.testing.assert_close(out[scored], function(rewards[scored], groups[scored]))
    assert function is informative_groups or not out[~scored].any()
    assert out.isfinite().all()


def test_one_bad_reward_of_several_leaves_the_others():
    rewards, groups = torch.rand(6, 2, generator=torch.Generator().manual_seed(0)).double(), torch.tensor([0] * 6)
    bad = rewards.clone()
    bad[1, 0] = NAN
    first, second = rewards[[0, 2, 3, 4, 5], 0], rewards[:, 1]
    total = grpo_advantages(second, groups)
    total[[0, 2, 3, 4, 5]] += grpo_advantages(first, groups[:5])
    torch.testing.assert_close(gdpo_advantages(bad, groups), (total - total.mean()) / (total.var() + 1e-8).sqrt())


@pytest.mark.parametrize("function", BASELINES + BATCHWISE)
def test_uneven_and_singleton_groups(function):
    assert function(torch.tensor([0.7]), torch.tensor([3])).tolist() == [0.0]
    out = function(torch.tensor([3.0, 1.0, 0.0, 0.4, 5.0, 0.1]), torch.tensor([4, 2, 2, 2, 2, 8]))
    assert out[[0, 5]].abs().max() < 1e-12 and out.isfinite().all() and out[1:5].any()
    out = function(torch.tensor([NAN, 1.0, NAN]), torch.tensor([0, 0, 1]))
    assert out.tolist() == [0, 0, 0]


@pytest.mark.parametrize("function", BASELINES + BATCHWISE)
def test_equal_rewards_give_no_advantage(function):
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    for reward in (0.0, 0.1, 100.1, 1e4 + 0.1):
        assert function(torch.full((7,), reward), groups).abs().max() < 1e-4


def test_opo_group_without_tokens():
    out = opo_advantages(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 1]), torch.tensor([0, 0, 2]))
    assert out.tolist() == [0, 0, 0]


# ---- dtypes, shapes, errors


@pytest.mark.parametrize("function", ALL)
def test_dtypes(function):
    groups = torch.tensor([0, 0, 0, 1, 1], dtype=torch.int32)
    rewards = torch.tensor([1, 0, 0, 0, 1])
    expected = function(rewards.float(), groups)
    assert expected.dtype == (torch.bool if function is informative_groups else torch.float32)
    for dtype in (torch.bfloat16, torch.int64, torch.bool):
        assert torch.equal(function(rewards.to(dtype), groups), expected)
    if function is not informative_groups:
        assert function(rewards.double(), groups).dtype == torch.float64


@pytest.mark.parametrize("function", ALL)
def test_empty_batch(function):
    assert function(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


def test_inputs_are_left_alone():
    rewards, groups = batch(8)
    rewards_before, groups_before = rewards.clone(), groups.clone()
    for function in ALL:
        function(rewards, groups)
    tokens, mask = token_batch(8, 4, 5)
    tokens_before = tokens.clone()
    reinforce_plus_plus_advantages(tokens, mask, 0.9)
    assert torch.equal(rewards.nan_to_num(9), rewards_before.nan_to_num(9)) and torch.equal(groups, groups_before)
    assert torch.equal(tokens, tokens_before)


Z, IDS, MASK = torch.zeros(2), torch.zeros(2, dtype=torch.long), torch.ones(2, 3, dtype=torch.bool)
LP = torch.zeros(2, 3)


@pytest.mark.parametrize("function", ALL)
def test_errors_of_all(function):
    if function not in (opo, gdpo_one):
        with pytest.raises(ValueError, match=r"^rewards: expected .*, got "):
            function(torch.zeros(2, 2), IDS)
    for groups in (torch.zeros(3, dtype=torch.long), Z, IDS.bool()):
        with pytest.raises(ValueError, match=r"^group_ids: expected .*, got "):
            function(Z, groups)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: opo_advantages(Z, IDS, torch.ones(3)), "group_ids"),
        (lambda: opo_advantages(Z, IDS, torch.ones(2, 1)), "lengths"),
        (lambda: opo_advantages(LP, IDS, torch.ones(2)), "rewards"),
        (lambda: remax_advantages(Z, torch.zeros(3)), "greedy_rewards"),
        (lambda: remax_advantages(LP, LP), "rewards"),
        (lambda: passk_advantages(Z, IDS, 0), "k"),
        (lambda: passk_advantages(Z, IDS, 1, eps=-1.0), "eps"),
        (lambda: pf_ppo_weights(Z, IDS, -0.1), "best"),
        (lambda: pf_ppo_weights(Z, IDS, worst=-0.1), "worst"),
        (lambda: pf_ppo_weights(Z, IDS, 0.6, 0.6), r"best \+ worst"),
        (lambda: pf_ppo_indices(LP, 2, torch.Generator()), "weights"),
        (lambda: pf_ppo_indices(IDS, 2, torch.Generator()), "weights"),
        (lambda: pf_ppo_indices(Z, -1, torch.Generator()), "count"),
        (lambda: reinforce_plus_plus_advantages(Z, LP), "mask"),
        (lambda: reinforce_plus_plus_advantages(torch.zeros(3), MASK), "rewards"),
        (lambda: reinforce_plus_plus_advantages(torch.zeros(2, 2), MASK), "rewards"),
        (lambda: reinforce_plus_plus_advantages(Z, MASK, -0.1), "gamma"),
        (lambda: reinforce_plus_plus_advantages(LP, MASK, 1.01), "gamma"),
        (lambda: reinforce_plus_plus_advantages(Z, MASK, eps=-0.1), "eps"),
        (lambda: reinforce_plus_plus_baseline_advantages(Z, IDS, eps=NAN), "eps"),
        (lambda: reinforce_plus_plus_baseline_advantages(Z, IDS, lengths=torch.ones(3)), "lengths"),
        (lambda: gdpo_advantages(Z, IDS), "rewards"),
        (lambda: gdpo_advantages(LP, IDS, torch.ones(2)), "weights"),
        (lambda: gdpo_advantages(LP, IDS, lengths=torch.ones(3)), "lengths"),
        (lambda: gdpo_advantages(LP, IDS, eps=-1.0), "eps"),
        (lambda: gdpo_advantages(LP, Z), "group_ids"),
        (lambda: optimal_token_baseline_advantages(Z, IDS, LP, LP, LP), "mask"),
        (lambda: optimal_token_baseline_advantages(torch.zeros(3), IDS, LP, LP, MASK), "rewards"),
        (lambda: optimal_token_baseline_advantages(Z, Z, LP, LP, MASK), "group_ids"),
        (lambda: optimal_token_baseline_advantages(Z, IDS, Z, LP, MASK), "old_logprobs"),
        (lambda: optimal_token_baseline_advantages(Z, IDS, LP, Z, MASK), "sum_pi_squared"),
        (lambda: optimal_token_baseline_advantages(Z, IDS, LP, LP, MASK, Z), "rollout_weights"),
        (lambda: optimal_token_baseline_advantages(Z, IDS, LP, LP, MASK, eps=-1.0), "eps"),
    ],
)
def test_errors_name_the_argument(call, name):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        call()
