"""Ctrl-C ends a command at once, whatever it does, with exit code 130 and without a traceback."""

import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

from tests.command_line import write_config
from tests.programs import HEEDING_INTERRUPTS

SLOW_IMPORT = "import time\nprint('importing', flush=True)\ntime.sleep(60)\n"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A config whose step takes long to compile, and never comes from a cache."""
    path = write_config(tmp_path_factory.mktemp("interrupted"))
    path.write_text(
        path.read_text().replace("steps=4", "devices=8, compilation_cache_dir='none', steps=10**6")
    )
    return path


def interrupted(arguments, after, times=1, **environment):
    """Runs Python on a terminal, and interrupts it after it has shown `after`; (exit code, seconds to the end, output).

    The output is that after the signal.
    """
    terminal, end = pty.openpty()
    command = [*HEEDING_INTERRUPTS, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), **environment}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), end)
    with subprocess.Popen(command, env=environment, start_new_session=True, **streams) as process:
        os.close(end)
        try:
            read(terminal, lambda shown: after in shown)
            began = time.monotonic()
            for _ in range(times):
                process.send_signal(signal.SIGINT)
            rest = read(terminal, lambda shown: False)
            return process.wait(60), time.monotonic() - began, rest.decode(errors="replace")
        finally:
            process.kill()
            os.close(terminal)


def read(terminal, ends):
    """What the terminal shows until `ends` is true of it, or the process is gone."""
    shown, deadline = b"", time.monotonic() + 100
    while not ends(shown):
        assert time.monotonic() < deadline, shown[-2000:]
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # Linux says that the other end is gone
                break
    return shown


@pytest.mark.parametrize(
    ("after", "times", "launched"),
    [
        (b"compiling the step", 1, False),
        pytest.param(b"step ", 2, False, marks=pytest.mark.soak),
        pytest.param(b"compiling the step", 1, True, marks=pytest.mark.soak),
    ],
    ids=["compiling", "training-twice", "launched"],
)
def test_ctrl_c_ends_a_run(after, times, launched, config, tmp_path):
    """While XLA compiles, in training, and with all processes of a launch; the cursor is shown again."""
    before = ["launch", "--processes", "2", "--"] if launched else []
    out = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "spmd_command",
        *before,
        "train",
        str(config),
        "--out",
        str(out),
    ]
    code, seconds, shown = interrupted(command, after, times)
    assert code == 130
    assert seconds < 5  # at once is a tenth of it, on a machine with nothing else to do
    assert "Traceback" not in shown
    assert "Error" not in shown
    assert "\x1b[?25h" in shown


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_the_imports(times, tmp_path):
    """Before the command line has been read, while JAX is imported."""
    (tmp_path / "jax.py").write_text(SLOW_IMPORT)
    command = [sys.executable, "-m", "spmd_command", "train", "demo"]
    code, seconds, shown = interrupted(
        command, b"importing", times, PYTHONPATH=f"{tmp_path}:{os.getcwd()}"
    )
    assert (code, "Traceback" in shown) == (130, False)
    assert seconds < 5


def test_control_an_ordinary_program_shows_a_traceback(tmp_path):
    """The terminal, the key and the reading are as they should be."""
    program = tmp_path / "program.py"
    program.write_text(SLOW_IMPORT)
    code, _, shown = interrupted([sys.executable, program], b"importing")
    assert (code, "KeyboardInterrupt" in shown) == (-signal.SIGINT, True)
