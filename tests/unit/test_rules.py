"""Rule tables match as documented, and their audit leaves nothing silent."""

import re
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import RuleError
from spmd.sharding import patterns
from spmd.sharding.layer_paths import Stack
from spmd.sharding.patterns import compile_pattern
from spmd.sharding.rules import Rules, replicate
from spmd.tree import flatten

AXES = {"pipe": 1, "data": 2, "fsdp": 2, "expert": 1, "sequence": 1, "tensor": 2}


def audit(rules, shapes, axes=AXES):
    return [str(problem) for problem in rules.audit(shapes, axes)]


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("wo/kernel", "layers/attention/wo/kernel", True),
        ("wo/kernel", "wo/kernel", True),
        ("wo/kernel", "layers/attention/two/kernel", False),
        ("attention/wo/kernel", "layers/cross_attention/wo/kernel", False),
        ("kernel", "wo/kernel/extra", False),
        ("(q|k)_proj/kernel", "k_proj/kernel", True),
        ("a/b|c/d", "x/c/d", True),
        ("a/b|c/d", "a/b/c/d", True),
        ("attention", "attention/kernel", False),
    ],
)
def test_a_pattern_matches_a_whole_run_of_components_up_to_the_end(pattern, path, matches):
    """Neither half a component nor a run that stops before the end is a match."""
    assert bool(compile_pattern(pattern).fullmatch(path)) == matches


def test_the_first_match_wins():
    """A narrow rule before a wide one takes its parameters."""
    rules = Rules([("mlp/kernel", P("fsdp")), ("kernel", P("tensor"))])
    assert rules.match("mlp/kernel").spec == P("fsdp")
    assert rules.match("attention/kernel").spec == P("tensor")


def test_stacked_layers_get_the_leading_axis_and_unrolled_ones_do_not():
    """One table serves scanned and unrolled models, replicated parameters too."""
    rules = Rules(
        [("kernel", P("fsdp", "tensor")), ("scale", replicate("small"))], stacked={"layers": "pipe"}
    )
    assert rules.match("layers/kernel").spec == P("pipe", "fsdp", "tensor")
    assert rules.match("layers/7/kernel").spec == P("fsdp", "tensor")
    assert rules.match("layers/scale").spec == P("pipe")
    assert rules.match("head/kernel").spec == P("fsdp", "tensor")


def test_an_unmatched_parameter_is_named_with_its_nearest_rule():
    """A typo in a table is found from the parameter's side."""
    (problem,) = audit(
        Rules([("mpl/kernel", P("fsdp"))]), {"mlp/kernel": (4, 4), "mpl/kernel": (4, 4)}
    )
    assert "mlp/kernel: no rule matches this parameter" in problem
    assert "the nearest rule is 'mpl/kernel'" in problem


def test_a_rule_that_matches_nothing_is_a_problem():
    """A typo in a table is found from the rule's side."""
    (problem,) = audit(
        Rules([("kernel", P("fsdp")), ("biass", replicate("small"))]), {"kernel": (4, 4)}
    )
    assert "rule 1 ('biass'): matches no parameter" in problem


def test_a_shadowed_rule_names_its_shadower():
    """A rule that never wins says which rule takes its parameters."""
    (problem,) = audit(
        Rules([("kernel", P("fsdp")), ("mlp/kernel", P("tensor"))]), {"mlp/kernel": (4, 4)}
    )
    assert "rule 1 ('mlp/kernel'): is shadowed by rule 0 ('kernel')" in problem
    assert "e.g. mlp/kernel" in problem


def test_more_entries_than_dimensions_is_a_problem():
    """A matrix spec on a vector is a rank mismatch, not a crash inside JAX."""
    (problem,) = audit(Rules([("bias", P("fsdp", "tensor"))]), {"bias": (4,)})
    assert "2 entries for 1 dimensions" in problem


