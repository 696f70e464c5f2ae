"""Routing of tokens to experts: choices, weights and losses, as pure functions of logits.

| router | fields of `RouterConfig` |
|---|---|
| Switch (arXiv:2101.03961) | `top_k=1, normalise=False, dispatch="capacity"` |
| GShard (arXiv:2006.16668) | `top_k=2, random_second=True, balance_form="gshard",` |
| | `dispatch="capacity"` |
| Mixtral (arXiv:2401.04088): softmax after the choice | `top_k=2`, the default |
| softmax before the choice | `normalise=False` |
| DeepSeek-V2 (arXiv:2405.04434) | `normalise=False, groups=8, top_groups=3,` |
| | `group_score="max", scale=16` |
| DeepSeek-V3 (arXiv:2412.19437) | `score="sigmoid", bias_rate=1e-3, groups=8,` |
| | `top_groups=4, scale=2.5` |
| ERNIE 4.5, MiniMax M2, Trinity, …: fixed biases | `choice_bias=True` |
| Llama 4: sigmoid scores weigh experts' inputs | `top_k=1, score="sigmoid", normalise=False,` |
| | `weight_on="input"` |
| gpt-oss: softmax of the chosen logits | `top_k=4, logit_bias=True` |
| expert choice (arXiv:2202.09368) | `choice="expert", balance=0, dispatch="capacity"` |

Logits are float32 `[example, token, expert]`. Losses and loads are over the tokens of all devices,
also in a region that is manual over the batch, where each device passes its own logits. So they are
the same on every mesh. Padding is sent to no expert, uses no capacity and is excluded from means;
the losses and the load of a batch of padding alone are 0.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from spmd.errors import ConfigError, Problem, check_fields
from spmd.layers.soft_cap import soft_capped
from spmd.model_interface.remat import CHOICE
from spmd.plan.manual import batch_mean, batch_sum

_LOAD_ROUNDING = 1e-6
"""Relative error of a mean load, above that of float32."""

Valid = Bool[Array, "example token"] | None
"""True for a token and False for padding; None if there is no padding."""


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """Routing and dispatch of tokens to experts."""

    experts: int = 8
    """Experts in a layer."""
    top_k: int = 2
    """Experts per token; with choice=expert, on average and for capacity_factor=1."""
    choice: Literal["token", "expert"] = "token"
    """token: tokens choose experts; expert: experts choose tokens (which uses later tokens of the
    example, too)."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function from logits to scores."""
    logit_bias: bool = False
    """Add a learned bias to the logits, which also changes weights (gpt-oss)."""
    logit_cap: float = 0.0
    """Cap of the logits, cap · tanh(logit / cap); 0 for none (Laguna: `router_logit_softcapping`)."""
    normalise: bool = True
    """Make the weights of a token's choices add up to 1; of softmax scores this is a softmax after
    the choice. With top_k=1 all weights are 1, and the task's loss does not train the router."""
    normalise_eps: float = 0.0
    """Added to the sum that weights are divided by (DeepSeek-V3: 1e-20; LFM 2: 1e-6)."""
    weight_on: Literal["output", "input"] = "output"
    """Vectors that are multiplied by the weights: an expert's output, or its input (Llama 4)."""
    random_second: bool = False
    """Follow the second choice at random, with probability min(1, 2 · its weight) (GShard)."""
    groups: int = 1
    """Groups that experts are chosen from (DeepSeek-V3: one for each node)."""
    top_groups: int = 1
    """Groups that a token may choose from: those with the best scores."""
    group_score: Literal["top2_sum", "max"] = "top2_sum"
    """Score of a group: the sum of its two best scores (DeepSeek-V3: `noaux_tc`), or its best one
    (DeepSeek-V2: `group_limited_greedy`)."""
    scale: float = 1.0
    """A factor of all weights (DeepSeek-V3: 2.5)."""
    jitter: float = 0.0
    """In training, the router's input is multiplied by noise between 1 - jitter and 1 + jitter
    (Switch: 0.01)."""
    bias_rate: float = 0.0
    """Change of the load-balancing biases after each step (DeepSeek-V3: 0.001); 0: none, so without
    choice_bias there are no biases."""
    choice_bias: bool = False
    """Add biases to the scores for the choice, not for the weights (`e_score_correction_bias`);
    implied by bias_rate, without which they stay as they are."""
    bias_on: Literal["scores", "logits"] = "scores"
    """Numbers that these biases are added to (Kolibri: logits)."""
    balance: float = 0.01
    """Weight of the load-balance loss of each layer."""
    balance_form: Literal["switch", "gshard"] = "switch"
    """Its normalisation: switch is N·Σ f·P, which is 1 for even load; gshard is the mean of f·P
    over experts, with f of first choices, which is 1/N² for even load."""
    balance_over: Literal["batch", "example"] = "batch"
    """f and P are means over the tokens of a (micro)batch, or over those of each example; then
    losses are averaged."""
    z_loss: float = 0.0
    """Weight of the router's z-loss, the mean squared log-sum-exp of logits (ST-MoE,
    arXiv:2202.08906: 0.001)."""
    dispatch: Literal["capacity", "dropless"] = "dropless"
    """capacity: an expert takes at most `capacity` tokens of an example, the rest are dropped;
    dropless: all."""
    capacity_factor: float = 1.25
    """Capacity of an expert with dispatch=capacity, relative to even load; inf drops nothing."""
    buffer_factor: float = 1.25
    """Rows that a device takes in a pass with dispatch=dropless, relative to even load; more passes
    take the others."""
    chunks: int = 1
    """Parts of a device's tokens with dispatch=dropless, if they divide: rows of one are sent while
    another's are multiplied."""

    def __post_init__(self) -> None:
        counts = ("experts", "top_k", "groups", "top_groups", "chunks")
        rules = dict.fromkeys(counts, "at least 1")
        least_0 = ("bias_rate", "balance", "z_loss", "normalise_eps", "logit_cap")
        rules |= dict.fromkeys(least_0, "at least 0 and finite")
        rules["jitter"] = "at least 0 and below 1"
        rules["scale"] = "above 0 and finite"
        rules |= dict.fromkeys(("capacity_factor", "buffer_factor"), "above 0")
        choices: dict[str, Any] = {
            "weight_on": ("output", "input"),
            "group_score": ("top2_sum", "max"),
            "bias_on": ("scores", "logits"),
        }
        problems = check_fields(self, rules | choices, prefix="router.")
        if not problems:
            problems = [*self._check_choice(), *self._check_groups(), *self._check_effects()]
        if problems:
            raise ConfigError("Invalid router:", problems)

    def _check_choice(self) -> Iterator[Problem]:
        if self.top_k > self.experts:
            yield Problem(
                "router.top_k",
                "is larger than router.experts",
                f"top_k {self.top_k} > experts {self.experts}",
                "a smaller one",
            )
        if self.random_second and self.top_k != 2:
            yield Problem("router.random_second", f"needs top_k=2, not {self.top_k}", fix="top_k=2")
        if self.random_second and not self.normalise:
            yield Problem(
                "router.random_second",
                "needs normalised weights",
                "its probability is defined for weights that add up to 1",
                "normalise=True",
            )
        if self.chunks > 1 and self.dispatch == "capacity":
            yield Problem(
                "router.chunks",
                "cannot be used with dispatch=capacity",
                "slots are of whole examples",
                "dropless",
            )
        if self.choice == "expert":
            yield from self._check_choice_of_experts()

    def _check_choice_of_experts(self) -> Iterator[Problem]:
        what = "cannot be used with choice=expert"
        if self.dispatch == "dropless":
            why = "experts take as many tokens as their capacity"
            yield Problem("router.dispatch", what, why, "capacity")
        if self.balance > 0:
            yield Problem("router.balance", what, "load is even", "0")
        if self.bias_rate > 0:
            yield Problem("router.bias_rate", what, "load is even", "0")
        if self.choice_bias:
            yield Problem("router.choice_bias", what, "load is even", "false")
        if self.random_second:
            yield Problem("router.random_second", what, "tokens have no second choice", "false")
        if self.groups > 1:
            yield Problem("router.groups", what, "tokens do not choose", "1")

    def _check_groups(self) -> Iterator[Problem]:
        size = self.experts // self.groups
        within = self.top_groups * self.experts // self.groups
        if self.experts % self.groups:
            yield Problem(
                "router.groups",
                "does not divide router.experts",
                f"{self.experts} / {self.groups} = {self.experts / self.groups:.4g}",
                "change one of them",
            )
        elif self.top_groups > self.groups:
            yield Problem(
                "router.top_groups",
                "is larger than router.groups",
                f"top_groups {self.top_groups} > groups {self.groups}",
                "a smaller one",
            )
        elif within < self.top_k <= self.experts:
            yield Problem(
                "router.top_groups",
                "hold fewer experts than router.top_k",
                f"{self.top_groups} groups of {size} = {within} < top_k {self.top_k}",
                "more groups",
            )

    def _check_effects(self) -> Iterator[Problem]:
        """Return a problem for each option that another one leaves without effect."""
        what = "has no effect"
        if self.normalise_eps and not self.normalise:
            yield Problem("router.normalise_eps", what, "weights are not divided", "0")
        if self.bias_on != "scores" and not self.has_choice_bias:
            yield Problem("router.bias_on", what, "there are no biases", "choice_bias=True")
        if self.group_score != "top2_sum" and self.top_groups == self.groups:
            yield Problem("router.group_score", what, "all groups are chosen from", "top2_sum")

    @property
    def has_choice_bias(self) -> bool:
        """True if biases are added to scores for the choice."""
        return self.choice_bias or self.bias_rate > 0

    @property
    def is_random(self) -> bool:
        """True if routing in training needs random numbers."""
        return self.random_second or self.jitter > 0

    def capacity(self, tokens: int) -> int:
        """Return the capacity of an expert for one example, in tokens.

        The capacity is ⌈capacity_factor · top_k · tokens / experts⌉, and at most `tokens`.

        Example:
            >>> config = RouterConfig(experts=64, top_k=1, normalise=False, capacity_factor=1.25)
            >>> config.capacity(4096)
            80
        """
        capacity = self.capacity_factor * self.top_k * tokens / self.experts
        if capacity >= tokens:
            return tokens
        return math.ceil(capacity)

    def capacities(self, valid: Bool[Array, "example token"]) -> Int[Array, "example"]:
        """Return the `capacity` of each example, for its tokens without padding."""
        longest = valid.shape[1]
        by_tokens = [0, *map(self.capacity, range(1, longest + 1))]
        tokens = valid.sum(axis=1)
        return jnp.asarray(by_tokens, jnp.int32)[tokens]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Experts and weights of each token. Only weights have gradients."""

    # `config.experts` for padding and for a choice that is not followed
    experts: Int[Array, "example token choice"]
    weights: Float[Array, "example token choice"]  # 0 for these
    # Slots of an expert to fill in each example; None for all.
    capacities: Int[Array, "example"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterReport:
    """Weighted losses of one router, and how often each expert is chosen, over a (micro)batch."""

    balance: Float[Array, ""]
    z_loss: Float[Array, ""]
    load: Float[Array, "expert"]


def route(
    logits: Float[Array, "example token expert"],
    config: RouterConfig,
    *,
    key: Array | None = None,
    bias: Float[Array, "expert"] | None = None,
    valid: Valid = None,
) -> tuple[Routing, RouterReport]:
    """Return each token's experts and weights, and the router's losses and load.

    Args:
        key: For training; None in evaluation, where every second choice is followed.
        bias: Added to scores for the choice, not for the weights (DeepSeek-V3).
        valid: Mask of the tokens. The logits of padding change no result, not even by rounding.

    Example:
        >>> logits = jnp.array([[[0.0, 1.0, 2.0]]])
        >>> routing, _ = route(logits, RouterConfig(experts=3, top_k=2))
        >>> routing.experts.tolist(), [round(float(w), 3) for w in routing.weights[0, 0]]
        ([[[2, 1]]], [0.731, 0.269])
    """
    assert logits.dtype == jnp.float32, "a router computes in float32"
    valid = _mask(valid, logits)
    logits = jnp.where(valid[..., None], logits, 0.0)
    if config.logit_cap:
        logits = soft_capped(logits, config.logit_cap)
    scores = _scores(logits, config)
    if config.choice == "expert":
        routing = _experts_choose(scores, config, valid)
        load = _load(routing.experts, config.experts)
        balance = jnp.zeros((), jnp.float32)
        z = z_loss(logits, config, valid)
        return routing, RouterReport(balance, z, load)
    ranking = scores
    if config.bias_on == "logits":
        ranking = logits
    if bias is not None:
        ranking = ranking + bias[None, None]
    experts, weights = _tokens_choose(scores, ranking, config, valid)
    balance = balance_loss(scores, experts, config, valid)
    z = z_loss(logits, config, valid)
    load = _load(experts, config.experts)
    report = RouterReport(balance, z, load)
    if config.random_second and key is not None:
        experts, weights = _follow_second_at_random(experts, weights, config, key)
    capacities = None
    if config.dispatch == "capacity":
        capacities = config.capacities(valid)
    return Routing(experts, weights * config.scale, capacities), report


def _scores(
    logits: Float[Array, "example token expert"], config: RouterConfig
) -> Float[Array, "example token expert"]:
    if config.score == "softmax":
        return jax.nn.softmax(logits)
    return jax.nn.sigmoid(logits)


def _tokens_choose(
    scores: Float[Array, "example token expert"],
    ranking: Float[Array, "example token expert"],
    config: RouterConfig,
    valid: Bool[Array, "example token"],
) -> tuple[Int[Array, "example token choice"], Float[Array, "example token choice"]]:
    """Let each token choose the best experts of its ranking; return experts and weights."""
    ranking = _mask_groups(jax.lax.stop_gradient(ranking), config)
    best, _ = _top_k(ranking, config.top_k)
    experts = checkpoint_name(best, CHOICE)
    weights = jnp.stack([_pick(scores, experts[..., i]) for i in range(config.top_k)], axis=-1)
    if config.normalise:
        total = weights.sum(axis=-1, keepdims=True)
        if config.normalise_eps:
            total = total + config.normalise_eps
        weights = weights / total
    experts = jnp.where(valid[..., None], experts, config.experts)
    weights = jnp.where(valid[..., None], weights, 0.0)
    return experts, weights


def _follow_second_at_random(
    experts: Int[Array, "example token choice"],
    weights: Float[Array, "example token choice"],
    config: RouterConfig,
    key: Array,
) -> tuple[Int[Array, "example token choice"], Float[Array, "example token choice"]]:
    """Drop second choices at random; a token without one has the expert `config.experts`."""
    uniform = jax.random.uniform(key, weights.shape[:-1])
    probability = second_probability(jax.lax.stop_gradient(weights[..., 1]))
    followed = checkpoint_name(probability > uniform, CHOICE)
    second = jnp.where(followed, experts[..., 1], config.experts)
    experts = experts.at[..., 1].set(second)
    weights = weights.at[..., 1].multiply(followed)
    return experts, weights


def second_probability(weight: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return GShard's probability of following a second choice, min(1, 2 · weight).

    The weights of a token's two choices add up to 1.
    """
    return jnp.minimum(1.0, 2.0 * weight)


