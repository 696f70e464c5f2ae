"""PowerSGD: gradients are sent over `data` as products of rank r, with error feedback.

The error of a product is added to the gradients of the next step.

Of each matrix M `[n, m]`, the mean gradient of a device plus its error, two thin matrices are
averaged over the devices of `data` (Vogels et al., arXiv:1905.13727; Q is that of the step before):

    P = orthonormal(mean(M Q)),  Q = mean(Mᵀ P),  sent back: P Qᵀ,  error of the next step: M − P Qᵀ

A matrix is what a device has after the reduce-scatter over `fsdp`: n/f × m, and 4·r·(n/f + m) bytes
are sent of it. P and Q are kept and sent transposed, `[r, n]`, since a TPU pads the last dimension
to 128. Everything is float32.

```python
plan = spmd.make_plan(mesh, rules, model, optimizer, transforms=[PowerSGD(rank=4)])
step = spmd.make_train_step(plan, loss_fn)
```
"""

import dataclasses
import functools
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from spmd import tree
from spmd.errors import Problem
from spmd.gradients.base import GradFn
from spmd.gradients.deferred_reduction import (
    LocalGradients,
    defer_grad_reduction,
    local_gradient,
    reduce_local,
)
from spmd.model_interface.grad_transform import (
    Carry,
    GradTransform,
    StateArray,
    rows_of_devices,
)
from spmd.model_interface.model import PRNG
from spmd.plan.context import current
from spmd.plan.manual import shard_map_over, split_axes
from spmd.plan.plan import ShardingPlan
from spmd.plan.scopes import BEFORE_START, in_scope
from spmd.powersgd.matrices import AXIS, ERROR, NAME, STEP, Matrix, Q, find_matrices, make_matrix
from spmd.sharding.dims import dims_spec
from spmd.sharding.layer_paths import stored_dims

_SETTING = "compress.gradients"
_DEPENDENT = 1e-5
"""Share of a row without its parts along other rows, below which it is rounding error."""


