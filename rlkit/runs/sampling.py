"""Samples answers of the policy: encodes prompts, syncs weights, and judges answers while others are generated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlkit.data import Sample, Task, group_ids
from rlkit.engines.distributed import reduce_metrics
from rlkit.report import append_records, prompt_record
from rlkit.rewards import Judge, judged, judging_problem, part_means, reward_stats
from rlkit.rollout import Sampling, WeightSyncCheck
from rlkit.runs.evaluation import mean_and_error, pass_at_k, record_evaluation
from rlkit.runs.models import sync_check_dtype
from rlkit.runs.options import sends_adapters
from rlkit.runs.rollouts import SavedRollouts, is_replay, record_draw
from rlkit.tracking import Run
from rlkit.vlm import encode_prompt

HELDOUT_KEPT = 20  # held-out answers kept from each evaluation before and during training
ADAPTER_BUCKET_BYTES = 256 << 20  # adapters are gathered at once: each alone is small, and takes a collective
GlobalSum = Callable[[Tensor], Tensor]


@dataclass
class Prompts:
    """This rank's share of some rows, encoded."""

    samples: list[Sample]
    skipped: list[str] = field(default_factory=list)  # error messages of rows that cannot be read or are too long


@dataclass
class Answers:
    """This rank's answers to some prompts, with their rewards.

    Attributes:
        generated: all answers; answers to the same prompt are adjacent.
        rewards: [len(generated)], nan where an answer could not be judged.
        parts: values [len(generated)] of each part of a combined reward.
        skipped: why rows were skipped.
        reasons: why answers could not be judged.
        judging_seconds: time during which at least one answer was being judged.
    """

    generated: list[Sample] = field(default_factory=list)
    rewards: Tensor = field(default_factory=lambda: torch.zeros(0))
    parts: dict[str, Tensor] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    reasons: str = ""
    judging_seconds: float = 0.0

    @property
    def judged(self) -> list[Sample]:
        """The answers that could be judged, with their rewards."""
        return judged(self.generated, self.rewards)

    def __add__(self, more: Answers) -> Answers:
        return Answers(
            self.generated + more.generated,
            torch.cat([self.rewards, more.rewards]),
            {name: torch.cat([part, more.parts[name]]) for name, part in self.parts.items()},
            self.skipped + more.skipped,
            self.reasons or more.reasons,
            self.judging_seconds + more.judging_seconds,
        )


T = TypeVar("T")


def compute_dtype(engine: Any) -> torch.dtype | None:
    """The dtype that an engine computes in; None for an engine of another package that does not say."""
    return getattr(engine, "compute_dtype", None)


def encode_share(
    rows: Iterable[tuple[int, Any]], encode_row: Callable[[int, Any], T], run: Run, engine: Any
) -> tuple[list[T], list[str]]:
    """Call `encode_row(group id, row)` on this rank's share of the rows. Returns the results, and the errors.

    A row for which it raises ValueError is skipped, and named in the log.
    """
    found, skipped = [], []
    for group_id, row in list(rows)[engine.data_parallel_rank :: engine.data_parallel_size]:
        try:
            found.append(encode_row(group_id, row))
        except ValueError as error:
            run.print(f"skipped: {error}")
            skipped.append(str(error))
    return found, skipped


