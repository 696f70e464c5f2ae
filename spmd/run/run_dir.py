"""Files of one training run.

```
runs/demo/
  config.py            copy of the config file, with the modules beside it that it imports
  config.json          all fields as resolved, and their difference from the file
  plan.txt             the sharding plan
  metrics.jsonl        one JSON object per logged step and per evaluation
  goodput.jsonl        time by activity, over all restarts
  attempts/            starts and ends of each process, of runs with a limit of restarts
  lease/               which process writes to the folder
  generations/         which starts of several processes have failed
  logs/process-0.log   one log per process: restarts, steps, signals, stacks of a hang
  checkpoints/         Orbax: state, with data position, seed, config, plan, mesh, versions
  reference/           log-probabilities of the reference model, with task dpo
  compiled_step        the compiled step, to resume without tracing and compiling
  tokenizer.json       of an imported model, with its other sidecar files (`spmd.hf.sidecar_files`)
  hf_config.json       the config.json of the imported model, or of the model that `init` names
  tensorboard/         and wandb/, mlflow/: the same metrics, as `metrics_to` names them
  profile/             traces of chosen steps
```

A run folder in a bucket, such as `gs://bucket/runs/demo`, has the same files. They are written to a
temporary folder, and uploaded from there (`spmd.storage.mirror`), except for leases, generations
and checkpoints, which are in the bucket alone.
"""

import contextlib
import dataclasses
import datetime
import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import jax

from spmd.checkpoint.manager import list_steps
from spmd.checkpoint.manifest import read_object
from spmd.data.tokenizer import TOKENIZER
from spmd.distributed.hosts import (
    broadcast_from_first,
    gather_json,
    plain_problems,
    read_problems,
)
from spmd.distributed.shared_folder import shared_folder_problems
from spmd.errors import CheckpointError, Problem, StorageError, check_local, nearest_file
from spmd.model_interface.model_config import recorded_values
from spmd.observe.line_file import LineFile
from spmd.resilience.attempts import ATTEMPTS
from spmd.resilience.lease import Lease
from spmd.run.config import (
    TrainConfig,
    by_current_names,
    config_difference,
    config_values,
    with_values,
)
from spmd.run.load_config import copy_config, load_config, other_config
from spmd.run.run_config import RunConfig
from spmd.storage.address import BucketPath, Location
from spmd.storage.bucket import Bucket
from spmd.storage.mirror import Mirror

_MAX_CONFIG_BYTES = 64 << 20
IMPORTED = "imported"
"""Key in the record of a checkpoint that has imported parameters and no training state."""
METRICS = "metrics.jsonl"
Resume = Literal["never", "auto", "always"]

_OWNER = re.compile(r"process-(\d+)\.")
"""Beginning of the names of files that one process writes."""
_TRACES = "profile/"
_START_SECONDS = 30.0
"""Seconds until a bucket that does not answer before a run is an error."""
COMPILED_STEP = "compiled_step"
_REFERENCE = re.compile(r"reference/[^/]+\.npz")
_IN_BUCKET_ALONE = ("lease/", "checkpoints/", "generations/")
"""Parts of a run that have no copy in the local folder."""


@functools.cache
def _mirror_of(path: BucketPath) -> Mirror:
    """Return the local folder of a run in a bucket, the same for each call in a process."""
    return Mirror(Bucket(path, patience=_START_SECONDS), excluded=_IN_BUCKET_ALONE)


