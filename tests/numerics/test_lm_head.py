"""The head and its loss, some tokens at a time: the numbers of the whole, and never the logits of all tokens."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd.analysis.collective_audit import audit_collectives
from spmd.errors import AnnotationError
from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import cross_entropy, next_token_loss
from spmd.layers import lm_head as vocabulary
from spmd.layers.lm_head import LazyLogits, lazy_logits
from spmd.partition_rules.llama import LLAMA
from spmd.plan.annotate import annotate
from spmd.plan.context import use_plan
from spmd.sharding.mesh import MeshShape, abstract_mesh
from spmd.testing import token_batches
from tests import tiny
from tests.one_device import Job
from tests.programs import run_script
from tests.rounding import assert_close, noise_of

BATCHES = token_batches((8, 16), tiny.CONFIG.vocab, steps=2)


def random(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def sums(logits_of, kernel, width=8, **options):
    """The sums of a loss, and the gradients of `x` and the kernel."""
    x, targets = random(2, 6, width), jax.random.randint(jax.random.key(2), (2, 6), 0, 20)
    weights = (jax.random.uniform(jax.random.key(3), (2, 6)) < 0.7).astype(jnp.float32)

    def loss(x, kernel):
        found = cross_entropy(logits_of(x, kernel), targets, weights, **options)
        return 3 * found["loss"], found

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(x, kernel)


@pytest.mark.parametrize("chunk", [1, 5, 12, 1024])
@pytest.mark.parametrize("axes", ["io", "oi"])
def test_some_tokens_at_a_time_are_the_loss_of_all(axes, chunk):
    """Sums and gradients are those of `cross_entropy` on logits, whether or not the chunk divides the tokens."""
    kernel = random(*((8, 20) if axes == "io" else (20, 8)), seed=1)
    ours = sums(lambda x, kernel: LazyLogits(x, kernel, axes), kernel, chunk=chunk)
    plain = functools.partial(sums, lambda x, kernel: jnp.einsum(f"bsi,{axes}->bso", x, kernel))
    assert_close(ours, plain(kernel), noise_of(plain, kernel))


@pytest.mark.parametrize("chunk", [5, 1024])
def test_a_soft_cap_of_logits_is_in_the_loss_and_its_gradients(chunk):
    """Sums and gradients are those of plain autodiff through `cap · tanh(logits / cap)`, and not those without."""
    kernel = random(8, 20, seed=1)
    ours = sums(lambda x, kernel: LazyLogits(x, kernel, soft_cap=1.5), kernel, chunk=chunk)
    plain = functools.partial(sums, lambda x, kernel: 1.5 * jnp.tanh(x @ kernel / 1.5))
    assert_close(ours, plain(kernel), noise_of(plain, kernel))
    for without, capped in zip(sums(jnp.matmul, kernel)[0], ours[0], strict=True):
        assert np.abs(without - capped).max() > 0.1


@pytest.mark.parametrize("chunk", [5, pytest.param(1024, marks=pytest.mark.soak)])
def test_a_z_loss_is_in_the_loss_and_its_gradients(chunk):
    """As plain autodiff of the squared log-sum-exp has it, kept or computed again; the control has another weight."""
    kernel = 3 * random(8, 20, seed=1)
    ours = sums(lambda x, kernel: LazyLogits(x, kernel), kernel, chunk=chunk, z_loss=0.1)
    plain = functools.partial(sums, jnp.matmul, z_loss=0.1)
    assert_close(ours, plain(kernel), noise_of(plain, kernel))
    found = ours[1]
    without = sums(jnp.matmul, kernel)[1]["loss"]
    np.testing.assert_allclose(found["loss"] - found["logit_z_loss"], without, rtol=1e-5)
    assert found["logit_z_loss"] > 0.1
    other = sums(jnp.matmul, kernel, z_loss=0.2)
    assert np.abs(other[0][0] - ours[0][0]).max() > 1e-2


@pytest.mark.soak
def test_a_z_loss_is_the_same_on_a_split_vocabulary():
    """Two steps on meshes; the control has another weight."""
    loss = value_and_grad(next_token_loss(tiny.model(), z_loss=1e-2))
    job = Job(tiny.model(), LLAMA, loss, BATCHES)
    job.assert_parity(fsdp=2, tensor=2, data=2)
    job.assert_parity(sequence=2, tensor=2)
    other = value_and_grad(next_token_loss(tiny.model(), z_loss=2e-2))
    assert not job.parity(tensor=2, grad_fn=other).ok


def in_turns(monkeypatch, seen, words=3):
    """Lets a turn have so few words, and notes whether gradients of logits are kept, and whether there are turns."""
    turns, loop, gradient = [], jax.lax.fori_loop, vocabulary._Head.dkernel

    def noted(head, *arrays, **options):
        result = gradient(head, *arrays, **options)
        seen.add((head.keeps, turns[-1] > 1))
        return result

    monkeypatch.setattr(vocabulary, "_TILE", words)
    monkeypatch.setattr(vocabulary._Head, "dkernel", noted)
    monkeypatch.setattr(
        jax.lax, "fori_loop", lambda start, end, *rest: turns.append(end) or loop(start, end, *rest)
    )


FORMS = [(8, 5, (False, True)), (16, 12, (True, True)), (8, 12, (True, False))]


@pytest.mark.parametrize(("width", "chunk", "form"), FORMS)
@pytest.mark.parametrize("axes", ["io", "oi"])
def test_some_words_at_a_time_are_the_gradient_of_all(monkeypatch, axes, width, chunk, form):
    """The last turn repeats words; whether logits are computed again or kept, gradients are those of plain logits."""
    seen = set()
    in_turns(monkeypatch, seen)
    kernel = random(*((width, 20) if axes == "io" else (20, width)), seed=1)
    ours = sums(
        lambda x, kernel: LazyLogits(x, kernel, axes, soft_cap=1.5), kernel, width, chunk=chunk
    )
    plain = functools.partial(
        sums,
        lambda x, kernel: 1.5 * jnp.tanh(jnp.einsum(f"bsi,{axes}->bso", x, kernel) / 1.5),
        width=width,
    )
    assert_close(ours, plain(kernel), noise_of(plain, kernel))
    assert seen == {form}


@pytest.mark.parametrize(("width", "chunk", "form"), FORMS)
def test_a_bias_of_logits_is_in_the_loss_and_its_gradients(monkeypatch, width, chunk, form):
    """Those of plain autodiff, whether or not gradients of logits are kept, and not those without a bias."""
    seen = set()
    in_turns(monkeypatch, seen)
    head = random(width, 20, seed=1), random(20, seed=4)

    def lazy(x, head):
        kernel, bias = head
        return LazyLogits(x, kernel, soft_cap=1.5, bias=bias)

    def logits(x, head):
        kernel, bias = head
        return 1.5 * jnp.tanh((x @ kernel + bias[None, None]) / 1.5)

    ours = sums(lazy, head, width, chunk=chunk)
    plain = functools.partial(sums, logits, width=width)
    assert_close(ours, plain(head), noise_of(plain, head))
    assert seen == {form}
    without = plain((head[0], jnp.zeros(20)))
    assert np.abs(without[0][0] - ours[0][0]).max() > 0.1


def test_control_a_softmax_over_the_words_of_a_turn_is_caught(monkeypatch):
    """Without the log-sum-exp of all words, gradients of logits that are computed again differ."""
    monkeypatch.setattr(vocabulary, "_TILE", 3)
    exp = jnp.exp
    wrong = lambda x: jax.nn.softmax(x) if x.ndim == 4 else exp(x)  # noqa: E731
    kernel = random(8, 20, seed=1)
    plain = functools.partial(sums, jnp.matmul)
    expected, noise = plain(kernel), noise_of(plain, kernel)
    monkeypatch.setattr(vocabulary.jnp, "exp", wrong)
    ours = sums(LazyLogits, kernel, chunk=5)
    with pytest.raises(AssertionError):
        assert_close(ours, expected, noise)


def test_gradients_of_a_narrow_head_are_not_rounded():
    """From bfloat16 tokens the kernel's gradient is float32, added up over chunks in it."""
    x, kernel = random(1, 64, 8).astype(jnp.bfloat16), random(8, 20, seed=1)
    targets, weights = jnp.zeros((1, 64), jnp.int32), jnp.ones((1, 64))

    def gradient(chunk, kernel):
        def loss(x, kernel):
            return cross_entropy(LazyLogits(x, kernel), targets, weights, chunk=chunk)["loss"]

        return jax.grad(loss, argnums=(0, 1))(x, kernel)

    (dx, dkernel), whole = gradient(16, kernel), gradient(64, kernel)[1]
    assert (dx.dtype, dkernel.dtype) == (jnp.bfloat16, jnp.float32)
    assert_close([dkernel], [whole], [noise_of(functools.partial(gradient, 64), kernel)[1]])


