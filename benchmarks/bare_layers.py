"""One layer over several devices by hand: `jax.shard_map` with every collective in it, and nothing of the framework.

These are the yardsticks of `benchmarks/layers.py`. Each takes parameters in the nested dictionary
that the framework's module has, so that both sides compute with the same numbers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from benchmarks.bare_jax import attend, rms_norm, rotate

Tree = Any
MASK_VALUE = -1e30


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer by hand.

    Attributes:
        mesh: Its devices.
        apply: `(params, x) -> y`, on global arrays.
        params: The spec of every parameter.
        x: The spec of `x` and of `y`, `[batch, seq, d]`.
    """

    mesh: Mesh
    apply: Callable[[Tree, jax.Array], jax.Array]
    params: Tree
    x: P


def _layer(
    axis: str, devices: int, local: Callable[[Tree, jax.Array], jax.Array], params: Tree, x: P
) -> Layer:
    mesh = jax.make_mesh((devices,), (axis,), axis_types=(AxisType.Auto,))
    return Layer(
        mesh, jax.shard_map(local, mesh=mesh, in_specs=(params, x), out_specs=x), params, x
    )


def _kernels(**specs: P) -> dict[str, dict[str, P]]:
    return {f"{name}_proj": {"kernel": spec} for name, spec in specs.items()}


def _heads(x: jax.Array, head_dim: int) -> jax.Array:
    return x.reshape(*x.shape[:2], -1, head_dim)


