"""Predicted time of a step, with its range, and its timeline as a file for trace viewers."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd.analysis.topology import Topology
from spmd.errors import ConfigError, Problem
from spmd.observe.metrics import human_duration
from spmd.step_time.closed_form import Workload
from spmd.step_time.hardware import Hardware
from spmd.step_time.roofline import Roofline
from spmd.step_time.timeline import Span
from spmd.tree import human_bytes

_SHOWN = 0.0005
"""Smallest share of a step that has a line of its own."""
_MOST_CAUSES, _WIDTH = 12, 120


@dataclasses.dataclass(frozen=True)
class CollectiveTime:
    """Predicted time of the collectives of one cause, in one step.

    Attributes:
        seconds: In which data is moved.
        exposed: In which the device only waits, also for other collectives that have the network before it.
    """

    kind: str
    over: str
    cause: str
    seconds: float
    exposed: float

    @property
    def hidden(self) -> float:
        """Seconds in which data is moved while something is computed, to a nanosecond."""
        return round(max(0.0, self.seconds - self.exposed), 9)


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Predicted time of one step.

    Attributes:
        method: `"closed forms"` or `"compiled program"`.
        spent: What a device does → seconds; they add up to the step.
        spread: Half of the range that holds nine steps of ten, relative, by the backtest of the chip's rows.
        collectives: Of a compiled program, the longest first.
        roofline: Of closed forms.
        memory: Bytes of a device, as compiled.
        uncounted: Loops and branches of a program whose length or share is unknown.
    """

    topology: Topology
    method: str
    work: Workload
    hardware: Hardware
    spent: Mapping[str, float]
    spread: float
    collectives: Sequence[CollectiveTime] = ()
    roofline: Roofline | None = None
    memory: int | None = None
    uncounted: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Length of the step."""
        return sum(self.spent.values())

    @property
    def fits(self) -> bool | None:
        """Whether the compiled step fits; None if it was not compiled."""
        limit = self.topology.memory
        return None if self.memory is None or limit is None else self.memory <= limit

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
        """Formula of the MFU, on two lines."""
        work, peak = self.work, self.hardware.peak
        params = work.matmul_params or work.layer_params + work.head_params
        return (
            f"(6·N + 12·L·A·K) · tokens/s of a device / {peak / 1e12:.4g} TFLOP/s\n"
            f"      N={params / 1e9:.4g}B matmul parameters, L={work.layers}, A={work.attention_width}, "
            f"K={work.keys:g} keys on average"
        )

    def __str__(self) -> str:
        length, low, high = map(human_duration, (self.seconds, *self.range))
        lines = [
            f"step on {self.topology}: {length}, from {low} to {high} ({self.method})",
            f"{self.tokens_per_second:,.0f} tokens/s on each chip; MFU {self.mfu:.1%}, HFU {self.hfu:.1%}",
            f"MFU = {self.formula}",
        ]
        for name, seconds in sorted(self.spent.items(), key=lambda item: -item[1]):
            if seconds >= _SHOWN * self.seconds:
                lines.append(f"{human_duration(seconds):>10}  {seconds / self.seconds:6.1%}  {name}")
        if self.collectives:
            lines.append(f"\n{'exposed':>10}{'hidden':>12}  {'kind':20}{'over':12}cause")
        for c in self.collectives[:_MOST_CAUSES]:
            line = f"{human_duration(c.exposed):>10}{human_duration(c.hidden):>12}  {c.kind:20}{c.over:12}{c.cause}"
            lines.append(line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…")
        if self.uncounted:
            lines.append(f"of unknown length or share, counted once or in equal parts: {', '.join(self.uncounted)}")
        if self.fits is False:
            held, limit = human_bytes(self.memory or 0), human_bytes(self.topology.memory or 0)
            lines.append(f"DOES NOT FIT: {held} of {limit} on each device")
        return "\n".join([*lines, *(self.roofline.lines() if self.roofline else ())])

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
            "mfu_formula": " ".join(self.formula.split()),
            "spent": dict(self.spent),
            "collectives": [dataclasses.asdict(collective) for collective in self.collectives],
            "memory": self.memory,
            "fits": self.fits,
            "uncounted": list(self.uncounted),
            "roofline": self.roofline and dataclasses.asdict(self.roofline),
        }


def write_trace(file: str, spans: Sequence[Span], what: str) -> None:
    """Write spans in Chrome's trace format, which Perfetto and chrome://tracing open.

    Raises:
        ConfigError: The file cannot be written.
    """
    lanes = list(dict.fromkeys(("device", "network", *(span.lane for span in spans))))
    named = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": lane}}
        for number, lane in enumerate(lanes)
    ]
    events = [
        {
            **{"ph": "X", "name": span.name, "cat": span.what, "pid": 1, "tid": lanes.index(span.lane)},
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
