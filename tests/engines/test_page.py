"""docs/notes_engines.md: its table is made from the cases. docs/engines_in_code.md: its example engine works."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from rlkit.engines import make_engine
from rlkit.vlm import load_model, load_processor

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(ROOT / "docs"))
import make_engines  # noqa: E402
from one_gradient import sequence_loss, sft_loss, table  # noqa: E402
from rows import make_batch  # noqa: E402

NOTES = make_engines.PAGE.read_text()
PAGE = (ROOT / "docs" / "engines_in_code.md").read_text()


def test_the_table_is_up_to_date():
    assert make_engines.with_table(NOTES) == NOTES, "run python docs/make_engines.py"
    layouts = [line.split(" | ")[0].removeprefix("| ") for line in table().splitlines()[2:]]
    required = {"1 process", "DP 2", "Ulysses 2", "DP 2 x Ulysses 2"}
    required |= {f"Megatron, {layout}" for layout in ("TP 2", "PP 2", "TP 2 x PP 2", "CP 2", "TP 2 + SP")}
    assert required <= set(layouts) and len(layouts) == len(set(layouts))


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The page's example, installed as a package."""
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    (entry,) = re.findall(r"^```toml\n\[project.(entry-points.*?)\]\n\"(.*?)\" = \"(.*?)\"", PAGE, re.M | re.S)
    assert len(code.splitlines()) <= 60 and entry[0] == 'entry-points."rlkit.engines"'
    (tmp_path / "plain.py").write_text(code)
    metadata = tmp_path / "plain-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plain\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[rlkit.engines]\n{entry[1]} = {entry[2]}\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield
    sys.modules.pop("plain", None)


def test_the_example_trains_like_fsdp2(installed, tiny_dir, tmp_path):
    batch = make_batch(load_processor(tiny_dir))
    engines = [
        make_engine(
            backend,
            model=load_model(tiny_dir),
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4),
            micro_batch_tokens=120,
            device="cpu",
        )
        for backend in ("plain", "fsdp2")
    ]
    for step, loss_fn in enumerate((sequence_loss, sft_loss, sequence_loss)):
        plain, fsdp2 = (engine.train_batch(batch, loss_fn) for engine in engines)
        assert plain == pytest.approx({name: fsdp2[name] for name in plain}, abs=1e-5, rel=1e-5), step
        if step == 1:
            engines[0].save_checkpoint(tmp_path / "step_2", {"step": 2})
    logprobs, expected = (engine.infer_batch(batch)["logprobs"] for engine in engines)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    assert engines[0].load_checkpoint(tmp_path / "step_2") == {"step": 2}
    assert (engines[0].infer_batch(batch)["logprobs"] - logprobs).abs().max() > 1e-3
    assert engines[0].train_batch(batch, sequence_loss) == plain
    for (name, tensor), (other, expected) in zip(*(e.get_per_tensor_param() for e in engines), strict=True):
        assert name == other
        torch.testing.assert_close(tensor, expected, atol=1e-5, rtol=1e-5)
