"""One device takes each step of a mesh again, from the mesh's own state.

A difference of rounding between two runs grows from step to step: Adam turns the sign of a gradient
near zero into a whole step. So no two runs are compared. The mesh trains; before each step its
state is copied to one device, which computes the gradients of the same batch, and the update from
the gradients *that the mesh computed*. If the initial states are equal and every step maps equal
states to equal states, the two runs are the same.

How far apart two orders of summation may be differs from leaf to leaf. It is measured: one device
computes the same with every float moved by one rounding, up or down at random, which moves the
result as another order does (Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition,
sections 3.1 and 4.2).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from spmd import tree
from spmd.errors import ConfigError, Problem
from spmd.gradients.base import GradFn
from spmd.parity.result import (
    TOLERANCES,
    Parity,
    Row,
    Tolerance,
    compare_leaf,
    distance,
    largest,
    worst_of_each,
)
from spmd.plan.plan import ShardingPlan
from spmd.precision import Precision
from spmd.training.state import TrainState, abstract_state, init_state
from spmd.training.step import TrainStep, make_train_step

TWINS = 3
"""How many times everything is moved by one rounding."""
FACTOR = 16
"""Distance of a gradient from that of one device, at most, in largest movements of its twins."""
FLOOR = 1e-7
"""Allowed difference of any gradient, as a share of the largest of a step.

