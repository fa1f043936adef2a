"""--push_to_hub: what a stand-in for the hub receives, the model card, and how a refusal ends a run."""

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants

sys.path.insert(0, str(Path(__file__).parent))

from helpers import load, run_here, text_dir  # noqa: E402, F401
from hub_stand_in import TOKEN, running_hub  # noqa: E402

from rlkit.report.model_card import OF_THE_PLACE, write_model_card  # noqa: E402
from rlkit.runs import parse_options  # noqa: E402
from rlkit.runs.closing import closing_table  # noqa: E402
from rlkit.tracking import Run  # noqa: E402

SMALL = ["--task", "sorting", "--steps", 2, "--prompts_per_step", 4, "--max_new_tokens", 2]


@pytest.fixture
def hub(monkeypatch):
    """A hub that this process takes for the real one. Xet, which needs a storage server of its own, is off."""
    with running_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(proxy, raising=False)
        yield hub


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_model_adapter_and_card_arrive(hub, text_dir, tmp_path, capsys):  # noqa: F811
    out = tmp_path / "run"
    options = ["--model", text_dir, "--out", out, "--lora_rank", 2, *SMALL]
    run_here("sft", *options, "--push_to_hub", "sorter", "--hub_private_repo")
    received = hub.repositories["someone/sorter"]
    assert hub.private == {"someone/sorter"} and hub.commits == ["sft-sorting-seed0, 2 steps"] * 2
    adapter = {f"adapter/{name}": content for name, content in files(out / "adapter").items()}
    assert received == {**files(out / "model"), **adapter} and "adapter/adapter_model.safetensors" in received
    assert capsys.readouterr().out.endswith(f"uploaded to {hub.url}/someone/sorter\n")

    card = ModelCard(received["README.md"].decode())
    evaluation = json.loads((out / "eval.json").read_text())
    results = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert results["accuracy"] == pytest.approx(evaluation["accuracy_after"], abs=1e-6)
    assert "# someone/sorter" in card.text and 'AutoModelForCausalLM.from_pretrained("someone/sorter")' in card.text
    assert "![learning curve](learning_curve.png)" in card.text and "are in the folder `adapter`" in card.text
    assert received["learning_curve.png"] == (out / "learning_curve.png").read_bytes()
    assert str(tmp_path) not in card.content

    written = re.search("```yaml\n(.*?)```", card.text, re.DOTALL)[1]
    (tmp_path / "card.yaml").write_text(written)
    options = parse_options(load("sft").Config, "", ["--config", str(tmp_path / "card.yaml")])
    options = json.loads(json.dumps(asdict(options)))
    used = json.loads((out / "config.json").read_text())
    assert {name for name in options if options[name] != used[name]} <= {"config", "out", "model", *OF_THE_PLACE}


def test_an_upload_that_fails_at_the_end_loses_nothing(hub, text_dir, tmp_path):  # noqa: F811
    """With --keep_best, the best model is the one to upload."""
    out, hub.refuses = tmp_path / "run", ("/commit/",)
    expected = (
        f"^sft-sorting-seed0: push_to_hub: .*403.*; the model is complete in {out}/best: upload it with `hf upload "
    )
    with pytest.raises(SystemExit, match=expected):  # without responses, the best model is that of the lowest loss
        run_here("sft", "--model", text_dir, "--out", out, "--push_to_hub", "someone/sorter", "--keep_best",
                 "--evaluate_every", 1, *SMALL[:-1], 0)  # fmt: skip
    assert (out / "best" / "model.safetensors").exists() and (out / "report.html").exists()
    card = (out / "best" / "README.md").read_text()
    assert "# someone/sorter" in card and "It had the best held-out result" in card and "heldout_loss" in card
    assert "# run\n" in (out / "model" / "README.md").read_text()


