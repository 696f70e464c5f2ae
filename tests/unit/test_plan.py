"""A plan resolves every decision on abstract shapes, prints as one line per leaf, and refuses what does not fit."""

import dataclasses
import json
import math
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from spmd.errors import ConfigError, RuleError
from spmd.model_interface.model import Model
from spmd.optim.per_layer import per_layer
from spmd.partition_rules.llama import LLAMA, LLAMA_TIED
from spmd.plan.communication import reductions
from spmd.plan.plan import make_plan
from spmd.sharding.mesh import MeshShape, abstract_mesh, make_mesh
from spmd.sharding.rules import Rules, replicate
from tests import tiny

GOLDEN = Path(__file__).parent / "golden"


def two_layer(_key):
    return {
        "up": {"kernel": jnp.zeros((16, 32))},
        "down": {"kernel": jnp.zeros((32, 16))},
        "scale": jnp.zeros(16),
    }


RULES = Rules(
    [
        ("up/kernel", P("fsdp", "tensor")),
        ("down/kernel", P("tensor", "fsdp")),
        ("scale", replicate("64 bytes")),
    ]
)


def apply(params):
    return params


def plan_of(optimizer=None, rules=RULES, init=two_layer, mesh=None, **options):
    mesh = mesh or abstract_mesh(MeshShape(data=2, fsdp=2, tensor=2))
    return make_plan(mesh, rules, Model(init, apply), optimizer or optax.adamw(1e-3), **options)


