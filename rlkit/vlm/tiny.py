"""Builds a tiny Qwen2.5-VL, or for text a Qwen2, without a download: at most 0.7M parameters, with its processor.

The result is an ordinary model directory, so every program that accepts a 7B model accepts it too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlkit.data.messages import prompt_of
from rlkit.vlm.encoding import video_arguments
from rlkit.vlm.images import load_image
from rlkit.vlm.prompts import encode_prompt
from rlkit.vlm.rendering import render
from rlkit.vlm.videos import load_videos

TINY_MARK = "rlkit_tiny"  # in config.json, also of what is trained from it
HEADS, KV_HEADS, PATCH_SIZE = 4, 2, 14

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(corpus: Sequence[str], vocab_size: int = 400) -> Any:
    """A byte-level BPE tokenizer with the special tokens and the chat template of the Qwen-VL families."""
    images = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    return _tokenizer(corpus, vocab_size, SPECIAL, extra_special_tokens=images)


def tiny_text_tokenizer(corpus: Sequence[str], vocab_size: int = 400) -> Any:
    """The same for a text model; digits and capital letters are never merged, which makes the tasks learnable."""
    names = ["input_ids", "attention_mask"]
    return _tokenizer(corpus, vocab_size, SPECIAL[:3], alone="[0-9A-Z]", model_input_names=names)


def _tokenizer(corpus: Sequence[str], vocab_size: int, special: list[str], alone: str = "", **options: Any) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    pieces: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if alone:
        pieces = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(alone), "isolated"), pieces])
    bpe.pre_tokenizer = pieces
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
        **options,
    )


def tiny_processor(tokenizer: Any, *, videos: bool = False) -> Any:
    """A processor with this tokenizer, for images with 28 to 224 pixels per side.

    Args:
        videos: it has a video processor, which needs torchvision. Its configuration is saved in either case.
    """
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessorPil

    from rlkit.vlm.processors import without_video_processor

    size = {"shortest_edge": 28 * 28, "longest_edge": 224 * 224}  # pixels of an image, or of a frame of a video
    images = Qwen2VLImageProcessorPil(size=size, patch_size=PATCH_SIZE)
    video_options: dict[str, Any] = {
        "size": size,
        "cap_pixels_per_frame": False,
        "patch_size": PATCH_SIZE,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    template = tokenizer.chat_template
    if videos:
        from transformers import Qwen2VLVideoProcessor

        return Qwen2_5_VLProcessor(images, tokenizer, Qwen2VLVideoProcessor(**video_options), chat_template=template)
    processor = without_video_processor(Qwen2_5_VLProcessor)(images, tokenizer, chat_template=template)
    processor.video_config = {"video_processor_type": "Qwen2VLVideoProcessor", **video_options}
    return processor


def tiny_config(tokenizer: Any, *, hidden: int = 128, layers: int = 2, vision_hidden: int = 64) -> Any:
    """A Qwen2.5-VL configuration of about 0.7M parameters, with tied embeddings."""
    from transformers import Qwen2_5_VLConfig

    half = hidden // HEADS // 2
    side = half * 3 // 8
    ids = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [half - 2 * side, side, side]},
    }
    vision = {
        "depth": 2,
        "hidden_size": vision_hidden,
        "intermediate_size": 3 * vision_hidden,
        "num_heads": 4,
        "patch_size": PATCH_SIZE,
        "window_size": 8 * PATCH_SIZE,
        "out_hidden_size": hidden,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 4,
    }
    mark: dict[str, Any] = {TINY_MARK: True}
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=True,
        **mark,
    )


def tiny_text_config(tokenizer: Any, *, hidden: int = 128, layers: int = 2) -> Any:
    """A Qwen2 configuration of about 0.4M parameters, with tied embeddings."""
    from transformers import Qwen2Config

    mark: dict[str, Any] = {TINY_MARK: True}
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=4096,
        initializer_range=hidden**-0.5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **mark,
    )


def build_tiny(
    path: str | Path,
    rows: Sequence[Mapping[str, Any]],
    *,
    seed: int = 0,
    warm_up_steps: int = 60,
    label_noise: float = 0.6,
    lr: float = 5e-4,
) -> None:
    """Initialises a tiny model, warms it up on a task's rows, and writes a model directory.

    The warm-up is a few seconds of supervised fine-tuning. Most responses are replaced with those of other rows, so the
    model learns the form of a response and little of its content.

    Args:
        path: directory to write; it is complete or does not exist.
        rows: of a task, see rlkit.data.tasks. If none has an image or a video, the model is a Qwen2 without a vision
            tower. Rows that cannot be read are left out of the warm-up.
        seed: for the weights and the warm-up.
        warm_up_steps: training steps of 32 rows each.
        label_noise: share of responses that are replaced.
        lr: learning rate of the warm-up.

    Raises:
        ValueError: none of the rows can be read, or `path` is a file or a directory with files.
    """
    from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2ForCausalLM

    if Path(path).is_file() or (Path(path).is_dir() and any(Path(path).iterdir())):
        raise ValueError(f"path: expected a directory that is new or empty, got {str(path)!r}, which exists")
    words = [_unicode(row["answer"]) for row in rows]
    corpus = [*dict.fromkeys(_unicode(row["question"]) for row in rows), *words, "user assistant system"]
    sees = any(row["images"] or row.get("videos") for row in rows)
    tokenizer = tiny_tokenizer(corpus) if sees else tiny_text_tokenizer(corpus)
    watches = any(row.get("videos") for row in rows)
    processor = tiny_processor(tokenizer, videos=watches) if sees else tokenizer
    model: Any
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if sees:
            model = Qwen2_5_VLForConditionalGeneration(tiny_config(tokenizer))
        else:
            model = Qwen2ForCausalLM(tiny_text_config(tokenizer))
    rng = np.random.default_rng(seed)
    noisy = rng.permutation(words), rng.random(len(rows)) < label_noise
    responses = [str(other) if swap else word for word, other, swap in zip(words, *noisy, strict=True)]
    _warm_up(model, processor, rows, responses, warm_up_steps, lr, rng)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    part = Path(f"{path}.part")
    model.save_pretrained(part)
    processor.save_pretrained(part)
    part.rename(path)


def _unicode(text: Any) -> str:
    """The text without unpaired surrogates, which tokenizers do not take. A row with one in its prompt is skipped."""
    return str(text).encode(errors="ignore").decode()


def is_tiny(model: str) -> bool:
    """Whether a model is "tiny", or a directory with a model that `build_tiny` made or that was trained from one."""
    if model == "tiny":
        return True
    try:
        content = json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and bool(content.get(TINY_MARK))


def model_or_tiny(model: str, place: Path, rows: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Returns `model`, or for "tiny" the directory of a tiny model. All ranks call it together.

    Args:
        model: directory, hub id, or "tiny".
        place: directory of the tiny model; the first rank builds it if it does not exist.
        rows, options: see `build_tiny`.
    """
    if model != "tiny":
        return model
    if dist.get_rank() == 0 and not place.exists():
        print(f"building a tiny model and warming it up: {place}", flush=True)
        build_tiny(place, rows, **options)
    dist.barrier()
    return str(place)


