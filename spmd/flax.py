"""Any Flax module as two functions, which is all the rest of this framework knows of a model.

```python
model = from_nnx(lambda rngs: Llama(config, rngs=rngs))
params = model.init(key)               # a nested dictionary: {"layers": {"attention": {"q_proj": {"kernel": …
logits = model.apply(params, tokens)
```
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from spmd import tree
from spmd.errors import NotYetError, Problem


@dataclasses.dataclass(frozen=True)
class Model:
    """A model as two pure functions.

    Attributes:
        init: A key → the parameters, a nested dictionary.
        apply: `(params, *inputs)` → the outputs.
    """

    init: Callable[[jax.Array], Any]
    apply: Callable[..., Any]


def from_nnx(make: Callable[[nnx.Rngs], nnx.Module]) -> Model:
    """The two functions of an NNX module.

    Args:
        make: Builds the module: `lambda rngs: Llama(config, rngs=rngs)`. It is called under tracing, so no array of
            it is ever made outside the plan.

    Raises:
        NotYetError: On first use, if the module holds variables that are not parameters (batch statistics, random
            state).

    Example:
        >>> model = from_nnx(lambda rngs: nnx.Linear(2, 3, rngs=rngs))
        >>> params = model.init(jax.random.key(0))
        >>> sorted(params), model.apply(params, jax.numpy.ones((4, 2))).shape
        (['bias', 'kernel'], (4, 3))
    """

    @functools.cache
    def structure() -> tuple[Any, Any]:
        graph, params, others = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param, ...)
        _refuse({"/".join(map(str, path)): type(other).__name__ for path, other in nnx.to_flat_state(others)})
        for path, param in nnx.to_flat_state(params):
            param.set_metadata(path="/".join(map(str, path)))  # by its path a layer finds its parameter in the plan
        return graph, params

    def init(key: jax.Array) -> Any:
        structure()
        return nnx.to_pure_dict(nnx.state(make(nnx.Rngs(key)), nnx.Param))

    def apply(params: Any, *inputs: Any) -> Any:
        graph, state = structure()
        state = jax.tree.map(lambda leaf: leaf, state)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)(*inputs)

    return Model(init, apply)


def from_linen(module: nn.Module, *inputs: Any) -> Model:
    """The two functions of a Linen module.

    Args:
        module: The module.
        *inputs: What it is called on, as arrays or `jax.ShapeDtypeStruct`s; only shapes are used.

    Raises:
        NotYetError: At `init`, if the module has collections other than `params`.

    Example:
        >>> model = from_linen(nn.Dense(3), jax.ShapeDtypeStruct((4, 2), "float32"))
        >>> params = model.init(jax.random.key(0))
        >>> sorted(params), model.apply(params, jax.numpy.ones((4, 2))).shape
        (['bias', 'kernel'], (4, 3))
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)

    def init(key: jax.Array) -> Any:
        variables = dict(module.lazy_init(key, *shapes))
        params = variables.pop("params", {})
        _refuse({path: "collection" for path in tree.flatten(variables)})
        return params

    def apply(params: Any, *inputs: Any) -> Any:
        return module.apply({"params": params}, *inputs)

    return Model(init, apply)


def _refuse(others: dict[str, str]) -> None:
    if others:
        raise NotYetError(
            "Not yet: a model with variables that are not parameters.",
            [Problem(path, f"is a {kind}", fix="only parameters are trained so far") for path, kind in others.items()],
        )
