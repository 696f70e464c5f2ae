"""The table of a batch says which dimension of each array holds examples, and a plan places arrays as it says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import MeshError, RuleError
from spmd.model_interface.model import Model
from spmd.plan.plan import make_plan
from spmd.sharding.batch import TOKENS, BatchTable, whole
from spmd.sharding.mesh import BATCH_AXES, BATCH_SPEC, MeshShape, abstract_mesh
from spmd.sharding.rules import Rules, replicate
from spmd.training.batch import check_batch, place_batch
from tests import tiny

TIME_MAJOR = P(None, BATCH_AXES)
ROWS = (
    ("observations", TIME_MAJOR),
    ("graph/.*", whole("one graph for all examples")),
    ("tokens", BATCH_SPEC),
    ("features|tokens", P(BATCH_AXES, None, "tensor")),
)
TABLE = BatchTable(ROWS)
AXES = {"pipe": 1, "data": 2, "fsdp": 1, "expert": 1, "sequence": 2, "tensor": 2}
MODEL = Model(lambda key: {"kernel": jnp.ones((4, 4))}, lambda p, x: x @ p["kernel"])


@functools.cache
def plan(rows=ROWS, abstract=False, **sizes):
    rules = Rules([("kernel", replicate("small"))], batch=rows)
    return make_plan(
        abstract_mesh(MeshShape(**sizes)) if abstract else tiny.mesh(**sizes),
        rules,
        MODEL,
        optax.sgd(0.1),
    )


@pytest.mark.parametrize(
    ("path", "ndim", "spec", "examples"),
    [
        ("observations", 3, TIME_MAJOR, 1),
        ("graph/nodes", 2, P(), None),
        ("graph/deep/edges", 1, P(), None),
        ("tokens", 2, BATCH_SPEC, 0),
        ("features", 3, P(BATCH_AXES, None, "tensor"), 0),
        ("labels", 1, P(BATCH_AXES), 0),
        ("images", 4, P(BATCH_AXES), 0),
        ("scale", 0, P(), 0),
        ("inner/observations", 2, TIME_MAJOR, 1),
        ("my_observations", 2, P(BATCH_AXES), 0),
        ("observations/extra", 2, P(BATCH_AXES), 0),
    ],
)
def test_rows(path, ndim, spec, examples):
    """The first row that matches a path counts; an array without one has its examples first."""
    assert TABLE.spec(path, ndim) == spec
    assert TABLE.examples(path) == examples
    assert (TABLE.value(path) is None) == (
        path in ("labels", "images", "scale", "my_observations", "observations/extra")
    )


def test_a_scalar_has_the_spec_of_its_row():
    """An array of no dimensions is whole, unless its row is wrong for it, which the check of a batch reports."""
    table = BatchTable((("scale", P(BATCH_AXES)),))
    assert table.spec("scale", 0) == P(BATCH_AXES)
    with pytest.raises(
        MeshError, match=r"batch scale: the sharding of batches gives P\(data\+fsdp\+expert\)"
    ):
        check_batch(plan((("scale", P(BATCH_AXES)),), data=2), {"scale": np.float32(1)})


def test_rows_of_a_language_model():
    """The arrays of a language model have examples, then tokens."""
    table = BatchTable(TOKENS)
    assert {table.spec(name, 2) for name in ("tokens", "targets", "weights", "segments")} == {
        BATCH_SPEC
    }
    assert table.spec("images", 4) == P(BATCH_AXES)


@pytest.mark.parametrize("reason", ["", "  ", None, 3])
def test_whole_needs_a_reason(reason):
    """An array that every device has whole says why."""
    with pytest.raises(RuleError, match="has no reason"):
        whole(reason)
    assert str(spmd.whole("one graph")) == "whole('one graph')"


@pytest.mark.parametrize(
    ("pattern", "value", "words"),
    [
        ("tokens", P(None, "sequence"), f"does not split one dimension over {BATCH_AXES}"),
        ("tokens", P(), f"does not split one dimension over {BATCH_AXES}"),
        ("tokens", P("data", "fsdp"), f"does not split one dimension over {BATCH_AXES}"),
        ("tokens", P("data"), f"does not split one dimension over {BATCH_AXES}"),
        (
            "tokens",
            P(("fsdp", "data", "expert")),
            f"does not split one dimension over {BATCH_AXES}",
        ),
        ("tokens", None, "has the value None"),
        ("tokens", "data", "has the value 'data'"),
        ("tokens", replicate("small"), "has the value Replicate"),
        ("tok(ens", P(BATCH_AXES), "is not a regular expression"),
    ],
)
def test_problems_of_rows(pattern, value, words):
    """Each wrong row is a problem that names it; an error in making a plan says so, too."""
    (problem,) = BatchTable((("labels", P(BATCH_AXES)), (pattern, value))).problems()
    assert words in problem.what
    assert problem.where == f"batch row 1 ({pattern!r})"
    with pytest.raises(RuleError) as caught:
        plan.__wrapped__(((pattern, value),), data=2)
    assert words in str(caught.value)


def test_right_rows_have_no_problems():
    """The control: rows that are right are reported by nothing."""
    assert not TABLE.problems()
    assert not BatchTable().problems()


def test_unknown_axes_of_rows():
    """A row that names an axis that no mesh has is an error of the table."""
    with pytest.raises(RuleError, match="batch row 0"):
        plan.__wrapped__((("tokens", P(("data", "rows"))),), data=2)


def test_rows_that_match_nothing():
    """A row that would split tokens on this mesh and matches no array is a problem; others may serve other batches."""
    (problem,) = TABLE.unused(["observations", "features"], AXES)
    assert problem.where == "batch row 2 ('tokens')"
    assert problem.detail == "it has observations, features"
    assert not TABLE.unused(["observations", "tokens"], {**AXES, "tensor": 1})
    assert not TABLE.unused(["observations"], {**AXES, "sequence": 1, "tensor": 1})
    assert len(TABLE.unused(["observations"], AXES)) == 2


def test_plan_names_shardings():
    """A plan gives the sharding of each array by its path, also on a mesh without devices."""
    for made in (plan(data=2, sequence=2), plan(abstract=True, data=2, sequence=2)):
        assert made.batch_sharding("observations", 3).spec == TIME_MAJOR
        assert made.batch_sharding("tokens").spec == BATCH_SPEC
        assert made.batch_sharding("labels", 1).spec == P(BATCH_AXES)
        assert made.batch_sharding("labels", 1).mesh == made.mesh
        batch = {
            "graph": {"nodes": np.ones((5, 2))},
            "scale": np.float32(1),
            "list": [np.ones(4), np.ones((4, 1))],
        }
        specs = jax.tree.map(lambda sharding: sharding.spec, made.batch_shardings(batch))
        assert specs == {"graph": {"nodes": P()}, "scale": P(), "list": [P(BATCH_AXES)] * 2}


def test_placed_arrays():
    """Each array is split along its own dimension, and a whole one is on every device."""
    batch = {
        "observations": np.arange(24, dtype=np.float32).reshape(3, 4, 2),
        "graph": {"nodes": np.ones((5, 2), np.float32)},
        "labels": np.arange(4),
        "scale": np.float32(2),
        "tokens": np.ones((4, 6), np.int32),
    }
    found = place_batch(plan(data=2, sequence=2), batch)
    shapes = jax.tree.map(lambda x: x.addressable_shards[0].data.shape, found)
    assert shapes == {
        "observations": (3, 2, 2),
        "graph": {"nodes": (5, 2)},
        "labels": (2,),
        "scale": (),
        "tokens": (2, 3),
    }
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), batch)
    assert place_batch(plan(data=2, sequence=2), found) is found
    assert spmd.place_batch is place_batch


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (
            {"observations": np.ones((4, 3, 2))},
            ["batch observations", "cannot split dimension 1 of (4, 3, 2)", "3 / "],
        ),
        (
            {"observations": np.ones(4)},
            ["batch observations", "for the shape (4,)", "Rules(batch=…)"],
        ),
        ({"labels": np.ones(3)}, ["batch labels", "cannot split dimension 0 of (3,)"]),
        ({"labels": [1, 2]}, ["batch labels/0", "a NumPy or JAX array"]),
    ],
)
def test_batches_that_do_not_fit(batch, words):
    """The error names the array, the dimension and what to say in the table."""
    with pytest.raises(MeshError) as caught:
        place_batch(plan(data=2), batch)
    assert all(word in str(caught.value) for word in words)


def test_rows_that_match_no_array_of_a_batch_are_refused():
    """Where tokens are split, a pattern that is misspelt is an error, not a whole array."""
    batch = {"token": np.ones((4, 6), np.int32)}
    with pytest.raises(MeshError, match=r"batch row 2 \('tokens'\): matches no array of the batch"):
        place_batch(plan(data=2, sequence=2), batch)
    assert place_batch(plan(data=2), batch)["token"].shape == (4, 6)


@pytest.mark.parametrize(
    "rows", [(), (("graph", whole("one for all")),), (("observations", TIME_MAJOR),)]
)
def test_an_axis_over_tokens_needs_a_row(rows):
    """A mesh with sequence above 1 that no row names is refused, with the row to write."""
    with pytest.raises(RuleError) as caught:
        plan(rows, data=2, sequence=2)
    text = str(caught.value)
    assert "mesh.sequence: splits nothing" in text
    assert "sequence=2" in text
    assert f'Rules(batch=[("tokens", P({BATCH_AXES}, "sequence"))])' in text


def test_an_axis_over_tokens_may_be_named_elsewhere():
    """The control: a row of the batch, of activations or of parameters that names the axis is enough."""
    sizes = {"data": 2, "sequence": 2}
    assert plan((("tokens", BATCH_SPEC),), **sizes)
    for options in ({"activations": [("residual", BATCH_SPEC)]}, {}):
        spec = replicate("small") if options else P("sequence")
        assert make_plan(
            tiny.mesh(**sizes), Rules([("kernel", spec)], **options), MODEL, optax.sgd(0.1)
        )
