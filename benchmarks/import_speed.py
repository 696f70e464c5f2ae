"""How fast a Hugging Face folder is read into shards and how much memory that takes, in one JSON line.

    python benchmarks/import_speed.py --gib 2 --repeats 5

Writes a synthetic checkpoint of Llama's shape in several files. Each of the repeats reads it in two
processes in turn: `load_params` into the shards of four simulated devices, and all tensors by the
safetensors library alone, which are kept, as parameters are. `time_ratio` is that of the medians,
and `over_shards_of_largest_tensor` the highest peak of memory beyond what the process had and
beyond the shards, as a part of the largest tensor. With `--command` there is a third one: `spmd
import`, which writes a checkpoint as well.
"""

import argparse
import contextlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from spmd import tree
from spmd.cli import main as spmd
from spmd.distributed.initialize import initialize
from spmd.hf.family import Family, family_for, tensor_sources
from spmd.hf.load import load_params
from spmd.hf.safetensors import write_safetensors
from spmd.models.decoder import DecoderConfig
from spmd.optim.config import OptimizerConfig, make_optimizer
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import ShardingPlan, make_plan
from spmd.sharding.mesh import MeshShape, mesh_of
from spmd.tree import human_bytes

FILES = 4
DEVICES = 4
SHAPE = DecoderConfig(vocab=32_000, d_model=2048, layers=1, heads=32, kv_heads=8, d_ff=5632)
SMALL = DecoderConfig(vocab=8192, d_model=1024, layers=1, heads=16, kv_heads=4, d_ff=2816)
DTYPES = {"float32": np.dtype(np.float32), "bf16": np.dtype(jnp.bfloat16)}


def shape_of(gib: float, dtype: str) -> DecoderConfig:
    """Return a Llama with as many layers as fill so much memory."""
    shape = SHAPE if gib >= 1 else SMALL
    ends, layer = 2 * shape.vocab * shape.d_model, shape.matmul_params - shape.d_model * shape.vocab
    layers = round((gib * 2**30 / DTYPES[dtype].itemsize - ends) / layer)
    return DecoderConfig(**{**vars(shape), "layers": max(1, layers)})


def plan_of(config: DecoderConfig, dtype: str) -> ShardingPlan:
    """Return the plan of its parameters over four devices, in the dtype of the files."""
    mesh = mesh_of(MeshShape(fsdp=DEVICES), jax.devices(), MeshShape().sizes)
    precision = "float32" if dtype == "float32" else "bf16-params"
    optimizer = make_optimizer(OptimizerConfig(), 1, ("layers",))
    return make_plan(
        mesh,
        family_for(config).rules(config),
        from_nnx(config.build),
        optimizer,
        precision=precision,
    )


