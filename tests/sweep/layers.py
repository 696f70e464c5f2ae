"""Small models of every layer of `flax.nnx` and `flax.linen`, each after a linear layer of the same library."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from spmd.plan.linen_model import from_linen
from spmd.plan.nnx_model import from_nnx
from tests.sweep.kinds import KINDS, Kind, Pick
from tests.sweep.primitives import BATCH, normal

WIDE = {"param_dtype": jnp.float64}
"""Options of layers that have a state, or cast to the dtype in which parameters are made."""
LEFT_OUT = {
    "nnx": {
        "Module": "the base class",
        "RNNCellBase": "a base class",
        "Dict": "holds modules",
        "List": "holds modules",
        "WeightNorm": "keeps plain arrays as attributes, which from_nnx refuses",
    },
    "linen": {
        "Module": "the base class",
        "RNNCellBase": "a base class",
        **dict.fromkeys(
            (
                "Fp8DirectDotGeneralOp",
                "Fp8DotGeneral",
                "Fp8DotGeneralOp",
                "Fp8Einsum",
                "NANOOFp8DotGeneralOp",
            ),
            "rounds to 8 bits, so that no two layouts agree to 1e-5",
        ),
    },
}
"""Layers of Flax that are no kind of the sweep, and why."""

COVERED: dict[str, set[str]] = {"nnx": set(), "linen": set()}
"""Classes that some kind has."""


def exported(library: str) -> set[str]:
    """The names of a library's module classes."""
    package, base = {"nnx": (nnx, nnx.Module), "linen": (nn, nn.Module)}[library]
    return {name for name, x in vars(package).items() if inspect.isclass(x) and issubclass(x, base)}


class AfterLinear(nnx.Module):
    """A layer whose inputs depend on parameters."""

    def __init__(self, width: int, layer: Callable[[nnx.Rngs], Any], rngs: nnx.Rngs) -> None:
        self.before = nnx.Linear(width, width, rngs=rngs)
        self.layer = layer(rngs)

    def __call__(self, x):
        return self.layer(jnp.tanh(self.before(x)))


class AfterDense(nn.Module):
    """The same for Linen: `layer` makes the layer, `call` applies it."""

    layer: Callable[[], Any]
    call: Callable[[Any, Any], Any]

    @nn.compact
    def __call__(self, x):
        return self.call(self.layer(), jnp.tanh(nn.Dense(x.shape[-1], name="before")(x)))


def of_nnx(*names: str) -> Callable[[Callable[[Pick], Any]], None]:
    """Adds a kind: a function of choices that returns a function of `rngs` and the shape of the batch."""

    def add(make: Callable[[Pick], Any]) -> None:
        def build(pick: Pick) -> Any:
            layer, shape = make(pick)
            return from_nnx(lambda rngs: AfterLinear(shape[-1], layer, rngs)), (normal(*shape),)

        KINDS[f"nnx.{' '.join(names)}"] = Kind(build)
        COVERED["nnx"].update(names)

    return add


def of_linen(*names: str) -> Callable[[Callable[[Pick], Any]], None]:
    """Adds a kind: a function of choices that returns a function that makes the layer, and the shape of the batch."""

    def add(make: Callable[[Pick], Any]) -> None:
        def build(pick: Pick) -> Any:
            layer, shape, *call = make(pick)
            module = AfterDense(layer, call[0] if call else lambda layer, x: layer(x))
            return from_linen(module, jax.ShapeDtypeStruct(shape, "float64")), (normal(*shape),)

        KINDS[f"linen.{' '.join(names)}"] = Kind(build)
        COVERED["linen"].update(names)

    return add


# nnx.


@of_nnx("Linear")
def _linear(pick):
    width, shape, bias = pick(8, 16), pick((BATCH,), (BATCH, 4)), pick(True, False)
    return lambda rngs: nnx.Linear(8, width, use_bias=bias, rngs=rngs), (*shape, 8)


