"""NNX and Linen modules as pure functions.

```python
model = from_nnx(lambda rngs: Llama(config, rngs=rngs))
params = model.init(key)    # a nested dictionary: {"layers": {"attention": {"q_proj": {"kernel": …
logits = model.apply(params, tokens)
```
"""

import contextlib
import dataclasses
import functools
import inspect
import pathlib
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spmd import tree
from spmd.errors import (
    AnnotationError,
    ConfigError,
    Problem,
    check_call,
    check_type,
    describe_value,
    did_you_mean,
)
from spmd.model_interface.compute_dtype import InComputeDtype
from spmd.model_interface.kernels import Said
from spmd.model_interface.model import (
    VALID,
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
    takes_valid,
)
from spmd.plan.created import drawn_shapes, recording
from spmd.plan.flax_dtypes import (
    CAST_BY_LAYER,
    mark_own_dtypes,
    narrow_linen_attention,
    params_of,
    record_own_dtypes,
    use_plan_dtype,
)
from spmd.plan.linen_collections import DEBUGGING, LinenCollections
from spmd.plan.logical_constraints import read_logical_constraints
from spmd.plan.nnx_state import (
    ModuleStructure,
    join,
    register_arrays,
    to_dict,
    trace_structure,
    with_values,
)
from spmd.plan.sown import Sown, add_sown, check_sown, stacked_by_scan
from spmd.plan.structure import describe, nnx_said
from spmd.sharding.flax_metadata import PARAMS_AXES, linen_annotations, nnx_annotations

_NO_MODEL = "Invalid model:"
_NO_CALL = "Invalid call of the module:"
_MAKE_FIX = "spmd.from_nnx(lambda rngs: Module(…, rngs=rngs)), or spmd.from_linen(module, *inputs)"

_MODES = ("deterministic", "use_running_average")
"""The attributes that `train()` of an NNX module sets to False."""

_NO_MESH = (
    "non-empty mesh in context",
    "not under a mesh context",
    "axis names that are of type Auto",
)
"""Words of JAX's errors about a `PartitionSpec` without a mesh."""

_LOSSES = ("losses",)

_NO_VARIABLES = ("params", PARAMS_AXES)
"""Collections of Linen that are no variables."""

_DEBUGGING_TYPES = (nnx.Intermediate, nnx.Perturbation)
"""Types of NNX variables for debugging; `DEBUGGING` has the collections of Linen."""

_FOREIGN = frozenset(("jax", "flax", "contextlib.py"))
"""Parts of the paths of files outside of a model, to skip in a traceback."""

