"""Parity test of a layout: a run on a mesh and a run on one device, compared leaf by leaf."""

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
    """Allowed difference relative to the largest value of a leaf, and why; initial parameters must be bitwise equal."""

    loss: float
    gradients: float
    params: float
    why: str = ""


def _narrow(rounding: str) -> Tolerance:
    why = f"{rounding}, and Adam turns the sign of a gradient near zero into a whole step: this shows gross errors only"
    return Tolerance(loss=1e-2, gradients=1e-1, params=1.0, why=f"{why}; check a layout in float32")


_ORDER = "sums over devices are taken in another order: a float32 rounding is 6e-8, and n terms gather about √n"
TOLERANCES = {
    "float32": Tolerance(loss=1e-5, gradients=1e-4, params=1e-4, why=_ORDER),
    "bf16": _narrow("a bfloat16 rounding is 4e-3"),
    "bf16-params": _narrow("a bfloat16 rounding is 4e-3"),
    "bf16-params-stochastic": _narrow("a bfloat16 rounding is 4e-3, and any difference may turn it the other way"),
    "fp16": _narrow("a float16 rounding is 5e-4"),
}
"""Tolerances by precision policy."""

NOISE = 1e-6
"""Share of the largest gradient below which a gradient is rounding noise, such as that of an attention key's bias."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison: the largest difference relative to the largest value, the tolerance, and why it is special."""

    what: str
    path: str
    error: float
    tolerance: float
    why: str = ""

    @property
    def ok(self) -> bool:
        """True if the error is within the tolerance; NaN is not."""
        return self.error <= self.tolerance


