"""Conversion of Flax sharding metadata (`nn.with_logical_partitioning`, `nnx` `out_sharding`) to `spmd.Rules`.

Flax has several resolvers that differ; there is one here. A name that has a logical rule is a logical name. Rules are
tried in order, and a rule applies if none of its mesh axes is used in the array yet. Any other name is a mesh axis. A
name that is neither is an error.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import flax.linen as nn
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import Problem, RuleError, did_you_mean
from spmd.sharding.mesh import AXES, as_entry, entry_axes
from spmd.sharding.rules import Replicate, Rules, placement, repeated_axes, replicate, spec_text

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


def linen_annotations(variables: Any) -> dict[str, Annotation]:
    """Return the annotations of Linen variables: `nn.Partitioned`, `nn.LogicallyPartitioned` and `nnx.bridge` boxes.

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


def rules_from_annotations(
    annotations: Mapping[str, Annotation],
    *,
    logical: Any = (),
    stacked: Any = None,
    activations: Any = (),
    table: Rules | None = None,
) -> Rules:
    """Convert the sharding metadata of a Flax model to a table with one rule for each annotated parameter.

    Args:
        annotations: Parameter path → annotation, such as `model.info().annotations`.
        logical: `(logical name, mesh axis or tuple or None)` pairs. The first whose axes are free in the array
            applies; names without a pair are mesh axes.
        stacked: By default that of `table`.
        activations: Added to those of `table`.
        table: Rules for parameters without annotations. It must agree with the annotations that it covers.
    """
    base = table or Rules(())
    stack = Rules((), activations, base.stacked if stacked is None else stacked)
    resolver = _Resolver(logical_rules(logical), annotations)
    values = resolver.resolve(stack)
    problems, own = resolver.problems, {}
    if base.stacked != stack.stacked and table:
        problems.append(Problem("stacked", f"is {stack.stacked}, and in the table {base.stacked}", fix="keep one"))
    for path, value in values.items():
        name, leading = stack.layer_path(path)
        spec = P(*leading, *(value if isinstance(value, P) else ()))
        match = base.match(path)
        if match is None:
            own[f"^{re.escape(name)}"] = value
        elif placement(match.spec) != placement(spec):
            said = f"{match.rule} says {spec_text(match.spec)}"
            what = f"its annotation {annotations[path].names} means {spec_text(spec)}, and {said}"
            problems.append(Problem(path, what, fix="correct one of them"))
    if problems:
        raise RuleError("These annotations do not make a rule table:", problems)
    return Rules((*base.params, *own.items()), (*base.activations, *stack.activations), stack.stacked)


