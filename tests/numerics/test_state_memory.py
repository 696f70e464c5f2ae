"""Copies of the state in shared memory: bitwise, and complete or absent."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.checkpoint import memory
from spmd.checkpoint.memory import Layout, MemoryStore, Saved, memory_problem
from spmd.checkpoint.tree import from_serialized, storable
from spmd.run.memory import steps_between
from spmd.sharding.mesh import MeshShape, mesh_of
from tests import forked


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(MeshShape(data=2, fsdp=4), jax.devices())


@pytest.fixture
def state(mesh):
    """Arrays split, replicated and in both, of several dtypes, and a key."""

    def placed(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    values = jnp.arange(64, dtype=jnp.float32).reshape(8, 8)
    return {
        "split": placed(values, "fsdp", "data"),
        "half": placed(values.astype(jnp.bfloat16), None, "fsdp"),
        "whole": placed(jnp.arange(3)),
        "key": placed(jax.random.key(7)),
    }


def layout_of(state):
    return Layout.of(tree.flatten(state))


def write(store, step, state, generation=1):
    store.write(step, generation, 0, storable(state), {"step": step}, layout_of(state))
    store.wait()


def read(store, saved, state):
    """The state of a copy as NumPy arrays, and its record; None if it cannot be used."""
    leaves = tree.flatten(state)
    found = store.read(saved, leaves)
    if found is None:
        return None
    arrays, record = found
    return {path: from_serialized(arrays[path], leaf) for path, leaf in leaves.items()}, record


def assert_same(a, b):
    for path, x in b.items():
        assert a[path].sharding == x.sharding
        if path == "key":
            a, b = ({**each, path: jax.random.key_data(each[path])} for each in (a, b))
        np.testing.assert_array_equal(np.asarray(a[path]), np.asarray(b[path]))


def test_a_copy_is_restored_bitwise_into_the_same_shardings(state):
    """Each distinct shard is copied once, whatever has replicas."""
    store = MemoryStore.create()
    write(store, 3, state)
    found, record = read(store, store.newest(), state)
    assert_same(found, state)
    assert record == {"step": 3}
    distinct = 8 * 8 * 4 + 8 * 8 * 2 + 3 * 4 + 2 * 4
    assert distinct <= layout_of(state).nbytes < distinct + 64 * 16


def test_the_older_copy_is_replaced(state):
    """Two copies at most; the other one stays while one is written."""
    store = MemoryStore.create()
    for step in (1, 2, 3):
        write(store, step, state)
    assert sorted(saved.step for saved in store.saved()) == [2, 3]
    store.clear(after=2)
    assert [saved.step for saved in store.saved()] == [2]


@pytest.mark.parametrize("is_cleared", [True, False], ids=["cleared", "control"])
def test_a_later_copy_of_before_is_not_taken_for_the_newest(is_cleared, state):
    """After a restart from step 10, the copies of steps 11 and 12 of the process before count no more."""
    store = MemoryStore.create()
    write(store, 11, state)
    write(store, 12, state)
    if is_cleared:
        store.clear(after=10)
    write(store, 11, state, generation=2)
    newest = store.newest()
    assert ((newest.step, newest.generation) == (11, 2)) is is_cleared


@pytest.mark.parametrize("moment", ["in the arrays", "before the header"])
def test_a_kill_in_a_copy_leaves_the_one_before(moment, state, monkeypatch, tmp_path):
    """A forked process is killed by SIGKILL while it writes; its parent reads what it left."""
    store = MemoryStore.create()
    write(store, 1, state)
    write(store, 2, state)

    def die(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    def write_headers():  # a child has no devices: it writes bytes alone
        target = store.put(Saved(0, 3, 1, 0, bytes(32)), b"{}", 1024)
        target[:] = 1
        if moment == "in the arrays":
            die()
        monkeypatch.setattr(memory, "_checksum", die)
        store.seal()

    child = forked.fork(write_headers, tmp_path / "log")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert [saved.step for saved in store.saved()] == [2]
    assert_same(read(store, store.newest(), state)[0], state)


def test_control_a_copy_that_is_finished_counts(state, tmp_path):
    """The same write without the kill."""
    store = MemoryStore.create()
    write(store, 1, state)
    write(store, 2, state)

    def write_all():
        store.put(Saved(0, 3, 1, 0, bytes(32)), b"{}", 1024)[:] = 1
        store.seal()

    child = forked.fork(write_all, tmp_path / "log")
    assert os.waitpid(child, 0)[1] == 0, (tmp_path / "log").read_text()
    assert store.newest().step == 3


def test_changed_bytes_and_other_shards_are_not_restored(state, mesh):
    """A flipped bit, and a state that is split in another way."""
    store = MemoryStore.create()
    write(store, 1, state)
    other = {**state, "split": jax.device_put(state["split"], NamedSharding(mesh, P("data")))}
    assert read(store, store.newest(), other) is None
    assert read(store, store.newest(), state) is not None  # the control
    _, data = store.content(store.newest())
    data[5] ^= 1
    assert read(store, store.newest(), state) is None


@pytest.mark.parametrize("keeps_views", [False, True], ids=["copy", "control"])
def test_a_step_takes_the_memory_of_a_copied_state(keeps_views, state):
    """A copy leaves no view behind: the next step would have to copy what is viewed (control)."""
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.block_until_ready(step(state["split"]))
    before = [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]
    write(MemoryStore.create(), 1, {"x": x})
    views = []
    if keeps_views:
        views = [np.asarray(shard.data) for shard in x.addressable_shards]
    after = [shard.data.unsafe_buffer_pointer() for shard in step(x).addressable_shards]
    assert (after == before) is not keeps_views
    del views


def test_copies_that_do_not_fit_are_refused_with_the_arithmetic():
    """Two copies of 4 GiB in 8 GiB, of which 80 % may be taken, and in 16 GiB."""
    problem = memory_problem(4 << 30, available=8 << 30)
    text = "2 copies × 4 GiB = 8 GiB, and 80% of 8 GiB available are 6.4 GiB"
    assert problem.detail == text
    assert memory_problem(4 << 30, available=16 << 30) is None
    problem = memory_problem(1 << 30, others=2 << 30, processes=2, available=8 << 30)
    text = "2 copies × (1 GiB + 2 GiB of another process) × 2 processes = 12 GiB, and"
    assert problem.detail.startswith(text)


def test_steps_between_copies_cost_at_most_the_share():
    """The fewest of them: one step less costs more."""
    for copy, step in ((0.3, 1.0), (0.02, 1.0), (5.0, 0.7)):
        every = steps_between(copy, step)
        assert copy / (every * step) <= 0.02 + 1e-9
        assert every == 1 or copy / ((every - 1) * step) > 0.02
