"""What recipes of matmuls gain on a kind of chip, and which of them it has not."""

import collections
import math
from collections.abc import Iterable

from jax.sharding import Mesh

from spmd.analysis.topology import CHIPS
from spmd.errors import Problem
from spmd.plan.plan import ShardingPlan
from spmd.settings.quantize import MatmulRecipe
from spmd.sharding.mesh import AnyMesh
from spmd.step_time.hardware import HARDWARE

_BLOCKS_OF_32 = {"b200"}
"""GPUs whose matmuls have the format of `mxfp8`."""

_TUNING = "xla_gpu_autotune_level"


def recipe_problems(recipes: Iterable[MatmulRecipe], device_kind: str) -> list[Problem]:
    """Return a problem for each recipe in a format that this kind of chip has not; simulated devices have all."""
    kind = _kind(device_kind)
    if kind not in HARDWARE or CHIPS[kind].platform == "tpu":
        return []  # XLA has these formats on every TPU, and multiplies in bfloat16 where the chip does not
    has, problems = HARDWARE[kind].products, []
    fix = ", ".join(["int8"] * ("int8" in has) + ["fp8", "fp8-block"] * ("float8" in has)) + ", or bf16"
    for recipe in recipes:
        if recipe.block == 32 and kind not in _BLOCKS_OF_32:
            problems.append(Problem(f"quantize {recipe.name}", f"is Blackwell's format, which {kind} has not", fix=fix))
        elif recipe.inputs.startswith("float8") and "float8" not in has:
            problems.append(Problem(f"quantize {recipe.name}", f"needs float8, which {kind} has not", fix=fix))
    return problems


def untuned_problems(recipes: Iterable[MatmulRecipe], platform: str, flags: Iterable[str]) -> list[Problem]:
    """Return a problem for each recipe of int8 on a GPU whose compiler tries no algorithms: its products are zero.

    Seen on an H100 with JAX 0.11.2 (docs/xla-faults.md).

    Args:
        platform: Of the devices that run the step.
        flags: Of XLA, as text; the last value of one counts.
    """
    levels = [flag.partition("=")[2] for flag in flags if flag.lstrip("-").startswith(f"{_TUNING}=")]
    if platform != "gpu" or levels[-1:] != ["0"]:
        return []
    what = f"is all zeros on a GPU with {_TUNING}=0"
    fix = f"drop {_TUNING} from XLA_FLAGS and --xla, or bf16 (--quantize '')"
    return [Problem(f"quantize {recipe.name}", what, fix=fix) for recipe in recipes if recipe.inputs == "int8"]


def recipe_lines(plan: ShardingPlan, device_kind: str) -> list[str]:
    """Return what each recipe applies to, and what it gains on a kind of chip, with a warning where that is nothing."""
    kind, total = _kind(device_kind), sum(math.prod(entry.shape) for entry in plan.params)
    lines = []
    for recipe, sizes in _kernels(plan).items():
        what = f"matmuls in {recipe.name}: {len(sizes)} kernels, {sum(sizes.values()) / total:.0%} of the parameters"
        lines.append(f"{what}: {', '.join(sizes)}")
        if kind in HARDWARE:
            lines.append(f"  {_gain(recipe, kind)}")
    return lines


def _gain(recipe: MatmulRecipe, kind: str) -> str:
    if recipe.scaling == "block":
        return f"WARNING: no faster: blocks of {recipe.block} are multiplied in the compute dtype"
    time = HARDWARE[kind].products.get(recipe.kind, 1.0)
    source = "the compiler's cycles" if CHIPS[kind].platform == "tpu" else "the data sheet"
    gain = f"on {kind} a product takes {time:.2f} of its time in bfloat16, by {source}"
    return gain if time < 1 else f"WARNING: no faster: {gain}"


def _kernels(plan: ShardingPlan) -> dict[MatmulRecipe, dict[str, int]]:
    """Return recipe → path → parameters of the kernels that have it."""
    frozen, found = plan.model.info().frozen, collections.defaultdict[MatmulRecipe, dict[str, int]](dict)
    for entry in (*plan.params, *(entry for entry in plan.variables if entry.path in frozen)):
        placed = plan.placements.get(frozen.get(entry.path, entry.path))
        if placed is not None and placed.recipe is not None:
            found[placed.recipe][entry.path] = math.prod(entry.shape)
    return found


def device_kind(mesh: AnyMesh) -> str:
    """Return the kind of a mesh's devices; empty for an abstract mesh."""
    return mesh.devices.flat[0].device_kind if isinstance(mesh, Mesh) else ""


def _kind(device_kind: str) -> str:
    return next((kind for kind, chip in CHIPS.items() if chip.device_kind == device_kind), "")
