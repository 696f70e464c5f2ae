"""A folder in the layout of `save_pretrained`.

It has config.json, safetensors files, and an index if there are several. It is not trusted. Files
are parsed, never executed: pickles are refused. Links are followed only within the folder, or to
`blobs` of the hub's cache if the folder is a snapshot of it (`…/snapshots/REVISION`).
"""

import contextlib
import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from spmd.checkpoint.manifest import read_object
from spmd.errors import CheckpointError, Problem, check_local, first_of
from spmd.hf.family import Family, Ignored, TensorMapping, TensorSource, family_of, name_pattern
from spmd.hf.fields import collect_errors
from spmd.hf.quantization import FIELD, Mxfp4Tensor, read_quantization, readers_of
from spmd.hf.safetensors import SafetensorsFile, StoredTensor, TensorReader, open_local
from spmd.hf.stored_bytes import BucketBytes, DamagedBytesError, StoredBytes
from spmd.model_interface.model_config import experts_of, layers_of
from spmd.storage.address import BucketPath, Location
from spmd.storage.bucket import Bucket
from spmd.storage.download import download, is_side_file

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_CONFIG_MAX_BYTES = 16 << 20
_INDEX_MAX_BYTES = 64 << 20
_PICKLES = frozenset({".bin", ".pt", ".pth", ".pkl", ".ckpt"})
_MAX_LAYERS_PER_TENSOR = 16
_MAX_HINT_PAIRS = 10_000


@dataclasses.dataclass(frozen=True)
class HFFolder:
    """An opened Hugging Face folder.

    Attributes:
        values: Content of config.json.
        config: The model config.
        tensors: Tensors by name, dequantized.
        files: Stored tensor → its file.
    """

    path: Path
    values: dict[str, Any]
    family: Family
    config: Any
    tensors: dict[str, TensorReader]
    files: dict[str, SafetensorsFile]

    @property
    def at_once(self) -> int:
        """Bytes to read at a time."""
        return max(file.stored.at_once for file in self.files.values())

    @functools.cached_property
    def tables(self) -> tuple[tuple[TensorMapping, ...], tuple[Ignored, ...]]:
        """The family's mappings and ignored tensors, for the tensors of this folder.

        `safetensors.torch.save_model` stores a shared tensor once, and the metadata of the file has
        its other names.
        """
        files = {file.path: file for file in self.files.values()}
        aliases: dict[str, str] = {}
        for file in files.values():
            aliases |= file.metadata
        names, ignored = self.family.tables(self.config, self.tensors, aliases)
        return tuple(_as_stored(names, self.tensors)), ignored

    @functools.cached_property
    def tied_mismatches(self) -> tuple[Problem, ...]:
        """Tied tensors with different values; compared once, chunk by chunk."""
        _, ignored = self.tables
        problems: list[Problem] = []
        for entry in ignored:
            if entry.tensor not in self.files or entry.same_as not in self.files:
                continue
            problem = self._mismatch(entry.tensor, entry.same_as)
            if problem is not None:
                problems.append(problem)
        return tuple(problems)

    @functools.cached_property
    def constant_mismatches(self) -> tuple[Problem, ...]:
        """Constants with a value other than the model's, in their dtype."""
        _, ignored = self.tables
        problems: list[Problem] = []
        for entry in ignored:
            if entry.value is None or entry.tensor not in self.tensors:
                continue
            problem = self._constant_mismatch(entry.tensor, entry.value)
            if problem is not None:
                problems.append(problem)
        return tuple(problems)

    def _constant_mismatch(self, name: str, value: float) -> Problem | None:
        reader = self.tensors[name]
        if math.prod(reader.shape) != 1:
            what = f"has the shape {list(reader.shape)}, and is the constant {value:g}"
            return Problem(_where(name), what)
        found = reader.rows(0, 1, 1, np.empty(reader.dtype.itemsize, np.uint8)).item()
        if found == np.full((), value, reader.dtype).item():
            return None
        return Problem(_where(name), f"is {float(found):g}, and this model has {value:g}")

    def _mismatch(self, name: str, other: str) -> Problem | None:
        a = self.files[name].tensors[name]
        b = self.files[other].tensors[other]
        detail = ""
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            detail = f"it is {a.dtype}{list(a.shape)}, {other} is {b.dtype}{list(b.shape)}"
        elif self._is_equal(name, other):
            return None
        what = f"differs from {other}, and this model ties its head to the embedding"
        fix = (
            "set tie_word_embeddings=false in config.json if the head is separate; "
            "remove the tensor if it is unused"
        )
        return Problem(_where(name), what, detail, fix)

    def _is_equal(self, name: str, other: str) -> bool:
        """Compare the bytes of two tensors of one shape and dtype."""
        size = self.at_once // 2
        chunks = self.files[name].chunks(name, np.empty(size, np.uint8))
        others = self.files[other].chunks(other, np.empty(size, np.uint8))
        return all(np.array_equal(*pair) for pair in zip(chunks, others, strict=True))


