"""Losses, log-probabilities, KL estimates, reductions and diagnostics: pure functions on tensors that need torch alone.

Conventions, said here once and held everywhere in rlkit:

- B sequences, T tokens, V vocabulary, H hidden, N packed tokens, G samples a prompt.
- A per-token tensor is [B, T] and aligned with the token it speaks of: `logprobs[b, t] = log p(tokens[b, t] |
  tokens[b, :t])`, and column 0 is 0. Nothing has length T-1.
- Sequences are right-padded, prompt and response in one row. `mask` is bool [B, T], True on the tokens that the policy
  wrote and is trained on: never prompt, padding, tool output or environment observation.
- `values[b, t]` is the value of the prefix before `tokens[b, t]`: the head's output at t-1.
- `rollout_logprobs` are the sampler's. `old_logprobs` are the trainer's under the weights that the batch was sampled
  with, simply `logprobs.detach()` when a batch is used for one step.
- Outcome advantages are [B], token-level ones [B, T]; losses take either.
- Losses return per-token values (per-sequence ones where the formula is per sequence). They take tensors and floats; a
  variant of a formula is another function. Gradients flow to the policy's own tensors only.
- Reduction is a separate call with its denominator in sight: `token_mean(loss, mask, total=...)`, where `total` counts
  over all micro-batches and data-parallel ranks. The gradient then does not depend on how a batch was split.
- Masked positions never leak: the log-ratio is masked before `exp`, so a masked inf or nan changes neither value nor
  gradient. An unmasked log-ratio is held within +-20, with gradient 0 beyond.
- Results are float32 at least, whatever the inputs' dtype. Checks look at shapes and dtypes, never at values.
"""

from rlkit.losses.diagnostics import effective_sample_size, mismatch_stats, ratio_stats
from rlkit.losses.kl import kl_k3
from rlkit.losses.logprobs import linear_logprobs, suppress_tokens, target_logprobs, token_entropy, token_logprobs
from rlkit.losses.policy import clipped_policy_loss
from rlkit.losses.reductions import fixed_length_mean, sequence_mean, sequence_sum_mean, token_mean, token_sum

__all__ = [
    "clipped_policy_loss",
    "effective_sample_size",
    "fixed_length_mean",
    "kl_k3",
    "linear_logprobs",
    "mismatch_stats",
    "ratio_stats",
    "sequence_mean",
    "sequence_sum_mean",
    "suppress_tokens",
    "target_logprobs",
    "token_entropy",
    "token_logprobs",
    "token_mean",
    "token_sum",
]