class PolicySampler:
    """Generates answers with the current weights of the policy, and has them judged.

    Args:
        cfg: options that include `rlkit.runs.GenerationOptions`, and `PolicyOptions` if the answers are trained on.
        task: the task, whose reward judges the answers.
        processor: processor of the model, for encoding prompts.
        generate: replaces `rollout.generate`; called with (prompts, sampling, n=..., on_finished=...).
        sends_weights: whether to send the trained weights to the sampling back end before it generates. If False, the
            recipe sends them.
    """

    def __init__(
        self,
        cfg: Any,
        run: Run,
        task: Task,
        processor: Any,
        engine: Any,
        rollout: Any,
        *,
        generate: Callable[..., list[Sample]] | None = None,
        sends_weights: bool = True,
    ) -> None:
        self.cfg, self.run, self.processor, self.engine, self.rollout = cfg, run, processor, engine, rollout
        self.sends_weights = sends_weights
        self.judge = Judge(task.reward, threads=cfg.reward_threads, group=getattr(engine, "model_parallel_group", None))
        self.generate = generate or rollout.generate
        self.saved = SavedRollouts(cfg, engine) if getattr(cfg, "from_rollouts", "") else None
        self.evaluating = False
        self.sent_bytes = 0  # of the last weight sync
        self.equal_steps = 0
        self.said: set[str] = set()

    def encode(self, rows: Iterable[tuple[int, Any]]) -> Prompts:
        """Encode this rank's share of the (group id, row) pairs of all ranks.

        Rows that cannot be read or are longer than `cfg.max_prompt_tokens` are skipped, and named in the log.
        """
        context = self.engine.config.get_text_config().max_position_embeddings
        max_tokens = self.cfg.max_prompt_tokens or context - self.cfg.max_new_tokens

        dtype = compute_dtype(self.engine)

        def encode_row(group_id: int, row: Any) -> Sample:
            return encode_prompt(self.processor, row, max_tokens=max_tokens, group_id=group_id, dtype=dtype)

        return Prompts(*encode_share(rows, encode_row, self.run, self.engine))

    @contextmanager
    def current_weights(self) -> Iterator[None]:
        """Inside the `with` block, the sampling back end has the trained weights. Afterwards it sleeps."""
        if not self.sends_weights or self._reads_rollouts:
            yield
            return
        self.run.phase("weight_sync")
        self.rollout.wake_up()
        self.send_weights(self.rollout)
        yield
        self.rollout.sleep()

    def send_weights(self, to: Any) -> None:
        """Send the trained weights, or with `--sync_adapters` the adapters alone. All ranks call this together.

        Args:
            to: the sampling back end, or an `AsyncSampler` of it.
        """
        dtype = getattr(to, "weight_dtype", None)  # gather in the sampler's dtype: bfloat16 is half as large
        options = {} if dtype is None else {"dtype": dtype}
        self.sent_bytes = 0
        if sends_adapters(self.cfg):
            config, weights = self.engine.get_adapter(ADAPTER_BUCKET_BYTES, **options)
            to.update_adapter(config, self._counted(weights))
        else:
            to.update_weights(self._counted(self.engine.get_per_tensor_param(**options)))

    def _counted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same weights; their bytes are added to `sent_bytes`."""
        for name, tensor in weights:
            self.sent_bytes += tensor.nbytes
            yield name, tensor
            del tensor  # or it is there while the next is gathered

    def draw(self, prompts: Prompts, sampling: Sampling, n: int = 1, *, phase: str = "generate") -> Answers:
        """Sample n answers to each prompt with the sampling back end's present weights, and have them judged.

        With `cfg.from_rollouts`, return the saved answers of this step.
        """
        self.run.phase(phase)
        if self._reads_rollouts:
            return self._saved_answers(prompts, sampling, phase)
        generated = self.generate(prompts.samples, sampling, n=n, on_finished=self.judge.submit)
        return self._judged(prompts, sampling, phase, generated)

    def _judged(self, prompts: Prompts, sampling: Sampling, phase: str, generated: list[Sample]) -> Answers:
        """Wait until all answers are judged, and return them with their rewards."""
        self.run.phase("reward" if phase == "generate" else phase)  # waiting for the remaining rewards
        rewards, parts, seconds = self.judge.result()
        answers = Answers(generated, rewards, parts, prompts.skipped, self.judge.reasons, seconds)
        self._record(prompts, sampling, phase, generated, rewards)
        return answers

    @property
    def _reads_rollouts(self) -> bool:
        """Whether answers are read from saved rollouts: those for training are, but evaluation always samples."""
        return self.saved is not None and self.run.running_step is not None and not self.evaluating

    def _record(
        self, prompts: Prompts, sampling: Sampling, phase: str, generated: list[Sample], rewards: Tensor
    ) -> None:
        """Keep the answers that a step trains on, if the engine records."""
        if not self.evaluating:
            record_draw(self.run, self.engine, prompts.samples, sampling, phase, generated, rewards)

    def _saved_answers(self, prompts: Prompts, sampling: Sampling, phase: str) -> Answers:
        assert self.saved is not None and self.run.running_step is not None
        try:
            groups = self.saved.draw(self.run.running_step)
        except ValueError as error:
            self.run.stop(str(error))
        generated = [sample for group in groups for sample in group]
        if not self.cfg.keep_rewards:
            for i, group in enumerate(groups):
                self.judge.submit(i, group)
            return self._judged(prompts, sampling, phase, generated)
        rewards = torch.tensor([sample.reward for sample in generated], dtype=torch.float32)
        self._record(prompts, sampling, phase, generated, rewards)
        return Answers(generated, rewards, skipped=prompts.skipped)

    def answer(self, prompts: Prompts, sampling: Sampling, n: int = 1, *, phase: str = "generate") -> Answers:
        """`draw` with the trainer's current weights. All ranks call this together."""
        with self.current_weights():
            return self.draw(prompts, sampling, n, phase=phase)

    def stop_if_rewards_failed(self, answers: Answers) -> None:
        """End the run if more than a share `cfg.max_failed_rewards` of all ranks' answers could not be judged."""
        if problem := too_few_judged(answers, self.engine.global_sum, self.cfg.max_failed_rewards):
            self.run.stop(problem)

    @cached_property
    def _check_sync(self) -> WeightSyncCheck:
        return WeightSyncCheck(self.cfg.max_mismatch, dtype=sync_check_dtype(self.cfg, self.rollout))

    def stop_if_out_of_sync(self, mismatch: float) -> None:
        """End the run if the sampler clearly lacks the trained weights; see `rlkit.rollout.WeightSyncCheck`.

        Args:
            mismatch: the step's `mismatch/abs_dlogp`, on answers that were sampled with the current weights.
        """
        if problem := self._check_sync(mismatch):
            self.run.stop(problem)

    def metrics(self, answers: Answers) -> dict[str, float]:
        """Metrics for `Run.log`, over the answers of all ranks: rewards and their parts, lengths and counts.

        `response_length/cut` is the share of answers that were truncated at the token limit. If the policy cannot learn
        from the answers, a warning says why, once. Answers to the first prompts are kept for the page.
        `weight_sync/bytes` is the size of what the sampling back end was sent for them.
        """
        self._keep_answers(answers)
        engine = self.engine
        lengths = [len(sample.response_ids) for sample in answers.generated]
        cut = sum(sample.finish_reason == "length" for sample in answers.generated)
        unjudged = int(answers.rewards.isnan().sum())
        counts = [len(lengths), sum(lengths), cut, unjudged, len(answers.skipped)]
        sums = engine.global_sum(torch.tensor(counts, dtype=torch.float64))
        count, tokens, cut, unjudged, skipped = sums.tolist()
        longest = torch.tensor(float(max(lengths, default=0)))
        found = {
            **reward_stats(answers.rewards, group_ids(answers.generated), engine.global_sum),
            **part_means(answers.parts, engine.global_sum),
            "response_length/mean": tokens / max(count, 1),
            **reduce_metrics({"response_length/max": longest}, engine.data_parallel_group),
            "response_length/cut": cut / max(count, 1),
            "unjudged": unjudged,
            "skipped_rows": skipped,
            "time/judging": answers.judging_seconds,
            **({"weight_sync/bytes": self.sent_bytes} if self.sent_bytes else {}),  # none are sent to hf
        }
        self._warn(found)
        return found

    def _keep_answers(self, answers: Answers) -> None:
        """Have the next `Run.log` write the answers to rank 0's first prompts to samples.jsonl, with images."""
        if not self.run.writes:
            return
        prompts: dict[int, list[int]] = {}  # group id -> indices of its answers
        for i, sample in enumerate(answers.generated):
            prompts.setdefault(sample.group_id, []).append(i)
        for indices in list(prompts.values())[: self.cfg.log_prompts]:
            samples = [replace(answers.generated[i], reward=answers.rewards[i].item()) for i in indices]
            parts = {name: values[indices].tolist() for name, values in answers.parts.items()}
            self.run.keep_answers([prompt_record(self.run.out, samples, "training", 0, parts)])

    def _warn(self, metrics: Mapping[str, float]) -> None:
        """Warn, once each, of equal rewards and of truncated answers, which keep a policy from learning."""
        has_groups = getattr(self.cfg, "group_size", 1) > 1
        self.equal_steps = self.equal_steps + 1 if has_groups and metrics.get("reward/equal") == 1 else 0
        if self.equal_steps == 10:
            self._say_once(
                "equal rewards",
                "the answers to each prompt have had equal rewards for 10 steps, from which nothing is "
                "learned: look at the answers, and at how they are judged (--reward)",
            )
        if (cut := metrics["response_length/cut"]) > 0.5:
            limit = self.cfg.max_new_tokens
            self._say_once("cut", f"{cut:.0%} of the answers are cut at --max_new_tokens {limit}: raise it")

    def _say_once(self, kind: str, text: str) -> None:
        if kind not in self.said:
            self.said.add(kind)
            self.run.print(f"warning: {text}")

    def greedy(self, prompts: Prompts) -> Answers:
        """A greedy answer to each prompt, judged."""
        return self.answer(prompts, Sampling(self.cfg.max_new_tokens, temperature=0.0), phase="evaluate")

    def evaluate(self, prompts: Prompts, when: str, **measured: float) -> list[Sample]:
        """Measure the accuracy of greedy answers to held-out prompts, write it to eval.json and print it.

        Rows of plain text have no prompt, so no answers are generated for them, and none with `--max_new_tokens 0`. The
        run ends if too few answers can be judged.

        Args:
            when: "before", "during" or "after" training.
            measured: further results on these rows, over all ranks.

        Returns:
            This rank's answers that could be judged, with their rewards.
        """
        if is_replay():
            return []
        self.evaluating = True
        answered = replace(prompts, samples=[prompt for prompt in prompts.samples if prompt.token_ids])
        answers = self.greedy(answered) if self.cfg.max_new_tokens else Answers()
        if problem := self._heldout_problem(answers):
            self.run.stop(f"held-out {problem}")
        found = accuracy(answers, self.engine.global_sum) | self._sampled_heldout(answered) | measured
        self.evaluating = False
        if when != "after":  # `finish` writes the answers after training
            self._keep_heldout(answers.judged, 0 if when == "before" else self.run.step + 1)
        counts = {"rows": len(prompts.samples), "skipped": len(prompts.skipped)}
        record_evaluation(self.run, self.engine, when, found, **counts)
        return answers.judged

    def _sampled_heldout(self, prompts: Prompts) -> dict[str, float]:
        """Mean reward and pass@k of `cfg.heldout_samples` answers to each prompt. Rewards of at least 1 are correct."""
        n = getattr(self.cfg, "heldout_samples", 0)
        if not n:
            return {}
        answers = self.answer(prompts, Sampling(self.cfg.max_new_tokens, self.cfg.temperature), n, phase="evaluate")
        groups = [group[~group.isnan()] for group in answers.rewards.view(-1, n)]
        values = {"sampled": [group.mean().item() for group in groups if len(group)]}
        for k in (2**i for i in range(n.bit_length())):
            enough = [group for group in groups if len(group) >= k]
            values[f"pass@{k}"] = [pass_at_k(len(group), int((group >= 1).sum()), k) for group in enough]
        found: dict[str, float] = {}
        for name, values_of_rows in values.items():
            found[name], found[f"{name}_error"] = mean_and_error(values_of_rows, self.engine.global_sum)
        return found

    def _keep_heldout(self, judged: Iterable[Sample], step: int) -> None:
        """Write rank 0's held-out answers with the lowest rewards to samples.jsonl."""
        if self.run.writes:
            worst = sorted(judged, key=lambda sample: sample.reward)[:HELDOUT_KEPT]
            append_records(self.run.out, [prompt_record(self.run.out, [s], "held-out", step) for s in worst])

    def _heldout_problem(self, answers: Answers) -> str:
        """Why the run has to stop after these held-out answers; empty if it can go on.

        A recipe that does not train on rewards goes on without them, unless `--reward` is given and judged no answer.
        """
        if hasattr(self.cfg, "max_failed_rewards"):
            return too_few_judged(answers, self.engine.global_sum, self.cfg.max_failed_rewards)
        generated, judged = _count_judged(answers, self.engine.global_sum)
        if self.cfg.reward and generated and not judged:
            return judging_problem(generated, judged, 1.0, answers.reasons)
        return ""


