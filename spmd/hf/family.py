"""A model family as Hugging Face publishes it: its config.json, and a table from our parameters to its tensors.

```python
Name("layers/attention/q_proj/kernel", "model.layers.{layer}.self_attn.q_proj.weight", TRANSPOSED)
```

A line is for every layer: a stacked parameter is one tensor for each layer, and one for each layer and expert where the
tensor's name has both. Layers that are not stacked (`layers/0/…`) go by the same line. A family is found by its Python
entry point in the group `spmd.families`, so a package of one's own can add one.
"""

import dataclasses
import functools
import importlib.metadata
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from spmd.errors import ConfigError, Problem, did_you_mean
from spmd.sharding.rules import Rules

GROUP = "spmd.families"
"""The group of entry points; the value of each is `module:NAME` of a `Family`."""

_COUNTED = ("layer", "expert")
_TENSORS = ("tensor", "same_as")


@dataclasses.dataclass(frozen=True)
class TensorLayout:
    """How a tensor becomes a parameter of one layer: cut first or turned first is the same.

    Attributes:
        transposed: Whether the tensor is the transpose: PyTorch's linear layers are `[out, in]`, ours `[in, out]`.
        number: Which part of the tensor it is, of those that lie side by side along the parameter's last dimension.
        parts: How many equal parts the tensor has.
    """

    transposed: bool = False
    number: int = 0
    parts: int = 1


AS_IS = TensorLayout()
TRANSPOSED = TensorLayout(transposed=True)


def part(number: int, parts: int, *, transposed: bool = False) -> TensorLayout:
    """One of several parameters that share a tensor, side by side: GPT-2's queries are `part(0, 3)` of `c_attn`."""
    return TensorLayout(transposed, number, parts)


@dataclasses.dataclass(frozen=True)
class TensorMapping:
    """One line of a family's table: a parameter and the tensor that it is.

    Attributes:
        path: The parameter, without layer numbers.
        tensor: The tensor; `{layer}` and `{expert}` stand for numbers.
        how: How the one becomes the other.
        first: The number of the tensor of our first layer.
        step: How far apart the numbers are; 2 where layers of two kinds take turns.
    """

    path: str
    tensor: str
    how: TensorLayout = AS_IS
    first: int = 0
    step: int = 1


@dataclasses.dataclass(frozen=True)
class Ignored:
    """Tensors that a checkpoint may have and no parameter is made of; they are named, not dropped in silence.

    Attributes:
        tensor: Their name, as in `TensorMapping`.
        why: Why nothing is lost.
        same_as: The tensor that it must equal, bit for bit, where the checkpoint has both; empty for none.
    """

    tensor: str
    why: str
    same_as: str = ""

    def covers(self, tensor: str) -> bool:
        """Whether this line is about the tensor."""
        pattern = re.sub(r"\\{(layer|expert)\\}", r"\\d+", re.escape(self.tensor))
        return re.fullmatch(pattern, tensor) is not None


@dataclasses.dataclass(frozen=True)
class Family:
    """Everything about a model family that Hugging Face checkpoints need.

    Attributes:
        name: Such as `llama`.
        architectures: What config.json calls it; the first one is written.
        read_config: The values of config.json → the model's shape. It raises one ConfigError that names every feature
            that the model does not have (see `spmd.hf.fields.Fields`).
        write_config: The inverse: what config.json must say of a shape, without `architectures`.
        fits: Whether a shape is of this family.
        rules: The partition rule table for a shape.
        names: The table of a shape.
        ignored: What else a checkpoint of a shape may hold.
        prefix: What tensors' names begin with, and in some checkpoints do not.
        kept: Fields of this family's config.json that change nothing in a trained model, beside those that are
            harmless in every family; export writes them back as they were.
    """

    name: str
    architectures: tuple[str, ...]
    read_config: Callable[[Mapping[str, Any]], Any]
    write_config: Callable[[Any], dict[str, Any]]
    fits: Callable[[Any], bool]
    rules: Callable[[Any], Rules]
    names: Callable[[Any], tuple[TensorMapping, ...]]
    ignored: Callable[[Any], tuple[Ignored, ...]] = lambda config: ()
    prefix: str = ""
    kept: tuple[str, ...] = ()

    def lines(self, config: Any, tensors: Iterable[str]) -> tuple[tuple[TensorMapping, ...], tuple[Ignored, ...]]:
        """The table of a shape, and what else there may be, by the names that a checkpoint uses.

        Args:
            config: The shape.
            tensors: The names of the checkpoint's tensors.
        """
        names, ignored = self.names(config), self.ignored(config)
        if any(tensor.startswith(self.prefix) for tensor in tensors):
            return names, ignored
        short = (dataclasses.replace(line, tensor=line.tensor.removeprefix(self.prefix)) for line in names)
        others = (
            dataclasses.replace(line, **{name: getattr(line, name).removeprefix(self.prefix) for name in _TENSORS})
            for line in ignored
        )
        return tuple(short), tuple(others)


