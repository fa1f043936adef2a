"""The teacher of a distillation recipe: an engine in this process, or vLLM servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlkit.rollout.servers.teacher import VllmTeacher
from rlkit.rollout.vllm_families import check_windows_work
from rlkit.runs.models import build_scorer, check_same_tokens
from rlkit.runs.vllm_options import longest_row
from rlkit.tracking import Run
from rlkit.vlm import model_or_tiny, suppressed_token_ids
from rlkit.vlm.loading import load_config
from rlkit.vlm.long_rope import check_factors_of_samplers


def build_teacher(cfg: Any, run: Run, rows: Sequence[Mapping[str, Any]], processor: Any, engine: Any) -> Any:
    """Load the teacher into an engine that scores tokens, or with `--teacher_servers` connect to its servers.

    If the teacher is "tiny", a tiny model is built first and fine-tuned on correct answers, longer than the student is.

    Args:
        rows: the rows that a tiny teacher is fine-tuned on.
        processor: the student's processor.
        engine: the student's engine.

    Raises:
        ValueError: the teacher has another vocabulary than the student, the servers cannot be used, or one of them
            uses other LongRoPE factors than an engine of this run would.
    """
    if cfg.teacher_servers and cfg.teacher == "tiny":
        raise ValueError("teacher: expected the directory or hub id of the model on --teacher_servers, got 'tiny'")
    if cfg.teacher_servers and cfg.temperature != 1:
        raise ValueError(
            f"temperature: expected 1 with --teacher_servers, whose log-probabilities are at temperature 1, got "
            f"{cfg.temperature:g}"
        )
    options = {"seed": cfg.seed + 1, "warm_up_steps": 300, "label_noise": 0.0}
    path = model_or_tiny(cfg.teacher, run.out / "teacher", rows, **options)
    teacher_processor = check_same_tokens(cfg, "teacher", path, processor)
    if not cfg.teacher_servers:
        return build_scorer(cfg, path, processor, only_scores=True)
    config = load_config(path, trust_remote_code=cfg.trust_remote_code)
    teacher = VllmTeacher(
        model=path,
        urls=cfg.teacher_servers,
        top_k=cfg.teacher_top_k,
        suppressed_token_ids=suppressed_token_ids(config, getattr(processor, "tokenizer", processor)).tolist(),
        processor=teacher_processor,
        config=config,
        group=engine.model_parallel_group,
    )
    check_windows_work(config, max(teacher.context_lengths))
    check_factors_of_samplers(config, longest_row(cfg), teacher.context_lengths)
    return teacher
