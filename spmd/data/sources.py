"""Files of `data.source`: what a file, folder, glob or "stdlib" stands for, in an order that depends on names only."""

import dataclasses
import glob
import hashlib
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from spmd.errors import DataError, Problem, nearest_file

TEXT_SUFFIXES = ".txt .md .rst .tex .html .jsonl .py .c .h .cpp .cu .rs .go .java .js .ts .jl .r .sh"

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
            `TEXT_SUFFIXES`; files with other suffixes must be named or matched by a glob.

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
        found = [p for p in root.rglob("*.py") if _is_stdlib(p.relative_to(root).parts)]
    elif path.is_file():
        root, found = path.parent, [path]
    elif path.is_dir():
        root = path
        texts = (p for p in root.rglob("*") if p.suffix.lower() in TEXT_SUFFIXES.split())
        found = [p for p in texts if "/." not in f"/{p.relative_to(root).as_posix()}"]
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


def _is_stdlib(parts: tuple[str, ...]) -> bool:
    """Return whether a file is part of Python's own source, and the same on every machine with this Python."""
    built_here = parts[0].startswith("config-") or parts[-1].startswith(("_sysconfigdata", "sitecustomize"))
    return not built_here and not _NOT_STDLIB.intersection(parts)
