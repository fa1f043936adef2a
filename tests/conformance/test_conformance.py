"""The conformance suite on our own functions, on adapters with one planted bug each, and on what is no adapter."""

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rlkit import losses
from rlkit.advantages import gae
from rlkit.conformance import ours
from rlkit.conformance.adapter import METHODS, Refused, load_adapter
from rlkit.conformance.checks import CHECKS
from rlkit.conformance.report import BUG, CHOICE, ERROR, MISSING, RIGHT, as_markdown, run_checks


def test_our_own_functions_pass():
    findings = run_checks(ours.Trainer())
    assert {one.check for one in findings if one.verdict != RIGHT} == {"kl_gradient"}
    (kl,) = (one for one in findings if one.verdict == CHOICE)
    assert "KL(reference || policy)" in kl.text  # k3, as in GRPO's paper


def planted(**methods):
    """Our adapter with other methods."""
    return type("Planted", (ours.Trainer,), methods)()


def policy(loss):
    """A policy loss out of (per-token loss [B, T], logprobs, mask, split) -> scalar."""

    def policy_loss(self, logprobs, old_logprobs, advantages, mask, split, clip_low, clip_high):
        per_token = losses.clipped_policy_loss(logprobs, old_logprobs, advantages, mask, clip_low, clip_high)
        return loss(per_token, logprobs, mask, split)

    return planted(policy_loss=policy_loss)


def symmetric_clip(self, logprobs, old_logprobs, advantages, mask, split, clip_low, clip_high):
    loss = losses.clipped_policy_loss(logprobs, old_logprobs, advantages, mask, clip_low, clip_low)
    return losses.token_mean(loss, mask, total=split.tokens)


def no_gradient_at_first(self, logprobs, old_logprobs, advantages, mask, split, clip_low, clip_high):
    """Takes equal log-probabilities for a batch without old ones, and the wrong tensor in their place."""
    loss = losses.clipped_policy_loss(logprobs, old_logprobs, advantages, mask, clip_low, clip_high)
    factor = 0.0 if torch.equal(logprobs, old_logprobs) else 1.0
    return factor * losses.token_mean(loss, mask, total=split.tokens)


def masked_by_product(self, logprobs, old_logprobs, advantages, mask, split, clip_low, clip_high):
    ratio = (logprobs - old_logprobs).exp()
    surrogates = ratio * advantages[:, None], ratio.clamp(1 - clip_low, 1 + clip_high) * advantages[:, None]
    return -(torch.minimum(*surrogates) * mask).sum() / split.tokens


def own_count(per_token, logprobs, mask, split):
    parts = split.micro_batches
    return per_token.sum() / (split.tokens if parts == 1 else mask.sum() * parts)


def by_groups(rewards, groups):
    """(reward - mean) / std of each group, given as lists of rows."""
    found = torch.zeros_like(rewards)
    for rows in groups:
        group = rewards[rows]
        std = group.std() if len(rows) > 1 else torch.ones(())
        found[rows] = (group - group.mean()) / (std + 1e-6)
    return found


def grouped_by_runs(self, rewards, group_ids):
    _, runs = group_ids.unique_consecutive(return_inverse=True)
    return by_groups(rewards, [(runs == i).nonzero()[:, 0] for i in runs.unique()])


def groups_of_one_size(self, rewards, group_ids):
    size = len(rewards) // len(group_ids.unique())
    return by_groups(rewards, group_ids.sort(stable=True).indices.split(size))


def loop(change):
    """GRPO's advantages with another formula for each group."""

    def group_advantages(self, rewards, group_ids):
        found = torch.zeros_like(rewards)
        for i in group_ids.unique():
            found[group_ids == i] = change(rewards[group_ids == i])
        return found

    return planted(group_advantages=group_advantages)


def spoiled_by_one_nan(self, rewards, group_ids):
    return ours.Trainer().group_advantages(rewards - rewards.mean() + rewards.mean(), group_ids)


def bootstraps_after_the_end(self, rewards, values, mask, gamma, lam):
    """Takes the value after the last token where there is a column for it."""
    last = mask * torch.arange(mask.shape[1])
    last = last.amax(1)
    after = values.gather(1, (last + 1).clamp(max=mask.shape[1] - 1)[:, None])
    bonus = torch.zeros_like(rewards).scatter(
        1, last[:, None], torch.where(last[:, None] + 1 < mask.shape[1], after, 0)
    )
    return gae(rewards + gamma * bonus, values, mask, gamma, lam).advantages


