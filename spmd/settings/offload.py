"""Values of `offload`: tables of the training state in host memory."""

from spmd.host_memory.storage import HostMemory
from spmd.optim.storage import ON_DEVICES, Storage


def make_storage(offload: tuple[str, ...]) -> Storage:
    """Return the storage with some tables in host memory; `Storage.problems` checks their names."""
    if not offload:
        return ON_DEVICES
    if isinstance(offload, tuple | list):
        offload = tuple(dict.fromkeys(offload))
    return HostMemory(offload)
