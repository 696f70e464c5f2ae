"""The layouts that the parity suite trains: a table in which every pair of choices that can go together does.

`python -m tests.parity.covering > tests/parity/layouts.txt` writes a table anew, after a choice was
added here.
"""

import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path

EXACT = "float32"
CHOICES: dict[str, tuple[str, ...]] = {
    "model": ("llama", "gpt2", "qwen2", "mixtral", "mixtral-capacity"),
    "data": ("1", "2"),
    "fsdp": ("1", "zero0", "zero1", "zero2", "zero3"),  # two devices, but for the first
    "expert": ("1", "2"),
    "sequence": ("1", "ring", "all-to-all"),
    "tensor": ("1", "width", "tokens"),
    "pipe": ("1", "gpipe", "1f1b", "interleaved"),
    "accumulate": ("1", "2"),
    "remat": ("none", "full", "selective", "save:attention_out", "offload:attention_out"),
    "precision": (EXACT, "bf16", "bf16-params"),
    "attention": ("xla", "chunked"),
    "offload": ("nothing", "optimizer_state", "params", "params+optimizer_state"),
}
"""What a layout chooses, and the choices; an axis of the mesh that is not "1" has two devices.

Of `tensor`, the choice is how the residual stream is split over it.
"""
AXES = ("pipe", "data", "fsdp", "expert", "sequence", "tensor")
DEVICES = 8

Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]


def mesh_sizes(row: Row) -> dict[str, int]:
    """The axes that a row splits."""
    return {axis: 2 for axis in AXES if row[axis] != "1"}


def is_possible(row: Row) -> bool:
    """Whether a layout is one that `spmd` does not refuse, on 2 to 8 devices."""
    offloads_params, sizes = row["offload"].startswith("params"), mesh_sizes(row)
    return (
        1 < math.prod(sizes.values()) <= DEVICES
        and not (row["expert"] != "1" and not row["model"].startswith("mixtral"))
        and not (row["sequence"] == "ring" and (row["attention"] == "xla" or row["pipe"] != "1"))
        and not (offloads_params and (row["pipe"] != "1" or row["remat"] in ("none", "selective")))
    )


def pairs(row: Row) -> Iterator[Pair]:
    """The pairs of choices that a row proves: in a precision that shows gross errors only, just those with it."""
    for pair in itertools.combinations(row.items(), 2):
        if row["precision"] == EXACT or "precision" in dict(pair):
            yield pair


def possible_pairs() -> set[Pair]:
    """The pairs that some possible row has."""
    # What no condition is about does not matter; of the rest, the most permissive choices are tried
    # beside the pair.
    beside = [
        dict.fromkeys(CHOICES, "1")
        | {"remat": "full", "offload": "nothing", "model": model, axis: CHOICES[axis][-1]}
        for model in ("llama", "mixtral")
        for axis in ("data", "fsdp")
    ]
    every = (
        ((one, a), (other, b))
        for one, other in itertools.combinations(CHOICES, 2)
        for a, b in itertools.product(CHOICES[one], CHOICES[other])
    )
    return {pair for pair in every if any(is_possible(rest | dict(pair)) for rest in beside)}


def make_table(seed: int = 0, tries: int = 200) -> list[Row]:
    """Rows that together have every possible pair: each is the best of some random ones around a missing pair."""
    rng, missing, table = random.Random(seed), possible_pairs(), list[Row]()

    def draw(pair: Pair) -> Row:
        while True:
            row = {name: rng.choice(choices) for name, choices in CHOICES.items()} | dict(pair)
            if is_possible(row):
                return row

    while missing:
        start = min(missing)
        table.append(
            max(
                (draw(start) for _ in range(tries)),
                key=lambda row: len(missing.intersection(pairs(row))),
            )
        )
        missing -= set(pairs(table[-1]))
    return table


def read_table() -> list[Row]:
    """The committed table."""
    lines = Path(__file__).with_name("layouts.txt").read_text(encoding="utf-8").splitlines()
    names, *rows = (line.split() for line in lines)
    assert names == list(CHOICES), "the table has other columns; write it anew"
    return [dict(zip(names, row, strict=True)) for row in rows]


def write_table(table: list[Row]) -> str:
    """One line for each row, in columns."""
    cells = [list(CHOICES), *(list(row.values()) for row in table)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)


if __name__ == "__main__":
    best = min((make_table(seed) for seed in range(20)), key=len)
    print(
        write_table(
            sorted(best, key=lambda row: [CHOICES[name].index(row[name]) for name in CHOICES])
        )
    )
