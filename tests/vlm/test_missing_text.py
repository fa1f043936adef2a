"""All that a message contains appears in the rendered text, or an error says what does not."""

import json
import random
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from rlkit.data.messages import read_messages
from rlkit.vlm import render
from rlkit.vlm.missing_text import missing_text
from rlkit.vlm.rendering import render_unchecked

sys.path.insert(0, str(Path(__file__).parent))

from published_templates import PUBLISHED  # noqa: E402

TAGS = ("<think>", "</think>")
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"required": ["a", "note", "where", "big"]}}}]
FIRST = {"note": 'so "7"\nor é', "a": 7, "big": True, "where": {"z": [0.5, "+"], "B": "wide"}}
SECOND = {"a": 8, "note": "C:\\new"}


def call(number, arguments):
    return {"id": f"functions.add:{number}", "type": "function", "function": {"name": "add", "arguments": arguments}}


def chat_for(thinking, calls, has_content):
    """A chat with all that the template writes."""
    chat = [
        {"role": "system", "content": "Be brief, traveller."},
        {"role": "user", "content": "Which sum\n is 'larger'?"},
    ]
    if calls:
        said = "I compare both." if has_content else ""
        both = [call(0, FIRST), call(1, SECOND)][:calls]
        chat.append({"role": "assistant", "content": said, "tool_calls": both})
        results = ['It is "nine".\n9', "ten times é"][:calls]
        chat += [
            {"role": "tool", "content": one, "tool_call_id": f"functions.add:{i}"} for i, one in enumerate(results)
        ]
    chat += [{"role": "assistant", "content": "The former one."}, {"role": "user", "content": "  Certain? "}]
    return [
        *chat,
        {"role": "assistant", "content": "Wholly sure.", **({thinking: "Hm, verify it."} if thinking else {})},
    ]


def without(chat):
    """(field, the chat without one of its parts) for each part."""
    for i, one in enumerate(chat):
        if one["content"]:
            yield "content", [*chat[:i], {**one, "content": ""}, *chat[i + 1 :]]
        for field in ("reasoning_content", "thinking"):
            if field in one:
                yield field, [*chat[:i], {key: one[key] for key in one if key != field}, *chat[i + 1 :]]
        for n, of_call in enumerate(one.get("tool_calls", ())):
            for changed in variants(of_call):
                calls = [*one["tool_calls"][:n], *changed, *one["tool_calls"][n + 1 :]]
                yield "tool_calls", [*chat[:i], {**one, "tool_calls": calls}, *chat[i + 1 :]]


def variants(of_call):
    """Nothing in place of a call, and the call without each of its arguments."""
    yield []
    arguments = of_call["function"]["arguments"]
    for name in arguments:
        fewer = {key: value for key, value in arguments.items() if key != name}
        yield [{**of_call, "function": {"name": "add", "arguments": fewer}}]


def tokenizer_with(template):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_templates_write_all_and_each_loss_is_noticed(name):
    template, thinking, calls, has_content = PUBLISHED[name]
    tokenizer = tokenizer_with(template)
    tools = TOOLS if "tools" in template else None
    chat = chat_for(thinking, calls, has_content)
    assert render(tokenizer, chat, tools=tools)
    tried = 0
    for field, less in without(chat):
        text = render_unchecked(tokenizer, less, tools=tools)
        found = missing_text(None, text, chat, TAGS)
        assert found is not None, (field, less)
        tried += 1
    assert tried == len(chat) + bool(thinking) + (calls > 0) * 5 + (calls > 1) * 3 - (calls > 0 and not has_content)


@pytest.mark.parametrize("name", [name for name, (_, _, calls, _) in PUBLISHED.items() if calls])
def test_published_templates_write_calls_at_the_end_of_a_chat(name):
    template, _, calls, has_content = PUBLISHED[name]
    chat = chat_for("", calls, has_content)[:3]
    assert render(tokenizer_with(template), chat, tools=TOOLS if "tools" in template else None)


@pytest.mark.parametrize("name", ["DeepSeek-V3-0324", "DeepSeek-R1-0528"])
def test_a_template_that_joins_arguments_to_text_gets_them_as_json_text(name):
    tokenizer = tokenizer_with(PUBLISHED[name][0])
    text = render(tokenizer, chat_for("", 2, True))
    for arguments in (FIRST, SECOND):
        assert (
            f"<｜tool▁sep｜>add\n```json\n{json.dumps(arguments, ensure_ascii=False)}\n```<｜tool▁call▁end｜>" in text
        )
    tokenizer.chat_template = "{{ messages[0].content + 1 }}"
    with pytest.raises(ValueError, match="^chat template: can only concatenate str"):
        render(tokenizer, [user("Q")])


def test_no_calls_are_no_field_of_a_message():
    """DeepSeek's templates ask whether a message has the field."""
    assert read_messages([{**assistant("A"), "tool_calls": []}]) == [assistant("A")]


# --- templates as functions


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def left_out(template, messages):
    """The error for messages that a template, a function of them, leaves out; None if it has all."""
    return missing_text(None, template(messages), messages, ("<think>", "</think>"))


def system(content):
    return {"role": "system", "content": content}


def calls(*arguments, content=""):
    return {**assistant(content), "tool_calls": [{"name": "add", "arguments": one} for one in arguments]}


