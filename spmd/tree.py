"""Trees of arrays seen as tables: `"layers/attention/q_proj/kernel"` → leaf.

A path is the interface of this framework: every decision is made about one. This room has no devices in it;
leaves may be arrays, `jax.ShapeDtypeStruct`s or anything else.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

PyTree = Any


def path_of(key_path: tuple[Any, ...]) -> str:
    """JAX's key path as `a/b/0/kernel`.

    Example:
        >>> path_of(jax.tree_util.tree_flatten_with_path({"a": [1]})[0][0][0])
        'a/0'
    """
    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def flatten(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """The tree as a table from path to leaf, in the tree's own order.

    Example:
        >>> flatten({"b": {"x": 1}, "a": [2, 3]})
        {'a/0': 2, 'a/1': 3, 'b/x': 1}
    """
    return {path_of(k): leaf for k, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]}


def map_with_path(
    f: Callable[..., Any], tree: PyTree, *rest: PyTree, is_leaf: Callable[[Any], bool] | None = None
) -> PyTree:
    """`jax.tree.map` whose function takes the leaf's path first.

    Example:
        >>> map_with_path(lambda path, x: f"{path}={x}", {"a": {"b": 1}})
        {'a': {'b': 'a/b=1'}}
    """
    return jax.tree_util.tree_map_with_path(lambda k, *leaves: f(path_of(k), *leaves), tree, *rest, is_leaf=is_leaf)


def select(tree: Mapping[str, Any], keep: Callable[[str], bool]) -> dict[str, Any]:
    """The nested dictionary with only those leaves whose path passes `keep`; empty branches vanish.

    Example:
        >>> select({"a": {"x": 1, "y": 2}, "b": {"x": 3}}, lambda path: path.endswith("y"))
        {'a': {'y': 2}}
    """

    def walk(node: Mapping[Any, Any], prefix: str) -> dict[Any, Any]:
        out: dict[Any, Any] = {}
        for key, child in node.items():
            path = f"{prefix}{key}"
            if isinstance(child, Mapping):
                if inner := walk(child, f"{path}/"):
                    out[key] = inner
            elif keep(path):
                out[key] = child
        return out

    return walk(tree, "")


def merge(*trees: Mapping[Any, Any]) -> dict[Any, Any]:
    """Nested dictionaries with disjoint leaves laid over one another: the inverse of `select`.

    Example:
        >>> merge({"a": {"x": 1}}, {"a": {"y": 2}, "b": 3})
        {'a': {'x': 1, 'y': 2}, 'b': 3}
    """
    out: dict[Any, Any] = {}
    for tree in trees:
        for key, child in tree.items():
            known = out.get(key)
            out[key] = merge(known, child) if isinstance(known, Mapping) else child
    return out


def nested(table: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dictionary of a table by path: the inverse of `flatten`, for string keys.

    Example:
        >>> nested({"a/x": 1, "a/y": 2, "b": 3})
        {'a': {'x': 1, 'y': 2}, 'b': 3}
    """
    out: dict[str, Any] = {}
    for path, leaf in table.items():
        *parents, name = path.split("/")
        node = out
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return out


def size(tree: PyTree) -> int:
    """The number of elements in all leaves.

    Example:
        >>> size({"a": jax.ShapeDtypeStruct((2, 3), "float32"), "b": jax.ShapeDtypeStruct((4,), "float32")})
        10
    """
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def human_bytes(n: float) -> str:
    """Bytes in binary units, three significant digits.

    Example:
        >>> human_bytes(1536), human_bytes(3 * 2**30), human_bytes(12)
        ('1.5 KiB', '3 GiB', '12 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(n) < 1024 or unit == "TiB":
            return f"{n:.4g} {unit}" if n >= 999.5 else f"{n:.3g} {unit}"
        n /= 1024
    raise AssertionError("unreachable")
