"""Sharding metadata of Flax modules: names of the dimensions of parameters.

NNX has them in a variable's metadata, Linen in a box around the parameter, and T5X in a collection
beside `params`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
from flax import nnx
from flax.linen import partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import Problem, RuleError
from spmd.sharding.mesh import entry_axes

LogicalRules = tuple[tuple[str, tuple[str, ...]], ...]
"""Pairs of logical name and mesh axes, by precedence. A dimension without axes is whole."""


@dataclasses.dataclass(frozen=True)
class Annotation:
    """Dimension names of one parameter, from its metadata.

    Args:
        names: For each dimension, from the first on, a name, a tuple of mesh axes, or None for
            whole. Flax's own forms (a list, a `PartitionSpec`, a `NamedSharding`) are accepted.
        rules: `(logical name, mesh axis or tuple or None)` pairs for this parameter alone.
        is_logical: Whether a name is never a mesh axis, as with `nn.with_logical_partitioning`.

    Example:
        >>> annotation = Annotation(P("embed", ["data", "fsdp"]), (8, 4), [("embed", "tensor")])
        >>> annotation.names, annotation.rules
        (('embed', ('data', 'fsdp')), (('embed', ('tensor',)),))
    """

    names: Any
    shape: tuple[int, ...]
    rules: Any = ()
    is_logical: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", _read_names(self.names))
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "rules", logical_rules(self.rules))


def _read_names(value: Any) -> tuple[Any, ...]:
    """Return the names of dimensions as a tuple, from any of Flax's forms."""
    if isinstance(value, NamedSharding):
        value = value.spec
    if isinstance(value, tuple | list | P):
        names = tuple(map(_without_list, value))
        wrong = [name for name in names if not _is_entry(name)]
    else:
        names = ()
        wrong = [value]
    problems = []
    for name in wrong:
        fix = "a tuple of names, one for each dimension"
        problems.append(Problem(f"annotation {name!r}", "is not a dimension name", fix=fix))
    if problems:
        raise RuleError("Invalid annotation:", problems)
    return names


def _without_list(value: Any) -> Any:
    """Return a list as a tuple, and other values unchanged."""
    if isinstance(value, list):
        return tuple(value)
    return value


def _is_entry(value: Any) -> bool:
    """Return whether a value is a name, a tuple of names, or None."""
    if isinstance(value, tuple):
        return all(isinstance(name, str) for name in value)
    return value is None or isinstance(value, str)


def logical_rules(pairs: Any) -> LogicalRules:
    """Normalize logical rules.

    Example:
        >>> logical_rules([("embed", "fsdp"), ("mlp", ["fsdp", "tensor"]), ("norm", None)])
        (('embed', ('fsdp',)), ('mlp', ('fsdp', 'tensor')), ('norm', ()))
    """
    rules: list[tuple[str, tuple[str, ...]]] = []
    problems = []
    if isinstance(pairs, Mapping):
        pairs = pairs.items()
    for index, (name, axes) in enumerate(pairs):
        axes = _without_list(axes)
        if isinstance(name, str) and _is_entry(axes):
            rules.append((name, entry_axes(axes)))
            continue
        problem = Problem(
            f"logical rule {index} ({name!r})",
            f"has the value {axes!r}",
            fix="a mesh axis, a tuple of them, or None for whole",
        )
        problems.append(problem)
    if problems:
        raise RuleError("Invalid logical rules:", problems)
    return tuple(rules)


def flatten_module(params: Any, is_leaf: Callable[[Any], bool] = lambda _: False) -> dict[str, Any]:
    """Return the arrays of a module or tree by path, without boxes.

    Paths are those of `spmd.from_nnx` and `spmd.from_linen`. Random state, which needs no rule, is
    dropped.

    Args:
        params: An `nnx.State` or module, Linen variables, or any tree of these.
        is_leaf: Whether a value is returned as it is.

    Example:
        >>> params = {"kernel": nn.Partitioned(1.0, ("embed",))}
        >>> flatten_module({"params": params, "batch_stats": {"mean": 2.0}})
        {'batch_stats/mean': 2.0, 'kernel': 1.0}
        >>> flatten_module(nnx.State({"kernel": nnx.Param(1.0)}))
        {'kernel': 1.0}
    """
    if isinstance(params, nnx.Module):
        params = nnx.state(params)
    if isinstance(params, nnx.State):
        return _flatten_state(params)
    in_collections = isinstance(params, Mapping) and isinstance(params.get("params"), Mapping)
    values = {}
    for path, box in tree.flatten(params, is_leaf=lambda x: _is_box(x) or is_leaf(x)).items():
        if isinstance(box, nnx.RngState):
            continue
        if in_collections:
            path = path.removeprefix("params/")
        values[path] = _unboxed(box)
    return values


