"""Ledger of communication: the bytes of parameters and gradients over each mesh axis.

The text of a plan, the audit of a compiled step's dtypes and the forecast of a step's time read the
same records. They follow from the placements alone: nothing is traced.

| transfer | one record | elements of a device |
|---|---|---|
| gather of a parameter | for all axes that it is gathered over | of the gathered parameter |
| reduction of a gradient | for each axis | of its terms; twice for a sum, which is a gather too |

All layers of a stack are together. The factor (n − 1)/n of a ring of n devices is not counted.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp

from spmd import tree
from spmd.codecs import EXCHANGES, GATHERS
from spmd.model_interface.wrapped_param import is_stored
from spmd.plan.plan import ShardingPlan
from spmd.plan.records import ParamPlacement, PlanEntry
from spmd.plan.sharded_param import ShardedParam, sharded_param
from spmd.sharding.dims import local_shape
from spmd.sharding.layer_paths import stored_dims, without_dims
from spmd.sharding.mesh import TOKEN_AXES, spec_axes
from spmd.sharding.optimizer_state import drop_axis, shard_bytes


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Communication of a parameter, or of its gradient, in one pass.

    Attributes:
        path: Of the parameter in the plan, or of a frozen variable.
        axes: Mesh axes.
        dtype: Dtype or codec on the wire.
        plain: Dtype without compression.
        elements: Elements that a device sends.
        block: Elements with one scale; 1 without a codec.
        is_matrix: Whether it has two dimensions or more beside the stacked ones.
        arrays: Bytes of each array that is sent in place of the gradient, of all layers; empty if
            the gradient is sent itself.
    """

    path: str
    axes: tuple[str, ...]
    dtype: str
    plain: str
    elements: int
    block: int = 1
    is_matrix: bool = True
    arrays: tuple[int, ...] = ()

    @property
    def bytes(self) -> float:
        """Bytes of a device, with the scales of codes."""
        if self.arrays:
            return 2 * sum(self.arrays)
        return self.elements * element_bytes(self.dtype, self.block)

    @property
    def plain_bytes(self) -> float:
        """Bytes of a device without compression."""
        return self.elements * element_bytes(self.plain)


def element_bytes(name: str, block: int = 128) -> float:
    """Return the bytes of an element on the wire, in a dtype or a codec.

    Of a codec they include its part of the block's scale.

    Example:
        >>> element_bytes("bfloat16"), element_bytes("int8"), element_bytes("int4")
        (2, 1.03125, 0.53125)
    """
    codec = EXCHANGES.get(name) or GATHERS.get(name)
    if codec:
        return codec.bits(block) / 8
    return jnp.dtype(name).itemsize


def batch_axes(sizes: Mapping[str, int]) -> list[str]:
    """Return the axes above size 1 that split the tokens of a batch."""
    return [axis for axis in TOKEN_AXES if sizes[axis] > 1]


def gathers(plan: ShardingPlan) -> Iterator[Transfer]:
    """Yield the gathers of parameters, then of frozen variables, in each forward pass."""
    sizes = plan.mesh.shape
    compute = plan.precision.compute
    info = plan.model.info()
    decoded = _decoded_elements(plan)
    for entry, placed in _placed_params(plan):
        param = sharded_param(placed.on_stages(), len(entry.shape))
        if not param.is_gathered:
            continue
        dtype = compute
        elements = math.prod(entry.shape)
        if entry.path in decoded:
            elements = decoded[entry.path]
        elif info.is_stored_part(entry.path):
            dtype = entry.dtype
        if not elements:
            continue
        block = 1
        codec = placed.comm.param_codec
        if codec:
            dtype = codec
            block = GATHERS[codec].block_dim(local_shape(entry.shape, param.param_dims, sizes))[1]
        yield Transfer(
            path=entry.path,
            axes=tuple(itertools.chain(*param.gathers)),
            dtype=dtype,
            plain=compute,
            elements=elements // math.prod(sizes[axis] for axis in param.split),
            block=block,
            is_matrix=_is_matrix(entry, placed),
        )


def _decoded_elements(plan: ShardingPlan) -> dict[str, int]:
    """Return the elements of parameters that are decoded before they are gathered.

    They are counted at their codes; their scales have none.
    """
    info = plan.model.info()
    variables = tree.flatten(plan.abstract_variables, is_leaf=is_stored)
    elements = dict[str, int]()
    for module, node in info.stored_nodes.items():
        if info.is_gathered_as_codes(module):
            continue
        for part in tree.flatten(variables[node]):
            elements[f"{node}/{part}"] = 0
        elements[info.stored_as[module]] = math.prod(variables[node].shape)
    return elements


