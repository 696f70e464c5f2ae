"""Gather rows of numbers from all processes without waiting for busy devices."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


@dataclasses.dataclass(frozen=True)
class _Program:
    """All-gather over all devices; `first` are the numbers of the first of each process."""

    sharded: NamedSharding
    all_gather: Callable[[jax.Array], jax.Array]
    first: np.ndarray


@functools.cache
def _program(devices: tuple[jax.Device, ...]) -> _Program:
    """Return the program, compiled once however many objects gather."""
    # All devices take part, as in a step: XLA:CPU orders programs of several local devices among
    # each other, but a program of a single device can run at the same time, and Gloo then mixes up
    # their messages.
    ordered = sorted(devices, key=lambda device: device.process_index)
    owners = [device.process_index for device in ordered]
    mesh = Mesh(np.array(ordered), "device")
    all_gather = jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, P()))
    first = np.unique(owners, return_index=True)[1]
    return _Program(NamedSharding(mesh, P("device")), all_gather, first)


class AsyncGather:
    """Asynchronous all-gather of a row of numbers; each call returns the rows of the call before.

    The program is dispatched after the steps, and its result is read a call later. (The functions
    of `spmd.distributed.hosts` block.) Every process makes every call.
    """

    def __init__(self) -> None:
        self._program = _program(tuple(jax.devices()))
        self._sent: jax.Array | None = None

    def gather(self, row: Sequence[float]) -> np.ndarray | None:
        """Send this process's row; return the rows of the call before, or None.

        Rows are float32 `[processes, numbers]`.
        """
        program = self._program
        before = None
        if self._sent is not None:
            rows = np.asarray(jax.device_get(self._sent))  # [device, number]
            before = rows[program.first]
        own = np.array([row], np.float32)
        local_devices = jax.local_devices()
        copies = [own] * len(local_devices)
        with jax.transfer_guard("allow"):  # the training loop disallows transfers
            local = jax.device_put(copies, local_devices)
            shape = (program.sharded.mesh.size, len(row))
            rows_of_all = jax.make_array_from_single_device_arrays(shape, program.sharded, local)
            self._sent = program.all_gather(rows_of_all)
        return before
