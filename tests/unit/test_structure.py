"""Structure of parameters: matrices, what layers add, and stacks, read from modules and never from names."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import AnnotationError, ConfigError, RuleError
from spmd.model_interface.kernels import Matrix
from spmd.models import gemma, gpt2, llama, mistral, mixtral, qwen, transformer, vit
from spmd.sharding.layer_paths import Stack, audit_recorded
from spmd.sharding.mesh import MeshShape, abstract_mesh
from spmd.sharding.rules import matches

NNX = {
    "Linear": (lambda rngs: nnx.Linear(4, 6, rngs=rngs), {"kernel": "io"}, {"bias"}),
    "LinearGeneral": (
        lambda rngs: nnx.LinearGeneral(4, (2, 3), rngs=rngs),
        {"kernel": "ioo"},
        {"bias"},
    ),
    "LinearGeneral with a batch": (
        lambda rngs: nnx.LinearGeneral((4, 5), 6, axis=(1, 2), batch_axis={0: 3}, rngs=rngs),
        {"kernel": "biio"},
        {"bias"},
    ),
    "Einsum of experts": (
        lambda rngs: nnx.Einsum("etd,edf->etf", (3, 4, 6), (3, 1, 6), rngs=rngs),
        {"kernel": "bio"},
        {"bias"},
    ),
    "Conv": (lambda rngs: nnx.Conv(4, 6, (3, 3), rngs=rngs), {"kernel": "iiio"}, {"bias"}),
    "ConvTranspose": (
        lambda rngs: nnx.ConvTranspose(4, 6, (3,), transpose_kernel=True, rngs=rngs),
        {"kernel": "ioi"},
        {"bias"},
    ),
    "attention": (
        lambda rngs: nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs),
        {
            **dict.fromkeys(("query/kernel", "key/kernel", "value/kernel"), "ioo"),
            "out/kernel": "iio",
        },
        {"query/bias", "key/bias", "value/bias", "out/bias"},
    ),
    "LoRALinear": (
        lambda rngs: nnx.LoRALinear(4, 6, lora_rank=2, rngs=rngs),
        {"kernel": "io", "lora/lora_a": "io", "lora/lora_b": "io"},
        {"bias"},
    ),
    "Embed": (lambda rngs: nnx.Embed(8, 4, rngs=rngs), {}, set()),
    "LayerNorm": (lambda rngs: nnx.LayerNorm(4, rngs=rngs), {}, {"scale", "bias"}),
    "GroupNorm": (lambda rngs: nnx.GroupNorm(4, num_groups=2, rngs=rngs), {}, {"scale", "bias"}),
}

LINEN = {
    "Dense": (nn.Dense(6), {"kernel": "io"}, {"bias"}),
    "DenseGeneral": (nn.DenseGeneral((2, 3)), {"kernel": "ioo"}, {"bias"}),
    "DenseGeneral with a batch": (
        nn.DenseGeneral(6, axis=-1, batch_dims=(0,)),
        {"kernel": "bio"},
        {"bias"},
    ),
    "Einsum": (nn.Einsum((4, 2, 3), "btd,dhk->bthk"), {"kernel": "ioo"}, {"bias"}),
    "Conv": (nn.Conv(6, (3,)), {"kernel": "iio"}, {"bias"}),
    "ConvLocal": (nn.ConvLocal(6, (3,)), {"kernel": "bio"}, {"bias"}),
    "ConvTranspose": (nn.ConvTranspose(6, (3,)), {"kernel": "iio"}, {"bias"}),
    "attention": (
        nn.MultiHeadDotProductAttention(2),
        {
            **dict.fromkeys(("query/kernel", "key/kernel", "value/kernel"), "ioo"),
            "out/kernel": "iio",
        },
        {"query/bias", "key/bias", "value/bias", "out/bias"},
    ),
    "LayerNorm of two dimensions": (nn.LayerNorm(feature_axes=(1, 2)), {}, {"scale", "bias"}),
    "BatchNorm": (nn.BatchNorm(use_running_average=True), {}, {"scale", "bias"}),
}

INPUT = jax.ShapeDtypeStruct((2, 5, 4), "float32")


@pytest.mark.parametrize("name", [*NNX, *(f"linen {name}" for name in LINEN)])
def test_a_layer_of_flax_says_what_its_parameters_are(name):
    """Kernels with their inputs and outputs, and what the layer adds; a lookup is no matrix."""
    linen = name.removeprefix("linen ")
    module, matrices, added = LINEN[linen] if linen != name else NNX[name]
    info = (spmd.from_linen(module, INPUT) if linen != name else spmd.from_nnx(module)).info()
    assert info.matrices == {path: Matrix.of(dims) for path, dims in matrices.items()}
    assert info.added == added
    assert info.stacks == {}
    assert info.created == {}


MODULES = {
    m.__name__.rpartition(".")[2]: m
    for m in (gemma, gpt2, llama, mistral, mixtral, qwen, transformer, vit)
}
FAMILIES = [
    pytest.param(family, name, marks=() if name.startswith("test") else pytest.mark.soak)
    for family, module in MODULES.items()
    for name in module.PRESETS
]


@pytest.mark.parametrize(("family", "preset"), FAMILIES)
def test_the_parameters_of_our_families_that_decay_are_those_of_the_old_names(family, preset):
    """Until names were no longer read, norms and biases were found by them; every kernel has its dimensions."""
    model = spmd.from_nnx(MODULES[family].PRESETS[preset].build)
    info, shapes = model.info(), _shapes(model)
    by_name = {
        p
        for p in shapes
        if not any(matches(n, p, ["layers"]) for n in ("[^/]*norm[^/]*/[^/]+", "bias"))
    }
    for known in (model, None):
        optimizer = spmd.make_optimizer(spmd.OptimizerConfig(), 1, info.stacks, model=known)
        assert {
            path for path, shape in shapes.items() if optimizer.treatment.decays(path, len(shape))
        } == by_name
    muon = spmd.make_optimizer(spmd.OptimizerConfig(name="muon"), 1, model=model)
    assert muon.treatment.problems(shapes) == []
    said = muon.treatment.describe(shapes)
    assert said["embed/embedding" if "embed/embedding" in said else "positions"].startswith(
        "adamw, lookup"
    )


def _shapes(model):
    return {
        path: x.shape
        for path, x in spmd.tree.flatten(jax.eval_shape(model.init, jax.random.key(0))).items()
    }


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.square = nnx.Linear(4, 4, rngs=rngs)


class Raw(nnx.Module):
    """A layer without any of Flax's: draws, constants, and experts that one map draws."""

    def __init__(self, rngs):
        self.gain = nnx.Param(jnp.ones(4))
        self.weight = nnx.Param(nnx.initializers.normal()(rngs.params(), (4, 4)))
        draw = jax.vmap(lambda key: jax.random.normal(key, (4, 5)))
        self.experts = nnx.Param(draw(jax.random.split(rngs.params(), 3)))


