"""What an optimizer does to a stack of layers and would not do to the layers is seen in its program."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from spmd.errors import ConfigError
from spmd.optim.config import OptimizerConfig, make_optimizer
from spmd.optim.layerwise import assert_layerwise, check_layerwise
from spmd.optim.per_layer import per_layer
from spmd.optim.quantized import quantize_moments
from spmd.optim.skip_updates import skip_bad_updates
from spmd.sharding.layer_paths import Stack
from spmd.tree import map_with_path
from tests import tiny

pytestmark = pytest.mark.compat

PARAMS = {
    "embed": np.ones((16, 8), np.float32),
    "layers": {"kernel": np.ones((3, 8, 8), np.float32), "scale": np.ones((3, 8), np.float32)},
    "head": np.ones((8, 16), np.float32),
}


def stateless(f: Any) -> optax.GradientTransformation:
    """A transform of each gradient by itself."""
    return optax.stateless(lambda updates, params: jax.tree.map(f, updates))


def found(
    optimizer: optax.GradientTransformation, params: Any = None, **options: Any
) -> dict[str, str]:
    problems = check_layerwise(optimizer, PARAMS if params is None else params, **options)
    return {problem.where: problem.what for problem in problems}


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", "muon", "sgd"])
def test_optimizers_of_a_config_are_layerwise(name: Any) -> None:
    """On a real model, behind a clip and the guard against steps that are not finite."""
    params = jax.eval_shape(tiny.model().init, jax.random.key(0))
    assert (
        found(
            skip_bad_updates(make_optimizer(OptimizerConfig(name=name), 10, model=tiny.model())),
            params,
        )
        == {}
    )


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
        optax.normalize_by_update_norm(),
        optax.apply_if_finite(optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(), 3),
        contrib.prodigy(0.1),
        contrib.dog(),
        per_layer(optax.novograd(0.1)),
        per_layer(optax.chain(optax.adaptive_grad_clip(0.1), optax.centralize())),
        stateless(jnp.cbrt),
        stateless(lambda g: g - g.mean(axis=-1, keepdims=True)),
    ],
    ids=[
        "clip",
        "norm",
        "finite steps",
        "prodigy",
        "dog",
        "novograd",
        "agc",
        "elementwise",
        "rows",
    ],
)
def test_numbers_of_the_whole_gradient_and_of_one_layer_pass(
    optimizer: optax.GradientTransformation,
) -> None:
    """What is taken over all parameters, or within a layer, is the same for separate layers."""
    assert found(optimizer) == {}


@pytest.mark.parametrize(
    ("transform", "what"),
    [
        (lambda g: g / jnp.linalg.norm(g), "takes a number over all layers"),
        (lambda g: g / jnp.abs(g).max(), "takes a number over all layers"),
        (lambda g: g - g.mean(axis=0, keepdims=True), "takes a number over all layers"),
        (lambda g: g[:1] + jnp.zeros_like(g), "takes a number over all layers"),
        (lambda g: jnp.roll(g, 1, axis=0), "takes a number over all layers"),
        (lambda g: jnp.cumsum(g, axis=0), "takes a number over all layers"),
        (lambda g: jnp.sort(g, axis=0), "takes a number over all layers"),
        (
            lambda g: jnp.tensordot(g @ g.mT if g.ndim > 2 else g, g, axes=0).sum() * g,
            "takes a number over all layers",
        ),
        (
            lambda g: jnp.linalg.qr(g)[0] @ jnp.linalg.qr(g)[1] if g.shape == (3, 8) else g,
            "over all layers",
        ),
        (
            lambda g: jax.lax.cond(g.sum() > 0, jnp.abs, jnp.negative, g),
            "takes a number over all layers",
        ),
        (
            lambda g: g - g.mean(axis=tuple(range(1, g.ndim)), keepdims=True),
            "reduces other dimensions",
        ),
    ],
    ids=[
        "norm",
        "max",
        "mean",
        "first",
        "roll",
        "cumsum",
        "sort",
        "product",
        "qr",
        "branch",
        "centralize",
    ],
)
def test_mixing_layers_is_found(transform: Any, what: str) -> None:
    """Each way to let one layer of a stack see another is found on the stack, and nowhere else."""
    problems = found(stateless(transform))
    assert problems
    assert problems.keys() <= {"layers/kernel", "layers/scale"}
    assert all(what in problem for problem in problems.values())


def test_mixing_behind_a_clip_and_within_steps_is_found() -> None:
    """A number of the whole gradient does not hide one of a single stack that comes after it."""
    lamb = optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(0.1))
    assert set(found(optax.MultiSteps(lamb, 2).gradient_transformation())) == {
        "layers/kernel",
        "layers/scale",
    }


def test_choices_by_rank_are_found() -> None:
    """A stack has another rank than its layers, so Muon's default and a mask by rank take other parameters."""
    assert (
        found(contrib.muon(0.1))["layers/kernel"]
        == "the optimizer keeps another state for the stack than for its layers"
    )
    decay = optax.adamw(0.1, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params))
    assert found(decay) == {
        "layers/scale": "the update of the stack reads its gradient and its parameter, and that of a layer its gradient"
    }


def test_random_numbers_are_refused_for_stacks_only() -> None:
    """A key that draws for a stack is a problem; one that draws for other parameters is none."""
    noise = optax.add_noise(0.1, 0.55, key=0)
    beside = optax.masked(
        noise, lambda params: map_with_path(lambda path, _: not path.startswith("layers"), params)
    )
    assert set(found(noise).values()) == {
        "the optimizer draws random numbers for the stack as a whole"
    }
    assert found(beside) == {}
    assert found(noise, {"head": PARAMS["head"]}) == {}


