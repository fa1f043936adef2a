"""Groups of what preference losses are fed: log-probabilities of whole responses, and weights of them."""

import math
from functools import partial

import torch
from functions_common import PEERS, group

from rlkit.losses import ld_sequence_logprobs, sequence_logprobs, sequence_mean_logprobs, wpo_weights

if "verl" in PEERS:
    from verl.utils.torch_functional import masked_mean, masked_sum


def sums_group(name, ours, weigh, verl=None):
    """[B] of each row's tokens: `weigh(count)` is the weight of each of them, and the gradient."""

    @group(name, *["verl"] * (verl is not None))
    def build(b):
        up, (p, mask), m = b.rewards, b.nested("logprobs", "mask"), b.mask

        def run(out):
            return out, torch.autograd.grad(out, b.logprobs, up)[0]

        def loop():
            values, gradient = [], []
            for row, on, u in zip(p, mask, up.tolist(), strict=True):
                weights, sums = iter(weigh(sum(on))), [0.0] * len(row)
                value = 0.0
                for t, taken in enumerate(on):
                    if taken:
                        w = next(weights)
                        value += w * row[t]
                        sums[t] = w * u
                values.append(value)
                gradient.append(sums)
            return values, gradient

        return {
            "rlkit": lambda: run(ours(b.logprobs, b.mask)),
            "loop": loop,
            "verl": lambda: run(verl(b.logprobs, m)),
        }


if "verl" in PEERS:
    verl_sum, verl_mean = partial(masked_sum, axis=-1), partial(masked_mean, axis=-1)
else:
    verl_sum = verl_mean = None
SHARED = 600  # tokens of the shorter response
sums_group("sequence_logprobs", sequence_logprobs, lambda n: [1.0] * n, verl_sum)
sums_group("sequence_mean_logprobs", sequence_mean_logprobs, lambda n: [1 / n] * n, verl_mean)
sums_group(
    "LD-DPO's sequence_logprobs",
    lambda logprobs, mask: ld_sequence_logprobs(logprobs, mask, torch.full((len(mask),), SHARED), alpha=0.5),
    lambda n: [1.0] * min(n, SHARED) + [0.5] * max(n - SHARED, 0),
)


@group("WPO weights")
def wpo(b):
    logprobs, squares = b.logprobs.detach(), b.old.exp().square() + 0.1
    (p, mask), s = b.nested("logprobs", "mask"), squares.tolist()

    def of_row(p, s, on):
        return math.exp(sum(x - math.log(y) for x, y, taken in zip(p, s, on, strict=True) if taken) / sum(on))

    return {
        "rlkit": lambda: wpo_weights(logprobs, squares, b.mask),
        "loop": lambda: [of_row(*row) for row in zip(p, s, mask, strict=True)],
    }
