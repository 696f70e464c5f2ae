"""Regular expressions over parameter paths, with a time limit.

`regex` is `re` with a time limit, which a pattern such as `(a+)+b` needs; lookarounds work.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import regex

from spmd.errors import Problem, RuleError

PatternError = regex.error
"""The error for a text that is no regular expression."""

MATCH_SECONDS = 2.0
"""Seconds that a pattern may take for one path."""


@dataclasses.dataclass(frozen=True)
class PathPattern:
    """A compiled expression; a match slower than `MATCH_SECONDS` raises a `RuleError`."""

    expression: Any

    def fullmatch(self, path: str) -> bool:
        """Return whether the expression matches the whole path."""
        return self._within_limit(self.expression.fullmatch, path)

    def search(self, path: str) -> bool:
        """Return whether the expression matches somewhere in the path."""
        return self._within_limit(self.expression.search, path)

    def _within_limit(self, match: Callable[..., Any], path: str) -> bool:
        try:
            return match(path, timeout=MATCH_SECONDS) is not None
        except TimeoutError as error:
            what = f"takes more than {MATCH_SECONDS:g} s to match {path}"
            fix = "write it without a repetition inside of a repetition"
            problem = Problem(f"pattern {self.expression.pattern!r}", what, fix=fix)
            raise RuleError("Pattern with exponential backtracking:", [problem]) from error


@functools.cache
def compile_search(pattern: str) -> PathPattern:
    """Compile a regular expression unchanged; raise a `PatternError` if it is invalid."""
    return PathPattern(regex.compile(pattern))


@functools.cache
def compile_pattern(pattern: str) -> PathPattern:
    """Compile a rule's pattern into an expression for `fullmatch` on whole paths.

    Raise a `PatternError` if it is invalid.

    Example:
        >>> compile_pattern("wo/kernel").fullmatch("attention/wo/kernel")
        True
        >>> compile_pattern("attention/wo").fullmatch("cross_attention/wo")
        False
    """
    compile_search(pattern)  # so that positions in an error are those of the pattern
    return compile_search(rf"(?:.*/)?(?:{pattern})")
