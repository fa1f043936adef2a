"""Mini-batches of several passes over a batch, against plain loops."""

import math
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlkit.data import append_response, collate, prompt_sample
from rlkit.engines import make_engine
from rlkit.engines.distributed import init_distributed
from rlkit.losses import clipped_policy_loss, token_mean
from rlkit.runs import group_ids_of_all_ranks, mean_metrics, mini_batches
from rlkit.tracking import Run

ONE_RANK = SimpleNamespace(global_sum=lambda x: x, data_parallel_group=None)


def config(**options):
    return SimpleNamespace(**{"seed": 3, "ppo_epochs": 2, "mini_batches": 3, "prompts_per_step": 7, **options})


@pytest.fixture(scope="module")
def batch():
    """Two or three responses to each of seven prompts."""
    init_distributed("cpu")
    rng = np.random.default_rng(0)
    samples = []
    for group in range(7):
        prompt = prompt_sample(rng.integers(1, 30, 4).tolist(), group_id=group)
        for _ in range(2 + group % 2):
            response = rng.integers(1, 30, rng.integers(1, 6)).tolist()
            samples.append(append_response(prompt, response, [-3.4] * len(response)))
    batch = collate(samples)
    return batch.add(advantages=torch.randn(len(batch), generator=torch.Generator().manual_seed(0)))


def groups(batch, *arguments, **options):
    return [part.group_ids.unique().tolist() for part in mini_batches(batch, *arguments, **options)]


def test_every_pass_has_each_prompt_once_with_all_of_its_responses(batch):
    parts = list(mini_batches(batch, config(), 5, ONE_RANK))
    assert len(parts) == 6
    for of_pass in (parts[:3], parts[3:]):
        found = sorted(row for part in of_pass for row in part.tokens[:, :4].tolist())
        assert found == sorted(batch.tokens[:, :4].tolist())
        assert sorted(group for part in of_pass for group in part.group_ids.unique().tolist()) == list(range(7))
    first, second = groups(batch, config(), 5, ONE_RANK)[:3], groups(batch, config(), 5, ONE_RANK)[3:]
    assert first != second and first == groups(batch, config(ppo_epochs=1), 5, ONE_RANK)
    assert first != groups(batch, config(ppo_epochs=1), 6, ONE_RANK)
    assert first != groups(batch, config(ppo_epochs=1, seed=4), 5, ONE_RANK)


def test_prompts_are_those_of_the_batch(batch):
    """Saved rollouts, of a run with more prompts per step, have numbers above `prompts_per_step`."""
    some = batch.select([row for row, group in enumerate(batch.group_ids.tolist()) if group in (1, 3, 6)])
    found = groups(some, config(ppo_epochs=1, mini_batches=2, prompts_per_step=2), 0, ONE_RANK)
    assert sorted(map(len, found)) == [1, 2] and sorted(sum(found, [])) == [1, 3, 6]


def test_group_ids_are_sorted_and_each_once(batch):
    assert group_ids_of_all_ranks(torch.tensor([5, 2, 5, 90]), ONE_RANK).tolist() == [2, 5, 90]
    assert group_ids_of_all_ranks(torch.tensor([], dtype=torch.long), ONE_RANK).tolist() == []


def test_one_mini_batch_is_the_batch(batch):
    parts = list(mini_batches(batch, config(mini_batches=1), 0, ONE_RANK))
    assert len(parts) == 2 and all(part is batch for part in parts)


def test_mini_batches_without_a_token_are_left_out(batch):
    """A batch without any is one mini-batch, so that a step has metrics."""
    some = batch.select([row for row, group in enumerate(batch.group_ids.tolist()) if group == 2])
    assert groups(some, config(mini_batches=7), 0, ONE_RANK) == [[2], [2]]
    (nothing,) = mini_batches(batch.select([]), config(ppo_epochs=1), 0, ONE_RANK)
    assert len(nothing) == 0


def test_mini_batches_are_made_when_they_are_needed(batch):
    """The last one is still there while the next is made. All of 2 epochs with 3 mini-batches would be 6."""
    made = []
    for part in mini_batches(batch, config(), 0, ONE_RANK):
        made.append(weakref.ref(part))
        assert sum(ref() is not None for ref in made) <= 2
    assert len(made) == 6


