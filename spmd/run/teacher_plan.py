"""Plan of a frozen teacher, on the mesh of the model trained beside it.

Its config and its table are those of its folder: of a run, or of Hugging Face.
"""

import dataclasses
from typing import Any

import optax

from spmd.errors import SpmdError
from spmd.hf.folder import open_folder
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import ShardingPlan, make_plan
from spmd.precision import Precision, make_precision
from spmd.run.config import TrainConfig
from spmd.run.load_config import other_config
from spmd.run.run_dir import RunDir, is_run
from spmd.sharding.mesh import AnyMesh
from spmd.sharding.rules import Rules
from spmd.storage.address import locate


def make_teacher_plan(config: TrainConfig, mesh: AnyMesh) -> ShardingPlan | None:
    """Return the plan of the config's teacher, without an optimizer; None if there is none.

    It is sharded and computed as the trained model is. It has no gradient, so where products are in
    bfloat16 its parameters are, too.

    Raises:
        SpmdError: The folder of the teacher cannot be read, or its table does not fit it.
    """
    if not config.teacher:
        return None
    model, rules = read_model(config.teacher)
    try:
        return make_plan(
            mesh,
            rules,
            from_nnx(model.build),
            optax.identity(),
            zero=config.zero,
            precision=_frozen_precision(config),
            slices=config.slices.sizes,
            attention=config.attention,
            context=config.context,
        )
    except SpmdError as error:
        problems = []
        for problem in error.problems:
            problems.append(dataclasses.replace(problem, where=f"teacher: {problem.where}"))
        title = f"{config.teacher} cannot be the teacher on this mesh:"
        raise type(error)(title, problems) from error


def read_model(folder: str) -> tuple[Any, Rules]:
    """Return the config of a folder's model, and the rules of its parameters."""
    location = locate(folder)
    if is_run(location):
        with other_config():
            theirs = RunDir(location).config()
        return theirs.model, theirs.rules
    with open_folder(location) as found:
        return found.config, found.family.rules(found.config)


def _frozen_precision(config: TrainConfig) -> Precision:
    """Return the precision of a model without gradients, in the compute dtype of the config."""
    precision = make_precision(config.precision)
    stored = precision.params
    if precision.compute == "bfloat16":
        stored = precision.compute
    return dataclasses.replace(precision, params=stored, master=None, rounding="nearest")
