"""The gradient of a kernel, computed and summed over devices in one manual region."""

import math
from collections.abc import Callable
from itertools import chain

from jaxtyping import Array, Float

from spmd.plan.fsdp import named_after, scatter
from spmd.plan.manual import shard_map_over, split_axes
from spmd.plan.records import ParamPlacement
from spmd.plan.sharded_param import ShardedParam, sharded_param
from spmd.sharding.dims import dims_spec, is_prefix, spec_dims
from spmd.sharding.mesh import BATCH_SPEC, AnyMesh


def kernel_gradient(
    product: Callable[..., Array],
    x: Float[Array, "batch seq *in"],
    dy: Float[Array, "batch seq out"],
    placed: ParamPlacement | None,
    axes: str,
    outs: str = "o",
) -> Float[Array, "..."]:
    """Return the gradient of a kernel, in the plan's sharding of gradients.

    Each device multiplies its own tokens; the product is sent in the dtype of the plan's precision
    policy.

    Args:
        product: `(x, dy) -> gradient` of some tokens.
        axes: The kernel's dimensions, each a letter.
        outs: The dimensions in `dy`; the others are the last ones of `x`.
    """
    if placed is None:
        return product(x, dy)
    split = split_axes(placed.mesh)
    param = sharded_param(placed, len(axes))
    tokens = []
    for names, size in zip(spec_dims(BATCH_SPEC, 2, split), x.shape[:2], strict=True):
        tokens.append(_dividing(names, size, placed.mesh))
    summed = set(chain(*tokens))
    if not _is_local(param, summed):
        with named_after(placed):
            return scatter(product(x, dy), placed)  # the compiler finds the collectives
    into: list[tuple[str, ...]] = []
    out: list[tuple[str, ...]] = []
    for dim, names in zip(axes, param.compute_dims, strict=True):
        dims = out if dim in outs else into
        dims.append(names)

    def local(x: Array, dy: Array) -> Array:
        gradient = product(x, dy)
        return param.reduce(gradient, tuple(name for name in split if name in summed))

    in_specs = dims_spec([*tokens, *into]), dims_spec([*tokens, *out])
    _, _, kept = param.specs
    with named_after(placed):
        return shard_map_over(placed.mesh, split, local, in_specs, kept)(x, dy)


def _is_local(param: ShardedParam, summed: set[str]) -> bool:
    """Return whether each device can reduce its own product: over the `summed` axes of tokens."""
    if not is_prefix(param.compute_dims, param.grad_dims):
        return False  # shards of the gradient are not contiguous
    return summed.issuperset(chain(*param.scatters)) and summed.isdisjoint(param.split)


def _dividing(names: tuple[str, ...], size: int, mesh: AnyMesh) -> tuple[str, ...]:
    """Return the axes if a dimension of this size divides over them, else none."""
    if size % math.prod(mesh.shape[name] for name in names):
        return ()
    return names
