"""Files of `data.source`, a file, folder, glob or "stdlib", in an order of names only."""

import dataclasses
import glob
import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from spmd.data.compression import content_suffix, is_compressed
from spmd.data.file_formats import ROW_SUFFIXES, TABLES, FileFormat, detect_format
from spmd.data.hub import download_fix
from spmd.errors import DataError, Problem, StorageError, nearest_file
from spmd.storage.download import local_path

TEXT_SUFFIXES = " ".join(
    [
        ".txt .md .rst .tex .html .jsonl .ndjson .parquet .arrow .feather",
        ".py .c .h .cpp .cu .rs .go .java .js .ts .jl .r .sh",
    ]
)
_DATASET_CARD = "README.md"  # of a folder of the Hugging Face Hub
_STATE = "state.json"  # beside the Arrow files of a saved dataset
_DESCRIPTIONS = frozenset({"dataset_dict.json", "dataset_info.json", "dataset_infos.json"})
"""Files of JSON that the `datasets` library writes beside data."""
_EVALUATION_SPLIT = re.compile(
    r"(?:^|[-.])(test|validation|valid|val|dev|eval)(?![a-z])", re.IGNORECASE
)
_SHARD_NUMBER = re.compile(r"([-._]\d|\d{3}).*")  # to the end of a name

# Folders of a Python installation that hold tests or differ between machines.
_NOT_STDLIB = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


_NAMED = {".jsonl": FileFormat.JSON_LINES, **TABLES}


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """A file to read: its path, its key, the SHA-256 of its bytes, and its format.

    The key is a name; the split of the file's documents depends on it.
    """

    path: Path
    key: str
    digest: str
    format: FileFormat

    @property
    def content_key(self) -> tuple[str, ...]:
        """Digest, and the format unless the last suffix says it, for the keys of caches.

        Earlier versions took any other file for text, so their caches must not be found for these.
        """
        named = _NAMED.get(self.path.suffix.lower(), FileFormat.TEXT)
        if self.format is named:
            return (self.digest,)
        return (self.digest, self.format.value)


def find_files(source: Iterable[str]) -> list[SourceFile]:
    """Return each file of all sources once, by the order of the sources and the paths in each.

    Args:
        source: Files, folders, globs, addresses of objects or "stdlib" (Python's own source).
            Objects are read from local copies (`spmd.storage.download`), those below a key as a
            folder. A folder is searched for visible files with `TEXT_SUFFIXES`, also compressed
            ones; files with other suffixes must be named or matched by a glob, but `.json` is read
            in a folder without other text, and rows of JSON beside other text are refused. Of a
            folder that the `datasets` library saved, the files that it lists are read; a README.md
            at the top of a folder with tables or rows of JSON describes them, and is not. A folder
            of which only some files are a test or validation split is refused: the files to read
            must be named.

    Raises:
        DataError: A source does not exist, holds no text files or cannot be read, the name of a
            file contradicts its content, or a file is there twice, also compressed.
    """
    problems: list[Problem] = []
    paths: dict[Path, tuple[Path, str]] = {}
    for number, entry in enumerate(source):
        try:
            found = sorted(_files_of(entry, problems))
        except StorageError as error:
            problems += error.problems
            continue
        for name, path in found:
            # The source's number distinguishes files with the same name in two folders.
            paths.setdefault(path.resolve(), (path, f"{number}/{name}"))
    problems += _compressed_twice(path for path, _ in paths.values())
    files = []
    for path, key in paths.values():
        try:
            files.append(SourceFile(path, key, file_digest(path), detect_format(path)))
        except DataError as error:
            problems += error.problems
        except OSError as error:
            problems.append(Problem(str(path), "cannot be read", str(error)))
    if problems:
        raise DataError("text not found:", problems)
    return files


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hex."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _files_of(entry: str, problems: list[Problem]) -> list[tuple[str, Path]]:
    """Return the files of one source, each with its path inside the source."""
    path = local_path(entry)
    if entry == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        found = _stdlib_files(root)
    elif path.is_file():
        root = path.parent
        found = [path]
    elif path.is_dir():
        root = path
        found = _folder_files(entry, root, problems)
    elif glob.has_magic(entry):
        root = path
        while glob.has_magic(str(root)):
            root = root.parent
        found = list(map(Path, glob.glob(str(path), recursive=True)))
    else:
        suffixes = ROW_SUFFIXES.union(TEXT_SUFFIXES.split())
        fix = download_fix(entry, suffixes) or nearest_file(path)
        problems.append(Problem(entry, "does not exist", fix=fix))
        return []
    named = []
    for file in found:
        if file.is_file():
            named.append((file.relative_to(root).as_posix(), file))
    if not named:
        detail = ""
        if path.is_dir():
            detail = f"looked for {TEXT_SUFFIXES}"
        problems.append(Problem(entry, "holds no text files", detail))
    return named


def _stdlib_files(root: Path) -> list[Path]:
    """Return the files of Python's own source, the same on every machine with this Python."""
    found = []
    for path in _walk(root, _NOT_STDLIB.__contains__):
        if path.suffix == ".py" and not _is_built_here(path.relative_to(root).parts):
            found.append(path)
    return found


