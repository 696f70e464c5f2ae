"""Names of flags in errors: a problem of a config's field ends with its flag."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from spmd.distributed.cluster_env import LaunchArgs
from spmd.errors import Problem
from spmd.run.config import TrainConfig

_VALUE = r'"[^"]*"|\("[^"]*",\)|[\w+-]+(?:\.\d+)?'
_ARGUMENT = re.compile(rf"(?<![\w.(])([a-z]\w*(?:\.\w+)*)=({_VALUE})")
"""An argument and its value, as Python writes them."""
_SIMULATE = re.compile(r"spmd\.simulate_devices\((\d+)\)")


def name_flags(
    problems: Sequence[Problem], commands: Sequence[Any], arguments: Sequence[str]
) -> list[Problem]:
    """Return the problems with the flag of each field in its fix, unless it names a flag already.

    A library function names an argument, `on_nan="skip"`, which is the flag `--on-nan skip`.
    A library function that has a part of the config calls a field by its last name. `commands` are
    the dataclasses with flags as fields; of several flags with that name, the one in `arguments` is
    meant. A problem that is about the value of a flag, such as a file, is one of that flag.

    Example:
        >>> print(*name_flags([Problem("b1", "is 2.0", fix="below 1")], [TrainConfig], []))
        b1: is 2.0
            fix: below 1 (--optimizer.b1)
    """
    fields: list[str] = []
    for command in commands:
        fields += _fields(command)
    given = given_flags(arguments)
    flag_of_value = {}
    for flag, value in itertools.pairwise(arguments):
        if flag.startswith("--"):
            flag_of_value[value] = flag[2:]
    named = []
    for problem in problems:
        problem = dataclasses.replace(problem, fix=_flags_for_arguments(problem.fix, fields))
        meant = _meant(problem, fields, given)
        if not meant and problem.where in flag_of_value:
            meant = [flag_of_value[problem.where]]
        if len(meant) == 1 and "--" not in problem.fix:
            problem = _with_flag(problem, meant[0])
        named.append(problem)
    return named


def _flags_for_arguments(fix: str, fields: Sequence[str]) -> str:
    """Return a fix with flags in place of the arguments of a config or command in it.

    Arguments in parentheses are those of a call, and stay.

    Example:
        >>> _flags_for_arguments('warmup_steps=3, or f(zero=1)', ["optimizer.warmup_steps", "zero"])
        '--optimizer.warmup-steps 3, or f(zero=1)'
        >>> _flags_for_arguments('metrics_to=("wandb",)', ["metrics_to"])
        '--metrics-to wandb'
    """

    def flag(found: re.Match[str]) -> str:
        before = fix[: found.start()]
        name, value = found.groups()
        path = _field_named(name, fields)
        is_of_call = before.count("(") > before.count(")")
        if is_of_call or not path:
            return found[0]
        return _as_flag(path, value)

    fix = _ARGUMENT.sub(flag, fix)
    return _SIMULATE.sub(r"--devices \1", fix)


def _field_named(name: str, fields: Sequence[str]) -> str:
    """Return the dotted path of the field with a name; empty if there is none, or several."""
    if name in fields or re.fullmatch(r"model(\.\w+)+", name):
        return name
    ending = {path for path in fields if path.endswith(f".{name}")}
    if len(ending) == 1:
        return ending.pop()
    return ""


def _as_flag(path: str, value: str) -> str:
    """Return the flag of a field with a value as Python writes it."""
    name = f"--{path.replace('_', '-')}"
    if value == "True":
        return name
    if value == "False":
        return f"no {name}"
    if value == '""':
        return f"{name} ''"
    text = value.strip('(",)')
    return f"{name} {text}"


def given_flags(arguments: Sequence[str]) -> list[str]:
    """Return the flags on a command line as dotted paths of fields."""
    given = []
    for argument in arguments:
        if argument.startswith("--"):
            flag = argument.partition("=")[0][2:]
            given.append(flag.replace("-", "_"))
    return given


def _meant(problem: Problem, fields: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return the dotted paths of the fields in a problem; none if it is about no field."""
    where = problem.where.removeprefix("--").replace("-", "_")
    if where in fields or re.fullmatch(r"model(\.\w+)+", where):
        return [where]
    ending = set()
    for path in (*fields, *given):
        if path == where or path.endswith(f".{where}"):
            ending.add(path)
    return sorted(ending.intersection(given)) or sorted(ending)


def _with_flag(problem: Problem, path: str) -> Problem:
    """Return a problem with a flag in its fix."""
    flag = f"--{path.replace('_', '-')}"
    if problem.fix:
        return dataclasses.replace(problem, fix=f"{problem.fix} ({flag})")
    return dataclasses.replace(problem, fix=f"another {flag}")


def _fields(kind: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of each flag; fields of the config and of the launch have no prefix."""
    without_prefix = {"config": TrainConfig, "launch_args": LaunchArgs}
    for field in dataclasses.fields(kind):
        if field.name in without_prefix:
            yield from _fields(without_prefix[field.name])
        elif dataclasses.is_dataclass(field.default):
            yield from _fields(field.default, f"{prefix}{field.name}.")
        elif field.name not in ("model", "rules"):
            yield prefix + field.name
