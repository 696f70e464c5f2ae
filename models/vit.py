"""Vision transformer: an image as a sequence of patches and a class token.

Source: Dosovitskiy et al., arXiv:2010.11929.

```python
config = dataclasses.replace(PRESETS["vit-b16"], layers=4, classes=10)
loss_fn = spmd.classification_loss(spmd.from_nnx(config.build))
```
"""

import dataclasses
import math

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from spmd.errors import ConfigError, Problem, check_fields
from spmd.models.decoder import AttentionSpec, LayerSpec, MLPSpec, NormSpec
from spmd.models.decoder.inputs import LayerInputs
from spmd.models.decoder.layer_stack import make_layers, scan_layers_with_outputs
from spmd.models.decoder.linear import Dense, biased, dense
from spmd.models.decoder.norms import make_norm
from spmd.models.decoder.sizes import Sizes
from spmd.plan.annotate import annotate, cast_to_compute


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """Shape of a vision transformer."""

    image: int = 224
    """Height and width of an image, in pixels."""
    patch: int = 16
    """Height and width of a patch; divides image."""
    channels: int = 3
    """Channels of a pixel."""
    d_model: int = 768
    """Width of the residual stream."""
    layers: int = 12
    """Number of layers."""
    heads: int = 12
    """Attention heads; divides d_model."""
    d_ff: int = 3072
    """Hidden width of the MLP."""
    classes: int = 1000
    """Number of classes."""
    norm_eps: float = 1e-6
    """Added to the variance in LayerNorm."""
    stacked: bool = True
    """Stack and scan layers (one compiled layer); otherwise they are a list."""
    unroll: int = 1
    """Stacked layers per iteration of the scan: more is faster and compiles longer."""

    def __post_init__(self) -> None:
        sizes = ("image", "patch", "channels", "d_model", "layers", "heads", "d_ff", "classes")
        rules = dict.fromkeys((*sizes, "unroll"), "at least 1")
        problems = check_fields(self, rules, prefix="model.")
        if self.heads > 0 and self.d_model % self.heads:
            problem = Problem(
                "model.heads",
                "does not divide model.d_model",
                f"{self.d_model} / {self.heads} = {self.d_model / self.heads:.4g}",
                "change one of them",
            )
            problems.append(problem)
        if self.patch > 0 and self.image % self.patch:
            problem = Problem(
                "model.patch",
                "does not divide model.image",
                f"{self.image} / {self.patch} = {self.image / self.patch:.4g}",
                "change one of them",
            )
            problems.append(problem)
        if problems:
            raise ConfigError("Invalid ViT:", problems)

    @property
    def patches(self) -> int:
        """Number of patches of an image."""
        side = self.image // self.patch
        return side**2

    @property
    def sizes(self) -> Sizes:
        """Sizes of the layers."""
        return Sizes(
            d_model=self.d_model,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.heads,
            head_dim=self.d_model // self.heads,
            d_ff=self.d_ff,
            norm_eps=self.norm_eps,
            norm=NormSpec("layer", bias=True),
        )

    def build(self, rngs: nnx.Rngs) -> "ViT":
        """Build the model."""
        return ViT(self, rngs=rngs)


PRESETS = {
    "test": ViTConfig(
        image=8, patch=4, channels=1, d_model=32, layers=2, heads=4, d_ff=64, classes=10
    ),
    "vit-b16": ViTConfig(),
    "vit-l16": ViTConfig(d_model=1024, layers=24, heads=16, d_ff=4096),
}
"""Published shapes by name, for images of 224 × 224 and 1,000 classes, and a small one for
tests."""


LAYER = LayerSpec(
    AttentionSpec(rotary=None, qkv_bias=True, out_bias=True, causal=False),
    MLPSpec(activation="gelu", gated=False, bias=True),
)
"""Kind of every layer: attention from every token to all, and biases."""