@dataclasses.dataclass(frozen=True)
class RunDir:
    """Paths of one run; `describe` makes the folder.

    Attributes:
        location: The run folder, as the user names it.
    """

    location: Location

    def __post_init__(self) -> None:
        if isinstance(self.location, Path):
            problems = check_local("folder", self.location)
            if problems:
                raise CheckpointError("Not a local folder:", problems)

    @functools.cached_property
    def mirror(self) -> Mirror | None:
        """Local folder of a run in a bucket, with its present files; None for a local run."""
        if isinstance(self.location, Path):
            return None
        mirror = _mirror_of(self.location)
        mirror.pull(_is_wanted)
        return mirror

    @property
    def path(self) -> Path:
        """Local folder of the run's files, temporary for a run in a bucket."""
        if self.mirror is not None:
            return self.mirror.folder
        return Path(str(self.location))

    @property
    def checkpoints(self) -> Location:
        """Folder of the checkpoints."""
        return self.location / "checkpoints"

    @property
    def compiled_step(self) -> Path:
        """File of the compiled step; of a run in a bucket, `fetch_compiled_step` downloads it."""
        return self.path / COMPILED_STEP

    def fetch_compiled_step(self) -> Path:
        """Return the file of the compiled step, downloaded for a run in a bucket."""
        if self.mirror is not None:
            self.mirror.fetch(COMPILED_STEP)
        return self.compiled_step

    def fetch_reference(self) -> Path:
        """Return the folder of the reference model's log-probabilities, downloaded likewise."""
        if self.mirror is not None:
            self.mirror.fetch("reference/")
        return self.path / "reference"

    @property
    def log(self) -> Path:
        """Log of this process."""
        return self.path / "logs" / f"process-{jax.process_index()}.log"

    @property
    def metrics(self) -> Path:
        """File of the metrics."""
        return self.path / METRICS

    @property
    def has_run(self) -> bool:
        """Whether the folder contains a run."""
        if self.metrics.exists():
            return True
        if isinstance(self.checkpoints, Path):
            return any(self.checkpoints.glob("[!.]*"))
        return bool(self.checkpoint_steps())

    def checkpoint_steps(self) -> list[int]:
        """Return the steps of all checkpoints in order; they were not verified."""
        return list_steps(self.checkpoints)

    def newest_checkpoint(self) -> int | None:
        """Return the step of the newest checkpoint, which was not verified; None if none exists."""
        return max(self.checkpoint_steps(), default=None)

    def checkpoint(self, step: int) -> Location:
        """Return the folder of a checkpoint, or its manifest in a bucket."""
        if isinstance(self.checkpoints, Path):
            return self.checkpoints / str(step)
        return self.checkpoints / "steps" / f"{step}.json"

    def uploads(self, lease: Lease) -> contextlib.AbstractContextManager[None]:
        """Upload the files of this process while a block runs; nothing is done for a local run."""
        if self.mirror is None:
            return contextlib.nullcontext()
        return self.mirror.uploads(lease.number, _is_own, lease.renew, lease.show)

    def upload_now(self, lease: Lease) -> None:
        """Upload the files of this process as they are, such as before a checkpoint exists."""
        if self.mirror is not None:
            self.mirror.upload(_is_own, lease.renew, lease.show)

    def pending_metrics(self) -> dict[str, Any] | None:
        """Return the metrics that are not in the bucket yet, for a copy of the state in memory.

        None for a local run, whose metrics survive the process, and on processes that write none.
        """
        if self.mirror is None or jax.process_index() != 0:
            return None
        position, lines = self.mirror.pending(METRICS)
        return {"position": position, "lines": lines.decode("latin-1")}

    def restore_metrics(self, pending: Mapping[str, Any] | None) -> None:
        """Write metrics that `pending_metrics` has returned in a process that has crashed."""
        if pending is None:
            return
        position = int(pending["position"])
        lines = str(pending["lines"]).encode("latin-1")
        content = b""
        if self.metrics.exists():
            content = self.metrics.read_bytes()
        if content[position : position + len(lines)] == lines:
            return
        _write_whole(self.metrics, content[:position] + lines)

    def upload_all(self, lease: Lease) -> None:
        """Upload the files of this process, or raise a `StorageError`."""
        if self.mirror is not None:
            lease.renew()
            self.mirror.push(_is_own)

    def upload_compiled_step(self) -> None:
        """Upload the compiled step, without a lease."""
        if self.mirror is not None:
            self.mirror.push(lambda name: name == COMPILED_STEP)

    def upload_attempts(self) -> None:
        """Upload the records of attempts, without a lease."""
        if self.mirror is not None:
            self.mirror.push(_is_own_attempt)

    def check_use(self, resume: Resume) -> bool:
        """Return true if the folder contains a run to resume.

        Nothing is written: the lease is claimed later, when all processes are connected and the
        config is known to fit.

        Args:
            resume: never: start a run, refuse a folder with one; always: resume, refuse a folder
                without a checkpoint; auto: resume if there is a run, else start one.
        """
        if self.mirror is None:
            self._check_writable()
        else:
            self._check_bucket()
        exists = self.has_run
        if resume == "always" and self.newest_checkpoint() is None:
            what = "contains a run without a checkpoint" if exists else "contains no run"
            fix = 'give the folder of the run, or resume="auto" to start a run if there is none'
            raise CheckpointError(
                "Nothing was resumed:", [Problem(str(self.location), what, fix=fix)]
            )
        if resume == "never" and exists:
            what = "already contains a run"
            fix = 'resume="always" (or "auto") to resume it, or another folder'
            raise CheckpointError(
                "Nothing was started:", [Problem(str(self.location), what, fix=fix)]
            )
        if self.mirror is None:
            self._check_links()
        return exists

    def check_use_together(self, resume: Resume) -> bool:
        """Return the result of `check_use` on process 0, once every process sees the folder.

        Every process makes this call, after all are connected, and all raise the same error.
        """
        problems = self._access_problems()
        if problems:
            raise CheckpointError("Nothing was started:", problems)
        found = broadcast_from_first(lambda: self._check_use_alone(resume))
        if "failed" in found:
            raise CheckpointError(found["title"], read_problems(found["failed"]))
        return bool(found["exists"])

    def _access_problems(self) -> tuple[Problem, ...]:
        """Return the problems of processes without access to the folder, the same on each."""
        if isinstance(self.location, Path):
            return shared_folder_problems(self.location, str(self.location))
        own: tuple[Problem, ...] = ()
        try:
            self._check_bucket()
            self.path.stat()  # which downloads the files
        except (CheckpointError, StorageError) as error:
            own = error.problems
        found = set[Problem]()
        for plain in gather_json(plain_problems(own)):
            found.update(read_problems(plain))
        return tuple(sorted(found))

    def _check_use_alone(self, resume: Resume) -> dict[str, Any]:
        """Return the result of `check_use`, or its error, as JSON values."""
        try:
            return {"exists": self.check_use(resume)}
        except (CheckpointError, StorageError) as error:
            return {"title": error.title, "failed": plain_problems(error.problems)}

    def _check_bucket(self) -> None:
        """Raise if the bucket cannot be listed, or has an object in place of the folder."""
        path = self.location
        if not isinstance(path, BucketPath):
            return
        problems: Sequence[Problem] = []
        try:
            Bucket(path, patience=_START_SECONDS).check()
            if Bucket(path.parent, patience=_START_SECONDS).exists(path.name):
                problems = [Problem(str(path), "is an object", fix="another key")]
        except StorageError as error:
            problems = error.problems
        if problems:
            raise CheckpointError("Nothing was started:", problems)

    def _check_writable(self) -> None:
        """Raise if the folder, or the nearest one above it, cannot be written."""
        there = self.path
        if not there.exists():
            there = next(path for path in self.path.absolute().parents if path.exists())
        if not there.is_dir():
            what = "is not a folder"
        elif not os.access(there, os.W_OK | os.X_OK):
            what = "cannot be written"
        else:
            return
        problem = Problem(str(there), what, fix="another folder")
        raise CheckpointError("Nothing was started:", [problem])

    def _check_links(self) -> None:
        """Raise if something in the folder is a link to another place, a pipe or a device."""
        inside = self.path.resolve()
        entries = set[Path]()
        for pattern in ("*", "lease/*", "logs/*", "checkpoints/*"):
            entries.update(self.path.glob(pattern))
        problems = list[Problem]()
        for entry in sorted(entries):
            if not entry.resolve().is_relative_to(inside):
                what = f"leads out of the run folder, to {entry.resolve()}"
                problems.append(Problem(str(entry), what, fix="replace it with a copy"))
        if problems:
            raise CheckpointError("Nothing is written through links:", problems)
        for entry in sorted(entries):
            if entry.exists() and not (entry.is_file() or entry.is_dir()):
                what = "is neither a file nor a folder, but a pipe, a socket or a device"
                problems.append(Problem(str(entry), what, fix="remove it"))
        if problems:
            raise CheckpointError("Nothing was started:", problems)

    def lease(self, resume: bool, take_over: bool) -> Lease:
        """Return the lease for writing here; `resume` is the result of `check_use`."""
        changed = Problem(
            str(self.location),
            "another run has begun or ended here in the meantime",
            fix="give the same command again",
        )

        def problems() -> list[Problem]:
            if self.mirror is not None:
                # Another run may have written until this one got the lease.
                self.mirror.pull(_is_wanted)
            if self.has_run != resume:
                return [changed]
            return []

        return Lease(self.location, take_over, problems)

    def describe(self, config: RunConfig, source: Path | None, plan: str) -> None:
        """Make the folder, and write the plan and the config.

        The config is written as values, and as `source` with the modules beside it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        values = config_values(config)
        of_source = values
        if source:
            with other_config():
                of_source = config_values(load_config(str(source)))
            copy_config(source, self.path)
        about = {"config": values, "changed": config_difference(of_source, values)}
        text = json.dumps(about, indent=2) + "\n"
        _write_whole(self.path / "config.json", text.encode())
        _write_whole(self.path / "plan.txt", f"{plan}\n".encode())

    def config(self) -> TrainConfig:
        """Return the run's resolved config.

        The tokenizer is found again if an imported run has been moved.
        """
        values = by_current_names(self._read_values())
        if not (self.path / "config.py").exists():
            problem = Problem(
                str(self.location),
                "has no config file: it was started in Python",
                fix=f"spmd eval {self.location} FILE.py, with a step of one's own; a run of "
                "spmd.train(config, source=Path(__file__)) has its config",
            )
            raise CheckpointError("Unreadable run:", [problem])
        config = load_config(str(self.path / "config.py"))
        unknown = sorted(set(values) - set(config_values(config)))
        if unknown:
            what = "is no field of this version's TrainConfig"
            problems = [Problem(f"config.json: {name}", what) for name in unknown]
            raise CheckpointError(f"The run {self.location} cannot be read:", problems)
        if "model" in values:
            values["model"] = recorded_values(config.model, values["model"])
        config = with_values(config, values)
        recorded = Path(config.data.tokenizer).expanduser()
        own = self.path / TOKENIZER
        if recorded.name == TOKENIZER and not recorded.exists() and own.exists():
            return with_values(config, {"data": {"tokenizer": str(own.absolute())}})
        return config

    def _read_values(self) -> dict[str, Any]:
        """Return the recorded values of the config."""
        fix = "give the folder that `spmd train` wrote, such as runs/demo"
        folder = self.path  # an error of the store is its own
        try:
            values = read_object((folder / "config.json").resolve(), _MAX_CONFIG_BYTES)
            if "architectures" in values:
                fix = f"spmd import {self.location} --out RUN"
            config = values["config"]
            if isinstance(config, dict):
                return config
            raise TypeError
        except (KeyError, TypeError, OSError, ValueError, RecursionError) as error:
            what = str(error)
            if isinstance(error, FileNotFoundError) and self.mirror is not None:
                what = "contains no config.json"
            if isinstance(error, KeyError | TypeError):
                what = "has a config.json that is not of a run"
            problem = Problem(str(self.location), what, fix=fix)
            raise CheckpointError("Run not found:", [problem]) from error


def _write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: on a full disk, the one from before stays."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _is_wanted(name: str) -> bool:
    """Return whether a process needs a file of a run: its own, and those of all.

    Traces and TensorBoard's files are only written; the compiled step and log-probabilities are
    large, and fetched by those that read them.
    """
    is_only_written = name.startswith((_TRACES, "tensorboard/"))
    if is_only_written or name == COMPILED_STEP or _REFERENCE.fullmatch(name):
        return False
    return _is_own(name) or not _OWNER.match(name.rpartition("/")[2])


def _is_own_attempt(name: str) -> bool:
    return name.startswith(f"{ATTEMPTS}/") and _is_own(name)


def _is_own(name: str) -> bool:
    """Return whether this process writes a file of a run: its own files, or those of all.

    Traces in a process's folder are its own, since none are downloaded.
    """
    if name.startswith(_TRACES):
        return True
    process = 0
    if jax.distributed.is_initialized():  # otherwise it would start the devices, too early
        process = jax.process_index()
    owner = _OWNER.match(name.rpartition("/")[2])
    if owner is None:
        return process == 0
    return int(owner[1]) == process


class ProcessLog:
    """Log of one process, with timestamps (UTC); restarts append to it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lines = LineFile(path)
        # For stacks and the output of C++, which need a descriptor.
        descriptor = self._lines.fileno()
        self.file = os.fdopen(descriptor, "w", encoding="utf-8", buffering=1, closefd=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.say(f"failed with {type(error).__name__}: {error}")
        with contextlib.suppress(OSError):
            self.file.close()
        self._lines.close()

    def say(self, text: str) -> None:
        """Write a line; on a full disk it waits in memory, as `LineFile` says."""
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
        self._lines.write(f"{now} {text}\n")


def check_has_run(run: RunDir, name: str) -> None:
    """Raise a `CheckpointError` if there is no run in a folder, `name` in the message."""
    path = run.path
    if run.has_run or (path / "config.json").exists():
        return
    if path.is_dir():  # also the local folder of a bucket
        problem = Problem(
            name,
            "contains no run",
            fix="give the folder that `spmd train` wrote, such as runs/demo",
        )
    elif path.exists():
        problem = Problem(name, "is not a folder", fix=nearest_file(path))
    else:
        problem = Problem(name, "does not exist", fix=nearest_file(path))
    raise CheckpointError("Run not found:", [problem])


def is_run(location: Location) -> bool:
    """Return true for a run folder, never for a folder from Hugging Face.

    The config.py of a run folder is executed.
    """
    folder = RunDir(location)
    if not isinstance(location, Path):
        return bool(folder.checkpoint_steps())
    path = folder.path
    if not (location / "checkpoints").is_dir() or any(path.glob("*.safetensors*")):
        return False
    try:
        return "architectures" not in read_object(path / "config.json", _MAX_CONFIG_BYTES)
    except (OSError, ValueError):
        return True  # `RunDir.config` reports that there is no run
