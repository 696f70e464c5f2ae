"""Check that a model's layers divide into the stages of a pipeline, before anything is built.

A pipeline divides the repeats of a model's group of layers; first and last layers are with the
embedding and the head.
"""

from spmd.errors import ConfigError, Problem
from spmd.model_interface.model_config import HasLayers, HasPattern, LayerPattern
from spmd.pipeline.schedule import Schedule
from spmd.run.config import ModelConfig


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
    parts = schedule.stages * schedule.chunks
    if layers % parts == 0:
        return []
    detail = f"{_count(layers, 'layer')} / {_divisor(schedule)} = {layers / parts:.4g}"
    fix = f"a multiple of {parts} layers, or another mesh.pipe"
    return [Problem("mesh.pipe", "does not divide the layers", detail, fix)]


def _pattern_problems(pattern: LayerPattern, schedule: Schedule) -> list[Problem]:
    """Return the problem of layers of several kinds: too few repeats, or none at all."""
    size = len(pattern.group)
    ends = len(pattern.first) + len(pattern.last)
    repeats = pattern.repeats
    if size == 1 and not ends:
        return _layer_problems(repeats, schedule)
    parts = schedule.stages * schedule.chunks
    if repeats % parts == 0:
        return []
    what = "does not divide the repeats of the group of layers"
    fix = f"a multiple of {parts} repeats, or a mesh.pipe that divides {repeats}"
    if repeats == 1:
        period = _count(size, "layer")
        what = f"divides repeats, and the longest period of this pattern, {period}, occurs once"
        fix = "mesh.pipe 1"
    counted = f"{_count(repeats, 'repeat')} × {_count(size, 'layer')}"
    if pattern.first:
        counted = f"{len(pattern.first)} first + {counted}"
    if pattern.last:
        counted += f" + {len(pattern.last)} last"
    total = _count(ends + repeats * size, "layer")
    division = f"{_count(repeats, 'repeat')} / {_divisor(schedule)} = {repeats / parts:.4g}"
    return [Problem("mesh.pipe", what, f"{counted} = {total}; {division}", fix)]


def _divisor(schedule: Schedule) -> str:
    """Return the number of stages, and of chunks if there are several, as text."""
    text = f"pipe={schedule.stages}"
    if schedule.chunks > 1:
        text += f" × {schedule.chunks} chunks"
    return f"({text})"


def _count(number: int, thing: str) -> str:
    if number == 1:
        return f"1 {thing}"
    return f"{number} {thing}s"