_UNBOUND = re.compile(r"unbound axis name:? (\w+)")


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
            argument: `{"deterministic": False}`. Such a module cannot be pipelined.
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
        raise ConfigError(_NO_MODEL, problems)
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
        return jax.tree.map(_as_array, to_dict(nnx.state(module, nnx.Param)))

    def init_variables(self, key: jax.Array) -> Any:
        if not jax.tree.leaves(self._structure.others):
            return {}  # building a module is slow, and most have no variables
        module, _ = self._build(key)
        return jax.tree.map(_as_data, to_dict(nnx.state(module, nnx.Not(nnx.Param))))

    def apply(self, params: Any, *inputs: Any, **keywords: Any) -> Any:
        _check_none(self._structure.variables)
        outputs, _ = self._call(params, {}, inputs, {**self.evaluation, **keywords}, train=False)
        return outputs

    def forward(
        self, params: Any, variables: Any, key: Any, *inputs: Any, train: bool, **keywords: Any
    ) -> tuple[Any, Any]:
        del key  # an NNX module has its own random state
        mode = self.training if train else self.evaluation
        keywords = {**mode, **keywords}
        outputs, after = self._call(params, variables, inputs, keywords, train)
        sown = self._sown_in(after)
        if train:
            self._check_losses_in(sown)

        def sow_again() -> list[Any]:
            _, after = self._call(params, variables, inputs, keywords, train)
            return [x.get_value() for x in self._sown_in(after).values()]

        found = []
        for path, x in sown.items():
            found.append(Sown(path, x.get_value(), isinstance(x, self.loss_types)))
        values = tree.flatten(to_dict(after))
        updated = tree.map_with_path(lambda path, _: _as_data(values[path]), variables)
        return add_sown(outputs, found, lambda: stacked_by_scan(sow_again)), updated

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
        if self.training or self.evaluation:
            return None
        module = self._abstract_module
        if not isinstance(module, LayeredModule):
            return None
        if takes_valid(_called(module, {})) and not takes_valid(module.embed_inputs):
            what = f"does not take {VALID!r}, which {type(module).__name__}.__call__ takes"
            fix = f"embed_inputs(…, {VALID}=None)"
            raise ConfigError(_NO_MODEL, [Problem("embed_inputs", what, fix=fix)])
        embed_inputs = self._part("embed_inputs")

        def embed(
            params: Any, variables: Any, key: Any, *inputs: Any, train: bool, **keywords: Any
        ) -> Any:
            del key  # an NNX module has its own random state
            return embed_inputs(params, variables, *inputs, train=train, **keywords)

        return LayeredModel(
            InComputeDtype(embed, self.info, inputs_from=2, returns_outputs=False),
            InComputeDtype(self._part("apply_layers"), self.info, returns_outputs=False),
            InComputeDtype(self._part("compute_outputs"), self.info),
            getattr(module, "outputs_take_context", False),
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
            position_aware=is_position_aware(module),
            supports_kv_cache=supports_kv_cache(module),
            padding_aware=is_padding_aware(module, _called(module, self.training)),
            step_variables=_step_variables(module, structure),
        )

    def _params_with(self, flag: str) -> frozenset[str]:
        """Return the paths of the parameters with a flag in their metadata."""
        found = []
        for path, param in nnx.to_flat_state(self._structure.params):
            if param.get_metadata(flag, False):
                found.append(join(path))
        return frozenset(found)

    def _build(self, key: jax.Array) -> tuple[nnx.Module, dict[str, jax.Array]]:
        """Build the module, and make its plain arrays part of its state."""
        # The plan shards arrays, not the module.
        with _no_shardings_inside(), nnx.use_eager_sharding(False):
            module = self.make(nnx.Rngs(key))
        problems = check_type("what make returns", module, nnx.Module, _MAKE_FIX)
        if problems:
            raise ConfigError(_NO_MODEL, problems)
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
    ) -> tuple[Any, nnx.State]:
        """Return the outputs of a call, and the state after it, without parameters."""
        module = self._restore(params, variables, train)
        keywords = dict(keywords)
        method = keywords.pop("method", "__call__")
        run = _check_call(module, method, inputs, keywords)
        with _no_shardings_inside(), warnings.catch_warnings():
            # Flax warns at each sown value that its type should be declared before the call.
            warnings.filterwarnings("ignore", "Using 'Module.sow", DeprecationWarning)
            outputs = run(module, *inputs, **keywords)
        return outputs, nnx.state(module, nnx.Not(nnx.Param))

    def _part(self, method: str) -> Callable[..., Any]:
        """Return a method of the module as a function of parameters, variables and inputs."""

        def run(params: Any, variables: Any, *inputs: Any, train: bool, **keywords: Any) -> Any:
            with _no_shardings_inside():
                module = self._restore(params, variables, train)
                return getattr(module, method)(*inputs, **keywords)

        return run

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
        _check_losses(unsown)


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
    found = []
    for path, x in nnx.to_flat_state(structure.others):
        if isinstance(x, module.step_variables):
            found.append(join(path))
    return frozenset(found)


def _random_state(structure: ModuleStructure) -> frozenset[str]:
    """Return the paths of random keys and draw counters."""
    found = []
    for path, variable in nnx.to_flat_state(structure.others):
        if isinstance(variable, nnx.RngState):
            found.append(join(path))
    return frozenset(found)


