"""Quantized matmuls: products of what the codes stand for, with scales of all devices and microbatches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd import codecs, tree
from spmd.delayed_scaling.amax_history import ASSUMED, AmaxHistory
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import next_token_loss
from spmd.jaxpr.equations import equations
from spmd.layers.grouped_matmul import grouped_matmul, quantized_grouped_matmul
from spmd.layers.quantized_matmul import (
    magnitude,
    quantize,
    quantized_einsum,
    rounded_in_blocks,
)
from spmd.model_interface.grad_transform import Carry
from spmd.models.mixtral import PRESETS as MIXTRALS
from spmd.partition_rules.mixtral import MIXTRAL
from spmd.plan.context import use_plan
from spmd.plan.manual import shard_map_over
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.settings.compress import CompressConfig
from spmd.settings.quantize import RECIPES
from spmd.sharding.mesh import make_mesh
from spmd.testing import token_batches
from spmd.training.state import as_stored, init_state
from spmd.training.step import make_train_step
from tests import tiny

CONFIG = tiny.replaced(d_model=64, d_ff=128)
NORMAL = np.random.default_rng(0).normal(size=(4, 32, 64)).astype(np.float32)
KERNEL = np.random.default_rng(1).normal(size=(64, 128)).astype(np.float32) / 8
FORWARD, BACKWARD = "...i,io->...o", "...o,io->...i"


def stood_for(x, recipe, dtype, summed, *, is_kernel=False):
    """What the codes of an array stand for, element by element in numpy."""
    x, top = np.asarray(x, np.float32), 127.0 if dtype == "int8" else float(jnp.finfo(dtype).max)
    if recipe.scaling == "block":
        lengths = {summed[-1]: recipe.block}
        free = [dim for dim in range(x.ndim) if dim not in summed]
        lengths |= {free[-1]: recipe.block} if is_kernel and recipe.is_square else {}
        largest = np.zeros_like(x)
        for index in np.ndindex(
            *(x.shape[d] // np.gcd(x.shape[d], lengths.get(d, 1)) for d in range(x.ndim))
        ):
            sizes = [int(np.gcd(x.shape[d], lengths.get(d, 1))) for d in range(x.ndim)]
            part = tuple(
                slice(i * size, (i + 1) * size) for i, size in zip(index, sizes, strict=True)
            )
            largest[part] = np.abs(x[part]).max()
    else:
        over = summed if recipe.scaling == "row" else None
        largest = np.broadcast_to(np.abs(x).max(axis=over, keepdims=True), x.shape)
    scale = np.where(largest > 0, largest / top, 1)
    if dtype == "int8":
        return np.round(x / scale) * scale
    scale = 2.0 ** np.ceil(np.log2(scale))
    return np.asarray(jnp.asarray(x / scale).astype(dtype).astype(jnp.float32)) * scale


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_a_product_is_that_of_what_codes_stand_for(recipe):
    """Forward, and the gradient of the input; the control, without quantization, differs."""
    for form, a, is_gradient in ((FORWARD, NORMAL, False), (BACKWARD, NORMAL @ KERNEL, True)):
        dtype = recipe.gradient if is_gradient else recipe.inputs
        found = quantized_einsum(
            form,
            jnp.asarray(a),
            jnp.asarray(KERNEL),
            recipe,
            is_gradient=is_gradient,
            scales=None,
            dtype="float32",
        )
        kernel = stood_for(KERNEL, recipe, recipe.inputs, (int(is_gradient),), is_kernel=True)
        expected = np.einsum(form, stood_for(a, recipe, dtype, (2,)), kernel)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
        plain = np.einsum(form, a, KERNEL)
        assert np.abs(found - plain).max() > 2e-3 * np.abs(plain).max()


def test_scales_are_powers_of_two_rounded_up():
    """Exactly, also of the smallest and of nothing."""
    x = np.float32([0, 1, 1.0000001, 3, 2.0**-126, 1e-30, 448 / 448])
    expected = np.float32([0, 1, 2, 4, 2.0**-126, 2.0**-99, 1])
    assert codecs.power_of_two(jnp.asarray(x)).tolist() == expected.tolist()
    codes, scale = quantize(jnp.zeros((8, 8)), (1,), RECIPES["fp8"], "float8_e4m3fn")
    assert not np.asarray(codes, np.float32).any()
    assert float(scale.reshape(())) == 0
    broken = quantize(jnp.full((8, 8), jnp.nan), (1,), RECIPES["fp8"], "float8_e4m3fn")
    assert np.isnan(np.asarray(broken.array, np.float32)).all()


@pytest.mark.parametrize("factor", [1, 0, 1e-30, 1e37])
def test_codes_that_are_stored_or_multiplied_are_of_one_quantizer(factor):
    """Bitwise, of each block; the control: blocks of half the size have other codes and scales."""
    x = jnp.asarray(NORMAL * np.float32(factor))

    def codes_of(codec, block):
        blocks, inner = codecs.split_blocks(x, {2: block})
        largest = jnp.abs(blocks).max(inner, keepdims=True)
        codes, scale = codecs.quantize(blocks, largest, codec.dtype, codec.top)
        return np.asarray(codes.reshape(x.shape)), np.asarray(scale.squeeze(-1))

    for codec in (codecs.CODECS["int8"], codecs.CODECS["fp8"]):
        found = codec.encode(x, 32)
        codes, scale = codes_of(codec, 32)
        np.testing.assert_array_equal(found.codes, codes)
        np.testing.assert_array_equal(found.scale, scale)
        others, other_scale = codes_of(codec, 16)
        assert other_scale.shape != scale.shape
        assert (others != codes).any() == (factor != 0)

    recipe = RECIPES["mxfp8"]
    blocks, inner = codecs.split_blocks(x, {2: recipe.block})
    rounded = codecs.dequantize(
        *codecs.quantize(
            blocks,
            jnp.abs(blocks).max(inner, keepdims=True),
            recipe.inputs,
            codecs.largest_code(recipe.inputs),
            has_exact_scales=True,
            divides=False,
            clips=False,
        ),
        x.dtype,
    )
    np.testing.assert_array_equal(
        rounded_in_blocks(x, (2,), recipe, recipe.inputs), rounded.reshape(x.shape)
    )


@pytest.mark.parametrize("name", ["mxfp8", "fp8-block"])
def test_small_blocks_of_float16_are_finite(name):
    """A scale that float16 has no normal number for is computed in float32; the control is float32."""
    recipe = RECIPES[name]
    x = np.random.default_rng(0).uniform(-1, 1, (64, 256)).astype(np.float32)
    magnitudes = 2.0 ** -np.arange(4.0, 20.0, 0.25)  # [row]
    x = jnp.asarray(x * magnitudes[:, None], jnp.float16)
    rounded = rounded_in_blocks(x, (1,), recipe, recipe.inputs)
    expected = rounded_in_blocks(x.astype(jnp.float32), (1,), recipe, recipe.inputs)
    np.testing.assert_array_equal(rounded, expected.astype(jnp.float16))
    assert np.isfinite(rounded).all()


def test_magnitudes_beyond_the_history_are_clipped():
    """To the largest code, not to what is no number."""
    codes, scale = quantize(
        jnp.float32([[1, -500]]),
        (1,),
        RECIPES["fp8-delayed"],
        "float8_e4m3fn",
        largest=jnp.float32(1),
    )
    assert (np.asarray(codes, np.float32) * np.asarray(scale)).tolist() == [
        [1, -448 * float(scale.reshape(()))]
    ]


def test_one_scale_is_of_all_devices():
    """In a manual region too, bitwise; the control, of one device, differs. A row is of one device, as its scale is."""
    mesh, x = make_mesh(data=4, devices=jax.devices()[:4]), jnp.asarray(NORMAL)

    def codes(x, is_kernel):
        return quantize(x, (2,), RECIPES["fp8"], "float8_e4m3fn", is_kernel=is_kernel).array.astype(
            jnp.float32
        )

    run = [
        jax.jit(
            shard_map_over(
                mesh, ("data",), functools.partial(codes, is_kernel=alone), P("data"), P("data")
            )
        )(x)
        for alone in (False, True)
    ]
    whole = codes(x, False)
    assert np.array_equal(run[0], whole)
    assert not np.array_equal(run[1], whole)
    rows = jax.jit(
        shard_map_over(
            mesh,
            ("data",),
            lambda x: quantize(x, (2,), RECIPES["int8"], "int8").array,
            P("data"),
            P("data"),
        )
    )
    assert np.array_equal(rows(x), quantize(x, (2,), RECIPES["int8"], "int8").array)
    spread = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
    assert np.array_equal(jax.jit(codes, static_argnums=1)(spread, False), whole)


@functools.cache
def plan(quantize, config=CONFIG, options=(), **sizes):
    rules, mesh = tiny.LLAMA_TIED if config.tied else tiny.LLAMA, tiny.mesh(**sizes)
    return make_plan(
        mesh, rules, tiny.model(config), tiny.OPTIMIZER, quantize=quantize, **dict(options)
    )


@functools.cache
def steps(quantize, count=1, microbatches=1, config=CONFIG, options=(), **sizes):
    """Losses and gradient norms of a few steps, and the state after them."""
    made = plan(quantize, config, options, **sizes)
    grad_fn = accumulate(value_and_grad(tiny.loss_fn(config)), microbatches)
    step, state, found = make_train_step(made, grad_fn=grad_fn), init_state(made), []
    for batch in token_batches((8, 32), config.vocab, count):
        state, metrics = step(state, batch)
        found.append((float(metrics["loss"]), float(metrics["gradient_norm"])))
    return found, state


@pytest.mark.soak
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8", "int8"])
def test_layouts_train_alike(recipe):
    """But for codes that are rounded the other way where sums differ in order; the control is without the recipe."""
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    one, many, plain = (
        np.array(steps(*args, **at)[0][0])
        for args, at in (((recipe,), {}), ((recipe,), mesh), (("",), {}))
    )
    assert (np.abs(one / many - 1) < (2e-5, 2e-3)).all()
    assert (np.abs(one / plain - 1) > (4e-5, 4e-3)).any()


def dots(recipe):
    """(dtype, dtype) of operands → the number of products in the traced step."""
    made = plan(recipe, fsdp=2)
    step = make_train_step(made, tiny.loss_fn(CONFIG))
    (batch,) = token_batches((8, 32), CONFIG.vocab, 1)
    found: dict = {}
    for equation in equations(step.trace(batch).jaxpr):
        if equation.primitive.name == "dot_general":
            dtypes = tuple(x.aval.dtype.name for x in equation.invars)
            found[dtypes] = found.get(dtypes, 0) + 1
    return found


def test_only_linear_layers_are_multiplied_in_few_bits():
    """Seven kernels of a layer, each thrice: never scores, the embedding or the head."""
    plain, fp8, int8 = dots(""), dots("fp8"), dots("int8")
    assert (fp8["float8_e4m3fn", "float8_e4m3fn"], fp8["float8_e4m3fn", "float8_e5m2"]) == (7, 7)
    assert fp8["float8_e5m2", "float8_e4m3fn"] == 7
    assert fp8["float32", "float32"] == plain["float32", "float32"] - 21
    assert int8 == {("int8", "int8"): 14, ("float32", "float32"): plain["float32", "float32"] - 14}


@pytest.mark.soak
def test_codes_are_gathered_straight_into_the_matmul():
    """Codes of one scale are those of the whole kernel, so the numbers are bitwise those without compression."""
    at = {"config": dataclasses.replace(CONFIG, tied=True), "fsdp": 4}
    options = (("compress", CompressConfig(gather="fp8")),)
    assert steps("fp8", options=options, **at)[0] == steps("fp8", **at)[0]
    assert steps("", options=options, **at)[0] != steps("", **at)[0]
    step = make_train_step(plan("fp8", options=options, **at), tiny.loss_fn(at["config"]))
    (batch,) = token_batches((8, 32), CONFIG.vocab, 1)
    gathered = [
        x.invars[0].aval
        for x in equations(step.trace(batch).jaxpr)
        if x.primitive.name == "all_gather"
    ]
    assert sum(x.dtype == "uint8" for x in gathered) == len(plan("fp8").model.info().linear)
    # of the head
    assert {x.shape[-1] for x in gathered if x.dtype != "uint8" and x.ndim > 1} == {
        CONFIG.d_model // 4
    }


def seen(state, path="layers/mlp/up_proj/kernel"):
    return np.asarray(tree.flatten(state.transforms)[f"magnitudes/{path}/history"])


@pytest.mark.soak
def test_a_step_remembers_the_largest_of_its_microbatches():
    """As one batch has it, on every mesh; before the first step, magnitudes are assumed."""
    state = steps("fp8-delayed", 2)[1]
    history = seen(state)
    assert history.shape == (CONFIG.layers, len(ASSUMED), 16)
    assert (history[..., 2:] == np.array([*ASSUMED.values()])[None, :, None]).all()
    kernel = np.abs(
        np.asarray(
            tree.flatten(init_state(plan("fp8-delayed")).params)["layers/mlp/up_proj/kernel"]
        )
    )
    np.testing.assert_array_equal(history[:, 1, 1], kernel.max(axis=(1, 2)))
    for options in ({"data": 2, "fsdp": 2, "tensor": 2}, {"microbatches": 2}):
        np.testing.assert_allclose(
            seen(steps("fp8-delayed", **options)[1])[..., 0], history[..., 1], rtol=1e-4
        )
    flat = tree.flatten(state.transforms)
    assert not any(np.asarray(x).any() for path, x in flat.items() if path.endswith("/now"))


def test_what_is_no_magnitude_is_forgotten():
    """The last finite one stays: one bad batch does not stop a run for sixteen steps."""
    state = {
        "k": {"history": jnp.ones((2, 3, 16)) * 2, "now": jnp.full((2, 3), jnp.nan).at[0].set(5.0)}
    }
    history = AmaxHistory()
    grad_fn = history.wrap(
        lambda params, carry, batch, key: ((), {}, carry.with_state(history.name, state))
    )
    after = grad_fn((), Carry(), (), jax.random.key(0))[2].transforms[history.name]["k"]
    assert np.asarray(after["history"])[:, 0, 0].tolist() == [5, 2]
    assert not np.asarray(after["now"]).any()


@pytest.mark.soak
def test_checkpoints_are_those_of_runs_without_recipes():
    """Histories are restored where a checkpoint has them, and assumed where it does not."""
    state, history = steps("fp8-delayed")[1], AmaxHistory()
    stored = tree.flatten({"variables": as_stored(state).variables})
    assert history.targets(stored, stored) == stored
    assert history.targets({}, stored) == {}
    found = history.adapt({}, stored)
    path = f"variables/{history.name}/layers/mlp/up_proj/kernel/history"
    assert np.asarray(found[path])[0, :, 0].tolist() == [*ASSUMED.values()]
    assert history.adapt(stored, stored) == stored
    plain, recipe = (set(tree.flatten(steps(name)[1].params)) for name in ("", "fp8-delayed"))
    assert plain == recipe


@pytest.mark.parametrize("recipe", ["fp8", "int8", "fp8-block"])
def test_experts_have_the_products_of_their_codes(recipe):
    """Rows without an expert change no other; sorted rows and slots agree, and so do shards of hidden units."""
    recipe = RECIPES[recipe]
    rows, kernels = (
        jnp.asarray(NORMAL[:2]),
        jnp.stack([jnp.asarray(KERNEL), 3 * jnp.asarray(KERNEL[::-1])]),
    )
    slots = quantized_grouped_matmul(rows, kernels, None, recipe)
    flat = jnp.concatenate([rows.reshape(64, 64), jnp.full((8, 64), 1e30)])
    ragged = quantized_grouped_matmul(flat, kernels, jnp.array([32, 32]), recipe)
    np.testing.assert_allclose(ragged[:64], slots.reshape(64, 128), rtol=0, atol=1e-5)
    exact = grouped_matmul(rows, kernels, None)
    error = np.abs(slots - exact).max() / np.abs(exact).max()
    assert 1e-3 < error < 0.06
    mesh = make_mesh(tensor=2, devices=jax.devices()[:2])
    local = functools.partial(
        quantized_grouped_matmul, sizes=None, recipe=recipe, tensor=("tensor",), is_split=True
    )
    specs = (P(None, None, "tensor"), P(None, "tensor"))
    run = shard_map_over(
        mesh, ("tensor",), lambda x, k: jax.lax.psum(local(x, k), "tensor"), specs, P()
    )
    np.testing.assert_allclose(jax.jit(run)(rows, kernels), slots, rtol=0, atol=1e-5)


@pytest.mark.soak
def test_a_mixture_trains_alike_on_every_mesh():
    """With quantized experts: to the order of sums; the control, without a recipe, is further off."""
    config = dataclasses.replace(MIXTRALS["test"], d_model=64)
    model = from_nnx(config.build)
    (batch,) = token_batches((8, 32), config.vocab, 1)

    def loss(quantize, **sizes):
        made = make_plan(tiny.mesh(**sizes), MIXTRAL, model, tiny.OPTIMIZER, quantize=quantize)
        with use_plan(made):
            loss_fn = next_token_loss(model, train=False)
            state = init_state(made)
            return float(
                jax.jit(loss_fn)(state.params, state.variables, batch, jax.random.key(0))[0]["loss"]
            )

    one = loss("fp8")
    assert loss("fp8", fsdp=2, expert=2, tensor=2) == pytest.approx(one, rel=2e-4)
    assert abs(loss("") / one - 1) > 1e-6


def test_a_magnitude_has_the_dimensions_that_were_asked_for():
    """A row's, and an array's."""
    assert magnitude(jnp.asarray(NORMAL), (2,)).shape == (4, 32, 1)
    assert magnitude(jnp.asarray(NORMAL), (0, 1, 2)).shape == (1, 1, 1)
