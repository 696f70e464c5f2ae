"""Fine-tuning with low-rank adapters (LoRA, Hu et al., arXiv:2106.09685), selected by regexes over parameter paths.

```python
lora = LoRAConfig(targets=("attention/(q|v)_proj/kernel",), rank=8)
adapted = with_lora(model, lora, rules)          # its parameters are the adapters
table = lora_rules(model, lora, rules)           # the model's own table, with a row for each adapter
```

The model's own parameters become variables of the adapted model, under `base/`: sharded by the same table, without
gradients and optimizer state. `A` is sharded as the rows of its parameter and `B` as the columns, neither over `fsdp`.
"""

import dataclasses
import re
from collections.abc import Callable, Container, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import ConfigError, Problem, check_fields, did_you_mean
from spmd.lora.param import LoRAParam
from spmd.model_api.kernels import Matrix
from spmd.model_api.model import LayeredModel, Model, ModelInfo, abstract_key
from spmd.model_api.wrapped_param import is_wrapped
from spmd.plan.fsdp import params_for_forward
from spmd.precision import cast_floats
from spmd.sharding.layer_paths import dims_of
from spmd.sharding.mesh import entry_axes
from spmd.sharding.optimizer_state import drop_fsdp
from spmd.sharding.patterns import PatternError, compile_pattern
from spmd.sharding.rules import Replicate, Rules, first_path, matches, replicate

BASE = "base"
"""The name of the frozen parameters among the variables."""

LORA_A, LORA_B = "_lora_a", "_lora_b"
"""What the names of adapters end with."""
_SMALL = "a low-rank adapter is small"
_TITLE = "These adapters cannot be used:"


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters of frozen parameters."""

    targets: tuple[str, ...] = ()
    """Parameters with an adapter: patterns as in a rule table. If empty, all parameters are trained."""
    rank: int = 8
    """Columns of A and rows of B."""
    alpha: float = 16.0
    """The product of A and B is multiplied by alpha / rank."""
    save_base: bool = False
    """Checkpoints have the frozen parameters of init, too: the run no longer needs that folder."""

    def __post_init__(self) -> None:
        problems = check_fields(self, {"rank": "at least 1", "alpha": "finite"}, "lora.")
        if not self.targets and (self.rank, self.alpha, self.save_base) != (LoRAConfig.rank, LoRAConfig.alpha, False):
            fix = "patterns over parameter paths, such as 'attention/(q|v)_proj/kernel'"
            problems.append(Problem("lora.targets", "is empty, so no parameter has an adapter", fix=fix))
        if not self.alpha:
            problems.append(Problem("lora.alpha", "is 0", fix="another number, such as 16"))
        for index, pattern in enumerate(self.targets):
            try:
                compile_pattern(pattern)
            except PatternError as error:
                problems.append(Problem(f"lora.targets[{index}]", f"{pattern!r} is not a regular expression: {error}"))
        if problems:
            raise ConfigError(_TITLE, problems)

    @property
    def scale(self) -> float:
        """Factor of the product of A and B."""
        return self.alpha / self.rank


def adapted_paths(model: Model, lora: LoRAConfig, rules: Rules) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters with an adapter, by path."""
    shapes = {path: tuple(leaf.shape) for path, leaf in tree.flatten(_abstract(model)).items()}
    found: dict[str, tuple[int, ...]] = {}
    problems, rules = [], rules.with_recorded(model.info().stacks)
    for index, pattern in enumerate(lora.targets):
        where = f"lora.targets[{index}]"
        targets = [path for path in shapes if matches(pattern, path, rules.stacks)]
        if not targets:
            names = [rules.layer_path(path)[0] for path in shapes]
            fix = first_path(pattern, model.info().tied, rules.stacks) or did_you_mean(pattern, names)
            problems.append(Problem(where, f"{pattern!r} matches no parameter", fix=fix))
        for path in targets:
            dims = dims_of(path, rules.stacks)
            if any(dim != i for i, dim in enumerate(dims)):
                what = f"matches {path}, which is stacked along dimension {dims[0]}"
                problems.append(Problem(where, what, f"{shapes[path]}", "stack along dimension 0 for adapters"))
            elif len(shapes[path]) - len(dims) < 2:
                what = f"matches {path}, which is not a matrix"
                problems.append(Problem(where, what, f"{shapes[path]}", "name kernels only"))
            elif lora.rank > (least := min(shapes[path][-2:])):
                what, fix = f"is above the rank of {path}", f"at most {least}"
                problems.append(Problem("lora.rank", what, f"{lora.rank} > {least} of {shapes[path]}", fix))
            found[path] = shapes[path]
    if problems:
        raise ConfigError(_TITLE, problems)
    return found


