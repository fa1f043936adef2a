"""What a resumed run may change, and what it leaves of the options it was started with."""

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from rlkit.plan.recipes import load_recipe
from rlkit.runs import ChangeableOnResume, ModelOptions, RunOptions, TaskOptions, start_run
from rlkit.runs.directory import check_resumed_options, release_directory
from rlkit.runs.option_types import changeable_options
from rlkit.runs.options import SamplingOptions
from rlkit.tracking import CONFIG

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.py"))


@dataclass
class Options(RunOptions):
    lr: float = 0.1
    clip_low: float = 0.2
    servers: ChangeableOnResume[tuple[str, ...]] = ()
    save_every: ChangeableOnResume[int] = 50


@dataclass
class LongOptions(SamplingOptions, ModelOptions, RunOptions):
    pass


@dataclass
class RunOfTaskOptions(TaskOptions, RunOptions):
    pass


@dataclass
class RunOfEpochs(RunOptions):
    ppo_epochs: int = 1


def start(cfg, *rows):
    """A start of the run, up to its first step or to its error."""
    run = start_run(cfg, "task", *rows)
    run.log(0, {})
    run.close()
    release_directory(run.out)


@pytest.fixture
def cfg(tmp_path):
    """The options of a run that was started and can be resumed."""
    cfg = Options(out=str(tmp_path / "run"), servers=("a", "b"))
    start(cfg)
    return replace(cfg, resume=True)


def contents(cfg, tmp_path):
    return {path.name: path.read_text() for path in (tmp_path / "run").iterdir() if path.name != "run.lock"}


def test_the_same_options_are_resumed_in_silence(cfg, capsys):
    start(cfg)
    assert capsys.readouterr().out == ""


def test_a_chat_template_whose_file_has_changed_is_refused(tmp_path, capsys):
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages }}")
    cfg = RunOfTaskOptions(out=str(tmp_path / "run"), chat_template=str(file))
    start(cfg)
    resumed = replace(cfg, resume=True)
    start(resumed)
    file.write_text("{{ messages | tojson }}")
    expected = r"but chat_template had fingerprint \w+, and now fingerprint \w+; to .*--allow_changes chat_template$"
    with pytest.raises(ValueError, match=expected):
        start(resumed)
    start(replace(resumed, allow_changes=("chat_template",)))
    assert "resume: chat_template was " in capsys.readouterr().out
    start(resumed)


def test_what_changes_the_results_is_refused_by_name(cfg, tmp_path, capsys):
    before = contents(cfg, tmp_path)
    changed = replace(cfg, lr=0.2, clip_low=0.3, save_every=9)
    expected = (
        r"^resume: expected the options of the run in .*run, but lr was 0.1 and is 0.2, clip_low was 0.2 and is 0.3; "
        r"to continue with them, add --allow_changes lr clip_low$"
    )
    with pytest.raises(ValueError, match=expected):
        start(changed)
    with pytest.raises(ValueError, match="but clip_low was .*; to continue with them, add --allow_changes clip_low"):
        start(replace(changed, allow_changes=("lr",)))
    assert contents(cfg, tmp_path) == before and capsys.readouterr().out == ""
    start(replace(changed, allow_changes=("lr", "clip_low")))
    assert "resume: lr was 0.1 and is 0.2\nresume: clip_low was 0.2 and is 0.3\n" in capsys.readouterr().out


def test_what_changes_no_result_is_printed(cfg, capsys):
    start(replace(cfg, save_every=9, servers=("c",), watchdog=0.0))
    said = capsys.readouterr().out.splitlines()
    assert sorted(said) == [
        "resume: save_every was 50 and is 9",
        "resume: servers was ['a', 'b'] and is ['c']",
        "resume: watchdog was 600.0 and is 0.0",
    ]


def test_other_data_is_refused(cfg, tmp_path, capsys):
    """The order of rows depends on how many there are: rows that were trained on would be held out."""
    cfg = replace(cfg, out=str(tmp_path / "data"))
    train, heldout = [{"question": str(i)} for i in range(9)], [{"question": "9"}]
    start(replace(cfg, resume=False), train, heldout)
    start(cfg, train, heldout)
    expected = r"but train had 9 rows, fingerprint \w+, and now 8 rows, fingerprint \w+; .* --allow_changes task$"
    with pytest.raises(ValueError, match=expected):
        start(replace(cfg, allow_changes=("heldout_rows",)), train[:8], heldout)
    with pytest.raises(ValueError, match="but heldout had 1 rows, .*; .* --allow_changes task$"):
        start(cfg, train, train[:1])
    assert capsys.readouterr().out == ""
    start(replace(cfg, allow_changes=("heldout_rows",)), train, train[:1])
    start(replace(cfg, allow_changes=("task",)), train[:8], heldout)
    start(cfg, train[:8], heldout)
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_run_with_an_option_that_the_recipe_lost_is_refused(cfg, capsys):
    """Without it the run would continue as another algorithm."""
    path = Path(cfg.out) / CONFIG
    path.write_text(json.dumps({"loss": "gspo", "unset": None, **json.loads(path.read_text())}))
    expected = "but loss was 'gspo' and is no option of this recipe; to continue with them, add --allow_changes loss$"
    with pytest.raises(ValueError, match=expected):
        start(cfg)
    start(replace(cfg, allow_changes=("loss",)))
    assert "resume: loss was 'gspo' and is no option of this recipe\n" in capsys.readouterr().out


