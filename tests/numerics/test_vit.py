"""The vision transformer is the published one, and trains on images on every mesh as on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd import tree
from spmd.errors import ConfigError, RuleError
from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import classification_loss
from spmd.models.vit import PRESETS, ViTConfig
from spmd.partition_rules.vit import VIT
from spmd.plan.context import use_plan
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.sharding.mesh import MeshShape, abstract_mesh
from spmd.testing import BUGS, Reference
from tests import tiny

# Of the published weights with a head of 1,000 classes: arXiv:2010.11929, table 1 (86M, 307M with
# the head of 21,843 classes), and the tables of pretrained models in torchvision (vit_b_16,
# vit_l_16).
PUBLISHED = {"vit-b16": 86_567_656, "vit-l16": 304_326_632}
CONFIG = PRESETS["test"]


@functools.cache
def model(config=CONFIG):
    return from_nnx(config.build)


@functools.cache
def loss_fn():
    return classification_loss(model())


def batches(steps=6):
    """Bright quadrants, to be told apart, with an image that does not count."""
    rng = np.random.default_rng(0)
    out = []
    for _ in range(steps):
        labels = rng.integers(0, 4, 8, dtype=np.int32)
        images = rng.normal(0.0, 0.1, (8, 8, 8, 1)).astype(np.float32)
        for image, label in zip(images, labels, strict=True):
            top, left = 4 * (label // 2), 4 * (label % 2)
            image[top : top + 4, left : left + 4] += 1
        out.append(
            {
                "images": images,
                "labels": labels,
                "weights": np.array([1, 1, 1, 0, 1, 1, 1, 1], np.float32),
            }
        )
    return out


def plan(options=(), **sizes):
    return make_plan(tiny.mesh(**sizes), VIT, model(), optax.sgd(0.03), **dict(options))


@functools.cache
def one_device():
    return Reference(plan(), value_and_grad(loss_fn()), batches())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_parameter_counts(name):
    """Counted on the shapes of the model itself."""
    found = tree.size(jax.eval_shape(model(PRESETS[name]).init, jax.random.key(0)))
    assert found == PUBLISHED.get(name, found)
    assert name in PUBLISHED or name == "test"


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, ()),
        pytest.param(
            {"fsdp": 4, "tensor": 2}, (("zero", 1), ("remat", "full")), marks=pytest.mark.soak
        ),
    ],
    ids=str,
)
def test_it_trains_as_on_one_device(sizes, options):
    """Six steps on images: the initial state, every loss, gradient and update; and it learns."""
    result = one_device().compare(plan(options, **sizes))
    assert result.ok, f"\n{result}"
    assert result.losses[-1] < result.losses[0]


@pytest.mark.parametrize(
    "bug", ["gradient-scale", pytest.param("reduction", marks=pytest.mark.soak)]
)
def test_control_a_bug_is_caught(bug):
    """Gradients that are 1 % off, or of half of the images, do not pass."""
    assert not one_device().compare(plan(fsdp=2), BUGS[bug](value_and_grad(loss_fn()))).ok


def test_every_patch_is_seen():
    """Each pixel changes the scores, the last patch's too: nothing is causal; places are told apart."""
    params = model().init(jax.random.key(0))
    image = jnp.asarray(batches()[0]["images"][:1])
    before = model().apply(params, image)
    for at in ((0, 0), (7, 7)):
        assert (
            np.abs(model().apply(params, image.at[0, at[0], at[1], 0].add(1.0)) - before).max()
            > 1e-4
        )
    assert np.abs(model().apply(params, image[:, ::-1]) - before).max() > 1e-3


def test_logits_are_float32_whatever_is_computed_in():
    """One score for each class; bfloat16 in between changes them a little."""
    params = jax.eval_shape(model().init, jax.random.key(0))
    images = jax.ShapeDtypeStruct((8, 8, 8, 1), jnp.float32)
    plan = make_plan(abstract_mesh(MeshShape()), VIT, model(), optax.sgd(0.1), precision="bf16")
    with use_plan(plan):
        logits = jax.eval_shape(model().apply, params, images)
    assert (logits.shape, logits.dtype) == ((8, 10), jnp.float32)


def traced(**sizes):
    plan = make_plan(abstract_mesh(MeshShape(**sizes)), VIT, model(), optax.sgd(0.1))
    batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batches(1)[0].items()}
    params = jax.eval_shape(model().init, jax.random.key(0))
    with use_plan(plan):
        return jax.eval_shape(lambda p, b: loss_fn()(p, {}, b, jax.random.key(0))[0], params, batch)


def test_the_table_fits_every_axis_that_splits_images():
    """No row splits patches over `sequence`: that is refused, with what to do."""
    for axis in ("pipe", "data", "fsdp", "tensor"):
        assert set(traced(**{axis: 2})) == {"loss", "weight", "accuracy"}
    with pytest.raises(RuleError, match=r"mesh\.sequence: splits nothing"):
        traced(sequence=2)


def test_what_cannot_be_built_or_seen_is_refused_at_once():
    """Every reason is listed: patches that do not fit, heads that do not divide, sizes below one, other images."""
    with pytest.raises(ConfigError) as caught:
        ViTConfig(image=10, patch=4, heads=5, classes=0)
    assert [problem.where for problem in caught.value.problems] == [
        "model.classes",
        "model.heads",
        "model.patch",
    ]
    with pytest.raises(ConfigError, match="8 × 8 × 3 ≠ 8 × 8 × 1"):
        model().apply(model().init(jax.random.key(0)), jnp.zeros((1, 8, 8, 3)))
