"""Summaries of docstrings are nouns and imperatives: relative clauses are rare, as in optax and kauldron.

Measured on 25 November 2026 in the same way: optax 1 % of summaries, kauldron 2 %, equinox 4 %.
"""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.test_density import folders

MOST = 0.04
"""Share of the summaries with a relative clause."""

_RELATIVE = re.compile(r"\b(what|whose|which|whom|who|that)\b")
_CONJUNCTION = re.compile(r"\b(so|such|checks?) that\b", re.IGNORECASE)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def summaries(source: str) -> Iterator[str]:
    """Yield the first paragraph of each docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED):
            text = ast.get_docstring(node)
            if text:
                yield " ".join(text.split("\n\n")[0].split())


def has_relative_clause(summary: str) -> bool:
    """Whether a summary has a relative word, beside "so that" and "check that"."""
    return bool(_RELATIVE.search(_CONJUNCTION.sub("", summary)))


@pytest.mark.parametrize("folder", sorted(folders()))
def test_summaries_are_nouns_and_imperatives(folder: str) -> None:
    """Of each folder at most a few have a relative clause."""
    found = [text for path in folders()[folder] for text in summaries(path.read_text("utf-8"))]
    relative = [text for text in found if has_relative_clause(text)]
    assert len(relative) <= MOST * len(found), "\n".join(relative)


@pytest.mark.parametrize(
    ("summary", "has_clause"),
    [
        ("Return what is sent of one layer's parameter.", True),
        ("Arrays whose layout is ambiguous.", True),
        ("Return the communication format of a parameter.", False),
        ("Concatenate gradients so that one all-reduce suffices.", False),
    ],
)
def test_control_relative_clauses_are_found(summary: str, has_clause: bool) -> None:
    """A clause of each kind is one, a conjunction is none."""
    (found,) = summaries(f'def f():\n    """{summary}\n\n    More.\n    """')
    assert has_relative_clause(found) == has_clause