def accuracy(answers: Answers, global_sum: GlobalSum) -> dict[str, float]:
    """Mean reward of the judged answers over all ranks, and the number of answers that could not be judged.

    Returns:
        `accuracy`, its standard error `accuracy_error`, and `unjudged`. If no answer was judged, as for data without
        expected answers, only `unjudged`. If no answer was generated, an empty dict.
    """
    mean, error = mean_and_error(answers.rewards[~answers.rewards.isnan()].tolist(), global_sum)
    generated, judged = _count_judged(answers, global_sum)
    found = {"unjudged": generated - judged} if generated else {}
    return {"accuracy": mean, "accuracy_error": error, **found} if judged else found


def _count_judged(answers: Answers, global_sum: GlobalSum) -> tuple[float, float]:
    """The number of answers of all ranks, and the number of those that could be judged."""
    counts = torch.tensor([len(answers.generated), (~answers.rewards.isnan()).sum()])
    generated, judged = global_sum(counts.double()).tolist()
    return generated, judged


def too_few_judged(answers: Answers, global_sum: GlobalSum, max_failed_rewards: float) -> str:
    """Why the run has to stop: more than this share of its answers could not be judged. Empty if it can go on.

    With a share of 1, a run never stops.
    """
    generated, judged = _count_judged(answers, global_sum)
    if max_failed_rewards >= 1:
        return ""
    return judging_problem(generated, judged, max_failed_rewards, answers.reasons, answers.skipped)
