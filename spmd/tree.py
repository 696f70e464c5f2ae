"""Pytrees as tables from path to leaf, such as `"layers/attention/q_proj/kernel"` → leaf.

Leaves may be arrays, `jax.ShapeDtypeStruct`s or anything else.
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import traverse_util

from spmd.errors import Problem, describe_value

PyTree = Any


def path_of(key_path: tuple[Any, ...]) -> str:
    """Return a key path of JAX as text, `a/b/0/kernel`.

    Example:
        >>> path_of(jax.tree_util.tree_flatten_with_path({"a": [1]})[0][0][0])
        'a/0'
    """
    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def flatten(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Return the table from path to leaf, in the order of the tree.

    Example:
        >>> flatten({"b": {"x": 1}, "a": [2, 3]})
        {'a/0': 2, 'a/1': 3, 'b/x': 1}
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {path_of(key_path): leaf for key_path, leaf in leaves}


def check_like(tree: PyTree, wanted: PyTree, where: str) -> list[Problem]:
    """Return the differences of a tree from `wanted` in paths, shapes and dtypes.

    Example:
        >>> print(*check_like({"a": jax.ShapeDtypeStruct((2,), "int32")}, {}, "params"))
        params/a: is int32[2], and nothing is needed
    """
    found = _shown_leaves(tree)
    needed = _shown_leaves(wanted)
    problems = []
    for path in {**needed, **found}:
        here = found.get(path, "missing")
        there = needed.get(path, "nothing")
        if here != there:
            problems.append(Problem(f"{where}/{path}", f"is {here}, and {there} is needed"))
    return problems


def _shown_leaves(tree: PyTree) -> dict[str, str]:
    """Return path → the leaf in a few words."""
    return {path: describe_value(leaf) for path, leaf in flatten(tree).items()}


def map_with_path(
    f: Callable[..., Any], tree: PyTree, *rest: PyTree, is_leaf: Callable[[Any], bool] | None = None
) -> PyTree:
    """Map a function of path and leaf over a tree, as `jax.tree.map` does without paths.

    Example:
        >>> map_with_path(lambda path, x: f"{path}={x}", {"a": {"b": 1}})
        {'a': {'b': 'a/b=1'}}
    """

    def of_key_path(key_path: tuple[Any, ...], *leaves: Any) -> Any:
        return f(path_of(key_path), *leaves)

    return jax.tree_util.tree_map_with_path(of_key_path, tree, *rest, is_leaf=is_leaf)


def key_implementation(leaf: Any) -> Any:
    """Return the PRNG implementation of a random key, also an abstract one; None for others.

    Example:
        >>> key_implementation(jax.random.key(0, impl="threefry2x32"))
        'threefry2x32'
        >>> key_implementation(jax.numpy.ones(2)) is None
        True
    """
    if not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return None
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), leaf)
    return found[0]


def select(tree: Mapping[str, Any], keep: Callable[[str], bool]) -> dict[str, Any]:
    """Return the nested dictionary of the leaves with a path accepted by `keep`.

    It has no empty branches.

    Example:
        >>> select({"a": {"x": 1, "y": 2}, "b": {"x": 3}}, lambda path: path.endswith("y"))
        {'a': {'y': 2}}
    """
    out: dict[str, Any] = {}
    for key, child in tree.items():
        if not isinstance(child, Mapping):
            if keep(str(key)):
                out[key] = child
            continue
        inner = select(child, functools.partial(_keeps_below, keep, key))
        if inner:
            out[key] = inner
    return out


def _keeps_below(keep: Callable[[str], bool], key: str, path: str) -> bool:
    """Return whether `keep` passes a path below a key."""
    return keep(f"{key}/{path}")


def branch(tree: PyTree, path: str) -> PyTree:
    """Return the part of a tree of dictionaries and dataclasses below a path.

    Example:
        >>> branch({"a": {"b": {"x": 1}}}, "a/b")
        {'x': 1}
    """
    for name in path.split("/"):
        if isinstance(tree, Mapping):
            tree = tree[name]
        else:
            tree = getattr(tree, name)
    return tree


def merge(*trees: Mapping[Any, Any]) -> dict[Any, Any]:
    """Merge nested dictionaries with disjoint leaves: the inverse of `select`.

    Example:
        >>> merge({"a": {"x": 1}}, {"a": {"y": 2}, "b": 3})
        {'a': {'x': 1, 'y': 2}, 'b': 3}
    """
    out: dict[Any, Any] = {}
    for tree in trees:
        for key, child in tree.items():
            known = out.get(key)
            if isinstance(known, Mapping):
                child = merge(known, child)
            out[key] = child
    return out


def part_like(tree: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a nested dictionary at the paths of another.

    Example:
        >>> part_like({"a": {"x": 1, "y": 2}, "b": 3}, {"a": {"y": 0}})
        {'a': {'y': 2}}
    """
    out: dict[str, Any] = {}
    for key, child in like.items():
        out[key] = tree[key]
        if isinstance(child, Mapping):
            out[key] = part_like(tree[key], child)
    return out


