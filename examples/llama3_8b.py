"""Llama-3 8B on as many accelerators as there are, parameters and optimizer state fully sharded.

    spmd plan llama3-8b --topology v5e:8x8
    spmd train llama3-8b --data.source 'corpus/**/*.jsonl' --data.tokenizer tokenizer.json

The first command needs no accelerator. The second reads your text with your tokenizer, whose
vocabulary must not exceed the model's.
"""

import spmd
from spmd.models.llama import PRESETS
from spmd.partition_rules.llama import LLAMA

config = spmd.TrainConfig(
    model=PRESETS["llama3-8b"],
    rules=LLAMA,
    mesh=spmd.MeshShape(fsdp=-1),
    remat="full",
    precision="bf16",
    data=spmd.DataConfig(
        source=("corpus/**/*.jsonl",), tokenizer="tokenizer.json", sequence=8192, batch=64
    ),
    optimizer=spmd.OptimizerConfig(learning_rate=3e-4, warmup_steps=2000, weight_decay=0.1),
    steps=100_000,
    log_every=10,
    checkpoint_every=1000,
    evaluate=spmd.EvaluationConfig(every=1000, tokens=1_048_576),
)
