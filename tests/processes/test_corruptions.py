"""Whatever happens to a checkpoint on the disk is found, named and survived: the one before it is restored bitwise.

Each fault is injected for real: into the files, into the permissions, or into the file system that
they are on.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.checkpoint.manager import CheckpointManager
from spmd.checkpoint.manifest import SMALL, verify_manifest, write_manifest
from spmd.errors import CheckpointError
from tests.forked import ROOT
from tests.tiers import soak_but

KEEP = 5


def make_state(step: int) -> dict[str, jax.Array]:
    """A state of which one array is too large to be looked at in passing."""
    rng = np.random.default_rng(step)
    # nothing that could be compressed
    big = jnp.asarray(rng.integers(2**32, size=300_000), jnp.uint32)
    return {
        "big": big,
        "small": jnp.arange(40.0) * step,
        "half": jnp.full((8, 8), step, jnp.bfloat16),
    }


def assert_restored(checkpoints: CheckpointManager, step: int | None, expected: int) -> None:
    state = make_state(expected)
    template = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    restored, record = checkpoints.restore(step, template)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert record == {"step": expected}


def contents(folder: Path) -> dict[str, str]:
    """What is in a folder, by path."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of steps 10, 20 and 30, which nothing has happened to."""
    directory = tmp_path_factory.mktemp("whole")
    with CheckpointManager(directory, max_to_keep=KEEP) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, make_state(step), {"step": step}, {"val_loss": 1.0})
    return directory


@pytest.fixture
def directory(tmp_path: Path, whole: Path) -> Path:
    """A copy of them, for something to happen to."""
    return shutil.copytree(whole, tmp_path / "checkpoints")


def largest(folder: Path, pattern: str) -> Path:
    return max(folder.glob(pattern), key=lambda path: path.stat().st_size)


FILES: dict[str, Callable[[Path], Path]] = {
    "data": lambda step: largest(step, "state/**/d/*"),
    "manifest": lambda step: step / "state/manifest.ocdbt",
    "manifest of a process": lambda step: step / "state/ocdbt.process_0/manifest.ocdbt",
    "list of arrays": lambda step: step / "state/_METADATA",
    "Orbax's mark": lambda step: step / "state/commit_success.txt",
    "record": lambda step: step / "record.json",
    "metrics": lambda step: step / "metrics.json",
    "seal": lambda step: step / "manifest.json",
}


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flip(file: Path) -> None:
    with file.open("r+b") as stream:
        middle = file.stat().st_size // 2
        stream.seek(middle)
        byte = stream.read(1)[0]
        stream.seek(middle)
        stream.write(bytes([byte ^ 4]))


def empty(file: Path) -> None:
    os.truncate(file, 0)


def link(file: Path) -> None:
    outside = file.parents[len(file.parts) - 1 - file.parts.index("checkpoints")] / "outside"
    file.rename(outside)
    file.symlink_to(outside)


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGES = {
    "truncated": (truncate, "is 1 byte shorter than in the manifest", "it was modified"),
    "flipped": (flip, "has changed since the manifest was written", "cannot be read: it "),
    "deleted": (Path.unlink, "is missing", "is missing"),
    "emptied": (empty, "shorter than in the manifest", "it is not a manifest"),
    "linked": (link, "is a symbolic link", "cannot be read"),
    "a pipe": (pipe, "is not a regular file", "it is not a regular file"),
}


