"""Activations of MLPs in config.json, for families with several of them."""

from spmd.errors import did_you_mean, shorten
from spmd.hf.fields import Fields
from spmd.models.decoder.activations import FROM_HF, GATED, UNGATED
from spmd.models.decoder.decoder import DecoderConfig
from spmd.models.decoder.mlp import MLPSpec

_WRITTEN = {"gelu_tanh": "gelu_pytorch_tanh"}
"""Activation → its name in config.json, if that is another one."""


def read_activation(fields: Fields, name: str, absent: str, *, gated: bool = False) -> str:
    """Parse an activation; an unknown one is reported to `fields`.

    Args:
        fields: Fields of config.json.
        name: Name of the field.
        absent: The value there if the field is absent.
        gated: Whether the MLP has a gate.
    """
    known = UNGATED.keys()
    if gated:
        known = GATED.keys()
    found = fields.value(name, absent)
    ours = FROM_HF.get(str(found), "")
    if ours in known:
        return ours
    supported = [theirs for theirs, other in FROM_HF.items() if other in known]
    fix = did_you_mean(str(found), supported)
    fields.refuse(name, f"is {shorten(found)}, and is not supported", fix)
    return FROM_HF[absent]


def write_activation(config: DecoderConfig) -> str:
    """Return the name of the activation of all MLPs: the inverse of `read_activation`."""
    activation = mlp_of(config).activation
    return _WRITTEN.get(activation, activation)


def mlp_of(config: DecoderConfig) -> MLPSpec:
    """Return the MLP of the first repeated layer.

    Raises:
        AttributeError: The layer has experts, or neither.
    """
    mlp = config.pattern.group[0].mlp
    if not isinstance(mlp, MLPSpec):
        raise AttributeError(f"the layer has a {type(mlp).__name__}")
    return mlp
