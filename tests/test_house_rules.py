"""The rules of the repository that no single module can see; each checker is tried on what breaks its rule."""

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = sorted((ROOT / "rlkit").rglob("*.py"))
RECIPES = sorted((ROOT / "recipes").glob("*.py"))
UPSTREAM = {"transformers", "peft", "torch", "megatron"}  # never patched, with the exceptions below
# what may be replaced for as long as a `with` block lasts: module -> what it replaces -> why there is no other way
REPLACED = {
    "rlkit.engines.megatron.cpu": {
        "torch.cuda.current_device": "Megatron-Core allocates its buffers on the current CUDA device",
        "torch.cuda.synchronize": "its pipeline waits for CUDA after it has exchanged the shapes of packed rows",
        "megatron.core.tensor_parallel.random._get_cuda_rng_state": "it saves CUDA's random state for a recomputation",
        "megatron.core.tensor_parallel.random._set_cuda_rng_state": "it restores CUDA's random state after it",
        "megatron.core.transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream": (
            "its token dispatcher makes a CUDA stream unless there is one"
        ),
    },
    "rlkit.plan.fake_ranks": {
        "torch.UntypedStorage.resize_": "FSDP frees gathered weights with it, which no dispatch mode sees",
        "rlkit.losses._kernels.CPU_CACHE_BYTES": "the tensors are on a CPU, and the plan is for a GPU",
        "rlkit.losses._kernels.CPU_CHUNK_BYTES": "the same",
        "rlkit.losses.logprobs.kernels_for": "the same",
        "rlkit.engines.offload.copy_to_host": "a copy on the host would be counted as memory of the GPU",
        "rlkit.engines.offload.copy_from_host": "the same",
        "rlkit.engines.distributed.GATHER_BY_BROADCAST": "the same",
        "rlkit.engines.distributed.gather_objects": "simulated ranks send nothing",
        "rlkit.engines.fsdp.fsdp2.make_model_parallel_group": "simulated ranks cannot say which of them share rows",
    },
    "rlkit.plan.kernels": {
        "rlkit.losses._triton.vocabulary_sums": "a plan allocates what the kernels do, and computes nothing",
        "rlkit.losses._triton.logit_gradients": "the same",
        "module.name": "the same, for functions that recurrent layers call",
    },
    "rlkit.plan.rehearsal": {
        "rlkit.vlm.adapt._initialise": "it makes adapters in host memory, which a plan only counts",
    },
    "rlkit.rollout.vllm": {
        "torch.set_num_threads": "vLLM replaces it on a CPU; restored after vLLM has started",
        "torch.distributed.destroy_process_group": "vLLM's shutdown would destroy the trainer's process groups",
    },
}

