"""Files copied unchanged with a model: its tokenizer, generation settings and original config.json."""

import shutil
from pathlib import Path
from typing import Any

from spmd.checkpoint.manifest import read_object
from spmd.data.tokenizer import MODEL_FILES, TOKENIZER, load_tokenizer
from spmd.errors import CheckpointError, Problem
from spmd.hf.family import families
from spmd.hf.fields import collect_errors
from spmd.hf.folder import CONFIG, architectures_of, inside

ORIGINAL = "hf_config.json"
"""Name of an imported model's config.json in a run folder."""
SIDECAR_FILES = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
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
    bad_links: list[Problem] = []
    for name in sorted({*SIDECAR_FILES, *MODEL_FILES}):
        with collect_errors(bad_links):
            if (folder / name).exists():
                inside(folder, name)
    # `open_folder` reports that one
    problems = [problem for problem in bad_links if problem.where != CONFIG]
    if (folder / TOKENIZER).exists():
        if not bad_links:
            with collect_errors(problems):
                size = load_tokenizer(str(folder / TOKENIZER)).vocab
                if vocab is not None and size > vocab:
                    detail = f"{size} tokens > {vocab} rows of the embedding"
                    problems.append(
                        Problem(TOKENIZER, "has more tokens than the embedding has rows", detail)
                    )
        return problems
    if others := [name for name in _OTHER_TOKENIZERS if (folder / name).exists()]:
        what = f"is an unsupported tokenizer format, and {TOKENIZER} is missing"
        fix = "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes one"
        problems.append(Problem(", ".join(others), what, fix=fix))
    return problems


def sidecar_files(run: Path, tokenizer: str, model: Any) -> tuple[dict[str, Path], dict[str, Any]]:
    """Return the sidecar files of a run folder and its model's original config.json.

    Empty if it has none.

    Files beside `tokenizer`, the run's `data.tokenizer`, are used too, if the run was fine-tuned
    from that model.
    """
    problems: list[Problem] = []
    files, values = dict[str, Path](), dict[str, Any]()
    tokenizer_path = None if tokenizer == "bytes" else Path(tokenizer).expanduser()
    with collect_errors(problems):
        files = _files(run, tokenizer_path)
    for folder in [run, tokenizer_path.parent] if tokenizer_path else [run]:
        if not values and (folder / ORIGINAL).exists():
            try:
                found = read_object(folder / ORIGINAL, _MAX_BYTES)
            except (OSError, ValueError) as error:
                problems.append(Problem(str(folder / ORIGINAL), str(error)))
            else:
                names, fitting = (
                    set(architectures_of(found)),
                    [f for f in families().values() if f.fits(model)],
                )
                values = (
                    found if any(names & set(family.architectures) for family in fitting) else {}
                )
    if problems:
        raise CheckpointError("Nothing was exported:", problems)
    return files, values


def copy_origin(start: Path, config: Path, run: Path) -> None:
    """Copy sidecar files from the folder `start` of a model into that of a run, unless it has them.

    A tokenizer is not copied: the run's config refers to it. `config` is the model's original
    config.json in `start`, which may be missing.
    """
    if config.exists() and not (run / ORIGINAL).exists():
        files = {} if (start / TOKENIZER).exists() else files_of(start)
        for name, file in {**files, ORIGINAL: inside(start, config.name)}.items():
            shutil.copyfile(file, run / name)


def _files(run: Path, tokenizer: Path | None) -> dict[str, Path]:
    """Return the sidecar files beside a run's tokenizer.

    Those of the run itself if it uses bytes.
    """
    if tokenizer is None:
        return files_of(run)
    if tokenizer.is_file():
        return files_of(tokenizer.parent) if tokenizer.name == TOKENIZER else {TOKENIZER: tokenizer}
    fix = "restore it: the model cannot be used without it"
    raise CheckpointError(
        "Nothing was exported:", [Problem("data.tokenizer", f"{tokenizer} is missing", fix=fix)]
    )
