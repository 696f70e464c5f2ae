"""Which process the others wait for: a few numbers of each process, side by side, without waiting for them."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


class StepTimeExchange:
    """Exchanges a row of numbers between processes; what is sent in one call is returned by the next.

    So no call waits for a device that has other work: the row travels behind the steps that were dispatched before it.
    Every process makes every call.
    """

    def __init__(self) -> None:
        # All devices take part, as in a step: XLA:CPU orders programs of several local devices among each other, but
        # lets one of a single device run beside them, and Gloo then mixes up what goes between the same processes.
        devices = sorted(jax.devices(), key=lambda device: device.process_index)
        mesh = Mesh(np.array(devices), "device")
        self._first = np.unique([device.process_index for device in devices], return_index=True)[1]
        self._mine, self._split = jax.local_devices(), NamedSharding(mesh, P("device"))
        self._together = jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, P()))
        self._sent: jax.Array | None = None

    def exchange(self, row: Sequence[float]) -> np.ndarray | None:
        """The rows `[processes, numbers]` of the call before, in float32; None at the first call.

        Args:
            row: This process's numbers, as many at every call.
        """
        before = None if self._sent is None else np.asarray(jax.device_get(self._sent))[self._first]
        local = jax.device_put([np.array([row], np.float32)] * len(self._mine), self._mine)
        shape = (self._split.mesh.size, len(row))
        self._sent = self._together(jax.make_array_from_single_device_arrays(shape, self._split, local))
        return before
