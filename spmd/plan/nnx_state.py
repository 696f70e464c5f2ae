"""States of NNX modules as nested dictionaries.

Besides `nnx.Variable`s, modules keep plain arrays: tables, masks, random keys. These are leaves of
a module's state, too.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx, traverse_util
from jax.extend.core import Jaxpr, Literal

from spmd import tree
from spmd.errors import ConfigError, Problem
from spmd.jaxpr.equations import producers
from spmd.jaxpr.source import equation_line

Names = tuple[str, ...]

_FLAX_PRIVATE = "_pytree__"
"""Prefix of the attributes of a module that are Flax's own."""


@dataclasses.dataclass(frozen=True)
class ModuleStructure:
    """An NNX module without arrays.

    Attributes:
        graph: The module's `nnx.GraphDef`.
        params: The state of its `nnx.Param`s, abstract; each knows its path, as the metadata
            `path`.
        others: The state of all other arrays, abstract.
    """

    graph: Any
    params: nnx.State
    others: nnx.State

    def module(self) -> nnx.Module:
        """Return the module with abstract arrays."""
        return nnx.merge(self.graph, self.params, self.others)

    @functools.cached_property
    def variables(self) -> dict[str, Any]:
        """Path → abstract array, of all arrays but parameters."""
        return tree.flatten(to_dict(self.others))

    @functools.cached_property
    def constants(self) -> frozenset[str]:
        """Paths of the plain arrays, outside of any `nnx.Variable`."""
        paths = []
        for path, x in nnx.to_flat_state(self.others):
            if not isinstance(x, nnx.Variable):
                paths.append(join(path))
        return frozenset(paths)


def trace_structure(
    build: Callable[[jax.Array], tuple[nnx.Module, dict[str, jax.Array]]], key: jax.ShapeDtypeStruct
) -> ModuleStructure:
    """Return the structure of the module built from a key, without its arrays.

    Args:
        build: Key → a module, and the result of `register_arrays` for it.

    Raises:
        ConfigError: All arrays of stacked layers that `nnx.vmap` would not stack, and all arrays in
            closures or objects, which would leak as tracers.
    """
    graphs = []
    names = list[str]()
    problems = list[Problem]()

    def describe(key: jax.Array) -> Any:
        module, arrays = build(key)
        problems.extend(_check_hidden(module))
        names.extend(arrays)
        graph, params, others = nnx.split(module, nnx.Param, ...)
        graphs.append(graph)
        return list(arrays.values()), params, others

    traced, (_, params, others) = jax.make_jaxpr(describe, return_shape=True)(key)
    problems += _check_stacked(names, traced.jaxpr)
    if problems:
        raise ConfigError("Arrays in static fields of the module:", problems)
    for path, param in nnx.to_flat_state(params):
        param.set_metadata(path=join(path))  # for `spmd.plan.fsdp.placement_of`
    return ModuleStructure(graphs[0], params, others)


def _check_stacked(names: Sequence[str], jaxpr: Jaxpr) -> list[Problem]:
    """Return a problem for each plain array made in `nnx.vmap`.

    Args:
        names: The paths of the first outputs.
    """
    origins = producers(jaxpr)
    problems = []
    for path, x in zip(names, jaxpr.outvars, strict=False):
        if isinstance(x, Literal) or x not in origins:
            continue
        origin = origins[x]
        if "vmap" not in str(origin.source_info.name_stack):
            continue
        _, _, attribute = path.rpartition("/")
        problem = Problem(
            path,
            f"is made in nnx.vmap, which would not stack it: {equation_line([origin])}",
            "under tracing, Flax takes a plain array for a static attribute",
            f"self.{attribute} = nnx.data(…)",
        )
        problems.append(problem)
    return problems


def register_arrays(module: nnx.Module) -> dict[str, jax.Array]:
    """Make attributes with arrays part of a module's state, and return these arrays by path.

    Flax does so by itself, except while tracing: it takes a traced array for a static attribute.
    """
    known = {join(path) for path, _ in nnx.to_flat_state(nnx.state(module))}
    found = dict[str, jax.Array]()
    for path, node in _pytree_nodes(module):
        for name, value in list(vars(node).items()):
            missing = {}
            for inner, x in _arrays_in(value).items():
                full = join((*path, name, *inner))
                if full not in known:
                    missing[full] = x
            if missing and not name.startswith(_FLAX_PRIVATE):
                setattr(node, name, nnx.data(value))
                found |= missing
    return found


def _pytree_nodes(module: nnx.Module) -> list[tuple[tuple[Any, ...], nnx.Pytree]]:
    """Return path and node of a module and of the modules inside of it."""
    nodes = []
    for path, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Pytree):
            nodes.append((path, node))
    return nodes


