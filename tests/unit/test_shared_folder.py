"""Folders that all processes must see, and shards that process 0 must see."""

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.checkpoint.arrays import missing_shards, save_arrays
from spmd.distributed import shared_folder
from spmd.distributed.hosts import read_problems
from spmd.distributed.shared_folder import (
    Mount,
    mount_of,
    process_names,
    shared_folder_problems,
    wait_until_seen,
)

TABLE = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
90 22 0:60 / {home} rw,relatime shared:2 - nfs4 server:/home rw,vers=4.2,acdirmax=60
91 90 0:61 / {home}/my\\040disk rw - tmpfs first rw
92 91 0:62 / {home}/my\\040disk rw - xfs /dev/nvme0n1 rw
"""


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("elsewhere", "ext4 /dev/vda at /"),
        ("home", "nfs4 server:/home at {home}"),
        ("home/run/that/is/not/there", "nfs4 server:/home at {home}"),
        ("home/my disk/run", "xfs /dev/nvme0n1 at {home}/my disk"),
        ("homes", "ext4 /dev/vda at /"),
        ("link/run", "nfs4 server:/home at {home}"),
    ],
)
def test_a_folder_is_on_the_innermost_mount(folder: str, expected: str, tmp_path: Path) -> None:
    """Also behind a link; of two file systems at one place, the later hides the earlier."""
    home = tmp_path.resolve() / "home"
    home.mkdir()
    (tmp_path / "link").symlink_to(home)
    table = tmp_path / "mountinfo"
    table.write_text(TABLE.format(home=home))
    assert str(mount_of(tmp_path / folder, table)) == expected.format(home=home)


def test_a_system_without_a_table_of_mounts_has_network_patience(tmp_path: Path) -> None:
    """A local file system shows changes at once, any other may be a network's."""
    unknown = mount_of(tmp_path, tmp_path / "missing")
    assert str(unknown) == "an unknown file system"
    assert unknown.patience == Mount("nfs4").patience > Mount("ext4").patience


def test_a_change_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be seen late; one that never is ends the wait."""
    answers = iter([False, False, True])
    assert wait_until_seen(lambda: next(answers), tmp_path)
    monkeypatch.setattr(Mount, "patience", 0.0)
    assert not wait_until_seen(lambda: False, tmp_path)


def test_many_processes_are_counted() -> None:
    """The first five are named with their hosts."""
    hosts = [f"node{process // 4}" for process in range(9)]
    assert process_names([1, 4], hosts) == "process 1 (node0), process 4 (node1)"
    assert process_names(range(1, 9), hosts).endswith("process 5 (node1), and 3 more")


def test_a_single_process_writes_nothing(tmp_path: Path) -> None:
    """It shares the folder with nobody."""
    assert shared_folder_problems(tmp_path / "run", "run") == ()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_process_0_cannot_write_is_a_problem(tmp_path: Path) -> None:
    """It is named with the reason of the system, and what was made before is removed."""
    (tmp_path / "file").write_text("")
    offer = shared_folder._write_nonce(tmp_path / "file" / "run", "the run folder")
    [problem] = read_problems(offer["failed"])
    assert problem.where == "the run folder"
    assert "cannot be written by process 0 (" in problem.what
    assert "Not a directory" in problem.what
    offer = shared_folder._write_nonce(tmp_path / "new" / "run", "the run folder")
    assert sorted(path.name for path in (tmp_path / "new" / "run").iterdir()) == [offer["name"]]
    shared_folder._remove(tmp_path / "new" / "run" / offer["name"], offer["made"])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_missing_shards_are_counted_by_process(tmp_path: Path) -> None:
    """Every shard of a written folder is found; a shard of another array, shape or half is missing."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def array(spec: P, *shape: int) -> jax.Array:
        return jax.device_put(np.zeros(shape, np.float32), NamedSharding(mesh, spec))

    written = {
        "w": array(P("a", "b"), 8, 4),
        "layers/v": array(P(None, "a"), 2, 4),
        "replicated": array(P(), 3),
        "scalar": jax.device_put(np.float32(0)),
    }
    save_arrays(tmp_path / "state", written)
    assert missing_shards(tmp_path / "state", written) == {}
    wanted = {**written, "w": array(P("a", "b"), 16, 4), "absent": array(P("a"), 4)}
    assert missing_shards(tmp_path / "state", wanted) == {0: 4 + 4}
    assert missing_shards(tmp_path / "nothing", written) == {0: 8 + 4 + 1 + 1}