def nested(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested dictionary of a table by path: the inverse of `flatten`, for string keys.

    Example:
        >>> nested({"a/x": 1, "a/y": 2, "b": 3})
        {'a': {'x': 1, 'y': 2}, 'b': 3}
    """
    return dict(traverse_util.unflatten_dict(table, sep="/"))


def below(path: str, tree: PyTree) -> PyTree:
    """Return the subtree at a path of nested dictionaries.

    Example:
        >>> below("a/b", {"a": {"b": {"x": 1}}})
        {'x': 1}
    """
    return functools.reduce(operator.getitem, path.split("/"), tree)


def at_path(path: str, tree: PyTree) -> dict[str, Any]:
    """Return nested dictionaries with the tree at a path: the inverse of `below`.

    Example:
        >>> at_path("a/b", {"x": 1})
        {'a': {'b': {'x': 1}}}
    """
    for name in reversed(path.split("/")):
        tree = {name: tree}
    return tree


def size(tree: PyTree) -> int:
    """Return the number of elements in all leaves.

    Example:
        >>> size({"a": jnp.ones((2, 3)), "b": jax.ShapeDtypeStruct((4,), "float32")})
        10
    """
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def with_noun(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun.

    Args:
        many: The plural, if it is not `one` with an s.

    Example:
        >>> with_noun(1, "row"), with_noun(2000, "row"), with_noun(2, "process", "processes")
        ('1 row', '2,000 rows', '2 processes')
    """
    if number == 1:
        return f"1 {one}"
    return f"{number:,} {many or one + 's'}"


def human_bytes(n: float) -> str:
    """Return bytes in binary units, with three significant digits.

    Example:
        >>> human_bytes(1536), human_bytes(3 * 2**30), human_bytes(12)
        ('1.5 KiB', '3 GiB', '12 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(n) < 1024 or unit == "TiB":
            digits = 4 if abs(n) >= 999.5 else 3  # with three, 1000 would be 1e+03
            return f"{n:.{digits}g} {unit}"
        n /= 1024
    raise AssertionError("unreachable")


def describe_arrays(tree: PyTree) -> str:
    """Return the number of arrays in a tree and their bytes, in words.

    Example:
        >>> describe_arrays({"a": jnp.ones((2, 3)), "b": jax.ShapeDtypeStruct((4,), "int8")})
        '2 arrays of 28 B'
    """
    leaves = jax.tree.leaves(tree)
    total = 0
    for leaf in leaves:
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            total += math.prod(leaf.shape) * leaf.dtype.itemsize
    return f"{with_noun(len(leaves), 'array')} of {human_bytes(total)}"


def all_finite(tree: PyTree) -> jax.Array:
    """Return whether the norm of a tree of arrays is finite: one boolean, the same on every device.

    Example:
        >>> bool(all_finite({"a": jnp.ones(2), "b": jnp.array(jnp.nan)}))
        False
    """
    return jnp.isfinite(optax.tree.norm(tree))


def where(condition: jax.Array, true: PyTree, false: PyTree) -> PyTree:
    """Return one tree of arrays if a scalar condition holds, else another of the same structure."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), true, false)
