"""Gather rows of numbers from all processes without waiting for busy devices."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


class AsyncGather:
    """Asynchronous all-gather of a row of numbers; each call returns the rows of the call before.

    The program is dispatched after the steps, and its result is read a call later. (The functions
    of `spmd.distributed.hosts` block.) Every process makes every call.
    """

    def __init__(self) -> None:
        # All devices take part, as in a step: XLA:CPU orders programs of several local devices
        # among each other, but a program of a single device can run at the same time, and Gloo then
        # mixes up their messages.
        devices = sorted(jax.devices(), key=lambda device: device.process_index)
        owners = [device.process_index for device in devices]
        mesh = Mesh(np.array(devices), "device")
        self._first = np.unique(owners, return_index=True)[1]  # of the devices of each process
        self._local_devices = jax.local_devices()
        self._sharded = NamedSharding(mesh, P("device"))
        self._all_gather = jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, P()))
        self._sent: jax.Array | None = None

    def gather(self, row: Sequence[float]) -> np.ndarray | None:
        """Send this process's row; return the rows of the call before, or None.

        Rows are float32 `[processes, numbers]`.
        """
        before = None
        if self._sent is not None:
            rows = np.asarray(jax.device_get(self._sent))  # [device, number]
            before = rows[self._first]
        own = np.array([row], np.float32)
        copies = [own] * len(self._local_devices)
        with jax.transfer_guard("allow"):  # the training loop disallows transfers
            local = jax.device_put(copies, self._local_devices)
            shape = (self._sharded.mesh.size, len(row))
            rows_of_all = jax.make_array_from_single_device_arrays(shape, self._sharded, local)
            self._sent = self._all_gather(rows_of_all)
        return before
