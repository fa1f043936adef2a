"""Megatron's process groups, which `destroy_model_parallel` forgets but leaves alive."""

import gc

import torch.distributed as dist
from megatron.core import parallel_state


def destroy_megatron_groups() -> None:
    """Destroy them, because each has a thread that wakes up every 10 ms.

    Those of all engines of `test_megatron.py` kept a core busy until the end of the test process.
    """
    groups = parallel_state._global_process_group_list or []
    parallel_state.destroy_model_parallel()
    for group in groups:
        if group is not None:  # the default group, which stays
            dist.destroy_process_group(group)
    gc.collect()  # engines refer to themselves, and to their groups
