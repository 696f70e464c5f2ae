"""Convolutions and windows have the value and the gradients of one device, however channels and images are split.

XLA's partitioner computes some of them wrongly, so they are replaced (`spmd.plan.xla_faults`).
Layers of all kinds are branches of one model, so a mesh has one program for them.
"""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import AnnotationError
from spmd.gradients.losses import classification_loss
from spmd.model_interface.model import Model
from spmd.plan import xla_faults
from spmd.plan.linen_model import from_linen
from spmd.plan.nnx_model import from_nnx
from spmd.sharding.mesh import BATCH_AXES
from spmd.sharding.rules import Rules, replicate
from tests import tiny
from tests.numerics.test_partition_safe import TOLERANCE, errors, on_mesh, on_one_device

EXAMPLES, CHANNELS = 8, 8
SIDES = {1: (16,), 2: (8, 4), 3: (4, 4, 4)}
"""Number of spatial dimensions → their sizes."""
BATCH = {
    f"images_{rank}d": np.random.default_rng(rank)
    .normal(size=(EXAMPLES, *sides, CHANNELS))
    .astype(np.float32)
    for rank, sides in SIDES.items()
}

LAYERS = {
    "causal_1d": {"kernel_size": 3, "padding": "CAUSAL"},
    "depthwise_1d": {"kernel_size": 3, "padding": "CAUSAL", "feature_group_count": 8},
    "dilated_1d": {"kernel_size": 3, "kernel_dilation": 2},
    "plain_2d": {"kernel_size": (3, 3)},
    "patches_2d": {"kernel_size": (2, 2), "strides": (2, 2), "padding": "VALID"},
    "grouped_2d": {"kernel_size": (3, 3), "feature_group_count": 2},
    "depthwise_2d": {"kernel_size": (3, 3), "feature_group_count": 8},
    "circular_2d": {"kernel_size": (3, 3), "padding": "CIRCULAR", "feature_group_count": 4},
    "dilated_2d": {"kernel_size": (3, 3), "input_dilation": (2, 2), "padding": ((1, 1), (1, 1))},
    "plain_3d": {"kernel_size": (2, 2, 2)},
    "transposed_2d": {"kernel_size": (2, 2), "strides": (2, 2)},
}
"""Name → the options of a layer of Flax; its ending says which images it takes."""


def batch_groups(x, kernel):
    """A convolution of examples in two groups, each with kernels of its own."""
    numbers = jax.lax.conv_dimension_numbers(x.shape, kernel.shape, ("NHWC", "HWIO", "NHWC"))
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=numbers, batch_group_count=2
    )


WINDOWS = {
    "max_1d": lambda x: nn.max_pool(x, (3,), padding="SAME"),
    "max_2d": lambda x: nn.max_pool(x, (3, 3), padding="SAME"),
    "average_2d": lambda x: nn.avg_pool(x, (3, 3), padding="SAME"),
    "strided_max_2d": lambda x: nn.max_pool(x, (2, 2), strides=(2, 2)),
    "average_3d": lambda x: nn.avg_pool(x, (2, 2, 2), padding="SAME"),
}
"""Name → a function of images that reduces windows."""


def images_of(name, batch):
    return batch[f"images_{name[-2:]}"]


def kind_of(name):
    """The prefix of a layer that is transposed has its own class."""
    return "ConvTranspose" if name.startswith("transposed") else "Conv"


class NnxLayers(nnx.Module):
    """All layers of NNX, each after a linear layer, so that its images have gradients and split channels."""

    def __init__(self, rngs):
        for name, options in LAYERS.items():
            setattr(self, f"{name}_before", nnx.Linear(CHANNELS, CHANNELS, rngs=rngs))
            setattr(
                self, name, getattr(nnx, kind_of(name))(CHANNELS, CHANNELS, rngs=rngs, **options)
            )

    def __call__(self, batch):
        outputs = {}
        for name in LAYERS:
            images = jnp.tanh(getattr(self, f"{name}_before")(images_of(name, batch)))
            outputs[name] = getattr(self, name)(images)
        return outputs