def test_an_unknown_axis_is_named_once_with_a_suggestion():
    """A misspelt axis is one problem of its rule, however many parameters the rule matches."""
    (problem,) = audit(Rules([("kernel", P("fsd"))]), {f"{i}/kernel": (4, 4) for i in range(5)})
    assert "names the unknown axis 'fsd'" in problem
    assert 'did you mean "fsdp"?' in problem


def test_an_axis_used_twice_is_a_problem():
    """An axis can split one dimension only."""
    (problem,) = audit(Rules([("kernel", P("fsdp", ("data", "fsdp")))]), {"kernel": (4, 4)})
    assert "uses the axis 'fsdp' twice" in problem


def test_an_indivisible_dimension_shows_the_arithmetic():
    """JAX would drop such a constraint without a word."""
    (problem,) = audit(Rules([("kernel", P(("data", "fsdp"), "tensor"))]), {"kernel": (6, 4)})
    assert "dimension 0 of (6, 4)" in problem
    assert "6 / (data=2 × fsdp=2) = 1.5" in problem


def test_all_problems_come_at_once():
    """Seven defects in one table and model are seven problems."""
    rules = Rules(
        [
            ("a/kernel", P("fsdp")),
            ("a/kernel", P("tensor")),  # shadowed
            ("never", P("fsdp")),  # matches nothing
            ("b/kernel", P("nope")),  # unknown axis
            ("c/kernel", P("tensor", "tensor")),  # twice
            ("d/kernel", P("fsdp", "tensor")),  # rank
            ("e/kernel", P("fsdp")),  # indivisible
        ]
    )
    shapes = {f"{x}/kernel": (4, 4) for x in "abc"} | {
        "d/kernel": (4,),
        "e/kernel": (3,),
        "unmatched": (4,),
    }
    assert len(audit(rules, shapes)) == 7


def test_a_clean_table_has_no_problems():
    """The audit can pass."""
    assert audit(Rules([("kernel", P("fsdp", "tensor"))]), {"layers/kernel": (3, 4, 4)}) == []


@pytest.mark.parametrize(
    ("params", "complaint"),
    [
        ([(".*", P("fsdp"))], "there is no catch-all rule"),
        ([(".+|x", P("fsdp"))], "there is no catch-all rule"),
        ([("(", P("fsdp"))], "is not a regular expression"),
        ([("kernel", "fsdp")], "a PartitionSpec, or replicate"),
        ([("kernel", P())], "replicates silently"),
        ([("kernel", P(None, None))], "replicates silently"),
    ],
)
def test_a_table_that_cannot_be_meant_is_refused(params, complaint):
    """Catch-alls, bad patterns, bad values and silent replication never become a table."""
    with pytest.raises(RuleError, match=complaint):
        Rules(params)


def test_replication_needs_a_reason():
    """`replicate("")` is as silent as P()."""
    with pytest.raises(RuleError, match="has no reason"):
        replicate("  ")


def test_tables_compare_and_hash_by_value():
    """Two tables written alike are one key of every cache."""

    def make():
        return Rules(
            [("kernel", P("fsdp"))], activations=[("h", P("data"))], stacked={"layers": "pipe"}
        )

    assert make() == make()
    assert hash(make()) == hash(make())


EMBED_AND_HEAD = (("embed/embedding", "head/embedding"),)


def test_a_tied_array_with_two_specs_is_a_problem_that_names_both():
    """One array has one placement, whichever of its paths a rule was written for."""
    rules = Rules([("embed/embedding", P("fsdp")), ("head/embedding", P("tensor"))])
    (problem,) = rules.audit({"embed/embedding": (4, 4)}, AXES, tied=EMBED_AND_HEAD)
    assert str(problem) == (
        "embed/embedding = head/embedding: is one array and gets 2 specs\n"
        "    embed/embedding: rule 0 ('embed/embedding') says P(fsdp); "
        "head/embedding: rule 1 ('head/embedding') says P(tensor)\n"
        "    fix: give its paths one spec"
    )


