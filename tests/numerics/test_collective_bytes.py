"""What a step moves equals what the theory of its layout says, within 1 %, in the optimised program of 8 devices.

Ψ is the number of parameters: Ψ = kernels + embedding + norm scales. Bytes are float32, as one
device sees them: an all-gather's result, a reduce-scatter's operand, an all-reduce's operand twice.

| layout | source |
|---|---|
| data parallel | one all-reduce of the gradients, 2 Ψ (Rajbhandari et al., arXiv:1910.02054, section 7.1) |
| ZeRO 1 | the same, and the updated parameters gathered once (section 7.2: Pos) |
| ZeRO 2 | gradients reduce-scattered, the updated parameters gathered once: Ψ + Ψ (section 7.2.1: Pos+g) |
| ZeRO 3 | gathered forward, and again backward under remat; gradients reduce-scattered: 3 Ψ (section 7.2.2: Pos+g+p) |
| tensor parallel | in a layer 2 all-reduces of [batch, seq, d] forward, 2 backward (Shoeybi et al., arXiv:1909.08053) |
| the same, split | each is an all-gather and a reduce-scatter; 2 gathers more (Korthikanti et al., arXiv:2205.05198) |

Where this framework differs by decision (docs/decisions/0001): the embedding is looked up by
columns, so over `fsdp` tokens are gathered and rows exchanged, once in each direction, and its
gradient needs no sum.
"""

import json
from pathlib import Path

import pytest

from spmd.analysis.collective_audit import CollectiveAudit, audit_collectives, expect_collectives
from spmd.sharding.mesh import MeshShape, abstract_mesh
from tests.programs import run_script
from tests.tiers import soak_but

VOCAB, D, LAYERS, HEADS, D_FF, BATCH, SEQ = 512, 128, 2, 8, 256, 16, 32
F32 = 4

EMBEDDING = VOCAB * D
HEAD = D * VOCAB
LAYER = 4 * D * D + 3 * D * D_FF  # as many key and value heads as query heads
KERNELS = LAYERS * LAYER + HEAD
NORMS = (2 * LAYERS + 1) * D
PARAMETERS = EMBEDDING + KERNELS + NORMS

ACTIVATION = BATCH * SEQ * D  # [batch, seq, d] of all devices together
TOKENS = BATCH * SEQ  # int32, so 4 bytes each as well
EXCHANGE = 2 * ACTIVATION // 8  # a device's rows of the embedding, there and back

LAYOUTS = {
    "data": ({"data": 8}, {"zero": 0}),
    "zero 1": ({"fsdp": 8}, {"zero": 1}),
    "zero 2": ({"fsdp": 8}, {"zero": 2}),
    "zero 3": ({"fsdp": 8}, {"zero": 3}),
    "zero 3, remat": ({"fsdp": 8}, {"zero": 3, "remat": "full"}),
    "hybrid": ({"data": 2, "fsdp": 4}, {"zero": 3}),
    "tensor": ({"tensor": 8}, {}),
    "tensor, whole stream": ({"tensor": 8}, {"whole": True}),
}

