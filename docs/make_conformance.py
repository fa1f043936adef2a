"""Write docs/conformance.md: what the conformance suite finds of rlkit, verl, TRL, OpenRLHF and SkyRL.

make conformance    # SkyRL in an environment of its own, then the page in that of the peers
"""

import argparse
import importlib.metadata
import json
import platform
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "peers")]

from rlkit.conformance.adapter import load_adapter  # noqa: E402
from rlkit.conformance.report import ERROR, Finding, as_markdown, run_checks  # noqa: E402

ADAPTERS = [
    "rlkit.conformance.ours:Trainer",
    "adapter_verl:Trainer",
    "adapter_trl:Trainer",
    "adapter_openrlhf:Trainer",
]
TOP = """# Conformance: does a trainer compute what it says?

The suite compares a trainer's losses and advantages with plain loops, and checks what often goes wrong: splits of a
batch over micro-batches and ranks, token alignment, values under the mask, denominators, groups of any order and
size, the gradient of the KL term, temperature, tokens that cannot be sampled, and a ratio of 1 on policy. It works for
any trainer:

```bash
pytest --pyargs rlkit.conformance --trainer my_adapter:Trainer
```

In a checkout that is not installed, add `-p rlkit.conformance.plugin`. An adapter is a class with some of the methods
of `rlkit.conformance.adapter.Adapter`; all tensors are [B, T], and entry t belongs to token t. A method calls
the trainer's function with exactly what the trainer's own loop would pass to it:

```python
from my_trainer import ppo_loss

class Trainer:
    name = "my trainer 0.1"
    ranks_average = True  # gradients are averaged over ranks, not summed

    def policy_loss(self, logprobs, old_logprobs, advantages, mask, split, clip_low, clip_high):
        loss = ppo_loss(logprobs, old_logprobs, advantages[:, None] * mask, mask, clip_low, clip_high)
        return loss / split.micro_batches  # as this trainer's loop does
```

Pass the clip bounds on: an adapter that ignores them fails the check. If the trainer's loop passes the number of tokens
of the whole batch to the loss, pass `split.tokens`.

The result is a matrix. Each check gives one of these verdicts:

- **as the reference** ("yes" in the table): the numbers of the plain loop;
- **choice**: a published or documented alternative, described in a note; refusing an input counts as one;
- **bug**: a number depends on something that it should not depend on, or is nan; the test fails;
- **error**: the trainer or its adapter raised an exception, which says nothing about the trainer by itself;
- **not provided** ("–"): the adapter has no such method.

For each check there is a planted bug that only this check finds (`tests/conformance/test_conformance.py`).

## What it finds

"""
BOTTOM = """

## How to read it

- The table covers functions with the suite's inputs, on a CPU in float32, with each trainer's defaults. It says nothing
  about speed, nor about parts that no adapter calls: "–" is not a fault.
- `masked_nonfinite` and `entropy_of_impossible_tokens` need numbers that are nan or infinite. They come from an
  overflow, or from logits that are masked with -inf. A run without such numbers is not affected by these bugs.
- `kl_gradient` is about the KL term in the loss, which is optional in every trainer. TRL weights k3 by the ratio
  (`use_bias_correction_kl`, on by default), which makes the gradient exact. So do verl's `low_var_kl+`, OpenRLHF's
  `--algo.kl.unbiased_gradient`, and rlkit's `kl_k2`, `kl_straight_through` and `kl_k3_weighted`.
- verl gives a response that is alone in its group its raw reward on purpose, as its code says.

Adapters: [rlkit](../rlkit/conformance/ours.py), [verl](../tests/peers/adapter_verl.py),
[TRL](../tests/peers/adapter_trl.py), [OpenRLHF](../tests/peers/adapter_openrlhf.py),
[SkyRL](../tests/peers/adapter_skyrl.py). For TRL,
methods of `GRPOTrainer` are called on batches as its own loop makes them. For OpenRLHF, two files are loaded without
the package, whose imports need DeepSpeed and flash-attn. Its group advantages and GAE are inside its experience maker
and are not called.

By default, SkyRL's critic returns 0 at padding, so the adapter passes 0 there. Its response mask includes tool output.
SkyRL was run with Python {skyrl}, which its releases need, and the others with Python {python}.

To use rlkit's functions inside another trainer, see [other trainers](other_trainers.md).

To reproduce: `make conformance PYTHON312=/path/to/python3.12` makes the environments of the peers, and writes this
page with `docs/make_conformance.py`. Versions: {versions}.
"""


def python() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def findings_of(name: str) -> tuple[str, list[Finding]]:
    """A trainer's name and findings. Ends the process if an adapter has an error."""
    adapter = load_adapter(name)
    found = run_checks(adapter)
    if errors := [one for one in found if one.verdict == ERROR]:
        raise SystemExit(f"nothing written, as {errors[0].check} says: {errors[0].text}")
    return adapter.name, found


def page(skyrl: Path) -> str:
    findings = dict(map(findings_of, ADAPTERS))
    of_skyrl = json.loads(skyrl.read_text())
    findings[of_skyrl["name"]] = [Finding(*one) for one in of_skyrl["findings"]]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "verl", "trl"))
    versions += f", openrlhf 0.11.2, {of_skyrl['name'].lower()}"
    return TOP + as_markdown(findings) + BOTTOM.format(python=python(), skyrl=of_skyrl["python"], versions=versions)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skyrl", type=Path, required=True, help="file with the findings of SkyRL")
    parser.add_argument("--run_skyrl", action="store_true", help="write that file, in SkyRL's environment")
    given = parser.parse_args()
    if given.run_skyrl:
        name, found = findings_of("adapter_skyrl:Trainer")
        given.skyrl.write_text(json.dumps({"name": name, "python": python(), "findings": found}))
    else:
        (ROOT / "docs" / "conformance.md").write_text(page(given.skyrl))
