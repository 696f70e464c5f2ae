"""Rematerialisation does what its policies say, seen in the traced program, and changes no number."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd.errors import AnnotationError, ConfigError, RuleError
from spmd.gradients.base import value_and_grad
from spmd.jaxpr.equations import equations, name_of
from spmd.model_interface.grad_transform import Carry
from spmd.model_interface.remat import Remat, make_remat
from spmd.plan.annotate import annotate, remat_attention, remat_layer
from spmd.plan.context import use_plan
from spmd.sharding.mesh import abstract_mesh
from spmd.testing import token_batches
from spmd.training.state import init_state
from spmd.training.step import make_train_step
from tests import tiny
from tests.rounding import assert_close, noise_of
from tests.upgrades import ARE_ON, unless_old

BATCH = token_batches((4, 10), tiny.CONFIG.vocab, steps=1)[0]
KERNELS = 7  # of one layer: four of attention and three of the MLP
NAMES = "attention_out,mlp_hidden"


def gradient_program(config=tiny.CONFIG, **options):
    """The jaxpr of a batch's gradients under a plan with these options."""
    plan = tiny.plan(config, options=tuple(options.items()), fsdp=2)
    with use_plan(plan):
        return jax.make_jaxpr(value_and_grad(tiny.loss_fn(config)))(
            plan.abstract_params, Carry(), BATCH, jax.random.key(0)
        )


@functools.cache
def count(primitive, remat, stacked=True, layers=2):
    config = tiny.replaced(stacked=stacked, layers=layers)
    return sum(
        name_of(equation) == primitive
        for equation in equations(gradient_program(config, remat=remat))
    )


def matmuls(remat, stacked=True, layers=2):
    return count("dot_general", remat, stacked, layers)


@functools.cache
def compiled(remat, stacked=True, unroll=1, precision="float32", layers=3):
    """A function of parameters that gives the gradients of a batch, for two devices over fsdp and two over tensor, and
    parameters for it."""
    config = tiny.replaced(stacked=stacked, unroll=unroll, layers=layers)
    plan = tiny.plan(config, options=(("remat", remat), ("precision", precision)), fsdp=2, tensor=2)

    def run(params):
        with use_plan(plan):
            return value_and_grad(tiny.loss_fn(config))(params, Carry(), BATCH, jax.random.key(0))[
                0
            ]

    return jax.jit(run), init_state(plan).params


@functools.cache
def gradients(*arguments, **options):
    run, params = compiled(*arguments, **options)
    return run(params)


@functools.cache
def lost(**options):
    """What float32 loses of the gradients where nothing is recomputed."""
    return noise_of(*compiled("none", **options))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("none", Remat("none")),
        ("full", Remat("full")),
        ("dots", Remat("dots")),
        ("selective", Remat("selective")),
        ("full/2", Remat("full", every=2)),
        ("save:attention_out", Remat(save=("attention_out",))),
        ("save:attention_out,mlp_hidden", Remat("names", ("attention_out", "mlp_hidden"))),
        ("offload:mlp_hidden", Remat(offload=("mlp_hidden",))),
        (
            "save:attention_out offload:mlp_hidden/3",
            Remat("names", ("attention_out",), ("mlp_hidden",), 3),
        ),
    ],
)
def test_remat_policies_are_read_and_written_alike(text, value):
    """The text gives the value, the value prints as the text, and a value is itself."""
    assert make_remat(text) == value
    assert str(value) == text
    assert make_remat(value) is value


def test_a_remat_value_alone_is_what_it_looks_like():
    """No argument is none; names alone are names; lists of names are tuples, so that plans hash."""
    assert Remat() == Remat("none")
    assert Remat(save=["a"], offload=["b"]) == Remat("names", ("a",), ("b",))
    assert hash(Remat(save=["a"])) == hash(make_remat("save:a"))


@pytest.mark.parametrize(
    ("text", "complaints"),
    [
        ("ful", ['did you mean "full"']),
        ("selctive", ['did you mean "selective"']),
        (
            "FULL",
            ["does not exist", "one of: none, selective, dots, full, save:NAME, offload:NAME"],
        ),
        ("save", ['did you mean "save:NAME"']),
        ("save:", ['did you mean "save:NAME"']),
        ("save:,", ['did you mean "save:NAME"']),
        ("offlod:mlp", ['did you mean "offload:NAME"']),
        ("full:attention_out", ["'full:attention_out' does not exist"]),
        ("full dots", ["'full dots' does not exist"]),
        ("full save:a", [r"'full' with save=\['a'\]"]),
        ("none/2", ["saves everything"]),
        ("full/0", ["0 is not an interval of layers"]),
        ("full/x", ["'x' is not an interval of layers"]),
        ("save:a offload:a", ["a is both saved and offloaded"]),
        ("save:a,a", ["a is named twice"]),
        (
            "save:a,b offload:b,c,c/0",
            ["b is both saved and offloaded", "c is named twice", "0 is not an interval"],
        ),
    ],
)
def test_a_remat_policy_that_does_not_exist_is_an_error(text, complaints):
    """Typos, names without a list, names in two places, intervals that are none: all that is wrong, at once."""
    for complaint in complaints:
        with pytest.raises(ConfigError, match=complaint):
            make_remat(text)


