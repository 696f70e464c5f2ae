"""`spmd plan`."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic

from spmd.analysis.collective_audit import CollectiveAudit
from spmd.analysis.cycles import Cycles
from spmd.analysis.memory import CATEGORIES, MemoryReport
from spmd.analysis.schedule_chart import chart, to_json, write_svg
from spmd.analysis.topology import Topology, missing_extra, parse_topology
from spmd.analysis.wide_products import find_wide_products, is_listed
from spmd.commands.parsing import ConfigFields, parse_command
from spmd.distributed.initialize import initialize
from spmd.distributed.xla_flags import START_UP, exports
from spmd.errors import ConfigError, MeshError, Problem, SpmdError
from spmd.observe.metrics import human_duration
from spmd.observe.spinner import spinner
from spmd.observe.wrap_text import wrap_to_terminal
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
from spmd.run.describe import (
    compression_lines,
    exchange_line,
    execution_lines,
    experts_line,
    flags_text,
    pipeline_line,
)
from spmd.run.load_config import load_config, other_config
from spmd.run.preflight import (
    check_planned_init,
    compile_step,
    estimate_step,
    preflight,
    topology_mesh,
)
from spmd.run.recipes import recipe_lines
from spmd.run.search import changed_flags, own_settings, suggest_memory_settings
from spmd.run.step_time import estimate_time, time_compiled_step
from spmd.sharding.mesh import AnyMesh
from spmd.step_time.report import StepTime
from spmd.tree import human_bytes


@dataclasses.dataclass(frozen=True)
class PlanCommand(Generic[M]):
    """Print the sharding of every parameter, one line per parameter, and the memory per device
    during a step.

    Nothing is allocated and no device is needed: a plan for 16,384 chips takes seconds on a laptop.
    """

    config: ConfigFields
    all: bool = False
    """Also print a line for each gradient and each leaf of the optimizer state; equal lines of
    unrolled layers are not folded."""
    json: bool = False
    """Print JSON: a record per parameter, gradient and leaf of the optimizer state."""
    topology: str = ""
    """Target machine, such as v5e:16x16, h100:16x8 or cpu:8; it need not be present."""
    diff: str = ""
    """Print a diff with another config's plan: lines of this one with -, of that with +."""
    schedule: bool = False
    """Print a chart of the pipeline schedule, and write it to a file."""
    svg: str = "schedule.svg"
    """File of the chart; empty for none."""
    compile: bool = False
    """Compile the step; print its memory, compute time, and collectives by axis and source."""
    estimate: bool = False
    """Print a step's time by closed forms, its range and its parts; nothing is compiled."""
    time: bool = False
    """Compile the step; print its time from the program's schedule, its range and its parts."""
    trace: str = ""
    """With --time: file for the schedule in Chrome's trace format."""


@dataclasses.dataclass(frozen=True)
class _Figures:
    """Figures of a plan on a machine, with those of the compiled step if it was compiled.

    Attributes:
        refusal: Why the compiler refuses the step; empty if it does not.
    """

    memory: MemoryReport
    audit: CollectiveAudit | None = None
    cycles: Cycles | None = None
    refusal: str = ""

    @property
    def fits(self) -> bool | None:
        """True if the step fits the chip; None for simulated devices."""
        if self.refusal:
            return False
        return self.memory.fits


@dataclasses.dataclass(frozen=True)
class _WouldFit:
    """Flags with which a step would fit.

    Attributes:
        total: Bytes of a device by the ledger.
        seconds: Step by closed forms; None for a model that has none.
    """

    flags: str
    total: int
    seconds: float | None


def _settings_that_fit(setup: TrainSetup, topology: Topology) -> list[_WouldFit]:
    """Return the fastest settings with which a step fits, on the config's mesh; none if no such."""
    found = list[_WouldFit]()
    own = own_settings(setup)
    with spinner("searching settings that fit"):
        search = suggest_memory_settings(setup, topology)
        for candidate in search.fitting(1):
            if candidate.refused:
                continue
            flags = changed_flags(own, candidate.settings)
            found.append(_WouldFit(flags, candidate.memory or 0, candidate.seconds or None))
    return found


