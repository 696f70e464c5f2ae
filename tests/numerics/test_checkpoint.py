"""Checkpoints come back bitwise on any mesh, or say everything that is wrong."""

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.checkpoint import local_store
from spmd.checkpoint.host_copies import HostCopies
from spmd.checkpoint.manager import CheckpointManager
from spmd.checkpoint.versions import library_versions
from spmd.errors import CheckpointError

pytestmark = pytest.mark.compat

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(1e-3)))
FSDP = {"kernel": P("fsdp"), "bias": P(None), "scale": P("fsdp")}
HYBRID = {"kernel": P(("data", "fsdp"), "tensor"), "bias": P("tensor"), "scale": P()}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """A training state as the framework has one: a dataclass of nested dictionaries and optax tuples."""

    params: Any
    opt_state: Any
    step: jax.Array
    key: jax.Array


def make_mesh(**axes: int) -> Mesh:
    assert jax.device_count() == 8
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def make_state(place: Callable[[str, Any], Any], seed: int = 0) -> State:
    rng = np.random.default_rng(seed)
    params = {
        "mlp": {
            "kernel": jnp.asarray(rng.normal(size=(8, 16)), jnp.float32),
            "bias": jnp.arange(4.0),
        },
        "norm": {"scale": jnp.asarray(rng.normal(size=8), jnp.bfloat16)},
    }
    state = State(params, OPTIMIZER.init(params), jnp.int32(3), jax.random.key(seed))
    return tree.map_with_path(place, state)


def sharded(mesh: Mesh, specs: dict[str, P]) -> Callable[[str, Any], Any]:
    return lambda path, x: jax.device_put(
        x, NamedSharding(mesh, specs.get(path.split("/")[-1], P()))
    )


def abstract(state: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def bits(state: Any) -> dict[str, bytes]:
    def of(leaf: jax.Array) -> bytes:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()

    return {path: of(leaf) for path, leaf in tree.flatten(state).items()}


def filled(value: float) -> dict[str, jax.Array]:
    return {"w": jnp.full((4,), value)}


@pytest.mark.parametrize(
    "target", ["fsdp=8", "data=2,fsdp=2,tensor=2", "one device", "host memory"]
)
def test_a_state_comes_back_bitwise_on_any_mesh(tmp_path: Path, target: str) -> None:
    """What was saved on fsdp=8 is restored bit for bit, in the shardings asked for, with its record."""
    saved = make_state(sharded(make_mesh(fsdp=8), FSDP))
    record = {"position": 17, "mesh": {"fsdp": 8}, "shape": (1, 2), "versions": library_versions()}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(3, saved, record)
    host = NamedSharding(make_mesh(fsdp=8), P(), memory_kind="pinned_host")
    places = {
        "fsdp=8": sharded(make_mesh(fsdp=8), FSDP),
        "data=2,fsdp=2,tensor=2": sharded(make_mesh(data=2, fsdp=2, tensor=2), HYBRID),
        "one device": lambda path, x: jax.device_put(x, SingleDeviceSharding(jax.devices()[5])),
        "host memory": lambda path, x: jax.device_put(x, host),
    }
    template = abstract(make_state(places[target], seed=1))
    with CheckpointManager(tmp_path) as checkpoints:
        restored, its_record = checkpoints.restore(None, template)
    assert bits(restored) == bits(saved)
    assert bits(restored) != bits(make_state(places[target], seed=1))
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    assert jax.tree.map(lambda x: (x.dtype, x.sharding), restored) == jax.tree.map(
        lambda x: (x.dtype, x.sharding), template
    )
    assert its_record == {**record, "shape": [1, 2]}


def test_the_saved_state_may_be_donated_at_once(tmp_path: Path) -> None:
    """The next step overwrites the saved buffers while they are written, and the checkpoint does not notice."""
    sharding = NamedSharding(make_mesh(fsdp=8), P("fsdp"))
    x = {"w": jax.device_put(np.zeros((256, 1024), np.float32), sharding)}
    step = jax.jit(lambda x: {"w": x["w"] + 1}, donate_argnums=0)
    with CheckpointManager(tmp_path, max_to_keep=8) as checkpoints:
        for i in range(4):
            checkpoints.save(i, x, {})
            x = step(x)
            between = x["w"]
            x = step(x)
            assert between.is_deleted()
        for i in range(4):
            restored, _ = checkpoints.restore(i, abstract(x))
            np.testing.assert_array_equal(restored["w"], np.full((256, 1024), 2.0 * i, np.float32))


def test_each_shard_is_copied_to_the_host_once() -> None:
    """Copies hold one replica of every shard, in host memory, whatever becomes of the arrays."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "fsdp"))
    values = np.arange(24.0).reshape(4, 6)
    placed = {
        "whole": (NamedSharding(mesh, P()), 1),
        "columns": (NamedSharding(mesh, P(None, "fsdp")), 2),
        "both": (NamedSharding(mesh, P("data", "fsdp")), 8),
        "one device": (SingleDeviceSharding(jax.devices()[3]), 1),
    }
    places = {name: sharding for name, (sharding, _) in placed.items()}
    copies = HostCopies()
    for scale in (1.0, 3.0):  # the second time, into the same memory
        arrays = {name: jax.device_put(scale * values, place) for name, place in places.items()}
        with jax.enable_x64(True):
            arrays["int64"] = jnp.arange(2)
        make = copies.of(arrays)
        dtypes = {name: array.dtype for name, array in arrays.items()}
        for array in arrays.values():
            array.delete()
        copied = make()
        assert {name: array.dtype for name, array in copied.items()} == dtypes
        for name, (_, count) in placed.items():
            assert len(copied[name].addressable_shards) == count, name
            assert copied[name].sharding.memory_kind == "pinned_host"
            np.testing.assert_array_equal(copied[name], scale * values)


def test_the_record_may_be_changed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the caller does to the record after save is not in the checkpoint, however late it is written."""
    write_text, changed, met = Path.write_text, threading.Event(), []

    def late(path: Path, *args: Any, **kwargs: Any) -> int:
        met.extend([changed.wait(30)] if path.name == "record.json" else [])
        return write_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", late)
    record = {"position": {"batch": 1}}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, filled(1), record)
        record["position"]["batch"] = 2
        changed.set()
        assert checkpoints.record(1) == {"position": {"batch": 1}}
    assert met == [True]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    """The newest two stay and the one with the lowest metric; NaN and unmeasured ones never count as best."""
    losses = {
        0: None,
        1: 3.0,
        2: float("nan"),
        3: 1.0,
        4: None,
        5: 2.0,
        6: float("-inf"),
        7: None,
        8: 1.5,
    }
    with CheckpointManager(tmp_path, max_to_keep=2) as checkpoints:
        assert (checkpoints.steps(), checkpoints.latest(), checkpoints.best()) == ((), None, None)
        for step, loss in losses.items():
            checkpoints.save(
                step, filled(step), {}, {"val_loss": loss} if loss is not None else {"lr": 1e-3}
            )
            if step == 2:
                assert checkpoints.steps() == (1, 2)
        assert (checkpoints.steps(), checkpoints.latest(), checkpoints.best()) == ((3, 7, 8), 8, 3)
    with CheckpointManager(tmp_path, max_to_keep=2) as checkpoints:
        assert (checkpoints.steps(), checkpoints.latest(), checkpoints.best()) == ((3, 7, 8), 8, 3)
        checkpoints.save(9, filled(9), {}, {"val_loss": 0.5})
        assert (checkpoints.steps(), checkpoints.best()) == ((8, 9), 9)