@of_nnx("LinearGeneral")
def _linear_general(pick):
    out = pick((4, 4), (2, 8))
    return lambda rngs: nnx.LinearGeneral(8, out, rngs=rngs), (BATCH, 4, 8)


@of_nnx("Einsum")
def _einsum(pick):
    heads = pick(2, 4)
    return lambda rngs: nnx.Einsum("bsd,dnh->bsnh", (8, heads, 4), (heads, 4), rngs=rngs), (
        BATCH,
        4,
        8,
    )


@of_nnx("Conv")
def _conv(pick):
    spatial, groups = pick(1, 2, 3), pick(1, 1, 2, 8)
    kernel, strides, padding = pick(1, 2, 3), pick(1, 2), pick("SAME", "VALID", "CIRCULAR")
    options = {"strides": strides, "padding": padding, "feature_group_count": groups}
    sides = (pick(4, 8), *(4,) * (spatial - 1))
    return lambda rngs: nnx.Conv(8, 16, (kernel,) * spatial, **options, rngs=rngs), (
        BATCH,
        *sides,
        8,
    )


@of_nnx("ConvTranspose")
def _conv_transpose(pick):
    spatial, kernel, stride = pick(1, 2), pick(2, 3), pick(1, 2)

    def layer(rngs):
        return nnx.ConvTranspose(4, 8, (kernel,) * spatial, strides=(stride,) * spatial, rngs=rngs)

    return layer, (BATCH, *(4,) * spatial, 4)


