"""States of NNX modules as nested dictionaries.

Besides `nnx.Variable`s, modules keep plain arrays: tables, masks, random keys. They are leaves of a module's state.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx, traverse_util

from spmd import tree
from spmd.errors import ConfigError, Problem
from spmd.jaxpr.source import equation_line

Names = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ModuleStructure:
    """An NNX module without arrays.

    Attributes:
        graph: The module's `nnx.GraphDef`.
        params: The state of its `nnx.Param`s, abstract; each knows its path, as the metadata `path`.
        others: The state of everything else, abstract.
    """

    graph: Any
    params: nnx.State
    others: nnx.State

    def module(self) -> nnx.Module:
        """Return the module with abstract arrays."""
        return nnx.merge(self.graph, self.params, self.others)

    @functools.cached_property
    def variables(self) -> dict[str, Any]:
        """Path → abstract array of everything but parameters."""
        return tree.flatten(to_dict(self.others))

    @functools.cached_property
    def constants(self) -> frozenset[str]:
        """Paths of the arrays that are no `nnx.Variable`."""
        return frozenset(join(path) for path, x in nnx.to_flat_state(self.others) if not isinstance(x, nnx.Variable))


def trace_structure(
    build: Callable[[jax.Array], tuple[nnx.Module, dict[str, jax.Array]]], key: jax.ShapeDtypeStruct
) -> ModuleStructure:
    """Return the structure of the module that `build` makes from a key, without its arrays.

    Args:
        build: Key → a module, and what `register_arrays` returned of it.

    Raises:
        ConfigError: All arrays of stacked layers that `nnx.vmap` would not stack, and all that are in closures or
            objects, which would stay in the trace.
    """
    graphs, names, problems = [], list[str](), list[Problem]()

    def describe(key: jax.Array) -> Any:
        module, arrays = build(key)
        problems.extend(_check_hidden(module))
        names.extend(arrays)
        graph, params, others = nnx.split(module, nnx.Param, ...)
        graphs.append(graph)
        return list(arrays.values()), params, others

    traced, (_, params, others) = jax.make_jaxpr(describe, return_shape=True)(key)
    origins = {id(x): equation for equation in traced.jaxpr.eqns for x in equation.outvars}
    for path, x in zip(names, traced.jaxpr.outvars, strict=False):
        equation = origins.get(id(x))
        if equation is not None and "vmap" in str(equation.source_info.name_stack):
            what = f"is made in nnx.vmap, which would not stack it: {equation_line([equation])}"
            fix = f"self.{path.rpartition('/')[2]} = nnx.data(…)"
            problems.append(Problem(path, what, "under tracing, Flax takes a plain array for a static attribute", fix))
    if problems:
        raise ConfigError("The module keeps arrays where Flax does not see them:", problems)
    for path, param in nnx.to_flat_state(params):
        param.set_metadata(path=join(path))  # for `spmd.plan.fsdp.placement_of`
    return ModuleStructure(graphs[0], params, others)


def register_arrays(module: nnx.Module) -> dict[str, jax.Array]:
    """Make attributes with arrays part of a module's state, and return these arrays by path.

    Flax does so by itself, except while tracing: it takes a traced array for a static attribute.
    """
    known = {join(path) for path, _ in nnx.to_flat_state(nnx.state(module))}
    nodes = [(path, node) for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Pytree)]
    found = dict[str, jax.Array]()
    for path, node in nodes:
        for name, value in list(vars(node).items()):
            arrays = {join((*path, name, *inner)): x for inner, x in _arrays_in(value).items()}
            missing = {inner: x for inner, x in arrays.items() if inner not in known}
            if missing and not name.startswith("_pytree__"):
                setattr(node, name, nnx.data(value))
                found |= missing
    return found


def _arrays_in(value: Any) -> dict[tuple[str, ...], jax.Array]:
    """Return the arrays of a pytree by key path, without those of modules and variables in it."""
    leaves = jax.tree_util.tree_leaves_with_path(value, is_leaf=lambda x: isinstance(x, nnx.Pytree | nnx.Variable))
    arrays = ((path, x) for path, x in leaves if isinstance(x, jax.Array))
    return {(jax.tree_util.keystr(path, simple=True, separator="/"),) if path else (): x for path, x in arrays}


def _check_hidden(module: nnx.Module) -> list[Problem]:
    """Return a problem for each attribute that holds a traced array in a closure or in an object of its own."""
    nodes = [(path, node) for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Pytree)]
    what = "holds an array that is made in __init__, in a closure or in an object"
    detail = "the module is built under tracing, and Flax carries arrays of attributes alone out of it"
    fix = "keep the array as an attribute of the module, or make it where it is used"
    return [
        Problem(join((*path, name)), what, detail, fix)
        for path, node in nodes
        for name, value in vars(node).items()
        if not name.startswith("_pytree__") and _holds_tracer(value, depth=3)
    ]


def _holds_tracer(value: Any, depth: int) -> bool:
    """Return whether a function, a partial one or an object that is no pytree refers to a traced array."""
    if inspect.isfunction(value):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]  # not empty
        inner = [*cells, *(value.__defaults__ or ())]
    elif isinstance(value, functools.partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, type | types.ModuleType | nnx.Pytree | nnx.Variable | jax.Array):
        inner = []
    else:
        inner = [*getattr(value, "__dict__", {}).values()]
    leaves = jax.tree.leaves(inner, is_leaf=lambda x: isinstance(x, nnx.Pytree | nnx.Variable))
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        return True
    return depth > 0 and any(_holds_tracer(x, depth - 1) for x in leaves)


def join(path: tuple[Any, ...]) -> str:
    """Return a path of a state as text. A key that is itself a path, as in `nnx.WeightNorm`, becomes part of it."""
    return "/".join(_names(path))


def _keys(path: tuple[Any, ...]) -> Iterator[Any]:
    for key in path:
        yield from _keys(key) if isinstance(key, tuple) else (key,)


def _names(path: tuple[Any, ...]) -> Names:
    return tuple(map(str, _keys(path)))


def to_dict(state: nnx.State) -> dict[Any, Any]:
    """Return the values of a state as a nested dictionary; numbers of lists stay integers."""
    flat = {tuple(_keys(path)): _value(leaf) for path, leaf in nnx.to_flat_state(state)}
    return dict(traverse_util.unflatten_dict(flat))


def _value(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def with_values(state: nnx.State, values: Any) -> nnx.State:
    """Return a state with values from a nested dictionary. A leaf without a value stays as it is.

    Raises:
        ConfigError: All values that the state has no leaf for.
    """
    flat = dict(nnx.to_flat_state(state))
    paths = {_names(path): path for path in flat}
    unknown = []
    for names, value in _leaves(values, paths, ()):
        if names not in paths:
            unknown.append(Problem("/".join(names), "is no array of the module"))
            continue
        leaf = flat[paths[names]]
        flat[paths[names]] = leaf.replace(value) if isinstance(leaf, nnx.Variable) else value
    if unknown:
        raise ConfigError("The module cannot take these values:", unknown)
    return nnx.from_flat_state(flat)


def _leaves(values: Any, paths: Mapping[Names, Any], names: Names) -> Iterator[tuple[Names, Any]]:
    """Yield names and value of each leaf of a state in nested dictionaries; a leaf may be a pytree itself."""
    if names in paths or not isinstance(values, Mapping):
        yield names, values
        return
    for key, value in values.items():
        yield from _leaves(value, paths, (*names, str(key)))
