"""Chats as tokens: what a template is given, which tokens are trained, and what is refused."""

import pytest
from PIL import Image

from rlkit.data import Task, collate, prompt_sample, with_prompt
from rlkit.data.formats import chat_row, pair_row
from rlkit.rewards import exact_match, without_thinking
from rlkit.vlm import encode_answers, encode_chat, encode_observation, encode_prompt, load_processor, render
from rlkit.vlm.chat_template import check_template_options


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


@pytest.fixture(scope="module")
def processor(tiny_dir):
    return load_processor(tiny_dir)


def end_of(processor):
    return [processor.tokenizer.eos_token_id]


def texts(processor, sample):
    """The trained tokens in their runs, and the untrained ones, as text."""
    runs, ids = [], []
    for i, token in enumerate(sample.token_ids):
        ids.append(token)
        if i + 1 == len(sample.mask) or sample.mask[i + 1] != sample.mask[i]:
            runs.append((sample.mask[i], processor.tokenizer.decode(ids)))
            ids = []
    return runs


def test_every_turn_of_the_assistant_is_trained_and_nothing_else(processor):
    images = [Image.new("RGB", size) for size in ((56, 56), (84, 56))]
    turns = [
        user([{"type": "image"}, {"type": "text", "text": "One?"}]),
        assistant("1"),
        user([{"type": "text", "text": "And"}, {"type": "image"}]),
        assistant("2 or 3"),
    ]
    prompt = encode_prompt(processor, chat_row({"messages": turns, "images": images}))
    sample = encode_chat(prompt, processor, end_of(processor), 200)
    collate([sample])  # both tracks agree
    assert texts(processor, sample) == [
        (
            False,
            "<|im_start|>user\n<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>One?<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (True, "1<|im_end|>"),
        (
            False,
            "\n<|im_start|>user\nAnd<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|><|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (True, "2 or 3<|im_end|>"),
    ]
    assert sample.token_ids[: len(prompt.token_ids)] == prompt.token_ids and sample.vision is prompt.vision
    assert prompt.row["question"] == "And"


def test_answers_of_a_pair_share_their_prompt(processor):
    row = {"question": "What?", "chosen": "4", "rejected": "seven", "images": [Image.new("RGB", (56, 56))]}
    prompt = encode_prompt(processor, pair_row(row))
    answers = [prompt.row["chosen"], prompt.row["rejected"]]
    chosen, rejected = encode_answers(prompt, processor, answers, end_of(processor), 200)
    assert [text for trained, text in texts(processor, chosen) if trained] == ["4<|im_end|>"]
    assert [text for trained, text in texts(processor, rejected) if trained] == ["seven<|im_end|>"]
    assert chosen.vision["pixel_values"] is rejected.vision["pixel_values"]  # and so is computed once
    whole = encode_chat(encode_prompt(processor, chat_row({**row, "answer": "4"})), processor, end_of(processor), 200)
    assert whole.token_ids == chosen.token_ids and whole.mask == chosen.mask
    n = len(whole.token_ids)
    with pytest.raises(ValueError, match=f"expected at most {n - 1} tokens with the answer, got {n}"):
        encode_answers(prompt, processor, ["4"], end_of(processor), n - 1)


def test_plain_text_has_no_template_and_an_end(processor):
    prompt = encode_prompt(processor, chat_row({"text": "What digit is this?", "where": "row 1"}))
    assert prompt.token_ids == []
    sample = encode_chat(prompt, processor, end_of(processor), 50)
    assert processor.tokenizer.decode(sample.token_ids) == "What digit is this?<|im_end|>"
    assert sample.mask == [False] + [True] * (len(sample.mask) - 1)  # nothing predicts the first
    collate([sample])
    with pytest.raises(ValueError, match="^row 1: expected at most 2 tokens with the answer, got"):
        encode_chat(prompt, processor, end_of(processor), 2)


def test_thinking_that_the_prompt_opens_is_not_judged_as_the_answer(tiny_dir):
    processor = load_processor(tiny_dir)
    row = chat_row({"question": "What?", "answer": "4"})
    reward = without_thinking(exact_match)
    opened = encode_prompt(processor, {**row, "answer_prefix": "<think>\n"}).row
    closed = encode_prompt(processor, {**row, "answer_prefix": "<think></think>"}).row
    assert "thinking_opened" not in row and "thinking_opened" not in closed and reward("4", closed) == 1
    other = {**row, "thinking_tags": ["[THINK]", "[/THINK]"]}
    prompts = [encode_prompt(processor, {**other, "answer_prefix": text}).row for text in ("[THINK]\n", "<think>\n")]
    assert ["thinking_opened" in one for one in prompts] == [True, False] and reward("4", prompts[0]) == 0
    processor.chat_template += "{%- if add_generation_prompt %}{{ '<think>\n' }}{%- endif %}"
    for thinking_row in (opened, encode_prompt(processor, row).row):
        assert [reward(text, thinking_row) for text in ("4", "hm</think>4", "4</think>5")] == [0, 1, 0]


def test_an_answer_prefix_is_of_the_prompt(processor):
    row = {**chat_row({"question": "What?", "answer": "4"}), "answer_prefix": "It is "}
    prompt = encode_prompt(processor, row)
    assert texts(processor, prompt)[0][1].endswith("<|im_start|>assistant\nIt is ")
    (sample,) = encode_answers(prompt, processor, ["4"], end_of(processor), 200)
    whole = encode_chat(prompt, processor, end_of(processor), 200)
    for one in (sample, whole):
        assert [text for trained, text in texts(processor, one) if trained] == ["4<|im_end|>"]
        assert one.token_ids[: len(prompt.token_ids)] == prompt.token_ids


def test_a_prompt_is_never_written_as_python_writes_it(processor):
    parts = [{"type": "text", "text": "What "}, {"type": "text", "text": "digit?"}]
    for reader in (processor, processor.tokenizer):
        for row in ({"question": [user("What digit?")]}, {"messages": [user(parts)]}):
            text = processor.tokenizer.decode(encode_prompt(reader, row).token_ids)
            assert text == "<|im_start|>user\nWhat digit?<|im_end|>\n<|im_start|>assistant\n"


TOOL_TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | map(attribute='name') | join(' ') }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }}{{ c.function.arguments.a }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_tools_are_shown_and_their_calls_are_trained(processor):
    tokenizer = processor.tokenizer
    before, tokenizer.chat_template = tokenizer.chat_template, TOOL_TEMPLATE
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": '{"a": 7}'}]}
    raw = {"messages": [user("Q"), call, {"role": "tool", "content": "8"}, assistant("8!")], "tools": [{"name": "add"}]}
    try:
        prompt = encode_prompt(tokenizer, chat_row(raw))
        sample = encode_chat(prompt, tokenizer, [tokenizer.eos_token_id], 200)
    finally:
        tokenizer.chat_template = before
    assert texts(processor, sample) == [
        (False, "TOOLS add\nuser:Q<|im_end|>\nassistant:"),
        (True, "CALL add7<|im_end|>"),
        (False, "\ntool:8<|im_end|>\nassistant:"),
        (True, "8!<|im_end|>"),
    ]


def test_a_template_that_refuses_is_a_bad_row(processor):
    tokenizer = processor.tokenizer
    before, tokenizer.chat_template = tokenizer.chat_template, "{{ raise_exception('roles must alternate') }}"
    try:
        with pytest.raises(ValueError, match="^row 3: chat template: roles must alternate$"):
            encode_prompt(tokenizer, {"question": "Q", "where": "row 3"})
    finally:
        tokenizer.chat_template = before


# --- templates of other kinds


class Template:
    """A tokenizer of characters with a chat template of its own."""

    eos_token_id = 0

    def __init__(self, write):
        self.write = write

    def apply_chat_template(self, messages, add_generation_prompt=False, tokenize=True):
        return self.write(messages) + ("A:" if add_generation_prompt else "")

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(letter) for letter in text]}


