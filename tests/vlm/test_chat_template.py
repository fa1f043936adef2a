"""Chats as tokens: what a template is given, which tokens are trained, and what is refused."""

from typing import ClassVar

import pytest
from PIL import Image

from rlkit.data import Task, collate, prompt_sample, with_prompt
from rlkit.data.formats import chat_row, pair_row
from rlkit.rewards import exact_match, without_thinking
from rlkit.vlm import encode_chat, encode_observation, encode_prompt, encode_responses, load_processor, render
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
    collate([sample])  # compact_ids expand to token_ids
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


def test_responses_of_a_pair_share_their_prompt(processor):
    row = {"question": "What?", "chosen": "4", "rejected": "seven", "images": [Image.new("RGB", (56, 56))]}
    prompt = encode_prompt(processor, pair_row(row))
    responses = [prompt.row["chosen"], prompt.row["rejected"]]
    chosen, rejected = encode_responses(prompt, processor, responses, end_of(processor), 200)
    assert [text for trained, text in texts(processor, chosen) if trained] == ["4<|im_end|>"]
    assert [text for trained, text in texts(processor, rejected) if trained] == ["seven<|im_end|>"]
    assert chosen.vision["pixel_values"] is rejected.vision["pixel_values"]  # and so is computed once
    whole = encode_chat(encode_prompt(processor, chat_row({**row, "answer": "4"})), processor, end_of(processor), 200)
    assert whole.token_ids == chosen.token_ids and whole.mask == chosen.mask
    n = len(whole.token_ids)
    with pytest.raises(ValueError, match=f"expected at most {n - 1} tokens with the response, got {n}"):
        encode_responses(prompt, processor, ["4"], end_of(processor), n - 1)


def test_plain_text_has_no_template_and_an_end(processor):
    prompt = encode_prompt(processor, chat_row({"text": "What digit is this?", "where": "row 1"}))
    assert prompt.token_ids == []
    sample = encode_chat(prompt, processor, end_of(processor), 50)
    assert processor.tokenizer.decode(sample.token_ids) == "What digit is this?<|im_end|>"
    assert sample.mask == [False] + [True] * (len(sample.mask) - 1)  # nothing predicts the first
    collate([sample])
    with pytest.raises(ValueError, match="^row 1: expected at most 2 tokens with the response, got"):
        encode_chat(prompt, processor, end_of(processor), 2)


def test_thinking_that_the_prompt_opens_is_not_scored_as_the_response(tiny_dir):
    processor = load_processor(tiny_dir)
    row = chat_row({"question": "What?", "answer": "4"})
    reward = without_thinking(exact_match)
    opened = encode_prompt(processor, {**row, "response_prefix": "<think>\n"}).row
    closed = encode_prompt(processor, {**row, "response_prefix": "<think></think>"}).row
    assert "thinking_opened" not in row and "thinking_opened" not in closed and reward("4", closed) == 1
    other = {**row, "thinking_tags": ["[THINK]", "[/THINK]"]}
    prompts = [encode_prompt(processor, {**other, "response_prefix": text}).row for text in ("[THINK]\n", "<think>\n")]
    assert ["thinking_opened" in one for one in prompts] == [True, False] and reward("4", prompts[0]) == 0
    processor.chat_template += "{%- if add_generation_prompt %}{{ '<think>\n' }}{%- endif %}"
    for thinking_row in (opened, encode_prompt(processor, row).row):
        assert [reward(text, thinking_row) for text in ("4", "hm</think>4", "4</think>5")] == [0, 1, 0]


def test_a_response_prefix_is_of_the_prompt(processor):
    row = {**chat_row({"question": "What?", "answer": "4"}), "response_prefix": "It is "}
    prompt = encode_prompt(processor, row)
    assert texts(processor, prompt)[0][1].endswith("<|im_start|>assistant\nIt is ")
    (sample,) = encode_responses(prompt, processor, ["4"], end_of(processor), 200)
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
    "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }} a={{ c.function.arguments.a }}{% endfor %}<|im_end|>\n"
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
        (True, "CALL add a=7<|im_end|>"),
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
    added_tokens_decoder: ClassVar = {}

    def __init__(self, write):
        self.write = write

    def apply_chat_template(self, messages, add_generation_prompt=False, tokenize=True):
        return self.write(messages) + ("A:" if add_generation_prompt else "")

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids):
        return "".join(map(chr, ids))


