"""Promises of a plan about the dtypes of transfers, and their violations by collectives.

A conversion to fewer bits does not prove that fewer bits are sent: a partitioner or a compiler may
move it behind the transfer. A check follows from a record of the plan's ledger
(`spmd.plan.communication`), so a new transfer is checked once it is recorded there.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax.numpy as jnp

from spmd.analysis.causes import EXPLICIT, GRADIENT, USED_WHOLE, is_exchange_of_codes
from spmd.analysis.collective_record import MIN_BYTES, Collective
from spmd.analysis.hlo import HloArray
from spmd.codecs import EXCHANGES, GATHERS
from spmd.errors import Problem
from spmd.plan.communication import Transfer, gathers, reductions
from spmd.plan.plan import ShardingPlan
from spmd.plan.scopes import BEFORE_START, read_names, read_scope
from spmd.tree import human_bytes


@dataclasses.dataclass(frozen=True)
class CommDtypeCheck:
    """The widest dtype promised for one parameter, or its gradient, in transfers over each axis.

    Attributes:
        param: Its path in the plan.
        use: `spmd.analysis.causes.USED_WHOLE` of the parameter, or `GRADIENT`.
        dtypes: Axis → dtype as XLA names it; nothing is promised over other axes.
        explicit: True if only the collectives that a layer writes are promised, not those of the
            partitioner.
        overhead: Bytes that may be wider, as a share of the others: the scales of quantized blocks.
        fix: The setting to change where the wider dtype is meant.
        largest: Axis → bytes of the largest array that is sent over it at once, between slices if
            there are several.
    """

    param: str
    use: str
    dtypes: Mapping[str, str]
    explicit: bool = False
    overhead: float = 0.0
    fix: str = ""
    largest: Mapping[str, int] = dataclasses.field(default_factory=dict)


def comm_dtype_checks(plan: ShardingPlan) -> Iterator[CommDtypeCheck]:
    """Yield the checks of a plan, from its ledger of communication.

    Gradients have the dtypes of the ledger where a layer reduces them (`spmd.plan.sharded_param`),
    as layers do for their kernels. For other parameters only an explicit collective shows that a
    layer does. Gathers of parameters are checked if they are sent as codes.
    """
    kernels = plan.model.info().wrappable
    trained = {entry.path for entry in plan.params}
    for path, sent in _by_path(reductions(plan)).items():
        yield _gradient_check(path, sent, explicit=path not in kernels)
    for transfer in gathers(plan):
        if transfer.dtype in GATHERS and transfer.path in trained:
            yield _gather_check(transfer)


def _by_path(transfers: Iterable[Transfer]) -> dict[str, list[Transfer]]:
    """Return the transfers of each parameter."""
    found: dict[str, list[Transfer]] = {}
    for transfer in transfers:
        found.setdefault(transfer.path, []).append(transfer)
    return found


def _gradient_check(path: str, sent: Iterable[Transfer], *, explicit: bool) -> CommDtypeCheck:
    """Return the check of a gradient, from its reductions over each axis."""
    dtypes = {}
    scales = 0.0
    largest = {}
    for transfer in sent:
        (axis,) = transfer.axes
        dtypes[axis] = _wire_dtype(transfer.dtype)
        scales = max(scales, _SCALES.get(transfer.dtype, 0.0))
        if transfer.arrays:
            largest[axis] = max(transfer.arrays)
    return CommDtypeCheck(
        path,
        GRADIENT,
        dtypes,
        explicit=explicit,
        overhead=scales,
        fix='compress.gradients="float32", if these bytes are meant',
        largest=largest,
    )


def _gather_check(transfer: Transfer) -> CommDtypeCheck:
    """Return the check of a parameter gathered as codes."""
    return CommDtypeCheck(
        transfer.path,
        USED_WHOLE,
        dict.fromkeys(transfer.axes, _wire_dtype(transfer.dtype)),
        overhead=_SCALES[transfer.dtype],
        fix='compress.gather="", if these bytes are meant',
    )


_SCALES = {
    name: 4 * codec.packed / codec.least for name, codec in (*GATHERS.items(), *EXCHANGES.items())
}
"""Codec → most bytes of its scales, as a share of the bytes of its codes."""


def _wire_dtype(name: str) -> str:
    """Return the dtype on the wire of a codec, or of data without one, as XLA names it."""
    codec = EXCHANGES.get(name) or GATHERS.get(name)
    if codec is None:
        return xla_name(jnp.dtype(name))
    if codec.dtype == "int8":
        return xla_name(jnp.dtype("int8"))
    return xla_name(jnp.dtype("uint8"))


_Made = Mapping[tuple[str, str], CommDtypeCheck]
"""Parameter and use → promise."""


def wider_transfers(
    records: Sequence[Collective], promises: Iterable[CommDtypeCheck]
) -> Iterator[Problem]:
    """Yield a problem for each parameter sent in more bits than promised.

    The records need causes (`spmd.analysis.causes.add_causes`).
    """
    made = {(check.param, check.use): check for check in promises}
    crossing = {record.over for record in records if record.crosses}
    for (param, use, over), group in _promised_records(records, made).items():
        check = made[param, use]
        yield from _wide_problems(check, over, group)
        on_wire = group
        if over in crossing:  # transfers inside a slice may be larger
            on_wire = [record for record in group if record.crosses]
        yield from _large_problems(check, over, on_wire, made)


def _promised_records(
    records: Iterable[Collective], made: _Made
) -> dict[tuple[str, str, str], list[Collective]]:
    """Return (parameter, use, axes) → records with a promise."""
    sent = collections.defaultdict[tuple[str, str, str], list[Collective]](list)
    for record in records:
        if record.cause is None or not record.axes:
            continue
        check = made.get((record.cause.param, record.cause.use))
        if check is None or not check.dtypes.keys() >= set(record.axes):
            continue
        if _is_explicit(record) or not check.explicit:
            sent[check.param, check.use, record.over].append(record)
    return sent


def _is_explicit(record: Collective) -> bool:
    """Return whether a collective is explicit in a layer, by its name."""
    *around, operation = read_names(record.op_name)[-1].split("/")
    if operation.startswith(EXPLICIT) or is_exchange_of_codes(record.kind, around):
        return True
    return "shard_map" in around and operation == "convert_element_type"


def _wide_problems(
    check: CommDtypeCheck, over: str, group: Iterable[Collective]
) -> Iterator[Problem]:
    """Yield a problem for bytes wider than promised, beyond the share of the codes' scales."""
    promised = max((check.dtypes[axis] for axis in over.split("+")), key=_bits)
    wide = []
    narrow_bytes = 0
    for record in group:
        if _bits(record.dtype) > _bits(promised) and record.payload >= MIN_BYTES:
            wide.append(record)
        else:
            narrow_bytes += record.bytes
    total = sum(record.bytes for record in wide)
    if total <= check.overhead * narrow_bytes:
        return
    meant = 0
    dtypes, kinds, sources = set(), set(), set()
    for record in wide:
        meant += record.bytes * _bits(promised) // _bits(record.dtype)
        dtypes.add(record.dtype)
        kinds.add(record.kind)
        if record.source:
            sources.add(f" at {record.source}")
    what = f"is sent in {_joined(dtypes)} over {over}, promised {promised}"
    if check.use == GRADIENT:
        what = f"its gradient {what}"
    where = _joined(kinds) + ", ".join(sorted(sources))
    detail = f"{where}: {human_bytes(total)} in each step, not {human_bytes(meant)}"
    yield Problem(check.param, what, detail, check.fix)


