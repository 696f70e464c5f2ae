"""A folder in the layout of `save_pretrained`: config.json, safetensors files, and an index if there are several.

The folder is not trusted. Files are parsed, never executed: pickles are refused. Links are followed
only within the folder, or to `blobs` of the hub's cache if the folder is a snapshot of it
(`…/snapshots/REVISION`).
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
from spmd.hf.family import Family, Ignored, TensorMapping, TensorSource, family_of
from spmd.hf.fields import collect_errors
from spmd.hf.safetensors import SafetensorsFile, Tensor

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_CONFIG_MAX_BYTES = 16 << 20
_INDEX_MAX_BYTES = 64 << 20
_PICKLES = frozenset({".bin", ".pt", ".pth", ".pkl", ".ckpt"})
_MAX_HINT_PAIRS = 10_000
_COMPARE_BYTES = 2 << 20


@dataclasses.dataclass(frozen=True)
class HFFolder:
    """An opened Hugging Face folder: content of config.json, model config, and the file of each tensor."""

    path: Path
    values: dict[str, Any]
    family: Family
    config: Any
    files: dict[str, SafetensorsFile]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Location of each tensor."""
        return {name: file.tensors[name] for name, file in self.files.items()}

    @functools.cached_property
    def tables(self) -> tuple[tuple[TensorMapping, ...], tuple[Ignored, ...]]:
        """The family's mappings and ignored tensors, for the tensors of this folder.

        `safetensors.torch.save_model` stores a shared tensor once, and the metadata of the file has
        its other names.
        """
        aliases = dict[str, str]()
        for file in {file.path: file for file in self.files.values()}.values():
            aliases |= file.metadata
        return self.family.tables(self.config, self.files, aliases)

    @functools.cached_property
    def tied_mismatches(self) -> tuple[Problem, ...]:
        """Tensors that must equal another one and do not; compared once, chunk by chunk."""
        _, ignored = self.tables
        pairs = [(entry.tensor, entry.same_as) for entry in ignored]
        mismatches = (self._mismatch(*pair) for pair in pairs if self.files.keys() >= {*pair})
        return tuple(problem for problem in mismatches if problem is not None)

    def _mismatch(self, name: str, other: str) -> Problem | None:
        a, b = (self.files[n].tensors[n] for n in (name, other))
        detail = ""
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            detail = f"it is {a.dtype}{list(a.shape)}, {other} is {b.dtype}{list(b.shape)}"
        else:
            chunks = (
                self.files[n].chunks(n, np.empty(_COMPARE_BYTES, np.uint8)) for n in (name, other)
            )
            if all(np.array_equal(*pair) for pair in zip(*chunks, strict=True)):
                return None
        what = f"differs from {other}, and this model ties its head to the embedding"
        fix = "set tie_word_embeddings=false in config.json if the head is separate; remove the tensor if it is unused"
        return Problem(name, what, detail, fix)


@contextlib.contextmanager
def open_folder(path: Path) -> Iterator[HFFolder]:
    """Open a folder.

    An error lists all problems of config.json, the index and the header of each file.
    """
    problems: list[Problem] = []
    if not path.is_dir():
        problem = Problem(
            str(path), "is not a folder", fix="give a local folder; nothing is downloaded"
        )
        raise CheckpointError("Nothing was read:", [problem])
    values: dict[str, Any] = {}
    family, config = None, None
    with collect_errors(problems):
        values = _read_json(path, CONFIG, _CONFIG_MAX_BYTES)
        family = family_of(architectures_of(values))
        config = family.read_config(values)
    with contextlib.ExitStack() as stack:
        files: dict[str, SafetensorsFile] = {}
        with collect_errors(problems):
            files = _open_files(path, stack, problems)
            if family is not None and not problems:
                problems += _size_problems(family, config, len(files))
        if problems or family is None:
            raise _error(path, *first_of(problems))
        yield HFFolder(path, values, family, config, files)


def architectures_of(values: Mapping[str, Any]) -> list[str]:
    """Return the `architectures` of a config.json; empty if it has no such list."""
    found = values.get("architectures")
    return list(map(str, found)) if isinstance(found, list) else []


def _error(folder: Path, *problems: Problem) -> CheckpointError:
    return CheckpointError(f"{folder} cannot be read:", problems)


