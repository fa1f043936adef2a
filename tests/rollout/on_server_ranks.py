"""Run by `test_servers.py` on two ranks.

With one server: one update that succeeds, and one that fails on rank 0 alone. Rank 1 gets a response that was continued
with the new weights before it knows that all servers have them.

With two servers: each rank prints which of them are excluded during and after three updates. At the beginning of the
first one rank 0 does not reach the second server, and before the third one that server has lost its weights.

on_server_ranks.py MODEL URL[,URL]
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from forked_ranks import fork_ranks  # noqa: E402

from rlkit.rollout import make_rollout  # noqa: E402
from rlkit.rollout.servers.pool import ServerUnavailable  # noqa: E402
from rlkit.vlm import load_processor  # noqa: E402


def gathered(count):
    """Weights as a sharded model gives them: gathering each tensor is a collective."""
    for i in range(count):
        whole = torch.ones(4)
        dist.all_reduce(whole)
        yield f"w{i}", whole


def on_rank(model, urls):
    dist.init_process_group("gloo")
    rollout = make_rollout("vllm_server", model=model, processor=load_processor(model), urls=urls)
    if len(rollout.pool.servers) == 1:
        update_and_fail(rollout)
    else:
        update_some(rollout)
    dist.barrier()
    dist.destroy_process_group()


def update_some(rollout):
    seen, second = [], rollout.pool.servers[1]
    request = rollout.pool.request

    def note():
        seen.append([server.url for server in rollout.pool.servers if server.failure] == [second.url])

    def gathered_in_between():
        yield from gathered(2)
        note()
        yield from gathered(1)

    async def silent(server, *rest, **options):
        if server is second:
            raise ServerUnavailable("busy")
        return await request(server, *rest, **options)

    for update in range(3):
        if dist.get_rank() == 0:
            rollout.pool.request = silent if update == 0 else request
            if update == 2:
                rollout.pool.run(request(second, "POST", "/finish_weight_update", {"weight_version": "default"}))
        rollout.update_weights(gathered_in_between())
        note()
    sys.stdout.write(f"{dist.get_rank()} {seen}\n")


def update_and_fail(rollout):

    def gathered_then_with_response():
        yield from gathered(3)
        if dist.get_rank() == 1:
            rollout._check_versions(rollout.pool.servers[0], 0, [0, 1])

    rollout.update_weights(gathered_then_with_response())
    version = rollout.version
    if dist.get_rank() == 0:

        def fail():
            raise RuntimeError("sent on purpose")

        rollout._begin_update = fail
    iterator = gathered(3)
    try:
        rollout.update_weights(iterator)
    except RuntimeError as error:
        said = f"{dist.get_rank()} {version} {next(iterator, None) is None} {error}\n"
        sys.stdout.write(said)  # at once: the ranks share a pipe, and print writes word by word


if __name__ == "__main__":
    model, urls = sys.argv[1:]
    load_processor(model)  # imports what the ranks need
    fork_ranks(on_rank, 2, model, urls)
