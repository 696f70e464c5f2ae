"""Keys and values of the tokens so far, so that the next token is computed alone.

A text is written in two programs. `prefill` runs the model on the prompts as ever, and keeps the keys and values that
each call of `spmd.layers.attention.attend` gets. `decode` runs it on one token of each row: `attend` then looks at
what is kept, and the model is none the wiser.

```
prefill   prompts [batch, seq] ──▶ model ──▶ logits, cache [layer, batch, length, kv_heads, dim]
decode    tokens  [batch, 1]   ──▶ model ──▶ logits, keys and values of this token ──▶ written into the cache
                                     ▲ attend reads the cache, each layer its own
```

The layers only read: what all of them add is written at once, in place. Rows need not be equally long: each has a
position of its own. On a mesh the cache is split like keys and values are: batch, tokens over `sequence`, heads over
`tensor`, and layers over `pipe`.

Layers that are scanned or checkpointed are functions of arrays, so each takes its part of the cache as an argument and
returns what it adds (`isolate_layer`, `thread_cache`, `collect_cache`); `spmd.models.layers.run_layers` calls these for
every model.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from spmd.errors import CacheError, Problem
from spmd.layers.blockwise_attention import MASK_VALUE
from spmd.layers.soft_cap import soft_capped
from spmd.plan.context import current, override
from spmd.sharding.mesh import BATCH_AXES, AnyMesh, shards_of

T = TypeVar("T")

Cache = tuple[Any, ...]
"""What calls of `attend` keep, in their order: an `KVCache`, or a tuple of what each of a stack of layers keeps."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """The keys and values of one call of `attend`, or of that call in each of a stack of layers.

    Attributes:
        key: `[batch, length, kv_heads, dim]`, of a stack of layers `[layer, batch, length, kv_heads, dim]`.
        value: Like the keys.
    """

    key: Float[Array, "*layer batch length kv_heads dim"]
    value: Float[Array, "*layer batch length kv_heads dim"]


_TITLE = "Keys and values of this attention cannot be kept:"


class _Calls:
    """The calls in one function: what is there for them, in their order, and what they add."""

    def __init__(self, given: Iterable[Any] = ()) -> None:
        self.given = iter(given)
        self.added: list[Any] = []
        self._state = get_opaque_trace_state(convention="flax")

    def add(self, kept: Any) -> None:
        """Keeps what the next call adds, if it is an array of this function and of none inside of it."""
        if get_opaque_trace_state(convention="flax") != self._state:
            what = "is called inside of a transformation, such as jax.lax.scan, that run_layers knows nothing of"
            raise CacheError(_TITLE, [Problem("attend", what, fix="run layers by run_layers, or in a loop of Python")])
        self.added.append(kept)


class _Trace:
    """One trace of a model; of decoding, if tokens have positions.

    It is compared by identity, so JAX reuses no trace of another one's inner functions.
    """

    def __init__(self, given: Cache, positions: Array | None, length: int) -> None:
        self.positions, self.length = positions, length
        self.calls = [_Calls(given)]  # the innermost function that is traced is the last one

    def take(self) -> Any:
        """What is there for the next call; nothing in a prefill."""
        return () if self.positions is None else next(self.calls[-1].given)


def prefill(run: Callable[[], T], length: int) -> tuple[T, Cache]:
    """`run()`, and the keys and values of its calls of `attend`.

    Args:
        run: Runs a model on prompts `[batch, seq]`, which may have padding behind them.
        length: Tokens that the cache has room for; at least those of a prompt.

    Raises:
        CacheError: Tokens see what is behind them, documents share a row, or `attend` is called where none can follow.

    Example:
        >>> from spmd.layers.attention import attend
        >>> x = jnp.ones((1, 3, 2, 8))
        >>> _, cache = prefill(lambda: attend(x, x, x), length=4)
        >>> cache[0].key.shape
        (1, 4, 2, 8)
    """
    with _traced(_Trace((), None, length)) as trace:
        result = run()
        added = tuple(trace.calls[-1].added)

    def pad(x: Array) -> Array:
        return jnp.pad(x, [(0, length - x.shape[-3] if dim == x.ndim - 3 else 0) for dim in range(x.ndim)])

    return result, split(jax.tree.map(pad, added))


def decode(run: Callable[[], T], cache: Cache, positions: Int[Array, "batch"]) -> tuple[T, Cache]:
    """`run()`, and the cache with one more token in each row.

    Args:
        run: Runs the model on one token of each row, `[batch, 1]`.
        cache: From `prefill`, or the decoding of the tokens before.
        positions: The position of each row's token. Everything before it is in the cache.

    Raises:
        CacheError: As `prefill`.
    """
    first = next((leaf for leaf in jax.tree.leaves(cache)), None)
    length = 0 if first is None else first.shape[-3]
    with _traced(_Trace(cache, positions, length)) as trace, single_token():
        result = run()
        added = tuple(trace.calls[-1].added)
    return result, split(jax.tree.map(lambda whole, new: _written(whole, new, positions), cache, added))


@contextlib.contextmanager
def _traced(trace: _Trace) -> Iterator[_Trace]:
    with override(kv_cache=trace):
        yield trace
    trace.positions, trace.calls = None, []  # JAX's caches are keyed by it, and would keep these


@contextlib.contextmanager
def single_token() -> Iterator[None]:
    """Inside, tokens come one at a time: the dimension of activations that has one is split over no axis."""
    with override(single_token=True):
        yield


def token_positions() -> Int[Array, "batch 1"] | None:
    """The positions of the tokens that are decoded; None where none are."""
    trace = current().kv_cache
    return None if trace is None or trace.positions is None else trace.positions[:, None]


def cache_length() -> int:
    """How many tokens the cache in use has room for."""
    return current().kv_cache.length


def cached_attention(
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    segments: Array | None,
    *,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    causal: bool = True,
) -> Float[Array, "batch 1 heads dim"] | None:
    """Attention of a token that is decoded; of anything else None, and in a prefill keys and values are kept.

    Args:
        query: As for `attend`, as are all others.
        key: Keys.
        value: Values.
        segments: The document of each token, or None.
        window: How many tokens each one sees, itself included.
        scale: Of the products of queries and keys; None for `dim ** -0.5`.
        soft_cap: What scores stay below; None for no cap.
        causal: Whether tokens are seen by those behind them alone.

    Raises:
        CacheError: Tokens see what comes behind them, or documents share a row.
    """
    trace = current().kv_cache
    if trace is None:
        return None
    problems = [
        Problem(name, f"is {value}", fix=fix)
        for name, value, wrong, fix in (
            ("segments", "given", segments is not None, "None: a row is one document"),
            ("causal", causal, not causal, "True: a text is written from its beginning to its end"),
        )
        if wrong
    ]
    if problems:
        raise CacheError(_TITLE, problems)
    past = trace.take()
    trace.calls[-1].add(KVCache(key, value))
    if trace.positions is None:
        return None
    return _attend(query, KVCache(key, value), past, trace.positions, window, scale, soft_cap)


def _attend(
    query: Array,
    own: KVCache,
    past: KVCache,
    positions: Array,
    window: int | None,
    scale: float | None,
    soft_cap: float | None,
) -> Array:
    """One token of each row looks at those before it, and at itself; the softmax is in float32."""
    batch, _, heads, dim = query.shape
    grouped = query.reshape(batch, own.key.shape[2], -1, dim)
    place = jnp.arange(past.key.shape[1])[None]
    seen = place < positions[:, None]
    if window is not None:
        seen = seen & (place > positions[:, None] - window)

    def scores(form: str, key: Array) -> Array:
        products = jnp.einsum(form, grouped, key, preferred_element_type=jnp.float32) * (scale or dim**-0.5)
        return soft_capped(products, soft_cap)

    before = jnp.where(seen[:, None, None], scores("bhgd,blhd->bhgl", past.key), MASK_VALUE)
    itself = scores("bhgd,bkhd->bhgk", own.key)
    largest = jnp.maximum(before.max(axis=-1, keepdims=True), itself)
    before, itself = jnp.exp(before - largest), jnp.exp(itself - largest)
    out = jnp.einsum(
        "bhgl,blhd->bhgd", before.astype(past.value.dtype), past.value, preferred_element_type=jnp.float32
    ) + itself * own.value.astype(jnp.float32).swapaxes(1, 2)
    return (out / (before.sum(axis=-1, keepdims=True) + itself)).reshape(batch, 1, heads, dim).astype(query.dtype)


def _written(whole: Array, new: Array, positions: Array) -> Array:
    """The cache with one token in each row, at the row's position."""
    rows = whole.ndim - 4

    def write(row: Array, token: Array, at: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(row, token.astype(row.dtype), at, axis=row.ndim - 3)

    return jax.vmap(write, in_axes=(rows, rows, 0), out_axes=rows)(whole, new, positions)


def split(cache: Cache) -> Cache:
    """The cache as it lies on the mesh of the plan in scope; as it is, outside of a plan."""
    mesh = current().mesh
    if mesh is None:
        return cache
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, _spec(x.shape, mesh))), cache)


