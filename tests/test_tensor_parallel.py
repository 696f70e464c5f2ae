"""Tensor and sequence parallelism: the published communication, the published memory, and the numbers of one device."""

import functools
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import optax
import pytest

from models.llama import LlamaConfig
from models.mixtral import PRESETS as MIXTRAL_PRESETS
from partition_rules.llama import (
    LLAMA,
    LLAMA_REPLICATED_KV,
    LLAMA_SEQUENCE_PARALLEL,
    LLAMA_TIED_SEQUENCE_PARALLEL,
    sequence_parallel,
)
from partition_rules.mixtral import MIXTRAL
from spmd.errors import AnnotationError
from spmd.foresight.collectives import CollectiveAudit, audit_collectives
from spmd.foresight.memory import estimate_memory
from spmd.gradients.base import value_and_grad
from spmd.loss import next_token_loss
from spmd.mesh import MeshShape, abstract_mesh
from spmd.plan import make_plan
from spmd.step import make_train_step
from spmd.testing import compare, record_run, token_batches
from tests import tiny

ROOT = Path(__file__).resolve().parent.parent
BATCHES = token_batches((8, 16), tiny.CONFIG.vocab, steps=2)
MIXTRAL_CONFIG = MIXTRAL_PRESETS["test"]


@functools.cache
def record(config, rules, sizes, options=()):
    """Two steps under a rule table."""
    model = tiny.model(config)
    plan = make_plan(tiny.mesh(**dict(sizes)), rules, model, tiny.OPTIMIZER, **dict(options))
    return record_run(plan, value_and_grad(next_token_loss(model, chunk=24)), BATCHES)


def parity(config, rules, plain, **sizes):
    return compare(record(config, rules, tuple(sizes.items())), record(config, plain, ()))


SPLIT_TOKENS = {
    "llama": (tiny.CONFIG, LLAMA_SEQUENCE_PARALLEL, {"data": 2, "tensor": 2}),
    "llama, ring": (tiny.CONFIG, LLAMA_SEQUENCE_PARALLEL, {"fsdp": 2, "sequence": 2, "tensor": 2}),
    "llama, tied": (tiny.replaced(tied=True), LLAMA_TIED_SEQUENCE_PARALLEL, {"fsdp": 2, "tensor": 2}),
    "mixtral": (MIXTRAL_CONFIG, sequence_parallel(MIXTRAL), {"expert": 2, "tensor": 2}),
}


@pytest.mark.parametrize("name", SPLIT_TOKENS)
def test_tokens_split_over_tensor_equal_one_device(name):
    """With the residual stream split by tokens over `tensor`, training equals that of one device."""
    config, rules, sizes = SPLIT_TOKENS[name]
    result = parity(config, rules, rules, **sizes)
    assert result.ok, f"\n{result}"


def test_key_value_heads_are_replicated_where_the_table_says_so():
    """Two key/value heads on four devices: an error under the plain table, one device's numbers under the other."""
    with pytest.raises(AnnotationError, match=r"attention_key(.|\n)*2 / \(tensor=4\) = 0.5"):
        record(tiny.CONFIG, LLAMA, (("tensor", 4),))
    result = parity(tiny.CONFIG, LLAMA_REPLICATED_KV, LLAMA, data=2, tensor=4)
    assert result.ok, f"\n{result}"


def test_query_heads_that_do_not_divide_are_refused():
    """Six heads on four devices: their kernel divides, they do not."""
    config = LlamaConfig(vocab=64, d_model=48, layers=1, heads=6, kv_heads=6, d_ff=64)
    with pytest.raises(AnnotationError, match=r"attention_query(.|\n)*6 / \(tensor=4\) = 1.5"):
        record(config, LLAMA, (("tensor", 4),))


SHAPES = {"tokens": "int32", "targets": "int32", "weights": "float32"}


def saved(rules, tensor, layers=4, batch=8, seq=128, d=64):
    """What the layers save for the backward pass with `remat="selective"`: bytes, in those of one residual stream."""
    model = tiny.model(LlamaConfig(64, d, layers, 4, 4, 2 * d))
    mesh = tiny.mesh(tensor=tensor)
    plan = make_plan(mesh, rules, model, optax.sgd(1.0), remat="selective", precision="bf16")
    step = make_train_step(plan, tiny_loss(model))
    arrays = {name: jax.ShapeDtypeStruct((batch, seq), dtype) for name, dtype in SHAPES.items()}
    return sum(estimate_memory(step, arrays, "tpu").saved.values()) / (2 * layers * batch * seq * d)


@functools.cache
def tiny_loss(model):
    return next_token_loss(model)


OUTSIDE, INSIDE = 4, 4 + 3 * 2  # two norms and their inputs; q, k, v and the output; gate, up and hidden, 2 d wide each


