r"""Advantages of the steps of an agent's episodes, relative to other steps from the same state.

There are B episodes of up to S steps each. A step is one response in one state of the environment. It has a reward and
the id of that state; equal states have equal ids. Several episodes start from one prompt (`group_ids`). Only steps of
the same prompt are compared.

Args:
    rewards: [B, S], of each step.
    state_ids: integer [B, S], of the state that the step was taken in.
    mask: bool [B, S], True on steps that were taken.
    gamma: discount of one step, in [0, 1].
    eps: >= 0.
"""

import torch
from torch import Tensor

from rlkit import _check as check
from rlkit.advantages._groups import group_index
from rlkit.advantages.group import grpo_advantages
from rlkit.advantages.returns import discounted_returns


@torch.no_grad()
def gigpo_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    state_ids: Tensor,
    mask: Tensor,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    eps: float = 1e-6,
) -> Tensor:
    r"""Advantage of the episode among those of its prompt, plus that of the step among those from the same state.

    $$A_{b,s} = A^E_b + \omega A^S_{b,s}, \quad
    A^E_b = \frac{R_b - \mathrm{mean}(R)}{\mathrm{std}(R) + \epsilon}, \quad
    A^S_{b,s} = \frac{G_{b,s} - \mathrm{mean}(G)}{\mathrm{std}(G) + \epsilon}$$
    with $R_b = \sum_s r_{b,s}$ over the episodes of the prompt, and the returns $G_{b,s} = r_{b,s} + \gamma G_{b,s+1}$
    over the steps from one state, of all episodes of the prompt.

    GiGPO, https://arxiv.org/abs/2505.10978 eq. 3 and 5 to 8. A state with a single step adds 0.

    Choices: each episode counts once in the first mean, as in the paper; the authors' code by default counts it once
    per step. Divisor n - 1. Their F_norm = 1 is the same with `dr_grpo_advantages`.

    Args:
        step_weight: omega, >= 0.

    Returns:
        [B, S], without gradient; 0 outside the mask.
    """
    returns, states = _steps(rewards, group_ids, state_ids, mask, gamma)
    check.not_negative(step_weight=step_weight)
    episode = grpo_advantages(torch.where(mask, rewards, 0).sum(1), group_ids, eps)
    step = _by_state(returns, states, mask, eps)
    return torch.where(mask, episode[:, None] + step_weight * step, 0)


@torch.no_grad()
def hgpo_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    state_ids: Tensor,
    mask: Tensor,
    gamma: float = 0.95,
    history: int = 2,
    alpha: float = 1.0,
    eps: float = 1e-6,
) -> Tensor:
    r"""Advantage of a step among those from the same state, averaged over the length of the history that they share.

    $$A_{b,s} = \frac{\sum_k w_k A^{(k)}_{b,s}}{\sum_k w_k}, \quad w_k = (k + 1)^\alpha, \quad
    A^{(k)}_{b,s} = \frac{G_{b,s} - \mathrm{mean}(G)}{\mathrm{std}(G) + \epsilon}$$
    with mean and deviation over the steps that share their state and the k states before it, k from 0 to `history`, and
    G as in `gigpo_advantages`. A k counts where $A^{(k)}$ is not 0: the step has k steps before it, and its group has
    other returns.

    HGPO, https://arxiv.org/abs/2602.22817 eq. 3 to 7: for a policy with memory, the same state after a different
    history is a different state.

    Choices: divisor n - 1; the authors' code has n.

    Args:
        history: the most steps to look back, >= 0.
        alpha: exponent of the weights of longer shared histories, >= 0.

    Returns:
        [B, S], without gradient; 0 outside the mask.
    """
    returns, states = _steps(rewards, group_ids, state_ids, mask, gamma)
    check.not_negative(history=history, alpha=alpha)
    groups, has_history = states, mask
    total, weights = torch.zeros_like(returns), torch.zeros_like(returns)
    for k in range(history + 1):
        advantages = _by_state(returns, groups, has_history, eps)
        weight = (k + 1) ** alpha * (advantages != 0)
        total, weights = total + weight * advantages, weights + weight
        has_history = has_history & mask.roll(k + 1, 1)  # of k + 1 steps
        has_history[:, : k + 1] = False
        groups = _pairs(groups, states.roll(k + 1, 1))
    return torch.where(mask, total / weights.clamp(min=1), 0)


def _steps(rewards: Tensor, group_ids: Tensor, state_ids: Tensor, mask: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """[B, S] both: the return of each step, and its state with its prompt, numbered from 0."""
    check.per_token(mask, rewards=rewards)
    check.groups(group_ids, rewards=rewards.sum(1))
    check.integer("state_ids", state_ids)
    check.shape("state_ids", state_ids, tuple(mask.shape), "as mask")
    return discounted_returns(rewards, mask, gamma), _pairs(group_ids[:, None].expand(state_ids.shape), state_ids)


def _pairs(first: Tensor, second: Tensor) -> Tensor:
    """[B, S]: the pairs of two ids, numbered from 0."""
    return group_index(group_index(first) * second.numel() + group_index(second))


def _by_state(returns: Tensor, states: Tensor, mask: Tensor, eps: float) -> Tensor:
    """[B, S]: the advantage of each step's return in its group; 0 outside the mask."""
    returns = torch.where(mask, returns, torch.nan)  # nan: left out of its group
    return grpo_advantages(returns.flatten(), states.flatten(), eps).view(mask.shape)
