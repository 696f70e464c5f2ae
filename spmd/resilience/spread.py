"""Which process the others wait for: a few numbers of each process, side by side, without waiting for them."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


class Spread:
    """Exchanges a row of numbers between processes; what is sent in one call is returned by the next.

    So no call waits for a device that has other work: the row travels behind the steps that were dispatched before it.
    Every process makes every call.
    """

    def __init__(self) -> None:
        first = {device.process_index: device for device in reversed(jax.devices())}
        mesh = Mesh(np.array([first[process] for process in sorted(first)]), "process")
        self._mine, self._split = first[jax.process_index()], NamedSharding(mesh, P("process"))
        self._together = jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, P()))
        self._sent: jax.Array | None = None

    def exchange(self, row: Sequence[float]) -> np.ndarray | None:
        """The rows `[processes, numbers]` of the call before, in float32; None at the first call.

        Args:
            row: This process's numbers, as many at every call.
        """
        before = None if self._sent is None else np.asarray(jax.device_get(self._sent))
        local = jax.device_put(np.array([row], np.float32), self._mine)
        shape = (self._split.mesh.size, len(row))
        self._sent = self._together(jax.make_array_from_single_device_arrays(shape, self._split, [local]))
        return before
