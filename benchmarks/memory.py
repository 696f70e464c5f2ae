"""The ledger's estimate against the compiler, one JSON line for each setting.

    python benchmarks/memory.py llama3-8b v5e:16x16 --mesh fsdp=32,tensor=8 --batch 32 --sequence
    2048 --compile

Without `--compile` the lines hold the estimate alone, which takes a second each.
"""

import argparse
import dataclasses
import json
from typing import Any

import jax

from spmd.analysis.topology import compiler_versions, parse_topology
from spmd.distributed.initialize import initialize
from spmd.run.build import make_setup, planned_mesh
from spmd.run.load_config import load_config
from spmd.run.planned_step import compile_step, estimate_step, topology_mesh
from spmd.sharding.mesh import MeshShape


def measure(
    options: argparse.Namespace, zero: int, remat: str, offload: tuple[str, ...]
) -> dict[str, Any]:
    config, topology = load_config(options.config), parse_topology(options.topology)
    changes: dict[str, Any] = {
        "zero": zero,
        "remat": remat,
        "offload": offload,
        "devices": topology.devices,
    }
    if options.mesh:
        sizes = (axis.split("=") for axis in options.mesh.split(","))
        changes["mesh"] = MeshShape(**{axis: int(size) for axis, size in sizes})
    sizes = {
        "batch": options.batch or config.data.batch,
        "sequence": options.sequence or config.data.sequence,
    }
    changes["data"] = dataclasses.replace(config.data, **sizes)
    if options.layers:
        changes["model"] = dataclasses.replace(config.model, layers=options.layers)
    config = dataclasses.replace(config, **changes)
    setup = make_setup(
        config,
        topology_mesh(config.mesh, topology, config.slices.sizes)
        if options.compile
        else planned_mesh(config),
    )
    estimate = estimate_step(setup, topology.platform)
    line = {
        "config": options.config,
        "topology": topology.name,
        "mesh": options.mesh,
        **sizes,
        "zero": zero,
    }
    line |= {
        "remat": remat,
        "offload": list(offload),
        "estimated": estimate.total,
        "limit": topology.memory,
    }
    if options.compile:
        try:
            compiled = compile_step(setup).memory
            line |= {"compiled": compiled and compiled.to_json()}
            line |= {"ratio": compiled and round(estimate.total / compiled.total, 3)}
        except MemoryError as error:
            line |= {"refused": str(error)}
    return line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("topology")
    parser.add_argument("--mesh", default="", help="such as fsdp=32,tensor=8")
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--sequence", type=int, default=0)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--zero", type=int, nargs="+", default=[3])
    parser.add_argument("--remat", nargs="+", default=["full"])
    parser.add_argument(
        "--offload",
        nargs="+",
        default=["none"],
        help="none, optimizer_state, optimizer_state,params",
    )
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    topology = parse_topology(options.topology)
    simulated = topology.devices if topology.platform == "cpu" else 0
    initialize(
        simulated if options.compile else 0, target_platform="" if simulated else topology.platform
    )
    jax.config.update("jax_platforms", "cpu")
    for zero in options.zero:
        for remat in options.remat:
            for offload in options.offload:
                held = () if offload == "none" else tuple(offload.split(","))
                print(
                    json.dumps(
                        measure(options, zero, remat, held) | {"versions": compiler_versions()}
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()
