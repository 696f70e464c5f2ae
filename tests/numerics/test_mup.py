"""muP: activations move as much at any width, and what the plan says of rates is what updates do."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from spmd import tree
from spmd.errors import ConfigError
from spmd.partition_rules.llama import LLAMA
from spmd.run.build import build_base_model, build_optimizer
from spmd.run.config import TrainConfig
from tests import tiny

WIDTHS = (32, 128, 512)
INPUTS, CLASSES, EXAMPLES, STEPS = 16, 8, 32, 2
RULES = spmd.Rules(
    params=[("first|middle|last", P("fsdp", "tensor")), ("bias", spmd.replicate("one vector"))],
    stacked=(),
)


def network(width: int) -> spmd.Model:
    """A network without modules: nobody says which dimensions are inputs."""

    def init(key: jax.Array) -> Any:
        first, middle, last = jax.random.split(key, 3)
        return {
            "first": jax.random.normal(first, (INPUTS, width)) / INPUTS**0.5,
            "middle": jax.random.normal(middle, (width, width)) / width**0.5,
            "bias": jnp.zeros((width,)),
            "last": jax.random.normal(last, (width, CLASSES)) / width**0.5,
        }

    return spmd.Model(init, lambda params, x: hidden(params, x) @ params["last"])


def hidden(params: Any, x: jax.Array) -> jax.Array:
    x = jax.nn.relu(x @ params["first"])
    return jax.nn.relu(x @ params["middle"] + params["bias"][None])


@functools.cache
def moved(width: int, *, with_mup: bool) -> tuple[float, float]:
    """Root mean square of what two steps of AdamW change in hidden activations and in outputs."""
    model = network(width)
    if with_mup and width != WIDTHS[0]:
        model = spmd.with_mup(model, network(WIDTHS[0]))
    config = spmd.OptimizerConfig(
        learning_rate=1e-3, schedule="constant", clip_norm=0.0, weight_decay=0.0
    )
    optimizer = spmd.make_optimizer(config, STEPS, model=model, stacked=())
    plan = spmd.make_plan(tiny.mesh(fsdp=2), RULES, model, optimizer)
    random = np.random.default_rng(0)
    x = random.normal(size=(EXAMPLES, INPUTS)).astype(np.float32)
    y = random.normal(size=(EXAMPLES, CLASSES)).astype(np.float32)

    def loss_fn(params: Any, variables: Any, batch: Any, key: jax.Array) -> Any:
        errors = (model.apply(params, batch["x"]) - batch["y"]) ** 2
        return {"loss": errors.sum(), "weight": jnp.float32(len(errors))}, variables

    step = spmd.make_train_step(plan, loss_fn)
    state = step.init_state(0)
    before = jax.device_get(state.params)
    for _ in range(STEPS):
        state, _ = step(state, {"x": x, "y": y})
    after = jax.device_get(state.params)
    inner = hidden(after, x) - hidden(before, x)
    outer = hidden(after, x) @ after["last"] - hidden(before, x) @ before["last"]
    return float(jnp.sqrt((inner**2).mean())), float(jnp.sqrt((outer**2).mean()))


@pytest.mark.parametrize("which", [0, 1], ids=["hidden", "outputs"])
def test_coordinates_move_as_much_at_any_width(which):
    """The coordinate check of Yang et al. (appendix D.1), with the standard parametrization as its control."""
    mup = [moved(width, with_mup=True)[which] for width in WIDTHS]
    standard = [moved(width, with_mup=False)[which] for width in WIDTHS]
    assert max(mup) / min(mup) < 1.6, mup
    assert standard[-1] / standard[0] > 3, standard


WIDE = dataclasses.replace(tiny.CONFIG, d_model=64, heads=8, kv_heads=4, d_ff=128)


def config(**fields) -> TrainConfig:
    mup = ("d_model=16", "heads=2", "kv_heads=1", "d_ff=32")
    return TrainConfig(**{"model": WIDE, "rules": LLAMA, "mup": mup, **fields})


@pytest.mark.soak
def test_a_decoder_of_a_config():
    """Rates and initial values by structure, in the plan and in updates."""
    model = build_base_model(config())
    matrices = {path for path, rate in model.info().rates.items() if rate == 0.25}
    standard = spmd.from_nnx(WIDE.build)
    plain = tree.flatten(standard.init(jax.random.key(0)))
    kernels = {path for path in plain if path.endswith("kernel")}
    assert matrices == model.info().rates.keys() == kernels
    own = tree.flatten(model.init(jax.random.key(0)))
    for path, x in plain.items():
        factor = 0.5 if path == "lm_head/kernel" else 1.0  # 1/4 in place of the initializer's 1/2
        np.testing.assert_array_equal(own[path], x * factor, path)
    plan = spmd.make_plan(tiny.mesh(fsdp=2), LLAMA, model, build_optimizer(config(), model))
    remarks = {entry.path: entry.update for entry in plan.params}
    assert remarks["lm_head/kernel"] == "rate × 0.25"
    assert remarks["norm/scale"] == "no decay"
    fast = dataclasses.replace(
        config().optimizer, scales=("lm_head/kernel=2",), schedule="constant"
    )
    updates = {}
    for name, given in (("mup", model), ("plain", standard)):
        optimizer = spmd.make_optimizer(fast, 3, model=given)
        params = given.init(jax.random.key(0))
        gradients = jax.tree.map(jnp.ones_like, params)
        found, _ = optimizer.update(
            gradients, optimizer.init(params), jax.tree.map(jnp.zeros_like, params)
        )
        updates[name] = tree.flatten(found)
    for path, x in updates["plain"].items():
        np.testing.assert_allclose(
            updates["mup"][path], x * model.info().rates.get(path, 1.0), rtol=1e-6
        )


def test_keys_and_values_of_a_fixed_number_of_heads_are_no_head():
    """Their rates are those of matrices between layers, and their initial values are unchanged."""
    model = dataclasses.replace(WIDE, kv_heads=1)
    scaled = build_base_model(config(model=model))
    kernel = "layers/attention/k_proj/kernel"
    assert scaled.info().rates[kernel] == 0.25
    own = tree.flatten(scaled.init(jax.random.key(0)))[kernel]
    plain = tree.flatten(spmd.from_nnx(model.build).init(jax.random.key(0)))[kernel]
    np.testing.assert_array_equal(own, plain)


def refuse(pattern: str, model: spmd.Model, base: spmd.Model):
    with pytest.raises(ConfigError, match=pattern):
        spmd.with_mup(model, base)


def of_shapes(**shapes: tuple[int, ...]) -> spmd.Model:
    return spmd.Model(
        lambda key: {name: jnp.ones(shape) for name, shape in shapes.items()}, lambda params: 0.0
    )


def test_what_does_not_fit_is_an_error():
    refuse("base: has the widths of the model", network(32), network(32))
    refuse("first: is not in the base", network(32), of_shapes(bias=(8,)))
    wide, narrow = (
        of_shapes(kernel=(8, 8, 4), head=(8, 2)),
        of_shapes(kernel=(4, 4, 4), head=(4, 2)),
    )
    refuse(r"(?s)kernel: grows in 3 dimensions.*\(4, 4, 4\) → \(8, 8, 4\)", wide, narrow)
    refuse("has no head of its own", of_shapes(kernel=(8, 8)), of_shapes(kernel=(4, 4)))
    for kv_heads in (1, 4):
        tied = dataclasses.replace(WIDE, tied=True, kv_heads=kv_heads)
        with pytest.raises(ConfigError, match="has no head of its own"):
            build_base_model(config(model=tied))
    deeper = dataclasses.replace(WIDE, layers=8)
    shallow = dataclasses.replace(WIDE, d_model=16, heads=2, kv_heads=1, d_ff=32)
    refuse(
        "has another number of dimensions or of layers",
        spmd.from_nnx(deeper.build),
        spmd.from_nnx(shallow.build),
    )
    model = build_base_model(config())
    with pytest.raises(ConfigError, match="name: is muon, and the model's learning rates by muP"):
        spmd.make_optimizer(spmd.OptimizerConfig(name="muon"), 3, model=model)
    with pytest.raises(ConfigError, match="optimizer: does not multiply learning rates"):
        spmd.make_plan(tiny.mesh(fsdp=2), LLAMA, model, optax.adamw(1e-3))
    with pytest.raises(ConfigError, match=r"(?s)mup\[0\]: is 'd_mode=8'.*did you mean.*d_model"):
        config(mup=("d_mode=8",))
    with pytest.raises(ConfigError, match=r"(?s)mup\[0\]: is 'd_model=\[8\]'.*fix: d_model=64 or"):
        config(mup=("d_model=[8]",))
    with pytest.raises(ConfigError, match="mup: has attention heads of 4, and the model of 8"):
        config(mup=("d_model=32",))
