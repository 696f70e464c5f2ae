"""Single output files of commands, such as a report: on a disk or in a bucket."""

from pathlib import Path

from spmd.errors import ConfigError, Problem, StorageError, nearest_file
from spmd.storage.address import BucketPath, locate, location_problems, problems_at
from spmd.storage.bucket import Bucket

_NOT_WRITTEN = "File not written:"
_PATIENCE = 60.0
"""Seconds of repeated requests to a store that does not answer: somebody waits at a terminal."""


def output_problems(where: str, file: str) -> list[Problem]:
    """Return the problems of an output file, before the work for its content begins.

    Args:
        where: The flag or argument by which the file was given.

    Example:
        >>> print(*output_problems("--svg", "s3://bucket"))
        --svg: s3://bucket: names a bucket without a key
            fix: a key after the bucket, such as s3://bucket/runs/demo
    """
    problems = location_problems(where, file)
    if problems:
        return problems
    location = locate(file)
    if isinstance(location, BucketPath):
        return _bucket_problems(where, location)
    return _disk_problems(where, location)


def _disk_problems(where: str, file: Path) -> list[Problem]:
    """Return why a file on a disk cannot be written."""
    folder = file.absolute().parent
    if not folder.is_dir():
        return [Problem(where, f"{file} is in no folder that exists", fix=nearest_file(folder))]
    if file.is_dir():
        return [Problem(where, f"{file} is a folder", fix="the name of a file")]
    return []


def _bucket_problems(where: str, location: BucketPath) -> list[Problem]:
    """Return why a bucket cannot be reached or listed; nothing is written."""
    try:
        Bucket(location, patience=_PATIENCE).check()
    except StorageError as error:
        return problems_at(where, error)
    return []


def write_output(where: str, file: str, text: str) -> None:
    """Write a text to a file, or to an object of a bucket.

    Args:
        where: The flag or argument by which the file was given.

    Raises:
        ConfigError: The file cannot be written.
        StorageError: The object cannot be.
    """
    problems = location_problems(where, file)
    if problems:
        raise ConfigError(_NOT_WRITTEN, problems)
    location = locate(file)
    if isinstance(location, BucketPath):
        Bucket(location.parent, patience=_PATIENCE).write(location.name, text.encode())
        return
    problems = _disk_problems(where, location)
    if problems:
        raise ConfigError(_NOT_WRITTEN, problems)
    try:
        location.write_text(text, encoding="utf-8")
    except OSError as error:
        what = f"{file} cannot be written: {error.strerror}"
        problem = Problem(where, what, fix="another file")
        raise ConfigError(_NOT_WRITTEN, [problem]) from error
