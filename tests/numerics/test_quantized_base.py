"""Frozen parameters in 4 or 8 bits: their codes, the numbers of the decoded parameters, the same on every mesh."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.analysis.collective_audit import audit_collectives
from spmd.errors import ConfigError, RuleError
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import next_token_loss
from spmd.lora.adapters import BASE, lora_rules, with_lora
from spmd.lora.config import LoRAConfig
from spmd.lora.param import DoRAParam
from spmd.lora.quantized_base import block_problems, store_base
from spmd.lora.weight_formats import FORMATS
from spmd.model_interface.model import Model
from spmd.model_interface.wrapped_param import abstract_params, is_stored
from spmd.models.mixtral import PRESETS as MIXTRAL_PRESETS
from spmd.partition_rules.llama import LLAMA
from spmd.partition_rules.mixtral import MIXTRAL
from spmd.pipeline.grad_fn import pipeline
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.tick_table import tabulate
from spmd.plan.communication import gathers
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import ShardingPlan, make_plan
from spmd.run.recipes import recipe_lines
from spmd.sharding.rules import Rules, replicate
from spmd.training.batch import place_batch
from spmd.training.state import TrainState, init_state
from spmd.training.step import TrainStep, make_train_step
from tests import tiny

CONFIG = dataclasses.replace(tiny.CONFIG, d_model=128, d_ff=256)
EXPERTS = dataclasses.replace(MIXTRAL_PRESETS["test"], d_model=256, d_ff=128)
TARGETS = ("attention/(q|v)_proj/kernel", "mlp/down_proj/kernel")
NF4 = LoRAConfig(targets=TARGETS, rank=4, quantize="nf4")
STEPS = 3


class Regression(nnx.Module):
    """Three layers of Flax, which know of no codes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(128, 256, rngs=rngs)
        self.middle = nnx.Linear(256, 128, rngs=rngs)
        self.out = nnx.Linear(128, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.middle(nnx.relu(self.up(x)))))


RULES_OF_REGRESSION = Rules(
    [("(up|middle|out)/kernel", P("fsdp", "tensor")), (".*/bias", replicate("small"))]
)


@functools.cache
def regression() -> Model:
    return from_nnx(lambda rngs: Regression(rngs))


def squares(model: Model):
    """The loss of a model of functions: the mean of squared errors."""

    def loss_fn(params: Any, variables: Any, batch: Any, key: Any) -> Any:
        outputs, after = model.forward(params, variables, key, batch["x"], train=True)
        errors = (outputs - batch["y"]) ** 2
        return {"loss": errors.sum(), "weight": jnp.float32(errors.size)}, after

    return loss_fn