def test_a_scaled_loss_in_float16_keeps_small_gradients():
    """The gradient of an improbable word, 8e-9, is 0 in float16; with the scale of the loss it is not."""
    x, kernel = jnp.ones((1, 1, 8), jnp.float16), jnp.zeros((8, 20)).at[:, 1].set(-2.3)
    targets, weights = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1))

    def gradients(head):
        def loss(x, kernel):
            return 4096 * cross_entropy(head(x, kernel), targets, weights)["loss"]

        return jax.grad(loss, argnums=(0, 1))(x, kernel)

    ours = gradients(LazyLogits)
    exact = jax.grad(
        lambda k: 4096 * cross_entropy(jnp.ones((1, 1, 8)) @ k, targets, weights)["loss"]
    )(kernel)
    assert 0 < float(exact[0, 1]) / 4096 < 2.0**-25
    assert (ours[0].dtype, ours[1].dtype) == (jnp.float16, jnp.float32)
    np.testing.assert_allclose(ours[1][:, 1], exact[:, 1], rtol=1e-2)


def test_a_model_returns_logits_where_no_loss_asks():
    """Only inside of `lazy_logits` a head is left to the loss."""
    model, tokens = tiny.model(), jnp.zeros((1, 4), jnp.int32)
    params = model.init(jax.random.key(0))
    logits = model.apply(params, tokens)
    with lazy_logits():
        head = model.apply(params, tokens)
    assert isinstance(head, LazyLogits)
    assert_close([logits], [head.x @ head.kernel], [noise_of(jnp.matmul, head.x, head.kernel)])


