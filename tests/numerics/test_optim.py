"""Schedules are exact at their edges, decay goes by path, and an optimizer sees layers and not stacks."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax import contrib

from spmd.errors import ConfigError
from spmd.optim.config import (
    OptimizerConfig,
    check_patterns,
    make_optimizer,
)
from spmd.optim.per_layer import PerLayerState, per_layer
from spmd.tree import flatten, map_with_path
from tests.rounding import FACTOR, assert_close, noise_of, ratios

LAYERS = 3


def make_params(seed: int, width: int = 4) -> dict[str, Any]:
    """A stack of layers whose magnitudes differ, beside an embedding."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    scale = np.float32([0.01, 1.0, 100.0])[:, None, None]
    layers = {"mlp": {"kernel": draw(LAYERS, width, width) * scale, "bias": draw(LAYERS, width)}}
    return {
        "embedding": {"kernel": draw(width, width)},
        "layers": layers | {"mlp_norm": {"scale": draw(LAYERS, width)}},
    }


def make(config: OptimizerConfig, steps: int = 1, **options: Any) -> Any:
    """The optimizer of a config; without a model, Muon has to be told that the embedding is no matrix."""
    matrices = {"embedding/kernel": None} if config.name == "muon" else None
    return make_optimizer(config, steps, matrices=matrices, **options)


def unroll(tree: dict[str, Any]) -> dict[str, Any]:
    layers = {i: jax.tree.map(lambda x, i=i: x[i], tree["layers"]) for i in range(LAYERS)}
    return {**tree, "layers": layers}


@functools.partial(jax.jit, static_argnums=0)
def step(optimizer: Any, params: Any, state: Any, gradients: Any) -> Any:
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def run(optimizer: Any, params: Any, gradients: Any) -> Any:
    """The parameters after one update by each of the gradients."""
    state = jax.jit(optimizer.init)(params)
    for each in gradients:
        params, state = step(optimizer, params, state, each)
    return params


def stacked_and_unrolled(optimizer: Any, width: int = 4) -> Any:
    """Parameters after three updates of stacked and of separate layers, both layer by layer, and the noise of them."""
    params, *gradients = (make_params(i, width) for i in (0, 0, 1, 2))
    separate = unroll(params), [unroll(each) for each in gradients]
    train = functools.partial(run, optimizer)
    return unroll(train(params, gradients)), train(*separate), noise_of(train, *separate)


def test_config_lists_every_problem() -> None:
    """One error names all the fields that are wrong, and a near choice."""
    with pytest.raises(ConfigError) as caught:
        OptimizerConfig(
            name="adam",  # type: ignore[arg-type]
            schedule="cubic",  # type: ignore[arg-type]
            learning_rate=float("nan"),
            warmup_steps=-1,
            decay_fraction=0.0,
            final_fraction=2.0,
            b1=1.0,
            b2=-0.5,
            eps=0.0,
            momentum=1.0,
            weight_decay=-1.0,
            no_decay=("bias", "("),
            scales=("bias",),
            moments="4bit",  # type: ignore[arg-type]
            moments_block=48,
            clip_norm=-1.0,
            ema_decay=1.0,
        )
    wrong = {problem.where for problem in caught.value.problems}
    fields = set(OptimizerConfig.__dataclass_fields__) - {"no_decay", "scales", "schedule_fn"}
    assert wrong == fields | {"no_decay[1]", "scales[0]"}
    assert 'did you mean "adamw"?' in str(caught.value)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", "muon", "sgd"])
def test_decay_goes_by_path(name: Any) -> None:
    """With zero gradients a kernel shrinks by rate times decay; norms, biases and named parameters stay."""
    config = OptimizerConfig(
        name=name,
        learning_rate=0.5,
        schedule="constant",
        weight_decay=0.25,
        no_decay=("[^/]*norm[^/]*/[^/]+", "bias", "embedding/kernel"),
    )
    params = make_params(0)
    after = run(make(config), params, [jax.tree.map(jnp.zeros_like, params)])
    expected = map_with_path(
        lambda path, x: x * 0.875 if path == "layers/mlp/kernel" else x, params
    )
    for path, value in flatten(after).items():
        np.testing.assert_allclose(value, flatten(expected)[path], rtol=1e-6, err_msg=path)


