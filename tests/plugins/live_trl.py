"""rlkit inside TRL itself: two steps of GRPOTrainer and DPOTrainer with our functions; `make peers` runs it.

.venv-peers/bin/python tests/plugins/live_trl.py    # records the steps that test_recorded.py repeats
"""

import subprocess
import sys
import tempfile
from functools import partial
from importlib.metadata import version
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoModelForImageTextToText, set_seed
from trl import DPOConfig, GRPOConfig
from trl import GRPOTrainer as TrlGRPOTrainer

sys.path.insert(0, str(Path(__file__).parent))
from two_steps import (  # noqa: E402
    adamw,
    copy_of,
    our_trl_dpo_steps,
    our_trl_steps,
    reward_of,
    same_training,
    save,
    tiny_model,
)

from rlkit.advantages import opo_advantages, rloo_advantages  # noqa: E402
from rlkit.losses import cispo_loss, clipped_policy_loss, ipo_loss, simpo_loss  # noqa: E402
from rlkit.plugins.trl import MODEL_INPUTS, DPOTrainer, GRPOTrainer  # noqa: E402
from rlkit.vlm import build_tiny, load_processor  # noqa: E402
from rlkit.vlm.tiny import tiny_text_tokenizer  # noqa: E402

PROMPTS = ["add 1 and 2", "what is 3", "say a", "count to 4"]
PAIRS = [("add 1 and 2", "3", "four"), ("what is 3", "a number", "no"), ("say a", "a", "b and c"), ("hi", "hello", "x")]
COMMON = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "max_steps": 2,
    "max_grad_norm": 1e9,
    "logging_steps": 1,
    "save_strategy": "no",
    "gradient_accumulation_steps": 2,
    "disable_tqdm": True,
    "gradient_checkpointing": False,
}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_text_tokenizer(PROMPTS)


def optimizers(model):
    optimizer = adamw(model.parameters())
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


class Seen:
    """A mixin that keeps the inputs and the loss of every micro-batch."""

    def _compute_loss(self, model, inputs, *others):
        loss = super()._compute_loss(model, inputs, *others)
        if not hasattr(self, "seen"):
            self.seen, self.losses = [], []
        self.seen.append(inputs)
        self.losses.append(loss.item())
        return loss


class SeenGRPO(Seen, GRPOTrainer):
    pass


class SeenDPO(Seen, DPOTrainer):
    pass