class LinenLayers(nn.Module):
    """The same in Linen."""

    @nn.compact
    def __call__(self, batch):
        outputs = {}
        for name, options in LAYERS.items():
            images = jnp.tanh(nn.Dense(CHANNELS, name=f"{name}_before")(images_of(name, batch)))
            options = {**options, "kernel_size": np.atleast_1d(options["kernel_size"]).tolist()}
            outputs[name] = getattr(nn, kind_of(name))(CHANNELS, name=name, **options)(images)
        return outputs


def written_windows():
    """A model of windows after matmuls, and of a convolution in groups of examples."""
    names = (*WINDOWS, "batch_2d")

    def init(key):
        keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))
        params = {
            f"{name}_before": {"kernel": jax.random.normal(key, (CHANNELS, CHANNELS))}
            for name, key in keys.items()
        }
        return {
            **params,
            "batch_2d": {"kernel": jax.random.normal(key, (3, 3, CHANNELS, CHANNELS)) / 4},
        }

    def apply(params, batch):
        images = {
            name: jnp.tanh(images_of(name, batch) @ params[f"{name}_before"]["kernel"])
            for name in names
        }
        outputs = {name: reduce(images[name]) for name, reduce in WINDOWS.items()}
        return {
            **outputs,
            "batch_2d": batch_groups(images["batch_2d"], params["batch_2d"]["kernel"]),
        }

    return Model(init, apply)


MODELS = {
    "nnx": from_nnx(NnxLayers),
    "linen": from_linen(
        LinenLayers(), {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in BATCH.items()}
    ),
    "windows": written_windows(),
}


def make_rules(name, dense, channels, inputs=None, batch=()):
    """Return a table for a model that splits convolutions by their channels.

    Args:
        dense: The spec of the kernels before layers.
        channels: The axes of output channels.
        inputs: The axes of the input channels of layers without groups.
        batch: The rows of the batch's table.
    """
    if name == "windows":
        return Rules(
            [(".*_before/kernel", dense), ("batch_2d/kernel", P(None, None, None, channels))],
            batch=batch,
        )
    params = [(".*_before/kernel", dense), ("bias", replicate("a few bytes"))]
    for rank in SIDES:
        spatial = (None,) * rank
        params.append(
            (
                f"(causal|dilated|plain|patches|transposed)_{rank}d/kernel",
                P(*spatial, inputs, channels),
            )
        )
        if rank < 3:
            params.append(
                (f"(depthwise|grouped|circular)_{rank}d/kernel", P(*spatial, None, channels))
            )
    return Rules(params, batch=batch)


ROWS = [("images.*", P(BATCH_AXES, "sequence"))]
LAYOUTS = {
    "channels": ((P("fsdp", "tensor"), "tensor", "fsdp"), {"data": 2, "fsdp": 2, "tensor": 2}),
    "fsdp-too": ((P(None, "tensor"), ("fsdp", "tensor")), {"data": 2, "fsdp": 2, "tensor": 2}),
    "tensor": ((P(None, "tensor"), "tensor"), {"data": 2, "tensor": 4}),
    "sequence": (
        (P(None, "tensor"), "tensor", None, ROWS),
        {"data": 2, "sequence": 2, "tensor": 2},
    ),
    "long-sequence": ((P("data"), "data", None, ROWS), {"data": 2, "sequence": 4}),
}
"""Name → the arguments of `make_rules`, and the axes of a mesh."""
RUN = [
    *(("nnx", layout) for layout in LAYOUTS if layout != "fsdp-too"),
    *(("windows", layout) for layout in LAYOUTS if layout != "fsdp-too"),
    pytest.param("linen", "fsdp-too", marks=pytest.mark.soak),
    ("linen", "sequence"),
]


def loss_of(name):
    """The sum over all layers of the mean square of their outputs, each reported under its name."""

    def loss_fn(params, variables, batch, key):
        outputs, _ = MODELS[name].forward(params, {}, key, batch, train=True)
        losses = {layer: jnp.mean(jnp.square(x) * (1 + weights(x))) for layer, x in outputs.items()}
        return {"loss": sum(losses.values()), "weight": jnp.float32(1)}, variables

    return loss_fn


def weights(x):
    """Different weights for the elements of an array, so that none may change places."""
    return jnp.arange(x.size, dtype=x.dtype).reshape(x.shape) / x.size


@functools.cache
def wanted(name):
    return on_one_device(MODELS[name], loss_of(name), BATCH)