def _warm_up(
    model: Any, processor: Any, rows: Sequence[Any], labels: Sequence[str], steps: int, lr: float, rng: Any
) -> None:
    """Supervised fine-tuning with transformers' loss, on the responses only. Rows that cannot be read are left out.

    Raises:
        ValueError: none of the rows can be read.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    reason = cache(lambda i: _reason_to_skip(processor, rows[i]))
    trained, drawn = 0, []
    model.train()
    for _ in range(steps):
        chosen = drawn = rng.integers(len(rows), size=32).tolist()
        try:
            inputs = _inputs_and_labels(processor, [(rows[i], labels[i]) for i in chosen])
        except Exception:  # processors have errors of their own; an error that no row causes is raised again below
            chosen = [i for i in drawn if reason(i) is None]
            if not chosen:
                continue
            inputs = _inputs_and_labels(processor, [(rows[i], labels[i]) for i in chosen])
        trained += len(chosen)
        model(**inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()
    if steps and not trained:
        raise ValueError(
            f"tiny model: expected rows that can be read, got none; the reason for one: {reason(drawn[0])}"
        )


def _reason_to_skip(processor: Any, row: Any) -> str | None:
    """Why a run skips this row; None if it does not."""
    try:
        encode_prompt(processor, row)
    except ValueError as error:
        return str(error)
    return None


def _inputs_and_labels(processor: Any, pairs: Sequence[tuple[Any, str]]) -> dict[str, Any]:
    """A padded batch of rows with their responses, in which the labels are the tokens of the responses."""
    tokenizer = getattr(processor, "tokenizer", processor)
    chats = [prompt_of(row) for row, _ in pairs]
    prompts = [render(processor, chat.messages, add_generation_prompt=True) for chat in chats]
    responses = [f"{label}<|im_end|>" for _, label in pairs]
    text = [q + a for q, a in zip(prompts, responses, strict=True)]
    images = {"images": found} if (found := [load_image(image) for chat in chats for image in chat.images]) else {}
    videos = load_videos(processor, [video for chat in chats for video in chat.videos])
    media = {**images, **(video_arguments(processor, videos) if videos else {})}
    inputs = processor(text=text, padding=True, return_tensors="pt", **media)
    labels = torch.full_like(inputs["input_ids"], -100)  # left-padded: the response is at the end
    for i, response in enumerate(responses):
        n = len(tokenizer(response)["input_ids"])
        labels[i, -n:] = inputs["input_ids"][i, -n:]
    return {**inputs, "labels": labels}
