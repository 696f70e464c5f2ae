"""Two processes, each of which gives its own rows: one run, that ends, fails and resumes as one."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.object_stores import Server
from tests.train_runs import ROOT, finish_together, free_port

START = """
import json, sys
import jax, numpy as np, optax
from jax.sharding import PartitionSpec as P
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
port, me, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, me)
import spmd

MODEL = spmd.Model(
    lambda key: {"w": jax.random.normal(key, (8, 2))}, lambda params, x: x @ params["w"]
)

def make_step(**mesh):
    rules = spmd.Rules([("w", P("fsdp", "tensor"))], activations=[])
    return spmd.make_train_step(spmd.make_plan(spmd.make_mesh(**mesh), rules, MODEL, optax.adam(0.1)), loss_fn)

def loss_fn(params, variables, batch, key):
    error = MODEL.apply(params, batch["x"]) - batch["y"]
    return {"loss": (error**2).sum(), "weight": jax.numpy.float32(len(error))}, variables

STEP = make_step(fsdp=4)
SHARD = spmd.process_shard(STEP.plan)

def global_batch(number):
    x = np.random.default_rng(number).normal(size=(8, 8)).astype(np.float32)
    return {"x": x, "y": x[:, :2]}

def rows(batch, shard=SHARD):
    each = 8 // shard.count
    return jax.tree.map(lambda x: x[shard.index * each : (shard.index + 1) * each], batch)


class Loader:
    '''Batches of numbers that walk: the next one is known from the state alone.'''

    def __init__(self, stop=99, error=None, size=4):
        self.number, self.stop, self.error, self.size = 0, stop, error, size

    def __iter__(self):
        return self

    def __next__(self):
        if self.drawn() == self.stop:
            if self.error:
                raise self.error
            raise StopIteration
        self.number = self.number * 3 + 1
        return jax.tree.map(lambda x: x[: self.size], rows(global_batch(self.number)))

    def drawn(self):
        return int(np.log(2 * self.number + 1) / np.log(3) + 0.5)

    def state_dict(self):
        return {"number": np.int64(self.number), "of": {SHARD.index: b"rows"}}

    def load_state_dict(self, state):
        assert state["of"] == {SHARD.index: b"rows"}, state
        self.number = int(state["number"])


def functional(start, steps):
    loader = Loader()
    batches = [next(loader) for _ in range(steps)]
    return iter(batches[start:])

def whole_batches(start, steps):
    number, batches = 0, []
    for _ in range(steps):
        number = number * 3 + 1
        batches.append(global_batch(number))
    return iter(batches[start:])

CONFIG = spmd.RunConfig(steps=6, checkpoint_every=2, log_every=1, metrics_to=())

def run(name, batches, **options):
    options = {"process_batches": True, **options}
    return spmd.Run(f"{folder}/{name}", STEP, batches, config=CONFIG, **options)

def bits(result):
    w = result.state.params["w"]
    return b"".join(np.asarray(shard.data).tobytes() for shard in w.addressable_shards).hex()

def caught(f):
    try:
        f()
    except Exception as error:
        return [type(error).__name__, str(error), int(getattr(getattr(error, "state", None), "step", -1))]
    return ["nothing", "", -1]

def fit(batches, **options):
    state = spmd.init_state(STEP.plan)
    return spmd.fit(state, STEP, spmd.ProcessBatches(STEP.plan, batches), steps=6, **options)

out = {}
"""
END = """
print(json.dumps({"out": out}))
"""
RUNS = """
out["shard"] = [SHARD.index, SHARD.count]
out["whole"] = bits(run("whole", Loader()).train())

killed = Loader(stop=4 if me == 1 else 99, error=OSError("the disk is gone"))
out["killed"] = caught(run("cut", killed).train)
out["none"] = caught(run("none", Loader(stop=0 if me == 1 else 99)).train)
out["resumed"] = bits(run("cut", Loader()).train("auto"))
with spmd.CheckpointManager(f"{folder}/cut/checkpoints", read_only=True) as checkpoints:
    record = checkpoints.record(2)