def jittered(x: Float[Array, "..."], jitter: float, key: Array) -> Float[Array, "..."]:
    """Multiply a router's input by noise of 1 − jitter to 1 + jitter (Switch, section 2.2)."""
    return x * jax.random.uniform(key, x.shape, x.dtype, 1 - jitter, 1 + jitter)


def balance_loss(
    scores: Float[Array, "example token expert"],
    experts: Int[Array, "example token choice"],
    config: RouterConfig,
    valid: Valid = None,
) -> Float[Array, ""]:
    """Return the load-balance loss.

    The loss is α·N·Σᵢ fᵢ·Pᵢ (Switch, equation 4) or α·Σᵢ fᵢ·Pᵢ/N (GShard, algorithm 1). fᵢ is the
    fraction of choices that are expert i and Pᵢ its mean score, normalised to sum to 1 for each
    token.
    """
    valid = _mask(valid, scores)
    shares = scores
    if config.score == "sigmoid":
        shares = scores / scores.sum(axis=-1, keepdims=True)
    if config.balance_form == "gshard":
        experts = experts[..., :1]
    chosen = jax.nn.one_hot(experts, config.experts).mean(axis=-2)
    if config.balance_over == "batch":
        return weighted_balance(batch_mean(chosen, valid), batch_mean(shares, valid), config)
    tokens = valid.sum(axis=1, dtype=jnp.float32)
    fractions = _example_means(chosen, valid, tokens)
    means = _example_means(shares, valid, tokens)
    losses = weighted_balance(fractions, means, config)
    return batch_mean(losses, tokens > 0)


