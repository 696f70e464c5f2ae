"""Equations of a jaxpr and of the jaxprs inside them: their form, iteration and replacement.

This is the one place that finds the jaxprs inside an equation, so a loop, a call or a custom
derivative of a new form is walked by every reader at once. `spmd.jaxpr.interpret` computes with the
equations of a jaxpr in order, and `spmd.jaxpr.traced_program` inlines its calls.

JAX writes checkpoints, checkpoint names and custom derivatives in two forms: as primitives, and,
under its upgrade flags (`spmd.jaxpr.upgrades`), as objects applied by one primitive of hijax.
`name_of` and `params_of` give both in the first form; all code that reads jaxprs uses them. To
support another form, add an entry here.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, primitives
from jax.sharding import use_abstract_mesh

_CUSTOM = (primitives.custom_jvp_call_p.name, primitives.custom_vjp_call_p.name)

_HIJAX = "call_hi_primitive"
"""The primitive of hijax; it applies the object in its parameter `_prim`."""

_HIJAX_NAMES = {
    "CheckpointName": primitives.name_p.name,
    "CheckpointNameFwd": primitives.name_p.name,
    "RematTraced": primitives.remat_p.name,
    "CustomJVPTraced": primitives.custom_jvp_call_p.name,
    "CustomVJPTraced": primitives.custom_vjp_call_p.name,
    "StoredActivation": "stored",
}
"""Class of an object of hijax → the primitive of the same meaning.

