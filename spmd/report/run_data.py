"""Contents of a run's report, read from its folder; of a run that is not done, or cut short, what there is."""

import collections
import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd.errors import CheckpointError, Problem, nearest_file
from spmd.observe.goodput import Goodput, measure_goodput
from spmd.observe.metrics import human_duration, read_json_lines
from spmd.run.config import config_difference
from spmd.run.run_dir import RunDir

MOST_POINTS, ALL_POINTS = 4000, 150_000
"""Points of one curve, and of all curves of a run; of more, every second, third, … and the last are drawn."""
MOST_EVENTS = 200

_STEP_LINE = re.compile(r"step \d+   loss ")
_LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (.*)")
_RESUMED = re.compile(r"resuming from step (\d+)")


@dataclasses.dataclass(frozen=True)
class Series:
    """Values of one metric: `steps` and finite `values`."""

    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class RunReport:
    """Contents of a run's report.

    Attributes:
        name: Last part of the folder's path; the whole path where that of another run is the same.
        series: Metric → its values, without those that never change.
        last: Metric → its last finite value.
        goodput: Time by activity; None if it was not recorded.
        config: All fields as resolved; empty if they are not known.
        changed: Dotted path → values in the config file and in the run.
        events: Time (UTC) and text of each line of the first process's log that is not about a step.
        resumed: Steps from which the run was resumed.
        checkpoints: Steps of the checkpoints in the folder.
        plan: Text of the plan.
        notes: Parts that are missing, each with its reason.
    """

    name: str
    series: Mapping[str, Series]
    last: Mapping[str, float]
    goodput: Goodput | None
    config: Mapping[str, Any]
    changed: Mapping[str, list[Any]]
    events: tuple[tuple[str, str], ...]
    resumed: tuple[int, ...]
    checkpoints: tuple[int, ...]
    plan: str
    notes: tuple[str, ...]

    @property
    def step(self) -> int:
        """Last step with metrics; 0 if there are none."""
        return max((series.steps[-1] for series in self.series.values()), default=0)

    def facts(self) -> list[tuple[str, str]]:
        """Return label → value of the figures that come first."""
        planned = self.config.get("steps")
        found = [("step", f"{self.step:,}" + (f" of {planned:,}" if isinstance(planned, int) else ""))]
        found += [("loss", f"{self.last['loss']:.4f}")] if "loss" in self.last else []
        for name, series in self.series.items():
            if name.endswith("_loss"):
                best = min(series.values)
                found.append((f"lowest {name}", f"{best:.4f} at step {series.steps[series.values.index(best)]:,}"))
        rates = [name for name in self.last if name.endswith("_per_s")]
        found += [(name.replace("_per_s", "/s"), f"{self.last[name]:,.0f}") for name in rates]
        found += [("MFU", f"{self.last['mfu']:.1%}")] if "mfu" in self.last else []
        if self.goodput:
            sessions = f"{self.goodput.sessions} session{'s' * (self.goodput.sessions > 1)}"
            found.append(("goodput", f"{self.goodput.goodput:.1%} of {human_duration(self.goodput.total)}, {sessions}"))
        steps = ", ".join(f"{step:,}" for step in self.checkpoints[-5:])
        found.append(("checkpoints", ("… " if len(self.checkpoints) > 5 else "") + steps or "none"))
        return found


def read_runs(paths: Sequence[str]) -> list[RunReport]:
    """Read run folders, the names of which in the report differ."""
    runs = [read_run(path) for path in paths]
    same = len({run.name for run in runs}) < len(runs)
    return [dataclasses.replace(run, name=path) for run, path in zip(runs, paths, strict=True)] if same else runs


