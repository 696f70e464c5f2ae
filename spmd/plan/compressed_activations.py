"""Activations stored in fewer bits: exact in the forward pass, decoded codes in the backward pass.

No public remat policy gives the backward pass another value than the forward pass has. `store` is
an identity with a rule that does: where `jax.checkpoint` divides a layer into the forward part and
the recomputed part, only the codes are residuals, and the recomputed part reads the decoded array.
So it works for every consumer ([decision
0041](../../docs/decisions/0041-stored-activations-are-a-primitive.md)). The present
`jax.checkpoint` takes the rule from a primitive, and that of `jax_remat3` from an object of hijax.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, Var, jaxpr_as_fun, primitives
from jax.interpreters import ad, mlir, partial_eval

from spmd.codecs import Codec, Encoded
from spmd.errors import Problem
from spmd.jaxpr.equations import equations, inner_jaxprs, name_of, nested_jaxprs, params_of
from spmd.jaxpr.upgrades import HiPrim, checkpoints_are_hijax
from spmd.model_interface.remat import Remat

_BETWEEN = ("sharding_constraint", "convert_element_type")


@dataclasses.dataclass(frozen=True, eq=False)
class _Stored:
    """Parameters of the primitive.

    `save` is `x -> (x, *codes)`, or None if no block divides `size`, the last dimension on a
    device; `load` decodes the codes.
    """

    name: str
    codec: Codec
    size: int
    in_rule: bool = False
    save: ClosedJaxpr | None = None
    load: ClosedJaxpr | None = None


def store(
    x: jax.Array,
    name: str,
    codec: Codec,
    shard: tuple[int, ...],
    place: Callable[[jax.Array], jax.Array],
    *,
    on_host: bool,
    transposed: bool,
    in_rule: bool = False,
) -> jax.Array:
    """Return `x`; the backward pass of the `jax.checkpoint` around it has only codes.

    Args:
        x: The activation.
        name: The name of the activation; the memory ledger lists its codes and scales by this name,
            with their bits.
        codec: The codec.
        shard: The shape of `x` on one device: blocks do not cross shards.
        place: Constrains an array whose dimensions are split as those of `x` are.
        on_host: Whether codes are moved to host memory. Scales are not.
        transposed: Whether the device's products read the decoded array transposed, so that rows
            are not kept whole.
        in_rule: Whether this is the forward rule of a `jax.custom_vjp`.
    """
    size = shard[-1]
    block = codec.block_of(size)
    if not block:
        return _bind(x, _Stored(name, codec, size, in_rule))  # `store_problems` reports it
    rows = _rows_of_block(shard)
    decoded_rows = 0 if transposed else rows
    label = f"{name} ({codec.bits(block):g}-bit {codec.name})"

    def save(x: jax.Array) -> tuple[jax.Array, ...]:
        parts = []
        for part in codec.encode(x, block, rows):
            if part is not None:
                parts.append(checkpoint_name(place(part), label))
        codes, *scales = parts
        if on_host:
            codes = jax.device_put(codes, jax.memory.Space.Host)
        return x, codes, *scales

    def load(codes: jax.Array, scale: jax.Array | None = None) -> jax.Array:
        if on_host:
            codes = jax.device_put(codes, jax.memory.Space.Device)
        return place(codec.decode(Encoded(codes, scale), x.dtype, decoded_rows))

    saved = jax.make_jaxpr(save)(x)
    encoded = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in saved.out_avals[1:]]
    loaded = jax.make_jaxpr(load)(*encoded)
    return _bind(x, _Stored(name, codec, size, in_rule, saved, loaded))


def _rows_of_block(shard: tuple[int, ...]) -> int:
    """Return 8 if a shard has a multiple of 8 rows, else 1."""
    if len(shard) == 1 or shard[-2] % 8:
        return 1
    return 8


def _bind(x: jax.Array, how: _Stored) -> jax.Array:
    if checkpoints_are_hijax():
        return StoredActivation(jax.typeof(x), how)(x)
    return _stored.bind(x, how=how)


def _identity(x: Any, *, how: _Stored) -> Any:
    return x


def _jvp(primals: Any, tangents: Any, *, how: _Stored) -> Any:
    return _stored.bind(*primals, how=how), tangents[0]


def _partial_eval(
    saveable: Any, unknown: Sequence[bool], instantiated: Sequence[bool], equation: JaxprEqn
) -> tuple[JaxprEqn | None, JaxprEqn | None, Sequence[bool], Sequence[bool], list[Var]]:
    """Divide the equation: the known part returns `x` and codes, the staged part decodes them."""
    how = equation.params["how"]
    if unknown[0]:
        return None, equation, [True], [True], []
    is_saved = saveable(_stored, equation.invars[0].aval, how=how) is True
    if not is_saved:  # such as in a `while` loop
        staged_again = equation if instantiated[0] else None
        return equation, staged_again, [False], list(instantiated), []
    codes = [Var(aval) for aval in how.save.out_avals[1:]]
    call = functools.partial(equation.replace, primitive=primitives.closed_call_p)
    known = call(outvars=[*equation.outvars, *codes], params={"call_jaxpr": how.save})
    staged = call(invars=[*codes], params={"call_jaxpr": how.load})
    return known, staged, [False], [True], codes


_stored = Primitive("stored")
_stored.def_impl(_identity)
_stored.def_abstract_eval(_identity)
mlir.register_lowering(_stored, mlir.lower_fun(_identity, multiple_results=False))
ad.primitive_jvps[_stored] = _jvp
partial_eval.partial_eval_jaxpr_custom_rules[_stored] = _partial_eval


@jax.custom_jvp
def _valued(decoded: jax.Array, again: jax.Array) -> jax.Array:
    """Return the decoded array, with the tangent of the activation computed again.

    The activation itself is then not computed.
    """
    del again
    return decoded


@_valued.defjvp
def _valued_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    return primals[0], tangents[1]


class StoredActivation(HiPrim):
    """The primitive as an object of hijax, for `jax.checkpoint` under `jax_remat3`."""

    def __init__(self, aval: Any, how: _Stored) -> None:
        self.in_avals = (aval,)
        self.out_aval = aval
        self.params = {"how": how}
        super().__init__()

    def expand(self, x: Any) -> Any:
        """Return `x`."""
        return x

    def remat(self, trace: Any, x: Any) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
        """Return `x`, its codes, and their decoder."""
        how: _Stored = self.params["how"]
        is_saved = False
        if trace.policy is not None:
            is_saved = trace.policy(_stored, *self.in_avals, how=how) is True
        if not is_saved:
            return self(x), (), lambda _, again: again
        x, *codes = jaxpr_as_fun(how.save)(x)

        def decoded(codes: Any, again: Any) -> Any:
            (value,) = jaxpr_as_fun(how.load)(*codes)
            if how.in_rule:
                return value
            return _valued(value, again)

        return x, codes, decoded

    def jvp(self, primals: Any, tangents: Any) -> tuple[Any, Any]:
        """Return the activation and its tangent; the tangent is not stored."""
        return self(*primals), tangents[0]

    def lin(self, _: Any, x: Any) -> tuple[Any, None]:
        """Return the activation; its linear map needs nothing."""
        return self(x), None

    def linearized(self, _: Any, tangent: Any) -> Any:
        """Return the tangent."""
        return tangent

    def vjp_fwd(self, _: Any, x: Any) -> tuple[Any, None]:
        """Return the activation; its transpose needs nothing."""
        return self(x), None

    def vjp_bwd_retval(self, _: Any, cotangent: Any) -> tuple[Any]:
        """Return the cotangent."""
        return (cotangent,)


def store_problems(jaxpr: Any, remat: Remat) -> list[Problem]:
    """Check the stored activations of a traced layer: last dimensions and readers of masks."""
    found = dict[str, Problem]()
    for inner in nested_jaxprs(jaxpr):
        for equation in inner.eqns:
            if name_of(equation) != _stored.name:
                continue
            problem = _problem(equation, inner, remat)
            if problem:
                found[problem.where] = problem
    return list(found.values())


def _problem(equation: JaxprEqn, jaxpr: Jaxpr, remat: Remat) -> Problem | None:
    """Return the problem of a stored activation in its jaxpr, or None."""
    how = params_of(equation)["how"]
    where = f"remat store:{how.codec.name}={how.name}"
    if how.save is None:
        what = f"no block divides its last dimension, which has {how.size} elements on a device"
        return Problem(where, what, fix=f"a multiple of {how.codec.least}, or save:{how.name}")
    if how.codec.name != "mask":
        return None
    for reader in _readers(equation.outvars[0], jaxpr):
        if reader is None or not _is_relu(reader):
            name = name_of(reader) if reader else "another function"
            what = f"is read by {name}, not by a ReLU alone"
            fix = f"store:int8={how.name}"
            return Problem(where, what, "a mask has only the sign", fix)
        labels = _labels(reader.outvars[0], jaxpr)
        if any(label not in remat.names for label in labels):
            names = sorted({label for label in labels if label is not None})
            what = "the result of its ReLU is computed again, and a mask has only the sign"
            fix = f"also save:{','.join(names) or 'NAME'}, or store:int8={how.name}"
            return Problem(where, what, fix=fix)
    return None


def _labels(value: Var, jaxpr: Jaxpr) -> list[str | None]:
    """Return the checkpoint name of a value for each of its readers; None for another reader."""
    labels = list[str | None]()
    for reader in _readers(value, jaxpr):
        if reader is not None and name_of(reader) == "name":
            labels.append(params_of(reader)["name"])
        else:
            labels.append(None)
    return labels


def _readers(value: Var, jaxpr: Jaxpr) -> Iterator[JaxprEqn | None]:
    """Yield the readers of a value, through constraints; None for the end of the jaxpr."""
    for equation in jaxpr.eqns:
        if not _is_among(value, equation.invars):
            continue
        if name_of(equation) in _BETWEEN:
            yield from _readers(equation.outvars[0], jaxpr)
        else:
            yield equation
    if _is_among(value, jaxpr.outvars):
        yield None


def _is_among(value: Var, atoms: Sequence[Any]) -> bool:
    return any(atom is value for atom in atoms)


def _is_relu(equation: JaxprEqn) -> bool:
    """Return whether an equation is `jax.nn.relu`: its derivative reads only the operand's sign."""
    if name_of(equation) != "custom_jvp_call":
        return False
    inside = []
    for jaxpr in inner_jaxprs(equation):
        for inner in equations(jaxpr):
            if not inner_jaxprs(inner):
                inside.append(inner)
    if len(inside) != 1 or name_of(inside[0]) != "max":
        return False
    return getattr(inside[0].invars[1], "val", None) == 0
