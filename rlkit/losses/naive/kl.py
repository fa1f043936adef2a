"""`rlkit.losses.kl` token by token."""

from torch import Tensor

from rlkit.losses.naive._loops import add, constant, everywhere, trained, zeros


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    mask = everywhere(mask, logprobs)
    logprobs, ref, out = logprobs.double(), constant(ref_logprobs), zeros(mask)
    for b, t in trained(mask):
        out[b, t] = logprobs[b, t] - ref[b, t]
    return out


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    mask = everywhere(mask, logprobs)
    logprobs, ref, out = logprobs.double(), constant(ref_logprobs), zeros(mask)
    for b, t in trained(mask):
        out[b, t] = (logprobs[b, t] - ref[b, t]) ** 2 / 2
    return out


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    mask = everywhere(mask, logprobs)
    logprobs, ref, out = logprobs.double(), constant(ref_logprobs), zeros(mask)
    for b, t in trained(mask):
        d = ref[b, t] - logprobs[b, t]
        out[b, t] = d.exp() - 1 - d
    return out


def kl_abs(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    mask = everywhere(mask, logprobs)
    logprobs, ref, out = logprobs.double(), constant(ref_logprobs), zeros(mask)
    for b, t in trained(mask):
        out[b, t] = max(logprobs[b, t] - ref[b, t], ref[b, t] - logprobs[b, t])
    return out


def kl_straight_through(logprobs: Tensor, ref_logprobs: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    mask = everywhere(mask, logprobs)
    logprobs, ref, shown, out = logprobs.double(), constant(ref_logprobs), constant(value), zeros(mask)
    for b, t in trained(mask):
        k2 = (logprobs[b, t] - ref[b, t]) ** 2 / 2
        out[b, t] = shown[b, t] + k2 - k2.item()
    return out


def kl_k3_weighted(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    mask = everywhere(mask, logprobs)
    logprobs, ref, old, out = logprobs.double(), constant(ref_logprobs), constant(old_logprobs), zeros(mask)
    for b, t in trained(mask):
        d = ref[b, t] - logprobs[b, t]
        ratio = (logprobs[b, t] - old[b, t]).exp()
        out[b, t] = ratio * (d.exp() - 1 - d)
    return out


def kl_binary(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    mask = everywhere(mask, logprobs)
    logprobs, ref, out = logprobs.double(), constant(ref_logprobs), zeros(mask)
    for b, t in trained(mask):
        p, q = logprobs[b, t].exp(), ref[b, t].exp()
        out[b, t] = p * (p / q).log() + (1 - p + 1e-8) * ((1 - p + 1e-8) / (1 - q + 1e-8)).log()
    return out


def full_vocabulary_kl(
    logits: Tensor, ref_logits: Tensor, mask: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    mask = everywhere(mask, logits[..., 0])
    logits, ref, out = logits.double() / temperature, constant(ref_logits) / temperature, zeros(mask)
    for b, t in trained(mask):
        p, q = logits[b, t].exp(), ref[b, t].exp()
        p, q = p / p.sum(), q / q.sum()
        out[b, t] = add(p[v] * (p[v] / q[v]).log() for v in range(len(p)))
    return out
