"""What each remat policy keeps and what it computes again, against closed forms and a published one."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spmd.analysis.memory import estimate_memory
from spmd.jaxpr.traced_program import matmul_flops, read_program
from spmd.models.decoder import DecoderConfig
from spmd.models.decoder.inputs import LayerInputs
from spmd.plan.annotate import remat_attention, remat_layer
from spmd.plan.context import use_plan
from spmd.training.step import make_train_step
from tests import tiny
from tests.upgrades import unless_old

GPT3 = DecoderConfig(d_model=12_288, layers=1, heads=96, kv_heads=96, d_ff=4 * 12_288)
LLAMA3_8B = DecoderConfig(d_model=4096, layers=1, heads=32, kv_heads=8, d_ff=14_336)
BATCH, SEQ, BLOCKS = 2, 2048, 8


def kept_bytes(function, *arguments, of=lambda aval: aval.ndim >= 3 and aval.shape[:2] != (1, SEQ)):
    """Bytes that the derivative of a function keeps of its forward pass: every array once, and no argument.

    Not counted are statistics of tokens, and the table of angles `[1, seq, …]`, a constant that all
    layers share.
    """
    jaxpr = jax.make_jaxpr(lambda *a: jax.vjp(function, *a)[1])(*arguments).jaxpr
    kept = {id(v): v.aval for v in jaxpr.outvars if not hasattr(v, "val") and v not in jaxpr.invars}
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in kept.values() if of(aval))


def make_layer(config, rngs):
    """The layer of a config without a pattern."""
    (spec,) = config.pattern.group
    return spec.build(config.sizes, None, 0, rngs)


def llama_layer(config, remat, dtype):
    """One layer of a Llama under a policy, with abstract arguments: its parameters and its input."""
    graph, state = nnx.split(nnx.eval_shape(lambda: make_layer(config, nnx.Rngs(0))))
    angles = (np.ones((1, SEQ, config.head_width // 2), np.float32),) * 2
    inputs = LayerInputs((angles,))

    def layer(state, x):
        with use_plan(tiny.plan(options=(("remat", remat), ("attention", "xla")))):
            return remat_layer(
                lambda s, x: nnx.merge(graph, s)(x, None, inputs)[0], scanned=False, number=0
            )(state, x)

    return layer, nnx.to_pure_dict(state), jax.ShapeDtypeStruct((BATCH, SEQ, config.d_model), dtype)


def closed_form(config, itemsize, *, core):
    """Bytes of activations that one layer keeps: the docstring of docs/how-to/remat.md in code.

    Inputs of the layer, of its two norms' matmuls and of `o_proj`, and the stream in between;
    queries, keys and values; gate, up and what goes down. The core: of each visible score its
    exponential in float32 and its probability; of each block of queries the keys and values that it
    sees.
    """
    h, k, f = config.d_model, config.kv_heads * config.head_width, config.d_ff
    tokens, visible = BATCH * SEQ, (BLOCKS + 1) / (2 * BLOCKS)
    kept = tokens * itemsize * (6 * h + 2 * k + 3 * f)
    inside = (4 + itemsize) * BATCH * config.heads * SEQ**2 * visible + tokens * itemsize * (
        BLOCKS - 1
    ) * k
    return kept + (inside if core else 0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("config", [GPT3, LLAMA3_8B], ids=["gpt3-175b", "llama3-8b"])
def test_a_layer_keeps_what_the_formula_says(config, dtype):
    """Without remat, and under `selective`, to half a percent (statistics of rows are not in the formula)."""
    for remat, core in (("none", True), ("selective", False)):
        kept = kept_bytes(*llama_layer(config, remat, dtype))
        assert kept == pytest.approx(
            closed_form(config, jnp.dtype(dtype).itemsize, core=core), rel=0.005
        )


@pytest.mark.upgrades
def test_full_keeps_a_layers_input_and_no_more():
    """Which is an argument of the layer, so of its own it keeps nothing."""
    assert kept_bytes(*llama_layer(GPT3, "full", jnp.bfloat16)) == 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dropout(x, key, rate):
    return forward_dropout(x, key, rate)[0]


def forward_dropout(x, key, rate):
    mask = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(mask, x / (1 - rate), 0).astype(x.dtype), mask


dropout.defvjp(
    forward_dropout,
    lambda rate, mask, dy: (jnp.where(mask, dy / (1 - rate), 0).astype(dy.dtype), None),
)


@jax.custom_vjp
def softmax(scores):
    return forward_softmax(scores)[0]


def forward_softmax(scores):
    p = jax.nn.softmax(scores.astype(jnp.float32)).astype(scores.dtype)
    return p, p


softmax.defvjp(forward_softmax, lambda p, dp: (p * (dp - (p * dp).sum(-1, keepdims=True)),))


@jax.checkpoint
def layer_norm(x):
    wide = x.astype(jnp.float32)
    return (
        (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)
    ).astype(x.dtype)


def megatron_layer(params, x, key, heads=96):
    """A layer of GPT-3 as Korthikanti et al. count it: dropout in three places, GELU, element-wise work recomputed."""
    batch, seq, width = x.shape
    keys = jax.random.split(key, 3)

    @remat_attention
    def core(query, key, value):
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (width // heads) ** -0.5
        unseen = jnp.where(jnp.tri(seq, dtype=bool), 0.0, -1e30).astype(x.dtype)
        return jnp.einsum(
            "bhqk,bkhd->bqhd", dropout(softmax(scores + unseen[None, None]), keys[0], 0.1), value
        )

    y = layer_norm(x)
    query, key, value = ((y @ params[n]).reshape(batch, seq, heads, -1) for n in "qkv")
    x = x + dropout(core(query, key, value).reshape(batch, seq, width) @ params["o"], keys[1], 0.1)
    hidden = jax.checkpoint(jax.nn.gelu)(layer_norm(x) @ params["up"])
    return x + dropout(hidden @ params["down"], keys[2], 0.1)


def megatron(remat):
    h = GPT3.d_model
    shapes = dict.fromkeys("qkvo", (h, h)) | {"up": (h, 4 * h), "down": (4 * h, h)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}

    def layer(params, x):
        with use_plan(tiny.plan(options=(("remat", remat), ("attention", "xla")))):
            return megatron_layer(params, x, jax.random.key(0))

    return layer, params, jax.ShapeDtypeStruct((BATCH, SEQ, h), jnp.bfloat16)


def test_selective_cuts_what_the_published_formula_says():
    """GPT-3 175B, 16 bit: sbh(34 + 5as/h) without, 34sbh with it (arXiv:2205.05198, equations 1 and 6): 70 % less."""
    a, s, b, h = GPT3.heads, SEQ, BATCH, GPT3.d_model
    # The layer's input is an argument here, and counted in the 34.
    none, selective = (
        kept_bytes(*megatron(remat)) + 2 * s * b * h for remat in ("none", "selective")
    )
    assert none == pytest.approx(s * b * h * (34 + 5 * a * s / h), rel=0.01)
    assert selective == pytest.approx(34 * s * b * h, rel=0.01)
    published = (5 * a * s / h) / (34 + 5 * a * s / h)
    assert 1 - selective / none == pytest.approx(published, rel=0.05)


@functools.cache
def layer_flops(remat):
    """FLOPs of the matmuls of one GPT-3 layer, forward and backward."""
    layer, params, x = llama_layer(GPT3, remat, jnp.bfloat16)
    gradients = jax.value_and_grad(
        lambda params, x: layer(params, x).astype(jnp.float32).sum(), argnums=(0, 1)
    )
    return matmul_flops(read_program(jax.make_jaxpr(gradients)(params, x)))


def test_selective_costs_under_four_percent():
    """Of a GPT-3 layer's FLOPs; `full` costs a quarter to a third."""
    assert 1 < layer_flops("selective") / layer_flops("none") < 1.04
    assert 1.2 < layer_flops("full") / layer_flops("none") < 1.34


