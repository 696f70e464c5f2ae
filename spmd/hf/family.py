"""Model families as published on Hugging Face: config.json fields, and a map from parameters to checkpoint tensors.

```python
name = "model.layers.{layer}.self_attn.q_proj.weight"
TensorMapping("layers/attention/q_proj/kernel", name, TRANSPOSED)
```

One mapping covers all layers, stacked or not: one tensor per layer, or per layer and expert if the
tensor's name has both. Families are found by Python entry points in the group `spmd.families`, so
any package can add one.
"""

import dataclasses
import difflib
import functools
import importlib.metadata
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from flax.core import FrozenDict

from spmd.errors import ConfigError, Problem, did_you_mean
from spmd.sharding.rules import Rules

GROUP = "spmd.families"
"""Entry-point group; each value is `module:NAME` of a `Family`."""

_PLACEHOLDERS = ("layer", "expert")
_NO_ALIASES: Mapping[str, str] = FrozenDict()


@dataclasses.dataclass(frozen=True)
class TensorLayout:
    """Relation of a tensor to the parameter of one layer: part `index` of `parts` equal ones along its last dimension.

    PyTorch's linear layers are `[out, in]`, ours `[in, out]`: such a tensor is `transposed`.
    """

    transposed: bool = False
    index: int = 0
    parts: int = 1


AS_IS = TensorLayout()
TRANSPOSED = TensorLayout(transposed=True)


def part(index: int, parts: int, *, transposed: bool = False) -> TensorLayout:
    """Return the layout of one of several concatenated parameters: GPT-2's queries are `part(0, 3)` of `c_attn`."""
    return TensorLayout(transposed, index, parts)


@dataclasses.dataclass(frozen=True)
class TensorMapping:
    """A parameter (path without layer numbers) and its tensor (name with placeholders `{layer}` and `{expert}`).

    Our layer `i` is the tensors' layer `first + step * i`; `step` is 2 if layers of two kinds
    alternate.
    """

    path: str
    tensor: str
    layout: TensorLayout = AS_IS
    first: int = 0
    step: int = 1


@dataclasses.dataclass(frozen=True)
class Ignored:
    """Tensors that a checkpoint may have, that no parameter uses, and why nothing is lost.

    If the checkpoint also has the tensor `same_as`, the two must be equal bit for bit.
    """

    tensor: str
    why: str
    same_as: str = ""

    def covers(self, tensor: str) -> bool:
        """Return whether the tensor has this name."""
        pattern = re.sub(r"\\{(layer|expert)\\}", r"\\d+", re.escape(self.tensor))
        return re.fullmatch(pattern, tensor) is not None


@dataclasses.dataclass(frozen=True)
class Family:
    """Conversion between a model family and its Hugging Face checkpoints.

    Attributes:
        architectures: Names in config.json; export writes the first.
        read_config: Parses config.json into a model config. It raises one ConfigError that lists
            every unsupported feature (see `spmd.hf.fields.Fields`).
        write_config: Inverse of `read_config`, without `architectures`.
        fits: Returns whether a model config belongs to this family.
        prefix: Prefix of tensor names that some checkpoints omit.
        harmless: Fields of config.json, besides `spmd.hf.fields.HARMLESS`, that do not change a
            trained model; export copies them from the original config.json.
    """

    architectures: tuple[str, ...]
    read_config: Callable[[Mapping[str, Any]], Any]
    write_config: Callable[[Any], dict[str, Any]]
    fits: Callable[[Any], bool]
    rules: Callable[[Any], Rules]
    names: Callable[[Any], tuple[TensorMapping, ...]]
    ignored: Callable[[Any], tuple[Ignored, ...]] = lambda config: ()
    prefix: str = ""
    harmless: tuple[str, ...] = ()

    def tables(
        self, config: Any, tensors: Iterable[str], aliases: Mapping[str, str] = _NO_ALIASES
    ) -> tuple[tuple[TensorMapping, ...], tuple[Ignored, ...]]:
        """Return the mappings and ignored tensors of a model config, for a checkpoint with these tensors.

        Names lose the prefix if no tensor has it. A tensor that the checkpoint lacks may be there
        under another name.

        Args:
            aliases: Tensor → another name of it. A copy that may be ignored is one of the tensor
                that it must equal.
        """
        found = set(tensors)
        prefix = self.prefix if not any(tensor.startswith(self.prefix) for tensor in found) else ""
        ignored = [
            Ignored(
                entry.tensor.removeprefix(prefix), entry.why, entry.same_as.removeprefix(prefix)
            )
            for entry in self.ignored(config)
        ]
        others = {**aliases, **{entry.same_as: entry.tensor for entry in ignored if entry.same_as}}
        stored = {
            name: other for name, other in others.items() if name not in found and other in found
        }
        names = []
        for name in self.names(config):
            tensor = name.tensor.removeprefix(prefix)
            names.append(dataclasses.replace(name, tensor=stored.get(tensor, tensor)))
        used = {name.tensor for name in names}
        return tuple(names), tuple(entry for entry in ignored if entry.tensor not in used)


