"""Errors for the user of the package, and their format.

All of them are `SpmdError`s, which are `ValueError`s. A function that finds several problems
reports all of them in one error.
"""

import dataclasses
import difflib
import inspect
import math
import numbers
import operator
import os
import re
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_LONGEST = 2000
_ABOUT_FRAMES = "JAX_TRACEBACK_FILTERING"
_INDENTED = "\n        "  # a continuation line must not look like a problem of its own
_BOUNDS = {
    "above": operator.gt,
    "below": operator.lt,
    "at least": operator.ge,
    "at most": operator.le,
}


@dataclasses.dataclass(frozen=True, order=True)
class Problem:
    """One problem of an input.

    Attributes:
        where: The parameter path, field or file.
        what: A clause about it.
        detail: The arithmetic, or other evidence.
        fix: What the user can do.

    Example:
        >>> detail, fix = "7 / (fsdp=2) = 3.5", "drop fsdp"
        >>> print(Problem("mlp/kernel", "dimension 0 does not divide", detail, fix))
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
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}…"
    parts = []
    for character in text:
        if character == "\n":
            parts.append(line_break)
        elif character.isprintable():
            parts.append(character)
        else:
            parts.append(character.encode("unicode_escape").decode())
    return "".join(parts)


class SpmdError(ValueError):
    """Invalid input.

    `title` is one line about the operation that failed, `problems` has every reason, sorted.
    Commands exit with `exit_code`.
    """

    exit_code = 2

    def __init__(self, title: str, problems: Iterable[Problem] = ()) -> None:
        self.title = title
        self.problems = tuple(sorted({*problems}))
        lines = [title]
        for problem in self.problems:
            lines += [f"  {line}" for line in str(problem).split("\n")]
        super().__init__("\n".join(lines))


class Together:
    """Collect the errors of a block, and raise them as one at its end.

    An error that ends the block is one of them. The first of them that has all the problems is
    raised itself.

    Example:
        >>> with Together("Invalid plan:") as errors:
        ...     errors.add(ConfigError("It is too small:", [Problem("a", "is 0")]))
        ...     raise ConfigError("It is too large:", [Problem("b", "is 9")])
        Traceback (most recent call last):
        spmd.errors.ConfigError: Invalid plan:
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if isinstance(error, SpmdError):
            if not self.errors:
                return
            self.errors.append(error)
        elif error is not None or not self.errors:
            return
        problems = set[Problem]()
        for each in self.errors:
            problems.update(each.problems)
        for each in self.errors:
            if len(each.problems) == len(problems):
                raise each from None
        raise ConfigError(self.title, problems) from None


class MeshError(SpmdError):
    """Mesh axes and devices do not multiply, or a batch does not divide over the mesh."""


class RuleError(SpmdError):
    """A partition rule table does not fit the parameters."""


class AnnotationError(SpmdError):
    """An activation has a name unknown to the plan, or an indivisible shape."""


class ConfigError(SpmdError):
    """A field of the configuration has an invalid value."""


class ScheduleError(ConfigError):
    """A pipeline schedule cannot be built, read from its file, or executed."""


class CacheError(ConfigError):
    """A model does not support the cache of generation."""


class DataError(SpmdError):
    """A corpus is missing, empty, unreadable or too short."""


class BatchesEndedError(DataError):
    """The batches ended before the last step; `state` is the state after the last step taken."""

    def __init__(self, title: str, problems: Iterable[Problem], state: Any) -> None:
        super().__init__(title, problems)
        self.state = state


class StorageError(SpmdError):
    """An object store does not exist, refuses access, or does not answer.

    Attributes:
        is_transient: The same request may succeed later.
        is_damage: An object is absent, or differs from its checksum.
    """

    def __init__(
        self,
        title: str,
        problems: Iterable[Problem] = (),
        *,
        is_transient: bool = False,
        is_damage: bool = False,
    ) -> None:
        super().__init__(title, problems)
        self.is_transient = is_transient
        self.is_damage = is_damage