def plain(messages):
    return "".join(f"{m['role'][0].upper()}:{m['content']}" for m in messages)


def forgetful(messages):
    """Earlier responses are left out, as templates of reasoning models do with their thoughts."""
    return plain([m for i, m in enumerate(messages) if m["role"] == "user" or i + 1 == len(messages)])


def test_render_gives_each_kind_its_contents(processor):
    seen = []

    def write(messages):
        seen.append([one["content"] for one in messages])
        return str(seen[-1])

    render(Template(write), [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])])
    sees = Template(write)
    sees.tokenizer = sees
    render(sees, [user("ab"), assistant("")])
    assert seen == [["ab"], [[{"type": "text", "text": "ab"}], []]]
    with pytest.raises(ValueError, match="^images: expected none, as the model's processor is a tokenizer, got 1 in a"):
        render(Template(write), [user([{"type": "image"}])])


def test_an_end_token_is_added_where_the_template_writes_none():
    prompt = prompt_sample([ord(letter) for letter in "U:QA:"], row={"messages": [user("Q")]})
    (sample,) = encode_responses(prompt, Template(plain), ["yes"], [0], 50)
    assert sample.response_ids == [*map(ord, "yes"), 0]
    (sample,) = encode_responses(prompt, Template(plain), ["yes!"], [ord("!")], 50)
    assert sample.response_ids == [*map(ord, "yes!")]


def test_a_template_that_rewrites_the_chat_is_an_error():
    row = {"where": "row 5", "messages": [user("Q"), assistant("a"), user("R")], "completion": "b"}
    with pytest.raises(ValueError, match="row 5: expected a chat template that keeps a response when messages follow"):
        encode_chat(prompt_sample([1], row=row), Template(forgetful), [0], 50)
    with pytest.raises(
        ValueError, match="row 5: expected a chat template that keeps the prompt when a response follows"
    ):
        encode_responses(prompt_sample([1], row=row), Template(lambda m: str(len(m)) + plain(m)), ["a"], [0], 50)
    with pytest.raises(ValueError, match="row 5: expected a response to train on, got None"):
        encode_chat(prompt_sample([1], row={**row, "completion": None}), Template(plain), [0], 50)


