"""Matmuls of quantized arrays: products of codes, with the sums multiplied by both scales."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spmd import codecs
from spmd.jaxpr.examples import per_example
from spmd.plan.manual import global_max
from spmd.settings.quantize import QuantizationRecipe


class Operand(NamedTuple):
    """An operand of a product: `array`, multiplied by `scale` unless the scale is None.

    A scale has size 1 along summed dimensions.
    """

    array: Array
    scale: Float[Array, "..."] | None = None


def quantize(
    x: Float[Array, "..."],
    summed: tuple[int, ...],
    recipe: QuantizationRecipe,
    dtype: str,
    *,
    is_kernel: bool = False,
    largest: Float[Array, ""] | None = None,
) -> Operand:
    """Quantize an array to `dtype` for a product with a sum over the dimensions `summed`.

    A scale covers the same elements on every mesh: largest magnitudes are taken over all devices
    with a part of the array.

    Args:
        is_kernel: Whether the array is a kernel, equal on all devices of the batch.
        largest: The largest magnitude to scale by; elements beyond it are clipped. None for the
            current one.
    """
    if recipe.scaling == "block":
        rounded = rounded_in_blocks(x, summed, recipe, dtype, is_kernel=is_kernel)
        return Operand(rounded)
    is_bound = largest is None
    if largest is None:
        largest = _largest_now(x, summed, recipe, is_kernel=is_kernel)
    if largest.size == 1:
        largest = largest.reshape((1,) * x.ndim)
    codes, scale = scaled(x, largest, dtype, is_bound=is_bound)
    return Operand(codes, scale)


def _largest_now(
    x: Array, summed: tuple[int, ...], recipe: QuantizationRecipe, *, is_kernel: bool
) -> Float[Array, "..."]:
    """Return the largest magnitude for each scale of an array."""
    if recipe.scaling == "row":  # of one device, as a kernel is
        return magnitude(x, summed, is_whole=True)
    return magnitude(x, tuple(range(x.ndim)), is_whole=is_kernel)


def magnitude(x: Array, over: tuple[int, ...], *, is_whole: bool = False) -> Float[Array, "..."]:
    """Return the largest magnitude over dimensions, and over devices unless `is_whole`.

    The dimensions stay, with size 1. With `is_whole`, a device has all elements over them.
    """
    largest = largest_magnitude(x, over)
    if is_whole:
        return largest
    return global_max(largest)


def largest_magnitude(
    x: Array, over: tuple[int, ...], axes: tuple[str, ...] = ()
) -> Float[Array, "..."]:
    """Return the largest magnitude over manual axes and dimensions, kept with size 1."""
    largest = jnp.max(jnp.abs(x), axis=over, keepdims=True).astype(jnp.float32)
    if not axes:
        return largest
    return jax.lax.pmax(largest, axes)


def scaled(
    x: Array, largest: Float[Array, "..."], dtype: str, *, is_bound: bool = True
) -> tuple[Array, Float[Array, "..."]]:
    """Return the codes of an array, and their scale (`spmd.codecs.quantize`).

    The scale of float8 is a power of two: numbers are divided by it exactly. Those of int8 are
    multiplied by its inverse, unlike those that `spmd.codecs.BlockCodec` stores and sends.

    Args:
        largest: The largest magnitude to represent.
        is_bound: Whether no element is larger; if False, larger ones are clipped.
    """
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    return codecs.quantize(
        x,
        largest,
        dtype,
        codecs.largest_code(dtype),
        has_exact_scales=not is_integer,
        divides=False,
        clips=not is_bound,
    )


def rounded_in_blocks(
    x: Array,
    summed: tuple[int, ...],
    recipe: QuantizationRecipe,
    dtype: str,
    *,
    is_kernel: bool = False,
) -> Array:
    """Round an array to blocks of codes with a scale each, in its own dtype."""
    free = [dim for dim in range(x.ndim) if dim not in summed]
    divided = [summed[-1]]
    if is_kernel and recipe.is_square and free:
        divided.append(free[-1])
    lengths = {dim: math.gcd(x.shape[dim], recipe.block) for dim in divided}
    blocks, inner = codecs.split_blocks(x, lengths)
    largest = jnp.max(jnp.abs(blocks), axis=inner, keepdims=True)
    # In float16 the quotient of a small magnitude is subnormal: rounded down, it would be the scale
    # of a code beyond the largest, which is not a number.
    codes, scale = scaled(blocks, largest.astype(jnp.float32), dtype)
    rounded = codecs.dequantize(codes, scale, x.dtype)
    return rounded.reshape(x.shape)


def product(form: str, a: Operand, b: Operand, dtype: Any) -> Array:
    """Return the sum of products `form`, a formula of `jnp.einsum`, in a dtype.

    A letter in both operands is summed over; no letter is a batch dimension.
    """
    (left, right), out = _letters(form, a.array.ndim, b.array.ndim)
    both = [letter for letter in left if letter in right]
    of_a = tuple(map(left.index, both))
    of_b = tuple(map(right.index, both))
    total = _dtype_of_sums(a, dtype)
    dims = ((of_a, of_b), ((), ()))
    y = jax.lax.dot_general(a.array, b.array, dims, preferred_element_type=total)
    if a.scale is not None and b.scale is not None:
        scale = _product_of_scales(jnp.squeeze(a.scale, of_a), jnp.squeeze(b.scale, of_b))
        y = _scaled_sums(y, scale, dtype)
    found = [letter for letter in left + right if letter not in both]
    order = [found.index(letter) for letter in out]
    y = jnp.transpose(y, order)
    return y.astype(dtype)


def _dtype_of_sums(a: Operand, dtype: Any) -> Any:
    """Return the dtype of sums of products."""
    if jnp.issubdtype(a.array.dtype, jnp.integer):
        return jnp.int32
    if a.scale is not None and dtype == jnp.float16:
        return jnp.float32
    return dtype


def _scaled_sums(y: Array, scale: Array, dtype: Any) -> Array:
    """Multiply sums by their scales: in the result's dtype if they have it, else in float32."""
    if y.dtype == dtype:
        return y * scale.astype(dtype)
    return y.astype(jnp.float32) * scale


