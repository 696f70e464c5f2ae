"""Nemotron-4 and Minitron: squared ReLU, LayerNorm, half of each head rotated (arXiv:2402.16819).

```python
config = dataclasses.replace(PRESETS["minitron-4b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import functools
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import (
    DecoderConfig,
    NormSpec,
    RopeScaling,
    Rotary,
)
from spmd.models.published.common_fields import read_sizes, write_biases, write_sizes
from spmd.models.published.family import decoder_family
from spmd.models.published.gpt import gpt_decoder
from spmd.models.published.rotary import read_rotary

_EPS = "norm_eps"
_HALF = Rotary(fraction=0.5)
_DEFAULT = Rotary(10_000.0, RopeScaling(), fraction=0.5)


nemotron = functools.partial(
    gpt_decoder,
    rotary=_HALF,
    attention_bias=False,
    mlp_bias=False,
    activation="relu2",
    norm=NormSpec("layer", offset=1.0, bias=True),
)
"""Config of a Nemotron from fields of `gpt_decoder`."""

PRESETS = {
    "test-nemotron": nemotron(64, 32, 2, 4, 2, 64, head_dim=16),
    "minitron-4b": nemotron(256_000, 3072, 32, 24, 8, 9216, head_dim=128),
}
"""Published shape by name, and a small one for tests."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    activation = ("hidden_act", "relu2")
    sizes = read_sizes(fields, eps=1e-5, eps_field=_EPS, theta=0, activation=activation)
    return fields.build(
        nemotron,
        **sizes,
        rotary=read_rotary(fields, _DEFAULT),
        attention_bias=fields.flag("attention_bias", default=False),
        mlp_bias=fields.flag("mlp_bias", default=False),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    rotary = config.pattern.group[0].mixer.rotary or _DEFAULT
    return {
        "model_type": "nemotron",
        **write_sizes(config, _EPS, rotary),
        "partial_rotary_factor": rotary.fraction,
        **write_biases(config),
        "hidden_act": "relu2",
    }


FAMILY = decoder_family("NemotronForCausalLM", _read, _write)