@dataclasses.dataclass(frozen=True)
class PowerSGD(GradTransform):
    """Compression of gradients over `data`, exchanged once a step.

    Attributes:
        rank: Columns of P and of Q.
        slices: Slices that `data` spans. If there are several, gradients are summed inside each and
            compressed between.
        rate: A matrix is compressed if (n + m) · rank · rate < n · m.
        axes: `("data",)`, or `("data", "fsdp")` to sum over `fsdp` once a step, too, before.
        additive: As for `spmd.defer_grad_reduction`.
        start: The first step with compression, from 0; gradients of those before are sent whole.
    """

    name = NAME
    exchanges = True
    optional = True

    rank: int
    slices: int = 1
    rate: float = 2.0
    axes: tuple[str, ...] = (AXIS,)
    additive: bool = False
    start: int = 0

    def state(self, plan: ShardingPlan) -> dict[str, StateArray]:
        """Return the errors of each device, and Q of each matrix."""
        matrices, _ = find_matrices(plan, self.rank, self.rate, self.axes)
        devices = plan.mesh.shape[AXIS]
        state = dict[str, StateArray]()
        for path, matrix in matrices.items():
            error_shape = (devices, *matrix.shape)
            q_shape = matrix.q_shape(self.rank)
            state[f"{ERROR}/{path}"] = StateArray(error_shape, jnp.float32, matrix.error_spec)
            state[f"{Q}/{path}"] = StateArray(q_shape, jnp.float32, matrix.q_spec)
        if self.start:
            state[STEP] = StateArray((), jnp.int32, reason="a counter")
        return state

    def init(self, plan: ShardingPlan, key: jax.Array, params: Any) -> Any:
        """Return the state before the first step."""
        del key, params
        state = dict[str, Array]()
        for path, x in self.state(plan).items():
            state[path] = _fresh(path, x.shape)
        return tree.nested(state)

    def wrap(self, grad_fn: GradFn) -> GradFn:
        """Exchange the gradients of `grad_fn` once a step, compressed over `data`."""
        return defer_grad_reduction(
            grad_fn,
            self.axes,
            self._last_stage,
            own=self.name,
            additive=self.additive,
        )

    def sent(self, plan: ShardingPlan) -> dict[str, dict[str, tuple[int, int]]]:
        """Return path → axis → bytes of P and of Q of all layers, for compressed gradients."""
        matrices, _ = find_matrices(plan, self.rank, self.rate, self.axes)
        found = {}
        for path, matrix in matrices.items():
            found[path] = {AXIS: matrix.sent(self.rank)}
        return found

    def _last_stage(self, local: LocalGradients, carry: Carry) -> tuple[Any, Carry]:
        state = carry.transforms[self.name]
        errors = tree.flatten(state[ERROR])
        qs = tree.flatten(state[Q])
        after: dict[str, Array] = {}

        def reduce(path: str, g: Array) -> Array:
            if path not in errors:
                return reduce_local(path, g, local)
            states = errors[path], qs[path]
            total, error, q = self._from_start(state, path, g, states, local)
            after[f"{ERROR}/{path}"] = error
            after[f"{Q}/{path}"] = q
            return total

        gradients = tree.map_with_path(reduce, local.gradients)
        if self.start:
            after[STEP] = state[STEP] + 1
        return gradients, carry.with_state(self.name, tree.nested(after))

    def _from_start(
        self, state: Any, path: str, g: Array, states: tuple[Array, Array], local: LocalGradients
    ) -> tuple[Array, Array, Array]:
        """Return the sum of a gradient, its errors and its Q, compressed from `start` on."""

        def compressed(g: Array, states: tuple[Array, Array]) -> tuple[Array, Array, Array]:
            placement = current().placements[path]
            spec = placement.of_stack().grad_spec
            stacked = stored_dims(placement.stacks)
            matrix = make_matrix(g.shape[1:], spec, stacked, local.mesh, self.axes)
            return _exchange(path, g, states, matrix, local, self)

        def whole(g: Array, states: tuple[Array, Array]) -> tuple[Array, Array, Array]:
            return reduce_local(path, g, local, BEFORE_START), *states

        if not self.start:
            return compressed(g, states)
        return jax.lax.cond(state[STEP] >= self.start, compressed, whole, g, states)

    def targets(
        self, stored: Mapping[str, Any], wanted: Mapping[str, Any]
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the arrays to restore: Q of the same shape, errors of any number of devices."""
        targets = {}
        for path, leaf in wanted.items():
            shape: tuple[int, ...] = ()
            if path in stored:
                shape = tuple(stored[path].shape)
            if shape == leaf.shape:
                targets[path] = leaf
            elif f"{NAME}/{ERROR}/" in path and shape[1:] == leaf.shape[1:]:
                targets[path] = rows_of_devices(shape, leaf, AXIS)
        return targets

    def adapt(self, restored: Mapping[str, Array], wanted: Mapping[str, Any]) -> dict[str, Array]:
        """Return the state for another number of devices: each has the mean of the restored errors.

        The applied updates and the mean of the errors add up to the mean gradients, so nothing is
        lost. Arrays missing in the checkpoint get their initial values.
        """

        def adapted(path: str, x: Array | None, shape: tuple[int, ...]) -> Array:
            if x is None:
                _, _, own_path = path.partition(f"{NAME}/")
                return _fresh(own_path, shape)
            return jnp.broadcast_to(x.mean(axis=0), shape)

        state = dict[str, Array]()
        for path, leaf in wanted.items():
            x = restored.get(path)
            if x is None or x.shape != leaf.shape:
                adapt = functools.partial(adapted, path, shape=leaf.shape)
                x = jax.jit(adapt, out_shardings=leaf.sharding)(x)
            state[path] = x
        return state

    def problems(self, plan: ShardingPlan) -> list[Problem]:
        """Return the reasons against compressing the gradients of a plan."""
        return [
            *self._transform_problems(plan),
            *self._axis_problems(plan),
            *self._slice_problems(plan),
            *self._matrix_problems(plan),
        ]

    def _transform_problems(self, plan: ShardingPlan) -> Iterator[Problem]:
        """Yield the problems of the other transforms."""
        if plan.transforms[0] != self:
            what = "is PowerSGD inside of another transform"
            fix = "it gets the gradients of each device: put it first"
            yield Problem(_SETTING, what, fix=fix)
        if any(other.overlapping_steps for other in plan.transforms):
            what = "is PowerSGD, which compresses the sum of a step"
            detail = "a step has no sum of its own while microbatches are in flight"
            yield Problem(_SETTING, what, detail, 'pipeline.schedule="1f1b"')

    def _axis_problems(self, plan: ShardingPlan) -> Iterator[Problem]:
        """Yield a problem if there are no replicas."""
        sizes = plan.mesh.shape
        if sizes[AXIS] > 1:
            return
        what = f"is powersgd:{self.rank} over {AXIS}, an axis of size 1"
        detail = f"mesh.{AXIS} = 1: there are no replicas"
        if sizes["fsdp"] > 1:
            detail += f"; fsdp={sizes['fsdp']} splits gradients, whose sum over it is scattered"
        yield Problem(_SETTING, what, detail, f"mesh.{AXIS}=2 or more")

    def _slice_problems(self, plan: ShardingPlan) -> Iterator[Problem]:
        """Yield the problems of slices."""
        over_fsdp = plan.slices.get("fsdp", 1)
        if over_fsdp > 1:
            what = "is PowerSGD, which cannot compress a reduce-scatter over fsdp"
            detail = (
                f"slices.fsdp = {over_fsdp}: "
                "gradients are scattered over the slow network, without replicas"
            )
            yield Problem(_SETTING, what, detail, f"slices.{AXIS}={over_fsdp} and slices.fsdp=1")
        devices = plan.mesh.shape[AXIS]
        if self.slices > 1 and devices % self.slices:
            what = f"is over slices that do not divide {AXIS}"
            detail = f"{devices} / {self.slices} = {devices / self.slices:.4g}"
            yield Problem(_SETTING, what, detail, f"slices.{AXIS}=1")

    def _matrix_problems(self, plan: ShardingPlan) -> Iterator[Problem]:
        """Yield the problems if no gradient would be compressed."""
        matrices, plain = find_matrices(plan, self.rank, self.rate, self.axes)
        if matrices:
            return
        above = dict[str, str]()
        for path, reason in plain.items():
            if reason.startswith("rank"):
                above[path] = reason
        if not above:
            detail = "; ".join(f"{path}: {reason}" for path, reason in plain.items())
            what = "is PowerSGD, and no gradient would be smaller"
            yield Problem(_SETTING, what, detail, "a smaller rank, or none")
        for path, reason in above.items():
            what = f"is powersgd:{self.rank}, a rank above the matrix"
            yield Problem(f"{_SETTING}, {path}", what, reason, "a smaller rank, such as 4")


def _fresh(path: str, shape: tuple[int, ...]) -> Array:
    """Return the initial value of an array of the state: no error, or a random Q by its path."""
    kind, _, param = path.partition("/")
    if kind == STEP:
        return jnp.zeros(shape, jnp.int32)
    if kind == ERROR:
        return jnp.zeros(shape, jnp.float32)
    key = jax.random.key(zlib.crc32(param.encode()), impl=PRNG)
    return jax.random.normal(key, shape)


def _exchange(
    path: str,
    g: Array,
    state: tuple[Array, Array],
    matrix: Matrix,
    local: LocalGradients,
    powersgd: PowerSGD,
) -> tuple[Array, Array, Array]:
    """Return the sum of a gradient `[device, …]`, as the plan keeps it, its errors, and its Q."""
    over = local.over(path)
    param = local_gradient(path, g.ndim - 1, over)
    others = tuple(axis for axis in over if axis != AXIS)
    replicas = Replicas(local.mesh.shape[AXIS], powersgd.slices)

    def run(g: Array, error: Array, q: Array, weight: Array) -> tuple[Array, Array, Array]:
        g = replicas.sum_inside(param.reduce(g[0], others))
        divisor = jnp.where(weight > 0, weight, 1.0)
        mean = g.astype(jnp.float32) * (replicas.count / divisor) + error[0]
        mean = jnp.moveaxis(mean, matrix.dims, (-2, -1))  # [*batch, n, m]
        product, q = approximate(mean, q[0], replicas)
        left = jnp.moveaxis(mean - product, (-2, -1), matrix.dims)
        product = jnp.moveaxis(product, (-2, -1), matrix.dims)
        return (product * divisor).astype(g.dtype), left[None], q[None]

    before = P(over, *dims_spec(param.compute_dims)), matrix.error_spec, matrix.q_spec, P()
    after = dims_spec(matrix.spec), matrix.error_spec, matrix.q_spec
    region = shard_map_over(local.mesh, split_axes(local.mesh), run, before, after)
    with in_scope(param.scope):
        return region(g, *state, local.weight)


@dataclasses.dataclass(frozen=True)
class Replicas:
    """Groups of devices along `data`: inside a slice, and between slices, with compression.

    Attributes:
        devices: The size of `data`.
        slices: The slices that it spans. The devices of a slice follow each other.
    """

    devices: int
    slices: int = 1

    @property
    def inside(self) -> int:
        """Number of devices in a first, uncompressed sum: those of a slice, 1 for one slice."""
        if self.slices <= 1:
            return 1
        return self.devices // self.slices

    @property
    def count(self) -> int:
        """The number of compressed gradients, one for each group."""
        return self.devices // self.inside

    def sum_inside(self, gradient: Array) -> Array:
        """Sum a gradient over the devices of a slice, in the dtype of the precision policy."""
        if self.inside == 1:
            return gradient
        groups = self._device_numbers().tolist()
        precision = current().precision
        wire: Any = gradient.dtype
        if precision is not None:
            wire = precision.exchange_names((AXIS,))[AXIS]
        total = jax.lax.psum(gradient.astype(wire), AXIS, axis_index_groups=groups)
        return total.astype(gradient.dtype)

    def mean(self, x: Array) -> Array:
        """Return the mean between slices, or over all devices of `data` for one slice."""
        groups = None
        if self.inside > 1:
            groups = self._device_numbers().T.tolist()
        return jax.lax.psum(x, AXIS, axis_index_groups=groups) / self.count

    def _device_numbers(self) -> np.ndarray:
        """Return the places of the devices along `data`, `[slice, device]`."""
        return np.arange(self.devices).reshape(self.count, self.inside)


def approximate(
    matrices: Float[Array, "*batch n m"], q: Float[Array, "*batch r m"], replicas: Replicas
) -> tuple[Float[Array, "*batch n m"], Float[Array, "*batch r m"]]:
    """Approximate the mean of `matrices` over devices by rank r; return it and the next Q.

    Call it in a manual region.
    """
    einsum = functools.partial(jnp.einsum, precision="highest")
    mq = einsum("...nm,...rm->...rn", matrices, orthonormal(q))
    p = orthonormal(replicas.mean(mq))
    q = replicas.mean(einsum("...nm,...rn->...rm", matrices, p))
    return einsum("...rn,...rm->...nm", p, q), q


def orthonormal(x: Float[Array, "*batch r n"]) -> Float[Array, "*batch r n"]:
    """Return orthonormal rows with the span of the rows of `x` (r ≤ n), by Gram–Schmidt.

    Each row is projected again.

    A row that depends on those before it, such as a row of zeros, becomes a cosine without their
    parts: otherwise a matrix whose gradient was zero once would stay zero.

    Example:
        >>> rows = orthonormal(jnp.array([[2.0, 0.0, 0.0], [1.0, 1.0, 0.0]]))
        >>> abs(rows @ rows.T - jnp.eye(2)).max() < 1e-6
        Array(True, dtype=bool)
    """
    count, size = x.shape[-2:]
    einsum = functools.partial(jnp.einsum, precision="highest")
    angles = jnp.pi / size * jnp.outer(jnp.arange(count), jnp.arange(size) + 0.5)
    cosines = jnp.cos(angles).astype(x.dtype)
    # Scaled first: the squares of small numbers would be zero.
    largest = jnp.abs(x).max(axis=(-2, -1), keepdims=True)
    x = x / jnp.where(largest > 0, largest, 1.0)

    def norm(row: Array) -> Array:
        return jnp.sqrt(jnp.square(row).sum(axis=-1, keepdims=True))

    def unit(row: Array) -> Array:
        return row / jnp.where(norm(row) > 0, norm(row), 1.0)

    def step(i: Any, x: Array) -> Array:
        is_before = (jnp.arange(count) < i).astype(x.dtype)

        def remaining(row: Array) -> Array:
            parts = einsum("...rn,...n,r->...r", x, row, is_before)  # along the rows before
            return row - einsum("...r,...rn->...n", parts, x)

        given = jax.lax.dynamic_index_in_dim(x, i, axis=x.ndim - 2, keepdims=False)
        cosine = jax.lax.dynamic_index_in_dim(cosines, i, axis=0, keepdims=False)
        cosine = jnp.broadcast_to(cosine, given.shape)
        row = remaining(given)
        is_dependent = norm(row) <= _DEPENDENT * norm(given)
        row = remaining(jnp.where(is_dependent, cosine, row))
        row = unit(remaining(unit(row)))
        return jax.lax.dynamic_update_index_in_dim(x, row, i, axis=x.ndim - 2)

    return jax.lax.fori_loop(0, count, step, x)
