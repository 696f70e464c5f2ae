"""A first rule table for a model: text to paste, and then to edit.

| parameter | its rule |
|---|---|
| one element, a small vector | replicated, with its size as the reason |
| a large vector | split over the first axis, if that divides it |
| `[…, in, out]` | over two axes: into more outputs `(fsdp, tensor)`, into fewer `(tensor, fsdp)` |

An axis that does not divide a dimension is skipped, and the split with the most parts is taken. A
dimension before those two may be of experts, and is split over `expert` where that axis is above 1.
Where `sequence` is above 1 it stands beside `fsdp`.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import Problem, RuleError, describe_value
from spmd.model_interface.model import Model
from spmd.sharding.flax_metadata import flatten_module
from spmd.sharding.layer_paths import Stack, dims_of, own_stacks, without_dims
from spmd.sharding.mesh import AXES, GATHERED_AXES, AnyMesh, shards_of
from spmd.sharding.optimizer_state import is_random_key
from spmd.sharding.rules import Replicate, Rules, replicate
from spmd.sharding.strict_rules import StrictRule, TableParam, Value, as_python, strict_rules
from spmd.sharding.tree_shardings import check_mesh

_TITLE = "No table can be suggested:"
_SMALL = 64 * 1024
"""Bytes of the largest vector of a layer that is replicated."""


def suggest_rules(model: Model | Any, mesh: AnyMesh) -> str:
    """Return a rule table for a model as Python source; it passes the audit on the mesh.

    Args:
        model: A model (`from_nnx`, `from_linen`, `Model`), or a tree of parameters. Several
            networks are a tree of those, such as a dictionary; the paths of each begin with its
            key, as in the tree of all their parameters.
        mesh: A mesh of a plan, or one with axes of other names: then the first axis has the part of
            `fsdp` and the last one that of `tensor`.

    Raises:
        RuleError: Each leaf of `model` that is neither a model nor an array.

    Example:
        >>> mesh = jax.sharding.AbstractMesh((2, 4), ("dp", "mp"))
        >>> params = {"up": {"kernel": jax.ShapeDtypeStruct((16, 64), "float32")}}
        >>> print(suggest_rules(params, mesh))
        rules = spmd.Rules(
            params=[
                ("kernel", P("dp", "mp")),
            ],
            stacked={"layers": None},
        )
    """
    check_mesh(mesh)
    leaves, table = _read(model, mesh)
    values = _values(leaves, table, _Axes.of(mesh), mesh.shape)
    params = [_table_param(path, leaf, table) for path, leaf in leaves.items()]
    rows = _merged(strict_rules(params, values, table, shortest=1))
    _check(rows, leaves, table, mesh)
    return "\n".join(as_python(rows, table.stacks))


def _read(model: Model | Any, mesh: AnyMesh) -> tuple[dict[str, Any], Rules]:
    """Return path → parameter, and an empty table with the stacks of layers."""
    table = Rules(())
    networks = _networks(model)
    leaves = {}
    for path, leaf in flatten_module(model, is_leaf=_is_model).items():
        if path not in networks:
            leaves[path] = leaf
    for path, network in networks.items():
        leaves |= _prefixed(path, _leaves_of(network))
    _check_leaves(leaves)
    return leaves, table.with_recorded(_stacks(networks, mesh)).on_mesh(mesh)


def _networks(model: Model | Any) -> dict[str, Model]:
    """Return path → model; the path of a model by itself is empty."""
    leaves = tree.flatten(model, is_leaf=_is_model)
    return {path: leaf for path, leaf in leaves.items() if _is_model(leaf)}


def _is_model(value: Any) -> bool:
    return isinstance(value, Model)


def _leaves_of(model: Model) -> dict[str, Any]:
    """Return path → parameter or variable of a model, without scalars and random keys."""
    key = jax.random.key(0)
    leaves = tree.flatten(jax.eval_shape(model.init, key))
    for path, leaf in tree.flatten(jax.eval_shape(model.init_variables, key)).items():
        if leaf.shape and not is_random_key(leaf):
            leaves[path] = leaf
    return leaves


def _prefixed(prefix: str, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves by their paths in a tree of several networks."""
    if not prefix:
        return dict(leaves)
    return {f"{prefix}/{path}": leaf for path, leaf in leaves.items()}


def _stacks(networks: Mapping[str, Model], mesh: AnyMesh) -> dict[str, Stack] | None:
    """Return the recorded stacks of all networks, whole on a mesh without their axis.

    None if no network has recorded any.
    """
    found: dict[str, Stack] = {}
    is_recorded = False
    problems = []
    for path, network in networks.items():
        recorded = network.info().stacks
        if recorded is None:
            continue
        is_recorded = True
        for name, stack in recorded.items():
            if stack.axis not in mesh.shape:
                stack = dataclasses.replace(stack, axis=None)
            if found.setdefault(name, stack) != stack:
                what = f"its stack {name!r} is {stack}, and {found[name]} in another network"
                problems.append(Problem(path, what, fix="suggest a table for each network"))
    if problems:
        raise RuleError(_TITLE, problems)
    if not is_recorded:
        return None
    return found


def _check_leaves(leaves: Mapping[str, Any]) -> None:
    """Raise if a leaf is not an array."""
    problems = []
    for path, leaf in leaves.items():
        if not hasattr(leaf, "shape"):
            fix = "spmd.from_linen(…), spmd.from_nnx(…), or a tree of parameters"
            problems.append(Problem(path or "model", f"is {describe_value(leaf)}", fix=fix))
    if problems:
        raise RuleError(_TITLE, problems)


