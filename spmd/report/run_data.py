"""Contents of a run's report, read from its folder, also of an unfinished or damaged one."""

import collections
import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd.checkpoint.manifest import read_bounded
from spmd.observe.goodput import Goodput, measure_goodput
from spmd.observe.json_lines import count_lines, read_json_lines
from spmd.observe.metrics import human_duration
from spmd.run.config import config_difference
from spmd.run.run_dir import RunDir, check_has_run
from spmd.storage.address import locate

MOST_POINTS = 4000
ALL_POINTS = 150_000
"""Points of one curve, and of all curves of a run.

Of more, every second, third, … and the last are drawn."""
MOST_EVENTS = 200
_MAX_CONFIG_BYTES = 64 << 20

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
        events: Time (UTC) and text of each line of the first process's log, without the lines of
            steps.
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
        """Return label → value of the figures at the top."""
        found = [("step", self._step_text())]
        if "loss" in self.last:
            found.append(("loss", f"{self.last['loss']:.4f}"))
        for name, series in self.series.items():
            if name.endswith("_loss"):
                lowest = min(series.values)
                step = series.steps[series.values.index(lowest)]
                found.append((f"lowest {name}", f"{lowest:.4f} at step {step:,}"))
        for name, value in self.last.items():
            if name.endswith("_per_s"):
                found.append((name.replace("_per_s", "/s"), f"{value:,.0f}"))
        if "mfu" in self.last:
            found.append(("MFU", f"{self.last['mfu']:.1%}"))
        if self.goodput:
            found.append(("goodput", _goodput_text(self.goodput)))
        found.append(("checkpoints", self._checkpoints_text()))
        return found

    def _step_text(self) -> str:
        planned = self.config.get("steps")
        if isinstance(planned, int):
            return f"{self.step:,} of {planned:,}"
        return f"{self.step:,}"

    def _checkpoints_text(self) -> str:
        """Return the steps of the last five checkpoints."""
        if not self.checkpoints:
            return "none"
        text = ", ".join(f"{step:,}" for step in self.checkpoints[-5:])
        if len(self.checkpoints) > 5:
            return f"… {text}"
        return text


def _goodput_text(goodput: Goodput) -> str:
    total = human_duration(goodput.total)
    plural = "s" * (goodput.sessions > 1)
    return f"{goodput.goodput:.1%} of {total}, {goodput.sessions} session{plural}"


def read_runs(paths: Sequence[str]) -> list[RunReport]:
    """Read run folders; if two have the same name, the report names all of them by their paths."""
    runs = [read_run(path) for path in paths]
    names = {run.name for run in runs}
    if len(names) == len(runs):
        return runs
    return [dataclasses.replace(run, name=path) for run, path in zip(runs, paths, strict=True)]


def read_run(name: str) -> RunReport:
    """Read a run folder.

    Raises:
        CheckpointError: The folder contains no run.
    """
    run_dir = RunDir(locate(name))
    check_has_run(run_dir, name)
    path = run_dir.path
    notes: list[str] = []
    about = _read_config(path, notes)
    config = about.get("config", {})
    records = _read_metrics(run_dir.metrics, config.get("steps"), notes)
    series = _read_series(records)
    checkpoints = _read_checkpoints(run_dir, notes)
    goodput = _read_goodput(path, notes)
    events = [*_non_finite(records), *_read_events(path / "logs" / "process-0.log")]
    return RunReport(
        name=_name_of(run_dir),
        series=_changing(series),
        last={metric: found.values[-1] for metric, found in series.items()},
        goodput=goodput,
        config=config,
        changed=about.get("changed", {}),
        events=tuple(events[-MOST_EVENTS:]),
        resumed=_resumed_steps(events),
        checkpoints=checkpoints,
        plan=_read_text(path / "plan.txt"),
        notes=tuple(notes),
    )


def _name_of(run_dir: RunDir) -> str:
    """Return the last part of a run's path."""
    if run_dir.mirror is not None:
        return run_dir.location.name
    return run_dir.path.resolve().name


def _read_metrics(file: Path, planned: Any, notes: list[str]) -> list[dict[str, Any]]:
    """Return the lines of metrics, and note damaged ones and missing steps."""
    records = read_json_lines(file)
    if not records:
        notes.append("There are no metrics yet: no step has been logged.")
        return records
    damaged = count_lines(file) - len(records)
    if damaged > 0:
        notes.append(f"metrics.jsonl has {damaged} cut or damaged lines, which are not shown.")
    step = max(record["step"] for record in records)
    if isinstance(planned, int) and step < planned:
        notes.append(f"The run is not done: its metrics end at step {step:,} of {planned:,}.")
    return records


