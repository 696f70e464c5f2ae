"""What holds of every rule table, not only of those that someone thought of."""

import math
import re

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.errors import RuleError
from spmd.sharding.flax_metadata import Annotation
from spmd.sharding.from_flax import rules_from_annotations
from spmd.sharding.layer_paths import DEFAULT_STACKED
from spmd.sharding.mesh import AXES, MeshShape, abstract_mesh, entry_axes, shards_of
from spmd.sharding.optimizer_state import drop_axis, shard_bytes
from spmd.sharding.rules import Rules, replicate

SHORT = settings(max_examples=40, deadline=None, derandomize=True)
SIZES = st.sampled_from((1, 2, 3, 4))
STACKED = ("layers", "blocks")
COMPONENTS = st.sampled_from((*STACKED, "kernel", "mlp", "q_proj", "0", "7", "12"))
PATHS = st.lists(COMPONENTS, min_size=1, max_size=6).map("/".join)
PATTERNS = st.sampled_from(
    (
        "kernel",
        "mlp/kernel",
        "(mlp|q_proj)/kernel",
        "layers/kernel",
        "q_.*",
        "[a-z]+/kernel",
        "7",
        "mlp",
        "blocks/mlp",
    )
)


@st.composite
def meshes(draw, least=1):
    """Any mesh, without devices."""
    sizes = st.integers(least, 4)
    return abstract_mesh(MeshShape(**{axis: draw(sizes) for axis in AXES}))


@st.composite
def specs(draw, rank, axes=AXES[1:]):
    """A spec of at most `rank` entries that splits something and uses each axis at most once."""
    free = draw(st.permutations(axes))
    entries = []
    for _ in range(draw(st.integers(1, rank))):
        count = draw(st.integers(0, 2))
        taken, free = free[:count], free[count:]
        entries.append(None if not taken else taken[0] if count == 1 else tuple(taken))
    if not any(entry_axes(entry) for entry in entries):
        entries[0] = free[0]
    return P(*entries)


@st.composite
def any_specs(draw):
    """A spec of up to three entries that may use an axis as often as it likes."""
    axis = st.sampled_from(("pipe", "fsdp", "tensor"))
    entry = st.one_of(st.none(), axis, st.tuples(axis, axis))
    spec = P(*draw(st.lists(entry, min_size=1, max_size=3)))
    return spec if any(entry_axes(entry) for entry in spec) else P("fsdp")


def shape_for(spec, rank, mesh, multiples):
    """A shape of `rank` dimensions that `spec` divides."""
    entries = (*spec, *(None,) * (rank - len(spec)))
    return tuple(
        shards_of(entry, mesh.shape) * k for entry, k in zip(entries, multiples, strict=False)
    )


@SHORT
@given(st.data())
def test_local_shape_times_shards_is_the_global_shape(data):
    """Our bytes of a shard are those of JAX's own shard shape, which times the shards is the whole array."""
    mesh, rank = data.draw(meshes()), data.draw(st.integers(1, 4))
    spec = data.draw(specs(rank, AXES))
    shape = shape_for(spec, rank, mesh, [data.draw(SIZES) for _ in range(rank)])
    dtype = data.draw(st.sampled_from(("float32", "bfloat16", "int8")))
    local = NamedSharding(mesh, spec).shard_shape(shape)
    shards = [shards_of(entry, mesh.shape) for entry in spec]
    assert (
        tuple(n * k for n, k in zip(local, (*shards, *(1,) * (rank - len(spec))), strict=True))
        == shape
    )
    assert (
        shard_bytes(shape, dtype, spec, mesh.shape) == math.prod(local) * jnp.dtype(dtype).itemsize
    )


