"""Tools for a user's tests: parity of layouts, undecided layouts, bugs, collectives and batches."""

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
    """Train under `plan` on the batches, and assert the same steps as under `reference`.

    The reference is usually a plan for one device.

    Raises:
        AssertionError: A leaf exceeds its tolerance; the message lists every such leaf.
        ConfigError: There is nothing to compare.
    """
    steps = Reference(reference, grad_fn, batches, seed)
    parity = steps.compare(plan, tolerance=tolerance)
    if not parity.ok:
        raise AssertionError(f"The two layouts differ:\n{parity}")
    return parity


def token_batches(
    shape: tuple[int, int], vocab: int, steps: int, *, padding: float = 0.25, seed: int = 0
) -> list[dict[str, np.ndarray]]:
    """Make one random host batch of shape `(batch, sequence)` for each step.

    A fraction of its weights is 0 (padding). Padding is uneven over the examples, so that a mean of
    means is detected.
    """
    rng = np.random.default_rng(seed)
    examples, length = shape
    batches = []
    for _ in range(steps):
        # One more token than the sequence: each is the target of the one before it.
        ids = rng.integers(0, vocab, (examples, length + 1), dtype=np.int32)
        batch = {
            "tokens": ids[:, :-1],
            "targets": ids[:, 1:],
            "weights": _uneven(shape, padding, rng),
        }
        batches.append(batch)
    return batches


def pad_unevenly(
    batch: dict[str, np.ndarray], *, padding: float = 0.25, seed: int = 0
) -> dict[str, np.ndarray]:
    """Set a fraction of the weights of a host batch to 0.

    They are few in the first example, and many in the last.
    """
    weights = batch["weights"]
    kept = _uneven(weights.shape, padding, np.random.default_rng(seed))
    return {**batch, "weights": weights * kept}


def _uneven(shape: tuple[int, ...], padding: float, rng: np.random.Generator) -> np.ndarray:
    """Return 0 or 1 for each position; 0 more often from example to example."""
    last = max(shape[0] - 1, 1)
    rows = np.arange(shape[0])[:, None] / last  # from 0 to 1: [example, 1]
    kept = rng.random(shape) >= padding * 2 * rows
    return kept.astype(np.float32)
