"""Proof that a layout gives the same numbers: one run on a mesh, one on a single device, compared leaf by leaf."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from spmd import tree
from spmd.analysis.collective_audit import expect_collectives as expect_collectives
from spmd.gradients.base import GradFn
from spmd.optim.layerwise import assert_layerwise as assert_layerwise
from spmd.plan.plan import ShardingPlan
from spmd.sharding.mesh import batch_sharding
from spmd.train.state import TrainState, init_state
from spmd.train.step import make_train_step


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far two layouts may differ, relative to the largest value of the leaf, and why.

    Initial parameters must be bitwise equal.
    """

    loss: float
    gradients: float
    params: float
    why: str = ""


def _narrow(rounding: str) -> Tolerance:
    why = f"{rounding}, and Adam turns the sign of a gradient near zero into a whole step: this shows gross errors only"
    return Tolerance(loss=1e-2, gradients=1e-1, params=1.0, why=f"{why}; check a layout in float32")


TOLERANCES = {
    "float32": Tolerance(
        loss=1e-5,
        gradients=1e-4,
        params=1e-4,
        why="sums over devices are taken in another order: a float32 rounding is 6e-8, and n terms gather about √n",
    ),
    "bf16": _narrow("a bfloat16 rounding is 4e-3"),
    "bf16-params": _narrow("a bfloat16 rounding is 4e-3"),
    "bf16-params-stochastic": _narrow("a bfloat16 rounding is 4e-3, and any difference may turn it the other way"),
    "fp16": _narrow("a float16 rounding is 5e-4"),
}
"""By precision policy."""

NOISE = 1e-6
"""A gradient whose largest value is below this part of the largest of all is rounding noise; exactly, it is zero, as
that of an attention key's bias is."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison: what, the largest difference relative to the largest value, and what is allowed (and why, if not
    for the reason that holds for all)."""

    what: str
    path: str
    error: float
    tolerance: float
    why: str = ""

    @property
    def ok(self) -> bool:
        """Whether the difference is allowed; NaN is not."""
        return self.error <= self.tolerance


