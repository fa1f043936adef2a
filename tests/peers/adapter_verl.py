"""verl 0.9.1 for the conformance suite: its functions, given what its trainer gives them."""

from importlib.metadata import version

import torch
from cases_verl_advantages import last_column
from cases_verl_policy import actor


class Trainer:
    """GRPO and PPO with verl's defaults; FSDP averages gradients over ranks."""

    name = f"verl {version('verl')}"
    ranks_average = True

    def token_logprobs(self, logits, tokens, temperature):
        from verl.utils.torch_functional import logprobs_from_logits

        found = logprobs_from_logits(logits.div_(temperature)[:, :-1], tokens[:, 1:])  # as its actor does
        return torch.nn.functional.pad(found, (1, 0))

    def token_entropy(self, logits):
        from verl.utils.torch_functional import entropy_from_logits

        return entropy_from_logits(logits)

    def policy_loss(self, logprobs, old_logprobs, advantages, mask, split, clip_low, clip_high):
        from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla

        config = actor(clip_ratio_low=clip_low, clip_ratio_high=clip_high)
        config.global_batch_info.update(
            dp_size=split.ranks, batch_num_tokens=split.tokens, global_batch_size=split.sequences
        )
        per_token = advantages[:, None] * mask
        loss, _ = compute_policy_loss_vanilla(old_logprobs, logprobs, per_token, mask.long(), "token-mean", config)
        return loss

    def kl_loss(self, logprobs, ref_logprobs):
        from verl.trainer.ppo.core_algos import kl_penalty

        return kl_penalty(logprobs, ref_logprobs, actor().kl_loss_type)

    def group_advantages(self, rewards, group_ids):
        from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

        mask = torch.ones(len(rewards), 1, dtype=torch.long)
        return compute_grpo_outcome_advantage(last_column(rewards, mask), mask, group_ids.numpy())[0][:, 0]

    def gae(self, rewards, values, mask, gamma, lam):
        from verl.trainer.ppo.core_algos import compute_gae_advantage_return

        return compute_gae_advantage_return(rewards, values, mask.long(), gamma, lam)[0]
