"""A diagnosis as text for a terminal."""

from collections.abc import Mapping, Sequence

from spmd.doctor.diagnosis import Diagnosis, Report
from spmd.doctor.timing import AxisTime, PairTime
from spmd.tree import human_bytes, with_noun


def format_diagnosis(found: Diagnosis) -> str:
    """Return all sections of a diagnosis, the verdict last."""
    first = found.reports[0]
    sections = [
        _title(found.reports),
        _facts(found, first),
        _devices(found),
        _collectives(found.axes, found.expected),
    ]
    if found.pairs:
        sections.append(_links(found.pairs, found.reports))
    sections.append(_verdict(found))
    return "\n\n".join(sections)


def _title(reports: Sequence[Report]) -> str:
    devices = 0
    hosts = set[str]()
    for report in reports:
        devices += len(report.devices)
        hosts.add(report.host)
    kind = reports[0].devices[0]
    counts = [
        f"{with_noun(devices, 'device')} of the kind {kind} ({reports[0].platform})",
        with_noun(len(reports), "process", "processes"),
        with_noun(len(hosts), "host"),
    ]
    return ", ".join(counts)


def _facts(found: Diagnosis, first: Report) -> str:
    """Return the report of process 0; the verdict names the others' differences."""
    shown = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "spmd")
    versions = {name: first.versions[name] for name in shown}
    versions["Python"] = first.versions["python"]
    seen = ""
    if found.folder:
        seen = f"{found.folder}, seen by all processes"
        if any(problem.where == "run folder" for problem in found.problems):
            seen = f"{found.folder}, not seen by all processes"
    rows = {
        "versions": _listed(versions, " "),
        "runtime": first.versions["runtime"].replace("\n", " "),
        "drivers": _listed(first.drivers, " ") or "none",
        "transport": ", ".join(first.transports) or "no network card",
        "variables": _listed(first.variables, "=") or "none that collectives read",
        "memory": found.memory,
        "/dev/shm": human_bytes(first.shared_memory),
        "cores": f"{first.cores} for this process",
        "run folder": seen,
    }
    lines = []
    for name, text in rows.items():
        if text:
            lines.append(f"{name:<12}{text}")
    return "\n".join(lines)


def _listed(values: Mapping[str, str], between: str) -> str:
    """Return names and values in one line."""
    return ", ".join(f"{name}{between}{value}" for name, value in values.items())


def _devices(found: Diagnosis) -> str:
    lines = ["milliseconds of a matrix product on each device alone"]
    for process, row in enumerate(found.products):
        times = " ".join(f"{seconds * 1e3:.2f}" for seconds in row)
        lines.append(f"  process {process:<4} {found.reports[process].host}  {times}")
    return "\n".join(lines)


def _collectives(axes: Sequence[AxisTime], expected: Sequence[float | None]) -> str:
    if not axes:
        return "no axis has more than one device: no collectives"
    rows = [("axis", "devices", "collective", "bytes", "ms", "GB/s", "expected ms")]
    for each, seconds in zip(axes, expected, strict=True):
        text = "unknown"
        if seconds is not None:
            text = f"{seconds * 1e3:.2f}"
        row = (
            each.axis,
            str(each.size),
            each.kind,
            human_bytes(each.payload),
            f"{each.seconds * 1e3:.2f}",
            f"{each.payload / each.seconds / 1e9:.2f}",
            text,
        )
        rows.append(row)
    return _table(rows)


def _links(pairs: Sequence[PairTime], reports: Sequence[Report]) -> str:
    rows = [("exchange of", "hosts", "bytes", "ms", "GB/s")]
    for pair in pairs:
        hosts = f"{reports[pair.first].host} {reports[pair.second].host}"
        row = (
            f"{pair.first} and {pair.second}",
            hosts,
            human_bytes(pair.payload),
            f"{pair.seconds * 1e3:.2f}",
            f"{pair.payload / pair.seconds / 1e9:.2f}",
        )
        rows.append(row)
    return _table(rows)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows in columns as wide as their longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _verdict(found: Diagnosis) -> str:
    if not found.problems:
        return "no problem found"
    title = f"{with_noun(len(found.problems), 'problem')}:"
    return "\n".join([title, *map(str, found.problems)])
