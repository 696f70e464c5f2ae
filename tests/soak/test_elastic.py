"""A run that goes on with other processes, devices and meshes: the same tokens in the same order, the same training."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from spmd.testing import TOLERANCES
from tests.train_runs import losses, state, train, write_tiny

pytestmark = pytest.mark.soak
BATCH, SEQUENCE = 8, 16
ROUNDING = TOLERANCES["float32"]

FEED = """
import json
import sys
from pathlib import Path

import jax

import spmd.run.train
from spmd.training.step import TrainStep

config = dataclasses.replace(
    config, optimizer=dataclasses.replace(config.optimizer, schedule="constant"), steps=24, checkpoint_every=0
)
take, read = TrainStep.__call__, spmd.run.train.batches_in_order


def take_and_tell(self, state, batch):
    (steps_before,) = {int(jax.device_get(shard.data)) for shard in state.step.addressable_shards}
    layout = [jax.process_count(), jax.local_device_count()]
    with out.with_suffix(f".fed-{jax.process_index()}").open("a") as file:
        for name in ("tokens", "targets"):
            for shard in batch[name].addressable_shards:
                corner = [part.start or 0 for part in shard.index]
                print(json.dumps([steps_before, layout, name, corner, jax.device_get(shard.data).tolist()]), file=file)
    return take(self, state, batch)


def read_past_one(order, *, start, steps, **options):
    return read(order, start=start + 1, steps=steps + 1, **options)


if sys.argv[1:2] == ["train"]:
    out = Path(sys.argv[sys.argv.index("--out") + 1])
    TrainStep.__call__ = take_and_tell
    if out.name == "fault":
        spmd.run.train.batches_in_order = read_past_one
"""
"""Lines of a config under which each process writes down what its devices feed to each step, just before they do.

The learning rate is constant after its warmup, so that legs may end where `--steps` says.
"""

EXPERTS = """
from spmd.models.mixtral import mixtral
from spmd.partition_rules.mixtral import MIXTRAL
from spmd.layers.router import RouterConfig

