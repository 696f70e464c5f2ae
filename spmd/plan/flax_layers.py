"""Statements of Flax's layers about their parameters: dimensions of kernels, lookups, biases.

They are read from the fields of the layers. A layer that is not Flax's declares them by the
metadata of an `nnx.Param`:

```python
self.kernel = nnx.Param(table, matrix="bio")        # one letter for each dimension: batch, in, out
self.embedding = nnx.Param(table, role="lookup")    # or "logits", for a head
self.gain = nnx.Param(gain, added=True)             # like a bias: without weight decay
```
"""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
from flax import nnx

from spmd.errors import AnnotationError, Problem, describe_value, did_you_mean
from spmd.model_interface.kernels import LOGITS, LOOKUP, Matrix, Said

Shape = tuple[int | None, ...]

Statement = Callable[[Any, str, Shape | None], Said]
"""From a layer, the name of one of its parameters and its shape, if seen, to its statement."""


def said_of(
    layer: Any, name: str, metadata: Mapping[str, Any], seen: Shape | None = None
) -> Said | None:
    """Return a layer's statement about one of its own parameters; None if it has none.

    Args:
        metadata: The metadata of the parameter.
        seen: The shape of the parameter at creation, if known.

    Example:
        >>> layer = nnx.LinearGeneral(4, (2, 3), rngs=nnx.Rngs(0))
        >>> said_of(layer, "kernel", {})
        Said(shape=(4, 2, 3), matrix=Matrix(inputs=(0,), outputs=(1, 2)), role='', is_added=False)
    """
    if not metadata.keys().isdisjoint(_METADATA):
        return _by_metadata(name, metadata)
    for kinds, statement in _STATEMENTS:
        if isinstance(layer, kinds):
            return statement(layer, name, seen)
    return None


_METADATA = ("matrix", "role", "added")


def _by_metadata(name: str, metadata: Mapping[str, Any]) -> Said:
    dims = metadata.get("matrix", "")
    role = metadata.get("role", "")
    is_added = metadata.get("added", False)
    problems = []
    if not _is_matrix(dims):
        fix = 'a letter for each dimension of one layer, such as "io" or "bio": batch, in, out'
        problems.append(Problem(f"matrix of {name}", f"is {describe_value(dims)}", fix=fix))
    if role not in ("", LOOKUP, LOGITS):
        fix = did_you_mean(str(role), (LOOKUP, LOGITS))
        problems.append(Problem(f"role of {name}", f"is {describe_value(role)}", fix=fix))
    if problems:
        raise AnnotationError("The metadata of this parameter cannot be read:", problems)
    if not dims:
        return Said(None, None, role, is_added)
    return Said((None,) * len(dims), Matrix.of(dims), role, is_added)


def _is_matrix(dims: Any) -> bool:
    """Return whether metadata is a text of letters for dimensions, or empty."""
    if not isinstance(dims, str):
        return False
    letters = set(dims)
    return not letters or {"i", "o"} <= letters <= {"b", "i", "o"}


def _linear(layer: Any, name: str, seen: Shape | None) -> Said:
    if name == "kernel":
        return Said(seen or (layer.in_features, layer.out_features), Matrix.of("io"))
    return Said(seen or (layer.out_features,), is_added=True)


def _general(layer: nnx.LinearGeneral, name: str, seen: Shape | None) -> Said:
    del seen
    batch = tuple(layer.batch_axis.values())
    inputs = layer.in_features
    outputs = layer.out_features
    if name == "kernel":
        dims = "b" * len(batch) + "i" * len(inputs) + "o" * len(outputs)
        return Said((*batch, *inputs, *outputs), Matrix.of(dims))
    return Said((*batch, *outputs), is_added=True)


def _dense_general(layer: nn.DenseGeneral, name: str, seen: Shape | None) -> Said:
    if name != "kernel" or seen is None:
        return Said(seen, is_added=name != "kernel")
    batch = _count(layer.batch_dims)
    outputs = _count(layer.features)
    inputs = len(seen) - batch - outputs
    return Said(seen, Matrix.of("b" * batch + "i" * inputs + "o" * outputs))


def _count(values: Any) -> int:
    if isinstance(values, int):
        return 1
    return len(tuple(values))


def _einsum(layer: Any, name: str, seen: Shape | None) -> Said:
    """Read the kernel's dimensions: inputs are not in the output, outputs are not in the input."""
    if name != "kernel":
        return Said(seen or layer.bias_shape, is_added=True)
    shape = seen or layer.kernel_shape
    if not layer.einsum_str:
        return Said(shape)  # the equation is an argument of the call
    operands, result = layer.einsum_str.replace(" ", "").split("->")
    x, kernel = operands.split(",")
    if "." in kernel:
        return Said(shape)
    letters = ""
    for dim in kernel:
        if dim not in result:
            letters += "i"
        elif dim in x:
            letters += "b"
        else:
            letters += "o"
    return Said(shape, Matrix.of(letters))


def _convolution(layer: Any, name: str, seen: Shape | None) -> Said:
    """Read a convolution's kernel: its taps and channels are inputs."""
    if name != "kernel":
        return Said(seen or (None,), is_added=True)
    shape = seen or layer.kernel_shape
    channels = "oi" if getattr(layer, "transpose_kernel", False) else "io"
    taps = len(shape) - 2
    return Said(tuple(shape), Matrix.of("i" * taps + channels))


def _local_convolution(layer: Any, name: str, seen: Shape | None) -> Said:
    """Read the kernel of a convolution without shared weights: a matrix for each place."""
    del layer
    if name != "kernel" or seen is None:
        return Said(seen, is_added=name != "kernel")
    return Said(seen, Matrix.of("b" * (len(seen) - 2) + "io"))


def _embedding(layer: Any, name: str, seen: Shape | None) -> Said:
    del name
    return Said(seen or (layer.num_embeddings, layer.features), role=LOOKUP)


def _adapter(layer: Any, name: str, seen: Shape | None) -> Said:
    del layer, name
    return Said(seen or (None, None), Matrix.of("io"))


def _norm(layer: Any, name: str, seen: Shape | None) -> Said:
    del name
    if isinstance(layer, nnx.Module) and not isinstance(layer, nnx.WeightNorm):
        return Said((None,), is_added=True)
    return Said(seen, is_added=True)


_NORMS = (
    *(nnx.BatchNorm, nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.InstanceNorm, nnx.WeightNorm),
    *(nn.BatchNorm, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm, nn.WeightNorm),
)

_STATEMENTS: tuple[tuple[tuple[type, ...], Statement], ...] = (
    ((nnx.Linear, nn.Dense), _linear),
    ((nnx.LinearGeneral,), _general),
    ((nn.DenseGeneral,), _dense_general),
    ((nnx.Einsum, nn.Einsum), _einsum),
    ((nn.ConvLocal,), _local_convolution),
    ((nnx.Conv, nn.Conv, nnx.ConvTranspose, nn.ConvTranspose), _convolution),
    ((nnx.Embed, nn.Embed), _embedding),
    ((nnx.LoRA,), _adapter),
    (_NORMS, _norm),
)
"""Kinds of layers → their statement; the first kind of a layer applies."""
