"""Products of rows with the kernel of their group, and their derivatives.

Rows are `[group, row, in]`, or `[row, in]` sorted by group with the `sizes` of groups: then rows
after the last group are undefined, in the result too. `jax.lax.ragged_dot` is a Mosaic kernel on
TPUs, which visits only tiles with rows of a group; on CPUs it is a product with every kernel.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spmd.layers.quantized_matmul import largest_magnitude, rounded_in_blocks, scaled
from spmd.settings.quantize import QuantizationRecipe

Sizes = Int[Array, "group"] | None


def grouped_matmul(
    x: Float[Array, "*row in"],
    kernel: Float[Array, "group in out"],
    sizes: Sizes,
    *,
    transposed: bool = False,
) -> Float[Array, "*row out"]:
    """Multiply rows by the kernel of their group, or by its transpose, in the dtype of `x`."""
    return _product(x, kernel, sizes, x.dtype, transposed=transposed)


def quantized_grouped_matmul(
    x: Float[Array, "*row in"],
    kernel: Float[Array, "group in out"],
    sizes: Sizes,
    recipe: QuantizationRecipe | None,
    *,
    tensor: tuple[str, ...] = (),
    is_split: bool = False,
    transposed: bool = False,
) -> Float[Array, "*row out"]:
    """Multiply quantized rows by the quantized kernel of their group, or by its transpose.

    The result has the dtype of `x`. Each row has a scale of its own, since rows after the last
    group are undefined, and each kernel has one; blocks are as in other layers. A transpose is for
    gradients of outputs.

    Args:
        recipe: The recipe of quantization; None for no quantization.
        tensor: The manual axes that the kernels' hidden units are split over.
        is_split: Whether these are the summed dimension.
    """
    if recipe is None:
        return grouped_matmul(x, kernel, sizes, transposed=transposed)
    dtype = recipe.gradient if transposed else recipe.inputs
    if recipe.scaling == "block":
        rows = rounded_in_blocks(x, (x.ndim - 1,), recipe, dtype)
        summed = (_summed_dim(transposed),)
        kernels = rounded_in_blocks(kernel, summed, recipe, recipe.inputs, is_kernel=True)
        return grouped_matmul(rows, kernels, sizes, transposed=transposed)
    over = tensor if is_split else ()
    rows, by_row = scaled(x, largest_magnitude(x, (-1,), over), dtype)
    largest = largest_magnitude(kernel, (1, 2), tensor)
    codes, by_group = scaled(kernel, largest, recipe.inputs)
    total = jnp.int32 if recipe.kind == "int8" else jnp.float32
    y = _product(rows, codes, sizes, total, transposed=transposed)
    if sizes is not None:
        by_group = _of_rows(by_group, sizes, x.shape[0])
    wide = y.astype(jnp.float32)
    return (wide * (by_row * by_group)).astype(x.dtype)


def _of_rows(
    by_group: Float[Array, "group 1 1"], sizes: Int[Array, "group"], count: int
) -> Float[Array, "row 1"]:
    """Return the scale of each row's group, with the last scale for rows after the last group."""
    ends = jnp.cumsum(sizes)
    group = jnp.searchsorted(ends, jnp.arange(count), side="right")
    return by_group[group.clip(max=ends.size - 1), 0]


def _product(x: Array, kernel: Array, sizes: Sizes, dtype: jnp.dtype, *, transposed: bool) -> Array:
    if sizes is None:
        form = "goi,gji->goj" if transposed else "goi,gij->goj"
        return jnp.einsum(form, x, kernel, preferred_element_type=dtype)
    contracted = ((1,), (_summed_dim(transposed),))
    dims = jax.lax.RaggedDotDimensionNumbers((contracted, ((), ())), [0], [0])
    return jax.lax.ragged_dot_general(x, kernel, sizes, dims, preferred_element_type=dtype)


def _summed_dim(transposed: bool) -> int:
    """Return the contracted dimension of kernels, `[group, in, out]`."""
    if transposed:
        return 2
    return 1


def group_values(
    values: Float[Array, "group out"], sizes: Sizes, count: int
) -> Float[Array, "*row out"]:
    """Return the value of each row's group, to be added to rows of a product.

    Args:
        sizes: The sizes of groups; None if rows are `[group, row, …]`.
        count: The number of rows, with sizes.
    """
    if sizes is None:
        return values[:, None]
    ends = jnp.cumsum(sizes)
    group = jnp.searchsorted(ends, jnp.arange(count), side="right")
    return values.at[group].get(mode="clip")


def group_sums(rows: Float[Array, "*row out"], sizes: Sizes) -> Float[Array, "group out"]:
    """Return the sum of each group's rows, in float32."""
    if sizes is None:
        return rows.sum(axis=1, dtype=jnp.float32)
    ones = jnp.ones((rows.shape[0], 1), rows.dtype)
    sums = grouped_gradient(ones, rows, sizes, jnp.dtype(jnp.float32))
    return sums[:, 0]


def grouped_gradient(
    x: Float[Array, "*row in"], dy: Float[Array, "*row out"], sizes: Sizes, dtype: jnp.dtype
) -> Float[Array, "group in out"]:
    """Return the gradient of the kernels: `xᵀ · dy` of each group, summed in float32."""
    if sizes is None:
        return jnp.einsum("gni,gno->gio", x, dy, preferred_element_type=dtype)
    dims = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return jax.lax.ragged_dot_general(x, dy, sizes, dims, preferred_element_type=dtype)
