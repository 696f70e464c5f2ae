"""Stored activations: the forward pass is exact, the backward pass has decoded codes, and the ledger counts them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict
from jax.sharding import PartitionSpec as P

import spmd
from spmd.analysis.memory import Estimate, estimate_memory
from spmd.codecs import CODECS
from spmd.errors import AnnotationError, ConfigError, RuleError
from spmd.layers.expert_layout import ExpertKernel
from spmd.layers.moe import mixture_of_experts
from spmd.layers.router import RouterConfig, route
from spmd.model_interface.remat import Remat, make_remat
from spmd.models.decoder.activations import gated
from spmd.models.decoder.norms import RMSNorm
from spmd.models.mixtral import PRESETS as MIXTRALS
from spmd.partition_rules.mixtral import MIXTRAL
from spmd.plan.annotate import annotate, remat_layer
from spmd.plan.compressed_activations import store
from spmd.plan.context import override
from spmd.plan.manual import shard_map_over
from spmd.plan.nnx_model import from_nnx
from spmd.testing import token_batches
from spmd.training.step import make_train_step
from tests import tiny
from tests.upgrades import UNLESS_OLD

WIDTH, HIDDEN = 32, 64
NAMES = ("residual", "mlp_input", "mlp_gate", "mlp_up", "expert_hidden")
SPLIT = ("mlp_gate", "mlp_up")
SPECS = FrozenDict({name: P("data", None, "tensor" if name in SPLIT else None) for name in NAMES})
MESH = {"data": 2, "tensor": 2}
CONFIG = tiny.replaced(d_model=64, d_ff=256)
pytestmark = UNLESS_OLD
BATCH = token_batches((4, 16), CONFIG.vocab, steps=1)[0]


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_codecs_round_to_their_nearest_code(name):
    """An error is at most half a step of the block; zeros stay zero, the largest is exact; tiles change nothing."""
    codec = CODECS[name]
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(3, 16, 96)) * np.exp(rng.normal(size=(3, 16, 1)))).astype(np.float32)
    x[0, 0] = 0

    @jax.jit
    def both(x):
        plain, tiled = codec.encode(x, 32), codec.encode(x, 32, rows=8)
        return (
            plain,
            tiled,
            *(
                codec.decode(coded, "float32", rows)
                for coded, rows in ((plain, 1), (tiled, 8), (plain, 0))
            ),
        )

    plain, tiled, again, *others = both(x)
    jax.tree.map(np.testing.assert_array_equal, (tiled, *others), (plain, again, again))
    assert (plain.codes.shape, plain.scale.shape) == (x.shape, (3, 16, 3))
    blocks, decoded = (np.abs(np.asarray(a)).reshape(3, 16, 3, 32) for a in (x, again))
    largest = blocks.max(-1, keepdims=True)
    step = largest / 254 if name == "int8" else np.maximum(blocks / 16, largest / 448 / 2**10)
    assert (np.abs(decoded - blocks) <= step * 1.001).all()
    assert not np.asarray(again)[0, 0].any()
    np.testing.assert_allclose(decoded.max(-1, keepdims=True), largest, rtol=1e-6)


def test_a_mask_keeps_the_sign():
    """Eight elements are a byte; zero counts as negative, as in the derivative of a ReLU."""
    coded = CODECS["mask"].encode(jnp.array([[1.0, -2, 0, 3, -0.5, 1, 1, -1]]), 8)
    assert (coded.codes.dtype, coded.codes.shape, coded.scale) == (jnp.uint8, (1, 1), None)
    assert CODECS["mask"].decode(coded, "float32").tolist() == [[1, -1, -1, 1, -1, 1, 1, -1]]


def layer(weights, x, at):
    """A layer with a norm, products, a gate and a manual region, each of a stored activation."""
    x = at(x, "residual")
    hidden = at(RMSNorm(WIDTH, eps=1e-5)(x), "mlp_input")
    gate, up = hidden @ weights["gate"], hidden @ weights["up"]
    y = gated(at(gate, "mlp_gate"), at(up, "mlp_up"))
    local = lambda y: jnp.sin(at(y, "expert_hidden"))  # noqa: E731
    y = (
        shard_map_over(tiny.mesh(**MESH), ("data",), local, P("data"), P("data"))(y)
        if at is annotate
        else local(y)
    )
    return x + y @ weights["down"]


def reference(weights, x, codec):
    """The layer, with a backward pass that differentiates it with each activation replaced by its decoded codes."""

    @jax.custom_vjp
    def run(weights, x):
        return layer(weights, x, lambda x, _: x)

    def backward(saved, dy):
        values = {}

        def replaced(x, name):
            block = codec.block_of(x.shape[-1] // (2 if name in SPLIT else 1))
            value = codec.decode(codec.encode(values[name], block), x.dtype)
            return x + jax.lax.stop_gradient(value - x)

        layer(*saved, lambda x, name: values.setdefault(name, x))
        return jax.vjp(lambda *arrays: layer(*arrays, replaced), *saved)[1](dy)

    run.defvjp(lambda *arrays: (run(*arrays), arrays), backward)
    return run(weights, x)


@functools.cache
def weights_and_input():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"gate": (3, WIDTH, HIDDEN), "up": (3, WIDTH, HIDDEN), "down": (3, HIDDEN, WIDTH)}
    weights = {
        name: jax.random.normal(key, shape) * shape[1] ** -0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    return weights, jax.random.normal(keys[3], (4, 8, WIDTH))


def differentiated(run):
    def loss(weights, x):
        x = jax.lax.scan(lambda x, w: (run(w, x), None), x, weights)[0]
        return (x * jnp.cos(jnp.arange(x.size).reshape(x.shape))).sum()

    return jax.jit(jax.value_and_grad(loss, (0, 1)))(*weights_and_input())


@functools.cache
def under(remat):
    """Loss and gradients of three scanned layers under a remat policy, over data and tensor."""
    with override(mesh=tiny.mesh(**MESH), activations=SPECS, remat=make_remat(remat)):
        return differentiated(remat_layer(lambda w, x: layer(w, x, annotate), scanned=True))


def distance(found, expected):
    """The largest difference of two trees, relative to each array's largest element."""
    errors = jax.tree.map(
        lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max()), found, expected
    )
    return max(jax.tree.leaves(errors))


