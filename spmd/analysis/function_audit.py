"""Audit of any jitted function, without a plan: its collectives, and operations that XLA gets wrong.

```python
audit = audit_function(train_step, state, batch)
print(audit)
expect_collectives(audit.collectives, all_gather=0)
```
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from spmd.analysis.collective_audit import CollectiveAudit, audit_collectives
from spmd.analysis.xla_fault_report import FaultReport, find_faults_in
from spmd.distributed.native_output import compiler_log
from spmd.errors import ConfigError, MeshError, Problem, check_type, describe_value
from spmd.training.compilation_cache import compilation_cache
from spmd.training.step import TrainStep

_TITLE = "Audit of the function not possible:"
_FIX = "mesh=…, the mesh that the function is compiled for"


@dataclasses.dataclass(frozen=True)
class FunctionAudit:
    """Collectives of a function, and its operations with a fault of XLA; `print` shows both."""

    collectives: CollectiveAudit
    faults: FaultReport

    def __str__(self) -> str:
        return f"{self.collectives}\n\n{self.faults}"


def audit_function(
    function: Callable[..., Any], *args: Any, mesh: Mesh | None = None, **kwargs: Any
) -> FunctionAudit:
    """Compile a function for its arguments, and report its collectives and known faults of XLA.

    Nothing runs. Call it in the scopes in which the function is called, such as `jax.set_mesh` and
    `spmd.use_rules`. For an absent machine, give abstract arguments with shardings over the devices
    of its topology.

    Args:
        function: A function of `jax.jit` or `nnx.jit`; another one is jitted.
        args: The arguments: arrays, or abstract ones with the shardings of the later arrays.
        mesh: A mesh with axes of any names; by default that of the program's shardings.
        kwargs: The keyword arguments.

    Raises:
        ConfigError: `function` is none, or compiled already.
        MeshError: The program's shardings are of no mesh, or of several.

    Example:
        >>> mesh = jax.make_mesh((1,), ("dp",))
        >>> split = NamedSharding(mesh, jax.sharding.PartitionSpec("dp"))
        >>> x = jax.ShapeDtypeStruct((8,), "float32", sharding=split)
        >>> audit_function(jax.numpy.sum, x).collectives.records
        ()
    """
    traced: Any = _jitted(function).trace(*args, **kwargs)
    with compilation_cache(None), compiler_log(pass_on=False) as log:
        compiled = traced.lower().compile()
    if mesh is None:
        mesh = _mesh_of(compiled)
    problems = check_type("mesh", mesh, Mesh, "a mesh of devices, such as of jax.make_mesh")
    if problems:
        raise MeshError(_TITLE, problems)
    inner = getattr(traced, "traced", traced)  # nnx.jit wraps what jax.jit returns
    faults = find_faults_in(inner.jaxpr, mesh)
    return FunctionAudit(audit_collectives(compiled, mesh, log=log), faults)


def _jitted(function: Any) -> Any:
    """Return a function that can be traced: as it is, or jitted."""
    if isinstance(function, TrainStep):
        fix = "spmd.plan_report(step, batch), whose audit has the causes too"
        raise ConfigError(_TITLE, [Problem("function", "is a train step with a plan", fix=fix)])
    if callable(function) and hasattr(function, "trace"):
        return function
    fix = "a function, such as of jax.jit"
    is_compiled = isinstance(function, jax.stages.Compiled)
    if is_compiled:
        fix = "spmd.analysis.collective_audit.audit_collectives(compiled, mesh)"
    if is_compiled or not callable(function):
        problem = Problem("function", f"is {describe_value(function)}", fix=fix)
        raise ConfigError(_TITLE, [problem])
    return jax.jit(function)


def _mesh_of(compiled: Any) -> Mesh:
    """Return the mesh of a program's shardings."""
    meshes = list(dict.fromkeys(_meshes(compiled)))
    if len(meshes) == 1:
        return meshes[0]
    problem = Problem("mesh", "is unknown: no argument or result is split over one", fix=_FIX)
    if meshes:
        shown = " and ".join(map(_sizes_text, meshes))
        problem = Problem("mesh", "is unknown: arrays are split over several", shown, _FIX)
    raise MeshError(_TITLE, [problem])


def _sizes_text(mesh: Mesh) -> str:
    return " ".join(f"{axis}={size}" for axis, size in mesh.shape.items())


def _meshes(compiled: Any) -> Iterator[Mesh]:
    """Yield the mesh of each argument and result that has one."""
    shardings = (compiled.input_shardings, compiled.output_shardings)
    for sharding in jax.tree.leaves(shardings):
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            yield sharding.mesh
