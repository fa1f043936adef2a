"""Episodes of several turns: the policy writes, a tool or an environment answers, until one of them ends it.

A tool or an environment is a plain function, async or not, from a sample to what the policy is shown next:

    async def calculator(sample):
        if (call := re.search(r"calc\\((.+?)\\)", sample.text)) is None:
            return None                                     # no call: this turn is the answer
        return Observation(str(evaluate(call[1])))

    async def guess_the_number(sample):
        state = sample.row["state"]                         # a dict of this episode's own, empty at first
        state["guesses"] = state.get("guesses", 0) + 1
        if sample.text == sample.row["answer"]:
            state["reward"] = 1 / state["guesses"]          # the task's reward returns row["state"].get("reward", 0.0)
            return None
        return Observation("higher" if int(sample.text) < int(sample.row["answer"]) else "lower")

An image tool is `rlkit.rollout.image_tools.zoom`. What an observation adds is masked, is shown in the model's own chat
template, and stands behind the tokens that were sampled, of which none is made again.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from threading import Thread
from typing import Any

from rlkit.data.messages import message, prompt_of
from rlkit.data.samples import Row, Sample, append_observation, append_response
from rlkit.data.user_code import Failures
from rlkit.rollout.sampling import Sampling, Written, of_each, where
from rlkit.rollout.threads import in_thread
from rlkit.vlm.chat_template import encode_observation
from rlkit.vlm.processors import load_image

GRACE = 10.0  # seconds behind its time limit after which a step that blocks the event loop is given up


@dataclass(frozen=True)
class Observation:
    """What the policy is shown next: images (paths, bytes or PIL images), then text."""

    text: str = ""
    images: Sequence[Any] = ()


Step = Callable[[Sample], Awaitable[Observation | None] | Observation | None]


def run_episodes(
    rollout: Any,
    requests: Sequence[Sample],
    sampling: Sampling | Sequence[Sampling],
    step: Step,
    *,
    processor: Any,
    n: int = 1,
    max_turns: int = 8,
    max_tokens: int | None = None,
    max_response_tokens: int | None = None,
    timeout: float = 60.0,
    on_failure: Callable[[Exception], Observation] | None = None,
    role: str = "user",
    global_sum: Callable[[float], Any] = float,
    written: Written | None = None,
    failures: Failures | None = None,
) -> list[Sample]:
    """n episodes a request, those of one request next to each other, in the order of the requests.

    All live episodes write their turn in one call of `rollout.generate`; the steps of a turn run at the same time.
    An episode ends with a finish reason: "stop" (`step` returned None), "length" (a turn was cut at `max_new_tokens`,
    or the next one would not have fitted), "turns" (`step` wanted to go on after the last turn) or "aborted" (`step`
    failed; the sample has what was written until then, and says nothing about the policy: leave it out).

    Args:
        rollout: anything with `generate(requests, sampling, n)`; a sample that is given to it goes on.
        requests: prompts.
        sampling: of each turn, for all requests or for each; `max_new_tokens` is that of one turn.
        step: a sample -> an Observation, or None to end. It sees the turn in `sample.text`, all images so far in
            `sample.images`, and in `sample.row` the data row, `messages` (the chat so far, this turn included) and
            `state` (a dict that stays with the episode). Rewards get the same row afterwards, and the last turn's text.
            One that is not async runs in a thread.
        processor: the model's, for its chat template and its images.
        max_turns: most turns that the policy writes.
        max_tokens: longest sequence, images expanded: what the model's context leaves. A turn begins only where all of
            its `max_new_tokens` fit, and an observation that leaves no room for one is not kept.
        max_response_tokens: longest sequence behind the prompt, observations included.
        timeout: seconds for one call of `step`.
        on_failure: what the policy is shown of an exception, of a TimeoutError after `timeout`, or of an image that
            cannot be read; by default such an episode is aborted.
        role: of observations in the chat; "tool" where the template and the model know it.
        global_sum: sum over the ranks that have to generate together, e.g. `engine.global_sum` where weights are
            sharded: a rank whose episodes have ended joins in with none until the last rank's have.
        written: is given (i, its episodes) as soon as the n episodes of request i have ended, while others go on.
        failures: errors of `step` are counted here, and each distinct one logged with its traceback once; by default
            once in this call.

    Raises:
        ValueError: limits that are no limits, a prompt without room for a turn, or a chat template that rewrites
            earlier turns.
    """
    if max_turns < 1 or timeout <= 0:
        raise ValueError(f"max_turns, timeout: at least 1 and above 0 expected, came {max_turns} and {timeout}")
    failures = Failures("tool") if failures is None else failures
    how = of_each(sampling, requests)
    rooms = [_room(r, s, max_tokens, max_response_tokens) for r, s in zip(requests, how, strict=True)]
    if requests:  # the template is refused before the work, not after it
        row = requests[0].row
        encode_observation(processor, prompt_of(row)[0], message(role, ""), tools=row.get("tools"))
    samples = []
    for sample in rollout.generate(requests, sampling, n):
        own = {"messages": prompt_of(sample.row)[0], "state": {}}
        samples.append(replace(sample, row={**sample.row, **own}))
    live, going_on = list(range(len(samples))), set(range(len(requests)))
    for turn in range(1, max_turns + 1):
        for i in live:
            samples[i].row["messages"].append(message("assistant", samples[i].text))
        live = [i for i in live if samples[i].finish_reason == "stop"]
        outcomes = call_steps(step, [samples[i] for i in live], timeout)
        for i, outcome in zip(live, outcomes, strict=True):
            samples[i] = _next(
                samples[i], outcome, processor, role, on_failure, rooms[i // n], failures, last=turn == max_turns
            )
        live = [i for i in live if not samples[i].finish_reason]
        for i in sorted(going_on - {i // n for i in live}):
            going_on.remove(i)
            if written is not None:
                written(i, samples[i * n : i * n + n])
        if not global_sum(float(len(live))):
            break
        again = sampling if isinstance(sampling, Sampling) else [how[i // n] for i in live]
        longer = rollout.generate([samples[i] for i in live], again)
        for i, sample in zip(live, longer, strict=True):
            samples[i] = sample
    failures.log_repeated()
    return samples


def _room(request: Sample, sampling: Sampling, max_tokens: int | None, max_response_tokens: int | None) -> float:
    """The longest that a sequence may be before a turn begins."""
    prompt = len(request.token_ids)
    longest = min(max_tokens or float("inf"), prompt + (max_response_tokens or float("inf")))
    if prompt + sampling.max_new_tokens > longest:
        raise ValueError(
            f"{where(request)}: {prompt} prompt tokens leave no room for a turn of max_new_tokens "
            f"{sampling.max_new_tokens}; max_tokens is {max_tokens}, max_response_tokens {max_response_tokens}"
        )
    return longest - sampling.max_new_tokens


def _next(
    sample: Sample,
    outcome: Any,
    processor: Any,
    role: str,
    on_failure: Callable[[Exception], Observation] | None,
    room: float,
    failures: Failures,
    *,
    last: bool,
) -> Sample:
    """The sample with what its step came to: with a finish reason it has ended, without one it goes on."""
    if outcome is None:
        return sample
    if last and isinstance(outcome, Observation):
        return replace(sample, finish_reason="turns")
    try:
        longer = append_observation(sample, _encode(processor, sample.row, outcome, role))
    except Exception as error:  # whatever it is, it is the tool's: the run goes on
        failures.add(error, f"{where(sample)}, turn {sample.text[:80]!r}")
        if on_failure is None:
            return replace(sample, finish_reason="aborted")
        return _next(sample, on_failure(error), processor, role, None, room, failures, last=last)
    if len(longer.token_ids) > room:
        return replace(sample, finish_reason="length")
    sample.row["messages"].append(message(role, outcome.text, len(outcome.images)))
    return replace(longer, finish_reason="")


def _encode(processor: Any, row: Row, outcome: Any, role: str) -> Sample:
    if isinstance(outcome, Exception):
        raise outcome
    if not isinstance(outcome, Observation):
        raise TypeError(f"step: an Observation or None expected, came {type(outcome).__name__}")
    images = [load_image(image) for image in outcome.images]
    reply = message(role, outcome.text, len(images))
    return encode_observation(processor, row["messages"][:-1], reply, images, tools=row.get("tools"))


def call_steps(step: Step, samples: Sequence[Sample], timeout: float) -> list[Any]:
    """What `step` returned for each sample, or the exception that it raised: all at once, each within its time.

    They share one event loop, in a thread that stays from call to call: what is bound to a loop (a session, a browser)
    can be kept. A step that blocks it is given up after `GRACE` more seconds, with all that had not finished by then.
    """
    outcomes: list[Any] = [TimeoutError(f"no result within {timeout:g} seconds") for _ in samples]

    async def one(i: int) -> None:
        try:
            async with asyncio.timeout(timeout) as limit:
                if inspect.iscoroutinefunction(step):
                    found = await step(samples[i])
                else:
                    found = await asyncio.wrap_future(in_thread(step, samples[i]))
                outcomes[i] = await found if inspect.isawaitable(found) else found
        except BaseException as error:  # a tool may call sys.exit, or be cancelled; here that would end all of them
            if not limit.expired():
                outcomes[i] = error if isinstance(error, Exception) else RuntimeError(repr(error))

    async def every() -> None:
        await asyncio.gather(*(one(i) for i in range(len(samples))))

    running = asyncio.run_coroutine_threadsafe(every(), _loop())
    try:
        running.result(timeout + GRACE)
    except TimeoutError:
        _loop.cache_clear()  # the next call gets another
    return list(outcomes)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, daemon=True, name="rlkit steps").start()
    return loop


class Scripted:
    """A sampler that writes what a function of the sample says: demonstrations to imitate, and trials of a tool.

    Args:
        processor: a model's, for its tokenizer.
        write: a sample -> the text of its next turn.
    """

    def __init__(self, processor: Any, write: Callable[[Sample], str]) -> None:
        self.tokenizer, self.write = getattr(processor, "tokenizer", processor), write

    def generate(self, requests: Sequence[Sample], sampling: Sampling | Sequence[Sampling], n: int = 1) -> list[Sample]:
        """n samples a request, cut at `sampling.max_new_tokens`; their logprobs are 0."""
        samples, how = [], [s for s in of_each(sampling, requests) for _ in range(n)]
        for j, request in enumerate(replace(r, number=r.number * n + i) for r in requests for i in range(n)):
            text = self.write(request)
            ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
            kept = ids[: how[j].max_new_tokens]
            reason = "stop" if kept == ids else "length"
            samples.append(append_response(request, kept, [0.0] * len(kept), text=text, finish_reason=reason))
        return samples