def _example_means(
    x: Float[Array, "example token expert"],
    valid: Bool[Array, "example token"],
    tokens: Float[Array, "example"],
) -> Float[Array, "example expert"]:
    """Return the mean over each example's valid tokens; `tokens` is their number."""
    total = jnp.where(valid[..., None], x, 0.0).sum(axis=1)
    return total / jnp.maximum(tokens, 1)[:, None]


def weighted_balance(
    fractions: Float[Array, "... expert"], shares: Float[Array, "... expert"], config: RouterConfig
) -> Float[Array, "..."]:
    """Return the load-balance loss for given f (`fractions`) and P (`shares`).

    Example:
        >>> even = jnp.full(8, 1 / 8)
        >>> float(weighted_balance(even, even, RouterConfig(balance=0.5)))
        0.5
    """
    products = jax.lax.stop_gradient(fractions) * shares
    if config.balance_form == "gshard":
        return config.balance * products.mean(axis=-1)
    return config.balance * config.experts * products.sum(axis=-1)


def z_loss(
    logits: Float[Array, "example token expert"], config: RouterConfig, valid: Valid = None
) -> Float[Array, ""]:
    """Return the router's z-loss (ST-MoE, equation 5), to keep logits small."""
    squares = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    return config.z_loss * batch_mean(squares, _mask(valid, logits))


