"""`spmd plan`."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Any, Generic

from spmd.analysis.memory import CATEGORIES, MemoryReport
from spmd.analysis.schedule_chart import chart, svg, to_json
from spmd.analysis.topology import (
    Topology,
    compiler_versions,
    missing_extra,
    parse_topology,
)
from spmd.analysis.wide_products import find_wide_products, is_listed
from spmd.commands.parsing import ConfigFields, F, StepFlags, leave_devices_alone, parse_source
from spmd.errors import ConfigError, MeshError, Problem, SpmdError
from spmd.observe.metrics import human_duration
from spmd.observe.spinner import spinner
from spmd.observe.wrap_text import wrap_to_terminal
from spmd.pipeline.schedule import Schedule
from spmd.pipeline.simulate import simulate
from spmd.pipeline.tick_table import describe_execution
from spmd.plan.plan import TABLES
from spmd.run.build import build_schedule, make_setup, planned_mesh
from spmd.run.config import M
from spmd.run.describe import compression_lines, flags_text, powersgd_of
from spmd.run.load_config import load_config, other_config
from spmd.run.planned_step import CompiledStep, PlannedStep, estimate_step
from spmd.run.recipes import recipe_lines
from spmd.run.search import changed_flags, suggest_memory_settings
from spmd.run.step_source import StepSource, compile_on, time_compiled_step
from spmd.run.step_time import time_program
from spmd.sharding.mesh import AnyMesh
from spmd.step_time.report import StepTime
from spmd.storage.output_file import output_problems, write_output
from spmd.tree import human_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PlanOptions:
    all: bool = False
    """Also print a line for each gradient and each leaf of the optimizer state; equal lines of
    unrolled layers are not folded."""
    json: bool = False
    """Print JSON: a record per parameter, gradient and leaf of the optimizer state."""
    topology: str = ""
    """Target machine, such as v5e:16x16, v4-32, h100:16x8, mychip.toml:1x8 or cpu:8; it need not be
    present."""
    compile: bool = False
    """Compile the step; print its memory, compute time, and collectives by axis and source."""
    estimate: bool = False
    """Print a step's time, its range and its parts, by closed forms of a config or a roofline of the
    traced step; nothing is compiled."""
    time: bool = False
    """Compile the step; print its time from the program's schedule, its range and its parts."""
    trace: str = ""
    """With --time: file for the schedule in Chrome's trace format."""


@dataclasses.dataclass(frozen=True)
class PlanCommand(_PlanOptions, Generic[M]):
    """Print the sharding of every parameter, one line per parameter, and the memory per device
    during a step.

    Nothing is allocated and no device is needed: a plan for 16,384 chips takes seconds on a laptop.
    """

    config: ConfigFields
    diff: str = ""
    """Print a diff with another config's plan: lines of this one with -, of that with +."""
    schedule: bool = False
    """Print a chart of the pipeline schedule, and write it to a file."""
    svg: str = "schedule.svg"
    """File of the chart; empty for none."""


@dataclasses.dataclass(frozen=True)
class PlanStepCommand(_PlanOptions, Generic[F]):
    """Print the sharding of every parameter of your own train step, and the memory per device.

    FILE defines make(mesh, **settings), which returns a step from spmd.make_train_step and a batch
    (shapes are enough); its keyword arguments are flags here. Or it has a step and a batch.
    """

    flags: StepFlags[F]


@dataclasses.dataclass(frozen=True)
class _Figures:
    """Figures of a plan on a machine, with those of the compiled step if it was compiled.

    Attributes:
        compiled: None if it was not compiled.
        time: Predicted from the program; None where no speeds are known.
        refusal: Why the compiler refuses the step; empty if it does not.
    """

    memory: MemoryReport
    compiled: CompiledStep | None = None
    time: StepTime | None = None
    refusal: str = ""

    @property
    def fits(self) -> bool | None:
        """True if the step fits the chip; None for simulated devices."""
        if self.refusal:
            return False
        return self.memory.fits


@dataclasses.dataclass(frozen=True)
class _WouldFit:
    """Flags to make a step fit.

    Attributes:
        total: Bytes of a device by the ledger.
        seconds: Step by closed forms; None for a model that has none.
    """

    flags: str
    total: int
    seconds: float | None


