"""NNX modules as pure functions.

```python
model = from_nnx(lambda rngs: Llama(config, rngs=rngs))
params = model.init(key)    # a nested dictionary: {"layers": {"attention": {"q_proj": {"kernel": …
logits = model.apply(params, tokens)
```
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from spmd import tree
from spmd.errors import (
    ConfigError,
    Problem,
    check_call,
    check_type,
)
from spmd.model_interface.model import (
    LayeredModel,
    LayeredModule,
    Model,
    ModelInfo,
    UpdatesOnceAStep,
    abstract_key,
    is_padding_aware,
    is_position_aware,
    name_of_callable,
    supports_kv_cache,
)
from spmd.plan.created import drawn_shapes
from spmd.plan.flax_calls import (
    INVALID_MODEL,
    as_array,
    called_method,
    check_all_sown,
    check_no_variables,
    checked_method,
    no_shardings_inside,
)
from spmd.plan.flax_dtypes import (
    CAST_BY_LAYER,
    mark_own_dtypes,
    use_plan_dtype,
)
from spmd.plan.flax_parts import (
    ModeKeywords,
    Part,
    check_nothing_sown,
    layered_model,
    mode_keywords,
)
from spmd.plan.nnx_state import (
    ModuleStructure,
    join,
    register_arrays,
    to_dict,
    trace_structure,
    with_values,
)
from spmd.plan.sown import Sown, add_sown, stacked_by_scan
from spmd.plan.structure import describe, nnx_said
from spmd.sharding.flax_metadata import nnx_annotations

_MAKE_FIX = "spmd.from_nnx(lambda rngs: Module(…, rngs=rngs)), or spmd.from_linen(module, *inputs)"

_MODES = ("deterministic", "use_running_average")
"""The attributes that `train()` of an NNX module sets to False."""

_DEBUGGING_TYPES = (nnx.Intermediate, nnx.Perturbation)
"""Types of NNX variables for debugging; `DEBUGGING` has the collections of Linen."""


def from_nnx(
    make: Callable[[nnx.Rngs], nnx.Module],
    *,
    losses: type[nnx.Variable] | tuple[type[nnx.Variable], ...] = (),
    train: Mapping[str, Any] | None = None,
    evaluate: Mapping[str, Any] | None = None,
) -> Model:
    """Return the functions of an NNX module.

    Its `nnx.Param`s are the parameters; all other variables (batch statistics, the random state of
    dropout) are the model's variables, under their own paths. So are arrays and random keys that
    modules keep as plain attributes; they are replicated unless a rule matches. `forward` runs the
    module in `train()` or `eval()` mode; a layer that was built with `use_running_average=True` or
    `deterministic=True` keeps this setting in training. Keyword arguments of `apply` and `forward`
    are passed to the module, except `method`: the method to call, by its name or as a function.

    Two optional attributes of the module: `position_aware` lets ring attention reorder tokens
    (`spmd.layers.zigzag`) and implies `supports_kv_cache`, which lets generation decode token by
    token (`spmd.layers.kv_cache`). A module with the methods `embed_inputs`, `apply_layers` and
    `compute_outputs` can be pipelined (`spmd.model_interface.model.LayeredModel`). A module with a
    parameter `valid` is called with the mask of the tokens that are no padding
    (`spmd.gradients.losses.valid_tokens`).

    Values sown in a call are returned by `forward`, as `spmd.model_interface.model.Outputs`, under
    their paths. Values of the type `nnx.Intermediate` itself, Flax's type for debugging, are
    dropped unless it is one of `losses`.

    Args:
        make: Builds the module: `lambda rngs: Llama(config, rngs=rngs)`. It is called under
            tracing, so arrays are created directly in the plan's shards.
        losses: Types of variables whose sown values training adds to the loss; values sown as other
            types become metrics.
        train: Keyword arguments of a call in training, for a module that takes its mode as an
            argument: `{"deterministic": False}`. In a pipeline each part is called with those that
            it takes.
        evaluate: Keyword arguments of a call in evaluation and of `apply`.

    Example:
        >>> model = from_nnx(lambda rngs: nnx.Linear(2, 3, rngs=rngs))
        >>> params = model.init(jax.random.key(0))
        >>> sorted(params), model.apply(params, jax.numpy.ones((4, 2))).shape
        (['bias', 'kernel'], (4, 3))
    """
    training = dict(train or {})
    evaluation = dict(evaluate or {})
    loss_types = losses if isinstance(losses, tuple) else (losses,)
    problems = _check_make(make)
    if problems:
        raise ConfigError(INVALID_MODEL, problems)
    functions = _NNXFunctions(make, loss_types, training, evaluation)
    return Model(
        functions.init,
        functions.apply,
        functions.init_variables,
        functions.forward,
        functions.info,
        functions.layered,
        name_of_callable(make),
        functions.update_variables,
    )


def _check_make(make: Any) -> list[Problem]:
    if isinstance(make, nnx.Module | nn.Module):
        return check_type("make", make, (), _MAKE_FIX)
    return check_call("make", make, "rngs", _MAKE_FIX)


class _After(NamedTuple):
    """The contents of a module after a call.

    Attributes:
        variables: Its variables.
        sown: Path → a value sown in the call, but for those for debugging.
    """

    variables: Any
    sown: Mapping[str, nnx.Variable]


@dataclasses.dataclass(frozen=True, eq=False)
class _NNXFunctions:
    """The functions of an NNX module, for a `Model`.

    Attributes:
        make: Builds the module.
        loss_types: Types of variables with sown losses.
        training: Keyword arguments of a call in training.
        evaluation: Keyword arguments of a call in evaluation.
    """

    make: Callable[[nnx.Rngs], nnx.Module]
    loss_types: tuple[type[nnx.Variable], ...]
    training: Mapping[str, Any]
    evaluation: Mapping[str, Any]

    def init(self, key: jax.Array) -> Any:
        _ = self._structure  # checks the module
        module, _ = self._build(key)
        return jax.tree.map(as_array, to_dict(nnx.state(module, nnx.Param)))

    def init_variables(self, key: jax.Array) -> Any:
        if not jax.tree.leaves(self._structure.others):
            return {}  # building a module is slow, and most have no variables
        module, _ = self._build(key)
        return jax.tree.map(_as_data, to_dict(nnx.state(module, nnx.Not(nnx.Param))))

    def apply(self, params: Any, *inputs: Any, **keywords: Any) -> Any:
        check_no_variables(self._structure.variables)
        outputs, _ = self._call(params, {}, inputs, {**self.evaluation, **keywords}, train=False)
        return outputs

    def forward(
        self, params: Any, variables: Any, key: Any, *inputs: Any, train: bool, **keywords: Any
    ) -> tuple[Any, Any]:
        del key  # an NNX module has its own random state
        mode = self.training if train else self.evaluation
        keywords = {**mode, **keywords}
        outputs, after = self._call(params, variables, inputs, keywords, train)
        if train:
            self._check_losses_in(after.sown)

        def sow_again() -> list[Any]:
            _, after = self._call(params, variables, inputs, keywords, train)
            return [x.get_value() for x in after.sown.values()]

        found = []
        for path, x in after.sown.items():
            found.append(Sown(path, x.get_value(), isinstance(x, self.loss_types)))
        return add_sown(outputs, found, lambda: stacked_by_scan(sow_again)), after.variables

    def info(self) -> ModelInfo:
        return self._info

    def update_variables(self, variables: Any, arrays: Mapping[str, jax.Array]) -> Any:
        if not self._info.step_variables:
            return variables
        structure = self._structure
        others = with_values(structure.others, variables)
        module = nnx.merge(structure.graph, structure.params, others, copy=True)
        assert isinstance(module, UpdatesOnceAStep), "it has step_variables"
        module.update_variables(arrays)
        after = tree.flatten(to_dict(nnx.state(module, nnx.Not(nnx.Param))))

        def take(path: str, x: jax.Array) -> jax.Array:
            if path not in self._info.step_variables:
                return x
            return _as_data(after[path])

        return tree.map_with_path(take, variables)

    def layered(self) -> LayeredModel | None:
        module = self._abstract_module
        modes = mode_keywords(module, self.training, self.evaluation)
        if modes is None:
            return None
        embed = self._part("embed_inputs", modes)

        def embed_inputs(
            params: Any, variables: Any, key: Any, *inputs: Any, train: bool, **keywords: Any
        ) -> Any:
            del key  # an NNX module has its own random state
            return embed(params, variables, *inputs, train=train, **keywords)

        return layered_model(
            module,
            self.info,
            embed_inputs=embed_inputs,
            apply_layers=self._part("apply_layers", modes),
            compute_outputs=self._part("compute_outputs", modes),
        )

    @functools.cached_property
    def _structure(self) -> ModuleStructure:
        return trace_structure(self._build, abstract_key())

    @functools.cached_property
    def _abstract_module(self) -> nnx.Module:
        return self._structure.module()

    @functools.cached_property
    def _info(self) -> ModelInfo:
        module = self._abstract_module
        structure = self._structure
        tied = _tied_params(module, structure)
        drawn = functools.partial(drawn_shapes, self.init, abstract_key())
        gathered_by_layer = self._params_with("gathered_by_layer")
        wrappable = self._params_with("takes_wrapped")
        return dataclasses.replace(
            describe(_shapes(structure.params), nnx_said(module), drawn, tied),
            tied=tied,
            random_state=_random_state(structure),
            constants=structure.constants,
            annotations=nnx_annotations(structure.params),
            wrappable=wrappable,
            takes_codes=wrappable | self._params_with("takes_codes"),
            gathered_by_layer=gathered_by_layer,
            sent_exactly=self._params_with("sent_exactly"),
            cast_by_layer=self._params_with(CAST_BY_LAYER) | gathered_by_layer,
            linear=self._params_with("linear"),
            decodes_layers=isinstance(module, LayeredModule),
            position_aware=is_position_aware(module),
            supports_kv_cache=supports_kv_cache(module),
            padding_aware=is_padding_aware(module, called_method(module, self.training)),
            step_variables=_step_variables(module, structure),
        )

    def _params_with(self, flag: str) -> frozenset[str]:
        """Return the paths of the parameters with a flag in their metadata."""
        params = self._structure.params
        return _paths_where(params, lambda param: param.get_metadata(flag, False))

    def _build(self, key: jax.Array) -> tuple[nnx.Module, dict[str, jax.Array]]:
        """Build the module, and make its plain arrays part of its state."""
        # The plan shards arrays, not the module.
        with no_shardings_inside(), nnx.use_eager_sharding(False):
            module = self.make(nnx.Rngs(key))
        problems = check_type("what make returns", module, nnx.Module, _MAKE_FIX)
        if problems:
            raise ConfigError(INVALID_MODEL, problems)
        mark_own_dtypes(module)
        return module, register_arrays(module)

    def _restore(self, params: Any, variables: Any, train: bool) -> nnx.Module:
        """Return the module with these arrays, in the mode of training or of evaluation."""
        structure = self._structure
        known = structure.variables
        variables = tree.map_with_path(lambda path, x: _as_key(x, known.get(path)), variables)
        trained = with_values(structure.params, params)
        others = with_values(structure.others, variables)
        module = nnx.merge(structure.graph, trained, others, copy=True)
        use_plan_dtype(module)
        if train:
            _set_training_mode(module)
        else:
            module.eval()
        return module

    def _call(
        self, params: Any, variables: Any, inputs: Any, keywords: Any, train: bool
    ) -> tuple[Any, "_After"]:
        """Return the outputs of a call, with the contents of the module after it."""
        module = self._restore(params, variables, train)
        keywords = dict(keywords)
        method = keywords.pop("method", "__call__")
        run = checked_method(module, method, inputs, keywords)
        return self._run(module, variables, functools.partial(run, module, *inputs, **keywords))

    def _part(self, method: str, modes: ModeKeywords) -> Part:
        """Return a method of the module as a function of parameters, variables and inputs."""

        def run(
            params: Any, variables: Any, *inputs: Any, train: bool, **keywords: Any
        ) -> tuple[Any, Any]:
            module = self._restore(params, variables, train)
            keywords = {**modes.of(method, train=train), **keywords}
            call = functools.partial(getattr(module, method), *inputs, **keywords)
            result, after = self._run(module, variables, call)
            check_nothing_sown(method, after.sown)
            return result, after.variables

        return run

    def _run(
        self, module: nnx.Module, variables: Any, call: Callable[[], Any]
    ) -> tuple[Any, "_After"]:
        """Return the result of a call of the module, with its contents after it."""
        with no_shardings_inside(), warnings.catch_warnings():
            # Flax warns at each sown value that its type should be declared before the call.
            warnings.filterwarnings("ignore", "Using 'Module.sow", DeprecationWarning)
            result = call()
        state = nnx.state(module, nnx.Not(nnx.Param))
        values = tree.flatten(to_dict(state))

        updated = tree.map_with_path(lambda path, _: _as_data(values[path]), variables)
        return result, _After(updated, self._sown_in(state))

    def _sown_in(self, after: nnx.State) -> dict[str, nnx.Variable]:
        """Return path → variable of the values sown in a call, without those for debugging."""
        known = {path for path, _ in nnx.to_flat_state(self._structure.others)}
        sown = {}
        for path, x in nnx.to_flat_state(after):
            if path in known or not isinstance(x, nnx.Variable):
                continue
            if type(x) not in _DEBUGGING_TYPES or isinstance(x, self.loss_types):
                sown[join(path)] = x
        return sown

    def _check_losses_in(self, sown: Mapping[str, nnx.Variable]) -> None:
        unsown = []
        for kind in self.loss_types:
            if not any(isinstance(x, kind) for x in sown.values()):
                unsown.append(kind.__name__)
        check_all_sown(unsown)


def _set_training_mode(module: nnx.Module) -> None:
    """Call `train()` of a module, except for layers with a mode fixed at construction."""
    fixed = []
    for _, layer in nnx.iter_modules(module):
        for name in _MODES:
            if getattr(layer, name, None) is True:
                fixed.append((layer, name))
    module.train()
    for layer, name in fixed:
        setattr(layer, name, True)


def _shapes(params: nnx.State) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for path, param in nnx.to_flat_state(params):
        shapes[join(path)] = jnp.shape(param.get_value())
    return shapes


def _tied_params(module: nnx.Module, structure: ModuleStructure) -> tuple[tuple[str, ...], ...]:
    """Return the paths of each parameter with several paths."""
    shared = []
    for group in nnx.find_duplicates(module):
        shared.append([join(path) for path in group])
    tied = []
    for path, _ in nnx.to_flat_state(structure.params):
        aliases = _aliases(join(path), shared)
        if aliases:
            tied.append(aliases)
    return tuple(tied)


def _step_variables(module: nnx.Module, structure: ModuleStructure) -> frozenset[str]:
    """Return the paths of the variables that a module changes once a step."""
    if not isinstance(module, UpdatesOnceAStep):
        return frozenset()
    kinds = module.step_variables
    return _paths_where(structure.others, lambda x: isinstance(x, kinds))


def _random_state(structure: ModuleStructure) -> frozenset[str]:
    """Return the paths of random keys and draw counters."""
    return _paths_where(structure.others, lambda x: isinstance(x, nnx.RngState))


def _paths_where(state: nnx.State, holds: Callable[[Any], bool]) -> frozenset[str]:
    """Return the paths of the variables of which something holds."""
    return frozenset(join(path) for path, x in nnx.to_flat_state(state) if holds(x))


def _as_data(leaf: Any) -> jax.Array:
    """Convert a random key to its data, as the training state holds it, and numbers to arrays."""
    leaf = as_array(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


def _as_key(leaf: jax.Array, like: Any) -> jax.Array:
    """Convert the data of a random key back to a key, if the module has one there.

    Args:
        like: The module's array there; None if there is none.
    """
    if like is None:
        return leaf
    implementation = tree.key_implementation(like)
    if not implementation:
        return leaf
    return jax.random.wrap_key_data(leaf, impl=implementation)


def _aliases(path: str, shared: list[list[str]]) -> tuple[str, ...]:
    """Return all paths of an array, through nodes with several paths; empty if it has only one."""
    found = [path]
    for known in found:  # grows during the loop
        for group in shared:
            for prefix in group:
                for alias in _replace_prefix(known, prefix, group):
                    if alias not in found:
                        found.append(alias)
    if len(found) == 1:
        return ()
    return tuple(found)


def _replace_prefix(path: str, prefix: str, group: list[str]) -> list[str]:
    """Return a path through a node's prefix with each other prefix of the node in its place."""
    if not f"{path}/".startswith(f"{prefix}/"):
        return []
    rest = path.removeprefix(prefix)
    # Not around a cycle: a node inside of itself would have infinitely many paths.
    return [other + rest for other in group if not other.startswith(f"{prefix}/")]
