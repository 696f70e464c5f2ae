"""Recipes of matmuls in fewer bits, and the table from kernels to recipes.

| recipe | inputs, kernel | output's gradient | one scale for |
|---|---|---|---|
| `fp8` | e4m3 | e5m2 | each array, from its largest magnitude |
| `fp8-delayed` | e4m3 | e5m2 | each array, from its largest magnitudes in the last steps |
| `fp8-block` | e4m3 | e4m3 | 128 elements, 128 × 128 of a kernel |
| `mxfp8` | e4m3 | e4m3 | 32 elements; scales are rounded up |
| `int8` | int8 | int8 | each row; a kernel's gradient is not quantized |
| `bf16` | none of it: the compute dtype | | |

`fp8` is from Micikevicius et al. (arXiv:2209.05433), `fp8-block` from DeepSeek-V3
(arXiv:2412.19437, section 3.3.2), `mxfp8` from Rouhani et al. (arXiv:2310.10537; rounding of
scales: arXiv:2506.08027) and `int8` from SwitchBack (arXiv:2304.13013).

Sums are in float32; parameters, optimizer state and checkpoints are as without recipes. Scales of
fp8 are powers of two, rounded up, so every element of a block is exact in bfloat16. The recipes
with blocks multiply in the compute dtype: no public kernel takes their scales.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

from spmd.delayed_scaling.amax_history import AmaxHistory
from spmd.errors import Problem, did_you_mean
from spmd.model_interface.grad_transform import GradTransform
from spmd.sharding.patterns import PatternError, compile_pattern

PLAIN = "bf16"
"""Name of the recipe for an unchanged matmul."""

Table = tuple[tuple[str, str], ...]
"""Patterns of paths with the name of a recipe each; the first match decides."""


@dataclasses.dataclass(frozen=True)
class QuantizationRecipe:
    """Dtypes and scales of the three products of a linear layer.

    They are its output, and the gradients of its input and its kernel.

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
        """The recipe's transforms of the gradient (`ShardingPlan.with_transforms`)."""
        if not self.is_delayed:
            return ()
        return (AmaxHistory(),)

    def problems(self, row: str, *, stages: int, is_trained: bool) -> list[Problem]:
        """Return the reasons against its use for the matmuls of a row of the table.

        Args:
            stages: The stages of the pipeline.
            is_trained: Whether all of their kernels are trained.
        """
        if not self.is_delayed:
            return []
        reasons = []
        if stages > 1:
            reasons.append("stages of a pipeline remember none")
        if not is_trained:
            reasons.append("frozen kernels remember none")
        fix = 'quantize="fp8", which scales by this step'
        problems = []
        for reason in reasons:
            what = f"scales by earlier steps, and {reason}"
            problems.append(Problem(row, what, fix=fix))
        return problems

    @property
    def kind(self) -> str:
        """The dtype of a chip's products: `"float8"`, `"int8"`, or empty for the compute dtype."""
        if self.scaling == "block":
            return ""
        if self.inputs == "int8":
            return "int8"
        return "float8"


_E4M3 = "float8_e4m3fn"
_E5M2 = "float8_e5m2"
_ALL_RECIPES = (
    QuantizationRecipe("fp8", _E4M3, _E5M2, "array"),
    QuantizationRecipe("fp8-delayed", _E4M3, _E5M2, "history"),
    QuantizationRecipe("fp8-block", _E4M3, _E4M3, "block", 128, is_square=True),
    QuantizationRecipe("mxfp8", _E4M3, _E4M3, "block", 32),
    QuantizationRecipe("int8", "int8", "int8", "row"),
)

RECIPES: Mapping[str, QuantizationRecipe] = {recipe.name: recipe for recipe in _ALL_RECIPES}
"""Name → recipe."""


def parse_table(text: str) -> Table:
    """Return the rows of `PATTERN=RECIPE,…`; a recipe alone is for all linear layers of blocks.

    Example:
        >>> parse_table("fp8")
        (('.*', 'fp8'),)
        >>> parse_table("attention/.*=fp8,mlp/down_proj/kernel=bf16")
        (('attention/.*', 'fp8'), ('mlp/down_proj/kernel', 'bf16'))
    """
    if not text:
        return ()
    if "=" not in text:
        return ((".*", text),)
    rows = []
    for row in text.split(","):
        pattern, _, name = row.rpartition("=")
        rows.append((pattern.strip(), name.strip()))
    return tuple(rows)


def table_problems(
    text: str,
    names: Iterable[str] = RECIPES,
    *,
    setting: str = "quantize",
    kind: str = "recipe",
) -> list[Problem]:
    """Return a problem for each row without a pattern or without a known name.

    Args:
        names: What a row may name besides `PLAIN`.
        setting: The setting, for the message.
        kind: A word for what is named.
    """
    known = (*names, PLAIN)
    problems = []
    for pattern, name in parse_table(text):
        where = setting
        if "=" in text:
            row = f"{pattern}={name}"
            where = f"{setting}, row {row!r}"
        if not pattern:
            fix = f"PATTERN={kind.upper()}, such as mlp/.*={known[0]}"
            problems.append(Problem(where, "has no pattern", fix=fix))
        if name not in known:
            fix = did_you_mean(name, known)
            problems.append(Problem(where, f"names the {kind} {name!r}", fix=fix))
        try:
            compile_pattern(pattern)
        except PatternError as error:
            what = f"is no regular expression: {error}"
            problems.append(Problem(where, what, fix="escape special characters by \\"))
    return problems
