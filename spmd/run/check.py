"""Comparison of a config's first steps on one device with those on other meshes."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from spmd.errors import ConfigError, Problem, SpmdError
from spmd.gradients.distillation_loss import TEACHER
from spmd.plan.plan import ShardingPlan
from spmd.run.build import TrainSetup, count_microbatches, make_setup, one_device_mesh
from spmd.run.config import TrainConfig
from spmd.run.init_from import initial_state
from spmd.run.open_text import open_text_dataset
from spmd.run.preflight import preflight
from spmd.run.reference import pairs_with_reference
from spmd.run.step_source import shape_problems
from spmd.run.teacher import open_teacher
from spmd.sharding.batch import whole
from spmd.sharding.mesh import AXES, AnyMesh, MeshShape, axes_text, mesh_of, nontrivial_axes
from spmd.testing import BUGS, Parity, Reference, pad_unevenly
from spmd.training.step import TrainStep


@dataclasses.dataclass(frozen=True)
class Check:
    """First `steps` steps of a config, on text with uneven padding.

    The config's own mesh is not used.
    """

    config: TrainConfig
    steps: int
    _references: dict[int, Reference] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )
    _setups: dict[AnyMesh, TrainSetup] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )

    def __str__(self) -> str:
        steps = f"{_steps_text(self.count)} of {self.precision}"
        return f"{steps}, a quarter of the tokens masked as padding"

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
    def batches(self) -> list[dict[str, Any]]:
        """Host batches, one for each step."""
        size = self.config.data.batch
        whole_arrays = self._arrays_of_teacher()
        text = open_text_dataset(self.config)
        for part in pairs_with_reference(text.parts):
            # Any reference model is as good for a comparison of layouts: one that knows nothing.
            assert part.reference is not None, "rows with places"
            part.reference.fill(
                np.arange(part.reference.length), -math.log(self.config.model.vocab)
            )
        order = text.order(self.config.seed)
        batches = []
        for step in range(self.steps):
            rows = np.arange(step * size, (step + 1) * size)
            batches.append({**pad_unevenly(order.read(rows), seed=step), **whole_arrays})
        return batches

    def _arrays_of_teacher(self) -> dict[str, Any]:
        """Return the teacher's parameters on the host, as a batch has them; empty without one."""
        teacher = open_teacher(self.one_device)
        if teacher is None:
            return {}
        return {TEACHER: whole(jax.device_get(teacher.arrays.value))}

    def reference(self, microbatches: int) -> Reference:
        """Return the steps on one device with accumulation over microbatches; compiled once."""
        if microbatches not in self._references:
            pipeline = dataclasses.replace(self.config.pipeline, microbatches=microbatches)
            config = dataclasses.replace(self.config, pipeline=pipeline)
            setup = make_setup(config, self.one_device.mesh)
            state = initial_state(setup)
            reference = Reference(setup.plan, setup.grad_fn, self.batches, state=state)
            self._references[microbatches] = reference
        return self._references[microbatches]

    def setup_on(self, mesh: AnyMesh) -> TrainSetup:
        """Return the config's setup on a mesh; refuse a misfit before anything compiles."""
        if mesh in self._setups:
            return self._setups[mesh]
        setup = make_setup(self.config, mesh)
        preflight(setup)
        _check_comparable(setup.plan)
        self._setups[mesh] = setup
        return setup

    def compare(self, mesh: AnyMesh, bug: str = "") -> Parity:
        """Run the steps on a mesh and compare each with one device by leaf.

        `bug` is a bug of `spmd.testing.BUGS` to inject.
        """
        setup = self.setup_on(mesh)
        grad_fn = BUGS[bug](setup.grad_fn) if bug else setup.grad_fn
        reference = self.reference(count_microbatches(self.config, setup.schedule))
        place = functools.partial(_with_placed_teacher, setup)
        return reference.compare(setup.plan, grad_fn, state=initial_state(setup), place=place)


