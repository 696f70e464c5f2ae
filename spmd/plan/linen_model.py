"""Linen modules as pure functions.

```python
model = from_linen(Transformer(config), tokens)
params = model.init(key)
logits = model.apply(params, tokens)
```
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import flax
import flax.linen as nn
import jax
import numpy as np

from spmd import tree
from spmd.errors import (
    ConfigError,
    Problem,
    check_type,
    did_you_mean,
)
from spmd.jaxpr.dependence import dependent_outputs
from spmd.model_interface.kernels import Said
from spmd.model_interface.model import (
    NO_PIPELINE,
    LayeredModel,
    Model,
    ModelInfo,
    abstract_key,
    takes_valid,
)
from spmd.model_interface.wrapped_param import is_wrapped
from spmd.plan.created import recording
from spmd.plan.flax_calls import (
    INVALID_MODEL,
    as_array,
    called_method,
    check_all_sown,
    check_no_variables,
    checked_method,
    no_shardings_inside,
    own_line,
)
from spmd.plan.flax_dtypes import (
    narrow_linen_attention,
    params_of,
    record_own_dtypes,
)
from spmd.plan.flax_parts import (
    ModeKeywords,
    Part,
    check_nothing_sown,
    layered_model,
    mode_keywords,
)
from spmd.plan.linen_collections import DEBUGGING, LinenCollections
from spmd.plan.sown import Sown, add_sown, check_sown, stacked_by_scan
from spmd.plan.structure import describe
from spmd.sharding.flax_metadata import PARAMS_AXES, linen_annotations
from spmd.sharding.layer_paths import dims_of

_LOSSES = ("losses",)

_NO_VARIABLES = ("params", PARAMS_AXES)
"""Collections of Linen that are no variables."""

_STREAM = re.compile(r'needs PRNG for "(\w+)"')


def from_linen(
    module: nn.Module,
    *inputs: Any,
    rngs: tuple[str, ...] = ("dropout",),
    evaluation_rngs: tuple[str, ...] = (),
    losses: tuple[str, ...] = _LOSSES,
    train: Mapping[str, Any] | None = None,
    evaluate: Mapping[str, Any] | None = None,
    layers: str = "",
) -> Model:
    """Return the functions of a Linen module.

    The `params` collection is the parameters; every other collection at initialization
    (`batch_stats`) is among the model's variables, under its name. A collection that only `sow`
    writes to is no variable: `forward` returns the values sown in the call, as
    `spmd.model_interface.model.Outputs`, under `collection/path/name`. Flax's collections for
    debugging (`intermediates`, `perturbations`) are dropped unless they are in `losses`.

    A module with the methods `embed_inputs`, `apply_layers` and `compute_outputs` can be pipelined
    (`spmd.model_interface.model.LayeredModel`) if `layers` names the field for their number. There,
    only `embed_inputs` can draw random numbers.

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
        layers: Name of the module's field with the number of its stacked layers, such as
            `n_layers: int` (a field of the module itself, not of its config). A stage of a pipeline
            runs a copy of the module in which it is the number of its own.

    Raises:
        ConfigError: `module` is no Linen module, or has no such field.

    Example:
        >>> model = from_linen(nn.Dense(3), jax.ShapeDtypeStruct((4, 2), "float32"))
        >>> params = model.init(jax.random.key(0))
        >>> sorted(params), model.apply(params, jax.numpy.ones((4, 2))).shape
        (['bias', 'kernel'], (4, 3))
    """
    fix = "spmd.from_linen(Module(…), *inputs), or spmd.from_nnx for a module of nnx"
    problems = check_type("module", module, nn.Module, fix)
    if layers and not problems:
        problems = _layers_problems(module, layers)
    if problems:
        raise ConfigError(INVALID_MODEL, problems)
    functions = _LinenFunctions(
        module,
        jax.tree.map(_as_example, inputs),
        rngs,
        evaluation_rngs,
        losses,
        dict(train or {}),
        dict(evaluate or {}),
        layers,
    )
    return Model(
        functions.init,
        functions.apply,
        functions.init_variables,
        functions.forward,
        functions.info,
        functions.layered,
        name=type(module).__name__,
    )


def _layers_problems(module: nn.Module, layers: str) -> list[Problem]:
    """Return why a field cannot be the number of a module's layers."""
    fields = module.__dataclass_fields__
    if layers not in fields:
        kind = type(module).__name__
        fix = did_you_mean(layers, [name for name in fields if name not in ("parent", "name")])
        return [Problem("layers", f"is {layers!r}, and {kind} has no such field", fix=fix)]
    return check_type("layers", getattr(module, layers), int, f"{layers}=4")


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
        layers: Name of the field with the number of stacked layers.
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
    layers: str
    said: dict[str, Said] = dataclasses.field(default_factory=dict)

    def init(self, key: jax.Array) -> Any:
        params = self._create(key).get("params", {})
        return jax.tree.map(as_array, nn.meta.unbox(params))

    def init_variables(self, key: jax.Array) -> Any:
        others = _without_params(self._create(key))
        return jax.tree.map(as_array, nn.meta.unbox(others))

    def apply(self, params: Any, *inputs: Any, **keywords: Any) -> Any:
        made, _ = self._traced
        check_no_variables(_without_params(made))
        return self._call({"params": params}, inputs, {**self.evaluation, **keywords})

    def forward(
        self, params: Any, variables: Any, key: Any, *inputs: Any, train: bool, **keywords: Any
    ) -> tuple[Any, Any]:
        everything = {"params": params, **variables}
        mode = self.training if train else self.evaluation
        keywords = {**mode, **keywords}
        keys = self._keys(key, train=train)
        mutable = self._mutable(variables, train=train)

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

    def layered(self) -> LayeredModel | None:
        if not self.layers:
            return None
        modes = mode_keywords(self.module, self.training, self.evaluation)
        if modes is None:
            return None
        embed = self._part("embed_inputs", modes)

        def embed_inputs(
            params: Any, variables: Any, key: Any, *inputs: Any, train: bool, **keywords: Any
        ) -> Any:
            keys = self._keys(key, train=train)
            return embed(params, variables, *inputs, keys=keys, train=train, **keywords)

        return layered_model(
            self.module,
            self.info,
            embed_inputs=embed_inputs,
            apply_layers=self._without_keys("apply_layers", modes),
            compute_outputs=self._without_keys("compute_outputs", modes),
        )

    def _part(self, method: str, modes: ModeKeywords) -> Part:
        """Return a method as a function of some layers, variables, inputs and keys of streams."""

        def run(
            params: Any,
            variables: Any,
            *inputs: Any,
            train: bool,
            keys: Mapping[str, jax.Array],
            **keywords: Any,
        ) -> tuple[Any, Any]:
            keywords = {**modes.of(method, train=train), **keywords, "method": method}
            everything = {"params": params, **variables}
            mutable = self._mutable(variables, train=train)
            result, after = self._call(everything, inputs, keywords, rngs=keys, mutable=mutable)
            after = dict(nn.meta.unbox(after))
            check_nothing_sown(method, after.keys() - variables.keys())
            return result, {**variables, **after}

        return run

    def _without_keys(self, method: str, modes: ModeKeywords) -> Part:
        """Return a method without random numbers as a function without keys.

        It gets some keys: a module may ask whether it has any.
        """
        part = self._part(method, modes)

        def run(params: Any, variables: Any, *inputs: Any, train: bool) -> tuple[Any, Any]:
            def with_keys(keys: Mapping[str, jax.Array]) -> tuple[Any, Any]:
                return part(params, variables, *inputs, train=train, keys=keys)

            keys = self._keys(jax.random.key(0), train=train)
            program = jax.make_jaxpr(with_keys)(keys)
            if any(dependent_outputs(program, [True] * len(keys))):
                where = f"{type(self.module).__name__}.{method}"
                what = "draws random numbers, and Linen splits one key among all layers"
                fix = f"none in {method}; or a module of nnx, whose layers each have a random state"
                raise ConfigError(NO_PIPELINE, [Problem(where, what, fix=fix)])
            return with_keys(keys)

        return run

    def _with_layers(self, params: Any) -> nn.Module:
        """Return the module with as many layers as the stacks of its parameters have rows."""
        found = tree.flatten(params, is_leaf=is_wrapped)
        for path, rows in self._rows.items():
            own = rows
            if path in found:
                own = found[path].shape[0]
            if own != rows:
                layers = getattr(self.module, self.layers)
                return self.module.clone(**{self.layers: layers * own // rows})
        return self.module

    @functools.cached_property
    def _rows(self) -> dict[str, int]:
        """Path → rows of each stack of layers."""
        stacks = describe(self._shapes, self.said).stacks or {}
        rows = {}
        for path, shape in self._shapes.items():
            if 0 in dims_of(path, stacks):
                rows[path] = shape[0]
        if not rows:
            what = f"is {self.layers!r}, and no parameter has a row for each, its first dimension"
            fix = f'nn.scan(…, variable_axes={{"params": 0}}, length=self.{self.layers})'
            raise ConfigError(INVALID_MODEL, [Problem("layers", what, fix=fix)])
        return rows

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Path → shape of each parameter."""
        made, _ = self._traced
        params = tree.flatten(nn.meta.unbox(made.get("params", {})))
        return {path: x.shape for path, x in params.items()}

    def info(self) -> ModelInfo:
        collections = self._collections
        check_sown(self._named(collections.sown_values), collections.sown_by_scan)
        made, layers = self._traced
        params = made.get("params", {})
        names = made.get(PARAMS_AXES)
        shapes = self._shapes
        return dataclasses.replace(
            describe(shapes, self.said),
            annotations=linen_annotations(params, names),
            padding_aware=takes_valid(called_method(self.module, self.training)),
            cast_by_layer=params_of(layers, shapes),
        )

    def _keys(self, key: jax.Array | None, *, train: bool) -> dict[str, jax.Array]:
        """Return a key for each random stream of a mode."""
        streams = self.evaluation_rngs
        if train:
            streams = (*self.rngs, "params")
        return _stream_keys(key, streams)

    def _mutable(self, variables: Any, *, train: bool) -> nn.DenyList:
        """Return the collections changed by a call in a mode."""
        immutable = [*_NO_VARIABLES, *(name for name in DEBUGGING if name not in self.losses)]
        if not train:
            immutable += variables
        return nn.DenyList(tuple(immutable))

    @functools.cached_property
    def _collections(self) -> LinenCollections:
        keywords = dict(self.evaluation)
        method = keywords.pop("method", "__call__")
        run = checked_method(self.module, method, self.examples, keywords)
        return LinenCollections(self.module, run, keywords, self.examples, self.losses)

    @functools.cached_property
    def _traced(self) -> tuple[dict[str, Any], set[str]]:
        """The abstract collections, and the paths of layers with a `dtype` of their own."""
        with record_own_dtypes() as layers, recording(self.said):
            return jax.eval_shape(self._create, abstract_key()), layers

    def _create(self, key: jax.Array) -> dict[str, Any]:
        with no_shardings_inside():
            return self._collections.create(key)

    def _call(self, everything: Any, inputs: Any, keywords: Any, **options: Any) -> Any:
        """Apply the module to collections and inputs."""
        keywords = dict(keywords)
        method = keywords.pop("method", "__call__")
        module = self.module
        if self.layers:
            module = self._with_layers(everything["params"])
        run = checked_method(module, method, inputs, keywords)
        with no_shardings_inside(), _flax_errors_in_words(), narrow_linen_attention():
            return module.apply(everything, *inputs, method=run, **options, **keywords)

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
        check_all_sown(name for name in self.losses if name not in sown)


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


def _check_persistent(before: Any, after: Any) -> None:
    """Raise a `ConfigError` if a call adds arrays to the persistent collections; list them all."""
    known = set(tree.flatten(before))
    what = "is added to the variables by a call"
    fix = "sow into a collection of its own, or make the variable at initialization, too"
    problems = [Problem(path, what, fix=fix) for path in tree.flatten(after) if path not in known]
    if problems:
        raise ConfigError("The module adds to its variables:", problems)


@contextlib.contextmanager
def _flax_errors_in_words() -> Iterator[None]:
    """Explain Flax's errors about missing random streams and variables."""
    try:
        yield
    except flax.errors.InvalidRngError as error:
        where, line = own_line(error)
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
        where, line = own_line(error)
        what = f"changes a variable in evaluation: {line or error}"
        fix = 'evaluate={"train": False}, or in the module: if self.is_mutable_collection("name")'
        problem = Problem(where, what, fix=fix)
        raise ConfigError("Evaluation changes no variables:", [problem]) from None
    except (flax.errors.ScopeCollectionNotFound, flax.errors.ScopeVariableNotFoundError) as error:
        where, line = own_line(error)
        what = f"needs a variable that does not exist: {line or error}"
        fix = (
            "make it in evaluation mode, too, which initializes the module; or give "
            "model.forward its variables"
        )
        problem = Problem(where, what, fix=fix)
        raise ConfigError("The module lacks a variable:", [problem]) from None


def _stream_keys(key: jax.Array | None, names: Iterable[str]) -> dict[str, jax.Array]:
    """Return a key for each random stream; none without a key."""
    if key is None:
        return {}
    return {name: jax.random.fold_in(key, number) for number, name in enumerate(names)}
