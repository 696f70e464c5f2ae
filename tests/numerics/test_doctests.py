"""Every example in a docstring runs, and prints what it says."""

import doctest
import importlib
import re
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for package in ("spmd", "models", "partition_rules", "name_maps")
    for path in sorted((ROOT / package).rglob("*.py"))
]


def run_doctests(module: types.ModuleType, source: str) -> None:
    """Run the examples of a module; fail on a wrong one, and on one that is written where doctest does not look."""
    written = len(re.findall(r"^\s*>>> ", source, re.M))
    results = doctest.testmod(module)
    assert results.failed == 0, "see the captured output"
    assert results.attempted == written, (
        f"{written} examples are written and {results.attempted} ran"
    )


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name: str) -> None:
    """The examples of a module all run, and print what they say."""
    module = importlib.import_module(name)
    assert module.__file__ is not None
    run_doctests(module, Path(module.__file__).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("docstring", "source", "problem"),
    [
        (">>> 1 + 1\n2", ">>> 1 + 1", None),
        (">>> 1 + 1\n3", ">>> 1 + 1", "captured"),
        ("", ">>> 1 + 1", "1 examples"),
    ],
    ids=["right", "wrong", "hidden"],
)
def test_doctests_control(docstring: str, source: str, problem: str | None) -> None:
    """A wrong example fails, and so does one that never ran."""
    module = types.ModuleType("example", docstring)
    if problem is None:
        run_doctests(module, source)
    else:
        with pytest.raises(AssertionError, match=problem):
            run_doctests(module, source)
