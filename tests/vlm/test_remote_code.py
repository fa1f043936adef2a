"""Code that lies beside a model's weights."""

import json

import pytest
import transformers.dynamic_module_utils

from rlkit.vlm import load_model, load_processor
from rlkit.vlm.loading import load_config

CODE = """
from pathlib import Path
from transformers import PretrainedConfig
Path({ran!r}).touch()

class Elsewhere(PretrainedConfig):
    model_type = "elsewhere"
"""


def test_it_runs_where_it_is_asked_for_and_nowhere_else(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    model, ran = tmp_path / "model", tmp_path / "ran"
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps({"model_type": "elsewhere", "auto_map": {"AutoConfig": "code_of_its_own.Elsewhere"}})
    )
    (model / "code_of_its_own.py").write_text(CODE.format(ran=str(ran)))
    for load in (load_config, load_model, load_processor):
        with pytest.raises(ValueError, match=f"(?s)model '{model}': .*trust_remote_code=True"):
            load(str(model))
    assert not ran.exists()
    assert load_config(str(model), trust_remote_code=True).model_type == "elsewhere" and ran.exists()
