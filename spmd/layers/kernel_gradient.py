"""The gradient of a kernel, computed and summed over devices in one manual region."""

import math
from collections.abc import Callable
from itertools import chain

from jaxtyping import Array, Float

from spmd.plan.fsdp import named_after, scatter
from spmd.plan.local_param import local_param
from spmd.plan.manual import manual_over, split_axes
from spmd.plan.records import ParamPlacement
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
    """Return the gradient of a kernel, in the sharding in which the plan keeps it.

    Each device multiplies its own tokens; the product is sent in the dtype of the plan's precision policy.

    Args:
        product: `(x, dy) -> gradient` of some tokens.
        axes: The kernel's dimensions, each a letter.
        outs: Those that `dy` has; the others are the last ones of `x`.
    """
    if placed is None:
        return product(x, dy)
    split = split_axes(placed.mesh)
    param = local_param(placed, len(axes))
    tokens = [
        _dividing(names, size, placed.mesh)
        for names, size in zip(spec_dims(BATCH_SPEC, 2, split), x.shape[:2], strict=True)
    ]
    summed = set(chain(*tokens))
    is_contiguous = is_prefix(param.used, param.kept)
    if not is_contiguous or not summed.issuperset(chain(*param.scatters)) or not summed.isdisjoint(param.split):
        with named_after(placed):
            return scatter(product(x, dy), placed)  # the compiler finds the collectives
    used = list(zip(axes, param.used, strict=True))
    into, out = ([names for dim, names in used if (dim in outs) == is_out] for is_out in (False, True))

    def local(x: Array, dy: Array) -> Array:
        return param.reduce(product(x, dy), tuple(name for name in split if name in summed))

    specs = dims_spec([*tokens, *into]), dims_spec([*tokens, *out])
    with named_after(placed):
        return manual_over(placed.mesh, split, local, specs, param.specs[2])(x, dy)


def _dividing(names: tuple[str, ...], size: int, mesh: AnyMesh) -> tuple[str, ...]:
    return names if size % math.prod(mesh.shape[name] for name in names) == 0 else ()