def test_decay_patterns_match_whole_components_and_skip_layer_numbers() -> None:
    """`mlp/bias` is not `my_mlp/bias`, and one pattern serves stacked and unrolled layers."""
    config = OptimizerConfig(
        name="sgd",
        learning_rate=1.0,
        schedule="constant",
        weight_decay=0.5,
        no_decay=("layers/mlp/bias",),
    )
    one = np.ones(1, np.float32)
    params = {
        "layers": {0: {"mlp": {"bias": one}}, 1: {"my_mlp": {"bias": one}}},
        "decoder": {"layers": {"mlp": {"bias": one}}},
    }
    after = run(make_optimizer(config, 1), params, [jax.tree.map(jnp.zeros_like, params)])
    assert {path: float(value[0]) for path, value in flatten(after).items()} == {
        "decoder/layers/mlp/bias": 1.0,
        "layers/0/mlp/bias": 1.0,
        "layers/1/my_mlp/bias": 0.5,
    }


def test_a_pattern_that_matches_nothing_is_a_problem() -> None:
    """Only patterns that were written by hand and match no parameter are reported."""
    paths = ["layers/0/mlp/kernel", "layers/0/mlp_norm/scale"]
    config = OptimizerConfig(no_decay=("layers/mlp_norm/scale", "scales", "bias"))
    assert [problem.what for problem in check_patterns(config, paths)] == [
        "'scales' matches no parameter",
        "'bias' matches no parameter",
    ]
    assert check_patterns(OptimizerConfig(), ["kernel"]) == []


def test_clip_is_over_the_whole_gradient() -> None:
    """The whole gradient is scaled by one number, across stacks and layers; zero turns it off."""
    params = make_params(0)
    gradients = make_params(1)
    fields: dict[str, Any] = {
        "name": "sgd",
        "learning_rate": 1.0,
        "schedule": "constant",
        "momentum": 0.0,
    }
    for clip, expected in ((0.5, 0.5 / float(optax.tree.norm(gradients))), (0.0, 1.0)):
        optimizer = make_optimizer(OptimizerConfig(**fields, weight_decay=0.0, clip_norm=clip), 1)

        def updates(gradients: Any, optimizer: Any = optimizer) -> Any:
            return unroll(optimizer.update(gradients, optimizer.init(params), params)[0])

        scaled = unroll(jax.tree.map(lambda g, scale=expected: -scale * g, gradients))
        assert_close(updates(gradients), scaled, noise_of(updates, gradients))


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_elementwise_optimizers_keep_plain_state(name: Any) -> None:
    """AdamW, Lion and SGD are not wrapped, and still train stacked and unrolled layers alike."""
    config = OptimizerConfig(name=name, learning_rate=0.1)
    optimizer = make_optimizer(config, 3)
    assert not any(
        "rest" in path for path in flatten(jax.eval_shape(optimizer.init, make_params(0)))
    )
    assert_close(*stacked_and_unrolled(optimizer))


def test_adafactor_sees_layers_and_not_stacks() -> None:
    """Stacked layers of factored width train as unrolled ones do."""
    config = OptimizerConfig(name="adafactor", learning_rate=0.1)
    optimizer = make_optimizer(config, 3)
    state = flatten(jax.eval_shape(optimizer.init, make_params(0, width=128)))
    assert any(leaf.shape == (LAYERS, 128) and "v_row" in path for path, leaf in state.items()), (
        "factored"
    )
    assert_close(*stacked_and_unrolled(optimizer, width=128))


def test_control_adafactor_on_a_stack_differs() -> None:
    """Control: without the wrapper the same comparison is wrong a thousand times over its tolerance."""
    plain = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    assert_close(*stacked_and_unrolled(per_layer(plain), width=128))
    assert max(ratios(*stacked_and_unrolled(plain, width=128)).values()) > 1000 * FACTOR


