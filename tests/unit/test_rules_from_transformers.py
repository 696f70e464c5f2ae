"""Plans of transformers become tables that split each weight along the dimension that its style means."""

import importlib
import inspect
import pkgutil
import re
import warnings
from typing import Any

import jax
import optax
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import RuleError
from spmd.sharding.from_transformers import rules_from_transformers
from spmd.sharding.mesh import MeshShape, abstract_mesh
from spmd.sharding.rules import Replicate
from tests.parallel_plans import (
    ATTENTION,
    DENSE,
    EXPERT_PLAN,
    HIDDEN,
    LLAMA,
    MIXTRAL,
    QWEN3_MOE,
    WIDTH,
    PlanConfig,
    Port,
    moe_names,
    shapes_of,
)

MESH = abstract_mesh(MeshShape(fsdp=2, tensor=2, expert=2))
MOE = {"moe": True, "qk_norms": True}


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def read(config, params, lines=None, **kwargs):
    """The table, without its report or with it in `lines`."""
    report = (lambda text: None) if lines is None else lines.append
    return rules_from_transformers(config, params, report=report, **kwargs)


def one(style, *shape, name="layers.*.up", path="layers/0/up/kernel", **kwargs):
    """The value of the only row of a plan with one entry."""
    rules = read({"base_model_tp_plan": {name: style}}, {path: floats(*shape)}, **kwargs)
    ((_, value),) = rules.params
    return value


def problems_of(config, params, **kwargs):
    with pytest.raises(RuleError) as error:
        read(config, params, **kwargs)
    return str(error.value)


@pytest.mark.parametrize("bias", [False, True])
def test_each_module_of_llamas_plan_is_split_as_its_style_means(bias):
    """Columns of q, k, v, gate and up, rows of o and down; biases follow their outputs."""
    rules = read(LLAMA, shapes_of(bias=bias))
    columns, rows = P("fsdp", "tensor"), P("tensor", "fsdp")
    for name, spec in {"q": columns, "k": columns, "v": columns, "o": rows}.items():
        assert rules.match(f"layers/1/self_attn/{name}_proj/kernel").spec == spec
    for name, spec in {"gate": columns, "up": columns, "down": rows}.items():
        assert rules.match(f"layers/0/mlp/{name}_proj/kernel").spec == spec
    if bias:
        assert rules.match("layers/0/self_attn/q_proj/bias").spec == P("tensor")
        assert "added to the sum" in rules.match("layers/0/self_attn/o_proj/bias").reason


@pytest.mark.parametrize(
    ("config", "options"),
    [(MIXTRAL, {"moe": True}), (QWEN3_MOE, MOE)],
    ids=["mixtral", "qwen3_moe"],
)
def test_both_plans_of_experts_are_one_table(config, options):
    """The expert plan splits the first dimension, the tensor plan the others."""
    rules = read(config, shapes_of(**options), names=moe_names)
    for name in ("gate_proj", "up_proj"):
        assert rules.match(f"layers/0/mlp/experts/{name}").spec == P("expert", "fsdp", "tensor")
    assert rules.match("layers/0/mlp/experts/down_proj").spec == P("expert", "tensor", "fsdp")
    assert rules.match("layers/0/mlp/gate/kernel").reason == "not in PlanConfig's parallel plan"
    if config is QWEN3_MOE:
        assert (
            "replicated_with_grad_allreduce"
            in rules.match("layers/0/self_attn/q_norm/scale").reason
        )


def test_a_plan_of_training_accepts_the_table():
    """Every parameter has a row and every row a parameter: `make_plan` audits both."""
    model = spmd.from_nnx(lambda rngs: Port(rngs, **MOE))
    rules = read(QWEN3_MOE, shapes_of(**MOE), names=moe_names)
    plan = spmd.make_plan(MESH, rules, model, optax.sgd(0.1))
    specs = {leaf.path: leaf.spec for leaf in plan.params}
    assert specs["layers/1/mlp/experts/down_proj"] == P("expert", "tensor", "fsdp")
    assert specs["lm_head/kernel"] == P()


def test_control_a_swapped_style_changes_the_spec():
    """Rowwise in place of colwise splits the other dimension."""
    swapped = PlanConfig(ATTENTION | DENSE | {"layers.*.mlp.up_proj": "rowwise"})
    rules = read(swapped, shapes_of())
    assert rules.match("layers/0/mlp/up_proj/kernel").spec == P("tensor", "fsdp")


