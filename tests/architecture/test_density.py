"""A statement does one thing: how much each does is measured by logical lines, so no formatter changes a figure.

The bars are what widely read packages of this field keep (optax, kauldron, penzai, equinox,
levanter, grain; measured on 25 November 2026): medians of 5 to 7 tokens; for 100 statements 0.4 to
2.2 conditional expressions and 0.7 to 2.7 comprehensions, of which 0.02 to 0.46 are inside of one
another.
"""

import ast
import collections
import io
import shutil
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BARS = {
    "median": 7.0,
    "conditional": 2.0,
    "assignment": 0.2,
    "comprehension": 3.0,
    "nested": 0.3,
    "long": 0.5,
}
"""Tokens of the median statement; conditional and assignment expressions, comprehensions, those of the three inside of
one another, and statements above `LONG` tokens, for 100 statements."""
LONG = 40
WIDEST = 100
MOST_WIDE = 0.5
"""Columns of a line, and the lines above them for 100 lines."""

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_INSIDE = (*_COMPREHENSIONS, ast.IfExp, ast.NamedExpr)
_TOKENS = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
_BRACKETS = set(",()[]{}")


def measure(source: str) -> tuple[list[int], collections.Counter[str]]:
    """The tokens of each statement of a source text, without docstrings, and the counts of `BARS`."""
    tree = ast.parse(source)
    strings, tables = set[int](), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            strings.update(range(node.lineno, (node.end_lineno or 0) + 1))
        elif isinstance(node, ast.stmt) and is_table(node):
            tables.add(node.lineno)
    counts = collections.Counter[str]()
    for node in ast.walk(tree):
        counts["conditional"] += isinstance(node, ast.IfExp)
        counts["assignment"] += isinstance(node, ast.NamedExpr)
        counts["comprehension"] += isinstance(node, _COMPREHENSIONS)
        if isinstance(node, _INSIDE):
            inner = sum(isinstance(child, _INSIDE) for child in ast.walk(node))
            counts["nested"] += inner > 1
    sizes, size, start = [], 0, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_code = token.type in _TOKENS and token.string not in _BRACKETS
        if is_code and token.start[0] not in strings:
            start = start if size else token.start[0]
            size += 1
        if token.type == tokenize.NEWLINE and size:
            sizes.append(size)
            counts["long"] += size > LONG and start not in tables
            size = 0
    return sizes, counts


def is_table(node: ast.stmt) -> bool:
    """Whether a statement only names things: a literal, a call of keyword arguments, a signature, an import."""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef):
        return True
    value = getattr(node, "value", None)
    return isinstance(value, ast.Dict | ast.List | ast.Tuple | ast.Set | ast.Call)


def figures(sources: Iterable[str]) -> dict[str, float]:
    """The figures of `BARS` of some source texts together."""
    sizes, counts = [], collections.Counter[str]()
    for source in sources:
        found, added = measure(source)
        sizes += found
        counts += added
    rates = {name: 100 * counts[name] / len(sizes) for name in BARS if name != "median"}
    return {"median": statistics.median(sizes), **rates}


def folders() -> dict[str, list[Path]]:
    """Folder → its modules; models are one, as a family alone is imports and tables."""
    found = collections.defaultdict[str, list[Path]](list)
    for path in sorted((ROOT / "spmd").rglob("*.py")):
        if not any(parent.is_symlink() for parent in path.parents):
            found[str(path.parent.relative_to(ROOT))].append(path)
    found["models"] = sorted((ROOT / "models").rglob("*.py"))
    return dict(found)


def above(measured: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in measured.items() if value > BARS[name]}


@pytest.mark.parametrize("folder", sorted(folders()))
def test_a_folder_is_as_readable_as_the_field(folder: str) -> None:
    """Each folder is within the bars."""
    paths = folders()[folder]
    if not any(path.read_text(encoding="utf-8").strip() for path in paths):
        return
    found = above(figures(path.read_text(encoding="utf-8") for path in paths))
    assert not found


def wide_lines(source: str) -> int:
    """The number of lines above `WIDEST` columns."""
    return sum(len(line) > WIDEST for line in source.splitlines())


@pytest.mark.parametrize("folder", sorted(folders()))
def test_lines_are_at_most_100_columns_wide(folder: str) -> None:
    """But for one of two hundred: long strings."""
    sources = [path.read_text(encoding="utf-8") for path in folders()[folder]]
    lines = sum(len(source.splitlines()) for source in sources)
    assert 100 * sum(map(wide_lines, sources)) <= MOST_WIDE * lines


def test_control_a_wide_line_is_counted() -> None:
    """One of 101 columns is, and one of 100 is not."""
    assert wide_lines(f"x = {'1' * 97}\ny = {'1' * 96}\n") == 1


DENSE = """
kept = {path: (x if x.ndim else None) for path, x in found.items() if (shape := x.shape) and all(n for n in shape)}
"""


def test_control_dense_source_is_above_the_bars() -> None:
    """A statement that does five things breaks every bar."""
    assert set(above(figures([DENSE]))) == {
        "median",
        "conditional",
        "assignment",
        "comprehension",
        "nested",
    }


def test_control_a_formatter_changes_no_figure(tmp_path: Path) -> None:
    """At a width of 50 columns the figures are the same, within 5 %."""
    paths = folders()["spmd/sharding"]
    before = figures(path.read_text(encoding="utf-8") for path in paths)
    narrow = [Path(shutil.copy(path, tmp_path / path.name)) for path in paths]
    command = [
        sys.executable,
        "-m",
        "ruff",
        "format",
        "-q",
        "--line-length",
        "50",
        *map(str, narrow),
    ]
    subprocess.run(command, check=True)
    after = figures(path.read_text(encoding="utf-8") for path in narrow)
    for name, value in before.items():
        assert after[name] == pytest.approx(value, rel=0.05, abs=0.02), name
