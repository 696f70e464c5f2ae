"""`spmd report`."""

import dataclasses
from collections.abc import Sequence
from typing import Generic

import tyro

from spmd.analysis.topology import parse_topology
from spmd.commands.parsing import (
    ConfigFields,
    F,
    StepFlags,
    leave_devices_alone,
    parse_flags,
    parse_source,
)
from spmd.commands.plan import mesh_on
from spmd.errors import ConfigError, Problem, did_you_mean
from spmd.observe.spinner import spinner
from spmd.report import charts, page
from spmd.report.plan_data import collect_plan
from spmd.report.plan_page import plan_page
from spmd.report.run_data import read_runs
from spmd.report.run_page import run_page
from spmd.run.config import M
from spmd.run.load_config import is_python_file, shipped
from spmd.run.run_dir import RunDir
from spmd.storage.address import locate
from spmd.storage.output_file import write_output
from spmd.tree import human_bytes

_TITLE = "Report not written:"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ReportOptions:
    topology: str = ""
    """Target machine, such as v5e:16x16, v4-32, h100:16x8, mychip.toml:1x8 or cpu:8; it need not be
    present."""
    compile: bool = True
    """Without compilation, which may take minutes, there are no collectives and no timeline."""


@dataclasses.dataclass(frozen=True)
class ReportCommand(_ReportOptions, Generic[M]):
    """Write a report of a config's plan, with charts: one HTML file (--out) for offline use.

    The step is compiled for its collectives and their time; nothing is trained. `spmd report
    RUN [RUN]` is of runs.
    """

    config: ConfigFields


@dataclasses.dataclass(frozen=True)
class ReportStepCommand(_ReportOptions, Generic[F]):
    """Write a report of the plan of your own train step, as of a config: one HTML file.

    FILE defines make(mesh, **settings), which returns a step from spmd.make_train_step and a batch.
    """

    flags: StepFlags[F]
    out: str = ""
    """The HTML file to write."""


@dataclasses.dataclass(frozen=True)
class ReportRunCommand:
    """Write a report of a run, or of two side by side, with charts: one HTML file.

    It opens offline.
    """

    runs: tyro.conf.Positional[tuple[str, ...]]
    """Run directory, such as runs/demo, or two of them."""
    out: str = ""
    """The HTML file to write."""


def run_report(arguments: list[str]) -> int:
    """Write a report of a config or of runs, and return the exit code."""
    name = ""
    if arguments and not arguments[0].startswith("-"):
        name = arguments[0]
    if not name:
        _check_asks_for_help(arguments)
        return _report_plan(arguments, "demo")
    if name in shipped() or is_python_file(name):
        return _report_plan(arguments, name)
    if not RunDir(locate(name)).path.is_dir():
        meant = did_you_mean(name, shipped())
        problem = Problem(
            name,
            "is neither a config nor a run folder",
            fix=f"{meant} (a shipped config); or a run folder, such as runs/demo",
        )
        raise ConfigError(_TITLE, [problem])
    return _report_runs(arguments)


def _check_asks_for_help(arguments: list[str]) -> None:
    """Raise if neither a config or a run is named nor help is asked for."""
    if "-h" in arguments or "--help" in arguments:
        return
    names = ", ".join(shipped())
    problem = Problem(
        "CONFIG|RUN",
        "comes first",
        fix=f"a run folder, a Python file, or one of: {names}",
    )
    raise ConfigError("spmd report needs a config or a run:", [problem])


def _report_plan(arguments: list[str], name: str) -> int:
    leave_devices_alone(arguments)
    command, source, _ = parse_source(ReportCommand, ReportStepCommand, arguments, "report")
    out = command.config.out if isinstance(command, ReportCommand) else command.out
    _check_file(out)
    if command.topology:
        source = source.with_devices(parse_topology(command.topology).devices)
    mesh = mesh_on(command.topology, source)
    topology = parse_topology(command.topology or f"cpu:{mesh.size}")
    planned = source.on(mesh, topology.chip.device_kind)
    report = collect_plan(name, source, planned, topology, compiles=command.compile)
    with spinner("drawing the page"):
        text = plan_page(report)
    _write(text, out, report.notes)
    return 0


def _report_runs(arguments: list[str]) -> int:
    for argument in arguments:
        if argument.partition("=")[0] == "--topology":
            problem = Problem(
                "--topology",
                "is for a plan, and a run has its machine",
                fix="spmd report CONFIG --topology …",
            )
            raise ConfigError(_TITLE, [problem])
    command: ReportRunCommand = parse_flags(ReportRunCommand, arguments, "spmd report")
    _check_file(command.out)
    if len(command.runs) > 2:
        problem = Problem(command.runs[2], "is one run too many", fix="one or two runs")
        raise ConfigError(_TITLE, [problem])
    with spinner("reading the metrics"):
        runs = read_runs(command.runs)
        text = run_page(runs)
    notes = []
    for run in runs:
        for note in run.notes:
            if len(runs) > 1:
                note = f"{run.name}: {note}"
            notes.append(note)
    _write(text, command.out, notes)
    return 0


def _check_file(file: str) -> None:
    """Raise for mistakes before minutes of work: no file, no folder, no library."""
    problems = page.check_file("--out", file)
    if problems:
        raise ConfigError(_TITLE, problems)
    charts.library()


def _write(text: str, file: str, notes: Sequence[str]) -> None:
    write_output("--out", file, text)
    for note in notes:
        print(f"note: {note}")
    print(f"written to {file}: {human_bytes(len(text.encode()))}")