JOB = Job(tiny.model(), LLAMA, value_and_grad(tiny.loss_fn()), BATCHES)


def in_chunks(chunk):
    """A gradient function with logits of so many tokens at once."""
    return value_and_grad(next_token_loss(tiny.model(), chunk=chunk))


@pytest.mark.soak
def test_chunks_equal_the_whole():
    """In chunks that do not divide the tokens, training equals that in one piece; layouts are in the parity suite."""
    JOB.assert_parity(grad_fn=in_chunks(7))


@pytest.mark.parametrize(
    ("spec", "fsdp"),
    [
        pytest.param(P(None, ("tensor", "fsdp")), 2, id="columns", marks=pytest.mark.soak),
        pytest.param(P("tensor", "fsdp"), 4, id="both dimensions"),
        pytest.param(P(("tensor", "fsdp")), 4, id="rows"),
    ],
)
def test_any_split_of_the_head_equals_one_device(monkeypatch, spec, fsdp):
    """Also where a device gathers parts of the vocabulary that are no neighbours, or has no words of its own."""
    seen = set()
    in_turns(monkeypatch, seen, words=2)
    params = [(path, spec if path == "lm_head/kernel" else value) for path, value in LLAMA.params]
    rules = dataclasses.replace(LLAMA, params=params)
    JOB.assert_parity(rules=rules, grad_fn=in_chunks(7), fsdp=fsdp, tensor=2)
    # more tokens than a chunk has: logits are computed again, in several turns
    assert (False, True) in seen


def test_control_a_softmax_of_one_part_of_the_vocabulary_is_caught(monkeypatch):
    """Without its sums over `tensor`, the same comparison fails."""
    add = vocabulary.psum
    monkeypatch.setattr(
        vocabulary, "psum", lambda x, axes: add(x, tuple(a for a in axes if a != "tensor"))
    )
    assert not JOB.parity(grad_fn=in_chunks(9), tensor=2).ok


def test_a_head_that_no_rule_knows_is_refused():
    """Under a plan, a head without a rule is an error that says what to do."""
    head = LazyLogits(random(8, 4, 8), random(8, 20))

    def loss(x):
        head_of = LazyLogits(annotate(x, "residual"), head.kernel)
        return cross_entropy(head_of, jnp.zeros((8, 4), jnp.int32), jnp.ones((8, 4)))["loss"]

    with (
        use_plan(tiny.plan(fsdp=2)),
        pytest.raises(AnnotationError, match="the head's kernel: is not in the rule table"),
    ):
        jax.eval_shape(loss, head.x)


