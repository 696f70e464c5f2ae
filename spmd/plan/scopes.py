"""Name scopes of operations under a plan, so that an audit finds the rule of a collective.

JAX writes scopes into the metadata of a compiled program:
`jit(_step)/jvp(annotate(residual))/sharding_constraint`.
"""

import contextlib
import re

import jax

OPTIMIZER = "optimizer"
METRICS = "metrics"
"""Scopes of the optimizer's update, and of metrics such as the gradient norm."""

ATTENTION = "attend(plan)"
"""Scope of attention by the settings of a plan: a kernel, an algorithm over a split sequence."""

_OF_ALL_STAGES = (
    "embedding",
    "embedding_backward",
    "first_layers",
    "first_layers_backward",
    "head",
)
"""The branches of a pipeline's tick that all stages take alike."""

_BRANCH = re.compile(r"(\w+)\)*/cond$")
_COMM = re.compile(r"\bcomm\(([^()]+)\)")
_STAGE_BRANCH = re.compile(r"\bpipeline_(\w+)\)*/cond/branch_1_fun/")
_FAULT = re.compile(r"\bxla_fault\(([^()]+)\)")
_SCOPE = re.compile(r"\b(annotate|param)\(([^()]+)\)")


def annotate_scope(name: str) -> str:
    """Return the scope of an activation."""
    return f"annotate({name})"


def clip_scope(name: str) -> str:
    """Return the scope of the clipping of an activation's gradient."""
    return f"clip({name})"


def param_scope(path: str) -> str:
    """Return the scope of transfers of a parameter or its gradient, and of products with it."""
    return f"param({path})"


def comm_scope(purpose: str) -> str:
    """Return the scope of a layer's own collectives with a purpose: `experts, exchange of tokens`.

    A layer outside of `spmd` writes `jax.named_scope("comm(halo exchange)")`.
    """
    return f"comm({purpose})"


def stage_scope(task: str) -> str:
    """Return the scope of a branch of a pipeline's tick."""
    return f"pipeline_{task}"


def in_task_of_a_stage(op_name: str) -> bool:
    """Return whether an operation is in a branch that some stages take, and others do not.

    Example:
        >>> scope = stage_scope("forward")
        >>> in_task_of_a_stage(f"jit(_step)/while/body/{scope}/cond/branch_1_fun/dot_general")
        True
    """
    tasks = _STAGE_BRANCH.findall(op_name)
    return any(task not in _OF_ALL_STAGES for task in tasks)


REPLICAS = "replicas"
"""Scope of the region of steps of replicas (`spmd.diloco`), inside of which XLA divides arrays."""

BEFORE_START = comm_scope("gradients, whole before compression starts")
"""Scope of gradients that are promised to be compressed in later steps."""


def fault_scope(name: str) -> str:
    """Return the scope of a formula in place of an operation with a fault of XLA.

    Args:
        name: A heading of docs/xla-faults.md.
    """
    return f"xla_fault({name})"


def read_fault(op_name: str) -> str:
    """Return the fault in the scope of an operation; empty if there is none."""
    found = _FAULT.search(op_name)
    if found is None:
        return ""
    return found[1]


def read_comm(op_name: str) -> str:
    """Return the purpose of the innermost `comm_scope` of an operation; empty if there is none.

    Example:
        >>> scopes = "jit(_step)/transpose(jvp(comm(experts)))/shard_map/comm(exchange of tokens)"
        >>> read_comm(f"{scopes}/all_to_all")
        'exchange of tokens'
    """
    found = _COMM.findall(op_name)
    if not found:
        return ""
    return found[-1]


def in_scope(scope: str) -> contextlib.AbstractContextManager:
    """Name the operations inside, unless the scope is empty."""
    if not scope:
        return contextlib.nullcontext()
    return jax.named_scope(scope)


def read_names(op_name: str) -> list[str]:
    """Return the names of fused operations: XLA:GPU writes `a/(b:c)` for `a/b` and `a/c`.

    Example:
        >>> read_names("jit(f)/param(layers/(up/kernel)/psum:down/kernel)/psum)")
        ['jit(f)/param(layers/up/kernel)/psum', 'jit(f)/param(layers/down/kernel)/psum']
        >>> read_names("jit(f)/add")
        ['jit(f)/add']
    """
    joined = re.fullmatch(r"([^:]*/)\((.*:.*)\)", op_name)
    if joined is None:
        return op_name.split(":")
    before, ends = joined.groups()
    return [f"{before}{end}" for end in ends.split(":")]


def read_scope(op_name: str) -> tuple[str, str]:
    """Return the innermost scope of an operation, `annotate` or `param`, and its name.

    Both are empty if there is none.

    Example:
        >>> read_scope("jit(_step)/transpose(jvp(param(layers/mlp/up_proj/kernel)))/dot_general")
        ('param', 'layers/mlp/up_proj/kernel')
    """
    found = _SCOPE.findall(op_name)
    if not found:
        return "", ""
    return found[-1]


def branch_scope(op_name: str) -> str:
    """Return the innermost scope around a `jax.lax.cond`; empty for another operation.

    Example:
        >>> branch_scope("jit(step)/transpose(jvp(more_layers))/cond")
        'more_layers'
    """
    found = _BRANCH.search(op_name)
    if found is None:
        return ""
    return found[1]
