"""Checks that an optimizer treats a stack of layers as it would treat the layers one by one.

`check_layerwise` traces the update on shapes alone. `assert_layerwise` runs the update both ways and compares the
numbers: it is slower and needs a device, but finds every difference in the case that it runs.
"""

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Jaxpr

from spmd import tree
from spmd.errors import Problem
from spmd.jaxpr.equations import inner_jaxprs, name_of
from spmd.optim.extra_args import example_update
from spmd.sharding.layer_paths import Stack, dims_of, insert_layer_numbers, read_stacked, stacked_text, without_dims
from spmd.sharding.optimizer_state import followed_params, is_random_key

_FIX = "wrap transforms of whole arrays in spmd.per_layer, and choose parameters by path instead of by rank"
_PER_LAYER = re.compile(r"(?:^|(?<=/))(rest|stacked/[^/]+)/")  # where `per_layer` keeps the state of its transform
_TOTALS = {"add", "and", "max", "min", "or"}
_LINEAR_ALGEBRA = {"cholesky", "eigh", "geqrf", "householder_product", "lu", "svd", "triangular_solve"}


def check_layerwise(optimizer: optax.GradientTransformation, params: Any, stacked: Any = ("layers",)) -> list[Problem]:
    """Return a problem for each stacked parameter that the optimizer treats in another way than separate layers.

    The jaxpr of the update is searched for numbers computed over all layers of one stack, such as LAMB's norms; for
    another choice for a layer than for the stack (other state, a mean over other dimensions, a decay of other
    parameters); and for random numbers, which are drawn for the stack as a whole. A reshape that merges the layers with
    another dimension counts as a number over all layers. Scalars from several parameters, such as the global norm, are
    allowed. Other arithmetic that differs is not found: `assert_layerwise` finds it.

    Example:
        >>> params = {"layers": {"kernel": jnp.ones((3, 4, 4))}, "head": jnp.ones((4, 8))}
        >>> print(*check_layerwise(optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(1e-3)), params))
        layers/kernel: the optimizer takes a number over all layers of the stack
            3 layers are one array of the shape (3, 4, 4)
            fix: wrap transforms of whole arrays in spmd.per_layer, and choose parameters by path instead of by rank
    """
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    flat, stacks = tree.flatten(params), read_stacked(stacked)
    all_dims = {path: dims_of(path, stacks) for path in flat}
    if not any(all_dims.values()):
        return []
    whole = trace_update(optimizer, params, all_dims)
    try:
        separate = trace_update(optimizer, _separate(params, stacks, first_only=True), {})
    except (AttributeError, KeyError, TypeError, ValueError):  # it only accepts its own tree, as a mask does
        separate = None

    problems = []
    for path, dims in all_dims.items():
        if not dims:
            continue
        ours, theirs = whole[path], separate and separate[insert_layer_numbers(path, (0,) * len(dims), stacks)]
        shape = tuple(flat[path].shape)
        what = ""
        if ours.random:
            what = "the optimizer draws random numbers for the stack as a whole"
        elif ours.mixed:
            what = "the optimizer takes a number over all layers of the stack"
        elif theirs and ours.state != theirs.state:
            what = "the optimizer keeps another state for the stack than for its layers"
        elif theirs and ours.reduced != theirs.reduced:
            what = "the optimizer reduces other dimensions of the stack than of its layers"
        elif theirs and ours.reads != theirs.reads:
            what = f"the update of the stack reads {_words(ours.reads)}, and that of a layer {_words(theirs.reads)}"
        if what:
            count = " × ".join(str(shape[dim]) for dim in dims)
            fix = "mask it to parameters that are not stacked" if ours.random else _FIX
            if {name: stack.dim for name, stack in stacks.items()} != {name: 0 for name in read_stacked(None)}:
                fix += f", which needs the stacks: spmd.per_layer(…, {stacked_text(stacks)}); make_optimizer(…, model=)"
            problems.append(Problem(path, what, f"{count} layers are one array of the shape {shape}", fix))
    return problems


