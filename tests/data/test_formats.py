"""Rows in the formats that people have, and what they become."""

import json

import numpy as np
import pytest

from rlkit.data.formats import chat_row, check_columns, pair_row, task_row, unpaired_row


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


SYSTEM = {"role": "system", "content": "Be brief."}
SEEN = [{"type": "image"}, {"type": "text", "text": "Q"}]
HUMAN = "\n\nHuman: Who are you?\n\nAssistant: A bot.\n\nHuman: Really? Say more.\n\nAssistant:"
HUMAN_TURNS = [user("Who are you?"), assistant("A bot."), user("Really? Say more.")]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
GREETED = [assistant("Hello."), user("Q")]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED = [{"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "2"}]


@pytest.mark.parametrize(
    ("raw", "messages", "images", "answer"),
    [
        ({"question": "Q", "answer": 3}, [user("Q")], [], 3),
        ({"problem": "Q", "solution": "3", "image": "x"}, [user(SEEN)], ["x"], "3"),
        ({"prompt": "Q", "label": 0, "images": ["x"]}, [user(SEEN)], ["x"], 0),
        ({"question": "Q", "answer": "3", "solution": "1 + 2 = 3"}, [user("Q")], [], "3"),
        ({"question": "Q", "system": "Be brief.", "answer": "3"}, [SYSTEM, user("Q")], [], "3"),
        # TRL
        ({"prompt": "Q", "completion": " 3"}, [user("Q")], [], " 3"),
        ({"prompt": [SYSTEM, user("Q")], "completion": [assistant("3")]}, [SYSTEM, user("Q")], [], "3"),
        ({"prompt": [user("Q")], "answer": "3"}, [user("Q")], [], "3"),
        # messages: the last turn of the assistant is the answer, or a column is
        ({"messages": [SYSTEM, user("Q"), assistant("3")]}, [SYSTEM, user("Q")], [], "3"),
        ({"messages": [user("Q"), assistant("It is 3.")], "answer": "3"}, [user("Q")], [], "3"),
        ({"messages": [user("Q")], "answer": "3"}, [user("Q")], [], "3"),
        (
            {"messages": [user("Q"), assistant("a"), user("R"), assistant("3")]},
            [user("Q"), assistant("a"), user("R")],
            [],
            "3",
        ),
        ({"prompt": "Q", "messages": [user("Q"), assistant("3")]}, [user("Q")], [], "3"),  # UltraChat
        # ShareGPT, LLaVA
        (
            {"conversations": [{"from": "human", "value": "<image>Q"}, {"from": "gpt", "value": "3"}], "image": "x"},
            [user(SEEN)],
            ["x"],
            "3",
        ),
        (
            {
                "conversations": [
                    {"from": "system", "value": "Be brief."},
                    {"from": "human", "value": "Q"},
                    {"from": "gpt", "value": "3"},
                ]
            },
            [SYSTEM, user("Q")],
            [],
            "3",
        ),
        ({"conversations": [user("Q"), assistant("3")], "system": "Be brief."}, [SYSTEM, user("Q")], [], "3"),
        # Alpaca
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, [user("Add.\n1 2")], [], "3"),
        (
            {"instruction": "Add 1 2.", "input": "", "output": "3", "system": "Be brief.", "history": [["Q", "a"]]},
            [SYSTEM, user("Q"), assistant("a"), user("Add 1 2.")],
            [],
            "3",
        ),
        # verl
        (
            {
                "data_source": "g",
                "prompt": [user("<image>Q")],
                "images": [{"bytes": b"x"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": "3"},
                "extra_info": {"split": "train", "index": 0},
            },
            [user(SEEN)],
            [{"bytes": b"x"}],
            "3",
        ),
        ({"prompt": [user("Q")], "reward_model": {"ground_truth": "3"}, "solution": "3"}, [user("Q")], [], "3"),
        # Anthropic's prompts
        ({"prompt": HUMAN, "answer": "3"}, HUMAN_TURNS, [], "3"),
    ],
)
def test_tasks(raw, messages, images, answer):
    row = task_row({**raw, "where": "row 1", "level": 2})
    assert (row["messages"], row["images"], row["answer"]) == (messages, images, answer)
    assert (row["where"], row["level"]) == ("row 1", 2) and row["question"] in ("Q", "R") or len(raw) > 1
    assert task_row(row) == row  # what is read stays as it is


def test_an_answer_that_is_a_json_list_of_other_objects_stays_text():
    answer = json.dumps([{"from": "Paris", "to": "Rome"}])
    assert chat_row({"prompt": "q", "completion": answer})["completion"] == answer


def test_messages_may_be_json_text():
    """As in .csv files; other JSON is text."""
    prompt, turns = [SYSTEM, user("Q")], [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "b"}]
    row = chat_row({"prompt": json.dumps(prompt), "completion": json.dumps([assistant("3")])})
    assert (row["messages"], row["completion"]) == (prompt, "3")
    row = pair_row({"chosen": json.dumps([user("Q"), assistant("a")]), "rejected": json.dumps(turns)})
    assert (row["messages"], row["chosen"], row["rejected"]) == ([user("Q")], "a", "b")
    for text in ("[]", "[1, 2]", '[{"name": "add"}]', '{"role": "king"}', "[" * 9999, '[{"role"', '[{"from": 1}, 2]'):
        row = pair_row({"prompt": text, "chosen": f"{text} ", "rejected": "b"})
        assert row["messages"] == [user(text)] and row["chosen"] == f"{text} "


def test_the_question_is_for_people():
    assert task_row({"question": "Look: <image>\nWhat?", "image": "x", "answer": "3"})["question"] == "Look: \nWhat?"
    assert task_row({"question": " Q ", "answer": "3"})["question"] == " Q "
    assert task_row({"messages": [user("Q"), assistant("a"), user("R"), assistant("3")]})["question"] == "R"


def test_tools_of_messages_and_of_sharegpt():
    raw = {
        "tools": TOOLS,
        "messages": [
            user("Q"),
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "content": "2"},
            assistant("It is 2."),
        ],
    }
    shared = {
        "tools": '[{"type": "function", "function": {"name": "add", "parameters": {}}}]',
        "conversations": [
            {"from": "human", "value": "Q"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "It is 2."},
        ],
    }
    for row in (task_row(raw), task_row(shared), chat_row(raw), chat_row(shared)):
        called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        assert row["messages"] == [user("Q"), called, {"role": "tool", "content": "2"}]
        assert row["tools"] == TOOLS and row["answer"] == "It is 2."
    last = chat_row({**raw, "messages": raw["messages"][:2]})["completion"]
    assert last == {"role": "assistant", "content": "", "tool_calls": [CALL]}  # a call is an answer too


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        ({"answer": "3"}, "question: expected text or messages, got none"),
        ({"question": None, "answer": "3"}, "question: expected text or messages, got none"),
        ({"question": 5, "answer": "3"}, "question: expected text or a list of messages, got 5"),
        ({"prompt": {"a": 1}, "answer": "3"}, 'prompt[0]: expected {"role": ..., "content": ...}, got {\'a\': 1}'),
        ({"question": "Q", "prompt": "R", "answer": "3"}, "question and prompt: expected one question, got 2"),
        ({"messages": [user("Q")], "prompt": "R", "answer": "3"}, "messages and prompt: expected one question, got 2"),
        (
            {"messages": [user("Q")], "conversations": [user("Q")], "answer": "3"},
            "messages and conversations: expected one question, got 2",
        ),
        ({"question": "Q", "label": 1, "answer": "3"}, "answer and label: expected one of them, got both"),
        (
            {"prompt": [user("Q")], "reward_model": {"ground_truth": "3"}, "answer": "4"},
            "reward_model.ground_truth and answer: expected one answer, got two that differ",
        ),
        (
            {"question": "Q", "answer": "3", "image": "x", "images": ["y"]},
            "images and image: expected one of them, got both",
        ),
        (
            {"question": "Q", "answer": "3", "system": "S", "messages": [SYSTEM, user("Q")]},
            "system: expected one system message, got a column and a message that differ",
        ),
        (
            {"messages": [user("Q"), assistant("a")], "completion": "b"},
            "messages and completion: expected one response, got two",
        ),
        ({"question": "<image>Q", "answer": "3"}, "images: expected one for each place, got 0 for 1 <image>"),
        (
            {"conversations": [{"from": "x", "value": 1}]},
            "conversations[0]: expected from human, gpt, system, ... and a text as value, got "
            "{'from': 'x', 'value': 1}",
        ),
        (
            {"conversations": [{"from": ["human"], "value": "Q"}]},
            "conversations[0]: expected from human, gpt, system, ... and a text as value, got "
            "{'from': ['human'], 'value': 'Q'}",
        ),
        ({"conversations": "Q"}, 'conversations: expected a list of {"from": ..., "value": ...}, got \'Q\''),
        (
            {"conversations": [{"from": "human", "value": "Q"}, {"from": "function_call", "value": "add(1)"}]},
            "conversations[1][0].tool_calls: expected a function's name and its arguments, got 'add(1)'",
        ),
        ({"instruction": "I", "input": ["a", "b"], "output": "3"}, "input: expected text, got ['a', 'b']"),
        (
            {"instruction": "I", "output": "3", "history": ["Q"]},
            "history: expected pairs of a question and an answer, got 'Q'",
        ),
        ({"question": "Q", "answer": "3", "tools": "add"}, "tools: expected a list of functions, got 'add'"),
    ],
)
def test_what_is_ambiguous_or_no_question_is_refused(raw, error):
    with pytest.raises(ValueError) as caught:
        task_row(raw)
    assert str(caught.value) == error


