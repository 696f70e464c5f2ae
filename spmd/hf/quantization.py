"""Quantized tensors of checkpoints, dequantized while they are read.

```text
mxfp4   name_blocks      uint8 [..., out, in / 32, 16]   two codes a byte, the low half first
        name_scales      uint8 [..., out, in / 32]       exponents of two, biased by 127
fp8     name             float8_e4m3fn [..., out, in]
        name_scale_inv   float [..., ⌈out / 128⌉, ⌈in / 128⌉], one factor per block of 128 × 128
```

A value is code × scale. MXFP4 is a format of the OCP Microscaling Formats (MX) Specification 1.0,
of elements E2M1 and scales E8M0, as gpt-oss has it; its values are exact in bfloat16, but for those
too large. Factors per block are of the DeepSeek-V3 technical report (arXiv:2412.19437, 3.3); the
product is float32.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from spmd.errors import ConfigError, Problem, did_you_mean, shorten
from spmd.hf.safetensors import EVERY_ROW, RowSelection, StoredTensor, TensorReader

FIELD = "quantization_config"
"""Field of config.json."""
MXFP4, FP8 = "mxfp4", "fp8"
BLOCKS, SCALES, FACTORS = "_blocks", "_scales", "_scale_inv"
"""Endings of tensors' names."""

_GROUP = 32
_CODES_PER_BYTE = 2
_BYTES = np.arange(256, dtype=np.uint8)
_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_E4M3 = np.dtype(jnp.float8_e4m3fn)
_E8M0 = np.dtype(jnp.float8_e8m0fnu)
CODE_DTYPES = frozenset({_E4M3, _E8M0})
"""Dtypes that have no meaning without their scales."""
_FACTOR_DTYPES = frozenset(map(np.dtype, (np.float32, jnp.bfloat16, np.float16, _E8M0)))
_FACTOR_FORMATS = ("float", "ue8m0")
_BLOCK_DIMS = 2
_COMPARED_BYTES = 64 << 20

_HARMLESS = frozenset({"quant_method", "modules_to_not_convert", "ignored_layers", "dequantize"})
_BITSANDBYTES = frozenset({"load_in_4bit", "load_in_8bit"})
_ORIGINAL = "use the checkpoint that it was made from"
_FIXES = {
    "bitsandbytes": "in transformers: model.dequantize(), then model.save_pretrained(folder)",
    "compressed-tensors": f"{_ORIGINAL}, or decompress it with the library compressed-tensors",
}


@dataclasses.dataclass(frozen=True)
class Quantization:
    """Quantization of a checkpoint.

    Attributes:
        method: `MXFP4` or `FP8`.
        block: RowSelection and columns of a block with one factor, of `FP8`.
    """

    method: str
    block: tuple[int, int] = (128, 128)


def read_quantization(values: Mapping[str, Any]) -> Quantization | None:
    """Parse `quantization_config` of a config.json; None if it has none.

    Raises:
        ConfigError: The method, or one of its options, is not supported.
    """
    found = values.get(FIELD)
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise _unsupported(Problem(FIELD, f"is {shorten(found)}, not an object"))
    method = found.get("quant_method")
    if method is None and any(found.get(name) for name in _BITSANDBYTES):
        method = "bitsandbytes"
    if method == MXFP4:
        _check_options(found, {})
        return Quantization(MXFP4)
    if method == FP8:
        block = found.get("weight_block_size", [128, 128])
        _check_options(
            found,
            {
                "activation_scheme": ("dynamic",),
                "fmt": ("e4m3",),
                "scale_fmt": _FACTOR_FORMATS,
                "expert_dtype": (FP8,),
                "modules_to_convert": (None,),
                "weight_block_size": (block,),
            },
        )
        return Quantization(FP8, _parse_block(block))
    where = f"{FIELD}.quant_method"
    if method is None:
        raise _unsupported(Problem(where, "is missing", fix=f"one of: {MXFP4}, {FP8}"))
    what = f"is {shorten(method)}, and only {MXFP4} and {FP8} are read"
    raise _unsupported(Problem(where, what, fix=_FIXES.get(str(method), _ORIGINAL)))


