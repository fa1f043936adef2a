"""Episodes of several turns: tokens, what is masked, limits, tools that fail."""

import asyncio
import re
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from rlkit.data import append_response, collate, prompt_sample
from rlkit.data.messages import message
from rlkit.data.samples import append_observation, check_sample
from rlkit.engines import make_engine
from rlkit.rewards import score, without_thinking
from rlkit.rollout import Sampling, make_rollout, uniforms
from rlkit.rollout.agent import Observation, ScriptedRollout, run_episodes
from rlkit.vlm import decode, encode_observation, encode_prompt, load_model, load_processor, suppressed_token_ids


@pytest.fixture(scope="module")
def processor(tiny_dir):
    return load_processor(tiny_dir)


def ends_often(model, processor):
    """The model with a bias towards its end token."""
    head, end = model.get_output_embeddings(), torch.tensor(processor.tokenizer.eos_token_id)
    bias = 3.0 * torch.nn.functional.one_hot(end, head.out_features)
    head.register_forward_hook(lambda module, args, logits: logits + bias)
    return model


def new_engine(tiny_dir, processor, **options):
    model = ends_often(load_model(tiny_dir), processor)
    suppressed = suppressed_token_ids(model.config, processor.tokenizer)
    return make_engine("fsdp2", model=model, suppressed_token_ids=suppressed, **options)


@pytest.fixture(scope="module")
def engine(tiny_dir, processor):
    return new_engine(tiny_dir, processor)


@pytest.fixture(scope="module")
def rollout(engine, processor):
    return make_rollout("hf", engine.gathered, processor=processor)


def picture(rng, width=28, height=28):
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def ask(processor, count, images=1, seed=0):
    rng = np.random.default_rng(seed)
    rows = [{"question": f"Question {i}?", "images": [picture(rng) for _ in range(images)]} for i in range(count)]
    return [encode_prompt(processor, {**row, "where": f"row {i}"}, group_id=i) for i, row in enumerate(rows)]


async def more(sample):
    """Shows two more images, of unlike sizes, and then ends."""
    rng = np.random.default_rng(len(sample.token_ids))
    seen = len(sample.images)
    return Observation(f"image {seen}", [picture(rng, 28 * seen, 56)]) if seen < 3 else None


# --- tokens


LETTERS = list("abc 019,.(){}\n\t?äß中🙂") + ["digit", "zoom"]


def random_text(rng):
    return "x" + "".join(rng.choice(LETTERS, rng.integers(0, 12)))


def test_placeholder_expanded_once(processor):
    """500 random conversations of several turns and images: all tokens are the processor's own, of the whole text."""
    rng = np.random.default_rng(0)
    sizes = (28, 56, 84)

    async def step(sample):
        if rng.random() < 0.4:
            return None
        images = [picture(rng, *rng.choice(sizes, 2)) for _ in range(rng.choice(3, p=(0.4, 0.4, 0.2)))]
        return Observation(random_text(rng), images)

    requests = []
    for i in range(500):
        images = [picture(rng, *rng.choice(sizes, 2)) for _ in range(rng.integers(0, 3))]
        requests.append(encode_prompt(processor, {"question": random_text(rng), "images": images}, group_id=i))
    samples = run_episodes(
        ScriptedRollout(processor, lambda sample: random_text(rng)), requests, Sampling(100), step, processor=processor,
        max_turns=5,
    )  # fmt: skip
    assert {s.finish_reason for s in samples} == {"stop", "turns"}
    assert Counter(len(s.images) for s in samples)[4] > 10 and {0, 1, 8} <= {len(s.images) for s in samples}
    for sample in samples:
        text = processor.apply_chat_template(sample.row["messages"], tokenize=False).removesuffix("\n")
        whole = processor(text=[text], images=sample.images or None, return_tensors="pt")
        assert sample.token_ids == whole["input_ids"][0].tolist()
        assert sample.compact_ids == processor.tokenizer(text)["input_ids"]
        check_sample(sample)
        for name, tensor in sample.vision.items():
            assert torch.equal(tensor, whole[name])
        said = [m["content"] for m in sample.row["messages"] if m["role"] == "assistant"]
        assert processor.tokenizer.decode(sample.response_ids) == "".join(f"{turn}<|im_end|>" for turn in said)
        assert sample.text == said[-1]