def tool(content):
    return {"role": "tool", "content": content}


def written(one):
    """A message as many templates write it."""
    called = "".join(f"<{one['name']} {one['arguments']}>" for one in one.get("tool_calls") or ())
    return f"{one['role']}: {one['content'].strip()}{called}\n"


def in_order(messages):
    return "Date: 26 May 2028. Tools: [{'name': 'add', 'required': ['a', 'b']}]\n" + "".join(map(written, messages))


def test_a_loss_does_not_hide_in_what_the_template_writes_elsewhere():
    chat = [system("Be short."), user("Is it 8 or 9?"), calls({"a": 7, "b": 1}), tool("8"), assistant("It is eight.")]
    assert left_out(in_order, chat) is None
    for gone, field in ((3, "content"), (2, "tool_calls")):
        found = left_out(lambda chat, gone=gone: in_order(chat[:gone] + chat[gone + 1 :]), chat)
        assert found.startswith(f"messages[{gone}].{field}: expected") and "in its place; " in found
    padded = [system("Say 5."), user("5           ")]
    assert left_out(in_order, padded) is None
    assert left_out(in_order, [user("5           "), assistant("Say 5."), user("5")]) is None
    assert "messages[1].content" in left_out(lambda chat: in_order(chat[:1]), padded)


def test_calls_that_share_an_argument_are_found_in_any_order():
    """Each has its own place, though the longer city comes last."""
    chat = [
        user("Q"),
        calls({"city": "Rome"}, {"city": "Paris"}, content="I ask."),
        tool("warm"),
        tool("cold"),
        user("so"),
    ]
    one, two = ("{'city': 'Rome'}", "{'city': 'Paris'}")
    for body in (
        f"{one} add {two} add I ask. warm cold",  # arguments before names, content after the calls
        f"I ask. add {one} warm add {two} cold",  # a result after each call
    ):
        assert left_out(lambda _, body=body: f"Q {body} so", chat) is None
        for word in ("Rome", "Paris", "warm", "cold", "I ask."):
            assert left_out(lambda _, body=body, word=word: f"Q {body} so".replace(word, ""), chat), (body, word)


def test_what_templates_move_is_found():
    chat = [
        system("Be short."),
        user("1 + 7?"),
        calls({"a": 7, "b": {"y": 1, "x": [2, 3]}}, {"a": 1}, content="I add."),
        tool("8"),
        tool("add"),
        assistant("It is 8."),
        user("short"),
    ]

    def before_the_last(chat):  # Mistral 7B v0.3
        return in_order(chat[1:-1]) + written(chat[0]) + written(chat[-1])

    def hoists(chat):  # DeepSeek-V3
        return in_order(sorted(chat, key=lambda one: one["role"] != "system"))

    def content_last(chat):  # Gemma 4's comes after what the tools say, and its keys are sorted
        called = [{**one, "arguments": dict(sorted(one["arguments"].items()))} for one in chat[2]["tool_calls"]]
        moved = {**chat[2], "content": "", "tool_calls": called}
        said = assistant(chat[2]["content"])
        return in_order([*chat[:2], moved, *chat[3:5], said, *chat[5:]])

    later = [*chat[:-1], system("Be long."), chat[-1]]
    swapped = [*chat[:2], calls({"b": {"x": [2, 3], "y": 1}, "a": 7}, {"a": 1}, content="I add."), *chat[3:]]
    for template, messages in ((before_the_last, chat), (hoists, later), (content_last, chat), (content_last, swapped)):
        assert left_out(template, messages) is None
        for gone in range(1, len(messages)):  # and what is left out is noticed
            rest = [{**one, "content": "", "tool_calls": []} if i == gone else one for i, one in enumerate(messages)]
            if template is content_last and gone == 2:
                continue
            assert missing_text(None, template(rest), messages, ("<think>", "</think>")), (template, gone)


def test_many_arguments_are_found_in_any_order():
    arguments = {f"key {i}": f"value {i}" for i in range(2000)}
    keys = random.Random(0).sample(list(arguments), len(arguments))
    chat = [user("Q"), calls(arguments), tool("done")]
    text = "Q add " + json.dumps({key: arguments[key] for key in keys}) + " done"
    assert missing_text(None, text, chat, TAGS) is None
    found = missing_text(None, text.replace('"value 1234"', '""'), chat, TAGS)
    assert found.startswith("messages[1].tool_calls: expected")


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("rows:\n12\n13\n14", "rows:"),
        ("rows:\n12\n13\n14", "rows:\n12\n14"),
        ("do not delete x; delete y", "delete x; do not delete y"),
        (True, "1"),
    ],
)
def test_lines_values_and_their_order_count_in_calls_and_results(value, written):
    chat = [user("Q"), calls({"a": 7, "b": value}), tool("done")]
    assert missing_text(None, f"Q add {json.dumps({'b': value, 'a': 7})} done", chat, TAGS) is None
    assert missing_text(None, f"Q add a 7 b {written} done", chat, TAGS) is not None


def test_escaped_and_glued_text_is_found():
    chat = [user("Q"), calls({"a": "caf\u00e9"}), tool("done")]
    assert missing_text(None, "Q call_add(" + json.dumps({"a": "caf\u00e9"}) + ")done", chat, TAGS) is None
