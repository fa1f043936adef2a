"""From rows to batches: samples and their two token tracks, packing, batching by tokens, tasks."""

from rlkit.data.batching import balanced_partitions, token_budget_batches
from rlkit.data.hub import open_stream, stream_steps
from rlkit.data.loading import load_chats, load_marked, load_pairs, load_task, with_heldout
from rlkit.data.mixing import by_difficulty, easiest, mixed, widened
from rlkit.data.packing import Packed, repad, unpad, unpad_like
from rlkit.data.prompting import with_prompt
from rlkit.data.samples import Batch, Sample, collate, expand, extend, group_ids, observe, prompt
from rlkit.data.tasks import Task, step_rows
from rlkit.data.user_code import Failures, load_function

__all__ = [
    "Batch",
    "Failures",
    "Packed",
    "Sample",
    "Task",
    "balanced_partitions",
    "by_difficulty",
    "collate",
    "easiest",
    "expand",
    "extend",
    "group_ids",
    "load_chats",
    "load_function",
    "load_marked",
    "load_pairs",
    "load_task",
    "mixed",
    "open_stream",
    "observe",
    "prompt",
    "repad",
    "step_rows",
    "stream_steps",
    "token_budget_batches",
    "unpad",
    "unpad_like",
    "widened",
    "with_heldout",
    "with_prompt",
]
