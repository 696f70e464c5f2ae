"""What all stages use is stored by each of them in part: bytes of the plan, and what cannot be divided."""

import dataclasses

import pytest
from jax.sharding import PartitionSpec as P

from spmd.errors import RuleError
from spmd.models.decoder import decoder_rules
from spmd.models.gpt2 import PRESETS as GPT2S
from spmd.partition_rules.llama import LLAMA, LLAMA_TIED
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.sharding.mesh import MeshShape, abstract_mesh
from tests import tiny

WHOLE = {"embed/embedding": P(None, ("fsdp", "tensor")), "lm_head/kernel": P("fsdp", "tensor")}
TABLES = ("params", "gradients", "optimizer_state")


def shared_bytes(rules, config, zero=3, **axes):
    """Bytes on a device of the arrays of embedding and head, by table."""
    plan = make_plan(
        abstract_mesh(MeshShape(**axes)), rules, tiny.model(config), tiny.OPTIMIZER, zero=zero
    )
    ends = tuple(WHOLE)
    return [
        sum(e.bytes_per_device for e in getattr(plan, table) if e.path.endswith(ends))
        for table in TABLES
    ]


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_stores_its_part(tied, zero):
    """Parameters, gradients and moments of embedding and head take a pipe-th; those of a table without pipe all."""
    config, rules = tiny.replaced(layers=4, tied=tied), LLAMA_TIED if tied else LLAMA
    alone = shared_bytes(rules, config, zero, fsdp=2, tensor=2)
    assert shared_bytes(rules, config, zero, pipe=4, fsdp=2, tensor=2) == [
        size // 4 for size in alone
    ]
    table = dataclasses.replace(
        rules, params=[(name, WHOLE.get(name, spec)) for name, spec in rules.params]
    )
    assert shared_bytes(table, config, zero, pipe=4, fsdp=2, tensor=2) == alone, "the control"


def test_a_vocabulary_that_does_not_divide():
    """The error has the arithmetic; GPT-2's own vocabulary divides by nothing, and its columns are split."""
    config = tiny.replaced(vocab=63, layers=4)
    with pytest.raises(RuleError) as caught:
        shared_bytes(LLAMA, config, pipe=2)
    assert "embed/embedding: rule 'embed/embedding' cannot split dimension 0 of (63, 32)" in str(
        caught.value
    )
    assert "63 / (pipe=2) = 31.5" in str(caught.value)
    rules = decoder_rules(GPT2S["gpt2"])
    model = from_nnx(GPT2S["gpt2"].build)
    plan = make_plan(abstract_mesh(MeshShape(pipe=4, fsdp=2)), rules, model, tiny.OPTIMIZER)
    (embedding,) = (entry for entry in plan.params if entry.path == "embed/embedding")
    assert embedding.bytes_per_device == 4 * 50_257 * 768 // 8