def write(folder: Path, config: DecoderConfig, dtype: str) -> int:
    """Write the folder; the bytes of its largest tensor."""
    family: Family = family_for(config)
    shapes = {leaf.path: leaf.shape for leaf in plan_of(config, dtype).params}
    kinds = {
        name: jax.ShapeDtypeStruct(source.tensor_shape, DTYPES[dtype])
        for source in tensor_sources(family.names(config), shapes).values()
        for _, name in source.tensors()
    }
    names, index = list(kinds), {}
    for number in range(FILES):
        part = {name: kinds[name] for name in names[number::FILES]}
        file = f"model-{number + 1:05}-of-{FILES:05}.safetensors"
        rng = np.random.default_rng(number)
        values = (
            rng.standard_normal(kind.shape, np.float32).astype(kind.dtype) for kind in part.values()
        )
        write_safetensors(folder / file, part, values, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    about = {"architectures": list(family.architectures), **family.write_config(config)}
    (folder / "config.json").write_text(json.dumps(about))
    return max(kind.size * kind.dtype.itemsize for kind in kinds.values())


def memory() -> int:
    """Bytes that this process has in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def peak() -> int:
    """Return the most bytes that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(folder: Path, config: DecoderConfig, dtype: str, reader: str) -> dict[str, float]:
    """Read the folder in this process.

    Seconds, and bytes beyond those of before and of what was read.
    """
    abstract = plan_of(config, dtype).abstract_params
    # What belongs to no tensor is there before: the backends, and what NumPy and JAX do for the
    # first time.
    jax.block_until_ready(
        [jax.device_put(np.ones((1024, 1024), np.float32).T, device) for device in jax.devices()]
    )
    before, began = memory(), time.perf_counter()
    if reader == "ours":
        kept = jax.block_until_ready(load_params(folder, abstract))
        seconds = time.perf_counter() - began
        held = sum(
            shard.data.nbytes for leaf in jax.tree.leaves(kept) for shard in leaf.addressable_shards
        )
    else:
        arrays = []
        for path in sorted(folder.glob("*.safetensors")):
            with safetensors.safe_open(path, "np") as file:
                arrays += [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
        seconds, held = time.perf_counter() - began, sum(array.nbytes for array in arrays)
    return {"seconds": seconds, "over": peak() - before - held}


def measure_command(folder: Path, config: DecoderConfig, dtype: str) -> dict[str, float]:
    """Run the whole command in this process; bytes beyond those of before and of the shards."""
    shards = sum(leaf.bytes_per_device for leaf in plan_of(config, dtype).params) * DEVICES
    precision = "float32" if dtype == "float32" else "bf16-params"
    before, began = memory(), time.perf_counter()
    flags = ["--mesh.fsdp", str(DEVICES), "--devices", str(DEVICES), "--precision", precision]
    with tempfile.TemporaryDirectory() as out:
        with contextlib.suppress(SystemExit):
            spmd(["import", str(folder), "--out", f"{out}/run", *flags])
        assert Path(out, "run").is_dir(), "the import failed"
    return {"seconds": time.perf_counter() - began, "over": peak() - before - shards}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--command", action="store_true")
    parser.add_argument("--inside", nargs=2, metavar=("READER", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    config = shape_of(options.gib, options.dtype)
    initialize(DEVICES)
    if options.inside:
        reader, folder = options.inside[0], Path(options.inside[1])
        run = measure_command if reader == "command" else lambda *about: measure(*about, reader)
        print(json.dumps(run(folder, config, options.dtype)))
        return
    found: dict[str, list[dict[str, float]]] = {
        "ours": [],
        "safetensors": [],
        **({"command": []} if options.command else {}),
    }
    with tempfile.TemporaryDirectory() as directory:
        largest = write(Path(directory), config, options.dtype)
        size = sum(path.stat().st_size for path in Path(directory).glob("*.safetensors"))
        for _ in range(options.repeats):
            for reader, runs in found.items():
                about = [
                    "--gib",
                    str(options.gib),
                    "--dtype",
                    options.dtype,
                    "--inside",
                    reader,
                    directory,
                ]
                done = subprocess.run(
                    [sys.executable, __file__, *about], capture_output=True, text=True, check=True
                )
                runs.append(json.loads(done.stdout.splitlines()[-1]))
    seconds = {
        reader: statistics.median(run["seconds"] for run in runs) for reader, runs in found.items()
    }
    over = {reader: max(run["over"] for run in runs) for reader, runs in found.items()}
    print(
        json.dumps(
            {
                "read": f"{human_bytes(size)} of {options.dtype} in {FILES} files",
                "parameters": tree.size(plan_of(config, options.dtype).abstract_params),
                "seconds": {reader: round(value, 3) for reader, value in seconds.items()},
                "time_ratio": round(seconds["ours"] / seconds["safetensors"], 3),
                "largest_tensor": human_bytes(largest),
                "over_shards": {reader: human_bytes(value) for reader, value in over.items()},
                "over_shards_of_largest_tensor": {
                    reader: round(value / largest, 3) for reader, value in over.items()
                },
            }
        )
    )


if __name__ == "__main__":
    main()