def batch_of(name: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    if name == "regression":
        x = rng.normal(size=(8, 128)).astype(np.float32)
        return {"x": x, "y": rng.normal(size=(8, 64)).astype(np.float32)}
    tokens = rng.integers(0, CONFIG.vocab, (8, 17)).astype(np.int32)
    weights = np.ones((8, 16), np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def base_model(name: str) -> tuple[Model, Rules]:
    if name == "regression":
        return regression(), RULES_OF_REGRESSION
    if name == "mixtral":
        return tiny.model(EXPERTS), MIXTRAL
    return tiny.model(CONFIG), LLAMA


@functools.cache
def adapted(name: str, lora: LoRAConfig) -> Model:
    model, rules = base_model(name)
    return with_lora(model, lora, rules)


@functools.cache
def plan(name: str, lora: LoRAConfig, options: tuple = (), **sizes: int) -> ShardingPlan:
    model, rules = base_model(name)
    table = lora_rules(model, lora, rules)
    low = adapted(name, lora)
    return make_plan(tiny.mesh(**sizes), table, low, optax.sgd(0.3, momentum=0.9), **dict(options))


@functools.cache
def step_of(name: str, of: ShardingPlan) -> TrainStep:
    loss_fn = squares(of.model) if name == "regression" else next_token_loss(of.model)
    return make_train_step(of, loss_fn)


def trained(name: str, of: ShardingPlan, variables: Any = None) -> tuple[TrainState, list[float]]:
    """The state after some steps, and the loss of each."""
    step = step_of(name, of)
    state = init_state(of, 0, variables=variables)
    batch = place_batch(of, batch_of(name))
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


@functools.cache
def parameters(name: str) -> Any:
    """Random parameters of a model; a step takes arrays for its own, so these are of the host."""
    model, _ = base_model(name)
    return jax.device_get(jax.jit(model.init)(jax.random.key(0)))


def stored(name: str, lora: LoRAConfig, options: tuple = (), **sizes: int) -> Any:
    """These parameters as a plan stores them."""
    like = plan(name, lora, options, **sizes).abstract_variables[BASE]

    def place(param: np.ndarray, abstract: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(param, abstract.sharding)

    placed = jax.tree.map(place, parameters(name), abstract_params(like))
    return store_base(placed, like)


def decoded(base: Any) -> Any:
    """The frozen parameters that a model computes with, on one device."""

    def decode(param: Any) -> jax.Array:
        if is_stored(param):
            param = param.decoded(jnp.float32)
        return jnp.asarray(np.asarray(param))

    return jax.tree.map(decode, base, is_leaf=is_stored)


def expected(name: str, lora: LoRAConfig) -> tuple[TrainState, list[float]]:
    """Training on one device beside the decoded parameters, without any codes."""
    plain = dataclasses.replace(lora, quantize="")
    start = decoded(stored(name, lora))
    return trained(name, plan(name, plain), {BASE: start})


def distance(ours: tuple[TrainState, list[float]], theirs: tuple[TrainState, list[float]]) -> float:
    """The largest difference of losses and adapters, relative to the largest of each."""
    found = []
    for a, b in zip(
        jax.tree.leaves((ours[0].params, ours[1])),
        jax.tree.leaves((theirs[0].params, theirs[1])),
        strict=True,
    ):
        scale = np.abs(np.asarray(b)).max()
        found.append(float(np.abs(np.asarray(a) - np.asarray(b)).max() / scale))
    return max(found)


MIXED = LoRAConfig(
    targets=("(up|middle|out)/kernel",),
    rank=4,
    quantize="up/kernel=nf4,middle/kernel=mxfp4,out/kernel=bf16",
)
OF_EXPERTS = LoRAConfig(targets=("attention/(q|v)_proj/kernel",), rank=4, quantize="nf4")
DORA = dataclasses.replace(NF4, dora=True)
INT8 = dataclasses.replace(NF4, quantize="attention/.*=int8,mlp/.*=mxfp4")


def case_of(
    name: str, lora: LoRAConfig, sizes: dict[str, int], *, in_ci: bool = False, **options: Any
) -> Any:
    """A case: a model, its adapters, options of the plan and a mesh."""
    case = "-".join([name, lora.quantize, *options, *sizes])
    marks = [] if in_ci else [pytest.mark.soak]
    return pytest.param(name, lora, tuple(options.items()), sizes, marks=marks, id=case)


@pytest.mark.parametrize(
    ("name", "lora", "options", "sizes"),
    [
        case_of("llama", NF4, {"fsdp": 2, "tensor": 2}, in_ci=True),
        case_of("regression", MIXED, {"fsdp": 2, "tensor": 2}, in_ci=True),
        case_of("llama", DORA, {"fsdp": 2, "data": 2}),
        case_of("mixtral", OF_EXPERTS, {"fsdp": 2, "expert": 2}),
        case_of("llama", INT8, {"data": 2, "fsdp": 2}),
        case_of("llama", NF4, {"fsdp": 2}, zero=1),
        case_of("llama", NF4, {"fsdp": 2}, remat="full", offload=("params",)),
        case_of("llama", NF4, {"sequence": 2, "tensor": 2}),
    ],
)
def test_it_trains_as_beside_the_decoded_parameters(
    name: str, lora: LoRAConfig, options: tuple, sizes: dict[str, int]
) -> None:
    """Losses and adapters are those of plain LoRA on one device, whose parameters are the decoded ones."""
    layout = plan(name, lora, options, **sizes)
    ours = trained(name, layout, {BASE: stored(name, lora, options, **sizes)})
    assert distance(ours, expected(name, lora)) < 1e-5
    assert ours[1][-1] < ours[1][0]


@pytest.mark.soak
def test_stages_have_their_own_codes() -> None:
    """In a pipeline adapters train as on one device, and codes are split over stages."""
    one, many = plan("llama", NF4), plan("llama", NF4, pipe=2, fsdp=2)
    loss_fn = next_token_loss(one.model)
    table = tabulate(make_schedule("1f1b", 2, 4, 1))
    states = []
    for of, sizes, grad_fn in (
        (one, {}, accumulate(value_and_grad(loss_fn), 4)),
        (many, {"pipe": 2, "fsdp": 2}, pipeline(loss_fn, table)),
    ):
        step = make_train_step(of, grad_fn=grad_fn)
        state = init_state(of, 0, variables={BASE: stored("llama", NF4, **sizes)})
        losses = []
        for _ in range(STEPS):
            state, metrics = step(state, place_batch(of, batch_of("llama")))
            losses.append(float(metrics["loss"]))
        states.append((state, losses))
    assert distance(*states) < 1e-5
    specs = {leaf.path: leaf.spec for leaf in many.variables}
    assert specs["base/layers/attention/k_proj/kernel/codes"][0] == "pipe"


def test_control_the_parameters_themselves_train_otherwise() -> None:
    """Beside the parameters before they were coded, losses differ by more than a thousand times the bar."""
    plain = dataclasses.replace(MIXED, quantize="")
    start = jax.tree.map(jnp.asarray, parameters("regression"))
    other = trained("regression", plan("regression", plain), {BASE: start})
    assert distance(other, expected("regression", MIXED)) > 1e-2


def test_codes_are_equal_on_every_mesh() -> None:
    """Bits are those of one device, however the parameter was split when it was encoded."""
    one = tree.flatten(stored("llama", NF4))
    base = stored("llama", NF4, fsdp=2, tensor=2)
    many = tree.flatten(base)
    for path, array in one.items():
        np.testing.assert_array_equal(np.asarray(many[path]), np.asarray(array), err_msg=path)
    split = base["layers"]["attention"]["q_proj"]["kernel"]
    assert split.codes.sharding.shard_shape(split.codes.shape) == (2, 32, 64)
    assert split.scale.sharding.shard_shape(split.scale.shape) == (2, 1, 64)


@pytest.mark.soak
def test_experts_gather_codes() -> None:
    """Of experts' kernels, too, only bytes are gathered, in both passes; none has a gradient that is sent."""
    sizes = {"fsdp": 2, "expert": 2}
    layout = plan("mixtral", OF_EXPERTS, **sizes)
    step = step_of("mixtral", layout)
    state = init_state(layout, 0, variables={BASE: stored("mixtral", OF_EXPERTS, **sizes)})
    step(state, place_batch(layout, batch_of("mixtral")))
    audit = audit_collectives(step.programs[-1], layout.mesh, plan=layout)
    assert not audit.broken
    of_experts = []
    for record in audit.records:
        if "experts/" in str(record.cause) and record.over == "fsdp":
            of_experts.append(record)
    assert {(record.kind, record.dtype) for record in of_experts} == {("all-gather", "u8")}
    gathered = 0
    for leaf in layout.variables:
        if "experts/" in leaf.path and leaf.path.endswith(("kernel/codes", "kernel/scale")):
            gathered += leaf.bytes_per_device * layout.mesh.shape["fsdp"]
    assert sum(record.bytes for record in of_experts) == 2 * gathered


def test_a_layer_gathers_codes_and_keeps_none_decoded() -> None:
    """Of a kernel only bytes are gathered, in the forward pass and again in the backward pass."""
    layout = plan("llama", NF4, fsdp=2, tensor=2)
    shapes = {leaf.path: leaf for leaf in layout.variables}
    codes = shapes["base/layers/attention/q_proj/kernel/codes"]
    assert (codes.dtype, codes.bytes_per_device) == ("uint8", 2 * 64 * 128 // 4)
    step = step_of("llama", layout)
    state = init_state(layout, 0, variables={BASE: stored("llama", NF4, fsdp=2, tensor=2)})
    step(state, place_batch(layout, batch_of("llama")))
    audit = audit_collectives(step.programs[-1], layout.mesh, plan=layout)
    assert not audit.broken
    gathers = [record for record in audit.records if record.kind == "all-gather"]
    of_kernels = [
        record for record in gathers if record.over == "fsdp" and "_proj" in str(record.cause)
    ]
    assert {record.dtype for record in of_kernels} == {"u8"}
    gathered = 0
    for leaf in layout.variables:
        if leaf.path.endswith(("kernel/codes", "kernel/scale")):
            gathered += leaf.bytes_per_device * layout.mesh.shape["fsdp"]
    assert sum(record.bytes for record in of_kernels) == 2 * gathered


def test_formats_are_the_published_ones() -> None:
    """MXFP4 is E2M1 as NumPy's cast rounds it; a code and its number are each other's; zeros stay zeros."""
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(128, 24)), jnp.float32)
    mxfp4 = FORMATS["mxfp4"]
    parts = mxfp4.encode(weight)
    scale = 2.0 ** (np.asarray(parts.scale, np.int32) - 127)
    blocks = np.asarray(weight).reshape(4, 32, 24) / scale[:, None]
    rounded = blocks.astype(jnp.float4_e2m1fn).astype(np.float32) * scale[:, None]
    np.testing.assert_array_equal(mxfp4.decode(parts, jnp.float32), rounded.reshape(128, 24))
    assert np.abs(blocks).max() >= 4  # of the largest the exponent is that of 6
    bounds = {"nf4": 0.16, "mxfp4": 0.26, "int8": 1 / 254}
    for name, weight_format in FORMATS.items():
        parts = weight_format.encode(weight)
        once = weight_format.decode(parts, jnp.float32)
        error = np.abs(np.asarray(once - weight)).max() / np.abs(np.asarray(weight)).max()
        assert 1e-4 < error < bounds[name], name
        again = weight_format.decode(weight_format.encode(once), jnp.float32)
        assert np.mean(np.abs(again - once)) < 2e-3 * np.mean(np.abs(weight)), name
        zeros = weight_format.decode(weight_format.encode(0 * weight), jnp.float32)
        assert not np.asarray(zeros).any(), name


def test_normal_float_is_as_published() -> None:
    """Its values are quantiles of a normal distribution, halved at zero (QLoRA, equation 4 and appendix E)."""
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(512, 64)), jnp.float32)
    parts = FORMATS["nf4"].encode(weight)
    codes = np.asarray(parts.codes)
    counts = np.bincount(np.concatenate([codes & 15, codes >> 4]).ravel(), minlength=16)
    assert counts.min() > counts.max() / 6  # every code has its share
    scale = np.abs(np.asarray(weight)).reshape(8, 64, 64).max(axis=1)
    outer = np.repeat(np.asarray(parts.outer_scale), 256)[:512].reshape(64, 8).T
    offset = float(parts.offset)
    np.testing.assert_allclose(offset, scale.mean(), rtol=1e-6)
    np.testing.assert_allclose(
        np.abs(scale.T.ravel() - offset).reshape(2, 256).max(1), outer.T.ravel()[::256]
    )
    decoded_weight = np.asarray(FORMATS["nf4"].decode(parts, jnp.float32))
    largest = np.abs(decoded_weight).reshape(8, 64, 64).max(axis=1)
    # 7 bits between offset and the largest difference: its last decade has 64 numbers
    assert np.abs(largest - scale).max() < outer.max() * 0.9 / 64


