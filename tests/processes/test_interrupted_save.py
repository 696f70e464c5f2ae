"""An interrupted save costs nothing: a kill, a full disk and another process leave the last checkpoint whole."""

import json
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.checkpoint.manager import CheckpointManager
from spmd.errors import CheckpointError
from tests.forked import ROOT
from tests.numerics.test_checkpoint import filled, make_mesh

pytestmark = pytest.mark.compat

IMPORTS = """
import json, os, resource, signal, sys, threading
from pathlib import Path
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
from spmd.checkpoint.manager import CheckpointManager
from spmd.errors import CheckpointError
directory = Path(sys.argv[1])
"""
STATE = """
state = {"w": jnp.sqrt(jnp.arange(65536.0)).reshape(256, 256)}
here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), state)
"""


def child(
    program: str, directory: Path, prelude: str = IMPORTS + STATE
) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process of its own, on one device, with warnings as errors."""
    command = [sys.executable, "-W", "error", "-c", prelude + program, str(directory)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done


def test_leftovers_of_an_interrupted_save_are_removed_and_reported(tmp_path: Path) -> None:
    """Opening a run removes half-written checkpoints, names them, and touches nothing else."""
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, filled(1), {})
        assert checkpoints.leftovers == ()
    (tmp_path / "4.savings").mkdir()
    for name in ("2.saving", "3.pruned"):
        (tmp_path / name / "state").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.leftovers == ("2.saving", "3.pruned")
        assert checkpoints.steps() == (1,)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "4.savings", "notes.txt"]


@pytest.mark.soak
def test_another_process_with_other_devices_restores_in_silence(tmp_path: Path) -> None:
    """A process with one device restores what eight wrote, saves on, and neither prints, nor warns, nor unpickles."""
    sharding = NamedSharding(make_mesh(fsdp=8), P("fsdp"))
    values = np.arange(256 * 256, dtype=np.float32).reshape(256, 256)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jax.device_put(values, sharding)}, {"seed": 0})
    program = """
import collections, pickle
unpickled = []
sys.addaudithook(lambda event, args: unpickled.append(args) if event == "pickle.find_class" else None)
pickle.loads(pickle.dumps(collections.OrderedDict()))
assert unpickled == [("collections", "OrderedDict")]
with CheckpointManager(directory) as checkpoints:
    assert jax.device_count() == 1
    state, record = checkpoints.restore(None, abstract)
    checkpoints.save(2, {"w": state["w"] + 1}, record)
    checkpoints.save(3, state, record, {"val_loss": 1.0})
assert len(unpickled) == 1
print(record)
"""
    done = child(program, tmp_path)
    assert (done.stdout, done.stderr) == ("{'seed': 0}\n", "")
    template = {"w": jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding)}
    with CheckpointManager(tmp_path) as checkpoints:
        assert (checkpoints.steps(), checkpoints.best()) == ((1, 2, 3), 3)
        np.testing.assert_array_equal(checkpoints.restore(2, template)[0]["w"], values + 1)


def test_a_full_disk_is_reported_and_costs_only_the_save_that_met_it(tmp_path: Path) -> None:
    """Where no file may grow, wait, the next save and close each raise; the last good checkpoint stays whole."""
    program = """
def told(call):
    try:
        call()
    except CheckpointError as error:
        return str(error)

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

checkpoints = CheckpointManager(directory, max_to_keep=1)
checkpoints.save(1, state, {})
checkpoints.wait()
out = {}
limit(4096)  # the write fails as on a full disk: Python ignores SIGXFSZ and sees EFBIG
checkpoints.save(2, state, {})
out["wait"] = told(checkpoints.wait)
checkpoints.save(2, state, {})
out["save"] = told(lambda: checkpoints.save(3, state, {}))
out["after"] = sorted(os.listdir(directory)), checkpoints.steps(), checkpoints.latest()
checkpoints.save(2, state, {})
out["close"] = told(checkpoints.close)
limit(resource.RLIM_INFINITY)
with CheckpointManager(directory, max_to_keep=1) as checkpoints:
    restored, _ = checkpoints.restore(None, abstract)
    out["equal"] = bool((restored["w"] == state["w"]).all())
    checkpoints.save(2, restored, {})
    out["steps"] = checkpoints.steps()