@pytest.mark.parametrize("tensor", [2, 4])
def test_activations_fall_as_published(tensor):
    """Tensor parallelism divides what is inside of its regions, sequence parallelism all (table 2 of the paper)."""
    assert saved(LLAMA, 1) == OUTSIDE + INSIDE
    assert saved(LLAMA, tensor) == OUTSIDE + INSIDE / tensor
    assert saved(LLAMA_SEQUENCE_PARALLEL, tensor) == (OUTSIDE + INSIDE) / tensor


VOCAB, D, LAYERS, HEADS, D_FF, BATCH, SEQ, TENSOR = 512, 512, 2, 8, 1024, 8, 256, 8
TOKENS = 2 * BATCH * SEQ * D  # bytes of a residual stream in bfloat16
SCRIPT = """
import dataclasses, json, sys
import jax, optax, spmd
from models.llama import LlamaConfig
from partition_rules.llama import LLAMA, LLAMA_SEQUENCE_PARALLEL
from spmd import launch
from spmd.foresight.topology import parse_topology, topology_devices

launch.start(launch.Launch(absent="tpu"))
devices = topology_devices(parse_topology("v5e:2x4"))
vocab, d, layers, heads, d_ff, batch, seq = json.loads(sys.argv[1])
config = dataclasses.replace(LlamaConfig(vocab, d, layers, heads, heads, d_ff), unroll=layers)
model = spmd.from_nnx(config.build)
shapes = {"tokens": "int32", "targets": "int32", "weights": "float32"}
batch = {name: jax.ShapeDtypeStruct((batch, seq), dtype) for name, dtype in shapes.items()}
split = dict(LLAMA_SEQUENCE_PARALLEL.activations)
wrong = dataclasses.replace(LLAMA_SEQUENCE_PARALLEL, activations=split | {"mlp_input": split["residual"]})
for file, rules in zip(sys.argv[2:], (LLAMA, LLAMA_SEQUENCE_PARALLEL, wrong)):
    plan = spmd.make_plan(spmd.make_mesh(devices=devices, tensor=8), rules, model, optax.sgd(1.0), precision="bf16")
    compiled = spmd.make_train_step(plan, spmd.next_token_loss(model)).compile(batch)
    with open(file, "w") as out:
        out.write(compiled.as_text())
"""


@pytest.fixture(scope="module")
def audits(tmp_path_factory) -> dict[str, CollectiveAudit]:
    """The step on eight chips that are not here, with and without sequence parallelism."""
    assert importlib.util.find_spec("libtpu"), "the TPU compiler is missing: pip install 'spmd[tpu]'"
    folder = tmp_path_factory.mktemp("programs")
    files = {name: folder / f"{name}.txt" for name in ("tensor", "sequence", "wrong")}
    sizes = json.dumps([VOCAB, D, LAYERS, HEADS, D_FF, BATCH, SEQ])
    command = [sys.executable, "-c", SCRIPT, sizes, *map(str, files.values())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    mesh = abstract_mesh(MeshShape(tensor=TENSOR))
    return {name: audit_collectives(file.read_text(), mesh, backend="tpu") for name, file in files.items()}


def of_layers(audit: CollectiveAudit) -> dict[tuple[str, str], int]:
    """(Kind, direction) → how many collectives of whole residual streams the layers have."""
    found: dict[tuple[str, str], int] = {}
    for r in audit.records:
        if r.payload == TOKENS and "layers.py" in r.source:
            direction = "backward" if "transpose(jvp" in r.op_name else "forward"
            found[r.kind, direction] = found.get((r.kind, direction), 0) + r.executions
    return found


@pytest.mark.slow
def test_tensor_parallel_communication_is_the_published_minimum(audits):
    """In each layer two all-reduces forward and two backward, and nothing else (arXiv:1909.08053, section 3)."""
    assert of_layers(audits["tensor"]) == {
        ("all-reduce", "forward"): 2 * LAYERS,
        ("all-reduce", "backward"): 2 * LAYERS,
    }


@pytest.mark.slow
def test_sequence_parallel_communication_is_as_published(audits):
    """Each all-reduce is a reduce-scatter and an all-gather, which on a ring move as much; and tokens, which are kept
    split, are gathered again for the gradients of kernels (arXiv:2205.05198, section 4.2.2)."""
    assert of_layers(audits["sequence"]) == {
        ("all-gather", "forward"): 2 * LAYERS,
        ("reduce-scatter", "forward"): 2 * LAYERS,
        ("all-gather", "backward"): 2 * LAYERS + 2 * LAYERS,
        ("reduce-scatter", "backward"): 2 * LAYERS,
    }


@pytest.mark.slow
def test_control_a_wrong_table_moves_more(audits):
    """Where a table leaves the input of the MLP split by tokens, kernels travel instead; the counts above notice."""
    assert of_layers(audits["wrong"]) != of_layers(audits["sequence"])
    assert [r for r in audits["wrong"].records if r.kind == "all-gather" and "mlp" in r.array]
    for name in ("tensor", "sequence"):
        assert not [r for r in audits[name].records if r.kind == "all-gather" and "kernel" in r.array]
