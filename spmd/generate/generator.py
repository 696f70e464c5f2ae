"""Token generation with a trained model, on the mesh it was trained on.

Two programs are compiled: prefill runs the model on the prompts and fills the KV cache
(`spmd.layers.kv_cache`), decode adds one token to every row. Prompts and cache are padded to powers
of two, so most other prompts compile nothing.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from spmd.errors import CacheError, ConfigError, Problem
from spmd.generate.model_arrays import ArrayForm, ModelArrays, array_forms, prepare_arrays
from spmd.generate.sampling import Sampling, draw
from spmd.layers.cache_entry import CodedArray
from spmd.layers.kv_cache import Cache, decode, prefill, single_token
from spmd.layers.lm_head import LazyLogits, lazy_logits, materialize
from spmd.layers.sequential_stages import sequential_stages
from spmd.model_interface.model import PRNG, VALID, abstract_key, as_outputs
from spmd.plan.context import use_plan
from spmd.plan.fsdp import params_for_forward
from spmd.plan.partition_safe import partition_safe
from spmd.plan.plan import ShardingPlan
from spmd.sharding.mesh import BATCH_AXES, shards_of

MIN_LENGTH = 32
"""Fewest tokens of a padded prompt."""

Tokens = Sequence[int] | Int[np.ndarray, "token"]
"""Token ids, at least one."""

ENDED = -1
"""Fills a row after its end token."""


@dataclasses.dataclass(frozen=True)
class Generator:
    """Continuation of prompts with the model of a plan.

    Programs are compiled on first use and kept.
    """

    plan: ShardingPlan
    """The plan that parameters are sharded by in generation; its mesh may have other axes than that
    of the training, over the same devices."""
    window: int
    """Sequence length of the training."""
    sampling: Sampling = Sampling()
    ends: tuple[int, ...] = ()
    """Tokens that end a row."""
    cached: bool = True
    """Use a KV cache if the model supports it."""
    cache_in_int8: bool = False
    """Hold the tokens of the cache in int8, with a scale for each token and head."""

    def load(self, params: Any, variables: Any, *, donate: bool = False) -> "LoadedModel":
        """Bring a model's arrays into the form of generation (`spmd.generate.model_arrays`).

        The result holds copies of the arrays whose form changes, and the others themselves: it
        cannot be used after a step that donates them.

        Args:
            donate: Whether to delete each array of which there is a copy.
        """
        if self.cache_in_int8:
            self._check_int8()
        forms = self._forms(params, variables)
        arrays = prepare_arrays(self.plan, params, variables, forms, donate=donate)
        return LoadedModel(self, arrays)

    def write(
        self, params: Any, variables: Any, prompts: Sequence[Tokens], *, tokens: int, seed: int = 0
    ) -> list[np.ndarray]:
        """Load a model for one call of `LoadedModel.write`."""
        check_window(prompts, tokens, self.window)
        return self.load(params, variables).write(prompts, tokens=tokens, seed=seed)

    def stream(
        self, params: Any, variables: Any, prompts: Sequence[Tokens], *, tokens: int, seed: int = 0
    ) -> Iterator[np.ndarray]:
        """Load a model for one call of `LoadedModel.stream`."""
        check_window(prompts, tokens, self.window)
        return self.load(params, variables).stream(prompts, tokens=tokens, seed=seed)

    def _forms(self, params: Any, variables: Any) -> tuple[ArrayForm, ...]:
        """Return the form of each leaf of `(params, variables)`."""
        leaves, structure = jax.tree.flatten((params, variables))
        # Of the same arrays on the plan's devices, wherever these are.
        arrays = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
        known = self._known_forms
        if (structure, arrays) not in known:
            params, variables = jax.tree.unflatten(structure, arrays)
            known[structure, arrays] = self._find_forms(params, variables, len(leaves))
        return known[structure, arrays]

    @functools.cached_property
    def _known_forms(self) -> dict[Any, tuple[ArrayForm, ...]]:
        """Forms by the structure, the shapes and the dtypes of the arrays."""
        return {}

    def _find_forms(self, params: Any, variables: Any, count: int) -> tuple[ArrayForm, ...]:
        if any(placement.on_host for placement in self.plan.placements.values()):
            return (ArrayForm(),) * count  # each layer fetches its own
        rows = self._batch_shards
        room = self._room(1, 1)
        ids = jax.ShapeDtypeStruct((rows, self._padded(1)), jnp.int32)
        lengths = jax.ShapeDtypeStruct((rows,), jnp.int32)
        key = abstract_key()
        prefill_prompts = functools.partial(self._prefill_prompts, room=room)
        trace = jax.make_jaxpr(prefill_prompts, return_shape=True)
        first, (token, position, carry) = trace(params, variables, ids, lengths, key)
        inputs = (carry, token, position, key)
        after = jax.make_jaxpr(self._decode_token)(params, variables, *inputs)
        return tuple(array_forms([first, after], count))

    def _steps(
        self, model: ModelArrays, prompts: Sequence[Tokens], tokens: int, seed: int
    ) -> Iterator[np.ndarray]:
        if not tokens:
            return
        ids, lengths = self._batch(prompts)
        room = self._room(int(max(lengths)), tokens)
        key = jax.random.key(seed, impl=PRNG)
        token, position, carry = self._prefill(model, ids, lengths, key, room=room)
        has_ended = np.zeros(len(prompts), bool)
        for remaining in reversed(range(tokens)):
            drawn = token
            if remaining:
                token, position, carry = self._decode(model, carry, token, position, key)
            row = np.where(has_ended, ENDED, np.asarray(drawn)[: len(prompts)])
            yield row
            has_ended |= np.isin(row, (ENDED, *self.ends))
            if has_ended.all():
                return

    def _batch(self, prompts: Sequence[Tokens]) -> tuple[jax.Array, np.ndarray]:
        """Return the prompts as one padded array, and their lengths.

        Copies of the first are added until the mesh divides the rows.
        """
        missing = -len(prompts) % self._batch_shards
        rows = [*prompts, *[prompts[0]] * missing]
        lengths = np.array([len(row) for row in rows], np.int32)
        padded = self._padded(int(max(lengths)))
        ids = np.zeros((len(rows), padded), np.int32)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = row
        return jax.device_put(ids, self.plan.batch_sharding("tokens")), lengths

    @property
    def _batch_shards(self) -> int:
        return shards_of(BATCH_AXES, self.plan.mesh.shape)

    def _room(self, prompt: int, tokens: int) -> "_Room":
        """Return the room for the longest prompt and new tokens."""
        if self.whole_window:
            return _Room(self.window, 0)
        return _Room(self._padded(prompt + tokens), self._padded(tokens))

    def _padded(self, tokens: int) -> int:
        """Return the next power of two, at most the window.

        It is rounded up to a multiple of mesh axis `sequence`.
        """
        unit = self.plan.mesh.shape["sequence"]
        power_of_two = 1 << (tokens - 1).bit_length()
        length = min(max(MIN_LENGTH, power_of_two), self.window)
        return -(-length // unit) * unit

    @functools.cached_property
    def whole_window(self) -> str:
        """The reason against a KV cache; empty with one.

        Without it, the model runs on the whole window for every token.
        """
        if not self.cached:
            return "cached=False"
        if not self.plan.model.info().supports_kv_cache:
            return "the model sets neither supports_kv_cache nor position_aware"
        try:
            cache = self._abstract_cache()
        except CacheError as error:
            return "; ".join(f"{problem.where} {problem.what}" for problem in error.problems)
        if not cache.entries:
            return (
                "the model never calls spmd.layers.attention.attend or "
                "spmd.layers.kv_cache.cache_slot"
            )
        return ""

    def _abstract_cache(self) -> Cache:
        """Return the shapes of the cache of the shortest prompts."""
        model = self.plan.model
        key = abstract_key()
        params = jax.eval_shape(model.init, key)
        variables = jax.eval_shape(model.init_variables, key)
        ids = jax.ShapeDtypeStruct((self._batch_shards, self._padded(1)), jnp.int32)

        def trace(params: Any, variables: Any, ids: Any) -> Any:
            rows, length = ids.shape
            room = _Room(length, length)
            with use_plan(self.plan):
                return self._fill_cache(params, variables, ids, jnp.full(rows, length), room)

        _, cache = jax.eval_shape(trace, params, variables, ids)
        return cache

    def _check_int8(self) -> None:
        """Raise an error if no array of a cache is in int8."""
        reason = self.whole_window
        if not reason:
            entries = self._abstract_cache().entries
            if any(map(_is_coded, jax.tree.leaves(entries, is_leaf=_is_coded))):
                return
            reason = "the cache of the model holds states, and nothing for each token"
        fix = "leave it out"
        raise ConfigError("Nothing is in int8:", [Problem("cache_in_int8", reason, fix=fix)])

    @functools.cached_property
    def _prefill(self) -> Callable[..., Any]:
        """The compiled program for prompts."""

        def run(model: ModelArrays, ids: Any, lengths: Any, key: Any, *, room: _Room) -> Any:
            prefill_prompts = functools.partial(self._prefill_prompts, room=room)
            return model.call(prefill_prompts, ids, lengths, key)

        return jax.jit(run, static_argnames="room")

    def _prefill_prompts(
        self, params: Any, variables: Any, ids: Any, lengths: Any, key: Any, *, room: "_Room"
    ) -> Any:
        """Return the first new token of each row, its position, and the carry.

        The carry is the KV cache, or the ids of the whole window.
        """

        def draw_first(params: Any, variables: Any, ids: Any) -> Any:
            logits, carry = self._read_prompts(params, variables, ids, lengths, room)
            last = _logits_at(logits, lengths - 1)
            token, position = self._draw(last, lengths, key)
            return token, position, carry

        with use_plan(self.plan):
            return partition_safe(draw_first)(params_for_forward(params), variables, ids)

    def _read_prompts(
        self, params: Any, variables: Any, ids: Array, lengths: Array, room: "_Room"
    ) -> tuple[Any, Any]:
        """Return the logits of all tokens of prompts, and the carry with room for new ones."""
        if self.whole_window:
            window = jnp.pad(ids, ((0, 0), (0, room.length - ids.shape[1])))
            logits = self._logits(params, variables, window, _before(window, lengths))
            return logits, window
        return self._fill_cache(params, variables, ids, lengths, room)

    def _fill_cache(
        self, params: Any, variables: Any, ids: Any, lengths: Array, room: "_Room"
    ) -> tuple[Any, Cache]:
        """Return the logits of all tokens of prompts, and a cache with room for new ones."""
        valid = _before(ids, lengths)

        def run() -> Any:
            return self._logits(params, variables, ids, valid)

        in_int8 = self.cache_in_int8
        return prefill(run, room.length, lengths, new_tokens=room.new_tokens, in_int8=in_int8)

    @functools.cached_property
    def _decode(self) -> Callable[..., Any]:
        """The compiled program for one token."""

        def run(model: ModelArrays, carry: Any, token: Any, position: Any, key: Any) -> Any:
            return model.call(self._decode_token, carry, token, position, key)

        return jax.jit(run, donate_argnames="carry")

    def _decode_token(
        self, params: Any, variables: Any, carry: Any, token: Any, position: Any, key: Any
    ) -> Any:
        """Return the next token of each row, its position, and the carry."""

        def draw_next(params: Any, variables: Any, none: Any, carry: Any) -> Any:
            del none
            logits, carry = self._read_token(params, variables, carry, token, position)
            token_after, position_after = self._draw(logits, position + 1, key)
            return token_after, position_after, carry

        with use_plan(self.plan):
            return partition_safe(draw_next)(params_for_forward(params), variables, (), carry)

    def _read_token(
        self, params: Any, variables: Any, carry: Any, token: Array, position: Array
    ) -> tuple[Array, Any]:
        """Return the logits `[batch, vocab]` after one token of each row, and the carry."""
        if self.whole_window:
            columns = jax.lax.broadcasted_iota(jnp.int32, carry.shape, 1)
            window = jnp.where(columns == position[:, None], token[:, None], carry)
            valid = _before(window, position + 1)
            logits = self._logits(params, variables, window, valid)
            return _logits_at(logits, position), window
        tokens = token[:, None]
        logits, cache = decode(lambda: self._logits(params, variables, tokens), carry, position)
        return _logits_at(logits, jnp.zeros_like(position)), cache

    def _logits(self, params: Any, variables: Any, ids: Array, valid: Array | None = None) -> Any:
        """Return the logits of all tokens; `valid` is their mask, for padding-aware models."""
        model = self.plan.model
        keywords = {}
        if model.info().padding_aware and valid is not None:
            keywords[VALID] = valid
        with lazy_logits(), sequential_stages():
            returned, _ = model.forward(params, variables, None, ids, train=False, **keywords)
        return as_outputs(returned).logits

    def _draw(self, logits: Array, position: Array, key: Array) -> tuple[Array, Array]:
        """Return token and position, replicated: every process must decide alike when to stop."""
        token = draw(logits, self.sampling, key, position)
        replicated = NamedSharding(self.plan.mesh, P())
        return jax.lax.with_sharding_constraint((token, position), replicated)


class _Room(NamedTuple):
    """Tokens of the longest text, and most new tokens, both rounded up."""

    length: int
    new_tokens: int


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A generator with the arrays of a model, for any number of texts."""

    generator: Generator
    arrays: ModelArrays

    def write(self, prompts: Sequence[Tokens], *, tokens: int, seed: int = 0) -> list[np.ndarray]:
        """Return the continuation of each prompt as int32.

        It has `tokens` tokens, or fewer, up to and with an end token.
        """
        steps = list(self.stream(prompts, tokens=tokens, seed=seed))
        rows = np.zeros((len(prompts), 0), np.int32)
        if steps:
            rows = np.stack(steps, axis=1)
        return [row[row != ENDED] for row in rows]

    def stream(
        self, prompts: Sequence[Tokens], *, tokens: int, seed: int = 0
    ) -> Iterator[np.ndarray]:
        """Yield the result of `write` token by token: int32 `[prompt]`, `ENDED` in ended rows.

        It stops when all rows have ended. The next token is computed while the caller reads this
        one.
        """
        check_window(prompts, tokens, self.generator.window)
        if self.arrays.is_deleted:
            what = "has an array that was deleted, as by a training step that donates its state"
            fix = "load the model again, from the state that the step returned"
            raise ConfigError("Nothing can be generated:", [Problem("the model", what, fix=fix)])
        return self.generator._steps(self.arrays, prompts, tokens, seed)


