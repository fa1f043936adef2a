"""The tiny models as everything else takes them: a directory with weights, a tokenizer or processor, and end tokens."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlkit.data import load_task
from rlkit.rewards import score
from rlkit.rollout import Sampling, make_rollout
from rlkit.vlm import build_tiny, encode_prompt, encode_prompts, load_model, load_processor, suppressed_token_ids
from rlkit.vlm.tiny import tiny_text_config, tiny_text_tokenizer, tiny_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sorting():
    return load_task("sorting")


@pytest.fixture(scope="module")
def text_dir(tmp_path_factory, sorting):
    path = tmp_path_factory.mktemp("text") / "model"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    build_tiny(path, sorting.train)
    torch.set_num_threads(threads)
    return str(path)


def test_a_directory_like_any_other(text_dir, sorting):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(text_dir), AutoTokenizer.from_pretrained(text_dir)
    config = model.config
    assert config.model_type == "qwen2" and config.vocab_size == len(tokenizer) < 400
    assert config.hidden_size // config.num_attention_heads == 32  # samplers take 32 and 64
    assert 2e5 < model.num_parameters() < 7e5 and config.tie_word_embeddings
    processor = load_processor(text_dir)
    assert (
        processor.eos_token_id == model.generation_config.eos_token_id == processor.convert_tokens_to_ids("<|im_end|>")
    )
    assert suppressed_token_ids(config, processor).tolist() == []  # no images, no rows beyond the vocabulary
    assert not {"<|image_pad|>", "<|vision_start|>"} & set(processor.get_vocab())


def test_what_is_read_back_tokenises_as_what_was_saved(text_dir, sorting):
    """Qwen2 has a tokenizer class of its own, which splits text by rules of its own."""
    questions = [row["question"] for row in sorting.train]
    made = tiny_text_tokenizer([*questions, *[row["answer"] for row in sorting.train], "user assistant system"])
    read = load_processor(text_dir)
    for text in [*questions[:50], "MCMXCIV is 1994", "It's 12,345.6!\n\nAB c", "<|im_start|>user\nSort<|im_end|>"]:
        assert read(text)["input_ids"] == made(text)["input_ids"]
        assert read.decode(read(text)["input_ids"]) == text


def test_digits_and_capitals_are_tokens_of_their_own(text_dir, sorting):
    tokenizer = load_processor(text_dir)
    tokens = [tokenizer.decode([token]) for token in encode_prompt(tokenizer, sorting.train[0]).token_ids]
    digits = sorting.train[0]["where"][-3:]
    assert "".join(tokens) == f"<|im_start|>user\nSort the digits {digits}.<|im_end|>\n<|im_start|>assistant\n"
    assert [token for token in tokens if token.isdigit()] == list(digits)
    assert len(tiny_text_tokenizer(["XXVII 1999"] * 9)("XXVII1999")["input_ids"]) == 9
    assert len(tiny_tokenizer(["XXVII 1999"] * 9)("XXVII1999")["input_ids"]) < 9


def test_a_prompt_of_text_has_no_placeholders_and_no_images(text_dir, sorting):
    sample = encode_prompt(load_processor(text_dir), sorting.heldout[0])
    assert sample.token_ids == sample.compact_ids and not sample.vision and not sample.placeholders
    with pytest.raises(ValueError, match="images: expected none, as the model's processor is a tokenizer"):
        encode_prompt(load_processor(text_dir), load_task("digits").train[0])


def test_the_warm_up_teaches_the_form_and_little_else(text_dir, sorting):
    model, tokenizer = load_model(text_dir), load_processor(text_dir)

    @contextmanager
    def gathered():
        yield model

    rollout = make_rollout("hf", gathered, processor=tokenizer)
    prompts, skipped = encode_prompts(tokenizer, list(enumerate(sorting.heldout)))
    responses = rollout.generate(prompts, Sampling(4, temperature=0.0))
    assert not skipped and score(sorting.reward, responses).mean() < 0.4
    assert sum(response.text.isdigit() for response in responses) > 0.8 * len(responses)
    logprobs = model(torch.tensor([responses[0].token_ids])).logits.log_softmax(-1)
    sampled = torch.tensor(responses[0].logprobs)[responses[0].mask]
    wanted = logprobs[0, :-1].gather(1, torch.tensor(responses[0].token_ids)[1:, None])[:, 0][-len(sampled) :]
    torch.testing.assert_close(sampled, wanted, atol=1e-5, rtol=1e-5)


def test_the_same_seed_builds_the_same_model(tmp_path, sorting):
    """In another process, whose hashes are salted differently: nothing may go by the order of a set."""
    code = (
        "import sys, torch\nfrom rlkit.data import load_task\nfrom rlkit.vlm import build_tiny\n"
        "build_tiny(sys.argv[1], load_task('sorting').train[:99], warm_up_steps=1, seed=5)"
    )
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "b")], env=env) as other:
        build_tiny(tmp_path / "a", sorting.train[:99], warm_up_steps=1, seed=5)
    assert other.returncode == 0
    for file in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
    assert not (tmp_path / "a.part").exists()


def test_a_path_with_files_is_refused(tmp_path, sorting):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "notes").write_text("mine")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "tiny", tmp_path / "tiny" / "notes"):
        with pytest.raises(ValueError, match=f"^path: expected a directory that is new or empty, got '{path}'"):
            build_tiny(path, sorting.train[:8], warm_up_steps=0)
        assert not Path(f"{path}.part").exists()
    build_tiny(tmp_path / "empty", sorting.train[:8], warm_up_steps=0)


def test_rows_with_and_without_images_make_one_model_that_sees(tmp_path, sorting):
    digits = load_task("digits").train[:20]
    path = tmp_path / "digit.png"
    digits[0]["images"][0].save(path)
    rows = [*sorting.train[:20], *digits, {"question": "Which?", "images": [str(path)], "answer": "3"}]
    build_tiny(tmp_path / "both", rows, warm_up_steps=1)
    processor = load_processor(str(tmp_path / "both"))
    samples, skipped = encode_prompts(processor, list(enumerate(rows)))
    assert not skipped and [bool(sample.vision) for sample in samples] == [False] * 20 + [True] * 21
    config = json.loads((tmp_path / "both" / "config.json").read_text())
    assert config["model_type"] == "qwen2_5_vl"


@pytest.mark.parametrize("kind", ["image", "video"])
def test_rows_that_cannot_be_read_are_left_out_of_the_warm_up(tmp_path, kind):
    (tmp_path / "bad").write_bytes(b"neither an image nor a video")
    pictures = [Image.new("RGB", (56, 56), colour) for colour in ("red", "green", "blue")]
    good = [{"question": "Which?", f"{kind}s": [one if kind == "image" else [one] * 4]} for one in pictures]
    damaged = {"question": "Which?", f"{kind}s": [str(tmp_path / "bad")]}
    bad = [
        damaged,
        {"question": "", "unreadable": "row 9: no question"},
        {"question": f"Which <|{kind}_pad|>?", f"{kind}s": good[0][f"{kind}s"]},
        {"question": "Which?", f"{kind}s": str(tmp_path / "bad")},
        {"question": "Which \ud800?", f"{kind}s": good[0][f"{kind}s"]},
    ]

    def weights(name, rows, **options):
        build_tiny(tmp_path / name, [{"images": [], "answer": "red", **row} for row in rows], **options)
        return load_file(tmp_path / name / "model.safetensors")

    for i, one in enumerate(bad):  # with each alone: one that is noticed would hide another
        untrained, trained = (weights(f"{i}-{n}", [*good, one], warm_up_steps=n) for n in (0, 1))
        assert not all(torch.equal(x, trained[name]) for name, x in untrained.items()), one
    with pytest.raises(ValueError, match=f"^tiny model: expected rows that can be read, got none; .*{kind} .*bad"):
        weights("none", [damaged], warm_up_steps=1)


def test_sizes_are_options():
    tokenizer = tiny_text_tokenizer(["abc"])
    config = tiny_text_config(tokenizer, hidden=64, layers=1)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (64, 1, len(tokenizer))