@pytest.mark.parametrize(("name", "layout"), RUN)
def test_any_layer_has_the_gradients_of_one_device(name, layout):
    """Value and gradients agree to 1e-5, for each layer's own parameters and those before it."""
    table, sizes = LAYOUTS[layout]
    found = errors(
        on_mesh(MODELS[name], make_rules(name, *table), loss_of(name), BATCH, **sizes), wanted(name)
    )
    assert max(found.values()) <= TOLERANCE, {
        path: error for path, error in found.items() if error > TOLERANCE
    }


def without_faults(monkeypatch):
    """Let XLA compute every operation as it stands."""
    monkeypatch.setattr(xla_faults, "FAULTS", ())


PICTURES = {
    "images": np.random.default_rng(0).normal(size=(8, 16, 16, 3)).astype(np.float32),
    "labels": np.arange(8),
    "weights": np.ones(8, np.float32),
}


class Stem(nnx.Module):
    """A layer that takes the images of the batch themselves."""

    def __init__(self, kind, rngs):
        size = {"patches": (4, 4), "conv": (3, 3), "pool": (1, 1)}[kind]
        self.kind = kind
        self.stem = nnx.Conv(3, CHANNELS, size, strides=size if kind == "patches" else 1, rngs=rngs)
        self.head = nnx.Linear(CHANNELS, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.stem(x))
        if self.kind == "pool":
            x = nnx.max_pool(x, (3, 3), padding="SAME")
        return self.head(x.mean((1, 2)))


STEMS = {
    "patches": (P(None, None, None, "tensor"), {"data": 2, "sequence": 2, "tensor": 2}),
    "conv": (replicate("small"), {"data": 2, "sequence": 2, "tensor": 2}),
    "pool": (replicate("small"), {"data": 2, "sequence": 4}),
}
"""Kind of the first layer → the spec of its kernel, and the axes of a mesh on which XLA computes it wrongly."""


def stem_errors(kind):
    """The differences of a model from one device, where each image is split."""
    spec, sizes = STEMS[kind]
    table = [("stem/kernel", spec), ("head/kernel", P("fsdp", None)), ("bias", replicate("small"))]
    model = from_nnx(lambda rngs: Stem(kind, rngs))
    loss_fn = classification_loss(model)
    return errors(
        on_mesh(model, Rules(table, batch=ROWS), loss_fn, PICTURES, **sizes),
        on_one_device(model, loss_fn, PICTURES),
    )


@pytest.mark.parametrize("kind", STEMS)
def test_images_over_sequence(kind, monkeypatch):
    """Value and gradients are those of one device; the control: without replacements they are not."""
    found = stem_errors(kind)
    assert max(found.values()) <= TOLERANCE, found
    without_faults(monkeypatch)
    assert max(stem_errors(kind).values()) > 0.1


class Block(nnx.Module):
    """The mixer of a ConvNeXt block (as many groups as channels) or of a ResNeXt block."""

    def __init__(self, groups, rngs):
        self.stem = nnx.Conv(3, CHANNELS, (2, 2), strides=(2, 2), padding="VALID", rngs=rngs)
        self.mix = nnx.Conv(CHANNELS, CHANNELS, (3, 3), feature_group_count=groups, rngs=rngs)
        self.head = nnx.Linear(CHANNELS, 10, rngs=rngs)

    def __call__(self, x):
        x = spmd.annotate(self.stem(x), "residual")
        x = x + nnx.gelu(self.mix(x))
        return self.head(x.mean((1, 2)))


BLOCK_RULES = Rules(
    [("head/kernel", P("fsdp", None)), ("(stem|mix)/kernel|bias", replicate("small"))],
    activations=[("residual", P(BATCH_AXES))],
)
BLOCKS = {8: {"fsdp": 2, "tensor": 4}, 2: {"data": 2, "fsdp": 2, "tensor": 2}}
"""Groups of a block → the axes of a mesh on which XLA computes its gradient wrongly."""


def mixer_gradients(groups):
    """The gradient of the grouped kernel on a mesh, and on one device."""
    model = from_nnx(lambda rngs: Block(groups, rngs))
    loss_fn = classification_loss(model)
    found = on_mesh(model, BLOCK_RULES, loss_fn, PICTURES, **BLOCKS[groups])[1]
    return found["mix"]["kernel"], on_one_device(model, loss_fn, PICTURES)[1]["mix"]["kernel"]


