"""The files of one training run.

```
runs/demo/
  config.py            the config file as it was
  config.json          every field as resolved, and its difference from the file
  plan.txt             the sharding plan
  metrics.jsonl        one JSON object for each logged step and each evaluation
  goodput.jsonl        where the time went, over all restarts
  logs/process-0.log   what each process says of itself: restarts, steps, signals, stacks of a hang
  checkpoints/         Orbax: state, and beside it data position, seed, config, plan, mesh, versions
  tokenizer.json       of an imported model, with what else goes along with it (`spmd.hf.sidecar_files`)
  hf_config.json       the config.json of the model that was imported, or that the run started from
  tensorboard/
  profile/             traces of chosen steps
```
"""

import dataclasses
import datetime
import json
import shutil
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import jax

from spmd.data.tokenizer import TOKENIZER
from spmd.errors import CheckpointError, Problem
from spmd.run.config import TrainConfig, config_difference, config_values, with_values
from spmd.run.load_config import load_config
from spmd.run.renamed import current_fields

IMPORTED = "imported"
"""What the record of a checkpoint has that holds parameters from elsewhere, and no state to go on with."""
Resume = Literal["never", "auto", "always"]
"""What is done with a run that is in the folder already."""


@dataclasses.dataclass(frozen=True)
class RunDir:
    """The files of one run.

    Args:
        path: The folder; made by `describe`.
    """

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.path / "checkpoints"

    @property
    def log(self) -> Path:
        """Where this process writes what it says of itself."""
        return self.path / "logs" / f"process-{jax.process_index()}.log"

    @property
    def metrics(self) -> Path:
        """Where the numbers are."""
        return self.path / "metrics.jsonl"

    @property
    def holds_a_run(self) -> bool:
        """Whether a run was started here."""
        return self.metrics.exists() or any(self.checkpoints.glob("*"))

    def check_use(self, resume: Resume) -> bool:
        """Whether to go on with the run that is here.

        Call it before processes meet: afterwards the folder may hold this run's own files.

        Args:
            resume: never: start a run, and refuse a folder that holds one; always: go on with it, and refuse a folder
                without a checkpoint; auto: go on where there is one, start where there is none.

        Raises:
            CheckpointError: The folder is refused.
        """
        held = self.holds_a_run
        if resume == "always" and not any(path.name.isdecimal() for path in self.checkpoints.glob("*")):
            fix = "name the folder of the run, or --resume auto to begin where there is none"
            what = "holds a run without a checkpoint" if held else "holds no run"
            raise CheckpointError("Nothing was resumed:", [Problem(str(self.path), what, fix=fix)])
        if resume == "never" and held:
            fix = "--resume always (or auto) to go on with it, or another --out"
            raise CheckpointError("Nothing was started:", [Problem(str(self.path), "already holds a run", fix=fix)])
        inside = self.path.resolve()
        problems = [
            Problem(str(entry), f"leads out of the run folder, to {entry.resolve()}", fix="put a copy in its place")
            for entry in sorted({path for part in ("*", "logs/*", "checkpoints/*") for path in self.path.glob(part)})
            if not entry.resolve().is_relative_to(inside)
        ]
        if problems:
            raise CheckpointError("Nothing is written through links:", problems)
        return held

    def describe(self, config: TrainConfig, source: Path, plan: str) -> None:
        """Makes the folder, and writes the config, as file and as values, and the plan."""
        self.path.mkdir(parents=True, exist_ok=True)
        before, after = config_values(load_config(str(source))), config_values(config)
        values = {"config": after, "changed": config_difference(before, after)}
        kept = self.path / "config.py"
        if source.resolve() != kept.resolve():
            shutil.copyfile(source, kept)
        (self.path / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        (self.path / "plan.txt").write_text(plan + "\n", encoding="utf-8")

    def config(self) -> TrainConfig:
        """The run's config as it was resolved; an imported run that has been moved since has its tokenizer with it.

        Raises:
            CheckpointError: The folder holds no run.
        """
        fix = "give the folder that `spmd train` wrote, such as runs/demo"
        try:
            values = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
            if "architectures" in values:
                fix = f"spmd import {self.path} --out RUN"
            values = values["config"]
        except (KeyError, TypeError) as error:
            problem = Problem(str(self.path), "has a config.json that is not of a run", fix=fix)
            raise CheckpointError("There is no run:", [problem]) from error
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError("There is no run:", [Problem(str(self.path), f"{error}", fix=fix)]) from error
        config, own = (
            with_values(load_config(str(self.path / "config.py")), current_fields(values)),
            self.path / TOKENIZER,
        )
        recorded = Path(config.data.tokenizer).expanduser()
        moved = recorded.name == TOKENIZER and not recorded.exists() and own.exists()
        return with_values(config, {"data": {"tokenizer": str(own.absolute())}}) if moved else config


class ProcessLog:
    """The log of one process: a line for everything it says of itself, with the time (UTC).

    Args:
        path: The file; appended to, so restarts follow one another.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a", encoding="utf-8", buffering=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.say(f"ended by {type(error).__name__}: {error}")
        self.file.close()

    def say(self, text: str) -> None:
        """Writes a line."""
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
        self.file.write(f"{now} {text}\n")
