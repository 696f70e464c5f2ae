"""`spmd plan`."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, Generic

from spmd.analysis.collective_audit import CollectiveAudit
from spmd.analysis.memory import CATEGORIES, MemoryReport
from spmd.analysis.schedule_chart import chart, to_json, write_svg
from spmd.analysis.topology import missing_extra, parse_topology
from spmd.commands.parsing import ConfigFields, parse_command
from spmd.distributed import initialize as launch
from spmd.distributed.xla_flags import START_UP, exports
from spmd.errors import ConfigError, Problem, SpmdError
from spmd.pipeline.simulate import simulate
from spmd.pipeline.tick_table import describe_execution
from spmd.run.build import TrainSetup, planned_mesh, topology_mesh
from spmd.run.config import M
from spmd.run.init_from import check_start
from spmd.run.load_config import load_config
from spmd.run.suggest import suggest_memory_settings
from spmd.tree import human_bytes


@dataclasses.dataclass(frozen=True)
class PlanCommand(Generic[M]):
    """Shows how every parameter is split, one line for each parameter, and what each device holds during a step.

    Nothing is allocated and no device is needed: a plan for 16,384 chips takes seconds on a laptop.
    """

    config: ConfigFields
    all: bool = False
    """Print a line for each gradient and each leaf of the optimizer's state, too."""
    json: bool = False
    """Print one JSON object with a record for each parameter, gradient and leaf of the optimizer's state."""
    topology: str = ""
    """The machine that is planned for, such as v5e:16x16, h100:16x8 or cpu:8; it need not be here."""
    diff: str = ""
    """Print what differs from the plan of another config: lines of this plan with -, of the other with +."""
    schedule: bool = False
    """Draw what each stage of the pipeline does over time, and write the picture to a file."""
    svg: str = "schedule.svg"
    """The file of that picture; empty for none."""
    compile: bool = False
    """Compile the step, print what its collectives send, by axis and by source, and its memory as compiled."""


def run_plan(arguments: list[str]) -> int:
    """Prints the plan: 0, or 3 where it does not fit."""
    command, _ = parse_command(PlanCommand, arguments, "plan")
    chosen = [name for name in ("all", "diff", "compile", "schedule") if getattr(command, name)]
    if len(chosen) > 1:
        problems = [Problem(f"--{name}", "is one of several views", fix="ask for one of them") for name in chosen]
        raise ConfigError("A plan has one view at a time:", problems)
    config = command.config
    if command.topology:
        topology = parse_topology(command.topology)
        config = dataclasses.replace(config, devices=topology.devices)
    setup = TrainSetup(config, planned_mesh(config))
    topology = topology if command.topology else parse_topology(f"cpu:{setup.mesh.size}")
    if command.schedule:
        return _print_schedule(command, setup)
    setup.audit()
    if command.diff:
        other = load_config(command.diff)
        difference = setup.plan.diff(TrainSetup(other, planned_mesh(other)).plan)
        lines = difference.split("\n") if difference else []
        print(json.dumps(lines, indent=2) if command.json else difference or "the plans are the same")
        return 0
    starts = _start_line(setup)
    ledger, audit, refused = MemoryReport(topology, setup.memory(topology.platform)), None, ""
    absent = missing_extra(topology) if command.compile else None
    if command.compile and not absent:
        simulated = topology.devices if topology.platform == "cpu" else 0
        launch.start(launch.Launch(simulated, absent="" if simulated else topology.platform))
        try:
            audit, compiled = TrainSetup(config, topology_mesh(config, topology)).compile()
            ledger = dataclasses.replace(ledger, compiled=compiled)
        except MemoryError as error:
            refused = str(error)
    _print_plan(command, setup, ledger, audit, refused, starts)
    if absent:
        print(SpmdError("The step was not compiled:", [absent]), file=sys.stderr)
        return 2
    return 3 if refused or ledger.fits is False else 0


def _print_schedule(command: PlanCommand, setup: TrainSetup) -> int:
    """The pipeline over time, and whether and how it is executed."""
    if setup.stages == 1:
        problem = Problem("mesh.pipe", "is 1: there are no stages", fix="--mesh.pipe 4")
        raise ConfigError("There is no schedule to draw:", [problem])
    timeline = simulate(setup.pipeline)
    execution = describe_execution(setup.pipeline)
    if command.svg:
        write_svg(timeline, command.svg)
    if command.json:
        print(json.dumps({**to_json(timeline), "execution": execution, "svg": command.svg or None}, indent=2))
        return 0
    print(chart(timeline))
    print(execution)
    if command.svg:
        print(f"written to {command.svg}")
    return 0


def _start_line(setup: TrainSetup) -> str:
    """What the run would start with, once its folder was compared; it may be where the run will be, and not here."""
    start = setup.config.init
    if start and not Path(start).exists():
        return f"starts with {start}, which is not on this machine: nothing was compared with it"
    return check_start(setup)


def _print_plan(
    command: PlanCommand,
    setup: TrainSetup,
    ledger: MemoryReport,
    audit: CollectiveAudit | None,
    refused: str,
    starts: str,
) -> None:
    """The plan and its ledger, or what is sent and the ledger; and what would fit, where it does not."""
    fits = False if refused else ledger.fits
    settings = suggest_memory_settings(setup, ledger.topology) if fits is False else []
    platform = ledger.topology.platform
    if command.json:
        memory = {**ledger.to_json(), "fits": fits}
        if fits is False:
            memory |= {"largest": ledger.largest, "would_fit": [{"flags": f, "total": n} for f, n in settings]}
        about: dict[str, Any] = {"pipeline": setup.pipeline_line.strip() or None, "topology": str(ledger.topology)}
        about["start"] = starts or None
        about["xla"] = {
            "flags": [dataclasses.asdict(flag) for flag in setup.flags(platform)],
            "environment": [dataclasses.asdict(flag) for flag in START_UP[platform]],
        }
        record = {**setup.plan.to_json(), **about, "memory": memory, "fits": fits}
        print(json.dumps(record | (audit.to_json() if audit else {}), indent=2))
        return
    tables = ("params", "variables", "gradients", "optimizer_state") if command.all else ("params", "variables")
    print(audit if audit else setup.plan.text(*tables), end=f"{setup.pipeline_line}{setup.slices_line}\n")
    if starts:
        print(starts)
    print(setup.flags_text(platform), exports(platform), sep="", end="")
    print(f"\nmemory of one device, {ledger.topology}\n{ledger}")
    if refused:
        print(f"\nthe compiler refuses: {refused}")
    if fits is False:
        print(f"\nDOES NOT FIT: most of it is {CATEGORIES[ledger.largest]}")
        for flags, total in settings:
            print(f"  {human_bytes(total)} with {flags}")
        if not settings:
            print("  nothing was found that fits: more devices, or a smaller batch")
