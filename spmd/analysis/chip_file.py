"""A chip of one's own, as a TOML file, for `--topology mychip.toml:4x8`.

```toml
like = "l40s"            # fields that are not given are those of this chip
device_kind = "NVIDIA RTX 6000 Ada Generation"   # jax.devices()[0].device_kind
memory = 48e9

[speeds]                 # bytes/s of one direction, FLOP/s of dense bfloat16 matmuls
peak = 364e12
memory_bandwidth = 960e9
```

The fields are those of `spmd.chips.Chip` and its `speeds`, `gpu` and `closed`. Without `like`, a
file needs `platform`, `device_kind`, `memory` and `speeds`. The name of the file is that of the
chip.
"""

import dataclasses
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd.chips import CHIPS, KINDS, Chip, ClosedRates, Gpu, Hardware
from spmd.errors import ConfigError, Problem, describe_value, did_you_mean

SUFFIX = ".toml"

_PARTS: Mapping[str, type] = {"speeds": Hardware, "gpu": Gpu, "closed": ClosedRates}
"""Tables of a file."""

_OWN = (
    "platform",
    "device_kind",
    "family",
    "example",
    "memory",
    "joined",
    "pcie",
    "bfloat16",
    "fused_attention",
)
"""Fields of a file that are not tables. Those of TPUs describe a network that only libtpu knows."""

_NEEDED = ("platform", "device_kind", "memory", "speeds")
_PLATFORMS = ("cuda", "rocm")
_ANY_RATES = ClosedRates(spread=0.3)


def load_chip(file: Path) -> Chip:
    """Return the chip of a file, and add it to `CHIPS` under the file's name.

    Raises:
        ConfigError: The file cannot be read, or its fields are wrong; with all problems.
    """
    values = _read(file)
    kin = values.pop("like", "")
    problems = list(_kin_problems(file, kin))
    base = None
    if isinstance(kin, str):
        base = CHIPS.get(kin)
    problems += _field_problems(values, base)
    if problems:
        raise ConfigError(f"Invalid chip {file}:", problems)
    chip = _make_chip(file.stem, values, base)
    CHIPS[chip.kind] = chip
    return chip


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        raise ConfigError("Invalid chip:", [Problem(str(file), what)]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problem = Problem(str(file), f"is not TOML: {error}")
        raise ConfigError("Invalid chip:", [problem]) from None


def _kin_problems(file: Path, kin: Any) -> Iterator[Problem]:
    """Yield the problems of the chip's name and of the chip that it is like."""
    known = _known_gpus()
    if kin and kin not in known:
        yield Problem("like", f"is {describe_value(kin)}", fix=did_you_mean(str(kin), known))
    taken = CHIPS.get(file.stem)
    if taken is not None and not taken.own:
        fix = f"another name of the file, such as my-{file.name}"
        yield Problem(str(file), f"has the name of a chip, {file.stem}", fix=fix)


def _known_gpus() -> list[str]:
    return [kind for kind, chip in CHIPS.items() if chip.platform in _PLATFORMS and not chip.own]


def _field_problems(values: Mapping[str, Any], base: Chip | None) -> Iterator[Problem]:
    """Yield a problem for each unknown, missing or wrong field of a file."""
    fields = (*_OWN, *_PARTS)
    for name, value in values.items():
        if name not in fields:
            yield Problem(name, "is no field of a chip", fix=did_you_mean(name, fields))
        elif name in _PARTS:
            yield from _table_problems(name, value, base)
        else:
            yield from _value_problems(name, value, typing.get_type_hints(Chip)[name])
    if values.get("platform", "cuda") not in _PLATFORMS:
        yield Problem("platform", f"is {values['platform']!r}", fix="cuda or rocm")
    if base is not None:
        return
    for name in _NEEDED:
        if name not in values:
            yield Problem(name, "is missing", fix="give it, or take the fields of a chip with like")


def _table_problems(table: str, values: Any, base: Chip | None) -> Iterator[Problem]:
    if not isinstance(values, dict):
        yield Problem(table, f"is {describe_value(values)}", fix=f"a table [{table}]")
        return
    part = _PARTS[table]
    hints = typing.get_type_hints(part)
    for name, value in values.items():
        if name not in hints:
            fix = did_you_mean(name, hints)
            yield Problem(f"{table}.{name}", f"is no field of {table}", fix=fix)
            continue
        yield from _value_problems(f"{table}.{name}", value, hints[name])
    if base is not None and getattr(base, table) is not None:
        return
    for field in dataclasses.fields(part):
        has_default = field.default is not dataclasses.MISSING
        has_default |= field.default_factory is not dataclasses.MISSING
        if not has_default and field.name not in values:
            yield Problem(f"{table}.{field.name}", "is missing")


def _value_problems(name: str, value: Any, kind: Any) -> Iterator[Problem]:
    """Yield a problem for a value that is not of a field's type, or not positive."""
    if isinstance(kind, types.UnionType):
        kind = kind.__args__[0]
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            yield Problem(name, f"is {describe_value(value)}", fix="a positive number")
        elif value == 0 and name != "joined":
            yield Problem(name, "is 0", fix="a positive number")
    elif kind in (bool, str):
        if not isinstance(value, kind):
            words = {bool: "true or false", str: "a text"}
            yield Problem(name, f"is {describe_value(value)}", fix=words[kind])
    elif name.endswith(("products", "spreads")):
        yield from _mapping_problems(name, value)
    elif name.endswith("capability"):
        is_pair = isinstance(value, list) and list(map(type, value)) == [int, int]
        if not is_pair:
            yield Problem(name, f"is {describe_value(value)}", fix="two numbers, such as [9, 0]")


def _mapping_problems(name: str, value: Any) -> Iterator[Problem]:
    """Yield a problem for a table of numbers that has other keys, or other values."""
    keys: Sequence[str] = ("int8", "float8")
    fix = "the time relative to bfloat16 by dtype, such as {int8 = 0.5, float8 = 0.5}"
    if name.endswith("spreads"):
        keys = KINDS[1:]
        fix = 'half of the range by kind of step, such as {"8 bits" = 0.3, experts = 1.0}'
    if not isinstance(value, dict) or not {*value} <= {*keys}:
        yield Problem(name, f"is {describe_value(value)}", fix=fix)
        return
    for key, number in value.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < 10:
            yield Problem(f"{name}.{key}", f"is {describe_value(number)}", fix=fix)


def _make_chip(kind: str, values: Mapping[str, Any], base: Chip | None) -> Chip:
    """Return the chip of checked values."""
    fields = dict(values)
    if "memory" in fields:
        fields["memory"] = int(fields["memory"])
    for table, part in _PARTS.items():
        if table in fields:
            fields[table] = _make_part(part, fields[table], getattr(base, table, None))
    if base is None:
        base = Chip(kind=kind, platform="", device_kind="", example="1x8", closed=_ANY_RATES)
        base = dataclasses.replace(base, rates_of="other chips")
    rates_of = base.rates_of or base.kind
    if "closed" in fields:
        rates_of = ""
    if "device_kind" in fields:  # the words of the chip that it is like name other boards
        fields.setdefault("family", "")
    fields.update(kind=kind, rates_of=rates_of, own=True)
    return dataclasses.replace(base, **fields)


def _make_part(part: type, values: Mapping[str, Any], base: Any) -> Any:
    fields = dict(values)
    if "capability" in fields:
        fields["capability"] = tuple(fields["capability"])
    if base is None:
        return part(**fields)
    return dataclasses.replace(base, **fields)
