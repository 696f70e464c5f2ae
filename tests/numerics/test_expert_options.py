"""Experts with biases, other activations and weights on their inputs are the sums of a loop over tokens."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from spmd.errors import AnnotationError
from spmd.layers import expert_layout, moe
from spmd.layers.moe import mixture_of_experts
from spmd.layers.router import RouterConfig, Routing
from spmd.models.decoder.activations import GATED, UNGATED
from spmd.models.decoder.experts import ExpertDense
from spmd.partition_rules.layouts import folded
from spmd.partition_rules.mixtral import MIXTRAL
from spmd.plan.context import use_plan
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.sharding.rules import Rules
from tests import tiny
from tests.numerics.test_moe import (
    CHOSEN,
    HIDDEN,
    TOKENS,
    D,
    axes_of_tpus,
    ragged_all_to_all,
    random,
)

EXPERTS = 8
NAMES = ("gate_proj", "up_proj", "down_proj")
INTO, OUT = "(gate|up)_proj/bias", "down_proj/bias"
BIASES = ((INTO, P("expert", "tensor")), (OUT, P("expert")))
FOLDED = ((INTO, P(("expert", "tensor"))), (OUT, P(("expert", "tensor"))))


def is_gated(activation):
    """Names of both tables are those of the functions with a gate, but for `relu2`."""
    return activation in GATED and activation != "relu2"


def function_of(activation):
    if is_gated(activation):
        return GATED[activation]
    return UNGATED[activation]


class BiasedExperts(nnx.Module):
    """The experts of a layer, whose tokens, choices and weights are given."""

    def __init__(self, router, activation, *, rngs):
        self.router = router
        self.activation = function_of(activation)
        make = functools.partial(ExpertDense, EXPERTS, bias=True, rngs=rngs)
        self.gate_proj = make(D, HIDDEN) if is_gated(activation) else None
        self.up_proj = make(D, HIDDEN)
        self.down_proj = make(HIDDEN, D)

    def __call__(self, x, chosen, weights):
        linear = [self.up_proj, self.down_proj]
        if self.gate_proj is not None:
            linear.insert(0, self.gate_proj)
        *into, out = (layer.placed() for layer in linear)
        routing = Routing(chosen, weights)
        return mixture_of_experts(x, routing, self.router, into, out, self.activation)


def rules(biases=BIASES, folds=False):
    """Mixtral's table of experts, with biases."""
    table = folded(MIXTRAL) if folds else MIXTRAL
    kernels = [
        (name.removeprefix("experts/"), spec) for name, spec in table.params if "experts/" in name
    ]
    return Rules([*kernels, *biases], table.activations)


@functools.cache
def model(activation, **router):
    config = RouterConfig(experts=EXPERTS, **router)
    return from_nnx(lambda rngs: BiasedExperts(config, activation, rngs=rngs))


def arrays(activation):
    """Parameters with biases that are not 0, tokens, and weights."""
    params = model(activation).init(jax.random.key(0))
    leaves, structure = jax.tree.flatten(params)
    filled = [leaf if leaf.ndim == 3 else random(*leaf.shape, seed=9) for leaf in leaves]
    weights = jax.nn.softmax(random(*TOKENS, 2, seed=3))
    return jax.tree.unflatten(structure, filled), random(*TOKENS, D), weights


def hidden_units(params, x):
    """Units before the activation, of tokens `[…, d]` for every expert."""
    found = []
    for name in NAMES[:2]:
        if name in params:
            units = jnp.einsum("...d,edf->...ef", x, params[name]["kernel"])
            found.append(units + jnp.expand_dims(params[name]["bias"], range(x.ndim - 1)))
    return found


def every_expert(activation, weight_on, params, x, weights, chosen):
    """Each expert on each token, weighted."""
    function = function_of(activation)
    by_expert = (jax.nn.one_hot(chosen, EXPERTS) * weights[..., None]).sum(axis=2)  # [b, s, e]
    out = params["down_proj"]
    if weight_on == "input":
        is_chosen = jax.nn.one_hot(chosen, EXPERTS).sum(axis=2)
        inputs = x[:, :, None] * by_expert[..., None]
        units = [
            jnp.einsum("bsed,edf->bsef", inputs, params[name]["kernel"])
            + params[name]["bias"][None, None]
            for name in NAMES[:2]
            if name in params
        ]
        by_expert = is_chosen
    else:
        units = hidden_units(params, x)
    y = jnp.einsum("bsef,efd->bsed", function(*units), out["kernel"]) + out["bias"][None, None]
    return (y * by_expert[..., None]).sum(axis=2)


