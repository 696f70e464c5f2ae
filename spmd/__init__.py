"""Shard any Flax model by regex rules and train it on anything from one CPU to a pod.

```python
mesh = spmd.make_mesh(data=2, fsdp=2, tensor=2)
plan = spmd.make_plan(mesh, LLAMA, model, optimizer)
print(plan)  # one line per parameter: path, shape, spec, bytes per device, rule
state = spmd.init_state(plan, seed=0)
step = spmd.make_train_step(plan, loss_fn)
state = spmd.fit(state, step, batches, steps=1000)
```

`Run` trains the step in a folder, with checkpoints, evaluation and recovery; `train` a language
model by its config.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spmd.analysis.function_audit import audit_function
    from spmd.checkpoint.manager import CheckpointManager
    from spmd.data.chat import ChatConfig
    from spmd.data.image_shards import ImageShards
    from spmd.data.images import ImageFolder
    from spmd.data.loader import DataConfig
    from spmd.data.process_batches import ProcessBatches, process_shard
    from spmd.diloco.replicas import replica_mesh
    from spmd.diloco.transform import DiLoCo
    from spmd.errors import SpmdError
    from spmd.gradients.accumulate import accumulate
    from spmd.gradients.base import value_and_grad
    from spmd.gradients.deferred_reduction import defer_grad_reduction
    from spmd.gradients.distillation_loss import distillation_loss
    from spmd.gradients.losses import classification_loss, cross_entropy, next_token_loss
    from spmd.gradients.preference_loss import preference_loss
    from spmd.jaxpr.examples import per_example
    from spmd.model_interface.grad_transform import Carry, GradTransform
    from spmd.model_interface.model import Model
    from spmd.model_interface.remat import Remat
    from spmd.observe.metrics import Writer
    from spmd.observe.mlflow_writer import MLflowConfig
    from spmd.observe.wandb_writer import WandBConfig
    from spmd.optim.config import OptimizerConfig, make_optimizer
    from spmd.optim.ema import ema_params, with_ema
    from spmd.optim.mup import with_mup
    from spmd.optim.per_layer import per_layer
    from spmd.optim.skip_updates import skip_bad_updates
    from spmd.plan.annotate import annotate
    from spmd.plan.context import use_plan, use_rules
    from spmd.plan.linen_model import from_linen
    from spmd.plan.nnx_model import from_nnx
    from spmd.plan.plan import ShardingPlan, make_plan
    from spmd.plan.suggest import suggest_rules
    from spmd.precision import Precision
    from spmd.report.step_report import plan_report
    from spmd.run.config import EvaluationConfig, PipelineConfig, SampleConfig, TrainConfig
    from spmd.run.hooks import Throughput
    from spmd.run.run import Run
    from spmd.run.run_config import EvaluationInterval, RecoveryConfig, RunConfig, SDCConfig
    from spmd.run.session import RunResult
    from spmd.run.train import train
    from spmd.settings.compress import CompressConfig
    from spmd.settings.distillation import DistillationConfig
    from spmd.settings.dpo import DPOConfig
    from spmd.sharding.batch import whole
    from spmd.sharding.from_flax import rules_from_annotations
    from spmd.sharding.from_search import rules_from_search
    from spmd.sharding.from_transformers import rules_from_transformers
    from spmd.sharding.layer_paths import Stack
    from spmd.sharding.mesh import MeshShape, make_mesh, simulate_devices
    from spmd.sharding.rules import Rules, replicate
    from spmd.step_time.closed_memory import activation_bytes, model_state_bytes
    from spmd.training.alternating import AlternatingState, AlternatingStep
    from spmd.training.batch import place_batch
    from spmd.training.evaluated_params import evaluated_params
    from spmd.training.loop import Hook, fit
    from spmd.training.state import TrainState, init_state
    from spmd.training.step import make_train_step

__all__ = [
    "AlternatingState",
    "AlternatingStep",
    "Carry",
    "ChatConfig",
    "CheckpointManager",
    "CompressConfig",
    "DPOConfig",
    "DataConfig",
    "DiLoCo",
    "DistillationConfig",
    "EvaluationConfig",
    "EvaluationInterval",
    "GradTransform",
    "Hook",
    "ImageFolder",
    "ImageShards",
    "MLflowConfig",
    "MeshShape",
    "Model",
    "OptimizerConfig",
    "PipelineConfig",
    "Precision",
    "ProcessBatches",
    "RecoveryConfig",
    "Remat",
    "Rules",
    "Run",
    "RunConfig",
    "RunResult",
    "SDCConfig",
    "SampleConfig",
    "ShardingPlan",
    "SpmdError",
    "Stack",
    "Throughput",
    "TrainConfig",
    "TrainState",
    "WandBConfig",
    "Writer",
    "accumulate",
    "activation_bytes",
    "annotate",
    "audit_function",
    "classification_loss",
    "cross_entropy",
    "defer_grad_reduction",
    "distillation_loss",
    "ema_params",
    "evaluated_params",
    "fit",
    "from_linen",
    "from_nnx",
    "init_state",
    "make_mesh",
    "make_optimizer",
    "make_plan",
    "make_train_step",
    "model_state_bytes",
    "next_token_loss",
    "per_example",
    "per_layer",
    "place_batch",
    "plan_report",
    "preference_loss",
    "process_shard",
    "replica_mesh",
    "replicate",
    "rules_from_annotations",
    "rules_from_search",
    "rules_from_transformers",
    "simulate_devices",
    "skip_bad_updates",
    "suggest_rules",
    "train",
    "use_plan",
    "use_rules",
    "value_and_grad",
    "whole",
    "with_ema",
    "with_mup",
]

_HOMES = {
    "AlternatingState": "spmd.training.alternating",
    "AlternatingStep": "spmd.training.alternating",
    "Carry": "spmd.model_interface.grad_transform",
    "ChatConfig": "spmd.data.chat",
    "CheckpointManager": "spmd.checkpoint.manager",
    "CompressConfig": "spmd.settings.compress",
    "DPOConfig": "spmd.settings.dpo",
    "DataConfig": "spmd.data.loader",
    "DiLoCo": "spmd.diloco.transform",
    "DistillationConfig": "spmd.settings.distillation",
    "EvaluationConfig": "spmd.run.config",
    "EvaluationInterval": "spmd.run.run_config",
    "GradTransform": "spmd.model_interface.grad_transform",
    "Hook": "spmd.training.loop",
    "ImageFolder": "spmd.data.images",
    "ImageShards": "spmd.data.image_shards",
    "MLflowConfig": "spmd.observe.mlflow_writer",
    "MeshShape": "spmd.sharding.mesh",
    "Model": "spmd.model_interface.model",
    "OptimizerConfig": "spmd.optim.config",
    "PipelineConfig": "spmd.run.config",
    "Precision": "spmd.precision",
    "ProcessBatches": "spmd.data.process_batches",
    "RecoveryConfig": "spmd.run.run_config",
    "Remat": "spmd.model_interface.remat",
    "Rules": "spmd.sharding.rules",
    "Run": "spmd.run.run",
    "RunConfig": "spmd.run.run_config",
    "RunResult": "spmd.run.session",
    "SDCConfig": "spmd.run.run_config",
    "SampleConfig": "spmd.run.config",
    "ShardingPlan": "spmd.plan.plan",
    "SpmdError": "spmd.errors",
    "Stack": "spmd.sharding.layer_paths",
    "Throughput": "spmd.run.hooks",
    "TrainConfig": "spmd.run.config",
    "TrainState": "spmd.training.state",
    "WandBConfig": "spmd.observe.wandb_writer",
    "Writer": "spmd.observe.metrics",
    "accumulate": "spmd.gradients.accumulate",
    "activation_bytes": "spmd.step_time.closed_memory",
    "annotate": "spmd.plan.annotate",
    "audit_function": "spmd.analysis.function_audit",
    "classification_loss": "spmd.gradients.losses",
    "cross_entropy": "spmd.gradients.losses",
    "defer_grad_reduction": "spmd.gradients.deferred_reduction",
    "distillation_loss": "spmd.gradients.distillation_loss",
    "ema_params": "spmd.optim.ema",
    "evaluated_params": "spmd.training.evaluated_params",
    "fit": "spmd.training.loop",
    "from_linen": "spmd.plan.linen_model",
    "from_nnx": "spmd.plan.nnx_model",
    "init_state": "spmd.training.state",
    "make_mesh": "spmd.sharding.mesh",
    "make_optimizer": "spmd.optim.config",
    "make_plan": "spmd.plan.plan",
    "make_train_step": "spmd.training.step",
    "model_state_bytes": "spmd.step_time.closed_memory",
    "next_token_loss": "spmd.gradients.losses",
    "per_example": "spmd.jaxpr.examples",
    "per_layer": "spmd.optim.per_layer",
    "place_batch": "spmd.training.batch",
    "plan_report": "spmd.report.step_report",
    "preference_loss": "spmd.gradients.preference_loss",
    "process_shard": "spmd.data.process_batches",
    "replica_mesh": "spmd.diloco.replicas",
    "replicate": "spmd.sharding.rules",
    "rules_from_annotations": "spmd.sharding.from_flax",
    "rules_from_search": "spmd.sharding.from_search",
    "rules_from_transformers": "spmd.sharding.from_transformers",
    "simulate_devices": "spmd.sharding.mesh",
    "skip_bad_updates": "spmd.optim.skip_updates",
    "suggest_rules": "spmd.plan.suggest",
    "train": "spmd.run.train",
    "use_plan": "spmd.plan.context",
    "use_rules": "spmd.plan.context",
    "value_and_grad": "spmd.gradients.base",
    "whole": "spmd.sharding.batch",
    "with_ema": "spmd.optim.ema",
    "with_mup": "spmd.optim.mup",
}
"""Public name → its module, imported at the first use of the name."""


def __getattr__(name: str) -> Any:
    """Import a public name at its first use (PEP 562).

    A program waits for the libraries of the names it uses, and for no others.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, those not yet imported too."""
    return sorted({*globals(), *__all__})
