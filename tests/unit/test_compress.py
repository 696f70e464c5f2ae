"""Compression in a config: flags, errors, other meshes, and the predicted time."""

import dataclasses
import json

import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import spmd
from spmd.commands.parsing import parse_command
from spmd.commands.plan import PlanCommand, run_plan
from spmd.errors import ConfigError
from spmd.run.build import applicable_compression, build_precision, make_setup, planned_mesh
from spmd.run.config import config_values, with_values
from spmd.run.describe import compression_lines, execution_lines
from spmd.run.load_config import load_config
from spmd.run.step_time import count_model, workload
from spmd.settings.compress import NO_COMPRESSION, CompressConfig
from spmd.sharding.mesh import MeshShape, abstract_mesh
from spmd.sharding.rules import Rules, replicate


def _setup(compress):
    config = dataclasses.replace(load_config("demo"), compress=compress)
    return make_setup(config, planned_mesh(config))


FLAGS = ["--compress.gather", "int8", "--compress.gradients", "int4", "--compress.no-secondary"]


def test_flags_and_records():
    """Flags set the fields, and a record of a run restores them."""
    config = parse_command(PlanCommand, ["demo", *FLAGS], "plan")[0].config
    assert config.compress == CompressConfig("int8", "int4", "", False)
    assert with_values(load_config("demo"), config_values(config)).compress == config.compress
    assert build_precision(config).exchange == "int4"
    bf16 = dataclasses.replace(config, compress=CompressConfig(gradients="bf16"))
    assert build_precision(bf16).exchange == "bfloat16"


def test_over_slices_gradients_may_have_another_codec():
    """Only the axes that span slices have it."""
    compress = CompressConfig(gradients="bf16", slices_gradients="int4")
    config = dataclasses.replace(load_config("demo"), slices=MeshShape(data=2), compress=compress)
    assert build_precision(config).exchange_names(["data", "fsdp"]) == {
        "data": "int4",
        "fsdp": "bfloat16",
    }


def test_unknown_codecs_come_with_the_other_problems_of_a_config():
    """All of them in one error."""
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(
            load_config("demo"), zero=4, compress=CompressConfig("int9", "fp16", "int2")
        )
    named = {problem.where for problem in error.value.problems}
    assert named == {"zero", "compress.gather", "compress.gradients", "compress.slices_gradients"}


def test_candidates_of_a_search_lose_what_they_do_not_send():
    """A mesh without fsdp gathers nothing, so the config with that mesh is one without the codec."""
    config = dataclasses.replace(load_config("demo"), compress=CompressConfig("int8", "int8"))
    alone = dataclasses.replace(config, mesh=MeshShape(data=8))
    assert applicable_compression(alone) == CompressConfig(gradients="int8")
    assert applicable_compression(config) == config.compress
    with pytest.raises(ConfigError, match=r"compress\.gather"):
        make_setup(alone, planned_mesh(alone))
    tensor = dataclasses.replace(config, mesh=MeshShape(tensor=2))
    assert applicable_compression(tensor) == NO_COMPRESSION


def test_predicted_times_count_codes_with_their_scales():
    """8.25 and 4.25 bits an element; without compression those of the policy."""
    plain = dataclasses.replace(load_config("demo"), precision="bf16")
    narrow = dataclasses.replace(plain, compress=CompressConfig("int8", "int4"))
    numbers = count_model(make_setup(plain, planned_mesh(plain)))
    work = [workload(config, numbers, config.mesh) for config in (plain, narrow)]
    assert [(w.gathered_bytes, w.reduced_bytes) for w in work] == [(2, 2), (1.03125, 0.53125)]


def test_the_plan_of_a_run_says_what_is_compressed(capsys):
    """In its heading, in a line for each codec, and in JSON."""
    setup = _setup(CompressConfig("int8", "int4"))
    assert "compress gather int8, gradients int4" in str(setup.plan)
    assert "layers gather in int8 over fsdp 2: " in execution_lines(setup)
    assert "gradients in int4 over data 2: " in execution_lines(setup)
    assert run_plan(["demo", *FLAGS, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["compress"]["gather"] == "int8"
    assert record["compression"] == compression_lines(setup.plan)
    assert len(record["compression"]) == 3


def test_codecs_that_a_model_does_not_send_are_refused():
    """A shard of 8 × 8 has no block; a model of another library has no layer that reduces gradients."""
    mesh, rules = (
        abstract_mesh(MeshShape(fsdp=4)),
        Rules(params=[("kernel", P("fsdp", None)), ("bias", replicate("small"))]),
    )

    def plan(size, compress):
        model = spmd.from_nnx(lambda rngs: nnx.Linear(size, size, rngs=rngs))
        return spmd.make_plan(mesh, rules, model, optax.sgd(0.1), compress=compress)

    assert plan(64, CompressConfig("int8")).placements["kernel"].comm.param_codec == "int8"
    with pytest.raises(ConfigError, match=r"compress\.gather: is int8, and no shard"):
        plan(8, CompressConfig("int8"))
    with pytest.raises(ConfigError, match=r"compress\.gradients: is int8, and the partitioner"):
        plan(64, CompressConfig(gradients="int8"))
    assert plan(64, CompressConfig(gradients="bf16")).precision.exchange == "bfloat16"
