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
- Losses return values to be minimised, [B, T], or one a pair or an answer, [P] or [B], where they take whole answers.
  They take tensors and floats; a variant of a formula is another function. Gradients flow to the policy's own tensors
  only.
- Reduction is a separate call with its denominator in sight: `token_mean(loss, mask, total=...)`, where `total` counts
  over all micro-batches and data-parallel ranks. The gradient then does not depend on how a batch was split.
- Masked positions never leak: inputs may hold anything outside the mask, inf and nan included; the result is 0 there,
  with gradient 0.
- An unmasked log-ratio beyond +-20 counts as +-20 and gets gradient 0, so that no `exp` overflows.
- Results are float32, or float64 where the inputs are.
- A wrong type, rank, shape or dtype, or a number out of its range, raises a ValueError that names the argument. Checks
  look at shapes, dtypes and Python numbers, never at a tensor's values, so none waits for a device.

A function describes the arguments that are special to it. Those that many have mean the same in all:

Args:
    logprobs: [B, T], of the policy being trained.
    old_logprobs: [B, T], under the weights that the batch was sampled with; no gradient.
    ref_logprobs: [B, T], of the reference policy, for the same tokens; no gradient.
    rollout_logprobs: [B, T], the sampler's own; no gradient.
    advantages: [B] or [B, T]; no gradient.
    mask: bool [B, T], True on the tokens that the policy wrote and is trained on. Where it may be None, that is every
        token.
    total: the count to divide by, over all micro-batches and data-parallel ranks: a number or a 0-d tensor. None counts
        this mask; 0 gives 0. Trained tokens, unless a function says otherwise.
"""

from rlkit.losses.diagnostics import effective_sample_size, mismatch_stats, ratio_stats, sequence_mismatch_stats
from rlkit.losses.distillation import (
    forward_kl_loss,
    jsd_loss,
    reverse_kl_loss,
    topk_forward_kl_loss,
    topk_reverse_kl_loss,
)
from rlkit.losses.entropy import top_entropy_mask
from rlkit.losses.kl import full_vocabulary_kl, kl_abs, kl_k1, kl_k2, kl_k3, kl_k3_weighted, kl_straight_through
from rlkit.losses.logprobs import (
    LogprobsAndEntropy,
    align_with_tokens,
    linear_logprobs,
    sum_pi_squared,
    suppress_tokens,
    target_logprobs,
    token_entropy,
    token_logprobs,
)
from rlkit.losses.mismatch import (
    geometric_importance_weights,
    geometric_rejection_mask,
    importance_weights,
    masked_importance_weights,
    rejection_mask,
    sequence_importance_weights,
    sequence_masked_importance_weights,
    sequence_max_divergence_mask,
    sequence_mean_divergence_mask,
    sequence_rejection_mask,
    sequence_sum_divergence_mask,
    token_divergence_mask,
    token_rejection_mask,
)
from rlkit.losses.policy import (
    cispo_loss,
    clipped_policy_loss,
    gpg_loss,
    gppo_loss,
    reinforce_loss,
    sapo_loss,
)
from rlkit.losses.preference import (
    apo_zero_loss,
    bradley_terry_loss,
    dpo_loss,
    hinge_dpo_loss,
    ipo_loss,
    kto_kl_estimate,
    kto_loss,
    orpo_loss,
    preference_stats,
    reward_centring_loss,
    robust_dpo_loss,
    sequence_logprobs,
    sequence_mean_logprobs,
    simpo_loss,
    slic_loss,
)
from rlkit.losses.preference_variants import (
    alpha_divergence_dpo_loss,
    alphapo_loss,
    aot_loss,
    aot_unpaired_loss,
    apo_down_loss,
    bco_loss,
    discopop_loss,
    exo_loss,
    forward_kl_dpo_loss,
    js_dpo_loss,
    ld_sequence_logprobs,
    nca_loss,
    sppo_loss,
    wpo_weights,
)
from rlkit.losses.reductions import (
    fixed_length_mean,
    pair_mean,
    sequence_mean,
    sequence_sum_mean,
    token_mean,
    token_sum,
)
from rlkit.losses.sequence_policy import (
    gmpo_loss,
    gspo_loss,
    gspo_token_loss,
    luspo_loss,
    off_policy_sequence_mask,
    topr_loss,
)
from rlkit.losses.trust_region import clip_cov_loss, dppo_kl_loss, dppo_tv_loss, dro_loss, kl_cov_loss, vespo_loss
from rlkit.losses.value import clipped_value_loss

__all__ = [
    "alpha_divergence_dpo_loss",
    "alphapo_loss",
    "aot_loss",
    "aot_unpaired_loss",
    "apo_down_loss",
    "apo_zero_loss",
    "bco_loss",
    "bradley_terry_loss",
    "cispo_loss",
    "clip_cov_loss",
    "clipped_policy_loss",
    "clipped_value_loss",
    "discopop_loss",
    "token_divergence_mask",
    "dpo_loss",
    "dppo_kl_loss",
    "dppo_tv_loss",
    "dro_loss",
    "effective_sample_size",
    "exo_loss",
    "fixed_length_mean",
    "forward_kl_dpo_loss",
    "forward_kl_loss",
    "full_vocabulary_kl",
    "geometric_importance_weights",
    "geometric_rejection_mask",
    "gmpo_loss",
    "gpg_loss",
    "gppo_loss",
    "gspo_loss",
    "gspo_token_loss",
    "hinge_dpo_loss",
    "importance_weights",
    "ipo_loss",
    "js_dpo_loss",
    "jsd_loss",
    "kl_abs",
    "kl_cov_loss",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_k3_weighted",
    "kl_straight_through",
    "kto_kl_estimate",
    "kto_loss",
    "ld_sequence_logprobs",
    "linear_logprobs",
    "luspo_loss",
    "masked_importance_weights",
    "sequence_max_divergence_mask",
    "sequence_mean_divergence_mask",
    "mismatch_stats",
    "nca_loss",
    "off_policy_sequence_mask",
    "orpo_loss",
    "preference_stats",
    "ratio_stats",
    "reinforce_loss",
    "rejection_mask",
    "token_rejection_mask",
    "pair_mean",
    "align_with_tokens",
    "LogprobsAndEntropy",
    "reverse_kl_loss",
    "reward_centring_loss",
    "robust_dpo_loss",
    "sapo_loss",
    "sequence_importance_weights",
    "sequence_logprobs",
    "sequence_masked_importance_weights",
    "sequence_mean",
    "sequence_mean_logprobs",
    "sequence_mismatch_stats",
    "sequence_rejection_mask",
    "sequence_sum_mean",
    "simpo_loss",
    "slic_loss",
    "sppo_loss",
    "sequence_sum_divergence_mask",
    "sum_pi_squared",
    "suppress_tokens",
    "target_logprobs",
    "token_entropy",
    "token_logprobs",
    "token_mean",
    "token_sum",
    "top_entropy_mask",
    "topk_forward_kl_loss",
    "topk_reverse_kl_loss",
    "topr_loss",
    "vespo_loss",
    "wpo_weights",
]
