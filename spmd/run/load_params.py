"""Load the parameters of a run without its optimizer state, and frozen ones from where they came from."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.checkpoint.manager import CheckpointManager
from spmd.checkpoint.manifest import read_object
from spmd.checkpoint.tree import OptionalState
from spmd.errors import CheckpointError, ConfigError, Problem
from spmd.hf.folder import CONFIG, open_folder
from spmd.hf.load import load_published
from spmd.model_api.compress import COMPRESSION
from spmd.model_api.model import PRNG, Model
from spmd.optim.ema import ema_params, ema_path
from spmd.optim.master_weights import wrap_optimizer_for_precision
from spmd.plan.lora import BASE, with_adapters
from spmd.plan.plan import ShardingPlan
from spmd.run.build import build_model, build_optimizer, build_precision
from spmd.run.config import TrainConfig
from spmd.run.load_config import other_config
from spmd.run.reloaded import Reloaded
from spmd.run.run_dir import RunDir
from spmd.sharding.mesh import AnyMesh
from spmd.training.state import ModelState

_MAX_CONFIG_BYTES = 16 << 20


def is_run(path: Path) -> bool:
    """Return true for a run folder, whose config.py is executed: never for one that may be from Hugging Face."""
    if not RunDir(path).checkpoints.is_dir() or any(path.glob("*.safetensors*")):
        return False
    try:
        return "architectures" not in read_object(path / CONFIG, _MAX_CONFIG_BYTES)
    except (OSError, ValueError):
        return True  # `RunDir.config` reports that there is no run


def frozen_base(config: TrainConfig) -> Reloaded:
    """Return the frozen parameters of adapters as a part of the state that `init` has, unless checkpoints hold it.

    They do if the config says so, if it has no `init`, and if `init` is a run with adapters: their sum is in no file.
    """
    path = Path(config.init).absolute()
    if not config.init or config.lora.save_base:
        return FROZEN
    if not is_run(path):
        return dataclasses.replace(FROZEN, origin={"path": str(path), "step": None})
    with other_config():
        has_adapters = bool(RunDir(path).config().lora.targets)
    with CheckpointManager(RunDir(path).checkpoints, read_only=True) as checkpoints:
        step = checkpoints.latest_valid()
    held = has_adapters or step is None
    return FROZEN if held else dataclasses.replace(FROZEN, origin={"path": str(path), "step": step})


def load_base(origin: Mapping[str, Any], abstract: Any) -> Any:
    """Load frozen parameters from a Hugging Face folder, or from the checkpoint of a run."""
    path = Path(origin["path"])
    if not path.is_dir():
        why = "it has the frozen parameters, and checkpoints of this run its adapters alone"
        problem = Problem(str(path), "is not there", why, "put the folder back, or a link to it")
        raise CheckpointError("Nothing was restored:", [problem])
    if origin.get("step") is not None:
        return read_params(path, abstract, origin["step"])
    with open_folder(path) as found:
        return load_published(found, abstract)


FROZEN = Reloaded(f"variables/{BASE}", load_base)
"""The frozen parameters of adapters, as a part of the state that checkpoints may lack."""


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
    optional = [OptionalState(f"variables/{COMPRESSION}"), FROZEN.optional]
    restored, record = checkpoints.restore(step, wanted, branches=(where, "variables"), optional=optional)
    restored = FROZEN.fill(restored, record)
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
        trained = _abstract_adapters(model, stored, jax.tree.leaves(abstract)[0].sharding.mesh)
        variables = {BASE: _stored(abstract, base_dtype)}
    where, trained = _trained(config, trained, ema)
    wanted = tree.at_path(where, trained) | ({"variables": variables} if variables else {})
    branches = [where, *(f"variables/{name}" for name in variables)]
    with CheckpointManager(folder.checkpoints, read_only=True) as checkpoints:
        restored, record = checkpoints.restore(step, wanted, branches=branches, optional=[FROZEN.optional])
    restored = FROZEN.fill(restored, record)
    params = tree.below(where, restored)
    if lora.targets:
        # Merged in the requested dtype: a narrower one would round the adapters' contribution away.
        base = jax.tree.map(_cast, restored["variables"][BASE], abstract)
        params = jax.jit(functools.partial(with_adapters, lora=lora), donate_argnums=0)(base, params)
    return jax.tree.map(_cast, params, abstract)


def read_adapters(run: Path, mesh: AnyMesh, step: int | None = None, *, ema: bool = False) -> Any:
    """Load the adapters of a run alone, on every device of a mesh.

    Args:
        step: None for the newest intact checkpoint.
        ema: Load the averaged adapters.
    """
    folder = RunDir(run)
    config = folder.config()
    adapters = _abstract_adapters(build_model(config), build_precision(config).params_dtype, mesh)
    where, trained = _trained(config, adapters, ema)
    with CheckpointManager(folder.checkpoints, read_only=True) as checkpoints:
        restored, _ = checkpoints.restore(step, tree.at_path(where, trained), branches=[where])
    return jax.tree.map(_cast, tree.below(where, restored), adapters)


def _trained(config: TrainConfig, params: Any, ema: bool) -> tuple[str, Any]:
    """Return where a checkpoint has the trained parameters or their average, and what to restore there."""
    if not ema:
        return "params", params
    optimizer = wrap_optimizer_for_precision(build_optimizer(config, build_model(config)), build_precision(config))
    return _averaged(jax.eval_shape(optimizer.init, params), params)


def _abstract_adapters(model: Model, dtype: Any, mesh: AnyMesh) -> Any:
    """Return the adapters of a model as abstract arrays; they are small, so that each device has them whole."""
    shapes = jax.eval_shape(model.init, jax.random.key(0, impl=PRNG))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=NamedSharding(mesh, P())), shapes)


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