@jax.custom_vjp
def project(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`x @ kernel` of `[..., row, in]` and `[in, out]`, or of `[expert, row, in]` and `[expert, in, out]`."""
    return x @ kernel


def _project_backward(
    saved: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # Left to JAX, the kernel's gradient is a transposed product, which XLA:CPU computes by a slower
    # routine.
    x, kernel = saved
    terms = "eni,eno->eio" if kernel.ndim == 3 else "...i,...o->io"
    return dy @ kernel.swapaxes(-1, -2), jnp.einsum(terms, x, dy)


project.defvjp(lambda x, kernel: (x @ kernel, (x, kernel)), _project_backward)


def tensor_layer(devices: int, head_dim: int) -> Layer:
    """Return a Llama block, Megatron style: heads and hidden units are split, two sums of tokens in each direction."""

    def local(params: Tree, x: jax.Array) -> jax.Array:
        attention, mlp = (
            {k: v["kernel"] for k, v in params[part].items()} for part in ("attention", "mlp")
        )
        # Said once for all matmuls that take it, so that the gradient is summed over devices once.
        h = jax.lax.pcast(rms_norm(x, params["attention_norm"]["scale"]), "tensor", to="varying")
        q, k, v = (_heads(project(h, attention[f"{name}_proj"]), head_dim) for name in "qkv")
        attended = attend(rotate(q), rotate(k), v)
        x = x + jax.lax.psum(
            project(attended.reshape(*x.shape[:2], -1), attention["o_proj"]), "tensor"
        )
        h = jax.lax.pcast(rms_norm(x, params["mlp_norm"]["scale"]), "tensor", to="varying")
        hidden = jax.nn.silu(project(h, mlp["gate_proj"])) * project(h, mlp["up_proj"])
        return x + jax.lax.psum(project(hidden, mlp["down_proj"]), "tensor")

    column, row = P(None, "tensor"), P("tensor", None)
    params = {
        "attention": _kernels(q=column, k=column, v=column, o=row),
        "mlp": _kernels(gate=column, up=column, down=row),
        "attention_norm": {"scale": P()},
        "mlp_norm": {"scale": P()},
    }
    return _layer("tensor", devices, local, params, P())


def ring_layer(devices: int, head_dim: int) -> Layer:
    """Llama's attention over a ring.

    Tokens come in zigzag order, blocks i and 2n − 1 − i on device i of n.
    """

    def local(params: Tree, x: jax.Array) -> jax.Array:
        # Whole on each device; said to differ so that each gradient is summed over devices, once.
        kernels = {
            k: jax.lax.pcast(v["kernel"], "sequence", to="varying") for k, v in params.items()
        }
        half, me = x.shape[1] // 2, jax.lax.axis_index("sequence")
        starts = jnp.stack([me, 2 * devices - 1 - me]) * half
        positions = (starts[:, None] + jnp.arange(half)).reshape(-1)
        q, k, v = (_heads(project(x, kernels[f"{name}_proj"]), head_dim) for name in "qkv")
        q, k = (_rotate_at(y, positions) for y in (q, k))
        # Heads first; queries that share a key/value head are rows of one matmul: [batch, kv_heads,
        # seq·group, dim].
        batch, seq, kv_heads, _ = k.shape
        rows = (
            q.reshape(batch, seq, kv_heads, -1, head_dim)
            .swapaxes(1, 2)
            .reshape(batch, kv_heads, -1, head_dim)
        )
        out = _ring(rows, k.swapaxes(1, 2), v.swapaxes(1, 2), devices)
        out = out.reshape(batch, kv_heads, seq, -1, head_dim).swapaxes(1, 2)
        return project(out.reshape(batch, seq, -1), kernels["o_proj"])

    return _layer(
        "sequence", devices, local, _kernels(q=P(), k=P(), v=P(), o=P()), P(None, "sequence")
    )


def _rotate_at(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary embedding of `[batch, seq, heads, head_dim]` at these positions, theta 10000."""
    frequency = 10000.0 ** (-jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    angle = (positions[:, None] * frequency)[:, None, :]
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _pass_on(devices: int, arrays: Any) -> Any:
    return jax.lax.ppermute(arrays, "sequence", [(i, (i + 1) % devices) for i in range(devices)])


def _turn(turn: int, group: int, half: int, visit: Callable[..., Any], state: Any) -> Any:
    """`visit(which half of the queries, which of the keys, which are seen, state)` after so many turns.

    Late queries see early keys of every device. Beside them, early ones see early keys that come
    from an earlier device, and late ones see late keys from a later one; of a device's own they see
    both, up to themselves.
    """
    state = visit(1, 0, None, state)
    if turn == 0:
        causal = jnp.repeat(jnp.tril(jnp.ones((half, half), bool)), group, axis=0)
        return visit(1, 1, causal, visit(0, 0, causal, state))
    both = jnp.where(jax.lax.axis_index("sequence") >= turn, 0, 1)
    return visit(both, both, None, state)


def _half(x: jax.Array, which: Any) -> jax.Array:
    size = x.shape[2] // 2
    return jax.lax.dynamic_slice_in_dim(x, which * size, size, axis=2)


def _put(x: jax.Array, half: jax.Array, which: Any) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, half, which * half.shape[2], axis=2)


def _scores(q: jax.Array, k: jax.Array, seen: jax.Array | None) -> jax.Array:
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    return scores if seen is None else jnp.where(seen, scores, MASK_VALUE)


def _see(q: jax.Array, here: Any, rows: Any, keys: Any, seen: jax.Array | None, state: Any) -> Any:
    """Return the softmax of some queries after some keys: sum of values, largest score, sum of exponentials."""
    k, v = (_half(x, keys) for x in here)
    out, largest, total = (_half(x, rows) for x in state)
    scores = _scores(_half(q, rows), k, seen)
    new = jnp.maximum(largest, scores.max(axis=-1, keepdims=True))
    weights, before = jnp.exp(scores - new), jnp.exp(largest - new)
    out = out * before + jnp.einsum("bhqk,bhkd->bhqd", weights, v)
    total = total * before + weights.sum(axis=-1, keepdims=True)
    return tuple(_put(x, y, rows) for x, y in zip(state, (out, new, total), strict=True))


def _give_back(
    known: Any, here: Any, rows: Any, keys: Any, seen: jax.Array | None, gradients: Any
) -> Any:
    """Return the gradients of queries, keys and values, with the part of some queries and some keys."""
    k, v = (_half(x, keys) for x in here)
    q, dout, log_total, product = (_half(x, rows) for x in known)
    weights = jnp.exp(_scores(q, k, seen) - log_total)
    dscores = weights * (jnp.einsum("bhqd,bhkd->bhqk", dout, v) - product) * q.shape[-1] ** -0.5
    parts = (
        jnp.einsum("bhqk,bhkd->bhqd", dscores, k),
        jnp.einsum("bhqk,bhqd->bhkd", dscores, q),
        jnp.einsum("bhqk,bhqd->bhkd", weights, dout),
    )
    places = (rows, keys, keys)
    return tuple(
        _put(x, _half(x, at) + part, at)
        for x, part, at in zip(gradients, parts, places, strict=True)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _ring(q: jax.Array, k: jax.Array, v: jax.Array, devices: int) -> jax.Array:
    """Attention while keys and values go around: q `[batch, kv_heads, seq·group, dim]`, k and v without `group`."""
    return _ring_forward(q, k, v, devices)[0]


def _ring_forward(q: jax.Array, k: jax.Array, v: jax.Array, devices: int) -> tuple[jax.Array, Any]:
    group, half = q.shape[2] // k.shape[2], k.shape[2] // 2
    here, state = (
        (k, v),
        (jnp.zeros_like(q), jnp.full_like(q[..., :1], MASK_VALUE), jnp.zeros_like(q[..., :1])),
    )
    for turn in range(devices):
        if turn:
            here = _pass_on(devices, here)
        state = _turn(turn, group, half, functools.partial(_see, q, here), state)
    out, largest, total = state
    out = out / total
    return out, (q, k, v, out, largest + jnp.log(total))


def _ring_backward(
    devices: int, saved: Any, dout: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys and values go around again, and their gradients with them, all the way home."""
    q, k, v, out, log_total = saved
    group, half = q.shape[2] // k.shape[2], k.shape[2] // 2
    known = q, dout, log_total, (out * dout).sum(axis=-1, keepdims=True)
    here, dq, travelling = (k, v), jnp.zeros_like(q), (jnp.zeros_like(k), jnp.zeros_like(v))
    for turn in range(devices):
        if turn:
            here, travelling = _pass_on(devices, (here, travelling))
        visit = functools.partial(_give_back, known, here)
        dq, *travelling = _turn(turn, group, half, visit, (dq, *travelling))
    return dq, *_pass_on(devices, travelling)


_ring.defvjp(_ring_forward, _ring_backward)


def expert_layer(devices: int, experts: int, top_k: int, capacity_factor: float | None) -> Layer:
    """Mixtral's experts, some on each device, and tokens sent to them and back: two all-to-alls in each direction.

    Args:
        devices: Along `expert`.
        experts: In all.
        top_k: Experts of a token.
        capacity_factor: Room of an expert in an example, relative to even load (GShard); None drops
            nothing.
    """

    def local(params: Tree, x: jax.Array) -> jax.Array:
        kernels = tuple(
            params["experts"][f"{name}_proj"]["kernel"] for name in ("gate", "up", "down")
        )
        logits = jnp.matmul(x, params["router"]["kernel"], precision="highest")
        best, chosen = jax.lax.top_k(logits, top_k)
        weights = jax.nn.softmax(best)
        if capacity_factor is None:
            return _dropless(x, chosen, weights, kernels, devices)
        capacity = math.ceil(capacity_factor * top_k * x.shape[1] / experts)
        return _by_capacity(x, chosen, weights, kernels, experts, capacity)

    params = {
        "router": {"kernel": P()},
        "experts": _kernels(gate=P("expert"), up=P("expert"), down=P("expert")),
    }
    return _layer("expert", devices, local, params, P("expert"))


def _by_capacity(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    kernels: tuple[jax.Array, ...],
    experts: int,
    capacity: int,
) -> jax.Array:
    """Each expert has so many places for each example: for first choices before second ones, for early tokens first."""
    (examples, seq, d), top_k, (gate, up, down) = x.shape, chosen.shape[-1], kernels
    queue = jax.nn.one_hot(chosen.swapaxes(1, 2).reshape(examples, -1), experts, dtype=jnp.int32)
    place = (
        ((jnp.cumsum(queue, axis=1) - 1) * queue)
        .sum(axis=-1)
        .reshape(examples, top_k, seq)
        .swapaxes(1, 2)
    )
    slot = jnp.where(place < capacity, chosen * capacity + place, experts * capacity)
    rows = jnp.arange(examples)[:, None, None]
    tokens = jnp.broadcast_to(x[:, :, None], (examples, seq, top_k, d))
    sent = jnp.zeros((examples, experts * capacity, d)).at[rows, slot].set(tokens, mode="drop")
    sent = sent.reshape(examples, experts, capacity, d).swapaxes(0, 1)
    got = jax.lax.all_to_all(sent, "expert", 0, 1, tiled=True)
    flat = got.reshape(got.shape[0], -1, d)
    made = project(jax.nn.silu(project(flat, gate)) * project(flat, up), down).reshape(got.shape)
    back = (
        jax.lax.all_to_all(made, "expert", 1, 0, tiled=True).swapaxes(0, 1).reshape(examples, -1, d)
    )
    found = back.at[rows, slot].get(mode="fill", fill_value=0)
    return (found * weights[..., None]).sum(axis=2)


def _dropless(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    kernels: tuple[jax.Array, ...],
    devices: int,
) -> jax.Array:
    """Rows are sorted by expert, sent, sorted again and multiplied group by group.

    Each device has room for all rows of every other: XLA:CPU has no all-to-all of ragged rows.
    """
    d, top_k, (gate, up, down) = x.shape[-1], chosen.shape[-1], kernels
    own, rows, queue = gate.shape[0], x.reshape(-1, d), chosen.reshape(-1)
    n, order = queue.size, jnp.argsort(queue)
    sizes = jnp.bincount(queue, length=own * devices).reshape(devices, own)
    owner, counts = queue[order] // own, sizes.sum(axis=1)
    position = jnp.arange(n) - (jnp.cumsum(counts) - counts)[owner]
    sent = jnp.zeros((devices, n, d)).at[owner, position].set(rows[order // top_k])
    got = jax.lax.all_to_all(sent, "expert", 0, 0, tiled=True).reshape(-1, d)
    theirs = jax.lax.all_to_all(sizes, "expert", 0, 0, tiled=True)
    expert = (
        (jnp.arange(n)[None, :, None] >= jnp.cumsum(theirs, axis=1)[:, None])
        .sum(axis=-1)
        .reshape(-1)
    )
    sort, groups = jnp.argsort(expert), theirs.sum(axis=0)
    mine = got[sort]
    hidden = jax.nn.silu(jax.lax.ragged_dot(mine, gate, groups)) * jax.lax.ragged_dot(
        mine, up, groups
    )
    made = (
        jnp.zeros_like(got)
        .at[sort]
        .set(jax.lax.ragged_dot(hidden, down, groups))
        .reshape(devices, n, d)
    )
    back = jax.lax.all_to_all(made, "expert", 0, 0, tiled=True)
    found = jnp.zeros((n, d)).at[order].set(back[owner, position])
    return (
        (found.reshape(-1, top_k, d) * weights.reshape(-1, top_k, 1)).sum(axis=1).reshape(x.shape)
    )