def _settings_that_fit(
    source: StepSource, planned: PlannedStep, topology: Topology
) -> list[_WouldFit]:
    """Return the fastest settings to make a step fit on its mesh; none if there are none."""
    found = list[_WouldFit]()
    with spinner("searching settings that fit"):
        own, search = suggest_memory_settings(source, planned, topology)
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
    leave_devices_alone(arguments)
    command, source, _ = parse_source(PlanCommand, PlanStepCommand, arguments, "plan")
    _check_views(command)
    if command.topology:
        source = source.with_devices(parse_topology(command.topology).devices)
    mesh = mesh_on(command.topology, source)
    if isinstance(command, PlanCommand) and command.schedule:
        # Before the step, which some schedules cannot run.
        schedule = build_schedule(command.config, mesh)
        recompute = command.config.pipeline.recomputes
        return _print_schedule(command, schedule, recompute=recompute)
    topology = parse_topology(command.topology or f"cpu:{mesh.size}")
    planned = source.on(mesh, topology.chip.device_kind)
    start = source.start(planned)
    if command.estimate:
        return _print_time(command, source.estimate_time(planned, topology))
    if command.time:
        return _print_time(command, time_compiled_step(source, topology, command.trace))
    if isinstance(command, PlanCommand) and command.diff:
        return _print_difference(command, planned)
    return _print_figures(command, source, planned, topology, start)


def _check_views(command: _PlanOptions) -> None:
    """Raise if more than one view is asked for, or one without its flags."""
    views = []
    for name in ("all", "diff", "compile", "schedule", "estimate", "time"):
        if getattr(command, name, False):
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


def _time_problems(command: _PlanOptions) -> Iterator[Problem]:
    for name in ("estimate", "time"):
        if getattr(command, name) and not command.topology:
            yield Problem(f"--{name}", "needs a machine", fix="--topology v5p:4x4x8")
    if not command.trace:
        return
    if not command.time:
        yield Problem("--trace", "is the schedule of a compiled program", fix="add --time")
    yield from output_problems("--trace", command.trace)  # before minutes of compilation


def _print_time(command: _PlanOptions, found: StepTime) -> int:
    if command.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        print(wrap_to_terminal(str(found)))
        if command.trace:
            print(f"written to {command.trace}")
    if found.fits is False:
        return 3
    return 0


def _print_difference(command: PlanCommand, planned: PlannedStep) -> int:
    with other_config():
        other = load_config(command.diff)
        if other.mesh.total() is None:
            other = dataclasses.replace(other, devices=planned.mesh.size)
        other_plan = make_setup(other, planned_mesh(other)).plan
        difference = planned.plan.diff(other_plan)
    if not command.json:
        print(difference or "the plans are the same")
        return 0
    lines = []
    if difference:
        lines = difference.split("\n")
    print(json.dumps(lines, indent=2))
    return 0


def _print_figures(
    command: _PlanOptions,
    source: StepSource,
    planned: PlannedStep,
    topology: Topology,
    start: str,
) -> int:
    """Print the plan and its memory, of the compiled step if asked for; return the exit code."""
    absent = None
    compiled = None
    refusal = ""
    if command.compile:
        absent = missing_extra(topology)
        if not absent:
            planned, compiled, refusal = _compile(source, planned, topology)
    figures = _figures(source, planned, topology, compiled, refusal)
    settings: list[_WouldFit] = []
    if figures.fits is False:
        settings = _settings_that_fit(source, planned, topology)
    if command.json:
        record = _to_json(source, planned, figures, settings, start)
        print(json.dumps(record, indent=2))
    else:
        _print_plan(command, source, planned, figures, start)
        if figures.fits is False:
            _print_excess(figures.memory, settings)
    if absent:
        print(SpmdError("The step was not compiled:", [absent]), file=sys.stderr)
        return 2
    if figures.fits is False:
        return 3
    if figures.compiled and figures.compiled.audit.broken:
        return 4
    return 0


def _compile(
    source: StepSource, planned: PlannedStep, topology: Topology
) -> tuple[PlannedStep, CompiledStep | None, str]:
    """Compile the step for a machine.

    Returns:
        The step on the machine's devices, compiled; or without room for it there, the step as it
        was, and the refusal.
    """
    try:
        made = compile_on(source, topology, planned.slices)
    except MemoryError as error:
        return planned, None, str(error)
    return made.planned, made.compiled, ""


def _figures(
    source: StepSource,
    planned: PlannedStep,
    topology: Topology,
    compiled: CompiledStep | None,
    refusal: str,
) -> _Figures:
    """Return the figures of a step; the trace of a compiled one is read again, not made again."""
    memory = MemoryReport(topology, estimate_step(planned, topology.platform))
    if compiled is None:
        return _Figures(memory, refusal=refusal)
    memory = dataclasses.replace(memory, compiled=compiled.memory)
    return _Figures(memory, compiled, _program_time(source, planned, topology, compiled))


