"""Flax metadata has one meaning here, and it is Flax's own wherever its resolvers agree."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.core import spmd as flax_spmd
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.errors import RuleError
from spmd.sharding.flax_metadata import Annotation, linen_annotations, nnx_annotations
from spmd.sharding.from_flax import rules_from_annotations
from spmd.sharding.mesh import AXES, entry_axes, make_mesh
from spmd.sharding.rules import Rules, replicate
from tests.annotated import INIT, LOGICAL, MESH, Dense, linear, placement, problems, resolve

pytestmark = pytest.mark.compat


def test_nnx_metadata_is_read_with_its_rules():
    """Names, shape and the parameter's own rules are found under its path; a parameter without metadata is not."""
    init = nnx.with_partitioning(INIT, ["embed", "mlp"], sharding_rules=(("embed", "fsdp"),))
    with nnx.use_eager_sharding(False):
        layer = nnx.eval_shape(lambda: nnx.Linear(4, 8, kernel_init=init, rngs=nnx.Rngs(0)))
    found = nnx_annotations(nnx.state({"a": [layer]}))
    assert found == {"a/0/kernel": Annotation(("embed", "mlp"), (4, 8), (("embed", "fsdp"),))}


def test_every_form_of_nnx_metadata_is_read():
    """A PartitionSpec, a sharding, nested axes and `kernel_metadata` are names too."""
    forms = (P("fsdp", ("data", "tensor")), NamedSharding(MESH, P("fsdp", ("data", "tensor"))))
    for form in forms:
        assert nnx_annotations(nnx.state(linear(form)))["kernel"].names == (
            "fsdp",
            ("data", "tensor"),
        )
    with nnx.use_eager_sharding(False):
        layer = nnx.Linear(
            4, 8, kernel_metadata={"out_sharding": ("embed", None)}, rngs=nnx.Rngs(0)
        )
    assert nnx_annotations(nnx.state(layer)) == {"kernel": Annotation(("embed", None), (4, 8))}


def test_linen_boxes_are_read_with_their_kind():
    """`Partitioned` may name mesh axes, `LogicallyPartitioned` never does, and its rules come with it."""
    params = jax.eval_shape(Dense().init, jax.random.key(0), jnp.ones((1, 4)))["params"]
    assert linen_annotations(params) == {
        "axes/kernel": Annotation(("fsdp", "tensor"), (4, 8)),
        "names/kernel": Annotation(("mlp", "embed"), (8, 4), (("mlp", "data"),), is_logical=True),
    }


def test_a_bridged_nnx_layer_is_read_through_its_box():
    """An NNX layer inside a Linen module keeps its names."""
    init = nnx.with_partitioning(INIT, ("embed", "mlp"))
    module = nnx.bridge.ToLinen(
        nnx.Linear, args=(4, 8), kwargs={"kernel_init": init, "use_bias": False}
    )
    with nnx.use_eager_sharding(False):
        variables = jax.eval_shape(module.init, jax.random.key(0), jnp.ones((1, 4)))
    assert linen_annotations(variables["params"]) == {
        "kernel": Annotation(("embed", "mlp"), (4, 8))
    }


def test_metadata_that_is_no_names_is_an_error_that_lists_all():
    """A string would be split into letters by Flax; here it is refused with the path."""
    with pytest.raises(RuleError) as caught:
        nnx_annotations(nnx.state({"a": linear("xy"), "b": linear(("x", 3))}))
    assert [problem.where for problem in caught.value.problems] == [
        "a/kernel, annotation 'xy'",
        "b/kernel, annotation 3",
    ]
    with pytest.raises(RuleError, match="is not a dimension name"):
        Annotation((P.UNCONSTRAINED,), (4,))


NAMES = st.sampled_from(("embed", "mlp", "heads", "norm", "fsdp", "tensor", None, ("data", "fsdp")))
TARGETS = st.sampled_from(("fsdp", "tensor", "data", None, ("fsdp", "tensor"), ("data",), ()))
KEYS = ("embed", "mlp", "heads", "norm", "fsdp")
MANY = settings(max_examples=200, deadline=None, derandomize=True)


