"""PowerSGD: gradients are sent over `data` as products of rank r, and what is lost is added to the next gradients.

Of each matrix M `[n, m]`, the mean gradient of a device plus its error, two thin matrices are averaged over the devices
of `data` (Vogels et al., arXiv:1905.13727; Q is that of the step before):

    P = orthonormal(mean(M Q)),  Q = mean(Mᵀ P),  sent back: P Qᵀ,  error of the next step: M − P Qᵀ

A matrix is what a device has after the reduce-scatter over `fsdp`: n/f × m, and 4·r·(n/f + m) bytes are sent of it. P
and Q are kept and sent transposed, `[r, n]`, since a TPU pads the last dimension to 128. Everything is float32.

```python
plan = spmd.make_plan(mesh, rules, model, optimizer, transforms=[PowerSGD(rank=4)])
step = spmd.make_train_step(plan, loss_fn)
```
"""

import dataclasses
import functools
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from spmd import tree
from spmd.errors import Problem
from spmd.gradients.base import GradFn
from spmd.gradients.exchange import LocalGradients, exchange, exchange_once, local_gradient
from spmd.model_api.grad_transform import Carry, GradTransform, StateArray
from spmd.model_api.model import PRNG
from spmd.plan.context import current
from spmd.plan.manual import manual_over, split_axes
from spmd.plan.plan import ShardingPlan
from spmd.plan.scopes import in_scope
from spmd.powersgd.matrices import AXIS, ERROR, NAME, Matrix, Q, find_matrices, make_matrix
from spmd.sharding.dims import dims_spec
from spmd.sharding.layer_paths import stored_dims

_DEPENDENT = 1e-5
"""Share of a row that is left without the parts along other rows, below which it is rounding error."""


