"""Checks that an optimizer treats a stack of layers as it would treat the layers one by one.

`check_layerwise` traces the update on shapes alone. `assert_layerwise` runs the update both ways
and compares the numbers: it is slower and needs a device, but finds every difference in the case
that it runs.
"""

import dataclasses
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
from spmd.jaxpr.equations import called_jaxpr, inner_jaxprs, name_of
from spmd.jaxpr.interpret import interpret
from spmd.optim.extra_args import example_update
from spmd.sharding.layer_paths import (
    Stack,
    dims_of,
    insert_layer_numbers,
    read_stacked,
    stacked_text,
    without_dims,
)
from spmd.sharding.optimizer_state import followed_params, is_random_key

_FIX = (
    "wrap transforms of whole arrays in spmd.per_layer, and choose parameters by path "
    "instead of by rank"
)
# Where `per_layer` keeps the state of its transform.
_PER_LAYER = re.compile(r"(?:^|(?<=/))(rest|stacked/[^/]+)/")
_TOTALS = {"add", "and", "max", "min", "or"}
_LINEAR_ALGEBRA = {
    "cholesky",
    "eigh",
    "geqrf",
    "householder_product",
    "lu",
    "svd",
    "triangular_solve",
}


def check_layerwise(
    optimizer: optax.GradientTransformation, params: Any, stacked: Any = ("layers",)
) -> list[Problem]:
    """Return a problem for each stacked parameter with another update than separate layers have.

    The jaxpr of the update is searched for numbers computed over all layers of one stack, such as
    LAMB's norms; for another choice for a layer than for the stack (other state, a mean over other
    dimensions, a decay of other parameters); and for random numbers, which are drawn for the stack
    as a whole. A reshape that merges the layers with another dimension counts as a number over all
    layers. Scalars from several parameters, such as the global norm, are allowed. Other arithmetic
    that differs is not found: `assert_layerwise` finds it.

    Example:
        >>> params = {"layers": {"kernel": jnp.ones((3, 4, 4))}, "head": jnp.ones((4, 8))}
        >>> optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(1e-3))
        >>> print(*check_layerwise(optimizer, params))  # doctest: +ELLIPSIS
        layers/kernel: the optimizer takes a number over all layers of the stack
            3 layers are one array of the shape (3, 4, 4)
            fix: wrap transforms of whole arrays in spmd.per_layer, ...
    """
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    flat = tree.flatten(params)
    stacks = read_stacked(stacked)
    all_dims = {path: dims_of(path, stacks) for path in flat}
    if not any(all_dims.values()):
        return []
    of_stacks = trace_update(optimizer, params, all_dims)
    of_layers = _trace_first_layers(optimizer, params, stacks)

    problems = []
    for path, dims in all_dims.items():
        if not dims:
            continue
        first_layer = insert_layer_numbers(path, (0,) * len(dims), stacks)
        difference = _difference(of_stacks[path], of_layers.get(first_layer))
        if difference:
            shape = tuple(flat[path].shape)
            count = " × ".join(str(shape[dim]) for dim in dims)
            detail = f"{count} layers are one array of the shape {shape}"
            is_random = of_stacks[path].random
            problems.append(Problem(path, difference, detail, _fix(is_random, stacks)))
    return problems


def assert_layerwise(
    optimizer: optax.GradientTransformation,
    params: Any,
    stacked: Any = ("layers",),
    *,
    steps: int = 2,
    tolerance: float = 1e-5,
) -> None:
    """Assert equal updates of random parameters as stacks and as separate layers.

    `params` gives their shapes. `tolerance` is relative to the largest change of the layer's
    parameter.

    Example:
        >>> params = {"layers": {"kernel": jnp.ones((3, 4, 4))}, "head": jnp.ones((4, 8))}
        >>> assert_layerwise(optax.adamw(1e-3), params)
    """
    stacks = read_stacked(stacked)
    draws = []
    separate_draws = []
    for seed in range(steps + 1):
        draw = _draw(params, seed, stacks)
        draws.append(draw)
        separate_draws.append(_separate(draw, stacks))
    of_stacks = _movement(optimizer, draws)
    of_layers = _movement(optimizer, separate_draws)
    changes = tree.flatten(_separate(of_stacks, stacks))
    references = tree.flatten(of_layers)
    lines = []
    for path, change in changes.items():
        reference = references[path]
        scale = np.abs(reference).max(initial=0.0) or 1.0
        error = float(np.abs(change - reference).max(initial=0.0) / scale)
        if not error <= tolerance:  # or NaN
            lines.append(f"  {path}: differs by {error:.1e}, allowed {tolerance:.0e}")
    if lines:
        title = "The optimizer treats a stack in another way than its layers:"
        raise AssertionError("\n".join([title, *lines, f"  fix: {_FIX}"]))


