"""Check that each stage of a pipeline has layers, before anything is built.

A pipeline divides the repeats of a model's group of layers; first and last layers are with the
embedding and the head. Stages may have unequal numbers of repeats, but for a schedule without a
flush, and each has at least one.
"""

from spmd.errors import ConfigError, Problem
from spmd.model_interface.model_config import HasLayers, HasPattern, LayerPattern
from spmd.pipeline.schedule import Schedule
from spmd.run.config import ModelConfig
from spmd.tree import with_noun


def check_stages(model: ModelConfig, schedule: Schedule | None) -> None:
    """Raise a `ConfigError` if layers do not divide into the stages of a schedule."""
    if schedule is None:
        return
    problems = []
    if isinstance(model, HasPattern):
        problems = _pattern_problems(model.pattern, schedule)
    elif isinstance(model, HasLayers):
        problems = _layer_problems(model.layers, schedule)
    if problems:
        raise ConfigError("The model does not divide into stages:", problems)


def _layer_problems(layers: int, schedule: Schedule) -> list[Problem]:
    """Return the problem of equal layers."""
    fix = _fix(layers, "layers", schedule)
    if not fix:
        return []
    parts = schedule.stages * schedule.chunks
    detail = f"{with_noun(layers, 'layer')} / {_divisor(schedule)} = {layers / parts:.4g}"
    return [Problem("mesh.pipe", "does not divide the layers", detail, fix)]


def _fix(count: int, things: str, schedule: Schedule) -> str:
    """Return the change with which things divide into stages; empty if they do."""
    parts = schedule.stages * schedule.chunks
    if count % parts == 0:
        return ""
    if count < parts:
        return f"at least {parts} {things}, or a smaller mesh.pipe"
    multiple = f"a multiple of {parts} {things}"
    if not schedule.flush:
        return f"{multiple}, or a schedule with a flush, such as 1f1b (pipeline.schedule)"
    if count % schedule.stages == 0:  # stored in equal parts, which hold no equal chunks
        return f"{multiple}, or a pipeline.chunks that divides {count // schedule.stages}"
    return ""


def _pattern_problems(pattern: LayerPattern, schedule: Schedule) -> list[Problem]:
    """Return the problem of layers of several kinds: too few repeats, or none at all."""
    size = len(pattern.group)
    ends = len(pattern.first) + len(pattern.last)
    repeats = pattern.repeats
    if size == 1 and not ends:
        return _layer_problems(repeats, schedule)
    fix = _fix(repeats, "repeats", schedule)
    if not fix:
        return []
    what = "does not divide the repeats of the group of layers"
    if repeats == 1:
        period = with_noun(size, "layer")
        what = f"divides repeats, and the longest period of this pattern, {period}, occurs once"
        fix = "mesh.pipe 1"
    counted = f"{with_noun(repeats, 'repeat')} × {with_noun(size, 'layer')}"
    if pattern.first:
        counted = f"{len(pattern.first)} first + {counted}"
    if pattern.last:
        counted += f" + {len(pattern.last)} last"
    parts = schedule.stages * schedule.chunks
    total = with_noun(ends + repeats * size, "layer")
    division = f"{with_noun(repeats, 'repeat')} / {_divisor(schedule)} = {repeats / parts:.4g}"
    return [Problem("mesh.pipe", what, f"{counted} = {total}; {division}", fix)]


def _divisor(schedule: Schedule) -> str:
    """Return the number of stages, and of chunks if there are several, as text."""
    text = f"pipe={schedule.stages}"
    if schedule.chunks > 1:
        text += f" × {schedule.chunks} chunks"
    return f"({text})"
