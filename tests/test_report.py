"""What is on the page of a run, and in samples.jsonl; tests/browser/live_report.py looks at the page in a browser."""

import base64
import hashlib
import io
import json
import re
import resource
import subprocess
import sys
import wave
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import rlkit.report
from rlkit.data import prompt_sample
from rlkit.data.media import Audio
from rlkit.engines.distributed import init_distributed
from rlkit.report import curves, prompt_record, write_page, write_report
from rlkit.report import responses as kept
from rlkit.report.harnesses import read_results
from rlkit.runs import PolicySampler, Responses
from rlkit.tracking import CONFIG, EVAL, METRICS, SAMPLES, Run

EVIL = '</script><script>alert("x")</script><img src=x onerror=y>'


class Page(HTMLParser):
    """The elements of a page, what its attributes could fetch, and the text of its scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.links, self.policy, self.open = [], [], "", ""
        self.inside = {"script": [], "style": [], "title": []}
        self.feed(text)
        self.data = json.loads(self.inside["script"][0])

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        attributes = dict(attrs)
        self.links += [attributes[name] for name in ("src", "href", "srcset", "data", "action") if name in attributes]
        if attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = attributes["content"]
        if tag in self.inside:
            self.open = tag
            self.inside[tag].append("")

    def handle_endtag(self, tag):
        self.open = ""

    def handle_data(self, data):
        if self.open:
            self.inside[self.open][-1] += data


def response(text: str, **facts):
    prompt = prompt_sample(
        [1, 2], row={"question": "What is it?", "answer": "7"}, images=[Image.new("RGB", (300, 200))]
    )
    return replace(prompt, text=text, **facts)


def check_page(path) -> Page:
    """The page fetches nothing, its policy allows its own scripts and styles only, and its images can be read."""
    page = Page(path.read_text())
    assert all(link.startswith("#") for link in page.links)  # links within the page
    assert page.tags.count("script") == 3 and page.tags.count("style") == 2
    assert not {"link", "iframe", "object", "base", "form", "img", "audio"} & set(page.tags)
    assert "default-src 'none'; img-src data:; media-src data:;" in page.policy and "unsafe" not in page.policy
    for source in page.inside["script"][1:] + page.inside["style"]:
        assert base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() in page.policy
    for run in page.data["runs"]:
        for url in run["responses"]["images"].values():
            Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/webp;base64,")))).verify()
        assert all(seconds_of(url) > 0 for url in run["responses"]["audios"].values())
    return page


def seconds_of(url: str) -> float:
    """Of the sound in a data URL."""
    with wave.open(io.BytesIO(base64.b64decode(url.removeprefix("data:audio/wav;base64,")))) as file:
        return file.getnframes() / file.getframerate()


def full_run(out) -> Run:
    run = Run(out, {"lr": 1e-3, "steps": 5, "note": EVIL})
    for step in range(5):
        run.log(step, {"reward/mean": step / 5, "loss": 1.0, "time/train": 2.0, "kl": 0.25})
    run.log_evaluation(accuracy_before=0.125, accuracy_after=0.875, heldout=360, tasks={"a": {"accuracy": 0.5}})
    return run


@pytest.fixture
def no_png(monkeypatch):
    """matplotlib takes most of a report's time."""
    monkeypatch.setattr(rlkit.report, "draw_learning_curve", lambda *_: None)


def test_report_is_one_self_contained_page(tmp_path):
    full_run(tmp_path)
    samples = [response("seven", reward=1.0, finish_reason="length"), response("7", reward=0.0), response("?")]
    samples = [replace(sample, group_id=i) for i, sample in enumerate(samples)]
    path = write_report(tmp_path, samples, title="A & B")
    assert path == tmp_path / "report.html"
    page = check_page(path)
    (run,) = page.data["runs"]
    assert page.inside["title"] == ["A & B"] and not page.data["running"]
    assert run["metrics"]["reward/mean"] == [0.0, 0.2, 0.4, 0.6, 0.8] and run["last"] == 4 and run["steps"] == 5
    assert run["evaluation"] == {"accuracy_before": 0.125, "accuracy_after": 0.875, "heldout": 360}
    assert run["tasks"] == {"a": {"accuracy": 0.5}}
    shown = run["responses"]["prompts"]
    assert [record["responses"][0]["reward"] for record in shown] == [1.0, 0.0, None]
    assert {(r["kind"], r["step"], r["question"], r["expected"]) for r in shown} == {
        ("held-out", 5, "What is it?", "7")
    }
    assert shown[0]["responses"][0]["finish_reason"] == "length" and len(run["responses"]["images"]) == 1
    picture = Image.open(tmp_path / "learning_curve.png")
    assert picture.format == "PNG" and min(picture.size) > 200
    assert sorted(found.name for found in tmp_path.iterdir()) == [
        CONFIG, EVAL, "images", "learning_curve.png", METRICS, "report.html", SAMPLES,
    ]  # fmt: skip


