"""`spmd check` takes a train step of one's own, and says first which of its operations XLA computes wrongly."""

import json
import textwrap

import jax
import pytest

from spmd.training import step
from tests.command_line import run

STEP = """
    import jax, jax.numpy as jnp, numpy as np, optax, spmd
    from flax import nnx
    from jax.sharding import PartitionSpec as P

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.grouped = nnx.Conv(4, 4, (3,), feature_group_count=2, rngs=rngs)
            self.plain = nnx.Conv(4, 4, (3,), rngs=rngs)
        def __call__(self, x):
            x = self.grouped(x)
            x = self.plain(x)
            return nnx.max_pool(x, (2,), (1,))

    model = spmd.from_nnx(lambda rngs: Net(rngs))
    rules = spmd.Rules([("kernel", P(None, None, "tensor")), ("bias", spmd.replicate("small"))])
    batches = [{"x": x} for x in np.random.default_rng(0).normal(size=(2, 8, 8, 4)).astype(np.float32)]

    def loss_fn(params, variables, batch, key):
        y = model.apply(params, batch["x"])
        return {"loss": jnp.square(y).sum(), "weight": jnp.float32(len(y))}, variables

    def make_step(mesh):
        plan = spmd.make_plan(mesh, rules, model, optax.adam(0.1))
        return spmd.make_train_step(plan, loss_fn), batches

    def own_gradient(mesh):
        def grad_fn(params, carry, batch, key):
            def loss(params):
                sums, after = loss_fn(params, carry.variables, batch, key)
                return sums["loss"], (sums, after)

            (_, (sums, after)), gradients = jax.value_and_grad(loss, has_aux=True)(params)
            return gradients, sums, spmd.Carry(after, carry.transforms)

        plan = spmd.make_plan(mesh, rules, model, optax.adam(0.1))
        return spmd.make_train_step(plan, grad_fn=grad_fn), batches

    def nothing(mesh):
        return 3
"""
MESH = ("--devices", "8", "--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.tensor", "2")


@pytest.fixture
def file(tmp_path):
    """A user's file with functions that make steps."""
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(STEP), encoding="utf-8")
    return path


def line_of(text):
    """The line of the user's file, counted from 1."""
    return next(n for n, line in enumerate(textwrap.dedent(STEP).splitlines(), 1) if text in line)


def test_a_step_of_ones_own_is_compared_with_one_device(file, capsys):
    """Each operation of the page has its line and what is computed instead; then come the numbers."""
    assert run("check", f"{file}:make_step", *MESH) == 0
    printed = capsys.readouterr().out
    grouped, plain, pooled = (
        line_of(f"{name}(x") for name in ("self.grouped", "self.plain", "nnx.max_pool")
    )
    for fault, primitive, line, answer in (
        (
            "Convolutions with groups",
            "conv_general_dilated",
            grouped,
            "each device convolves its own examples",
        ),
        (
            "Convolutions over a split dimension",
            "conv_general_dilated",
            plain,
            "spatial dimensions are kept whole",
        ),
        (
            "Windows over a split dimension",
            "reduce_window_max",
            pooled,
            "the dimensions of a window are kept whole",
        ),
    ):
        found = next(
            text
            for text in printed.splitlines()
            if text.strip().startswith(f"{fault}: {primitive}")
        )
        assert found.endswith(f"mine.py:{line}: {answer}")
    assert printed.index("XLA computes wrongly") < printed.index("2 steps of float32")
    assert "the layouts agree" in printed


def test_a_gradient_that_goes_past_the_replacement_is_refused(file, capsys):
    """A gradient function of `jax.grad` alone is not seen by it; the error has the line and what to use."""
    assert run("check", f"{file}:own_gradient", *MESH) == 2
    said = capsys.readouterr().err
    assert f"mine.py:{line_of('self.grouped(x')}: conv_general_dilated" in said
    assert "docs/xla-faults.md, Convolutions with groups" in said
    assert "differentiate by spmd.value_and_grad" in said


def test_control_not_refused_it_is_wrong(file, capsys, monkeypatch):
    """Without the refusal the same command says what is left to XLA, and finds the factor 2."""
    monkeypatch.setattr(step, "check_replaced", lambda *_: None)
    assert run("check", f"{file}:own_gradient", *MESH, "--check-steps", "1", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    faults = {record["fault"]: record["answer"] for record in report["xla_faults"]}
    assert faults["Convolutions with groups"].startswith("left to XLA")
    wrong = {
        row["path"]: row["error"]
        for row in report["rows"]
        if row["what"] == "gradients" and not row["ok"]
    }
    assert wrong["grouped/kernel"] == pytest.approx(1.0, rel=1e-3)


def test_every_pair_of_axes(file, capsys):
    """The same function makes the step of each mesh."""
    assert (
        run("check", f"{file}:make_step", "--devices", "8", "--products", "1", "--check-steps", "1")
        == 0
    )
    printed = capsys.readouterr().out
    assert "4 of 4 layouts agree, 2 refused" in printed
    assert len(jax.devices()) == 8


def test_layouts_that_nobody_decided(file, capsys):
    """`--explicit` works for it, too."""
    assert run("check", f"{file}:make_step", *MESH, "--explicit") in (0, 1)
    assert "operations on sharded arrays" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "flags", "words"),
    [
        ("mine.py:nothing", MESH, "nothing: returns 3"),
        ("mine.py:make_stp", (), 'did you mean "make_step"'),
        ("mne.py:make_step", (), 'did you mean "mine.py"'),
        ("mine.py:make_step", (*MESH, "--check-steps", "5"), "check-steps=5"),
        ("mine.py:make_step", ("--check-steps", "-1"), "at least 0"),
        ("mine.py:make_step", ("--explicit", "--leaves"), "--explicit takes none"),
    ],
)
def test_what_is_no_step_is_an_error(file, capsys, target, flags, words):
    """The file, the function, what it returns and the flags are named."""
    assert run("check", str(file.parent / target), *flags) == 2
    assert words in capsys.readouterr().err
