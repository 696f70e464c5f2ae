"""Persistent and sown collections of a Linen module, and their initialization."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax
import flax.linen as nn
import jax

from spmd import tree
from spmd.errors import ConfigError, Problem
from spmd.jaxpr.dependence import dependent_outputs
from spmd.model_interface.model import abstract_key
from spmd.plan.sown import stacked_by_scan
from spmd.sharding.flax_metadata import PARAMS_AXES

DEBUGGING = ("intermediates", "perturbations")
"""Flax's collections for debugging.

They are neither variables nor outputs, unless they are named as losses.
"""

_NEEDS_COLLECTION = (
    flax.errors.ScopeCollectionNotFound,
    flax.errors.ScopeVariableNotFoundError,
    flax.errors.ModifyScopeVariableError,
)


@dataclasses.dataclass(frozen=True, eq=False)
class LinenCollections:
    """Initialization of a module's collections.

    Attributes:
        run: The method that is called.
        keywords: Its keyword arguments.
        inputs: Its inputs: NumPy arrays, or `jax.ShapeDtypeStruct`s.
        kept: Names; those of them in `DEBUGGING` are treated as ordinary collections.
    """

    module: nn.Module
    run: Callable[..., Any]
    keywords: Mapping[str, Any]
    inputs: tuple[Any, ...]
    kept: tuple[str, ...]

    def create(self, key: jax.Array) -> dict[str, Any]:
        """Return the persistent collections from a key, in the boxes of their metadata."""
        if self._is_lazy:
            keywords = {"method": self.run, "mutable": self._persistent, **self.keywords}
            return dict(self.module.lazy_init(key, *self._shapes, **keywords))
        return dict(self._init(key, *self.inputs, mutable=self._persistent))

    @functools.cached_property
    def abstract(self) -> dict[str, Any]:
        """The persistent collections, abstract."""
        return jax.eval_shape(self.create, abstract_key())

    @functools.cached_property
    def sown(self) -> frozenset[str]:
        """The collections written by `sow` only: the module also runs without them."""
        found = []
        for name in self._all:
            is_params = name in ("params", PARAMS_AXES)
            if not is_params and self._runs_without(name):
                found.append(name)
        return frozenset(found)

    @functools.cached_property
    def sown_values(self) -> dict[str, Any]:
        """The values sown at initialization, abstract, by collection."""
        return {name: nn.meta.unbox(self._all[name]) for name in sorted(self.sown)}

    def sown_by_scan(self) -> list[bool]:
        """Return for each array of `sown_values` whether scanned layers have stacked it."""

        def sow(key: jax.Array, *inputs: Any) -> dict[str, Any]:
            made = nn.meta.unbox(self._init(key, *inputs, mutable=nn.DenyList(self._denied)))
            return {name: made[name] for name in self.sown}

        return stacked_by_scan(sow, abstract_key(), *self._shapes)

    @functools.cached_property
    def _all(self) -> dict[str, Any]:
        init = functools.partial(self._init, mutable=nn.DenyList(self._denied))
        return dict(jax.eval_shape(init, abstract_key(), *self.inputs))

    def _runs_without(self, name: str) -> bool:
        """Return whether the module runs without a collection, and without making it."""
        others = dict(self._all)
        del others[name]

        def run(others: Any, key: jax.Array, *inputs: Any) -> Any:
            mutable = [other for other in others if other != "params"]
            options = {"method": self.run, "rngs": {"params": key}, "mutable": mutable}
            _, after = self.module.apply(others, *inputs, **{**options, **self.keywords})
            return after

        try:
            jax.eval_shape(run, others, abstract_key(), *self.inputs)
        except _NEEDS_COLLECTION:
            return False
        return True

    def _init(self, key: jax.Array, *inputs: Any, mutable: Any) -> Any:
        return self.module.init(key, *inputs, method=self.run, mutable=mutable, **self.keywords)

    @functools.cached_property
    def _is_lazy(self) -> bool:
        """Whether initial values depend on the inputs' shapes alone.

        `lazy_init` does not check this in every release of Flax: newer ones use zeros as inputs.

        Raises:
            ConfigError: Initial values depend on the values of inputs that are no arrays; all such
                initial values are listed.
        """
        computed = self._computed_from_inputs()
        leaves = jax.tree.leaves(self.inputs)
        if computed and any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            what = "is computed from the module's inputs"
            fix = "arrays in place of shapes: spmd.from_linen(module, *arrays)"
            problems = []
            for path in computed:
                problems.append(Problem(path.removeprefix("params/"), what, fix=fix))
            raise ConfigError("The module cannot be initialized from shapes:", problems)
        return not computed

    def _computed_from_inputs(self) -> list[str]:
        """Return the paths of the arrays with initial values computed from the inputs."""
        make = functools.partial(self._init, mutable=self._persistent)
        traced, shapes = jax.make_jaxpr(make, return_shape=True)(abstract_key(), *self._shapes)
        is_input = [True] * len(traced.jaxpr.invars)
        is_input[0] = False  # the key
        depend = dependent_outputs(traced, is_input)
        paths = tree.flatten(nn.meta.unbox(dict(shapes)))
        computed = []
        for path, is_computed in zip(paths, depend, strict=True):
            if is_computed:
                computed.append(path)
        return computed

    @property
    def _shapes(self) -> tuple[Any, ...]:
        return jax.eval_shape(lambda *inputs: inputs, *self.inputs)

    @property
    def _denied(self) -> tuple[str, ...]:
        return tuple(name for name in DEBUGGING if name not in self.kept)

    @property
    def _persistent(self) -> nn.DenyList:
        return nn.DenyList((*self._denied, *sorted(self.sown)))
