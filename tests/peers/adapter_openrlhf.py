"""OpenRLHF for the conformance suite, from its unpacked wheel: OPENRLHF=folder/with/openrlhf (pip download --no-deps).

Importing its package needs DeepSpeed, Ray and flash-attn, so the two files with its loss and its log-probabilities are
loaded alone, with an empty module in place of deepspeed, which they do not use. Group advantages are lines within a
method of its experience maker, and are not checked.
"""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import torch

FOLDER = Path(os.environ["OPENRLHF"])


def _load():
    package = sys.modules["openrlhf_models"] = ModuleType("openrlhf_models")
    package.__path__ = [str(FOLDER / "models")]
    missing = "deepspeed" not in sys.modules
    if missing:
        sys.modules["deepspeed"] = ModuleType("deepspeed")
    try:
        return [importlib.import_module(f"openrlhf_models.{name}") for name in ("loss", "utils")]
    finally:
        if missing:
            del sys.modules["deepspeed"]  # others would take it for the real one


LOSS, UTILS = _load()


class Trainer:
    """PPO with OpenRLHF's defaults; DeepSpeed averages gradients over ranks."""

    name = "OpenRLHF 0.11.2"
    ranks_average = True

    def token_logprobs(self, logits, tokens, temperature):
        found = UTILS.log_probs_from_logits(logits, torch.roll(tokens, -1, 1), temperature)  # as its actor does
        return torch.nn.functional.pad(found[:, :-1], (1, 0))

    def token_entropy(self, logits):
        return UTILS.compute_entropy.__wrapped__(logits)  # without torch.compile

    def policy_loss(self, logprobs, old_logprobs, advantages, mask, split, clip_low, clip_high):
        loss = LOSS.PolicyLoss(clip_low, clip_high)
        totals = {"dp_size": split.ranks, "batch_num_tokens": split.tokens, "global_batch_size": split.sequences}
        return loss(logprobs, old_logprobs, advantages[:, None] * mask, mask.long(), **totals)[0]

    def kl_loss(self, logprobs, ref_logprobs):
        """With --algo.kl.use_loss, for which it recommends k2 or k3; by default the KL is in the reward."""
        return UTILS.compute_approx_kl(logprobs, ref_logprobs, kl_estimator="k3")
