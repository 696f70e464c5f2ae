"""Predicted time of a step, with its range, and its timeline as a file for trace viewers."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spmd.analysis.topology import Topology
from spmd.chips import Hardware
from spmd.observe.metrics import human_duration
from spmd.step_time.closed_form import Workload
from spmd.step_time.roofline import Roofline
from spmd.step_time.timeline import Span
from spmd.tree import human_bytes

_SHOWN = 0.0005
"""Smallest share of a step that has a line of its own."""

_MOST_CAUSES = 12
_WIDTH = 120


@dataclasses.dataclass(frozen=True)
class CollectiveTime:
    """Predicted time of the collectives of one cause, in one step.

    Attributes:
        seconds: Seconds in which data is moved.
        exposed: Seconds in which the device only waits, also for earlier collectives on the same
            network.
    """

    kind: str
    over: str
    cause: str
    seconds: float
    exposed: float

    @property
    def hidden(self) -> float:
        """Seconds of transfers beside compute, to a nanosecond."""
        return round(max(0.0, self.seconds - self.exposed), 9)


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Predicted time of one step.

    Attributes:
        method: `"closed forms"`, `"compiled program"` or `"roofline of the trace"`.
        work: Numbers of a transformer's step; None for another model, without a utilization.
        spent: Activity of a device → seconds; they add up to the step.
        spread: Relative half-width of the range with nine of ten steps, by the backtest of the
            chip's rows; None if it is not known.
        collectives: Of a compiled program, the longest first.
        roofline: Of closed forms.
        memory: Bytes of a device, as compiled.
        uncounted: Loops and branches of a program whose length or share is unknown.
        bounds: Shortest and longest step, in place of those by `spread`.
        examples: Examples of a batch.
    """

    topology: Topology
    method: str
    work: Workload | None
    hardware: Hardware
    spent: Mapping[str, float]
    spread: float | None
    collectives: Sequence[CollectiveTime] = ()
    roofline: Roofline | None = None
    memory: int | None = None
    uncounted: tuple[str, ...] = ()
    bounds: tuple[float, float] | None = None
    examples: int = 0

    @property
    def seconds(self) -> float:
        """Length of the step."""
        return sum(self.spent.values())

    @property
    def fits(self) -> bool | None:
        """Whether the compiled step fits; None if it was not compiled."""
        limit = self.topology.memory
        if self.memory is None or limit is None:
            return None
        return self.memory <= limit

    @property
    def range(self) -> tuple[float, float] | None:
        """Shortest and longest step of the range; None if it is not known."""
        if self.bounds:
            return self.bounds
        if self.spread is None:
            return None
        return self.seconds / (1 + self.spread), self.seconds * (1 + self.spread)

    @property
    def speed(self) -> tuple[float, str]:
        """Tokens, or examples of a model without tokens, in a second on one chip; and the word."""
        if self.work is None:
            return self.examples / self.seconds / self.topology.chips, "examples"
        return self.work.tokens / self.seconds / self.topology.chips, "tokens"

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: `Workload.model_flops` as a share of all devices' peak.

        None for a model whose FLOPs are not known.
        """
        if self.work is None:
            return None
        return self.work.model_flops / (self.seconds * self.hardware.peak * self.topology.devices)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilization: MFU with recomputation."""
        if self.work is None or self.mfu is None:
            return None
        return self.mfu * self.work.hardware_flops / self.work.model_flops

    @property
    def formula(self) -> str:
        """Formula of the MFU, on two lines; empty without it."""
        work = self.work
        if work is None:
            return ""
        peak = self.hardware.peak / 1e12
        params = work.matmul_params or work.layer_params + work.head_params
        sizes = (
            f"N={params / 1e9:.4g}B matmul parameters, L={work.layers}, A={work.attention_width}"
        )
        return (
            f"(6·N + 12·L·A·K) · tokens/s of a device / {peak:.4g} TFLOP/s\n"
            f"      {sizes}, K={work.keys:g} keys on average"
        )

    def __str__(self) -> str:
        lines = list(self._summary())
        for name, seconds in sorted(self.spent.items(), key=lambda item: -item[1]):
            if seconds >= _SHOWN * self.seconds:
                share = seconds / self.seconds
                lines.append(f"{human_duration(seconds):>10}  {share:6.1%}  {name}")
        if self.collectives:
            lines.append(f"\n{'exposed':>10}{'hidden':>12}  {'kind':20}{'over':12}cause")
        for collective in self.collectives[:_MOST_CAUSES]:
            lines.append(_collective_line(collective))
        if self.uncounted:
            names = ", ".join(self.uncounted)
            lines.append(f"of unknown length or share, counted once or in equal parts: {names}")
        if self.fits is False:
            held = human_bytes(self.memory or 0)
            limit = human_bytes(self.topology.memory or 0)
            lines.append(f"DOES NOT FIT: {held} of {limit} on each device")
        if self.roofline:
            lines += self.roofline.lines()
        return "\n".join(lines)

    @property
    def summary(self) -> str:
        """The time of the step with its range, on one line."""
        length = human_duration(self.seconds)
        return f"step on {self.topology}: {length}, {self.range_text} ({self.method})"

    @property
    def range_text(self) -> str:
        """Text on the range."""
        if self.range is None and self.method == "compiled program":
            return "range not known: rates of compiled programs are of dense steps"
        if self.range is None:
            kind = "such steps"
            if self.work is not None:
                kind = f"steps with {self.work.kind}"
            return f"range not known: no {kind} are published for {self.topology.kind}"
        shortest, longest = self.range
        return f"from {human_duration(shortest)} to {human_duration(longest)}"

    def _summary(self) -> Iterator[str]:
        """Yield the time of the step with its range, and the utilization."""
        yield self.summary
        if self.topology.chip.calibration:
            yield self.topology.chip.calibration
        count, unit = self.speed
        speed = f"{count:,.0f} {unit}/s on each chip"
        if self.mfu is None:
            yield speed
            return
        yield f"{speed}; MFU {self.mfu:.1%}, HFU {self.hfu:.1%}"
        yield f"MFU = {self.formula}"

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values, in seconds."""
        count, unit = self.speed
        return {
            "method": self.method,
            "calibrated": not self.topology.chip.rates_of,
            "seconds": self.seconds,
            "range": self.range and list(self.range),
            f"{unit}_per_second_per_chip": count,
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


def _collective_line(collective: CollectiveTime) -> str:
    """Return the line of one cause, at most as wide as the table."""
    exposed = human_duration(collective.exposed)
    hidden = human_duration(collective.hidden)
    line = f"{exposed:>10}{hidden:>12}  {collective.kind:20}{collective.over:12}{collective.cause}"
    if len(line) > _WIDTH:
        line = f"{line[: _WIDTH - 1]}…"
    return line


def chrome_trace(spans: Sequence[Span], what: str) -> str:
    """Return spans in Chrome's trace format, as opened by Perfetto and chrome://tracing."""
    lanes = list(dict.fromkeys(("device", "network", *(span.lane for span in spans))))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": what}}
    ]
    for number, lane in enumerate(lanes):
        events.append(_lane_event(number, lane))
    for span in spans:
        events.append(_span_event(span, lanes.index(span.lane)))
    return json.dumps({"traceEvents": events})


def _lane_event(number: int, lane: str) -> dict[str, Any]:
    """Return the metadata event with the name of a lane."""
    return {
        "ph": "M",
        "name": "thread_name",
        "pid": 1,
        "tid": number,
        "args": {"name": lane},
    }


def _span_event(span: Span, lane: int) -> dict[str, Any]:
    """Return the event of a span, in microseconds."""
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.what,
        "pid": 1,
        "tid": lane,
        "ts": round(span.start * 1e6, 3),
        "dur": round(span.seconds * 1e6, 3),
    }
