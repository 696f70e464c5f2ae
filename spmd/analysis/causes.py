"""Attribution of collectives to sharding rules, annotations and source lines.

Operations of the plan and of layers have name scopes (`spmd.plan.scopes`), so most collectives name
their parameter, activation or purpose in the metadata of the compiled program. Sums over split
dimensions are found by operation and source line. All others are the compiler's choice and have no
rule.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from types import MappingProxyType

from spmd.analysis.annotated import Annotated
from spmd.analysis.collective_record import Cause, Collective
from spmd.coded_comm.codes import SUM
from spmd.plan.plan import ShardingPlan
from spmd.plan.records import PlanEntry
from spmd.plan.scopes import METRICS, OPTIMIZER, REPLICAS, read_comm, read_names, read_scope
from spmd.sharding.mesh import BATCH_SPEC, entry_axes, spec_axes
from spmd.sharding.optimizer_state import drop_gathered
from spmd.sharding.rules import spec_text

NO_RULE = "no rule"
"""Begins the text of a collective that is the compiler's choice."""

GRADIENT = "gradient"
USED_WHOLE = "used whole"
NEW_VALUE = "new value"
PRODUCT = "sum of products"
"""Uses of a parameter that need a transfer of it, of its gradient or of its products."""

_NOTHING: Annotated = MappingProxyType({})
EXPLICIT = (
    "all_gather",
    "all_to_all",
    "pmax",
    "pmin",
    "ppermute",
    "psum",
    "ragged_all_to_all",
    "reduce_scatter",
)
_CONSTRAINTS = ("sharding_constraint", "shard_map")
# Partitioners move them before a gather.
_CONVERSIONS = ("clamp", "convert_element_type", "div", "mul", "round")
_PRODUCTS = ("add", "dot_general")  # compilers add products before they sum over devices
_SUMS = ("add", "argmax", "argmin", "conv_general_dilated", "dot_general", "reduce", "scatter")
_TOKENS = set(spec_axes(BATCH_SPEC))


