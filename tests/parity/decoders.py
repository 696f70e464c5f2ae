"""The comparison of small decoders on a mesh, with or without stages, with one device."""

import functools
import zlib

import jax
import numpy as np

from spmd import tree
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import GradFn, value_and_grad
from spmd.gradients.losses import next_token_loss
from spmd.models.decoder import DecoderConfig, decoder_rules
from spmd.pipeline.grad_fn import pipeline
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.tick_table import tabulate
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import ShardingPlan
from spmd.testing import BUGS, Parity, token_batches
from spmd.training.state import TrainState, abstract_state
from tests.one_device import REORDERED, Job

SEQUENCE = 16
MICROBATCHES = 2


@functools.cache
def job_of(config: DecoderConfig, microbatches: int, steps: int) -> Job:
    """Some steps of a decoder on one device."""
    model = from_nnx(config.build)
    grad_fn = accumulate(value_and_grad(next_token_loss(model, chunk=7)), microbatches)
    batches = token_batches((8, SEQUENCE), min(config.vocab, 64), steps)
    return Job(model, decoder_rules(config), grad_fn, batches, initial=draw_state)


def draw_state(plan: ShardingPlan) -> TrainState:
    """An initial state whose norms and biases are not 1 and 0; nothing compiles."""
    return tree.map_with_path(_draw, abstract_state(plan))


def _draw(path: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Random values of a parameter or variable, equal on every mesh, and zeros of all else."""
    values = np.zeros(leaf.shape, leaf.dtype)
    if path.startswith(("params/", "variables/")):
        rng = np.random.default_rng(zlib.crc32(path.encode()))
        scale = 0.3
        if path.endswith("kernel"):
            scale = leaf.shape[-2] ** -0.5
        values = rng.normal(float(path.endswith("scale")), scale, leaf.shape).astype(leaf.dtype)
    return jax.device_put(values, leaf.sharding)


def _in_stages(job: Job, stages: int) -> GradFn:
    """The gradient function of a pipeline."""
    table = tabulate(make_schedule("1f1b", stages, MICROBATCHES, 1))
    return pipeline(next_token_loss(job.model, chunk=7), table)


def compare(config: DecoderConfig, *, steps: int = 1, bug: str = "", **sizes: int) -> Parity:
    """A decoder on a mesh of these sizes against one device, with a bug of `BUGS` if given.

    Stages take their microbatches as one device does.
    """
    stages = sizes.get("pipe", 1)
    if stages == 1:
        job = job_of(config, 1, steps)
        grad_fn = job.grad_fn
    else:
        job = job_of(config, MICROBATCHES, steps)
        grad_fn = _in_stages(job, stages)
    if bug:
        grad_fn = BUGS[bug](grad_fn)
    options = (("context", "ring"),)
    return job.parity(grad_fn=grad_fn, options=options, tolerance=REORDERED, **sizes)
