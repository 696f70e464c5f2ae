"""XLA still has the faults that docs/xla-faults.md describes, and the formulas of that page are right.

The reproductions are the page's own blocks. A block that runs leaves `expected`, `right` and, for a
silent fault, `wrong`. A block that is not run ends the process or raises; it runs in a forked
process, and the block below it is the message.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import forked
from tests.architecture.test_docs import Block, blocks

pytestmark = pytest.mark.compat

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "xla-faults.md"
FAULTS = {
    "Products": 3,
    "Convolutions with groups": 2,
    "Convolutions over a split dimension": 2,
    "Windows over a split dimension": 1,
    "FFTs on CPUs": 0,
    "Products of int8 on GPUs without autotuning": 0,
}
"""Heading → its silent faults."""
ON_GPUS = "Products of int8 on GPUs without autotuning"
"""The section of a fault that other machines have not."""
MENDED_IN_0_12 = ("fft_handler.cc:117",)
"""Loud faults by the beginning of their messages, which only the older end of the range of JAX has."""
LEAST_ERROR = 0.05
LARGEST_ERROR = 1e-6


@functools.cache
def sections() -> dict[str, list[Block]]:
    """Heading → the blocks below it; those above the first heading have an empty one."""
    headings, *texts = re.split(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.M)
    titles = ["", *texts[::2]]
    return {
        title: list(blocks(text))
        for title, text in zip(titles, [headings, *texts[1::2]], strict=True)
    }


def python_blocks(heading: str, not_run: bool = False) -> list[Block]:
    """The Python blocks of a section, or those of them that are marked as not run."""
    return [
        block
        for block in sections()[heading]
        if block.language == "python" and block.is_marked == not_run
    ]


def loud_faults() -> list[tuple[str, str, str]]:
    """Heading, code and message of each block that does not run."""
    found = []
    for heading, listed in sections().items():
        if heading == ON_GPUS:
            continue
        for block, after in itertools.pairwise(listed):
            if block.language == "python" and block.is_marked:
                assert after.language == "text", (
                    f"a block of {heading!r} that is not run has no message"
                )
                found.append((heading, block.code, after.code.strip()))
    return found


def run(block: Block, namespace: dict[str, Any]) -> None:
    exec(compile(block.code, f"{PAGE.name}, {block.language} block", "exec"), namespace)


def prepared() -> dict[str, Any]:
    """What the first block of the page defines."""
    namespace: dict[str, Any] = {}
    for block in python_blocks(""):
        run(block, namespace)
    return namespace


def mended(heading: str) -> str:
    """What to do when a fault is gone."""
    what = f"`Fault({heading!r}, ...)` of spmd/plan/xla_faults.py"
    if heading == "Products":
        what = "the gathers and sums of spmd/plan/partition_safe.py"
    return (
        f"XLA mended a fault: drop {what} and its part of section {heading!r} of docs/xla-faults.md"
    )


def error(result: Any, expected: Any) -> float:
    """The largest difference, relative to the largest expected value."""
    result, expected = np.asarray(result), np.asarray(expected)
    return float(np.abs(result - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("heading", [heading for heading in FAULTS if heading != ON_GPUS])
def test_fault(heading: str) -> None:
    """What a section computes as XLA splits it is wrong by far, and what its formula computes is right."""
    namespace, faults = prepared(), 0
    for block in python_blocks(heading):
        namespace.pop("wrong", None)
        run(block, namespace)
        expected = namespace["expected"]
        assert error(namespace["right"], expected) <= LARGEST_ERROR, block.code
        if "wrong" in namespace:
            faults += 1
            assert error(namespace["wrong"], expected) >= LEAST_ERROR, (
                f"{mended(heading)}:\n{block.code}"
            )
    assert faults == FAULTS[heading]


def test_sections() -> None:
    """The page has a section for each fault and no other."""
    assert list(sections()) == ["", *FAULTS]


def test_a_fault_of_gpus_is_none_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    """The block runs, and its product is right on this machine."""
    namespace = prepared()
    for block in python_blocks(ON_GPUS, not_run=True):
        run(block, namespace)
    assert capsys.readouterr().out == "0.0\n"


def run_code(arguments: list[str]) -> None:
    """Runs code in this process."""
    exec(compile(arguments[0], PAGE.name, "exec"), {})


@pytest.fixture(scope="module")
def server() -> Iterator[Callable[[Path, Sequence[object]], forked.Run]]:
    """A process that has imported everything, and forks one for each block."""
    program = "from tests import forked; from tests.numerics import test_xla_faults as t; forked.answer(t.run_code)"
    with forked.server(program, PYTHONPATH=str(ROOT), TF_CPP_MIN_LOG_LEVEL="2") as start:
        yield start


@pytest.mark.parametrize(
    ("heading", "code", "message"), loud_faults(), ids=lambda value: value[:30].splitlines()[0]
)
def test_loud_fault(
    heading: str,
    code: str,
    message: str,
    server: Callable[[Path, Sequence[object]], forked.Run],
    tmp_path: Path,
) -> None:
    """A block that is not run ends its process or raises, with the message below it, but for the line of XLA's code."""
    log = tmp_path / "log"
    setup = "".join(block.code for block in python_blocks(""))
    ended = server(log, [setup + code]).wait()
    if message.startswith(MENDED_IN_0_12) and not version("jax").startswith("0.10."):
        assert ended == 0, log.read_text(encoding="utf-8", errors="replace")
        return
    assert ended != 0, f"{mended(heading)}:\n{code}"
    printed = re.sub(r"\.cc:\d+", ".cc", log.read_text(encoding="utf-8", errors="replace"))
    assert re.sub(r"\.cc:\d+", ".cc", message) in printed, printed[-4000:]
