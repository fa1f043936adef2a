"""Those blocks of docs/other_trainers.md that need no trainer beside Hugging Face's.

live_page.py, live_hosts.py and live_skyrl.py run the others, in their trainers.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from rlkit.advantages import rloo_advantages
from rlkit.losses import cispo_loss, clipped_policy_loss, token_logprobs, token_mean, token_sum

sys.path.insert(0, str(Path(__file__).parent))
from pages import PAGE, blocks
from two_steps import WORDS, copy_of, tiny_model

SUBCLASSED = "OpenRLHF, NeMo-RL, AReaL"


def batch(rows, seed):
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, 7, generator=g) < 0.7
    mask[:, 0] = False
    return {
        "tokens": torch.randint(2, WORDS, (rows, 7), generator=g),
        "attended": torch.ones(rows, 7),
        "old_logprobs": -3 * torch.rand(rows, 7, generator=g),
        "advantages": torch.randn(rows, generator=g),
        "mask": mask,
    }


def test_hugging_faces_trainer(tmp_path, monkeypatch):
    (block,) = blocks("Hugging Face's Trainer")
    monkeypatch.chdir(tmp_path)
    small = 'TrainingArguments("runs/dft", use_cpu=True, max_steps=2, report_to="none", '
    rows = [{"input_ids": list(range(2, 9)), "labels": [-100, *range(3, 9)]}] * 8
    model = tiny_model()
    start = copy_of(model)
    names = {"model": model, "rows": rows}
    exec(block.replace('TrainingArguments("runs/dft", ', small), names)
    assert names["trainer"].state.global_step == 2
    assert any((x - start[name]).abs().max() > 0 for name, x in copy_of(model).items())


def test_a_loop_has_one_gradient():
    block = blocks("Lightning, and loops of your own")[1]
    pieces = [batch(3, 0), batch(2, 1)]
    gradients = []
    whole = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    for micro_batches in (pieces, [whole]):
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        exec(block, {"model": model, "micro_batches": micro_batches, "optimizer": optimizer})
        gradients.append({name: x.grad for name, x in model.named_parameters()})
    model = tiny_model()
    logprobs = token_logprobs(model(whole["tokens"]).logits, whole["tokens"])
    loss = clipped_policy_loss(logprobs, whole["old_logprobs"], whole["advantages"], whole["mask"])
    token_mean(loss, whole["mask"]).backward()
    for name, x in model.named_parameters():
        for gradient in gradients:
            torch.testing.assert_close(gradient[name], x.grad, rtol=1e-4, atol=1e-6)
    assert any(x.grad.abs().max() > 1e-3 for x in model.parameters())


@dataclass
class LossInputs:
    """The fields of prime-rl's class of this name."""

    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor | None = None


@dataclass
class LossOutputs:
    loss: torch.Tensor
    metrics: dict


class Registry:
    """What SkyRL's registries do in one process."""

    def __init__(self):
        self.functions = {}

    def register(self, name, function):
        self.functions[name] = function


def stand_in(monkeypatch, name, **contents):
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    sys.modules[name].__dict__.update(contents)


def policy_batch():
    g = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(6, 8, generator=g)
    mask = torch.rand(6, 8, generator=g) < 0.7
    return old + 0.4 * torch.randn(6, 8, generator=g), old, torch.randn(6, 1, generator=g).expand(6, 8), mask


def test_prime_rl(monkeypatch):
    stand_in(monkeypatch, "prime_rl.trainer.rl.loss", LossInputs=LossInputs, LossOutputs=LossOutputs)
    names = {}
    exec(blocks("prime-rl, SkyRL, slime")[0], names)
    logprobs, old, advantages, mask = policy_batch()
    expected = cispo_loss(logprobs, old, advantages, mask, 0.2, 0.1)
    weights = torch.linspace(0.5, 2, 8)
    for row in range(6):
        inputs = LossInputs(logprobs[row], old[row], None, advantages[row], mask[row])
        torch.testing.assert_close(names["cispo"](inputs, clip_high=0.1).loss, expected[row].sum())
        inputs.loss_weights = weights
        torch.testing.assert_close(names["cispo"](inputs, clip_high=0.1).loss, (weights * expected[row]).sum())


