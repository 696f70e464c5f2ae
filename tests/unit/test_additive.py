"""Which losses are sums over examples, read from their structure: nothing is computed."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.extend.core import Primitive

import spmd
from spmd.errors import ConfigError
from spmd.gradients.additive import LossReader, LossStructure

N, S, D, C = 4, 6, 8, 3
BATCH = {
    "x": jax.ShapeDtypeStruct((N, D), jnp.float32),
    "tokens": jax.ShapeDtypeStruct((N, S), jnp.int32),
    "sequence": jax.ShapeDtypeStruct((N, S, D), jnp.float32),
    "mask": jax.ShapeDtypeStruct((N, S), jnp.float32),
    "labels": jax.ShapeDtypeStruct((N,), jnp.int32),
    "targets": jax.ShapeDtypeStruct((N, C), jnp.int32),
    "images": jax.ShapeDtypeStruct((N, 6, 6, 2), jnp.float32),
    "others": jax.ShapeDtypeStruct((N,), jnp.int32),
}
PARAMS = {
    "w": jax.ShapeDtypeStruct((D, D), jnp.float32),
    "table": jax.ShapeDtypeStruct((16, D), jnp.float32),
    "kernel": jax.ShapeDtypeStruct((3, 3, 2, 4), jnp.float32),
}


def structure(loss, weight=None, params=PARAMS, **options) -> LossStructure:
    """The structure of a loss of parameters and a batch; by default its weight is the number of examples."""

    def loss_fn(params, variables, batch, key):
        count = jnp.float32(batch["x"].shape[0]) if weight is None else weight(params, batch)
        return {"loss": loss(params, batch), "weight": count}, variables

    return LossReader(loss_fn, **options).read(params, {}, BATCH, jax.random.key(0))


def problems(loss, weight=None, **options) -> list[str]:
    """What an exchange once a step would say of a loss; empty if it is a sum."""

    def loss_fn(params, variables, batch, key):
        count = jnp.float32(batch["x"].shape[0]) if weight is None else weight(params, batch)
        found = loss(params, batch, key) if loss.__code__.co_argcount == 3 else loss(params, batch)
        return {"loss": found, "weight": count}, variables

    reader = LossReader(loss_fn, **options)
    try:
        reader.check_additive("title", PARAMS, {}, BATCH, jax.random.key(0), fix="none")
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def logits(p, b):
    return b["x"] @ p["w"]


def each(p, b):
    return optax.softmax_cross_entropy_with_integer_labels(logits(p, b), b["labels"])


def of_tokens(p, b):
    return optax.softmax_cross_entropy_with_integer_labels(
        jnp.tanh(p["table"][b["tokens"]]) @ p["w"], b["tokens"] % D
    )


def attended(p, b):
    q, k, v = (b["sequence"].reshape(-1, S, 2, D // 2) * i for i in (1, 2, 3))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    scores = jnp.where(jnp.tril(jnp.ones((S, S), bool)), scores, -jnp.inf)
    y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(-1, S, D)
    return (y @ p["w"]).sum()


def recurrent(p, b):
    def step(h, x):
        h = jnp.tanh(h @ p["w"] + x)
        return h, h.sum(-1)

    return jax.lax.scan(step, jnp.zeros_like(b["x"]), b["sequence"].swapaxes(0, 1))[1].sum()


def layers(p, b):
    stack = jnp.stack([p["w"]] * 3)
    return jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), b["x"], stack)[
        0
    ].sum()


def views(p, b, act):
    z = jnp.concatenate([b["x"], 2 * b["x"]]) @ p["w"]
    return act(*jnp.split(z / jnp.linalg.norm(z, axis=-1, keepdims=True), 2))


def convolved(p, b):
    y = jax.lax.conv_general_dilated(
        b["images"], p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return nn.max_pool(nn.relu(y), (2, 2), (2, 2))


def kl(p, b):
    mean, spread = jnp.split(logits(p, b), 2, axis=-1)
    return 0.5 * (jnp.exp(spread) + mean**2 - 1 - spread).sum()


def ctc(p, b):
    is_padding = jnp.zeros_like(b["targets"], jnp.float32)
    return optax.ctc_loss(b["sequence"] @ p["w"], 1 - b["mask"], b["targets"], is_padding).sum()


def td_error(p, b):
    q = jnp.take_along_axis(logits(p, b), b["labels"][:, None], axis=1)[:, 0]
    best = jax.lax.stop_gradient((2 * b["x"] @ p["w"]).max(-1))
    return optax.huber_loss(q, b["x"][:, 0] + 0.9 * best).sum()


def counted_by_class(p, b):
    return jax.ops.segment_sum(each(p, b), b["labels"], num_segments=D).sum()


def dropped(p, b, key):
    return (logits(p, b) * jax.random.bernoulli(key, 0.5, b["x"].shape)).sum()


def halved(p, b):
    def body(carry):
        i, x = carry
        return i + 1, x / 2

    return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, logits(p, b)))[1].sum()


SUMS = {
    "cross-entropy": lambda p, b: each(p, b).sum(),
    "a lookup by position": lambda p, b: jax.nn.log_softmax(logits(p, b))[
        jnp.arange(b["x"].shape[0]), b["labels"]
    ].sum(),
    "one-hot labels, smoothed": lambda p, b: optax.softmax_cross_entropy(
        logits(p, b), optax.smooth_labels(jax.nn.one_hot(b["labels"], D), 0.1)
    ).sum(),
    "a mean times the number": lambda p, b: each(p, b).mean() * b["x"].shape[0],
    "a masked sum": lambda p, b: (of_tokens(p, b) * b["mask"]).sum(),
    "a masked mean of each example": lambda p, b: (
        (of_tokens(p, b) * b["mask"]).sum(1) / jnp.maximum(b["mask"].sum(1), 1)
    ).sum(),
    "tokens of all examples in one dimension": lambda p, b: jnp.tanh(
        b["sequence"].reshape(-1, D) @ p["w"]
    ).sum(),
    "attention": attended,
    "a recurrent network": recurrent,
    "a cumulative sum over time": lambda p, b: (
        jnp.cumsum(b["sequence"] @ p["w"], axis=1).max(1).sum()
    ),
    "stacked layers under remat": layers,
    "mapped over examples": lambda p, b: jax.vmap(lambda x: jnp.linalg.norm(x @ p["w"]))(
        b["x"]
    ).sum(),
    "a loop over examples": lambda p, b: jax.lax.map(
        lambda x: jnp.tanh(x @ p["w"]).sum(), b["x"]
    ).sum(),
    "a loop that adds examples up": lambda p, b: jax.lax.scan(
        lambda total, x: (total + jnp.tanh(x @ p["w"]).sum(), None), 0.0, b["x"]
    )[0],
    "a loop of a fixed length": halved,
    "a branch": lambda p, b: jax.lax.cond(
        p["w"][0, 0] > 0, lambda: logits(p, b), lambda: b["x"]
    ).sum(),
    "convolutions and pooling": lambda p, b: convolved(p, b).sum(),
    "global pooling": lambda p, b: jnp.tanh(convolved(p, b).mean((1, 2))).sum(),
    "sorted rows": lambda p, b: (
        jnp.sort(logits(p, b), axis=-1)[:, :2].sum() + jax.lax.top_k(logits(p, b), 2)[0].sum()
    ),
    "argmax": lambda p, b: (logits(p, b).argmax(-1) == b["labels"]).astype(jnp.float32).sum(),
    "two views of each example": lambda p, b: views(p, b, lambda a, c: (1 - (a * c).sum(-1)).sum()),
    "a triplet in one example": lambda p, b: jax.nn.relu(
        0.2 + b["sequence"][:, 0] @ p["w"] - b["sequence"][:, 1]
    ).sum(),
    "KL divergence": kl,
    "CTC": ctc,
    "focal loss": lambda p, b: optax.sigmoid_focal_loss(
        logits(p, b), jax.nn.one_hot(b["labels"], D)
    ).sum(),
    "a TD error": td_error,
    "sums by class": counted_by_class,
    "noise for each example": dropped,
    "L2 for each example": lambda p, b: (
        each(p, b).sum() + b["x"].shape[0] * 0.1 * (p["w"] ** 2).sum()
    ),
    "a product of sums over time": lambda p, b: jnp.vdot(b["mask"], of_tokens(p, b)),
    "linear in a sum": lambda p, b: p["w"][0] @ logits(p, b).sum(0),
    "zero": lambda p, b: 0.0 * logits(p, b).sum(),
}
"""Losses that are sums over examples."""


def clip(p, b):
    places = jnp.arange(b["x"].shape[0])
    return optax.softmax_cross_entropy_with_integer_labels(logits(p, b) @ b["x"].T, places).sum()


def simclr(p, b):
    return views(p, b, lambda a, c: -jnp.diag(jax.nn.log_softmax(a @ c.T)).sum())


def vicreg(p, b):
    z = logits(p, b)
    z = z - z.mean(0, keepdims=True)
    covariance = z.T @ z / (z.shape[0] - 1)
    return jax.nn.relu(1 - jnp.sqrt(z.var(0) + 1e-4)).sum() + (covariance**2).sum()


def triplets(p, b):
    z = logits(p, b)
    return jax.nn.relu(((z - z[::-1]) ** 2).sum(-1) + 0.2).sum()


def in_order(p, b):
    return jax.lax.scan(lambda h, x: (jnp.tanh(h @ p["w"] + x), None), jnp.zeros(D), b["x"])[
        0
    ].sum()


def normalised_by_batch(p, b):
    y = logits(p, b)
    return ((y - y.mean(0, keepdims=True)) / y.std(0, keepdims=True)).sum()


MIXED = {
    "CLIP": (clip, "`dot_general` at .*combines parts of different examples"),
    "SimCLR": (simclr, "`dot_general` at .*combines parts of different examples"),
    "VICReg": (vicreg, "adds to a sum over examples what is no such sum"),
    "triplets of a batch": (triplets, "`rev` at .*goes along the dimension of examples"),
    "batch norm by hand": (normalised_by_batch, "adds to a sum over examples"),
    "a masked mean": (
        lambda p, b: (of_tokens(p, b) * b["mask"]).sum() / jnp.maximum(b["mask"].sum(), 1),
        "`max` at .*no linear function of a sum",
    ),
    "mixup": (
        lambda p, b: ((0.3 * b["x"] + 0.7 * b["x"][b["others"]]) @ p["w"]).sum(),
        "`gather` at",
    ),
    "neighbours": (
        lambda p, b: ((b["x"] - jnp.roll(b["x"], 1, 0)) @ p["w"]).sum(),
        "`slice` at .*some of the examples",
    ),
    "shuffled features": (
        lambda p, b, key: (jax.random.permutation(key, b["x"]) * logits(p, b)).sum(),
        "other examples|along the dimension of examples",
    ),
    "L2 of parameters": (
        lambda p, b: each(p, b).sum() + 0.1 * (p["w"] ** 2).sum(),
        "`add` at .*adds to a sum",
    ),
    "the largest": (
        lambda p, b: logits(p, b).max(),
        "`reduce_max` at .*one result of several examples",
    ),
    "the hardest half": (lambda p, b: jnp.sort(each(p, b))[N // 2 :].sum(), "`sort` at"),
    "a loop in order": (in_order, "`scan` at .*goes through the examples in order"),
    "a cumulative sum": (lambda p, b: jnp.cumsum(logits(p, b), 0).max(1).sum(), "`cumsum` at"),
    "a squared sum": (lambda p, b: logits(p, b).sum() ** 2, "no linear function of a sum"),
    "places": (
        lambda p, b: (jnp.arange(b["x"].shape[0]) * each(p, b)).sum(),
        "uses the place of an example",
    ),
    "a graph over the batch": (
        lambda p, b: jnp.tanh(jnp.zeros_like(b["x"]).at[b["others"]].add(logits(p, b))).sum(),
        "parts of other examples",
    ),
    "a loop until all are done": (
        lambda p, b: jax.lax.while_loop(
            lambda x: (x > 1).any(), lambda x: x / 2, logits(p, b)
        ).sum(),
        "one result of several examples",
    ),
    "attention over the batch": (
        lambda p, b: (jax.nn.softmax(jnp.einsum("nd,md->nm", logits(p, b), b["x"])) @ b["x"]).sum(),
        "`dot_general` at",
    ),
    "an example times their number": (
        lambda p, b: (jnp.ones((b["x"].shape[0],) * 2) * logits(p, b)[:, :1]).sum(1).sum(),
        "does not grow as the number of examples",
    ),
    "a table that depends on their number": (
        lambda p, b: (logits(p, b) @ jnp.linspace(0, b["x"].shape[0], D)).sum(),
        "grow|no linear function",
    ),
    "orders that differ": (
        lambda p, b: (
            b["sequence"].reshape(-1, D) * b["sequence"].swapaxes(0, 1).reshape(-1, D)
        ).sum(),
        "different examples",
    ),
}
"""Losses that are no sums over examples → what is said of them."""


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_accepted(name):
    """A loss whose examples do not meet is a sum."""
    assert problems(SUMS[name]) == []


@pytest.mark.parametrize("name", MIXED)
def test_others_are_refused(name):
    """The problem has the first operation that mixes examples, and its line."""
    loss, words = MIXED[name]
    (problem,) = problems(loss)
    assert re.search(words, problem), problem
    assert "test_additive.py" in problem or "grow" in problem


WEIGHTS = {
    "a number": (lambda p, b: jnp.float32(N), "is 4 for any number of examples"),
    "one": (lambda p, b: jnp.float32(1), "is 1 for any number of examples"),
    "of the parameters": (
        lambda p, b: jax.lax.stop_gradient(p["w"].sum()),
        "depends on no example",
    ),
    "a mean": (lambda p, b: b["mask"].mean(), "is a mean over the examples"),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_counts_the_examples(name):
    """Each device would count a number again; the controls are a count, a sum of weights and ones."""
    weight, words = WEIGHTS[name]
    (problem,) = problems(SUMS["cross-entropy"], weight)
    assert f"sum 'weight': {words}" in problem
    for count in (None, lambda p, b: b["mask"].sum(), lambda p, b: jnp.ones(b["x"].shape[0]).sum()):
        assert problems(SUMS["cross-entropy"], count) == []


def test_a_mean_is_no_sum():
    """A mean of the whole batch is told from a sum by the constant that it is divided by."""
    (problem,) = problems(lambda p, b: each(p, b).mean())
    assert "sum 'loss': is a mean over the examples" in problem
    assert "is a mean" in problems(lambda p, b: each(p, b).sum() / b["x"].shape[0])[0]
    assert problems(lambda p, b: each(p, b).sum() / N) == []  # the control: a constant factor


def test_a_loss_of_one_size_is_not_known():
    """Its shape is a constant, so nothing can be read, and that is said; declared to be a sum, it passes."""

    def loss(p, b):
        return (b["x"].reshape(N, 2, D // 2) ** 2).sum()

    assert "cannot be traced for 8 examples" in problems(loss)[0]
    assert problems(loss, additive=True) == []


_cube = Primitive("cube")
_cube.def_abstract_eval(lambda x: x)


def test_an_unknown_primitive_is_named():
    """It is refused by name, until a function is declared to treat each example by itself, or the loss a sum."""

    def loss(p, b):
        return _cube.bind(logits(p, b)).sum()

    assert "`cube` at" in problems(loss)[0]
    assert "spmd.per_example" in problems(loss)[0]
    assert problems(lambda p, b: spmd.per_example(_cube.bind)(logits(p, b)).sum()) == []
    assert problems(loss, additive=True) == []
    assert problems(lambda p, b: (_cube.bind(p["w"]) @ b["x"].T).sum()) == []  # of parameters alone


def test_a_declared_function_passes_mixes_on():
    """The control: what was mixed before the function stays mixed."""
    assert problems(lambda p, b: spmd.per_example(jnp.tanh)(b["x"][b["others"]]).sum())


class Normalised(nnx.Module):
    """Two batch norms, in Flax's NNX."""

    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)
        self.first, self.second = nnx.BatchNorm(D, rngs=rngs), nnx.BatchNorm(D, rngs=rngs)

    def __call__(self, x):
        return self.second(self.b(nnx.relu(self.first(self.a(x)))))


