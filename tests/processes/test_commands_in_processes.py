"""Commands in two processes print and write what one process does, once; their environments are compared."""

import filecmp
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from spmd import tree
from spmd.distributed.local import free_port
from spmd.run.build import make_setup
from spmd.run.load_config import load_config
from spmd.run.load_params import read_params
from spmd.sharding.mesh import mesh_of
from tests import forked
from tests.train_runs import write_tiny

SECONDS = re.compile(r"in [\d.e-]+ s$", re.M)
PROGRESS = re.compile(r"^\[\d+:\d\d\] .*\n", re.M)
GLOO = "[Gloo] Rank"


def serve(cache: str, config: str) -> None:
    """Answers with `spmd` commands, each after the variables that it is to find: NAME=VALUE … COMMAND …"""

    def run(arguments: list[str]) -> None:
        import os

        while re.match(r"[A-Z_]+=", arguments[0]):
            name, _, value = arguments.pop(0).partition("=")
            os.environ[name] = value
        forked.cli.main(arguments)

    forked.answer = lambda _: _answer(run)
    forked.serve_commands(cache, config)


_answer = forked.answer


class Processes:
    """One process of four devices, and two of two devices each, that run `spmd` commands."""

    def __init__(self, folder: Path, servers: list) -> None:
        self.folder, self.servers, self.count = folder, servers, 0

    def alone(self, *arguments: object) -> str:
        """What one process prints; it must exit with 0."""
        log = self._log()
        assert self.servers[0](log, [*arguments, "--devices", 4]).wait() == 0, log.read_text()
        return plain(log.read_text())

    def together(
        self, *arguments: object, own: tuple[tuple, tuple] = ((), ()), variables=((), ())
    ) -> tuple[list[int], list[str]]:
        """The exit codes and what each of the two processes prints."""
        coordinator = f"127.0.0.1:{free_port()}"
        logs = [self._log(), self._log()]
        running = []
        for i in range(2):
            flags = ["--devices", 2, "--coordinator", coordinator, "--processes", 2]
            command = [*variables[i], *arguments, *flags, "--process-id", i, *own[i]]
            running.append(self.servers[i](logs[i], command))
        codes = [each.wait() for each in running]
        return codes, [plain(log.read_text()) for log in logs]

    def _log(self) -> Path:
        self.count += 1
        log = self.folder / f"log.{self.count}"
        log.touch()
        return log


def plain(text: str) -> str:
    """A command's output without times and lines of progress."""
    return SECONDS.sub("in … s", PROGRESS.sub("", text))


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """A run of one step in `run`, and the processes."""
    folder = tmp_path_factory.mktemp("commands")
    config = write_tiny(folder)
    program = (
        "from tests.processes import test_commands_in_processes as test; "
        f"test.serve({str(folder / 'xla')!r}, {str(config)!r})"
    )
    with forked.server(program) as first, forked.server(program) as second:
        found = Processes(folder, [first, second])
        flags = ("--steps", 1, "--optimizer.warmup-steps", 0)
        found.alone("train", config, "--out", folder / "run", *flags)
        yield found


def assert_equal_output(processes, *arguments):
    """Process 0 of two prints what one process prints, the other nothing, and both exit with 0."""
    codes, (first, second) = processes.together(*arguments)
    assert (codes, second) == ([0, 0], ""), (first, second)
    assert first == processes.alone(*arguments)
    return first


def test_evaluation_in_two_processes_is_that_of_one(processes):
    """Two processes evaluate the same figures; with another number of tokens, others."""
    run = processes.folder / "run"
    printed = assert_equal_output(processes, "eval", run, "--tokens", 256)
    assert printed != processes.alone("eval", run, "--tokens", 64)


def test_text_of_two_processes_is_that_of_one(processes):
    """Two processes generate the same text; with another seed, another one."""
    command = ("generate", processes.folder / "run", "--prompt", "line 7", "--tokens", 8)
    printed = assert_equal_output(processes, *command)
    assert printed != processes.alone(*command, "--seed", 1)


