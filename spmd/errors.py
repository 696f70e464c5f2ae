"""Every error a user can cause, and the one way they are written.

```
SpmdError                    something is wrong with what was asked; `.problems` lists all of it
├── MeshError                axes and devices do not multiply, or a batch does not divide
├── RuleError                a partition rule table does not fit the parameters
├── AnnotationError          an activation name that the plan does not know, or a shape it cannot split
├── ConfigError              a field of the configuration
│   ├── ScheduleError        a pipeline schedule that cannot be built, read or finished
│   └── CacheError           attention whose keys and values cannot be kept
├── DataError                a corpus that is missing, empty or too short
├── CheckpointError          a checkpoint that does not fit, or a run folder in use
├── AgreementError           processes of one run are about to do different things
├── DivergenceError          a step whose numbers cannot be trusted
│   ├── NonFiniteError       the loss or a gradient is NaN or infinite
│   └── SpikeError           the loss is far above what it was
└── DataCorruptionError      a device computed or holds other bits than it should
```

All of them are `ValueError`s. A function that finds several problems reports all of them in one error.
"""

import dataclasses
import difflib
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_LONGEST = 2000
_BOUNDS = {"above": operator.gt, "below": operator.lt, "at least": operator.ge, "at most": operator.le}


@dataclasses.dataclass(frozen=True, order=True)
class Problem:
    """One thing that is wrong: where, what, the detail behind it, and how to fix it.

    Args:
        where: The thing that is wrong: a parameter path, a field, a file.
        what: One clause that says what is wrong with it.
        detail: The numbers that show it, such as `"7 / (fsdp=2) = 3.5"`. May be empty.
        fix: What the user can do. May be empty.

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
        lines = [f"{_shown(self.where)}: {_shown_lines(self.what)}"]
        if self.detail:
            lines.append(f"    {_shown_lines(self.detail)}")
        if self.fix:
            lines.append(f"    fix: {_shown_lines(self.fix)}")
        return "\n".join(lines)


def _shown(text: str) -> str:
    """Text for a terminal: names come from strangers' files, so what would steer it is escaped, and length is cut."""
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _shown_lines(text: str) -> str:
    """The same of several lines; all but the first are further in, so that none looks like a part of its own."""
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return "\n        ".join(map(_shown, text.split("\n")))


class SpmdError(ValueError):
    """What was asked cannot be done; `problems` holds every reason, sorted.

    Args:
        title: One line that says what was being done.
        problems: All problems that were found, in any order.
    """

    def __init__(self, title: str, problems: Iterable[Problem] = ()) -> None:
        self.title = title
        self.problems = tuple(sorted(problems))
        super().__init__("\n".join([title, *(f"  {line}" for p in self.problems for line in str(p).split("\n"))]))


class MeshError(SpmdError):
    """Axes and devices do not multiply, or a batch does not divide over the mesh."""


class RuleError(SpmdError):
    """A partition rule table does not fit the parameters it is for."""


class AnnotationError(SpmdError):
    """An activation name that the plan does not know, or a shape that it cannot split."""


class ConfigError(SpmdError):
    """A field of the configuration holds a value that cannot be used."""


class ScheduleError(ConfigError):
    """A pipeline schedule that cannot be built, read from its file, or run to its end."""


class CacheError(ConfigError):
    """Attention whose keys and values cannot be kept for the tokens that follow."""


class DataError(SpmdError):
    """A corpus that is missing, empty, unreadable or too short."""


class CheckpointError(SpmdError):
    """A checkpoint that is missing or does not fit, or a run folder that is in use."""


class AgreementError(SpmdError):
    """Processes of one run are about to do different things."""


class DivergenceError(SpmdError):
    """A step whose numbers cannot be trusted.

    Args:
        title: One line.
        problems: What is wrong with it.
        step: Its number.
    """

    def __init__(self, title: str, problems: Iterable[Problem], step: int) -> None:
        super().__init__(title, problems)
        self.step = step


class NonFiniteError(DivergenceError):
    """The loss or a gradient is NaN or infinite."""


class SpikeError(DivergenceError):
    """The loss is far above what it was."""


class DataCorruptionError(SpmdError):
    """A device computed or keeps other bits than it should: silent data corruption."""


def check_fields(config: Any, rules: Mapping[str, str | Sequence[Any]], prefix: str = "") -> list[Problem]:
    """Return a problem for each field of a dataclass that breaks its rule.

    Args:
        config: The dataclass.
        rules: Field, or dotted path of one → the values it may have, or bounds as text: terms `above 0`, `below 1`,
            `at least 1`, `at most 1` and `finite`, joined by `and`. The text is also the fix that the problem names.
            A field that is None breaks no bound.
        prefix: Written before the field's name, such as `"router."`.

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
            problems.append(Problem(prefix + field, f"is {value}", fix=rule))
    return problems


def _holds(value: Any, term: str) -> bool:
    if term == "finite":
        return math.isfinite(value)
    word, _, bound = term.rpartition(" ")
    return _BOUNDS[word](value, float(bound))


def first_of(problems: Iterable[Problem], at_most: int = 100) -> list[Problem]:
    """The first problems, and how many more there are: a stranger's file decides neither the length nor the memory.

    Args:
        problems: All of them.
        at_most: How many are kept.

    Example:
        >>> print(*first_of([Problem(name, "is missing") for name in "cab"], at_most=2))
        a: is missing b: is missing …: and 1 more
    """
    found = sorted(problems)
    more = len(found) - at_most
    return found if more <= 0 else [*found[:at_most], Problem("…", f"and {more:,} more")]


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """The choice nearest to `word` as a question, or all choices where none is near.

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
    """The sibling nearest to a path that does not exist, as a question; the folder where none is near.

    Args:
        path: The path.
        also: Words that may have been meant, too.
    """
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    question = did_you_mean(path.name, [*also, *siblings])
    return question if question.endswith("?") else f"look in {path.parent}"