@MANY
@given(
    st.lists(NAMES, min_size=1, max_size=3),
    st.lists(st.tuples(st.sampled_from(KEYS), TARGETS), max_size=6),
)
def test_logical_names_mean_what_linen_resolves(names, rules):
    """Where each name gets a rule the spec is Linen's; where Linen leaves one whole without a word, it is an error."""
    names = [
        name for i, name in enumerate(names) if not isinstance(name, str) or name not in names[:i]
    ]
    ours = resolve(names, rules, is_logical=True)
    last = [(name, f"nothing for {name}") for name in names if isinstance(name, str)]
    theirs = nn.logical_to_mesh_axes(names, [*rules, *last])
    silent = any("nothing for" in axis for entry in theirs for axis in entry_axes(entry))
    twice = len({axis for e in theirs for axis in entry_axes(e)}) < sum(
        len(entry_axes(e)) for e in theirs
    )
    assert (ours is None) == (silent or twice), theirs
    if ours is not None:
        assert placement(ours) == placement(nn.logical_to_mesh_axes(names, rules))
        (spec,) = jax.tree.leaves(
            nn.logical_to_mesh({"w": P(*names)}, rules), is_leaf=lambda x: isinstance(x, P)
        )
        assert placement(ours) == placement(spec)


@MANY
@given(
    st.lists(NAMES, min_size=2, max_size=2),
    st.dictionaries(st.sampled_from(KEYS), TARGETS),
    st.booleans(),
)
def test_names_mean_what_nnx_resolves_if_it_can(names, rules, in_metadata):
    """With one rule a name, our spec is NNX's; what is an error here is a spec that no mesh takes there."""
    rules = tuple(rules.items())
    metadata = {"sharding_rules": rules} if in_metadata and rules else {}
    state = nnx.state(linear(names, 24, 24, **metadata))
    with flax_spmd.logical_axis_rules(() if in_metadata else rules):
        theirs = nnx.get_partition_spec(state)["kernel"].get_value()
        used = [axis for entry in theirs for axis in entry_axes(entry)]
        fits = set(used) <= set(AXES) and len(set(used)) == len(used)
        placed = nnx.get_named_sharding(state, MESH)["kernel"].get_value() if fits else None
    ours = resolve(names, () if metadata else rules, rules=rules if metadata else ())
    assert (ours is not None) == fits, theirs
    if placed is not None:
        assert placement(ours) == placement(theirs)
        assert placed.is_equivalent_to(NamedSharding(MESH, ours), 2)


def test_the_comparison_sees_another_meaning():
    """Control: with two rules for a name NNX's answer is not ours, and the comparison above would say so."""
    rules = (("embed", "fsdp"), ("embed", "data"))
    with flax_spmd.logical_axis_rules(rules):
        theirs = nnx.get_partition_spec(nnx.state(linear(("embed", None))))["kernel"].get_value()
    assert placement(resolve(("embed", None), rules)) != placement(theirs)


def test_nnx_places_parameters_as_our_table_says():
    """An array that NNX shards as it is made, for which it needs a mesh, lies where our spec puts it."""
    mesh = make_mesh(fsdp=4, tensor=2)
    init = nnx.with_partitioning(INIT, ("embed", "mlp"))
    with pytest.raises(ValueError, match="mesh"):
        nnx.Linear(8, 8, use_bias=False, kernel_init=init, rngs=nnx.Rngs(0))
    with jax.set_mesh(mesh), flax_spmd.logical_axis_rules(LOGICAL):
        layer = nnx.Linear(8, 8, use_bias=False, kernel_init=init, rngs=nnx.Rngs(0))
    rules = rules_from_annotations(nnx_annotations(nnx.state(layer)), logical=LOGICAL)
    ours = NamedSharding(mesh, rules.match("kernel").spec)
    assert layer.kernel.get_value().sharding.is_equivalent_to(ours, 2)
    assert rules.match("kernel").spec == P("fsdp", "tensor")