# --- answers to imitate


def test_chats():
    assert chat_row({"question": "Q", "answer": 3})["completion"] == "3"
    assert chat_row({"question": "Q", "answer": "3", "images": ["x"]})["messages"] == [user(SEEN)]
    row = chat_row({"messages": [SYSTEM, user("Q"), assistant([{"type": "text", "text": "a"}])], "images": ["x"]})
    assert row["messages"] == [SYSTEM, user(SEEN)] and row["completion"] == row["answer"] == "a"
    row = chat_row({"prompt": "Q", "completion": "It is 3.", "answer": "3"})
    assert row["completion"] == "It is 3." and row["answer"] == "3" and chat_row(row)["completion"] == "It is 3."
    assert chat_row(task_row({"problem": "Q", "solution": "3"}))["completion"] == "3"
    chat = {"messages": [user("Q"), assistant("It is 3.")], "answer": "3"}
    for raw in (chat, {"prompt": [user("Q")], "completion": [assistant("It is 3.")], "answer": "3"}):
        row = chat_row(task_row(raw))  # a function's task
        assert row["completion"] == "It is 3." and row["answer"] == "3"
    assert "completion" not in task_row({"question": "Q", "answer": "3"})
    row = chat_row({"text": "Once upon a time."})
    assert (row["plain_text"], row["question"], row["images"], row["answer"]) == ("Once upon a time.", "", [], None)
    assert "plain_text" not in chat_row({"text": "a comment", "question": "Q", "answer": "3"})


