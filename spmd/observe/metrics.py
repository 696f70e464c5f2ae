"""How fast a run is, how much it holds, and where its numbers are written.

```python
flops = transformer_flops(params_in_matmuls=124_000_000, layers=12, attention_width=768, sequence=1024)
clock = StepClock()
writers = Writers([JsonLines(folder / "metrics.jsonl", keep_through=resumed_step), Console(total_steps)])
writers.write(step, {"loss": loss, "step_s": clock.median})
```

A number that a backend does not report is None here and "not reported" in print, never 0. A FLOP count carries its
formula, because a utilization without one cannot be compared.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

import jax
import rich.console
from rich.columns import Columns
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from spmd.errors import ConfigError, Problem
from spmd.tree import human_bytes

Values = Mapping[str, float | int | str | None]
"""Values of one step by name; None is not reported: JSON has it as null, the other writers leave it out."""

NOT_REPORTED = "not reported"


@dataclasses.dataclass(frozen=True)
class Flops:
    """The model's operations to train on one token, without recomputation, and the formula that counts them."""

    per_token: float
    formula: str

    def __post_init__(self) -> None:
        if not (math.isfinite(self.per_token) and self.per_token > 0):
            raise ConfigError("No FLOP count:", [Problem("per_token", f"is {self.per_token}", fix="above 0")])


def transformer_flops(
    params_in_matmuls: int, layers: int, attention_width: int, sequence: int, causal: bool = True
) -> Flops:
    """The model FLOPs of a transformer, as in appendix B of PaLM (Chowdhery et al., arXiv:2204.02311).

    Each parameter of a matrix product costs 2 operations forward and 4 backward. Attention adds two products of
    `sequence × attention_width` per token and layer. PaLM counts all of them; a causal model needs half.

    Args:
        params_in_matmuls: Parameters that a token is multiplied with: without embedding tables that are looked up,
            with the output head (also where it is tied), with the active experts only.
        layers: Layers with attention.
        attention_width: Heads × width of a head, of the queries.
        sequence: Tokens that attend to one another.
        causal: Whether a token attends only to those before it.
    """
    attention = 12 * layers * attention_width * sequence / (2 if causal else 1)
    formula = (
        f"6·N + 12·L·A·S{'/2' if causal else ''} with N={human_count(params_in_matmuls)} matmul parameters, "
        f"L={layers}, A={attention_width}, S={sequence} "
        f"({'causal: attention halved' if causal else 'full attention'}; no recompute)"
    )
    return Flops(6 * params_in_matmuls + attention, formula)


PEAK_FLOPS: dict[str, float] = {
    # Google Cloud's pages of TPU system architecture, bf16 per chip. JAX has one device for each chip ...
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    # ... except here, where it has one for each of two TensorCores.
    "TPU7x": 2307e12 / 2,
    # NVIDIA's data sheets, bf16 tensor cores without sparsity, which they print as half of the figure with it.
    "A100": 312e12,
    "H100": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "L4": 121e12,
    "L40S": 362e12,
}
"""Peak dense bf16 operations per second of one JAX device, by words of its `device_kind`."""


def peak_flops(device_kind: str) -> float | None:
    """The peak dense bf16 operations per second of a device; None where it is not known, as for a CPU.

    Example:
        >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("NVIDIA H100 PCIe"), peak_flops("cpu")
        (989000000000000.0, 756000000000000.0, None)
    """
    known = [words for words in PEAK_FLOPS if re.search(rf"\b{words}\b", device_kind, re.IGNORECASE)]
    return PEAK_FLOPS[max(known, key=len)] if known else None


def utilization(flops: Flops, tokens_per_second: float, devices: Iterable[jax.Device]) -> float | None:
    """Model FLOPs utilization (MFU): what the model needs, as a part of what the devices could do.

    `tokens_per_second` is of all `devices` together. Print the formula of `flops` beside the result, a part of 1;
    it is None where the peak of a device is not known.
    """
    peaks = [peak_flops(device.device_kind) for device in devices]
    total = sum(peak for peak in peaks if peak)
    return flops.per_token * tokens_per_second / total if peaks and None not in peaks else None