FAMILIES = {
    "llama": tiny.CONFIG,
    "llama_tied": tiny.replaced(tied=True),
    "llama_unrolled": tiny.replaced(stacked=False),
}
STRATEGIES = {
    "ddp": ({"data": 8}, 0),
    "zero1": ({"fsdp": 8}, 1),
    "zero2": ({"fsdp": 8}, 2),
    "zero3": ({"fsdp": 8}, 3),
    "hybrid": ({"data": 2, "fsdp": 4}, 3),
    "tensor": ({"data": 4, "tensor": 2}, 0),
    "fsdp_tensor": ({"data": 2, "fsdp": 2, "tensor": 2}, 3),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_of_a_plan_is_as_reviewed(family, strategy):
    """A change of any sharding shows as a changed line of a golden file (SPMD_UPDATE_GOLDEN=1 rewrites them)."""
    sizes, zero = STRATEGIES[strategy]
    config = FAMILIES[family]
    rules = LLAMA_TIED if config.tied else LLAMA
    plan = make_plan(
        abstract_mesh(MeshShape(**sizes)), rules, tiny.model(config), tiny.OPTIMIZER, zero=zero
    )
    text = plan.text("params", "variables", "gradients", "optimizer_state") + "\n"
    golden = GOLDEN / f"{family}_{strategy}.txt"
    if os.environ.get("SPMD_UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_equal_lines_of_unrolled_layers_are_one():
    """Those of consecutive layers in everything else equal, and the bytes still add up; JSON and `text` have each."""
    shapes = {
        f"blocks_{i}/mlp/{j}/kernel": (16, 8 + 8 * (i == 11)) for i in range(24) for j in (1, 3)
    }
    shapes |= {"out/1/kernel": (16, 8), "out/3/kernel": (16, 8)}

    def init(key):
        return {path: jnp.zeros(shape) for path, shape in shapes.items()}

    rules = Rules([("kernel", P("fsdp"))])
    plan = plan_of(optax.sgd(1.0), rules, init, abstract_mesh(MeshShape(fsdp=8)))
    lines = [line.split("  ")[0] for line in str(plan).split("\n")[1:-1]]
    assert lines == [
        *("blocks_{0…10}/mlp/1/kernel", "blocks_{0…10}/mlp/3/kernel"),
        *("blocks_11/mlp/1/kernel", "blocks_11/mlp/3/kernel"),
        *("blocks_{12…23}/mlp/1/kernel", "blocks_{12…23}/mlp/3/kernel"),
        *("out/1/kernel", "out/3/kernel"),
    ]
    assert "11 × 64 B = 704 B" in str(plan)
    total = 0
    for line in str(plan).split("\n")[1:-1]:
        cell = re.search(r"(?:= |  )(\d+) B  ", line)
        total += int(cell[1])
    assert total == plan.bytes_per_device()["params"]
    assert "blocks_{0…10}/mlp/1/kernel" in plan._repr_html_()
    assert len(plan.to_json()["params"]) == plan.text("params").count(" float32[") == len(shapes)


@pytest.mark.parametrize(
    ("stage", "params", "gradients", "optimizer"),
    [(0, 1, 1, 1), (1, 1, 1, 8), (2, 1, 8, 8), (3, 8, 8, 8)],
)
def test_zero_stages_split_what_they_say(stage, params, gradients, optimizer):
    """Stage 1 splits optimizer state over fsdp, stage 2 gradients too, stage 3 parameters too."""
    init = lambda key: {"kernel": jnp.zeros((64, 64))}  # noqa: E731
    rules = Rules([("kernel", P("fsdp"))])
    plan = plan_of(
        optax.sgd(1.0, momentum=0.9), rules, init, abstract_mesh(MeshShape(fsdp=8)), zero=stage
    )
    whole = 64 * 64 * 4
    assert plan.bytes_per_device() == {
        "params": whole // params,
        "gradients": whole // gradients,
        "optimizer_state": whole // optimizer,
    }


def test_optimizer_state_follows_the_parameters():
    """Moments take the parameter's spec, counters are replicated."""
    leaves = {leaf.path: leaf for leaf in plan_of(optax.adamw(1e-3)).optimizer_state}
    assert leaves["0/mu/up/kernel"].spec == P("fsdp", "tensor")
    assert leaves["0/nu/down/kernel"].spec == P("tensor", "fsdp")
    assert leaves["0/count"].spec == P()


def test_factored_statistics_keep_the_entries_of_their_dimensions():
    """Adafactor's row and column statistics follow the dimension they kept, in square matrices too."""

    def init(key):
        return {"wide": jnp.zeros((128, 256)), "square": jnp.zeros((128, 128))}

    rules = Rules([("wide|square", P("fsdp", "tensor"))])
    leaves = {
        leaf.path: leaf for leaf in plan_of(optax.adafactor(1e-3), rules, init).optimizer_state
    }
    rows = {path.rsplit("/", 1)[1]: leaf for path, leaf in leaves.items() if "v_row" in path}
    cols = {path.rsplit("/", 1)[1]: leaf for path, leaf in leaves.items() if "v_col" in path}
    assert (rows["wide"].shape, rows["wide"].spec) == ((128,), P("fsdp"))
    assert (cols["wide"].shape, cols["wide"].spec) == ((256,), P("tensor"))
    assert (rows["square"].spec, cols["square"].spec) == (P("fsdp"), P("tensor"))


def test_factored_statistics_of_stacked_layers_keep_the_layer_dimension():
    """Under `per_layer` the leading dimension of a statistic is the stack's."""

    def init(key):
        return {"layers": {"kernel": jnp.zeros((4, 128, 128))}, "head": jnp.zeros((128, 256))}

    rules = Rules([("kernel|head", P("fsdp", "tensor"))])
    optimizer = per_layer(optax.scale_by_factored_rms())
    leaves = {leaf.path: leaf for leaf in plan_of(optimizer, rules, init).optimizer_state}
    row = next(leaf for path, leaf in leaves.items() if "v_row" in path and "layers/kernel" in path)
    col = next(leaf for path, leaf in leaves.items() if "v_col" in path and "layers/kernel" in path)
    assert (row.shape, row.spec) == ((4, 128), P("pipe", "fsdp"))
    assert (col.shape, col.spec) == ((4, 128), P("pipe", "tensor"))


@pytest.mark.parametrize(
    "optimizer",
    [
        per_layer(optax.scale_by_factored_rms()),  # its stacked part is empty here
        optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
        optax.masked(optax.adam(1e-3), lambda params: jax.tree.map(lambda _: False, params)),
    ],
    ids=["per_layer", "inject_hyperparams", "all masked"],
)
def test_parts_of_the_state_may_be_empty(optimizer):
    """An optimizer that has nothing to say of some parameters is no problem."""
    assert plan_of(optimizer).bytes_per_device()["params"] > 0


def test_state_that_no_parameter_explains_is_an_error():
    """An optimizer with a matrix of its own cannot be split by rule."""
    odd = optax.GradientTransformation(
        lambda params: jnp.zeros((300, 500)), lambda u, s, p=None: (u, s)
    )
    with pytest.raises(RuleError, match="has a structure that no parameter explains"):
        plan_of(odd)


def test_all_problems_of_a_table_are_in_one_error():
    """An unmatched parameter, a useless rule and an indivisible dimension come together."""
    rules = Rules(
        [
            ("up/kernel", P(None, ("data", "fsdp", "tensor"))),
            ("down/kernel", P("fsdp")),
            ("biases", P("fsdp")),
        ]
    )

    def init(key):
        return {
            "up": {"kernel": jnp.zeros((4, 6))},
            "down": {"kernel": jnp.zeros((4, 4))},
            "x": jnp.zeros(1),
        }

    with pytest.raises(RuleError) as caught:
        plan_of(rules=rules, init=init)
    assert [problem.where for problem in caught.value.problems] == [
        "rule 2 ('biases')",
        "up/kernel",
        "x",
    ]


def test_remat_names_must_be_activations():
    """A policy that saves what the table never marks is an error."""
    with pytest.raises(RuleError, match="remat save:attention_ouch"):
        tiny.plan(options=(("remat", "save:attention_ouch"),))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"zero": 4}, ConfigError),
        ({"precision": "float15"}, ConfigError),
        ({"offload": ("optimiser_state",)}, ConfigError),
        ({"remat": "ful"}, ConfigError),
        ({"remat": "save"}, ConfigError),
    ],
)
def test_options_that_cannot_be_used_are_refused(options, error):
    """Unknown values are errors that say what there is."""
    with pytest.raises(error):
        plan_of(**options)


