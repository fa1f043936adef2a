"""A trainer that is absent or of another version is named in one sentence; importing the room imports no trainer."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from rlkit.plugins import _versions

ROOT = Path(__file__).parents[2]
HOSTS = {"verl": "verl", "trl": "trl"}  # module of rlkit.plugins -> distribution


def versions(installed):
    def version(package):
        if package not in installed:
            raise PackageNotFoundError(package)
        return installed[package]

    return version


@pytest.mark.parametrize(("found", "fits"), [("0.9.1", True), ("0.9", True), ("0.90.1", False), ("0.10.0", False)])
def test_versions(monkeypatch, found, fits):
    monkeypatch.setattr(_versions, "version", versions({"verl": found}))
    if fits:
        return _versions.require("verl", "0.9")
    with pytest.raises(ImportError) as error:
        _versions.require("verl", "0.9")
    assert str(error.value) == f"verl: expected version 0.9 for rlkit.plugins, got {found}"


@pytest.mark.parametrize("module", HOSTS)
def test_a_trainer_that_is_absent(monkeypatch, module, caplog):
    monkeypatch.setattr(_versions, "version", versions({}))
    monkeypatch.delitem(sys.modules, f"rlkit.plugins.{module}", raising=False)
    sentence = rf"^{HOSTS[module]}: expected version [\d.]+ for rlkit.plugins, got none installed$"
    with pytest.raises(ImportError, match=sentence):
        __import__(f"rlkit.plugins.{module}")
    if module == "verl":  # which hides the error of an entry point
        assert caplog.messages == ["verl: expected version 0.9 for rlkit.plugins, got none installed"]


def test_the_room_imports_no_trainer(tmp_path):
    code = "import sys, rlkit.plugins; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert not {"torch", "verl", "trl", "transformers", "lightning"} & set(done.stdout.decode().split())


def test_the_entry_point_is_the_module():
    import configparser

    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert "rlkit = rlkit.plugins.verl" in setup["options.entry_points"]["verl.plugins"]
