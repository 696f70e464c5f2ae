"""Checkpoints in a local folder, or one of a shared file system.

A checkpoint of step 100 is a folder that is complete or does not exist:

```
100/state/          all arrays of the state by path (Orbax, OCDBT), independent of the mesh
100/record.json     the rest: data position, seed, config, plan, mesh, versions
100/metrics.json    its metrics
100/manifest.json       the manifest: size and checksum of each of these files
```

It is written as `100.saving` (of the run with lease 3 as `100.3.saving`), gets its manifest, and is
then renamed. A checkpoint that is no longer kept is renamed to `100.pruned` before it is removed.
So a folder named by a step was complete once, and the manifest shows whether it still is. A damaged
checkpoint is never used and never removed: the next save renames it to `damaged-100`.
"""

import contextlib
import json
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from spmd.checkpoint.arrays import (
    disk_errors,
    missing_shards,
    read_errors,
    restore_arrays,
    save_arrays,
)
from spmd.checkpoint.manifest import (
    manifest_digest,
    read_object,
    sync,
    verify_manifest,
    write_manifest,
)
from spmd.checkpoint.retention import Metrics, quarantine, scan
from spmd.checkpoint.store import CheckpointStore, Scan
from spmd.checkpoint.tree import OptionalState
from spmd.distributed.hosts import broadcast_from_first, gather_json
from spmd.distributed.shared_folder import (
    process_names,
    shared_folder_problems,
    wait_until_seen,
)
from spmd.errors import CheckpointError, Problem
from spmd.tree import human_bytes

RECORD_MAX_BYTES = 64 << 20
_UNWRITABLE = "free disk space, or resolve the error; earlier checkpoints are unchanged"
_UNSHARED = "another directory, on storage that all hosts mount"


