"""What the tests of the recipes share: a small problem, a model to start from, and ways to run a recipe."""

import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

from rlkit.data import load_task
from rlkit.runs import parse_options
from rlkit.runs.start import one_sentence_set_up_errors
from rlkit.tracking import Run, read_metrics
from rlkit.vlm import build_tiny

HERE = Path(__file__).parent
RECIPES = HERE.parents[1] / "recipes"


@functools.cache
def digits():
    """The built-in task, whose 1,797 images are made once."""
    return load_task("digits")


def few_digits(responses="01"):
    """The built-in images of 0 and 1; a run names it "helpers:few_digits"."""
    task = digits()
    train, heldout = ([row for row in rows if row["answer"] in responses] for rows in (task.train, task.heldout))
    return replace(task, train=train, heldout=heldout)


def seen_shortly():
    """The same with twenty held-out rows, which are most of what a run of one step does."""
    task = few_digits()
    return replace(task, heldout=task.heldout[:20])


def with_a_bad_image():
    """Twelve rows to train on, twenty held out, and an image among each that cannot be read."""
    task = seen_shortly()
    bad = {**task.train[3], "images": [b"no image"], "where": "row 3"}
    return replace(task, train=[*task.train[:11], bad], heldout=[*task.heldout[:3], bad])


def with_a_function():
    """Rows that cannot be pickled."""
    return replace(few_digits(), heldout=[{**row, "check": lambda: 1} for row in few_digits().heldout[:2]])


def second_epoch():
    """The same with twelve rows to train on, so that a run of four steps begins a second epoch."""
    task = seen_shortly()
    return replace(task, train=task.train[:12])


def even_lengths():
    """A task that rewards responses of an even number of characters, which a model with random weights writes, too."""
    task = seen_shortly()
    return replace(task, heldout=task.heldout[:2], reward=length_is_even)


def even_sums():
    """The same of sums, for a pretrained model, which adds few of them right before it is trained."""
    return replace(load_task("addition"), reward=length_is_even)


def length_is_even(text, row):
    return float(len(text) % 2 == 0)


def digit_films():
    """Rows with a video of two frames in place of the image."""

    def film(row):
        (image,) = row["images"]
        return {"question": row["question"], "answer": row["answer"], "video": {"frames": [image, image], "fps": 2}}

    task = seen_shortly()
    train, heldout = ([film(row) for row in rows] for rows in (task.train[:24], task.heldout))
    return replace(task, train=train, heldout=heldout, reward=length_is_even)


@pytest.fixture(scope="session")
def warm_dir(tmp_path_factory):
    return built_warm(tmp_path_factory)


def built_warm(tmp_path_factory):
    """A model that takes an image for a 0, 1 or 2, and knows little of which is which."""
    return built(tmp_path_factory, "warm", lambda: few_digits("012"), warm_up_steps=45, label_noise=0.7, lr=1e-3)


def built_start(tmp_path_factory):
    """A model that knows the form of a response and nothing of its content."""
    return built(tmp_path_factory, "start", few_digits, warm_up_steps=31, label_noise=1.0, lr=1e-3)


@pytest.fixture(scope="session")
def text_dir(tmp_path_factory):
    """A model without eyes, and without any training."""
    return built(tmp_path_factory, "text", lambda: load_task("sorting"), warm_up_steps=0)


def built(tmp_path_factory, name, task, **options):
    """A tiny model; modules and pytest's workers that ask for the same name share it."""
    folder = tmp_path_factory.getbasetemp()
    path = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / name
    with FileLock(f"{path}.lock"):
        if not path.exists():
            build_tiny(path, task().train, **options)
    return path


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), os.environ["PYTHONPATH"]])}


def command(script, *arguments, ranks=0):
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    return [sys.executable, *torchrun, str(script), *map(str, arguments)]


def launch(script, *arguments, ranks=0, fails=False):
    done = subprocess.run(
        command(script, *arguments, ranks=ranks), capture_output=True, text=True, timeout=1800, env=environment()
    )
    assert (done.returncode != 0) == fails, done.stderr[-6000:]
    return done


def run(recipe, *arguments, ranks=0, fails=False):
    """As a person would type it."""
    return launch(RECIPES / f"{recipe}.py", *arguments, ranks=ranks, fails=fails)


