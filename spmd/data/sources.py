"""Files of `data.source`: what a file, folder, glob or "stdlib" stands for, in an order that depends on names only."""

import dataclasses
import glob
import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from spmd.errors import DataError, Problem, nearest_file

TEXT_SUFFIXES = (
    ".txt .md .rst .tex .html .jsonl .parquet .arrow .feather .py .c .h .cpp .cu .rs .go .java .js .ts .jl .r .sh"
)
_ROW_SUFFIXES = frozenset({".jsonl", ".parquet", ".arrow", ".feather"})
_DATASET_CARD = "README.md"  # of a folder of the Hugging Face Hub
_EVALUATION_SPLIT = re.compile(r"(test|validation|valid|val|dev|eval)(?![a-z])", re.IGNORECASE)

# Folders of a Python installation that hold tests or differ between machines.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """A file to read: its path, the name that determines its split, and the SHA-256 of its bytes."""

    path: Path
    key: str
    digest: str


def find_files(source: Iterable[str]) -> list[SourceFile]:
    """Return each file of all sources once, in the order of the sources and of the paths within each.

    Args:
        source: Files, folders, globs or "stdlib" (Python's own source). A folder is searched for visible files with
            `TEXT_SUFFIXES`; files with other suffixes must be named or matched by a glob. Of a folder that the
            `datasets` library saved, the files that it lists are read; a README.md at the top of a folder with tables
            or JSON lines describes them, and is not. A folder of which only some files are a test or validation split
            is refused: the files to read must be named.

    Raises:
        DataError: A source does not exist, holds no text files or cannot be read.
    """
    problems: list[Problem] = []
    paths: dict[Path, tuple[Path, str]] = {}
    for number, entry in enumerate(source):
        for name, path in sorted(_files_of(entry, problems)):
            # The source's number distinguishes files with the same name in two folders.
            paths.setdefault(path.resolve(), (path, f"{number}/{name}"))
    files = []
    for path, key in paths.values():
        try:
            files.append(SourceFile(path, key, file_digest(path)))
        except OSError as error:
            problems.append(Problem(str(path), "cannot be read", str(error)))
    if problems:
        raise DataError("the text cannot be found:", problems)
    return files


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hex."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _files_of(entry: str, problems: list[Problem]) -> list[tuple[str, Path]]:
    """Return the files of one source, each with its path inside the source."""
    path = Path(entry).expanduser()
    if entry == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        found = [p for p in _walk(root, _NOT_STDLIB.__contains__) if p.suffix == ".py"]
        found = [p for p in found if not _is_built_here(p.relative_to(root).parts)]
    elif path.is_file():
        root, found = path.parent, [path]
    elif path.is_dir():
        root = path
        visible = (p for p in _walk(root, lambda name: name.startswith(".")) if not p.name.startswith("."))
        found = [p for p in visible if p.suffix.lower() in TEXT_SUFFIXES.split()]
        if any(p.suffix.lower() in _ROW_SUFFIXES for p in found):
            found = [p for p in found if p != root / _DATASET_CARD]
        found = _saved_files(found, problems)
        problems += _mixed_splits(entry, sorted(p.relative_to(root) for p in found))
    elif glob.has_magic(entry):
        root = path
        while glob.has_magic(str(root)):
            root = root.parent
        found = [Path(p) for p in glob.glob(str(path), recursive=True)]
    else:
        problems.append(Problem(entry, "does not exist", fix=nearest_file(path)))
        return []
    named = [(p.relative_to(root).as_posix(), p) for p in found if p.is_file()]
    if not named:
        problems.append(Problem(entry, "holds no text files", f"looked for {TEXT_SUFFIXES}" if path.is_dir() else ""))
    return named


def _walk(root: Path, skips: Callable[[str], bool]) -> Iterator[Path]:
    """Yield the files below a folder; folders with a name that `skips` are not entered, nor are links to folders."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not skips(name)]
        yield from (Path(folder, name) for name in files)


def _saved_files(found: list[Path], problems: list[Problem]) -> list[Path]:
    """Return files without the Arrow files that a folder saved by `datasets` does not list, such as caches of `map`."""
    arrow: dict[Path, dict[str, Path]] = {}
    for path in found:
        if path.suffix == ".arrow" and (path.parent / "state.json").is_file():
            arrow.setdefault(path.parent, {})[path.name] = path
    unlisted: set[Path] = set()
    for folder, files in arrow.items():
        state = folder / "state.json"
        try:
            listed = {str(file["filename"]) for file in json.loads(state.read_text("utf-8"))["_data_files"]}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            what = "does not list the files of a saved dataset"
            problems.append(Problem(str(state), what, repr(error), "save it again, or name its files"))
            continue
        unlisted |= {path for name, path in files.items() if name not in listed}
        missing = sorted(listed - files.keys())
        problems += [Problem(str(folder / name), "is missing", "state.json lists it") for name in missing]
    return [path for path in found if path not in unlisted]


def is_split(name: str) -> bool:
    """Return whether a file or folder has the name of a test or validation split.

    Example:
        >>> [is_split(name) for name in ("test-00000-of-00001.parquet", "validation", "train", "testing")]
        [True, True, False, False]
    """
    return _EVALUATION_SPLIT.match(name) is not None


def _mixed_splits(entry: str, names: list[Path]) -> list[Problem]:
    """Return a problem if some files of a folder, but not all, are a split for evaluation."""
    rows = [name for name in names if name.suffix.lower() in _ROW_SUFFIXES]
    held_out = [name for name in rows if any(map(is_split, name.parts))]
    others = [name for name in rows if name not in held_out]
    if not held_out or not others:
        return []
    one, other = others[0], held_out[0]
    if one.parts[0] != other.parts[0] and len(one.parts) > 1:
        named = Path(entry, one.parts[0])
    else:
        named = Path(entry, one.parent, re.sub(r"[^A-Za-z_].*", "*", one.stem) + one.suffix)
    what = "holds splits for training and for evaluation"
    return [Problem(entry, what, f"{other} beside {one}", f"name what to train on: --data.source '{named}'")]


def _is_built_here(parts: tuple[str, ...]) -> bool:
    """Return whether a file of Python's own source differs between machines with this Python."""
    return parts[0].startswith("config-") or parts[-1].startswith(("_sysconfigdata", "sitecustomize"))
