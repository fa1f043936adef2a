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
