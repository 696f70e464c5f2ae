"""Metrics of a run on the console.

On a terminal or in a notebook they are a bar, values and the curve of the loss; elsewhere, lines.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

import rich.console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.text import Text

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
from spmd.observe.wrap_text import wrap_to_terminal
from spmd.tree import human_bytes

COLUMNS: Mapping[str, Callable[[Any], str]] = {
    "loss": lambda x: f"loss {x:7.4f}",
    "val_loss": lambda x: f"val loss {x:7.4f}",
    "reward_accuracy": lambda x: f"preferred {x:6.1%}",
    "reward_margin": lambda x: f"margin {x:7.4f}",
    "val_reward_accuracy": lambda x: f"preferred {x:6.1%}",
    "val_reward_margin": lambda x: f"margin {x:7.4f}",
    "gradient_norm": lambda x: f"grad norm {x:<8.3g}",
    "dropped": lambda x: f"dropped {x:5.1%}",
    "skipped_steps": lambda x: f"skipped {x:<3.0f}",
    "learning_rate": lambda x: f"lr {x:.2e}",
    "tokens_per_s": lambda x: f"{human_count(x):>5} tokens/s",
    "mfu": lambda x: f"MFU {x:5.1%}",
    "step_s": lambda x: f"{human_duration(x):>7}/step",
}
"""Name → format of the values on the console, in this order; others are for the other writers."""


def columns_of(unit: str, prefixes: Iterable[str] = ("",)) -> Mapping[str, Callable[[Any], str]]:
    """Return `COLUMNS` with a throughput in another unit than tokens.

    Args:
        prefixes: Prefixes of the losses of several networks, `name/`.
    """
    columns: dict[str, Callable[[Any], str]] = {}
    for prefix in prefixes:
        columns[f"{prefix}loss"] = functools.partial(_loss_text, prefix)
    for name, show in COLUMNS.items():
        if name == "loss":
            continue
        if name == "tokens_per_s":
            columns[f"{unit}_per_s"] = lambda x: f"{human_count(x):>5} {unit}/s"
        else:
            columns[name] = show
    return columns


def _loss_text(prefix: str, loss: float) -> str:
    return f"{prefix}loss {loss:7.4f}"


_BARS = "▁▂▃▄▅▆▇█"
_NOT_FINITE = "×"
_MOST_POINTS = 4096
"""Losses that are kept for the curve; of more, two neighbours become one."""
_MOST_COLUMNS = 60
"""Widest curve, in characters."""
_LONGEST_BAR = 40
_SHORTEST_BAR = 4
_GAP = "   "


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve in one line of at most `width` characters, each the mean of as many values.

    Example:
        >>> sparkline([4.0, 3.0, 2.0, 2.0, 1.0, math.nan], width=3)
        '█▁×'
        >>> sparkline([3.0, 1.0], width=40)
        '█▁'
    """
    count = min(width, len(values))
    means = []
    for number in range(count):
        start = len(values) * number // count
        end = len(values) * (number + 1) // count
        means.append(sum(values[start:end]) / (end - start))
    finite = [mean for mean in means if math.isfinite(mean)]
    low = min(finite, default=0.0)
    height = max(finite, default=0.0) - low
    line = ""
    for mean in means:
        if math.isfinite(mean):
            share = (mean - low) / (height or 1.0)
            line += _BARS[round(share * (len(_BARS) - 1))]
        else:
            line += _NOT_FINITE
    return line


