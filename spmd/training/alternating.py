"""A train step of several networks in turns, each with a plan and an optimizer of its own.

```python
def for_generator(states, batch):
    return {"noise": batch["noise"], "critic": spmd.whole(states["critic"].params)}

step = spmd.AlternatingStep(
    {"critic": critic_step, "generator": generator_step},
    [("critic", for_critic), ("critic", for_critic), ("generator", for_generator)],
)
state = spmd.fit(step.init_state(seed=0), step, batches, steps=1000)
```

One step of it is one round of turns. It has the interface of a `TrainStep`, so that a loop, a run
and a checkpoint know nothing of several networks.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.errors import ConfigError, Problem, check_call, check_type, describe_value, did_you_mean
from spmd.gradients.losses import split_arrays
from spmd.sharding.mesh import AnyMesh
from spmd.training.state import TrainState
from spmd.training.step import Metrics, TrainStep

SelectBatch = Callable[[Mapping[str, TrainState], Any], Any]
"""`(states by name, batch) -> the batch of one turn`.

It selects arrays and computes nothing: it is also called with abstract ones.
"""

_OF_THE_ROUND = ("loss", "gradient_norm", "tokens")
"""Metrics of a round's last turn, which also have their names without the network's."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AlternatingState:
    """State of several networks.

    Attributes:
        step: int32 scalar: the number of rounds taken.
        states: Name → training state of the network.
    """

    step: Any
    states: dict[str, TrainState]


@dataclasses.dataclass(eq=False, repr=False)
class AlternatingStep:
    """`(state, batch) -> (state, metrics)`: one round of turns; the state is donated.

    Each turn is a step of one network on the batch that its function selects. The parameters of
    another network are a part of that batch, `spmd.whole(states[name].params)`, and keep their
    sharding. Arrays of the network's own state, such as `spmd.ema_params` of its optimizer's, are
    copied first, since the step donates its state.

    Metrics are those of each network's last turn, as `name/loss`; `loss`, `gradient_norm` and
    `tokens` are of the last turn. Its network is the one that a run evaluates.

    Args:
        steps: Name → train step; all on one mesh.
        turns: `(name, function)` of each turn of a round, in order: a network may have several.

    Raises:
        ConfigError: All problems of the arguments.
    """

    steps: Mapping[str, TrainStep]
    turns: Sequence[tuple[str, SelectBatch]]

    def __post_init__(self) -> None:
        problems = list(_problems(self.steps, self.turns))
        if problems:
            raise ConfigError("Invalid alternating step:", problems)

    def __call__(self, state: AlternatingState, batch: Any) -> tuple[AlternatingState, Metrics]:
        """Dispatch the steps of a round and return at once; `state` is donated."""
        self._check_state(state)
        states = dict(state.states)
        for _, select in self.turns:  # one that fails does so before anything is donated
            select(MappingProxyType(states), batch)
        found = dict[str, Metrics]()
        for name, select in self.turns:
            selected = select(MappingProxyType(states), batch)
            selected = _copy_donated(states[name], selected)
            states[name], found[name] = self.steps[name](states[name], selected)
        after = AlternatingState(_add_one(state.step), states)
        return after, _named_metrics(found, self.evaluated)

    def compile(self, batch: Any) -> None:
        """Compile each turn for a batch of this shape, arrays or abstract ones."""
        for _, part, part_batch in self.part_batches(batch):
            part.compile(part_batch)

    def part_batches(self, batch: Any) -> list[tuple[str, TrainStep, Any]]:
        """Return prefix, train step and batch of each turn."""
        states = MappingProxyType(self.abstract_state().states)
        found = list[tuple[str, TrainStep, Any]]()
        for name, select in self.turns:
            found.append((f"{name}/", self.steps[name], select(states, batch)))
        return found

    @property
    def programs(self) -> tuple[jax.stages.Compiled, ...]:
        """The programs compiled so far, of all networks."""
        programs = list[jax.stages.Compiled]()
        for step in self.steps.values():
            programs += step.programs
        return tuple(programs)

    @property
    def mesh(self) -> AnyMesh:
        """The mesh of all networks."""
        return self.steps[self.evaluated].mesh

    @property
    def text(self) -> str:
        """The plan of each network, below its name."""
        texts = list[str]()
        for name, step in self.steps.items():
            texts.append(f"{name}\n{step.text}")
        return "\n\n".join(texts)

    @property
    def parts(self) -> dict[str, TrainStep]:
        """Prefix of metrics and of paths in a checkpoint, `name/` → train step of the network."""
        return {f"{name}/": step for name, step in self.steps.items()}

    @property
    def evaluated(self) -> str:
        """Name of the last turn's network, for evaluations."""
        name, _ = self.turns[-1]
        return name

    @property
    def evaluated_part(self) -> str:
        """Prefix of the network for evaluations."""
        return f"{self.evaluated}/"

    def part_state(self, prefix: str, state: Any) -> TrainState:
        """Return the state of one of `parts`."""
        return state.states[prefix.removesuffix("/")]

    def part_inputs(self, prefix: str, state: Any, batch: Any) -> tuple[TrainState, Any]:
        """Return the state of one of `parts` and the batch of its last turn, arrays or abstract."""
        selects = dict(self.turns)
        name = prefix.removesuffix("/")
        states = MappingProxyType(state.states)
        return state.states[name], selects[name](states, batch)

    def isolate(self, name: str, batches: Sequence[Any]) -> tuple[TrainStep, list[Any]]:
        """Return the step of one network and its part of some batches, for `spmd check`.

        The other networks stay at their initial parameters. The batches are those of its last turn,
        on the host.

        Raises:
            ConfigError: There is no network of this name.
        """
        if name not in self.steps:
            problem = Problem("name", f"is {name!r}", fix=did_you_mean(name, self.steps))
            raise ConfigError("No such network:", [problem])
        state = self.init_state()
        selected = list[Any]()
        for batch in batches:
            _, part = self.part_inputs(f"{name}/", state, batch)
            selected.append(jax.device_get(part))
        return self.steps[name], selected

    def place_batch(self, batch: Any) -> Any:
        """Return a batch as it is, since each turn places its own."""
        return batch

    def init_state(self, seed: int = 0) -> AlternatingState:
        """Create the state before the first round; each network draws from its name and the seed.

        Args:
            seed: An integer.
        """
        states = dict[str, TrainState]()
        for name, step in self.steps.items():
            states[name] = step.init_state(zlib.crc32(f"{seed}/{name}".encode()))
        none = jnp.zeros((), jnp.int32)
        return AlternatingState(jax.device_put(none, self._replicated), states)

    def abstract_state(self) -> AlternatingState:
        """Return the state as `jax.ShapeDtypeStruct`s with shardings."""
        states = dict[str, TrainState]()
        for name, step in self.steps.items():
            states[name] = step.abstract_state()
        count = jax.ShapeDtypeStruct((), jnp.int32, sharding=self._replicated)
        return AlternatingState(count, states)

    def as_stored(self, state: Any) -> dict[str, Any]:
        """Return a state in the form of checkpoints: `step`, and each network's by its name."""
        stored: dict[str, Any] = {"step": state.step}
        for name, step in self.steps.items():
            stored[name] = step.as_stored(state.states[name])
        return stored

    def from_stored(self, stored: Mapping[str, Any]) -> AlternatingState:
        """Return a state from the form of `as_stored`."""
        states = dict[str, TrainState]()
        for name, step in self.steps.items():
            states[name] = step.from_stored(stored[name])
        return AlternatingState(stored["step"], states)

    @functools.cached_property
    def _replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, P())

    def _check_state(self, state: Any) -> None:
        """Raise a `ConfigError` unless a state has the networks of this step."""
        fix = "step(state, batch), with state from step.init_state(seed)"
        problems = check_type("state", state, AlternatingState, fix)
        if not problems and set(state.states) != set(self.steps):
            what = f"has the networks {', '.join(state.states)}"
            problems.append(Problem("state", what, f"not {', '.join(self.steps)}", fix))
        if problems:
            raise ConfigError("The step cannot take this state:", problems)