# Kind → axes → numbers of 4 bytes; what is not named does not occur. Norm scales and the loss are
# too small to count.
NOTHING: dict[str, dict[str, int]] = {
    "all_gather": {},
    "all_reduce": {},
    "reduce_scatter": {},
    "all_to_all": {},
}
FORMS = {
    "data": {"all_reduce": {"data": 2 * PARAMETERS}},
    "zero 1": {
        "all_reduce": {"fsdp": 2 * KERNELS},
        # Parameters, and the embedding's gradient: the exchange has summed and split it, and stage
        # 1 wants it whole.
        "all_gather": {"fsdp": KERNELS + EMBEDDING + EMBEDDING + TOKENS},
        "all_to_all": {"fsdp": EXCHANGE},
    },
    "zero 2": {
        "reduce_scatter": {"fsdp": KERNELS},
        "all_gather": {"fsdp": KERNELS + EMBEDDING + TOKENS},
        "all_to_all": {"fsdp": EXCHANGE},
    },
    "zero 3": {
        "reduce_scatter": {"fsdp": KERNELS},
        # what was gathered forward is kept for the backward pass
        "all_gather": {"fsdp": KERNELS + TOKENS},
        "all_to_all": {"fsdp": EXCHANGE},
    },
    "zero 3, remat": {
        "reduce_scatter": {"fsdp": KERNELS},
        "all_gather": {"fsdp": KERNELS + LAYERS * LAYER + TOKENS},
        "all_to_all": {"fsdp": EXCHANGE},
    },
    "hybrid": {
        "reduce_scatter": {"fsdp": KERNELS},
        "all_gather": {"fsdp": KERNELS + TOKENS // 2},
        # each device's shard, across the groups
        "all_reduce": {"data": 2 * (KERNELS + EMBEDDING) // 4},
        "all_to_all": {"fsdp": EXCHANGE},
    },
    "tensor": {
        # In a layer 2 forward and 2 backward, and what was saved split; the head, for its logits
        # and again for its gradient; the embedding's columns, both ways.
        "all_gather": {"tensor": (6 * LAYERS + 2 + 2) * ACTIVATION},
        # In a layer 2 forward and 2 backward: one behind all kernels that have the same input; the
        # head.
        "reduce_scatter": {"tensor": ((2 + 2) * LAYERS + 1) * ACTIVATION},
        # Three numbers of each token for the softmax, and for each norm one forward and two
        # backward.
        "all_reduce": {"tensor": 2 * (3 + 3 * (2 * LAYERS + 1)) * TOKENS},
    },
    "tensor, whole stream": {
        # In a layer 2 forward and 2 backward, once behind the head, and three numbers of each token
        # for the softmax.
        "all_reduce": {"tensor": 2 * ((4 * LAYERS + 1) * ACTIVATION + 3 * TOKENS)},
        "all_gather": {"tensor": ACTIVATION},  # columns of the embedding
    },
}

SCRIPT = """
import dataclasses, json, sys
import jax
import spmd
from spmd.models.decoder import DecoderConfig
from spmd.partition_rules.llama import LLAMA

spmd.simulate_devices(8)
vocab, d, layers, heads, d_ff, batch, seq = json.loads(sys.argv[1])
optimizer = spmd.make_optimizer(spmd.OptimizerConfig(learning_rate=1e-3, schedule="constant"), steps=1)
marks = dict(LLAMA.activations)
whole_stream = dataclasses.replace(LLAMA, activations=marks | {"residual": marks["mlp_input"]})
shapes = {"tokens": "int32", "targets": "int32", "weights": "float32"}
for file, (mesh, options) in json.loads(sys.argv[2]).items():
    unroll = layers if options.get("remat", "none") == "none" else 1
    config = dataclasses.replace(DecoderConfig(vocab, d, layers, heads, heads, d_ff), unroll=unroll)
    model = spmd.from_nnx(config.build)
    rules = whole_stream if options.pop("whole", False) else LLAMA
    plan = spmd.make_plan(spmd.make_mesh(**mesh), rules, model, optimizer, **options)
    step = spmd.make_train_step(plan, spmd.next_token_loss(model))
    compiled = step.compile({name: jax.ShapeDtypeStruct((batch, seq), dtype) for name, dtype in shapes.items()})
    with open(file, "w") as out:
        out.write(compiled.as_text())
"""


IN_CI = ("data", "zero 1", "zero 3", "zero 3, remat", "tensor", "tensor, whole stream")


@pytest.fixture(scope="module")
def audits(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, CollectiveAudit]:
    """The layouts of this run of tests, compiled with all optimisations in one process of its own."""
    folder = tmp_path_factory.mktemp("programs")
    wanted = {item.callspec.params["name"] for item in request.session.items if _is_row(item)}
    names = wanted.union(IN_CI)
    files = {name: str(folder / f"{number}.txt") for number, name in enumerate(sorted(names))}
    sizes = json.dumps([VOCAB, D, LAYERS, HEADS, D_FF, BATCH, SEQ])
    layouts = json.dumps({file: LAYOUTS[name] for name, file in files.items()})
    run_script(SCRIPT, sizes, layouts, XLA_FLAGS="")
    return {
        name: audit_collectives(
            Path(file).read_text(), abstract_mesh(MeshShape(**LAYOUTS[name][0])), backend="cpu"
        )
        for name, file in files.items()
    }


def _is_row(item: pytest.Item) -> bool:
    """Whether a test is of one layout of this file."""
    return item.path == Path(__file__) and hasattr(item, "callspec")


def expected(name: str) -> dict[str, dict[str, int]]:
    """The closed form of a layout in bytes."""
    forms = NOTHING | FORMS[name] | {"collective_permute": {}}
    return {
        kind: {axes: F32 * numbers for axes, numbers in form.items()}
        for kind, form in forms.items()
    }


@pytest.mark.parametrize("name", soak_but(LAYOUTS, *IN_CI))
def test_bytes_are_the_closed_form(name: str, audits: dict[str, CollectiveAudit]) -> None:
    """Each collective moves, over exactly the axes that theory says, its bytes within 1 %."""
    expect_collectives(audits[name], tolerance=0.01, **expected(name))


@pytest.mark.parametrize("name", soak_but(LAYOUTS, *IN_CI))
def test_control_another_layout_is_caught(name: str, audits: dict[str, CollectiveAudit]) -> None:
    """No layout passes for another one."""
    for other, audit in audits.items():
        if other != name:
            with pytest.raises(AssertionError, match="not as expected"):
                expect_collectives(audit, tolerance=0.01, **expected(name))


def test_control_two_percent_are_caught(audits: dict[str, CollectiveAudit]) -> None:
    """A program that moves 2 % more than expected fails."""
    gathered = {
        axes: round(bytes_ / 1.02) for axes, bytes_ in expected("zero 3")["all_gather"].items()
    }
    with pytest.raises(AssertionError, match="all-gather over fsdp"):
        expect_collectives(audits["zero 3"], all_gather=gathered)


def test_what_cpu_writes_otherwise_is_stated(audits: dict[str, CollectiveAudit]) -> None:
    """The partitioner's reduce-scatters are all-reduces in XLA:CPU's text, those of gradients are asked for.

    Records say so. Of q, k and v there is one sum, so no all-reduces are added.
    """
    assert {r.hlo_form for r in audits["zero 3"].records if r.kind == "reduce-scatter"} == {""}
    scattered = [
        r
        for r in audits["tensor"].records
        if r.kind == "reduce-scatter" and "lm_head" not in r.source
    ]
    assert scattered
    assert {r.hlo_form for r in scattered} == {"all-reduce"}
    assert "reduce-scatter is written as all-reduce" in str(audits["tensor"])
    whole = audits["tensor, whole stream"].records
    assert not [r for r in whole if "added" in r.hlo_form and r.payload >= F32 * ACTIVATION]


def test_every_kernel_is_told_by_its_path(audits: dict[str, CollectiveAudit]) -> None:
    """Under ZeRO 3 each gathered and each scattered array is named as the parameter it belongs to."""
    names = {f"attention/{x}_proj" for x in "qkvo"} | {
        f"mlp/{x}_proj" for x in ("gate", "up", "down")
    }
    kernels = {f"params/layers/{name}/kernel" for name in names} | {"params/lm_head/kernel"}
    records = audits["zero 3"].records
    assert {r.array for r in records if r.kind == "reduce-scatter"} == kernels
    assert {r.array for r in records if r.kind == "all-gather"} == kernels | {"batch/tokens"}
    assert {r.executions for r in records} == {1}
    assert {r.executions for r in audits["zero 3, remat"].records if "layers/mlp" in r.array} == {
        LAYERS
    }
    assert not [warning for audit in audits.values() for warning in audit.warnings]
