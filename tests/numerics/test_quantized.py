"""Moments of one or two bytes: right in the mean, small as planned, and trained with as with four bytes."""

import functools
import itertools
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from spmd.codecs import Encoded, block_of
from spmd.data.loader import Windows, batches, load_corpus
from spmd.errors import ConfigError, RuleError
from spmd.optim.config import OptimizerConfig, make_optimizer
from spmd.optim.per_layer import per_layer
from spmd.optim.quantized import BLOCK, Kind, QuantizedState, dequantize, quantize, quantize_moments
from spmd.sharding.optimizer_state import optimizer_specs
from spmd.training.state import init_state
from spmd.training.step import make_train_step
from spmd.tree import flatten
from tests import tiny

SEEDS = jnp.arange(300, dtype=jnp.uint32) * jnp.uint32(2654435761)
KINDS = get_args(Kind)


def draws(shape: tuple[int, ...], spread: float = 2.0) -> jax.Array:
    """Numbers over several powers of ten, as gradients are."""
    rng = np.random.default_rng(0)
    return jnp.asarray(
        rng.normal(size=shape) * np.exp(spread * rng.normal(size=shape)), jnp.float32
    )


@pytest.mark.parametrize("signed", [True, False])
def test_eight_bits_are_right_in_the_mean_and_near_each_time(signed: bool) -> None:
    """Each number comes back within 9 %, or the least level of its block; over many seeds it comes back as it was."""
    x = draws((4, 512)) if signed else draws((4, 512)) ** 2
    back = np.asarray(
        jax.vmap(lambda seed: dequantize(quantize(x, 256, seed, signed=signed)))(SEEDS), np.float64
    )
    exact, largest = (
        np.asarray(x, np.float64),
        np.repeat(np.abs(x).reshape(4, 2, 256).max(-1), 256, axis=1),
    )
    least = largest * 2.0 ** (-(126 if signed else 254) / 8)
    assert (np.abs(back - exact) <= 0.091 * np.abs(exact) + least).all()
    fits = np.abs(exact) >= least
    exact, back = exact[fits], back[:, fits]
    noise = 0.046 / np.sqrt(len(SEEDS))  # of the mean of as many numbers that are 9 % apart
    assert (np.abs(back.mean(axis=0) / exact - 1) <= 5 * noise).all()
    # control: without chance, most are off for good
    nearest = 2.0 ** (np.round(8 * np.log2(np.abs(exact))) / 8)
    assert (np.abs(nearest / np.abs(exact) - 1) > 5 * noise).mean() > 0.5


def test_what_is_exact_stays_exact() -> None:
    """The largest of a block, zeros and blocks of zeros; NaN is not hidden."""
    x = jnp.zeros((2, 512)).at[0, 3].set(-7.25)
    for signed in (True, False):
        stored = quantize(jnp.abs(x) if not signed else x, 256, jnp.uint32(1), signed=signed)
        assert float(jnp.abs(dequantize(stored)[0, 3])) == 7.25
        assert float(jnp.abs(dequantize(stored)[1]).max()) == 0.0
    assert bool(
        jnp.isnan(
            dequantize(quantize(x.at[1, 0].set(jnp.nan), 256, jnp.uint32(1), signed=True))[1]
        ).any()
    )


def test_no_square_becomes_zero() -> None:
    """A square far below the largest of its block keeps a denominator, so that its step stays small."""
    squares = jnp.full((1, 256), 1e-30).at[0, 0].set(1.0)
    back = dequantize(quantize(squares, 256, jnp.uint32(5), signed=False))
    assert 0 < float(back.min()) < 1e-9


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["bfloat16", "8bit"])
def test_a_slow_average_does_not_stand_still(kind: Kind) -> None:
    """With a decay of 0.999 each step is smaller than the distance to the next stored number, and yet it decays."""
    adam = quantize_moments(optax.scale_by_adam(b1=0.9, b2=0.999), kind)
    params = {"w": jnp.zeros(4096)}
    _, state = adam.update(
        {"w": jnp.asarray(np.random.default_rng(0).normal(size=4096), jnp.float32)},
        adam.init(params),
    )
    # Equal numbers are rounded alike, so a little noise keeps them apart; the largest of each block
    # stays.
    noise = 1e-3 * jnp.asarray(np.random.default_rng(1).normal(size=4096), jnp.float32)
    quiet = jnp.where(jnp.arange(4096) % 256 == 0, 3.0, noise)
    after, _ = jax.lax.scan(lambda s, _: (adam.update({"w": quiet}, s)[1], None), state, length=500)

    def second(state: QuantizedState) -> np.ndarray:
        nu = state.inner.nu["w"]
        return np.asarray(dequantize(nu) if isinstance(nu, Encoded) else nu, np.float64)[
            jnp.arange(4096) % 256 != 0
        ]

    np.testing.assert_allclose(second(after).mean() / second(state).mean(), 0.999**500, rtol=0.1)


