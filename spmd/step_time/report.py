"""Predicted time of a step, with its range, and its timeline as a file for trace viewers."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd.analysis.topology import Topology
from spmd.errors import ConfigError, Problem
from spmd.step_time.closed_form import Workload
from spmd.step_time.hardware import Hardware
from spmd.step_time.timeline import Span

_SHOWN = 0.0005
"""Smallest share of a step that has a line of its own."""


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Predicted time of one step.

    Attributes:
        method: `"closed forms"` or `"compiled program"`.
        spent: What a device does → seconds; they add up to the step.
        spread: Half of the range that holds nine steps of ten, relative, by the backtest of the chip's rows.
    """

    topology: Topology
    method: str
    work: Workload
    hardware: Hardware
    spent: Mapping[str, float]
    spread: float

    @property
    def seconds(self) -> float:
        """Length of the step."""
        return sum(self.spent.values())

    @property
    def range(self) -> tuple[float, float]:
        """Shortest and longest step of the range."""
        return self.seconds / (1 + self.spread), self.seconds * (1 + self.spread)

    @property
    def tokens_per_second(self) -> float:
        """Tokens in a second on one chip."""
        return self.work.tokens / self.seconds / self.topology.chips

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: `Workload.model_flops` of the peak of all devices."""
        return self.work.model_flops / (self.seconds * self.hardware.peak * self.topology.devices)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization: with what is recomputed."""
        return self.mfu * self.work.hardware_flops / self.work.model_flops

    @property
    def formula(self) -> str:
        """Formula of the MFU."""
        work, peak = self.work, self.hardware.peak
        params = work.layer_params + work.head_params
        return (
            f"(6·N + 12·L·A·K)·tokens/s / {peak / 1e12:.4g} TFLOP/s, N={params / 1e9:.4g}B matmul parameters, "
            f"L={work.layers}, A={work.attention_width}, K={work.keys:g} keys on average; no recompute"
        )

    def __str__(self) -> str:
        low, high = self.range
        lines = [
            f"step on {self.topology}: {_time(self.seconds)}, from {_time(low)} to {_time(high)} ({self.method})",
            f"{self.tokens_per_second:,.4g} tokens/s on each chip; MFU {self.mfu:.1%}, HFU {self.hfu:.1%}",
            f"MFU = {self.formula}",
        ]
        for name, seconds in sorted(self.spent.items(), key=lambda item: -item[1]):
            if seconds >= _SHOWN * self.seconds:
                lines.append(f"{_time(seconds):>10}  {seconds / self.seconds:6.1%}  {name}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values, in seconds."""
        low, high = self.range
        return {
            "method": self.method,
            "seconds": self.seconds,
            "range": [low, high],
            "tokens_per_second_per_chip": self.tokens_per_second,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "mfu_formula": self.formula,
            "spent": dict(self.spent),
        }


def write_trace(file: str, spans: Sequence[Span], what: str) -> None:
    """Write spans in Chrome's trace format, which Perfetto and chrome://tracing open.

    Raises:
        ConfigError: The file cannot be written.
    """
    lanes = list(dict.fromkeys(span.lane for span in spans))
    named = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": lane}}
        for number, lane in enumerate(lanes)
    ]
    events = [
        {
            **{"ph": "X", "name": span.name, "cat": span.lane, "pid": 1, "tid": lanes.index(span.lane)},
            **{"ts": round(span.start * 1e6, 3), "dur": round(span.seconds * 1e6, 3)},
        }
        for span in spans
    ]
    process = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": what}}
    try:
        Path(file).write_text(json.dumps({"traceEvents": [process, *named, *events]}), encoding="utf-8")
    except OSError as error:
        problem = Problem(
            "trace", f"cannot be written: {error.strerror}: {file}", fix="--trace FILE in a folder that exists"
        )
        raise ConfigError("There is no trace:", [problem]) from None


def _time(seconds: float) -> str:
    """Return a duration with four digits in the largest unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.{max(0, 3 - int(math.log10(seconds / size)))}f} {unit}"
    return f"{seconds * 1e6:.3g} µs"
