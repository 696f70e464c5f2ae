"""Proof that a layout gives the same numbers: one run on a mesh, one on a single device, compared leaf by leaf."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from spmd import tree
from spmd.annotate import within
from spmd.gradients.base import GradFn
from spmd.mesh import batch_sharding
from spmd.plan import ShardingPlan
from spmd.state import init_state
from spmd.step import make_train_step


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far two layouts may differ, relative to the largest value of the leaf.

    Initial parameters must be bitwise equal. The rest differs because sums over devices are taken in another order:
    a float32 rounding is 6e-8, and a sum of n terms gathers about √n of them.
    """

    loss: float
    gradients: float
    params: float


TOLERANCES = {
    "float32": Tolerance(loss=1e-5, gradients=1e-4, params=1e-4),
    "bf16": Tolerance(loss=1e-2, gradients=1e-1, params=1.0),
}
"""By precision policy. A bfloat16 rounding is 4e-3, and Adam turns the sign of a gradient near zero into a whole step,
so bf16 shows gross errors only: check a layout in float32."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison: what, the largest difference relative to the largest value, and what is allowed."""

    what: str
    path: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the difference is allowed; NaN is not."""
        return self.error <= self.tolerance


@dataclasses.dataclass(frozen=True)
class Parity:
    """The comparison of two runs: losses of each run, and a row for each leaf and each loss."""

    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """Whether every row is within its tolerance."""
        return all(row.ok for row in self.rows)

    def worst(self) -> list[Row]:
        """The row with the largest error of each kind, relative to its tolerance."""
        kinds = dict.fromkeys(row.what for row in self.rows)
        return [max((row for row in self.rows if row.what == kind), key=_badness) for kind in kinds]

    def __str__(self) -> str:
        """One line for each kind with its worst leaf, then every leaf that is beyond its tolerance."""
        shown = [(row, "ok" if row.ok else "FAIL") for row in self.worst()]
        worst = {id(row) for row, _ in shown}
        shown += [(row, "FAIL") for row in self.rows if not row.ok and id(row) not in worst]
        width = max(len(row.path) for row, _ in shown)
        return "\n".join(
            f"{row.what:<18} {row.path:<{width}}  {row.error:9.2e}  allowed {row.tolerance:7.0e}  {verdict}"
            for row, verdict in shown
        )


@dataclasses.dataclass(frozen=True)
class Record:
    """What a short training run produced, on the host: initial parameters, first gradients, losses, parameters."""

    precision: str
    values: dict[str, dict[str, np.ndarray]]

    @property
    def losses(self) -> tuple[float, ...]:
        """Nats per token of each step."""
        return tuple(map(float, self.values["loss"].values()))


def record_run(plan: ShardingPlan, grad_fn: GradFn, batches: Sequence[Any], *, seed: int = 0) -> Record:
    """Trains under `plan` for one step on each batch.

    Args:
        plan: The layout.
        grad_fn: How a batch becomes gradients.
        batches: Host arrays, one batch for each step.
        seed: Of the parameters.
    """
    state = init_state(plan, seed)
    placed = [jax.device_put(batch, batch_sharding(plan.mesh)) for batch in batches]
    initial = _on_host(state.params)

    def gradients(params: Any, batch: Any) -> Any:
        with within(plan):
            grads, sums = grad_fn(params, batch, jax.random.key(seed))
        return jax.tree.map(lambda g: g / sums["weight"], grads)

    first = _on_host(jax.jit(gradients)(state.params, placed[0]))
    step = make_train_step(plan, grad_fn=grad_fn)
    losses = {}
    for number, batch in enumerate(placed, 1):
        state, metrics = step(state, batch)
        losses[f"step {number}"] = np.asarray(metrics["loss"])
    values = {"initial parameters": initial, "gradients": first, "loss": losses, "parameters": _on_host(state.params)}
    return Record(plan.precision.name, values)


def compare(record: Record, reference: Record, tolerance: Tolerance | None = None) -> Parity:
    """The two runs leaf by leaf.

    Args:
        record: The layout in question.
        reference: The same model, optimizer and batches on one device.
        tolerance: By default that of the record's precision.

    Returns:
        Rows `initial parameters`, `gradients` (of the first batch), `loss` (of each step) and `parameters` (after the
        last).
    """
    tolerance = tolerance or TOLERANCES[record.precision]
    allowed = {
        "initial parameters": 0.0,
        "gradients": tolerance.gradients,
        "loss": tolerance.loss,
        "parameters": tolerance.params,
    }
    rows = [
        Row(kind, path, _relative(x, reference.values[kind][path]), allowed[kind])
        for kind, leaves in record.values.items()
        for path, x in leaves.items()
    ]
    return Parity(record.losses, reference.losses, tuple(rows))


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
    scale = np.abs(reference).max()
    return float(np.abs(x - reference).max() / (scale if scale else 1.0))


def _badness(row: Row) -> float:
    if np.isnan(row.error):
        return float("inf")
    return row.error / row.tolerance if row.tolerance else row.error * 1e12


def drop_weights(grad_fn: GradFn) -> GradFn:
    """A deliberate bug for controls: every token counts, padding too."""
    return lambda params, batch, key: grad_fn(params, {**batch, "weights": jax.numpy.ones_like(batch["weights"])}, key)


def scale_gradients(grad_fn: GradFn, factor: float) -> GradFn:
    """A deliberate bug for controls: gradients off by a factor, as after a sum taken for a mean."""

    def scaled(params: Any, batch: Any, key: jax.Array) -> tuple[Any, Any]:
        gradients, sums = grad_fn(params, batch, key)
        return jax.tree.map(lambda g: g * factor, gradients), sums

    return scaled


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
        kept = rng.random(shape) >= padding * 2 * np.arange(batch)[:, None] / max(batch - 1, 1)
        out.append({"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": kept.astype(np.float32)})
    return out
