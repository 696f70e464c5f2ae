"""NNX and Linen modules alike become two functions, and train under a table without knowing of this framework."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import spmd
from spmd import tree
from spmd.errors import AnnotationError, ConfigError
from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import next_token_loss
from spmd.lora.adapters import with_lora
from spmd.lora.config import LoRAConfig
from spmd.models.decoder import Decoder
from spmd.plan.linen_model import from_linen
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.sharding.rules import Rules, replicate
from spmd.testing import Reference, assert_parity, scale_gradients, token_batches
from tests import tiny
from tests.rounding import assert_close, noise_of

pytestmark = pytest.mark.compat

VOCAB, WIDTH = 16, 8
BATCHES = token_batches((8, 4), VOCAB, steps=1)
RULES = Rules(
    params=[
        ("embed/embedding", P("tensor", "fsdp")),
        ("hidden/kernel", P("fsdp", "tensor")),
        ("hidden/bias", P("tensor")),
        ("head/kernel", P("tensor", "fsdp")),
        ("head/bias", replicate("a few bytes")),
    ]
)


class NnxModel(nnx.Module):
    """A token-wise network that knows nothing of spmd."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.hidden = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.head = nnx.Linear(4 * WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        return self.head(jax.nn.gelu(self.hidden(self.embed(tokens))))


class LinenModel(nn.Module):
    """The same network in Linen."""

    def setup(self):
        self.embed = nn.Embed(VOCAB, WIDTH)
        self.hidden = nn.Dense(4 * WIDTH)
        self.head = nn.Dense(VOCAB)

    def __call__(self, tokens):
        return self.head(jax.nn.gelu(self.hidden(self.embed(tokens))))


@functools.cache
def model(kind):
    tokens = jax.ShapeDtypeStruct((8, 4), jnp.int32)
    return from_nnx(NnxModel) if kind == "nnx" else from_linen(LinenModel(), tokens)


@functools.cache
def grad_fn(kind):
    return value_and_grad(next_token_loss(model(kind)))


def plan(kind, **sizes):
    return make_plan(tiny.mesh(**sizes), RULES, model(kind), optax.adamw(1e-2))


def test_both_kinds_have_one_interface():
    """Parameters are nested dictionaries with the same paths, and the same numbers give the same outputs."""
    ours, theirs = (model(kind).init(jax.random.key(0)) for kind in ("nnx", "linen"))
    shapes = [
        {path: leaf.shape for path, leaf in tree.flatten(params).items()}
        for params in (ours, theirs)
    ]
    assert shapes[0] == shapes[1]
    assert list(shapes[0]) == [
        "embed/embedding",
        "head/bias",
        "head/kernel",
        "hidden/bias",
        "hidden/kernel",
    ]
    tokens = BATCHES[0]["tokens"]
    for params in (ours, theirs):
        nnx_logits, linen_logits = (model(kind).apply(params, tokens) for kind in ("nnx", "linen"))
        assert_close(nnx_logits, linen_logits, noise_of(model("linen").apply, params, tokens))


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_init_is_a_function_of_the_key(kind):
    """One key gives one set of parameters, traced or not; another gives another."""
    init = model(kind).init
    one = init(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, one, init(jax.random.key(0)))
    assert not np.array_equal(one["hidden"]["kernel"], init(jax.random.key(1))["hidden"]["kernel"])
    abstract = jax.eval_shape(init, jax.random.key(0))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract) == jax.tree.map(
        lambda x: (x.shape, x.dtype), one
    )


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_apply_is_a_function_of_the_parameters(kind):
    """It holds no parameter of its own: others give other outputs, and the first ones the first outputs again."""
    one, other = (model(kind).init(jax.random.key(seed)) for seed in (0, 1))
    tokens = BATCHES[0]["tokens"]
    before = np.asarray(model(kind).apply(one, tokens))
    assert not np.allclose(before, model(kind).apply(other, tokens))
    np.testing.assert_array_equal(before, model(kind).apply(one, tokens))


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_a_model_unknown_to_the_framework_trains_sharded(kind):
    """One step under a table on fsdp=4, tensor=2 equals one device, with every parameter split as the table says."""
    sharded = plan(kind, fsdp=4, tensor=2)
    assert_parity(sharded, plan(kind), grad_fn(kind), BATCHES)
    specs = {leaf.path: leaf.spec for leaf in sharded.params}
    assert specs["hidden/kernel"] == P("fsdp", "tensor")
    assert {leaf.path: leaf.bytes_per_device for leaf in sharded.params}[
        "hidden/kernel"
    ] == WIDTH * 4 * WIDTH * 4 // 8


