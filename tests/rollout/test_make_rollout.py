"""Rollouts by name: built-in ones, registered ones, and what is said of wrong names and options."""

import inspect
import sys
from importlib import import_module
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
from transformers import GenerationConfig, LlamaConfig

import rlkit.rollout
from rlkit.rollout import make_rollout, register_rollout
from rlkit.rollout.sampling import model_end_token_ids


class ModelRollout:
    """Takes some of the arguments that a recipe passes, and an option of its own."""

    def __init__(self, *, processor, model, flavour="plain"):
        self.options = (processor, model, flavour)


class CodeRollout:
    """Runs code from the model's repository if it is told to."""

    def __init__(self, *, processor, trust_remote_code=False):
        self.trust_remote_code = trust_remote_code


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(rlkit.rollout, "_ROLLOUTS", dict(rlkit.rollout._ROLLOUTS))
    monkeypatch.setitem(sys.modules, "elsewhere", SimpleNamespace(ModelRollout=ModelRollout, CodeRollout=CodeRollout))


def test_a_registered_rollout_gets_the_arguments_that_it_names(registered, tiny_dir):
    register_rollout("mine", "elsewhere:ModelRollout")
    shared = {"gathered": print, "processor": "p", "model": tiny_dir, "urls": ("http://a",)}
    assert make_rollout("mine", **shared).options == ("p", tiny_dir, "plain")
    assert make_rollout("mine", **shared, flavour="sweet").options == ("p", tiny_dir, "sweet")
    with pytest.raises(ValueError, match="mine rollout: expected options processor, model, flavour; got flavor"):
        make_rollout("mine", **shared, flavor="sweet")


def test_code_from_the_models_repository_is_trusted_by_rollouts_that_run_it(registered, tiny_dir):
    register_rollout("mine", "elsewhere:ModelRollout")
    register_rollout("code", "elsewhere:CodeRollout")
    shared = {"processor": "p", "model": tiny_dir}
    assert make_rollout("code", **shared, trust_remote_code=True).trust_remote_code
    assert not make_rollout("code", **shared).trust_remote_code
    assert make_rollout("mine", **shared, trust_remote_code=True).options == ("p", tiny_dir, "plain")
    for backend in ("vllm", "vllm_server", "sglang"):
        module, _, name = rlkit.rollout._ROLLOUTS[backend].partition(":")
        assert "trust_remote_code" in inspect.signature(getattr(import_module(module), name)).parameters


def test_an_installed_package_can_register_one(registered, monkeypatch, tiny_dir):
    point = EntryPoint("theirs", "elsewhere:ModelRollout", "rlkit.rollouts")
    monkeypatch.setattr(
        "rlkit.rollout.entry_points", lambda group: [point] if group == "rlkit.rollouts" else pytest.fail(group)
    )
    assert isinstance(make_rollout("theirs", processor="p", model=tiny_dir), ModelRollout)


def test_built_in_rollouts_are_registered_and_others_are_named(registered):
    assert set(rlkit.rollout._ROLLOUTS) == {"hf", "vllm", "vllm_server", "sglang"}
    with pytest.raises(ValueError, match="rollout: expected one of hf, sglang, vllm, vllm_server, got 'tgi'"):
        make_rollout("tgi", processor=None)


def test_a_model_without_a_generation_config_ends_responses_as_its_config_says(tmp_path):
    """Servers and recipes take the end tokens from one function."""
    config, tokenizer = LlamaConfig(eos_token_id=[5, 7]), SimpleNamespace(eos_token_id=2)
    config.save_pretrained(tmp_path)
    assert model_end_token_ids(str(tmp_path), config, tokenizer) == [2, 5, 7]
    GenerationConfig(eos_token_id=9).save_pretrained(tmp_path)
    assert model_end_token_ids(str(tmp_path), config, tokenizer) == [2, 9]