It is one rounding, of terms that cancel."""

Leaves = dict[str, np.ndarray]
"""Path → array on the host."""
Noisy = dict[str, dict[str, tuple[np.ndarray, float]]]
"""Kind → path → array of the reference, and how far one rounding moves it."""


@dataclasses.dataclass
class _Comparison:
    """Results of a comparison so far.

    Attributes:
        losses: Mean loss of each step on the mesh; `reference_losses` on one device.
        compared: Steps with finite parameters and a finite loss.
        stopped: The step that left parameters which are not all finite; 0 if there was none.
    """

    rows: list[Row]
    losses: list[float] = dataclasses.field(default_factory=list)
    reference_losses: list[float] = dataclasses.field(default_factory=list)
    compared: int = 0
    stopped: int = 0

    def check(self) -> None:
        """Raise if there is nothing to compare."""
        if self.compared or not all(row.ok for row in self.rows):
            return
        losses = (
            f"loss {self.losses[0]:.7g} on the mesh, {self.reference_losses[0]:.7g} on one device"
        )
        problem = Problem(
            "step 1",
            "gives no finite parameters or no finite loss, on both sides",
            detail=losses,
            fix="a lower learning rate, or other data",
        )
        raise ConfigError("Nothing to compare:", [problem])

    def parity(self, tolerance: Tolerance) -> Parity:
        """Return the results, with one row for each leaf."""
        return Parity(
            losses=tuple(self.losses),
            reference_losses=tuple(self.reference_losses),
            rows=worst_of_each(self.rows),
            tolerance=tolerance,
            stopped=self.stopped,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Reference:
    """The steps on one device to compare layouts with; compiled once for all of them.

    Args:
        plan: A plan for one device, or any other that is trusted.
        grad_fn: Its gradient function.
        batches: Host arrays, one batch for each step.
        seed: Seed of the initial state.
        state: The initial state under `plan`, instead of one from the seed.
    """

    plan: ShardingPlan
    grad_fn: GradFn
    batches: Sequence[Any]
    seed: int = 0
    state: TrainState | None = None

    def compare(
        self,
        plan: ShardingPlan,
        grad_fn: GradFn | None = None,
        *,
        state: TrainState | None = None,
        tolerance: Tolerance | None = None,
        place: Callable[[Any], Any] | None = None,
    ) -> Parity:
        """Train under another plan for one step on each batch, and compare every step.

        Rows are `initial state`, and of each step `loss`, `gradients`, `variables`, `transforms`
        (their states), `updates` (the changes of the parameters) and `optimizer state`.

        Args:
            grad_fn: The gradient function of that plan, if it is another.
            state: Its initial state, instead of one from the seed; donated.
            tolerance: By default that of the plan's precision.
            place: Returns a batch with some arrays placed otherwise than the plan would.

        Raises:
            ConfigError: The plans have different states, or the first step has no finite loss on
                either side.
        """
        tolerance = tolerance or TOLERANCES[plan.precision.compute]
        if state is None:
            state = init_state(plan, self.seed)
        step = make_train_step(plan, grad_fn=grad_fn or self.grad_fn, keep_gradients=True)
        before = _on_host(state)
        self._check_state(before)
        rows = self._compare_initial(before)
        starts_equal = all(row.ok for row in rows)
        found = _Comparison(rows)
        for number, batch in enumerate(self.batches, 1):
            given = place(batch) if place else batch
            state, metrics = step(state, _placed(plan, given))
            after = _on_host(state)
            ours = _results(after, metrics)
            if number == 1 and starts_equal:
                expected = self._first
            else:
                expected = self._gradients(before, batch)
            updates = self._updates(before, batch, ours["gradients"], metrics["loss"])
            expected = {**expected, **updates}
            found.rows += _compare(number, ours, expected, before, tolerance, plan.precision)
            found.losses.append(float(metrics["loss"]))
            found.reference_losses.append(float(expected["loss"][""][0]))
            if not _all_finite(ours["updates"]):
                found.stopped = number
                break
            if math.isfinite(found.losses[-1]):
                found.compared += 1
            before = after
        found.check()
        return found.parity(tolerance)

    def _compare_initial(self, found: Leaves) -> list[Row]:
        """Return a row for each leaf of the initial state, with no difference allowed."""
        rows = []
        for path, expected in self._initial.items():
            row = Row("initial state", path, error=0.0, tolerance=0.0)
            rows.append(compare_leaf(row, found[path], expected, largest(expected), {}))
        return rows

    @functools.cached_property
    def _initial(self) -> Leaves:
        state = self.state
        if state is None:
            state = init_state(self.plan, self.seed)
        return _on_host(state)

    @functools.cached_property
    def _first(self) -> Noisy:
        return self._gradients(self._initial, self.batches[0])

    @functools.cached_property
    def _step(self) -> TrainStep:
        return make_train_step(self.plan, grad_fn=self.grad_fn, keep_gradients=True)

    @functools.cached_property
    def _update(self) -> Any:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(self.plan))
        return jax.jit(
            self._step.update,
            out_shardings=(shardings.params, shardings.optimizer_state),
        )

    def _check_state(self, found: Leaves) -> None:
        """Raise if a state has other leaves or shapes than the reference."""
        abstract = tree.flatten(abstract_state(self.plan))
        problems = []
        for path in sorted({**found, **abstract}):
            here = _shape_text(found, path)
            there = _shape_text(abstract, path)
            if here != there:
                problems.append(Problem(path, f"is {here} here and {there} there"))
        if problems:
            title = "Plans of different models or optimizers cannot be compared:"
            raise ConfigError(title, problems)

    def _gradients(self, before: Leaves, batch: Any) -> Noisy:
        """Return the loss, gradients and variables of a step from a state."""
        own = {}
        for path, x in before.items():
            if path.startswith(("params/", "variables/")):
                own[path] = x
        inputs, structure = jax.tree.flatten(batch)
        named_inputs = {str(number): np.asarray(x) for number, x in enumerate(inputs)}
        dtype = self.plan.precision.compute_dtype
        cast_error = float(jnp.finfo(dtype).eps) / 4  # the mean error of a cast to it

        def take(seed: int | None) -> dict[str, Leaves]:
            leaves = before | _moved(own, seed, cast_error)
            state = _as_tree(abstract_state(self.plan), leaves)
            near = _moved(named_inputs, seed)
            near_batch = jax.tree.unflatten(structure, near.values())
            after, metrics = self._step(state, _placed(self.plan, near_batch))
            return {
                "loss": {"": np.asarray(metrics["loss"])},
                "gradients": _on_host(metrics["gradients"]),
                "variables": _on_host(after.variables),
                "transforms": _on_host(after.transforms),
            }

        return _with_noise(take)

    def _updates(self, before: Leaves, batch: Any, gradients: Leaves, loss: jax.Array) -> Noisy:
        """Return the parameters and the optimizer state after a step.

        They follow from a state, a batch, gradients and a loss.
        """
        held = {}
        for path, x in before.items():
            if path.startswith("optimizer_state/"):
                held[path] = x
        placed_batch = _placed(self.plan, batch)
        mean = np.asarray(loss)

        def take(seed: int | None) -> dict[str, Leaves]:
            near = _moved(gradients, seed)
            placed = tree.map_with_path(
                lambda path, sharding: jax.device_put(near[path], sharding),
                self.plan.gradient_shardings,
            )
            leaves = before | _moved(held, seed)
            state = _as_tree(abstract_state(self.plan), leaves)
            params, optimizer_state = self._update(state, placed_batch, placed, mean)
            return {"updates": _on_host(params), "optimizer state": _on_host(optimizer_state)}

        return _with_noise(take)


_FIELDS = {
    "variables": "variables",
    "transforms": "transforms",
    "updates": "params",
    "optimizer state": "optimizer_state",
}
"""Kind of row → field of the state after a step."""


def _results(after: Leaves, metrics: Mapping[str, Any]) -> dict[str, Leaves]:
    """Return kind of row → path → array of a step on the mesh, from its state and its metrics."""
    results = {
        "loss": {"": np.asarray(metrics["loss"])},
        "gradients": _on_host(metrics["gradients"]),
    }
    for what, field in _FIELDS.items():
        results[what] = _part(after, field)
    return results


def _compare(
    step: int,
    found: dict[str, Leaves],
    expected: Noisy,
    before: Leaves,
    tolerance: Tolerance,
    precision: Precision,
) -> Iterator[Row]:
    """Compare all leaves of a step of the mesh with those of the reference."""
    gradients = {path: x for path, (x, _) in expected["gradients"].items()}
    largest_gradient = max(map(largest, gradients.values()), default=0.0)
    bases = {
        "loss": tolerance.loss,
        "gradients": tolerance.gradients,
        "variables": tolerance.gradients,
        "transforms": tolerance.gradients,
    }
    if precision.loss_scale:
        overflows = not _all_finite(found["gradients"]) and not _all_finite(gradients)
        if overflows:
            expected = dict(expected)
            del expected["gradients"]
            why = "overflow on both sides: the step is skipped"
            yield Row("gradients", "", 0.0, 0.0, why, step, nan=len(gradients))
    for what, leaves in expected.items():
        for path, (x, noise) in leaves.items():
            scale = largest(x)
            if what == "updates":
                scale = largest(x - before[f"params/{path}"])
            if what == "gradients":
                scale = scale or largest_gradient
            dtype = str(x.dtype)
            if what in bases:
                dtype = precision.compute
            apart = noise / (scale or 1.0)
            allowed = {
                f"{dtype} itself is {apart:.0e} apart": FACTOR * noise,
                "its last digit": 2 * _resolution(x),
            }
            if what == "gradients":
                allowed["a rounding of the largest gradient"] = FLOOR * largest_gradient
            row = Row(what, path, 0.0, bases.get(what, tolerance.updates), step=step)
            yield compare_leaf(row, found[what][path], x, scale, allowed)


def _with_noise(take: Callable[[int | None], dict[str, Leaves]]) -> Noisy:
    """Return the result of a function for None, and how far its results for seeds are from it."""
    still = take(None)
    noise = {what: dict.fromkeys(leaves, 0.0) for what, leaves in still.items()}
    for seed in range(TWINS):
        for what, leaves in take(seed).items():
            for path, x in leaves.items():
                moved = distance(x, still[what][path])
                noise[what][path] = max(noise[what][path], moved)
    noisy: Noisy = {}
    for what, leaves in still.items():
        noisy[what] = {}
        for path, x in leaves.items():
            noisy[what][path] = (x, noise[what][path])
    return noisy


def _moved(leaves: Leaves, seed: int | None, eps: float = 0.0) -> Leaves:
    """Return the leaves with every float moved by one rounding of its dtype; zeros stay zeros.

    Args:
        seed: Of the directions, up or down; None moves nothing.
        eps: A coarser rounding, relative, such as that of a cast before the leaves are used.
    """
    if seed is None:
        return leaves
    rng = np.random.default_rng(seed)
    return {path: _move(x, rng, eps) for path, x in leaves.items()}


def _move(x: np.ndarray, rng: np.random.Generator, eps: float) -> np.ndarray:
    """Move floats by one rounding of their dtype, or of a coarser `eps`."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    sign = rng.integers(0, 2, x.shape, np.int8) * 2.0 - 1
    rounding = max(eps, float(jnp.finfo(x.dtype).eps))
    near = 1 + 0.75 * rounding * sign  # 0.75: never a tie between two neighbours
    return (x.astype(np.float64) * near).astype(x.dtype)


