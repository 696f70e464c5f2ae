"""A changing output of a notebook, as text."""

import html
import sys
from typing import Any

import rich.console

_WIDTH = 100


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")  # a kernel has imported it
    if not ipython:
        return False
    shell = ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class NotebookLive:
    """Output below the running cell, shown at its first update: `rich.live.Live` of a notebook."""

    def __init__(self) -> None:
        self._handle: Any = None

    def update(self, shown: rich.console.RenderableType, *, refresh: bool = True) -> None:
        """Replace the output."""
        import IPython.display  # a kernel has it; elsewhere it need not be installed

        console = rich.console.Console(width=_WIDTH, force_jupyter=False, color_system=None)
        with console.capture() as capture:
            console.print(shown)
        text = capture.get().rstrip()
        bundle = {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"}
        if self._handle is None:
            self._handle = IPython.display.DisplayHandle()
            self._handle.display(bundle, raw=True)
        else:
            self._handle.update(bundle, raw=True)

    def stop(self) -> None:
        """Leave the output as it is."""
