"""Two network namespaces of this machine, each with its own address and name, joined by a cable that can be cut.

Needs root, and `ip` of the Debian package iproute2, which `make system` installs.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

NAMES = ("one", "two")
ADDRESSES = ("10.213.71.1", "10.213.71.2")


class Networks:
    """The two namespaces.

    Attributes:
        prefixes: For each, what a command that runs inside it begins with.
    """

    def __init__(self, folder: Path) -> None:
        self._spaces = [f"spmd-{os.getpid()}-{name}" for name in NAMES]
        hosts = folder / "hosts"
        named = zip(ADDRESSES, NAMES, strict=True)
        hosts.write_text(
            "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for address, name in named)
        )
        # The name of the host is looked up by what connects the processes, so each needs its own.
        inside = f'hostname "$0" && mount --bind {hosts} /etc/hosts && exec "$@"'
        self.prefixes = [
            ["ip", "netns", "exec", space, "unshare", "--uts", "--mount", "sh", "-c", inside, name]
            for space, name in zip(self._spaces, NAMES, strict=True)
        ]

    def make(self) -> None:
        """Both namespaces, with the cable between them."""
        one, two = self._spaces
        for space in self._spaces:
            _ip("netns", "add", space)
        _ip(
            "link",
            "add",
            "cable",
            "netns",
            one,
            "type",
            "veth",
            "peer",
            "name",
            "cable",
            "netns",
            two,
        )
        for space, address in zip(self._spaces, ADDRESSES, strict=True):
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", "cable")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "link", "set", "cable", "up")

    def cut(self) -> None:
        """Whatever is sent is lost from now on, and no one is told: it goes to a hardware address that nobody has."""
        for space, peer in zip(self._spaces, reversed(ADDRESSES), strict=True):
            nobody = ("lladdr", "02:00:00:00:00:01", "nud", "permanent")
            _ip("-n", space, "neigh", "replace", peer, *nobody, "dev", "cable")

    def mend(self) -> None:
        """The cable is whole."""
        for space, peer in zip(self._spaces, reversed(ADDRESSES), strict=True):
            _ip("-n", space, "neigh", "del", peer, "dev", "cable")

    def remove(self) -> None:
        """Both namespaces are gone, and the cable with them."""
        for space in self._spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


@contextlib.contextmanager
def two_networks(folder: Path) -> Iterator[Networks]:
    """Two namespaces for the length of the block."""
    assert shutil.which("ip"), "not installed: ip; run `make system` as root"
    assert os.geteuid() == 0, "only root may make network namespaces"
    networks = Networks(folder)
    try:
        networks.make()
        yield networks
    finally:
        networks.remove()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
