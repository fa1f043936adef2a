"""Model directories of strangers: pickled weights, chat templates, and configurations that ask for all memory.

Code beside the weights is in tests/vlm/test_remote_code.py.
"""

import json
import os
import resource
import shutil

import pytest
import torch

from rlkit.data import load_task
from rlkit.engines.value_head import load_value_model
from rlkit.vlm import build_tiny, encode_prompt, load_model, load_processor
from rlkit.vlm.loading import load_config

ROW = {"question": "What?", "where": "row 1"}


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    path = tmp_path_factory.mktemp("honest") / "model"
    build_tiny(path, load_task("sorting").train[:8], warm_up_steps=0)
    return path


@pytest.fixture
def model(honest, tmp_path):
    return shutil.copytree(honest, tmp_path / "model")


class Program:
    """When it is unpickled, it makes a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


def test_pickled_weights_are_read_without_running_code(model, tmp_path):
    weights = load_model(str(model)).state_dict()
    (model / "model.safetensors").unlink()
    torch.save({**weights, "model.norm.weight": Program(tmp_path / "ran")}, model / "pytorch_model.bin")
    for load in (load_model, load_value_model):
        with pytest.raises(ValueError, match="expected weights that can be read without running code: safetensors, or"):
            load(str(model))
    assert not (tmp_path / "ran").exists()
    torch.save(weights, model / "pytorch_model.bin")
    assert all(torch.equal(x, weights[name]) for name, x in load_model(str(model)).state_dict().items())


TEMPLATES = {
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "access to attribute '__class__' of 'str' object is unsafe",
    "{{ cycler.__init__.__globals__.os.mkdir('RAN') }}": "access to attribute '__init__' of 'type' object is unsafe",
    "{{ messages.append(1) }}": "access to attribute 'append' of 'list' object is unsafe",
    "{% include '/etc/passwd' %}": "no loader",
    "{% import 'os' as os %}": "no loader",
    "{% for i in range(10 ** 9) %}x{% endfor %}": "Range too big",
    "{{ 'a' * 10 ** 14 }}": "MemoryError",
    "{{ 1 / 0 }}": "division by zero",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "recursion",
    "{{ messages[7].content.x }}": "no element 7",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_chat_templates_run_in_a_sandbox_and_fail_with_a_sentence(template, model, tmp_path):
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "chat_template.jinja").write_text(template.replace("RAN", str(tmp_path / "ran")))
    with pytest.raises(ValueError, match=rf"(?s)^row 1: chat template: .*{TEMPLATES[template]}"):
        encode_prompt(load_processor(str(model)), ROW)
    assert not (tmp_path / "ran").exists()


CONFIGS = [
    ({"vocab_size": 10**12}, r"expected a config.json for at most \d+ weights, as its files have \d+ bytes, got one"),
    ({"vocab_size": 200_000}, r"expected a config.json for at most \d+ weights, as its files have \d+ bytes, got one"),
    ({"hidden_size": 10**6}, "expected a config.json for at most"),
    ({"intermediate_size": 10**9}, "expected a config.json for at most"),
    ({"head_dim": 10**9}, "expected a config.json for at most"),
    ({"num_hidden_layers": 200, "layer_types": ["full_attention"] * 200}, "expected a config.json for at most"),
    ({"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers: expected at most 1000 in config.json, got"),
    ({"num_hidden_layers": 500}, "config.json: .*`num_hidden_layers` .500. must be equal"),
    ({"num_attention_heads": 10**9}, "config.json: ZeroDivisionError"),
    ({"num_attention_heads": 0}, "config.json: ZeroDivisionError"),
    ({"hidden_size": -128}, "config.json: "),
    ({"hidden_size": "large"}, "config.json: "),
    ({"intermediate_size": 400}, "expected weights in the shapes of its config.json, got others"),
]


@pytest.mark.parametrize(("changes", "message"), CONFIGS, ids=lambda x: str(x)[:40])
def test_a_configuration_that_does_not_fit_its_weights_is_refused_before_memory_is_taken(changes, message, model):
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, **changes}))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for load in (load_model, load_value_model):
        with pytest.raises(ValueError, match=f"(?s)^model '{model}': (num_|config.json: )?.*{message}"):
            load(str(model))
    if "shapes" not in message:
        with pytest.raises(ValueError, match=message):
            load_model(str(model), on_meta=True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


def test_layers_of_any_part_are_counted(model):
    settings = json.loads((model / "config.json").read_text())
    for name in ("num_layers", "depth", "depths", "n_layer", "encoder_layers", "num_blocks"):
        count = [2, 10**7] if name == "depths" else 10**7
        nested = {**settings, "vision": {"inner": {name: count}}}
        (model / "config.json").write_text(json.dumps(nested))
        with pytest.raises(
            ValueError, match=rf"vision.inner.{name}: expected at most 1000 in config.json, got 1000000"
        ):
            load_config(str(model))


def test_the_check_draws_no_random_numbers_and_takes_an_honest_model(honest):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    load_model(str(honest))
    assert torch.equal(before, torch.get_rng_state())
