"""State of PowerSGD among the variables: the errors of each device, and Q of each matrix (`spmd.gradients.powersgd`).

A plan decides which gradients are compressed; the state is placed as they are, saved in checkpoints, and adapted to
another mesh.
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
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from spmd.errors import ConfigError, Problem
from spmd.model_api.compress import COMPRESSION
from spmd.model_api.model import PRNG, Model
from spmd.model_api.variables import with_variables
from spmd.plan.plan import ShardingPlan
from spmd.sharding.dims import dims_spec, local_shape, spec_dims
from spmd.sharding.layer_paths import dims_of
from spmd.sharding.mesh import AnyMesh

AXIS = "data"
"""The axis over which gradients are compressed."""

ERROR, Q = "error", "q"

TITLE = "Gradients cannot be compressed by PowerSGD:"


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
        rows, columns = (self.spec[dim] for dim in self.dims)
        return dims_spec([rows, *(self.spec[dim] for dim in self.batch), (), columns])

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
    return Matrix(shape, tuple(dims), (rows, columns), local_shape(shape, dims, mesh.shape))


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
        detail = f"mesh.{AXIS} = 1: there are no replicas{over}"
        problems.append(Problem(name, what, detail, f"--mesh.{AXIS} 2 or more"))
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
        what = "is PowerSGD, and no gradient would be smaller"
        problems.append(Problem(name, what, detail, "a smaller rank, or none"))
    return problems


def with_compression(model: Model, plan: ShardingPlan, powersgd: PowerSGD) -> Model:
    """Return the model with the state of compression among its variables; `plan` is that of the model without it.

    Raises:
        ConfigError: Nothing can be compressed, with all reasons.
    """
    if problems := powersgd_problems(plan, powersgd, {}):
        raise ConfigError(TITLE, problems)
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
    return jax.random.normal(jax.random.key(zlib.crc32(param.encode()), impl=PRNG), shape)


def compressed_bytes(plan: ShardingPlan) -> dict[str, tuple[int, int]]:
    """Return path → the bytes of P and of Q that a device sends, for the gradients whose state the plan has."""
    gradients, found = {entry.path: entry for entry in plan.gradients}, dict[str, tuple[int, int]]()
    for entry in plan.variables:
        if entry.path.startswith(prefix := f"{COMPRESSION}/{Q}/"):
            path, rank = entry.path.removeprefix(prefix), entry.shape[-2]
            shape, spec = gradients[path].shape, gradients[path].spec
            matrix = make_matrix(shape, spec, dims_of(path, plan.rules.stacks), plan.mesh)
            found[path] = (4 * rank * matrix.rows * matrix.count, 4 * rank * matrix.columns * matrix.count)
    return found


def stored_compression(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return what to restore of a checkpoint's state: Q of the same shape, and errors of any number of devices."""
    targets = {}
    for path, leaf in wanted.items():
        shape = tuple(stored[path].shape) if path in stored else ()
        if shape == leaf.shape:
            targets[path] = leaf
        elif _is_error(path) and shape[1:] == leaf.shape[1:]:
            sharding = leaf.sharding
            leading = AXIS if shape[0] % sharding.mesh.shape[AXIS] == 0 else None
            sharding = NamedSharding(sharding.mesh, P(leading, *sharding.spec[1:]))
            targets[path] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
    return targets


def adapt_compression(restored: Mapping[str, Array], wanted: Mapping[str, Any]) -> dict[str, Array]:
    """Return the state for another number of devices: each has the mean of the restored errors.

    What was applied and the mean of the errors add up to the mean gradients, so nothing is lost. What the checkpoint
    lacks is as at the start.
    """

    def adapt(path: str, x: Array | None, shape: tuple[int, ...]) -> Array:
        if x is None:
            return _fresh(path.partition(f"{COMPRESSION}/")[2], shape)
        return x if x.shape == shape else jnp.broadcast_to(x.mean(axis=0), shape)

    return {
        path: jax.jit(functools.partial(adapt, path, shape=leaf.shape), out_shardings=leaf.sharding)(restored.get(path))
        if path not in restored or restored[path].shape != leaf.shape
        else restored[path]
        for path, leaf in wanted.items()
    }


def _is_error(path: str) -> bool:
    return f"{COMPRESSION}/{ERROR}/" in path
