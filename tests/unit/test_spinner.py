"""A wait is shown on a terminal, and elsewhere as some lines."""

import io
import sys
import time
from pathlib import Path

import pytest

from spmd.observe import spinner


class Terminal(io.StringIO):
    """A stream that says that it is a terminal, and has a descriptor."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.fileno = lambda: descriptor

    def isatty(self) -> bool:
        return True


def test_a_wait_moves_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line says what is done, is written anew, and vanishes."""
    with (tmp_path / "shown").open("wb") as file:
        monkeypatch.setattr(sys, "stderr", Terminal(file.fileno()))
        with spinner.spinner("compiling"):
            time.sleep(0.5)
        assert list(spinner.spin_until_each(iter("ab"), "comparing")) == ["a", "b"]
    lines = (tmp_path / "shown").read_bytes().decode().split("\r")
    assert len({line for line in lines if "compiling" in line and "0:00:00" in line}) > 2
    assert "comparing" not in lines[-1]


def test_a_wait_is_some_lines_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at the start and one at each interval; of many results together; or one on standard output."""
    monkeypatch.setattr(spinner, "INTERVAL", 0.2)
    with spinner.spinner("compiling"), spinner.spinner("loading", plain=True):
        time.sleep(0.5)
    printed = capsys.readouterr()
    assert printed.out == "loading …\n"
    assert printed.err.splitlines() in (["[0:00] compiling"] * 2, ["[0:00] compiling"] * 3)
    assert list(spinner.spin_until_each(iter(range(100)), "comparing")) == [*range(100)]
    assert capsys.readouterr().err == "[0:00] comparing\n"
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        with spinner.spinner("compiling"):
            pass
