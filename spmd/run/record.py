"""Metadata that a checkpoint contains, and the values in it that a resumed run must keep."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spmd.checkpoint.versions import library_versions
from spmd.errors import CheckpointError, Problem
from spmd.plan.plan import ShardingPlan
from spmd.run.config import config_difference, config_values
from spmd.run.run_config import RunConfig
from spmd.run.run_dir import IMPORTED

_TEXT = (
    *("data.source", "data.mixture", "data.tokenizer", "data.text_field", "data.validation"),
    *("chat.template", "chat.longer", "chat.date"),
)
"""Fields that may change if the corpus stays the same: if the files were moved."""

MAY_CHANGE = (
    # How a step is computed: the result is the same up to the order of summation.
    *("mesh", "slices", "devices", "zero", "remat", "attention", "context", "offload", "xla", "pipeline"),
    *("exchange_once", "accumulate", "logits_chunk", "model.unroll"),
    *("compilation_cache_dir", "data.threads", "data.prefetch"),
    # How updates are made: the training changes.
    *("steps", "optimizer.learning_rate", "optimizer.schedule", "optimizer.warmup_steps", "optimizer.decay_fraction"),
    *("optimizer.final_fraction", "optimizer.b1", "optimizer.b2", "optimizer.eps", "optimizer.momentum"),
    *(
        "optimizer.schedule_fn",
        "optimizer.weight_decay",
        "optimizer.no_decay",
        "optimizer.clip_norm",
        "on_nan",
        "recovery",
    ),
    *("compress", "quantize"),
    # What is checked and written, and when.
    *("evaluate", "sample", "sdc_checks", "out", "log_every", "metrics_to"),
    *("checkpoint_every", "max_to_keep", "keep_best"),
    "lora.save_base",
    *("data.cache", *_TEXT),
)
"""Config fields that may change when a run is resumed, with the fields below them."""

_SAME_STATE = {"float32", "bf16"}
"""Precisions with the same training state."""


def checkpoint_record(config: RunConfig, plan: ShardingPlan, data: str, batch: int) -> dict[str, Any]:
    """Return the metadata of a run that its checkpoints contain; `data` is a fingerprint, `batch` counts examples."""
    return {
        "data": data,
        "seed": config.seed,
        "batch": batch,
        "model": _kind(config),
        "config": config_values(config),
        "plan": str(plan),
        "mesh": dict(plan.mesh.shape),
        "versions": library_versions(),
    }


def _kind(config: RunConfig) -> str:
    """Return the class of the model's config, or of the run's where it has none."""
    return type(getattr(config, "model", config)).__name__


def changed_fields(record: Mapping[str, Any], config: RunConfig) -> dict[str, list[Any]]:
    """Return dotted path → [recorded, current] for the config fields that differ."""
    return config_difference(_recorded(record, config), config_values(config))


def check_resumable(record: Mapping[str, Any], config: RunConfig, data: str, batch: int, path: Path) -> None:
    """Raise `CheckpointError` if a checkpoint is not of this run: of another model, other data or another optimizer."""
    if IMPORTED in record:
        fix = f"--init {path}, and another --out"
        problem = Problem(str(path), "contains imported parameters, not a run that can be resumed", fix=fix)
        raise CheckpointError("Nothing was resumed:", [problem])
    kinds = {"step": int, "position": int, "config": dict}
    if unknown := [name for name, kind in kinds.items() if not isinstance(record.get(name), kind)]:
        problems = [Problem(name, "is missing from the checkpoint's record, or has another type") for name in unknown]
        raise CheckpointError(f"{path} contains checkpoints of another tool:", problems)
    same_text = record.get("data") == data
    problems = list(_refused_changes(_recorded(record, config), config_values(config), same_text))
    kind = _kind(config)
    if record.get("model", kind) != kind:
        problems = [Problem("model", f"was {record['model']} and is {kind}", fix="resume with the run's own config")]
    if not problems and (before := record.get("batch", batch)) != batch:
        problems.append(Problem("batch", f"had {before} examples and has {batch}", fix=f"batches of {before}"))
    if config.steps < record["step"]:
        fix = f"--steps {record['step']} or more"
        problems.append(Problem("steps", f"is {config.steps}, and the checkpoint is of step {record['step']}", fix=fix))
    if problems:
        raise CheckpointError(f"{path} cannot be resumed with this config:", problems)


def _refused_changes(before: Mapping[str, Any], after: Mapping[str, Any], same_text: bool) -> Iterator[Problem]:
    """Yield a problem for each change that a resumed run cannot make."""
    changed = config_difference(before, after)
    free = {*MAY_CHANGE, *(["precision"] if {before.get("precision"), after.get("precision")} <= _SAME_STATE else [])}
    counted = "only runs that skip updates keep their count in the training state"
    bound = {} if _counts_skips(before) == _counts_skips(after) else {"on_nan": counted, "recovery.on_spike": counted}
    bound |= {} if same_text else dict.fromkeys(_TEXT, "")
    for name, (old, new) in changed.items():
        if name not in bound and any(name == field or name.startswith(f"{field}.") for field in free):
            continue
        is_plain = isinstance(old, int | float | str) and not isinstance(old, bool) and old != ""
        fix = f"--{name.replace('_', '-')} {old}" if is_plain else "the value that the run was started with"
        was, now = (value if value != "" else "empty" for value in (old, new))
        yield Problem(name, f"was {was} and is {now}", bound.get(name, ""), f"{fix}, or another --out")
    if not same_text and not changed.keys() & set(_TEXT):
        where = "data.source" if "data" in after else "data"
        yield Problem(where, "is not that with which the run was started", fix="restore it, or another --out")


def _counts_skips(values: Mapping[str, Any]) -> bool:
    """Return whether the training state has a count of skipped updates."""
    return "skip" in (values["on_nan"], values["recovery"]["on_spike"]) or values.get("precision") == "fp16"


def _recorded(record: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """Return the recorded config; a field that the record lacks, since an earlier version wrote it, had its default."""
    defaults = config_values(type(config))
    if hasattr(config, "model"):
        defaults["model"] = config_values(type(config.model))
    return _merged(defaults, record["config"])


def _merged(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(defaults)
    for name, value in values.items():
        inner = merged.get(name)
        merged[name] = _merged(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return merged
