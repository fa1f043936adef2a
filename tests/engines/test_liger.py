"""When Liger's kernels are used. What they compute is tested on a GPU with the package itself."""

import importlib
import importlib.util
import subprocess
import sys

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import is_liger_kernel_available

from rlkit.engines.distributed import full_tensor
from rlkit.engines.fsdp.liger import use_liger_kernels

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def tiny():
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2))


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A stand-in for the package: it records the options of each call and replaces the forward of one norm."""
    package = tmp_path / "liger_kernel"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '0.8.5'\n")
    (package / "transformers.py").write_text(
        "calls = []\n"
        "def _apply_liger_kernel_to_instance(model, **options):\n"
        "    calls.append(options)\n"
        "    if model.config.model_type == 'qwen2':\n"
        "        model.model.norm.forward = model.model.norm.forward\n"
    )
    facts = tmp_path / "liger_kernel-0.8.5.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: liger-kernel\nVersion: 0.8.5\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    is_liger_kernel_available.cache_clear()
    yield lambda: importlib.import_module("liger_kernel.transformers").calls
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        sys.modules.pop(name)
    is_liger_kernel_available.cache_clear()


def test_used_only_on_a_gpu_and_without_its_loss(installed):
    assert not use_liger_kernels(tiny(), CPU) and not installed()
    assert use_liger_kernels(tiny(), GPU)
    assert installed() == [{"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}]


def test_an_unsupported_family_is_not_changed(installed):
    model = tiny()
    model.config.model_type = "other"
    assert not use_liger_kernels(model, GPU) and len(installed()) == 1


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is not None, reason="Liger is installed")
def test_without_the_package_nothing_changes():
    model = tiny()
    assert not use_liger_kernels(model, GPU)
    assert not any("forward" in vars(module) for module in model.modules())


def on_gpu():
    """Check that logprobs and gradients are the same with and without Liger's kernels."""
    from rlkit.data import Batch
    from rlkit.engines import make_engine
    from rlkit.losses import token_mean

    tokens = torch.arange(3, 51).view(2, 24)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, :4] = False
    found = []
    for fused in (False, True):  # Liger last: it stays in the process
        engine = make_engine(
            "fsdp2", model=tiny(), device="cuda", compute_dtype=torch.float32, use_fused_kernels=fused,
            optimizer=lambda params: torch.optim.AdamW(params, lr=0.0), keep_gradients=True,
        )  # fmt: skip
        assert engine.liger == fused
        batch = Batch(tokens, mask, [24, 20])
        logprobs = engine.infer_batch(batch)["logprobs"]
        engine.train_batch(batch, lambda out, mb: (token_mean(-out.logprobs, mb.mask, mb.total_tokens), {}))
        found.append((logprobs, {n: full_tensor(p.grad) for n, p in engine.module.named_parameters()}))
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-4, rtol=1e-4)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_numbers_are_the_same():
    pytest.importorskip("liger_kernel")
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    on_gpu()
