"""`spmd report`."""

import dataclasses
from pathlib import Path
from typing import Generic

import tyro

from spmd.analysis.topology import parse_topology
from spmd.commands.parsing import ConfigFields, parse_command, parse_flags
from spmd.commands.plan import mesh_on
from spmd.errors import ConfigError, Problem, did_you_mean
from spmd.observe.waiting import show_waiting
from spmd.report import charts, page
from spmd.report.plan_data import collect_plan
from spmd.report.plan_page import plan_page
from spmd.report.run_data import read_runs
from spmd.report.run_page import run_page
from spmd.run.build import make_setup
from spmd.run.config import M
from spmd.run.load_config import shipped
from spmd.tree import human_bytes

_TITLE = "There is no report:"


@dataclasses.dataclass(frozen=True)
class ReportCommand(Generic[M]):
    """Write a report of a config's plan, with charts: one HTML file, --out, that opens offline.

    The step is compiled for its collectives and their time; nothing is trained. `spmd report RUN [RUN]` is of runs.
    """

    config: ConfigFields
    topology: str = ""
    """Target machine, such as v5e:16x16, h100:16x8 or cpu:8; it need not be present."""
    compile: bool = True
    """Without compilation, which may take minutes, there are no collectives and no timeline."""


@dataclasses.dataclass(frozen=True)
class ReportRunCommand:
    """Write a report of a run, or of two side by side, with charts: one HTML file that opens offline."""

    runs: tyro.conf.Positional[tuple[str, ...]]
    """Run directory, such as runs/demo, or two of them."""
    out: str = ""
    """The HTML file to write."""


def run_report(arguments: list[str]) -> int:
    """Write a report of a config or of runs, and return the exit code."""
    name = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    if not name and not {"-h", "--help"} & set(arguments):
        fix = f"a run folder, a Python file, or one of: {', '.join(shipped())}"
        problem = Problem("CONFIG|RUN", "comes first", fix=fix)
        raise ConfigError("spmd report needs a config or a run:", [problem])
    is_config = not name or name in shipped() or name.endswith(".py")
    if not is_config and not Path(name).is_dir():
        fix = f"{did_you_mean(name, shipped())} (a shipped config); or a run folder, such as runs/demo"
        problem = Problem(name, "is neither a config nor a run folder", fix=fix)
        raise ConfigError(_TITLE, [problem])
    return _report_plan(arguments, name or "demo") if is_config else _report_runs(arguments)


def _report_plan(arguments: list[str], name: str) -> int:
    command, _ = parse_command(ReportCommand, arguments, "report")
    config = command.config
    _check_file(config.out)
    if command.topology:
        config = dataclasses.replace(config, devices=parse_topology(command.topology).devices)
    mesh = mesh_on(command.topology, config)
    topology = parse_topology(command.topology or f"cpu:{mesh.size}")
    setup = make_setup(config, mesh, topology.chip.device_kind)
    report = collect_plan(name, setup, topology, compiles=command.compile)
    _write(plan_page(report), config.out, report.notes)
    return 0


def _report_runs(arguments: list[str]) -> int:
    if any(argument.partition("=")[0] == "--topology" for argument in arguments):
        what, fix = "is for a plan, and a run has its machine", "spmd report CONFIG --topology …"
        problem = Problem("--topology", what, fix=fix)
        raise ConfigError(_TITLE, [problem])
    command: ReportRunCommand = parse_flags(ReportRunCommand, arguments, "spmd report")
    _check_file(command.out)
    if len(command.runs) > 2:
        problem = Problem(command.runs[2], "is one run too many", fix="one or two runs")
        raise ConfigError(_TITLE, [problem])
    with show_waiting("reading the metrics"):
        runs = read_runs(command.runs)
        text = run_page(runs)
    several = len(runs) > 1
    _write(text, command.out, [f"{run.name}: {note}" if several else note for run in runs for note in run.notes])
    return 0


def _check_file(file: str) -> None:
    """Raise for what would fail after minutes: no file, no folder, no library."""
    if problems := page.check_file(file):
        raise ConfigError(_TITLE, problems)
    charts.library()


def _write(text: str, file: str, notes: list[str] | tuple[str, ...]) -> None:
    page.write(text, file)
    for note in notes:
        print(f"note: {note}")
    print(f"written to {file}: {human_bytes(len(text.encode()))}")