def balanced_bias(
    bias: Float[Array, "... expert"], load: Float[Array, "... expert"], rate: float
) -> Float[Array, "... expert"]:
    """Raise the biases of experts below the mean load and lower others.

    Source: DeepSeek-V3 (arXiv:2412.19437), section 2.1.2. A load that differs from the mean by
    rounding alone changes nothing.
    """
    mean = load.mean(axis=-1, keepdims=True)
    missing = mean - load
    is_even = jnp.abs(missing) <= _LOAD_ROUNDING * mean
    return bias + rate * jnp.where(is_even, 0.0, jnp.sign(missing))


def expert_slots(
    experts: Int[Array, "example token choice"],
    count: int,
    capacity: int,
    filled: Int[Array, "example"] | None = None,
) -> tuple[Int[Array, "example token choice"], Float[Array, ""]]:
    """Return each choice's slot among its example's `count · capacity`, and the number of drops.

    Slots are in order of experts. First choices are placed before second ones, and earlier tokens
    before later ones. A choice that is dropped or not followed has the slot `count · capacity`.

    Args:
        filled: The slots of an expert that each example may fill, at most `capacity`; None for all.
    """
    examples, tokens, choices = experts.shape
    queue = experts.swapaxes(1, 2).reshape(examples, choices * tokens)
    mine = jax.nn.one_hot(queue, count, dtype=jnp.bool_)  # [example, choice · token, expert]
    number = jnp.cumsum(mine, axis=1, dtype=jnp.int32) - 1
    position = jnp.where(mine, number, 0).sum(axis=-1)
    limit: Any = capacity
    if filled is not None:
        limit = filled[:, None]
    is_full = (position >= limit) & (queue < count)
    is_without = is_full | (queue >= count)
    slot = jnp.where(is_without, count * capacity, queue * capacity + position)
    slot = slot.reshape(examples, choices, tokens).swapaxes(1, 2)
    return slot, is_full.sum(dtype=jnp.float32)