def stack(layer, count, axis=0):
    """As Flax's guides stack layers."""

    def make(rngs):
        @nnx.split_rngs(splits=count)
        @nnx.vmap(in_axes=0, out_axes=axis)
        def create(rngs):
            return layer(rngs)

        return create(rngs)

    return make


class Net(nnx.Module):
    def __init__(self, rngs, **parts):
        self.embed = nnx.Embed(8, 4, rngs=rngs)
        for name, make in parts.items():
            setattr(self, name, make(rngs))
        self.head = nnx.Linear(4, 8, use_bias=False, rngs=rngs)


def net(**parts):
    return spmd.from_nnx(lambda rngs: Net(rngs, **parts))


def nested(rngs):
    module = Raw(rngs)
    module.inner = stack(Attention, 2)(rngs)
    return module


def split_and_merged(rngs):
    """A stack by `jax.vmap` alone, as functional code makes it."""
    graph = nnx.split(nnx.eval_shape(lambda: Raw(nnx.Rngs(0))))[0]
    keys = jax.random.split(rngs.params(), 5)
    return nnx.merge(graph, jax.vmap(lambda key: nnx.state(Raw(nnx.Rngs(key))))(keys))


STACKS = {
    "vmap": ({"blocks": stack(Attention, 3)}, {"blocks": Stack("pipe")}),
    "any name": (
        {"h": stack(Attention, 3), "tower": stack(Attention, 5)},
        {"h": Stack("pipe"), "tower": Stack("pipe")},
    ),
    "along dimension 1": (
        {"blocks": stack(Attention, 3, axis=1)},
        {"blocks": Stack("pipe", dim=1)},
    ),
    "no layer of Flax": ({"blocks": stack(Raw, 5)}, {"blocks": Stack("pipe")}),
    "jax.vmap": ({"blocks": split_and_merged}, {"blocks": Stack("pipe")}),
    "nested": (
        {"blocks": stack(nested, 6)},
        {"blocks": Stack("pipe"), "blocks/inner": Stack(None)},
    ),
    "control: square layers and attention": ({"layers": Attention, "blocks": Raw}, {}),
    "control: a list": ({"layers": lambda rngs: nnx.List([Attention(rngs) for _ in range(4)])}, {}),
}


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_is_where_arrays_have_more_dimensions_than_they_were_created_with(name):
    """Under any name; a map inside of a layer, a square kernel and a list are none."""
    parts, expected = STACKS[name]
    assert net(**parts).info().stacks == expected


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        x = nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        gain = self.param("gain", nn.initializers.ones, (4, 4))
        return nn.Dense(4)(x @ gain), None