out["record"] = record["loader"]["batches"], len(record["loader"]["states"])

# The control: a loader that forgets its state draws the first batches again.
out["killed again"] = caught(run("forgets", Loader(stop=4, error=OSError("gone"))).train)
forgetful = Loader()
forgetful.load_state_dict = lambda state: None
out["forgets"] = bits(run("forgets", forgetful).train("auto"))
"""
EVALUATED = """
out["whole"] = bits(run("whole", Loader()).train())
out["function"] = bits(run("function", functional).train())
out["global"] = bits(run("global", whole_batches, process_batches=False).train())
sets = {"val": lambda: [rows(global_batch(n)) for n in range(3)]}
out["evaluated"] = run("evaluated", functional, evaluation=sets, evaluation_loss=loss_fn).train().evaluation
sets = {"val": lambda: [global_batch(n) for n in range(3)]}
out["evaluated whole"] = run("evaluated-whole", whole_batches, evaluation=sets, evaluation_loss=loss_fn,
    process_batches=False).train().evaluation
sets = {"val": lambda: [rows(global_batch(n)) for n in range(3 - me)]}
out["uneven"] = caught(run("uneven", functional, evaluation=sets, evaluation_loss=loss_fn).train)
"""
STOPS = """
# The control: without ProcessBatches each gives the global batch, which JAX compares.
state = spmd.init_state(STEP.plan)
out["compared"] = caught(lambda: spmd.fit(state, STEP, [rows(global_batch(1))] * 6, steps=6))
out["ended"] = caught(lambda: fit(Loader(stop=3 if me == 1 else 99)))
out["all ended"] = caught(lambda: fit(Loader(stop=3)))
out["failed"] = caught(lambda: fit(Loader(stop=2 if me == 0 else 99, error=KeyError("row"))))
out["size"] = caught(lambda: fit(Loader(size=4 - 2 * me)))
def other_size():
    yield rows(global_batch(1))
    yield jax.tree.map(lambda x: x[: 4 - 2 * me], rows(global_batch(2)))
out["later size"] = caught(lambda: fit(other_size()))
out["same rows"] = caught(lambda: fit([rows(global_batch(n), type(SHARD)(0, 2, ())) for n in range(9)]))
constant = {"x": np.ones((4, 8), np.float32), "y": np.ones((4, 2), np.float32)}
out["constant"] = caught(lambda: fit([constant] * 6))
out["empty"] = caught(lambda: fit([]))
out["on mesh"] = caught(lambda: fit([STEP.place_batch(global_batch(1))] * 6))

# Both processes hold all rows where only `tensor` is between them.
mesh = np.array(jax.devices()).reshape(2, 2).T
STEP = make_step(fsdp=2, tensor=2, devices=list(mesh.flat))
SHARD = spmd.process_shard(STEP.plan)
out["shared"] = [SHARD.index, SHARD.count, list(SHARD.processes)]
out["shared rows"] = caught(lambda: fit([global_batch(n) for n in range(6)]))
out["other rows"] = caught(lambda: fit([global_batch(n + me * (n == 2)) for n in range(6)]))
"""


def run_both(program: str, folder: Path | str) -> list[dict[str, Any]]:
    port = free_port()
    code = START + program + END
    outputs = finish_together(
        *([sys.executable, "-c", code, port, me, folder] for me in range(2)), timeout=200
    )
    # Gloo's threads and the run print there too.
    return [json.loads(out[out.index('{"out"') :].splitlines()[0])["out"] for out in outputs]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes found in runs, and in loops that stop."""
    return run_both(RUNS + STOPS, tmp_path_factory.mktemp("both"))


