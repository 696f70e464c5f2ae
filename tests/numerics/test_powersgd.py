"""PowerSGD: exact where it must be, what is lost comes back, replicas agree, and the bytes are those of the formula.

The model's gradient is known: of each layer, the sum of the outer products of its examples' `x` and
`y`.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from spmd import tree
from spmd.analysis.collective_audit import audit_collectives
from spmd.checkpoint.manager import CheckpointManager
from spmd.checkpoint.tree import OptionalState
from spmd.errors import CheckpointError, ConfigError
from spmd.gradients.base import value_and_grad
from spmd.gradients.deferred_reduction import defer_grad_reduction
from spmd.plan.communication import reductions
from spmd.plan.scopes import BEFORE_START
from spmd.powersgd import transform as powersgd
from spmd.powersgd.transform import PowerSGD, Replicas
from spmd.sharding.mesh import BATCH_AXES
from spmd.training.state import as_stored, from_stored
from spmd.training.step import TrainStep
from tests import tiny

LAYERS, N, M, EXAMPLES = 2, 16, 12, 16
OPTIONAL = [OptionalState("variables/compression", PowerSGD(2).targets, PowerSGD(2).adapt)]
RULES = spmd.Rules(
    params=[("kernel", P("fsdp")), ("bias", spmd.replicate("twelve numbers"))],
    stacked={"layers": None},
)
SGD = optax.sgd(0.1)
NEAR = 1e-5
"""Of the largest gradient: float32 sums, and products of matrices whose singular values differ a hundredfold."""


def init(key: jax.Array) -> Any:
    return {"layers": {"kernel": jax.random.normal(key, (LAYERS, N, M))}, "bias": jnp.ones((M,))}


MODEL = spmd.Model(
    init, lambda params, x, y: jnp.einsum("bln,lnm,blm->b", x, params["layers"]["kernel"], y)
)


def loss_fn(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Any, Any]:
    loss = MODEL.apply(params, batch["x"], batch["y"]).sum() + (batch["y"] @ params["bias"]).sum()
    return {"loss": loss, "weight": jnp.float32(batch["x"].shape[0])}, variables


@functools.cache
def step(rank: int, rate: float = 2.0, slices: int = 1, data: int = 4) -> TrainStep:
    """The step that is compressed; with rank 0, the plain one."""
    mesh = tiny.mesh(data=data, fsdp=2)
    plain = spmd.make_plan(mesh, RULES, MODEL, SGD)
    grad_fn = value_and_grad(loss_fn)
    if not rank:
        return spmd.make_train_step(
            plain, grad_fn=defer_grad_reduction(grad_fn, ("data",)), keep_gradients=True
        )
    plan = plain.with_transforms(PowerSGD(rank, slices, rate))
    return spmd.make_train_step(plan, grad_fn=grad_fn, keep_gradients=True)


def batch(seed: int, rank: int = EXAMPLES) -> dict[str, np.ndarray]:
    """Examples whose mean gradient has a rank; devices have others, which cancel over `data`."""
    random = np.random.default_rng(seed)
    x, y = random.normal(size=(EXAMPLES, LAYERS, N)), random.normal(size=(EXAMPLES, LAYERS, M))
    if rank < EXAMPLES:
        x[: EXAMPLES // 2], y[: EXAMPLES // 2] = x[EXAMPLES // 2 :], -y[EXAMPLES // 2 :]
        for example in range(rank):
            y[example] = random.normal(size=(LAYERS, M))
            y[example + EXAMPLES // 2] = 0
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def mean_gradient(examples: dict[str, np.ndarray]) -> np.ndarray:
    return (
        np.einsum("bln,blm->lnm", *(examples[name].astype(np.float64) for name in "xy")) / EXAMPLES
    )


def applied(metrics: Any) -> np.ndarray:
    return np.asarray(metrics["gradients"]["layers"]["kernel"], np.float64)


def error(state: Any) -> np.ndarray:
    return np.asarray(state.transforms["compression"]["error"]["layers"]["kernel"], np.float64)


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def run(made: TrainStep, batches: list[Any], state: Any = None) -> tuple[Any, list[np.ndarray]]:
    state, gradients = spmd.init_state(made.plan) if state is None else state, []
    for examples in batches:
        state, metrics = made(state, examples)
        gradients.append(applied(metrics))
    return state, gradients


@pytest.mark.parametrize(("rank", "is_exact"), [(2, True), (3, False)])
def test_a_mean_gradient_of_low_rank_is_exact(rank: int, is_exact: bool) -> None:
    """Gradients of devices have full rank; what cancels is not seen. The control has a rank above that of PowerSGD."""
    examples = batch(0, rank)
    _, (found,) = run(step(2), [examples])
    assert (distance(found, mean_gradient(examples)) < NEAR) == is_exact


@pytest.mark.parametrize("slices", [1, 2])
def test_what_is_lost_comes_back(slices: int) -> None:
    """Of several steps, the applied and the mean of the last errors add up to the mean gradients."""
    batches = [batch(seed) for seed in range(3)]
    state, found = run(step(2, slices=slices), batches)
    wanted = sum(map(mean_gradient, batches))
    assert distance(sum(found) + error(state).mean(axis=0), wanted) < NEAR
    assert distance(sum(found), wanted) > 0.1


def test_the_control_loses_something() -> None:
    """Without the errors of the step before, the sums differ."""
    made, batches = step(2), [batch(seed) for seed in range(2)]
    state, first = run(made, batches[:1])
    transforms = jax.tree.map(lambda x: x, state.transforms)
    transforms["compression"]["error"] = jax.tree.map(
        jnp.zeros_like, transforms["compression"]["error"]
    )
    state, second = run(made, batches[1:], dataclasses.replace(state, transforms=transforms))
    found = sum(first) + sum(second) + error(state).mean(axis=0)
    assert distance(found, sum(map(mean_gradient, batches))) > 0.1


@pytest.mark.parametrize(("rank", "is_exact"), [(8, True), (6, False)])
def test_full_rank_is_the_plain_exchange(rank: int, is_exact: bool) -> None:
    """Shards are 8 × 12; with fewer than 8 columns, the control, something is lost."""
    batches = [batch(seed) for seed in range(2)]
    found, plain = (run(made, batches)[1] for made in (step(rank, 0.0), step(0)))
    assert all(
        distance(x, y) < NEAR for x, y in zip(plain, map(mean_gradient, batches), strict=True)
    )
    assert all((distance(x, y) < NEAR) == is_exact for x, y in zip(found, plain, strict=True))


def over_both(rank: int, over: tuple[str, ...]) -> np.ndarray:
    """The gradient of a step whose kernel is split over fsdp and sequence, and its errors, added up."""
    table = dataclasses.replace(
        RULES,
        params=[("kernel", P(("fsdp", "sequence"))), RULES.params[1]],
        batch=[("x|y", P(BATCH_AXES, "sequence"))],
    )
    mesh = tiny.mesh(data=2, fsdp=2, sequence=2)
    plan = spmd.make_plan(mesh, table, MODEL, SGD).with_transforms(
        PowerSGD(rank, rate=1.0, axes=over)
    )
    made = spmd.make_train_step(plan, grad_fn=value_and_grad(loss_fn), keep_gradients=True)
    state, (found,) = run(made, [batch(0)])
    return found + error(state).mean(axis=0)


@pytest.mark.parametrize("over", [("data",), ("data", "fsdp")])
def test_parts_of_two_axes_are_not_exchanged(over: tuple[str, ...]) -> None:
    """A gradient is scattered over `sequence` in the step, and over `fsdp` after it or before."""
    assert distance(over_both(1, over), mean_gradient(batch(0))) < NEAR


def test_whole_gradients_before_it_starts() -> None:
    """Two steps are plain, nothing is left over of them, and the third is the first of a run with compression."""
    batches = [batch(seed) for seed in range(4)]
    plan = spmd.make_plan(tiny.mesh(data=4, fsdp=2), RULES, MODEL, SGD)
    later = plan.with_transforms(PowerSGD(2, start=2))
    made = spmd.make_train_step(later, grad_fn=value_and_grad(loss_fn), keep_gradients=True)
    state, first = run(made, batches[:2])
    for found, examples in zip(first, batches, strict=False):
        assert distance(found, mean_gradient(examples)) < NEAR
    assert not np.any(error(state))
    state, then = run(made, batches[2:], state)
    _, compressed = run(step(2), batches[2:])
    for found, expected in zip(then, compressed, strict=True):
        assert distance(found, expected) < NEAR
    assert distance(then[0], mean_gradient(batches[2])) > 0.1, "the control: something is lost"
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batches[0].items()}
    audit = audit_collectives(made.compile(shapes), later.mesh, plan=later)
    assert not audit.broken
    assert any(BEFORE_START in record.op_name for record in audit.records)


def differing_replicas(state: Any) -> set[str]:
    """Paths of arrays of which two devices hold other bits of one part."""
    found = set()
    for path, array in tree.flatten(
        {"params": state.params, "q": state.transforms["compression"]["q"]}
    ).items():
        parts: dict[str, set[bytes]] = {}
        for shard in array.addressable_shards:
            parts.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        found |= {path} if any(len(bits) > 1 for bits in parts.values()) else set()
    return found


def test_replicas_are_bitwise_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters and Q are the same bits on all devices of `data`. Of a mean that is not one, the control, none is."""
    batches = [batch(seed) for seed in range(2)]
    assert differing_replicas(run(step(2), batches)[0]) == set()
    monkeypatch.setattr(Replicas, "mean", lambda self, x: x)
    made = step.__wrapped__(2)
    assert differing_replicas(run(made, batches)[0]) == {"params/layers/kernel", "q/layers/kernel"}


