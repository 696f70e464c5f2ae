"""Compression of gradients in a config: what is compressed, what is printed, and everything that is wrong at once."""

import dataclasses
import re

import optax
import pytest

import spmd
from spmd.analysis.collective_record import Cause, Collective
from spmd.analysis.comm_dtypes import comm_dtype_checks, wider_transfers
from spmd.errors import ConfigError
from spmd.models.decoder import DecoderConfig
from spmd.partition_rules.llama import LLAMA
from spmd.plan.communication import reductions
from spmd.powersgd.matrices import find_matrices
from spmd.powersgd.transform import PowerSGD
from spmd.run.build import make_setup, planned_mesh
from spmd.run.config import TrainConfig, config_values, with_values
from spmd.run.describe import compression_lines, exchange_line
from spmd.settings.compress import powersgd_rank
from spmd.sharding.optimizer_state import shard_bytes
from tests import tiny

SMALL = DecoderConfig(vocab=64, d_model=32, layers=2, heads=4, kv_heads=2, d_ff=64)
DATA = spmd.DataConfig(source=("stdlib",), tokenizer="bytes", sequence=32, batch=64)


def setup(gradients="powersgd:2", mesh=(("data", 2), ("fsdp", 2)), **fields):
    compress = spmd.CompressConfig(gradients=gradients)
    shape = spmd.MeshShape(**dict(mesh))
    config = TrainConfig(
        model=SMALL, rules=LLAMA, mesh=shape, data=DATA, compress=compress, **fields
    )
    return make_setup(config, planned_mesh(config))


def problems(**fields):
    with pytest.raises(ConfigError) as caught:
        setup(**fields)
    return list(map(str, caught.value.problems))


@pytest.mark.parametrize(
    "text", ["powersgd", "powersgd:", "powersgd:0", "powersgd:-1", "powersgd:²", "power:4", "4"]
)
def test_what_is_no_rank_is_refused(text):
    """With an example, among the other problems of a config."""
    with pytest.raises(ConfigError, match=r"compress.gradients: is '.*'(.|\n)*fix: "):
        TrainConfig(model=SMALL, rules=LLAMA, compress=spmd.CompressConfig(gradients=text))
    assert (powersgd_rank("powersgd:12"), powersgd_rank(""), powersgd_rank(4)) == (12, 0, 0)


def test_a_plan_alone_compresses_nothing():
    """So it says what does, instead of a plan that looks compressed."""
    made, compress = setup(gradients=""), spmd.CompressConfig(gradients="powersgd:2")
    with pytest.raises(
        ConfigError,
        match=r"wraps a gradient function\n +fix: from spmd.powersgd.transform import PowerSGD; make_plan\(…",
    ):
        spmd.make_plan(made.mesh, LLAMA, made.plan.model, optax.sgd(0.1), compress=compress)


def test_a_start_without_compression_is_refused():
    """What acts on nothing; and it is dropped with the compression on a mesh without replicas."""
    with pytest.raises(ConfigError, match=r"compress\.powersgd_start: is 9, and PowerSGD"):
        TrainConfig(model=SMALL, rules=LLAMA, compress=spmd.CompressConfig(powersgd_start=9))
    compress = spmd.CompressConfig(gradients="powersgd:2", powersgd_start=-1)
    with pytest.raises(ConfigError, match=r"compress\.powersgd_start: is -1"):
        TrainConfig(model=SMALL, rules=LLAMA, compress=compress)
    compress = spmd.CompressConfig(gradients="powersgd:2", powersgd_start=9)
    sizes = dict.fromkeys(("data", "expert", "sequence", "tensor", "pipe"), 1) | {"fsdp": 2}
    assert compress.on(sizes, {}, 3) == spmd.CompressConfig()


def test_a_config_keeps_it():
    """In the JSON of a checkpoint, which gives it back."""
    config = TrainConfig(
        model=SMALL, rules=LLAMA, compress=spmd.CompressConfig(gradients="powersgd:2")
    )
    assert with_values(TrainConfig(model=SMALL, rules=LLAMA), config_values(config)) == config


def test_everything_that_is_wrong_is_said_at_once():
    """Before anything compiles: no replicas, fsdp between slices, a rank above each matrix, and microbatches."""
    found = problems(
        gradients="powersgd:100",
        mesh=(("fsdp", 4),),
        slices=spmd.MeshShape(fsdp=2),
        accumulate=2,
        defer_grad_reduction="none",
    )
    assert {text.partition("\n")[0] for text in found if "a rank above" not in text} == {
        "compress.gradients: is powersgd:100 over data, an axis of size 1",
        "compress.gradients: is PowerSGD, which cannot compress a reduce-scatter over fsdp",
        "defer_grad_reduction: is none",
    }
    above = [text for text in found if "a rank above the matrix" in text]
    assert len(above) == 9
    assert any(
        "layers/mlp/up_proj/kernel" in text and "rank 100 > min(8, 64)" in text for text in above
    )


