"""The block of docs/other_trainers.md for SkyRL, in SkyRL 0.4, which needs Python 3.12; `make skyrl` runs it.

Its registries, advantages, reduction and loss run as in its trainer and its worker, without Ray and its engines.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from skyrl.backends.skyrl_train.utils import ppo_utils
from skyrl.train.config import AlgorithmConfig

sys.path.insert(0, str(Path(__file__).parent))
from pages import blocks  # noqa: E402
from two_steps import WORDS, adamw, batch_of, copy_of, engine_steps, same_training, tiny_model  # noqa: E402

from rlkit.advantages import rloo_advantages  # noqa: E402
from rlkit.losses import cispo_loss, token_mean  # noqa: E402

UIDS = np.array(list("badcabcd"))
GROUPS = torch.tensor([1, 0, 3, 2, 0, 1, 2, 3])
CLIP = 0.01, 0.02


@pytest.fixture(scope="module", autouse=True)
def registered():
    exec(blocks("prime-rl, SkyRL, slime")[1], {})


def batch(seed):
    """Eight responses to four prompts, in any order: prompts of 3 tokens, responses of 4 or 6."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([7, 9, 9, 7, 9, 9, 7, 9])
    mask = (torch.arange(9) >= 3) & (torch.arange(9) < lengths[:, None])
    tokens = torch.randint(2, WORDS, mask.shape, generator=g)
    old_logprobs = -3.4 + 0.3 * torch.randn(mask.shape, generator=g)
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0, 0.25, 0.0, 1.0])
    return {"tokens": tokens, "lengths": lengths, "mask": mask, "old_logprobs": old_logprobs, "rewards": rewards}


def advantages_of(name, step, config):
    """[8, 6] of the responses, by SkyRL's driver, with the reward at the last token."""
    mask = step["mask"][:, 3:].float()
    rewards = torch.nn.functional.one_hot(step["lengths"] - 4, 6) * step["rewards"][:, None]
    return ppo_utils.compute_advantages_and_returns(rewards, mask, UIDS, name, config)[0]


def test_two_steps():
    config = AlgorithmConfig(eps_clip_low=CLIP[0], eps_clip_high=CLIP[1])
    loss_fn = ppo_utils.PolicyLossRegistry.get("rlkit_cispo")
    model, steps, losses = tiny_model(), [batch(0), batch(1)], []
    start, optimizer = copy_of(model), adamw(model.parameters())
    for step in steps:
        mask = step["mask"][:, 3:].float()
        advantages = advantages_of("rlkit_rloo", step, config)
        advantages = ppo_utils.apply_loss_reduction_to_advantages_minibatch(advantages, mask, "token_mean", 4, 9)
        optimizer.zero_grad()
        losses.append(0.0)
        for part in (slice(0, 4), slice(4, 8)):
            scores = model(step["tokens"][part]).logits[:, 2:-1].log_softmax(-1)
            logprobs = scores.gather(2, step["tokens"][part, 3:, None])[..., 0]
            old = step["old_logprobs"][part, 3:]
            loss, metrics = loss_fn(
                logprobs, old, advantages[part], config=config, loss_mask=mask[part], rollout_logprobs=old
            )
            loss.backward()
            losses[-1] += loss.item()
            assert 0 < metrics["clip_ratio"] < 1
        optimizer.step()

    def ours(out, mb):
        loss = cispo_loss(out.logprobs, mb.old_logprobs, mb.advantages, mb.mask, *CLIP)
        return token_mean(loss, mb.mask, mb.total_tokens), {}

    batches = [batch_of(step).add(advantages=rloo_advantages(step["rewards"], GROUPS)) for step in steps]
    same_training(engine_steps(start, batches, ours), start, copy_of(model), torch.tensor(losses))


def test_skyrls_own_functions_agree():
    """Its cispo and its rloo, which are names of its registries as well."""
    step, config = batch(0), AlgorithmConfig(eps_clip_low=0.2, eps_clip_high=0.3)
    config.cispo.cispo_eps_clip_low, config.cispo.cispo_eps_clip_high = 0.2, 0.3
    ours, theirs = (advantages_of(name, step, config) for name in ("rlkit_rloo", "rloo"))
    torch.testing.assert_close(ours, theirs)
    mask, old = step["mask"][:, 3:].float(), step["old_logprobs"][:, 3:]
    new = old + 0.5 * torch.randn(old.shape, generator=torch.Generator().manual_seed(2))
    found = [
        ppo_utils.PolicyLossRegistry.get(name)(new, old, ours, config=config, loss_mask=mask)[0]
        for name in ("rlkit_cispo", "cispo")
    ]
    torch.testing.assert_close(*found)
    assert found[0].abs() > 0.1
