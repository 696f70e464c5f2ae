"""Text from a trained model, on the mesh it was trained on, one token at a time.

```python
generator = Generator(plan, window=1024, sampling=Sampling(temperature=0.0), ends=tokenizer.ends)
prompts = [tokenizer.encode_prompt("def "), tokenizer.encode_prompt("import ")]
texts = generator.write(params, variables, prompts, tokens=100)
```

Two programs are compiled: one runs the prompts through the model and keeps keys and values (`spmd.layers.kv_cache`),
one adds a token to every row. Prompts and cache are padded to a few lengths, so that other prompts seldom compile
again. A model whose keys and values cannot be kept runs on the whole window for every token; `whole_window` says why.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from spmd.errors import CacheError, ConfigError, Problem
from spmd.generate.sampling import Sampling, draw
from spmd.layers.kv_cache import decode, prefill, single_token
from spmd.layers.lm_head import LazyLogits, lazy_logits, materialize
from spmd.layers.sequential_stages import sequential_stages
from spmd.model_api.model import PRNG, as_outputs
from spmd.plan.context import use_plan
from spmd.plan.fsdp import params_for_forward
from spmd.plan.plan import ShardingPlan
from spmd.sharding.mesh import batch_sharding, shards_of

SHORTEST = 32
"""Tokens that a prompt is padded to at least."""

Tokens = Sequence[int] | Int[np.ndarray, "token"]
"""Token ids, at least one."""

ENDED = -1
"""What follows the end of a row."""


@dataclasses.dataclass(frozen=True)
class Generator:
    """Continues prompts with the model of a plan. Programs are compiled when they are needed, and kept."""

    plan: ShardingPlan
    """The plan that parameters are sharded by."""
    window: int
    """The longest sequence that the model was trained on."""
    sampling: Sampling = Sampling()
    """How tokens are drawn."""
    ends: tuple[int, ...] = ()
    """Tokens that end a row."""
    cached: bool = True
    """Whether keys and values are kept, where the model allows it."""

    def write(
        self, params: Any, variables: Any, prompts: Sequence[Tokens], *, tokens: int, seed: int = 0
    ) -> list[np.ndarray]:
        """What follows each prompt: int32, `tokens` of them, or less where a token ends the row, with that token.

        Args:
            params: Of the model, on the plan's mesh.
            variables: Of the model.
            prompts: The token ids of each, as long as they are.
            tokens: How many tokens to add.
            seed: Of the random draws.

        Raises:
            ConfigError: An empty prompt, more tokens than the window holds, a negative number; all at once.
        """
        steps = list(self.stream(params, variables, prompts, tokens=tokens, seed=seed))
        rows = np.stack(steps, axis=1) if steps else np.zeros((len(prompts), 0), np.int32)
        return [row[row != ENDED] for row in rows]

    def stream(
        self, params: Any, variables: Any, prompts: Sequence[Tokens], *, tokens: int, seed: int = 0
    ) -> Iterator[np.ndarray]:
        """As `write`, token by token: int32 `[prompt]` each time, `ENDED` for a row that has ended.

        Nothing is yielded any more when all rows have ended. While a token is looked at, the next one is computed.
        """
        check_window(prompts, tokens, self.window)
        return self._steps(params, variables, prompts, tokens, seed)

    def _steps(
        self, params: Any, variables: Any, prompts: Sequence[Tokens], tokens: int, seed: int
    ) -> Iterator[np.ndarray]:
        if not tokens:
            return
        ids, lengths = self._batch(prompts)
        length = self.window if self.whole_window else self._padded(int(max(lengths)) + tokens)
        key = jax.random.key(seed, impl=PRNG)
        token, position, kept = self._first(params, variables, ids, lengths, key, length=length)
        has_ended = np.zeros(len(prompts), bool)
        for left in reversed(range(tokens)):
            drawn = token
            if left:
                token, position, kept = self._next(params, variables, kept, token, position, key)
            row = np.where(has_ended, ENDED, np.asarray(drawn)[: len(prompts)])
            yield row
            has_ended |= np.isin(row, (ENDED, *self.ends))
            if has_ended.all():
                return

    def _batch(self, prompts: Sequence[Tokens]) -> tuple[jax.Array, np.ndarray]:
        """The prompts as an array, with padding behind them and copies of the first below, and their lengths."""
        shards = shards_of(batch_sharding(self.plan.mesh).spec[0], self.plan.mesh.shape)
        rows = [*prompts, *[prompts[0]] * (-len(prompts) % shards)]
        lengths = np.array([len(row) for row in rows], np.int32)
        ids = np.zeros((len(rows), self._padded(int(max(lengths)))), np.int32)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = row
        return jax.device_put(ids, batch_sharding(self.plan.mesh)), lengths

    def _padded(self, tokens: int) -> int:
        """The next power of two, which the mesh divides; at most the window."""
        unit = self.plan.mesh.shape["sequence"]
        length = min(max(SHORTEST, 1 << (tokens - 1).bit_length()), self.window)
        return -(-length // unit) * unit

    @functools.cached_property
    def whole_window(self) -> str:
        """Why the model runs on the whole window for every token; empty where keys and values are kept."""
        if not self.cached:
            return "it is not asked for"
        model = self.plan.model
        if not model.info().supports_kv_cache:
            return "the model does not say supports_kv_cache, nor position_aware"
        key = jax.eval_shape(lambda: jax.random.key(0, impl=PRNG))
        shapes = jax.eval_shape(model.init, key), jax.eval_shape(model.init_variables, key)
        shards = shards_of(batch_sharding(self.plan.mesh).spec[0], self.plan.mesh.shape)
        ids = jax.ShapeDtypeStruct((shards, self._padded(1)), jnp.int32)

        def trace(params: Any, variables: Any, ids: Any) -> Any:
            with use_plan(self.plan):
                return prefill(lambda: self._outputs(params, variables, ids), ids.shape[1])

        try:
            _, cache = jax.eval_shape(trace, *shapes, ids)
        except CacheError as error:
            return "; ".join(f"{problem.where} {problem.what}" for problem in error.problems)
        return "" if cache else "the model never calls spmd.layers.attention.attend"

    @functools.cached_property
    def _first(self) -> Callable[..., Any]:
        """The compiled program for prompts: `(params, variables, ids, lengths, key) -> (token, position, kept)`."""
        get = _window_prefill if self.whole_window else _cached_prefill

        def run(params: Any, variables: Any, ids: Any, lengths: Any, key: Any, *, length: int) -> Any:
            with use_plan(self.plan):
                outputs = functools.partial(self._outputs, params, variables)
                logits, kept = get(outputs, ids, lengths, length)
                return *self._drawn(logits, lengths, key), kept

        return jax.jit(run, static_argnames="length")

    @functools.cached_property
    def _next(self) -> Callable[..., Any]:
        """The compiled program for a token: `(params, variables, kept, token, position, key)` → as `_first`."""
        get = _window_decode if self.whole_window else _cached_decode

        def run(params: Any, variables: Any, kept: Any, token: Any, position: Any, key: Any) -> Any:
            with use_plan(self.plan):
                outputs = functools.partial(self._outputs, params, variables)
                logits, kept = get(outputs, kept, token, position)
                return *self._drawn(logits, position + 1, key), kept

        return jax.jit(run, donate_argnames="kept")

    def _outputs(self, params: Any, variables: Any, ids: Array) -> Any:
        """The logits of each position, or what they are the product of."""
        with lazy_logits(), sequential_stages():
            returned, _ = self.plan.model.forward(params_for_forward(params), variables, None, ids, train=False)
        return as_outputs(returned).logits

    def _drawn(self, logits: Array, position: Array, key: Array) -> tuple[Array, Array]:
        """Every process has all tokens, and so decides alike when to stop."""
        whole = NamedSharding(self.plan.mesh, P())
        return tuple(
            jax.lax.with_sharding_constraint(x, whole) for x in (draw(logits, self.sampling, key, position), position)
        )


Outputs = Callable[[Int[Array, "batch seq"]], Float[Array, "batch seq vocab"] | LazyLogits]


def _cached_prefill(outputs: Outputs, ids: Array, lengths: Array, length: int) -> tuple[Array, Any]:
    logits, cache = prefill(lambda: outputs(ids), length)
    return _at(logits, lengths - 1), cache


def _cached_decode(outputs: Outputs, cache: Any, token: Array, position: Array) -> tuple[Array, Any]:
    logits, cache = decode(lambda: outputs(token[:, None]), cache, position)
    return _at(logits, jnp.zeros_like(position)), cache


def _window_prefill(outputs: Outputs, ids: Array, lengths: Array, length: int) -> tuple[Array, Any]:
    ids = jnp.pad(ids, ((0, 0), (0, length - ids.shape[1])))
    return _at(outputs(ids), lengths - 1), ids


def _window_decode(outputs: Outputs, ids: Array, token: Array, position: Array) -> tuple[Array, Any]:
    places = jax.lax.broadcasted_iota(jnp.int32, ids.shape, 1)
    ids = jnp.where(places == position[:, None], token[:, None], ids)
    return _at(outputs(ids), position), ids


def _at(logits: Float[Array, "batch seq vocab"] | LazyLogits, position: Int[Array, "batch"]) -> Array:
    """The logits `[batch, vocab]` of one position of each row; the others are not computed, if the model lets it."""

    def pick(x: Array) -> Array:
        return jnp.take_along_axis(x, position[:, None, None], axis=1)

    if not isinstance(logits, LazyLogits):
        return pick(logits)[:, 0]
    with single_token():
        return materialize(dataclasses.replace(logits, x=pick(logits.x)))[:, 0]


def check_window(prompts: Sequence[Tokens], tokens: int, window: int) -> None:
    """Whether texts fit the sequences that a model is trained on; the arguments are those of `window_problems`.

    Raises:
        ConfigError: They do not.
    """
    if problems := window_problems(prompts, tokens, window):
        raise ConfigError("Nothing can be generated:", problems)


def window_problems(prompts: Sequence[Tokens], tokens: int, window: int) -> list[Problem]:
    """What keeps texts from fitting the sequences that a model is trained on.

    Args:
        prompts: The token ids to go on from; none of them may be empty.
        tokens: Tokens to add to each.
        window: The longest sequence.
    """
    problems = [] if len(prompts) else [Problem("prompt", "there is none", fix="give at least one")]
    if tokens < 0:
        problems.append(Problem("tokens", f"is {tokens}", fix="0 or more"))
    for number, prompt in enumerate(prompts):
        name = "prompt" if len(prompts) == 1 else f"prompt {number}"
        if len(prompt) == 0:
            problems.append(Problem(name, "is empty", fix="give at least one token"))
        if (total := len(prompt) + tokens) > window:
            arithmetic = f"{len(prompt)} prompt tokens + {tokens} new ones = {total} > {window}"
            what = "is longer, with its tokens, than what the model was trained on"
            problems.append(Problem(name, what, arithmetic, "ask for fewer tokens"))
    return problems