def test_a_zero_gradient_does_not_end_it() -> None:
    """Q is zero after a step without gradients, and the next matrix of low rank is exact all the same."""
    nothing = {name: np.zeros_like(x) for name, x in batch(0).items()}
    state, (zero,) = run(step(2), [nothing])
    assert not zero.any()
    assert not np.asarray(state.transforms["compression"]["q"]["layers"]["kernel"]).any()
    _, (found,) = run(step(2), [batch(1, 2)], state)
    assert distance(found, mean_gradient(batch(1, 2))) < NEAR


def abstract(state: Any) -> Any:
    """The state as checkpoints have it, abstract."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), as_stored(state)
    )


def saved(folder: Path, state: Any) -> CheckpointManager:
    manager = CheckpointManager(folder)
    manager.save(int(state.step), as_stored(state), {})
    manager.wait()
    return manager


def opened(manager: CheckpointManager, wanted: Any) -> Any:
    """The state in a checkpoint, for a plan with or without compression."""
    stored, _ = manager.restore(None, wanted, optional=OPTIONAL)
    has_state = "compression" in stored.variables
    return from_stored(stored, step(2).plan if has_state else step(0).plan)


def bits(state: Any) -> dict[str, bytes]:
    return {path: np.asarray(x).tobytes() for path, x in tree.flatten(state).items()}


def test_a_checkpoint_resumes_bitwise(tmp_path: Path) -> None:
    """With the errors and Q; with fresh ones, the control, the next step differs."""
    made, last = step(2), batch(2)
    state, _ = run(made, [batch(0), batch(1)])
    with saved(tmp_path, state) as manager:
        again = opened(manager, abstract(state))
    fresh = jax.tree.map(
        jnp.copy, dataclasses.replace(again, transforms=spmd.init_state(made.plan).transforms)
    )
    went_on, resumed, differs = (bits(run(made, [last], each)[0]) for each in (state, again, fresh))
    assert resumed == went_on
    assert differs != went_on


def test_fewer_replicas_keep_the_mean_of_the_errors(tmp_path: Path) -> None:
    """From data=4 to data=2 and back nothing is lost: what was applied and the errors add up. Q stays as it is."""
    batches = [batch(seed) for seed in range(3)]
    state, found = run(step(2), batches[:2])
    few = step(2, data=2)
    wanted = abstract(spmd.init_state(few.plan))
    with saved(tmp_path / "many", state) as manager:
        # the control
        with pytest.raises(
            CheckpointError, match=r"compression/error/layers/kernel: shape differs"
        ):
            manager.restore(None, wanted)
        fewer = opened(manager, wanted)
    assert error(fewer).shape[0] == 2
    assert distance(error(fewer).mean(axis=0), error(state).mean(axis=0)) < 1e-6
    assert bits(fewer.transforms["compression"]["q"]) == bits(state.transforms["compression"]["q"])
    fewer, more = run(few, batches[2:], fewer)
    total = sum(map(mean_gradient, batches))
    assert distance(sum(found) + sum(more) + error(fewer).mean(axis=0), total) < NEAR
    with saved(tmp_path / "few", fewer) as manager:
        again = opened(manager, abstract(state))
    assert error(again).shape[0] == 4
    assert distance(error(again).mean(axis=0), error(fewer).mean(axis=0)) < 1e-6


def test_checkpoints_open_with_and_without_compression(tmp_path: Path) -> None:
    """A plain one gives a fresh state; of one with a state, a plain run takes the rest."""
    compressed, plain = (run(step(rank), [batch(0)])[0] for rank in (2, 0))
    with saved(tmp_path / "plain", plain) as manager:
        found = opened(manager, abstract(compressed))
    assert bits(found.transforms) == bits(spmd.init_state(step(2).plan).transforms)
    assert bits(found.params) == bits(plain.params)
    with saved(tmp_path / "compressed", compressed) as manager:
        found = opened(manager, abstract(plain))
        with pytest.raises(CheckpointError, match="extra: the checkpoint has it"):  # the control
            manager.restore(None, abstract(plain))
    assert bits(found.params) == bits(compressed.params)


def sent(made: TrainStep, slices: dict[str, int] | None = None) -> list[Any]:
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch(0).items()}
    audit = audit_collectives(made.compile(shapes), made.plan.mesh, plan=made.plan, slices=slices)
    assert not audit.broken
    return [r for r in audit.records if r.over == "data" and r.payload > 4]


def test_bytes_on_the_wire_are_those_of_the_formula() -> None:
    """4·r·(n/f + m) of each matrix, and the bias as it is; plain, the control, 4·n/f·m."""
    bias = 4 * M
    found, plain = (sum(r.payload * r.executions for r in sent(step(rank))) for rank in (2, 0))
    assert found == LAYERS * 4 * 2 * (N // 2 + M) + bias
    assert plain == LAYERS * 4 * (N // 2) * M + bias
    (arrays,) = (
        x.arrays for x in reductions(step(2).plan) if x.path == "layers/kernel" and x.arrays
    )
    assert sum(arrays) == found - bias


def test_inside_a_slice_gradients_are_summed_and_only_thin_ones_cross() -> None:
    """Of four replicas in two slices, P and Q cross between slices, and whole gradients do not."""
    records = sent(step(2, slices=2), {"data": 2})
    crossing = sum(r.payload for r in records if r.crosses)
    assert crossing == LAYERS * 4 * 2 * (N // 2 + M) + 4 * M
    assert sum(r.payload for r in records if not r.crosses) == LAYERS * 4 * (N // 2) * M


def test_a_loss_scale_is_refused() -> None:
    """It changes between steps, and with it what the errors are of."""
    plan = spmd.make_plan(tiny.mesh(data=2), RULES, MODEL, SGD, precision="fp16")
    with pytest.raises(ConfigError, match="precision: is fp16, with a loss scale"):
        plan.with_transforms(PowerSGD(2))


@pytest.mark.parametrize("rank", [1, pytest.param(5, marks=pytest.mark.soak)])
def test_rows_are_orthonormal(rank: int) -> None:
    """Of any matrix: of one with equal rows, with tiny and with huge numbers, and of zeros."""
    rows = jax.random.normal(jax.random.key(0), (4, rank, 16))
    rows = rows.at[0].set(rows[0, :1]).at[1].multiply(1e-30).at[2].multiply(1e30).at[3].set(0)
    made = jax.jit(powersgd.orthonormal)(rows)
    assert np.abs(np.asarray(made @ made.mT) - np.eye(rank)).max() < 1e-5