def plain(messages):
    return "".join(f"{m['role'][0].upper()}:{m['content']}" for m in messages)


def forgetful(messages):
    """Earlier answers are left out, as templates of reasoning models do with their thoughts."""
    return plain([m for i, m in enumerate(messages) if m["role"] == "user" or i + 1 == len(messages)])


def test_render_gives_each_kind_its_contents(processor):
    seen = []

    def write(messages):
        seen.append([one["content"] for one in messages])
        return ""

    render(Template(write), [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])])
    sees = Template(write)
    sees.tokenizer = sees
    render(sees, [user("ab"), assistant("")])
    assert seen == [["ab"], [[{"type": "text", "text": "ab"}], []]]
    with pytest.raises(ValueError, match="^images: expected none, as the model's processor is a tokenizer, got 1 in a"):
        render(Template(write), [user([{"type": "image"}])])


def test_an_end_token_is_added_where_the_template_writes_none():
    prompt = prompt_sample([ord(letter) for letter in "U:QA:"], row={"messages": [user("Q")]})
    (sample,) = encode_answers(prompt, Template(plain), ["yes"], [0], 50)
    assert sample.response_ids == [*map(ord, "yes"), 0]
    (sample,) = encode_answers(prompt, Template(plain), ["yes!"], [ord("!")], 50)
    assert sample.response_ids == [*map(ord, "yes!")]