def test_control_a_wrong_gradient_of_it_is_caught():
    """The comparison of the test above can fail."""
    reference = Reference(plan("linen"), grad_fn("linen"), BATCHES)
    assert not reference.compare(
        plan("linen", fsdp=4, tensor=2), scale_gradients(grad_fn("linen"), 1.01)
    ).ok


def test_paths_of_unrolled_layers_are_digits():
    """A list of layers is `layers/0/…`, which the rules read as one layer; a stack has no number."""
    unrolled = tiny.replaced(stacked=False, layers=12)
    paths = tree.flatten(jax.eval_shape(tiny.model(unrolled).init, jax.random.key(0)))
    assert {path.split("/")[1] for path in paths if path.startswith("layers/")} == set(
        map(str, range(12))
    )
    stack = tree.flatten(jax.eval_shape(tiny.model().init, jax.random.key(0)))
    names = {
        path.replace("layers/7/", "layers/")
        for path in paths
        if not path.startswith("layers/") or "/7/" in path
    }
    assert names == set(stack)


def test_a_parameter_knows_its_path():
    """Layers find their parameters in the plan by the path that this module gives them."""
    seen = []

    class Curious(Decoder):
        def __call__(self, tokens):
            seen.append(
                (
                    self.lm_head.kernel.get_metadata("path"),
                    self.layers.mlp.up_proj.kernel.get_metadata("path"),
                )
            )
            return super().__call__(tokens)

    curious = from_nnx(lambda rngs: Curious(tiny.CONFIG, rngs=rngs))
    params = jax.eval_shape(curious.init, jax.random.key(0))
    jax.eval_shape(curious.apply, params, jax.ShapeDtypeStruct((2, 4), jnp.int32))
    assert seen == [("lm_head/kernel", "layers/mlp/up_proj/kernel")]


class Keywords(nnx.Module):
    """Takes its mode, and a mask, by keyword alone."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array, *, deterministic: bool, mask: Any = None) -> jax.Array:
        x = self.linear(x) if mask is None else self.linear(x) * mask
        return x if deterministic else -x


class LinenKeywords(nn.Module):
    """The same in Linen."""

    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool, mask: Any = None) -> jax.Array:
        x = nn.Dense(4, name="linear")(x) if mask is None else nn.Dense(4, name="linear")(x) * mask
        return x if deterministic else -x


MODES = {"train": {"deterministic": False}, "evaluate": {"deterministic": True}}


def keywords_model(kind: str, **modes: Any) -> spmd.Model:
    x = jax.ShapeDtypeStruct((2, 4), "float32")
    return (
        spmd.from_nnx(Keywords, **modes)
        if kind == "nnx"
        else spmd.from_linen(LinenKeywords(), x, **modes)
    )


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_keyword_arguments_reach_the_module(kind: str) -> None:
    """Those of a mode are given once, others in the call, also through adapters."""
    known = keywords_model(kind, **MODES)
    params, x, mask = known.init(jax.random.key(0)), jnp.ones((2, 4)), jnp.arange(8.0).reshape(2, 4)
    plain = known.apply(params, x)
    np.testing.assert_array_equal(known.apply(params, x, mask=mask), plain * mask)
    np.testing.assert_array_equal(known.apply(params, x, deterministic=False), -plain)
    variables = known.init_variables(jax.random.key(0))
    outputs, _ = known.forward(params, variables, jax.random.key(0), x, train=True, mask=mask)
    np.testing.assert_array_equal(outputs, -plain * mask)
    adapted = with_lora(known, LoRAConfig(targets=("kernel",), rank=1), spmd.Rules([]))
    outputs, _ = adapted.forward(
        adapted.init(jax.random.key(0)), {"base": params}, None, x, train=False, mask=mask
    )
    np.testing.assert_array_equal(outputs, plain * mask)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_a_call_that_the_module_does_not_take_is_told(kind: str) -> None:
    """A mode that is missing, a misspelt keyword, and a missing input; the fix names the arguments."""
    if kind == "nnx":  # Linen calls the module to initialize it
        params = keywords_model(kind).init(jax.random.key(0))
        with pytest.raises(
            ConfigError, match=r"'deterministic'\n.*train=\{\"deterministic\": False\}"
        ):
            keywords_model(kind).apply(params, jnp.ones((2, 4)))
    else:
        with pytest.raises(
            ConfigError, match=r"'deterministic'\n.*train=\{\"deterministic\": False\}"
        ):
            keywords_model(kind).init(jax.random.key(0))
    known = keywords_model(kind, **MODES)
    params = known.init(jax.random.key(0))
    with pytest.raises(ConfigError, match="unexpected keyword argument 'masc'"):
        known.apply(params, jnp.ones((2, 4)), masc=1)
    with pytest.raises(ConfigError, match="missing a required argument: 'x'"):
        known.apply(params)


class Frozen(nnx.Module):
    """Statistics that were built frozen beside some that are not, and dropout likewise."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.frozen = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)
        self.thawed = nnx.BatchNorm(4, rngs=rngs)
        self.off = nnx.Dropout(0.5, deterministic=True, rngs=rngs)

    def __call__(self, x: jax.Array) -> Any:
        return self.off(self.frozen(x)), self.thawed(x)


