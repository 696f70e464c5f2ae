"""The attention kernel, and the algorithm of attention over a split sequence.

| kernel | description | availability |
|---|---|---|
| `xla` | `jax.nn.dot_product_attention` over blocks of queries; saves all scores | everywhere |
| `chunked` | online softmax over chunks of keys; saves a number per query and head | everywhere |
| `cudnn` | cuDNN's fused attention | NVIDIA GPUs from A100 on, 16-bit floats |
| `splash` | JAX's splash attention | TPUs, sequences in blocks of 128 |

Kernels save arrays for the backward pass. With a mesh axis `sequence` above 1, `context` is `ring`
(keys and values rotate around the devices; always `chunked`) or `all-to-all` (Ulysses: heads are
exchanged for tokens; any kernel).
"""

import dataclasses
from typing import Any, Literal, get_args

import jax.numpy as jnp
from jax.sharding import Mesh

from spmd.errors import ConfigError, Problem, did_you_mean
from spmd.model_interface.fused_attention import NO_FUSED_KERNEL, FusedKernel, find_fused_kernel
from spmd.sharding.mesh import AnyMesh, platform_of

Kernel = Literal["xla", "chunked", "cudnn", "splash"]

KernelChoice = Literal["auto", Kernel]

KERNELS: dict[str, str] = {
    **dict.fromkeys(get_args(Kernel), ""),
    "cudnn": "cuda",
    "splash": "tpu",
}
"""Kernel → the platform it needs, if any."""

ContextChoice = Literal["ring", "all-to-all"]

CONTEXTS = get_args(ContextChoice)
"""Algorithms for a sequence that is split over devices."""

CHUNKED_FROM = 2048
"""Sequence length from which `"auto"` takes `chunked`: the scores that `xla` saves would take too
much memory."""

SPLASH_BLOCK = 128
"""Splash attention takes sequences of a multiple of this."""

_CUDNN_HEAD_DIM = 128
_DEVICES = {"cuda": "an NVIDIA GPU", "tpu": "a TPU"}


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """The attention settings of a plan, made by `make_attention_config`.

    Without a mesh, they are the settings outside a plan.

    Attributes:
        fused: Fused kernel of the mesh's devices.
    """

    mesh: AnyMesh | None = None
    kernel: str = "auto"
    context: str = "ring"
    fused: FusedKernel = NO_FUSED_KERNEL

    @property
    def sequence(self) -> int:
        """Number of shards of a sequence."""
        if self.mesh is None:
            return 1
        return self.mesh.shape["sequence"]

    @property
    def tensor(self) -> int:
        """Number of shards of the heads."""
        if self.mesh is None:
            return 1
        return self.mesh.shape["tensor"]

    @property
    def is_ring(self) -> bool:
        """True for ring attention."""
        return self.sequence > 1 and self.context == "ring"

    @property
    def platform(self) -> str:
        """`"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`; empty for an abstract mesh."""
        if not isinstance(self.mesh, Mesh):
            return ""
        return platform_of(self.mesh.devices.flat[0])

    def choose(
        self,
        seq: int,
        head_dim: int,
        dtype: Any,
        *,
        packed: bool,
        capped: bool = False,
        causal: bool = True,
    ) -> str:
        """Choose the kernel for one call.

        Args:
            seq: Number of keys on one device.
            packed: Several documents share a sequence.
            capped: Scores have a soft cap.

        Raises:
            ConfigError: The plan's kernel, or that of a ring, does not support the call.

        Example:
            >>> [AttentionConfig().choose(seq, 64, "float32", packed=False) for seq in (1024, 8192)]
            ['xla', 'chunked']
        """
        kernel = "chunked" if self.is_ring else self.kernel
        if kernel == "auto":
            return self._fastest(seq, head_dim, dtype, packed=packed, capped=capped, causal=causal)
        problems = _unsupported(kernel, seq, head_dim, dtype, packed, capped, causal)
        if problems and self.is_ring:
            what = "is a ring, whose kernel is causal"
            problems = [Problem("context", what, fix='"all-to-all", or mesh.sequence of 1')]
        if problems:
            raise ConfigError("The attention kernel does not support this call:", problems)
        return kernel

    def _fastest(
        self, seq: int, head_dim: int, dtype: Any, *, packed: bool, capped: bool, causal: bool
    ) -> str:
        """Choose the kernel of `"auto"` for one call."""
        fused = self.fused.name
        if fused and not _unsupported(fused, seq, head_dim, dtype, packed, capped, causal):
            return fused
        if seq < CHUNKED_FROM or not causal:
            return "xla"
        return "chunked"

    def __str__(self) -> str:
        if self.is_ring:
            return "chunked   context ring"
        kernel = self.kernel
        if kernel == "auto":
            kernel = f"xla, chunked from {CHUNKED_FROM}"
            if self.fused.name:
                kernel = f"{self.fused.name} or {kernel}"
            if self.fused.failure:
                kernel += f" (without {self.fused.failure})"
        if self.sequence > 1:
            return f"{kernel}   context {self.context}"
        return kernel