ALL = "store:int8=" + ",".join(NAMES)
GATED = "store:fp8=mlp_gate,mlp_up,expert_hidden"


@pytest.mark.parametrize("remat", [ALL, GATED])
def test_the_forward_pass_is_exact(remat):
    """The loss is bitwise that of the same layers without stored activations; the gradient is not."""
    assert under(remat)[0] == under("full")[0]
    assert distance(under(remat)[1], under("full")[1]) > 1e-3


def test_the_gradient_is_that_of_the_decoded_activations():
    """Through a norm, products, a gate and a manual region, in a scan; the control is a backward pass without codes."""
    expected = differentiated(functools.partial(reference, codec=CODECS["int8"]))[1]
    assert distance(under(ALL)[1], expected) < 1e-5
    assert distance(under("full")[1], expected) > 1e-3


def test_codes_in_host_memory_are_the_same():
    """Codes that are moved to the host and back give the same gradient, bit by bit."""
    jax.tree.map(np.testing.assert_array_equal, under(f"{ALL} offload:mlp_gate,mlp_up"), under(ALL))


def relu_layer(weights, x, activation=jax.nn.relu):
    hidden = annotate(activation(annotate(x @ weights["up"], "mlp_up")), "mlp_gate")
    return x + hidden @ weights["down"]


def under_mask(remat, activation=jax.nn.relu):
    with override(mesh=tiny.mesh(**MESH), activations=SPECS, remat=make_remat(remat)):
        return differentiated(
            remat_layer(functools.partial(relu_layer, activation=activation), scanned=True)
        )


def test_a_mask_is_all_that_a_relu_needs():
    """With one bit of the ReLU's input and its result saved, loss and gradient are those without a mask."""
    found, expected = (
        under_mask("store:mask=mlp_up save:mlp_gate"),
        under_mask("save:mlp_up,mlp_gate"),
    )
    assert found[0] == expected[0]
    assert distance(found[1], expected[1]) < 1e-6


@pytest.mark.parametrize(
    ("remat", "activation", "complaint"),
    [
        ("store:mask=mlp_up save:mlp_gate", jax.nn.silu, "store:mask=mlp_up: is read by"),
        ("store:mask=mlp_up", jax.nn.relu, "also save:mlp_gate, or store:int8=mlp_up"),
        ("store:mask=mlp_gate,mlp_up", jax.nn.relu, "store:mask=mlp_gate: is read by dot_general"),
    ],
)
def test_a_mask_for_anything_else_is_an_error(remat, activation, complaint):
    """Another activation function, a ReLU whose result is computed again, and the ReLU's result itself."""
    with pytest.raises(AnnotationError, match=complaint):
        under_mask(remat, activation)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("store:int8=a", Remat(store={"a": "int8"})),
        (
            "save:c store:int8=a,b store:mask=d offload:a",
            Remat("", ["c"], ["a"], 1, {"a": "int8", "b": "int8", "d": "mask"}),
        ),
        ("store:fp8=a/2", Remat("names", every=2, store=[("a", "fp8")])),
    ],
)
def test_policies_are_read_and_written_alike(text, value):
    """The text gives the value, the value prints as the text, and both hash."""
    assert make_remat(text) == value
    assert str(value) == text
    assert hash(value) == hash(make_remat(text))


