"""Families of which rlkit takes rows of text alone: these are right, and images and videos are refused by name."""

import sys
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForImageTextToText

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
from family_configs import BASE, ROUTED, SMALL_VIT  # noqa: E402
from family_processors import tokenizer, with_videos  # noqa: E402
from test_every_family import clip, image  # noqa: E402
from test_families import seeded  # noqa: E402

from rlkit.data import append_response, collate  # noqa: E402
from rlkit.engines import make_engine  # noqa: E402
from rlkit.rollout import Sampling, make_rollout  # noqa: E402
from rlkit.vlm import encode_prompt, load_processor, suppressed_token_ids  # noqa: E402
from rlkit.vlm.families import TEXT_ROWS_ONLY  # noqa: E402


def minimax_m3_vl():
    t = tokenizer("]<]image[>[", "]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>[")
    size = {"shortest_edge": 64, "longest_edge": 1024}
    images = transformers.MiniMaxM3VLImageProcessor(patch_size=4, size=size)
    videos = transformers.MiniMaxM3VLVideoProcessor(patch_size=4, size=size)
    text = {
        **BASE, **ROUTED, "num_local_experts": 4, "dense_intermediate_size": 48, "shared_intermediate_size": 16,
        "rotary_dim": 4, "index_n_heads": 4, "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"],
    }  # fmt: skip
    config = {"text_config": text, "vision_config": {**SMALL_VIT, "hidden_size": 24}, "projector_hidden_size": 32}
    return transformers.MiniMaxM3VLProcessor(images, with_videos(t, "]<]video[>["), videos), config


def perception_lm():
    t = tokenizer("<|image|>", image_token="<|image|>", video_token="<|video|>")
    images, videos = transformers.PerceptionLMImageProcessor(tile_size=16), transformers.PerceptionLMVideoProcessor()
    tower = {
        "model_type": "timm_wrapper", "architecture": "vit_pe_core_large_patch14_336", "model_args": {
            "embed_dim": 16, "num_heads": 2, "depth": 1, "img_size": [16, 16], "patch_size": 4, "global_pool": "",
            "ref_feat_shape": [4, 4], "use_post_transformer_norm": False,
        },
    }  # fmt: skip
    processor = transformers.PerceptionLMProcessor(
        videos, images, with_videos(t, "<|video|>"), patch_size=4, pooling_ratio=1
    )
    return processor, {"text_config": {**BASE, "model_type": "llama"}, "vision_config": tower}


def video_llava():
    t = tokenizer("<image>", image_token="<image>", video_token="<video>")
    images, videos = transformers.VideoLlavaImageProcessor(), transformers.VideoLlavaVideoProcessor()
    tower = {**SMALL_VIT, "image_size": 16, "model_type": "clip_vision_model"}
    processor = transformers.VideoLlavaProcessor(
        images, videos, with_videos(t, "<video>"), patch_size=4, vision_feature_select_strategy="default"
    )
    return processor, {"text_config": {**BASE, "model_type": "llama"}, "vision_config": tower}


@cache
def made(family):
    """The processor and the model of a family."""
    processor, config = {make.__name__: make for make in (minimax_m3_vl, perception_lm, video_llava)}[family]()
    processor.chat_template = processor.tokenizer.chat_template
    ids = {"image_token_id": processor.image_token_id, "video_token_id": processor.video_token_id}
    if family == "video_llava":
        ids = {f"{kind}_token_index": ids[f"{kind}_token_id"] for kind in ("image", "video")}
    config["text_config"]["vocab_size"] = len(processor.tokenizer)
    config = AutoConfig.for_model(family, **config, **ids, pad_token_id=0)
    return processor, seeded(lambda: AutoModelForImageTextToText.from_config(config, attn_implementation="eager"))


@pytest.mark.parametrize("family", TEXT_ROWS_ONLY)
def test_rows_of_text_are_scored_and_sampled_as_by_transformers(family):
    """Packed; rows of MiniMax-M3 are padded, on the right: its attention to blocks of tokens cannot be packed."""
    (processor, model), packed = made(family), family != "minimax_m3_vl"
    suppressed = suppressed_token_ids(model.config, processor.tokenizer)
    trainer = make_engine(
        "fsdp2", model=deepcopy(model), device="cpu", use_remove_padding=packed, suppressed_token_ids=suppressed
    )
    prompts = [encode_prompt(processor, {"question": "how many " * n}, group_id=n) for n in (1, 4)]
    rows = collate([append_response(prompt, [70, 71, 72], [-1.0] * 3) for prompt in prompts])
    for scores, ids, mask in zip(trainer.infer_batch(rows)["logprobs"], rows.tokens, rows.mask, strict=True):
        ids = ids[: int(mask.nonzero().max()) + 1]
        logits = model(input_ids=ids[None], use_cache=False).logits[0].detach()
        logits[:, suppressed] = -torch.inf
        expected = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        torch.testing.assert_close(scores[mask], expected[mask[1 : len(ids)]], atol=1e-5, rtol=1e-5)
    sampler = make_rollout("hf", trainer.gathered, processor=processor)
    if family == "minimax_m3_vl":
        with pytest.raises(ValueError, match="^attention_mask: expected no padding on the left for minimax_m3_vl_text"):
            sampler.generate(prompts, Sampling(4))
    sampled = collate([sample for one in prompts for sample in sampler.generate([one], Sampling(4), n=2)])
    assert sampled.mask.sum() > 8
    scored = trainer.infer_batch(sampled)["logprobs"]
    torch.testing.assert_close(sampled.rollout_logprobs, scored, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", TEXT_ROWS_ONLY)
def test_images_and_videos_are_refused_by_name(family, tmp_path):
    processor, model = made(family)
    processor.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    loaded, name = load_processor(str(tmp_path)), type(processor).__name__
    for kind, media in (("image", image(20, 20)), ("video", clip(4, 20, 20))):
        expected = f"^row: {kind}s: expected none for a {name}, got 1: {TEXT_ROWS_ONLY[family].partition(' (')[0]}"
        with pytest.raises(ValueError, match=expected):
            encode_prompt(loaded, {"question": "how many?", f"{kind}s": [media]})


def test_features_of_an_image_of_minimax_depend_on_the_images_beside_it():
    """In transformers 5.19; where they do not, images can be supported."""
    processor, model = made("minimax_m3_vl")
    one, two = (processor.image_processor([image(*size)], return_tensors="pt") for size in ((20, 20), (40, 18)))
    both = {name: torch.cat([one[name], two[name]]) for name in one}
    alone, beside = model.get_image_features(**one).pooler_output[0], model.get_image_features(**both).pooler_output
    assert (alone - beside[0]).abs().max() > 1e-3
