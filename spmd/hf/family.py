"""Model families as published on Hugging Face: their config.json and their tensors.

A name map relates parameters to tensors of a checkpoint:

```python
TensorMapping(
    "layers/attention/q_proj/kernel",
    "model.layers.{layer}.self_attn.q_proj.weight",
    TRANSPOSED,
)
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from flax.core import FrozenDict

from spmd import tree
from spmd.errors import ConfigError, Problem, did_you_mean
from spmd.hf.layout import AS_IS, TensorLayout
from spmd.sharding.rules import Rules

GROUP = "spmd.families"
"""Entry-point group; each value is `module:NAME` of a `Family`."""

OPTIONS_GROUP = "spmd.missing_options"
"""Entry-point group; each value is `module:NAME` of architecture → the option that it needs."""

_SAME_TASK = 0.9
_PLACEHOLDERS = ("layer", "expert", "head")
_ANY_PLACEHOLDER = "|".join(_PLACEHOLDERS)
_NO_ALIASES: Mapping[str, str] = FrozenDict()


@dataclasses.dataclass(frozen=True)
class TensorMapping:
    """A parameter and its tensor.

    `path` has no layer numbers; `tensor` has the placeholders `{layer}`, `{expert}` and `{head}`. Our
    layer `i` is the tensors' layer `first + step * i`; `step` is 2 if layers of two kinds alternate.
    With `is_variable` it is no parameter but a variable of the model, such as a router's bias.
    """

    path: str
    tensor: str
    layout: TensorLayout = AS_IS
    first: int = 0
    step: int = 1
    is_variable: bool = False


@dataclasses.dataclass(frozen=True)
class Ignored:
    """Tensors of a checkpoint without a parameter, and why nothing is lost.

    If the checkpoint also has the tensor `same_as`, the two must be equal bit for bit. A tensor with
    a `value` is a constant scalar of the model: it must have this value, and export writes it.
    """

    tensor: str
    why: str
    same_as: str = ""
    value: float | None = None

    def covers(self, tensor: str) -> bool:
        """Return whether the tensor has this name."""
        return name_pattern(self.tensor).fullmatch(tensor) is not None


def name_pattern(tensor: str) -> re.Pattern[str]:
    """Return the pattern of a tensor's names in all layers, experts and heads."""
    return re.compile(re.sub(rf"\\{{({_ANY_PLACEHOLDER})\\}}", r"\\d+", re.escape(tensor)))


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
        for_tensors: Returns a model config from `read_config` for a checkpoint with tensors of
            these names, which may lack a part of the model.
        other_names: Returns mappings of parameters in other forms of checkpoints, such as those of a
            larger model; import uses those whose tensors are there.
        secondary: Whether export prefers another family that a config belongs to, unless the
            original config.json has this one's architecture.
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
    secondary: bool = False
    for_tensors: Callable[[Any, Collection[str]], Any] = lambda config, tensors: config
    other_names: Callable[[Any], tuple[TensorMapping, ...]] = lambda config: ()

    def tables(
        self, config: Any, tensors: Iterable[str], aliases: Mapping[str, str] = _NO_ALIASES
    ) -> tuple[tuple[TensorMapping, ...], tuple[Ignored, ...]]:
        """Return the mappings and ignored tensors of a model config, for some checkpoint.

        Names lose the prefix if no tensor has it. A tensor that the checkpoint lacks may be there
        under another name.

        Args:
            tensors: Names of the tensors in the checkpoint.
            aliases: Tensor → another name of it. A copy that may be ignored is one of the tensor
                that it must equal.
        """
        found = set(tensors)
        prefix = self._absent_prefix(found)
        ignored = [_without_prefix(entry, prefix) for entry in self.ignored(config)]
        stored = _stored_names(found, aliases, ignored)
        mappings: list[TensorMapping] = []
        used: set[str] = set()
        for mapping in _stored_mappings(self.names(config), self.other_names(config), found):
            tensor = mapping.tensor.removeprefix(prefix)
            tensor = stored.get(tensor, tensor)
            mappings.append(dataclasses.replace(mapping, tensor=tensor))
            used.add(tensor)
        unused = tuple(entry for entry in ignored if entry.tensor not in used)
        return tuple(mappings), unused

    def _absent_prefix(self, found: Iterable[str]) -> str:
        """Return the prefix if no tensor has it."""
        if any(tensor.startswith(self.prefix) for tensor in found):
            return ""
        return self.prefix


def _without_prefix(entry: Ignored, prefix: str) -> Ignored:
    tensor = entry.tensor.removeprefix(prefix)
    same_as = entry.same_as.removeprefix(prefix)
    return dataclasses.replace(entry, tensor=tensor, same_as=same_as)


def _stored_names(
    found: Collection[str], aliases: Mapping[str, str], ignored: Iterable[Ignored]
) -> dict[str, str]:
    """Return missing tensor → its other name in the checkpoint."""
    others = dict(aliases)
    for entry in ignored:
        if entry.same_as:
            others[entry.same_as] = entry.tensor
    stored: dict[str, str] = {}
    for name, other in others.items():
        if name not in found and other in found:
            stored[name] = other
    return stored


