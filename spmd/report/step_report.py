"""Report of a train step from Python: plan, memory, collectives and time, for any machine."""

from pathlib import Path
from typing import Any

from spmd.analysis.topology import parse_topology
from spmd.errors import ConfigError, Problem
from spmd.report import page
from spmd.report.plan_data import PlanReport, collect_plan
from spmd.report.plan_page import plan_page
from spmd.run.step_source import ReadyStep, read_made
from spmd.storage.output_file import write_output
from spmd.training.step import TrainStep


def plan_report(
    step: TrainStep, batch: Any, *, topology: str = "", compile: bool = True, out: str = ""
) -> PlanReport:
    """Report a step's plan on a machine, which may be absent; print the result to read it.

    Nothing is trained. The machine has as many devices as the step's mesh.

    Args:
        step: A step from `spmd.make_train_step`, on a mesh with devices or without.
        batch: Arrays or shapes of a batch.
        topology: Machine, such as `v5e:2x4` or `h100:1x8`; by default, simulated devices.
        compile: Whether to compile the step, for its collectives and their time.
        out: HTML file with charts, to open offline; empty for none.

    Raises:
        ConfigError: The file cannot be written, or the machine is not known.
        MeshError: The machine has another number of devices.
    """
    step, batches = read_made("plan_report", (step, batch), step.plan.mesh)
    if out:
        problems = page.check_file("out", out)
        if problems:
            raise ConfigError("Report not written:", problems)
    mesh = step.plan.mesh
    machine = parse_topology(topology or f"cpu:{mesh.size}")
    if machine.devices != mesh.size:
        sizes = f"{machine} has {machine.devices} devices, and the mesh {mesh.size}"
        fix = f"topology= a machine of {mesh.size}, or a step on another mesh"
        problem = Problem("topology", "is another machine", sizes, fix)
        raise ConfigError("Report not written:", [problem])
    source = ReadyStep(Path("step"), step, batches)
    planned = source.on(source.planned_mesh())
    report = collect_plan("step", source, planned, machine, compiles=compile)
    if out:
        write_output("out", out, plan_page(report))
    return report
