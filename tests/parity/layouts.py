"""The layouts that the parity suite trains: a table in which every pair of choices that can go together does.

`python -m tests.parity.layouts > tests/parity/layouts.txt` writes a table anew, after a choice was
added here.
"""

import math
from pathlib import Path

from tests.parity.covering import Pair, Row, Space

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


def mesh_sizes(row: Row) -> dict[str, int]:
    """The axes that a row splits."""
    return {axis: 2 for axis in AXES if row[axis] != "1"}


def is_possible(row: Row) -> bool:
    """Whether a layout is one that `spmd` does not refuse, on 2 to 8 devices."""
    offloads_params, sizes = row["offload"].startswith("params"), mesh_sizes(row)
    return (
        1 < math.prod(sizes.values()) <= DEVICES
        and not (row["expert"] != "1" and not row["model"].startswith("mixtral"))
        and not (row["sequence"] == "ring" and row["attention"] == "xla")
        and not (offloads_params and (row["pipe"] != "1" or row["remat"] in ("none", "selective")))
    )


def is_proven(row: Row, pair: Pair) -> bool:
    """Whether a row proves a pair: in a precision that shows gross errors only, just those with it."""
    return row["precision"] == EXACT or "precision" in dict(pair)


# The most permissive choices of what a condition is about.
BESIDE = tuple(
    dict.fromkeys(CHOICES, "1")
    | {"remat": "full", "offload": "nothing", "model": model, axis: CHOICES[axis][-1]}
    for model in ("llama", "mixtral")
    for axis in ("data", "fsdp")
)
LAYOUTS = Space(Path(__file__).with_name("layouts.txt"), CHOICES, is_possible, BESIDE, is_proven)

if __name__ == "__main__":
    print(LAYOUTS.text(LAYOUTS.smallest_table()))
