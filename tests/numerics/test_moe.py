"""A mixture is the weighted sum of its experts, however tokens are sent to them and wherever they are."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from spmd.errors import AnnotationError, RuleError
from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import next_token_loss
from spmd.jaxpr.equations import equations
from spmd.layers import expert_layout, moe
from spmd.layers.expert_exchange import ExpertAxes, RaggedAllToAll
from spmd.layers.expert_layout import ExpertKernel
from spmd.layers.moe import mixture_of_experts
from spmd.layers.router import RouterConfig, Routing, route
from spmd.models.decoder.experts import Experts
from spmd.models.mixtral import PRESETS, mixtral
from spmd.partition_rules.layouts import folded
from spmd.partition_rules.mixtral import MIXTRAL
from spmd.plan.context import use_plan
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.sharding.mesh import MeshShape, abstract_mesh
from spmd.sharding.rules import Rules
from spmd.testing import token_batches
from spmd.training.step import make_train_step
from tests import tiny
from tests.one_device import Job
from tests.rounding import assert_close, noise_of

EXPERTS, D, HIDDEN = 4, 16, 24
NO_LIMIT = RouterConfig(experts=EXPERTS, dispatch="capacity", capacity_factor=math.inf)
DROPLESS = RouterConfig(experts=EXPERTS, dispatch="dropless")


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


X, LOGITS = random(2, 12, D), random(2, 12, EXPERTS, seed=1)
KERNELS = [
    random(EXPERTS, *shape, seed=2 + i) / 4
    for i, shape in enumerate([(D, HIDDEN), (D, HIDDEN), (HIDDEN, D)])
]


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


def mixed(x, logits, kernels, config, key=None):
    """The library's layer, on one device."""
    routing, _ = route(logits, config, key=key)
    into, out = [ExpertKernel(k, None) for k in kernels[:-1]], ExpertKernel(kernels[-1], None)
    return mixture_of_experts(
        x, routing, config, into, out, swiglu if len(into) == 2 else jax.nn.relu
    )


def dense_sum(x, logits, kernels, config, key=None):
    """Every expert on every token, weighted; a choice that is not followed weighs nothing."""
    routing, _ = route(logits, config, key=key)
    hidden = [jnp.einsum("bsd,edf->bsef", x, kernel) for kernel in kernels[:-1]]
    y = jnp.einsum(
        "bsef,efd->bsed", (swiglu if len(hidden) == 2 else jax.nn.relu)(*hidden), kernels[-1]
    )
    weights = (jax.nn.one_hot(routing.experts, EXPERTS) * routing.weights[..., None]).sum(axis=2)
    return (y * weights[..., None]).sum(axis=2)


def values_and_gradients(layer):
    def loss(arguments):
        y = layer(*arguments)
        return (y * random(*y.shape, seed=9)).sum(), y

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


ROUTERS = {
    "top-1": {"top_k": 1, "normalise": False},
    "top-2": {},
    "random-second": {"random_second": True},
    "top-4": {"top_k": 4},
}


@pytest.mark.parametrize("name", ROUTERS)
def test_capacity_without_limit_equals_dropless_equals_a_dense_sum(name):
    """Outputs and the gradients of tokens, router and kernels agree but for the order of sums."""
    kernels = KERNELS[1:] if name == "top-1" else KERNELS
    key = jax.random.key(0) if "random" in name else None
    arguments, programs = (X, LOGITS, kernels), []
    for layer, config in ((dense_sum, NO_LIMIT), (mixed, NO_LIMIT), (mixed, DROPLESS)):
        config = dataclasses.replace(config, **ROUTERS[name])

        def call(x, logits, kernels, layer=layer, config=config):
            y = layer(x, logits, kernels, config, key)
            return y[0] if isinstance(y, tuple) else y

        programs.append(values_and_gradients(call))
    expected, *results = (program(arguments) for program in programs)
    noise = noise_of(programs[0], arguments)
    for found in results:
        assert_close(found, expected, noise)


