"""Permutes inside the tasks of stages: programs with one hang on simulated devices.

A collective permute of XLA:CPU waits for all devices of the mesh, also for those of stages that
take another branch of a tick. XLA ends the process after 40 seconds. GPUs and TPUs wait for the
devices of the permute alone.
"""

import re
from collections.abc import Iterator

import jax

from spmd.errors import ConfigError, Problem
from spmd.sharding.mesh import AnyMesh

_PERMUTE = re.compile(r" = (\S+) collective-permute(?:-start)?\(.*op_name=\"([^\"]*)\"")

_TASK = re.compile(r"pipeline_(?!embedding)\w+/cond/branch_1_fun/")
"""The scope of a branch that some stages take, and others do not (`spmd.pipeline.branches`)."""


def check_permutes(compiled: jax.stages.Compiled, mesh: AnyMesh) -> None:
    """Raise a `ConfigError` for a compiled step with a hang on simulated devices."""
    if not isinstance(mesh, jax.sharding.Mesh) or mesh.devices.flat[0].platform != "cpu":
        return
    problems = list(permutes_in_tasks(compiled.as_text() or ""))
    if problems:
        raise ConfigError("This pipeline would hang on simulated devices:", problems)


def permutes_in_tasks(text: str) -> Iterator[Problem]:
    """Yield a problem for each permute of a compiled program in the task of a stage.

    Example:
        >>> scope = "jit(_step)/while/body/pipeline_forward/cond/branch_1_fun/dot_general"
        >>> line = f'%p = f32[8] collective-permute(%x), metadata={{op_name="{scope}"}}'
        >>> print(next(permutes_in_tasks(line)).what)
        is moved between devices inside a stage's task, at dot_general
    """
    for line in text.splitlines():
        found = _PERMUTE.search(line)
        if found is None:
            continue
        array, scope = found.groups()
        *_, operation = _TASK.split(scope)
        if operation == scope:
            continue
        yield Problem(
            f"an array {array.partition('{')[0]}",
            f"is moved between devices inside a stage's task, at {operation}",
            "XLA:CPU waits there for all stages, and GPUs and TPUs do not",
            'another order of the axes of one dimension in the rule table, such as ("tensor", '
            '"fsdp") in place of ("fsdp", "tensor")',
        )