def with_lora(model: Model, lora: LoRAConfig, rules: Rules, dtype: str = "float32") -> Model:
    """Return the model with adapters as its parameters, and its own parameters as variables.

    `A` is drawn with variance 1 / in and `B` is zero, so the adapted model starts equal to the model.

    Args:
        rules: The model's table, which names the stacks.
        dtype: Dtype of the frozen parameters.

    Raises:
        ConfigError: A target matches no parameter, or one with fewer than two dimensions or a lower rank; or the model
            has a variable `base`.
    """
    paths = adapted_paths(model, lora, rules)
    if BASE in jax.eval_shape(model.init_variables, abstract_key()):
        raise ConfigError("This model cannot be adapted:", [Problem(BASE, "is a variable of the model itself")])

    def init(key: jax.Array) -> Any:
        adapters: dict[str, jax.Array] = {}
        for number, (path, shape) in enumerate(paths.items()):
            draw = jax.random.normal(jax.random.fold_in(key, number), (*shape[:-1], lora.rank))
            adapters[path + LORA_A] = draw * shape[-2] ** -0.5
            adapters[path + LORA_B] = jnp.zeros((*shape[:-2], lora.rank, shape[-1]))
        return tree.nested(adapters)

    def init_variables(key: jax.Array) -> Any:
        return {**model.init_variables(key), BASE: cast_floats(model.init(key), dtype)}

    def merged(params: Any, variables: Any) -> tuple[Any, Any]:
        own = {name: value for name, value in variables.items() if name != BASE}
        return with_adapters(params_for_forward(variables[BASE]), params, lora, model.info().wrappable), own

    def forward(params: Any, variables: Any, key: Any, *inputs: Any, train: bool, **keywords: Any) -> tuple[Any, Any]:
        outputs, after = model.forward(*merged(params, variables), key, *inputs, train=train, **keywords)
        return outputs, {**after, BASE: variables[BASE]}

    def part(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(params: Any, variables: Any, *args: Any, **keywords: Any) -> Any:
            return function(*merged(params, variables), *args, **keywords)

        return run

    def apply(params: Any, *inputs: Any) -> Any:
        fix = "call model.forward(params, variables, key, *inputs, train=False)"
        problem = Problem(BASE, "has the frozen parameters, and is a variable", fix=fix)
        raise ConfigError("This model cannot be applied to adapters alone:", [problem])

    def info() -> ModelInfo:
        known = model.info()
        tied = tuple(tuple(f"{BASE}/{path}" for path in group) for group in known.tied)
        frozen = {f"{BASE}/{path}": path for path in tree.flatten(_abstract(model))}
        merged = frozenset(f"{BASE}/{path}" for path in paths if path not in known.wrappable)
        adapters = frozenset(path + suffix for path in paths for suffix in (LORA_A, LORA_B))
        cast = known.cast_by_layer | adapters
        known = dataclasses.replace(
            known, tied=tied, annotations={}, frozen=frozen, merged=merged, added=frozenset(), cast_by_layer=cast
        )
        return dataclasses.replace(known, **_adapter_matrices(known, paths, rules))

    def layered() -> LayeredModel | None:
        parts = model.layered()
        if parts is None:
            return None
        return LayeredModel(part(parts.embed_inputs), part(parts.apply_layers), part(parts.compute_outputs))

    return Model(init, apply, init_variables, forward, info, layered)


def _adapter_matrices(known: ModelInfo, paths: Mapping[str, tuple[int, ...]], rules: Rules) -> dict[str, Any]:
    """Return which adapters are matrices between layers: those of parameters that are."""
    stacks, matrices, no_matrix = rules.with_recorded(known.stacks).stacks, {}, {}
    for path, shape in paths.items():
        rank = len(shape) - len(dims_of(path, stacks))
        for name in (path + LORA_A, path + LORA_B):
            if path in known.no_matrix:
                no_matrix[name] = known.no_matrix[path]
            else:
                matrices[name] = Matrix((rank - 2,), (rank - 1,))
    return {"matrices": matrices, "no_matrix": no_matrix, "created": {}}


def with_adapters(base: Any, adapters: Any, lora: LoRAConfig, unmerged: Container[str] = ()) -> Any:
    """Return the parameters `base` merged with their adapters, the parameters of the model of `with_lora`.

    Those at the paths `unmerged` are returned as `LoRAParam`, for layers that support it.
    """
    flat = tree.flatten(adapters)

    def place(path: str, leaf: Any) -> Any:
        if path + LORA_A not in flat:
            return leaf
        param = LoRAParam(leaf, flat[path + LORA_A], flat[path + LORA_B], lora.scale)
        return param if path in unmerged else param.merged()

    return tree.map_with_path(place, base, is_leaf=is_wrapped)


def lora_rules(model: Model, lora: LoRAConfig, rules: Rules) -> Rules:
    """Return the rule table of a model without adapters, with rows for its adapters."""
    rows: dict[str, P | Replicate] = {}
    rules = rules.with_recorded(model.info().stacks)
    for path, shape in adapted_paths(model, lora, rules).items():
        name, leading = rules.layer_path(path)
        match = rules.match(path)
        if match is None:
            continue  # the plan reports it
        spec = P() if isinstance(match.requested, Replicate) else drop_fsdp(match.requested)
        entries = (*spec, *(None,) * (len(shape) - len(leading) - len(spec)))
        rows[re.escape(name) + LORA_A] = _split(*entries[:-1], None)
        rows[re.escape(name) + LORA_B] = _split(*entries[:-2], None, entries[-1])
    return dataclasses.replace(rules, params=(*rows.items(), *rules.params))


def _split(*entries: Any) -> P | Replicate:
    return P(*entries) if any(entry_axes(entry) for entry in entries) else replicate(_SMALL)


def _abstract(model: Model) -> Any:
    return jax.eval_shape(model.init, abstract_key())