def test_a_template_that_rewrites_the_chat_is_an_error():
    row = {"where": "row 5", "messages": [user("Q"), assistant("a"), user("R")], "completion": "b"}
    with pytest.raises(ValueError, match="row 5: expected a chat template that keeps an answer when messages follow"):
        encode_chat(prompt_sample([1], row=row), Template(forgetful), [0], 50)
    with pytest.raises(
        ValueError, match="row 5: expected a chat template that keeps the prompt when an answer follows"
    ):
        encode_answers(prompt_sample([1], row=row), Template(lambda m: str(len(m)) + plain(m)), ["a"], [0], 50)
    with pytest.raises(ValueError, match="row 5: expected an answer to train on, got None"):
        encode_chat(prompt_sample([1], row={**row, "completion": None}), Template(plain), [0], 50)


THINKS = (  # Qwen3's: no thinking is an empty thought
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def test_options_of_the_template_reach_prompts_answers_and_replies(tiny_dir):
    tokenizer = load_processor(tiny_dir).tokenizer
    tokenizer.chat_template = THINKS
    row = chat_row({"question": "2 + 2?", "answer": "4"})
    task = Task("one", [row], [{**row, "chat_template_kwargs": {"enable_thinking": True}}], exact_match)
    task = with_prompt(task, chat_template_kwargs={"enable_thinking": False})
    prompt, thinks, plain = (
        encode_prompt(tokenizer, task.train[0]),
        encode_prompt(tokenizer, task.heldout[0]),
        encode_prompt(tokenizer, row),
    )
    opened, empty = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n", "<think>\n\n</think>\n\n"
    assert tokenizer.decode(prompt.token_ids) == opened + empty
    assert tokenizer.decode(thinks.token_ids) == tokenizer.decode(plain.token_ids) == opened
    options = {"chat_template_kwargs": {"enable_thinking": False}}
    reply = encode_observation(tokenizer, [user("2 + 2?")], user("Sure?"), **options)
    assert tokenizer.decode(reply.token_ids) == "\n" + opened.replace("2 + 2?", "Sure?") + empty
    with pytest.raises(ValueError, match="expected a chat template that keeps the prompt when an answer follows"):
        encode_answers(
            prompt, tokenizer, ["4"], end_of(load_processor(tiny_dir)), 99
        )  # it leaves the empty thought out


def test_an_option_that_the_template_does_not_have_is_named(processor):
    row = {"question": "2?", "images": [], "where": "row 7", "chat_template_kwargs": {"enable_thinking": False}}
    message = "^row 7: chat_template_kwargs: expected options of the model's chat template \\(none\\), got 'enable_"
    with pytest.raises(ValueError, match=message):
        encode_prompt(processor, row)


OPTIONS = (  # a loop's variable, an assigned one, a key, an attribute, a word of the text and a comment are no options
    "{# budget #}{% set system = 'a system line' %}{% if not date is defined %}{% set date = strftime_now('%Y') %}"
    "{% endif %}{{ system ~ date }}{% for message in messages %}{% generation %}{{ message['role'] ~ message.content }}"
    "{% endgeneration %}{% if loop.last %}{% break %}{% endif %}{% endfor %}"
    "{{ raise_exception('no') if strict else '' }}{{ eos_token if strict }}{{ 'A:' if add_generation_prompt }}"
)


@pytest.mark.parametrize(
    "name", ["system", "message", "role", "content", "line", "budget", "loop", "strftime_now", "raise_exception",
             "messages", "eos_token", "add_generation_prompt"],
)  # fmt: skip
def test_a_word_of_the_template_is_no_option(tiny_dir, name):
    tokenizer = load_processor(tiny_dir).tokenizer
    tokenizer.chat_template = OPTIONS
    assert render(tokenizer, [user("Q")], chat_template_kwargs={"date": "May", "strict": 0}) == "a system lineMayuserQ"
    message = f"^chat_template_kwargs: expected options of the model's chat template \\(date, strict\\), got '{name}'$"
    for check in (
        check_template_options,
        lambda reader, given: render(reader, [user("Q")], chat_template_kwargs=given),
    ):
        with pytest.raises(ValueError, match=message):
            check(tokenizer, {"date": "May", name: 1})


def test_tools_are_refused_where_the_template_does_not_show_them(processor, tiny_dir):
    row = chat_row({"messages": [user("Q"), assistant("A")], "tools": [{"name": "add"}]}) | {"where": "row 4"}
    for reader in (processor, processor.tokenizer):
        with pytest.raises(ValueError) as refused:
            encode_prompt(reader, row)
        assert str(refused.value).startswith("row 4: tools: expected a chat template that shows them, got that of ")
        assert tiny_dir in str(refused.value) and "system message" in str(refused.value)
        assert encode_prompt(reader, {**row, "tools": []}).token_ids
    tokenizer = load_processor(tiny_dir).tokenizer
    tokenizer.chat_template = {"default": THINKS, "tool_use": TOOL_TEMPLATE}
    assert tokenizer.decode(encode_prompt(tokenizer, row).token_ids).startswith("TOOLS add")
    tokenizer.chat_template = {"default": THINKS, "rag": TOOL_TEMPLATE}  # transformers renders the first
    with pytest.raises(ValueError, match="^row 4: tools: expected a chat template that shows them"):
        encode_prompt(tokenizer, row)


def test_a_template_that_cannot_be_parsed_is_an_error_at_the_start_too(tiny_dir):
    tokenizer = load_processor(tiny_dir).tokenizer
    tokenizer.chat_template = "{% for m in messages %}"
    with pytest.raises(ValueError, match="^chat template: Unexpected end of template"):
        check_template_options(tokenizer, {"enable_thinking": False})


def test_several_templates_by_name_and_none(tiny_dir):
    processor = load_processor(tiny_dir)
    tokenizer = processor.tokenizer
    tokenizer.chat_template = {"default": THINKS, "rag": "{{ documents }}"}
    row = {"question": "2?", "chat_template_kwargs": {"enable_thinking": False}}
    assert tokenizer.decode(encode_prompt(tokenizer, row).token_ids).endswith("</think>\n\n")
    with pytest.raises(ValueError, match=r"template \(enable_thinking\), got 'thinking_budget'"):
        encode_prompt(tokenizer, {"question": "2?", "chat_template_kwargs": {"thinking_budget": 5}})
    processor.chat_template = None
    with pytest.raises(
        ValueError, match="in chat_template.jinja .*, got one for the tokenizer alone; if it takes images"
    ):
        encode_prompt(processor, {"question": "2?"})
    tokenizer.chat_template = None
    with pytest.raises(
        ValueError, match="expected one in chat_template.jinja .*, got none; copy that of the chat model"
    ):
        encode_prompt(tokenizer, {"question": "2?"})


def test_an_answer_ends_without_an_end_token_of_the_tokenizer(tiny_dir):
    """Then the model's generation config names the end, and the template may write none."""
    tokenizer = load_processor(tiny_dir).tokenizer
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (end,) = tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    tokenizer.eos_token = None
    prompt = encode_prompt(tokenizer, {"question": "2?"})
    (sample,) = encode_answers(prompt, tokenizer, ["4"], [end], 99)
    assert sample.token_ids[-1] == end and sample.mask[-1]
    chat = encode_chat(prompt_sample([1], row={"plain_text": "2 4"}), tokenizer, [end], 99)
    assert chat.token_ids[-1] == end
