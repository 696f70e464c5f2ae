"""Facts about the machine of one process: drivers, network cards, shared memory.

They are read from `/proc` and `/sys`, and need no device. `root` is another folder than `/` in
tests.
"""

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path

_EFA_VENDOR = "0x1d0f"  # PCI vendor ids
_SLINGSHOT_VENDOR = "0x17db"


@dataclasses.dataclass(frozen=True, order=True)
class Transport:
    """Network card, and the transport of collectives over it.

    Attributes:
        kind: `InfiniBand`, `RoCE`, `Slingshot`, `EFA` or `TCP`.
        name: Name of the device in Linux.
        gigabits: Gbit/s as the driver says it; 0 if it does not.
        is_up: Whether the link is active.
    """

    kind: str
    name: str
    gigabits: float
    is_up: bool

    def __str__(self) -> str:
        speed = "speed unknown"
        if self.gigabits:
            speed = f"{self.gigabits:g} Gbit/s"
        state = ""
        if not self.is_up:
            state = ", down"
        return f"{self.kind} {self.name} ({speed}{state})"


def read_drivers(root: Path = Path("/")) -> dict[str, str]:
    """Return the accelerator drivers in the kernel, by name, with their versions."""
    drivers = {}
    nvidia = _read(root / "sys/module/nvidia/version")
    if nvidia:
        drivers["nvidia"] = nvidia
    amd = _read(root / "sys/module/amdgpu/version")
    if amd:
        drivers["amdgpu"] = amd
    return drivers


def read_transports(root: Path = Path("/")) -> list[Transport]:
    """Return the network cards, the fastest kind first; without loopback and virtual ones."""
    found = [
        *_verbs_devices(root / "sys/class/infiniband"),
        *_slingshot_cards(root / "sys/class/cxi"),
        *_ethernet_cards(root / "sys/class/net"),
    ]
    return sorted(found, key=_by_speed)


def _by_speed(transport: Transport) -> tuple[bool, bool, float, str]:
    is_tcp = transport.kind == "TCP"
    return not transport.is_up, is_tcp, -transport.gigabits, transport.name


def _verbs_devices(folder: Path) -> list[Transport]:
    """Return the InfiniBand, RoCE and EFA devices: the kernel lists all three as InfiniBand."""
    found = []
    for device in _entries(folder):
        kind = "InfiniBand"
        if _read(device / "device/vendor") == _EFA_VENDOR:
            kind = "EFA"
        for port in _entries(device / "ports"):
            if kind != "EFA" and _read(port / "link_layer") == "Ethernet":
                kind = "RoCE"
            rate = _first_number(_read(port / "rate"))
            is_up = "ACTIVE" in _read(port / "state")
            found.append(Transport(kind, device.name, rate, is_up))
    return found


def _slingshot_cards(folder: Path) -> list[Transport]:
    found = []
    for device in _entries(folder):
        properties = device / "device/properties"
        rate = _first_number(_read(properties / "speed"))
        is_up = _read(properties / "link_state") in ("", "up")
        found.append(Transport("Slingshot", device.name, rate, is_up))
    return found


def _ethernet_cards(folder: Path) -> list[Transport]:
    """Return the cards with an address for TCP.

    A virtual card has no device, and that of a Slingshot card is listed as such.
    """
    found = []
    for card in _entries(folder):
        is_virtual = not (card / "device").exists()
        if is_virtual or _read(card / "device/vendor") == _SLINGSHOT_VENDOR:
            continue
        megabits = _first_number(_read(card / "speed"))  # -1 where the driver does not know it
        is_up = _read(card / "operstate") in ("up", "unknown")
        found.append(Transport("TCP", card.name, max(megabits, 0) / 1000, is_up))
    return found


def shared_memory_bytes(folder: Path = Path("/dev/shm")) -> int:
    """Return the size of the shared memory of a host, NCCL's between its processes."""
    try:
        sizes = os.statvfs(folder)
    except OSError:
        return 0
    return sizes.f_blocks * sizes.f_frsize


def _entries(folder: Path) -> Iterable[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return ()


def _read(file: Path) -> str:
    """Return a file's text without spaces around it; empty if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _first_number(text: str) -> float:
    """Return the first number of a text such as `400 Gb/sec (4X NDR)`, 0 if none."""
    first = text.partition(" ")[0]
    try:
        return float(first)
    except ValueError:
        return 0.0