def add_causes(
    records: Iterable[Collective], plan: ShardingPlan, annotated: Annotated = _NOTHING
) -> tuple[Collective, ...]:
    """Return the records of a step of the plan, each with its cause."""
    search = _Search(plan, annotated)
    found = []
    for record in records:
        cause = search.cause(_Origin.read(record))
        found.append(dataclasses.replace(record, cause=cause))
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class _Origin:
    """A collective, and its JAX operation by the metadata of the program.

    Attributes:
        op_name: Name of the operation; of the last one if the compiler fused several.
        steps: Name scopes of that operation, then its primitive.
        scope: `"annotate"` or `"param"`, and in `name` its activation or parameter; else empty.
    """

    record: Collective
    op_name: str
    steps: list[str]
    scope: str
    name: str

    @classmethod
    def read(cls, record: Collective) -> "_Origin":
        """Read the names of a collective's operations."""
        names = read_names(record.op_name)
        scope = name = ""
        for op_name in reversed(names):
            scope, name = read_scope(op_name)
            if scope or name:
                break
        # Each replica's step is as a step by itself, and its region sends nothing.
        op_name = names[-1].replace(f"{REPLICAS}/shard_map/", "")
        return cls(record, op_name, op_name.split("/"), scope, name)

    @property
    def operation(self) -> str:
        """The primitive."""
        return self.steps[-1]

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes, empty if the groups are no product of axes."""
        return self.record.axes or ()

    @property
    def at(self) -> str:
        """Text on the source line; empty if it is unknown."""
        if not self.record.source:
            return ""
        return f" at {self.record.source}"

    @property
    def is_sum(self) -> bool:
        """True for a reduction over devices, unless it is a gather written as an all-reduce."""
        is_reduction = self.record.kind in ("all-reduce", "reduce-scatter")
        return is_reduction and self.record.equivalent_kind != "all-gather"

    @property
    def is_renamed(self) -> bool:
        """True for a collective of a `shard_map` under the name of a reshape, as by XLA:TPU."""
        return self.operation == "reshape" and "shard_map" in self.steps

    @property
    def is_explicit(self) -> bool:
        """True for a collective of a layer or of a sharding constraint."""
        if self.is_renamed or self.operation.startswith((*EXPLICIT, *_CONSTRAINTS)):
            return True
        # XLA:TPU may name a transfer after the operation that it is fused with.
        around = self.steps[-3:-1]
        return around[1:] == ["shard_map"] and bool(read_comm(around[0]))

    @property
    def is_converted(self) -> bool:
        """True if a parameter is sent in another dtype, or its gradient as codes."""
        if is_exchange_of_codes(self.record.kind, self.steps):
            return True
        return self.record.kind == "all-gather" and self.operation in _CONVERSIONS

    @property
    def is_windowed(self) -> bool:
        """True for a permute of a product in windows.

        XLA:TPU multiplies in windows, with permutes between them, in place of a gather or a sum.
        """
        return self.record.kind == "collective-permute" and self.operation == "dot_general"


class _Search:
    """Search for causes in the tables of one plan."""

    def __init__(self, plan: ShardingPlan, annotated: Annotated) -> None:
        self.plan = plan
        self.annotated = annotated
        self.activations = dict(plan.rules.activations)
        self.entries: dict[str, PlanEntry] = {}
        for table in ("transforms", "variables", "params"):
            for entry in plan.entries(table):
                self.entries[entry.path] = entry
                self.entries[plan.rules.layer_path(entry.path)[0]] = entry

    def cause(self, origin: _Origin) -> Cause:
        """Return the cause of one collective."""
        return next(self._candidates(origin))

    def _candidates(self, origin: _Origin) -> Iterator[Cause]:
        """Yield possible causes, the strongest evidence first."""
        record = origin.record
        if origin.scope == "annotate" and origin.name in self.activations:
            yield self._annotation(origin.name, origin.at)
        yield from self._moved_parameter(origin)
        if record.array.startswith("optimizer_state/") or OPTIMIZER in origin.steps:
            yield Cause("step", f"optimizer, ZeRO {self.plan.zero}{origin.at}")
        if METRICS in origin.steps:
            yield Cause("step", f"metrics{origin.at}")
        yield from self._scope_of_parameter(origin)
        if origin.is_explicit:
            yield self._layer(origin)
        factor = self.entries.get(_param(record.factor))
        if factor:
            yield self._rule(factor, PRODUCT)
        yield from self._sum(origin)
        yield from self._activation_after(origin)
        if origin.is_sum and not record.op_name:
            # XLA:TPU packs the transfers between slices into one array without a name.
            yield Cause("sum", f"sums over {record.over}, combined by the compiler")
        where = record.source or record.op_name or record.instruction
        hint = f"{where} ({origin.operation}); name the activation with annotate"
        yield Cause("none", f"{NO_RULE}: {hint}")

    def _moved_parameter(self, origin: _Origin) -> Iterator[Cause]:
        """Yield the rule of a parameter for transfers of it, its gradient or its new value."""
        entry = self.entries.get(_param(origin.record.array))
        if entry is None:
            return
        # A gather over axes that split the parameter during its use, too, has another purpose.
        used = _axes(drop_gathered(entry.spec))
        if origin.is_sum or not used.intersection(origin.axes):
            yield self._rule(entry, self._use(entry, origin))

    def _scope_of_parameter(self, origin: _Origin) -> Iterator[Cause]:
        """Yield the rule of the parameter in the name scope of the operation."""
        if origin.scope != "param":
            return
        entry = self.entries.get(origin.name)
        if entry and (origin.is_sum or origin.is_explicit or origin.is_converted):
            yield self._rule(entry, self._use(entry, origin))

    def _layer(self, origin: _Origin) -> Cause:
        """Return a layer's own collective as the cause, with the purpose in its name scope."""
        what = origin.operation
        if origin.is_renamed or not what.startswith((*EXPLICIT, *_CONSTRAINTS)):
            what = origin.record.kind
        purpose = read_comm(origin.op_name)
        if purpose:
            what = f"{purpose} ({what})"
        return Cause("layer", f"{what}{origin.at}")

    def _sum(self, origin: _Origin) -> Iterator[Cause]:
        """Yield a sum over a split dimension as the cause: of the batch, or of activations."""
        axes = origin.axes
        is_sum = origin.is_sum and origin.operation.startswith(_SUMS)
        if not axes or not (is_sum or origin.is_windowed):
            return
        if origin.is_sum and _TOKENS.issuperset(axes):
            yield Cause("sum", f"sum over the batch{origin.at}")
        names = []
        for name, spec in self.activations.items():
            if axes in [entry_axes(entry) for entry in spec]:
                names.append(name)
        if not names:
            return
        shown = ", ".join(names[:2])
        if len(names) > 2:
            shown += ", …"
        what = "product in windows" if origin.is_windowed else "sum"
        yield Cause("sum", f"{what} over {origin.record.over}{origin.at}, which splits {shown}")

    def _activation_after(self, origin: _Origin) -> Iterator[Cause]:
        """Yield the annotation of an activation computed from the moved array."""
        record = origin.record
        if not origin.is_sum:
            name = self.annotated.get((origin.operation, record.source), "")
            if name:
                yield self._annotation(name, origin.at)
        if record.array.startswith("batch/"):  # XLA:TPU moves it before the first operation
            for name, spec in self.activations.items():
                if not _axes(spec[:1]).intersection(origin.axes):
                    yield self._annotation(name, f" of {record.array}")

    def _annotation(self, name: str, at: str) -> Cause:
        return Cause("annotate", f"annotate {name!r}{at} → {spec_text(self.activations[name])}")

    def _use(self, entry: PlanEntry, origin: _Origin) -> str:
        """Return the purpose of a transfer: whole use, product, gradient or new value."""
        record = origin.record
        if OPTIMIZER in origin.steps:
            return NEW_VALUE
        if SUM in origin.steps or is_exchange_of_codes(record.kind, origin.steps):
            return GRADIENT
        axes = set(origin.axes)
        if origin.is_sum:
            if axes <= _axes(drop_gathered(entry.spec)) and origin.operation in _PRODUCTS:
                return PRODUCT
            return GRADIENT
        is_gather = "all-gather" in (record.kind, record.equivalent_kind) and axes <= _axes(
            entry.spec
        )
        if is_gather or _is_forward(origin) or origin.operation.startswith("all_gather"):
            return USED_WHOLE
        return GRADIENT

    def _rule(self, entry: PlanEntry, use: str) -> Cause:
        text = f"rule {entry.rule!r} → {entry.requested}: {use}"
        if use != PRODUCT:
            text += f", ZeRO {self.plan.zero}"
        return Cause("rule", text, entry.path, use)


def is_exchange_of_codes(kind: str, steps: Iterable[str]) -> bool:
    """Return whether a collective in a parameter's scope sends codes of its gradient.

    The codes are those of `spmd.coded_comm.codes`. They are the only all-to-all in such a region;
    XLA:TPU names it after a reshape.
    """
    return kind == "all-to-all" and "shard_map" in steps


def _is_forward(origin: _Origin) -> bool:
    """Return whether a collective moves a parameter for its use, in the forward pass."""
    op_name = origin.record.op_name
    if "transpose(" in op_name or origin.operation in EXPLICIT:
        return False
    # Outside of the derivative, a parameter's scope has only the transfers for its use.
    return "jvp(" in op_name or read_scope(op_name)[0] == "param"


def _param(array: str) -> str:
    """Return the path of a parameter or variable, or an empty string for another array."""
    table, _, path = array.partition("/")
    if table not in ("params", "variables", "transforms"):
        return ""
    return path


def _axes(spec: Iterable) -> set[str]:
    return set(spec_axes(spec))