class PatchProjection(nnx.Module):
    """Convolution over non-overlapping patches, with a bias.

    Its `kernel` is `[column, row, channel, d]`, PyTorch's with reversed dimensions.
    """

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        shape = (config.patch, config.patch, config.channels)
        init = nnx.initializers.normal(math.prod(shape) ** -0.5)
        table = init(rngs.params(), (*shape, config.d_model), jnp.float32)
        self.kernel = nnx.Param(table, gathered_by_layer=True, matrix="iiio")
        self.bias = nnx.Param(jnp.zeros((config.d_model,), jnp.float32), gathered_by_layer=True)

    def __call__(
        self, images: Float[Array, "batch height width channel"]
    ) -> Float[Array, "batch patch d"]:
        """Project patches, from left to right, row by row."""
        batch, _, side, channels = images.shape
        patch = self.kernel.shape[0]
        count = side // patch
        rows = images.reshape(batch, count, patch, count, patch, channels)
        # [batch, row of patches, patch of a row, column, row, channel]
        patches = rows.transpose(0, 1, 3, 4, 2, 5)
        patches = patches.reshape(batch, -1, patch, patch, channels)
        patches = annotate(patches, "patches")
        return biased(dense(patches, self.kernel, axes="xyco"), self.bias)


class ViT(nnx.Module):
    """Classifier from images to class logits."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        width = config.d_model
        init = nnx.initializers.normal(0.02)
        self.patch_proj = PatchProjection(config, rngs=rngs)
        self.class_token = nnx.Param(jnp.zeros((1, 1, width), jnp.float32), cast_by_layer=True)
        table = init(rngs.params(), (1, config.patches + 1, width), jnp.float32)
        self.positions = nnx.Param(table, role="lookup", cast_by_layer=True)
        sizes = config.sizes
        layer = LAYER.resolve(sizes)
        self.layers = make_layers(
            lambda rngs: layer.build(sizes, None, 0, rngs),
            config.layers,
            rngs.params(),
            stacked=config.stacked,
        )
        self.norm = make_norm(width, sizes)
        self.head = Dense(width, config.classes, bias=True, rngs=rngs)
        self.head.kernel.set_metadata(linear=False, role="logits")

    def __call__(
        self, images: Float[Array, "batch height width channel"]
    ) -> Float[Array, "batch class"]:
        """Return class logits in float32.

        Raises:
            ConfigError: The images have another shape.
        """
        x, context = self.embed_inputs(images)
        x, values = self.apply_layers(x, context)
        return self.compute_outputs(x, values)

    def embed_inputs(
        self, images: Float[Array, "batch height width channel"]
    ) -> tuple[Array, None]:
        """Return the residual stream before the first layer, of the class token and each patch.

        Raises:
            ConfigError: The images have another shape.
        """
        side = self.config.image
        channels = self.config.channels
        batch, *shape = images.shape
        if shape != [side, side, channels]:
            given = " × ".join(map(str, shape))
            problem = Problem(
                "images",
                "have another shape",
                f"{given} ≠ {side} × {side} × {channels}",
                "cut or scale them, or change model.image and model.channels",
            )
            raise ConfigError("Shape mismatch in ViT:", [problem])
        x = self.patch_proj(cast_to_compute(images))
        x = annotate(x, "residual")
        first = self.class_token[...].astype(x.dtype)
        first = jnp.broadcast_to(first, (batch, 1, x.shape[-1]))
        x = jnp.concatenate([first, x], axis=1)
        x = x + self.positions[...].astype(x.dtype)
        return annotate(x, "residual"), None

    def apply_layers(self, x: Float[Array, "batch token d"], context: None) -> tuple[Array, None]:
        """Return the residual stream after the layers."""
        inputs = LayerInputs()
        x, _ = scan_layers_with_outputs(self.layers, x, (None,), inputs, unroll=self.config.unroll)
        return x, None

    def compute_outputs(
        self, x: Float[Array, "batch token d"], values: None
    ) -> Float[Array, "batch class"]:
        """Return the score of each class, from the class token after the last layer."""
        class_token = annotate(x[:, :1], "head_input")
        x = self.norm(class_token)
        logits = dense(x, self.head.kernel, dtype=jnp.float32)
        logits = self.head.with_bias(logits)[:, 0]
        return annotate(logits, "class_logits")
