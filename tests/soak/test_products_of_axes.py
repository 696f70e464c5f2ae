"""Every axis, every pair of axes and products of three train as one device does: Llama and Mixtral, on 8 devices.

The models have grouped-query attention and one layer that is not scanned, which compiles fastest;
scanned layers are in `test_layouts` and `tests/numerics/test_moe.py`. `spmd check --products` is
the same sweep for any config.
"""

import dataclasses
import functools
import itertools
import math

import optax
import pytest

from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import next_token_loss
from spmd.layers.router import RouterConfig
from spmd.models.decoder import DecoderConfig
from spmd.models.mixtral import mixtral
from spmd.partition_rules.llama import LLAMA
from spmd.partition_rules.mixtral import MIXTRAL
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.testing import BUGS, Reference, token_batches
from tests import tiny

SHAPE = {"vocab": 64, "d_model": 32, "layers": 1, "heads": 8, "kv_heads": 4, "stacked": False}
DROPLESS = mixtral(**SHAPE, d_ff=16, router=RouterConfig(z_loss=1e-3))


def by_capacity(factor):
    return dataclasses.replace(
        DROPLESS,
        router=dataclasses.replace(DROPLESS.router, dispatch="capacity", capacity_factor=factor),
    )


LLAMA_MODEL, TIGHT, ROOMY = DecoderConfig(**SHAPE, d_ff=64), by_capacity(1.0), by_capacity(math.inf)
REFERENCES = {ROOMY: DROPLESS}  # where nothing is dropped, that is what is computed
MODELS = {"llama": LLAMA_MODEL, "mixtral": DROPLESS}
AXES = {
    "llama": ("data", "fsdp", "sequence", "tensor"),
    "mixtral": ("data", "fsdp", "expert", "sequence", "tensor"),
}
TRIPLES = {
    "llama": [
        ("fsdp", "sequence", "tensor"),
        ("data", "sequence", "tensor"),
        ("data", "fsdp", "tensor"),
    ],
    "mixtral": [
        ("expert", "sequence", "tensor"),
        ("fsdp", "expert", "tensor"),
        ("fsdp", "expert", "sequence"),
    ],
}
BY_HEADS = {  # not in a ring: sequences are exchanged for heads
    ("data", "sequence"),
    ("expert", "sequence"),
    ("data", "sequence", "tensor"),
    ("fsdp", "expert", "sequence"),
}
BY_CAPACITY = {
    ("data", "expert"): TIGHT,
    ("fsdp", "expert", "tensor"): TIGHT,
    ("expert", "sequence"): TIGHT,
    ("fsdp", "expert", "sequence"): ROOMY,
}
BATCHES = token_batches((8, 16), SHAPE["vocab"], steps=2)


@functools.cache
def model(config):
    return from_nnx(config.build)


def plan(config, context="ring", **sizes):
    """Of SGD, which hides no factor."""
    rules = LLAMA if config == LLAMA_MODEL else MIXTRAL
    return make_plan(tiny.mesh(**sizes), rules, model(config), optax.sgd(0.1), context=context)


def grad_fn(config):
    return value_and_grad(next_token_loss(model(config)))


@functools.cache
def one_device(config):
    """Two steps that every product is compared with, compiled once."""
    return Reference(plan(config), grad_fn(config), BATCHES)


def sizes(axes):
    """Eight devices: 8, 4 × 2 or 2 × 2 × 2; tensor alone has the 4 that there are key/value heads."""
    if axes == ("tensor",):
        return {"tensor": 4}
    return dict(zip(axes, {1: (8,), 2: (4, 2), 3: (2, 2, 2)}[len(axes)], strict=True))


def cases():
    """Every axis and one product of three are fast; the other products are slow."""
    for name, axes in AXES.items():
        first, *others = TRIPLES[name]
        yield from (
            pytest.param(name, chosen, id=f"{name}-{chosen[0]}")
            for chosen in itertools.combinations(axes, 1)
        )
        yield pytest.param(name, first, id=f"{name}-{'-'.join(first)}")
        for chosen in [*itertools.combinations(axes, 2), *others]:
            yield pytest.param(
                name, chosen, id=f"{name}-{'-'.join(chosen)}", marks=pytest.mark.soak
            )


@pytest.mark.parametrize(("name", "axes"), list(cases()))
def test_a_product_equals_one_device(name, axes):
    """The initial state bitwise, losses to 1e-5, gradients and updates to 1e-4, compared as `spmd check` does."""
    config = BY_CAPACITY.get(axes, DROPLESS) if name == "mixtral" else LLAMA_MODEL
    context = "all-to-all" if axes in BY_HEADS else "ring"
    reference = one_device(REFERENCES.get(config, config))
    result = reference.compare(plan(config, context, **sizes(axes)), grad_fn(config))
    assert result.ok, f"\n{result}"


@pytest.mark.parametrize(
    ("name", "bug"), [("llama", "token-weight"), ("mixtral", "gradient-scale")]
)
def test_control_a_bug_is_caught(name, bug):
    """The comparison that every product passes fails on a deliberate bug."""
    config = MODELS[name]
    assert not one_device(config).compare(plan(config, data=8), BUGS[bug](grad_fn(config))).ok


@pytest.mark.soak
def test_a_tight_capacity_drops_tokens():
    """The control of what capacity adds to the sweep: some tokens find no room, which changes the loss."""
    losses = one_device(DROPLESS).compare(plan(TIGHT), grad_fn(TIGHT))
    assert abs(losses.losses[0] - losses.reference_losses[0]) > 1e-3
