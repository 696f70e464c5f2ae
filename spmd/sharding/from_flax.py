"""Conversion of Flax sharding metadata (`nn.with_logical_partitioning`, `nnx` `out_sharding`) to `spmd.Rules`.

Flax has several resolvers that differ; there is one here. A name that has a logical rule is a logical name. Rules are
tried in order, and a rule applies if none of its mesh axes is used in the array yet. Any other name is a mesh axis. A
name that is neither is an error.
"""

import dataclasses
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from spmd.errors import Problem, RuleError, did_you_mean
from spmd.sharding.flax_metadata import Annotation, LogicalRules, logical_rules
from spmd.sharding.layer_paths import DEFAULT_STACKED, Stack, dims_of, stacks_of, without_dims
from spmd.sharding.mesh import AXES, as_entry, entry_axes
from spmd.sharding.rules import Replicate, Rules, placement, repeated_axes, replicate, spec_text


def rules_from_annotations(
    annotations: Mapping[str, Annotation],
    *,
    logical: Any = (),
    axes: Mapping[str, Any] | None = None,
    stacked: Any = None,
    activations: Any = (),
    table: Rules | None = None,
    report: Callable[[str], object] = print,
) -> Rules:
    """Convert the sharding metadata of a Flax model to a table with one rule for each annotated parameter.

    Args:
        annotations: Parameter path → annotation, such as `model.info().annotations`.
        logical: `(logical name, mesh axis or tuple or None)` pairs. The first whose axes are free in the array
            applies; names without a pair are mesh axes.
        axes: An axis in names and in `logical` → the mesh's axis, a tuple of them, or None:
            `{"model": "tensor", "fsdp_transpose": None}`.
        stacked: By default that of `table`. The dimension of a stack is read from the names, unless it is given.
        activations: Added to those of `table`.
        table: Rules for parameters without annotations. It must agree with the annotations that it covers.
        report: Called with a text that lists the logical names that no annotation has, if there are any.
    """
    base, other = table or Rules(()), []
    stack = Rules((), activations, base.stacked if stacked is None else stacked)
    if base.stacks != stack.stacks and table:
        theirs = DEFAULT_STACKED if base.stacked is None else base.stacked
        other = [Problem("stacked", f"is {stack.stacked}, and in the table {theirs}", fix="keep one")]
    stack, base = (dataclasses.replace(r, stacked=named_stacks(annotations, r.stacks)) for r in (stack, base))
    rules = _rename(logical_rules(logical), axes or {})
    resolver = _Resolver(rules, {path: _renamed(own, rules, axes or {}) for path, own in annotations.items()})
    values = resolver.resolve(stack)
    own, names = {}, stack.rule_names(values)
    problems = [*resolver.problems, *other, *audit_stack_names(annotations, stack.stacks)]
    for path, value in values.items():
        spec, match = stack.stored_spec(path, value), base.match(path)
        if match is None:
            own[f"^{re.escape(names[path])}"] = value
        elif placement(match.spec) != placement(spec):
            said = f"{match.rule} says {spec_text(match.spec)}"
            what = f"its annotation {annotations[path].names} means {spec_text(spec)}, and {said}"
            problems.append(Problem(path, what, fix="correct one of them"))
    if problems:
        raise RuleError("These annotations do not make a rule table:", problems)
    used = {name for annotation in annotations.values() for name in annotation.names}
    if unused := dict.fromkeys(name for name, _ in rules if name not in used):
        report(f"Logical names that no parameter has, so their rules are unused: {', '.join(unused)}")
    params, activations = (*base.params, *own.items()), (*base.activations, *stack.activations)
    is_default = stacked is None and (table is None or table.stacked is None)
    kept = stack.stacked
    if is_default and not any(stacks_of(path, stack.stacks) for path in annotations):
        kept = None  # the stacks are those that the model recorded
    return Rules(params, activations, kept, base.batch, rules or base.logical)


def named_stacks(annotations: Mapping[str, Annotation], stacks: Mapping[str, Stack]) -> dict[str, Stack]:
    """Return the stacks along the dimensions that the names of their parameters give; only default ones change."""
    found = _named_dims(annotations, stacks)
    return {
        name: Stack(stack.axis, found[name][0]) if not stack.dim and len(found.get(name, ())) == 1 else stack
        for name, stack in stacks.items()
    }


