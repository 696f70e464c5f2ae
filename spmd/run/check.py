"""Comparison of a config's first steps on one device with those on a mesh, or on every product of mesh axes."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from spmd.errors import ConfigError, Problem, SpmdError, check_type, shown
from spmd.plan.plan import ShardingPlan
from spmd.run.build import TrainSetup, count_microbatches, make_setup, one_device_mesh, open_training_text
from spmd.run.config import TrainConfig
from spmd.run.init_from import initial_state
from spmd.run.preflight import preflight
from spmd.sharding.mesh import AXES, AnyMesh, MeshShape, mesh_of
from spmd.testing import BUGS, Parity, Reference, pad_unevenly
from spmd.training.step import TrainStep


@dataclasses.dataclass(frozen=True)
class Check:
    """First `steps` steps of a config, on text with uneven padding; the config's own mesh is not used."""

    config: TrainConfig
    steps: int
    _references: dict[int, Reference] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    _setups: dict[AnyMesh, TrainSetup] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{_steps_text(self.count)} of {self.precision}, a quarter of the tokens masked as padding"

    @property
    def count(self) -> int:
        """Number of steps."""
        return self.steps

    @property
    def precision(self) -> str:
        """Name of the precision."""
        return self.config.precision

    @functools.cached_property
    def one_device(self) -> TrainSetup:
        """Setup of the config on one device."""
        return make_setup(self.config, one_device_mesh())

    @functools.cached_property
    def batches(self) -> list[dict[str, np.ndarray]]:
        """Host batches, one for each step."""
        size = self.config.data.batch
        order = open_training_text(self.config).order(self.config.seed)
        rows = [np.arange(step * size, (step + 1) * size) for step in range(self.steps)]
        return [pad_unevenly(order.read(chosen), seed=step) for step, chosen in enumerate(rows)]

    def reference(self, microbatches: int) -> Reference:
        """Return the steps on one device with gradient accumulation over the microbatches; compiled once."""
        if microbatches not in self._references:
            pipeline = dataclasses.replace(self.config.pipeline, microbatches=microbatches)
            setup = make_setup(dataclasses.replace(self.config, pipeline=pipeline), self.one_device.mesh)
            state = initial_state(setup)
            self._references[microbatches] = Reference(setup.plan, setup.grad_fn, self.batches, state=state)
        return self._references[microbatches]

    def setup_on(self, mesh: AnyMesh) -> TrainSetup:
        """Return the config's setup on a mesh; one that cannot run there is refused before anything compiles."""
        if mesh in self._setups:
            return self._setups[mesh]
        setup = make_setup(self.config, mesh)
        preflight(setup)
        _check_flush(setup.plan)
        self._setups[mesh] = setup
        return setup

    def compare(self, mesh: AnyMesh, bug: str = "") -> Parity:
        """Run the steps on a mesh, with a bug of `spmd.testing.BUGS`, and compare each with one device by leaf."""
        setup = self.setup_on(mesh)
        grad_fn = BUGS[bug](setup.grad_fn) if bug else setup.grad_fn
        reference = self.reference(count_microbatches(self.config, setup.schedule))
        return reference.compare(setup.plan, grad_fn, state=initial_state(setup))


@dataclasses.dataclass(frozen=True)
class StepCheck:
    """First steps of a user's own train step, on its own batches.

    Attributes:
        make: A function of a mesh that returns a `TrainStep` and its batches, those of one mesh as those of another.
        steps: Number of steps; 0 is one for each batch.
    """

    make: Callable[[AnyMesh], tuple[TrainStep, Sequence[Any]]]
    steps: int = 0
    _made: dict[AnyMesh, tuple[TrainStep, Sequence[Any]]] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )

    def __str__(self) -> str:
        return f"{_steps_text(self.count)} of {self.precision}"

    @property
    def count(self) -> int:
        """Number of steps."""
        return len(self.one_device[1])

    @property
    def precision(self) -> str:
        """Name of the precision."""
        return self.one_device[0].plan.precision.name

    @property
    def one_device(self) -> tuple[TrainStep, Sequence[Any]]:
        """Step and batches on one device."""
        return self.made_on(one_device_mesh())

    def made_on(self, mesh: AnyMesh) -> tuple[TrainStep, Sequence[Any]]:
        """Return the step and the batches of a mesh."""
        if mesh in self._made:
            return self._made[mesh]
        returned, fix = self.make(mesh), "return step, batches, with step from spmd.make_train_step"
        name = getattr(self.make, "__name__", "the function")
        if not (isinstance(returned, tuple) and len(returned) == 2):
            raise ConfigError("There is no step to check:", [Problem(name, f"returns {shown(returned)}", fix=fix)])
        step, batches = returned
        problems = check_type(f"{name}, step", step, TrainStep, fix)
        problems += check_type(f"{name}, batches", batches, (list, tuple), f"{fix}, and batches a list")
        if not problems and not max(self.steps, 1) <= len(batches):
            what = f"are {len(batches)}, fewer than the steps"
            problems.append(Problem(f"{name}, batches", what, f"check-steps={self.steps}", "one batch for each step"))
        if problems:
            raise ConfigError("There is no step to check:", problems)
        self._made[mesh] = step, batches[: self.steps or len(batches)]
        return self._made[mesh]

    @functools.cached_property
    def _reference(self) -> Reference:
        step, batches = self.one_device
        return Reference(step.plan, step.grad_fn, batches)

    def compare(self, mesh: AnyMesh, bug: str = "") -> Parity:
        """Run the steps on a mesh, with a bug of `spmd.testing.BUGS`, and compare each with one device by leaf."""
        step, _ = self.made_on(mesh)
        _check_flush(step.plan)
        grad_fn = BUGS[bug](step.grad_fn) if bug else step.grad_fn
        return self._reference.compare(step.plan, grad_fn)


