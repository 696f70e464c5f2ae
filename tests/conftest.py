"""Every test sees eight simulated devices, strict rank promotion, and warnings as errors (see pyproject).

Machine code is made as fast as can be, here and in processes that tests start, which makes the
suite several times faster; XLA's programs are as optimised as ever. Processes that tests start
share one folder of compiled programs. Tests themselves read none back: XLA:CPU does not keep the
order of collectives in such programs, and pipelines hang.

A test belongs to a tier by the folder it is in, or by its own mark (see pyproject); what a run
leaves out is counted.
"""

import gc
import hashlib
import os
import platform
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from tests import durations
from tests.programs import FAST_TO_COMPILE, forget_programs
from tests.tiers import LONG_ROWS

TESTS = Path(__file__).parent


def programs_folder() -> Path:
    """The folder of compiled programs: one for each JAX and each kind of processor, whose machine code they are."""
    processor = platform.machine() + platform.processor()
    information = Path("/proc/cpuinfo")
    if information.exists():
        lines = information.read_text(encoding="utf-8").splitlines()
        processor += "".join(
            sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
        )
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kind = hashlib.sha256(processor.encode()).hexdigest()[:12]
    return caches / "spmd-tests" / f"jax-{version('jax')}-{kind}"


os.environ |= FAST_TO_COMPILE
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)

import jax  # noqa: E402 (JAX and XLA read variables when they are imported)
import pytest  # noqa: E402

from spmd.parity import reference  # noqa: E402
from spmd.sharding.mesh import simulate_devices  # noqa: E402

# of the processes that tests start
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(programs_folder())
reference.TWINS = 2  # of 3: no more is allowed to differ, and a comparison is half a second shorter
gc.set_threshold(50_000)  # tracing makes many objects and few cycles
simulate_devices(8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session", autouse=True)
def eight_devices() -> None:
    """Devices are asserted, never skipped for."""
    assert jax.device_count() == 8


@pytest.fixture(scope="module", autouse=True)
def room_for_programs() -> Iterator[None]:
    """After a file, programs are forgotten where there are many."""
    yield
    forget_programs()


# Tiers: which tests there are of each, which a run leaves out, and in which order the others run.

BY_FOLDER = ("unit", "soak", "architecture")
"""Folders whose tests are all of the tier of that name."""
COMMANDS = {
    "unit": "make test",
    "compat": "make test",
    "other": "make test",
    "soak": "make soak, make parity",
    "architecture": "make check",
}
"""Tier → what runs it."""
LEFT_OUT: Counter[str] = Counter()


def tier_of(item: pytest.Item) -> str:
    """The tier of a test."""
    return next(
        (
            tier
            for tier in ("soak", "architecture", "unit", "compat")
            if item.get_closest_marker(tier)
        ),
        "other",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Marks tests by their folders before pytest chooses by mark; then the files that take longest come first."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in BY_FOLDER:
            item.add_marker(folder)
        if item.nodeid in LONG_ROWS:
            item.add_marker("soak")
    yield
    spent = durations.by_file(durations.read())
    items.sort(key=lambda item: -spent.get(item.nodeid.partition("::")[0], 0.0))


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Counts what a choice by mark leaves out."""
    LEFT_OUT.update(tier_of(item) for item in items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hands the counts of a worker to the process that prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["skipped_batches"] = dict(LEFT_OUT)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Says how many tests were not run, and which command runs them."""
    for tier, count in sorted(LEFT_OUT.items()):
        terminalreporter.write_line(f"not run: {count} {tier} tests ({COMMANDS[tier]})")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Takes over a worker's counts; all workers have the same."""
    if not LEFT_OUT:
        LEFT_OUT.update(getattr(node, "workeroutput", {}).get("skipped_batches", {}))


# Durations.


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--record FILE` writes how long each test took."""
    parser.addoption("--record", type=Path, help="write the seconds of each test into this file")


def pytest_configure(config: pytest.Config) -> None:
    """Records where that is asked for, in the process that hears of all tests."""
    if config.option.record and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config.option.record))


class Recorder:
    """Adds up the seconds of each test, its fixtures included."""

    def __init__(self, path: Path) -> None:
        self.path, self.seconds = path, Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts setup, call and teardown."""
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Writes the file."""
        durations.write(self.seconds, self.path)
