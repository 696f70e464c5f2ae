"""Every value of a `Literal` that a shipped model's config offers can be trained, with remat and without."""

import dataclasses
import functools
import importlib
import pkgutil
import typing
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import spmd
from spmd import models
from spmd.errors import SpmdError
from spmd.models import gpt2, mixtral
from spmd.models.decoder import (
    AttentionSpec,
    DecoderConfig,
    LayerSpec,
    activations,
    decoder_rules,
)
from spmd.plan.context import use_plan
from spmd.sharding.mesh import MeshShape, abstract_mesh

Choice = tuple[str, str, Any]
"""Class of a config, its field, and a value."""


def tiny_configs() -> Iterator[Any]:
    """Yield the tiny presets of all decoders, and configs with options of routers and a gate.

    Those with the fewest kinds of layers are first: they are traced fastest.
    """
    tiny = []
    for module in pkgutil.iter_modules(models.__path__):
        presets = getattr(importlib.import_module(f"spmd.models.{module.name}"), "PRESETS", {})
        for name, config in presets.items():
            if name.startswith("test") and isinstance(config, DecoderConfig):
                tiny.append(config)
    yield from sorted(tiny, key=lambda config: len(config.pattern.distinct))
    config = mixtral.PRESETS["test"]
    router = dataclasses.replace(config.router, choice="expert", balance=0.0, dispatch="capacity")
    yield dataclasses.replace(config, router=router)
    router = dataclasses.replace(config.router, groups=4, top_groups=2, choice_bias=True)
    yield dataclasses.replace(config, router=router)
    gated = LayerSpec(AttentionSpec(gate="channel"))
    yield DecoderConfig(64, 32, 2, 4, 2, 64, layer=gated)


def choices(config: Any) -> Iterator[tuple[Choice, Callable[[], Any]]]:
    """Yield each value of a `Literal` of a config and of its fields, and a function that makes the config with it."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        now = getattr(config, field.name)
        if typing.get_origin(hints[field.name]) is typing.Literal:
            for value in typing.get_args(hints[field.name]):
                make = functools.partial(dataclasses.replace, config, **{field.name: value})
                yield (type(config).__name__, field.name, value), make
        if dataclasses.is_dataclass(now):
            for choice, inner in choices(now):

                def outer(name: str = field.name, inner: Callable[[], Any] = inner) -> Any:
                    return dataclasses.replace(config, **{name: inner()})

                yield choice, outer


def made() -> tuple[dict[Choice, Any], set[Choice]]:
    """Return a config with each choice, and the choices that none can have."""
    configs, refused = dict[Choice, Any](), set[Choice]()
    for config in tiny_configs():
        for choice, make in choices(config):
            if choice in configs:
                continue
            try:
                configs[choice] = make()
            except SpmdError:  # in words, such as a field that another one excludes
                refused.add(choice)
    return configs, refused - configs.keys()


CONFIGS, REFUSED = made()
PRESETS = list(tiny_configs())


def is_covered(choice: Choice, config: Any) -> bool:
    """Return whether another test trains this: the presets as they are, and routers' scores and balances."""
    return config in PRESETS or choice[1] in ("score", "balance_over")


def trace_gradients(config: Any, remat: str) -> None:
    """Trace the loss and the gradients of a model on one absent device."""
    model = spmd.from_nnx(config.build)
    optimizer = spmd.make_optimizer(spmd.OptimizerConfig(), 10, model=model)
    mesh = abstract_mesh(MeshShape())
    plan = spmd.make_plan(mesh, decoder_rules(config), model, optimizer, remat=remat)
    tokens = jax.ShapeDtypeStruct((2, 16), np.int32)
    batch = {
        "tokens": tokens,
        "targets": tokens,
        "weights": jax.ShapeDtypeStruct((2, 16), np.float32),
    }
    # declared, so that it is not read
    grad_fn = spmd.value_and_grad(spmd.next_token_loss(model), additive=True)
    with use_plan(plan):
        jax.eval_shape(grad_fn, plan.abstract_params, plan.abstract_carry, batch, jax.random.key(0))


@pytest.mark.compat
@pytest.mark.parametrize(
    "choice",
    [
        pytest.param(
            choice,
            id="-".join(map(str, choice)),
            marks=[pytest.mark.soak] * is_covered(choice, config),
        )
        for choice, config in CONFIGS.items()
    ],
)
def test_every_choice_can_be_trained(choice):
    """Its forward and backward pass can be traced, with remat and without."""
    for remat in ("none", "full"):
        trace_gradients(CONFIGS[choice], remat)


def test_no_choice_is_refused_by_every_config():
    """There are such fields in a model and in a router, and each value is in a config that can be made."""
    assert not REFUSED
    assert ("LayerSpec", "norms", "parallel") in CONFIGS
    assert ("RouterConfig", "choice", "expert") in CONFIGS


def test_control_a_static_argument_by_name_is_seen(monkeypatch):
    """A function that `jax.checkpoint` cannot take is an error of the same trace."""
    wrong = functools.partial(activations.gelu, approximate=True)
    monkeypatch.setitem(activations.UNGATED, "gelu_tanh", wrong)
    with pytest.raises(ValueError, match="static_argnums"):
        trace_gradients(gpt2.PRESETS["test"], "none")
