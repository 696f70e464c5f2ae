"""Metrics of a run: throughput, utilization, memory, and the writers of their values.

```python
clock = StepClock()
metrics = JsonLines(folder / "metrics.jsonl", keep_through=resumed_step)
writers = Writers([metrics, TensorBoard(folder)])
writers.write(step, {"loss": loss, "step_s": clock.median})
```

A number that a backend does not report is None, printed as "not reported", and never 0. A FLOP
count carries its formula, because utilizations by different formulas cannot be compared.
"""

import collections
import contextlib
import dataclasses
import json
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from spmd.chips import peak_flops
from spmd.errors import ConfigError, Problem
from spmd.observe.json_lines import drop_later_lines
from spmd.observe.line_file import LineFile, say_on_stderr

Values = Mapping[str, float | int | str | np.ndarray | None]
"""Values of one step by name.

None is null in JSON, and skipped by the other writers, as are arrays on the console."""

NOT_REPORTED = "not reported"


@dataclasses.dataclass(frozen=True)
class Flops:
    """Model FLOPs to train on one token, without recomputation, and their formula."""

    per_token: float
    formula: str

    def __post_init__(self) -> None:
        if not math.isfinite(self.per_token) or self.per_token <= 0:
            problem = Problem("per_token", f"is {self.per_token}", fix="above 0")
            raise ConfigError("No FLOP count:", [problem])


def mean_keys(sequence: int, windows: Sequence[int] = (), block: int = 0) -> float:
    """Return the mean number of keys of a query of causal attention, over positions and layers.

    Args:
        windows: Sliding windows of consecutive layers, repeated; 0 for all preceding tokens.
        block: Tokens of a kernel's block, to count the keys that are multiplied: whole blocks.

    Example:
        >>> mean_keys(128), mean_keys(128, windows=(16, 0)), mean_keys(128, (16, 0), block=16)
        (64.0, 39.5, 51.5)
    """
    means = []
    all_before = min(sequence, (sequence + block) / 2)
    for window in windows or (0,):
        width = min(window or sequence, sequence)
        # The first `width` queries see fewer keys: half as many on average.
        seen = width - width * width / (2 * sequence)
        means.append(min(seen + block, all_before))
    return sum(means) / len(means)


def transformer_flops(
    params_in_matmuls: float, layers: int, attention_width: int, keys: float
) -> Flops:
    """Count the model FLOPs of a transformer, as in appendix B of PaLM.

    Each parameter of a matmul costs 2 operations forward and 4 backward. Attention adds two matmuls
    of `keys × attention_width` per token and layer; `attention_width` is query heads × width of a
    head. PaLM (Chowdhery et al., arXiv:2204.02311) counts all keys of a sequence; a query of causal
    attention sees half of them (`mean_keys`). `params_in_matmuls` counts the output head, also a
    tied one, no embedding lookup, and the active experts only.
    """
    formula = (
        f"6·N + 12·L·A·K with N={human_count(params_in_matmuls)} matmul parameters, "
        f"L={layers}, A={attention_width}, K={keys:g} keys on average (no recompute)"
    )
    per_token = 6 * params_in_matmuls + 12 * layers * attention_width * keys
    return Flops(per_token, formula)


def utilization(
    flops: Flops, tokens_per_second: float, devices: Iterable[jax.Device]
) -> float | None:
    """Return the model FLOPs utilization (MFU) in [0, 1]; None if a device's peak is not known.

    `tokens_per_second` is of all `devices` together. Print the formula of `flops` with the result.
    """
    peaks = []
    for device in devices:
        peak = peak_flops(device.device_kind)
        if peak is None:
            return None
        peaks.append(peak)
    if not peaks:
        return None
    return flops.per_token * tokens_per_second / sum(peaks)


class StepClock:
    """Wall-clock seconds between finished steps on the host, of the last `window` steps."""

    def __init__(self, window: int = 50, now: Callable[[], float] = time.perf_counter) -> None:
        self._seconds: collections.deque[float] = collections.deque(maxlen=window)
        self._now = now
        self._last: float | None = None

    def finished(self) -> None:
        """Record the end of a step: its results are available, not only dispatched."""
        now = self._now()
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now

    def restart(self) -> None:
        """Skip the time to the next finished step.

        Call it after an evaluation, a checkpoint or a compilation.
        """
        self._last = None

    @property
    def median(self) -> float | None:
        """Median seconds of a step; None before two steps have finished."""
        if not self._seconds:
            return None
        return statistics.median(self._seconds)

    @property
    def p95(self) -> float | None:
        """95th percentile of a step's seconds (nearest rank); None as for `median`."""
        ranked = sorted(self._seconds)
        if not ranked:
            return None
        rank = math.ceil(0.95 * len(ranked))
        return ranked[rank - 1]


def device_memory(devices: Sequence[jax.Device] | None = None) -> int | None:
    """Return the largest peak of bytes in use of `devices`; None on CPUs.

    The default is the devices of this process.
    """
    if devices is None:
        devices = jax.local_devices()
    peaks = []
    for device in devices:
        stats = device.memory_stats() or {}
        if "peak_bytes_in_use" in stats:
            peaks.append(int(stats["peak_bytes_in_use"]))
    return max(peaks, default=None)


