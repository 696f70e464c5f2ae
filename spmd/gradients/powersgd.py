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
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from spmd import tree
from spmd.errors import ConfigError, Problem
from spmd.gradients.base import GradFn
from spmd.gradients.exchange import LocalGradients, exchange, exchange_once, gradient_dims
from spmd.model_api.compress import COMPRESSION
from spmd.model_api.model import Model
from spmd.model_api.variables import with_variables
from spmd.plan.context import current
from spmd.plan.manual import dims_spec, manual_over, spec_dims, split_axes, sum_gradient
from spmd.plan.plan import ShardingPlan
from spmd.plan.scopes import in_scope
from spmd.sharding.layer_paths import dims_of, stored_dims
from spmd.sharding.mesh import AnyMesh, shards_of

AXIS = "data"
"""The axis over which gradients are compressed."""

ERROR, Q = "error", "q"

_TITLE = "Gradients cannot be compressed by PowerSGD:"


@dataclasses.dataclass(frozen=True)
class PowerSGD:
    """Compression of gradients over `data`.

    Attributes:
        rank: Columns of P and of Q.
        slices: Slices that `data` spans. If there are several, gradients are summed inside each and compressed between.
        rate: A matrix is compressed if (n + m) · rank · rate < n · m.
    """

    rank: int
    slices: int = 1
    rate: float = 2.0


@dataclasses.dataclass(frozen=True)
class Matrix:
    """The gradients of one parameter as matrices; each device compresses its shards by themselves.

    Attributes:
        shape: The parameter's shape.
        spec: The sharding of its gradient.
        dims: The two dimensions of a matrix; the others count layers and experts.
        local: The shape of a shard.
    """

    shape: tuple[int, ...]
    spec: tuple[tuple[str, ...], ...]
    dims: tuple[int, int]
    local: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows of a shard: n/f."""
        return self.local[self.dims[0]]

    @property
    def columns(self) -> int:
        """Columns of a shard."""
        return self.local[self.dims[1]]

    @property
    def count(self) -> int:
        """The number of matrices of a device."""
        return math.prod(self.local) // (self.rows * self.columns)

    @property
    def batch(self) -> tuple[int, ...]:
        """The dimensions that count matrices."""
        return tuple(dim for dim in range(len(self.shape)) if dim not in self.dims)

    def sent(self, rank: int) -> int:
        """Return the bytes of P and Q of all matrices of a device."""
        return 4 * rank * (self.rows + self.columns) * self.count

    @property
    def error_spec(self) -> P:
        """The spec of the errors, `[device of data, *shape]`."""
        return P(AXIS, *dims_spec(self.spec))

    @property
    def q_spec(self) -> P:
        """The spec of Q, `[shard of rows, *batch, rank, m]`."""
        return dims_spec([self.spec[self.dims[0]], *(self.spec[dim] for dim in self.batch), (), self.spec[self.dims[1]]])

    def q_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of Q on all devices."""
        shards = self.shape[self.dims[0]] // self.rows
        return (shards, *(self.shape[dim] for dim in self.batch), rank, self.shape[self.dims[1]])


def find_matrices(plan: ShardingPlan, powersgd: PowerSGD) -> tuple[dict[str, Matrix], dict[str, str]]:
    """Return path → matrices that are compressed, and path → the reason why a gradient is sent as it is."""
    matrices, plain = dict[str, Matrix](), dict[str, str]()
    for entry in plan.gradients:
        stacked = dims_of(entry.path, plan.rules.stacks)
        if len(entry.shape) - len(stacked) < 2:
            plain[entry.path] = "no matrix"
            continue
        matrix = make_matrix(entry.shape, entry.spec, stacked, plan.mesh)
        if reason := _not_compressed(matrix, powersgd):
            plain[entry.path] = reason
        else:
            matrices[entry.path] = matrix
    return matrices, plain