@jax.jit
def _add_one(count: jax.Array) -> jax.Array:
    return count + 1


def _copy_donated(state: TrainState, batch: Any) -> Any:
    """Copy the arrays of a batch shared with a state, before a step donates them."""
    donated = {id(x) for x in jax.tree.leaves(state)}

    def copy(x: Any) -> Any:
        if id(x) in donated:
            return jnp.copy(x)
        return x

    return jax.tree.map(copy, batch)


def _named_metrics(found: Mapping[str, Metrics], last: str) -> Metrics:
    """Return metrics by `name/metric`; those of a round's last turn also without a name."""
    metrics: Metrics = {}
    named_arrays: Metrics = {}
    for name, values in found.items():
        scalars, arrays = split_arrays(values)
        for metric, value in scalars.items():
            metrics[f"{name}/{metric}"] = value
        for metric, value in arrays.items():
            named_arrays[f"{name}/{metric}"] = value
    for metric in _OF_THE_ROUND:
        metrics[metric] = found[last][metric]
    if named_arrays:
        metrics["arrays"] = named_arrays
    return metrics


def _problems(steps: Any, turns: Any) -> Iterator[Problem]:
    """Yield the problems of the arguments of an `AlternatingStep`."""
    example = 'spmd.AlternatingStep({"generator": step, …}, [("generator", select), …])'
    wrong = [
        *check_type("steps", steps, Mapping, example),
        *check_type("turns", turns, (list, tuple), example),
    ]
    if wrong:
        yield from wrong
        return
    for name, step in steps.items():
        where = f"steps {name!r}"
        yield from check_type(where, step, TrainStep, "spmd.make_train_step(plan, loss_fn)")
        if not isinstance(name, str) or not name or "/" in name or name == "step":
            what = "is no name of a network"
            yield Problem(where, what, fix="a text without slashes, other than 'step'")
    yield from _turn_problems(steps, turns)
    meshes = {step.mesh for step in steps.values() if isinstance(step, TrainStep)}
    if len(meshes) > 1:
        yield Problem("steps", "are of different meshes", fix="make all plans with one mesh")


def _turn_problems(steps: Mapping[str, Any], turns: Sequence[Any]) -> Iterator[Problem]:
    """Yield the problems of turns: no pairs, unknown networks, networks without a turn."""
    pair = "a pair of a name and a function of (states, batch)"
    taken = set[str]()
    for number, turn in enumerate(turns):
        where = f"turn {number}"
        if not isinstance(turn, tuple) or len(turn) != 2:
            yield Problem(where, f"is {describe_value(turn)}", fix=pair)
            continue
        name, select = turn
        taken.add(name)
        if name not in steps:
            what = f"is of {name!r}, which has no step"
            yield Problem(where, what, fix=did_you_mean(str(name), steps))
        yield from check_call(f"{where}, of {name}", select, "states, batch", pair)
    for name in steps:
        if name not in taken:
            yield Problem(f"steps {name!r}", "has no turn and would never be taken", fix=pair)
    if not turns:
        yield Problem("turns", "are none", fix=pair)