@of_nnx("Embed")
def _embed(pick):
    vocabulary = pick(8, 16)

    class Looked(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(vocabulary, 8, **WIDE, rngs=rngs)

        def __call__(self, x):
            ids = (jnp.abs(jax.lax.stop_gradient(x)) * 31).astype(jnp.int32) % vocabulary
            return self.embed.attend(jnp.tanh(self.embed(ids)))

    return lambda rngs: Looked(rngs), (BATCH, 4)


@of_nnx("LoRA", "LoRALinear")
def _lora(pick):
    rank = pick(2, 4)

    def layer(rngs):
        both = (
            nnx.LoRALinear(8, 8, lora_rank=rank, **WIDE, rngs=rngs),
            nnx.LoRA(8, rank, 16, **WIDE, rngs=rngs),
        )
        return nnx.Sequential(*both)

    return layer, (BATCH, 8)


@of_nnx("MultiHeadAttention")
def _attention(pick):
    heads, normalized = pick(2, 4), pick(False, True)
    options = {"num_heads": heads, "in_features": 8, "qkv_features": 16, "decode": False}
    return lambda rngs: nnx.MultiHeadAttention(**options, normalize_qk=normalized, rngs=rngs), (
        BATCH,
        pick(4, 8),
        8,
    )


@of_nnx("BatchNorm")
def _batch_norm(pick):
    return lambda rngs: nnx.BatchNorm(8, **WIDE, rngs=rngs), pick(
        (BATCH, 8), (BATCH, 4, 8), (BATCH, 4, 4, 8)
    )


@of_nnx("LayerNorm")
def _layer_norm(pick):
    return lambda rngs: nnx.LayerNorm(8, rngs=rngs), pick((BATCH, 8), (BATCH, 4, 8))


@of_nnx("RMSNorm")
def _rms_norm(pick):
    return lambda rngs: nnx.RMSNorm(8, rngs=rngs), pick((BATCH, 8), (BATCH, 4, 8))


@of_nnx("GroupNorm")
def _group_norm(pick):
    groups = pick(1, 2, 4)
    return lambda rngs: nnx.GroupNorm(8, groups, rngs=rngs), (BATCH, 4, 4, 8)


@of_nnx("InstanceNorm")
def _instance_norm(pick):
    return lambda rngs: nnx.InstanceNorm(8, rngs=rngs), (BATCH, pick(4, 8), 4, 8)


@of_nnx("SpectralNorm")
def _spectral_norm(pick):
    return lambda rngs: nnx.SpectralNorm(nnx.Linear(8, 16, rngs=rngs), **WIDE, rngs=rngs), (
        BATCH,
        8,
    )


@of_nnx("Dropout")
def _dropout(pick):
    axes = pick((), (1,))
    return lambda rngs: nnx.Dropout(0.3, broadcast_dims=axes, rngs=rngs), (BATCH, 4, 8)


@of_nnx("PReLU")
def _prelu(pick):
    return lambda rngs: nnx.PReLU(**WIDE), (BATCH, 8)


@of_nnx("Sequential")
def _sequential(pick):
    return lambda rngs: nnx.Sequential(
        nnx.Linear(8, 16, rngs=rngs), nnx.gelu, nnx.Linear(16, 8, rngs=rngs)
    ), (BATCH, 8)


def _nnx_cell(cell: Any) -> None:
    @of_nnx(cell.__name__, "RNN")
    def _make(pick):
        width, reverse = pick(4, 8), pick(False, True)
        return lambda rngs: nnx.RNN(
            cell(8, width, dtype=jnp.float64, **WIDE, rngs=rngs), reverse=reverse
        ), (
            BATCH,
            4,
            8,
        )


for _cell in (nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.SimpleCell, nnx.GRUCell):
    _nnx_cell(_cell)


@of_nnx("Bidirectional")
def _bidirectional(pick):
    def layer(rngs):
        return nnx.Bidirectional(*(nnx.RNN(nnx.GRUCell(8, 4, **WIDE, rngs=rngs)) for _ in range(2)))

    return layer, (BATCH, 4, 8)


# Linen.


@of_linen("Dense")
def _dense(pick):
    width = pick(8, 16)
    return lambda: nn.Dense(width), pick((BATCH, 8), (BATCH, 4, 8))


@of_linen("DenseGeneral")
def _dense_general(pick):
    out, axes = pick((4, 4), (2, 8)), pick(-1, (-2, -1))
    return lambda: nn.DenseGeneral(out, axis=axes), (BATCH, 4, 8)


@of_linen("Einsum")
def _linen_einsum(pick):
    heads = pick(2, 4)
    return lambda: nn.Einsum((8, heads, 4), "bsd,dnh->bsnh"), (BATCH, 4, 8)


@of_linen("Conv")
def _linen_conv(pick):
    spatial, groups = pick(1, 2, 3), pick(1, 2, 8)
    options = {
        "strides": pick(1, 2),
        "padding": pick("SAME", "VALID", "CIRCULAR"),
        "feature_group_count": groups,
    }
    kernel, sides = (pick(1, 2, 3),) * spatial, (pick(4, 8), *(4,) * (spatial - 1))
    return lambda: nn.Conv(16, kernel, **options), (BATCH, *sides, 8)


@of_linen("ConvLocal")
def _conv_local(pick):
    kernel = pick(2, 3)
    return lambda: nn.ConvLocal(8, (kernel,)), (BATCH, 8, 4)


@of_linen("ConvTranspose")
def _linen_conv_transpose(pick):
    spatial, kernel, stride = pick(1, 2), pick(2, 3), pick(1, 2)
    return lambda: nn.ConvTranspose(8, (kernel,) * spatial, (stride,) * spatial), (
        BATCH,
        *(4,) * spatial,
        4,
    )


@of_linen("Embed")
def _linen_embed(pick):
    def look_up(layer, x):
        ids = (jnp.abs(jax.lax.stop_gradient(x)) * 31).astype(jnp.int32) % 16
        return layer.attend(jnp.tanh(layer(ids)))

    return lambda: nn.Embed(16, 8, **WIDE), (BATCH, 4), look_up


@of_linen("MultiHeadDotProductAttention", "MultiHeadAttention", "SelfAttention")
def _linen_attention(pick):
    kind = pick(nn.MultiHeadDotProductAttention, nn.MultiHeadAttention, nn.SelfAttention)
    heads = pick(2, 4)
    return lambda: kind(num_heads=heads, qkv_features=16), (BATCH, pick(4, 8), 8)


@of_linen("BatchNorm")
def _linen_batch_norm(pick):
    return lambda: nn.BatchNorm(
        use_running_average=False, force_float32_reductions=False, **WIDE
    ), pick((BATCH, 8), (BATCH, 4, 4, 8))


@of_linen("LayerNorm", "RMSNorm", "InstanceNorm", "GroupNorm")
def _linen_norms(pick):
    kind = pick(
        nn.LayerNorm, nn.RMSNorm, nn.InstanceNorm, functools.partial(nn.GroupNorm, num_groups=2)
    )
    return lambda: kind(), (BATCH, 4, 4, 8)


@of_linen("WeightNorm")
def _linen_weight_norm(pick):
    return lambda: nn.WeightNorm(nn.Dense(16)), (BATCH, 8)


@of_linen("SpectralNorm")
def _linen_spectral_norm(pick):
    return (
        lambda: nn.SpectralNorm(nn.Dense(16), **WIDE),
        (BATCH, 8),
        lambda layer, x: layer(x, update_stats=True),
    )


@of_linen("PReLU", "Dropout")
def _linen_prelu(pick):
    return (
        lambda: nn.PReLU(**WIDE),
        (BATCH, 8),
        lambda layer, x: nn.Dropout(0.3, deterministic=True)(layer(x)),
    )


@of_linen("Sequential")
def _linen_sequential(pick):
    return lambda: nn.Sequential([nn.Dense(16), nn.gelu, nn.Dense(8)]), (BATCH, 8)


def _linen_cell(cell: Any) -> None:
    @of_linen(cell.__name__, "RNN")
    def _make(pick):
        width = pick(4, 8)
        return lambda: nn.RNN(cell(width, **WIDE)), (BATCH, 4, 8)


for _cell in (nn.LSTMCell, nn.OptimizedLSTMCell, nn.SimpleCell, nn.GRUCell, nn.MGUCell):
    _linen_cell(_cell)


@of_linen("ConvLSTMCell")
def _conv_lstm(pick):
    return lambda: nn.RNN(nn.ConvLSTMCell(4, (3, 3), **WIDE)), (BATCH, 3, 4, 4, 4)


@of_linen("Bidirectional")
def _linen_bidirectional(pick):
    return lambda: nn.Bidirectional(nn.RNN(nn.GRUCell(4, **WIDE)), nn.RNN(nn.GRUCell(4, **WIDE))), (
        BATCH,
        4,
        8,
    )


def _pooling(library: str) -> None:
    def pool(pick: Pick) -> Any:
        package = {"nnx": nnx, "linen": nn}[library]
        name = pick(
            *(name for name in ("max_pool", "min_pool", "avg_pool") if hasattr(package, name))
        )
        size, stride, padding = pick(2, 3), pick(1, 2), pick("SAME", "VALID")
        function = getattr(package, name)
        return lambda x: function(x, (size, size), (stride, stride), padding), (
            BATCH,
            pick(4, 8),
            4,
            8,
        )

    if library == "nnx":

        @of_nnx("pooling")
        def _make(pick):
            apply, shape = pool(pick)
            return lambda rngs: nnx.Sequential(apply, nnx.Linear(8, 4, rngs=rngs)), shape
    else:

        @of_linen("pooling")
        def _make_linen(pick):
            apply, shape = pool(pick)
            return lambda: nn.Dense(4), shape, lambda layer, x: layer(apply(x))


for _library in ("nnx", "linen"):
    _pooling(_library)


@of_linen("scan")
def _scanned(pick):
    layers = pick(2, 4)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + jnp.tanh(nn.Dense(8)(x)), None

    many = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=layers)
    return lambda: many(name="stack"), (BATCH, 8), lambda layer, x: layer(x, None)[0]
