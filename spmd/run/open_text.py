"""Text and conversations of a run, as its config names them."""

import functools
from collections.abc import Iterable
from pathlib import Path

from spmd.data.chat import ChatTemplate, find_tokenizer_template
from spmd.data.chat_corpus import CONVERSATIONS, PAIRS, RowForm, make_chat_corpus
from spmd.data.corpus import Corpus, make_corpus
from spmd.data.loader import DataConfig, load_corpus
from spmd.data.text_dataset import TextDataset, open_text
from spmd.data.tokenizer import TOKENIZER, ByteTokenizer, Tokenizer, load_tokenizer
from spmd.errors import ConfigError, DataError, Problem
from spmd.run.config import TrainConfig
from spmd.storage.download import is_side_file, local_path


def open_text_dataset(config: TrainConfig) -> TextDataset:
    """Return the tokenized text or conversations of a run.

    Raises:
        ConfigError: The model's vocabulary is smaller than the tokenizer's.
        DataError: The text cannot be used, or a set of a mixture ends before the run.
    """
    if config.task == "pretrain":
        text = open_text(config.data, load_corpus)
    else:
        text = open_text(config.data, functools.partial(_open_chats, config))
    vocab = text.tokenizer.vocab
    if vocab > config.model.vocab:
        problem = Problem(
            "model.vocab",
            "is smaller than the tokenizer's vocabulary",
            f"tokenizer {vocab} > model {config.model.vocab}",
            f"--model.vocab {vocab}",
        )
        raise ConfigError("The model cannot read this corpus:", [problem])
    text.check_epochs(config.steps, config.data.batch_sizes)
    return text


def _open_chats(config: TrainConfig, data: DataConfig) -> Corpus:
    """Return the tokenized conversations of a set.

    Raises:
        DataError: There is one conversation or pair, so none is left for validation.
    """
    corpus = read_source(config, data.source, load_tokenizer(data.tokenizer))
    if not len(corpus.validation_ends):
        problem = Problem(
            "data.source",
            f"holds one {_row_form(config).name}",
            "one is for validation",
            "two or more",
        )
        raise DataError("No training data:", [problem])
    return corpus


def read_source(config: TrainConfig, source: Iterable[str], tokenizer: Tokenizer) -> Corpus:
    """Return the corpus of some files: text, conversations for task sft, or pairs for dpo."""
    data = config.data
    cache = data.cache_folder
    if config.task == "pretrain":
        return make_corpus(
            source,
            tokenizer,
            text_field=data.text_field,
            validation=data.validation,
            cache=cache,
        )
    return make_chat_corpus(
        source,
        tokenizer,
        find_chat_template(config, tokenizer),
        config=config.chat,
        sequence=data.sequence,
        validation=data.validation,
        cache=cache,
        form=_row_form(config),
        with_reference=config.task == "dpo" and config.dpo.needs_reference,
    )


def _row_form(config: TrainConfig) -> RowForm:
    """Return the form of rows of JSON for the config's task."""
    if config.task == "dpo":
        return PAIRS
    return CONVERSATIONS


def find_chat_template(config: TrainConfig, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template of conversations.

    It is the config's, or stands beside the tokenizer or the initial parameters.
    """
    more = list[Path]()
    if isinstance(tokenizer, ByteTokenizer):
        _check_no_other_tokenizer(config.init)
    elif config.init:
        more = [local_path(config.init, is_side_file)]
    return find_tokenizer_template(config.chat, tokenizer, config.data.tokenizer, more)


def _check_no_other_tokenizer(init: str) -> None:
    """Raise `ConfigError` if bytes are to train parameters with a tokenizer of their own."""
    if not init:
        return
    theirs = local_path(init, is_side_file) / TOKENIZER
    if theirs.exists():
        problem = Problem(
            "data.tokenizer",
            f"is bytes, and {init} has its own",
            fix=f"--data.tokenizer {theirs}",
        )
        raise ConfigError("The model cannot read these conversations:", [problem])