def test_skyrl(monkeypatch):
    registries = {name: Registry() for name in ("AdvantageEstimatorRegistry", "PolicyLossRegistry")}
    stand_in(monkeypatch, "skyrl.backends.skyrl_train.utils.ppo_utils", **registries)
    exec(blocks("prime-rl, SkyRL, slime")[1], {})
    logprobs, old, advantages, mask = policy_batch()
    config = SimpleNamespace(eps_clip_low=0.2, eps_clip_high=0.3)
    loss, metrics = registries["PolicyLossRegistry"].functions["rlkit_cispo"](
        logprobs, old, advantages, config=config, loss_mask=mask.float(), rollout_logprobs=None
    )
    torch.testing.assert_close(loss, token_sum(cispo_loss(logprobs, old, advantages, mask, 0.2, 0.3), mask))
    assert 0 < metrics["clip_ratio"] < 1
    rewards = torch.nn.functional.pad(torch.tensor([[1.0], [0.0], [0.5], [1.0], [1.0], [0.0]]), (7, 0))
    uids = np.array(["b", "a", "b", "a", "b", "a"])
    found, _ = registries["AdvantageEstimatorRegistry"].functions["rlkit_rloo"](
        token_level_rewards=rewards, response_mask=mask.float(), index=uids, gamma=1.0, config=config
    )
    expected = rloo_advantages(rewards.sum(1), torch.tensor([0, 1, 0, 1, 0, 1]))[:, None]
    torch.testing.assert_close(found, expected * mask)


def test_slime():
    names = {}
    exec(blocks("prime-rl, SkyRL, slime")[2], names)
    given = [(1.0, 5), (0.0, 5), (0.0, 2), (0.5, 2)]
    samples = [SimpleNamespace(group_index=group, get_reward_value=lambda _, r=r: r) for r, group in given]
    raw, rewards = names["rloo"](SimpleNamespace(), samples)
    assert raw == [1.0, 0.0, 0.0, 0.5] and rewards == [1.0, -1.0, -0.5, 0.5]


class ClippedPGLossFn:
    """What a subclass of NeMo-RL's class of this name can rely on."""

    def __init__(self, cfg, use_fused_linear_logprobs=False):
        self.ratio_clip_min, self.ratio_clip_max = cfg.ratio_clip_min, cfg.ratio_clip_max
        self.reference_policy_kl_penalty = cfg.reference_policy_kl_penalty
        self.use_importance_sampling_correction = cfg.use_importance_sampling_correction

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        return next_token_logprobs.sum(), {"loss": 0.0, "num_valid_samples": data["sample_mask"].sum().item()}