def test_unmeasured_checkpoints_do_not_pile_up_as_best(tmp_path: Path) -> None:
    """Where nothing was measured the newest are all that stays, and none is the best."""
    with CheckpointManager(tmp_path, max_to_keep=1, keep_best=3) as checkpoints:
        for step in range(4):
            checkpoints.save(step, filled(step), {})
        assert (checkpoints.steps(), checkpoints.best()) == ((3,), None)


@pytest.mark.parametrize(("keep_every", "left"), [(2, (2, 4, 5)), (0, (5,))])
def test_milestones_stay_on_disk(tmp_path: Path, keep_every: int, left: tuple[int, ...]) -> None:
    """Also when the folder is opened again; the control has none."""
    with CheckpointManager(
        tmp_path, max_to_keep=1, keep_best=0, keep_every=keep_every
    ) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(step, {"w": jnp.ones(2)})
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == list(left)
    with CheckpointManager(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.steps() == left


def test_the_first_step_can_be_the_best(tmp_path: Path) -> None:
    """Step 0 is a step like any other; of two equals the later one is the best."""
    with CheckpointManager(tmp_path, best="error", max_to_keep=3) as checkpoints:
        checkpoints.save(0, filled(0), {}, {"error": 1.0})
        checkpoints.save(1, filled(1), {}, {"error": 2.0})
        assert checkpoints.best() == 0
        checkpoints.save(2, filled(2), {}, {"error": 1.0})
        assert checkpoints.best() == 2


def test_a_checkpoint_that_does_not_fit_lists_every_difference(tmp_path: Path) -> None:
    """Missing, extra, shape and dtype come in one error, sorted by path, each with its fix."""
    mesh = make_mesh(fsdp=8)
    here = NamedSharding(mesh, P())

    def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=here)

    stored = {
        "a": jnp.zeros((2, 3)),
        "c": {"w_in": jnp.zeros(4)},
        "d": jnp.zeros(5),
        "e": jnp.zeros(6),
    }
    wanted = {
        "e": shape(3, 2, dtype=jnp.bfloat16),
        "d": shape(5, dtype=jnp.bfloat16),
        "c": {"w_out": shape(4)},
        "b": jax.ShapeDtypeStruct((1,), jnp.float32),
        "a": shape(3, 2),
    }
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, stored, {})
        with pytest.raises(CheckpointError) as caught:
            checkpoints.restore(1, wanted)
        found = [(p.where, p.what.split(":")[0], p.detail) for p in caught.value.problems]
        assert found == [
            ("a", "shape differs", "checkpoint (2, 3), state (3, 2)"),
            ("b", "missing", "state float32[1]"),
            ("b", "sharding", ""),
            ("c/w_in", "extra", "checkpoint float32[4]"),
            ("c/w_out", "missing", "state float32[4]"),
            ("d", "dtype differs", "checkpoint float32, state bfloat16"),
            ("e", "dtype differs", "checkpoint float32, state bfloat16"),
            ("e", "shape differs", "checkpoint (6,), state (3, 2)"),
        ]
        assert all(p.fix for p in caught.value.problems)
        assert 'the checkpoint has "c/w_in": was it renamed?' in str(caught.value)
        restored, _ = checkpoints.restore(1, jax.tree.map(lambda x: shape(*x.shape), stored))
    assert bits(restored) == bits(stored)


