"""One gradient for every way to parallelise: the losses that are compared, and the table of docs/notes_engines.md.

`on_ranks.py`, `on_ulysses_ranks.py` and `on_megatron_ranks.py` run the cases; `test_ranks.py`, `test_ulysses.py` and
`test_megatron.py` compare the results. The table is made from the cases, so every "yes" in it has a test.
"""

from importlib import import_module

import torch

from rlkit.losses import clipped_policy_loss, clipped_value_loss, sequence_mean, token_mean, topk_forward_kl_loss

COLUMNS = (
    "text", "images in some rows", "token-level policy", "sequence-level policy", "SFT", "distillation", "value",
    "a rank without rows",
)  # fmt: skip


def token_loss(out, mb):
    loss = clipped_policy_loss(out.logprobs, out.logprobs.detach(), mb.advantages, mb.mask)
    entropy = token_mean(out.entropy, mb.mask, mb.total_tokens)
    surprise = torch.cat([torch.zeros(1), -out.logprobs.flatten()]).max()  # a micro-batch may have no rows
    metrics = {"entropy": entropy, "surprise/max": surprise, "rows": len(mb)}
    return token_mean(loss, mb.mask, mb.total_tokens) - 0.05 * entropy, metrics


def sequence_loss(out, mb):
    old = mb.rollout_logprobs - 3.5  # so that some ratios are clipped, and the loss changes
    loss = clipped_policy_loss(out.logprobs, old, mb.advantages, mb.mask)
    return sequence_mean(loss, mb.mask, mb.total_sequences), {}


def sft_loss(out, mb):
    return token_mean(-out.logprobs, mb.mask, mb.total_tokens), {}


def distillation_loss(out, mb):
    mean = token_mean(out.divergence, mb.mask, mb.total_tokens)
    weighted = token_mean(mb.advantages[:, None] * out.divergence, mb.mask, mb.total_tokens)
    return weighted - 0.1 * token_mean(out.logprobs, mb.mask, mb.total_tokens), {"divergence": mean}


def divergence(logits, teacher):
    top = teacher["logprobs"][None], teacher["ids"][None]
    return topk_forward_kl_loss(logits[None], *top, torch.ones(1, len(logits), dtype=torch.bool))[0]


def with_teacher(batch):
    """The batch with the four likeliest tokens of a teacher who looks at the last token alone."""
    tokens = batch.tokens[batch.mask][:, None]
    ids = (7 * tokens + 11 * torch.arange(4)) % 31
    return batch.add_token_fields(ids=ids, logprobs=torch.log_softmax(torch.cos(ids + tokens), 1) - 0.1)


def value_loss(out, mb):
    returns = mb.advantages[:, None].expand(mb.mask.shape)
    loss = clipped_value_loss(out.values, torch.zeros_like(out.values), returns, mb.mask)
    return token_mean(loss, mb.mask, mb.total_tokens), {"value": token_mean(out.values, mb.mask, mb.total_tokens)}


POLICY = (token_loss, sequence_loss, sft_loss, distillation_loss)  # of four steps
VALUE = (value_loss,) * 4
OUTPUTS = {POLICY: ("logprobs", "entropy"), VALUE: ("values",)}


def train(engine, batch, loss_fn, losses):
    """One step with one of the losses."""
    functions = {"logit_functions": {"divergence": divergence}} if loss_fn is distillation_loss else {}
    return engine.train_batch(batch, loss_fn, OUTPUTS[losses], **functions)


def topk(engine, batch):
    """[B, T] log-probabilities and ids of the second likeliest tokens."""
    top = engine.topk_logprobs(batch, 2)
    found = torch.zeros(*batch.mask.shape, 2)
    found[batch.mask] = torch.stack([top.logprobs[:, 1], top.ids[:, 1].float()], 1)
    return found.unbind(2)


def full_tensor(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def columns(losses, *, has_images, has_empty_rank):
    """The columns of the table in which a case stands."""
    compared = ["value"] if losses is VALUE else ["token-level policy", "sequence-level policy", "SFT", "distillation"]
    compared.append("images in some rows" if has_images else "text")
    return {*compared, *(["a rank without rows"] if has_empty_rank else [])}


def table():
    """The table of docs/notes_engines.md in Markdown: layouts, and what is compared for each."""
    found = {}
    for name in ("on_ranks", "on_ulysses_ranks", "on_megatron_ranks"):
        for layout, compared in import_module(name).compared():
            found.setdefault(layout, set()).update(compared)
    lines = [("layout", *COLUMNS), ("---",) * (1 + len(COLUMNS))]
    lines += [(layout, *("yes" if name in compared else "" for name in COLUMNS)) for layout, compared in found.items()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