@pytest.mark.parametrize("word", ["save", "offload"])
def test_naming_an_activation_that_no_rule_names_is_an_error(word):
    """JAX's policy would keep nothing, without a word."""
    with pytest.raises(
        RuleError, match=rf"remat {word}:attention_ouut: is no activation of the rule table"
    ):
        tiny.plan(options=(("remat", f"{word}:attention_ouut"),))


@unless_old
@pytest.mark.parametrize(
    "stacked", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["scanned", "unrolled"]
)
def test_naming_an_activation_that_no_layer_marks_is_an_error(stacked):
    """One error for all such names, with those that the layers do mark; an activation outside of the layers is none."""
    plan = tiny.plan(
        tiny.replaced(stacked=stacked),
        options=(("remat", "save:mlp_hidden,logits offload:embed_rows"),),
    )
    with pytest.raises(AnnotationError) as caught:
        make_train_step(plan, tiny.loss_fn(tiny.replaced(stacked=stacked))).lower(BATCH)
    assert [problem.where for problem in caught.value.problems] == [
        "remat offload:embed_rows",
        "remat save:logits",
    ]
    assert "one of: attention_input, attention_key, attention_out, attention_query" in str(
        caught.value
    )
    make_train_step(tiny.plan(options=(("remat", "save:mlp_hidden"),)), tiny.loss_fn()).lower(BATCH)


@pytest.mark.parametrize(
    ("remat", "call"),
    [("full", "remat_layer"), ("selective", "remat_attention"), ("offload:a", "remat_layer")],
)
def test_a_policy_that_acts_on_nothing_is_an_error(remat, call):
    """A model that passes no layer, or no attention core, through the plan; one that does is served."""
    rules = spmd.Rules(
        params=[("w", spmd.replicate("it is small"))],
        activations=[("a", jax.sharding.PartitionSpec("data"))],
    )

    def make(wrap):
        def apply(params, x):
            return wrap(lambda x: annotate(jnp.sin(x * params["w"][None]), "a"))(x)

        model = spmd.Model(init=lambda key: {"w": jnp.ones(4)}, apply=apply)
        plan = spmd.make_plan(tiny.mesh(data=2), rules, model, optax.sgd(0.1), remat=remat)

        def loss(params, variables, batch, key):
            return {"loss": model.apply(params, batch).sum(), "weight": jnp.float32(1)}, variables

        return make_train_step(plan, loss)

    batch = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    with pytest.raises(
        AnnotationError, match=f"remat {remat}: the model never calls spmd.plan.annotate.{call}"
    ):
        make(lambda layer: layer).lower(batch)
    make(
        remat_attention if remat == "selective" else functools.partial(remat_layer, scanned=False)
    ).lower(batch)


def test_an_interval_needs_layers_with_numbers():
    """A layer that does not say which it is could only be always or never under the policy."""
    with (
        use_plan(tiny.plan(options=(("remat", "full/2"),))),
        pytest.raises(AnnotationError, match="remat full/2: has an interval"),
    ):
        remat_layer(jnp.sin, scanned=False)


def test_offload_needs_a_memory_that_is_there():
    """Devices without pinned host memory are refused, with what they have; an abstract mesh may be anything."""

    class Nowhere:
        platform = "toaster"

        def addressable_memories(self):
            return []

    mesh = tiny.mesh(fsdp=2)
    devices = np.vectorize(lambda _: Nowhere(), otypes=[object])(np.zeros(mesh.devices.shape))
    bare = mock.Mock(
        spec=mesh,
        shape=mesh.shape,
        devices=devices,
        axis_names=mesh.axis_names,
        axis_types=mesh.axis_types,
    )
    make = functools.partial(
        spmd.make_plan, rules=tiny.plan().rules, model=tiny.model(), optimizer=tiny.OPTIMIZER
    )
    with pytest.raises(
        ConfigError, match="remat offload:mlp_hidden: toaster has no memory of the kind pinned_host"
    ):
        make(bare, remat="offload:mlp_hidden")
    make(abstract_mesh(spmd.MeshShape(fsdp=2)), remat="offload:mlp_hidden")
    make(mesh, remat="offload:mlp_hidden")