def _size_problems(family: Family, config: Any, tensors: int) -> list[Problem]:
    """Compare layers × experts with the number of tensors, before any table of that size is built."""
    names = [mapping.tensor for mapping in family.names(config)]
    counts = {
        "layer": getattr(config, "layers", 1),
        "expert": getattr(getattr(config, "router", None), "experts", 1),
    }
    used = {
        field: count
        for field, count in counts.items()
        if any(f"{{{field}}}" in name for name in names)
    }
    if (wanted := math.prod(used.values())) <= tensors:
        return []
    detail = f"{' × '.join(f'{count} {field}s' for field, count in used.items())} = {wanted} > {tensors} tensors"
    return [Problem(CONFIG, "has more layers and experts than the files have tensors", detail)]


def inside(folder: Path, name: str) -> Path:
    """Resolve a file name in a folder, following permitted links.

    An OSError if the file does not exist.
    """
    if Path(name).name != name:
        raise _error(folder, Problem(name, "is a path, not the name of a file in the folder"))
    try:
        home, real = folder.resolve(), (folder / name).resolve(strict=True)
    except ValueError as error:  # a null byte, or half of a surrogate pair
        raise _error(folder, Problem(name, "is not a valid file name")) from error
    except RuntimeError as error:  # Python 3.11 raises it for circular links
        raise OSError(str(error)) from error
    cache = [home.parent.parent / "blobs"] if home.parent.name == "snapshots" else []
    if real.parent not in (home, *cache):
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


def _open_files(
    folder: Path, stack: contextlib.ExitStack, problems: list[Problem]
) -> dict[str, SafetensorsFile]:
    """Return tensor → the opened file that contains it."""
    if (folder / SINGLE).exists():
        index, names = None, [SINGLE]
    elif (folder / INDEX).exists():
        index = _read_json(folder, INDEX, _INDEX_MAX_BYTES).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise _error(folder, Problem(INDEX, "has no weight_map from tensors to files"))
        names = sorted(set(index.values()))
    else:
        raise _error(folder, *_no_weights(folder))
    found: dict[str, SafetensorsFile] = {}
    opened = set()
    for name in names:
        if not name.endswith(".safetensors"):
            where, fix = f"{INDEX}: {name}", "only safetensors are supported"
            problems.append(Problem(where, "is not a safetensors file", fix=fix))
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
                    place = f"to {index[tensor]}" if tensor in index else "to no file"
                    problems.append(Problem(tensor, f"is in {name}, and {INDEX} maps it {place}"))
                found.setdefault(tensor, file)
    for tensor, name in (index or {}).items():
        if name in opened and tensor not in found:
            problems.append(Problem(tensor, f"is not in {name}, and {INDEX} maps it there"))
    return found


def _no_weights(folder: Path) -> list[Problem]:
    """Return problems that name the files found instead of weights."""
    what = "is a pickle, and loading it would run code in it; only safetensors are supported"
    fix = "convert it to safetensors if you trust it: model.save_pretrained(folder)"
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES)
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    problems = [Problem(name, what, fix=fix) for name in pickles]
    problems += [Problem(name, f"is neither {SINGLE} nor listed in {INDEX}") for name in others]
    return problems or [Problem(SINGLE, f"is missing, and so is {INDEX}")]


def tensor_problems(
    sources: Iterable[TensorSource],
    floats: Mapping[str, bool],
    ignored: Iterable[Ignored],
    found: Mapping[str, Tensor],
) -> list[Problem]:
    """Return all mismatches between the tensors found in a folder and those that parameters need.

    `floats` maps the path of each parameter to whether it is floating point.
    """
    wanted = {name: source for source in sources for _, name in source.tensors()}
    missing = [name for name in wanted if name not in found]
    rest = [name for name in found if name not in wanted]
    extra = [name for name in rest if not any(entry.covers(name) for entry in ignored)]
    hints = len(missing) * len(extra) <= _MAX_HINT_PAIRS

    def hint(name: str, others: list[str]) -> str:
        close = difflib.get_close_matches(name, others, n=1) if hints else []
        return f'there is "{close[0]}": was it renamed?' if close else ""

    problems = [
        Problem(name, f"is missing; {wanted[name].path} needs it", fix=hint(name, extra))
        for name in missing
    ]
    problems += [
        Problem(name, "is extra: no parameter uses it", fix=hint(name, missing)) for name in extra
    ]
    for name, source in wanted.items():
        if name not in found:
            continue
        tensor, where = found[name], f"for {source.path} {list(source.shape)}"
        if tensor.shape != source.tensor_shape:
            detail = f"it is {list(tensor.shape)}, expected {list(source.tensor_shape)} {where}"
            problems.append(Problem(name, "has the wrong shape", detail))
        if jnp.issubdtype(tensor.dtype, jnp.floating) != floats[source.path]:
            problems.append(
                Problem(name, "has the wrong kind of dtype", f"it is {tensor.dtype}, {where}")
            )
    return first_of(problems)
