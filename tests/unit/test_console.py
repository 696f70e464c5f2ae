"""The console says on a terminal of any width what a run does, and prints one line per logged step elsewhere."""

import io
import math
import re

import pytest
import rich.console

from spmd.observe.console import COLUMNS, Console, columns_of, sparkline
from spmd.observe.metrics import NOT_REPORTED, transformer_flops
from spmd.observe.wrap_text import wrap_text

VALUES = {
    "step_s": 0.432,
    "loss": 5.4321,
    "tokens_per_s": 12_345.0,
    "learning_rate": 3e-4,
    "gradient_norm": 1.234,
    "unknown": 1.0,
}


def test_console_prints_one_line_per_logged_step() -> None:
    """Lines have a fixed order, are aligned, and leave out what was not given or is for other writers."""
    stream = io.StringIO()
    console = Console(200, stream)
    console.write(5, VALUES)
    console.write(150, VALUES | {"loss": 12.5})
    console.write(150, {"val_loss": 3.25})
    console.close()
    first, second, third = stream.getvalue().splitlines()
    assert first == (
        "step   5/200   loss  5.4321   grad norm 1.23       lr 3.00e-04   12.3k tokens/s    432 ms/step      1:24 left"
    )
    assert len(second) == len(first)
    assert third == "step 150/200   val loss  3.2500"


def test_console_columns_can_be_added() -> None:
    """A column is a name and how its value is shown."""
    stream = io.StringIO()
    Console(9, stream, columns={**COLUMNS, "accuracy": "accuracy {:.2f}".format}).write(
        1, {"accuracy": 0.5}
    )
    assert stream.getvalue() == "step 1/9   accuracy 0.50\n"


def test_console_draws_a_bar_on_a_terminal() -> None:
    """The bar has a whole percentage, the time left and the latest of every value; closing twice is fine."""
    stream = io.StringIO()
    console = Console(200, stream, interactive=True)
    console.write(199, VALUES)
    console.write(199, {"val_loss": 3.25})
    console.say("[a line] above the bar")
    console.summary(steps=200, seconds=1.0, count=10, unit="tokens")
    console.close()
    plain = "".join(part.split("m", 1)[-1] for part in stream.getvalue().split("\x1b["))
    assert "step 199/200" in plain
    assert "99%" in plain
    assert "432 ms left" in plain
    assert "loss  5.4321   val loss  3.2500" in plain
    assert "━" in plain
    assert "[a line] above the bar" in plain
    assert stream.getvalue().index("\x1b[?25h") < stream.getvalue().index("done:"), (
        "the cursor is back"
    )


def test_summary_says_what_is_not_reported() -> None:
    """MFU stands beside its formula, and what is unknown is said to be, not shown as 0."""
    flops = transformer_flops(124_000_000, 12, 768, 512)
    stream = io.StringIO()
    console = Console(200, stream)
    console.summary(steps=200, seconds=86, count=1_638_400, unit="tokens", loss=3.2104, flops=flops)
    done, mfu, memory = stream.getvalue().splitlines()
    assert done == "done: 200 steps in 1:26   1.64M tokens   19.1k tokens/s   loss 3.2104"
    assert mfu == f"MFU {NOT_REPORTED}: {flops.formula}"
    assert memory.startswith(f"peak memory: device {NOT_REPORTED}, host process ")
    console.summary(
        steps=200,
        seconds=86,
        count=1_638_400,
        unit="tokens",
        flops=flops,
        mfu=0.4123,
        memory=3 * 2**30,
    )
    assert f"MFU 41.2%: {flops.formula}" in stream.getvalue()
    assert "device 3 GiB" in stream.getvalue()


def test_a_run_of_another_unit_has_no_utilization() -> None:
    """Without a FLOP count there is no line about it."""
    stream = io.StringIO()
    Console(3, stream).summary(steps=3, seconds=1.0, count=12, unit="images", loss=0.5)
    assert (
        stream.getvalue().splitlines()[0]
        == "done: 3 steps in 1 s   12 images   12 images/s   loss 0.5000"
    )
    assert "MFU" not in stream.getvalue()
    assert columns_of("images")["images_per_s"](12.0) == "   12 images/s"


def drawn(width: int) -> list[str]:
    """Lines of the display of a run on a terminal of this width."""
    stream = io.StringIO()
    console = Console(200, stream, interactive=True)
    console.note("compiled the step in 4 s")
    assert "compiled the step in 4 s\n" in stream.getvalue()
    for step in range(1, 150):
        console.write(step, VALUES | {"loss": 5.0 / step})
    console.write(149, {"val_loss": 3.25})
    console.note("saving step 149")
    canvas = io.StringIO()
    rich.console.Console(file=canvas, width=width, force_terminal=True, color_system=None).print(
        console
    )
    console.close()
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", canvas.getvalue()).splitlines()


@pytest.mark.parametrize("width", [30, 60, 80, 120])
def test_the_display_fits_the_terminal(width: int) -> None:
    """Nothing is cut off: all values, the curve and the newest event, in lines of at most its width."""
    lines = drawn(width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for expected in (
        "step 149/200",
        "74%",
        "22 s left",
        "12.3k tokens/s",
        "val loss  3.2500",
        "saving step 149",
    ):
        assert expected in text
    (curve,) = (line for line in lines if "█" in line)
    assert curve.startswith("loss 5.0000 █")
    assert curve.endswith("▁ 0.0336")


def test_a_sparkline_shows_means_and_what_is_not_finite() -> None:
    """From the lowest to the highest bar; an equal curve is low, none is empty."""
    assert sparkline(range(8), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0] * 5, 3) == "▁▁▁"
    assert sparkline([], 3) == ""
    assert sparkline([2.0, math.inf, 1.0], 3) == "█×▁"
    assert len(sparkline(range(1000), 17)) == 17


def test_long_lines_continue_with_an_indent() -> None:
    """Between columns where that is enough; no word is cut, and short lines stay as they are."""
    text = "  layers/kernel  float32[2×32×64]  P(pipe, fsdp, tensor)  2 KiB\nshort  line"
    lines = wrap_text(text, 40).split("\n")
    assert lines == [
        "  layers/kernel  float32[2×32×64]",
        "      P(pipe, fsdp, tensor)  2 KiB",
        "short  line",
    ]
    assert wrap_text("one  two three four five", 12).split("\n") == [
        "one",
        "    two",
        "    three",
        "    four",
        "    five",
    ]
    assert wrap_text("one  two three four five", 14, indent=2).split("\n") == [
        "one",
        "  two three",
        "  four five",
    ]
    assert wrap_text(text, 80) == text
    assert wrap_text("a" * 50, 40) == "a" * 50