# what each part may import of this repository; the longest prefix that matches a module's name decides
OWN = {
    "recipes": {"rlkit"},
    "rlkit._check": set(),
    "rlkit._numerics": {"rlkit._check"},
    "rlkit.losses": {"rlkit.losses", "rlkit._check", "rlkit._numerics"},
    "rlkit.advantages": {"rlkit.advantages", "rlkit._check", "rlkit._numerics"},
    "rlkit.data": {
        "rlkit.data",
        "rlkit.rewards.isolated",
        "rlkit.rewards.maths",
        "rlkit.rewards.named",
        "rlkit.rewards.rules",
        "rlkit.rewards.sandbox",
    },  # tasks name their rewards
    "rlkit.data.samples": {"rlkit.data.media", "rlkit.data.placeholders", "rlkit.data.vision_tensors"},
    "rlkit.data.media": set(),
    "rlkit.data.placeholders": set(),
    "rlkit.data.vision_tensors": set(),
    "rlkit.data.thinking_tags": {"rlkit.data.samples"},
    "rlkit.data.messages": {"rlkit.data.samples"},
    "rlkit.data.packing": set(),
    "rlkit.data.lookup": set(),
    "rlkit.data.user_code": set(),
    "rlkit.rewards": {
        "rlkit.rewards",
        "rlkit.data.lookup",
        "rlkit.data.samples",
        "rlkit.data.thinking_tags",
        "rlkit.data.user_code",
    },
    "rlkit.vlm": {
        "rlkit.vlm",
        "rlkit.data.lookup",
        "rlkit.data.media",
        "rlkit.data.messages",
        "rlkit.data.placeholders",
        "rlkit.data.samples",
        "rlkit.data.thinking_tags",
        "rlkit.data.vision_tensors",
    },
    "rlkit.engines": {"rlkit.data", "rlkit.vlm", "rlkit.engines", "rlkit.losses.logprobs"},
    "rlkit.rollout": {"rlkit.data", "rlkit.rewards", "rlkit.vlm", "rlkit.rollout", "rlkit.losses.logprobs"},
    "rlkit.conformance": {"rlkit.conformance", "rlkit.losses", "rlkit.advantages", "rlkit.data.user_code"},
    "rlkit.conformance.ours": {"rlkit"},
    "rlkit.mismatch": {"rlkit"},
    "rlkit.plan": {"rlkit"},
    "rlkit.replay": {"rlkit"},
    "rlkit.replay.bundles": {"rlkit.data.placeholders", "rlkit.data.samples"},
    "rlkit.export": {"rlkit"},
    "rlkit.doctor": {"rlkit"},  # programs that check what a run would use
    "rlkit.data.__main__": {"rlkit"},
    "rlkit.profiling": set(),
    "rlkit.tracking": {"rlkit.tracking"},
    "rlkit.report": {"rlkit.report", "rlkit.tracking"},
    "rlkit.plugins": {"rlkit.plugins", "rlkit.losses", "rlkit.advantages"},  # imported by nothing
    "rlkit.runs": {"rlkit"},  # what recipes share stands above all rooms: nothing but recipes imports it
    "rlkit": set(),
}
# what each part may import of others, when its modules are imported; recipes, runs, engines and rollout are free
THIRD = {
    "rlkit.losses": {"torch"},
    "rlkit.losses._triton": {"torch", "triton"},  # imported where there is a GPU alone
    "rlkit.advantages": {"torch"},
    "rlkit.data": {"torch", "einops", "numpy", "PIL"},
    "rlkit.data.packing": {"torch", "einops"},
    "rlkit.rewards": {"torch", "numpy"},
    "rlkit.vlm": {"torch", "einops", "numpy", "PIL"},
    "rlkit.vlm.rope3d": {"torch", "einops"},
    "rlkit.vlm.rope3d_sound": {"torch", "einops"},
    "rlkit.tracking": set(),
    "rlkit.report": set(),
    "rlkit": set(),
}
# not in functions either
ANYWHERE = {"rlkit.losses", "rlkit.advantages", "rlkit.data.packing", "rlkit.vlm.rope3d", "rlkit.vlm.rope3d_sound"}

# names that were given up for the terms of the field, see CHANGELOG.md; no code uses them again
RETIRED_NAMES = """
Ahead Canary SameRows Scripted TakesAdapters Written ASIDE ASKED NOT_TRAINED PEAKS QUESTIONS READY
a_tenth_held_out add_up response_heldout asked balanced by_difficulty can_see careless_turn changing_rope
check_unsampled coming copy_with data_group data_rank data_world deal easiest encode_reply encode_rows end_tokens
flip_rate fresh_gap hand_over hands_over image_only in_thread join_vision kinds_seen live load_marked lost marked_row
max_unjudged mine model_vision of_each prompt_encoder ranks_with_equal_rows read_model recorded_routing referred
request_prompt row_group run_closure stateful strangers together told torn unsampled unsampled_ids where_ranks_wait
whole_in_turn with_routing _go_on _look_round _meet
""".split()
# turns of phrase that no page, docstring, comment or message has again
RETIRED_PHRASES = [
    r"\bcame None\b",
    r"\bexpected, came\b",
    r"goes[ _]on[ _]goes[ _]on",
    r"\bmoods?\b",
    r"behind one door",
    r"\bdearest rank\b",
    r"\bwould stay behind\b",
    r"\blets go of\b",
    r"time/hand_over",
    r"\bWhat samples\b",
    r"\bTold the\b",
    r"\bbears no\b",
]
PROSE = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *(path for folder in ("rlkit", "recipes", "tests", "docs") for path in sorted((ROOT / folder).rglob("*.py"))),
]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def rule(table: dict[str, set[str]], name: str) -> set[str] | None:
    found = [prefix for prefix in table if within(name, prefix)]
    exact = [prefix for prefix in found if prefix != "rlkit" or name == "rlkit"]
    return table[max(exact, key=len)] if exact else None


