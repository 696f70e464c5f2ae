"""Published formulas of the memory and the traffic of transformer training, from a model's sizes.

16, 18 or 20 bytes for each parameter are the same formula with other dtypes.
"""

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class ModelStates:
    """Bytes on each device.

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
        return params * jnp.dtype(dtype).itemsize / (dp if stage >= divided_from else 1)

    gathered = 2 * largest_layer * jnp.dtype(dtype).itemsize if stage >= 3 else 0.0
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
    """Return the bytes that one GPT layer in half precision saves for the backward pass on each device.

    As in Korthikanti et al., arXiv:2205.05198, table 2: 34 bytes for each token and unit of width,
    of which 24 are split by tensor parallelism and all by sequence parallelism as well, and 5 for
    each attention score. `recompute` is `"none"`, `"selective"` (attention scores) or `"full"`
    (everything but the layer's input); `mlp` is the MLP's hidden width relative to `width`.

    Example:
        >>> activation_bytes(2048, 1, 12288, 96, recompute="full") == 2 * 2048 * 12288
        True
    """
    units = sequence * batch * width
    if recompute == "full":
        return 2.0 * units
    outside = 10 / (tensor if sequence_parallel else 1)
    inside = (8 + 4 * mlp) / tensor
    scores = 0.0 if recompute == "selective" else 5 * heads * sequence / width / tensor
    return units * (outside + inside + scores)


@dataclasses.dataclass(frozen=True)
class PipelineTraffic:
    """Bytes that each device sends over `pipe` in one step.

    Attributes:
        streams: Activations to the next stage and their gradients to the previous one.
        layers: Layers to the stage that computes them, and their gradients back.
        shared: Summed gradients of the parameters that every stage stores whole.
        gathered: Parameters that all stages use and each stores in part.
        scattered: Their gradients.
    """

    streams: float
    layers: float
    shared: float
    gathered: float
    scattered: float

    @property
    def permuted(self) -> float:
        """Bytes from stage to stage."""
        return self.streams + self.layers


def pipeline_traffic(
    ticks: int,
    stream: float,
    *,
    layers: float = 0,
    gradients: float = 0,
    shared: float = 0,
    stored: float = 0,
    chunks: int = 1,
) -> PipelineTraffic:
    """Return the traffic between the stages of a pipeline (`spmd.pipeline.grad_fn`).

    In every tick a stage sends one microbatch and one gradient, as point-to-point pipelines do
    (Narayanan et al., arXiv:2104.04473, section 3.2: `b s h` elements each); idle stages send too,
    so ticks count, not microbatches. 1F1B takes `m + 2 (p − 1)` ticks. Layers are sent once if
    stages have several chunks.

    Args:
        ticks: Ticks of the schedule.
        stream: Bytes of one microbatch between two layers, on one device.
        layers: Bytes of a stage's layers as they are used, on one device.
        gradients: Bytes of their gradients.
        shared: Bytes of the summed gradients of parameters that every stage stores whole.
        stored: Bytes of parameters that all stages use and each stores in part, as they are used.
        chunks: Groups of layers of each stage.

    Example:
        >>> pipeline_traffic(4 + 2 * (4 - 1), 2**20).permuted / 2**20
        20.0
    """
    moved = layers + gradients if chunks > 1 else 0.0
    streams = 2.0 * ticks * stream
    return PipelineTraffic(streams, layers=moved, shared=shared, gathered=stored, scattered=stored)