def test_a_rank_that_saves_nothing_is_refused():
    """With the arithmetic of each matrix."""
    (found,) = problems(gradients="powersgd:8")
    assert "no gradient would be smaller" in found
    assert "(16 + 64) · 8 · 2 = 1280 ≥ 16 · 64 = 1024" in found


def test_a_pipeline_without_a_flush_has_no_sum_of_a_step():
    """So there is nothing to compress."""
    pipeline = {"mesh": (("pipe", 2), ("data", 2)), "pipeline": spmd.PipelineConfig("pipedream")}
    (found,) = problems(**pipeline)
    assert "a step has no sum of its own while microbatches are in flight" in found


def test_the_plan_says_what_is_compressed():
    """Rank, matrices, bytes before and after, the state, and what is sent as it is."""
    made = setup()
    matrices, plain = find_matrices(made.plan, rank=2, rate=2.0)
    assert matrices["layers/mlp/up_proj/kernel"].local == (2, 16, 64)
    assert set(plain) == {"layers/attention_norm/scale", "layers/mlp_norm/scale", "norm/scale"}
    text = "\n".join(compression_lines(made.plan, PowerSGD(2)))
    wide = (
        sum(shard_bytes(x.shape, "float32", x.spec, made.mesh.shape) for x in made.plan.gradients)
        - 4 * 5 * 32
    )
    thin = sum(sum(transfer.arrays) for transfer in reductions(made.plan))
    heading = f"gradients powersgd:2 over data=2: {2 * wide / 1024:.3g} KiB → {2 * thin / 1024:.3g} KiB on the wire"
    assert text.startswith(heading)
    assert re.search(r"layers/mlp/up_proj/kernel +2 × \[16, 64\] +16 KiB → 2.5 KiB", text)
    assert (
        "sent as they are: layers/attention_norm/scale, layers/mlp_norm/scale, norm/scale (no matrix)"
        in text
    )
    assert exchange_line(setup(accumulate=2)) == ""
    assert compression_lines(setup(gradients="").plan) == []


def test_errors_are_split_like_gradients():
    """A shard for each device, whatever the ZeRO stage; the first dimension is that of data."""
    for zero in (1, 2):
        plan = setup(zero=zero).plan
        errors = {
            x.path: x for x in plan.transform_states if x.path.startswith("compression/error/")
        }
        for gradient in plan.gradients:
            if error := errors.pop(f"compression/error/{gradient.path}", None):
                assert error.shape == (2, *gradient.shape)
                assert error.bytes_per_device == gradient.bytes_per_device
        assert not errors


def test_equal_plans_stay_equal():
    """Transforms are compared by value, so a plan made again compiles nothing; another rank is another plan."""
    plan = tiny.plan(data=2, fsdp=2)
    assert plan.with_transforms(PowerSGD(2)) == plan.with_transforms(PowerSGD(2))
    assert plan.with_transforms(PowerSGD(2)) != plan.with_transforms(PowerSGD(3))


@pytest.mark.parametrize(("payload", "is_broken"), [(1280, False), (2048, True)])
def test_a_gradient_that_is_sent_whole_breaks_a_promise(payload, is_broken):
    """Of a compressed gradient no array is larger than P and Q: here 2 layers of 2 × 64 numbers, 1 KiB."""
    promises = list(comm_dtype_checks(setup(precision="bf16").plan))
    path = "layers/mlp/up_proj/kernel"
    (arrays,) = (x.arrays for x in reductions(setup().plan) if x.path == path and x.arrays)
    largest = max(arrays)
    fields = {field.name: "" for field in dataclasses.fields(Collective)}
    fields |= {
        "kind": "all-reduce",
        "axes": ("data",),
        "executions": 1,
        "crosses": False,
        "dtype": "f32",
    }
    fields |= {
        "payload": payload * largest // 1280,
        "op_name": "shard_map/psum",
        "cause": Cause("rule", "", path, "gradient"),
    }
    assert [problem.where for problem in wider_transfers([Collective(**fields)], promises)] == [
        path
    ] * is_broken
    # Over slices only what crosses them is compressed; XLA:TPU sends that without names, so without
    # a cause.
    between = Collective(**fields | {"crosses": True, "payload": 1, "cause": Cause("sum", "")})
    assert not list(wider_transfers([Collective(**fields), between], promises))
    crossing = Collective(**fields | {"crosses": True})
    assert [problem.where for problem in wider_transfers([crossing, between], promises)] == [
        path
    ] * is_broken
