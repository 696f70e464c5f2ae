"""Rotary position embeddings in config.json.

Files of `transformers` before version 5 have `rope_theta`, `partial_rotary_factor` and the table
`rope_scaling`; later ones have all of them in the table `rope_parameters`, or in one table for each
type of layer.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from spmd.errors import shorten
from spmd.hf.fields import Fields
from spmd.models.decoder.rotary import (
    SCALINGS,
    DynamicScaling,
    LongRopeScaling,
    RopeScaling,
    Rotary,
)

TABLES = ("rope_parameters", "rope_scaling")
"""Names of a table in config.json; the first is that of `transformers` 5."""


PLAIN = Rotary(10_000.0, RopeScaling())
"""Of most files without these fields."""


class _Entry(NamedTuple):
    """An entry of a table: its name in config.json, that of the scaling's field, and its parser."""

    theirs: str
    ours: str
    read: Callable[[Fields, str, Any], Any]
    required: bool = True


def _number(fields: Fields, where: str, found: Any) -> float | None:
    if fields.is_number(where, found):
        return float(found)
    return None


def _integer(fields: Fields, where: str, found: Any) -> int | None:
    if not fields.is_number(where, found):
        return None
    if found != int(found):
        fields.refuse(where, f"is {found!r:.80}, not an integer")
        return None
    return int(found)


def _flag(fields: Fields, where: str, found: Any) -> bool | None:
    if isinstance(found, bool):
        return found
    fields.refuse(where, f"is {found!r:.80}, neither true nor false")
    return None


def _numbers(fields: Fields, where: str, found: Any) -> tuple[float, ...] | None:
    if not isinstance(found, list):
        fields.refuse(where, f"is {found!r:.80}, not a list of numbers")
        return None
    for number in found:
        if not fields.is_number(where, number):
            return None
    return tuple(map(float, found))


_FACTOR = _Entry("factor", "factor", _number)
_OPTIONAL_FACTOR = _Entry("factor", "factor", _number, required=False)
_CONTEXT = _Entry("original_max_position_embeddings", "original_context", _integer)
_ATTENTION_FACTOR = _Entry("attention_factor", "attention_factor", _number, required=False)

ENTRIES: dict[str, tuple[_Entry, ...]] = {
    "default": (),
    "linear": (_FACTOR,),
    "dynamic": (_FACTOR,),
    "yarn": (
        _FACTOR,
        _CONTEXT,
        _ATTENTION_FACTOR,
        _Entry("beta_fast", "beta_fast", _number, required=False),
        _Entry("beta_slow", "beta_slow", _number, required=False),
        _Entry("mscale", "mscale", _number, required=False),
        _Entry("mscale_all_dim", "mscale_all_dim", _number, required=False),
        _Entry("truncate", "truncate", _flag, required=False),
    ),
    "longrope": (
        _FACTOR,
        _CONTEXT,
        _ATTENTION_FACTOR,
        _Entry("short_factor", "short_factor", _numbers),
        _Entry("long_factor", "long_factor", _numbers),
    ),
    "llama3": (
        _FACTOR,
        _Entry("low_freq_factor", "low_frequency_factor", _number),
        _Entry("high_freq_factor", "high_frequency_factor", _number),
        _CONTEXT,
    ),
    "proportional": (
        _OPTIONAL_FACTOR,
        _Entry("partial_rotary_factor", "rotary_fraction", _number, required=False),
    ),
}
"""Value of `rope_type` → the entries of its table, besides the base."""

_EARLIER_KINDS = {"su": "longrope"}
"""Earlier value of `rope_type` → its name now (Phi-3)."""


def read_rotary(
    fields: Fields,
    default: Rotary = PLAIN,
    *,
    kinds: Iterable[str] = tuple(ENTRIES),
    also: Iterable[str] = (),
    theta_in_table: float = 0.0,
) -> Rotary:
    """Parse the rotary embeddings of all layers; problems are reported to `fields`.

    Args:
        fields: Fields of config.json.
        default: The base and the fraction of a file without them.
        kinds: Supported values of `rope_type`.
        also: Entries of the table that the caller reads.
        theta_in_table: The base of a table without one; 0 for that of `default`.
    """
    parsed: list[Rotary] = []
    base = fields.value("rope_theta", default.theta)
    fraction = fields.value("partial_rotary_factor", default.fraction)
    in_table = fields.value("rope_theta", theta_in_table or default.theta)
    for name in TABLES:
        table = fields.value(name, {})
        if table == {}:
            continue
        if not isinstance(table, Mapping):
            fields.refuse(name, f"is {table!r:.80}, not an object")
            continue
        reader = _Reader(fields, name, Rotary(in_table, fraction=fraction), kinds, {*also})
        rotary = reader.read(table)
        if parsed and rotary != parsed[0]:
            fix = "keep the one that the model was trained with"
            fields.refuse(name, "differs from rope_parameters, and the file has both", fix)
        parsed.append(rotary)
    if parsed:
        return parsed[0]
    return _check_outside(fields, base, fraction, default)


