"""Quantization of the frozen parameters beside adapters (QLoRA): a table, and rules."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import ConfigError, Problem, did_you_mean
from spmd.lora.quantized_param import QuantizedParam, quantize_param
from spmd.lora.weight_formats import FORMATS, WeightFormat
from spmd.model_interface.model import Model, abstract_key
from spmd.model_interface.wrapped_param import is_stored, store_as
from spmd.plan.fsdp import decode_shards
from spmd.settings.quantize import PLAIN, parse_table
from spmd.sharding.layer_paths import dims_of
from spmd.sharding.mesh import AnyMesh, entry_axes, shards_of
from spmd.sharding.patterns import compile_pattern
from spmd.sharding.rules import Replicate, Rules, matches, replicate

_FIELD = "lora.quantize"
_SMALL = "one number for many weights"


def find_formats(model: Model, table: str, rules: Rules) -> dict[str, WeightFormat]:
    """Return path → format of the quantized kernels.

    They are kernels `[in, out]` between layers, as their layers declare them: no lookups, logits or
    routers.

    Args:
        table: A format for all of them, or rows `PATTERN=FORMAT,…`; the first match decides.

    Raises:
        ConfigError: A row matches no such kernel that no row before matches, or the inputs of one
            are no whole blocks.
    """
    if not table:
        return {}
    rules = rules.with_recorded(model.info().stacks)
    shapes = _kernel_shapes(model, rules)
    names = {path: rules.layer_path(path)[0] for path in shapes}
    problems = list[Problem]()
    chosen = dict[str, WeightFormat | None]()
    for pattern, name in parse_table(table):
        found = [path for path in shapes if compile_pattern(pattern).fullmatch(names[path])]
        new = [path for path in found if path not in chosen]
        if not new:
            problems.append(_unused_row(pattern, name, found, names))
        chosen |= dict.fromkeys(new, FORMATS.get(name))
    formats = dict[str, WeightFormat]()
    for path, weight_format in chosen.items():
        if weight_format is not None:
            formats[path] = weight_format
            problems += _block_problems(names[path], shapes[path], weight_format)
    if problems:
        raise ConfigError("The frozen parameters cannot be quantized:", problems)
    return formats


def _kernel_shapes(model: Model, rules: Rules) -> dict[str, tuple[int, ...]]:
    """Return the shapes of kernels `[..., in, out]`, by path."""
    info = model.info()
    shapes = dict[str, tuple[int, ...]]()
    for path, leaf in tree.flatten(jax.eval_shape(model.init, abstract_key())).items():
        matrix = info.matrices.get(path)
        if matrix is None or path in info.no_matrix or path in info.sent_exactly:
            continue
        stacked = list(dims_of(path, rules.stacks))
        ndim = len(leaf.shape) - len(stacked)
        is_last = matrix.inputs == (ndim - 2,) and matrix.outputs == (ndim - 1,)
        if is_last and stacked == list(range(len(stacked))):
            shapes[path] = tuple(leaf.shape)
    return shapes


def _unused_row(pattern: str, name: str, found: Sequence[str], names: Mapping[str, str]) -> Problem:
    """Return the problem of a row without a kernel of its own."""
    row = f"{_FIELD}, row {pattern + '=' + name!r}"
    if found:
        return Problem(row, "is never used: rows before it match the same kernels")
    fix = did_you_mean(pattern, sorted(set(names.values())))
    return Problem(row, "matches no kernel [in, out] between layers", fix=fix)


def _block_problems(name: str, shape: Sequence[int], weight_format: WeightFormat) -> list[Problem]:
    """Return a problem if a kernel's inputs are no whole blocks."""
    inputs = shape[-2]
    block = weight_format.block
    if not block or inputs % block == 0:
        return []
    what = f"has inputs that are no whole blocks of {weight_format.name}"
    detail = f"{inputs} / {block} = {inputs / block:.4g}"
    fix = f'{_FIELD}="{name}=int8,…", whose scale is of all inputs, or {name}={PLAIN}'
    return [Problem(name, what, detail, fix)]


def block_problems(model: Model, table: str, rules: Rules, mesh: AnyMesh) -> list[Problem]:
    """Return a problem for each kernel with blocks of inputs that a mesh would split."""
    problems = list[Problem]()
    rules = rules.with_recorded(model.info().stacks)
    shapes = _kernel_shapes(model, rules)
    for path, weight_format in find_formats(model, table, rules).items():
        match = rules.match(path)
        block = weight_format.block
        if not block or match is None or isinstance(match.requested, Replicate):
            continue
        name, stacked = rules.layer_path(path)
        ndim = len(shapes[path]) - len(stacked)
        entries = [*match.requested, *(None,) * (ndim - len(match.requested))]
        shards = shards_of(entries[-2], mesh.shape)
        inputs = shapes[path][-2]
        blocks = inputs // block
        if blocks % shards:
            what = f"is split over {shards} devices, and has {blocks} blocks of {block} inputs"
            detail = f"{inputs} / {block} / {shards} = {blocks / shards:.4g}"
            axes = " × ".join(entry_axes(entries[-2]))
            fix = f"{_FIELD}='{name}=int8,…', {name}={PLAIN}, or fewer devices along {axes}"
            problems.append(Problem(name, what, detail, fix))
    return problems


