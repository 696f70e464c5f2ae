"""Page of one run, or of two side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

from spmd.observe.goodput import Goodput
from spmd.report import charts, page
from spmd.report.charts import Chart, Line
from spmd.report.page import Cell, Html, Section
from spmd.report.run_data import RunReport, differences, group_metrics

_LOGARITHMIC = ("gradient norm",)
_SPENT = {
    "step": "steps",
    "rework": "repeated steps",
    "start": "start-up",
    "compile": "compiling",
    "restore": "restoring",
    "data": "waiting for batches",
    "evaluate": "evaluation",
    "check": "checks",
    "checkpoint": "waiting for checkpoints",
    "between": "between sessions",
}
"""Activity → its name in a legend."""


def run_page(runs: Sequence[RunReport]) -> str:
    """Return the report of a run, or of two."""
    names = " and ".join(_names(runs))
    last = max(run.step for run in runs)
    plural = "s" * (len(runs) > 1)
    return page.render(f"Run{plural} {names}", f"spmd report, {last:,} steps", _sections(runs))


def _sections(runs: Sequence[RunReport]) -> list[Section]:
    return [
        Section("Summary", _summary(runs)),
        Section("Metrics", _curves(runs)),
        Section("Time", _time(runs)),
        Section("Config", _config(runs)),
        Section("Events", _events(runs)),
        Section("Plan", _plans(runs)),
    ]


def _summary(runs: Sequence[RunReport]) -> list[Html]:
    noted = []
    for run in runs:
        for note in run.notes:
            noted.append(_of_run(run, note, runs))
    if len(runs) == 1:
        return [page.facts(runs[0].facts()), page.notes(noted)]
    return [_side_by_side(runs), page.notes(noted)]


def _of_run(run: RunReport, text: str, runs: Sequence[RunReport]) -> str:
    """Return a text about a run, after its name if the page has several."""
    if len(runs) > 1:
        return f"{run.name}: {text}"
    return text


def _side_by_side(runs: Sequence[RunReport]) -> Html:
    """Return a table of figures with a column for each run."""
    rows: dict[str, list[str]] = {}
    for number, run in enumerate(runs):
        for label, figure in run.facts():
            row = rows.setdefault(label, [label, *[""] * len(runs)])
            row[1 + number] = figure
    return page.table(["", *_names(runs)], rows.values())


def _names(runs: Sequence[RunReport]) -> list[str]:
    return [run.name for run in runs]


def _curves(runs: Sequence[RunReport]) -> list[Html | Chart]:
    found: list[Html | Chart] = []
    marks = []
    if len(runs) == 1:
        marks = sorted(set(runs[0].resumed))
    if marks:
        steps = ", ".join(f"{step:,}" for step in marks)
        found.append(
            page.paragraph(f"Dashed lines: the run was resumed from a checkpoint of step {steps}.")
        )
    metrics: dict[str, None] = {}
    for run in runs:
        metrics |= dict.fromkeys(run.series)
    for title, names in group_metrics(metrics).items():
        found.append(_chart(title, names, runs, marks))
    return found


def _chart(
    title: str, names: Sequence[str], runs: Sequence[RunReport], marks: Sequence[int]
) -> Chart:
    """Return a chart of metrics, over the whole width for losses.

    Args:
        names: The metrics; a run may lack some of them.
        marks: Steps with a vertical line.
    """
    curves = []
    for number, run in enumerate(runs):
        known = [name for name in names if name in run.series]
        for kind, name in enumerate(known):
            curves.append(_line(run, name, number, kind, runs))
    positive = all(min(curve.y) > 0 for curve in curves)
    form = ""
    if title == "memory":
        form = "0.[0] ib"
    most = 600
    if title == "loss":
        most = 0
    return charts.lines(
        title,
        curves,
        x="step",
        logarithmic=title in _LOGARITHMIC and positive,
        marks=marks,
        form=form,
        most=most,
    )


def _line(run: RunReport, name: str, number: int, kind: int, runs: Sequence[RunReport]) -> Line:
    """Return the curve of a metric: of one run in a colour of its own, of several in their run's.

    Args:
        number: Place of the run on the page.
        kind: Place of the metric in its chart.
    """
    series = run.series[name]
    if len(runs) == 1:
        colour = charts.PALETTE[kind % len(charts.PALETTE)]
        return Line(name, series.steps, series.values, colour)
    dash = charts.DASHES[kind % len(charts.DASHES)]
    colour = charts.PALETTE[number]
    return Line(f"{name}, {run.name}", series.steps, series.values, colour, dash)


def _time(runs: Sequence[RunReport]) -> list[Html | Chart]:
    bars = []
    tables = []
    for run in runs:
        if run.goodput:
            bars.append((run.name, _spent(run.goodput)))
            table = str(run.goodput)
            if len(runs) > 1:
                table = f"{run.name}: {table}"
            tables.append(page.preformatted(table))
    if not bars:
        return []
    title = "Seconds by activity, over all sessions"
    return [charts.stacked_bars(title, bars, x="seconds", form="0,0.[0]"), *tables]


def _spent(goodput: Goodput) -> dict[str, float]:
    """Return activity → seconds, without activities of no time."""
    spent = {}
    for name, seconds in goodput.seconds.items():
        if seconds > 0:
            spent[_SPENT.get(name, name)] = seconds
    return spent


def _config(runs: Sequence[RunReport]) -> list[Html]:
    found = []
    for run in runs:
        if run.config:
            found += _changed(run, runs)
    if len(runs) == 2 and all(run.config for run in runs):
        rows = _field_rows(differences(runs))
        if rows:
            found.append(page.paragraph("Fields that differ between the runs:"))
            found.append(page.table(["field", *_names(runs)], rows))
        else:
            found.append(page.paragraph("The runs have the same config."))
    return found


def _changed(run: RunReport, runs: Sequence[RunReport]) -> list[Html]:
    """Return a table of the fields of a run with other values than in its config file."""
    title = "Fields"
    if len(runs) > 1:
        title = f"{run.name}: fields"
    rows = _field_rows(run.changed)
    if not rows:
        return [page.paragraph(f"{title} that differ from the config file: none.")]
    about = f"{title} that differ from the config file, config.py of the run folder:"
    return [page.paragraph(about), page.table(["field", "in the file", "in the run"], rows)]


def _field_rows(values: Mapping[str, Sequence[Any]]) -> list[list[str]]:
    """Return a row for each field with its two values."""
    rows = []
    for path, (first, second) in values.items():
        rows.append([path, _value(first), _value(second)])
    return rows


def _value(value: Any) -> str:
    if value in ("", [], None):
        return "–"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


def _events(runs: Sequence[RunReport]) -> list[Html]:
    several = len(runs) > 1
    head = ["time (UTC)", "event"]
    if several:
        head.insert(0, "run")
    rows: list[list[str | Cell]] = []
    for run in runs:
        for when, text in run.events:
            row: list[str | Cell] = [Cell(when, when), text]
            if several:
                row.insert(0, run.name)
            rows.append(row)
    if not rows:
        return []
    return [page.table(head, rows, search=len(rows) > 10)]


def _plans(runs: Sequence[RunReport]) -> list[Html]:
    found = []
    for run in runs:
        if run.plan:
            text = page.preformatted(run.plan.rstrip("\n"))
            found.append(page.folded(f"plan.txt of {run.name}", text))
    return found
