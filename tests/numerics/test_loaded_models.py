"""A loaded model writes the text of the model: it has each layer's arrays alone, in the dtype of their use."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import ConfigError
from spmd.generate.generator import Generator
from spmd.generate.model_arrays import ArrayForm, prepare_arrays
from spmd.generate.sampling import Sampling
from spmd.jaxpr.promoted import used_dtype
from spmd.jaxpr.scanned_inputs import scanned_inputs, unroll_scans
from spmd.jaxpr.traced_program import read_program
from spmd.layers.kv_cache import prefill
from spmd.model_interface.model import Model, abstract_key
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.sharding.rules import Rules, replicate
from spmd.training.state import init_state
from tests import tiny
from tests.numerics.test_kv_cache import CONFIGS, LENGTHS, ROOM, SEQ, logits_of, made, step_by_step
from tests.numerics.test_mixer_caches import MASKED, Toy
from tests.tiers import soak_but

LAYERS = 3
GREEDY = Sampling(temperature=0.0)
PROMPTS = [[5, 6, 7, 8, 9], [1, 2, 3], [4]]


def layout(**sizes):
    return make_plan(tiny.mesh(**sizes), *_OURS, optax.sgd(0.1), precision="bf16", zero=0)


_OURS = (tiny.plan().rules, tiny.model(tiny.replaced(layers=LAYERS)))


@functools.cache
def trained():
    """Parameters as the training has them: in float32, split over `fsdp`."""
    plan = make_plan(tiny.mesh(fsdp=4), *_OURS, optax.sgd(0.1), precision="bf16")
    return plan, init_state(plan).params


def rows_of(model):
    """A table that replicates everything."""
    paths = tree.flatten(jax.eval_shape(model.init, abstract_key()))
    return Rules([(path, replicate("small")) for path in paths], activations=[])


def texts(model):
    return [row.tolist() for row in model.write(PROMPTS, tokens=6)]


def decode_text(model):
    """The compiled program of one token."""
    generator = model.generator
    ids, lengths = generator._batch(PROMPTS)
    key = jax.random.key(0)
    token, position, carry = generator._prefill(
        model.arrays, ids, lengths, key, room=generator._room(5, 8)
    )
    return generator._decode.lower(model.arrays, carry, token, position, key).compile().as_text()


def gathers(model):
    """Gathers of floats in the program of one token."""
    return re.findall(r"= (?:f32|bf16)\S+ all-gather\(", decode_text(model))


def test_a_token_reads_each_layer_in_the_dtype_of_its_use():
    """No stack is put together; the control: the same program with the stacks that the training has."""
    plan, params = trained()
    model = Generator(plan, 32, GREEDY).load(params, {})
    first = dict(zip(tree.flatten(params), model.arrays.arrays, strict=True))
    kernel = first["layers/mlp/up_proj/kernel"]
    assert (len(kernel), kernel[0].dtype) == (LAYERS, jnp.bfloat16)
    assert first["layers/mlp_norm/scale"][0].dtype == jnp.float32  # a norm computes in it
    stack = f"[{LAYERS},{tiny.CONFIG.d_model // 4},{tiny.CONFIG.d_ff}]"
    assert stack not in decode_text(model)
    forms = [ArrayForm()] * len(first)
    unchanged = prepare_arrays(plan, params, {}, forms)
    assert all(map(lambda a, b: a is b, unchanged.arrays, jax.tree.leaves(params)))
    as_trained = type(model)(model.generator, unchanged)
    assert stack in decode_text(as_trained)
    assert texts(as_trained) == texts(model)


ELSEWHERE = [{"fsdp": 4}, {"tensor": 2, "data": 2}]


@pytest.mark.parametrize("sizes", soak_but(ELSEWHERE, ELSEWHERE[1]), ids=str)
def test_parameters_move_from_the_training_to_another_layout(sizes):
    """Of the same devices; the text is that of the training's layout."""
    plan, params = trained()
    model = Generator(layout(**sizes), 32, GREEDY).load(params, {})
    assert texts(model) == texts(Generator(plan, 32, GREEDY).load(params, {}))
    assert gathers(Generator(plan, 32, GREEDY).load(params, {}))
    for array in jax.tree.leaves(model.arrays):
        assert "fsdp" not in str(array.sharding.spec)
    if "tensor" not in sizes:
        assert not gathers(model)