@functools.cache
def families() -> dict[str, Family]:
    """Every family that is installed, by the name of its entry point.

    Raises:
        ConfigError: An entry point leads to no family.
    """
    found, problems = {}, []
    for entry in sorted(importlib.metadata.entry_points(group=GROUP)):
        try:
            family = entry.load()
        except (ImportError, AttributeError) as error:
            problems.append(Problem(f"entry point {entry.name}", f"cannot be loaded: {error}"))
            continue
        if entry.name in found:
            fix = "uninstall one of them, or give it another name"
            problems.append(Problem(f"entry point {entry.name}", "is there twice", entry.value, fix))
        elif isinstance(family, Family):
            found[entry.name] = family
        else:
            problems.append(Problem(f"entry point {entry.name}", f"{entry.value} is no spmd.hf.family.Family"))
    if problems:
        raise ConfigError("A model family cannot be used:", problems)
    return found


def family_of(architectures: Iterable[str]) -> Family:
    """The family of a config.json.

    Args:
        architectures: What it says under that name.

    Raises:
        ConfigError: There is no such family.
    """
    wanted = list(architectures)
    for family in families().values():
        if set(wanted) & set(family.architectures):
            return family
    known = [name for family in families().values() for name in family.architectures]
    if not known:
        fix = "install spmd, or build its metadata: families are found by entry points"
        raise ConfigError("This model is not known:", [Problem(GROUP, "no family is installed", fix=fix)])
    problems = [
        Problem(f"architecture {name}", "is of no known family", fix=did_you_mean(name, known)) for name in wanted
    ] or [Problem("config.json", "names no architecture", fix=f"one of: {', '.join(known)}")]
    raise ConfigError("This model is not known:", problems)


def family_for(config: Any, architectures: Iterable[str] = ()) -> Family:
    """The family that a shape is written as.

    Args:
        config: The model's shape.
        architectures: Those that are preferred: what it was read as.

    Raises:
        ConfigError: There is none.
    """
    preferred = set(architectures)
    fitting = [family for family in families().values() if family.fits(config)]
    if not fitting:
        what = f"a {type(config).__name__} of this shape has no place among Hugging Face's architectures"
        known = f"families: {', '.join(families()) or 'none is installed'}"
        raise ConfigError("This model cannot be exported:", [Problem("model", what, known)])
    return next((family for family in fitting if preferred & set(family.architectures)), fitting[0])


@dataclasses.dataclass(frozen=True)
class TensorSource:
    """The tensors that one parameter is made of.

    Attributes:
        path: The parameter.
        shape: Its shape.
        name: Its line in the table.
        numbers: The numbers in its path: of its layer, where layers are not stacked.
    """

    path: str
    shape: tuple[int, ...]
    name: TensorMapping
    numbers: tuple[int, ...] = ()

    @property
    def stack(self) -> tuple[int, ...]:
        """The leading dimensions that count tensors."""
        counted = sum(f"{{{field}}}" in self.name.tensor for field in _COUNTED)
        return self.shape[: counted - len(self.numbers)]

    @property
    def one(self) -> tuple[int, ...]:
        """The shape of what one tensor gives."""
        return self.shape[len(self.stack) :]

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of one tensor, with the parts of other parameters."""
        how = self.name.how
        whole = (*self.one[:-1], self.one[-1] * how.parts) if self.one else ()
        return whole[::-1] if how.transposed else whole

    def tensor(self, index: tuple[int, ...]) -> str:
        """The name of the tensor at a place of the stack."""
        fields = (field for field in _COUNTED if f"{{{field}}}" in self.name.tensor)
        numbers = dict(zip(fields, (*self.numbers, *index), strict=True))
        if "layer" in numbers:
            numbers["layer"] = self.name.first + self.name.step * numbers["layer"]
        return self.name.tensor.format(**numbers)

    def region(self, ours: tuple[slice, ...]) -> tuple[slice, ...]:
        """Where a slice of what one tensor gives is in that tensor."""
        how, offset = self.name.how, self.name.how.number * self.one[-1] if self.one else 0
        moved = (*ours[:-1], slice(ours[-1].start + offset, ours[-1].stop + offset)) if ours else ()
        return moved[::-1] if how.transposed else moved

    def tensors(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """Every place of the stack, and the tensor there."""
        places: list[tuple[int, ...]] = [()]
        for size in self.stack:
            places = [(*place, i) for place in places for i in range(size)]
        for place in places:
            yield place, self.tensor(place)


def tensor_sources(names: Iterable[TensorMapping], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorSource]:
    """Which tensors each parameter is made of.

    Args:
        names: The family's table.
        shapes: Path → shape of every parameter.

    Raises:
        ConfigError: A parameter without a line, a line without a parameter: the table does not fit the model.
    """
    lines = {name.path: name for name in names}
    found, problems, used = {}, [], set()
    for path, shape in shapes.items():
        parts = path.split("/")
        bare = "/".join(p for p in parts if not p.isdigit())
        if bare in lines:
            used.add(bare)
            found[path] = TensorSource(path, tuple(shape), lines[bare], tuple(int(p) for p in parts if p.isdigit()))
        else:
            problems.append(Problem(path, "has no line in the name map", fix=did_you_mean(bare, lines)))
    for path in lines.keys() - used:
        problems.append(Problem(f"name {path!r}", "is no parameter of the model", fix=did_you_mean(path, shapes)))
    if problems:
        raise ConfigError("The name map does not fit the model:", problems)
    return found
