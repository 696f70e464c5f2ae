"""A number of examples of the sweep from a seed."""

import dataclasses
from collections.abc import Iterator

import hypothesis

from tests.sweep import layers as layers
from tests.sweep import primitives as primitives
from tests.sweep.compare import Difference, Example, compare, examples


@dataclasses.dataclass(frozen=True)
class Result:
    """An example and how far its mesh is from one device."""

    example: Example
    difference: Difference

    def __str__(self) -> str:
        found = self.difference
        return f"{self.example}: {found.refused or f'{found.error:.1e} off in {found.where}'}"


def sweep(seed: int, count: int, devices: int = 8) -> list[Result]:
    """Compare this many examples; equal seeds give equal examples."""
    return list(_results(seed, count, devices))


def first_wrong(seed: int, count: int, devices: int = 8) -> Result | None:
    """Return the first example that differs from one device among this many; those after it are not run."""
    return next(
        (result for result in _results(seed, count, devices) if not result.difference.ok), None
    )


def _results(seed: int, count: int, devices: int) -> Iterator[Result]:
    for example in _drawn(seed, count, devices):
        yield Result(example, compare(example))


def _drawn(seed: int, count: int, devices: int) -> list[Example]:
    drawn: list[Example] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(examples(devices))
    def draw(example: Example) -> None:
        drawn.append(example)

    draw()
    return drawn
