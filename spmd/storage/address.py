"""Addresses of objects in buckets: `gs://bucket/key` and `s3://bucket/key`."""

import dataclasses
import re
import urllib.parse
from pathlib import Path
from typing import Self

from spmd.errors import Problem, StorageError, check_local, did_you_mean

SCHEMES = ("gs", "s3")

_OPTIONS = {
    "s3": ("endpoint", "region", "requester_pays"),
    "gs": ("endpoint", "user_project"),
}
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.IGNORECASE | re.DOTALL)
BUCKET_ADDRESS = re.compile(r"(?:gs|s3)://.*", re.IGNORECASE | re.DOTALL)
"""An address at the end of a text such as `NAME=gs://bucket/key`."""
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_BUCKET_RULE = "3 to 222 of a-z, 0-9, '.', '-' and '_'"


@dataclasses.dataclass(frozen=True)
class BucketPath:
    """Path in a bucket, such as `gs://bucket/runs/demo`.

    It is an address; nothing is read or written by it.

    Attributes:
        key: Names separated by single slashes; not empty.
        options: Name and value of each option after `?`: `endpoint`, `region` and `requester_pays`
            of S3, `endpoint` and `user_project` of Google.

    Example:
        >>> run = parse_address("s3://bucket/runs/demo/?region=eu-west-1")
        >>> print(run / "metrics.jsonl", run.name, run.parent)
        s3://bucket/runs/demo/metrics.jsonl demo s3://bucket/runs
    """

    scheme: str
    bucket: str
    key: str
    options: tuple[tuple[str, str], ...] = ()

    def __truediv__(self, name: str) -> Self:
        return dataclasses.replace(self, key=f"{self.key}/{name}")

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}"

    @property
    def name(self) -> str:
        """Last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Self:
        """Path without its last part."""
        return dataclasses.replace(self, key=self.key.rpartition("/")[0])

    @property
    def address(self) -> str:
        """Text with the options: the inverse of `parse_address`."""
        if not self.options:
            return str(self)
        return f"{self}?{urllib.parse.urlencode(self.options)}"

    def option(self, name: str) -> str:
        """Return the value of an option; empty if it is not set."""
        return dict(self.options).get(name, "")


Location = Path | BucketPath
"""A local path, or a path in a bucket."""


def is_address(text: str) -> bool:
    """Return whether a text is the address of an object store.

    Example:
        >>> is_address("gs://bucket/run"), is_address("runs/demo"), is_address("hf://datasets/a/b")
        (True, False, False)
    """
    found = _ADDRESS.fullmatch(text)
    return found is not None and found[1].lower() in SCHEMES


def locate(text: str | Location) -> Location:
    """Return the location of a text: a path in a bucket for `gs://` and `s3://`, else a local one.

    Raises:
        StorageError: The address is not valid, or of another kind of store.
    """
    if isinstance(text, BucketPath):
        return text
    if isinstance(text, str) and is_address(text):
        return parse_address(text)
    if check_local("", text):
        fix = "a local path, or an address that begins with gs:// or s3://"
        problem = Problem(str(text), "is neither a local path nor in a bucket", fix=fix)
        raise StorageError("Invalid location:", [problem])
    return Path(text)


def location_problems(where: str, text: str) -> list[Problem]:
    """Return the problems of a text as a location, reported at `where`.

    Example:
        >>> print(*location_problems("out", "gs://bucket"))
        out: gs://bucket: names a bucket without a key
            fix: a key after the bucket, such as gs://bucket/runs/demo
        >>> location_problems("out", "runs/demo")
        []
    """
    try:
        locate(text)
    except StorageError as error:
        return problems_at(where, error)
    return []


def problems_at(where: str, error: StorageError) -> list[Problem]:
    """Return the problems of an address, reported at the flag or field by which it was given."""
    problems = []
    for problem in error.problems:
        what = f"{problem.where}: {problem.what}"
        problems.append(dataclasses.replace(problem, where=where, what=what))
    return problems


def address_of(location: Location) -> str:
    """Return the text of a location: the inverse of `locate`."""
    if isinstance(location, BucketPath):
        return location.address
    return str(location)


def parse_address(text: str) -> BucketPath:
    """Parse the address of an object store.

    Raises:
        StorageError: It names no bucket, no key, or an unknown option; all problems at once.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or found[1].lower() not in SCHEMES:
        raise StorageError("Not an address:", [Problem(text, "does not begin with gs:// or s3://")])
    scheme = found[1].lower()
    path, _, query = found[2].partition("?")
    bucket, _, key = path.partition("/")
    key = key.strip("/")
    problems = list[Problem]()
    if not _BUCKET.fullmatch(bucket):
        what = f"names the bucket {bucket!r}"
        problems.append(Problem(text, what, fix=_BUCKET_RULE))
    names = key.split("/")
    if not key:
        fix = f"a key after the bucket, such as {scheme}://{bucket or 'bucket'}/runs/demo"
        problems.append(Problem(text, "names a bucket without a key", fix=fix))
    elif "" in names or "." in names or ".." in names or not key.isprintable():
        what = "has a key with empty names, '.', '..' or control characters"
        problems.append(Problem(text, what))
    options = urllib.parse.parse_qsl(query, keep_blank_values=True)
    problems += _option_problems(text, scheme, options)
    if problems:
        raise StorageError("Invalid address of an object store:", problems)
    return BucketPath(scheme, bucket, key, tuple(options))


def _option_problems(text: str, scheme: str, options: list[tuple[str, str]]) -> list[Problem]:
    """Return a problem for each unknown option."""
    problems = []
    for name, _ in options:
        if name not in _OPTIONS[scheme]:
            fix = did_you_mean(name, _OPTIONS[scheme])
            problems.append(Problem(text, f"has the unknown option {name!r}", fix=fix))
    return problems
