"""What is measured of the policy's responses, against loops; `tests/recipes/test_two_ranks.py` has it on two ranks."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlkit.data import append_response, prompt_sample
from rlkit.engines.distributed import init_distributed
from rlkit.rollout import Sampling
from rlkit.runs import PolicySampler, Prompts, Responses, evaluate_heldout
from rlkit.runs.closing import closing_table
from rlkit.runs.responses import LearningWarnings, accuracy, too_few_scored
from rlkit.tracking import EVAL, Run
from rlkit.vlm import load_processor

sys.path.insert(0, str(Path(__file__).parent))
from some_responses import EVERY, expected, measure, of_a_rank


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    init_distributed()


def same(x):
    return x


def test_measurements_are_those_of_loops():
    found, right = measure(of_a_rank(0, 1)), expected()
    assert found["metrics"] == pytest.approx(right["metrics"])
    assert found["accuracy"] == pytest.approx(right["accuracy"])
    assert found["stops"] == right["stops"] == [True, True, False, False]  # 3 of 8 were not scored


def test_draws_are_added_up():
    """As one rank's responses of several draws are."""
    added = of_a_rank(0, 2) + of_a_rank(1, 2)
    assert measure(added)["metrics"] == pytest.approx(expected()["metrics"]) and len(added.scored) == len(EVERY) - 3


def unscored(count):
    return Responses(of_a_rank(0, 1).generated[:count], torch.full((count,), math.nan))


def test_nothing_that_was_scored():
    assert accuracy(unscored(2), same) == {"unscored": 2} and accuracy(Responses(), same) == {}
    for responses in (unscored(2), Responses()):  # a share below 1 asks for one scored response at least
        assert too_few_scored(responses, same, 0.99) and not too_few_scored(responses, same, 1.0)
    found = measure(Responses())["metrics"]
    assert found["response_length/mean"] == found["response_length/truncated"] == found["unscored"] == 0


def test_why_too_few_were_scored():
    assert too_few_scored(unscored(2), same, 0.5) == "responses: expected at least 50% of 2 scored, got 0"
    problem = too_few_scored(Responses(skipped=["row 3: too long", "row 4: too long"]), same, 0.5)
    assert problem.endswith("2 rows were skipped, the first because of row 3: too long")


def evaluating(folder, generate, reward, named):
    """A sampler with a context of 64 tokens, and what a run records and prints."""
    recorded, said = {}, []
    nothing = lambda *_: None  # noqa: E731
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=4096))
    engine = SimpleNamespace(global_sum=same, get_per_tensor_param=lambda: iter(()), config=config)
    rollout = SimpleNamespace(wake_up=nothing, update_weights=nothing, sleep=nothing, max_model_len=64)
    cfg = SimpleNamespace(reward_threads=0, max_new_tokens=6, reward=named)
    run = SimpleNamespace(
        phase=nothing, stop=sys.exit, is_main_process=False, log_evaluation=recorded.update, out=folder, step=0,
        print=said.append, running_step=None,
    )  # fmt: skip
    sampler = PolicySampler(cfg, run, SimpleNamespace(reward=reward), None, engine, rollout, generate=generate)
    return sampler, recorded, said


@pytest.mark.parametrize(("named", "value"), [("", None), ("mine:reward", None), ("mine:reward", 0.0)])
def test_a_reward_that_is_named_and_judges_nothing_ends_the_run(named, value, tmp_path):
    """A file without responses has nothing to judge with; its held-out loss is measured all the same."""

    def generate(prompts, sampling, n, on_finished):
        on_finished(0, of_a_rank(0, 1).generated[:2])
        return of_a_rank(0, 1).generated[:2]

    sampler, recorded, _ = evaluating(tmp_path, generate, lambda text, row: value, named)
    heldout = Prompts([prompt_sample([1])])
    if named and value is None:
        reason = "^held-out responses: expected at least one of 2 scored, got 0: 2 x a reward of None$"
        with pytest.raises(SystemExit, match=reason):
            evaluate_heldout(sampler, heldout, "before")
    else:
        assert len(evaluate_heldout(sampler, heldout, "before", heldout_loss=0.5)) == (0 if value is None else 2)
        assert recorded["heldout_loss_before"] == 0.5 and recorded["heldout"] == 1
        assert ("accuracy_before" in recorded) == (value is not None)
    sampler.cfg.max_new_tokens = 0
    assert evaluate_heldout(sampler, heldout, "after") == []