# A loss of balance over examples, not batches: the same for any microbatches.
router = RouterConfig(experts=4, balance_over="example")
model = mixtral(vocab=256, d_model=32, layers=2, heads=4, kv_heads=2, d_ff=32, router=router)
config = dataclasses.replace(config, model=model, rules=MIXTRAL, steps=12)
"""
"""Lines for a mixture of experts."""


@dataclasses.dataclass(frozen=True)
class Leg:
    """The part of a run up to a step: how many processes, of how many devices, on which mesh."""

    until: int
    processes: int
    devices: int
    mesh: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Chain:
    """Further lines of the config, and the legs of one run."""

    more: str
    legs: tuple[Leg, ...]

    @property
    def steps(self) -> int:
        return self.legs[-1].until


CHAINS = {
    "dense": Chain(
        "",
        (
            Leg(4, 4, 2, {"data": 2, "fsdp": 4}),
            Leg(8, 2, 4, {"pipe": 2, "data": 2, "fsdp": 2}),
            Leg(12, 1, 1, {}),
            Leg(16, 1, 8, {"fsdp": 2, "sequence": 2, "tensor": 2}),
            # the step's groups have one device of each process
            Leg(20, 2, 2, {"fsdp": 2, "tensor": 2}),
            Leg(24, 4, 2, {"data": 2, "fsdp": 4}),
        ),
    ),
    "experts": Chain(
        EXPERTS,
        (
            Leg(4, 2, 2, {"data": 2, "expert": 2}),
            Leg(8, 1, 4, {"pipe": 2, "expert": 2}),
            Leg(12, 1, 1, {}),
        ),
    ),
}


def run_leg(config: Path, out: Path, leg: Leg) -> None:
    sizes = {"data": 1, "fsdp": 1, **leg.mesh}
    flags = [word for axis, size in sizes.items() for word in (f"--mesh.{axis}", size)]
    train(
        *(config, out, "--steps", leg.until, "--resume", "auto", *flags),
        processes=leg.processes,
        devices=leg.devices,
    )


@dataclasses.dataclass
class Fed:
    """What was fed to the steps of a run.

    Attributes:
        tokens: By name, `[steps, batch, sequence]`; -1 where nothing was.
        layouts: By step, the (processes, devices of each) that took it; an empty set where none
            did.
    """

    tokens: dict[str, np.ndarray]
    layouts: list[set[tuple[int, int]]]

    @property
    def order(self) -> str:
        """The hash of all tokens in their order."""
        return hashlib.sha256(
            self.tokens["tokens"].tobytes() + self.tokens["targets"].tobytes()
        ).hexdigest()


def fed(out: Path, steps: int) -> Fed:
    """What all processes of all legs wrote down; devices that hold the same rows must hold the same tokens."""
    shape = (steps, BATCH, SEQUENCE)
    found = Fed(
        {name: np.full(shape, -1) for name in ("tokens", "targets")}, [set() for _ in range(steps)]
    )
    for path in out.parent.glob(f"{out.name}.fed-*"):
        for line in path.read_text().splitlines():
            step, layout, name, (row, column), block = json.loads(line)
            place = found.tokens[name][
                step, row : row + len(block), column : column + len(block[0])
            ]
            assert ((place == -1) | (place == block)).all()
            place[...] = block
            found.layouts[step].add(tuple(layout))
    return found


@pytest.fixture(scope="module", params=CHAINS)
def runs(request, tmp_path_factory):
    """A run of one process and one device that nothing interrupts, and one in legs."""
    chain, folder = CHAINS[request.param], tmp_path_factory.mktemp(request.param)
    config = write_tiny(folder, FEED + chain.more)
    run_leg(config, folder / "whole", Leg(chain.steps, 1, 1, {}))
    for leg in chain.legs:
        run_leg(config, folder / "legs", leg)
    return chain, folder


def test_every_token_is_fed_once_and_in_the_same_order(runs):
    """Of each step, all rows were fed, by the processes of one leg, and the hash of all tokens is the same."""
    chain, folder = runs
    whole, legs = (fed(folder / name, chain.steps) for name in ("whole", "legs"))
    begins = [0, *(leg.until for leg in chain.legs)]
    for leg, begin in zip(chain.legs, begins, strict=False):
        assert legs.layouts[begin : leg.until] == [{(leg.processes, leg.devices)}] * (
            leg.until - begin
        )
    assert all((run.tokens[name] >= 0).all() for run in (whole, legs) for name in run.tokens)
    assert legs.order == whole.order


def differences(runs: Path, a: str, b: str, steps: int) -> tuple[float, float]:
    """How far two runs are apart: in the losses, and in the final parameters, relative to a leaf's largest value."""
    one, other = (losses(runs / name) for name in (a, b))
    assert list(one) == list(other) == list(range(1, steps + 1))
    apart = max(abs(one[step] - other[step]) / other[step] for step in other)
    params = (
        jax.tree.leaves(state(runs / "tiny.py", runs / name, steps).params) for name in (a, b)
    )
    return apart, max(
        float(np.abs(x - y).max() / np.abs(y).max()) for x, y in zip(*params, strict=True)
    )


def test_it_is_the_same_training(runs):
    """The losses of all steps and the final parameters are equal within float32 rounding."""
    chain, folder = runs
    loss, params = differences(folder, "legs", "whole", chain.steps)
    assert loss <= ROUNDING.loss, ROUNDING.why
    assert params <= ROUNDING.updates, ROUNDING.why


@pytest.mark.parametrize("runs", ["dense"], indirect=True)
def test_control_a_position_that_is_one_step_off(runs):
    """A last leg that goes on one batch too late: both comparisons tell."""
    chain, folder = runs
    last = chain.legs[-2].until
    shutil.copytree(folder / "legs", folder / "fault")
    shutil.rmtree(folder / "fault" / "checkpoints" / str(chain.steps))
    run_leg(folder / "tiny.py", folder / "fault", Leg(chain.steps, 1, 1, {}))
    whole, legs, fault = (fed(folder / name, chain.steps) for name in ("whole", "legs", "fault"))
    assert fault.layouts == [set()] * last + [{(1, 1)}] * (chain.steps - last)
    for name, before in legs.tokens.items():
        fault.tokens[name][:last] = before[:last]
    assert fault.order != whole.order
    loss, params = differences(folder, "fault", "whole", chain.steps)
    assert loss > 100 * ROUNDING.loss
    assert params > 100 * ROUNDING.updates
