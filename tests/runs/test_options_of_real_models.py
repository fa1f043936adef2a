"""Defaults that depend on the model: a real one gets a small learning rate, recomputation and all its cores."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
from helpers import load, text_dir  # noqa: F401  (a fixture)

from rlkit.engines import distributed
from rlkit.runs import parse_options
from rlkit.runs.image_processor import processor_options
from rlkit.runs.models import processor_of, shared_options, training_engine
from rlkit.runs.options import check_processor_options
from rlkit.runs.vllm_options import processor_flags, vllm_options
from rlkit.vlm import encode_prompt, load_model


@pytest.fixture(scope="module", autouse=True)
def one_process():
    distributed.init_distributed("cpu")


def options(recipe, *arguments):
    return parse_options(load(recipe).Config, "", [str(x) for x in arguments])


def test_tiny_keeps_the_defaults_of_its_recipe(tiny_dir, text_dir):  # noqa: F811
    for model in ([], ["--model", text_dir]):
        cfg = options("grpo_vlm", *model)
        assert (cfg.lr, cfg.enable_gradient_checkpointing, cfg.threads) == (5e-4, False, 1)


@pytest.mark.parametrize(("adapters", "lr"), [([], 1e-6), (["--lora_rank", 8], 1e-5)])
def test_real_model(monkeypatch, adapters, lr):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))  # of a job; the machine may have more
    cfg = options("ppo", "--model", "Qwen/Qwen2.5-7B-Instruct", *adapters)
    assert (cfg.lr, cfg.critic_lr, cfg.enable_gradient_checkpointing, cfg.threads) == (lr, 1e-5, True, 6)


def test_what_is_given_counts():
    given = ["--lr", 3e-5, "--no_enable_gradient_checkpointing", "--threads", 2]
    cfg = options("grpo_vlm", "--model", "Qwen/Qwen2.5-7B-Instruct", *given)
    assert (cfg.lr, cfg.enable_gradient_checkpointing, cfg.threads) == (3e-5, False, 2)


def test_another_model_with_the_config_of_a_run_has_its_own_defaults(tmp_path):
    def written(*arguments):
        config = {**asdict(options("ppo", *arguments)), "versions": {}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return ["--config", tmp_path / "config.json"]

    real = ["--model", "Qwen/Qwen2.5-7B-Instruct"]
    cfg, expected = options("ppo", *written("--seed", 3), *real), options("ppo", *real)
    names = ("lr", "critic_lr", "enable_gradient_checkpointing", "threads")
    assert [getattr(cfg, name) for name in names] == [getattr(expected, name) for name in names] and cfg.seed == 3
    assert options("ppo", *written(*real), "--lora_rank", 8).lr == 1e-5
    assert options("ppo", *written("--lr", 2e-5), *real).lr == 2e-5  # given, not a default
    same = written("--lora_rank", 8, *real)
    assert {**asdict(options("ppo", *same)), "config": ""} == asdict(options("ppo", "--lora_rank", 8, *real))


def test_recipe_without_a_learning_rate():
    assert options("evaluate", "--model", "Qwen/Qwen2.5-7B-Instruct").threads >= 1


def test_exported_tiny_model_is_tiny(text_dir, tmp_path):  # noqa: F811
    load_model(str(text_dir)).save_pretrained(tmp_path)
    assert options("grpo_vlm", "--model", tmp_path).lr == 5e-4


def test_an_option_that_the_chat_template_does_not_have_is_refused_before_the_rows(text_dir):  # noqa: F811
    assert processor_of(options("grpo_vlm"), str(text_dir))
    with pytest.raises(
        ValueError, match=r"^chat_template_kwargs: expected .* template \(none\), got 'enable_thinking'$"
    ):
        processor_of(options("grpo_vlm", "--chat_template_kwargs", "enable_thinking", "false"), str(text_dir))


def test_a_chat_template_of_a_file_takes_the_place_of_the_models(text_dir, tiny_dir, tmp_path):  # noqa: F811
    """Also in the processor that is exported."""
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }}{{ '!' if loud is defined }}<|im_end|>")
    flags = ["--chat_template", file, "--chat_template_kwargs", "loud", "true"]
    for model in (str(text_dir), tiny_dir):
        processor_of(options("grpo_vlm", *flags), model).save_pretrained(tmp_path / "saved")
        again = AutoTokenizer.from_pretrained(tmp_path / "saved")
        assert again.chat_template == file.read_text()
    assert AutoProcessor.from_pretrained(tmp_path / "saved").chat_template == file.read_text()
    (tmp_path / "broken.jinja").write_text("{% for m in messages %}")
    for name, message in (
        ("broken", "chat template: Unexpected end of template"),
        ("no", "chat_template: expected a Jin"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            processor_of(options("grpo_vlm", "--chat_template", tmp_path / f"{name}.jinja"), str(text_dir))


@pytest.mark.filterwarnings("ignore:Passing `min_pixels`")
def test_options_of_the_image_processor(text_dir, tiny_dir):  # noqa: F811
    """The sampler gets them too; servers that run already cannot."""
    flags = ["--processor_options", "min_pixels=784", "max_pixels=3136"]
    cfg = options("grpo_vlm", *flags)
    prompt = encode_prompt(processor_of(cfg, tiny_dir), {"question": "Q", "images": [Image.new("RGB", (224, 224))]})
    assert list(prompt.placeholders.values()) == [[4]]
    assert vllm_options(cfg, [])["mm_processor_kwargs"] == {"min_pixels": 784, "max_pixels": 3136}
    assert processor_flags(cfg) == ["--mm-processor-kwargs", '{"min_pixels": 784, "max_pixels": 3136}']
    assert "mm_processor_kwargs" not in vllm_options(options("grpo_vlm"), []) and not processor_flags(options("ppo"))
    assert processor_options(options("ppo", "--processor_options", 'size={"a": 1}', "mode=x")) == {
        "size": {"a": 1},
        "mode": "x",
    }
    for model, given, message in (
        (str(text_dir), flags, "image processor options: expected none for a text model, got 'min_pixels'"),
        (
            tiny_dir,
            ["--processor_options", "max_pixels"],
            "processor_options: expected name=value, .*, got 'max_pixels'",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            processor_of(options("grpo_vlm", *given), model)
    with pytest.raises(ValueError, match="^processor_options: expected none with --servers, which prepare images"):
        check_processor_options(options("grpo_vlm", *flags, "--rollout", "vllm_server", "--servers", "http://a"))


def test_shared_prompts_can_be_switched_off(text_dir):  # noqa: F811
    model = load_model(str(text_dir))
    assert "share_prompts" not in shared_options(options("grpo_vlm"), None, model.config)
    cfg = options("grpo_vlm", "--no_share_prompts")
    engine = training_engine(cfg, "language_model", model, 0.0, 1, **shared_options(cfg, None, model.config))
    assert not engine.share_prompts


@pytest.mark.parametrize("on_gpu", [True, False])
def test_adamw_is_fused_on_a_gpu(text_dir, monkeypatch, on_gpu):  # noqa: F811
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    cfg = options("grpo_vlm")
    engine = training_engine(cfg, "language_model", load_model(str(text_dir)), 0.0, 1, device="cpu")
    assert engine.optimizer.defaults["fused"] is on_gpu


def test_gpus_are_bound_and_time_outs_are_long(monkeypatch):
    """Seen without a GPU: what torch would be asked for."""
    given = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(distributed.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(distributed.dist, "init_process_group", lambda backend, **k: given.update(k, backend=backend))
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("RANK", "11")
    distributed.init_distributed("cuda")
    assert given["device_id"] == torch.device("cuda", 3) and given["backend"] == "cpu:gloo,cuda:nccl"
    assert given["timeout"].total_seconds() >= 3600