class LinenNet(nn.Module):
    dim: int = 0

    @nn.compact
    def __call__(self, x):
        options = {"variable_axes": {"params": self.dim}, "split_rngs": {"params": True}}
        x, _ = nn.scan(nn.remat(LinenLayer), length=4, **options)()(x, None)
        x, _ = nn.vmap(LinenLayer, in_axes=(None, None), axis_size=3, **options)(name="heads")(
            x, None
        )
        return LinenLayer(name="layers")(x[0])[0]


@pytest.mark.parametrize("dim", [0, 1])
def test_linen_records_what_scan_and_vmap_add(dim):
    """The layers see their own shapes inside, though a stack may be as long as they are wide."""
    info = spmd.from_linen(LinenNet(dim), INPUT).info()
    assert info.stacks == dict.fromkeys(
        ("ScanCheckpointLinenLayer_0", "heads"), Stack("pipe", dim)
    ), info.stacks


def table(**options):
    rows = [
        ("embedding", P("fsdp")),
        ("head/kernel", P(None, "fsdp")),
        ("weight", P("fsdp", "tensor")),
    ]
    return spmd.Rules([*rows, ("gain|experts", spmd.replicate("small"))], **options)


def plan(model, rules, optimizer=None):
    optimizer = optax.adamw(1e-3) if optimizer is None else optimizer
    return spmd.make_plan(abstract_mesh(MeshShape(fsdp=2, tensor=2)), rules, model, optimizer)


def test_a_table_at_its_default_takes_the_recorded_stacks_and_another_one_must_name_them():
    """The rows are for one layer; the fix is code, which makes the plan."""
    model = net(h=stack(Raw, 5))
    default = plan(model, table())
    assert {entry.path: entry.spec for entry in default.params}["h/weight"] == P(
        "pipe", "fsdp", "tensor"
    )
    assert default.rules.stacks == {"h": Stack("pipe")}
    with pytest.raises(RuleError) as caught:
        plan(model, table(stacked={"layers": "pipe"}))
    (problem,) = (problem for problem in caught.value.problems if problem.where == "h")
    assert problem.fix == 'Rules(…, stacked={"h": "pipe"})'
    plan(model, table(stacked={"h": "pipe"}))
    (problem,) = audit_recorded(
        {"h/w": (4, 4, 4)}, {"h": Stack("pipe", dim=1)}, {"h": Stack("pipe")}, {"h/w": 2}
    )
    assert problem.what == "is stacked along dimension 0, and the table says another"


def test_an_optimizer_made_for_other_stacks_is_refused():
    """Without the model it takes scales of a stack for matrices, which would decay; a fix says what to do."""
    model, config = net(h=stack(Raw, 5)), spmd.OptimizerConfig()
    plan(model, table(), spmd.make_optimizer(config, 3, model=model))
    with pytest.raises(RuleError) as caught:
        plan(model, table(), spmd.make_optimizer(config, 3))
    (problem,) = (problem for problem in caught.value.problems if problem.where == "optimizer")
    assert problem.fix == "spmd.make_optimizer(config, steps, model=model)"


def test_a_stack_whose_arrays_differ_in_length_is_refused_with_all_others():
    """A layer beside its stack has no dimension of that size, and nothing is split along a wrong one."""

    class Uneven(nnx.Module):
        def __init__(self, rngs):
            self.weight = stack(Raw, 5)(rngs).weight
            self.gain = nnx.Param(jnp.ones((3, 4)))

    with pytest.raises(RuleError) as caught:
        plan(net(a=Uneven, b=Uneven), table())
    what = "was created with 2 dimensions and is stored as (5, 4, 4), and is in no stack"
    assert [problem.where for problem in caught.value.problems if problem.what == what] == [
        "a/weight",
        "b/weight",
    ]


def refused(model, **options):
    """Problems by place of a plan with Muon."""
    optimizer = spmd.make_optimizer(spmd.OptimizerConfig(name="muon"), 3, model=model, **options)
    with pytest.raises(RuleError) as caught:
        plan(model, table(), optimizer)
    return {problem.where: problem for problem in caught.value.problems}