class Spelled:
    """Generates each turn letter by letter, which no tokenizer would do, and keeps its requests."""

    def __init__(self, processor):
        self.tokenizer, self.calls = processor.tokenizer, []

    def generate(self, requests, sampling, n=1):
        self.calls.append(list(requests))
        ids = [self.tokenizer.convert_tokens_to_ids(letter) for letter in "digit"] + [self.tokenizer.eos_token_id]
        return [
            append_response(r, ids, [-0.5] * 6, text="digit", finish_reason="stop") for r in requests for _ in range(n)
        ]


@pytest.mark.parametrize("last", ["<|im_end|>", "g", "<|endoftext|>"])
def test_a_turn_that_another_token_ended_gets_the_end_token_of_the_template(processor, last):
    class Stops(Spelled):
        def generate(self, requests, sampling, n=1):
            return [append_response(r, [5, stop], [-0.5] * 2, text="call", finish_reason="stop") for r in requests]

    stop = processor.tokenizer.convert_tokens_to_ids(last)
    replies = iter([Observation("result"), None])
    request = encode_prompt(processor, {"question": "2?", "images": []})
    (sample,) = run_episodes(
        Stops(processor), [request], Sampling(8, stop=(stop,)), lambda _: next(replies), processor=processor
    )
    after = sample.token_ids[len(request.token_ids) + 1 :]
    end = processor.tokenizer.eos_token_id
    assert after[:2] == [stop, end] if stop != end else after[0] == end != after[1]
    assert processor.tokenizer.decode(after).startswith(
        last.removesuffix("<|im_end|>") + "<|im_end|>\n<|im_start|>user\nresult<|im_end|>"
    )
    assert sum(sample.mask) == 4  # the end token of the template was not sampled
    check_sample(sample)


def test_never_retokenise(processor):
    sampler = Spelled(processor)
    samples = run_episodes(sampler, ask(processor, 3), Sampling(8), more, processor=processor)
    spelled = [processor.tokenizer.convert_tokens_to_ids(letter) for letter in "digit"]
    assert processor.tokenizer("digit")["input_ids"] != spelled  # the control: made again, it would be another
    assert len(sampler.calls) == 3
    for i, sample in enumerate(samples):
        assert sample.response_ids == [*spelled, processor.tokenizer.eos_token_id] * 3
        for earlier in (call[i] for call in sampler.calls):
            for name in ("token_ids", "compact_ids", "mask", "logprobs"):
                assert getattr(sample, name)[: len(getattr(earlier, name))] == getattr(earlier, name)
        assert sample.logprobs == [-0.5 if trained else 0.0 for trained in sample.mask]
        check_sample(sample)
    assert collate(samples).total_tokens == 54


def test_text_does_not_change_the_images(processor):
    """The vision tensors are the same objects, so rows of a group share them in training."""
    request = ask(processor, 1)[0]
    text = append_observation(request, prompt_sample([5, 6]))
    assert text.vision is request.vision and text.token_ids == [*request.token_ids, 5, 6] and not any(text.mask)
    both = append_observation(request, ask(processor, 1, images=2, seed=1)[0])
    assert both.vision["image_grid_thw"].shape == (3, 3) and len(both.images) == 3
    assert both.placeholders == {processor.image_token_id: [1, 1, 1]} and request.placeholders.popitem()[1] == [1]


# --- the sampler and the trainer


@pytest.fixture(scope="module")
def episodes(rollout, processor):
    return run_episodes(rollout, ask(processor, 6), Sampling(6, seed=(1, 2)), more, processor=processor, n=4)


def test_sampler_and_trainer_agree_on_later_turns(engine, episodes):
    assert {1, 2, 3} == {len(s.images) for s in episodes} and {s.finish_reason for s in episodes} == {"stop", "length"}
    batch = collate(episodes)
    logprobs = engine.infer_batch(batch)["logprobs"]
    torch.testing.assert_close(logprobs[batch.mask], batch.rollout_logprobs[batch.mask], atol=1e-5, rtol=1e-5)
    assert not logprobs[~batch.mask].any()


