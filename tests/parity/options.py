"""The small decoders that the parity suite trains: a table in which every pair of options that can go together does.

The first rows have each option on each axis of the mesh, those that compile fastest first; all others
have the other pairs of options. `python -m tests.parity.options > tests/parity/options.txt` writes a
table anew, after an option was added here.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

from spmd.layers.router import RouterConfig
from spmd.models.decoder import (
    AttentionSpec,
    DecoderConfig,
    ExpertsSpec,
    GatedConvolutionSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    LayerSpec,
    MLPSpec,
    NoMixerSpec,
    NormSpec,
    ParallelMixerSpec,
    Rotary,
    StateSpaceSpec,
    YarnScaling,
)
from spmd.models.decoder.attention import Temperature
from tests.parity.covering import Pair, Row, Space
from tests.parity.decoders import SEQUENCE
from tests.parity.layouts import AXES, DEVICES, mesh_sizes

VOCAB, ODD_VOCAB = 64, 67
MIXERS: dict[str, Any] = {
    "grouped": AttentionSpec(),
    "window": AttentionSpec(
        window=5,
        qk_norm="full",
        qk_norm_kind=NormSpec("layer", bias=True),
        scale=0.3,
        soft_cap=2.0,
        gate="channel",
    ),
    "chunk": AttentionSpec(
        chunk=6,
        sinks=True,
        value_dim=6,
        value_scale=0.5,
        temperature=Temperature(0.5, interval=4, offset=1),
    ),
    "biases": AttentionSpec(
        heads=4,
        kv_heads=4,
        head_dim=12,
        qkv_bias=True,
        out_bias=True,
        qk_norm="head",
        qk_norm_after=True,
        clip_qkv=0.5,
        gate="head",
        gate_activation="softplus",
        gate_bias=True,
    ),
    "latent": LatentAttentionSpec(q_rank=16, kv_rank=8, nope_dim=8, rope_dim=4, value_dim=6),
}
"""Token mixers, each with several options."""
ROTARIES: dict[str, Rotary | None] = {
    "halves": Rotary(),
    "partial": Rotary(5e3, fraction=0.5, interleaved=True, negative=True),
    "yarn": Rotary(scaling=YarnScaling(4.0, 8, mscale=0.7, mscale_all_dim=0.7)),
    "none": None,
    "learned": None,
}
MLPS: dict[str, Any] = {
    "swiglu": MLPSpec(),
    "biases": MLPSpec(48, "gelu_tanh", gated=False, bias=True),
    "experts": ExpertsSpec(
        16,
        "relu2",
        gated=False,
        shared_d_ff=16,
        shared_gate=True,
        shared_scale=0.5,
        init_scale=0.5,
    ),
    "expert-biases": ExpertsSpec(16, "clamped_swiglu", bias=True),
}
XIELU = MLPSpec(activation="xielu", gated=False)
ROUTERS = {
    "experts": RouterConfig(
        experts=4,
        score="sigmoid",
        normalise_eps=1e-20,
        groups=2,
        top_groups=1,
        scale=2.5,
        bias_rate=1e-3,
        balance=0.1,
        balance_over="example",
    ),
    "expert-biases": RouterConfig(
        experts=4,
        top_k=1,
        score="sigmoid",
        normalise=False,
        logit_bias=True,
        weight_on="input",
        z_loss=1e-2,
    ),
}
NORMS = {
    "rms": NormSpec(),
    "offset": NormSpec(offset=1.0),
    "layer": NormSpec("layer", bias=True),
    "plain": NormSpec("layer", scale=False),
}
STATE_SPACE = StateSpaceSpec(
    4,
    12,
    groups=2,
    state_dim=6,
    conv_width=3,
    conv_bias=False,
    bias=True,
    dt_min=1e-3,
    dt_max=0.5,
    gate_first=False,
    multipliers=(0.5, 0.6, 0.7, 0.8, 0.9),
)
BESIDE = {
    "group": (
        LayerSpec(
            LatentAttentionSpec(
                heads=4,
                kv_rank=8,
                nope_dim=8,
                rope_dim=4,
                value_dim=6,
                rotary=Rotary(),
                bias=True,
                latent_norm_eps=1e-5,
            ),
            MLPSpec(gate_scale=0.5, out_scale=0.5),
            norms="mlp_both",
        ),
    ),
    "recurrent": (
        LayerSpec(GatedDeltaNetSpec(8, 4, 4, 6, 3, negative_eigenvalues=True, norm_eps=1e-4), None),
        LayerSpec(GatedConvolutionSpec(4, bias=True), None),
        LayerSpec(
            ParallelMixerSpec(AttentionSpec(window=3), STATE_SPACE, 0.5, 0.7, 0.9),
            None,
        ),
    ),
}
"""The other layers of a group. Recurrent ones need whole sequences."""
FACTORS = {
    "rope_theta": 5e2,
    "norm_eps": 1e-3,
    "embed_scale": 0.0,
    "embed_norm": True,
    "residual_scale": 0.5,
    "logits_scale": 0.5,
    "logits_soft_cap": 3.0,
}
HEADS: dict[str, dict[str, Any]] = {
    "own": {},
    "tied": {"tied": True},
    "odd": {"vocab": ODD_VOCAB, "logits_bias": True},
    "ahead": {"predict_ahead": 1, "ahead_weight": 0.5},
}
CHOICES: dict[str, tuple[str, ...]] = {
    "mixer": tuple(MIXERS),
    "rotary": tuple(ROTARIES),
    "mlp": tuple(MLPS),
    "places": ("before", "after", "both", "parallel", "parallel_shared"),
    "norm": tuple(NORMS),
    "order": ("alone", "first", "last", *BESIDE),
    "factors": ("none", "all"),
    "head": tuple(HEADS),
    **dict.fromkeys(AXES, ("1", "2")),
}
"""What a decoder and a mesh choose, and the choices; an axis has one or two devices.

