"""Functions of a config are told apart by what they are made of, wherever and whenever they are made."""

import dataclasses
import functools
import subprocess
import sys

import numpy as np
import optax
import pytest

from spmd.run.callables import describe_callable

SOURCE = """
PEAK = 0.5

def half(x):
    return x / 2

def make(end):
    def schedule(step, power=2, *, words={"late", "early", "soon"}):
        return half(PEAK) if step in {"a", "b", "c", "d"} else end
    return schedule
"""


def made(source, end=3):
    names = {"__name__": "config"}
    exec(source, names)
    return describe_callable(names["make"](end))


def test_equal_functions_have_equal_texts():
    """From another file, at another line; one that differs in code, constants, captured or default values does not."""
    text = made(SOURCE)
    assert text.startswith("make(PEAK=0.5, default 0=2, end=3, half=half() #")
    assert made("\n\n" + SOURCE) == text
    changes = [
        ("0.5", "0.6"),
        ("/ 2", "/ 3"),
        ("power=2", "power=3"),
        ('"c"', '"e"'),
        ("else end", "else -end"),
    ]
    others = [made(SOURCE.replace(*change)) for change in changes]
    assert len({text, made(SOURCE, 4), *others}) == len(changes) + 2


@pytest.mark.soak
def test_the_text_is_that_of_another_process():
    """Whatever the seed of hashes is, by which sets are ordered."""
    code = "from tests.unit.test_callables import made, SOURCE; print(made(SOURCE), end='')"
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert texts == {made(SOURCE)}


@dataclasses.dataclass(frozen=True)
class Steps:
    """A schedule with fields."""

    table: tuple[float, ...]

    def __call__(self, step):
        return self.table[step]


def test_what_functions_capture_is_written():
    """Schedules in schedules, arguments of partial functions, arrays by their bytes; a recursive function ends."""
    joined = optax.join_schedules([optax.constant_schedule(0.1), optax.constant_schedule(0.2)], [5])
    assert describe_callable(joined) == (
        "optax.join_schedules(boundaries=[5], schedules="
        "[optax.constant_schedule(value=0.1), optax.constant_schedule(value=0.2)])"
    )
    assert describe_callable(functools.partial(max, 3, default=None)) == "max(3, default=None)"
    assert describe_callable(Steps((0.1, 0.2))) == "Steps(table=[0.1, 0.2])"
    tables = [np.arange(3.0), np.arange(3.0), np.ones(3)]
    first, again, other = (
        describe_callable(lambda step, table=table: table[step]) for table in tables
    )
    assert first == again != other

    def countdown(step):
        return countdown(step - 1) if step else 0.0

    assert describe_callable(countdown).count("countdown") == 2
