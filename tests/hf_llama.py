"""A random Llama with a tokenizer, as `transformers` writes it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chats import TOKENS, words

VOCAB = 320
"""Size of the vocabulary: more than the tokenizer's."""


def write_llama(folder: Path, template: str = "", **sizes: Any) -> Path:
    """Writes the model, a tokenizer of bytes and a few merges, and a chat template if there is one.

    Args:
        folder: Made by this; it is returned.
        sizes: Fields of `LlamaConfig`.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)  # texts are too short to share
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=VOCAB, num_hidden_layers=2, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **TOKENS,
        "pad_token": "</s>",
        "clean_up_tokenization_spaces": False,
    }
    if template:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
