"""A byte-level Llama on the Python standard library, over eight simulated CPU devices: what `make demo` runs.

    spmd train demo

Expect a validation loss below 2.0 nats per byte in about three minutes on two cores; a bigram count
model reaches 2.5.
"""

import spmd
from spmd.models.llama import PRESETS
from spmd.partition_rules.llama import LLAMA

config = spmd.TrainConfig(
    model=PRESETS["demo"],
    rules=LLAMA,
    mesh=spmd.MeshShape(data=2, fsdp=2, tensor=2),
    devices=8,
    data=spmd.DataConfig(source=("stdlib",), tokenizer="bytes", sequence=256, batch=8),
    optimizer=spmd.OptimizerConfig(
        learning_rate=2e-3, schedule="cosine", warmup_steps=30, weight_decay=0.1
    ),
    steps=400,
    log_every=10,
    checkpoint_every=200,
    evaluate=spmd.EvaluationConfig(every=200, tokens=65_536),
    sample=spmd.SampleConfig(prompt="def main(argv):\n", tokens=200, temperature=0.8, top_k=40),
)
