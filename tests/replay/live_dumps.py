"""Dumps that TRL and verl wrote themselves, as bundles; `make peers` runs it.

TRL trains two steps. verl's trainer needs GPUs, so its method that writes a dump is called with a batch of its own.
"""

import json
import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from rlkit.data import load_task
from rlkit.replay.bundles import bundle_steps, read_bundle
from rlkit.replay.dumps import main
from rlkit.vlm import build_tiny, encode_prompt, load_processor


@pytest.fixture(scope="module")
def task_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("task") / "sorting.jsonl"
    rows = [{name: row[name] for name in ("question", "answer")} for row in load_task("sorting").train]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture(scope="module")
def rows(task_file):
    return load_task(task_file).train


@pytest.fixture(scope="module")
def model(rows, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("tiny") / "model")
    build_tiny(path, rows, warm_up_steps=0)
    return path


class Logged(GRPOTrainer):
    """Keeps what it writes at every step: responses and rewards."""

    def log(self, *given, **named):
        super().log(*given, **named)
        columns = {"completion": self._logs["completion"], **self._logs["rewards"]}
        self.seen = [*getattr(self, "seen", ()), {name: list(column) for name, column in columns.items()}]


def length(completions, **_):
    return [None if len(response) % 5 == 0 else len(response) / 8 for response in map(text_of, completions)]


def constant(completions, **_):
    return [1] * len(completions)


def text_of(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


@pytest.mark.parametrize("conversation", [False, True])
def test_a_dump_of_trl(tmp_path, model, rows, task_file, conversation, capsys):
    questions = [row["question"] for row in rows[:4]]
    prompts = [[{"role": "user", "content": x}] for x in questions] if conversation else questions
    sizes = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 6, "max_steps": 2}
    plain = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    trainer = Logged(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=GRPOConfig(output_dir=str(tmp_path), log_completions=True, logging_steps=1, **sizes, **plain),
        reward_funcs=[length, constant],
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=load_processor(model),
    )
    trainer.train()
    capsys.readouterr()
    task = ["--task", task_file] if conversation else []
    given = [str(tmp_path / "completions"), str(tmp_path / "out"), "--model", model, "--max_new_tokens", "6", *task]
    main(["trl", *given])
    assert capsys.readouterr().out.startswith("2 bundles in ")
    assert bundle_steps(tmp_path / "out") == [0, 1]
    tokenizer = load_processor(model)
    for step, seen in enumerate(trainer.seen[:2]):
        samples = read_bundle(tmp_path / "out" / f"step_{step}").draws[0].samples
        assert [(s.group_id, s.number) for s in samples] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert [s.text for s in samples] == list(map(text_of, seen["completion"]))
        lengths = [0.0 if x is None or math.isnan(x) else x for x in seen["length"]]
        assert [s.reward for s in samples] == pytest.approx(
            [a + b for a, b in zip(lengths, seen["constant"], strict=True)]
        )
        for sample in samples:
            start = sample.mask.index(True)
            response = tokenizer(sample.text, add_special_tokens=False).input_ids
            assert sample.token_ids[start:][: len(response)] == response
            if conversation:
                assert sample.token_ids[:start] in [encode_prompt(tokenizer, row).token_ids for row in rows[:4]]


def test_a_dump_of_verl(tmp_path, model, rows, task_file, capsys):
    tokenizer, rows = load_processor(model), [row for row in rows[:2] for _ in range(2)]
    prompts = [encode_prompt(tokenizer, row).token_ids for row in rows]
    responses = [row["answer"] if good else "" for row, good in zip(rows, (True, False) * 2, strict=True)]
    responses = [[*tokenizer(x, add_special_tokens=False).input_ids, tokenizer.eos_token_id] for x in responses]
    trainer = object.__new__(RayPPOTrainer)
    trainer.tokenizer = tokenizer
    trainer._init_dump_executor()
    for trainer.global_steps in (1, 2):
        responses = padded(responses, tokenizer.pad_token_id)
        scores = torch.zeros(responses.shape)
        scores[::2, 0] = 0.5 * trainer.global_steps
        tensors = {"prompts": padded(prompts, tokenizer.pad_token_id, left=True), "responses": responses}
        truths = np.array([{"ground_truth": row["answer"]} for row in rows])
        batch = DataProto.from_dict(tensors | {"token_level_scores": scores}, non_tensors={"reward_model": truths})
        trainer._log_rollout_data(batch, {"acc": np.array([1.0, 0.0] * 2)}, {}, str(tmp_path / "dump"))
    trainer._shutdown_dump_executor()
    main(["verl", str(tmp_path / "dump"), str(tmp_path / "out"), "--model", model, "--task", task_file])
    assert "2 bundles in " in capsys.readouterr().out
    for step in (0, 1):
        samples = read_bundle(tmp_path / "out" / f"step_{step}").draws[0].samples
        assert [s.token_ids for s in samples] == [a + b for a, b in zip(prompts, responses, strict=True)]
        assert [s.reward for s in samples] == [0.5 * (step + 1), 0.0] * 2
        assert [s.row["answer"] for s in samples] == [row["answer"] for row in rows]


def padded(rows, value, left=False):
    width = max(map(len, rows))
    return torch.tensor([[value] * (width - len(x)) + x if left else x + [value] * (width - len(x)) for x in rows])
