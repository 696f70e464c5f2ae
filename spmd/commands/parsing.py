"""A command that begins with a config: its file, and a flag for every field."""

from pathlib import Path
from typing import Annotated, Any

import tyro

from spmd.distributed.cluster_env import LaunchArgs
from spmd.errors import ConfigError, Problem
from spmd.run.config import M, TrainConfig
from spmd.run.load_config import load_config, shipped

ConfigFields = Annotated[TrainConfig[M], tyro.conf.arg(name="")]
"""The type of a command's `config`: its fields are flags without a prefix."""

AskedFields = Annotated[LaunchArgs, tyro.conf.arg(name="")]
"""The type of a command's `asked`: which processes train together, as flags without a prefix."""


def parse_command(command: Any, arguments: list[str], verb: str) -> tuple[Any, Path]:
    """The command with its config, and the config's file.

    Args:
        command: A dataclass, generic in the model's config, with a field `config`.
        arguments: What follows the verb.
        verb: Its name.

    Raises:
        ConfigError: There is no config, or it cannot be used.
    """
    named = bool(arguments) and not arguments[0].startswith("-")
    if not named and not {"-h", "--help"} & set(arguments):
        problem = Problem("CONFIG", "comes first", fix=f"a Python file, or one of: {', '.join(shipped())}")
        raise ConfigError(f"spmd {verb} CONFIG needs a config:", [problem])
    name = arguments[0] if named else "demo"
    config = load_config(name)
    parsed = tyro.cli(
        command[type(config.model)],
        args=arguments[1:] if named else arguments,
        default=command(config),
        prog=f"spmd {verb} {name if named else 'CONFIG'}",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    return parsed, shipped().get(name, Path(name))


def parse_flags(command: Any, arguments: list[str], usage: str) -> Any:
    """A command that takes flags and no config.

    Args:
        command: A dataclass.
        arguments: Its flags.
        usage: What comes before them on the command line, such as `spmd launch`.
    """
    return tyro.cli(command, args=arguments, prog=usage, config=(tyro.conf.FlagCreatePairsOff,))