def counts_observations(self, rewards, values, mask, gamma, lam):
    """Values of tool output are 0, but its tokens are steps like others."""
    whole = torch.ones_like(mask)
    return gae(rewards * mask, values * mask, whole, gamma, lam).advantages


def divided_twice(self, weight, features, mask, micro_batches):
    return ours.Trainer().accumulated_gradient(weight, features, mask, micro_batches) / micro_batches


def shifted(formula):
    """Token log-probabilities from a formula of the logits before each token and the tokens: column 0 is 0."""

    def token_logprobs(self, logits, tokens, temperature):
        return torch.nn.functional.pad(formula(logits[:, :-1] / temperature, tokens[:, 1:, None]), (1, 0))

    return planted(token_logprobs=token_logprobs)


def without_maximum(logits, tokens):
    return logits.gather(-1, tokens)[..., 0] - logits.exp().sum(-1).log()


def by_one_hot(logits, tokens):
    return (logits.log_softmax(-1) * torch.zeros_like(logits).scatter(-1, tokens, 1.0)).sum(-1)


PLANTED = {
    "logprob_alignment": planted(
        token_logprobs=lambda self, logits, tokens, temperature: losses.target_logprobs(logits, tokens, temperature)
    ),
    "temperature": planted(
        token_logprobs=lambda self, logits, tokens, temperature: losses.token_logprobs(logits, tokens)
    ),
    "logprob_nonpositive": shifted(without_maximum),
    "impossible_tokens": shifted(by_one_hot),
    "entropy": planted(token_entropy=lambda self, logits: losses.token_entropy(logits) / 0.6931),
    "entropy_of_impossible_tokens": planted(
        token_entropy=lambda self, logits: -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    ),
    "on_policy_ratio_is_one": planted(policy_loss=no_gradient_at_first),
    "clipping": planted(policy_loss=symmetric_clip),
    "denominator": policy(
        lambda loss, _, mask, split: loss.sum() / (mask.numel() * split.micro_batches * split.ranks)
    ),
    "masked_nonfinite": planted(policy_loss=masked_by_product),
    "micro_batches": policy(own_count),
    "data_parallel_ranks": policy(lambda loss, _, mask, split: loss.sum() / split.tokens / split.ranks),
    "empty_row": policy(
        lambda loss, logprobs, mask, split: loss.sum() / split.tokens + 0 * (loss.sum(1) / mask.sum(1)).sum()
    ),
    "kl_gradient": planted(kl_loss=lambda self, logprobs, ref_logprobs: losses.kl_k1(logprobs, ref_logprobs)),
    "standard_deviation": loop(
        lambda group: (group - group.mean()) / (group.var() + 1e-6) if len(group) > 1 else 0 * group
    ),
    "interleaved_groups": planted(group_advantages=grouped_by_runs),
    "ragged_groups": planted(group_advantages=groups_of_one_size),
    "singleton_group": loop(lambda group: (group - group.mean()) / (group.std() + 1e-6)),
    "equal_rewards": loop(lambda group: (group - group.mean()) / group.std() if len(group) > 1 else 0 * group),
    "unscored_reward": planted(group_advantages=spoiled_by_one_nan),
    "generalised_advantages": planted(
        gae=lambda self, rewards, values, mask, gamma, lam: gae(rewards, values, mask, gamma, 1.0).advantages
    ),
    "gae_ends_at_the_last_token": planted(gae=bootstraps_after_the_end),
    "gae_skips_observations": planted(gae=counts_observations),
    "gradient_accumulation": planted(accumulated_gradient=divided_twice),
}  # fmt: skip


def test_every_check_has_a_planted_bug():
    assert list(PLANTED) == [one.name for one in CHECKS]


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_fails_the_check_that_names_it(name):
    found = {one.check: one.text for one in run_checks(PLANTED[name]) if one.verdict in (BUG, ERROR)}
    assert set(found) == {name}, found


