"""Samples responses of the policy: encodes prompts, syncs weights, and scores responses while others are generated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlkit.data import Sample, Task
from rlkit.rewards import RewardScorer
from rlkit.rollout import Sampling, WeightSyncCheck
from rlkit.rollout.sampling import sample_name, sampling_per_request
from rlkit.runs.models import sync_check_dtype
from rlkit.runs.options import sends_adapters
from rlkit.runs.responses import (
    Compares,
    LearningWarnings,
    Prompts,
    Responses,
    keep_responses,
    response_metrics,
    too_few_scored,
)
from rlkit.runs.rollouts import SavedRollouts, record_draw
from rlkit.tracking import Run
from rlkit.vlm.long_rope import usable_context
from rlkit.vlm.prompt_workers import PromptEncoder, PromptWorkerError

T = TypeVar("T")


def compute_dtype(engine: Any) -> torch.dtype | None:
    """The dtype that an engine computes in; None for an engine of another package that does not say."""
    return getattr(engine, "compute_dtype", None)


def context_length(engine: Any, rollout: Any) -> int:
    """Maximum number of tokens of a prompt and its response: the context of the model, or of the sampler if smaller."""
    of_model = usable_context(engine.config, getattr(engine, "longest_sequence", None))
    return min(of_model, getattr(rollout, "max_model_len", of_model))


def encode_share(
    rows: Iterable[tuple[int, Any]],
    convert: Callable[[Sample], T],
    encoder: PromptEncoder,
    run: Run,
    engine: Any,
    **options: Any,
) -> tuple[list[T], list[str]]:
    """Encode the prompts of this rank's share of some rows, and call `convert` with each of them.

    A row is skipped, and named in the log, if `encode_prompt` or `convert` raises a ValueError.

    Args:
        rows: (group id, row) pairs of all ranks.
        convert: called with each encoded prompt.
        options: further arguments of `rlkit.vlm.encode_prompt`.

    Returns:
        The results of `convert`, and the errors of the skipped rows.
    """
    encoded, skipped = [], []
    share = list(rows)[engine.data_parallel_rank :: engine.data_parallel_size]
    with closing(encoder(share, dtype=compute_dtype(engine), **options)) as prompts:
        for prompt in prompts:
            try:
                encoded.append(convert(prompt()))
            except ValueError as error:
                run.print(f"skipped: {error}")
                skipped.append(str(error))
            except PromptWorkerError as error:
                run.stop(str(error))
    return encoded, skipped


def encoder_for(cfg: Any, processor: Any) -> PromptEncoder:
    """Encodes prompts in `--dataloader_num_workers` processes."""
    return PromptEncoder(processor, getattr(cfg, "dataloader_num_workers", 0))


class PolicySampler:
    """Generates responses with the current weights of the policy, and has them scored.

    Args:
        cfg: options that include `rlkit.runs.GenerationOptions`, and `PolicyOptions` if the responses are trained on.
        task: the task, whose reward scores the responses.
        processor: processor of the model, for encoding prompts.
        generate: replaces `rollout.generate`; called with (prompts, sampling, n=..., on_finished=...).
        compares: which rewards the recipe compares: of the responses to a prompt ("group"), of all responses of a step
            ("batch"), or none, because it does not train on rewards ("nothing"). A warning says if they are equal.
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
        compares: Compares = "group",
        sends_weights: bool = True,
    ) -> None:
        self.cfg, self.run, self.processor, self.engine, self.rollout = cfg, run, processor, engine, rollout
        self.sends_weights = sends_weights
        if sampler_bytes := getattr(rollout, "allocated_bytes", 0):
            run.sampler_bytes = sampler_bytes
        self.scorer = RewardScorer(
            task.reward, threads=cfg.reward_threads, group=getattr(engine, "model_parallel_group", None)
        )
        self.generate = generate or rollout.generate
        self.saved = SavedRollouts(cfg, engine) if getattr(cfg, "from_rollouts", "") else None
        self.warnings = LearningWarnings(cfg, run, compares)
        self.encoder = encoder_for(cfg, processor)
        self.sent_bytes = 0  # of the last weight sync
        self._drawn: set[tuple[Any, ...]] = set()  # seed, group id and tokens of what was sampled in a step to train on
        self._drawn_in_step: int | None = None

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt that leave room for a response in the context of model and sampler."""
        return context_length(self.engine, self.rollout) - self.cfg.max_new_tokens

    def encode(self, rows: Iterable[tuple[int, Any]]) -> Prompts:
        """Encode this rank's share of the (group id, row) pairs of all ranks.

        Rows that cannot be read, are longer than `cfg.max_prompt_tokens`, or leave no room for a response are skipped,
        and named in the log.

        Raises:
            ValueError: several rows with a group id. Responses to them would be equal, and would be one group.
        """
        rows = list(rows)
        for group_id, count in Counter(group_id for group_id, _ in rows).items():
            if count > 1:
                raise ValueError(f"rows: expected group ids that differ, got {group_id} {count} times")
        max_tokens = min(self.cfg.max_prompt_tokens or self.longest_prompt, self.longest_prompt)
        share = encode_share(rows, lambda prompt: prompt, self.encoder, self.run, self.engine, max_tokens=max_tokens)
        return Prompts(*share)

    @contextmanager
    def current_weights(self, *, training: bool = True) -> Iterator[None]:
        """Inside the `with` block, the sampling back end has the trained weights. Afterwards it sleeps.

        Args:
            training: as in `sample`. Nothing is sent if responses are read from saved rollouts.
        """
        if not self.sends_weights or (training and self._reads_rollouts):
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
            to: the sampling back end.
        """
        dtype = getattr(to, "weight_dtype", None)  # gather in the sampler's dtype: bfloat16 is half as large
        options = {} if dtype is None else {"dtype": dtype}
        self.sent_bytes = 0
        if sends_adapters(self.cfg):
            config, weights = self.engine.get_adapter(**options)
            to.update_adapter(config, self._counted(weights))
        else:
            to.update_weights(self._counted(self.engine.get_per_tensor_param(**options)))

    def _counted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same weights; their bytes are added to `sent_bytes`."""
        for name, tensor in weights:
            self.sent_bytes += tensor.nbytes
            yield name, tensor
            del tensor  # or it is there while the next is gathered

    def sync_and_sample(
        self, prompts: Prompts, sampling: Sampling, n: int = 1, *, phase: str = "generate", training: bool = True
    ) -> Responses:
        """`sample` with the trainer's current weights, which are sent first. All ranks call this together."""
        with self.current_weights(training=training):
            return self.sample(prompts, sampling, n, phase=phase, training=training)

    def sample(
        self, prompts: Prompts, sampling: Sampling, n: int = 1, *, phase: str = "generate", training: bool = True
    ) -> Responses:
        """Sample n responses to each prompt with the weights that the sampling back end has, and have them scored.

        Args:
            training: the responses are trained on. Only these are recorded (`--save_rollouts`), and with
                `--from_rollouts` they are the saved responses of this step.

        Raises:
            ValueError: responses to train on have another temperature than the engine's, unless 0, or a seed with which
                the same prompt was sampled in this step before: they would be the same responses.
        """
        if training:
            self._check_sampling(prompts.samples, sampling)
        self.run.phase(phase)
        if training and self._reads_rollouts:
            responses = self._saved_responses(prompts, phase)
        else:
            generated = self.generate(prompts.samples, sampling, n=n, on_finished=self.scorer.submit)
            if training:
                self.check_routing(generated)
            responses = self._scored(prompts, phase, generated)
        if training:
            record_draw(self.run, self.engine, prompts.samples, sampling, phase, responses.generated, responses.rewards)
        return responses

    def _check_sampling(self, prompts: Sequence[Sample], sampling: Sampling | Sequence[Sampling]) -> None:
        """Raise a ValueError if responses to train on cannot be sampled so, see `sample`."""
        of_engine = getattr(self.engine, "temperature", None)
        for one in [sampling] if isinstance(sampling, Sampling) else sampling:
            if one.temperature and of_engine not in (None, one.temperature):
                raise ValueError(
                    f"temperature: expected the engine's, {of_engine:g}, got {one.temperature:g} for responses to "
                    "train on; set engine.temperature to the same"
                )
        step = self.run.running_step
        if step is None or self._reads_rollouts:
            return
        if step != self._drawn_in_step:
            self._drawn_in_step, self._drawn = step, set()
        for prompt, one in zip(prompts, sampling_per_request(sampling, prompts), strict=True):
            draw = (one.seed, prompt.group_id, tuple(prompt.token_ids))
            if one.temperature and draw in self._drawn:
                raise ValueError(
                    f"seed: expected another than {one.seed} for a second draw of {sample_name(prompt)} in this step, "
                    "which would have the same responses"
                )
            self._drawn.add(draw)

    def check_routing(self, responses: Sequence[Sample]) -> None:
        """With `--router_replay`, end the run if the sampler did not record its choice of experts."""
        if getattr(self.cfg, "router_replay", False) and any(response.routed_experts is None for response in responses):
            self.run.stop(
                f"router_replay: expected responses with the experts that {self.cfg.rollout} chose, got some without; "
                "servers record them with --enable-return-routed-experts"
            )

    def greedy(self, prompts: Prompts, *, phase: str = "generate", training: bool = True) -> Responses:
        """`sync_and_sample` of one greedy response to each prompt."""
        sampling = Sampling(self.cfg.max_new_tokens, temperature=0.0)
        return self.sync_and_sample(prompts, sampling, phase=phase, training=training)

    def _scored(self, prompts: Prompts, phase: str, generated: list[Sample]) -> Responses:
        """Wait until all responses are scored, and return them with their rewards."""
        self.run.phase("reward" if phase == "generate" else phase)  # waiting for the remaining rewards
        rewards, parts, seconds = self.scorer.result()
        return Responses(generated, rewards, parts, prompts.skipped, self.scorer.reasons, seconds)

    @property
    def _reads_rollouts(self) -> bool:
        """Whether the responses of a step are read from saved rollouts."""
        return self.saved is not None and self.run.running_step is not None

    def _saved_responses(self, prompts: Prompts, phase: str) -> Responses:
        """The responses of this step in saved rollouts, with new rewards, or with `cfg.keep_rewards` the saved ones."""
        assert self.saved is not None and self.run.running_step is not None
        try:
            groups = self.saved.draw(self.run.running_step)
        except ValueError as error:
            self.run.stop(str(error))
        generated = [sample for group in groups for sample in group]
        if self.cfg.keep_rewards:
            rewards = torch.tensor([sample.reward for sample in generated], dtype=torch.float32)
            return Responses(generated, rewards, skipped=prompts.skipped)
        for i, group in enumerate(groups):
            self.scorer.submit(i, group)
        return self._scored(prompts, phase, generated)

    def stop_if_rewards_failed(self, responses: Responses) -> None:
        """End the run if more than a share `cfg.max_failed_rewards` of all ranks' responses could not be scored."""
        if problem := too_few_scored(responses, self.engine.global_sum, self.cfg.max_failed_rewards):
            self.run.stop(problem)

    @cached_property
    def _check_sync(self) -> WeightSyncCheck:
        dtype = sync_check_dtype(self.cfg, self.rollout)
        return WeightSyncCheck(self.cfg.max_mismatch, dtype=dtype, first=self.run.first_mismatch)

    def stop_if_out_of_sync(self, mismatch: float) -> None:
        """End the run if the sampler clearly lacks the trained weights; see `rlkit.rollout.WeightSyncCheck`.

        Args:
            mismatch: the step's `mismatch/abs_dlogp`, on responses that were sampled with the current weights.
        """
        if problem := self._check_sync(mismatch):
            self.run.stop(problem)
        self.run.first_mismatch = self._check_sync.first

    def metrics(self, responses: Responses) -> dict[str, float]:
        """Metrics for `Run.log`, over the responses of all ranks; see `rlkit.runs.responses.response_metrics`.

        `weight_sync/bytes` is the size of what the sampling back end was sent for the responses.
        """
        metrics = response_metrics(responses, self.engine)
        if self.sent_bytes:  # none are sent to hf
            metrics["weight_sync/bytes"] = self.sent_bytes
        return metrics

    def report(self, responses: Responses, metrics: Mapping[str, float]) -> None:
        """Show people the responses: those to rank 0's first prompts are on the page after the next `Run.log`.

        If the policy cannot learn from the responses, a warning says why, once.

        Args:
            metrics: include those of `metrics(responses)`.
        """
        if self.run.is_main_process:
            keep_responses(self.run, responses, self.cfg.log_prompts)
        self.warnings.check(metrics)
