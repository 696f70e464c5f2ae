"""Parameters into a Hugging Face folder, one tensor at a time on the host."""

import collections
import contextlib
import functools
import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmd import tree
from spmd.checkpoint.manifest import sync
from spmd.errors import CheckpointError, ConfigError, Problem
from spmd.hf.family import Family, TensorSource, tensor_sources
from spmd.hf.fields import HARMLESS
from spmd.hf.folder import CONFIG, INDEX, SINGLE
from spmd.hf.safetensors import write_safetensors
from spmd.tree import human_bytes

UNFINISHED = ".unfinished"
"""What the name of a folder ends in while it is written."""

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
"""What sizes are written in."""

_Pieces = list[tuple[TensorSource, tuple[int, ...]]]
"""The parameters that a tensor is made of, side by side, each with its place in its stack."""


def save_params(
    out: Path,
    params: Any,
    family: Family,
    config: Any,
    *,
    dtype: Any = None,
    shard_size: int = 5 * UNITS["GB"],
    files: Mapping[str, Path] | None = None,
    values: Mapping[str, Any] | None = None,
) -> None:
    """Writes a folder that `transformers` loads; it is there whole or not at all.

    Args:
        out: The folder; it must not exist.
        params: The parameters, arrays on devices of this process.
        family: What they are written as.
        config: The model's shape.
        dtype: Of the tensors; None for that of each parameter.
        shard_size: Bytes that a file may have; a larger tensor has a file of its own.
        files: Name → file that is copied.
        values: The config.json that it once had: what changes nothing in the model is taken from there.

    Raises:
        CheckpointError: `out` exists, there is no room for it, or it cannot be written.
        ConfigError: The family's table does not fit the parameters.
    """
    if out.exists():
        raise CheckpointError("Nothing was exported:", [Problem(str(out), "exists", fix="another --out")])
    leaves = tree.flatten(params)
    tensors = _tensors(
        tensor_sources(family.names(config), {path: leaf.shape for path, leaf in leaves.items()}).values()
    )
    kinds = {
        name: jax.ShapeDtypeStruct(pieces[0][0].stored, dtype or leaves[pieces[0][0].path].dtype)
        for name, pieces in tensors.items()
    }
    parts, needed = _in_files(kinds, shard_size), sum(map(_bytes, kinds.values()))
    if (free := _free(out)) < needed:
        arithmetic = f"{human_bytes(needed)} to write, {human_bytes(free)} free"
        raise CheckpointError("Nothing was exported:", [Problem(str(out), "has too little room", arithmetic)])
    harmless = HARMLESS.union(family.kept) - {"dtype"}
    kept = {name: value for name, value in (values or {}).items() if name in harmless}
    kind = collections.Counter(str(kind.dtype) for kind in kinds.values()).most_common(1)[0][0]
    about = {"architectures": [family.architectures[0]], "torch_dtype": kind, **family.write_config(config)}
    with whole_folder(out) as folder:
        for name, part in parts.items():
            values_of = (_value(tensors[tensor], leaves, kind.dtype) for tensor, kind in part.items())
            write_safetensors(folder / name, part, values_of, {"format": "pt"})
        if list(parts) != [SINGLE]:
            index = {tensor: name for name, part in parts.items() for tensor in part}
            _write_json(folder / INDEX, {"metadata": {"total_size": needed}, "weight_map": index})
        _write_json(folder / CONFIG, {**kept, **about})
        for name, file in (files or {}).items():
            shutil.copyfile(file, folder / name)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to write to, which gets its name when all of it is written; an error leaves nothing behind.

    Args:
        path: The name; until then, `path.unfinished`.

    Raises:
        CheckpointError: It cannot be written, or `path.unfinished` exists.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        unfinished.mkdir(parents=True)
    except FileExistsError as error:
        fix = "remove it, if nothing writes there"
        problem = Problem(str(unfinished), "is what an interrupted attempt has left, or another one writes", fix=fix)
        raise CheckpointError("Nothing was written:", [problem]) from error
    except OSError as error:
        raise CheckpointError("Nothing was written:", [Problem(str(path), error.strerror or str(error))]) from error
    try:
        yield unfinished
        for file in (*filter(Path.is_file, unfinished.iterdir()), unfinished):
            sync(file)
        unfinished.rename(path)
        sync(path.absolute().parent)
    except OSError as error:
        raise CheckpointError("Nothing was written:", [Problem(str(path), error.strerror or str(error))]) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def parse_size(text: str) -> int:
    """Bytes, written as `5GB`.

    Raises:
        ConfigError: It is no size, or not above 0.

    Example:
        >>> parse_size("1.5MB")
        1500000
    """
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)([KMGT]B)", text)
    size = int(float(found[1]) * UNITS[found[2]]) if found else 0
    if size < 1:
        raise ConfigError("This is no size:", [Problem(text, "is no number of bytes", fix="such as 5GB or 500MB")])
    return size


def _tensors(table: Iterable[TensorSource]) -> dict[str, _Pieces]:
    """Tensor → its pieces in their order; tensors are sorted as people count, layer 2 before layer 10.

    Raises:
        ConfigError: Parts of a tensor that no parameter is.
    """
    found: dict[str, _Pieces] = {}
    for source in table:
        for place, name in source.tensors():
            found.setdefault(name, []).append((source, place))
    problems = []
    for name, pieces in found.items():
        pieces.sort(key=lambda piece: piece[0].name.how.number)
        numbers = [source.name.how.number for source, _ in pieces]
        if numbers != list(range(pieces[0][0].name.how.parts)):
            what = f"is made of the parts {numbers} of {pieces[0][0].name.how.parts}"
            problems.append(Problem(name, what, fix="a line for each part in the name map"))
    if problems:
        raise ConfigError("The name map cannot be written:", problems)
    return dict(sorted(found.items(), key=lambda item: [int(p) if p.isdigit() else p for p in _split(item[0])]))


def _split(name: str) -> list[str]:
    """Text and digits of a name in turns, text first."""
    return re.split(r"(\d+)", name)


def _in_files(kinds: Mapping[str, jax.ShapeDtypeStruct], at_most: int) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """File → its tensors."""
    parts: list[dict[str, jax.ShapeDtypeStruct]] = [{}]
    size = 0
    for name, kind in kinds.items():
        if parts[-1] and size + _bytes(kind) > at_most:
            parts.append({})
            size = 0
        parts[-1][name] = kind
        size += _bytes(kind)
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{i:05}-of-{len(parts):05}.safetensors": part for i, part in enumerate(parts, 1)}


def _value(pieces: _Pieces, leaves: Mapping[str, jax.Array], dtype: Any) -> np.ndarray:
    """One tensor on the host."""
    arrays = [np.asarray(_take(leaves[source.path], np.array(place, np.int32), dtype)) for source, place in pieces]
    joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=-1)
    return joined.T if pieces[0][0].name.how.transposed else joined


@functools.partial(jax.jit, static_argnums=2)
def _take(array: jax.Array, place: jax.Array, dtype: Any) -> jax.Array:
    """What is at a place of a stack, as that dtype."""
    for number in range(place.shape[0]):
        array = jax.lax.dynamic_index_in_dim(array, place[number], keepdims=False)
    return array.astype(dtype)


def _bytes(kind: jax.ShapeDtypeStruct) -> int:
    return math.prod(kind.shape) * np.dtype(kind.dtype).itemsize


def _free(path: Path) -> int:
    """Bytes free where a folder is to be."""
    there = next(place for place in path.absolute().parents if place.exists())
    return shutil.disk_usage(there).free


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
