"""`spmd export`."""

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
from spmd.commands.parsing import parse_flags
from spmd.distributed.initialize import initialize
from spmd.hf.family import Family, family_for
from spmd.hf.save import parse_size, save_params
from spmd.hf.sidecar_files import sidecar_files
from spmd.model_api.model import PRNG
from spmd.model_api.precision import cast_floats
from spmd.run.build import TrainSetup, one_device_mesh
from spmd.run.load_params import read_params
from spmd.run.run_dir import RunDir

_DTYPES = {"bf16": jnp.bfloat16, "float32": jnp.float32}


@dataclasses.dataclass(frozen=True)
class ExportCommand:
    """Writes a run's parameters as a Hugging Face folder: safetensors, config.json, the tokenizer.

    They are brought to the memory of this machine, so no accelerator is needed. Adapters are added to the parameters
    that they stand beside.
    """

    run: tyro.conf.Positional[str]
    """The run folder, such as runs/demo."""
    out: str
    """The folder to write; it must not exist."""
    step: int | None = None
    """The checkpoint to use; the newest by default."""
    dtype: Literal["", "bf16", "float32"] = ""
    """Of the tensors; empty for that of the parameters."""
    shard_size: str = "5GB"
    """What a file may hold; a tensor that is larger has one of its own."""


def run_export(arguments: list[str]) -> int:
    """Exports; the exit code."""
    command: ExportCommand = parse_flags(ExportCommand, arguments, "spmd export")
    began, run, out = time.perf_counter(), Path(command.run), Path(command.out)
    size, config = parse_size(command.shard_size), RunDir(run).config()
    files, values = sidecar_files(run, config.data.tokenizer, config.model)
    named = values.get("architectures")
    family = family_for(config.model, map(str, named) if isinstance(named, list) else ())
    initialize(config.devices or 1)  # devices of this machine, simulated ones
    setup = TrainSetup(config, one_device_mesh())
    params = read_params(run, _abstract(setup), command.step)
    dtype = _DTYPES.get(command.dtype)
    values = values or _values(setup, family)
    save_params(out, params, family, config.model, dtype=dtype, shard_size=size, files=files, values=values)
    print(
        f"{family.architectures[0]}: {tree.size(params):,} parameters in {time.perf_counter() - began:.3g} s\n"
        f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}"
    )
    return 0


def _values(setup: TrainSetup, family: Family) -> dict[str, Any]:
    """What `transformers` would otherwise make up for a model that was trained here: the tokens that begin and end a
    text, and how long one may be."""
    config, tokenizer = setup.config, setup.tokenizer
    ends = [token for token in tokenizer.ends if token < config.model.vocab]
    starts = [token for token in tokenizer.starts if token < config.model.vocab]
    values: dict[str, Any] = {
        "bos_token_id": starts[0] if starts else None,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
    }
    rotary = "rope_theta" in family.write_config(config.model)
    return {**values, "max_position_embeddings": config.data.sequence} if rotary else values


def _abstract(setup: TrainSetup) -> Any:
    """The model's own parameters, whole on one device, in the dtype that the run keeps them in."""
    sharding = NamedSharding(one_device_mesh(), P())
    shapes = jax.eval_shape(
        lambda: cast_floats(setup.whole_model.init(jax.random.key(0, impl=PRNG)), setup.precision.params_dtype)
    )
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)
