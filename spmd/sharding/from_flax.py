"""Conversion of Flax sharding metadata to `spmd.Rules`.

The metadata is that of `nn.with_logical_partitioning` and of `out_sharding` of `nnx`. Flax has
several resolvers that differ; there is one here. A name that has a logical rule is a logical name.
Rules are tried in order, and a rule applies if none of its mesh axes is used in the array yet. Any
other name is a mesh axis. A name that is neither is an error.
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
from spmd.sharding.mesh import AXES, as_entry, entry_axes, spec_axes
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
    """Convert the sharding metadata of a Flax model to a table, with `table` for other parameters.

    Each annotated parameter without a match in `table` gets a rule.

    Args:
        annotations: Parameter path → annotation, such as `model.info().annotations`.
        logical: `(logical name, mesh axis or tuple or None)` pairs. The first whose axes are free
            in the array applies; names without a pair are mesh axes.
        axes: An axis in names and in `logical` → the mesh's axis, a tuple of them, or None:
            `{"model": "tensor", "fsdp_transpose": None}`.
        stacked: By default that of `table`. The dimension of a stack is read from the names, unless
            it is given.
        activations: Added to those of `table`.
        table: Rules for parameters without annotations. For annotated parameters, its specs must
            equal those of the annotations.
        report: Called with a text that lists the logical names with a rule but without an
            annotation, if there are any.
    """
    base = table or Rules(())
    stack = Rules((), activations, base.stacked if stacked is None else stacked)
    disagreement = []
    if table and base.stacks != stack.stacks:
        disagreement = [_other_stacks(stack, base)]
    stack = dataclasses.replace(stack, stacked=named_stacks(annotations, stack.stacks))
    base = dataclasses.replace(base, stacked=named_stacks(annotations, base.stacks))

    axes = axes or {}
    rules = _rename(logical_rules(logical), axes)
    renamed = {}
    for path, annotation in annotations.items():
        renamed[path] = _renamed(annotation, rules, axes)
    resolver = _Resolver(rules, renamed)
    values = resolver.resolve(stack)
    own_rows, disputed = _own_rows(annotations, values, stack, base)
    problems = [
        *resolver.problems,
        *disagreement,
        *audit_stack_names(annotations, stack.stacks),
        *disputed,
    ]
    if problems:
        raise RuleError("Annotations without a rule table:", problems)
    unused = _unused_names(rules, annotations)
    if unused:
        names = ", ".join(unused)
        report(f"Logical names that no parameter has, so their rules are unused: {names}")
    is_default = stacked is None and (table is None or table.stacked is None)
    kept = stack.stacked
    if is_default and not any(stacks_of(path, stack.stacks) for path in annotations):
        kept = None  # the stacks are those that the model recorded
    return Rules(
        params=(*base.params, *own_rows),
        activations=(*base.activations, *stack.activations),
        stacked=kept,
        batch=base.batch,
        logical=rules or base.logical,
    )


def _other_stacks(stack: Rules, base: Rules) -> Problem:
    """Return the problem of an argument `stacked` different from the table's."""
    theirs = base.stacked
    if theirs is None:
        theirs = DEFAULT_STACKED
    return Problem("stacked", f"is {stack.stacked}, and in the table {theirs}", fix="keep one")


def _own_rows(
    annotations: Mapping[str, Annotation],
    values: Mapping[str, P | Replicate],
    stack: Rules,
    base: Rules,
) -> tuple[list[tuple[str, P | Replicate]], list[Problem]]:
    """Return rows for the parameters without one in the table, and the problems of other specs.

    Those are specs of the table that differ from the annotation's.
    """
    rows: dict[str, P | Replicate] = {}
    problems = []
    names = stack.rule_names(values)
    for path, value in values.items():
        match = base.match(path)
        if match is None:
            rows[f"^{re.escape(names[path])}"] = value
            continue
        spec = stack.stored_spec(path, value)
        if placement(match.spec) != placement(spec):
            meant = f"its annotation {annotations[path].names} means {spec_text(spec)}"
            what = f"{meant}, and {match.rule} says {spec_text(match.spec)}"
            problems.append(Problem(path, what, fix="correct one of them"))
    return list(rows.items()), problems


