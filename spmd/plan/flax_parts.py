"""The parts of a Flax module for a pipeline: its methods, and their arguments in each mode."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from spmd.errors import ConfigError, Problem
from spmd.model_interface.compute_dtype import InComputeDtype
from spmd.model_interface.model import (
    NO_PIPELINE,
    VALID,
    LayeredModel,
    LayeredModule,
    takes_valid,
)
from spmd.plan.flax_calls import INVALID_MODEL, called_method

_METHODS = ("embed_inputs", "apply_layers", "compute_outputs")
"""The methods of a `LayeredModule`."""

Part = Callable[..., tuple[Any, Any]]
"""Method as a function of parameters, variables and inputs; it returns its result and variables."""


@dataclasses.dataclass(frozen=True)
class ModeKeywords:
    """Keyword arguments of a module's parts in training and in evaluation."""

    module: LayeredModule
    training: Mapping[str, Any]
    evaluation: Mapping[str, Any]

    def of(self, method: str, *, train: bool) -> dict[str, Any]:
        """Return the keyword arguments of a method in a mode."""
        keywords = self.training if train else self.evaluation
        taken = {}
        for name, x in keywords.items():
            if self._takes(method, name):
                taken[name] = x
        return taken

    def check(self) -> None:
        """Raise a `ConfigError` if an argument is taken by no method."""
        fix = f"a parameter of this name of {', '.join(_METHODS)}, wherever the mode matters"
        problems = []
        for name in dict.fromkeys((*self.training, *self.evaluation)):
            if not any(self._takes(method, name) for method in _METHODS):
                what = "is an argument of the mode, and no part of the model takes it"
                problems.append(Problem(name, what, fix=fix))
        if problems:
            raise ConfigError(NO_PIPELINE, problems)

    def _takes(self, method: str, name: str) -> bool:
        signature = inspect.signature(getattr(self.module, method))
        try:
            signature.bind_partial(**{name: None})
        except TypeError:
            return False
        return True


def mode_keywords(
    module: Any, training: Mapping[str, Any], evaluation: Mapping[str, Any]
) -> ModeKeywords | None:
    """Return the keyword arguments of a module's parts; None for a module without parts.

    Raises:
        ConfigError: A mode chooses another method to call; no method takes an argument of a mode;
            or `embed_inputs` does not take the mask of the tokens that are no padding.
    """
    if not isinstance(module, LayeredModule):
        return None
    if "method" in {*training, *evaluation}:
        what = f"is chosen by the mode, and stages call {', '.join(_METHODS)}"
        problem = Problem("method", what, fix="no method among train and evaluate")
        raise ConfigError(NO_PIPELINE, [problem])
    if takes_valid(called_method(module, {})) and not takes_valid(module.embed_inputs):
        what = f"does not take {VALID!r}, which {type(module).__name__}.__call__ takes"
        fix = f"embed_inputs(…, {VALID}=None)"
        raise ConfigError(INVALID_MODEL, [Problem("embed_inputs", what, fix=fix)])
    keywords = ModeKeywords(module, training, evaluation)
    keywords.check()
    return keywords


def layered_model(
    module: Any,
    info: Callable[[], Any],
    *,
    embed_inputs: Part,
    apply_layers: Part,
    compute_outputs: Part,
) -> LayeredModel:
    """Return the parts of a module, computed in the compute dtype.

    Args:
        info: Returns the model's `ModelInfo`.
        embed_inputs: It takes a key before the inputs.
    """
    return LayeredModel(
        InComputeDtype(embed_inputs, info, inputs_from=2, returns_outputs=False),
        InComputeDtype(apply_layers, info, returns_outputs=False),
        InComputeDtype(compute_outputs, info, has_variables=True),
        getattr(module, "outputs_take_context", False),
    )


def check_nothing_sown(method: str, sown: Iterable[str]) -> None:
    """Raise a `ConfigError` if a part sows values: stages return none."""
    what = f"is sown in {method}, and stages of a pipeline pass on returned values alone"
    fix = (
        "return it among the values of apply_layers, and take it into the outputs in "
        "compute_outputs: spmd.model_interface.model.Outputs(logits, losses={…})"
    )
    problems = [Problem(path, what, fix=fix) for path in sorted(sown)]
    if problems:
        raise ConfigError(NO_PIPELINE, problems)
