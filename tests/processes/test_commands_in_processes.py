"""Commands in two processes print and write what one process does, once; their environments are compared."""

import filecmp
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.distributed.local import free_port
from spmd.hf.family import families
from spmd.hf.save import save_params
from spmd.model_interface.model import abstract_key
from spmd.run.build import build_model
from spmd.run.load_config import load_config
from tests import forked
from tests.train_runs import write_tiny

SECONDS = re.compile(r"in [\d.e-]+ s$", re.M)
PROGRESS = re.compile(r"^\[\d+:\d\d\] .*\n", re.M)
GLOO = "[Gloo] Rank"


def serve(cache: str, config: str) -> None:
    """Answers with `spmd` commands, each after the variables that it is to find: NAME=VALUE … COMMAND …"""

    def run(arguments: list[str]) -> None:
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
    """A folder of random parameters in `hf`, the run of one process that imports it in `run`, and the processes."""
    folder = tmp_path_factory.mktemp("commands")
    config = write_tiny(folder, "\nconfig = dataclasses.replace(config, devices=4)\n")
    program = (
        "from tests.processes import test_commands_in_processes as test; "
        f"test.serve({str(folder / 'xla')!r}, {str(config)!r})"
    )
    with forked.server(program) as first, forked.server(program) as second:
        tiny = load_config(str(config))
        params = random_params(build_model(tiny))
        save_params(folder / "hf", params, families()["llama"], tiny.model)
        found = Processes(folder, [first, second])
        found.alone("import", folder / "hf", "--out", folder / "run", "--sequence", 32)
        yield found


def random_params(model):
    """Parameters of a model, random without a compilation."""
    rng = np.random.default_rng(0)

    def draw(leaf):
        return jnp.asarray(rng.normal(scale=0.1, size=leaf.shape).astype(np.float32))

    return jax.tree.map(draw, jax.eval_shape(model.init, abstract_key()))


def assert_equal_output(processes, *arguments):
    """Process 0 of two prints what one process prints, the other nothing, and both exit with 0."""
    codes, (first, second) = processes.together(*arguments)
    assert (codes, second) == ([0, 0], ""), (first, second)
    assert first == processes.alone(*arguments)
    return first


@pytest.mark.soak
def test_evaluation_in_two_processes_is_that_of_one(processes):
    """Two processes evaluate the same figures; with another number of tokens, others."""
    command = ("eval", processes.folder / "run", "--data", processes.folder / "corpus.txt")
    printed = assert_equal_output(processes, *command, "--tokens", 256)
    assert printed != processes.alone(*command, "--tokens", 64)


@pytest.mark.soak
def test_text_of_two_processes_is_that_of_one(processes):
    """Two processes generate the same text; with another seed, another one."""
    command = ("generate", processes.folder / "run", "--prompt", "line 7", "--tokens", 8)
    printed = assert_equal_output(processes, *command)
    assert printed != processes.alone(*command, "--seed", 1)


@pytest.mark.soak
def test_the_layout_of_two_processes_is_checked_against_one_device(processes):
    """The initial state is that of one device, and the layouts agree; an injected bug is found by both."""
    command = ("check", processes.folder / "tiny.py", "--check-steps", 1)
    codes, (printed, silent) = processes.together(*command)
    assert (codes, silent) == ([0, 0], "")
    assert re.search(r"initial state +step +0.00e\+00 .* ok", printed)
    assert printed.endswith("the layouts agree\n")
    codes, (printed, silent) = processes.together(*command, "--inject", "gradient-scale")
    assert (codes, silent) == ([1, 1], "")
    assert "the injected bug was found" in printed


@pytest.mark.soak
def test_products_of_axes_are_for_one_process(processes):
    """Meshes of some of the devices leave processes without any: refused, once."""
    command = ("check", processes.folder / "tiny.py", "--products", 1)
    codes, (printed, silent) = processes.together(*command)
    assert (codes, silent) == ([2, 2], "")
    assert "products: are compared by one process, and there are 2" in printed