@dataclasses.dataclass(frozen=True)
class PowerSGD(GradTransform):
    """Compression of the gradients of a step over `data`, which are exchanged once.

    Attributes:
        rank: Columns of P and of Q.
        slices: Slices that `data` spans. If there are several, gradients are summed inside each and compressed between.
        rate: A matrix is compressed if (n + m) · rank · rate < n · m.
        axes: `("data",)`, or `("data", "fsdp")` to sum over `fsdp` once a step, too, before.
        additive: As for `spmd.exchange_once`.
    """

    name = NAME
    exchanges = True
    optional = True

    rank: int
    slices: int = 1
    rate: float = 2.0
    axes: tuple[str, ...] = (AXIS,)
    additive: bool = False

    def state(self, plan: ShardingPlan) -> dict[str, StateArray]:
        """Return the errors of each device, and Q of each matrix."""
        matrices, _ = find_matrices(plan, self.rank, self.rate)
        devices, state = plan.mesh.shape[AXIS], dict[str, StateArray]()
        for path, matrix in matrices.items():
            state[f"{ERROR}/{path}"] = StateArray((devices, *matrix.shape), jnp.float32, matrix.error_spec)
            state[f"{Q}/{path}"] = StateArray(matrix.q_shape(self.rank), jnp.float32, matrix.q_spec)
        return state

    def init(self, plan: ShardingPlan, key: jax.Array, params: Any) -> Any:
        """Return the state before the first step."""
        del key, params
        made = {path: _fresh(path, x.shape) for path, x in self.state(plan).items()}
        return tree.nested(made)

    def wrap(self, grad_fn: GradFn) -> GradFn:
        """Return a gradient function that exchanges the gradients of `grad_fn` once a step, compressed over `data`."""
        return exchange_once(grad_fn, self.axes, self._last_stage, own=self.name, additive=self.additive)

    def _last_stage(self, local: LocalGradients, carry: Carry) -> tuple[Any, Carry]:
        state = carry.transforms[self.name]
        errors, qs = (tree.flatten(state[part]) for part in (ERROR, Q))
        after: dict[str, Array] = {}

        def reduce(path: str, g: Array) -> Array:
            if path not in errors:
                return exchange(path, g, local)
            placement = current().placements[path]
            spec, stacked = placement.of_stack().gradient, stored_dims(placement.stacks)
            matrix = make_matrix(g.shape[1:], spec, stacked, local.mesh)
            states = errors[path], qs[path]
            g, after[f"{ERROR}/{path}"], after[f"{Q}/{path}"] = _exchange(path, g, states, matrix, local, self)
            return g

        gradients = tree.map_with_path(reduce, local.gradients)
        return gradients, carry.with_state(self.name, tree.nested(after))

    def targets(self, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Return what to restore of a checkpoint's state: Q of the same shape, and errors of any number of devices."""
        targets = {}
        for path, leaf in wanted.items():
            shape = tuple(stored[path].shape) if path in stored else ()
            if shape == leaf.shape:
                targets[path] = leaf
            elif f"{NAME}/{ERROR}/" in path and shape[1:] == leaf.shape[1:]:
                sharding = leaf.sharding
                leading = AXIS if shape[0] % sharding.mesh.shape[AXIS] == 0 else None
                sharding = NamedSharding(sharding.mesh, P(leading, *sharding.spec[1:]))
                targets[path] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
        return targets

    def adapt(self, restored: Mapping[str, Array], wanted: Mapping[str, Any]) -> dict[str, Array]:
        """Return the state for another number of devices: each has the mean of the restored errors.

        What was applied and the mean of the errors add up to the mean gradients, so nothing is lost. What the
        checkpoint lacks is as at the start.
        """

        def adapted(path: str, x: Array | None, shape: tuple[int, ...]) -> Array:
            if x is None:
                return _fresh(path.partition(f"{NAME}/")[2], shape)
            return x if x.shape == shape else jnp.broadcast_to(x.mean(axis=0), shape)

        state = dict[str, Array]()
        for path, leaf in wanted.items():
            x = restored.get(path)
            if x is None or x.shape != leaf.shape:
                make = jax.jit(functools.partial(adapted, path, shape=leaf.shape), out_shardings=leaf.sharding)
                x = make(x)
            state[path] = x
        return state

    def problems(self, plan: ShardingPlan) -> list[Problem]:
        """Return everything that keeps the gradients of a plan from being compressed."""
        name, sizes, problems = "compress.gradients", plan.mesh.shape, list[Problem]()
        if plan.transforms[0] != self:
            what, fix = "is PowerSGD inside of another transform", "it gets the gradients of each device: put it first"
            problems.append(Problem(name, what, fix=fix))
        if any(other.overlapping_steps for other in plan.transforms):
            what = "is PowerSGD, which compresses the sum of a step"
            detail = "a step has no sum of its own while microbatches are in flight"
            problems.append(Problem(name, what, detail, "--pipeline.schedule 1f1b or interleaved"))
        if sizes[AXIS] == 1:
            over = (
                f"; fsdp={sizes['fsdp']} splits gradients, whose sum over it is scattered" if sizes["fsdp"] > 1 else ""
            )
            what = f"is powersgd:{self.rank} over {AXIS}, an axis of size 1"
            detail = f"mesh.{AXIS} = 1: there are no replicas{over}"
            problems.append(Problem(name, what, detail, f"--mesh.{AXIS} 2 or more"))
        if plan.slices.get("fsdp", 1) > 1:
            detail = (
                f"slices.fsdp = {plan.slices['fsdp']}: gradients are scattered over the slow network, without replicas"
            )
            fix = f"--slices.{AXIS} {plan.slices['fsdp']} and --slices.fsdp 1"
            problems.append(Problem(name, "is PowerSGD, which cannot compress a reduce-scatter over fsdp", detail, fix))
        if self.slices > 1 and sizes[AXIS] % self.slices:
            detail = f"{sizes[AXIS]} / {self.slices} = {sizes[AXIS] / self.slices:.4g}"
            problems.append(Problem(name, f"is over slices that do not divide {AXIS}", detail, f"--slices.{AXIS} 1"))
        matrices, plain = find_matrices(plan, self.rank, self.rate)
        above = {path: reason for path, reason in plain.items() if reason.startswith("rank")}
        if not matrices and above:
            what, fix = f"is powersgd:{self.rank}, a rank above the matrix", "a smaller rank, such as 4"
            problems += [Problem(f"{name}, {path}", what, reason, fix) for path, reason in above.items()]
        elif not matrices:
            detail = "; ".join(f"{path}: {reason}" for path, reason in plain.items())
            what = "is PowerSGD, and no gradient would be smaller"
            problems.append(Problem(name, what, detail, "a smaller rank, or none"))
        return problems


def _fresh(path: str, shape: tuple[int, ...]) -> Array:
    """Return the initial value of an array of the state: no error, or a Q that depends on its path alone."""
    kind, _, param = path.partition("/")
    if kind == ERROR:
        return jnp.zeros(shape, jnp.float32)
    return jax.random.normal(jax.random.key(zlib.crc32(param.encode()), impl=PRNG), shape)


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
