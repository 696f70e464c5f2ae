"""Two processes agree on which checkpoint is valid, on what was lost and on which save has failed."""

import json
import sys
from pathlib import Path

import pytest

from tests.train_runs import finish_together, free_port

pytestmark = pytest.mark.compat

PROGRAM = """
import json, sys
from pathlib import Path
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
port, me, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
jax.distributed.initialize(f"127.0.0.1:{port}", 2, me)
import spmd.checkpoint.local_store
from spmd.checkpoint.manager import CheckpointManager
from spmd.errors import CheckpointError
from spmd.distributed.hosts import broadcast_from_first
sharding = NamedSharding(jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,)), P("fsdp"))
template = {"w": jax.ShapeDtypeStruct((64, 64), np.float32, sharding=sharding)}

def filled(value):
    return {"w": jax.make_array_from_callback((64, 64), sharding, lambda i: np.full((16, 64), value, np.float32))}

def whole(state, value):
    return all(bool((shard.data == value).all()) for shard in state["w"].addressable_shards)

out = {"first": broadcast_from_first(lambda: {"process": jax.process_index(), "long": "ü" * 1000})}
with CheckpointManager(directory) as checkpoints:
    for step in (1, 2, 3):
        checkpoints.save(step, filled(step), {"step": step})
    checkpoints.wait()
    if me == 0:
        (directory / "3" / "record.json").write_text("{}")
with CheckpointManager(directory) as checkpoints:
    with jax.transfer_guard("disallow"):
        state, record = checkpoints.restore(None, template)
    out["restored"] = whole(state, 2), record["step"], checkpoints.latest_valid()
    out["lost"] = {step: [[p.where, p.what] for p in problems] for step, problems in checkpoints.damaged.items()}

    def failing(folder, step):
        raise OSError(28, "No space left on device")

    sealing, spmd.checkpoint.local_store.write_manifest = spmd.checkpoint.local_store.write_manifest, failing
    checkpoints.save(3, filled(3), {"step": 3})
    try:
        checkpoints.wait()
    except CheckpointError as error:
        out["failed"] = str(error)
    spmd.checkpoint.local_store.write_manifest = sealing
    out["after"] = checkpoints.steps()
    checkpoints.save(3, filled(3), {"step": 3})
    state, record = checkpoints.restore(None, template)
    out["again"] = whole(state, 3), record["step"], checkpoints.steps()
print(json.dumps(out))
"""


def test_processes_go_by_what_the_first_one_sees(tmp_path: Path) -> None:
    """A damaged checkpoint is lost to both, a seal that one cannot write fails the save of both, and both go on."""
    port, directory = free_port(), tmp_path / "checkpoints"
    outputs = finish_together(
        *([sys.executable, "-c", PROGRAM, port, me, directory] for me in range(2))
    )
    # Gloo's threads print there too.
    first, second = (
        json.loads(output[output.index('{"first"') :].splitlines()[0]) for output in outputs
    )
    assert first == second
    assert first["first"] == {"process": 0, "long": "ü" * 1000}
    assert first["restored"] == [True, 2, 2]
    assert first["lost"] == {"3": [["record.json", "is 9 bytes shorter than in the manifest"]]}
    assert "No space left on device" in first["failed"]
    assert (first["after"], first["again"]) == ([1, 2], [True, 3, [1, 2, 3]])
    assert sorted(path.name for path in directory.iterdir()) == ["1", "2", "3", "damaged-3"]
