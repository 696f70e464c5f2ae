"""`spmd export`."""

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.commands.parsing import LaunchFields, parse_flags
from spmd.commands.processes import start_devices
from spmd.data.tokenizer import load_tokenizer
from spmd.distributed.cluster_env import LaunchArgs
from spmd.errors import ConfigError, Problem, check_fields
from spmd.hf.adapter import save_adapter
from spmd.hf.family import Family, family_for, mapped_variables
from spmd.hf.folder import architectures_of, open_folder
from spmd.hf.save import parse_size, save_params
from spmd.hf.sidecar_files import sidecar_files
from spmd.lora.adapters import LORA_A
from spmd.model_interface.model import abstract_key
from spmd.precision import cast_floats
from spmd.run.build import build_base_model, build_precision
from spmd.run.config import TrainConfig
from spmd.run.load_params import read_adapters, read_magnitudes, read_params, read_variables
from spmd.run.run_dir import RunDir, is_run
from spmd.sharding.mesh import AnyMesh, MeshShape, mesh_of
from spmd.storage.address import locate
from spmd.storage.download import local_path

_Dtype = Literal["", "bf16", "bfloat16", "float32"]
_DTYPES: dict[_Dtype, Any] = {
    "bf16": jnp.bfloat16,
    "bfloat16": jnp.bfloat16,
    "float32": jnp.float32,
}


@dataclasses.dataclass(frozen=True)
class ExportCommand:
    """Export a run's parameters as a Hugging Face folder: safetensors, config.json and tokenizer.

    Parameters are loaded into host memory, so no accelerator is needed. LoRA adapters are merged,
    or written alone as a folder that `peft` loads.
    """

    run: tyro.conf.Positional[str]
    """Run folder, such as runs/demo."""
    out: str
    """Folder to write; it must not exist."""
    step: int | None = None
    """Checkpoint to use; the newest by default."""
    trained: bool = False
    """Export the trained parameters, where the run evaluates others, such as an average."""
    adapter: bool = False
    """Write the LoRA adapters alone, for `peft`."""
    dtype: _Dtype = ""
    """Dtype of the tensors; that of the parameters by default."""
    quantized_as: str = ""
    """Quantized Hugging Face folder that the run was imported from: its codes are written in place of
    values, all of which must be unchanged."""
    shard_size: str = "5GB"
    """Maximum size of a file; a larger tensor gets a file of its own."""
    devices: int | None = None
    """CPU devices that hold the parameters in each process; by default as in the run, at least 1."""
    launch_args: LaunchFields = LaunchArgs()


