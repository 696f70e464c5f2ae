"""The Llama train step a good engineer writes by hand: JAX, optax and `NamedSharding`, nothing of this framework.

It is the yardstick of `benchmarks/step.py`. What makes it fast was measured, form by form:

- A kernel is gathered over `fsdp` by a constraint right before its matmul, and its gradient is constrained back to
  the stored sharding: each kernel crosses the network once a step in each direction (twice forward
  under remat).
- The embedding keeps its vocabulary whole and splits its columns. Rows are looked up where their columns are and then
  exchanged for whole rows of the device's own tokens: activations move instead of the table, and
  over `fsdp` its gradient needs no sum.
- The scan over layers is unrolled unless it recomputes, and attention skips the blocks above the diagonal.
- The loss finds the target's logit by comparing with an iota, which fuses into a sum, works on a split vocabulary
  and needs no second copy of the logits.
- Weight gradients leave the matmul in float32: sums over devices are float32 whatever the compute dtype.
"""

import argparse
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Tree = Any
BATCH = ("data", "fsdp")
COLUMN = P("fsdp", "tensor")
ROW = P("tensor", "fsdp")
KERNELS = {
    "q": COLUMN,
    "k": COLUMN,
    "v": COLUMN,
    "o": ROW,
    "gate": COLUMN,
    "up": COLUMN,
    "down": ROW,
}
EMBEDDING = P(None, ("fsdp", "tensor"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def dense(
    x: jax.Array, kernel: jax.Array, stored: NamedSharding, out_dtype: jnp.dtype
) -> jax.Array:
    """`x @ kernel` in the dtype of `x`, the kernel cast and gathered over `fsdp` first.

    Args:
        x: `[..., in]`.
        kernel: `[in, out]`, float32.
        stored: How the kernel, and therefore its gradient, is split.
        out_dtype: The dtype of the product.

    Returns:
        `[..., out]`.
    """
    return _dense_forward(x, kernel, stored, out_dtype)[0]


def _dense_forward(
    x: jax.Array, kernel: jax.Array, stored: NamedSharding, out_dtype: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    whole = NamedSharding(
        stored.mesh, P(*(None if entry == "fsdp" else entry for entry in stored.spec))
    )
    gathered = jax.lax.with_sharding_constraint(kernel.astype(x.dtype), whole)
    return jnp.matmul(x, gathered, preferred_element_type=out_dtype), (x, gathered)


def _dense_backward(
    stored: NamedSharding, out_dtype: jnp.dtype, saved: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, gathered = saved
    dy = dy.astype(x.dtype)
    dx = jnp.einsum("...o,io->...i", dy, gathered)
    dkernel = jnp.einsum("...i,...o->io", x, dy, preferred_element_type=jnp.float32)
    return dx, jax.lax.with_sharding_constraint(dkernel, stored)


dense.defvjp(_dense_forward, _dense_backward)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """`x / sqrt(mean(x²) + 1e-5) · scale` over the last dimension, in float32, returned in the dtype of `x`."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + 1e-5)
    return (x32 * inverse * scale).astype(x.dtype)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding of `[batch, seq, heads, head_dim]`: first half against second half, theta 10000."""
    seq, head_dim = x.shape[1], x.shape[3]
    frequency = 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    angle = (np.arange(seq)[:, None] * frequency)[:, None, :]
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, rows: int = 128) -> jax.Array:
    """Causal grouped-query attention, `rows` queries at a time, each against only the keys it can see.

    Args:
        q: `[batch, seq, heads, head_dim]`.
        k: `[batch, seq, kv_heads, head_dim]`.
        v: `[batch, seq, kv_heads, head_dim]`.
        rows: Queries in one block.

    Returns:
        `[batch, seq, heads, head_dim]`.
    """
    seq, parts = q.shape[1], []
    for start in range(0, seq, rows):
        end = min(start + rows, seq)
        visible = np.tril(np.ones((end - start, end), bool), k=start)[None, None]
        parts.append(
            jax.nn.dot_product_attention(q[:, start:end], k[:, :end], v[:, :end], mask=visible)
        )
    return jnp.concatenate(parts, axis=1)


def make_loss(
    mesh: Mesh, args: argparse.Namespace
) -> Callable[[Tree, Mapping[str, jax.Array]], jax.Array]:
    """Return the token-weighted mean cross-entropy of the model, as a function of parameters and batch.

    Args:
        mesh: Axes `data`, `fsdp`, `tensor`.
        args: The model's sizes, `dtype` and `remat`.

    Returns:
        `(params, {"tokens", "targets", "weights"}: [batch, seq] each) -> loss`, a float32 scalar.
    """
    dtype = jnp.dtype(args.dtype)
    head_dim = args.d_model // args.heads

    def constrain(x: jax.Array, *spec: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def project(x: jax.Array, layer: Tree, name: str) -> jax.Array:
        return dense(x, layer[name], NamedSharding(mesh, KERNELS[name]), dtype)

    def heads(x: jax.Array) -> jax.Array:
        return constrain(x.reshape(*x.shape[:2], -1, head_dim), BATCH, None, "tensor", None)

    def block(x: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
        h = rms_norm(x, layer["attention_norm"])
        q, k, v = (heads(project(h, layer, name)) for name in ("q", "k", "v"))
        attended = attend(rotate(q), rotate(k), v)
        attended = constrain(attended.reshape(x.shape), BATCH, None, "tensor")
        x = x + constrain(project(attended, layer, "o"), BATCH, None, None)
        h = rms_norm(x, layer["mlp_norm"])
        hidden = jax.nn.silu(project(h, layer, "gate")) * project(h, layer, "up")
        hidden = constrain(hidden, BATCH, None, "tensor")
        return x + constrain(project(hidden, layer, "down"), BATCH, None, None), None

    # Unrolled, the compiler does not copy residuals in and out of stacks; a loop is what makes
    # recomputation stick.
    unroll = args.layers if args.remat == "none" else 1
    if args.remat == "full":
        block = jax.checkpoint(block, prevent_cse=False)

    def embed(table: jax.Array, tokens: jax.Array) -> jax.Array:
        rows = table.at[constrain(tokens, "data", None)].get(mode="clip").astype(dtype)
        rows = constrain(rows, "data", None, EMBEDDING[1])
        # In two hops: in one, the partitioner falls back to copying everything everywhere.
        rows = constrain(rows, "data", None, "fsdp")
        return constrain(rows, BATCH, None, None)

    def loss(params: Tree, batch: Mapping[str, jax.Array]) -> jax.Array:
        x = embed(params["embedding"], batch["tokens"])
        x, _ = jax.lax.scan(block, x, params["layers"], unroll=unroll)
        h = rms_norm(x, params["norm"])
        logits = dense(h, params["head"], NamedSharding(mesh, COLUMN), jnp.dtype(jnp.float32))
        logits = constrain(logits, BATCH, None, "tensor")
        is_target = (
            jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == batch["targets"][..., None]
        )
        target = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
        losses = jax.nn.logsumexp(logits, axis=-1) - target
        return jnp.sum(losses * batch["weights"]) / jnp.sum(batch["weights"])

    return loss


def param_specs() -> Tree:
    """Return the `PartitionSpec` of every parameter.

    Those of `layers` have the unsplit layer dimension in front.
    """
    layer = {name: P(None, *spec) for name, spec in KERNELS.items()}
    return {
        "embedding": EMBEDDING,
        "head": COLUMN,
        "norm": P(),
        "layers": layer | {"attention_norm": P(), "mlp_norm": P()},
    }


def init_params(key: jax.Array, args: argparse.Namespace) -> Tree:
    """Matrices from a normal distribution of standard deviation 0.02 and norm scales of one, all float32."""
    d, ff, kv = args.d_model, args.d_ff, args.kv_heads * args.d_model // args.heads
    kernels = {
        "q": (d, d),
        "k": (d, kv),
        "v": (d, kv),
        "o": (d, d),
        "gate": (d, ff),
        "up": (d, ff),
        "down": (ff, d),
    }
    keys = iter(jax.random.split(key, len(kernels) + 2))

    def normal(*shape: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), shape, jnp.float32)

    norms = {name: jnp.ones((args.layers, d)) for name in ("attention_norm", "mlp_norm")}
    return {
        "embedding": normal(args.vocab, d),
        "head": normal(d, args.vocab),
        "norm": jnp.ones(d),
        "layers": {name: normal(args.layers, *shape) for name, shape in kernels.items()} | norms,
    }


class BareSide:
    """The compiled step with its state.

    Args:
        args: The options of `benchmarks/step.py`; `args.mesh` maps each axis to its size.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        sizes = tuple(args.mesh[axis] for axis in ("data", "fsdp", "tensor"))
        mesh = jax.make_mesh(sizes, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
        loss = make_loss(mesh, args)
        adamw = optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)

        def init(key: jax.Array) -> tuple[Tree, Tree]:
            params = init_params(key, args)
            return params, optimizer.init(params)

        def step(
            state: tuple[Tree, Tree], batch: Mapping[str, jax.Array]
        ) -> tuple[tuple[Tree, Tree], jax.Array]:
            params, slots = state
            value, grads = jax.value_and_grad(loss)(params, batch)
            updates, slots = optimizer.update(grads, slots, params)
            return (optax.apply_updates(params, updates), slots), value

        def bind(spec: P) -> NamedSharding:
            return NamedSharding(mesh, spec)

        whole, self._split = bind(P()), bind(P(BATCH))
        params = jax.tree.map(bind, param_specs(), is_leaf=lambda leaf: isinstance(leaf, P))
        slots = optax.tree.map_params(
            optimizer,
            lambda _, sharding: sharding,
            jax.eval_shape(init, jax.random.key(0))[1],
            params,
            transform_non_params=lambda _: whole,
        )
        self._state = jax.jit(init, out_shardings=(params, slots))(jax.random.key(0))
        self.params = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self._state[0]))

        def abstract(dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((args.batch, args.seq), dtype, sharding=self._split)

        batch = {
            "tokens": abstract(jnp.int32),
            "targets": abstract(jnp.int32),
            "weights": abstract(jnp.float32),
        }
        jitted = jax.jit(step, donate_argnums=0, out_shardings=((params, slots), whole))
        start = time.perf_counter()
        self.compiled = jitted.lower(self._state, batch).compile()
        self.compile_s = time.perf_counter() - start

    def run(self, batch: Mapping[str, np.ndarray]) -> jax.Array:
        """Take one step on a host batch of `[batch, seq]` arrays.

        The loss is ready when the step is.
        """
        self._state, loss = self.compiled(self._state, jax.device_put(dict(batch), self._split))
        return loss


def make(args: argparse.Namespace) -> BareSide:
    """Build the hand-written side of the comparison."""
    return BareSide(args)