@settings(SHORT, max_examples=150)
@given(st.data())
def test_what_the_audit_passes_jax_takes(data):
    """No problem means that every applied spec uses each axis at most once and divides its parameter."""
    mesh = data.draw(meshes())
    stacked = {"layers": data.draw(st.sampled_from(("pipe", "fsdp")))}
    table = [(f"{name}/w", data.draw(any_specs())) for name in "abc"]
    rules = Rules(table, stacked=stacked)
    shape = st.lists(st.sampled_from((12, 48, 7)), min_size=1, max_size=4).map(tuple)
    shapes = {path: data.draw(shape) for path in ("layers/a/w", "layers/3/b/w", "c/w")}
    wrong = {problem.where for problem in rules.audit(shapes, mesh.shape)}
    for index, (path, size) in enumerate(shapes.items()):
        if not {path, f"rule {index} ({table[index][0]!r})"} & wrong:
            spec = rules.match(path).spec
            used = [axis for entry in spec for axis in entry_axes(entry)]
            assert len(used) == len(set(used)), f"{path}: {spec}"
            NamedSharding(mesh, spec).shard_shape(size)


@SHORT
@given(
    st.lists(st.tuples(PATTERNS, specs(2)), max_size=4),
    PATTERNS,
    specs(2),
    st.lists(PATHS, min_size=1, max_size=8),
)
def test_appending_a_rule_changes_no_earlier_match(table, pattern, spec, paths):
    """A longer table says the same of what the shorter one matched, and answers the rest by its last rule or not."""
    short, long = Rules(table), Rules([*table, (pattern, spec)])
    for path in paths:
        before, after = short.match(path), long.match(path)
        if before is not None:
            assert after == before
        else:
            assert after is None or after.index == len(table)


@SHORT
@given(PATHS)
def test_numbers_are_dropped_only_right_after_a_stacked_name(path):
    """Of a path nothing else is removed, and stacking adds a dimension where no number follows the name."""
    rules = Rules([], stacked={"layers": "pipe", "blocks": "expert"})
    name, leading = rules.layer_path(path)
    assert name == re.sub(r"(?<![^/])(layers|blocks)/\d+(?![^/])", r"\1", path)
    stacked = re.findall(r"(?<![^/])(layers|blocks)(?=/[a-z])", path)
    assert leading == tuple({"layers": "pipe", "blocks": "expert"}[name] for name in stacked)


@SHORT
@given(specs(4, AXES), st.sampled_from(AXES), st.sampled_from(AXES))
def test_dropping_axes_is_idempotent_and_in_any_order(spec, one, other):
    """Dropping an axis twice is dropping it once, two axes commute, and every other axis stays where it was."""
    dropped = drop_axis(spec, one)
    assert drop_axis(dropped, one) == dropped
    assert drop_axis(dropped, other) == drop_axis(drop_axis(spec, other), one)
    assert len(dropped) == len(spec)
    for before, after in zip(spec, dropped, strict=True):
        assert entry_axes(after) == tuple(axis for axis in entry_axes(before) if axis != one)


@st.composite
def clean(draw):
    """A mesh, a table as a list, and shapes that fit it; stacked, unrolled and plain parameters under each rule.

    Every axis but `pipe` is larger than 1, so that a dimension that is one too large does not
    divide.
    """
    mesh = draw(meshes(least=2))
    table, shapes = [], {}
    for i in range(draw(st.integers(2, 4))):
        rank = draw(st.integers(1, 3))
        spec = draw(specs(rank))
        table.append((f"part{i}/kernel", spec))
        shape = shape_for(spec, rank, mesh, [draw(SIZES) for _ in range(rank)])
        shapes[f"part{i}/kernel"] = shape
        if draw(st.booleans()):
            shapes[f"layers/part{i}/kernel"] = (mesh.shape["pipe"] * 2, *shape)
        if draw(st.booleans()):
            shapes[f"layers/0/part{i}/kernel"] = shape
    if draw(st.booleans()):
        table.insert(draw(st.integers(0, len(table))), ("norm/scale", replicate("a few KiB")))
        shapes["norm/scale"] = (7,)
    return mesh, table, shapes


def owned(table, index, shapes):
    """The parameters of a rule of a clean table."""
    return [path for path in shapes if path.endswith(table[index][0])]


def unmatched(data, table, shapes, index):
    """A parameter that no rule knows."""
    shapes["stray/bias"] = (3,)
    return [("stray/bias", "no rule matches")]


