"""A Llama of 20 million parameters over eight simulated CPU devices, for `save_stall.py`."""

import dataclasses

import spmd
from spmd.models.decoder import DecoderConfig
from spmd.partition_rules.llama import LLAMA

config = spmd.TrainConfig(
    model=dataclasses.replace(
        DecoderConfig(), vocab=4096, d_model=384, layers=8, heads=6, kv_heads=6, d_ff=1280
    ),
    rules=LLAMA,
    mesh=spmd.MeshShape(fsdp=8),
    devices=8,
    data=spmd.DataConfig(source=("stdlib",), tokenizer="bytes", sequence=256, batch=16),
    optimizer=spmd.OptimizerConfig(warmup_steps=2),
)
