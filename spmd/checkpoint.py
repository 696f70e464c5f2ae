"""Checkpoints: everything that must resume together, written in the background, restored onto any mesh.

A checkpoint of step 100 is a folder that is there whole or not at all:

```
100/state/               every array of the state under its path (Orbax, OCDBT), whatever mesh it was on
100/record/record.json   what belongs to it and is no array: data position, seed, config, plan, mesh, versions
100/metrics/metrics      the metrics it was saved with
```

Arrays are stored by path, so the classes that hold them may change; what may not change in silence is a path,
a shape or a dtype: `Checkpoints.restore` compares all of them before it reads anything. This is the only room
that knows Orbax.
"""

import contextlib
import dataclasses
import difflib
import importlib.metadata
import json
import math
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from spmd import tree
from spmd.errors import CheckpointError, Problem
from spmd.tree import human_bytes

PyTree = Any

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "spmd")


def library_versions() -> dict[str, str]:
    """The versions of Python and of every library that can change what a checkpoint means.

    Example:
        >>> sorted(library_versions())
        ['flax', 'jax', 'jaxlib', 'numpy', 'optax', 'orbax-checkpoint', 'python', 'spmd']
    """
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


class Checkpoints:
    """The checkpoints of one run: the newest `keep` and the `keep_best` with the lowest `best`.

    One run writes to a directory at a time, and only that run opens it: opening removes what an interrupted
    save left behind. With several processes, each opens the same directory and makes every call.

    Args:
        directory: Where the checkpoints are; made if it is absent.
        keep: How many of the newest checkpoints stay, at least 1.
        keep_best: How many of the checkpoints with the lowest finite `best` stay besides, at least 0.
        best: The metric that ranks checkpoints, lower is better. One saved without it is never among the best.
        read_only: Only look: nothing is made, saved or removed, so a run that is still training is safe.

    Attributes:
        directory: The absolute path of the run's checkpoints.
        leftovers: Names of the interrupted saves that were found and removed when this was opened.

    Raises:
        CheckpointError: If `keep` or `keep_best` is too small, or the directory cannot be used.

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
        keep: int = 3,
        keep_best: int = 1,
        best: str = "val_loss",
        read_only: bool = False,
    ) -> None:
        limits = {"keep": (keep, 1), "keep_best": (keep_best, 0)}
        if problems := [
            Problem(name, f"is {n}, and must be at least {least}", fix=f"{name}={least}")
            for name, (n, least) in limits.items()
            if n < least
        ]:
            raise CheckpointError("the checkpoints cannot be kept as asked", problems)
        self.directory = Path(directory).absolute()
        self._policy = _Keep(keep, keep_best, best)
        self._writing: Path | None = None
        with _os_errors(self.directory, "opening the checkpoints", "choose a directory that can be written"):
            if not read_only:
                self.directory.mkdir(parents=True, exist_ok=True)
            # Listed before the manager is made, because it waits for all processes: each sees the same ones.
            self.leftovers = () if read_only else _leftovers(self.directory)
            self._manager = _make_manager(self.directory, self._policy)
            self._remove(self.leftovers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def save(
        self,
        step: int,
        state: PyTree,
        record: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Copies the state to the host and writes it in the background.

        It returns once the copies are taken: `state` may be donated and `record` changed at once. It waits
        for the save before it, and an error of that save is raised here.

        Args:
            step: The step that the state has reached, later than every checkpoint that is there.
            state: Any tree of `jax.Array`s, sharded as they like.
            record: What else must resume, as JSON; its tuples come back as lists.
            metrics: Numbers to rank the checkpoint by.

        Raises:
            CheckpointError: If the step exists or is earlier than the latest, if the state or the record holds
                something that cannot be stored, or if this or the previous save could not be written.
        """
        latest = self.latest()
        if latest is not None and step <= latest:
            what = "exists already" if step in self.steps() else f"is earlier than the latest, {latest}"
            fix = f"save a step after {latest}, or give the run a directory of its own"
            raise CheckpointError("nothing was saved", [Problem(str(self.directory / str(step)), what, fix=fix)])
        arrays = _arrays(state)
        try:
            # Also a copy: Orbax reads the record in the background, when the caller may have changed it.
            frozen = json.loads(json.dumps(dict(record)))
        except (TypeError, ValueError) as error:
            fix = "keep numbers, strings, lists and dictionaries in the record"
            raise CheckpointError("nothing was saved", [Problem("record", str(error), fix=fix)]) from error
        items = ocp.args.Composite(state=ocp.args.StandardSave(arrays), record=ocp.args.JsonSave(frozen))
        numbers = {name: float(value) for name, value in (metrics or {}).items()}
        self._refuse_a_full_disk(arrays)
        self._writing = self.directory / str(step)
        with self._write_errors():
            self._manager.save(step, args=items, metrics=numbers, force=True)

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
        with self._write_errors():
            self._manager.wait_until_finished()
        self._writing = None

    def close(self) -> None:
        """Waits for the save in progress and lets go of the directory; may be called again.

        Raises:
            CheckpointError: If the save in progress could not be written.
        """
        try:
            self.wait()
        finally:
            self._manager.close()

    def steps(self) -> tuple[int, ...]:
        """The steps of all checkpoints on disk, ascending; a save in progress is waited for."""
        self.wait()
        return tuple(sorted(self._manager.all_steps()))

    def latest(self) -> int | None:
        """The last step that was saved, None where there is none."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step with the lowest finite metric, the later of two equals; None where none was measured."""
        ranks = {step: self._policy.rank(self._manager.metrics(step)) for step in reversed(self.steps())}
        measured = {step: rank for step, rank in ranks.items() if rank < math.inf}
        return min(measured, key=measured.__getitem__, default=None)

    def record(self, step: int) -> dict[str, Any]:
        """The JSON that was saved with the step; no array is read.

        Raises:
            CheckpointError: If there is no such checkpoint or it cannot be read.
        """
        return self._read(self._existing(step), record=ocp.args.JsonRestore())["record"]

    def restore(self, step: int | None, abstract_state: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """The state and the record of a checkpoint, each array straight in the sharding that is asked for.

        Args:
            step: Which checkpoint, None for the latest.
            abstract_state: The tree to fill, of `jax.ShapeDtypeStruct`s with a sharding each, on any mesh.

        Returns:
            The state, in the structure of `abstract_state`, and the record.

        Raises:
            CheckpointError: If there is no such checkpoint, or if paths, shapes or dtypes differ from those of
                `abstract_state`: every difference is listed. No dtype is cast.
        """
        step = self._existing(step)
        wanted = tree.flatten(abstract_state)
        with _os_errors(self.directory / str(step), "reading the checkpoint", _UNREADABLE):
            stored = tree.flatten(self._manager.item_metadata(step)["state"].tree)
        if problems := _differences(stored, wanted):
            raise CheckpointError(f"checkpoint {self.directory / str(step)} does not fit the state", problems)
        items = self._read(step, state=ocp.args.StandardRestore(wanted), record=ocp.args.JsonRestore())
        leaves = [items["state"][path] for path in wanted]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves), items["record"]

    def _existing(self, step: int | None) -> int:
        steps = self.steps()
        if step is None and steps:
            return steps[-1]
        if step is None or step not in steps:
            there = f"there are the steps {', '.join(map(str, steps))}" if steps else "there are none"
            what = "there is no checkpoint" if step is None else f"there is no checkpoint of step {step}"
            raise CheckpointError("nothing was restored", [Problem(str(self.directory), what, there)])
        return step

    def _read(self, step: int, **items: Any) -> Any:
        with _os_errors(self.directory / str(step), "reading the checkpoint", _UNREADABLE):
            return self._manager.restore(step, args=ocp.args.Composite(**items))

    @contextlib.contextmanager
    def _write_errors(self) -> Iterator[None]:
        try:
            with _os_errors(self._writing or self.directory, "writing the checkpoint", _UNWRITABLE):
                yield
        except CheckpointError:
            # Orbax has struck the old checkpoints from its list already, though it removes none when a save
            # fails; and what the failed save has written would keep a full disk full.
            self._writing = None
            self._manager.reload()
            self._remove(_leftovers(self.directory))
            raise

    def _remove(self, leftovers: Sequence[str]) -> None:
        if jax.process_index() == 0:
            for name in leftovers:
                shutil.rmtree(self.directory / name, ignore_errors=True)


