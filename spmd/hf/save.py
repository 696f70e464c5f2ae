"""Save parameters as a Hugging Face folder, one tensor at a time on the host."""

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

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

_Parts = list[tuple[TensorSource, tuple[int, ...]]]
"""The parameters concatenated in a tensor, each with its index into its stack."""
_Specs = dict[str, jax.ShapeDtypeStruct]


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
    """Write a folder that `transformers` loads; it appears complete or not at all.

    Args:
        out: The folder; it must not exist.
        dtype: The tensors' dtype; None for that of each parameter.
        shard_size: Maximum bytes of a file; a larger tensor gets a file of its own.
        files: Name → file to copy into the folder.
        values: The original config.json; its fields that do not change the model are copied.
    """
    if out.exists():
        raise CheckpointError(
            "Nothing was exported:", [Problem(str(out), "exists", fix="choose another --out")]
        )
    leaves = tree.flatten(params)
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    tensors = _tensors(tensor_sources(family.names(config), shapes).values())
    specs = {
        name: jax.ShapeDtypeStruct(
            parts[0][0].tensor_shape, dtype or leaves[parts[0][0].path].dtype
        )
        for name, parts in tensors.items()
    }
    shards, needed = _split_into_files(specs, shard_size), sum(map(_nbytes, specs.values()))
    existing = next(folder for folder in out.absolute().parents if folder.exists())
    if (free := shutil.disk_usage(existing).free) < needed:
        detail = f"{human_bytes(needed)} to write, {human_bytes(free)} free"
        raise CheckpointError(
            "Nothing was exported:", [Problem(str(out), "does not fit on the disk", detail)]
        )
    harmless = HARMLESS.union(family.harmless) - {"dtype"}
    copied = {name: value for name, value in (values or {}).items() if name in harmless}
    main_dtype = collections.Counter(str(spec.dtype) for spec in specs.values()).most_common(1)[0][
        0
    ]
    written = {
        "architectures": [family.architectures[0]],
        "torch_dtype": main_dtype,
        **family.write_config(config),
    }
    with whole_folder(out) as folder:
        for name, shard in shards.items():
            arrays = (
                _to_host(tensors[tensor], leaves, spec.dtype) for tensor, spec in shard.items()
            )
            write_safetensors(folder / name, shard, arrays, {"format": "pt"})
        if list(shards) != [SINGLE]:
            index = {tensor: name for name, shard in shards.items() for tensor in shard}
            write_json(folder / INDEX, {"metadata": {"total_size": needed}, "weight_map": index})
        write_json(folder / CONFIG, copied | written)
        for name, file in (files or {}).items():
            shutil.copyfile(file, folder / name)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Write a folder as `path.unfinished`, which must not exist, and rename it to `path` once complete.

    After an error it is removed.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        unfinished.mkdir(parents=True)
    except FileExistsError as error:
        what = "exists: another process writes it, or an interrupted one left it"
        problem = Problem(str(unfinished), what, fix="remove it if no process writes it")
        raise CheckpointError("Nothing was written:", [problem]) from error
    except OSError as error:
        raise _write_error(path, error) from error
    try:
        yield unfinished
        for file in (*filter(Path.is_file, unfinished.iterdir()), unfinished):
            sync(file)
        unfinished.rename(path)
        sync(path.absolute().parent)
    except OSError as error:
        raise _write_error(path, error) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_error(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        "Nothing was written:", [Problem(str(path), error.strerror or str(error))]
    )


def parse_size(text: str) -> int:
    """Parse a number of bytes such as `5GB`.

    Example:
        >>> parse_size("1.5MB")
        1500000
    """
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)([KMGT]B)", text)
    size = int(float(found[1]) * UNITS[found[2]]) if found else 0
    if size < 1:
        problem = Problem(text, "is not a number of bytes", fix="such as 5GB or 500MB")
        raise ConfigError("Invalid size:", [problem])
    return size


def _tensors(sources: Iterable[TensorSource]) -> dict[str, _Parts]:
    """Return tensor → its parts in order.

    Tensors are in natural order (layer 2 before layer 10).
    """
    found: dict[str, _Parts] = {}
    for source in sources:
        for index, name in source.tensors():
            found.setdefault(name, []).append((source, index))
    problems = []
    for name, parts in found.items():
        parts.sort(key=lambda part: part[0].mapping.layout.index)
        indices, expected = (
            [source.mapping.layout.index for source, _ in parts],
            parts[0][0].mapping.layout.parts,
        )
        if indices != list(range(expected)):
            what = f"has {expected} parts, and the name map has only {indices}"
            problems.append(Problem(name, what, fix="add a mapping for each part"))
    if problems:
        raise ConfigError("Invalid name map:", problems)
    natural = {
        name: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", name)] for name in found
    }
    return {name: found[name] for name in sorted(found, key=lambda name: natural[name])}


def _split_into_files(specs: _Specs, max_bytes: int) -> dict[str, _Specs]:
    shards: list[_Specs] = [{}]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + _nbytes(spec) > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = spec
        size += _nbytes(spec)
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {
        f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)
    }


def _to_host(parts: _Parts, leaves: Mapping[str, jax.Array], dtype: Any) -> np.ndarray:
    arrays = [host_slice(leaves[source.path], index, dtype) for source, index in parts]
    joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=-1)
    return joined.T if parts[0][0].mapping.layout.transposed else joined


def host_slice(array: jax.Array, index: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return the element at an index of the leading dimensions, cast to `dtype`, in host memory."""
    return np.asarray(_take(array, np.array(index, np.int32), dtype))


@functools.partial(jax.jit, static_argnums=2)
def _take(array: jax.Array, index: jax.Array, dtype: Any) -> jax.Array:
    """Return the element at an index of the leading dimensions, cast to `dtype`."""
    for dim in range(index.shape[0]):
        array = jax.lax.dynamic_index_in_dim(array, index[dim], keepdims=False)
    return array.astype(dtype)


def _nbytes(spec: jax.ShapeDtypeStruct) -> int:
    return math.prod(spec.shape) * np.dtype(spec.dtype).itemsize


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file that people can read."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
