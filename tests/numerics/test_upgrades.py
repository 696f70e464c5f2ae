"""JAX's upgrade flags: programs are read and remat policies act as without them; what JAX cannot do is refused.

`make newest` and `.ci/run` run tests of the mark `upgrades` once more with the flags in the
environment, which custom derivatives read when a module is imported. The tests here set a flag for
themselves.
"""

import contextlib
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxpr_as_fun, primitives
from jax.sharding import PartitionSpec as P

from spmd.errors import AnnotationError, ConfigError
from spmd.jaxpr.equations import (
    equations,
    has_own_rules,
    inner_jaxprs,
    name_of,
    nested_equations,
    nested_jaxprs,
    params_of,
    replace_equations,
)
from spmd.jaxpr.traced_program import read_program
from spmd.jaxpr.upgrades import HiPrim
from spmd.model_interface.remat import make_remat
from spmd.plan.annotate import annotate, remat_layer
from spmd.plan.context import override
from tests import tiny
from tests.upgrades import IN_CUSTOM_VJP, IS_OLD, POLICIES, fault

pytestmark = [pytest.mark.compat, pytest.mark.upgrades]

MESH = tiny.mesh(data=2)
SPECS = FrozenDict({name: P("data") for name in ("hidden", "operand")})
X, W = jnp.linspace(-1, 1, 4 * 64).reshape(4, 64), jnp.linspace(-0.1, 0.2, 64 * 64).reshape(64, 64)


@contextlib.contextmanager
def flags(*, on):
    """JAX with the upgrade flags, as far as it has them, or without them."""
    names = [
        name
        for name in ("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3")
        if hasattr(jax.config, name)
    ]
    before = {name: getattr(jax.config, name) for name in names}
    try:
        for name in names:
            jax.config.update(name, on)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def product(x, w):
    """A matmul with a derivative of its own, as layers have it, made under the flags that are on."""

    def forward(x, w):
        x = annotate(x, "operand", in_rule=True)
        return x @ w, (x, w)

    multiply = jax.custom_vjp(lambda x, w: forward(x, w)[0])
    multiply.defvjp(forward, lambda saved, dy: (dy @ saved[1].T, saved[0].T @ dy))
    return multiply(x, w)


def layer(x, w):
    """Two products, the second with a derivative of its own, and two activations."""
    hidden = annotate(jnp.tanh(x @ w), "hidden")
    return jax.nn.relu(product(jnp.sin(hidden), w))


def gradients(remat, of=layer):
    """The jaxpr of a layer's gradient under a policy, and its value."""

    def run(x, w):
        with override(mesh=MESH, activations=SPECS, remat=make_remat(remat)):
            return remat_layer(of, scanned=False)(x, w).sum()

    function = jax.grad(run, (0, 1))
    return jax.make_jaxpr(function)(X, W), jax.jit(function)(X, W)


def counts(jaxpr):
    """What a gradient costs: its matmuls and functions of elements."""
    found = Counter(name_of(equation) for equation in equations(jaxpr))
    return {name: found[name] for name in ("dot_general", "tanh", "sin")}


def test_calls_have_one_name_in_both_forms():
    """A checkpoint, a name and custom derivatives; the control: JAX's own names of them differ."""

    def run(x):
        square = jax.custom_jvp(lambda x: x * x)
        square.defjvp(lambda primals, tangents: (primals[0] ** 2, 2 * primals[0] * tangents[0]))
        return jax.checkpoint(lambda x: checkpoint_name(product(x, W), "y"))(square(x)).sum()

    read, theirs = [], []
    for on in (False, True):
        with flags(on=on), override(mesh=MESH, activations=SPECS):
            found = list(equations(jax.make_jaxpr(run)(X)))
        read.append([(name_of(e), has_own_rules(e), params_of(e).get("name")) for e in found])
        theirs.append([e.primitive.name for e in found])
    kinds = {primitives.remat_p.name, "name", "custom_jvp_call", "custom_vjp_call"}
    assert kinds <= {name for name, *_ in read[0]}
    assert [call for call in read[0] if call[0] in kinds] == [
        call for call in read[1] if call[0] in kinds
    ]
    assert theirs[0] != theirs[1]


@pytest.mark.parametrize("on", [False, True])
def test_every_walk_finds_the_same_equations(on):
    """A loop, a call and a custom derivative in a checkpoint; a walk that enters no rule misses its product."""

    def run(x):
        body = jax.checkpoint(lambda x, _: (product(jax.jit(jnp.tanh)(x), W), None))
        return jax.lax.scan(body, x, length=2)[0]

    with flags(on=on), override(mesh=MESH, activations=SPECS):
        program = jax.make_jaxpr(run)(X)
        found = [name_of(equation) for equation in equations(program)]
        nested = list(nested_equations(program))
        by_jaxpr = [name_of(e) for inner in nested_jaxprs(program) for e in inner.eqns]
        outside_rules = nested_equations(program, enters=lambda e: not has_own_rules(e))
        outside = [name_of(equation) for equation, *_ in outside_rules]
        for equation, *around in nested:
            bodies = inner_jaxprs(around[0]) if around else [program]
            # one of a hijax object is traced anew for each walk
            assert name_of(equation) in {name_of(e) for body in bodies for e in body.eqns}
    assert [name_of(equation) for equation, *_ in nested] == found
    assert Counter(by_jaxpr) == Counter(found)
    assert {"scan", "tanh", "dot_general"} <= set(found)
    assert "dot_general" not in outside


