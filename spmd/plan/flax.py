"""NNX and Linen modules as pure functions.

```python
model = from_nnx(lambda rngs: Llama(config, rngs=rngs))
params = model.init(key)               # a nested dictionary: {"layers": {"attention": {"q_proj": {"kernel": …
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
from spmd.errors import AnnotationError, ConfigError, Problem, check_call, check_type, did_you_mean, shown
from spmd.model_api.compute_dtype import InComputeDtype
from spmd.model_api.kernels import Said
from spmd.model_api.model import VALID, LayeredModel, Model, ModelInfo, abstract_key, takes_valid
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
from spmd.plan.nnx_state import ModuleStructure, join, register_arrays, to_dict, trace_structure, with_values
from spmd.plan.sown import Sown, add_sown, check_sown, stacked_by_scan
from spmd.plan.structure import describe, nnx_said
from spmd.sharding.flax_metadata import PARAMS_AXES, linen_annotations, nnx_annotations

_NO_MODEL = "This is no model:"
_PARTS = ("embed_inputs", "apply_layers", "compute_outputs")


_MODES = ("deterministic", "use_running_average")
"""The attributes that `train()` of an NNX module sets to False."""

_NO_MESH = ("non-empty mesh in context", "not under a mesh context", "axis names that are of type Auto")
"""Words of JAX's errors about a `PartitionSpec` that it has no mesh for."""

_LOSSES = ("losses",)

_NO_VARIABLES = ("params", PARAMS_AXES)
"""Collections of Linen that are no variables."""

_DEBUGGING_TYPES = (nnx.Intermediate, nnx.Perturbation)
"""Types by which Flax looks inside an NNX module; `DEBUGGING` has the collections of Linen."""

_UNBOUND = re.compile(r"unbound axis name:? (\w+)")