def assert_layerwise(
    optimizer: optax.GradientTransformation,
    params: Any,
    stacked: Any = ("layers",),
    *,
    steps: int = 2,
    tolerance: float = 1e-5,
) -> None:
    """Assert that random parameters are updated alike as stacks and as separate layers.

    `params` gives their shapes. `tolerance` is relative to the largest change of the layer's parameter.

    Example:
        >>> params = {"layers": {"kernel": jnp.ones((3, 4, 4))}, "head": jnp.ones((4, 8))}
        >>> assert_layerwise(optax.adamw(1e-3), params)
    """
    stacks = read_stacked(stacked)
    draws = [_draw(params, seed, stacks) for seed in range(steps + 1)]
    ours = _movement(optimizer, draws)
    theirs = _movement(optimizer, [_separate(draw, stacks) for draw in draws])
    wrong = []
    for path, change in tree.flatten(_separate(ours, stacks)).items():
        reference = tree.flatten(theirs)[path]
        scale = np.abs(reference).max(initial=0.0) or 1.0
        if not (error := float(np.abs(change - reference).max(initial=0.0) / scale)) <= tolerance:
            wrong.append(f"  {path}: differs by {error:.1e}, allowed {tolerance:.0e}")
    if wrong:
        title = "The optimizer treats a stack in another way than its layers:"
        raise AssertionError("\n".join([title, *wrong, f"  fix: {_FIX}"]))


@dataclasses.dataclass(frozen=True)
class Traced:
    """Dependencies of the update of one parameter."""

    mixed: bool  # by a number over all layers of its stack
    random: bool
    reads: frozenset[str]  # of its own "gradient" and "parameter"
    others: frozenset[str]  # other parameters
    reduced: frozenset[tuple[str, tuple[int, ...]]]  # dimensions counted from the last, without stacked ones
    state: Counter[tuple[str, tuple[int, ...]]]  # arrays by name and shape without stacked dimensions


@dataclasses.dataclass(frozen=True)
class _Seen:
    """Dependencies of a value."""

    inputs: frozenset[tuple[str, str]] = frozenset()  # of the update: kind, and path of the parameter
    mixed: frozenset[str] = frozenset()  # stacks
    reduced: frozenset[tuple[str, tuple[int, ...]]] = frozenset()
    is_total: bool = False  # a scalar of several parameters, whose inputs are dropped

    @property
    def params(self) -> set[str]:
        return {path for _, path in self.inputs if path}


@dataclasses.dataclass(frozen=True)
class _Tracer:
    """Propagation of dependencies through a jaxpr."""

    lengths: Mapping[str, tuple[int, ...]]  # stacked parameter → its stacked dimensions, which no other dimension has
    total: int  # the number of parameters from which on a scalar counts as one of the whole gradient

    def run(self, jaxpr: Jaxpr, inputs: Sequence[_Seen]) -> list[_Seen]:
        seen: dict[Any, _Seen] = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> _Seen:
            return _Seen() if hasattr(atom, "val") else seen.get(atom, _Seen())

        for equation in jaxpr.eqns:
            outputs = self.equation(equation, [read(atom) for atom in equation.invars])
            seen.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, equation: Any, inputs: list[_Seen]) -> list[_Seen]:
        name, inner = name_of(equation), inner_jaxprs(equation)
        if name == "cond":
            branches = [self.run(branch, inputs[1:]) for branch in inner]
            return [_union((inputs[0], *outputs)) for outputs in zip(*branches, strict=True)]
        called = inner[0] if len(inner) == 1 and name not in ("scan", "while") else None
        if called and (len(called.invars), len(called.outvars)) == (len(inputs), len(equation.outvars)):
            return self.run(called, inputs)
        return [self.output(equation, inputs, tuple(out.aval.shape)) for out in equation.outvars]

    def output(self, equation: Any, inputs: list[_Seen], shape: tuple[int, ...]) -> _Seen:
        seen = _union(inputs)
        mixed, reduced = set(seen.mixed), set(seen.reduced)
        for atom, part in zip(equation.invars, inputs, strict=True):
            before = tuple(getattr(atom.aval, "shape", ()))
            for path in part.params & self.lengths.keys():
                lengths = self.lengths[path]
                lost = any(n in before and n not in shape for n in lengths)
                if lost or any(before[i] in lengths for i in _crossed(equation, atom, len(before))):
                    mixed.add(path)
            if equation.primitive.name.startswith("reduce_"):
                layers = {n for path in part.params for n in self.lengths.get(path, ())}
                own = [axis for axis, size in enumerate(before) if size not in layers]
                axes = (axis for axis in equation.params.get("axes", ()) if axis in own)
                reduced.add((equation.primitive.name, tuple(own.index(axis) - len(own) for axis in axes)))
        grows = equation.primitive.name in _TOTALS and any(part.is_total for part in inputs)
        if shape == () and (grows or len(seen.params) >= self.total):
            return _Seen(frozenset(item for item in seen.inputs if not item[1]), is_total=True)
        return _Seen(seen.inputs, frozenset(mixed), frozenset(reduced))


