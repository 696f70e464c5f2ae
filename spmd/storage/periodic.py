"""Calls at intervals, beside a block."""

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def calls_at_intervals(
    function: Callable[[], object], interval: float, patience: float, name: str
) -> Iterator[None]:
    """Call a function at intervals from a thread, until a block ends.

    Args:
        function: Raises nothing; an error would end the calls.
        interval: Seconds from the end of a call to the next.
        patience: Seconds to wait for a call that is running when the block ends.
        name: Of the thread.
    """
    stopped = threading.Event()

    def keep_calling() -> None:
        while not stopped.wait(interval):
            function()

    thread = threading.Thread(target=keep_calling, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(patience)