class Linen(nn.Module):
    """The same in Linen."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Dense(D)(x)))
        return nn.BatchNorm(use_running_average=not train)(nn.Dense(D)(x))


MODELS = {
    "nnx": lambda: spmd.from_nnx(Normalised),
    "linen": lambda: spmd.from_linen(
        Linen(), BATCH["x"], train={"train": True}, evaluate={"train": False}
    ),
}


def normalised(name, loss, *, train=True) -> tuple[LossReader, tuple]:
    """A reader of a loss of a model with batch norm, and its arguments."""
    model = MODELS[name]()

    def loss_fn(params, variables, batch, key):
        y, variables = model.forward(params, variables, key, batch["x"], train=train)
        return {"loss": loss(y), "weight": jnp.float32(len(y))}, variables

    arrays = (
        jax.eval_shape(model.init, jax.random.key(0)),
        jax.eval_shape(model.init_variables, jax.random.key(0)),
    )
    return LossReader(loss_fn), (*arrays, {"x": BATCH["x"]}, jax.random.key(0))


@pytest.mark.parametrize("name", MODELS)
def test_batch_statistics_are_of_a_microbatch(name):
    """They are refused where the whole batch is meant, and named where microbatches are; the control is evaluation."""
    reader, arguments = normalised(name, lambda y: (y**2).sum())
    assert len(reader.read(*arguments).statistics()) == 4
    with pytest.raises(ConfigError, match="is no sum over the examples"):
        reader.check_additive("title", *arguments, fix="none")
    reader.check_additive("title", *arguments, fix="none", statistics=False)
    reader, arguments = normalised(name, lambda y: (y**2).sum(), train=False)
    reader.check_additive("title", *arguments, fix="none")


def test_a_contrastive_loss_behind_batch_norm_is_seen():
    """Statistics do not hide it."""
    reader, arguments = normalised("nnx", lambda y: jax.nn.logsumexp(y @ y.T, axis=-1).sum())
    with pytest.raises(ConfigError, match=r"`dot_general` at .*different examples"):
        reader.check_additive("title", *arguments, fix="none", statistics=False)


MEANS = {
    "of examples": lambda p, b: each(p, b).mean(),
    "by hand": lambda p, b: each(p, b).sum() / b["x"].shape[0],
    "masked": lambda p, b: (of_tokens(p, b) * b["mask"]).sum() / jnp.maximum(b["mask"].sum(), 1),
    "with L2": lambda p, b: each(p, b).mean() + 0.1 * (p["w"] ** 2).sum(),
    "of a batch norm": lambda p, b: normalised_by_batch(p, b) / b["x"].shape[0],
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_with_a_count_is_refused(name):
    """The step would divide it twice; the controls are the same mean with weight 1, and a sum with either weight."""

    def traced(loss, weight):
        def loss_fn(params, variables, batch, key):
            return {"loss": loss(params, batch), "weight": weight(batch)}, variables

        jax.eval_shape(spmd.value_and_grad(loss_fn), PARAMS, spmd.Carry(), BATCH, jax.random.key(0))

    for weight in (lambda b: jnp.float32(len(b["x"])), lambda b: b["mask"].sum()):
        with pytest.raises(
            ConfigError,
            match=r"sum 'loss': is a mean over the examples, and the weight is their number",
        ):
            traced(MEANS[name], weight)
        traced(SUMS["cross-entropy"], weight)
    traced(MEANS[name], lambda b: jnp.float32(1))


def test_a_scalar_is_a_mean_of_weight_1():
    """It trains as it is; in parts it needs a weight."""

    def loss_fn(params, variables, batch, key):
        return each(params, batch).mean(), variables

    grad_fn = spmd.value_and_grad(loss_fn)
    _, sums, _ = jax.eval_shape(grad_fn, PARAMS, spmd.Carry(), BATCH, jax.random.key(0))
    assert set(sums) == {"loss", "weight"}
    with pytest.raises(
        ConfigError,
        match=r"sum 'loss': is a mean(.|\n)*sum 'weight': is 1 for any number of examples",
    ):
        jax.eval_shape(spmd.accumulate(grad_fn, 2), PARAMS, spmd.Carry(), BATCH, jax.random.key(0))


def test_accumulation_needs_a_sum():
    """A contrastive loss of each microbatch must be asked for; the control is a sum."""

    def loss_fn(params, variables, batch, key):
        return {"loss": clip(params, batch), "weight": jnp.float32(len(batch["x"]))}, variables

    def traced(**options):
        grad_fn = spmd.accumulate(spmd.value_and_grad(loss_fn), 2, **options)
        jax.eval_shape(grad_fn, PARAMS, spmd.Carry(), BATCH, jax.random.key(0))

    with pytest.raises(ConfigError, match=r"`dot_general` at (.|\n)*per_microbatch=True"):
        traced()
    traced(per_microbatch=True)


def with_values(params, variables, batch, key):
    found = logits(params, batch)
    sums = {"loss": (found**2).sum(), "weight": jnp.float32(len(found))}
    return {**sums, "values": {"largest": found.max(), "by_class": found.sum(0)}}, variables


def test_values_are_reported_as_they_are():
    """A step divides only sums; the values of microbatches must be asked for, and are those of the last."""
    grad_fn = spmd.value_and_grad(with_values)
    arguments = PARAMS, spmd.Carry(), BATCH, jax.random.key(0)
    _, sums, _ = jax.eval_shape(grad_fn, *arguments)
    assert sums["values"]["by_class"].shape == (D,)
    with pytest.raises(
        ConfigError, match=r"by_class: is reported as it is(.|\n)*largest: is reported as it is"
    ):
        jax.eval_shape(spmd.accumulate(grad_fn, 2), *arguments)
    _, sums, _ = jax.eval_shape(spmd.accumulate(grad_fn, 2, per_microbatch=True), *arguments)
    assert sums["values"]["largest"].shape == ()