def test_an_existing_or_earlier_step_is_refused(tmp_path: Path) -> None:
    """A save that would not become the latest checkpoint is an error, also while its twin is being written."""
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(5, filled(5), {})
        with pytest.raises(CheckpointError, match=r"5: exists already"):
            checkpoints.save(5, filled(6), {})
        with pytest.raises(CheckpointError, match=r"4: is earlier than the latest, 5"):
            checkpoints.save(4, filled(4), {})
        assert checkpoints.steps() == (5,)
        assert bits(checkpoints.restore(5, abstract(filled(0)))[0]) == bits(filled(5))


def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Leaves that are no arrays, empty arrays, shared paths and records that are no JSON are named at once."""
    with CheckpointManager(tmp_path) as checkpoints:
        state = {
            "a": {"b": jnp.ones(1)},
            "a/b": jnp.ones(1),
            "c": 3,
            "d": jnp.zeros((0, 4)),
            "e": np.ones(2),
        }
        with pytest.raises(CheckpointError) as caught:
            checkpoints.save(1, state, {})
        assert [p.where for p in caught.value.problems] == ["c", "d", "e", "state"]
        with pytest.raises(CheckpointError, match="holds no array"):
            checkpoints.save(1, {}, {})
        with pytest.raises(CheckpointError, match="Path is not JSON serializable"):
            checkpoints.save(1, filled(1), {"corpus": Path("/")})
        assert list(tmp_path.iterdir()) == []
        checkpoints.save(1, filled(1), {})


def test_a_checkpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Asking for a step that does not exist says which ones do, on restoring and on reading the record."""
    with CheckpointManager(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match=r"there is no checkpoint\n.*there are none"):
            checkpoints.restore(None, abstract(filled(0)))
        checkpoints.save(1, filled(1), {"seed": 4})
        with pytest.raises(
            CheckpointError, match=r"no checkpoint of step 2\n.*there are the steps 1"
        ):
            checkpoints.record(2)
        assert checkpoints.record(1) == {"seed": 4}


def test_limits_and_directories_that_cannot_work_are_refused(tmp_path: Path) -> None:
    """Keeping nothing is refused, both limits at once, and so is a directory that is a file."""
    with pytest.raises(CheckpointError) as caught:
        CheckpointManager(tmp_path / "run", max_to_keep=0, keep_best=-1)
    assert [p.where for p in caught.value.problems] == ["keep_best", "max_to_keep"]
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=str(tmp_path / "file")):
        CheckpointManager(tmp_path / "file")


def test_closing_twice_is_closing_once(tmp_path: Path) -> None:
    """A run may close its checkpoints inside the with statement that closes them again."""
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, filled(1), {})
        checkpoints.close()
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_versions_name_what_can_change_a_checkpoint() -> None:
    """Python, JAX, the libraries whose state is saved and the runtime each have a version."""
    versions = library_versions()
    assert {
        "python",
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "orbax-checkpoint",
        "numpy",
        "spmd",
        "runtime",
    } == set(versions)
    assert versions["jax"] == jax.__version__
    assert versions["runtime"] == jax.devices()[0].client.platform_version == "cpu"


def test_a_save_that_another_run_removed_is_said_to_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lost folder is the error, not the missing file. Control: of a run that still has it, the file is."""
    taken: list[bool] = []

    def write(folder: Path, arrays: Any) -> None:
        raise FileNotFoundError(2, "No such file or directory", str(folder))

    def check() -> None:
        if taken:
            raise CheckpointError("Run folder lost to another process:")

    monkeypatch.setattr(local_store, "save_arrays", write)
    for is_taken, said in ((False, "No such file"), (True, "Run folder lost")):
        checkpoints = CheckpointManager(tmp_path / said, before_write=check)
        checkpoints.save(1, {"w": jnp.ones(4)})
        taken += [is_taken] * is_taken
        with pytest.raises(CheckpointError, match=said):
            checkpoints.wait()