def process_peak_rss() -> int:
    """Return the peak bytes of host memory of this process."""
    unit = 1024  # getrusage(2): bytes on macOS, KiB on Linux
    if sys.platform == "darwin":
        unit = 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@runtime_checkable
class Writer(Protocol):
    """Destination of metrics: `write` takes those of one step, nothing is written after `close`."""

    def write(self, step: int, values: Values) -> None: ...  # noqa: D102

    def close(self) -> None: ...  # noqa: D102


MOST_WAITING = 10_000
"""Values of steps that wait for a writer in memory; later ones are lost, and counted."""


class Writers(Writer):
    """Several writers as one; an OSError of a writer, such as of a full disk, is not raised.

    What a writer could not write waits, and is written before its next values. `say` gets a
    sentence when a writer fails for the first time, and when it works again.
    """

    def __init__(
        self, writers: Iterable[Writer], say: Callable[[str], None] = say_on_stderr
    ) -> None:
        self._writers = tuple(_LastingWriter(writer, say) for writer in writers)

    def write(self, step: int, values: Values) -> None:
        """Write the values with every writer, in order."""
        for writer in self._writers:
            writer.write(step, values)

    def close(self) -> None:
        """Close every writer, even if closing one of them fails."""
        with contextlib.ExitStack() as stack:
            for writer in reversed(self._writers):
                stack.callback(writer.close)


class _LastingWriter(Writer):
    """Writer with a queue of unwritten values."""

    def __init__(self, writer: Writer, say: Callable[[str], None]) -> None:
        self._writer = writer
        self._say = say
        self._waiting: collections.deque[tuple[int, Values]] = collections.deque()
        self._lost = 0
        self._failed = False

    def write(self, step: int, values: Values) -> None:
        if self._waiting:
            self._write_waiting()
        if len(self._waiting) >= MOST_WAITING:
            self._lost += 1
            return
        self._waiting.append((step, values))
        self._write_waiting()

    def _write_waiting(self) -> None:
        name = type(self._writer).__name__
        try:
            while self._waiting:
                self._writer.write(*self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if not self._failed:
                self._failed = True
                what = "the run continues, and its values wait in memory"
                self._say(f"{name} cannot write metrics ({error}): {what}")
            return
        if self._failed:
            self._failed = False
            lost = ""
            if self._lost:
                lost = f"; the values of {self._lost} lines were lost"
            self._say(f"{name} can write metrics again{lost}")
            self._lost = 0

    def close(self) -> None:
        self._write_waiting()
        name = type(self._writer).__name__
        if self._waiting:
            count = len(self._waiting) + self._lost
            self._say(f"{name}: the values of {count} lines were lost")
        try:
            self._writer.close()
        except OSError as error:
            self._say(f"{name} could not be closed: {error}")


class JsonLines(Writer):
    """One JSON object a line, `step` first; each line is handed to the system at once.

    A killed run loses at most the line it was writing, which the next open drops, with all lines of
    steps after `keep_through`, such as the step that the run resumes from. Other lines that are
    damaged are moved to a file beside it, `metrics.jsonl.damaged`. On a full disk lines wait in
    memory, as `LineFile` says; `say` gets sentences about both. JSON has no NaN: an infinite loss
    is `{"step": 7, "loss": null, "non_finite": {"loss": "inf"}}`. Arrays are lists of four digits,
    null where not finite.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        keep_through: int | None = None,
        say: Callable[[str], None] = say_on_stderr,
    ) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            drop_later_lines(path, keep_through, say)
        self._file = LineFile(path, say)

    def write(self, step: int, values: Values) -> None:
        """Append one line."""
        record: dict[str, Any] = {"step": int(step)}
        for name, value in values.items():
            if isinstance(value, int | str | None):
                record[name] = value
            else:
                record[name] = _listed(value)
        non_finite = {}
        for name, value in record.items():
            if isinstance(value, float) and not math.isfinite(value):
                non_finite[name] = str(value)
        if non_finite:
            record |= dict.fromkeys(non_finite)
            record["non_finite"] = non_finite
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _listed(value: Any) -> Any:
    """Return a number as a float, and an array as lists."""
    if not np.ndim(value):
        return float(value)
    if np.ndim(value) == 1:
        return list(map(_rounded, value))
    return list(map(_listed, value))


def _rounded(element: Any) -> float | None:
    """Return an element of an array with four digits; None if it is not finite."""
    if not math.isfinite(element):
        return None
    return float(f"{element:.4g}")


def human_count(n: float) -> str:
    """Format a count with three significant digits and a decimal unit.

    Example:
        >>> human_count(12_345), human_count(124_439_808), human_count(7), human_count(999_999)
        ('12.3k', '124M', '7', '1M')
    """
    for unit in ("", "k", "M", "G"):
        if abs(n) < 999.5:
            return f"{n:.3g}{unit}"
        n /= 1000
    return f"{n:.3g}T"


def human_duration(seconds: float) -> str:
    """Format a duration with three significant digits, from a minute on as h:mm:ss.

    Example:
        >>> human_duration(0.0432), human_duration(4.321), human_duration(86), human_duration(7384)
        ('43.2 ms', '4.32 s', '1:26', '2:03:04')
    """
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes}:{whole:02}"
    return f"{hours}:{minutes:02}:{whole:02}"