def read_rotary_by_layer(
    fields: Fields,
    defaults: Mapping[str, Rotary],
    *,
    theta_fields: Mapping[str, str] = MappingProxyType({}),
    theta_in_table: float = 0.0,
) -> dict[str, Rotary]:
    """Parse `rope_parameters` with a table for each type of layer, of `transformers` 5.

    Args:
        fields: Fields of config.json.
        defaults: Type of layer, such as `full_attention` → the embeddings of a file without tables.
        theta_fields: Type of layer → field with the base of a table without one; by default
            `rope_theta`.
        theta_in_table: As for `read_rotary`.

    Returns:
        The embeddings of each type of layer in `defaults`.
    """
    tables = fields.value("rope_parameters")
    if tables is None:
        return dict(defaults)
    if not isinstance(tables, Mapping) or not defaults.keys() <= tables.keys():
        what = f"is {shorten(tables)}, without a table for each of {' and '.join(defaults)}"
        fields.refuse("rope_parameters", what)
        return dict(defaults)
    for key in sorted({*tables} - {*defaults}, key=str):
        fields.refuse(f"rope_parameters.{key}", f"is {shorten(tables[key])}, and is unknown")
    found = {}
    for kind, default in defaults.items():
        where = f"rope_parameters.{kind}"
        table = tables[kind]
        if not isinstance(table, Mapping):
            fields.refuse(where, f"is {shorten(table)}, not an object")
            found[kind] = default
            continue
        theta = fields.value(theta_fields.get(kind, "rope_theta"), theta_in_table or default.theta)
        fraction = fields.value("partial_rotary_factor", default.fraction)
        found[kind] = _Reader(fields, where, Rotary(theta, fraction=fraction)).read(table)
    return found


def _check_outside(fields: Fields, base: Any, fraction: Any, default: Rotary) -> Rotary:
    """Return the rotary embeddings of a file without a table."""
    theta = default.theta
    if fields.is_number("rope_theta", base, least=1.0):
        theta = float(base)
    return Rotary(theta, default.scaling, _fraction(fields, "partial_rotary_factor", fraction))


