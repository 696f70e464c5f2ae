"""Checkpoint manager: background saves of a tree of arrays, restored onto any mesh.

The checkpoints are in a local folder (`local_store`) or in a bucket (`bucket_store`).
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from types import MappingProxyType, TracebackType
from typing import Any, Self

import jax

from spmd import tree
from spmd.checkpoint.bucket_store import BucketStore, list_bucket_steps
from spmd.checkpoint.host_copies import HostCopies
from spmd.checkpoint.local_store import LocalStore
from spmd.checkpoint.retention import Metrics, RetentionPolicy
from spmd.checkpoint.store import CheckpointStore, DamagedError
from spmd.checkpoint.tree import OptionalState, from_serialized, storable
from spmd.distributed.hosts import (
    broadcast_from_first,
    broadcast_problems,
    gather_json,
    plain_problems,
    read_problems,
)
from spmd.errors import CheckpointError, Problem, check_fields
from spmd.storage.address import BucketPath, Location, locate

PyTree = Any

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
        directory: A local folder, or the address of one in a bucket, such as
            `gs://bucket/runs/demo/checkpoints`.
        keep_every: Checkpoints of multiples of it are never removed; 0 for none.
        best: The metric that ranks checkpoints, lower is better. A checkpoint without it is never
            among the best.
        read_only: Nothing is created, saved or removed, so the directory may be in use by a run.
        before_write: Called before each change of the directory; raises if it must not be made.
        owner: Number in the names of unfinished saves, so that those of a run that has lost the
            directory are its own.
        say: Shows a line, such as about a bucket that does not answer.
        before_commit: Called on process 0 before a checkpoint in a bucket exists, in the background.

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
        directory: Location | str,
        *,
        max_to_keep: int = 3,
        keep_best: int = 1,
        best: str = "val_loss",
        keep_every: int = 0,
        read_only: bool = False,
        before_write: Callable[[], object] = lambda: None,
        owner: int = 0,
        say: Callable[[str], object] = lambda line: None,
        before_commit: Callable[[], object] = lambda: None,
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
        self.directory = locate(directory)
        self._store: CheckpointStore
        if isinstance(self.directory, BucketPath):
            self._store = BucketStore(self.directory, before_write, owner, say, before_commit)
        else:
            self.directory = self.directory.absolute()
            self._store = LocalStore(self.directory, before_write, owner)
        self._copies = HostCopies()
        self._saving: tuple[int, Metrics, Future[None]] | None = None
        self._metrics: dict[int, Metrics] = {}
        self.damaged: dict[int, tuple[Problem, ...]] = {}
        self._to_quarantine: set[int] = set()
        if not read_only:
            unseen = self._store.access_problems()
            if unseen:
                raise CheckpointError("opening the checkpoints failed", unseen)
        leftovers = self._scan(create=not read_only)
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self.leftovers: tuple[str, ...] = ()
        if not read_only:
            self.leftovers = leftovers
        if self.leftovers and jax.process_index() == 0:
            self._store.remove_leftovers(self.leftovers)

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
        arrays = storable(state)
        text = _json_of(record)  # now, because the caller may change the record after this returns
        numbers = {name: float(value) for name, value in (metrics or {}).items()}
        self._store.begin(step, arrays)
        to_write: Callable[[], Mapping[str, jax.Array]] = functools.partial(dict, arrays)
        if copied:
            to_write = self._copies.of(arrays)
        kept = self._policy.kept({**self._metrics, step: numbers})
        pruned = self._metrics.keys() - kept
        save = _Save(step, to_write, text, numbers, sorted(pruned), sorted(self._to_quarantine))
        future = self._pool.submit(self._write, save)
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
        problem = Problem(self._store.path_of(step), what, fix=fix)
        raise CheckpointError("nothing was saved", [problem])

    def _write(self, save: "_Save") -> None:
        """Write arrays on each process; on process 0, commit the checkpoint and prune old ones."""
        store = self._store
        try:
            arrays = save.arrays()
            store.write(save.step, arrays)
            if jax.process_index() != 0:
                return
            store.commit(save.step, arrays, save.record, save.metrics, save.damaged)
            for old in save.pruned:
                store.prune(old)
        except CheckpointError:
            if jax.process_index() == 0:
                with contextlib.suppress(CheckpointError):  # of which the first one is the cause
                    store.discard(save.step)  # otherwise a full disk stays full
            raise

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
        return self._store.record(self._verified(step, contents=False))

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
        wanted = tree.flatten(abstract_state)
        while True:
            verified = self._verified(step)
            self._store.check_seen(verified)
            restored = self._read_arrays(verified, wanted, branches, optional)
            if restored is not None:
                break
            # The damage is known now, so another checkpoint is next, or the error about it.
        leaves = [from_serialized(restored[path], leaf) for path, leaf in wanted.items()]
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)
        return state, self._store.record(verified)

    def _read_arrays(
        self,
        step: int,
        wanted: Mapping[str, jax.ShapeDtypeStruct],
        branches: Sequence[str],
        optional: Sequence[OptionalState],
    ) -> dict[str, jax.Array] | None:
        """Restore arrays by path; None, on every process, if one of them found damage."""
        restored = None
        failed: CheckpointError | None = None
        try:
            restored = self._store.restore(step, wanted, branches, optional)
        except CheckpointError as error:
            failed = error
        answer: list[Any] = []
        if failed is not None:
            is_damage = isinstance(failed, DamagedError)
            answer = [is_damage, failed.title, plain_problems(failed.problems)]
        # All processes do the same next, so that none waits for another in a collective.
        answers = [each for each in gather_json(answer) if each]
        for is_damage, title, plain in answers:
            if not is_damage:
                raise failed or CheckpointError(title, read_problems(plain))
        if not answers:
            return restored
        found = set[Problem]()
        for _, _, plain in answers:
            found.update(read_problems(plain))
        self._add_damaged(step, tuple(sorted(found)))
        return None

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
                where = self._store.path_of(step, problem.where)
                yield dataclasses.replace(problem, where=where)

    def _verify(self, step: int, *, contents: bool = True) -> tuple[Problem, ...]:
        problems = broadcast_problems(lambda: self._store.verify(step, contents=contents))
        if problems:
            self._add_damaged(step, problems)
        return problems

    def _add_damaged(self, step: int, problems: tuple[Problem, ...]) -> None:
        self.damaged[step] = problems
        self._to_quarantine.add(step)
        del self._metrics[step]

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
        try:
            found = self._store.scan(create=create)
        except CheckpointError as error:
            return {"failed": plain_problems(error.problems)}
        plain = [(step, plain_problems(problems)) for step, problems in found.damaged.items()]
        metrics = [(step, dict(numbers)) for step, numbers in found.metrics.items()]
        return {"leftovers": list(found.leftovers), "metrics": metrics, "damaged": plain}


@dataclasses.dataclass(frozen=True)
class _Save:
    """A save in the background.

    Attributes:
        arrays: Makes the arrays to write.
        record: JSON of the record.
        pruned: Steps to remove afterwards.
        damaged: Steps to set aside before.
    """

    step: int
    arrays: Callable[[], Mapping[str, jax.Array]]
    record: str
    metrics: Metrics
    pruned: Sequence[int]
    damaged: Sequence[int]


def _json_of(record: Mapping[str, Any]) -> str:
    """Return the text of a record; a `CheckpointError` if it is no JSON."""
    try:
        return json.dumps(dict(record))
    except (TypeError, ValueError) as error:
        fix = "use only numbers, strings, lists and dictionaries in the record"
        problem = Problem("record", str(error), fix=fix)
        raise CheckpointError("nothing was saved", [problem]) from error


def list_steps(directory: Location) -> list[int]:
    """Return the steps of the checkpoints in a directory in order, without verifying them."""
    if isinstance(directory, BucketPath):
        return list_bucket_steps(directory)
    return sorted(int(path.name) for path in directory.glob("*") if path.name.isdecimal())