def test_two_processes_import_and_export_what_one_does(processes):
    """Each process writes its shards of the run; the files of its export are bitwise those of one process.

    In another dtype they are not.
    """
    folder = processes.folder
    codes, (printed, silent) = processes.together(
        "import", folder / "hf", "--out", folder / "imported"
    )
    assert (codes, silent) == ([0, 0], "")
    assert "parameters" in printed
    state = folder / "imported" / "checkpoints" / "0" / "state"
    assert {"ocdbt.process_0", "ocdbt.process_1"} <= {path.name for path in state.iterdir()}
    small = ("--shard-size", "50KB")
    exported = ("export", folder / "imported", *small, "--out")
    codes, _ = processes.together(*exported, folder / "two")
    assert codes == [0, 0]
    processes.alone("export", folder / "run", *small, "--out", folder / "one")
    names = sorted(path.name for path in (folder / "one").iterdir())
    assert len([name for name in names if name.endswith(".safetensors")]) > 1
    assert same_files(folder / "one", folder / "two", names) == names
    processes.alone(*exported, folder / "narrow", "--dtype", "bf16")
    assert len(same_files(folder / "one", folder / "narrow", names)) < len(names)


def same_files(one: Path, other: Path, names: list[str]) -> list[str]:
    """The names of files that are bitwise equal in two folders."""
    equal, _, _ = filecmp.cmpfiles(one, other, names, shallow=False)
    return sorted(equal)


def test_a_mistake_is_reported_once_and_ends_all(processes):
    """What both refuse, process 0 prints, and so it does where their commands differ; both exit with 2."""
    run = processes.folder / "run"
    codes, (first, second) = processes.together(*refused(processes))
    assert (codes, second) == ([2, 2], "")
    assert REFUSAL in first
    codes, (first, second) = processes.together("eval", run, own=((), ("--tokens", 64)))
    assert (codes, second) == ([2, 2], "")
    assert "process 1: command.tokens is 64" in first


@pytest.mark.soak
def test_a_process_reports_a_mistake_of_its_own(processes):
    """What one process alone refuses, it prints; the other ends, too."""
    run = processes.folder / "run"
    codes, (_, second) = processes.together("eval", run, own=((), ("--tokens", "-3")))
    assert codes[1] == 2
    assert codes[0] != 0  # a forked process has no hook for `EXIT_LOST`
    assert "tokens: is -3" in second


REFUSAL = "there is no checkpoint of step 77"


def refused(processes):
    """A command that is refused after the processes have agreed, before it compiles."""
    return (
        "eval",
        processes.folder / "run",
        "--step",
        77,
        "--data",
        processes.folder / "corpus.txt",
    )


def test_an_environment_that_differs_is_one_error(processes):
    """A variable of NCCL with two values stops both; equal ones, and names of network cards, do not."""
    differ = (("NCCL_ALGO=Tree", "FI_PROVIDER=efa"), ("NCCL_ALGO=Ring", "FI_PROVIDER=efa"))
    codes, (first, second) = processes.together(*refused(processes), variables=differ)
    assert (codes, second) == ([2, 2], "")
    assert "process 1: environment.NCCL_ALGO is Ring\n      process 0: Tree" in first
    assert "FI_PROVIDER" not in first
    equal = (("NCCL_ALGO=Tree", "NCCL_IB_HCA=mlx5_0"), ("NCCL_ALGO=Tree", "NCCL_IB_HCA=mlx5_1"))
    _, (first, _) = processes.together(*refused(processes), variables=equal)
    assert REFUSAL in first


@pytest.mark.parametrize("variable", ["NCCL_DEBUG=INFO", ""])
def test_output_of_libraries_is_shown_where_it_is_asked_for(processes, variable):
    """With NCCL_DEBUG, what C++ prints is shown from the start, and it is said where; else it is not.

    Without a GPU, that is the output of Gloo.
    """
    variables = (tuple(filter(None, [variable])),) * 2
    _, printed = processes.together(*refused(processes), variables=variables)
    for text in printed:
        assert (GLOO in text) == bool(variable)
        said = f"{variable}: output of C++ libraries goes to standard error"
        assert (said in text) == bool(variable)


SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"


def test_the_plan_says_which_flags_the_user_has_set(processes):
    """A flag that XLA_FLAGS switches off stays off; two values in config and variable are refused."""
    plan = ("plan", processes.folder / "tiny.py", "--topology", "h100:1x4")
    off = f"XLA_FLAGS=--{SCHEDULER}=false"
    assert f"  {SCHEDULER}=true\n      latency-hiding scheduler" in processes.alone(*plan)
    printed = processes.alone(off, *plan)
    assert f"  {SCHEDULER}=false\n      set in the environment; the preset has" in printed
    log = processes.folder / "refused"
    log.touch()
    refused = (off, *plan, "--xla", f"{SCHEDULER}=true")
    assert processes.servers[0](log, refused).wait() == 2
    assert "Contradicting XLA flags" in log.read_text()