def useless(data, table, shapes, index):
    """A rule for a parameter that is not there."""
    at = data.draw(st.integers(0, len(table)))
    table.insert(at, ("absent/kernel", P("fsdp")))
    return [(f"rule {at} ('absent/kernel')", "matches no parameter")]


def shadowed(data, table, shapes, index):
    """A rule behind one that takes all it matches."""
    at = data.draw(st.integers(index + 1, len(table)))
    pattern = table[index][0]
    table.insert(at, (pattern.replace("kernel", "(kernel|absent)"), P("fsdp")))
    return [(f"rule {at} ({table[at][0]!r})", f"is shadowed by rule {index} ({pattern!r})")]


def rank_mismatch(data, table, shapes, index):
    """A spec with an entry too many."""
    pattern, spec = table[index]
    rank = len(shapes[pattern])
    table[index] = pattern, P(*spec, *(None,) * (rank + 1 - len(spec)))
    return [(path, f"for the shape {shapes[path]}") for path in owned(table, index, shapes)]


def unknown_axis(data, table, shapes, index):
    """A misspelt axis."""
    pattern, spec = table[index]
    table[index] = pattern, P("fsd", *list(spec)[1:])
    return [(f"rule {index} ({pattern!r})", "names the unknown axis 'fsd'")]


def axis_twice(data, table, shapes, index):
    """An axis that is used already, in another entry or in the same."""
    pattern, spec = table[index]
    axis = data.draw(st.sampled_from([axis for entry in spec for axis in entry_axes(entry)]))
    at = data.draw(st.integers(0, len(spec) - 1))
    table[index] = (
        pattern,
        P(*(entry if i != at else (*entry_axes(entry), axis) for i, entry in enumerate(spec))),
    )
    return [(f"rule {index} ({pattern!r})", f"uses the axis {axis!r} twice")]


def indivisible(data, table, shapes, index):
    """A dimension one too large."""
    spec = table[index][1]
    dim = data.draw(st.sampled_from([i for i, entry in enumerate(spec) if entry_axes(entry)]))
    expected = []
    for path in owned(table, index, shapes):
        at = dim + path.startswith("layers/part")
        shapes[path] = tuple(n + (i == at) for i, n in enumerate(shapes[path]))
        expected.append((path, f"cannot split dimension {at} of {shapes[path]}"))
    return expected


DEFECTS = (unmatched, useless, shadowed, rank_mismatch, unknown_axis, axis_twice, indivisible)


@SHORT
@given(clean())
def test_a_clean_table_has_no_problem(case):
    """What the next test injects defects into passes the audit."""
    mesh, table, shapes = case
    assert Rules(table).audit(shapes, mesh.shape) == []


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda f: f.__name__)
@settings(SHORT, max_examples=20)
@given(st.data())
def test_the_audit_finds_every_injected_defect_and_nothing_else(defect, data):
    """Into a clean table and model goes one defect, and out come exactly its problems."""
    mesh, table, shapes = data.draw(clean())
    index = data.draw(
        st.sampled_from([i for i, (_, value) in enumerate(table) if isinstance(value, P)])
    )
    expected = defect(data, table, shapes, index)
    problems = Rules(table).audit(shapes, mesh.shape)
    assert sorted(problem.where for problem in problems) == sorted(where for where, _ in expected)
    for where, what in expected:
        (problem,) = [p for p in problems if p.where == where]
        assert what in problem.what


@SHORT
@given(st.data())
def test_defects_do_not_hide_each_other(data):
    """Two defects of different kinds in different parts of a table are both found."""
    mesh, table, shapes = data.draw(clean())
    kernels = [i for i, (_, value) in enumerate(table) if isinstance(value, P)]
    first, second = data.draw(
        st.permutations((rank_mismatch, unknown_axis, axis_twice, indivisible))
    )[:2]
    expected = first(data, table, shapes, kernels[0]) + second(data, table, shapes, kernels[-1])
    problems = Rules(table).audit(shapes, mesh.shape)
    assert sorted(problem.where for problem in problems) == sorted(where for where, _ in expected)


def whole(spec, shape):
    """A spec with an entry for each dimension."""
    return (*spec, *(None,) * (len(shape) - len(spec)))


