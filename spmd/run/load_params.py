"""The parameters of a run, without the rest of its state."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.checkpoint.manager import CheckpointManager
from spmd.model_api.model import PRNG
from spmd.plan.lora import BASE, with_adapters
from spmd.plan.plan import ShardingPlan
from spmd.run.build import TrainSetup
from spmd.run.run_dir import RunDir
from spmd.sharding.mesh import MeshShape, abstract_mesh
from spmd.train.state import ModelState


def restore_model(checkpoints: CheckpointManager, step: int | None, plan: ShardingPlan) -> ModelState:
    """The parameters and variables of a checkpoint; no optimizer state is read or made.

    Args:
        checkpoints: Of a run, or of an import.
        step: Which checkpoint, None for the newest that is as it was sealed.
        plan: The run's, on any mesh with devices.

    Raises:
        CheckpointError: As for `CheckpointManager.restore`.
    """
    wanted = {"params": plan.abstract_params, "variables": plan.abstract_variables}
    restored, _ = checkpoints.restore(step, wanted, branches=("params", "variables"))
    return ModelState(restored["params"], restored["variables"])


def read_params(run: Path, abstract: Any, step: int | None = None) -> Any:
    """The model's parameters as a run has them, where it was fine-tuned with its adapters in them.

    Args:
        run: The run folder.
        abstract: The parameters as `jax.ShapeDtypeStruct`s with shardings, such as `plan.abstract_params`; they are
            cast to these dtypes.
        step: Which checkpoint, None for the newest that is as it was sealed.

    Raises:
        CheckpointError: There is no such checkpoint, or it is of another model.
    """
    folder = RunDir(Path(run))
    setup = TrainSetup(folder.config(), abstract_mesh(MeshShape()))
    lora, key = setup.config.lora, jax.random.key(0, impl=PRNG)
    if not lora.targets:
        wanted, branches = {"params": _stored(abstract, setup.precision.params_dtype)}, ["params"]
    else:
        kept = jax.tree.leaves(jax.eval_shape(setup.model.init_variables, key)[BASE])[0].dtype
        whole = NamedSharding(jax.tree.leaves(abstract)[0].sharding.mesh, P())  # adapters are small
        adapters = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, setup.precision.params_dtype, sharding=whole),
            jax.eval_shape(setup.model.init, key),
        )
        wanted = {"params": adapters, "variables": {BASE: _stored(abstract, kept)}}
        branches = ["params", f"variables/{BASE}"]
    with CheckpointManager(folder.checkpoints, read_only=True) as checkpoints:
        restored, _ = checkpoints.restore(step, wanted, branches=branches)
    params = restored["params"]
    if lora.targets:
        # In the dtype that is asked for: what adapters change would be lost in a narrower one.
        base = jax.tree.map(_as, restored["variables"][BASE], abstract)
        params = jax.jit(functools.partial(with_adapters, lora=lora), donate_argnums=0)(base, params)
    return jax.tree.map(_as, params, abstract)


def _stored(abstract: Any, dtype: Any) -> Any:
    """Where to restore to: in the memory of devices, in the dtype of the checkpoint."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape,
            dtype if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype,
            sharding=NamedSharding(leaf.sharding.mesh, leaf.sharding.spec),
        ),
        abstract,
    )


def _as(array: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """The array in the dtype and the place that are asked for."""
    return jax.device_put(array if array.dtype == leaf.dtype else array.astype(leaf.dtype), leaf.sharding)