def _read_checkpoints(run_dir: RunDir, notes: list[str]) -> tuple[int, ...]:
    """Return the steps of the checkpoints of a run."""
    steps = run_dir.checkpoint_steps()
    if not steps:
        notes.append("There is no checkpoint yet.")
    return tuple(steps)


def _changing(series: Mapping[str, Series]) -> dict[str, Series]:
    """Return the metrics with different values, and those with a single point."""
    found = {}
    for metric, each in series.items():
        if len(each.values) == 1 or len(set(each.values)) > 1:
            found[metric] = each
    return found


def _resumed_steps(events: Iterable[tuple[str, str]]) -> tuple[int, ...]:
    steps = []
    for _, text in events:
        found = _RESUMED.match(text)
        if found:
            steps.append(int(found[1]))
    return tuple(steps)


def _read_text(file: Path) -> str:
    """Return the text of a file; empty if there is none."""
    if not file.is_file():
        return ""
    return file.read_text(encoding="utf-8", errors="replace")


def differences(runs: Iterable[RunReport]) -> dict[str, list[Any]]:
    """Return dotted path → values of the first and of the second run, for unequal fields."""
    first, second = runs
    return config_difference(first.config, second.config)


def group_metrics(names: Iterable[str]) -> dict[str, list[str]]:
    """Return title of a chart → the metrics in it, the most important charts first.

    Example:
        >>> group_metrics(["mfu", "val_loss", "step_s", "loss", "data_s"])
        {'loss': ['val_loss', 'loss'], 'MFU': ['mfu'], 'seconds of a step': ['step_s', 'data_s']}
    """
    names_of: dict[str, list[str]] = collections.defaultdict(list)
    for name in names:
        names_of[_chart_title(name)].append(name)
    groups = {}
    for _, title in _GROUPS:
        if title in names_of:
            groups[title] = names_of.pop(title)
    groups.update(names_of)
    return groups


def _chart_title(name: str) -> str:
    """Return the title of the chart of a metric: its own name, if it is in no known chart."""
    for pattern, title in _GROUPS:
        if re.search(pattern, name):
            return title
    return name.replace("_", " ")


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
            if metric != "step" and _is_number(value):
                points[metric].append((record["step"], float(value)))
    most = min(MOST_POINTS, ALL_POINTS // max(1, len(points)))
    series = {}
    for metric, found in points.items():
        every = math.ceil(len(found) / max(1, most))
        kept = [*found[:-1:every], found[-1]]
        steps, values = zip(*kept, strict=True)
        series[metric] = Series(steps, values)
    return series


def _is_number(value: Any) -> bool:
    """Return whether a value is a finite number; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)


def _non_finite(records: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return an event for each value of NaN or infinity."""
    events = []
    for record in records:
        values = record.get("non_finite")
        if isinstance(values, Mapping):
            for metric, value in values.items():
                events.append((f"step {record['step']}", f"{metric} is {value}"))
    return events


def _read_config(path: Path, notes: list[str]) -> Mapping[str, Any]:
    """Return the run's config.json: its `config`, and the fields `changed` by flags."""
    try:
        about = json.loads(read_bounded((path / "config.json").resolve(), _MAX_CONFIG_BYTES))
    except FileNotFoundError:
        notes.append("config.json is missing: the run's config is not known.")
        return {}
    except (ValueError, RecursionError):
        notes.append("config.json is cut or damaged: the run's config is not known.")
        return {}
    if isinstance(about, dict):
        has_config = isinstance(about.get("config"), dict)
        if has_config and isinstance(about.get("changed"), dict):
            return about
    notes.append("config.json is not of a run: its config is not shown.")
    return {}


def _read_goodput(path: Path, notes: list[str]) -> Goodput | None:
    found = measure_goodput(path)
    if found.damaged:
        notes.append(f"goodput.jsonl is damaged: {found.damaged} of its lines do not count.")
    if not found.sessions:
        return None
    return found


def _read_events(log: Path) -> list[tuple[str, str]]:
    """Return the time and the text of each line of a log, without those of steps."""
    events = []
    for line in _read_text(log).split("\n"):
        found = _LOG_LINE.match(line)
        if found and not _STEP_LINE.match(found[2]):
            events.append((found[1], found[2]))
    return events
