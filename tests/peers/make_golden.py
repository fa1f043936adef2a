"""Write what the peers return: tests/peers/golden_verl.safetensors and golden_trl.safetensors.

    make peers        # an environment of its own, as verl and TRL want other versions than rlkit's models
    .venv-peers/bin/python tests/peers/make_golden.py

Each case's inputs, outputs and gradients, as the peers compute them; the versions stand in the metadata.
"""

import sys
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from case import run  # noqa: E402
from cases_trl import CASES as TRL  # noqa: E402
from cases_verl import CASES as VERL  # noqa: E402


def main() -> None:
    for peer, cases in (("verl", VERL), ("trl", TRL)):
        tensors = {}
        for number, case in enumerate(cases):
            inputs = case.inputs(torch.Generator().manual_seed(number))
            for name, x in inputs.items():
                tensors[f"{case.name}/in/{name}"] = x.contiguous()
            for name, x in run(case.peer, inputs, case.grad).items():
                tensors[f"{case.name}/out/{name}"] = x.contiguous()
        metadata = {"peer": f"{peer} {version(peer)}", "torch": torch.__version__}
        save_file(tensors, HERE / f"golden_{peer}.safetensors", metadata)
        print(f"{peer}: {len(cases)} cases, {len(tensors)} tensors")


if __name__ == "__main__":
    main()