VOCAB, D, BATCH, SEQ, CHUNK = 128_256, 16, 8, 1024, 256
SCRIPT = """
import json, sys
import jax, optax, spmd
from spmd.models.decoder import DecoderConfig
from spmd.partition_rules.llama import LLAMA, LLAMA_TIED

spmd.simulate_devices(8)
vocab, d, batch, seq = json.loads(sys.argv[1])
for file, (tied, mesh, chunk) in json.loads(sys.argv[2]).items():
    model = spmd.from_nnx(DecoderConfig(vocab, d, 1, 4, 4, 32, tied=tied).build)
    plan = spmd.make_plan(spmd.make_mesh(**mesh), LLAMA_TIED if tied else LLAMA, model, optax.sgd(1.0))
    step = spmd.make_train_step(plan, spmd.next_token_loss(model, chunk=chunk))
    shapes = {"tokens": "int32", "targets": "int32", "weights": "float32"}
    compiled = step.compile({name: jax.ShapeDtypeStruct((batch, seq), dtype) for name, dtype in shapes.items()})
    with open(file, "w") as out:
        out.write(compiled.as_text())
"""
MESH = {"data": 2, "fsdp": 2, "tensor": 2}
PROGRAMS = {
    "chunks": (False, MESH, CHUNK),
    "chunks, tied": (True, MESH, CHUNK),
    "control: in one piece": (False, MESH, BATCH * SEQ),
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The optimised programs of a step with Llama 3's vocabulary, compiled in one process of its own."""
    folder = tmp_path_factory.mktemp("programs")
    files = {name: str(folder / f"{number}.txt") for number, name in enumerate(PROGRAMS)}
    arguments = (
        json.dumps([VOCAB, D, BATCH, SEQ]),
        json.dumps({files[name]: what for name, what in PROGRAMS.items()}),
    )
    run_script(SCRIPT, *arguments)
    return {name: Path(file).read_text() for name, file in files.items()}


def largest(program):
    """The most elements of any array that one device has in a program."""
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", program)
    return max(int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes)


TOKENS_HERE, WORDS_HERE, TURNS = BATCH * SEQ // 4, VOCAB // 2, 8
WORDS_OF_TURN = 8192  # in multiples of 256


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "control" not in name])
def test_no_buffer_is_tokens_by_vocabulary(name, programs):
    """On no device is any array larger than the logits of one chunk, and than the table where that is larger."""
    assert largest(programs[name]) <= max(
        CHUNK * WORDS_HERE, TOKENS_HERE * WORDS_OF_TURN, VOCAB * D
    )


def test_control_in_one_piece_there_is_such_a_buffer(programs):
    """The same look at a loss of one chunk finds the logits of all tokens."""
    assert largest(programs["control: in one piece"]) >= TOKENS_HERE * WORDS_HERE


def gradients_of_kernels(program):
    """The most elements of any product that is a gradient of the head's kernel."""
    products = [
        line
        for line in program.splitlines()
        if re.search(r"\.\.\.i,\.\.\.o->(io|oi)/dot_general", line)
    ]
    return largest(
        "\n".join(
            line.partition("(")[0] for line in products if "lm_head" in line or "shard_map" in line
        )
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_kernels_gradient_never_exists_whole(name, programs):
    """On no device is it larger than that of the words of a turn, before it is scattered; in one piece it is whole."""
    words = WORDS_HERE if "control" in name else WORDS_OF_TURN
    assert gradients_of_kernels(programs[name]) == D * words


def test_the_tables_gradient_is_reduced_once(programs):
    """Chunk after chunk sends numbers of tokens; the kernel's gradient is summed in parts when all are done."""
    audit = audit_collectives(programs["chunks"], abstract_mesh(MeshShape(**MESH)), backend="cpu")
    head = [r for r in audit.records if "lm_head" in r.source]
    (scattered,) = [r for r in head if r.over == "fsdp" and r.kind == "reduce-scatter"]
    assert (scattered.executions, scattered.payload) == (TURNS, 4 * D * WORDS_OF_TURN)
    in_turns = [r for r in head if r.executions > 1 and r != scattered]
    assert {r.executions for r in in_turns} == {TOKENS_HERE // CHUNK}
    assert {r.over for r in in_turns} == {"tensor"}
    assert max(r.payload for r in in_turns) == 4 * CHUNK * D  # what tokens get
    (summed,) = [r for r in head if r.over == "data" and r.payload > 1024 * D]
    # what is left of it after fsdp
    assert (summed.executions, summed.payload) == (1, 4 * D * WORDS_HERE // 2)
