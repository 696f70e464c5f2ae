"""Each family of models is the published one, and trains on every mesh as on one device."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spmd import tree
from spmd.data.loader import DataConfig
from spmd.errors import ConfigError
from spmd.generate.generator import Generator
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import next_token_loss
from spmd.models import gemma, gpt2, mistral, qwen, transformer
from spmd.models.decoder import DecoderConfig, decoder_rules, replicated_kv
from spmd.models.decoder.linear import biased
from spmd.models.decoder.norms import LayerNorm, RMSNorm
from spmd.models.decoder.rotary import Llama3Scaling, rotary_angles
from spmd.partition_rules.layouts import sequence_parallel
from spmd.partition_rules.llama import LLAMA
from spmd.pipeline.grad_fn import pipeline
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.tick_table import tabulate
from spmd.plan.context import use_plan
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.run.config import TrainConfig, config_values, with_values
from spmd.sharding.mesh import AXES, MeshShape, abstract_mesh
from spmd.testing import BUGS, Reference, token_batches
from tests import tiny
from tests.one_device import REORDERED, SGD, Job
from tests.tiers import soak_but

# Number of elements in the published checkpoints' tensors; a head that is the embedding is counted
# once. GPT-2: huggingface.co/openai-community/{gpt2,gpt2-medium,gpt2-large,gpt2-xl}, without the
# masks that they store. Gemma:
# huggingface.co/google/{gemma-2b,gemma-7b,gemma-2-2b,gemma-2-9b,gemma-2-27b}, shapes in their
# config.json, in arXiv:2403.08295, table 1, and in arXiv:2408.00118, table 1. Mistral:
# huggingface.co/mistralai/{Mistral-7B-v0.1,Mistral-7B-v0.3,Mistral-Nemo-Base-2407};
# arXiv:2310.06825, table 1. Qwen:
# huggingface.co/Qwen/{Qwen2.5-0.5B,Qwen2.5-1.5B,Qwen2.5-7B,Qwen2.5-72B,Qwen3-0.6B,Qwen3-8B,Qwen3-32B}.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
}
ALL = {
    f"{m.__name__}:{name}": c
    for m in (gpt2, gemma, mistral, qwen, transformer)
    for name, c in m.PRESETS.items()
}

CONFIGS = {
    "mistral": mistral.PRESETS["test"],
    "qwen2": qwen.PRESETS["test-qwen2"],
    "qwen3": qwen.PRESETS["test-qwen3"],
    "gemma": gemma.PRESETS["test-gemma"],
    "gemma2": gemma.PRESETS["test-gemma2"],
    "gpt2": gpt2.PRESETS["test"],
}
FAMILIES = {name: (config, decoder_rules(config)) for name, config in CONFIGS.items()}
GPT2 = FAMILIES["gpt2"][1]
GPT2_WHOLE_VOCABULARY = decoder_rules(CONFIGS["gpt2"], split_vocab=False)
BATCHES = token_batches((8, 16), 64, steps=2)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 12), dtype=np.int32)


@functools.cache
def model(config):
    return from_nnx(config.build)


def shapes(config):
    """The parameters, without making any."""
    return jax.eval_shape(model(config).init, jax.random.key(0))


@functools.cache
def params(config):
    """Initial parameters, with biases and norms that are not what they start as."""

    def moved(path, leaf):
        if not path.endswith(("bias", "scale")):
            return leaf
        return leaf + 0.3 * jnp.asarray(
            np.random.default_rng(len(path)).standard_normal(leaf.shape), jnp.float32
        )

    return tree.map_with_path(moved, model(config).init(jax.random.key(0)))


def logits(config, changed=None, tokens=TOKENS):
    return np.asarray(model(config).apply(params(config) if changed is None else changed, tokens))


@pytest.mark.parametrize("name", ALL)
def test_presets_have_the_published_parameter_counts(name):
    """Counted on the shapes of the model itself; and what counts as FLOPs is every kernel and the head."""
    config, known = ALL[name], name.partition(":")[2]
    found = tree.flatten(shapes(config))
    total = sum(int(np.prod(leaf.shape)) for leaf in found.values())
    assert total == PUBLISHED.get(known, total)
    assert known in PUBLISHED or known.startswith("test")
    kernels = sum(
        int(np.prod(leaf.shape)) for path, leaf in found.items() if path.endswith("kernel")
    )
    assert config.matmul_params == kernels + (
        config.vocab * config.d_model if "lm_head/kernel" not in found else 0
    )


def test_every_published_count_belongs_to_a_preset():
    """No count above is left unchecked."""
    assert {name.partition(":")[2] for name in ALL} >= set(PUBLISHED)


@functools.cache
def job(name):
    config, rules = FAMILIES[name]
    return Job(
        model(config), rules, value_and_grad(next_token_loss(model(config), chunk=7)), BATCHES
    )


THREE_AXES = {"data": 2, "fsdp": 2, "tensor": 2}
FAMILIES_HERE = soak_but(("gemma2", "mistral", "qwen3", "gemma"))
"""Qwen 2 and GPT-2 are in the parity suite's table."""


