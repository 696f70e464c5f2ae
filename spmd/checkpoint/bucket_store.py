"""Checkpoints in a bucket, where nothing can be renamed.

```
checkpoints/steps/100.json       the manifest: step, lease, arrays, record, metrics
checkpoints/steps/100.3.saving   marks the save of step 100 by the run with lease 3 as unfinished
checkpoints/state/100.3/…        its arrays (`zarr_arrays`), independent of the mesh
checkpoints/damaged/100.json     manifest of a damaged checkpoint, which is never used
```

A checkpoint exists from the moment its manifest does. It is created on condition that there is
none, or that the one there has a lower lease: of two runs one wins, and the state that the other
wrote has a name of its own. A leftover is a mark without the manifest of its lease.

A chunk's presence is verified before a restore, its size and checksum as it is read.
"""

import dataclasses
import hashlib
import json
import math
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from spmd.checkpoint.retention import Metrics
from spmd.checkpoint.store import CheckpointStore, DamagedError, Scan
from spmd.checkpoint.tree import (
    OptionalState,
    serialized,
    structure_mismatches,
    with_optional,
)
from spmd.checkpoint.zarr_arrays import (
    StoredArray,
    missing_by_process,
    missing_chunks,
    read_arrays,
    stored_array,
    write_arrays,
)
from spmd.distributed.barrier import all_reach
from spmd.distributed.hosts import broadcast_from_first, gather_json
from spmd.distributed.shared_folder import process_names
from spmd.errors import CheckpointError, Problem, StorageError
from spmd.storage.address import BucketPath
from spmd.storage.bucket import PATIENCE, Bucket, Version, storage_error