@pytest.mark.parametrize(
    ("style", "shape", "spec"),
    [
        ("colwise_rep", (8, 16), P("fsdp", "tensor")),
        ("colwise_gather_output", (8, 16), P("fsdp", "tensor")),
        ("rowwise_split_input", (8, 16), P("tensor", "fsdp")),
        ("local_rowwise", (8, 16), P("tensor", "fsdp")),
        ("colwise", (8, 4, 2), P("fsdp", "tensor")),  # [in, heads, head_dim]
        ("rowwise", (4, 2, 8), P("tensor", None, "fsdp")),
        ("packed_colwise", (8, 2, 16), P("fsdp", None, "tensor")),
        ("embedding_rowwise", (32, 8), P("tensor", "fsdp")),
        ("embedding_colwise", (32, 8), P("fsdp", "tensor")),
        ("colwise", (8,), P("tensor")),
    ],
)
def test_a_style_splits_a_dimension(style, shape, spec):
    """Each style that splits something, for kernels [in, out], and of more dimensions."""
    assert one(style, *shape) == spec


def test_shared_experts_may_be_stacked():
    """The first of three dimensions is theirs; no axis splits it."""
    name, path = "layers.*.mlp.shared_experts.up_proj", "layers/0/mlp/shared_experts/up_proj"
    assert one("colwise", 2, 8, 16, name=name, path=path) == P(None, "fsdp", "tensor")
    assert one("colwise", 8, 16, name=name, path=path) == P("fsdp", "tensor")


@pytest.mark.parametrize("style", ["replicate", "ep_router", "mla_kv_a_proj"])
def test_a_style_of_whole_parameters_is_a_replication_with_the_reason(style):
    """Its parameters are in the table, and the reason names the style."""
    value = one(style, 8, 16)
    assert value == Replicate(f"layers.*.up is {style}")


def test_experts_stored_in_out_are_told_by_their_packed_weight():
    """packed_rowwise splits the outputs of [experts, in, out] weights, so colwise splits the inputs of the other."""
    plan = {"mlp.experts.gate_up_proj": "packed_rowwise", "mlp.experts.down_proj": "colwise"}
    params = {
        "mlp/experts/gate_up_proj": floats(4, 8, 64),
        "mlp/experts/down_proj": floats(4, 32, 8),
    }
    rules = read({"base_model_tp_plan": plan}, params)
    assert rules.match("mlp/experts/gate_up_proj").spec == P(None, "fsdp", "tensor")
    assert rules.match("mlp/experts/down_proj").spec == P(None, "tensor", "fsdp")


def test_an_expert_plan_alone_splits_experts():
    """A config such as gpt-oss has no tensor plan; its biases are [experts, out]."""
    name = "layers.*.mlp.experts.up_proj"
    plan = {name: "grouped_gemm", f"{name}_bias": "grouped_gemm"}
    up = "layers/0/mlp/experts/up_proj"
    params = {up: floats(4, 8, 16), f"{up}_bias": floats(4, 16)}
    rules = read({"base_model_ep_plan": plan}, params)
    assert rules.match(up).spec == P("expert", "fsdp")
    assert rules.match(f"{up}_bias").spec == P("expert")


def test_experts_are_whole_without_an_expert_axis():
    """`expert=None` ignores the expert plan, `fsdp=None` leaves the other dimension whole."""
    rules = read(MIXTRAL, shapes_of(moe=True), names=moe_names, expert=None, fsdp=None)
    assert rules.match("layers/0/mlp/experts/up_proj").spec == P(None, None, "tensor")
    assert rules.match("layers/0/mlp/experts/down_proj").spec == P(None, "tensor")


def test_axes_may_have_other_names():
    """With `mesh=` the table is for its axes, and one dimension may be split over several."""
    mesh = jax.sharding.AbstractMesh((2, 2, 2), ("dp", "fs", "mp"))
    rules = read(LLAMA, shapes_of(), tensor="mp", fsdp=("dp", "fs"), expert=None, mesh=mesh)
    assert rules.match("layers/0/mlp/up_proj/kernel").spec == P(("dp", "fs"), "mp")


def test_stacked_layers_need_no_numbers():
    """A table for stacked layers has the specs of one layer, the stack in front."""
    params = {"layers/self_attn/q_proj/kernel": floats(2, 8, 8)}
    plan = {"layers.*.self_attn.q_proj": "colwise"}
    rules = read({"base_model_tp_plan": plan}, params)
    assert rules.match("layers/self_attn/q_proj/kernel").spec == P("pipe", "fsdp", "tensor")


