"""Random host batches whose padding is uneven over the examples."""

import numpy as np


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