def _experts_choose(
    scores: Float[Array, "example token expert"],
    config: RouterConfig,
    valid: Bool[Array, "example token"],
) -> Routing:
    """Let each expert choose the tokens with its best scores in each example."""
    ranking = jax.lax.stop_gradient(scores)
    ranking = jnp.where(valid[..., None], ranking, -jnp.inf)  # padding is last
    order = jnp.argsort(-ranking, axis=1)
    rank = jnp.argsort(order, axis=1)
    capacities = config.capacities(valid)
    taken = checkpoint_name(rank < capacities[:, None, None], CHOICE)
    ids = jax.lax.broadcasted_iota(jnp.int32, taken.shape, 2)
    experts = jnp.where(taken, ids, config.experts)
    weights = jnp.where(taken, scores, 0.0)
    return Routing(experts, weights * config.scale, capacities)


def _mask(
    valid: Valid, tokens: Float[Array, "example token expert"]
) -> Bool[Array, "example token"]:
    if valid is None:
        return jnp.ones(tokens.shape[:2], jnp.bool_)
    return valid


def _mask_groups(
    ranking: Float[Array, "example token expert"], config: RouterConfig
) -> Float[Array, "example token expert"]:
    """Set the scores of all but a token's best groups to −∞."""
    if config.top_groups == config.groups:
        return ranking
    grouped = ranking.reshape(*ranking.shape[:-1], config.groups, -1)
    count = min(2, grouped.shape[-1])
    if config.group_score == "max":
        count = 1
    _, best = _top_k(grouped, count)
    allowed, _ = _top_k(best.sum(axis=-1), config.top_groups)
    is_allowed = jax.nn.one_hot(allowed, config.groups, dtype=jnp.bool_).any(axis=-2)
    masked = jnp.where(is_allowed[..., None], grouped, -jnp.inf)
    return masked.reshape(ranking.shape)


