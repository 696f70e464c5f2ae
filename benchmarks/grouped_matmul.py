"""Products of experts' rows with their kernels, as the compilers of absent devices make them.

    python -m benchmarks.grouped_matmul
    python -m benchmarks.grouped_matmul --device h100:1x1

Forward and both gradients of one expert layer's kernel, in bf16, by each way there is:
`jax.lax.ragged_dot`, which the library uses on TPUs; `megablox` and `mosaic_gpu`, JAX's own Pallas
kernels; and `blocks`, a batched product, which the library uses elsewhere. A line has GiB of
temporaries, GFLOP (0 for GPUs, whose compiler counts none), and on TPUs the number of Pallas
kernels and the seconds of the compiler's cycles outside them: it counts none in a Pallas kernel.
"""

import argparse
import importlib
import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from spmd.analysis.cycles import count_cycles
from spmd.analysis.hlo import parse
from spmd.analysis.topology import Topology, parse_topology, topology_devices
from spmd.distributed.initialize import initialize
from spmd.layers.grouped_matmul import grouped_gradient, grouped_matmul

GIB = 2**30
SHAPES = {"mixtral-8x7b": (1, 40_960, 4096, 14_336), "deepseek-v3": (4, 163_840, 7168, 2048)}
"""Experts of a device, the rows it takes, and the two sides of a kernel: 4 sequences of 4096
tokens a device."""
PALLAS = "jax.experimental.pallas.ops"
TILES = (512, 512, 512)


def ragged(
    x: jax.Array, dy: jax.Array, kernel: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, ...]:
    return (
        grouped_matmul(x, kernel, sizes),
        grouped_matmul(dy, kernel, sizes, transposed=True),
        grouped_gradient(x, dy, sizes, jnp.float32),
    )


def megablox(
    x: jax.Array, dy: jax.Array, kernel: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, ...]:
    kernels = importlib.import_module(f"{PALLAS}.tpu.megablox.gmm")  # the package hides the module
    return (
        kernels.gmm(x, kernel, sizes, x.dtype, TILES),
        kernels.gmm(dy, kernel, sizes, x.dtype, TILES, transpose_rhs=True),
        kernels.tgmm(x.swapaxes(0, 1), dy, sizes, jnp.float32, TILES),
    )


def mosaic_gpu(
    x: jax.Array, dy: jax.Array, kernel: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, ...]:
    products, gradients = (
        importlib.import_module(f"{PALLAS}.gpu.{name}_mgpu")
        for name in ("ragged_dot", "transposed_ragged_dot")
    )
    tiles = {
        "block_m": 128,
        "block_n": 128,
        "block_k": 64,
        "max_concurrent_steps": 4,
        "grid_block_n": 1,
    }
    return (
        products.ragged_dot(x, kernel, group_sizes=sizes, **tiles),
        products.ragged_dot(dy, kernel, group_sizes=sizes, transpose_rhs=True, **tiles),
        gradients.transposed_ragged_dot(x, dy, group_sizes=sizes, **tiles),
    )


def blocks(
    x: jax.Array, dy: jax.Array, kernel: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, ...]:
    x, dy = (array.reshape(kernel.shape[0], -1, array.shape[-1]) for array in (x, dy))
    return (
        grouped_matmul(x, kernel, None),
        grouped_matmul(dy, kernel, None, transposed=True),
        grouped_gradient(x, dy, None, jnp.float32),
    )


def measure(
    way: Callable[..., tuple[jax.Array, ...]], shape: tuple[int, ...], topology: Topology
) -> dict[str, float]:
    """Compile for one device of a machine."""
    experts, rows, width, hidden = shape
    mesh = spmd.make_mesh(devices=topology_devices(topology)[:1])
    where = NamedSharding(mesh, P())
    shapes = ((rows, width), (rows, hidden), (experts, width, hidden))
    arrays = [jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=where) for dims in shapes]
    sizes = jax.ShapeDtypeStruct((experts,), jnp.int32, sharding=where)
    compiled = (
        jax.jit(jax.shard_map(way, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
        .lower(*arrays, sizes)
        .compile()
    )
    text, memory, costs = (
        compiled.as_text() or "",
        compiled.memory_analysis(),
        compiled.cost_analysis() or {},
    )
    found = {
        "temporaries": round(memory.temp_size_in_bytes / GIB, 3),
        "gflop": round(costs.get("flops", 0) / 1e9),
    }
    cycles = count_cycles(parse(text), {})
    if cycles:
        found |= {"seconds": round(cycles.to_json(topology.chip.clock)["seconds"], 4)}
        found |= {"kernels": cycles.uncounted.get("Pallas kernels", 0)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", default="v5p:2x2x1", help="machine, as of `spmd plan --topology`"
    )
    topology = parse_topology(parser.parse_args().device)
    initialize(0, target_platform=topology.platform)
    for name, shape in SHAPES.items():
        for way in (ragged, megablox if topology.platform == "tpu" else mosaic_gpu, blocks):
            try:
                found = measure(way, shape, topology)
            except (
                jax.errors.JaxRuntimeError,
                AttributeError,
            ) as error:  # some ask for devices
                found = {"refused": f"{type(error).__name__}: {error}".partition("\n")[0][:200]}
            print(
                json.dumps({"layer": name, "by": way.__name__, "device": str(topology), **found}),
                flush=True,
            )


if __name__ == "__main__":
    main()
