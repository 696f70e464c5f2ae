"""A part of a state that checkpoints leave out comes back with the same bits, or not at all."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.checkpoint.manager import CheckpointManager
from spmd.errors import CheckpointError
from spmd.resilience.digests import digest_arrays
from spmd.run.external_state import EXTERNAL_STATE, ExternalState
from tests import tiny

BASE = {
    "0": {"w": np.arange(64, dtype=np.float32).reshape(8, 8)},
    "b": np.arange(4, dtype=np.int32),
}
SPECS = {"0/w": P("fsdp", "tensor"), "b": P()}


def placed(values=BASE, **sizes) -> dict:
    """The arrays on a mesh."""
    mesh = tiny.mesh(**(sizes or {"fsdp": 2, "tensor": 2}))
    return tree.map_with_path(
        lambda path, x: jax.device_put(x, NamedSharding(mesh, SPECS[path])), values
    )


def state(**sizes) -> dict:
    return {"params": {"a": placed(**sizes)["b"] + 1}, "variables": {"base": placed(**sizes)}}


def load(origin, abstract) -> dict:
    assert origin["path"] == "somewhere"
    return tree.map_with_path(
        lambda path, leaf: jax.device_put(tree.flatten(BASE)[path], leaf.sharding), abstract
    )


def abstract(**sizes) -> dict:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(**sizes)
    )


PART = ExternalState("variables/base", load, {"path": "somewhere"})


def saved(folder: Path, arrays, record) -> CheckpointManager:
    with CheckpointManager(folder) as checkpoints:
        checkpoints.save(1, arrays, record)
    return CheckpointManager(folder, read_only=True)


def test_what_is_left_out_is_loaded_again(tmp_path):
    """On another mesh: the checkpoint has the rest alone, the state is whole and has the same bits."""
    before = state()
    record = {EXTERNAL_STATE: PART.record(before)}
    with saved(tmp_path, PART.rest(before), record) as checkpoints:
        wanted = abstract(fsdp=4)
        with pytest.raises(CheckpointError, match="variables/base/0/w: missing"):
            checkpoints.restore(1, wanted)
        restored, found = checkpoints.restore(1, wanted, optional=[PART.optional])
    after = PART.fill(restored, found)
    for path, leaf in tree.flatten(after).items():
        np.testing.assert_array_equal(leaf, tree.flatten(before)[path], err_msg=path)
        assert leaf.sharding == tree.flatten(wanted)[path].sharding


def test_other_bits_are_refused(tmp_path):
    """A changed file, a record without an origin, and a folder that is not there are errors that say so."""
    before = state()
    with saved(tmp_path, PART.rest(before), {}) as checkpoints:
        restored, _ = checkpoints.restore(1, abstract(), optional=[PART.optional])
    wrong = {**PART.record(before), "digest": "0" * 32}
    with pytest.raises(CheckpointError, match=r"somewhere: has not the parameters .*\n.*was 0000"):
        PART.fill(restored, {EXTERNAL_STATE: wrong})
    with pytest.raises(CheckpointError, match="does not say where it is"):
        PART.fill(restored, {})


def test_a_checkpoint_that_holds_it_is_read(tmp_path):
    """As one of a run without an origin is: nothing is loaded, and nothing of it recorded."""
    whole = dataclasses.replace(PART, origin=None, load=lambda *_: pytest.fail("loaded"))
    assert whole.record(state()) is None
    with saved(tmp_path, state(), {}) as checkpoints:
        restored, found = checkpoints.restore(1, abstract(), optional=[whole.optional])
    assert digest_arrays(whole.fill(restored, found)) == digest_arrays(state())


def test_a_digest_is_of_bits_and_not_of_shards():
    """The same on every mesh and in every memory; the controls differ in one bit, a sign of zero, a dtype, a path."""
    expected = digest_arrays(placed())
    assert expected == digest_arrays(placed(fsdp=8)) == digest_arrays(placed(tensor=4, data=2))
    hosted = jax.tree.map(
        lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")), placed()
    )
    assert digest_arrays(hosted) == expected
    w = BASE["0"]["w"]
    swapped = w.copy()
    swapped[0, 0], swapped[0, 1] = w[0, 1], w[0, 0]
    for other in (
        np.nextafter(w, 99),
        w.astype(np.float16),
        swapped,
        np.where(w == 0, -0.0, w).astype(np.float32),
    ):
        assert digest_arrays(placed({**BASE, "0": {"w": other}})) != expected
    mesh = tiny.mesh(fsdp=2, tensor=2)
    renamed = {
        "1": {"w": jax.device_put(jnp.asarray(w), NamedSharding(mesh, P())), "b": placed()["b"]}
    }
    assert digest_arrays(renamed) != expected
