"""One example of the sweep: a small model on a mesh under a random rule table, and on one device.

Compared are the value of a loss, its gradient, and the gradient of the gradient's product with a
fixed vector, which is a column of second derivatives. All three are part of one program: the loss
that is differentiated is the value plus that product. Numbers are float64, so that rounding errors
are far below the tolerance.
"""

import dataclasses
import math
import random
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import SpmdError
from spmd.gradients.base import value_and_grad
from spmd.model_interface.grad_transform import Carry
from spmd.model_interface.model import PRNG, Model
from spmd.plan.context import use_plan
from spmd.plan.plan import ShardingPlan, make_plan
from spmd.precision import cast_floats
from spmd.sharding.batch import whole
from spmd.sharding.layer_paths import Stack, dims_of, own_stacks, without_dims
from spmd.sharding.mesh import AXES, BATCH_AXES, entry_axes, make_mesh
from spmd.sharding.rules import Rules, replicate, spec_text
from spmd.training.batch import place_batch
from tests.sweep.kinds import KINDS

TOLERANCE = 1e-5
"""Largest difference, relative to the largest number of an array (or a thousandth of that of all)."""

Specs = Mapping[str, P]


@dataclasses.dataclass(frozen=True)
class Example:
    """A model, its inputs, and how they are split."""

    kind: str
    model: Model
    inputs: tuple[np.ndarray, ...]
    sizes: Mapping[str, int]
    specs: Specs
    batch: Specs
    stacks: Mapping[str, Stack]

    def __str__(self) -> str:
        stacked = {f"stack {name}": P(stack.axis) for name, stack in self.stacks.items()}
        table = {
            **self.specs,
            **stacked,
            **{f"batch {path}": spec for path, spec in self.batch.items()},
        }
        specs = ", ".join(f"{path}: {spec_text(spec)}" for path, spec in table.items())
        shapes = ", ".join(str(x.shape) for x in self.inputs)
        return f"{self.kind} of {shapes} on {dict(self.sizes)} with {specs}"


@dataclasses.dataclass(frozen=True)
class Difference:
    """The largest difference of an example from one device; or the reason for which it was refused."""

    error: float = 0.0
    where: str = ""
    refused: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= TOLERANCE


def mesh_sizes(devices: int) -> list[dict[str, int]]:
    """Every pair and triple of axes at 2 and 4 that has at most this many devices."""
    found = []
    for first, a in enumerate(AXES):
        for second, b in enumerate(AXES[first + 1 :], first + 1):
            for x in (2, 4):
                for y in (2, 4):
                    found.append({a: x, b: y})
                    found += [{a: x, b: y, c: z} for c in AXES[second + 1 :] for z in (2, 4)]
    return [sizes for sizes in found if np.prod([*sizes.values()]) <= devices]


@st.composite
def examples(draw: Any, devices: int = 8, kinds: tuple[str, ...] = ()) -> Example:
    """Examples of any kind, on any mesh, with any legal table.

    Choices have equal chances: Hypothesis's own would repeat a few kinds.
    """
    with jax.enable_x64(True):
        return _draw_example(draw(st.randoms(use_true_random=True)), devices, kinds)


def _draw_example(chance: random.Random, devices: int, kinds: tuple[str, ...]) -> Example:
    kind = chance.choice(sorted(kinds or KINDS))
    model, inputs = KINDS[kind].build(lambda *options: chance.choice(options))
    sizes = chance.choice(mesh_sizes(devices))
    key = jax.random.key(0, impl=PRNG)
    params, variables = (
        tree.flatten(jax.eval_shape(make, key)) for make in (model.init, model.init_variables)
    )
    drawn = model.info().random_state
    shapes = {path: x.shape for path, x in {**params, **variables}.items() if path not in drawn}
    stacks = _draw_stacks(chance, model.info().stacks or {}, shapes, sizes)
    layer = {path: without_dims(shape, dims_of(path, stacks)) for path, shape in shapes.items()}
    specs: Specs = {}
    batch: Specs = {}
    for _ in range(20):  # a plan refuses the axes `expert` and `sequence` if they split nothing
        specs = {}
        for path, shape in layer.items():
            stacked = {stack.axis for stack in own_stacks(path, stacks)}
            left = {axis: size for axis, size in sizes.items() if axis not in stacked}
            specs[path] = _draw_spec(chance, shape, left)
        batch = {
            str(number): _draw_batch_spec(chance, x.shape, sizes) for number, x in enumerate(inputs)
        }
        needed = {"expert": specs, "sequence": {**specs, **batch}}
        if all(axis not in sizes or _names(axis, table) for axis, table in needed.items()):
            break
    return Example(kind, model, inputs, sizes, specs, batch, stacks)


def _draw_stacks(
    chance: random.Random,
    stacks: Mapping[str, Stack],
    shapes: Mapping[str, tuple[int, ...]],
    sizes: Mapping[str, int],
) -> dict[str, Stack]:
    """Return each stack with an axis that divides its layers, or with none."""
    found = {}
    for name, stack in stacks.items():
        length = next(
            shape[stack.dim] for path, shape in shapes.items() if path.startswith(f"{name}/")
        )
        fitting = [axis for axis in sorted(sizes) if length % sizes[axis] == 0]
        found[name] = Stack(chance.choice([None, *fitting]), stack.dim)
    return found