@pytest.mark.parametrize(
    ("answer", "completion"), [(3.0, "3"), (3.5, "3.5"), (3, "3"), (["3"], "3"), (np.float64(-2), "-2"), ("3.0", "3.0")]
)
def test_numbers_and_lists_of_one_as_answers_to_imitate(answer, completion):
    """pandas makes a column of integers with a gap one of floats; ChartQA has its answers in lists."""
    for raw in ({"question": "Q", "answer": answer}, {"instruction": "Q", "output": answer}):
        assert chat_row(raw)["completion"] == completion


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        ({"messages": [user("Q")]}, "answer: expected a text or one message of the assistant, got None"),
        ({"messages": [user("Q"), assistant(None)]}, "messages[1].content: expected text or a list of parts, got None"),
        ({"question": "Q"}, "answer: expected a text or one message of the assistant, got None"),
        (
            {"question": "Q", "answer": {"text": "a"}},
            "answer: expected a text or one message of the assistant, got {'text': 'a'}",
        ),
        (
            {"question": "Q", "answer": ["3", "4"]},
            "answer: expected a text or one message of the assistant, got ['3', '4']",
        ),
        (
            {"instruction": "Q", "output": ["a", "b"]},
            "output: expected a text or one message of the assistant, got ['a', 'b']",
        ),
        ({"question": "Q", "answer": "3", "system": {"text": "S"}}, "system: expected text, got {'text': 'S'}"),
        ({"question": "Q", "answer": True}, "answer: expected a text or one message of the assistant, got True"),
        (
            {"question": "Q", "answer": "3", "solution": "1 + 2"},
            "answer and solution: expected one response to imitate, got 2",
        ),
        ({"text": 5}, "question: expected text or messages, got none"),
    ],
)
def test_bad_chats_are_named(raw, error):
    with pytest.raises(ValueError) as caught:
        chat_row(raw)
    assert str(caught.value) == error


