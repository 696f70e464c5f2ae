"""Sharding of an expert layer: of its tokens, its kernels, and the hidden units of experts."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from spmd.errors import AnnotationError, Problem
from spmd.layers.expert_exchange import ExpertAxes, expert_axes
from spmd.model_interface.wrapped_param import StoredParam, is_stored
from spmd.plan.context import current
from spmd.plan.fsdp import ParamPlacement, gather
from spmd.plan.manual import split_axes
from spmd.plan.scopes import in_scope
from spmd.plan.sharded_param import ShardedParam, sharded_param
from spmd.sharding.dims import Dims, is_prefix, spec_dims
from spmd.sharding.mesh import AnyMesh, shards_of
from spmd.sharding.rules import spec_text


@dataclasses.dataclass(frozen=True)
class ExpertBias:
    """The biases of all experts of a layer, added to a product with an `ExpertKernel`.

    `placed` is from `spmd.plan.fsdp.placement_of`, None outside a plan.
    """

    array: Float[Array, "expert out"]
    placed: ParamPlacement | None


@dataclasses.dataclass(frozen=True)
class ExpertKernel:
    """The kernels of all experts of a layer, and their biases, if any.

    The kernels are an array, or frozen ones in another form. `placed` is from
    `spmd.plan.fsdp.placement_of`, None outside a plan.
    """

    array: Float[Array, "expert in out"] | StoredParam
    placed: ParamPlacement | None
    bias: ExpertBias | None = None


def biases_of(kernels: Sequence[ExpertKernel]) -> list[ExpertBias]:
    """Return the biases of the kernels that have them, in order."""
    return [kernel.bias for kernel in kernels if kernel.bias is not None]


@dataclasses.dataclass(frozen=True)
class ExpertLayout:
    """Sharding of the manual program of a layer; the default is for one device.

    All axes are of size above 1.

    Attributes:
        tokens: The axes of examples, and of the tokens of an example.
        params: The layout of each kernel, then that of each bias.
        expert: The axes that experts are split over; None outside a plan.
        tensor: The axes that hidden units are split over.
        save_gathered: Whether the backward pass keeps gathered kernels.
        stored: The placement of each parameter; of those in another form `params` have the layout
            after `decode`.
    """

    mesh: AnyMesh | None = None
    tokens: Dims = ((), ())
    params: tuple[ShardedParam, ...] = ()
    expert: ExpertAxes | None = None
    tensor: tuple[str, ...] = ()
    save_gathered: bool = True
    stored: tuple[ParamPlacement, ...] = ()

    @property
    def over(self) -> tuple[str, ...]:
        """The axes of tokens: those of examples, then those within an example."""
        return tuple(itertools.chain(*self.tokens))

    @property
    def parts(self) -> int:
        """The number of shards of the tokens."""
        if self.mesh is None:
            return 1
        return shards_of(self.over, self.mesh.shape)

    def decode(self, arrays: Sequence[Any], dtypes: Sequence[jnp.dtype]) -> tuple[Any, ...]:
        """Gather the codes of parameters in another form, and decode them, outside of the region."""
        placements = self.stored or [None] * len(arrays)
        found = []
        for array, placed, dtype in zip(arrays, placements, dtypes, strict=True):
            if is_stored(array):
                array = gather(array, placed, dtype)
            found.append(array)
        return tuple(found)

    def prepare(self, arrays: Sequence[Array]) -> tuple[Any, ...]:
        """Return the arrays for `gather` in the forward and the backward pass.

        They are those of `spmd.plan.fsdp.prepare`.
        """
        if self.mesh is None:
            return tuple(arrays)
        found = []
        for array, param in zip(arrays, self.params, strict=True):
            with in_scope(param.scope):
                found.append(param.prepare(array, self.mesh))
        return tuple(found)

    @property
    def prepares(self) -> bool:
        """Whether `prepare` computes anything for a parameter."""
        return any(param.prepares for param in self.params)

    def gather(self, prepared: Sequence[Any], dtypes: Sequence[jnp.dtype]) -> list[Array]:
        """Gather prepared parameters in the dtypes of their use, inside the manual region."""
        if self.mesh is None:
            return [array.astype(dtype) for array, dtype in zip(prepared, dtypes, strict=True)]
        given = []
        for array, param, dtype in zip(prepared, self.params, dtypes, strict=True):
            if not param.comm.takes_uncast:
                array = array.astype(dtype)
            given.append(array)
        gathered = []
        for array, param, dtype in zip(given, self.params, dtypes, strict=True):
            with in_scope(param.scope):
                gathered.append(param.gather_prepared(array, dtype))
        return gathered

    def sum_gradients(self, gradients: Sequence[Array]) -> list[Array]:
        """Sum gradients of parameters over devices, into the plan's sharding of gradients."""
        if self.mesh is None:
            return list(gradients)
        found = []
        for gradient, param in zip(gradients, self.params, strict=True):
            summed = [axis for axis in self.over if axis not in param.split]
            with in_scope(param.scope):
                found.append(param.reduce(gradient, summed))
        return found

    @property
    def specs(self) -> tuple[tuple[Any, ...], ...]:
        """The specs of all parameters: from `prepare`, in their use, and of their gradients."""
        given, used, kept = [], [], []
        for param in self.params:
            _, used_spec, kept_spec = param.specs
            given.append(param.prepared_specs)
            used.append(used_spec)
            kept.append(kept_spec)
        return tuple(given), tuple(used), tuple(kept)