def loop(activation, weight_on, params, x, weights, chosen):
    """One token and one choice after the other."""
    function = function_of(activation)
    y = np.zeros(x.shape, np.float32)
    for at in np.ndindex(*chosen.shape):
        expert, weight, token = int(chosen[at]), float(weights[at]), np.asarray(x[at[:2]])
        if expert == EXPERTS:
            continue
        if weight_on == "input":
            token = token * weight
        units = []
        for name in NAMES[:2]:
            if name in params:
                kernel, bias = (np.asarray(params[name][k][expert]) for k in ("kernel", "bias"))
                units.append(token @ kernel + bias)
        kernel, bias = (np.asarray(params["down_proj"][k][expert]) for k in ("kernel", "bias"))
        out = np.asarray(function(*units)) @ kernel + bias
        y[at[:2]] += out if weight_on == "input" else weight * out
    return y


def values_and_gradients(layer):
    def loss(arguments, chosen):
        y = layer(*arguments, chosen)
        return (y * random(*y.shape, seed=9)).sum(), y

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@functools.cache
def reference(activation, weight_on):
    return values_and_gradients(functools.partial(every_expert, activation, weight_on))


def ours(activation, sizes=None, table=None, **router):
    """The layer on one device, or under a plan."""
    layer = model(activation, **router)
    if sizes is None:
        return values_and_gradients(lambda p, x, w, chosen: layer.apply(p, x, chosen, w)[0])
    made = make_plan(tiny.mesh(**sizes), table or rules(), layer, optax.identity())

    def under_plan(params, x, weights, chosen):
        with use_plan(made):
            return layer.apply(params, x, chosen, weights)[0]

    return values_and_gradients(under_plan)


def errors(program, activation, weight_on, choices=("even", "half of second choices")):
    """The largest error of outputs and of each gradient, relative to its largest value."""
    found = []
    for name in choices:
        arguments = arrays(activation)
        (_, y), gradients = program(arguments, CHOSEN[name])
        (_, expected), others = reference(activation, weight_on)(arguments, CHOSEN[name])
        pairs = zip(
            jax.tree.leaves((y, gradients)), jax.tree.leaves((expected, others)), strict=True
        )
        found += [np.abs(a - b).max() / max(np.abs(b).max(), 1e-3) for a, b in pairs]
    return max(found)


@pytest.mark.parametrize(
    ("activation", "weight_on"), [("clamped_swiglu", "output"), ("relu2", "input")]
)
def test_the_sums_are_those_of_a_loop(activation, weight_on):
    """The reference of the other tests, token by token; control: without biases it is not."""
    chosen = CHOSEN["half of second choices"]
    params, x, weights = arrays(activation)
    (_, y), _ = reference(activation, weight_on)((params, x, weights), chosen)
    few = slice(0, 2)
    expected = loop(activation, weight_on, params, x[few, :8], weights[few, :8], chosen[few, :8])
    np.testing.assert_allclose(y[few, :8], expected, rtol=1e-4, atol=1e-4)
    unbiased = jax.tree.map(lambda p: p * (p.ndim == 3), params)
    other = loop(activation, weight_on, unbiased, x[few, :8], weights[few, :8], chosen[few, :8])
    assert np.abs(other - expected).max() > 0.1


ONE_DEVICE = [
    ("clamped_swiglu", "output", "dropless"),
    ("relu2", "input", "dropless"),
    ("silu", "input", "capacity"),
    *(
        pytest.param(name, weight_on, dispatch, marks=pytest.mark.soak)
        for name in (*GATED, "silu", "gelu")
        for weight_on in ("output", "input")
        for dispatch in ("dropless", "capacity")
    ),
]


@pytest.mark.parametrize(("activation", "weight_on", "dispatch"), ONE_DEVICE)
def test_one_device_equals_every_expert_on_every_token(activation, weight_on, dispatch):
    """Outputs, and the gradients of tokens, weights, kernels and biases."""
    limit = {"capacity_factor": 8.0} if dispatch == "capacity" else {}
    program = ours(activation, dispatch=dispatch, weight_on=weight_on, **limit)
    assert errors(program, activation, weight_on) < 1e-5


def whole_layer(activation, weight_on, params, x, routing):
    """Outputs of tokens `[token, d]` with each expert's kernels and biases from another library."""
    layer = model(activation, weight_on=weight_on)
    experts, weights = (jnp.asarray(array)[None] for array in routing)
    y, _ = layer.apply(params, x[None], experts, weights)
    return np.asarray(y[0])


