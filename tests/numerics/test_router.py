"""Routers choose, weigh and penalise as published, and say everything that is wrong with a config at once."""

import importlib
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.errors import ConfigError
from spmd.layers.router import (
    RouterConfig,
    balance_loss,
    balanced_bias,
    expert_slots,
    jittered,
    route,
    second_probability,
    weighted_balance,
    z_loss,
)
from tests.tiers import soak_but

LOGITS = jnp.asarray(np.random.default_rng(0).standard_normal((2, 16, 8)) * 2, jnp.float32)


def softmax(x):
    x = np.exp(np.asarray(x, np.float64) - np.max(x, axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def one_hot_logits(choices, experts, gap=1.0):
    """Logits under which token *i* prefers `choices[i][0]`, then `choices[i][1]` and so on."""
    logits = np.zeros((1, len(choices), experts), np.float32)
    for token, wanted in enumerate(choices):
        for rank, expert in enumerate(wanted):
            logits[0, token, expert] = (len(wanted) - rank) * gap
    return jnp.asarray(logits)


# The published figures: Fedus et al., Switch Transformers (arXiv:2101.03961), equations 3 and 4 and
# section 2.4; Lepikhin et al., GShard (arXiv:2006.16668), section 2.2 and algorithm 1.


def test_switch_capacity():
    """4096 tokens, 64 experts and a factor of 1.25: room for 80 tokens."""
    assert (
        RouterConfig(experts=64, top_k=1, normalise=False, capacity_factor=1.25).capacity(4096)
        == 80
    )


def test_gshard_capacity():
    """65,536 tokens in 64 groups, 128 experts, two choices: 2N/(G·E) = 16."""
    assert RouterConfig(experts=128, top_k=2, capacity_factor=1.0).capacity(65_536 // 64) == 16


def test_capacity_is_rounded_up_and_never_more_than_all_tokens():
    """An expert is chosen by a token once at most, so an infinite factor is room for each token."""
    assert RouterConfig(experts=8, top_k=1, normalise=False, capacity_factor=1.0).capacity(12) == 2
    assert RouterConfig(experts=8, top_k=2, capacity_factor=math.inf).capacity(12) == 12
    assert RouterConfig(experts=2, top_k=2, capacity_factor=1.5).capacity(12) == 12


@pytest.mark.parametrize(
    ("parts", "shares", "alpha", "expected"),
    [
        ([1 / 8] * 8, [1 / 8] * 8, 0.01, 0.01),
        ([1, 0, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0], 0.01, 0.08),
        ([0.5, 0.25, 0.25, 0], [0.4, 0.3, 0.2, 0.1], 0.01, 0.013),
    ],
    ids=["uniform", "collapsed", "mixed"],
)
def test_switch_balance_loss(parts, shares, alpha, expected):
    """α·N·Σ f·P: α for even load, α·N where all goes to one expert."""
    config = RouterConfig(experts=len(parts), top_k=1, normalise=False, balance=alpha)
    with jax.enable_x64(True):
        loss = weighted_balance(
            jnp.array(parts, jnp.float64), jnp.array(shares, jnp.float64), config
        )
    assert float(loss) == pytest.approx(expected, rel=1e-9)


def test_gshard_balance_loss_is_the_mean_over_experts():
    """Σ f·P / N, so it is N² times smaller than Switch's."""
    parts, shares = jnp.array([0.5, 0.25, 0.25, 0]), jnp.array([0.4, 0.3, 0.2, 0.1])
    gshard, switch = (
        weighted_balance(parts, shares, RouterConfig(experts=4, balance=1.0, balance_form=form))
        for form in ("gshard", "switch")
    )
    assert float(gshard) == pytest.approx(0.325 / 4)
    assert float(switch) == pytest.approx(16 * float(gshard))


def test_gshard_second_choices_are_followed_with_twice_their_weight():
    """min(1, 2·g₂): certain from one half on."""
    expected = np.float32([0.2, 0.8, 1.0, 1.0])
    np.testing.assert_array_equal(second_probability(jnp.array([0.1, 0.4, 0.5, 0.6])), expected)


def test_second_choices_are_followed_as_often_as_said():
    """Over 4,000 tokens with g₂ = 0.2, four in ten; their weight is kept, and 0 for the others."""
    # softmax over the two: 0.8 and 0.2
    logits = one_hot_logits([(2, 5)] * 4000, 8, gap=math.log(4))
    config = RouterConfig(experts=8, random_second=True, balance_form="gshard")
    routing, _ = jax.jit(lambda logits, key: route(logits, config, key=key))(
        logits, jax.random.key(0)
    )
    followed = np.asarray(routing.experts[0, :, 1] == 5)
    assert followed.mean() == pytest.approx(0.4, abs=0.03)
    np.testing.assert_array_equal(np.asarray(routing.experts[0, ~followed, 1]), 8)
    np.testing.assert_allclose(routing.weights[0, followed, 1], 0.2, rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(routing.weights[0, ~followed, 1]), 0.0)
    np.testing.assert_allclose(routing.weights[0, :, 0], 0.8, rtol=1e-5)
    evaluated, _ = jax.jit(lambda logits: route(logits, config))(logits)
    np.testing.assert_array_equal(np.asarray(evaluated.experts[0, :, 1]), 5)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_softmax_before_the_choice(top_k):
    """The weights are the largest probabilities themselves."""
    routing, _ = route(LOGITS, RouterConfig(top_k=top_k, normalise=False))
    best = np.sort(softmax(LOGITS), axis=-1)[..., ::-1][..., :top_k]
    np.testing.assert_allclose(routing.weights, best, rtol=1e-5)
    np.testing.assert_array_equal(
        routing.experts, np.argsort(-np.asarray(LOGITS), axis=-1)[..., :top_k]
    )


def test_softmax_after_the_choice():
    """Normalised weights are the softmax of the chosen logits alone (Mixtral), with its gradient."""
    config = RouterConfig(top_k=2)
    routing, _ = route(LOGITS, config)
    chosen = np.take_along_axis(np.asarray(LOGITS), np.asarray(routing.experts), axis=-1)
    np.testing.assert_allclose(routing.weights, softmax(chosen), rtol=1e-5)
    weight = jnp.asarray(np.random.default_rng(1).standard_normal((2, 16, 2)), jnp.float32)

    def after(logits):
        return (jax.nn.softmax(jax.lax.top_k(logits, 2)[0]) * weight).sum()

    ours = jax.grad(lambda logits: (route(logits, config)[0].weights * weight).sum())(LOGITS)
    np.testing.assert_allclose(
        ours, jax.grad(after)(LOGITS), atol=16 * float(np.finfo(np.float32).eps)
    )


def test_sigmoid_scores_with_a_bias_that_only_chooses():
    """DeepSeek-V3: the bias decides who is chosen; weights are the unbiased scores, normalised and scaled."""
    config = RouterConfig(score="sigmoid", top_k=2, scale=2.5, bias_rate=1e-3)
    bias = jnp.zeros(8).at[3].set(10.0)
    routing, _ = route(LOGITS, config, bias=bias)
    assert (np.asarray(routing.experts[..., 0]) == 3).all()
    scores = 1 / (
        1
        + np.exp(
            -np.take_along_axis(np.asarray(LOGITS, np.float64), np.asarray(routing.experts), -1)
        )
    )
    np.testing.assert_allclose(
        routing.weights, 2.5 * scores / scores.sum(-1, keepdims=True), rtol=1e-5
    )
    assert (np.asarray(route(LOGITS, config)[0].experts[..., 0]) != 3).any()


def test_biases_move_towards_even_load():
    """Up where load is below the mean, down where it is above, by the rate; repeated, the load becomes even."""
    np.testing.assert_allclose(
        balanced_bias(jnp.zeros(3), jnp.array([1.0, 2.0, 3.0]), 0.1), [0.1, 0.0, -0.1], atol=1e-7
    )
    config = RouterConfig(score="sigmoid", top_k=2, bias_rate=0.02)
    skewed = LOGITS + jnp.linspace(0.0, 3.0, 8)[None, None]
    bias, spread = jnp.zeros(8), []
    for _ in range(200):
        load = route(skewed, config, bias=bias)[1].load
        spread.append(float(load.max() / load.mean()))
        bias = balanced_bias(bias, load, config.bias_rate)
    assert spread[0] > 2
    assert np.mean(spread[-20:]) < 1.5


def test_a_token_keeps_to_its_groups():
    """With 2 of 4 groups, all choices are in the two whose two best scores have the largest sums."""
    routing, _ = route(LOGITS, RouterConfig(top_k=4, groups=4, top_groups=2))
    scores = softmax(LOGITS).reshape(2, 16, 4, 2).sum(-1)
    best = np.argsort(-scores, axis=-1)[..., :2]
    for at in np.ndindex(2, 16):
        assert set(np.asarray(routing.experts[at]) // 2) == set(best[at])
    free, _ = route(LOGITS, RouterConfig(top_k=4))
    assert (np.asarray(free.experts) != np.asarray(routing.experts)).any()  # the control


def test_experts_choose_their_tokens():
    """Each takes the tokens with the best scores for it, as many as it has room for; load is exactly even."""
    config = RouterConfig(
        choice="expert", top_k=2, capacity_factor=1.0, balance=0, dispatch="capacity"
    )
    routing, report = route(LOGITS, config)
    scores = softmax(LOGITS)
    for example, expert in np.ndindex(2, 8):
        taken = np.flatnonzero(np.asarray(routing.experts[example, :, expert]) == expert)
        np.testing.assert_array_equal(taken, np.sort(np.argsort(-scores[example, :, expert])[:4]))
        np.testing.assert_allclose(
            routing.weights[example, taken, expert], scores[example, taken, expert], rtol=1e-5
        )
    np.testing.assert_array_equal(np.asarray(report.load), 8.0)
    assert float(expert_slots(routing.experts, 8, config.capacity(16))[1]) == 0


def test_load_and_balance_loss_are_those_of_the_choices():
    """Parts f from hand-counted choices, P from the mean of probabilities; in GShard's form f is of first choices."""
    for form, choices in (("switch", 2), ("gshard", 1)):
        config = RouterConfig(balance=0.3, balance_form=form)
        routing, report = route(LOGITS, config)
        ids = np.asarray(routing.experts)
        parts = np.bincount(ids[..., :choices].ravel(), minlength=8) / ids[..., :choices].size
        products = parts * softmax(LOGITS).mean(axis=(0, 1))
        expected = 0.3 * (products.mean() if form == "gshard" else 8 * products.sum())
        assert float(report.balance) == pytest.approx(expected, rel=1e-5)
        np.testing.assert_array_equal(
            np.asarray(report.load), np.bincount(ids.ravel(), minlength=8)
        )


def test_balance_over_examples_is_the_mean_of_the_examples_losses():
    """So cutting a batch into microbatches does not change it, which it does for the loss over the batch."""
    config = RouterConfig(balance_over="example")
    whole = float(route(LOGITS, config)[1].balance)
    apart = [float(route(LOGITS[i : i + 1], config)[1].balance) for i in range(2)]
    assert whole == pytest.approx(np.mean(apart), rel=1e-6)
    assert float(route(LOGITS, RouterConfig())[1].balance) != pytest.approx(whole, rel=1e-4)


def test_the_balance_loss_pushes_towards_even_load():
    """Its gradient lowers the logit of an expert that every token chooses; f has no gradient."""
    logits = one_hot_logits([(0,)] * 4, 4)
    gradient = jax.grad(
        lambda x: route(x, RouterConfig(experts=4, top_k=1, normalise=False))[1].balance
    )(logits)
    assert (np.asarray(gradient[..., 0]) > 0).all()
    assert (np.asarray(gradient[..., 1:]) < 0).all()
    assert (
        float(
            balance_loss(
                jax.nn.softmax(logits),
                jnp.zeros((1, 4, 1), int),
                RouterConfig(experts=4, top_k=1, normalise=False),
            )
        )
        > 0
    )


def test_z_loss():
    """The mean of squared log-sum-exps."""
    expected = 0.001 * np.mean(np.log(np.exp(np.asarray(LOGITS, np.float64)).sum(-1)) ** 2)
    assert float(z_loss(LOGITS, RouterConfig(z_loss=0.001))) == pytest.approx(expected, rel=1e-5)


def test_jitter_stays_within_its_bounds():
    """Noise between 1 − ε and 1 + ε, different for each element."""
    noisy = np.asarray(jittered(jnp.ones((64, 64)), 0.01, jax.random.key(0)))
    assert 0.99 <= noisy.min() < 0.991
    assert 1.009 < noisy.max() <= 1.01


def test_routers_refuse_rounded_logits():
    """A router computes in float32."""
    with pytest.raises(AssertionError, match="float32"):
        route(LOGITS.astype(jnp.bfloat16), RouterConfig())


@pytest.mark.parametrize(
    ("choices", "capacity", "dropped", "expected"),
    [
        ([(0,), (0,), (1,), (0,)], 2, 1, [0, 1, 2, 4]),
        ([(0,), (0,), (1,), (0,)], 1, 2, [0, 2, 1, 2]),
        ([(0,), (0,), (1,), (0,)], 4, 0, [0, 1, 4, 2]),
        ([(0, 1), (1, 0)], 1, 2, [0, 2, 1, 2]),  # first choices go first
        ([(0, 1), (0, 1), (1, 0)], 2, 2, [0, 3, 1, 4, 2, 4]),
        ([(2, 2)], 1, 0, [2, 2]),  # 2 of 2: not followed, and not dropped
    ],
    ids=str,
)
def test_places_and_dropped_counts_by_hand(choices, capacity, dropped, expected):
    """Earlier tokens come first, first choices before second ones; what finds no room is counted."""
    found, count = expert_slots(jnp.array([choices]), 2, capacity)
    np.testing.assert_array_equal(np.asarray(found).ravel(), expected)
    assert float(count) == dropped


def test_each_example_has_its_own_room():
    """Tokens of one example drop none of another, so a mesh that splits examples changes nothing."""
    both = jnp.zeros((2, 3, 1), jnp.int32)
    found, dropped = expert_slots(both, 2, 2)
    np.testing.assert_array_equal(np.asarray(found)[..., 0], [[0, 1, 4], [0, 1, 4]])
    assert float(dropped) == 2


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"capacity_factor": 0.0}, ["capacity_factor"]),
        ({"capacity_factor": -1.0, "top_k": 0}, ["capacity_factor", "top_k"]),
        ({"capacity_factor": math.nan, "balance": math.nan}, ["capacity_factor", "balance"]),
        ({"top_k": 9}, ["top_k"]),
        ({"experts": 0, "jitter": 1.5, "z_loss": -1.0}, ["experts", "jitter", "z_loss"]),
        ({"random_second": True, "top_k": 1, "normalise": False}, ["random_second"]),
        ({"normalise": False, "normalise_eps": 1e-20}, ["normalise_eps"]),
        ({"bias_on": "logits", "group_score": "max"}, ["bias_on", "group_score"]),
        ({"weight_on": "hidden", "logit_cap": -1.0}, ["weight_on", "logit_cap"]),
        ({"z_loss": math.inf, "scale": math.inf}, ["z_loss", "scale"]),
        ({"choice": "expert"}, ["dispatch", "balance"]),
        (
            {"choice": "expert", "bias_rate": 0.1, "groups": 2, "choice_bias": True},
            ["dispatch", "balance", "bias_rate", "groups", "choice_bias"],
        ),
        ({"groups": 3}, ["groups"]),
        ({"groups": 4, "top_groups": 5}, ["top_groups"]),
        ({"groups": 8, "top_groups": 1}, ["top_groups"]),
    ],
    ids=str,
)
def test_a_router_that_cannot_be_built_lists_every_reason(fields, wrong):
    """One error with all of them, each with a fix."""
    with pytest.raises(ConfigError) as caught:
        RouterConfig(**fields)
    assert {problem.where for problem in caught.value.problems} == {
        f"router.{field}" for field in wrong
    }
    assert all(problem.fix for problem in caught.value.problems)