@contextlib.contextmanager
def open_folder(location: Location) -> Iterator[HFFolder]:
    """Open a folder; of one in a bucket, files beside the weights are downloaded.

    An error lists all problems of config.json, the index and the header of each file.
    """
    weights: _Weights
    if isinstance(location, BucketPath):
        path = download(location, is_side_file)
        weights = _BucketWeights(location)
    else:
        path = location
        weights = _LocalWeights(path)
    problems = check_local("Hugging Face folder", path)
    if problems:
        raise CheckpointError("Nothing was read:", problems)
    if not path.is_dir():
        fix = "give a local folder; nothing is downloaded"
        problem = Problem(str(path), "is not a folder", fix=fix)
        raise CheckpointError("Nothing was read:", [problem])
    values: dict[str, Any] = {}
    family, config, quantization = None, None, None
    with collect_errors(problems):
        values = _read_json(path, CONFIG, _CONFIG_MAX_BYTES)
        with collect_errors(problems):
            quantization = read_quantization(values)
        family = family_of(architectures_of(values))
        config = family.read_config(_without_quantization(values))
    with contextlib.ExitStack() as stack:
        files: dict[str, SafetensorsFile] = {}
        tensors: dict[str, TensorReader] = {}
        with collect_errors(problems):
            files = _open_files(path, weights, stack, problems)
        if not problems:
            stored = {name: StoredTensor(file, name) for name, file in files.items()}
            tensors = readers_of(stored, quantization, problems)
        with collect_errors(problems):
            if family is not None and not problems:
                config = family.for_tensors(config, tensors)
                problems += _size_problems(family, config, len(tensors))
        if problems or family is None:
            raise _error(location, *first_of(problems))
        yield HFFolder(path, values, family, config, tensors, files)


def _without_quantization(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != FIELD}


def _as_stored(
    names: Iterable[TensorMapping], tensors: Mapping[str, TensorReader]
) -> Iterator[TensorMapping]:
    """Yield mappings with the layouts of the stored tensors: codes of MXFP4 are transposed."""
    transposed = [name for name, tensor in tensors.items() if isinstance(tensor, Mxfp4Tensor)]
    for mapping in names:
        pattern = name_pattern(mapping.tensor)
        examples = filter(pattern.fullmatch, transposed)
        name = next(examples, None)
        if name is None:
            yield mapping
            continue
        layout = mapping.layout.with_last_swapped(len(tensors[name].shape))
        yield dataclasses.replace(mapping, layout=layout)


def architectures_of(values: Mapping[str, Any]) -> list[str]:
    """Return the `architectures` of a config.json; empty if it has no such list."""
    found = values.get("architectures")
    if not isinstance(found, list):
        return []
    return list(map(str, found))


def _error(folder: Location, *problems: Problem) -> CheckpointError:
    return CheckpointError(f"{folder} cannot be read:", problems)


def _size_problems(family: Family, config: Any, tensors: int) -> list[Problem]:
    """Compare layers × experts with the number of tensors.

    It runs before any table of that size is built.
    """
    mappings = family.names(config)
    counts = {"layer": layers_of(config), "expert": experts_of(config)}
    used: dict[str, int] = {}
    for field, count in counts.items():
        if any(f"{{{field}}}" in mapping.tensor for mapping in mappings):
            used[field] = count
    wanted = math.prod(used.values())
    # some layers have no experts, and some tensors are of one layer in several
    if wanted <= _MAX_LAYERS_PER_TENSOR * tensors:
        return []
    product = " × ".join(f"{count} {field}s" for field, count in used.items())
    detail = f"{product} = {wanted} > {tensors} tensors"
    return [Problem(CONFIG, "has more layers and experts than the files have tensors", detail)]


