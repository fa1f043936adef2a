"""Write constraints.txt and docs/dependencies.md: the version and the licence of all that the tests install.

python docs/make_dependencies.py    # in the environment of `make setup-all`, when its versions have changed

Both list what the extra all-cpu of setup.cfg leads to on this machine: no builds for CUDA, and no packages of other
platforms.
"""

import configparser
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCK, PAGE = ROOT / "constraints.txt", ROOT / "docs" / "dependencies.md"
INSTALLERS = {"pip", "setuptools", "wheel"}  # an environment has its own
LOCK_HEADER = """# Versions of everything that the tests install without a GPU. docs/make_dependencies.py writes this.
# Nothing here pulls CUDA builds where a CPU build of torch is at hand. CUDA builds of torch and
# of vLLM accept these versions, too: pip install -c constraints.txt -e '.[all-gpu]'
"""
PAGE_HEADER = """# Dependencies and their licences

rlkit is under the Apache License 2.0. It installs torch and einops, and its losses import only torch; the extras of
`setup.cfg` install the rest. This page lists everything that `make setup-all` installs for the tests, with the licence
that each package declares. `docs/make_dependencies.py` writes it.

- `constraints.txt` pins the versions for CI. `setup.cfg` has the bounds for users.
- `make audit` compares the pinned versions with the database of known vulnerabilities; it needs to reach pypi.org.
- `make sbom` writes `build/rlkit.cdx.json`, a bill of materials (CycloneDX) of the environment, for a release.

| package | version | licence |
|---|---|---|
"""


def requirements(extra: str = "") -> Iterator[Requirement]:
    """What setup.cfg asks for, with an extra and those that it includes."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    listed = settings["options.extras_require"][extra] if extra else settings["options"]["install_requires"]
    for line in listed.splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            if requirement.name != settings["metadata"]["name"]:
                yield requirement
            for included in requirement.extras if requirement.name == settings["metadata"]["name"] else ():
                yield from requirements(included)


def installed() -> dict[str, metadata.Distribution]:
    """Distributions that the extra all-cpu leads to, by name; those that are not installed are left out."""
    found: dict[str, metadata.Distribution] = {}
    waiting, seen = [*requirements(), *requirements("all-cpu")], set()
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        for line in found[name].requires or ():
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                waiting.append(needed)
    return dict(sorted(found.items()))


def licence(distribution: metadata.Distribution) -> str:
    """The licence that a package states: an SPDX expression, classifiers, or the first line of a text; "" if none."""
    stated = distribution.metadata
    if expression := stated.get("License-Expression"):
        return expression
    classified = [x.rpartition(":: ")[2] for x in stated.get_all("Classifier") or () if x.startswith("License :: ")]
    if classified and classified != ["OSI Approved"]:
        return ", ".join(classified)
    texts = [
        stated.get("License"),
        *(distribution.read_text(f"licenses/{x}") for x in stated.get_all("License-File") or ()),
    ]
    return next((text.strip().partition("\n")[0] for text in texts if text and text.strip()), "")


def main() -> None:
    found = {name: one for name, one in installed().items() if name not in INSTALLERS}
    pins = [f"{name}=={one.version.partition('+')[0]}\n" for name, one in found.items()]  # without +cpu
    LOCK.write_text(LOCK_HEADER + "".join(pins))
    rows = [f"| {name} | {one.version} | {licence(one) or 'unknown'} |\n" for name, one in found.items()]
    PAGE.write_text(PAGE_HEADER + "".join(rows))


if __name__ == "__main__":
    main()
