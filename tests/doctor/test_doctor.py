"""python -m rlkit.doctor and python -m rlkit.data check: what they find, and what they call a failure."""

import json
import shutil
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig

import rlkit.data.__main__ as data_command
import rlkit.doctor.__main__ as doctor_command
import rlkit.doctor.model as model_checks
from rlkit.data import Task, load_task
from rlkit.doctor import machine, self_check
from rlkit.doctor.findings import Finding, line
from rlkit.doctor.model import check_model, check_weight_files
from rlkit.doctor.servers import check_servers
from rlkit.doctor.task import check_rewards, check_rows, show_rows
from rlkit.rewards.maths import boxed_match
from rlkit.rewards.rules import boxes_iou, exact_match, numeric_match
from rlkit.rollout.servers.token import OPEN_ROUTE, TOKEN_VARIABLE
from rlkit.runs import memory_plan
from rlkit.runs.models import processor_of
from rlkit.vlm import load_processor


def texts(findings):
    """The findings by their subject; of several with one subject their texts together."""
    found = {}
    for finding in findings:
        found.setdefault(finding.subject, []).append(finding)
    return {
        subject: (" | ".join(one.text for one in several), min((one.ok for one in several), key=str))
        for subject, several in found.items()
    }


def test_lines():
    assert line(Finding("GPU", "none\nat all", None)).splitlines() == [f"   --  {'GPU':<28} none", " " * 36 + "at all"]
    assert line(Finding("weights", "", False)) == " FAIL  weights"


# --- the machine


