"""The parts of a recipe that do not depend on its algorithm: options, models, sampling, evaluation, checkpoints.

A recipe calls these functions, in this order:

    with one_sentence_errors("my_recipe"):
        task = load_named_task(cfg, cfg.task)
        run = start_run("my_recipe", cfg, task.name)                 # claims the directory
        path, processor = find_model(cfg, run, task.train)
        engine = build_engine(cfg, path, processor, optimizer_steps=cfg.steps)
        rollout = build_rollout(cfg, path, processor, engine)
        start = resume(cfg, run, checkpoints=engine)["step"]
    ...
    finish(cfg, run, shown, model=engine)
"""

from rlkit.runs.ahead import one_ahead
from rlkit.runs.checkpoints import finish, resume, save
from rlkit.runs.directory import check_resumed_options, claim_directory, release_directory
from rlkit.runs.evaluation import evaluate_every, mean_and_error, pass_at_k, record_evaluation, with_intervals
from rlkit.runs.given_answers import GivenAnswers, answer_encoder, chat_encoder, global_loss
from rlkit.runs.models import (
    answer_ends,
    build_engine,
    build_reference,
    build_rollout,
    build_scorer,
    build_value_engine,
    check_rollout_takes_adapters,
    find_model,
    learning_rate_schedule,
    scoring_options,
    shared_options,
    sync_check_dtype,
    trained_part,
    training_engine,
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
    check_ranges,
    check_servers,
    defaults_of_model,
    option_groups,
    parse_options,
)
from rlkit.runs.rollouts import (
    RecordingEngine,
    Replay,
    ReplayDone,
    SavedRollouts,
    check_rollouts,
    is_replay,
    record_draw,
    recorded,
    replay_until,
    save_rollouts,
)
from rlkit.runs.sampling import (
    Answers,
    PolicySampler,
    Prompts,
    accuracy,
    encode_share,
    too_few_judged,
)
from rlkit.runs.start import one_sentence_errors, run_recipe, start_run
from rlkit.runs.tasks import load_named_task, with_epochs
from rlkit.runs.teachers import build_teacher
from rlkit.runs.totals import batch_totals, engine_flops, mean_metrics, totals, training_passes
from rlkit.runs.updates import mini_batches
from rlkit.runs.vllm_options import adapter_flags

__all__ = [
    "AdapterOptions",
    "Answers",
    "EngineOptions",
    "GenerationOptions",
    "GivenAnswerOptions",
    "GivenAnswers",
    "ModelOptions",
    "OptimizerOptions",
    "PolicyOptions",
    "PolicySampler",
    "Prompts",
    "RecordingEngine",
    "Replay",
    "ReplayDone",
    "RewardOptions",
    "RunOptions",
    "SamplingOptions",
    "SavedRollouts",
    "TaskOptions",
    "TrainingOptions",
    "accuracy",
    "adapter_flags",
    "answer_encoder",
    "answer_ends",
    "batch_totals",
    "build_engine",
    "build_reference",
    "build_rollout",
    "build_scorer",
    "build_teacher",
    "build_value_engine",
    "chat_encoder",
    "check_range",
    "check_ranges",
    "check_resumed_options",
    "check_rollout_takes_adapters",
    "check_rollouts",
    "check_servers",
    "claim_directory",
    "defaults_of_model",
    "encode_share",
    "engine_flops",
    "evaluate_every",
    "find_model",
    "finish",
    "global_loss",
    "is_replay",
    "learning_rate_schedule",
    "load_named_task",
    "mean_and_error",
    "mean_metrics",
    "mini_batches",
    "one_ahead",
    "one_sentence_errors",
    "option_groups",
    "parse_options",
    "pass_at_k",
    "record_draw",
    "record_evaluation",
    "recorded",
    "release_directory",
    "replay_until",
    "resume",
    "run_recipe",
    "save",
    "save_rollouts",
    "scoring_options",
    "shared_options",
    "start_run",
    "sync_check_dtype",
    "too_few_judged",
    "totals",
    "trained_part",
    "training_engine",
    "training_passes",
    "with_epochs",
    "with_intervals",
]
