"""The command `spmd`, as a process of its own.

Python imports a package before any of its modules, and importing `spmd` takes a second or more.
This module is outside of the package, so that Ctrl-C ends the process at once and without a
traceback from the first import on.
"""

import gc
import importlib
import os
import signal
import sys
import threading
from typing import NoReturn

INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell reports it."""


def main() -> None:
    """Run the command line and exit."""
    # a shell's background job ignores Ctrl-C
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        end_at_interrupt()
    # A process without a terminal may have neither.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    sys.stdout.reconfigure(line_buffering=True)  # `os._exit` flushes nothing
    # Imports and traces make many objects and few cycles: a tenth of a start. No collection looks at
    # what was imported.
    gc.disable()
    gc.set_threshold(50_000)
    try:
        cli = importlib.import_module("spmd.cli")
        gc.freeze()
        gc.enable()
        cli.main()
    except SystemExit as done:
        if done.code == INTERRUPTED:
            _end_now()
        raise


def _end_now() -> NoReturn:
    # Until release 14, rich's replacement of `sys.stdout` says that it is no terminal.
    descriptor = sys.stdout.fileno()
    if os.isatty(descriptor):
        os.write(descriptor, b"\x1b[?25h\r\n")  # a progress bar hides the cursor
    os._exit(INTERRUPTED)


def end_at_interrupt() -> None:
    """End the process at once at SIGINT, also while its main thread is in C++, such as XLA's compiler.

    Python calls a handler only between two instructions of the main thread, which may be minutes
    away. It writes the signal's number into a pipe at once, and a thread waits for it there. Saves
    are atomic, so nothing is half-written.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)

    def end(number: int, frame: object) -> None:
        _end_now()

    def wait() -> None:
        while number := os.read(read, 1):
            if number[0] == signal.SIGINT and signal.getsignal(signal.SIGINT) is end:
                _end_now()

    signal.signal(signal.SIGINT, end)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=wait, name="interrupt", daemon=True).start()


if __name__ == "__main__":
    main()
