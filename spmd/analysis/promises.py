"""Promises of a plan about the dtypes of transfers, and the collectives of a compiled program that break them.

A conversion to fewer bits does not prove that fewer bits are sent: a partitioner or a compiler may move it behind the
transfer. To add a promise, yield it in `find_promises`, from the value that decides the dtype in the step.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax.numpy as jnp

from spmd.analysis.causes import EXPLICIT, GRADIENT, USED_WHOLE, is_exchange_of_codes
from spmd.analysis.collective_record import MIN_BYTES, Collective
from spmd.analysis.hlo import HloArray
from spmd.codecs import EXCHANGES, GATHERS
from spmd.errors import Problem
from spmd.plan.local_param import local_param
from spmd.plan.plan import ShardingPlan
from spmd.plan.scopes import read_names, read_scope
from spmd.powersgd.matrices import AXIS, compressed_bytes
from spmd.sharding.dims import local_shape
from spmd.sharding.layer_paths import stored_dims, without_dims
from spmd.sharding.mesh import BATCH_SPEC, entry_axes
from spmd.tree import human_bytes


@dataclasses.dataclass(frozen=True)
class Promise:
    """The widest dtype in which one parameter, or its gradient, is sent over each axis.

    Attributes:
        param: Its path in the plan.
        use: `spmd.analysis.causes.USED_WHOLE` of the parameter, or `GRADIENT`.
        dtypes: Axis → dtype as XLA names it; nothing is promised over other axes.
        explicit: True if only the collectives that a layer writes are promised, not those of the partitioner.
        overhead: Bytes that may be wider, as a share of the others: the scales of quantized blocks.
        fix: The setting to change where the wider dtype is meant.
        largest: Axis → bytes of the largest array that is sent over it at once, between slices if there are several.
    """

    param: str
    use: str
    dtypes: Mapping[str, str]
    explicit: bool = False
    overhead: float = 0.0
    fix: str = ""
    largest: Mapping[str, int] = dataclasses.field(default_factory=dict)


def find_promises(plan: ShardingPlan) -> Iterator[Promise]:
    """Yield the promises of a plan.

    Gradients have the dtypes and codecs of the wire where a layer reduces them (`spmd.plan.local_param`), as layers do
    for their kernels. For other parameters only an explicit collective shows that a layer does. Parameters with a codec
    are gathered as its codes. Of PowerSGD, gradients are sent as two thin float32 matrices.
    """
    thin = compressed_bytes(plan)
    sizes, kernels = plan.mesh.shape, plan.model.info().wrappable
    batch = [axis for entry in BATCH_SPEC for axis in entry_axes(entry) if sizes[axis] > 1]
    for entry in plan.params:
        if (placed := plan.placements.get(entry.path)) is None:
            continue
        shape = without_dims(entry.shape, stored_dims(placed.stacks))
        param = local_param(placed, len(shape))
        summed = [axis for axis in batch if axis not in param.split]
        names = param.sent(local_shape(shape, param.used, sizes), summed, sizes)
        dtypes = {axis: _wire_dtype(names[axis] or plan.precision.gradients) for axis in batch if axis in names}
        scales = max((_SCALES[name] for name in names.values() if name in EXCHANGES), default=0.0)
        fix = "--compress.gradients float32, if these bytes are meant"
        largest = {AXIS: max(thin[entry.path])} if entry.path in thin else {}
        dtypes |= dict.fromkeys(largest, "f32")
        yield Promise(entry.path, GRADIENT, dtypes, entry.path not in kernels, scales, fix, largest)
        if gather := placed.comm.param_codec:
            over = dict.fromkeys(itertools.chain(*param.gathers), _wire_dtype(gather))
            fix = "leave out --compress.gather, if these bytes are meant"
            yield Promise(entry.path, USED_WHOLE, over, overhead=_SCALES[gather], fix=fix)


_SCALES = {name: 4 * codec.packed / codec.least for name, codec in (*GATHERS.items(), *EXCHANGES.items())}
"""Bytes of the scales of a codec, relative to those of the codes, at most."""


def _wire_dtype(name: str) -> str:
    codec = EXCHANGES.get(name) or GATHERS.get(name)
    if codec is None:
        return xla_name(jnp.dtype(name))
    return xla_name(jnp.dtype(codec.dtype if codec.dtype == "int8" else "uint8"))


def broken_promises(records: Sequence[Collective], promises: Iterable[Promise]) -> Iterator[Problem]:
    """Yield a problem for each parameter that is sent in more bits than promised; the records have causes."""
    made = {(promise.param, promise.use): promise for promise in promises}
    crossing = {record.over for record in records if record.crosses}
    sent = collections.defaultdict[tuple[str, str, str], list[Collective]](list)
    for record in records:
        promise = made.get((record.cause.param, record.cause.use)) if record.cause else None
        *around, operation = read_names(record.op_name)[-1].split("/")
        is_explicit = operation.startswith(EXPLICIT) or is_exchange_of_codes(record.kind, around)
        is_explicit |= "shard_map" in around and operation == "convert_element_type"
        is_over = promise and record.axes and promise.dtypes.keys() >= set(record.axes)
        if promise and is_over and (is_explicit or not promise.explicit):
            sent[promise.param, promise.use, record.over].append(record)
    for (param, use, over), group in sent.items():
        promise = made[param, use]
        promised = max((promise.dtypes[axis] for axis in over.split("+")), key=_bits)
        wide = [r for r in group if _bits(r.dtype) > _bits(promised) and r.payload >= MIN_BYTES]
        total = sum(r.bytes for r in wide)
        if total > promise.overhead * sum(r.bytes for r in group if r not in wide):
            dtypes, kinds = (" and ".join(sorted(names)) for names in ({r.dtype for r in wide}, {r.kind for r in wide}))
            sources = ", ".join(sorted({f" at {r.source}" for r in wide if r.source}))
            meant = sum(r.bytes * _bits(promised) // _bits(r.dtype) for r in wide)
            detail = f"{kinds}{sources}: {human_bytes(total)} in each step, not {human_bytes(meant)}"
            what = f"{'its gradient ' * (use == GRADIENT)}is sent in {dtypes} over {over}, promised {promised}"
            yield Problem(param, what, detail, promise.fix)
        limit, on_wire = promise.largest.get(over, 0), [r for r in group if r.crosses or over not in crossing]
        whole = [r for r in on_wire if limit and r.payload > _largest(r, {param}, use, made)]
        if whole:
            sources = ", ".join(sorted({f"{r.kind} of {human_bytes(r.payload)} at {r.source}" for r in whole}))
            what = f"its gradient is sent as more than the {human_bytes(limit)} of a compressed array over {over}"
            yield Problem(param, what, sources, promise.fix)


def _largest(record: Collective, params: set[str], use: str, made: Mapping[tuple[str, str], Promise]) -> int:
    """Return the most bytes that are promised for a record; compilers may send arrays of several parameters as one."""
    params = params | {read_scope(name)[1] for name in read_names(record.op_name)}
    return sum(made[param, use].largest.get(record.over, 0) for param in params if (param, use) in made)


def xla_name(dtype: jnp.dtype) -> str:
    """Return the name that XLA has for a dtype.

    Example:
        >>> [xla_name(jnp.dtype(name)) for name in ("bfloat16", "int8", "uint8", "float8_e4m3fn")]
        ['bf16', 's8', 'u8', 'f8e4m3fn']
    """
    return dtype.name.replace("_", "").replace("float", "f").replace("uint", "u").replace("int", "s")


def _bits(dtype: str) -> int:
    return HloArray(dtype, (8,)).bytes
