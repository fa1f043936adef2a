"""Recipes on rows with audios: a tiny Omni thinker learns to tell low tones from high ones in wav files."""

import base64
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "vlm")]
import helpers  # noqa: E402
from helpers import evaluation, run_here  # noqa: E402
from media_rows import save_model, wav  # noqa: E402
from test_omni_videos import film_with_tone  # noqa: E402

ROWS = 24
av = pytest.importorskip("av", reason="needs PyAV, of the extra audio")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with the tiny model, and rows with wav files, every third of them inside a message."""
    folder, draw = tmp_path_factory.mktemp("audios"), np.random.default_rng(0)
    save_model(folder / "model")
    lines = []
    for i in range(ROWS):
        is_high = i % 2
        sound = wav(draw.uniform(*((2000, 3000) if is_high else (200, 400))), draw.uniform(0.1, 0.3))
        (folder / f"{i}.wav").write_bytes(sound)
        lines.append({"audio": f"{i}.wav", "question": "High?", "answer": str(is_high)})
        if i % 3 == 0:
            data = {"data": base64.b64encode(sound).decode(), "format": "wav"}
            parts = [{"type": "input_audio", "input_audio": data}, {"type": "text", "text": "High?"}]
            lines[-1] = {"messages": [{"role": "user", "content": parts}], "answer": str(is_high)}
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def tensors_of(folder):
    tensors = load_file(folder / "model.safetensors")
    return {name.removeprefix("thinker."): x for name, x in tensors.items()}


def changed(before, after):
    """The names of the tensors in which two exported models differ."""
    before, after = tensors_of(before), tensors_of(after)
    assert before.keys() == after.keys()
    return {name for name, x in before.items() if not torch.equal(x, after[name])}


def assert_responses_are_kept_with_the_sound(out, prompts):
    """In samples.jsonl, as wav files, and with a player on the page."""
    kept = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert len(kept) == prompts and all(record["question"] == "High?" for record in kept)
    heard = {audio["file"] for record in kept for audio in record["audios"]}
    assert all(len(record["audios"]) == 1 for record in kept)
    assert all((out / name).read_bytes()[:4] == b"RIFF" for name in heard)
    assert (out / "report.html").read_text().count('"data:audio/wav;base64,') == len(heard) >= 6


def test_recipes_learn_from_audios(files):
    """Seen: sft takes held-out accuracy from 0 to 1.0; grpo continues with the audio tower frozen."""
    given = ["--task", files / "rows.jsonl", "--heldout", "0.25", "--prompts_per_step", 8, "--max_new_tokens", 2]
    run_here("sft", "--model", files / "model", "--out", files / "sft", *given, "--steps", 20, "--lr", 1e-2)
    found = evaluation(files / "sft")
    assert found["accuracy_after"] >= found["accuracy_before"] + 0.5 and found["heldout_skipped"] == 0
    assert found["heldout_loss_after"] < 0.3 * found["heldout_loss_before"]
    moved = {name for name in changed(files / "model", files / "sft" / "model") if name.startswith("audio_tower.")}
    assert {"audio_tower.conv1.weight", "audio_tower.proj.weight"} <= moved and len(moved) > 10
    assert_responses_are_kept_with_the_sound(files / "sft", prompts=12)  # held-out rows, before and after

    more = ["--group_size", 4, "--steps", 2, "--lr", 1e-3, "--freeze_audio_tower"]
    run_here("grpo_vlm", "--model", files / "sft" / "model", "--out", files / "grpo", *given, *more)
    steps = helpers.rows(files / "grpo")
    assert all(np.isfinite(value) for step in steps for value in step.values())
    assert all(step["mismatch/abs_dlogp"] < 1e-5 and 0 < step["reward/mean"] <= 1 for step in steps)
    assert any(step["grad_norm"] > 0 for step in steps) and steps[0]["skipped_rows"] == 0
    moved = changed(files / "sft" / "model", files / "grpo" / "model")
    assert "model.embed_tokens.weight" in moved and not any(name.startswith("audio_tower.") for name in moved)
    assert_responses_are_kept_with_the_sound(files / "grpo", prompts=16)  # and two prompts of each step


def test_a_recipe_hears_the_sound_of_videos(files):
    """By an option; the rows are those of the test above, as films with the tones."""
    for i, pitch in enumerate((300.0, 2500.0) * 3):
        (files / f"{i}.mp4").write_bytes(film_with_tone(av, 1.0, pitch))
    lines = [json.dumps({"video": f"{i}.mp4", "question": "High?", "answer": str(i % 2)}) + "\n" for i in range(6)]
    (files / "films.jsonl").write_text("".join(lines))
    given = ["--model", files / "model", "--task", files / "films.jsonl", "--heldout", "0.34", "--prompts_per_step", 2]
    more = ["--group_size", 2, "--steps", 1, "--max_new_tokens", 2, "--video_sound", "--lr", 1e-3]
    run_here("grpo_vlm", "--out", files / "films", *given, *more)
    (step,) = helpers.rows(files / "films")
    assert step["skipped_rows"] == 0 and step["mismatch/abs_dlogp"] < 1e-5
    kept = [json.loads(line) for line in (files / "films" / "samples.jsonl").read_text().splitlines()]
    assert all(len(record["images"]) == len(record["audios"]) == 1 for record in kept) and len(kept) >= 4
