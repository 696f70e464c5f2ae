"""Published formulas of the traffic between the stages of a pipeline."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class PipelineTraffic:
    """Bytes that each device sends over `pipe` in one step.

    Attributes:
        streams: Activations to the next stage and their gradients to the previous one.
        layers: Layers to the stage that computes them, and their gradients back.
        shared: Summed gradients of the parameters that every stage stores whole.
        head: Last activations to all stages, and their gradients back.
        gathered: Parameters that all stages use and each stores in part.
        scattered: Their gradients.
    """

    streams: float
    layers: float
    shared: float
    head: float
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
    heads: int = 0,
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
        heads: Microbatches whose stream goes to all stages, for their logits, and whose gradient comes back.
        chunks: Groups of layers of each stage.

    Example:
        >>> pipeline_traffic(4 + 2 * (4 - 1), 2**20).permuted / 2**20
        20.0
    """
    moved = layers + gradients if chunks > 1 else 0.0
    streams = 2.0 * ticks * stream
    return PipelineTraffic(
        streams,
        layers=moved,
        shared=shared,
        head=2.0 * heads * stream,
        gathered=stored,
        scattered=stored,
    )
