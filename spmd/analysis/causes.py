"""Causes of collectives: the rule, the annotation or the source line that makes each of them necessary.

Operations of the plan and of layers have name scopes (`spmd.plan.scopes`), so most collectives name their parameter,
activation or purpose in the metadata of the compiled program. Sums over split dimensions are found by operation and
source line. What remains is the compiler's choice, and has no rule.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from types import MappingProxyType

from spmd.analysis.annotated import Annotated
from spmd.analysis.collective_record import Cause, Collective
from spmd.coded_comm.codes import SUM
from spmd.plan.plan import ShardingPlan
from spmd.plan.records import PlanEntry
from spmd.plan.scopes import METRICS, OPTIMIZER, read_comm, read_names, read_scope
from spmd.sharding.mesh import BATCH_SPEC, entry_axes
from spmd.sharding.optimizer_state import drop_fsdp
from spmd.sharding.rules import spec_text

NO_RULE = "no rule"
"""Begins the text of a collective that is the compiler's choice."""

GRADIENT, USED_WHOLE, NEW_VALUE, PRODUCT = "gradient", "used whole", "new value", "sum of products"
"""Uses of a parameter, for which it, its gradient or its products are sent."""

_NOTHING: Annotated = MappingProxyType({})
EXPLICIT = ("all_gather", "all_to_all", "pmax", "pmin", "ppermute", "psum", "ragged_all_to_all", "reduce_scatter")
_CONSTRAINTS = ("sharding_constraint", "shard_map")
_CONVERSIONS = ("clamp", "convert_element_type", "div", "mul", "round")  # partitioners move them before a gather
_PRODUCTS = ("add", "dot_general")  # compilers add products before they sum over devices
_SUMS = ("add", "argmax", "argmin", "conv_general_dilated", "dot_general", "reduce", "scatter")
_TOKENS = {axis for entry in BATCH_SPEC for axis in entry_axes(entry)}


def add_causes(
    records: Iterable[Collective], plan: ShardingPlan, annotated: Annotated = _NOTHING
) -> tuple[Collective, ...]:
    """Return the records of a step of the plan, each with its cause."""
    search = _Search(plan, annotated)
    return tuple(dataclasses.replace(record, cause=search.cause(record)) for record in records)


