"""Difference of two compiled steps, from the JSON of `spmd plan --compile --json`.

Each has totals, which have limits, and parts by their cause, which explain a total. A larger figure
is worse. All are of one device and one step.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spmd.observe.metrics import human_duration
from spmd.tree import human_bytes

_MOST_PARTS = 8
_SMALLEST = 0.001
"""Least change of a part that is shown, as a share of the total before."""

_LINE = re.compile(r"(\.py):\d+")
_FOLDERS = re.compile(r"/\S*/(?=spmd/)")
_MEMORY = ("arguments", "temporaries")
_HOST_MEMORY = ("host_arguments", "host_temporaries")
PARTS = ("mesh", "precision", "compress", "xla", "memory", "collectives")
"""What every record of a compiled step has."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Most growth of each total, in percent."""

    memory: float = 3.0
    """Of the compiled step, on the device and on the host."""
    bytes: float = 3.0
    """On the network, of all collectives."""
    compute: float = 3.0
    """Cycles that the compiler estimates."""
    exposed: float = 3.0
    """Communication that nothing hides, of the predicted step."""
    time: float = 3.0
    """The predicted step."""
    compilation: float = 50.0
    """Processor time of the compiler; it depends on what else the machine does."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a total, by its cause, in two steps; 0 where a step lacks it."""

    name: str
    before: float
    after: float

    @property
    def change(self) -> float:
        """How much it grew."""
        return self.after - self.before


@dataclasses.dataclass(frozen=True)
class Total:
    """A total of two steps with its parts.

    Attributes:
        unit: `"bytes"` or `"seconds"`.
        limit: Percent by which it may grow.
        before: None where a step has no such figure, as programs for GPUs have no cycles.
        least: Growth that no limit forbids, such as that from nothing to next to nothing.
    """

    name: str
    unit: str
    limit: float
    before: float | None
    after: float | None
    parts: tuple[Part, ...] = ()
    least: float = 0.0

    @property
    def percent(self) -> float | None:
        """How much it grew; None where either is unknown, infinite from nothing."""
        if self.before is None or self.after is None:
            return None
        if self.before == self.after:
            return 0.0
        if not self.before:
            return float("inf")
        return 100 * (self.after / self.before - 1)

    @property
    def is_exceeded(self) -> bool:
        """Whether it grew by more than its limit, or is not known any more."""
        if self.before is None or self.after is None:
            return self.before is not None
        if self.after - self.before <= self.least:
            return False
        return self.percent is not None and self.percent > self.limit

    @property
    def changed_parts(self) -> list[Part]:
        """The changed parts, the largest change first; none of a total that is not known."""
        if self.percent is None:
            return []
        least = _SMALLEST * (self.before or self.after or 0)
        changed = [part for part in self.parts if abs(part.change) > least]
        return sorted(changed, key=lambda part: -abs(part.change))

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        percent = self.percent
        if percent == float("inf"):
            percent = None  # JSON has no infinity
        return {
            "name": self.name,
            "unit": self.unit,
            "before": self.before,
            "after": self.after,
            "percent": percent,
            "limit": self.limit,
            "exceeded": self.is_exceeded,
            "parts": [dataclasses.asdict(part) for part in self.changed_parts],
        }

    def lines(self) -> Iterator[str]:
        """Yield a line for the total, and one for each large change of a part."""
        said = ""
        if self.is_exceeded:
            said = f"  ABOVE ITS LIMIT of {self.limit:+g} %"
        yield f"{self._row(self.name, self.before, self.after)}{said}"
        for part in self.changed_parts[:_MOST_PARTS]:
            yield self._row(f"  {part.name}", part.before, part.after)
        more = len(self.changed_parts) - _MOST_PARTS
        if more > 0:
            yield f"  … and {more} more"

    def _row(self, name: str, before: float | None, after: float | None) -> str:
        grown = ""
        if before == after:
            grown = "same"
        elif before and after is not None:
            grown = f"{100 * (after / before - 1):+.1f} %"
        figures = f"{self._text(before):>12}{self._text(after):>12}{grown:>10}"
        return f"{figures}  {name}"

    def _text(self, value: float | None) -> str:
        if value is None:
            return "not known"
        if self.unit == "bytes":
            return human_bytes(round(value))
        return human_duration(value)


@dataclasses.dataclass(frozen=True)
class Difference:
    """Difference of two compiled steps.

    Attributes:
        settings: Name of a setting or a version → its value before and after, where they differ.
    """

    settings: Mapping[str, tuple[Any, Any]]
    totals: Sequence[Total]

    @property
    def is_exceeded(self) -> bool:
        """Whether a total grew by more than its limit."""
        return any(total.is_exceeded for total in self.totals)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "settings": {name: list(pair) for name, pair in self.settings.items()},
            "totals": [total.to_json() for total in self.totals],
            "exceeded": self.is_exceeded,
        }

    def __str__(self) -> str:
        lines = []
        for name, (before, after) in self.settings.items():
            lines.append(f"{name}: {_said(before)} → {_said(after)}")
        if lines:
            lines.append("")
        lines.append(f"{'before':>12}{'after':>12}{'change':>10}")
        for total in self.totals:
            lines += total.lines()
        return "\n".join(lines)


def _said(value: Any) -> str:
    if value in (None, "", [], {}):
        return "none"
    return str(value)


_SETTINGS = (
    "topology",
    "devices",
    "parameters",
    "zero",
    "remat",
    "quantize",
    "attention",
    "pipeline",
    "experts",
    "exchange",
)


