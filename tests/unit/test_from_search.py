"""Tables written for `re.search` become strict tables that say the same of every parameter."""

import functools
import math
import re

import flax.linen as nn
import jax
import optax
import pytest
from flax import nnx
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import RuleError
from spmd.sharding.from_search import rules_from_search
from spmd.sharding.layer_paths import dims_of, without_dims
from spmd.sharding.mesh import MeshShape, abstract_mesh, entry_axes
from spmd.sharding.rules import Replicate, Rules

AXES = {"pipe": 1, "data": 2, "fsdp": 2, "expert": 1, "sequence": 1, "tensor": 2}
ROWS = [("tokens", P(("data", "fsdp", "expert"), "sequence"))]
EASYLM = (
    ("transformer/wte/embedding", P("mp", "fsdp")),
    ("attention/(wq|wk|wv)/kernel", P("fsdp", "mp")),
    ("attention/wo/kernel", P("mp", "fsdp")),
    ("feed_forward/w1/kernel", P("fsdp", "mp")),
    ("feed_forward/w2/kernel", P("mp", "fsdp")),
    ("feed_forward/w3/kernel", P("fsdp", "mp")),
    ("attention_norm/kernel", P(None)),
    ("ffn_norm/kernel", P(None)),
    ("transformer/ln_f/kernel", P(None)),
    ("lm_head/kernel", P("fsdp", "mp")),
    (".*", P(None)),
)


def abstract(**shapes):
    return {
        path.replace("__", "/"): jax.ShapeDtypeStruct(shape, "float32")
        for path, shape in shapes.items()
    }


def llama(layers=2, d=16, ff=32, vocab=64):
    params = abstract(
        transformer__wte__embedding=(vocab, d),
        transformer__ln_f__kernel=(d,),
        lm_head__kernel=(d, vocab),
    )
    for i in range(layers):
        layer = {f"attention/{w}/kernel": (d, d) for w in ("wq", "wk", "wv", "wo")}
        layer |= {"feed_forward/w1/kernel": (d, ff), "feed_forward/w2/kernel": (ff, d)}
        layer |= {
            "feed_forward/w3/kernel": (d, ff),
            "attention_norm/kernel": (d,),
            "ffn_norm/kernel": (d,),
        }
        params |= {
            f"transformer/h/{i}/{k}": jax.ShapeDtypeStruct(s, "float32") for k, s in layer.items()
        }
    return params


def reference(table, path, leaf):
    """What EasyLM and scalax do with one parameter."""
    if len(leaf.shape) == 0 or math.prod(leaf.shape) == 1:
        return P()
    return next(spec for pattern, spec in table if re.search(pattern, path))


def placement(spec, axes=()):
    """A spec without trailing Nones, its axes renamed."""
    entries = [tuple(dict(axes).get(axis, axis) for axis in entry_axes(entry)) for entry in spec]
    while entries and not entries[-1]:
        entries.pop()
    return entries


def differences(rules, table, params, axes=()):
    """The parameters of which the two tables say different things."""
    return [
        path
        for path, leaf in params.items()
        if (match := rules.match(path)) is None
        or placement(match.spec) != placement(reference(table, path, leaf), axes)
    ]


def convert(table, params, **kwargs):
    lines = []
    rules = rules_from_search(table, params, report=lines.append, **kwargs)
    return rules, "\n".join(lines)


def audit(rules, params):
    return rules.audit({path: leaf.shape for path, leaf in params.items()}, AXES)


def problems(table, params, **kwargs):
    with pytest.raises(RuleError) as caught:
        convert(table, params, **kwargs)
    return [str(problem) for problem in caught.value.problems]


def test_the_easylm_llama_table_keeps_its_words_and_its_meaning():
    """Only the axes change their names, replication is written, and the catch-all, which took nothing, is gone."""
    rules, _ = convert(EASYLM, llama(), axes={"mp": "tensor"})
    assert [pattern for pattern, _ in rules.params] == [pattern for pattern, _ in EASYLM[:-1]]
    assert rules.match("transformer/h/1/attention/wo/kernel").spec == P("tensor", "fsdp")
    assert rules.match("transformer/h/0/ffn_norm/kernel").reason == "P(None) in the search table"
    assert audit(rules, llama()) == []
    assert differences(rules, EASYLM, llama(), {"mp": "tensor"}) == []
    assert audit(rules, llama(layers=5)) == [], "a deeper model needs no other table"


def test_rows_of_a_batch_are_those_that_are_given():
    """The new table says how arrays of a batch are split, as one that is written by hand."""
    rules, _ = convert(EASYLM, llama(), axes={"mp": "tensor"}, batch=ROWS)
    assert list(rules.batch) == ROWS


