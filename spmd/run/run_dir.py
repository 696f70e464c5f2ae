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
  logs/process-0.log   one log per process: restarts, steps, signals, stacks of a hang
  checkpoints/         Orbax: state, with data position, seed, config, plan, mesh, versions
  compiled_step        the compiled step, to resume without tracing and compiling
  tokenizer.json       of an imported model, with its other sidecar files (`spmd.hf.sidecar_files`)
  hf_config.json       the config.json of the imported model, or of the model that `init` names
  tensorboard/         and wandb/, mlflow/: the same metrics, as `metrics_to` names them
  profile/             traces of chosen steps
```
"""

import dataclasses
import datetime
import json
import os
from pathlib import Path
from typing import Any, Literal, Self

import jax

from spmd.data.tokenizer import TOKENIZER
from spmd.distributed.hosts import broadcast_from_first, plain_problems, read_problems
from spmd.distributed.shared_folder import shared_folder_problems
from spmd.errors import CheckpointError, Problem, check_local
from spmd.model_interface.model_config import recorded_values
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

IMPORTED = "imported"
"""Key in the record of a checkpoint that has imported parameters and no training state."""
Resume = Literal["never", "auto", "always"]


@dataclasses.dataclass(frozen=True)
class RunDir:
    """Paths of one run, below `path`; `describe` makes the folder."""

    path: Path

    def __post_init__(self) -> None:
        problems = check_local("folder", self.path)
        if problems:
            raise CheckpointError("Not a local folder:", problems)

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def compiled_step(self) -> Path:
        """File of the compiled step."""
        return self.path / "compiled_step"

    @property
    def log(self) -> Path:
        """Log of this process."""
        return self.path / "logs" / f"process-{jax.process_index()}.log"

    @property
    def metrics(self) -> Path:
        """File of the metrics."""
        return self.path / "metrics.jsonl"

    @property
    def has_run(self) -> bool:
        """Whether the folder contains a run."""
        return self.metrics.exists() or any(self.checkpoints.glob("[!.]*"))

    def newest_checkpoint(self) -> int | None:
        """Return the step of the newest checkpoint, which was not verified; None if none exists."""
        steps = [int(path.name) for path in self.checkpoints.glob("*") if path.name.isdecimal()]
        return max(steps, default=None)

    def check_use(self, resume: Resume) -> bool:
        """Return true if the folder contains a run to resume.

        Nothing is written: the lease is claimed later, when all processes are connected and the
        config is known to fit.

        Args:
            resume: never: start a run, refuse a folder with one; always: resume, refuse a folder
                without a checkpoint; auto: resume if there is a run, else start one.
        """
        self._check_writable()
        exists = self.has_run
        if resume == "always" and self.newest_checkpoint() is None:
            what = "contains a run without a checkpoint" if exists else "contains no run"
            fix = 'give the folder of the run, or resume="auto" to start a run if there is none'
            raise CheckpointError("Nothing was resumed:", [Problem(str(self.path), what, fix=fix)])
        if resume == "never" and exists:
            what = "already contains a run"
            fix = 'resume="always" (or "auto") to resume it, or another folder'
            raise CheckpointError("Nothing was started:", [Problem(str(self.path), what, fix=fix)])
        self._check_links()
        return exists

    def check_use_together(self, resume: Resume) -> bool:
        """Return the result of `check_use` on process 0, once every process sees the folder.

        Every process makes this call, after all are connected, and all raise the same error.
        """
        problems = shared_folder_problems(self.path, str(self.path))
        if problems:
            raise CheckpointError("Nothing was started:", problems)
        found = broadcast_from_first(lambda: self._check_use_alone(resume))
        if "failed" in found:
            raise CheckpointError(found["title"], read_problems(found["failed"]))
        return bool(found["exists"])

    def _check_use_alone(self, resume: Resume) -> dict[str, Any]:
        """Return the result of `check_use`, or its error, as JSON values."""
        try:
            return {"exists": self.check_use(resume)}
        except CheckpointError as error:
            return {"title": error.title, "failed": plain_problems(error.problems)}

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
        """Raise if something in the folder is a link to another place."""
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

    def lease(self, resume: bool, take_over: bool) -> Lease:
        """Return the lease for writing here; `resume` is the result of `check_use`."""
        changed = Problem(
            str(self.path),
            "another run has begun or ended here in the meantime",
            fix="give the same command again",
        )

        def problems() -> list[Problem]:
            if self.has_run != resume:
                return [changed]
            return []

        return Lease(self.path, take_over, problems)

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
        (self.path / "config.json").write_text(text, encoding="utf-8")
        (self.path / "plan.txt").write_text(plan + "\n", encoding="utf-8")

    def config(self) -> TrainConfig:
        """Return the run's resolved config.

        The tokenizer is found again if an imported run has been moved.
        """
        values = by_current_names(self._read_values())
        if not (self.path / "config.py").exists():
            problem = Problem(
                str(self.path),
                "has no config file: it was started in Python",
                fix=f"spmd eval {self.path} FILE.py, with a step of one's own; a run of "
                "spmd.train(config, source=Path(__file__)) has its config",
            )
            raise CheckpointError("Unreadable run:", [problem])
        config = load_config(str(self.path / "config.py"))
        unknown = sorted(set(values) - set(config_values(config)))
        if unknown:
            what = "is no field of this version's TrainConfig"
            problems = [Problem(f"config.json: {name}", what) for name in unknown]
            raise CheckpointError(f"The run {self.path} cannot be read:", problems)
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
        try:
            values = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
            if "architectures" in values:
                fix = f"spmd import {self.path} --out RUN"
            config = values["config"]
            if isinstance(config, dict):
                return config
            raise TypeError
        except (KeyError, TypeError, OSError, ValueError, RecursionError) as error:
            what = str(error)
            if isinstance(error, KeyError | TypeError):
                what = "has a config.json that is not of a run"
            problem = Problem(str(self.path), what, fix=fix)
            raise CheckpointError("Run not found:", [problem]) from error


class ProcessLog:
    """Log of one process, with timestamps (UTC); restarts append to it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a", encoding="utf-8", buffering=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.say(f"failed with {type(error).__name__}: {error}")
        self.file.close()

    def say(self, text: str) -> None:
        """Write a line."""
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
        self.file.write(f"{now} {text}\n")
