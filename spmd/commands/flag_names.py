"""Names of flags in errors: a problem of a config's field ends with the flag that sets it."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from spmd.distributed.cluster_env import LaunchArgs
from spmd.errors import Problem
from spmd.run.config import TrainConfig


def name_flags(problems: Sequence[Problem], commands: Sequence[Any], arguments: Sequence[str]) -> list[Problem]:
    """Return the problems with the flag of each field in its fix, where that names no flag yet.

    A library function that has a part of the config calls a field by its last name. `commands` are the dataclasses
    whose fields are flags; of several flags with that name, the one in `arguments` is meant. A problem that is about
    the value of a flag, such as a file, is one of that flag.

    Example:
        >>> print(*name_flags([Problem("b1", "is 2.0", fix="below 1")], [TrainConfig], []))
        b1: is 2.0
            fix: below 1 (--optimizer.b1)
    """
    fields = [path for command in commands for path in _fields(command)]
    flags = [argument.partition("=")[0][2:] for argument in arguments if argument.startswith("--")]
    given = [flag.replace("-", "_") for flag in flags]
    by_value = {value: flag[2:] for flag, value in itertools.pairwise(arguments) if flag.startswith("--")}
    named = []
    for problem in problems:
        where = problem.where.removeprefix("--").replace("-", "_")
        ending = [path for path in (*fields, *given) if path == where or path.endswith(f".{where}")]
        exact = [where] if where in fields or re.fullmatch(r"model(\.\w+)+", where) else []
        meant = exact or sorted({path for path in ending if path in given}) or sorted(set(ending))
        meant = meant or [by_value[value] for value in (problem.where,) if value in by_value]
        if len(meant) == 1 and "--" not in problem.fix:
            flag = f"--{meant[0].replace('_', '-')}"
            problem = dataclasses.replace(problem, fix=f"{problem.fix} ({flag})" if problem.fix else f"another {flag}")
        named.append(problem)
    return named


def _fields(kind: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of each flag; a command's config and launch arguments have no prefix."""
    without_prefix = {"config": TrainConfig, "launch_args": LaunchArgs}
    for field in dataclasses.fields(kind):
        if field.name in without_prefix:
            yield from _fields(without_prefix[field.name])
        elif dataclasses.is_dataclass(field.default):
            yield from _fields(field.default, f"{prefix}{field.name}.")
        elif field.name not in ("model", "rules"):
            yield prefix + field.name