def test_only_the_policys_tokens_have_a_gradient(tiny_dir, episodes, processor):
    """The engine's step on the packed batch equals transformers' own forwards, one episode at a time."""
    chosen = sorted(episodes, key=lambda s: -len(s.images))[:3] + [s for s in episodes if len(s.images) == 1][:2]
    model = ends_often(load_model(tiny_dir), processor)
    total = 0.0
    for sample in chosen:
        ids = torch.tensor([sample.token_ids])
        model.model.rope_deltas = None
        kinds = (ids == model.config.image_token_id).int()
        logits = model(input_ids=ids, mm_token_type_ids=kinds, **sample.vision).logits
        logits[..., suppressed_token_ids(model.config, processor.tokenizer)] = -torch.inf
        at = torch.tensor([t for t, trained in enumerate(sample.mask) if trained])
        total = total - logits[0, at - 1].log_softmax(-1).gather(1, ids[0, at, None]).sum()
    total.backward()
    sgd = {"optimizer": lambda params: torch.optim.SGD(params, lr=1.0), "max_grad_norm": 1e9}
    engine = new_engine(tiny_dir, processor, **sgd)
    before = {name: p.clone() for name, p in engine.get_per_tensor_param()}
    metrics = engine.train_batch(collate(chosen), lambda out, mb: (-out.logprobs.sum(), {}))
    assert metrics["loss"] == pytest.approx(total.item(), rel=1e-5)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    moved = {name: before[name] - p for name, p in engine.get_per_tensor_param() if name in gradients}
    assert len(moved) > 40
    for name, change in moved.items():
        torch.testing.assert_close(change, gradients[name], atol=2e-4, rtol=2e-3, msg=name)


def test_what_is_sampled_does_not_depend_on_the_batch(engine, rollout, episodes, processor):
    requests, sampling = ask(processor, 6), Sampling(6, seed=(1, 2))
    ordered = [(s.token_ids, s.group_id, s.number) for s in episodes]
    assert [(g, m) for _, g, m in ordered] == [(g, m) for g in range(6) for m in range(4)]
    small = make_rollout("hf", engine.gathered, processor=processor, max_sequences=4)
    backwards = run_episodes(small, requests[::-1], sampling, more, processor=processor, n=4)
    assert sorted(ordered) == sorted((s.token_ids, s.group_id, s.number) for s in backwards)
    assert [s.group_id for s in backwards] == [g for g in range(5, -1, -1) for _ in range(4)]


def test_a_continued_sample_resumes_its_random_stream(rollout, processor):
    """An interrupted and continued sample equals an uninterrupted one; copies of one history differ."""
    requests = ask(processor, 3)
    whole, first = (rollout.generate(requests, Sampling(most, seed=(4,)), n=3) for most in (7, 3))
    unfinished = [s for s in first if s.finish_reason == "length"]
    rest = rollout.generate(unfinished, Sampling(4, seed=(4,)))
    found = {(s.group_id, s.number): s.token_ids for s in [*first, *rest]}
    assert len(unfinished) > 3 and [found[s.group_id, s.number] for s in whole] == [s.token_ids for s in whole]
    copies = [replace(unfinished[0], number=number) for number in range(6)]
    assert len({tuple(s.token_ids) for s in rollout.generate(copies, Sampling(4, seed=(4,)))}) > 3
    assert len({s.number for s in rollout.generate(copies[1:3], Sampling(1), n=2)}) == 4
    rest = uniforms((0,), [5], 1, 5, sample_numbers=[2], offsets=[3])
    assert torch.equal(rest, uniforms((0,), [5], 3, 8)[2:, 3:])


# --- environments


