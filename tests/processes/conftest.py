"""Where the runs of a test are, on a disk or in a bucket of a real server, and the signals that they know."""

import itertools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.object_stores import Server, environment, s3_server

NUMBER = itertools.count()


@pytest.fixture(scope="session")
def s3_of_session() -> Iterator[Server]:
    """A server of S3, which this process and its children find by their variables."""
    with s3_server() as server, environment(server.environment):
        yield server


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest) -> Callable[[Path], Path | str]:
    """The run folder for a path of a test: the path itself, or an address in the bucket."""
    if request.param == "disk":
        return lambda path: path
    server: Server = request.getfixturevalue("s3_of_session")
    return lambda path: server.address(f"placed-{next(NUMBER)}/{path.name}")


@pytest.fixture(autouse=True)
def default_hang_up() -> Iterator[None]:
    """A hang-up is not ignored, also if `nohup` started the tests: what they start inherits that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