def quantize_base(base: Any, formats: Mapping[str, WeightFormat], dtype: str, model: Model) -> Any:
    """Return frozen parameters with the quantized ones as `QuantizedParam`s.

    Args:
        dtype: Dtype of the parameters without a cast.
    """
    info = model.info()

    def place(path: str, param: Any) -> Any:
        if path not in formats:
            return param
        takes_codes = path in info.takes_codes
        return quantize_param(param, formats[path], dtype=dtype, path=path, takes_codes=takes_codes)

    return tree.map_with_path(place, base)


def store_base(params: Any, like: Any) -> Any:
    """Return loaded parameters as they are stored in a tree of abstract arrays."""
    return jax.tree.map(lambda param, stored: store_as(stored, param), params, like)


def decode_base(base: Any, like: Any) -> Any:
    """Return frozen parameters of a run, the quantized ones decoded into the arrays of `like`."""

    def decode(wanted: jax.ShapeDtypeStruct, param: Any) -> Any:
        if not isinstance(param, QuantizedParam):
            return param
        anonymous = dataclasses.replace(param, path="")  # one program for all paths
        return _decoder(wanted.dtype, wanted.sharding)(anonymous)

    return jax.tree.map(decode, like, base)


@functools.cache
def _decoder(dtype: Any, sharding: Any) -> Callable[[Any], jax.Array]:
    """Return the program for decoding a parameter; compiled once for each shape and format."""

    def decode(stored: Any) -> jax.Array:
        return stored.decoded(dtype)

    return jax.jit(decode, out_shardings=sharding)


def start_base(base: Any, model: Model) -> Any:
    """Return the frozen parameters for a forward pass.

    Codes are decoded here where no layer decodes its own: outside of stacks that are run layer by
    layer.
    """
    info = model.info()
    stacks = info.stacks or {}

    def start(path: str, param: Any) -> Any:
        if not isinstance(param, QuantizedParam) or param.takes_codes:
            return param
        if info.decodes_layers and dims_of(path, stacks):
            return param
        return decode_shards(param, path, param.dtype, is_stack=True)

    return tree.map_with_path(start, base, is_leaf=is_stored)


def rules_of_parts(base: Any, rules: Rules) -> Rules:
    """Return a table for frozen parameters, some of them quantized.

    Codes and scales of blocks are split as the parameter is, by its row; what else a format has
    has a row of its own.

    Args:
        base: The abstract frozen parameters, by the paths of the model.
    """
    stored = dict[str, QuantizedParam]()
    for path, param in tree.flatten(base, is_leaf=is_stored).items():
        if isinstance(param, QuantizedParam):
            stored[path] = param
    own = dict[str, P | Replicate]()
    for path, param in stored.items():
        match = rules.match(path)
        if match is not None:  # the plan reports what no rule matches
            name, stacked = rules.layer_path(path)
            own |= _own_rows(name, _of_layer(param, len(stacked)), match.requested)
    rows = []
    for pattern, value in rules.params:
        if any(matches(pattern, path, rules.stacks) for path in stored):
            pattern = f"(?:{pattern})(?:/codes|/scale)?"
        rows.append((pattern, value))
    return dataclasses.replace(rules, params=(*own.items(), *rows))


def _own_rows(
    name: str, layer: QuantizedParam, requested: P | Replicate
) -> dict[str, P | Replicate]:
    """Return rows for the arrays with another split than their parameter."""
    rows: dict[str, P | Replicate] = {}
    spec = P() if isinstance(requested, Replicate) else requested
    specs = layer.specs_by(spec)
    whole = specs.codes
    for part, own in tree.flatten(specs, is_leaf=lambda x: isinstance(x, P)).items():
        if own == whole:
            continue
        pattern = re.escape(f"{name}/{part}")
        rows[pattern] = own if any(own) else replicate(_SMALL)
    return rows


def _of_layer(param: QuantizedParam, stacked: int) -> QuantizedParam:
    """Return the abstract arrays of one layer."""

    def layer(part: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(part.shape[stacked:], part.dtype)

    return jax.tree.map(layer, param)
