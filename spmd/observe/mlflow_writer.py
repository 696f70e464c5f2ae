"""Writer of MLflow runs, into a folder or to a server."""

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spmd.errors import ConfigError, Problem
from spmd.observe.metrics import Values, Writer

# Limits of MLflow.
_PARAMS_AT_ONCE = 100
_LONGEST_PARAM = 6000


@dataclasses.dataclass(frozen=True)
class MLflowConfig:
    """MLflow, for `metrics_to=("mlflow",)`."""

    tracking_uri: str = ""
    """Server, such as https://mlflow.example.com; empty for files in the run folder."""
    experiment: str = "spmd"
    """Experiment of the run."""


class MLflow(Writer):
    """One MLflow run, of a server or in the file store `folder/mlflow`.

    Finite numbers are metrics, texts are tags. `MLFLOW_ALLOW_FILE_STORE=true mlflow ui
    --backend-store-uri folder/mlflow` shows a file store. A later process continues the run; steps
    that a metric has are not written again. MLflow's telemetry, a thread that uses the network, is
    off.

    Args:
        values: Values of the run's config.

    Raises:
        ConfigError: The server cannot be reached, or refuses the run.
    """

    def __init__(self, folder: Path, values: Mapping[str, Any], config: MLflowConfig) -> None:
        import mlflow
        import mlflow.environment_variables

        variables = mlflow.environment_variables
        variables.MLFLOW_DISABLE_TELEMETRY.set(True)
        variables.MLFLOW_ALLOW_FILE_STORE.set(True)  # refused otherwise, since MLflow 3.13
        self._metric = mlflow.entities.Metric
        self._param = mlflow.entities.Param
        store = config.tracking_uri or (folder / "mlflow").absolute().as_uri()
        self._client = mlflow.MlflowClient(tracking_uri=store)
        self._last: dict[str, int] = {}
        record = folder / "mlflow" / "spmd.txt"
        try:
            if record.exists():
                self._run = record.read_text(encoding="utf-8")
                self._continue()
            else:
                self._run = self._create(folder.resolve().name, values, config.experiment)
                record.parent.mkdir(parents=True, exist_ok=True)
                record.write_text(self._run, encoding="utf-8")
        except mlflow.exceptions.MlflowException as error:
            fix = "check mlflow.tracking_uri and mlflow.experiment"
            first = str(error).splitlines()[0]
            problem = Problem("mlflow", f"the run cannot be opened at {store}", first, fix)
            raise ConfigError("MLflow cannot be used:", [problem]) from error

    def _continue(self) -> None:
        """Read the last step of each metric of the run."""
        run = self._client.get_run(self._run)
        for name in run.data.metrics:
            history = self._client.get_metric_history(self._run, name)
            self._last[name] = max(point.step for point in history)
        self._client.update_run(self._run, status="RUNNING")

    def _create(self, name: str, values: Mapping[str, Any], experiment: str) -> str:
        """Return the id of a new run with the values of the config."""
        known = self._client.get_experiment_by_name(experiment)
        if known:
            number = known.experiment_id
        else:
            number = self._client.create_experiment(experiment)
        run: str = self._client.create_run(number, run_name=name).info.run_id
        self._write_params(run, values)
        return run

    def _write_params(self, run: str, values: Mapping[str, Any]) -> None:
        params = []
        for name, text in _flat(values):
            params.append(self._param(name, text[:_LONGEST_PARAM]))
        for first in range(0, len(params), _PARAMS_AT_ONCE):
            some = params[first : first + _PARAMS_AT_ONCE]
            self._client.log_batch(run, params=some)

    def write(self, step: int, values: Values) -> None:
        """Append the values of one step."""
        now = int(time.time() * 1000)
        metrics = []
        for name, value in values.items():
            if isinstance(value, str):
                self._client.set_tag(self._run, name, value)
                continue
            if value is None or isinstance(value, np.ndarray) or not math.isfinite(value):
                continue
            if step > self._last.get(name, -1):
                metrics.append(self._metric(name, float(value), now, step))
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted names and values as text."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)
