"""Which kernel computes attention, and how a sequence that is split over devices attends to itself.

| kernel | what it is | where |
|---|---|---|
| `xla` | `jax.nn.dot_product_attention`, some queries at a time; keeps all scores for the backward pass | everywhere |
| `chunked` | softmax taken online over chunks of keys; keeps one number for each query and head | everywhere |
| `cudnn` | cuDNN's fused attention | NVIDIA GPUs, 16-bit floats |
| `splash` | JAX's splash attention for TPUs | TPUs, sequences in blocks of 128 |

With mesh axis `sequence` of more than 1, `context` says which of two forms is taken: `ring` (keys and values travel
around the devices; it has a kernel of its own, `chunked`) or `all-to-all` (heads are exchanged for tokens; any kernel).
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from spmd.errors import ConfigError, Problem, did_you_mean
from spmd.sharding.mesh import AnyMesh

KERNELS = {"xla": "", "chunked": "", "cudnn": "gpu", "splash": "tpu"}
"""Kernel → the platform it needs, if any."""

CONTEXTS = ("ring", "all-to-all")
"""What a sequence that is split over devices does."""

CHUNKED_FROM = 2048
"""Tokens from which the scores that `xla` keeps for the backward pass are not worth their memory."""

SPLASH_BLOCK = 128
"""A sequence that splash attention takes is a multiple of this."""

_CUDNN_HEAD_DIM = 128


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """How attention is computed under a plan, or outside of any; made by `make_attention_config`.

    Attributes:
        mesh: The plan's mesh; None outside of a plan.
        kernel: `"auto"` or one of `KERNELS`.
        context: One of `CONTEXTS`.
    """

    mesh: AnyMesh | None = None
    kernel: str = "auto"
    context: str = "ring"

    @property
    def sequence(self) -> int:
        """Over how many devices a sequence is split."""
        return 1 if self.mesh is None else self.mesh.shape["sequence"]

    @property
    def tensor(self) -> int:
        """Over how many devices heads are split."""
        return 1 if self.mesh is None else self.mesh.shape["tensor"]

    @property
    def is_ring(self) -> bool:
        """Whether keys and values travel."""
        return self.sequence > 1 and self.context == "ring"

    @property
    def platform(self) -> str:
        """`"cpu"`, `"gpu"` or `"tpu"`; empty where no devices are known."""
        return self.mesh.devices.flat[0].platform if isinstance(self.mesh, Mesh) else ""

    def choose(
        self, seq: int, head_dim: int, dtype: Any, *, packed: bool, capped: bool = False, causal: bool = True
    ) -> str:
        """The kernel for one call.

        Args:
            seq: Tokens that are attended to on one device.
            head_dim: Width of a head.
            dtype: That of queries, keys and values.
            packed: Whether several documents share a sequence.
            capped: Whether scores have a soft cap.
            causal: Whether tokens see only those before them.

        Raises:
            ConfigError: The kernel that the plan names, or that of a ring, cannot do it.

        Example:
            >>> [Attention().choose(seq, 64, "float32", packed=False) for seq in (1024, 8192)]
            ['xla', 'chunked']
        """
        kernel = "chunked" if self.is_ring else self.kernel
        if kernel == "auto":
            fused = {"tpu": "splash", "gpu": "cudnn"}.get(self.platform)
            if fused and not _unfit(fused, seq, head_dim, dtype, packed, capped, causal):
                return fused
            return "xla" if seq < CHUNKED_FROM or not causal else "chunked"
        problems = _unfit(kernel, seq, head_dim, dtype, packed, capped, causal)
        if problems and self.is_ring:
            what = "is a ring, whose kernel sees only tokens before each one"
            problems = [Problem("context", what, fix='"all-to-all", or mesh.sequence of 1')]
        if problems:
            raise ConfigError("This attention cannot be computed:", problems)
        return kernel

    def __str__(self) -> str:
        """What is chosen, as in the plan's heading."""
        if self.is_ring:
            return "chunked   context ring"
        context = f"   context {self.context}" if self.sequence > 1 else ""
        if self.kernel != "auto":
            return self.kernel + context
        anywhere = f"xla, chunked from {CHUNKED_FROM}"
        fused = {"tpu": "splash or ", "gpu": "cudnn or "}.get(self.platform, "")
        return fused + anywhere + context


def make_attention_config(mesh: AnyMesh, kernel: str, context: str) -> AttentionConfig:
    """The choice, checked against the mesh.

    Raises:
        ConfigError: An unknown name; a kernel that the mesh's devices do not have, or that a ring does not take.

    Example:
        >>> from spmd.sharding.mesh import MeshShape, abstract_mesh
        >>> print(make_attention(abstract_mesh(MeshShape(sequence=4)), "xla", "all-to-all"))
        xla   context all-to-all
    """
    made = AttentionConfig(mesh, kernel, context)
    problems = attention_problems(kernel, context)
    needed = KERNELS.get(kernel, "")
    if needed and made.platform not in ("", needed):
        what = f"{kernel} needs a {needed.upper()}, and the mesh is of {made.platform} devices"
        problems.append(Problem("attention", what, fix='"auto" takes what the devices have'))
    if made.is_ring and kernel in KERNELS and kernel != "chunked":
        what = f"is {kernel}, and a ring has a kernel of its own, chunked"
        problems.append(Problem("attention", what, fix='attention "auto", or context "all-to-all"'))
    if problems:
        raise ConfigError("Attention cannot be computed so:", problems)
    return made


def attention_problems(kernel: str, context: str) -> list[Problem]:
    """What is wrong with the two names, whatever the mesh."""
    return [
        Problem(field, f"is {name!r}", fix=did_you_mean(name, names))
        for field, name, names in (("attention", kernel, ("auto", *KERNELS)), ("context", context, CONTEXTS))
        if name not in names
    ]


def _unfit(kernel: str, seq: int, head_dim: int, dtype: Any, packed: bool, capped: bool, causal: bool) -> list[Problem]:
    problems = []
    other = 'attention "auto", "xla" or "chunked"' if causal else 'attention "auto" or "xla"'
    if kernel == "chunked" and not causal:
        problems.append(Problem("attention chunked", "lets tokens see only those before them", fix=other))
    if kernel == "splash" and seq % SPLASH_BLOCK:
        arithmetic = f"{seq} / {SPLASH_BLOCK} = {seq / SPLASH_BLOCK:.4g}"
        problems.append(Problem("attention splash", "takes sequences in whole blocks", arithmetic, other))
    if kernel == "cudnn":
        if jnp.dtype(dtype).itemsize != 2:
            problems.append(Problem("attention cudnn", f"takes 16-bit floats, not {jnp.dtype(dtype)}", fix=other))
        if head_dim % 8 or head_dim > _CUDNN_HEAD_DIM:
            what = f"takes heads of 8, 16, … {_CUDNN_HEAD_DIM}"
            problems.append(Problem("attention cudnn", what, f"head_dim = {head_dim}", other))
        if packed:
            problems.append(Problem("attention cudnn", "does not know packed documents here", fix=other))
        if capped:
            problems.append(Problem("attention cudnn", "has no soft cap of scores", fix=other))
    return problems