@dataclasses.dataclass(frozen=True)
class Parity:
    """The comparison of two runs: losses of each run, a row for each leaf and each loss, and what was allowed."""

    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    rows: tuple[Row, ...]
    tolerance: Tolerance

    @property
    def ok(self) -> bool:
        """Whether every row is within its tolerance."""
        return all(row.ok for row in self.rows)

    def worst(self) -> list[Row]:
        """The row with the largest error of each kind, relative to its tolerance."""
        kinds = dict.fromkeys(row.what for row in self.rows)
        return [max((row for row in self.rows if row.what == kind), key=_badness) for kind in kinds]

    def __str__(self) -> str:
        """One line for each kind with its worst leaf, then every leaf that is beyond its tolerance or has one of its
        own."""
        shown = self.worst()
        return self.lines(shown + [row for row in self.rows if (row.why or not row.ok) and row not in shown])

    def lines(self, rows: Sequence[Row]) -> str:
        """One line for each of `rows`."""
        width = max(len(row.path) for row in rows)
        return "\n".join(
            f"{row.what:<18} {row.path:<{width}}  {row.error:9.2e}  allowed {row.tolerance:7.0e}  "
            + ("ok" if row.ok else "FAIL")
            + (f"  ({row.why})" if row.why else "")
            for row in rows
        )

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON values; an error that is NaN or infinite is its name."""

        def number(x: float) -> float | str:
            return x if math.isfinite(x) else str(x)

        rows = [
            {"what": r.what, "path": r.path, "error": number(r.error), "tolerance": number(r.tolerance), "ok": r.ok}
            | ({"why": r.why} if r.why else {})
            for r in self.rows
        ]
        losses = {"losses": list(map(number, self.losses)), "reference": list(map(number, self.reference_losses))}
        return {"ok": self.ok, **losses, "tolerance": dataclasses.asdict(self.tolerance), "rows": rows}


@dataclasses.dataclass(frozen=True)
class Record:
    """What a short training run produced, on the host: initial parameters, first gradients, losses, parameters."""

    precision: str
    values: dict[str, dict[str, np.ndarray]]

    @property
    def losses(self) -> tuple[float, ...]:
        """Nats per token of each step."""
        return tuple(map(float, self.values["loss"].values()))


def record_run(
    plan: ShardingPlan, grad_fn: GradFn, batches: Sequence[Any], *, seed: int = 0, state: TrainState | None = None
) -> Record:
    """Trains under `plan` for one step on each batch, with one compiled program.

    Args:
        plan: The layout.
        grad_fn: How a batch becomes gradients.
        batches: Host arrays, one batch for each step.
        seed: Of the parameters.
        state: What the run starts with, instead of what the seed gives; it is used up.
    """
    state = init_state(plan, seed) if state is None else state
    initial = _on_host(state.params)
    step = make_train_step(plan, grad_fn=grad_fn, keep_gradients=True)
    first: dict[str, np.ndarray] = {}
    losses: dict[str, np.ndarray] = {}
    for number, batch in enumerate(batches, 1):
        placed = jax.tree.map(lambda x: jax.device_put(x, batch_sharding(plan.mesh, x.ndim)), batch)
        state, metrics = step(state, placed)
        losses[f"step {number}"] = np.asarray(metrics["loss"])
        first = first or _on_host(metrics["gradients"])
    values = {
        "initial parameters": initial,
        "gradients": first,
        "loss": losses,
        "parameters": _on_host(state.params),
        "variables": _on_host(state.variables),
    }
    return Record(plan.precision.name, values)


def compare(record: Record, reference: Record, tolerance: Tolerance | None = None) -> Parity:
    """The two runs leaf by leaf.

    Args:
        record: The layout in question.
        reference: The same model, optimizer and batches on one device.
        tolerance: By default that of the record's precision.

    Returns:
        Rows `initial parameters`, `gradients` (of the first batch), `loss` (of each step), `parameters` and
        `variables` (after the last).
    """
    tolerance = tolerance or TOLERANCES[record.precision]
    allowed = {
        "initial parameters": 0.0,
        "gradients": tolerance.gradients,
        "loss": tolerance.loss,
        "parameters": tolerance.params,
        "variables": tolerance.params,
    }
    sizes = {path: float(np.abs(g).max(initial=0.0)) for path, g in reference.values["gradients"].items()}
    largest = max(sizes.values(), default=0.0)
    # An exact zero is no noise: a layer behind one that starts at zero has such a gradient, in the first step alone.
    noise = {path for path, size in sizes.items() if 0 < size <= NOISE * largest}

    def row(kind: str, path: str, x: np.ndarray) -> Row:
        if path in noise and kind == "gradients":
            why = "rounding noise: relative to the largest of all gradients"
            return Row(kind, path, float(np.abs(x).max(initial=0.0)) / (largest or 1.0), 2 * NOISE, why)
        error = _relative(x, reference.values[kind][path])
        if path in noise and kind == "parameters":
            why = "its gradient is rounding noise, which an optimizer like Adam turns into whole steps"
            return Row(kind, path, error, math.inf, why)
        return Row(kind, path, error, allowed[kind])

    rows = [row(kind, path, x) for kind, leaves in record.values.items() for path, x in leaves.items()]
    return Parity(record.losses, reference.losses, tuple(rows), tolerance)


def assert_parity(
    plan: ShardingPlan,
    reference: ShardingPlan,
    grad_fn: GradFn,
    batches: Sequence[Any],
    *,
    seed: int = 0,
    tolerance: Tolerance | None = None,
) -> Parity:
    """Trains under both plans on the same batches and asserts that they agree.

    Raises:
        AssertionError: A leaf differs by more than is allowed; the message lists every such leaf.
    """
    ours, theirs = (record_run(p, grad_fn, batches, seed=seed) for p in (plan, reference))
    parity = compare(ours, theirs, tolerance)
    if not parity.ok:
        raise AssertionError(f"The two layouts differ:\n{parity}")
    return parity


def _on_host(params: Any) -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf) for path, leaf in tree.flatten(params).items()}


def _relative(x: np.ndarray, reference: np.ndarray) -> float:
    x, reference = x.astype(np.float64), reference.astype(np.float64)
    scale = np.abs(reference).max(initial=0.0)
    return float(np.abs(x - reference).max(initial=0.0) / (scale if scale else 1.0))


def _badness(row: Row) -> float:
    if np.isnan(row.error):
        return math.inf
    return row.error / row.tolerance if row.tolerance else row.error * 1e12


def drop_weights(grad_fn: GradFn) -> GradFn:
    """A deliberate bug for controls: every token counts, padding too."""

    def every_token(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Any, Any, Any]:
        weights = jax.numpy.ones_like(batch["weights"])
        return grad_fn(params, variables, {**batch, "weights": weights}, key)

    return every_token


def scale_gradients(grad_fn: GradFn, factor: float) -> GradFn:
    """A deliberate bug for controls: gradients off by a factor, as after a sum taken for a mean."""

    def scaled(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Any, Any, Any]:
        gradients, sums, variables = grad_fn(params, variables, batch, key)
        return jax.tree.map(lambda g: g * factor, gradients), sums, variables

    return scaled


def drop_reduction(grad_fn: GradFn) -> GradFn:
    """A deliberate bug for controls: gradients are summed over half of the examples, as by a reduction that leaves out
    an axis of the batch, and the losses over all of them."""

    def partly(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Any, Any, Any]:
        _, sums, variables_after = grad_fn(params, variables, batch, key)
        weights = batch["weights"]
        counted = jax.numpy.arange(weights.shape[0]).reshape(-1, *(1,) * (weights.ndim - 1)) % 2 == 0
        half = {**batch, "weights": weights * counted}
        gradients, half_sums, _ = grad_fn(params, variables, half, key)
        scale = sums["weight"] / half_sums["weight"]
        return jax.tree.map(lambda g: g * scale, gradients), sums, variables_after

    return partly


BUGS: dict[str, Callable[[GradFn], GradFn]] = {
    "reduction": drop_reduction,
    "token-weight": drop_weights,
    "gradient-scale": lambda grad_fn: scale_gradients(grad_fn, 1.01),
}
"""What a check must be able to notice, by name: half of a reduction missing, padding that counts, gradients 1 % off."""


def token_batches(
    shape: tuple[int, int], vocab: int, steps: int, *, padding: float = 0.25, seed: int = 0
) -> list[dict[str, np.ndarray]]:
    """Random batches with padding, on the host.

    Args:
        shape: `(batch, sequence)`.
        vocab: Token ids are below it.
        steps: How many batches.
        padding: The fraction of positions with weight 0; uneven over the examples, so that a mean of means shows.
        seed: Of the draws.
    """
    rng = np.random.default_rng(seed)
    batch, sequence = shape
    out = []
    for _ in range(steps):
        ids = rng.integers(0, vocab, (batch, sequence + 1), dtype=np.int32)
        out.append({"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": _uneven(shape, padding, rng)})
    return out


def pad_unevenly(batch: dict[str, np.ndarray], *, padding: float = 0.25, seed: int = 0) -> dict[str, np.ndarray]:
    """The batch with some of its weights set to 0, for in text without padding a loss that ignores weights is right.

    Args:
        batch: Host arrays, with `weights` `[batch, sequence]`.
        padding: The fraction of positions that stop to count; few in the first example, many in the last.
        seed: Of the draws.
    """
    kept = _uneven(batch["weights"].shape, padding, np.random.default_rng(seed))
    return {**batch, "weights": batch["weights"] * kept}


def _uneven(shape: tuple[int, ...], padding: float, rng: np.random.Generator) -> np.ndarray:
    """0 or 1 for each position; 0 more often from example to example, so that a mean of means shows."""
    rows = np.arange(shape[0])[:, None] / max(shape[0] - 1, 1)
    return (rng.random(shape) >= padding * 2 * rows).astype(np.float32)
