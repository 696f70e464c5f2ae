"""Modules as people write them: methods other than `__call__`, numbers as parameters, names of absent axes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from spmd.errors import AnnotationError, ConfigError, RuleError
from spmd.model_interface.model import Model
from spmd.plan.linen_model import from_linen
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.sharding.rules import Rules, replicate
from spmd.training.state import init_state
from tests import tiny

pytestmark = pytest.mark.compat

X = np.ones((4, 8), np.float32)
KEY = jax.random.key(0)


class Encoder(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(8, 6, rngs=rngs)
        self.outer = nnx.Linear(6, 5, rngs=rngs)
        self.temperature = nnx.Param(0.07)

    def encode(self, x, times=1):
        return self.inner(x) * times / self.temperature

    def __call__(self, x):
        return self.outer(self.encode(x))


class LinenEncoder(nn.Module):
    def setup(self):
        self.inner, self.outer = nn.Dense(6), nn.Dense(5)
        self.temperature = self.param("temperature", lambda key: 0.07)

    def encode(self, x, times=1):
        return self.inner(x) * times / self.temperature

    def __call__(self, x):
        return self.outer(self.encode(x))


MODELS = {
    "nnx": (lambda: from_nnx(Encoder), Encoder),
    "linen": (lambda: from_linen(LinenEncoder(), X), LinenEncoder),
}


@pytest.mark.parametrize("library", MODELS)
def test_a_method_is_called_by_its_name_or_as_a_function(library):
    """`apply` and `forward` take `method`, as Linen does."""
    make, kind = MODELS[library]
    model = make()
    params = model.init(KEY)
    kernel, bias = params["inner"]["kernel"], params["inner"]["bias"]
    expected = (X @ np.asarray(kernel) + np.asarray(bias)) / 0.07
    for method in ("encode", kind.encode, lambda module, x: module.encode(x)):
        np.testing.assert_allclose(model.apply(params, X, method=method), expected, rtol=1e-5)
        trained, _ = model.forward(params, {}, KEY, X, train=True, method=method)
        np.testing.assert_allclose(trained, expected, rtol=1e-5)
    np.testing.assert_allclose(model.apply(params, X, 2, method="encode"), 2 * expected, rtol=1e-5)
    assert model.apply(params, X).shape == (4, 5)


@pytest.mark.parametrize("library", MODELS)
def test_a_method_that_is_not_there_or_takes_other_arguments_is_named(library):
    """The nearest name is proposed; the signature is that of the method."""
    make, kind = MODELS[library]
    model = make()
    params = model.init(KEY)
    with pytest.raises(ConfigError, match='did you mean "encode"'):
        model.apply(params, X, method="encod")
    with pytest.raises(ConfigError, match=rf"{kind.__name__}.encode: cannot be called"):
        model.apply(params, X, method="encode", scale=2)


@pytest.mark.parametrize("library", [*MODELS, "functions"])
def test_a_number_is_a_parameter(library):
    """It becomes an array of JAX's default dtype, and keeps it."""
    functions = Model(
        lambda key: {"temperature": 0.07}, lambda params, x: x / params["temperature"]
    )
    model = functions if library == "functions" else MODELS[library][0]()
    rules = Rules([("kernel|bias|temperature", replicate("small"))][:1])
    state = init_state(make_plan(tiny.mesh(), rules, model, optax.adam(0.1)))
    temperature = state.params["temperature"]
    assert (temperature.shape, temperature.dtype, temperature.weak_type) == ((), jnp.float32, False)


@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_an_axis_of_no_map_is_named_with_its_line(library):
    """Batch norms need no axis: the model is called with the global batch."""
    if library == "nnx":
        model = from_nnx(lambda rngs: nnx.BatchNorm(8, axis_name="devices", rngs=rngs))
    else:
        modes = {
            name: {"use_running_average": name == "evaluate"} for name in ("train", "evaluate")
        }
        model = from_linen(nn.BatchNorm(axis_name="devices"), X, **modes)
    params, variables = model.init(KEY), model.init_variables(KEY)
    with pytest.raises(AnnotationError, match="leave out axis_name='devices'"):
        model.forward(params, variables, KEY, X, train=True)


def test_a_fix_is_a_pattern_that_matches():
    """Paths with parentheses and quotes, such as those of a spectral norm, are escaped."""
    modes = {"train": {"update_stats": True}, "evaluate": {"update_stats": False}}
    model = from_nnx(lambda rngs: nnx.SpectralNorm(nnx.Linear(8, 8, rngs=rngs), rngs=rngs), **modes)
    rows = [("layer_instance/kernel", P("fsdp", "tensor")), ("bias", replicate("small"))]
    with pytest.raises(RuleError) as caught:
        make_plan(tiny.mesh(), Rules(rows), model, optax.sgd(0.1))
    for problem in caught.value.problems:
        proposed = problem.fix.partition(" or ")[2]
        rows.append(eval(proposed, {"replicate": replicate}))
    assert make_plan(tiny.mesh(), Rules(rows), model, optax.sgd(0.1)).variables
