"""Local paths that do not exist, and packages that are not installed: one sentence each, and no hub is asked."""

import logging
import sys

import pytest

from rlkit.data import load_task, open_stream
from rlkit.data.lookup import check_source, requires_extra
from rlkit.rewards import boxes_iou
from rlkit.vlm import load_model, load_processor


@pytest.fixture
def nobody_asks(monkeypatch):
    """The hub, which would be asked again and again for half a minute."""
    import datasets
    import transformers

    def ask(*args, **kwargs):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(datasets, "load_dataset", ask)
    for name in ("AutoConfig", "AutoProcessor", "AutoTokenizer"):
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", ask)


LOADERS = {
    load_task: "data set",
    load_model: "model",
    load_processor: "model",
    lambda name: open_stream(name, "train"): "data set",
}


@pytest.mark.parametrize("load", LOADERS)
def test_a_path_that_does_not_exist_is_named_before_the_hub_is_asked(tmp_path, monkeypatch, nobody_asks, load):
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "second").mkdir()
    monkeypatch.chdir(tmp_path)
    for name, hint in {
        "./model": "",
        "runs/first/model": "; 'runs/first' has nothing",
        "runs/third/model": "; 'runs' has first, second",
        f"{tmp_path}/model": f"; '{tmp_path}' has runs",
    }.items():
        with pytest.raises(ValueError) as caught:
            load(name)
        expected = f"{LOADERS[load]}: expected a directory that exists or owner/name on the hub"
        assert str(caught.value) == f"{expected}, got {name!r}{hint}"


def test_the_directory_of_a_run_points_to_its_model(tmp_path, nobody_asks):
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "config.json").write_text('{"lr": 0.1, "model": "tiny"}')
    (run / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    for load in (load_model, load_processor):
        with pytest.raises(ValueError) as caught:
            load(str(run))
        expected = "model: expected a directory with a model, got that of a run"
        assert str(caught.value) == f"{expected}; use '{run}/model'"
    check_source(str(run / "model"), "model")
    check_source(str(run), "data set")
    (run / "config.json").write_text('{"model_type": "qwen2"}')  # a model with another one in it
    check_source(str(run), "model")


def test_the_most_similar_names_are_listed(tmp_path):
    for name in ("responses.jsonl", "checkpoints", "config.json", "eval.json", "init", "metrics.jsonl", "model"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=f"; '{tmp_path}' has model, "):
        check_source(f"{tmp_path}/modle", "model")


def test_a_name_that_may_be_of_the_hub_is_asked_for(tmp_path, monkeypatch, caplog):
    (tmp_path / "runs" / "first").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.WARNING):
        for name in ("Qwen/Qwen2.5-VL-7B-Instruct", "gpt2", "runs", "runs/first"):
            check_source(name, "model")
        assert caplog.text == ""
        check_source("runs/third", "model")
    assert "model 'runs/third': no such local directory, looking on the hub; 'runs' has first" in caplog.text


def test_a_missing_package_names_its_extra(tmp_path, monkeypatch):
    (tmp_path / "t.parquet").write_bytes(b"")
    for package, name, call in (
        ("datasets", "recipes", lambda: load_task(str(tmp_path / "t.parquet"))),
        ("sklearn.datasets", "recipes", lambda: load_task("digits")),
        ("scipy.optimize", "rewards", lambda: boxes_iou("[1, 2, 3, 4]", {"answer": [1, 2, 3, 4]})),
    ):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, package, None)
            with pytest.raises(ImportError) as caught:
                call()
        assert str(caught.value) == (
            f"package {package}: expected it to be installed, got none; in the checkout: pip install -e '.[{name}]'"
        )
    with pytest.raises(ValueError, match="another"), requires_extra("vlm"):
        raise ValueError("another error is not touched")
