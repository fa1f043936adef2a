"""`recipes/grpo_async.py`, and `grpo_vlm.py --rollout vllm_server`, with a real vLLM server on the CPU."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import tyro

from rlkit.rollout.serve import serving
from rlkit.tracking import read_metrics

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "rollout")]
from helpers import assert_help_names_every_option, load, run, run_here, warm_dir  # noqa: E402, F401  (a fixture)
from test_vllm_server import OPTIONS, free_ports  # noqa: E402

SMALL = ["--prompts_per_step", "8", "--group_size", "4", "--max_new_tokens", "3"]


@pytest.fixture(scope="module")
def server(warm_dir, tmp_path_factory):  # noqa: F811
    with serving(str(warm_dir), port=free_ports(1), logs=tmp_path_factory.mktemp("server"), options=OPTIONS) as urls:
        yield next(iter(urls))


def run_async(*arguments):
    """In this process; a server that it started would end with it."""
    module = load("grpo_async")
    with ExitStack() as stack:
        module.main(tyro.cli(module.Config, args=[str(a) for a in arguments], use_underscores=True), stack)


def test_samples_ahead_and_stays_within_its_bound(warm_dir, server, tmp_path):  # noqa: F811
    out = tmp_path / "ahead"
    options = ["--model", warm_dir, "--servers", server, "--steps", 6, "--max_staleness", 1, *SMALL]
    done = run("grpo_async", *options, "--out", out)
    assert "Traceback" not in done.stderr
    rows = read_metrics(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(6))
    assert rows[0]["staleness/max"] == 0 and rows[0]["mismatch/abs_dlogp"] < 1e-5  # the weights arrived
    old = [row for row in rows if row["staleness/max"] == 1.0]  # asked for one update before; a late start makes it 0
    assert old and all(row["staleness/max"] <= 1.0 for row in rows)
    assert all(row["mismatch/abs_dlogp"] > 1e-5 for row in old if row["step"] > 1)  # by other weights
    assert {"accuracy_before", "accuracy_after"} <= json.loads((out / "eval.json").read_text()).keys()
    assert (out / "model" / "config.json").exists() and (out / "report.html").exists()


def test_taking_turns_and_going_on(warm_dir, server, tmp_path):  # noqa: F811
    """Without staleness every token is by the weights that it trains, also after a resume, which sends them again."""
    options = ["--model", warm_dir, "--servers", server, "--out", tmp_path, "--max_staleness", 0, "--save_every", 2]
    run_async(*options, *SMALL, "--steps", 2)
    run_async(*options, *SMALL, "--steps", 4, "--resume")
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(4))
    assert all(row["staleness/max"] == 0 and row["mismatch/abs_dlogp"] < 1e-5 for row in rows)


def test_grpo_vlm_with_a_server_by_one_word(warm_dir, server, tmp_path):  # noqa: F811
    options = ["--model", warm_dir, "--rollout", "vllm_server", "--servers", server, "--steps", 2, *SMALL]
    run_here("grpo_vlm", *options, "--out", tmp_path / "run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 2 and all(row["mismatch/abs_dlogp"] < 1e-5 for row in rows)


def test_bad_input_is_one_clear_message(warm_dir, tmp_path):  # noqa: F811
    options = ["--model", warm_dir, "--out", tmp_path / "a", "--servers", "http://127.0.0.1:9", "--rollout", "tgi"]
    with pytest.raises(SystemExit, match="grpo_async: no rollout 'tgi'; there are:"):
        run_async(*options)


def test_help_names_every_option(capsys):
    assert_help_names_every_option("grpo_async", capsys)
