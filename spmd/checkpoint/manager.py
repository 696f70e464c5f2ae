"""Checkpoint manager: background saves of a tree of arrays, restored onto any mesh.

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
import dataclasses
import json
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import jax

from spmd import tree
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
from spmd.checkpoint.retention import Metrics, RetentionPolicy, quarantine, scan
from spmd.checkpoint.tree import OptionalState, from_serialized, host_copies, storable
from spmd.distributed.hosts import (
    broadcast_from_first,
    broadcast_problems,
    gather_json,
    plain_problems,
    read_problems,
)
from spmd.distributed.shared_folder import (
    process_names,
    shared_folder_problems,
    wait_until_seen,
)
from spmd.errors import CheckpointError, Problem, check_fields, check_local
from spmd.tree import human_bytes

PyTree = Any

_UNWRITABLE = "free disk space, or resolve the error; earlier checkpoints are unchanged"
_UNSHARED = "another directory, on storage that all hosts mount"
_RECORD_MAX_BYTES = 64 << 20
_EXIT_SECONDS = 20


class CheckpointManager:
    """Checkpoint manager of one run, or of any tree of arrays.

    No plan is needed, and meshes may have axes of any names. It keeps the newest `max_to_keep`
    checkpoints, the `keep_best` with the lowest `best`, and those of every `keep_every` steps.

    Only one run may write to a directory at a time (`spmd.resilience.lease`): opening it removes
    the leftovers of an interrupted save. With several processes, each opens the same directory and
    makes every call; only process 0 reads the file listing. All must see the directory: opening and
    restoring check that, and a save fails if process 0 does not see the shards of all.

    Args:
        keep_every: Checkpoints of multiples of it are never removed; 0 for none.
        best: The metric that ranks checkpoints, lower is better. A checkpoint without it is never
            among the best.
        read_only: Nothing is created, saved or removed, so the directory may be in use by a run.
        before_write: Called before each change of the directory; raises if it must not be made.
        owner: Number in the names of unfinished saves, so that those of a run that has lost the
            directory are its own.

    Attributes:
        leftovers: Names of interrupted saves that were removed on opening.
        damaged: Step → problems of each checkpoint that differs from its manifest. Opening checks
            for missing files, wrong sizes and changed small files; restoring reads all files of a
            checkpoint.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> with CheckpointManager(tempfile.mkdtemp()) as checkpoints:
        ...     checkpoints.save(7, {"w": jnp.ones(2)}, {"seed": 0}, {"val_loss": 1.5})
        ...     print(checkpoints.latest(), checkpoints.record(7))
        7 {'seed': 0}
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        max_to_keep: int = 3,
        keep_best: int = 1,
        best: str = "val_loss",
        keep_every: int = 0,
        read_only: bool = False,
        before_write: Callable[[], object] = lambda: None,
        owner: int = 0,
    ) -> None:
        self._policy = RetentionPolicy(max_to_keep, keep_best, best, keep_every)
        rules = {
            "max_to_keep": "at least 1",
            "keep_best": "at least 0",
            "keep_every": "at least 0",
        }
        problems = check_fields(self._policy, rules)
        if problems:
            raise CheckpointError("invalid retention policy", problems)
        problems = check_local("directory", Path(directory))
        if problems:
            raise CheckpointError("Not a local folder:", problems)
        self.directory = Path(directory).absolute()
        self._before_write = before_write
        self._unfinished_suffix = ".saving"
        if owner:
            self._unfinished_suffix = f".{owner}.saving"
        self._saving: tuple[int, Metrics, Future[None]] | None = None
        self._metrics: dict[int, Metrics] = {}
        self.damaged: dict[int, tuple[Problem, ...]] = {}
        self._to_quarantine: set[int] = set()
        if not read_only:
            unseen = shared_folder_problems(self.directory, str(self.directory))
            if unseen:
                raise CheckpointError("opening the checkpoints failed", unseen)
        leftovers = self._scan(create=not read_only)
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self.leftovers: tuple[str, ...] = ()
        if not read_only:
            self.leftovers = leftovers
        self._remove(self.leftovers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or jax.process_count() == 1:
            self.close()
        elif self._saving:
            # Other processes may not have this error, so do not wait for them; let the save write
            # its shards.
            wait_for([self._saving[2]], _EXIT_SECONDS)

    def save(
        self,
        step: int,
        state: PyTree,
        record: Mapping[str, Any] = MappingProxyType({}),
        metrics: Mapping[str, float] | None = None,
        copied: bool = True,
    ) -> None:
        """Copy the state to the host and write it in the background.

        Returns once the copies are made: `state` may then be donated and `record` changed. Waits
        for the previous save and raises its error; an error of this one is raised by `wait`.

        Args:
            step: The step of the state, later than all existing checkpoints.
            state: Any tree of `jax.Array`s in any sharding.
            record: JSON to restore with the state; tuples become lists.
            copied: If False, no copy is made, and `state` must not change until `wait` returns.
        """
        self._check_new(step)
        arrays: Mapping[str, jax.Array] = storable(state)
        text = _json_of(record)  # now, because the caller may change the record after this returns
        numbers = {name: float(value) for name, value in (metrics or {}).items()}
        if copied:
            arrays = host_copies(arrays)
        self._check_disk_space(arrays)
        files = {"record.json": text, "metrics.json": json.dumps(numbers)}
        kept = self._policy.kept({**self._metrics, step: numbers})
        self._before_write()
        with self._write_errors(step):
            self._unfinished(step).mkdir(exist_ok=jax.process_count() > 1)
        pruned = self._metrics.keys() - kept
        damaged = set(self._to_quarantine)
        write = self._write_errors(step)(self._write)
        future = self._pool.submit(write, step, arrays, files, pruned, damaged)
        self._saving = step, numbers, future

    def _check_new(self, step: int) -> None:
        """Raise a `CheckpointError` unless a step is later than all checkpoints."""
        latest = self.latest()
        if latest is None or step > latest:
            return
        what = f"is earlier than the latest, {latest}"
        if step in self.steps():
            what = "exists already"
        fix = f"save a step after {latest}, or use another directory"
        problem = Problem(str(self.directory / str(step)), what, fix=fix)
        raise CheckpointError("nothing was saved", [problem])

    def _write(
        self, step: int, copies: Any, files: Mapping[str, str], pruned: set[int], damaged: set[int]
    ) -> None:
        """Write arrays on each process; on process 0, commit the checkpoint and prune old ones."""
        unfinished = self._unfinished(step)
        save_arrays(unfinished / "state", copies)
        if jax.process_index() != 0:
            return
        if jax.process_count() > 1:
            self._check_complete(step, copies)
        for name, text in files.items():
            (unfinished / name).write_text(text, encoding="utf-8")
        write_manifest(unfinished, step)
        self._before_write()
        for other in damaged:
            quarantine(self.directory / str(other))
        unfinished.rename(self.directory / str(step))
        sync(self.directory)
        for old in pruned:
            with contextlib.suppress(FileNotFoundError):  # removed by the user
                (self.directory / str(old)).rename(self.directory / f"{old}.pruned")
            self._remove([f"{old}.pruned"])

    def _check_complete(self, step: int, copies: Mapping[str, jax.Array]) -> None:
        """Raise a `CheckpointError` unless process 0 sees the shards of every process."""
        folder = self._unfinished(step)
        problems = list[Problem]()
        for process, count in missing_shards(folder / "state", copies).items():
            what = f"lacks {count} shards of process {process}"
            detail = "process 0 does not see all files of that process"
            problems.append(Problem(str(folder), what, detail, _UNSHARED))
        if problems:
            raise CheckpointError("nothing was saved", problems)

    def _unfinished(self, step: int) -> Path:
        return self.directory / f"{step}{self._unfinished_suffix}"

    def _check_disk_space(self, arrays: Mapping[str, jax.Array]) -> None:
        needed = 0
        for array in arrays.values():
            for shard in array.addressable_shards:
                if shard.replica_id == 0:
                    needed += shard.data.nbytes
        free = shutil.disk_usage(self.directory).free
        if free < needed:
            problem = Problem(
                str(self.directory),
                "has not enough disk space for another checkpoint",
                f"{human_bytes(needed)} to write, {human_bytes(free)} free",
                "free disk space, or keep fewer checkpoints; existing ones are unchanged",
            )
            raise CheckpointError("nothing was saved", [problem])

    def wait(self) -> None:
        """Wait until the save in progress is on disk; raise its error.

        Earlier checkpoints are unchanged then.
        """
        if self._saving is None:
            return
        step, numbers, future = self._saving
        self._saving = None
        error = future.exception()
        problems: tuple[Problem, ...] = ()
        if isinstance(error, CheckpointError):
            problems = error.problems
        if error and (jax.process_index() != 0 or not problems):
            raise error
        failed = broadcast_problems(lambda: problems)
        if failed:
            self._scan(create=False)
            raise CheckpointError("writing the checkpoint failed", failed)
        self._metrics[step] = numbers
        for pruned in self._metrics.keys() - self._policy.kept(self._metrics):
            del self._metrics[pruned]
        self._to_quarantine.clear()

    def close(self) -> None:
        """Wait for the save in progress and release the directory; may be called again."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def steps(self) -> tuple[int, ...]:
        """Return the steps of all undamaged checkpoints, ascending, after the save in progress."""
        self.wait()
        return tuple(sorted(self._metrics))

    def latest(self) -> int | None:
        """Return the last saved step; None if there is none."""
        return max(self.steps(), default=None)

    def latest_valid(self) -> int | None:
        """Return the last step with all files as in the manifest; add later ones to `damaged`."""
        for step in reversed(self.steps()):
            if not self._verify(step):
                return step
        return None

    def best(self) -> int | None:
        """Return the step with the lowest finite metric, the later of equal ones, or None."""
        self.wait()
        steps = self._policy.best(self._metrics)
        if not steps:
            return None
        return steps[0]

    def record(self, step: int) -> dict[str, Any]:
        """Return the record of an undamaged checkpoint without reading arrays."""
        return self._read_record(self._verified(step, contents=False))

    def restore(
        self,
        step: int | None,
        abstract_state: PyTree,
        *,
        branches: Sequence[str] = ("",),
        optional: Sequence[OptionalState] = (),
    ) -> tuple[PyTree, dict[str, Any]]:
        """Restore the state and the record of a checkpoint, each array directly into its sharding.

        A CheckpointError lists all paths, shapes and dtypes that differ; dtypes are not cast.

        Args:
            step: The checkpoint, None for the newest valid one; all its files are verified first.
            abstract_state: Tree of `jax.ShapeDtypeStruct`s with shardings on any mesh.
            branches: Paths below which the checkpoint must have no other arrays; by default
                everywhere.
            optional: State that the checkpoint may lack, or have in other shapes.
        """
        step = self._verified(step)
        self._check_seen(step)
        wanted = tree.flatten(abstract_state)
        folder = self.directory / str(step)
        restored = restore_arrays(folder / "state", wanted, branches, optional)
        leaves = [from_serialized(restored[path], leaf) for path, leaf in wanted.items()]
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)
        return state, self._read_record(step)

    def _verified(self, step: int | None, *, contents: bool = True) -> int:
        """Return the step, or the newest valid one, once its files are verified."""
        steps = self.steps()
        if step is None:
            newest = self.latest_valid()
            if newest is not None:
                return newest
            damaged = list(self.damaged)
            title = "none of the checkpoints is valid"
            what = "there is no checkpoint"
        else:
            if step in steps and not self._verify(step, contents=contents):
                return step
            damaged = [each for each in self.damaged if each == step]
            title = f"checkpoint {step} is damaged"
            what = f"there is no checkpoint of step {step}"
        if damaged:
            problems = self._located_problems(damaged)
            raise CheckpointError(f"nothing was restored: {title}", problems)
        existing = "there are none"
        if steps:
            existing = f"there are the steps {', '.join(map(str, steps))}"
        problem = Problem(str(self.directory), what, existing)
        raise CheckpointError("nothing was restored", [problem])

    def _located_problems(self, steps: Iterable[int]) -> Iterator[Problem]:
        """Yield the problems of damaged checkpoints, with whole paths."""
        for step in steps:
            for problem in self.damaged[step]:
                where = self.directory / str(step) / problem.where
                yield dataclasses.replace(problem, where=str(where))

    def _verify(self, step: int, *, contents: bool = True) -> tuple[Problem, ...]:
        folder = self.directory / str(step)
        problems = broadcast_problems(lambda: verify_manifest(folder, contents=contents))
        if problems:
            self.damaged[step] = problems
            self._to_quarantine.add(step)
            del self._metrics[step]
        return problems

    def _check_seen(self, step: int) -> None:
        """Raise a `CheckpointError` unless every process sees the checkpoint of process 0."""
        if jax.process_count() == 1:
            return
        folder = self.directory / str(step)
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

    def _read_record(self, step: int) -> dict[str, Any]:
        path = self.directory / str(step) / "record.json"
        with read_errors(path):
            return read_object(path, _RECORD_MAX_BYTES)

    def _scan(self, *, create: bool) -> tuple[str, ...]:
        """Scan the directory on process 0 and share the result; return the names of leftovers."""
        found = broadcast_from_first(lambda: self._scan_alone(create=create))
        if "failed" in found:
            problems = read_problems(found["failed"])
            raise CheckpointError("opening the checkpoints failed", problems)
        # Keep damage found earlier by a full read, which a scan does not repeat.
        for step, plain in found["damaged"]:
            self.damaged[step] = read_problems(plain)
            self._to_quarantine.add(step)
        self._metrics = dict(found["metrics"])
        for step in self._to_quarantine & self._metrics.keys():
            del self._metrics[step]
        return tuple(found["leftovers"])

    def _scan_alone(self, *, create: bool) -> dict[str, Any]:
        """Scan the directory in this process, and return plain values."""
        fix = "choose a writable directory"
        try:
            with disk_errors(self.directory, "opening the checkpoints", fix):
                if create:
                    self.directory.mkdir(parents=True, exist_ok=True)
                leftovers, metrics, damaged = scan(self.directory)
        except CheckpointError as error:
            return {"failed": plain_problems(error.problems)}
        plain = [(step, plain_problems(problems)) for step, problems in damaged.items()]
        return {"leftovers": leftovers, "metrics": list(metrics.items()), "damaged": plain}

    @contextlib.contextmanager
    def _write_errors(self, step: int) -> Iterator[None]:
        try:
            with disk_errors(self.directory / str(step), "writing the checkpoint", _UNWRITABLE):
                yield
        except CheckpointError:
            self._remove([self._unfinished(step).name])  # otherwise a full disk stays full
            raise

    def _remove(self, names: Sequence[str]) -> None:
        if jax.process_index() == 0 and names:
            self._before_write()
            for name in names:
                shutil.rmtree(self.directory / name, ignore_errors=True)


def _json_of(record: Mapping[str, Any]) -> str:
    """Return the text of a record; a `CheckpointError` if it is no JSON."""
    try:
        return json.dumps(dict(record))
    except (TypeError, ValueError) as error:
        fix = "use only numbers, strings, lists and dictionaries in the record"
        problem = Problem("record", str(error), fix=fix)
        raise CheckpointError("nothing was saved", [problem]) from error
