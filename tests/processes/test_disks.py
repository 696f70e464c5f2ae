"""Two processes with disks of their own: both say so before anything compiles, and nothing partial is ever valid.

A mount namespace gives one of the processes another file system at a path of the other, as a second host would have.
"""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import pytest

from spmd.distributed.local import free_port, launch_local, process_commands
from spmd.hf.family import family_for
from spmd.hf.save import save_params
from spmd.models.llama import PRESETS
from spmd.training.state import init_state
from tests import tiny
from tests.train_runs import finish_together, write_tiny

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, sys
from pathlib import Path
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from spmd.distributed.cluster_env import LaunchArgs
from spmd.distributed.initialize import initialize
import spmd.checkpoint.local_store as local_store
import spmd.checkpoint.manager as manager
from spmd.distributed import shared_folder
from spmd.distributed.shared_folder import shared_folder_problems
from spmd.errors import CheckpointError

shared_folder._LOCAL_SECONDS = 0.0
port, me, shared, own, read_only = int(sys.argv[1]), int(sys.argv[2]), *map(Path, sys.argv[3:])
initialize(2, LaunchArgs(f"127.0.0.1:{port}", 2, me, "none"))
found = {}
for name, folder in {"shared": shared, "own": own, "read_only": read_only}.items():
    found[name] = [str(problem) for problem in shared_folder_problems(folder / "run", name)]
found["left"] = sorted(path.name for path in (*own.iterdir(), *read_only.iterdir()))

mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = NamedSharding(mesh, P("fsdp"))
template = {"w": jax.ShapeDtypeStruct((8, 4), np.float32, sharding=sharding)}
state = {"w": jax.make_array_from_callback((8, 4), sharding, lambda i: np.ones((2, 4), np.float32))}

def attempt(act):
    try:
        act()
    except CheckpointError as error:
        return str(error)
    return "done"

def save(folder):
    with manager.CheckpointManager(folder) as checkpoints:
        checkpoints.save(1, state)

def restore(folder):
    with manager.CheckpointManager(folder, read_only=True) as checkpoints:
        checkpoints.restore(1, template)

found["opened"] = attempt(lambda: save(own / "opened"))
local_store.shared_folder_problems = lambda *names: ()  # as if the disk had been lost since
found["saved in shared"] = attempt(lambda: save(shared / "saved"))
for name in ("saved", "unchecked"):
    (own / name).mkdir()
found["saved in own"] = attempt(lambda: save(own / "saved"))
found["valid in own"] = sorted(path.name for path in (own / "saved").glob("*"))
found["restored from shared"] = attempt(lambda: restore(shared / "saved"))
(own / "copied").symlink_to(shared / "saved")
if me == 1:
    (own / "copied").unlink()
