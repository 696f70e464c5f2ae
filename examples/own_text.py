"""A small Llama on your own text: the .txt files of the folder that you are in, or any others.

    cd my-texts && spmd train own-text
    spmd train own-text --data.source 'letters/*.md' diary.txt --steps 2000
    spmd generate runs/own-text --prompt "Dear"

It reads bytes. For a tokenizer of your own, give --data.tokenizer tokenizer.json and --model.vocab.
About a megabyte of text is enough to learn to spell.
"""

import spmd
from spmd.models.llama import PRESETS
from spmd.partition_rules.llama import LLAMA

config = spmd.TrainConfig(
    model=PRESETS["demo"],
    rules=LLAMA,
    mesh=spmd.MeshShape(),  # one device; for eight, --mesh.fsdp 8
    data=spmd.DataConfig(source=("*.txt",), tokenizer="bytes", sequence=256, batch=8),
    optimizer=spmd.OptimizerConfig(
        learning_rate=2e-3, schedule="cosine", warmup_steps=10, weight_decay=0.1
    ),
    steps=1000,
    evaluate=spmd.EvaluationConfig(every=200, tokens=16_384),
    sample=spmd.SampleConfig(prompt="The ", tokens=200),
)
