"""Writer of Weights & Biases runs, offline."""

import json
import math
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spmd.observe.metrics import Values, Writer


class WandB(Writer):
    """One W&B run in `folder/wandb`: numbers, texts, and arrays as histograms; no network is used.

    `wandb sync folder/wandb/offline-run-*` uploads it. A later process, or a roll-back, continues
    the run by its id, in a part of its own. Steps of earlier parts are not written again, as W&B
    takes steps in ascending order only. W&B loses what a killed process wrote last, so a part that
    was not closed is removed: write its steps again.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        self._histogram = wandb.Histogram
        self._record = folder / "wandb" / "spmd.json"
        self._record.parent.mkdir(parents=True, exist_ok=True)
        known = {}
        if self._record.exists():
            known = json.loads(self._record.read_text(encoding="utf-8"))
        self._id = known.get("id", uuid.uuid4().hex[:8])
        self._written = known.get("step", -1)
        self._step = self._written
        open_part = Path(known.get("open", "")).name
        if open_part:
            shutil.rmtree(self._record.with_name(open_part), ignore_errors=True)
        settings = wandb.Settings(
            mode="offline",
            reinit="create_new",  # beside a run of the user's own
            console="off",
            silent=True,
            save_code=False,
            disable_git=True,
            x_disable_stats=True,
        )
        self._run = wandb.init(
            project="spmd",
            name=folder.resolve().name,
            id=self._id,
            resume="allow",
            dir=str(folder),
            config=dict(config),
            settings=settings,
        )
        self._note(Path(self._run.dir).parent.name)

    def _note(self, part: str) -> None:
        """Record the id, the last step of closed parts, and the open part."""
        new = self._record.with_suffix(".tmp")
        record = {"id": self._id, "step": self._written, "open": part}
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
        """Write the last step and close this part of the run."""
        self._run.finish()
        self._written = self._step
        self._note("")