def run_plan(arguments: list[str]) -> int:
    """Run `spmd plan` and return its exit code.

    It is 3 if the plan exceeds the memory of the chips, 4 if the step breaks its promises.
    """
    command, _ = parse_command(PlanCommand, arguments, "plan")
    _check_views(command)
    config = command.config
    if command.topology:
        devices = parse_topology(command.topology).devices
        config = dataclasses.replace(config, devices=devices)
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
        return _print_difference(command, setup)
    return _print_figures(command, setup, topology, init)


def _check_views(command: PlanCommand) -> None:
    """Raise if more than one view is asked for, or one without its flags."""
    views = []
    for name in ("all", "diff", "compile", "schedule", "estimate", "time"):
        if getattr(command, name):
            views.append(name)
    if len(views) > 1:
        problems = []
        for name in views:
            problem = Problem(
                f"--{name}",
                "is one of several views",
                fix="ask for one of them",
            )
            problems.append(problem)
        raise ConfigError("Conflicting views of a plan:", problems)
    problems = list(_time_problems(command))
    if problems:
        raise ConfigError("The time of a step cannot be predicted:", problems)


def _time_problems(command: PlanCommand) -> Iterator[Problem]:
    for name in ("estimate", "time"):
        if getattr(command, name) and not command.topology:
            yield Problem(f"--{name}", "needs a machine", fix="--topology v5p:4x4x8")
    if not command.trace:
        return
    if not command.time:
        yield Problem("--trace", "is the schedule of a compiled program", fix="add --time")
    if not Path(command.trace).absolute().parent.is_dir():  # before minutes of compilation
        yield Problem(
            "--trace",
            f"{command.trace} is in no folder that exists",
            fix="--trace FILE in one that does",
        )


def _print_time(command: PlanCommand, found: StepTime) -> int:
    if command.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        print(wrap_to_terminal(str(found)))
        if command.trace:
            print(f"written to {command.trace}")
    if found.fits is False:
        return 3
    return 0


def _print_difference(command: PlanCommand, setup: TrainSetup) -> int:
    with other_config():
        other = load_config(command.diff)
        if other.mesh.total() is None:
            other = dataclasses.replace(other, devices=setup.mesh.size)
        other_plan = make_setup(other, planned_mesh(other)).plan
        difference = setup.plan.diff(other_plan)
    if not command.json:
        print(difference or "the plans are the same")
        return 0
    lines = []
    if difference:
        lines = difference.split("\n")
    print(json.dumps(lines, indent=2))
    return 0


def _print_figures(command: PlanCommand, setup: TrainSetup, topology: Topology, init: str) -> int:
    """Print the plan and its memory, of the compiled step if asked for; return the exit code."""
    absent = None
    figures = _Figures(MemoryReport(topology, estimate_step(setup, topology.platform)))
    if command.compile:
        absent = missing_extra(topology)
        if not absent:
            figures = _compile(setup.config, topology, figures.memory)
    settings: list[_WouldFit] = []
    if figures.fits is False:
        settings = _settings_that_fit(setup, topology)
    if command.json:
        record = _to_json(setup, figures, settings, init)
        print(json.dumps(record, indent=2))
    else:
        _print_plan(command, setup, figures, init)
        if figures.fits is False:
            _print_excess(figures.memory, settings)
    if absent:
        print(SpmdError("The step was not compiled:", [absent]), file=sys.stderr)
        return 2
    if figures.fits is False:
        return 3
    if figures.audit and figures.audit.broken:
        return 4
    return 0


def _compile(config: TrainConfig, topology: Topology, memory: MemoryReport) -> _Figures:
    """Compile the step for a machine; without room for it there, return a refusal."""
    if topology.platform == "cpu":
        initialize(topology.devices)
    else:
        initialize(target_platform=topology.platform)
    try:
        with spinner(f"compiling for {topology}"):
            setup = make_setup(config, topology_mesh(config, topology))
            audit, compiled, cycles, _ = compile_step(setup)
    except MemoryError as error:
        return _Figures(memory, refusal=str(error))
    return _Figures(dataclasses.replace(memory, compiled=compiled), audit, cycles)


