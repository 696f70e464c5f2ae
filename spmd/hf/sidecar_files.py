"""What goes along with a model as it is: the tokenizer, and how it wants to be used."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmd.checkpoint.manifest import read_object
from spmd.data.tokenizer import MODEL_FILES, TOKENIZER, load_tokenizer
from spmd.errors import CheckpointError, Problem
from spmd.hf.family import families
from spmd.hf.fields import collect_errors
from spmd.hf.folder import CONFIG, inside

ORIGINAL = "hf_config.json"
"""What the config.json of an imported model is called in a run folder."""
SIDECAR_FILES = (
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
    return {name: inside(folder, name) for name in SIDECAR_FILES if (folder / name).exists()}


def tokenizer_problems(folder: Path, vocab: int | None) -> list[Problem]:
    """What keeps the tokenizer of a Hugging Face folder from being used; a folder may have none.

    Args:
        folder: The folder.
        vocab: Rows of the embedding; None where they are not known.
    """
    leading_out: list[Problem] = []
    for name in sorted({*SIDECAR_FILES, *MODEL_FILES}):  # all that is read
        with collect_errors(leading_out):
            if (folder / name).exists():
                inside(folder, name)
    problems = [problem for problem in leading_out if problem.where != CONFIG]  # of which `published` speaks
    if (folder / TOKENIZER).exists() and not leading_out:
        with collect_errors(problems):
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


def sidecar_files(run: Path, tokenizer: str, model: Any) -> tuple[dict[str, Path], dict[str, Any]]:
    """What a run has to give back: the files, and the config.json that its model had; nothing where it had none.

    Args:
        run: The run folder.
        tokenizer: Its `data.tokenizer`; what a run was fine-tuned from may be beside it.
        model: Its `model`, the shape.

    Raises:
        CheckpointError: The tokenizer is missing, or a file cannot be read; all at once.
    """
    problems: list[Problem] = []
    files, values = dict[str, Path](), dict[str, Any]()
    text = None if tokenizer == "bytes" else Path(tokenizer).expanduser()
    with collect_errors(problems):
        files = _files(run, text)
    for place in [run, text.parent] if text else [run]:
        if not values and (place / ORIGINAL).exists():
            try:
                found = read_object(place / ORIGINAL, _AT_MOST)
            except (OSError, ValueError) as error:
                problems.append(Problem(str(place / ORIGINAL), str(error)))
            else:
                values = found if _fits(found, model) else {}
    if problems:
        raise CheckpointError("Nothing was exported:", problems)
    return files, values


def copy_origin(start: Path, config: Path, run: Path) -> None:
    """Puts what goes along with a model into the folder of a run that starts from it, where it is not there yet.

    The tokenizer stays where it is: the run's config names the one that it uses.

    Args:
        start: The folder that the run starts from.
        config: The config.json that the model had, in there; it may be missing.
        run: The run folder.
    """
    if config.exists() and not (run / ORIGINAL).exists():
        files = {} if (start / TOKENIZER).exists() else files_of(start)
        for name, file in {**files, ORIGINAL: inside(start, config.name)}.items():
            shutil.copyfile(file, run / name)


def _files(run: Path, tokenizer: Path | None) -> dict[str, Path]:
    """The files that are beside a run's tokenizer; those of the run itself where text is bytes.

    Raises:
        CheckpointError: The tokenizer is missing, or a link leads out.
    """
    if tokenizer is None:
        return files_of(run)
    if tokenizer.is_file():
        return files_of(tokenizer.parent) if tokenizer.name == TOKENIZER else {TOKENIZER: tokenizer}
    fix = "put it there again: the model is of no use without it"
    raise CheckpointError("Nothing was exported:", [Problem("data.tokenizer", f"{tokenizer} is missing", fix=fix)])


def _fits(values: Mapping[str, Any], model: Any) -> bool:
    """Whether a config.json is of the family that a model is of."""
    named = values.get("architectures")
    names = set(map(str, named)) if isinstance(named, list) else set()
    return any(names & set(family.architectures) and family.fits(model) for family in families().values())