@dataclasses.dataclass(frozen=True)
class _Axes:
    """The axes of a mesh by their part in a table; empty for none."""

    rows: str | tuple[str, ...]
    columns: str
    experts: str = ""

    @classmethod
    def of(cls, mesh: AnyMesh) -> "_Axes":
        """Return the axes of a plan's mesh, or of any other."""
        names = mesh.axis_names
        if set(AXES) <= set(names):
            experts = ""
            if mesh.shape["expert"] > 1:
                experts = "expert"
            rows: str | tuple[str, ...] = "fsdp"
            if mesh.shape["sequence"] > 1:
                rows = GATHERED_AXES
            return cls(rows, "tensor", experts)
        if len(names) == 1:
            return cls(names[0], "")
        return cls(names[0], names[-1])


def _values(
    leaves: Mapping[str, Any], table: Rules, axes: _Axes, sizes: Mapping[str, int]
) -> dict[str, Value]:
    """Return path → spec of one layer, or replication."""
    values: dict[str, Value] = {}
    vectors = []
    for path, leaf in leaves.items():
        shape = without_dims(leaf.shape, dims_of(path, table.stacks))
        nbytes = math.prod(shape) * leaf.dtype.itemsize
        if math.prod(shape) == 1:
            values[path] = replicate("one element")
        elif len(shape) < 2 and nbytes <= _SMALL:
            vectors.append(path)
        else:
            values[path] = _split(shape, axes, sizes)
    total = 0
    for path in vectors:
        total += math.prod(leaves[path].shape) * leaves[path].dtype.itemsize
    for path in vectors:
        values[path] = replicate(f"vectors, {tree.human_bytes(total)} in all")
    return values


def _split(shape: tuple[int, ...], axes: _Axes, sizes: Mapping[str, int]) -> Value:
    """Return the spec with the most parts of those that divide a shape."""
    best = max(_specs(shape, axes), key=lambda spec: _parts(spec, shape, sizes))
    if _parts(best, shape, sizes) == 0:
        dims = " × ".join(map(str, shape))
        return replicate(f"no axis divides {dims}")
    return best


def _specs(shape: tuple[int, ...], axes: _Axes) -> Iterator[P]:
    """Yield possible specs of an array of a layer, the preferred ones first."""
    if len(shape) == 1:
        yield P(axes.rows)
        if not isinstance(axes.rows, str):
            for axis in axes.rows:
                yield P(axis)
        return
    *leading, into, out = shape
    pairs = [(axes.rows, axes.columns), (axes.columns, axes.rows)]
    if out < into:
        pairs.reverse()
    first, second = pairs[0]
    single = [(first, None), (second, None), (None, first), (None, second)]
    if not isinstance(axes.rows, str):  # a dimension may divide over one of them alone
        for axis in axes.rows:
            pairs += [(axis, axes.columns), (axes.columns, axis)]
            single += [(axis, None), (None, axis)]
    before: list[tuple[Any, ...]] = [(None,) * len(leading)]
    if leading and axes.experts:
        before.insert(0, (*before[0][1:], axes.experts))
    for start, end in itertools.product(before, (*pairs, *single)):
        entries = [entry or None for entry in (*start, *end)]
        yield P(*entries)


def _parts(spec: P, shape: tuple[int, ...], sizes: Mapping[str, int]) -> int:
    """Return the number of parts; 0 if an axis does not divide its dimension, or names none."""
    parts = 1
    is_split = False
    for size, name in zip(shape, spec, strict=True):
        if not name:
            continue
        shards = shards_of(name, sizes)
        if size % shards:
            return 0
        parts *= shards
        is_split = True
    return parts if is_split else 0


def _table_param(path: str, leaf: Any, table: Rules) -> TableParam:
    """Return a parameter without a rule of its own yet."""
    nbytes = math.prod(leaf.shape) * leaf.dtype.itemsize
    stacks = own_stacks(path, table.stacks)
    return TableParam(path, tuple(leaf.shape), nbytes, stacks, rule=None, hits=())


def _merged(rows: Iterable[StrictRule]) -> list[StrictRule]:
    """Join rows of one value and one last component: `(q_proj|k_proj)/kernel`; splits come first."""
    groups: dict[tuple[bool, str, str], list[StrictRule]] = {}
    for row in rows:
        start, _, end = row.pattern.rpartition("/")
        if start.startswith("^") or not start:
            end = row.pattern  # by itself
        is_replicated = isinstance(row.value, Replicate)
        groups.setdefault((is_replicated, str(row.value), end), []).append(row)
    joined = []
    for (_, _, end), members in sorted(groups.items(), key=lambda group: group[0][0]):
        first = members[0]
        starts = [row.pattern.removesuffix(f"/{end}") for row in members]
        pattern = first.pattern
        if len(members) > 1:
            pattern = f"({'|'.join(starts)})/{end}"
        params = tuple(itertools.chain.from_iterable(row.params for row in members))
        joined.append(dataclasses.replace(first, pattern=pattern, params=params))
    return joined


def _check(rows: list[StrictRule], leaves: Mapping[str, Any], table: Rules, mesh: AnyMesh) -> None:
    """Raise if the table does not pass the audit."""
    pairs: list[tuple[str, P | Replicate]] = []
    for row in rows:
        pairs.append((row.pattern, row.value))
    made = dataclasses.replace(table, params=pairs)
    shapes = {}
    for path, leaf in leaves.items():
        shapes[path] = tuple(leaf.shape)
    problems = made.audit(shapes, mesh.shape)
    if problems:
        raise RuleError(_TITLE, problems)
