"""Cache of generation: what token mixers keep of preceding tokens, to compute the next token alone.

`prefill` runs the model on the prompts and saves the arrays of each mixer: keys and values of
`spmd.layers.attention.attend`, or any other `spmd.layers.cache_entry.CacheEntry`. `decode` runs the
same model code on one token of each row: mixers read the cache.

```
prefill   prompts [batch, seq] ──▶ model ──▶ logits, cache [layer, batch, length, kv_heads, dim]
decode    tokens  [batch, 1]   ──▶ model ──▶ logits, arrays of this token ──▶ the cache
                                     ▲ mixers read the cache of their layer
```

Layers only read; the entries of all are written at once, in place. Rows may have different lengths:
each has its own position (`spmd.layers.cache_places`). Layers with a sliding window also keep all
tokens.

A mixer takes its place by `cache_slot`, reads `past` in decoding, and saves its arrays. Keys are
saved of each token; a recurrent state is saved after the last one, and `token_mask` excludes the
padding behind a prompt from it:

```
slot = cache_slot("scan", ScanState)
mask = token_mask(x.shape[1])                   # [batch, seq] in prefill, otherwise None
state = initial_state
if slot.past is not None:                       # decoding: seq is 1
    state = slot.past.state
output, state = scan(x, state, mask)            # padding leaves the state unchanged
slot.save(ScanState(state))
```

Scanned or checkpointed layers are functions of arrays, so each takes its part of the cache as an
argument and returns its own entries (`isolate_layer`, `thread_cache`, `collect_cache`);
`spmd.models.decoder.layer_stack.run_layers` calls these, for each layer of a repeated group. They
nest.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, Bool, Float, Int

from spmd.errors import CacheError, ConfigError, Problem
from spmd.layers.cache_entry import (
    CacheEntry,
    cached_array,
    check_dimensions,
    decode_entry,
    encode_entry,
    pad_entry,
    prompt_shape,
    split_entry,
    update_entry,
)
from spmd.layers.cache_places import CachePlaces
from spmd.plan.context import current, override

T = TypeVar("T")
Entry = TypeVar("Entry", bound=CacheEntry)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The cache of a model.

    Attributes:
        entries: An entry for each `cache_slot`, in order; of a stack of layers, a tuple of the
            entries of one layer, with stacked arrays.
        length: Tokens of the longest text, prompt and new ones.
        places: Places of tokens in the arrays of entries; None if no array is of tokens.
    """

    entries: tuple[Any, ...]
    length: int = dataclasses.field(metadata={"static": True})
    places: CachePlaces | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache(CacheEntry):
    """The keys and values of one call of `attend`, stacked for a stack of layers."""

    key: Float[Array, "*layer batch length kv_heads dim"] = cached_array("batch length heads _")
    value: Float[Array, "*layer batch length kv_heads dim"] = cached_array("batch length heads _")


TITLE = "The cache does not support this model:"
_INVALID = "Invalid use of the cache:"
SEGMENTS = Problem("segments", "are given", fix="None: a row is one document")
_SAME_CALLS = "call the same mixers in the same order"


class _Calls:
    """The slots of one traced function: entries given to it, and entries it adds."""

    def __init__(self, given: Iterable[Any] = ()) -> None:
        self._given = iter(given)
        self._added: list[Any] = []
        self._names: list[str] = []
        self._state = get_opaque_trace_state(convention="flax")

    def take(self) -> Any:
        """Return the next given entry; None if there is none left."""
        return next(self._given, None)

    def reserve(self, name: str) -> int:
        """Reserve the place of the next added entry, and return its index."""
        self._added.append(None)
        self._names.append(name)
        return len(self._added) - 1

    def fill(self, index: int, entry: Any) -> None:
        """Add the entry of a reserved place.

        Raises:
            CacheError: The call is in an inner traced function, so its arrays cannot leave it.
        """
        if get_opaque_trace_state(convention="flax") != self._state:
            problem = Problem(
                self._names[index],
                "is called inside of a transformation, such as jax.lax.scan, that run_layers "
                "does not control",
                fix="run layers by run_layers, or in a Python loop",
            )
            raise CacheError(TITLE, [problem])
        self._added[index] = entry

    def added(self) -> tuple[Any, ...]:
        """Return the added entries.

        Raises:
            ConfigError: A slot was taken and nothing saved in it, or a given entry is left.
        """
        problems = []
        for name, entry in zip(self._names, self._added, strict=True):
            if entry is None:
                fix = "call slot.save once for each cache_slot"
                problems.append(Problem(name, "takes a slot and saves nothing in it", fix=fix))
        if self.take() is not None:
            what = "are fewer in decoding than in prefill"
            problems.append(Problem("calls of mixers", what, fix=_SAME_CALLS))
        if problems:
            raise ConfigError(_INVALID, problems)
        return tuple(self._added)


