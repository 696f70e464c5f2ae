"""What goes along with a model as it is: the tokenizer, and how it wants to be used."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmd.config import TrainConfig
from spmd.errors import CheckpointError, Problem
from spmd.hf.fields import collecting
from spmd.hf.published import inside
from spmd.seal import read_object
from spmd.tokenizer import load_tokenizer

TOKENIZER = "tokenizer.json"
ORIGINAL = "hf_config.json"
"""What the config.json of an imported model is called in a run folder."""
CARRIED = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    "generation_config.json",
)
"""The files that a run folder keeps, and export gives back."""

_OTHER_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt")
_AT_MOST = 16 << 20


def files_of(folder: Path) -> dict[str, Path]:
    """Name → file, of those that a folder has.

    Raises:
        CheckpointError: One of them is a link that leads out of the folder.
    """
    return {name: inside(folder, name) for name in CARRIED if (folder / name).exists()}


def tokenizer_problems(folder: Path, vocab: int | None) -> list[Problem]:
    """What keeps the tokenizer of a Hugging Face folder from being used; a folder may have none.

    Args:
        folder: The folder.
        vocab: Rows of the embedding; None where they are not known.
    """
    problems: list[Problem] = []
    with collecting(problems):
        files_of(folder)
    if (folder / TOKENIZER).exists() and not problems:
        with collecting(problems):
            size = load_tokenizer(str(folder / TOKENIZER)).vocab
            if vocab is not None and size > vocab:
                arithmetic = f"{size} tokens, and {vocab} rows of the embedding"
                problems.append(Problem(TOKENIZER, "has more tokens than the embedding has rows", arithmetic))
        return problems
    others = [name for name in _OTHER_TOKENIZERS if (folder / name).exists()]
    if others and not (folder / TOKENIZER).exists():
        fix = "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes one"
        problems.append(
            Problem(", ".join(others), f"is a tokenizer that is not read here, and {TOKENIZER} is missing", fix=fix)
        )
    return problems


def carried_by(run: Path, config: TrainConfig) -> tuple[dict[str, Path], dict[str, Any]]:
    """What a run has to give back: the files, and the config.json that it was imported with; nothing where it was not.

    Args:
        run: The run folder.
        config: Its config; what a run was fine-tuned from is beside its tokenizer.

    Raises:
        CheckpointError: A file cannot be read.
    """
    tokenizer = Path(config.data.tokenizer)
    places = [tokenizer.parent, run] if tokenizer.name == TOKENIZER else [run]
    place = next((place for place in places if (place / ORIGINAL).exists() or (place / TOKENIZER).exists()), run)
    values: Mapping[str, Any] = {}
    if (place / ORIGINAL).exists():
        try:
            values = read_object(place / ORIGINAL, _AT_MOST)
        except (OSError, ValueError) as error:
            raise CheckpointError("Nothing was exported:", [Problem(str(place / ORIGINAL), str(error))]) from error
    return files_of(place), dict(values)