CHOICES = {
    "kl_gradient": (planted(kl_loss=lambda self, p, q: losses.kl_k2(p, q)), RIGHT),
    "denominator": (policy(lambda loss, _, mask, split: losses.sequence_mean(loss, mask, split.sequences)), CHOICE),
    "standard_deviation": (loop(lambda group: (group - group.mean()) / (group.std(correction=0) + 1e-6)), CHOICE),
    "singleton_group": (
        loop(lambda group: (group - group.mean()) / (group.std() + 1e-6) if len(group) > 1 else group),
        CHOICE,
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_published_alternative_is_a_choice(name):
    adapter, verdict = CHOICES[name]
    findings = {one.check: one for one in run_checks(adapter)}
    assert findings[name].verdict == verdict and not [one for one in findings.values() if one.verdict == BUG]
    assert bool(findings[name].text) == (verdict == CHOICE)


def test_a_trainer_may_refuse_and_may_lack_functions():
    class Few:
        def group_advantages(self, rewards, group_ids):
            if len(set(group_ids.bincount().tolist())) > 1:
                raise Refused("groups have one size")
            return ours.Trainer().group_advantages(rewards, group_ids)

    findings = {one.check: one for one in run_checks(Few())}
    assert findings["ragged_groups"].text == "refused: groups have one size"
    assert findings["ragged_groups"].verdict == CHOICE and findings["clipping"].verdict == MISSING
    table = as_markdown({"few": list(findings.values()), "ours": run_checks(ours.Trainer())})
    assert "| choice (2) | yes |" in table and "2. **few**, ragged_groups: refused: groups have one size." in table


def test_an_exception_is_no_bug_of_the_trainer():
    """It may be the adapter's own, or that of an environment that lacks something."""

    def broken(self, logits):
        raise ModuleNotFoundError("No module named 'flash_attn'")

    findings = {one.check: one for one in run_checks(planted(token_entropy=broken))}
    assert findings["entropy"].verdict == ERROR
    assert findings["entropy"].text == "trainer or adapter raised ModuleNotFoundError: No module named 'flash_attn'"
    assert not [one for one in findings.values() if one.verdict == BUG]


ADAPTERS = {
    "": ("expected a file", "{path}/none.py:Trainer"),
    "class Trainer:\n    def gea(self): pass": ("expected some of the methods", "{path}/wrong.py:Trainer"),
    "class Trainer:\n    def gae(self): pass\n    def gea(self): pass": ("got gea", "{path}/typo.py:Trainer"),
    "class Trainer:\n    def __init__(self, x): pass": ("made without arguments", "{path}/needy.py:Trainer"),
}


@pytest.mark.parametrize("source", ADAPTERS)
def test_what_is_no_adapter_is_named(source, tmp_path):
    said, name = ADAPTERS[source]
    name = name.format(path=tmp_path)
    if source:
        (tmp_path / name.rpartition("/")[2].partition(":")[0]).write_text(source)
    with pytest.raises(ValueError, match=said) as caught:
        load_adapter(name)
    assert "\n" not in str(caught.value) and "trainer" in str(caught.value)


def test_the_command(tmp_path):
    """As the page says, on an adapter with a bug."""
    (tmp_path / "mine.py").write_text(
        "from rlkit.conformance import ours\n\n\nclass Trainer(ours.Trainer):\n"
        "    name = 'mine 1'\n\n    def gae(self, rewards, values, mask, gamma, lam):\n        return 2 * rewards\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "rlkit.conformance.plugin", "--pyargs", "rlkit.conformance"]
    done = subprocess.run(
        [*command, "--trainer", f"{tmp_path}/mine.py:Trainer", "-p", "no:cacheprovider", "-k", "gae or generalised"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "mine 1: 2 as the reference, 0 choice, 1 bug, 0 error, 0 not provided" in done.stdout
    assert "generalised_advantages" in done.stdout and "it is not the sum of discounted" in done.stdout


def test_every_method_is_checked():
    assert {one.method for one in CHECKS} == set(METHODS)


def test_the_adapter_of_the_page(monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    trainer = ModuleType("my_trainer")

    def ppo_loss(logprobs, old_logprobs, advantages, mask, *clip):
        return losses.token_mean(losses.clipped_policy_loss(logprobs, old_logprobs, advantages, mask, *clip), mask)

    trainer.ppo_loss = ppo_loss
    monkeypatch.setitem(sys.modules, "my_trainer", trainer)
    names = {}
    exec(block, names)
    findings = {one.check: one for one in run_checks(names["Trainer"]())}
    bugs = {name for name, one in findings.items() if one.verdict == BUG}
    assert bugs == {"micro_batches", "data_parallel_ranks"}  # each part divides by its own count
    assert "each part divides by its own count" in findings["micro_batches"].text
