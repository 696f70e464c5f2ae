"""Layouts of tensors: parts, groups and the order of dimensions.

A layout is data of a name map. Reading takes the positions of one parameter from a tensor, export
puts the parameters of a tensor there. Shapes are of one layer; *out* is the parameter's last
dimension.

```text
AS_IS            [in, out]            embeddings, norms, biases, kernels of GPT-2
TRANSPOSED       [out, in]            linear layers of PyTorch
EXPERTS          [expert, in, out]    all experts in one tensor: Llama 4, gpt-oss
EXPERTS_TRANSPOSED [expert, out, in]  Granite MoE, Qwen 3.5 MoE
CONVOLUTION      [channel, 1, width]  depthwise convolution, ours [width, channel]
axes=((0, 2), 1) [expert · out, in]   DBRX: experts below each other
```

Several parameters in one tensor are `part`s of *out*. Queries, keys and values of unequal size,
`part(index, (heads, kv_heads, kv_heads))`, as of Phi 3 and GLM 4 (`gate_up_proj`: `part(index, 2)`):

```text
out  | q q q q q q q q | k k | v v |
```

Parts in each of several groups, `part(index, 3, groups=heads)`, as of GPT-NeoX; Falcon has
`part(index, (heads // kv_heads, 1, 1), groups=kv_heads)`, gated queries of Qwen 3 Next
`part(index, 2, groups=heads)`:

```text
out  | q k v | q k v | q k v | q k v |
       head 0  head 1  head 2  head 3
```

Alternating columns, `part(index, 2, groups=d_ff)`, as gate and up projection of gpt-oss:

```text
out  | g u | g u | g u | g u | g u | g u |
```
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from spmd.errors import ConfigError, Problem

Axis = int | None | tuple[int, ...]
"""A tensor's dimension: the parameter's, None for size 1, or several of them, the last fastest."""


@dataclasses.dataclass(frozen=True)
class TensorLayout:
    """Relation of a tensor to the parameter of one layer.

    The parameter's last dimension is part `index` of each of `groups` equal groups of the tensor's.

    Attributes:
        axes: Axes of the tensor; empty for the parameter's own.
        parts: Sizes of the parts of one group, in any unit: `(heads, kv_heads, kv_heads)`.
    """

    axes: tuple[Axis, ...] = ()
    parts: tuple[int, ...] = (1,)
    index: int = 0
    groups: int = 1

    def __post_init__(self) -> None:
        problems: list[Problem] = []
        if not self.parts or min(self.parts) < 1:
            problems.append(Problem("parts", f"are {self.parts}, not sizes of at least 1"))
        if not 0 <= self.index < len(self.parts):
            what = f"is {self.index}, not from 0 to {len(self.parts) - 1}"
            problems.append(Problem("index", what))
        if self.groups < 1:
            problems.append(Problem("groups", f"are {self.groups}, less than 1"))
        if self.groups > 1 and self.is_whole:
            problems.append(Problem("groups", f"are {self.groups}, of a single part"))
        dims = _flatten(self.axes)
        if sorted(dims) != list(range(len(dims))):
            what = f"are {self.axes}, without each of the parameter's dimensions once"
            problems.append(Problem("axes", what))
        if problems:
            raise ConfigError("Invalid layout of a tensor:", problems)

    @property
    def is_whole(self) -> bool:
        """Whether the tensor holds one parameter."""
        return len(self.parts) == 1

    def problem(self, shape: Sequence[int]) -> str:
        """Return the reason why a parameter cannot have this layout; empty if it can."""
        if self.axes and len(_flatten(self.axes)) != len(shape):
            return f"has {len(shape)} dimensions, and its layout {self.axes}"
        if self.is_whole:
            return ""
        size, unit = shape[-1:], self.groups * self.parts[self.index]
        if not size or size[0] % unit:
            detail = f"{self.groups} groups of {self.parts[self.index]}"
            return f"has a last dimension of {list(size)}, which does not divide by {detail}"
        return ""

    def order(self, ndim: int) -> tuple[int, ...]:
        """Return the parameter's dimensions in the order of the tensor's elements."""
        if not self.axes:
            return tuple(range(ndim))
        return _flatten(self.axes)

    def with_last_swapped(self, ndim: int) -> "TensorLayout":
        """Return the layout of the tensor with its last two dimensions swapped."""
        *lead, rows, columns = self.axes or range(ndim)
        return dataclasses.replace(self, axes=(*lead, columns, rows))

    def shared_dims(self, ndim: int) -> int:
        """Return the number of leading dimensions shared by both, before the last two."""
        shared = 0
        for dim in self.order(ndim)[: max(ndim - 2, 0)]:
            if dim != shared:
                break
            shared += 1
        return shared

    def full_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return a parameter's shape with all parts of the tensor in its last dimension."""
        if self.is_whole:
            return tuple(shape)
        return (*shape[:-1], self.groups * sum(self._sizes(shape[-1])))

    def tensor_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the tensor of a parameter."""
        full = self.full_shape(shape)
        if not self.axes:
            return full
        sizes: list[int] = []
        for axis in self.axes:
            dims = _flatten((axis,))
            sizes.append(math.prod(full[dim] for dim in dims))
        return tuple(sizes)

    def positions(self, side: slice, size: int) -> slice | np.ndarray:
        """Convert a slice of the last dimension, of `size`, to positions among all parts.

        They are a slice if their distance is constant, else int64 `[positions]`.
        """
        if self.is_whole:
            return side
        sizes = self._sizes(size)
        offset, width, period = sum(sizes[: self.index]), sizes[self.index], sum(sizes)
        if self.groups == 1:
            return slice(side.start + offset, side.stop + offset)
        if width == 1:
            first = side.start * period + offset
            return slice(first, first + (side.stop - side.start - 1) * period + 1, period)
        group, place = np.divmod(np.arange(side.start, side.stop), width)
        return group * period + offset + place

    def _sizes(self, size: int) -> list[int]:
        """Return the sizes of the parts of one group, if this one has `size` over all groups."""
        unit = size // (self.groups * self.parts[self.index])
        return [unit * part for part in self.parts]


def _flatten(axes: Iterable[Axis]) -> tuple[int, ...]:
    dims: list[int] = []
    for axis in axes:
        if isinstance(axis, tuple):
            dims += axis
        elif axis is not None:
            dims.append(axis)
    return tuple(dims)


AS_IS = TensorLayout()
TRANSPOSED = TensorLayout((1, 0))
EXPERTS = AS_IS
EXPERTS_TRANSPOSED = TensorLayout((0, 2, 1))
CONVOLUTION = TensorLayout((1, None, 0))


def part(
    index: int, parts: int | Sequence[int], *, groups: int = 1, layout: TensorLayout = AS_IS
) -> TensorLayout:
    """Return the layout of one of several parameters in a tensor.

    GPT-2's queries are `part(0, 3)` of `c_attn`, Phi 3's keys
    `part(1, (heads, kv_heads, kv_heads), layout=TRANSPOSED)` of `qkv_proj`.

    Args:
        parts: Their sizes along the output dimension, in any unit; a number of equal ones.
        groups: Number of groups, such as heads, with these parts in each.
        layout: The tensor's axes.
    """
    if isinstance(parts, int):
        parts = (1,) * parts
    return dataclasses.replace(layout, parts=tuple(parts), index=index, groups=groups)
