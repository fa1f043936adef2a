"""What `offload_between_phases` copies: only what an earlier call has not copied, and back only what has changed."""

import sys
from pathlib import Path

import pytest
import torch

from rlkit.engines import make_engine, offload
from rlkit.engines.distributed import local_part
from rlkit.losses import token_mean
from rlkit.vlm import load_model, load_processor, lora

sys.path.insert(0, str(Path(__file__).parent))
from rows import make_batch


@pytest.fixture
def copies(monkeypatch):
    """Bytes that were copied to the device and to the host since the last call of `copies()`."""
    found = {"copy_from_host": 0, "copy_to_host": 0}

    def counted(name):
        function = getattr(offload, name)

        def copy(storage, *rest):
            found[name] += storage.nbytes()
            function(storage, *rest)

        return copy

    for name in found:
        monkeypatch.setattr(offload, name, counted(name))

    def since_last():
        sizes = tuple(found.values())
        found.update(dict.fromkeys(found, 0))
        return sizes

    return since_last


def loss_fn(out, mb):
    return token_mean(-out.logprobs, mb.mask, mb.total_tokens), {}


@pytest.mark.parametrize("rank", [0, 4])
def test_several_calls_copy_once_and_only_what_changed_goes_back(tiny_dir, copies, rank):
    torch.manual_seed(0)
    model = lora(load_model(tiny_dir), rank, 8) if rank else load_model(tiny_dir)
    batch = make_batch(load_processor(tiny_dir))
    adamw = {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)}
    engine = make_engine("fsdp2", model=model, offload_between_phases=True, **adamw)
    weights = sum(p.numel() * 4 for p in engine.module.parameters())
    trained = sum(p.numel() * 4 for p in engine.module.parameters() if p.requires_grad)
    assert copies() == (0, weights) and (trained < weights) == bool(rank)
    engine.infer_batch(batch)
    assert copies() == (weights, 0)
    engine.train_batch(batch, loss_fn)  # makes the optimizer state
    assert copies() == (weights, trained + 2 * trained)
    with engine.keep_on_device():
        assert copies() == (0, 0)  # nothing needs the weights yet
        scores = engine.infer_batch(batch)["logprobs"]
        for _ in range(3):
            engine.train_batch(batch, loss_fn)
        assert copies() == (weights + 2 * trained, 0)
    assert copies() == (0, trained + 2 * trained)
    assert not any(local_part(p).untyped_storage().nbytes() for p in engine.module.parameters())
    assert not torch.equal(engine.infer_batch(batch)["logprobs"], scores)
    with engine.gathered():
        with engine.keep_on_device():
            copies()
        engine.infer_batch(batch)
        assert copies() == (0, 0)  # the outer context kept the weights


def test_nested_contexts_and_weights_that_the_caller_writes(tiny_dir, copies):
    batch = make_batch(load_processor(tiny_dir))
    engine = make_engine("fsdp2", model=load_model(tiny_dir), offload_between_phases=True)
    weights = engine.host_bytes
    copies()
    with engine.keep_on_device():
        before = engine.infer_batch(batch)["logprobs"]
        with engine.keep_on_device():
            engine.infer_batch(batch)
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.data.mul_(0.5)
        written = engine.infer_batch(batch)["logprobs"]
        assert copies() == (weights, 0)
    assert copies() == (0, weights)
    assert torch.equal(engine.infer_batch(batch)["logprobs"], written) and not torch.equal(before, written)


def test_loaded_weights_go_back_to_the_host(tiny_dir, tmp_path):
    batch = make_batch(load_processor(tiny_dir))
    adamw = {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)}
    engine = make_engine("fsdp2", model=load_model(tiny_dir), offload_between_phases=True, **adamw)
    engine.save_checkpoint(tmp_path / "start")
    before = engine.infer_batch(batch)["logprobs"]
    engine.train_batch(batch, loss_fn)
    engine.load_checkpoint(tmp_path / "start")
    assert torch.equal(engine.infer_batch(batch)["logprobs"], before)