THINKS = (  # Qwen3's: no thinking is an empty thought
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def test_options_of_the_template_reach_prompts_responses_and_replies(tiny_dir):
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
    (response,) = encode_responses(prompt, tokenizer, ["4"], [tokenizer.eos_token_id], 99)
    assert tokenizer.decode(response.token_ids) == opened + empty + "4<|im_end|>"  # the template leaves out the thought


def test_an_option_that_the_template_does_not_have_is_named(processor):
    row = {"question": "2?", "images": [], "where": "row 7", "chat_template_kwargs": {"enable_thinking": False}}
    message = "^row 7: chat_template_kwargs: expected options of the model's chat template \\(none\\), got 'enable_"
    with pytest.raises(ValueError, match=message):
        encode_prompt(processor, row)


OPTIONS = (  # a loop's variable, an assigned one, a key, an attribute, a word of the text and a comment are no options
    "{# budget #}{% set system = 'a system line' %}{% for m in messages %}{% if m.x %}{% set inner = m.x %}"
    "{% endif %}{% set maybe = m.x %}{{ inner if m.x }}{{ maybe if maybe is defined }}{% endfor %}"
    "{% if not date is defined %}{% set date = strftime_now('%Y') %}"
    "{% endif %}{{ system ~ date }}{% for message in messages %}{% generation %}{{ message['role'] ~ message.content }}"
    "{% endgeneration %}{% if loop.last %}{% break %}{% endif %}{% endfor %}"
    "{{ raise_exception('no') if strict else '' }}{{ eos_token if strict }}"
    "{% set size = size | default(3) %}{{ 'A:' if add_generation_prompt }}"
)


@pytest.mark.parametrize(
    "name", ["system", "message", "role", "content", "line", "budget", "loop", "strftime_now", "raise_exception",
             "messages", "inner", "maybe", "add_generation_prompt"],
)  # fmt: skip
def test_a_word_of_the_template_is_no_option(tiny_dir, name):
    tokenizer = load_processor(tiny_dir).tokenizer
    tokenizer.chat_template = OPTIONS
    assert render(tokenizer, [user("Q")], chat_template_kwargs={"date": "May", "strict": 0}) == "a system lineMayuserQ"
    message = "^chat_template_kwargs: expected options of the model's chat template "
    message += rf"\(date, eos_token, size, strict\), got '{name}'$"
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


def test_a_response_ends_without_an_end_token_of_the_tokenizer(tiny_dir):
    """Then the model's generation config names the end, and the template may write none."""
    tokenizer = load_processor(tiny_dir).tokenizer
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (end,) = tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    tokenizer.eos_token = None
    prompt = encode_prompt(tokenizer, {"question": "2?"})
    (sample,) = encode_responses(prompt, tokenizer, ["4"], [end], 99)
    assert sample.token_ids[-1] == end and sample.mask[-1]
    chat = encode_chat(prompt_sample([1], row={"plain_text": "2 4"}), tokenizer, [end], 99)
    assert chat.token_ids[-1] == end


# --- what a message contains appears in the text, or an error says so


def reader(tiny_dir, template, *special):
    """A tokenizer with this template and these special tokens."""
    tokenizer = load_processor(tiny_dir).tokenizer
    tokenizer.add_tokens(list(special), special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def trained(tokenizer, row, *ends, **options):
    """The trained runs of tokens of a row as text; ends are by default the tokenizer's."""
    ends = tokenizer.convert_tokens_to_ids(list(ends)) if ends else [tokenizer.eos_token_id]
    prompt = encode_prompt(tokenizer, {"where": "row 6", **chat_row(row)})
    sample = encode_chat(prompt, tokenizer, ends, 999, **options)
    runs = [[]]
    for token, is_trained in zip(sample.token_ids, sample.mask, strict=True):
        if is_trained:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def refusal(tokenizer, row, *ends, **options):
    with pytest.raises(ValueError) as refused:
        trained(tokenizer, row, *ends, **options)
    return str(refused.value)


OWN_THINKING = (  # it reads a field, or else what stands between tags; earlier thinking goes, as in Qwen3
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}{% set hm = m.reasoning_content or '' %}{% set said = m.content %}"
    "{% if '</think>' in said %}{% set hm = said.split('</think>')[0].split('<think>')[-1] %}"
    "{% set said = said.split('</think>')[-1].lstrip() %}{% endif %}<think>\n{{ hm.strip() }}\n</think>\n\n{{ said }}"
    "{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + (
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_thinking_in_a_field_is_trained_or_refused(tiny_dir):
    row = {"messages": [user("2+2?"), {**assistant("four"), "reasoning_content": "hm"}]}
    own = reader(tiny_dir, OWN_THINKING)
    assert trained(own, row) == ["<think>\nhm\n</think>\n\nfour<|im_end|>"]
    assert trained(own, {"messages": [user("2+2?"), assistant("<think>hm</think>four")]}) == trained(own, row)
    pair = pair_row({"prompt": [user("2+2?")], "chosen": row["messages"][1:], "rejected": [assistant("five")]})
    (chosen,) = encode_responses(encode_prompt(own, pair), own, [pair["chosen"]], [own.eos_token_id], 99)
    assert own.decode(chosen.response_ids) == "<think>\nhm\n</think>\n\nfour<|im_end|>"
    plain = reader(tiny_dir, PLAIN)
    found = refusal(plain, row)
    assert found.startswith(
        "row 6: messages[1].reasoning_content: expected a chat template that writes it for the role "
    )
    assert "got a text without 'hm'; put it between the model's thinking tags" in found
    renames = reader(tiny_dir, PLAIN.replace("{{ m.content }}", "{{ m.thinking }}{{ m.content }}"))
    assert "rename the field to thinking, which the template reads" in refusal(renames, row)
    both = {**assistant("four"), "thinking": "hm", "reasoning_content": "hm"}
    assert trained(renames, {"messages": [user("2+2?"), both]}) == ["hmfour<|im_end|>"]
    parts = {**assistant("four"), "reasoning_content": [{"type": "text", "text": "hm"}]}  # own reads text
    own.chat_template = own.chat_template.replace("hm.strip()", "hm.strip() if hm is string")
    assert "messages[1].reasoning_content" in refusal(own, {"messages": [user("2+2?"), parts]})


@pytest.mark.parametrize("said", ["<think>\nhm\n</think>\n\nfour", "hm</think>four", "<seed:think>hm</seed:think>four"])
def test_thinking_in_the_content_and_in_a_field_is_trained_once(tiny_dir, said):
    plain, own = reader(tiny_dir, PLAIN), reader(tiny_dir, OWN_THINKING)
    for field in ("reasoning_content", "reasoning", "thinking"):
        chat = {"messages": [user("2+2?"), {**assistant(said), field: "hm"}]}
        assert trained(plain, chat) == [said + "<|im_end|>"]
        if "<think>" in said:
            assert trained(own, chat) == ["<think>\nhm\n</think>\n\nfour<|im_end|>"]
    pair = pair_row({"prompt": "2+2?", "chosen": chat["messages"][1:], "rejected": "five"})
    assert pair["chosen"] == said


@pytest.mark.parametrize("setting", [True, 1, {"type": "enabled"}, "", []])
def test_a_field_that_holds_no_text_is_no_thinking(tiny_dir, setting):
    for field in ("reasoning_content", "reasoning", "thinking"):
        chat = {"messages": [user("2+2?"), {**assistant("four"), field: setting}]}
        assert trained(reader(tiny_dir, PLAIN), chat) == ["four<|im_end|>"]


def test_earlier_thinking_may_go_from_a_prompt_and_nothing_else(tiny_dir):
    own = reader(tiny_dir, OWN_THINKING)
    chat = [user("2+2?"), {**assistant("<think>so</think>four"), "reasoning_content": "hm"}, user("And?")]
    assert "four" in render(own, chat) and "so" not in render(own, chat)
    for gone in ("user", "system", "assistant"):
        own.chat_template = PLAIN.replace("{{ m.content }}", f"{{{{ m.content if m.role != '{gone}' }}}}")
        with pytest.raises(ValueError, match=rf"^messages\[{['system', 'user', 'assistant'].index(gone)}\].content: "):
            render(
                own, [{"role": "system", "content": "Be short. /no_think"}, user("2+2?"), assistant("4"), user("3?")]
            )
    own.chat_template = PLAIN.replace(
        "{{ m.content }}", "{{ m.content.replace('/no_think', '').strip() }}"
    )  # SmolLM3's
    assert "Be short.<|im_end|>" in render(own, [{"role": "system", "content": "Be short. /no_think"}, user("2?")])
    own.chat_template = PLAIN.replace("{{ m.content }}", "{{ m.content.replace('/system_override', '').strip() }}")
    assert "\nBe short.<|im_end|>" in render(
        own, [{"role": "system", "content": "/system_override Be short."}, user("2?")]
    )


@pytest.mark.parametrize(
    "written",
    [
        "{{ c.function.name }}{{ c.function.arguments | tojson }}",
        "{{ c | tojson }}",
        "{{ c.function.name }}({% for k, v in c.function.arguments | items %}{{ k }}={{ v }},{% endfor %})",
    ],
)
def test_calls_of_tools_appear_or_are_refused(tiny_dir, written):
    arguments = {"a": 7, "b": 'say "hi"\n', "c": [True, None, {"d": 0.5}], "é": "ü"}
    call = {"id": "call_1", "name": "add", "arguments": arguments}
    row = {"messages": [user("Q"), {"role": "assistant", "content": None, "tool_calls": [call]}]}
    calls = "{% for c in m.tool_calls or [] %}CALL" + written + "{% endfor %}"
    shows = reader(tiny_dir, PLAIN.replace("{{ m.content }}", "{{ m.content }}" + calls))
    assert trained(shows, row)[0].startswith("CALL") and "\\u" not in trained(shows, row)[0]
    assert "call_1" in trained(shows, row)[0] or "c |" not in written
    found = refusal(reader(tiny_dir, PLAIN), row)
    assert (
        found.startswith("row 6: messages[1].tool_calls: expected a chat template that writes it")
        and "calls into" in found
    )
    later = {"messages": [*row["messages"], {"role": "tool", "content": "8"}, assistant("eight")]}
    assert refusal(reader(tiny_dir, PLAIN), later).startswith("row 6: messages[1].tool_calls: expected")


def test_ids_that_a_template_writes_in_place_of_names_are_explained(tiny_dir):
    """Kimi K2's template writes `functions.add:0`, which is the call's id."""
    shows = "{% for c in m.tool_calls or [] %}CALL{{ c.id }}{{ c.function.arguments | tojson }}{% endfor %}"
    kimi = reader(tiny_dir, PLAIN.replace("{{ m.content }}", "{{ m.content }}" + shows))
    row = {
        "messages": [user("Q"), {**assistant(""), "tool_calls": [{"name": "add", "arguments": {"a": 7}, "id": "c1"}]}]
    }
    found = refusal(kimi, row)
    assert "tool_calls: expected" in found and "writes the call's id 'c1' in place of the name" in found
    row["messages"][1]["tool_calls"][0]["id"] = "functions.add:0"
    assert trained(kimi, row) == ['CALLfunctions.add:0{"a": 7}<|im_end|>']
    drops = reader(tiny_dir, PLAIN.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}" + shows))
    row["messages"][1]["content"] = "I add."  # Llama 3.1's drops it
    assert refusal(drops, row).endswith(
        "remove the text beside the calls, or use a template that writes it (--chat_template FILE)"
    )


def test_the_text_of_a_response_is_looked_up_in_its_own_turn(tiny_dir):
    """Not in the prompt, where the same word may stand."""
    deaf = reader(tiny_dir, PLAIN.replace("{{ m.content }}", "{{ m.content if m.role == 'user' }}"))
    row = {"messages": [user("What is four, hm?"), assistant("four")]}
    assert refusal(deaf, row).startswith("row 6: messages[1].content: expected a chat template that writes it")
    row = {"messages": [user("What is four, hm?"), {**assistant("four"), "reasoning_content": "hm"}]}
    assert refusal(deaf, row).startswith("row 6: messages[1].reasoning_content: expected a chat template that writes")
    plain = reader(tiny_dir, PLAIN)  # and an occurrence counts once
    row = {"messages": [user("2+2?"), {**assistant("hm, four"), "reasoning_content": "hm"}]}
    assert refusal(plain, row).startswith("row 6: messages[1].reasoning_content: expected")


def test_a_response_is_as_it_would_be_sampled_where_the_template_changes_it(tiny_dir):
    """R1's prompt opens a thought and its template removes thoughts; Gemma 4's removes those between its own tags."""
    drops = PLAIN.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    opens = reader(tiny_dir, drops.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"))
    for said in ("hm</think>four", "<think>\nhm</think>four"):
        assert trained(opens, {"messages": [user("2+2?"), assistant(said)]}) == ["hm</think>four<|im_end|>"]
    found = refusal(opens, {"messages": [user("2+2?"), assistant("four")]})
    assert "ends the thinking which the prompt begins, got one without '</think>'; " in found
    closes = {**chat_row({"question": "2+2?", "answer": "four"}), "response_prefix": "</think>"}
    assert trained(opens, closes) == ["four<|im_end|>"]
    gemma = reader(tiny_dir, PLAIN.replace("{{ m.content }}", "{{ m.content.split('<channel|>')[-1] }}"))
    row = {"messages": [user("2+2?"), assistant("<|channel>hm<channel|>four")]}
    tags = ["<|channel>", "<channel|>"]
    assert trained(gemma, {**row, "thinking_tags": tags}) == ["<|channel>hm<channel|>four<|im_end|>"]
    shut = reader(tiny_dir, drops.replace("assistant\n{% endif", "assistant\n<think></think>{% endif"))
    assert trained(shut, {"messages": [user("2+2?"), assistant("four")]}) == ["four<|im_end|>"]
    found = refusal(shut, {"messages": [user("2+2?"), assistant("hm</think>four")]})
    assert "expected a response without thinking after a prompt that ends with '</think>'" in found
    wraps = reader(tiny_dir, drops.replace("{{ m.content", "{{ 'SAYS ' if m.role == 'assistant' }}{{ m.content"))
    assert "got a text without 'hm'" in refusal(wraps, {"messages": [user("2+2?"), assistant("hm</think>four")]})


def test_a_response_as_it_is_has_the_white_space_that_the_template_writes_before_responses(tiny_dir):
    """Mistral's prompt ends with [/INST], and responses begin with a space."""
    mistral = reader(tiny_dir, (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% else %}"
        "{{ ' ' + m.content.split('</think>')[-1] }}<|im_end|>{% endif %}{% endfor %}"
    ))  # fmt: skip
    assert trained(mistral, {"messages": [user("2+2?"), assistant("four")]}) == [" four<|im_end|>"]
    thinks = {"messages": [user("2+2?"), assistant("<think>hm</think>four")]}
    assert trained(mistral, thinks) == [" <think>hm</think>four<|im_end|>"]
    assert trained(mistral, {**chat_row(thinks), "response_prefix": " "}) == ["<think>hm</think>four<|im_end|>"]


def test_a_response_that_the_template_refuses_is_refused(tiny_dir):
    refuses = "{% if m.content | length > 30 %}{{ raise_exception('too long') }}{% endif %}{{ m.content }}"
    strict = reader(tiny_dir, PLAIN.replace("{{ m.content }}", refuses))
    assert trained(strict, {"messages": [user("2+2?"), assistant("four")]}) == ["four<|im_end|>"]
    found = refusal(strict, {"messages": [user("2+2?"), assistant("four " * 9)]})
    assert found == "row 6: chat template: too long"


def test_errors_name_the_column_of_a_response(tiny_dir):
    plain = reader(tiny_dir, PLAIN)
    thinks = [{**assistant("four"), "reasoning_content": "hm"}]
    for name, other in (("chosen", "rejected"), ("rejected", "chosen")):
        pair = pair_row({"prompt": [user("2+2?")], name: thinks, other: [assistant("five")]})
        with pytest.raises(ValueError, match=f"^row: {name}.reasoning_content: expected a chat template that writes"):
            encode_responses(encode_prompt(plain, pair), plain, [pair["chosen"], pair["rejected"]], [0], 99)


def test_a_response_ends_with_the_token_that_the_template_writes_next(tiny_dir):
    """In GLM-4.5 that is the role of the next message, and nothing ends the last response."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}C{{ c.function.name }}"
        "{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    glm = reader(tiny_dir, template, "<|user|>", "<|assistant|>", "<|tool|>")
    ends = ("<|im_end|>", "<|user|>", "<|tool|>")
    call = {**assistant(""), "tool_calls": [{"name": "add", "arguments": {}}]}
    chat = [user("1"), assistant("one"), user("2"), call, {"role": "tool", "content": "8"}, assistant("two")]
    assert trained(glm, {"messages": chat}, *ends) == ["one<|user|>", "Cadd<|tool|>", "two<|user|>"]
    assert trained(glm, {"messages": chat[:4]}, *ends) == ["one<|user|>", "Cadd<|tool|>"]
    assert trained(glm, {"messages": chat[:2]}, "<|im_end|>") == ["one<|im_end|>"]
    prompt = encode_prompt(glm, chat_row({"messages": chat}))
    whole = encode_chat(prompt, glm, glm.convert_tokens_to_ids(list(ends)), 999)
    written = "<|user|>1<|assistant|>one<|user|>2<|assistant|>Cadd<|tool|>8<|assistant|>two<|user|>"
    assert glm.decode(whole.token_ids) == written  # nothing twice


def test_a_last_message_may_end_otherwise_than_earlier_ones(tiny_dir):
    """Phi-3's template writes one more end token after the last."""
    phi = reader(tiny_dir, PLAIN.replace("{% endif %}", "{% else %}<|endoftext|>{% endif %}"), "<|endoftext|>")
    chat = [user("1"), assistant("one"), user("2"), assistant("two")]
    assert trained(phi, {"messages": chat}, "<|im_end|>", "<|endoftext|>") == ["one<|im_end|>", "two<|im_end|>"]
    found = encode_observation(phi, chat[:1], user("2"))
    assert phi.decode(found.token_ids) == "\n<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n"


def test_the_last_response_alone_is_trained(tiny_dir):
    chat = {"messages": [user("1"), assistant("<think>hm</think>one"), user("2"), assistant("two")]}
    own = reader(tiny_dir, OWN_THINKING)
    found = refusal(own, chat)
    assert "keeps a response when messages follow" in found and "--train_on last" in found
    assert trained(own, chat, last_only=True) == ["<think>\n\n</think>\n\ntwo<|im_end|>"]


def test_a_sampled_end_token_is_not_repeated_in_an_observation(tiny_dir):
    """Cohere's template ends a turn with two tokens; a policy may sample the second one alone, or none of them."""
    template = PLAIN.replace("<|im_end|>\n", "<|end_response|><|im_end|>")
    cohere = reader(tiny_dir, template, "<|end_response|>")
    rest = "<|im_start|>user\nseen<|end_response|><|im_end|><|im_start|>assistant\n"
    for ended_by, written in (
        ("<|im_end|>", rest),
        ("<|end_response|>", "<|im_end|>" + rest),
        ("a", "<|end_response|><|im_end|>" + rest),
    ):
        (token,) = cohere.convert_tokens_to_ids([ended_by])
        found = encode_observation(cohere, [user("Q")], user("seen"), ended_by=token)
        assert cohere.decode(found.token_ids) == written


def test_an_observation_that_the_template_leaves_out_is_refused(tiny_dir):
    """Gemma 4's template writes what a tool says only after a call."""
    deaf = reader(tiny_dir, PLAIN.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}"))
    with pytest.raises(
        ValueError, match=r"observation.content: expected a chat template .* the role 'tool', got a text"
    ):
        encode_observation(deaf, [user("seen?")], {"role": "tool", "content": "seen"})
    assert encode_observation(deaf, [user("seen?")], user("seen")).token_ids


def test_options_of_every_named_template_pass_at_the_start(tiny_dir):
    tokenizer = reader(tiny_dir, {"default": PLAIN + "{{ bos_token }}", "tool_use": "{{ tools }}{{ style }}" + PLAIN})
    check_template_options(tokenizer, {"style": "short", "bos_token": ""})
    with pytest.raises(ValueError, match=r"template \(bos_token, style, tools\), got 'other'"):
        check_template_options(tokenizer, {"other": 1})
    assert render(tokenizer, [user("Q")], chat_template_kwargs={"bos_token": "<s>"}).endswith("<s>")
    with pytest.raises(ValueError, match=r"template \(bos_token\), got 'style'"):
        render(tokenizer, [user("Q")], chat_template_kwargs={"style": "short"})
