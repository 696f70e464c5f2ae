"""Only `spmd.chips` names kinds of chips: every other module reads a field of an entry."""

import ast
import re

import pytest

from spmd.chips import CHIPS, known_peaks
from tests.architecture.test_core import docstrings
from tests.architecture.test_floors import FAMILIES, Module, read_modules

PACKAGES = ("spmd", *(f"spmd/{name}" for name in FAMILIES))
NAMES = {
    *(name for chip in CHIPS.values() for name in (chip.kind, chip.device_kind, chip.words)),
    *known_peaks(),
} - {"cpu"}
"""Every name of a chip, in a topology and in JAX; `cpu` is a platform too."""
MENTION = re.compile("|".join(map(re.escape, sorted(NAMES))), re.IGNORECASE)


def named_chips(module: Module) -> list[str]:
    """Strings that are the name of a chip, or several of them in a pattern, but for docstrings."""
    if not MENTION.search(module.source):  # parsing all of them takes seconds
        return []
    described = set(map(id, docstrings(module.tree)))
    names = {name.lower() for name in NAMES}
    found = []
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        words = {word.strip().lower() for word in re.split(r"[^\w ]", node.value)} - {""}
        if id(node) not in described and words and words <= names:
            found.append(f"{module.name}:{node.lineno} names {node.value!r}")
    return found


def test_no_other_module_names_a_chip() -> None:
    """Neither in a table nor in a comparison: each reads a field of the entry."""
    modules = read_modules(*PACKAGES)
    entries = modules.pop("spmd.chips")
    assert not [line for module in modules.values() for line in named_chips(module)]
    assert len(named_chips(entries)) >= 2 * (len(CHIPS) - 1)


@pytest.mark.parametrize(
    "source",
    [
        "flags = {'TPU v5 lite': 1}",
        "is_old = chip.kind == 'v4'",
        "if device.device_kind.startswith('TPU7x'): pass",
        "fast = {'b200'} | others",
        "match kind:\n    case 'h100': pass",
        "found = re.search('A100|H100', kind)",
        "if 'h100 pcie' in kind.lower(): pass",
        "speeds = HARDWARE['v5e']",
    ],
)
def test_control_a_name_is_found(source: str) -> None:
    """In whatever form code compares it."""
    assert len(named_chips(Module("spmd.a", source))) == 1


def test_control_texts_are_free() -> None:
    """A docstring, a comment, an example in a message and the name of a platform are none."""
    source = '"""v5e"""\nx = 1  # H100\n"""TPU7x"""\nfix = "such as v5e:16x16"\ny = "cpu"\n'
    assert not named_chips(Module("spmd.a", source))