def _fraction(fields: Fields, where: str, found: Any) -> float:
    if not fields.is_number(where, found):
        return 1.0
    if not 0 < found <= 1:
        fields.refuse(where, f"is {found!r:.80}, not above 0 and at most 1")
        return 1.0
    return float(found)


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Parser of one table.

    Attributes:
        fields: Fields of config.json.
        name: Name of the table there.
        default: The base and the fraction of a table without them, unchecked.
        kinds: Supported values of `rope_type`.
        also: Entries that the caller reads.
    """

    fields: Fields
    name: str
    default: Rotary
    kinds: Iterable[str] = tuple(ENTRIES)
    also: Collection[str] = ()

    def read(self, table: Mapping[str, Any]) -> Rotary:
        """Return the rotary embeddings of a table."""
        entries = dict(table)
        for key in self.also:
            entries.pop(key, None)
        base = entries.pop("rope_theta", self.default.theta)
        theta = 10_000.0
        if self.fields.is_number("rope_theta", base, least=1.0):
            theta = float(base)
        # older files have `type`
        kind = entries.pop("type", "default")
        kind = entries.pop("rope_type", kind)
        kind = _EARLIER_KINDS.get(str(kind), kind)
        if kind not in (*self.kinds,):
            supported = "no scaling of positions"
            names = [name for name in self.kinds if name != "default"]
            if names:
                supported = f"only {' or '.join(names)}"
            what = f"is of type {kind!r:.80}, and this model supports {supported}"
            self.fields.refuse(self.name, what)
            return Rotary(theta, RopeScaling())
        fraction = 1.0
        if kind != "proportional":
            found = entries.pop("partial_rotary_factor", self.default.fraction)
            fraction = _fraction(self.fields, f"{self.name}.partial_rotary_factor", found)
        elif self.default.fraction != 1:
            entries.setdefault("partial_rotary_factor", self.default.fraction)
        scaling = self._read_scaling(kind, entries)
        return Rotary(theta, scaling, fraction)

    def _read_scaling(self, kind: str, entries: dict[str, Any]) -> RopeScaling:
        """Return the scaling of a kind from the other entries of the table."""
        self._add_from_outside(kind, entries)
        known = {entry.theirs for entry in ENTRIES[kind]}
        for key in sorted({*entries} - known, key=str):
            where = f"{self.name}.{key}"
            self.fields.refuse(where, f"is {entries[key]!r:.80}, and is unknown")
        values: dict[str, Any] = {}
        complete = True
        for entry in ENTRIES[kind]:
            found = entries.get(entry.theirs)
            where = f"{self.name}.{entry.theirs}"
            if found is None and not entry.required:
                continue
            if found is None:
                self.fields.refuse(where, "is missing")
                complete = False
                continue
            value = entry.read(self.fields, where, found)
            complete = complete and value is not None
            values[entry.ours] = value
        if kind == "dynamic":
            values["original_context"] = self.fields.integer("max_position_embeddings")
        if not complete:
            return RopeScaling()
        return self.fields.nested(SCALINGS[kind], **values) or RopeScaling()

    def _add_from_outside(self, kind: str, entries: dict[str, Any]) -> None:
        """Add entries that a file may have outside of its table.

        `original_max_position_embeddings` outside has priority (Phi-3). Without `factor`, it is the
        ratio of `max_position_embeddings` to it (DeepSeek, Phi-3).
        """
        original = self.fields.value(_CONTEXT.theirs)
        if original is not None and _CONTEXT in ENTRIES[kind]:
            entries[_CONTEXT.theirs] = original
        if kind not in ("yarn", "longrope") or entries.get("factor") is not None:
            return
        longest = self.fields.value("max_position_embeddings")
        original = entries.get(_CONTEXT.theirs)
        if longest is None or original is None:
            return
        where = f"{self.name}.{_CONTEXT.theirs}"
        is_longest = self.fields.is_number("max_position_embeddings", longest, least=1)
        if is_longest and self.fields.is_number(where, original, least=1):
            entries["factor"] = max(1.0, longest / original)


def write_rotary(rotary: Rotary, *, complete: bool = False) -> dict[str, Any]:
    """Return the fields of config.json: the inverse of `read_rotary`.

    They are those before `transformers` 5, which all versions read.

    Args:
        rotary: The rotary embeddings.
        complete: Write a fraction of 1 and a scaling of null too.
    """
    fields: dict[str, Any] = {"rope_theta": rotary.theta}
    if complete:
        fields["rope_scaling"] = None
    if rotary.fraction != 1 or complete:
        fields["partial_rotary_factor"] = rotary.fraction
    table = _write_scaling(rotary.scaling)
    if len(table) > 1:
        fields["rope_scaling"] = table
    if isinstance(rotary.scaling, DynamicScaling):
        fields["max_position_embeddings"] = rotary.scaling.original_context
    if isinstance(rotary.scaling, LongRopeScaling):
        # Phi-3's class has a default for it that has priority over the table
        fields[_CONTEXT.theirs] = rotary.scaling.original_context
    return fields


def write_rotary_by_layer(rotary: Mapping[str, Rotary]) -> dict[str, Any]:
    """Return the fields of config.json: the inverse of `read_rotary_by_layer`."""
    tables: dict[str, Any] = {}
    fields: dict[str, Any] = {"rope_parameters": tables}
    for kind, of_kind in rotary.items():
        table = {**_write_scaling(of_kind.scaling), "rope_theta": of_kind.theta}
        if of_kind.fraction != 1:
            table["partial_rotary_factor"] = of_kind.fraction
        tables[kind] = table
        if isinstance(of_kind.scaling, DynamicScaling):
            fields["max_position_embeddings"] = of_kind.scaling.original_context
    return fields


def _write_scaling(scaling: RopeScaling | None) -> dict[str, Any]:
    """Return the table of a scaling, without optional entries that have their defaults."""
    scaling = scaling or RopeScaling()
    table: dict[str, Any] = {"rope_type": scaling.kind}
    defaults = type(scaling)
    for entry in ENTRIES[scaling.kind]:
        value = getattr(scaling, entry.ours)
        if entry.required or value != getattr(defaults, entry.ours):
            table[entry.theirs] = value
        if isinstance(value, tuple):
            table[entry.theirs] = list(value)
    return table
