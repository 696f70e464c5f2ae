"""A server of Google Cloud Storage's JSON interface with conditional writes, which fake-gcs-server ignores.

As https://cloud.google.com/storage/docs/request-preconditions and .../json_api/v1/objects describe it:
`ifGenerationMatch=0` asks for an absent object, another number for that generation, and a request whose
condition does not hold is answered with 412, or with 304 if it only reads.
"""

import contextlib
import http.server
import itertools
import json
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any

from tests.object_stores import Server

_PAGE = 3
"""Names in one answer to a listing: a client must ask for the others."""


class _Objects:
    """Objects by name, each with its generation."""

    def __init__(self, ignores_conditions: bool) -> None:
        self.bucket = ""
        self.lock = threading.Lock()
        self.ignores_conditions = ignores_conditions
        self.found: dict[str, tuple[int, bytes]] = {}
        self._generations = itertools.count(1_700_000_000_000_001)

    def generation(self, name: str) -> int:
        """The generation of an object; 0 of none."""
        return self.found.get(name, (0, b""))[0]

    def holds(self, name: str, query: dict[str, str]) -> bool:
        """Whether the condition of a request holds."""
        wanted = query.get("ifGenerationMatch")
        return wanted is None or self.ignores_conditions or int(wanted) == self.generation(name)

    def put(self, name: str, data: bytes) -> int:
        generation = next(self._generations)
        self.found[name] = generation, data
        return generation


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one packet
    objects: _Objects

    def log_message(self, *arguments: object) -> None:
        pass

    @property
    def bucket(self) -> str:
        """Path of the bucket."""
        return f"/storage/v1/b/{self.objects.bucket}"

    def do_GET(self) -> None:
        path, query = self._parsed()
        if path.startswith(f"{self.bucket}/o/"):
            self._read(self._name(path), query)
        elif path == f"{self.bucket}/o":
            self._list(query)
        elif path == self.bucket:
            self._answer(200, b"{}")
        else:
            self._answer(404, b"no such bucket")

    def do_POST(self) -> None:
        path, query = self._parsed()
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if path != f"/upload{self.bucket}/o" or query.get("uploadType") != "media":
            self._answer(404, b"no such bucket")
            return
        name = query["name"]
        with self.objects.lock:
            if not self.objects.holds(name, query):
                self._answer(412, b"conditionNotMet")
                return
            generation = self.objects.put(name, data)
        about = {"kind": "storage#object", "name": name, "generation": str(generation)}
        self._answer(200, json.dumps(about).encode(), {"Content-Type": "application/json"})

    def do_DELETE(self) -> None:
        path, query = self._parsed()
        name = self._name(path)
        with self.objects.lock:
            if name not in self.objects.found:
                code = 404
            elif not self.objects.holds(name, query):
                code = 412
            else:
                del self.objects.found[name]
                code = 204
        self._answer(code, b"")

    def _name(self, path: str) -> str:
        """The name of an object in its path."""
        return urllib.parse.unquote(path.removeprefix(f"{self.bucket}/o/"))

    def _read(self, name: str, query: dict[str, str]) -> None:
        with self.objects.lock:
            generation, data = self.objects.found.get(name, (0, b""))
        if not generation:
            self._answer(404, b"No such object")
        elif query.get("ifGenerationNotMatch") == str(generation):
            self._answer(304, b"")
        elif query.get("ifGenerationMatch") not in (None, str(generation)):
            self._answer(412, b"conditionNotMet")
        else:
            self._send(data, {"x-goog-generation": str(generation)})

    def _send(self, data: bytes, headers: dict[str, str]) -> None:
        """Answer with the bytes of a `Range`, or with all."""
        wanted = self.headers.get("Range")
        if not wanted:
            self._answer(200, data, headers)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        begin, end = int(first), min(int(last or len(data)) + 1, len(data))
        if begin >= len(data):
            self._answer(416, b"", headers)
            return
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        self._answer(206, data[begin:end], headers)

    def _list(self, query: dict[str, str]) -> None:
        first = query.get("pageToken") or query.get("startOffset", "")
        with self.objects.lock:
            names = sorted(self.objects.found)
        found = []
        for name in names:
            is_before_end = not query.get("endOffset") or name < query["endOffset"]
            if name >= first and is_before_end and name.startswith(query.get("prefix", "")):
                found.append(name)
        page: dict[str, Any] = {"items": [{"name": name, "size": "0"} for name in found[:_PAGE]]}
        if len(found) > _PAGE:
            page["nextPageToken"] = found[_PAGE]
        self._answer(200, json.dumps(page).encode(), {"Content-Type": "application/json"})

    def _parsed(self) -> tuple[str, dict[str, str]]:
        url = urllib.parse.urlsplit(self.path)
        return url.path, dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))

    def _answer(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if code not in (204, 304):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if code not in (204, 304):
            self.wfile.write(body)


@contextlib.contextmanager
def google_storage(ignores_conditions: bool = False) -> Iterator[Server]:
    """A server with a bucket, in a thread; one that ignores conditions is the control.

    The bucket has a name of its own: TensorStore would reach one of a known name at its earlier server.
    """
    objects = _Objects(ignores_conditions)
    handler = type("Handler", (_Handler,), {"objects": objects})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    port = server.server_address[1]
    objects.bucket = f"google-{port}"
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield Server("gs", port, objects.bucket)
    finally:
        server.shutdown()
        server.server_close()