@functools.cache
def families() -> dict[str, Family]:
    """Return all installed families by the name of their entry point.

    Every entry point must be one.
    """
    found, problems = {}, []
    for entry in sorted(importlib.metadata.entry_points(group=GROUP)):
        where = f"entry point {entry.name}"
        try:
            family = entry.load()
        except (ImportError, AttributeError) as error:
            problems.append(Problem(where, f"cannot be loaded: {error}"))
            continue
        if entry.name in found:
            problems.append(
                Problem(
                    where, "is defined twice", entry.value, "uninstall one of them, or rename it"
                )
            )
        elif isinstance(family, Family):
            found[entry.name] = family
        else:
            problems.append(Problem(where, f"{entry.value} is not a spmd.hf.family.Family"))
    if problems:
        raise ConfigError("Invalid model family:", problems)
    return found


def family_of(architectures: Iterable[str]) -> Family:
    """Return the first installed family with one of the `architectures` in a config.json."""
    wanted = list(architectures)
    for family in families().values():
        if set(wanted) & set(family.architectures):
            return family
    known = [name for family in families().values() for name in family.architectures]
    if not known:
        fix = "install spmd or build its metadata: families are found by entry points"
        problems = [Problem(GROUP, "no family is installed", fix=fix)]
    elif wanted:
        fixes = {name: _nearest(name, known) for name in wanted}
        problems = [
            Problem(f"architecture {name}", "is not supported", fix=fix)
            for name, fix in fixes.items()
        ]
    else:
        problems = [
            Problem("config.json", "names no architecture", fix=f"one of: {', '.join(known)}")
        ]
    raise ConfigError("Unsupported model:", problems)


def _nearest(name: str, known: Iterable[str]) -> str:
    """Return what may be meant: class names all end with the task, which says nothing about the family."""
    families_of = {re.sub("For[A-Z].*", "", other): other for other in known}
    near = difflib.get_close_matches(re.sub("For[A-Z].*", "", name), families_of, n=1, cutoff=0.8)
    return f'did you mean "{families_of[near[0]]}"?' if near else f"one of: {', '.join(known)}"


def family_for(config: Any, architectures: Iterable[str] = ()) -> Family:
    """Return the family that a model config is exported as.

    One with the given architectures is preferred.
    """
    preferred = set(architectures)
    fitting = [family for family in families().values() if family.fits(config)]
    if not fitting:
        what = f"a {type(config).__name__} with these values matches no Hugging Face architecture"
        known = f"families: {', '.join(families()) or 'none is installed'}"
        raise ConfigError("This model cannot be exported:", [Problem("model", what, known)])
    return next((family for family in fitting if preferred & set(family.architectures)), fitting[0])


@dataclasses.dataclass(frozen=True)
class TensorSource:
    """The tensors of one parameter.

    `indices` are the numbers in its path: the layer, if layers are not stacked.
    """

    path: str
    shape: tuple[int, ...]
    mapping: TensorMapping
    indices: tuple[int, ...] = ()

    @property
    def _placeholders(self) -> list[str]:
        return [field for field in _PLACEHOLDERS if f"{{{field}}}" in self.mapping.tensor]

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """Leading dimensions, with one tensor per element."""
        return self.shape[: len(self._placeholders) - len(self.indices)]

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """Shape of the slice of the parameter that one tensor holds."""
        return self.shape[len(self.stack_shape) :]

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of one tensor, including parts that belong to other parameters."""
        shape, layout = self.layer_shape, self.mapping.layout
        full = (*shape[:-1], shape[-1] * layout.parts) if shape else ()
        return full[::-1] if layout.transposed else full

    def tensor_name(self, index: tuple[int, ...]) -> str:
        """Return the name of the tensor at an index of the stack."""
        numbers = dict(zip(self._placeholders, (*self.indices, *index), strict=True))
        if "layer" in numbers:
            numbers["layer"] = self.mapping.first + self.mapping.step * numbers["layer"]
        return self.mapping.tensor.format(**numbers)

    def region(self, ours: tuple[slice, ...]) -> tuple[slice, ...]:
        """Convert a slice of `layer_shape` to a slice of the tensor."""
        if not ours:
            return ()
        layout, last = self.mapping.layout, ours[-1]
        offset = layout.index * self.layer_shape[-1]
        moved = (*ours[:-1], slice(last.start + offset, last.stop + offset))
        return moved[::-1] if layout.transposed else moved

    def tensors(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """Yield every index of the stack and the name of its tensor."""
        return ((index, self.tensor_name(index)) for index in np.ndindex(*self.stack_shape))


def tensor_sources(
    names: Iterable[TensorMapping], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, TensorSource]:
    """Return the tensors of each parameter by path.

    Every parameter needs a mapping, and every mapping a parameter.
    """
    mappings = {name.path: name for name in names}
    found, problems, used = {}, [], set()
    for path, shape in shapes.items():
        parts = path.split("/")
        bare, numbers = (
            "/".join(p for p in parts if not p.isdigit()),
            tuple(int(p) for p in parts if p.isdigit()),
        )
        if bare in mappings:
            used.add(bare)
            found[path] = TensorSource(path, tuple(shape), mappings[bare], numbers)
        else:
            problems.append(
                Problem(path, "is not in the name map", fix=did_you_mean(bare, mappings))
            )
    for path in mappings.keys() - used:
        problems.append(
            Problem(
                f"name {path!r}", "is not a parameter of the model", fix=did_you_mean(path, shapes)
            )
        )
    if problems:
        raise ConfigError("The name map does not fit the model:", problems)
    return found