@pytest.mark.parametrize("groups", BLOCKS)
def test_grouped_kernels_that_are_replicated(groups, monkeypatch):
    """Their gradients are those of one device; the control: without replacements tensor multiplies them."""
    found, true = mixer_gradients(groups)
    np.testing.assert_allclose(found, true, rtol=0, atol=TOLERANCE * np.abs(true).max())
    without_faults(monkeypatch)
    found, true = mixer_gradients(groups)
    factor = float((found * true).sum() / (true * true).sum())
    assert abs(factor - BLOCKS[groups]["tensor"]) < 0.01


# Code that cannot be replaced.


def convolve(x, kernel, groups):
    numbers = jax.lax.conv_dimension_numbers(x.shape, kernel.shape, ("NHWC", "HWIO", "NHWC"))
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


def with_custom_vjp(groups):
    """A convolution in the code of a `jax.custom_vjp`."""

    @jax.custom_vjp
    def layer(x, kernel):
        return convolve(x, kernel, groups)

    def forward(x, kernel):
        return jax.vjp(lambda x, kernel: convolve(x, kernel, groups), x, kernel)

    layer.defvjp(forward, lambda backward, g: backward(g))
    return layer


def with_custom_jvp(groups):
    """A convolution in the code of a `jax.custom_jvp`."""

    @jax.custom_jvp
    def layer(x, kernel):
        return convolve(x, kernel, groups)

    layer.defjvp(
        lambda primals, tangents: jax.jvp(
            lambda x, kernel: convolve(x, kernel, groups), primals, tangents
        )
    )
    return layer


def in_a_loop(groups):
    """The same inside of a loop."""
    layer = with_custom_vjp(groups)
    return lambda x, kernel: jax.lax.scan(lambda x, _: (layer(x, kernel), None), x, length=2)[0]


CUSTOM = {"custom_vjp": with_custom_vjp, "custom_jvp": with_custom_jvp, "loop": in_a_loop}


