"""Llama-3 405B on as many accelerators as there are, in batches of 16 M tokens: sharded and tensor parallel.

    spmd plan llama3-405b --topology v5p:16x16x16
    spmd plan llama3-405b --devices 16384 --mesh.data 16
    spmd train llama3-405b --data.source 'corpus/**/*.jsonl' --data.tokenizer tokenizer.json

The plans need no accelerator; the second is of hybrid sharding, 16 copies of 1,024 shards. The run
reads your text with your tokenizer, whose vocabulary must not exceed the model's.
"""

import spmd
from spmd.models.llama import PRESETS
from spmd.partition_rules.llama import LLAMA

config = spmd.TrainConfig(
    model=PRESETS["llama3-405b"],
    rules=LLAMA,
    mesh=spmd.MeshShape(fsdp=-1, tensor=8),
    remat="full",
    precision="bf16",
    data=spmd.DataConfig(
        source=("corpus/**/*.jsonl",), tokenizer="tokenizer.json", sequence=8192, batch=2048
    ),
    optimizer=spmd.OptimizerConfig(learning_rate=3e-4, warmup_steps=2000, weight_decay=0.1),
    steps=100_000,
    log_every=10,
    checkpoint_every=1000,
    evaluate=spmd.EvaluationConfig(every=1000, tokens=1_048_576),
)