def trace_update(
    optimizer: optax.GradientTransformation, params: Any, dims: Mapping[str, Sequence[int]], *, totals: bool = True
) -> dict[str, Traced]:
    """Return the dependencies of each parameter's update, from its jaxpr on abstract values.

    `dims` are the dimensions of each parameter for which `Traced.mixed` is computed. With `totals`,
    scalars of several parameters, such as a global norm, are ignored.
    """
    params = _with_rare_lengths(params, {path: tuple(dims.get(path, ())) for path in tree.flatten(params)})
    flat = {path: tuple(leaf.shape) for path, leaf in tree.flatten(params).items()}
    lengths = {path: tuple(flat[path][dim] for dim in own) for path, own in dims.items() if own}
    state = jax.eval_shape(optimizer.init, params)
    followed = followed_params(state, flat)
    leaves = tree.flatten(state)

    def seen(path: str, leaf: Any) -> _Seen:
        if is_random_key(leaf):
            return _Seen(frozenset({("random", "")}))
        param = followed.get(path, "")
        whole = param in lengths and not set(lengths[param]) <= set(leaf.shape)
        return _Seen(frozenset({("state", param)}), frozenset({param} if whole and leaf.size > 1 else ()))

    closed = jax.make_jaxpr(lambda g, s, p: example_update(optimizer, g, s, p)[0])(params, state, params)
    inputs = [_Seen(frozenset({("gradient", path)})) for path in flat]
    inputs += [seen(path, leaf) for path, leaf in leaves.items()]
    inputs += [_Seen(frozenset({("parameter", path)})) for path in flat]
    outputs = _Tracer(lengths, min(2, len(flat)) if totals else len(flat) + 1).run(closed.jaxpr, inputs)

    def inner(path: str, param: str) -> tuple[str, tuple[int, ...]]:
        name = _PER_LAYER.sub("", path.rpartition(param)[0])
        shape, layers = leaves[path].shape, lengths.get(param, ())
        for stacked in (dims.get(param, ()), range(len(layers))):  # `per_layer` has them in front
            if tuple(shape[dim] for dim in stacked if dim < len(shape)) == layers:
                return name, without_dims(shape, stacked)
        return name, tuple(size for size in shape if size not in layers)

    return {
        param: Traced(
            mixed=param in output.mixed,
            random=("random", "") in output.inputs,
            reads=frozenset(kind for kind, path in output.inputs if path == param and kind != "state"),
            others=frozenset(output.params - {param}),
            reduced=output.reduced,
            state=Counter(inner(path, param) for path, follows in followed.items() if follows == param),
        )
        for param, output in zip(flat, outputs, strict=True)
    }


def _union(parts: Iterable[_Seen]) -> _Seen:
    fields = zip(*((part.inputs, part.mixed, part.reduced) for part in (_Seen(), *parts)), strict=True)
    inputs, mixed, reduced = (frozenset[Any]().union(*field) for field in fields)
    return _Seen(inputs, mixed, reduced)