@dataclasses.dataclass(frozen=True)
class Traced:
    """Dependencies of the update of one parameter."""

    mixed: bool  # by a number over all layers of its stack
    random: bool
    reads: frozenset[str]  # of its own "gradient" and "parameter"
    others: frozenset[str]  # other parameters
    # dimensions counted from the last, without stacked ones
    reduced: frozenset[tuple[str, tuple[int, ...]]]
    # arrays by name and shape without stacked dimensions
    state: Counter[tuple[str, tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class _Seen:
    """Dependencies of a value."""

    # of the update: kind, and path of the parameter
    inputs: frozenset[tuple[str, str]] = frozenset()
    mixed: frozenset[str] = frozenset()  # stacks
    reduced: frozenset[tuple[str, tuple[int, ...]]] = frozenset()
    is_total: bool = False  # a scalar of several parameters, whose inputs are dropped

    @property
    def params(self) -> set[str]:
        return {path for _, path in self.inputs if path}


@dataclasses.dataclass(frozen=True)
class _Tracer:
    """Propagation of dependencies through a jaxpr."""

    lengths: Mapping[str, tuple[int, ...]]
    """Stacked parameter → the sizes of its stacked dimensions. No other dimension has them."""
    total: int
    """The number of parameters from which on a scalar counts as one of the whole gradient."""

    def run(self, jaxpr: Jaxpr, inputs: Sequence[_Seen]) -> list[_Seen]:
        return interpret(jaxpr, inputs, self.equation, _Seen())

    def equation(self, equation: Any, inputs: list[_Seen]) -> list[_Seen]:
        if name_of(equation) == "cond":
            return self.branches(inner_jaxprs(equation), inputs)
        called = called_jaxpr(equation)
        if called is not None:
            return self.run(called, inputs)
        outputs = []
        for out in equation.outvars:
            outputs.append(self.output(equation, inputs, tuple(out.aval.shape)))
        return outputs

    def branches(self, jaxprs: Sequence[Jaxpr], inputs: list[_Seen]) -> list[_Seen]:
        """Return the dependencies of the outputs of a `cond`, on its index and in any branch."""
        index, *operands = inputs
        branches = [self.run(jaxpr, operands) for jaxpr in jaxprs]
        outputs = []
        for choices in zip(*branches, strict=True):
            outputs.append(_union((index, *choices)))
        return outputs

    def output(self, equation: Any, inputs: list[_Seen], shape: tuple[int, ...]) -> _Seen:
        seen = _union(inputs)
        if shape == () and self.makes_total(equation, inputs, seen):
            of_no_param = frozenset(item for item in seen.inputs if not item[1])
            return _Seen(of_no_param, is_total=True)
        mixed = set(seen.mixed)
        reduced = set(seen.reduced)
        is_reduction = equation.primitive.name.startswith("reduce_")
        for operand, dependencies in zip(equation.invars, inputs, strict=True):
            mixed |= self.mixed_stacks(equation, operand, dependencies, shape)
            if is_reduction:
                reduced.add(self.reduction(equation, operand, dependencies))
        return _Seen(seen.inputs, frozenset(mixed), frozenset(reduced))

    def makes_total(self, equation: Any, inputs: list[_Seen], seen: _Seen) -> bool:
        """Return whether a scalar is computed from several parameters."""
        if len(seen.params) >= self.total:
            return True
        if equation.primitive.name not in _TOTALS:
            return False
        return any(part.is_total for part in inputs)

    def mixed_stacks(
        self, equation: Any, operand: Any, dependencies: _Seen, shape: tuple[int, ...]
    ) -> set[str]:
        """Return the stacks of an operand with layers mixed by an operation."""
        before = _shape(operand)
        mixed = set()
        for path in dependencies.params & self.lengths.keys():
            crossed = {before[dim] for dim in _crossed(equation, operand, len(before))}
            for length in self.lengths[path]:
                is_lost = length in before and length not in shape
                if is_lost or length in crossed:
                    mixed.add(path)
        return mixed

    def reduction(
        self, equation: Any, operand: Any, dependencies: _Seen
    ) -> tuple[str, tuple[int, ...]]:
        """Return the name of a reduction, and its dimensions in a layer, counted from the last."""
        stacked_sizes = set[int]()
        for path in dependencies.params:
            stacked_sizes.update(self.lengths.get(path, ()))
        layer_dims = []
        for dim, size in enumerate(_shape(operand)):
            if size not in stacked_sizes:
                layer_dims.append(dim)
        dims = []
        for axis in equation.params.get("axes", ()):
            if axis in layer_dims:
                dims.append(layer_dims.index(axis) - len(layer_dims))
        return equation.primitive.name, tuple(dims)


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def trace_update(
    optimizer: optax.GradientTransformation,
    params: Any,
    dims: Mapping[str, Sequence[int]],
    *,
    totals: bool = True,
) -> dict[str, Traced]:
    """Return the dependencies of each parameter's update, from its jaxpr on abstract values.

    `dims` are the dimensions of each parameter for which `Traced.mixed` is computed. With `totals`,
    scalars of several parameters, such as a global norm, are ignored.
    """
    own_dims = {path: tuple(dims.get(path, ())) for path in tree.flatten(params)}
    params = _with_rare_lengths(params, own_dims)
    paths = list(own_dims)
    lengths = _stacked_lengths(params, dims)
    state = jax.eval_shape(optimizer.init, params)
    followed = followed_params(state, own_dims)
    state_leaves = tree.flatten(state)

    inputs = [_Seen(frozenset({("gradient", path)})) for path in paths]
    for path, leaf in state_leaves.items():
        inputs.append(_seen_state(leaf, followed.get(path, ""), lengths))
    for path in paths:
        inputs.append(_Seen(frozenset({("parameter", path)})))
    states = _state_shapes(state_leaves, followed, dims, lengths)

    def update(gradients: Any, state: Any, params: Any) -> Any:
        return example_update(optimizer, gradients, state, params)[0]

    closed = jax.make_jaxpr(update)(params, state, params)
    total = len(paths) + 1  # no scalar has so many
    if totals:
        total = min(2, len(paths))
    outputs = _Tracer(lengths, total).run(closed.jaxpr, inputs)

    traced = {}
    for param, output in zip(paths, outputs, strict=True):
        own_kinds = {kind for kind, path in output.inputs if path == param}
        traced[param] = Traced(
            mixed=param in output.mixed,
            random=("random", "") in output.inputs,
            reads=frozenset(own_kinds - {"state"}),
            others=frozenset(output.params - {param}),
            reduced=output.reduced,
            state=states.get(param, Counter()),
        )
    return traced


def _stacked_lengths(params: Any, dims: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return the table from a stacked parameter to the sizes of its stacked dimensions."""
    flat = tree.flatten(params)
    lengths = {}
    for path, own in dims.items():
        if own:
            shape = flat[path].shape
            lengths[path] = tuple(shape[dim] for dim in own)
    return lengths


def _state_shapes(
    leaves: Mapping[str, Any],
    followed: Mapping[str, str],
    dims: Mapping[str, Sequence[int]],
    lengths: Mapping[str, tuple[int, ...]],
) -> dict[str, Counter[tuple[str, tuple[int, ...]]]]:
    """Return parameter → the names and layer shapes of its arrays of the state."""
    states = dict[str, Counter[tuple[str, tuple[int, ...]]]]()
    for path, param in followed.items():
        name = _PER_LAYER.sub("", path.rpartition(param)[0])
        shape = leaves[path].shape
        layer = _layer_shape(shape, dims.get(param, ()), lengths.get(param, ()))
        states.setdefault(param, Counter())[name, layer] += 1
    return states


def _seen_state(leaf: Any, param: str, lengths: Mapping[str, tuple[int, ...]]) -> _Seen:
    """Return the dependencies of an array of a parameter's optimizer state."""
    if is_random_key(leaf):
        return _Seen(frozenset({("random", "")}))
    inputs = frozenset({("state", param)})
    if param in lengths and leaf.size > 1 and not set(lengths[param]) <= set(leaf.shape):
        return _Seen(inputs, frozenset({param}))  # one array for all layers
    return _Seen(inputs)


def _layer_shape(
    shape: tuple[int, ...], dims: Sequence[int], lengths: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the shape of an array of the state without stacked dimensions."""
    in_front = range(len(lengths))  # where `per_layer` has them
    for stacked in (dims, in_front):
        sizes = tuple(shape[dim] for dim in stacked if dim < len(shape))
        if sizes == lengths:
            return without_dims(shape, stacked)
    return tuple(size for size in shape if size not in lengths)


def _union(parts: Iterable[_Seen]) -> _Seen:
    """Return the dependencies of a value computed from others: their union."""
    inputs = set[tuple[str, str]]()
    mixed = set[str]()
    reduced = set[tuple[str, tuple[int, ...]]]()
    for part in parts:
        inputs |= part.inputs
        mixed |= part.mixed
        reduced |= part.reduced
    return _Seen(frozenset(inputs), frozenset(mixed), frozenset(reduced))


def _crossed(equation: Any, atom: Any, rank: int) -> Sequence[int]:
    """Return the dimensions of an operand mixed by an operation without a change of size."""
    name = equation.primitive.name
    params = equation.params
    if name == "dot_general":
        contracted = zip(equation.invars, params["dimension_numbers"][0], strict=True)
        dims = []
        for operand, own in contracted:
            if operand is atom:  # both are, in x @ x
                dims += own
        return dims
    if name in _LINEAR_ALGEBRA:
        return range(max(rank - 2, 0), rank)
    if name == "sort":
        return [params["dimension"]]
    if name.startswith("cum"):
        return [params["axis"]]
    return []


def _with_rare_lengths(params: Any, dims: Mapping[str, tuple[int, ...]]) -> Any:
    """Change the sizes of stacked dimensions to near sizes of no other dimension."""
    rare = _rare_lengths(params, dims)

    def lengthen(path: str, leaf: Any) -> jax.ShapeDtypeStruct:
        shape = list(leaf.shape)
        for depth, dim in enumerate(dims[path]):
            shape[dim] = rare[shape[dim], depth]
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    return tree.map_with_path(lengthen, params)


def _rare_lengths(params: Any, dims: Mapping[str, tuple[int, ...]]) -> dict[tuple[int, int], int]:
    """Return (size, depth of its stack) → a near size, used once."""
    taken = set[int]()
    lengths = set[tuple[int, int]]()
    for path, leaf in tree.flatten(params).items():
        taken.update(without_dims(leaf.shape, dims[path]))
        for depth, dim in enumerate(dims[path]):
            lengths.add((leaf.shape[dim], depth))
    rare: dict[tuple[int, int], int] = {}
    for length, depth in sorted(lengths):
        size = max(length, 2)
        while size in taken:
            size += 1
        rare[length, depth] = size
        taken.add(size)
    return rare


def _separate(params: Any, stacks: Mapping[str, Stack], *, first_only: bool = False) -> Any:
    """Return the parameters with every layer, or only the first of each stack, unrolled.

    With `first_only` the layers are abstract.
    """
    separate: dict[str, Any] = {}
    for path, leaf in tree.flatten(params).items():
        dims = dims_of(path, stacks)
        if first_only:
            shape = without_dims(leaf.shape, dims)
            first = insert_layer_numbers(path, (0,) * len(dims), stacks)
            separate[first] = jax.ShapeDtypeStruct(shape, leaf.dtype)
            continue
        layers = np.moveaxis(leaf, dims, range(len(dims)))  # [*stacked, *layer]
        for numbers in np.ndindex(*layers.shape[: len(dims)]):
            separate[insert_layer_numbers(path, numbers, stacks)] = layers[numbers]
    return tree.nested(separate)


def _draw(params: Any, seed: int, stacks: Mapping[str, Stack]) -> Any:
    """Draw random arrays like the parameters.

    Each layer has four times the scale of the one before.
    """
    rng = np.random.default_rng(seed)

    def draw(path: str, leaf: Any) -> np.ndarray:
        dims = dims_of(path, stacks)
        stacked_dims = range(len(dims))
        lengths = [leaf.shape[dim] for dim in dims]
        layers = np.arange(math.prod(lengths))
        layers = layers.reshape(*lengths, *(1,) * (leaf.ndim - len(dims)))  # [*stacked, 1, …]
        scales = np.moveaxis(4.0**layers, stacked_dims, dims)
        normal = rng.normal(size=leaf.shape)
        return (normal * scales).astype(np.float32)

    return tree.map_with_path(draw, params)


def _movement(optimizer: optax.GradientTransformation, draws: Sequence[Any]) -> Any:
    """Return the sum of the updates of the first draw, with the others as gradients."""

    @jax.jit
    def step(moved: Any, state: Any, gradients: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            params = optax.apply_updates(draws[0], moved)
            updates, state = example_update(optimizer, gradients, state, params)
            return jax.tree.map(jnp.add, moved, updates), state

    moved = jax.tree.map(np.zeros_like, draws[0])
    state = jax.jit(optimizer.init)(draws[0])
    for gradients in draws[1:]:
        moved, state = step(moved, state, gradients)
    return jax.tree.map(np.asarray, moved)


def _trace_first_layers(
    optimizer: optax.GradientTransformation, params: Any, stacks: Mapping[str, Stack]
) -> dict[str, Traced]:
    """Trace the update of one unrolled layer of each stack; empty if the optimizer refuses them."""
    first_layers = _separate(params, stacks, first_only=True)
    try:
        return trace_update(optimizer, first_layers, {})
    except (AttributeError, KeyError, TypeError, ValueError):
        # It only accepts its own tree, as a mask does.
        return {}


def _difference(stack: Traced, layer: Traced | None) -> str:
    """Describe the difference between the updates of a stack and of a layer; empty for none."""
    if stack.random:
        return "the optimizer draws random numbers for the stack as a whole"
    if stack.mixed:
        return "the optimizer takes a number over all layers of the stack"
    if layer is None:
        return ""
    if stack.state != layer.state:
        return "the optimizer keeps another state for the stack than for its layers"
    if stack.reduced != layer.reduced:
        return "the optimizer reduces other dimensions of the stack than of its layers"
    if stack.reads != layer.reads:
        ours = _words(stack.reads)
        theirs = _words(layer.reads)
        return f"the update of the stack reads {ours}, and that of a layer {theirs}"
    return ""


def _fix(is_random: bool, stacks: Mapping[str, Stack]) -> str:
    """Return the fix of an optimizer with another update of a stack."""
    fix = _FIX
    if is_random:
        fix = "mask it to parameters that are not stacked"
    default_dims = dict.fromkeys(read_stacked(None), 0)
    dims = {name: stack.dim for name, stack in stacks.items()}
    if dims != default_dims:
        call = f"spmd.per_layer(…, {stacked_text(stacks)})"
        fix += f", which needs the stacks: {call}; make_optimizer(…, model=)"
    return fix


def _words(reads: frozenset[str]) -> str:
    words = " and ".join(f"its {kind}" for kind in sorted(reads))
    return words or "nothing of its own"
