"""Interface of gradient transforms: stateful techniques around a gradient function.

Loss scaling, histories and compression of gradients are such techniques. A gradient function
threads one `Carry`: the variables of the model, and the state of each transform by its name. A plan
holds the transforms (`ShardingPlan.with_transforms`) and the shardings of their states. A transform
acts at one of three places, or at several:

- **once per step**, `wrap` wraps the gradient function of the batch. The transforms of a plan wrap
  in their order: the first is next to the gradient function, the last is outside of all others;
- **at each differentiation** of a loss, of a microbatch or of a stage, `enter` returns a factor of
  the loss and riders, arrays that ride on parameters; `leave` gets the derivatives of the riders,
  through which layers return observations;
- **in place of a step**, `replace_step` returns another function of a state and a batch.

A transform is a frozen dataclass, compared by value. Transforms declare conflicts by properties
(`overlapping_steps`, `observes`, `exchanges`), so that none needs to know the name of another.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from spmd.errors import Problem

_WHOLE = P()

StepFn = Callable[[Any, Any], tuple[Any, dict[str, Any]]]
"""`(state, batch) -> (state, metrics)` of a step, pure; the state is a
`spmd.training.state.TrainState`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carry:
    """Input and output state of a gradient function, beside gradients and sums.

    Attributes:
        variables: The variables of the model, and nothing else.
        transforms: Name of a transform → its state, a nested dictionary of arrays.
    """

    variables: Any = dataclasses.field(default_factory=dict)
    transforms: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def without(self, name: str) -> "Carry":
        """Return the carry without the state of a transform."""
        others = {key: state for key, state in self.transforms.items() if key != name}
        return dataclasses.replace(self, transforms=others)

    def with_state(self, name: str, state: Any) -> "Carry":
        """Return the carry with another state of a transform."""
        return dataclasses.replace(self, transforms={**self.transforms, name: state})


@dataclasses.dataclass(frozen=True)
class StateArray:
    """One array of the state of a transform.

    Attributes:
        spec: Its sharding.
        reason: Why it is replicated, if it is.
        rule: The rule, of a parameter, that decides the spec; empty if the transform does.
    """

    shape: tuple[int, ...]
    dtype: Any
    spec: P = _WHOLE
    reason: str = ""
    rule: str = ""


@dataclasses.dataclass(frozen=True)
class Entered:
    """Inputs of a transform into one differentiation.

    Attributes:
        seed: A factor of the loss, a scalar; None for 1.
        riders: Path of a parameter (of `ModelInfo.wrappable`) → the array that rides on it. Its
            derivative is the layer's observation.
    """

    seed: Array | None = None
    riders: Mapping[str, Array] = dataclasses.field(default_factory=dict)

    def scaled(self, loss: Array) -> Array:
        """Return the loss times the seed."""
        if self.seed is None:
            return loss
        return loss * self.seed.astype(loss.dtype)