class CheckpointError(SpmdError):
    """A checkpoint is missing or does not fit, or a run folder is in use."""


class AgreementError(SpmdError):
    """Processes of one run are about to do different things."""


class BusyDeviceError(SpmdError):
    """Another process holds a device; a job may start again."""

    exit_code = os.EX_UNAVAILABLE


class RestartsError(SpmdError):
    """A restarted run without progress."""


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


def check_fields(
    config: Any, rules: Mapping[str, str | Sequence[Any]], prefix: str = ""
) -> list[Problem]:
    """Return a problem for each field of a dataclass with a value against its rule.

    Args:
        rules: Field or dotted path → the values it may have, or bounds as text, which is also the
            fix: terms `above 0`, `below 1`, `at least 1`, `at most 1` and `finite`, joined by
            `and`. None is within all bounds.

    Example:
        >>> print(*check_fields(Problem("a", "b"), {"where": ("data", "fsdp")}, prefix="problem."))
        problem.where: is 'a'
            fix: one of: data, fsdp
    """
    problems = []
    for field, rule in rules.items():
        value = operator.attrgetter(field)(config)
        where = prefix + field
        if isinstance(rule, str):
            if not _is_within(value, rule):
                problems.append(Problem(where, f"is {describe_value(value)}", fix=rule))
        elif value not in rule:
            fix = did_you_mean(str(value), map(str, rule))
            problems.append(Problem(where, f"is {value!r}", fix=fix))
    return problems


def _is_within(value: Any, bounds: str) -> bool:
    """Return whether a value keeps to all terms of its bounds; None does."""
    if value is None:
        return True
    return all(_holds(value, term) for term in bounds.split(" and "))


def _holds(value: Any, term: str) -> bool:
    """Return whether a value keeps to one term of its bounds, such as `at least 1`."""
    if not isinstance(value, numbers.Real):
        return False
    if term == "finite":
        return math.isfinite(value)
    word, _, bound = term.rpartition(" ")
    return _BOUNDS[word](value, float(bound))


def reason_of(error: BaseException) -> str:
    """Return the whole reason of an exception, without notes added to it.

    The first line alone would often be no reason: JAX names what differs in the lines after it.

    Example:
        >>> reason_of(KeyError("w"))
        "KeyError: 'w'"
        >>> reason_of(TypeError("carry types differ:\\n  float32[] and float32[3]"))
        'carry types differ:\\n  float32[] and float32[3]'
    """
    text = str(error).strip()
    if not text:
        return type(error).__name__
    if isinstance(error, KeyError):  # its text is the key alone
        return f"{type(error).__name__}: {text}"
    return text


def print_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
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
    if isinstance(value, kinds):
        return []
    return [Problem(where, f"is {describe_value(value)}", fix=fix)]


def check_call(where: str, function: Any, parameters: str, fix: str = "") -> list[Problem]:
    """Return a problem if an argument is no function of parameters such as `"params, batch"`."""
    what = f"is {describe_value(function)}"
    try:
        if callable(function):
            inspect.signature(function).bind(*parameters.split(", "))
            return []
    except ValueError:  # a builtin without a signature
        return []
    except TypeError:
        taken = ", ".join(inspect.signature(function).parameters)
        what = f"takes {taken or 'nothing'}"
    return [Problem(where, what, fix=fix or f"a function of ({parameters})")]