def test_a_task_without_held_out_rows_is_named(tmp_path):
    """A file of one row has none."""
    sampler, *_ = evaluating(tmp_path, lambda *_, **__: [], None, "")
    sampler.cfg.max_failed_rewards = 0.2
    with pytest.raises(SystemExit, match="^held-out rows: expected at least one, got none; name some with --heldout$"):
        evaluate_heldout(sampler, Prompts([]), "before")
    with pytest.raises(
        SystemExit, match="^held-out responses: expected at least one, got none: 1 rows were skipped, .* a$"
    ):
        evaluate_heldout(sampler, Prompts([], ["a"]), "before")


def test_heldout_prompts_without_room_for_a_response_get_none(tmp_path):
    """Rows with given responses are encoded for their loss; the sampler's context of 64 tokens may hold fewer."""
    answered = []

    def generate(prompts, sampling, n, on_finished):
        answered.extend(prompt.group_id for prompt in prompts)
        return []

    sampler, recorded, said = evaluating(tmp_path, generate, None, "")
    lengths = (10, 58, 59, 200, 60, 60, 60, 60, 60)
    heldout = Prompts([replace(prompt_sample([1] * length), group_id=i) for i, length in enumerate(lengths)])
    for when in ("before", "after"):
        evaluate_heldout(sampler, heldout, when, heldout_loss=0.5)
    assert answered == [0, 1] * 2 and recorded["heldout"] == len(lengths)
    assert said == [
        "held-out: 7 prompts of more than 58 tokens leave no room for a response of 6 tokens, and get none: "
        "group 2 (59), group 3 (200), group 4 (60), group 5 (60), group 6 (60), ..."
    ]
    sampler.cfg.max_new_tokens = 0
    evaluate_heldout(sampler, heldout, "before")
    assert len(said) == 1


@pytest.mark.parametrize(
    ("rewards", "shown"),
    [([1.0, 1.0], "1.000 (95 %: 0.342 to 1.000)"), ([0.0, 1.0], "0.500 (95 %: 0.095 to 0.905)")],
)
def test_the_interval_of_an_accuracy_counts_rows_with_a_response(rewards, shown, tmp_path):
    """Wilson's interval of two rows, where 98 of 100 leave no room for a response."""

    def generate(prompts, sampling, n, on_finished):
        responses = [
            append_response(prompt, [5], [0.0], finish_reason="stop", text=str(prompt.group_id)) for prompt in prompts
        ]
        for i, response in enumerate(responses):
            on_finished(i, [response])
        return responses

    sampler, recorded, said = evaluating(tmp_path, generate, lambda text, row: rewards[int(text)], "")
    sampler.run.is_main_process = True
    heldout = Prompts([replace(prompt_sample([1] * n), group_id=i) for i, n in enumerate((10, 20) + (60,) * 98)])
    evaluate_heldout(sampler, heldout, "after")
    assert said == [f"held-out after: accuracy {shown} (100 rows; rows without a response: 98)"]
    assert recorded["unanswered_after"] == 98 and recorded["heldout"] == 100