def other_spec(data, spec):
    """A spec that splits otherwise than `spec`, in as many entries."""
    axes = [
        axis
        for axis in AXES[1:]
        if axis not in [axis for entry in spec for axis in entry_axes(entry)]
    ]
    return P(data.draw(st.sampled_from(axes or [None])), *list(spec)[1:])


@settings(SHORT, max_examples=30)
@given(st.data())
def test_tied_arrays_are_found_exactly_where_two_specs_meet(data):
    """Rules for an alias are no problem while they agree, and name the array as soon as one of them does not."""
    mesh, table, shapes = data.draw(clean())
    kernels = [(pattern, spec) for pattern, spec in table if isinstance(spec, P)]
    tied = tuple((pattern, f"alias{i}/w", f"alias{i}/v") for i, (pattern, _) in enumerate(kernels))
    aliases = [(f"alias{i}/(v|w)", spec) for i, (_, spec) in enumerate(kernels)]
    assert Rules([*table, *aliases]).audit(shapes, mesh.shape, tied=tied) == []

    at = data.draw(st.integers(0, len(kernels) - 1))
    aliases[at] = aliases[at][0], other_spec(data, kernels[at][1])
    (problem,) = Rules([*table, *aliases]).audit(shapes, mesh.shape, tied=tied)
    assert problem.where == " = ".join(tied[at])
    for pattern in (kernels[at][0], aliases[at][0]):
        assert f"({pattern!r}) says" in problem.detail


@settings(SHORT, max_examples=30)
@given(st.data())
def test_annotations_are_contradicted_exactly_where_two_specs_meet(data):
    """A table and its own specs as annotations agree; each one that is changed is named, and nothing else."""
    mesh, table, shapes = data.draw(clean())
    rules = Rules(table, stacked=DEFAULT_STACKED)
    specs = {path: whole(rules.match(path).spec, shape) for path, shape in shapes.items()}
    annotations = {path: Annotation(specs[path], shape) for path, shape in shapes.items()}
    annotated = {
        path: annotation for path, annotation in annotations.items() if data.draw(st.booleans())
    }
    if annotated:
        assert rules_from_annotations(annotated, table=rules) == rules
        alone = rules_from_annotations(annotated)
        assert alone.audit({path: shapes[path] for path in annotated}, mesh.shape) == []
        assert all(whole(alone.match(path).spec, shapes[path]) == specs[path] for path in annotated)

    wrong = data.draw(st.lists(st.sampled_from(sorted(shapes)), min_size=1, unique=True))
    for path in wrong:
        leading = rules.layer_path(path)[1]
        annotated[path] = Annotation(
            (*leading, *other_spec(data, specs[path][len(leading) :])), shapes[path]
        )
    with pytest.raises(RuleError) as caught:
        rules_from_annotations(annotated, table=rules)
    told_apart = {p.where for p in caught.value.problems if "another annotation than" in p.what}
    contradicted = {p.where for p in caught.value.problems if "and rule" in p.what}
    assert contradicted == set(wrong)
    assert contradicted | told_apart == {p.where for p in caught.value.problems}


def test_an_unknown_axis_of_a_stack_is_a_problem_and_not_a_crash():
    """It is named once, and the other parameters are audited all the same."""
    rules = Rules([("a", P("fsdp")), ("b", P("tensor"))], stacked={"layers": "pip"})
    shapes = {"layers/a": (2, 4), "b": (7,)}
    problems = rules.audit(shapes, abstract_mesh(MeshShape(fsdp=2, tensor=2)).shape)
    assert sorted(problem.where for problem in problems) == ["b", "stacked['layers']"]


def test_an_axis_used_by_the_stack_and_the_layer_is_a_problem_of_the_parameter():
    """The rule is right by itself, so the parameter is named with the spec that stacking makes."""
    rules = Rules([("a", P("fsdp"))], stacked={"layers": "fsdp"})
    (problem,) = rules.audit(
        {"layers/a": (2, 4), "a": (4,)}, abstract_mesh(MeshShape(fsdp=2)).shape
    )
    assert problem.where == "layers/a"
    assert "uses the axis 'fsdp' twice" in problem.what
