"""Servers of object stores: TensorStore's description of a path, and the server's clock.

Credentials are found by TensorStore, as the tools of each cloud find theirs: variables of the
environment, configuration files, and the metadata of the machine. They are not read here.
"""

import email.utils
import os
import urllib.error
import urllib.request
from typing import Any

from spmd.errors import Problem, StorageError
from spmd.storage.address import BucketPath

_S3_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_S3_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_GCS_EMULATOR = "STORAGE_EMULATOR_HOST"
_GCS_ENDPOINT = "TENSORSTORE_GCS_HTTP_URL"
"""Variable by which TensorStore finds another server of Google's interface."""
_CLOCK_SECONDS = 10.0


def kvstore_spec(path: BucketPath) -> dict[str, Any]:
    """Return the specification of TensorStore's key-value store below a path."""
    spec: dict[str, Any] = {"bucket": path.bucket, "path": f"{path.key}/".lstrip("/")}
    if path.scheme == "gs":
        _set_gcs_endpoint(path)
        user_project = path.option("user_project")
        if user_project:
            spec["context"] = {"gcs_user_project": {"project_id": user_project}}
        return {"driver": "gcs", **spec}
    endpoint = _s3_endpoint(path)
    if endpoint:
        # Without a region, TensorStore would ask Amazon for that of the bucket.
        spec |= {"endpoint": endpoint, "aws_region": "us-east-1"}
    region = path.option("region") or _variable(_S3_REGIONS)
    if region:
        spec["aws_region"] = region
    if path.option("requester_pays") == "true":
        spec["requester_pays"] = True
    if "AWS_ACCESS_KEY_ID" in os.environ:
        # The default tries this first, too, and prints about every other source.
        spec["aws_credentials"] = {"type": "environment"}
    return {"driver": "s3", **spec}


def _set_gcs_endpoint(path: BucketPath) -> None:
    """Give TensorStore the server of an address; it has one for all addresses of a process."""
    endpoint = _gcs_endpoint(path)
    present = os.environ.get(_GCS_ENDPOINT, "")
    if path.option("endpoint") and present not in ("", endpoint):
        fix = f"one endpoint for all, in the environment: {_GCS_ENDPOINT}={endpoint}"
        problem = Problem(str(path), f"is at {endpoint}, and others at {present}", fix=fix)
        raise StorageError("Two servers of gs://:", [problem])
    if endpoint:
        os.environ[_GCS_ENDPOINT] = endpoint


def server_time(path: BucketPath) -> float:
    """Return the seconds since the epoch by the clock of the path's server.

    Raises:
        StorageError: The server does not answer (transient), or the bucket does not exist.
    """
    status, date = _ask(path)
    if status == 404:
        problem = Problem(str(path), f"the bucket {path.bucket} does not exist", fix="create it")
        raise StorageError("Bucket not found:", [problem])
    return email.utils.parsedate_to_datetime(date).timestamp()


def _ask(path: BucketPath) -> tuple[int, str]:
    """Return status and date of an answer about a bucket, for a request without credentials."""
    url = _bucket_url(path)
    method = "GET"
    if path.scheme == "s3":
        method = "HEAD"
    request = urllib.request.Request(url, method=method)
    try:
        with urllib.request.urlopen(request, timeout=_CLOCK_SECONDS) as answer:
            status, date = answer.status, answer.headers["Date"]
    except urllib.error.HTTPError as error:  # mostly 403: it needs credentials
        status, date = error.code, error.headers["Date"]
    except (OSError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        problem = Problem(str(path), f"{url} does not answer", reason)
        raise StorageError("Object store not reached:", [problem], is_transient=True) from error
    if not date:
        what = f"{url} answers without a date, by which leases expire"
        raise StorageError("Object store without a clock:", [Problem(str(path), what)])
    return int(status), str(date)


def _bucket_url(path: BucketPath) -> str:
    """Return the address of a bucket at its server."""
    if path.scheme == "gs":
        server = _gcs_endpoint(path) or "https://storage.googleapis.com"
        return f"{server}/storage/v1/b/{path.bucket}"
    endpoint = _s3_endpoint(path)
    if endpoint:
        return f"{endpoint}/{path.bucket}"
    if "." in path.bucket:  # the certificate is for one name before amazonaws.com
        return f"https://s3.amazonaws.com/{path.bucket}"
    return f"https://{path.bucket}.s3.amazonaws.com/"


def _gcs_endpoint(path: BucketPath) -> str:
    """Return the address of another server than Google's; empty for Google's."""
    endpoint = path.option("endpoint") or _variable((_GCS_ENDPOINT, _GCS_EMULATOR))
    if endpoint and "://" not in endpoint:  # as Google's clients accept it
        endpoint = f"http://{endpoint}"
    return endpoint.rstrip("/")


def _s3_endpoint(path: BucketPath) -> str:
    """Return the address of another server than Amazon's; empty for Amazon's."""
    return (path.option("endpoint") or _variable(_S3_ENDPOINTS)).rstrip("/")


def _variable(names: tuple[str, ...]) -> str:
    """Return the first non-empty variable of the environment; empty if there is none."""
    for name in names:
        if os.environ.get(name):
            return os.environ[name]
    return ""