def test_where_no_model_is_better_than_before_training_the_last_one_is_uploaded(hub, text_dir, tmp_path, capsys):  # noqa: F811
    out = tmp_path / "run"
    run_here("sft", "--model", text_dir, "--out", out, "--push_to_hub", "someone/sorter", "--keep_best",
             "--evaluate_every", 1, *SMALL[:-1], 0, "--lr", 0)  # fmt: skip
    assert not (out / "best").exists() and hub.repositories["someone/sorter"] == files(out / "model")
    assert "push_to_hub: best/ has no model, so the model of the last step is uploaded\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "token", "refuses", "problem"),
    [
        ("a b", TOKEN, (), "expected NAME or OWNER/NAME, got 'a b'"),
        ("runs/a/b", TOKEN, (), "expected NAME or OWNER/NAME, got 'runs/a/b'"),
        (
            "sorter",
            "",
            (),
            "expected a token of the Hugging Face hub, got none; use `hf auth login` or set HF_TOKEN",
        ),
        ("sorter", "hf_old", (), "expected the right to write to 'sorter' at http://127.*Invalid user token"),
        ("other/sorter", TOKEN, ("/create",), "expected the right to write to 'other/sorter' at http://127.*403"),
        ("sorter", TOKEN, ("/auth-check",), "expected the right to write to 'sorter' at http://127.*403"),
        ("sorter", TOKEN, None, "expected the right to write to 'sorter' at http://127.*ConnectError"),
    ],
)
def test_a_hub_that_refuses_ends_the_run_before_it_loads_a_model(
    hub, tmp_path, monkeypatch, name, token, refuses, problem
):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    if refuses is None:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    hub.refuses = refuses or ()
    with pytest.raises(SystemExit, match=f"^sft: push_to_hub: {problem}") as ended:
        run_here("sft", "--model", "no/model", "--out", tmp_path / "run", "--push_to_hub", name, *SMALL)
    assert "\n" not in str(ended.value)
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_card_has_results_but_no_place_of_this_machine(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"vision_config": {}, "architectures": ["SomeVLM"]}')
    config = {"model": "some/vlm", "task": "/home/me/charts.jsonl", "servers": ["http://10.1.2.3:8000"], "lr": 1e-6,
              "reward": "/home/me/rewards.py:right", "out": "/scratch/run", "versions": {"torch": "2.13"}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    evaluations = [{"step": step, "accuracy": step / 100, "accuracy_error": 0.01, "pass@4": 0.5, "unscored": 0}
                   for step in range(0, 60, 2)]  # fmt: skip
    (tmp_path / "eval.json").write_text(json.dumps({"steps": 46, "heldout": 90, "evaluations": evaluations}))
    command = ["torchrun", "a recipe.py", "--task=/home/me/charts.jsonl", "--servers", "http://10.1.2.3:8000"]
    card = ModelCard.load(write_model_card(tmp_path, "model", command, "0.1"))
    assert card.data.base_model == "some/vlm" and card.data.pipeline_tag == "image-text-to-text"
    assert card.data.datasets is None and "AutoModelForImageTextToText" in card.text
    assert {(x.dataset_name, x.metric_type, x.metric_value) for x in card.data.eval_results} == {
        ("charts.jsonl", "accuracy", 0.46), ("charts.jsonl", "pass@4", 0.5)
    }  # fmt: skip
    assert "| **46** | **0.460 (0.440 to 0.480)** | **0.500** |" in card.text and "On 90 held-out rows" in card.text
    assert 10 < card.text.count("\n| ") < 25  # every second evaluation, and that of the model
    assert "torchrun 'a recipe.py' --task=charts.jsonl --servers URL\n" in card.text
    assert "reward: rewards.py:right\n" in card.text and "lr: 1.0e-06\n" in card.text
    assert not any(place in card.content for place in ("/home", "/scratch", "10.1.2.3"))


@pytest.mark.parametrize(
    ("facts", "reads"),
    [
        ({"value_head": True, "vision_config": {}, "architectures": ["SomeVLM"]}, "load_value_model"),
        ({"value_head": True, "architectures": ["SomeLM"]}, "load_value_model"),
        ({"architectures": ["SomeForSequenceClassification"]}, "AutoModelForSequenceClassification.from_pretrained"),
    ],
)
def test_a_card_of_a_reward_model_names_what_reads_it(tmp_path, facts, reads):
    """transformers has a class for some families; vLLM reads none of them."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(facts))
    card = ModelCard.load(write_model_card(tmp_path, "model", ["torchrun"], "0.1"))
    assert card.data.pipeline_tag == "text-classification" and f'model = {reads}("model")' in card.text
    assert card.data.library_name == ("rlkit" if "value_head" in facts else "transformers")
    assert ("AutoProcessor" if "vision_config" in facts else "AutoTokenizer") in card.text
    assert not any(word in card.text for word in ("vllm", "ImageTextToText", "CausalLM"))


def test_the_closing_table_says_what_reads_each_model(tmp_path):
    for folder, facts in (("model", {}), ("critic", {"value_head": True})):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(facts))
    lines = closing_table(Run(tmp_path, {}), ["model", "critic"]).splitlines()
    (model,), (critic,) = ([line for line in lines if f"/{folder} " in line] for folder in ("model", "critic"))
    assert "evaluate.py --model DIR" in model and "evaluate.py" not in critic and "load_value_model(DIR)" in critic


def test_the_closing_table_counts_steps(tmp_path):
    run = Run(tmp_path, {})
    for step, counted in enumerate(("1 step, ", "2 steps, ")):
        run.log(step, {})
        assert f", {counted}" in closing_table(run)


def test_a_card_of_a_run_that_measured_nothing(tmp_path):
    (tmp_path / "model").mkdir()
    card = ModelCard.load(write_model_card(tmp_path, "model", ["torchrun"], "0.1"))
    assert "The run measured nothing on held-out rows." in card.text and card.data.eval_results is None