class Console(Writer):
    """Console output: a bar on a terminal or in a notebook, one line per logged step elsewhere.

    With the bar it also draws the curve of the loss and the newest event, in the width there is.
    Add a value with `columns=COLUMNS | {"accuracy": "accuracy {:.3f}".format}`. `interactive` says
    whether to draw on `stream`; by default, if it (standard output) is a terminal.

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
        self._total = total_steps
        self._columns = columns
        output = stream
        if output is None:
            output = sys.stdout
        self._stream = output
        self._live: Live | NotebookLive | None = None
        self._step = 0
        self._event = ""
        self._shown: Values = {}
        self._losses: list[float] = []
        draws = interactive
        if interactive is None:
            draws = self._stream.isatty()
        if draws:
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
        """Show an event below the bar, in place of the one before.

        Until there is a bar, print it as a line. Elsewhere than on a terminal, show nothing.
        """
        if self._live and not self._shown:
            self.say(event)
        elif self._live:
            self._event = event
            self._live.update(self, refresh=True)

    def write(self, step: int, values: Values) -> None:
        """Show one step, and the remaining time by its `step_s`."""
        if not self._live:
            cells = [self._done(step), *self._cells(values)]
            left = self._left(step, values)
            if left:
                cells.append(f"{left:>12}")
            self.say(_GAP.join(cells))
            return
        loss = values.get("loss")
        if loss is not None:
            self._losses.append(float(loss))
        if len(self._losses) > _MOST_POINTS:
            self._losses = _halved(self._losses)
        self._step = step
        self._shown = {**self._shown, **values}  # an evaluation adds values to those shown
        self._live.update(self, refresh=True)

    def _done(self, step: int) -> str:
        digits = len(str(self._total))
        return f"step {step:>{digits}}/{self._total}"

    def _cells(self, values: Values) -> list[str]:
        cells = []
        for name, show in self._columns.items():
            value = values.get(name)
            if value is not None:
                cells.append(show(value))
        return cells

    def _left(self, step: int, values: Values) -> str:
        """Return the remaining time; empty if it is not known."""
        seconds = values.get("step_s")
        if seconds is None:
            return ""
        return f"{human_duration((self._total - step) * float(seconds))} left"

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> rich.console.RenderResult:
        """Yield the lines of the display, none longer than the terminal is wide."""
        width = options.max_width
        if self._shown:
            yield from self._progress(console, options)
            for line in _rows(self._cells(self._shown), width):
                yield _line(line, width)
        if len(self._losses) > 1 and not options.ascii_only:
            first = f"{self._losses[0]:.4f}"
            last = f"{self._losses[-1]:.4f}"
            room = width - len(first) - len(last) - len("loss   ")
            curve = sparkline(self._losses, min(room, _MOST_COLUMNS))
            yield _line(f"loss {first} {curve} {last}", width)
        if self._event:
            yield _line(self._event, width)

    def _progress(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> rich.console.RenderResult:
        """Yield the line of the step and the remaining time, with a bar if there is room."""
        width = options.max_width
        done = self._done(self._step)
        rest = f"{100 * self._step // self._total}%"
        left = self._left(self._step, self._shown)
        if left:
            rest += _GAP + left
        room = width - len(done) - len(rest) - 2 * len(_GAP)
        if room < _SHORTEST_BAR:
            yield _line(f"{done} {rest}", width)
            return
        length = min(room, _LONGEST_BAR)
        bar = ProgressBar(self._total, self._step, width=length)
        yield Segment(done + _GAP)
        for segment in console.render(bar, options.update(width=length)):
            if segment.text != "\n":  # the line goes on
                yield segment
        yield Segment(_GAP + rest)
        yield Segment.line()

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
        """End the bar and print a summary.

        None is printed as "not reported", and no MFU without `flops`. `seconds` and `count` of the
        `unit` are of the `steps` of this process, `loss` is the last one, `mfu` in [0, 1] is
        computed from `flops`, and `memory` is the peak bytes of a device.
        """
        self.close()
        cells = [
            f"done: {steps:,} steps in {human_duration(seconds)}",
            f"{human_count(count)} {unit}",
        ]
        if seconds > 0:
            cells.append(f"{human_count(count / seconds)} {unit}/s")
        cells.append(f"loss {_reported(loss, '.4f')}")
        lines = [_GAP.join(cells)]
        if flops:
            lines.append(f"MFU {_reported(mfu, '.1%')}: {flops.formula}")
        peak = NOT_REPORTED
        if memory is not None:
            peak = human_bytes(memory)
        host = human_bytes(process_peak_rss())
        lines.append(f"peak memory: device {peak}, host process {host}")
        self.say(wrap_to_terminal("\n".join(lines), self._stream))

    def close(self) -> None:
        """Stop the bar, and leave its last state on the terminal."""
        if self._live:
            self._live.stop()
            self._live = None


def _reported(value: float | None, form: str) -> str:
    """Return a number in a format, or `NOT_REPORTED`."""
    if value is None:
        return NOT_REPORTED
    return f"{value:{form}}"


def _halved(values: list[float]) -> list[float]:
    """Return the mean of each two neighbours, without a last odd one."""
    pairs = zip(values[::2], values[1::2], strict=False)
    return [(first + second) / 2 for first, second in pairs]


def _line(text: str, width: int) -> Text:
    return Text(text[:width], no_wrap=True, overflow="crop")


def _rows(cells: Sequence[str], width: int) -> list[str]:
    """Return cells side by side, in as many lines as the width needs."""
    rows = [""]
    for cell in cells:
        longer = cell
        if rows[-1]:
            longer = f"{rows[-1]}{_GAP}{cell}"
        if len(longer) <= width:
            rows[-1] = longer
        else:
            rows.append(cell)
    return rows