def _check_options(found: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise an error with all unknown options and unsupported values."""
    problems: list[Problem] = []
    for name, value in found.items():
        where = f"{FIELD}.{name}"
        if name in _HARMLESS:
            continue
        if name not in allowed:
            fix = did_you_mean(name, allowed)
            problems.append(Problem(where, f"is {shorten(value)}, and is unknown", fix=fix))
        elif value not in allowed[name]:
            supported = " or ".join(map(str, allowed[name]))
            problems.append(Problem(where, f"is {shorten(value)}, and only {supported} is read"))
    if problems:
        raise _unsupported(*problems)


def _parse_block(block: Any) -> tuple[int, int]:
    is_pair = isinstance(block, list | tuple) and len(block) == _BLOCK_DIMS
    if not is_pair or not all(type(size) is int and size > 0 for size in block):
        what = f"is {shorten(block)}, not rows and columns of a block"
        raise _unsupported(Problem(f"{FIELD}.weight_block_size", what))
    rows, columns = block
    return rows, columns


def _unsupported(*problems: Problem) -> ConfigError:
    return ConfigError("Unsupported quantization:", problems)


@dataclasses.dataclass(frozen=True)
class Mxfp4Tensor:
    """Tensor of codes of 4 bits, dequantized to bfloat16 `[..., out, in]`.

    A scale above 2^127, of the code 255, is NaN.
    """

    codes: StoredTensor
    scales: StoredTensor

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the values."""
        return np.dtype(jnp.bfloat16)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        *lead, groups, count = self.codes.shape
        return (*lead, groups * count * _CODES_PER_BYTE)

    def problem(self) -> str:
        """Return the reason why the tensors do not belong together; empty if they do."""
        lead, block = self.codes.shape[:-1], self.codes.shape[-1:]
        if {self.codes.dtype, self.scales.dtype} != {np.dtype(np.uint8)}:
            return f"are {self.codes.dtype} and {self.scales.dtype}, not uint8"
        if len(lead) > 1 and block == (_GROUP // _CODES_PER_BYTE,) and self.scales.shape == lead:
            return ""
        return f"are {list(self.codes.shape)} and {list(self.scales.shape)}"

    def rows(
        self, start: int, stop: int, size: int, buffer: np.ndarray, chosen: RowSelection = EVERY_ROW
    ) -> np.ndarray:
        """Read and dequantize rows as `TensorReader.rows` does."""
        packed, groups = size // _CODES_PER_BYTE, size // _GROUP
        space = np.empty((stop - start) * (packed + groups), np.uint8)
        codes = self.codes.rows(start, stop, packed, space, chosen)
        space = space[(stop - start) * packed :]
        scales = self.scales.rows(start, stop, groups, space, chosen)
        pairs = _pairs_of_codes()[codes]
        pairs = pairs.reshape(*scales.shape, _GROUP)
        # what overflows is reported with other values that are not finite
        with np.errstate(over="ignore"):
            products = pairs * _powers_of_two()[scales][..., None]
        # exact: the products have few bits
        values = buffer[: products.size * self.dtype.itemsize].view(np.uint16)
        np.right_shift(products.reshape(-1).view(np.uint32), 16, out=values, casting="unsafe")
        return values.view(self.dtype).reshape(-1, size)


@dataclasses.dataclass(frozen=True)
class Fp8Tensor:
    """Tensor of codes of 8 bits with a factor per block, dequantized to float32 `[..., out, in]`."""

    codes: StoredTensor
    scales: StoredTensor
    block: tuple[int, int]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the values."""
        return np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return self.codes.shape

    @property
    def _blocks(self) -> tuple[int, ...]:
        """Number of blocks along the last two dimensions."""
        sizes = zip(self.shape[-_BLOCK_DIMS:], self.block, strict=True)
        return tuple(-(-size // block) for size, block in sizes)

    def problem(self) -> str:
        """Return the reason why the tensors do not belong together; empty if they do."""
        if self.codes.dtype != _E4M3:
            return f"is {self.codes.dtype}, and has scales of {_E4M3}"
        if self.scales.dtype not in _FACTOR_DTYPES:
            return f"has scales of {self.scales.dtype}"
        if len(self.shape) < _BLOCK_DIMS:
            return f"is {list(self.shape)}, not a matrix"
        expected = (*self.shape[:-_BLOCK_DIMS], *self._blocks)
        if self.scales.shape == expected:
            return ""
        shape, scales = list(self.shape), list(self.scales.shape)
        return f"is {shape} with scales {scales}, expected {list(expected)} in blocks {self.block}"

    def rows(
        self, start: int, stop: int, size: int, buffer: np.ndarray, chosen: RowSelection = EVERY_ROW
    ) -> np.ndarray:
        """Read and dequantize rows as `TensorReader.rows` does."""
        assert size == self.shape[-1]
        space = np.empty((stop - start) * size, np.uint8)
        codes = self.codes.rows(start, stop, size, space, chosen).view(np.uint8)
        factors = self._factors(np.arange(start, stop)[chosen])
        values = buffer[: codes.size * self.dtype.itemsize].view(self.dtype).reshape(-1, size)
        with np.errstate(over="ignore"):
            np.multiply(_values_of_e4m3()[codes], factors, out=values)
        return values

    def _factors(self, rows: np.ndarray) -> np.ndarray:
        """Return the factors of rows, float32 `[rows, in]`."""
        matrix, row = np.divmod(rows, self.shape[-2])
        blocks, columns = self._blocks
        place = matrix * blocks + row // self.block[0]
        first, last = int(place[0]), int(place[-1]) + 1
        space = np.empty((last - first) * columns * self.scales.dtype.itemsize, np.uint8)
        read = self.scales.rows(first, last, columns, space, place - first)
        return np.repeat(read.astype(np.float32), self.block[1], axis=1)[:, : self.shape[-1]]


DequantizedTensor = Mxfp4Tensor | Fp8Tensor


def has_values(tensor: DequantizedTensor, values: np.ndarray) -> bool:
    """Return whether a tensor is dequantized to these values, bit for bit in their dtype."""
    size = tensor.shape[-1]
    ours = values.reshape(-1, size)
    if values.shape != tensor.shape:
        return False
    rows = max(1, _COMPARED_BYTES // (size * tensor.dtype.itemsize))
    buffer = np.empty(rows * size * tensor.dtype.itemsize, np.uint8)
    for start in range(0, len(ours), rows):
        part = ours[start : start + rows]
        stored = tensor.rows(start, start + len(part), size, buffer).astype(values.dtype)
        if stored.tobytes() != part.tobytes():
            return False
    return True


def read_whole(stored: StoredTensor) -> np.ndarray:
    """Read all bytes of a stored tensor."""
    size = stored.shape[-1]
    count = math.prod(stored.shape)
    buffer = np.empty(count * stored.dtype.itemsize, np.uint8)
    return stored.rows(0, count // size, size, buffer).reshape(stored.shape)


@functools.cache
def _pairs_of_codes() -> np.ndarray:
    """Return the two values of each byte, float32 `[256, 2]`."""
    values = np.concatenate([_E2M1, -_E2M1])
    return np.stack([values[_BYTES & 0xF], values[_BYTES >> 4]], axis=-1)


@functools.cache
def _powers_of_two() -> np.ndarray:
    """Return the values of E8M0, float32 `[256]`."""
    return _BYTES.view(_E8M0).astype(np.float32)


@functools.cache
def _values_of_e4m3() -> np.ndarray:
    """Return the values of E4M3, float32 `[256]`."""
    return _BYTES.view(_E4M3).astype(np.float32)


def readers_of(
    stored: Mapping[str, StoredTensor], quantization: Quantization | None, problems: list[Problem]
) -> dict[str, TensorReader]:
    """Return the tensors of a checkpoint: dequantized ones in place of codes and scales.

    Report codes without scales, scales without codes, and wrong shapes and dtypes.
    """
    dequantized = _dequantized(stored, quantization, problems)
    used: set[str] = set()
    for tensor in dequantized.values():
        used |= {tensor.codes.name, tensor.scales.name}
    is_mxfp4 = quantization is not None and quantization.method == MXFP4
    readers: dict[str, TensorReader] = {}
    for name, reader in stored.items():
        if name in used:
            continue
        readers[name] = reader
        if reader.dtype in CODE_DTYPES:
            fix = f"restore the {FIELD} of config.json, if it had one"
            problems.append(
                Problem(f"tensor {name}", f"is {reader.dtype}, and has no scales", fix=fix)
            )
        elif is_mxfp4 and name.endswith(BLOCKS):
            problems.append(Problem(f"tensor {name}", f"are codes of {MXFP4} without scales"))
    return readers | dequantized


def _dequantized(
    stored: Mapping[str, StoredTensor], quantization: Quantization | None, problems: list[Problem]
) -> dict[str, DequantizedTensor]:
    """Return the quantized tensors by the name of their values."""
    found: dict[str, DequantizedTensor] = {}
    if quantization is None:
        return found
    ending = {MXFP4: SCALES, FP8: FACTORS}[quantization.method]
    for name, scales in stored.items():
        if not name.endswith(ending):
            continue
        base = name.removesuffix(ending)
        codes = stored.get(base + {MXFP4: BLOCKS, FP8: ""}[quantization.method])
        if codes is None:
            problems.append(
                Problem(f"tensor {name}", f"are scales of {quantization.method} without codes")
            )
            continue
        tensor: DequantizedTensor = Mxfp4Tensor(codes, scales)
        if quantization.method == FP8:
            tensor = Fp8Tensor(codes, scales, quantization.block)
        what = tensor.problem()
        if what:
            problems.append(Problem(f"tensor {codes.name}", what))
        found[base] = tensor
    return found
