"""Records of collectives: kinds, payloads and bytes on the wire.

**Payload** is the array of one execution on one device. **Bytes** are its traffic on the wire, of
one device:

| kind | payload | bytes |
|---|---|---|
| all-gather | the gathered result | payload |
| reduce-scatter | the input | payload |
| all-reduce | the operand | 2 × payload: a reduce-scatter and an all-gather of it |
| all-to-all, collective-permute, collective-broadcast | the operand | payload |
| ragged-all-to-all | the operand | payload: an upper bound |

These are the figures of the ZeRO paper (arXiv:1910.02054, section 7). Of a group of n devices each
sends (n − 1)/n of them, except for permutes; the factor is not counted anywhere, so that figures do
not depend on the number of devices.
"""

import dataclasses

MIN_BYTES = 1024
"""Payloads below it are ignored: the loss and other scalars."""

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclasses.dataclass(frozen=True)
class Cause:
    """Decision behind a collective: a rule, an annotation, … (`spmd.analysis.causes`).

    Attributes:
        kind: `"rule"` of a parameter, `"annotate"` of an activation, `"layer"` with a collective of
            its own, `"sum"` over a dimension that is split, `"step"` for the optimizer and metrics,
            or `"none"`: the compiler's choice.
        param: The parameter or variable of a rule.
        use: Purpose of its transfer: `"used whole"`, `"gradient"`, `"new value"` or `"sum of
            products"`.
        text: Such as `rule 'mlp/(gate|up)_proj/kernel' → P(fsdp, tensor): used whole, ZeRO 3`.
    """

    kind: str
    text: str
    param: str = ""
    use: str = ""

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One array moved by a collective instruction.

    An instruction that combines several arrays has several records.

    Attributes:
        axes: Mesh axes, in the mesh's order; None if the groups are neither a product of axes nor a
            part of one.
        is_counted: False in a loop of unknown length, which is counted once.
        is_conditional: In a branch of unknown share, which is counted as always taken.
        hlo_form: The form in the program, if it differs from `kind`: `"f32 all-reduce"`.
        equivalent_kind: Collective that an all-reduce expresses: `"reduce-scatter"` where each
            device keeps only its own part, `"all-gather"` where each adds its own part to zeros;
            else empty.
        dtype: Element type as XLA names it: `"bf16"`, `"s8"`.
        cross_slice_count: Payloads that one run sends over the slow network into the slice with the
            most.
        operand: Element type and dimensions of the operand on one device.
        array: Path of the argument of the step that is moved itself, or as its gradient or new
            value, such as `params/layers/mlp/up_proj/kernel`; empty if unknown.
        factor: The parameter whose products are summed, if known.
        source: `file:line`, the innermost line outside of libraries and of the wrappers of this
            package.
        crosses: Whether a group has devices in several slices, so that the slow network is used.
        is_overlapped: Whether it is asynchronous, and something is computed between its start and
            its end.
        overlapped_cycles: Cycles of this computation in one execution, by a TPU compiler's estimate
            (`spmd.analysis.overlap`).
        cause: None if the audit has no plan.
    """

    kind: str
    axes: tuple[str, ...] | None
    payload: int
    executions: int = 0
    is_counted: bool = True
    is_conditional: bool = False
    hlo_form: str
    equivalent_kind: str
    cross_slice_count: int
    dtype: str
    operand: str
    array: str
    factor: str = ""
    op_name: str
    source: str
    instruction: str
    groups: str
    crosses: bool
    is_overlapped: bool
    overlapped_cycles: int
    cause: Cause | None = None

    @property
    def bytes(self) -> int:
        """Bytes sent by one device per step."""
        sent = self.payload * self.executions
        if self.kind == "all-reduce":
            return 2 * sent
        return sent

    @property
    def slice_bytes(self) -> int:
        """Bytes per step from other slices to all devices of one slice together."""
        return self.bytes * self.cross_slice_count

    @property
    def over(self) -> str:
        """Axes as text, `data+fsdp`."""
        if self.axes is None:
            return "no product of axes"
        return "+".join(self.axes)