def _unused_names(rules: LogicalRules, annotations: Mapping[str, Annotation]) -> list[str]:
    """Return the logical names with a rule but without an annotation, each once."""
    used: set[Any] = set()
    for annotation in annotations.values():
        used.update(annotation.names)
    unused = []
    for name in dict(rules):
        if name not in used:
            unused.append(name)
    return unused


def named_stacks(
    annotations: Mapping[str, Annotation], stacks: Mapping[str, Stack]
) -> dict[str, Stack]:
    """Return the stacks along the dimensions in the names of their parameters.

    Only default dimensions change.
    """
    found = _named_dims(annotations, stacks)
    named = {}
    for name, stack in stacks.items():
        dims = found.get(name, [])
        if not stack.dim and len(dims) == 1:
            stack = Stack(stack.axis, dims[0])
        named[name] = stack
    return named


def audit_stack_names(
    annotations: Mapping[str, Annotation], stacks: Mapping[str, Stack]
) -> list[Problem]:
    """Return a problem for each stack along another dimension than its parameters' names say.

    A stack that the names show and `stacks` lacks is a problem, too.
    """
    problems = []
    for name, dims in _named_dims(annotations, stacks).items():
        stack = stacks[name]
        if stack.dim in dims:
            continue
        problem = Problem(
            f"stacked[{name!r}]",
            f"is along dimension {stack.dim}, and the names of its parameters say {dims[0]}",
            fix=f'stacked={{"{name}": spmd.Stack({stack.axis!r}, dim={dims[0]})}}',
        )
        problems.append(problem)
    for (name, dim), paths in _unknown_stacks(annotations, stacks):
        component = posixpath.commonpath(map(posixpath.dirname, paths)) or "NAME"
        detail = f"{annotations[paths[0]].names}{_and_more(len(paths) - 1)}"
        problem = Problem(
            paths[0],
            f"its dimension {dim} is named {name!r}, and no component of its path is in stacked=",
            detail,
            fix=f'stacked={{"{component}": spmd.Stack(axis, dim={dim})}}',
        )
        problems.append(problem)
    return problems


def _unknown_stacks(
    annotations: Mapping[str, Annotation], stacks: Mapping[str, Stack]
) -> list[tuple[tuple[str, int], list[str]]]:
    """Return the dimensions named like stacked ones, of parameters in no stack, with their paths.

    Parameters with different first components of their paths are separate entries.
    """
    unknown: dict[tuple[Any, str, int], list[str]] = {}
    for path, annotation in annotations.items():
        if len(annotation.names) != len(annotation.shape) or stacks_of(path, stacks):
            continue
        for dim, name in enumerate(annotation.names):
            if _is_stack_name(name):
                key = (name, path.partition("/")[0], dim)
                unknown.setdefault(key, []).append(path)
    found = []
    for (name, _, dim), paths in unknown.items():
        found.append(((name, dim), paths))
    return found


def _and_more(count: int) -> str:
    """Return the number of further cases as the end of a text; empty for none."""
    if not count:
        return ""
    return f" and {count} more"


def _is_stack_name(name: Any) -> bool:
    """Return whether a dimension's name is from a scan over layers: `layers`, or `moe_layers`."""
    return isinstance(name, str) and name.rpartition("_")[2] == "layers"


def _named_dims(
    annotations: Mapping[str, Annotation], stacks: Mapping[str, Stack]
) -> dict[str, list[int]]:
    """Return the possible dimensions of each stack, from its parameters' names.

    They are the dimensions with the stack's name; without any, those common to its parameters.
    """
    members: dict[str, list[Annotation]] = {}
    for path, annotation in annotations.items():
        own = [name for name in stacks if stacks_of(path, [name])]
        if len(own) == 1 and len(annotation.names) == len(annotation.shape):
            members.setdefault(own[0], []).append(annotation)
    found = {}
    for stack, parts in members.items():
        dims = _called(stack, parts) or _common_dims(parts)
        if dims:
            found[stack] = dims
    return found


def _called(stack: str, parts: Iterable[Annotation]) -> list[int]:
    """Return the dimensions with the name of a stack, or with a scan's."""
    dims = set()
    for part in parts:
        for dim, name in enumerate(part.names):
            if name == stack or _is_stack_name(name):
                dims.add(dim)
    return sorted(dims)


