"""PowerSGD: gradients are sent over `data` as products of rank r, and what is lost is added to the next gradients.

Of each matrix M `[n, m]`, the mean gradient of a device plus its error, two thin matrices are averaged over the devices
of `data` (Vogels et al., arXiv:1905.13727; Q is that of the step before):

    P = orthonormal(mean(M Q)),  Q = mean(Mᵀ P),  sent back: P Qᵀ,  error of the next step: M − P Qᵀ

A matrix is what a device has after the reduce-scatter over `fsdp`: n/f × m, and 4·r·(n/f + m) bytes are sent of it. P
and Q are kept and sent transposed, `[r, n]`, since a TPU pads the last dimension to 128. Everything is float32.

```python
powersgd = PowerSGD(rank=4)
plan = spmd.make_plan(mesh, rules, with_compression(model, spmd.make_plan(mesh, rules, model, …), powersgd), …)
grad_fn = compress(spmd.value_and_grad(loss_fn), powersgd)
```
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from spmd import tree
from spmd.errors import ConfigError, Problem
from spmd.gradients.base import GradFn
from spmd.gradients.compression_state import AXIS, ERROR, TITLE, Matrix, PowerSGD, Q, make_matrix
from spmd.gradients.exchange import LocalGradients, exchange, exchange_once, local_gradient
from spmd.model_api.compress import COMPRESSION
from spmd.plan.context import current
from spmd.plan.manual import manual_over, split_axes
from spmd.plan.scopes import in_scope
from spmd.sharding.dims import dims_spec
from spmd.sharding.layer_paths import stored_dims

_DEPENDENT = 1e-5
"""Share of a row that is left without the parts along other rows, below which it is rounding error."""


def compress(grad_fn: GradFn, powersgd: PowerSGD, axes: tuple[str, ...] = (AXIS,), *, additive: bool = False) -> GradFn:
    """Return a gradient function that exchanges the gradients of `grad_fn` once a step, compressed over `data`.

    Args:
        grad_fn: As for `spmd.exchange_once`; its variables have the state of `with_compression`.
        axes: `("data",)`, or `("data", "fsdp")` to sum over `fsdp` once a step, too, before.
        additive: As for `spmd.exchange_once`.
    """

    def last_stage(local: LocalGradients, states: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if not states:
            fix = "make the plan for with_compression(model, …)"
            raise ConfigError(TITLE, [Problem(COMPRESSION, "is not among the variables", fix=fix)])
        errors, qs = (tree.flatten(states[COMPRESSION][name]) for name in (ERROR, Q))
        after: dict[str, Array] = {}

        def reduce(path: str, g: Array) -> Array:
            if path not in errors:
                return exchange(path, g, local)
            placement = current().placements[path]
            spec, stacked = placement.of_stack().gradient, stored_dims(placement.stacks)
            matrix = make_matrix(g.shape[1:], spec, stacked, local.mesh)
            state = errors[path], qs[path]
            g, after[f"{ERROR}/{path}"], after[f"{Q}/{path}"] = _exchange(path, g, state, matrix, local, powersgd)
            return g

        gradients = tree.map_with_path(reduce, local.gradients)
        return gradients, {COMPRESSION: traverse_util.unflatten_dict(after, sep="/")}

    return exchange_once(grad_fn, axes, last_stage, additive=additive)


def _exchange(
    path: str, g: Array, state: tuple[Array, Array], matrix: Matrix, local: LocalGradients, powersgd: PowerSGD
) -> tuple[Array, Array, Array]:
    """Return the sum of a gradient `[device, …]` in the sharding in which the plan keeps it, its errors, and its Q."""
    over = local.over(path)
    param = local_gradient(path, g.ndim - 1, over)
    others = tuple(axis for axis in over if axis != AXIS)
    replicas = Replicas(local.mesh.shape[AXIS], powersgd.slices)

    def run(g: Array, error: Array, q: Array, weight: Array) -> tuple[Array, Array, Array]:
        g = replicas.sum_inside(param.reduce(g[0], others))
        divisor = jnp.where(weight > 0, weight, 1.0)
        mean = jnp.moveaxis(g.astype(jnp.float32) * (replicas.count / divisor) + error[0], matrix.dims, (-2, -1))
        product, q = approximate(mean, q[0], replicas)
        left, product = (jnp.moveaxis(x, (-2, -1), matrix.dims) for x in (mean - product, product))
        return (product * divisor).astype(g.dtype), left[None], q[None]

    before = P(over, *dims_spec(param.used)), matrix.error_spec, matrix.q_spec, P()
    after = dims_spec(matrix.spec), matrix.error_spec, matrix.q_spec
    with in_scope(param.scope):
        return manual_over(local.mesh, split_axes(local.mesh), run, before, after)(g, *state, local.weight)


@dataclasses.dataclass(frozen=True)
class Replicas:
    """Groups of devices along `data`: those inside a slice, and those between which gradients are compressed.

    Attributes:
        devices: The size of `data`.
        slices: The slices that it spans. The devices of a slice follow each other.
    """

    devices: int
    slices: int = 1

    @property
    def inside(self) -> int:
        """The devices of a slice whose gradients are summed before; 1 if all are compressed."""
        return self.devices // self.slices if self.slices > 1 else 1

    @property
    def count(self) -> int:
        """The number of gradients that are compressed."""
        return self.devices // self.inside

    def sum_inside(self, gradient: Array) -> Array:
        """Sum a gradient over the devices of a slice, in the dtype of the plan's precision policy."""
        if self.inside == 1:
            return gradient
        groups = [[s * self.inside + j for j in range(self.inside)] for s in range(self.count)]
        precision = current().precision
        wire = gradient.dtype if precision is None else precision.exchange_names((AXIS,))[AXIS]
        return jax.lax.psum(gradient.astype(wire), AXIS, axis_index_groups=groups).astype(gradient.dtype)

    def mean(self, x: Array) -> Array:
        """Return the mean over the devices between which gradients are compressed."""
        groups = [[s * self.inside + j for s in range(self.count)] for j in range(self.inside)]
        return jax.lax.psum(x, AXIS, axis_index_groups=None if self.inside == 1 else groups) / self.count


