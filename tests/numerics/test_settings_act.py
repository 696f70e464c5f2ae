"""A setting of a plan changes the program of a step, or it is an error: for a model of ours, and for one of Flax."""

import dataclasses
import functools
import inspect

import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import spmd
from spmd.diloco.config import DiLoCoConfig
from spmd.errors import SpmdError
from spmd.examples.threshold_exchange import ThresholdExchange
from spmd.lora.config import LoRAConfig
from spmd.partition_rules.llama import LLAMA
from spmd.run.build import abstract_batch, make_setup
from spmd.settings.compress import CompressConfig
from spmd.settings.dpo import DPOConfig
from spmd.testing import token_batches
from tests import tiny

MESH, SPLIT_SEQUENCE = {"data": 2, "fsdp": 4}, {"fsdp": 4, "sequence": 2}
SETTINGS = {
    "zero": 1,
    "remat": "full",
    "precision": "bf16",
    "compress": CompressConfig(gather="int8"),
    "quantize": "fp8",
    "offload": ("optimizer_state",),
    "attention": "chunked",
    "context": "all-to-all",
    "transforms": [ThresholdExchange()],
    "clip_activations": "residual=1e-3",
}
"""Keyword of `make_plan` → a value that is not its default."""

LEFT_OUT = {
    "slices": "describes the machine, and decides nothing by itself",
    "evaluation_params": "is for evaluations alone: tests/numerics/test_evaluated_params.py",
}

OF_CONFIG = {
    "xla": ("xla_cpu_enable_fast_math=true",),
    "pipeline": spmd.PipelineConfig("gpipe", microbatches=2),
    "lora": LoRAConfig(targets=("up/kernel",), rank=2),
    "optimizer": spmd.OptimizerConfig(name="lion"),
    "task": "sft",
    "chat": spmd.ChatConfig(template="x"),
    "accumulate": 2,
    "logits_chunk": 64,
    "diloco": DiLoCoConfig(every=2),
    "mup": ("d_model=16", "heads=2", "kv_heads=1", "d_ff=32"),
    "dpo": DPOConfig(beta=0.2),
    "logit_z_loss": 0.1,
    "norms": True,
    "distillation": spmd.DistillationConfig(weight=0.2),
}
"""Field of `TrainConfig` that is no keyword of `make_plan` → a value that is not its default."""

LEFT_OUT_OF_CONFIG = {
    "model": "is the model",
    "rules": "is audited",
    "mesh": "is audited",
    "slices": LEFT_OUT["slices"],
    "init": "is where parameters come from",
    "teacher": "is a second model, in tests/numerics/test_teacher.py",
    "data": "decides batches, and no program of a step",
    "defer_grad_reduction": "chooses between two ways of parts of a batch, whatever the model",
    "sample": "is between steps",
    "out": "is a path",
    "devices": "is a count of simulated devices",
}


class Net(nnx.Module):
    """A model that knows nothing of this framework."""

    def __init__(self, rngs, vocab=tiny.CONFIG.vocab):
        self.embed = nnx.Embed(vocab, 16, rngs=rngs)
        self.up, self.head = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, vocab, rngs=rngs)

    def __call__(self, tokens):
        return self.head(nnx.relu(self.up(self.embed(tokens))))


OWN_RULES = spmd.Rules(
    [(".*kernel", P("fsdp")), (".*embedding", P("fsdp")), (".*bias", spmd.replicate("small"))]
)
BATCH = token_batches((8, 8), tiny.CONFIG.vocab, steps=1)[0]


@functools.cache
def model(name):
    return tiny.model() if name == "ours" else spmd.from_nnx(Net)


def text(name, mesh=MESH, **settings):
    """The program of a step before XLA, without the names of source lines; or the error."""
    rules = LLAMA if name == "ours" else OWN_RULES
    try:
        plan = spmd.make_plan(tiny.mesh(**mesh), rules, model(name), optax.adam(0.1), **settings)
        return spmd.make_train_step(plan, spmd.next_token_loss(model(name))).lower(BATCH).as_text()
    except SpmdError as error:
        return error


@functools.cache
def default(name):
    return text(name)


@dataclasses.dataclass(frozen=True)
class Config:
    """The config of the model that knows nothing of this framework."""

    vocab: int = 256

    def build(self, rngs):
        return Net(rngs, self.vocab)


DATA = spmd.DataConfig(source=("stdlib",), tokenizer="bytes", sequence=16, batch=16)
CONFIG = spmd.TrainConfig(model=Config(), rules=OWN_RULES, data=DATA, mesh=spmd.MeshShape(**MESH))


def text_of_config(**fields):
    """The program of the step of a config, with the compiler's options; or the error."""
    try:
        setup = make_setup(dataclasses.replace(CONFIG, **fields), tiny.mesh(**MESH))
        step = setup.step
        return step.lower(abstract_batch(setup.config)).as_text() + str(
            sorted(step.compiler_options.items())
        )
    except SpmdError as error:
        return error


@functools.cache
def default_of_config():
    return text_of_config()


QUICK = ("lora", "logits_chunk")
FIELDS = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in OF_CONFIG
]


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_a_config_acts_or_is_refused(field):
    """The step's program differs from that without the field, or there is an error."""
    found = text_of_config(**{field: OF_CONFIG[field]})
    if not isinstance(found, SpmdError):
        assert found != default_of_config()


def test_a_context_is_kept_on_a_mesh_without_a_sequence():
    """A config with an algorithm over a split sequence has a plan on one device, as a comparison makes it."""
    plan = spmd.make_plan(
        tiny.mesh(data=1), LLAMA, tiny.model(), optax.sgd(0.1), context="all-to-all"
    )
    assert plan.attention.context == "all-to-all"


def test_every_field_of_a_config_is_tried():
    """Each field of `TrainConfig` that a run of any model does not have is in the sweep, or has a reason not to be."""
    of_runs = {field.name for field in dataclasses.fields(spmd.RunConfig)}
    own = {field.name for field in dataclasses.fields(spmd.TrainConfig)} - of_runs
    assert own == {*OF_CONFIG, *LEFT_OUT_OF_CONFIG} | {*SETTINGS} & own


@pytest.mark.parametrize("name", [pytest.param("ours", marks=pytest.mark.soak), "foreign"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_acts_or_is_refused(setting, name):
    """The program differs from that without the setting, or there is an error that names it."""
    if (setting, name) == ("context", "ours"):  # it chooses where the mesh splits a sequence
        assert text(name, SPLIT_SEQUENCE, context=SETTINGS[setting]) != text(name, SPLIT_SEQUENCE)
        return
    found = text(name, **{setting: SETTINGS[setting]})
    if isinstance(found, SpmdError):
        words = " ".join(problem.where for problem in found.problems)
        assert setting.split("_")[0] in words
    else:
        assert found != default(name)


def test_an_equal_setting_changes_nothing():
    """The control: a default that is written out gives the same program, so a setting without effect would be seen."""
    assert text("foreign", zero=3, remat="none", attention="auto") == default("foreign")


def test_every_setting_is_tried():
    """Each keyword of `make_plan` is in the sweep, or has a reason not to be."""
    keywords = inspect.signature(spmd.make_plan).parameters.values()
    names = {parameter.name for parameter in keywords if parameter.kind is parameter.KEYWORD_ONLY}
    assert names == {*SETTINGS, *LEFT_OUT}
