"""Writer of MLflow runs into a folder."""

import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spmd.observe.metrics import Values, Writer

# Limits of MLflow.
_PARAMS_AT_ONCE = 100
_LONGEST_PARAM = 6000


class MLflow(Writer):
    """One MLflow run in the file store `folder/mlflow`: finite numbers as metrics, texts as tags.

    No server is used: `MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri folder/mlflow`
    shows it. A later process continues the run; steps that a metric has are not written again.
    MLflow's telemetry, a thread that uses the network, is off.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import mlflow
        import mlflow.environment_variables

        variables = mlflow.environment_variables
        variables.MLFLOW_DISABLE_TELEMETRY.set(True)
        variables.MLFLOW_ALLOW_FILE_STORE.set(True)  # refused otherwise, since MLflow 3.13
        self._metric = mlflow.entities.Metric
        self._param = mlflow.entities.Param
        store = (folder / "mlflow").absolute().as_uri()
        self._client = mlflow.MlflowClient(tracking_uri=store)
        experiment = self._open_experiment()
        self._last: dict[str, int] = {}
        runs = self._client.search_runs([experiment], max_results=1)
        if runs:
            run = runs[0]
            self._run = run.info.run_id
            for name in run.data.metrics:
                history = self._client.get_metric_history(self._run, name)
                self._last[name] = max(point.step for point in history)
            self._client.update_run(self._run, status="RUNNING")
        else:
            run = self._client.create_run(experiment, run_name=folder.resolve().name)
            self._run = run.info.run_id
            self._write_params(config)

    def _open_experiment(self) -> str:
        known = self._client.get_experiment_by_name("spmd")
        if known:
            return known.experiment_id
        return self._client.create_experiment("spmd")

    def _write_params(self, config: Mapping[str, Any]) -> None:
        params = []
        for name, text in _flat(config):
            params.append(self._param(name, text[:_LONGEST_PARAM]))
        for first in range(0, len(params), _PARAMS_AT_ONCE):
            some = params[first : first + _PARAMS_AT_ONCE]
            self._client.log_batch(self._run, params=some)

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


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted names and values as text."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)
