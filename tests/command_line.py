"""The command line in this process, and a config file for it."""

from pathlib import Path

import pytest

from spmd.cli import main

CONFIG = """
import spmd
from spmd.models.decoder import DecoderConfig
from spmd.partition_rules.llama import LLAMA

config = spmd.TrainConfig(
    model=DecoderConfig(vocab=256, d_model=32, layers=2, heads=4, kv_heads=2, d_ff=64),
    rules=LLAMA,
    mesh=spmd.MeshShape(data=2, fsdp=2, tensor=2),
    data=spmd.DataConfig(source=({corpus!r},), sequence=16, batch=8, cache={cache!r}),
    optimizer=spmd.OptimizerConfig(learning_rate=1e-2, schedule="constant"),
    evaluate=spmd.EvaluationConfig(tokens=256),
    steps=4,
    log_every=1,
)
"""
TEXT = (
    "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer.\n" * 60
)


def write_config(folder: Path, text: str = TEXT) -> Path:
    """A config file of a tiny model on a small text."""
    corpus, path = folder / "corpus.txt", folder / "tiny.py"
    corpus.write_text(text)
    path.write_text(CONFIG.format(corpus=str(corpus), cache=str(folder / "cache")))
    return path


def run(*arguments: object) -> int:
    """The exit code of the command line in this process."""
    with pytest.raises(SystemExit) as caught:
        main([str(a) for a in arguments])
    return int(caught.value.code or 0)
