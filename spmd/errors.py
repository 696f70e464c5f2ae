"""Errors that a user can cause, and their format.

All of them are `SpmdError`s, which are `ValueError`s. A function that finds several problems reports all of them in one
error.
"""

import dataclasses
import difflib
import inspect
import math
import numbers
import operator
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_LONGEST = 2000
_ABOUT_FRAMES = "JAX_TRACEBACK_FILTERING"
_INDENTED = "\n        "  # a continuation line must not look like a problem of its own
_BOUNDS = {"above": operator.gt, "below": operator.lt, "at least": operator.ge, "at most": operator.le}


@dataclasses.dataclass(frozen=True, order=True)
class Problem:
    """One problem of an input: its parameter path, field or file; a clause; the arithmetic; what the user can do.

    Example:
        >>> print(Problem("mlp/kernel", "dimension 0 does not divide", "7 / (fsdp=2) = 3.5", "drop fsdp"))
        mlp/kernel: dimension 0 does not divide
            7 / (fsdp=2) = 3.5
            fix: drop fsdp
    """

    where: str
    what: str
    detail: str = ""
    fix: str = ""

    def __str__(self) -> str:
        lines = [f"{_escape(self.where)}: {_escape(self.what, _INDENTED)}"]
        if self.detail:
            lines.append(f"    {_escape(self.detail, _INDENTED)}")
        if self.fix:
            lines.append(f"    fix: {_escape(self.fix, _INDENTED)}")
        return "\n".join(lines)


def _escape(text: str, line_break: str = r"\n") -> str:
    """Escape control characters and cut the length: names may come from untrusted files."""
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(line_break if c == r"\n" else c for c in escaped)


class SpmdError(ValueError):
    """Invalid input; `title` is one line about the operation that failed, `problems` has every reason, sorted."""

    def __init__(self, title: str, problems: Iterable[Problem] = ()) -> None:
        self.title = title
        self.problems = tuple(sorted({*problems}))
        super().__init__("\n".join([title, *(f"  {line}" for p in self.problems for line in str(p).split("\n"))]))


class Together:
    """Raises errors as one: those that were added inside of a block, and the one that ends it.

    The first of them that has all the problems is raised itself.

    Example:
        >>> with Together("This plan cannot be made:") as errors:
        ...     errors.add(ConfigError("It is too small:", [Problem("a", "is 0")]))
        ...     raise ConfigError("It is too large:", [Problem("b", "is 9")])
        Traceback (most recent call last):
        spmd.errors.ConfigError: This plan cannot be made:
          a: is 0
          b: is 9
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.errors = list[SpmdError]()

    def add(self, error: SpmdError) -> None:
        """Raise an error later, if it has problems."""
        if error.problems:
            self.errors.append(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, SpmdError):
            if not self.errors:
                return
            self.errors.append(error)
        elif error is not None or not self.errors:
            return
        problems = {problem for each in self.errors for problem in each.problems}
        for each in self.errors:
            if len(each.problems) == len(problems):
                raise each from None
        raise ConfigError(self.title, problems) from None


class MeshError(SpmdError):
    """Mesh axes and devices do not multiply, or a batch does not divide over the mesh."""


class RuleError(SpmdError):
    """A partition rule table does not fit the parameters."""


class AnnotationError(SpmdError):
    """An activation has a name that the plan does not know, or a shape that it cannot split."""


class ConfigError(SpmdError):
    """A field of the configuration has an invalid value."""


class ScheduleError(ConfigError):
    """A pipeline schedule cannot be built, read from its file, or executed."""


class CacheError(ConfigError):
    """Attention does not support a KV cache."""


class DataError(SpmdError):
    """A corpus is missing, empty, unreadable or too short."""


class BatchesEndedError(DataError):
    """The batches ended before the last step; `state` is the state after the last step taken."""

    def __init__(self, title: str, problems: Iterable[Problem], state: Any) -> None:
        super().__init__(title, problems)
        self.state = state


class CheckpointError(SpmdError):
    """A checkpoint is missing or does not fit, or a run folder is in use."""


class AgreementError(SpmdError):
    """Processes of one run are about to do different things."""


class DivergenceError(SpmdError):
    """A step diverged; `step` is its number."""

    def __init__(self, title: str, problems: Iterable[Problem], step: int) -> None:
        super().__init__(title, problems)
        self.step = step


class NonFiniteError(DivergenceError):
    """The loss or a gradient is NaN or infinite."""


class SpikeError(DivergenceError):
    """The loss is far above its running median."""


class DataCorruptionError(SpmdError):
    """A device computed or stored wrong bits: silent data corruption."""


def check_fields(config: Any, rules: Mapping[str, str | Sequence[Any]], prefix: str = "") -> list[Problem]:
    """Return a problem for each field of a dataclass that breaks its rule.

    Args:
        rules: Field or dotted path → the values it may have, or bounds as text, which is also the fix: terms `above 0`,
            `below 1`, `at least 1`, `at most 1` and `finite`, joined by `and`. None is within all bounds.

    Example:
        >>> print(*check_fields(Problem("a", "b"), {"where": ("data", "fsdp")}, prefix="problem."))
        problem.where: is 'a'
            fix: one of: data, fsdp
    """
    problems = []
    for field, rule in rules.items():
        value = operator.attrgetter(field)(config)
        if not isinstance(rule, str):
            if value not in rule:
                fix = did_you_mean(str(value), map(str, rule))
                problems.append(Problem(prefix + field, f"is {value!r}", fix=fix))
        elif value is not None and not all(_holds(value, term) for term in rule.split(" and ")):
            problems.append(Problem(prefix + field, f"is {shown(value)}", fix=rule))
    return problems


def _holds(value: Any, term: str) -> bool:
    if not isinstance(value, numbers.Real):
        return False
    if term == "finite":
        return math.isfinite(value)
    word, _, bound = term.rpartition(" ")
    return _BOUNDS[word](value, float(bound))


def reason_of(error: BaseException) -> str:
    """Return the whole reason of an exception, without the notes that others added to it.

    The first line alone would often be no reason: JAX names what differs in the lines after it.

    Example:
        >>> reason_of(KeyError("w")), reason_of(TypeError("carry types differ:\\n  float32[] and float32[3]"))
        ("KeyError: 'w'", 'carry types differ:\\n  float32[] and float32[3]')
    """
    text = str(error).strip()
    if not text:
        return type(error).__name__
    return f"{type(error).__name__}: {text}" if isinstance(error, KeyError) else text


def print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception as Python does, to be `sys.excepthook`, with the reason as its last lines.

    A note of JAX, that its own frames are not shown, would follow it and is printed first.
    """
    printed = traceback.TracebackException(kind, error, trace)
    each: traceback.TracebackException | None = printed
    notes = list[str]()
    while each is not None:
        own = list(each.__notes__ or ())
        notes += (note for note in own if _ABOUT_FRAMES in note)
        each.__notes__ = [note for note in own if _ABOUT_FRAMES not in note]
        each = each.__cause__ or each.__context__
    lines = [note.strip("-\n") + "\n" for note in dict.fromkeys(notes)]
    print("".join([*lines, *printed.format()]), end="", file=sys.stderr, flush=True)