def test_diff_shows_the_lines_that_changed_and_only_those():
    """Two plans that differ in one rule differ in that rule's lines."""
    other = dataclasses.replace(RULES, params=(("up/kernel", P("fsdp")), *RULES.params[1:]))
    assert plan_of().diff(plan_of()) == ""
    lines = [line for line in plan_of().diff(plan_of(rules=other)).split("\n") if "kernel" in line]
    assert [line[0] for line in lines] == ["-", "+"] * 4  # parameter, gradient and two moments
    assert all("up/kernel" in line for line in lines)
    assert "zero=1" in plan_of(zero=1).diff(plan_of(zero=2)), "gradients are compared too"


def test_equal_plans_compare_and_hash_equal():
    """A plan made again is the same key of every cache; another ZeRO stage is not."""
    optimizer = optax.adamw(1e-3)
    assert plan_of(optimizer) == plan_of(optimizer)
    assert hash(plan_of(optimizer)) == hash(plan_of(optimizer))
    assert plan_of(optimizer) != plan_of(optimizer, zero=2)


def test_a_plan_for_absent_devices_equals_the_one_for_present_ones():
    """No decision depends on devices."""
    present = plan_of(mesh=make_mesh(data=2, fsdp=2, tensor=2))
    assert str(present) == str(plan_of())
    assert json.dumps(present.to_json()) == json.dumps(plan_of().to_json())


def test_an_optimizer_that_mixes_layers_is_refused():
    """On stacks it would train other than on separate layers; in `per_layer` it is welcome."""
    lamb = optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(1e-3))
    with pytest.raises(RuleError, match="over all layers of the stack"):
        tiny.plan(optimizer=lamb)
    assert tiny.plan(
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), per_layer(optax.lamb(1e-3)))
    ).params


def test_random_state_of_an_optimizer_is_replicated():
    """Typed keys have bytes too, and noise on parameters that are not stacked is the same on every device."""
    leaves = {
        leaf.path: leaf
        for leaf in plan_of(optax.noisy_sgd(1e-3, key=jax.random.key(0))).optimizer_state
    }
    keys = [leaf for leaf in leaves.values() if leaf.rule == "a random key"]
    assert [leaf.bytes_per_device for leaf in keys] == [8]


def test_the_difference_of_large_plans_is_found_at_once():
    """Every line of a thousand differs, and it does not take a thousand squared."""

    def many(key):
        return {f"layer{i}": {"kernel": jnp.zeros((16, 16))} for i in range(1000)}

    ours, theirs = (
        plan_of(rules=Rules([("kernel", spec)]), init=many) for spec in (P("fsdp"), P("tensor"))
    )
    assert len(ours.diff(theirs).split("\n")) >= 4 * 1000


