"""SkyRL for the conformance suite: its functions, given what its trainer gives them. It needs Python 3.12."""

from importlib.metadata import version

import torch
from skyrl.backends.skyrl_train.utils import ppo_utils, torch_utils
from skyrl.train.config import AlgorithmConfig


class Trainer:
    """GRPO and PPO with SkyRL's defaults. Ranks average gradients, so its worker multiplies losses by their number."""

    name = f"SkyRL {version('skyrl')}"
    ranks_average = True

    def token_logprobs(self, logits, tokens, temperature):
        found = torch_utils.logprobs_from_logits(logits.div_(temperature), torch.roll(tokens, -1, 1))
        return torch.nn.functional.pad(found[:, :-1], (1, 0))

    def token_entropy(self, logits):
        return torch_utils.chunked_entropy_from_logits(logits)

    def policy_loss(self, logprobs, old_logprobs, advantages, mask, split, clip_low, clip_high):
        """The driver divides advantages by the tokens of the whole mini-batch; each part's loss is then a sum."""
        config = AlgorithmConfig(eps_clip_low=clip_low, eps_clip_high=clip_high)
        scaled = advantages[:, None] * mask / split.tokens
        loss, _ = ppo_utils.ppo_policy_loss(logprobs, old_logprobs, scaled, config, loss_mask=mask.float())
        return loss * split.ranks

    def kl_loss(self, logprobs, ref_logprobs):
        return ppo_utils.compute_approx_kl(
            logprobs, ref_logprobs, kl_estimator_type=AlgorithmConfig().kl_estimator_type
        )

    def group_advantages(self, rewards, group_ids):
        """Each reward is that of a response of one token."""
        mask = torch.ones(len(rewards), 1)
        return ppo_utils.compute_grpo_outcome_advantage(rewards[:, None], mask, group_ids.numpy())[0][:, 0]

    def gae(self, rewards, values, mask, gamma, lam):
        """By default its critic returns 0 at padding. Its response mask includes tool output."""
        from_first, from_last = mask.cumsum(1) > 0, mask.flip(1).cumsum(1).flip(1) > 0
        response = (from_first & from_last).float()
        values = torch.where(from_last, values, 0)
        return ppo_utils.compute_gae_advantage_return(rewards, values, response, gamma, lam)[0]
