"""Shardings of a tree by a rule table, on any mesh: for a training loop of one's own.

| array | its sharding |
|---|---|
| a scalar, a random key | whole |
| optimizer state, beside `params` and `tx` | as `optimizer_specs` derives it |
| of another field with the parameters' paths and shapes | as the parameter |
| any other | by the rule of its path |

A tree of parameters, the state of an NNX module or optimizer, and a `TrainState` of Flax with any
further fields have such shardings. An array without an explanation is an error.
"""

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import Problem, RuleError, describe_value
from spmd.sharding.layer_paths import Stack, dims_of
from spmd.sharding.mesh import AnyMesh
from spmd.sharding.optimizer_state import is_random_key, optimizer_specs

_TITLE = "Shardings cannot be made:"
_PARAMS, _OPT_STATE = "params", "opt_state"
"""Fields of a `TrainStateLike`."""


@runtime_checkable
class TrainStateLike(Protocol):
    """Training state with a transformation of optax, such as `flax.training`'s `TrainState`."""

    params: Any
    tx: optax.GradientTransformation
    opt_state: Any


class Table(Protocol):
    """The part of `spmd.sharding.rules.Rules` that shardings follow from."""

    @property
    def stacks(self) -> Mapping[str, Stack]:
        """The stacks by path component."""

    def match(self, path: str) -> Any:
        """Return the first rule matching a path; None without one."""

    def audit(
        self, shapes: Mapping[str, tuple[int, ...]], axes: Mapping[str, int]
    ) -> list[Problem]:
        """Return every mismatch between the table, some arrays and a mesh."""


@dataclasses.dataclass
class _Specs:
    """Specs found so far.

    Attributes:
        found: Path → spec.
        by_rule: Path of an array → its path for the rules, of those that rules decide.
        problems: All problems so far.
    """

    found: dict[str, P] = dataclasses.field(default_factory=dict)
    by_rule: dict[str, str] = dataclasses.field(default_factory=dict)
    problems: list[Problem] = dataclasses.field(default_factory=list)


def tree_shardings(table: Table, mesh: AnyMesh, arrays: Any) -> Any:
    """Return the tree with a `NamedSharding` in place of each array.

    Args:
        mesh: Its axes may have any names and types.
        arrays: Arrays or abstract ones, in any pytree.

    Raises:
        RuleError: All mismatches: arrays without a rule, rules without an array, unknown axes,
            indivisible dimensions, optimizer state without an explanation.
    """
    check_mesh(mesh)
    leaves = tree.flatten(arrays)
    specs = _Specs(problems=_leaf_problems(leaves))
    if not specs.problems:
        _find_specs(specs, table, mesh, arrays, leaves)
    if specs.problems:
        raise RuleError(_TITLE, specs.problems)
    shardings = [NamedSharding(mesh, specs.found[path]) for path in leaves]
    return jax.tree.unflatten(jax.tree.structure(arrays), shardings)


def check_mesh(mesh: Any) -> None:
    """Raise if this is no mesh."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        fix = 'a mesh of JAX, such as jax.make_mesh((2, 4), ("dp", "mp"))'
        raise RuleError(_TITLE, [Problem("mesh", f"is {describe_value(mesh)}", fix=fix)])


def _leaf_problems(leaves: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each leaf without a shape, unless it is a number."""
    problems = []
    for path, leaf in leaves.items():
        if not hasattr(leaf, "shape") and not isinstance(leaf, numbers.Number):
            problems.append(Problem(path, f"is {describe_value(leaf)}, not an array"))
    return problems


def _find_specs(
    specs: _Specs, table: Table, mesh: AnyMesh, arrays: Any, leaves: Mapping[str, Any]
) -> None:
    """Find the spec of each leaf, and the problems."""
    rule_paths = _rule_paths(arrays, leaves)
    for path, leaf in leaves.items():
        if _is_whole(leaf):
            specs.found[path] = P()
        else:
            specs.by_rule[path] = rule_paths[path]
    if isinstance(arrays, TrainStateLike):
        _follow_params(specs, arrays, leaves)
    shapes = {}
    for path, rule_path in specs.by_rule.items():
        shapes[rule_path] = leaves[path].shape
    for rule_path in _scalar_paths(specs, arrays, rule_paths):
        if table.match(rule_path) is not None:  # so that its rule is not idle
            shapes[rule_path] = ()
    specs.problems += table.audit(shapes, mesh.shape)
    if specs.problems:
        return
    for path, rule_path in specs.by_rule.items():
        specs.found[path] = table.match(rule_path).spec
    if isinstance(arrays, TrainStateLike):
        _find_state_specs(specs, table, arrays, leaves)


def _rule_paths(arrays: Any, leaves: Mapping[str, Any]) -> dict[str, str]:
    """Return path → path for the rules: without the `value` of a variable of NNX."""
    paths = dict(zip(leaves, leaves, strict=True))
    for path, leaf in tree.flatten(arrays, is_leaf=_is_variable).items():
        if _is_variable(leaf):
            paths[f"{path}/value"] = path
    return paths


def _scalar_paths(specs: _Specs, arrays: Any, rule_paths: Mapping[str, str]) -> list[str]:
    """Return the paths for the rules of leaves that are whole without a rule."""
    paths = []
    for path in specs.found:
        rule_path = rule_paths[path]
        if isinstance(arrays, TrainStateLike):
            rule_path = rule_path.removeprefix(f"{_PARAMS}/")
        paths.append(rule_path)
    return paths


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _is_whole(leaf: Any) -> bool:
    """Return whether a leaf is never split: a scalar or a random key."""
    if isinstance(leaf, numbers.Number) or leaf.shape == ():
        return True
    return is_random_key(leaf)


def _follow_params(specs: _Specs, state: TrainStateLike, leaves: Mapping[str, Any]) -> None:
    """Name parameters and what follows them by their paths in `params`; leave out `opt_state`."""
    params = _shapes(tree.flatten(state.params))
    for field, paths in _by_field(specs.by_rule).items():
        own = {path.removeprefix(f"{field}/"): leaves[path] for path in paths}
        is_like_params = _shapes(own).items() <= params.items()
        for path in paths:
            if field == _OPT_STATE:
                del specs.by_rule[path]
            elif is_like_params:
                specs.by_rule[path] = specs.by_rule[path].removeprefix(f"{field}/")


def _shapes(arrays: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {path: array.shape for path, array in arrays.items()}


def _by_field(paths: Mapping[str, str]) -> dict[str, list[str]]:
    """Return field → its paths."""
    fields: dict[str, list[str]] = {}
    for path in paths:
        fields.setdefault(path.partition("/")[0], []).append(path)
    return fields


def _find_state_specs(
    specs: _Specs, table: Table, state: TrainStateLike, leaves: Mapping[str, Any]
) -> None:
    """Find the specs of optimizer state by its structure."""
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state.params)
    param_specs = {}
    stacked = {}
    for path in tree.flatten(params):
        param_specs[path] = specs.found[f"{_PARAMS}/{path}"]
        stacked[path] = dims_of(path, table.stacks)
    derived, problems = optimizer_specs(state.tx.init, params, param_specs, stacked)
    specs.problems += problems
    for path, leaf in leaves.items():
        field, _, inner = path.partition("/")
        if field != _OPT_STATE or path in specs.found:
            continue
        known = derived.get(inner)
        if known is not None and known.shape == leaf.shape:
            specs.found[path] = known.spec
        elif not problems:
            what = "is no state of tx.init(params)"
            specs.problems.append(Problem(path, what, fix="opt_state=tx.init(params)"))
