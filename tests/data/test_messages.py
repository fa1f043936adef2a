"""Chats: what is a list of messages, and where its images go."""

import pytest

from rlkit.data.formats import task_row
from rlkit.data.messages import message, place_media, prompt_of, read_messages, text_of

PICTURE = {"type": "image"}
CLIP = {"type": "video"}


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def text(words):
    return {"type": "text", "text": words}


def test_message_and_text_of():
    assert message("user", "Q") == user("Q") and message("user", "Q", 2) == user([PICTURE, PICTURE, text("Q")])
    assert text_of(user([text("a"), PICTURE, text("b")])) == "ab" and text_of(user("a")) == "a"
    assert text_of({"role": "assistant", "tool_calls": []}) == ""


def test_empty_fields_go():
    came = [{"role": "user", "content": [{"type": "text", "text": "Q", "image": None}], "tool_calls": None}]
    assert read_messages(came) == [user([text("Q")])]
    assert read_messages('[{"role": "user", "content": "Q"}]') == [user("Q")]  # as some parquet files hold them


def test_calls_of_tools_have_objects_as_arguments():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    wanted = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    for one, same in ((call, {"id": "1", **wanted}), ({"name": "add", "arguments": {"a": 1}}, wanted)):
        (read,) = read_messages([{"role": "assistant", "content": None, "tool_calls": [one]}])
        assert read == {"role": "assistant", "content": "", "tool_calls": [same]}
    (read,) = read_messages([{"role": "assistant", "content": [{"type": "text", "text": "Q"}], "tool_calls": [call]}])
    assert read["content"] == [text("Q")]


@pytest.mark.parametrize(
    ("found", "error"),
    [
        (5, "messages: expected text or a list of messages, got 5"),
        ([], "messages: expected text or a list of messages, got []"),
        ("Q", "messages: expected text or a list of messages, got 'Q'"),
        (["Q"], 'messages[0]: expected {"role": ..., "content": ...}, got \'Q\''),
        ([user("Q"), {"content": 1}], 'messages[1]: expected {"role": ..., "content": ...}, got {\'content\': 1}'),
        ([user(None)], "messages[0].content: expected text or a list of parts, got None"),
        ([user({"text": "Q"})], "messages[0].content: expected text or a list of parts, got {'text': 'Q'}"),
        ([user(["Q"])], "messages[0].content: expected parts of type text, image, video and audio, got 'Q'"),
        (
            [user([{"type": "sound", "sound": "a.wav"}])],
            "messages[0].content: expected parts of type text, image, video and audio, got {'type': 'sound', "
            "'sound': 'a.wav'}",
        ),
        (
            [user([text("Q"), {"type": "input_audio", "input_audio": {"url": "a.wav"}}])],
            'messages[0].content: expected an input_audio of {"data": base64 of a file, "format": "wav"}, got '
            "{'url': 'a.wav'}",
        ),
        (
            [user([{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "../wav"}}])],
            'messages[0].content: expected an input_audio of {"data": base64 of a file, "format": "wav"}, got '
            "{'data': 'AAAA', 'format': '../wav'}",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"name": "add", "arguments": "1 + 1"}]}],
            "messages[0].tool_calls: expected a function's name and its arguments, got {'name': 'add', 'arguments': '1 "
            "+ 1'}",
        ),
    ],
)
def test_what_is_no_chat_is_refused(found, error):
    with pytest.raises(ValueError) as caught:
        read_messages(found)
    assert str(caught.value) == error


@pytest.mark.parametrize(
    ("messages", "images", "contents"),
    [
        ([user("Q")], [], ["Q"]),
        ([user("Q")], ["a", "b"], [[PICTURE, PICTURE, text("Q")]]),
        ([message("system", "S"), user("Q"), assistant("x"), user("R")], ["a"], ["S", [PICTURE, text("Q")], "x", "R"]),
        ([user("<image>\nQ")], ["a"], [[PICTURE, text("\nQ")]]),
        ([user("A <image> and <image>?")], ["a", "b"], [[text("A "), PICTURE, text(" and "), PICTURE, text("?")]]),
        (
            [user("<image>Q"), assistant("x"), user("R<image>")],
            ["a", "b"],
            [[PICTURE, text("Q")], "x", [text("R"), PICTURE]],
        ),
        ([user([text("A <image>")])], ["a"], [[text("A "), PICTURE]]),
        ([user([text("A"), PICTURE, text("B")])], ["a"], [[text("A"), PICTURE, text("B")]]),
    ],
)
def test_places_of_images(messages, images, contents):
    placed, found, *_ = place_media(messages, images)
    assert [one["content"] for one in placed] == contents and found == images
    assert place_media(placed, found) == (placed, found, [], [])  # what is placed stays


def test_images_in_the_messages():
    """OpenAI's and Qwen's forms."""
    parts = [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "image", "image": "b.png"}, text("Q")]
    placed, images, *_ = place_media(read_messages([user(parts)]))
    assert placed == [user([PICTURE, PICTURE, text("Q")])] and images == ["a.png", "b.png"]
    with pytest.raises(ValueError, match="^images: expected all in the messages or all beside them, got 2 and 1$"):
        place_media(read_messages([user(parts)]), ["c.png"])


