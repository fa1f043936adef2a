"""Run by `test_on_gpus.py` under torchrun: vLLM beside the trainer on each of two GPUs.

on_vllm_gpu_ranks.py MODEL_DIR OUT_DIR TENSOR_PARALLEL_SIZE merged|adapters cuda  # or cpu, to try the script
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from test_on_gpus import SAMPLING, mean_gap, prompts_with_images, train  # noqa: E402

from rlkit.engines import make_engine  # noqa: E402
from rlkit.engines.distributed import init_distributed  # noqa: E402
from rlkit.rollout import make_rollout  # noqa: E402
from rlkit.vlm import load_model, load_processor, lora, suppressed_token_ids  # noqa: E402


def main(path, out, size, sent, device):
    init_distributed(device)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    processor, model = load_processor(path), lora(load_model(path), 4, 8)
    suppressed = suppressed_token_ids(model.config, getattr(processor, "tokenizer", processor))
    engine = make_engine(
        "fsdp2", model=model, device=device, suppressed_token_ids=suppressed, temperature=SAMPLING.temperature,
        optimizer=lambda weights: torch.optim.Adam(weights, lr=0.05), offload_between_phases=True,
    )  # fmt: skip
    options = {"gpu_memory_utilization": 0.4, "max_model_len": 512, "tensor_parallel_size": int(size)}
    if sent == "adapters":
        options |= {"enable_lora": True, "max_lora_rank": 8}
    rollout = make_rollout("vllm", engine.gathered, model=path, processor=processor, **options)
    prompts = prompts_with_images(processor)[rank::world]
    samples = rollout.generate(prompts, SAMPLING, n=4)
    found = {"start": mean_gap(engine, samples).item(), "groups": [s.group_id for s in samples]}
    rollout.sleep()
    train(engine, samples)
    rollout.wake_up()
    if sent == "adapters":
        rollout.update_adapter(*engine.get_adapter(dtype=rollout.weight_dtype))
    else:
        rollout.update_weights(engine.get_per_tensor_param(dtype=rollout.weight_dtype))
    found["synced"] = mean_gap(engine, rollout.generate(prompts, SAMPLING, n=4)).item()
    found["stale"] = mean_gap(engine, samples).item()  # of the weights before
    rollout.close()
    (Path(out) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