def test_expert_choice_equals_a_dense_sum():
    """Of the tokens that experts took, with gradients."""
    config = RouterConfig(
        experts=EXPERTS, choice="expert", balance=0, dispatch="capacity", capacity_factor=1.0
    )
    arguments, layers = (
        (X, LOGITS, KERNELS),
        (lambda *a: mixed(*a, config)[0], lambda *a: dense_sum(*a, config)),
    )
    ours, reference = (values_and_gradients(layer) for layer in layers)
    assert_close(ours(arguments), reference(arguments), noise_of(reference, arguments))


@pytest.mark.soak
def test_a_token_that_finds_no_room_gets_nothing():
    """Of three tokens for one expert with room for two, the last is dropped, counted, and its output is zero."""
    config = RouterConfig(
        experts=2, top_k=1, normalise=False, dispatch="capacity", capacity_factor=1.0
    )
    routing = Routing(jnp.zeros((1, 4, 1), jnp.int32).at[0, 2].set(1), jnp.ones((1, 4, 1)))
    kernels = [ExpertKernel(jnp.ones((2, D, D)), None)] * 2
    y, counts = mixture_of_experts(X[:1, :4], routing, config, kernels[:1], kernels[1], jax.nn.relu)
    assert float(counts["dropped"]) == 1
    np.testing.assert_array_equal(np.asarray(y[0, 3]), 0.0)
    np.testing.assert_array_equal(
        np.asarray((np.abs(y[0, :3]) > 0).any(axis=-1)), np.asarray(X[0, :3].sum(-1) > 0)
    )
    limited, counts = mixed(X, LOGITS, KERNELS, dataclasses.replace(NO_LIMIT, capacity_factor=0.5))
    assert counts["dropped"] > 0
    assert np.abs(limited - mixed(X, LOGITS, KERNELS, NO_LIMIT)[0]).max() > 1e-2  # the control


# Dropless dispatch over devices: buffers of a bounded size, and as many passes as it takes.


class OnlyExperts(nnx.Module):
    """The experts of a layer, whose tokens, choices and weights are given."""

    def __init__(self, config, *, rngs):
        spec = config.pattern.group[0].mlp
        self.router = config.router
        self.experts = Experts(spec, config.sizes, config.router.experts, rngs=rngs)

    def __call__(self, x, chosen, weights):
        names = ("gate_proj", "up_proj", "down_proj")
        *into, out = (getattr(self.experts, name).placed() for name in names)
        return mixture_of_experts(x, Routing(chosen, weights), self.router, into, out, swiglu)


TOKENS, CHOICES = (8, 64), 2  # 128 rows for each of 8 devices: the smallest buffer
FIRST = jnp.arange(math.prod(TOKENS)).reshape(TOKENS)
CHOSEN = {
    "even": jnp.stack([FIRST % 8, (FIRST + 1) % 8], axis=-1),
    "two experts": jnp.stack([FIRST * 0 + 5, FIRST * 0 + 2], axis=-1),
    "one device": jnp.stack([FIRST * 0 + 7, FIRST * 0 + 6], axis=-1),
    "none": jnp.full((*TOKENS, CHOICES), 8),
    "half of second choices": jnp.stack([FIRST % 8, jnp.where(FIRST % 2, 8, 3)], axis=-1),
}


def over_devices(factor, sizes, rules=MIXTRAL, **router):
    """Outputs, gradients and passes of `OnlyExperts` under a plan, and of every expert on every token."""
    router = RouterConfig(experts=8, buffer_factor=factor, **router)
    config = mixtral(vocab=8, d_model=D, layers=1, heads=1, kv_heads=1, d_ff=HIDDEN, router=router)
    model = from_nnx(lambda rngs: OnlyExperts(config, rngs=rngs))
    rules = Rules([rule for rule in rules.params if "experts/" in rule[0]], rules.activations)
    made = make_plan(tiny.mesh(**sizes), rules, model, optax.identity())
    x, weights = random(*TOKENS, D), jax.nn.softmax(random(*TOKENS, CHOICES, seed=3))
    arrays = (model.init(jax.random.key(0)), x, weights)

    def ours(params, x, weights, chosen):
        with use_plan(made):
            return model.apply(params, x, chosen, weights)

    def by_hand(params, x, weights, chosen):
        kernels = [
            params["experts"][name]["kernel"] for name in ("gate_proj", "up_proj", "down_proj")
        ]
        hidden = swiglu(*(jnp.einsum("bsd,edf->bsef", x, kernel) for kernel in kernels[:2]))
        y = jnp.einsum("bsef,efd->bsed", hidden, kernels[2])
        return (y * (jax.nn.one_hot(chosen, 8) * weights[..., None]).sum(axis=2)[..., None]).sum(
            axis=2
        ), {}

    def both(layer):
        def loss(arrays, chosen):
            y, counts = layer(*arrays, chosen)
            return (y * random(*y.shape, seed=9)).sum(), (y, counts)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))

    return [functools.partial(both(layer), arrays) for layer in (ours, by_hand)]


def ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """What XLA:CPU lacks, from the rows of all devices: the interface as `jax.lax` documents it."""
    parts = [
        jax.lax.all_gather(a, axis_name)
        for a in (operand, input_offsets, send_sizes, output_offsets)
    ]
    me, place = jax.lax.axis_index(axis_name), jnp.arange(output.shape[0])
    for number, (rows, starts, sizes, ends) in enumerate(zip(*parts, strict=True)):
        offset = place - ends[me]
        is_here = (offset >= 0) & (offset < jnp.minimum(sizes[me], recv_sizes[number]))
        found = rows.at[starts[me] + offset].get(mode="clip")
        output = jnp.where(is_here.reshape(-1, *(1,) * (output.ndim - 1)), found, output)
    return output


def axes_of_tpus(mesh, names):
    return ExpertAxes(
        names, math.prod(mesh.shape[name] for name in names), RaggedAllToAll if names else None
    )


CASES = {
    "expert": (1.0, {"expert": 8}, (0, 3, 3, 0, 2)),
    "data": (1.25, {"data": 2, "expert": 4}, (0, 1, 1, 0, 1)),
    "unbounded": (8.0, {"expert": 8}, (0, 0, 0, 0, 0)),
    "fsdp-tensor": (1.0, {"fsdp": 2, "expert": 2, "tensor": 2}, (0, 3, 3, 0, 2)),
    "sequence": (1.0, {"sequence": 2, "expert": 4}, (0, 3, 3, 0, 2)),
    "folded": (1.0, {"expert": 4, "tensor": 2}, (0, 3, 3, 0, 2), folded(MIXTRAL)),
    "folded-of-all": (1.0, {"fsdp": 2, "tensor": 4}, (0, 3, 3, 0, 2), folded(MIXTRAL)),
    "no-exchange": (1.0, {"data": 4, "fsdp": 2}, (0, 3, 3, 0, 2)),
    "chunks": (1.0, {"fsdp": 2, "expert": 4}, (0, 2, 2, 0, 2), MIXTRAL, 2),
}
"""Factor of the buffer, mesh, and extra passes of each of `CHOSEN` in blocks; a ragged exchange needs no more."""
RAGGED_IN_CI, BLOCKS_IN_CI = (
    ("fsdp-tensor", "folded-of-all"),
    ("expert", "sequence", "folded", "no-exchange"),
)


def forms():
    """Each case in one of both forms in CI: in blocks, whose passes are known, or ragged; the other form is soak."""
    for case in CASES:
        for form in ("blocks", "ragged"):
            in_ci = case in (RAGGED_IN_CI if form == "ragged" else BLOCKS_IN_CI)
            marks = [] if in_ci else [pytest.mark.soak]
            yield pytest.param(case, form == "ragged", marks=marks, id=f"{case}-{form}")


