"""DeepSeek-V3, 671 B parameters, on as many accelerators as there are, its experts over 64 of them.

    spmd plan deepseek-v3 --topology v5p:8x8x16
    spmd train deepseek-v3 --data.source 'corpus/**/*.jsonl' --data.tokenizer tokenizer.json

The first command needs no accelerator. The second reads your text with your tokenizer, whose
vocabulary must not exceed the model's. Biases of the routers balance the experts' load, in place of
a loss (arXiv:2412.19437, section 2.1.2).
"""

import spmd
from spmd.models.decoder import decoder_rules
from spmd.models.deepseek import PRESETS

_MODEL = PRESETS["deepseek-v3"]

config = spmd.TrainConfig(
    model=_MODEL,
    rules=decoder_rules(_MODEL),
    mesh=spmd.MeshShape(fsdp=-1, expert=64),
    remat="full",
    precision="bf16",
    data=spmd.DataConfig(
        source=("corpus/**/*.jsonl",), tokenizer="tokenizer.json", sequence=4096, batch=1024
    ),
    optimizer=spmd.OptimizerConfig(learning_rate=2.2e-4, warmup_steps=2000, weight_decay=0.1),
    steps=100_000,
    log_every=10,
    checkpoint_every=1000,
    evaluate=spmd.EvaluationConfig(every=1000, tokens=1_048_576),
)
