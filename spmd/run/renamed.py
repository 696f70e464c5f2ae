"""Earlier names of modules, classes, config fields and flags, for config files and run folders that have them."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from spmd.errors import Problem

MODULES = {
    "examples": "spmd.examples",
    "models": "spmd.models",
    "name_maps": "spmd.name_maps",
    "partition_rules": "spmd.partition_rules",
    "spmd.adapted": "spmd.plan.lora_layer",
    "spmd.annotate": "spmd.plan.annotate",
    "spmd.config": "spmd.run.config",
    "spmd.corpus": "spmd.data.corpus",
    "spmd.data": "spmd.data.loader",
    "spmd.flax": "spmd.plan.flax",
    "spmd.foresight": "spmd.analysis",
    "spmd.logical": "spmd.sharding.from_flax",
    "spmd.lora": "spmd.plan.lora",
    "spmd.loss": "spmd.gradients.losses",
    "spmd.mesh": "spmd.sharding.mesh",
    "spmd.model": "spmd.model_api.model",
    "spmd.moments": "spmd.optim.quantized",
    "spmd.optim": "spmd.optim.config",
    "spmd.parallel": "spmd.layers",
    "spmd.per_layer": "spmd.optim.per_layer",
    "spmd.precision": "spmd.model_api.precision",
    "spmd.remat": "spmd.model_api.remat",
    "spmd.rules": "spmd.sharding.rules",
    "spmd.search_tables": "spmd.sharding.from_search",
    "spmd.tokenizer": "spmd.data.tokenizer",
    "spmd.xla_flags": "spmd.distributed.xla_flags",
}
"""Modules that a config may import: earlier → current name."""
CLASSES = {"FaultsConfig": "SDCConfig", "LoraConfig": "LoRAConfig"}
FIELDS = {
    "faults": "sdc_checks",
    "keep": "max_to_keep",
    "loss_chunk": "logits_chunk",
    "programs": "compilation_cache_dir",
}
"""Fields of `TrainConfig`."""


def rename_hint(error: BaseException) -> str:
    """Return the fix for an error in a config file that uses an earlier name; empty for any other error.

    Example:
        >>> rename_hint(ModuleNotFoundError("No module named 'spmd.rules'", name="spmd.rules"))
        'spmd.rules is now spmd.sharding.rules'
    """
    missing = error.name or "" if isinstance(error, AttributeError | ImportError) else ""
    owner = getattr(getattr(error, "obj", None), "__name__", "")  # the module, if one lacks an attribute
    for name in (missing, f"{owner}.{missing}", missing.partition(".")[0], owner):
        if name in MODULES:
            return f"{name} is now {MODULES[name]}"
    words = re.findall(r"\w+", str(error))
    renamed = CLASSES | (FIELDS if "TrainConfig" in words else {})
    return next((f"{word} is now {renamed[word]}" for word in words if word in renamed), "")


def current_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a `TrainConfig` under the current names of its fields."""
    return {FIELDS.get(name, name): value for name, value in values.items()}


def renamed_flags(arguments: Iterable[str]) -> list[Problem]:
    """Return a problem for each earlier flag, with the current one as the fix.

    Example:
        >>> print(*renamed_flags(["--keep=3", "--steps", "7"]))
        --keep: is an unknown option
            fix: --keep is now --max-to-keep
    """
    problems = []
    for argument in arguments:
        flag = argument.partition("=")[0]
        field, dot, rest = flag.removeprefix("--").replace("-", "_").partition(".")
        if flag.startswith("--") and field in FIELDS:
            current = f"--{FIELDS[field]}{dot}{rest}".replace("_", "-")
            problems.append(Problem(flag, "is an unknown option", fix=f"{flag} is now {current}"))
    return problems
