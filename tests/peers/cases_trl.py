"""Our functions beside TRL 1.16's, most of them methods of trainers: see cases_trl_trainer.py."""

from cases_trl_advantages import CASES as ADVANTAGES
from cases_trl_distillation import CASES as DISTILLATION
from cases_trl_policy import CASES as POLICY
from cases_trl_preference import CASES as PREFERENCE
from cases_trl_preference_variants import CASES as PREFERENCE_VARIANTS
from cases_trl_sft import CASES as SFT

CASES = [*POLICY, *ADVANTAGES, *PREFERENCE, *DISTILLATION, *PREFERENCE_VARIANTS, *SFT]
