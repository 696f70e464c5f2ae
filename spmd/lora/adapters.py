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
from spmd.errors import ConfigError, Problem, check_fields, did_you_mean
from spmd.lora.param import LoRAParam
from spmd.lora.quantized_base import (
    find_formats,
    quantize_base,
    rules_of_parts,
    start_base,
    table_problems,
)
from spmd.model_interface.kernels import Matrix
from spmd.model_interface.model import LayeredModel, Model, ModelInfo, abstract_key
from spmd.model_interface.wrapped_param import is_stored, is_wrapped
from spmd.plan.fsdp import params_for_forward
from spmd.precision import cast_floats
from spmd.sharding.layer_paths import dims_of
from spmd.sharding.mesh import entry_axes
from spmd.sharding.optimizer_state import drop_gathered
from spmd.sharding.patterns import PatternError, compile_pattern
from spmd.sharding.rules import Replicate, Rules, first_path, matches, replicate

BASE = "base"
"""The name of the frozen parameters among the variables."""

LORA_A, LORA_B = "_lora_a", "_lora_b"
"""Endings of the names of adapters."""
_SMALL = "a low-rank adapter is small"
_TITLE = "Invalid adapters:"


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters of frozen parameters."""

    targets: tuple[str, ...] = ()
    """Parameters with an adapter: patterns as in a rule table. If empty, all are trained."""
    rank: int = 8
    """Columns of A and rows of B."""
    alpha: float = 16.0
    """The product of A and B is multiplied by alpha / rank."""
    save_base: bool = False
    """Checkpoints have the frozen parameters of init, too: the run no longer needs that folder."""
    quantize: str = ""
    """Store frozen kernels in fewer bits (QLoRA): nf4, mxfp4 or int8, or PATTERN=FORMAT,… with bf16
    for those left as they are. Embeddings, logits and norms are never quantized."""

    def __post_init__(self) -> None:
        problems = check_fields(self, {"rank": "at least 1", "alpha": "finite"}, "lora.")
        problems += table_problems(self.quantize)
        settings = (self.rank, self.alpha, self.save_base, self.quantize)
        if not self.targets and settings != (LoRAConfig.rank, LoRAConfig.alpha, False, ""):
            what = "is empty, so no parameter has an adapter"
            fix = "patterns over parameter paths, such as 'attention/(q|v)_proj/kernel'"
            problems.append(Problem("lora.targets", what, fix=fix))
        if not self.alpha:
            problems.append(Problem("lora.alpha", "is 0", fix="another number, such as 16"))
        for index, pattern in enumerate(self.targets):
            try:
                compile_pattern(pattern)
            except PatternError as error:
                what = f"{pattern!r} is not a regular expression: {error}"
                problems.append(Problem(f"lora.targets[{index}]", what))
        if problems:
            raise ConfigError(_TITLE, problems)

    @property
    def scale(self) -> float:
        """Factor of the product of A and B."""
        return self.alpha / self.rank


def adapted_paths(model: Model, lora: LoRAConfig, rules: Rules) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters with an adapter, by path."""
    shapes = dict[str, tuple[int, ...]]()
    for path, leaf in tree.flatten(_abstract(model)).items():
        shapes[path] = tuple(leaf.shape)
    found = dict[str, tuple[int, ...]]()
    problems = list[Problem]()
    rules = rules.with_recorded(model.info().stacks)
    for index, pattern in enumerate(lora.targets):
        where = f"lora.targets[{index}]"
        targets = [path for path in shapes if matches(pattern, path, rules.stacks)]
        if not targets:
            names = [rules.layer_path(path)[0] for path in shapes]
            fix = first_path(pattern, model.info().tied, rules.stacks)
            fix = fix or did_you_mean(pattern, names)
            problems.append(Problem(where, f"{pattern!r} matches no parameter", fix=fix))
        for path in targets:
            shape = shapes[path]
            stacked = dims_of(path, rules.stacks)
            problems += _target_problems(where, path, shape, stacked, lora.rank)
            found[path] = shape
    if problems:
        raise ConfigError(_TITLE, problems)
    return found