Any other object is a call of its expansion.
"""


def name_of(equation: JaxprEqn) -> str:
    """Return the name of an equation's primitive, in its form without upgrade flags.

    Example:
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> (equation,) = jax.make_jaxpr(lambda x: checkpoint_name(x, "hidden"))(1.0).eqns
        >>> name_of(equation), params_of(equation)["name"]
        ('name', 'hidden')
    """
    applied = _applied(equation)
    if applied is None:
        return equation.primitive.name
    kind = type(applied).__name__
    return _HIJAX_NAMES.get(kind, kind)


def params_of(equation: JaxprEqn) -> Mapping[str, Any]:
    """Return an equation's parameters, in their form without upgrade flags.

    Only the parameters that this package reads have this form.
    """
    applied = _applied(equation)
    if applied is None:
        return equation.params
    if type(applied).__name__ not in _HIJAX_NAMES:
        return _expansion(equation, applied)
    if "traced" in applied.params:
        return {**applied.params, "call_jaxpr": applied.params["traced"].jaxpr}
    return applied.params


def is_hijax(equation: JaxprEqn) -> bool:
    """Return whether an equation has the form of an upgrade flag."""
    return equation.primitive.name == _HIJAX


def has_own_rules(equation: JaxprEqn) -> bool:
    """Return whether an equation has a derivative of its own.

    JAX does not differentiate the jaxpr inside it.
    """
    name = name_of(equation)
    if name in _CUSTOM:
        return True
    return is_hijax(equation) and name not in _HIJAX_NAMES.values()


def _applied(equation: JaxprEqn) -> Any:
    """Return the object applied by an equation of hijax; None for any other equation."""
    if not is_hijax(equation):
        return None
    return equation.params["_prim"]


def _expansion(equation: JaxprEqn, applied: Any) -> Mapping[str, Any]:
    """Return the jaxpr of an object of hijax as parameters; its own if an operand is no array."""
    for aval in applied.in_avals_flat:
        if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
            return applied.params
    with use_abstract_mesh(equation.ctx.cur_abstract_mesh):
        arrays = jax.tree.map(_array_of, applied.in_avals)
        return {"call_jaxpr": jax.make_jaxpr(applied.expand)(*arrays)}


def _array_of(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def open_jaxpr(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """Return the jaxpr itself, without the constants of a closed one."""
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr.jaxpr
    return jaxpr


def inner_jaxprs(equation: JaxprEqn) -> list[Jaxpr]:
    """Return the jaxprs among an equation's parameters: a loop's body, a condition's branches.

    Example:
        >>> import jax
        >>> call = jax.make_jaxpr(jax.jit(jax.numpy.sin))(1.0).eqns[0]
        >>> [[equation.primitive.name for equation in inner.eqns] for inner in inner_jaxprs(call)]
        [['sin']]
    """
    return list(_jaxprs(params_of(equation)))


def equations(jaxpr: Jaxpr | ClosedJaxpr, *, outside: str = "") -> Iterator[JaxprEqn]:
    """Yield every equation of a jaxpr, each followed by those of the jaxprs inside it.

    Args:
        outside: A name scope to skip, with all that is inside its equations.
    """

    def is_kept(equation: JaxprEqn) -> bool:
        return not outside or outside not in str(equation.source_info.name_stack).split("/")

    for equation, *_ in nested_equations(jaxpr, enters=is_kept):
        if is_kept(equation):
            yield equation


def nested_equations(
    jaxpr: Jaxpr | ClosedJaxpr,
    *,
    enters: Callable[[JaxprEqn], bool] | None = None,
    around: tuple[JaxprEqn, ...] = (),
) -> Iterator[tuple[JaxprEqn, ...]]:
    """Yield every equation of a jaxpr and inside it, with the equations around it, innermost first.

    Args:
        enters: Whether to walk the jaxprs inside an equation; None for all. The jaxpr of an object
            of hijax is traced only when it is entered.
        around: The equations around the jaxpr itself.

    Example:
        >>> jaxpr = jax.make_jaxpr(lambda x: -jax.jit(jax.numpy.sin)(x))(1.0)
        >>> for nested in nested_equations(jaxpr):
        ...     print(*map(name_of, nested))
        jit
        sin jit
        neg
    """
    for equation in open_jaxpr(jaxpr).eqns:
        nested = (equation, *around)
        yield nested
        if enters is None or enters(equation):
            for inner in inner_jaxprs(equation):
                yield from nested_equations(inner, enters=enters, around=nested)


def nested_jaxprs(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[Jaxpr]:
    """Yield a jaxpr, then those inside each of its equations."""
    yield open_jaxpr(jaxpr)
    for equation in open_jaxpr(jaxpr).eqns:
        for inner in inner_jaxprs(equation):
            yield from nested_jaxprs(inner)


def called_jaxpr(equation: JaxprEqn) -> Jaxpr | None:
    """Return the jaxpr called by an equation with its own operands and results; None without one.

    A loop and a condition have none: they take the results of other iterations or branches.
    """
    inner = inner_jaxprs(equation)
    if name_of(equation) in ("scan", "while") or len(inner) != 1:
        return None
    if not has_arity(inner[0], equation):
        return None
    return inner[0]


def has_arity(jaxpr: Jaxpr, equation: JaxprEqn) -> bool:
    """Return whether a jaxpr takes and returns as many values as an equation."""
    takes_as_many = len(jaxpr.invars) == len(equation.invars)
    return takes_as_many and len(jaxpr.outvars) == len(equation.outvars)


def stacked_operands(scan: JaxprEqn) -> list[bool]:
    """Return a flag for each operand of a `scan`: one value for each step; others are whole.

    A stack has one dimension more outside of the body than inside. JAX versions count operands
    differently, so their counts among the parameters are not read.
    """
    body: Any = open_jaxpr(scan.params["jaxpr"])
    return _are_stacked(scan.invars, body.invars)


def stacked_outputs(scan: JaxprEqn) -> list[bool]:
    """Return a flag for each output of a `scan`: one value for each step; others are carried."""
    body: Any = open_jaxpr(scan.params["jaxpr"])
    return _are_stacked(scan.outvars, body.outvars)


def _are_stacked(outside: Sequence[Any], inside: Sequence[Any]) -> list[bool]:
    """Return a flag for each value of a `scan`: more dimensions outside of its body than inside."""
    flags = []
    for outer, inner in zip(outside, inside, strict=True):
        flags.append(len(outer.aval.shape) > len(inner.aval.shape))
    return flags


def producers(jaxpr: Jaxpr) -> dict[Var, JaxprEqn]:
    """Return value → its equation, in a jaxpr. Inputs and literals have none."""
    made = dict[Var, JaxprEqn]()
    for equation in jaxpr.eqns:
        made |= dict.fromkeys(equation.outvars, equation)
    return made


def _jaxprs(value: Any) -> Iterator[Jaxpr]:
    if isinstance(value, Jaxpr | ClosedJaxpr):
        yield open_jaxpr(value)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _jaxprs(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _jaxprs(part)


def replace_equations(jaxpr: ClosedJaxpr, replacements: Mapping[int, ClosedJaxpr]) -> ClosedJaxpr:
    """Replace some equations of a jaxpr, here or in the jaxprs inside, by calls of other jaxprs.

    Args:
        replacements: `id` of an equation → the jaxpr to call with its operands, without constants.
    """
    if not replacements:
        return jaxpr
    return jaxpr.replace(jaxpr=_replaced(jaxpr.jaxpr, replacements))


def _replaced(jaxpr: Jaxpr, replacements: Mapping[int, ClosedJaxpr]) -> Jaxpr:
    replaced = []
    for equation in jaxpr.eqns:
        if id(equation) in replacements:
            params = {"call_jaxpr": replacements[id(equation)]}
            replaced.append(equation.replace(primitive=primitives.closed_call_p, params=params))
        elif _has_inside(equation, replacements):
            params = _replaced_params(equation.params, replacements)
            replaced.append(equation.replace(params=params))
        else:
            replaced.append(equation)
    return jaxpr.replace(eqns=replaced)


def _has_inside(equation: JaxprEqn, replacements: Mapping[int, ClosedJaxpr]) -> bool:
    """Return whether the jaxprs inside an equation have an equation to replace."""
    inside = itertools.chain.from_iterable(map(equations, inner_jaxprs(equation)))
    return any(id(inner) in replacements for inner in inside)


def _replaced_params(
    params: Mapping[str, Any], replacements: Mapping[int, ClosedJaxpr]
) -> dict[str, Any]:
    """Return the parameters of an equation with the jaxprs in them replaced."""
    return {name: _replaced_inside(value, replacements) for name, value in params.items()}


def _replaced_inside(value: Any, replacements: Mapping[int, ClosedJaxpr]) -> Any:
    """Return a parameter of an equation with the jaxprs in it replaced."""
    if isinstance(value, ClosedJaxpr):
        return replace_equations(value, replacements)
    if isinstance(value, Jaxpr):
        return _replaced(value, replacements)
    if isinstance(value, list | tuple):
        return type(value)(_replaced_inside(part, replacements) for part in value)
    if type(value).__name__ in _HIJAX_NAMES:
        return _replaced_in_hijax(value, replacements)
    return value


def _replaced_in_hijax(applied: Any, replacements: Mapping[int, ClosedJaxpr]) -> Any:
    """Return an object of hijax with the jaxprs among its parameters replaced.

    Its attributes are its parameters.
    """
    changed = copy.copy(applied)
    changed.params = _replaced_params(applied.params, replacements)
    vars(changed).update(changed.params)
    return changed