def describe_value(value: Any) -> str:
    """Return a value in a few words.

    Numbers and texts are as they are written; arrays are their dtype and shape, and all others
    their type.
    """
    if isinstance(value, str):
        return repr(value)
    if value is None or isinstance(value, numbers.Number):
        return str(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    kind = type(value).__name__
    if kind[0] in "AEIOU":
        return f"an {kind}"
    return f"a {kind}"


def first_of(problems: Iterable[Problem], at_most: int = 100) -> list[Problem]:
    """Return the first problems and the number of the others.

    An untrusted file must not determine the length.

    Example:
        >>> print(*first_of([Problem(name, "is missing") for name in "cab"], at_most=2))
        a: is missing b: is missing …: and 1 more
    """
    found = sorted(problems)
    more = len(found) - at_most
    if more <= 0:
        return found
    return [*found[:at_most], Problem("…", f"and {more:,} more")]


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
    if not choices:
        return "there are none"
    return f"one of: {', '.join(choices)}"


def shorten(value: Any, most: int = 80) -> str:
    """Return a value as Python writes it, in about `most` characters.

    Lists and mappings lose whole items, texts their end.

    Example:
        >>> shorten(["full", "window", "full", "window", "full"], most=20)
        "['full', 'window', … 3 more]"
        >>> shorten({"rope_type": "yarn", "factor": 4.0})
        "{'rope_type': 'yarn', 'factor': 4.0}"
        >>> shorten("a" * 30, most=10)
        "'aaaaaaaaa…"
    """
    text = repr(value)
    if len(text) <= most:
        return text
    if isinstance(value, Mapping):
        entries = [f"{shorten(key, most)}: {shorten(of, most)}" for key, of in value.items()]
        return "{" + join_first(entries, most) + "}"
    if isinstance(value, list | tuple):
        entries = [shorten(item, most) for item in value]
        return "[" + join_first(entries, most) + "]"
    return f"{text[:most]}…"


def join_first(items: Iterable[str], most: int) -> str:
    """Return the first items, in about `most` characters, and the number of the others.

    Example:
        >>> join_first(["data", "fsdp", "tensor"], most=12)
        'data, fsdp, … 1 more'
    """
    items = list(items)
    shown: list[str] = []
    length = 0
    for item in items:
        length += len(item) + 2
        if shown and length > most:
            shown.append(f"… {len(items) - len(shown)} more")
            break
        shown.append(item)
    return ", ".join(shown)


def any_of(choices: Iterable[Any]) -> str:
    """Return choices as a remedy: any of them will do.

    Example:
        >>> any_of([0, 1, 2]), any_of(["bf16"])
        ('0, 1 or 2', 'bf16')
    """
    *others, last = map(str, choices)
    if not others:
        return last
    return f"{', '.join(others)} or {last}"


_ADDRESS = re.compile(r"(?:^|[=:,])([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_ADDRESS_AS_PATH = re.compile(r"^([a-z][a-z0-9+.-]+):/", re.IGNORECASE)


def check_local(where: str, paths: Any) -> list[Problem]:
    """Return a problem for each path that is an address, such as that of a bucket.

    Python would take it for the name of a local folder.

    Args:
        paths: A path or several; of a text `NAME=PATH`, the path is checked.

    Example:
        >>> print(*check_local("out", "gs://bucket/run"))
        out: is 'gs://bucket/run', and only local paths are read and written
            fix: mount the bucket (gcsfuse, mountpoint-s3), and give a folder of it
        >>> check_local("data.source", ["books", "/mnt/bucket/run"])
        []
    """
    if isinstance(paths, Path):  # which makes one slash of two
        paths = _ADDRESS_AS_PATH.sub(r"\1://", str(paths))
    if isinstance(paths, str):
        paths = [paths]
    problems: list[Problem] = []
    if not isinstance(paths, list | tuple):
        return problems
    for path in paths:
        if isinstance(path, str) and _ADDRESS.search(path):
            what = f"is {path!r}, and only local paths are read and written"
            fix = "mount the bucket (gcsfuse, mountpoint-s3), and give a folder of it"
            problems.append(Problem(where, what, fix=fix))
    return problems


def nearest_file(path: Path, also: Iterable[str] = ()) -> str:
    """Return the sibling nearest to a missing path, or one of `also`, as a question.

    Without a near one, return its folder.
    """
    names = list(also)
    if path.parent.is_dir():
        for sibling in path.parent.iterdir():
            names.append(sibling.name)
    question = did_you_mean(path.name, names)
    if question.endswith("?"):
        return question
    return f"look in {path.parent}"
