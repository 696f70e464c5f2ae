"""Parsing of command lines: a config and a flag for each of its fields, or flags alone."""

import contextlib
import copy
import dataclasses
import functools
import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import tyro

from spmd.analysis.topology import parse_topology
from spmd.commands.flag_names import given_flags
from spmd.distributed.cluster_env import LaunchArgs
from spmd.distributed.initialize import MOST_SIMULATED, SINGLE_PROCESS, prepare_platform
from spmd.errors import ConfigError, MeshError, Problem, SpmdError
from spmd.optim.config import fit_warmup
from spmd.run.config import M, TrainConfig
from spmd.run.load_config import find_file, is_python_file, load_config, local_target, shipped
from spmd.run.step_source import ConfigSource, ReadyStep, Source, StepFile, load_source
from spmd.sharding.mesh import MeshShape, simulate_devices

ConfigFields = Annotated[TrainConfig[M], tyro.conf.arg(name="")]
"""Type of a command's `config`, whose fields are flags without a prefix."""

F = TypeVar("F")

StepFlags = Annotated[F, tyro.conf.arg(name="")]
"""Type of a command's `flags`, of a step of one's own, which are flags without a prefix."""

LaunchFields = Annotated[LaunchArgs, tyro.conf.arg(name="")]
"""Type of a command's `launch_args`, whose fields are flags without a prefix."""


def parse_command(command: Any, arguments: list[str], verb: str) -> tuple[Any, Path]:
    """Parse a command with a config; return it with the config's file.

    `command` is a dataclass, generic in the model's config, with a field `config`; `arguments`
    follow the verb.
    """
    name = _name_of(arguments)
    if not name:
        return _parse_help(command, arguments, verb)
    file = find_file(name)
    parsed = _parse_config(command, load_config(str(file)), arguments[1:], f"spmd {verb} {name}")
    return parsed, file


def _name_of(arguments: list[str]) -> str:
    """Return the config or file of a command; empty if flags come first."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[0]
    return ""


def _parse_help(command: Any, arguments: list[str], verb: str) -> tuple[Any, Path]:
    """Print the help of a command without a config, with the fields of a shipped one's model."""
    _check_asks_for_help(arguments, verb)
    parsed = _parse_config(command, load_config("demo"), arguments, f"spmd {verb} CONFIG")
    return parsed, find_file("demo")


def _parse_config(command: Any, config: TrainConfig, flags: list[str], usage: str) -> Any:
    """Parse a command with a config's fields as flags.

    Fewer steps than the config's have a shorter warmup, unless a flag gives it (`fit_warmup`).
    """
    model = type(config.model)
    try:
        parsed = _parse(command[model], flags, usage, default=command(config))
    except NameError as error:  # of `typing.get_type_hints`
        what = f"an annotation of {model.__name__} does not resolve: {error}"
        raise ConfigError("Invalid config:", [Problem("model", what)]) from error
    if "optimizer.warmup_steps" not in given_flags(flags):
        parsed = _with_fitting_warmup(parsed, config.steps)
    return parsed


def _with_fitting_warmup(parsed: Any, planned: int) -> Any:
    """Return a parsed command with a warmup that fits its steps, if they are fewer than planned."""
    config = parsed.config
    optimizer = fit_warmup(config.optimizer, planned, config.steps)
    if optimizer == config.optimizer:
        return parsed
    return dataclasses.replace(parsed, config=dataclasses.replace(config, optimizer=optimizer))


class ParsedSource(NamedTuple):
    """A command, the source of its step with the command's settings, and the source's file."""

    command: Any
    source: Source
    file: Path


def parse_source(
    config_command: Any, step_command: Any, arguments: list[str], verb: str
) -> ParsedSource:
    """Parse a command for a config or for a step of a file.

    `config_command` is as for `parse_command`; `step_command` is a dataclass, generic in the flags
    of a file, with a field `flags` of them.
    """
    name = _name_of(arguments)
    if not name:
        command, file = _parse_help(config_command, arguments, verb)
        return ParsedSource(command, ConfigSource(command.config), file)
    flags = arguments[1:]
    usage = f"spmd {verb} {name}"
    target = local_target(name)
    loaded = load_source(target)
    if isinstance(loaded, ConfigSource):
        command = _parse_config(config_command, loaded.config, flags, usage)
        return ParsedSource(command, ConfigSource(command.config), find_file(target))
    command, source = parse_step(step_command, loaded, flags, usage)
    return ParsedSource(command, source, loaded.file)


