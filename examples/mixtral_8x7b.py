"""Mixtral 8x7B on as many accelerators as there are, its experts over eight of them, fully sharded.

    spmd plan mixtral-8x7b --topology v5e:8x8
    spmd train mixtral-8x7b --data.source 'corpus/**/*.jsonl' --data.tokenizer tokenizer.json

The first command needs no accelerator. The second reads your text with your tokenizer, whose
vocabulary must not exceed the model's.
"""

import spmd
from spmd.models.mixtral import PRESETS
from spmd.partition_rules.mixtral import MIXTRAL

config = spmd.TrainConfig(
    model=PRESETS["mixtral-8x7b"],
    rules=MIXTRAL,
    mesh=spmd.MeshShape(fsdp=-1, expert=8),
    remat="full",
    precision="bf16",
    data=spmd.DataConfig(
        source=("corpus/**/*.jsonl",), tokenizer="tokenizer.json", sequence=4096, batch=64
    ),
    optimizer=spmd.OptimizerConfig(learning_rate=3e-4, warmup_steps=2000, weight_decay=0.1),
    steps=100_000,
    log_every=10,
    checkpoint_every=1000,
    evaluate=spmd.EvaluationConfig(every=1000, tokens=1_048_576),
)
