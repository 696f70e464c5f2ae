"""Placements are decided by the plan: while a step is traced, no pattern of the rule table is matched again."""

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd.models.mixtral import PRESETS
from spmd.partition_rules.llama import LLAMA
from spmd.partition_rules.mixtral import MIXTRAL
from spmd.plan.plan import make_plan
from spmd.sharding.mesh import MeshShape, abstract_mesh
from tests import tiny

PACKAGE = str(Path(spmd.__file__).parent)
BATCH = {
    name: jax.ShapeDtypeStruct((8, 16), dtype)
    for name, dtype in (("tokens", jnp.int32), ("targets", jnp.int32), ("weights", jnp.float32))
}


@contextlib.contextmanager
def matches() -> Iterator[list[str]]:
    """Collect the functions of the package that match a regular expression."""
    found: list[str] = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        called = event == "c_call" and isinstance(getattr(argument, "__self__", None), re.Pattern)
        if called and frame.f_code.co_filename.startswith(PACKAGE):
            found.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")

    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize(
    ("config", "rules", "zero"),
    [(tiny.CONFIG, LLAMA, 1), (PRESETS["test"], MIXTRAL, 3)],
    ids=["llama", "mixtral"],
)
def test_no_pattern_is_matched_while_a_step_is_traced(
    config: Any, rules: spmd.Rules, zero: int
) -> None:
    """The control: making the plan matches patterns."""
    model = spmd.from_nnx(config.build)
    with matches() as while_planned:
        plan = make_plan(
            abstract_mesh(MeshShape(fsdp=2, expert=1)), rules, model, tiny.OPTIMIZER, zero=zero
        )
    assert while_planned
    step = spmd.make_train_step(plan, spmd.next_token_loss(model))
    with matches() as while_traced:
        step.trace(BATCH)
    assert not while_traced
