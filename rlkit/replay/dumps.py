"""Converts rollout dumps of verl and TRL into bundles, to train on them with --from_rollouts.

python -m rlkit.replay.dumps verl DIR OUT --model MODEL [--task TASK]   # verl: trainer.rollout_data_dir=DIR
python -m rlkit.replay.dumps trl DIR OUT --model MODEL [--task TASK]    # TRL: log_completions=True, DIR/completions

Both trainers log text, without token ids, log-probabilities and images. With --task, each prompt is looked up among the
task's rows and encoded from its row, with its images; responses to the task's held-out rows are left out. Without it,
TRL's messages go through the model's chat template, and text is tokenized as it is. verl drops the template's special
tokens, so give --task for its dumps. Responses are tokenized again. They get an end token, which neither trainer logs,
unless they are --max_new_tokens long. Since the sampler's log-probabilities are unknown, a recipe that reads the
bundles computes them with its own trainer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rlkit.data import load_task
from rlkit.data.messages import is_text_alone, text_of
from rlkit.data.samples import Sample, append_response, prompt_sample
from rlkit.replay.bundles import Bundle, Draw, bundle_path, write_bundle
from rlkit.rollout.sampling import model_end_token_ids
from rlkit.runs.command_line import command_parser
from rlkit.runs.start import one_sentence_errors
from rlkit.vlm import encode_prompt, encode_prompts, load_processor
from rlkit.vlm.loading import load_config, model_path
from rlkit.vlm.turns import assistant_turn, end_token

NOT_REWARDS = ("step", "advantage")


@dataclass(frozen=True)
class Logged:
    """One response of a dump.

    Attributes:
        prompt: text, or a list of chat messages.
        response: text of the response.
        reward: nan if unknown.
        truth: the expected answer, if the dump has it.
    """

    prompt: str | Sequence[Mapping[str, Any]]
    response: str
    reward: float
    truth: Any = None


class Converted(NamedTuple):
    """What `convert` did.

    Attributes:
        bundles: number of bundles written, one per step that has responses.
        held_out: number of responses left out because their prompts are held-out rows.
        skipped: an error message for each row of the task that could not be encoded.
    """

    bundles: int
    held_out: int
    skipped: list[str]


def read_verl(folder: str | Path) -> Iterator[list[Logged]]:
    """The responses of each step in verl's `trainer.rollout_data_dir`: 1.jsonl, 2.jsonl, ...

    Raises:
        ValueError: there are no such files, or a line lacks `input`, `output` or `score`.
    """
    files = sorted((path for path in Path(folder).glob("*.jsonl") if path.stem.isdecimal()), key=lambda x: int(x.stem))
    if not files:
        raise ValueError(f"dump {str(folder)!r}: expected verl's files 1.jsonl, 2.jsonl, ..., got none")
    for file in files:
        step = []
        for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                step.append(Logged(row["input"], row["output"], float(row["score"]), row.get("gts")))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{file}, line {number}: expected input, output and score, got {error!r}") from error
        yield step


def read_trl(folder: str | Path) -> Iterator[list[Logged]]:
    """The responses of each step in TRL's `completions_00001.parquet`, ...; the reward is the sum of all reward
    columns.

    Raises:
        ValueError: there are no such files, or one lacks the column `prompt` or `completion`.
    """
    import pyarrow.parquet

    files = sorted(Path(folder).glob("completions_*.parquet"))
    if not files:
        raise ValueError(f"dump {str(folder)!r}: expected TRL's completions_00001.parquet, ..., got none")
    for file in files:
        try:
            rows = pyarrow.parquet.read_table(file).to_pylist()
        except (OSError, pyarrow.ArrowException) as error:
            raise ValueError(f"{file}: expected a parquet file, got: {error}") from error
        if missing := sorted({"prompt", "completion"} - set(rows[0] if rows else ["prompt", "completion"])):
            raise ValueError(f"{file}: expected the columns prompt and completion, got none called {missing[0]}")
        yield [_logged_by_trl(row) for row in rows]


def _logged_by_trl(row: Mapping[str, Any]) -> Logged:
    parts = [x for name, x in row.items() if name not in NOT_REWARDS and isinstance(x, float)]
    known = [x for x in parts if not math.isnan(x)]
    return Logged(row["prompt"], _response_text(row["completion"]), sum(known) if known else math.nan)


def _response_text(completion: Any) -> str:
    """The text of a completion: a text, or a list with one message of the assistant.

    Raises:
        ValueError: several turns, calls of tools, or thinking in a field of its own: the text alone is not what was
            sampled.
    """
    if isinstance(completion, str):
        return completion
    if len(completion) != 1 or completion[0].get("role") != "assistant" or not is_text_alone(completion[0]):
        roles = ", ".join(str(message.get("role")) for message in completion)
        raise ValueError(f"completion: expected one message of the assistant, of text alone, got messages of {roles}")
    return text_of(completion[0])


def convert(
    steps: Iterator[list[Logged]],
    out: str | Path,
    processor: Any,
    *,
    origin: str,
    rows: Sequence[Mapping[str, Any]] = (),
    heldout: Sequence[Mapping[str, Any]] = (),
    ends: Sequence[int] = (),
    max_new_tokens: int = 0,
) -> Converted:
    """Write one bundle per step.

    Args:
        steps: logged responses of each step.
        out: output folder, for --from_rollouts.
        processor: processor or tokenizer of the model to be trained.
        origin: "verl" or "TRL".
        rows: rows of the task that the prompts come from; if empty, prompts are tokenized as they were logged.
        heldout: the task's held-out rows; responses to them are left out.
        ends: token ids that end a response of the model, if the tokenizer's is not the only one.
        max_new_tokens: responses of this length were truncated, and get no end token. 0: no response was truncated.

    Raises:
        ValueError: a prompt matches no row, or several rows.
    """
    (index, skipped), (held_out, more) = _by_text(processor, rows), _by_text(processor, heldout)
    end = _end_of_responses(processor, ends)
    count, left_out = 0, 0
    for step in steps:
        groups: dict[str, list[Logged]] = {}
        for logged in step:
            groups.setdefault(json.dumps(logged.prompt, default=str), []).append(logged)
        samples = []
        for group_id, responses in enumerate(groups.values()):
            prompt = _encoded(processor, responses[0])
            if len(rows):
                key = _key(processor, prompt)
                if key not in index and key in held_out:
                    left_out += len(responses)
                    continue
                prompt = _of_row(responses[0], index.get(key, []))
            for number, logged in enumerate(responses):
                answered = _with_response(processor, prompt, logged.response, end, max_new_tokens)
                samples.append(replace(answered, group_id=group_id, number=number, reward=logged.reward))
        if samples:
            write_bundle(bundle_path(out, count), Bundle(count, origin=origin, draws=[Draw(samples)]))
            count += 1
    return Converted(count, left_out, skipped + more)


def _by_text(processor: Any, rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, list[Sample]], list[str]]:
    """The prompts of rows by `_key`, and an error message for each row that cannot be encoded."""
    samples, skipped = encode_prompts(processor, enumerate(rows))
    index: dict[str, list[Sample]] = {}
    for sample in samples:
        index.setdefault(_key(processor, sample), []).append(sample)
    return index, skipped


def _encoded(processor: Any, logged: Logged) -> Sample:
    """The prompt of a logged response as it was logged."""
    if not isinstance(logged.prompt, str):
        return encode_prompt(processor, {"messages": logged.prompt, "answer": logged.truth})
    tokenizer = getattr(processor, "tokenizer", processor)
    row = {"question": logged.prompt, "answer": logged.truth}
    return prompt_sample(tokenizer(logged.prompt, add_special_tokens=False).input_ids, row=row)


def _of_row(logged: Logged, found: Sequence[Sample]) -> Sample:
    if len(found) != 1:
        raise ValueError(
            f"prompt {str(logged.prompt)[:80]!r}: expected the text of one row of --task, got that of {len(found)} rows"
        )
    return found[0]


def _key(processor: Any, sample: Sample) -> str:
    """The text of a prompt without special tokens, with single spaces: the same for a row and for its logged prompt."""
    tokenizer = getattr(processor, "tokenizer", processor)
    return " ".join(tokenizer.decode(sample.token_ids, skip_special_tokens=True).split())


def _end_of_responses(processor: Any, ends: Sequence[int]) -> int:
    """The token with which the model's chat template ends a response, or the tokenizer's without a template."""
    tokenizer = getattr(processor, "tokenizer", processor)
    question, response = ({"role": role, "content": "Hello"} for role in ("user", "assistant"))
    try:
        return assistant_turn(processor, {}, [question], response, ends, prefix="", name="response").ids[-1]
    except ValueError:
        return end_token(tokenizer, ends)


def _with_response(processor: Any, prompt: Sample, text: str, end: int, max_new_tokens: int) -> Sample:
    tokenizer = getattr(processor, "tokenizer", processor)
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    cut = bool(max_new_tokens) and len(tokens) >= max_new_tokens
    if not cut:
        tokens = [*tokens, end]
    reason = "length" if cut else "stop"
    return append_response(prompt, tokens, [math.nan] * len(tokens), text=text, finish_reason=reason)


def main(arguments: Sequence[str] | None = None) -> None:
    """Convert a dump and print how many bundles were written."""
    parser = command_parser("rlkit.replay.dumps", __doc__)
    parser.add_argument("trainer", choices=("verl", "trl"))
    parser.add_argument("dump", help="folder with the trainer's files")
    parser.add_argument("out", help="folder for the bundles")
    parser.add_argument("--model", required=True, help="model to be trained; its tokenizer and chat template are used")
    parser.add_argument("--task", default="", help="task that the prompts come from, see docs/tasks.md")
    parser.add_argument("--max_new_tokens", type=int, default=0, help="responses this long were truncated; 0: none")
    options = parser.parse_args(arguments)
    with one_sentence_errors("dumps"):
        steps = read_verl(options.dump) if options.trainer == "verl" else read_trl(options.dump)
        task = load_task(options.task) if options.task else None
        processor = load_processor(options.model)
        tokenizer = getattr(processor, "tokenizer", processor)
        done = convert(
            steps,
            options.out,
            processor,
            origin="verl" if options.trainer == "verl" else "TRL",
            rows=task.train if task else (),
            heldout=task.heldout if task else (),
            ends=model_end_token_ids(model_path(options.model), load_config(options.model), tokenizer),
            max_new_tokens=options.max_new_tokens,
        )
    if done.skipped:
        print(f"rows of {options.task} that were skipped: {len(done.skipped)}, the first because of: {done.skipped[0]}")
    if done.held_out:
        print(f"responses to held-out rows of {options.task}, left out: {done.held_out}")
    count = done.bundles
    print(f"{count} bundles in {options.out}; train on them with --from_rollouts {options.out} --steps {count}")


if __name__ == "__main__":
    main()
