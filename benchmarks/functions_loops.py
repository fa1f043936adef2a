"""Policy losses as plain loops over Python floats, with gradients worked out by hand; no code is shared with ours.

A token's rule takes (logprob, old logprob, advantage) and returns (loss, its derivative by the logprob).
"""

import math


def total(rows, mask, weights):
    return sum(w * x for row, m, w in zip(rows, mask, weights, strict=True) for x, on in zip(row, m, strict=True) if on)


def token_weights(mask):
    """Of each row, under which the sum over its tokens becomes the mean over all tokens."""
    return [1 / sum(map(sum, mask))] * len(mask)


def sequence_weights(mask):
    """The same for the mean over sequences of the mean over tokens."""
    return [1 / (len(mask) * sum(m)) for m in mask]


def by_token(rule, logprobs, old, advantages, mask, weights, chosen=None):
    """The weighted sum of the rule over the mask, and its gradient. `chosen`: {(row, token): rule} that differ."""
    loss, gradient = 0.0, []
    for i, (p, q, a, m, w) in enumerate(zip(logprobs, old, advantages, mask, weights, strict=True)):
        g = [0.0] * len(p)
        for t in range(len(p)):
            if m[t]:
                here = rule if chosen is None else chosen.get((i, t), rule)
                x, d = here(p[t], q[t], a[t])
                loss += w * x
                g[t] = w * d
        gradient.append(g)
    return loss, gradient


def clipped(low, high, dual=None):
    def rule(p, q, a):
        ratio = math.exp(p - q)
        loss, other = -a * ratio, -a * min(max(ratio, 1 - low), 1 + high)
        derivative = loss
        if other > loss:
            loss, derivative = other, 0.0
        if dual is not None and a < 0 and loss > -a * dual:
            loss, derivative = -a * dual, 0.0
        return loss, derivative

    return rule


def surrogate(penalty=0.0):
    """-ratio * A, with an absolute penalty on the log-ratio."""

    def rule(p, q, a):
        x = -a * math.exp(p - q)
        return x + penalty * abs(p - q), x + penalty * ((p > q) - (p < q))

    return rule


def dropped(p, q, a):
    return 0.0, 0.0


def unless_bound(rule):
    """Clip-cov's candidates: those of the rule's tokens that its clip does not bind; they are dropped."""

    def drop(p, q, a):
        loss, derivative = rule(p, q, a)
        return (0.0, 0.0) if derivative or not loss else (loss, derivative)

    return drop


def cispo(low, high):
    def rule(p, q, a):
        weight = -a * min(max(math.exp(p - q), 1 - low), 1 + high)
        return weight * p, weight

    return rule


def sapo(positive, negative):
    def rule(p, q, a):
        ratio, tau = math.exp(p - q), positive if a > 0 else negative
        s = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return -4 / tau * s * a, -4 * s * (1 - s) * ratio * a

    return rule


def reinforce(p, q, a):
    return -a * p, -a


def dro(beta):
    return lambda p, q, a: (-a * p + beta / 2 * (p - q) ** 2, -a + beta * (p - q))


def dppo_tv(delta, cap):
    def rule(p, q, a):
        gain = math.exp(p) - math.exp(q)
        if (gain > delta) if a > 0 else (-gain > delta):
            return dropped(p, q, a)
        x = -a * min(math.exp(p - q), cap)
        return x, x

    return rule


def dppo_kl(delta, cap):
    def rule(p, q, a):
        new, was = math.exp(p), math.exp(q)
        kl = was * (q - p) + (1 - was) * math.log((1 - was + 1e-8) / (1 - new + 1e-8))
        if kl > delta and ((p > q) if a > 0 else (p < q)):
            return dropped(p, q, a)
        x = -a * min(math.exp(p - q), cap)
        return x, x

    return rule


def kl_k3(p, q, a):
    d = q - p
    return math.exp(d) - 1 - d, 1 - math.exp(d)


def value(clip):
    """(value, old value, return) in place of (logprob, old logprob, advantage)."""

    def rule(v, was, r):
        held = min(max(v, was - clip), was + clip)
        plain, other = (v - r) ** 2, (held - r) ** 2
        return 0.5 * max(plain, other), v - r if plain > other or held == v else 0.0

    return rule


def covariances(logprobs, advantages, mask):
    """[(covariance, row, token)] of the trained tokens."""
    n = sum(map(sum, mask))
    mean_p, mean_a = (total(x, mask, [1 / n] * len(mask)) for x in (logprobs, advantages))
    return [
        ((p[t] - mean_p) * (a[t] - mean_a), i, t)
        for i, (p, a, m) in enumerate(zip(logprobs, advantages, mask, strict=True))
        for t in range(len(p))
        if m[t]
    ]


def by_sequence(rule, logprobs, old, advantages, mask):
    """The mean over sequences of `rule(log-ratios, advantage)`: a sequence's loss, its derivative by each of them."""
    loss, gradient = 0.0, []
    for p, q, a, m in zip(logprobs, old, advantages, mask, strict=True):
        tokens = [t for t in range(len(p)) if m[t]]
        x, derivatives = rule([p[t] - q[t] for t in tokens], a)
        loss += x / len(mask)
        g = [0.0] * len(p)
        for t, d in zip(tokens, derivatives, strict=True):
            g[t] = d / len(mask)
        gradient.append(g)
    return loss, gradient


def gspo(low, high):
    def rule(ratios, a):
        s = math.exp(sum(ratios) / len(ratios))
        loss, other = -a * s, -a * min(max(s, 1 - low), 1 + high)
        return max(loss, other), [loss / len(ratios) if loss >= other else 0.0] * len(ratios)

    return rule


def gmpo(low, high):
    def rule(ratios, a):
        held = [min(x, high) if a > 0 else max(x, -low) for x in ratios]
        loss = -a * math.exp(sum(held) / len(held))
        return loss, [loss / len(held) if x == y else 0.0 for x, y in zip(ratios, held, strict=True)]

    return rule


def vespo(logprobs, old, advantages, mask, weights, k, decay):
    """k and decay: (A >= 0, A < 0)."""
    loss, gradient = 0.0, []
    for p, q, a, m, w in zip(logprobs, old, advantages, mask, weights, strict=True):
        log_w = min(max(sum(x - y for x, y, on in zip(p, q, m, strict=True) if on), -20.0), 20.0)
        phi = math.exp(min(k[a < 0] * log_w + decay[a < 0] * (1 - math.exp(log_w)), 20.0))
        loss -= w * phi * a * sum(x for x, on in zip(p, m, strict=True) if on)
        gradient.append([-w * phi * a if on else 0.0 for on in m])
    return loss, gradient