def test_muon_is_for_the_matrices_of_layers() -> None:
    """A layer's kernel goes by Muon as optax has it, and everything else by AdamW, stacked or not."""
    config = OptimizerConfig(
        name="muon", learning_rate=0.1, schedule="constant", weight_decay=0.0, clip_norm=0.0
    )
    params, gradients = make_params(0), make_params(1)
    for tree, given in ((params, gradients), (unroll(params), unroll(gradients))):
        optimizer = make(config)
        updates = flatten(optimizer.update(given, optimizer.init(tree), tree)[0])
        adam = optax.adam(0.1, config.b1, config.b2, config.eps)
        expected = flatten(adam.update(given, adam.init(tree))[0])
        for path, update in updates.items():
            if "mlp/kernel" not in path:
                np.testing.assert_allclose(update, expected[path], rtol=1e-6, err_msg=path)
    muon = contrib.muon(0.1, beta=config.momentum, consistent_rms=0.2)

    def update(kernel: Any) -> Any:
        return muon.update({"kernel": kernel}, muon.init({"kernel": kernel}), {"kernel": kernel})[
            0
        ]["kernel"]

    for i in range(LAYERS):
        kernel = gradients["layers"]["mlp"]["kernel"][i]
        assert_close(updates[f"layers/{i}/mlp/kernel"], update(kernel), noise_of(update, kernel))


def test_muon_steps_are_as_long_as_those_of_adamw() -> None:
    """Its direction has the root mean square that AdamW's has in training, whatever the shape."""
    rng = np.random.default_rng(0)
    for shape in ((16, 64), (64, 16), (32, 32)):
        params = {"layers": {"0": {"kernel": rng.normal(size=shape).astype(np.float32)}}}
        config = OptimizerConfig(
            name="muon", learning_rate=1.0, schedule="constant", weight_decay=0.0
        )
        optimizer = make_optimizer(config, 1)
        update = optimizer.update(params, optimizer.init(params), params)[0]["layers"]["0"][
            "kernel"
        ]
        assert float(jnp.sqrt(jnp.mean(update**2))) == pytest.approx(0.2, rel=0.25)


def test_per_layer_may_be_masked() -> None:
    """Parameters that a mask takes away, all of a stack or some, come out as they went in."""
    params = make_params(0)
    for kept in ("embedding/kernel", "layers/mlp/kernel"):

        def mask(params: Any, kept: str = kept) -> Any:
            return map_with_path(lambda path, _: path == kept, params)

        clip = optax.masked(per_layer(optax.clip_by_block_rms(0.001)), mask)
        updates, _ = clip.update(params, clip.init(params), params)
        changed = {
            p for p, x in flatten(updates).items() if not np.array_equal(x, flatten(params)[p])
        }
        assert changed == {kept}


def test_stacks_of_different_lengths_and_nested_stacks() -> None:
    """Each stack has its own vmap, a stack in a stack has two leading dimensions, a number ends a stack."""
    params = {
        "encoder": {"layers": {"kernel": np.ones((2, 4), np.float32)}},
        "decoder": {"layers": {"kernel": np.ones((5, 4), np.float32)}},
        "groups": {"layers": {"kernel": np.ones((2, 3, 4), np.float32)}},
        "layers": {0: {"kernel": np.ones(4, np.float32)}},
    }
    clip = per_layer(optax.clip_by_block_rms(0.5), stacked=("layers", "groups"))
    updates, state = clip.update(params, clip.init(params))
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    for value in jax.tree.leaves(updates):
        np.testing.assert_array_equal(value, np.full(value.shape, 0.5))
    assert sorted(state.stacked) == ["decoder.layers", "encoder.layers", "groups.layers"]
    counted = per_layer(optax.scale_by_schedule(lambda _: 1.0), stacked=("layers", "groups"))
    counts = {
        path: leaf.shape for path, leaf in flatten(jax.eval_shape(counted.init, params)).items()
    }
    assert counts == {
        "rest/count": (),
        "stacked/decoder.layers/count": (5,),
        "stacked/encoder.layers/count": (2,),
        "stacked/groups.layers/count": (2, 3),
    }


def test_layers_of_a_stack_do_not_see_each_other() -> None:
    """Changing the gradient of one layer changes the update of that layer only."""
    clip = per_layer(optax.clip_by_block_rms(0.1))
    gradients = make_params(0)
    other = make_params(0)
    other["layers"]["mlp"]["kernel"][1] *= 3 * np.arange(1, 5, dtype=np.float32)
    changed = [
        not np.array_equal(a, b)
        for a, b in zip(
            *(
                clip.update(g, clip.init(g))[0]["layers"]["mlp"]["kernel"]
                for g in (gradients, other)
            ),
            strict=True,
        )
    ]
    assert changed == [False, True, False]