def test_a_run_that_did_not_record_its_data_is_resumed(cfg, tmp_path):
    path = tmp_path / "run" / CONFIG
    known = json.loads(path.read_text())
    del known["contents"]
    path.write_text(json.dumps(known))
    start(cfg, [{"question": "1"}], [])
    with pytest.raises(ValueError, match="but train had 1 rows"):  # recorded now
        start(cfg, [{"question": "2"}], [])


def test_other_lengths_that_change_the_factors_of_longrope_are_refused(tmp_path):
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "original_max_position_embeddings": 32}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "original_max_position_embeddings": 32}
    config = AutoConfig.for_model("phi3", rope_parameters=rope, **sizes)
    config.save_pretrained(tmp_path / "model")
    run = str(tmp_path / "run")
    cfg = LongOptions(out=run, model=str(tmp_path / "model"), allow_changes=("max_prompt_tokens",))
    start(cfg)
    start(replace(cfg, resume=True, max_prompt_tokens=28))  # short factors, as before
    expected = "^resume: expected sequences of at most 32 tokens .*, got up to 33: phi3 .* to long ones"
    with pytest.raises(ValueError, match=expected):
        start(replace(cfg, resume=True, max_prompt_tokens=29))
    start(LongOptions(out=run + "2", model=cfg.model, max_prompt_tokens=40))
    expected = "^resume: expected sequences of more than 32 .*, got up to an unknown number of: phi3 .* short ones"
    with pytest.raises(ValueError, match=expected):
        start(replace(cfg, resume=True, out=run + "2"))


def test_the_options_of_each_start_are_kept(cfg, tmp_path):
    start(replace(cfg, save_every=9))
    start(replace(cfg, save_every=8))
    found = {path.name: json.loads(path.read_text())["save_every"] for path in (tmp_path / "run").glob("config*.json")}
    assert found == {"config-1.json": 50, "config-2.json": 9, CONFIG: 8}


def test_a_new_run_is_compared_with_nothing(tmp_path):
    assert check_resumed_options(tmp_path / "run", Options()) == []
    failed = Options(out=str(tmp_path / "run"), lr=0.5)
    start_run(failed, "task").close()  # it never came to a step
    release_directory(tmp_path / "run")
    start(replace(failed, lr=0.1))


def test_an_option_of_a_later_release_is_no_change(cfg, tmp_path):
    """The run's config.json does not have it."""
    path = tmp_path / "run" / CONFIG
    known = json.loads(path.read_text())
    path.write_text(json.dumps({name: x for name, x in known.items() if name != "clip_low"}))
    assert check_resumed_options(tmp_path / "run", cfg) == []


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_options_that_change_results_are_not_changeable(recipe):
    """A recipe that changes only the default of a shared option leaves it as changeable as it was."""
    config = load_recipe(str(recipe)).Config
    changeable, fixed = {"out", "watchdog", "micro_batch_tokens", "rollout", "servers"}, {"seed", "task", "model"}
    changeable |= {"steps", "max_mismatch", "save_every", "teacher_servers"}
    fixed |= {"lr", "group_size", "prompts_per_step", "loss", "kl_coef", "clip_high", "temperature", "dtype"}
    names = {option.name for option in fields(config)}
    assert changeable_options(config) & (changeable | fixed) == changeable & names


def test_an_option_of_a_recipe_of_yours_says_itself_whether_it_may_change(tmp_path):
    @dataclass
    class Mine(RunOptions):
        lines: ChangeableOnResume[int] = 3
        depth: int = 3
        watchdog: float = 60.0

    cfg = Mine(out=str(tmp_path / "run"), resume=True)
    start(replace(cfg, resume=False))
    start(replace(cfg, lines=4, watchdog=0.0))
    with pytest.raises(ValueError, match="but depth was 3 and is 4; to continue .* --allow_changes depth$"):
        start(replace(cfg, lines=5, depth=4))