class _Trace:
    """One trace of a model, compared by identity so that JAX's caches are not shared by traces.

    `positions` are those of decoding, None in prefill; `lengths` are those of prompts.
    """

    def __init__(
        self, cache: Cache, positions: Array | None = None, lengths: Array | None = None
    ) -> None:
        self.positions = positions
        self.lengths = lengths
        self.length = cache.length
        self.places = cache.places
        # A stack; the last one is of the innermost traced function.
        self.calls = [_Calls(cache.entries)]

    def take(self, name: str) -> Any:
        """Return the entry of the next slot, or of a stack of layers; None in prefill.

        Raises:
            ConfigError: Prefill saved no entry there.
        """
        if self.positions is None:
            return None
        entry = self.calls[-1].take()
        if entry is None:
            raise ConfigError(_INVALID, [_other_order(name)])
        return entry


def _other_order(name: str) -> Problem:
    what = "is called in another order in decoding than in prefill"
    return Problem(name, what, fix=_SAME_CALLS)


def prefill(
    run: Callable[[], T],
    length: int,
    lengths: Int[Array, "batch"] | None = None,
    *,
    new_tokens: int | None = None,
    in_int8: bool = False,
) -> tuple[T, Cache]:
    """Return `run()` of a model on prompts `[batch, seq]`, and its cache.

    Prompts may be padded at the end. Attention must be causal, over one document in each row, and
    outside of transformations.

    Args:
        length: Tokens of the longest text, prompt and new ones.
        lengths: Tokens of each prompt without padding; None for all of them.
        new_tokens: Most calls of `decode`; None for as many as a text of `length` tokens has,
            behind the shortest possible prompt.
        in_int8: Whether the cache holds tokens in int8
            (`spmd.layers.cache_entry.encode_entry`). Decoding reads them so; prefill does not.

    Raises:
        CacheError: The cache does not support the model.
        ConfigError: A mixer takes a slot and saves nothing, or another array than it declares.

    Example:
        >>> from spmd.layers.attention import attend
        >>> x = jnp.ones((1, 3, 2, 8))
        >>> _, cache = prefill(lambda: attend(x, x, x), length=4)
        >>> cache.entries[0].key.shape
        (1, 4, 2, 8)
    """
    trace = _Trace(Cache((), length), lengths=lengths)
    result, added = _trace(run, trace)
    places = _places(added, length, lengths, new_tokens)

    def keep(entry: CacheEntry) -> CacheEntry:
        if places is None:
            return entry
        padded = pad_entry(entry, places.count)
        if in_int8:
            return encode_entry(padded)
        return padded

    return result, _split(Cache(_map_entries(keep, added), length, places))


def _places(
    entries: Any, length: int, lengths: Array | None, new_tokens: int | None
) -> CachePlaces | None:
    """Return the places for prompts and new tokens, by the entries of a prefill."""
    shapes = map(prompt_shape, jax.tree.leaves(entries, is_leaf=_is_entry))
    shape = next(filter(None, shapes), None)
    if shape is None:
        return None
    rows, prompt = shape
    shortest = 1
    if lengths is None:
        lengths = jnp.full(rows, prompt, jnp.int32)
        shortest = prompt
    if new_tokens is None:
        new_tokens = max(length - shortest, 0)
    if new_tokens < 0:
        problem = Problem("new_tokens", f"is {new_tokens}", fix="at least 0")
        raise ConfigError(_INVALID, [problem])
    return CachePlaces(lengths, jnp.int32(0), prompt, prompt + new_tokens)


def decode(run: Callable[[], T], cache: Cache, positions: Int[Array, "batch"]) -> tuple[T, Cache]:
    """Return `run()` of the model on one token of each row, `[batch, 1]`, and the new cache.

    The new cache has these tokens. `positions` are those of the tokens; all preceding ones are in
    the cache.

    Raises:
        ConfigError: Mixers are called in another order than in prefill, or save other arrays. The
            cache has no place left (checked outside of a trace).
    """
    if cache.places is not None:
        _check_room(cache.places)
    with single_token():
        result, added = _trace(run, _Trace(cache, positions))
    places = cache.places
    place = places.next if places else jnp.int32(0)

    def update(past: CacheEntry, new: CacheEntry) -> CacheEntry:
        return update_entry(past, new, place)

    entries = _map_entries(update, cache.entries, added)
    after = places.after_token() if places else None
    return result, _split(Cache(entries, cache.length, after))


def _check_room(places: CachePlaces) -> None:
    """Raise an error if all places have a token; a trace does not know."""
    room = places.count - places.prompt
    if isinstance(places.decoded, jax.core.Tracer) or int(places.decoded) < room:
        return
    what = f"has room for {room} new tokens, all of which are decoded"
    problem = Problem("the cache", what, fix="prefill(…, new_tokens=…) with more")
    raise ConfigError(_INVALID, [problem])


def _trace(run: Callable[[], T], trace: _Trace) -> tuple[T, tuple[Any, ...]]:
    """Return `run()` and the entries of its slots."""
    with override(kv_cache=trace):
        result = run()
    added = trace.calls[-1].added()
    # JAX's caches have the trace as a key, and would keep these arrays alive.
    trace.positions = None
    trace.lengths = None
    trace.places = None
    trace.calls = []
    return result, added


