"""Safetensors files, read a few rows at a time and written a tensor at a time.

The `safetensors` library parses and validates headers. Tensor data is read and written here: slices
of the library either map the file (whole tensors count as resident memory, and a truncated file
kills the process) or read the whole tensor each time; its writer needs all tensors at once.
"""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
import safetensors

from spmd.errors import CheckpointError, Problem, first_of
from spmd.hf.stored_bytes import DamagedBytesError, LocalBytes, StoredBytes
from spmd.storage.address import Location

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
}
"""Name in the format → NumPy dtype."""

RowSelection = slice | np.ndarray
"""Selection of rows."""
EVERY_ROW = slice(None)

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_ALIGNMENT = 8
_MAX_DIMENSIONS = 32


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Location of a tensor in its file; `begin` is the offset of its first byte."""

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsFile(contextlib.AbstractContextManager["SafetensorsFile"]):
    """A safetensors file opened for reading.

    `tensors` maps names to locations, `metadata` has the pairs of text that the file's writer
    added.

    Args:
        stored: Its bytes, closed with this object; or the path of a local file.
    """

    def __init__(self, stored: StoredBytes | Path) -> None:
        if isinstance(stored, Path):
            stored = open_local(stored)
        self.stored = stored
        self.path = stored.path
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            self.tensors, self.metadata = _read_header(stored)
            stack.pop_all()

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; may be called again."""
        self.stored.close()

    def elements(self, name: str, start: int, stop: int, buffer: np.ndarray) -> np.ndarray:
        """Read elements `start` to `stop` of a flattened tensor, and no others.

        They are read into `buffer`, uint8 `[bytes]`; the result is a view of it.
        """
        tensor = self.tensors[name]
        itemsize = tensor.dtype.itemsize
        size = (stop - start) * itemsize
        self._read(buffer[:size], tensor.begin + start * itemsize)
        return buffer[:size].view(tensor.dtype)

    def chunks(self, name: str, buffer: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the bytes of a tensor, chunk by chunk.

        Each is read into `buffer`, uint8 `[bytes]`.
        """
        tensor = self.tensors[name]
        for start in range(0, tensor.nbytes, len(buffer)):
            chunk = buffer[: tensor.nbytes - start]
            self._read(chunk, tensor.begin + start)
            yield chunk

    def _read(self, buffer: np.ndarray, offset: int) -> None:
        try:
            self.stored.read_into(buffer.data, offset)
        except DamagedBytesError as error:
            what = f"{error}, before the end of its tensors"
            raise _read_error(self.path, [Problem(self.path.name, what)]) from error


def open_local(path: Path) -> LocalBytes:
    """Open a local file; a CheckpointError if it is not a regular one."""
    try:
        return LocalBytes(path)
    except ValueError as error:
        raise _read_error(path, [Problem(path.name, str(error))]) from error


class TensorReader(Protocol):
    """Reader of the rows of one tensor."""

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the values."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""

    def rows(
        self, start: int, stop: int, size: int, buffer: np.ndarray, chosen: RowSelection = EVERY_ROW
    ) -> np.ndarray:
        """Read rows `start` to `stop` of the tensor as a matrix `[rows, size]`.

        Args:
            buffer: Space for all of them, uint8 `[bytes]`. The result is a view of it if possible,
                from its start if all rows are chosen.
            chosen: The rows to return, counted from `start`.
        """


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file."""

    file: SafetensorsFile
    name: str

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the values."""
        return self.file.tensors[self.name].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.file.tensors[self.name].shape

    def rows(
        self, start: int, stop: int, size: int, buffer: np.ndarray, chosen: RowSelection = EVERY_ROW
    ) -> np.ndarray:
        """Read rows as `TensorReader.rows` does, and no others."""
        elements = self.file.elements(self.name, start * size, stop * size, buffer)
        return elements.reshape(-1, size)[chosen]


def _read_header(stored: StoredBytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the location of each tensor, and the metadata.

    Tensors are contiguous and end with the file, as the library checks.
    """
    path = stored.path
    codes: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        with stored.header_file() as local, safetensors.safe_open(local, "np") as file:
            metadata = dict(file.metadata() or {})
            for name in file.offset_keys():
                spec = file.get_slice(name)
                codes[name] = spec.get_dtype()
                shapes[name] = tuple(spec.get_shape())
    except safetensors.SafetensorError as error:
        size, fix = f"{stored.size} bytes", "download the file again"
        problem = Problem(path.name, f"is not valid: {error}", size, fix)
        raise _read_error(path, [problem]) from error
    problems = _unsupported(path, codes, shapes)
    if problems:
        raise _read_error(path, problems)
    tensors: dict[str, Tensor] = {}
    end = stored.size
    for name in reversed(codes):
        dtype, shape = DTYPES[codes[name]], shapes[name]
        end -= math.prod(shape) * dtype.itemsize
        tensors[name] = Tensor(dtype, shape, end)
    return tensors, metadata


def _unsupported(
    path: Location, codes: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> list[Problem]:
    supported = f"one of: {', '.join(DTYPES)}"
    most = f"at most {_MAX_DIMENSIONS} are supported"
    problems: list[Problem] = []
    for name, code in codes.items():
        where = f"{path.name}: {name}"
        dimensions = len(shapes[name])
        if code not in DTYPES:
            problems.append(Problem(where, f"has the unsupported dtype {code}", fix=supported))
        if dimensions > _MAX_DIMENSIONS:
            problems.append(Problem(where, f"has {dimensions} dimensions", most))
    return problems


def _read_error(path: Location, problems: list[Problem]) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read:", first_of(problems))


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Any],
    values: Iterator[np.ndarray],
    metadata: Mapping[str, str],
) -> None:
    """Write a new file with at most one tensor in memory at a time.

    `tensors` are names → anything with a `shape` and a `dtype`, in the order of the file, and
    `values` the tensors in that order; each is requested after the one before it is written.
    """
    header = _header(path, tensors, metadata)
    with path.open("xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, tensor in tensors.items():
            # Not `zip`: it would hold this tensor while the next one is made.
            value = next(values)
            assert value.shape == tuple(tensor.shape), name
            assert value.dtype == tensor.dtype, name
            file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            del value
        assert next(values, None) is None
        file.flush()
        os.fsync(file.fileno())


def _header(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file, padded so that tensors are aligned."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    problems: list[Problem] = []
    end = 0
    for name, tensor in tensors.items():
        dtype = np.dtype(tensor.dtype)
        begin, end = end, end + math.prod(tensor.shape) * dtype.itemsize
        if dtype not in _CODES:
            fix = f"one of: {', '.join(DTYPES)}"
            problems.append(Problem(name, f"has the unsupported dtype {dtype}", fix=fix))
        entries[name] = {
            "dtype": _CODES.get(dtype),
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    if problems:
        raise CheckpointError(f"{path.name} cannot be written:", problems)
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % _ALIGNMENT)