def test_an_environment_with_its_own_reward(processor):
    async def guess_the_number(sample):
        state = sample.row["state"]
        state["guesses"] = state.get("guesses", 0) + 1
        if sample.text == sample.row["answer"]:
            state["reward"] = 1 / state["guesses"]
            return None
        return Observation("higher" if int(sample.text) < int(sample.row["answer"]) else "lower")

    def bisect(sample):
        low, high = 0, 8
        for turn in sample.row.get("messages", [])[2::2]:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if turn["content"] == "higher" else (low, middle)
        return str((low + high) // 2)

    rows = [{"question": "A number from 0 to 7?", "answer": str(i)} for i in range(8)]
    requests = [encode_prompt(processor, row, group_id=i) for i, row in enumerate(rows)]
    sampler, finished = ScriptedRollout(processor, bisect), []
    samples = run_episodes(
        sampler, requests, Sampling(4), guess_the_number, processor=processor, n=2, max_turns=3,
        on_finished=lambda i, group: finished.append((i, group)),
    )  # fmt: skip
    assert [i for i, _ in finished] == [4, 2, 6, 0, 1, 3, 5, 7]  # those that are found in one turn first
    assert all(group == samples[2 * i : 2 * i + 2] for i, group in finished)
    rewards = score(lambda text, row: row["state"].get("reward", 0.0), samples)
    assert [round(1 / reward) if reward else 0 for reward in rewards.tolist()[::2]] == [0, 3, 2, 3, 1, 3, 2, 3]
    assert [s.finish_reason for s in samples] == ["turns"] * 2 + ["stop"] * 14
    assert samples[2].row["state"] is not samples[3].row["state"] and "state" not in rows[1]
    said = [m["content"] for m in samples[2].row["messages"]]
    assert said == ["A number from 0 to 7?", "4", "lower", "2", "lower", "1"]


def test_every_turn_begins_with_the_response_prefix(processor):
    """So a turn of thinking that the prompt opens is judged as the first one is."""
    row = {"question": "2 + 2?", "answer": "4", "response_prefix": "<think>\n"}

    def play(last):
        turns, replies = iter(["I call it.</think>calc(2+2)", last]), iter([Observation("4"), None])
        return run_episodes(
            ScriptedRollout(processor, lambda sample: next(turns)), [encode_prompt(processor, row)], Sampling(64),
            lambda sample: next(replies), processor=processor,
        )  # fmt: skip

    reward = without_thinking(lambda text, row: float(text.strip() == row["answer"]))
    (finished,), (unfinished,) = play("So it is.</think>4"), play("4")
    assert processor.tokenizer.decode(finished.token_ids) == (
        "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n<think>\nI call it.</think>calc(2+2)<|im_end|>\n"
        "<|im_start|>user\n4<|im_end|>\n<|im_start|>assistant\n<think>\nSo it is.</think>4<|im_end|>"
    )
    assert processor.tokenizer.decode(finished.response_ids) == (
        "I call it.</think>calc(2+2)<|im_end|>So it is.</think>4<|im_end|>"
    )
    assert score(reward, [finished, unfinished]).tolist() == [1, 0]


@pytest.mark.parametrize("opened", [1, 3])
def test_a_template_may_open_the_thinking_of_some_turns(processor, monkeypatch, opened):
    """Each turn is judged by the end of the text before it, and one that gets no further keeps what it began with."""
    opens = "{% if messages|length == " + str(opened) + " %}<think>\n{% endif %}{% endif %}"
    monkeypatch.setattr(processor, "chat_template", processor.chat_template.removesuffix("{% endif %}") + opens)
    request = encode_prompt(processor, {"question": "2 + 2?", "answer": "4"})

    def play(**limits):
        (sample,) = run_episodes(
            ScriptedRollout(processor, lambda sample: "4"), [request], Sampling(8), endless, processor=processor,
            **limits,
        )  # fmt: skip
        return sample.finish_reason, score(without_thinking(lambda text, row: float(text == "4")), [sample]).item()

    assert play(max_turns=1) == ("turns", 0 if opened == 1 else 1)
    assert play(max_response_tokens=9) == ("length", 0 if opened == 1 else 1)  # no room for a second turn
    assert play(max_turns=2) == ("turns", 0 if opened == 3 else 1)


@pytest.mark.parametrize("last", ["<|im_end|>", "<|call|>", "!"])
def test_a_step_sees_special_tokens_of_the_turn(tiny_dir, last):
    """A model marks its calls with them, and `sample.text` is without them. The token that ends a turn is no marker."""
    own = load_processor(tiny_dir)
    own.tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]", "<|call|>"]})
    stop = own.tokenizer.convert_tokens_to_ids(last)

    class Calls:
        def generate(self, requests, sampling, n=1):
            text = "[TOOL_CALLS]add[ARGS]{1}" if len(seen) == 0 else "four"
            ids = [*own.tokenizer(text, add_special_tokens=False)["input_ids"], *[stop] * (len(seen) < 2)]
            reason = "stop" if len(seen) < 2 else "length"
            return [
                append_response(r, ids, [-0.5] * len(ids), text=decode(own, ids), finish_reason=reason)
                for r in requests
            ]

    def step(sample):
        seen.append((sample.text, sample.row["raw_text"]))
        return Observation("4")

    seen, end = [], "!" if last == "!" else ""
    (sample,) = run_episodes(
        Calls(), [encode_prompt(own, {"question": "2 + 2?"})], Sampling(64), step, processor=own, max_turns=3
    )
    assert seen == [("add{1}" + end, "[TOOL_CALLS]add[ARGS]{1}" + end), ("four" + end, "four" + end)]
    assert (sample.finish_reason, sample.row["raw_text"]) == ("length", "four")  # which the reward sees


