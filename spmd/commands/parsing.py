"""Parsing of command lines: a config and a flag for each of its fields, or flags alone."""

import contextlib
import dataclasses
import io
from pathlib import Path
from typing import Annotated, Any

import tyro

from spmd.commands.flag_names import given_flags
from spmd.distributed.cluster_env import LaunchArgs
from spmd.errors import ConfigError, Problem, SpmdError
from spmd.optim.config import fit_warmup
from spmd.run.config import M, TrainConfig
from spmd.run.load_config import load_config, shipped

ConfigFields = Annotated[TrainConfig[M], tyro.conf.arg(name="")]
"""Type of a command's `config`, whose fields are flags without a prefix."""

LaunchFields = Annotated[LaunchArgs, tyro.conf.arg(name="")]
"""Type of a command's `launch_args`, whose fields are flags without a prefix."""


def parse_command(command: Any, arguments: list[str], verb: str) -> tuple[Any, Path]:
    """Parse a command with a config; return it with the config's file.

    Fewer steps than the config's have a shorter warmup, unless a flag gives it (`fit_warmup`).

    `command` is a dataclass, generic in the model's config, with a field `config`; `arguments`
    follow the verb.
    """
    if arguments and not arguments[0].startswith("-"):
        name, *flags = arguments
        usage = f"spmd {verb} {name}"
    else:
        _check_asks_for_help(arguments, verb)
        name = "demo"  # help needs some config for the fields of its model
        flags = arguments
        usage = f"spmd {verb} CONFIG"
    config = load_config(name)
    model = type(config.model)
    try:
        parsed = _parse(command[model], flags, usage, default=command(config))
    except NameError as error:  # of `typing.get_type_hints`
        what = f"an annotation of {model.__name__} does not resolve: {error}"
        raise ConfigError("Invalid config:", [Problem("model", what)]) from error
    if "optimizer.warmup_steps" not in given_flags(flags):
        parsed = _with_fitting_warmup(parsed, config.steps)
    return parsed, shipped().get(name, Path(name))


def _with_fitting_warmup(parsed: Any, planned: int) -> Any:
    """Return a parsed command with a warmup that fits its steps, if they are fewer than planned."""
    config = parsed.config
    optimizer = fit_warmup(config.optimizer, planned, config.steps)
    if optimizer == config.optimizer:
        return parsed
    return dataclasses.replace(parsed, config=dataclasses.replace(config, optimizer=optimizer))


def _check_asks_for_help(arguments: list[str], verb: str) -> None:
    """Raise if neither a config is named nor help is asked for."""
    if "-h" in arguments or "--help" in arguments:
        return
    names = ", ".join(shipped())
    problem = Problem("CONFIG", "comes first", fix=f"a Python file, or one of: {names}")
    raise ConfigError(f"spmd {verb} CONFIG needs a config:", [problem])


def parse_flags(command: Any, arguments: list[str], usage: str) -> Any:
    """Parse a command with flags alone: a dataclass.

    `usage` comes before the flags, such as `spmd launch`.
    """
    return _parse(command, arguments, usage)


def _parse(command: Any, arguments: list[str], usage: str, **default: Any) -> Any:
    """Parse with tyro; raise a config's own error, instead of printing it within the usage."""
    settings = {
        "args": arguments,
        "prog": usage,
        "config": (tyro.conf.FlagCreatePairsOff, tyro.conf.SuppressFixed),
        **default,
    }
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            return tyro.cli(command, **settings)
    except SystemExit as done:
        error: BaseException | None = done.__context__
        while error is not None:
            if isinstance(error, SpmdError):
                raise error from None
            error = error.__cause__ or error.__context__
    return tyro.cli(command, **settings)  # prints help, or what is wrong with the flags


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split arguments at `--`, and leave it out.

    Example:
        >>> split_arguments(["--nodes", "2", "--", "--steps", "9"])
        (['--nodes', '2'], ['--steps', '9'])
    """
    if "--" not in arguments:
        return list(arguments), []
    index = arguments.index("--")
    return arguments[:index], arguments[index + 1 :]
