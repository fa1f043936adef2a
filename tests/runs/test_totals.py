"""FLOPs of a step, as metrics.jsonl has them."""

from types import SimpleNamespace

import pytest
from transformers import Qwen2Config

from rlkit import runs
from rlkit.data import append_response, collate, prompt_sample
from rlkit.engines.flops import batch_flops


@pytest.mark.parametrize("share", [True, False])
def test_flops_of_prompts_that_the_engine_computes_once_or_for_each_answer(share):
    config = Qwen2Config(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2)
    batch = collate([append_response(prompt_sample([1] * 9), [5] * n, [0.0] * n) for n in (2, 3, 4)])
    engine = SimpleNamespace(config=config, share_prompts=share, global_sum=lambda x: x)
    counts = runs.batch_totals(SimpleNamespace(lora_rank=0), engine, batch, updates=2, forwards=1)
    assert counts["flops"] == (2 * 3 + 1) * batch_flops(config, batch, share_prompts=share) and counts["tokens"] == 9
    assert runs.batch_totals(SimpleNamespace(lora_rank=0), engine, batch, tokens=sum(batch.lengths))["tokens"] == 36
    assert batch_flops(config, batch, share_prompts=False) > batch_flops(config, batch)
