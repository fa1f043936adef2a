"""Small files of the formats that people have: what each gives as a prompt, as its images, and as a reward.

Each file of prompts has three rows: two with an answer, and one without, whose answers nobody can judge.
"""

import json
import math
import re
from pathlib import Path

import datasets
import pytest
from PIL import Image

from rlkit.data import collate, load_chats, load_pairs, load_task, load_unpaired, prompt_sample
from rlkit.rewards import score
from rlkit.vlm import encode_chat, encode_prompt, encode_responses, load_processor

HERE = Path(__file__).parent
SEEN = "<|vision_start|><|image_pad|><|vision_end|>"
COLOURS = {(200, 30, 30): 0, (30, 160, 60): 1, (40, 60, 200): 2}  # of the pictures, by their numbers
TOOLS = (  # as Qwen's templates write them
    "{% if tools %}<|im_start|>system\n{% for t in tools %}TOOL {{ t.function.name }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }} town={{ c.function.arguments.town }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def processor(tiny_dir):
    return load_processor(tiny_dir)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")
    datasets.disable_progress_bars()


def turn(role, text):
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def prompt(*turns, system=""):
    """A prompt of turns of the user and the assistant."""
    said = [turn(("user", "assistant")[i % 2], text) for i, text in enumerate(turns)]
    return (turn("system", system) if system else "") + "".join(said) + "<|im_start|>assistant\n"


def rows_of(task):
    """All rows in the order of the file."""
    return sorted(task.splits["train"], key=lambda row: int(row["where"].rsplit(" ", 1)[1]))


def shown(processor, sample):
    """The prompt as the model reads it, with one placeholder an image, and the numbers of its pictures."""
    text = getattr(processor, "tokenizer", processor).decode(sample.compact_ids)
    return text, [COLOURS[image.getpixel((5, 5))] for image in sample.images]


def scored(reward, row, text):
    """nan: nobody can tell."""
    return score(reward, [prompt_sample([1], row=row, text=text)]).item()


# the file -> its reward; of its first row: prompt, pictures, a right answer and a wrong one
PROMPTS = {
    "question_answer.jsonl": ("exact", prompt("What is the capital of France?"), [], "paris", "Rome"),
    "question_answer.json": ("exact", prompt("What is the capital of France?"), [], "Paris", "Paris, France"),
    "question_answer.csv": (
        "exact",
        prompt("What is the capital of France, and of no other country?"),
        [],
        "Paris",
        "Rome",
    ),
    "question_answer.tsv": ("exact", prompt('Is it "warm" outside?'), [], "Yes", "no"),
    "photographs.jsonl": ("exact", prompt(SEEN + "What colour is it?"), [0], "red", "green"),
    "photographs_or_none.jsonl": (
        "exact",
        prompt(SEEN + SEEN + "What colours are these?"),
        [0, 1],
        "red, green",
        "green, red",
    ),
    "marked_images.jsonl": ("exact", prompt(f"First {SEEN}, then {SEEN}: which is red?"), [0, 1], "first", "the first"),
    "choices.jsonl": (
        "choice",
        prompt(f"{SEEN}\nWhat colour is it?\nA. red\nB. green"),
        [0],
        "The answer is (A).",
        "B",
    ),
    "solutions.jsonl": ("maths", prompt("What is 1/4 + 1/4?"), [], "It is \\boxed{0.5}.", "It is \\boxed{2}."),
    "words.jsonl": ("f1", prompt("Which tower stands in Paris?"), [], "Eiffel tower", "a bridge"),
    "boxed.jsonl": ("boxed", prompt("What is the capital of Peru?"), [], "\\boxed{\\text{Lima}}", "Lima"),
    "trl_prompt_completion.jsonl": ("exact", prompt("The sky is"), [], "blue.", "green."),
    "trl_prompt_messages.jsonl": ("exact", prompt("What colour is the sky?", system="Be brief."), [], "blue", "green"),
    "trl_chat_completion.jsonl": ("exact", prompt("What colour is the sky?"), [], "blue", "green"),
    "messages.jsonl": ("exact", prompt("What colour is the sky?", system="Be brief."), [], "Blue.", "Green."),
    "messages_answer.jsonl": ("maths", prompt("What is 3 + 4?"), [], "7", "Three and four make seventy."),
    "messages_images.jsonl": ("exact", prompt(SEEN + "What colour is it?"), [0], "red", "blue"),
    "messages_tools.jsonl": (
        "exact",
        turn("system", "TOOL weather\n")
        + turn("user", "Is it warm in Rome?")
        + turn("assistant", "CALL weather town=Rome")
        + turn("tool", "31 degrees")
        + "<|im_start|>assistant\n",
        [],
        "Yes.",
        "No.",
    ),
    "sharegpt.jsonl": ("exact", prompt("What colour is the sky?", system="Be brief."), [], "Blue.", "Green."),
    "sharegpt_tools.json": (
        "exact",
        turn("system", "TOOL weather\n")
        + turn("system", "Use tools.")
        + turn("user", "Is it warm in Rome?")
        + turn("assistant", "CALL weather town=Rome")
        + turn("tool", "31 degrees")
        + "<|im_start|>assistant\n",
        [],
        "Yes.",
        "No.",
    ),
    "llava.json": ("exact", prompt(f"{SEEN}\nWhat colour is it?"), [0], "Red.", "Green."),
    "alpaca.json": ("exact", prompt("Name the colour.\nthe sky"), [], "Blue.", "Green."),
    "alpaca_history.jsonl": (
        "exact",
        prompt("What colour is the sky?", "Blue.", "And grass?", system="Be brief."),
        [],
        "Green.",
        "Blue.",
    ),
    "verl.jsonl": ("exact", prompt(SEEN + "What colour is it?"), [0], "red", "green"),
    "verl.parquet": ("exact", prompt(SEEN + "What colour is it?"), [0], "red", "green"),
    "images.parquet": ("exact", prompt(SEEN + "What colour is it?"), [1], "green", "red"),
    "anthropic_prompts.jsonl": (
        "exact",
        prompt("Who are you?", "A bot.", "Really? I am not sure: say more."),
        [],
        "yes",
        "no",
    ),
}


def path_of(name, folder):
    """A file of the folder; parquet is written here, as verl and datasets write it."""
    if name == "verl.parquet":
        rows = [json.loads(line) for line in (HERE / "verl.jsonl").read_text().splitlines()]
        for row in rows:
            row["images"] = [{"bytes": (HERE / image["path"]).read_bytes(), "path": None} for image in row["images"]]
        datasets.Dataset.from_list(rows).to_parquet(folder / name)
    elif name == "images.parquet":
        table = {
            "question": ["What colour is it?"] * 3,
            "answer": ["green", "blue", None],
            "image": [Image.open(HERE / "pictures" / f"{i}.png").copy() for i in (1, 2, 0)],
        }
        datasets.Dataset.from_dict(table).cast_column("image", datasets.Image()).to_parquet(folder / name)
    else:
        return str(HERE / name)
    return str(folder / name)


def reader(processor, name):
    """The processor, or a text model whose template shows tools."""
    if "tools" not in name:
        return processor
    tokenizer = load_processor(processor.tokenizer.name_or_path).tokenizer
    tokenizer.chat_template = TOOLS
    return tokenizer


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(name, processor, tmp_path):
    reward, text, pictures, right, wrong = PROMPTS[name]
    task = load_task(path_of(name, tmp_path), reward=reward)
    rows = rows_of(task)
    assert len(rows) == 3 and (len(task.train), len(task.heldout)) == (2, 1)
    samples = [encode_prompt(reader(processor, name), row) for row in rows]
    collate(samples)  # compact_ids expand to token_ids
    assert shown(processor, samples[0]) == (text, pictures)
    assert scored(task.reward, rows[0], right) == 1 and scored(task.reward, rows[0], wrong) == 0
    assert scored(task.reward, rows[1], wrong) in (0.0, 1.0)  # the second has an answer too
    assert math.isnan(scored(task.reward, rows[2], right))


FOR_REWARDS = {"words.jsonl", "solutions.jsonl", "verl.jsonl", "verl.parquet", "messages_answer.jsonl"}


@pytest.mark.parametrize("name", [name for name in PROMPTS if name not in FOR_REWARDS])
def test_prompts_with_their_answers_are_imitated(name, processor, tmp_path):
    row = rows_of(load_chats(path_of(name, tmp_path)))[0]
    with_tools = reader(processor, name)
    begun = encode_prompt(with_tools, row)
    sample = encode_chat(begun, with_tools, [processor.tokenizer.eos_token_id], 500)
    assert sample.token_ids[: len(begun.token_ids)] == begun.token_ids
    answer = f"{row['completion']}<|im_end|>"
    assert processor.tokenizer.decode(sample.response_ids).endswith(answer)


# --- answers to learn from

TRAINED = {
    "plain_text.jsonl": ("", ["upon a time there was a spider.<|im_end|>"]),
    "ultrachat.jsonl": (
        prompt("What colour is the sky?", "Blue.", "And grass?"),
        ["Blue.<|im_end|>", "Green.<|im_end|>"],
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_chats(name, processor):
    text, trained = TRAINED[name]
    row = rows_of(load_chats(str(HERE / name)))[0]
    begun = encode_prompt(processor, row)
    sample = encode_chat(begun, processor, [processor.tokenizer.eos_token_id], 500)
    assert shown(processor, begun)[0] == text
    runs = re.findall("1+", "".join("01"[trained] for trained in sample.mask))
    assert len(runs) == len(trained)
    assert processor.tokenizer.decode(sample.response_ids).endswith("".join(trained))


PAIRS = {
    "pairs.jsonl": (prompt("What colour is the sky?"), [], "Blue.", "Green."),
    "pairs_images.jsonl": (prompt(SEEN + "What colour is it?"), [0], "Red.", "Blue."),
    "pairs_chats.jsonl": (prompt("What colour is the sky?"), [], "Blue.", "Green."),
    "pairs_implicit.jsonl": (prompt("The sky is "), [], "grey.", "green."),
    "pairs_anthropic.jsonl": (
        prompt("Who are you?", "A bot.", "Really? I am not sure: say more."),
        [],
        "I am sure that I am.",
        "I am sure: no.",
    ),
    "pairs_sharegpt.json": (prompt("What colour is the sky?"), [], "Blue.", "Green."),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name, processor):
    text, pictures, chosen, rejected = PAIRS[name]
    row = rows_of(load_pairs(str(HERE / name)))[0]
    begun = encode_prompt(processor, row)
    assert shown(processor, begun) == (text, pictures)
    ends = [processor.tokenizer.eos_token_id]
    samples = encode_responses(begun, processor, [row["chosen"], row["rejected"]], ends, 500)
    said = [processor.tokenizer.decode(sample.response_ids) for sample in samples]
    assert said == [f"{chosen}<|im_end|>", f"{rejected}<|im_end|>"]
    good, bad = rows_of(load_unpaired(str(HERE / name)))[:2]
    assert [(one["completion"], one["label"]) for one in (good, bad)] == [(chosen, True), (rejected, False)]


@pytest.mark.parametrize("name", ["marked.jsonl", "marked.csv"])
def test_marked_answers(name, processor):
    rows = rows_of(load_unpaired(str(HERE / name)))
    questions = [prompt("What colour is the sky?"), prompt("And grass?")]
    assert [shown(processor, encode_prompt(processor, row))[0] for row in rows] == questions
    assert [(row["completion"], row["label"]) for row in rows] == [("Blue.", True), ("Blue.", False)]


# --- what is broken: the sentence that says so, behind the file's name

BROKEN = {
    "audio_path.jsonl": (
        load_task,
        ": audios: expected a column audios or audio, not 'audio_path', got columns ['question', 'audio_path', "
        "'answer']",
    ),
    "other_part.jsonl": (
        load_task,
        " row 1: messages[0].content: expected parts of type text, image, video and audio, got {'type': 'sound', "
        "'sound': 'a.wav'}",
    ),
    "image_and_images.jsonl": (
        load_task,
        ": images and image: expected one of them, got columns ['question', 'image', 'images', 'answer']",
    ),
    "image_path.jsonl": (
        load_task,
        ": images: expected a column images or image, not 'image_path', got columns ['question', "
        "'image_path', 'answer']",
    ),
    "label_and_answer.jsonl": (load_task, " row 1: answer and label: expected one of them, got both"),
    "two_questions.jsonl": (load_task, " row 1: question and prompt: expected one question, got 2"),
    "number_as_prompt.jsonl": (load_task, " row 1: prompt: expected text or a list of messages, got 7"),
    "no_question.jsonl": (
        load_task,
        ": question: expected a column question or prompt or problem or messages or conversations or "
        "instruction, got columns ['query', 'answer']",
    ),
    "no_answer.csv": (
        load_task,
        ": answer: expected a column answer or solution or label or completion or output or reward_model or "
        "messages or conversations, got columns ['question', 'target']",
    ),
    "ragged.csv": (load_task, " row 1: expected 2 cells, got 3"),
    "same_names.csv": (load_task, ": expected different names of columns, got ['question', 'answer', 'answer']"),
    "mark_without_image.jsonl": (load_task, " row 1: images: expected one for each place, got 0 for 1 <image>"),
    "one_mark_for_two.jsonl": (load_task, " row 1: images: expected one for each place, got 2 for 1 <image>"),
    "image_without_place.jsonl": (load_task, " row 1: images: expected one for each place, got 1 for no place"),
    "unknown_speaker.jsonl": (
        load_task,
        " row 1: conversations[0]: expected from human, gpt, system, ... and a text as value, got {'from': "
        "'robot', 'value': 'What?'}",
    ),
    "no_role.jsonl": (
        load_task,
        " row 1: messages[0]: expected {\"role\": ..., \"content\": ...}, got {'content': 'What?'}",
    ),
    "two_truths.jsonl": (
        load_task,
        " row 1: reward_model.ground_truth and answer: expected one answer, got two that differ",
    ),
    "cut_short.jsonl": (
        load_task,
        ' line 2: expected json, got Unterminated string starting at: column 14, at \'{"question": "Wh\'',
    ),
    "no_object.json": (load_task, " row 1: expected an object, got 'What?'"),
    "empty.jsonl": (load_task, ": expected at least one row, got an empty file"),
    "pair_without_prompt.jsonl": (load_pairs, " row 1: question: expected text or messages, got none"),
    "same_pair.jsonl": (load_pairs, " row 1: chosen, rejected: expected two different responses, got the same"),
    "pairs.jsonl": (load_pairs, ": expected a file, got none of this name; '{folder}' has {files}"),
    "marked_in_words.jsonl": (load_unpaired, " row 1: label: expected true or false, got 'good'"),
    "nothing_to_imitate.jsonl": (
        load_chats,
        " row 1: answer: expected a text or one message of the assistant, got None",
    ),
    "two_to_imitate.jsonl": (load_chats, " row 1: answer and solution: expected one response to imitate, got 2"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(name):
    load, said = BROKEN[name]
    path, folder = HERE / "broken" / name, HERE / "broken"
    files = ", ".join(sorted(one.name for one in folder.glob("*.jsonl"))[:5])
    with pytest.raises(ValueError) as caught:
        load(str(path))
    assert str(caught.value) == f"{path}{said.replace('{folder}', str(folder)).replace('{files}', files)}"


def test_a_missing_image_is_a_bad_row(processor):
    path = HERE / "broken" / "missing_image.jsonl"
    (row,) = load_task(str(path)).train
    with pytest.raises(ValueError) as caught:
        encode_prompt(processor, row)
    image = HERE / "broken" / "gone.png"
    assert str(caught.value) == (
        f"{path} row 1: image '{image}': cannot be read: [Errno 2] No such file or directory: '{image}'"
    )


def test_every_file_is_tried():
    tried = {*PROMPTS, *TRAINED, *PAIRS, "marked.jsonl", "marked.csv"} - {"verl.parquet", "images.parquet"}
    assert tried == {path.name for path in HERE.iterdir() if path.suffix in (".jsonl", ".json", ".csv", ".tsv")}
    assert len(tried) >= 30
    broken = {path.name for path in (HERE / "broken").iterdir()}
    assert broken == {*BROKEN, "missing_image.jsonl"} - {"pairs.jsonl"}
