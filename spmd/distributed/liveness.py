"""Watch over the other processes of a run: a lost one ends all, and is named.

JAX's coordination service counts a process as dead that sends no heartbeat, as while it compiles or
pins memory on a busy machine (jax#23599); so its limit is long. This watch is at the connections
with process 0, by the probes of TCP, which the kernel answers whatever the process does: they fail
if the process or its machine is gone. A process that is there and does nothing is the watchdog's.
"""

import atexit
import contextlib
import os
import selectors
import socket
import sys
import threading
from collections.abc import Callable, Iterator

from spmd.distributed.rendezvous import Meeting

_PROBES = 4
_LEAVING = b"leaving\n"
_GRACE = 30.0  # in which a process that fails finishes its part of a checkpoint


_AT_LOSS: list[Callable[[str], object]] = []


@contextlib.contextmanager
def call_at_loss(listener: Callable[[str], object]) -> Iterator[None]:
    """Call a function with the name of a process lost in the block, before this one ends."""
    _AT_LOSS.append(listener)
    try:
        yield
    finally:
        _AT_LOSS.remove(listener)


class Liveness:
    """Thread to end this process after the loss of another.

    Args:
        own: Number of this process.
        heartbeat: Seconds without an answer of a machine after which its processes are gone.
        exit_process: Called with the exit code.
    """

    def __init__(
        self,
        meeting: Meeting,
        own: int,
        heartbeat: int,
        exit_code: int,
        exit_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._meeting = meeting
        self._own = own
        self._grace = min(_GRACE, heartbeat)
        self._exit_code = exit_code
        self._exit = exit_process
        self._ended = threading.Event()
        for connection in meeting.connections.values():
            _probe(connection, heartbeat)

    def start(self) -> None:
        """Start to watch; the end of the interpreter is announced to the others."""
        atexit.register(self.leave)
        thread = threading.Thread(target=self._watch, name="spmd-liveness", daemon=True)
        thread.start()

    def leave(self) -> None:
        """Announce the regular end of this process to the others."""
        self._ended.set()
        self._send(_LEAVING)

    def _watch(self) -> None:
        """Wait until a process is gone, and end this one."""
        gone = self._wait()
        if not gone:
            return
        for listener in tuple(_AT_LOSS):
            listener(gone)
        # The others learn from process 0 which it was.
        self._send(f"{gone}\n".encode())
        if self._ended.wait(self._grace):
            return
        line = (
            f"spmd: process {self._own} of {len(self._meeting.reports)} stops: another process is "
            f"gone, {gone}. See its last output. Exit code {self._exit_code}.\n"
        )
        # in one piece: the others write theirs to the same log at this moment
        sys.stderr.write(line)
        sys.stderr.flush()
        self._exit(self._exit_code)

    def _wait(self) -> str:
        """Return the name of a lost process; empty after all have left."""
        with selectors.DefaultSelector() as selector:
            for process_id, connection in self._meeting.connections.items():
                connection.setblocking(False)
                selector.register(connection, selectors.EVENT_READ, process_id)
            while selector.get_map():
                for key, _ in selector.select():
                    said = _receive(key.fileobj)
                    if said == _LEAVING:
                        selector.unregister(key.fileobj)
                    elif said:
                        return said.decode(errors="replace").partition("\n")[0]
                    else:
                        return self._meeting.name(key.data)
        return ""

    def _send(self, line: bytes) -> None:
        for connection in self._meeting.connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(line)


def _receive(connection: object) -> bytes:
    """Return the message of a process; nothing if it is gone."""
    assert isinstance(connection, socket.socket)
    try:
        return connection.recv(4096)
    except OSError:
        return b""


def _probe(connection: socket.socket, seconds: int) -> None:
    """Let the kernel probe a silent connection, and end it after some seconds without an answer."""
    interval = max(seconds // (_PROBES + 1), 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPINTVL": interval,
        "TCP_KEEPCNT": _PROBES,
        "TCP_USER_TIMEOUT": 1000 * seconds,
    }
    # macOS names the first one otherwise, and has not the last.
    idle = getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", None))
    if idle is not None:
        connection.setsockopt(socket.IPPROTO_TCP, idle, interval)
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