def from_linen(
    module: nn.Module,
    *inputs: Any,
    rngs: tuple[str, ...] = ("dropout",),
    evaluation_rngs: tuple[str, ...] = (),
    losses: tuple[str, ...] = _LOSSES,
    train: Mapping[str, Any] | None = None,
    evaluate: Mapping[str, Any] | None = None,
) -> Model:
    """Return the functions of a Linen module.

    The `params` collection is the parameters; every other collection at initialization
    (`batch_stats`) is among the model's variables, under its name. A collection that only `sow`
    writes to is no variable: `forward` returns the values sown in the call, as
    `spmd.model_interface.model.Outputs`, under `collection/path/name`. Flax's collections for
    debugging (`intermediates`, `perturbations`) are dropped unless they are in `losses`.

    Args:
        *inputs: The module's inputs, as arrays or `jax.ShapeDtypeStruct`s. Only shapes are used,
            unless an initial value is computed from the inputs, as that of an ActNorm; then the
            inputs must be arrays.
        rngs: Names of the random streams in training with a key of their own. Others draw from the
            stream `params`.
        evaluation_rngs: Names of the random streams in evaluation, for a module that draws random
            numbers in evaluation, too.
        losses: Collections whose sown values training adds to the loss; values sown in other
            collections become metrics.
        train: Keyword arguments of a call in training, such as `{"train": True}` or
            `{"deterministic": False}`.
        evaluate: Keyword arguments of a call in evaluation and at initialization. Those of `apply`
            and `forward` are added; `method` is the method to call, as in Flax.

    Example:
        >>> model = from_linen(nn.Dense(3), jax.ShapeDtypeStruct((4, 2), "float32"))
        >>> params = model.init(jax.random.key(0))
        >>> sorted(params), model.apply(params, jax.numpy.ones((4, 2))).shape
        (['bias', 'kernel'], (4, 3))
    """
    fix = "spmd.from_linen(Module(…), *inputs), or spmd.from_nnx for a module of nnx"
    problems = check_type("module", module, nn.Module, fix)
    if problems:
        raise ConfigError(_NO_MODEL, problems)
    functions = _LinenFunctions(
        module,
        jax.tree.map(_as_example, inputs),
        rngs,
        evaluation_rngs,
        losses,
        dict(train or {}),
        dict(evaluate or {}),
    )
    return Model(
        functions.init,
        functions.apply,
        functions.init_variables,
        functions.forward,
        functions.info,
        name=type(module).__name__,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _LinenFunctions:
    """The functions of a Linen module, for a `Model`.

    Attributes:
        examples: The module's inputs: NumPy arrays, or shapes.
        rngs: Names of the random streams in training.
        evaluation_rngs: Names of the random streams in evaluation.
        losses: Collections with sown losses.
        training: Keyword arguments of a call in training.
        evaluation: Keyword arguments of a call in evaluation.
        said: Path → the statement of a layer about its parameter, recorded when the module is
            traced.
    """

    module: nn.Module
    examples: Any
    rngs: tuple[str, ...]
    evaluation_rngs: tuple[str, ...]
    losses: tuple[str, ...]
    training: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    said: dict[str, Said] = dataclasses.field(default_factory=dict)

    def init(self, key: jax.Array) -> Any:
        params = self._create(key).get("params", {})
        return jax.tree.map(_as_array, nn.meta.unbox(params))

    def init_variables(self, key: jax.Array) -> Any:
        others = _without_params(self._create(key))
        return jax.tree.map(_as_array, nn.meta.unbox(others))

    def apply(self, params: Any, *inputs: Any, **keywords: Any) -> Any:
        made, _ = self._traced
        _check_none(_without_params(made))
        return self._call({"params": params}, inputs, {**self.evaluation, **keywords})

    def forward(
        self, params: Any, variables: Any, key: Any, *inputs: Any, train: bool, **keywords: Any
    ) -> tuple[Any, Any]:
        everything = {"params": params, **variables}
        if train:
            keywords = {**self.training, **keywords}
            keys = _stream_keys(key, (*self.rngs, "params"))
            immutable = _NO_VARIABLES
        else:
            keywords = {**self.evaluation, **keywords}
            keys = _stream_keys(key, self.evaluation_rngs)
            immutable = (*_NO_VARIABLES, *variables)
        debugging = [name for name in DEBUGGING if name not in self.losses]
        mutable = nn.DenyList((*immutable, *debugging))

        def run() -> tuple[Any, Any]:
            return self._call(everything, inputs, keywords, rngs=keys, mutable=mutable)

        outputs, after = run()
        after = dict(nn.meta.unbox(after))
        sown = {}
        for name in list(after):
            if name not in variables:
                sown[name] = after.pop(name)
        if train:
            _check_persistent(variables, after)
            if not self._collections.sown.issuperset(sown):
                # Some collections exist in training only; check that the module runs without them.
                only = list(variables)
                jax.eval_shape(
                    lambda: self._call(everything, inputs, keywords, rngs=keys, mutable=only)[0]
                )
            self._check_losses_in(sown)

        def sow_again() -> dict[str, Any]:
            _, after = run()
            made = nn.meta.unbox(after)
            return {name: made[name] for name in sown}

        outputs = add_sown(outputs, self._named(sown), lambda: stacked_by_scan(sow_again))
        return outputs, {**variables, **after}

    def info(self) -> ModelInfo:
        collections = self._collections
        check_sown(self._named(collections.sown_values), collections.sown_by_scan)
        made, layers = self._traced
        params = made.get("params", {})
        names = made.get(PARAMS_AXES)
        arrays = tree.flatten(nn.meta.unbox(params))
        shapes = {path: x.shape for path, x in arrays.items()}
        return dataclasses.replace(
            describe(shapes, self.said),
            annotations=linen_annotations(params, names),
            padding_aware=takes_valid(_called(self.module, self.training)),
            cast_by_layer=params_of(layers, shapes),
        )

    @functools.cached_property
    def _collections(self) -> LinenCollections:
        keywords = dict(self.evaluation)
        method = keywords.pop("method", "__call__")
        run = _check_call(self.module, method, self.examples, keywords)
        return LinenCollections(self.module, run, keywords, self.examples, self.losses)

    @functools.cached_property
    def _traced(self) -> tuple[dict[str, Any], set[str]]:
        """The abstract collections, and the paths of layers with a `dtype` of their own."""
        with record_own_dtypes() as layers, recording(self.said):
            return jax.eval_shape(self._create, abstract_key()), layers

    def _create(self, key: jax.Array) -> dict[str, Any]:
        with _no_shardings_inside():
            return self._collections.create(key)

    def _call(self, everything: Any, inputs: Any, keywords: Any, **options: Any) -> Any:
        """Apply the module to collections and inputs."""
        keywords = dict(keywords)
        method = keywords.pop("method", "__call__")
        run = _check_call(self.module, method, inputs, keywords)
        with _no_shardings_inside(), _flax_errors_in_words(), narrow_linen_attention():
            return self.module.apply(everything, *inputs, method=run, **options, **keywords)

    def _named(self, sown: Mapping[str, Any]) -> list[Sown]:
        # A tuple is one value.
        values = tree.flatten(sown, is_leaf=lambda x: not isinstance(x, Mapping))
        found = []
        for path, value in values.items():
            collection, _, _ = path.partition("/")
            found.append(Sown(path, value, collection in self.losses))
        return found

    def _check_losses_in(self, sown: Mapping[str, Any]) -> None:
        if self.losses == _LOSSES:
            return  # the default, which a module need not have
        _check_losses(name for name in self.losses if name not in sown)


def _without_params(collections: Mapping[str, Any]) -> dict[str, Any]:
    others = {}
    for name, values in collections.items():
        if name not in _NO_VARIABLES:
            others[name] = values
    return others


def _as_example(x: Any) -> Any:
    """Convert an input to a NumPy array for any mesh, or to its shape if it has no values."""
    if isinstance(x, jax.ShapeDtypeStruct | jax.core.Tracer):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    return np.asarray(x)


def _stream_keys(key: jax.Array | None, names: Iterable[str]) -> dict[str, jax.Array]:
    """Return a key for each random stream; none without a key."""
    if key is None:
        return {}
    return {name: jax.random.fold_in(key, number) for number, name in enumerate(names)}


def _check_losses(unsown: Iterable[str]) -> None:
    """Raise a `ConfigError` with all losses without a sown value, if there are any."""
    what = "is nothing that the module sows in training"
    problems = [Problem(f"losses {name!r}", what) for name in unsown]
    if problems:
        raise ConfigError("Unknown losses:", problems)


def _check_persistent(before: Any, after: Any) -> None:
    """Raise a `ConfigError` if a call adds arrays to the persistent collections; list them all."""
    known = set(tree.flatten(before))
    what = "is added to the variables by a call"
    fix = "sow into a collection of its own, or make the variable at initialization, too"
    problems = [Problem(path, what, fix=fix) for path in tree.flatten(after) if path not in known]
    if problems:
        raise ConfigError("The module adds to its variables:", problems)


_STREAM = re.compile(r'needs PRNG for "(\w+)"')


@contextlib.contextmanager
def _flax_errors_in_words() -> Iterator[None]:
    """Explain Flax's errors about missing random streams and variables."""
    try:
        yield
    except flax.errors.InvalidRngError as error:
        where, line = _own_line(error)
        found = _STREAM.search(str(error))
        stream = found[1] if found else "noise"
        what = f"draws from the random stream {stream!r}, which has no key: {line or error}"
        fix = (
            f'a key for forward; in evaluation, evaluate={{"deterministic": True}} or '
            f'evaluation_rngs=("{stream}",)'
        )
        problem = Problem(where, what, fix=fix)
        raise ConfigError("The module draws random numbers:", [problem]) from None
    except flax.errors.ModifyScopeVariableError as error:
        where, line = _own_line(error)
        what = f"changes a variable in evaluation: {line or error}"
        fix = 'evaluate={"train": False}, or in the module: if self.is_mutable_collection("name")'
        problem = Problem(where, what, fix=fix)
        raise ConfigError("Evaluation changes no variables:", [problem]) from None
    except (flax.errors.ScopeCollectionNotFound, flax.errors.ScopeVariableNotFoundError) as error:
        where, line = _own_line(error)
        what = f"needs a variable that does not exist: {line or error}"
        fix = (
            "make it in evaluation mode, too, which initializes the module; or give "
            "model.forward its variables"
        )
        problem = Problem(where, what, fix=fix)
        raise ConfigError("The module lacks a variable:", [problem]) from None


def _as_array(leaf: Any) -> jax.Array:
    """Convert a number, such as in `nnx.Param(0.07)`; its dtype is JAX's default, and not weak."""
    if hasattr(leaf, "dtype"):
        return leaf
    return jnp.asarray(leaf, jnp.result_type(leaf))


def _as_data(leaf: Any) -> jax.Array:
    """Convert a random key to its data, as the training state holds it, and numbers to arrays."""
    leaf = _as_array(leaf)
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


def _check_call(
    module: Any,
    method: str | Callable[..., Any],
    inputs: tuple[Any, ...],
    keywords: Mapping[str, Any],
) -> Callable[..., Any]:
    """Return a method of the module, or raise a `ConfigError` if it does not take these arguments.

    Args:
        method: The name of a method, or a function whose first argument is the module.
    """
    kind = type(module)
    run = _method(module, method)
    if not callable(run):
        what = f"is {describe_value(method)}, which {kind.__name__} does not have"
        fix = did_you_mean(str(method), _own_methods(kind))
        raise ConfigError(_NO_CALL, [Problem("method", what, fix=fix)])
    try:
        inspect.signature(run).bind(module, *inputs, **keywords)
    except TypeError as error:
        name = method
        if not isinstance(method, str):
            name = getattr(method, "__name__", describe_value(method))
        problem = Problem(
            f"{kind.__name__}.{name}",
            f"cannot be called with {len(inputs)} inputs and the keywords {sorted(keywords)}: "
            f"{error}",
            fix="give the arguments to model.apply or model.forward (the losses of tokens give a "
            "batch with documents as tokens and segments: the module needs a second parameter); "
            'those of a mode once: train={"deterministic": False}, evaluate={…}',
        )
        raise ConfigError(_NO_CALL, [problem]) from None
    return run


def _own_methods(kind: type) -> list[str]:
    """Return the names of a module's methods besides Flax's own."""
    of_flax = {*dir(nnx.Module), *dir(nn.Module)}
    names = []
    for name in dir(kind):
        if name not in of_flax and callable(getattr(kind, name)):
            names.append(name)
    return names


def _method(module: Any, method: str | Callable[..., Any]) -> Any:
    """Return a method as a function of the module and its arguments; None for an unknown name."""
    run: Any = method
    if isinstance(method, str):
        run = getattr(type(module), method, None)
    return getattr(run, "__func__", run)  # of a bound method, which Flax takes, too


def _called(module: Any, keywords: Mapping[str, Any]) -> Any:
    """Return the method of a call with these keywords."""
    return _method(module, keywords.get("method", "__call__"))


@contextlib.contextmanager
def _no_shardings_inside() -> Iterator[None]:
    """Read logical shardings from the plan, and explain JAX's errors about any others."""
    try:
        with read_logical_constraints():
            yield
    except (RuntimeError, ValueError) as error:
        if not any(words in str(error) for words in _NO_MESH):
            raise
        where, line = _own_line(error)
        problem = Problem(
            where,
            f"names a sharding by itself: {line or error}",
            "JAX has no mesh for it here; the plan shards arrays, on any mesh",
            'spmd.annotate(x, "name") in its place, and the spec in the table: '
            'Rules(activations=[("name", P(…))])',
        )
        title = "The model names shardings outside of the rule table:"
        raise AnnotationError(title, [problem]) from error
    except NameError as error:
        axis = _UNBOUND.search(str(error))
        if not axis:
            raise
        where, line = _own_line(error)
        problem = Problem(
            where,
            f"reduces over an axis {axis[1]!r} that nothing maps: {line or error}",
            "the model is called with the global batch, so its means are over the examples of "
            "all devices already",
            f"leave out axis_name={axis[1]!r}, as of a BatchNorm",
        )
        title = "Unknown axis of a mapped function:"
        raise AnnotationError(title, [problem]) from error


def _own_line(error: BaseException) -> tuple[str, str | None]:
    """Return file and number of an error's innermost line outside of JAX and Flax, and its text."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        parts = pathlib.PurePath(frame.filename).parts
        if _FOREIGN.isdisjoint(parts):
            return f"{frame.filename}:{frame.lineno}", frame.line
    return "the module", None


def _check_none(variables: Any) -> None:
    fix = "call model.forward(params, variables, key, *inputs, train=False)"
    problems = [Problem(path, "is a variable", fix=fix) for path in tree.flatten(variables)]
    if problems:
        raise ConfigError("This model cannot be applied to parameters alone:", problems)
