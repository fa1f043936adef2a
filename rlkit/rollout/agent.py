"""Multi-turn episodes: the policy generates a turn, a tool or an environment responds, until one of them ends it.

A tool or an environment is a plain function, async or not, from a sample to what the policy sees next:

    async def calculator(sample):
        if (call := re.search(r"calc\\(([^()]+)\\)", sample.text)) is None:
            return None                                     # no call: this turn is the response
        return Observation(str(evaluate(call[1])))

    async def guess_the_number(sample):
        state = sample.row["state"]                         # a dict of this episode, empty at first
        state["guesses"] = state.get("guesses", 0) + 1
        if sample.text == sample.row["answer"]:
            state["reward"] = 1 / state["guesses"]          # the task's reward returns row["state"].get("reward", 0.0)
            return None
        return Observation("higher" if int(sample.text) < int(sample.row["answer"]) else "lower")

`rlkit.rollout.image_tools.zoom` is an image tool. Observations are masked, rendered by the model's own chat template,
and appended to the sampled tokens. Sampled text is never tokenized again.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import takewhile
from typing import Any

from rlkit.data.messages import message, prompt_of
from rlkit.data.samples import Row, Sample, append_observation, append_response
from rlkit.data.thinking_tags import thinking_tags_of
from rlkit.data.user_code import Failures
from rlkit.rollout.background import in_daemon_thread, start_event_loop
from rlkit.rollout.sampling import OnFinished, Sampling, sample_name, sampling_per_request
from rlkit.rollout.shared_rows import call_on_one_rank
from rlkit.vlm.images import load_image
from rlkit.vlm.observations import encode_observation
from rlkit.vlm.processors import decode
from rlkit.vlm.rendering import OBSERVATION, template_options

GRACE_SECONDS = 10.0  # after its timeout, until a step that blocks the event loop is abandoned


@dataclass(frozen=True)
class Observation:
    """What the policy sees next: images (paths, bytes or PIL images), then text."""

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
    on_finished: OnFinished | None = None,
    failures: Failures | None = None,
) -> list[Sample]:
    """Run n episodes for each request; those of one request are adjacent, in the order of the requests.

    One call of `rollout.generate` generates the next turn of all running episodes; then their steps run concurrently.
    The finish reason of an episode is "stop" (`step` returned None), "length" (a turn reached `max_new_tokens`, or the
    next one would not fit), "turns" (`step` returned an observation after the last turn) or "aborted" (`step` failed;
    such a sample ends before the failure, and should be left out of training, as it says nothing about the policy).

    Args:
        rollout: anything with `generate(requests, sampling, n)` that continues samples it is given.
        requests: prompts.
        sampling: of each turn, for all requests or one for each; `max_new_tokens` is the longest turn.
        step: a sample -> an Observation, or None to end the episode. It finds the turn in `sample.text`, all images so
            far in `sample.images`, and in `sample.row` the data row, `messages` (the chat including this turn; the
            first `prompt_messages` of them are the prompt), `raw_text` (the turn with its special tokens, such as
            markers of tool calls, except the one that ended it) and `state` (a dict of this episode). Rewards later get
            the same row and the text of the last turn. A step that is not async runs in a thread. Of ranks that share
            rows, one has the state of an episode: it calls the steps, whose observations all ranks get, and the reward.
        processor: the model's, for its chat template and its images.
        max_turns: most turns of the policy.
        max_tokens: longest sequence, images expanded, e.g. the model's context. A turn begins only if all of its
            `max_new_tokens` fit. An observation that leaves no room for a turn is dropped.
        max_response_tokens: longest sequence after the prompt, including observations.
        timeout: seconds for one call of `step`.
        on_failure: what the policy sees of an exception, of a TimeoutError after `timeout`, or of an image that cannot
            be read; by default such an episode is aborted.
        role: of observations in the chat; "tool" if the template and the model support it.
        global_sum: sum over the ranks that generate together, e.g. `engine.global_sum` if weights are sharded. A rank
            whose episodes have all ended calls `rollout.generate` with no requests until the last rank is done.
        on_finished: called with (i, episodes) as soon as the n episodes of request i have ended, while others continue.
        failures: counts errors of `step`, and logs the traceback of each distinct one once; by default one per call.

    Raises:
        ValueError: a limit out of range, a prompt that leaves no room for a turn, or a chat template that rewrites
            earlier turns.
    """
    if max_turns < 1 or timeout <= 0:
        raise ValueError(f"max_turns, timeout: expected at least 1 and above 0, got {max_turns} and {timeout}")
    failures = Failures("tool") if failures is None else failures
    params = sampling_per_request(sampling, requests)
    token_limits = [
        _token_limit(request, request_sampling, max_tokens, max_response_tokens)
        for request, request_sampling in zip(requests, params, strict=True)
    ]
    if requests:
        _check_template_keeps_turns(processor, requests[0].row, role)
    call_steps_in_time = partial(call_steps, step, timeout=timeout)
    observe = partial(_observe, processor=processor, role=role, on_failure=on_failure, failures=failures)

    episodes = [
        _Episode(i // n, token_limits[i // n], _with_chat(sample))
        for i, sample in enumerate(rollout.generate(requests, sampling, n))
    ]
    running, unfinished_requests = episodes, set(range(len(requests)))
    for turn in range(1, max_turns + 1):
        for episode in running:
            episode.sample = _with_turn_in_chat(processor, episode.sample)
        running = [episode for episode in running if episode.sample.finish_reason == "stop"]
        requests_of_running = [episode.request for episode in running]
        results = call_on_one_rank(rollout, call_steps_in_time, _samples(running), requests_of_running)
        for episode, result in zip(running, results, strict=True):
            episode.sample = observe(episode.sample, result, token_limit=episode.token_limit, last=turn == max_turns)
        running = [episode for episode in running if not episode.sample.finish_reason]
        for i in sorted(unfinished_requests - {episode.request for episode in running}):
            unfinished_requests.remove(i)
            if on_finished is not None:
                on_finished(i, _samples(episodes[i * n : i * n + n]))
        if not global_sum(float(len(running))):
            break
        turn_params = sampling if isinstance(sampling, Sampling) else [params[episode.request] for episode in running]
        continued = rollout.generate(_samples(running), turn_params)
        for episode, sample in zip(running, continued, strict=True):
            episode.sample = sample
    failures.log_repeated()
    return _samples(episodes)


@dataclass
class _Episode:
    request: int  # its index
    token_limit: float  # the longest that the sequence may be when a turn begins
    sample: Sample  # without a finish reason from an observation until the next turn is generated


def _samples(episodes: Sequence[_Episode]) -> list[Sample]:
    return [episode.sample for episode in episodes]


def _token_limit(request: Sample, sampling: Sampling, max_tokens: int | None, max_response_tokens: int | None) -> float:
    """The longest that a sequence may be when a turn begins."""
    prompt_tokens = len(request.token_ids)
    longest = min(max_tokens or float("inf"), prompt_tokens + (max_response_tokens or float("inf")))
    if prompt_tokens + sampling.max_new_tokens > longest:
        raise ValueError(
            f"{sample_name(request)}: expected room for a turn of max_new_tokens {sampling.max_new_tokens} after "
            f"{prompt_tokens} prompt tokens, got max_tokens {max_tokens} and max_response_tokens {max_response_tokens}"
        )
    return longest - sampling.max_new_tokens


def _check_template_keeps_turns(processor: Any, row: Row, role: str) -> None:
    """Raise a ValueError, before anything is generated, if the chat template cannot append an observation."""

    def check(role: str) -> None:
        options = {"thinking_tags": thinking_tags_of(row), **template_options(row)}
        encode_observation(processor, prompt_of(row)[0], message(role, OBSERVATION), **options)

    try:
        check(role)
    except ValueError as error:
        other = "tool" if role == "user" else "user"
        try:
            check(other)
        except ValueError:
            raise error from None
        raise ValueError(f"{error}; this template takes observations of the role {other!r} (--role {other})") from error


def _with_chat(sample: Sample) -> Sample:
    """The sample with a row of its own, which also holds the chat and the state of the episode."""
    chat = prompt_of(sample.row)[0]
    return replace(sample, row={**sample.row, "messages": chat, "prompt_messages": len(chat), "state": {}})


def _with_turn_in_chat(processor: Any, sample: Sample) -> Sample:
    """The sample after a turn, which is added to its chat, with the raw text of this turn in its row."""
    sample.row["messages"].append(message("assistant", sample.text))
    return replace(sample, row={**sample.row, "raw_text": _raw_text(processor, sample)})


def _raw_text(processor: Any, sample: Sample) -> str:
    """The text of the last turn with its special tokens, except the one that ended it."""
    tokenizer = getattr(processor, "tokenizer", processor)
    turn = list(takewhile(lambda pair: pair[1], zip(reversed(sample.token_ids), reversed(sample.mask), strict=True)))
    ids = [token for token, _ in reversed(turn)]
    if ids and sample.finish_reason == "stop" and not tokenizer.decode(ids[-1:], skip_special_tokens=True):
        ids.pop()
    return tokenizer.decode(ids)


def _observe(
    sample: Sample,
    result: Any,
    *,
    processor: Any,
    role: str,
    on_failure: Callable[[Exception], Observation] | None,
    failures: Failures,
    token_limit: float,
    last: bool,
) -> Sample:
    """The sample after its step: with a finish reason if it has ended, else with the observation appended.

    Args:
        result: what the step returned, or its exception.
        token_limit: the longest that the sequence may be when a turn begins.
        last: this was the last turn.
    """
    if result is None:
        return sample
    if last and isinstance(result, Observation):
        return replace(sample, finish_reason="turns")
    try:
        observation = _encode_observation(processor, sample, result, role)
        longer = append_observation(sample, observation)
    except Exception as error:  # errors of the tool do not end the run
        failures.add(error, f"{sample_name(sample)}, turn {sample.text[:80]!r}")
        if on_failure is None:
            return replace(sample, finish_reason="aborted")
        return _observe(
            sample,
            on_failure(error),
            processor=processor,
            role=role,
            on_failure=None,
            failures=failures,
            token_limit=token_limit,
            last=last,
        )
    if len(longer.token_ids) > token_limit:
        return replace(sample, finish_reason="length")
    sample.row["messages"].append(message(role, result.text, len(result.images)))
    return replace(longer, finish_reason="", row={**sample.row, **observation.row})


def _encode_observation(processor: Any, sample: Sample, result: Any, role: str) -> Sample:
    if isinstance(result, Exception):
        raise result
    if not isinstance(result, Observation):
        raise TypeError(f"step: expected an Observation or None, got {type(result).__name__}")
    images = [load_image(image) for image in result.images]
    row = sample.row
    return encode_observation(
        processor,
        row["messages"][:-1],
        message(role, result.text, len(images)),
        images,
        thinking_tags=thinking_tags_of(row),
        response_prefix=row.get("response_prefix") or "",
        ended_by=sample.token_ids[-1],
        **template_options(row),
    )


def call_steps(step: Step, samples: Sequence[Sample], timeout: float) -> list[Any]:
    """Call `step` for all samples concurrently, each with its own timeout.

    Async steps share one event loop, in a thread that is kept between calls. Objects bound to an event loop (a session,
    a browser) can therefore be kept too. If a step blocks the event loop, all unfinished ones are abandoned
    `GRACE_SECONDS` after the timeout.

    Returns:
        What `step` returned for each sample, or the exception that it raised.
    """
    results: list[Any] = [TimeoutError(f"step: expected a result within {timeout:g} s, got none") for _ in samples]

    async def call(i: int) -> None:
        try:
            async with asyncio.timeout(timeout) as limit:
                if inspect.iscoroutinefunction(step):
                    result = await step(samples[i])
                else:
                    result = await asyncio.wrap_future(in_daemon_thread(step, samples[i]))
                results[i] = await result if inspect.isawaitable(result) else result
        except BaseException as error:  # sys.exit or a cancellation in a tool must not end the other calls
            if not limit.expired():
                results[i] = error if isinstance(error, Exception) else RuntimeError(repr(error))

    async def call_all() -> None:
        await asyncio.gather(*(call(i) for i in range(len(samples))))

    calls = asyncio.run_coroutine_threadsafe(call_all(), _event_loop())
    try:
        calls.result(timeout + GRACE_SECONDS)
    except TimeoutError:
        _event_loop.cache_clear()  # this loop is blocked; the next call starts another
    return list(results)


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    return start_event_loop("rlkit steps")[0]


class ScriptedRollout:
    """A rollout whose turns a function writes: for demonstrations to imitate, and for trying out a tool.

    Args:
        processor: a model's, for its tokenizer.
        write: a sample -> the text of its next turn.
    """

    def __init__(self, processor: Any, write: Callable[[Sample], str]) -> None:
        self.processor, self.write = processor, write

    def generate(self, requests: Sequence[Sample], sampling: Sampling | Sequence[Sampling], n: int = 1) -> list[Sample]:
        """n samples for each request, cut at `sampling.max_new_tokens`; their logprobs are 0."""
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        samples = []
        for request, params in zip(requests, sampling_per_request(sampling, requests), strict=True):
            for i in range(n):
                numbered = replace(request, number=request.number * n + i)
                ids = tokenizer(self.write(numbered), add_special_tokens=False)["input_ids"]
                ids = [*ids, tokenizer.eos_token_id]
                kept = ids[: params.max_new_tokens]
                text = decode(self.processor, kept, thinking_tags_of(request.row))
                finish_reason = "stop" if kept == ids else "length"
                samples.append(
                    append_response(numbered, kept, [0.0] * len(kept), text=text, finish_reason=finish_reason)
                )
        return samples
