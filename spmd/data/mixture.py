"""Texts on the command line: `NAME=SOURCE`, and `NAME=WEIGHT[,epochs=N]:SOURCE` of a mixture."""

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from spmd.errors import ConfigError, Problem, check_fields

FORM = "NAME=WEIGHT:SOURCE or NAME=WEIGHT,epochs=N:SOURCE, such as code=0.7:src"
VALIDATION = "val"
"""Name of a run's own held-out text among its evaluation sets."""
_MOST_EPOCHS = 2**31 - 1


def split_name(entry: str) -> tuple[str, str]:
    """Return name and source of `NAME=SOURCE`; a source without a name has an empty one.

    A name has no slash and no magic characters of a glob.

    Example:
        >>> split_name("books=books/*.txt"), split_name("data/year=2024")
        (('books', 'books/*.txt'), ('', 'data/year=2024'))
    """
    found = re.fullmatch(r"([^=/\\*?\[]+)=(.*)", entry, re.DOTALL)
    if found is None:
        return "", entry
    return found[1], found[2]


def name_problems(
    where: str, names: Sequence[str], taken: Collection[str], fix: str
) -> Iterator[Problem]:
    """Yield a problem for each name of an evaluation set given twice, or in use by the run."""
    for name in sorted(set(names)):
        if name in taken:
            what = f"has {name}, the name of the run's own validation split"
            yield Problem(where, what, fix=fix)
        elif names.count(name) > 1:
            yield Problem(where, f"has {name} twice", fix=fix)


@dataclasses.dataclass(frozen=True)
class MixtureSource:
    """One set of a mixture.

    Args:
        name: Name of the set, of its evaluation and in messages.
        source: File, folder or glob, as in `data.source`.
        weight: Share of the sequences, relative to the weights of the other sets; above 0.
        epochs: Maximum number of passes over its training sequences; 0 for any number.

    Example:
        >>> MixtureSource.parse("books=0.3,epochs=2:books/*.txt")
        MixtureSource(name='books', source='books/*.txt', weight=0.3, epochs=2)
    """

    name: str
    source: str
    weight: float = 1.0
    epochs: int = 0

    def __post_init__(self) -> None:
        prefix = f"data.mixture {self.name}."
        rules = {"weight": "above 0 and finite", "epochs": f"at least 0 and at most {_MOST_EPOCHS}"}
        problems = check_fields(self, rules, prefix)
        if not self.source:
            problems.append(Problem(f"{prefix}source", "is empty", fix=FORM))
        if problems:
            raise ConfigError("invalid mixture:", problems)

    @classmethod
    def parse(cls, entry: str) -> "MixtureSource":
        """Return the set of `NAME=WEIGHT[,epochs=N]:SOURCE`."""
        name, rest = split_name(entry)
        terms, _, source = rest.partition(":")
        found = re.fullmatch(r"([^,]+)(?:,epochs=(\d+))?", terms)
        try:
            if not (name and source and found):
                raise ValueError(entry)
            weight = float(found[1])
            epochs = int(found[2] or 0)
        except ValueError as error:
            problem = Problem("data.mixture", f"is {entry!r}", fix=FORM)
            raise ConfigError("invalid mixture:", [problem]) from error
        return cls(name, source, weight, epochs)

    def __str__(self) -> str:
        terms = f"{self.weight:g}"
        if self.epochs:
            terms += f",epochs={self.epochs}"
        return f"{self.name}={terms}:{self.source}"


def mixture_problems(entries: Iterable[str]) -> Iterator[Problem]:
    """Yield the problems of the sets of a mixture, alone and together."""
    sets = []
    for entry in entries:
        try:
            sets.append(MixtureSource.parse(entry))
        except ConfigError as error:
            yield from error.problems
    names = [each.name for each in sets]
    yield from name_problems("data.mixture", names, (VALIDATION,), "another name")
