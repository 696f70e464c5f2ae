"""A ResNet with batch norm (Linen), a VQ-VAE with a straight-through estimator (NNX), and CLIP's two towers (Linen)."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from spmd.sharding.rules import Rules
from tests.wild.example import BATCH, SMALL, Example, draw_batches, integers, mean_of, normal

CLASSES, CODES, WIDTH = 4, 16, 8
CHANNELS = P(None, None, "fsdp", "tensor")


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut, which is a convolution where the size changes."""

    channels: int
    stride: int = 1

    @nn.compact
    def __call__(self, x, train):
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        conv = partial(nn.Conv, use_bias=False)
        y = nn.relu(norm()(conv(self.channels, (3, 3), strides=self.stride)(x)))
        y = norm(scale_init=nn.initializers.zeros)(conv(self.channels, (3, 3))(y))
        if x.shape != y.shape:
            x = norm()(conv(self.channels, (1, 1), strides=self.stride, name="shortcut")(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Two stages; logits `[batch, class]` of images `[batch, height, width, 3]`."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(
            nn.BatchNorm(use_running_average=not train)(nn.Conv(WIDTH, (3, 3), name="stem")(x))
        )
        x = ResidualBlock(WIDTH)(x, train)
        x = ResidualBlock(2 * WIDTH, stride=2)(x, train)
        return nn.Dense(CLASSES, name="head")(x.mean(axis=(1, 2)))


def classification(logits, batch):
    return mean_of(optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]))


RESNET = Example(
    network=ResNet(),
    rules=Rules(
        [
            ("ResidualBlock_[01]/(Conv_[01]|shortcut)/kernel", CHANNELS),
            ("head/kernel", P("fsdp", "tensor")),
            ("stem/(kernel|bias)|head/bias", SMALL),
            (".*BatchNorm_[0-9]/(scale|bias|mean|var)", SMALL),
        ]
    ),
    batches=draw_batches(images=normal(BATCH, 8, 8, 3), labels=integers(CLASSES, BATCH)),
    inputs=lambda batch: (batch["images"],),
    loss=classification,
    optimizer=optax.sgd(0.1, momentum=0.9, nesterov=True),
    train={"train": True},
)


class VQVAE(nnx.Module):
    """Reconstruction of images, and the distances of the code book and of the encoder to each other."""

    def __init__(self, rngs):
        self.down = nnx.Conv(3, WIDTH, (4, 4), strides=(2, 2), rngs=rngs)
        self.to_codes = nnx.Conv(WIDTH, WIDTH, (1, 1), rngs=rngs)
        self.codebook = nnx.Param(
            rngs.params.uniform((CODES, WIDTH), minval=-1 / CODES, maxval=1 / CODES)
        )
        self.from_codes = nnx.Conv(WIDTH, WIDTH, (3, 3), rngs=rngs)
        self.up = nnx.ConvTranspose(WIDTH, 3, (4, 4), strides=(2, 2), rngs=rngs)

    def __call__(self, images):
        encoded = self.to_codes(nnx.relu(self.down(images)))
        distances = jnp.square(encoded[..., None, :] - self.codebook[...]).sum(axis=-1)
        codes = self.codebook[...][distances.argmin(axis=-1)]
        code_loss = jnp.square(jax.lax.stop_gradient(encoded) - codes).mean(axis=(1, 2, 3))
        commitment = jnp.square(encoded - jax.lax.stop_gradient(codes)).mean(axis=(1, 2, 3))
        straight_through = encoded + jax.lax.stop_gradient(codes - encoded)
        return self.up(nnx.relu(self.from_codes(straight_through))), code_loss + 0.25 * commitment


def reconstruction(outputs, batch):
    images, code_loss = outputs
    return mean_of(jnp.square(images - batch["images"]).mean(axis=(1, 2, 3)) + code_loss)


VQ_VAE = Example(
    network=VQVAE,
    rules=Rules(
        [
            ("(to_codes|from_codes)/kernel", CHANNELS),
            ("codebook", P("fsdp", "tensor")),
            ("(up|down)/kernel|.*bias", SMALL),
        ]
    ),
    batches=draw_batches(images=normal(BATCH, 8, 8, 3)),
    inputs=lambda batch: (batch["images"],),
    loss=reconstruction,
    optimizer=optax.adam(1e-3),
)


class CLIP(nn.Module):
    """Unit vectors of images and captions, and the factor of their products."""

    @nn.compact
    def __call__(self, images, captions):
        x = nn.gelu(nn.Dense(32, name="image_hidden")(images.reshape(images.shape[0], -1)))
        x = nn.Dense(16, use_bias=False, name="image_proj")(x)
        y = nn.Embed(32, 16, name="words")(captions)
        y = y + nn.MultiHeadDotProductAttention(4, name="attention")(nn.LayerNorm(name="norm")(y))
        y = nn.Dense(16, use_bias=False, name="text_proj")(y.mean(axis=1))
        scale = self.param("logit_scale", nn.initializers.constant(np.log(1 / 0.07)), ())
        return (
            x / jnp.linalg.norm(x, axis=-1, keepdims=True),
            y / jnp.linalg.norm(y, axis=-1, keepdims=True),
            scale,
        )


def contrastive(outputs, batch):
    images, captions, scale = outputs
    logits = jnp.exp(scale) * images @ captions.T
    labels = jnp.arange(logits.shape[0])
    by_image = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    by_caption = optax.softmax_cross_entropy_with_integer_labels(logits.T, labels)
    return mean_of((by_image + by_caption) / 2)


CLIP_TOWERS = Example(
    network=CLIP(),
    rules=Rules(
        [
            ("image_hidden/kernel", P("fsdp", "tensor")),
            ("(image|text)_proj/kernel", P("tensor", "fsdp")),
            ("words/embedding", P("tensor", "fsdp")),
            ("attention/(query|key|value)/kernel", P("fsdp", "tensor")),
            ("attention/out/kernel", P("tensor", None, "fsdp")),
            (".*bias|norm/scale|logit_scale", SMALL),
        ]
    ),
    batches=draw_batches(images=normal(BATCH, 4, 4, 3), captions=integers(32, BATCH, 6)),
    inputs=lambda batch: (batch["images"], batch["captions"]),
    loss=contrastive,
)