def run_export(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    command: ExportCommand = parse_flags(ExportCommand, arguments, "spmd export")
    began = time.perf_counter()
    run = locate(command.run)
    out = Path(command.out)
    size = parse_size(command.shard_size)
    run_dir = RunDir(run)
    config = run_dir.config()
    if command.adapter:
        return _export_adapter(command, config)
    files, values = sidecar_files(run_dir.path, config.data.tokenizer, config.model)
    family = family_for(config.model, architectures_of(values))
    start_devices(_devices(command, config), command)
    params = read_params(run, _abstract(config), command.step, trained=command.trained)
    variables = read_variables(run, _abstract_variables(config, family), command.step)
    with contextlib.ExitStack() as stack:
        quantized = None
        if command.quantized_as:
            quantized = stack.enter_context(open_folder(Path(command.quantized_as)))
        save_params(
            out,
            params,
            family,
            config.model,
            dtype=_DTYPES.get(command.dtype),
            shard_size=size,
            files=files,
            values=values or _values(config, family),
            variables=variables,
            quantized=quantized,
        )
    if jax.process_index() != 0:
        return 0
    took = time.perf_counter() - began
    print(f"{family.architectures[0]}: {tree.size(params):,} parameters in {took:.3g} s")
    print(_written(out))
    return 0


def _written(out: Path) -> str:
    """Return a folder with the names of its files."""
    names = sorted(path.name for path in out.iterdir())
    return f"{out}: {', '.join(names)}"


def _export_adapter(command: ExportCommand, config: TrainConfig) -> int:
    """Write the adapters of a run; return the exit code."""
    run = locate(command.run)
    out = Path(command.out)
    if not config.lora.targets:
        problem = Problem(
            str(run),
            "has no adapters: all parameters were trained",
            fix="export it without --adapter",
        )
        raise ConfigError("Nothing was exported:", [problem])
    start_devices(_devices(command, config), command)
    if config.lora.dora:
        adapters = read_magnitudes(run, _abstract(config), command.step, trained=command.trained)
    else:
        adapters = read_adapters(run, _mesh(), command.step, trained=command.trained)
    base = ""
    if config.init and not is_run(locate(config.init)):
        base = str(local_path(config.init).absolute())
    save_adapter(
        out,
        adapters,
        config.lora,
        family_for(config.model),
        config.model,
        shapes={path: leaf.shape for path, leaf in tree.flatten(_abstract(config)).items()},
        dtype=_DTYPES.get(command.dtype),
        base=base,
    )
    if jax.process_index() != 0:
        return 0
    print(f"adapters of rank {_ranks_text(adapters)}: {tree.size(adapters):,} parameters")
    print(_written(out))
    return 0


def _ranks_text(adapters: Any) -> str:
    """Return the rank of adapters, or the lowest and the highest."""
    ranks = set()
    for path, array in tree.flatten(adapters).items():
        if path.endswith(LORA_A):
            ranks.add(array.shape[-1])
    return " to ".join(map(str, sorted({min(ranks), max(ranks)})))


def _values(config: TrainConfig, family: Family) -> dict[str, Any]:
    """Return fields of config.json beyond the model: start and end tokens, and sequence length."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    vocab = config.model.vocab
    starts = [token for token in tokenizer.starts if token < vocab]
    ends = [token for token in tokenizer.ends if token < vocab]
    values: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    if starts:
        values["bos_token_id"] = starts[0]
    if len(ends) == 1:
        values["eos_token_id"] = ends[0]
    elif ends:
        values["eos_token_id"] = ends
    if "rope_theta" in family.write_config(config.model):
        values["max_position_embeddings"] = config.data.sequence
    return values


def _abstract(config: TrainConfig) -> Any:
    """Return the model's parameters without adapters, in the run's parameter dtype.

    Each is divided over all devices, so that a process holds its part of the model alone.
    """
    model = build_base_model(config)
    dtype = build_precision(config).params_dtype

    def init(key: jax.Array) -> Any:
        return cast_floats(model.init(key), dtype)

    return _place(jax.eval_shape(init, abstract_key()))


def _abstract_variables(config: TrainConfig, family: Family) -> Any:
    """Return the model's variables in exported checkpoints, placed as its parameters are."""
    shapes = jax.eval_shape(build_base_model(config).init_variables, abstract_key())
    return _place(mapped_variables(family, config.model, shapes))


def _place(shapes: Any) -> Any:
    """Divide each abstract array over all devices."""
    mesh = _mesh()

    def place(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, _divided(leaf.shape, mesh.size))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, shapes)


def _mesh() -> AnyMesh:
    """Return a mesh of all devices along one axis."""
    return mesh_of(MeshShape(fsdp=-1), jax.devices())


def _divided(shape: tuple[int, ...], parts: int) -> P:
    """Return the spec of an array divided over parts along its largest divisible dimension.

    Example:
        >>> tuple(_divided((3, 8, 6), 2)), tuple(_divided((3, 5), 2))
        ((None, 'fsdp', None), ())
    """
    divisible = [size for size in shape if size % parts == 0]
    if not divisible:
        return P()
    entries: list[str | None] = [None] * len(shape)
    entries[shape.index(max(divisible))] = "fsdp"
    return P(*entries)


def _devices(command: ExportCommand, config: TrainConfig) -> int:
    """Return the number of CPU devices to simulate."""
    if command.devices is None:
        return max(config.devices, 1)
    problems = check_fields(command, {"devices": "at least 1"})
    if problems:
        raise ConfigError("Nothing was exported:", problems)
    return command.devices
