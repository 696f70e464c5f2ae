"""Six models as a stranger writes them: heads, gates and adapters that begin at zero, batch statistics, and a sampler.

Each has a table of rules, a loss and batches. All but the last are Flax's own layers and nothing of
this package.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from spmd.gradients.losses import LossFn, ModelLoss, classification_loss, next_token_loss
from spmd.lora.adapters import lora_rules, with_lora
from spmd.lora.config import LoRAConfig
from spmd.model_interface.model import Model
from spmd.plan.linen_model import from_linen
from spmd.plan.nnx_model import from_nnx
from spmd.sharding.rules import Rules, replicate
from spmd.testing import token_batches
from tests import tiny

BATCH, SIZE, WIDTH, CLASSES = 8, 8, 16, 4
SMALL = replicate("a few bytes")
IMAGES = jax.ShapeDtypeStruct((BATCH, SIZE, SIZE, 1), jnp.float32)


def images(steps: int) -> list[dict[str, np.ndarray]]:
    """Bright quadrants on noise, to be told apart; the fourth does not count."""
    rng = np.random.default_rng(0)
    out = []
    for _ in range(steps):
        labels = rng.integers(0, CLASSES, BATCH, dtype=np.int32)
        pixels = rng.normal(0.0, 0.3, IMAGES.shape).astype(np.float32)
        for image, label in zip(pixels, labels, strict=True):
            top, left = SIZE // 2 * (label // 2), SIZE // 2 * (label % 2)
            image[top : top + SIZE // 2, left : left + SIZE // 2] += 1
        weights = (np.arange(BATCH) != 3).astype(np.float32)
        out.append({"images": pixels, "labels": labels, "weights": weights})
    return out


def noised_images(steps: int) -> list[dict[str, np.ndarray]]:
    """Images, the noise that is added to them, and how much; nothing has a weight."""
    rng = np.random.default_rng(1)
    pixels = [batch["images"] for batch in images(steps)]
    draw = functools.partial(rng.standard_normal, dtype=np.float32)
    return [
        {"images": x, "noise": draw(x.shape), "level": rng.random(BATCH, np.float32)}
        for x in pixels
    ]


class ViT(nn.Module):
    """A vision transformer whose head starts at zero, as that of the published code does."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(WIDTH, (4, 4), strides=(4, 4), name="patches")(x).reshape(x.shape[0], -1, WIDTH)
        x = x + self.param("places", nn.initializers.normal(0.02), (1, x.shape[1], WIDTH))
        for number in range(2):
            y = nn.LayerNorm(name=f"attention_norm_{number}")(x)
            x = x + nn.MultiHeadDotProductAttention(4, name=f"attention_{number}")(y, y)
            y = nn.Dense(4 * WIDTH, name=f"up_{number}")(nn.LayerNorm(name=f"mlp_norm_{number}")(x))
            x = x + nn.Dense(WIDTH, name=f"down_{number}")(nn.gelu(y))
        x = nn.LayerNorm(name="norm")(x).mean(axis=1)
        return nn.Dense(CLASSES, kernel_init=nn.initializers.zeros, name="head")(x)