def test_held_out_responses_of_the_last_step_are_shown_once(tmp_path, no_png):
    """A run that --patience ends has evaluated its last step already."""
    full_run(tmp_path)
    samples = [response(str(i), reward=0.0, group_id=i) for i in (3, 57, 120)]
    kept.append_records(tmp_path, [prompt_record(tmp_path, [sample], "held-out", 5) for sample in samples[:2]])
    (run,) = check_page(write_report(tmp_path, samples)).data["runs"]
    assert [record["prompt"] for record in run["responses"]["prompts"]] == ["3", "57", "120"]


def test_text_cannot_end_the_data(tmp_path, no_png):
    """No text that a model, a data set or an option brings is markup."""
    full_run(tmp_path)
    sample = replace(response(EVIL, reward=0.0), row={"question": EVIL, "answer": EVIL})
    page = check_page(write_report(tmp_path, [sample], title=EVIL))
    (run,) = page.data["runs"]
    (record,) = run["responses"]["prompts"]
    assert record["question"] == record["expected"] == record["responses"][0]["text"] == EVIL
    assert page.inside["title"] == [EVIL] and json.loads(run["config"])["note"] == EVIL


def test_text_that_looks_like_a_mark_of_the_template(tmp_path, no_png):
    full_run(tmp_path)
    page = check_page(write_report(tmp_path, [response("{{ scripts }}", reward=0.0)], title="{{ data }}"))
    assert page.inside["title"] == ["{{ data }}"]
    assert page.data["runs"][0]["responses"]["prompts"][0]["responses"][0]["text"] == "{{ scripts }}"


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"loss": 1.0}, {"entropy": 2.0, "unknown": "text"}],
        [{"reward/mean": float("nan"), "loss": float("inf")}, {"reward/mean": None}],
    ],
)
def test_report_of_metrics_that_miss_keys(tmp_path, rows):
    run = Run(tmp_path, {})
    run.drop_metrics_from(0)
    for step, row in enumerate(rows):
        run.log(step, row)
    check_page(write_report(tmp_path, [response("x")]))


def test_report_before_the_last_evaluation(tmp_path, no_png):
    Run(tmp_path, {}).log(0, {"reward/mean": 0.5})
    Run(tmp_path, {}).log_evaluation(accuracy_before=0.25)
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 1, "rew')
    (run,) = check_page(write_report(tmp_path)).data["runs"]
    assert run["evaluation"] == {"accuracy_before": 0.25} and run["metrics"]["step"] == [0]


def test_a_page_while_the_run_goes_on_says_so(tmp_path):
    full_run(tmp_path)
    data = check_page(write_page(tmp_path / "report.html", [tmp_path], running=True, every=120.0)).data
    assert data["running"] and data["every"] == 120.0
    assert not list(tmp_path.glob("*.part"))