def test_loops_of_a_model_by_hand_are_read_layer_by_layer():
    """Stacks of a model that is not ours: one that a loop reads alone is split, one with another use is not."""

    def init(key):
        kernels = jax.random.normal(key, (3, 8, 8)) / 3
        return {
            "embed": jax.random.normal(key, (64, 8)),
            "kernels": kernels,
            "shifts": kernels[:, 0],
        }

    def apply(params, tokens):
        def layer(x, of_layer):
            kernel, shift = of_layer
            return jnp.tanh(x @ kernel + shift[None, None]) + x, None

        layers = (params["kernels"], params["shifts"])
        x, _ = jax.lax.scan(layer, params["embed"][tokens], layers)
        return (x + params["shifts"][:1][None]) @ params["embed"].T

    model = Model(init, apply)
    plan = make_plan(tiny.mesh(data=2), rows_of(model), model, optax.sgd(0.1))
    params = init_state(plan).params
    loaded = Generator(plan, 32, GREEDY).load(params, {})
    assert [type(array) is tuple for array in loaded.arrays.arrays] == [False, True, False]
    row = list(PROMPTS[0])
    for _ in range(6):
        row.append(int(np.argmax(apply(jax.device_get(params), np.array([row]))[0, -1])))
    assert texts(loaded)[0] == row[len(PROMPTS[0]) :]


def test_arrays_of_any_kind_are_loaded():
    """Of NumPy, of one device, and in host memory: the text is that of placed ones; donated ones are deleted."""
    plan, params = trained()
    generator = Generator(plan, 32, GREEDY)
    expected = texts(generator.load(params, {}))
    on_host = jax.tree.map(lambda x: x.sharding.with_memory_kind("pinned_host"), params)
    for moved in (
        jax.device_get(params),
        jax.device_put(params, jax.devices()[0]),
        jax.device_put(params, on_host),
    ):
        assert texts(generator.load(moved, {})) == expected
    own = jax.tree.map(jnp.copy, params)
    assert texts(generator.load(own, {}, donate=True)) == expected
    assert own["layers"]["mlp"]["up_proj"]["kernel"].is_deleted()
    assert not own["embed"]["embedding"].is_deleted()  # its form is that of generation


def test_a_model_is_traced_with_its_own_dtypes():
    """A variable that every use casts is held narrow, and a model that reads its dtype sees the wide one."""

    def forward(params, variables, key, tokens, *, train):
        embed = variables["embed"]
        x = embed.astype(jnp.bfloat16)[tokens].astype(embed.dtype)
        x, _ = jax.lax.scan(lambda x, k: (x + jnp.tanh(x @ k), None), x, params["kernels"])
        return x @ embed.astype(jnp.bfloat16).T.astype(x.dtype), variables

    model = Model(
        lambda key: {"kernels": jax.random.normal(key, (3, 8, 8))},
        None,
        lambda key: {"embed": jax.random.normal(key, (64, 8))},
        forward,
    )
    rules = Rules([(name, replicate("small")) for name in ("embed", "kernels")], activations=[])
    plan = make_plan(tiny.mesh(), rules, model, optax.sgd(0.1))
    state = init_state(plan)
    loaded = Generator(plan, 32, GREEDY).load(state.params, state.variables)
    assert loaded.arrays.arrays[-1].dtype == jnp.bfloat16
    returned, _ = forward(state.params, state.variables, None, jnp.array([PROMPTS[0]]), train=False)
    assert texts(loaded)[0][0] == int(returned[0, -1].argmax())


def test_arrays_that_a_step_has_taken_are_an_error():
    """Not a crash of the runtime: arrays in their own form are not copied."""
    plan = make_plan(tiny.mesh(fsdp=2), *_OURS, optax.sgd(0.1))
    params = init_state(plan).params
    loaded = Generator(plan, 32, GREEDY).load(params, {})
    params["embed"]["embedding"].delete()
    with pytest.raises(ConfigError, match="load the model again"):
        loaded.write(PROMPTS, tokens=1)


def test_a_stack_with_layers_on_several_devices_stays_whole():
    """Its layers alone would be on every device."""
    model = Model(lambda key: {"kernels": jnp.ones((2, 8, 8))}, lambda params, x: params["kernels"])
    rules = Rules([("kernels", P("pipe"))], activations=[])
    plan = make_plan(tiny.mesh(pipe=2), rules, model, optax.sgd(0.1))
    params = init_state(plan).params
    (kept,) = prepare_arrays(plan, params, {}, [ArrayForm(by_layer=True)]).arrays
    assert kept is params["kernels"]


