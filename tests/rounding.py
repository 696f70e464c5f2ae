"""What float32 loses of a result: the unit in which a test says how far apart two orders of summation may be.

A fixed tolerance holds for one model on one processor, for another vector unit adds in another
order. But in whatever order it is taken, a sum in float32 is the exact sum of terms that were each
moved by a few units in the last place (Higham, Accuracy and Stability of Numerical Algorithms, 2nd
edition, sections 3.1 and 4.2). So two orders are about as far apart as a program is from itself
where every float that it is given moves to the next one. That is measured, by running the program
again: its movement tells how many terms are added, how they cancel, and what comes after.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd import tree

FACTOR = 16
"""How many times its noise a result may be away from that of another order.

No test here is further away than 3.2 times, whether XLA makes code for SSE4.2, AVX2 or AVX-512,
optimised or not; a deliberate bug is away by more than a thousand times.
"""

EPS = float(np.finfo(np.float32).eps)
"""One rounding of a float32, at most, relative to it: the distance from 1 to the next one."""


def moved(arguments: Any, seed: int) -> Any:
    """Moves every float32 but zeros to the next one, up or down at random; arrays stay where they are.

    Zeros stay zeros because they are exact: padding, a bias or an adapter before its first step.
    """
    rng = np.random.default_rng(seed)

    def move(x: Any) -> Any:
        if getattr(x, "dtype", None) != np.float32:
            return x
        near = np.asarray(x)
        towards = np.where(near == 0, 0, rng.choice([-np.inf, np.inf], near.shape)).astype(
            np.float32
        )
        near = np.nextafter(near, towards)
        if not isinstance(x, jax.Array):
            return near
        return jax.device_put(near, x.sharding) if x.committed else jnp.asarray(near)

    return jax.tree.map(move, arguments)


def noise_of(function: Callable[..., Any], *arguments: Any, seeds: int = 3) -> Any:
    """Measures what float32 loses of each leaf of `function(*arguments)`.

    Args:
        function: Any program of the numbers, compiled or in NumPy; a compiled one is not compiled
            again.
        arguments: Trees of arrays; those of float32 are moved, all others are kept. None may be
            donated.
        seeds: How many times they are moved.

    Returns:
        The tree of the result, with one number for each leaf: the largest movement of an element,
        and at least one rounding of the largest element.
    """
    still = function(*arguments)
    others = [function(*moved(arguments, seed)) for seed in range(seeds)]
    return jax.tree.map(
        lambda x, *near: max(EPS * _largest(x), *(_distance(x, y) for y in near)), still, *others
    )


def ratios(found: Any, expected: Any, noise: Any) -> dict[str, float]:
    """The largest difference of each leaf, by its path, in units of its noise."""
    ours, theirs, units = tree.flatten(found), tree.flatten(expected), tree.flatten(noise)
    assert ours.keys() == theirs.keys() == units.keys()
    return {path: _ratio(_distance(x, theirs[path]), units[path]) for path, x in ours.items()}


def assert_close(found: Any, expected: Any, noise: Any, factor: float = FACTOR) -> None:
    """Asserts that each leaf is as expected, up to `factor` times its noise.

    Args:
        found: A tree of arrays.
        expected: The tree that another order of summation gives.
        noise: What `noise_of` measured of either, leaf by leaf.
        factor: How many times the noise is allowed.

    Raises:
        AssertionError: A leaf is further away, or is not a number; the message lists every such
        leaf.
    """
    units = tree.flatten(noise)
    wrong = [
        f"  {path}: differs by {ratio * units[path]:.1e}, {ratio:.1f} times the noise of {units[path]:.1e}"
        for path, ratio in ratios(found, expected, noise).items()
        if not ratio <= factor
    ]
    assert not wrong, "\n".join([f"allowed are {factor} times the noise:", *wrong])


def _largest(x: Any) -> float:
    return float(np.abs(np.asarray(x, np.float64)).max(initial=0.0))


def _distance(x: Any, y: Any) -> float:
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    assert x.shape == y.shape, f"shapes {x.shape} and {y.shape}"
    return _largest(x - y)


def _ratio(distance: float, unit: float) -> float:
    return distance / unit if unit else np.inf * distance if distance else 0.0
