"""Sharding metadata of Flax modules: names of the dimensions of parameters, as NNX and Linen keep them.

NNX has them in a variable's metadata, Linen in a box around the parameter, and T5X in a collection beside `params`.
"""

import dataclasses
from collections.abc import Mapping
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
"""Pairs of logical name and mesh axes, in order of precedence. A dimension without axes is whole."""


@dataclasses.dataclass(frozen=True)
class Annotation:
    """Dimension names of one parameter, from its metadata.

    Args:
        names: For each dimension, from the first on, a name, a tuple of mesh axes, or None for whole. Flax's own forms
            (a list, a `PartitionSpec`, a `NamedSharding`) are accepted.
        rules: `(logical name, mesh axis or tuple or None)` pairs for this parameter alone.
        is_logical: Whether a name is never a mesh axis, as with `nn.with_logical_partitioning`.

    Example:
        >>> Annotation(P("embed", ("data", "fsdp")), (8, 4), rules=[("embed", "tensor")])
        Annotation(names=('embed', ('data', 'fsdp')), shape=(8, 4), rules=(('embed', ('tensor',)),), is_logical=False)
    """

    names: Any
    shape: tuple[int, ...]
    rules: Any = ()
    is_logical: bool = False

    def __post_init__(self) -> None:
        names = self.names.spec if isinstance(self.names, NamedSharding) else self.names
        if is_sequence := isinstance(names, tuple | list | P):
            names = tuple(tuple(name) if isinstance(name, list) else name for name in names)
        if wrong := [name for name in names if not _is_entry(name)] if is_sequence else [names]:
            what, fix = "is not a dimension name", "a tuple of names, one for each dimension"
            problems = [Problem(f"annotation {name!r}", what, fix=fix) for name in wrong]
            raise RuleError("This annotation cannot be read:", problems)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "rules", logical_rules(self.rules))


def _is_entry(value: Any) -> bool:
    """Return whether a value is a name, a tuple of names, or None."""
    names = value if isinstance(value, tuple) else () if value is None else (value,)
    return all(isinstance(name, str) for name in names)


def logical_rules(pairs: Any) -> LogicalRules:
    """Normalize logical rules.

    Example:
        >>> logical_rules([("embed", "fsdp"), ("mlp", ["fsdp", "tensor"]), ("norm", None)])
        (('embed', ('fsdp',)), ('mlp', ('fsdp', 'tensor')), ('norm', ()))
    """
    rules: list[tuple[str, tuple[str, ...]]] = []
    problems = []
    for index, (name, axes) in enumerate(pairs.items() if isinstance(pairs, Mapping) else pairs):
        axes = tuple(axes) if isinstance(axes, list) else axes
        if isinstance(name, str) and _is_entry(axes):
            rules.append((name, entry_axes(axes)))
        else:
            fix = "a mesh axis, a tuple of them, or None for whole"
            problems.append(Problem(f"logical rule {index} ({name!r})", f"has the value {axes!r}", fix=fix))
    if problems:
        raise RuleError("These logical rules cannot be read:", problems)
    return tuple(rules)


def flatten_module(params: Any) -> dict[str, Any]:
    """Return the arrays of an `nnx.State` or module, of Linen variables, or of any tree, by path, without boxes.

    Paths are those of `spmd.from_nnx` and `spmd.from_linen`. Random state, which needs no rule, is dropped.

    Example:
        >>> variables = {"params": {"kernel": nn.Partitioned(1.0, ("embed",))}, "batch_stats": {"mean": 2.0}}
        >>> flatten_module(variables), flatten_module(nnx.State({"kernel": nnx.Param(1.0)}))
        ({'batch_stats/mean': 2.0, 'kernel': 1.0}, {'kernel': 1.0})
    """
    if isinstance(params, nnx.Module):
        params = nnx.state(params)
    if isinstance(params, nnx.State):
        flat = {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(params)}
        kept = {path: leaf for path, leaf in flat.items() if not isinstance(leaf, nnx.RngState)}
        return {path: v.get_value() if isinstance(v, nnx.Variable) else v for path, v in kept.items()}
    in_collections = isinstance(params, Mapping) and isinstance(params.get("params"), Mapping)
    boxes = tree.flatten(params, is_leaf=nn.meta.is_axis_metadata)
    values = {path: box.value if nn.meta.is_axis_metadata(box) else box for path, box in boxes.items()}
    return {path.removeprefix("params/") if in_collections else path: value for path, value in values.items()}


