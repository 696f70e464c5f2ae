"""Checkpoints: everything that must resume together, written in the background, restored onto any mesh.

A checkpoint of step 100 is a folder that is there whole or not at all:

```
100/state/          every array of the state under its path (Orbax, OCDBT), whatever mesh it was on
100/record.json     what belongs to it and is no array: data position, seed, config, plan, mesh, versions
100/metrics.json    the metrics it was saved with
100/seal.json       the size and the checksum of each of these files
```

It is written as `100.saving`, sealed, and only then renamed; one that is no longer kept is renamed `100.pruned`
before it is removed. So what bears the name of a step was whole once, and the seal says whether it still is. A
damaged checkpoint is never used and never removed: it becomes `damaged-100` when the run saves on.

Arrays are stored by path, so the classes that hold them may change; what may not change in silence is a path,
a shape or a dtype: `CheckpointManager.restore` compares all of them before it reads anything.
"""

import contextlib
import dataclasses
import functools
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from spmd import tree
from spmd.checkpoint.manifest import read_object, sync, verify_manifest, write_manifest
from spmd.checkpoint.retention import Metrics, RetentionPolicy, quarantine, scan
from spmd.checkpoint.tree import (
    from_serialized,
    host_copies,
    layout_problems,
    serialized_spec,
    storable,
    structure_mismatches,
)
from spmd.distributed.hosts import broadcast_from_first, broadcast_problems, plain_problems, read_problems
from spmd.errors import CheckpointError, Problem
from spmd.tree import human_bytes

PyTree = Any


