"""A folder as `save_pretrained` writes it: config.json, safetensors files, and an index where there are several.

Every file of it comes from elsewhere. They are parsed, never executed: only safetensors are read, and a folder that has
its weights as pickles alone is refused. A link is followed where it leads to the folder itself or to the `blobs` of the
hub's cache that the folder is a snapshot of (`…/snapshots/REVISION`), and nowhere else.
"""

import contextlib
import dataclasses
import difflib
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from spmd.checkpoint.manifest import read_object
from spmd.errors import CheckpointError, Problem, first_of
from spmd.hf.family import Family, Ignored, TensorSource, family_of
from spmd.hf.fields import collect_errors
from spmd.hf.safetensors import SafetensorsFile, Tensor

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_CONFIG_AT_MOST = 16 << 20
_INDEX_AT_MOST = 64 << 20
_PICKLES = frozenset({".bin", ".pt", ".pth", ".pkl", ".ckpt"})
_HINTS_AT_MOST = 10_000
_COMPARED_AT_ONCE = 2 << 20


@dataclasses.dataclass(frozen=True)
class HFFolder:
    """A folder whose headers have been read.

    Attributes:
        path: The folder.
        values: What config.json says.
        family: The model's family.
        config: The model's shape.
        files: Tensor → the file that it is in.
    """

    path: Path
    values: dict[str, Any]
    family: Family
    config: Any
    files: dict[str, SafetensorsFile]

    def tensor(self, name: str) -> Tensor:
        """What the tensor of that name is."""
        return self.files[name].tensors[name]

    @functools.cached_property
    def copies(self) -> tuple[Problem, ...]:
        """Tensors that must be another one once more and are not; they are read once, a piece at a time."""
        _, ignored = self.family.lines(self.config, self.files)
        pairs = [(line.tensor, line.same_as) for line in ignored if {line.tensor, line.same_as} <= self.files.keys()]
        return tuple(problem for pair in pairs if (problem := self._difference(*pair)) is not None)

    def _difference(self, name: str, other: str) -> Problem | None:
        ours, theirs = self.tensor(name), self.tensor(other)
        what = f"differs from {other}, and this model's head is the embedding"
        fix = "tie_word_embeddings=false in config.json if the head is its own; take the tensor out if it is not used"
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            arithmetic = f"it is {ours.dtype}{list(ours.shape)}, {other} is {theirs.dtype}{list(theirs.shape)}"
            return Problem(name, what, arithmetic, fix)
        both = (self.files[n].chunks(n, np.empty(_COMPARED_AT_ONCE, np.uint8)) for n in (name, other))
        if all(np.array_equal(a, b) for a, b in zip(*both, strict=True)):
            return None
        return Problem(name, what, fix=fix)


@contextlib.contextmanager
def open_folder(path: Path) -> Iterator[HFFolder]:
    """Opens a folder; its files are closed at the end.

    Args:
        path: The folder.

    Raises:
        CheckpointError: Everything that is wrong with it: config.json, the index, the header of every file.
    """
    problems: list[Problem] = []
    if not path.is_dir():
        fix = "give a folder that is on this machine; nothing is downloaded"
        raise CheckpointError("Nothing was read:", [Problem(str(path), "is no folder", fix=fix)])
    values: dict[str, Any] = {}
    family, config = None, None
    with collect_errors(problems):
        values = _read_json(path, CONFIG, _CONFIG_AT_MOST)
        named = values.get("architectures")
        family = family_of(map(str, named) if isinstance(named, list) else ())
        config = family.read_config(values)
    with contextlib.ExitStack() as stack:
        files: dict[str, SafetensorsFile] = {}
        with collect_errors(problems):
            files = _open_all(path, stack, problems)
            if family is not None and not problems:
                problems += _size_problems(family, config, len(files))
        if problems or family is None:
            raise CheckpointError(f"{path} cannot be read:", first_of(problems))
        yield HFFolder(path, values, family, config, files)


def _size_problems(family: Family, config: Any, tensors: int) -> list[Problem]:
    """Whether config.json counts more layers and experts than there are tensors; no table of that size is built."""
    names = [line.tensor for line in family.names(config)]
    counts = {"layer": getattr(config, "layers", 1), "expert": getattr(getattr(config, "router", None), "experts", 1)}
    said = {field: count for field, count in counts.items() if any(f"{{{field}}}" in name for name in names)}
    if (wanted := math.prod(said.values())) <= tensors:
        return []
    arithmetic = f"{' × '.join(f'{count} {field}s' for field, count in said.items())} = {wanted} > {tensors} tensors"
    return [Problem(CONFIG, "counts more layers and experts than the files have tensors", arithmetic)]


