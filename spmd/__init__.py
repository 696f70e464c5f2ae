"""Shard any Flax model by regex rules and train it on anything from one CPU to a pod.

```python
mesh = spmd.make_mesh(data=2, fsdp=2, tensor=2)
plan = spmd.make_plan(mesh, LLAMA, model, optimizer)
print(plan)                                   # one line per parameter: path, shape, spec, bytes per device, rule
state = spmd.init_state(plan, seed=0)
step = spmd.make_train_step(plan, loss_fn)
state = spmd.fit(state, step, batches, steps=1000)
```

`Run` trains the step in a folder, with checkpoints, evaluation and recovery; `train` a language model by its config.
"""

from spmd.data.chat import ChatConfig
from spmd.data.images import ImageFolder
from spmd.data.loader import DataConfig
from spmd.errors import SpmdError
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import value_and_grad
from spmd.gradients.exchange import exchange_once
from spmd.gradients.losses import classification_loss, cross_entropy, next_token_loss
from spmd.jaxpr.examples import per_example
from spmd.model_api.compress import CompressConfig
from spmd.model_api.grad_transform import Carry, GradTransform
from spmd.model_api.model import Model
from spmd.model_api.precision import Precision
from spmd.model_api.remat import Remat
from spmd.observe.metrics import Writer
from spmd.optim.config import OptimizerConfig, make_optimizer
from spmd.optim.ema import ema_params, with_ema
from spmd.optim.per_layer import per_layer
from spmd.optim.skip_updates import skip_bad_updates
from spmd.plan.annotate import annotate
from spmd.plan.flax import from_linen, from_nnx
from spmd.plan.plan import ShardingPlan, make_plan
from spmd.run.config import EvaluationConfig, PipelineConfig, SampleConfig, TrainConfig
from spmd.run.hooks import Throughput
from spmd.run.run import Run
from spmd.run.run_config import EvaluationInterval, RecoveryConfig, RunConfig, SDCConfig
from spmd.run.session import RunResult
from spmd.run.train import train
from spmd.sharding.batch import whole
from spmd.sharding.from_flax import rules_from_annotations
from spmd.sharding.from_search import rules_from_search
from spmd.sharding.layer_paths import Stack
from spmd.sharding.mesh import MeshShape, make_mesh, simulate_devices
from spmd.sharding.rules import Rules, replicate
from spmd.training.batch import place_batch
from spmd.training.evaluated_params import evaluated_params
from spmd.training.loop import Hook, fit
from spmd.training.state import TrainState, init_state
from spmd.training.step import make_train_step

__all__ = [
    "Carry",
    "ChatConfig",
    "CompressConfig",
    "DataConfig",
    "EvaluationConfig",
    "EvaluationInterval",
    "GradTransform",
    "Hook",
    "ImageFolder",
    "MeshShape",
    "Model",
    "OptimizerConfig",
    "PipelineConfig",
    "Precision",
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
    "Writer",
    "accumulate",
    "annotate",
    "classification_loss",
    "cross_entropy",
    "ema_params",
    "evaluated_params",
    "exchange_once",
    "fit",
    "from_linen",
    "from_nnx",
    "init_state",
    "make_mesh",
    "make_optimizer",
    "make_plan",
    "make_train_step",
    "next_token_loss",
    "per_example",
    "per_layer",
    "place_batch",
    "replicate",
    "rules_from_annotations",
    "rules_from_search",
    "simulate_devices",
    "skip_bad_updates",
    "train",
    "value_and_grad",
    "whole",
    "with_ema",
]