# --- pairs


@pytest.mark.parametrize(
    ("raw", "messages", "chosen", "rejected"),
    [
        # RLAIF-V, and TRL's explicit prompt
        ({"question": "Q", "chosen": "a", "rejected": "b"}, [user("Q")], "a", "b"),
        ({"question": "Q", "chosen": "a", "rejected": "b", "images": ["x"]}, [user(SEEN)], "a", "b"),
        ({"prompt": "<image>Q", "chosen": "a", "rejected": "b", "image": "x"}, [user(SEEN)], "a", "b"),
        # TRL, a chat
        (
            {"prompt": [SYSTEM, user("Q")], "chosen": [assistant("a")], "rejected": [assistant("b")]},
            [SYSTEM, user("Q")],
            "a",
            "b",
        ),
        (
            {"prompt": [SYSTEM, user("Q")], "chosen": [assistant("a")], "rejected": [assistant("b")], "images": ["x"]},
            [SYSTEM, user(SEEN)],
            "a",
            "b",
        ),
        (
            {
                "prompt": [user(SEEN)],
                "chosen": [assistant([{"type": "text", "text": "a"}])],
                "images": ["x"],
                "rejected": [assistant([{"type": "text", "text": "b"}])],
            },
            [user(SEEN)],
            "a",
            "b",
        ),
        # TRL, an implicit prompt
        ({"chosen": [user("Q"), assistant("a")], "rejected": [user("Q"), assistant("b")]}, [user("Q")], "a", "b"),
        ({"chosen": "The sky is blue.", "rejected": "The sky is green."}, [user("The sky is ")], "blue.", "green."),
        ({"chosen": "The sky is grey.", "rejected": "The sky is green."}, [user("The sky is ")], "grey.", "green."),
        ({"input": "", "chosen": "It is so.", "rejected": "It is no."}, [user("It is ")], "so.", "no."),
        (
            {"context": "C", "chosen": [user("Q"), assistant("a")], "rejected": [user("Q"), assistant("b")]},
            [user("Q")],
            "a",
            "b",
        ),
        # Anthropic
        (
            {"chosen": f"{HUMAN} I am sure I am.", "rejected": f"{HUMAN} I am sure: no."},
            HUMAN_TURNS,
            "I am sure I am.",
            "I am sure: no.",
        ),
        ({"prompt": HUMAN, "chosen": " Yes.", "rejected": " No."}, HUMAN_TURNS, " Yes.", " No."),
        # UltraFeedback, and several turns before the answer
        (
            {
                "prompt": "Q",
                "chosen": [user("Q"), assistant("a")],
                "rejected": [user("Q"), assistant("b")],
                "messages": [user("Q"), assistant("a")],
                "score_chosen": 8.0,
            },
            [user("Q")],
            "a",
            "b",
        ),
        (
            {
                "chosen": [user("Q"), assistant("m"), user("R"), assistant("a")],
                "rejected": [user("Q"), assistant("m"), user("R"), assistant("b")],
            },
            [user("Q"), assistant("m"), user("R")],
            "a",
            "b",
        ),
        (
            {"chosen": "Ask:\nQ\n\nSay:\nYes", "rejected": "Ask:\nQ\n\nSay:\nNo"},
            [user("Ask:\nQ\n\nSay:\n")],
            "Yes",
            "No",
        ),
        # answers with the same beginning, which go on from the prompt
        (
            {"prompt": [user("Q")], "chosen": [*CALLED, assistant("a")], "rejected": [*CALLED, assistant("b")]},
            [user("Q"), *CALLED],
            "a",
            "b",
        ),
        (
            {
                "system": "Be brief.",
                "prompt": "Q",
                "chosen": [*CALLED, assistant("a")],
                "rejected": [*CALLED, assistant("b")],
            },
            [SYSTEM, user("Q"), *CALLED],
            "a",
            "b",
        ),
        # chats that begin with the assistant, and have the prompt
        (
            {"prompt": "Q", "chosen": [*GREETED, assistant("a")], "rejected": [*GREETED, assistant("b")]},
            GREETED,
            "a",
            "b",
        ),
        ({"chosen": [*GREETED, assistant("a")], "rejected": [*GREETED, assistant("b")]}, GREETED, "a", "b"),
        (
            {"system": "Be brief.", "chosen": [user("Q"), assistant("a")], "rejected": [user("Q"), assistant("b")]},
            [SYSTEM, user("Q")],
            "a",
            "b",
        ),
        # LLaMA-Factory
        (
            {
                "conversations": [{"from": "human", "value": "Q"}],
                "chosen": {"from": "gpt", "value": "a"},
                "rejected": {"from": "gpt", "value": "b"},
            },
            [user("Q")],
            "a",
            "b",
        ),
        ({"instruction": "I", "input": "Q", "chosen": "a", "rejected": "b"}, [user("I\nQ")], "a", "b"),
    ],
)
def test_pairs(raw, messages, chosen, rejected):
    row = pair_row(raw)
    assert (row["messages"], row["chosen"], row["rejected"], row["answer"]) == (messages, chosen, rejected, None)
    assert pair_row(row) == row


