"""The parts of a recipe that do not depend on its algorithm: options, models, sampling, evaluation, checkpoints.

A recipe calls these functions, in this order:

    with one_sentence_errors("my_recipe"):
        task = load_named_task(cfg, cfg.task)
        run = start_run("my_recipe", cfg, task.name, task.train, task.heldout)     # claims the directory
        path, processor = find_model(cfg, run, task.train)
        engine = build_engine(cfg, path, processor, optimizer_steps=cfg.steps)
        rollout = build_rollout(cfg, path, processor, engine)
        start = resume(cfg, run, checkpoints=engine)["step"]
    ...
    finish(cfg, run, shown, model=engine)
"""

from rlkit.runs.answers import Answers, Prompts
from rlkit.runs.answers_file import append_answers, resume_answers
from rlkit.runs.checkpoints import finish, resume, save
from rlkit.runs.command_line import parse_options
from rlkit.runs.evaluation import (
    evaluate_at_start,
    evaluate_every,
    mean_and_error,
    means_of_rows,
    pass_at_k,
    record_evaluation,
    with_intervals,
)
from rlkit.runs.given_answers import answer_encoder, chat_encoder, global_loss
from rlkit.runs.heldout import evaluate_heldout
from rlkit.runs.models import (
    build_engine,
    build_reference,
    build_rollout,
    build_scorer,
    build_value_engine,
    check_rollout_takes_adapters,
    check_same_tokens,
    find_model,
)
from rlkit.runs.options import (
    AdapterOptions,
    EngineOptions,
    GenerationOptions,
    GivenAnswerOptions,
    ModelOptions,
    OptimizerOptions,
    PolicyOptions,
    RewardOptions,
    RunOptions,
    SamplingOptions,
    TaskOptions,
    TrainingOptions,
    check_range,
)
from rlkit.runs.prefetching import prefetch
from rlkit.runs.sampling import PolicySampler, context_length
from rlkit.runs.start import one_sentence_errors, run_recipe, start_run
from rlkit.runs.tasks import load_named_task, with_epochs
from rlkit.runs.teachers import build_teacher
from rlkit.runs.totals import batch_totals, engine_flops, mean_metrics, totals, training_passes
from rlkit.runs.updates import group_ids_of_all_ranks, keep_on_device, mini_batches
from rlkit.runs.vllm_options import OWN_SERVER_SHARE, adapter_flags, length_flags, processor_flags

__all__ = [
    "OWN_SERVER_SHARE",
    "AdapterOptions",
    "Answers",
    "EngineOptions",
    "GenerationOptions",
    "GivenAnswerOptions",
    "ModelOptions",
    "OptimizerOptions",
    "PolicyOptions",
    "PolicySampler",
    "Prompts",
    "RewardOptions",
    "RunOptions",
    "SamplingOptions",
    "TaskOptions",
    "TrainingOptions",
    "adapter_flags",
    "answer_encoder",
    "append_answers",
    "batch_totals",
    "build_engine",
    "build_reference",
    "build_rollout",
    "build_scorer",
    "build_teacher",
    "build_value_engine",
    "chat_encoder",
    "check_range",
    "check_rollout_takes_adapters",
    "check_same_tokens",
    "context_length",
    "engine_flops",
    "evaluate_at_start",
    "evaluate_every",
    "evaluate_heldout",
    "find_model",
    "finish",
    "global_loss",
    "group_ids_of_all_ranks",
    "keep_on_device",
    "length_flags",
    "load_named_task",
    "mean_and_error",
    "means_of_rows",
    "mean_metrics",
    "mini_batches",
    "prefetch",
    "one_sentence_errors",
    "parse_options",
    "pass_at_k",
    "processor_flags",
    "record_evaluation",
    "resume",
    "resume_answers",
    "run_recipe",
    "save",
    "start_run",
    "totals",
    "training_passes",
    "with_epochs",
    "with_intervals",
]
