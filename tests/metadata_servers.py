"""Metadata servers on loopback that answer as Compute Engine's does, also once a value changes."""

import threading
import time
import urllib.parse
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

PREFIX = "/computeMetadata/v1/instance/"


class MetadataStub:
    """Server of one machine; `environment` says to its processes where it is."""

    def __init__(self, values: Mapping[str, str] = {}, status: int = 200) -> None:
        self.values = dict(values)
        self.status = status
        self.asked: list[str] = []
        self._changed = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        return {"GCE_METADATA_HOST": f"127.0.0.1:{self._server.server_address[1]}"}

    def set(self, key: str, value: str) -> None:
        """Change a value, and answer those that wait for it."""
        with self._changed:
            self.values[key] = value
            self._changed.notify_all()

    def answer(self, key: str, query: Mapping[str, str]) -> str | None:
        """The value of a key; with `wait_for_change`, once it is not that of the last tag."""
        self.asked.append(key)
        until = time.monotonic() + float(query.get("timeout_sec", 0))
        with self._changed:
            while "wait_for_change" in query and tag(self.values.get(key)) == query["last_etag"]:
                if not self._changed.wait(max(until - time.monotonic(), 0)):
                    break
            return self.values.get(key)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                address = urllib.parse.urlsplit(self.path)
                query = dict(urllib.parse.parse_qsl(address.query))
                value = None
                status = stub.status
                if address.path.startswith(PREFIX) and self.headers["Metadata-Flavor"] == "Google":
                    value = stub.answer(address.path.removeprefix(PREFIX), query)
                if value is None and status == 200:
                    status = 404
                self.send_response(status)
                self.send_header("ETag", tag(value))
                self.end_headers()
                self.wfile.write((value or "").encode())

            def log_message(self, *arguments: Any) -> None:
                pass

        return Handler


def tag(value: str | None) -> str:
    return f"{hash(value) & 0xFFFFFFFF:x}"


def workers(
    hosts: list[str], slices: Mapping[str, str] | None = None, old_form: bool = True
) -> list[dict[str, str]]:
    """What the metadata server of each host of a TPU slice says."""
    endpoints = ",".join(hosts)
    if old_form:
        endpoints = ",".join(f"unknown:unknown:{host}" for host in hosts)
    said = []
    for number in range(len(hosts)):
        values = {
            "attributes/agent-worker-number": str(number),
            "attributes/worker-network-endpoints": endpoints,
            "attributes/tpu-env": "ACCELERATOR_TYPE: 'v5litepod-16'\nCHIPS_PER_HOST_BOUNDS: '2,2,1'\n",
            "preempted": "FALSE",
            "maintenance-event": "NONE",
        }
        for name, value in (slices or {}).items():
            values["attributes/tpu-env"] += f"{name}: '{value}'\n"
        said.append(values)
    return said
