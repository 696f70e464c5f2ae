"""Products of quantized arrays: their codes are multiplied, and the sum by the scales of both."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spmd.jaxpr.examples import per_example
from spmd.plan.manual import global_max
from spmd.settings.quantize import MatmulRecipe


class Operand(NamedTuple):
    """An operand of a product: `array`, times `scale`, which has size 1 along summed dimensions; None for no scale."""

    array: Array
    scale: Float[Array, "..."] | None = None


def quantize(
    x: Float[Array, "..."],
    summed: tuple[int, ...],
    recipe: MatmulRecipe,
    dtype: str,
    *,
    is_kernel: bool = False,
    largest: Float[Array, ""] | None = None,
) -> Operand:
    """Quantize an array to `dtype` for a product that sums over some of its dimensions.

    One scale is for the same elements on every mesh: largest magnitudes are of all devices that have a part.

    Args:
        is_kernel: Whether it is a kernel, which all devices of the batch have.
        largest: The largest magnitude to scale by; elements beyond it are clipped. None for that of now.
    """
    if recipe.scaling == "block":
        return Operand(rounded_in_blocks(x, summed, recipe, dtype, is_kernel=is_kernel))
    is_bound = largest is None
    if largest is None:
        is_row = recipe.scaling == "row"  # of one device, as a kernel is
        largest = magnitude(x, summed if is_row else tuple(range(x.ndim)), is_whole=is_kernel or is_row)
    largest = largest.reshape((1,) * x.ndim) if largest.size == 1 else largest
    return Operand(*scaled(x, largest, dtype, is_bound=is_bound))


def magnitude(x: Array, over: tuple[int, ...], *, is_whole: bool = False) -> Float[Array, "..."]:
    """Return the largest magnitude over dimensions, which stay with size 1, of all devices, or of one that has all."""
    largest = largest_magnitude(x, over)
    return largest if is_whole else global_max(largest)


def largest_magnitude(x: Array, over: tuple[int, ...], axes: tuple[str, ...] = ()) -> Float[Array, "..."]:
    """Return the largest magnitude over dimensions, which stay with size 1, and over manual axes."""
    largest = jnp.max(jnp.abs(x), axis=over, keepdims=True).astype(jnp.float32)
    return jax.lax.pmax(largest, axes) if axes else largest


def scaled(
    x: Array, largest: Float[Array, "..."], dtype: str, *, is_bound: bool = True
) -> tuple[Array, Float[Array, "..."]]:
    """Return the codes of an array, and their scale: of float8 a power of two, by which numbers are divided exactly.

    Args:
        largest: The largest magnitude to represent.
        is_bound: Whether none is larger; else larger ones are clipped.
    """
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    top = float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)
    scale = largest / top if is_integer else power_of_two(largest / top)
    x = x if x.dtype == jnp.bfloat16 and not is_integer else x.astype(jnp.float32)
    codes = x * (1 / jnp.where(scale > 0, scale, 1.0)).astype(x.dtype)
    codes = codes if is_bound else jnp.clip(codes, -top, top)  # a cast of more than the largest is not a number
    return (jnp.round(codes) if is_integer else codes).astype(dtype), scale


def power_of_two(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Round up to a power of two, exactly; zero stays zero.

    Example:
        >>> power_of_two(jnp.array([0.0, 0.75, 1.0, 1.5])).tolist()
        [0.0, 1.0, 1.0, 2.0]
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jax.lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)


def rounded_in_blocks(
    x: Array, summed: tuple[int, ...], recipe: MatmulRecipe, dtype: str, *, is_kernel: bool = False
) -> Array:
    """Return an array as blocks of codes represent it, in its own dtype."""
    free = [dim for dim in range(x.ndim) if dim not in summed]
    lengths = {summed[-1]: recipe.block}
    if is_kernel and recipe.is_square and free:
        lengths[free[-1]] = recipe.block
    shape, inner = list[int](), list[int]()
    for dim, size in enumerate(x.shape):
        block = math.gcd(size, lengths.get(dim, 1))
        inner += [len(shape) + 1] * (dim in lengths)
        shape += [size // block, block] if dim in lengths else [size]
    blocks = x.reshape(shape)
    codes, scale = scaled(blocks, jnp.max(jnp.abs(blocks), axis=tuple(inner), keepdims=True), dtype)
    return (codes.astype(jnp.float32) * scale).astype(x.dtype).reshape(x.shape)


def product(form: str, a: Operand, b: Operand, dtype: Any) -> Array:
    """Return the sum of products `form`, as of `jnp.einsum`, in a dtype; letters are summed or of one operand."""
    (left, right), out = _letters(form, a.array.ndim, b.array.ndim)
    both = [letter for letter in left if letter in right]
    dims = [left.index(letter) for letter in both], [right.index(letter) for letter in both]
    is_integer, is_half = jnp.issubdtype(a.array.dtype, jnp.integer), dtype == jnp.float16
    total = jnp.int32 if is_integer else jnp.float32 if a.scale is not None and is_half else dtype
    y = jax.lax.dot_general(a.array, b.array, (dims, ((), ())), preferred_element_type=total)
    if a.scale is not None and b.scale is not None:
        of_a, of_b = jnp.squeeze(a.scale, tuple(dims[0])), jnp.squeeze(b.scale, tuple(dims[1]))
        ndims = (1,) * of_a.ndim, (1,) * of_b.ndim
        scale = of_a.reshape(*of_a.shape, *ndims[1]) * of_b.reshape(*ndims[0], *of_b.shape)
        y = y.astype(jnp.float32) * scale if is_integer or is_half else y * scale.astype(dtype)
    found = [letter for letter in left + right if letter not in both]
    return jnp.transpose(y, [found.index(letter) for letter in out]).astype(dtype)


def _letters(form: str, *ndims: int) -> tuple[list[str], str]:
    """Return the letters of the dimensions of both operands and of the result, with capital ones for dots."""
    operands, out = form.split("->")
    found, dots = list[str](), ""
    for letters, ndim in zip(operands.split(","), ndims, strict=True):
        own = "ABCDEFGH"[: ndim - len(letters.replace("...", ""))] if "..." in letters else ""
        found.append(letters.replace("...", own))
        dots = max(dots, own, key=len)
    return found, out.replace("...", dots)


@per_example
def quantized_einsum(
    form: str, a: Array, kernel: Array | Operand, recipe: MatmulRecipe, *, is_gradient: bool, scales: Any, dtype: Any
) -> Array:
    """Return the product of an array with a kernel, both quantized.

    Args:
        form: As of `jnp.einsum`.
        kernel: An array, or codes with one scale.
        is_gradient: Whether `a` is the gradient of an output, not an input.
        scales: Largest magnitudes of input, kernel and gradient to scale by; None for those of now.
        dtype: Of the product.
    """
    (left, right), _ = _letters(form, a.ndim, (kernel.array if isinstance(kernel, Operand) else kernel).ndim)
    sums = [tuple(i for i, letter in enumerate(x) if letter in y) for x, y in ((left, right), (right, left))]
    largest = (None, None) if scales is None else (scales[2 if is_gradient else 0], scales[1])
    codes = quantize(a, sums[0], recipe, recipe.gradient if is_gradient else recipe.inputs, largest=largest[0])
    if not isinstance(kernel, Operand):
        kernel = quantize(kernel, sums[1], recipe, recipe.inputs, is_kernel=True, largest=largest[1])
    return product(form, codes, kernel, dtype)