def convolution_errors(layer, groups, spec, batch=(), **sizes):
    """The differences of a model with one convolution from one device."""
    shape = (3, 3, CHANNELS // groups, CHANNELS)
    model = Model(
        lambda key: {"kernel": jax.random.normal(key, shape) / 4},
        lambda p, x: layer(x, p["kernel"]),
    )

    def loss_fn(params, variables, batch, key):
        outputs = model.apply(params, batch["images_2d"])
        return {
            "loss": (outputs**2 * (1 + weights(outputs))).mean(),
            "weight": jnp.float32(1),
        }, variables

    found = on_mesh(model, Rules([("kernel", spec)], batch=batch), loss_fn, BATCH, **sizes)
    return errors(found, on_one_device(model, loss_fn, BATCH))


def gradient_in_a_loss(x, kernel):
    """A loss that is the gradient of another."""
    return jax.grad(lambda kernel: (jnp.tanh(convolve(x, kernel, 2)) ** 2).sum())(kernel)


NESTED = {
    "checkpoint": jax.checkpoint(lambda x, kernel: jnp.tanh(convolve(x, kernel, 2))),
    "loop": lambda x, kernel: jax.lax.scan(
        lambda x, _: (jnp.tanh(convolve(x, kernel, 2)), None), x, length=2
    )[0],
    "branch": lambda x, kernel: jax.lax.cond(
        x[0, 0, 0, 0] < 9, lambda x: convolve(x, kernel, 2), lambda x: x, x
    ),
    "vmap": lambda x, kernel: jax.vmap(lambda x: convolve(x[None], kernel, 2)[0])(x),
    "gradient": gradient_in_a_loss,
}
"""Name → a function with a grouped convolution inside."""


@pytest.mark.parametrize("name", NESTED)
def test_convolutions_inside_of_other_programs(name):
    """They are replaced there, too: value and gradients agree to 1e-5 where channels and images are split."""
    channels, sizes = P(None, None, None, "tensor"), {"data": 2, "sequence": 2, "tensor": 2}
    found = convolution_errors(NESTED[name], 2, channels, ROWS, **sizes)
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.upgrades
@pytest.mark.parametrize("kind", CUSTOM)
def test_groups_in_a_custom_derivative_are_refused(kind):
    """The error names the primitive, the line of the model, and the axes that split it."""
    with pytest.raises(AnnotationError) as caught:
        convolution_errors(CUSTOM[kind](2), 2, P(None, None, None, "tensor"), data=2, tensor=4)
    (problem,) = caught.value.problems
    source, start = inspect.getsourcelines(convolve)
    file, line = problem.where.split(":")
    assert file.endswith("tests/numerics/test_convolutions.py")
    assert "conv_general_dilated" in source[int(line) - start]
    assert "conv_general_dilated of (8, 8, 4, 8) and (3, 3, 4, 8)" in problem.what
    assert "data=2, tensor=4" in problem.detail
    assert "Convolutions with groups" in problem.detail
    assert "jax.custom_vjp" in problem.fix


@pytest.mark.parametrize("kind", CUSTOM)
def test_other_convolutions_in_a_custom_derivative_stay(kind):
    """Without groups and without an axis over an image, XLA computes them right where they stand."""
    found = convolution_errors(CUSTOM[kind](1), 1, P(None, None, None, "tensor"), data=2, tensor=4)
    assert max(found.values()) <= TOLERANCE, found


def with_pool(groups):
    """A pool in the code of a custom derivative, after a product that passes on how images are split."""
    del groups
    pool = jax.custom_vjp(
        lambda x: jax.lax.reduce_window(
            x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME"
        )
    )
    pool.defvjp(lambda x: jax.vjp(pool.fun, x), lambda back, g: back(g))
    return lambda x, kernel: pool(x @ kernel[0, 0])


@pytest.mark.upgrades
@pytest.mark.parametrize("layer", [*CUSTOM.values(), with_pool], ids=[*CUSTOM, "pool"])
def test_split_images_in_a_custom_derivative_are_refused(layer):
    """XLA would compute them wrongly where they stand; the error says what must be whole."""
    with pytest.raises(
        AnnotationError, match="split no other dimension of its operands than the examples"
    ):
        convolution_errors(layer(1), 1, replicate("small"), ROWS, data=2, sequence=2, tensor=2)


def with_rules_alone(groups):
    """A custom derivative whose rules convolve, and whose function does not."""
    layer = jax.custom_vjp(lambda x, kernel: x * kernel.sum())
    layer.defvjp(
        lambda *a: jax.vjp(lambda x, kernel: convolve(x, kernel, groups), *a),
        lambda back, g: back(g),
    )
    return layer


def step_with_rules_alone(groups, batch=(), **sizes):
    """A step of a model with such a layer, traced."""
    shape, layer = (3, 3, CHANNELS // groups, CHANNELS), with_rules_alone(groups)
    model = Model(
        lambda key: {"kernel": jax.random.normal(key, shape)}, lambda p, x: layer(x, p["kernel"])
    )

    def loss_fn(params, variables, batch, key):
        return {
            "loss": (model.apply(params, batch["x"]) ** 2).mean(),
            "weight": jnp.float32(1),
        }, variables

    rules = Rules([("kernel", replicate("small"))], batch=batch)
    step = spmd.make_train_step(
        spmd.make_plan(tiny.mesh(**sizes), rules, model, optax.sgd(0.1)), loss_fn
    )
    return step.trace({"x": jax.ShapeDtypeStruct((8, 8, 8, CHANNELS), jnp.float32)})


@pytest.mark.upgrades
@pytest.mark.parametrize("groups", [1, 2])
def test_rules_of_a_custom_derivative_are_seen_in_the_whole_step(groups):
    """The loss does not show them; one error for each line, with what to split instead."""
    rows = [("x", P(BATCH_AXES, "sequence"))]
    with pytest.raises(AnnotationError, match="is in the rules of a custom derivative") as caught:
        step_with_rules_alone(groups, rows, data=2, sequence=2, tensor=2)
    assert len(caught.value.problems) == 1


def test_rules_of_a_custom_derivative_may_convolve_whole_images():
    """Without groups, and with images that nothing splits."""
    assert step_with_rules_alone(1, data=2, tensor=2)


def test_on_one_device_nothing_is_refused():
    """A plan of one device leaves every operation as it is."""
    found = convolution_errors(CUSTOM["custom_vjp"](2), 2, replicate("small"), data=1)
    assert max(found.values()) <= TOLERANCE, found