@pytest.mark.parametrize("head", [P("fsdp"), P("fsdp", None), P(("fsdp",))])
def test_a_tied_array_with_one_placement_is_fine_however_it_is_written(head):
    """A rule for another path of a tied array is not useless, and trailing Nones split nothing."""
    rules = Rules([("embed/embedding", P("fsdp")), ("head/embedding", head)])
    assert rules.audit({"embed/embedding": (4, 4)}, AXES, tied=EMBED_AND_HEAD) == []
    (problem,) = audit(rules, {"embed/embedding": (4, 4)})
    assert "rule 1 ('head/embedding'): matches no parameter" in problem


def test_a_rule_for_an_alias_alone_leaves_the_parameter_unmatched():
    """Parameters go by their first path, and the rule must be found from there."""
    rules = Rules([("head/embedding", P("fsdp"))])
    (problem,) = rules.audit({"embed/embedding": (4, 4)}, AXES, tied=EMBED_AND_HEAD)
    what = "no rule matches this parameter, and rule 0 ('head/embedding') its other path head/embedding"
    assert str(problem) == f"embed/embedding: {what}\n    fix: write the rule for embed/embedding"


def test_a_rule_that_is_shadowed_on_an_alias_is_a_problem():
    """An alias shows who takes it."""
    rules = Rules([("embedding", P("fsdp")), ("head/embedding", P("fsdp"))])
    (problem,) = rules.audit({"embed/embedding": (4, 4)}, AXES, tied=EMBED_AND_HEAD)
    assert "is shadowed by rule 0 ('embedding')" in str(problem)
    assert "e.g. head/embedding" in str(problem)


def test_a_spec_for_a_leaf_that_is_gone_names_what_is_left():
    """A transformation that merges or removes a parameter leaves its rule behind."""
    rules = Rules([("q_proj/kernel", P("fsdp")), ("q_proj/lora_a", P("tensor"))])
    (problem,) = audit(rules, {"layers/q_proj/kernel": (1, 4, 4)})
    assert problem == (
        "rule 1 ('q_proj/lora_a'): matches no parameter\n"
        "    fix: the nearest parameter is layers/q_proj/kernel; correct it or delete it"
    )


def test_a_stack_may_be_whole():
    """`None` gives the stacked dimension an entry and no axis."""
    rules = Rules([("kernel", P("fsdp"))], stacked={"layers": None})
    assert rules.match("layers/kernel").spec == P(None, "fsdp")
    assert audit(rules, {"layers/kernel": (3, 4)}) == []


