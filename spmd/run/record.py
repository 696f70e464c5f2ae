"""Metadata of a checkpoint, and its fixed values for a resumed run."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from spmd.checkpoint.versions import library_versions
from spmd.errors import CheckpointError, Problem
from spmd.model_interface.model_config import earlier_kinds_of, recorded_values
from spmd.run.config import by_current_names, config_difference, config_values
from spmd.run.run_config import HasModel, RunConfig
from spmd.run.run_dir import IMPORTED
from spmd.storage.address import Location
from spmd.training.alternating import AlternatingStep
from spmd.training.step import TrainStep

_INPUTS = "inputs"
_NO_INPUTS: Mapping[str, str] = MappingProxyType({})

_TEXT = (
    "data.source",
    "data.mixture",
    "data.tokenizer",
    "data.text_field",
    "data.validation",
    "chat.template",
    "chat.longer",
    "chat.date",
    "chat.turns",
)
"""Fields that may change if the corpus stays the same: if the files were moved."""

MAY_CHANGE = (
    # How a step is computed: the result is the same up to the order of summation.
    "mesh",
    "slices",
    "devices",
    "zero",
    "remat",
    "attention",
    "context",
    "offload",
    "xla",
    "pipeline",
    "defer_grad_reduction",
    "accumulate",
    "logits_chunk",
    "model.unroll",
    "compilation_cache_dir",
    "compiled_step",
    "data.threads",
    "data.prefetch",
    # How updates are made: the training changes.
    "steps",
    "diloco.every",
    "diloco.fragments",
    "diloco.codec",
    "diloco.keep",
    "diloco.learning_rate",
    "logit_z_loss",
    "clip_activations",
    "teacher",  # to another folder with the same parameters
    "distillation",
    "optimizer.learning_rate",
    "optimizer.schedule",
    "optimizer.warmup_steps",
    "optimizer.decay_fraction",
    "optimizer.final_fraction",
    "optimizer.b1",
    "optimizer.b2",
    "optimizer.eps",
    "optimizer.momentum",
    "optimizer.schedule_fn",
    "optimizer.weight_decay",
    "optimizer.no_decay",
    "optimizer.clip_norm",
    "on_nan",
    "recovery",
    "compress",
    "quantize",
    # What is checked and written, and when.
    "norms",
    "evaluate",
    "sample",
    "sdc_checks",
    "out",
    "log_every",
    "metrics_to",
    "wandb",
    "mlflow",
    "checkpoint_every",
    "checkpoint_minutes",
    "keep_every",
    "max_to_keep",
    "keep_best",
    "lora.save_base",
    "data.cache",
    *_TEXT,
)
"""Config fields that may change when a run is resumed, with the fields below them."""

_SAME_STATE = {"float32", "bf16"}
"""Precisions with the same training state."""


def checkpoint_record(
    config: RunConfig,
    step: TrainStep | AlternatingStep,
    data: str,
    batch: int,
    inputs: Mapping[str, str] = _NO_INPUTS,
) -> dict[str, Any]:
    """Return the metadata of a run for its checkpoints.

    Args:
        data: Fingerprint.
        batch: Number of examples.
        inputs: Config field → fingerprint of a further input.
    """
    record: dict[str, Any] = {
        "data": data,
        "seed": config.seed,
        "batch": batch,
        "model": _kind(config),
        "config": config_values(config),
        "plan": step.text,
        "mesh": dict(step.mesh.shape),
        "versions": library_versions(),
    }
    if inputs:
        record[_INPUTS] = dict(inputs)
    return record


def _kind(config: RunConfig) -> str:
    """Return the class of the model's config, or of a run's without a model."""
    if isinstance(config, HasModel):
        return type(config.model).__name__
    return type(config).__name__


def changed_fields(record: Mapping[str, Any], config: RunConfig) -> dict[str, list[Any]]:
    """Return dotted path → [recorded, current] for the different config fields."""
    return config_difference(_recorded(record, config), config_values(config))


def check_resumable(
    record: Mapping[str, Any],
    config: RunConfig,
    data: str,
    batch: int,
    path: Location,
    inputs: Mapping[str, str] = _NO_INPUTS,
) -> None:
    """Raise `CheckpointError` if a checkpoint is not of this run.

    It may be of another model, other data or another optimizer.
    """
    _check_origin(record, path)
    same_text = record.get("data") == data
    recorded = _recorded(record, config)
    problems = list(_refused_changes(recorded, config_values(config), same_text))
    problems += _other_inputs(record.get(_INPUTS, {}), inputs)
    kind = _kind(config)
    if record.get("model", kind) != kind and not _is_earlier(record, config):
        # One problem in place of one for each field of the other class.
        what = f"was {record['model']} and is {kind}"
        problems = [Problem("model", what, fix="resume with the run's own config")]
    before = record.get("batch", batch)
    if not problems and before != batch:
        what = f"had {before} examples and has {batch}"
        problems.append(Problem("batch", what, fix=f"batches of {before}"))
    if config.steps < record["step"]:
        what = f"is {config.steps}, and the checkpoint is of step {record['step']}"
        problems.append(Problem("steps", what, fix=f"steps={record['step']} or more"))
    if problems:
        raise CheckpointError(f"{path} cannot be resumed with this config:", problems)


def _other_inputs(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each changed input of a run."""
    for field in {**before, **now}:
        if before.get(field) == now.get(field):
            continue
        what = "is not that with which the run was started"
        detail = f"it was {before.get(field, 'none')}, and is {now.get(field, 'none')}"
        yield Problem(field, what, detail, "restore it, or another folder")


