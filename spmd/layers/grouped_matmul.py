"""Products of rows with the kernel of their group, and their derivatives.

Rows are `[group, row, in]`, or `[row, in]` sorted by group with the `sizes` of groups: then rows after the last group
have no meaning, and neither have those of the result. `jax.lax.ragged_dot` is a Mosaic kernel on TPUs, which visits the
tiles of rows that groups have; on CPUs it is a product with every kernel.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spmd.layers.quantized_matmul import largest_magnitude, rounded_in_blocks, scaled
from spmd.settings.quantize import MatmulRecipe

Sizes = Int[Array, "group"] | None


def grouped_matmul(
    x: Float[Array, "*row in"], kernel: Float[Array, "group in out"], sizes: Sizes, *, transposed: bool = False
) -> Float[Array, "*row out"]:
    """Multiply rows by the kernel of their group, or by its transpose, in the dtype of `x`."""
    return _product(x, kernel, sizes, x.dtype, transposed=transposed)


def quantized_grouped_matmul(
    x: Float[Array, "*row in"],
    kernel: Float[Array, "group in out"],
    sizes: Sizes,
    recipe: MatmulRecipe | None,
    *,
    tensor: tuple[str, ...] = (),
    is_split: bool = False,
    transposed: bool = False,
) -> Float[Array, "*row out"]:
    """Multiply quantized rows by the quantized kernel of their group, or by its transpose, in the dtype of `x`.

    Each row has a scale of its own, since rows after the last group have no meaning, and so has each kernel; blocks are
    as in other layers. A transpose is for gradients of outputs.

    Args:
        recipe: None for arrays as they are.
        tensor: The manual axes that the kernels' hidden units are split over.
        is_split: Whether these are the summed dimension.
    """
    if recipe is None:
        return grouped_matmul(x, kernel, sizes, transposed=transposed)
    dtype = recipe.gradient if transposed else recipe.inputs
    if recipe.scaling == "block":
        rows = rounded_in_blocks(x, (x.ndim - 1,), recipe, dtype)
        kernels = rounded_in_blocks(kernel, (2 if transposed else 1,), recipe, recipe.inputs, is_kernel=True)
        return grouped_matmul(rows, kernels, sizes, transposed=transposed)
    rows, by_row = scaled(x, largest_magnitude(x, (-1,), tensor if is_split else ()), dtype)
    codes, by_group = scaled(kernel, largest_magnitude(kernel, (1, 2), tensor), recipe.inputs)
    y = _product(rows, codes, sizes, jnp.int32 if recipe.kind == "int8" else jnp.float32, transposed=transposed)
    if sizes is not None:
        ends = jnp.cumsum(sizes)
        by_group = by_group[jnp.searchsorted(ends, jnp.arange(x.shape[0]), side="right").clip(max=ends.size - 1), 0]
    return (y.astype(jnp.float32) * (by_row * by_group)).astype(x.dtype)


def _product(x: Array, kernel: Array, sizes: Sizes, dtype: jnp.dtype, *, transposed: bool) -> Array:
    if sizes is None:
        return jnp.einsum("goi,gji->goj" if transposed else "goi,gij->goj", x, kernel, preferred_element_type=dtype)
    contracted = ((1,), (2 if transposed else 1,))
    dims = jax.lax.RaggedDotDimensionNumbers((contracted, ((), ())), [0], [0])
    return jax.lax.ragged_dot_general(x, kernel, sizes, dims, preferred_element_type=dtype)


def grouped_gradient(
    x: Float[Array, "*row in"], dy: Float[Array, "*row out"], sizes: Sizes, dtype: jnp.dtype
) -> Float[Array, "group in out"]:
    """Return the gradient of the kernels: `xᵀ · dy` of each group, summed in float32."""
    if sizes is None:
        return jnp.einsum("gni,gno->gio", x, dy, preferred_element_type=dtype)
    dims = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return jax.lax.ragged_dot_general(x, dy, sizes, dims, preferred_element_type=dtype)
