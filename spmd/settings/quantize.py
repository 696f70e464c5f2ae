"""Recipes of matmuls in fewer bits, and the table that names one for each kernel.

| recipe | inputs, kernel | output's gradient | one scale for |
|---|---|---|---|
| `fp8` | e4m3 | e5m2 | each array, from its largest magnitude (Micikevicius et al., arXiv:2209.05433) |
| `fp8-delayed` | e4m3 | e5m2 | each array, from its largest magnitudes in the last steps |
| `fp8-block` | e4m3 | e4m3 | 128 elements, 128 × 128 of a kernel (DeepSeek-V3, arXiv:2412.19437, section 3.3.2) |
| `mxfp8` | e4m3 | e4m3 | 32 elements (Rouhani et al., arXiv:2310.10537; scales rounded up: arXiv:2506.08027) |
| `int8` | int8 | int8 | each row; a kernel's gradient is not quantized (SwitchBack, arXiv:2304.13013) |
| `bf16` | none of it: the compute dtype | | |

Sums are in float32; parameters, optimizer state and checkpoints are as without recipes. Scales of fp8 are powers of
two, rounded up, so every element of a block is exact in bfloat16. The recipes with blocks multiply in the compute
dtype: no public kernel takes their scales.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from spmd.delayed_scaling.magnitudes import MagnitudeHistory
from spmd.errors import Problem, did_you_mean
from spmd.model_api.grad_transform import GradTransform
from spmd.sharding.patterns import PatternError, compile_pattern

PLAIN = "bf16"
"""Name of the recipe that leaves a matmul as it is."""

Table = tuple[tuple[str, str], ...]
"""Patterns of paths with the name of a recipe each; the first that matches decides."""


@dataclasses.dataclass(frozen=True)
class MatmulRecipe:
    """Dtypes and scales of the three products of a linear layer: its output, and the gradients of input and kernel.

    Attributes:
        inputs: Dtype of inputs and kernels.
        gradient: Dtype of an output's gradient.
        scaling: What has one scale.
        block: Elements along the summed dimension with one scale, for `"block"`.
        is_square: Whether blocks of kernels are as long in the other dimension.
    """

    name: str
    inputs: str
    gradient: str
    scaling: Literal["array", "history", "row", "block"]
    block: int = 0
    is_square: bool = False

    @property
    def is_delayed(self) -> bool:
        """Whether scales follow from earlier steps."""
        return self.scaling == "history"

    @property
    def transforms(self) -> tuple[GradTransform, ...]:
        """What keeps a state around the gradient for it (`ShardingPlan.with_transforms`)."""
        return (MagnitudeHistory(),) if self.is_delayed else ()

    def problems(self, row: str, *, stages: int, is_trained: bool) -> list[Problem]:
        """Return what keeps matmuls of a row of the table from following it.

        Args:
            stages: The stages of the pipeline.
            is_trained: Whether all of their kernels are trained.
        """
        if not self.is_delayed:
            return []
        why = []
        if stages > 1:
            why.append("stages of a pipeline remember none")
        if not is_trained:
            why.append("frozen kernels remember none")
        fix = "--quantize fp8, which scales by this step"
        return [Problem(row, f"scales by earlier steps, and {what}", fix=fix) for what in why]

    @property
    def kind(self) -> str:
        """The dtype in which a chip multiplies: `"float8"`, `"int8"`, or empty for the compute dtype."""
        return "" if self.scaling == "block" else "int8" if self.inputs == "int8" else "float8"


_E4M3, _E5M2 = "float8_e4m3fn", "float8_e5m2"

RECIPES: Mapping[str, MatmulRecipe] = {
    recipe.name: recipe
    for recipe in (
        MatmulRecipe("fp8", _E4M3, _E5M2, "array"),
        MatmulRecipe("fp8-delayed", _E4M3, _E5M2, "history"),
        MatmulRecipe("fp8-block", _E4M3, _E4M3, "block", 128, is_square=True),
        MatmulRecipe("mxfp8", _E4M3, _E4M3, "block", 32),
        MatmulRecipe("int8", "int8", "int8", "row"),
    )
}
"""Name → recipe."""


def parse_table(text: str) -> Table:
    """Return the rows of `PATTERN=RECIPE,…`; a recipe alone is for all linear layers of blocks.

    Example:
        >>> parse_table("fp8")
        (('.*', 'fp8'),)
        >>> parse_table("attention/.*=fp8,mlp/down_proj/kernel=bf16")
        (('attention/.*', 'fp8'), ('mlp/down_proj/kernel', 'bf16'))
    """
    if "=" not in text:
        return ((".*", text),) if text else ()
    rows = (part.rpartition("=") for part in text.split(","))
    return tuple((pattern.strip(), name.strip()) for pattern, _, name in rows)


def table_problems(text: str) -> list[Problem]:
    """Return a problem for each row without a pattern or a recipe that exists."""
    problems, known = [], (*RECIPES, PLAIN)
    for pattern, name in parse_table(text):
        row = "quantize" if "=" not in text else f"quantize, row {pattern + '=' + name!r}"
        if not pattern:
            problems.append(Problem(row, "has no pattern", fix="PATTERN=RECIPE, such as mlp/.*=fp8"))
        if name not in known:
            problems.append(Problem(row, f"names the recipe {name!r}", fix=did_you_mean(name, known)))
        try:
            compile_pattern(pattern)
        except PatternError as error:
            problems.append(Problem(row, f"is no regular expression: {error}", fix="escape special characters by \\"))
    return problems
