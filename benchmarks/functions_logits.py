"""Groups of log-probabilities and entropies at a vocabulary of 32,000, with backward and the memory they take.

The loops go row by row, as 16 million Python floats say nothing; their gradients are written out.
"""

import torch
import torch.nn.functional as F
from functions_common import PEERS, group

from rlkit.losses import linear_logprobs, sum_pi_squared, target_logprobs, token_entropy, token_logprobs

if "verl" in PEERS:
    from verl.utils import torch_functional as verl
    from verl.utils.experimental.torch_functional import FusedLinearForPPO
if "trl" in PEERS:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction
    from trl.trainer import utils as trl

N, H, V, ROWS = 512, 256, 32000, 8


def inputs():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(N, V, generator=g).mul_(2).requires_grad_()
    return logits, torch.randint(V, (N,), generator=g), torch.randn(N, generator=g), torch.randn(N, generator=g)


def row_gradients(row, target, up_logprob, up_entropy):
    """(logprob, entropy, gradient by the row) of one row of logits."""
    logp = row - row.max()
    logp = logp - logp.exp().sum().log()
    p = logp.exp()
    entropy = -(p * logp).sum()
    gradient = -up_logprob * p - up_entropy * p * (logp + entropy)
    gradient[target] += up_logprob
    return logp[target], entropy, gradient


@group("logprobs from logits, 512 x 32000", "verl", "trl", memory=True)
def logprobs(_):
    logits, targets, up, _ = inputs()
    shaped, as_rows = logits.detach().view(ROWS, -1, V).requires_grad_(), targets.view(ROWS, -1)  # TRL's [B, T, V]

    def run(function):
        out = function(logits, targets)
        return out, torch.autograd.grad(out, logits, up)[0]

    def loop():
        values, gradients = [], []
        for row, target, u in zip(logits.detach(), targets, up, strict=True):
            value, _, gradient = row_gradients(row, target, u, 0.0)
            values.append(value)
            gradients.append(gradient)
        return torch.stack(values), torch.stack(gradients)

    def trl_run():
        out = trl.selective_log_softmax(shaped, as_rows)
        return out.view(-1), torch.autograd.grad(out, shaped, up.view(ROWS, -1))[0].view(-1, V)

    return {
        "rlkit": lambda: run(target_logprobs),
        "loop": loop,
        "verl": lambda: run(verl.logprobs_from_logits),
        "trl": trl_run,
    }


@group("logprobs of 8 targets from logits, 512 x 32000", "trl", memory=True)
def several(_):
    logits, *_ = inputs()
    g = torch.Generator().manual_seed(1)
    targets, up = torch.randint(V, (N, 8), generator=g), torch.randn(N, 8, generator=g)

    def run(function):
        out = function(logits, targets)
        return out, torch.autograd.grad(out, logits, up)[0]

    def loop():
        values, gradients = [], []
        for row, ids, u in zip(logits.detach(), targets, up, strict=True):
            logp = row.log_softmax(0)
            values.append(logp[ids])
            gradients.append((-u.sum() * logp.exp()).scatter_add_(0, ids, u))
        return torch.stack(values), torch.stack(gradients)

    return {"rlkit": lambda: run(target_logprobs), "loop": loop, "trl": lambda: run(trl.selective_log_softmax)}


@group("logprobs of a kept half from logits, 512 x 32000", memory=True)
def kept(_):
    logits, targets, up, _ = inputs()
    keep = (torch.rand(N, V, generator=torch.Generator().manual_seed(1)) < 0.5).scatter(1, targets[:, None], True)

    def ours():
        out = target_logprobs(logits, targets, keep=keep)
        return out, torch.autograd.grad(out, logits, up)[0]

    def loop():
        values, gradients = [], torch.zeros_like(logits)
        for i, (row, target, u) in enumerate(zip(logits.detach(), targets, up, strict=True)):
            ids = keep[i].nonzero()[:, 0]
            place = (ids == target).nonzero().item()
            value, _, gradients[i, ids] = row_gradients(row[ids], place, u, 0.0)
            values.append(value)
        return torch.stack(values), gradients

    return {"rlkit": ours, "loop": loop}


