"""Small models of primitives of `jax.lax`, whose operands depend on parameters that a table may split anywhere."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd.model_interface.model import Model
from tests.sweep.kinds import KINDS, Kind, Pick

_tanh = jnp.tanh
_softmax = functools.partial(jax.nn.softmax, axis=-1)
BATCH = 8


def drawn(shapes: dict[str, tuple[int, ...]], apply: Callable[[Any, Any], Any]) -> Model:
    """A model whose parameters have these shapes and are drawn from normal distributions."""

    def init(key: jax.Array) -> dict[str, jax.Array]:
        keys = jax.random.split(key, len(shapes))
        return {
            name: jax.random.normal(k, shape) / 2
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    return Model(init, apply)


def normal(*shape: int) -> np.ndarray:
    """Numbers of a batch."""
    return (np.random.default_rng(0).normal(size=shape) / 2).astype(np.float32)


def kind(name: str, orders: int = 2) -> Callable[[Callable[[Pick], Any]], Callable[[Pick], Any]]:
    """Adds a kind: a function of choices that returns parameter shapes, a function of `(params, x)`, and `x`."""

    def add(make: Callable[[Pick], Any]) -> Callable[[Pick], Any]:
        def build(pick: Pick) -> tuple[Model, tuple[np.ndarray, ...]]:
            shapes, apply, x = make(pick)
            return drawn(shapes, apply), (x,)

        KINDS[f"lax.{name}"] = Kind(build, orders)
        return make

    return add


def after_product(
    name: str, act: Callable[[jax.Array], jax.Array], width: int = 8, out: int = 8
) -> None:
    """Adds a kind that acts on the result of a product, `[batch, width]`, and multiplies again: `act(x @ w) @ v`."""

    @kind(name)
    def _make(pick: Pick) -> Any:
        inputs = pick(4, 8)
        shapes = {"w": (inputs, width), "v": (out, pick(4, 8))}
        return shapes, lambda p, x: act(_tanh(x @ p["w"])) @ p["v"], normal(BATCH, inputs)


def of_kernel(
    name: str, act: Callable[[jax.Array], jax.Array], shape: tuple[int, int] = (8, 8)
) -> None:
    """Adds a kind that acts on a parameter before the batch is multiplied by it."""

    @kind(f"{name} of a kernel")
    def _make(pick: Pick) -> Any:
        rows = jax.eval_shape(act, jax.ShapeDtypeStruct(shape, "float32")).shape[0]
        return {"w": shape}, lambda p, x: _tanh(x @ act(p["w"])), normal(pick(8, 16), rows)


# Products.


@kind("dot_general")
def _dense(pick):
    inputs, hidden = pick(4, 8), pick(8, 16)
    shape = pick((BATCH, inputs), (16, inputs), (BATCH, 4, inputs))
    return (
        {"w": (inputs, hidden), "v": (hidden, 4)},
        lambda p, x: _tanh(x @ p["w"]) @ p["v"],
        normal(*shape),
    )


@kind("dot_general of several dimensions")
def _general(pick):
    heads = pick(2, 4)

    def apply(p, x):
        return jnp.einsum("bsnh,nhd->bsd", _tanh(jnp.einsum("bsd,dnh->bsnh", x, p["w"])), p["v"])

    return {"w": (8, heads, 4), "v": (heads, 4, 8)}, apply, normal(BATCH, 4, 8)


@kind("dot_general with batch dimensions")
def _batched(pick):
    experts = pick(2, 4)

    def apply(p, x):
        gates = _softmax(x @ p["r"])
        hidden = _tanh(jnp.einsum("bd,edh->beh", x, p["w"]))
        return jnp.einsum("be,beh,ehd->bd", gates, hidden, p["v"])

    return (
        {"r": (8, experts), "w": (experts, 8, 16), "v": (experts, 16, 8)},
        apply,
        normal(BATCH, 8),
    )


@kind("dot_general of examples")
def _contrastive(pick):
    def apply(p, x):
        z = _tanh(x @ p["w"])
        return jax.nn.log_softmax(z @ z.T)

    return {"w": (8, pick(8, 16))}, apply, normal(pick(8, 16), 8)


@kind("dot_general of kernels")
def _kernels(pick):
    return (
        {"w": (8, 16), "v": (16, 8)},
        lambda p, x: [x @ (p["w"] @ p["v"]), p["w"].T @ p["w"]],
        normal(BATCH, 8),
    )


@kind("attention")
def _attention(pick):
    heads = pick(2, 4)

    def apply(p, x):
        q, k, v = (jnp.einsum("bsd,dnh->bsnh", x, p[name]) for name in "qkv")
        weights = _softmax(jnp.einsum("bqnh,bknh->bnqk", q, k))
        return jnp.einsum("bnqk,bknh,nhd->bqd", weights, v, p["o"])

    shapes = {name: (8, heads, 4) for name in "qkv"} | {"o": (heads, 4, 8)}
    return shapes, apply, normal(BATCH, pick(4, 8), 8)


@kind("ragged_dot", orders=1)
def _ragged(pick):
    sizes = jnp.array([2, 2, 1, 3], jnp.int32)
    return {"w": (4, 8, 16)}, lambda p, x: _tanh(lax.ragged_dot(x, p["w"], sizes)), normal(BATCH, 8)


@kind("bilinear")
def _bilinear(pick):
    return (
        {"w": (8, 8, 16)},
        lambda p, x: jnp.einsum("bi,ijk,bj->bk", x, p["w"], x),
        normal(BATCH, 8),
    )


# Convolutions and windows.


@kind("conv_general_dilated")
def _convolution(pick):
    spatial, side, size = pick(1, 2, 3), pick(4, 8), pick(1, 2, 3, 4)
    channels, features = pick(4, 8), pick(8, 16)
    groups, wide = pick(1, 1, 2, 4), pick(1, 2)
    options = {
        "window_strides": (pick(1, 1, 2),) * spatial,
        "padding": pick("SAME", "SAME", "VALID") if size <= side else "SAME",
        "rhs_dilation": (pick(1, 1, 2) if 2 * size <= side else 1,) * spatial,
        "feature_group_count": groups,
        "dimension_numbers": (
            f"N{'DHW'[-spatial:]}C",
            f"{'DHW'[-spatial:]}IO",
            f"N{'DHW'[-spatial:]}C",
        ),
    }
    sides = (side, *(4,) * (spatial - 1))
    sizes = (size, *(min(size, 3),) * (spatial - 1))

    def apply(p, x):
        x = _tanh(x @ p["w"])
        return _tanh(lax.conv_general_dilated(x, p["k"], **options)) @ p["v"]

    shapes = {
        "w": (4, channels),
        "k": (*sizes, channels // groups, features * wide),
        "v": (features * wide, 4),
    }
    return shapes, apply, normal(BATCH, *sides, 4)


@kind("conv_general_dilated by channel")
def _depthwise(pick):
    channels, multiplier, size = pick(4, 8), pick(1, 2), pick(2, 3)

    def apply(p, x):
        options = {"dimension_numbers": ("NWC", "WIO", "NWC"), "feature_group_count": channels}
        x = _tanh(x @ p["w"])
        return (
            _tanh(lax.conv_general_dilated(x, p["k"], (1,), ((size - 1, 0),), **options)) @ p["v"]
        )

    shapes = {
        "w": (4, channels),
        "k": (size, 1, channels * multiplier),
        "v": (channels * multiplier, 4),
    }
    return shapes, apply, normal(pick(8, 16), pick(4, 8), 4)


@kind("conv_general_dilated with batch groups")
def _batch_groups(pick):
    def apply(p, x):
        options = {"dimension_numbers": ("NWC", "WIO", "NWC"), "batch_group_count": 2}
        return _tanh(lax.conv_general_dilated(x, p["k"], (1,), "SAME", **options))

    return {"k": (3, 4, 8)}, apply, normal(16, 4, 4)


@kind("conv_transpose")
def _transposed(pick):
    spatial, stride = pick(1, 2), pick(1, 2)
    letters = "HW"[-spatial:]
    numbers = (f"N{letters}C", f"{letters}IO", f"N{letters}C")

    def apply(p, x):
        strides = (stride,) * spatial
        return (
            _tanh(lax.conv_transpose(x, p["k"], strides, pick_padding, dimension_numbers=numbers))
            @ p["v"]
        )

    pick_padding = pick("SAME", "VALID")
    shapes = {"k": (*(pick(2, 4),) * spatial, 4, 8), "v": (8, 4)}
    return shapes, apply, normal(BATCH, *(4,) * spatial, 4)


@kind("convolution of parameters")
def _of_parameters(pick):
    def apply(p, x):
        options = {
            "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
            "window_strides": (1, 1),
            "padding": "SAME",
        }
        patterns = lax.conv_general_dilated(p["i"], p["k"], **options)
        return (
            lax.conv_general_dilated(x * p["i"].mean(0)[None], p["k"], **options)
            + patterns.mean(0)[None]
        )

    return {"i": (4, 4, 4, 4), "k": (3, 3, 4, 8)}, apply, normal(BATCH, 4, 4, 4)


@kind("conv_general_dilated_patches")
def _patches(pick):
    def apply(p, x):
        options = {"dimension_numbers": ("NWC", "WIO", "NWC")}
        patches = lax.conv_general_dilated_patches(
            _tanh(x @ p["w"]), (3,), (1,), "VALID", **options
        )
        return jnp.einsum("blk,lko->blo", patches, p["v"])

    return {"w": (4, 4), "v": (8, 12, 4)}, apply, normal(BATCH, 10, 4)


@kind("reduce_window")
def _windows(pick):
    size, stride, padding = pick(2, 3), pick(1, 2), pick("SAME", "VALID")
    operation = pick("max", "min", "add")
    initial = {"max": -jnp.inf, "min": jnp.inf, "add": 0.0}[operation]
    window, strides = (1, size, size, 1), (1, stride, stride, 1)

    def apply(p, x):
        x = _tanh(x @ p["w"]) + p["b"][None]
        return (
            lax.reduce_window(x, initial, getattr(lax, operation), window, strides, padding)
            @ p["v"]
        )

    return {"w": (4, 8), "v": (8, 4), "b": (8, 8, 8)}, apply, normal(BATCH, 8, 8, 4)


@kind("reduce_window over channels")
def _response(pick):
    def apply(p, x):
        x = x @ p["w"]
        return x / (1 + lax.reduce_window(x**2, 0.0, lax.add, (1, 1, 1, 3), (1, 1, 1, 1), "SAME"))

    return {"w": (4, 8)}, apply, normal(BATCH, 4, 4, 4)


# Scans, cumulative operations, sorting.


@kind("scan over tokens")
def _recurrent(pick):
    width = pick(8, 16)

    def apply(p, x):
        def step(h, token):
            h = _tanh(token @ p["w"] + h @ p["u"])
            return h, h

        start = jnp.zeros((x.shape[0], width))
        return lax.scan(step, start, x.swapaxes(0, 1))[1] @ p["v"]

    return {"w": (8, width), "u": (width, width), "v": (width, 4)}, apply, normal(BATCH, 4, 8)


@kind("scan over layers")
def _layers(pick):
    layers = pick(2, 4)

    def apply(p, x):
        return lax.scan(lambda h, w: (h + _tanh(h @ w["w"]) @ w["v"], None), x, p)[0]

    return {"w": (layers, 8, 16), "v": (layers, 16, 8)}, apply, normal(BATCH, 8)


@kind("fori_loop")
def _loop(pick):
    return (
        {"w": (8, 8)},
        lambda p, x: lax.fori_loop(0, 3, lambda i, h: _tanh(h @ p["w"]), x),
        normal(BATCH, 8),
    )


@kind("cond")
def _condition(pick):
    def apply(p, x):
        return lax.cond(x.sum() > 0, lambda: _tanh(x @ p["w"]), lambda: _tanh(x @ p["v"]))

    return {"w": (8, 16), "v": (8, 16)}, apply, normal(BATCH, 8)


@kind("checkpoint")
def _checkpoint(pick):
    policy = pick(None, jax.checkpoint_policies.dots_saveable)

    def apply(p, x):
        return jax.checkpoint(lambda p, x: _tanh(x @ p["w"]) @ p["v"], policy=policy)(p, x)

    return {"w": (8, 16), "v": (16, 8)}, apply, normal(BATCH, 8)


@kind("custom_jvp")
def _custom(pick):
    return (
        {"w": (8, 16), "v": (16, 8)},
        lambda p, x: jax.nn.silu(x @ p["w"]) @ p["v"],
        normal(BATCH, 8),
    )


@kind("associative_scan")
def _associative(pick):
    def apply(p, x):
        def combine(a, b):
            return a[0] * b[0], a[1] * b[0] + b[1]

        gates, values = jax.nn.sigmoid(x @ p["w"]), _tanh(x @ p["u"])
        return lax.associative_scan(combine, (gates, values), axis=1)[1] @ p["v"]

    return {"w": (8, 8), "u": (8, 8), "v": (8, 4)}, apply, normal(BATCH, pick(4, 8), 8)


after_product("cumsum", functools.partial(jnp.cumsum, axis=-1))
after_product("cumsum over examples", functools.partial(jnp.cumsum, axis=0))
after_product("cumprod", lambda x: jnp.cumprod(1 + x / 10, axis=-1))
after_product("cummax", functools.partial(lax.cummax, axis=1))
after_product("cummin", functools.partial(lax.cummin, axis=1))
after_product("cumlogsumexp", functools.partial(lax.cumlogsumexp, axis=1))
after_product("sort", functools.partial(jnp.sort, axis=-1))
after_product("sort over examples", functools.partial(jnp.sort, axis=0))
after_product("top_k", lambda x: lax.top_k(x, 4)[0], width=16, out=4)
of_kernel("cumsum", functools.partial(jnp.cumsum, axis=0))
of_kernel("sort", functools.partial(jnp.sort, axis=0))
of_kernel("top_k", lambda w: lax.top_k(w, 4)[0], (8, 16))

# Gathers, scatters, slices, shapes.


@kind("gather")
def _lookup(pick):
    vocabulary = pick(8, 16)

    def apply(p, x):
        return _tanh(p["e"][(jnp.abs(x) * 31).astype(jnp.int32) % vocabulary]) @ p["w"]

    return {"e": (vocabulary, 8), "w": (8, 16)}, apply, normal(BATCH, 4)


@kind("gather of a tied table")
def _tied(pick):
    def apply(p, x):
        return _tanh(p["e"][(jnp.abs(x) * 31).astype(jnp.int32) % 16]) @ p["e"].T

    return {"e": (16, 8)}, apply, normal(BATCH, 4)


@kind("take_along_axis")
def _along(pick):
    def apply(p, x):
        places = jnp.argsort(x, axis=-1)
        return jnp.take_along_axis(_tanh(x @ p["w"]), places, axis=-1) @ p["v"]

    return {"w": (8, 8), "v": (8, 4)}, apply, normal(BATCH, 8)


@kind("scatter-add")
def _scatter_add(pick):
    def apply(p, x):
        return p["e"].at[(jnp.abs(x[:, 0]) * 31).astype(jnp.int32) % 16].add(_tanh(x @ p["w"]))

    return {"w": (8, 8), "e": (16, 8)}, apply, normal(BATCH, 8)


@kind("scatter")
def _scatter(pick):
    def apply(p, x):
        return p["e"].at[jnp.arange(BATCH) * 2].set(_tanh(x @ p["w"]))

    return {"w": (8, 8), "e": (16, 8)}, apply, normal(BATCH, 8)


@kind("scatter_mul")
def _scatter_mul(pick):
    def apply(p, x):
        return (
            (1 + p["e"]).at[jnp.arange(BATCH) * 2].mul(1 + _tanh(x @ p["w"]), unique_indices=True)
        )

    return {"w": (8, 8), "e": (16, 8)}, apply, normal(BATCH, 8)


@kind("segment_sum")
def _segments(pick):
    receivers = jnp.array([0, 0, 1, 2, 3, 3, 5, 7])

    def apply(p, x):
        h = _tanh(x @ p["w"])
        return jax.ops.segment_sum(h[::-1], receivers, BATCH) @ p["v"]

    return {"w": (8, 8), "v": (8, 4)}, apply, normal(BATCH, 8)


@kind("segment_max")
def _segment_max(pick):
    receivers = jnp.array([0, 0, 1, 1, 2, 2, 3, 3])
    return (
        {"w": (8, 8)},
        lambda p, x: jax.ops.segment_max(_tanh(x @ p["w"]), receivers, 4),
        normal(BATCH, 8),
    )


@kind("dynamic_slice")
def _dynamic(pick):
    def apply(p, x):
        start = (jnp.abs(x[0, 0]) * 7).astype(jnp.int32) % 8
        return x @ lax.dynamic_slice(p["w"], (start, jnp.int32(0)), (8, 8))

    return {"w": (16, 8)}, apply, normal(BATCH, 8)


@kind("dynamic_update_slice")
def _update(pick):
    def apply(p, x):
        start = (jnp.abs(x[0, 0]) * 7).astype(jnp.int32) % 8
        return x @ lax.dynamic_update_slice(p["w"], p["v"], (start, jnp.int32(0)))

    return {"w": (16, 8), "v": (8, 8)}, apply, normal(BATCH, 16)


@kind("slice and concatenate")
def _parts(pick):
    def apply(p, x):
        kernel = jnp.concatenate([p["w"][2:10], p["w"][1::2]], axis=pick_axis)
        return _tanh(jnp.concatenate([x, x], axis=-1)[:, : kernel.shape[0]] @ kernel)

    pick_axis = pick(0, 1)
    return {"w": (16, 8)}, apply, normal(BATCH, 8)


@kind("split")
def _gated(pick):
    def apply(p, x):
        a, b = jnp.split(x @ p["w"], 2, axis=-1)
        return (a * jax.nn.sigmoid(b)) @ p["v"]

    return {"w": (8, 16), "v": (8, 4)}, apply, normal(BATCH, 8)


@kind("reshape")
def _folded(pick):
    rows = pick(2, 4)

    def apply(p, x):
        return _tanh(x @ p["w"]).reshape(-1, rows, 16 // rows) @ p["v"]

    return {"w": (8, 16), "v": (16 // rows, 4)}, apply, normal(BATCH, 8)


@kind("reshape of a kernel")
def _folded_kernel(pick):
    shape, folded = pick(((4, 4, 8), (4, 32)), ((4, 4, 8), (16, 8)), ((16, 8), (8, 16)))
    return {"w": shape}, lambda p, x: _tanh(x @ p["w"].reshape(folded)), normal(BATCH, folded[0])


@kind("transpose of an image")
def _shuffled(pick):
    def apply(p, x):
        x = (x @ p["w"]).reshape(BATCH, 4, 4, 2, 2, 4)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(BATCH, 8, 8, 4) @ p["v"]

    return {"w": (4, 16), "v": (4, 4)}, apply, normal(BATCH, 4, 4, 4)


@kind("flattened image")
def _flattened(pick):
    channels = pick(2, 4)
    return (
        {"w": (16 * channels, 8)},
        lambda p, x: _tanh(x.reshape(BATCH, -1) @ p["w"]),
        normal(BATCH, 4, 4, channels),
    )


of_kernel("transpose", jnp.transpose, (16, 8))
of_kernel("pad", lambda w: jnp.pad(w, ((0, 0), (2, 3))))
of_kernel("rev", lambda w: w[::-1, ::-1])
of_kernel("tile", lambda w: jnp.tile(w, (1, 2)))
after_product("roll", functools.partial(jnp.roll, shift=1, axis=-1))
after_product("pad", lambda x: jnp.pad(x, ((0, 0), (1, 1)))[:, :-2])
after_product("rev", lambda x: x[::-1, ::-1])

# Reductions and element-wise operations.


@kind("normalized over features")
def _layer_norm(pick):
    def apply(p, x):
        h = x @ p["w"]
        h = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-3)
        return (h * p["g"][None] + p["b"][None]) @ p["v"]

    return {"w": (8, 16), "g": (16,), "b": (16,), "v": (16, 8)}, apply, normal(BATCH, 8)


@kind("normalized over examples")
def _batch_norm(pick):
    def apply(p, x):
        h = x @ p["w"]
        return (
            _tanh((h - h.mean(0)[None]) * lax.rsqrt(h.var(0) + 1e-3)[None] * p["g"][None]) @ p["v"]
        )

    return {"w": (8, 16), "g": (16,), "v": (16, 8)}, apply, normal(BATCH, 8)


@kind("normalized kernel")
def _weight_norm(pick):
    def apply(p, x):
        return _tanh(x @ (p["w"] * (lax.rsqrt((p["w"] ** 2).sum(0) + 1e-3) * p["g"])[None]))

    return {"w": (8, 16), "g": (16,)}, apply, normal(BATCH, 8)


@kind("outer product")
def _outer(pick):
    return (
        {"g": (8,), "b": (16,)},
        lambda p, x: (x * p["g"][None])[:, :, None] * p["b"][None, None],
        normal(BATCH, 8),
    )


@kind("select_n")
def _parametric(pick):
    def apply(p, x):
        h = x @ p["w"]
        return jnp.where(h > 0, h, p["a"][None] * h)

    return {"w": (8, 8), "a": (8,)}, apply, normal(BATCH, 8)


@kind("penalty of parameters")
def _penalty(pick):
    return (
        {"w": (8, 16), "v": (16, 8)},
        lambda p, x: [_tanh(x @ p["w"]) @ p["v"], p["w"], p["v"]],
        normal(BATCH, 8),
    )


@kind("complex")
def _complex(pick):
    return (
        {"a": (8, 8), "b": (8, 8)},
        lambda p, x: jnp.abs(x @ lax.complex(p["a"], p["b"])),
        normal(BATCH, 8),
    )


after_product("reduce_max", lambda x: x.max(-1, keepdims=True) + x)
after_product("reduce_prod", lambda x: (1 + x).prod(-1, keepdims=True) + x)
after_product("logsumexp", lambda x: jax.nn.logsumexp(x, axis=-1, keepdims=True) + x)
after_product("softmax over examples", functools.partial(jax.nn.softmax, axis=0))
after_product("erf", lax.erf)

# FFT and linear algebra.


def _symmetric(w: jax.Array) -> jax.Array:
    return w + w.T + 3 * jnp.diag(jnp.arange(8.0))


after_product("fft", lambda x: jnp.fft.fft(x).real)
of_kernel("fft", lambda w: jnp.fft.fft(w).real)
of_kernel("cholesky", lambda w: jnp.linalg.cholesky(w @ w.T + jnp.eye(8)))
of_kernel(
    "triangular_solve",
    lambda w: jax.scipy.linalg.solve_triangular(w + 2 * jnp.eye(8), jnp.eye(8), lower=True),
)
of_kernel("lu", lambda w: jnp.linalg.inv(w + 3 * jnp.eye(8)))
of_kernel("qr", lambda w: jnp.linalg.qr(w + 2 * jnp.eye(8))[0][:, :4])
of_kernel("svd", lambda w: jnp.linalg.svd(w + jnp.diag(jnp.arange(8.0)), compute_uv=False)[:, None])
of_kernel("eigh", lambda w: jnp.linalg.eigh(_symmetric(w))[0][:, None])
of_kernel("expm", lambda w: jax.scipy.linalg.expm(w / 3))


@kind("cholesky of examples")
def _covariances(pick):
    def apply(p, x):
        h = _tanh(x @ p["w"]).reshape(-1, 4, 4)
        return jnp.linalg.cholesky(jnp.einsum("bij,bkj->bik", h, h) + jnp.eye(4)[None])

    return {"w": (8, 16)}, apply, normal(BATCH, 8)


@kind("fft of tokens")
def _mixed(pick):
    def apply(p, x):
        return jnp.fft.fft(_tanh(x @ p["w"]), axis=1).real @ p["v"]

    return {"w": (8, 8), "v": (8, 4)}, apply, normal(BATCH, pick(4, 8), 8)