def test_linen_shards_parameters_as_our_table_says():
    """Linen's shardings for both kinds of box are ours."""
    params = jax.eval_shape(Dense().init, jax.random.key(0), jnp.ones((1, 4)))["params"]
    logical = (("mlp", "data"), ("embed", "fsdp"))
    rules = rules_from_annotations(linen_annotations(params), logical=logical)
    assert nn.get_partition_spec(params["names"])["bias"] == P(), (
        "Linen replicates what has no annotation"
    )
    assert rules.match("names/bias") is None
    axes = nn.get_sharding(params["axes"], MESH)["kernel"]
    assert axes == NamedSharding(MESH, rules.match("axes/kernel").spec)
    names = nn.logical_to_mesh_sharding(nn.get_partition_spec(params["names"]), MESH, logical)[
        "kernel"
    ]
    assert names == NamedSharding(MESH, rules.match("names/kernel").spec)


def nnx_spec(names, rules=(), **metadata):
    with flax_spmd.logical_axis_rules(rules):
        return nnx.get_partition_spec(nnx.state(linear(names, **metadata)))["kernel"].get_value()


@pytest.mark.parametrize(
    ("names", "rules", "linen", "in_nnx", "ours"),
    [
        (("embed",), (("embed", "fsdp"), ("embed", "data")), P("fsdp"), P("data"), P("fsdp")),
        (
            ("embed", "mlp"),
            (("embed", "fsdp"), ("mlp", "fsdp")),
            P("fsdp", None),
            P("fsdp", "fsdp"),
            None,
        ),
        (
            ("mlp", "embed"),
            (("embed", "fsdp"), ("mlp", "fsdp")),
            P(None, "fsdp"),
            P("fsdp", "fsdp"),
            None,
        ),
        (
            ("embed", "mlp"),
            (("embed", "fsdp"), ("mlp", "fsdp"), ("mlp", None)),
            P("fsdp", None),
            P("fsdp", None),
            P("fsdp", None),
        ),
        (
            ("embed", "mpl"),
            (("embed", "fsdp"), ("mlp", "tensor")),
            P("fsdp", None),
            P("fsdp", "mpl"),
            None,
        ),
        (
            ("fsdp", "mlp"),
            (("mlp", "tensor"),),
            P(None, "tensor"),
            P("fsdp", "tensor"),
            P("fsdp", "tensor"),
        ),
        (("mlp", "mlp"), (("mlp", None),), ValueError, P(None, None), P()),
    ],
    ids=[
        "two-rules",
        "taken",
        "order-of-rules",
        "taken-and-said",
        "unknown",
        "mesh-axis",
        "name-twice",
    ],
)
def test_where_flax_differs_from_itself(names, rules, linen, in_nnx, ours):
    """Each line of the table in docs/how-to/annotations.md: Linen's answer, NNX's, and ours (None: an error)."""
    if linen is ValueError:
        with pytest.raises(ValueError, match="occur more than once"):
            nn.logical_to_mesh_axes(names, rules)
    else:
        assert nn.logical_to_mesh_axes(names, rules) == linen
    assert nnx_spec(names, rules) == in_nnx
    found = resolve(names, rules)
    assert found is None if ours is None else placement(found) == placement(ours)


def test_linen_never_takes_a_logical_name_for_an_axis_and_neither_do_we():
    """A name in a `LogicallyPartitioned` box that only a mesh axis is called is an error that says so."""
    (problem,) = problems({"w": Annotation(("fsdp",), (4,), is_logical=True)}, logical=LOGICAL)
    assert "name 'fsdp': has no logical rule\n" in problem


def test_rules_of_a_parameter_that_contradict_the_others_are_an_error():
    """NNX refuses them too; in Linen it depends on who resolves; a name in only one of them is fine."""
    own, others = (("embed", "fsdp"),), (("embed", "data"),)
    with pytest.raises(ValueError, match="Inconsistent"):
        nnx_spec(("embed",), others, sharding_rules=own)
    box = nn.LogicallyPartitioned(jnp.ones(8), ("embed",), rules=own)
    assert nn.logical_to_mesh(nn.get_partition_spec(box), others) == P("data")
    with jax.set_mesh(make_mesh(data=4, fsdp=2)), flax_spmd.logical_axis_rules(others):
        assert jax.jit(lambda box: box.unbox())(box).sharding.spec == P("fsdp")
    (problem,) = problems({"w": Annotation(("embed",), (4,), own)}, logical=others)
    assert (
        "its metadata says 'embed' → [('fsdp',)], and the logical rules say [('data',)]" in problem
    )
    assert resolve(("embed", "mlp"), LOGICAL, rules=own) == P("fsdp", "tensor")