@dataclasses.dataclass(frozen=True)
class GradTransform:
    """Base of gradient transforms; its methods change nothing.

    A transform overrides the methods that it needs. `plan` is a
    `spmd.plan.plan.ShardingPlan` that holds this transform and the others.

    Attributes:
        name: Name of its state in the carry and in checkpoints.
        overlapping_steps: Whether microbatches of a step are in flight when the next one begins.
        observes: Whether it must see each differentiation, so that a step's gradients must not be
            sums of local ones.
        exchanges: Whether it sends the gradients of a step itself, and keeps the unsent remainder.
        optional: Whether a resumed run may start or stop using it: a checkpoint may lack the state.
        has_own_optimizer: Whether an optimizer of its own takes the gradients, and the plan's does not.
        is_outermost: Whether it may undo the effects of all others in a step, and so wraps them;
            at most one may be.
    """

    name: ClassVar[str]
    overlapping_steps: ClassVar[bool] = False
    observes: ClassVar[bool] = False
    exchanges: ClassVar[bool] = False
    optional: ClassVar[bool] = False
    has_own_optimizer: ClassVar[bool] = False
    is_outermost: ClassVar[bool] = False

    def state(self, plan: Any) -> Mapping[str, StateArray]:
        """Return the path of each array of the state → its shape, dtype and sharding.

        It is empty if the transform keeps none.
        """
        del plan
        return {}

    def init(self, plan: Any, key: jax.Array, params: Any) -> Any:
        """Return the state before the first step, a nested dictionary; traced under `jax.jit`."""
        del plan, key, params
        return {}

    def init_beside(self, plan: Any, key: jax.Array, params: Any, variables: Any) -> Any:
        """Return the state before the first step, given the model's variables besides."""
        del variables
        return self.init(plan, key, params)

    def wrap(self, grad_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the gradient function of a whole batch."""
        return grad_fn

    def replace_step(self, step: StepFn, plan: Any) -> StepFn:
        """Return the function of a whole step: `step`, or another in its place."""
        del plan
        return step

    def enter(self, state: Any) -> Entered:
        """Return the inputs of the transform into one differentiation."""
        del state
        return Entered()

    def leave(self, state: Any, seen: Mapping[str, Array]) -> Any:
        """Return the state after one differentiation; `seen` are the derivatives of its riders."""
        del seen
        return state

    def targets(
        self, stored: Mapping[str, Any], wanted: Mapping[str, Any]
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the arrays to restore, with shardings: those of equal shape in the checkpoint.

        Args:
            stored: Path → abstract array in the checkpoint.
            wanted: Path → abstract array of the state on this mesh.
        """
        targets = {}
        for path, leaf in wanted.items():
            if path in stored and stored[path].shape == leaf.shape:
                targets[path] = leaf
        return targets

    def adapt(self, restored: Mapping[str, Array], wanted: Mapping[str, Any]) -> dict[str, Array]:
        """Return the arrays of the state on this mesh, made from restored ones."""
        del wanted
        return dict(restored)

    def sent(self, plan: Any) -> Mapping[str, Mapping[str, Sequence[int]]]:
        """Return path → axis → bytes of each array sent by a device in place of a gradient."""
        del plan
        return {}

    def problems(self, plan: Any) -> Sequence[Problem]:
        """Return the reasons against its use with a plan and the plan's other transforms."""
        del plan
        return []

    def parity_problems(self) -> Sequence[Problem]:
        """Return the reasons why a step's numbers are meant to differ from those of one device."""
        return []


def enter_all(transforms: Sequence[GradTransform], carry: Carry) -> Entered:
    """Return the inputs of all transforms into one differentiation.

    Transforms without a state in the carry have none: their states belong to a step outside of this
    function.
    """
    seed: Array | None = None
    riders = dict[str, Array]()
    for transform in transforms:
        if transform.name not in carry.transforms:
            continue
        entered = transform.enter(carry.transforms[transform.name])
        riders |= entered.riders
        if seed is None:
            seed = entered.seed
        elif entered.seed is not None:
            seed = seed * entered.seed
    return Entered(seed, riders)


def leave_all(
    transforms: Sequence[GradTransform], carry: Carry, variables: Any, seen: Mapping[str, Array]
) -> Carry:
    """Return the carry after one differentiation: other variables, and states with observations."""
    states = dict(carry.transforms)
    for transform in transforms:
        if transform.name in states:
            states[transform.name] = transform.leave(states[transform.name], seen)
    return Carry(variables, states)


def observers(transforms: Sequence[GradTransform]) -> str:
    """Return the names of the transforms with `observes`; empty without one."""
    names = [transform.name for transform in transforms if transform.observes]
    return ", ".join(names)


def wrap_all(
    grad_fn: Callable[..., Any], transforms: Sequence[GradTransform]
) -> Callable[..., Any]:
    """Return a gradient function within all transforms, the last of them outside."""
    for transform in transforms:
        grad_fn = transform.wrap(grad_fn)
    return grad_fn


def step_within(step: StepFn, transforms: Sequence[GradTransform], plan: Any) -> StepFn:
    """Return the function of a step of a plan with these transforms."""
    for transform in transforms:
        step = transform.replace_step(step, plan)
    return step


def rows_of_devices(
    shape: tuple[int, ...], leaf: jax.ShapeDtypeStruct, axis: str
) -> jax.ShapeDtypeStruct:
    """Return the target for an array `[device, …]` saved on another number of devices of an axis.

    Its rows are split over the axis if they divide.
    """
    sharding = leaf.sharding
    leading = None
    if shape[0] % sharding.mesh.shape[axis] == 0:
        leading = axis
    sharding = NamedSharding(sharding.mesh, P(leading, *sharding.spec[1:]))
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