def _target_problems(
    where: str, path: str, shape: tuple[int, ...], stacked: Sequence[int], rank: int
) -> list[Problem]:
    """Return a problem if a parameter cannot have an adapter."""
    if list(stacked) != list(range(len(stacked))):
        what = f"matches {path}, which is stacked along dimension {stacked[0]}"
        return [Problem(where, what, f"{shape}", "stack along dimension 0 for adapters")]
    if len(shape) - len(stacked) < 2:
        what = f"matches {path}, which is not a matrix"
        return [Problem(where, what, f"{shape}", "name kernels only")]
    least = min(shape[-2:])
    if rank > least:
        what = f"is above the rank of {path}"
        return [Problem("lora.rank", what, f"{rank} > {least} of {shape}", f"at most {least}")]
    return []


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
    paths = adapted_paths(model, lora, rules)
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

    def part(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(params: Any, variables: Any, *args: Any, **keywords: Any) -> Any:
            return function(*merged(params, variables), *args, **keywords)

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

    init = functools.partial(_init_adapters, paths=paths, rank=lora.rank)
    base = jax.eval_shape(init_base, abstract_key())
    info = functools.partial(_adapted_info, model, base, paths, rules)
    name = f"{model.name} with adapters"
    return Model(init, _apply, init_variables, forward, info, layered, name, update_variables)


def _base_init(
    model: Model, lora: LoRAConfig, rules: Rules, dtype: str
) -> Callable[[jax.Array], Any]:
    """Return the function that draws frozen parameters, as they are stored."""
    formats = find_formats(model, lora.quantize, rules)

    def init(key: jax.Array) -> Any:
        base = cast_floats(model.init(key), dtype)
        return quantize_base(base, formats, dtype, model)

    return init


def _init_adapters(key: jax.Array, *, paths: Mapping[str, tuple[int, ...]], rank: int) -> Any:
    """Draw the adapters of parameters, given their shapes by path."""
    adapters: dict[str, jax.Array] = {}
    for number, (path, shape) in enumerate(paths.items()):
        *stacked, rows, columns = shape
        own_key = jax.random.fold_in(key, number)
        draw = jax.random.normal(own_key, (*stacked, rows, rank))
        adapters[path + LORA_A] = draw * rows**-0.5
        adapters[path + LORA_B] = jnp.zeros((*stacked, rank, columns))
    return tree.nested(adapters)


def _apply(params: Any, *inputs: Any) -> Any:
    """Raise a `ConfigError`: an adapted model needs its variables."""
    fix = "call model.forward(params, variables, key, *inputs, train=False)"
    problem = Problem(BASE, "has the frozen parameters, and is a variable", fix=fix)
    raise ConfigError("This model cannot be applied to adapters alone:", [problem])


def _adapted_info(
    model: Model, base: Any, paths: Mapping[str, tuple[int, ...]], rules: Rules
) -> ModelInfo:
    """Return the facts about a model with adapters at some paths, and its abstract frozen base."""
    known = model.info()
    tied = list[tuple[str, ...]]()
    for group in known.tied:
        tied.append(tuple(f"{BASE}/{path}" for path in group))
    frozen = {f"{BASE}/{path}": path for path in tree.flatten(base)}
    stored_as = dict[str, str]()
    for path, param in tree.flatten(base, is_leaf=is_stored).items():
        if is_stored(param):
            stored_as[path] = f"{BASE}/{path}/codes"
    merged = set[str]()
    for path in paths:
        if path not in known.wrappable:
            merged.add(f"{BASE}/{path}")
    adapters = set[str]()
    for path in paths:
        adapters |= {path + LORA_A, path + LORA_B}
    return dataclasses.replace(
        known,
        tied=tuple(tied),
        annotations={},
        frozen=frozen,
        merged=frozenset(merged),
        stored_as=stored_as,
        added=frozenset(),
        cast_by_layer=known.cast_by_layer | adapters,
        created={},
        **_adapter_matrices(known, paths, rules),
    )


def _adapter_matrices(
    known: ModelInfo, paths: Mapping[str, tuple[int, ...]], rules: Rules
) -> dict[str, Any]:
    """Return the adapters of matrices between layers, and those of other parameters."""
    stacks = rules.with_recorded(known.stacks).stacks
    matrices = dict[str, Matrix]()
    no_matrix = dict[str, str]()
    for path, shape in paths.items():
        ndim = len(shape) - len(dims_of(path, stacks))
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
        param = LoRAParam(leaf, flat[path + LORA_A], flat[path + LORA_B], lora.scale)
        if path in unmerged:
            return param
        return param.merged()

    return tree.map_with_path(place, base, is_leaf=is_wrapped)


def lora_rules(model: Model, lora: LoRAConfig, rules: Rules) -> Rules:
    """Return the rule table of a model without adapters, with rows for its adapters."""
    rules = rules.with_recorded(model.info().stacks)
    rows = dict[str, P | Replicate]()
    for path, shape in adapted_paths(model, lora, rules).items():
        name, leading = rules.layer_path(path)
        match = rules.match(path)
        if match is None:
            continue  # the plan reports it
        spec = P()
        if not isinstance(match.requested, Replicate):
            spec = drop_gathered(match.requested)
        unsplit = len(shape) - len(leading) - len(spec)
        entries = (*spec, *(None,) * unsplit)
        rows[re.escape(name) + LORA_A] = _split(*entries[:-1], None)
        rows[re.escape(name) + LORA_B] = _split(*entries[:-2], None, entries[-1])
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


def _abstract(model: Model) -> Any:
    return jax.eval_shape(model.init, abstract_key())