class RecordedStream:
    """In place of a CUDA stream: records what waits for what, and which stream copies run in."""

    current = None

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def __enter__(self):
        RecordedStream.current, self.before = self, RecordedStream.current

    def __exit__(self, *_):
        RecordedStream.current = self.before


def recorded_offloading(engine, monkeypatch):
    """What the engine does from now on with its optimizer state, its forwards and its optimizer steps, in order."""
    log = []
    compute, copies = RecordedStream("compute", log), RecordedStream("copies", log)
    monkeypatch.setattr(RecordedStream, "current", compute)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: RecordedStream.current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream or RecordedStream("host", log))
    state = engine._offloaded_state.on_host
    state._stream = copies
    for name in ("copy_from_host", "copy_to_host"):
        function = getattr(offload, name)

        def copy(storage, blocks, start, name=name, function=function):
            entry = f"{name} in {RecordedStream.current.name}"
            if blocks is state._blocks and log[-1:] != [entry]:  # not one for each tensor
                log.append(entry)
            function(storage, blocks, start)

        monkeypatch.setattr(offload, name, copy)
    engine.module.register_forward_pre_hook(lambda *_: log.append("forward"))
    engine.optimizer.register_step_pre_hook(lambda *_: log.append("step"))
    return log


LOAD = ["copies waits for compute", "copy_from_host in copies"]
UNLOAD = ["copies waits for compute", "copy_to_host in copies"]


@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        (1, ["forward", *LOAD, "compute waits for copies", "step", *UNLOAD]),
        (2, [*LOAD, "forward", "compute waits for copies", "step", "forward", "compute waits for copies", "step"]),
    ],
)
def test_state_comes_back_beside_the_first_of_several_forwards(tiny_dir, monkeypatch, updates, expected):
    """With one update, the state is not there in a forward, and a plan does not count it there."""
    torch.manual_seed(0)
    batch = make_batch(load_processor(tiny_dir))
    adamw = {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), "micro_batch_tokens": 10_000}
    engine = make_engine("fsdp2", model=load_model(tiny_dir), offload_between_phases=True, **adamw)
    log = recorded_offloading(engine, monkeypatch)
    for _ in range(2):
        log.clear()
        with engine.keep_on_device():
            for _ in range(updates):
                engine.train_batch(batch, loss_fn)
        with engine.keep_on_device():  # without an optimizer step, as for estimates
            engine.infer_batch(batch)
    steps = log[: log.index(UNLOAD[1]) + 1]
    assert steps == (expected if updates == 1 else [*expected, *UNLOAD])
    log.clear()
    engine.train_batch(batch, loss_fn)  # alone: nothing says that the state will be needed again
    assert log == ["forward", *LOAD, "compute waits for copies", "step", *UNLOAD]


@pytest.mark.parametrize("values", ["finite", "nan"])
def test_state_that_came_back_for_a_skipped_step_is_not_lost(tiny_dir, values):
    """The numbers of an engine that does not offload, also if the first of several gradients is not finite."""
    batch, found = make_batch(load_processor(tiny_dir)), []

    def loss(out, mb, scale=1.0):
        return scale * token_mean(-out.logprobs, mb.mask, mb.total_tokens), {}

    for offloads in (False, True):
        adamw = {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)}
        engine = make_engine("fsdp2", model=load_model(tiny_dir), offload_between_phases=offloads, **adamw)
        steps = []
        for scales in ([1.0, 1.0], [float("nan") if values == "nan" else 1.0, 1.0], [float("nan")], [1.0]):
            with engine.keep_on_device():
                steps += [engine.train_batch(batch, lambda *args, s=s: loss(*args, s)) for s in scales]
        found.append([step["grad_norm"] for step in steps if not step["skipped_steps"]])
    assert found[0] == found[1] and len(found[0]) == (4 if values == "nan" else 5)