class _Resolver:
    """Resolution of dimension names to mesh axes, with the problems found."""

    def __init__(self, rules: LogicalRules, annotations: Mapping[str, Annotation]) -> None:
        self.rules, self.annotations = rules, annotations
        self.problems: list[Problem] = []

    def resolve(self, stack: Rules) -> dict[str, P | Replicate]:
        """Return the rule's value for one layer of each parameter without problems."""
        self._audit_rules()
        unknown: dict[tuple[Any, bool], list[str]] = {}
        values: dict[str, P | Replicate] = {}
        for path, annotation in self.annotations.items():
            before, leading = len(self.problems), stack.layer_path(path)[1]
            names = self._layer_names(path, annotation, leading)
            table = self._rules_of(path, annotation)
            missing = [name for name in names if _is_unknown(name, annotation, table)]
            for name in missing:
                unknown.setdefault((name, annotation.is_logical), []).append(path)
            if len(self.problems) == before and not missing and (value := self._value(path, names, table, leading)):
                values[path] = value
        for (name, is_logical), (path, *others) in unknown.items():
            choices = dict.fromkeys([rule for rule, _ in self.rules] + ([] if is_logical else list(AXES)))
            guess = did_you_mean(name, choices) if isinstance(name, str) else "a tuple holds mesh axes"
            what = "has no logical rule" + ("" if is_logical else " and is no mesh axis")
            detail = f"{path} {self.annotations[path].names}" + (f" and {len(others)} more" if others else "")
            fix = f"{guess}; add ({name!r}, …) to the logical rules, or ({name!r}, None) to leave it whole"
            self._add(f"name {name!r}", what, detail, fix)
        for path, other in stack.differing_layers(values):
            what = f"has another annotation than {other}: layers of one stack have one spec"
            self._add(path, what, fix="remove their name from stacked=")
        return values

    def _add(self, where: str, what: str, detail: str = "", fix: str = "") -> None:
        self.problems.append(Problem(where, what, detail, fix))

    def _audit_rules(self) -> None:
        """Check the axes of the rules in use; rules for other models may name any axis."""
        named = {name for annotation in self.annotations.values() for name in annotation.names}
        tables = {"logical rule": self.rules}
        tables |= {f"{path}, its rule": annotation.rules for path, annotation in self.annotations.items()}
        for where, table in tables.items():
            for index, (name, axes) in enumerate(table):
                for axis in set(axes).difference(AXES) if name in named else ():
                    what = f"names the unknown axis {axis!r}"
                    self._add(f"{where} {index} ({name!r})", what, fix=did_you_mean(axis, AXES))

    def _layer_names(self, path: str, annotation: Annotation, leading: Sequence[str | None]) -> tuple[Any, ...]:
        """Return the names of one layer's dimensions; those of stacked dimensions must agree with `stacked`."""
        names, rank, stack = annotation.names, len(annotation.shape), len(leading)
        what = f"its annotation {names} has {len(names)} names for the shape {annotation.shape}"
        detail = f"{len(names)} names for {rank} dimensions"
        if len(names) > rank:
            fix = "pass the name to the transformation that removes the dimension (partition_name)"
            self._add(path, what, detail, fix)
            return names
        if not stack or len(names) == rank - stack or not any(names):
            return names[: rank - stack]
        if len(names) != rank:
            fix = f"name all {rank}, or the {rank - stack} of one layer"
            self._add(path, f"{what}, of which {stack} is stacked", detail, fix)
            return names
        for name, axis in zip(names, leading, strict=False):
            choices = [axes for rule, axes in (*annotation.rules, *self.rules) if rule == name]
            if not choices and isinstance(name, str) and name not in AXES:
                continue  # nnx.vmap or nn.scan named the stacked dimension; its axis is in `stacked`
            choices = choices or [entry_axes(name)]
            if not {(), entry_axes(axis)} & set(choices):
                what = f"its stacked dimension is {name!r}, which means {choices[0]}; stacked= says {axis!r}"
                self._add(path, what, fix="make them agree")
        return names[stack:]

    def _rules_of(self, path: str, annotation: Annotation) -> LogicalRules:
        """Return the parameter's own rules, then the common rules for other names."""
        own = {name for name, _ in annotation.rules}
        for name in dict.fromkeys(name for name in annotation.names if name in own):
            mine, theirs = ([axes for rule, axes in table if rule == name] for table in (annotation.rules, self.rules))
            if theirs and mine != theirs:
                what = f"its metadata says {name!r} → {mine}, and the logical rules say {theirs}"
                self._add(path, what, fix="keep one of them")
        return (*annotation.rules, *(rule for rule in self.rules if rule[0] not in own))

    def _value(
        self, path: str, names: Sequence[Any], table: LogicalRules, leading: Iterable[str | None]
    ) -> P | Replicate | None:
        """Apply each rule in order to dimensions of its name without axes yet, if the rule's axes are free."""
        with_rule = {rule for rule, _ in table}
        entries = [None if isinstance(name, str) and name in with_rule else entry_axes(name) for name in names]
        said = f"its annotation {tuple(names)}"
        twice = repeated_axes((*leading, *entries))
        for axis in twice:
            self._add(path, f"{said} uses the axis {axis!r} twice", fix="keep one of them")
        if twice:
            return None
        used = {axis for entry in (*leading, *entries) for axis in entry_axes(entry)}
        for rule, axes in table:
            for dim, name in enumerate(names):
                if name == rule and entries[dim] is None and not set(axes) & used:
                    entries[dim] = axes
                    used.update(axes)
        taken = dict.fromkeys(name for name, entry in zip(names, entries, strict=True) if entry is None)
        for name in taken:
            what = f"{said}: every rule for {name!r} names an axis that is taken"
            self._add(path, what, fix=f"add ({name!r}, None) after them to leave it whole in that case")
        if taken:
            return None
        if not any(entries):
            return replicate(f"annotated {tuple(names)}: no mesh axis")
        return P(*(as_entry(entry or ()) for entry in entries))


def _is_unknown(name: Any, annotation: Annotation, table: LogicalRules) -> bool:
    if isinstance(name, str) and any(rule == name for rule, _ in table):
        return False
    return any(axis not in AXES for axis in entry_axes(name)) or (isinstance(name, str) and annotation.is_logical)