def test_a_tree_does_as_well_as_a_table_of_paths():
    """Parameters come as `init` returns them."""
    nested = {
        "a": {"kernel": jax.ShapeDtypeStruct((4, 4), "float32")},
        "b": jax.ShapeDtypeStruct((4,), "float32"),
    }
    rules, _ = convert([("kernel", P("fsdp")), (".*", P())], nested)
    assert [pattern for pattern, _ in rules.params] == ["kernel", "b"]


def test_what_a_catch_all_caught_is_named_largest_first():
    """A misspelt rule is dead, and its parameters are found below the catch-all with their bytes."""
    table = [("lm_haed/kernel", P("fsdp")) if p == "lm_head/kernel" else (p, s) for p, s in EASYLM]
    params = llama() | abstract(transformer__h__0__attention__wq__lora=(16, 4))
    rules, report = convert(table, params, axes={"mp": "tensor"})
    assert rules.match("lm_head/kernel").reason == "left to the catch-all '.*'"
    caught = re.findall(r"(\d+) +([\d.]+ \w+)  catch-all: (.*)", report)
    assert caught == [("1", "4 KiB", "lm_head/kernel"), ("1", "256 B", "wq/lora")]
    assert re.search(r"9 +0 +0 B  'lm_haed/kernel'.*\n +dead: it matches no parameter", report)
    assert differences(rules, table, params, {"mp": "tensor"}) == []
    assert audit(rules, params) == []


def test_the_report_counts_leaves_and_bytes_and_says_who_shadows():
    """Every rule has a row; what it finds and does not win is another rule's."""
    table = [
        ("wo", P("fsdp")),
        ("two/kernel", P("data")),
        ("kernel", P("tensor")),
        ("bias", P(None)),
    ]
    params = abstract(
        attn__wo__kernel=(8, 4), mlp__two__kernel=(4, 4), head__kernel=(4, 4), head__bias=(1,)
    )
    rules, report = convert(table, params)
    assert "4 rules for re.search over 4 parameters, 260 B" in report
    rows = re.findall(r"^ +(\d) +(\d) +(\S+ \S+)  '", report, re.M)
    assert rows == [("0", "2", "192 B"), ("1", "0", "0 B"), ("2", "1", "64 B"), ("3", "0", "0 B")]
    assert "dead: all leaves that it matches are shadowed by rule 0" in report, (
        "'wo' is found in 'two'"
    )
    assert "2 of the 3 leaves that it matches are shadowed by rule 0" in report
    assert "dead: it matches no parameter of more than one element" in report
    assert "1         4 B  one element" in report
    assert rules.match("mlp/two/kernel").spec == P("fsdp"), (
        "an accident of re.search is kept, and shown"
    )
    assert [pattern for pattern, _ in rules.params] == [
        "head/bias",
        "wo/kernel",
        "two/kernel",
        "kernel",
    ]


@pytest.mark.parametrize("stacked", [{"layers": "pipe"}, {"layers": None}, {}])
def test_the_report_ends_in_the_table_as_python(stacked):
    """What is printed can be pasted, and is the table that is returned."""
    table = [("mlp", P(("dp", "fsdp"), "mp")), (r"x\d", P("mp")), (".*", P())]
    params = abstract(mlp__kernel=(4, 4), x1=(4, 2), layers__0__x_y=(3,))
    rules, report = convert(table, params, axes={"dp": "data", "mp": "tensor"}, stacked=stacked)
    namespace = {"spmd": spmd, "P": P}
    exec(report[report.index("rules =") :], namespace)
    assert namespace["rules"] == rules


def test_a_stacked_dimension_has_an_entry_in_the_search_table():
    """Specs are for arrays as stored: the first entry is the stack's, and gives way to `stacked`."""
    table = [("kernel", P(None, "fsdp", "tensor")), ("scale", P(None))]
    params = abstract(layers__kernel=(2, 4, 4), layers__scale=(2, 4))
    rules, _ = convert(table, params)
    assert dict(rules.params)["kernel"] == P("fsdp", "tensor")
    assert rules.match("layers/kernel").spec == P("pipe", "fsdp", "tensor")
    assert audit(rules, params) == []
    rules, _ = convert(table, params, stacked={"layers": None})
    assert differences(rules, table, params) == []
    assert audit(rules, params) == []


def test_specs_of_one_layer_serve_a_stack_when_that_is_said():
    """A table written for unrolled layers is read with `one_layer=True`; without, its first axis is in the way."""
    table = [("kernel", P("fsdp", "tensor"))]
    params = abstract(layers__kernel=(2, 4, 4))
    (problem,) = problems(table, params)
    assert "splits the stacked dimension over 'fsdp'; stacked= says 'pipe'" in problem
    assert "one_layer=True" in problem
    rules, _ = convert(table, params, one_layer=True)
    assert rules.match("layers/kernel").spec == P("pipe", "fsdp", "tensor")


