"""Fused attention of a mesh's devices: splash on TPUs, cuDNN on NVIDIA's GPUs.

JAX calls AMD's GPUs `gpu`, too, and they have no cuDNN. Some chips are too old for their platform's
kernel. On a GPU of this machine cuDNN must compile a small attention before it is chosen: it is
missing from some installations, and some of its versions have no kernel for a GPU.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from spmd.chips import chip_of
from spmd.sharding.mesh import AnyMesh, platform_of

FUSED = {"tpu": "splash", "cuda": "cudnn"}
"""Platform → its fused kernel."""

_PROBE = (1, 128, 1, 64)  # batch, sequence, heads, dim


@dataclasses.dataclass(frozen=True)
class FusedKernel:
    """Fused attention kernel of some devices.

    Attributes:
        name: Empty if there is none.
        failure: Why a kernel that the devices should have cannot be used; empty without one.
    """

    name: str = ""
    failure: str = ""


NO_FUSED_KERNEL = FusedKernel()


def find_fused_kernel(mesh: AnyMesh | None) -> FusedKernel:
    """Return the fused kernel of a mesh's devices; none for an abstract mesh."""
    if not isinstance(mesh, Mesh):
        return NO_FUSED_KERNEL
    device = mesh.devices.flat[0]
    platform = platform_of(device)
    if platform == "rocm":
        return FusedKernel(failure="cudnn: these GPUs are of AMD")
    name = FUSED.get(platform, "")
    chip = chip_of(device.device_kind)
    failure = ""
    if name and not chip.fused_attention:
        failure = f"{chip.kind} does not support it"
    elif name == "cudnn":
        failure = _cudnn_failure(mesh)
    if failure:
        return FusedKernel(failure=f"{name}: {failure}")
    return FusedKernel(name)


def _cudnn_failure(mesh: Mesh) -> str:
    """Return why cuDNN has no attention for a mesh's devices; empty if it has."""
    here = set(jax.local_devices())
    for device in mesh.devices.flat:
        if device in here:
            return _probe_failure(device)
    return ""  # an absent GPU


@functools.cache
def _probe_failure(device: Any) -> str:
    """Compile cuDNN's attention with its gradient; return the first line of an error, or empty."""
    sharding = SingleDeviceSharding(device)
    x = jax.ShapeDtypeStruct(_PROBE, jnp.bfloat16, sharding=sharding)
    try:
        jax.jit(jax.grad(_probe_loss)).lower(x).compile()
    except (RuntimeError, ValueError) as error:
        return str(error).partition("\n")[0]
    return ""


def _probe_loss(x: jax.Array) -> jax.Array:
    out = jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation="cudnn")
    return out.astype(jnp.float32).sum()