def inside(folder: Path, name: str) -> Path:
    """The file of that name, with links followed as far as they may lead.

    Raises:
        CheckpointError: The name is a path, or the file leads elsewhere.
        OSError: There is no such file.
    """
    if Path(name).name != name:
        what = "is a path, and the name of a file in the folder is wanted"
        raise CheckpointError(f"{folder} cannot be read:", [Problem(name, what)])
    try:
        home, real = folder.resolve(), (folder / name).resolve(strict=True)
    except ValueError as error:  # a zero byte, or half of a character
        problem = Problem(name, "is no name that a file can have")
        raise CheckpointError(f"{folder} cannot be read:", [problem]) from error
    except RuntimeError as error:  # Python 3.11, where links go round in a circle
        raise OSError(str(error)) from error
    cache = [home.parent.parent / "blobs"] if home.parent.name == "snapshots" else []
    if real.parent not in (home, *cache):
        fix = "put a copy in its place"
        raise CheckpointError(
            f"{folder} cannot be read:", [Problem(name, f"leads out of the folder, to {real}", fix=fix)]
        )
    return real


def _read_json(folder: Path, name: str, at_most: int) -> dict[str, Any]:
    try:
        return read_object(inside(folder, name), at_most)
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} cannot be read:", [Problem(name, "is missing")]) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} cannot be read:", [Problem(name, f"cannot be read: {error}")]) from error


def _open_all(folder: Path, stack: contextlib.ExitStack, problems: list[Problem]) -> dict[str, SafetensorsFile]:
    """Tensor → the open file that it is in.

    Raises:
        CheckpointError: There are no weights, or an index that says nothing.
    """
    if (folder / SINGLE).exists():
        index, names = None, [SINGLE]
    elif (folder / INDEX).exists():
        index = _read_json(folder, INDEX, _INDEX_AT_MOST).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            what = "has no weight_map from tensors to files"
            raise CheckpointError(f"{folder} cannot be read:", [Problem(INDEX, what)])
        names = sorted(set(index.values()))
    else:
        raise CheckpointError(f"{folder} cannot be read:", _without_weights(folder))
    found: dict[str, SafetensorsFile] = {}
    opened = set()
    for name in names:
        if not name.endswith(".safetensors"):
            problems.append(Problem(f"{INDEX}: {name}", "is no safetensors file", fix="only safetensors are read"))
            continue
        with collect_errors(problems):
            try:
                file = stack.enter_context(SafetensorsFile(inside(folder, name)))
            except OSError as error:
                problems.append(Problem(name, f"cannot be read: {error.strerror or error}"))
                continue
            opened.add(name)
            for tensor in file.tensors:
                if index is not None and index.get(tensor) != name:
                    says = f"in {index[tensor]}" if tensor in index else "nowhere"
                    problems.append(Problem(tensor, f"is in {name}, and {INDEX} has it {says}"))
                found.setdefault(tensor, file)
    for tensor, name in (index or {}).items():
        if name in opened and tensor not in found:
            problems.append(Problem(tensor, f"is not in {name}, where {INDEX} has it"))
    return found


def _without_weights(folder: Path) -> list[Problem]:
    """What a folder holds instead of weights."""
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES)
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    fix = "save it as safetensors where you trust it: model.save_pretrained(folder)"
    problems = [
        Problem(name, "is a pickle, and reading it would run the code in it; only safetensors are read", fix=fix)
        for name in pickles
    ]
    problems += [Problem(name, f"is neither {SINGLE} nor in an index {INDEX}") for name in others]
    return problems or [Problem(SINGLE, f"is missing, and so is {INDEX}")]


def tensor_problems(
    sources: Iterable[TensorSource], floats: Mapping[str, bool], ignored: Iterable[Ignored], found: Mapping[str, Tensor]
) -> list[Problem]:
    """Everything that keeps the tensors of a folder from being the parameters of a model.

    Args:
        sources: What each parameter is made of.
        floats: Path → whether the parameter is of floating point.
        ignored: What else there may be.
        found: The tensors that are there.
    """
    wanted = {name: source for source in sources for _, name in source.tensors()}
    missing = [name for name in wanted if name not in found]
    rest = [name for name in found if name not in wanted]
    extra = [name for name in rest if not any(line.covers(name) for line in ignored)]
    hints = len(missing) * len(extra) <= _HINTS_AT_MOST

    def near(name: str, others: list[str]) -> str:
        close = difflib.get_close_matches(name, others, n=1) if hints else []
        return f'there is "{close[0]}": was it renamed?' if close else ""

    problems = [
        Problem(name, f"is missing: {wanted[name].path} is made of it", fix=near(name, extra)) for name in missing
    ]
    problems += [Problem(name, "is extra: no parameter is made of it", fix=near(name, missing)) for name in extra]
    for name, source in wanted.items():
        if name not in found:
            continue
        tensor, where = found[name], f"for {source.path} {list(source.shape)}"
        if tensor.shape != source.stored:
            arithmetic = f"it is {list(tensor.shape)}, and {list(source.stored)} is wanted {where}"
            problems.append(Problem(name, "has another shape", arithmetic))
        if jnp.issubdtype(tensor.dtype, jnp.floating) != floats[source.path]:
            problems.append(Problem(name, "has another kind of dtype", f"it is {tensor.dtype}, {where}"))
    return first_of(problems)