def test_a_system_column_that_repeats_the_chats_system_message_is_read():
    """Of pairs and of tasks."""
    raw = {"system": SYSTEM["content"], "chosen": [SYSTEM, user("Q"), assistant("a")]}
    pair = pair_row({**raw, "rejected": [SYSTEM, user("Q"), assistant("b")]})
    assert pair["messages"] == [SYSTEM, user("Q")] and (pair["chosen"], pair["rejected"]) == ("a", "b")
    in_parts = {"role": "system", "content": [{"type": "text", "text": SYSTEM["content"]}]}
    for system in (SYSTEM, in_parts):
        task = task_row({"system": SYSTEM["content"], "messages": [system, user("Q"), assistant("a")]})
        assert len(task["messages"]) == 2 and task["answer"] == "a"


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (
            {"question": "Q", "chosen": "a", "rejected": "a"},
            "chosen, rejected: expected two different responses, got the same",
        ),
        (
            {"question": "Q", "chosen": "a", "rejected": None},
            "rejected: expected a text or one message of the assistant, got None",
        ),
        (
            {
                "system": "S",
                "chosen": [SYSTEM, user("Q"), assistant("a")],
                "rejected": [SYSTEM, user("Q"), assistant("b")],
            },
            "system: expected one system message, got a column and a message that differ",
        ),
        ({"chosen": "red", "rejected": "green"}, "question: expected text or messages, got none"),
        (
            {"system": "S", "input": "Capital?", "chosen": "The city is Paris.", "rejected": "The city is Rome."},
            "input: expected a prompt in a column prompt; rename this one, or remove it",
        ),
        (
            {"query": "Capital?", "chosen": "The city is Paris.", "rejected": "The city is Rome."},
            "query: expected a prompt in a column prompt; rename this one, or remove it",
        ),
        ({"chosen": [assistant("a")], "rejected": [assistant("b")]}, "question: expected text or messages, got none"),
        (
            {
                "chosen": [user("Q"), assistant("a"), user("R"), assistant("c")],
                "rejected": [user("Q"), assistant("b"), user("R"), assistant("c")],
            },
            "chosen: expected a text or one message of the assistant, got 3 messages, the first of role 'assistant'",
        ),
        (
            {"question": "Q", "chosen": [user("a")], "rejected": [user("b")]},
            "chosen: expected a text or one message of the assistant, got 1 messages, the first of role 'user'",
        ),
        (
            {"chosen": f"{HUMAN} Yes.", "rejected": f"{HUMAN} No.\n\nHuman: Why?\n\nAssistant: So."},
            "rejected: expected a text or one message of the assistant, got 3 messages, the first of role 'assistant'",
        ),
    ],
)
def test_bad_pairs_are_named(raw, error):
    with pytest.raises(ValueError) as caught:
        pair_row(raw)
    assert str(caught.value) == error


