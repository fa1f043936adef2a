"""torchrun that ends without a traceback after a signal: with exit code 0 after SIGTERM, 130 after Ctrl-C.

    python -m rlkit.runs.torchrun --nproc-per-node=8 recipes/grpo_vlm.py --task train.jsonl

The options are those of torchrun. torchrun itself would end with a traceback and exit code 1, although all ranks have
saved. It waits up to `--shutdown-timeout` seconds (30 by default) for the ranks to finish their step and save.
"""

import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.run import main as torchrun

from rlkit.runs.interruption import EXIT_CODES


def main() -> None:
    """Run torchrun with the options of the command line."""
    try:
        torchrun()
    except SignalException as error:
        sys.exit(EXIT_CODES.get(error.sigval, 128 + error.sigval))


if __name__ == "__main__":
    main()
