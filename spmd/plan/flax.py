"""NNX and Linen modules as pure functions.

```python
model = from_nnx(lambda rngs: Llama(config, rngs=rngs))
params = model.init(key)               # a nested dictionary: {"layers": {"attention": {"q_proj": {"kernel": …
logits = model.apply(params, tokens)
```
"""

import contextlib
import functools
import inspect
import pathlib
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from spmd import tree
from spmd.errors import AnnotationError, ConfigError, Problem, check_call, check_type, did_you_mean, shown
from spmd.model_api.model import PRNG, VALID, LayeredModel, Model, ModelInfo, takes_valid
from spmd.plan.nnx_state import ModuleStructure, join, register_arrays, to_dict, trace_structure, with_values
from spmd.sharding.flax_metadata import PARAMS_AXES, linen_annotations, nnx_annotations

_NO_MODEL = "This is no model:"
_PARTS = ("embed_inputs", "apply_layers", "compute_outputs")


_MODES = ("deterministic", "use_running_average")
"""The attributes that `train()` of an NNX module sets to False."""

_NO_MESH = ("non-empty mesh in context", "not under a mesh context", "axis names that are of type Auto")
"""Words of JAX's errors about a `PartitionSpec` that it has no mesh for."""

_UNBOUND = re.compile(r"unbound axis name:? (\w+)")


def from_nnx(
    make: Callable[[nnx.Rngs], nnx.Module],
    *,
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

    Args:
        make: Builds the module: `lambda rngs: Llama(config, rngs=rngs)`. It is called under tracing, so the arrays are
            created only as the plan shards them.
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
    fix = "spmd.from_nnx(lambda rngs: Module(…, rngs=rngs)), or spmd.from_linen(module, *inputs)"
    is_module = isinstance(make, nnx.Module | nn.Module)
    if problems := check_type("make", make, (), fix) if is_module else check_call("make", make, "rngs", fix):
        raise ConfigError(_NO_MODEL, problems)

    def build(key: jax.Array) -> tuple[nnx.Module, dict[str, jax.Array]]:
        with _no_shardings_inside(), nnx.use_eager_sharding(False):  # the plan shards arrays, not the module
            module = make(nnx.Rngs(key))
        if problems := check_type("what make returns", module, nnx.Module, fix):
            raise ConfigError(_NO_MODEL, problems)
        return module, register_arrays(module)

    @functools.cache
    def structure() -> ModuleStructure:
        return trace_structure(build, jax.random.key(0, impl=PRNG))

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
        module = nnx.merge(
            known.graph, with_values(known.params, params), with_values(known.others, variables), copy=True
        )
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
        module, keywords = restore(params, variables, train), {**(training if train else evaluation), **keywords}
        method = keywords.pop("method", "__call__")
        run = _check_call(module, method, inputs, keywords)
        with _no_shardings_inside():
            outputs = run(module, *inputs, **keywords)
        after = tree.flatten(to_dict(nnx.state(module, nnx.Not(nnx.Param))))
        return outputs, tree.map_with_path(lambda path, _: _as_data(after[path]), variables)

    def apply(params: Any, *inputs: Any, **keywords: Any) -> Any:
        _check_none(structure().variables)
        return forward(params, {}, None, *inputs, train=False, **keywords)[0]

    def info() -> ModelInfo:
        module, known = abstract_module(), structure()
        shared = [[join(path) for path in group] for group in nnx.find_duplicates(module)]
        aliases = (_aliases(join(path), shared) for path, _ in nnx.to_flat_state(known.params))
        random_state = (join(path) for path, v in nnx.to_flat_state(known.others) if isinstance(v, nnx.RngState))
        position_aware = getattr(module, "position_aware", False)
        return ModelInfo(
            tied=tuple(filter(None, aliases)),
            random_state=frozenset(random_state),
            constants=known.constants,
            annotations=nnx_annotations(known.params),
            lora_kernels=marked("supports_lora"),
            gathered_by_layer=marked("gathered_by_layer"),
            sent_exactly=marked("sent_exactly"),
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

        return LayeredModel(embed, apply_layers, compute_outputs)

    return Model(init, apply, init_variables, forward, info, layered)


def from_linen(
    module: nn.Module,
    *inputs: Any,
    rngs: tuple[str, ...] = ("dropout",),
    train: Mapping[str, Any] | None = None,
    evaluate: Mapping[str, Any] | None = None,
) -> Model:
    """Return the functions of a Linen module.

    The `params` collection is the parameters; every other collection at initialization (`batch_stats`) is among the
    model's variables, under its name.

    Args:
        *inputs: The module's inputs, as arrays or `jax.ShapeDtypeStruct`s; only shapes are used.
        rngs: Names of the random streams in training.
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
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
    training, evaluation = dict(train or {}), dict(evaluate or {})

    def create(key: jax.Array) -> dict[str, Any]:
        keywords = dict(evaluation)
        method = keywords.pop("method", "__call__")
        run = _check_call(module, method, shapes, keywords)
        with _no_shardings_inside():
            return dict(module.lazy_init(key, *shapes, method=run, **keywords))

    def init(key: jax.Array) -> Any:
        return jax.tree.map(_as_array, nn.meta.unbox(create(key).get("params", {})))

    def init_variables(key: jax.Array) -> Any:
        others = {name: part for name, part in create(key).items() if name not in ("params", PARAMS_AXES)}
        return jax.tree.map(_as_array, nn.meta.unbox(others))

    def call(everything: Any, inputs: Any, keywords: Any, **options: Any) -> Any:
        keywords = dict(keywords)
        method = keywords.pop("method", "__call__")
        run = _check_call(module, method, inputs, keywords)
        with _no_shardings_inside():
            return module.apply(everything, *inputs, method=run, **options, **keywords)

    def forward(params: Any, variables: Any, key: Any, *inputs: Any, train: bool, **keywords: Any) -> tuple[Any, Any]:
        everything = {"params": params, **variables}
        if not train:
            return call(everything, inputs, {**evaluation, **keywords}), variables
        keys = {name: jax.random.fold_in(key, number) for number, name in enumerate(rngs)}
        outputs, after = call(everything, inputs, {**training, **keywords}, rngs=keys, mutable=list(variables))
        return outputs, {**variables, **after}

    def apply(params: Any, *inputs: Any, **keywords: Any) -> Any:
        _check_none({name: part for name, part in abstract().items() if name not in ("params", PARAMS_AXES)})
        return call({"params": params}, inputs, {**evaluation, **keywords})

    @functools.cache
    def abstract() -> dict[str, Any]:
        return jax.eval_shape(lambda: create(jax.random.key(0, impl=PRNG)))

    def info() -> ModelInfo:
        collections = abstract()
        return ModelInfo(
            annotations=linen_annotations(collections.get("params", {}), collections.get(PARAMS_AXES)),
            padding_aware=takes_valid(_called(module, training)),
        )

    return Model(init, apply, init_variables, forward, info)


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
    """Replace JAX's error where a module names a sharding by itself."""
    try:
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
