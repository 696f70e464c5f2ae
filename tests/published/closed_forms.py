"""The published formulas of what training a transformer holds, for a model of which only the size is known.

The ledger of `spmd.analysis.memory` knows better where there is a model to trace. These are for a first thought, and
for comparing with what others print: 16, 18 or 20 bytes for each parameter are the same formula with other dtypes.
"""

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class ModelStates:
    """Bytes on each device, by what they are.

    Attributes:
        params: Parameters, and those of the largest layer with their gradients while they are whole.
        grads: Gradients.
        accumulation: Gradients added up in a wider dtype.
        master: Master weights.
        moments: The optimizer's moments.
    """

    params: float
    grads: float
    accumulation: float
    master: float
    moments: float

    @property
    def total(self) -> float:
        """All of them."""
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
    """What each device holds of a model's parameters, gradients and optimizer state.

    As in ZeRO (Rajbhandari et al., arXiv:1910.02054): stage 1 divides the optimizer's state by the data-parallel
    degree, stage 2 the gradients too, stage 3 the parameters too. Gradients accumulated in a wider dtype lie with the
    optimizer's state. The defaults are ZeRO's 16 bytes for each parameter; with float32 gradients Megatron's 18;
    with a float32 accumulation besides bfloat16 gradients SageMaker's and nanotron's 20.

    Args:
        params: Parameters of one model-parallel part.
        dp: Data-parallel degree.
        stage: ZeRO stage, 0 to 3.
        dtype: Of the parameters.
        gradients: Their dtype; None leaves them out.
        accumulation: The dtype in which gradients are added up, where that is another copy.
        master: The dtype of master weights, where there are some besides the parameters.
        moments: The dtype of each moment.
        largest_layer: Parameters of the largest layer; at stage 3 they and as many gradients are whole while it runs.
        offload: What is in host memory: `"optimizer_state"` (with the gradients, as in DeepSpeed), `"params"`.

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

    whole = 2 * largest_layer * jnp.dtype(dtype).itemsize if stage >= 3 else 0.0
    return ModelStates(
        params=part(dtype, 3, "params") + whole,
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
    """What one GPT layer in half precision saves for the backward pass on each device.

    As in Korthikanti et al., arXiv:2205.05198, table 2: 34 bytes for each token and unit of width, of which 24 are
    split by tensor parallelism and all by sequence parallelism as well, and 5 for each attention score.

    Args:
        sequence: Tokens of an example.
        batch: Examples of a microbatch.
        width: Of the residual stream.
        heads: Attention heads.
        tensor: Tensor-parallel degree.
        sequence_parallel: Whether norms and dropout are split over the sequence by the same degree.
        recompute: `"none"`, `"selective"` (attention's scores) or `"full"` (all but the layer's input).
        mlp: The hidden width of the MLP, relative to `width`.

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
    """Bytes that each device sends over `pipe` in one step, by what they are.

    Attributes:
        streams: Activations to the stage behind and their gradients to the stage before.
        layers: Layers on their way to the stage that computes them, and their gradients back.
        shared: Gradients of what every stage has, summed.
    """

    streams: float
    layers: float
    shared: float

    @property
    def permuted(self) -> float:
        """What goes from one stage to another."""
        return self.streams + self.layers


def pipeline_traffic(
    ticks: int, stream: float, *, layers: float = 0, gradients: float = 0, shared: float = 0, chunks: int = 1
) -> PipelineTraffic:
    """What a pipeline sends between its stages (`spmd.pipeline.grad_fn`).

    In every tick a stage sends one microbatch on and one gradient back, as point-to-point pipelines do (Narayanan et
    al., arXiv:2104.04473, section 3.2: `b s h` elements each); idle stages send along, so ticks count, not
    microbatches. 1F1B takes `m + 2 (p − 1)` of them. Layers travel once where stages have several chunks.

    Args:
        ticks: Of the schedule in step.
        stream: Bytes of one microbatch between two layers, on one device.
        layers: Bytes of a stage's layers as they are used, on one device.
        gradients: Bytes of their gradients.
        shared: Bytes of the gradients of all other parameters, as they are summed.
        chunks: Groups of layers of each stage.

    Example:
        >>> pipeline_traffic(4 + 2 * (4 - 1), 2**20).permuted / 2**20
        20.0
    """
    moved = layers + gradients if chunks > 1 else 0.0
    return PipelineTraffic(streams=2.0 * ticks * stream, layers=moved, shared=shared)
