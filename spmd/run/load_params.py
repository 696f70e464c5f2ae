"""Load the parameters of a run without its optimizer state."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.checkpoint.manager import CheckpointManager
from spmd.checkpoint.tree import OptionalState
from spmd.model_api.compress import COMPRESSION
from spmd.model_api.model import PRNG
from spmd.plan.lora import BASE, with_adapters
from spmd.plan.plan import ShardingPlan
from spmd.run.build import build_model, build_precision
from spmd.run.load_config import other_config
from spmd.run.run_dir import RunDir
from spmd.training.state import ModelState


def restore_model(checkpoints: CheckpointManager, step: int | None, plan: ShardingPlan) -> ModelState:
    """Restore the parameters and variables of a checkpoint, by default the newest intact one, onto the plan's mesh."""
    wanted = {"params": plan.abstract_params, "variables": plan.abstract_variables}
    optional = [OptionalState(f"variables/{COMPRESSION}")]
    restored, _ = checkpoints.restore(step, wanted, branches=("params", "variables"), optional=optional)
    return ModelState(restored["params"], restored["variables"])


def read_params(run: Path, abstract: Any, step: int | None = None) -> Any:
    """Load the model's parameters from a run folder; LoRA adapters are merged into them.

    Args:
        abstract: `jax.ShapeDtypeStruct`s with the shardings and dtypes to load into, such as `plan.abstract_params`.
        step: None for the newest intact checkpoint.
    """
    folder = RunDir(Path(run))
    with other_config():
        config = folder.config()
        model, stored = build_model(config), build_precision(config).params_dtype
    lora, key = config.lora, jax.random.key(0, impl=PRNG)
    if not lora.targets:
        wanted, branches = {"params": _stored(abstract, stored)}, ["params"]
    else:
        base_dtype = jax.tree.leaves(jax.eval_shape(model.init_variables, key)[BASE])[0].dtype
        replicated = NamedSharding(jax.tree.leaves(abstract)[0].sharding.mesh, P())  # adapters are small
        adapters = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, stored, sharding=replicated),
            jax.eval_shape(model.init, key),
        )
        wanted = {"params": adapters, "variables": {BASE: _stored(abstract, base_dtype)}}
        branches = ["params", f"variables/{BASE}"]
    with CheckpointManager(folder.checkpoints, read_only=True) as checkpoints:
        restored, _ = checkpoints.restore(step, wanted, branches=branches)
    params = restored["params"]
    if lora.targets:
        # Merged in the requested dtype: a narrower one would round the adapters' contribution away.
        base = jax.tree.map(_cast, restored["variables"][BASE], abstract)
        params = jax.jit(functools.partial(with_adapters, lora=lora), donate_argnums=0)(base, params)
    return jax.tree.map(_cast, params, abstract)


def _stored(abstract: Any, dtype: Any) -> Any:
    """Return the arrays to restore: in device memory, in the dtype of the checkpoint."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape,
            dtype if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype,
            sharding=NamedSharding(leaf.sharding.mesh, leaf.sharding.spec),
        ),
        abstract,
    )


def _cast(array: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.device_put(array if array.dtype == leaf.dtype else array.astype(leaf.dtype), leaf.sharding)
