"""Our losses of supervised fine-tuning beside those of TRL's SFTTrainer."""

import torch
from cases_trl_trainer import case, fused_head_output, stand_in

from rlkit.losses import dft_loss, token_mean

B, T = 5, 9


def chats(g):
    """Responses of several turns and of several lengths: a mean over tokens is not one over responses."""
    logprobs = -3 * torch.rand(B, T, generator=g)
    mask = (torch.rand(B, T, generator=g) < 0.6) & (torch.arange(T) < torch.tensor([[9], [7], [4], [6], [8]]))
    mask[:, 0] = False
    return {"logprobs": logprobs, "mask": mask}


def sft(**options):
    def peer(logprobs, mask):
        from trl import SFTConfig, SFTTrainer

        trainer = stand_in(SFTTrainer, SFTConfig, {"compute_loss_func": None, "label_smoother": None}, **options)
        output = fused_head_output(logprobs, mask)
        output.label_mask = mask[:, 1:]
        ones = torch.ones_like(mask, dtype=torch.long)
        batch = {"input_ids": ones, "attention_mask": ones, "labels": torch.where(mask, ones, -100)}
        return {"out": trainer.compute_loss(lambda **_: output, batch)}

    return peer


CASES = [case("sft", chats, sft(), lambda x: token_mean(-x.logprobs, x.mask))]
DYNAMIC = [
    case("sft_dft", chats, sft(loss_type="dft"), lambda x: token_mean(dft_loss(x.logprobs, x.mask), x.mask)),
]
