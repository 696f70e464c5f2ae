"""Writer of Weights & Biases runs, offline or online."""

import dataclasses
import json
import math
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spmd.checkpoint.manifest import read_object
from spmd.errors import ConfigError, Problem
from spmd.observe.metrics import Values, Writer

_TITLE = "Weights & Biases cannot be used:"
_MAX_RECORD_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class WandBConfig:
    """Weights & Biases, for `metrics_to=("wandb",)`."""

    online: bool = False
    """Send metrics to the server while the run trains; otherwise `wandb sync` uploads them."""
    project: str = "spmd"
    """Project of the runs."""
    entity: str = ""
    """User or team; empty for the default of the account."""
    tags: tuple[str, ...] = ()
    """Tags of the runs."""
    group: str = ""
    """Group of the runs of all attempts; by default the name of the run folder and an id."""


def check_login(config: WandBConfig) -> list[Problem]:
    """Return a problem if metrics go to the server and there is no key for it.

    On a terminal the user is asked for the key.
    """
    if not config.online:
        return []
    import wandb

    try:
        is_ready = wandb.login()
    except (wandb.errors.Error, OSError) as error:
        return [_no_key(str(error))]
    if is_ready:
        return []
    return [_no_key("")]


def _no_key(detail: str) -> Problem:
    fix = (
        "run `wandb login` once, or set WANDB_API_KEY; wandb.online=False writes to the run folder"
    )
    return Problem("wandb.online", "needs an API key, and there is none", detail, fix)


class WandB(Writer):
    """W&B run of one attempt: numbers, texts, and arrays as histograms, in `folder/wandb`.

    Each process that continues a run is an attempt, and so is a roll-back; their W&B runs have ids
    of their own, and one group. Steps of closed attempts are not written again, as charts of a
    group would show them twice; online, a killed attempt may have sent steps after its checkpoint,
    which the next one takes again. Offline, W&B loses what a killed process wrote last, so the run of
    an attempt that was not closed is removed: write its steps again. `wandb sync
    folder/wandb/offline-run-*` uploads them.

    Args:
        start: Step after which this attempt begins.
        values: Values of the run's config.

    Raises:
        ConfigError: The server cannot be reached, or refuses the run.
    """

    def __init__(
        self, folder: Path, start: int, values: Mapping[str, Any], config: WandBConfig
    ) -> None:
        import wandb

        self._histogram = wandb.Histogram
        self._record = folder / "wandb" / "spmd.json"
        self._record.parent.mkdir(parents=True, exist_ok=True)
        known = _read_known(self._record)
        self._id = known.get("id", uuid.uuid4().hex[:8])
        self._attempt = known.get("attempt", 0) + 1
        self._written = known.get("step", -1)
        open_part = Path(known.get("open", "")).name
        if open_part and open_part.startswith("offline"):
            shutil.rmtree(self._record.with_name(open_part), ignore_errors=True)
        elif open_part:  # the server has what an interrupted attempt sent
            self._written = max(self._written, start)
        self._step = self._written
        self._run = self._open(folder, values, config)
        self._note(Path(self._run.dir).parent.name)

    def _open(self, folder: Path, values: Mapping[str, Any], config: WandBConfig) -> Any:
        """Return a new W&B run."""
        import wandb

        mode = "offline"
        if config.online:
            mode = "online"
        settings = wandb.Settings(
            mode=mode,
            reinit="create_new",  # beside a run of the user's own
            console="off",
            silent=True,
            save_code=False,
            disable_git=True,
            x_disable_stats=True,
        )
        name = folder.resolve().name
        try:
            return wandb.init(
                project=config.project,
                entity=config.entity or None,
                tags=config.tags or None,
                group=config.group or f"{name}-{self._id}",
                name=f"{name}-{self._attempt}",
                id=f"{self._id}-{self._attempt}",
                dir=str(folder),
                config=dict(values),
                settings=settings,
            )
        except (wandb.errors.Error, OSError) as error:
            fix = "check the network, project and entity; or wandb.online=False"
            problem = Problem("wandb", "the run cannot be opened", str(error), fix)
            raise ConfigError(_TITLE, [problem]) from error

    def _note(self, part: str) -> None:
        """Record the ids, the last step of closed attempts, and the open attempt's folder."""
        new = self._record.with_suffix(".tmp")
        record = {
            "id": self._id,
            "attempt": self._attempt,
            "step": self._written,
            "open": part,
        }
        new.write_text(json.dumps(record), encoding="utf-8")
        new.replace(self._record)

    def write(self, step: int, values: Values) -> None:
        """Log the values; W&B keeps those of one step together and writes them when the next
        begins."""
        if step <= self._written:
            return
        self._step = step
        shown = {}
        for name, value in values.items():
            found = self._shown(value)
            if found is not None:
                shown[name] = found
        self._run.log(shown, step=step)

    def _shown(self, value: Any) -> Any:
        """Return a value as W&B takes it; None if there is nothing to show."""
        if isinstance(value, np.ndarray):
            finite = value[np.isfinite(value)]
            if not finite.size:
                return None
            return self._histogram(finite)
        if value is None or isinstance(value, str):
            return value
        if not math.isfinite(value):
            return None
        return value

    def close(self) -> None:
        """Write the last step and close the W&B run of this attempt."""
        self._run.finish()
        self._written = self._step
        self._note("")


def _read_known(record: Path) -> dict[str, Any]:
    """Return the record of the attempts before; empty for the first one.

    Raises:
        ConfigError: It is damaged.
    """
    if not record.exists():
        return {}
    kinds = {"id": str, "attempt": int, "step": int, "open": str}
    try:
        known = read_object(record.resolve(), _MAX_RECORD_BYTES)
        for name, value in known.items():
            if type(value) is not kinds.get(name):
                raise ValueError(f"{name} is {type(value).__name__}")
    except (OSError, ValueError) as error:
        fix = "remove it: a new group of runs begins, with all lines of metrics.jsonl"
        problem = Problem(str(record), "is not a record of runs in wandb", str(error), fix)
        raise ConfigError(_TITLE, [problem]) from error
    return known
