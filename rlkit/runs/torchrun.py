"""torchrun that a signal ends without a traceback: exit code 0 after SIGTERM, 130 after Ctrl-C.

    python -m rlkit.runs.torchrun --nproc-per-node=8 recipes/grpo_vlm.py --task train.jsonl

Options are those of torchrun, which itself ends with a traceback and code 1 then, although all ranks have saved. It
waits for `--shutdown-timeout` seconds (30 by default) until the ranks have finished their step and saved.
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