class Scanned(nnx.Module):
    """Layers that a plain scan runs: it knows nothing of layers that start with their parameters."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        make = nnx.vmap(lambda rngs: nnx.Linear(64, 64, rngs=rngs), in_axes=0, out_axes=0)
        self.layers = nnx.split_rngs(splits=2)(make)(rngs)

    def embed_inputs(self, x: jax.Array) -> jax.Array:
        return x

    def apply_layers(self, x: jax.Array, context: Any = None) -> Any:
        graph, state = nnx.split(self.layers)

        def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            return nnx.merge(graph, layer)(x), None

        return jax.lax.scan(body, x, state)[0]

    def compute_outputs(self, x: jax.Array) -> jax.Array:
        return x

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.apply_layers(x)


def test_layers_of_a_plain_scan_decode_at_their_use() -> None:
    """A model in parts whose layers do not fetch their parameters gets decoded ones."""
    model = from_nnx(lambda rngs: Scanned(rngs))
    table = Rules([(".*kernel", P("fsdp")), (".*bias", replicate("small"))], stacked=("layers",))
    lora = LoRAConfig(targets=(".*kernel",), rank=2, quantize="nf4")
    low = with_lora(model, lora, table)
    key = jax.random.key(0)
    params, variables = low.init(key), low.init_variables(key)
    x = jnp.ones((3, 64))
    found, _ = low.forward(params, variables, None, x, train=False)
    plain = model.apply(decoded(variables[BASE]), x)
    np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-5)


def test_the_plan_counts_what_is_gathered() -> None:
    """Codes as bytes, kernels of experts with adapters decoded; recipes are of coded kernels, too."""
    of = plan("mixtral", OF_EXPERTS, (("quantize", "attention/.*=fp8"),), fsdp=2, expert=2)
    sent = {transfer.path: transfer for transfer in gathers(of)}
    codes = sent["base/layers/attention/k_proj/kernel/codes"]
    shapes = {path: x.shape for path, x in tree.flatten(parameters("mixtral")).items()}
    half = np.prod(shapes["layers/attention/k_proj/kernel"]) // 2  # two codes a byte
    assert (codes.dtype, codes.bytes) == ("uint8", half)
    experts = sent["base/layers/moe/experts/up_proj/kernel/codes"]
    of_experts = np.prod(shapes["layers/moe/experts/up_proj/kernel"])
    assert (experts.dtype, experts.elements) == ("uint8", of_experts // 2 // 2)
    adapted = dataclasses.replace(OF_EXPERTS, targets=(".*experts/up_proj/kernel",))
    sent = {
        transfer.path: transfer for transfer in gathers(plan("mixtral", adapted, fsdp=2, expert=2))
    }
    experts = sent["base/layers/moe/experts/up_proj/kernel/codes"]
    assert (experts.dtype, experts.elements) == ("float32", of_experts // 2)
    assert "base/layers/moe/experts/up_proj/kernel/scale" not in sent
    assert of.placements["layers/attention/q_proj/kernel"].recipe.name == "fp8"
    assert not any(
        "router" in path and "codes" in path for path in tree.flatten(of.abstract_variables)
    )
    (line,) = recipe_lines(of, "cpu")
    assert "4 kernels" in line


def test_magnitudes_are_those_of_the_sum() -> None:
    """DoRA divides by the norms of the sum; with the norms of the base it is that direction alone."""
    rng = np.random.default_rng(0)
    base, a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((64, 6), (64, 3), (3, 6)))
    base[:, 0] = b[:, 0] = 0
    change = rng.normal(size=6).astype(np.float32)
    param = DoRAParam(jnp.asarray(base), jnp.asarray(a), jnp.asarray(b), 2.0, jnp.asarray(change))
    whole = base + 2.0 * a @ b
    norms = np.linalg.norm(whole, axis=0)
    expected = np.where(norms > 0, whole / np.where(norms > 0, norms, 1), 0)
    expected *= np.linalg.norm(base, axis=0) + change
    np.testing.assert_allclose(param.merged(), expected, rtol=1e-4, atol=1e-5)
    x = jnp.asarray(rng.normal(size=(5, 64)), jnp.float32)
    np.testing.assert_allclose(param.completed(x @ base, x), x @ expected, rtol=1e-3, atol=1e-3)


def test_ranks_are_by_pattern() -> None:
    """The first row decides; a row without a target of its own and a rank too high name their setting."""
    lora = dataclasses.replace(NF4, ranks="mlp/.*=8,attention/q_proj/kernel=2", quantize="")
    shapes = tree.flatten(jax.eval_shape(adapted("llama", lora).init, jax.random.key(0)))
    ranks = {path: leaf.shape[-1] for path, leaf in shapes.items() if path.endswith("_lora_a")}
    assert sorted(ranks.values()) == [2, 4, 8]
    for ranks_text, says in (
        ("mlp/.*=8,mlp/down_proj/kernel=2", r"row 'mlp/down_proj/kernel=2': matches no target"),
        ("mlp/.*=4000", r"lora\.ranks: is above the rank"),
    ):
        with pytest.raises(ConfigError, match=says):
            adapted("llama", dataclasses.replace(lora, ranks=ranks_text))
    for ranks_text in ("=4", "mlp/.*=0", "8", "mlp/(=4"):
        with pytest.raises(ConfigError, match=r"lora\.ranks"):
            dataclasses.replace(lora, ranks=ranks_text)


def test_what_cannot_be_quantized_is_said_at_once() -> None:
    """Unknown formats, rows of no kernel or of kernels of rows before, and inputs of no whole blocks."""
    with pytest.raises(ConfigError, match=r"names the format 'nf3'") as error:
        LoRAConfig(targets=("kernel",), quantize="nf3,mlp/(=nf4")
    assert "targets" not in str(error.value)
    with pytest.raises(ConfigError, match=r"lora\.targets: is empty"):
        LoRAConfig(quantize="nf4")
    table = "norm/scale=nf4,attention/.*=nf4,attention/q_proj/kernel=int8"
    with pytest.raises(ConfigError) as error:
        with_lora(tiny.model(CONFIG), dataclasses.replace(NF4, quantize=table), LLAMA)
    assert "row 'norm/scale=nf4': matches no kernel" in str(error.value)
    assert "rows before it match the same kernels" in str(error.value)
    narrow = dataclasses.replace(CONFIG, d_model=96, heads=4, kv_heads=4)
    with pytest.raises(ConfigError, match=r"96 / 64 = 1\.5"):
        with_lora(tiny.model(narrow), NF4, LLAMA)
    with pytest.raises(RuleError, match=r"kernel/scale.*cannot split dimension 1"):
        plan("llama", NF4, fsdp=8)
    problems = block_problems(tiny.model(CONFIG), "nf4", LLAMA, tiny.mesh(fsdp=8))
    assert "is split over 8 devices, and has 2 blocks of 64 inputs" in str(problems[0])
