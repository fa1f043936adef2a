"""The steps of a turn: all at once, each within its time, whatever they do."""

import asyncio
import threading

from rlkit.data import prompt_sample
from rlkit.rollout import agent
from rlkit.rollout.agent import Observation, call_steps


def test_functions_that_never_return_do_not_stop_the_run(monkeypatch):
    """In a thread, or on the shared event loop."""
    released, one = threading.Event(), [prompt_sample([1])]

    def hangs(sample):
        released.wait(60)

    async def blocks(sample):
        released.wait(60)

    def responses(sample):
        return Observation("fine")

    monkeypatch.setattr(agent, "GRACE_SECONDS", 0.3)
    for never in (hangs, blocks):
        assert isinstance(call_steps(never, one, 0.3)[0], TimeoutError)
        assert call_steps(responses, one, 60.0)[0].text == "fine"
    released.set()


def test_steps_of_a_turn_run_at_the_same_time():
    samples = [prompt_sample([1], group_id=i) for i in range(20)]
    barrier = threading.Barrier(20)  # passes when all twenty are there

    def both_arrive(sample):
        barrier.wait(60)
        return Observation(str(sample.group_id))

    assert [o.text for o in call_steps(both_arrive, samples, 60.0)] == [str(i) for i in range(20)]
    waiting = []

    async def together_async(sample):
        waiting.append(sample)
        while len(waiting) < 20:
            await asyncio.sleep(0.001)
        return asyncio.get_running_loop()

    loops = call_steps(together_async, samples, 60.0) + call_steps(together_async, samples, 60.0)
    assert len({id(loop) for loop in loops}) == 1 and call_steps(both_arrive, [], 1.0) == []
