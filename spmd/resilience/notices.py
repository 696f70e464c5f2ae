"""Notices of preemption and maintenance that a cloud gives in its metadata server.

A virtual machine of Compute Engine is told there that it is about to be taken away; processes get
no signal, or only when the machine already shuts down. Two threads wait for a notice, and send this
process SIGTERM: `Preemption` then saves.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Self

from spmd.distributed.metadata_server import MetadataServer, MetadataValue

PREEMPTED = ("preempted", "TRUE")
MAINTENANCE = ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
"""Key of the metadata server, and its value as a notice."""

_WAIT_SECONDS = 300.0
_PAUSE = 10.0
_NO_VALUE = MetadataValue("", "0")


class Notices:
    """Threads that wait for notices inside a `with` block; none without a server."""

    def __init__(self, server: MetadataServer | None, say: Callable[[str], None]) -> None:
        self._server = server
        self._say = say
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        if self._server is None:
            return self
        for key, notice in (PREEMPTED, MAINTENANCE):
            arguments = (self._server, key, notice)
            thread = threading.Thread(
                target=self._watch, args=arguments, name=f"spmd-{key}", daemon=True
            )
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()  # a thread may still wait for an answer, and then does nothing

    def _watch(self, server: MetadataServer, key: str, notice: str) -> None:
        """Send SIGTERM once the value of a key becomes the notice.

        A notice of maintenance stays until the machine is taken away. A run that starts again there
        after it has saved does not act on it again: it would save after each step.
        """
        last = self._first(server, key)
        standing = (key, last.text) == MAINTENANCE
        if standing:
            self._say(f"metadata server: {key} was {notice} at the start: not acted on again")
        while not self._ended.is_set():
            if last.text == notice and not standing:
                self._say(f"metadata server: {key} is {notice}")
                os.kill(os.getpid(), signal.SIGTERM)
                return
            before = last
            asked = time.monotonic()
            try:
                last = server.wait_for_change(key, last, _WAIT_SECONDS)
            except OSError:  # it restarts at times
                self._ended.wait(_PAUSE)
            if last == before and time.monotonic() - asked < 1:  # a server that does not wait
                self._ended.wait(_PAUSE)
            standing = standing and last.text == notice

    def _first(self, server: MetadataServer, key: str) -> MetadataValue:
        """Return the value at the start; an empty one if the server does not answer."""
        with contextlib.suppress(OSError):
            return server.read(key)
        return _NO_VALUE