# --- marked answers


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"prompt": "Q", "completion": "a", "label": True}, ([user("Q")], "a", True)),
        ({"question": "Q", "completion": "a", "label": np.False_, "images": ["x"]}, ([user(SEEN)], "a", False)),
        (
            {"prompt": [SYSTEM, user("Q")], "completion": [assistant("a")], "label": False},
            ([SYSTEM, user("Q")], "a", False),
        ),
        ({"messages": [user("Q"), assistant("a")], "label": 1}, ([user("Q")], "a", True)),
        ({"prompt": "Q", "completion": "a", "label": "False"}, ([user("Q")], "a", False)),  # of a csv
        ({"prompt": "Q", "chosen": "a", "rejected": "b", "label": True}, ([user("Q")], "a", True)),
        ({"prompt": "Q", "chosen": "a", "rejected": "b", "label": False}, ([user("Q")], "b", False)),
    ],
)
def test_marked_answers(raw, expected):
    row = unpaired_row(raw)
    assert (row["messages"], row["completion"], row["label"]) == expected and type(row["label"]) is bool
    assert row["answer"] is None  # a mark is no answer


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        ({"prompt": "Q", "completion": "a", "label": "good"}, "label: expected true or false, got 'good'"),
        ({"prompt": "Q", "completion": "a", "label": 2}, "label: expected true or false, got 2"),
        ({"prompt": "Q", "completion": "a"}, "label: expected true or false, got None"),
        ({"prompt": "Q", "label": True}, "completion: expected a text or one message of the assistant, got None"),
        ({"completion": "a", "label": True}, "question: expected text or messages, got none"),
    ],
)
def test_bad_marks_are_named(raw, error):
    with pytest.raises(ValueError) as caught:
        unpaired_row(raw)
    assert str(caught.value) == error


# --- columns of a table


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        (["question", "answer", "audio", "audios"], "audios and audio: expected one of them"),
        (["question", "answer", "audio_file"], "audios: expected a column audios or audio, not 'audio_file'"),
        (["question", "answer", "video", "videos"], "videos and video: expected one of them"),
        (["question", "answer", "video_path"], "videos: expected a column videos or video, not 'video_path'"),
        (["question", "answer", "image", "images"], "images and image: expected one of them"),
        (["question", "answer", "image_path"], "images: expected a column images or image, not 'image_path'"),
        (["answer"], "question: expected a column question or prompt"),
        (
            ["question", "answer", "unreadable"],
            "unreadable: expected another name of a column, as rlkit marks rows with this one",
        ),
        (
            ["question", "answer", "where"],
            "where: expected another name of a column, as rlkit marks rows with this one",
        ),
        (
            ["question", "answer", "read_as"],
            "read_as: expected another name of a column, as rlkit marks rows with this one",
        ),
        (["prompt"], "answer: expected a column answer or label"),
    ],
)
def test_columns_that_would_be_left_out_are_refused(columns, error):
    """A column that counts images, or says whether there are any, has none."""
    check_columns(["question", "answer", "num_images", "n_imgs", "has_image", "is_image"], ("question",))
    with pytest.raises(ValueError) as caught:
        check_columns(columns, ("question", "prompt"), ("answer", "label"))
    assert str(caught.value) == f"{error}, got columns {columns}"


