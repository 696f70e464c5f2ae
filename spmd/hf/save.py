"""Save parameters as a Hugging Face folder, one tensor at a time on the host."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.checkpoint.manifest import sync
from spmd.distributed.hosts import run_on_first
from spmd.errors import (
    CheckpointError,
    ConfigError,
    Problem,
    SpmdError,
    check_local,
    first_of,
)
from spmd.hf.family import Family, Ignored, TensorSource, tensor_sources
from spmd.hf.fields import HARMLESS
from spmd.hf.folder import CONFIG, INDEX, SINGLE, HFFolder
from spmd.hf.layout import TensorLayout
from spmd.hf.quantization import FIELD, DequantizedTensor, has_values, read_whole
from spmd.hf.safetensors import write_safetensors
from spmd.tree import human_bytes

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

_Parts = list[tuple[TensorSource, tuple[int, ...]]]
"""The parameters concatenated in a tensor, each with its index into its stack."""
_Specs = dict[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True)
class _Output:
    """Tensor of a file to write; all processes make its value together."""

    spec: jax.ShapeDtypeStruct
    make: Callable[[], np.ndarray]


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
    variables: Mapping[str, Any] | None = None,
    quantized: HFFolder | None = None,
) -> None:
    """Write a folder for `transformers`; it appears complete or not at all.

    Of several processes, all make this call, each with its shards of the parameters. They gather
    one tensor at a time, and process 0 writes it.

    Args:
        out: The folder; it must not exist.
        dtype: The tensors' dtype; None for that of each parameter.
        shard_size: Maximum bytes of a file; a larger tensor gets a file of its own.
        files: Name → file to copy into the folder.
        values: The original config.json; its fields that do not change the model are copied.
        variables: Variables in the name map, such as biases of routers; they keep their dtype.
        quantized: A checkpoint whose codes and scales are written in place of values; it must have
            the same values.

    Raises:
        CheckpointError: The folder exists, the disk is full, or a value differs from `quantized`.
    """
    run_on_first(functools.partial(check_absent, out))
    leaves = tree.flatten(params) | tree.flatten(variables or {})
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    names = family.names(config)
    if quantized is not None:
        _check_same_model(family, config, quantized)
        names, _ = quantized.tables  # of the layouts of codes
    tensors = _tensors(tensor_sources(names, shapes).values())
    outputs = _outputs(tensors, leaves, dtype)
    dtypes = collections.Counter(str(output.spec.dtype) for output in outputs.values())
    outputs |= _constants(family.ignored(config), _main_dtype(dtypes))
    config_values = _config_values(family, config, dtypes, values or {})
    if quantized is not None:
        outputs = _with_codes(outputs, tensors, leaves, quantized)
        config_values[FIELD] = quantized.values[FIELD]
    specs = {name: output.spec for name, output in outputs.items()}
    shards = _split_into_files(specs, shard_size)
    needed = sum(map(_nbytes, specs.values()))
    run_on_first(functools.partial(_check_disk_space, out, needed))

    def write(arrays: Iterator[np.ndarray]) -> None:
        with whole_folder(out) as folder:
            for name, shard in shards.items():
                values_of_file = itertools.islice(arrays, len(shard))
                write_safetensors(folder / name, shard, values_of_file, {"format": "pt"})
            if list(shards) != [SINGLE]:
                write_json(folder / INDEX, _index(shards, needed))
            write_json(folder / CONFIG, config_values)
            for name, file in (files or {}).items():
                shutil.copyfile(file, folder / name)

    made = (outputs[name].make() for shard in shards.values() for name in shard)
    gather_and_write(made, write)


def check_absent(out: Path) -> None:
    """Raise `CheckpointError` if the folder to export to exists."""
    if out.exists():
        problem = Problem(str(out), "exists", fix="choose another --out")
        raise CheckpointError("Nothing was exported:", [problem])


def gather_and_write(
    arrays: Iterator[np.ndarray], write: Callable[[Iterator[np.ndarray]], None]
) -> None:
    """Let process 0 write arrays that all processes gather; raise its error on all of them.

    Args:
        arrays: Each array is gathered when it is requested, so all processes request all of them.
    """
    # outside of `run_on_first`, as process 0 writes while the others gather
    failed: list[SpmdError] = []
    if jax.process_index() == 0:
        try:
            write(arrays)
        except SpmdError as error:
            failed.append(error)
    if jax.process_count() > 1:
        collections.deque(arrays, maxlen=0)
    run_on_first(functools.partial(_raise_first, failed))


def _raise_first(errors: Sequence[SpmdError]) -> None:
    for error in errors:
        raise error


def _outputs(
    tensors: Mapping[str, _Parts], leaves: Mapping[str, jax.Array], dtype: Any
) -> dict[str, _Output]:
    """Return the tensors to write, of parameters and variables."""
    outputs: dict[str, _Output] = {}
    for name, parts in tensors.items():
        source, _ = parts[0]
        own = leaves[source.path].dtype
        if dtype is not None and not source.mapping.is_variable:
            own = dtype
        spec = jax.ShapeDtypeStruct(source.tensor_shape, own)
        outputs[name] = _Output(spec, functools.partial(_to_host, parts, leaves, own))
    return outputs


def _constants(ignored: Iterable[Ignored], dtype: str) -> dict[str, _Output]:
    """Return the constants of a model to write."""
    outputs: dict[str, _Output] = {}
    for entry in ignored:
        if entry.value is not None:
            spec = jax.ShapeDtypeStruct((), jnp.dtype(dtype))
            make = functools.partial(np.full, (), entry.value, spec.dtype)
            outputs[entry.tensor] = _Output(spec, make)
    return outputs


def _main_dtype(dtypes: collections.Counter[str]) -> str:
    """Return the dtype of most tensors."""
    (most,) = dtypes.most_common(1)
    return most[0]


def _check_same_model(family: Family, config: Any, quantized: HFFolder) -> None:
    """Raise `CheckpointError` if a checkpoint is of another model than the one to export."""
    ours = family.write_config(config)
    if quantized.family is family and family.write_config(quantized.config) == ours:
        return
    fix = "the folder that the run was imported from"
    problem = Problem(str(quantized.path), "is of another model", fix=fix)
    raise CheckpointError("Nothing was exported:", [problem])


def _with_codes(
    outputs: Mapping[str, _Output],
    tensors: Mapping[str, _Parts],
    leaves: Mapping[str, jax.Array],
    quantized: HFFolder,
) -> dict[str, _Output]:
    """Return the tensors to write, with stored codes and scales in place of values.

    Raises:
        CheckpointError: Values differ from the stored ones; all such tensors are named.
    """
    found: dict[str, _Output] = {}
    problems: list[Problem] = []
    for name, output in outputs.items():
        reader = quantized.tensors.get(name)
        if not isinstance(reader, DequantizedTensor):
            found[name] = output
            continue
        source, _ = tensors[name][0]
        values = _to_host(tensors[name], leaves, leaves[source.path].dtype)
        if not has_values(reader, values):
            fix = "export without this checkpoint: dequantized values are written"
            problems.append(Problem(f"tensor {name}", "was changed since its import", fix=fix))
        for stored in (reader.codes, reader.scales):
            spec = jax.ShapeDtypeStruct(stored.shape, stored.dtype)
            found[stored.name] = _Output(spec, functools.partial(read_whole, stored))
    if found.keys() == outputs.keys():
        what = "has no quantized tensor of this model"
        problems.append(Problem(str(quantized.path), what, fix="export without it"))
    if problems:
        raise CheckpointError("Nothing was exported:", first_of(problems))
    return found


def _check_disk_space(out: Path, needed: int) -> None:
    existing = next(folder for folder in out.absolute().parents if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        detail = f"{human_bytes(needed)} to write, {human_bytes(free)} free"
        problem = Problem(str(out), "does not fit on the disk", detail)
        raise CheckpointError("Nothing was exported:", [problem])


def _config_values(
    family: Family, config: Any, dtypes: collections.Counter[str], original: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of config.json; `dtypes` has the number of tensors of each.

    Fields of the original one that do not change the model are copied.
    """
    harmless = HARMLESS.union(family.harmless) - {"dtype"}
    copied: dict[str, Any] = {}
    for name, value in original.items():
        if name in harmless:
            copied[name] = value
    written = {
        "architectures": [family.architectures[0]],
        "torch_dtype": _main_dtype(dtypes),
        **family.write_config(config),
    }
    return copied | written


