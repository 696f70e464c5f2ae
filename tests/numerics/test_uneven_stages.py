"""Stages of unequal numbers of layers: where layers are stored, and their move to the stages and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd.analysis.collective_audit import audit_collectives
from spmd.errors import ConfigError
from spmd.pipedream.grad_fn import InFlight
from spmd.pipeline.grad_fn import pipeline
from spmd.pipeline.layer_split import LayerSplit
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.tick_table import tabulate
from spmd.plan.communication import gathers
from spmd.plan.context import use_plan
from spmd.plan.plan import make_plan
from spmd.testing import token_batches
from spmd.training.step import make_train_step
from tests import tiny

LAYERS = 5
CONFIG = tiny.replaced(layers=LAYERS)
KERNEL = "layers/mlp/up_proj/kernel"
SCALE = "layers/mlp_norm/scale"


@pytest.fixture(scope="module")
def plan():
    return tiny.plan(CONFIG, pipe=2, fsdp=2, tensor=2)


def test_layers_are_stored_over_pipe_along_another_dimension(plan):
    """After the axes of the row; all of the state is 1 / pipe of what it is without a pipeline, but for scales."""
    specs = {entry.path: entry.spec for entry in plan.params}
    assert specs[KERNEL] == P(None, ("fsdp", "sequence", "pipe"), "tensor")
    assert specs["layers/mlp/down_proj/kernel"] == P(None, "tensor", ("fsdp", "sequence", "pipe"))
    assert specs[SCALE] == P(None)
    whole = tiny.plan(CONFIG, fsdp=2, tensor=2)
    for mine, other in zip(plan.params, whole.params, strict=True):
        parts = 1 if mine.path.endswith("scale") else 2
        assert mine.bytes_per_device * parts == other.bytes_per_device


@pytest.mark.parametrize("chunks", [1, 2])
def test_layers_move_to_their_stages_and_back(plan, chunks):
    """Each row of a stage is its layer; a gradient is moved back to where its layer is stored."""
    split = LayerSplit.of(LAYERS, 2, chunks)
    whole = {KERNEL: (LAYERS, 8, 4), SCALE: (LAYERS, 8)}
    layers = {"layers": {"mlp": {"up_proj": {}}, "mlp_norm": {}}}
    values = {path: np.arange(np.prod(shape)).reshape(shape) for path, shape in whole.items()}
    layers["layers"]["mlp"]["up_proj"]["kernel"] = jnp.float32(values[KERNEL])
    layers["layers"]["mlp_norm"]["scale"] = jnp.float32(values[SCALE])

    @jax.jit
    def there_and_back(layers):
        with use_plan(plan):
            staged = split.to_stages(layers)
            used = jax.tree.map(lambda x: x * (row_numbers(x) >= 0), staged)
            return staged, split.from_stages(used)

    def row_numbers(x):
        return jnp.asarray(split.rows.reshape(-1, *[1] * (x.ndim - 1)))

    staged, back = there_and_back(layers)
    rows = split.rows.reshape(-1)
    for place, layer in enumerate(rows):
        if layer >= 0:
            kernel = staged["layers"]["mlp"]["up_proj"]["kernel"][place]
            np.testing.assert_array_equal(kernel, values[KERNEL][layer])
    jax.tree.map(np.testing.assert_array_equal, back, layers)
    # The control: rows of another stage are other layers.
    other = np.roll(rows, split.most)
    moved = np.asarray(staged["layers"]["mlp_norm"]["scale"])
    assert not np.array_equal(moved[other >= 0], values[SCALE][other[other >= 0]])


def test_numbers_of_layers():
    """As equal as possible, the last stages with one layer less; published 405B has 126."""
    assert LayerSplit.of(126, 8, 1).counts == (16,) * 6 + (15,) * 2
    assert LayerSplit.of(126, 16, 1).counts == (8,) * 14 + (7,) * 2
    split = LayerSplit.of(7, 2, 2)
    assert split.counts == (2, 2, 2, 1)
    # Chunks alternate between the stages.
    np.testing.assert_array_equal(split.rows, [[[0, 1], [4, 5]], [[2, 3], [6, -1]]])


def test_layers_are_exchanged_once_a_step(plan):
    """Three rows for each stage of a device's shard of each kernel, and as many of its gradient."""
    table = tabulate(make_schedule("1f1b", 2, 2))
    (batch,) = token_batches((8, 16), CONFIG.vocab, steps=1)
    step = make_train_step(plan, grad_fn=pipeline(tiny.loss_fn(CONFIG), table))
    audit = audit_collectives(step.compile(batch), plan.mesh, taken=table.taken, plan=plan)
    moves = []
    for record in audit.records:
        if record.axes == ("pipe",) and record.kind == "all-to-all":
            moves.append(record)
    exchanged = 0
    for entry in plan.params:
        if entry.path.startswith("layers/") and entry.path.endswith("kernel"):
            exchanged += 2 * entry.bytes_per_device // LAYERS * 6
    assert sum(record.bytes for record in moves) == exchanged
    assert all("layers to their stages" in record.op_name for record in moves)
    # The branch of the longer stage's last layer is known to be taken.
    assert not [record for record in audit.records if record.is_conditional]


def test_layers_are_gathered_as_in_equal_stages():
    """The plan counts the same gathers over `fsdp`, of as many elements for each layer."""
    sent = {}
    for layers in (4, 5):
        config = tiny.replaced(layers=layers)
        for transfer in gathers(tiny.plan(config, pipe=2, fsdp=2, tensor=2)):
            what = transfer.axes, transfer.dtype, transfer.elements / layers
            sent.setdefault(layers, {})[transfer.path] = what
    assert KERNEL in sent[4]
    assert sent[5] == sent[4]


def test_a_plans_table_fits_another_mesh(plan):
    """Where `pipe` divides the layers, they are stored as its stages have them."""
    other = make_plan(tiny.mesh(fsdp=2), plan.rules, plan.model, plan.optimizer)
    specs = {entry.path: entry.spec for entry in other.params}
    assert specs[KERNEL][0] == "pipe"
    assert not other.rules.over_stages


def test_weights_of_the_batch_before_have_no_other_storage(plan):
    """PipeDream keeps them by stages, and says what to do."""
    schedule = make_schedule("pipedream", 2, 4)
    (batch,) = token_batches((8, 16), CONFIG.vocab, steps=1)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
    with pytest.raises(ConfigError, match=r"5 / \(pipe=2\).*\n.*a multiple of 2, or a schedule"):
        plan.with_transforms(InFlight.of(tiny.loss_fn(CONFIG), tabulate(schedule), shapes))