def test_a_mask_that_is_a_tree_is_checked_on_the_stack_alone() -> None:
    """An optimizer that is bound to one tree of parameters cannot be tried on separate layers; mixing still shows."""
    mask = jax.tree.map(lambda _: True, PARAMS)
    assert found(optax.adamw(0.1, mask=mask)) == {}
    assert set(found(optax.masked(optax.lamb(0.1), mask))) == {"layers/kernel", "layers/scale"}


def test_unrolled_layers_and_other_names_are_no_stacks() -> None:
    """Layers by number are parameters of their own, and a stack goes by the name it is given."""
    assert (
        found(
            optax.lamb(0.1), {"layers": {"0": {"kernel": PARAMS["head"]}}, "head": PARAMS["head"]}
        )
        == {}
    )
    assert found(optax.lamb(0.1), stacked=("blocks",)) == {}
    nested = {
        "groups": {"layers": {"kernel": np.ones((2, 2, 4, 4), np.float32)}},
        "head": PARAMS["head"],
    }
    both = ("groups", "layers")
    assert set(found(optax.lamb(0.1), nested, stacked=both)) == {"groups/layers/kernel"}
    assert found(per_layer(optax.lamb(0.1), both), nested, stacked=both) == {}
    assert_layerwise(per_layer(optax.lamb(0.1), both), nested, both)


def test_the_assertion_lists_every_layer_that_differs() -> None:
    """The message names the layers, by how much they differ, and what to do."""
    with pytest.raises(AssertionError) as caught:
        assert_layerwise(optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)), PARAMS)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines[1:-1]] == [
        f"  layers/{i}/{name}" for i in range(3) for name in ("kernel", "scale")
    ]
    assert "per_layer" in lines[-1]


def test_a_choice_between_optimizers_by_rank_is_found():
    """A stacked scale has two dimensions and would go by the optimizer of matrices."""

    def by_rank(params):
        return jax.tree.map(lambda p: "matrix" if p.ndim >= 2 else "vector", params)

    both = optax.partition({"matrix": optax.adam(1e-3), "vector": optax.adam(1e-5)}, by_rank)
    params = {"layers": {"kernel": jnp.ones((3, 4, 4)), "scale": jnp.ones((3, 4))}}
    assert [problem.where for problem in check_layerwise(both, params)] == ["layers/scale"]
    with pytest.raises(AssertionError, match="scale"):
        assert_layerwise(both, params)


ALONG_1 = {
    "embed": np.ones((16, 8), np.float32),
    "layers": {
        "up": np.ones((8, 3, 16), np.float32),
        "down": np.ones((16, 3, 8), np.float32),
        "scale": np.ones((8, 3), np.float32),
    },
}
STACKED = {"layers": Stack("pipe", dim=1)}
WHOLE_ARRAYS = {
    "muon": lambda stacked: make_optimizer(
        OptimizerConfig(name="muon"), 10, stacked, matrices={"embed": None}
    ),
    "lamb": lambda stacked: optax.chain(
        optax.clip_by_global_norm(1.0), per_layer(optax.lamb(0.1), stacked)
    ),
    "adafactor": lambda stacked: per_layer(optax.adafactor(0.1, min_dim_size_to_factor=4), stacked),
}


@pytest.mark.parametrize("make", WHOLE_ARRAYS.values(), ids=WHOLE_ARRAYS)
def test_stacks_along_another_dimension_are_updated_layer_by_layer(make: Any) -> None:
    """As T5X and MaxText have them; the update is that of separate layers, and the check knows it."""
    assert_layerwise(make(STACKED), ALONG_1, STACKED)
    assert found(make(STACKED), ALONG_1, stacked=STACKED) == {}


@pytest.mark.parametrize("make", WHOLE_ARRAYS.values(), ids=WHOLE_ARRAYS)
def test_control_the_wrong_dimension_is_found_or_refused(make: Any) -> None:
    """Dimension 0 as the stack is refused where sizes tell, and otherwise found by both checks."""
    with pytest.raises(
        ConfigError,
        match=r"along dimension 1 all have 3\n.*stacked=\{\"layers\": spmd.Stack\(axis, dim=1\)",
    ):
        make(("layers",)).init(ALONG_1)
    square = {"embed": ALONG_1["embed"], "layers": {"kernel": np.ones((4, 4, 4), np.float32)}}
    assert_layerwise(make(STACKED), square, STACKED)
    with pytest.raises(AssertionError, match="layers/0/kernel: differs by"):
        assert_layerwise(make(("layers",)), square, STACKED)
    (problem,) = check_layerwise(make(("layers",)), square, STACKED)
    assert 'stacked={"layers": spmd.Stack("pipe", dim=1)}' in problem.fix


def test_a_stack_within_a_stack_along_other_dimensions() -> None:
    """The dimension of the outer stack shifts that of the inner one."""
    stacked = {"layers": Stack(dim=1), "experts": Stack(dim=0)}
    params = {
        "layers": {
            "experts": {"up": np.ones((2, 3, 4, 8)), "bias": np.ones((2, 3, 8))},
            "norm": np.ones((4, 3)),
        }
    }
    with pytest.raises(AssertionError):
        assert_layerwise(optax.lamb(0.1), params, stacked)
    assert_layerwise(per_layer(optax.lamb(0.1), stacked), params, stacked)


def test_blocks_of_moments_have_elements_of_one_layer() -> None:
    """A last dimension of layers keeps float32 moments."""
    params = {"layers": {"scale": jnp.ones((4, 16)), "kernel": jnp.ones((4, 16, 8))}}
    state = quantize_moments(optax.scale_by_adam(), "8bit", stacked=STACKED).init(params)
    assert state.inner.mu["layers"]["scale"].dtype == jnp.float32
    assert state.inner.mu["layers"]["kernel"].codes.dtype == jnp.int8