def approximate(
    matrices: Float[Array, "*batch n m"], q: Float[Array, "*batch r m"], replicas: Replicas
) -> tuple[Float[Array, "*batch n m"], Float[Array, "*batch r m"]]:
    """Return the mean over devices of `matrices`, approximated with rank r, and the next Q; inside a manual region."""
    einsum = functools.partial(jnp.einsum, precision="highest")
    p = orthonormal(replicas.mean(einsum("...nm,...rm->...rn", matrices, orthonormal(q))))
    q = replicas.mean(einsum("...nm,...rn->...rm", matrices, p))
    return einsum("...rn,...rm->...nm", p, q), q


def orthonormal(x: Float[Array, "*batch r n"]) -> Float[Array, "*batch r n"]:
    """Return orthonormal rows that span those of `x` (r ≤ n), by Gram–Schmidt; each row is projected again.

    A row that depends on those before it, such as a row of zeros, becomes a cosine without their parts: otherwise a
    matrix whose gradient was zero once would stay zero.

    Example:
        >>> rows = orthonormal(jnp.array([[2.0, 0.0, 0.0], [1.0, 1.0, 0.0]]))
        >>> abs(rows @ rows.T - jnp.eye(2)).max() < 1e-6
        Array(True, dtype=bool)
    """
    count, size = x.shape[-2:]
    einsum = functools.partial(jnp.einsum, precision="highest")
    cosines = jnp.cos(jnp.pi / size * jnp.outer(jnp.arange(count), jnp.arange(size) + 0.5)).astype(x.dtype)
    largest = jnp.abs(x).max(axis=(-2, -1), keepdims=True)  # or the squares of small numbers would be zero
    x = x / jnp.where(largest > 0, largest, 1.0)

    def norm(row: Array) -> Array:
        return jnp.sqrt(jnp.square(row).sum(axis=-1, keepdims=True))

    def unit(row: Array) -> Array:
        return row / jnp.where(norm(row) > 0, norm(row), 1.0)

    def step(i: Any, x: Array) -> Array:
        is_before = (jnp.arange(count) < i).astype(x.dtype)

        def remaining(row: Array) -> Array:
            return row - einsum("...r,...rn->...n", einsum("...rn,...n,r->...r", x, row, is_before), x)

        given = jax.lax.dynamic_index_in_dim(x, i, axis=x.ndim - 2, keepdims=False)
        cosine = jnp.broadcast_to(jax.lax.dynamic_index_in_dim(cosines, i, axis=0, keepdims=False), given.shape)
        row = remaining(given)
        row = remaining(jnp.where(norm(row) <= _DEPENDENT * norm(given), cosine, row))
        row = unit(remaining(unit(row)))
        return jax.lax.dynamic_update_index_in_dim(x, row, i, axis=x.ndim - 2)

    return jax.lax.fori_loop(0, count, step, x)