def _name_form(tensor: str) -> str:
    """Return the name of a tensor, or of a name map, without numbers."""
    return re.sub(rf"(?<=\.)(\d+|\{{({_ANY_PLACEHOLDER})\}})(?=\.)", "#", tensor)


def _stored_mappings(
    mappings: Iterable[TensorMapping], others: Iterable[TensorMapping], found: Iterable[str]
) -> Iterator[TensorMapping]:
    """Yield a mapping of each parameter: another one if the checkpoint has only its tensor."""
    alternatives: dict[str, list[TensorMapping]] = {}
    for mapping in others:
        alternatives.setdefault(mapping.path, []).append(mapping)
    forms: set[str] = set()
    if alternatives:
        forms = {_name_form(tensor) for tensor in found}
    for mapping in mappings:
        candidates = [mapping, *alternatives.get(mapping.path, [])]
        stored = (each for each in candidates if _name_form(each.tensor) in forms)
        yield next(stored, mapping)


@functools.cache
def families() -> dict[str, Family]:
    """Return all installed families by the name of their entry point.

    Every entry point must be one.
    """
    found: dict[str, Family] = {}
    problems: list[Problem] = []
    for entry in sorted(importlib.metadata.entry_points(group=GROUP)):
        where = f"entry point {entry.name}"
        try:
            family = entry.load()
        except (ImportError, AttributeError) as error:
            problems.append(Problem(where, f"cannot be loaded: {error}"))
            continue
        if entry.name in found:
            fix = "uninstall one of them, or rename it"
            problems.append(Problem(where, "is defined twice", entry.value, fix))
        elif isinstance(family, Family):
            found[entry.name] = family
        else:
            problems.append(Problem(where, f"{entry.value} is not a spmd.hf.family.Family"))
    if problems:
        raise ConfigError("Invalid model family:", problems)
    return found


def missing_options() -> dict[str, str]:
    """Return architectures without a family → the option that each needs, in words."""
    found: dict[str, str] = {}
    for entry in importlib.metadata.entry_points(group=OPTIONS_GROUP):
        found.update(entry.load())
    return found


def family_of(architectures: Iterable[str]) -> Family:
    """Return the first installed family with one of the `architectures` in a config.json."""
    wanted = list(architectures)
    for family in families().values():
        if set(wanted) & set(family.architectures):
            return family
    raise ConfigError("Unsupported model:", _unsupported(wanted))


def _unsupported(wanted: Iterable[str]) -> list[Problem]:
    """Return the problems of architectures without a family."""
    known: list[str] = []
    for family in families().values():
        known += family.architectures
    if not known:
        fix = "install spmd or build its metadata: families are found by entry points"
        return [Problem(GROUP, "no family is installed", fix=fix)]
    problems: list[Problem] = []
    options = missing_options()
    for name in dict.fromkeys(wanted):
        if name in options:
            what = f"is not supported: it needs {options[name]}"
            fix = f"a family with this option, as an entry point in {GROUP!r}"
            problems.append(Problem(f"architecture {name}", what, fix=fix))
            continue
        fix = _nearest(name, known)
        problems.append(Problem(f"architecture {name}", "is not supported", fix=fix))
    if not problems:
        fix = f"`architectures`, a list of one name; {_all_of(known)}"
        return [Problem("config.json", "names no architecture", fix=fix)]
    return problems


def _nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint at the known architecture with a typo, or at the list of all.

    One letter makes another family, such as Olmo and Olmoe, and so does a number. Only the case,
    letters that are doubled, and a typo of the task are corrected.
    """
    known = list(known)
    family, task = _split_architecture(name)
    for other in known:
        other_family, other_task = _split_architecture(other)
        is_typo = difflib.SequenceMatcher(None, task, other_task).ratio() > _SAME_TASK
        if _undoubled(family) == _undoubled(other_family) and is_typo:
            return f'did you mean "{other}"?'
    return f"a family for it, as an entry point in {GROUP!r}; {_all_of(known)}"


def _all_of(known: Collection[str]) -> str:
    return f"the page of families (docs/families) has the {len(known)} supported ones"


def _split_architecture(name: str) -> tuple[str, str]:
    """Split an architecture into the names of the family and of the task."""
    found = re.search("for[a-z]*$", name.casefold())
    if found is None:
        return name, ""
    return name[: found.start()], name[found.start() :].casefold()


def _undoubled(name: str) -> str:
    return re.sub(r"([a-z])\1+", r"\1", name.casefold())


def family_for(config: Any, architectures: Iterable[str] = ()) -> Family:
    """Return the family for the export of a model config.

    One with the given architectures is preferred, then one that is not secondary.
    """
    preferred = set(architectures)
    fitting = [family for family in families().values() if family.fits(config)]
    if not fitting:
        what = f"a {type(config).__name__} with these values matches no Hugging Face architecture"
        known = f"families: {', '.join(families()) or 'none is installed'}"
        raise ConfigError("This model cannot be exported:", [Problem("model", what, known)])
    for family in fitting:
        if preferred & set(family.architectures):
            return family
    return min(fitting, key=lambda family: family.secondary)


def mapped_variables(family: Family, config: Any, variables: Any) -> dict[str, Any]:
    """Return those of a model's variables that are in its checkpoints, by the name map."""
    names = {mapping.path for mapping in family.names(config) if mapping.is_variable}

    def is_mapped(path: str) -> bool:
        bare, _ = _split_path(path)
        return bare in names

    return tree.select(variables, is_mapped)


