"""What `offload` names: tables of the training state that are in host memory."""

from spmd.host_memory.storage import HostMemory
from spmd.optim.storage import ON_DEVICES, Storage


def make_storage(offload: tuple[str, ...]) -> Storage:
    """Return the storage with some tables in host memory; `Storage.problems` has what is wrong with their names."""
    if not offload:
        return ON_DEVICES
    is_list = isinstance(offload, tuple | list)
    return HostMemory(tuple(dict.fromkeys(offload)) if is_list else offload)