_VERSION = 2
_MAX_BYTES = 128 << 20
_STEP = r"0|[1-9][0-9]{0,17}"
_MANIFEST = re.compile(rf"({_STEP})\.json")
_MARK = re.compile(rf"({_STEP})\.([0-9]{{1,18}})\.saving")
_BARRIER_SECONDS = 2 * PATIENCE
_LIST_SECONDS = 30.0
"""Seconds until a store that does not answer is an error, before a run."""
_PROBE = "access"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Manifest of a checkpoint.

    Attributes:
        arrays: Path → stored form.
        record: The metadata that was saved with the state.
    """

    step: int
    lease: int
    arrays: Mapping[str, StoredArray]
    record: dict[str, Any]
    metrics: Metrics

    @property
    def state(self) -> str:
        """Name of the state's arrays."""
        return _state_name(self.step, self.lease)

    def structs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return path → shape and dtype."""
        return {
            path: jax.ShapeDtypeStruct(stored.shape, stored.dtype)
            for path, stored in self.arrays.items()
        }


class BucketStore(CheckpointStore):
    """Checkpoints below a path in a bucket; arguments are as for `CheckpointManager`."""

    def __init__(
        self,
        path: BucketPath,
        before_write: Callable[[], object],
        owner: int,
        say: Callable[[str], object],
        before_commit: Callable[[], object] = lambda: None,
    ) -> None:
        self._before_commit = before_commit
        self._path = path
        self._bucket = Bucket(path, say)
        self._steps = self._bucket.below("steps")
        self._before_write = before_write
        self._owner = owner
        self._saves = 0

    def access_problems(self) -> tuple[Problem, ...]:
        """Let each process write and delete an object."""
        if jax.process_count() == 1:
            return ()
        fault = ""
        name = f"{_PROBE}/{jax.process_index()}"
        try:
            self._bucket.write(name, b"")
            self._bucket.delete(name)
        except StorageError as error:
            fault = str(error.problems[0])
        answers = gather_json([socket.gethostname(), fault])
        problems = []
        for process, (host, reason) in enumerate(answers):
            if reason:
                who = process_names([process], [host] * (process + 1))
                problems.append(Problem(str(self._path), f"cannot be written by {who}", reason))
        return tuple(problems)

    def scan(self, *, create: bool) -> Scan:
        """Read the manifests, and find marks of unfinished saves; states are not looked for."""
        try:
            self._bucket.check()
            names = self._steps.list()
            metrics: dict[int, Metrics] = {}
            damaged: dict[int, Sequence[Problem]] = {}
            for name in names:
                found = _MANIFEST.fullmatch(name)
                if not found:
                    continue
                step = int(found[1])
                try:
                    manifest = self._manifest(step)
                except DamagedError as error:
                    damaged[step] = error.problems
                    continue
                metrics[step] = manifest.metrics
        except StorageError as error:
            raise CheckpointError("opening the checkpoints failed", error.problems) from error
        leftovers = []
        for name in names:
            mark = _MARK.fullmatch(name)
            if mark and (not self._owner or int(mark[2]) < self._owner):
                leftovers.append(name)
        return Scan(leftovers, metrics, damaged)

    def begin(self, step: int, arrays: Mapping[str, jax.Array]) -> None:
        """Do nothing: training does not wait for a store."""

    def write(self, step: int, arrays: Mapping[str, jax.Array]) -> None:
        """Write the shards of this process, and wait for the other processes."""
        self._saves += 1
        try:
            self._before_write()
            self._steps.write(self._mark(step), b"")
            self._bucket.repeat(_state_name(step, self._owner), lambda: self._write(step, arrays))
        except StorageError as error:
            raise CheckpointError("writing the checkpoint failed", error.problems) from error
        name = f"save {self._saves} of {self._path}: {step}"
        if not all_reach(name, _BARRIER_SECONDS):
            what = "not all processes have written their shards in time"
            detail = f"{_BARRIER_SECONDS:.0f} s"
            problem = Problem(self.path_of(step), what, detail)
            raise CheckpointError("writing the checkpoint failed", [problem])

    def _write(self, step: int, arrays: Mapping[str, jax.Array]) -> None:
        state = self._bucket.below(_state_name(step, self._owner))
        try:
            write_arrays(state.kvstore(), arrays)
        except jax.errors.JaxRuntimeError:
            raise  # about device memory
        except (ValueError, RuntimeError, OSError) as error:
            raise storage_error(str(state.path), error) from error

    def commit(
        self,
        step: int,
        arrays: Mapping[str, jax.Array],
        record: str,
        metrics: Metrics,
        damaged: Sequence[int],
    ) -> None:
        """Write the manifest."""
        try:
            self._check_complete(step, arrays)
            stored = {path: stored_array(array).to_json() for path, array in arrays.items()}
            body = {
                "version": _VERSION,
                "step": step,
                "lease": self._owner,
                "arrays": stored,
                "record": json.loads(record),
                "metrics": dict(metrics),
            }
            self._before_write()
            for other in damaged:
                self._quarantine(other)
            self._before_commit()
            version = self._create(step, _serialize(body))
            self._check_complete(step, arrays, version)  # a later run may have removed the state
            self._steps.delete(self._mark(step))
        except StorageError as error:
            raise CheckpointError("writing the checkpoint failed", error.problems) from error

    def _check_complete(
        self, step: int, arrays: Mapping[str, jax.Array], manifest: Version | None = None
    ) -> None:
        """Raise a `CheckpointError` unless the chunks of every process are there.

        Args:
            manifest: Version of the manifest, which is deleted if they are not.
        """
        present = self._bucket.below(_state_name(step, self._owner)).list()
        problems = []
        for process, count in missing_by_process(present, arrays).items():
            what = f"lacks {count} chunks of process {process}"
            problems.append(Problem(self.path_of(step), what, fix="one bucket for all processes"))
        if problems:
            if manifest is not None:
                self._steps.delete(f"{step}.json", manifest)
            raise CheckpointError("nothing was saved", problems)

    def _create(self, step: int, text: bytes) -> Version:
        """Create a manifest, unless there is one of a later lease; return its version."""
        name = f"{step}.json"
        while True:
            found = self._steps.find(name)
            if found.data is not None and found.data != text:
                lease = _lease_of(found.data)
                if lease >= self._owner:
                    what = f"was saved by the run with lease {lease}; this one has {self._owner}"
                    problem = Problem(self.path_of(step), what, fix="one run for a folder")
                    raise CheckpointError("writing the checkpoint failed", [problem])
            version = self._steps.replace(name, text, found.version)
            if version is not None:
                return version

    def discard(self, step: int) -> None:
        """Remove an unfinished save, unless other processes may still be writing."""
        if jax.process_count() == 1:
            self.remove_leftovers([self._mark(step)])

    def prune(self, step: int) -> None:
        """Remove a manifest, then its state."""
        try:
            self._before_write()
            found = self._steps.find(f"{step}.json")
            if found.data is None:
                return
            lease = _lease_of(found.data)
            mark = f"{step}.{lease}.saving"
            self._steps.write(mark, b"")
            self._steps.delete(f"{step}.json", found.version)
            self._remove_state(mark)
        except StorageError as error:
            raise CheckpointError("removing a checkpoint failed", error.problems) from error

    def remove_leftovers(self, names: Sequence[str]) -> None:
        """Remove the state of marks, unless it belongs to a checkpoint."""
        try:
            self._before_write()
            for name in names:
                self._remove_state(name)
        except StorageError as error:
            raise CheckpointError("removing unfinished saves failed", error.problems) from error

    def _remove_state(self, mark: str) -> None:
        """Remove a mark, and its state unless a manifest names that."""
        found = _MARK.fullmatch(mark)
        if found is None:
            return
        step, lease = found.groups()
        manifest = self._steps.find(f"{step}.json").data
        if manifest is None or _lease_of(manifest) != int(lease):
            self._bucket.delete_below(f"{_state_name(int(step), int(lease))}/")
        self._steps.delete(mark)

    def _quarantine(self, step: int) -> None:
        """Give a damaged manifest another name."""
        found = self._steps.find(f"{step}.json")
        if found.data is None:
            return
        damaged = self._bucket.below("damaged")
        name = f"{step}.json"
        number = 1
        while damaged.create(name, found.data) is None:
            number += 1
            name = f"{step}.{number}.json"
        self._steps.delete(f"{step}.json", found.version)

    def verify(self, step: int, *, contents: bool) -> Sequence[Problem]:
        """Read the manifest; with `contents`, look for each chunk, too."""
        try:
            manifest = self._manifest(step)
            if not contents:
                return ()
            state = self._bucket.below(manifest.state)
            missing = missing_chunks(state.list(), manifest.arrays)
        except DamagedError as error:
            return error.problems
        except StorageError as error:
            raise CheckpointError("reading the checkpoint failed", error.problems) from error
        problems = []
        for path, positions in missing.items():
            what = f"lacks {len(positions)} of {math.prod(manifest.arrays[path].grid)} chunks"
            problems.append(Problem(f"{manifest.state}/{path}", what))
        return problems

    def check_seen(self, step: int) -> None:
        """Compare the manifest on each process with that on process 0."""
        if jax.process_count() == 1:
            return

        def digest() -> str:
            try:
                return hashlib.sha256(self._steps.read(f"{step}.json", _MAX_BYTES)).hexdigest()
            except (OSError, ValueError):  # of which `StorageError` is one
                return ""

        own = digest()
        expected = broadcast_from_first(lambda: own)
        answers = gather_json([socket.gethostname(), own == expected])
        hosts = [host for host, _ in answers]
        blind = [process for process, (_, seen) in enumerate(answers) if not seen]
        if blind:
            what = f"is not what process 0 reads there: {process_names(blind, hosts)}"
            raise CheckpointError("nothing was restored", [Problem(self.path_of(step), what)])

    def record(self, step: int) -> dict[str, Any]:
        """Return the record in the manifest."""
        return self._read(step).record

    def restore(
        self,
        step: int,
        wanted: Mapping[str, jax.ShapeDtypeStruct],
        branches: Sequence[str],
        optional: Sequence[OptionalState],
    ) -> dict[str, jax.Array]:
        """Restore arrays; each chunk is verified by its checksum."""
        manifest = self._read(step)
        present, targets = with_optional(manifest.structs(), wanted, optional)
        problems = structure_mismatches(present, targets, branches)
        if problems:
            title = f"checkpoint {self.path_of(step)} does not fit the state"
            raise CheckpointError(title, problems)
        plain = {}
        for path, leaf in targets.items():
            plain[path] = serialized(leaf).update(sharding=leaf.sharding)
        state = self._bucket.below(manifest.state)

        def attempt() -> dict[str, jax.Array]:
            try:
                return read_arrays(state.kvstore(), manifest.arrays, plain)
            except jax.errors.JaxRuntimeError:
                raise  # about device memory
            except (ValueError, RuntimeError, OSError) as error:
                raise storage_error(str(state.path), error) from error

        try:
            restored = self._bucket.repeat(manifest.state, attempt)
        except StorageError as error:
            if not error.is_damage:
                raise CheckpointError("reading the checkpoint failed", error.problems) from error
            problems = []
            for each in error.problems:
                problems.append(Problem(manifest.state, "cannot be read", each.detail))
            raise DamagedError("reading the checkpoint failed", problems) from error
        for part in optional:
            restored |= part.complete(part.below(restored), part.below(wanted))
        return restored

    def path_of(self, step: int, name: str = "") -> str:
        """Return the address of a manifest, or of something beside it."""
        if name:
            return str(self._path / name)
        return str(self._steps.path / f"{step}.json")

    def _mark(self, step: int) -> str:
        return f"{step}.{self._owner}.saving"

    def _read(self, step: int) -> "Manifest":
        """Read an existing manifest."""
        try:
            return self._manifest(step)
        except StorageError as error:
            raise CheckpointError("reading the checkpoint failed", error.problems) from error

    def _manifest(self, step: int) -> "Manifest":
        """Read a manifest; a `DamagedError` if it is none of this step."""
        name = f"{step}.json"
        try:
            return _parse(self._steps.read(name, _MAX_BYTES), step)
        except StorageError:
            raise
        except (OSError, ValueError) as error:
            problem = Problem(f"steps/{name}", f"cannot be read: {error}")
            raise DamagedError("reading the checkpoint failed", [problem]) from error


def list_bucket_steps(path: BucketPath) -> list[int]:
    """Return the steps of the manifests below a path in order, without reading them.

    Raises:
        StorageError: The store cannot be listed.
    """
    steps = []
    for name in Bucket(path, patience=_LIST_SECONDS).below("steps").list():
        found = _MANIFEST.fullmatch(name)
        if found:
            steps.append(int(found[1]))
    return sorted(steps)


def _state_name(step: int, lease: int) -> str:
    return f"state/{step}.{lease}"


def _serialize(body: Mapping[str, Any]) -> bytes:
    """Return the text of a manifest, with a digest of all of it."""
    text = json.dumps(body)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({"manifest": body, "sha256": digest}).encode() + b"\n"


def _parse(text: bytes, step: int) -> Manifest:
    """Parse the manifest of a step; a ValueError if it is none, or was modified."""
    try:
        plain = json.loads(text)
        body = plain["manifest"]
        digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
        if digest != plain["sha256"]:
            raise ValueError("it was modified")
        version = body["version"]
        if version != _VERSION:
            raise ValueError(f"it has version {version}, and this release reads {_VERSION}")
        if body["step"] != step:
            raise ValueError(f"it is the manifest of step {body['step']}")
        arrays = {path: StoredArray.from_json(form) for path, form in body["arrays"].items()}
        metrics = {name: float(value) for name, value in body["metrics"].items()}
        return Manifest(step, int(body["lease"]), arrays, dict(body["record"]), metrics)
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError("it is not a manifest") from error


def _lease_of(text: bytes) -> int:
    """Return the lease in a manifest; 0 if it cannot be read."""
    try:
        return int(json.loads(text)["manifest"]["lease"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return 0