@pytest.mark.parametrize(("case", "ragged"), list(forms()))
def test_many_passes_equal_a_dense_sum(case, ragged, monkeypatch):
    """Outputs and all gradients, however uneven the load: nothing is dropped, and no buffer is larger."""
    if ragged:
        monkeypatch.setattr(expert_layout, "expert_axes", axes_of_tpus)
        monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
        monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    factor, sizes, extra, rules, chunks = (*CASES[case], *(MIXTRAL, 1)[len(CASES[case]) - 3 :])
    ours, by_hand = over_devices(factor, sizes, rules, chunks=chunks)
    for (name, chosen), passes in zip(CHOSEN.items(), extra, strict=True):
        (_, (y, counts)), gradients = ours(chosen)
        (_, (expected, _)), others = by_hand(chosen)
        assert ragged or float(counts["extra_passes"]) == passes, name
        assert float(counts["extra_passes"]) <= passes, name
        scales = [max(np.abs(other).max(), 1e-3) for other in jax.tree.leaves((expected, others))]
        pairs = zip(
            jax.tree.leaves((y, gradients)),
            jax.tree.leaves((expected, others)),
            scales,
            strict=True,
        )
        assert all(np.abs(a - b).max() <= 1e-5 * scale for a, b, scale in pairs), name


def test_capacity_of_a_split_example_takes_no_more_room():
    """The parts of an example fill any of its slots: their rows are exchanged without slots, and give the same sums."""
    sent = {}
    for sizes in ({"expert": 8}, {"sequence": 2, "expert": 4}):
        ours, by_hand = over_devices(1.0, sizes, dispatch="capacity", capacity_factor=4.0)
        (_, (y, _)), gradients = ours(CHOSEN["even"])
        (_, (expected, _)), others = by_hand(CHOSEN["even"])
        pairs = zip(
            jax.tree.leaves((y, gradients)), jax.tree.leaves((expected, others)), strict=True
        )
        assert all(np.abs(a - b).max() <= 1e-5 * np.abs(b).max() for a, b in pairs)
        moves = [
            e
            for e in equations(jax.make_jaxpr(ours)(CHOSEN["even"]))
            if e.primitive.name == "all_to_all"
        ]
        sent[len(sizes)] = max(e.invars[0].aval.size for e in moves)
    assert sent[2] == 128 * D, "of rows, not of slots"
    assert sent[1] == 4 * 128 * D, (
        "the control: one example a device, whose slots are four times its rows"
    )


def test_control_a_pass_that_is_lost(monkeypatch):
    """Without the passes after the first, some tokens get nothing."""
    monkeypatch.setattr(moe, "_more", lambda trip, body, first: first)
    ours, by_hand = over_devices(1.0, {"expert": 8})
    close = [np.abs(ours(c)[0][1][0] - by_hand(c)[0][1][0]).max() < 1e-2 for c in CHOSEN.values()]
    assert close == [True, False, False, True, False]


# One tiny Mixtral on several meshes, against one device.

CONFIGS = {
    dispatch: dataclasses.replace(
        PRESETS["test"], router=dataclasses.replace(PRESETS["test"].router, dispatch=dispatch)
    )
    for dispatch in ("capacity", "dropless")
}
BATCHES = token_batches((8, 16), 64, steps=2)


@functools.cache
def model(dispatch):
    return from_nnx(CONFIGS[dispatch].build)


@functools.cache
def grad_fn(dispatch):
    return value_and_grad(next_token_loss(model(dispatch)))


def plan(dispatch, mesh=None, rules=MIXTRAL, **sizes):
    return make_plan(mesh or tiny.mesh(**sizes), rules, model(dispatch), optax.adamw(1e-3))


@functools.cache
def job(dispatch):
    return Job(model(dispatch), MIXTRAL, grad_fn(dispatch), BATCHES)


@pytest.mark.parametrize(
    ("dispatch", "sizes"),
    [
        ("capacity", {"data": 2, "expert": 4}),
        pytest.param("dropless", {"expert": 8}, marks=pytest.mark.soak),
    ],
)
def test_many_devices_equal_one(dispatch, sizes):
    """As many devices as experts, and tokens that find no room, which the parity suite's table does not have."""
    job(dispatch).assert_parity(**sizes)


PAIRS = [
    (dispatch, axis)
    for dispatch in CONFIGS
    for axis in ("data", "fsdp", "sequence", "tensor", "pipe")
]


@pytest.mark.soak
@pytest.mark.parametrize(("dispatch", "axis"), PAIRS)
def test_experts_beside_every_axis_equal_one_device(dispatch, axis):
    """Two devices of experts and four of the other axis, and experts over both where that is `tensor`."""
    size = 2 if axis in ("tensor", "pipe") else 4  # as many as key/value heads, and layers
    job(dispatch).assert_parity(expert=2, **{axis: size})
    if axis == "tensor":
        job(dispatch).assert_parity(rules=folded(MIXTRAL), expert=4, tensor=2)


