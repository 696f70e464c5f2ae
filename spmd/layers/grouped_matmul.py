"""Products of rows with the kernel of their group, and their derivatives.

Rows are `[group, row, in]`, or `[row, in]` sorted by group with the `sizes` of groups: then rows after the last group
have no meaning, and neither have those of the result. `jax.lax.ragged_dot` is a Mosaic kernel on TPUs, which visits the
tiles of rows that groups have; on CPUs it is a product with every kernel.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Sizes = Int[Array, "group"] | None


def grouped_matmul(
    x: Float[Array, "*row in"], kernel: Float[Array, "group in out"], sizes: Sizes, *, transposed: bool = False
) -> Float[Array, "*row out"]:
    """Multiply rows by the kernel of their group, or by its transpose, in the dtype of `x`."""
    if sizes is None:
        return jnp.einsum("goi,gji->goj" if transposed else "goi,gij->goj", x, kernel, preferred_element_type=x.dtype)
    contracted = ((1,), (2 if transposed else 1,))
    dims = jax.lax.RaggedDotDimensionNumbers((contracted, ((), ())), [0], [0])
    return jax.lax.ragged_dot_general(x, kernel, sizes, dims, preferred_element_type=x.dtype)


def grouped_gradient(
    x: Float[Array, "*row in"], dy: Float[Array, "*row out"], sizes: Sizes, dtype: jnp.dtype
) -> Float[Array, "group in out"]:
    """Return the gradient of the kernels: `xᵀ · dy` of each group, summed in float32."""
    if sizes is None:
        return jnp.einsum("gni,gno->gio", x, dy, preferred_element_type=dtype)
    dims = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return jax.lax.ragged_dot_general(x, dy, sizes, dims, preferred_element_type=dtype)