def _folder_files(entry: str, root: Path, problems: list[Problem]) -> list[Path]:
    """Return the visible files of text in a folder; add a problem if they mix splits."""
    suffixes = TEXT_SUFFIXES.split()
    found = []
    json_files = []
    for path in _walk(root, lambda name: name.startswith(".")):
        suffix = content_suffix(path)
        if path.name.startswith("."):
            continue
        if suffix in suffixes:
            found.append(path)
        elif suffix == ".json" and not _is_description(path):
            json_files.append(path)
    card = root / _DATASET_CARD
    # Beside other files, JSON is a description of them, or of a program.
    if found in ([], [card]):
        found += json_files
    else:
        problems += _rows_beside_text(entry, root, sorted(json_files), min(found))
    if card in found and any(content_suffix(path) in ROW_SUFFIXES for path in found):
        found.remove(card)
    found = _saved_files(found, problems)
    names = []
    for path in sorted(found):
        if content_suffix(path) in ROW_SUFFIXES:
            names.append(path.relative_to(root))
    problems += mixed_splits(entry, names, "--data.source ")
    return found


def _is_description(path: Path) -> bool:
    """Return whether the `datasets` library wrote a file of JSON beside data."""
    if path.name == _STATE:
        return any(path.parent.glob("*.arrow"))
    return path.name in _DESCRIPTIONS


def _rows_beside_text(entry: str, root: Path, files: list[Path], text: Path) -> list[Problem]:
    """Return a problem for the first file of JSON with rows in a folder of other text."""
    for path in files:
        if _holds_rows(path):
            name = path.relative_to(root)
            detail = f"{name} beside {text.relative_to(root)}"
            fix = f"name the files to read, or a glob: --data.source '{Path(entry, name)}'"
            return [Problem(entry, "holds rows of JSON beside other text", detail, fix)]
    return []


def _holds_rows(path: Path) -> bool:
    """Return whether a file of JSON is lines or an array; not if it is empty or unreadable."""
    try:
        is_empty = path.stat().st_size == 0
        found = detect_format(path)
    except (DataError, OSError):
        return False
    return not is_empty and found in (FileFormat.JSON_LINES, FileFormat.JSON_ARRAY)


def _compressed_twice(paths: Iterable[Path]) -> list[Problem]:
    """Return a problem for each file with the name of another but for a compression."""
    problems = []
    found: dict[Path, Path] = {}
    for path in sorted(paths):
        plain = path
        if is_compressed(path):
            plain = path.with_suffix("")
        other = found.setdefault(plain, path)
        if other is not path:
            what = "is there twice, also compressed"
            fix = "remove one, or name the files to read"
            problems.append(Problem(str(other), what, f"{path.name} beside it", fix))
    return problems


def _walk(root: Path, skips: Callable[[str], bool]) -> Iterator[Path]:
    """Yield the files below a folder.

    Folders with a name that `skips` are not entered, nor are links to folders.
    """
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not skips(name)]
        for name in files:
            yield Path(folder, name)


def _saved_files(found: list[Path], problems: list[Problem]) -> list[Path]:
    """Remove the Arrow files not listed by a folder saved by `datasets`.

    Caches of `map` are such files. Other files stay.
    """
    arrow: dict[Path, dict[str, Path]] = {}
    for path in found:
        if path.suffix == ".arrow" and (path.parent / _STATE).is_file():
            arrow.setdefault(path.parent, {})[path.name] = path
    unlisted: set[Path] = set()
    for folder, files in arrow.items():
        state = folder / _STATE
        try:
            listed = _listed_files(state)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            what = "does not list the files of a saved dataset"
            fix = "save it again, or name its files"
            problems.append(Problem(str(state), what, repr(error), fix))
            continue
        for name, path in files.items():
            if name not in listed:
                unlisted.add(path)
        for name in sorted(listed - files.keys()):
            problems.append(Problem(str(folder / name), "is missing", "state.json lists it"))
    return [path for path in found if path not in unlisted]


def _listed_files(state: Path) -> set[str]:
    """Return the names of data files in the `state.json` of a saved dataset."""
    record = json.loads(state.read_text("utf-8"))
    return {str(file["filename"]) for file in record["_data_files"]}


def is_split(name: str) -> bool:
    """Return whether a file or folder has the name of a test or validation split.

    Example:
        >>> names = ("test-00000-of-00001.parquet", "c4-validation.00000.json", "train", "testing")
        >>> [is_split(name) for name in names]
        [True, True, False, False]
    """
    return _EVALUATION_SPLIT.search(name) is not None


def mixed_splits(entry: str, names: Iterable[Path], argument: str = "") -> list[Problem]:
    """Return a problem if some files of a folder, but not all, are a split for evaluation.

    Args:
        names: Paths in the folder, in order.
        argument: What to write before the name of the files to train on.
    """
    held_out: list[Path] = []
    others: list[Path] = []
    for name in names:
        if any(map(is_split, name.parts)):
            held_out.append(name)
        else:
            others.append(name)
    if not held_out or not others:
        return []
    one = others[0]
    other = held_out[0]
    if one.parts[0] != other.parts[0] and len(one.parts) > 1:
        named = Path(entry, one.parts[0])
    else:
        named = Path(entry, one.parent, _SHARD_NUMBER.sub("*", one.stem) + one.suffix)
    what = "holds splits for training and for evaluation"
    fix = f"name what to train on: {argument}'{named}'"
    return [Problem(entry, what, f"{other} beside {one}", fix)]


def _is_built_here(parts: tuple[str, ...]) -> bool:
    """Return whether a file of Python's own source differs between machines with this Python."""
    return parts[0].startswith("config-") or parts[-1].startswith(
        ("_sysconfigdata", "sitecustomize")
    )
