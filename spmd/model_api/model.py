"""A model as pure functions, which is all that the rest of this framework knows of it.

`spmd.plan.flax` makes one from any NNX or Linen module. Hand-written functions do as well: `Model(init, apply)`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

PRNG = "threefry2x32"
"""The generator of every key, whatever JAX's default is, so that a seed means the same everywhere."""


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """What a module's source says of its arrays, besides their shapes.

    Attributes:
        tied: Groups of paths that are one array; the first is the one that the parameters go by.
        random_state: Paths of variables that are random keys or counters of draws: the same on every device.
        annotations: Parameter path → the names that its metadata give to its dimensions, for
            `rules_from_annotations`.
        replicated: Path of any other variable that no rule is asked for → why it is whole on every device.
        placed: Path of any variable that no rule is asked for → its spec.
        lora_kernels: Paths of kernels that may be `spmd.plan.lora_layer.LoRAParam`, because the module
            multiplies with them by it.
        frozen: Path of a variable that never changes → the path of the module's parameter that it holds.
        merged: Those of `frozen` that reach the module merged with an adapter. The others are used as they are: in
            stacked layers they may live in host memory, and a pipeline may split them, as parameters.
        position_aware: Whether the model asks for the positions of its tokens (`spmd.layers.zigzag`), so that they
            may come in another order.
        supports_kv_cache: Whether tokens see each other by `spmd.layers.attention.attend` alone, so that they may come
            one at a time where keys and values are kept (`spmd.layers.kv_cache`).
    """

    tied: tuple[tuple[str, ...], ...] = ()
    random_state: frozenset[str] = frozenset()
    annotations: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    replicated: Mapping[str, str] = dataclasses.field(default_factory=dict)
    placed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lora_kernels: frozenset[str] = frozenset()
    frozen: Mapping[str, str] = dataclasses.field(default_factory=dict)
    merged: frozenset[str] = frozenset()
    position_aware: bool = False
    supports_kv_cache: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outputs:
    """What a model returns that has more to say than its logits.

    Values are float32 scalars of the whole (micro)batch, padding included. Each is reported as a metric by its name, as
    a mean over microbatches that is weighted by their tokens.

    Attributes:
        logits: `[batch, sequence, vocab]`, or a head that is not multiplied out (`spmd.layers.lm_head`).
        losses: Name → an auxiliary loss, with its weight, which training adds to the mean loss of a token.
        metrics: Name → anything else.
    """

    logits: Any
    losses: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)


def as_outputs(returned: Any) -> Outputs:
    """What a model returned, whether that is `Outputs` or logits alone.

    Example:
        >>> as_outputs(jax.numpy.ones(3)).logits.shape
        (3,)
    """
    return returned if isinstance(returned, Outputs) else Outputs(returned)


@dataclasses.dataclass(frozen=True)
class LayeredModel:
    """A forward pass in three parts, so that a pipeline can give each stage some of the stacked layers.

    The outputs are `compute_outputs(…, *apply_layers(…, *embed_inputs(…, key, *inputs)))`; each part takes
    `(params, variables, …, train=…)`. Layers of another kind, such as dense first layers, are a part of `embed_inputs`.

    Attributes:
        embed_inputs: `(key, *inputs)` → `(x, context)`: the stream that enters the first layer, and what every layer
            takes besides.
        apply_layers: `(x, context)` → `(x, values)`: runs the layers in `params`, of which a stage has some; `values`
            are what layers return besides, stacked, or None.
        compute_outputs: `(x, values)` → the outputs, with `values` of all layers.
    """

    embed_inputs: Callable[..., tuple[jax.Array, Any]]
    apply_layers: Callable[..., tuple[jax.Array, Any]]
    compute_outputs: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model as pure functions of its parameters and variables.

    Parameters are what an optimizer changes. Variables are what else the model keeps from one step to the next and
    changes by itself: batch statistics, the state of dropout's random generator. Most models have none.

    Attributes:
        init: A key → the parameters, a nested dictionary of arrays.
        apply: `(params, *inputs)` → the outputs, of a model without variables.
        init_variables: A key → the variables, a nested dictionary; empty by default.
        forward: `(params, variables, key, *inputs, train)` → `(outputs, variables afterwards)`; by default `apply`,
            which leaves the variables as they are. In evaluation (`train=False`) nothing is dropped, statistics are
            used and not updated, and the key may be None.
        info: What the module's source says besides; nothing by default.
        layered: The forward pass in parts, for a pipeline; it returns None by default.

    Example:
        >>> model = Model(lambda key: {"w": jax.numpy.ones(3)}, lambda params, x: params["w"] * x)
        >>> outputs, variables = model.forward({"w": 2.0}, {}, None, 3.0, train=True)
        >>> outputs, variables
        (6.0, {})
    """

    init: Callable[[jax.Array], Any]
    apply: Callable[..., Any]
    init_variables: Callable[[jax.Array], Any] = lambda key: {}
    forward: Callable[..., tuple[Any, Any]] = dataclasses.field(default=None, compare=False)  # type: ignore[assignment]
    info: Callable[[], ModelInfo] = ModelInfo
    layered: Callable[[], LayeredModel | None] = lambda: None

    def __post_init__(self) -> None:
        if self.forward is None:

            def forward(params: Any, variables: Any, key: Any, *inputs: Any, train: bool) -> tuple[Any, Any]:
                del key, train
                return self.apply(params, *inputs), variables

            object.__setattr__(self, "forward", forward)