def test_extra_arguments_and_missing_params_pass_through() -> None:
    """Arguments that are for all layers reach the transform whole, and `params` may be omitted."""

    def update(updates: Any, state: Any, params: Any = None, *, factor: Any) -> Any:
        assert params is None
        return jax.tree.map(lambda x: x * factor, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    gradients = make_params(0)
    updates, _ = per_layer(inner).update(gradients, per_layer(inner).init(gradients), factor=2.0)
    for path, value in flatten(updates).items():
        np.testing.assert_array_equal(value, 2 * flatten(gradients)[path])


def test_random_state_is_refused_on_stacks() -> None:
    """A transform that draws random numbers would give every layer the same ones; it is refused by name."""
    noise = per_layer(optax.add_noise(eta=0.1, gamma=0.5, key=0))
    with pytest.raises(ConfigError, match=r"layers/rng_key: is a random key"):
        noise.init(make_params(0))
    assert isinstance(noise.init({"embedding": np.ones(2, np.float32)}), PerLayerState)


def test_stack_with_two_lengths_is_refused() -> None:
    """Parameters of one stack that disagree on the number of layers are an error, not a broadcast."""
    with pytest.raises(ConfigError, match=r"2 in layers/a .*, 4 in layers/b"):
        per_layer(optax.identity()).init({"layers": {"a": np.ones((2, 3)), "b": np.ones((4, 3))}})


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", "muon", "sgd"])
def test_optimizer_runs_under_strict_promotion_and_keeps_dtypes(name: Any) -> None:
    """Callers may make dtype promotion strict; bfloat16 gradients of float32 parameters still update them."""
    params = make_params(0, width=128)
    gradients = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    optimizer = make(OptimizerConfig(name=name), 3)
    with jax.numpy_dtype_promotion("strict"):
        state = jax.eval_shape(optimizer.init, params)
        updates, after = jax.eval_shape(optimizer.update, gradients, state, params)
    assert jax.tree.map(lambda x: x.shape, updates) == jax.tree.map(lambda x: x.shape, params)
    assert [x.shape for x in jax.tree.leaves(after)] == [x.shape for x in jax.tree.leaves(state)]


def test_control_optax_fails_under_strict_promotion() -> None:
    """Control: what the optimizer is made of does not pass strict promotion by itself."""
    params = {"kernel": jnp.ones(2)}
    optimizer = optax.adamw(1e-3)
    with jax.numpy_dtype_promotion("strict"), pytest.raises(Exception, match="promotion"):
        optimizer.update({"kernel": jnp.ones(2)}, optimizer.init(params), params)


def test_the_update_rule_may_run_on_one_part_at_a_time() -> None:
    """Without its clip, the optimizer updates any subset of the parameters as it does within the whole."""
    config = OptimizerConfig(name="adafactor", learning_rate=0.1)
    params, gradients = make_params(0, width=128), make_params(1, width=128)
    rule = make_optimizer(config, 3).param_phase
    whole, _ = rule.update(gradients, rule.init(params), params)
    for name in params:
        part, part_gradients = {name: params[name]}, {name: gradients[name]}
        updates, _ = rule.update(part_gradients, rule.init(part), part)
        for path, value in flatten(updates).items():
            np.testing.assert_array_equal(value, flatten(whole)[path])


def test_stacks_split_over_devices_give_the_same_update() -> None:
    """A stack that is split over its layers and its columns trains as on one device."""
    assert jax.device_count() == 8
    mesh = jax.make_mesh((2, 4), ("pipe", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    config = OptimizerConfig(name="adafactor", learning_rate=0.1, weight_decay=0.0)
    optimizer = make_optimizer(config, 2)
    params = {
        "layers": {"kernel": np.random.default_rng(0).normal(size=(2, 128, 128)).astype(np.float32)}
    }
    split = jax.device_put(params, NamedSharding(mesh, P("pipe", None, "fsdp")))
    train = functools.partial(run, optimizer)
    many = train(split, [split, split])
    assert not many["layers"]["kernel"].sharding.is_fully_replicated
    assert_close(many, train(params, [params, params]), noise_of(train, params, [params, params]))
