"""DiLoCo as a gradient transform: steps of replicas, and the outer optimizer's updates.

The parameters θ of the training state are those of the outer optimizer, to evaluate and to export.
Each of R replicas has parameters of its own, w, and an inner optimizer's state. In a step each takes
one of its own. A fragment is synchronised every H steps (arXiv:2308.08105, algorithm 1, is without
fragments and without α):

    Δ = mean over replicas of (θ − w),  θ ← outer update of θ by Δ as the gradient,
    w ← α w + (1 − α) θ

```python
mesh = spmd.make_mesh(data=2, fsdp=4)
inner = spmd.make_train_step(
    spmd.make_plan(spmd.replica_mesh(mesh), rules, model, optax.adamw(3e-4)), loss_fn
)
outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
plan = spmd.make_plan(mesh, rules, model, outer, transforms=[spmd.DiLoCo(inner, every=32)])
step = spmd.make_train_step(plan, loss_fn)
```
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.codecs import EXCHANGES, GradientCodec
from spmd.coded_comm.codes import sum_gathered_codes
from spmd.diloco.fragments import Fragment, divide, fragment_problems
from spmd.diloco.replicas import AXIS, Replicas, mean_metrics, replica_mesh
from spmd.errors import CheckpointError, Problem, any_of
from spmd.model_interface.grad_transform import GradTransform, StateArray, StepFn
from spmd.optim.extra_args import update_with
from spmd.optim.storage import ON_DEVICES
from spmd.plan.context import use_plan
from spmd.plan.manual import shard_map_over, split_axes
from spmd.plan.plan import ShardingPlan
from spmd.plan.scopes import OPTIMIZER, comm_scope, in_scope
from spmd.sharding.dims import local_shape, spec_dims
from spmd.sharding.mesh import entry_axes
from spmd.sharding.optimizer_state import followed_params
from spmd.training.state import TrainState
from spmd.training.step import Metrics, TrainStep

_SETTING = "DiLoCo"
_DIFFERENCES = comm_scope("outer gradients, between replicas")
_VARIABLES = comm_scope("variables of replicas, averaged")


@dataclasses.dataclass(frozen=True)
class DiLoCo(GradTransform):
    """Replicas along `data` that train by themselves and are synchronised every few steps.

    The plan's optimizer is the outer one. Metrics are means over the replicas, by their tokens.

    Attributes:
        inner: The train step of one replica, of a plan on `spmd.replica_mesh(mesh)`.
        every: Steps between two synchronisations of a parameter, H.
        fragments: Number of parts of the parameters, each synchronised at a step of its own.
        codec: Codec of the terms of Δ on the wire, such as `int4`; empty for float32. Their mean is
            computed in float32.
        keep: The share of its own parameters that a replica keeps, α.
    """

    name = "diloco"
    optional = True

    inner: TrainStep
    every: int
    fragments: int = 1
    codec: str = ""
    keep: float = 0.0

    def state(self, plan: ShardingPlan) -> dict[str, StateArray]:
        """Return what each replica has of its own, `[replica, …]`."""
        replicas = self._replicas(plan)
        state = dict[str, StateArray]()
        for path, x in replicas.abstract().items():
            shape = (replicas.count, *x.shape)
            state[path] = StateArray(shape, x.dtype, P(AXIS, *x.sharding.spec))
        return state

    def init(self, plan: ShardingPlan, key: jax.Array, params: Any) -> Any:
        """Return the state before the first step: all replicas alike."""
        inner = self.inner.plan
        transforms = dict[str, Any]()
        for transform in inner.transforms:
            if transform.name in inner.abstract_transforms:
                transforms[transform.name] = transform.init(inner, key, params)
        state = TrainState(
            step=None,
            params=params,
            variables=inner.model.init_variables(key),
            optimizer_state=inner.optimizer.init(params),
            key=None,
            transforms=transforms,
        )
        replicas = self._replicas(plan)
        copies = dict[str, jax.Array]()
        for path, x in replicas.own(state).items():
            copies[path] = jnp.broadcast_to(x, (replicas.count, *x.shape))
        return tree.nested(copies)

    def replace_step(self, step: StepFn, plan: ShardingPlan) -> StepFn:
        """Return the step of all replicas, and the outer updates after it."""
        del step
        return functools.partial(self._step, plan=plan)

    def _step(
        self, state: TrainState, batch: Any, plan: ShardingPlan
    ) -> tuple[TrainState, Metrics]:
        replicas = self._replicas(plan)
        own, metrics = replicas.step(tree.flatten(state.transforms[self.name]), state, batch, plan)
        state = dataclasses.replace(state, step=state.step + 1)
        with use_plan(plan):
            for fragment in divide(plan, self.fragments):
                state, own = self._synchronized(fragment, state, own, plan)
        state = dataclasses.replace(state, transforms={self.name: tree.nested(own)})
        return state, mean_metrics(metrics)

    def _synchronized(
        self,
        fragment: Fragment,
        state: TrainState,
        own: Mapping[str, jax.Array],
        plan: ShardingPlan,
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Return the state, and what replicas have of their own, after a fragment's turn."""
        sync = _Synchronization(self, fragment, plan)
        arrays = sync.arrays(state, own)
        since = state.step - fragment.offset(self.every)
        is_due = since % self.every == 0
        arrays = jax.lax.cond(is_due, sync.run, lambda arrays: arrays, arrays)
        return sync.with_arrays(state, own, arrays)

    def _replicas(self, plan: ShardingPlan) -> Replicas:
        return Replicas(plan.mesh, self.inner)

    def targets(
        self, stored: Mapping[str, Any], wanted: Mapping[str, Any]
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the arrays to restore, of any number of replicas."""
        targets = {}
        for path, leaf in wanted.items():
            if path not in stored:
                continue
            shape = tuple(stored[path].shape)
            if shape[1:] != leaf.shape[1:]:
                continue
            sharding = leaf.sharding
            leading = None
            if shape[0] % sharding.mesh.shape[AXIS] == 0:
                leading = AXIS
            sharding = NamedSharding(sharding.mesh, P(leading, *sharding.spec[1:]))
            targets[path] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
        return targets

    def adapt(
        self, restored: Mapping[str, jax.Array], wanted: Mapping[str, Any]
    ) -> dict[str, jax.Array]:
        """Return the state for another number of replicas: each has the mean of the restored ones.

        So the mean of θ − w stays. Counters are those of the first replica.

        Raises:
            CheckpointError: The checkpoint has no replicas, or those of another model.
        """
        missing = [path for path in wanted if path not in restored]
        if missing:
            detail = f"{len(missing)} of {len(wanted)} arrays are missing, such as {missing[0]}"
            fix = "start a new run from its parameters (--init)"
            problem = Problem("checkpoint", "has no replicas of this model", detail, fix)
            raise CheckpointError("The run cannot be resumed:", [problem])
        state = dict[str, jax.Array]()
        for path, leaf in wanted.items():
            x = restored[path]
            if x.shape != leaf.shape:
                adapt = functools.partial(_other_count, shape=leaf.shape)
                x = jax.jit(adapt, out_shardings=leaf.sharding)(x)
            state[path] = x
        return state

    def problems(self, plan: ShardingPlan) -> Sequence[Problem]:
        """Return the reasons against DiLoCo with a plan."""
        problems = [*self._setting_problems(), *self._mesh_problems(plan)]
        if problems:
            return problems
        return [*self._plan_problems(plan), *self._fragment_problems(plan)]

    def _setting_problems(self) -> Iterator[Problem]:
        """Yield the problems of the fields."""
        if self.every < 1:
            yield Problem("every", f"is {self.every} steps", fix="1 or more, such as 32")
        if self.fragments < 1:
            yield Problem("fragments", f"are {self.fragments}", fix="1 or more")
        if not 0 <= self.keep < 1:
            fix = "at least 0 and below 1: replicas that keep everything are never synchronised"
            yield Problem("keep", f"is {self.keep}", fix=fix)
        if self.codec and self.codec not in EXCHANGES:
            yield Problem("codec", f"is {self.codec!r}", fix=any_of([*EXCHANGES, "''"]))

    def _mesh_problems(self, plan: ShardingPlan) -> Iterator[Problem]:
        """Yield the problems of the meshes of all replicas and of one."""
        sizes = plan.mesh.shape
        if sizes[AXIS] == 1:
            detail = f"mesh.{AXIS} = 1: there are no replicas"
            fix = f"mesh.{AXIS}=2 or more, such as the number of slices"
            yield Problem(_SETTING, f"has no replicas along {AXIS}", detail, fix)
            return
        if sizes["pipe"] > 1:
            detail = f"mesh.pipe = {sizes['pipe']}: XLA has no region over {AXIS} inside of pipe"
            yield Problem(_SETTING, "is not for pipelines", detail, "mesh.pipe=1, and fsdp")
        mesh = self.inner.plan.mesh
        wanted = replica_mesh(plan.mesh)
        differ = dict(mesh.shape) != dict(wanted.shape)
        if isinstance(wanted, Mesh) and not differ:
            differ = mesh != wanted
        if differ:
            what = f"is of a step on the mesh {dict(mesh.shape)}"
            detail = f"a replica has {dict(wanted.shape)}"
            fix = "spmd.make_plan(spmd.replica_mesh(mesh), …)"
            yield Problem(f"{_SETTING}, inner", what, detail, fix)

    def _plan_problems(self, plan: ShardingPlan) -> Iterator[Problem]:
        """Yield the problems of the plans of all replicas and of one."""
        inner = self.inner.plan
        others = [each.name for each in plan.transforms if each is not self]
        if others:
            what = f"is beside {', '.join(others)}, which would act on nothing"
            yield Problem(_SETTING, what, fix="give them to the plan of the inner step")
        differences = tree.check_like(inner.abstract_params, plan.abstract_params, "params")
        if differences:
            what = f"has other parameters in the inner step: {differences[0]}"
            yield Problem(_SETTING, what, fix="one model and one precision for both plans")
        for planned, name in ((plan, "outer"), (inner, "inner")):
            if planned.storage != ON_DEVICES:
                what = f"has arrays of the {name} plan in host memory"
                yield Problem(_SETTING, what, fix="offload=none")
            if planned.precision.master:
                what = f"has master weights in the {name} optimizer"
                detail = "a replica's would not follow its parameters when they are set"
                yield Problem(_SETTING, what, detail, 'precision="bf16"')
        for entry in (*plan.params, *plan.optimizer_state):
            if any(AXIS in entry_axes(part) for part in entry.spec):
                what = f"has {entry.path} split over {AXIS}, and each replica needs all of it"
                yield Problem(_SETTING, what, fix="fsdp in the rule, or a ZeRO stage over fsdp")

    def _fragment_problems(self, plan: ShardingPlan) -> Iterator[Problem]:
        """Yield the problems of fragments."""
        yield from fragment_problems(divide(plan, self.fragments), self.every)
        if self.fragments == 1:
            return
        params = {entry.path for entry in plan.params}
        followed = followed_params(plan.abstract_optimizer_state, dict.fromkeys(params))
        for entry in plan.optimizer_state:
            param = followed.get(entry.path)
            shapes = [each.shape for each in plan.params if each.path == param]
            if shapes != [entry.shape]:
                what = f"has {entry.path} in the outer optimizer's state, which is of no fragment"
                detail = "fragments are updated one at a time"
                fix = "fragments=1, or an optimizer with moments alone, such as optax.sgd(0.7, 0.9)"
                yield Problem(_SETTING, what, detail, fix)

    def sent(self, plan: ShardingPlan) -> dict[str, dict[str, tuple[int, ...]]]:
        """Return path → axis → bytes of Δ that a device sends in a step, on average."""
        sizes = plan.mesh.shape
        found = {}
        for entry in plan.params:
            ndim = len(entry.shape)
            shape = local_shape(entry.shape, spec_dims(entry.spec, ndim, tuple(sizes)), sizes)
            bits = 32.0
            codec, block = self.codec_of(shape)
            if codec is not None:
                # A sum counts twice (`Transfer.bytes`), and a gather of R terms R times.
                bits = codec.bits(block) * sizes[AXIS] / 2
            found[entry.path] = {AXIS: (math.ceil(math.prod(shape) * bits / 8 / self.every),)}
        return found

    def codec_of(self, shape: Sequence[int]) -> tuple[GradientCodec | None, int]:
        """Return the codec for a shard of this shape and its block; None if it has no blocks."""
        codec = EXCHANGES.get(self.codec)
        if codec is None or not shape:
            return None, 0
        _, block = codec.block_dim(shape)
        if not block:
            return None, 0
        return codec, block


@dataclasses.dataclass(frozen=True)
class _Synchronization:
    """Synchronisation of one fragment.

    It takes and returns dictionaries of arrays: `params/…` and `optimizer/…` of the outer
    optimizer, `own/…` of the replicas' parameters, and, in the first fragment, `variables/…`.
    """

    diloco: DiLoCo
    fragment: Fragment
    plan: ShardingPlan

    @functools.cached_property
    def _followed(self) -> dict[str, str]:
        """Path of an array of the outer optimizer's state → its parameter, if it has one."""
        params = dict.fromkeys(entry.path for entry in self.plan.params)
        return followed_params(self.plan.abstract_optimizer_state, params)

    def arrays(self, state: TrainState, own: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return the arrays that it changes."""
        found = dict[str, jax.Array]()
        for path, x in tree.flatten(state.params).items():
            if path in self.fragment:
                found[f"params/{path}"] = x
                found[f"own/params/{path}"] = own[f"params/{path}"]
        for path, x in tree.flatten(state.optimizer_state).items():
            if self._has_state(path):
                found[f"optimizer/{path}"] = x
        if self.fragment.number == 0:
            for path, x in tree.flatten(state.variables).items():
                if f"variables/{path}" in own:
                    found[f"variables/{path}"] = x
                    found[f"own/variables/{path}"] = own[f"variables/{path}"]
        return found

    def _has_state(self, path: str) -> bool:
        """Return whether an array of the outer optimizer's state belongs to the fragment."""
        if path not in self._followed:
            return self.fragment.number == 0
        return self._followed[path] in self.fragment

    def with_arrays(
        self, state: TrainState, own: Mapping[str, jax.Array], arrays: Mapping[str, jax.Array]
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Return the state, and what replicas have of their own, with the changed arrays."""

        def changed(part: str, before: Any) -> Any:
            return tree.map_with_path(lambda path, x: arrays.get(f"{part}/{path}", x), before)

        state = dataclasses.replace(
            state,
            params=changed("params", state.params),
            variables=changed("variables", state.variables),
            optimizer_state=changed("optimizer", state.optimizer_state),
        )
        return state, {path: arrays.get(f"own/{path}", x) for path, x in own.items()}

    def run(self, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Synchronise the fragment."""
        parts = _below("params", arrays)
        owns = _below("own/params", arrays)
        params = {path: self.fragment.take(path, x) for path, x in parts.items()}
        own = {path: self.fragment.take(path, x, 1) for path, x in owns.items()}
        moved = {path: self._mean_difference(path, params[path], own[path]) for path in params}
        with jax.named_scope(OPTIMIZER):
            after, optimizer = self._outer_update(params, _below("optimizer", arrays), moved)
            kept = self.diloco.keep
            changed = dict(arrays)
            for path, x in after.items():
                target = jnp.broadcast_to(x, own[path].shape)
                if kept:
                    target = kept * own[path] + (1 - kept) * target
                changed[f"params/{path}"] = self.fragment.put(path, parts[path], x)
                changed[f"own/params/{path}"] = self.fragment.put(path, owns[path], target, 1)
            for path, x in optimizer.items():
                changed[f"optimizer/{path}"] = x
        for path, x in _below("own/variables", arrays).items():
            with in_scope(_VARIABLES):
                mean = _mean_of(x)
            changed[f"variables/{path}"] = mean
            changed[f"own/variables/{path}"] = jnp.broadcast_to(mean, x.shape)
        return changed

    def _mean_difference(self, path: str, param: jax.Array, own: jax.Array) -> jax.Array:
        """Return the mean of θ − w over the replicas, of a fragment's part of a parameter."""
        (spec,) = (entry.spec for entry in self.plan.params if entry.path == path)
        mesh = self.plan.mesh

        def mean(param: jax.Array, own: jax.Array) -> jax.Array:
            difference = param.astype(jnp.float32) - own[0].astype(jnp.float32)
            codec, _ = self.diloco.codec_of(difference.shape)
            if codec is None:
                total = jax.lax.psum(difference, AXIS)
            else:
                total = sum_gathered_codes(difference, AXIS, codec)
            return total / mesh.shape[AXIS]

        region = shard_map_over(mesh, split_axes(mesh), mean, (spec, P(AXIS, *spec)), spec)
        with in_scope(_DIFFERENCES):
            return region(param, own).astype(param.dtype)

    def _outer_update(
        self,
        params: Mapping[str, jax.Array],
        optimizer: Mapping[str, jax.Array],
        moved: Mapping[str, jax.Array],
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Return the parameters of a fragment and the optimizer's arrays after an outer update."""
        fragment = self.fragment
        of_params = tree.nested(params)
        abstract = jax.eval_shape(self.plan.optimizer.init, of_params)

        def taken(path: str, _: Any) -> jax.Array:
            if path not in self._followed:
                return optimizer[path]
            return fragment.take(self._followed[path], optimizer[path])

        state = tree.map_with_path(taken, abstract)
        moved_tree = tree.nested(moved)
        updates, state = update_with(self.plan.optimizer, moved_tree, state, of_params, {})
        after = tree.flatten(optax.apply_updates(of_params, updates))
        changed = dict[str, jax.Array]()
        for path, x in tree.flatten(state).items():
            changed[path] = x
            if path in self._followed:
                changed[path] = fragment.put(self._followed[path], optimizer[path], x)
        return after, changed


def _below(prefix: str, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the arrays of paths that begin with a prefix, by the rest of the path."""
    start = f"{prefix}/"
    return {path.removeprefix(start): x for path, x in arrays.items() if path.startswith(start)}


def _mean_of(x: jax.Array) -> jax.Array:
    """Return the mean over replicas of an array `[replica, …]`; of integers, the first."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x.mean(axis=0)
    return x[0]


def _other_count(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return the arrays of another number of replicas, all alike."""
    return jnp.broadcast_to(_mean_of(x), shape)