def slope_with_a_replacement():
    """The derivative at 3 of a checkpoint of 2 sin x whose sine is replaced by a square."""
    program = jax.make_jaxpr(jax.checkpoint(lambda x: jnp.sin(x) * 2))(1.0)
    (sine,) = (equation for equation in equations(program) if name_of(equation) == "sin")
    changed = replace_equations(program, {id(sine): jax.make_jaxpr(lambda x: x * x)(1.0)})
    return jax.grad(lambda x: jaxpr_as_fun(changed)(x)[0])(3.0)


@pytest.mark.parametrize(
    "on", [False, pytest.param(True, marks=pytest.mark.skipif(IS_OLD, reason="JAX 0.10.2"))]
)
def test_equations_inside_a_checkpoint_are_replaced(on):
    """In a jaxpr of either form; all else of it is kept, and differentiated."""
    with flags(on=on):
        assert slope_with_a_replacement() == 12


@pytest.mark.parametrize("remat", ["none", "full", *POLICIES])
def test_a_policy_acts_as_without_the_flags(remat):
    """The same matmuls and functions of elements run again, with the same gradient; or JAX's fault is refused."""
    with flags(on=False):
        before, expected = gradients(remat)
    with flags(on=True):
        if fault(remat):
            with pytest.raises((AnnotationError, ConfigError)) as caught:
                gradients(remat)
            assert all("jax_remat3" in str(problem) for problem in caught.value.problems)
            return
        after, found = gradients(remat)
    assert counts(after) == counts(before)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), found, expected
    )


def test_names_in_a_custom_derivative_of_another_form_are_refused():
    """`jax_remat3` without `jax_custom_vjp3` sees nothing in it; the control: another name is none of its business."""
    with flags(on=True):
        jax.config.update("jax_custom_vjp3", False)
        with pytest.raises(AnnotationError, match="'operand' is marked in a custom derivative"):
            gradients("save:operand")
        gradients("save:hidden")


@pytest.mark.skipif(IS_OLD, reason="this JAX has no HiPrim")
def test_a_hijax_primitive_of_a_stranger_is_its_expansion():
    """Its operations are read; the control: one whose operand is no array stays a single operation."""

    class Twice(HiPrim):
        def __init__(self, aval):
            self.in_avals, self.out_aval, self.params = (aval,), aval, {}
            super().__init__()

        def expand(self, x):
            return jnp.sin(x) * 2

    jaxpr = jax.make_jaxpr(lambda x: Twice(jax.typeof(x))(x))(X)
    assert {"sin", "mul"} <= {operation.primitive for operation in read_program(jaxpr).operations}
    assert has_own_rules(jaxpr.eqns[0])


# JAX's own faults: when one of these tests fails, JAX has mended it, and the entry of
# `tests.upgrades` and what refuses it in `spmd.plan.unseen` or `spmd.model_interface.remat` go.


def matmuls(policy, multiply):
    """The matmuls of a gradient of two products under a policy."""
    run = jax.checkpoint(lambda x, w: jnp.sin(multiply(jnp.sin(multiply(x, w)), w)), policy=policy)
    jaxpr = jax.make_jaxpr(jax.grad(lambda x, w: run(x, w).sum(), (0, 1)))(X, W)
    return sum(name_of(equation) == "dot_general" for equation in equations(jaxpr))


@pytest.mark.parametrize("is_faulty", [True, False], ids=["fault", "control"])
def test_jax_computes_saved_products_of_a_custom_derivative_again(is_faulty):
    """JAX 0.10.2 and 0.12.0.1 (`jax_remat3`, `jax_custom_vjp3`): 8 matmuls, of which 2 are saved too."""
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    with flags(on=is_faulty), override(mesh=MESH, activations=SPECS):
        assert matmuls(dots, product) == (8 if is_faulty and IN_CUSTOM_VJP else 6)


@pytest.mark.skipif(not IS_OLD, reason="mended in JAX 0.12")
def test_jax_evaluates_no_call_in_a_checkpoint():
    """JAX 0.10.2 (`jax_remat3`): what replaces an operation there cannot be differentiated."""
    with flags(on=True), pytest.raises(NotImplementedError):
        slope_with_a_replacement()


@pytest.mark.parametrize("is_faulty", [True, False], ids=["fault", "control"])
def test_jax_ignores_combined_policies(is_faulty):
    """JAX 0.10.2 (`jax_remat3`): of two policies together nothing is saved, not even products."""
    policies = jax.checkpoint_policies
    both = policies.save_from_both_policies(
        policies.dots_saveable, policies.save_only_these_names("y")
    )
    with flags(on=is_faulty):
        assert matmuls(both, jnp.matmul) == (8 if is_faulty and IS_OLD else 6)