@pytest.mark.parametrize(
    ("kind", "bytes_each"), [("float32", 8), ("bfloat16", 4), ("8bit", 2 + 8 / BLOCK)]
)
def test_bytes_for_each_parameter(kind: Kind, bytes_each: float) -> None:
    """Adam's two moments take 8 bytes, 4, or 2 and a scale for each block."""
    state = jax.eval_shape(
        quantize_moments(optax.scale_by_adam(), kind).init,
        {"w": jax.ShapeDtypeStruct((64, 512), "float32")},
    )
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state) if leaf.ndim)
    assert held == 64 * 512 * bytes_each


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
@pytest.mark.parametrize("kind", ["bfloat16", "8bit"])
def test_each_optimizer_keeps_its_moments_so(name: Any, kind: Kind) -> None:
    """The config's optimizers store what they are told to, in every matrix."""
    layout = tiny.plan(optimizer=optimizer(kind, name=name), fsdp=2, tensor=2)
    matrices = {
        leaf.dtype
        for leaf in layout.optimizer_state
        if "kernel" in leaf.path and "/scale" not in leaf.path
    }
    assert (
        matrices
        == {"8bit": {"int8", "uint8"} if name == "adamw" else {"int8"}, "bfloat16": {"bfloat16"}}[
            kind
        ]
    )


def optimizer(kind: Kind, **fields: Any) -> optax.GradientTransformation:
    config = {"learning_rate": 1e-2, "schedule": "constant", "moments_block": 8, **fields}
    return make_optimizer(OptimizerConfig(moments=kind, **config), steps=100)


def test_scales_are_split_as_the_parameter_is() -> None:
    """Where shards hold whole blocks; in a square matrix and on stacks too, whatever else has those sizes."""
    shapes = {
        "layers": {"kernel": (2, 4, 1024), "square": (2, 512, 512)},
        "odd": (4, 33),
        "head": (4, 1024),
    }
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, "float32"), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    specs = {
        path: P(*("pipe",) * (len(p.shape) - 2), "fsdp", "tensor")
        for path, p in flatten(params).items()
    }
    stacked = {path: range(len(p.shape) - 2) for path, p in flatten(params).items()}
    table, problems = optimizer_specs(
        per_layer(quantize_moments(optax.scale_by_adam(), "8bit")).init, params, specs, stacked
    )
    assert not problems
    assert {
        path: leaf.block for path, leaf in table.items() if leaf.block > 1 and "mu" in path
    } == {
        "rest/inner/mu/head/scale": 256,
        "stacked/layers/inner/mu/layers/kernel/scale": 256,
        "stacked/layers/inner/mu/layers/square/scale": 256,
    }
    for path, leaf in table.items():
        if path.endswith(("codes", "scale")):
            assert leaf.spec == specs[next(p for p in specs if p in path)]
    assert table["rest/inner/mu/odd"].shape == (4, 33)


def test_blocks_that_span_shards_are_an_error() -> None:
    """It has the arithmetic and says what to change."""
    with pytest.raises(RuleError, match=r"2 / \(fsdp=2 × tensor=2\) = 0.5") as caught:
        tiny.plan(optimizer=optimizer("8bit", moments_block=16), fsdp=2, tensor=2)
    assert all("moments_block" in problem.fix for problem in caught.value.problems)


def test_what_cannot_be_stored_so_is_refused() -> None:
    """Another kind, a block that is no power of two, and optimizers without plain moments."""
    with pytest.raises(ConfigError) as caught:
        OptimizerConfig(moments="4bit", moments_block=48)  # type: ignore[arg-type]
    assert [problem.where for problem in caught.value.problems] == ["moments", "moments_block"]
    for name in ("adafactor", "muon"):
        with pytest.raises(ConfigError, match="keeps its state in float32"):
            OptimizerConfig(name=name, moments="8bit")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="power of two"):
        quantize_moments(optax.scale_by_adam(), "8bit", 100)
    assert [block_of(n, BLOCK) for n in (1, 8, 48, 14336, 128256)] == [0, 8, 16, 256, 256]


@functools.cache
def losses(kind: Kind, text: Path, block: int = 8, steps: int = 40) -> np.ndarray:
    """Losses of a tiny model on real text."""
    data = spmd.DataConfig(source=(str(text),), sequence=32, batch=16, cache=str(text / "cache"))
    corpus = load_corpus(data)
    layout = tiny.plan(tiny.replaced(vocab=256), optimizer(kind, moments_block=block), fsdp=2)
    step, state, found = (
        make_train_step(layout, tiny.loss_fn(tiny.replaced(vocab=256))),
        init_state(layout),
        [],
    )
    stream = batches(
        Windows(corpus.train, 32),
        batch=16,
        sharding=layout.batch_sharding("tokens"),
        seed=0,
        start=0,
        steps=steps,
    )
    with stream:
        for batch in stream:
            state, metrics = step(state, batch)
            found.append(float(metrics["loss"]))
    return np.array(found)


@pytest.mark.soak
def test_small_moments_train_as_float32_ones_do(tmp_path_factory: pytest.TempPathFactory) -> None:
    """On real text the last losses are within 1 % of those with float32 moments, which fall by a third."""
    text = tmp_path_factory.mktemp("text")
    for name in ("argparse", "inspect", "typing"):
        (text / f"{name}.py").write_text(
            Path(__import__(name).__file__ or "").read_text(encoding="utf-8")
        )
    runs = {kind: losses(kind, text) for kind in KINDS}
    last = {kind: run[-10:].mean() for kind, run in runs.items()}
    assert last["float32"] < 0.67 * runs["float32"][0]
    assert all(abs(last[kind] / last["float32"] - 1) < 0.01 for kind in KINDS), last
    assert all(not np.array_equal(runs[a], runs[b]) for a, b in itertools.combinations(KINDS, 2))