class CheckpointManager:
    """The checkpoints of one run: the newest `max_to_keep` and the `keep_best` with the lowest `best`.

    One run writes to a directory at a time, and only that run opens it: opening removes what an interrupted
    save left behind. With several processes, each opens the same directory and makes every call; process 0 looks at
    the files, and the others go by what it finds.

    Args:
        directory: Where the checkpoints are; made if it is absent.
        max_to_keep: How many of the newest checkpoints stay, at least 1.
        keep_best: How many of the checkpoints with the lowest finite `best` stay besides, at least 0.
        best: The metric that ranks checkpoints, lower is better. One saved without it is never among the best.
        read_only: Only look: nothing is made, saved or removed, so a run that is still training is safe.

    Attributes:
        directory: The absolute path of the run's checkpoints.
        leftovers: Names of the interrupted saves that were found and removed when this was opened.
        lost: Step → all that is damaged, for each checkpoint that is not as it was sealed. Opening looks for missing
            files, wrong sizes and changes of small files; restoring reads all of what it restores.

    Raises:
        CheckpointError: If `max_to_keep` or `keep_best` is too small, or the directory cannot be used.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> with Checkpoints(Path(tempfile.mkdtemp())) as checkpoints:
        ...     checkpoints.save(7, {"w": jnp.ones(2)}, {"seed": 0}, {"val_loss": 1.5})
        ...     print(checkpoints.latest(), checkpoints.record(7))
        7 {'seed': 0}
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_to_keep: int = 3,
        keep_best: int = 1,
        best: str = "val_loss",
        read_only: bool = False,
    ) -> None:
        limits = {"max_to_keep": (max_to_keep, 1), "keep_best": (keep_best, 0)}
        if problems := [
            Problem(name, f"is {n}, and must be at least {least}", fix=f"{name}={least}")
            for name, (n, least) in limits.items()
            if n < least
        ]:
            raise CheckpointError("the checkpoints cannot be kept as asked", problems)
        self.directory = Path(directory).absolute()
        self._policy = RetentionPolicy(max_to_keep, keep_best, best)
        self._saving: tuple[int, Metrics, Future[None]] | None = None
        self._metrics: dict[int, Metrics] = {}
        self.lost: dict[int, tuple[Problem, ...]] = {}
        self._in_the_way: set[int] = set()
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._arrays = _make_checkpointer()
        try:
            leftovers = self._look(make=not read_only)
        except CheckpointError:
            self._shut()
            raise
        self.leftovers: tuple[str, ...] = () if read_only else leftovers
        self._remove(self.leftovers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None or jax.process_count() == 1:
            self.close()
        elif self._saving:
            # The others may know nothing of this error, so nothing waits for them; they write their parts meanwhile.
            wait_for([self._saving[2]], _LEAVING_SECONDS)

    def save(
        self,
        step: int,
        state: PyTree,
        record: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        copied: bool = True,
    ) -> None:
        """Copies the state to the host and writes it in the background.

        It returns once the copies are taken: `state` may be donated and `record` changed at once. It waits
        for the save before it, and an error of that save is raised here; an error of this one by `wait`.

        Args:
            step: The step that the state has reached, later than every checkpoint that is there.
            state: Any tree of `jax.Array`s, sharded as they like.
            record: What else must resume, as JSON; its tuples come back as lists.
            metrics: Numbers to rank the checkpoint by.
            copied: If not, nothing is in memory twice, and `state` must stay as it is until `wait` returns.

        Raises:
            CheckpointError: If the step exists or is earlier than the latest, if the state or the record holds
                something that cannot be stored, if there is no room for it, or if the previous save failed.
        """
        latest = self.latest()
        if latest is not None and step <= latest:
            what = "exists already" if step in self.steps() else f"is earlier than the latest, {latest}"
            fix = f"save a step after {latest}, or give the run a directory of its own"
            raise CheckpointError("nothing was saved", [Problem(str(self.directory / str(step)), what, fix=fix)])
        arrays = storable(state)
        try:
            # Written out here, because the caller may change the record as soon as this returns.
            text = json.dumps(dict(record))
        except (TypeError, ValueError) as error:
            fix = "keep numbers, strings, lists and dictionaries in the record"
            raise CheckpointError("nothing was saved", [Problem("record", str(error), fix=fix)]) from error
        numbers = {name: float(value) for name, value in (metrics or {}).items()}
        copies = host_copies(arrays) if copied else arrays
        self._refuse_a_full_disk(copies)
        files = {"record.json": text, "metrics.json": json.dumps(numbers)}
        kept = self._policy.kept({**self._metrics, step: numbers})
        with self._write_errors(step):
            self._unfinished(step).mkdir(exist_ok=jax.process_count() > 1)
        pruned, in_the_way = self._metrics.keys() - kept, set(self._in_the_way)
        self._saving = step, numbers, self._pool.submit(self._write, step, copies, files, pruned, in_the_way)

    def _write(self, step: int, copies: Any, files: Mapping[str, str], pruned: set[int], in_the_way: set[int]) -> None:
        """Returns once every process has written its arrays, and the first one has made a checkpoint of them."""
        largest = max(shard.data.nbytes for array in copies.values() for shard in array.addressable_shards)
        with contextlib.closing(_make_checkpointer(largest)) as arrays:
            arrays.save(self._unfinished(step) / "state", args=ocp.args.PyTreeSave(copies))
        if jax.process_index() != 0:
            return
        for name, text in files.items():
            (self._unfinished(step) / name).write_text(text, encoding="utf-8")
        write_manifest(self._unfinished(step))
        for lost in in_the_way:
            quarantine(self.directory / str(lost))
        self._unfinished(step).rename(self.directory / str(step))
        sync(self.directory)
        for old in pruned:
            with contextlib.suppress(FileNotFoundError):  # somebody has removed it
                (self.directory / str(old)).rename(self.directory / f"{old}.pruned")
            self._remove([f"{old}.pruned"])

    def _unfinished(self, step: int) -> Path:
        return self.directory / f"{step}.saving"

    def _refuse_a_full_disk(self, arrays: Mapping[str, jax.Array]) -> None:
        shards = [shard.data for array in arrays.values() for shard in array.addressable_shards if not shard.replica_id]
        needed, free = sum(shard.nbytes for shard in shards), shutil.disk_usage(self.directory).free
        if free < needed:
            arithmetic = f"{human_bytes(needed)} to write, {human_bytes(free)} free"
            fix = "make room, or keep fewer checkpoints; those that are there are as they were"
            problem = Problem(str(self.directory), "has too little room for another checkpoint", arithmetic, fix)
            raise CheckpointError("nothing was saved", [problem])

    def wait(self) -> None:
        """Returns when the save in progress is on disk.

        Raises:
            CheckpointError: If it could not be written; the checkpoints before it are as they were.
        """
        if self._saving is None:
            return
        (step, numbers, finishing), self._saving = self._saving, None
        if jax.process_index() != 0:
            with self._write_errors(step):
                finishing.result()
        if failed := broadcast_problems(functools.partial(self._failure, step, finishing)):
            self._look(make=False)
            raise CheckpointError("writing the checkpoint failed", failed)
        self._metrics[step] = numbers
        kept = self._policy.kept(self._metrics)
        self._metrics = {step: numbers for step, numbers in self._metrics.items() if step in kept}
        self._in_the_way.clear()

    def _failure(self, step: int, finishing: Future[None]) -> tuple[Problem, ...]:
        try:
            with self._write_errors(step):
                finishing.result()
        except CheckpointError as error:
            return error.problems
        return ()

    def close(self) -> None:
        """Waits for the save in progress and lets go of the directory; may be called again.

        Raises:
            CheckpointError: If the save in progress could not be written.
        """
        try:
            self.wait()
        finally:
            self._shut()

    def _shut(self) -> None:
        self._pool.shutdown()
        self._arrays.close()

    def steps(self) -> tuple[int, ...]:
        """The steps of all checkpoints on disk, ascending, but for those that are lost; a save is waited for."""
        self.wait()
        return tuple(sorted(self._metrics))

    def latest(self) -> int | None:
        """The last step that was saved, None where there is none."""
        return max(self.steps(), default=None)

    def latest_valid(self) -> int | None:
        """The last step of which every byte is as it was sealed; those it passes over are in `lost` from then on."""
        for step in reversed(self.steps()):
            if not self._check(step):
                return step
        return None

    def best(self) -> int | None:
        """The step with the lowest finite metric, the later of two equals; None where none was measured."""
        self.wait()
        return next(iter(self._policy.best(self._metrics)), None)

    def record(self, step: int) -> dict[str, Any]:
        """The JSON that was saved with the step; no array is read.

        Raises:
            CheckpointError: If there is no such checkpoint or it is damaged.
        """
        self._existing(step, contents=False)
        return self._record(step)

    def restore(
        self, step: int | None, abstract_state: PyTree, *, branches: Sequence[str] = ("",)
    ) -> tuple[PyTree, dict[str, Any]]:
        """The state and the record of a checkpoint, each array straight in the sharding that is asked for.

        Args:
            step: Which checkpoint, None for the newest; every file of it is compared with its seal first.
            abstract_state: The tree to fill, of `jax.ShapeDtypeStruct`s with a sharding each, on any mesh.
            branches: Paths under which the tree is all that the checkpoint holds; by default it is the whole state.

        Raises:
            CheckpointError: If there is no such checkpoint or it is damaged, or if paths, shapes or dtypes differ
                from those of `abstract_state`: every difference is listed. No dtype is cast.
        """
        step = self._existing(step)
        arrays = self.directory / str(step) / "state"
        wanted = tree.flatten(abstract_state)
        if problems := layout_problems(arrays):
            raise CheckpointError(f"checkpoint {arrays.parent} is not one of ours", problems)
        with _os_errors(arrays, "reading the checkpoint", _UNREADABLE):
            stored = tree.flatten(self._arrays.handler.metadata(arrays).tree)
        if problems := structure_mismatches(stored, wanted, branches):
            raise CheckpointError(f"checkpoint {arrays.parent} does not fit the state", problems)
        with _os_errors(arrays, "reading the checkpoint", _UNREADABLE):
            targets = {path: serialized_spec(leaf) for path, leaf in wanted.items()}
            places = ocp.checkpoint_utils.construct_restore_args(targets)
            args = ocp.args.PyTreeRestore(targets, restore_args=places, partial_restore=True)
            restored = self._arrays.restore(arrays, args=args)
        leaves = [from_serialized(restored[path], leaf) for path, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves), self._record(step)

    def _existing(self, step: int | None, *, contents: bool = True) -> int:
        """The step, or the newest valid one, once its files are known to be as they were sealed."""
        steps = self.steps()
        if step is None and (step := self.latest_valid()) is not None:
            return step
        if step in steps and not self._check(step, contents=contents):
            return step
        if problems := [problem for lost in self.lost if step in (None, lost) for problem in self._told(lost)]:
            title = "none of the checkpoints is valid" if step is None else f"checkpoint {step} is damaged"
            raise CheckpointError(f"nothing was restored: {title}", problems)
        there = f"there are the steps {', '.join(map(str, steps))}" if steps else "there are none"
        what = "there is no checkpoint" if step is None else f"there is no checkpoint of step {step}"
        raise CheckpointError("nothing was restored", [Problem(str(self.directory), what, there)])

    def _check(self, step: int, *, contents: bool = True) -> tuple[Problem, ...]:
        folder = self.directory / str(step)
        problems = broadcast_problems(lambda: verify_manifest(folder, contents=contents))
        if problems:
            self.lost[step] = problems
            self._in_the_way.add(step)
            del self._metrics[step]
        return problems

    def _told(self, step: int) -> list[Problem]:
        return [dataclasses.replace(p, where=str(self.directory / str(step) / p.where)) for p in self.lost[step]]

    def _record(self, step: int) -> dict[str, Any]:
        path = self.directory / str(step) / "record.json"
        with _os_errors(path, "reading the checkpoint", _UNREADABLE):
            return read_object(path, _AT_MOST)

    def _look(self, *, make: bool) -> tuple[str, ...]:
        """Finds out what there is; the names of leftovers."""

        def on_first() -> dict[str, Any]:
            try:
                with _os_errors(self.directory, "opening the checkpoints", "choose a directory that can be written"):
                    if make:
                        self.directory.mkdir(parents=True, exist_ok=True)
                    found = scan(self.directory)
            except CheckpointError as error:
                return {"failed": plain_problems(error.problems)}
            lost = [(step, plain_problems(problems)) for step, problems in found.lost.items()]
            return {"leftovers": found.leftovers, "metrics": list(found.metrics.items()), "lost": lost}

        found = broadcast_from_first(on_first)
        if "failed" in found:
            raise CheckpointError("opening the checkpoints failed", read_problems(found["failed"]))
        # What was found by reading all of it is not forgotten.
        self.lost |= {step: read_problems(problems) for step, problems in found["lost"]}
        self._in_the_way |= {step for step, _ in found["lost"]}
        self._metrics = {step: numbers for step, numbers in found["metrics"] if step not in self._in_the_way}
        return tuple(found["leftovers"])

    @contextlib.contextmanager
    def _write_errors(self, step: int) -> Iterator[None]:
        try:
            with _os_errors(self.directory / str(step), "writing the checkpoint", _UNWRITABLE):
                yield
        except CheckpointError:
            self._remove([self._unfinished(step).name])  # what it has written would keep a full disk full
            raise

    def _remove(self, leftovers: Sequence[str]) -> None:
        if jax.process_index() == 0:
            for name in leftovers:
                shutil.rmtree(self.directory / name, ignore_errors=True)


_UNREADABLE = "restore another step; this one is damaged or was written by another tool"
_UNWRITABLE = "make room, or see to the error; the checkpoints before it are as they were"
_AT_MOST = 64 << 20
_LEAVING_SECONDS = 20
_ON_THE_WAY = 128 << 20  # bytes that a process has in memory a second time while they are written


def _make_checkpointer(largest_shard: int = 0) -> Any:
    # Orbax would let each replica write a part of an array, and cut it on the device: a program to run beside training.
    array = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, array))
    # Named one by one, processes meet at the coordinator. Otherwise they meet by a collective of all devices, which
    # beside those of a step, from another thread, would come in another order on each process.
    everyone = ocp.options.MultiprocessingOptions(active_processes=set(range(jax.process_count())))
    gb = max(_ON_THE_WAY, largest_shard + 1) / 10**9  # Orbax refuses a shard of as much
    options = {"type_handler_registry": registry, "multiprocessing_options": everyone, "save_concurrent_gb": gb}
    # Compression takes a twelfth off random floats, a processor beside training, and 300 MiB; without it, nothing is
    # in memory twice.
    handler = ocp.PyTreeCheckpointHandler(**options, use_compression=False)
    return ocp.Checkpointer(handler, multiprocessing_options=everyone)


@contextlib.contextmanager
def _os_errors(where: Path, doing: str, fix: str) -> Iterator[None]:
    """What Orbax raises when the disk fails, as a CheckpointError: TensorStore's errors are ValueErrors."""
    try:
        yield
    except (CheckpointError, jax.errors.JaxRuntimeError):
        raise  # the latter is not about the disk: memory of a device, or another process
    except (OSError, RuntimeError, ValueError) as error:
        problem = Problem(str(where), f"{type(error).__name__}: {error}", fix=fix)
        raise CheckpointError(f"{doing} failed", [problem]) from error
