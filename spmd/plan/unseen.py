"""Saved activations of a remat policy invisible to `jax.checkpoint` under the flag `jax_remat3`.

Under this flag, a layer is divided while it is traced, and custom derivatives are opaque: JAX
silently recomputes their contents, whatever the policy. With `jax_custom_vjp3` too, JAX 0.12 sees
the checkpoint names in the forward rule of a `jax.custom_vjp`, one level deep; the policy `dots`
still saves its products and computes them again.
"""

from collections.abc import Collection, Iterator
from typing import Any

import jax
from jax.extend.core import JaxprEqn, primitives

from spmd.errors import Problem
from spmd.jaxpr.equations import (
    has_own_rules,
    is_hijax,
    name_of,
    nested_equations,
    params_of,
)
from spmd.jaxpr.upgrades import IS_FIRST_FORM
from spmd.model_interface.remat import Remat

_WHERE = "in a custom derivative, where jax.checkpoint sees nothing under jax_remat3"


def unseen_problems(jaxpr: Any, remat: Remat, also: Collection[str] = ()) -> list[Problem]:
    """Return a problem for each saved activation of a traced layer recomputed by JAX nevertheless.

    Args:
        also: Names of other activations that the backward pass must not recompute.
    """
    where = f"remat {remat}"
    version = f"JAX {jax.__version__}"
    problems = list[Problem]()
    for name in sorted(_unseen_names(jaxpr) & {*remat.names, *also}):
        fix = "set jax_custom_vjp3 too, in JAX 0.12 or later, or turn jax_remat3 off"
        problems.append(Problem(where, f"{name!r} is marked {_WHERE}", version, fix))
    if remat.kind == "dots" and _has_products_in_rules(jaxpr):
        fix = "turn jax_remat3 off, or full"
        problems.append(Problem(where, f"has products {_WHERE}", version, fix))
    if IS_FIRST_FORM and _has_regions(jaxpr):
        what = "has a shard_map, which this JAX cannot divide under jax_remat3"
        problems.append(Problem(where, what, version, "turn jax_remat3 off, or JAX 0.12"))
    return problems


def _unseen_names(jaxpr: Any) -> set[str]:
    names = set()
    for equation in _unseen(jaxpr):
        if name_of(equation) == "name":
            names.add(params_of(equation)["name"])
    return names


def _has_products_in_rules(jaxpr: Any) -> bool:
    """Return whether a custom derivative has a matmul."""
    for equation, *around in nested_equations(jaxpr):
        if name_of(equation) == "dot_general" and any(map(has_own_rules, around)):
            return True
    return False


def _has_regions(jaxpr: Any) -> bool:
    """Return whether a `shard_map` is outside of all custom derivatives."""
    outside_rules = nested_equations(jaxpr, enters=_has_no_rules)
    return any(name_of(equation) == "shard_map" for equation, *_ in outside_rules)


def _has_no_rules(equation: JaxprEqn) -> bool:
    return not has_own_rules(equation)


def _unseen(jaxpr: Any) -> Iterator[JaxprEqn]:
    """Yield the equations invisible to `jax.checkpoint`.

    They are those in a custom derivative inside of another, or in one that is opaque.
    """
    for equation, *around in nested_equations(jaxpr):
        rules = list(filter(has_own_rules, around))
        if len(rules) > 1 or (rules and not _is_seen_through(rules[0])):
            yield equation


def _is_seen_through(equation: JaxprEqn) -> bool:
    is_custom_vjp = name_of(equation) == primitives.custom_vjp_call_p.name
    return is_custom_vjp and is_hijax(equation) and not IS_FIRST_FORM
