"""The framework's side of `benchmarks/step.py`: the same Llama step as `bare_jax.py`, sharded by rules."""

import argparse
from typing import Any


def make(args: argparse.Namespace) -> Any:
    """Build the step that `benchmarks.bare_jax.make` builds by hand, with `spmd`.

    Args:
        args: The options of `benchmarks/step.py`; `args.mesh` maps each axis to its size.

    Returns:
        A `benchmarks.step.Side`: `params`, `compile_s`, `compiled` and `run(batch) -> loss`.
    """
    raise NotImplementedError("the spmd side of the benchmark")
