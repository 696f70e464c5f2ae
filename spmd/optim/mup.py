"""Maximal update parametrization (muP): learning rates tuned at a small width hold at a large one.

Yang et al., arXiv:2203.03466, table 3, for Adam and its like. A parameter whose inputs grow by r
and whose outputs grow by s, relative to a base model:

| parameter | inputs | outputs | learning rate | standard deviation of its initial values |
|---|---|---|---|---|
| lookups, biases, scales, first layers | 1 | s | 1 | 1 |
| matrices between layers, also to a fixed width | r | s | 1/r | 1/√r |
| the head | r | 1 | 1/r | 1/r |

Which dimensions are inputs is said by the layers (`ModelInfo.matrices`), and widths by the shapes
of both models: no name matters. In a model without modules arrays are `[in, out]`.

```python
model = spmd.with_mup(spmd.from_nnx(wide), spmd.from_nnx(narrow))
optimizer = spmd.make_optimizer(spmd.OptimizerConfig(learning_rate=rate_of_narrow), steps, model=model)
```
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spmd import tree
from spmd.errors import ConfigError, Problem
from spmd.model_interface.kernels import LOGITS, LOOKUP
from spmd.model_interface.model import Model, ModelInfo, abstract_key
from spmd.optim.treatment import declared
from spmd.sharding.layer_paths import dims_of, without_dims

_TITLE = "muP does not fit the model:"


@dataclasses.dataclass(frozen=True)
class Growth:
    """Growth of a parameter's inputs and outputs, relative to the base model.

    Attributes:
        is_head: Whether it makes the logits of the model.
        is_drawn: Whether its initial values are scaled: no bias and no other vector is.
    """

    inputs: float
    outputs: float
    is_head: bool = False
    is_drawn: bool = True

    @property
    def rate(self) -> float:
        """Factor of the learning rate."""
        return 1 / self.inputs

    @property
    def width(self) -> float:
        """The growth to whose powers initial values are scaled; 1 if nothing grows."""
        if self.inputs != 1:
            return self.inputs
        return self.outputs

    @property
    def exponent(self) -> float:
        """The power of `width` by which the standard deviation of initial values is to grow."""
        if self.is_head:
            return -1.0
        if self.inputs != 1:
            return -0.5
        return 0.0


def with_mup(model: Model, base: Model) -> Model:
    """Return a model with initial values and learning rates by muP.

    Its initial values are those of `model` times powers of the growth of widths, such that standard
    deviations follow the table above from those of `base`. `make_optimizer(…, model=…)` multiplies
    learning rates by `ModelInfo.rates`.

    Args:
        model: The model to train.
        base: The same model at the width where learning rates were tuned, with as many layers.
            Attention heads have one size: widen a model by more heads.

    Raises:
        ConfigError: Parameters differ in more than widths, nothing grows, or there is no head.
    """
    grown = _growth(model, base)
    info = model.info()
    rates = {path: growth.rate for path, growth in grown.items() if growth.rate != 1}

    def with_rates() -> ModelInfo:
        return dataclasses.replace(info, rates=rates)

    init = functools.partial(_scaled_init, model=model, base=base, grown=grown)
    return dataclasses.replace(model, init=init, info=with_rates)


def _scaled_init(key: jax.Array, model: Model, base: Model, grown: Mapping[str, Growth]) -> Any:
    """Return the initial parameters of `model`, scaled relative to those of `base`."""
    reference = tree.flatten(base.init(key))

    def scale(path: str, x: jax.Array) -> jax.Array:
        growth = grown[path]
        if growth.width == 1 or not growth.is_drawn:
            return x
        return x * _init_factor(x, reference[path], growth).astype(x.dtype)

    return tree.map_with_path(scale, model.init(key))


def _init_factor(x: jax.Array, base: jax.Array, growth: Growth) -> jax.Array:
    """Return the factor of initial values, a power of the growth; 1 for constant ones.

    The model's own initializer scales by a power of the width already, a multiple of one half: 0
    for a constant standard deviation, -1/2 for one over the root of the inputs. It is read from the
    values and rounded, so that the factor is exactly the same on every mesh.
    """
    own = jnp.std(x.astype(jnp.float32))
    before = jnp.std(base.astype(jnp.float32))
    is_random = (own > 0) & (before > 0)
    ratio = jnp.where(is_random, own, 1.0) / jnp.where(is_random, before, 1.0)
    exponent = jnp.round(2 * jnp.log(ratio) / math.log(growth.width)) / 2
    factor = jnp.float32(growth.width) ** (growth.exponent - exponent)
    return jnp.where(is_random, factor, 1.0)


def _growth(model: Model, base: Model) -> dict[str, Growth]:
    """Return path → growth of each parameter."""
    shapes, base_shapes = _shapes(model), _shapes(base)
    problems = list[Problem]()
    for path in {**shapes, **base_shapes}:
        if path not in shapes or path not in base_shapes:
            where = "the model"
            if path in shapes:
                where = "the base"
            problems.append(Problem(path, f"is not in {where}", fix="one model at two widths"))
    if problems:
        raise ConfigError(_TITLE, problems)
    grown = dict[str, Growth]()
    for path, shape in shapes.items():
        found = _growth_of(path, shape, base_shapes[path], model.info())
        if isinstance(found, Problem):
            problems.append(found)
        else:
            grown[path] = found
    if not problems:
        problems += _problems_together(grown.values())
    if problems:
        raise ConfigError(_TITLE, problems)
    return grown


def _problems_together(grown: Iterable[Growth]) -> list[Problem]:
    """Return a problem if no parameter grows, or none of a head."""
    has_grown = False
    has_head = False
    for growth in grown:
        has_grown |= growth.width != 1
        has_head |= growth.is_head and growth.inputs != 1
    if not has_grown:
        return [Problem("base", "has the widths of the model", fix="a narrower base")]
    if not has_head:
        what = "has no head of its own, of which the inputs grow and the outputs do not"
        fix = "an untied head; a tied one would need a multiplier of the logits"
        return [Problem("model", what, fix=fix)]
    return []


def _shapes(model: Model) -> dict[str, tuple[int, ...]]:
    abstract = jax.eval_shape(model.init, abstract_key())
    shapes = dict[str, tuple[int, ...]]()
    for path, x in tree.flatten(abstract).items():
        shapes[path] = tuple(x.shape)
    return shapes


def _growth_of(
    path: str, shape: Sequence[int], before: Sequence[int], info: ModelInfo
) -> Growth | Problem:
    """Return the growth of one parameter, or the problem that nobody explains its dimensions."""
    stacks = info.stacks or {}
    dims = dims_of(path, stacks)
    own = without_dims(shape, dims)
    base = without_dims(before, dims)
    is_as_deep = len(own) == len(base)
    for dim in dims:
        is_as_deep = is_as_deep and shape[dim] == before[dim]
    if not is_as_deep:
        what = "has another number of dimensions or of layers in the base"
        return Problem(path, what, f"{tuple(before)}, not {tuple(shape)}", "widths alone")
    ratios = [size / other for size, other in zip(own, base, strict=True)]
    said = declared(path, info, stacks)
    if said == LOGITS:
        return Growth(math.prod(ratios), 1.0, is_head=True)
    if isinstance(said, str) or len(ratios) < 2:
        return Growth(1.0, math.prod(ratios), is_drawn=said == LOOKUP)
    if said is None and len(ratios) == 2:
        is_head = not _is_declared(info) and ratios[0] != 1 and ratios[1] == 1
        return Growth(ratios[0], ratios[1], is_head=is_head)
    if said is None:
        if set(ratios) == {1.0}:
            return Growth(1.0, 1.0)
        what = f"grows in {len(ratios)} dimensions, and nobody says which are inputs"
        fix = "a layer that declares its kernel (ModelInfo.matrices)"
        return Problem(path, what, f"{tuple(base)} → {tuple(own)}", fix)
    inputs = math.prod(ratios[dim] for dim in said.inputs)
    outputs = math.prod(ratios[dim] for dim in said.outputs)
    return Growth(inputs, outputs)


def _is_declared(info: ModelInfo) -> bool:
    """Return whether layers declare their parameters, and so a head as well."""
    return bool(info.no_matrix or info.matrices)