def test_experts_may_be_a_stack():
    """Where `stacked` splits the experts, the plan's entry leaves them to it."""
    params = {"layers/mlp/experts/down_proj/kernel": floats(2, 4, 32, 8)}
    plan = {"layers.*.mlp.experts.down_proj": "rowwise"}
    rules = read(
        PlanConfig(plan, {"layers.*.mlp.experts.down_proj": "grouped_gemm"}),
        params,
        stacked={"layers": "pipe", "experts": "expert"},
    )
    spec = rules.match("layers/mlp/experts/down_proj/kernel").spec
    assert spec == P("pipe", "expert", "tensor", "fsdp")


def test_pairs_map_names_as_a_function_does():
    """Regular expressions apply in order; None drops a name, and a path may have * for a number."""
    plan = {"layers.*.self_attn.q_proj": "colwise", "layers.*.mlp.gate_proj": "colwise"}
    params = {"h_0/attn/wq/kernel": floats(8, 8), "h_1/attn/wq/kernel": floats(8, 8)}
    pairs = [(r"mlp\.", None), (r"^layers\.\*", "h_*"), ("self_attn.q_proj", "attn/wq")]
    rules = read({"base_model_tp_plan": plan}, params, names=pairs)
    assert rules.match("h_1/attn/wq/kernel").spec == P("fsdp", "tensor")


def test_rows_of_the_caller_come_first():
    """They are for what the plan leaves out, and replace an entry's spec."""
    rows = [("embed_tokens/embedding", P("tensor", "fsdp")), ("o_proj/kernel", P("fsdp"))]
    lines: list[str] = []
    rules = read(LLAMA, shapes_of(), lines, rows=rows)
    assert rules.match("embed_tokens/embedding").spec == P("tensor", "fsdp")
    assert rules.match("layers/0/self_attn/o_proj/kernel").spec == P("fsdp")
    assert "rowwise  no row: its arrays are in rows=" in lines[0]


def test_the_report_lists_what_the_plan_leaves_out():
    """With the bytes, the largest first, and entries without a row with the cause."""
    lines: list[str] = []
    read(QWEN3_MOE, shapes_of(**MOE), lines, names=moe_names)
    entries, unplanned = lines[0].split("Not in the plan")
    assert entries.count("no row: communication") == 1
    assert entries.count("no row: dropped by names=") == len(DENSE)
    paths = re.findall(r"  (\S+) \(", unplanned.split("rules = ")[0])
    assert paths[:2] == ["embed_tokens/embedding", "lm_head/kernel"]
    assert {"norm/scale", "layers/mlp/gate/kernel", "layers/input_layernorm/scale"} <= set(paths)


def test_the_reported_table_is_the_table():
    """The text runs as Python and gives the same rows."""
    lines: list[str] = []
    rules = read(QWEN3_MOE, shapes_of(**MOE), lines, names=moe_names)
    scope = {"spmd": spmd, "P": P}
    exec(lines[0][lines[0].index("rules = ") :], scope)
    assert scope["rules"].params == rules.params


def test_a_fused_weight_is_reported():
    """One kernel for a packed weight has its halves on other devices than their products."""
    plan = {"experts.gate_up_proj": "packed_colwise"}
    fused: list[str] = []
    read({"base_model_tp_plan": plan}, {"experts/gate_up_proj": floats(4, 8, 64)}, fused)
    apart: list[str] = []
    read({"base_model_tp_plan": plan}, {"experts/gate_up_proj": floats(4, 8, 2, 32)}, apart)
    assert "packed: two kernels" in fused[0]
    assert "packed: two kernels" not in apart[0]


def test_styles_without_an_equivalent_are_refused_by_name_all_at_once():
    """Unknown ones with a suggestion, and a style of activations with its reason."""
    plan = {"a": "colwize", "b": "sequence_parallel", "c": "colwise", "d": "packed_rowwise"}
    text = problems_of({"base_model_tp_plan": plan}, {"a/kernel": floats(4, 4)})
    assert "style 'colwize': is no known style" in text
    assert 'did you mean "colwise"?' in text
    assert "style 'sequence_parallel': splits activations along the sequence" in text
    assert "style 'packed_rowwise'" in text


def test_plans_of_two_layouts_are_refused():
    """A module has one style over the tensor axis."""
    config = PlanConfig({"up": "colwise"}, {"up": "rowwise"})
    assert "up: is colwise in base_model_tp_plan, and rowwise" in problems_of(
        config, {"up/kernel": floats(4, 4)}
    )


def test_names_of_two_modules_for_one_path_are_refused():
    """A parameter has one entry of the plan."""
    text = problems_of(
        LLAMA,
        shapes_of(),
        names=lambda name: name.replace("k_proj", "q_proj"),
    )
    assert "layers/0/self_attn/q_proj/kernel: two modules of the plan are mapped to it" in text
    assert "layers.*.self_attn.q_proj (colwise), layers.*.self_attn.k_proj (colwise)" in text


