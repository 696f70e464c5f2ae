"""One tiny Llama and its plans, shared by the tests so that equal plans share compiled programs."""

import dataclasses
import functools

import jax
import optax

from spmd.gradients.losses import LossFn, next_token_loss
from spmd.model_interface.model import Model
from spmd.models.decoder import DecoderConfig
from spmd.models.llama import PRESETS
from spmd.partition_rules.llama import LLAMA, LLAMA_TIED
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import ShardingPlan, make_plan
from spmd.sharding.mesh import AnyMesh, make_mesh

CONFIG = PRESETS["test"]
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(1e-2, b2=0.95, weight_decay=0.1)
)


@functools.cache
def model(config: DecoderConfig = CONFIG) -> Model:
    return from_nnx(config.build)


@functools.cache
def loss_fn(config: DecoderConfig = CONFIG) -> LossFn:
    return next_token_loss(model(config))


def mesh(**sizes: int) -> AnyMesh:
    """A mesh over as many of the eight devices as the sizes ask for."""
    count = 1
    for size in sizes.values():
        count *= size
    return make_mesh(devices=jax.devices()[:count], **sizes)


@functools.cache
def plan(
    config: DecoderConfig = CONFIG, optimizer=OPTIMIZER, options: tuple = (), **sizes: int
) -> ShardingPlan:
    rules = LLAMA_TIED if config.tied else LLAMA
    return make_plan(mesh(**sizes), rules, model(config), optimizer, **dict(options))


def replaced(**fields) -> DecoderConfig:
    return dataclasses.replace(CONFIG, **fields)