def reductions(plan: ShardingPlan) -> Iterator[Transfer]:
    """Yield the reductions of gradients, in the order of the batch's axes for each parameter."""
    sizes = plan.mesh.shape
    replaced: dict[str, Mapping[str, Sequence[int]]] = {}
    for transform in plan.transforms:
        replaced |= transform.sent(plan)
    for entry in plan.gradients:
        placed = plan.placements.get(entry.path)
        if placed is None:
            continue
        param = sharded_param(placed.of_stack(), len(entry.shape))
        names = terms_dtypes(plan, entry, placed)
        for axis in batch_axes(sizes):
            if axis not in names:
                continue
            dtype = names[axis]
            kept = local_shape(entry.shape, param.grad_dims, sizes)
            arrays = replaced.get(entry.path, {}).get(axis, ())
            yield Transfer(
                path=entry.path,
                axes=(axis,),
                dtype="float32" if arrays else dtype,
                plain=plan.precision.gradients,
                elements=_reduced_elements(entry, param, axis, sizes),
                block=placed.comm.gradient_block(dtype, kept),
                is_matrix=_is_matrix(entry, placed),
                arrays=tuple(arrays),
            )


def terms_dtypes(plan: ShardingPlan, entry: PlanEntry, placed: ParamPlacement) -> dict[str, str]:
    """Return axis → dtype or codec of the terms of a gradient, for the axes of its sum.

    They are decided for one layer: its terms are not sent in codes if they have no whole blocks.
    """
    sizes = plan.mesh.shape
    shape = without_dims(entry.shape, stored_dims(placed.stacks))
    param = sharded_param(placed, len(shape))
    summed = [axis for axis in batch_axes(sizes) if axis not in param.split]
    names = param.sent(local_shape(shape, param.compute_dims, sizes), summed, sizes)
    for axis, name in names.items():
        names[axis] = name or plan.precision.gradients
    return names


def deferred_reduction_bytes(plan: ShardingPlan, axes: tuple[str, ...]) -> tuple[int, int, int]:
    """Return the bytes of one reduction for a whole step: of gradients, of parameters, and held.

    Gradients and parameters are on the wire; they count as in `spmd.analysis.collective_record`.
    The third number is held beyond the plan's shards.

    Args:
        axes: Mesh axes of size above 1 (`spmd.defer_grad_reduction`).
    """
    sizes = plan.mesh.shape
    sent = 0
    gathered = 0
    held = 0
    for leaf in plan.gradients:
        shard = shard_bytes(leaf.shape, plan.precision.accumulation, leaf.spec, sizes)
        joined = functools.reduce(drop_axis, axes, leaf.spec)
        local = shard_bytes(leaf.shape, plan.precision.accumulation, joined, sizes)
        if local > shard:
            sent += local
        if not set(spec_axes(leaf.spec)).issuperset(axes):
            sent += 2 * shard
        held += local - shard
    for leaf in (*plan.params, *plan.variables):
        joined = functools.reduce(drop_axis, axes, leaf.spec)
        local = shard_bytes(leaf.shape, leaf.dtype, joined, sizes)
        if local > leaf.bytes_per_device:
            gathered += local
    return sent, gathered, held + gathered


def _placed_params(plan: ShardingPlan) -> Iterator[tuple[PlanEntry, ParamPlacement]]:
    """Yield the parameters with a placement, then the frozen variables with one."""
    for entry in plan.params:
        placed = plan.placements.get(entry.path)
        if placed is not None:
            yield entry, placed
    frozen = plan.model.info().frozen
    for entry in plan.variables:
        placed = plan.placements.get(frozen.get(entry.path, ""))
        if placed is not None:
            yield entry, placed


def _is_matrix(entry: PlanEntry, placed: ParamPlacement) -> bool:
    """Return whether a parameter has two dimensions or more beside the stacked ones."""
    return len(entry.shape) >= len(placed.stacks) + 2


def _reduced_elements(
    entry: PlanEntry, param: ShardedParam, axis: str, sizes: Mapping[str, int]
) -> int:
    """Return the elements sent by a device over an axis for the sum of a gradient.

    What was scattered before over other axes is not sent again.
    """
    scattered = list(param.scattered)
    before = scattered
    if axis in scattered:
        before = scattered[: scattered.index(axis)]
    parts = math.prod(sizes[name] for name in (*param.split, *before))
    count = math.prod(entry.shape) // parts
    if axis in scattered:
        return count
    return 2 * count  # a sum is a gather as well
