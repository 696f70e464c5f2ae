"""Load the parameters of a run without its optimizer state, and frozen ones from their origin."""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.checkpoint.manager import CheckpointManager
from spmd.checkpoint.tree import OptionalState
from spmd.errors import CheckpointError, Problem
from spmd.hf.folder import open_folder
from spmd.hf.load import load_published
from spmd.lora.adapters import BASE, whole_magnitudes, with_adapters
from spmd.lora.config import LoRAConfig
from spmd.lora.quantized_base import decode_base, store_base
from spmd.model_interface.model import PRNG, Model, abstract_key
from spmd.model_interface.wrapped_param import abstract_params, is_stored
from spmd.optim.master_weights import wrap_optimizer_for_precision
from spmd.plan.plan import ShardingPlan
from spmd.run.build import build_model, build_optimizer, build_precision
from spmd.run.config import TrainConfig
from spmd.run.external_state import ExternalState
from spmd.run.load_config import other_config
from spmd.run.run_dir import RunDir, is_run
from spmd.run.transforms import TRANSFORMS
from spmd.sharding.mesh import AnyMesh
from spmd.sharding.optimizer_state import followed_params
from spmd.sharding.rules import audit_spec
from spmd.storage.address import Location, address_of, is_address, locate
from spmd.training.evaluated_params import (
    EvaluationPoint,
    evaluation_point,
    place_params,
    plan_evaluation_point,
    trained_point,
)
from spmd.training.state import ModelState


def frozen_base(config: TrainConfig) -> ExternalState:
    """Return the frozen parameters of adapters, as a part of the state to load from `init`.

    Checkpoints hold it if the config says so, if it has no `init`, and if `init` is a run with
    adapters: their sum is in no file.
    """
    if not config.init or config.lora.save_base:
        return FROZEN
    path = _absolute(config.init)
    if not is_run(path):
        return dataclasses.replace(FROZEN, origin={"path": address_of(path), "step": None})
    with other_config():
        has_adapters = bool(RunDir(path).config().lora.targets)
    with CheckpointManager(RunDir(path).checkpoints, read_only=True) as checkpoints:
        step = checkpoints.latest_valid()
    if has_adapters or step is None:
        return FROZEN
    return dataclasses.replace(FROZEN, origin={"path": address_of(path), "step": step})


def load_base(origin: Mapping[str, Any], abstract: Any) -> Any:
    """Load frozen parameters from a Hugging Face folder, or from the checkpoint of a run."""
    path = locate(origin["path"])
    if not (is_run(path) or is_address(origin["path"]) or Path(origin["path"]).is_dir()):
        why = "it has the frozen parameters, and checkpoints of this run its adapters alone"
        problem = Problem(str(path), "is not there", why, "put the folder back, or a link to it")
        raise CheckpointError("Nothing was restored:", [problem])
    if origin.get("step") is not None:
        params = read_params(path, abstract_params(abstract), origin["step"], trained=True)
        return store_base(params, abstract)
    with open_folder(path) as found:
        return load_published(found, abstract)


def _absolute(text: str) -> Location:
    """Return a location, with an absolute path if it is local."""
    location = locate(text)
    if isinstance(location, Path):
        return location.absolute()
    return location


FROZEN = ExternalState(f"variables/{BASE}", load_base)
"""The frozen parameters of adapters, as a part of the state that checkpoints may lack."""


def restore_model(
    checkpoints: CheckpointManager, step: int | None, plan: ShardingPlan, *, trained: bool = False
) -> ModelState:
    """Restore the parameters and variables of a checkpoint onto the plan's mesh.

    The parameters are those that the run evaluates, or with `trained` those that its gradients are
    taken at. `step` is None for the newest intact checkpoint.
    """
    point = trained_point(plan.abstract_params) if trained else plan_evaluation_point(plan)
    optional = [OptionalState(f"variables/{each.name}") for each in TRANSFORMS]
    optional.append(FROZEN.optional)
    params, variables = _restore(
        checkpoints, step, point, plan.abstract_variables, ["variables"], optional
    )
    return ModelState(place_params(params, plan.abstract_params), variables)