_UNREADABLE = "restore another step; this one is damaged or was written by another tool"
_UNWRITABLE = "make room, or see to the error; the checkpoints before it are as they were"


@dataclasses.dataclass(frozen=True)
class _Keep:
    """The preservation policy: the newest, and those with the lowest finite metric.

    Orbax's `BestN` fills up with checkpoints that have no metric when few have one; this one never does.
    """

    newest: int
    lowest: int
    metric: str

    def rank(self, metrics: Mapping[str, float] | None) -> float:
        value = (metrics or {}).get(self.metric, math.inf)
        return value if math.isfinite(value) else math.inf

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        measured = [c for c in checkpoints if self.rank(c.metrics) < math.inf]
        measured.sort(key=lambda c: (self.rank(c.metrics), -c.step))
        kept = {c.step for c in [*checkpoints[-self.newest :], *measured[: self.lowest]]}
        return [c.step in kept for c in checkpoints]


def _make_manager(directory: Path, policy: _Keep) -> Any:
    registry = ocp.DefaultCheckpointHandlerRegistry()
    for name, handler, save, restore in (
        ("state", ocp.StandardCheckpointHandler(), ocp.args.StandardSave, ocp.args.StandardRestore),
        ("record", ocp.JsonCheckpointHandler("record.json"), ocp.args.JsonSave, ocp.args.JsonRestore),
    ):
        registry.add(name, save, handler)
        registry.add(name, restore, handler)
    options = ocp.CheckpointManagerOptions(
        create=False,  # the folder is there, or this only looks
        best_fn=policy.rank,  # without one Orbax does not write the metrics
        best_mode="min",
        preservation_policy=policy,
        # Made in the background, a folder that cannot be made is a wait of 20 minutes instead of an error.
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
    )
    return ocp.CheckpointManager(directory, options=options, handler_registry=registry)


