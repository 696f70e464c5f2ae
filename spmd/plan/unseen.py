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
    equations,
    has_own_rules,
    inner_jaxprs,
    is_hijax,
    name_of,
    open_jaxpr,
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
    for rule in equations(jaxpr):
        if not has_own_rules(rule):
            continue
        for inner in inner_jaxprs(rule):
            if any(name_of(equation) == "dot_general" for equation in equations(inner)):
                return True
    return False


def _has_regions(jaxpr: Any) -> bool:
    return any(name_of(equation) == "shard_map" for equation in _outside_rules(jaxpr))


def _unseen(jaxpr: Any, *, in_rule: bool = False, is_hidden: bool = False) -> Iterator[JaxprEqn]:
    """Yield the equations invisible to `jax.checkpoint`."""
    for equation in open_jaxpr(jaxpr).eqns:
        if is_hidden:
            yield equation
        is_rule = has_own_rules(equation)
        hides = is_rule and (in_rule or not _is_seen_through(equation))
        for inner in inner_jaxprs(equation):
            yield from _unseen(inner, in_rule=in_rule or is_rule, is_hidden=is_hidden or hides)


def _outside_rules(jaxpr: Any) -> Iterator[JaxprEqn]:
    """Yield the equations outside of all custom derivatives."""
    for equation in open_jaxpr(jaxpr).eqns:
        yield equation
        if has_own_rules(equation):
            continue
        for inner in inner_jaxprs(equation):
            yield from _outside_rules(inner)


def _is_seen_through(equation: JaxprEqn) -> bool:
    is_custom_vjp = name_of(equation) == primitives.custom_vjp_call_p.name
    return is_custom_vjp and is_hijax(equation) and not IS_FIRST_FORM
