"""Rendezvous of the processes of a run, before JAX connects them: all learn of all.

JAX's coordination service waits for all processes and names none of those that are missing. So each
process first reports to process 0, at the address where the coordination service listens
afterwards. When all have, each gets the reports of all. When some have not in time, or two claim
the same number, process 0 tells those that wait, and all end with the same error.

A report is a line of JSON; so is the answer. The connections stay open, for `Liveness`.
"""

import contextlib
import dataclasses
import json
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from spmd.distributed.launchers import ProcessGroup
from spmd.errors import Problem

_RETRY = 0.2
_CONNECT_SECONDS = 5.0
# Process 0 answers at its own deadline, which may be this much later than that of a process.
_MARGIN = 30.0
_LONGEST_REPORT = 65536
_LONGEST_ANSWER = 2**30
# Process 0 closes its socket and starts the coordination service there.
_HANDOVER = 0.1
_MOST_NAMED = 8


@dataclasses.dataclass(frozen=True)
class Report:
    """Process as it describes itself to the others.

    Attributes:
        host: Name of its host.
        machine: Identity of the running machine, the same for all processes on it.
        gpus: GPUs that it sees.
        variables: Names and values of variables to compare between processes.
    """

    process_id: int
    processes: int
    host: str
    machine: str
    gpus: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if type(self.process_id) is not int or not 0 <= self.process_id < self.processes:
            raise ValueError(f"process {self.process_id} of {self.processes}")
        if not isinstance(self.host, str):
            raise TypeError(f"host is {self.host!r}")


class RendezvousError(Exception):
    """Failed rendezvous; `problem` says why."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


@dataclasses.dataclass(frozen=True, eq=False)
class Meeting:
    """Reports of all processes, in order, and connections to them by number.

    Process 0 is connected to all others, and those to process 0.
    """

    reports: Sequence[Report]
    connections: Mapping[int, socket.socket]

    def name(self, process_id: int) -> str:
        """Return a process's number and host."""
        return f"process {process_id} on {self.reports[process_id].host}"


def report_to(
    address: tuple[str, int], own: Report, seconds: float, describe: Callable[[str], Problem]
) -> Meeting:
    """Report to process 0, and return the reports of all processes once all have reported.

    Args:
        describe: Return the problem of a reason, such as "Connection refused", after which the
            seconds have passed.

    Raises:
        RendezvousError: Process 0 was not there in time, or has sent the reason.
    """
    deadline = time.monotonic() + seconds
    reason = "no answer"
    while time.monotonic() < deadline:
        timeout = min(_CONNECT_SECONDS, max(deadline - time.monotonic(), _RETRY))
        try:
            connection = socket.create_connection(address, timeout)
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(_RETRY)
            continue
        try:
            connection.sendall(_line(dataclasses.asdict(own)))
            connection.settimeout(seconds + _MARGIN)
            reports = _read_answer(_read_line(connection))
        except RendezvousError:
            connection.close()
            raise
        except (OSError, ValueError):
            connection.close()
            reason = "the connection was closed, or another program answers"
            time.sleep(_RETRY)
            continue
        time.sleep(_HANDOVER)
        return Meeting(reports, {0: connection})
    raise RendezvousError(describe(reason))


def _read_line(connection: socket.socket) -> bytes:
    """Return the first line."""
    with connection.makefile("rb") as file:
        return file.readline(_LONGEST_ANSWER)


def _read_answer(line: bytes) -> list[Report]:
    """Return the reports; any other text is a ValueError."""
    answer = json.loads(line)
    if not isinstance(answer, dict) or not {"problem", "reports"} & answer.keys():
        raise ValueError(answer)
    if "problem" in answer:
        raise RendezvousError(Problem(*answer["problem"]))
    return [_report(each) for each in answer["reports"]]


def _report(values: Mapping[str, Any]) -> Report:
    variables = tuple((name, value) for name, value in values["variables"])
    return Report(**{**values, "gpus": tuple(values["gpus"]), "variables": variables})


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