def _arrays_in(value: Any) -> dict[tuple[str, ...], jax.Array]:
    """Return the arrays of a pytree by key path, without arrays of modules and variables in it."""
    arrays = dict[tuple[str, ...], jax.Array]()
    for path, x in jax.tree_util.tree_leaves_with_path(value, is_leaf=_is_node):
        if not isinstance(x, jax.Array):
            continue
        if path:
            arrays[(jax.tree_util.keystr(path, simple=True, separator="/"),)] = x
        else:
            arrays[()] = x
    return arrays


def _is_node(x: Any) -> bool:
    return isinstance(x, nnx.Pytree | nnx.Variable)


def _check_hidden(module: nnx.Module) -> list[Problem]:
    """Return a problem for each attribute with a traced array in a closure or in an object."""
    what = "holds an array that is made in __init__, in a closure or in an object"
    detail = (
        "the module is built under tracing, and Flax carries arrays of attributes alone out of it"
    )
    fix = "keep the array as an attribute of the module, or make it where it is used"
    problems = []
    for path, node in _pytree_nodes(module):
        for name, value in vars(node).items():
            if not name.startswith(_FLAX_PRIVATE) and _holds_tracer(value, depth=3):
                problems.append(Problem(join((*path, name)), what, detail, fix))
    return problems


def _holds_tracer(value: Any, depth: int) -> bool:
    """Return whether a function, a `partial` or an object refers to a traced array.

    References are followed through `depth` further objects, and not into pytrees.
    """
    leaves = jax.tree.leaves(_references(value), is_leaf=_is_node)
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        return True
    return depth > 0 and any(_holds_tracer(x, depth - 1) for x in leaves)


def _references(value: Any) -> list[Any]:
    """Return the values inside of a function or an object; nothing of a pytree, class or module."""
    if inspect.isfunction(value):
        return [*_captured(value), *(value.__defaults__ or ())]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, type | types.ModuleType | nnx.Pytree | nnx.Variable | jax.Array):
        return []
    return [*getattr(value, "__dict__", {}).values()]


def _captured(function: types.FunctionType) -> list[Any]:
    """Return the values in the closure of a function."""
    captured = []
    for cell in function.__closure__ or ():
        if cell != types.CellType():  # not empty
            captured.append(cell.cell_contents)
    return captured


def join(path: tuple[Any, ...]) -> str:
    """Return a path of a state as text.

    A key that is itself a path, as in `nnx.WeightNorm`, becomes part of it.
    """
    return "/".join(_names(path))


def _keys(path: tuple[Any, ...]) -> Iterator[Any]:
    """Yield the keys of a path; a tuple among them is a path itself."""
    for key in path:
        if isinstance(key, tuple):
            yield from _keys(key)
        else:
            yield key


def _names(path: tuple[Any, ...]) -> Names:
    return tuple(map(str, _keys(path)))


def to_dict(state: nnx.State) -> dict[Any, Any]:
    """Return the values of a state as a nested dictionary; numbers of lists stay integers."""
    flat = {}
    for path, leaf in nnx.to_flat_state(state):
        flat[tuple(_keys(path))] = _value(leaf)
    return dict(traverse_util.unflatten_dict(flat))


def _value(leaf: Any) -> Any:
    if isinstance(leaf, nnx.Variable):
        return leaf.get_value()
    return leaf


def with_values(state: nnx.State, values: Any) -> nnx.State:
    """Return a state with values from a nested dictionary; leaves without a value are unchanged.

    Raises:
        ConfigError: All values without a leaf in the state.
    """
    flat = dict(nnx.to_flat_state(state))
    paths = {_names(path): path for path in flat}
    unknown = []
    for names, value in _leaves(values, paths, ()):
        if names not in paths:
            unknown.append(Problem("/".join(names), "is no array of the module"))
            continue
        path = paths[names]
        leaf = flat[path]
        if isinstance(leaf, nnx.Variable):
            flat[path] = leaf.replace(value)
        else:
            flat[path] = value
    if unknown:
        raise ConfigError("The module cannot take these values:", unknown)
    return nnx.from_flat_state(flat)


def _leaves(values: Any, paths: Mapping[Names, Any], names: Names) -> Iterator[tuple[Names, Any]]:
    """Yield names and value of each leaf of a state in nested dictionaries.

    A leaf may be a pytree itself.
    """
    if names in paths or not isinstance(values, Mapping):
        yield names, values
        return
    for key, value in values.items():
        yield from _leaves(value, paths, (*names, str(key)))