def read_run(name: str) -> RunReport:
    """Read a run folder.

    Raises:
        CheckpointError: The folder contains no run.
    """
    run_dir = RunDir(Path(name))
    path, fix = run_dir.path, "give the folder that `spmd train` wrote, such as runs/demo"
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise CheckpointError("There is no run:", [Problem(name, what, fix=nearest_file(path))])
    if not run_dir.has_run and not (path / "config.json").exists():
        raise CheckpointError("There is no run:", [Problem(name, "contains no run", fix=fix)])
    notes = list[str]()
    about = _read_config(path, notes)
    records = read_json_lines(run_dir.metrics)
    if not records:
        notes.append("There are no metrics yet: no step has been logged.")
    elif (lines := sum(1 for line in run_dir.metrics.read_bytes().split(b"\n") if line.strip())) > len(records):
        notes.append(f"metrics.jsonl has {lines - len(records)} cut or damaged lines, which are not shown.")
    series = _read_series(records)
    last = {metric: found.values[-1] for metric, found in series.items()}
    planned, step = about.get("config", {}).get("steps"), max((r["step"] for r in records), default=0)
    if records and isinstance(planned, int) and step < planned:
        notes.append(f"The run is not done: its metrics end at step {step:,} of {planned:,}.")
    checkpoints = sorted(int(entry.name) for entry in run_dir.checkpoints.glob("*") if entry.name.isdecimal())
    if not checkpoints:
        notes.append("There is no checkpoint yet.")
    events = [*_non_finite(records), *_read_events(path / "logs" / "process-0.log")]
    plan = path / "plan.txt"
    return RunReport(
        path.resolve().name,
        {metric: found for metric, found in series.items() if len(set(found.values)) > 1 or len(found.values) == 1},
        last,
        _read_goodput(path, notes),
        about.get("config", {}),
        about.get("changed", {}),
        tuple(events[-MOST_EVENTS:]),
        tuple(int(found[1]) for _, text in events if (found := _RESUMED.match(text))),
        tuple(checkpoints),
        plan.read_text(encoding="utf-8", errors="replace") if plan.is_file() else "",
        tuple(notes),
    )


def differences(runs: Iterable[RunReport]) -> dict[str, list[Any]]:
    """Return dotted path → values of the first and of the second run, of the fields that differ."""
    first, second = runs
    return config_difference(first.config, second.config)


def group_metrics(names: Iterable[str]) -> dict[str, list[str]]:
    """Return title of a chart → the metrics in it, the most important charts first.

    Example:
        >>> group_metrics(["mfu", "val_loss", "step_s", "loss", "data_s"])
        {'loss': ['val_loss', 'loss'], 'MFU': ['mfu'], 'seconds of a step': ['step_s', 'data_s']}
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        title = next((title for pattern, title in _GROUPS if re.search(pattern, name)), name.replace("_", " "))
        groups.setdefault(title, []).append(name)
    order = [title for _, title in _GROUPS]
    return dict(sorted(groups.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


_GROUPS = (
    ("^(.*_)?loss$", "loss"),
    ("^gradient_norm$", "gradient norm"),
    ("^learning_rate$", "learning rate"),
    ("_per_s$", "throughput"),
    ("^mfu$", "MFU"),
    ("^(.*_)?accuracy$", "accuracy"),
    ("_s$|_s_", "seconds of a step"),
    ("_bytes$", "memory"),
)
"""Pattern of metrics → title of their chart, in this order."""


def _read_series(records: Iterable[Mapping[str, Any]]) -> dict[str, Series]:
    points: dict[str, list[tuple[int, float]]] = collections.defaultdict(list)
    for record in records:
        for metric, value in record.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if metric != "step" and is_number:
                points[metric].append((record["step"], float(value)))
    series, most = {}, min(MOST_POINTS, ALL_POINTS // max(1, len(points)))
    for metric, found in points.items():
        every = math.ceil(len(found) / max(1, most))
        kept = [*found[:-1:every], found[-1]]
        series[metric] = Series(*zip(*kept, strict=True))
    return series


def _non_finite(records: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    return [
        (f"step {record['step']}", f"{metric} is {value}")
        for record in records
        if isinstance(bad := record.get("non_finite"), Mapping)
        for metric, value in bad.items()
    ]


def _read_config(path: Path, notes: list[str]) -> Mapping[str, Any]:
    try:
        about = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if isinstance(about, dict) and all(isinstance(about.get(name), dict) for name in ("config", "changed")):
            return about
        notes.append("config.json is not of a run: its config is not shown.")
    except FileNotFoundError:
        notes.append("config.json is missing: the run's config is not known.")
    except (ValueError, RecursionError):
        notes.append("config.json is cut or damaged: the run's config is not known.")
    return {}


def _read_goodput(path: Path, notes: list[str]) -> Goodput | None:
    try:
        found = measure_goodput(path)
    except (KeyError, TypeError, AttributeError):
        notes.append("goodput.jsonl is damaged: how the time was spent is not known.")
        return None
    return found if found.sessions else None


def _read_events(log: Path) -> list[tuple[str, str]]:
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    found = filter(None, map(_LOG_LINE.match, text.split("\n")))
    return [(line[1], line[2]) for line in found if not _STEP_LINE.match(line[2])]