def test_one_rule_for_stacked_and_plain_arrays_becomes_two():
    """A spec means something else in front of a stack, so each kind gets its own rule."""
    table = [("kernel", P(None, "fsdp"))]
    params = abstract(layers__kernel=(2, 4, 4), head__kernel=(4, 4))
    rules, _ = convert(table, params)
    assert rules.match("layers/kernel").spec == P("pipe", "fsdp")
    assert rules.match("head/kernel").spec == P(None, "fsdp")
    assert audit(rules, params) == []


def test_axes_are_renamed_joined_and_dropped():
    """An axis of the old mesh may be several of the new one, or none."""
    rules, _ = convert(
        [("w", P("dp", ("mp", "x")))],
        abstract(w=(8, 8)),
        axes={"dp": ("data", "fsdp"), "x": None, "mp": "tensor"},
    )
    assert rules.match("w").spec == P(("data", "fsdp"), "tensor")


def test_everything_without_a_strict_form_is_listed_at_once():
    """Unknown axes, axes used twice, long specs and unmatched parameters are four problems."""
    table = [
        ("^a", P("mp")),
        ("^b", P("fsdp", "fsdp")),
        ("^c", P("fsdp", "tensor", None)),
        ("never", P("nowhere")),  # it wins nothing, so its axes do not matter
    ]
    params = abstract(a=(4,), b=(4, 4), c=(4, 4), d=(4,))
    found = problems(table, params)
    assert [problem.split(":")[0] for problem in found] == ["axis 'mp'", "c", "d", "rule 1 ('^b')"]
    assert "3 entries for 2 dimensions" in found[1]


def test_what_is_no_table_is_listed_at_once():
    """Bad patterns, values that are no spec, and dimensions left to the compiler."""
    found = problems([("(", P("fsdp")), ("a", "fsdp"), ("b", P(P.UNCONSTRAINED))], abstract(a=(4,)))
    assert [problem.split(":")[1][:20] for problem in found] == [
        " is not a regular ex",
        " has the value 'fsdp",
        " leaves a dimension ",
    ]


def test_tuples_and_none_are_specs_too():
    """Older tables write specs without PartitionSpec."""
    rules, _ = convert([("a", ("fsdp", None)), ("b", None)], abstract(a=(4, 4), b=(4, 4)))
    assert rules.match("a").spec == P("fsdp", None)
    assert isinstance(rules.match("b").requested, Replicate)


NAMES = (
    "h",
    "layers",
    "0",
    "1",
    "attn",
    "wo",
    "two",
    "kernel",
    "bias",
    "Dense_0",
    "Dense_1",
    "w.x",
)
PATHS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4).map("/".join)
PATTERNS = st.one_of(
    st.sampled_from(
        ("wo", "wo/kernel", "^h", "kernel$", "attn/.*", "(attn|wo)/(kernel|bias)", r"\d+", "layers")
    ),
    st.sampled_from(
        ("^attn/wo$", "x", "/", "(?i)KERNEL", ".*", "layers/[0-9]/", "Dense_0", "h/.*kernel", "s/0")
    ),
    st.sampled_from((".*o.*", "[a-z]", "^(?!.*two).*wo", "bias|kernel")),
)
SPECS = st.sampled_from(
    (
        P(),
        P(None),
        P("fsdp"),
        P(None, "mp"),
        P("mp", "fsdp"),
        P(("data", "fsdp"), "mp"),
        P("fsdp", None),
        P(None, None),
    )
)
SHAPES = st.sampled_from(((8, 8), (8, 8), (4, 16), (1, 1)))
MANY = settings(max_examples=150, deadline=None, derandomize=True)


@st.composite
def cases(draw):
    """A search table that matches everything in the end, and parameters no path of which is inside another."""
    table = [*draw(st.lists(st.tuples(PATTERNS, SPECS), max_size=6)), (".*", draw(SPECS))]
    paths = draw(st.lists(PATHS, min_size=1, max_size=10, unique=True))
    params = {path: jax.ShapeDtypeStruct(draw(SHAPES), "float32") for path in paths}
    return table, params


@MANY
@given(cases())
def test_the_strict_table_says_what_re_search_says(case):
    """For every parameter the spec is the same, and the audit has nothing to add: no dead rule, none shadowed."""
    table, params = case
    rules, _ = convert(table, params, axes={"mp": "tensor"}, stacked=())
    assert differences(rules, table, params, {"mp": "tensor"}) == []
    assert audit(rules, params) == []