def _index(shards: Mapping[str, _Specs], total_size: int) -> dict[str, Any]:
    """Return the content of the index: the file of each tensor."""
    files: dict[str, str] = {}
    for file, specs in shards.items():
        for tensor in specs:
            files[tensor] = file
    return {"metadata": {"total_size": total_size}, "weight_map": files}


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Write a folder as `path.unfinished`, and rename it to `path` once complete.

    The unfinished one must not exist; after an error it is removed.
    """
    problems = check_local("out", path)
    if problems:
        raise CheckpointError("Nothing was written:", problems)
    unfinished = _unfinished(path)
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
        for file in unfinished.iterdir():
            if file.is_file():
                sync(file)
        sync(unfinished)
        unfinished.rename(path)
        sync(path.absolute().parent)
    except OSError as error:
        raise _write_error(path, error) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextlib.contextmanager
def shared_folder(path: Path) -> Iterator[Path]:
    """Write a folder as `whole_folder` does, from all processes: process 0 makes and renames it."""
    written = contextlib.ExitStack()
    run_on_first(lambda: written.enter_context(whole_folder(path)))
    with contextlib.ExitStack() as after_error:
        after_error.push(written)
        yield _unfinished(path)
        after_error.pop_all()
    run_on_first(written.close)


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.unfinished")


def _write_error(path: Path, error: OSError) -> CheckpointError:
    problem = Problem(str(path), error.strerror or str(error))
    return CheckpointError("Nothing was written:", [problem])


def parse_size(text: str) -> int:
    """Parse a number of bytes such as `5GB`.

    Example:
        >>> parse_size("1.5MB")
        1500000
    """
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)([KMGT]B)", text)
    size = 0
    if found is not None:
        size = int(float(found[1]) * UNITS[found[2]])
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
    problems: list[Problem] = []
    for name, parts in found.items():
        parts.sort(key=_part_index)
        problems += _part_problems(name, parts)
    if problems:
        raise ConfigError("Invalid name map:", problems)
    return {name: found[name] for name in sorted(found, key=_natural_key)}


def _part_problems(name: str, parts: _Parts) -> Iterator[Problem]:
    """Yield the reasons why parameters are not all parts of one tensor."""
    first, _ = parts[0]
    expected = len(first.mapping.layout.parts)
    indices = list(map(_part_index, parts))
    if indices != list(range(expected)):
        what = f"has {expected} parts, and the name map has only {indices}"
        yield Problem(name, what, fix="add a mapping for each part")
    layouts: set[TensorLayout] = set()
    for source, _ in parts:
        layouts.add(dataclasses.replace(source.mapping.layout, index=0))
    shapes = {source.tensor_shape for source, _ in parts}
    if len(layouts) > 1 or len(shapes) > 1:
        paths = ", ".join(source.path for source, _ in parts)
        detail = f"shapes by {paths}: {sorted(shapes)}"
        yield Problem(name, "has parts with different layouts", detail)


def _part_index(part: tuple[TensorSource, tuple[int, ...]]) -> int:
    source, _ = part
    return source.mapping.layout.index


def _natural_key(name: str) -> list[int | str]:
    """Split a name into text and numbers."""
    key: list[int | str] = []
    for piece in re.split(r"(\d+)", name):
        if piece.isdigit():
            key.append(int(piece))
        else:
            key.append(piece)
    return key


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
    files: dict[str, _Specs] = {}
    for number, shard in enumerate(shards, 1):
        files[f"model-{number:05}-of-{len(shards):05}.safetensors"] = shard
    return files


def _to_host(parts: _Parts, leaves: Mapping[str, jax.Array], dtype: Any) -> np.ndarray:
    """Return a tensor's value in host memory: all its parts, in its layout.

    Arrays with the shared dimensions of the tensor are gathered one element at a time.
    """
    first, place = parts[0]
    if len(parts) == 1 and not first.shared_dims:
        whole = host_slice(leaves[first.path], place, dtype)
        return whole.transpose(first.order).reshape(first.tensor_shape)
    whole = np.empty(first.full_shape, dtype)
    for source, index in parts:
        columns: slice | np.ndarray = slice(None)
        if source.layer_shape:
            size = source.layer_shape[-1]
            columns = source.mapping.layout.positions(slice(0, size), size)
        for place in np.ndindex(*source.layer_shape[: source.shared_dims]):
            value = host_slice(leaves[source.path], (*index, *place), dtype)
            whole[place][..., columns] = value
    return whole.transpose(first.order).reshape(first.tensor_shape)


def host_slice(array: jax.Array, index: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return the element at an index of the leading dimensions, cast to `dtype`, in host memory.

    Of several processes, each has the whole element.
    """
    element = _take(array, np.array(index, np.int32), dtype)
    if not element.is_fully_addressable:
        element = _place(element, NamedSharding(element.sharding.mesh, P()))
    return np.asarray(element)


@functools.partial(jax.jit, static_argnums=1)
def _place(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(array, sharding)


@functools.partial(jax.jit, static_argnums=2)
def _take(array: jax.Array, index: jax.Array, dtype: Any) -> jax.Array:
    """Return the element at an index of the leading dimensions, cast to `dtype`."""
    for dim in range(index.shape[0]):
        array = jax.lax.dynamic_index_in_dim(array, index[dim], keepdims=False)
    return array.astype(dtype)


def _nbytes(spec: jax.ShapeDtypeStruct) -> int:
    return math.prod(spec.shape) * np.dtype(spec.dtype).itemsize


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write an indented JSON file."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