def _map_entries(update: Callable[..., CacheEntry], *entries: Any) -> Any:
    return jax.tree.map(update, *entries, is_leaf=_is_entry)


def _is_entry(x: Any) -> bool:
    return isinstance(x, CacheEntry)


def _split(cache: Cache) -> Cache:
    """Split the cache over the mesh of the plan in scope, if any."""
    mesh = current().mesh
    if mesh is None:
        return cache

    def split(entry: CacheEntry) -> CacheEntry:
        return split_entry(entry, mesh)

    return dataclasses.replace(cache, entries=_map_entries(split, cache.entries))


def without_cache() -> contextlib.AbstractContextManager[None]:
    """Let mixers inside add nothing to the cache: the caller has an entry of its own for them."""
    return override(kv_cache=None)


def require_one_document(segments: Array | None) -> None:
    """Raise `CacheError` if a cached call has documents."""
    if current().kv_cache is not None and segments is not None:
        raise CacheError(TITLE, [SEGMENTS])


def single_token() -> contextlib.AbstractContextManager[None]:
    """Leave the token dimension of activations unsplit inside: it has size 1."""
    return override(single_token=True)


def token_positions() -> Int[Array, "batch 1"] | None:
    """Return the positions of the tokens of a `decode`; None outside."""
    trace = current().kv_cache
    if trace is None or trace.positions is None:
        return None
    return trace.positions[:, None]


def token_mask(seq: int) -> Bool[Array, "batch seq"] | None:
    """Return the mask of the tokens of prompts, without their padding, in a `prefill`.

    It is None elsewhere: training and decoding have no padding in front of a token that counts.
    """
    trace = current().kv_cache
    if trace is None or trace.lengths is None:
        return None
    return jnp.arange(seq)[None] < trace.lengths[:, None]


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


@dataclasses.dataclass(frozen=True)
class CacheSlot(Generic[Entry]):
    """The place of one call of a mixer in the cache; outside of generation, of no effect.

    Attributes:
        stored: In decoding, the arrays of preceding tokens as the cache holds them; otherwise None.
        positions: In decoding, the position of each row's token, `[batch]`; otherwise None.
    """

    stored: Entry | None
    positions: Int[Array, "batch"] | None
    _places: CachePlaces | None = None
    _calls: _Calls | None = None
    _index: int = 0

    @property
    def past(self) -> Entry | None:
        """The arrays of preceding tokens, decoded, in decoding; otherwise None."""
        past: Any = self.stored
        if past is not None:
            past = decode_entry(past)
        return past

    def past_positions(self) -> Int[Array, "batch length"]:
        """Return the positions of the tokens in arrays of `past` with an axis `length`.

        An element whose position is not below `positions` is no token.
        """
        assert self._places is not None, "the mixer decodes, and saves an array of tokens"
        return self._places.positions()

    def save(self, entry: Entry) -> None:
        """Save the arrays of this call, once.

        An array with an axis `length` has the tokens of the call, one in decoding; any other array
        is the state after the last token.

        Raises:
            CacheError: The call is inside of a transformation that `run_layers` does not control.
            ConfigError: An array has other dimensions than it declares.
        """
        if self._calls is None:
            return
        problems = check_dimensions(entry)
        if problems:
            raise ConfigError(_INVALID, problems)
        self._calls.fill(self._index, entry)


def cache_slot(mixer: str, kind: type[Entry]) -> CacheSlot[Entry]:
    """Take the place of this call of a mixer in the cache.

    Args:
        mixer: The mixer's name, for errors.
        kind: The class of its entry.

    Raises:
        ConfigError: The call has no entry of this class in the cache.

    Example:
        >>> def double(x):
        ...     slot = cache_slot("double", KVCache)
        ...     slot.save(KVCache(2 * x, 2 * x))
        >>> _, cache = prefill(lambda: double(jnp.ones((1, 3, 2, 8))), length=3)
        >>> type(cache.entries[0]).__name__
        'KVCache'
    """
    trace = current().kv_cache
    if trace is None:
        return CacheSlot(None, None)
    past = trace.take(mixer)
    if past is not None and not isinstance(past, kind):
        raise ConfigError(_INVALID, [_other_order(mixer)])
    calls = trace.calls[-1]
    return CacheSlot(past, trace.positions, trace.places, calls, calls.reserve(mixer))


Layer = Callable[..., Any]
"""A layer as a function of its state and arrays."""

_STACK = "run_layers"


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
            return result, trace.calls[-1].added()
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

    parts = trace.take(_STACK)
    if isinstance(parts, CacheEntry):
        raise ConfigError(_INVALID, [_other_order(_STACK)])
    if parts is None:
        parts = ((),) * len(each)
    return run, tuple(zip(each, parts, strict=True))


def collect_cache(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Remove the added cache entries from the values of layers, and save them.

    The values are of each layer of a repeated group, as the inputs of `thread_cache`.
    """
    trace = current().kv_cache
    if trace is None:
        return values
    own, added = zip(*values, strict=True)
    calls = trace.calls[-1]
    calls.fill(calls.reserve(_STACK), added)
    return own
