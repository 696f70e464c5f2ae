"""State of the framework among a model's variables, which the model itself never sees."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from spmd.model_api.model import Model, ModelInfo


def with_variables(
    model: Model,
    name: str,
    init: Callable[[jax.Array], Any],
    *,
    replicated: Mapping[str, str] | None = None,
    placed: Mapping[str, Any] | None = None,
) -> Model:
    """Return the model with a state under `name` among its variables, which its forward pass leaves unchanged.

    Args:
        init: Key → the state, a nested dictionary of arrays.
        replicated: Path in the state → the reason why it is replicated.
        placed: Path in the state → its spec.
    """

    def init_variables(key: jax.Array) -> Any:
        return {**model.init_variables(key), name: init(key)}

    def forward(params: Any, variables: Any, *inputs: Any, **keywords: Any) -> tuple[Any, Any]:
        own, state = split_variables(variables, name)
        outputs, after = model.forward(params, own, *inputs, **keywords)
        return outputs, {**after, **state}

    def info() -> ModelInfo:
        known = model.info()
        reasons = {f"{name}/{path}": reason for path, reason in (replicated or {}).items()}
        specs = {f"{name}/{path}": spec for path, spec in (placed or {}).items()}
        return dataclasses.replace(known, replicated={**known.replicated, **reasons}, placed={**known.placed, **specs})

    return dataclasses.replace(model, init_variables=init_variables, forward=forward, info=info)


def split_variables(variables: Any, *names: str) -> tuple[Any, dict[str, Any]]:
    """Split variables into the model's own, and a dictionary of the states under `names`, empty if there are none.

    Example:
        >>> split_variables({"loss_scale": {"scale": 2.0}, "mean": 1.0}, "loss_scale")
        ({'mean': 1.0}, {'loss_scale': {'scale': 2.0}})
    """
    states = {name: variables[name] for name in names if name in variables} if isinstance(variables, Mapping) else {}
    return {name: value for name, value in variables.items() if name not in states} if states else variables, states
