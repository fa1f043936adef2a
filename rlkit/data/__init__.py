"""Tasks and their rows, samples, packing, and batching by tokens."""

from rlkit.data.batching import balanced_partitions, token_budget_batches
from rlkit.data.hub import open_stream, stream_steps
from rlkit.data.loading import load_chats, load_pairs, load_task, load_unpaired, with_heldout
from rlkit.data.mixing import easiest_rows, mix_tasks, sort_by_difficulty, widen_share
from rlkit.data.packing import Packed, repad, unpad, unpad_like
from rlkit.data.placeholders import expand_placeholders
from rlkit.data.prompting import with_prompt
from rlkit.data.samples import Batch, Sample, append_observation, append_response, collate, group_ids, prompt_sample
from rlkit.data.tables import concatenate, first_of_sources
from rlkit.data.tasks import Task, rows_of_steps, step_rows
from rlkit.data.user_code import Failures, load_function

__all__ = [
    "Batch",
    "Failures",
    "Packed",
    "Sample",
    "Task",
    "append_observation",
    "append_response",
    "balanced_partitions",
    "collate",
    "concatenate",
    "easiest_rows",
    "expand_placeholders",
    "first_of_sources",
    "group_ids",
    "load_chats",
    "load_function",
    "load_pairs",
    "load_task",
    "load_unpaired",
    "mix_tasks",
    "open_stream",
    "prompt_sample",
    "repad",
    "sort_by_difficulty",
    "rows_of_steps",
    "step_rows",
    "stream_steps",
    "token_budget_batches",
    "unpad",
    "unpad_like",
    "widen_share",
    "with_heldout",
    "with_prompt",
]