@pytest.mark.parametrize(
    ("messages", "count", "error"),
    [
        ([user("<image>Q")], 0, "got 0 for 1 <image>"),
        ([user("<image>Q")], 2, "got 2 for 1 <image>"),
        ([user("<image><image>Q")], 1, "got 1 for 2 <image>"),
        ([user([PICTURE, text("Q")])], 0, "got 0 for 1 image parts"),
        ([user([PICTURE, text("Q")])], 2, "got 2 for 1 image parts"),
        ([user([PICTURE, text("<image>Q")])], 2, "got 2 for 1 <image> and 1 image parts"),
        ([user([PICTURE, text("<image>Q")])], 1, "got 1 for 1 <image> and 1 image parts"),
        ([assistant("Q")], 1, "got 1 for no place"),
    ],
)
def test_images_without_places_and_places_without_images(messages, count, error):
    with pytest.raises(ValueError) as caught:
        place_media(messages, ["a"] * count)
    assert str(caught.value) == f"images: expected one for each place, {error}"


def test_places_of_videos():
    """As those of images: marks, parts with or without a source, or before the text; a mark without videos is text."""
    frames = ["1.png", "2.png"]
    marked = prompt_of({"question": "<video>A<image>", "images": ["a"], "videos": ["b"]})
    assert marked == ([user([CLIP, text("A"), PICTURE])], ["a"], ["b"], [])
    assert prompt_of({"question": "Q", "images": ["a"], "video": frames}) == (
        [user([CLIP, PICTURE, text("Q")])],
        ["a"],
        [frames],
        [],
    )
    parts = [{"type": "video", "video": frames}, {"type": "video_url", "video_url": {"url": "b.mp4"}}, text("Q")]
    assert prompt_of({"messages": [user(parts)]}) == ([user([CLIP, CLIP, text("Q")])], [], [frames, "b.mp4"], [])
    assert prompt_of({"question": "What is <video>?"}) == ([user("What is <video>?")], [], [], [])
    for row, error in (
        ({"question": "<video>Q", "videos": ["a", "b"]}, "videos: expected one for each place, got 2 for 1 <video>"),
        ({"messages": [user([CLIP])]}, "videos: expected one for each place, got 0 for 1 video parts"),
    ):
        with pytest.raises(ValueError) as caught:
            prompt_of(row)
        assert str(caught.value) == error


def test_places_of_audios():
    """As those of videos. A list in `audio` is one audio, as samples with their rate."""
    noise, part = ([0.5, -0.5], 16000), {"type": "audio"}
    assert prompt_of({"question": "A <audio> B", "audios": ["a.wav"]}) == (
        [user([text("A "), part, text(" B")])],
        [],
        [],
        ["a.wav"],
    )
    assert prompt_of({"question": "What is <audio>?", "audio": None}) == ([user("What is <audio>?")], [], [], [])
    assert prompt_of({"question": "Q", "audio": noise}) == ([user([part, text("Q")])], [], [], [noise])
    parts = [{"type": "audio", "audio": "a.wav"}, {"type": "audio_url", "audio_url": {"url": "b.mp3"}}, text("Q")]
    assert prompt_of({"messages": [user(parts)]}) == ([user([part, part, text("Q")])], [], [], ["a.wav", "b.mp3"])
    parts = [{"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}}, text("Q")]  # OpenAI's
    assert prompt_of({"messages": [user(parts)]}) == (
        [user([part, text("Q")])],
        [],
        [],
        ["data:audio/wav;base64,UklG"],
    )


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("audio", ["a.wav"]),
        ("audio", ["a.wav", "b.wav"]),
        ("audio", [{"bytes": b"RIFF", "path": None}]),
        ("video", ["a.mp4", "b.webm"]),
        ("video", [{"bytes": None, "path": "a.mp4"}]),
    ],
)
def test_a_list_of_files_in_a_column_for_one_is_named(kind, files):
    error = f"^{kind}: expected one, got a list of {len(files)} files; put several into a column {kind}s$"
    with pytest.raises(ValueError, match=error):
        prompt_of({"question": "Q", kind: files})
    with pytest.raises(ValueError, match=error):
        task_row({"question": "Q", "answer": "A", kind: files})
    frames = ["1.png", "2.png"]
    assert prompt_of({"question": "Q", "video": frames}).videos == [frames]


def test_prompt_of_a_row():
    assert prompt_of({"question": "Q"}) == ([user("Q")], [], [], [])
    assert prompt_of({"question": "<image>Q", "images": ["a"]}) == ([user([PICTURE, text("Q")])], ["a"], [], [])
    assert prompt_of({"question": [user("Q")]}) == ([user("Q")], [], [], [])  # and not as Python writes a list
    assert prompt_of({"question": "Q", "videos": [], "audio": None, "images": None}) == ([user("Q")], [], [], [])
    assert prompt_of({"question": "shown", "messages": [user("Q")]}) == ([user("Q")], [], [], [])
    for row, error in (
        ({"question": None}, "question: expected text or a list of messages, got None"),
        ({"question": 5}, "question: expected text or a list of messages, got 5"),
        ({"question": "Q", "unreadable": "the reason"}, "the reason"),
        (
            {"question": "Q", "images": "a.png"},
            "images: expected a list, got 'a.png'; a single one is a list of one entry",
        ),
        (
            {"question": "Q", "videos": "a.mp4"},
            "videos: expected a list, got 'a.mp4'; a single one is a list of one entry",
        ),
    ):
        with pytest.raises(ValueError) as caught:
            prompt_of(row)
        assert str(caught.value) == error
