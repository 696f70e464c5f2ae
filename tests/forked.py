"""Processes that cost no import: a server that has imported everything and started no device forks each of them.

A forked process is a real one: it has its own devices, it can be killed, and what it runs is
`spmd`'s own `main`.
"""

import contextlib
import io
import json
import os
import select
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import jax

from spmd import cli

ROOT = Path(__file__).resolve().parent.parent


def fork(run: Callable[[], object], log: Path) -> int:
    """The process that runs `run` and exits with 0, or as it says, or with 1 and its traceback in `log`."""
    with warnings.catch_warnings():
        # Python and JAX warn that threads do not survive a fork; no device has been started, so
        # there are none.
        warnings.simplefilter("ignore")
        child = os.fork()
    if child:
        return child
    code: object = 1
    try:
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        run()
        code = 0
    except SystemExit as done:
        code = done.code
    except BaseException:  # noqa: BLE001 - the child must not run its parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def answer(run: Callable[[list[str]], object]) -> None:
    """Runs each list of arguments that comes in a process of its own; says its process id, and then how it ended."""
    # ignored in what a background job of a shell starts
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in sys.stdin:
        log, *arguments = json.loads(line)
        child = fork(lambda arguments=arguments: run(arguments), Path(log))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def serve_commands(cache: str, config: str, run: Callable[[list[str]], object] = cli.main) -> None:
    """Runs `spmd` with each list of arguments that comes.

    Args:
        cache: A folder for programs that are compiled once.
        config: What the runs are of.
        run: What runs it; a program that calls `main` with arguments has no supervisor.
    """
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        # needs no device; what it traces need not be traced again in each process
        cli.main(["plan", config])
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    answer(run)


def serve_processes(cache: str, config: str) -> None:
    """Runs `spmd` with each list of arguments that comes, as its own process: `train` with a supervisor."""
    serve_commands(cache, config, run_process)


def run_process(arguments: list[str]) -> None:
    sys.argv = ["spmd", *arguments]
    cli.main()


class Run:
    """What runs in a process of its own."""

    def __init__(self, output: IO[bytes]) -> None:
        self._output = output
        self.pid = int(output.readline())
        # a signal to 0 is for the whole group
        assert self.pid > 1, "an earlier run of this server was not waited for"

    def ended(self) -> bool:
        """Whether it is over; does not wait."""
        return bool(select.select([self._output], [], [], 0)[0])

    def wait(self) -> int:
        """How it ended: its exit code, or minus the signal that it was killed by."""
        return int(self._output.readline())


@contextlib.contextmanager
def server(program: str, **environment: str) -> Iterator[Callable[[Path, Sequence[object]], Run]]:
    """Starts a server; what it yields starts a process with arguments, one at a time.

    Args:
        program: Python that ends in `answer`, from a module that has imported everything.
        **environment: Further variables.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        bufsize=0,
        env={**os.environ, **environment},
    )

    def start(log: Path, arguments: Sequence[object]) -> Run:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([str(log), *map(str, arguments)]).encode() + b"\n")
        return Run(process.stdout)

    try:
        yield start
    finally:
        process.kill()
        process.communicate()


def command_server(
    config: Path, cache: Path
) -> contextlib.AbstractContextManager[Callable[..., Run]]:
    """A server of `spmd` commands about one config, with a folder for programs that are compiled once."""
    return server(
        f"from tests import forked; forked.serve_commands({str(cache)!r}, {str(config)!r})"
    )
