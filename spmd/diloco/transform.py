"""DiLoCo as a gradient transform: steps of replicas, and the outer optimizer's updates.

The parameters θ of the training state are those of the outer optimizer, to evaluate and to export.
Each of R replicas has parameters of its own, w, and an inner optimizer's state. In a step each takes
one of its own. A fragment is synchronized every H steps (arXiv:2308.08105, algorithm 1, is without
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
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.codecs import EXCHANGES
from spmd.diloco.exchange import PLAIN, OuterExchange
from spmd.diloco.fragments import divide, fragment_problems
from spmd.diloco.replicas import AXIS, Replicas, mean_metrics, replica_mesh
from spmd.diloco.synchronization import Synchronization
from spmd.errors import CheckpointError, Problem, any_of
from spmd.model_interface.grad_transform import GradTransform, StateArray, StepFn, rows_of_devices
from spmd.optim.evaluated_params import evaluated_kinds
from spmd.optim.storage import ON_DEVICES
from spmd.plan.context import use_plan
from spmd.plan.plan import ShardingPlan
from spmd.sharding.dims import local_shape, spec_dims
from spmd.sharding.mesh import entry_axes
from spmd.sharding.optimizer_state import followed_params
from spmd.training.state import TrainState
from spmd.training.step import Metrics, TrainStep

_SETTING = "DiLoCo"


@dataclasses.dataclass(frozen=True)
class DiLoCo(GradTransform):
    """Replicas along `data`, each with steps of its own, synchronized every few steps.

    The plan's optimizer is the outer one. Metrics are means over the replicas, by their tokens.

    Attributes:
        inner: The train step of one replica, of a plan on `spmd.replica_mesh(mesh)`.
        every: Steps between two synchronizations of a parameter, H.
        fragments: Number of parts of the parameters, each synchronized at a step of its own.
        codec: How the terms of Δ are sent: `float32`, or a codec such as `int4`. Their mean is
            computed in float32.
        keep: The share of its own parameters that a replica keeps, α.
    """

    name = "diloco"
    optional = True
    has_own_optimizer = True

    inner: TrainStep
    every: int
    fragments: int = 1
    codec: str = PLAIN
    keep: float = 0.0

    def state(self, plan: ShardingPlan) -> dict[str, StateArray]:
        """Return the arrays of all replicas, `[replica, …]`."""
        replicas = self._replicas(plan)
        rules = replicas.rules
        state = dict[str, StateArray]()
        for path, x in replicas.abstract().items():
            shape = (replicas.count, *x.shape)
            spec = P(AXIS, *x.sharding.spec)
            state[path] = StateArray(shape, x.dtype, spec, rule=rules[path])
        return state

    def init_beside(self, plan: ShardingPlan, key: jax.Array, params: Any, variables: Any) -> Any:
        """Return the state before the first step: all replicas alike, but for random keys."""
        inner = self.inner.plan
        transforms = dict[str, Any]()
        for transform in inner.transforms:
            if transform.name in inner.abstract_transforms:
                made = transform.init_beside(inner, key, params, variables)
                transforms[transform.name] = made
        state = TrainState(
            step=None,
            params=params,
            variables=variables,
            optimizer_state=inner.optimizer.init(params),
            key=None,
            transforms=transforms,
        )
        replicas = self._replicas(plan)
        copies = dict[str, jax.Array]()
        for path, x in replicas.own(state).items():
            copies[path] = replicas.copies(path, x)
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
        exchange = OuterExchange(plan.mesh, self.codec)
        with use_plan(plan):
            for fragment in divide(plan, self.fragments):
                synchronization = Synchronization(fragment, plan, exchange, self.keep, replicas)
                is_due = (state.step - fragment.offset(self.every)) % self.every == 0
                arrays = synchronization.read(state, own)
                arrays = jax.lax.cond(is_due, synchronization.run, lambda same: same, arrays)
                state, own = synchronization.write(state, own, arrays)
        state = dataclasses.replace(state, transforms={self.name: tree.nested(own)})
        return state, mean_metrics(metrics)

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
            if shape[1:] == leaf.shape[1:]:
                targets[path] = rows_of_devices(shape, leaf, AXIS)
        return targets

    def adapt(
        self, restored: Mapping[str, jax.Array], wanted: Mapping[str, Any]
    ) -> dict[str, jax.Array]:
        """Return the state for another number of replicas: each has the mean of the restored ones.

        So the mean of θ − w stays. Counters, and codes of moments with their scales, are those of
        the first replica.

        Raises:
            CheckpointError: The checkpoint has no replicas, or those of another model.
        """
        missing = [path for path in wanted if path not in restored]
        if missing:
            detail = f"{len(missing)} of {len(wanted)} arrays are missing, such as {missing[0]}"
            fix = "start a new run from its parameters"
            problem = Problem("checkpoint", "has no replicas of this model", detail, fix)
            raise CheckpointError("The run cannot be resumed:", [problem])
        mesh = next(iter(wanted.values())).sharding.mesh
        replicas = Replicas(mesh, self.inner)
        state = dict[str, jax.Array]()
        for path, leaf in wanted.items():
            x = restored[path]
            if x.shape != leaf.shape:
                _, _, own = path.rpartition(f"{self.name}/")
                adapt = functools.partial(_other_count, own, replicas)
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
            fix = "at least 0 and below 1: replicas that keep everything are never synchronized"
            yield Problem("keep", f"is {self.keep}", fix=fix)
        if self.codec not in (PLAIN, *EXCHANGES):
            yield Problem("codec", f"is {self.codec!r}", fix=any_of((PLAIN, *EXCHANGES)))

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
            kinds = evaluated_kinds(planned.abstract_optimizer_state)
            if kinds:
                what = f"has {' and '.join(kinds)} in the state of the {name} optimizer"
                detail = "they would not follow the parameters when these are set"
                yield Problem(_SETTING, what, detail, "an optimizer without, such as adamw")
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

    def parity_problems(self) -> list[Problem]:
        """Return a problem: replicas take steps of their own."""
        what = "has replicas that take steps of their own, unlike one device"
        return [Problem(_SETTING, what, fix="check the layout of the inner step")]

    def sent(self, plan: ShardingPlan) -> dict[str, dict[str, tuple[int, ...]]]:
        """Return path → axis → bytes of Δ in a step, on average."""
        sizes = plan.mesh.shape
        exchange = OuterExchange(plan.mesh, self.codec)
        found = dict[str, dict[str, tuple[int, ...]]]()
        for entry in plan.params:
            dims = spec_dims(entry.spec, len(entry.shape), tuple(sizes))
            term = exchange.bytes_of_term(local_shape(entry.shape, dims, sizes))
            found[entry.path] = {AXIS: (math.ceil(term / self.every),)}
        return found


def _other_count(path: str, replicas: Replicas, x: jax.Array) -> jax.Array:
    """Return the arrays of another number of replicas, given those of the restored ones."""
    return replicas.copies(path, replicas.mean(path, x))