@dataclasses.dataclass(frozen=True)
class Parity:
    """Comparison of two runs, with a row for each leaf and each loss."""

    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    rows: tuple[Row, ...]
    tolerance: Tolerance

    @property
    def ok(self) -> bool:
        """True if every row is ok."""
        return all(row.ok for row in self.rows)

    def worst(self) -> list[Row]:
        """Return the row of each kind with the largest error relative to its tolerance."""
        kinds = dict.fromkeys(row.what for row in self.rows)
        return [max((row for row in self.rows if row.what == kind), key=_badness) for kind in kinds]

    def __str__(self) -> str:
        shown = self.worst()  # then every row that fails or has a tolerance of its own
        return self.lines(shown + [row for row in self.rows if (row.why or not row.ok) and row not in shown])

    def lines(self, rows: Sequence[Row]) -> str:
        """Return one line for each of `rows`."""
        width = max(len(row.path) for row in rows)
        return "\n".join(
            f"{row.what:<18} {row.path:<{width}}  {row.error:9.2e}  allowed {row.tolerance:7.0e}  "
            + ("ok" if row.ok else "FAIL")
            + (f"  ({row.why})" if row.why else "")
            for row in rows
        )

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; a NaN or infinite error is a string."""

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
    """Results of a short training run, on the host: initial parameters, first gradients, losses, parameters."""

    precision: str
    values: dict[str, dict[str, np.ndarray]]

    @property
    def losses(self) -> tuple[float, ...]:
        """Nats per token of each step."""
        return tuple(map(float, self.values["loss"].values()))


def record_run(
    plan: ShardingPlan, grad_fn: GradFn, batches: Sequence[Any], *, seed: int = 0, state: TrainState | None = None
) -> Record:
    """Train under `plan` for one step on each host batch, with one compiled program.

    The initial state comes from the seed, unless one is given; that one is donated.
    """
    state = init_state(plan, seed) if state is None else state
    values = {"initial parameters": _on_host(state.params), "gradients": {}, "loss": {}}
    step = make_train_step(plan, grad_fn=grad_fn, keep_gradients=True)
    for number, batch in enumerate(batches, 1):
        placed = jax.tree.map(lambda x: jax.device_put(x, batch_sharding(plan.mesh, x.ndim)), batch)
        state, metrics = step(state, placed)
        values["loss"][f"step {number}"] = np.asarray(metrics["loss"])
        values["gradients"] = values["gradients"] or _on_host(metrics["gradients"])
    values |= {"parameters": _on_host(state.params), "variables": _on_host(state.variables)}
    return Record(plan.precision.name, values)


def compare(record: Record, reference: Record, tolerance: Tolerance | None = None) -> Parity:
    """Compare a run with one of the same model, optimizer and batches on one device.

    Rows are `initial parameters`, `gradients` (of the first batch), `loss` (of each step), `parameters` and `variables`
    (after the last). The tolerance is by default that of the record's precision.
    """
    tolerance = tolerance or TOLERANCES[record.precision]
    allowed = {
        "initial parameters": 0.0,
        "gradients": tolerance.gradients,
        "loss": tolerance.loss,
        "parameters": tolerance.params,
        "variables": tolerance.params,
    }
    sizes = {path: _largest(g) for path, g in reference.values["gradients"].items()}
    largest = max(sizes.values(), default=0.0)
    # An exact zero is no noise: before a layer that is initialized to zero, gradients are zero in the first step.
    noise = {path for path, size in sizes.items() if 0 < size <= NOISE * largest}

    def row(kind: str, path: str, x: np.ndarray) -> Row:
        if path in noise and kind == "gradients":
            why = "rounding noise: relative to the largest of all gradients"
            return Row(kind, path, _largest(x) / (largest or 1.0), 2 * NOISE, why)
        x, expected = (array.astype(np.float64) for array in (x, reference.values[kind][path]))
        error = _largest(x - expected) / (_largest(expected) or 1.0)
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
    """Train under both plans on the same batches and assert that they agree.

    Raises:
        AssertionError: A leaf exceeds its tolerance; the message lists every such leaf.
    """
    ours, theirs = (record_run(p, grad_fn, batches, seed=seed) for p in (plan, reference))
    parity = compare(ours, theirs, tolerance)
    if not parity.ok:
        raise AssertionError(f"The two layouts differ:\n{parity}")
    return parity


def _on_host(params: Any) -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf) for path, leaf in tree.flatten(params).items()}


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x).max(initial=0.0))


def _badness(row: Row) -> float:
    if np.isnan(row.error):
        return math.inf
    return row.error / row.tolerance if row.tolerance else row.error * 1e12


def drop_weights(grad_fn: GradFn) -> GradFn:
    """Inject a bug: every token counts, padding included."""

    def every_token(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Any, Any, Any]:
        return grad_fn(params, variables, {**batch, "weights": jax.numpy.ones_like(batch["weights"])}, key)

    return every_token


def scale_gradients(grad_fn: GradFn, factor: float) -> GradFn:
    """Inject a bug: gradients are off by a factor, as if a sum were taken for a mean."""

    def scaled(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Any, Any, Any]:
        gradients, sums, variables = grad_fn(params, variables, batch, key)
        return jax.tree.map(lambda g: g * factor, gradients), sums, variables

    return scaled


def drop_reduction(grad_fn: GradFn) -> GradFn:
    """Inject a bug: gradients are summed over half of the examples, as if a reduction skipped a batch axis."""

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
"""Bugs that a check must detect, by name: half of a reduction missing, padding that counts, gradients 1 % off."""


def token_batches(
    shape: tuple[int, int], vocab: int, steps: int, *, padding: float = 0.25, seed: int = 0
) -> list[dict[str, np.ndarray]]:
    """Make one random host batch of shape `(batch, sequence)` for each step, a fraction of its weights 0 (padding).

    Padding is uneven over the examples, so that a mean of means is detected.
    """
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(steps):
        ids = rng.integers(0, vocab, (shape[0], shape[1] + 1), dtype=np.int32)
        out.append({"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": _uneven(shape, padding, rng)})
    return out


def pad_unevenly(batch: dict[str, np.ndarray], *, padding: float = 0.25, seed: int = 0) -> dict[str, np.ndarray]:
    """Set a fraction of the weights of a host batch to 0: few in the first example, many in the last."""
    kept = _uneven(batch["weights"].shape, padding, np.random.default_rng(seed))
    return {**batch, "weights": batch["weights"] * kept}


def _uneven(shape: tuple[int, ...], padding: float, rng: np.random.Generator) -> np.ndarray:
    """Return 0 or 1 for each position; 0 more often from example to example."""
    rows = np.arange(shape[0])[:, None] / max(shape[0] - 1, 1)
    return (rng.random(shape) >= padding * 2 * rows).astype(np.float32)
