"""What a remat policy asks for and `jax.checkpoint` does not see, under the upgrade flag `jax_remat3`.

There a layer is divided while it is traced. Custom derivatives then are opaque: JAX computes again what is inside
them, whatever the policy says, and tells nobody. With `jax_custom_vjp3` too, JAX 0.12 sees the checkpoint names in the
forward rule of a `jax.custom_vjp`, one level deep; the policy `dots` still saves its products and computes them again.
"""

from collections.abc import Collection, Iterator
from typing import Any

import jax
from jax.extend.core import JaxprEqn, primitives

from spmd.errors import Problem
from spmd.jaxpr.equations import equations, has_own_rules, inner_jaxprs, is_hijax, name_of, open_jaxpr, params_of
from spmd.jaxpr.upgrades import IS_FIRST_FORM
from spmd.model_api.remat import Remat

_WHERE = "in a custom derivative, where jax.checkpoint sees nothing under jax_remat3"


def unseen_problems(jaxpr: Any, remat: Remat, also: Collection[str] = ()) -> list[Problem]:
    """Return a problem for each activation of the policy, or of `also`, that JAX computes again in a traced layer."""
    version, problems = f"JAX {jax.__version__}", list[Problem]()
    unseen = {params_of(equation)["name"] for equation in _unseen(jaxpr) if name_of(equation) == "name"}
    for name in sorted(unseen & {*remat.names, *also}):
        fix = "set jax_custom_vjp3 too, in JAX 0.12 or later, or turn jax_remat3 off"
        problems.append(Problem(f"remat {remat}", f"{name!r} is marked {_WHERE}", version, fix))
    rules = [inner for equation in equations(jaxpr) if has_own_rules(equation) for inner in inner_jaxprs(equation)]
    has_products = any(name_of(equation) == "dot_general" for inner in rules for equation in equations(inner))
    if remat.kind == "dots" and has_products:
        problems.append(Problem(f"remat {remat}", f"has products {_WHERE}", version, "turn jax_remat3 off, or full"))
    if IS_FIRST_FORM and any(name_of(equation) == "shard_map" for equation in _outside_rules(jaxpr)):
        what, fix = "has a shard_map, which this JAX cannot divide under jax_remat3", "turn jax_remat3 off, or JAX 0.12"
        problems.append(Problem(f"remat {remat}", what, version, fix))
    return problems


def _unseen(jaxpr: Any, *, in_rule: bool = False, is_hidden: bool = False) -> Iterator[JaxprEqn]:
    """Yield the equations that `jax.checkpoint` does not see."""
    for equation in open_jaxpr(jaxpr).eqns:
        if is_hidden:
            yield equation
        is_rule = has_own_rules(equation)
        hides = is_rule and (in_rule or not _is_seen_through(equation))
        for inner in inner_jaxprs(equation):
            yield from _unseen(inner, in_rule=in_rule or is_rule, is_hidden=is_hidden or hides)


def _outside_rules(jaxpr: Any) -> Iterator[JaxprEqn]:
    """Yield the equations that are in no custom derivative."""
    for equation in open_jaxpr(jaxpr).eqns:
        yield equation
        for inner in [] if has_own_rules(equation) else inner_jaxprs(equation):
            yield from _outside_rules(inner)


def _is_seen_through(equation: JaxprEqn) -> bool:
    is_custom_vjp = name_of(equation) == primitives.custom_vjp_call_p.name
    return is_custom_vjp and is_hijax(equation) and not IS_FIRST_FORM
