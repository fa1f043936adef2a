"""Lets a CUDA build of torchvision be imported beside a CPU build of torch, for an index that has no CPU build of it.

vLLM's Qwen-VL models import torchvision, whose import asks for two operators of its compiled part; that part needs CUDA
and is never used here. torch calls `declare` at the end of its own import (entry point `torch.backends`), so every
process of vLLM has it. Not needed with wheels from https://download.pytorch.org/whl/cpu.
"""

library = None  # the declarations go when this does


def declare() -> None:
    global library
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