def test_a_containers_limit_is_the_memory_of_the_machine(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text(f"{1 << 30}\n")
    monkeypatch.setattr(memory_plan, "CGROUP", tmp_path)
    assert texts(machine.check_devices())["processor"][0].endswith(" cores, 1 GiB of memory")


def test_why_a_feature_cannot_be_used(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    (tmp_path / "whole_package.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    broken, whole, absent, below = (
        machine.Feature("x", name, "pip install x")
        for name in ("broken_package", "whole_package", "no_such_package", "no_such_package.part")
    )
    assert machine.why_unusable(whole) == ""
    assert machine.why_unusable(absent) == machine.why_unusable(below) == "not installed: pip install x"
    assert machine.why_unusable(broken._replace(imported=False)) == ""
    problem = "installed, but `import broken_package` fails: ImportError: libcudart.so.13: cannot open"
    assert machine.why_unusable(broken).startswith(problem)
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    assert machine.why_unusable(whole._replace(on_gpu=True)) == "needs a GPU"


def test_why_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(machine.torch.version, "cuda", None)
    monkeypatch.setattr(machine.torch.version, "hip", None)
    assert "is a build for CPUs" in machine.why_no_gpu()
    monkeypatch.setattr(machine.torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert "CUDA_VISIBLE_DEVICES is '-1'" in machine.why_no_gpu()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert "there is no driver" in machine.why_no_gpu()
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert "compare its CUDA version" in machine.why_no_gpu()


def test_the_modules_of_features_are_those_that_the_extras_install():
    """A feature whose package is installed here can be used; a wrong module name would say that it is not installed."""
    installed = {
        feature.use for feature in machine.FEATURES if not machine.why_unusable(feature._replace(imported=False))
    }
    assert {"--engine fsdp2, fsdp1", "--engine megatron", "--rollout hf", "--rollout vllm", "--lora_rank",
            "--reward maths", "a chat model as judge", "--task reasoning_gym:...", "--model FILE.gguf",
            "--model smollm2", "--trackers tensorboard"} <= installed  # fmt: skip


# --- a model


def test_a_good_model_has_no_failure(tiny_dir):
    found = texts(check_model(str(tiny_dir)))
    assert all(ok is not False for _, ok in found.values())
    assert found["architecture"][0].startswith("qwen2_5_vl, ") and "3D RoPE" in found["positions"][0]
    assert "without padding" in found["packed rows"][0] and found["weights"][0].startswith("1 file, ")
    assert "What is this?" in found["chat template"][0]


@pytest.mark.parametrize(
    ("change", "subject", "words"),
    [
        (lambda path: (path / "model.safetensors").unlink(), "weights", "expected *.safetensors in"),
        (lambda path: (path / "config.json").unlink(), "model", "config.json"),
        (lambda path: (path / "chat_template.jinja").unlink(), "processor", "chat template"),
    ],
    ids=["weights", "config", "template"],
)
def test_a_model_without_one_of_its_files(tiny_dir, tmp_path, change, subject, words):
    path = tmp_path / "model"
    shutil.copytree(tiny_dir, path)
    change(path)
    text, ok = texts(check_model(str(path)))[subject]
    assert ok is False and words in text


@pytest.mark.parametrize("has_gpu", [True, False])
@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_a_gpu_without_kernels_of_the_gated_delta_rule(family, has_gpu, tmp_path, monkeypatch):
    AutoConfig.for_model(family, num_hidden_layers=4, hidden_size=64).save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(model_checks, "find_spec", lambda name: None)
    found = texts(check_model(str(tmp_path)))
    assert ("gated delta rule" in found) is (has_gpu and family == "qwen3_5_text")
    if "gated delta rule" in found:
        assert found["gated delta rule"] == ("computed slowly, without kernels: " + machine.LINEAR_ATTENTION, None)


def test_a_missing_shard_is_named(tmp_path):
    names = {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (tmp_path / names["a.weight"]).write_bytes(b"x")
    (finding,) = check_weight_files(tmp_path)
    assert finding.ok is False and finding.text.endswith("got without model-00002-of-00002.safetensors")
    (tmp_path / names["b.weight"]).write_bytes(b"x")
    (finding,) = check_weight_files(tmp_path)
    assert finding.ok and finding.text.startswith("2 files")


def make_hole(path):
    """Take the last token out of a tokenizer's vocabulary, but not its id, which the added token follows."""
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    vocabulary, added = tokenizer["model"]["vocab"], tokenizer["added_tokens"][-1]
    last = max(vocabulary, key=vocabulary.get)
    del vocabulary[last]
    vocabulary[added["content"]] = added["id"]
    tokenizer["model"]["merges"] = [pair for pair in tokenizer["model"]["merges"] if "".join(pair) != last]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(("special", "hole", "passes"), [(False, 0, False), (True, 0, True), (True, 1, True)])
def test_a_tokenizer_with_more_tokens_than_embeddings(tiny_dir, tmp_path, special, hole, passes):
    """A run refuses what the check refuses. Gemma 3's text models have a special token that they never see."""
    path = tmp_path / "model"
    shutil.copytree(tiny_dir, path)
    processor = load_processor(str(path))
    processor.tokenizer.add_tokens(["<new>"], special_tokens=special)
    processor.save_pretrained(path)
    if hole:
        make_hole(path)
    assert len(load_processor(str(path)).tokenizer) == len(processor.tokenizer) - hole
    text, ok = texts(check_model(str(path)))["vocabulary"]
    cfg = doctor_command.Options(model=str(path))
    if passes:
        assert ok is None and text == "special tokens without an embedding, which no text may have: 1"
        processor_of(cfg, str(path))
        return
    assert ok is False and text.endswith(", so that '<new>' has no embedding")
    with pytest.raises(ValueError, match="^vocab_size: .*'<new>' has no embedding$"):
        processor_of(cfg, str(path))


# --- a task


def a_file(tmp_path, rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_what_is_in_a_file(tmp_path, tiny_dir):
    Image.new("RGB", (56, 28), "red").save(tmp_path / "red.png")
    rows = [{"question": f"How many are {i}?", "answer": str(i)} for i in range(8)]
    rows += [{"question": "<image> Which colour?", "answer": "red", "images": ["red.png"]}] * 2
    rows += [{"question": "<image> Which colour?", "answer": "blue", "images": [f"none{i}.png"]} for i in range(3)]
    task = load_task(a_file(tmp_path, rows))
    task = replace(task, train=task.splits["train"], heldout=task.splits["train"][:1])
    found = texts(check_rows(task, load_processor(str(tiny_dir))))
    assert found["rows"][0] == "13 to train on, 1 held out"
    skipped, ok = found["training rows"]
    assert (
        "3 of the first 13 would be skipped" in skipped and "3 x " in skipped and "none0.png" in skipped and ok is None
    )
    assert "tokens, median" in found["training prompts"][0] and "0 to 1 images" in found["training prompts"][0]
    assert "1 of the first 13 is a repetition" in found["training prompts"][0]
    assert found["held-out prompts"][0].endswith("1 also in the training rows: the held-out accuracy will be too high")
    short = texts(check_rows(task, load_processor(str(tiny_dir)), max_tokens=3))
    assert short["training rows"][1] is False and "expected a prompt of at most 3 tokens" in short["training rows"][0]


def test_columns_that_are_not_in_the_prompt(tmp_path):
    rows = [{"context": "Bob is 7.", "question": "How old is Bob?", "answer": "7"}] * 3
    task = load_task(a_file(tmp_path, rows))
    assert texts(check_rows(task))["columns"] == ("not in the prompt, only for reward functions: context", None)
    assert "columns" not in texts(check_rows(replace(task, train=load_task("addition").train)))


def test_prompts_are_shown_as_the_model_reads_them(tmp_path, tiny_dir):
    Image.new("RGB", (56, 28), "red").save(tmp_path / "red.png")
    rows = [{"question": "<image> Which colour?", "answer": "red", "images": ["red.png"]}] * 3
    task = load_task(a_file(tmp_path, rows))
    boxes = replace(task, train=[{"question": "Where?", "images": [], "answer": [1, 2, 3, 4]}])
    assert "answer: [1, 2, 3, 4]" in "\n".join(show_rows(boxes))
    text = "\n".join(show_rows(task, load_processor(str(tiny_dir)), 1))
    assert "images: 56 x 28" in text and "<|vision_start|><|image_pad|><|vision_end|>" in text and "answer: red" in text
    assert "tokens; images" in text and "<|im_start|>assistant" in text
    assert "tokens" not in "\n".join(show_rows(task, None, 1))


def test_rewards_of_right_and_wrong_answers():
    rows = [{"question": "?", "images": [], "answer": str(i)} for i in range(4)]
    task = Task("a", train=rows, heldout=[], reward=exact_match)
    found = texts(check_rewards(task))
    assert found["rewards"] == ("highest for: right; the prompt should ask for that form", True)
    assert found["reward: right, in a sentence"][0].startswith("mean 0 over 4 rows")
    assert max(map(len, found)) <= 28, "a label is wider than its column"
    lenient = texts(check_rewards(replace(task, reward=numeric_match())))
    assert lenient["rewards"][0].startswith("highest for: right, right, in a sentence")


@pytest.mark.parametrize(
    ("answers", "reward", "written"),
    [
        ([[5 * i, 2, 5 * i + 4, 9] for i in range(4)], boxes_iou, "[0, 2, 4, 9]"),
        ([[[5 * i, 2, 5 * i + 4, 9], [0, 20, 9, 29]] for i in range(4)], boxes_iou, "[[0, 2, 4, 9], [0, 20, 9, 29]]"),
        ([[str(i), f"no. {i}"] for i in range(4)], exact_match, "0"),
        ([np.array([str(i), f"no. {i}"]) for i in range(4)], exact_match, "0"),
        ([np.array([5 * i, 2, 5 * i + 4, 9]) for i in range(4)], boxes_iou, "[0, 2, 4, 9]"),
        ([[str(i), f"no. {i}"] for i in range(4)], boxed_match, "0"),
        ([{"content": str(i)} for i in range(4)], lambda text, row: float(text == row["answer"]["content"]), "0"),
    ],
)
def test_a_list_is_an_answer_or_several(answers, reward, written):
    rows = [{"question": "?", "images": [], "answer": answer} for answer in answers]
    found = texts(check_rewards(Task("a", train=rows, heldout=[], reward=reward)))
    assert found["rewards"][1] is True
    assert found["reward: right"][0].endswith(f": {written!r}")


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (lambda text, row: 1.0, "expected more for a right response than for a wrong one"),
        (lambda text, row: 1 / 0, "expected numbers, got none"),
        (lambda text, row: None, "expected numbers, got none"),
        (lambda text, row: float(text != row["answer"]), "expected more for a right response"),
    ],
)
def test_a_reward_that_cannot_tell_right_from_wrong_fails(reward, words):
    rows = [{"question": "?", "images": [], "answer": str(i)} for i in range(4)]
    text, ok = texts(check_rewards(Task("a", train=rows, heldout=[], reward=reward)))["rewards"]
    assert ok is False and words in text


def test_the_command_on_data(tmp_path, capsys):
    path = a_file(tmp_path, [{"question": f"What is {i}?", "answer": str(i)} for i in range(20)])
    with pytest.raises(SystemExit) as end:
        data_command.main(["check", path, "--prompts", "2", "--system_prompt", "Be short."])
    said = capsys.readouterr().out
    assert end.value.code == 0 and "18 to train on, 2 held out" in said and said.count("system: Be short.") == 2
    pairs = a_file(tmp_path, [{"prompt": "Q", "chosen": "good", "rejected": f"bad {i}"} for i in range(20)])
    with pytest.raises(SystemExit) as end:
        data_command.main(["check", pairs, "--kind", "pairs"])
    said = capsys.readouterr().out
    assert end.value.code == 0 and "chosen: good" in said and "Rewards" not in said
    boxed = a_file(tmp_path, [{"question": f"What is {i}?", "answer": f"We count.\n#### {i}"} for i in range(20)])
    with pytest.raises(SystemExit) as end:
        data_command.main(["check", boxed, "--reward", "boxed"])
    said = capsys.readouterr().out
    assert end.value.code == 0 and "mean 1 over 10 rows: 'So it is" in said and "\\boxed{We count" not in said
    with pytest.raises(SystemExit, match="rlkit.data: .*none.jsonl"):
        data_command.main(["check", str(tmp_path / "none.jsonl")])


# --- servers


@pytest.fixture
def server(monkeypatch):
    """A server with a token, as rlkit.rollout.serve starts them; a proxy of the environment does not reach it."""
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            knows_token = self.headers["Authorization"] == "Bearer secret"
            self.send_response(200 if knows_token or self.path == OPEN_ROUTE else 401)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "tiny"}]}' if self.path == "/v1/models" else b"")

        def log_message(self, *_):
            pass

    started = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=started.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{started.server_port}"
    started.shutdown()
    started.server_close()


def test_servers(server):
    answers, silent = check_servers([server, "http://127.0.0.1:9"])
    assert answers.ok and answers.text.endswith("serves tiny")
    assert silent.ok is False and "expected a vLLM or SGLang server, got URLError" in silent.text


# --- the whole


def test_the_self_check_and_the_command(monkeypatch, capsys):
    """The exit status is 1 as soon as one line says FAIL; here sampler and trainer may not differ at all."""
    monkeypatch.setattr(machine, "FEATURES", machine.FEATURES[:1])
    with pytest.raises(SystemExit) as end:
        doctor_command.main(["--task", "sorting"])
    said = capsys.readouterr().out
    assert end.value.code == 0 and "FAIL" not in said
    for words in (
        "Devices",
        "What can be used",
        "differ by",
        "gradient norm",
        "can be loaded",
        "Task sorting",
        "mean 1 ",
    ):
        assert words in said, words
    monkeypatch.setattr(self_check, "LARGEST_DIFFERENCE", -1.0)
    monkeypatch.setattr(doctor_command, "check_features", lambda: [])
    with pytest.raises(SystemExit) as end:
        doctor_command.main([])
    assert end.value.code == 1 and " FAIL  log-probabilities" in capsys.readouterr().out