def _check_origin(record: Mapping[str, Any], path: Location) -> None:
    """Raise `CheckpointError` if a checkpoint was written by no run."""
    if IMPORTED in record:
        problem = Problem(
            str(path),
            "contains imported parameters, not a run that can be resumed",
            fix=f'init="{path}", and another folder',
        )
        raise CheckpointError("Nothing was resumed:", [problem])
    kinds = {"step": int, "position": int, "config": dict}
    problems = list[Problem]()
    for name, kind in kinds.items():
        if not isinstance(record.get(name), kind):
            what = "is missing from the checkpoint's record, or has another type"
            problems.append(Problem(name, what))
    if problems:
        raise CheckpointError(f"{path} contains checkpoints of another tool:", problems)


def _refused_changes(
    before: Mapping[str, Any], after: Mapping[str, Any], same_text: bool
) -> Iterator[Problem]:
    """Yield a problem for each change forbidden to a resumed run."""
    changed = config_difference(before, after)
    free = set(MAY_CHANGE)
    if {before.get("precision"), after.get("precision")} <= _SAME_STATE:
        free.add("precision")
    bound = _bound_fields(before, after, same_text)
    for name, (old, new) in changed.items():
        if name not in bound and _is_below(name, free):
            continue
        what = f"was {_shown(old)} and is {_shown(new)}"
        fix = f"{_how_to_keep(name, old)}, or another folder"
        yield Problem(name, what, bound.get(name, ""), fix)
    if not same_text and not changed.keys() & set(_TEXT):
        where = "data.source" if "data" in after else "data"
        what = "is not that with which the run was started"
        yield Problem(where, what, fix="restore it, or another folder")


def _bound_fields(
    before: Mapping[str, Any], after: Mapping[str, Any], same_text: bool
) -> dict[str, str]:
    """Return field → reason for the fields of `MAY_CHANGE` bound in this run."""
    bound = dict[str, str]()
    if _counts_skips(before) != _counts_skips(after):
        reason = "only runs that skip updates keep their count in the training state"
        bound["on_nan"] = reason
        bound["recovery.on_spike"] = reason
    if not same_text:
        for name in _TEXT:
            bound[name] = ""
    return bound


def _is_below(name: str, fields: Iterable[str]) -> bool:
    """Return true if a dotted path is one of the fields, or below one."""
    return any(name == field or name.startswith(f"{field}.") for field in fields)


def _shown(value: Any) -> Any:
    if value == "":
        return "empty"
    return value


def _how_to_keep(name: str, old: Any) -> str:
    """Return a field with its old value, if it can be written in a few words."""
    if isinstance(old, str) and old:
        return f'{name}="{old}"'
    if isinstance(old, int | float) and not isinstance(old, bool):
        return f"{name}={old}"
    return "the value that the run was started with"


def _counts_skips(values: Mapping[str, Any]) -> bool:
    """Return true if the training state has a count of skipped updates."""
    if "skip" in (values["on_nan"], values["recovery"]["on_spike"]):
        return True
    return values.get("precision") == "fp16"


def _recorded(record: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """Return the recorded config.

    An earlier version may have recorded fewer fields: the others had their defaults.
    """
    defaults = config_values(type(config))
    values = by_current_names(record["config"])
    if not isinstance(config, HasModel):
        return _merged(defaults, values)
    recorded = values.get("model", {})
    defaults["model"] = _defaults(config.model, type(config.model), recorded)
    if _is_earlier(record, config):
        # An earlier class did not record what is in the layer table today.
        defaults["model"] = config_values(config.model)
        values["model"] = recorded_values(config.model, values["model"])
    return _merged(defaults, values)


def _defaults(config: Any, usual: Any, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of a config; nested configs that have recorded values keep their classes.

    Args:
        config: A dataclass.
        usual: Its class, or the default of the field that it is the value of.
        recorded: Its recorded values.
    """
    if usual is not type(config) and type(usual) is not type(config):
        usual = type(config)
    values = config_values(usual)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        inner = recorded.get(field.name)
        if dataclasses.is_dataclass(value) and isinstance(inner, Mapping) and inner:
            values[field.name] = _defaults(value, getattr(usual, field.name, None), inner)
    return values


def _is_earlier(record: Mapping[str, Any], config: RunConfig) -> bool:
    """Return whether a record is of an earlier class of the model's config."""
    return isinstance(config, HasModel) and record.get("model") in earlier_kinds_of(config.model)


def _merged(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(defaults)
    for name, value in values.items():
        inner = merged.get(name)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            merged[name] = _merged(inner, value)
        else:
            merged[name] = value
    return merged