def test_layers_that_were_built_frozen_stay_so_in_training() -> None:
    """Fine-tuning on small batches keeps the statistics of pre-training; the control moves."""
    known = spmd.from_nnx(Frozen)
    params, variables = known.init(jax.random.key(0)), known.init_variables(jax.random.key(0))
    x = jnp.arange(12.0).reshape(3, 4)
    (kept, _), after = known.forward(params, variables, jax.random.key(0), x, train=True)
    np.testing.assert_allclose(kept, x, rtol=1e-4)
    np.testing.assert_array_equal(after["frozen"]["mean"], variables["frozen"]["mean"])
    assert np.abs(after["thawed"]["mean"] - variables["thawed"]["mean"]).max() > 0.01
    (_, evaluated), same = known.forward(params, variables, None, x, train=False)
    np.testing.assert_allclose(evaluated, x, rtol=1e-4)
    np.testing.assert_array_equal(same["thawed"]["mean"], variables["thawed"]["mean"])


class Inside(nnx.Module):
    """Names a sharding by itself, in one of several ways."""

    def __init__(self, way: str, rngs: nnx.Rngs) -> None:
        self.way, self.linear = way, nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.way == "out_sharding":
            return self.linear(x, out_sharding=P("fsdp", "tensor"))
        return jax.lax.with_sharding_constraint(self.linear(x), P("fsdp", "tensor"))


class LinenInside(nn.Module):
    """The same in Linen."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(nn.Dense(4)(x), P("fsdp", "tensor"))


@pytest.mark.parametrize("way", ["constraint", "out_sharding", "linen"])
def test_shardings_inside_a_module_are_an_error_with_a_place(way: str) -> None:
    """The line of the model is named, and what to write there; a mesh in scope allows constraints."""
    x = jnp.ones((2, 4))
    known = (
        spmd.from_linen(LinenInside(), x)
        if way == "linen"
        else spmd.from_nnx(lambda rngs: Inside(way, rngs))
    )
    with pytest.raises(AnnotationError) as caught:
        known.apply(known.init(jax.random.key(0)), x)
    (problem,) = caught.value.problems
    assert __file__ in problem.where
    assert 'P("fsdp", "tensor")' in problem.what
    assert "spmd.annotate" in problem.fix


def test_control_errors_of_the_model_itself_are_untouched() -> None:
    """Only JAX's words about a missing mesh are replaced."""

    class Wrong(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None: ...

        def __call__(self, x: jax.Array) -> jax.Array:
            raise ValueError("a mesh of wires")

    with pytest.raises(ValueError, match="a mesh of wires") as caught:
        spmd.from_nnx(Wrong).apply({}, jnp.ones(1))
    assert not isinstance(caught.value, AnnotationError)
