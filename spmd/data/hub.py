"""Recognize data sets of the Hugging Face Hub where a local path is expected.

Nothing is downloaded: a run of weeks must not depend on a server, and many hosts have no way out.
"""

import re
import shlex
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from spmd.data.compression import content_suffix
from spmd.errors import Problem, check_local
from spmd.storage.address import BUCKET_ADDRESS, location_problems

_ADDRESS = re.compile(
    r"""(?:hf://datasets/|https?://(?:www\.)?huggingface\.co/datasets/|hf\.co/datasets/)
    (?P<id>[\w.-]+                        # owner/name, or the name of an old data set
        (?:/(?!(?:tree|resolve|blob)(?![\w.-]))[\w.-]+)?)
    (?:@(?P<revision>[^/]+))?
    (?:/(?:(?:tree|resolve|blob)/[^/]+/?)?(?P<files>.*))?""",
    re.VERBOSE,
)
_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)")


def download_fix(entry: str, suffixes: Collection[str] = ()) -> str:
    """Return the command to download a data set, and the source to give; empty for other text.

    A name such as `owner/name` is one if there is no folder `owner`.

    Args:
        suffixes: Of files; a name with one of them is a path.

    Example:
        >>> download_fix("hf://datasets/allenai/c4/en")
        "hf download allenai/c4 --repo-type dataset --include 'en/*' --local-dir c4, and give c4/en"
        >>> download_fix("books/*.txt")
        ''
    """
    address = _ADDRESS.search(entry)
    if address is not None:
        revision = address["revision"] or ""
        return _command(address["id"], revision, (address["files"] or "").strip("/"))
    name = _ID.fullmatch(entry)
    path = Path(entry)
    if name is None or path.parent.exists() or content_suffix(path) in suffixes:
        return ""
    return _command(name["id"], "", "")


def _command(name: str, revision: str, files: str) -> str:
    """Return the command, and the source to give after it."""
    folder = name.rpartition("/")[2]
    words = ["hf", "download", name, "--repo-type", "dataset"]
    if revision:
        words += ["--revision", revision]
    if files:
        pattern = files
        if not re.search(r"[*.]", files):
            pattern = f"{files}/*"
        words += ["--include", pattern]
    words += ["--local-dir", folder]
    source = folder
    if files:
        source = f"{folder}/{files}"
    return f"{shlex.join(words)}, and give {shlex.quote(source)}"


def source_problems(where: str, entries: Iterable[Any]) -> Iterator[Problem]:
    """Yield a problem for each address among sources of the Hub, or of an invalid one of a bucket."""
    for entry in entries:
        address = isinstance(entry, str) and BUCKET_ADDRESS.search(entry)
        if address:
            yield from location_problems(where, address[0])
        elif isinstance(entry, str) and _ADDRESS.search(entry):
            what = f"is {entry!r}, and only local files are read"
            yield Problem(where, what, fix=download_fix(entry))
        else:
            yield from check_local(where, [entry])