def _crossed(equation: Any, atom: Any, rank: int) -> Sequence[int]:
    """Return the dimensions of an operand along which an operation mixes elements without changing the size."""
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        left, right = params["dimension_numbers"][0]
        return [*(left if atom is equation.invars[0] else ()), *(right if atom is equation.invars[1] else ())]
    if name in _LINEAR_ALGEBRA:
        return range(max(rank - 2, 0), rank)
    if name == "sort":
        return [params["dimension"]]
    return [params["axis"]] if name.startswith("cum") else []


def _with_rare_lengths(params: Any, dims: Mapping[str, tuple[int, ...]]) -> Any:
    """Change the sizes of stacked dimensions to near ones that no other dimension has."""
    shapes = {path: tuple(leaf.shape) for path, leaf in tree.flatten(params).items()}
    taken = {size for path, shape in shapes.items() for size in without_dims(shape, dims[path])}
    rare: dict[tuple[int, int], int] = {}
    for length, i in sorted({(shapes[path][dim], i) for path, own in dims.items() for i, dim in enumerate(own)}):
        rare[length, i] = next(n for n in itertools.count(max(length, 2)) if n not in taken)
        taken.add(rare[length, i])

    def lengthen(path: str, leaf: Any) -> jax.ShapeDtypeStruct:
        own = dims[path]
        lengths = (rare[n, own.index(dim)] if dim in own else n for dim, n in enumerate(leaf.shape))
        return jax.ShapeDtypeStruct(tuple(lengths), leaf.dtype)

    return tree.map_with_path(lengthen, params)


def _separate(params: Any, stacks: Mapping[str, Stack], *, first_only: bool = False) -> Any:
    """Return the parameters with every layer, or only the first of each stack, unrolled."""
    out: dict[str, Any] = {}
    for path, leaf in tree.flatten(params).items():
        dims = dims_of(path, stacks)
        layer = jax.ShapeDtypeStruct(without_dims(leaf.shape, dims), leaf.dtype)
        rows = None if first_only else np.moveaxis(leaf, dims, range(len(dims)))
        for numbers in itertools.product(*(range(1 if first_only else leaf.shape[dim]) for dim in dims)):
            out[insert_layer_numbers(path, numbers, stacks)] = layer if rows is None else rows[numbers]
    return tree.nested(out)


def _draw(params: Any, seed: int, stacks: Mapping[str, Stack]) -> Any:
    """Draw random arrays like the parameters, each layer with four times the scale of the one before."""
    rng = np.random.default_rng(seed)

    def draw(path: str, leaf: Any) -> np.ndarray:
        dims = dims_of(path, stacks)
        lengths = [leaf.shape[dim] for dim in dims]
        layers = np.arange(math.prod(lengths)).reshape(*lengths, *(1,) * (leaf.ndim - len(dims)))
        scales = np.moveaxis(4.0**layers, range(len(dims)), dims)
        return (rng.normal(size=leaf.shape) * scales).astype(np.float32)

    return tree.map_with_path(draw, params)


def _movement(optimizer: optax.GradientTransformation, draws: Sequence[Any]) -> Any:
    """Return the sum of the updates of the first draw, with the others as gradients."""

    @jax.jit
    def step(moved: Any, state: Any, gradients: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            params = optax.apply_updates(draws[0], moved)
            updates, state = example_update(optimizer, gradients, state, params)
            return jax.tree.map(jnp.add, moved, updates), state

    moved, state = jax.tree.map(np.zeros_like, draws[0]), jax.jit(optimizer.init)(draws[0])
    for gradients in draws[1:]:
        moved, state = step(moved, state, gradients)
    return jax.tree.map(np.asarray, moved)


def _words(reads: frozenset[str]) -> str:
    return " and ".join(f"its {kind}" for kind in sorted(reads)) or "nothing of its own"
