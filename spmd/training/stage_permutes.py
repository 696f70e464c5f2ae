"""Permutes inside the tasks of a pipeline's stages: programs with one hang on simulated devices.

A collective permute of XLA:CPU waits for all devices of the mesh, also for those of stages that
take another branch of a tick. XLA ends the process after 40 seconds.
"""

import re
from collections.abc import Iterator

import jax

from spmd.errors import ConfigError, Problem
from spmd.plan.scopes import in_task_of_a_stage
from spmd.sharding.mesh import AnyMesh, is_cpu

_PERMUTE = re.compile(r" = (\w+\[[\d,]*\])\S* collective-permute\(.*op_name=\"([^\"]*)\"")


def check_permutes(compiled: jax.stages.Compiled, mesh: AnyMesh) -> None:
    """Raise a `ConfigError` for a compiled step with a hang on simulated devices."""
    if mesh.shape["pipe"] == 1 or not is_cpu(mesh):
        return
    problems = list(permutes_in_tasks(compiled.as_text() or ""))
    if problems:
        raise ConfigError("This pipeline would hang on simulated devices:", problems)


def permutes_in_tasks(text: str) -> Iterator[Problem]:
    """Yield a problem for each permute of a compiled program in the task of a stage.

    Example:
        >>> scope = "jit(_step)/while/body/pipeline_forward/cond/branch_1_fun/dot_general"
        >>> line = f'%p = f32[8]{{0}} collective-permute(%x), metadata={{op_name="{scope}"}}'
        >>> print(next(permutes_in_tasks(line)).where)
        an array f32[8]
    """
    for array, op_name in _PERMUTE.findall(text):
        if not in_task_of_a_stage(op_name):
            continue
        _, _, operation = op_name.rpartition("branch_1_fun/")
        yield Problem(
            f"an array {array}",
            f"is moved between devices inside a stage's task, at {operation}",
            "XLA:CPU waits there for all stages",
            'another order of the axes of one dimension in the rule table, such as ("tensor", '
            '"fsdp") in place of ("fsdp", "tensor")',
        )
