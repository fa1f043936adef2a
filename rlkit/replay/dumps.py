"""Bundles from what verl and TRL log, to train on with --from_rollouts.

python -m rlkit.replay.dumps verl DIR OUT --model MODEL [--task TASK]   # verl: trainer.rollout_data_dir=DIR
python -m rlkit.replay.dumps trl DIR OUT --model MODEL [--task TASK]    # TRL: log_completions=True, DIR/completions

Both log text: token ids, log-probabilities and images are not there. Prompts become tokens again by their row in
--task, which also has the images; without a task, by the model's chat template (TRL's messages) or as they stand (verl
drops the template's special tokens, so name the task). Answers are tokenized again and get an end token, which neither
logs, unless they have --max_new_tokens. Log-probabilities are those of the trainer when a recipe reads the bundles.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlkit.data import load_task
from rlkit.data.samples import Sample, append_response, prompt_sample
from rlkit.replay.bundles import Bundle, Draw, bundle_path, write_bundle
from rlkit.runs.start import one_sentence_errors
from rlkit.vlm import encode_prompt, load_processor

NOT_REWARDS = ("step", "advantage")


@dataclass(frozen=True)
class Logged:
    """One answer of a dump.

    Attributes:
        prompt: text, or a conversation of messages.
        answer: text of the policy.
        reward: nan if it is unknown.
        truth: what the answer is compared with, if the dump has it.
    """

    prompt: str | Sequence[Mapping[str, Any]]
    answer: str
    reward: float
    truth: Any = None


def read_verl(folder: str | Path) -> Iterator[list[Logged]]:
    """The answers of each step in verl's `trainer.rollout_data_dir`: 1.jsonl, 2.jsonl, ...

    Raises:
        ValueError: no such files, or a line without `input`, `output` and `score`.
    """
    files = sorted((path for path in Path(folder).glob("*.jsonl") if path.stem.isdecimal()), key=lambda x: int(x.stem))
    if not files:
        raise ValueError(f"dump {str(folder)!r}: expected verl's files 1.jsonl, 2.jsonl, ..., got none")
    for file in files:
        step = []
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
                step.append(Logged(row["input"], row["output"], float(row["score"]), row.get("gts")))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{file}, line {number}: expected input, output and score, got {error!r}") from error
        yield step


def read_trl(folder: str | Path) -> Iterator[list[Logged]]:
    """The answers of each step in TRL's `completions_00001.parquet`, ...; the reward is the sum of all reward columns.

    Raises:
        ValueError: no such files, or one without the columns `prompt` and `completion`.
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
    answer = row["completion"]
    text = answer if isinstance(answer, str) else "".join(_text_of(message["content"]) for message in answer)
    return Logged(row["prompt"], text, sum(known) if known else math.nan)


def _text_of(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def convert(
    steps: Iterator[list[Logged]],
    out: str | Path,
    processor: Any,
    *,
    origin: str,
    rows: Sequence[Mapping[str, Any]] = (),
    max_new_tokens: int = 0,
) -> int:
    """Write a bundle of each step; returns how many.

    Args:
        out: a folder, for --from_rollouts.
        processor: of the model that will train.
        origin: "verl" or "TRL".
        rows: of the task that the prompts come from; without any, prompts are tokenized as they were logged.
        max_new_tokens: answers of so many tokens were cut, so they get no end token. 0: none was.

    Raises:
        ValueError: a prompt that is none of the rows' or the same text as several of them.
    """
    index: dict[str, list[Sample]] = {}
    for row in rows:
        sample = encode_prompt(processor, row)
        index.setdefault(_key(processor, sample), []).append(sample)
    count = 0
    for count, step in enumerate(steps, 1):
        groups: dict[str, list[Logged]] = {}
        for logged in step:
            groups.setdefault(json.dumps(logged.prompt, default=str), []).append(logged)
        samples = []
        for group_id, answers in enumerate(groups.values()):
            prompt = replace(_prompt(processor, answers[0], index), group_id=group_id)
            for number, logged in enumerate(answers):
                answered = _answered(processor, prompt, logged.answer, max_new_tokens)
                samples.append(replace(answered, number=number, reward=logged.reward))
        write_bundle(bundle_path(out, count - 1), Bundle(count - 1, origin=origin, draws=[Draw(samples)]))
    return count


def _prompt(processor: Any, logged: Logged, index: Mapping[str, Sequence[Sample]]) -> Sample:
    tokenizer = getattr(processor, "tokenizer", processor)
    if isinstance(logged.prompt, str):
        row = {"question": logged.prompt, "answer": logged.truth}
        sample = prompt_sample(tokenizer(logged.prompt, add_special_tokens=False).input_ids, row=row)
    else:
        sample = encode_prompt(processor, {"messages": logged.prompt, "answer": logged.truth})
    if not index:
        return sample
    found = index.get(_key(processor, sample), [])
    if len(found) != 1:
        raise ValueError(
            f"prompt {str(logged.prompt)[:80]!r}: expected the text of one row of --task, got that of {len(found)} rows"
        )
    return found[0]


def _key(processor: Any, sample: Sample) -> str:
    """A prompt as both trainers log it: without special tokens."""
    tokenizer = getattr(processor, "tokenizer", processor)
    return " ".join(tokenizer.decode(sample.token_ids, skip_special_tokens=True).split())


def _answered(processor: Any, prompt: Sample, text: str, max_new_tokens: int) -> Sample:
    tokenizer = getattr(processor, "tokenizer", processor)
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    cut = bool(max_new_tokens) and len(tokens) >= max_new_tokens
    if not cut:
        tokens = [*tokens, tokenizer.eos_token_id]
    reason = "length" if cut else "stop"
    return append_response(prompt, tokens, [math.nan] * len(tokens), text=text, finish_reason=reason)


def main(arguments: Sequence[str] | None = None) -> None:
    """Convert a dump and print how many bundles were written."""
    parser = argparse.ArgumentParser(
        "python -m rlkit.replay.dumps",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trainer", choices=("verl", "trl"))
    parser.add_argument("dump", help="folder with the trainer's files")
    parser.add_argument("out", help="folder for the bundles")
    parser.add_argument("--model", required=True, help="model that will train; its tokenizer and template are used")
    parser.add_argument("--task", default="", help="task whose rows the prompts were made of, see docs/tasks.md")
    parser.add_argument("--max_new_tokens", type=int, default=0, help="answers of so many tokens were cut; 0: none was")
    options = parser.parse_args(arguments)
    with one_sentence_errors("dumps"):
        steps = read_verl(options.dump) if options.trainer == "verl" else read_trl(options.dump)
        rows = list(load_task(options.task).train) if options.task else []
        origin = "verl" if options.trainer == "verl" else "TRL"
        limit = options.max_new_tokens
        count = convert(
            steps, options.out, load_processor(options.model), origin=origin, rows=rows, max_new_tokens=limit
        )
    print(f"{count} bundles in {options.out}; train on them with --from_rollouts {options.out} --steps {count}")


if __name__ == "__main__":
    main()