def test_runs_beside_each_other(tmp_path):
    for name in "ab":
        full_run(tmp_path / name)
    Run(tmp_path / "b", {"lr": 5.0}).log(9, {"reward/mean": 1.0, "memory/train": 3.0})
    command = [sys.executable, "-m", "rlkit.report"]
    subprocess.run([*command, "a", "b"], cwd=tmp_path, check=True)
    page = check_page(tmp_path / "compared.html")
    first, second = page.data["runs"]
    assert page.inside["title"] == ["a, b"] and (first["name"], second["name"]) == ("a", "b")
    assert [title for title, _ in page.data["groups"]] == ["Reward", "Optimisation", "Time", "Memory"]
    assert "memory/train" not in first["metrics"] and second["metrics"]["step"] == [0, 1, 2, 3, 4, 9]
    assert (first["options"]["lr"], second["options"]["lr"]) == ("0.001", "5.0")
    nowhere = subprocess.run([*command, "a", "--out", "no/a.html"], cwd=tmp_path, capture_output=True, text=True)
    message = "rlkit.report: out: expected a file in a directory that exists, got no/a.html\n"
    assert nowhere.returncode == 1 and nowhere.stderr.endswith(message)
    refused = subprocess.run([*command, "a", "c"], cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 1 and "runs: expected directories with metrics.jsonl, got c" in refused.stderr


LM_EVAL = {  # of lm-eval 0.4.13, shortened
    "results": {
        "gsm8k": {
            "name": "gsm8k", "alias": "gsm8k", "sample_len": 12, "exact_match,strict-match": 0.25,
            "exact_match_stderr,strict-match": 0.125, "acc,none": 0.5, "acc_stderr,none": "N/A",
        }
    },
    "configs": {"gsm8k": {}},
}  # fmt: skip
METRICS_OF_A_SCORER = {"accuracy": {"name": "accuracy", "value": 0.75}, "stderr": {"name": "stderr", "value": 0.1}}
INSPECT = {  # of inspect-ai 0.3.285, shortened
    "eval": {"task": "maps"},
    "results": {"total_samples": 9, "scores": [{"name": "match", "metrics": METRICS_OF_A_SCORER}]},
}


def test_results_of_other_tools_are_added(tmp_path):
    full_run(tmp_path / "a")
    both = {"total_samples": 9, "scores": [{"name": name, "metrics": METRICS_OF_A_SCORER} for name in ("match", "f1")]}
    written = {"lm.json": LM_EVAL, "inspect.json": INSPECT, "two.json": {"eval": {"task": "two"}, "results": both}}
    for name, content in written.items():
        (tmp_path / name).write_text(json.dumps(content))
    earlier = json.loads((tmp_path / "a" / "eval.json").read_text())["tasks"]
    command = [sys.executable, "-m", "rlkit.report"]
    subprocess.run([*command, "a", "--add", *written], cwd=tmp_path, check=True)
    [run] = check_page(tmp_path / "a" / "report.html").data["runs"]
    assert run["tasks"] == {
        **earlier,
        "gsm8k (lm-eval)": {
            "rows": 12.0, "exact_match strict-match": 0.25, "exact_match strict-match_error": 0.125, "acc": 0.5,
        },
        "maps (inspect)": {"rows": 9.0, "accuracy": 0.75, "accuracy_error": 0.1},
        "two (inspect)": {
            "rows": 9.0, "match accuracy": 0.75, "match accuracy_error": 0.1,
            "f1 accuracy": 0.75, "f1 accuracy_error": 0.1,
        },
    }  # fmt: skip
    assert json.loads((tmp_path / "a" / "eval.json").read_text())["accuracy_after"] == 0.875


def test_results_without_numbers(tmp_path):
    """A task without samples has null in place of numbers."""
    scores = [{"name": "match", "metrics": {"accuracy": {"name": "accuracy", "value": None}}}]
    for name, content in {
        "lm.json": {"results": {"gsm8k": None}, "configs": {}},
        "inspect.json": {"eval": {"task": "maps"}, "results": {"total_samples": 0, "scores": scores}},
    }.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert read_results(tmp_path / "lm.json") == {"gsm8k (lm-eval)": {}}
    assert read_results(tmp_path / "inspect.json") == {"maps (inspect)": {"rows": 0.0}}


@pytest.mark.parametrize("content", ["", "[]", '{"results": 3}', '{"results": {"gsm8k": {}}}'])
def test_files_without_results_are_named(tmp_path, content):
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(
        ValueError, match=r"^add: expected results of lm-eval or a log of inspect-ai, got .*other.json$"
    ):
        read_results(tmp_path / "other.json")


def test_long_runs_keep_rare_metrics_and_extremes():
    rows = [{"step": i, "loss": float(i == 7777), "norm": -float(i == 4999)} for i in range(9001)]
    for i in range(1, 9001, 50):
        rows[i]["rare"] = i
    for i in range(9001):
        rows[i] |= {"often": 1.0} if i % 10 else {}
    rows[4321]["once"] = 5.0
    columns = curves.numbers(rows)
    values = {name: [x for x in column if x is not None] for name, column in columns.items()}
    assert values["rare"] == list(range(1, 9001, 50)) and values["once"] == [5.0]
    assert max(values["loss"]) == 1 and min(values["norm"]) == -1
    assert columns["step"][0] == 0 and columns["step"][-1] == 9000 and sorted(columns["step"]) == columns["step"]
    assert 3000 <= len(values["loss"]) < 3200 and len(values["often"]) < 3200


def test_evaluations_during_the_run_are_a_curve(tmp_path):
    run = full_run(tmp_path)
    found = [
        {"step": 0, "accuracy": 0.1, "accuracy_error": 0.01},
        {"step": 3, "accuracy": 0.5},
        {"step": 7, "accuracy": 0.6},
    ]
    run.log_evaluation(evaluations=found)
    (data,) = check_page(write_page(tmp_path / "report.html", [tmp_path])).data["runs"]
    assert data["metrics"]["step"] == [0, 1, 2, 3, 4, 7] and data["last"] == 4
    assert data["metrics"]["heldout/accuracy"] == [0.1, None, None, 0.5, None, 0.6]
    assert data["metrics"]["reward/mean"] == [0.0, 0.2, 0.4, 0.6, 0.8, None]
    assert "heldout/accuracy_error" not in data["metrics"]


# --- curves


def test_every_metric_is_in_one_group():
    names = (
        "time/train loss kl mismatch/abs_dlogp reward_part/form reward/std reward/mean memory/x tokens other".split()
    )
    found = {title: [name for name, _ in metrics] for title, metrics in curves.grouped(names)}
    assert found == {
        "Reward": ["reward/mean", "reward/std", "reward_part/form"],
        "Optimisation": ["loss", "kl"],
        "Sampler against trainer": ["mismatch/abs_dlogp"],
        "Responses": ["tokens"],
        "Time": ["time/train"],
        "Memory": ["memory/x"],
        "Other": ["other"],
    }


def test_a_nan_step_does_not_end_a_curve():
    rows = [{"step": i, "reward/mean": x} for i, x in enumerate([1.0, float("nan"), 3.0, None, 5.0])]
    assert curves.numbers(rows) == {"step": [0, 1, 2, 3, 4], "reward/mean": [1.0, None, 3.0, None, 5.0]}


def test_long_runs_are_drawn_with_fewer_points(monkeypatch):
    monkeypatch.setattr(curves, "MOST_POINTS", 4)
    found = curves.numbers([{"step": i, "loss": float(i)} for i in range(10)])
    assert found == {"step": [0, 3, 6, 9], "loss": [0.0, 3.0, 6.0, 9.0]}  # the last step is always drawn


def test_smooth():
    assert curves.smooth([2.0] * 5) == pytest.approx([2.0] * 5) and curves.smooth([]) == []
    assert curves.smooth([0.0, 1.0], 0.9) == pytest.approx([0.0, 0.1 / 0.19])


# --- kept responses


def read_records(path):
    index = kept.RecordIndex(path)
    return index.read(index.update())


def some_responses():
    """Three prompts with two responses each; the second response to the last one could not be scored."""
    image = Image.new("RGB", (1200, 600), "blue")
    samples, rewards = [], [0.0, 1.0, 0.25, 0.5, 1.0, float("nan")]
    for i in range(6):
        row = {"question": f"prompt {i // 2}", "answer": "x"}
        prompt = prompt_sample([1, 2], row=row, images=[image], group_id=10 + i // 2)
        samples.append(replace(prompt, text=f"response {i}", mask=[False, True], finish_reason="stop"))
    return Responses(samples, torch.tensor(rewards), {"form": torch.arange(6.0)})


def test_a_step_keeps_all_responses_to_its_first_prompts(tmp_path):
    init_distributed()
    cfg = SimpleNamespace(reward_threads=0, max_new_tokens=6, group_size=2, log_prompts=2)
    engine = SimpleNamespace(global_sum=lambda x: x, data_parallel_group=None)
    run = Run(tmp_path, {})
    rollout = SimpleNamespace(generate=None)
    sampler = PolicySampler(cfg, run, SimpleNamespace(reward=None), None, engine, rollout)
    responses = some_responses()
    metrics = sampler.metrics(responses)
    sampler.report(responses, metrics)
    run.log(5, metrics)
    first, second = read_records(tmp_path / SAMPLES)
    (name,) = first["images"]
    responses = first.pop("responses")
    place = {"step": 5, "kind": "training", "prompt": "10"}
    assert first == {**place, "question": "prompt 0", "expected": "x", "images": [name], "audios": []}
    assert [(one["text"], one["reward"], one["parts"]) for one in responses] == [
        ("response 0", 0.0, {"form": 0.0}),
        ("response 1", 1.0, {"form": 1.0}),
    ]
    assert all(one["finish_reason"] == "stop" and one["tokens"] == 1 for one in responses)
    assert second["images"] == [name] and [one["reward"] for one in second["responses"]] == [0.25, 0.5]
    assert Image.open(tmp_path / name).size == (512, 256) and re.fullmatch(r"images/[0-9a-f]{16}\.webp", name)


def test_what_could_not_be_scored_has_no_reward(tmp_path):
    samples = some_responses().generated[4:]
    record = prompt_record(
        tmp_path, [replace(s, reward=r) for s, r in zip(samples, (1.0, float("nan")), strict=True)], "", 0
    )
    assert [one["reward"] for one in record["responses"]] == [1.0, None]


def test_a_file_is_indexed_without_its_responses(tmp_path, monkeypatch):
    """The first page of a resumed run indexes a whole samples.jsonl, most of which are responses."""
    record = prompt_record(tmp_path, some_responses().generated[:2], "training", 0)
    responses = [{**record["responses"][0], "text": 'x", "responses": [' * 1000}]
    records = [{**record, "step": step, "question": '"a", "responses": [', "responses": responses} for step in range(3)]
    kept.append_records(tmp_path, records)
    kept.append_records(tmp_path, [dict(reversed({**record, "step": 3}.items()))])  # of another program
    with (tmp_path / SAMPLES).open("a") as file:
        file.write(json.dumps({**record, "step": 4}))  # without an end of the line
    parsed, parse = [], kept._parse_record
    monkeypatch.setattr(kept, "_parse_record", lambda line: parsed.append(len(line)) or parse(line))
    index = kept.RecordIndex(tmp_path / SAMPLES)
    lines = index.update()
    assert [line.step for line in lines] == [0, 1, 2, 3, 4] and max(parsed) < 1000 < lines[0].size
    found = index.read(lines)
    assert [one["question"] for one in found[:3]] == ['"a", "responses": ['] * 3
    assert [one["responses"] for one in found] == [responses] * 3 + [record["responses"]] * 2


def test_a_page_with_too_many_responses_shows_evenly_spaced_steps(tmp_path, monkeypatch):
    samples = some_responses().generated[:2]
    record = prompt_record(tmp_path, samples, "training", 0)
    kept.append_records(tmp_path, [{**record, "step": step} for step in range(20)])
    image = (tmp_path / record["images"][0]).stat().st_size
    monkeypatch.setattr(kept, "MOST_BYTES", 5 * len(json.dumps(record)) + 4 * image // 3)
    found = kept.responses_for_page(tmp_path)
    assert [r["step"] for r in found["prompts"]] in (list(range(19 % n, 20, n)) for n in (4, 5))
    assert found["kept"] == 20 and len(found["images"]) == 1


def test_a_page_shows_some_prompts_of_a_step_that_is_too_large(tmp_path, monkeypatch):
    record = prompt_record(tmp_path, some_responses().generated[:2], "training", 0)
    large = [{**record, "step": 0, "prompt": i, "images": []} for i in range(12)]
    kept.append_records(tmp_path, [*large, {**record, "step": 1, "prompt": 0, "images": []}])
    monkeypatch.setattr(kept, "MOST_BYTES", 13 * len(json.dumps(record)))
    assert len(kept.responses_for_page(tmp_path)["prompts"]) == 13
    monkeypatch.setattr(kept, "MOST_BYTES", 4 * len(json.dumps(record)))
    monkeypatch.setattr(kept, "_index", kept.RecordIndex)
    kept.append_records(tmp_path, [{**one, "step": 2} for one in large])
    found = kept.responses_for_page(tmp_path)
    assert [(one["step"], one["prompt"]) for one in found["prompts"]] == [(2, str(i)) for i in range(0, 12, 3)]
    assert found["kept"] == 25


def test_another_file_with_the_same_end_is_read_anew(tmp_path):
    """Also one written over the old file, and one that begins like it."""
    record = prompt_record(tmp_path, some_responses().generated[:2], "training", 0)
    path, index = tmp_path / SAMPLES, kept.RecordIndex(tmp_path / SAMPLES)

    def write(*steps):
        path.write_text("".join(json.dumps({**record, "step": step}) + "\n" for step in steps))

    def steps():
        return [line.step for line in index.update()]

    write(0, 1, 2)
    assert steps() == [0, 1, 2]
    write(5, 6, 2)
    assert steps() == [5, 6, 2]
    path.rename(tmp_path / "old")
    write(5, 7, 2)
    assert steps() == [5, 7, 2]


def test_a_page_reads_only_new_responses_and_those_it_shows(tmp_path, monkeypatch):
    record = prompt_record(tmp_path, some_responses().generated[:2], "training", 0)
    monkeypatch.setattr(kept, "MOST_BYTES", 5 * len(json.dumps(record)))
    parsed = []
    parse = kept._parse_record
    monkeypatch.setattr(kept, "_parse_record", lambda line: parsed.append(line) or parse(line))

    def shown():
        parsed.clear()
        return [one["step"] for one in kept.responses_for_page(tmp_path)["prompts"]]

    kept.append_records(tmp_path, [{**record, "step": step} for step in range(100)])
    first = shown()
    assert len(parsed) == 100 + len(first) and first[-1] == 99
    kept.append_records(tmp_path, [{**record, "step": 100}])
    second = shown()
    assert len(parsed) == 1 + len(second) < 10 and second[-1] == 100
    with (tmp_path / SAMPLES).open("a") as file:
        line = json.dumps({**record, "step": 101})
        file.write(line[:50])
        file.flush()
        assert shown() == second  # this line is being written
        file.write(line[50:] + "\n")
    assert shown()[-1] == 101
    Run(tmp_path, {}).drop_metrics_from(3)  # another file
    assert shown() == [0, 1, 2]


def heard(out, step, *seconds):
    """A record of a prompt with tones of these lengths."""
    tones = [Audio(0.5 * np.sin(np.arange(int(8000 * length)) / 4).astype("float32"), 8000) for length in seconds]
    sample = prompt_sample([1, 2], row={"question": "What is heard?", "answer": "x"}, audios=tones)
    return prompt_record(out, [replace(sample, text="x", reward=1.0)], "training", step)


def test_audios_are_on_the_page_and_long_ones_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "SAVED_SECONDS", 2.0)
    kept.append_records(tmp_path, [heard(tmp_path, 0, 0.5, 3.25), heard(tmp_path, 1, 0.5)])
    responses = check_page(write_page(tmp_path / "report.html", [tmp_path])).data["runs"][0]["responses"]
    (short, long), (again,) = (record["audios"] for record in responses["prompts"])
    assert short == again and (short["seconds"], long["seconds"], responses["audio_seconds"]) == (0.5, 3.25, 2.0)
    assert {name: seconds_of(url) for name, url in responses["audios"].items()} == {
        short["file"]: 0.5,
        long["file"]: 2.0,
    }
    with wave.open(str(tmp_path / short["file"])) as file:
        found = np.frombuffer(file.readframes(4000), "<i2") / 32767
    np.testing.assert_allclose(found, 0.5 * np.sin(np.arange(4000) / 4), atol=2e-5)


def test_a_page_with_too_much_sound_has_that_of_the_newest_steps(tmp_path, monkeypatch):
    kept.append_records(tmp_path, [heard(tmp_path, step, 0.1 + step / 100) for step in range(4)])
    files = [record["audios"][0]["file"] for record in read_records(tmp_path / SAMPLES)]
    sizes = [4 * (tmp_path / name).stat().st_size // 3 for name in files]
    monkeypatch.setattr(kept, "MOST_BYTES_OF_AUDIOS", sum(sizes[2:]) + 1)
    found = kept.responses_for_page(tmp_path)
    assert sorted(found["audios"]) == sorted(files[2:]) and len(found["prompts"]) == 4


@pytest.mark.parametrize(
    "line",
    ["1", "[]", "null", '{"step": 0}', '{"step": "x", "kind": "training", "prompt": 0, "responses": []}', "{" * 100_000,
     '{"step": 0, "kind": "training", "prompt": 0, "question": 1, "expected": null, "images": 3, "responses": []}',
     '{"step": 0, "kind": "training", "prompt": 0, "question": 1, "expected": null, "images": [], "responses": [3]}',
     '{"step": 0, "kind": "training", "prompt": 0, "question": 1, "expected": "", "images": [], "responses": [], '
     '"audios": [{"file": "a.wav"}]}',
     '{"step": 1e999, "kind": "training", "prompt": 0, "question": 1, "expected": "", "images": [], "responses": []}'],
)  # fmt: skip
def test_damaged_lines_are_left_out(tmp_path, line):
    good = prompt_record(tmp_path, some_responses().generated[:2], "training", 0)
    (tmp_path / SAMPLES).write_text(f"{line}\n{json.dumps(good)}\n{line[:5]}")
    assert len(kept.responses_for_page(tmp_path)["prompts"]) == 1


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", pytest.param("9" * 400, id="400 digits")])
def test_numbers_that_are_not_finite_are_left_out(tmp_path, number):
    """JSON may contain numbers that are infinite in Python and in a browser."""
    one = f'{{"text": "x", "reward": {number}, "parts": {{"right": {number}}}, "tokens": {number}}}'
    line = f'{{"step": 0, "kind": "training", "prompt": 0, "question": "", "expected": "", "responses": [{one}], '
    (tmp_path / SAMPLES).write_text(f'{line}"images": [], "audios": [{{"file": "a.wav", "seconds": {number}}}]}}')
    data = check_page(write_page(tmp_path / "report.html", [tmp_path])).data["runs"][0]
    (record,) = data["responses"]["prompts"]
    assert record["audios"] == [{"file": "a.wav", "seconds": None}]
    assert record["responses"] == [{"text": "x", "reward": None, "parts": {"right": None}, "tokens": None}]


@pytest.mark.parametrize("name", [pytest.param("a" * 300, id="long"), "a\0b", "\ud800"])
def test_names_that_no_file_can_have_are_left_out(tmp_path, name):
    for folder in ("images", "audios"):
        (tmp_path / folder).mkdir()
    files = {"images": [f"images/{name}"], "audios": [{"file": f"audios/{name}", "seconds": 1.0}]}
    texts = {"question": "", "expected": "", "responses": []}
    (tmp_path / SAMPLES).write_text(json.dumps({"step": 0, "kind": "training", "prompt": 0, **texts, **files}))
    found = kept.responses_for_page(tmp_path)
    assert len(found["prompts"]) == 1 and found["images"] == found["audios"] == {}


def test_a_full_disk_leaves_no_cut_files(tmp_path):
    """A later response with the same image or audio would take the cut file for a saved one."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype="uint8"))
    tone = Audio(np.sin(np.arange(8000) / 4).astype("float32"), 8000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        saved = kept.save_image(tmp_path, image), kept.save_audio(tmp_path, tone)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert saved == ("", {"file": "", "seconds": 1.0})
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]
    assert (tmp_path / kept.save_image(tmp_path, image)).stat().st_size > 1000
    assert (tmp_path / kept.save_audio(tmp_path, tone)["file"]).stat().st_size == 16044


def test_a_broken_image_or_audio_does_not_end_the_run(tmp_path):
    assert kept.save_image(tmp_path, None) == ""
    assert kept.save_audio(tmp_path, Audio(np.array(["x"]), 1)) == {"file": "", "seconds": 1.0}


def test_only_images_and_audios_of_the_run_are_read(tmp_path):
    """samples.jsonl may come from somebody else."""
    Image.new("RGB", (4, 4)).save(tmp_path / "secret.webp")
    run = tmp_path / "run"
    (run / "images").mkdir(parents=True)
    for name in ("../secret.webp", "images/../../secret.webp", str(tmp_path / "secret.webp"), "images/none.webp"):
        assert kept.data_url(run, name) == ""
    (tmp_path / "secret.wav").write_bytes(b"RIFF")
    for name in ("../secret.wav", "audios/../../secret.wav", str(tmp_path / "secret.wav")):
        record = {**heard(run, 0, 0.1), "audios": [{"file": name, "seconds": 1.0}]}
        (run / SAMPLES).write_text(json.dumps(record))
        found = kept.responses_for_page(run)
        assert found["prompts"][0]["audios"][0]["file"] == name and found["audios"] == {}


def test_links_among_images_and_audios_are_not_followed(tmp_path):
    """A run's directory may come from somebody else, too."""
    run = tmp_path / "run"
    run.mkdir()
    for folder, name in (("images", "x.webp"), ("audios", "x.wav")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(b"secret")
        (run / folder).symlink_to(tmp_path / folder)  # a link to a folder
        assert kept.data_url(run, f"{folder}/{name}") == ""
        (run / folder).unlink()
        (run / folder).mkdir()
        (run / folder / name).symlink_to(tmp_path / folder / name)
        assert kept.data_url(run, f"{folder}/{name}") == ""
        (run / folder / name).unlink()
        (run / folder / name).write_bytes(b"own")
        assert kept.data_url(run, f"{folder}/{name}").endswith(base64.b64encode(b"own").decode())