def test_two_sets_of_held_out_rows_are_one_evaluation(tmp_path, capsys):
    """The second one's results are named; those of the same step before are kept, and of earlier steps."""

    def generate(prompts, sampling, n, on_finished):
        responses = [append_response(prompt, [5], [0.0], finish_reason="stop", text="1") for prompt in prompts]
        for i, response in enumerate(responses):
            on_finished(i, [response])
        return responses

    sampler, *_ = evaluating(tmp_path, generate, lambda text, row: row["reward"], "")
    sampler.run = Run(tmp_path, {})
    heldout, easy = (
        Prompts([replace(prompt_sample([1]), group_id=i, row={"reward": x}) for i, x in enumerate(rewards)])
        for rewards in ((0.0, 1.0, 0.0, 0.0), (1.0, 1.0))
    )
    for when, step in (("before", -1), ("after", 4)):
        sampler.run.step = step
        evaluate_heldout(sampler, heldout, when)
        evaluate_heldout(sampler, easy, when, name="easy")
    found = json.loads((tmp_path / EVAL).read_text())
    assert [(one["step"], one["accuracy"], one["easy/accuracy"]) for one in found["evaluations"]] == [
        (0, 0.25, 1.0), (5, 0.25, 1.0),
    ]  # fmt: skip
    assert found["accuracy_after"] == 0.25 and found["easy/accuracy_after"] == 1.0
    assert (found["heldout"], found["easy/heldout"]) == (4, 2)  # those of a model card are the first
    assert "held-out easy after: accuracy 1.000 (95 %: 0.342 to 1.000) (2 rows)" in capsys.readouterr().out
    assert "held-out easy/accuracy " in closing_table(sampler.run, {})


def test_rows_that_would_get_the_same_responses_are_refused(tmp_path):
    sampler, *_ = evaluating(tmp_path, lambda *_, **__: [], None, "")
    with pytest.raises(ValueError, match="^rows: expected group ids that differ, got 7 2 times$"):
        sampler.encode([(7, {}), (8, {}), (7, {})])


def test_responses_to_train_on_are_sampled_at_the_engines_temperature(tmp_path):
    sampler, *_ = evaluating(tmp_path, lambda *_, **__: [], None, "")
    sampler.engine.temperature = 1.0
    prompts, warm = Prompts([]), Sampling(6, 0.7)
    expected = "^temperature: expected the engine's, 1, got 0.7 for responses to train on; set engine.temperature"
    with pytest.raises(ValueError, match=expected):
        sampler.sample(prompts, warm)
    assert sampler.sample(prompts, warm, training=False).generated == sampler.greedy(prompts).generated == []
    assert sampler.sample(prompts, [Sampling(6), Sampling(5)][:0]).generated == []  # one for each prompt
    with pytest.raises(ValueError, match=expected):
        sampler.sample(prompts, [Sampling(6), warm])


def test_a_second_draw_in_a_step_needs_another_seed(tmp_path):
    """The random numbers depend on the seed, the group id and the number of the response alone."""
    sampler, *_ = evaluating(tmp_path, lambda *_, **__: [], None, "")
    sampler.run.running_step = 3
    sampling = Sampling(6, seed=(0, 3))
    first, second = (Prompts([replace(prompt_sample([1, 2]), group_id=i)]) for i in range(2))
    sampler.sample(first, sampling)
    sampler.sample(second, sampling)  # another prompt, as in dynamic sampling
    sampler.sample(Prompts([replace(prompt_sample([1, 2, 3]), group_id=0)]), sampling)  # the prompt with a hint
    sampler.sample(first, sampling, training=False)
    for _ in range(2):
        sampler.sample(first, replace(sampling, temperature=0.0))
    with pytest.raises(
        ValueError, match=r"^seed: expected another than \(0, 3\) for a second draw of group 0 in this st"
    ):
        sampler.sample(first, sampling, n=8)
    sampler.sample(first, replace(sampling, seed=(0, 3, 1)))
    sampler.run.running_step = 4  # as a run that resumes, or is replayed
    sampler.sample(first, sampling)
    sampler.run.running_step = None
    for _ in range(2):
        sampler.sample(first, sampling)


@pytest.mark.parametrize("most", [0, 1000])
def test_prompts_beyond_the_samplers_context_are_skipped(tiny_dir, most):
    """A server's --max-model-len may be smaller than the model's context."""
    said = []
    cfg = SimpleNamespace(reward_threads=0, max_new_tokens=6, max_prompt_tokens=most)
    text = SimpleNamespace(max_position_embeddings=4096)
    config = SimpleNamespace(get_text_config=lambda: text)
    engine = SimpleNamespace(config=config, data_parallel_rank=0, data_parallel_size=1)
    run, rollout = SimpleNamespace(print=said.append), SimpleNamespace(generate=None, max_model_len=64)
    sampler = PolicySampler(cfg, run, SimpleNamespace(reward=None), load_processor(tiny_dir), engine, rollout)
    rows = [{"question": "7 " * count} for count in (4, 80)]
    prompts = sampler.encode(enumerate(rows))
    assert [sample.group_id for sample in prompts.samples] == [0] and len(said) == len(prompts.skipped) == 1