def mesh_on(topology: str, config: TrainConfig) -> AnyMesh:
    """Return the planned mesh; no error proposes to simulate devices of a named machine."""
    if not topology and not config.devices and config.mesh.total() is None:
        what = "takes all devices of a machine, and none is named"
        fix = (
            "a machine, such as --topology v5e:4x4, a number, --devices 16, or a size of each axis"
        )
        raise MeshError("Unknown number of devices:", [Problem("mesh", what, fix=fix)])
    try:
        return planned_mesh(config)
    except MeshError as error:
        if not topology:
            raise
        fix = (
            f"--mesh sizes whose product is {config.devices}, one of them may be -1; "
            "or another --topology"
        )
        problems = []
        for problem in error.problems:
            if "simulate_devices" in problem.fix:
                problem = dataclasses.replace(problem, fix=fix)
            problems.append(problem)
        raise MeshError(f"The mesh does not fit {topology}:", problems) from None


def _print_schedule(command: PlanCommand, schedule: Schedule | None) -> int:
    if schedule is None:
        problem = Problem("mesh.pipe", "is 1: there are no stages", fix="--mesh.pipe 4")
        raise ConfigError("No pipeline schedule to draw:", [problem])
    timeline = simulate(schedule)
    execution = describe_execution(schedule)
    if command.svg:
        write_svg(timeline, command.svg)
    if command.json:
        record = {**to_json(timeline), "execution": execution, "svg": command.svg or None}
        print(json.dumps(record, indent=2))
        return 0
    print(chart(timeline))
    print(execution)
    if command.svg:
        print(f"written to {command.svg}")
    return 0


def _to_json(
    setup: TrainSetup, figures: _Figures, settings: list[_WouldFit], init: str
) -> dict[str, Any]:
    """Return everything about a plan as JSON values.

    Args:
        settings: Flags with which the step would fit.
        init: What the run starts from; empty for a seed.
    """
    topology = figures.memory.topology
    platform = topology.platform
    kind = topology.chip.device_kind
    record = {
        **setup.plan.to_json(),
        "pipeline": pipeline_line(setup).strip() or None,
        "experts": experts_line(setup, (platform, kind)).strip() or None,
        "exchange": exchange_line(setup).strip() or None,
        "quantization": recipe_lines(setup.plan, kind),
        "compression": compression_lines(setup.plan, build_powersgd(setup.config)),
        "topology": str(topology),
        "wrap": topology.wrap,
        "xla": {
            "flags": list(map(dataclasses.asdict, build_flags(setup.config, platform, kind))),
            "environment": list(map(dataclasses.asdict, START_UP[platform])),
        },
        "memory": _memory_json(figures, settings),
        "fits": figures.fits,
        "start": init or None,
    }
    if figures.cycles:
        record["compute"] = figures.cycles.to_json(topology.chip.clock)
    if figures.audit:
        record |= figures.audit.to_json()
    return record


def _memory_json(figures: _Figures, settings: list[_WouldFit]) -> dict[str, Any]:
    memory = {**figures.memory.to_json(), "fits": figures.fits}
    if figures.fits is False:
        memory["largest"] = figures.memory.largest
        memory["would_fit"] = list(map(dataclasses.asdict, settings))
    return memory


def _print_plan(command: PlanCommand, setup: TrainSetup, figures: _Figures, init: str) -> None:
    topology = figures.memory.topology
    platform = topology.platform
    kind = topology.chip.device_kind
    if figures.audit:
        shown = str(figures.audit)
    elif command.all:
        shown = setup.plan.text(*TABLES)
    else:
        shown = str(setup.plan)
    print(wrap_to_terminal(f"{shown}{execution_lines(setup, (platform, kind))}"))
    if is_listed(setup.step):
        print(find_wide_products(setup.step, abstract_batch(setup.config)))
    if init:
        print(init)
    print(flags_text(setup, platform, kind), exports(platform), sep="", end="")
    links = ""
    if topology.links:
        links = f" ({topology.links})"
    print(wrap_to_terminal(f"\nmemory of one device, {topology}{links}\n{figures.memory}"))
    if figures.cycles:
        print(figures.cycles.text(topology.chip.clock))
    if figures.refusal:
        print(f"\nthe compiler refuses the step: {figures.refusal}")


def _print_excess(memory: MemoryReport, settings: list[_WouldFit]) -> None:
    """Print the largest part of a step without room on the chip, and settings with less."""
    print(f"\nDOES NOT FIT: most of it is {CATEGORIES[memory.largest]}")
    for found in settings:
        predicted = ""
        if found.seconds:
            predicted = f", {human_duration(found.seconds)} a step"
        print(wrap_to_terminal(f"  {human_bytes(found.total)}{predicted}, with {found.flags}"))
    if not settings:
        print("  no settings were found that fit: use more devices, or a smaller batch")