def _joined(names: Iterable[str]) -> str:
    return " and ".join(sorted(names))


def _large_problems(
    check: CommDtypeCheck, over: str, group: Iterable[Collective], made: _Made
) -> Iterator[Problem]:
    """Yield a problem for transfers larger than PowerSGD's compressed arrays."""
    limit = check.largest.get(over, 0)
    if not limit:
        return
    whole = set()
    for record in group:
        if BEFORE_START in record.op_name:
            continue
        if record.payload > _largest(record, check, made):
            payload = human_bytes(record.payload)
            whole.add(f"{record.kind} of {payload} at {record.source}")
    if whole:
        size = human_bytes(limit)
        what = f"its gradient is sent as more than the {size} of a compressed array over {over}"
        yield Problem(check.param, what, ", ".join(sorted(whole)), check.fix)


def _largest(record: Collective, check: CommDtypeCheck, made: _Made) -> int:
    """Return the most bytes promised for a record.

    Compilers may send arrays of several parameters as one.
    """
    params = {check.param}
    for name in read_names(record.op_name):
        params.add(read_scope(name)[1])
    size = 0
    for param in params:
        if (param, check.use) in made:
            size += made[param, check.use].largest.get(record.over, 0)
    return size


def xla_name(dtype: jnp.dtype) -> str:
    """Return XLA's name of a dtype.

    Example:
        >>> [xla_name(jnp.dtype(name)) for name in ("bfloat16", "int8", "uint8", "float8_e4m3fn")]
        ['bf16', 's8', 'u8', 'f8e4m3fn']
    """
    name = dtype.name.replace("_", "")
    return name.replace("float", "f").replace("uint", "u").replace("int", "s")


def _bits(dtype: str) -> int:
    return HloArray(dtype, (8,)).bytes  # eight elements, so that types below a byte count too
