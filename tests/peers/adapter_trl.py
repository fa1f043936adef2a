"""TRL 1.16 for the conformance suite: GRPOTrainer's own methods, on batches as its own loop makes them."""

from importlib.metadata import version
from types import SimpleNamespace

import torch
from cases_trl_policy import trainer_and_batch
from cases_trl_trainer import stand_in

from rlkit.conformance.adapter import Refused


class Trainer:
    """GRPO with TRL's defaults; accelerate averages gradients over ranks."""

    name = f"TRL {version('trl')}"
    ranks_average = True

    def token_logprobs(self, logits, tokens, temperature):
        from trl.trainer.utils import selective_log_softmax

        found = selective_log_softmax(logits[:, :-1], tokens[:, 1:], temperature=temperature)
        return torch.nn.functional.pad(found, (1, 0))

    def token_entropy(self, logits):
        from trl.trainer.utils import entropy_from_logits

        return entropy_from_logits(logits)

    def policy_loss(self, logprobs, old_logprobs, advantages, mask, split, clip_low, clip_high):
        options = {"epsilon": clip_low, "epsilon_high": clip_high, "beta": 0.0}
        return _loss(logprobs, old_logprobs, advantages, mask, split.tokens, split, **options)

    def kl_loss(self, logprobs, ref_logprobs):
        """Of each token alone, with an advantage of 0."""
        columns = []
        for t in range(logprobs.shape[1]):
            one, mask = logprobs[:, t : t + 1], torch.ones(len(logprobs), 1, dtype=torch.bool)
            split = SimpleNamespace(micro_batches=1, ranks=1)
            ref = {"ref_logprobs": ref_logprobs[:, t : t + 1]}
            columns.append(_loss(one, one.detach(), torch.zeros(len(one)), mask, 1, split, beta=1.0, **ref))
        return torch.stack(columns)[None]

    def group_advantages(self, rewards, group_ids):
        sizes = group_ids.unique_consecutive(return_counts=True)[1]
        if len(sizes) != len(group_ids.unique()) or len(set(sizes.tolist())) > 1 or sizes[0] < 2:
            raise Refused("its sampler puts num_generations >= 2 responses to a prompt beside each other")
        mask = torch.ones(len(rewards), 1, dtype=torch.bool)
        given = rewards[:, None], torch.zeros(len(rewards), 1), mask
        return trainer_and_batch("grpo", *given, group_size=int(sizes[0]))[1]["advantages"]


def _loss(logprobs, old_logprobs, advantages, mask, tokens, split, ref_logprobs=None, **options):
    import trl

    trainer = stand_in(trl.GRPOTrainer, trl.GRPOConfig, num_iterations=2, **options)
    config = trainer.args
    trainer.epsilon_low, trainer.epsilon_high = config.epsilon, config.epsilon_high or config.epsilon
    trainer._entropy_bonus_enabled = False
    trainer.current_gradient_accumulation_steps = config.steps_per_generation = split.micro_batches
    alone = {"gather": lambda x: x, "gather_for_metrics": lambda x: x, "reduce": lambda x, reduction: x}
    trainer.accelerator = SimpleNamespace(num_processes=split.ranks, sync_gradients=True, **alone)
    trainer._get_per_token_logps_and_entropies = lambda model, *_, **__: (model.log_probs, model.entropy, None)
    batch = {
        "prompt_ids": torch.ones(len(mask), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.long),
        "completion_ids": torch.ones(mask.shape, dtype=torch.long),
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": old_logprobs,
        "ref_per_token_logps": ref_logprobs,
        "num_items_in_batch": torch.tensor(float(tokens)),
    }
    model = SimpleNamespace(log_probs=logprobs, entropy=torch.zeros_like(logprobs).detach())
    return trainer._compute_loss(model, batch)