def make_attention_config(mesh: AnyMesh, kernel: str, context: str) -> AttentionConfig:
    """Return the settings, checked against the mesh.

    On a mesh that splits no sequence `context` has no effect, and is no error: the same config is
    used on other meshes, such as one device in a comparison or an evaluation.

    Example:
        >>> from spmd.sharding.mesh import MeshShape, abstract_mesh
        >>> print(make_attention_config(abstract_mesh(MeshShape(sequence=4)), "xla", "all-to-all"))
        xla   context all-to-all
    """
    fused = NO_FUSED_KERNEL
    if kernel in ("auto", "cudnn", "splash"):
        fused = find_fused_kernel(mesh)
    config = AttentionConfig(mesh, kernel, context, fused)
    problems = attention_problems(kernel, context)
    needed = KERNELS.get(kernel, "")
    if needed and config.platform not in ("", needed):
        what = f"{kernel} needs {_DEVICES[needed]}, and the mesh is of {config.platform} devices"
        problems.append(Problem("attention", what, fix='"auto"'))
    elif needed and fused.failure:
        what = f"is {kernel}, which does not compile for these devices"
        problems.append(Problem("attention", what, fused.failure, '"auto"'))
    if config.is_ring and kernel in KERNELS and kernel != "chunked":
        what = f"is {kernel}, and a ring needs chunked"
        problems.append(Problem("attention", what, fix='attention "auto", or context "all-to-all"'))
    if problems:
        raise ConfigError("Unsupported attention settings:", problems)
    return config


def attention_problems(kernel: str, context: str) -> list[Problem]:
    """Return the problems of the two names alone."""
    problems = []
    kernels = get_args(KernelChoice)
    if kernel not in kernels:
        problems.append(Problem("attention", f"is {kernel!r}", fix=did_you_mean(kernel, kernels)))
    if context not in CONTEXTS:
        problems.append(Problem("context", f"is {context!r}", fix=did_you_mean(context, CONTEXTS)))
    return problems


def _unsupported(
    kernel: str, seq: int, head_dim: int, dtype: Any, packed: bool, capped: bool, causal: bool
) -> list[Problem]:
    """Return the problems of a kernel with one call."""
    dtype = jnp.dtype(dtype)
    limits = []
    if kernel == "chunked" and not causal:
        limits.append(("is causal", ""))
    if kernel == "splash" and seq % SPLASH_BLOCK:
        detail = f"{seq} / {SPLASH_BLOCK} = {seq / SPLASH_BLOCK:.4g}"
        limits.append(("takes sequences in whole blocks", detail))
    if kernel == "cudnn":
        limits += _cudnn_limits(head_dim, dtype, packed=packed, capped=capped)
    fix = 'attention "auto", "xla" or "chunked"'
    if not causal:
        fix = 'attention "auto" or "xla"'
    return [Problem(f"attention {kernel}", what, detail, fix) for what, detail in limits]


def _cudnn_limits(
    head_dim: int, dtype: jnp.dtype, *, packed: bool, capped: bool
) -> list[tuple[str, str]]:
    """Return the reasons why cuDNN does not support a call, each with a detail."""
    limits = []
    if dtype.itemsize != 2:
        limits.append((f"takes 16-bit floats, not {dtype}", ""))
    if head_dim % 8 or head_dim > _CUDNN_HEAD_DIM:
        limits.append((f"takes heads of 8, 16, … {_CUDNN_HEAD_DIM}", f"head_dim = {head_dim}"))
    if packed:
        limits.append(("does not support packed documents here", ""))
    if capped:
        limits.append(("does not support a soft cap of scores", ""))
    return limits