def warnings(steps, *, finish="stop", group_size=2, prompts=(0, 0), **options):
    """What a run says of two responses, to one prompt unless others are given, whose rewards in each step are given."""
    said = []
    cfg = SimpleNamespace(reward_threads=0, max_new_tokens=6, group_size=group_size)
    engine = SimpleNamespace(global_sum=same, data_parallel_group=None)
    run, rollout = SimpleNamespace(print=said.append, is_main_process=False), SimpleNamespace(generate=None)
    sampler = PolicySampler(cfg, run, SimpleNamespace(reward=None), None, engine, rollout, **options)
    response = replace(append_response(prompt_sample([1]), [5], [0.0]), finish_reason=finish)
    for rewards in steps:
        responses = Responses([replace(response, group_id=i) for i in prompts], torch.tensor(rewards))
        metrics = sampler.metrics(responses)
        assert sampler.metrics(responses) == metrics  # which says and counts nothing
        sampler.report(responses, metrics)
    return said


def test_a_run_that_cannot_learn_is_told_why_once():
    equal, different = [1.0, 1.0], [0.0, 1.0]
    (said,) = warnings([equal] * 30)
    assert said.startswith("warning: the responses to each prompt have had equal rewards for 10 steps")
    assert warnings([*[equal] * 9, different, *[equal] * 9]) == []
    assert warnings([equal] * 30, group_size=1) == []  # nothing is compared
    cut = "warning: 100% of the responses are truncated at --max_new_tokens 6: raise it"
    assert warnings([different] * 3, finish="length") == [cut]


def test_equal_rewards_are_those_that_the_recipe_compares():
    equal, different = [0.3, 0.3], [0.0, 1.0]
    assert warnings([equal] * 30, compares="nothing") == []  # distillation does not train on rewards
    (said,) = warnings([equal] * 30, compares="batch", prompts=(0, 1), group_size=1)
    assert said.startswith(
        "warning: all responses have had equal rewards for 10 steps, from which little or nothing is learned"
    )
    solved_or_not = {"prompts": (0, 1), "compares": "batch"}  # PPO learns from the difference of two prompts
    assert warnings([different] * 30, **solved_or_not) == [] and len(warnings([different] * 30, prompts=(0, 1))) == 1
    assert warnings([[math.nan, math.nan]] * 30, **solved_or_not) == []


def test_the_warning_of_cut_episodes_names_the_limits_of_a_turn_and_of_an_episode():
    said, limits = [], {"max_new_tokens": 6, "max_response_tokens": 20}
    for max_turns in (1, 3):
        cfg = SimpleNamespace(max_turns=max_turns, **limits)
        LearningWarnings(cfg, SimpleNamespace(print=said.append)).check({"response_length/truncated": 0.6})
    assert said[0] == "warning: 60% of the responses are truncated at --max_new_tokens 6: raise it"
    assert said[1].startswith(
        "warning: 60% of the responses are truncated at --max_new_tokens 6 in a turn, or do not fit into "
    )
    assert "--max_response_tokens 20 " in said[1]


def test_weights_are_sent_in_the_dtype_of_the_servers():
    """A sampler that does not say is sent the weights' own dtype."""

    class Servers:
        weight_dtype, generate = torch.bfloat16, None

        def update_weights(self, weights):
            self.received = dict(weights)

    def weights(dtype=torch.float32):
        yield "matrix", torch.ones(8, 4, dtype=dtype)

    cfg = SimpleNamespace(reward_threads=0)
    engine = SimpleNamespace(get_per_tensor_param=weights)
    servers = Servers()
    sampler = PolicySampler(cfg, None, SimpleNamespace(reward=None), None, engine, servers)
    sampler.send_weights(servers)
    assert servers.received["matrix"].dtype == torch.bfloat16 and sampler.sent_bytes == 64
    servers.weight_dtype = None
    sampler.send_weights(servers)
    assert servers.received["matrix"].dtype == torch.float32 and sampler.sent_bytes == 128