@pytest.mark.upgrades
@pytest.mark.parametrize(
    "stacked", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["scanned", "unrolled"]
)
def test_full_recomputes_each_layer_and_save_recomputes_less(stacked):
    """Matmuls in the program: least with none, most with full, which runs nearly a second forward pass."""
    programs = 1 if stacked else tiny.CONFIG.layers  # a scanned layer is in the program once
    none, save, full, selective = (
        matmuls(remat, stacked) for remat in ("none", "save:attention_out", "full", "selective")
    )
    assert none < save < full
    # Recomputed: the inputs of the backward pass, which are all products of the layer but the two
    # that only add to the residual stream; one attention has two products.
    assert full - none == programs * (KERNELS - 2 + 2 + 1)
    assert full - save == programs
    # the scores; what they are multiplied with is not needed again
    assert selective - none == programs
    # else JAX computes them again, which is refused (tests/numerics/test_upgrades.py)
    if not ARE_ON:
        # attention's products alone have batch dimensions
        assert matmuls("dots", stacked) - none == 2 * programs


def test_saving_every_name_recomputes_fewer_matmuls():
    """Each further name that is saved takes recomputation away, or none was needed for it; host or device, all one."""
    names = ("attention_out", "attention_query", "attention_key", "attention_value", "mlp_hidden")
    counts = [matmuls("save:" + ",".join(names[:n])) for n in range(1, len(names) + 1)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] < counts[0]
    assert matmuls("offload:" + ",".join(names)) == counts[-1]


@pytest.mark.soak
@pytest.mark.parametrize(
    "stacked", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["scanned", "unrolled"]
)
def test_an_interval_recomputes_every_kth_layer(stacked):
    """Of five layers every second is three, every third two, every ninth the first; the others keep everything."""
    per_layer = KERNELS - 2 + 2 + 1
    none = matmuls("none", False, 5)
    if not stacked:
        counts = {k: matmuls(f"full/{k}", stacked, 5) - none for k in (2, 3, 9)}
        assert counts == {2: 3 * per_layer, 3: 2 * per_layer, 9: per_layer}
        return
    # A group is in the program once in the loop, and what is left of the layers once behind it.
    layer = none - matmuls("none", False, 4)
    outside = none - 5 * layer
    assert matmuls("full/2", stacked, 5) == outside + (2 + 1) * layer + 2 * per_layer
    assert matmuls("full/2", stacked, 4) == outside + 2 * layer + per_layer


def test_offloaded_activations_go_to_the_host_and_come_back():
    """The traced program moves them to pinned memory in the forward loop and back in the backward loop."""
    assert (
        count("device_put", "save:attention_out offload:mlp_hidden")
        - count("device_put", f"save:{NAMES}")
        == 2
    )


@pytest.mark.parametrize(
    "remat",
    [
        "save:attention_out offload:residual",
        "full/2",
        *(pytest.param(remat, marks=pytest.mark.soak) for remat in ("dots", "selective/2")),
    ],
)
def test_no_policy_changes_a_gradient(remat):
    """Against none, but for the order of sums, with three scanned layers over fsdp and tensor."""
    assert_close(gradients(remat), gradients("none"), lost())


@pytest.mark.soak
@pytest.mark.parametrize("remat", ["selective", "save:attention_out offload:mlp_hidden/2"])
def test_no_policy_changes_a_gradient_of_separate_layers(remat):
    """Layers that are not scanned, under a policy that acts inside of them and one that acts around some of them."""
    assert_close(
        gradients(remat, stacked=False), gradients("none", stacked=False), lost(stacked=False)
    )


@pytest.mark.soak
@pytest.mark.parametrize("remat", ["full/2"])
def test_no_policy_changes_a_gradient_of_a_scan_that_is_unrolled(remat):
    """Two layers a turn, with one over."""
    assert_close(gradients(remat, unroll=2), gradients("none"), lost())


@pytest.mark.soak
@pytest.mark.parametrize("remat", ["selective"])
def test_no_policy_changes_a_gradient_in_bf16(remat):
    """What is recomputed is rounded as it was the first time, but for sums that XLA orders otherwise."""
    exact = gradients("none", precision="bf16")
    tolerance = jax.tree.map(lambda g: 2e-2 * float(jnp.abs(g).max()), exact)
    assert_close(gradients(remat, precision="bf16"), exact, tolerance, factor=1)


@pytest.mark.soak
def test_offloading_changes_no_bit():
    """What comes back from the host is what was saved."""
    jax.tree.map(
        np.testing.assert_array_equal, gradients(f"offload:{NAMES}"), gradients(f"save:{NAMES}")
    )


def test_control_a_layer_recomputed_from_something_else_is_seen(monkeypatch):
    """A checkpoint that computes another function the second time has other gradients."""

    def wrong(self, layer, *, scanned, also):
        @jax.custom_vjp
        def checkpointed(*arrays):
            return layer(*arrays)

        def backward(saved, dy):
            state, x, *context = saved
            return jax.vjp(layer, state, x * (1 + 1e-4), *context)[1](dy)

        checkpointed.defvjp(lambda *arrays: (layer(*arrays), arrays), backward)
        return checkpointed

    right = gradients("none")
    monkeypatch.setattr(Remat, "apply", wrong)
    run, params = compiled.__wrapped__("full")
    with pytest.raises(AssertionError, match="times the noise"):
        assert_close(run(params), right, lost())
