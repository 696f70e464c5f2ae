"""A model as pure functions, the only form used by the rest of the framework.

`spmd.plan.nnx_model` and `spmd.plan.linen_model` make one from any module of Flax. Hand-written
functions work too: `Model(init, apply)`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax

from spmd.errors import ConfigError, check_call
from spmd.model_interface.compute_dtype import InComputeDtype
from spmd.model_interface.kernels import Matrix
from spmd.sharding.layer_paths import Stack

PRNG = "threefry2x32"
"""The PRNG implementation of every key, independent of JAX's default, so that a seed gives the same
numbers everywhere."""


def abstract_key() -> jax.ShapeDtypeStruct:
    """Return the shape of a random key, to trace with; no device is needed."""
    return jax.eval_shape(lambda: jax.random.key(0, impl=PRNG))


VALID = "valid"
"""Name of the mask of tokens besides padding, in a batch and as an argument of a model."""


def takes_valid(function: Any) -> bool:
    """Return whether a function has a parameter `valid`."""
    try:
        return VALID in inspect.signature(function).parameters
    except (TypeError, ValueError):  # no function, or one without a signature
        return False


@runtime_checkable
class PositionAware(Protocol):
    """Declaration of a module about the order of its tokens (`ModelInfo.position_aware`)."""

    @property
    def position_aware(self) -> bool:
        """Whether it asks for the positions of its tokens."""


@runtime_checkable
class SupportsKVCache(Protocol):
    """Declaration of a module about decoding token by token (`ModelInfo.supports_kv_cache`)."""

    @property
    def supports_kv_cache(self) -> bool:
        """Whether tokens interact only through mixers with a cache (`spmd.layers.kv_cache`)."""


@runtime_checkable
class PaddingAware(Protocol):
    """Declaration of a module about padding (`ModelInfo.padding_aware`)."""

    @property
    def padding_aware(self) -> bool:
        """Whether the mask of tokens changes its results."""


def is_padding_aware(module: Any, called: Any) -> bool:
    """Return whether a module needs the mask of its tokens; by default if its call takes it.

    `called` is the function of its call.
    """
    if isinstance(module, PaddingAware):
        return module.padding_aware
    return takes_valid(called)


def is_position_aware(module: Any) -> bool:
    """Return whether a module is position-aware; not so by default."""
    return isinstance(module, PositionAware) and module.position_aware


def supports_kv_cache(module: Any) -> bool:
    """Return whether a module supports a KV cache; by default if it is position-aware."""
    if isinstance(module, SupportsKVCache):
        return module.supports_kv_cache
    return is_position_aware(module)


@runtime_checkable
class UpdatesOnceAStep(Protocol):
    """An NNX module with variables that change once a step, by arrays of its outputs.

    The forward pass only reads them. So they change alike with microbatches, one after the other or
    in a pipeline.
    """

    @property
    def step_variables(self) -> tuple[Any, ...]:
        """Types of these variables."""

    def update_variables(self, arrays: Mapping[str, jax.Array]) -> None:
        """Change them.

        Args:
            arrays: `Outputs.arrays`, as means over the microbatches of a step.
        """


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """Properties of a module's arrays besides their shapes.

    Attributes:
        tied: Groups of paths of one array; the first path is the parameter's name.
        random_state: Paths of random keys and draw counters.
        annotations: Parameter path → the dimension names in its metadata, for
            `rules_from_annotations`.
        constants: Paths of arrays that a module keeps beside its variables, such as tables and
            masks. They are variables that are replicated unless a rule matches.
        replicated: Path of another variable without a rule → the reason why it is replicated.
        placed: Path of a variable without a rule → its spec.
        wrappable: Paths of kernels that may be a `spmd.model_interface.wrapped_param.WrappedParam`:
            their layers use its `operand` and `completed`.
        takes_codes: Paths of kernels that may be a `spmd.model_interface.wrapped_param.StoredParam`:
            their layers gather its arrays, and decode them for each pass.
        gathered_by_layer: Paths of parameters that their layer gathers, and whose gradients it
            reduces.
        sent_exactly: Paths of parameters that are never sent as codes: lookups and routers.
        cast_by_layer: Paths of parameters that their layer casts to the dtype that it computes in.
        linear: Paths of kernels whose matmuls may have a recipe (`spmd.settings.quantize`).
        frozen: Path of a variable that never changes → the path of the module's parameter in it.
        merged: Paths in `frozen` that reach the module merged with an adapter. The others are used
            unchanged: in stacked layers they may be in host memory, and a pipeline may split them,
            like parameters.
        stored_as: Path of a frozen parameter in the module → the path in `frozen` of its codes, if it
            is stored in another form (`spmd.model_interface.wrapped_param.StoredParam`).
        position_aware: Whether the model reads the positions of its tokens
            (`spmd.layers.zigzag`), so that their order may change.
        matrices: Path of a kernel → its inputs and outputs, where its layer declares them.
        no_matrix: Path of a parameter that is no matrix between layers → the reason, such as a
            lookup.
        added: Paths of parameters that their layers add to a product or multiply by: biases, scales
            of norms.
        decodes_layers: Whether stacked layers may be codes: each is decoded where it is used.
        stacks: The stacks of layers, recorded where parameters are created; None where nothing was
            recorded.
        created: Path of a parameter stored with more dimensions than it was created with → its
            number of dimensions at creation.
        supports_kv_cache: Whether tokens interact only through `spmd.layers.attention.attend` or
            other mixers with a cache, so that `spmd.layers.kv_cache` can decode token by token.
        step_variables: Paths of variables that change once a step (`Model.update_variables`).
        rates: Path of a parameter → the factor of its learning rate (`spmd.optim.mup`).
        padding_aware: Whether the model takes the keyword `valid`, the mask of tokens besides
            padding, `[batch, sequence]`: for losses or statistics over tokens, or tokens that
            compete for the capacity of experts.
    """

    tied: tuple[tuple[str, ...], ...] = ()
    random_state: frozenset[str] = frozenset()
    annotations: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    constants: frozenset[str] = frozenset()
    replicated: Mapping[str, str] = dataclasses.field(default_factory=dict)
    placed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    wrappable: frozenset[str] = frozenset()
    takes_codes: frozenset[str] = frozenset()
    gathered_by_layer: frozenset[str] = frozenset()
    sent_exactly: frozenset[str] = frozenset()
    cast_by_layer: frozenset[str] = frozenset()
    linear: frozenset[str] = frozenset()
    frozen: Mapping[str, str] = dataclasses.field(default_factory=dict)
    merged: frozenset[str] = frozenset()
    stored_as: Mapping[str, str] = dataclasses.field(default_factory=dict)
    matrices: Mapping[str, Matrix] = dataclasses.field(default_factory=dict)
    no_matrix: Mapping[str, str] = dataclasses.field(default_factory=dict)
    added: frozenset[str] = frozenset()
    decodes_layers: bool = False
    stacks: Mapping[str, Stack] | None = None
    created: Mapping[str, int] = dataclasses.field(default_factory=dict)
    position_aware: bool = False
    supports_kv_cache: bool = False
    padding_aware: bool = False
    step_variables: frozenset[str] = frozenset()
    rates: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def frozen_params(self) -> frozenset[str]:
        """Paths of the module's frozen parameters, in any form."""
        plain = {name for path, name in self.frozen.items() if not self.is_stored_part(path)}
        return frozenset(plain.union(self.stored_as))

    @property
    def stored_nodes(self) -> dict[str, str]:
        """Path of a parameter in another form in the module → its node among the variables."""
        nodes = {}
        for path, codes in self.stored_as.items():
            nodes[path] = codes.rpartition("/")[0]
        return nodes

    def is_gathered_as_codes(self, path: str) -> bool:
        """Return whether a layer gathers the codes of a parameter in another form.

        It does not where adapters are added to the parameter before its layer.
        """
        return path in self.takes_codes and self.stored_as[path] not in self.merged

    def is_stored_part(self, path: str) -> bool:
        """Return whether a frozen variable is an array of a parameter in another form."""
        return path.rpartition("/")[0] in self.stored_nodes.values()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outputs:
    """Logits of a model, with losses, metrics and arrays.

    Losses and metrics are finite float32 scalars of the whole (micro)batch, without padding (by the
    mask `valid`). Each is reported under its name, as a mean over microbatches
    weighted by their tokens; arrays are reported together as `"arrays"`.

    Attributes:
        logits: `[batch, sequence, vocab]`, or `spmd.layers.lm_head.LazyLogits`.
        losses: Name → an auxiliary loss, already weighted, which training adds to the mean loss of
            a token.
        metrics: Name → any other value.
        arrays: Name → values that belong together, such as one for each layer and expert.
        intermediates: Name → any other value, for a loss of one's own; it is not reported.
        ahead: Logits of tokens further ahead than the next one, of the second, the third, and so on
            (multi-token prediction).
        ahead_weight: Weight of the mean of their losses, in training.
        of_all_devices: Whether losses, metrics and arrays are of the whole (micro)batch also where
            each device runs the model on its own examples (`spmd.plan.manual.batch_sum`), as
            `spmd.defer_grad_reduction` and pipelines over it do.
    """

    logits: Any
    losses: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    arrays: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    intermediates: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    ahead: tuple[Any, ...] = ()
    ahead_weight: float = dataclasses.field(default=0.0, metadata={"static": True})
    of_all_devices: bool = dataclasses.field(default=False, metadata={"static": True})