def _top_k(
    scores: Float[Array, "... expert"], count: int
) -> tuple[Int[Array, "... count"], Float[Array, "... count"]]:
    """Return the positions and values of the largest scores, in descending order."""
    positions, values = [], []
    for _ in range(count):  # with `jax.lax.top_k`, XLA would gather the scores of all devices
        position = jnp.argmax(scores, axis=-1)
        positions.append(position)
        values.append(scores.max(axis=-1))
        is_found = jax.nn.one_hot(position, scores.shape[-1], dtype=jnp.bool_)
        scores = jnp.where(is_found, -jnp.inf, scores)
    return jnp.stack(positions, axis=-1), jnp.stack(values, axis=-1)


def _pick(scores: Float[Array, "... expert"], expert: Int[Array, "..."]) -> Float[Array, "..."]:
    """Return one score of each token, by a masked sum in place of a gather."""
    is_expert = jax.nn.one_hot(expert, scores.shape[-1], dtype=jnp.bool_)
    return jnp.where(is_expert, scores, 0.0).sum(axis=-1)


def _load(experts: Int[Array, "example token choice"], count: int) -> Float[Array, "expert"]:
    """Return the number of choices of each expert."""
    counts = jax.nn.one_hot(experts, count).sum(axis=(0, 1, 2))
    return batch_sum(counts)
