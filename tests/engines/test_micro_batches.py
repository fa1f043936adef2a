"""Micro-batches keep their token budget, and the gradient does not depend on it."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.data import append_response, collate
from rlkit.data.samples import prompt_sample
from rlkit.engines import make_engine
from rlkit.engines.distributed import init_distributed
from rlkit.engines.packing.inputs import prepare_model_inputs
from rlkit.engines.packing.micro_batches import micro_batches
from rlkit.losses import token_mean
from rlkit.vlm import load_model, load_processor
from rlkit.vlm.inputs import position_spec
from rlkit.vlm.loading import load_config

sys.path.insert(0, str(Path(__file__).parent))
from rows import make_batch

CPU = torch.device("cpu")


def text_batch(groups):
    """Rows with prompts of given lengths and responses of given lengths: [(prompt, [response, ...]), ...]."""
    samples = []
    for number, (length, responses) in enumerate(groups):
        question = prompt_sample([number + 20] * length, group_id=number)
        samples += [
            append_response(question, [50 + i] * response, [-1.0] * response) for i, response in enumerate(responses)
        ]
    return collate(samples)


def forward_tokens(batch, rows, spec=None):
    return prepare_model_inputs(batch.select(rows), spec, CPU, share_prompts=True).kwargs["input_ids"].numel()


@pytest.fixture(scope="module")
def config(tiny_dir):
    init_distributed("cpu")
    return load_config(tiny_dir)


GROUPS = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 40), min_size=1, max_size=6)), min_size=1, max_size=5
)


@settings(deadline=None, max_examples=60)
@given(groups=GROUPS, budget=st.integers(1, 120))
def test_only_a_single_row_passes_the_budget(config, groups, budget):
    batch = text_batch(groups)
    pieces = [rows for rows, _ in micro_batches(batch, budget, config, share_prompts=True)]
    assert sorted(row for rows in pieces for row in rows) == list(range(len(batch)))
    for rows in pieces:
        assert len(rows) == 1 or forward_tokens(batch, rows) <= budget


def test_sixteen_long_responses_are_several_forwards(config):
    """16 responses of 8,000 tokens to a prompt of 500 were one forward of 128,500 tokens."""
    batch = text_batch([(500, [8000] * 16)])
    sizes = [forward_tokens(batch, rows) for rows, _ in micro_batches(batch, 16500, config, share_prompts=True)]
    assert sizes == [16500] * 8


def test_a_group_that_fits_is_not_split(config):
    batch = text_batch([(50, [10] * 4), (50, [10] * 4)])
    pieces = [rows for rows, _ in micro_batches(batch, 90, config, share_prompts=True)]
    assert pieces == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_rows_that_a_loss_needs_together_are_not_split(config):
    batch = text_batch([(50, [40, 40]), (50, [40, 40])]).add(micro_batch_group=torch.tensor([0, 0, 1, 1]))
    pieces = [rows for rows, _ in micro_batches(batch, 60, config, share_prompts=True)]
    assert pieces == [[0, 1], [2, 3]]


@pytest.mark.parametrize("budget", [1, 30, 40])
def test_splitting_a_group_keeps_the_gradient(tiny_dir, budget):
    """Groups with images, each row with its own weight; a prompt that is repeated keeps its image."""
    batch = make_batch(load_processor(tiny_dir))
    spec = position_spec(load_config(tiny_dir))
    found = []
    for tokens in (16384, budget):
        engine = make_engine(
            "fsdp2",
            model=load_model(tiny_dir),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
            micro_batch_tokens=tokens,
            max_grad_norm=1e9,
            keep_gradients=True,
        )
        metrics = engine.train_batch(
            batch, lambda out, mb: (token_mean(mb.advantages[:, None] * out.logprobs, mb.mask, mb.total_tokens), {})
        )
        pieces = [rows for rows, _ in micro_batches(batch, tokens, engine.config, share_prompts=True)]
        found.append((metrics["loss"], {n: p.grad for n, p in engine.module.named_parameters()}))
    assert len(pieces) > 4  # there are four groups
    assert all(len(rows) == 1 or forward_tokens(batch, rows, spec) <= budget for rows in pieces)
    (loss, whole), (split_loss, split) = found
    assert split_loss == pytest.approx(loss, abs=1e-6)
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, atol=1e-5, rtol=1e-5, msg=name)
