"""Config files: Python files that define `config`, executed with the rights of the user who starts them."""

import runpy
import traceback
from pathlib import Path

from spmd.errors import ConfigError, Problem, SpmdError, did_you_mean
from spmd.run.config import TrainConfig
from spmd.run.renamed import rename_hint

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
"""Folder of the configs that ship with the package."""
_FAILURES = (NameError, AttributeError, TypeError, LookupError, ValueError, OSError, ArithmeticError, ImportError)


def shipped() -> dict[str, Path]:
    """Return the configs that ship with the package, by name."""
    return {
        path.stem.replace("_", "-"): path
        for path in sorted(EXAMPLES.glob("*.py"))
        if "\nconfig = " in path.read_text(encoding="utf-8")
    }


def load_config(name: str) -> TrainConfig:
    """Execute a config file, by its path or as a shipped config such as `demo`, and return its `config`.

    Raises:
        ConfigError: The file does not exist, fails, or defines no `TrainConfig` named `config`.
    """
    path = Path(name)
    if path.suffix != ".py":
        path = shipped().get(name, path)
    if not path.is_file():
        inside = path / "config.py"
        fix = f"{inside}, the config of that run" if inside.is_file() else did_you_mean(name, shipped())
        raise ConfigError(
            "There is no such config:", [Problem(name, "is neither a file nor a shipped config", fix=fix)]
        )
    try:
        config = runpy.run_path(str(path)).get("config")
    except SpmdError:
        raise
    except SyntaxError as error:
        raise _unreadable(f"{path}:{error.lineno}", f"is not Python: {error.msg}") from error
    except _FAILURES as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f"{path}:{lines[-1]}" if lines else str(path)
        raise _unreadable(where, f"fails: {type(error).__name__}: {error}", rename_hint(error)) from error
    if not isinstance(config, TrainConfig):
        what = f"defines config = {config!r}" if config is not None else "defines no config"
        raise _unreadable(str(path), what, "config = spmd.TrainConfig(...)")
    return config


def _unreadable(where: str, what: str, fix: str = "") -> ConfigError:
    return ConfigError("The config cannot be read:", [Problem(where, what, fix=fix)])
