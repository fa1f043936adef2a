"""A 3B with random weights through the recipe, reference, AdamW and vLLM on one GPU: `pytest -m gpu`. Not run yet.

The published configuration of Qwen2.5-VL-3B, with the tiny model's tokenizer. It takes 8 GB of disk.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "recipes")]
from helpers import environment, rows, run, seen_shortly  # noqa: E402
from published_configs import add_missing_tokens, qwen_vl  # noqa: E402

from rlkit.vlm import encode_prompt, load_processor  # noqa: E402
from rlkit.vlm.loading import load_config  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
GPUS = {"H200": "h200-141gb", "H100": "h100-80gb", "B200": "b200-180gb", "A100-SXM4-80GB": "a100-80gb"}
TOKEN_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def write_3b(tiny_dir, path):
    """Save the model; its token ids are those of the tiny model's tokenizer."""
    config, tiny = qwen_vl("qwen2.5-vl-3b"), load_config(tiny_dir)
    for name in TOKEN_IDS:
        setattr(config, name, getattr(tiny, name))
    with torch.device("cuda"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    processor = load_processor(tiny_dir)
    add_missing_tokens(processor.tokenizer, config)
    processor.save_pretrained(path)
    del model
    torch.cuda.empty_cache()


PHASES = {  # of a run: those of the plan that are in it
    "train": ("reference", "forward and backward", "optimizer step"),
    "weight_sync": ("weight sync",),
    "generate": ("generate",),
}
OF_VLLM = ("sampler's weights", "sampler's cache")  # which `memory/<phase>` leaves out


def planned_peaks(phases):
    """GiB of each phase of a run.

    Args:
        phases: bytes by phase of the plan and kind.
    """

    def gib(name):
        return sum(size for kind, size in phases[name].items() if kind not in OF_VLLM) / 2**30

    assert {name for names in PHASES.values() for name in names} == phases.keys() - {"load"}
    return {phase: max(map(gib, names)) for phase, names in PHASES.items()}


def test_three_steps_take_what_was_planned(tiny_dir, tmp_path):
    name = torch.cuda.get_device_name()
    if not (gpu := next((kind for key, kind in GPUS.items() if key in name), None)):
        pytest.skip(f"needs a GPU with 80 GB that the plan knows, got {name}")
    write_3b(tiny_dir, path := tmp_path / "3b")
    prompt = encode_prompt(load_processor(tiny_dir), seen_shortly().train[0])
    image_tokens = sum(token == load_config(tiny_dir).image_token_id for token in prompt.token_ids)
    options = [
        "--model", path, "--max_prompt_tokens", len(prompt.token_ids), "--max_new_tokens", 512, "--group_size", 16,
        "--prompts_per_step", 8, "--use_fused_kernels", "--rollout", "vllm", "--gpu_memory_utilization", 0.2,
    ]  # fmt: skip
    plan = [sys.executable, "-m", "rlkit.plan", str(HERE.parents[1] / "recipes" / "grpo_vlm.py"), "--gpu", gpu]
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30  # may be less than the data sheet's
    command = [*plan, "--gpu_memory", str(memory), "--image_tokens", str(image_tokens), "--json"]
    command += map(str, options)
    env = {**environment(), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    run("grpo_vlm", *options, "--task", "helpers:seen_shortly", "--steps", 3, "--out", tmp_path / "out", ranks=1)
    planned = planned_peaks(json.loads(done.stdout.splitlines()[-1])["phases"])
    steps = rows(tmp_path / "out")
    taken = {phase: max(row.get(f"memory/{phase}", 0.0) for row in steps) for phase in planned}
    print({phase: f"{planned[phase]:.2f} GiB planned, {taken[phase]:.2f} taken" for phase in planned})
    assert taken == pytest.approx(planned, rel=0.1)