@pytest.mark.soak
def test_a_run_resumes_bitwise_from_the_states_of_all_loaders(both: list[dict[str, Any]]) -> None:
    """After the loader of one has failed: both end, and go on from their checkpoint as if nothing had been. A loader
    that forgets its state is the control."""
    assert_resumed(both)


@pytest.mark.soak
def test_a_run_in_a_bucket_resumes_from_the_states_of_all_loaders(s3_of_session: Server) -> None:
    """As one on a disk."""
    assert_resumed(run_both(RUNS, s3_of_session.address("process-batches")))


def assert_resumed(both: list[dict[str, Any]]) -> None:
    """What two processes found in `RUNS` is as it should be."""
    first, second = both
    assert (first["shard"], second["shard"]) == ([0, 2], [1, 2])
    for found in both:
        assert found["resumed"] == found["whole"]
        assert found["forgets"] != found["whole"]
        assert found["record"] == [2, 2]
        name, text, _ = found["none"]
        assert (name, "process 1: has no batch for step 1" in text) == ("DataError", True)
    assert second["killed"][:2] == ["OSError", "the disk is gone"]
    name, text, _ = first["killed"]
    assert (name, "process 1: failed to draw the batch of step 5" in text) == ("DataError", True)


@pytest.mark.soak
def test_a_run_is_that_of_the_global_batch(tmp_path: Path) -> None:
    """Each gives half of the rows: the parameters are those of the global batch, bitwise, and so is an evaluation."""
    for found in run_both(EVALUATED, tmp_path):
        assert found["whole"] == found["function"] == found["global"]
        whole = found["evaluated whole"]["val_loss"]
        assert found["evaluated"]["val_loss"] == pytest.approx(whole, rel=1e-6)
        name, text, _ = found["uneven"]
        assert (name, "process 1: has no batch for step 3" in text) == ("DataError", True)


def test_all_processes_stop_after_the_same_step(both: list[dict[str, Any]]) -> None:
    """Whichever process ends, fails, or gives other sizes or rows: both stop, and say which; none waits."""
    first, second = both
    for found in (first, second):
        assert "is not the same on each process" in found["compared"][1]
        name, text, step = found["ended"]
        assert (name, step) == ("BatchesEndedError", 3)
        assert "process 1: has no batch for step 4" in text
        assert "process 0" not in text
        name, text, step = found["all ended"]
        assert (name, step, "process" in text) == ("BatchesEndedError", 3, False)
        for kind, step in (("size", "was float32[4, 8]"), ("later size", "for step 2")):
            name, text, _ = found[kind]
            assert (name, "process 1: has another batch" in text) == ("DataError", True)
            assert "float32[2, 8]" in text
            assert step in text
        assert "give the same rows" in found["same rows"][1]
        assert found["constant"][0] == "nothing", found["constant"]
        assert found["empty"][2] == 0
        assert "on the mesh" in found["on mesh"][1]
        assert found["shared"] == [0, 1, [0, 1]]
        assert found["shared rows"][0] == "nothing", found["shared rows"]
        assert "process 1: gives other rows than process 0 for step 3" in found["other rows"][1]
    assert first["failed"][0] == "KeyError"
    assert "process 0: failed to draw the batch of step 3" in second["failed"][1]


ALONE = """
from spmd.data.process_batches import ProcessBatches
ProcessBatches._exchange = lambda self, current: np.array([current.row])
print("ready", flush=True)
out["ended"] = caught(lambda: fit(Loader(stop=3 if me == 1 else 99)))
"""


@pytest.mark.soak
def test_without_the_exchange_the_other_process_waits(tmp_path: Path) -> None:
    """The control: where a process knows of its own batches alone, the other takes a step that never ends."""
    port = free_port()
    code = START + ALONE + END
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(port), str(me), str(tmp_path)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for me in range(2)
    ]
    try:
        assert all("ready" in process.stdout.readline() for process in processes)
        time.sleep(20)
        assert any(process.poll() is None for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
