"""Measures the responses to held-out prompts before, during and after training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from rlkit.data import Sample
from rlkit.report import prompt_record
from rlkit.rewards import scoring_problem
from rlkit.rollout import Sampling
from rlkit.rollout.sampling import sample_name
from rlkit.runs.evaluation import means_of_rows, pass_at_k, record_evaluation
from rlkit.runs.responses import Prompts, Responses, accuracy, count_scored, too_few_scored
from rlkit.runs.rollouts import is_replay
from rlkit.runs.sampling import PolicySampler
from rlkit.tracking import SAMPLES, Run

HELDOUT_KEPT = 20  # held-out responses kept from each evaluation before and during training
NAMED = 5  # most held-out rows that a line names


def evaluate_heldout(
    sampler: PolicySampler, prompts: Prompts, when: str, name: str = "", **measured: float
) -> list[Sample]:
    """Measure the accuracy of greedy responses to held-out prompts, write it to eval.json and print it.

    Rows of plain text have no prompt, so no responses are generated for them, and none with `--max_new_tokens 0`.
    Prompts that leave no room for a response get none either; they are named before training. `unanswered` counts both.
    The run ends if too few responses can be scored.

    Args:
        prompts: this rank's share of the held-out rows, see `PolicySampler.encode`.
        when: "before", "during" or "after" training.
        name: of a second set of held-out rows. Its results are NAME/accuracy and so on; --keep_best and --patience look
            at those without a name.
        measured: further results on these rows, over all ranks.

    Returns:
        This rank's responses that could be scored, with their rewards.
    """
    if is_replay():
        return []
    cfg, run, engine = sampler.cfg, sampler.run, sampler.engine
    answered = with_room_for_a_response(sampler, prompts, when)
    responses = Responses()
    if cfg.max_new_tokens:
        responses = sampler.greedy(answered, phase="evaluate", training=False)
    if problem := heldout_problem(sampler, responses, prompts):
        run.stop(f"held-out {problem}")
    results = accuracy(responses, engine.global_sum) | sampled_heldout(sampler, answered) | measured
    unanswered = engine.global_sum(torch.tensor(float(len(prompts.samples) - len(answered.samples)))).item()
    if cfg.max_new_tokens and unanswered:
        results["unanswered"] = unanswered
    if when != "after":  # `finish` writes the responses after training
        keep_heldout(run, responses.scored, 0 if when == "before" else run.step + 1)
    counts = {"rows": len(prompts.samples), "skipped": len(prompts.skipped)}
    record_evaluation(run, engine, when, results, **counts, name=name)
    return responses.scored


def with_room_for_a_response(sampler: PolicySampler, prompts: Prompts, when: str) -> Prompts:
    """The prompts that can be answered in the context of model and sampler. Before training, a line names the others.

    `PolicySampler.encode` returns no others; rows with given responses are encoded for their loss, too.
    """
    room = sampler.longest_prompt
    too_long = [prompt for prompt in prompts.samples if len(prompt.token_ids) > room]
    if too_long and sampler.cfg.max_new_tokens and when == "before":
        names = ", ".join(f"{sample_name(prompt)} ({len(prompt.token_ids)})" for prompt in too_long[:NAMED])
        sampler.run.print(
            f"held-out: {len(too_long)} prompts of more than {room} tokens leave no room for a response of "
            f"{sampler.cfg.max_new_tokens} tokens, and get none: {names}{', ...' if len(too_long) > NAMED else ''}"
        )
    return replace(prompts, samples=[prompt for prompt in prompts.samples if 0 < len(prompt.token_ids) <= room])


def sampled_heldout(sampler: PolicySampler, prompts: Prompts) -> dict[str, float]:
    """Mean reward and pass@k of `cfg.heldout_samples` responses to each prompt. Rewards of at least 1 are correct.

    Returns:
        `sampled`, over prompts with a scored response: the mean of each prompt's mean reward. `pass@1`, `pass@2`, ...,
        over prompts with at least k scored responses. With standard errors and numbers of prompts, see `means_of_rows`.
    """
    n = getattr(sampler.cfg, "heldout_samples", 0)
    if not n:
        return {}
    sampling = Sampling(sampler.cfg.max_new_tokens, sampler.cfg.temperature)
    responses = sampler.sync_and_sample(prompts, sampling, n, phase="evaluate", training=False)
    groups = [group[~group.isnan()] for group in responses.rewards.view(-1, n)]
    values = {"sampled": [group.mean().item() for group in groups if len(group)]}
    for k in (2**i for i in range(n.bit_length())):
        enough = [group for group in groups if len(group) >= k]
        values[f"pass@{k}"] = [pass_at_k(len(group), int((group >= 1).sum()), k) for group in enough]
    return means_of_rows(values, sampler.engine.global_sum)


def keep_heldout(run: Run, scored: Iterable[Sample], step: int) -> None:
    """Write rank 0's held-out responses with the lowest rewards to samples.jsonl."""
    if run.is_main_process:
        worst = sorted(scored, key=lambda sample: sample.reward)[:HELDOUT_KEPT]
        run.append(SAMPLES, [prompt_record(run.out, [sample], "held-out", step) for sample in worst])


def heldout_problem(sampler: PolicySampler, responses: Responses, prompts: Prompts) -> str:
    """Why the run has to stop after these responses to held-out prompts; empty if it can go on.

    A recipe that does not train on rewards goes on without them, unless `--reward` is given and scored no response.
    """
    cfg, global_sum = sampler.cfg, sampler.engine.global_sum
    if hasattr(cfg, "max_failed_rewards"):
        rows = global_sum(torch.tensor(float(len(prompts.samples) + len(prompts.skipped))))
        if not rows and cfg.max_failed_rewards < 1:
            return "rows: expected at least one, got none; name some with --heldout"
        return too_few_scored(responses, global_sum, cfg.max_failed_rewards)
    generated, scored = count_scored(responses, global_sum)
    if cfg.reward and generated and not scored:
        return scoring_problem(generated, scored, 1.0, responses.reasons)
    return ""