def test_export_and_import_in_two_processes_write_what_one_writes(processes):
    """The tensors are bitwise equal; a run of another seed has others."""
    folder = processes.folder
    for name, command in (("one", processes.alone), ("two", processes.together)):
        command("export", folder / "run", "--out", folder / f"hf-{name}", "--shard-size", "50KB")
    names = sorted(path.name for path in (folder / "hf-one").iterdir())
    assert len([name for name in names if name.endswith(".safetensors")]) > 1
    equal, *different = filecmp.cmpfiles(folder / "hf-one", folder / "hf-two", names, shallow=False)
    assert (sorted(equal), different) == (names, [[], []])
    codes, (printed, silent) = processes.together(
        "import", folder / "hf-two", "--out", folder / "imported"
    )
    assert (codes, silent) == ([0, 0], "")
    assert "parameters" in printed
    state = folder / "imported" / "checkpoints" / "0" / "state"
    assert {"ocdbt.process_0", "ocdbt.process_1"} <= {path.name for path in state.iterdir()}
    imported, trained = params(processes, "imported"), params(processes, "run")
    for path, x in trained.items():
        np.testing.assert_array_equal(imported[path], x)
    processes.alone("export", folder / "run", "--out", folder / "other", "--dtype", "bf16")
    assert not filecmp.cmp(
        folder / "other" / "config.json", folder / "hf-one" / "config.json", shallow=False
    )


def params(processes, name: str) -> dict[str, np.ndarray]:
    """The parameters of a run, on one device."""
    config = load_config(str(processes.folder / "tiny.py"))
    plan = make_setup(config, mesh_of(config.mesh, jax.devices()[:2])).plan
    found = tree.flatten(read_params(processes.folder / name, plan.abstract_params))
    return {path: np.asarray(x) for path, x in found.items()}


def test_a_mistake_is_reported_once_and_ends_all(processes):
    """What both refuse, process 0 prints; both exit with 2."""
    run = processes.folder / "run"
    codes, (first, second) = processes.together("eval", run, "--step", 77)
    assert (codes, second) == ([2, 2], "")
    assert "there is no checkpoint of step 77" in first
    own = ((), ("--tokens", 64))
    codes, (first, second) = processes.together("eval", run, own=own)
    assert (codes, second) == ([2, 2], "")
    assert "process 1: command.tokens is 64" in first


def test_an_environment_that_differs_is_one_error(processes):
    """A variable of NCCL with two values stops both; equal ones, and names of network cards, do not."""
    run = processes.folder / "run"
    differ = (("NCCL_ALGO=Tree", "FI_PROVIDER=efa"), ("NCCL_ALGO=Ring", "FI_PROVIDER=efa"))
    codes, (first, second) = processes.together("eval", run, "--tokens", 64, variables=differ)
    assert (codes, second) == ([2, 2], "")
    assert "process 1: environment.NCCL_ALGO is Ring\n      process 0: Tree" in first
    assert "FI_PROVIDER" not in first
    equal = (("NCCL_ALGO=Tree", "NCCL_IB_HCA=mlx5_0"), ("NCCL_ALGO=Tree", "NCCL_IB_HCA=mlx5_1"))
    codes, _ = processes.together("eval", run, "--tokens", 64, variables=equal)
    assert codes == [0, 0]


@pytest.mark.parametrize("variable", ["NCCL_DEBUG=INFO", ""])
def test_output_of_libraries_is_shown_where_it_is_asked_for(processes, variable):
    """With NCCL_DEBUG, what C++ prints comes from the start (here that of Gloo), and it is said where; else it does not."""
    variables = (tuple(filter(None, [variable])),) * 2
    command = ("eval", processes.folder / "run", "--tokens", 64)
    codes, printed = processes.together(*command, variables=variables)
    assert codes == [0, 0]
    for text in printed:
        assert (GLOO in text) == bool(variable)
        said = f"{variable}: output of C++ libraries goes to standard error"
        assert (said in text) == bool(variable)