def _product_of_scales(a: Array, b: Array) -> Array:
    """Return the product of each scale of one operand with each of the other."""
    rows = a.reshape(*a.shape, *(1,) * b.ndim)
    columns = b.reshape(*(1,) * a.ndim, *b.shape)
    return rows * columns


def _letters(form: str, *ndims: int) -> tuple[list[str], str]:
    """Return the letters of the dimensions of operands and result, with capital ones for dots."""
    operands, out = form.split("->")
    found = list[str]()
    dots = ""
    for letters, ndim in zip(operands.split(","), ndims, strict=True):
        own = ""
        if "..." in letters:
            named = len(letters) - len("...")
            own = "ABCDEFGH"[: ndim - named]
        found.append(letters.replace("...", own))
        dots = max(dots, own, key=len)
    return found, out.replace("...", dots)


@per_example
def quantized_einsum(
    form: str,
    a: Array,
    kernel: Array | Operand,
    recipe: QuantizationRecipe,
    *,
    is_gradient: bool,
    scales: Any,
    dtype: Any,
) -> Array:
    """Return the product of an array with a kernel, both quantized.

    Args:
        form: A formula of `jnp.einsum`.
        kernel: An array, or codes with one scale.
        is_gradient: Whether `a` is the gradient of an output, not an input.
        scales: Largest magnitudes of input, kernel and gradient to scale by; None for the current
            ones.
        dtype: The dtype of the product.
    """
    whole = kernel.array if isinstance(kernel, Operand) else kernel
    (left, right), _ = _letters(form, a.ndim, whole.ndim)
    largest, largest_of_kernel = None, None
    if scales is not None:
        largest = scales[2 if is_gradient else 0]
        largest_of_kernel = scales[1]
    codes_dtype = recipe.gradient if is_gradient else recipe.inputs
    summed = _shared_dims(left, right)
    codes = quantize(a, summed, recipe, codes_dtype, largest=largest)
    if not isinstance(kernel, Operand):
        summed = _shared_dims(right, left)
        kernel = quantize(
            kernel, summed, recipe, recipe.inputs, is_kernel=True, largest=largest_of_kernel
        )
    return product(form, codes, kernel, dtype)


def _shared_dims(letters: str, others: str) -> tuple[int, ...]:
    """Return the dimensions of an operand shared with the other one."""
    return tuple(dim for dim, letter in enumerate(letters) if letter in others)
