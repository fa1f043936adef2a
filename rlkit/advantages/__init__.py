"""Advantages: pure functions on tensors that need torch alone. The conventions are those of `rlkit.losses`.

Outcome advantages are [B], token-level ones [B, T]; losses take either. Group membership is an integer tensor
`group_ids` [B] in any order and any size. A reward of nan means "not judged": it stays outside its group's statistics
and its advantage is 0.
"""

from rlkit.advantages.group import dr_grpo_advantages, expand_to_tokens, grpo_advantages

__all__ = ["dr_grpo_advantages", "expand_to_tokens", "grpo_advantages"]