class _Search:
    """Search for causes in the tables of one plan."""

    def __init__(self, plan: ShardingPlan, annotated: Annotated) -> None:
        self.plan, self.annotated = plan, annotated
        self.activations = dict(plan.rules.activations)
        self.entries: dict[str, PlanEntry] = {}
        for table in ("transforms", "variables", "params"):
            for entry in plan.entries(table):
                self.entries |= {entry.path: entry, plan.rules.layer_path(entry.path)[0]: entry}

    def cause(self, record: Collective) -> Cause:
        """Return the cause of one collective."""
        return next(self._candidates(record))

    def _candidates(self, record: Collective) -> Iterator[Cause]:
        *_, op_name = names = read_names(record.op_name)
        scope, name = next(filter(any, map(read_scope, reversed(names))), ("", ""))
        at, axes = f" at {record.source}" if record.source else "", record.axes or ()
        steps = op_name.split("/")
        operation = steps[-1]
        is_sum = _is_sum(record)
        own, factor = map(_param, (record.array, record.factor))
        if scope == "annotate" and name in self.activations:
            yield self._annotation(name, at)
        # A parameter that is gathered over axes that split it in its use, too, is gathered for something else.
        if (entry := self.entries.get(own)) and (is_sum or not _axes(drop_fsdp(entry.spec)).intersection(axes)):
            yield self._rule(entry, self._use(entry, record, steps))
        if record.array.startswith("optimizer_state/") or OPTIMIZER in steps:
            yield Cause("step", f"optimizer, ZeRO {self.plan.zero}{at}")
        if METRICS in steps:
            yield Cause("step", f"metrics{at}")
        # XLA:TPU names a collective of a layer after a reshape of its result.
        is_renamed = operation == "reshape" and "shard_map" in steps
        is_explicit = is_renamed or operation.startswith((*EXPLICIT, *_CONSTRAINTS))
        is_converted = record.kind == "all-gather" and operation in _CONVERSIONS
        is_converted |= is_exchange_of_codes(record.kind, steps)
        if scope == "param" and (entry := self.entries.get(name)) and (is_sum or is_explicit or is_converted):
            yield self._rule(entry, self._use(entry, record, steps))
        if is_explicit:
            what = record.kind if is_renamed else operation
            if purpose := read_comm(op_name):
                what = f"{purpose} ({what})"
            yield Cause("layer", f"{what}{at}")
        if entry := self.entries.get(factor):
            yield self._rule(entry, PRODUCT)
        # XLA:TPU multiplies in windows, with permutes between them, in place of a gather or a sum.
        is_windowed = record.kind == "collective-permute" and operation == "dot_general"
        if (is_windowed or (is_sum and operation.startswith(_SUMS))) and axes:
            if is_sum and _TOKENS.issuperset(axes):
                yield Cause("sum", f"sum over the batch{at}")
            if names := [name for name, spec in self.activations.items() if axes in [entry_axes(e) for e in spec]]:
                shown = ", ".join(names[:2]) + (", …" if len(names) > 2 else "")
                what = "product in windows" if is_windowed else "sum"
                yield Cause("sum", f"{what} over {record.over}{at}, which splits {shown}")
        if not is_sum and (name := self.annotated.get((operation, record.source), "")):
            yield self._annotation(name, at)
        if record.array.startswith("batch/"):  # XLA:TPU moves it before the first operation
            fewer = (name for name, spec in self.activations.items() if not _axes(spec[:1]).intersection(axes))
            if name := next(fewer, ""):
                yield self._annotation(name, f" of {record.array}")
        if is_sum and not record.op_name:  # XLA:TPU packs what it sends between slices into one array without a name
            yield Cause("sum", f"sums over {record.over}, combined by the compiler")
        where = record.source or record.op_name or record.instruction
        yield Cause("none", f"{NO_RULE}: {where} ({operation}); name the activation with annotate")

    def _annotation(self, name: str, at: str) -> Cause:
        return Cause("annotate", f"annotate {name!r}{at} → {spec_text(self.activations[name])}")

    def _use(self, entry: PlanEntry, record: Collective, steps: list[str]) -> str:
        """Describe what is done with a parameter: its use whole, its product, its gradient, or its new value."""
        if OPTIMIZER in steps:
            return NEW_VALUE
        operation = steps[-1]
        if SUM in steps or is_exchange_of_codes(record.kind, steps):
            return GRADIENT
        if _is_sum(record):
            is_product = set(record.axes or ()) <= _axes(drop_fsdp(entry.spec)) and operation in _PRODUCTS
            return PRODUCT if is_product else GRADIENT
        # Outside of the derivative, only what moves a parameter for its use is in its scope.
        is_forward = "jvp(" in record.op_name or read_scope(record.op_name)[0] == "param"
        is_use = is_forward and "transpose(" not in record.op_name and operation not in EXPLICIT
        is_gather = "all-gather" in (record.kind, record.stands_for) and _axes(entry.spec).issuperset(record.axes or ())
        return USED_WHOLE if is_use or is_gather or operation.startswith("all_gather") else GRADIENT

    def _rule(self, entry: PlanEntry, use: str) -> Cause:
        zero = "" if use == PRODUCT else f", ZeRO {self.plan.zero}"
        return Cause("rule", f"rule {entry.rule!r} → {entry.requested}: {use}{zero}", entry.path, use)


def is_exchange_of_codes(kind: str, steps: Iterable[str]) -> bool:
    """Return whether a collective in a parameter's scope sends codes of its gradient (`spmd.coded_comm.codes`).

    Nothing else is exchanged by all-to-all in such a region; XLA:TPU names it after a reshape.
    """
    return kind == "all-to-all" and "shard_map" in steps


def _is_sum(record: Collective) -> bool:
    return record.kind in ("all-reduce", "reduce-scatter") and record.stands_for != "all-gather"


def _param(array: str) -> str:
    """Return the path of a parameter or variable, or an empty string for another array."""
    table, _, path = array.partition("/")
    return path if table in ("params", "variables", "transforms") else ""


def _axes(spec: Iterable) -> set[str]:
    return {axis for entry in spec for axis in entry_axes(entry)}
