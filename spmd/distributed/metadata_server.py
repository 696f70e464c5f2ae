"""Metadata server of Google's virtual machines: hosts of a TPU slice, and notices of preemption.

It answers every process of a machine of Compute Engine, without credentials. Variables of the
environment say where it is: `GCE_METADATA_HOST` or `GCE_METADATA_IP`.
"""

import dataclasses
import http.client
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from spmd.distributed.launchers import Environment

_PLACES = ("GCE_METADATA_HOST", "GCE_METADATA_IP")
_DEFAULT = "metadata.google.internal"
_HEADER = {"Metadata-Flavor": "Google"}
_SECONDS = 5.0  # for an answer, which takes milliseconds
_TRIES = 6
_PAUSE = 0.5
_GOOGLE = "0x1ae0"
_OF_SLICES = ("MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS")
_ROW = re.compile(r"\s*(\w+)\s*:\s*'?([^']*)'?\s*")


class MetadataError(Exception):
    """Unusable answer of the metadata server, as a clause about the server."""


@dataclasses.dataclass(frozen=True)
class MetadataValue:
    """Value of a key, and its tag to wait for the next one."""

    text: str
    etag: str


@dataclasses.dataclass(frozen=True)
class MetadataServer:
    """Metadata server at HOST or HOST:PORT."""

    host: str

    @classmethod
    def of(cls, environment: Environment) -> Self:
        """Return the server of this machine."""
        for name in _PLACES:
            if environment.get(name):
                return cls(environment[name])
        return cls(_DEFAULT)

    def get(self, key: str) -> str | None:
        """Return the value of a key below `computeMetadata/v1/instance/`; None if it has none."""
        reason = ""
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(_PAUSE)
            try:
                return self._request(key, _SECONDS).text
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    return None
                reason = f"answers {error.code} {error.reason} for {key}"
            except OSError as error:
                reason = f"does not answer: {getattr(error, 'reason', None) or error}"
        raise MetadataError(reason)

    def wait_for_change(self, key: str, last: MetadataValue, seconds: float) -> MetadataValue:
        """Return the value of a key once it differs from the last one, or after some seconds.

        Raises:
            OSError: The server cannot be reached, or has no such key.
        """
        query = f"{key}?wait_for_change=true&last_etag={last.etag}&timeout_sec={seconds:.0f}"
        return self._request(query, seconds + _SECONDS)

    def read(self, key: str) -> MetadataValue:
        """Return the value of a key with its tag, in one try.

        Raises:
            OSError: The server cannot be reached, or has no such key.
        """
        return self._request(key, _SECONDS)

    def _request(self, key: str, seconds: float) -> MetadataValue:
        url = f"http://{self.host}/computeMetadata/v1/instance/{key}"
        request = urllib.request.Request(url, headers=_HEADER)
        # Proxies are for other machines.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=seconds) as response:
                text = response.read().decode(errors="replace").strip()
                return MetadataValue(text, response.headers.get("ETag", "0"))
        except http.client.HTTPException as error:  # an answer that was cut off, or is none
            raise OSError(f"{type(error).__name__}: {error}") from error


def has_tpu(dev: Path = Path("/dev"), groups: Path = Path("/sys/kernel/iommu_groups")) -> bool:
    """Return whether this machine has device files of TPU chips; asks nothing of a network.

    TPUs up to v4 are `/dev/accel0` and so on; newer ones are groups of VFIO, as are devices of
    others, so the vendor is read.
    """
    if any(dev.glob("accel[0-9]*")):
        return True
    for group in dev.glob("vfio/[0-9]*"):
        for vendor in groups.glob(f"{group.name}/devices/*/vendor"):
            if vendor.read_text().strip() == _GOOGLE:
                return True
    return False


def on_compute_engine(environment: Environment) -> bool:
    """Return whether this is a machine of Compute Engine; asks nothing of a network."""
    if any(map(environment.get, _PLACES)):
        return True
    product = Path("/sys/class/dmi/id/product_name")
    return product.is_file() and "Google" in product.read_text()


def slice_variables(server: MetadataServer, environment: Environment) -> dict[str, str]:
    """Return the variables of this host of a TPU slice, as Google Kubernetes Engine sets them.

    A machine that is no part of a slice has none. Variables of the environment about several slices
    come before those of the server.

    Raises:
        MetadataError: The server does not answer, or not as documented.
    """
    worker = server.get("attributes/agent-worker-number")
    if worker is None:
        return {}
    endpoints = server.get("attributes/worker-network-endpoints") or ""
    variables = {
        "TPU_WORKER_HOSTNAMES": ",".join(_hosts_of(endpoints)),
        "TPU_WORKER_ID": worker,
    }
    rows = _rows(server.get("attributes/tpu-env") or "")
    for name in _OF_SLICES:
        value = environment.get(name) or rows.get(name, "")
        if value:
            variables[name] = value
    return variables


def _hosts_of(endpoints: str) -> list[str]:
    """Return the host of each worker, from names or from NAME:ID:ADDRESS.

    Example:
        >>> _hosts_of("a:b:10.0.0.2,a:b:10.0.0.3"), _hosts_of("w-0,w-1")
        (['10.0.0.2', '10.0.0.3'], ['w-0', 'w-1'])
    """
    hosts: list[str] = []
    for endpoint in endpoints.split(","):
        parts = endpoint.strip().split(":")
        if len(parts) not in (1, 3) or not parts[-1]:
            raise MetadataError(f"has worker-network-endpoints of an unknown form: {endpoints!r}")
        hosts.append(parts[-1])
    return hosts


def _rows(text: str) -> Mapping[str, str]:
    """Return the values of `tpu-env`, lines such as `MEGASCALE_NUM_SLICES: '2'`."""
    rows: dict[str, str] = {}
    for line in text.splitlines():
        match = _ROW.fullmatch(line)
        if match:
            rows[match[1]] = match[2]
    return rows
