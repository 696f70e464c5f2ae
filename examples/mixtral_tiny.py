"""A byte-level mixture of experts on the Python standard library, over eight simulated CPU devices.

    spmd train mixtral-tiny

It has the active parameters of `demo` and three times as many in all. Expect a validation loss
below 1.5 nats per byte in five to ten minutes on two cores; a bigram count model reaches 2.3.
"""

import spmd
from spmd.models.mixtral import PRESETS
from spmd.partition_rules.mixtral import MIXTRAL

config = spmd.TrainConfig(
    model=PRESETS["mixtral-tiny"],
    rules=MIXTRAL,
    mesh=spmd.MeshShape(fsdp=2, expert=2, tensor=2),
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