class Mixer(nn.Module):
    """An MLP-Mixer, with a head that starts at zero."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(WIDTH, (2, 2), strides=(2, 2), name="patches")(x).reshape(x.shape[0], -1, WIDTH)
        tokens = x.shape[1]
        for number in range(2):
            y = nn.LayerNorm(name=f"token_norm_{number}")(x).swapaxes(1, 2)
            y = nn.Dense(tokens, name=f"token_down_{number}")(
                nn.gelu(nn.Dense(32, name=f"token_up_{number}")(y))
            )
            x = x + y.swapaxes(1, 2)
            y = nn.Dense(4 * WIDTH, name=f"up_{number}")(nn.LayerNorm(name=f"mlp_norm_{number}")(x))
            x = x + nn.Dense(WIDTH, name=f"down_{number}")(nn.gelu(y))
        x = nn.LayerNorm(name="norm")(x).mean(axis=1)
        return nn.Dense(CLASSES, kernel_init=nn.initializers.zeros, name="head")(x)


class DenseNet(nn.Module):
    """Convolutions that each see all before them, with batch statistics."""

    @nn.compact
    def __call__(self, x, train):
        def norm(x, name):
            return nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9, name=name)(x))

        x = norm(nn.Conv(8, (3, 3), use_bias=False, name="init")(x), "init_bn")
        for number in range(3):
            y = nn.Conv(16, (1, 1), use_bias=False, name=f"narrow_{number}")(
                norm(x, f"bn_{number}")
            )
            y = nn.Conv(8, (3, 3), use_bias=False, name=f"grow_{number}")(
                norm(y, f"grow_bn_{number}")
            )
            x = jnp.concatenate([x, y], axis=-1)
        return nn.Dense(CLASSES, name="head")(norm(x, "last_bn").mean(axis=(1, 2)))


class VAE(nn.Module):
    """An encoder, a draw, and a decoder; returns the pixels, the mean and the logarithm of the variance."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(32, name="encode")(x.reshape(x.shape[0], -1)))
        mean, spread = nn.Dense(4, name="mean")(x), nn.Dense(4, name="spread")(x)
        draw = (
            jax.random.normal(self.make_rng("dropout"), mean.shape)
            if self.has_rng("dropout")
            else 0.0
        )
        x = nn.relu(nn.Dense(32, name="decode")(mean + jnp.exp(spread / 2) * draw))
        return nn.Dense(SIZE * SIZE, name="pixels")(x).reshape(-1, SIZE, SIZE, 1), mean, spread


class DiTBlock(nnx.Module):
    """Attention and an MLP, each scaled, shifted and gated by the noise's level; the gates start at zero."""

    def __init__(self, rngs):
        self.gates = nnx.Linear(WIDTH, 6 * WIDTH, kernel_init=nnx.initializers.zeros, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, level):
        one, two, three, four, five, six = jnp.split(
            self.gates(nnx.silu(level))[:, None], 6, axis=-1
        )
        x = x + three * self.attention(_standard(x) * (1 + one) + two)
        return x + six * self.down(nnx.gelu(self.up(_standard(x) * (1 + four) + five)))


class DiT(nnx.Module):
    """A diffusion transformer with adaLN-Zero: predicts noise, from an output layer that starts at zero."""

    def __init__(self, rngs):
        self.patches = nnx.Linear(4, WIDTH, rngs=rngs)
        self.level = nnx.Linear(8, WIDTH, rngs=rngs)
        self.blocks = nnx.List([DiTBlock(rngs) for _ in range(2)])
        self.last = nnx.Linear(WIDTH, 2 * WIDTH, kernel_init=nnx.initializers.zeros, rngs=rngs)
        self.out = nnx.Linear(WIDTH, 4, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x, level):
        count, half = x.shape[0], SIZE // 2
        x = (
            x.reshape(count, half, 2, half, 2)
            .transpose(0, 1, 3, 2, 4)
            .reshape(count, half * half, 4)
        )
        angles = level[:, None] * 2.0 ** jnp.arange(4)[None]
        known = nnx.silu(self.level(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)))
        x = self.patches(x)
        for block in self.blocks:
            x = block(x, known)
        shift, scale = jnp.split(self.last(nnx.silu(known))[:, None], 2, axis=-1)
        x = self.out(_standard(x) * (1 + scale) + shift)
        return (
            x.reshape(count, half, half, 2, 2)
            .transpose(0, 1, 3, 2, 4)
            .reshape(count, SIZE, SIZE, 1)
        )


def _standard(x):
    return (x - x.mean(axis=-1, keepdims=True)) * jax.lax.rsqrt(
        x.var(axis=-1, keepdims=True) + 1e-6
    )


