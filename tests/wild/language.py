"""BERT (NNX), a Transformer scanned over layers (Linen), a Gemma-like decoder (NNX), and Mamba (NNX)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from spmd.sharding.rules import Rules
from tests.wild.example import BATCH, SMALL, Example, draw_batches, integers

VOCAB, LENGTH, WIDTH, HEADS = 32, 8, 16, 4


def masked_mean(losses, weights):
    return (losses * weights).sum(), weights.sum()


class BertLayer(nnx.Module):
    """Attention and an MLP, each with a norm after its residual connection."""

    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.attention_norm, self.output_norm = (
            nnx.LayerNorm(WIDTH, rngs=rngs),
            nnx.LayerNorm(WIDTH, rngs=rngs),
        )
        self.intermediate = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.output = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, mask):
        x = self.attention_norm(x + self.attention(x, mask=mask))
        return self.output_norm(x + self.output(nnx.gelu(self.intermediate(x))))


class Bert(nnx.Module):
    """Logits of masked words, through the transposed table of words."""

    def __init__(self, rngs):
        self.words = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.positions, self.segments = (
            nnx.Embed(LENGTH, WIDTH, rngs=rngs),
            nnx.Embed(2, WIDTH, rngs=rngs),
        )
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.encoder = nnx.List([BertLayer(rngs) for _ in range(2)])
        self.transform = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.logit_bias = nnx.Param(jnp.zeros(VOCAB))

    def __call__(self, ids, segments, is_word):
        x = self.words(ids) + self.positions(jnp.arange(LENGTH)) + self.segments(segments)
        x = self.norm(x)
        mask = is_word[:, None, None, :] > 0
        for layer in self.encoder:
            x = layer(x, mask)
        return self.words.attend(nnx.gelu(self.transform(x))) + self.logit_bias[...]


def masked_words(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return masked_mean(losses, (batch["chosen"] == 0) * batch["is_word"])


BERT = Example(
    network=Bert,
    rules=Rules(
        [
            ("(words|positions)/embedding", P("tensor", "fsdp")),
            ("encoder/[0-9]/attention/(query|key|value)/kernel", P("fsdp", "tensor")),
            ("encoder/[0-9]/attention/(query|key|value)/bias", P("tensor")),
            ("encoder/[0-9]/attention/out/kernel", P("tensor", None, "fsdp")),
            ("encoder/[0-9]/intermediate/kernel|transform/kernel", P("fsdp", "tensor")),
            ("encoder/[0-9]/output/kernel", P("tensor", "fsdp")),
            (
                "segments/embedding|.*norm/(scale|bias)|.*(out|intermediate|output|transform)/bias|logit_bias",
                SMALL,
            ),
        ]
    ),
    batches=draw_batches(
        ids=integers(VOCAB, BATCH, LENGTH),
        labels=integers(VOCAB, BATCH, LENGTH),
        segments=integers(2, BATCH, LENGTH),
        chosen=integers(3, BATCH, LENGTH),
        is_word=lambda rng: (rng.random((BATCH, LENGTH)) < 0.9).astype("float32"),
    ),
    inputs=lambda batch: (batch["ids"], batch["segments"], batch["is_word"]),
    loss=masked_words,
)


class ScannedBlock(nn.Module):
    """A layer in the form that `nn.scan` takes."""

    @nn.compact
    def __call__(self, x, mask):
        y = nn.RMSNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS, use_bias=False)(y, mask=mask)
        y = nn.Dense(2 * WIDTH, use_bias=False, name="up")(nn.RMSNorm()(x))
        return x + nn.Dense(WIDTH, use_bias=False, name="down")(nn.silu(y)), None


class ScannedTransformer(nn.Module):
    """Rematerialized layers under one scan; logits of the next token."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, name="embed")(tokens)
        block = nn.remat(ScannedBlock, prevent_cse=False)
        scanned = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
            in_axes=nn.broadcast,
        )
        x, _ = scanned(name="blocks")(x, nn.make_causal_mask(tokens))
        return nn.Dense(VOCAB, use_bias=False, name="head")(nn.RMSNorm(name="norm")(x))


def next_word(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["tokens"][:, 1:])
    return losses.sum(), losses.size


SCANNED = Example(
    network=ScannedTransformer(),
    rules=Rules(
        [
            ("blocks/.*/(query|key|value)/kernel", P("fsdp", "tensor")),
            ("blocks/.*/out/kernel", P("tensor", None, "fsdp")),
            ("blocks/up/kernel|head/kernel", P("fsdp", "tensor")),
            ("blocks/down/kernel|embed/embedding", P("tensor", "fsdp")),
            (".*(RMSNorm_[01]|norm)/scale", SMALL),
        ],
        stacked={"blocks": None},
    ),
    batches=draw_batches(tokens=integers(VOCAB, BATCH, LENGTH)),
    inputs=lambda batch: (batch["tokens"],),
    loss=next_word,
    optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3)),
)


class ScaledNorm(nnx.Module):
    """RMS norm times one plus a scale that begins at zero."""

    def __init__(self):
        self.scale = nnx.Param(jnp.zeros(WIDTH))

    def __call__(self, x):
        return (
            x
            * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-6)
            * (1 + self.scale[...])
        )