def compare_compiled(
    before: Mapping[str, Any], after: Mapping[str, Any], limits: Limits
) -> Difference:
    """Return the difference of two records of `spmd plan --compile --json`."""
    memory = _Both(before, after, lambda record: record["memory"]["compiled"] or {})
    compute = _Both(before, after, lambda record: record.get("compute") or {})
    time = _Both(before, after, lambda record: record.get("time") or {})
    compilation = _Both(before, after, lambda record: record.get("compilation") or {})
    held = memory.numbers(_MEMORY)
    totals = (
        memory.total("memory of a device", "bytes", limits.memory, "total", held),
        memory.sum_of("memory of the host, of a device", "bytes", limits.memory, _HOST_MEMORY),
        _traffic(before, after, limits.bytes),
        compute.total("compute", "seconds", limits.compute, "seconds", _cycles(before, after)),
        _exposed(before, after, limits.exposed),
        time.total("predicted step", "seconds", limits.time, "seconds", _spent(before, after)),
        compilation.total("compiler", "seconds", limits.compilation, "processor_seconds"),
    )
    return Difference(_settings(before, after), totals)


class _Both:
    """The same part of two records."""

    def __init__(self, before: Mapping[str, Any], after: Mapping[str, Any], part: Any) -> None:
        self.before = part(before)
        self.after = part(after)

    def numbers(self, names: Sequence[str]) -> tuple[Part, ...]:
        """Return the numbers of some names."""
        return tuple(
            Part(name.replace("_", " "), self.before.get(name, 0), self.after.get(name, 0))
            for name in names
        )

    def sum_of(self, name: str, unit: str, limit: float, keys: Sequence[str]) -> Total:
        """Return the total of some keys."""
        parts = self.numbers(keys)
        before, after = 0.0, 0.0
        for part in parts:
            before += part.before
            after += part.after
        return Total(name, unit, limit, before, after, parts)

    def total(
        self, name: str, unit: str, limit: float, key: str, parts: tuple[Part, ...] = ()
    ) -> Total:
        """Return the total of a key."""
        return Total(name, unit, limit, self.before.get(key), self.after.get(key), parts)


def _exposed_parts(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the exposed communication of a step, by kind, axes and cause."""
    exposed = collections.defaultdict[str, float](float)
    for each in (record.get("time") or {}).get("collectives", ()):
        cause = _without_lines(each["cause"])
        exposed[f"{each['kind']} over {each['over']}: {cause}"] += each["exposed"]
    return exposed


def _parts(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[Part, ...]:
    """Return the parts of two totals by name."""
    names = dict.fromkeys((*before, *after))
    return tuple(Part(name, before.get(name, 0), after.get(name, 0)) for name in names)


def _without_lines(cause: str) -> str:
    """Return a cause without line numbers and folders of this machine."""
    without_folders = _FOLDERS.sub("", cause)
    return _LINE.sub(r"\1", without_folders)


def _traffic(before: Mapping[str, Any], after: Mapping[str, Any], limit: float) -> Total:
    """Return the bytes of all collectives, by kind, axes and cause."""
    sums = []
    for record in (before, after):
        sent = collections.Counter[str]()
        for collective in record["collectives"]:
            over = "+".join(collective["axes"]) or "no axis"
            cause = _without_lines((collective["cause"] or {}).get("text", ""))
            sent[f"{collective['kind']} over {over}: {cause}"] += collective["bytes"]
        sums.append(sent)
    return Total(
        "on the network",
        "bytes",
        limit,
        sums[0].total(),
        sums[1].total(),
        _parts(sums[0], sums[1]),
    )


def _exposed(before: Mapping[str, Any], after: Mapping[str, Any], limit: float) -> Total:
    """Return the exposed communication of two steps."""
    one, other = _exposed_parts(before), _exposed_parts(after)
    steps = _predicted(before, "seconds"), _predicted(after, "seconds")
    return Total(
        "exposed communication",
        "seconds",
        limit,
        None if steps[0] is None else sum(one.values()),
        None if steps[1] is None else sum(other.values()),
        _parts(one, other),
        least=_SMALLEST * (steps[0] or 0.0),
    )


def _cycles(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the seconds of each kind of operation, from its share of all cycles."""
    parts = []
    for record in (before, after):
        compute = record.get("compute") or {}
        cycles: Mapping[str, float] = compute.get("cycles") or {}
        every = sum(cycles.values()) or 1
        seconds = compute.get("seconds") or 0
        parts.append({name: count / every * seconds for name, count in cycles.items()})
    return _parts(parts[0], parts[1])


def _spent(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the parts of the predicted step."""
    return _parts(_predicted(before, "spent") or {}, _predicted(after, "spent") or {})


def _predicted(record: Mapping[str, Any], name: str) -> Any:
    """Return a figure of the predicted step; None without one."""
    time = record.get("time") or {}
    return time.get(name)


def _settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return differing settings and versions."""
    found = []
    for record in (before, after):
        values = {name: record.get(name) for name in _SETTINGS}
        for group in ("mesh", "slices", "precision", "compress"):
            for name, value in (record.get(group) or {}).items():
                values[f"{group}.{name}"] = value
        for flag in record["xla"]["flags"]:
            values[flag["name"]] = flag["value"]
        values |= record.get("versions", {})
        found.append(values)
    one, other = found
    differing = {}
    for name in dict.fromkeys((*one, *other)):
        pair = one.get(name), other.get(name)
        if pair[0] != pair[1]:
            differing[name] = pair
    return differing
