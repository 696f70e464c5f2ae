"""Save low-rank adapters as a folder that `peft` loads: `adapter_config.json` and `adapter_model.safetensors`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from spmd import tree
from spmd.errors import CheckpointError, ConfigError, Problem
from spmd.hf.family import Family, TensorSource, tensor_sources
from spmd.hf.safetensors import write_safetensors
from spmd.hf.save import host_slice, whole_folder, write_json
from spmd.lora.adapters import LORA_A, LORA_B, LoRAConfig

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."


def save_adapter(
    out: Path,
    adapters: Any,
    lora: LoRAConfig,
    family: Family,
    config: Any,
    *,
    shapes: Mapping[str, Any],
    dtype: Any = None,
    base: str = "",
) -> None:
    """Write a folder that `peft.PeftModel.from_pretrained` loads.

    Args:
        out: The folder; it must not exist.
        adapters: Parameters of the model of `with_lora`.
        lora: What they were trained with.
        config: The model's config.
        shapes: Path → shape of the model's own parameters.
        dtype: The tensors' dtype; None for that of the adapters.
        base: Folder of the model, for `base_model_name_or_path`.

    Raises:
        ConfigError: `peft` has no adapter for such a parameter.
    """
    if out.exists():
        raise CheckpointError(
            "Nothing was exported:", [Problem(str(out), "exists", fix="choose another --out")]
        )
    leaves = tree.flatten(adapters)
    paths = [path.removesuffix(LORA_A) for path in leaves if path.endswith(LORA_A)]
    sources = tensor_sources(family.names(config), shapes)
    problems = [problem for path in paths for problem in _problems(sources[path])]
    if problems:
        raise ConfigError(
            "These adapters cannot be exported; merged, they can (without --adapter):", problems
        )
    tensors = dict(pair for path in sorted(paths) for pair in _tensors(sources[path]))
    specs = {
        name: jax.ShapeDtypeStruct(
            leaves[path].shape[len(index) :][::-1], dtype or leaves[path].dtype
        )
        for name, (path, index) in tensors.items()
    }
    values: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": not all(sources[path].mapping.layout.transposed for path in paths),
        "target_modules": sorted(
            {_module(name) for path in paths for _, name in sources[path].tensors()}
        ),
        "inference_mode": True,
    }
    with whole_folder(out) as folder:
        arrays = (
            host_slice(leaves[path], index, specs[name].dtype).T
            for name, (path, index) in tensors.items()
        )
        write_safetensors(folder / ADAPTER, specs, arrays, {"format": "pt"})
        write_json(folder / ADAPTER_CONFIG, values)


def _problems(source: TensorSource) -> Iterator[Problem]:
    """Yield why `peft` cannot have an adapter of a parameter."""
    fix = "other --lora.targets"
    if source.mapping.layout.parts > 1:
        yield Problem(
            source.path,
            f"is a part of {source.mapping.tensor}, which `peft` adapts as a whole",
            fix=fix,
        )
    elif "{expert}" in source.mapping.tensor:
        yield Problem(source.path, "is of experts, which are no modules in `transformers`", fix=fix)
    elif "embed" in source.path.rpartition("/")[2]:
        yield Problem(
            source.path, "is an embedding, and an adapter of one is another kind in `peft`", fix=fix
        )


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight")


def _tensors(source: TensorSource) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Yield the name of each tensor, with the parameter and the index in its stack."""
    for index, name in source.tensors():
        for suffix, ending in ((LORA_A, "lora_A"), (LORA_B, "lora_B")):
            yield f"{_PREFIX}{_module(name)}.{ending}.weight", (source.path + suffix, index)
