"""Files copied unchanged with a model.

They are its tokenizer, generation settings and original config.json.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmd.checkpoint.manifest import read_object
from spmd.data.tokenizer import MODEL_FILES, TOKENIZER, load_tokenizer
from spmd.errors import CheckpointError, Problem
from spmd.hf.family import families
from spmd.hf.fields import collect_errors
from spmd.hf.folder import CONFIG, architectures_of, inside
from spmd.storage.download import local_path

ORIGINAL = "hf_config.json"
"""Name of an imported model's config.json in a run folder."""
SIDECAR_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files that a run folder keeps and export copies back."""

_OTHER_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt")
_MAX_BYTES = 16 << 20


def files_of(folder: Path) -> dict[str, Path]:
    """Return name → path of the sidecar files in a folder.

    None may be a link that leaves the folder.
    """
    return {name: inside(folder, name) for name in SIDECAR_FILES if (folder / name).exists()}


def tokenizer_problems(folder: Path, vocab: int | None) -> list[Problem]:
    """Return the problems of a folder's tokenizer, if any.

    `vocab` is the rows of the embedding, None if unknown.
    """
    bad_links = _bad_links(folder)
    # `open_folder` reports that one
    problems = [problem for problem in bad_links if problem.where != CONFIG]
    if (folder / TOKENIZER).exists():
        if not bad_links:
            problems += _size_problems(folder / TOKENIZER, vocab)
        return problems
    others = [name for name in _OTHER_TOKENIZERS if (folder / name).exists()]
    if others:
        what = f"is an unsupported tokenizer format, and {TOKENIZER} is missing"
        fix = "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes one"
        problems.append(Problem(", ".join(others), what, fix=fix))
    return problems


def _bad_links(folder: Path) -> list[Problem]:
    problems: list[Problem] = []
    for name in sorted({*SIDECAR_FILES, *MODEL_FILES}):
        with collect_errors(problems):
            if (folder / name).exists():
                inside(folder, name)
    return problems


def _size_problems(tokenizer: Path, vocab: int | None) -> list[Problem]:
    """Compare the number of tokens with the rows of the embedding."""
    problems: list[Problem] = []
    with collect_errors(problems):
        size = load_tokenizer(str(tokenizer)).vocab
        if vocab is not None and size > vocab:
            what = "has more tokens than the embedding has rows"
            detail = f"{size} tokens > {vocab} rows of the embedding"
            problems.append(Problem(TOKENIZER, what, detail))
    return problems


def sidecar_files(run: Path, tokenizer: str, model: Any) -> tuple[dict[str, Path], dict[str, Any]]:
    """Return the sidecar files of a run folder and its model's original config.json.

    Both are empty if it has none. Files beside `tokenizer`, the run's `data.tokenizer`, are used
    too, if the run was fine-tuned from that model.
    """
    problems: list[Problem] = []
    files: dict[str, Path] = {}
    folders = [run]
    tokenizer_path: Path | None = None
    if tokenizer != "bytes":
        tokenizer_path = local_path(tokenizer)
        folders.append(tokenizer_path.parent)
    with collect_errors(problems):
        files = _files(run, tokenizer_path)
    values: dict[str, Any] = {}
    for folder in folders:
        original = folder / ORIGINAL
        if values or not original.exists():
            continue
        try:
            found = read_object(original, _MAX_BYTES)
        except (OSError, ValueError) as error:
            problems.append(Problem(str(original), str(error)))
            continue
        if _is_config_of(found, model):
            values = found
    if problems:
        raise CheckpointError("Nothing was exported:", problems)
    return files, values


def _is_config_of(values: Mapping[str, Any], model: Any) -> bool:
    """Return whether a family with an architecture of a config.json fits a model config."""
    names = set(architectures_of(values))
    fitting = [family for family in families().values() if family.fits(model)]
    return any(names & set(family.architectures) for family in fitting)


def copy_origin(start: Path, config: Path, run: Path) -> None:
    """Copy sidecar files from the folder `start` of a model into a run folder without them.

    A tokenizer is not copied: the run's config refers to it. `config` is the model's original
    config.json in `start`, which may be missing.
    """
    if not config.exists() or (run / ORIGINAL).exists():
        return
    files: dict[str, Path] = {}
    if not (start / TOKENIZER).exists():
        files = files_of(start)
    files[ORIGINAL] = inside(start, config.name)
    for name, file in files.items():
        shutil.copyfile(file, run / name)


def _files(run: Path, tokenizer: Path | None) -> dict[str, Path]:
    """Return the sidecar files beside a run's tokenizer, or in the run itself if it uses bytes."""
    if tokenizer is None:
        return files_of(run)
    if not tokenizer.is_file():
        fix = "restore it: the model cannot be used without it"
        problem = Problem("data.tokenizer", f"{tokenizer} is missing", fix=fix)
        raise CheckpointError("Nothing was exported:", [problem])
    if tokenizer.name == TOKENIZER:
        return files_of(tokenizer.parent)
    return {TOKENIZER: tokenizer}