def test_a_scripted_turn_has_the_text_of_a_sampled_one(tiny_dir):
    own = load_processor(tiny_dir)
    own.tokenizer.add_special_tokens({"additional_special_tokens": ["[CALL]", "[THINK]", "[/THINK]"]})
    request = encode_prompt(own, {"question": "2 + 2?", "thinking_tags": ("[THINK]", "[/THINK]")})
    scripted = ScriptedRollout(own, lambda sample: "[THINK]hm[/THINK][CALL]add")
    assert scripted.generate([request], Sampling(64))[0].text == "[THINK]hm[/THINK]add"


# --- tools that fail


async def fails(sample):
    raise RuntimeError("no such file")


async def is_slow(sample):
    await asyncio.sleep(60)


async def shows_a_broken_image(sample):
    return Observation("look", [b"no image"])


async def shows_a_strip(sample):
    return Observation("look", [Image.new("RGB", (1, 400))])


async def spells_a_placeholder_out(sample):
    return Observation("<|image_pad|>")


async def returns_text(sample):
    return "look"


async def exits(sample):
    sys.exit("usage: tool")


async def is_cancelled(sample):
    raise asyncio.CancelledError("by a library")


FAILURES = {
    exits: "SystemExit('usage: tool')",
    is_cancelled: "CancelledError('by a library')",
    fails: "no such file",
    is_slow: "expected a result within 0.2 s, got none",
    shows_a_broken_image: "cannot be read",
    shows_a_strip: "aspect ratio",
    spells_a_placeholder_out: "images: expected 1, one per placeholder in the prompt, got 0",
    returns_text: "expected an Observation or None, got str",
}


@pytest.mark.parametrize("bad", FAILURES, ids=lambda f: f.__name__)
def test_a_failing_tool_is_an_aborted_sample_or_an_observation(processor, bad, caplog):
    """The first call for the second of three prompts fails; the other episodes continue."""
    requests, why = ask(processor, 3), FAILURES[bad]
    scripted = ScriptedRollout(processor, lambda sample: "again")

    async def step(sample):
        state = sample.row["state"]
        state["calls"] = state.get("calls", 0) + 1
        if sample.group_id == 1 and state["calls"] == 1:
            return await bad(sample)
        return await more(sample)

    options = {"processor": processor, "n": 2, "timeout": 0.2 if bad is is_slow else 60.0}
    samples = run_episodes(scripted, requests, Sampling(8), step, **options)
    assert [s.group_id for s in samples] == [0, 0, 1, 1, 2, 2]
    assert [s.finish_reason for s in samples] == ["stop"] * 2 + ["aborted"] * 2 + ["stop"] * 2
    assert "tool failed on row 1, turn 'again'" in caplog.text and why in caplog.text
    shown = run_episodes(scripted, requests, Sampling(8), step, on_failure=lambda e: Observation(f"{e}"), **options)
    assert {s.finish_reason for s in shown} == {"stop"} and {len(s.images) for s in shown} == {3}
    for sample in shown[2:4]:
        assert why in sample.row["messages"][2]["content"]
        assert why in decode(processor, sample.token_ids) and why not in decode(processor, sample.response_ids)
        check_sample(sample)


def test_a_failure_that_cannot_be_shown_is_aborted(processor):
    options = {"processor": processor, "on_failure": lambda error: Observation("", [b"no image"])}
    samples = run_episodes(ScriptedRollout(processor, lambda s: "x"), ask(processor, 1), Sampling(8), fails, **options)
    assert samples[0].finish_reason == "aborted"


# --- limits


def endless(sample):
    return Observation("and then?")


def test_limits(processor):
    requests, sampler = ask(processor, 2), ScriptedRollout(processor, lambda sample: "more")
    length = len(requests[0].token_ids)

    def run(step=endless, most=10, **limits):
        return run_episodes(sampler, requests, Sampling(most), step, processor=processor, **limits)

    for turns in (1, 3):
        for sample in run(max_turns=turns):
            assert sample.finish_reason == "turns" and sample.mask[-1]
            assert [m["role"] for m in sample.row["messages"]] == ["user", "assistant"] * turns
    for limit in range(length + 10, length + 60, 7):
        for samples in run(max_tokens=limit), run(max_response_tokens=limit - length):
            assert {s.finish_reason for s in samples} <= {"length", "turns"}
            assert max(len(s.token_ids) for s in samples) <= limit and all(s.mask[-1] for s in samples)
    assert {s.finish_reason for s in samples} == {"length"}
    called = []
    cut = run(called.append, 1)
    assert {s.finish_reason for s in cut} == {"length"} and not called  # a turn that was cut is no call
    for limits in ({"max_tokens": length + 9}, {"max_response_tokens": 9}):
        with pytest.raises(
            ValueError, match=f"row 0: expected room for a turn of max_new_tokens 10 after {length} prompt tokens, got"
        ):
            run(**limits)
    for limits in ({"max_turns": 0}, {"timeout": 0}):
        with pytest.raises(ValueError, match="max_turns, timeout: expected at least 1 and above 0"):
            run(**limits)