def _with_placed_teacher(setup: TrainSetup, batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch with the teacher's parameters, if there are any, split as in training."""
    if setup.teacher is None:
        return batch
    shardings = jax.tree.map(lambda leaf: leaf.sharding, setup.teacher.abstract_params)
    return {**batch, TEACHER: whole(jax.device_put(batch[TEACHER].value, shardings))}


@dataclasses.dataclass(frozen=True)
class StepCheck:
    """First steps of a user's own train step, on its own batches.

    Attributes:
        make: A function of a mesh that returns a `TrainStep` and its batches, the same on all
            meshes (`spmd.run.step_source`).
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
        step, batches = self.make(mesh)
        problems = _batch_problems(batches, self.steps)
        if problems:
            raise ConfigError("No step to check:", problems)
        self._made[mesh] = (step, batches[: self.steps or len(batches)])
        return self._made[mesh]

    @functools.cached_property
    def _reference(self) -> Reference:
        step, batches = self.one_device
        return Reference(step.plan, step.grad_fn, batches)

    def compare(self, mesh: AnyMesh, bug: str = "") -> Parity:
        """Run the steps on a mesh and compare each with one device by leaf.

        `bug` is a bug of `spmd.testing.BUGS` to inject.
        """
        step, _ = self.made_on(mesh)
        _check_comparable(step.plan)
        grad_fn = BUGS[bug](step.grad_fn) if bug else step.grad_fn
        return self._reference.compare(step.plan, grad_fn)


def _batch_problems(batches: Sequence[Any], steps: int) -> list[Problem]:
    """Return the problems of batches: they are too few, or shapes."""
    problems = list[Problem]()
    if len(batches) < steps:
        what = f"are {len(batches)}, fewer than the steps"
        problems.append(Problem("batches", what, f"check-steps={steps}", "one batch for each step"))
    return problems + shape_problems(batches)


def _check_comparable(plan: ShardingPlan) -> None:
    """Raise `ConfigError` if a plan's steps are meant to differ from those of one device."""
    problems = list[Problem]()
    for transform in plan.transforms:
        problems += transform.parity_problems()
    if problems:
        raise ConfigError("Nothing to compare:", problems)


def _steps_text(count: int) -> str:
    if count == 1:
        return "1 step"
    return f"{count} steps"


class Sweep:
    """A check on each axis alone, every pair of axes, and so on up to `most` axes of size 2.

    If the config is refused on a mesh, meshes with the same axes and more are skipped: the reason
    would be the same.
    """

    def __init__(self, check: Check | StepCheck, most: int, bug: str = "") -> None:
        needed = 2**most
        available = len(jax.devices())
        if needed > available:
            product = " × ".join(["2"] * most)
            problem = Problem(
                "products",
                "need more devices",
                f"{product} = {needed} > {available}",
                f"--devices {needed}, which simulates them on CPU",
            )
            raise ConfigError("Nothing to check:", [problem])
        self.check = check
        self.bug = bug
        self.shapes = list[MeshShape]()
        for count in range(1, most + 1):
            for axes in itertools.combinations(AXES, count):
                self.shapes.append(MeshShape(**dict.fromkeys(axes, 2)))
        self.compared: dict[MeshShape, Parity] = {}
        self.refused: dict[MeshShape, SpmdError] = {}

    def lines(self) -> Iterator[str]:
        """Run the sweep and yield a line after each mesh.

        Raises:
            ConfigError: The config is refused on all meshes.
        """
        width = max(len(axes_text(shape.sizes)) for shape in self.shapes)
        for shape in self.shapes:
            split = set(nontrivial_axes(shape.sizes))
            if any(set(nontrivial_axes(other.sizes)) < split for other in self.refused):
                continue
            name = f"{axes_text(shape.sizes):<{width}}"
            try:
                mesh = mesh_of(shape, jax.devices()[: shape.total()])
                parity = self.check.compare(mesh, self.bug)
            except SpmdError as error:
                self.refused[shape] = error
                yield f"{name}  refused: {_refusal_text(error)}"
                continue
            if not self.compared:
                yield f"{self.check};"
                yield from _table_head(parity, width)
            self.compared[shape] = parity
            yield f"{name}{_errors_text(parity)}"
        if not self.compared:
            problems = list[Problem]()
            for refusal in self.refused.values():
                problems += refusal.problems
            raise ConfigError("No product of axes fits this config:", problems)
        yield self._summary()

    def _summary(self) -> str:
        """Return the last line: the number of layouts in agreement, or with the bug found."""
        total = len(self.compared)
        agree = sum(parity.ok for parity in self.compared.values())
        if self.bug:
            found = total - agree
            return f"{self.bug}: the injected bug was found on {found} of {total} meshes"
        text = f"{agree} of {total} layouts agree"
        if self.refused:
            text += f", {len(self.refused)} refused"
        return text

    @property
    def ok(self) -> bool:
        """True if every layout agrees with one device; with a bug, if any does."""
        agreements = [parity.ok for parity in self.compared.values()]
        if self.bug:
            return any(agreements)
        return all(agreements)

    def to_json(self) -> dict[str, Any]:
        """Return the results as JSON values, a record per mesh."""
        compared = []
        for shape, parity in self.compared.items():
            compared.append({"mesh": shape.sizes, **parity.to_json()})
        refused = []
        for shape, error in self.refused.items():
            problems = [str(problem) for problem in error.problems]
            refused.append({"mesh": shape.sizes, "problems": problems})
        return {"ok": self.ok, "compared": compared, "refused": refused}


def _refusal_text(error: SpmdError) -> str:
    """Return the first problem of an error, and the number of others."""
    first, *others = error.problems
    text = f"{first.where} {first.what}"
    if others:
        text += f" (and {len(others)} more)"
    return text


def _table_head(parity: Parity, width: int) -> Iterator[str]:
    """Yield the lines above the errors: the kinds of leaves, and the tightest tolerance of each."""
    # Of equal kinds the last, with the smallest tolerance, stays.
    rows = sorted(parity.rows, key=lambda row: -row.tolerance)
    tightest = {row.what: row.tolerance for row in rows}
    heads = " " * width
    allowed = f"{'allowed':<{width}}"
    for row in parity.worst():
        column = _column(row.what)
        heads += f"{row.what:>{column}}"
        allowed += f"{tightest[row.what]:>{column}.0e}"
    yield "the largest differences from one device, relative to the largest value of each leaf:"
    yield heads
    yield allowed


def _errors_text(parity: Parity) -> str:
    """Return the largest error of each kind of leaf, and the verdict."""
    text = ""
    for row in parity.worst():
        text += f"{row.error:>{_column(row.what)}.2e}"
    text += "  ok" if parity.ok else "  FAIL"
    if parity.ending:
        text += f" ({parity.ending})"
    return text


def _column(kind: str) -> int:
    return max(len(kind), len("0.00e+00")) + 2