def _vae_sums(outputs, batch):
    pixels, mean, spread = outputs.logits
    error = ((pixels - batch["images"]) ** 2).sum(axis=(1, 2, 3))
    distance = 0.5 * (jnp.exp(spread) + mean**2 - 1 - spread).sum(axis=-1)
    return {"loss": (error + distance).sum(), "weight": jnp.float32(pixels.shape[0])}


def _dit_inputs(batch):
    level = batch["level"][:, None, None, None]
    return jnp.sqrt(1 - level) * batch["images"] + jnp.sqrt(level) * batch["noise"], batch["level"]


def _dit_sums(outputs, batch):
    error = (outputs.logits - batch["noise"]) ** 2
    return {"loss": error.mean(axis=(1, 2, 3)).sum(), "weight": jnp.float32(error.shape[0])}


@dataclasses.dataclass(frozen=True, eq=False)
class Stranger:
    """A model, its table, its loss, and how its batches are made."""

    model: Model
    rules: Rules
    loss_fn: LossFn
    batches: Callable[[int], list[dict[str, np.ndarray]]]


LAST, FIRST = P("fsdp", "tensor"), P("tensor", "fsdp")
REST = ("(head|patches|out|init)/kernel|(scale|bias|places|mean|var)", SMALL)
TRANSFORMER: list[tuple[str, Any]] = [
    ("attention.*/(query|key|value)/kernel", P("fsdp", "tensor")),
    ("attention.*/(query|key|value)/bias", P("tensor")),
    ("attention.*/out/kernel", P("tensor", None, "fsdp")),
    ("up.*/kernel", LAST),
    ("up.*/bias", P("tensor")),
    ("down.*/kernel", FIRST),
]


@functools.cache
def stranger(name: str) -> Stranger:
    """Returns the model of this name of `STRANGERS`, made once."""
    return STRANGERS[name]()


def _classifier(module: nn.Module, rules: list[tuple[str, Any]], **options: Any) -> Stranger:
    model = from_linen(module, IMAGES, **options)
    return Stranger(model, Rules([*rules, REST]), classification_loss(model), images)


def _densenet() -> Stranger:
    rules = [
        ("(narrow|grow)_[0-9]/kernel", P(None, None, "fsdp", "tensor")),
        ("init_bn/(scale|bias)", P("tensor")),
    ]
    return _classifier(DenseNet(), rules, train={"train": True}, evaluate={"train": False})


def _vae() -> Stranger:
    model = from_linen(VAE(), IMAGES)
    rules = [
        ("(encode|mean|spread)/kernel", LAST),
        ("(decode|pixels)/kernel", FIRST),
        ("bias", SMALL),
    ]
    return Stranger(
        model, Rules(rules), ModelLoss(model, lambda b: (b["images"],), _vae_sums), unweighted
    )


def _dit() -> Stranger:
    model = from_nnx(DiT)
    rules = [*TRANSFORMER, ("(gates|last|level)/kernel", LAST), REST]
    return Stranger(model, Rules(rules), ModelLoss(model, _dit_inputs, _dit_sums), noised_images)


def _lora() -> Stranger:
    lora = LoRAConfig(targets=("q_proj/kernel", "v_proj/kernel", "up_proj/kernel"), rank=2)
    base, rules = tiny.model(), tiny.plan().rules
    model = with_lora(base, lora, rules)
    batches = functools.partial(token_batches, (BATCH, 16), tiny.CONFIG.vocab)
    return Stranger(model, lora_rules(base, lora, rules), next_token_loss(model), batches)


def unweighted(steps: int) -> list[dict[str, np.ndarray]]:
    """Images alone."""
    return [{"images": batch["images"]} for batch in images(steps)]


STRANGERS: dict[str, Callable[[], Stranger]] = {
    "vit": lambda: _classifier(ViT(), TRANSFORMER),
    "mixer": lambda: _classifier(
        Mixer(), [("(token_)?up.*/kernel", LAST), ("(token_)?down.*/kernel", FIRST)]
    ),
    "dit": _dit,
    "densenet": _densenet,
    "vae": _vae,
    "lora": _lora,
}