def test_a_rank_that_has_finished_joins_every_collective(processor):
    """With sharded weights, generation is collective."""
    sampler, counts = ScriptedRollout(processor, lambda sample: "x"), []

    class Counting:
        def generate(self, requests, sampling, n=1):
            counts.append(len(requests))
            return sampler.generate(requests, sampling, n)

    elsewhere = iter([2, 1, 0])
    run_episodes(
        Counting(), ask(processor, 1), Sampling(4), lambda sample: None, processor=processor,
        global_sum=lambda count: count + next(elsewhere),
    )  # fmt: skip
    assert counts == [1, 0, 0]
    assert run_episodes(sampler, [], Sampling(4), endless, processor=processor) == []


# --- templates


DROPS_THOUGHTS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and "
    "loop.index0 < ns.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NEVER_THINKS = DROPS_THOUGHTS.replace(" and loop.index0 < ns.last", "")
MOVES_THE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{% set system = m.content %}{% endif %}{% endfor %}"
    "{% for m in messages[1:] %}<|im_start|>{% if loop.last or loop.nextitem.role == 'assistant' and loop.index0 == "
    "messages | length - 3 %}{{ messages[0].content }}{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
)
ENDS_WITHOUT_A_TOKEN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def test_each_episode_has_its_own_sampling_parameters(processor):
    """Also in later turns, after some episodes have ended."""
    scripted = ScriptedRollout(processor, lambda sample: "x" * 20)
    how = [Sampling(3), Sampling(30), Sampling(31)]

    def step(sample):
        return None if sample.group_id == 1 else Observation("and?")

    first, second, third = run_episodes(scripted, ask(processor, 3), how, step, processor=processor, max_turns=2)
    assert first.finish_reason == "length" and len(first.response_ids) == 3
    assert (second.finish_reason, third.finish_reason) == ("stop", "turns")
    with pytest.raises(ValueError, match="row 2: expected room for a turn of max_new_tokens 31"):
        room = max(len(request.token_ids) for request in ask(processor, 3)) + 30
        run_episodes(scripted, ask(processor, 3), how, step, processor=processor, max_tokens=room)


def test_chat_templates_that_change_earlier_turns_are_refused(processor):
    tokenizer = processor.tokenizer
    chat = [message("system", "Be short."), message("user", "Why?")]
    own, name = tokenizer.chat_template, re.escape(tokenizer.name_or_path)
    try:
        for template in (DROPS_THOUGHTS, NEVER_THINKS, MOVES_THE_SYSTEM):
            tokenizer.chat_template = template
            with pytest.raises(ValueError, match=f"chat template of '{name}': expected earlier turns to stay"):
                encode_observation(tokenizer, chat, message("user", "And?"))
        tokenizer.chat_template = ENDS_WITHOUT_A_TOKEN
        with pytest.raises(ValueError, match="expected an end token after the assistant's turn, got"):
            encode_observation(tokenizer, chat, message("user", "And?"))
        tokenizer.chat_template = DROPS_THOUGHTS  # but not those of a turn that calls a tool
        found = encode_observation(tokenizer, chat, message("tool", "4"))
        assert tokenizer.decode(found.token_ids) == "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"
        request, sampler = (
            encode_prompt(tokenizer, {"question": "2 + 2?"}),
            ScriptedRollout(tokenizer, lambda sample: "x"),
        )
        options = {"step": endless, "processor": tokenizer, "max_turns": 2}
        with pytest.raises(
            ValueError, match="'user' follows.*takes .* the role 'tool' .--role tool"
        ):  # before anything was sampled
            run_episodes(None, [request], Sampling(8), **options)
        assert run_episodes(sampler, [request], Sampling(8), **options, role="tool")[0].finish_reason == "turns"
    finally:
        tokenizer.chat_template = own