def test_muon_asks_for_what_nobody_explains():
    """A kernel of three dimensions; the fix is code, and the plan then says who updates what."""
    model = net(blocks=stack(Raw, 5))
    (problem,) = refused(model).values()
    assert problem.where == "blocks/experts"
    assert problem.fix.startswith('matrices={"blocks/experts": ((0,), (1, 2))}')
    rows = {"blocks/experts": ((1,), (2,))}
    optimizer = spmd.make_optimizer(
        spmd.OptimizerConfig(name="muon"), 3, model=model, matrices=rows
    )
    updates = {entry.path: entry.update for entry in plan(model, table(), optimizer).params}
    assert updates == {
        "blocks/experts": "muon 3 of 4 × 5",
        "blocks/gain": "adamw, no decay",
        "blocks/weight": "muon 4 × 4",
        "embed/embedding": "adamw, lookup",
        "head/kernel": "adamw, logits",
    }


def test_contradictory_and_useless_rows_are_told_at_once():
    """Two explanations of one kernel, a dimension that it does not have, a row that matches nothing."""
    model = net(blocks=stack(Raw, 5))
    rows = {
        "experts": None,
        "blocks/experts": ((1,), (2,)),
        "head/kernel": ((1,), (0,)),
        "weight": ((0,), (2,)),
    }
    found = refused(model, matrices={**rows, "expert": None})
    assert set(found) == {"blocks/experts", "blocks/weight", "matrices['expert']"}
    with pytest.raises(ConfigError, match=r"matrices\['a'\]: is 3"):
        spmd.make_optimizer(spmd.OptimizerConfig(name="muon"), 3, model=model, matrices={"a": 3})
    with pytest.raises(ConfigError, match="matrices: is given, and adamw"):
        spmd.make_optimizer(spmd.OptimizerConfig(), 3, model=model, matrices={"weight": None})


def test_muon_without_a_matrix_or_without_a_model_is_refused():
    """It never trains a matrix by AdamW silently; rows in place of a model will do."""

    class Norms(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(4, rngs=rngs)

    config = spmd.OptimizerConfig(name="muon")
    model = spmd.from_nnx(Norms)
    with pytest.raises(ConfigError, match="no parameter is a matrix"):
        jax.eval_shape(
            lambda: spmd.make_optimizer(config, 3, model=model).init(model.init(jax.random.key(0)))
        )
    params = {
        "w": jax.ShapeDtypeStruct((4, 4), "float32"),
        "b": jax.ShapeDtypeStruct((4,), "float32"),
    }
    with pytest.raises(ConfigError, match=r"w: has 2 dimensions in a layer, and nobody says"):
        jax.eval_shape(spmd.make_optimizer(config, 3).init, params)
    jax.eval_shape(spmd.make_optimizer(config, 3, matrices={"w": ((0,), (1,))}).init, params)


def test_a_module_says_it_by_metadata():
    """Kernels, lookups, heads and gains of one's own; a word that is none is an error."""

    class Own(nnx.Module):
        def __init__(self, rngs, role="lookup"):
            self.kernel = nnx.Param(jnp.ones((2, 3, 4)), matrix="bio")
            self.table = nnx.Param(jnp.ones((8, 4)), role=role)
            self.gain = nnx.Param(jnp.ones((4, 4)), added=True)

    info = spmd.from_nnx(Own).info()
    assert (info.matrices, info.no_matrix, info.added) == (
        {"kernel": Matrix.of("bio")},
        {"table": "lookup"},
        frozenset({"gain"}),
    )
    with pytest.raises(AnnotationError, match='did you mean "lookup"'):
        spmd.from_nnx(lambda rngs: Own(rngs, role="lookups")).info()


def test_biases_of_any_rank_do_not_decay_and_kernels_of_any_rank_do():
    """The model knows a bias `[heads, head_dim]`; patterns of a user replace all that."""
    model = net(blocks=stack(Attention, 3))
    shapes = _shapes(model)

    def decayed(**fields):
        treatment = spmd.make_optimizer(spmd.OptimizerConfig(**fields), 3, model=model).treatment
        return {path for path, shape in shapes.items() if treatment.decays(path, len(shape))}

    assert decayed() == {path for path in shapes if path.endswith(("kernel", "embedding"))}
    assert decayed(no_decay=("kernel",)) == {path for path in shapes if not path.endswith("kernel")}
    assert decayed(weight_decay=0.0) == set()