@pytest.mark.parametrize("name", FAMILIES_HERE)
def test_a_family_trains_as_on_one_device(name):
    """The initial state, and of two steps the loss, gradients and updates."""
    job(name).assert_parity(**THREE_AXES)


@pytest.mark.soak
def test_control_a_bug_is_caught():
    """The comparison that every family passes fails on gradients that are 1 % off."""
    qwen = job("qwen2")
    assert not qwen.parity(grad_fn=BUGS["gradient-scale"](qwen.grad_fn), fsdp=2).ok


@pytest.mark.soak
def test_tables_for_other_layouts_train_alike():
    """Whole key/value heads with their biases, tokens split over `tensor`, and a head with all words."""
    for name, rules in (
        ("qwen2", replicated_kv(FAMILIES["qwen2"][1])),
        ("gpt2", sequence_parallel(GPT2)),
        ("gpt2", GPT2_WHOLE_VOCABULARY),
    ):
        job(name).assert_parity(rules=rules, fsdp=2, tensor=2)


@pytest.mark.soak
def test_pairs_of_layers_go_through_a_pipeline():
    """The two pairs of a Gemma 2 are two stages, with the numbers of one device."""
    gemma2, table = job("gemma2"), tabulate(make_schedule("1f1b", 2, 2, 1))
    loss_fn = next_token_loss(gemma2.model, chunk=7)
    alone = Reference(gemma2.alone.plan, accumulate(gemma2.grad_fn, 2), BATCHES)
    plan = make_plan(tiny.mesh(pipe=2, fsdp=2), gemma2.rules, gemma2.model, SGD)
    result = alone.compare(plan, pipeline(loss_fn, table), tolerance=REORDERED)
    assert result.ok, f"\n{result}"


TABLES = {
    **FAMILIES,
    **{
        name: (config, decoder_rules(config))
        for name, config in {
            "qwen2-tied": dataclasses.replace(CONFIGS["qwen2"], tied=True),
            "qwen3-untied": dataclasses.replace(CONFIGS["qwen3"], tied=False),
            "gemma-untied": dataclasses.replace(CONFIGS["gemma"], tied=False),
        }.items()
    },
    "gpt2-whole": (CONFIGS["gpt2"], GPT2_WHOLE_VOCABULARY),
}


@pytest.mark.parametrize("name", soak_but(TABLES, "qwen3", "qwen3-untied", "gemma2", "gpt2-whole"))
def test_a_table_fits_every_axis(name):
    """On each axis of two devices every parameter has a rule and every rule a parameter, and no mark is unknown."""
    config, rules = TABLES[name]
    for axis in set(AXES) - {"expert"}:
        plan = make_plan(abstract_mesh(MeshShape(**{axis: 2})), rules, model(config), SGD)
        assert all(leaf.rule for leaf in plan.params)
        loss = next_token_loss(model(config))
        batch = {key: jax.ShapeDtypeStruct(x.shape, x.dtype) for key, x in BATCHES[0].items()}
        with use_plan(plan):
            jax.eval_shape(
                lambda p, b, loss=loss: loss(p, {}, b, jax.random.key(0))[0], shapes(config), batch
            )