def imports(tree: ast.AST, package: str) -> Iterator[tuple[str, int, bool]]:
    """(module, line, at module level) of every import; `from a import b` counts as a.b, it may be a module."""

    def walk(node: ast.AST, top: bool) -> Iterator[tuple[str, int, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, child.lineno, top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                parts = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
                base = ".".join([*parts, *([child.module] if child.module else [])])
                yield from ((f"{base}.{alias.name}", child.lineno, top) for alias in child.names)
            elif isinstance(child, ast.Call) and ast.unparse(child.func).split(".")[-1] in (
                "import_module",
                "__import__",
            ):
                if child.args and isinstance(child.args[0], ast.Constant):
                    yield str(child.args[0].value), child.lineno, top
                yield from walk(child, top)
            else:
                yield from walk(
                    child, top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                )

    yield from walk(tree, True)


def import_breaches(source: str, name: str, is_package: bool = False) -> list[str]:
    own, third = rule(OWN, name), rule(THIRD, name)
    package = name if is_package else name.rpartition(".")[0]
    found = []
    if own is None:
        return [f"{name}: no rule says what it may import; add one to OWN"]
    for module, line, top in imports(ast.parse(source), package):
        root = module.split(".")[0]
        if root == "recipes" or root in {path.stem for path in RECIPES} and name.startswith("recipes"):
            found.append(f"{name}:{line} imports the recipe {module}")
        elif root == "rlkit":
            if not any(within(module, prefix) for prefix in own):
                found.append(f"{name}:{line} imports {module}")
        elif third is not None and root not in sys.stdlib_module_names and root not in third:
            if top or any(within(name, strict) for strict in ANYWHERE):
                found.append(f"{name}:{line} imports {module}" + (" at module level" if top else ""))
    return found


def bound_names(target: ast.AST) -> Iterator[str]:
    yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


def patch_breaches(source: str, name: str) -> list[str]:
    """Assignments to attributes of what comes from transformers, peft or torch: model code is never patched."""
    tree = ast.parse(source)
    foreign: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            foreign |= {(a.asname or a.name.split(".")[0]) for a in node.names if a.name.split(".")[0] in UPSTREAM}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UPSTREAM:
            foreign |= {alias.asname or alias.name for alias in node.names}

    def root(node: ast.AST) -> str:
        while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
            node = node.value
        return node.id if isinstance(node, ast.Name) else ""

    def leaves(node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, ast.Tuple | ast.List):
            for part in node.elts:
                yield from leaves(part)
        else:
            yield node

    def imported(node: ast.AST) -> bool:
        return root(node) in foreign

    found = []
    for node in ast.walk(tree):
        targets: list[ast.AST] = []
        if isinstance(node, ast.Assign):
            targets = [leaf for target in node.targets for leaf in leaves(target)]
            if any(isinstance(target, ast.Name) for target in targets) and isinstance(
                node.value, ast.Attribute | ast.Name
            ):
                if imported(node.value):  # an alias of a module or a class is foreign too
                    foreign |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = list(node.targets)
        elif isinstance(node, ast.For | ast.AsyncFor):
            targets = list(leaves(node.target))
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            targets = list(leaves(node.optional_vars))
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).split(".")[-1]
            if called in ("setattr", "delattr", "__setattr__") and imported(node.args[0]):
                found.append(f"{name}:{node.lineno} {called}({ast.unparse(node.args[0])}, ...)")
        for target in targets:
            if isinstance(target, ast.Attribute | ast.Subscript) and imported(target):
                found.append(f"{name}:{target.lineno} assigns to {ast.unparse(target)}")
    return found


def replacements(source: str) -> list[str]:
    """What a module replaces with `unittest.mock` or pytest's monkeypatch: "module.attribute" of each."""
    tree = ast.parse(source)
    full_names: dict[str, str] = {}  # local name -> what it was imported as
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                full_names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            full_names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}

    def full_name(node: ast.AST) -> str:
        first, dot, rest = ast.unparse(node).partition(".")
        return full_names.get(first, first) + dot + rest

    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = full_name(node.func)
        arguments = [x.value if isinstance(x, ast.Constant) else full_name(x) for x in node.args]
        if function.startswith(("unittest.mock.patch", "mock.patch")):
            by_object = function.endswith((".object", ".multiple", ".dict")) and not isinstance(
                node.args[0], ast.Constant
            )
            found.append(".".join(map(str, arguments[: 1 + by_object])))
        elif function.split(".")[-1] in ("setattr", "setitem", "delattr", "delitem") and "onkey" in function:
            found.append(".".join(map(str, arguments[:2])))
    return found