def _leftovers(directory: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in directory.glob("*.orbax-checkpoint-tmp*")))


@contextlib.contextmanager
def _os_errors(where: Path, doing: str, fix: str) -> Iterator[None]:
    """What Orbax raises when the disk fails, as a CheckpointError: TensorStore's errors are ValueErrors."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        problem = Problem(str(where), f"{type(error).__name__}: {error}", fix=fix)
        raise CheckpointError(f"{doing} failed", [problem]) from error


def _arrays(state: PyTree) -> dict[str, jax.Array]:
    """The state by path, all of it storable."""
    table = tree.flatten(state)
    problems = [
        Problem(path, f"is a {type(leaf).__name__}", fix="store it as a jax.Array, or in the record")
        for path, leaf in table.items()
        if not isinstance(leaf, jax.Array)
    ]
    problems += [
        Problem(path, "has no elements, and cannot be stored", f"shape {leaf.shape}", "leave it out")
        for path, leaf in table.items()
        if isinstance(leaf, jax.Array) and leaf.size == 0
    ]
    if (clash := len(jax.tree.leaves(state)) - len(table)) > 0:
        problems.append(Problem("state", f"{clash} arrays share a path", fix='take "/" out of the keys'))
    if not table:
        problems.append(Problem("state", "holds no array", fix="save the parameters at least"))
    if problems:
        raise CheckpointError("nothing was saved", problems)
    return table


def _differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Problem]:
    """Everything that keeps a checkpoint from filling a state, by path."""
    missing = [path for path in wanted if path not in stored]
    extra = [path for path in stored if path not in wanted]
    problems = []
    for path in missing:
        has = f"state {_describe(wanted[path])}"
        fix = _renamed(path, extra, "the checkpoint") or "restore with the model and optimizer that wrote it"
        problems.append(Problem(path, "missing: the state has it, the checkpoint does not", has, fix))
    for path in extra:
        has = f"checkpoint {_describe(stored[path])}"
        fix = _renamed(path, missing, "the state") or "restore with the model and optimizer that wrote it"
        problems.append(Problem(path, "extra: the checkpoint has it, the state does not", has, fix))
    for path, leaf in wanted.items():
        if getattr(leaf, "sharding", None) is None:
            fix = "jax.ShapeDtypeStruct(shape, dtype, sharding=...)"
            problems.append(Problem(path, "sharding: the state does not say where it goes", fix=fix))
        if path not in stored:
            continue
        there, here = _on_disk(stored[path]), _on_disk(leaf)
        if there.shape != here.shape:
            both = f"checkpoint {there.shape}, state {here.shape}"
            problems.append(Problem(path, "shape differs", both, "restore with the configuration that wrote it"))
        if there.dtype != here.dtype:
            both = f"checkpoint {there.dtype}, state {here.dtype}"
            problems.append(Problem(path, "dtype differs", both, f"ask for {there.dtype} and cast it afterwards"))
    return problems


def _on_disk(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype as they are stored: random keys are stored as their integers."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype))


def _describe(leaf: Any) -> str:
    leaf = _on_disk(leaf)
    return f"{leaf.dtype}{list(leaf.shape)}"


def _renamed(path: str, others: Sequence[str], who: str) -> str:
    near = difflib.get_close_matches(path, others, n=1)
    return f'{who} has "{near[0]}": was it renamed?' if near else ""
