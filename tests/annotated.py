"""Flax modules with sharding metadata, and what their names resolve to."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from spmd.errors import RuleError
from spmd.sharding.flax_metadata import Annotation
from spmd.sharding.from_flax import rules_from_annotations
from spmd.sharding.mesh import MeshShape, abstract_mesh, entry_axes

MESH = abstract_mesh(MeshShape(data=2, fsdp=2, tensor=2))
LOGICAL = (("embed", "fsdp"), ("mlp", "tensor"), ("heads", ("fsdp", "tensor")), ("norm", None))
INIT = nnx.initializers.lecun_normal()


def linear(names, din=4, dout=8, **metadata):
    """An NNX layer whose kernel has these names."""
    init = nnx.with_partitioning(INIT, names, **metadata)
    with nnx.use_eager_sharding(False):
        return nnx.eval_shape(
            lambda: nnx.Linear(din, dout, use_bias=False, kernel_init=init, rngs=nnx.Rngs(0))
        )


def placement(spec):
    entries = [entry_axes(entry) for entry in spec]
    while entries and not entries[-1]:
        entries.pop()
    return entries


def resolve(names, logical, *, shape=None, path="w", **kwargs):
    """Our spec for one parameter, or None where it is an error."""
    annotation = Annotation(names, shape or (24,) * len(names), **kwargs)
    try:
        return rules_from_annotations({path: annotation}, logical=logical).match(path).spec
    except RuleError:
        return None


def problems(annotations, **kwargs):
    with pytest.raises(RuleError) as caught:
        rules_from_annotations(annotations, **kwargs)
    return [str(problem) for problem in caught.value.problems]


class Dense(nn.Module):
    """A Linen layer whose parameters have boxes of both kinds."""

    @nn.compact
    def __call__(self, x):
        mesh_axes = nn.with_partitioning(nn.initializers.ones, ("fsdp", "tensor"))
        x = nn.Dense(8, use_bias=False, kernel_init=mesh_axes, name="axes")(x)
        logical = nn.with_logical_partitioning(
            nn.initializers.ones, ("mlp", "embed"), rules=(("mlp", "data"),)
        )
        return nn.Dense(4, kernel_init=logical, name="names")(x)


def scanned(metadata_params):
    """Three `Dense` under `nn.scan`."""

    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(
                lambda module, x, _: (Dense(name="layers")(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
                metadata_params=metadata_params,
            )
            return scan(self, x, None)[0]

    return jax.eval_shape(Scanned().init, jax.random.key(0), jnp.ones((1, 4)))["params"]


def stacked(transform_metadata):
    """Three NNX layers under `nnx.vmap`."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata=transform_metadata)
    def make(rngs):
        return nnx.Linear(
            4, 8, kernel_init=nnx.with_partitioning(INIT, ("embed", "mlp")), rngs=rngs
        )

    with nnx.use_eager_sharding(False):
        return nnx.state({"layers": nnx.eval_shape(lambda: make(nnx.Rngs(0)))})
