"""The framework's side of `benchmarks/step.py`: the same Llama step as `bare_jax.py`, sharded by rules."""

import argparse
import dataclasses
import time
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd.models.decoder import DecoderConfig
from spmd.partition_rules.llama import LLAMA
from spmd.tree import size

PRECISION = {"float32": "float32", "bfloat16": "bf16"}


class Side:
    """The compiled step with its state.

    Args:
        args: The options of `benchmarks/step.py`; `args.mesh` maps each axis to its size.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        config = DecoderConfig(
            args.vocab, args.d_model, args.layers, args.heads, args.kv_heads, args.d_ff
        )
        config = dataclasses.replace(config, unroll=args.layers if args.remat == "none" else 1)
        model = spmd.from_nnx(config.build)
        optimizer = spmd.make_optimizer(
            spmd.OptimizerConfig(
                learning_rate=3e-4, schedule="constant", b1=0.9, b2=0.95, weight_decay=0.1
            ),
            steps=1,
        )
        mesh = spmd.make_mesh(**args.mesh)
        plan = spmd.make_plan(
            mesh, LLAMA, model, optimizer, remat=args.remat, precision=PRECISION[args.dtype]
        )
        self._state = spmd.init_state(plan)
        self.params = size(self._state.params)
        self._plan = plan
        shape = (args.batch, args.seq)
        dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
        batch = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}
        self._step = spmd.make_train_step(plan, spmd.next_token_loss(model))
        start = time.perf_counter()
        self.compiled = self._step.compile(batch)
        self.compile_s = time.perf_counter() - start

    def run(self, batch: Mapping[str, np.ndarray]) -> jax.Array:
        """Take one step on a host batch of `[batch, seq]` arrays.

        The loss is ready when the step is.
        """
        self._state, metrics = self._step(self._state, spmd.place_batch(self._plan, dict(batch)))
        return metrics["loss"]


def make(args: argparse.Namespace) -> Side:
    """Build the framework's side of the comparison."""
    return Side(args)
