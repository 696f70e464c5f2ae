"""Page of one run, or of two side by side."""

import itertools
from collections.abc import Sequence
from typing import Any

from spmd.report import charts, page
from spmd.report.charts import Chart, Line
from spmd.report.page import Cell, Html, Section
from spmd.report.run_data import RunReport, differences, group_metrics

_LOGARITHMIC = ("gradient norm",)
_SPENT = {
    **{"step": "steps", "rework": "repeated steps", "start": "start-up", "compile": "compiling"},
    **{"restore": "restoring", "data": "waiting for batches", "evaluate": "evaluation", "check": "checks"},
    **{"checkpoint": "waiting for checkpoints", "between": "between sessions"},
}
"""Activity → its name in a legend."""


def run_page(runs: Sequence[RunReport]) -> str:
    """Return the report of a run, or of two."""
    names = " and ".join(run.name for run in runs)
    last = max(run.step for run in runs)
    return page.render(f"Run{'s' * (len(runs) > 1)} {names}", f"spmd report, {last:,} steps", _sections(runs))


def _sections(runs: Sequence[RunReport]) -> list[Section]:
    several = len(runs) > 1
    noted = page.notes(f"{run.name}: {note}" if several else note for run in runs for note in run.notes)
    return [
        Section("Summary", [*(_side_by_side(runs) if several else [page.facts(runs[0].facts())]), noted]),
        Section("Metrics", [*_curves(runs)]),
        Section("Time", [*_time(runs)]),
        Section("Config", [*_config(runs)]),
        Section("Events", [*_events(runs)]),
        Section("Plan", [_folded(run) for run in runs if run.plan]),
    ]


def _side_by_side(runs: Sequence[RunReport]) -> list[Html]:
    columns = [dict(run.facts()) for run in runs]
    rows = [
        [label, *(column.get(label, "") for column in columns)] for label in dict.fromkeys(itertools.chain(*columns))
    ]
    return [page.table(["", *(run.name for run in runs)], rows)]


def _curves(runs: Sequence[RunReport]) -> list[Html | Chart]:
    metrics = dict.fromkeys(name for run in runs for name in run.series)
    marks = sorted({step for run in runs for step in run.resumed}) if len(runs) == 1 else []
    found: list[Html | Chart] = []
    if marks:
        steps = ", ".join(f"{step:,}" for step in marks)
        found.append(page.paragraph(f"Dashed lines: the run was resumed from a checkpoint of step {steps}."))
    for title, names in group_metrics(metrics).items():
        curves = list[Line]()
        for number, run in enumerate(runs):
            for kind, name in enumerate(name for name in names if name in run.series):
                series = run.series[name]
                colour = charts.PALETTE[number if len(runs) > 1 else kind % len(charts.PALETTE)]
                dash = charts.DASHES[kind % len(charts.DASHES)] if len(runs) > 1 else "solid"
                label = f"{name}, {run.name}" if len(runs) > 1 else name
                curves.append(Line(label, series.steps, series.values, colour, dash))
        positive = all(value > 0 for curve in curves for value in curve.y)
        logarithmic = title in _LOGARITHMIC and positive
        form = "0.[0] ib" if title == "memory" else ""
        found.append(
            charts.lines(
                title,
                curves,
                x="step",
                logarithmic=logarithmic,
                marks=marks,
                form=form,
                most=0 if title == "loss" else 600,
            )
        )
    return found


def _time(runs: Sequence[RunReport]) -> list[Html | Chart]:
    known = [(run, run.goodput) for run in runs if run.goodput]
    if not known:
        return []
    bars = [
        (run.name, {_SPENT.get(name, name): seconds for name, seconds in goodput.seconds.items() if seconds > 0})
        for run, goodput in known
    ]
    chart = charts.stacked_bars("Seconds by activity, over all sessions", bars, x="seconds", form="0,0.[0]")
    return [
        chart,
        *(page.preformatted(f"{run.name}: {goodput}" if len(runs) > 1 else str(goodput)) for run, goodput in known),
    ]


def _config(runs: Sequence[RunReport]) -> list[Html]:
    found = []
    for run in runs:
        if run.config:
            title = f"{run.name}: fields" if len(runs) > 1 else "Fields"
            rows = [[path, _value(old), _value(new)] for path, (old, new) in run.changed.items()]
            if rows:
                found.append(page.paragraph(f"{title} that differ from the config file, config.py of the run folder:"))
                found.append(page.table(["field", "in the file", "in the run"], rows))
            else:
                found.append(page.paragraph(f"{title} that differ from the config file: none."))
    if len(runs) == 2 and all(run.config for run in runs):
        rows = [[path, _value(old), _value(new)] for path, (old, new) in differences(runs).items()]
        found.append(
            page.paragraph("Fields that differ between the runs:" if rows else "The runs have the same config.")
        )
        found += [page.table(["field", *(run.name for run in runs)], rows)] if rows else []
    return found


def _value(value: Any) -> str:
    if value in ("", [], None):
        return "–"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _events(runs: Sequence[RunReport]) -> list[Html]:
    if not any(run.events for run in runs):
        return []
    several = len(runs) > 1
    rows: list[list[str | Cell]] = [
        [*([run.name] if several else []), Cell(when, when), text] for run in runs for when, text in run.events
    ]
    return [page.table([*(["run"] if several else []), "time (UTC)", "event"], rows, search=len(rows) > 10)]


def _folded(run: RunReport) -> Html:
    return page.folded(f"plan.txt of {run.name}", page.preformatted(run.plan.rstrip("\n")))