def _program_time(
    source: StepSource, planned: PlannedStep, topology: Topology, compiled: CompiledStep
) -> StepTime | None:
    """Return the time of a compiled step; None where `--time` would be refused."""
    if compiled.cycles is None or topology.chip.speeds is None or topology.chip.compiled is None:
        return None
    try:
        work = source.workload(planned)
    except ConfigError:  # no rates are fitted to such a step
        return None
    time, _ = time_program(planned, topology, compiled, work)
    return time


def mesh_on(topology: str, source: StepSource) -> AnyMesh:
    """Return the planned mesh; no error proposes to simulate devices of a named machine."""
    try:
        return source.planned_mesh()
    except MeshError as error:
        if not topology:
            raise
        devices = parse_topology(topology).devices
        fix = (
            f"--mesh sizes whose product is {devices}, one of them may be -1; or another --topology"
        )
        problems = []
        for problem in error.problems:
            if "simulate_devices" in problem.fix:
                problem = dataclasses.replace(problem, fix=fix)
            problems.append(problem)
        raise MeshError(f"The mesh does not fit {topology}:", problems) from None


def _print_schedule(command: PlanCommand, schedule: Schedule | None, *, recompute: bool) -> int:
    if schedule is None:
        problem = Problem("mesh.pipe", "is 1: there are no stages", fix="--mesh.pipe 4")
        raise ConfigError("No pipeline schedule to draw:", [problem])
    timeline = simulate(schedule)
    execution = describe_execution(schedule, recompute=recompute)
    if command.svg:
        write_output("--svg", command.svg, svg(timeline))
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
    source: StepSource,
    planned: PlannedStep,
    figures: _Figures,
    settings: list[_WouldFit],
    start: str,
) -> dict[str, Any]:
    """Return everything about a plan as JSON values.

    Args:
        settings: Flags to make the step fit.
        start: What the run starts from; empty for a seed.
    """
    topology = figures.memory.topology
    platform = topology.platform
    kind = topology.chip.device_kind
    record = {
        **planned.plan.to_json(),
        **source.details(planned, (platform, kind)),
        "quantization": recipe_lines(planned.plan, kind),
        "compression": compression_lines(planned.plan, powersgd_of(planned.plan)),
        "topology": str(topology),
        "wrap": topology.wrap,
        "xla": {
            "flags": list(map(dataclasses.asdict, source.flags(platform, kind))),
        },
        "memory": _memory_json(figures, settings),
        "fits": figures.fits,
        "start": start or None,
    }
    compiled = figures.compiled
    if compiled is None:
        return record
    record["versions"] = compiler_versions()
    record["compilation"] = dataclasses.asdict(compiled.took)
    if compiled.cycles:
        record["compute"] = compiled.cycles.to_json(topology.chip.clock)
    if figures.time:
        record["time"] = figures.time.to_json()
    return record | compiled.audit.to_json()


def _memory_json(figures: _Figures, settings: list[_WouldFit]) -> dict[str, Any]:
    memory = {**figures.memory.to_json(), "fits": figures.fits}
    if figures.fits is False:
        memory["largest"] = figures.memory.largest
        memory["would_fit"] = list(map(dataclasses.asdict, settings))
    return memory


def _print_plan(
    command: _PlanOptions,
    source: StepSource,
    planned: PlannedStep,
    figures: _Figures,
    start: str,
) -> None:
    topology = figures.memory.topology
    platform = topology.platform
    kind = topology.chip.device_kind
    compiled = figures.compiled
    if compiled:
        shown = str(compiled.audit)
    elif command.all:
        shown = planned.plan.text(*TABLES)
    else:
        shown = str(planned.plan)
    print(wrap_to_terminal(f"{shown}{source.lines(planned, (platform, kind))}"))
    if is_listed(planned.step):
        print(find_wide_products(planned.step, planned.batch))
    if start:
        print(start)
    print(flags_text(source.flags(platform, kind), platform), end="")
    details = ""
    if topology.details:
        details = f" ({topology.details})"
    print(wrap_to_terminal(f"\nmemory of one device, {topology}{details}\n{figures.memory}"))
    if compiled and compiled.cycles:
        print(compiled.cycles.text(topology.chip.clock))
    if figures.time:
        print(f"{figures.time.summary} (its parts: --time)")
    if compiled:
        print(compiled.took)
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