@dataclasses.dataclass(frozen=True)
class TensorSource:
    """The tensors of one parameter.

    `indices` are the numbers in its path: the layer, if layers are not stacked.
    """

    path: str
    shape: tuple[int, ...]
    mapping: TensorMapping
    indices: tuple[int, ...] = ()

    @functools.cached_property
    def _placeholders(self) -> list[str]:
        return [field for field in _PLACEHOLDERS if f"{{{field}}}" in self.mapping.tensor]

    @functools.cached_property
    def stack_shape(self) -> tuple[int, ...]:
        """Leading dimensions, with one tensor per element."""
        return self.shape[: len(self._placeholders) - len(self.indices)]

    @functools.cached_property
    def layer_shape(self) -> tuple[int, ...]:
        """Shape of the parameter in one tensor: without the dimensions of the stack."""
        return self.shape[len(self.stack_shape) :]

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of one tensor, including the parts of other parameters."""
        return self.mapping.layout.tensor_shape(self.layer_shape)

    @functools.cached_property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the parameter in one tensor, with the parts of other parameters."""
        return self.mapping.layout.full_shape(self.layer_shape)

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """Dimensions of `layer_shape` in the order of the tensor's elements."""
        return self.mapping.layout.order(len(self.layer_shape))

    @functools.cached_property
    def inverse_order(self) -> tuple[int, ...]:
        """Dimensions of the tensor in the order of `layer_shape`, without the shared ones."""
        order = [dim - self.shared_dims for dim in self.order[self.shared_dims :]]
        return tuple(sorted(range(len(order)), key=order.__getitem__))

    @functools.cached_property
    def shared_dims(self) -> int:
        """Number of leading dimensions shared by `layer_shape` and the tensor, as of experts."""
        return self.mapping.layout.shared_dims(len(self.layer_shape))

    def tensor_name(self, index: tuple[int, ...]) -> str:
        """Return the name of the tensor at an index of the stack."""
        numbers = dict(zip(self._placeholders, (*self.indices, *index), strict=True))
        if "layer" in numbers:
            numbers["layer"] = self.mapping.first + self.mapping.step * numbers["layer"]
        return self.mapping.tensor.format(**numbers)

    def region(self, ours: tuple[slice, ...]) -> tuple[slice | np.ndarray, ...]:
        """Convert a slice of `layer_shape` to positions in the dimensions `order` of the tensor."""
        if not ours:
            return ()
        last = self.mapping.layout.positions(ours[-1], self.layer_shape[-1])
        moved = (*ours[:-1], last)
        return tuple(moved[dim] for dim in self.order)

    def tensors(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """Yield every index of the stack and the name of its tensor."""
        for index in np.ndindex(*self.stack_shape):
            yield index, self.tensor_name(index)


def tensor_sources(
    names: Iterable[TensorMapping], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, TensorSource]:
    """Return the tensors of each parameter, and of each given variable, by path.

    Each needs a mapping, and every mapping of a parameter needs one.
    """
    mappings = {name.path: name for name in names}
    found: dict[str, TensorSource] = {}
    problems: list[Problem] = []
    used: set[str] = set()
    for path, shape in shapes.items():
        bare, numbers = _split_path(path)
        if bare not in mappings:
            fix = did_you_mean(bare, mappings)
            problems.append(Problem(path, "is not in the name map", fix=fix))
            continue
        used.add(bare)
        source = TensorSource(path, tuple(shape), mappings[bare], numbers)
        what = source.mapping.layout.problem(source.layer_shape)
        if what:
            problems.append(Problem(path, what, f"for the tensor {source.mapping.tensor}"))
        found[path] = source
    of_params = {path for path, mapping in mappings.items() if not mapping.is_variable}
    for path in of_params - used:
        fix = did_you_mean(path, shapes)
        problems.append(Problem(f"name {path!r}", "is not a parameter of the model", fix=fix))
    if problems:
        raise ConfigError("The name map does not fit the model:", problems)
    return found


def _split_path(path: str) -> tuple[str, tuple[int, ...]]:
    """Return a path without its numbers, and the numbers."""
    names: list[str] = []
    numbers: list[int] = []
    for key in path.split("/"):
        if key.isdigit():
            numbers.append(int(key))
        else:
            names.append(key)
    return "/".join(names), tuple(numbers)