def from_nnx(
    make: Callable[[nnx.Rngs], nnx.Module],
    *,
    losses: type[nnx.Variable] | tuple[type[nnx.Variable], ...] = (),
    train: Mapping[str, Any] | None = None,
    evaluate: Mapping[str, Any] | None = None,
) -> Model:
    """Return the functions of an NNX module.

    Its `nnx.Param`s are the parameters; all other variables (batch statistics, the random state of dropout) are the
    model's variables, under their own paths. So are arrays and random keys that modules keep as plain attributes; they
    are replicated unless a rule matches. `forward` runs the module in `train()` or `eval()` mode; a layer that was
    built with `use_running_average=True` or `deterministic=True` keeps it in training. Keyword arguments of `apply` and
    `forward` are passed on to the module; `method` says which method they call, by its name or as a function.

    Two optional attributes of the module: `position_aware` lets ring
    attention reorder tokens (`spmd.layers.zigzag`) and implies `supports_kv_cache`, which lets generation decode token
    by token (`spmd.layers.kv_cache`). A module with the methods `embed_inputs`, `apply_layers` and `compute_outputs`
    can be pipelined (`spmd.model_api.model.LayeredModel`). One with a parameter `valid` is called with the mask of the
    tokens that are no padding (`spmd.gradients.losses.valid_tokens`).

    What the module sows in a call is returned by `forward`, as `spmd.model_api.model.Outputs`, under its path.
    `nnx.Intermediate` itself, by which Flax looks inside, is dropped unless it is one of `losses`.

    Args:
        make: Builds the module: `lambda rngs: Llama(config, rngs=rngs)`. It is called under tracing, so the arrays are
            created only as the plan shards them.
        losses: Types of variables whose sown values training adds to the loss; what is sown as others becomes metrics.
        train: Keyword arguments of a call in training, for a module that takes its mode so: `{"deterministic": False}`.
            Such a module cannot be pipelined.
        evaluate: Keyword arguments of a call in evaluation and of `apply`.

    Example:
        >>> model = from_nnx(lambda rngs: nnx.Linear(2, 3, rngs=rngs))
        >>> params = model.init(jax.random.key(0))
        >>> sorted(params), model.apply(params, jax.numpy.ones((4, 2))).shape
        (['bias', 'kernel'], (4, 3))
    """

    training, evaluation = dict(train or {}), dict(evaluate or {})
    loss_types = losses if isinstance(losses, tuple) else (losses,)
    fix = "spmd.from_nnx(lambda rngs: Module(…, rngs=rngs)), or spmd.from_linen(module, *inputs)"
    is_module = isinstance(make, nnx.Module | nn.Module)
    if problems := check_type("make", make, (), fix) if is_module else check_call("make", make, "rngs", fix):
        raise ConfigError(_NO_MODEL, problems)

    def build(key: jax.Array) -> tuple[nnx.Module, dict[str, jax.Array]]:
        with _no_shardings_inside(), nnx.use_eager_sharding(False):  # the plan shards arrays, not the module
            module = make(nnx.Rngs(key))
        if problems := check_type("what make returns", module, nnx.Module, fix):
            raise ConfigError(_NO_MODEL, problems)
        mark_own_dtypes(module)
        return module, register_arrays(module)

    @functools.cache
    def structure() -> ModuleStructure:
        return trace_structure(build, abstract_key())

    @functools.cache
    def abstract_module() -> nnx.Module:
        return structure().module()

    @functools.cache
    def marked(flag: str) -> frozenset[str]:
        params = nnx.to_flat_state(structure().params)
        return frozenset(join(path) for path, param in params if param.get_metadata(flag, False))

    def init(key: jax.Array) -> Any:
        structure()
        return jax.tree.map(_as_array, to_dict(nnx.state(build(key)[0], nnx.Param)))

    def init_variables(key: jax.Array) -> Any:
        if not jax.tree.leaves(structure().others):
            return {}  # building a module is slow, and most have no variables
        return jax.tree.map(_as_data, to_dict(nnx.state(build(key)[0], nnx.Not(nnx.Param))))

    def restore(params: Any, variables: Any, train: bool) -> nnx.Module:
        known = structure()
        variables = tree.map_with_path(lambda path, x: _as_key(x, known.variables.get(path)), variables)
        states = with_values(known.params, params), with_values(known.others, variables)
        module = nnx.merge(known.graph, *states, copy=True)
        use_plan_dtype(module)
        if not train:
            module.eval()
            return module
        frozen = [(m, name) for _, m in nnx.iter_modules(module) for name in _MODES if getattr(m, name, None) is True]
        module.train()
        for child, name in frozen:
            setattr(child, name, True)
        return module

    def part(method: str) -> Callable[..., Any]:
        def run(params: Any, variables: Any, *inputs: Any, train: bool, **keywords: Any) -> Any:
            with _no_shardings_inside():
                return getattr(restore(params, variables, train), method)(*inputs, **keywords)

        return run

    def forward(params: Any, variables: Any, key: Any, *inputs: Any, train: bool, **keywords: Any) -> tuple[Any, Any]:
        del key  # an NNX module has its own random state
        keywords = {**(training if train else evaluation), **keywords}
        outputs, after = call(params, variables, inputs, keywords, train)
        sown = sown_in(after)
        if train:
            _check_losses(kind.__name__ for kind in loss_types if not any(isinstance(x, kind) for x in sown.values()))

        def again() -> list[Any]:
            return [x.get_value() for x in sown_in(call(params, variables, inputs, keywords, train)[1]).values()]

        found = [Sown(path, x.get_value(), isinstance(x, loss_types)) for path, x in sown.items()]
        values = tree.flatten(to_dict(after))
        updated = tree.map_with_path(lambda path, _: _as_data(values[path]), variables)
        return add_sown(outputs, found, lambda: stacked_by_scan(again)), updated

    def call(params: Any, variables: Any, inputs: Any, keywords: Any, train: bool) -> tuple[Any, nnx.State]:
        module, keywords = restore(params, variables, train), dict(keywords)
        method = keywords.pop("method", "__call__")
        run = _check_call(module, method, inputs, keywords)
        with _no_shardings_inside(), warnings.catch_warnings():
            # Flax would rather have the types of sown values named before the call, and says so at each of them.
            warnings.filterwarnings("ignore", "Using 'Module.sow", DeprecationWarning)
            outputs = run(module, *inputs, **keywords)
        return outputs, nnx.state(module, nnx.Not(nnx.Param))

    def sown_in(after: nnx.State) -> dict[str, nnx.Variable]:
        known = {path for path, _ in nnx.to_flat_state(structure().others)}
        new = [(path, x) for path, x in nnx.to_flat_state(after) if path not in known and isinstance(x, nnx.Variable)]
        return {join(path): x for path, x in new if type(x) not in _DEBUGGING_TYPES or isinstance(x, loss_types)}

    def apply(params: Any, *inputs: Any, **keywords: Any) -> Any:
        _check_none(structure().variables)
        return call(params, {}, inputs, {**evaluation, **keywords}, train=False)[0]

    @functools.cache
    def info() -> ModelInfo:
        module, known = abstract_module(), structure()
        shared = [[join(path) for path in group] for group in nnx.find_duplicates(module)]
        tied = tuple(filter(None, (_aliases(join(path), shared) for path, _ in nnx.to_flat_state(known.params))))
        shapes = {join(path): jnp.shape(param.get_value()) for path, param in nnx.to_flat_state(known.params)}
        drawn = functools.partial(drawn_shapes, init, abstract_key())
        random_state = (join(path) for path, v in nnx.to_flat_state(known.others) if isinstance(v, nnx.RngState))
        position_aware = getattr(module, "position_aware", False)
        return dataclasses.replace(
            describe(shapes, nnx_said(module), drawn, tied),
            tied=tied,
            random_state=frozenset(random_state),
            constants=known.constants,
            annotations=nnx_annotations(known.params),
            wrappable=marked("takes_wrapped"),
            gathered_by_layer=marked("gathered_by_layer"),
            sent_exactly=marked("sent_exactly"),
            cast_by_layer=marked(CAST_BY_LAYER) | marked("gathered_by_layer"),
            linear=marked("linear"),
            position_aware=position_aware,
            supports_kv_cache=getattr(module, "supports_kv_cache", position_aware),
            padding_aware=takes_valid(_called(module, training)),
        )

    def layered() -> LayeredModel | None:
        if training or evaluation or not all(hasattr(abstract_module(), name) for name in _PARTS):
            return None
        module = abstract_module()
        if takes_valid(_called(module, {})) and not takes_valid(module.embed_inputs):
            what = f"does not take {VALID!r}, which {type(module).__name__}.__call__ takes"
            raise ConfigError(_NO_MODEL, [Problem("embed_inputs", what, fix=f"embed_inputs(…, {VALID}=None)")])
        embed_inputs, apply_layers, compute_outputs = map(part, _PARTS)

        def embed(params: Any, variables: Any, key: Any, *inputs: Any, train: bool, **keywords: Any) -> Any:
            del key  # an NNX module has its own random state
            return embed_inputs(params, variables, *inputs, train=train, **keywords)

        return LayeredModel(
            InComputeDtype(embed, info, inputs_from=2, returns_outputs=False),
            InComputeDtype(apply_layers, info, returns_outputs=False),
            InComputeDtype(compute_outputs, info),
        )

    return Model(init, apply, init_variables, forward, info, layered)


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

    The `params` collection is the parameters; every other collection at initialization (`batch_stats`) is among the
    model's variables, under its name. A collection that only `sow` writes to is no variable: `forward` returns what was
    sown in the call, as `spmd.model_api.model.Outputs`, under `collection/path/name`. Those by which Flax looks inside
    (`intermediates`, `perturbations`) are dropped unless they are in `losses`.

    Args:
        *inputs: The module's inputs, as arrays or `jax.ShapeDtypeStruct`s. Only shapes are used, unless an initial
            value is computed from the inputs, as that of an ActNorm: this takes arrays.
        rngs: Names of the random streams in training with a key of their own. Others draw from the stream `params`.
        evaluation_rngs: Names of the random streams in evaluation, for a module that draws there, too.
        losses: Collections whose sown values training adds to the loss; what is sown in others becomes metrics.
        train: Keyword arguments of a call in training, such as `{"train": True}` or `{"deterministic": False}`.
        evaluate: Keyword arguments of a call in evaluation and at initialization. Those of `apply` and `forward` are
            added; `method` says which method is called, as in Flax.

    Example:
        >>> model = from_linen(nn.Dense(3), jax.ShapeDtypeStruct((4, 2), "float32"))
        >>> params = model.init(jax.random.key(0))
        >>> sorted(params), model.apply(params, jax.numpy.ones((4, 2))).shape
        (['bias', 'kernel'], (4, 3))
    """
    fix = "spmd.from_linen(Module(…), *inputs), or spmd.from_nnx for a module of nnx"
    if problems := check_type("module", module, nn.Module, fix):
        raise ConfigError(_NO_MODEL, problems)
    examples = jax.tree.map(_as_example, inputs)
    training, evaluation = dict(train or {}), dict(evaluate or {})

    @functools.cache
    def collections() -> LinenCollections:
        keywords = dict(evaluation)
        method = keywords.pop("method", "__call__")
        run = _check_call(module, method, examples, keywords)
        return LinenCollections(module, run, keywords, examples, losses)

    def create(key: jax.Array) -> dict[str, Any]:
        with _no_shardings_inside():
            return collections().create(key)

    def init(key: jax.Array) -> Any:
        return jax.tree.map(_as_array, nn.meta.unbox(create(key).get("params", {})))

    def init_variables(key: jax.Array) -> Any:
        others = {name: part for name, part in create(key).items() if name not in _NO_VARIABLES}
        return jax.tree.map(_as_array, nn.meta.unbox(others))

    def call(everything: Any, inputs: Any, keywords: Any, **options: Any) -> Any:
        keywords = dict(keywords)
        method = keywords.pop("method", "__call__")
        run = _check_call(module, method, inputs, keywords)
        with _no_shardings_inside(), _flax_errors_in_words(), narrow_linen_attention():
            return module.apply(everything, *inputs, method=run, **options, **keywords)

    def forward(params: Any, variables: Any, key: Any, *inputs: Any, train: bool, **keywords: Any) -> tuple[Any, Any]:
        everything = {"params": params, **variables}
        keywords = {**(training if train else evaluation), **keywords}
        keys = _streams(key, rngs if train else evaluation_rngs, also="params" if train else None)
        immutable = _NO_VARIABLES if train else (*_NO_VARIABLES, *variables)
        debugging = [name for name in DEBUGGING if name not in losses]
        mutable = nn.DenyList((*immutable, *debugging))

        def run() -> tuple[Any, Any]:
            return call(everything, inputs, keywords, rngs=keys, mutable=mutable)

        outputs, after = run()
        after = dict(nn.meta.unbox(after))
        sown = {name: after.pop(name) for name in list(after) if name not in variables}
        if train:
            _check_persistent(variables, after)
            if not collections().sown.issuperset(sown):  # made in training alone: the module has to do without them
                only = list(variables)
                jax.eval_shape(lambda: call(everything, inputs, keywords, rngs=keys, mutable=only)[0])
            _check_losses(name for name in losses if name not in sown and losses != _LOSSES)

        def again() -> dict[str, Any]:
            made = nn.meta.unbox(run()[1])
            return {name: made[name] for name in sown}

        return add_sown(outputs, named(sown), lambda: stacked_by_scan(again)), {**variables, **after}

    def named(sown: Mapping[str, Any]) -> list[Sown]:
        values = tree.flatten(sown, is_leaf=lambda x: not isinstance(x, Mapping))  # a tuple is one value
        return [Sown(path, value, path.partition("/")[0] in losses) for path, value in values.items()]

    def apply(params: Any, *inputs: Any, **keywords: Any) -> Any:
        _check_none({name: part for name, part in abstract().items() if name not in _NO_VARIABLES})
        return call({"params": params}, inputs, {**evaluation, **keywords})

    said = dict[str, Said]()

    @functools.cache
    def traced() -> tuple[dict[str, Any], set[str]]:
        with record_own_dtypes() as layers, recording(said):
            return jax.eval_shape(create, abstract_key()), layers

    def abstract() -> dict[str, Any]:
        return traced()[0]

    def info() -> ModelInfo:
        check_sown(named(collections().sown_values), collections().sown_by_scan)
        made, layers = traced()
        params, names = made.get("params", {}), made.get(PARAMS_AXES)
        shapes = {path: x.shape for path, x in tree.flatten(nn.meta.unbox(params)).items()}
        return dataclasses.replace(
            describe(shapes, said),
            annotations=linen_annotations(params, names),
            padding_aware=takes_valid(_called(module, training)),
            cast_by_layer=params_of(layers, shapes),
        )

    return Model(init, apply, init_variables, forward, info)


def _as_example(x: Any) -> Any:
    """Convert an input to a NumPy array, which any mesh can take, or to its shape if it has no values."""
    is_abstract = isinstance(x, jax.ShapeDtypeStruct | jax.core.Tracer)
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_abstract else np.asarray(x)


def _streams(key: jax.Array | None, names: tuple[str, ...], also: str | None) -> dict[str, jax.Array]:
    """Return a key for each random stream, and for one more."""
    if key is None:
        return {}
    keys = {name: jax.random.fold_in(key, number) for number, name in enumerate((*names, also))}
    return {name: x for name, x in keys.items() if name is not None}


def _check_losses(unsown: Iterable[str]) -> None:
    """Raise a `ConfigError` that lists the losses that a call does not sow."""
    if problems := [Problem(f"losses {name!r}", "is nothing that the module sows in training") for name in unsown]:
        raise ConfigError("These losses do not exist:", problems)


def _check_persistent(before: Any, after: Any) -> None:
    """Raise a `ConfigError` that lists the arrays that a call adds to collections that persist between steps."""
    known = {path for path in tree.flatten(before)}
    fix = "sow into a collection of its own, or make the variable at initialization, too"
    new = [path for path in tree.flatten(after) if path not in known]
    if new:
        problems = [Problem(path, "is added to the variables by a call", fix=fix) for path in new]
        raise ConfigError("The module adds to its variables:", problems)


_STREAM = re.compile(r'needs PRNG for "(\w+)"')


@contextlib.contextmanager
def _flax_errors_in_words() -> Iterator[None]:
    """Replace Flax's errors about random streams and variables that a call does not have."""
    try:
        yield
    except flax.errors.InvalidRngError as error:
        where, line = _own_line(error)
        stream = found[1] if (found := _STREAM.search(str(error))) else "noise"
        what = f"draws from the random stream {stream!r}, which has no key: {line or error}"
        fix = f'a key for forward; in evaluation, evaluate={{"deterministic": True}} or evaluation_rngs=("{stream}",)'
        raise ConfigError("The module draws random numbers:", [Problem(where, what, fix=fix)]) from None
    except flax.errors.ModifyScopeVariableError as error:
        where, line = _own_line(error)
        fix = 'evaluate={"train": False}, or in the module: if self.is_mutable_collection("name")'
        problem = Problem(where, f"changes a variable in evaluation: {line or error}", fix=fix)
        raise ConfigError("Evaluation changes no variables:", [problem]) from None
    except (flax.errors.ScopeCollectionNotFound, flax.errors.ScopeVariableNotFoundError) as error:
        where, line = _own_line(error)
        fix = "make it in evaluation mode, too, which initializes the module; or give model.forward its variables"
        problem = Problem(where, f"needs a variable that does not exist: {line or error}", fix=fix)
        raise ConfigError("The module lacks a variable:", [problem]) from None


