"""A stage with nothing to do computes nothing: read from compiled programs, and counted while one runs."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd.analysis import hlo
from spmd.gradients.losses import ModelLoss
from spmd.model_interface.grad_transform import Carry
from spmd.model_interface.model import LayeredModel, Model, Outputs
from spmd.pipeline import executor as engine
from spmd.pipeline.grad_fn import pipeline
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.tick_table import TickTable, tabulate
from spmd.plan.context import use_plan
from spmd.plan.plan import make_plan
from spmd.sharding.rules import Rules, replicate
from spmd.training.state import init_state
from tests import tiny
from tests.programs import run_script

WIDTH = 4


class Guard(NamedTuple):
    """A conditional on the way to an instruction."""

    computation: str
    conditional: hlo.Instruction
    others: tuple[str, ...]  # the branches that are not on the way


def is_matmul(instruction: hlo.Instruction) -> bool:
    return instruction.opcode in ("dot", "convolution") or "matmul" in instruction.attribute(
        r'custom_call_target="(.*?)"'
    )


def matmuls(
    program: hlo.HloModule, name: str, guards: tuple[Guard, ...] = ()
) -> Iterator[tuple[str, tuple[Guard, ...]]]:
    """Every matrix multiplication that a computation leads to, with the conditionals on the way."""
    for instruction in program.computations[name].instructions.values():
        if is_matmul(instruction):
            yield instruction.name, guards
        callees = [callee for _, callee in instruction.callees()]
        for callee in callees:
            on_the_way = guards
            if instruction.opcode == "conditional":
                others = tuple(other for other in callees if other != callee)
                on_the_way = (*guards, Guard(name, instruction, others))
            yield from matmuls(program, callee, on_the_way)


def sources(program: hlo.HloModule, value: hlo.HloValue) -> Iterator[tuple[str, hlo.HloArray]]:
    """Where a value comes from, at the ends of all ways: what it is, and its type."""
    todo, seen = [value], set()
    while todo:
        value = program.producer(todo.pop())
        if value in seen:
            continue
        seen.add(value)
        instruction = program.at(value)
        if instruction.operands:
            todo += [hlo.HloValue(value.computation, operand) for operand in instruction.operands]
        else:
            yield instruction.opcode, instruction.arrays[value.element or 0]


def is_own_row(program: hlo.HloModule, guard: Guard, tables: TickTable) -> bool:
    """Whether a conditional asks a table, at a place that depends on the device, and no other array."""
    found = list(sources(program, hlo.HloValue(guard.computation, guard.conditional.operands[0])))
    size = tables.ticks * tables.stages
    table = any(array.dtype == "s32" and array.size == size for _, array in found)
    device = any(opcode == "partition-id" for opcode, _ in found)
    return table and device and not any(array.dtype.startswith(("f", "bf")) for _, array in found)


def tick_loops(program: hlo.HloModule) -> list[str]:
    """The bodies of the loops that send something to a neighbour."""
    return [
        dict(instruction.callees())["body"]
        for computation in program.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "while" and sends(program, dict(instruction.callees())["body"])
    ]


def sends(program: hlo.HloModule, name: str) -> bool:
    return any(
        instruction.opcode.startswith("collective-permute")
        or any(sends(program, to) for _, to in instruction.callees())
        for instruction in program.computations[name].instructions.values()
    )


def find_unguarded(text: str, tables: TickTable) -> tuple[list[str], int]:
    """The matrix multiplications that a stage does not only do when its own row says so, and how many there are."""
    program = hlo.parse(text)
    (loop,) = tick_loops(program)
    inside = list(matmuls(program, loop))
    unguarded = [
        name
        for name, guards in inside
        if not any(
            is_own_row(program, guard, tables)
            and not any(any(matmuls(program, other)) for other in guard.others)
            for guard in guards
        )
    ]
    assert len(inside) == len(list(matmuls(program, program.entry))), (
        "there are some outside of the loop"
    )
    return unguarded, len(inside)


SCHEDULE = ("interleaved", 2, 2, 2)
OPTIMISED = """
import json, sys, spmd
spmd.simulate_devices(8)
from spmd.pipeline.tick_table import tabulate
from spmd.pipeline.grad_fn import pipeline
from spmd.pipeline.schedules import make_schedule
from spmd.training.step import make_train_step
from spmd.testing import token_batches
from tests import tiny
config = tiny.replaced(layers=4)
grad_fn = pipeline(tiny.loss_fn(config), tabulate(make_schedule(*json.loads(sys.argv[1]))))
step = make_train_step(tiny.plan(config, pipe=2, tensor=2), grad_fn=grad_fn)
print(json.dumps(step.compile(token_batches((2, 16), config.vocab, steps=1)[0]).as_text()))
"""


@pytest.mark.soak
def test_idle_stages_multiply_nothing() -> None:
    """In a Llama's optimised step, every matrix multiplication is in a branch that the stage's row chooses, beside one
    that has none; no others are in the program but those of the head, in a branch that all stages take alike."""
    text = run_script(OPTIMISED, json.dumps(SCHEDULE))
    unguarded, count = find_unguarded(text, tabulate(make_schedule(*SCHEDULE)))
    (loop,) = tick_loops(hlo.parse(text))
    of_head = {
        name
        for name, guards in matmuls(hlo.parse(text), loop)
        if any("/pipeline_head/" in guard.conditional.op_name for guard in guards)
    }
    assert set(unguarded) == of_head
    assert len(of_head) == 3
    assert count >= 7 * 3 + 3, "a block has seven kernels: forward and two backward; then the head"


@dataclasses.dataclass(frozen=True)
class Toy:
    """A few layers whose function is given, with what enters multiplied by one number: `batch` is `[microbatches, 4]`.

    Args:
        table: Of one layer for each group.
        layer: `(x, weights) -> x`, for weights `[4, 4]` of which every one of layer l is l.
    """

    table: TickTable
    layer: Any

    def compile(self) -> tuple[jax.stages.Compiled, tuple[Any, ...]]:
        """The gradients, and what to call them with."""
        table, count = self.table, self.table.stages * self.table.chunks
        weights = np.arange(count, dtype=np.float32)[:, None, None] * np.ones(
            (WIDTH, WIDTH), np.float32
        )
        model = Model(
            lambda key: {"scale": jnp.ones(WIDTH), "layers": {"kernel": jnp.asarray(weights)}},
            lambda params, x: None,
            layered=self.layered,
        )
        small = replicate("a toy")
        rules = Rules([("scale", small), ("kernel", small)], [], stacked={"layers": "pipe"})
        plan = make_plan(tiny.mesh(pipe=table.stages), rules, model, optax.identity())
        grad_fn = pipeline(
            ModelLoss(model, lambda batch: (batch["x"],), self.sums, additive=True), table
        )

        def gradients(params: Any, batch: Any, key: jax.Array) -> Any:
            with use_plan(plan):
                return grad_fn(params, Carry(), batch, key)[:2]

        x = np.arange(table.microbatches, dtype=np.float32)[:, None] * np.ones(WIDTH, np.float32)
        arguments = init_state(plan, seed=0).params, jax.device_put({"x": x}), jax.random.key(0)
        return jax.jit(gradients).lower(*arguments).compile(), arguments

    def layered(self) -> LayeredModel:
        """The model in parts."""

        def apply_layers(
            params: Any, variables: Any, x: jax.Array, context: None, *, train: bool
        ) -> Any:
            layer = lambda x, kernel: (self.layer(x, kernel), jnp.zeros(()))  # noqa: E731
            return jax.lax.scan(layer, x, params["layers"]["kernel"]), variables

        return LayeredModel(
            lambda params, variables, key, x, train: ((x * params["scale"][None], None), variables),
            apply_layers,
            lambda params, variables, x, values, train: (x, variables),
        )

    def sums(self, outputs: Outputs, batch: Any) -> Any:
        return {"loss": outputs.logits.sum(), "weight": jnp.float32(outputs.logits.size)}


def mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both branches of every conditional are computed, and one of the results is taken."""

    def both(predicate: jax.Array, yes: Any, no: Any, *operands: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(predicate, a, b), yes(*operands), no(*operands))

    monkeypatch.setattr(engine, "cond", both)


