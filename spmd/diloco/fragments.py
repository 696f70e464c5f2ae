"""Fragments: parts of the parameters, each synchronized at steps of its own.

Layers of a stack are dealt to the fragments in turn, the strided pattern of arXiv:2501.18512,
section 2.2. Each other parameter goes to the smallest fragment so far, in the order of the model.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax

from spmd.errors import Problem
from spmd.plan.plan import ShardingPlan
from spmd.sharding.layer_paths import stored_dims


@dataclasses.dataclass(frozen=True)
class Fragment:
    """One of `count` fragments.

    Attributes:
        whole: Paths of parameters that are in it with all their elements.
        stacked: Path of a parameter → its dimension of layers; layers `number`, `number + count`, …
            are in the fragment.
    """

    number: int
    count: int
    whole: frozenset[str]
    stacked: Mapping[str, int]

    @property
    def is_first(self) -> bool:
        """Whether it is the first, with which arrays of no parameter are synchronized."""
        return self.number == 0

    def __contains__(self, path: str) -> bool:
        return path in self.whole or path in self.stacked

    def take(self, path: str, x: jax.Array, leading: int = 0) -> jax.Array:
        """Return the fragment of a parameter, or of an array like it.

        Args:
            leading: Number of dimensions in front of the parameter's.
        """
        if path in self.whole:
            return x
        dim = self.stacked[path] + leading
        return jax.lax.slice_in_dim(x, self.number, x.shape[dim], self.count, axis=dim)

    def put(self, path: str, x: jax.Array, part: jax.Array, leading: int = 0) -> jax.Array:
        """Return the array with other elements in place of those of `take`."""
        if path in self.whole:
            return part
        dim = self.stacked[path] + leading
        index = (slice(None),) * dim + (slice(self.number, None, self.count),)
        return x.at[index].set(part)

    def offset(self, every: int) -> int:
        """Return the steps between the turn of the first fragment and its own."""
        return self.number * every // self.count


def divide(plan: ShardingPlan, count: int) -> list[Fragment]:
    """Return the fragments of a plan's parameters, of about equal sizes.

    A stack with fewer layers than fragments is one parameter, not divided.
    """
    stacked = dict[str, int]()
    sizes = [0] * count
    whole: list[set[str]] = [set() for _ in range(count)]
    others = dict[str, int]()
    for entry in plan.params:
        size = math.prod(entry.shape)
        dims = _layer_dims(plan, entry.path)
        if count > 1 and dims and entry.shape[dims[0]] >= count:
            stacked[entry.path] = dims[0]
            layers = entry.shape[dims[0]]
            for number in range(count):
                sizes[number] += len(range(number, layers, count)) * size // layers
        else:
            others[entry.path] = size
    for path, size in others.items():
        smallest = sizes.index(min(sizes))
        sizes[smallest] += size
        whole[smallest].add(path)
    fragments = list[Fragment]()
    for number, paths in enumerate(whole):
        fragments.append(Fragment(number, count, frozenset(paths), stacked))
    return fragments


def _layer_dims(plan: ShardingPlan, path: str) -> Sequence[int]:
    """Return the stacked dimensions of a parameter, the outermost first."""
    placement = plan.placements.get(path)
    if placement is None:
        return ()
    return stored_dims(placement.stacks)


def fragment_problems(fragments: Sequence[Fragment], every: int) -> list[Problem]:
    """Return the reasons against a number of fragments."""
    count = len(fragments)
    problems = list[Problem]()
    if count > every:
        detail = f"{count} fragments in {every} steps: several would be sent at once"
        fix = f"at most {every} fragments"
        problems.append(Problem("fragments", f"are {count}", detail, fix))
    empty = [fragment for fragment in fragments if not fragment.whole and not fragment.stacked]
    if empty:
        what = f"are {count}, and {len(empty)} of them are empty"
        fix = f"at most {count - len(empty)} fragments"
        problems.append(Problem("fragments", what, "no parameter is left for them", fix))
    return problems