found["restored from own"] = attempt(lambda: restore(own / "copied"))
local_store.missing_shards = lambda *names: {}
found["saved without a check"] = attempt(lambda: save(own / "unchecked"))
print(json.dumps({"found": found}))
"""


def in_namespace(script: str, *folders: Path) -> list[str]:
    """Words before a command, which then runs after a shell script that has mounted something at the folders."""
    allowed = subprocess.run(["unshare", "-m", "true"], capture_output=True, text=True, check=False)
    assert allowed.returncode == 0, f"mount namespaces are not permitted: {allowed.stderr}"
    numbered = list(map(str, folders))
    shift = f'{script}; shift {len(numbered)}; exec "$@"'
    return ["unshare", "-m", "sh", "-e", "-c", shift, "sh", *numbered]


def test_folders_that_are_not_shared_are_named_and_hold_nothing_valid(tmp_path: Path) -> None:
    """Each fault is found on both processes, and the shared folder beside has none."""
    folders = []
    for name in ("shared", "own", "read-only"):
        folders.append(tmp_path / name)
        folders[-1].mkdir()
    mounts = 'mount -t tmpfs disk-1 "$1"; mount --bind "$2" "$2"; mount -o remount,bind,ro "$2"'
    prefixes: list[list[str]] = [[], in_namespace(mounts, *folders[1:])]
    port = free_port()
    commands = []
    for me, prefix in enumerate(prefixes):
        commands.append([*prefix, sys.executable, "-c", PROGRAM, port, me, *folders])
    outputs = finish_together(*commands, timeout=120)
    first, second = (
        json.loads(output[output.index('{"found"') :].splitlines()[0])["found"]
        for output in outputs
    )
    assert first.pop("valid in own") != ["1"]
    assert second.pop("valid in own") != ["1"]
    assert first == second
    found = first
    assert (found["shared"], found["left"]) == ([], [])
    [own] = found["own"]
    assert "process 1 (" in own
    assert "does not see what process 0 writes" in own
    assert f"tmpfs disk-1 at {folders[1]}" in own
    [read_only] = found["read_only"]
    assert "cannot write to it: Read-only file system" in read_only
    assert "does not see what process 0 writes" in found["opened"]
    assert "lacks 2 shards of process 1" in found["saved in own"]
    assert found["saved in shared"] == "done"
    assert found["saved without a check"] == "done"  # so nothing else finds it
    assert found["restored from shared"] == "done"
    assert "is not what process 0 sees there: process 1 (" in found["restored from own"]


SHORT = """
config = dataclasses.replace(
    config, steps=2, optimizer=spmd.OptimizerConfig(schedule="constant"), evaluate=spmd.EvaluationConfig(tokens=64)
)
"""


def launch(prefix: Sequence[str], *arguments: object) -> int:
    """Launch a command in two processes; `prefix` are words before that of the second."""
    first, second = process_commands(
        list(map(str, arguments)), processes=2, devices=2, port=free_port()
    )
    return launch_local([first, [*prefix, *second]], grace=60)


def own_disk(place: Path) -> list[str]:
    """Words before the command of a process with a disk of its own at a place."""
    return in_namespace('mount -t tmpfs disk-1 "$1"', place)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder to mount a disk at; commands find this repository."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


@pytest.mark.soak
@pytest.mark.parametrize("resume", ["never", "always"])
def test_a_run_in_folders_that_are_not_shared_ends_before_it_compiles(
    resume: str, disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both processes exit with 2 and name the disk, whatever is in the folders; nothing is left in them."""
    config = write_tiny(disk.parent, SHORT)
    if resume == "always":
        (disk / "run" / "checkpoints" / "1").mkdir(parents=True)
    before = sorted(disk.rglob("*"))
    code = launch(own_disk(disk), "train", config, "--out", disk / "run", "--resume", resume)
    printed = capfd.readouterr()
    assert code == 2, printed.err
    assert printed.err.count("is not shared: process 1 (") == 2
    assert f"process 1 has tmpfs disk-1 at {disk}" in printed.err
    assert "on storage that all hosts mount (--out)" in printed.err
    assert "compil" not in printed.out + printed.err
    assert sorted(disk.rglob("*")) == before


@pytest.mark.soak
def test_the_same_run_trains_in_a_shared_folder(
    disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Control of the test above: the launch differs in the disk alone, and the run can be resumed."""
    config = write_tiny(disk.parent, SHORT)
    train = ["train", config, "--out", disk / "run"]
    assert launch([], *train) == 0, capfd.readouterr().err
    assert launch([], *train, "--steps", 3, "--resume", "always") == 0, capfd.readouterr().err
    assert "resuming from step 2" in capfd.readouterr().out
    assert not list((disk / "run").glob(".shared-*"))


@pytest.mark.soak
@pytest.mark.parametrize("disks", ["own", "shared"])
def test_doctor_examines_the_run_folder(
    disks: str, disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A folder that is not shared is one of the problems, under the name that the table of facts has for it."""
    prefix = own_disk(disk) if disks == "own" else []
    doctor = ["doctor", "--mesh.fsdp", 4, "--megabytes", 1, "--json"]
    launch(prefix, *doctor, "--out", disk / "run")
    printed = capfd.readouterr()
    found = json.loads(printed.out[printed.out.index("{") :].splitlines()[0])
    places = [problem["where"] for problem in found["problems"]]
    assert ("run folder" in places) == (disks == "own"), printed


@pytest.mark.soak
@pytest.mark.parametrize("copies", ["other", "equal"])
def test_other_files_of_a_model_on_another_host_are_refused(
    copies: str, disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Folders of equal names and shapes that hold other numbers are told apart, and copies are fine."""
    config = write_tiny(disk.parent, SHORT)
    model = dataclasses.replace(PRESETS["test"], vocab=256)
    params = init_state(tiny.plan(model)).params
    first, second = disk / "model", disk / "copy"
    save_params(first, params, family_for(model), model)
    if copies == "other":
        params = jax.tree.map(lambda x: x * 2, params)
    save_params(second, params, family_for(model), model)
    prefix = in_namespace('mount --bind "$2" "$1"', first, second)
    code = launch(prefix, "train", config, "--out", disk / "run", "--init", first)
    printed = capfd.readouterr().err
    assert code == (2 if copies == "other" else 0), printed
    refused = "process 1: digest of model.model.safetensors is "
    assert (refused in printed) == (copies == "other"), printed
