"""The dependency floors are true: each is the version that the suite runs on, pinned by name and version alone."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[0-9][0-9a-z.]*)")


def read_pins(text: str) -> tuple[dict[str, Version], list[str]]:
    """The pins of a constraints file, and the lines that are neither a pin nor a comment."""
    pins, strange = {}, []
    for line in text.splitlines():
        if match := PIN.fullmatch(line):
            pins[canonicalize_name(match["name"])] = Version(match["version"])
        elif line and not line.startswith("#"):
            strange.append(line)
    return pins, strange


def untrue_floors(requirements: list[str], pins: dict[str, Version]) -> list[str]:
    """The requirements whose one version is not the pinned one."""
    untrue = []
    for text in requirements:
        requirement = Requirement(text)
        floors = [Version(s.version) for s in requirement.specifier if s.operator in (">=", "==")]
        if floors != [pins.get(canonicalize_name(requirement.name))]:
            untrue.append(text)
    return untrue


def test_floors_are_pinned() -> None:
    """Every dependency has one floor, and it is the version in constraints.txt."""
    pins, strange = read_pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [text for extra in project["optional-dependencies"].values() for text in extra]
    assert not strange
    assert not untrue_floors(project["dependencies"] + extras, pins)


def test_floors_are_pinned_control() -> None:
    """A floor that differs from its pin, a missing pin or floor, and a line with a URL or a hash are found."""
    pins, strange = read_pins(
        "# why\na==1.2.0\nB_c==3\nd @ https://x.invalid/d.whl\ne==1 --hash=x\nf>=2\n"
    )
    assert strange == ["d @ https://x.invalid/d.whl", "e==1 --hash=x", "f>=2"]
    assert untrue_floors(["a>=1.2", "b-c==3", "a>=1.1", "a", "z>=1"], pins) == [
        "a>=1.1",
        "a",
        "z>=1",
    ]