def _restore(
    checkpoints: CheckpointManager,
    step: int | None,
    point: EvaluationPoint,
    variables: Any,
    branches: Sequence[str],
    optional: Sequence[OptionalState],
) -> tuple[Any, Any]:
    """Return the parameters at a point, as they are computed, and the variables of a checkpoint.

    Other arrays of a checkpoint are an error below `branches`, and where the point takes a tree
    like the parameters.
    """
    params = tree.flatten(point.like)
    heads = {_without_param(path, params) for path in point.arrays}
    wanted = {**point.arrays, "variables": variables}
    restored, record = checkpoints.restore(
        step,
        wanted,
        branches=[*sorted(heads), *branches],
        optional=optional,
    )
    restored = FROZEN.fill(restored, record)
    arrays = {path: restored[path] for path in point.arrays}
    return point.compute(arrays), restored["variables"]


def _without_param(path: str, params: Collection[str]) -> str:
    """Return the path of an array without the longest path of a parameter at its end, if any."""
    ends = [f"/{param}" for param in params if path.endswith(f"/{param}")]
    return path.removesuffix(max(ends, key=len, default=""))


def read_params(
    run: Location, abstract: Any, step: int | None = None, *, trained: bool = False
) -> Any:
    """Load the model's parameters from a run folder; LoRA adapters are merged into them.

    Args:
        abstract: `jax.ShapeDtypeStruct`s with the shardings and dtypes to load into, such as
            `plan.abstract_params`.
        step: None for the newest intact checkpoint.
        trained: Load the parameters that gradients are taken at, not those that the run evaluates.
    """
    lora, params, base = _read_trained(run, abstract, step, trained=trained)
    if base is not None:
        # Merged in the requested dtype: a narrower one would round the adapters' contribution away.
        merge = jax.jit(functools.partial(with_adapters, lora=lora), donate_argnums=0)
        params = merge(base, params)
    return place_params(params, abstract)


def _read_trained(
    run: Location, abstract: Any, step: int | None, *, trained: bool
) -> tuple[LoRAConfig, Any, Any]:
    """Return a run's settings of adapters, its trained parameters, and the frozen ones beside them.

    The last are decoded and placed as `abstract`; None without adapters.
    """
    folder = RunDir(run)
    with other_config():
        config = folder.config()
        model = build_model(config)
        stored = build_precision(config).params_dtype
    variables = dict[str, Any]()
    if config.lora.targets:
        mesh = jax.tree.leaves(abstract)[0].sharding.mesh
        own = _abstract_adapters(model, stored, mesh)
        variables[BASE] = _stored_base(model, abstract)
    else:
        own = _stored(abstract, stored)
    point = _point(config, own, trained)
    branches = [f"variables/{name}" for name in variables]
    with CheckpointManager(folder.checkpoints, read_only=True) as checkpoints:
        params, variables = _restore(
            checkpoints, step, point, variables, branches, [FROZEN.optional]
        )
    base = None
    if config.lora.targets:
        base = place_params(decode_base(variables[BASE], abstract), abstract)
    return config.lora, params, base


def read_variables(run: Location, abstract: Any, step: int | None = None) -> Any:
    """Load variables of the model from a run folder: biases of routers, batch statistics.

    `abstract` and `step` are as for `read_params`.
    """
    if not jax.tree.leaves(abstract):
        return {}
    with CheckpointManager(RunDir(run).checkpoints, read_only=True) as checkpoints:
        restored, _ = checkpoints.restore(step, {"variables": abstract}, branches=[])
    return restored["variables"]


