"""One device, which takes each step of a mesh again from the mesh's own state.

A difference of rounding between two runs grows from step to step: Adam turns the sign of a gradient near zero into a
whole step. So no two runs are compared. The mesh trains; before each step its state is copied to one device, which
computes the gradients of the same batch, and the update from the gradients *that the mesh computed*. If the initial
states are equal and every step maps equal states to equal states, the two runs are the same.

How far apart two orders of summation may be differs from leaf to leaf. It is measured: one device computes the same
with every float moved by one rounding, up or down at random, which moves the result as another order does (Higham,
Accuracy and Stability of Numerical Algorithms, 2nd edition, sections 3.1 and 4.2).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd import tree
from spmd.errors import ConfigError, Problem
from spmd.gradients.base import GradFn
from spmd.parity.result import TOLERANCES, Parity, Row, Tolerance, compare_leaf, distance, largest, worst_of_each
from spmd.plan.plan import ShardingPlan
from spmd.precision import Precision
from spmd.training.state import TrainState, abstract_state, init_state
from spmd.training.step import TrainStep, make_train_step

TWINS = 3
"""How many times everything is moved by one rounding."""
FACTOR = 16
"""How many times the largest movement of its twins a gradient may be away from that of one device."""
FLOOR = 1e-7
"""Share of the largest gradient of a step by which any may differ: one rounding, of terms that cancel."""

Leaves = dict[str, np.ndarray]
"""Path → array on the host."""
Noisy = dict[str, dict[str, tuple[np.ndarray, float]]]
"""Kind → path → array of the reference, and how far one rounding moves it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Reference:
    """The steps on one device that layouts are compared with; compiled once for all of them.

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
    ) -> Parity:
        """Train under another plan for one step on each batch, and compare every step.

        Rows are `initial state`, and of each step `loss`, `gradients`, `variables`, `transforms` (their
        states), `updates` (what it adds to the parameters) and `optimizer state`.

        Args:
            grad_fn: The gradient function of that plan, if it is another.
            state: Its initial state, instead of one from the seed; donated.
            tolerance: By default that of the plan's precision.

        Raises:
            ConfigError: The plans have different states, or the first step has no finite loss on either side.
        """
        tolerance = tolerance or TOLERANCES[plan.precision.compute]
        state = init_state(plan, self.seed) if state is None else state
        step = make_train_step(plan, grad_fn=grad_fn or self.grad_fn, keep_gradients=True)
        before, losses, theirs, compared, stopped = _on_host(state), [], [], 0, 0
        self._check_state(before)
        rows = [
            compare_leaf(Row("initial state", path, 0.0, 0.0), before[path], x, largest(x), {})
            for path, x in self._initial.items()
        ]
        starts_equal = all(row.ok for row in rows)
        for number, batch in enumerate(self.batches, 1):
            state, metrics = step(state, _placed(plan, batch))
            after, gradients = _on_host(state), _on_host(metrics["gradients"])
            found = {"loss": {"": np.asarray(metrics["loss"])}, "gradients": gradients}
            found |= {what: _part(after, field) for what, field in _FIELDS.items()}
            expected = self._first if number == 1 and starts_equal else self._gradients(before, batch)
            expected = expected | self._updates(before, batch, gradients, metrics["loss"])
            rows += _compare(number, found, expected, before, tolerance, plan.precision)
            losses.append(float(metrics["loss"]))
            theirs.append(float(expected["loss"][""][0]))
            if not all(map(_is_finite, found["updates"].values())):
                stopped = number
                break
            compared += math.isfinite(losses[-1])
            before = after
        if not compared and all(row.ok for row in rows):
            what = "gives no finite parameters or no finite loss, on both sides"
            detail = f"loss {losses[0]:.7g} on the mesh, {theirs[0]:.7g} on one device"
            problem = Problem("step 1", what, detail, "a lower learning rate, or other data")
            raise ConfigError("There is nothing to compare:", [problem])
        return Parity(tuple(losses), tuple(theirs), worst_of_each(rows), tolerance, stopped)

    @functools.cached_property
    def _initial(self) -> Leaves:
        return _on_host(init_state(self.plan, self.seed) if self.state is None else self.state)

    @functools.cached_property
    def _first(self) -> Noisy:
        return self._gradients(self._initial, self.batches[0])

    @functools.cached_property
    def _step(self) -> TrainStep:
        return make_train_step(self.plan, grad_fn=self.grad_fn, keep_gradients=True)

    @functools.cached_property
    def _update(self) -> Any:
        state = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(self.plan))
        return jax.jit(self._step.update, out_shardings=(state.params, state.optimizer_state))

    def _check_state(self, found: Leaves) -> None:
        expected = {path: x.shape for path, x in tree.flatten(abstract_state(self.plan)).items()}
        shapes = {path: x.shape for path, x in found.items()}
        if problems := [
            Problem(path, f"is {shapes.get(path, 'not there')} here and {expected.get(path, 'not there')} there")
            for path in sorted({**shapes, **expected})
            if shapes.get(path) != expected.get(path)
        ]:
            raise ConfigError("Plans of different models or optimizers cannot be compared:", problems)

    def _gradients(self, before: Leaves, batch: Any) -> Noisy:
        """Return the loss, gradients and variables of a step from a state."""
        own = {path: x for path, x in before.items() if path.startswith(("params/", "variables/"))}
        inputs, structure = jax.tree.flatten(batch)

        def take(seed: int | None) -> dict[str, Leaves]:
            eps = float(jnp.finfo(self.plan.precision.compute_dtype).eps) / 4  # the mean error of a cast to it
            state = _as_tree(abstract_state(self.plan), before | _moved(own, seed, eps))
            near = _moved({str(n): np.asarray(x) for n, x in enumerate(inputs)}, seed)
            after, metrics = self._step(state, _placed(self.plan, jax.tree.unflatten(structure, near.values())))
            found = {"loss": {"": np.asarray(metrics["loss"])}, "gradients": _on_host(metrics["gradients"])}
            return found | {"variables": _on_host(after.variables), "transforms": _on_host(after.transforms)}

        return _with_noise(take)

    def _updates(self, before: Leaves, batch: Any, gradients: Leaves, loss: jax.Array) -> Noisy:
        """Return the parameters and the optimizer state that follow from a state, a batch, gradients and a loss."""
        held = {path: x for path, x in before.items() if path.startswith("optimizer_state/")}
        placed_batch, mean = _placed(self.plan, batch), np.asarray(loss)

        def take(seed: int | None) -> dict[str, Leaves]:
            near = _moved(gradients, seed)
            placed = tree.map_with_path(lambda path, to: jax.device_put(near[path], to), self.plan.gradient_shardings)
            state = _as_tree(abstract_state(self.plan), before | _moved(held, seed))
            moved = self._update(state, placed_batch, placed, mean)
            return dict(zip(("updates", "optimizer state"), map(_on_host, moved), strict=True))

        return _with_noise(take)


_FIELDS = {
    "variables": "variables",
    "transforms": "transforms",
    "updates": "params",
    "optimizer state": "optimizer_state",
}
"""Kind of row → field of the state after a step."""


def _compare(
    step: int, found: dict[str, Leaves], expected: Noisy, before: Leaves, tolerance: Tolerance, precision: Precision
) -> Iterator[Row]:
    """Compare all leaves of a step."""
    gradients = {path: x for path, (x, _) in expected["gradients"].items()}
    most = max(map(largest, gradients.values()), default=0.0)
    bases = {"loss": tolerance.loss, "gradients": tolerance.gradients}
    bases |= dict.fromkeys(("variables", "transforms"), tolerance.gradients)
    sides = (found["gradients"], gradients)
    if precision.loss_scale and not any(all(map(_is_finite, side.values())) for side in sides):
        expected = {what: leaves for what, leaves in expected.items() if what != "gradients"}
        yield Row("gradients", "", 0.0, 0.0, "overflow on both sides: the step is skipped", step, len(gradients))
    for what, leaves in expected.items():
        for path, (x, noise) in leaves.items():
            scale = largest(x - before[f"params/{path}"]) if what == "updates" else largest(x)
            scale = scale or (most if what == "gradients" else 0.0)
            dtype = precision.compute if what in bases else str(x.dtype)
            allowed = {f"{dtype} itself is {noise / (scale or 1.0):.0e} apart": FACTOR * noise}
            allowed |= {"its last digit": 2 * _resolution(x)}
            if what == "gradients":
                allowed["a rounding of the largest gradient"] = FLOOR * most
            row = Row(what, path, 0.0, bases.get(what, tolerance.updates), step=step)
            yield compare_leaf(row, found[what][path], x, scale, allowed)


def _with_noise(take: Callable[[int | None], dict[str, Leaves]]) -> Noisy:
    """Return the result of a function of a seed for None, and how far its results for seeds are from that."""
    still = take(None)
    noise = {what: dict.fromkeys(leaves, 0.0) for what, leaves in still.items()}
    for seed in range(TWINS):
        for what, leaves in take(seed).items():
            for path, x in leaves.items():
                noise[what][path] = max(noise[what][path], distance(x, still[what][path]))
    return {what: {path: (x, noise[what][path]) for path, x in leaves.items()} for what, leaves in still.items()}


def _moved(leaves: Leaves, seed: int | None, eps: float = 0.0) -> Leaves:
    """Return the leaves, every float moved by one rounding of its dtype, up or down; zeros stay zeros.

    Args:
        seed: Of the directions; None moves nothing.
        eps: A coarser rounding, relative, such as that of a cast before the leaves are used.
    """
    if seed is None:
        return leaves
    rng = np.random.default_rng(seed)

    def move(x: np.ndarray) -> np.ndarray:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        sign = rng.integers(0, 2, x.shape, np.int8) * 2.0 - 1
        near = 1 + 0.75 * max(eps, float(jnp.finfo(x.dtype).eps)) * sign  # 0.75: never a tie between two neighbours
        return (x.astype(np.float64) * near).astype(x.dtype)

    return {path: move(x) for path, x in leaves.items()}


def _resolution(x: np.ndarray) -> float:
    """Return one rounding of the largest element: of a code of 8 bits, one code; of other integers, none."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return float(jnp.finfo(x.dtype).eps) * largest(x)
    return 1.0 if x.dtype.itemsize == 1 and x.dtype != np.bool_ else 0.0


def _is_finite(x: np.ndarray) -> bool:
    return bool(np.isfinite(x.astype(np.float64)).all())


def _on_host(values: Any) -> Leaves:
    return {path: np.asarray(leaf) for path, leaf in tree.flatten(values).items()}


def _part(leaves: Leaves, name: str) -> Leaves:
    """Return the leaves of one field of a state, by their paths in it."""
    return {path.removeprefix(f"{name}/"): x for path, x in leaves.items() if path.startswith(f"{name}/")}


def _as_tree(like: Any, leaves: Leaves) -> Any:
    """Place leaves as `like` says, a tree of shapes with shardings."""
    return tree.map_with_path(lambda path, x: jax.device_put(leaves[path], x.sharding), like)


def _placed(plan: ShardingPlan, batch: Any) -> Any:
    return jax.device_put(batch, plan.batch_shardings(batch))
