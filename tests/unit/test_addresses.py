"""Addresses of object stores are parsed in one place, and all of their problems are said at once."""

from pathlib import Path

import pytest

from spmd.errors import StorageError
from spmd.storage.address import BucketPath, locate, parse_address


@pytest.mark.parametrize(
    "text",
    ["s3://bucket/runs/demo", "s3://bucket/runs/demo/", "S3://bucket/runs/demo//"],
)
def test_slashes_at_the_end_do_not_matter(text):
    assert locate(text) == BucketPath("s3", "bucket", "runs/demo")


def test_paths_below_keep_the_options():
    run = parse_address("gs://bucket/runs/demo?user_project=payer&endpoint=http://127.0.0.1:1")
    below = run / "checkpoints" / "steps"
    assert str(below) == "gs://bucket/runs/demo/checkpoints/steps"
    assert below.option("user_project") == "payer"
    assert parse_address(below.address) == below
    assert below.parent.parent == run
    assert below.name == "steps"


def test_other_texts_are_local_paths():
    assert locate("runs/demo") == Path("runs/demo")
    assert locate(Path("runs")) == Path("runs")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gs://bucket", "names a bucket without a key"),
        ("gs:///runs/demo", "names the bucket ''"),
        ("s3://Bucket/runs", "names the bucket 'Bucket'"),
        ("s3://bucket/a/../b", "has a key with empty names"),
        ("s3://bucket/a//b", "has a key with empty names"),
        ("s3://bucket/run?regoin=eu", 'did you mean "region"?'),
        ("az://bucket/run", "is neither a local path nor in a bucket"),
    ],
)
def test_an_invalid_address_is_an_error(text, expected):
    with pytest.raises(StorageError) as caught:
        locate(text)
    assert expected in str(caught.value)


def test_a_path_made_from_an_address_is_an_error():
    """`Path("gs://bucket/run")` is a local folder `gs:` for Python."""
    with pytest.raises(StorageError, match="neither a local path"):
        locate(Path("gs://bucket/run"))


def test_all_problems_are_said_at_once():
    with pytest.raises(StorageError) as caught:
        locate("s3://B?x=1")
    assert len(caught.value.problems) == 3