def _is_box(value: Any) -> bool:
    return isinstance(value, nnx.Variable) or nn.meta.is_axis_metadata(value)


def _unboxed(value: Any) -> Any:
    """Return the array of a variable of NNX or a box of Linen, and others as they are."""
    if isinstance(value, nnx.Variable):
        return value.get_value()
    if nn.meta.is_axis_metadata(value):
        return value.value
    return value


def _flatten_state(state: nnx.State) -> dict[str, Any]:
    """Return the arrays of an `nnx.State` by path, without random state."""
    values = {}
    for path, leaf in nnx.to_flat_state(state):
        if isinstance(leaf, nnx.RngState):
            continue
        if isinstance(leaf, nnx.Variable):
            leaf = leaf.get_value()
        values["/".join(map(str, path))] = leaf
    return values


def nnx_annotations(state: Any) -> dict[str, Annotation]:
    """Return the annotations in an `nnx.State`: its metadata `out_sharding` and `sharding_rules`.

    Example:
        >>> init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        >>> with nnx.use_eager_sharding(False):
        ...     layer = nnx.eval_shape(lambda: nnx.Linear(4, 8, kernel_init=init, rngs=nnx.Rngs(0)))
        >>> nnx_annotations(nnx.state(layer))["kernel"].names
        ('embed', 'mlp')
    """
    found = {}
    for path, variable in nnx.to_flat_state(state):
        fields = _nnx_fields(variable.get_metadata(), variable.get_value())
        found["/".join(map(str, path))] = fields
    return _annotations(found)


PARAMS_AXES = "params_axes"
"""The collection of T5X's names of dimensions, by `flax.linen.partitioning.param_with_axes`."""


def linen_annotations(variables: Any, params_axes: Any = None) -> dict[str, Annotation]:
    """Return the annotations of Linen parameters.

    They are the boxes `nn.Partitioned` and `nn.LogicallyPartitioned`, and `NNXMeta` of
    `nnx.bridge`. `params_axes` is T5X's collection `PARAMS_AXES`; its names are logical.

    Example:
        >>> init = nn.with_partitioning(nn.initializers.ones, ("fsdp", "tensor"))
        >>> import jax
        >>> dense = nn.Dense(8, use_bias=False, kernel_init=init)
        >>> variables = jax.eval_shape(dense.init, jax.random.key(0), jax.numpy.ones((1, 4)))
        >>> linen_annotations(variables["params"])["kernel"]
        Annotation(names=('fsdp', 'tensor'), shape=(4, 8), rules=(), is_logical=False)
    """
    found: dict[str, tuple[Any, ...]] = {}
    for path, box in tree.flatten(variables, is_leaf=nn.meta.is_axis_metadata).items():
        if isinstance(box, nn.LogicallyPartitioned):
            found[path] = (box.names, box.value.shape, box.rules or (), True)
        elif isinstance(box, nn.Partitioned):
            found[path] = (box.names, box.value.shape)
        elif isinstance(box, nnx.bridge.NNXMeta):
            found[path] = _nnx_fields(box.metadata, box.value)
    named = tree.flatten(params_axes or {}, is_leaf=_is_axis_metadata)
    for path, leaf in flatten_module(variables).items():
        metadata = named.get(f"{path}_axes")
        if metadata is not None:
            found[path] = (metadata.names, leaf.shape, (), True)
    return _annotations(found)


def _is_axis_metadata(leaf: Any) -> bool:
    return isinstance(leaf, partitioning.AxisMetadata)


def _nnx_fields(metadata: Mapping[str, Any], value: Any) -> tuple[Any, ...]:
    """Return the first fields of an `Annotation`."""
    names = metadata.get("out_sharding")
    rules = metadata.get("sharding_rules") or ()
    return names, getattr(value, "shape", ()), rules


def _annotations(found: Mapping[str, tuple[Any, ...]]) -> dict[str, Annotation]:
    """Return the annotations with these fields; parameters without names have none."""
    annotations = {}
    problems = []
    for path, fields in found.items():
        names = fields[0]
        if names is None:
            continue
        try:
            annotations[path] = Annotation(*fields)
        except RuleError as error:
            for problem in error.problems:
                where = f"{path}, {problem.where}"
                problems.append(dataclasses.replace(problem, where=where))
    if problems:
        raise RuleError("Invalid annotations:", problems)
    return annotations