class Head(nnx.Module):
    """Two lists of another meaning than layers of a stack, beside three layers that are a stack, unrolled."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.mlp = nnx.Sequential(
            nnx.Linear(8, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 8, rngs=rngs)
        )
        self.heads = nnx.List([nnx.Linear(8, 4, use_bias=False, rngs=rngs) for _ in range(2)])
        self.layers = nnx.List(
            [nnx.Sequential(nnx.Linear(8, 8, use_bias=False, rngs=rngs)) for _ in range(3)]
        )


def test_fixes_followed_literally_shard_numbered_modules_that_are_no_layers() -> None:
    """Modules of other shapes are named with their numbers, so that each can have its own spec."""
    model = spmd.from_nnx(Head)
    shapes = {
        path: leaf.shape
        for path, leaf in flatten(jax.eval_shape(model.init, jax.random.key(0))).items()
    }
    named = [
        re.search(r'add \("(.+?)", P', problem.fix) for problem in Rules([]).audit(shapes, AXES)
    ]
    patterns = dict.fromkeys(match[1] for match in named if match)
    assert {
        "mlp/layers/0/kernel",
        "mlp/layers/2/kernel",
        "layers/layers/kernel",
        "heads/0/kernel",
    } <= patterns.keys()
    specs = {"mlp/layers/0/kernel": P("fsdp", "tensor"), "mlp/layers/2/kernel": P("tensor", "fsdp")}
    rules = Rules([(pattern, specs.get(pattern, P("fsdp"))) for pattern in patterns])
    assert rules.audit(shapes, AXES) == []
    assert rules.match("mlp/layers/0/kernel").spec == P("fsdp", "tensor")
    assert rules.match("mlp/layers/2/kernel").spec == P("tensor", "fsdp")
    assert rules.match("layers/2/layers/0/kernel").spec == P("fsdp")


def test_a_path_with_its_number_is_a_rule() -> None:
    """One module of a list may have its own spec before that of all."""
    rules = Rules([("layers/0/kernel", P("fsdp")), ("layers/kernel", P("tensor"))])
    assert rules.match("layers/0/kernel").spec == P("fsdp")
    assert rules.match("layers/1/kernel").spec == P("tensor")
    shadowed = Rules([("layers/kernel", P("tensor")), ("layers/0/kernel", P("fsdp"))])
    assert "is shadowed by rule 0" in str(shadowed.audit({"layers/0/kernel": (8,)}, AXES)[0])


def test_the_dimension_of_a_stack_is_where_its_axis_goes() -> None:
    """Short specs are filled up, and inner stacks are shifted by outer ones."""
    rules = Rules(
        [("w", P("fsdp")), ("b", replicate("small"))],
        stacked={"layers": Stack("pipe", 2), "experts": "expert"},
    )
    assert rules.match("layers/w").spec == P("fsdp", None, "pipe")
    assert rules.match("layers/b").spec == P(None, None, "pipe")
    assert rules.match("layers/experts/w").spec == P("expert", "fsdp", "pipe")
    assert Rules([], stacked={"layers": Stack("pipe")}) == Rules([], stacked={"layers": "pipe"})
    with pytest.raises(RuleError, match="is along dimension -1"):
        Stack("pipe", dim=-1)


def test_a_stack_may_be_named_by_several_components() -> None:
    """T5X calls the stack as the module around it."""
    rules = Rules([("w", P("fsdp"))], stacked={"encoder/encoder": None})
    assert rules.match("encoder/encoder/w").spec == P(None, "fsdp")
    assert rules.match("encoder/norm/w").spec == P("fsdp")
    assert rules.layer_path("encoder/encoder/3/w") == ("encoder/encoder/w", ())
    assert rules.layer_path("encoder/3/w") == ("encoder/3/w", ())


@pytest.mark.parametrize("pattern", ["(a|aa)+b", "(a|aa)+(?<!c)b"])
def test_a_pattern_that_backtracks_for_ever_is_named(pattern, monkeypatch):
    """After a time limit, also when it looks around, and in any thread."""
    monkeypatch.setattr(patterns, "MATCH_SECONDS", 0.2)
    table, path = Rules([(pattern, P("fsdp"))]), "layers/" + "a" * 200
    began = time.monotonic()
    with (
        ThreadPoolExecutor() as threads,
        pytest.raises(RuleError, match="takes more than") as caught,
    ):
        threads.submit(table.match, path).result()
    assert time.monotonic() - began < 5
    assert pattern in caught.value.problems[0].where
    with pytest.raises(RuleError, match="takes more than"):
        spmd.rules_from_search(
            [(pattern, P("fsdp"))], {path: jax.ShapeDtypeStruct((8,), "float32")}
        )


@pytest.mark.parametrize(
    "pattern", ["(?<!q_)(ab)+(?=/kernel).*", "((a+)+)+b?/kernel", "abab/(?!bias)kernel"]
)
def test_lookarounds_and_repeated_groups_match(pattern):
    """Patterns that can be matched at once are."""
    assert compile_pattern(pattern).fullmatch("x/abab/kernel") or compile_pattern(
        pattern
    ).fullmatch("x/aaa/kernel")
