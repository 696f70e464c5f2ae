"""`spmd plan`."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic

from spmd.analysis.collective_audit import CollectiveAudit
from spmd.analysis.memory import CATEGORIES, MemoryReport
from spmd.analysis.schedule_chart import chart, to_json, write_svg
from spmd.analysis.topology import missing_extra, parse_topology
from spmd.analysis.wide_products import find_wide_products, is_listed
from spmd.commands.parsing import ConfigFields, parse_command
from spmd.distributed.initialize import initialize
from spmd.distributed.xla_flags import START_UP, exports
from spmd.errors import ConfigError, MeshError, Problem, SpmdError
from spmd.observe.fit import fitted
from spmd.observe.waiting import show_waiting
from spmd.pipeline.schedule import Schedule
from spmd.pipeline.simulate import simulate
from spmd.pipeline.tick_table import describe_execution
from spmd.plan.plan import TABLES
from spmd.run.build import (
    TrainSetup,
    abstract_batch,
    build_flags,
    build_powersgd,
    build_schedule,
    make_setup,
    planned_mesh,
)
from spmd.run.config import M, TrainConfig
from spmd.run.describe import compression_lines, exchange_line, execution_lines, experts_line, flags_text, pipeline_line
from spmd.run.load_config import load_config, other_config
from spmd.run.preflight import (
    check_planned_init,
    compile_step,
    estimate_step,
    preflight,
    suggest_memory_settings,
    topology_mesh,
)
from spmd.run.recipes import recipe_lines
from spmd.run.step_time import estimate_time, time_compiled_step
from spmd.sharding.mesh import AnyMesh
from spmd.step_time.report import StepTime
from spmd.tree import human_bytes


@dataclasses.dataclass(frozen=True)
class PlanCommand(Generic[M]):
    """Print the sharding of every parameter, one line per parameter, and the memory per device during a step.

    Nothing is allocated and no device is needed: a plan for 16,384 chips takes seconds on a laptop.
    """

    config: ConfigFields
    all: bool = False
    """Also print a line for each gradient and each leaf of the optimizer state."""
    json: bool = False
    """Print one JSON object with a record per parameter, gradient and leaf of the optimizer state."""
    topology: str = ""
    """Target machine, such as v5e:16x16, h100:16x8 or cpu:8; it need not be present."""
    diff: str = ""
    """Print the difference from another config's plan: lines of this plan with -, of the other with +."""
    schedule: bool = False
    """Print a chart of the pipeline schedule, and write it to a file."""
    svg: str = "schedule.svg"
    """File of the chart; empty for none."""
    compile: bool = False
    """Compile the step; print the traffic of its collectives, by axis and by source, its memory and compute time."""
    estimate: bool = False
    """Print the time of a step by closed forms, with its range and where it goes; nothing is compiled."""
    time: bool = False
    """Compile the step; print its time from the program's schedule, with its range and where it goes."""
    trace: str = ""
    """With --time: file for the schedule in Chrome's trace format."""


def run_plan(arguments: list[str]) -> int:
    """Run `spmd plan`; return 3 if the plan exceeds the memory of the chips, 4 if the step breaks its promises."""
    command, _ = parse_command(PlanCommand, arguments, "plan")
    views = [name for name in ("all", "diff", "compile", "schedule", "estimate", "time") if getattr(command, name)]
    if len(views) > 1:
        problems = [Problem(f"--{name}", "is one of several views", fix="ask for one of them") for name in views]
        raise ConfigError("A plan has one view at a time:", problems)
    if problems := list(_time_problems(command)):
        raise ConfigError("The time of a step cannot be predicted:", problems)
    config = command.config
    if command.topology:
        config = dataclasses.replace(config, devices=parse_topology(command.topology).devices)
    mesh = mesh_on(command.topology, config)
    if command.schedule:  # before the step, which some schedules cannot run
        return _print_schedule(command, build_schedule(config, mesh))
    topology = parse_topology(command.topology or f"cpu:{mesh.size}")
    setup = make_setup(config, mesh, topology.chip.device_kind)
    preflight(setup)
    init = check_planned_init(setup)
    if command.estimate:
        return _print_time(command, estimate_time(setup, topology))
    if command.time:
        return _print_time(command, time_compiled_step(config, topology, command.trace))
    if command.diff:
        with other_config():
            other = load_config(command.diff)
            difference = setup.plan.diff(make_setup(other, planned_mesh(other)).plan)
        lines = difference.split("\n") if difference else []
        print(json.dumps(lines, indent=2) if command.json else difference or "the plans are the same")
        return 0
    report, refusal = MemoryReport(topology, estimate_step(setup, topology.platform)), ""
    audit = cycles = None
    absent = missing_extra(topology) if command.compile else None
    if command.compile and not absent:
        simulated = topology.devices if topology.platform == "cpu" else 0
        initialize(simulated, target_platform="" if simulated else topology.platform)
        try:
            with show_waiting(f"compiling for {topology}"):
                audit, compiled, cycles, _ = compile_step(make_setup(config, topology_mesh(config, topology)))
            report = dataclasses.replace(report, compiled=compiled)
        except MemoryError as error:
            refusal = str(error)
    fits = False if refusal else report.fits
    settings = suggest_memory_settings(setup, topology) if fits is False else []
    if command.json:
        record = _to_json(setup, report, fits, settings) | {"start": init or None}
        record |= {"compute": cycles.to_json(topology.chip.clock)} if cycles else {}
        print(json.dumps(record | (audit.to_json() if audit else {}), indent=2))
    else:
        _print_plan(command, setup, report, audit, init)
        if cycles:
            print(cycles.text(topology.chip.clock))
        if refusal:
            print(f"\nthe compiler refuses the step: {refusal}")
        if fits is False:
            print(f"\nDOES NOT FIT: most of it is {CATEGORIES[report.largest]}")
            for flags, total in settings:
                print(f"  {human_bytes(total)} with {flags}")
            if not settings:
                print("  no settings were found that fit: use more devices, or a smaller batch")
    if absent:
        print(SpmdError("The step was not compiled:", [absent]), file=sys.stderr)
        return 2
    if fits is False:
        return 3
    return 4 if audit and audit.broken else 0