def dense_weights(routing):
    """The weight of each expert, `[token, expert]`."""
    chosen = jax.nn.one_hot(routing.experts, 8) * routing.weights[..., None]
    return np.asarray(chosen.sum(axis=2)).reshape(-1, 8)


BIAS = np.linspace(0.3, -0.3, 8, dtype=np.float32)
COUNTS = {"hidden_size": 8, "hidden_dim": 8, "num_hidden_layers": 1, "num_experts_per_tok": 3}
EXPERTS = dict.fromkeys(
    ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 8
)
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
V3 = {"score": "sigmoid", "normalise_eps": 1e-20, "choice_bias": True}
V3_GROUPS = {**V3, "groups": 4, "top_groups": 2, "scale": 2.5}
THEIRS = {
    # (family, class, config.json, whether its call takes the bias, our router)
    "deepseek_v2": (
        "DeepseekV2TopkRouter",
        {**GROUPS, "topk_method": "group_limited_greedy"},
        False,
        {"normalise": False, "groups": 4, "top_groups": 2, "group_score": "max", "scale": 2.5},
    ),
    "deepseek_v3": (
        "DeepseekV3TopkRouter",
        {**GROUPS, "norm_topk_prob": True},
        False,
        V3_GROUPS,
    ),
    "llama4": ("Llama4Router", {}, False, {"score": "sigmoid", "normalise": False}),
    "gpt_oss": ("GptOssTopKRouter", {}, False, {}),
    "mixtral": ("MixtralTopKRouter", {"num_experts_per_tok": 1}, False, {"top_k": 1}),
    "qwen3_moe": ("Qwen3MoeTopKRouter", {"norm_topk_prob": False}, False, {"normalise": False}),
    "minimax_m2": ("MiniMaxM2TopKRouter", {}, True, {"score": "sigmoid", "choice_bias": True}),
    "lfm2_moe": (
        "Lfm2MoeTopKRouter",
        {"use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.5},
        True,
        {"score": "sigmoid", "choice_bias": True, "normalise_eps": 1e-6, "scale": 1.5},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeTopKRouter",
        {"moe_k": 3, "moe_norm_min": 1e-12, "num_experts_per_tok": 3},
        False,
        {"choice_bias": True},
    ),
    "kolibri1": (
        "Kolibri1TopKRouter",
        {"norm_topk_prob": True},
        False,
        {"score": "sigmoid", "choice_bias": True, "bias_on": "logits"},
    ),
    "laguna": (
        "LagunaTopKRouter",
        {"moe_router_logit_softcapping": 1.5},
        False,
        {"score": "sigmoid", "choice_bias": True, "logit_cap": 1.5},
    ),
    "hy_v3": ("HYV3TopKRouter", {"router_scaling_factor": 2.0}, True, {**V3, "scale": 2.0}),
    "granitemoe": ("GraniteMoeTopKRouter", {"num_experts_per_tok": 3}, False, {}),
}


@pytest.mark.parametrize(
    "family",  # the oldest supported transformers names the routers of DeepSeek otherwise
    soak_but(THEIRS, "gpt_oss", "mixtral"),
)
def test_weights_are_those_of_transformers(family):
    """With its own router, whose kernel is the identity; control: the default router differs."""
    torch = pytest.importorskip("torch")
    name, fields, takes_bias, ours = THEIRS[family]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = types.SimpleNamespace(**{**COUNTS, **EXPERTS, "moe_intermediate_size": 4, **fields})
    router = getattr(module, name)(config)
    for path, array in [*router.named_parameters(), *router.named_buffers()]:
        value = np.eye(8, dtype=np.float32)
        if array.ndim == 1 or array.shape[0] == 1:
            value = BIAS
        array.data = torch.from_numpy(value.copy()).reshape(array.shape)
        assert array.numel() in (8, 64), path
    x = np.asarray(LOGITS).reshape(-1, 8)
    more = [torch.from_numpy(BIAS)] if takes_bias else []
    expected = theirs_of(router(torch.from_numpy(x.copy()), *more))
    logits = LOGITS
    bias = None
    config = RouterConfig(**{"top_k": 3, **ours})
    if family == "gpt_oss":
        logits = LOGITS + jnp.asarray(BIAS)[None, None]
    if config.has_choice_bias:
        bias = jnp.asarray(BIAS)
    routing, _ = route(logits, config, bias=bias)
    np.testing.assert_allclose(dense_weights(routing), expected, rtol=1e-5, atol=1e-6)
    plain, _ = route(LOGITS, RouterConfig(top_k=3))
    assert family == "granitemoe" or np.abs(dense_weights(plain) - expected).max() > 0.05


def theirs_of(found):
    """The weight of each expert, `[token, expert]`, from one of the forms of transformers."""
    if len(found) == 2:  # Llama 4: a weight of each expert, and logits
        return found[0].detach().numpy()
    _, weights, experts = (array.detach().numpy() for array in found)
    dense = np.zeros((len(weights), 8), np.float32)
    np.put_along_axis(dense, experts, weights, axis=-1)
    return dense


def test_one_normalised_choice_weighs_1():
    """As in Mixtral with one expert per token; the task's loss then has no gradient of logits."""
    config = RouterConfig(top_k=1)
    routing, _ = route(LOGITS, config)
    np.testing.assert_array_equal(routing.weights, 1.0)
    gradient = jax.grad(lambda x: (route(x, config)[0].weights ** 2).sum())(LOGITS)
    np.testing.assert_allclose(gradient, 0.0, atol=1e-6)


def test_errors_show_the_arithmetic():
    """The comparison that fails is written down."""
    with pytest.raises(ConfigError, match="top_k 9 > experts 8"):
        RouterConfig(top_k=9)
    with pytest.raises(ConfigError, match=r"8 / 3 = 2\.667"):
        RouterConfig(groups=3)