def _stored_base(model: Model, abstract: Any) -> Any:
    """Return a model's frozen parameters as they are stored, sharded as `abstract` is.

    Matrices of codes or scales that this mesh does not divide are whole on each device.
    """
    key = jax.random.key(0, impl=PRNG)
    base = jax.eval_shape(model.init_variables, key)[BASE]

    def place(param: jax.ShapeDtypeStruct, like: Any) -> Any:
        mesh, spec = param.sharding.mesh, param.sharding.spec
        specs = like.specs_by(spec) if is_stored(like) else spec

        def part(array: Any, spec: P) -> jax.ShapeDtypeStruct:
            if audit_spec("", array.shape, spec, mesh.shape, ""):
                spec = P(*spec[:-2])
            return jax.ShapeDtypeStruct(
                array.shape, array.dtype, sharding=NamedSharding(mesh, spec)
            )

        return jax.tree.map(part, like, specs)

    return jax.tree.map(place, abstract, base)


def read_adapters(
    run: Location, mesh: AnyMesh, step: int | None = None, *, trained: bool = False
) -> Any:
    """Load the adapters of a run alone, on every device of a mesh.

    Magnitudes are changes of those of the frozen parameters (`read_magnitudes`).

    Args:
        step: None for the newest intact checkpoint.
        trained: Load the adapters that gradients are taken at, not those that the run evaluates.
    """
    folder = RunDir(run)
    config = folder.config()
    dtype = build_precision(config).params_dtype
    adapters = _abstract_adapters(build_model(config), dtype, mesh)
    point = _point(config, adapters, trained)
    with CheckpointManager(folder.checkpoints, read_only=True) as checkpoints:
        params, _ = _restore(checkpoints, step, point, {}, [], [])
    return place_params(params, adapters)


def read_magnitudes(
    run: Location, abstract: Any, step: int | None = None, *, trained: bool = False
) -> Any:
    """Load the adapters of a run with magnitudes themselves, on every device of a mesh.

    Args:
        abstract: As for `read_params`.
        step: None for the newest intact checkpoint.
        trained: As for `read_adapters`.
    """
    _, adapters, base = _read_trained(run, abstract, step, trained=trained)
    return jax.jit(whole_magnitudes)(adapters, base)


def _point(config: TrainConfig, params: Any, trained: bool) -> EvaluationPoint:
    """Return the point of a run's gradients, or the point of its evaluation."""
    if trained:
        return trained_point(params)
    return _evaluation_point(config, params)


def _evaluation_point(config: TrainConfig, params: Any) -> EvaluationPoint:
    """Return the point of a run's evaluation.

    The optimizer's state is sharded as the parameters are.
    """
    precision = build_precision(config)
    optimizer = build_optimizer(config, build_model(config))
    optimizer = wrap_optimizer_for_precision(optimizer, precision)
    state = jax.eval_shape(optimizer.init, params)
    shapes = tree.flatten(params)
    followed = followed_params(state, shapes)
    whole = NamedSharding(jax.tree.leaves(params)[0].sharding.mesh, P())

    def place(path: str, x: Any) -> jax.ShapeDtypeStruct:
        like = shapes.get(followed.get(path, ""))
        sharding = whole
        if like is not None and like.shape == x.shape:
            sharding = like.sharding
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return evaluation_point(params, tree.map_with_path(place, state), precision)


def _abstract_adapters(model: Model, dtype: Any, mesh: AnyMesh) -> Any:
    """Return the adapters of a model as abstract arrays, whole on each device: they are small."""
    shapes = jax.eval_shape(model.init, abstract_key())
    whole = NamedSharding(mesh, P())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=whole), shapes)


def _stored(abstract: Any, dtype: Any) -> Any:
    """Return the arrays to restore: in device memory, in the dtype of the checkpoint."""
    return jax.tree.map(functools.partial(_stored_array, dtype=dtype), abstract)


def _stored_array(leaf: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        dtype = leaf.dtype
    sharding = NamedSharding(leaf.sharding.mesh, leaf.sharding.spec)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)
