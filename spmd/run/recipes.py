"""Gains of recipes of matmuls on a kind of chip, and recipes foreign to it."""

import collections
import math
from collections.abc import Iterable

from jax.sharding import Mesh

from spmd import tree
from spmd.chips import CHIPS, Chip, Hardware, chip_of, is_board_of
from spmd.errors import Problem
from spmd.model_interface.wrapped_param import is_stored
from spmd.plan.plan import ShardingPlan
from spmd.settings.quantize import QuantizationRecipe
from spmd.sharding.mesh import AnyMesh

_TUNING = "xla_gpu_autotune_level"


def recipe_problems(recipes: Iterable[QuantizationRecipe], device_kind: str) -> list[Problem]:
    """Return a problem for each recipe in a format unsupported by a kind of chip.

    Simulated devices have all formats.
    """
    chip = chip_of(device_kind)
    if chip.speeds is None or chip.platform == "tpu":
        # XLA has these formats on every TPU, and multiplies in bfloat16 where the chip does not.
        return []
    has = chip.speeds.products
    others = list[str]()
    if "int8" in has:
        others.append("int8")
    if "float8" in has:
        others += ["fp8", "fp8-block"]
    fix = ", ".join([*others, "or bf16"])
    problems = list[Problem]()
    for recipe in recipes:
        where = f"quantize {recipe.name}"
        if recipe.block == 32 and not chip.blocks_of_32:
            what = f"requires Blackwell: {chip.kind} does not support it"
            problems.append(Problem(where, what, fix=fix))
        elif recipe.inputs.startswith("float8") and "float8" not in has:
            what = f"requires float8: {chip.kind} does not support it"
            problems.append(Problem(where, what, fix=fix))
        elif recipe.inputs == "int8" and "int8" not in has:
            what = f"requires fast products of int8: {chip.kind} has none"
            problems.append(Problem(where, what, fix=fix))
    return problems


def precision_problems(compute: str, device_kind: str) -> list[Problem]:
    """Return a problem for matmuls of bfloat16 on a kind of chip without them.

    XLA refuses to compile them: "Unsupported algorithm on the current device(s)".
    """
    chips = [chip for chip in CHIPS.values() if is_board_of(chip, device_kind)]
    if compute != "bfloat16" or not chips or chips[0].bfloat16:
        return []
    what = f"is bfloat16, which {chips[0].kind} does not support"
    return [Problem("precision", what, fix='precision="fp16", or precision="float32"')]


def untuned_problems(
    recipes: Iterable[QuantizationRecipe], platform: str, flags: Iterable[str]
) -> list[Problem]:
    """Return a problem for each recipe of int8 on a GPU, if the compiler tries no algorithms.

    Its products are then zero. Seen on an H100 with JAX 0.11.2 (docs/xla-faults.md).

    Args:
        platform: Of the devices that run the step.
        flags: Of XLA, as text; the last value of one counts.
    """
    level = ""
    for flag in flags:
        name, equals, value = flag.lstrip("-").partition("=")
        if name == _TUNING and equals:
            level = value
    if platform != "gpu" or level != "0":
        return []
    what = f"is all zeros on a GPU with {_TUNING}=0"
    fix = f"drop {_TUNING} from XLA_FLAGS and --xla, or bf16 (--quantize '')"
    problems = list[Problem]()
    for recipe in recipes:
        if recipe.inputs == "int8":
            problems.append(Problem(f"quantize {recipe.name}", what, fix=fix))
    return problems


def recipe_lines(plan: ShardingPlan, device_kind: str) -> list[str]:
    """Return the kernels of each recipe, and its gain on a kind of chip or a warning."""
    chip = chip_of(device_kind)
    total = sum(_sizes(plan).values())
    lines = []
    for recipe, sizes in _kernels(plan).items():
        share = sum(sizes.values()) / total
        size = f"{len(sizes)} kernels, {share:.0%} of the parameters"
        lines.append(f"matmuls in {recipe.name}: {size}: {', '.join(sizes)}")
        if chip.speeds is not None:
            lines.append(f"  {_gain(recipe, chip, chip.speeds)}")
    return lines


def _gain(recipe: QuantizationRecipe, chip: Chip, speeds: Hardware) -> str:
    if recipe.scaling == "block":
        return f"WARNING: no faster: blocks of {recipe.block} are multiplied in the compute dtype"
    time = speeds.products.get(recipe.kind, 1.0)
    source = "the compiler's cycles" if chip.platform == "tpu" else "the data sheet"
    gain = f"on {chip.kind} a product takes {time:.2f} of its time in bfloat16, by {source}"
    if time < 1:
        return gain
    return f"WARNING: no faster: {gain}"


def _kernels(plan: ShardingPlan) -> dict[QuantizationRecipe, dict[str, int]]:
    """Return recipe → path → parameters of its kernels."""
    info = plan.model.info()
    stored = {node: path for path, node in info.stored_nodes.items()}
    found = collections.defaultdict[QuantizationRecipe, dict[str, int]](dict)
    for path, size in _sizes(plan).items():
        in_module = stored.get(path, info.frozen.get(path, path))
        placed = plan.placements.get(in_module)
        if placed is not None and placed.recipe is not None:
            found[placed.recipe][path] = size
    return found


def _sizes(plan: ShardingPlan) -> dict[str, int]:
    """Return the elements of parameters, trained and frozen, in whatever form they are stored."""
    info = plan.model.info()
    sizes = {entry.path: math.prod(entry.shape) for entry in plan.params}
    for entry in plan.variables:
        if entry.path in info.frozen and not info.is_stored_part(entry.path):
            sizes[entry.path] = math.prod(entry.shape)
    variables = tree.flatten(plan.abstract_variables, is_leaf=is_stored)
    for node in info.stored_nodes.values():
        sizes[node] = math.prod(variables[node].shape)
    return sizes


def device_kind(mesh: AnyMesh) -> str:
    """Return the kind of a mesh's devices; empty for an abstract mesh."""
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].device_kind
    return ""
