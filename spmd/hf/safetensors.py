"""Files of the safetensors format, read a few rows at a time and written a tensor at a time.

```
8 bytes      the length of the header, little-endian
header       JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …, "__metadata__": {…}}
the rest     the tensors, each in C order, one behind the other without a gap
```

A header is checked in full before anything behind it is read: every byte of the file belongs to one tensor, and each
tensor has as many bytes as its shape and dtype say. Nothing in such a file is ever executed.
"""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from spmd.checkpoint.manifest import open_regular
from spmd.errors import CheckpointError, Problem, did_you_mean, first_of

HEADER_AT_MOST = 100_000_000
"""Bytes of a header; the format's own bound."""

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
}
"""What the format calls each dtype that is read and written here."""

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_METADATA = "__metadata__"
_LENGTH = 8
_TOO_LARGE = 2**63
_DIMENSIONS = 32


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a tensor is in its file.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        begin: The byte of the file at which it begins.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """How many bytes one element of its first dimension has."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class SafetensorsFile:
    """A file that is open for reading.

    Args:
        path: A regular file, and no link.

    Attributes:
        path: The file.
        tensors: What is in it, by name.

    Raises:
        CheckpointError: Everything that is wrong with its header.
        OSError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open_regular(path)
        except ValueError as error:
            raise _refused(path, [Problem(path.name, str(error))]) from error
        with contextlib.ExitStack() as stack:
            stack.callback(self._file.close)
            self.tensors = _read_header(self._file, path)
            stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the file; may be called again."""
        self._file.close()

    def rows(self, name: str, start: int, stop: int, memory: np.ndarray) -> np.ndarray:
        """Some elements of a tensor's first dimension; nothing else of the file is read.

        Args:
            name: The tensor.
            start: The first of them.
            stop: Behind the last one.
            memory: uint8 `[bytes]`, at least as many as they have; they are read into it.

        Returns:
            `[stop - start, …]`, a view of `memory`.

        Raises:
            CheckpointError: The file has become shorter.
        """
        tensor = self.tensors[name]
        size = (stop - start) * tensor.row_bytes
        self._read(memory[:size], tensor.begin + start * tensor.row_bytes)
        return memory[:size].view(tensor.dtype).reshape(stop - start, *tensor.shape[1:])

    def pieces(self, name: str, memory: np.ndarray) -> Iterator[np.ndarray]:
        """The bytes of a tensor, one part after the other.

        Args:
            name: The tensor.
            memory: uint8 `[bytes]`; each part is read into it, over the one before.
        """
        tensor = self.tensors[name]
        for start in range(0, tensor.nbytes, len(memory)):
            piece = memory[: tensor.nbytes - start]
            self._read(piece, tensor.begin + start)
            yield piece

    def read(self, name: str) -> np.ndarray:
        """A whole tensor."""
        tensor = self.tensors[name]
        memory = np.empty(tensor.nbytes, np.uint8)
        self._read(memory, tensor.begin)
        return memory.view(tensor.dtype).reshape(tensor.shape)

    def _read(self, memory: np.ndarray, offset: int) -> None:
        number, left = self._file.fileno(), memory.data
        while left:
            count = os.preadv(number, [left], offset)
            if not count:
                raise _refused(self.path, [Problem(self.path.name, f"ends at byte {offset}, before its tensors do")])
            left, offset = left[count:], offset + count


def write_safetensors(
    path: Path, tensors: Mapping[str, Any], values: Iterator[np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes a file, header first; at most one tensor is there at once.

    Args:
        path: A new file.
        tensors: Name → anything with a `shape` and a `dtype`, in the order of the file.
        values: The tensors, in that order, each made when its turn comes.
        metadata: What the header says besides.

    Raises:
        CheckpointError: A dtype that the format does not have here.
        OSError: It cannot be written, or exists.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    problems, end = [], 0
    for name, tensor in tensors.items():
        dtype = np.dtype(tensor.dtype)
        begin, end = end, end + math.prod(tensor.shape) * dtype.itemsize
        if dtype not in _CODES:
            problems.append(Problem(name, f"is {dtype}", fix=f"one of: {', '.join(map(str, _CODES))}"))
        header[name] = {"dtype": _CODES.get(dtype), "shape": list(tensor.shape), "data_offsets": [begin, end]}
    if problems:
        raise CheckpointError(f"{path.name} cannot be written:", problems)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH)  # so that the tensors are aligned
    with path.open("xb") as file:
        file.write(len(text).to_bytes(_LENGTH, "little") + text)
        for (name, tensor), value in zip(tensors.items(), values, strict=True):
            assert value.shape == tuple(tensor.shape), name
            assert value.dtype == tensor.dtype, name
            file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            del value
        file.flush()
        os.fsync(file.fileno())


def _refused(path: Path, problems: list[Problem]) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read:", first_of(problems))


def _read_header(file: Any, path: Path) -> dict[str, Tensor]:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(_LENGTH), "little")
    fix = "fetch the file again"
    if size < _LENGTH:
        raise _refused(path, [Problem(path.name, "has no header", f"{size} bytes", fix)])
    if length > HEADER_AT_MOST:
        arithmetic = f"{length} bytes, where {HEADER_AT_MOST} are the most that are read"
        raise _refused(path, [Problem(path.name, "is no safetensors file: its header is too long", arithmetic)])
    if length > size - _LENGTH:
        arithmetic = f"a header of {length} bytes in a file of {size}"
        raise _refused(path, [Problem(path.name, "ends within its header", arithmetic, fix)])
    try:
        entries = json.loads(file.read(length), object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise _refused(path, [Problem(path.name, f"has a header that is no JSON: {error}")]) from error
    if not isinstance(entries, dict):
        raise _refused(path, [Problem(path.name, "has a header that is no JSON object")])
    entries.pop(_METADATA, None)
    problems: list[Problem] = []
    tensors = {}
    for name, entry in entries.items():
        found = _parse(f"{path.name}: {name}", entry, problems)
        if found is not None:
            tensors[name] = found
    if not problems:
        problems = _layout_problems(path.name, tensors, size - _LENGTH - length)
    if problems:
        raise _refused(path, problems)
    return {name: dataclasses.replace(t, begin=t.begin + _LENGTH + length) for name, t in tensors.items()}


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r:.80} is there twice")
        found[name] = value
    return found


def _parse(where: str, entry: Any, problems: list[Problem]) -> Tensor | None:
    """One tensor of a header, or what is wrong with it."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        problems.append(Problem(where, f"is described by {entry!r:.80}, and not by dtype, shape and data_offsets"))
        return None
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    before = len(problems)
    if not isinstance(code, str) or code not in DTYPES:
        problems.append(Problem(where, f"is of dtype {code!r:.80}", fix=did_you_mean(str(code)[:80], DTYPES)))
    if not _are_sizes(shape):
        what = f"has the shape {shape!r:.80}, and no list of {_DIMENSIONS} sizes at most, each below 2**63"
        problems.append(Problem(where, what))
    if not _are_sizes(offsets) or len(offsets) != 2:
        problems.append(Problem(where, f"is at {offsets!r:.80}, and not from one byte to another"))
    if len(problems) > before:
        return None
    tensor = Tensor(DTYPES[code], tuple(shape), offsets[0])
    if tensor.nbytes != offsets[1] - offsets[0]:
        size = f"{tensor.nbytes}" if tensor.nbytes < _TOO_LARGE else "2**63 or more"
        arithmetic = f"{code}{shape!r:.80} is {size} bytes, {offsets} are {offsets[1] - offsets[0]}"
        problems.append(Problem(where, "has another size than its shape", arithmetic))
        return None
    return tensor


def _are_sizes(value: Any) -> bool:
    if not isinstance(value, list) or len(value) > _DIMENSIONS:
        return False
    return all(type(size) is int and 0 <= size < _TOO_LARGE for size in value)


def _layout_problems(where: str, tensors: Mapping[str, Tensor], size: int) -> list[Problem]:
    """Whether tensors lie one behind the other, from the first byte behind the header to the last of the file."""
    problems, end, before = [], 0, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if tensor.begin != end:
            what = "overlaps" if tensor.begin < end else "leaves a gap behind"
            arithmetic = f"it begins at {tensor.begin}, where {before} ends at {end}"
            problems.append(Problem(f"{where}: {name}", f"{what} {before}", arithmetic))
        end, before = max(end, tensor.begin + tensor.nbytes), name
    if end > size:
        arithmetic = f"tensors of {end} bytes, {size} in the file: {end - size} are missing"
        problems.append(Problem(where, "is truncated", arithmetic, "fetch the file again"))
    elif end < size:
        problems.append(Problem(where, "goes on behind its last tensor", f"{size - end} bytes"))
    return problems