def test_all_that_is_wrong_with_a_policy_is_one_error():
    """Unknown codecs, names in two lists, names twice, an interval, and a word without a codec."""
    with pytest.raises(ConfigError) as caught:
        make_remat("store:int9=a store:int8=b,b,c store:fp8=c,d save:d store:int8/0")
    text = str(caught.value)
    for complaint in (
        "'store:int8' does not exist",
        "store:int9= is no codec",
        'did you mean "int8"',
        "b is named twice",
    ):
        assert complaint in text
    for complaint in ("c is named twice", "d is both saved and stored", "0 is not an interval"):
        assert complaint in text


def test_names_and_widths_that_do_not_fit_are_errors():
    """A name that no rule has; then, together, one that no layer marks, a width without a block and a wrong mask."""
    with pytest.raises(
        RuleError, match="remat store:int8=mlp_gat: is no activation of the rule table"
    ):
        tiny.plan(options=(("remat", "store:int8=mlp_gat"),))
    remat = "store:int8=attention_key,logits store:mask=mlp_up"
    with pytest.raises(AnnotationError) as caught:
        estimate(remat)
    where = [problem.where.removeprefix("remat store:") for problem in caught.value.problems]
    assert sorted(where) == ["int8=attention_key", "int8=logits", "mask=mlp_up"]


def estimate(remat) -> Estimate:
    """The ledger of a tiny Llama in bfloat16."""
    plan = tiny.plan(CONFIG, options=(("remat", remat), ("precision", "bf16")), fsdp=2, tensor=2)
    return estimate_memory(make_train_step(plan, tiny.loss_fn(CONFIG)), BATCH, "tpu")


def test_the_ledger_has_half_of_the_bytes():
    """Codes have half of bfloat16's bytes, and a scale for 128 elements; no matmul is repeated that saving avoids."""
    saved, stored = (
        estimate("save:mlp_gate,mlp_up"),
        estimate("store:int8=mlp_gate,mlp_up offload:mlp_up"),
    )
    plain = saved.saved["mlp_gate"]
    assert plain == CONFIG.layers * BATCH["tokens"].size * CONFIG.d_ff * 2 // 4
    assert stored.saved["mlp_gate (8.25-bit int8)"] == plain // 2 + plain // 64
    assert (stored.saved["mlp_up (8.25-bit int8)"], stored.host) == (
        plain // 64,
        {"activations": plain // 2},
    )
    assert stored.matmul_flops == saved.matmul_flops


def test_experts_store_their_hidden_units():
    """In a manual region inside a custom derivative; the layers' other activations are computed again."""
    config = dataclasses.replace(MIXTRALS["test"], d_ff=32)
    model = from_nnx(config.build)
    plan = spmd.make_plan(
        tiny.mesh(fsdp=2, expert=2),
        MIXTRAL,
        model,
        tiny.OPTIMIZER,
        remat="store:int8=expert_hidden",
    )
    step = make_train_step(plan, spmd.next_token_loss(model))
    found = estimate_memory(step, token_batches((4, 16), config.vocab, steps=1)[0])
    assert found.saved["expert_hidden (9-bit int8)"]
    assert "expert_hidden" not in found.saved


@pytest.mark.parametrize(
    "options",
    [{"random_second": True}, pytest.param({"choice": "expert"}, marks=pytest.mark.soak)],
    ids=str,
)
def test_experts_are_those_of_the_forward_pass(options, monkeypatch):
    """A router above a stored activation chooses no other experts in the backward pass; unsaved, its choices would."""
    config = RouterConfig(dispatch="capacity", balance=0, **options)
    rng = np.random.default_rng(0)
    x, table, into, out = (
        jnp.asarray(rng.normal(size=shape) / shape[-2] ** 0.5, jnp.float32)
        for shape in ((2, 256, WIDTH), (WIDTH, 8), (8, WIDTH, HIDDEN), (8, HIDDEN, WIDTH))
    )

    def layer(x):
        x = store(
            x,
            "residual",
            CODECS["int8"],
            x.shape,
            lambda part: part,
            on_host=False,
            transposed=False,
        )
        routing, _ = route(
            x @ table, config, key=jax.random.key(0) if config.random_second else None
        )
        y, _ = mixture_of_experts(
            x, routing, config, [ExpertKernel(into, None)], ExpertKernel(out, None), jnp.tanh
        )
        return jnp.square(y).sum()

    def error():
        gradient = jax.jit(jax.grad(make_remat("store:int8=residual").apply(layer, scanned=False)))(
            x
        )
        return float(jnp.linalg.norm(gradient - exact) / jnp.linalg.norm(exact))

    exact = jax.jit(jax.grad(layer))(x)
    assert error() < 0.01
    monkeypatch.setattr("spmd.model_interface.remat.CHOICE", "another name")
    assert error() > 0.05