def parse_step(
    step_command: Any, loaded: StepFile | ReadyStep, arguments: list[str], usage: str
) -> tuple[Any, StepFile | ReadyStep]:
    """Parse a command for a step of a file; return it, and the source with its flags.

    `usage` comes before the arguments.
    """
    command = _parse(step_command[_flags_of(loaded, step_command)], arguments, usage)
    if isinstance(loaded, ReadyStep):
        return command, loaded
    settings = dict(vars(command.flags))
    shape = settings.pop("mesh")
    devices = settings.pop("devices")
    source = dataclasses.replace(loaded, settings=settings, shape=shape, devices=devices)
    return command, source


def leave_devices_alone(arguments: list[str]) -> None:
    """Keep JAX from the devices of this machine, before a file of a user is executed.

    The file's step is planned for the machine of `--topology`, which may be absent.
    """
    if not is_python_file(_name_of(arguments)):
        return
    machine = parse_topology(value_of("--topology", arguments) or "cpu:1")
    prepare_platform(machine.platform)
    if machine.platform == "cpu" and 1 < machine.devices <= MOST_SIMULATED:
        # A process that has started other ones, such as a notebook, can still plan.
        with contextlib.suppress(MeshError):
            simulate_devices(machine.devices)


def launch_args_of(arguments: Sequence[str]) -> LaunchArgs:
    """Return the flags for the processes of a command before the command is parsed.

    An invalid one, and a request for help, are left to the command's own parser.

    Example:
        >>> launch_args_of(["runs/demo", "--processes", "2", "--prompt", "a"]).processes
        2
    """
    options = (tyro.conf.FlagCreatePairsOff, tyro.conf.SuppressFixed)
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        launch_args, _ = tyro.cli(
            LaunchArgs, args=list(arguments), return_unknown_args=True, config=options
        )
        return launch_args
    return SINGLE_PROCESS


def value_of(flag: str, arguments: list[str]) -> str:
    """Return the value of a flag before its command is parsed, the last of several; empty without it.

    Example:
        >>> value_of("--devices", ["check", "--devices=4", "--devices", "8"])
        '8'
    """
    found = ""
    for argument, following in itertools.pairwise([*arguments, ""]):
        name, equals, value = argument.partition("=")
        if name == flag:
            found = following
            if equals:
                found = value
    return found


@dataclasses.dataclass(frozen=True)
class _NoFlags:
    """No flags: the step is ready made."""


def _flags_of(source: StepFile | ReadyStep, command: type) -> type:
    """Return a dataclass of the mesh and of the keyword arguments of a file's function."""
    if isinstance(source, ReadyStep):
        return _NoFlags
    taken = {field.name for field in dataclasses.fields(command)} | {"mesh", "devices"}
    if "launch_args" in taken:  # whose fields are flags, too
        taken.update(field.name for field in dataclasses.fields(LaunchArgs))
    shape = dataclasses.field(default_factory=lambda: MeshShape(fsdp=-1))
    fields: list[Any] = [("mesh", MeshShape, shape), ("devices", int, dataclasses.field(default=0))]
    problems = []
    for name, kind, default in source.arguments():
        if name in taken:
            what = "is the name of a flag of the command"
            problems.append(Problem(f"{source.name}, {name}", what, fix="another name"))
        field = dataclasses.field(default=default)
        if default is not dataclasses.MISSING:  # which may be a list, of which each has its own
            field = dataclasses.field(default_factory=functools.partial(copy.copy, default))
        fields.append((name, kind, field))
    if problems:
        raise ConfigError("Invalid settings of a step:", problems)
    return dataclasses.make_dataclass("StepFlags", fields, frozen=True, kw_only=True)


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
        "config": (
            tyro.conf.FlagCreatePairsOff,
            tyro.conf.SuppressFixed,
            tyro.conf.AvoidSubcommands,
        ),
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