The order is that of kinds of layers: alone, with a first or last layer, or in a group with another one.
"""


def is_possible(row: Row) -> bool:
    """Whether a decoder is valid, and its mesh is allowed and has 2 to 8 devices."""
    is_latent = row["mixer"] == "latent"
    has_angles = row["rotary"] not in ("none", "learned")
    return (
        1 < math.prod(mesh_sizes(row).values()) <= DEVICES
        and not (row["expert"] != "1" and row["mlp"] not in ROUTERS)
        and not (row["sequence"] != "1" and row["order"] == "recurrent")
        and not (is_latent and (not has_angles or row["rotary"] == "partial"))
        and not (row["mixer"] == "biases" and not has_angles)
    )


def decoder_of(row: Row) -> DecoderConfig:
    """The decoder of a row: one group of layers, repeated once for each stage."""
    mixer = dataclasses.replace(MIXERS[row["mixer"]], rotary=ROTARIES[row["rotary"]])
    layer = LayerSpec(mixer, MLPS[row["mlp"]], row["places"])
    stages = int(row["pipe"])
    fields: dict[str, Any] = {"layers": stages, "layer": layer}
    if row["order"] in BESIDE:
        group = (layer, *BESIDE[row["order"]])
        fields = {"layers": len(group) * stages, "group": group}
    if row["order"] == "first":
        fields |= {"layers": stages + 1, "first": (LayerSpec(NoMixerSpec(), XIELU),)}
    if row["order"] == "last":
        fields |= {"layers": stages + 1, "last": (layer,)}
    if row["factors"] == "all":
        fields |= FACTORS
    if row["rotary"] == "learned":
        fields |= {"positions": SEQUENCE, "unused_positions": 2}
    shape = {"vocab": VOCAB, "d_model": 32, "heads": 8, "kv_heads": 4, "d_ff": 32, "head_dim": 8}
    return DecoderConfig(
        **shape
        | {"norm": NORMS[row["norm"]], "router": ROUTERS.get(row["mlp"])}
        | fields
        | HEADS[row["head"]]
    )


def on_axes(pairs: set[Pair]) -> set[Pair]:
    """The pairs of an option and an axis that splits something."""
    return {
        pair for pair in pairs if pair[0][0] not in AXES and pair[1] in [(a, "2") for a in AXES]
    }


PERMISSIVE = tuple(
    {name: choices[0] for name, choices in CHOICES.items()} | {"mlp": mlp, axis: "2"}
    for mlp in ("swiglu", "experts")
    for axis in ("data", "fsdp")
)
OPTIONS = Space(Path(__file__).with_name("options.txt"), CHOICES, is_possible, PERMISSIVE)


def make_table() -> list[Row]:
    """Rows with every option on every axis, and then those with the other pairs of options."""
    every = OPTIONS.possible_pairs()
    first = OPTIONS.smallest_table(on_axes(every), seeds=60)
    rest = OPTIONS.smallest_table(every - OPTIONS.proven(first))
    return sorted(first, key=_work) + rest


def _work(row: Row) -> float:
    """About how much a row compiles."""
    stages = int(row["pipe"])
    layers = decoder_of(row).layers / stages
    return layers * (1 + stages) + (row["head"] == "ahead")


if __name__ == "__main__":
    print(OPTIONS.text(make_table()))