def _resolution(x: np.ndarray) -> float:
    """Return one rounding of the largest element: of a code of 8 bits one code, of others none."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return float(jnp.finfo(x.dtype).eps) * largest(x)
    if x.dtype.itemsize == 1 and x.dtype != np.bool_:
        return 1.0
    return 0.0


def _all_finite(leaves: Leaves) -> bool:
    return all(map(_is_finite, leaves.values()))


def _is_finite(x: np.ndarray) -> bool:
    return bool(np.isfinite(x.astype(np.float64)).all())


def _shape_text(leaves: Mapping[str, Any], path: str) -> str:
    """Return the shape of a leaf, or `not there`."""
    if path not in leaves:
        return "not there"
    return str(leaves[path].shape)


def _on_host(values: Any) -> Leaves:
    """Copy arrays to the host by path; of several processes, each has them whole."""
    leaves = {}
    for path, leaf in tree.flatten(values).items():
        leaves[path] = _whole(leaf)
    return leaves


def _whole(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)


def _part(leaves: Leaves, name: str) -> Leaves:
    """Return the leaves of one field of a state, by their paths in it."""
    part = {}
    for path, x in leaves.items():
        if path.startswith(f"{name}/"):
            part[path.removeprefix(f"{name}/")] = x
    return part


def _as_tree(like: Any, leaves: Leaves) -> Any:
    """Place leaves as `like` says, a tree of shapes with shardings."""
    return tree.map_with_path(lambda path, x: jax.device_put(leaves[path], x.sharding), like)


def _placed(plan: ShardingPlan, batch: Any) -> Any:
    return jax.device_put(batch, plan.batch_shardings(batch))