def _time_problems(command: PlanCommand) -> Iterator[Problem]:
    asked = next((f"--{name}" for name in ("estimate", "time") if getattr(command, name)), "")
    if asked and not command.topology:
        yield Problem(asked, "needs a machine", fix="--topology v5p:4x4x8")
    if command.trace and not command.time:
        yield Problem("--trace", "is the schedule of a compiled program", fix="add --time")
    if command.trace and not Path(command.trace).absolute().parent.is_dir():  # before minutes of compilation
        yield Problem("--trace", f"{command.trace} is in no folder that exists", fix="--trace FILE in one that does")


def _print_time(command: PlanCommand, found: StepTime) -> int:
    print(json.dumps(found.to_json(), indent=2) if command.json else fitted(str(found)))
    if command.trace and not command.json:
        print(f"written to {command.trace}")
    return 3 if found.fits is False else 0


def mesh_on(topology: str, config: TrainConfig) -> AnyMesh:
    """Return the planned mesh; on a named machine nothing is simulated, so no error proposes that."""
    try:
        return planned_mesh(config)
    except MeshError as error:
        if not topology:
            raise
        fix = f"--mesh sizes whose product is {config.devices}, one of them may be -1; or another --topology"
        problems = [dataclasses.replace(p, fix=fix) if "--devices" in p.fix else p for p in error.problems]
        raise MeshError(f"The mesh does not fit {topology}:", problems) from None


def _print_schedule(command: PlanCommand, schedule: Schedule | None) -> int:
    if schedule is None:
        problem = Problem("mesh.pipe", "is 1: there are no stages", fix="--mesh.pipe 4")
        raise ConfigError("There is no schedule to draw:", [problem])
    timeline, execution = simulate(schedule), describe_execution(schedule)
    if command.svg:
        write_svg(timeline, command.svg)
    if command.json:
        print(json.dumps({**to_json(timeline), "execution": execution, "svg": command.svg or None}, indent=2))
    else:
        print(chart(timeline), execution, *([f"written to {command.svg}"] if command.svg else []), sep="\n")
    return 0


def _to_json(
    setup: TrainSetup, report: MemoryReport, fits: bool | None, settings: list[tuple[str, int]]
) -> dict[str, Any]:
    platform, kind = report.topology.platform, report.topology.chip.device_kind
    memory = {**report.to_json(), "fits": fits}
    if fits is False:
        memory |= {"largest": report.largest, "would_fit": [{"flags": f, "total": n} for f, n in settings]}
    flags = {"flags": build_flags(setup.config, platform, kind), "environment": START_UP[platform]}
    return {
        **setup.plan.to_json(),
        "pipeline": pipeline_line(setup).strip() or None,
        "experts": experts_line(setup, (platform, kind)).strip() or None,
        "exchange": exchange_line(setup).strip() or None,
        "quantization": recipe_lines(setup.plan, kind),
        "compression": compression_lines(setup.plan, build_powersgd(setup.config)),
        "topology": str(report.topology),
        "wrap": report.topology.wrap,
        "xla": {name: [dataclasses.asdict(flag) for flag in some] for name, some in flags.items()},
        "memory": memory,
        "fits": fits,
    }


def _print_plan(
    command: PlanCommand, setup: TrainSetup, report: MemoryReport, audit: CollectiveAudit | None, init: str
) -> None:
    platform, kind = report.topology.platform, report.topology.chip.device_kind
    plan = setup.plan.text(*TABLES) if command.all else str(setup.plan)
    shown = str(audit) if audit else plan
    print(fitted(f"{shown}{execution_lines(setup, (platform, kind))}"))
    if is_listed(setup.step):
        print(find_wide_products(setup.step, abstract_batch(setup.config)))
    if init:
        print(init)
    print(flags_text(setup, platform, kind), exports(platform), sep="", end="")
    links = f" ({report.topology.links})" if report.topology.links else ""
    print(fitted(f"\nmemory of one device, {report.topology}{links}\n{report}"))