def _as_array(leaf: Any) -> jax.Array:
    """Convert a number of Python, such as that of `nnx.Param(0.07)`; its dtype is JAX's default, and not weak."""
    return leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf, jnp.result_type(leaf))


def _as_data(leaf: Any) -> jax.Array:
    """Convert a random key to its data, as the training state holds it, and numbers to arrays."""
    leaf = _as_array(leaf)
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _as_key(leaf: jax.Array, like: Any) -> jax.Array:
    """Convert the data of a random key back to the key that the module has there."""
    implementation = like is not None and tree.key_implementation(like)
    return jax.random.wrap_key_data(leaf, impl=implementation) if implementation else leaf


def _aliases(path: str, shared: list[list[str]]) -> tuple[str, ...]:
    """Return all paths of the array at a path, through nodes with several paths; empty if there is only one."""
    found = [path]
    for known in found:  # grows during the loop
        for group in shared:
            for prefix in group:
                if f"{known}/".startswith(f"{prefix}/"):
                    others = [other for other in group if not other.startswith(f"{prefix}/")]  # not around a cycle
                    paths = [other + known.removeprefix(prefix) for other in others]
                    found += [path for path in paths if path not in found]
    return tuple(found) if len(found) > 1 else ()


def _check_call(
    module: Any, method: str | Callable[..., Any], inputs: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return a method of the module, or raise a `ConfigError` if it does not take these arguments.

    Args:
        method: The name of a method, or a function whose first argument is the module.
    """
    kind, run = type(module), _method(module, method)
    if not callable(run):
        of_flax = {*dir(nnx.Module), *dir(nn.Module)}
        known = [name for name in dir(kind) if name not in of_flax and callable(getattr(kind, name))]
        what = f"is {shown(method)}, which {kind.__name__} does not have"
        problem = Problem("method", what, fix=did_you_mean(str(method), known))
        raise ConfigError("This module cannot be called so:", [problem])
    try:
        inspect.signature(run).bind(module, *inputs, **keywords)
    except TypeError as error:
        what = f"cannot be called with {len(inputs)} inputs and the keywords {sorted(keywords)}: {error}"
        fix = "give the arguments to model.apply or model.forward; those of a mode once: "
        fix += 'train={"deterministic": False}, evaluate={…}'
        name = method if isinstance(method, str) else getattr(method, "__name__", shown(method))
        problem = Problem(f"{kind.__name__}.{name}", what, fix=fix)
        raise ConfigError("This module cannot be called so:", [problem]) from None
    return run


def _method(module: Any, method: str | Callable[..., Any]) -> Any:
    """Return a method as a function whose first argument is the module; None if there is none of this name."""
    run = getattr(type(module), method, None) if isinstance(method, str) else method
    return getattr(run, "__func__", run)  # of a bound method, which Flax takes, too


def _called(module: Any, keywords: Mapping[str, Any]) -> Any:
    """Return the method that is called with these keywords."""
    return _method(module, keywords.get("method", "__call__"))


@contextlib.contextmanager
def _no_shardings_inside() -> Iterator[None]:
    """Read shardings by logical names from the plan, and replace JAX's error where a module names one by itself."""
    try:
        with read_logical_constraints():
            yield
    except (RuntimeError, ValueError) as error:
        if not any(words in str(error) for words in _NO_MESH):
            raise
        where, line = _own_line(error)
        what = f"names a sharding by itself: {line or error}"
        fix = 'spmd.annotate(x, "name") in its place, and the spec in the table: Rules(activations=[("name", P(…))])'
        problem = Problem(where, what, "JAX has no mesh for it here; the plan shards arrays, on any mesh", fix)
        raise AnnotationError("The model names shardings outside of the rule table:", [problem]) from error
    except NameError as error:
        if not (axis := _UNBOUND.search(str(error))):
            raise
        where, line = _own_line(error)
        what = f"reduces over an axis {axis[1]!r} that nothing maps: {line or error}"
        detail = "the model is called with the global batch, so its means are over the examples of all devices already"
        problem = Problem(where, what, detail, f"leave out axis_name={axis[1]!r}, as of a BatchNorm")
        raise AnnotationError("The model names an axis of a map that is not there:", [problem]) from error


def _own_line(error: BaseException) -> tuple[str, str | None]:
    """Return the file and number of the innermost line that raised an error, outside of JAX and Flax, and its text."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if not {"jax", "flax", "contextlib.py"} & set(pathlib.PurePath(frame.filename).parts):
            return f"{frame.filename}:{frame.lineno}", frame.line
    return "the module", None


def _check_none(variables: Any) -> None:
    fix = "call model.forward(params, variables, key, *inputs, train=False)"
    if problems := [Problem(path, "is a variable", fix=fix) for path in tree.flatten(variables)]:
        raise ConfigError("This model cannot be applied to parameters alone:", problems)
