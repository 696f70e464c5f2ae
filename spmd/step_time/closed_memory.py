"""Closed forms of the memory of transformer training, from a model's sizes: no model, no trace.

They are the published formulas, of other systems too. `spmd plan` estimates the memory of a step of
this package from its trace.
"""

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class ModelStates:
    """Bytes of parameters, gradients and optimizer state on each device.

    Attributes:
        params: Parameters, and the gathered parameters and gradients of the largest layer.
        accumulation: Gradients accumulated in a wider dtype.
    """

    params: float
    grads: float
    accumulation: float
    master: float
    moments: float

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return self.params + self.grads + self.accumulation + self.master + self.moments


def model_state_bytes(
    params: float,
    *,
    dp: int = 1,
    stage: int = 0,
    dtype: str = "bfloat16",
    gradients: str | None = "bfloat16",
    accumulation: str | None = None,
    master: str | None = "float32",
    moments: tuple[str, ...] = ("float32", "float32"),
    largest_layer: float = 0,
    offload: tuple[str, ...] = (),
) -> ModelStates:
    """Return the bytes of parameters, gradients and optimizer state on each device.

    As in ZeRO (Rajbhandari et al., arXiv:1910.02054): stage 1 divides the optimizer state by the
    data-parallel degree, stage 2 the gradients too, stage 3 the parameters too. Gradients
    accumulated in a wider dtype are divided like the optimizer state. The defaults are ZeRO's 16
    bytes for each parameter; with float32 gradients Megatron's 18; with a float32 accumulation
    besides bfloat16 gradients SageMaker's and nanotron's 20.

    Args:
        params: Number of parameters of one model-parallel part.
        dp: Data-parallel degree.
        stage: ZeRO stage, 0 to 3.
        dtype: Dtype of the parameters.
        gradients: Their dtype; None for no gradients.
        accumulation: Dtype in which gradients are accumulated, if that is another copy.
        master: Dtype of master weights, if any.
        moments: Dtype of each moment.
        largest_layer: Parameters of the largest layer; at stage 3 it is gathered, with its
            gradients, while it runs.
        offload: What is in host memory: `"optimizer_state"` (with the gradients, as in DeepSpeed),
            `"params"`.

    Example:
        >>> model_state_bytes(1e9).total / 1e9, model_state_bytes(1e9, gradients="float32").total / 1e9
        (16.0, 18.0)
        >>> model_state_bytes(7.5e9, dp=64, stage=2).total / 1e9
        16.640625
    """

    def part(dtype: str | None, divided_from: int, name: str) -> float:
        if dtype is None or name in offload:
            return 0.0
        whole = params * jnp.dtype(dtype).itemsize
        if stage < divided_from:
            return whole
        return whole / dp

    gathered = 0.0
    if stage >= 3:
        gathered = 2 * largest_layer * jnp.dtype(dtype).itemsize
    return ModelStates(
        params=part(dtype, 3, "params") + gathered,
        grads=part(gradients, 2, "optimizer_state"),
        accumulation=part(accumulation, 1, "optimizer_state"),
        master=part(master, 1, "optimizer_state"),
        moments=sum(part(moment, 1, "optimizer_state") for moment in moments),
    )


def activation_bytes(
    sequence: int,
    batch: int,
    width: int,
    heads: int,
    *,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    mlp: float = 4.0,
) -> float:
    """Return the bytes of one GPT layer's activations for the backward pass, in half precision, on each device.

    As in Korthikanti et al., arXiv:2205.05198, table 2: 34 bytes for each token and unit of width,
    of which 24 are split by tensor parallelism and all by sequence parallelism as well, and 5 for
    each attention score.

    Args:
        recompute: `"none"`, `"selective"` (attention scores) or `"full"` (everything but the
            layer's input).
        mlp: Hidden width of the MLP, relative to `width`.

    Example:
        >>> activation_bytes(2048, 1, 12288, 96, recompute="full") == 2 * 2048 * 12288
        True
    """
    units = sequence * batch * width
    if recompute == "full":
        return 2.0 * units
    outside = 10.0
    if sequence_parallel:
        outside /= tensor
    inside = (8 + 4 * mlp) / tensor
    scores = 0.0
    if recompute != "selective":
        scores = 5 * heads * sequence / width / tensor
    return units * (outside + inside + scores)