def _names(axis: str, specs: Specs) -> bool:
    """Return whether some spec names an axis."""
    return any(axis in entry_axes(entry) for spec in specs.values() for entry in spec)


def _draw_batch_spec(chance: random.Random, shape: tuple[int, ...], sizes: Mapping[str, int]) -> P:
    """Return a spec of an input: split by examples where they divide, and any other dimension over `sequence`."""
    entries: list[Any] = [None for _ in shape]
    if shape[0] % math.prod(sizes.get(axis, 1) for axis in BATCH_AXES) == 0:
        entries[0] = BATCH_AXES
    if "sequence" in sizes:
        dims = [dim for dim, size in enumerate(shape) if dim and size % sizes["sequence"] == 0]
        dim = chance.choice([None, *dims])
        if dim is not None:
            entries[dim] = "sequence"
    return P(*entries)


def _draw_spec(chance: random.Random, shape: tuple[int, ...], sizes: Mapping[str, int]) -> P:
    """Return a spec of an array: each axis splits one dimension that it divides, or none; in any order."""
    left, entries = [*shape], [[] for _ in shape]
    for axis in chance.sample(sorted(sizes), len(sizes)):
        dims = [dim for dim, size in enumerate(left) if size % sizes[axis] == 0 and size > 1]
        dim = chance.choice([None, *dims])
        if dim is not None:
            entries[dim].append(axis)
            left[dim] //= sizes[axis]
    return P(*(tuple(names) or None for names in entries))


def make_example_plan(example: Example) -> ShardingPlan:
    """The plan of an example."""
    rows = []
    for path, spec in example.specs.items():
        is_split = any(entry is not None for entry in spec)
        rows.append((f"^{re.escape(path)}", spec if is_split else replicate("drawn so")))
    devices = jax.devices()[: int(np.prod([*example.sizes.values()]))]
    mesh = make_mesh(devices=devices, **example.sizes)
    batch = [
        (f"^{path}", whole("drawn so") if spec[0] is None else spec)
        for path, spec in example.batch.items()
    ]
    rules = Rules(rows, stacked=example.stacks, batch=batch)
    return make_plan(mesh, rules, example.model, optax.sgd(0.1), precision="float64")


def compare(example: Example) -> Difference:
    """Return the largest difference between the mesh and one device."""
    with jax.enable_x64(True):
        return _compare(example)


def _compare(example: Example) -> Difference:
    orders, model = KINDS[example.kind].orders, example.model
    inputs = tuple(x.astype(np.float64) for x in example.inputs)
    rng = np.random.default_rng(1)

    def signs(x: Any) -> np.ndarray:
        return rng.choice(np.array([-1.0, 1.0]), x.shape)

    key = jax.random.key(0, impl=PRNG)
    abstract = jax.eval_shape(model.init, key)
    vector = jax.tree.map(signs, abstract)

    def loss_fn(params: Any, variables: Any, batch: Any, key: Any) -> Any:
        def value(params: Any) -> Any:
            y, after = model.forward(params, variables, key, *batch, train=True)
            return sum(jnp.square(x).mean() for x in jax.tree.leaves(y)), after

        if orders == 1:
            loss, after = value(params)
            return {"loss": loss, "weight": jnp.float64(1), "value": loss}, after
        (loss, after), gradient = jax.value_and_grad(value, has_aux=True)(params)
        along = sum(
            jnp.vdot(g, v)
            for g, v in zip(jax.tree.leaves(gradient), jax.tree.leaves(vector), strict=True)
        )
        return {"loss": loss + along, "weight": jnp.float64(1), "value": loss}, after

    # declared, so that the loss is not read for each example
    of_loss = value_and_grad(loss_fn, additive=True)

    def grad_fn(params: Any, variables: Any, batch: Any, key: Any) -> Any:
        gradients, sums, carry = of_loss(params, Carry(variables), batch, key)
        return gradients, sums, carry.variables

    params, variables = jax.jit(
        lambda key: (cast_floats(model.init(key), jnp.float64), model.init_variables(key))
    )(key)
    alone = jax.jit(grad_fn)(params, variables, inputs, key)
    try:
        plan = make_example_plan(example)

        def on_mesh(*arrays: Any) -> Any:
            with use_plan(plan):
                return grad_fn(*arrays)

        batch = place_batch(plan, inputs)
        shardings = jax.tree.map(
            lambda x: x.sharding, (plan.abstract_params, plan.abstract_variables)
        )
        placed = jax.device_put((params, variables), shardings)
        found = jax.jit(on_mesh, out_shardings=(plan.gradient_shardings, None, None))(
            *placed, batch, key
        )
    except SpmdError as error:
        return Difference(refused=str(error))
    return _difference(jax.device_get(found), jax.device_get(alone))


def _difference(found: Any, wanted: Any) -> Difference:
    pairs = {
        path: (np.asarray(x), np.asarray(tree.flatten(found)[path]))
        for path, x in tree.flatten(wanted).items()
    }
    floats = {
        path: pair for path, pair in pairs.items() if np.issubdtype(pair[0].dtype, np.floating)
    }
    largest = max(float(np.abs(x).max()) for x, _ in floats.values())
    worst = Difference()
    for path, (x, y) in floats.items():
        scale = max(float(np.abs(x).max()), 1e-3 * largest)
        error = float(np.abs(y - x).max()) / scale if np.isfinite(y).all() else np.inf
        if error > worst.error:
            worst = Difference(error, path)
    return worst
