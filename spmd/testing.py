"""What a user's own tests need: parity of layouts, decided layouts, bugs, expected collectives, and test batches."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.analysis.collective_audit import expect_collectives as expect_collectives
from spmd.analysis.explicit_axes import ExplicitCheck as ExplicitCheck
from spmd.analysis.explicit_axes import UndecidedLayout as UndecidedLayout
from spmd.analysis.explicit_axes import check_explicit as check_explicit
from spmd.gradients.base import GradFn
from spmd.optim.layerwise import assert_layerwise as assert_layerwise
from spmd.parity.bugs import BUGS as BUGS
from spmd.parity.bugs import drop_reduction as drop_reduction
from spmd.parity.bugs import drop_weights as drop_weights
from spmd.parity.bugs import repeat_microbatch as repeat_microbatch
from spmd.parity.bugs import scale_gradients as scale_gradients
from spmd.parity.bugs import scale_one_leaf as scale_one_leaf
from spmd.parity.reference import Reference as Reference
from spmd.parity.result import TOLERANCES as TOLERANCES
from spmd.parity.result import Parity as Parity
from spmd.parity.result import Row as Row
from spmd.parity.result import Tolerance as Tolerance
from spmd.plan.plan import ShardingPlan


def assert_parity(
    plan: ShardingPlan,
    reference: ShardingPlan,
    grad_fn: GradFn,
    batches: Sequence[Any],
    *,
    seed: int = 0,
    tolerance: Tolerance | None = None,
) -> Parity:
    """Train under `plan` on the batches and assert that each step is that of `reference`, usually of one device.

    Raises:
        AssertionError: A leaf exceeds its tolerance; the message lists every such leaf.
        ConfigError: There is nothing to compare.
    """
    parity = Reference(reference, grad_fn, batches, seed).compare(plan, tolerance=tolerance)
    if not parity.ok:
        raise AssertionError(f"The two layouts differ:\n{parity}")
    return parity


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
