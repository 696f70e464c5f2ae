"""The configurable decoder is a Llama whose MLP and attention windows are a choice."""

import jax
import numpy as np
import pytest

from spmd import tree
from spmd.errors import ConfigError
from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import next_token_loss
from spmd.models.decoder import DecoderConfig, decoder_rules
from spmd.models.transformer import PRESETS, transformer
from spmd.plan.context import use_plan
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.sharding.mesh import MeshShape, abstract_mesh
from spmd.testing import token_batches
from tests.one_device import SGD, Job

BATCHES = token_batches((8, 16), 64, steps=2)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 12), dtype=np.int32)
SHAPE = {
    "vocab": 64,
    "d_model": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "d_ff": 64,
    "stacked": False,
}


def initial(config: DecoderConfig):
    return from_nnx(config.build).init(jax.random.key(0))


def logits(config: DecoderConfig, params, tokens=TOKENS) -> np.ndarray:
    return np.asarray(jax.jit(from_nnx(config.build).apply)(params, tokens))


def loss_and_gradients(config: DecoderConfig, params) -> tuple[float, dict[str, np.ndarray]]:
    loss = next_token_loss(from_nnx(config.build))
    batch = {
        "tokens": TOKENS,
        "targets": np.roll(TOKENS, -1),
        "weights": np.ones(TOKENS.shape, np.float32),
    }
    both = jax.jit(jax.value_and_grad(lambda p: loss(p, {}, batch, jax.random.key(0))[0]["loss"]))
    value, found = both(params)
    return float(value), tree.flatten(found)


def test_a_gated_decoder_is_a_llama() -> None:
    """With swiglu, the same parameters, loss and gradients; with another gate, other ones."""
    shape = SHAPE | {"layers": 1}
    llama, same = DecoderConfig(**shape), transformer(**shape)
    params = initial(llama)
    assert jax.tree.structure(jax.eval_shape(lambda: initial(same))) == jax.tree.structure(params)
    (expected, gradients), (loss, found) = (
        loss_and_gradients(llama, params),
        loss_and_gradients(same, params),
    )
    assert loss == pytest.approx(expected, rel=1e-6)
    for path, gradient in found.items():
        np.testing.assert_allclose(gradient, gradients[path], rtol=1e-4, atol=1e-6)
    other, _ = loss_and_gradients(transformer(**shape, mlp="geglu"), params)
    assert abs(other - expected) > 1e-4


def test_an_mlp_without_a_gate_by_hand() -> None:
    """`down(relu(up(x)))` of the normalised stream, in a model whose attention adds nothing."""
    config = transformer(**SHAPE | {"layers": 1, "mlp": "relu"})
    params = tree.map_with_path(lambda path, x: x * 0 if "o_proj" in path else x, initial(config))
    flat = {path: np.asarray(x, np.float64) for path, x in tree.flatten(params).items()}
    assert not any("gate_proj" in path for path in flat)

    def kernel(suffix: str) -> np.ndarray:
        (found,) = (x for path, x in flat.items() if path.endswith(suffix))
        return found

    def norm(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config.norm_eps)

    x = kernel("embedding")[TOKENS]
    x = x + np.maximum(norm(x) @ kernel("up_proj/kernel"), 0) @ kernel("down_proj/kernel")
    np.testing.assert_allclose(
        logits(config, params), norm(x) @ kernel("lm_head/kernel"), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize(
    ("windows", "reach"), [((5, 0), 12), ((5, 5), 9), ((3, 5), 7), ((1, 1), 1)], ids=str
)
def test_windows_of_consecutive_layers(windows, reach) -> None:
    """The last token sees as far as the windows of both layers together; 0 is a layer that sees all."""
    config = transformer(**SHAPE, windows=windows)
    params = initial(config)
    changed = np.repeat(TOKENS[:1], 12, axis=0)
    changed[np.arange(12), np.arange(12)] += 1
    last = logits(config, params, np.concatenate([TOKENS[:1], changed % 64]))[:, -1]
    assert (np.abs(last[1:] - last[0]).max(axis=-1) > 0).tolist() == [False] * (12 - reach) + [
        True
    ] * reach


def test_groups_divide_the_layers() -> None:
    """Two windows need an even number of layers; the arithmetic is in the error."""
    transformer(**SHAPE, windows=(5, 0))
    with pytest.raises(
        ConfigError, match=r"(?s)model\.layers: does not fit the pattern.*2 in the group = 1\.5"
    ):
        transformer(**SHAPE | {"layers": 3}, windows=(5, 0))


TABLES = {name: decoder_rules(config) for name, config in PRESETS.items()}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_fits(name) -> None:
    """Every parameter has a rule and every rule a parameter, and no mark is unknown; of a model with a head too."""
    model = from_nnx(PRESETS[name].build)
    plan = make_plan(abstract_mesh(MeshShape(fsdp=2, tensor=2)), TABLES[name], model, SGD)
    assert all(entry.rule for entry in plan.params)
    with use_plan(plan):
        loss = jax.eval_shape(
            lambda p, b: next_token_loss(model)(p, {}, b, jax.random.key(0))[0],
            jax.eval_shape(model.init, jax.random.key(0)),
            BATCHES[0],
        )
    assert loss["loss"].shape == ()
    names = dict(plan.rules.activations)
    assert names["layer_input"] == names["residual"]
    assert ("mlp_gate" in names) == (name == "test-windows")


@pytest.mark.soak
@pytest.mark.parametrize("name", TABLES)
def test_a_decoder_trains_as_on_one_device(name) -> None:
    """The initial state, and of two steps the loss, gradients and updates."""
    model = from_nnx(PRESETS[name].build)
    job = Job(model, TABLES[name], value_and_grad(next_token_loss(model, chunk=7)), BATCHES)
    job.assert_parity(fsdp=2, tensor=2)