def nnx_annotations(state: Any) -> dict[str, Annotation]:
    """Return the annotations in an `nnx.State`, from the metadata `out_sharding` and `sharding_rules`.

    Example:
        >>> init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        >>> with nnx.use_eager_sharding(False):
        ...     layer = nnx.eval_shape(lambda: nnx.Linear(4, 8, kernel_init=init, rngs=nnx.Rngs(0)))
        >>> {path: annotation.names for path, annotation in nnx_annotations(nnx.state(layer)).items()}
        {'kernel': ('embed', 'mlp')}
    """
    variables = {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    return _annotations({path: _nnx_fields(v.get_metadata(), v.get_value()) for path, v in variables.items()})


PARAMS_AXES = "params_axes"
"""The collection in which `flax.linen.partitioning.param_with_axes`, of T5X, keeps the names of dimensions."""


def linen_annotations(variables: Any, params_axes: Any = None) -> dict[str, Annotation]:
    """Return the annotations of Linen parameters: `nn.Partitioned`, `nn.LogicallyPartitioned` and `nnx.bridge` boxes.

    `params_axes` is the collection of that name; its names are logical.

    Example:
        >>> init = nn.with_partitioning(nn.initializers.ones, ("fsdp", "tensor"))
        >>> import jax
        >>> dense = nn.Dense(8, use_bias=False, kernel_init=init)
        >>> variables = jax.eval_shape(dense.init, jax.random.key(0), jax.numpy.ones((1, 4)))
        >>> linen_annotations(variables["params"])
        {'kernel': Annotation(names=('fsdp', 'tensor'), shape=(4, 8), rules=(), is_logical=False)}
    """
    found: dict[str, tuple[Any, ...]] = {}
    for path, box in tree.flatten(variables, is_leaf=nn.meta.is_axis_metadata).items():
        if isinstance(box, nn.LogicallyPartitioned):
            found[path] = (box.names, box.value.shape, box.rules or (), True)
        elif isinstance(box, nn.Partitioned):
            found[path] = (box.names, box.value.shape)
        elif isinstance(box, nnx.bridge.NNXMeta):
            found[path] = _nnx_fields(box.metadata, box.value)
    shapes = {path: leaf.shape for path, leaf in flatten_module(variables).items()}
    named = tree.flatten(params_axes or {}, is_leaf=lambda x: isinstance(x, partitioning.AxisMetadata))
    found |= {p: (named[f"{p}_axes"].names, shapes[p], (), True) for p in shapes if f"{p}_axes" in named}
    return _annotations(found)


def _nnx_fields(metadata: Mapping[str, Any], value: Any) -> tuple[Any, ...]:
    """Return the first fields of an `Annotation`."""
    return metadata.get("out_sharding"), getattr(value, "shape", ()), metadata.get("sharding_rules") or ()


def _annotations(found: Mapping[str, tuple[Any, ...]]) -> dict[str, Annotation]:
    annotations, problems = {}, []
    for path, fields in found.items():
        try:
            if fields[0] is not None:
                annotations[path] = Annotation(*fields)
        except RuleError as error:
            problems += [dataclasses.replace(problem, where=f"{path}, {problem.where}") for problem in error.problems]
    if problems:
        raise RuleError("These annotations cannot be read:", problems)
    return annotations