print(json.dumps(out))
"""
    out = json.loads(child(program, tmp_path).stdout)
    for call in ("wait", "save", "close"):
        assert str(tmp_path / "2") in out[call]
        assert "File too large" in out[call]
    assert out["after"] == [["1"], [1], 1]
    assert (out["equal"], out["steps"]) == (True, [2])


STAGES = {
    # what the save does: the event, and the name in it, that it is killed at; what it leaves; the
    # step that is latest
    "makes its folder": ("os.mkdir", "2.saving", [], 1),
    "begins to write arrays": ("os.mkdir", "2.saving/state", ["2.saving"], 1),
    "has written the arrays": ("os.rename", "2.saving/state", ["2.saving"], 1),
    "writes the record": ("open", "2.saving/record.json", ["2.saving"], 1),
    "writes the metrics": ("open", "2.saving/metrics.json", ["2.saving"], 1),
    "forces files onto the disk": ("open", "2.saving/state/manifest.ocdbt", ["2.saving"], 1),
    "writes the seal": ("open", "manifest.json.unfinished", ["2.saving"], 1),
    "finishes the seal": ("os.rename", "manifest.json.unfinished", ["2.saving"], 1),
    "commits": ("os.rename", "checkpoints/2.saving", ["2.saving"], 1),
    "prunes": ("os.rename", "checkpoints/1", [], 2),
    "begins to remove the pruned": ("shutil.rmtree", "1.pruned", ["1.pruned"], 2),
    "is halfway through removing": ("os.rmdir", "", ["1.pruned"], 2),
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each stage, the checkpoints of a process that was killed there while it saved step 2.

    From the moment the arrays are copied, each stage waits until `save` has returned, so this also
    proves that a save is asynchronous.
    """
    directory = tmp_path_factory.mktemp("killed")
    program = f"""
from tests.forked import fork

def save(place, event, name):
    returned, armed = threading.Event(), False

    def kill(happened, args):
        if armed and happened == event and name in str(args[0]) and returned.wait(60):
            os.kill(os.getpid(), signal.SIGKILL)

    if event == "os.mkdir":
        returned.set()
    sys.addaudithook(kill)
    checkpoints = CheckpointManager(place / "checkpoints", max_to_keep=1)
    checkpoints.save(1, {{"w": jnp.arange(65536.0).reshape(256, 256)}}, {{}})
    checkpoints.wait()
    state = {{"w": jnp.arange(65536.0).reshape(256, 256) * 2}}
    armed = True
    checkpoints.save(2, state, {{}})
    returned.set()
    checkpoints.close()

for stage, (event, name, *_) in {STAGES!r}.items():
    place = directory / stage
    place.mkdir()
    process = fork(lambda: save(place, event, name), place / "log")
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert code == -signal.SIGKILL, (stage, code, (place / "log").read_text())
"""
    child(program, directory, prelude=IMPORTS)
    return directory


@pytest.mark.parametrize("stage", STAGES)
def test_a_kill_at_any_stage_of_a_save_leaves_one_whole_checkpoint(
    killed: Path, stage: str
) -> None:
    """Killed at whatever it does, the save is there and sealed or it is a leftover, and none is ever damaged."""
    *_, leftovers, latest = STAGES[stage]
    directory = killed / stage / "checkpoints"
    with CheckpointManager(directory, max_to_keep=1) as checkpoints:
        assert list(checkpoints.leftovers) == leftovers
        assert (checkpoints.latest_valid(), checkpoints.damaged) == (latest, {})
        template = {
            "w": jax.ShapeDtypeStruct(
                (256, 256), jnp.float32, sharding=NamedSharding(make_mesh(x=8), P())
            )
        }
        expected = jnp.arange(65536.0).reshape(256, 256) * latest
        np.testing.assert_array_equal(checkpoints.restore(None, template)[0]["w"], expected)
        checkpoints.save(3, {"w": expected}, {})
    assert sorted(path.name for path in directory.iterdir()) == ["3"]


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    """The message has the bytes that are needed and those that are free; what is there stays as it was."""
    state = {"w": jnp.ones((16, 16))}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=1023))
        with pytest.raises(CheckpointError, match="1 KiB to write, 1023 B free"):
            checkpoints.save(2, state, {})
        assert checkpoints.steps() == (1,)
        monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=1024))
        checkpoints.save(2, state, {})
        assert checkpoints.steps() == (1, 2)
