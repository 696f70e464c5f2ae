"""Writers of metrics by name, some of them by packages of extras."""

import dataclasses
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from spmd.errors import ConfigError, Problem
from spmd.observe.json_lines import read_json_lines
from spmd.observe.line_file import say_on_stderr
from spmd.observe.metrics import Writer
from spmd.observe.mlflow_writer import MLflow, MLflowConfig
from spmd.observe.tensorboard import TensorBoard
from spmd.observe.wandb_writer import WandB, WandBConfig, check_login

WriterName = Literal["tensorboard", "wandb", "mlflow"]

EXTRAS = ("wandb", "mlflow")
"""Writers whose package is an extra of the same name."""

_OWN = ("step", "non_finite")
"""Keys without a value of a step in a line of `JsonLines`."""


@dataclasses.dataclass(frozen=True)
class WriterConfig:
    """Writers of a run by name, and the settings of those that have some."""

    names: Sequence[str]
    wandb: WandBConfig = WandBConfig()
    mlflow: MLflowConfig = MLflowConfig()

    def problems(self) -> list[Problem]:
        """Return a problem for each setting of a writer that is not named."""
        problems = []
        for name, settings in (("wandb", self.wandb), ("mlflow", self.mlflow)):
            if name in self.names or settings == type(settings)():
                continue
            fix = f'metrics_to=("{name}",)'
            problems.append(
                Problem(name, f"acts on nothing: metrics_to does not name {name}", fix=fix)
            )
        return problems

    def login_problems(self) -> list[Problem]:
        """Return a problem if a server needs a key that is missing; the user may be asked for it."""
        if "wandb" in self.names:
            return check_login(self.wandb)
        return []


def check_packages(names: Sequence[str]) -> None:
    """Raise a `ConfigError` if the package of a writer is not installed."""
    problems = []
    for name in EXTRAS:
        if name in names and not _is_installed(name):
            problem = Problem(
                "metrics_to",
                f"needs the package {name}, which is not installed",
                fix=f"pip install 'spmd[{name}]'",
            )
            problems.append(problem)
    if problems:
        raise ConfigError("Metrics cannot be written:", problems)


def _is_installed(package: str) -> bool:
    """Return whether a package can be imported; a folder of its name in a search path is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def open_writers(
    writers: WriterConfig,
    folder: Path,
    metrics: Path,
    start: int,
    values: Mapping[str, Any],
    say: Callable[[str], None] = say_on_stderr,
) -> list[Writer]:
    """Open writers in a run folder, for a run from the step after `start` on.

    Those of extras get the missing lines of `metrics`, a file of `JsonLines`: a kill may have lost
    them, or the run did not write to them before.

    Args:
        values: Values of the run's config.
        say: Gets sentences about a full disk.
    """
    makers: Mapping[str, Callable[[], Writer]] = {
        "tensorboard": lambda: TensorBoard(folder / "tensorboard", start, say),
        "wandb": lambda: WandB(folder, start, values, writers.wandb),
        "mlflow": lambda: MLflow(folder, values, writers.mlflow),
    }
    opened = []
    extras = []
    for name in dict.fromkeys(writers.names):
        writer = makers[name]()
        opened.append(writer)
        if name in EXTRAS:
            extras.append(writer)
    if extras:
        _write_again(read_json_lines(metrics), extras)
    return opened


def _write_again(records: Iterable[Mapping[str, Any]], writers: Sequence[Writer]) -> None:
    """Write the lines of a file of `JsonLines`; a writer skips steps already in it."""
    for record in records:
        values = {}
        for name, value in record.items():
            if name in _OWN:
                continue
            if isinstance(value, list):
                value = np.asarray(value, np.float64)  # null is NaN
            values[name] = value
        for writer in writers:
            writer.write(record["step"], values)