def _check_flush(plan: ShardingPlan) -> None:
    """Raise an error if a pipeline without a flush makes the gradients: they are of the batch before."""
    if any(transform.overlapping_steps for transform in plan.transforms):
        what = "has gradients that are one update late, unlike one device"
        problem = Problem("schedule pipedream", what, fix="check the layout with --pipeline.schedule 1f1b")
        raise ConfigError("There is nothing to compare:", [problem])


def _steps_text(count: int) -> str:
    if count == 1:
        return "1 step"
    return f"{count} steps"


class Sweep:
    """A check on each axis alone, every pair of axes, and so on up to `most` axes of size 2, with a line for each.

    If the config is refused on a mesh, meshes with the same axes and more are skipped: the reason would be the same.
    """

    def __init__(self, check: Check | StepCheck, most: int, bug: str = "") -> None:
        needed, available = 2**most, len(jax.devices())
        if needed > available:
            detail = f"{' × '.join(['2'] * most)} = {needed} > {available}"
            fix = f"--devices {needed}, which simulates them on CPU"
            raise ConfigError("Nothing to check:", [Problem("products", "need more devices", detail, fix)])
        products = (some for count in range(most) for some in itertools.combinations(AXES, count + 1))
        self.check, self.bug, self.shapes = check, bug, [MeshShape(**dict.fromkeys(axes, 2)) for axes in products]
        self.compared: dict[MeshShape, Parity] = {}
        self.refused: dict[MeshShape, SpmdError] = {}

    def lines(self) -> Iterator[str]:
        """Run the sweep and yield a line after each mesh; raise `ConfigError` if the config is refused on all."""
        width = max(len(axes_text(shape.sizes)) for shape in self.shapes)
        for shape in self.shapes:
            if any(_split(other) < _split(shape) for other in self.refused):
                continue
            name = f"{axes_text(shape.sizes):<{width}}"
            try:
                parity = self.check.compare(mesh_of(shape, jax.devices()[: shape.total()]), self.bug)
            except SpmdError as error:
                self.refused[shape] = error
                first, *others = error.problems
                yield f"{name}  refused: {first.where} {first.what}" + (f" (and {len(others)} more)" if others else "")
                continue
            if not self.compared:
                tightest = {row.what: row.tolerance for row in sorted(parity.rows, key=lambda row: -row.tolerance)}
                allowed = {row.what: tightest[row.what] for row in parity.worst()}
                yield f"{self.check};"
                yield "the largest differences from one device, relative to the largest value of each leaf:"
                yield " " * width + "".join(f"{kind:>{_column(kind)}}" for kind in allowed)
                yield f"{'allowed':<{width}}" + "".join(f"{x:>{_column(kind)}.0e}" for kind, x in allowed.items())
            self.compared[shape] = parity
            errors = "".join(f"{row.error:>{_column(row.what)}.2e}" for row in parity.worst())
            yield f"{name}{errors}  {'ok' if parity.ok else 'FAIL'}" + (f" ({parity.ending})" if parity.ending else "")
        if not self.compared:
            problems = [problem for error in self.refused.values() for problem in error.problems]
            raise ConfigError("This config runs on no product of axes:", problems)
        agree, total = sum(parity.ok for parity in self.compared.values()), len(self.compared)
        if self.bug:
            yield f"{self.bug}: the injected bug was found on {total - agree} of {total} meshes"
        else:
            yield f"{agree} of {total} layouts agree" + (f", {len(self.refused)} refused" if self.refused else "")

    @property
    def ok(self) -> bool:
        """True if every layout agrees with one device; with a bug, if any does."""
        return (any if self.bug else all)(parity.ok for parity in self.compared.values())

    def to_json(self) -> dict[str, Any]:
        """Return the results as JSON values, a record per mesh."""
        compared = [{"mesh": shape.sizes, **parity.to_json()} for shape, parity in self.compared.items()]
        refused = [{"mesh": s.sizes, "problems": list(map(str, e.problems))} for s, e in self.refused.items()]
        return {"ok": self.ok, "compared": compared, "refused": refused}


def axes_text(sizes: Mapping[str, int]) -> str:
    """Return the axes larger than 1.

    Example:
        >>> axes_text({"data": 2, "fsdp": 1, "tensor": 4})
        'data=2 tensor=4'
    """
    return " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"


def _split(shape: MeshShape) -> set[str]:
    return {axis for axis, size in shape.sizes.items() if size > 1}


def _column(kind: str) -> int:
    return max(len(kind), len("0.00e+00")) + 2