def test_names_that_match_nothing_are_refused_all_at_once():
    """A mapped path without a parameter, and a pair without a name."""
    text = problems_of(LLAMA, shapes_of(), names=[("q_proj", "query"), ("up_proj", "w1")])
    assert "is mapped to layers/*/self_attn/query, which matches no parameter" in text
    assert "is mapped to layers/*/mlp/w1, which matches no parameter" in text
    text = problems_of(LLAMA, shapes_of(), names=[("q_prj", "query")])
    assert "names[0] 'q_prj': matches no name of the plan" in text
    text = problems_of(LLAMA, shapes_of(), names=[("q_proj(", "query"), ("v", "w")])
    assert "invalid regular expression" in text
    text = problems_of(LLAMA, shapes_of(), names=["q_proj"])
    assert "names[0]: is ('q', '_', 'p'" in text
    text = problems_of(LLAMA, shapes_of(), names=lambda name: 3)
    assert "layers.*.mlp.up_proj: is mapped to 3" in text


def test_a_config_without_a_plan_is_refused():
    """With the part that has one, if there is one."""
    assert "has neither base_model_tp_plan" in problems_of({}, shapes_of())
    assert "pass a part of it that has a plan: text_config" in problems_of(
        {"text_config": LLAMA}, shapes_of()
    )
    assert "AutoConfig" in problems_of({"model_type": "llama"}, shapes_of())
    assert "is 'colwise'" in problems_of({"base_model_tp_plan": "colwise"}, shapes_of())


def test_an_invalid_axis_is_refused_once():
    """An unknown axis, one axis for two arguments, and none for the plan."""
    text = problems_of(LLAMA, shapes_of(), tensor="tenser", fsdp="expert")
    assert text.count("tenser") == 1
    assert 'did you mean "tensor"?' in text
    assert "expert='expert': is the axis of fsdp, too" in text
    assert "names no axis" in problems_of(LLAMA, shapes_of(), tensor=None)


def test_an_array_without_the_dimension_is_refused():
    """Experts apart, a scalar, and layers stacked without `stacked`."""
    config = PlanConfig(None, EXPERT_PLAN)
    apart = {"layers/0/mlp/experts/down_proj": floats(HIDDEN, WIDTH)}
    names = [("gate_up_proj", None)]
    assert "has 2 dimensions, and layers.*.mlp.experts.down_proj is grouped_gemm" in problems_of(
        config, apart, names=names
    )
    plan = {"base_model_tp_plan": {"up": "colwise"}}
    assert "has no dimension to split" in problems_of(plan, {"up/scale": floats()})
    plan = {"base_model_tp_plan": {"blocks.*.up": "colwise"}}
    text = problems_of(plan, {"blocks/up/kernel": floats(2, 4, 4)}, names=[(r"\.\*", "")])
    assert "no component of its path is in stacked=" in text


def test_a_useless_row_is_refused():
    """The audit of tables is that of all others."""
    text = problems_of(LLAMA, shapes_of(), rows=[("embd", P("tensor", "fsdp"))])
    assert "matches no parameter" in text


def test_dimensions_divide_over_a_given_mesh():
    """With `mesh=` the whole audit is made at once."""
    mesh = jax.sharding.AbstractMesh((3,), ("tensor",))
    text = problems_of(LLAMA, shapes_of(), fsdp=None, expert=None, mesh=mesh)
    assert f"{WIDTH} / (tensor=3)" in text


def configs_with_plans() -> dict[str, Any]:
    """Class name → class, for each config of the installed transformers with a plan."""
    import transformers
    from transformers import models

    found: dict[str, Any] = {}
    for family in pkgutil.iter_modules(models.__path__):
        folder = f"{models.__path__[0]}/{family.name}"
        for module in pkgutil.iter_modules([folder]):
            if not module.name.startswith("configuration_"):
                continue
            names = vars(importlib.import_module(f"{models.__name__}.{family.name}.{module.name}"))
            for name, value in names.items():
                is_config = inspect.isclass(value) and issubclass(
                    value, transformers.PretrainedConfig
                )
                if is_config and (value.base_model_tp_plan or plan_of(value, "ep")):
                    found[name] = value
    return found


def plan_of(config, kind):
    return getattr(config, f"base_model_{kind}_plan", None) or {}


def made_up(config):
    """Shapes of a port with every module of a config's plans, under PyTorch's names, two layers unrolled."""
    params = {}
    for name in plan_of(config, "tp") | plan_of(config, "ep"):
        shape = (8, 16)
        if "experts" in name.split("."):
            shape = (4, 8, 16)
        if name.endswith(("_bias", "sinks")):
            shape = shape[:-1]
        for layer in ("0", "1"):
            path = name.replace("*", layer).replace(".", "/")
            params[f"{path}/kernel" if not name.endswith("_bias") else path] = floats(*shape)
    return params