def test_problems_of_the_table_and_of_the_optimizer_come_together():
    """A parameter without a rule and state of unknown structure are one error."""
    odd = optax.GradientTransformation(
        lambda params: jnp.zeros((300, 500)), lambda u, s, p=None: (u, s)
    )
    with pytest.raises(RuleError) as caught:
        plan_of(odd, rules=Rules(RULES.params[:2]))
    assert [problem.where for problem in caught.value.problems] == ["optimizer state ", "scale"]


def with_rows(**rows):
    """The table of Llama with other specs of rows, by the last word of their pattern's module."""
    params = []
    for pattern, spec in LLAMA.params:
        for name, other in rows.items():
            if name in pattern:
                spec = other
        params.append((pattern, spec))
    return dataclasses.replace(LLAMA, params=params)


@pytest.mark.parametrize(
    ("spec", "sizes", "kept"),
    [
        (P("data", "tensor"), {"data": 2}, "data"),
        (P(("data", "fsdp"), "tensor"), {"data": 2, "fsdp": 2}, "data"),
        (P("expert", "tensor"), {"expert": 2, "fsdp": 2}, "expert"),
    ],
)
def test_a_split_that_outlives_the_use_of_a_matrix_is_refused(spec, sizes, kept):
    """A product of some rows of a kernel and some examples would be gathered by XLA, without a word."""
    mesh = abstract_mesh(MeshShape(**sizes))
    rules = with_rows(down_proj=spec)
    with pytest.raises(RuleError) as caught:
        make_plan(mesh, rules, tiny.model(), tiny.OPTIMIZER)
    (problem,) = caught.value.problems
    assert f"split over {kept} in its product" in problem.what
    assert "fsdp" in problem.fix


@pytest.mark.parametrize(
    "spec",
    [
        P(("fsdp", "expert"), "tensor"),
        P("sequence", "tensor"),
        P(("fsdp", "sequence"), "tensor"),
        P("tensor", "fsdp"),
    ],
)
def test_a_split_that_is_gathered_is_taken(spec):
    """The controls of the test above: also over an axis of size 1, nothing is left of a split over examples."""
    mesh = abstract_mesh(MeshShape(fsdp=2, expert=2, sequence=2, tensor=2))
    rules = with_rows(down_proj=spec, up=P(("fsdp", "expert"), "tensor"))
    plan = make_plan(mesh, rules, tiny.model(), tiny.OPTIMIZER)
    placed = plan.placements["layers/mlp/down_proj/kernel"]
    axes = {axis for entry in placed.compute_spec for axis in (entry or ())}
    assert axes.isdisjoint({"fsdp", "expert", "sequence"})
    assert make_plan(
        abstract_mesh(MeshShape(fsdp=2)),
        with_rows(down_proj=P("data", "tensor")),
        tiny.model(),
        tiny.OPTIMIZER,
    )


def test_state_that_is_whole_says_over_which_axes():
    """ZeRO 1 keeps parameters whole over both axes of their gathers."""
    mesh = abstract_mesh(MeshShape(fsdp=2, sequence=2))
    plan = make_plan(mesh, LLAMA, tiny.model(), tiny.OPTIMIZER, zero=1)
    (entry,) = [entry for entry in plan.params if entry.path == "layers/mlp/up_proj/kernel"]
    assert entry.reason == "zero=1: whole over fsdp+sequence"


def test_what_is_scattered_is_not_sent_again():
    """A gradient goes over fsdp whole, and the part that is left of it over the sequence."""
    mesh = abstract_mesh(MeshShape(fsdp=4, sequence=2))
    plan = make_plan(mesh, LLAMA, tiny.model(), tiny.OPTIMIZER)
    path = "layers/mlp/up_proj/kernel"
    (entry,) = [entry for entry in plan.params if entry.path == path]
    sent = {each.axes: each.elements for each in reductions(plan) if each.path == path}
    count = math.prod(entry.shape)
    assert sent == {("fsdp",): count, ("sequence",): count // 4}
