"""Writers of metrics by name, some of them by packages that are extras of this one."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from spmd.errors import ConfigError, Problem
from spmd.observe.metrics import Writer, read_json_lines
from spmd.observe.mlflow_writer import MLflow
from spmd.observe.tensorboard import TensorBoard
from spmd.observe.wandb_writer import WandB

WriterName = Literal["tensorboard", "wandb", "mlflow"]

EXTRAS = ("wandb", "mlflow")
"""Writers whose package is an extra of the same name."""

_OWN = ("step", "non_finite")
"""What is no value in a line of `JsonLines`."""


def check_packages(names: Sequence[str]) -> None:
    """Raise a `ConfigError` if the package of a writer is not installed."""
    missing = [name for name in EXTRAS if name in names and not _is_installed(name)]
    problems = [
        Problem("metrics_to", f"needs the package {name}, which is not installed", fix=f"pip install 'spmd[{name}]'")
        for name in missing
    ]
    if problems:
        raise ConfigError("Metrics cannot be written:", problems)


def _is_installed(package: str) -> bool:
    """Return whether a package can be imported; a folder of its name in a search path is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def open_writers(
    names: Sequence[str], folder: Path, metrics: Path, keep_through: int, config: Mapping[str, Any]
) -> list[Writer]:
    """Open writers in a run folder, for a run that continues after step `keep_through`; `config` are its values.

    Those of extras get what they lack of the lines in `metrics`, a file of `JsonLines`: a kill may have lost it, or the
    run did not write to them before.
    """
    makers: Mapping[str, Callable[[], Writer]] = {
        "tensorboard": lambda: TensorBoard(folder / "tensorboard", keep_through),
        "wandb": lambda: WandB(folder, config),
        "mlflow": lambda: MLflow(folder, config),
    }
    opened = {name: makers[name]() for name in dict.fromkeys(names)}
    extras = [writer for name, writer in opened.items() if name in EXTRAS]
    for record in read_json_lines(metrics) if extras else ():
        values = {
            name: np.asarray(x, np.float64) if isinstance(x, list) else x  # null is NaN
            for name, x in record.items()
            if name not in _OWN
        }
        for writer in extras:
            writer.write(record["step"], values)
    return list(opened.values())