def half_a_copy(step: Path) -> None:
    """What a copy leaves that was interrupted: half of the files, the last of them in part."""
    files = sorted(path for path in step.rglob("*") if path.is_file())
    for path in files[len(files) // 2 + 1 :]:
        path.unlink()
    os.truncate(files[len(files) // 2], 10)


def files_of_another(step: Path) -> None:
    for name in ("record.json", "state/_METADATA"):
        shutil.copyfile(step.parent / "20" / name, step / name)


def other_step(step: Path) -> None:
    shutil.rmtree(step / "state")
    shutil.copytree(step.parent / "20" / "state", step / "state")


def renamed(step: Path) -> None:
    """The newest one is gone, and the one of step 20 has its name, as a copy."""
    shutil.rmtree(step)
    shutil.copytree(step.parent / "20", step)


def renamed_with_an_earlier_manifest(step: Path) -> None:
    """The same, with a manifest that has no step, and the record of a run."""
    renamed(step)
    (step / "record.json").write_text('{"step": 20, "position": 160}')
    (step / "manifest.json").unlink()
    write_manifest(step)


def linked_folder(step: Path) -> None:
    step.rename(step.parent.parent / "elsewhere")
    step.symlink_to(step.parent.parent / "elsewhere")


def a_file_instead(step: Path) -> None:
    shutil.rmtree(step)
    step.write_text("30")


FOLDERS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "half a copy": (half_a_copy, "", ""),
    "the state gone": (
        lambda step: shutil.rmtree(step / "state"),
        "state/manifest.ocdbt",
        "is missing",
    ),
    "the data gone": (
        lambda step: shutil.rmtree(step / "state/ocdbt.process_0"),
        "state/ocdbt",
        "is missing",
    ),
    "an empty folder": (
        lambda step: (shutil.rmtree(step), step.mkdir()),
        "manifest.json",
        "is missing",
    ),
    "a file more": (
        lambda step: (step / "state/d/more").write_text(""),
        "state/d/more",
        "is not in the manifest",
    ),
    "the record of another step": (
        files_of_another,
        "record.json",
        "has changed since the manifest was written",
    ),
    "the state of another step": (other_step, "state/", "is not in the manifest"),
    "another step's name": (renamed, ".", "is the checkpoint of step 20"),
    "another step's name, by its record": (
        renamed_with_an_earlier_manifest,
        ".",
        "is the checkpoint of step 20",
    ),
    "a link to a folder": (linked_folder, ".", "is a symbolic link"),
    "a file instead of a folder": (
        a_file_instead,
        "manifest.json",
        "cannot be read: Not a directory",
    ),
}


def survives(directory: Path, damage: Callable[[Path], object], where: str, what: str) -> None:
    """Damages checkpoint 30: found, named, refused by name, left as it is, and saved again beside it."""
    before = {step: contents(directory / step) for step in ("10", "20")}
    damage(directory / "30")
    damaged = contents(directory / "30")
    with CheckpointManager(directory, max_to_keep=KEEP, read_only=True) as checkpoints:
        assert_restored(checkpoints, None, 20)
        assert [step for step in checkpoints.damaged if step != 30] == []
        found = checkpoints.damaged[30]
        assert any(where in problem.where and what in problem.what for problem in found), found
        with pytest.raises(CheckpointError, match="checkpoint 30 is damaged") as caught:
            checkpoints.restore(30, {})
        assert {problem.what for problem in caught.value.problems} == {
            problem.what for problem in found
        }
        assert all(str(directory / "30") in problem.where for problem in caught.value.problems)
        assert (checkpoints.steps(), checkpoints.latest_valid()) == ((10, 20), 20)
    assert contents(directory / "30") == damaged
    with CheckpointManager(directory, max_to_keep=KEEP) as checkpoints:
        assert_restored(checkpoints, None, 20)
        checkpoints.save(30, make_state(30), {"step": 30})
        assert_restored(checkpoints, None, 30)
        assert checkpoints.steps() == (10, 20, 30)
    assert {step: contents(directory / step) for step in ("10", "20")} == before
    assert contents(directory / "damaged-30") == damaged
    with CheckpointManager(directory, max_to_keep=KEEP) as checkpoints:
        assert checkpoints.damaged == {}


@pytest.mark.parametrize(
    "file", soak_but(FILES, "data", "manifest", "list of arrays", "record", "seal")
)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_restored(directory, file, damage):
    """Truncated, flipped, deleted, emptied or replaced, in any kind of file: the file is named, 20 is restored."""
    inject, what, of_the_seal = DAMAGES[damage]
    path = FILES[file](directory / "30")
    if file == "Orbax's mark" and not path.exists():
        pytest.skip("the oldest supported Orbax writes no mark on a local disk")
    assert (path.stat().st_size > SMALL) == (file == "data"), (
        "only the data are too large to be read in passing"
    )
    name = path.relative_to(directory / "30").as_posix()
    survives(directory, lambda step: inject(path), name, of_the_seal if file == "seal" else what)


@pytest.mark.parametrize("damage", FOLDERS)
def test_a_damaged_folder_is_named_and_the_checkpoint_before_is_restored(directory, damage):
    """Half copied, mixed up or replaced as a whole: what is wrong is named, 20 is restored."""
    survives(directory, *FOLDERS[damage])


def test_a_manifest_without_a_step_is_read(directory):
    """Of an earlier checkpoint, with the record of its own step, and with one that is not of a run; control: above."""
    for record in ({"step": 30, "position": 240}, {"step": 7}, {"position": 3}, {"step": "20"}):
        (directory / "30" / "record.json").write_text(json.dumps(record))
        (directory / "30" / "manifest.json").unlink()
        write_manifest(directory / "30")
        with CheckpointManager(directory, max_to_keep=KEEP, read_only=True) as checkpoints:
            assert checkpoints.damaged == {}
            assert checkpoints.record(30) == record


def test_a_step_in_a_manifest_cannot_be_changed_alone(directory):
    """As no other entry of it can; a copy under a name that is no step is intact."""
    manifest = directory / "30" / "manifest.json"
    text = manifest.read_text()
    assert '"step": 30' in text
    copy = shutil.copytree(directory / "30", directory.parent / "best")
    assert verify_manifest(copy) == []
    for other in ('"step": 20', '"step": 30.0', '"step": "30"', '"step": null'):
        manifest.write_text(text.replace('"step": 30', other))
        (problem,) = verify_manifest(directory / "30")
        assert problem.what in (
            "cannot be read: it was modified",
            "cannot be read: it is not a manifest",
        )


def test_it_is_the_seal_that_finds_a_flipped_bit(directory, monkeypatch):
    """Control: with the check turned off, a bit that was flipped in the data is restored, and nobody is told."""
    flip(FILES["data"](directory / "30"))
    monkeypatch.setattr(
        "spmd.checkpoint.local_store.verify_manifest", lambda folder, contents=True: []
    )
    state = make_state(30)
    template = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    with CheckpointManager(directory, read_only=True) as checkpoints:
        restored, _ = checkpoints.restore(None, template)
    assert (np.asarray(restored["big"]) != np.asarray(state["big"])).sum() == 1


def test_where_every_checkpoint_is_damaged_all_of_it_is_said(directory):
    """Nothing is restored, each damaged file of each step is named, and nothing is removed, however often one asks."""
    for step in (10, 20, 30):
        truncate(directory / str(step) / "record.json")
    for _ in range(2):
        with CheckpointManager(directory) as checkpoints:
            with pytest.raises(CheckpointError, match="none of the checkpoints is valid") as caught:
                checkpoints.restore(None, {})
            assert checkpoints.latest() is None
    named = [problem.where for problem in caught.value.problems]
    assert named == [str(directory / str(step) / "record.json") for step in (10, 20, 30)]


def test_a_damaged_checkpoint_does_not_count_as_kept(directory):
    """Where one is to be kept and the newest is damaged, the last valid one stays until the next one is whole."""
    flip(FILES["data"](directory / "30"))
    with CheckpointManager(directory, max_to_keep=1, keep_best=0) as checkpoints:
        assert checkpoints.latest_valid() == 20
        checkpoints.save(25, make_state(25), {"step": 25})
        assert checkpoints.steps() == (25,)
        flip(FILES["data"](directory / "25"))
        assert checkpoints.latest_valid() is None
    assert sorted(path.name for path in directory.iterdir()) == ["25", "damaged-30"]


def inside(program: str, directory: Path, *wrapper: str) -> dict[str, object]:
    """What a program says that runs in a process of its own, wrapped in a command that changes its world."""
    command = [*wrapper, sys.executable, "-W", "error", "-c", PRELUDE + program, str(directory)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    assert done.returncode == 0, f"{' '.join(wrapper)} does not work here, or: {done.stderr}"
    return json.loads(done.stdout)


PRELUDE = """
import json, os, subprocess, sys
from pathlib import Path
import jax
jax.config.update("jax_platforms", "cpu")
from spmd.checkpoint.manager import CheckpointManager
from spmd.errors import CheckpointError
from tests.processes.test_corruptions import assert_restored, contents, flip, make_state, FILES
directory = Path(sys.argv[1])
out = {}

def told(call, *arguments):
    try:
        call(*arguments)
    except CheckpointError as error:
        return str(error)
"""


def test_what_may_not_be_read_is_named_and_the_checkpoint_before_is_restored(tmp_path, whole):
    """A file, a folder and a whole checkpoint without permission, met without the rights that root has over them."""
    cases = {
        "file": "state/_METADATA",
        "folder": "state/ocdbt.process_0",
        "data": "",
        "checkpoint": ".",
    }
    for case in cases:
        shutil.copytree(whole, tmp_path / case)
    cases["data"] = (
        FILES["data"](tmp_path / "data" / "30").relative_to(tmp_path / "data" / "30").as_posix()
    )
    program = f"""
for case, name in {cases!r}.items():
    path = directory / case / "30" / name
    path.chmod(0)
    with CheckpointManager(directory / case, max_to_keep={KEEP}) as checkpoints:
        assert_restored(checkpoints, None, 20)
        out[case] = [[p.where, p.what] for p in checkpoints.damaged[30]]
        if case != "checkpoint":  # a folder that may not be written may still be renamed
            checkpoints.save(30, make_state(30), {{"step": 30}})
            assert_restored(checkpoints, None, 30)
print(json.dumps(out))
"""
    # Permission bits do not bind root, unless it lacks the two capabilities that say so.
    wrapper = (
        ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
    )
    out = inside(program, tmp_path, *wrapper)
    (tmp_path / "checkpoint" / "30").chmod(0o700)
    denied = "cannot be read: Permission denied"
    assert out["file"] == [["state/_METADATA", denied]]
    assert out["data"] == [[cases["data"], denied]]
    assert out["checkpoint"] == [["manifest.json", denied]]
    assert ["state/ocdbt.process_0", denied] in out["folder"]


@pytest.mark.soak
def test_a_disk_that_fills_up_or_turns_read_only_costs_only_the_save_that_met_it(tmp_path):
    """On a small file system of its own: full before, during and at the end of a save, and read-only; each is said."""
    program = """
state = make_state(2)
size = sum(x.nbytes for x in state.values())
filler = directory / "filler"

def fill(leave):
    with filler.open("wb", buffering=0) as file:
        about = os.statvfs(directory)
        os.posix_fallocate(file.fileno(), 0, about.f_bavail * about.f_bsize - leave)

def failed(name, leave=None, at=None):
    global moment
    moment = at
    if leave is not None:
        fill(leave)
    with CheckpointManager(directory / "c") as checkpoints:
        out[name] = told(lambda: (checkpoints.save(2, state, {"step": 2}), checkpoints.wait()))
        moment = None
        filler.unlink(missing_ok=True)
        assert checkpoints.steps() == (1,) and os.listdir(directory / "c") == ["1"], os.listdir(directory / "c")
        assert contents(directory / "c" / "1") == before
        assert_restored(checkpoints, None, 1)

def hook(event, args):
    if moment and event == "open" and moment in str(args[0]):
        fill(0)

moment = None
sys.addaudithook(hook)
with CheckpointManager(directory / "c") as checkpoints:
    checkpoints.save(1, make_state(1), {"step": 1})
before = contents(directory / "c" / "1")
failed("before", leave=size - 1)
failed("arrays", leave=size + 4096)
failed("record", at="2.saving/record.json")
failed("seal", at="manifest.json.unfinished")
with CheckpointManager(directory / "c") as checkpoints:
    checkpoints.save(2, state, {"step": 2})
    assert_restored(checkpoints, None, 2)
flip(FILES["data"](directory / "c" / "2"))
subprocess.run(["mount", "-o", "remount,ro", directory], check=True)
with CheckpointManager(directory / "c") as checkpoints:
    assert_restored(checkpoints, None, 1)
    out["lost"] = [p.what for p in checkpoints.damaged[2]]
    out["read-only"] = told(lambda: checkpoints.save(2, state, {"step": 2}))
    assert_restored(checkpoints, None, 1)
assert contents(directory / "c" / "1") == before
print(json.dumps(out))
"""
    user = () if os.geteuid() == 0 else ("-Ur",)
    mount = 'mount -t tmpfs -o size=6m tmpfs "$0" && exec "$@"'
    out = inside(program, tmp_path, "unshare", *user, "-m", "sh", "-c", mount, str(tmp_path))
    assert "not enough disk space for another checkpoint" in out["before"]
    for moment in ("arrays", "record", "seal"):
        assert str(tmp_path / "c" / "2") in out[moment]
        assert "No space left on device" in out[moment], out[moment]
    assert out["lost"] == ["has changed since the manifest was written"]
    assert "Read-only file system" in out["read-only"]