def make_matrix(shape: tuple[int, ...], spec: P, stacked: Sequence[int], mesh: AnyMesh) -> Matrix:
    """Return the matrices of a gradient: its last two dimensions that are not stacked."""
    dims = spec_dims(spec, len(shape), tuple(axis for axis, size in mesh.shape.items() if size > 1))
    *_, rows, columns = (dim for dim in range(len(shape)) if dim not in stacked)
    local = tuple(size // shards_of(axes, mesh.shape) for size, axes in zip(shape, dims, strict=True))
    return Matrix(shape, tuple(dims), (rows, columns), local)


def _not_compressed(matrix: Matrix, powersgd: PowerSGD) -> str:
    """Return why a matrix is sent as it is, empty if it is compressed."""
    n, m, rank, rate = matrix.rows, matrix.columns, powersgd.rank, powersgd.rate
    if any(AXIS in axes for axes in matrix.spec):
        return f"split over {AXIS}"
    if rank > min(n, m):
        return f"rank {rank} > min({n}, {m})"
    if (n + m) * rank * rate >= n * m:
        return f"({n} + {m}) · {rank} · {rate:g} = {(n + m) * rank * rate:g} ≥ {n} · {m} = {n * m}"
    return ""


def powersgd_problems(plan: ShardingPlan, powersgd: PowerSGD, slices: Mapping[str, int]) -> list[Problem]:
    """Return everything that keeps the gradients of a plan from being compressed; `slices` is axis → slices."""
    name, sizes, problems = "compress.gradients", plan.mesh.shape, list[Problem]()
    if sizes[AXIS] == 1:
        over = f"; fsdp={sizes['fsdp']} splits gradients, whose sum over it is scattered" if sizes["fsdp"] > 1 else ""
        what = f"is powersgd:{powersgd.rank} over {AXIS}, an axis of size 1"
        problems.append(Problem(name, what, f"mesh.{AXIS} = 1: there are no replicas{over}", f"--mesh.{AXIS} 2 or more"))
    if slices.get("fsdp", 1) > 1:
        detail = f"slices.fsdp = {slices['fsdp']}: gradients are scattered over the slow network, and have no replicas"
        fix = f"--slices.{AXIS} {slices['fsdp']} and --slices.fsdp 1"
        problems.append(Problem(name, "is PowerSGD, which cannot compress a reduce-scatter over fsdp", detail, fix))
    if powersgd.slices > 1 and sizes[AXIS] % powersgd.slices:
        detail = f"{sizes[AXIS]} / {powersgd.slices} = {sizes[AXIS] / powersgd.slices:.4g}"
        problems.append(Problem(name, f"is over slices that do not divide {AXIS}", detail, f"--slices.{AXIS} 1"))
    if plan.precision.loss_scale is not None:
        why = "the scale changes between steps, and errors are of gradients without it"
        problems.append(Problem("precision", f"is {plan.precision.name}, with a loss scale", why, "--precision bf16"))
    matrices, plain = find_matrices(plan, powersgd)
    above = {path: reason for path, reason in plain.items() if reason.startswith("rank")}
    if not matrices and above:
        what, fix = f"is powersgd:{powersgd.rank}, a rank above the matrix", "a smaller rank, such as 4"
        problems += [Problem(f"{name}, {path}", what, reason, fix) for path, reason in above.items()]
    elif not matrices:
        detail = "; ".join(f"{path}: {reason}" for path, reason in plain.items())
        problems.append(Problem(name, "is PowerSGD, and no gradient would be smaller", detail, "a smaller rank, or none"))
    return problems


def with_compression(model: Model, plan: ShardingPlan, powersgd: PowerSGD) -> Model:
    """Return the model with the state of compression among its variables; `plan` is that of the model without it.

    Raises:
        ConfigError: Nothing can be compressed, with all reasons.
    """
    if problems := powersgd_problems(plan, powersgd, {}):
        raise ConfigError(_TITLE, problems)
    matrices, _ = find_matrices(plan, powersgd)
    return _with_state(model, tuple(matrices.items()), powersgd.rank, plan.mesh.shape[AXIS])


@functools.lru_cache(maxsize=64)
def _with_state(model: Model, matrices: tuple[tuple[str, Matrix], ...], rank: int, devices: int) -> Model:
    """Return the model with the state; cached, since plans compare a model by identity."""
    shapes = {f"{ERROR}/{path}": (devices, *matrix.shape) for path, matrix in matrices}
    shapes |= {f"{Q}/{path}": matrix.q_shape(rank) for path, matrix in matrices}
    placed = {f"{ERROR}/{path}": matrix.error_spec for path, matrix in matrices}
    placed |= {f"{Q}/{path}": matrix.q_spec for path, matrix in matrices}

    def init(key: jax.Array) -> Any:
        return traverse_util.unflatten_dict({path: _fresh(path, shapes[path]) for path in shapes}, sep="/")

    return with_variables(model, COMPRESSION, init, placed=placed)


def _fresh(path: str, shape: tuple[int, ...]) -> Array:
    """Return the initial value of an array of the state: no error, or a Q that depends on its path alone."""
    kind, _, param = path.partition("/")
    if kind == ERROR:
        return jnp.zeros(shape, jnp.float32)
    return jax.random.normal(jax.random.key(zlib.crc32(param.encode()), impl="threefry2x32"), shape)


def compress(grad_fn: GradFn, powersgd: PowerSGD, axes: tuple[str, ...] = (AXIS,)) -> GradFn:
    """Return a gradient function that exchanges the gradients of `grad_fn` once a step, compressed over `data`.

    Args:
        grad_fn: As for `spmd.exchange_once`; its variables have the state of `with_compression`.
        axes: `("data",)`, or `("data", "fsdp")` to sum over `fsdp` once a step, too, before.
    """

    def last_stage(local: LocalGradients, states: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        if not states:
            fix = "make the plan for with_compression(model, …)"
            raise ConfigError(_TITLE, [Problem(COMPRESSION, "is not among the variables", fix=fix)])
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

    return exchange_once(grad_fn, axes, last_stage)


def _exchange(
    path: str, g: Array, state: tuple[Array, Array], matrix: Matrix, local: LocalGradients, powersgd: PowerSGD
) -> tuple[Array, Array, Array]:
    """Return the sum of a gradient `[device, …]` in the sharding in which the plan keeps it, its errors, and its Q."""
    split, over = split_axes(local.mesh), local.over(path)
    kept, scatters = gradient_dims(path, g.ndim - 1, over, split)
    others = tuple(axis for axis in over if axis != AXIS)
    replicas = Replicas(local.mesh.shape[AXIS], powersgd.slices)

    def run(g: Array, error: Array, q: Array, weight: Array) -> tuple[Array, Array, Array]:
        g = replicas.sum_inside(sum_gradient(g[0], scatters, others))
        divisor = jnp.where(weight > 0, weight, 1.0)
        mean = jnp.moveaxis(g.astype(jnp.float32) * (replicas.count / divisor) + error[0], matrix.dims, (-2, -1))
        product, q = approximate(mean, q[0], replicas)
        left, product = (jnp.moveaxis(x, (-2, -1), matrix.dims) for x in (mean - product, product))
        return (product * divisor).astype(g.dtype), left[None], q[None]

    before = P(over, *dims_spec(kept)), matrix.error_spec, matrix.q_spec, P()
    after = dims_spec(matrix.spec), matrix.error_spec, matrix.q_spec
    with in_scope(current().placements[path].scope):
        return manual_over(local.mesh, split, run, before, after)(g, *state, local.weight)


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
        wire = gradient.dtype if precision is None else precision.exchange_dtypes((AXIS,))[AXIS]
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
    """Return orthonormal rows that span those of `x` (r ≤ n): Gram–Schmidt, each row twice.

    A row of zeros becomes a cosine, so that a matrix that was zero is seen again once it is not.

    Example:
        >>> rows = orthonormal(jnp.array([[2.0, 0.0, 0.0], [1.0, 1.0, 0.0]]))
        >>> abs(rows @ rows.T - jnp.eye(2)).max() < 1e-6
        Array(True, dtype=bool)
    """
    count, size = x.shape[-2:]
    einsum = functools.partial(jnp.einsum, precision="highest")
    angles = jnp.pi / size * jnp.arange(count, dtype=jnp.float32)[:, None] * (jnp.arange(size, dtype=jnp.float32) + 0.5)
    largest = jnp.abs(x).max(axis=(-2, -1), keepdims=True)  # or the squares of small numbers would be zero
    x = x / jnp.where(largest > 0, largest, 1.0)

    def unit(row: Array, instead: Array) -> Array:
        norm = jnp.sqrt(jnp.square(row).sum(axis=-1, keepdims=True))
        return jnp.where(norm > 0, row / jnp.where(norm > 0, norm, 1.0), instead)

    def step(i: Any, x: Array) -> Array:
        is_before = (jnp.arange(count) < i).astype(x.dtype)
        row = jax.lax.dynamic_index_in_dim(x, i, axis=x.ndim - 2, keepdims=False)
        cosine = jnp.cos(jax.lax.dynamic_index_in_dim(angles, i, axis=0, keepdims=False))
        for instead in (cosine, jnp.zeros_like(cosine)):
            row = unit(row - einsum("...r,...rn->...n", is_before * einsum("...rn,...n->...r", x, row), x), instead)
        return jax.lax.dynamic_update_index_in_dim(x, row, i, axis=x.ndim - 2)

    return jax.lax.fori_loop(0, count, step, x)