def test_control_tokens_that_stay_where_they_are(monkeypatch):
    """An all-to-all that sends nothing is noticed."""
    monkeypatch.setattr(jax.lax, "all_to_all", lambda x, *_, **__: x)
    # so that nothing compiled before is used
    own = value_and_grad(next_token_loss(model("capacity")))
    assert not job("capacity").parity(grad_fn=own, expert=2).ok


# What cannot be is an error before anything compiles.


def problems_of(dispatch, **sizes):
    with pytest.raises(RuleError) as caught:
        plan(dispatch, mesh=abstract_mesh(MeshShape(**sizes)))
    return caught.value.problems


def test_more_expert_shards_than_experts():
    """Each kernel is named, with the division that does not come out."""
    problems = problems_of("dropless", expert=16)
    assert {p.where.split("/")[-2] for p in problems} == {"gate_proj", "up_proj", "down_proj"}
    assert all("8 / (expert=16) = 0.5" in p.detail for p in problems)


def test_an_expert_axis_on_a_model_without_experts():
    """It would split the batch alone, which `data` and `fsdp` are for."""
    with pytest.raises(RuleError, match="no experts") as caught:
        tiny.plan(expert=2)
    assert [p.where for p in caught.value.problems] == ["mesh.expert"]


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"experts/down_proj/kernel": P("expert", "fsdp", "tensor")}, "the experts' kernels"),
        ({"experts/(gate|up)_proj/kernel": P(None, "fsdp", "tensor")}, "the experts' kernels"),
        ({"expert_tokens": P(("data", "fsdp"), "sequence")}, "activation 'expert_tokens'"),
        ({"expert_tokens": P(("data", "fsdp", "expert"), "tensor")}, "activation 'expert_tokens'"),
        (
            {"experts/(gate|up)_proj/kernel": P(("fsdp", "expert"), None, "tensor")},
            "the experts' kernels",
        ),
        ({"expert_tokens": P(("data", "expert"), "sequence")}, "activation 'expert_tokens'"),
    ],
    ids=[
        "down",
        "into",
        "tokens-whole",
        "tokens-over-tensor",
        "no-neighbours",
        "tokens-not-over-fsdp",
    ],
)
def test_tables_that_the_layer_has_no_collectives_for(changed, wrong):
    """Kernels that are split differently, and tokens that are not split over experts: an error when it is traced."""
    rules = dataclasses.replace(
        MIXTRAL,
        params=[(pattern, changed.get(pattern, spec)) for pattern, spec in MIXTRAL.params],
        activations=[(name, changed.get(name, spec)) for name, spec in MIXTRAL.activations],
    )
    made = plan("dropless", mesh=abstract_mesh(MeshShape(fsdp=2, expert=2, tensor=2)), rules=rules)
    batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in BATCHES[0].items()}
    with pytest.raises(AnnotationError) as caught:
        make_train_step(made, next_token_loss(model("dropless"))).trace(batch)
    assert [p.where for p in caught.value.problems] == [wrong]
    assert all(p.fix for p in caught.value.problems)


def test_kernels_that_the_table_does_not_know():
    """A hand-written model must say which rules its kernels go by."""
    with (
        use_plan(plan("dropless")),
        pytest.raises(AnnotationError, match="not all in the rule table"),
    ):
        mixed(X, LOGITS, KERNELS, DROPLESS)


def test_experts_that_are_not_split_send_nothing():
    """With experts whole on every device the layer has no all-to-all, and an abstract mesh is enough to see it."""
    for sizes, expected in (({"fsdp": 4}, False), ({"expert": 4}, True)):
        made = plan("dropless", mesh=abstract_mesh(MeshShape(**sizes)))
        with use_plan(made):
            text = str(
                jax.make_jaxpr(lambda p, t: model("dropless").apply(p, t).logits)(
                    made.abstract_params, BATCHES[0]["tokens"]
                )
            )
        assert ("all_to_all" in text) is expected