def inside(folder: Path, name: str) -> Path:
    """Resolve a file name in a folder, following permitted links.

    An OSError if the file does not exist.
    """
    if Path(name).name != name:
        raise _error(folder, Problem(name, "is a path, not the name of a file in the folder"))
    try:
        home = folder.resolve()
        real = (folder / name).resolve(strict=True)
    except ValueError as error:  # a null byte, or half of a surrogate pair
        raise _error(folder, Problem(name, "is not a valid file name")) from error
    except RuntimeError as error:  # Python 3.11 raises it for circular links
        raise OSError(str(error)) from error
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if real.parent not in allowed:
        fix = "replace the link with a copy of the file"
        raise _error(folder, Problem(name, f"is a link that leaves the folder, to {real}", fix=fix))
    return real


def _read_json(folder: Path, name: str, max_bytes: int) -> dict[str, Any]:
    try:
        return read_object(inside(folder, name), max_bytes)
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise _error(folder, Problem(name, "is missing")) from error
    except (OSError, ValueError) as error:
        raise _error(folder, Problem(name, f"cannot be read: {error}")) from error


class _Weights(Protocol):
    """Files with weights."""

    def names(self) -> list[str]:
        """Return the names of the files in the folder."""

    def open(self, name: str) -> StoredBytes:
        """Open a file; an OSError or a DamagedBytesError if it cannot be read."""


class _LocalWeights(_Weights):
    """Files in a local folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> list[str]:
        """List the folder."""
        return [file.name for file in self._folder.iterdir()]

    def open(self, name: str) -> StoredBytes:
        """Open a file of the folder, through permitted links."""
        return open_local(inside(self._folder, name))


class _BucketWeights(_Weights):
    """Objects in a bucket."""

    def __init__(self, path: BucketPath) -> None:
        self._objects = Bucket(path)
        self._names = [name for name in self._objects.list() if "/" not in name]

    def names(self) -> list[str]:
        """Return the names from when the folder was opened."""
        return self._names

    def open(self, name: str) -> StoredBytes:
        """Read the header of an object."""
        return BucketBytes(self._objects, name)


def _open_files(
    folder: Path, weights: _Weights, stack: contextlib.ExitStack, problems: list[Problem]
) -> dict[str, SafetensorsFile]:
    """Return tensor → its file, opened."""
    index, names = _weight_files(folder, weights)
    found: dict[str, SafetensorsFile] = {}
    opened: set[str] = set()
    for name in names:
        file = _open_file(weights, name, stack, problems)
        if file is None:
            continue
        opened.add(name)
        if index is not None:
            problems += _misplaced(file, name, index)
        for tensor in file.tensors:
            found.setdefault(tensor, file)
    for tensor, name in (index or {}).items():
        if name in opened and tensor not in found:
            problems.append(Problem(_where(tensor), f"is not in {name}, and {INDEX} maps it there"))
    return found


def _weight_files(folder: Path, weights: _Weights) -> tuple[dict[str, str] | None, list[str]]:
    """Return the index from tensors to files, None if there is one file, and the files' names."""
    names = weights.names()
    if SINGLE in names:
        return None, [SINGLE]
    if INDEX not in names:
        raise _error(folder, *_no_weights(names))
    index = _read_json(folder, INDEX, _INDEX_MAX_BYTES).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise _error(folder, Problem(INDEX, "has no weight_map from tensors to files"))
    return index, sorted(set(index.values()))


def _open_file(
    weights: _Weights, name: str, stack: contextlib.ExitStack, problems: list[Problem]
) -> SafetensorsFile | None:
    """Open a file; return None and report its problems if it cannot be read."""
    if not name.endswith(".safetensors"):
        fix = "only safetensors are supported"
        problems.append(Problem(f"{INDEX}: {name}", "is not a safetensors file", fix=fix))
        return None
    with collect_errors(problems):
        try:
            return stack.enter_context(SafetensorsFile(weights.open(name)))
        except OSError as error:
            problems.append(Problem(name, f"cannot be read: {error.strerror or error}"))
        except DamagedBytesError as error:
            problems.append(Problem(name, str(error), fix="upload the file again"))
    return None