@pytest.mark.parametrize("name", soak_but(FAMILIES, "qwen3", "gemma2", "gpt2"))
def test_stacked_layers_are_a_list_of_layers(name):
    """Both forms start bitwise equal and give the same logits."""
    config = FAMILIES[name][0]
    listed = dataclasses.replace(config, stacked=False)
    stacked = params(config)
    count = jax.tree.leaves(stacked["layers"])[0].shape[0]
    layers = {}
    for i in range(count):
        layers[i] = jax.tree.map(operator.itemgetter(i), stacked["layers"])
    unstacked = {**stacked, "layers": layers}
    initial = model(listed).init(jax.random.key(0))
    assert jax.tree.structure(initial) == jax.tree.structure(unstacked)
    first = model(config).init(jax.random.key(0))["layers"]
    for i in range(count):
        layer = jax.tree.map(operator.itemgetter(i), first)
        jax.tree.map(np.testing.assert_array_equal, layer, initial["layers"][i])
    np.testing.assert_allclose(logits(listed, unstacked), logits(config), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_later_token_changes_no_earlier_logit(name):
    """Changing one token leaves all logits before it bitwise as they were, and does change its own."""
    changed = TOKENS.copy()
    changed[:, 7] = (changed[:, 7] + 1) % 64
    config = FAMILIES[name][0]
    before, after = logits(config), logits(config, tokens=changed)
    np.testing.assert_array_equal(after[:, :7], before[:, :7])
    assert (np.abs(after[:, 7] - before[:, 7]).max(axis=-1) > 1e-4).all()


def scaled(tree_of_params, suffix, factor):
    return tree.map_with_path(
        lambda path, x: x * factor if path.endswith(suffix) else x, tree_of_params
    )


def test_normalised_queries_have_no_length():
    """A Qwen 3 with queries a hundred times as long gives the same logits, and a Qwen 2 does not."""
    for name, is_same in (("qwen3", True), ("qwen2", False)):
        config = FAMILIES[name][0]
        longer = scaled(scaled(params(config), "q_proj/kernel", 100.0), "q_proj/bias", 100.0)
        assert np.allclose(logits(config, longer), logits(config), rtol=1e-2, atol=1e-3) == is_same


def test_local_layers_see_the_window_and_global_ones_everything():
    """Where global layers add nothing, the last logit depends on no token before the windows of two local layers."""
    config = FAMILIES["gemma2"][0]
    reach = 2 * (config.windows[0] - 1)
    changed = TOKENS.copy()
    changed[:, 11 - reach - 1] += 1
    changed %= 64
    silent = tree.map_with_path(
        lambda path, x: x * 0 if "global_block" in path and path.endswith("_proj/kernel") else x,
        params(config),
    )
    assert np.abs(logits(config, tokens=changed) - logits(config))[:, 11].max() > 1e-5
    np.testing.assert_array_equal(
        logits(config, silent, changed)[:, 11], logits(config, silent)[:, 11]
    )


def test_logits_of_a_gemma_2_stay_below_their_cap():
    """However large its final norm gets; a Gemma 1 has no such cap."""
    second, first = FAMILIES["gemma2"][0], FAMILIES["gemma"][0]
    assert (
        np.abs(logits(second, scaled(params(second), "embedding", 300.0))).max()
        <= second.logits_soft_cap
    )
    assert np.abs(logits(first, scaled(params(first), "embedding", 300.0))).max() > 100


def test_norms_are_what_their_formulas_say():
    """A LayerNorm has mean and variance taken out; a norm of Gemma adds 1 to a scale that starts at 0."""
    x = jnp.asarray(np.random.default_rng(1).normal(2.0, 3.0, (2, 3, 64)), jnp.float32)
    layer = LayerNorm(64, eps=1e-5)
    layer.scale[...], layer.bias[...] = layer.scale[...] * 2, layer.bias[...] + 7
    wide = np.asarray(x, np.float64)
    exact = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(layer(x), exact * 2 + 7, rtol=1e-4, atol=1e-5)
    offset = RMSNorm(64, eps=1e-5, offset=1.0)
    assert not np.asarray(offset.scale[...]).any()
    np.testing.assert_allclose(offset(x), RMSNorm(64, eps=1e-5)(x), rtol=1e-6)
    offset.scale[...] = offset.scale[...] + 0.5
    np.testing.assert_allclose(offset(x), 1.5 * RMSNorm(64, eps=1e-5)(x), rtol=1e-6)


def test_the_gradient_of_a_bias_is_never_rounded_to_bfloat16():
    """From bfloat16 activations it is summed in float32; what autodiff makes of a cast bias is not."""
    x, weights = (
        np.random.default_rng(n).normal(size=(4, 64, 6)).astype(jnp.bfloat16) for n in (0, 1)
    )
    bias = jnp.zeros((6,))

    def gradient(add):
        def loss(bias):
            y = add(jnp.asarray(x), bias)
            assert y.dtype == jnp.bfloat16
            return (y * weights).astype(jnp.float32).sum()

        return np.asarray(jax.grad(loss)(bias))

    exact = np.asarray(weights, np.float64).sum(axis=(0, 1))
    found, cast = (
        gradient(lambda x, b: biased(x, nnx.Param(b))),
        gradient(lambda x, b: x + b.astype(x.dtype)[None, None]),
    )
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(cast.astype(jnp.bfloat16).astype(np.float32), cast)  # the control
    assert np.abs(cast - exact).max() > 1e-3


def test_long_wavelengths_are_stretched_and_short_ones_are_not():
    """Llama 3.1's frequencies: as they were above 4 turns in 8,192 tokens, an eighth below 1, between them between."""
    plain = rotary_angles(np.arange(2)[None], 128, 5e5)
    stretched = rotary_angles(np.arange(2)[None], 128, 5e5, Llama3Scaling(factor=8.0))
    before, after = (
        np.arctan2(sin, cos)[0, 1].astype(np.float64) for cos, sin in (plain, stretched)
    )
    turns = 8192 * before / (2 * np.pi)
    np.testing.assert_allclose(after[turns > 4], before[turns > 4])
    np.testing.assert_allclose(after[turns < 1], before[turns < 1] / 8, rtol=1e-5)
    mixed = (turns > 1) & (turns < 4)
    assert mixed.any()
    assert ((after < before) & (after > before / 8))[mixed].all()


def test_a_config_with_scaled_positions_survives_the_run_folder():
    """The nested dataclass comes back from JSON as it was."""
    config = TrainConfig(DecoderConfig(rope_scaling=Llama3Scaling(factor=8.0), head_dim=16), LLAMA)
    plain = TrainConfig(DecoderConfig(rope_scaling=Llama3Scaling()), LLAMA)
    assert with_values(plain, config_values(config)) == config
    assert config_values(config) != config_values(plain)


def test_there_are_only_so_many_positions():
    """A GPT-2 refuses a sequence that is longer than its table, with both lengths, and one that would grow longer."""
    config = FAMILIES["gpt2"][0]
    with pytest.raises(ConfigError, match="49 tokens > 48 positions"):
        logits(config, tokens=np.zeros((1, 49), np.int32))
    with pytest.raises(ConfigError, match=r"data\.sequence: exceeds the model's context"):
        TrainConfig(config, GPT2, data=DataConfig(sequence=49))
    plan = make_plan(tiny.mesh(), GPT2, model(config), SGD)
    with pytest.raises(ConfigError, match="64 tokens > 48 positions"):
        Generator(plan, window=64).write(params(config), {}, [np.arange(30)], tokens=10)
    assert (
        len(Generator(plan, window=48).write(params(config), {}, [np.arange(30)], tokens=10)[0])
        == 10
    )


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (lambda: gpt2.gpt2(heads=-3, layers=0), ["heads", "kv_heads", "layers"]),
        (
            lambda: gemma.gemma2(layers=3, heads=3, d_model=32),
            ["heads", "kv_heads", "layers"],
        ),
        (
            lambda: gemma.gemma2(soft_cap=-1.0, window=-1),
            ["group.0.mixer.soft_cap", "group.0.mixer.window", "group.1.mixer.soft_cap"],
        ),
        (lambda: DecoderConfig(head_dim=7, d_ff=4), ["head_dim"]),
        (lambda: DecoderConfig(head_dim=-2, vocab=0), ["head_dim", "vocab"]),
        (lambda: DecoderConfig(heads=5, window=-1), ["window"]),
    ],
    ids=["gpt2", "pairs", "gemma2", "odd heads", "negative heads", "window"],
)
def test_a_shape_that_cannot_be_built_lists_every_reason(make, wrong):
    """One error with all of them."""
    with pytest.raises(ConfigError) as caught:
        make()
    assert sorted({problem.where for problem in caught.value.problems}) == [
        f"model.{field}" for field in wrong
    ]
    assert all(problem.fix for problem in caught.value.problems)


def test_a_scaling_in_no_order_is_refused():
    """A factor below 1, and frequencies in the wrong order: both at once."""
    with pytest.raises(ConfigError) as caught:
        Llama3Scaling(factor=0.5, low_frequency_factor=4.0, high_frequency_factor=1.0)
    assert len(caught.value.problems) == 2
