"""Programs that are started with `python -m`: their help names them as they are typed."""

import importlib
import sys

import pytest

PROGRAMS = {
    "rlkit.doctor": "rlkit.doctor.__main__",
    "rlkit.data": "rlkit.data.__main__",
    "rlkit.data check": "rlkit.data.__main__",
    "rlkit.plan": "rlkit.plan.__main__",
    "rlkit.report": "rlkit.report.__main__",
    "rlkit.replay": "rlkit.replay.__main__",
    "rlkit.replay.dumps": "rlkit.replay.dumps",
    "rlkit.mismatch": "rlkit.mismatch.__main__",
    "rlkit.rollout.serve": "rlkit.rollout.serve",
    "rlkit.vlm.dequantize": "rlkit.vlm.dequantize",
}


@pytest.mark.parametrize("typed", PROGRAMS)
def test_help_names_the_program(typed, monkeypatch, capsys):
    module = importlib.import_module(PROGRAMS[typed])
    monkeypatch.setattr(sys, "argv", [module.__file__, *typed.split()[1:], "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    shown = " ".join(capsys.readouterr().out.split())
    assert not ended.value.code and f"usage: python -m {typed} " in shown and module.__file__ not in shown
