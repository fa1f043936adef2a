"""The parts of a recipe that do not depend on its algorithm: options, models, sampling, evaluation, checkpoints.

A recipe is a function `main(cfg)` that `run_recipe(main)` calls. It calls these functions, in this order:

    task = load_named_task(cfg, cfg.task)
    run = start_run(cfg, task.name, task.train, task.heldout)     # claims the directory
    path, processor = find_model(cfg, run, task.train)
    engine = build_engine(cfg, path, processor, optimizer_steps=cfg.steps)
    rollout = build_rollout(cfg, path, processor, engine)
    start = resume(cfg, run, checkpoints=engine)["step"]
    ...
    finish(cfg, run, shown, model=engine)

Until `resume` has returned, a ValueError or ImportError ends the process with one sentence, as do bad options.
"""

from rlkit.runs.checkpoints import finish, resume, save
from rlkit.runs.command_line import parse_options
from rlkit.runs.evaluation import (
    evaluate_at_start,
    evaluate_when_due,
    mean_and_error,
    means_of_rows,
    out_of_patience,
    pass_at_k,
    record_evaluation,
    with_intervals,
)
from rlkit.runs.given_responses import chat_encoder, global_loss, response_encoder
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
    learning_rate_schedule,
)
from rlkit.runs.option_types import (
    Above,
    AtLeast,
    Between,
    ChangeableOnResume,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
    check_range,
)
from rlkit.runs.options import (
    AdapterOptions,
    EngineOptions,
    GenerationOptions,
    GivenResponseOptions,
    ModelOptions,
    OptimizerOptions,
    PolicyOptions,
    RewardOptions,
    RunOptions,
    SamplingOptions,
    TaskOptions,
    TrainingOptions,
)
from rlkit.runs.prefetching import prefetch
from rlkit.runs.responses import Prompts, Responses
from rlkit.runs.responses_file import append_responses, resume_responses
from rlkit.runs.sampling import PolicySampler, context_length
from rlkit.runs.seeds import generator
from rlkit.runs.servers import build_server_rollout
from rlkit.runs.start import one_sentence_errors, run_recipe, start_run
from rlkit.runs.tasks import load_named_task, with_epochs
from rlkit.runs.teachers import build_teacher
from rlkit.runs.totals import mean_metrics, totals
from rlkit.runs.updates import group_ids_of_all_ranks, keep_on_device, mini_batches

__all__ = [
    "Above",
    "AdapterOptions",
    "Responses",
    "AtLeast",
    "Between",
    "ChangeableOnResume",
    "EngineOptions",
    "GenerationOptions",
    "GivenResponseOptions",
    "ModelOptions",
    "NonNegativeFloat",
    "NonNegativeInt",
    "OptimizerOptions",
    "PolicyOptions",
    "PolicySampler",
    "PositiveFloat",
    "PositiveInt",
    "Prompts",
    "RewardOptions",
    "RunOptions",
    "SamplingOptions",
    "TaskOptions",
    "TrainingOptions",
    "UnitInterval",
    "response_encoder",
    "append_responses",
    "build_engine",
    "build_reference",
    "build_rollout",
    "build_scorer",
    "build_server_rollout",
    "build_teacher",
    "build_value_engine",
    "chat_encoder",
    "check_range",
    "check_rollout_takes_adapters",
    "check_same_tokens",
    "context_length",
    "evaluate_at_start",
    "evaluate_heldout",
    "evaluate_when_due",
    "find_model",
    "finish",
    "generator",
    "global_loss",
    "group_ids_of_all_ranks",
    "keep_on_device",
    "learning_rate_schedule",
    "load_named_task",
    "mean_and_error",
    "means_of_rows",
    "mean_metrics",
    "mini_batches",
    "prefetch",
    "one_sentence_errors",
    "out_of_patience",
    "parse_options",
    "pass_at_k",
    "record_evaluation",
    "resume",
    "resume_responses",
    "run_recipe",
    "save",
    "start_run",
    "totals",
    "with_epochs",
    "with_intervals",
]
