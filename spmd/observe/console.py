"""Metrics of a run on the console: a bar, values and the curve of the loss on a terminal or in a notebook, or lines."""

import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

import rich.console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.text import Text

from spmd.observe.fit import fitted
from spmd.observe.metrics import (
    NOT_REPORTED,
    Flops,
    Values,
    Writer,
    human_count,
    human_duration,
    process_peak_rss,
)
from spmd.observe.notebook import NotebookLive, in_notebook
from spmd.tree import human_bytes

COLUMNS: Mapping[str, Callable[[Any], str]] = {
    "loss": lambda x: f"loss {x:7.4f}",
    "val_loss": lambda x: f"val loss {x:7.4f}",
    "gradient_norm": lambda x: f"grad norm {x:<8.3g}",
    "dropped": lambda x: f"dropped {x:5.1%}",
    "skipped_steps": lambda x: f"skipped {x:<3.0f}",
    "learning_rate": lambda x: f"lr {x:.2e}",
    "tokens_per_s": lambda x: f"{human_count(x):>5} tokens/s",
    "mfu": lambda x: f"MFU {x:5.1%}",
    "step_s": lambda x: f"{human_duration(x):>7}/step",
}
"""Name → format of the values on the console, in this order; others are for the other writers."""


def columns_of(unit: str) -> Mapping[str, Callable[[Any], str]]:
    """Return `COLUMNS` with a throughput in another unit than tokens."""

    def rate(x: Any) -> str:
        return f"{human_count(x):>5} {unit}/s"

    own = {"tokens_per_s": (f"{unit}_per_s", rate)}
    return dict(own.get(name, (name, show)) for name, show in COLUMNS.items())