class StepClock:
    """Wall-clock seconds from one finished step to the next, on the host.

    Args:
        window: How many of the last steps the statistics are over.
        now: The clock, in seconds.
    """

    def __init__(self, window: int = 50, now: Callable[[], float] = time.perf_counter) -> None:
        self._seconds: collections.deque[float] = collections.deque(maxlen=window)
        self._now = now
        self._last: float | None = None

    def finished(self) -> None:
        """Says that a step has just finished: its results are there, not only dispatched."""
        now = self._now()
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now

    def restart(self) -> None:
        """Leaves out the time up to the next finished step: after an evaluation, a checkpoint, a compilation."""
        self._last = None

    @property
    def median(self) -> float | None:
        """Seconds of the middle step of the window; None before two steps have finished."""
        return statistics.median(self._seconds) if self._seconds else None

    @property
    def p95(self) -> float | None:
        """Seconds that 95 % of the steps of the window do not exceed (nearest rank); None as for `median`."""
        ranked = sorted(self._seconds)
        return ranked[math.ceil(0.95 * len(ranked)) - 1] if ranked else None


def device_memory(devices: Sequence[jax.Device] | None = None) -> int | None:
    """Peak bytes in use on the fullest of `devices` (all of this process); None where nothing is reported (CPU)."""
    stats = [device.memory_stats() or {} for device in (jax.local_devices() if devices is None else devices)]
    return max((int(s["peak_bytes_in_use"]) for s in stats if "peak_bytes_in_use" in s), default=None)


def process_peak_rss() -> int:
    """The most bytes of host memory that this process has held."""
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Writer(Protocol):
    """Where the numbers of a run go: `write` takes those of one step, nothing is written after `close`."""

    def write(self, step: int, values: Values) -> None: ...  # noqa: D102

    def close(self) -> None: ...  # noqa: D102


class Writers(Writer):
    """Several writers as one: each gets every value, in the order given."""

    def __init__(self, writers: Iterable[Writer]) -> None:
        self._writers = tuple(writers)

    def write(self, step: int, values: Values) -> None:
        """Passes the values on to every writer."""
        for writer in self._writers:
            writer.write(step, values)

    def close(self) -> None:
        """Closes every writer, also where closing one of them fails."""
        with contextlib.ExitStack() as stack:
            for writer in reversed(self._writers):
                stack.callback(writer.close)