def expert_layout(mesh: AnyMesh, tokens: P, kernels: Sequence[ExpertKernel]) -> ExpertLayout:
    """Return the sharding of a layer with tokens of the spec `tokens`.

    Raises:
        AnnotationError: There are no collectives for it.
    """
    biases = biases_of(kernels)
    arrays: list[ExpertKernel | ExpertBias] = [*kernels, *biases]
    stored = [array.placed for array in arrays if array.placed]
    if len(stored) < len(arrays):
        problem = Problem(
            "the experts' kernels",
            "are not all in the rule table",
            fix="make the model by spmd.from_nnx, and give the table a rule for each of them",
        )
        raise AnnotationError("Expert layer outside of a plan:", [problem])
    count = len(kernels)
    placements = []
    for array, placed in zip(arrays, stored, strict=True):
        if is_stored(array.array):  # `decode` gathers it
            used = placed.compute_spec
            placed = dataclasses.replace(placed, param_spec=used, grad_spec=used)
        placements.append(placed)
    params = tuple(sharded_param(placed, 3) for placed in placements[:count])
    of_biases = tuple(sharded_param(placed, 2) for placed in placements[count:])
    problems = _kernel_problems(params)
    if not problems:
        problems = _bias_problems(kernels, params, of_biases)
    problems += _token_problems(tokens, params, of_biases, mesh)
    if problems:
        raise AnnotationError("The expert layer has no collectives for this rule table:", problems)
    split = split_axes(mesh)
    batch, seq, _ = spec_dims(tokens, 3, split)
    expert, tensor, _ = params[-1].compute_dims
    return ExpertLayout(
        mesh=mesh,
        tokens=(batch, seq),
        params=(*params, *of_biases),
        expert=expert_axes(mesh, tuple(expert)),
        tensor=tensor,
        save_gathered=all(placed.save_gathered for placed in placements),
        stored=tuple(stored),
    )


def _kernel_problems(params: Sequence[ShardedParam]) -> list[Problem]:
    """Return a problem for each reason why kernels cannot be gathered for their products."""
    problems = []
    expert, tensor, _ = params[-1].compute_dims
    into, out = (expert, (), tensor), (expert, tensor, ())
    expected: list[Dims] = [into] * (len(params) - 1) + [out]
    used = [param.compute_dims for param in params]
    if used != expected:
        problem = Problem(
            "the experts' kernels",
            f"are split, apart from fsdp, {_specs_text(used)}",
            fix='P("expert", "fsdp", "tensor") into the hidden units and P("expert", ("tensor", '
            '"fsdp")) out of them',
        )
        problems.append(problem)
    if not all(is_prefix(param.compute_dims, param.param_dims) for param in params):
        stored = _specs_text([param.param_dims for param in params])
        problem = Problem(
            "the experts' kernels",
            f"are stored {stored}: shards are not contiguous",
            fix='"fsdp" last in its dimension',
        )
        problems.append(problem)
    return problems


def _bias_problems(
    kernels: Sequence[ExpertKernel], params: Sequence[ShardedParam], biases: Sequence[ShardedParam]
) -> list[Problem]:
    """Return a problem for each bias with another sharding than the outputs of its kernel."""
    problems = []
    with_bias = [kernel.bias is not None for kernel in kernels]
    for param, bias in zip(itertools.compress(params, with_bias), biases, strict=True):
        expert, _, outputs = param.compute_dims
        used = (expert, outputs)
        if bias.compute_dims == used and is_prefix(bias.compute_dims, bias.param_dims):
            continue
        problem = Problem(
            "the experts' biases",
            f"are stored {_specs_text([bias.param_dims])}, and the outputs of their kernel are "
            f"split {_specs_text([used])}",
            fix='P("expert", "tensor") of hidden units and P("expert") of outputs, perhaps with '
            '"fsdp" last in a dimension',
        )
        problems.append(problem)
    return problems


def _token_problems(
    tokens: P, params: Sequence[ShardedParam], biases: Sequence[ShardedParam], mesh: AnyMesh
) -> list[Problem]:
    """Return a problem for each reason why tokens cannot be sent to their experts."""
    problems = []
    split = split_axes(mesh)
    batch, seq, width = spec_dims(tokens, 3, split)
    expert, tensor, _ = params[-1].compute_dims
    over = {*batch, *seq}
    gathered = set[str]()
    for param in (*params, *biases):
        gathered.update(*param.gathers)
    missing = sorted(gathered - over)
    if current().single_token:
        missing = []  # a decoded token is on all devices of `sequence`, and has no gradient
    is_split = f"is split {spec_text(tokens)}"
    if missing:
        problem = Problem(
            "activation 'expert_tokens'",
            f"{is_split}, and not over {missing}, which kernels are gathered over",
            fix='P(("data", "fsdp", "expert"), "sequence")',
        )
        problems.append(problem)
    if width or not over.issuperset(expert) or not over.isdisjoint(tensor):
        problem = Problem(
            "activation 'expert_tokens'",
            f"{is_split}, experts over {[*expert]} and their hidden units over {[*tensor]}",
            fix='P(("data", "fsdp", "expert"), "sequence"): over expert, and not over tensor',
        )
        problems.append(problem)
    return problems


def _specs_text(kernels: Sequence[Dims]) -> str:
    return " and ".join(spec_text(P(*dims)) for dims in kernels)
