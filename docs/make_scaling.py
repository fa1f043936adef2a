"""Runs the plans of docs/scaling.md, and writes what they print into it: `python docs/make_scaling.py [NAME ...]`.

Each plan is kept in docs/plans/NAME.txt. Without names all are made again, which takes a quarter of an hour; with the
name "page" none, and the page is written from those that are there.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from published_configs import write  # noqa: E402

SHORT = "--max_prompt_tokens 2048 --max_new_tokens 2048 --use_fused_kernels"
SERVERS = "--rollout vllm_server --servers http://sampler:8000 --server_gpus 8"
STORIES = {  # name: what it is, GPUs, kind of GPU, recipe, model, options
    "3b": ("A 3B, all weights", 1, "h200-141gb", "grpo_vlm", "qwen2.5-vl-3b",
           f"{SHORT} --rollout vllm --gpu_memory_utilization 0.3"),
    "3b_lora": ("A 3B, LoRA", 1, "h200-141gb", "grpo_vlm", "qwen2.5-vl-3b",
                f"{SHORT} --rollout vllm --gpu_memory_utilization 0.6 --lora_rank 32 --sync_adapters"),
    "7b": ("A 7B on one machine", 8, "h100-80gb", "grpo_vlm", "qwen2.5-vl-7b",
           f"{SHORT} --rollout vllm --gpu_memory_utilization 0.5"),
    "32b": ("A 32B on one machine, all weights", 8, "h100-80gb", "grpo_vlm", "qwen2.5-vl-32b",
            f"{SHORT} --offload_between_phases --rollout vllm --rollout_options tensor_parallel_size 8"),
    "32b_async": ("A 32B on 32 GPUs, sampled by servers on 8 others", 32, "h100-80gb", "grpo_async", "qwen2.5-vl-32b",
                  "--max_prompt_tokens 2048 --max_new_tokens 8192 --use_fused_kernels "
                  "--server_gpus 8 --server_tensor_parallel 4"),
    "32b_lora": ("A 32B on one machine, LoRA on a bfloat16 base", 8, "h100-80gb", "grpo_vlm", "qwen2.5-vl-32b",
                 f"{SHORT} --lora_rank 32 --dtype bfloat16 --sync_adapters --rollout vllm "
                 "--rollout_options tensor_parallel_size 8"),
    "32b_nf4": ("A 32B on one GPU, LoRA on a 4-bit base", 1, "h100-80gb", "grpo_vlm", "qwen2.5-vl-32b",
                f"{SHORT} --lora_rank 32 --dtype bfloat16 --quantize_base {SERVERS} --server_tensor_parallel 2"),
    "30b_a3b": ("A mixture of experts on two machines of 8 GPUs", 16, "h100-80gb", "grpo_vlm", "qwen3-30b-a3b",
                f"{SHORT} --rollout vllm --rollout_options tensor_parallel_size 4"),
    "7b_ppo": ("PPO of a 7B with a critic of its size", 8, "h100-80gb", "ppo", "qwen2.5-vl-7b",
               f"{SHORT} --rollout vllm --gpu_memory_utilization 0.4"),
}  # fmt: skip
BEGIN, END = "<!-- made by docs/make_scaling.py -->", "<!-- end -->"


def plan(name: str, models: Path) -> str:
    """What the command prints, without the lines of engines.

    Args:
        models: folder of the published configurations.
    """
    _, gpus, kind, recipe, model, options = STORIES[name]
    arguments = f"recipes/{recipe}.py --nproc {gpus} --gpu {kind} --no_advice --model"
    command = [sys.executable, "-m", "rlkit.plan", *arguments.split(), str(models / model), *options.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 1) or not done.stdout:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    return "".join(f"{line}\n" for line in done.stdout.splitlines() if " parameters train (" not in line)


def page() -> str:
    """The section of the page: for each story its command and what it printed."""
    parts = []
    for name, (title, gpus, kind, recipe, model, options) in STORIES.items():
        if not (ROOT / "docs" / "plans" / f"{name}.txt").exists():
            continue
        shown = (ROOT / "docs" / "plans" / f"{name}.txt").read_text()
        command = f"python -m rlkit.plan recipes/{recipe}.py --nproc {gpus} --gpu {kind} --model {model} \\\n"
        command += f"        {options}"
        parts.append(f"### {title}\n\n    {command}\n\n{shown}")
    return "\n".join(parts)


def main(names: list[str]) -> None:
    """Make plans again, and write all of them into the page."""
    (ROOT / "docs" / "plans").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as models:
        write(Path(models))
        for name in names:
            (ROOT / "docs" / "plans" / f"{name}.txt").write_text(plan(name, Path(models)))
            print(name, flush=True)
    path = ROOT / "docs" / "scaling.md"
    before, _, rest = path.read_text().partition(BEGIN)
    path.write_text(f"{before}{BEGIN}\n\n{page()}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join([*STORIES, "page"]))
    wanted = parser.parse_args().names or list(STORIES)
    if unknown := sorted({*wanted} - {*STORIES, "page"}):
        parser.error(f"NAME: expected one of {', '.join(STORIES)} or page, got {unknown[0]}")
    main([name for name in wanted if name != "page"])
