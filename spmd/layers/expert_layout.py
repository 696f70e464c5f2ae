"""Sharding of an expert layer: of its tokens, of its kernels, and of the hidden units of experts."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from spmd.errors import AnnotationError, Problem
from spmd.layers.expert_exchange import ExpertAxes, expert_axes
from spmd.plan.fsdp import ParamPlacement
from spmd.plan.local_param import LocalParam, local_param
from spmd.plan.manual import split_axes
from spmd.plan.scopes import in_scope
from spmd.sharding.dims import Dims, spec_dims
from spmd.sharding.mesh import AnyMesh
from spmd.sharding.rules import spec_text


@dataclasses.dataclass(frozen=True)
class ExpertKernel:
    """The kernels of all experts of a layer; `placed` is from `spmd.plan.fsdp.placement_of`, None outside a plan."""

    array: Float[Array, "expert in out"]
    placed: ParamPlacement | None


@dataclasses.dataclass(frozen=True)
class ExpertLayout:
    """Sharding of the manual program of a layer; the default is for one device. All axes are of size above 1.

    Attributes:
        tokens: The axes of examples, and of the tokens of one.
        kernels: The layout of each kernel.
        expert: The axes that experts are split over; None outside a plan.
        tensor: The axes that hidden units are split over.
        save_gathered: Whether the backward pass keeps gathered kernels.
    """

    mesh: AnyMesh | None = None
    tokens: Dims = ((), ())
    kernels: tuple[LocalParam, ...] = ()
    expert: ExpertAxes | None = None
    tensor: tuple[str, ...] = ()
    save_gathered: bool = True

    @property
    def over(self) -> tuple[str, ...]:
        """The axes that tokens are split over."""
        return tuple(itertools.chain(*self.tokens))

    @property
    def parts(self) -> int:
        """The number of devices that tokens are split over."""
        return math.prod(self.mesh.shape[axis] for axis in self.over) if self.mesh else 1

    def prepare(self, kernels: Sequence[Array]) -> tuple[Any, ...]:
        """Return what both passes gather kernels from (`spmd.plan.fsdp.prepare`)."""
        if self.mesh is None:
            return tuple(kernels)
        found = []
        for kernel, param in zip(kernels, self.kernels, strict=True):
            with in_scope(param.scope):
                found.append(param.prepare(kernel, self.mesh))
        return tuple(found)

    @property
    def prepares(self) -> bool:
        """Whether both passes gather a kernel from something else than itself."""
        return any(param.prepares for param in self.kernels)

    def gather(self, prepared: Sequence[Any], dtype: jnp.dtype) -> list[Array]:
        """Gather prepared kernels over the axes that products have whole, inside the program."""
        if self.mesh is None:
            return [kernel.astype(dtype) for kernel in prepared]
        given = []
        for kernel, param in zip(prepared, self.kernels, strict=True):
            given.append(kernel if param.comm.takes_uncast else kernel.astype(dtype))
        gathered = []
        for kernel, param in zip(given, self.kernels, strict=True):
            with in_scope(param.scope):
                gathered.append(param.gather_prepared(kernel, dtype))
        return gathered

    def sum_gradients(self, gradients: Sequence[Array]) -> list[Array]:
        """Sum the gradients of kernels over devices, into the sharding in which the plan keeps them."""
        if self.mesh is None:
            return list(gradients)
        found = []
        for gradient, param in zip(gradients, self.kernels, strict=True):
            with in_scope(param.scope):
                found.append(param.reduce(gradient, [axis for axis in self.over if axis not in param.split]))
        return found

    @property
    def specs(self) -> tuple[tuple[Any, ...], ...]:
        """The specs of all kernels as `prepare` returns them, as they are used, and of their gradients."""
        params = self.kernels
        given = tuple(param.prepared_specs for param in params)
        return given, tuple(param.specs[1] for param in params), tuple(param.specs[2] for param in params)


def expert_layout(mesh: AnyMesh, tokens: P, kernels: Sequence[ExpertKernel]) -> ExpertLayout:
    """Return the sharding of a layer whose tokens are split like `tokens`.

    Raises:
        AnnotationError: There are no collectives for it.
    """
    split = split_axes(mesh)
    placements = [kernel.placed for kernel in kernels if kernel.placed]
    if len(placements) < len(kernels):
        fix = "make the model by spmd.from_nnx, and give the table a rule for each of them"
        problem = Problem("the experts' kernels", "are not all in the rule table", fix=fix)
        raise AnnotationError("The sharding of the expert layer is not known:", [problem])
    params = tuple(local_param(placed, 3) for placed in placements)
    used, stored = [list(param.used) for param in params], [param.stored for param in params]
    expert, tensor, _ = used[-1]
    batch, seq, width = spec_dims(tokens, 3, split)
    problems = []
    if used != [[expert, (), tensor]] * (len(used) - 1) + [[expert, tensor, ()]]:
        what = "are split, apart from fsdp, " + " and ".join(spec_text(P(*spec)) for spec in used)
        fix = 'P("expert", "fsdp", "tensor") into the hidden units and P("expert", ("tensor", "fsdp")) out of them'
        problems.append(Problem("the experts' kernels", what, fix=fix))
    pairs = [pair for specs in zip(stored, used, strict=True) for pair in zip(*specs, strict=True)]
    if any(own[: len(kept)] != kept for own, kept in pairs):
        what = "are stored " + " and ".join(spec_text(P(*spec)) for spec in stored) + ": shards are not contiguous"
        problems.append(Problem("the experts' kernels", what, fix='"fsdp" last in its dimension'))
    gathered = {axis for own, kept in pairs for axis in own if axis not in kept}
    if missing := sorted(gathered - {*batch, *seq}):
        what = f"is split {spec_text(tokens)}, and not over {missing}, which kernels are gathered over"
        problems.append(Problem("activation 'expert_tokens'", what, fix='P(("data", "fsdp", "expert"), "sequence")'))
    if width or not {*expert} <= {*batch, *seq} or {*tensor} & {*batch, *seq}:
        what = f"is split {spec_text(tokens)}, experts over {[*expert]} and their hidden units over {[*tensor]}"
        fix = 'P(("data", "fsdp", "expert"), "sequence"): over expert, and not over tensor'
        problems.append(Problem("activation 'expert_tokens'", what, fix=fix))
    if problems:
        raise AnnotationError("The expert layer has no collectives for this rule table:", problems)
    return ExpertLayout(
        mesh=mesh,
        tokens=(batch, seq),
        kernels=params,
        expert=expert_axes(mesh, tuple(expert)),
        tensor=tensor,
        save_gathered=all(placed.save_gathered for placed in placements),
    )