@pytest.mark.soak
def test_every_installed_plan_is_read():
    """All styles of all configs are known; each entry of parameters has a row."""
    configs = configs_with_plans()
    assert len(configs) > 130
    for config in configs.values():
        rules = read(config, made_up(config))
        styles = plan_of(config, "tp") | plan_of(config, "ep")
        assert rules.params, config
        assert styles, config


@pytest.mark.soak
def test_the_plans_of_these_tests_are_the_installed_ones():
    """They are written down here, so that the other tests need no transformers."""
    import transformers

    for name, ours in (("Llama", LLAMA), ("Mixtral", MIXTRAL), ("Qwen3Moe", QWEN3_MOE)):
        config = getattr(transformers, f"{name}Config")
        assert ours.base_model_tp_plan == config.base_model_tp_plan
        assert (ours.base_model_ep_plan or {}) == plan_of(config, "ep")


@pytest.fixture(scope="module")
def torch_mesh():
    """A mesh of two processes without communication, to ask transformers for its placements."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


class Twin:
    """The parameters of a PyTorch model as a port's, with the dimension that transformers splits."""

    def __init__(self, model, plan, mesh):
        self.shapes, self.split, self.names = {}, {}, set()
        self.hidden = model.config.get_text_config().hidden_size
        for name, param in list(model.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            module = model.get_submodule(owner)
            generic = re.sub(r"\.\d+(?=\.|$)", ".*", name)
            entry = generic if generic in plan else generic.rpartition(".")[0]
            self.names.add(entry)
            swaps = self.is_out_in(module, leaf, param)
            shape = list(param.shape)
            if swaps:
                shape[-2:] = shape[:-3:-1]
            path = name.replace(".", "/")
            self.shapes[path] = floats(*shape)
            if entry in plan:
                dim = placement(module, leaf, plan[entry], mesh)
                if dim is not None and swaps and dim >= param.ndim - 2:
                    dim = 2 * param.ndim - 3 - dim
                self.split[path] = dim

    def is_out_in(self, module, leaf, param):
        """Linear layers and most experts are [out, in]; embeddings and some experts are not."""
        if leaf.endswith("bias") or "Embedding" in type(module).__name__:
            return False
        if getattr(module, "is_transposed", False):
            return False
        if param.ndim == 3 and "down" in leaf:
            return param.shape[-2] == self.hidden
        if param.ndim == 3 and "up" in leaf:
            return param.shape[-1] == self.hidden
        return param.ndim > 1


def placement(module, leaf, style, mesh):
    """The dimension that transformers splits of a parameter under a style; None for whole."""
    import torch
    from torch.distributed.tensor import DTensor
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    twin = torch.nn.Module()
    twin.register_parameter(leaf, module._parameters[leaf])
    ALL_PARALLEL_STYLES[style].shard_param(twin, leaf, mesh)
    after = twin._parameters[leaf]
    if not isinstance(after, DTensor):
        return None
    (found,) = after.placements
    dim = getattr(found, "dim", None)
    return dim if dim is None or dim >= 0 else dim + after.ndim


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["tp", "ep"])
def test_the_table_splits_what_transformers_splits(torch_mesh, kind):
    """The dimension of each parameter, by its own code, on every model that builds from its config's defaults."""
    import torch
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    transformers.logging.set_verbosity_error()
    compared, differing = 0, []
    for name, config in configs_with_plans().items():
        plan = plan_of(config, kind)
        if not plan or config not in MODEL_MAPPING:
            continue
        try:
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = MODEL_MAPPING[config]._from_config(config())
        except (TypeError, KeyError, ValueError):  # its defaults are no model
            continue
        twin = Twin(model, plan, torch_mesh)
        rules = read(
            {f"base_model_{kind}_plan": plan},
            twin.shapes,
            names=lambda entry, twin=twin: entry if entry in twin.names else None,
            fsdp=None,
            stacked=(),
        )
        axes = ("tensor", "expert")  # an expert plan has tensor-parallel styles, too
        for path in twin.shapes:
            spec = rules.match(path).spec
            split = [dim for dim, axis in enumerate(spec) if axis in axes]
            ours = split[0] if split else None
            if ours != twin.split.get(path):
                differing.append((name, path, spec, twin.split.get(path)))
        compared += 1
    assert compared > {"tp": 100, "ep": 40}[kind]
    assert not differing, differing[:20]