def as_outputs(returned: Any) -> Outputs:
    """Return the result of a model, `Outputs` or logits alone, as `Outputs`."""
    if isinstance(returned, Outputs):
        return returned
    return Outputs(returned)


NO_PIPELINE = "This model cannot be pipelined:"
"""Title of errors about a model in parts."""


@runtime_checkable
class LayeredModule(Protocol):
    """A Flax module with the three methods of a `LayeredModel`, each without its arrays."""

    def embed_inputs(self, *inputs: Any) -> tuple[jax.Array, Any]:
        """Return the input of the first layer, and other inputs of every layer."""

    def apply_layers(self, x: jax.Array, context: Any) -> tuple[jax.Array, Any]:
        """Run the layers."""

    def compute_outputs(self, x: jax.Array, values: Any) -> Any:
        """Return the outputs."""


@dataclasses.dataclass(frozen=True)
class LayeredModel:
    """A forward pass in three parts, so that each stage of a pipeline can have some layers.

    The outputs are `compute_outputs(…, *apply_layers(…, *embed_inputs(…, key, *inputs)))`. Each part
    takes `(params, variables, …, train=…)`, and returns its result and the variables after it,
    which the next part takes. Layers of another kind, such as dense first layers, are part of
    `embed_inputs`, which also takes `valid=` if the model is `padding_aware`.

    Attributes:
        embed_inputs: `(key, *inputs)` → `(x, context)`: the input of the first layer, and other
            inputs of every layer.
        apply_layers: `(x, context)` → `(x, values)`: runs the layers in `params`, of which a stage
            has some; `values` are other outputs of the layers, stacked, or None. It changes no
            variables but those of the layers.
        compute_outputs: `(x, values)` → the outputs, with `values` of all layers.
        outputs_take_context: Whether `compute_outputs` takes the context, too, after the values:
            for layers after those that are split into stages. A module declares it by an attribute
            of this name.
    """

    embed_inputs: Callable[..., tuple[tuple[jax.Array, Any], Any]]
    apply_layers: Callable[..., tuple[tuple[jax.Array, Any], Any]]
    compute_outputs: Callable[..., tuple[Any, Any]]
    outputs_take_context: bool = False