TOKENS = jax.ShapeDtypeStruct((16, 64), "int32")
SMALL = {
    "tokens": TOKENS,
    "targets": TOKENS,
    "weights": jax.ShapeDtypeStruct(TOKENS.shape, "float32"),
}
CONFIG = tiny.replaced(kv_heads=4)


@functools.cache
def estimate(remat):
    plan = tiny.plan(CONFIG, options=(("remat", remat),), fsdp=4)
    return estimate_memory(make_train_step(plan, tiny.loss_fn(CONFIG)), SMALL)


def test_bytes_and_flops_of_a_step_are_those_of_closed_forms():
    """What is offloaded, to the byte, and what is recomputed, to the FLOP."""
    tokens, seq, h, f = TOKENS.size, TOKENS.shape[1], CONFIG.d_model, CONFIG.d_ff
    core = CONFIG.layers * 4 * tokens * seq * h
    none = estimate("none").matmul_flops
    assert none == 6 * CONFIG.matmul_params * tokens + 3 * core
    assert estimate("selective").matmul_flops - none == core / 2
    assert (
        estimate("full").matmul_flops - none
        == 2 * tokens * CONFIG.layers * (4 * h * h + 2 * h * f) + core
    )
    offloaded = estimate("offload:mlp_hidden")
    assert offloaded.host == {"activations": 4 * CONFIG.layers * tokens * f // 4}
    assert (offloaded.saved, estimate("full").host) == (estimate("full").saved, {})


def test_policies_stand_in_the_order_of_what_they_keep():
    """Least with full, most with none."""
    held = [estimate(remat).held["activations"] for remat in ("none", "selective", "full")]
    assert held == sorted(set(held), reverse=True)


@unless_old
def test_saved_activations_have_their_names():
    """Those that the model marks and the backward pass needs, stacked over layers, one shard's bytes each."""
    found = estimate("save:attention_out offload:mlp_hidden")
    each = 4 * CONFIG.layers * TOKENS.size // 4
    assert found.saved["attention_out"] == each * CONFIG.d_model
    assert found.host == {"activations": each * CONFIG.d_ff}
    assert "mlp_hidden" not in found.saved


def test_flops_inside_a_manual_region_are_those_of_all_devices():
    """Shapes there are of one device along the manual axes; a condition counts as its most expensive branch."""
    mesh = tiny.mesh(data=2, fsdp=2)
    specs = {
        "in_specs": jax.P("data"),
        "out_specs": jax.P("data"),
        "axis_names": {"data"},
        "check_vma": False,
    }

    def branch(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x.T @ x, lambda x: x, x)

    x = jax.ShapeDtypeStruct((8, 6), "float32")
    manual = read_program(jax.make_jaxpr(jax.shard_map(branch, mesh=mesh, **specs))(x))
    assert matmul_flops(manual) == 2 * 2 * (2 * 4 * 4 * 6)
