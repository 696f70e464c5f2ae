"""Structure of parameters: matrices, lookups, heads, biases and scales.

An optimizer with another update for matrices (Muon), and the default of weight decay, read the
structure instead of names.

```python
Matrix.of("bio")                      # an expert's kernel [expert, in, out]
Matrix(inputs=(0,), outputs=(1, 2))   # attention's query kernel [in, heads, head_dim]
```
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from spmd.errors import Problem, describe_value

LOOKUP = "lookup"
LOGITS = "logits"
VECTOR = "vector"
"""Reasons, with the two above, why a parameter with two or more dimensions is no matrix between
layers."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Inputs and outputs among the dimensions of one layer's kernel.

    All others are a batch of matrices.

    Example:
        >>> Matrix.of("ioo"), Matrix.of("bio").text((8, 32, 16))
        (Matrix(inputs=(0,), outputs=(1, 2)), '8 of 32 × 16')
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @classmethod
    def of(cls, dims: str) -> "Matrix":
        """Return the matrix of a kernel with one letter for each dimension.

        They are `i` for in, `o` for out and `b` for batch.
        """
        inputs = tuple(dim for dim, kind in enumerate(dims) if kind == "i")
        outputs = tuple(dim for dim, kind in enumerate(dims) if kind == "o")
        return cls(inputs, outputs)

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions of a matrix, without the batch."""
        return (*self.inputs, *self.outputs)

    def sides(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the numbers of inputs and of outputs, from the shape of one layer's kernel."""
        return _product(shape, self.inputs), _product(shape, self.outputs)

    def text(self, shape: Sequence[int]) -> str:
        """Return the matrices of a kernel of one layer as text: `32 × 16`, or `8 of 32 × 16`."""
        rows, columns = self.sides(shape)
        text = f"{rows} × {columns}"
        batch = [dim for dim in range(len(shape)) if dim not in self.dims]
        if batch:
            text = f"{_product(shape, batch)} of {text}"
        return text


def _product(shape: Sequence[int], dims: Collection[int]) -> int:
    return math.prod(shape[dim] for dim in dims)


@dataclasses.dataclass(frozen=True)
class Said:
    """Metadata of a parameter, declared by its layer.

    Attributes:
        shape: Its shape when the layer created it, with None for an unknown size; None if its rank
            is unknown.
        matrix: Its dimensions, if it is a kernel.
        role: `"lookup"` for rows that are looked up, `"logits"` for a head, or empty.
        is_added: Whether the layer adds it to a product or multiplies by it: a bias, the scale of a
            norm.
    """

    shape: tuple[int | None, ...] | None = None
    matrix: Matrix | None = None
    role: str = ""
    is_added: bool = False


def read_matrices(matrices: Any) -> tuple[dict[str, Matrix | None], list[Problem]]:
    """Return the user's pattern → matrix, or None for no matrix, and the problems.

    Example:
        >>> read_matrices({"query/kernel": (0, (1, 2)), "positions": None})[0]
        {'query/kernel': Matrix(inputs=(0,), outputs=(1, 2)), 'positions': None}
    """
    example = 'matrices={"query/kernel": ((0,), (1, 2))}'
    fix = f"{example}: the dimensions of inputs and of outputs, of one layer"
    if not isinstance(matrices, Mapping):
        return {}, [Problem("matrices", f"is {describe_value(matrices)}", fix=fix)]
    found = dict[str, Matrix | None]()
    problems = []
    for pattern, value in matrices.items():
        if value is None or isinstance(value, Matrix):
            found[pattern] = value
            continue
        matrix = _read_matrix(value)
        if matrix is None:
            problems.append(
                Problem(f"matrices[{pattern!r}]", f"is {describe_value(value)}", fix=fix)
            )
        else:
            found[pattern] = matrix
    return found, problems


def _read_matrix(value: Any) -> Matrix | None:
    """Return the matrix of a pair of dimensions, each one number or several; else None."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        return None
    inputs = _read_side(value[0])
    outputs = _read_side(value[1])
    dims = (*inputs, *outputs)
    are_numbers = all(type(dim) is int and dim >= 0 for dim in dims)
    if not inputs or not outputs or not are_numbers or len({*dims}) < len(dims):
        return None
    return Matrix(inputs, outputs)


def _read_side(side: Any) -> tuple[Any, ...]:
    """Return the dimensions of one side of a matrix, one number or several."""
    if isinstance(side, tuple | list):
        return tuple(side)
    return (side,)