@pytest.mark.parametrize(
    ("own", "columns"),
    [
        ("question", ["image_id", "image_size", "imageId", "image_source", "img_type", "image_classes", "num_frames"]),
        ("question", ["has_images", "needs_image", "video_id", "audio_language", "photographer", "imagination"]),
        ("image", ["image_id", "image_path", "image_url", "image_file_name", "imagename", "img_path", "image_bytes"]),
        ("images", ["image_paths", "image_urls", "image_ids", "num_images", "image_width"]),
        ("video", ["video_path", "video_name", "video_id", "frames", "video_fps", "duration"]),
        ("audio", ["audio_path", "audio_id", "audio_length"]),
    ],
)
def test_columns_about_media_are_allowed(own, columns):
    """Names and paths beside a column of media are of the same image, video or audio."""
    check_columns(["question", "answer", own, *columns], ("question",))


@pytest.mark.parametrize(
    ("own", "column"),
    [
        ("image", "image_2"), ("images", "image_1"), ("image", "image_left"),
        ("images", "image_list"),
        ("video", "video_2"), ("audio", "audio_b"),
    ],
)  # fmt: skip
def test_more_media_beside_a_column_of_media_are_refused(own, column):
    many = own if own.endswith("s") else f"{own}s"
    with pytest.raises(ValueError) as caught:
        check_columns(["question", own, column])
    has = f"got columns {['question', own, column]}"
    assert str(caught.value) == f"{many}: expected all in one column {many}, not also in {column!r}, {has}"


@pytest.mark.parametrize("column", ["video_1", "video_list"])
def test_columns_of_videos_need_their_name(column):
    with pytest.raises(ValueError, match=f"^videos: expected a column videos or video, not '{column}'"):
        check_columns(["question", "answer", column], ("question",))


@pytest.mark.parametrize(
    "column",
    [
        "image_1", "img", "question_images", "decoded_image", "image_urls", "image_bytes", "image_list", "image_left",
        "image_a",
    ],
)  # fmt: skip
def test_columns_of_images_need_their_name(column):
    with pytest.raises(ValueError, match=f"^images: expected a column images or image, not '{column}'"):
        check_columns(["question", "answer", column], ("question",))


# --- tables of numbers have nan where a value is missing


@pytest.mark.parametrize(
    ("read", "full", "missing"),
    [
        (chat_row, {"prompt": "2+3=", "answer": "5"}, "completion"),
        (chat_row, {"prompt": "2+3=", "answer": "5"}, "system"),
        (chat_row, {"prompt": "2+3=", "answer": "5"}, "tools"),
        (chat_row, {"instruction": "2+3=", "output": "5"}, "input"),
        (chat_row, {"instruction": "2+3=", "output": "5"}, "history"),
        (chat_row, {"instruction": "2+3=", "output": "5"}, "completion"),
        (chat_row, {"messages": [user("2+3="), assistant("5")]}, "completion"),
        (unpaired_row, {"prompt": "2+3=", "chosen": "5", "rejected": "6", "label": True}, "completion"),
    ],
)
def test_nan_in_a_column_is_no_value(read, full, missing):
    found, expected = read({**full, missing: float("nan")}), read(full)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("read", "raw", "error"),
    [
        (chat_row, {"prompt": "Q", "completion": float("nan")}, "answer: expected a text or one message"),
        (chat_row, {"instruction": "Q", "output": float("nan")}, "answer: expected a text or one message"),
        (pair_row, {"prompt": "Q", "chosen": "a", "rejected": float("nan")}, "rejected: expected a text"),
        (unpaired_row, {"prompt": "Q", "completion": float("nan"), "label": 1}, "completion: expected a text"),
    ],
)
def test_nan_is_no_answer(read, raw, error):
    with pytest.raises(ValueError, match=f"^{error}"):
        read(raw)
