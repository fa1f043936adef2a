"""What verl's own command lacks on a machine without a GPU; VERL_USE_EXTERNAL_MODULES names this module.

verl 0.9.1 has platforms for NVIDIA, AMD and Ascend devices (verl/plugin/platform), and its servers are vLLM, SGLang and
TensorRT-LLM. A platform and a server are registered here from outside, as plug-ins for other hardware do it; no code of
verl is replaced. Everything else of a run is verl's: its command, Ray actors, queue and agent loop, the FSDP2 engine of
its workers, the update and the metrics.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import ray
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

sys.modules["trl"] = None  # verl 0.9.1 imports a class that TRL 1.16 does not have, if there is a TRL


def nothing(*_, **__):
    return 0


class CpuModule(SimpleNamespace):
    """In the place of torch.cuda: its counters of memory are 0."""

    is_available = staticmethod(lambda: False)
    get_device_name = staticmethod(lambda: "CPU")
    mem_get_info = staticmethod(lambda: (0, 0))

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, nothing)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """Tensors on the CPU, gloo between workers. Ray's GPUs are places for workers; nothing touches a device."""

    device_name = "cpu"
    vendor_name = "none"
    device_module = CpuModule()

    def is_available(self):
        return True

    is_platform_available = is_ipc_supported = lambda self, **_: False

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        # verl asks torch for "cpu:gloo,<device>:<this>" unless there is a group, and torch refuses "cpu:gloo,cpu:gloo"
        if "RANK" in os.environ and not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return []

    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = empty_cache = nothing
    nvtx_range = profiler_start = profiler_stop = cudart = nothing


from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout  # noqa: E402
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput  # noqa: E402

RECORDS = Path(os.environ.get("VERL_ON_CPU_RECORDS", "."))


class Sampler:
    """A server of one replica: samples token by token, and writes down weights and responses of each version.

    A draw depends on the prompt, the version of the weights and the number of the response, not on the order of
    requests.
    """

    def __init__(self, replica, path, length):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(path).eval()
        self.end, self.length = AutoTokenizer.from_pretrained(path).eos_token_id, length
        self.replica, self.version, self.responses = replica, None, {}

    async def load(self, weights, version):
        self.model.load_state_dict(weights, strict=False)  # without the tied head
        self.version, self.responses = version, {}
        if self.replica == 0:
            torch.save(weights, RECORDS / f"weights{version}.pt")

    async def generate(self, request_id, prompt_ids, sampling_params, **_):
        number = self.responses[tuple(prompt_ids)] = self.responses.get(tuple(prompt_ids), -1) + 1
        seed = hashlib.sha256(repr((prompt_ids, self.version, number)).encode()).digest()
        g = torch.Generator().manual_seed(int.from_bytes(seed[:4], "big"))
        tokens, logprobs = list(prompt_ids), []
        with torch.no_grad():
            while len(logprobs) < self.length and (not logprobs or tokens[-1] != self.end):
                scores = self.model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
                tokens.append(torch.multinomial(scores.exp(), 1, generator=g).item())
                logprobs.append(scores[tokens[-1]].item())
        response = tokens[len(prompt_ids) :]
        line = {"version": self.version, "prompt": prompt_ids, "answer": response, "logprobs": logprobs}
        with open(RECORDS / f"responses{self.replica}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        return TokenOutput(
            token_ids=response, log_probs=logprobs, stop_reason="completed", extra_fields={"global_steps": self.version}
        )

    async def sleep(self):
        """Nothing: its memory is not the trainer's."""

    wake_up = sleep


class Replica(RolloutReplica):
    async def launch_servers(self):
        self._server_address = f"sampler_{self.replica_rank}"
        options = {"name": self._server_address, "num_cpus": 0}
        server = ray.remote(Sampler).options(**options)
        self._server_handle = server.remote(self.replica_rank, self.model_config.path, self.config.response_length)
        self.servers = [self._server_handle]


class WeightSender(BaseRollout):
    """The rollout's part in a worker: it sends the weights to the server."""

    async def resume(self, tags):
        pass

    async def release(self):
        pass

    async def update_weights(self, weights, global_steps=None, **_):
        named = {name: x.detach().clone() for name, x in weights}
        server = ray.get_actor(f"sampler_{torch.distributed.get_rank()}")
        await server.load.remote(named, global_steps)


RolloutReplicaRegistry.register("on_cpu", lambda: Replica)
_ROLLOUT_REGISTRY["on_cpu", "async"] = f"{__name__}.WeightSender"


def score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """verl's reward function: it differs between most responses."""
    return len(solution_str) % 4 / 2
