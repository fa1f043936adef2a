"""Losses, log-probabilities, KL estimates, reductions and diagnostics: pure functions on tensors that need torch alone.

    from rlkit.losses import clipped_policy_loss, token_logprobs, token_mean

    logprobs = token_logprobs(logits, tokens)
    loss = clipped_policy_loss(logprobs, old_logprobs, advantages, mask, clip_high=0.28)
    token_mean(loss, mask, total=trained_tokens).backward()

The fifteen functions that most people need:

- from logits: `token_logprobs`, `token_entropy`, `linear_logprobs`
- policy and critic: `clipped_policy_loss`, `gspo_loss`, `reinforce_loss`, `clipped_value_loss`
- the mean with its denominator: `token_mean`, `sequence_mean`
- the distance to a reference and to the sampler: `kl_k3`, `importance_weights`
- what to log: `ratio_stats`, `mismatch_stats`
- preferences: `sequence_logprobs`, `dpo_loss`

All, by family, each a module:

- policy: one ratio per token. `clipped_policy_loss` (PPO, GRPO, DAPO), `reinforce_loss`, `gpg_loss`, `cispo_loss`,
  `gppo_loss`, `sapo_loss`
- sequence_policy: one ratio per sequence. `gspo_loss`, `gspo_token_loss`, `luspo_loss`, `gmpo_loss`, `topr_loss`,
  `sequence_sapo_loss`, `flash_reinforce_loss`, `off_policy_sequence_mask`
- trust_region: another region than a clipped ratio. `clip_cov_loss`, `kl_cov_loss`, `dppo_tv_loss`, `dppo_kl_loss`,
  `dro_loss`, `vespo_loss`, `m2po_loss`
- value: `clipped_value_loss`
- reductions: from values per token to one number. `token_sum`, `token_mean`, `sequence_mean`, `sequence_sum_mean`,
  `fixed_length_mean`, `prompt_mean`, `group_token_counts`, `preference_mean`
- logprobs: from logits or hidden states. `LogprobsAndEntropy`, `TopkLogprobs`, `token_logprobs`, `align_with_tokens`,
  `target_logprobs`, `token_entropy`, `sum_pi_squared`, `suppress_tokens`, `linear_logprobs`
- entropy: `top_entropy_mask`, `adaptive_entropy_coef`
- kl: from a reference. `kl_k1`, `kl_k2`, `kl_k3`, `kl_abs`, `kl_straight_through`, `kl_k3_weighted`,
  `kl_binary`, `full_vocabulary_kl`
- mismatch: between sampler and trainer. `importance_weights`, `sequence_importance_weights`,
  `geometric_importance_weights`, `masked_importance_weights`, `sequence_masked_importance_weights`,
  `token_rejection_mask`, `rejection_mask`, `sequence_rejection_mask`, `geometric_rejection_mask`,
  `token_divergence_mask`, `sequence_sum_divergence_mask`, `sequence_mean_divergence_mask`,
  `sequence_max_divergence_mask`
- diagnostics: `ratio_stats`, `sequence_ratio_stats`, `value_stats`, `explained_variance`, `mismatch_stats`,
  `sequence_mismatch_stats`, `effective_sample_size`
- preference: pairs of responses, single responses, reward models. `sequence_logprobs`, `sequence_mean_logprobs`,
  `dpo_loss`, `robust_dpo_loss`, `ipo_loss`, `hinge_dpo_loss`, `slic_loss`, `apo_zero_loss`, `simpo_loss`, `orpo_loss`,
  `kto_loss`, `kto_kl_estimate`, `bradley_terry_loss`, `reward_centring_loss`, `preference_stats`
- preference_variants: `apo_down_loss`, `exo_loss`, `nca_loss`, `sppo_loss`, `bco_loss`, `discopop_loss`,
  `alphapo_loss`, `tpo_loss`, `a_star_po_loss`, `alpha_divergence_dpo_loss`, `forward_kl_dpo_loss`, `js_dpo_loss`,
  `aot_loss`, `aot_unpaired_loss`, `ld_sequence_logprobs`, `wpo_weights`
- distillation: of a teacher and a student. `forward_kl_loss`, `reverse_kl_loss`, `jsd_loss`, `topk_forward_kl_loss`,
  `topk_reverse_kl_loss`, `topk_jsd_loss`
- supervised: of responses that somebody else wrote. `dft_loss`, `chord_phi_loss`, `chord_mu`
- router: of mixtures of experts. `load_balancing_loss`

Conventions, which hold everywhere in rlkit:

- B sequences, T tokens, V vocabulary, H hidden, N packed tokens, G samples per prompt.
- A per-token tensor is [B, T], and entry t belongs to token t: `logprobs[b, t] = log p(tokens[b, t] | tokens[b, :t])`,
  and column 0 is 0. Nothing has length T-1.
- Sequences are right-padded, prompt and response in one row. `mask` is bool [B, T], True on the tokens that the policy
  wrote and is trained on: never prompt, padding, tool output or environment observation.
- `values[b, t]` is the value of the prefix before `tokens[b, t]`: the head's output at t-1.
- `rollout_logprobs` are the sampler's. `old_logprobs` are the trainer's under the weights that the batch was sampled
  with, simply `logprobs.detach()` when a batch is used for one step.
- Outcome advantages are [B], token-level ones [B, T]; losses take either.
- Losses return values to be minimised, [B, T], or one per pair or response, [P] or [B], where they take whole
  responses. They take tensors and floats; a variant of a formula is another function. Gradients flow to the policy's
  own tensors only.
- Reduction is a separate call with its denominator in sight: `token_mean(loss, mask, total=...)`, where `total` counts
  over all micro-batches and data-parallel ranks. The gradient then does not depend on how a batch was split.
- A function takes `total` where parts of a batch add up: a mean is a sum over a count that is fixed before the batch is
  cut. It takes `global_sum` where its formula is not linear in sums over the batch: a variance (whitening, explained
  variance), a maximum with 0 (z_0 of KTO), a product of two means (load balancing). `global_sum` adds a tensor over all
  ranks, as an engine's method of that name does; by default there is one rank.
- Masked positions never leak: inputs may hold anything outside the mask, inf and nan included; the result is 0 there,
  with gradient 0.
- An unmasked log-ratio beyond +-20 counts as +-20 and gets gradient 0, so that no `exp` overflows.
- Results are float32, or float64 where the inputs are.
- A wrong type, rank, shape or dtype, or a number out of its range, raises a ValueError that names the argument. Checks
  look at shapes, dtypes and Python numbers, never at a tensor's values, so none waits for a device.

A function describes only its special arguments. Common arguments have the same meaning everywhere:

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

from rlkit.losses.diagnostics import *
from rlkit.losses.distillation import *
from rlkit.losses.entropy import *
from rlkit.losses.kl import *
from rlkit.losses.logprobs import *
from rlkit.losses.mismatch import *
from rlkit.losses.policy import *
from rlkit.losses.preference import *
from rlkit.losses.preference_variants import *
from rlkit.losses.reductions import *
from rlkit.losses.router import *
from rlkit.losses.sequence_policy import *
from rlkit.losses.supervised import *
from rlkit.losses.trust_region import *
from rlkit.losses.value import *

__all__ = [
    # policy
    "clipped_policy_loss",
    "reinforce_loss",
    "gpg_loss",
    "cispo_loss",
    "gppo_loss",
    "sapo_loss",
    # sequence_policy
    "gspo_loss",
    "gspo_token_loss",
    "luspo_loss",
    "gmpo_loss",
    "topr_loss",
    "sequence_sapo_loss",
    "flash_reinforce_loss",
    "off_policy_sequence_mask",
    # trust_region
    "clip_cov_loss",
    "kl_cov_loss",
    "dppo_tv_loss",
    "dppo_kl_loss",
    "dro_loss",
    "vespo_loss",
    "m2po_loss",
    # value
    "clipped_value_loss",
    # reductions
    "token_sum",
    "token_mean",
    "sequence_mean",
    "sequence_sum_mean",
    "fixed_length_mean",
    "prompt_mean",
    "group_token_counts",
    "preference_mean",
    # logprobs
    "LogprobsAndEntropy",
    "TopkLogprobs",
    "token_logprobs",
    "align_with_tokens",
    "target_logprobs",
    "token_entropy",
    "sum_pi_squared",
    "suppress_tokens",
    "linear_logprobs",
    # entropy
    "top_entropy_mask",
    "adaptive_entropy_coef",
    # kl
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_abs",
    "kl_straight_through",
    "kl_k3_weighted",
    "kl_binary",
    "full_vocabulary_kl",
    # mismatch
    "importance_weights",
    "sequence_importance_weights",
    "geometric_importance_weights",
    "masked_importance_weights",
    "sequence_masked_importance_weights",
    "token_rejection_mask",
    "rejection_mask",
    "sequence_rejection_mask",
    "geometric_rejection_mask",
    "token_divergence_mask",
    "sequence_sum_divergence_mask",
    "sequence_mean_divergence_mask",
    "sequence_max_divergence_mask",
    # diagnostics
    "ratio_stats",
    "sequence_ratio_stats",
    "value_stats",
    "explained_variance",
    "mismatch_stats",
    "sequence_mismatch_stats",
    "effective_sample_size",
    # preference
    "sequence_logprobs",
    "sequence_mean_logprobs",
    "dpo_loss",
    "robust_dpo_loss",
    "ipo_loss",
    "hinge_dpo_loss",
    "slic_loss",
    "apo_zero_loss",
    "simpo_loss",
    "orpo_loss",
    "kto_loss",
    "kto_kl_estimate",
    "bradley_terry_loss",
    "reward_centring_loss",
    "preference_stats",
    # preference_variants
    "apo_down_loss",
    "exo_loss",
    "nca_loss",
    "sppo_loss",
    "bco_loss",
    "discopop_loss",
    "alphapo_loss",
    "tpo_loss",
    "a_star_po_loss",
    "alpha_divergence_dpo_loss",
    "forward_kl_dpo_loss",
    "js_dpo_loss",
    "aot_loss",
    "aot_unpaired_loss",
    "ld_sequence_logprobs",
    "wpo_weights",
    # distillation
    "forward_kl_loss",
    "reverse_kl_loss",
    "jsd_loss",
    "topk_forward_kl_loss",
    "topk_reverse_kl_loss",
    "topk_jsd_loss",
    # supervised
    "dft_loss",
    "chord_phi_loss",
    "chord_mu",
    # router
    "load_balancing_loss",
]


def __dir__() -> list[str]:
    return __all__