_BARS, _NOT_FINITE = "▁▂▃▄▅▆▇█", "×"
_MOST_POINTS = 4096
_GAP = "   "


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve in one line, of at most `width` characters that each show the mean of as many values.

    Example:
        >>> sparkline([4.0, 3.0, 2.0, 2.0, 1.0, math.nan], width=3)
        '█▁×'
        >>> sparkline([3.0, 1.0], width=40)
        '█▁'
    """
    count = min(width, len(values))
    edges = [len(values) * n // count for n in range(count + 1)] if count else []
    means = [sum(values[i:j]) / (j - i) for i, j in itertools.pairwise(edges)]
    finite = [x for x in means if math.isfinite(x)]
    low, height = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)

    def bar(x: float) -> str:
        return _BARS[round((x - low) / (height or 1.0) * (len(_BARS) - 1))] if math.isfinite(x) else _NOT_FINITE

    return "".join(map(bar, means))


class Console(Writer):
    """Console output: a progress bar on a terminal or in a notebook, one line per logged step elsewhere.

    With the bar it also draws the curve of the loss and the newest event, in the width there is. Add a value with
    `columns=COLUMNS | {"accuracy": "accuracy {:.3f}".format}`. `interactive` says whether to draw on `stream`; by
    default, if it (standard output) is a terminal.

    Example:
        >>> console = Console(total_steps=200, interactive=False)
        >>> console.write(10, {"loss": 5.4321, "learning_rate": 3e-4, "step_s": 0.432})
        step  10/200   loss  5.4321   lr 3.00e-04    432 ms/step      1:22 left
    """

    def __init__(
        self,
        total_steps: int,
        stream: TextIO | None = None,
        interactive: bool | None = None,
        columns: Mapping[str, Callable[[Any], str]] = COLUMNS,
    ) -> None:
        self._total, self._columns = total_steps, columns
        self._stream = sys.stdout if stream is None else stream
        self._live: Live | NotebookLive | None = None
        self._step, self._event = 0, ""
        self._shown: Values = {}
        self._losses: list[float] = []
        if self._stream.isatty() if interactive is None else interactive:
            terminal = rich.console.Console(file=self._stream, force_terminal=True)
            # A thread that refreshes would take time from a busy host.
            self._live = Live(console=terminal, auto_refresh=False)
            self._live.start()
        elif stream is None and interactive is None and in_notebook():
            self._live = NotebookLive()

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if isinstance(self._live, Live):
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def note(self, event: str) -> None:
        """Show an event below the bar, in place of the one before, or as a line until there is a bar.

        Elsewhere than on a terminal, show nothing.
        """
        if self._live and not self._shown:
            self.say(event)
        elif self._live:
            self._event = event
            self._live.update(self, refresh=True)

    def write(self, step: int, values: Values) -> None:
        """Show one step, and the remaining time by its `step_s`."""
        if not self._live:
            left = self._left(step, values)
            self.say(_GAP.join([self._done(step), *self._cells(values), *([f"{left:>12}"] if left else [])]))
            return
        if (loss := values.get("loss")) is not None:
            self._losses.append(float(loss))
        if len(self._losses) > _MOST_POINTS:
            self._losses = [(a + b) / 2 for a, b in zip(self._losses[::2], self._losses[1::2], strict=False)]
        self._step, self._shown = step, {**self._shown, **values}  # an evaluation adds values to those shown
        self._live.update(self, refresh=True)

    def _done(self, step: int) -> str:
        return f"step {step:>{len(str(self._total))}}/{self._total}"

    def _cells(self, values: Values) -> list[str]:
        return [show(values[name]) for name, show in self._columns.items() if values.get(name) is not None]

    def _left(self, step: int, values: Values) -> str:
        seconds = values.get("step_s")
        return "" if seconds is None else f"{human_duration((self._total - step) * float(seconds))} left"

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> rich.console.RenderResult:
        """Yield the lines of the display, none longer than the terminal is wide."""
        width = options.max_width
        if self._shown:
            done, percent = self._done(self._step), f"{100 * self._step // self._total}%"
            rest = _GAP.join(filter(None, [percent, self._left(self._step, self._shown)]))
            if (room := width - len(done) - len(rest) - 2 * len(_GAP)) >= 4:
                yield Segment(done + _GAP)
                bar = ProgressBar(self._total, self._step, width=min(room, 40))
                yield from (s for s in console.render(bar, options.update(width=min(room, 40))) if s.text != "\n")
                yield Segment(_GAP + rest)
                yield Segment.line()
            else:
                yield _line(f"{done} {rest}", width)
            yield from (_line(line, width) for line in _rows(self._cells(self._shown), width))
        if len(self._losses) > 1 and not options.ascii_only:
            first, last = (f"{x:.4f}" for x in (self._losses[0], self._losses[-1]))
            yield _line(f"loss {first} {sparkline(self._losses, min(width - len(first + last) - 7, 60))} {last}", width)
        if self._event:
            yield _line(self._event, width)

    def summary(
        self,
        *,
        steps: int,
        seconds: float,
        count: int,
        unit: str,
        loss: float | None = None,
        flops: Flops | None = None,
        mfu: float | None = None,
        memory: int | None = None,
    ) -> None:
        """End the bar and print a summary; None is printed as "not reported", and no MFU without `flops`.

        `seconds` and `count` of the `unit` are of the `steps` of this process, `loss` is the last one, `mfu` in [0, 1]
        is computed from `flops`, and `memory` is the peak bytes of a device.
        """
        self.close()
        cells = [f"done: {steps:,} steps in {human_duration(seconds)}", f"{human_count(count)} {unit}"]
        cells += [f"{human_count(count / seconds)} {unit}/s"] if seconds > 0 else []
        last, used = (NOT_REPORTED if x is None else f"{x:{form}}" for x, form in ((loss, ".4f"), (mfu, ".1%")))
        peak = NOT_REPORTED if memory is None else human_bytes(memory)
        lines = [_GAP.join([*cells, f"loss {last}"]), *([f"MFU {used}: {flops.formula}"] if flops else [])]
        lines.append(f"peak memory: device {peak}, host process {human_bytes(process_peak_rss())}")
        self.say(fitted("\n".join(lines), self._stream))

    def close(self) -> None:
        """Stop the bar, and leave its last state on the terminal."""
        if self._live:
            self._live.stop()
            self._live = None


def _line(text: str, width: int) -> Text:
    return Text(text[:width], no_wrap=True, overflow="crop")


def _rows(cells: Sequence[str], width: int) -> list[str]:
    """Return cells side by side, in as many lines as the width needs."""
    rows = [""]
    for cell in cells:
        longer = f"{rows[-1]}{_GAP}{cell}" if rows[-1] else cell
        rows = [*rows[:-1], longer] if len(longer) <= width else [*rows, cell]
    return rows