def rotate(x):
    """Rotate pairs of `[batch, seq, head, dim]` by their position."""
    positions, frequencies = (
        jnp.arange(x.shape[1]),
        10_000.0 ** -jnp.linspace(0, 1, x.shape[-1] // 2),
    )
    angles = positions[:, None, None] * frequencies
    first, second = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class GemmaBlock(nnx.Module):
    """Grouped-query attention with rotary embeddings, and a gated MLP; norms before and after both."""

    def __init__(self, rngs):
        self.norms = nnx.List([ScaledNorm() for _ in range(4)])
        self.q = nnx.Einsum("btd,dhk->bthk", (WIDTH, HEADS, 4), rngs=rngs)
        self.kv = nnx.Einsum("btd,cdgk->cbtgk", (2, WIDTH, HEADS // 2, 4), rngs=rngs)
        self.o = nnx.Einsum("bthk,hkd->btd", (HEADS, 4, WIDTH), rngs=rngs)
        self.gate, self.up = (
            nnx.Linear(WIDTH, 2 * WIDTH, use_bias=False, rngs=rngs) for _ in range(2)
        )
        self.down = nnx.Linear(2 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def attend(self, x):
        key, value = self.kv(x)
        scores = (
            jnp.einsum(
                "btgrk,bsgk->bgrts", rotate(self.q(x)).reshape(*x.shape[:2], 2, 2, 4), rotate(key)
            )
            / 2
        )
        scores = 50 * jnp.tanh(scores / 50)
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        probabilities = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
        return self.o(
            jnp.einsum("bgrts,bsgk->btgrk", probabilities, value).reshape(*x.shape[:2], HEADS, 4)
        )

    def __call__(self, x):
        before, after, mlp_before, mlp_after = self.norms
        x = x + after(self.attend(before(x)))
        y = mlp_before(x)
        return x + mlp_after(self.down(nnx.gelu(self.gate(y)) * self.up(y)))


class Gemma(nnx.Module):
    """A decoder with a tied, scaled table of words and capped logits."""

    def __init__(self, rngs):
        self.embedder = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([GemmaBlock(rngs) for _ in range(2)])
        self.final_norm = ScaledNorm()

    def __call__(self, tokens):
        x = self.embedder(tokens) * WIDTH**0.5
        for block in self.blocks:
            x = block(x)
        return 30 * jnp.tanh(self.embedder.attend(self.final_norm(x)) / 30)


GEMMA = Example(
    network=Gemma,
    rules=Rules(
        [
            ("embedder/embedding", P("tensor", "fsdp")),
            ("blocks/[0-9]/q/kernel", P("fsdp", "tensor")),
            ("blocks/[0-9]/kv/kernel", P(None, "fsdp", None, "tensor")),
            ("blocks/[0-9]/o/kernel", P("tensor", None, "fsdp")),
            ("blocks/[0-9]/(gate|up)/kernel", P("fsdp", "tensor")),
            ("blocks/[0-9]/down/kernel", P("tensor", "fsdp")),
            ("blocks/[0-9]/norms/[0-9]/scale|final_norm/scale", SMALL),
        ]
    ),
    batches=draw_batches(tokens=integers(VOCAB, BATCH, LENGTH)),
    inputs=lambda batch: (batch["tokens"],),
    loss=next_word,
)


class MambaBlock(nnx.Module):
    """A selective state space (arXiv:2312.00752) behind a causal depthwise convolution, with a gate."""

    STATES = 4

    def __init__(self, rngs):
        inner = 2 * WIDTH
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.in_proj = nnx.Linear(WIDTH, 2 * inner, use_bias=False, rngs=rngs)
        self.conv = nnx.Conv(
            inner, inner, (4,), feature_group_count=inner, padding="CAUSAL", rngs=rngs
        )
        self.x_proj = nnx.Linear(inner, 1 + 2 * self.STATES, use_bias=False, rngs=rngs)
        self.dt_proj = nnx.Linear(1, inner, rngs=rngs)
        self.A_log = nnx.Param(jnp.log(jnp.tile(jnp.arange(1.0, self.STATES + 1), (inner, 1))))
        self.D = nnx.Param(jnp.ones(inner))
        self.out_proj = nnx.Linear(inner, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        y, gate = jnp.split(self.in_proj(self.norm(x)), 2, axis=-1)
        y = nnx.silu(self.conv(y))
        step, into, out = jnp.split(self.x_proj(y), [1, 1 + self.STATES], axis=-1)
        step = nnx.softplus(self.dt_proj(step))
        decay = jnp.exp(step[..., None] * -jnp.exp(self.A_log[...]))  # [batch, seq, inner, state]
        added = (step * y)[..., None] * into[:, :, None, :]

        def join(left, right):
            return left[0] * right[0], left[1] * right[0] + right[1]

        _, states = jax.lax.associative_scan(join, (decay, added), axis=1)
        y = (states * out[:, :, None, :]).sum(axis=-1) + self.D[...] * y
        return x + self.out_proj(y * nnx.silu(gate))


class Mamba(nnx.Module):
    """Two blocks; logits of the next token."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([MambaBlock(rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


MAMBA = Example(
    network=Mamba,
    rules=Rules(
        [
            ("embed/embedding", P("tensor", "fsdp")),
            ("blocks/[0-9]/in_proj/kernel|head/kernel", P("fsdp", "tensor")),
            ("blocks/[0-9]/(out_proj|x_proj)/kernel", P(("tensor", "fsdp"))),
            ("blocks/[0-9]/conv/kernel", P(None, None, "tensor")),
            ("blocks/[0-9]/A_log", P("tensor", "fsdp")),
            ("blocks/[0-9]/(D|conv/bias|dt_proj/(kernel|bias)|norm/scale)|norm/scale", SMALL),
        ]
    ),
    batches=draw_batches(tokens=integers(VOCAB, BATCH, LENGTH)),
    inputs=lambda batch: (batch["tokens"],),
    loss=next_word,
)
