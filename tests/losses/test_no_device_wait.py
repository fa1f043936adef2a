"""No loss, reduction, statistic or check reads a value on the host: each runs on fake tensors, which hold none."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import rlkit.losses as losses


def test_nothing_reads_a_value_on_the_host():
    with FakeTensorMode():
        x, mask = torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3, dtype=torch.bool)
        adv, total = torch.zeros(2), torch.zeros(())
        logits, tokens = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.long)
        hidden, weight, ids = torch.zeros(6, 4, requires_grad=True), torch.zeros(5, 4), torch.zeros(1, dtype=torch.long)
        loss = losses.clipped_policy_loss(x, x, adv, mask, dual_clip=3.0) + losses.kl_k3(x, x, mask)
        for count in (None, 6, total):
            losses.token_mean(loss, mask, count)
            losses.sequence_mean(loss, mask, count)
            losses.sequence_sum_mean(loss, mask, count)
            losses.fixed_length_mean(loss, mask, 8, count).backward(retain_graph=True)
            losses.ratio_stats(x, x, adv, mask, total=count)
            losses.mismatch_stats(x, x, mask, count)
            losses.sequence_mismatch_stats(x, x, mask, count)
        losses.token_logprobs(losses.suppress_tokens(logits, ids), tokens, x)
        losses.token_entropy(logits, x)
        losses.sum_pi_squared(logits, x)
        logprobs, entropy = losses.linear_logprobs(hidden, weight, tokens.flatten(), x.flatten(), suppress=ids, chunk=4)
        (logprobs.sum() + entropy.sum()).backward()