def retired_names(source: str) -> list[str]:
    """Names of a module's code that were given up; in strings and comments they are words."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sorted({token.string for token in tokens if token.type == tokenize.NAME} & set(RETIRED_NAMES))


def retired_phrases(text: str) -> list[str]:
    return [phrase for phrase in RETIRED_PHRASES if re.search(phrase, text)]


def long_functions(source: str, most: int = 60) -> list[str]:
    """Functions with more lines than this, without their docstring."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            documented = ast.get_docstring(node, clean=False) is not None
            docstring = first.end_lineno - first.lineno + 1 if documented else 0
            if (lines := node.end_lineno - node.lineno + 1 - docstring) > most:
                found.append(f"{node.name}: expected at most {most} lines, got {lines}: split it into named steps")
    return found


def name_breaches(name: str) -> list[str]:
    vague = {"utils", "util", "_utils", "helpers"} & set(name.split("."))
    return [f"{name}: expected a name that says what is in it"] if vague else []


# --- the repository


@pytest.mark.parametrize("path", LIBRARY + RECIPES, ids=module_name)
def test_file(path):
    source, name = path.read_text(), module_name(path)
    assert import_breaches(source, name, path.name == "__init__.py") == []
    assert patch_breaches(source, name) == []
    assert sorted(replacements(source)) == sorted(REPLACED.get(name, {}))
    assert name_breaches(name) == []
    assert long_functions(source) == []


