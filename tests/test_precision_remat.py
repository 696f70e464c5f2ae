"""Precision and rematerialisation do what their names say, seen in the traced program."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd import tree
from spmd.annotate import within
from spmd.errors import ConfigError, NotYetError, RuleError
from spmd.gradients.base import value_and_grad
from spmd.precision import Precision, make_precision
from spmd.remat import Remat, make_remat
from spmd.state import init_state
from spmd.testing import token_batches
from tests import tiny

BATCH = token_batches((4, 10), tiny.CONFIG.vocab, steps=1)[0]
KERNELS = 7  # of one layer: four of attention and three of the MLP


def gradient_program(config=tiny.CONFIG, grad_fn=None, **options):
    """The jaxpr of a batch's gradients under a plan with these options."""
    plan = tiny.plan(config, options=tuple(options.items()), fsdp=2)
    with within(plan):
        return jax.make_jaxpr(grad_fn or value_and_grad(tiny.loss_fn(config)))(
            plan.abstract_params, BATCH, jax.random.key(0)
        )


def equations(jaxpr) -> Iterator:
    """Every equation of a program, those inside loops, calls and checkpoints too."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from equations(inner)


def outputs(jaxpr, primitive):
    """Shape and dtype of what each equation of a primitive computes."""
    return [equation.outvars[0].aval for equation in equations(jaxpr) if equation.primitive.name == primitive]


@functools.cache
def matmuls(remat, stacked=True):
    return len(outputs(gradient_program(tiny.replaced(stacked=stacked), remat=remat), "dot_general"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("none", Remat("none")),
        ("full", Remat("full")),
        ("save:attention_out", Remat(save=("attention_out",))),
        ("save:attention_out,mlp_hidden", Remat("save", ("attention_out", "mlp_hidden"))),
    ],
)
def test_remat_policies_are_read_and_written_alike(text, value):
    """The text gives the value, the value prints as the text, and a value is itself."""
    assert make_remat(text) == value
    assert str(value) == text
    assert make_remat(value) is value


def test_a_remat_value_alone_is_what_it_looks_like():
    """No argument is none; names alone are save; lists of names are tuples, so that plans hash."""
    assert Remat() == Remat("none")
    assert Remat(save=["a"]) == Remat("save", ("a",))
    assert hash(Remat(save=["a"])) == hash(make_remat("save:a"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ful", 'did you mean "full"'),
        ("FULL", "does not exist"),
        ("save", "with at least one name"),
        ("save:", "with at least one name"),
        ("save:,", "with at least one name"),
        ("full:attention_out", "'full' with save"),
        ("none:attention_out", "'none' with save"),
    ],
)
def test_a_remat_policy_that_does_not_exist_is_an_error(text, complaint):
    """Typos, names without save, save without names."""
    with pytest.raises(ConfigError, match=complaint):
        make_remat(text)


def test_saving_an_activation_that_no_rule_names_is_an_error():
    """JAX's policy would save nothing, without a word."""
    with pytest.raises(RuleError, match=r"save:attention_ouut: is no activation of the rule table"):
        tiny.plan(options=(("remat", "save:attention_ouut"),))


@pytest.mark.parametrize("stacked", [True, False], ids=["scanned", "unrolled"])
def test_full_recomputes_each_layer_and_save_recomputes_less(stacked):
    """Matmuls in the program: least with none, more with save, most with full, which runs nearly a second forward pass."""
    programs = 1 if stacked else tiny.CONFIG.layers  # a scanned layer is in the program once
    none, save, full = (matmuls(remat, stacked) for remat in ("none", "save:attention_out", "full"))
    assert none < save < full
    # Recomputed: the inputs of the backward pass, which are all products of the layer but the two that only add to
    # the residual stream; one attention has two products.
    assert full - none == programs * (KERNELS - 2 + 2 + 1)
    assert full - save == programs


def test_saving_every_name_recomputes_fewer_matmuls():
    """Each further name that is saved takes recomputation away, or none was needed for it."""
    names = ("attention_out", "attention_query", "attention_key", "attention_value", "mlp_hidden")
    counts = [matmuls("save:" + ",".join(names[:n])) for n in range(1, len(names) + 1)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] < counts[0]


def test_precision_by_name():
    """float32 is float32 throughout; bf16 computes in bfloat16 and keeps parameters in float32."""
    full, half = make_precision("float32"), make_precision("bf16")
    assert (full.params_dtype, full.compute_dtype) == (jnp.float32, jnp.float32)
    assert (half.params_dtype, half.compute_dtype) == (jnp.float32, jnp.bfloat16)
    assert make_precision(half) is half
    assert isinstance(half, Precision)


@pytest.mark.parametrize("name", ["bf16-params", "fp16"])
def test_a_planned_precision_is_not_there_yet(name):
    """It has its place, and says what can be had instead."""
    with pytest.raises(NotYetError, match="one of: float32, bf16"):
        make_precision(name)


@pytest.mark.parametrize(("name", "near"), [("bf6", "bf16"), ("float23", "float32")])
def test_an_unknown_precision_is_an_error_with_a_suggestion(name, near):
    """And it is not one of those to come."""
    with pytest.raises(ConfigError, match=f'did you mean "{near}"') as caught:
        make_precision(name)
    assert not isinstance(caught.value, NotYetError)


def test_compute_follows_the_precision():
    """In bf16 every matmul of the forward pass but the logits gives bfloat16; in float32 none does."""
    for precision, dtype in (("float32", jnp.float32), ("bf16", jnp.bfloat16)):
        plan = tiny.plan(options=(("precision", precision),))
        with within(plan):
            forward = jax.make_jaxpr(tiny.model().apply)(plan.abstract_params, BATCH["tokens"])
        products = outputs(forward, "dot_general")
        activations = [aval for aval in products if aval.shape[-1] in (32, 16, 64) and aval.ndim == 3]
        logits = [aval for aval in activations if aval.dtype != dtype]
        assert len(activations) == KERNELS + 1
        assert [aval.shape for aval in logits] == ([] if precision == "float32" else [(4, 10, tiny.CONFIG.vocab)])


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_in_bf16_weight_gradients_leave_their_matmul_in_float32(remat, tied):
    """So what is summed over devices is float32: matmuls of activations alone are the only ones in bfloat16."""
    config = tiny.replaced(tied=tied)
    program = gradient_program(config, remat=remat, precision="bf16")
    weight_gradients = [aval for aval in outputs(program, "dot_general") if aval.ndim == 2]
    assert len(weight_gradients) == KERNELS + 1
    assert {aval.dtype for aval in weight_gradients} == {jnp.dtype(jnp.float32)}
    assert {aval.dtype for aval in outputs(program, "scatter-add")} == {jnp.dtype(jnp.float32)}
    assert jnp.bfloat16 in {aval.dtype for aval in outputs(program, "dot_general")}
    assert not rounded_weight_gradients(program)


def rounded_weight_gradients(program):
    """Arrays with the shape of a weight that pass through bfloat16 where no activation has that shape."""
    constraints = [aval for aval in outputs(program, "sharding_constraint") if aval.ndim == 2]
    sums = [aval for name in ("add_any", "dot_general", "scatter-add") for aval in outputs(program, name)]
    return [aval for aval in [*constraints, *sums] if aval.ndim == 2 and aval.dtype == jnp.bfloat16]