def test_gradients_are_those_of_a_plain_loop(batch):
    """Each step takes the mean over the tokens of its prompts; old log-probabilities are of before the first step."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
    plain = LlamaForCausalLM(model.config)
    plain.load_state_dict(model.state_dict())
    sgd = {"lr": 0.5}
    engine = make_engine(
        "fsdp2", "language_model", model=model, keep_gradients=True, optimizer=lambda p: torch.optim.SGD(p, **sgd),
        max_grad_norm=1e9,
    )  # fmt: skip

    def engine_loss(out, mb):
        loss = clipped_policy_loss(out.logprobs, mb.old_logprobs, mb.advantages, mb.mask, 0.1, 0.1)
        return token_mean(loss, mb.mask, mb.total_tokens), {}

    def row_logprobs(row):
        ids = batch.tokens[row, : batch.lengths[row]]
        logprobs = plain(ids[None]).logits[0].log_softmax(-1)
        return torch.stack([logprobs[t - 1, ids[t]] for t in range(len(ids)) if batch.mask[row, t]])

    optimizer = torch.optim.SGD(plain.parameters(), **sgd)
    old = [row_logprobs(row).detach() for row in range(len(batch))]
    batch.add(old_logprobs=engine.infer_batch(batch)["logprobs"])
    cfg = config()
    for part in mini_batches(batch, cfg, 1, engine):
        engine.train_batch(part, engine_loss)
        rows = [row for row in range(len(batch)) if batch.group_ids[row] in part.group_ids]
        optimizer.zero_grad()
        losses = []
        for row in rows:
            for new, before in zip(row_logprobs(row), old[row], strict=True):
                ratio, advantage = (new - before).exp(), batch.advantages[row]
                losses.append(torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.9, 1.1)))
        (sum(losses) / len(losses)).backward()
        for one, other in zip(engine.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)
        optimizer.step()


def test_a_step_with_one_update_of_nan_says_so(tmp_path):
    """Metrics are means over the updates of a step: half of them were skipped, whichever of the two was."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
    engine = make_engine("fsdp2", "language_model", model=model, optimizer=lambda p: torch.optim.SGD(p, 0.1))
    samples = [append_response(prompt_sample([1, 2], group_id=group), [3, 4], [0.0, 0.0]) for group in range(7)]

    def updates(bad):
        for i, part in enumerate(mini_batches(collate(samples), config(ppo_epochs=1, mini_batches=2), 0, engine)):
            factor = math.nan if i in bad else 1.0

            def loss_fn(out, mb, factor=factor):
                loss = token_mean(-out.logprobs, mb.mask, mb.total_tokens)
                return factor * loss, {"nll": loss.detach(), "size/max": torch.tensor(len(mb.tokens))}

            yield engine.train_batch(part, loss_fn)

    run = Run(tmp_path, {})
    for step, bad in enumerate(((0,), (1,))):
        found = list(updates(bad))
        metrics = mean_metrics(found)
        assert metrics["skipped_steps"] == 0.5 and math.isnan(metrics["loss"])
        assert metrics["nll"] == (found[0]["nll"] + found[1]["nll"]) / 2 and metrics["size/max"] == 4
        run.log(step, metrics)
        assert run.skipped_in_a_row == 0  # of the steps that only half the updates left out
    for step, skipped in ((2, 1), (3, 2)):
        run.log(step, mean_metrics(list(updates((0, 1)))))
        assert run.skipped_in_a_row == skipped


def test_a_metric_that_some_updates_do_not_have_is_averaged_over_the_others():
    """Names were those of the first update: others were left out, and one that a later update lacked was an error."""
    updates = [{"loss": 1.0, "easy": 3.0}, {"loss": 2.0, "hard": 4.0, "hard/max": 7.0}, {"loss": 6.0, "hard": 8.0}]
    assert mean_metrics(updates) == {"loss": 3, "easy": 3, "hard": 6, "hard/max": 7}
    assert mean_metrics([]) == {}