@pytest.mark.parametrize("path", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_retired_names_and_phrases(path):
    text = path.read_text()
    if path != Path(__file__):  # it lists them
        assert retired_phrases(text) == []
    if path.suffix == ".py":
        assert retired_names(text) == []


def test_there_is_something_to_check():
    names = {module_name(path) for path in LIBRARY + RECIPES}
    assert {"rlkit", "rlkit.losses.logprobs", "rlkit.engines.fsdp.fsdp2", "recipes.grpo_vlm"} <= names
    packages = {path.parent.relative_to(ROOT) for path in LIBRARY}
    assert all((ROOT / package / "__init__.py").is_file() for package in packages)


# --- the checkers


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("recipes.a", "import recipes.b"), ("recipes.a", "from recipes import grpo_vlm"),
        ("recipes.a", "import grpo_vlm"),
        ("recipes.a", "from . import b"), ("rlkit.engines.x", "import recipes"),
        ("rlkit.engines.x", "from rlkit.losses import token_mean"), ("rlkit.engines.x", "import rlkit.losses"),
        ("rlkit.engines.x", "from rlkit import losses"), ("rlkit.engines.x", "from rlkit.rollout import hf"),
        ("rlkit.engines.x", "from ..advantages import gae"), ("rlkit.engines.x", "from rlkit.losses.kl import kl_k3"),
        ("rlkit.engines.x", "def f():\n    import rlkit.advantages"),
        ("rlkit.engines.x", "import_module('rlkit.losses.kl')"),
        ("rlkit.rollout.x", "from rlkit.engines import make_engine"),
        ("rlkit.rollout.x", "from rlkit.losses.kl import f"),
        ("rlkit.data.x", "from rlkit.vlm import encode"), ("rlkit.data.x", "from rlkit.rewards import score"),
        ("rlkit.rewards.x", "from rlkit.data.tasks import Task"), ("rlkit.rewards.x", "import scipy"),
        ("rlkit.data.samples", "from rlkit.rewards.rules import exact_match"),
        ("rlkit.data.x", "def f():\n    from rlkit.losses import g"),
        ("rlkit.vlm.x", "from rlkit.data.tasks import Task"), ("rlkit.vlm.x", "from rlkit.data import Sample"),
        ("rlkit.losses.x", "from rlkit.data import unpad"),
        ("rlkit.advantages.x", "from rlkit.losses import token_mean"),
        ("rlkit.losses.x", "import numpy"), ("rlkit.losses.x", "def f():\n    import einops"),
        ("rlkit.advantages.x", "import scipy.stats"), ("rlkit.data.x", "import datasets"),
        ("rlkit.data.x", "class A:\n    import sklearn"), ("rlkit.data.x", "if True:\n    from transformers import X"),
        ("rlkit.vlm.x", "import transformers"), ("rlkit.vlm.x", "try:\n    import peft\nexcept ImportError:\n    pass"),
        ("rlkit.vlm.rope3d", "import numpy"), ("rlkit.data.packing", "from PIL import Image"),
        ("rlkit.data.packing", "def f():\n    import numpy"), ("rlkit.tracking", "import torch"),
        ("rlkit", "import torch"),
        ("rlkit.brand_new", "import os"),
        ("rlkit.engines.x", "from rlkit.runs import start_run"), ("rlkit.rollout.x", "import rlkit.runs.options"),
        ("rlkit.report", "from rlkit import runs"), ("rlkit.runs.x", "from recipes import ppo"),
        ("rlkit.engines.x", "import rlkit.plugins.trl"), ("rlkit.losses.x", "from rlkit import plugins"),
        ("rlkit.plugins.x", "from rlkit.engines import make_engine"),
    ],
)  # fmt: skip
def test_bad_import_is_found(name, line):
    assert import_breaches(line, name)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("recipes.a", "from rlkit.losses import x\nimport tyro"),
        ("rlkit.engines.x", "from rlkit.losses.logprobs import f"),
        ("rlkit.engines.x", "import transformers"), ("rlkit.rollout.x", "from rlkit.vlm.inputs import f\nimport vllm"),
        ("rlkit.vlm.x", "def f():\n    import transformers"), ("rlkit.vlm.x", "from rlkit.data.samples import Sample"),
        ("rlkit.data.x", "def f():\n    import datasets"),
        ("rlkit.data.x", "import numpy as np\nfrom PIL import Image"),
        ("rlkit.losses.x", "import math\nfrom torch import Tensor\nfrom rlkit._check import f"),
        ("rlkit.advantages.x", "from rlkit._check import f"), ("rlkit.data.x", "from . import packing"),
        ("rlkit.data.x", "from rlkit.rewards.rules import exact_match"),
        ("rlkit.rewards.x", "from rlkit.data.samples import Row\ndef f():\n    import scipy"),
        ("rlkit.report", "def f():\n    import jinja2"), ("rlkit.runs.x", "from rlkit.engines import make_engine"),
    ],
)  # fmt: skip
def test_good_import_passes(name, line):
    assert import_breaches(line, name) == []


@pytest.mark.parametrize(
    "snippet",
    [
        "import torch\ntorch.foo = 1", "import torch.nn as nn\nnn.Linear.forward = f",
        "import torch\ntorch.backends.x += 1",
        "import transformers\ntransformers.models.qwen2.X.forward = f", "from transformers import A\nA.forward = f",
        "from transformers.models import qwen2 as q\nq.attention = f", "from peft import X as Y\nY.a.b = 1",
        "from transformers import A\nsetattr(A, 'forward', f)", "import peft\nsetattr(peft.tuners, 'x', f)",
        "def g():\n    from transformers import A\n    A.forward = f", "import torch\n(a, torch.x) = 1, 2",
        "import torch\ntorch.x: int = 1", "import torch\ndel torch.x", "from transformers import MAP\nMAP['x'] = f",
        "import torch\nB = torch.nn.Linear\nB.forward = f", "import torch\nfor torch.x in y: pass",
        "import torch\nwith f() as torch.x: pass", "from torch import nn\ntype.__setattr__(nn.Linear, 'forward', f)",
    ],
)  # fmt: skip
def test_patch_is_found(snippet):
    assert patch_breaches(snippet, "x")


@pytest.mark.parametrize(
    "snippet",
    [
        "import torch\nx = torch.zeros(1)\nx.grad = None", "from torch import nn\nself.weight = nn.Parameter(x)",
        "from transformers import AttentionInterface\nAttentionInterface.register('mine', f)",
        "import torch\nx[torch.arange(3)] = 1", "import numpy\nnumpy.x = 1", "setattr(self, 'torch', 1)",
    ],
)  # fmt: skip
def test_what_is_no_patch_passes(snippet):
    assert patch_breaches(snippet, "x") == []


