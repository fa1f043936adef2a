"""`recipes/grpo_vlm.py` as a person runs it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import AutoModelForImageTextToText

from rlkit.data import load_task
from rlkit.tracking import read_metrics
from rlkit.vlm import build_tiny, load_processor

RECIPE = Path(__file__).parents[2] / "recipes" / "grpo_vlm.py"
SMALL = ["--prompts_per_step", "8", "--group_size", "4", "--max_new_tokens", "3"]
PROMISED = [
    "step", "reward/mean", "reward/std", "loss", "kl", "entropy", "grad_norm", "ratio/clip_fraction",
    "mismatch/abs_dlogp", "time/generate", "time/train", "tokens",
]  # fmt: skip


def environment(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more}


def command(*arguments, ranks=0):
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    return [sys.executable, *torchrun, str(RECIPE), *map(str, arguments)]


def run(*arguments, ranks=0, cwd=None, fails=False):
    done = subprocess.run(
        command(*arguments, ranks=ranks), capture_output=True, text=True, timeout=400, env=environment(), cwd=cwd
    )
    assert (done.returncode != 0) == fails, done.stderr[-3000:]
    return done


def numbers(out, skip=("time/",)):
    """What a run measured, but not how long it took."""
    rows = read_metrics(Path(out) / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(skip)} for row in rows]


@pytest.fixture(scope="module")
def warm_dir(tmp_path_factory):
    """The default model after its warm-up."""
    path = tmp_path_factory.mktemp("warm") / "model"
    build_tiny(path, load_task("digits").train)
    return path


@pytest.fixture(scope="module")
def short_run(warm_dir, tmp_path_factory):
    """Six steps that were never killed."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    done = run("--model", warm_dir, "--out", out, "--steps", 6, "--save_every", 2, *SMALL, ranks=1)
    return out, done


def test_leaves_what_it_promises(short_run):
    out, done = short_run
    rows = read_metrics(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(6))
    for row in rows:
        assert set(PROMISED) <= set(row)
        assert all(np.isfinite(value) for value in row.values())
    assert all(row["mismatch/abs_dlogp"] < 1e-5 for row in rows)
    assert rows[0]["kl"] < 1e-6 < rows[-1]["kl"]
    evaluation = json.loads((out / "eval.json").read_text())
    assert evaluation["heldout"] == 360 and evaluation["heldout_skipped"] == 0
    assert evaluation["accuracy_before"] < 0.35 and 0 <= evaluation["accuracy_after"] <= 1
    config = json.loads((out / "config.json").read_text())
    assert config["steps"] == 6 and config["versions"]["torch"]
    assert (out / "learning_curve.png").read_bytes()[:4] == b"\x89PNG"
    page = (out / "report.html").read_text()
    assert page.count("<tr class=") == 40 and "data:image/png;base64," in page
    assert [p.name for p in sorted((out / "checkpoints").iterdir())] == ["step_4", "step_6"]
    assert AutoModelForImageTextToText.from_pretrained(out / "model").num_parameters() > 5e5
    assert load_processor(str(out / "model")).image_processor.merge_size == 2
    assert "held-out accuracy before" in done.stdout and str(out / "report.html") in done.stdout
    assert "step/s" in done.stderr or "s/step" in done.stderr


