"""Save low-rank adapters in the format of `peft`.

A folder has `adapter_config.json` and `adapter_model.safetensors`.
"""

import functools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmd import tree
from spmd.distributed.hosts import run_on_first
from spmd.errors import ConfigError, Problem
from spmd.hf.family import Family, TensorSource, tensor_sources
from spmd.hf.layout import TRANSPOSED
from spmd.hf.safetensors import write_safetensors
from spmd.hf.save import (
    check_absent,
    gather_and_write,
    host_slice,
    whole_folder,
    write_json,
)
from spmd.lora.adapters import LORA_A, LORA_B, LORA_M
from spmd.lora.config import LoRAConfig

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_ENDINGS = {
    LORA_A: "lora_A.weight",
    LORA_B: "lora_B.weight",
    LORA_M: "lora_magnitude_vector",
}

_Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name of each tensor → path of the adapter, and the index in its stack."""


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
    """Write a folder for `peft.PeftModel.from_pretrained`; of several processes, all make this call.

    Args:
        out: The folder; it must not exist.
        adapters: Parameters of the model of `with_lora`, magnitudes themselves among them
            (`spmd.lora.adapters.whole_magnitudes`).
        lora: What they were trained with.
        config: The model's config.
        shapes: Path → shape of the model's own parameters.
        dtype: The tensors' dtype; None for that of the adapters.
        base: Folder of the model, for `base_model_name_or_path`.

    Raises:
        ConfigError: `peft` has no adapter for such a parameter.
    """
    run_on_first(functools.partial(check_absent, out))
    leaves = tree.flatten(adapters)
    sources = tensor_sources(family.names(config), shapes)
    adapted = _adapted(leaves, sources)
    tensors = _tensors(sorted(adapted, key=lambda source: source.path), leaves)
    specs = _specs(tensors, leaves, dtype)
    values = _config_values(adapted, leaves, lora, base)

    def write(arrays: Iterator[np.ndarray]) -> None:
        with whole_folder(out) as folder:
            write_safetensors(folder / ADAPTER, specs, arrays, {"format": "pt"})
            write_json(folder / ADAPTER_CONFIG, values)

    gather_and_write(_arrays(tensors, leaves, specs), write)


def _adapted(leaves: Iterable[str], sources: Mapping[str, TensorSource]) -> list[TensorSource]:
    """Return the adapted parameters; an error if `peft` cannot adapt one of them."""
    adapted: list[TensorSource] = []
    problems: list[Problem] = []
    for path in leaves:
        if not path.endswith(LORA_A):
            continue
        source = sources[path.removesuffix(LORA_A)]
        adapted.append(source)
        what = _obstacle(source)
        if what:
            problems.append(Problem(source.path, what, fix="other --lora.targets"))
    if problems:
        title = "These adapters cannot be exported; merged, they can (without --adapter):"
        raise ConfigError(title, problems)
    return adapted


def _obstacle(source: TensorSource) -> str:
    """Return the reason against an adapter of a parameter in `peft`; empty if there is none."""
    if not source.mapping.layout.is_whole:
        return f"is a part of {source.mapping.tensor}, which `peft` adapts as a whole"
    if "{expert}" in source.mapping.tensor or source.shared_dims:
        return "is of experts, which are no modules in `transformers`"
    if "embed" in source.path.rpartition("/")[2]:
        return "is an embedding, and an adapter of one is another kind in `peft`"
    return ""


def _tensors(sources: Iterable[TensorSource], leaves: Container[str]) -> _Tensors:
    """Return the tensors of the adapter of each of the model's tensors."""
    found: _Tensors = {}
    for source in sources:
        for index, tensor in source.tensors():
            for suffix, ending in _ENDINGS.items():
                path = source.path + suffix
                if path in leaves:
                    found[f"{_PREFIX}{_module(tensor)}.{ending}"] = path, index
    return found


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight")


def _specs(
    tensors: _Tensors, leaves: Mapping[str, jax.Array], dtype: Any
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape and dtype of each tensor: `[out, in]`, as PyTorch has them."""
    specs: dict[str, jax.ShapeDtypeStruct] = {}
    for name, (path, index) in tensors.items():
        leaf = leaves[path]
        shape = leaf.shape[len(index) :]
        specs[name] = jax.ShapeDtypeStruct(shape[::-1], dtype or leaf.dtype)
    return specs


def _arrays(
    tensors: _Tensors, leaves: Mapping[str, jax.Array], specs: Mapping[str, jax.ShapeDtypeStruct]
) -> Iterator[np.ndarray]:
    """Yield the value of each tensor."""
    for name, (path, index) in tensors.items():
        yield host_slice(leaves[path], index, specs[name].dtype).T


def _config_values(
    adapted: Sequence[TensorSource], leaves: Mapping[str, jax.Array], lora: LoRAConfig, base: str
) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
    ranks: dict[str, int] = {}
    for source in adapted:
        rank = leaves[source.path + LORA_A].shape[-1]
        for _, tensor in source.tensors():
            ranks[_module(tensor)] = rank
    other_ranks = {module: rank for module, rank in ranks.items() if rank != lora.rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": not all(source.mapping.layout == TRANSPOSED for source in adapted),
        "target_modules": sorted(ranks),
        "rank_pattern": other_ranks,
        "use_rslora": lora.rank_stabilized,
        "use_dora": lora.dora,
        "inference_mode": True,
    }
