"""A pretraining script with a partition table for `re.search`; see the package's docstring."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as PS

import spmd

VOCAB, WIDTH, HEADS, HIDDEN, LAYERS = 128, 64, 4, 128, 1
BATCH, LENGTH, STEPS = 8, 16, 3

RULES = (
    ("tokens/embedding", PS("mp", "fsdp")),
    ("attention/(query|key|value)/kernel", PS("fsdp", "mp")),
    ("attention/output/kernel", PS("mp", "fsdp")),
    ("feed_forward/(gate|up)/kernel", PS("fsdp", "mp")),
    ("feed_forward/down/kernel", PS("mp", "fsdp")),
    ("norm/scale", PS(None)),
    ("vocabulary/kernel", PS("fsdp", "mp")),
    (".*", PS(None)),
)
ACTIVATIONS = {"split": PS(("dp", "fsdp"), None, "mp"), "residual": PS(("dp", "fsdp"))}


def dense(features, name):
    return nn.Dense(features, use_bias=False, name=name)


def rotate(x):
    """Rotary positions of `[batch, token, head, feature]`."""
    half = x.shape[-1] // 2
    angles = jnp.outer(jnp.arange(x.shape[1]), 10_000 ** (-jnp.arange(half) / half))
    sin, cos = jnp.sin(angles)[None, :, None, :], jnp.cos(angles)[None, :, None, :]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        parts = {}
        for name in ("query", "key", "value"):
            part = dense(WIDTH, name)(x)
            part = spmd.annotate(part, "split")
            parts[name] = part.reshape(*x.shape[:2], HEADS, WIDTH // HEADS)
        query, key, value = rotate(parts["query"]), rotate(parts["key"]), parts["value"]
        scores = jnp.einsum("bqhf,bkhf->bhqk", query, key) / np.sqrt(WIDTH // HEADS)
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))[None, None]
        weights = nn.softmax(jnp.where(mask, scores, -1e9))
        mixed = jnp.einsum("bhqk,bkhf->bqhf", weights, value).reshape(x.shape)
        return dense(WIDTH, "output")(mixed)


class FeedForward(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden = nn.silu(dense(HIDDEN, "gate")(x)) * dense(HIDDEN, "up")(x)
        hidden = spmd.annotate(hidden, "split")
        return dense(WIDTH, "down")(hidden)


class Llama(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, name="tokens")(tokens)
        x = spmd.annotate(x, "residual")
        for number in range(LAYERS):
            normal = nn.RMSNorm(name=f"layer_{number}_attention_norm")(x)
            x = x + Attention(name=f"layer_{number}_attention")(normal)
            normal = nn.RMSNorm(name=f"layer_{number}_feed_forward_norm")(x)
            x = x + FeedForward(name=f"layer_{number}_feed_forward")(normal)
            x = spmd.annotate(x, "residual")
        return dense(VOCAB, "vocabulary")(nn.RMSNorm(name="norm")(x))


MODEL = Llama()
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))


def create_train_state(rng):
    params = MODEL.init(rng, jnp.zeros((BATCH, LENGTH), jnp.int32))["params"]
    return TrainState.create(apply_fn=MODEL.apply, params=params, tx=OPTIMIZER)


def train_step(train_state, batch):
    batch = with_sharding_constraint(batch, PS(("dp", "fsdp")))

    def loss_fn(params):
        logits = train_state.apply_fn({"params": params}, batch["tokens"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return losses.mean()

    loss, grads = jax.value_and_grad(loss_fn)(train_state.params)
    return train_state.apply_gradients(grads=grads), loss


def make_batches():
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        text = rng.integers(0, VOCAB, (BATCH, LENGTH + 1), dtype=np.int32)
        yield {"tokens": text[:, :-1], "targets": text[:, 1:]}


def main(dims=(2, 2, 2)):
    mesh = jax.make_mesh(dims, ("dp", "fsdp", "mp"), axis_types=(AxisType.Auto,) * 3)
    shapes = jax.eval_shape(create_train_state, jax.random.key(0))
    rules = spmd.rules_from_search(RULES, shapes.params, mesh=mesh, activations=ACTIVATIONS)
    shardings = rules.shardings(mesh, shapes)
    with jax.set_mesh(mesh), spmd.use_rules(rules, mesh):
        train_state = jax.jit(create_train_state)(jax.random.key(0))
        train_state = jax.device_put(train_state, shardings)
        step = jax.jit(train_step, in_shardings=(shardings, None), out_shardings=(shardings, None))
        losses = []
        for batch in make_batches():
            train_state, loss = step(train_state, batch)
            losses.append(float(loss))
    return losses, jax.device_get(train_state)