def check_type(where: str, value: Any, kinds: type | tuple[type, ...], fix: str) -> list[Problem]:
    """Return a problem if an argument is of none of these types."""
    return [] if isinstance(value, kinds) else [Problem(where, f"is {shown(value)}", fix=fix)]


def check_call(where: str, function: Any, parameters: str, fix: str = "") -> list[Problem]:
    """Return a problem if an argument is no function of these parameters, such as `"params, batch"`."""
    what = f"is {shown(function)}"
    try:
        if callable(function):
            inspect.signature(function).bind(*parameters.split(", "))
            return []
    except ValueError:  # a builtin without a signature
        return []
    except TypeError:
        what = f"takes {', '.join(inspect.signature(function).parameters) or 'nothing'}"
    return [Problem(where, what, fix=fix or f"a function of ({parameters})")]


def shown(value: Any) -> str:
    """Return a value in a few words: numbers and texts as they are written, shapes of arrays, types of the rest."""
    if value is None or isinstance(value, str | numbers.Number):
        return repr(value) if isinstance(value, str) else str(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind}"


def first_of(problems: Iterable[Problem], at_most: int = 100) -> list[Problem]:
    """Return the first problems and the number of the others: an untrusted file must not determine the length.

    Example:
        >>> print(*first_of([Problem(name, "is missing") for name in "cab"], at_most=2))
        a: is missing b: is missing …: and 1 more
    """
    found = sorted(problems)
    more = len(found) - at_most
    return found if more <= 0 else [*found[:at_most], Problem("…", f"and {more:,} more")]


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return the choice nearest to `word` as a question, or all choices if none is near.

    Example:
        >>> did_you_mean("fsd", ["data", "fsdp"])
        'did you mean "fsdp"?'
        >>> did_you_mean("zz", ["data", "fsdp"])
        'one of: data, fsdp'
    """
    choices = list(choices)
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    if near:
        return f'did you mean "{near[0]}"?'
    return f"one of: {', '.join(choices)}" if choices else "there are none"


def nearest_file(path: Path, also: Iterable[str] = ()) -> str:
    """Return the sibling nearest to a path that does not exist, or one of `also`, as a question; else its folder."""
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    question = did_you_mean(path.name, [*also, *siblings])
    return question if question.endswith("?") else f"look in {path.parent}"