class JsonLines(Writer):
    """One JSON object a line, `step` first; each line is handed to the system at once.

    A killed run loses at most the line it was writing, and such a line is dropped when the file is opened again.
    JSON has no NaN: an infinite loss is `{"step": 7, "loss": null, "non_finite": {"loss": "inf"}}`.

    Args:
        path: The file. Its folder is made where it is missing.
        keep_through: The step of the checkpoint that a run goes on from: lines of later steps are dropped, in one
            atomic replacement, so that the curve joins. With None all are kept.
    """

    def __init__(self, path: str | os.PathLike[str], keep_through: int | None = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            rest = path.with_name(f"{path.name}.tmp")
            with rest.open("w", encoding="utf-8") as file:
                for record in read_json_lines(path):
                    if keep_through is None or record["step"] <= keep_through:
                        file.write(json.dumps(record, ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
            rest.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Values) -> None:
        """Appends one line."""
        record: dict[str, Any] = {"step": int(step)}
        record |= {n: v if isinstance(v, int | str | None) else float(v) for n, v in values.items()}
        bad = {n: str(v) for n, v in record.items() if isinstance(v, float) and not math.isfinite(v)}
        if bad:
            record |= {**dict.fromkeys(bad), "non_finite": bad}
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_json_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a file of `JsonLines`, without lines that a kill has cut."""
    records = []
    for line in Path(path).read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError):  # of JSON and of UTF-8
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
    return records


COLUMNS: Mapping[str, Callable[[Any], str]] = {
    "loss": lambda x: f"loss {x:7.4f}",
    "val_loss": lambda x: f"val loss {x:7.4f}",
    "gradient_norm": lambda x: f"grad norm {x:<8.3g}",
    "dropped": lambda x: f"dropped {x:5.1%}",
    "learning_rate": lambda x: f"lr {x:.2e}",
    "tokens_per_s": lambda x: f"{human_count(x):>5} tokens/s",
    "mfu": lambda x: f"MFU {x:5.1%}",
    "step_s": lambda x: f"{human_duration(x):>7}/step",
}
"""What the console shows of each value, in this order; values with other names are for the other writers."""


class Console(Writer):
    """What a person sees: a progress bar on a terminal, one line per logged step elsewhere.

    Args:
        total_steps: The last step of the run.
        stream: Where to print; standard output where None.
        interactive: Whether to draw a bar; where None, whether `stream` is a terminal.
        columns: What is shown; add a value with `COLUMNS | {"accuracy": "accuracy {:.3f}".format}`.

    Example:
        >>> console = Console(total_steps=200, interactive=False)
        >>> console.write(10, {"loss": 5.4321, "learning_rate": 3e-4, "step_s": 0.432})
        step  10/200   loss  5.4321   lr 3.00e-04    432 ms/step      1:22 left
    """

    def __init__(
        self,
        total_steps: int,
        stream: TextIO | None = None,
        interactive: bool | None = None,
        columns: Mapping[str, Callable[[Any], str]] = COLUMNS,
    ) -> None:
        self._total, self._columns = total_steps, columns
        self._stream = sys.stdout if stream is None else stream
        self.say = functools.partial(print, file=self._stream, flush=True)
        self._live: Live | None = None
        self._shown: Values = {}
        if self._stream.isatty() if interactive is None else interactive:
            terminal = rich.console.Console(file=self._stream, force_terminal=True)
            # Drawn only when there is something new: a thread that redraws would take time from a busy host.
            self._live = Live(console=terminal, auto_refresh=False)
            self._live.start()

    def write(self, step: int, values: Values) -> None:
        """Shows one step, and from its `step_s` how long the rest will take."""
        if self._live:  # an evaluation adds to what is shown, it does not replace it
            values = self._shown = {**self._shown, **values}
        cells = [show(values[name]) for name, show in self._columns.items() if values.get(name) is not None]
        seconds = values.get("step_s")
        left = "" if seconds is None else f"{human_duration((self._total - step) * float(seconds))} left"
        done = f"step {step:>{len(str(self._total))}}/{self._total}"
        if self._live:
            bar = ProgressBar(self._total, step, width=40)
            head = Columns([done, bar, f"{100 * step // self._total}%", left], padding=(0, 3))
            self._live.update(rich.console.Group(head, Text("   ".join(cells))), refresh=True)
        else:
            self.say("   ".join([done, *cells, *([f"{left:>12}"] if left else [])]))

    def summary(
        self,
        *,
        steps: int,
        seconds: float,
        tokens: int,
        loss: float | None = None,
        flops: Flops | None = None,
        mfu: float | None = None,
        memory: int | None = None,
    ) -> None:
        """Ends the bar and says in three lines how the run went; None is printed as "not reported".

        `seconds` and `tokens` are of the `steps` of this process, `loss` is the last one, `mfu` a part of 1 that was
        computed from `flops`, and `memory` the peak bytes of a device.
        """
        self.close()
        cells = [f"done: {steps:,} steps in {human_duration(seconds)}", f"{human_count(tokens)} tokens"]
        cells += [f"{human_count(tokens / seconds)} tokens/s"] if seconds > 0 else []
        last, used = (NOT_REPORTED if x is None else f"{x:{form}}" for x, form in ((loss, ".4f"), (mfu, ".1%")))
        peak = NOT_REPORTED if memory is None else human_bytes(memory)
        self.say("   ".join([*cells, f"loss {last}"]))
        self.say(f"MFU {used}: {flops.formula if flops else 'no FLOP count was given'}")
        self.say(f"peak memory: device {peak}, host process {human_bytes(process_peak_rss())}")

    def close(self) -> None:
        """Leaves the bar as it is and gives the terminal back."""
        if self._live:
            self._live.stop()


def human_count(n: float) -> str:
    """A count with three significant digits and a decimal unit.

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
    """A time with three significant digits, as a clock shows it from a minute on.

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
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"
