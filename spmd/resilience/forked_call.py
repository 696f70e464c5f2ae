"""Calls in forked processes, for a process without threads.

A supervisor forks, and a fork has no threads but one. TensorStore starts threads with its first
request, so a supervisor makes requests in forks of itself.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
from collections.abc import Callable
from typing import Any

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def call_in_fork(function: Callable[[], Any], seconds: float) -> Any:
    """Call a function in a fork of this process, and return its result; None if it fails.

    Its result is sent as JSON, and what it prints is dropped.

    Args:
        seconds: Time after which the fork is killed.
    """
    parent = os.getpid()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        end_with_parent(parent)
        _answer(function, write)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        if not select.select([pipe], [], [], seconds)[0]:
            os.kill(child, signal.SIGKILL)
        text = pipe.read()
    os.waitpid(child, 0)
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return None


def _answer(function: Callable[[], Any], pipe: int) -> None:
    """Write the result of a function into a pipe, and end this process."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the call ends soon
        os.write(pipe, json.dumps(function()).encode())
    finally:
        os._exit(0)


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(128 + signal.SIGKILL)
