"""Copies of the state of each process on another host, for the loss of a host.

Each process sends its newest copy to a process on another host, which keeps it in the memory of its
own supervisor. After the loss of a host, the process in its place fetches its shards from there.

The processes exchange addresses and a token through JAX, and then send over connections of their
own, from threads. Nothing but bytes and JSON is read, and only with the token of this start.
"""

import contextlib
import dataclasses
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax

from spmd.checkpoint.memory import MemoryStore, Saved
from spmd.distributed.hosts import gather_json
from spmd.run.run_config import MemoryPeer

_LONGEST_LINE = 1 << 16
_RECORD_BYTES = 64 << 20
_SECONDS = 60.0
"""Limit of the silence of a connection, after which a copy is given up."""


class _SendError(OSError):
    """A peer has answered something else than was agreed."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """Process as the others see it: where it listens, its machine and the bytes of its state."""

    host: str
    port: int
    machine: str
    nbytes: int


def choose_shift(machines: Sequence[str], peer: MemoryPeer) -> int:
    """Return the number of processes from each one to the one with its copy; 0 for no copies.

    Args:
        machines: Machine of each process.
        peer: hosts: the other one must be on another machine, for every process.

    Example:
        >>> choose_shift(["a", "a", "b", "b"], "hosts"), choose_shift(["a", "a"], "hosts")
        (2, 0)
    """
    count = len(machines)
    if peer == "never" or count == 1:
        return 0
    if peer == "always":
        return 1
    for shift in range(1, count):
        shifted = [*machines[shift:], *machines[:shift]]
        if all(own != other for own, other in zip(machines, shifted, strict=True)):
            return shift
    return 0


class PeerCopies:
    """This process's part: sends its copies to one process, and keeps those of another.

    Args:
        peers: All processes, in order.
        shift: Number of processes from each to the one with its copy.
        token: Word that all processes of this start know.
        kept: Copies of the other process.
    """

    def __init__(
        self,
        listener: socket.socket,
        peers: Sequence[Peer],
        shift: int,
        token: str,
        own: int,
        kept: MemoryStore,
    ) -> None:
        self._peers = peers
        self._shift = shift
        self._token = token
        self._own = own
        self._kept = kept
        self._lock = threading.Lock()
        self._listener = listener
        self._connection: socket.socket | None = None
        self._sending: threading.Thread | None = None
        self.seconds: list[float] = []
        threading.Thread(target=self._serve, name="spmd-peers", daemon=True).start()

    @classmethod
    def connect(
        cls, address: str, machine: str, nbytes: int, peer: MemoryPeer, kept: MemoryStore
    ) -> Self | None:
        """Return this process's part; None if no copies are sent. Every process makes this call.

        Args:
            address: Own address for the others.
            machine: Name of this machine.
            nbytes: Bytes of the state of this process.
        """
        family = socket.AF_INET
        if ":" in address:
            family = socket.AF_INET6
        bound = address
        if not _is_numeric(address):
            bound = ""
        listener = socket.create_server((bound, 0), family=family, backlog=16)
        port = listener.getsockname()[1]
        rows = gather_json([address, port, machine, nbytes, secrets.token_hex(16)])
        peers = [Peer(*row[:4]) for row in rows]
        shift = choose_shift([each.machine for each in peers], peer)
        if not shift:
            listener.close()
            return None
        return cls(listener, peers, shift, rows[0][4], jax.process_index(), kept)

    @property
    def target(self) -> int:
        """Receiver of this process's copies."""
        return (self._own + self._shift) % len(self._peers)

    @property
    def source(self) -> int:
        """Sender of the copies in this process's memory."""
        return (self._own - self._shift) % len(self._peers)

    @property
    def source_bytes(self) -> int:
        """Bytes of the state of the sender."""
        return self._peers[self.source].nbytes

    def send(self, store: MemoryStore) -> None:
        """Send the newest copy of a store, in a thread; the copy before must have been sent."""
        self._sending = threading.Thread(
            target=self._send, args=(store,), name="spmd-send", daemon=True
        )
        self._sending.start()

    def wait(self) -> None:
        """Wait until the last copy was sent, or given up."""
        if self._sending is not None:
            self._sending.join()
            self._sending = None

    def fetch(self, step: int, generation: int, store: MemoryStore) -> bool:
        """Fetch the copy of this process's state from its receiver; return false after an error."""
        request = {"kind": "fetch", "step": step, "generation": generation, "process": self._own}
        with contextlib.suppress(OSError, ValueError), self._open(self.target) as connection:
            _send_line(connection, {**request, "token": self._token})
            return self._receive(connection, _read_line(connection), store, self._own)
        return False

    def _send(self, store: MemoryStore) -> None:
        """Send the newest copy; after an error, the next copy is sent over a new connection."""
        began = time.perf_counter()
        store.wait()
        saved = store.newest()
        if saved is None:
            return
        try:
            if self._connection is None:
                self._connection = self._open(self.target)
            self._send_copy(self._connection, store, saved, self._token)
            if _read_line(self._connection) != {"kept": saved.step}:
                raise _SendError
        except (OSError, ValueError):
            if self._connection is not None:
                self._connection.close()
            self._connection = None
            return
        self.seconds.append(time.perf_counter() - began)

    def _open(self, process: int) -> socket.socket:
        peer = self._peers[process]
        return socket.create_connection((peer.host, peer.port), _SECONDS)

    def _send_copy(
        self, connection: socket.socket, store: MemoryStore, saved: Saved, token: str
    ) -> None:
        content = store.bytes_of(saved)
        if content is None:
            raise _SendError
        record, data = content
        head = {
            "token": token,
            "kind": "copy",
            "step": saved.step,
            "generation": saved.generation,
            "process": saved.process,
            "fingerprint": saved.fingerprint.hex(),
            "record": len(record),
            "bytes": len(data),
        }
        _send_line(connection, head)
        connection.sendall(record)
        connection.sendall(data.data)

    def _serve(self) -> None:
        """Accept connections, each with a thread of its own."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.settimeout(_SECONDS)
            arguments = (connection,)
            threading.Thread(
                target=self._answer, args=arguments, name="spmd-peer", daemon=True
            ).start()

    def _answer(self, connection: socket.socket) -> None:
        """Keep the copies of a connection, or send the requested one."""
        with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            connection.settimeout(None)  # from one copy to the next
            while True:
                head = _read_line(connection)
                if not hmac.compare_digest(str(head["token"]), self._token):
                    return
                if head["kind"] == "fetch":
                    self._send_kept(connection, head)
                    return
                with self._lock:
                    if not self._receive(connection, head, self._kept, self.source):
                        return
                _send_line(connection, {"kept": head["step"]})

    def _send_kept(self, connection: socket.socket, head: Mapping[str, Any]) -> None:
        wanted = head["step"], head["generation"], head["process"]
        with self._lock:
            for saved in self._kept.saved():
                if (saved.step, saved.generation, saved.process) == wanted:
                    self._send_copy(connection, self._kept, saved, self._token)

    def _receive(
        self,
        connection: socket.socket,
        head: Mapping[str, Any],
        store: MemoryStore,
        process: int,
    ) -> bool:
        """Receive a copy of a process into a store; return false if it is another one."""
        numbers = [int(head[name]) for name in ("step", "generation", "process", "bytes", "record")]
        step, generation, sender, nbytes, record_bytes = numbers
        if sender != process or nbytes != self._peers[process].nbytes:
            return False
        if not 0 <= record_bytes <= _RECORD_BYTES:
            return False
        record = bytearray(record_bytes)
        _receive_into(connection, memoryview(record))
        copy = Saved(0, step, generation, process, bytes.fromhex(head["fingerprint"]))
        target = store.put(copy, bytes(record), nbytes)
        _receive_into(connection, target.data)
        store.seal()
        return True


def _is_numeric(address: str) -> bool:
    try:
        socket.getaddrinfo(address, None, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        return False
    return True


def _send_line(connection: socket.socket, value: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(value).encode() + b"\n")


def _read_line(connection: socket.socket) -> dict[str, Any]:
    """Return the object of a line, read byte by byte, as bytes follow it."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(line) > _LONGEST_LINE:
            raise _SendError
        line += byte
    value = json.loads(line)
    if not isinstance(value, dict):
        raise _SendError
    return value


def _receive_into(connection: socket.socket, target: memoryview) -> None:
    while len(target):
        count = connection.recv_into(target)
        if not count:
            raise _SendError
        target = target[count:]