def test_an_unknown_name_is_named_once_with_its_parameters():
    """Every unknown name is listed, not every parameter that has it."""
    annotations = {f"{i}/w": Annotation(("embed", "mpl"), (4, 4)) for i in range(3)} | {
        "v": Annotation(("x",), (4,))
    }
    found = problems(annotations, logical=LOGICAL)
    assert [problem.split(":")[0] for problem in found] == ["name 'mpl'", "name 'x'"]
    assert "0/w ('embed', 'mpl') and 2 more" in found[0]
    assert 'did you mean "mlp"?' in found[0]


def test_a_rule_that_names_no_mesh_axis_is_an_error_if_a_parameter_has_its_name():
    """A table for many models may name other meshes' axes where this model has nothing."""
    annotations = {"w": Annotation(("embed",), (4,))}
    (problem,) = problems(annotations, logical=[("embed", "fdsp"), ("stage", "stages")])
    assert problem.startswith("logical rule 0 ('embed'): names the unknown axis 'fdsp'")
    assert 'did you mean "fsdp"?' in problem
    (problem,) = problems(annotations, logical=[("embed", 3)])
    assert "logical rule 0 ('embed'): has the value 3" in problem


def test_names_without_an_axis_are_written_replication():
    """The plan shows which names came to nothing."""
    rules = rules_from_annotations({"scale": Annotation(("norm",), (4,))}, logical=LOGICAL)
    assert rules.params == (("^scale", replicate("annotated ('norm',): no mesh axis")),)


def test_a_table_speaks_for_what_has_no_annotation():
    """Each parameter has one source, agreement is no problem, and no rule is shadowed by it."""
    table = Rules(
        [("bias", replicate("small")), ("up/kernel", P("fsdp", "tensor"))],
        activations=[("h", P("data"))],
    )
    annotations = {
        "up/kernel": Annotation(("embed", "mlp"), (4, 8)),
        "down/kernel": Annotation(("mlp",), (8, 4)),
    }
    rules = rules_from_annotations(
        annotations, logical=LOGICAL, table=table, activations=[("logits", P("fsdp"))]
    )
    assert [pattern for pattern, _ in rules.params] == ["bias", "up/kernel", "^down/kernel"]
    assert [name for name, _ in rules.activations] == ["h", "logits"]
    shapes = {"up/kernel": (4, 8), "down/kernel": (8, 4), "up/bias": (8,), "down/bias": (4,)}
    assert rules.audit(shapes, MESH.shape) == []
    (problem,) = rules.audit(shapes | {"norm/scale": (4,)}, MESH.shape)
    assert str(problem).startswith("norm/scale: no rule matches this parameter")


def test_every_disagreement_between_table_and_annotation_names_both():
    """One error lists them all."""
    table = Rules([("kernel", P("tensor")), ("scale", replicate("small"))])
    annotations = {
        "a/kernel": Annotation(("embed", "mlp"), (4, 8)),
        "b/kernel": Annotation(("mlp", None), (8, 4)),
        "layers/c/scale": Annotation(("embed",), (2, 4)),
        "d/scale": Annotation(("norm",), (4,)),
    }
    assert problems(annotations, logical=LOGICAL, table=table) == [
        "a/kernel: its annotation ('embed', 'mlp') means P(fsdp, tensor), and rule 0 ('kernel') says P(tensor)\n"
        "    fix: correct one of them",
        "layers/c/scale: its annotation ('embed',) means P(pipe, fsdp), and rule 1 ('scale') says P(pipe)\n"
        "    fix: correct one of them",
    ]