@pytest.mark.parametrize(
    ("snippet", "replaced"),
    [
        ("from unittest.mock import patch\nimport torch\nwith patch.object(torch.cuda, 'x', f): pass", "torch.cuda.x"),
        ("from unittest import mock\nmock.patch('transformers.a.b', f)", "transformers.a.b"),
        ("import unittest.mock as m\nfrom torch import cuda\nm.patch.object(cuda, 'x')", "torch.cuda.x"),
        ("from unittest.mock import patch as p\n@p('peft.x')\ndef f(): pass", "peft.x"),
        (
            "import unittest.mock\nfrom megatron.core import y\nunittest.mock.patch.object(y.A, 'b')",
            "megatron.core.y.A.b",
        ),
        ("from unittest.mock import patch\nfrom transformers import MAP\npatch.dict(MAP, a=1)", "transformers.MAP"),
        ("from pytest import MonkeyPatch\nimport torch\nMonkeyPatch().setattr(torch, 'x', f)", "torch.x"),
        ("from unittest.mock import patch\nfor a in b: patch.object(*a)", "*a"),
    ],
)
def test_replacement_is_found(snippet, replaced):
    assert replacements(snippet) == [replaced]


def test_code_without_replacements_passes():
    assert replacements("import torch\nsetattr(self, 'x', 1)\npatch.object(torch)\nself.patch('x')") == []


def test_vague_names_are_found():
    assert name_breaches("rlkit.utils") and name_breaches("rlkit.data.utils") and name_breaches("rlkit.utils.x")
    assert not name_breaches("rlkit.data.user_code")


def test_retired_names_and_phrases_are_found():
    assert retired_names("def f(mine):\n    return mine + x.whole_in_turn()\n") == ["mine", "whole_in_turn"]
    assert retired_names('"mine"  # mine\nx = my_mine\n') == []
    assert retired_phrases("than the machine's own moods") and not retired_phrases("the first step moves it")


def test_long_functions_are_found():
    text = 'def f():\n    """What it does.\n\n    And more."""\n    a = 1\n    return a\n'
    assert long_functions(text, 3) == [] and long_functions(text, 2) != []


# --- what an import costs, from an uninstalled checkout


def run_elsewhere(tmp_path: Path, code: str) -> list[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


TOPS = "sorted({m.partition('.')[0] for m in sys.modules})"


def test_losses_and_advantages_cost_torch_alone(tmp_path):
    extra = run_elsewhere(
        tmp_path,
        f"import sys, torch; a = set({TOPS}); import rlkit.losses, rlkit.advantages; print(*sorted(set({TOPS}) - a))",
    )
    assert set(extra) - sys.stdlib_module_names == {"rlkit"}


def test_rlkit_alone_imports_no_torch(tmp_path):
    tops = run_elsewhere(tmp_path, f"import sys; a = set({TOPS}); import rlkit; print(*sorted(set({TOPS}) - a))")
    assert "rlkit" in tops and not {"torch", "numpy", "transformers"} & set(tops)


def test_every_package_imports_from_an_uninstalled_checkout(tmp_path):
    modules = [module_name(path) for path in LIBRARY if path.name == "__init__.py"] + ["rlkit.tracking", "rlkit.report"]
    code = (
        f"import sys\nfor name in {modules}: __import__(name)\n"
        "import rlkit; print(rlkit.__file__)\n"
        f"print(*sorted({{'transformers', 'datasets', 'peft', 'sklearn', 'vllm'}} & set({TOPS})))"
    )
    file, *heavy = run_elsewhere(tmp_path, code)
    assert Path(file) == ROOT / "rlkit" / "__init__.py" and heavy == []


@pytest.mark.parametrize("first", ["rlkit.rewards", "rlkit.rewards.scoring", "rlkit.data.loading"])
def test_data_and_rewards_import_each_other_in_any_order(tmp_path, first):
    """Tasks name rewards, and rewards read samples; no module of one needs a half-imported one of the other."""
    assert run_elsewhere(tmp_path, f"import {first}, rlkit.data, rlkit.rewards; print('imported')") == ["imported"]
