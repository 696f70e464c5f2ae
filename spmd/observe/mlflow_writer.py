"""Writer of MLflow runs into a folder."""

import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spmd.observe.metrics import Values, Writer

_PARAMS_AT_ONCE, _LONGEST_PARAM = 100, 6000  # limits of MLflow


class MLflow(Writer):
    """One MLflow run in the file store `folder/mlflow`: finite numbers as metrics, texts as tags; no server is used.

    `MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri folder/mlflow` shows it. A later process continues the
    run; steps that a metric has are not written again. MLflow's telemetry, a thread that uses the network, is off.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import mlflow
        import mlflow.environment_variables

        mlflow.environment_variables.MLFLOW_DISABLE_TELEMETRY.set(True)
        mlflow.environment_variables.MLFLOW_ALLOW_FILE_STORE.set(True)  # refused otherwise, since MLflow 3.13
        self._metric = mlflow.entities.Metric
        self._client = client = mlflow.MlflowClient(tracking_uri=(folder / "mlflow").absolute().as_uri())
        known = client.get_experiment_by_name("spmd")
        experiment = known.experiment_id if known else client.create_experiment("spmd")
        runs = client.search_runs([experiment], max_results=1)
        run = runs[0] if runs else client.create_run(experiment, run_name=folder.resolve().name)
        self._run = run.info.run_id
        self._last = {
            name: max(point.step for point in client.get_metric_history(self._run, name)) for name in run.data.metrics
        }
        if runs:
            client.update_run(self._run, status="RUNNING")
        else:
            params = [mlflow.entities.Param(name, text[:_LONGEST_PARAM]) for name, text in _flat(config)]
            for first in range(0, len(params), _PARAMS_AT_ONCE):
                client.log_batch(self._run, params=params[first : first + _PARAMS_AT_ONCE])

    def write(self, step: int, values: Values) -> None:
        """Append the values of one step."""
        now, metrics = int(time.time() * 1000), []
        for name, value in values.items():
            if isinstance(value, str):
                self._client.set_tag(self._run, name, value)
            elif value is None or isinstance(value, np.ndarray) or not math.isfinite(value):
                continue
            elif step > self._last.get(name, -1):
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