def test_an_annotation_speaks_for_its_own_parameter_only():
    """A path that ends alike needs its own rule, and an annotation of a parameter that is gone is a useless rule."""
    rules = rules_from_annotations(
        {"mlp/kernel": Annotation(("fsdp",), (4,)), "gone/w": Annotation(("fsdp",), (4,))}
    )
    assert rules.match("mlp/kernel") is not None
    assert rules.match("x/mlp/kernel") is None
    (problem,) = rules.audit({"mlp/kernel": (4,)}, MESH.shape)
    assert str(problem).startswith("rule 1 ('^gone/w'): matches no parameter")


MAXTEXT_AXES = {
    "stage": "pipe",
    "context": "sequence",
    **dict.fromkeys(
        ("fsdp_transpose", "tensor_transpose", "tensor_sequence", "context_autoregressive"), None
    ),
    "autoregressive": None,
}
MAXTEXT = [  # the shape of its table: lists of axes, several rules for a name, names of activations
    ["activation_batch", ["data", "fsdp", "fsdp_transpose", "expert"]],
    ["mlp", ["fsdp_transpose", "tensor", "tensor_sequence", "autoregressive"]],
    ["heads", ["tensor", "tensor_transpose", "autoregressive"]],
    ["embed", ["fsdp", "fsdp_transpose", "sequence", "tensor_transpose", "context", "expert"]],
    ["embed", ["fsdp", "sequence", "context"]],
    ["embed_no_exp", ["fsdp", "sequence", "tensor_transpose"]],
    ["kv", []],
    ["exp", "expert"],
    ["norm", ["tensor", "tensor_transpose"]],
    ["layers", "stage"],
]


def test_a_table_with_other_axes_is_taken_with_a_mapping():
    """Axes are renamed, joined or dropped; names that no parameter has are listed."""
    annotations = {
        "layers/mlp/wi": Annotation(("embed", "layers", "mlp"), (8, 2, 16), is_logical=True),
        "layers/mlp/wo": Annotation(("mlp", "layers", "embed"), (16, 2, 8), is_logical=True),
        "layers/norm": Annotation(("norm", "layers"), (8, 2), is_logical=True),
        "experts/wi": Annotation(("exp", "embed_no_exp", "mlp"), (4, 8, 16), is_logical=True),
    }
    said = []
    rules = rules_from_annotations(
        annotations, logical=MAXTEXT, axes=MAXTEXT_AXES, report=said.append
    )
    assert {path: rules.match(path).spec for path in annotations} == {
        "layers/mlp/wi": P(("fsdp", "sequence", "expert"), "pipe", "tensor"),
        "layers/mlp/wo": P("tensor", "pipe", ("fsdp", "sequence", "expert")),
        "layers/norm": P("tensor", "pipe"),
        "experts/wi": P("expert", ("fsdp", "sequence"), "tensor"),
    }
    (line,) = said
    assert line.endswith(": activation_batch, heads, kv")
    found = problems(annotations, logical=MAXTEXT)
    assert {problem.split("'")[-2] for problem in found if "unknown axis" in problem} >= {
        "fsdp_transpose",
        "stage",
    }


def test_axes_in_names_and_in_own_rules_are_renamed():
    """A logical name is not taken for an axis, nor is one in a box of logical names."""
    annotations = {
        "a": Annotation(("model", ("data", "mp")), (4, 4)),
        "b": Annotation(("model",), (4,), rules=[("model", "mp")]),
        "c": Annotation(("data", "mp"), (4, 4)),
    }
    axes = {"model": "tensor", "mp": ("fsdp", "tensor"), "data": None}
    rules = rules_from_annotations(annotations, axes={**axes, "mp": "fsdp"}, report=pytest.fail)
    assert {path: rules.match(path).spec for path in annotations} == {
        "a": P("tensor", "fsdp"),
        "b": P("fsdp"),
        "c": P(None, "fsdp"),
    }
    (problem,) = problems({"a": Annotation(("model",), (4,), is_logical=True)}, axes=axes)
    assert "name 'model': has no logical rule" in problem
