"""The smallest machines on which each preset of a family trains, by the memory ledger: one row of a table for each.

    python -m benchmarks.smallest_hardware llama gemma

bf16 with float32 weights and AdamW, everything split over `fsdp`, `--remat full`, one sequence of
2,048 tokens (GPT-2: 1,024) for each device; where that fits on no machine, over `tensor` 4 as well,
or with the optimizer's state in host memory. With `--lora`, adapters of rank 16 on all kernels of
attention instead. Nothing is allocated or compiled: a row is the step's trace.
"""

import argparse
import dataclasses
import importlib
import math
from collections.abc import Iterator
from typing import Any

import jax

import spmd
from spmd.analysis.topology import Topology, parse_topology
from spmd.errors import SpmdError
from spmd.hf.family import family_for
from spmd.lora.config import LoRAConfig
from spmd.run.build import make_setup, planned_mesh
from spmd.run.planned_step import estimate_step

MACHINES = {
    "v5e": (
        "v5e:1x1",
        "v5e:2x2",
        "v5e:2x4",
        "v5e:4x4",
        "v5e:4x8",
        "v5e:8x8",
        "v5e:8x16",
        "v5e:16x16",
    ),
    "H100": (
        "h100:1x1",
        "h100:1x2",
        "h100:1x4",
        "h100:1x8",
        "h100:2x8",
        "h100:4x8",
        "h100:8x8",
        "h100:16x8",
    ),
}
"""From the smallest to the largest, for each column."""

WAYS = (
    (spmd.MeshShape(fsdp=-1), (), ""),
    (spmd.MeshShape(fsdp=-1, tensor=4), (), ", tensor 4"),
    (spmd.MeshShape(fsdp=-1), ("optimizer_state",), ", optimizer state in host memory"),
)
"""A mesh, what is in host memory, and how that is told; the first that fits on any machine."""


def estimate(
    model: Any,
    rules: spmd.Rules,
    machine: Topology,
    mesh: spmd.MeshShape,
    offload: tuple[str, ...],
    lora: LoRAConfig,
) -> int:
    """Bytes on each device.

    Raises:
        SpmdError: The model does not divide over so many devices.
    """
    sequence = min(2048, getattr(model, "context", 2048))
    config = spmd.TrainConfig(
        model=dataclasses.replace(model, unroll=1),
        rules=rules,
        mesh=mesh,
        devices=machine.devices,
        precision="bf16",
        remat="full",
        offload=offload,
        lora=lora,
        data=spmd.DataConfig(sequence=sequence, batch=machine.devices),
    )
    return estimate_step(make_setup(config, planned_mesh(config)), machine.platform).total


def smallest(model: Any, names: tuple[str, ...], lora: LoRAConfig) -> str:
    """Return the first machine that the model fits on, and what a device of it holds."""
    rules = family_for(model).rules(model)
    for mesh, offload, note in WAYS:
        for machine in map(parse_topology, names):
            if mesh.tensor > machine.devices:
                continue
            try:
                total = estimate(model, rules, machine, mesh, offload, lora)
            except SpmdError:  # it does not divide over so many devices
                continue
            if total <= (machine.memory or math.inf):
                chips = f"{machine.chips} × {machine.kind}" if machine.chips > 1 else machine.kind
                return f"{chips} ({total / 2**30:.1f} GiB each{note})"
    return f"more than {names[-1]}"


def rows(family: str, lora: LoRAConfig) -> Iterator[str]:
    """One line for each published preset."""
    for name, model in importlib.import_module(f"models.{family}").PRESETS.items():
        shapes = jax.eval_shape(spmd.from_nnx(model.build).init, jax.random.key(0))
        count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
        if count < 100_000_000:  # those for tests and demos
            continue
        cells = [smallest(model, names, lora) for names in MACHINES.values()]
        yield f"| `{name}` | {count:,} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="+")
    parser.add_argument("--lora", action="store_true")
    options = parser.parse_args()
    lora = (
        LoRAConfig(targets=("attention/(q|k|v|o)_proj/kernel",), rank=16)
        if options.lora
        else LoRAConfig()
    )
    print(f"| preset | parameters | {' | '.join(MACHINES)} |\n|---|---|{'---|' * len(MACHINES)}")
    for family in options.families:
        for row in rows(family, lora):
            print(row, flush=True)


if __name__ == "__main__":
    main()