def _is_coded(x: Any) -> bool:
    return isinstance(x, CodedArray)


def _before(ids: Int[Array, "batch seq"], lengths: Int[Array, "batch"]) -> Bool[Array, "batch seq"]:
    """Return the mask of each row's first tokens."""
    return jax.lax.broadcasted_iota(jnp.int32, ids.shape, 1) < lengths[:, None]


def _logits_at(
    logits: Float[Array, "batch seq vocab"] | LazyLogits, position: Int[Array, "batch"]
) -> Array:
    """Return the logits `[batch, vocab]` of one position of each row.

    Lazy logits compute no others.
    """

    def pick(x: Array) -> Array:
        return jnp.take_along_axis(x, position[:, None, None], axis=1)

    if not isinstance(logits, LazyLogits):
        return pick(logits)[:, 0]
    with single_token():
        picked = dataclasses.replace(logits, x=pick(logits.x))
        return materialize(picked)[:, 0]


def check_window(prompts: Sequence[Tokens], tokens: int, window: int) -> None:
    """Raise the `window_problems`, if any."""
    problems = window_problems(prompts, tokens, window)
    if problems:
        raise ConfigError("Nothing can be generated:", problems)


def window_problems(prompts: Sequence[Tokens], tokens: int, window: int) -> list[Problem]:
    """Return the problems of prompts, and of the number of tokens to add to them."""
    problems = []
    if not len(prompts):
        problems.append(Problem("prompt", "there is none", fix="give at least one"))
    if tokens < 0:
        problems.append(Problem("tokens", f"is {tokens}", fix="at least 0"))
    for number, prompt in enumerate(prompts):
        name = "prompt"
        if len(prompts) > 1:
            name = f"prompt {number}"
        if len(prompt) == 0:
            problems.append(Problem(name, "is empty", fix="give at least one token"))
        total = len(prompt) + tokens
        if total > window:
            what = "with its new tokens is longer than the training sequences"
            detail = f"{len(prompt)} prompt tokens + {tokens} new ones = {total} > {window}"
            problems.append(Problem(name, what, detail, "generate fewer tokens"))
    return problems
