"""KV cache: keys and values of preceding tokens, to compute the next token alone.

`prefill` runs the model on the prompts and saves the keys and values of each call of
`spmd.layers.attention.attend`. `decode` runs the same model code on one token of each row: `attend`
reads the cache.

```
prefill   prompts [batch, seq] ──▶ model ──▶ logits, cache [layer, batch, length, kv_heads, dim]
decode    tokens  [batch, 1]   ──▶ model ──▶ logits, keys and values of this token ──▶ the cache
                                     ▲ attend reads the cache of its layer
```

Layers only read; the entries of all are written at once, in place. Rows may have different lengths:
each has its own position. On a mesh the cache is split like keys and values: batch, tokens over
`sequence`, heads over `tensor`, and layers over `pipe`.

Scanned or checkpointed layers are functions of arrays, so each takes its part of the cache as an
argument and returns its own entries (`isolate_layer`, `thread_cache`, `collect_cache`);
`spmd.models.decoder.layer_stack.run_layers` calls these.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from spmd.errors import CacheError, Problem
from spmd.layers.attention_options import AttentionOptions
from spmd.layers.blockwise_attention import MASK_VALUE
from spmd.layers.soft_cap import soft_capped
from spmd.plan.context import current, override
from spmd.sharding.mesh import BATCH_AXES, AnyMesh, shards_of

T = TypeVar("T")

Cache = tuple[Any, ...]
"""An entry for each call of `attend`, in order: a `KVCache`, or a tuple of the entries of a stack
of layers."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """The keys and values of one call of `attend`, stacked for a stack of layers."""

    key: Float[Array, "*layer batch length kv_heads dim"]
    value: Float[Array, "*layer batch length kv_heads dim"]


_TITLE = "The KV cache does not support this attention:"


class _Calls:
    """The calls of `attend` in one traced function: entries given to it, and entries it adds."""

    def __init__(self, given: Iterable[Any] = ()) -> None:
        self.given = iter(given)
        self.added: list[Any] = []
        self._state = get_opaque_trace_state(convention="flax")

    def add(self, entry: Any) -> None:
        """Add the entry of the next call.

        Raises:
            CacheError: The call is in an inner traced function, so its arrays cannot leave it.
        """
        if get_opaque_trace_state(convention="flax") != self._state:
            problem = Problem(
                "attend",
                "is called inside of a transformation, such as jax.lax.scan, that run_layers "
                "does not control",
                fix="run layers by run_layers, or in a Python loop",
            )
            raise CacheError(_TITLE, [problem])
        self.added.append(entry)


class _Trace:
    """One trace of a model, compared by identity so that JAX's caches are not shared by traces.

    `positions` are those of decoding, None in prefill.
    """

    def __init__(self, given: Cache, positions: Array | None, length: int) -> None:
        self.positions = positions
        self.length = length
        self.calls = [_Calls(given)]  # a stack; the last one is of the innermost traced function

    def take(self) -> Any:
        """Return the entry of the next call; an empty one in prefill."""
        if self.positions is None:
            return ()
        return next(self.calls[-1].given)


def prefill(run: Callable[[], T], length: int) -> tuple[T, Cache]:
    """Return `run()` of a model on prompts `[batch, seq]`, and the cache of its calls of `attend`.

    Prompts may be padded at the end. The cache holds `length` tokens. Attention must be causal,
    over one document in each row, and outside of transformations.

    Example:
        >>> from spmd.layers.attention import attend
        >>> x = jnp.ones((1, 3, 2, 8))
        >>> _, cache = prefill(lambda: attend(x, x, x), length=4)
        >>> cache[0].key.shape
        (1, 4, 2, 8)
    """
    result, added = _trace(run, _Trace((), None, length))

    def pad(x: Array) -> Array:
        widths = [(0, 0)] * x.ndim  # of [*layer, batch, length, kv_heads, dim]
        widths[-3] = (0, length - x.shape[-3])
        return jnp.pad(x, widths)

    cache = jax.tree.map(pad, added)
    return result, _split(cache)


def decode(run: Callable[[], T], cache: Cache, positions: Int[Array, "batch"]) -> tuple[T, Cache]:
    """Return `run()` of the model on one token of each row, `[batch, 1]`, and the new cache.

    The new cache has these tokens. `positions` are those of the tokens; all preceding ones are in
    the cache.
    """
    length = next((x.shape[-3] for x in jax.tree.leaves(cache)), 0)
    with single_token():
        result, added = _trace(run, _Trace(cache, positions, length))
    write = functools.partial(_write, positions=positions)
    cache = jax.tree.map(write, cache, added)
    return result, _split(cache)


def _trace(run: Callable[[], T], trace: _Trace) -> tuple[T, Cache]:
    """Return `run()` and the entries of its calls of `attend`."""
    with override(kv_cache=trace):
        result = run()
    added = tuple(trace.calls[-1].added)
    # JAX's caches have the trace as a key, and would keep these arrays alive.
    trace.positions = None
    trace.calls = []
    return result, added


def single_token() -> contextlib.AbstractContextManager[None]:
    """Leave the token dimension of activations unsplit inside: it has size 1."""
    return override(single_token=True)


def token_positions() -> Int[Array, "batch 1"] | None:
    """Return the positions of the tokens of a `decode`; None outside."""
    trace = current().kv_cache
    if trace is None or trace.positions is None:
        return None
    return trace.positions[:, None]


def cache_length() -> int:
    """Return the length of the cache in use, in tokens."""
    return current().kv_cache.length


def context_length(sequence: int) -> int:
    """Return the length of the longest text, in tokens.

    It is that of the cache in prefill and decoding, `sequence` otherwise.
    """
    trace = current().kv_cache
    if trace is None:
        return sequence
    return trace.length


def cached_attention(
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    segments: Array | None,
    options: AttentionOptions,
) -> Float[Array, "batch 1 heads dim"] | None:
    """Return the attention of a decoded token; None outside of decoding.

    In prefill and decoding, the keys and values are added to the cache.
    """
    trace = current().kv_cache
    if trace is None:
        return None
    problems = []
    if segments is not None:
        problems.append(Problem("segments", "are given", fix="None: a row is one document"))
    if not options.causal:
        fix = "True: tokens are generated from first to last"
        problems.append(Problem("causal", "is False", fix=fix))
    if problems:
        raise CacheError(_TITLE, problems)
    past = trace.take()
    own = KVCache(key, value)
    trace.calls[-1].add(own)
    if trace.positions is None:
        return None
    return _attend(query, own, past, trace.positions, options)


def _attend(
    query: Array, own: KVCache, past: KVCache, positions: Array, options: AttentionOptions
) -> Array:
    """Attend from one token of each row to itself and cached tokens, with a softmax in float32."""
    batch, _, heads, dim = query.shape
    grouped = query.reshape(batch, own.key.shape[2], -1, dim)
    cached = jnp.arange(past.key.shape[1])[None]
    mask = cached < positions[:, None]
    if options.window is not None:
        mask = mask & (cached > positions[:, None] - options.window)

    scale = options.scale or dim**-0.5

    def scores(form: str, key: Array) -> Array:
        products = jnp.einsum(form, grouped, key, preferred_element_type=jnp.float32)
        return soft_capped(products * scale, options.soft_cap)

    mask = mask[:, None, None]  # [batch, 1, 1, cached]
    before = jnp.where(mask, scores("bhgd,blhd->bhgl", past.key), MASK_VALUE)
    itself = scores("bhgd,bkhd->bhgk", own.key)
    largest = jnp.maximum(before.max(axis=-1, keepdims=True), itself)
    before = jnp.exp(before - largest)
    itself = jnp.exp(itself - largest)
    weights = before.astype(past.value.dtype)
    form = "bhgl,blhd->bhgd"
    out = jnp.einsum(form, weights, past.value, preferred_element_type=jnp.float32)
    out = out + itself * own.value.astype(jnp.float32).swapaxes(1, 2)
    total = before.sum(axis=-1, keepdims=True) + itself
    out = out / total
    out = out.reshape(batch, 1, heads, dim)
    return out.astype(query.dtype)


def _write(whole: Array, new: Array, positions: Array) -> Array:
    """Write one token of each row into the cache, at the row's position."""
    rows = whole.ndim - 4

    def write(row: Array, token: Array, at: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(
            row, token.astype(row.dtype), at, axis=row.ndim - 3
        )

    return jax.vmap(write, in_axes=(rows, rows, 0), out_axes=rows)(whole, new, positions)


def _split(cache: Cache) -> Cache:
    """Split the cache over the mesh of the plan in scope, if any.

    A dimension that does not divide is not split.
    """
    mesh = current().mesh
    if mesh is None:
        return cache

    def constrain(x: Array) -> Array:
        sharding = NamedSharding(mesh, _cache_spec(x.shape, mesh))
        return jax.lax.with_sharding_constraint(x, sharding)

    return jax.tree.map(constrain, cache)


def _cache_spec(shape: tuple[int, ...], mesh: AnyMesh) -> P:
    """Return the spec of an array of the cache, `[*layer, batch, length, kv_heads, dim]`."""
    wanted: list[Any] = [BATCH_AXES, "sequence", "tensor"]
    stacks = len(shape) - 4
    if stacks > 0:
        wanted = ["pipe", *[None] * (stacks - 1), *wanted]
    entries = []
    for entry, size in zip(wanted, shape, strict=False):
        divides = size % shards_of(entry, mesh.shape) == 0
        entries.append(entry if divides else None)
    return P(*entries)


Layer = Callable[..., Any]
"""A layer as a function of its state and arrays."""


def isolate_layer(layer: Layer) -> Layer:
    """Make the cache an argument of a layer `(state, *arrays) -> result`.

    Without a cache, return it unchanged. The new layer is `((state, entries), *arrays) -> (result,
    added entries)`.
    """
    trace = current().kv_cache
    if trace is None:
        return layer

    def run(state_and_part: tuple[Any, Any], *arrays: Any) -> tuple[Any, Any]:
        state, part = state_and_part
        trace.calls.append(_Calls(part))
        try:
            result = layer(state, *arrays)
            return result, tuple(trace.calls[-1].added)
        finally:
            trace.calls.pop()

    return run


def thread_cache(
    step: Callable[..., tuple[Any, Any]], each: tuple[Any, ...]
) -> tuple[Callable[..., tuple[Any, Any]], tuple[Any, ...]]:
    """Make a step over layers pass each layer its cache entries.

    Without a cache, return both unchanged. `step` is `(layer, x, state, own) -> (x, value)`, calls
    `layer(state, …)` once and gets layers from `isolate_layer`. Pass its values to `collect_cache`.
    `each` are inputs for each layer of a repeated group, with a leading dimension of repeats; the
    cache entries are added.
    """
    trace = current().kv_cache
    if trace is None:
        return step, each

    def run(layer: Layer, x: Any, state: Any, own_and_part: tuple[Any, Any]) -> tuple[Any, Any]:
        own, part = own_and_part
        added: Any = None

        def plain(state: Any, *arrays: Any) -> Any:
            nonlocal added
            result, added = layer((state, part), *arrays)
            return result

        x, value = step(plain, x, state, own)
        return x, (value, added)

    parts = trace.take() or ((),) * len(each)
    return run, tuple(zip(each, parts, strict=True))


def collect_cache(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Remove the added cache entries from the values of layers, and save them.

    The values are of each layer of a repeated group, as the inputs of `thread_cache`.
    """
    trace = current().kv_cache
    if trace is None:
        return values
    own, added = zip(*values, strict=True)
    trace.calls[-1].add(added)
    return own
