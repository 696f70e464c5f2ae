"""Fine-tuning with low-rank adapters (LoRA, Hu et al., arXiv:2106.09685).

Regexes over parameter paths select the parameters that get one.

```python
lora = LoRAConfig(targets=("attention/(q|v)_proj/kernel",), rank=8)
adapted = with_lora(model, lora, rules)      # its parameters are the adapters
table = lora_rules(model, lora, rules)       # the model's own table, with a row for each adapter
```

The model's own parameters become variables of the adapted model, under `base/`: sharded by the same
table, without gradients and optimizer state. `A` is sharded as the rows of its parameter and `B` as
the columns, neither over `fsdp`.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import ConfigError, Problem
from spmd.lora.config import LoRAConfig
from spmd.lora.param import DoRAParam, LoRAParam
from spmd.lora.quantized_base import (
    find_formats,
    quantize_base,
    rules_of_parts,
    start_base,
)
from spmd.lora.targets import Target, find_targets
from spmd.model_interface.kernels import Matrix
from spmd.model_interface.model import LayeredModel, Model, ModelInfo, abstract_key
from spmd.model_interface.wrapped_param import is_stored, is_wrapped
from spmd.plan.fsdp import params_for_forward
from spmd.precision import cast_floats
from spmd.sharding.layer_paths import dims_of
from spmd.sharding.mesh import entry_axes
from spmd.sharding.optimizer_state import drop_gathered
from spmd.sharding.rules import Replicate, Rules, replicate

BASE = "base"
"""The name of the frozen parameters among the variables."""

LORA_A, LORA_B, LORA_M = "_lora_a", "_lora_b", "_lora_m"
"""Endings of the names of adapters; the last is of changes of magnitudes (DoRA)."""
_SMALL = "a low-rank adapter is small"


def with_lora(model: Model, lora: LoRAConfig, rules: Rules, dtype: str = "float32") -> Model:
    """Return the model with adapters as its parameters, and its own parameters as variables.

    `A` is drawn with variance 1 / in and `B` is zero, so the adapted model starts equal to the
    model.

    Args:
        rules: The model's table, which names the stacks.
        dtype: Dtype of the frozen parameters.

    Raises:
        ConfigError: A target matches no parameter, or one with fewer than two dimensions or a lower
            rank; or the model has a variable `base`.
    """
    targets = find_targets(model, lora, rules)
    if BASE in jax.eval_shape(model.init_variables, abstract_key()):
        problem = Problem(BASE, "is a variable of the model itself")
        raise ConfigError("This model cannot be adapted:", [problem])
    init_base = _base_init(model, lora, rules, dtype)

    def init_variables(key: jax.Array) -> Any:
        return {**model.init_variables(key), BASE: init_base(key)}

    def merged(params: Any, variables: Any) -> tuple[Any, Any]:
        own = dict(variables)
        base = start_base(params_for_forward(own.pop(BASE)), model)
        return with_adapters(base, params, lora, model.info().wrappable), own

    def forward(
        params: Any, variables: Any, key: Any, *inputs: Any, train: bool, **keywords: Any
    ) -> tuple[Any, Any]:
        own = merged(params, variables)  # the model's own parameters and variables
        outputs, after = model.forward(*own, key, *inputs, train=train, **keywords)
        return outputs, {**after, BASE: variables[BASE]}

    def part(function: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
        def run(params: Any, variables: Any, *args: Any, **keywords: Any) -> tuple[Any, Any]:
            result, after = function(*merged(params, variables), *args, **keywords)
            return result, {**after, BASE: variables[BASE]}

        return run

    def layered() -> LayeredModel | None:
        parts = model.layered()
        if parts is None:
            return None
        return dataclasses.replace(
            parts,
            embed_inputs=part(parts.embed_inputs),
            apply_layers=part(parts.apply_layers),
            compute_outputs=part(parts.compute_outputs),
        )

    def update_variables(variables: Any, arrays: Mapping[str, jax.Array]) -> Any:
        own = dict(variables)
        base = own.pop(BASE)
        return {**model.update_variables(own, arrays), BASE: base}

    init = functools.partial(_init_adapters, targets=targets, lora=lora)
    base = jax.eval_shape(init_base, abstract_key())
    adapters = list(tree.flatten(jax.eval_shape(init, abstract_key())))
    info = functools.partial(_adapted_info, model, base, adapters, rules)
    name = f"{model.name} with adapters"
    return Model(init, _apply, init_variables, forward, info, layered, name, update_variables)


def _base_init(
    model: Model, lora: LoRAConfig, rules: Rules, dtype: str
) -> Callable[[jax.Array], Any]:
    """Return the initializer of frozen parameters in their stored form."""
    formats = find_formats(model, lora.quantize, rules)

    def init(key: jax.Array) -> Any:
        base = cast_floats(model.init(key), dtype)
        return quantize_base(base, formats, dtype, model)

    return init


def _init_adapters(key: jax.Array, *, targets: Mapping[str, Target], lora: LoRAConfig) -> Any:
    """Draw the adapters of parameters."""
    adapters: dict[str, jax.Array] = {}
    for number, (path, target) in enumerate(targets.items()):
        *stacked, rows, columns = target.shape
        own_key = jax.random.fold_in(key, number)
        draw = jax.random.normal(own_key, (*stacked, rows, target.rank))
        adapters[path + LORA_A] = draw * rows**-0.5
        adapters[path + LORA_B] = jnp.zeros((*stacked, target.rank, columns))
        if lora.dora:
            adapters[path + LORA_M] = jnp.zeros((*stacked, columns))
    return tree.nested(adapters)


def _apply(params: Any, *inputs: Any) -> Any:
    """Raise a `ConfigError`: an adapted model needs its variables."""
    fix = "call model.forward(params, variables, key, *inputs, train=False)"
    problem = Problem(BASE, "has the frozen parameters, and is a variable", fix=fix)
    raise ConfigError("This model cannot be applied to adapters alone:", [problem])


def _adapted_info(model: Model, base: Any, adapters: Sequence[str], rules: Rules) -> ModelInfo:
    """Return the facts about a model with adapters, given its abstract base and their paths."""
    known = model.info()
    tied = list[tuple[str, ...]]()
    for group in known.tied:
        tied.append(tuple(f"{BASE}/{path}" for path in group))
    frozen = {f"{BASE}/{path}": path for path in tree.flatten(base)}
    stored_as = dict[str, str]()
    for path, param in tree.flatten(base, is_leaf=is_stored).items():
        if is_stored(param):
            stored_as[path] = f"{BASE}/{path}/codes"
    adapted = [path.removesuffix(LORA_A) for path in adapters if path.endswith(LORA_A)]
    merged = set[str]()
    for path in adapted:
        if path not in known.wrappable:
            parts = [name for name in frozen if name.startswith(f"{BASE}/{path}/")]
            merged |= {f"{BASE}/{path}", *parts}
    return dataclasses.replace(
        known,
        tied=tuple(tied),
        annotations={},
        frozen=frozen,
        merged=frozenset(merged.intersection(frozen)),
        stored_as=stored_as,
        added=frozenset(),
        cast_by_layer=known.cast_by_layer.union(adapters),
        created={},
        **_adapter_matrices(model, adapted, rules),
    )


def _adapter_matrices(model: Model, adapted: Sequence[str], rules: Rules) -> dict[str, Any]:
    """Return the adapters of matrices between layers, and those of other parameters."""
    known = model.info()
    stacks = rules.with_recorded(known.stacks).stacks
    shapes = tree.flatten(jax.eval_shape(model.init, abstract_key()))
    matrices = dict[str, Matrix]()
    no_matrix = dict[str, str]()
    for path in adapted:
        ndim = len(shapes[path].shape) - len(dims_of(path, stacks))
        for name in (path + LORA_A, path + LORA_B):
            if path in known.no_matrix:
                no_matrix[name] = known.no_matrix[path]
            else:
                matrices[name] = Matrix((ndim - 2,), (ndim - 1,))
    return {"matrices": matrices, "no_matrix": no_matrix}


def with_adapters(base: Any, adapters: Any, lora: LoRAConfig, unmerged: Container[str] = ()) -> Any:
    """Merge parameters `base` with their adapters, the parameters of the model of `with_lora`.

    Those at the paths `unmerged` are returned as `LoRAParam`, for layers that support it. Merged
    ones are decoded if they are quantized.
    """
    flat = tree.flatten(adapters)

    def place(path: str, leaf: Any) -> Any:
        if path + LORA_A not in flat:
            return leaf
        a, b = flat[path + LORA_A], flat[path + LORA_B]
        scale = lora.scale_of(a.shape[-1])
        param = LoRAParam(leaf, a, b, scale)
        if lora.dora:
            param = DoRAParam(leaf, a, b, scale, flat[path + LORA_M])
        if path in unmerged:
            return param
        return param.merged()

    return tree.map_with_path(place, base, is_leaf=is_wrapped)


def whole_magnitudes(adapters: Any, base: Any) -> Any:
    """Return adapters with the magnitudes of outputs in place of their changes, for `peft`."""
    frozen = tree.flatten(base)

    def place(path: str, adapter: jax.Array) -> jax.Array:
        if not path.endswith(LORA_M):
            return adapter
        weights = frozen[path.removesuffix(LORA_M)].astype(jnp.float32)
        return adapter + jnp.linalg.norm(weights, axis=-2)

    return tree.map_with_path(place, adapters)


def lora_rules(model: Model, lora: LoRAConfig, rules: Rules) -> Rules:
    """Return the rule table of a model without adapters, with rows for its adapters."""
    rules = rules.with_recorded(model.info().stacks)
    rows = dict[str, P | Replicate]()
    for path, target in find_targets(model, lora, rules).items():
        name, leading = rules.layer_path(path)
        match = rules.match(path)
        if match is None:
            continue  # the plan reports it
        spec = P()
        if not isinstance(match.requested, Replicate):
            spec = drop_gathered(match.requested)
        unsplit = len(target.shape) - len(leading) - len(spec)
        entries = (*spec, *(None,) * unsplit)
        rows[re.escape(name) + LORA_A] = _split(*entries[:-1], None)
        rows[re.escape(name) + LORA_B] = _split(*entries[:-2], None, entries[-1])
        if lora.dora:
            rows[re.escape(name) + LORA_M] = _split(*entries[:-2], entries[-1])
    table = _rules_of_base(model, lora, rules)
    return dataclasses.replace(table, params=(*rows.items(), *table.params))


def _rules_of_base(model: Model, lora: LoRAConfig, rules: Rules) -> Rules:
    """Return the rule table for the frozen parameters as they are stored."""
    if not lora.quantize:
        return rules
    base = jax.eval_shape(_base_init(model, lora, rules, "float32"), abstract_key())
    return rules_of_parts(base, rules)


def _split(*entries: Any) -> P | Replicate:
    """Return the spec of an adapter."""
    if any(entry_axes(entry) for entry in entries):
        return P(*entries)
    return replicate(_SMALL)