def responses_on_page(out):
    """The held-out rows that report.html shows after training, each with its images and responses."""
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', (out / "report.html").read_text())[1]
    responses = json.loads(data)["runs"][0]["responses"]
    heldout = [prompt for prompt in responses["prompts"] if prompt["kind"] == "held-out"]
    shown = [prompt for prompt in heldout if prompt["step"] == heldout[-1]["step"]]
    assert all(responses["images"][name].startswith("data:image/") for prompt in shown for name in prompt["images"])
    return shown


@functools.cache
def load(recipe):
    """The recipe as a module."""
    spec = importlib.util.spec_from_file_location(recipe, RECIPES / f"{recipe}.py")
    module = sys.modules[recipe] = importlib.util.module_from_spec(spec)  # tyro looks its dataclass up there
    spec.loader.exec_module(module)
    return module


def run_here(recipe, *arguments):
    """In this process, which has all imports behind it."""
    module = load(recipe)
    with one_sentence_set_up_errors(recipe):
        module.main(parse_options(module.Config, module.__doc__, [str(a) for a in arguments]))


def run_a_copy(recipe, folder, *arguments):
    """In an empty folder, without a name for the run; returns its directory."""
    shutil.copy(RECIPES / f"{recipe}.py", folder)
    load.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "RECIPES", folder)
        patch.chdir(folder)
        run_here(recipe, *arguments)
        assert Path(load(recipe).__file__).parent == folder
    load.cache_clear()
    (out,) = (folder / "runs").iterdir()
    return out


def stop_after(steps, recipe, *arguments):
    """Run in this process, and break it off once it has logged so many steps."""
    log = Run.log

    def stop(run, step, metrics, **options):
        log(run, step, metrics, **options)
        if step + 1 == steps:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Run, "log", stop)
        run_here(recipe, *arguments)


def assert_resume_is_exact(folder, recipe, *arguments):
    """Four steps over more than an epoch equal those of a run that was broken off before the third step was saved."""
    arguments += ("--task", "helpers:second_epoch", "--steps", 4, "--save_every", 2, "--out")
    run_here(recipe, *arguments, folder / "whole")
    stop_after(3, recipe, *arguments, folder / "run")
    run_here(recipe, *arguments, folder / "run", "--resume")
    assert numbers(folder / "run") == numbers(folder / "whole") and len(numbers(folder / "run")) == 4
    assert evaluation(folder / "run") == evaluation(folder / "whole")
    return numbers(folder / "whole")


def assert_nothing_changes(out, recipe, start, *arguments):
    """Two steps without a learning rate leave every weight as it was, which more of them would, too."""
    run_here(recipe, "--model", start, *arguments, "--lr", 0, "--steps", 2, "--out", out)
    assert evaluation(out)["accuracy_after"] == evaluation(out)["accuracy_before"] and not learned(out)
    before, after = (load_file(Path(folder) / "model.safetensors") for folder in (start, out / "model"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def rows(out):
    """A run's metrics.jsonl, empty where there is none yet."""
    path = Path(out) / "metrics.jsonl"
    return read_metrics(path) if path.exists() else []


def numbers(out):
    """What a run measured, but not how long it took."""
    return [{name: x for name, x in row.items() if not name.startswith("time/")} for row in rows(out)]


def evaluation(out):
    return json.loads((Path(out) / "eval.json").read_text())


def learned(out):
    """Whether both the reward of what was sampled and the accuracy on held-out rows rose by 0.2."""
    rewards, found = [row["reward/mean"] for row in rows(out)], evaluation(out)
    return (
        sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2 and found["accuracy_after"] > found["accuracy_before"] + 0.2
    )


def assert_same_step(row, other):
    """The same samples, and the same numbers up to the order in which ranks add them."""
    assert row.keys() == other.keys()
    for name in row.keys() - {"ratio/max"}:
        exact = name in ("reward/mean", "tokens", "unscored", "skipped_rows")
        assert row[name] == (other[name] if exact else pytest.approx(other[name], rel=1e-3, abs=1e-5)), name


def assert_help_names_every_option(recipe, capsys):
    module = load(recipe)
    with pytest.raises(SystemExit, match="0"):
        parse_options(module.Config, module.__doc__, ["--help"])
    shown = capsys.readouterr().out
    for field in fields(module.Config):
        assert f"--{field.name} " in shown or f"--{field.name}," in shown, field.name
    assert "torchrun" in shown and "https://arxiv.org" in shown
