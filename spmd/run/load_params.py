"""Load the parameters of a run without its optimizer state."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.checkpoint.manager import CheckpointManager
from spmd.checkpoint.tree import OptionalState
from spmd.errors import ConfigError, Problem
from spmd.model_api.compress import COMPRESSION
from spmd.model_api.model import PRNG
from spmd.optim.ema import ema_params, ema_path
from spmd.optim.master_weights import wrap_optimizer_for_precision
from spmd.plan.lora import BASE, with_adapters
from spmd.plan.plan import ShardingPlan
from spmd.run.build import build_model, build_optimizer, build_precision
from spmd.run.load_config import other_config
from spmd.run.run_dir import RunDir
from spmd.training.state import ModelState


def restore_model(
    checkpoints: CheckpointManager, step: int | None, plan: ShardingPlan, *, ema: bool = False
) -> ModelState:
    """Restore the parameters and variables of a checkpoint, by default the newest intact one, onto the plan's mesh.

    With `ema`, the averaged parameters (`OptimizerConfig.ema_decay`).
    """
    where, trained = "params", plan.abstract_params
    if ema:
        where, trained = _averaged(plan.abstract_optimizer_state, trained)
    wanted = {**tree.at_path(where, trained), "variables": plan.abstract_variables}
    optional = [OptionalState(f"variables/{COMPRESSION}")]
    restored, _ = checkpoints.restore(step, wanted, branches=(where, "variables"), optional=optional)
    params = jax.tree.map(_cast, tree.below(where, restored), plan.abstract_params)
    return ModelState(params, restored["variables"])


def _averaged(optimizer_state: Any, params: Any) -> tuple[str, Any]:
    """Return the path of the averaged parameters in a checkpoint, and what to restore there, sharded like `params`."""
    if (path := ema_path(optimizer_state)) is None:
        fix = "train with --optimizer.ema-decay 0.999, or leave out --ema"
        problem = Problem("optimizer.ema_decay", "is 0: the run keeps no average of its parameters", fix=fix)
        raise ConfigError("There are no averaged parameters:", [problem])
    abstract = jax.tree.map(
        lambda x, leaf: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=leaf.sharding),
        ema_params(optimizer_state),
        params,
    )
    return f"optimizer_state/{path}", abstract


def read_params(run: Path, abstract: Any, step: int | None = None, *, ema: bool = False) -> Any:
    """Load the model's parameters from a run folder; LoRA adapters are merged into them.

    Args:
        abstract: `jax.ShapeDtypeStruct`s with the shardings and dtypes to load into, such as `plan.abstract_params`.
        step: None for the newest intact checkpoint.
        ema: Load the averaged parameters.
    """
    folder = RunDir(Path(run))
    with other_config():
        config = folder.config()
        model, stored = build_model(config), build_precision(config).params_dtype
    lora, key = config.lora, jax.random.key(0, impl=PRNG)
    if not lora.targets:
        trained, variables = _stored(abstract, stored), dict[str, Any]()
    else:
        base_dtype = jax.tree.leaves(jax.eval_shape(model.init_variables, key)[BASE])[0].dtype
        replicated = NamedSharding(jax.tree.leaves(abstract)[0].sharding.mesh, P())  # adapters are small
        trained = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, stored, sharding=replicated),
            jax.eval_shape(model.init, key),
        )
        variables = {BASE: _stored(abstract, base_dtype)}
    where = "params"
    if ema:
        optimizer = wrap_optimizer_for_precision(build_optimizer(config), build_precision(config))
        where, trained = _averaged(jax.eval_shape(optimizer.init, trained), trained)
    wanted = tree.at_path(where, trained) | ({"variables": variables} if variables else {})
    branches = [where, *(f"variables/{name}" for name in variables)]
    with CheckpointManager(folder.checkpoints, read_only=True) as checkpoints:
        restored, _ = checkpoints.restore(step, wanted, branches=branches)
    params = tree.below(where, restored)
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
