"""What a remat policy saves and what it costs: bytes kept for the backward pass, against matmuls done a second time.

`compare_remat` compiles the step under several plans; its rows print as one table. Nothing is allocated and nothing
runs, so the mesh may be of devices that are not here.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax

from spmd import tree
from spmd.analysis.hlo import HloModule, Instruction, parse, trip_count
from spmd.gradients.losses import LossFn
from spmd.model_api.model import PRNG
from spmd.plan.annotate import REMAT_MARK
from spmd.plan.context import use_plan
from spmd.plan.plan import ShardingPlan
from spmd.sharding.mesh import batch_sharding
from spmd.train.step import make_train_step

_SAME_VALUES = ("copy", "device_put", "reduce_precision", "sharding_constraint")
_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")


@dataclasses.dataclass(frozen=True)
class Saved:
    """One array that the forward pass keeps for the backward pass.

    Attributes:
        name: What the model marks it as; empty for what it does not mark.
        shape: Its global shape; of stacked layers, all of them.
        dtype: Its dtype's name.
        bytes_per_device: The bytes of one device's part.
        on_host: Whether it is kept in host memory.
        of_batch: Whether it follows from the batch: an activation. What does not is a parameter as it is used, cast or
            gathered.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes_per_device: int
    on_host: bool
    of_batch: bool


@dataclasses.dataclass(frozen=True)
class Recompute:
    """One policy, as compiled: bytes and FLOPs of one device and one step; None is what the compiler does not report.

    Attributes:
        policy: The remat policy as text.
        activations: Bytes of activations kept on the device.
        offloaded: Bytes of activations kept in host memory.
        kernels: Bytes of parameters kept as they are used, cast or gathered.
        temporaries: Bytes of device memory that the step needs besides its arguments and results.
        host_temporaries: The same of host memory.
        flops: Floating-point operations of all matmuls, two for each multiplication and addition.
    """

    policy: str
    activations: int
    offloaded: int
    kernels: int
    temporaries: int | None
    host_temporaries: int | None
    flops: int | None


def compare_remat(plans: Iterable[ShardingPlan], loss_fn: LossFn, batch: Any) -> tuple[Recompute, ...]:
    """Compiles the step under each plan, and the forward pass by itself, which tells what is kept.

    Args:
        plans: From `make_plan`, with different `remat`.
        loss_fn: The loss function of the step.
        batch: Arrays or `jax.ShapeDtypeStruct`s.
    """
    rows = []
    for plan in plans:
        kept = saved_activations(plan, loss_fn, batch)
        compiled = make_train_step(plan, loss_fn).compile(batch)
        memory = compiled.memory_analysis()
        rows.append(
            Recompute(
                policy=str(plan.remat),
                activations=sum(s.bytes_per_device for s in kept if s.of_batch and not s.on_host),
                offloaded=sum(s.bytes_per_device for s in kept if s.of_batch and s.on_host),
                kernels=sum(s.bytes_per_device for s in kept if not s.of_batch),
                temporaries=memory and memory.temp_size_in_bytes,
                host_temporaries=memory and memory.host_temp_size_in_bytes,
                flops=matmul_flops(parse(text)) if (text := compiled.as_text()) else None,
            )
        )
    return tuple(rows)


def remat_table(rows: Sequence[Recompute]) -> str:
    """The rows as text; FLOPs are compared with those of the first.

    Example:
        >>> rows = [Recompute("none", 2048, 0, 512, 4096, 0, 100), Recompute("full", 64, 0, 0, None, 0, 130)]
        >>> print(remat_table(rows))
        policy  activations  on host  kernels   temporaries  host temporaries  FLOPs
        none          2 KiB      0 B    512 B         4 KiB               0 B  100 (1.000 ×)
        full           64 B      0 B      0 B  not reported               0 B  130 (1.300 ×)
    """
    unknown = "not reported"
    table: list[tuple[str, ...]] = [
        ("policy", "activations", "on host", "kernels", "temporaries", "host temporaries", "FLOPs")
    ]
    for row in rows:
        held = (row.activations, row.offloaded, row.kernels, row.temporaries, row.host_temporaries)
        times = f" ({row.flops / rows[0].flops:.3f} ×)" if row.flops and rows[0].flops else ""
        flops = unknown if row.flops is None else f"{row.flops:.4g}{times}"
        table.append((row.policy, *(unknown if n is None else tree.human_bytes(n) for n in held), flops))
    widths = [max(len(line[i]) for line in table) for i in range(6)]
    return "\n".join(
        "  ".join((line[0].ljust(widths[0]), *(line[i].rjust(widths[i]) for i in range(1, 6)), line[6]))
        for line in table
    )