@group("logprobs of tokens, 8 x 64 x 32000", "verl", "trl", memory=True)
def next_tokens(_):
    """Each column of logits speaks of the next token; the first token has no log-probability."""
    logits, tokens, up, _ = (x.detach().view(ROWS, -1, *x.shape[1:]) for x in inputs())
    logits.requires_grad_()

    def run(function):
        out = function()
        return out, torch.autograd.grad(out, logits, up)[0]

    def loop():
        values, gradients = torch.zeros_like(up), torch.zeros_like(logits)
        for i in range(ROWS):
            for t in range(1, up.shape[1]):
                row, u = logits.detach()[i, t - 1], up[i, t]
                values[i, t], _, gradients[i, t - 1] = row_gradients(row, tokens[i, t], u, 0.0)
        return values, gradients

    def padded(function):
        return lambda: F.pad(function(), (1, 0))

    n = tokens.shape[1] - 1
    verls = padded(lambda: verl.log_probs_from_logits_response(tokens, logits, n))
    trls = padded(lambda: trl.selective_log_softmax(logits[:, :-1], tokens[:, 1:]))
    return {
        "rlkit": lambda: run(lambda: token_logprobs(logits, tokens)),
        "loop": loop,
        "verl": lambda: run(verls),
        "trl": lambda: run(trls),
    }


@group("entropy from logits, 512 x 32000", "verl", "verl_chunked", "trl", memory=True)
def entropy(_):
    logits, targets, _, up = inputs()

    def run(function, **settings):
        out = function(logits, **settings)
        return out, torch.autograd.grad(out, logits, up)[0]

    def loop():
        values, gradients = [], []
        for row, target, u in zip(logits.detach(), targets, up, strict=True):
            _, value, gradient = row_gradients(row, target, 0.0, u)
            values.append(value)
            gradients.append(gradient)
        return torch.stack(values), torch.stack(gradients)

    return {
        "rlkit": lambda: run(token_entropy),
        "loop": loop,
        "verl": lambda: run(verl.entropy_from_logits),
        "verl_chunked": lambda: run(verl.entropy_from_logits_with_chunking, chunk_size=128),
        "trl": lambda: run(trl.entropy_from_logits),
    }


@group("sum of squared probabilities, 512 x 32000, forward alone", "verl", memory=True)
def squares(_):
    logits = inputs()[0].detach()
    return {
        "rlkit": lambda: sum_pi_squared(logits),
        "loop": lambda: torch.stack([row.softmax(0).square().sum() for row in logits]),
        "verl": lambda: verl.calculate_sum_pi_squared_from_logits(logits),
    }


@group("logprobs and entropy from hidden states, 512 x 256 x 32000", "logits", "verl", "trl", memory=True)
def linear(_):
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, H, generator=g).requires_grad_(), torch.randn(V, H, generator=g).mul_(0.1)
    weight.requires_grad_()
    _, targets, up_logprobs, up_entropy = inputs()

    def run(function):
        out = function()
        return *out, *torch.autograd.grad(out, (hidden, weight), (up_logprobs, up_entropy))

    def naive():
        logits = hidden @ weight.T
        return target_logprobs(logits, targets), token_entropy(logits)

    @torch.no_grad()
    def loop():
        values, entropies, of_hidden, of_weight = [], [], [], torch.zeros_like(weight)
        for h, target, u, v in zip(hidden, targets, up_logprobs, up_entropy, strict=True):
            value, row_entropy, gradient = row_gradients(weight @ h, target, u, v)
            values.append(value)
            entropies.append(row_entropy)
            of_hidden.append(gradient @ weight)
            of_weight.addr_(gradient, h)
        return torch.stack(values), torch.stack(entropies), torch.stack(of_hidden), of_weight

    def trl_run():
        out = ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 8192, None, 1.0, ("entropy",))
        return out[:2]

    return {
        "rlkit": lambda: run(lambda: linear_logprobs(hidden, weight, targets)),
        "loop": loop,
        "logits": lambda: run(naive),
        "verl": lambda: run(lambda: FusedLinearForPPO()(hidden, weight, targets)),
        "trl": lambda: run(trl_run),
    }