@MANY
@given(cases(), st.sampled_from((None, "pipe")), st.sampled_from((0, 1)))
def test_with_stacks_it_says_the_same_but_for_the_stacked_dimension(case, axis, dim):
    """The stacked dimension is split as `stacked` says, the rest as re.search says, unrolled or stacked."""
    table, params = case
    params = {path: leaf for path, leaf in params.items() if path.split("/").count("layers") < 2}
    problems = []
    try:
        rules, _ = convert(
            table, params, axes={"mp": "tensor"}, stacked={"layers": spmd.Stack(axis, dim)}
        )
    except RuleError as error:
        problems = error.problems
    # Some tables say what no strict one can; every other is converted.
    expected = "splits the stacked|has no dimension|have different sizes"
    assert all(re.search(expected, problem.what) for problem in problems)
    assume(not problems)
    assert audit(rules, params) == []
    for path, leaf in params.items():
        dims = dims_of(path, rules.stacks)
        ours, theirs = rules.match(path).spec, reference(table, path, leaf)
        assert placement(without_dims(ours, dims)) == placement(
            without_dims(theirs, dims), {"mp": "tensor"}
        )
        assert [ours[at] for at in dims] == [axis] * len(dims)


@settings(MANY, max_examples=30)
@given(cases(), st.data())
def test_the_comparison_sees_a_wrong_spec(case, data):
    """Control: a strict table with one rule changed differs from the search table, on what that rule wins."""
    table, params = case
    rules, _ = convert(table, params, axes={"mp": "tensor"}, stacked=())
    at = data.draw(st.integers(0, len(rules.params) - 1))
    wrong = Rules(
        [(p, P("sequence") if i == at else v) for i, (p, v) in enumerate(rules.params)], stacked=()
    )
    won = [path for path in params if rules.match(path).index == at]
    assert won
    assert differences(wrong, table, params, {"mp": "tensor"}) == won


class Dense(nnx.Module):
    """A linear layer and dropout, whose random state needs no rule."""

    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.up(x))


class LinenDense(nn.Module):
    """The same with a box around the kernel."""

    @nn.compact
    def __call__(self, x):
        init = nn.with_logical_partitioning(nn.initializers.ones, ("embed", "mlp"))
        return nn.Dense(16, use_bias=False, kernel_init=init, name="up")(x)


def test_states_modules_boxes_and_collections_are_read_by_the_models_paths():
    """Whatever form the parameters come in, the rules match those of the model."""
    module = nnx.eval_shape(lambda: Dense(nnx.Rngs(0)))
    linen = functools.partial(
        jax.eval_shape,
        LinenDense().init,
        jax.random.key(0),
        jax.ShapeDtypeStruct((1, 8), "float32"),
    )
    pure = jax.eval_shape(spmd.from_nnx(Dense).init, jax.random.key(0))
    for params in (
        pure,
        module,
        nnx.state(module),
        nnx.state(module, nnx.Param),
        linen()["params"],
        linen(),
    ):
        rules, _ = convert([("up/", P("fsdp", "mp"))], params, axes={"mp": "tensor"})
        assert rules.params == (("up/kernel", P("fsdp", "tensor")),)
    for model in (
        spmd.from_nnx(Dense),
        spmd.from_linen(LinenDense(), jax.ShapeDtypeStruct((1, 8), "float32")),
    ):
        spmd.make_plan(abstract_mesh(MeshShape(fsdp=2, tensor=2)), rules, model, optax.sgd(0.1))


def test_numbered_modules_that_differ_have_a_rule_each():
    """Lists that are no stack of layers are told apart by what the table says of them."""
    table = [
        ("layers/0/kernel", P("fsdp", "tensor")),
        ("layers/2/kernel", P("tensor", "fsdp")),
        ("kernel", P("fsdp")),
    ]
    params = abstract(mlp__layers__0__kernel=(4, 8), mlp__layers__2__kernel=(8, 4))
    params |= abstract(layers__0__kernel=(4, 4), layers__1__kernel=(4, 4), kernel=(4,))
    params |= abstract(
        layers__0__up__layers__0__kernel=(4, 4), layers__1__up__layers__0__kernel=(4, 4)
    )
    rules, _ = convert(table, params)
    assert differences(rules, table, params) == []
    assert audit(rules, params) == []


def test_entries_of_a_stack_along_another_dimension_are_taken_out():
    """The search table has the entry of the stacked dimension in its place; the strict one has it in `stacked`."""
    params = abstract(layers__up=(8, 4, 16), layers__norm=(8, 4))
    table = [("up", P("fsdp", "stage", "tensor")), ("norm", P("tensor"))]
    stacked = {"layers": spmd.Stack("pipe", dim=1)}
    rules, text = convert(table, params, axes={"stage": "pipe"}, stacked=stacked)
    assert rules.params == (("up", P("fsdp", "tensor")), ("norm", P("tensor")))
    assert rules.match("layers/up").spec == P("fsdp", "pipe", "tensor")
    assert """stacked={"layers": spmd.Stack("pipe", dim=1)},""" in text
    assert (
        "along dimension 1 all have 4"
        in problems(table, params | abstract(layers__down=(16, 4, 8)))[1]
    )