class LocalStore(CheckpointStore):
    """Checkpoints in a folder; arguments are as for `CheckpointManager`."""

    def __init__(self, folder: Path, before_write: Callable[[], object], owner: int) -> None:
        self._folder = folder
        self._before_write = before_write
        self._unfinished_suffix = ".saving"
        if owner:
            self._unfinished_suffix = f".{owner}.saving"

    def access_problems(self) -> tuple[Problem, ...]:
        """Return problems of processes without access to the folder."""
        return shared_folder_problems(self._folder, str(self._folder))

    def scan(self, *, create: bool) -> Scan:
        """Find checkpoints and leftovers; of large files, only the size is verified."""
        fix = "choose a writable directory"
        with disk_errors(self._folder, "opening the checkpoints", fix):
            if create:
                self._folder.mkdir(parents=True, exist_ok=True)
            return Scan(*scan(self._folder))

    def begin(self, step: int, arrays: Mapping[str, jax.Array]) -> None:
        """Make the folder of a save, if there is enough disk space."""
        self._check_disk_space(arrays)
        self._before_write()
        try:
            with self._write_errors(step):
                self._unfinished(step).mkdir(exist_ok=jax.process_count() > 1)
        except CheckpointError:
            if jax.process_index() == 0:
                self.discard(step)
            raise

    def write(self, step: int, arrays: Mapping[str, jax.Array]) -> None:
        """Write the shards of this process; Orbax waits for those of the others."""
        with self._write_errors(step):
            save_arrays(self._unfinished(step) / "state", arrays)

    def commit(
        self,
        step: int,
        arrays: Mapping[str, jax.Array],
        record: str,
        metrics: Metrics,
        damaged: Sequence[int],
    ) -> None:
        """Write the other files and the manifest, and rename the folder."""
        unfinished = self._unfinished(step)
        with self._write_errors(step):
            if jax.process_count() > 1:
                self._check_complete(step, arrays)
            files = {"record.json": record, "metrics.json": json.dumps(dict(metrics))}
            for name, text in files.items():
                (unfinished / name).write_text(text, encoding="utf-8")
            write_manifest(unfinished, step)
            self._before_write()
            for other in damaged:
                quarantine(self._folder / str(other))
            unfinished.rename(self._folder / str(step))
            sync(self._folder)

    def discard(self, step: int) -> None:
        """Remove the folder of a save."""
        self.remove_leftovers([self._unfinished(step).name])

    def prune(self, step: int) -> None:
        """Rename the folder of a checkpoint, and remove it."""
        with self._write_errors(step):
            with contextlib.suppress(FileNotFoundError):  # removed by the user
                (self._folder / str(step)).rename(self._folder / f"{step}.pruned")
            self.remove_leftovers([f"{step}.pruned"])

    def remove_leftovers(self, names: Sequence[str]) -> None:
        """Remove folders."""
        self._before_write()
        for name in names:
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def verify(self, step: int, *, contents: bool) -> Sequence[Problem]:
        """Compare the files of a checkpoint with its manifest."""
        return verify_manifest(self._folder / str(step), contents=contents)

    def check_seen(self, step: int) -> None:
        """Compare the manifest on each process with that on process 0."""
        if jax.process_count() == 1:
            return
        folder = self._folder / str(step)
        expected = broadcast_from_first(lambda: manifest_digest(folder))
        is_seen = wait_until_seen(lambda: manifest_digest(folder) == expected, folder)
        answers = gather_json([socket.gethostname(), is_seen])
        hosts = [host for host, _ in answers]
        blind = [process for process, (_, seen) in enumerate(answers) if not seen]
        if blind:
            what = "is not what process 0 sees there: "
            what += process_names(blind, hosts)
            fix = "read it from storage that all hosts mount, or copy it to each host"
            raise CheckpointError("nothing was restored", [Problem(str(folder), what, fix=fix)])

    def record(self, step: int) -> dict[str, Any]:
        """Read `record.json`."""
        path = self._folder / str(step) / "record.json"
        with read_errors(path):
            return read_object(path, RECORD_MAX_BYTES)

    def restore(
        self,
        step: int,
        wanted: Mapping[str, jax.ShapeDtypeStruct],
        branches: Sequence[str],
        optional: Sequence[OptionalState],
    ) -> dict[str, jax.Array]:
        """Restore arrays with Orbax."""
        return restore_arrays(self._folder / str(step) / "state", wanted, branches, optional)

    def path_of(self, step: int, name: str = "") -> str:
        """Return the path of a checkpoint, or of a file in it."""
        return str(self._folder / str(step) / name)

    def _check_complete(self, step: int, arrays: Mapping[str, jax.Array]) -> None:
        """Raise a `CheckpointError` unless process 0 sees the shards of every process."""
        folder = self._unfinished(step)
        problems = list[Problem]()
        for process, count in missing_shards(folder / "state", arrays).items():
            what = f"lacks {count} shards of process {process}"
            detail = "process 0 does not see all files of that process"
            problems.append(Problem(str(folder), what, detail, _UNSHARED))
        if problems:
            raise CheckpointError("nothing was saved", problems)

    def _check_disk_space(self, arrays: Mapping[str, jax.Array]) -> None:
        needed = 0
        for array in arrays.values():
            for shard in array.addressable_shards:
                if shard.replica_id == 0:
                    needed += shard.data.nbytes
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            problem = Problem(
                str(self._folder),
                "has not enough disk space for another checkpoint",
                f"{human_bytes(needed)} to write, {human_bytes(free)} free",
                "free disk space, or keep fewer checkpoints; existing ones are unchanged",
            )
            raise CheckpointError("nothing was saved", [problem])

    def _unfinished(self, step: int) -> Path:
        return self._folder / f"{step}{self._unfinished_suffix}"

    @contextlib.contextmanager
    def _write_errors(self, step: int) -> Iterator[None]:
        """Convert errors of the disk to a `CheckpointError`.

        Another run that has taken the folder removes unfinished saves: that is the error then.
        """
        try:
            with disk_errors(self._folder / str(step), "writing the checkpoint", _UNWRITABLE):
                yield
        except CheckpointError:
            self._before_write()
            raise
