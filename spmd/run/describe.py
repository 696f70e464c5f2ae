"""Lines that follow a plan's text: the pipeline, the slices, and XLA's flags."""

import math

from spmd.distributed.xla_flags import describe
from spmd.pipeline.tick_table import describe_execution
from spmd.run.build import TrainSetup, build_flags


def pipeline_line(setup: TrainSetup) -> str:
    """Return the schedule and its execution; empty without a pipeline."""
    schedule = setup.schedule
    if schedule is None:
        return ""
    return f"\npipeline {schedule.name}, {schedule.microbatches} microbatches; {describe_execution(schedule)}"


def slices_line(setup: TrainSetup) -> str:
    """Return the axes over the slow network; empty for one slice."""
    slices = {axis: count for axis, count in setup.config.slices.sizes.items() if count > 1}
    if not slices:
        return ""
    total, sizes = math.prod(slices.values()), setup.mesh.shape
    named = ", ".join(f"{axis} {count} × {sizes[axis] // count}" for axis, count in slices.items())
    return f"\nslices {total} of {setup.mesh.size // total} devices; over the slow network, × inside: {named}"


def flags_text(setup: TrainSetup, platform: str, kind: str) -> str:
    """Return XLA's flags for a kind of device with their reasons; empty where there are none."""
    flags = build_flags(setup.config, platform, kind)
    return describe(f"\nflags for XLA on {platform}", flags) if flags else ""