@pytest.mark.parametrize("kill_after", [1, 4])
def test_resume_is_exact(short_run, warm_dir, tmp_path, kill_after):
    """Killed before its first checkpoint, or between two: the numbers from there on are those of the whole run."""
    whole, _ = short_run
    out = tmp_path / "killed"
    arguments = ["--model", warm_dir, "--out", out, "--steps", 6, "--save_every", 2, *SMALL]
    with subprocess.Popen(
        command(*arguments), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        deadline = time.time() + 200
        while time.time() < deadline and process.poll() is None:
            if (out / "metrics.jsonl").exists() and len(read_metrics(out / "metrics.jsonl")) >= kill_after:
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert kill_after <= len(read_metrics(out / "metrics.jsonl")) < 6
    run(*arguments, "--resume")
    assert numbers(out) == numbers(whole)
    assert json.loads((out / "eval.json").read_text()) == json.loads((whole / "eval.json").read_text())


@pytest.mark.parametrize("ulysses", [1, 2])
def test_two_ranks_sample_the_same(short_run, warm_dir, tmp_path, ulysses):
    """Each with half of the rows, or both with half of each sequence."""
    whole, _ = short_run
    split = ["--ulysses_sequence_parallel_size", ulysses]
    run("--model", warm_dir, "--out", tmp_path / "two", "--steps", 2, *SMALL, "--save_every", 50, *split, ranks=2)
    first, expected = numbers(tmp_path / "two")[0], numbers(whole)[0]
    assert first["reward/mean"] == expected["reward/mean"] and first["tokens"] == expected["tokens"]
    for name in ("loss", "entropy", "grad_norm", "kl"):
        assert first[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name


def test_learns(warm_dir, tmp_path):
    """Half a minute of it; the whole of it is `make learn`."""
    run("--model", warm_dir, "--out", tmp_path / "run", "--steps", 60, "--lr", 1e-3)
    rewards = [row["reward/mean"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    evaluation = json.loads((tmp_path / "run" / "eval.json").read_text())
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2
    assert evaluation["accuracy_after"] > evaluation["accuracy_before"] + 0.2


def test_options_of_the_real_thing(warm_dir, tmp_path):
    """LoRA, packed fused logprobs, checkpointing, several updates a batch, on a jsonl file with an image column."""
    rows = load_task("digits").train[:40]
    for i, row in enumerate(rows):
        row["images"][0].save(tmp_path / f"{i}.png")
    lines = [{"image": f"{i}.png", "question": r["question"], "answer": r["answer"]} for i, r in enumerate(rows)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run(
        "--model", warm_dir, "--task", tmp_path / "rows.jsonl", "--out", tmp_path / "run", "--steps", 2, *SMALL,
        "--lora_rank", 4, "--lora_alpha", 8, "--target_modules", "all-linear", "--exclude_modules", ".*visual.*",
        "--use_fused_kernels", "--use_remove_padding", "--enable_gradient_checkpointing", "--freeze_vision_tower",
        "--updates_per_batch", 2, "--gpu_memory_utilization", 0.5, "--no-trust_remote_code", "--rollout", "hf",
        "--seed", 3,
    )  # fmt: skip
    assert "LoRA in model.language_model" in done.stdout
    assert numbers(tmp_path / "run")[1]["kl"] > 0
    assert json.loads((tmp_path / "run" / "eval.json").read_text())["heldout"] == 4
    assert "peft" not in AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "model").__class__.__module__


def test_bad_rows_are_skipped_and_counted(warm_dir, tmp_path):
    rng = np.random.default_rng(0)
    lines = []
    for i in range(30):
        Image.fromarray(rng.integers(0, 255, (56, 56, 3), dtype=np.uint8)).save(tmp_path / f"{i}.png")
        lines.append({"image": f"{i}.png", "question": "What digit is this?", "answer": str(i % 10)})
    (tmp_path / "3.png").write_bytes(b"")
    (tmp_path / "5.png").write_bytes((tmp_path / "5.png").read_bytes()[:60])
    lines[7]["question"] = "long " * 50
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run(
        "--model", warm_dir, "--task", tmp_path / "rows.jsonl", "--out", tmp_path / "run", "--steps", 4,
        "--max_prompt_tokens", 60, *SMALL,
    )  # fmt: skip
    seen = done.stdout + done.stderr
    for row, why in ((4, "cannot be read"), (6, "cannot be read"), (8, "more than the limit of 60")):
        assert any(f"rows.jsonl row {row}: " in line and why in line for line in seen.splitlines()), row
    counted = sum(row["skipped_rows"] for row in numbers(tmp_path / "run"))
    counted += json.loads((tmp_path / "run" / "eval.json").read_text())["heldout_skipped"]
    assert counted >= 3


def test_unjudged_answers_stop_the_run_past_their_limit(warm_dir, tmp_path):
    (tmp_path / "shaky.py").write_text(
        "from dataclasses import replace\nfrom rlkit.data import load_task\n\n"
        "def reward(text, row):\n"
        "    if row['answer'] in '0':\n        raise RuntimeError('judge is down')\n"
        "    return None if row['answer'] in SOME else float(text == row['answer'])\n\n"
        "SOME = '1'\n\n"
        "def task():\n    return replace(load_task('digits'), reward=reward)\n\n"
        "def most():\n    global SOME\n    SOME = '123456789'\n    return task()\n"
    )
    arguments = ["--model", warm_dir, "--steps", 2, "--prompts_per_step", 32, "--group_size", 8, "--max_unjudged", 0.5]
    good = subprocess.run(
        command(*arguments, "--out", tmp_path / "some", "--task", "shaky:task"),
        env=environment(PYTHONPATH=str(tmp_path)), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert good.returncode == 0, good.stderr[-2000:]
    assert "RuntimeError: judge is down" in good.stderr
    assert all(0 < row["unjudged"] < 128 for row in numbers(tmp_path / "some"))
    bad = subprocess.run(
        command(*arguments, "--out", tmp_path / "most", "--task", "shaky:most"),
        env=environment(PYTHONPATH=str(tmp_path)), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert bad.returncode == 1
    assert "step 0: only 0 of 256 answers could be judged" in bad.stderr


def test_vllm_by_one_word(short_run, warm_dir, tmp_path):
    """The same prompts and the same greedy answers; the trainer finds the sampler's logprobs right at every step."""
    out = tmp_path / "vllm"
    done = run("--model", warm_dir, "--out", out, "--steps", 3, *SMALL, "--rollout", "vllm")
    assert "Traceback" not in done.stderr
    rows = read_metrics(out / "metrics.jsonl")
    assert len(rows) == 3 and all(row["mismatch/abs_dlogp"] < 1e-5 for row in rows)
    before = [json.loads((path / "eval.json").read_text())["accuracy_before"] for path in (out, short_run[0])]
    assert before[0] == before[1]


def test_bad_input_is_one_clear_message(warm_dir, short_run, tmp_path):
    """Several at once, as each start costs seconds."""
    (tmp_path / "no_image.jsonl").write_text('{"question": "q", "answer": "a"}\n' * 20)
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_bytes((warm_dir / name).read_bytes())
    cases = {
        ("--task", "digit", "--out", tmp_path / "a"): "task 'digit': expected a built-in (",
        ("--task", tmp_path / "no_image.jsonl", "--out", tmp_path / "b"): "no image column (images or image)",
        ("--model", bare, "--out", tmp_path / "c"): "a vision-language model without a processor",
        ("--model", tmp_path, "--out", tmp_path / "d"): "the directory holds no config.json",
        ("--model", warm_dir, "--out", short_run[0]): "holds a run already; --resume goes on with it",
        ("--model", warm_dir, "--out", tmp_path / "e", "--rollout", "tgi"): "no rollout 'tgi'; there are: hf, s",
    }
    before = sorted((p, p.stat().st_mtime_ns) for p in short_run[0].rglob("*"))
    running = {
        arguments: subprocess.Popen(command(*arguments), env=environment(), stderr=subprocess.PIPE, text=True)
        for arguments in cases
    }
    for arguments, message in cases.items():
        _, errors = running[arguments].communicate(timeout=200)
        assert running[arguments].returncode == 1, errors
        assert message in errors.strip().splitlines()[-1], errors[-1500:]
        assert "Traceback" not in errors
    assert before == sorted((p, p.stat().st_mtime_ns) for p in short_run[0].rglob("*"))


def test_resume_from_a_checkpoint_that_is_cut_short(short_run, warm_dir, tmp_path):
    import shutil

    out = tmp_path / "run"
    shutil.copytree(short_run[0], out)
    shard = next((out / "checkpoints" / "step_6").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:1000])
    metrics = (out / "metrics.jsonl").read_text()
    done = run("--model", warm_dir, "--out", out, "--steps", 8, *SMALL, "--resume", fails=True)
    assert f"{shard.name} has 1000 bytes" in done.stderr.strip().splitlines()[-1]
    assert (out / "metrics.jsonl").read_text() == metrics
    shutil.rmtree(out / "checkpoints" / "step_6")
    run("--model", warm_dir, "--out", out, "--steps", 6, "--save_every", 2, *SMALL, "--resume")
    assert numbers(out)[:4] == numbers(short_run[0])[:4]


def test_help_names_every_option():
    done = run("--help")
    for option in (
        "model", "task", "rollout", "seed", "steps", "out", "resume", "freeze_vision_tower", "use_remove_padding",
        "ulysses_sequence_parallel_size", "servers",
        "use_fused_kernels", "enable_gradient_checkpointing", "lora_rank", "lora_alpha", "target_modules",
        "exclude_modules", "gpu_memory_utilization", "trust_remote_code", "clip_high",
    ):  # fmt: skip
        assert f"--{option}" in done.stdout, option