def follow_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage reads the row of the first."""
    monkeypatch.setattr(jax.lax, "axis_index", lambda axis: jnp.int32(0))


@pytest.mark.parametrize("break_it", [None, mask, follow_the_first])
def test_idle_stages_control(break_it: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick that masks instead of choosing, or chooses by another stage's row, is reported: each multiplication."""
    if break_it:
        break_it(monkeypatch)
    table = tabulate(make_schedule("1f1b", 4, 4))
    compiled, _ = Toy(table, lambda x, kernel: jnp.tanh(x @ kernel)).compile()
    unguarded, count = find_unguarded(compiled.as_text() or "", table)
    assert count >= 2, "forward and backward"
    assert len(unguarded) == (count if break_it else 0)


def count_calls(table: TickTable) -> Counter[tuple[str, int, int]]:
    """How often a layer runs: ("forward" or "backward", microbatch, layer) → calls."""
    calls: Counter[tuple[str, int, int]] = Counter()

    def record(way: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
        def host(i: Any, layer: Any) -> np.ndarray:
            calls[way, int(i), int(layer)] += 1
            return np.zeros((), np.float32)

        # The result is needed, so that the call is not dead code.
        return jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.float32), x[0, 0], kernel[0, 0])

    @jax.custom_vjp
    def layer(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return x + record("forward", x, kernel)

    def forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, Any]:
        return layer(x, kernel), (x, kernel)

    def backward(kept: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, kernel = kept
        return dy + record("backward", x, kernel), jnp.zeros_like(kernel)

    layer.defvjp(forward, backward)
    compiled, arguments = Toy(table, layer).compile()
    jax.block_until_ready(compiled(*arguments))
    return calls


def expected_calls(table: TickTable) -> Counter[tuple[str, int, int]]:
    """A task is a call. Where inputs are kept, a backward task is two: forward again, and backward; and the last group
    has no forward task."""
    groups = table.stages * table.chunks
    calls: Counter[tuple[str, int, int]] = Counter()
    for i in range(table.microbatches):
        for group in range(groups):
            again = not table.saved_depth and group + 1 < groups
            calls["forward", i, group] = 1 + again
            calls["backward", i, group] = 1
    return calls


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "schedule",
    [("gpipe", 2, 3), ("1f1b", 4, 5), ("interleaved", 2, 4, 2)],
    ids=lambda schedule: schedule[0],
)
def test_calls(schedule: tuple[Any, ...], recompute: bool) -> None:
    """Every microbatch goes through every layer once forward, once again if inputs are kept, and once backward."""
    table = tabulate(make_schedule(*schedule), recompute=recompute)
    assert count_calls(table) == expected_calls(table)


def test_calls_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ticks are masked, layers run in idle ones too; and one microbatch less makes other counts."""
    mask(monkeypatch)
    table = tabulate(make_schedule("1f1b", 2, 3))
    calls = count_calls(table)
    assert calls.total() == table.stages * table.ticks * 2 > expected_calls(table).total()
    fewer = tabulate(make_schedule("1f1b", 2, 2))
    assert expected_calls(fewer) != expected_calls(table)