def saved_activations(plan: ShardingPlan, loss_fn: LossFn, batch: Any) -> tuple[Saved, ...]:
    """Everything that the forward pass keeps for the backward pass, but for its arguments, which are there anyway.

    The forward pass is compiled with what it keeps as its results, so the compiler says how each is split.

    Args:
        plan: From `make_plan`.
        loss_fn: The loss function of the step.
        batch: Arrays or `jax.ShapeDtypeStruct`s.
    """

    def forward(params: Any, variables: Any, batch: Any, key: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            with use_plan(plan):
                return loss_fn(params, variables, batch, key)[0]["loss"]

        return jax.vjp(loss, params)[1]

    def place(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(plan.mesh, len(x.shape)))

    key = jax.eval_shape(lambda: jax.random.key(0, impl=PRNG))
    arguments = (plan.abstract_params, plan.abstract_variables, jax.tree.map(place, batch), key)
    traced = jax.jit(forward).trace(*arguments)
    shardings = jax.tree.leaves(traced.lower().compile().output_shardings)
    jaxpr = traced.jaxpr.jaxpr
    counts = [len(jax.tree.leaves(argument)) for argument in arguments]
    sources = (_PARAMETERS, _PARAMETERS, _BATCH, _BATCH)
    inputs = [_Label("", source) for n, source in zip(counts, sources, strict=True) for _ in range(n)]
    saved, seen = [], {id(variable) for variable in jaxpr.invars}
    for variable, label, sharding in zip(jaxpr.outvars, _labels(jaxpr, inputs), shardings, strict=True):
        aval = variable.aval
        if label.source == _CONSTANT or id(variable) in seen:
            continue
        seen.add(id(variable))
        part = math.prod(sharding.shard_shape(aval.shape)) * aval.dtype.itemsize
        on_host = sharding.memory_kind == "pinned_host" or "host" in str(getattr(aval, "memory_space", "")).lower()
        saved.append(Saved(label.name, aval.shape, str(aval.dtype), part, on_host, label.source == _BATCH))
    return tuple(sorted(saved, key=lambda s: (-s.bytes_per_device, s.name, s.shape, s.dtype)))


class _Label(NamedTuple):
    """What is known of a value in a jaxpr: its mark, and what it follows from: parameters or, also, the batch."""

    name: str
    source: int


_CONSTANT, _PARAMETERS, _BATCH = range(3)


def _labels(jaxpr: Any, inputs: Sequence[_Label]) -> list[_Label]:
    """The labels of a jaxpr's results, from those of its arguments."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    known: dict[Any, _Label] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> _Label:
        return _Label("", _CONSTANT) if hasattr(atom, "val") else known.get(atom, _Label("", _CONSTANT))

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        primitive, params = equation.primitive.name, equation.params
        body = next((params[key] for key in _BODIES if key in params), None)
        if primitive == "name":
            mark = operands[0].name if params["name"] == REMAT_MARK else params["name"]
            results = [_Label(mark, operands[0].source)]
        elif primitive in _SAME_VALUES:
            results = operands
        elif primitive == "scan":
            results = _scan_labels(equation, operands)
        elif body is not None and len(getattr(body, "jaxpr", body).invars) == len(operands):
            results = _labels(body, operands)
        else:
            results = [_Label("", max((label.source for label in operands), default=_CONSTANT))] * len(equation.outvars)
        known.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _scan_labels(scan: Any, operands: list[_Label]) -> list[_Label]:
    """The labels of a loop's results; what is carried is labelled anew until nothing changes."""
    body = scan.params["jaxpr"].jaxpr
    pairs = zip(scan.outvars, body.outvars, strict=True)
    carried = sum(len(outside.aval.shape) == len(inside.aval.shape) for outside, inside in pairs)
    pairs = zip(scan.invars, body.invars, strict=True)
    start = sum(len(outside.aval.shape) == len(inside.aval.shape) for outside, inside in pairs) - carried
    while True:
        results = _labels(body, operands)
        before = operands[start : start + carried]
        after = [
            _Label(a.name if a.name == b.name else "", max(a.source, b.source))
            for a, b in zip(before, results, strict=False)
        ]
        if before == after:
            return results
        operands = [*operands[:start], *after, *operands[start + carried :]]


def matmul_flops(program: HloModule) -> int | None:
    """Floating-point operations of all matmuls and convolutions of a compiled program, loops as often as they turn.

    Returns:
        Two for each multiplication with its addition; None where a matmul is a call into a library, or a loop's length
        is not known.

    Example:
        >>> hlo = "  %x = f32[2,3]{1,0} parameter(0)\\n  %y = f32[3,5]{1,0} parameter(1)\\n"
        >>> hlo += "  ROOT %z = f32[2,5]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}\\n"
        >>> matmul_flops(parse(f"HloModule m\\n\\nENTRY main {{\\n{hlo}}}\\n"))
        60
    """

    @functools.cache
    def of(name: str) -> int | None:
        total: int | None = 0
        for instruction in program.computations[name].instructions.values():
            operands = [program.computations[name].instructions.get(operand) for operand in instruction.operands]
            here: int | None = 0
            if instruction.opcode == "dot":
                here = _dot_flops(instruction, operands)
            elif instruction.opcode == "convolution":
                here = _convolution_flops(instruction, operands)
            elif instruction.opcode == "custom-call" and re.search(
                r'target="[^"]*(gemm|matmul)', instruction.attributes
            ):
                here = None
            elif instruction.opcode == "while":
                turns = trip_count(program, name, instruction)
                once = of(dict(instruction.callees())["body"])
                here = once if once in (0, None) else None if turns is None else turns * once
            elif not instruction.opcode.endswith(("-done", "-update")):
                inner = [of(callee) for _, callee in instruction.callees() if callee in program.computations]
                here = None if None in inner else sum(inner)  # type: ignore[arg-type]
            total = None if total is None or here is None else total + here
        return total

    return of(program.entry)


def _dot_flops(dot: Instruction, operands: Sequence[Instruction | None]) -> int:
    left = operands[0]
    assert left is not None
    summed = dot.attribute(r"lhs_contracting_dims=\{([\d,]*)\}")
    return 2 * dot.arrays[0].size * math.prod(left.arrays[0].dims[int(i)] for i in summed.split(",") if i)


def _convolution_flops(convolution: Instruction, operands: Sequence[Instruction | None]) -> int:
    """TPU compilers write matmuls as convolutions, with batch and further summed dimensions as windows."""
    left, right = operands
    assert left is not None
    assert right is not None
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes)
    assert labels is not None
    inputs, kernel, result = (
        dict(zip(letters, array.arrays[0].dims, strict=True))
        for letters, array in zip(labels.groups(), (left, right, convolution), strict=True)
    )
    window = {
        key: value.split("x")
        for key, value in re.findall(r"(\w+)=([\dx_-]+)", convolution.attribute(r"window=\{([^}]*)\}"))
    }
    flops = 2 * result["b"] * result["f"] * kernel["i"]
    for i in range(len(window.get("size", ()))):

        def setting(name: str, default: str, i: int = i) -> list[int]:
            return [int(n) for n in window.get(name, [default] * (i + 1))[i].split("_")]

        (size,), (stride,), (low, _) = setting("size", "1"), setting("stride", "1"), setting("pad", "0_0")
        (spread,), (gap,) = setting("rhs_dilate", "1"), setting("lhs_dilate", "1")
        # A product counts where the window lies on an element, not on padding or in a gap.
        starts = range(-low, -low + result[str(i)] * stride, stride)
        places = (start + step * spread for start in starts for step in range(size))
        flops *= sum(place % gap == 0 and 0 <= place // gap < inputs[str(i)] for place in places)
    return flops