def test_inputs_that_loops_read_by_layer():
    """Forward or reversed, in two loops, cast before; not one that is also carried, whole, or an output."""

    def run(*inputs):
        read, twice, cast, carried, whole, out = inputs

        def step(x, layer):
            return x + sum(layer), None

        x, _ = jax.lax.scan(step, carried, (read, twice, out), reverse=True)
        x, _ = jax.lax.scan(step, x + whole[0], (twice, whole, cast.astype(jnp.float32)))
        return x, out

    stack = jnp.ones((3, 2))
    jaxpr = jax.make_jaxpr(run)(stack, stack, stack.astype(int), stack[0], stack, stack)
    flags = scanned_inputs(jaxpr)
    assert flags == [True, True, True, False, False, False]
    lengths = [
        eqn.params["unroll"] for eqn in unroll_scans(jaxpr, flags).eqns if "unroll" in eqn.params
    ]
    assert lengths == [3, 3]
    assert [eqn.params["unroll"] for eqn in jaxpr.eqns if "unroll" in eqn.params] == [1, 1]


def test_rules_of_derivatives_may_use_another_dtype():
    """A cast in a function with a derivative of its own is no reason to gather it narrow in training."""

    @jax.custom_jvp
    def cast(x):
        return x.astype(jnp.bfloat16)

    cast.defjvps(lambda tangent, result, x: tangent.astype(jnp.bfloat16))

    def run(stack):
        return jax.lax.scan(lambda x, layer: (x + cast(layer), None), jnp.bfloat16(0), stack)[0]

    program = read_program(jax.make_jaxpr(run)(jnp.ones(3)))
    assert used_dtype(program, 0) is None
    assert used_dtype(program, 0, differentiated=False) == jnp.bfloat16


def test_the_dtype_of_a_use_in_a_loop():
    """Casts in the body of a loop are uses of the stack; a carried value and one without a cast keep theirs."""

    def run(narrow, both, carried, kernels):
        def step(x, of_step):
            narrow, both = of_step
            y = narrow.reshape(1).astype(jnp.bfloat16) + kernels.astype(jnp.bfloat16)
            return x + both[0] + both.astype(jnp.bfloat16)[0] + y[0], None

        return jax.lax.scan(step, carried, (narrow, both))[0]

    ones = jnp.ones((3, 1))
    program = read_program(jax.make_jaxpr(run)(ones, ones, jnp.float32(1), jnp.ones(1)))
    found = [used_dtype(program, number) for number in range(4)]
    assert found == [jnp.bfloat16, None, None, jnp.bfloat16]


def test_a_cache_in_int8_has_nearly_the_same_logits():
    """Within 2 % of the largest one, in a quarter of float32's bytes, and the scales; they differ: codes are read."""
    model, large = made(CONFIGS["llama"])
    params = jax.tree.map(lambda w: w / 3 if w.ndim > 1 else w, large)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, SEQ), dtype=np.int32))
    exact = step_by_step(model, 0, params, {}, tokens)
    coded = step_by_step(model, 0, params, {}, tokens, in_int8=True)
    wrong = step_by_step(model, 1, params, {}, tokens)
    largest = np.abs(exact).max()
    error = np.abs(coded - exact).max() / largest
    assert 1e-5 < error < 0.02 < np.abs(wrong - exact).max() / largest
    dim = CONFIGS["llama"].d_model // CONFIGS["llama"].heads
    assert cache_bytes(True) == cache_bytes(False) * (dim + 4) / (4 * dim)


def cache_bytes(in_int8):
    model, params = made(CONFIGS["llama"])
    tokens = jnp.zeros((2, SEQ), jnp.int32)

    def run():
        return prefill(lambda: logits_of(model, params, {}, tokens), ROOM, LENGTHS, in_int8=in_int8)

    _, cache = jax.eval_shape(run)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.entries))


def test_int8_without_a_cache_of_tokens_is_an_error():
    """A model without a cache, and one whose cache has states alone."""

    class Recurrent(Toy):
        def __init__(self, rngs):
            super().__init__((), MASKED, rngs)

    for build, why in ((Recurrent, "holds states"), (_Plain, "sets neither")):
        model = from_nnx(build)
        plan = make_plan(tiny.mesh(), rows_of(model), model, optax.sgd(0.1))
        params = init_state(plan).params
        with pytest.raises(ConfigError, match=why):
            Generator(plan, 32, GREEDY, cache_in_int8=True).load(params, {})


class _Plain(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 8, rngs=rngs)

    def __call__(self, tokens):
        return self.embed.attend(self.embed(tokens))
