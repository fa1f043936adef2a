"""Our functions beside TRL 1.16's, most of them methods of trainers: see cases_trl_trainer.py."""

from cases_trl_advantages import CASES as ADVANTAGES
from cases_trl_distillation import CASES as DISTILLATION
from cases_trl_policy import CASES as POLICY
from cases_trl_policy import SEQUENCE_GATES
from cases_trl_preference import CASES as PREFERENCE
from cases_trl_preference_variants import CASES as PREFERENCE_VARIANTS
from cases_trl_preference_variants import TRIPLES
from cases_trl_sft import CASES as SFT
from cases_trl_sft import DYNAMIC

CASES = [*POLICY, *ADVANTAGES, *PREFERENCE, *DISTILLATION, *PREFERENCE_VARIANTS, *SFT]
CASES += [*SEQUENCE_GATES, *DYNAMIC, *TRIPLES]  # last: the inputs of a case come from its place
