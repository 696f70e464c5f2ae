"""The attention kernel, and the algorithm of attention over a split sequence.

| kernel | description | availability |
|---|---|---|
| `xla` | `jax.nn.dot_product_attention` over blocks of queries; saves all scores | everywhere |
| `chunked` | online softmax over chunks of keys; saves a number per query and head | everywhere |
| `cudnn` | cuDNN's fused attention | NVIDIA GPUs from A100 on, 16-bit floats |
| `splash` | JAX's splash attention | TPUs, sequences in blocks of 128 |

Kernels save arrays for the backward pass. With a mesh axis `sequence` above 1, there are three
algorithms, `context`:

| context | what is sent | kernel |
|---|---|---|
| `gather` | keys and values, gathered on each device | `splash` |
| `ring` | keys and values, rotating around the devices | `chunked` |
| `all-to-all` | heads for tokens, and back (Ulysses); heads must divide | any |

`auto` follows the kernel: `gather` for `splash`, `ring` for `chunked`, and `all-to-all` for others.

Options of `spmd.layers.attention.attend`, in float32 and 16-bit floats unless a kernel has no
float32. A ring has those of `chunked`. `auto` never chooses a kernel without an option of the call.

| option | `xla` | `chunked` | `cudnn` | `splash` |
|---|---|---|---|---|
| `window` | yes | yes | yes | yes |
| `segments`, packed documents | yes | yes | no | yes |
| `soft_cap` | yes | yes | no | yes |
| `causal=False` | yes | no | yes | yes |
| `chunk` below the sequence length | yes | yes | no | yes |
| `sinks` | yes | yes | no | yes |
| values narrower than keys | yes | yes | yes, padded with zeros | yes |
| values wider than keys | yes | yes | no | yes |
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

ContextChoice = Literal["auto", "gather", "ring", "all-to-all"]

CONTEXTS = get_args(ContextChoice)
"""Algorithms for a sequence that is split over devices."""

_KERNEL_OF = {"gather": "splash", "ring": "chunked"}
"""Algorithm → its only kernel."""

CHUNKED_FROM = 2048
"""Sequence length from which `"auto"` takes `chunked`: the scores that `xla` saves would take too
much memory."""

SPLASH_BLOCK = 128
"""Splash attention takes sequences of a multiple of this."""

_CUDNN_HEAD_DIM = 128
_CUDNN_LACKS = {
    "packed": "packed documents",
    "capped": "a soft cap of scores",
    "chunks": "chunks of a sequence",
    "sinks": "sinks",
}
_DEVICES = {"cuda": "an NVIDIA GPU", "tpu": "a TPU"}


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """Properties of one call of `attend` that decide which kernels support it.

    Attributes:
        seq: Number of keys on one device.
        head_dim: Width of a head of queries and keys.
        value_dim: Width of a head of values; None for `head_dim`.
        packed: Several documents share a sequence.
        capped: Scores have a soft cap.
        chunks: The sequence has several chunks, and tokens attend within their own.
        sinks: Each softmax has a logit without a value.
        runs: Runs of consecutive tokens into which a sequence is split over devices.
    """

    seq: int
    head_dim: int
    dtype: Any
    value_dim: int | None = None
    packed: bool = False
    capped: bool = False
    causal: bool = True
    chunks: bool = False
    sinks: bool = False
    runs: int = 1


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """The attention settings of a plan, made by `make_attention_config`.

    Without a mesh, they are the settings outside a plan.

    Attributes:
        fused: Fused kernel of the mesh's devices.
    """

    mesh: AnyMesh | None = None
    kernel: str = "auto"
    context: str = "auto"
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
        """True if attention is over a ring, unless its kernel is splash."""
        return self.context_of(self._kernel) == "ring"

    @property
    def keeps_queries(self) -> bool:
        """True if each device attends from its own tokens."""
        return self.context_of(self._kernel) in _KERNEL_OF

    @property
    def _kernel(self) -> str:
        """Kernel of a call without unusual options, as far as the algorithm depends on it."""
        if self.kernel != "auto":
            return self.kernel
        return split_kernel(self.fused.name)

    def context_of(self, kernel: str) -> str:
        """Return the algorithm of a call with a kernel; empty if no sequence is split."""
        if self.sequence == 1:
            return ""
        if self.context != "auto":
            return self.context
        return context_for(kernel)

    @property
    def platform(self) -> str:
        """`"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`; empty for an abstract mesh."""
        if not isinstance(self.mesh, Mesh):
            return ""
        return platform_of(self.mesh.devices.flat[0])

    def choose(self, call: AttentionCall) -> str:
        """Choose the kernel for one call.

        Raises:
            ConfigError: The plan's kernel, or that of a ring, does not support the call.

        Example:
            >>> AttentionConfig().choose(AttentionCall(8192, 64, "float32"))
            'chunked'
        """
        kernel = self.kernel
        if self.sequence > 1:
            kernel = _KERNEL_OF.get(self.context, kernel)
        if kernel == "auto":
            return self._fastest(call)
        problems = _unsupported(kernel, call, self.context_of(kernel))
        if problems and self.context_of(kernel) == "ring":
            what = "is a ring, whose kernel is causal"
            problems = [Problem("context", what, fix='"all-to-all", or mesh.sequence of 1')]
        if problems:
            raise ConfigError("The attention kernel does not support this call:", problems)
        return kernel

    def _fastest(self, call: AttentionCall) -> str:
        """Choose the kernel of `"auto"` for one call."""
        fused = self.fused.name
        is_free = self.sequence > 1 and self.context == "auto"
        if is_free and split_kernel(fused) != fused:
            fused = ""
        if fused and not _unsupported(fused, call, self.context_of(fused)):
            return fused
        if is_free and call.causal:
            return "chunked"
        if call.seq < CHUNKED_FROM or not call.causal:
            return "xla"
        return "chunked"

    def __str__(self) -> str:
        kernel = self.kernel
        if self.sequence > 1:
            kernel = _KERNEL_OF.get(self.context_of(self._kernel), kernel)
        if kernel == "auto":
            kernel = f"xla, chunked from {CHUNKED_FROM}"
            if self.fused.name:
                kernel = f"{self.fused.name} or {kernel}"
            if self.fused.failure:
                kernel += f" (without {self.fused.failure})"
        if self.sequence == 1:
            return kernel
        text = f"{kernel}   context {self.context_of(self._kernel)}"
        if self.context == "auto" and self.kernel == "auto" and not self.platform:
            text += " (on TPUs: splash, gather)"  # a mesh without devices is of no platform
        return text


def split_kernel(fused: str) -> str:
    """Return the kernel of `auto` for a split sequence, by the fused kernel of the devices."""
    if fused == "splash":
        return fused
    return "chunked"  # cuDNN's would need heads that divide


def context_for(kernel: str) -> str:
    """Return the algorithm of `auto` for a kernel.

    Example:
        >>> [context_for(kernel) for kernel in ("splash", "chunked", "xla")]
        ['gather', 'ring', 'all-to-all']
    """
    for context, needed in _KERNEL_OF.items():
        if kernel == needed:
            return context
    return "all-to-all"


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
    if kernel in ("auto", "cudnn", "splash") or context == "gather":
        fused = find_fused_kernel(mesh)
    config = AttentionConfig(mesh, kernel, context, fused)
    problems = attention_problems(kernel, context)
    only = _KERNEL_OF.get(context, "") if config.sequence > 1 else ""
    needed = KERNELS.get(only or kernel, "")
    if needed and config.platform not in ("", needed):
        what = f"{only or kernel} needs {_DEVICES[needed]}, and the mesh is of {config.platform} devices"
        problems.append(Problem("attention", what, fix='"auto"'))
    elif needed and fused.failure:
        what = f"is {kernel}, which does not compile for these devices"
        problems.append(Problem("attention", what, fused.failure, '"auto"'))
    if only and kernel in KERNELS and kernel != only:
        what = f"is {kernel}, and context {context} needs {only}"
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


def _unsupported(kernel: str, call: AttentionCall, context: str) -> list[Problem]:
    """Return the problems of a kernel with one call."""
    limits = []
    block = SPLASH_BLOCK
    if context == "gather":
        block *= call.runs
    if kernel == "chunked" and not call.causal:
        limits.append(("is causal", ""))
    if kernel == "splash" and call.seq % block:
        detail = f"{call.seq} / {block} = {call.seq / block:.4g}"
        limits.append(("takes sequences in whole blocks", detail))
    if kernel == "cudnn":
        limits += _cudnn_limits(call)
    fix = 'attention "auto", "xla" or "chunked"'
    if not call.causal:
        fix = 'attention "auto" or "xla"'
    return [Problem(f"attention {kernel}", what, detail, fix) for what, detail in limits]


def _cudnn_limits(call: AttentionCall) -> list[tuple[str, str]]:
    """Return the reasons why cuDNN does not support a call, each with a detail."""
    limits = []
    dtype = jnp.dtype(call.dtype)
    width = call.head_dim
    if dtype.itemsize != 2:
        limits.append((f"takes 16-bit floats, not {dtype}", ""))
    if width % 8 or width > _CUDNN_HEAD_DIM:
        limits.append((f"takes heads of 8, 16, … {_CUDNN_HEAD_DIM}", f"head_dim = {width}"))
    if call.value_dim is not None and call.value_dim > width:
        detail = f"value_dim = {call.value_dim} > {width} = head_dim"
        limits.append(("takes values no wider than keys", detail))
    for option, name in _CUDNN_LACKS.items():
        if getattr(call, option):
            limits.append((f"does not support {name} here", ""))
    return limits