def model_from_a_directory(tokenizer):
    """TRL reads its reference model from where the model came from."""
    from transformers import AutoModelForCausalLM

    folder = tempfile.mkdtemp()
    model = tiny_model(len(tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def grpo(tokenizer, loss=None, advantages=None, trainer=SeenGRPO, **options):
    model = model_from_a_directory(tokenizer)
    sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6, "seed": 3}
    args = GRPOConfig(output_dir=tempfile.mkdtemp(), **COMMON | sizes | options)
    data = Dataset.from_dict({"prompt": PROMPTS})
    own = {"loss": loss, "advantages": advantages}
    own |= {"processing_class": tokenizer, "optimizers": optimizers(model)}
    return trainer(model=model, args=args, reward_funcs=reward, train_dataset=data, **own)


def reward(completion_ids, **_):
    return [None if ids[0] % 11 == 0 else reward_of(torch.tensor(ids)).item() for ids in completion_ids]


def row(prompt, prompt_mask, completion, mask):
    """Tokens and mask of a row without padding."""
    prompt, response = prompt[prompt_mask.bool()], completion[mask.bool()]
    return torch.cat([prompt, response]), torch.cat([torch.zeros(len(prompt)), torch.ones(len(response))])


def padded(rows):
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def grpo_steps(trainer):
    """What our engine needs of each step of a finished run: two micro-batches a step."""
    steps = []
    for first in range(0, len(trainer.seen), 2):
        parts = trainer.seen[first : first + 2]
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        rows = [row(*one) for part in parts for one in zip(*(part[name] for name in names), strict=True)]
        tokens, masks = zip(*rows, strict=True)
        steps.append({"tokens": padded(tokens), "mask": padded(masks).long()})
        steps[-1]["lengths"] = torch.tensor([len(t) for t in tokens])
        steps[-1]["advantages"] = torch.cat([part["advantages"] for part in parts])
        old = [x for part in parts for x in part["old_per_token_logps"]]
        old = [
            torch.cat([torch.zeros(int((m == 0).sum())), x[: int(m.sum())]]) for m, x in zip(masks, old, strict=True)
        ]
        steps[-1]["old_logprobs"] = padded(old)
    return steps


def grpo_run(tokenizer):
    """CISPO and RLOO, two steps on one batch of responses, so that the second has ratios other than 1."""
    loss = partial(cispo_loss, clip_low=0.01, clip_high=0.02)
    trainer = grpo(tokenizer, loss, rloo_advantages, num_iterations=2)
    start = copy_of(trainer.model)
    trainer.train()
    losses = torch.tensor(trainer.losses).view(2, 2).sum(1)
    return {"start": start, "end": copy_of(trainer.model), "steps": grpo_steps(trainer), "losses": losses}, trainer


def dpo(tokenizer, loss, trainer=SeenDPO, **options):
    model = model_from_a_directory(tokenizer)
    args = DPOConfig(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=2, **COMMON | options)
    names = ("prompt", "chosen", "rejected")
    data = Dataset.from_list([dict(zip(names, pair, strict=True)) for pair in PAIRS])
    return trainer(
        model=model, args=args, train_dataset=data, processing_class=tokenizer, optimizers=optimizers(model), loss=loss
    )


def dpo_run(tokenizer, loss=ipo_loss):
    trainer = dpo(tokenizer, loss)
    start = copy_of(trainer.model)
    trainer.train()
    steps = []
    for first in range(0, len(trainer.seen), 2):
        rows = []
        for part in trainer.seen[first : first + 2]:  # each [chosen, rejected]; a pair is two rows in a row
            parts = zip(part["input_ids"], part["attention_mask"], part["completion_mask"], strict=True)
            each = [(tokens[real.bool()], mask[real.bool()]) for tokens, real, mask in parts]
            pairs = len(each) // 2
            rows += [each[i + side * pairs] for i in range(pairs) for side in (0, 1)]
        tokens, masks = zip(*rows, strict=True)
        steps.append({"tokens": padded(tokens), "mask": padded(masks)})
        steps[-1]["lengths"] = torch.tensor([len(t) for t in tokens])
    losses = torch.tensor(trainer.losses).view(2, 2).mean(1)
    return {"start": start, "end": copy_of(trainer.model), "steps": steps, "losses": losses}


def test_two_steps_of_grpo_are_those_of_our_engine(tokenizer):
    run, trainer = grpo_run(tokenizer)
    assert trainer.state.global_step == 2
    same_training(our_trl_steps(run["start"], run["steps"]), run["start"], run["end"], run["losses"])


def test_two_steps_of_dpo_are_those_of_our_engine(tokenizer):
    run = dpo_run(tokenizer)
    same_training(our_trl_dpo_steps(run["start"], run["steps"]), run["start"], run["end"], run["losses"])


def test_advantages_are_of_the_rewards_that_the_trainer_logs(tokenizer):
    trainer = grpo(tokenizer, advantages=rloo_advantages)
    trainer.train()
    rewards = torch.tensor([float("nan") if x is None else x for x in trainer._logs["rewards"]["reward"]])
    expected = rloo_advantages(rewards, torch.arange(8) // 4)
    torch.testing.assert_close(torch.tensor(list(trainer._logs["advantages"])), expected)
    used = torch.cat([part["advantages"] for part in trainer.seen[2:]])
    torch.testing.assert_close(used.sort().values, expected.sort().values)  # TRL shuffles the rows
    assert rewards.isnan().any() and expected.abs().max() > 0.1


@pytest.mark.parametrize(
    ("loss_type", "weighted_kl"), [("dapo", False), ("grpo", True), ("bnpo", False), ("dr_grpo", True)]
)
def test_with_trls_own_formula_the_loss_is_trls_own(tokenizer, loss_type, weighted_kl):
    """PPO's clip, its KL terms and every reduction: our loss in TRL's trainer beside TRL's loss."""
    found = {}
    for name, loss in (("rlkit", clipped_policy_loss), ("TRL", None)):
        options = {"loss_type": loss_type, "use_bias_correction_kl": weighted_kl}
        trainer = grpo(tokenizer, loss, num_iterations=2, beta=0.1, **options)
        trainer.train()
        found[name] = torch.tensor(trainer.losses), copy_of(trainer.model)
        kl = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
        assert kl[1] > 0
    torch.testing.assert_close(found["rlkit"][0], found["TRL"][0], rtol=1e-4, atol=1e-6)
    for name, x in found["TRL"][1].items():
        torch.testing.assert_close(found["rlkit"][1][name], x, rtol=0, atol=1e-5)


def test_lengths_are_given_to_advantages_that_ask_for_them(tokenizer):
    seen_lengths = []

    def advantages(rewards, group_ids, lengths):
        seen_lengths.append(lengths)
        return opo_advantages(rewards, group_ids, lengths)

    trainer = grpo(tokenizer, advantages=advantages)
    trainer.train()
    lengths = torch.cat([part["completion_mask"].sum(1) for part in trainer.seen[:2]])
    assert sorted(seen_lengths[0].tolist()) == sorted(lengths.tolist())


def test_a_loss_without_reference(tokenizer):
    trainer = dpo(tokenizer, partial(simpo_loss, beta=1.5))
    trainer.train()
    assert trainer.state.global_step == 2 and all(loss > 0 for loss in trainer.losses)


def test_evaluation(tokenizer):
    """The same responses, so the same loss as TRL's own: in evaluation nothing is accumulated."""
    found = {}
    for name, own in {"rlkit": {"loss": clipped_policy_loss}, "TRL": {}}.items():
        trainer = grpo(tokenizer, **own, per_device_eval_batch_size=4, num_generations_eval=2)
        set_seed(5)
        found[name] = trainer.evaluate(trainer.train_dataset)["eval_loss"]
    assert found["rlkit"] == pytest.approx(found["TRL"], rel=1e-4) and abs(found["TRL"]) > 1e-3
    trainer = grpo(tokenizer, advantages=rloo_advantages, per_device_eval_batch_size=4, num_generations_eval=2)
    trainer.evaluate(trainer.train_dataset)
    rewards = torch.tensor([float("nan") if x is None else x for x in trainer._logs["rewards"]["reward"]])
    expected = rloo_advantages(rewards, torch.arange(len(rewards)) // 2)
    torch.testing.assert_close(torch.tensor(list(trainer._logs["advantages"])), expected)


def test_images(tmp_path):
    """A tiny Qwen2.5-VL: our loss in TRL's trainer moves the weights as TRL's own formula does."""
    draw = np.random.default_rng(0)
    images = [Image.fromarray(draw.integers(0, 255, (56, 56, 3), dtype=np.uint8)) for _ in range(4)]
    question = "What digit is this?"
    folder = str(tmp_path / "tiny")
    build_tiny(folder, [{"question": question, "answer": "1", "images": [image]} for image in images], warm_up_steps=0)
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": question}]] * 4, "image": images})
    sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6, "num_iterations": 2}
    found = {}
    for name, loss in (("rlkit", clipped_policy_loss), ("TRL", None)):
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        start = copy_of(model)
        args = GRPOConfig(output_dir=tmp_path / name, seed=3, **COMMON, **sizes)
        trainer = SeenGRPO(
            model=model,
            args=args,
            reward_funcs=reward,
            train_dataset=data,
            processing_class=load_processor(folder),
            optimizers=optimizers(model),
            loss=loss,
        )
        trainer.train()
        assert "pixel_values" in trainer.seen[0]
        found[name] = copy_of(model), torch.tensor(trainer.losses)
    same_training(found["rlkit"][::-1], start, *found["TRL"])


def test_the_model_gets_all_that_trl_feeds_it():
    """Of other families too: whatever TRL's scoring takes beside the tokens is handed on."""
    takes = set(signature(TrlGRPOTrainer._get_per_token_logps_and_entropies).parameters)
    beside = {"self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"}
    assert set(MODEL_INPUTS) == takes - beside - {"compute_entropy", "compute_aux_loss"}


def test_two_processes(tmp_path):
    """TRL's formula with our loss moves the weights as TRL does; each rank trains on its own rows of the advantages."""
    script = Path(__file__).with_name("on_two_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    for found in ranks:
        for name, x in ranks[0]["TRL"].items():
            torch.testing.assert_close(found["rlkit"][name], x, rtol=0, atol=1e-5)
    rewards, groups = torch.tensor(ranks[0]["rewards"]), torch.arange(16) // 4
    expected = opo_advantages(rewards, groups, ranks[0]["all_lengths"])
    torch.testing.assert_close(torch.tensor(ranks[0]["advantages"]), expected)
    for rank, found in enumerate(ranks):
        own = expected[8 * rank : 8 * (rank + 1)]
        torch.testing.assert_close(found["used"].sort().values, own.sort().values)


@pytest.mark.parametrize(
    ("make", "option", "sentence"),
    [
        (partial(grpo, loss=cispo_loss), {"epsilon": 0.3}, "epsilon: expected its default, 0.2, beside loss=, got 0.3"),
        (
            partial(grpo, advantages=rloo_advantages),
            {"scale_rewards": "none"},
            "scale_rewards: expected its default, 'group', beside advantages=, got 'none'",
        ),
        (partial(dpo, loss=ipo_loss), {"beta": 0.5}, "beta: expected its default, 0.1, beside loss=, got 0.5"),
    ],
)
def test_an_option_that_nothing_would_read_is_refused(tokenizer, make, option, sentence):
    with pytest.raises(ValueError) as error:
        make(tokenizer, **option)
    assert str(error.value) == sentence


if __name__ == "__main__":
    made_of = {"trl": version("trl"), "transformers": version("transformers"), "torch": torch.__version__}
    save("recorded_trl_grpo", **grpo_run(tiny_text_tokenizer(PROMPTS))[0], metadata=made_of)
    save("recorded_trl_dpo", **dpo_run(tiny_text_tokenizer(PROMPTS)), metadata=made_of)