def audit_stack_names(annotations: Mapping[str, Annotation], stacks: Mapping[str, Stack]) -> list[Problem]:
    """Return a problem for each stack along another dimension than the names say, or that `stacks` does not have."""
    problems = []
    for name, dims in _named_dims(annotations, stacks).items():
        if stacks[name].dim not in dims:
            what = f"is along dimension {stacks[name].dim}, and the names of its parameters say {dims[0]}"
            fix = f'stacked={{"{name}": spmd.Stack({stacks[name].axis!r}, dim={dims[0]})}}'
            problems.append(Problem(f"stacked[{name!r}]", what, fix=fix))
    unknown: dict[tuple[Any, str, int], list[str]] = {}
    for path, annotation in annotations.items():
        if len(annotation.names) == len(annotation.shape) and not stacks_of(path, stacks):
            for dim, name in enumerate(annotation.names):
                if _is_stack_name(name):
                    unknown.setdefault((name, path.partition("/")[0], dim), []).append(path)
    for (name, _, dim), paths in unknown.items():
        stack = posixpath.commonpath([posixpath.dirname(path) for path in paths]) or "NAME"
        what = f"its dimension {dim} is named {name!r}, and no component of its path is in stacked="
        detail = f"{annotations[paths[0]].names}" + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
        problems.append(Problem(paths[0], what, detail, f'stacked={{"{stack}": spmd.Stack(axis, dim={dim})}}'))
    return problems


def _is_stack_name(name: Any) -> bool:
    """Return whether a dimension's name is one that a scan over layers is given: `layers`, or `moe_layers`."""
    return isinstance(name, str) and name.rpartition("_")[2] == "layers"


def _named_dims(annotations: Mapping[str, Annotation], stacks: Mapping[str, Stack]) -> dict[str, list[int]]:
    """Return the dimensions that may be those of each stack, as names say: one called so, or common to parameters."""
    members: dict[str, list[Annotation]] = {}
    for path, annotation in annotations.items():
        own = [name for name in stacks if stacks_of(path, [name])]
        if len(own) == 1 and len(annotation.names) == len(annotation.shape):
            members.setdefault(own[0], []).append(annotation)
    found = {}
    for stack, parts in members.items():
        called = {dim for part in parts for dim, name in enumerate(part.names) if name == stack or _is_stack_name(name)}
        every = range(min(len(part.shape) for part in parts))
        common = [dim for dim in every if len({(part.names[dim], part.shape[dim]) for part in parts}) == 1]
        if dims := sorted(called) or common:
            found[stack] = dims
    return found


def _rename(rules: LogicalRules, axes: Mapping[str, Any]) -> LogicalRules:
    """Return the rules with the mesh's axes, each once."""
    return tuple((name, _renamed_axes(entry, axes)) for name, entry in rules)


def _renamed_axes(entry: Any, axes: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(new for old in entry_axes(entry) for new in entry_axes(axes.get(old, old))))


def _renamed(annotation: Annotation, rules: LogicalRules, axes: Mapping[str, Any]) -> Annotation:
    """Return the annotation with the mesh's axes in its own rules, and in its names that are no logical ones."""
    own = _rename(annotation.rules, axes)
    logical = {name for name, _ in (*rules, *own)}

    def entry(name: Any) -> Any:
        is_axis = isinstance(name, tuple) or (name in axes and name not in logical and not annotation.is_logical)
        return _renamed_axes(name, axes) if is_axis else name

    return dataclasses.replace(annotation, names=tuple(map(entry, annotation.names)), rules=own)


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
            names = self._layer_names(path, annotation, leading, dims_of(path, stack.stacks))
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

    def _layer_names(
        self, path: str, annotation: Annotation, leading: Sequence[str | None], dims: Sequence[int]
    ) -> tuple[Any, ...]:
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
        for name, axis in ((names[dim], axis) for dim, axis in zip(dims, leading, strict=True) if dim < rank):
            choices = [axes for rule, axes in (*annotation.rules, *self.rules) if rule == name]
            if not choices and isinstance(name, str) and name not in AXES:
                continue  # nnx.vmap or nn.scan named the stacked dimension; its axis is in `stacked`
            choices = choices or [entry_axes(name)]
            if not {(), entry_axes(axis)} & set(choices):
                what = f"its stacked dimension is {name!r}, which means {choices[0]}; stacked= says {axis!r}"
                self._add(path, what, fix="make them agree")
        return without_dims(names, dims)

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