def _common_dims(parts: Sequence[Annotation]) -> list[int]:
    """Return the dimensions of one name and one size in all parameters."""
    dims = []
    for dim in range(min(len(part.shape) for part in parts)):
        kinds = {(part.names[dim], part.shape[dim]) for part in parts}
        if len(kinds) == 1:
            dims.append(dim)
    return dims


def _rename(rules: LogicalRules, axes: Mapping[str, Any]) -> LogicalRules:
    """Return the rules with the mesh's axes, each once."""
    return tuple((name, _renamed_axes(entry, axes)) for name, entry in rules)


def _renamed_axes(entry: Any, axes: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the mesh's axes of an entry, each once."""
    renamed: list[str] = []
    for axis in entry_axes(entry):
        renamed += entry_axes(axes.get(axis, axis))
    return tuple(dict.fromkeys(renamed))


def _renamed(annotation: Annotation, rules: LogicalRules, axes: Mapping[str, Any]) -> Annotation:
    """Return the annotation with the mesh's axes, in its own rules and its names of axes."""
    own = _rename(annotation.rules, axes)
    logical = dict((*rules, *own))
    names = []
    for name in annotation.names:
        is_axis = name in axes and name not in logical and not annotation.is_logical
        if isinstance(name, tuple) or is_axis:
            name = _renamed_axes(name, axes)
        names.append(name)
    return dataclasses.replace(annotation, names=tuple(names), rules=own)


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
            problems_before = len(self.problems)
            leading = stack.layer_path(path)[1]
            names = self._layer_names(path, annotation, leading, dims_of(path, stack.stacks))
            table = self._rules_of(path, annotation)
            has_unknown = False
            for name in names:
                if _is_unknown(name, annotation, table):
                    has_unknown = True
                    unknown.setdefault((name, annotation.is_logical), []).append(path)
            if has_unknown or len(self.problems) > problems_before:
                continue
            value = self._value(path, names, table, leading)
            if value is not None:
                values[path] = value
        for (name, is_logical), paths in unknown.items():
            self._add_unknown(name, is_logical, paths)
        return values

    def _add_unknown(self, name: Any, is_logical: bool, paths: Sequence[str]) -> None:
        """Add the problem of a name with neither a logical rule nor a mesh axis."""
        choices = list(dict(self.rules))
        what = "has no logical rule"
        if not is_logical:
            choices += AXES
            what += " and is no mesh axis"
        guess = "a tuple holds mesh axes"
        if isinstance(name, str):
            guess = did_you_mean(name, dict.fromkeys(choices))
        path, *others = paths
        detail = f"{path} {self.annotations[path].names}{_and_more(len(others))}"
        fix = (
            f"{guess}; add ({name!r}, …) to the logical rules, "
            f"or ({name!r}, None) to leave it whole"
        )
        self._add(f"name {name!r}", what, detail, fix)

    def _add(self, where: str, what: str, detail: str = "", fix: str = "") -> None:
        self.problems.append(Problem(where, what, detail, fix))

    def _audit_rules(self) -> None:
        """Check the axes of the rules in use.

        Rules for other models may name any axis.
        """
        named: set[Any] = set()
        tables = {"logical rule": self.rules}
        for path, annotation in self.annotations.items():
            named.update(annotation.names)
            tables[f"{path}, its rule"] = annotation.rules
        for where, table in tables.items():
            for index, (name, axes) in enumerate(table):
                if name not in named:
                    continue
                for axis in set(axes).difference(AXES):
                    what = f"names the unknown axis {axis!r}"
                    self._add(f"{where} {index} ({name!r})", what, fix=did_you_mean(axis, AXES))

    def _layer_names(
        self,
        path: str,
        annotation: Annotation,
        leading: Sequence[str | None],
        dims: Sequence[int],
    ) -> tuple[Any, ...]:
        """Return the names of one layer's dimensions; stacked ones must agree with `stacked`."""
        names = annotation.names
        rank = len(annotation.shape)
        stacked = len(leading)
        what = f"its annotation {names} has {len(names)} names for the shape {annotation.shape}"
        detail = f"{len(names)} names for {rank} dimensions"
        if len(names) > rank:
            fix = "pass the name to the transformation that removes the dimension (partition_name)"
            self._add(path, what, detail, fix)
            return names
        if not stacked or len(names) == rank - stacked or not any(names):
            return names[: rank - stacked]
        if len(names) != rank:
            fix = f"name all {rank}, or the {rank - stacked} of one layer"
            self._add(path, f"{what}, of which {stacked} is stacked", detail, fix)
            return names
        for dim, axis in zip(dims, leading, strict=True):
            if dim < rank:
                self._audit_stacked_name(path, annotation, names[dim], axis)
        return without_dims(names, dims)

    def _audit_stacked_name(
        self, path: str, annotation: Annotation, name: Any, axis: str | None
    ) -> None:
        """Check that the name of a stacked dimension may mean the axis of its stack."""
        choices = _axes_of_name(name, (*annotation.rules, *self.rules))
        if not choices:
            if isinstance(name, str) and name not in AXES:
                return  # nnx.vmap or nn.scan named the stacked dimension; its axis is in `stacked`
            choices = [entry_axes(name)]
        if () not in choices and entry_axes(axis) not in choices:
            meaning = f"its stacked dimension is {name!r}, which means {choices[0]}"
            self._add(path, f"{meaning}; stacked= says {axis!r}", fix="make them agree")

    def _rules_of(self, path: str, annotation: Annotation) -> LogicalRules:
        """Return the parameter's own rules, then the common rules for other names."""
        own = dict(annotation.rules)
        for name in dict.fromkeys(annotation.names):
            if name not in own:
                continue
            mine = _axes_of_name(name, annotation.rules)
            theirs = _axes_of_name(name, self.rules)
            if theirs and mine != theirs:
                what = f"its metadata says {name!r} → {mine}, and the logical rules say {theirs}"
                self._add(path, what, fix="keep one of them")
        rules = list(annotation.rules)
        for rule in self.rules:
            if rule[0] not in own:
                rules.append(rule)
        return tuple(rules)

    def _value(
        self,
        path: str,
        names: Sequence[Any],
        table: LogicalRules,
        leading: Iterable[str | None],
    ) -> P | Replicate | None:
        """Return the rule's value for one layer of a parameter; None if there is a problem."""
        entries = _explicit_entries(names, table)
        said = f"its annotation {tuple(names)}"
        twice = repeated_axes((*leading, *entries))
        for axis in twice:
            self._add(path, f"{said} uses the axis {axis!r} twice", fix="keep one of them")
        if twice:
            return None
        _apply_rules(names, entries, table, leading)
        taken: dict[Any, None] = {}
        for name, entry in zip(names, entries, strict=True):
            if entry is None:
                taken[name] = None
        for name in taken:
            what = f"{said}: every rule for {name!r} names an axis that is taken"
            self._add(
                path, what, fix=f"add ({name!r}, None) after them to leave it whole in that case"
            )
        if taken:
            return None
        if not any(entries):
            return replicate(f"annotated {tuple(names)}: no mesh axis")
        return P(*(as_entry(entry or ()) for entry in entries))


def _axes_of_name(name: Any, rules: LogicalRules) -> list[tuple[str, ...]]:
    """Return the axes of each rule for a name, in order."""
    return [axes for rule, axes in rules if rule == name]


def _explicit_entries(names: Iterable[Any], table: LogicalRules) -> list[tuple[str, ...] | None]:
    """Return the mesh axes given directly as names; None for logical names."""
    logical = dict(table)
    entries: list[tuple[str, ...] | None] = []
    for name in names:
        if isinstance(name, str) and name in logical:
            entries.append(None)
        else:
            entries.append(entry_axes(name))
    return entries


def _apply_rules(
    names: Sequence[Any],
    entries: list[tuple[str, ...] | None],
    table: LogicalRules,
    leading: Iterable[str | None],
) -> None:
    """Apply each rule in order to dimensions of its name without axes yet, if its axes are free."""
    used = set(spec_axes((*leading, *entries)))
    for rule, axes in table:
        for dim, name in enumerate(names):
            if name == rule and entries[dim] is None and used.isdisjoint(axes):
                entries[dim] = axes
                used.update(axes)


def _is_unknown(name: Any, annotation: Annotation, table: LogicalRules) -> bool:
    """Return whether a name has no logical rule and is no mesh axis."""
    if isinstance(name, str):
        if _axes_of_name(name, table):
            return False
        if annotation.is_logical:
            return True
    return not set(AXES).issuperset(entry_axes(name))