@pytest.mark.soak
def test_experts_are_those_of_gpt_oss():
    """Interleaved gates and biases of all kernels; control: another activation differs."""
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = types.SimpleNamespace(
        **{"intermediate_size": HIDDEN, "num_local_experts": EXPERTS, "hidden_size": D},
        **{"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "_experts_implementation": "eager"},
    )
    experts = theirs.GptOssExperts(config)
    params, x, weights = arrays("clamped_swiglu")
    x = 4 * x[0]
    chosen, weights = CHOSEN["even"][0], weights[0]
    both = ("gate_proj", "up_proj")
    for name, mine in (("gate_up_proj", "kernel"), ("gate_up_proj_bias", "bias")):
        pair = np.stack([params[part][mine] for part in both], axis=-1)
        array = pair.reshape(*pair.shape[:-2], -1)
        setattr(experts, name, torch.nn.Parameter(torch.from_numpy(array)))
    for name, mine in (("down_proj", "kernel"), ("down_proj_bias", "bias")):
        array = np.array(params["down_proj"][mine])
        setattr(experts, name, torch.nn.Parameter(torch.from_numpy(array)))
    tensors = (torch.from_numpy(np.array(array)) for array in (x, chosen, weights))
    hidden, index, scores = tensors
    expected = experts(hidden, index.long(), scores).detach().numpy()
    found = whole_layer("clamped_swiglu", "output", params, x, (chosen, weights))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    other = whole_layer("silu", "output", params, x, (chosen, weights))
    assert np.abs(other - expected).max() > 0.1


def test_gradients_of_bfloat16_parameters_are_bfloat16():
    """Those of biases are sums in float32, rounded once."""
    program = ours("silu")
    wide = arrays("silu")
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide)
    (_, y), gradients = program(narrow, CHOSEN["even"])
    assert {leaf.dtype for leaf in jax.tree.leaves((y, gradients))} == {jnp.dtype("bfloat16")}
    (_, expected), others = reference("silu", "output")(wide, CHOSEN["even"])
    for found, other in zip(
        jax.tree.leaves((y, gradients)), jax.tree.leaves((expected, others)), strict=True
    ):
        assert np.abs(found.astype(jnp.float32) - other).max() < 0.03 * np.abs(other).max()


MESHES = {
    "expert-tensor": {"fsdp": 2, "expert": 2, "tensor": 2},
    "folded": {"expert": 4, "tensor": 2},
    "sequence": {"sequence": 2, "expert": 4},
    "no-exchange": {"data": 4, "fsdp": 2},
    "tensor": {"tensor": 4, "data": 2},
}
IN_CI = {
    ("expert-tensor", "ragged", "output"),
    ("folded", "blocks", "input"),
}


def meshes():
    for name in MESHES:
        for form in ("blocks", "ragged", "capacity", "chunks"):
            for weight_on in ("output", "input"):
                key = (name, form, weight_on)
                marks = [] if key in IN_CI else [pytest.mark.soak]
                yield pytest.param(*key, marks=marks, id="-".join(key))


@pytest.mark.parametrize(("name", "form", "weight_on"), list(meshes()))
def test_many_devices_equal_every_expert_on_every_token(name, form, weight_on, monkeypatch):
    """However tokens are exchanged, in several passes; an output's bias is added once."""
    if form == "ragged":
        monkeypatch.setattr(expert_layout, "expert_axes", axes_of_tpus)
        monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
        monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    router = {"buffer_factor": 1.0, "weight_on": weight_on}
    if form == "capacity":
        router |= {"dispatch": "capacity", "capacity_factor": 8.0}
    if form == "chunks":
        router |= {"chunks": 2}
    table = rules()
    if name == "folded":
        table = rules(FOLDED, folds=True)
    program = ours("clamped_swiglu", MESHES[name], table, **router)
    choices = ("even", "two experts", "half of second choices", "none")
    assert errors(program, "clamped_swiglu", weight_on, choices) < 1e-5


def test_control_a_bias_that_each_device_of_tensor_adds(monkeypatch):
    """It is as often in the sum as there are shards of hidden units."""
    monkeypatch.setattr(moe, "_once", lambda x, tensor: x)
    program = ours("clamped_swiglu", MESHES["expert-tensor"])
    assert errors(program, "clamped_swiglu", "output", ["even"]) > 0.1


def test_biases_split_unlike_the_outputs_of_their_kernel_are_named():
    """With both shardings, before anything compiles."""
    wrong = rules(((INTO, P("expert")), (OUT, P("expert", "tensor"))))
    program = ours("silu", MESHES["expert-tensor"], wrong)
    with pytest.raises(AnnotationError, match="the experts' biases") as caught:
        jax.eval_shape(program, arrays("silu"), CHOSEN["even"])
    assert len({problem.what for problem in caught.value.problems}) == 2


@pytest.mark.soak
@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_biases_split_over_fsdp_are_gathered(weight_on):
    """Numbers are those of whole ones."""
    stored = rules(((INTO, P("expert", ("tensor", "fsdp"))), (OUT, P("expert", "fsdp"))))
    program = ours("silu", MESHES["expert-tensor"], stored, weight_on=weight_on)
    assert errors(program, "silu", weight_on) < 1e-5
