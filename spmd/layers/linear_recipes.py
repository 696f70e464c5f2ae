"""Quantized matmuls of a linear layer, by the recipe of its kernel."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spmd.delayed_scaling.amax_history import HISTORY
from spmd.layers.kernel_gradient import kernel_gradient
from spmd.layers.quantized_matmul import Operand, magnitude, product, quantize
from spmd.plan.fsdp import gather, gather_prepared, named_after
from spmd.plan.records import ParamPlacement
from spmd.settings.quantize import QuantizationRecipe

History = Float[Array, "*layer 3 step"]
"""Largest magnitudes of input, kernel and gradient in earlier steps, carried along with a kernel
(`fp8-delayed`)."""

Scales = Float[Array, "3"] | None
"""Largest magnitudes of input, kernel and gradient to scale by; None for the current ones."""


def recipe_of(placed: ParamPlacement | None) -> QuantizationRecipe | None:
    """Return the recipe of a kernel's matmuls; None for the compute dtype."""
    if placed is None:
        return None
    return placed.recipe


def gather_operand(
    prepared: Any, placed: ParamPlacement | None, scales: Scales, dtype: Any, *, ndim: int
) -> Array | Operand:
    """Gather a kernel for its matmuls.

    If the codes of communication are those of the matmuls, with one scale, they are not decoded.

    Args:
        prepared: From `spmd.plan.fsdp.prepare`, of a kernel of `ndim` dimensions.
    """
    recipe = recipe_of(placed)
    if placed is None or recipe is None or not _multiplies_codes(placed, recipe):
        return gather_prepared(prepared, placed, dtype, ndim=ndim)
    with named_after(placed):
        largest = None
        if scales is not None:
            largest = scales[1]
        codes, scale = quantize(
            prepared, (), recipe, recipe.inputs, is_kernel=True, largest=largest
        )
    plain = dataclasses.replace(placed, comm=placed.comm.without_codec())
    sent = gather(jax.lax.bitcast_convert_type(codes, jnp.uint8), plain, jnp.uint8)
    return Operand(jax.lax.bitcast_convert_type(sent, codes.dtype), scale)


def _multiplies_codes(placed: ParamPlacement, recipe: QuantizationRecipe) -> bool:
    """Return whether a kernel is gathered in the codes of its matmuls."""
    return recipe.kind == "float8" and placed.comm.operand_codec == "fp8"


def gradient_by_recipe(
    exact: Callable[..., Array],
    form: str,
    arrays: tuple[Array, Array],
    placed: ParamPlacement | None,
    axes: str,
    outs: str,
    scales: Scales,
    dtype: Any,
) -> Array:
    """Return the gradient of a kernel.

    The scales of quantized arrays multiply the sum over devices.

    Args:
        exact: `(x, dy) -> gradient`, for recipes that do not quantize it.
        form: The same product as a formula of `jnp.einsum`.
        arrays: Input and gradient of the output.
        axes: The kernel's dimensions, each a letter, and `outs` those of the output.
    """
    recipe = recipe_of(placed)
    if recipe is None or recipe.scaling == "row":
        return kernel_gradient(exact, *arrays, placed, axes, outs)
    x, dy = arrays
    largest_x, largest_dy = None, None
    if scales is not None:
        largest_x, _, largest_dy = scales
    ndim_out = len(outs)
    tokens_x = tuple(range(x.ndim - (len(axes) - ndim_out)))
    tokens_dy = tuple(range(dy.ndim - ndim_out))
    with named_after(placed):
        a = quantize(x, tokens_x, recipe, recipe.inputs, largest=largest_x)
        b = quantize(dy, tokens_dy, recipe, recipe.gradient, largest=largest_dy)

    def local(a: Array, b: Array) -> Array:
        return product(form, Operand(a), Operand(b), dtype)

    gradient = kernel_gradient(local, a.array, b.array, placed, axes, outs)
    if a.scale is None or b.scale is None:
        return gradient
    scale = a.scale.reshape(()) * b.scale.reshape(())
    return gradient * scale


def seen_before(x: Array, kernel: Array, scales: Scales) -> tuple[Array, ...]:
    """Return the largest magnitudes of input and kernel for their history; empty without one."""
    if scales is None:
        return ()
    return _magnitude(x), _magnitude(kernel, is_whole=True)


def as_history(seen: tuple[Array, ...], dy: Array) -> History | None:
    """Return all three magnitudes as the cotangent of a history; None without one."""
    if not seen:
        return None
    now = jnp.stack([*seen, _magnitude(dy)])
    return jnp.broadcast_to(now[:, None], (*now.shape, HISTORY))


def _magnitude(x: Array, *, is_whole: bool = False) -> Array:
    every = tuple(range(x.ndim))
    return magnitude(x, every, is_whole=is_whole).reshape(())