class Rendezvous:
    """Process 0's part: collects reports at a listening socket, and closes it."""

    def __init__(self, listener: socket.socket, own: Report, group: ProcessGroup) -> None:
        self._listener = listener
        self._hosts = group.hosts
        self._count = group.processes or 1
        self._reports = {own.process_id: own}
        self._reporters: dict[int, socket.socket] = {}
        self._received: dict[socket.socket, bytes] = {}
        self._selector = selectors.DefaultSelector()

    def collect(self, seconds: float, describe: Callable[[str], Problem]) -> Meeting:
        """Return the reports of all processes, in order, and the connections to the others.

        Args:
            describe: Return the problem of missing processes, as `missing` names them.

        Raises:
            RendezvousError: Some did not report in time, or two reports contradict each other.
        """
        try:
            self._collect(time.monotonic() + seconds, describe)
        except RendezvousError as error:
            self._answer(self._received, {"problem": dataclasses.astuple(error.problem)})
            self._close(self._received)
            raise
        reports = [self._reports[number] for number in sorted(self._reports)]
        members = self._reporters.values()
        self._answer(members, {"reports": [dataclasses.asdict(report) for report in reports]})
        self._close([other for other in self._received if other not in members])
        return Meeting(reports, self._reporters)

    def _collect(self, deadline: float, describe: Callable[[str], Problem]) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        while len(self._reports) < self._count:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise RendezvousError(describe(self.missing()))
            for key, _ in self._selector.select(min(remaining, 1.0)):
                self._serve(key.fileobj)

    def missing(self) -> str:
        """Name the processes without a report, with their hosts if known."""
        numbers = [number for number in range(self._count) if number not in self._reports]
        names: list[str] = []
        for number in numbers:
            name = f"process {number}"
            if self._hosts:
                name += f" on {self._hosts[number]}"
            names.append(name)
        return _shortened(names)

    def _serve(self, ready: Any) -> None:
        """Accept a connection, or read from one."""
        if ready is self._listener:
            with contextlib.suppress(OSError):
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._received[connection] = b""
                self._selector.register(connection, selectors.EVENT_READ)
            return
        try:
            data = ready.recv(_LONGEST_REPORT)
        except OSError:
            data = b""
        if not data:
            self._drop(ready)
            return
        self._received[ready] += data
        received = self._received[ready]
        if received.endswith(b"\n"):
            self._add(ready, received)
        elif len(received) > _LONGEST_REPORT:
            self._drop(ready)

    def _drop(self, connection: socket.socket) -> None:
        """Forget a connection; its process is missing again."""
        for number, reporter in list(self._reporters.items()):
            if reporter is connection:
                del self._reporters[number]
                del self._reports[number]
        self._selector.unregister(connection)
        del self._received[connection]
        connection.close()

    def _add(self, connection: socket.socket, line: bytes) -> None:
        """Take a report; any other text, such as a port scanner's, is dropped."""
        try:
            report = _report(json.loads(line))
        except (ValueError, TypeError, KeyError, RecursionError):
            self._drop(connection)
            return
        self._check(report)
        self._reports[report.process_id] = report
        self._reporters[report.process_id] = connection

    def _check(self, report: Report) -> None:
        number = report.process_id
        first = self._reports[0]
        if report.processes != first.processes:
            what = f"process {number} on {report.host} was started as one of {report.processes}, "
            what += f"process 0 on {first.host} as one of {first.processes}"
            fix = "start all processes with the same command and launcher"
            raise RendezvousError(Problem("processes", what, fix=fix))
        if number in self._reports:
            other = self._reports[number]
            what = f"two processes are number {number}: on {other.host} and on {report.host}"
            fix = "stop the processes of an earlier start, and give each its own --process-id"
            raise RendezvousError(Problem("process_id", what, fix=fix))

    def _answer(self, connections: Iterable[socket.socket], answer: Any) -> None:
        """Send an answer to waiting processes."""
        line = _line(answer)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.settimeout(_CONNECT_SECONDS)
                connection.sendall(line)

    def _close(self, connections: Iterable[socket.socket]) -> None:
        """Stop listening, and close some connections."""
        self._selector.close()
        self._listener.close()
        for connection in connections:
            connection.close()


def _shortened(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others.

    Example:
        >>> _shortened(["process 1", "process 2"])
        'process 1, process 2'
    """
    text = ", ".join(names[:_MOST_NAMED])
    more = len(names) - _MOST_NAMED
    if more > 0:
        text += f" and {more} more"
    return text