def _spec(shape: tuple[int, ...], mesh: AnyMesh) -> P:
    """Heads and layers are split where they divide."""
    stacks = ("pipe", *(None,) * (len(shape) - 5)) if len(shape) > 4 else ()
    entries = (*stacks, BATCH_AXES, "sequence", "tensor")
    return P(*(e if n % shards_of(e, mesh.shape) == 0 else None for e, n in zip(entries, shape, strict=False)))


Layer = Callable[..., Any]
"""A layer as a function of its state and arrays."""


def isolate_layer(layer: Layer) -> Layer:
    """With a cache, `((state, part of the cache), *arrays) -> (result, what is added)`; without one, `layer` as it is.

    Args:
        layer: `(state, *arrays) -> result`.
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


def thread_cache(step: Callable[..., tuple[Any, Any]], each: Any) -> tuple[Callable[..., tuple[Any, Any]], Any]:
    """With a cache, a step over layers that hands each its part; without one, both as they are.

    Args:
        step: `(layer, x, state, own) -> (x, value)`, which calls `layer(state, …)` once.
        each: What each layer has of its own, with a leading layer dimension.

    Returns:
        A step for layers that are `isolate_layer`, and `each` with what the cache has for each layer. Its values go
        through `collect_cache`.
    """
    trace = current().kv_cache
    if trace is None:
        return step, each

    def run(layer: Layer, x: Any, state: Any, own_and_part: tuple[Any, Any]) -> tuple[Any, Any]:
        own, part = own_and_part
        added: list[Any] = []

        def plain(state: Any, *arrays: Any) -> Any:
            result, new = layer((state, part), *arrays)
            added.append(new)
            return result

        x, value = step(plain, x, state, own)
        return x, (value, added[0])

    return run, (each, trace.take())


def collect_cache(values: Any) -> Any:
    """The values of a step over layers; what the layers add to the cache is taken out of them."""
    trace = current().kv_cache
    if trace is None:
        return values
    values, added = values
    trace.calls[-1].add(added)
    return values