def test_nemo_rl(monkeypatch):
    stand_in(monkeypatch, "nemo_rl.algorithms.grpo", ClippedPGLossFn=ClippedPGLossFn, _create_advantage_estimator=None)
    started = []
    stand_in(monkeypatch, "run_grpo", main=lambda: started.append(True))
    names = {"__name__": "__main__"}
    exec(blocks(SUBCLASSED)[1], names)
    grpo = sys.modules["nemo_rl.algorithms.grpo"]
    assert started and grpo.ClippedPGLossFn is names["Cispo"]
    options = {"ratio_clip_min": 0.2, "ratio_clip_max": 0.1}
    options |= {"reference_policy_kl_penalty": 0.0, "use_importance_sampling_correction": False}
    loss_fn = grpo.ClippedPGLossFn(SimpleNamespace(**options), use_fused_linear_logprobs=False)
    logprobs, old, advantages, mask = policy_batch()
    mask[:, 0] = False
    data = {"token_mask": mask.float(), "sample_mask": torch.tensor([1.0, 1, 0, 1, 1, 1])}
    data |= {"prev_logprobs": old, "advantages": advantages}
    kept = mask & data["sample_mask"][:, None].bool()
    parts = []
    for rows in (slice(0, 2), slice(2, 6)):
        part = {name: x[rows] for name, x in data.items()}
        loss, metrics = loss_fn(logprobs[rows, 1:], part, torch.tensor(5), kept.sum())
        assert metrics["loss"] == pytest.approx(loss.item()) and metrics["num_valid_samples"] in (2, 3)
        parts.append(loss)
    expected = token_mean(cispo_loss(logprobs, old, advantages, kept, 0.2, 0.1), kept)
    torch.testing.assert_close(sum(parts), expected)
    assert not torch.isclose(expected, token_mean(cispo_loss(logprobs, old, advantages, kept, 0.2, 0.2), kept))
    for name, value in {"reference_policy_kl_penalty": 0.01, "use_importance_sampling_correction": True}.items():
        with pytest.raises(AssertionError):
            grpo.ClippedPGLossFn(SimpleNamespace(**{**options, name: value}))

    prompts = torch.tensor([[5, 6], [7, 0], [5, 6], [7, 0]])
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.5])
    mask = torch.tensor([[0.0, 1.0, 1.0]] * 3 + [[0.0, 1.0, 0.0]])
    found = grpo._create_advantage_estimator(None).compute_advantage(
        prompt_ids=prompts, rewards=rewards, mask=mask, repeated_batch=None, logprobs_policy=None
    )
    torch.testing.assert_close(found, torch.tensor([1.0, -0.5, -1.0, 0.5])[:, None] * mask)


def test_areals_loss_of_packed_rows(monkeypatch):
    """That of the rows one by one; live_hosts.py trains with it, and with one row in a micro-batch."""
    stand_in(monkeypatch, "areal.engine", FSDPPPOActor=object)
    names = {}
    exec(blocks(SUBCLASSED)[2], names)
    logprobs, old, advantages, mask = policy_batch()
    lengths = [8, 3, 6, 8, 1, 5]
    packed = [torch.cat([x[row, :n] for row, n in enumerate(lengths)]) for x in (logprobs, old, advantages, mask)]
    data = dict(zip(("prox_logp", "advantages", "loss_mask"), packed[1:], strict=True))
    data["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    found = names["cispo"](packed[0], None, data, vocab_min_logits=None, vocab_max_logits=None)
    kept = mask & (torch.arange(8) < torch.tensor(lengths)[:, None])
    torch.testing.assert_close(found, token_mean(cispo_loss(logprobs, old, advantages, kept, 0.2, 0.28), kept))


def test_every_block_is_run():
    """By this file or by one of the live_ files: a block that is added needs a test."""
    counts = {"TRL": 2, "verl": 1, "Hugging Face's Trainer": 1, "Lightning, and loops of your own": 2}
    counts |= {"prime-rl, SkyRL, slime": 3, SUBCLASSED: 3}
    assert {heading: len(blocks(heading)) for heading in counts} == counts
    assert len(re.findall("```python", PAGE)) == sum(counts.values())


def test_names_in_verl_are_those_of_the_functions():
    """Every one that the page lists is registered, by the text of the plug-in, and the other way around."""
    plugin = (Path(__file__).parents[2] / "rlkit" / "plugins" / "verl.py").read_text()
    losses = re.findall(r"^    losses\.(\w+)_loss: ", plugin, re.M)
    advantages = re.findall(r"^    adv\.(\w+)_advantages,", plugin, re.M)
    assert len(losses) > 15 and len(advantages) > 10
    listed = re.findall(r"^- (Losses|Advantages): (.*?)\.( |$)", PAGE, re.M | re.S)
    found = {kind: re.findall(r"`rlkit_(\w+)`", text) for kind, text, _ in listed}
    assert found == {"Losses": losses, "Advantages": advantages}


@pytest.mark.parametrize("heading", ["TRL", "verl", SUBCLASSED])
def test_what_live_files_run_is_python(heading):
    for block in blocks(heading):
        compile(block, heading, "exec")