def _misplaced(file: SafetensorsFile, name: str, index: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each tensor of a file with another place in the index."""
    for tensor in file.tensors:
        if index.get(tensor) == name:
            continue
        place = "to no file"
        if tensor in index:
            place = f"to {index[tensor]}"
        yield Problem(_where(tensor), f"is in {name}, and {INDEX} maps it {place}")


def _no_weights(names: Iterable[str]) -> list[Problem]:
    """Return a problem for each file found instead of weights, or one about their absence."""
    what = "is a pickle, and loading it would run code in it; only safetensors are supported"
    fix = "convert it to safetensors if you trust it: model.save_pretrained(folder)"
    pickles = sorted(name for name in names if Path(name).suffix in _PICKLES)
    others = sorted(name for name in names if name.endswith(".safetensors"))
    problems: list[Problem] = []
    for name in pickles:
        problems.append(Problem(name, what, fix=fix))
    for name in others:
        problems.append(Problem(name, f"is neither {SINGLE} nor listed in {INDEX}"))
    return problems or [Problem(SINGLE, f"is missing, and so is {INDEX}")]


def tensor_problems(
    sources: Iterable[TensorSource],
    floats: Mapping[str, bool],
    ignored: Iterable[Ignored],
    found: Mapping[str, TensorReader],
) -> list[Problem]:
    """Return all mismatches between parameters and the tensors found in a folder.

    `floats` maps the path of each parameter to whether it is floating point.
    """
    wanted: dict[str, TensorSource] = {}
    for source in sources:
        for _, name in source.tensors():
            wanted[name] = source
    problems = _missing_and_extra(wanted, tuple(ignored), found)
    for name, source in wanted.items():
        if name in found:
            problems += _misfits(name, found[name], source, floats[source.path])
    return first_of(problems)


def _missing_and_extra(
    wanted: Mapping[str, TensorSource],
    ignored: Iterable[Ignored],
    found: Mapping[str, TensorReader],
) -> list[Problem]:
    missing: dict[str, tuple[int, ...]] = {}
    for name, source in wanted.items():
        if name not in found:
            missing[name] = source.tensor_shape
    extra: dict[str, tuple[int, ...]] = {}
    for name, tensor in found.items():
        if name not in wanted and not any(entry.covers(name) for entry in ignored):
            extra[name] = tensor.shape
    problems: list[Problem] = []
    for name, shape in missing.items():
        what = f"is missing; {wanted[name].path} needs it"
        fix = _rename_hint(name, shape, missing, extra)
        problems.append(Problem(_where(name), what, fix=fix))
    for name, shape in extra.items():
        fix = _rename_hint(name, shape, extra, missing)
        problems.append(Problem(_where(name), "is extra: no parameter uses it", fix=fix))
    return problems


def _where(tensor: str) -> str:
    """Return the place of a problem, unlike a flag such as `model.norm`."""
    return f"tensor {tensor}"


def _rename_hint(
    name: str, shape: tuple[int, ...], names: Collection[str], others: Mapping[str, tuple[int, ...]]
) -> str:
    """Return a hint at the nearest other name, if a rename could be the reason.

    As many tensors must be missing as are extra, and the other one must be of the same shape and
    layer. Too many pairs are not compared.
    """
    if len(names) != len(others) or len(names) * len(others) > _MAX_HINT_PAIRS:
        return ""
    numbers = re.findall(r"\d+", name)
    possible: list[str] = []
    for other, other_shape in others.items():
        if other_shape == shape and re.findall(r"\d+", other) == numbers:
            possible.append(other)
    close = difflib.get_close_matches(name, possible, n=1)
    if not close:
        return ""
    return f'there is "{close[0]}" of the same shape: was it renamed?'


def _misfits(
    name: str, tensor: TensorReader, source: TensorSource, is_float: bool
) -> Iterator[Problem]:
    """Compare the shape and the kind of dtype of a tensor with its parameter."""
    where = f"for {source.path} {list(source.shape)}"
    if tensor.shape != source.tensor_shape:
        detail = f"it is {list(tensor.shape)}, expected {list(source.tensor_shape)} {where}"
        yield Problem(_where(name), "has the wrong shape", detail)
    if jnp.issubdtype(tensor.dtype, jnp.floating) != is_float:
        yield Problem(_where(name), "has the wrong kind of dtype", f"it is {tensor.dtype}, {where}")