def _unchanged(variables: Any, arrays: Mapping[str, jax.Array]) -> Any:
    """Return the variables of a model without `ModelInfo.step_variables`."""
    del arrays
    return variables


@dataclasses.dataclass(frozen=True)
class Model:
    """A model as pure functions of its parameters and variables.

    Parameters are what the optimizer updates. Variables are other state that the model updates
    itself between steps: batch statistics, the state of dropout's random generator. Most models
    have none.

    Under a plan `apply` and `forward` cast float parameters and inputs to its compute dtype, and
    outputs to float32 (`spmd.model_interface.compute_dtype`).

    Attributes:
        init: Key → parameters, a nested dictionary of arrays.
        apply: `(params, *inputs)` → outputs, for a model without variables. Keyword arguments are
            passed on.
        init_variables: Key → variables, a nested dictionary.
        forward: `(params, variables, key, *inputs, train)` → `(outputs, updated variables)`; by
            default `apply`. In evaluation (`train=False`) there is no dropout, statistics are not
            updated, and the key may be None. It takes `valid=`, too, if `info()` says
            `padding_aware`.
        info: Returns the `ModelInfo`; by default of functions, `padding_aware` if they have a
            parameter `valid`.
        layered: The forward pass in parts, for a pipeline.
        name: Name of the module, for `repr`; by default, that of `apply`.
        update_variables: `(variables, arrays)` → the variables after a step, given the mean
            `Outputs.arrays` of its microbatches: for `ModelInfo.step_variables`.

    Example:
        >>> model = Model(lambda key: {"w": jax.numpy.ones(3)}, lambda params, x: params["w"] * x)
        >>> outputs, variables = model.forward({"w": 2.0}, {}, None, 3.0, train=True)
        >>> outputs, variables
        (6.0, {})
    """

    init: Callable[[jax.Array], Any]
    apply: Callable[..., Any]
    init_variables: Callable[[jax.Array], Any] = lambda key: {}
    forward: Callable[..., tuple[Any, Any]] = dataclasses.field(  # type: ignore[assignment]
        default=None, compare=False
    )
    info: Callable[[], ModelInfo] = dataclasses.field(default=None)  # type: ignore[assignment]
    layered: Callable[[], LayeredModel | None] = lambda: None
    name: str = dataclasses.field(default="", compare=False)
    update_variables: Callable[[Any, Mapping[str, jax.Array]], Any] = _unchanged

    def __repr__(self) -> str:
        return f"Model({self.name})"

    def __post_init__(self) -> None:
        problems = check_call("init", self.init, "key")
        if problems:
            raise ConfigError("Invalid model:", problems)
        apply = self.apply
        forward = self.forward
        if self.info is None:
            function = apply if forward is None else forward
            object.__setattr__(self, "info", _info_of_function(function))
        if not self.name:
            object.__setattr__(self, "name", name_of_callable(apply))
        if not isinstance(apply, InComputeDtype):
            apply = InComputeDtype(apply, self.info, inputs_from=0)
        if forward is None:
            forward = _without_variables(apply)
        elif not isinstance(forward, InComputeDtype):
            forward = InComputeDtype(forward, self.info, inputs_from=2, has_variables=True)
        object.__setattr__(self, "apply", apply)
        object.__setattr__(self, "forward", forward)


def name_of_callable(function: Any) -> str:
    """Return the name of a function or class, the line of a lambda, or the type of another callable.

    Example:
        >>> name_of_callable(functools.partial(jax.numpy.zeros, 3))
        'zeros'
    """
    if isinstance(function, functools.partial):
        return name_of_callable(function.func)
    if isinstance(function, InComputeDtype):
        return name_of_callable(function.function)
    function = inspect.unwrap(function)  # a function of `jax.jit` or `jax.vmap`
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(function, "__code__", None)
    if code is None or not name.endswith("<lambda>"):
        return name
    file = code.co_filename.replace("\\", "/").rpartition("/")[2]
    return f"lambda of {file}:{code.co_firstlineno}"


def _info_of_function(function: Any) -> Callable[[], ModelInfo]:
    """Return the default of `Model.info`, for the forward pass of a model."""
    if takes_valid(function):
        return functools.partial(ModelInfo, padding_aware=True)
    return ModelInfo


def _without_variables(apply: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """Return the forward pass of a model without variables."""

    def forward(
        params: Any, variables: Any, key: Any, *inputs: Any, train: bool, **keywords: Any
    ) -> tuple[Any, Any]:
        del key, train
        return apply(params, *inputs, **keywords), variables

    return forward
