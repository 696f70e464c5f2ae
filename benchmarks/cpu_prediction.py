"""Step times of the demo on this machine's simulated devices, predicted from a calibration, against measured ones.

    python -m benchmarks.cpu_prediction
    python -m benchmarks.cpu_prediction --mesh fsdp=8 --mesh data=4,tensor=2 --rounds 9

Small programs, none of them the demo's, give the rates of this machine with all simulated devices
at work. The compiled step of a mesh is counted (`count`), and its time is the sum of what it counts
over the rates (`predict`). Nothing is fitted to a measured step. Small programs and steps take
turns, so that other work on the machine slows both alike.

The exit code is 1 if the demo's own mesh is off by more than 20 % or Kendall's τ of the meshes is
below 0.7.
"""

import argparse
import collections
import dataclasses
import math
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from scipy.stats import kendalltau

import spmd
from benchmarks.cpu_rates import CLOCKS, DEVICES, Calibration, CpuRates, Seconds
from spmd.analysis.collective_record import KINDS
from spmd.analysis.executions import executions
from spmd.analysis.hlo import Computation, HloModule, HloValue, Instruction, parse
from spmd.analysis.replica_groups import kind_of, read_groups
from spmd.errors import ConfigError, Problem, SpmdError
from spmd.examples.demo import config as DEMO
from spmd.run.build import abstract_batch, make_setup
from spmd.run.preflight import check_microbatches
from spmd.sharding.mesh import MeshShape, mesh_of

MESHES = (
    "data=2,fsdp=2,tensor=2",
    "data=8",
    "data=4,fsdp=2",
    "data=2,fsdp=4",
    "fsdp=8",
    "data=4,tensor=2",
    *("fsdp=4,tensor=2", "data=1"),
)
"""The demo's own mesh first, then all others of `data`, `fsdp` and `tensor` on eight devices
that its six heads and two key heads divide over, and one device."""

OFF, TAU, CALIBRATION = 0.2, 0.7, 120.0
"""Largest relative error of the demo's mesh, least τ, and most seconds of the calibration."""

ARENA = 32 * 2**20
"""Largest temporary buffer in bytes that the C library keeps; a larger one is new memory in
every step."""

_AXES = ("data", "fsdp", "tensor")
_FREE = {
    "parameter",
    "constant",
    "get-tuple-element",
    "bitcast",
    "tuple",
    "partition-id",
    "while",
    "call",
}


@dataclasses.dataclass
class Work:
    """What one execution of a compiled program does.

    Attributes:
        flops: Of dots, on all devices.
        bytes: Class of other operations → bytes, on all devices: `"memory"` if the step is given
            them, `"strided"` if the last dimension changes, `"exponential"`, or `"cached"`.
        operations: On all devices.
        collectives: (kind, devices of a group) → executions, and bytes of all executions on one
            device.
        temporaries: Bytes of the temporary buffer of one device, times the devices.
        is_new: Whether these are new memory in every step.
    """

    flops: float = 0.0
    bytes: dict[str, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )
    operations: float = 0.0
    collectives: dict[tuple[str, int], tuple[float, float]] = dataclasses.field(
        default_factory=dict
    )
    temporaries: float = 0.0
    is_new: bool = False


def predict(work: Work, rates: CpuRates) -> dict[str, float]:
    """Return the seconds of a program by what takes them."""
    spent = {"matmuls": work.flops / rates.matmul, "operations": work.operations * rates.operation}
    spent |= {name: size / rates.bytes[name] for name, size in work.bytes.items()}
    spent["temporaries"] = work.temporaries * (rates.new if work.is_new else rates.kept)
    spent["collectives"] = sum(
        times * rates.collectives[key][0] + size / rates.collectives[key][1]
        for key, (times, size) in work.collectives.items()
    )
    return spent


def count(text: str, temporaries: int = 0) -> Work:
    """Count the work of a compiled program from its text."""
    program, minors, work = parse(text), _minors(text), Work()
    devices = program.partitions * program.replicas
    work.temporaries, work.is_new = devices * temporaries, temporaries > ARENA
    for run in executions(program, {}):
        instruction, opcode = run.instruction, run.instruction.opcode
        if run.is_part or opcode in _FREE:
            continue
        result = sum(array.bytes for array in instruction.arrays)
        around = program.computations[run.computation]
        operands = [
            sum(a.bytes for a in around.instructions[name].arrays) for name in instruction.operands
        ]
        times = int(run.times)
        if (kind := kind_of(instruction)) in KINDS:
            groups, _ = read_groups(instruction.attributes, devices)
            key = (kind, 2 if kind == "collective-permute" else max(map(len, groups)))
            before = work.collectives.get(key, (0.0, 0.0))
            work.collectives[key] = (before[0] + times, before[1] + times * max(result, *operands))
            continue
        inside = _inside(program, around, instruction)
        times *= devices
        work.operations += times
        if flops := sum(_dot_flops(computation, inner) for computation, inner in inside):
            work.flops += flops * times
            continue
        opcodes = {inner.opcode for _, inner in inside}
        is_reduction = bool(opcodes & {"reduce", "reduce-window"})
        sizes = [operand if is_reduction else min(operand, result) for operand in operands]
        is_strided = any(_is_strided(computation, inner, minors) for computation, inner in inside)
        name = "strided" if is_strided else "exponential" if "exponential" in opcodes else "cached"
        work.bytes[name] += result * times
        for operand, size in zip(instruction.operands, sizes, strict=True):
            origin = program.producer(HloValue(run.computation, operand))
            is_given = (
                origin.computation == program.entry and program.at(origin).opcode == "parameter"
            )
            work.bytes["memory" if is_given and name == "cached" else name] += size * times
    return work


def _inside(
    program: HloModule, around: Computation, instruction: Instruction
) -> list[tuple[Computation, Instruction]]:
    """Return the instructions of a fusion with their computations, or the instruction itself."""
    if instruction.opcode != "fusion":
        return [(around, instruction)]
    found = (program.computations[name] for role, name in instruction.callees() if role == "calls")
    return [
        (computation, inner) for computation in found for inner in computation.instructions.values()
    ]


def _dot_flops(computation: Computation, instruction: Instruction) -> float:
    if instruction.opcode != "dot":
        return 0.0
    left = computation.instructions[instruction.operands[0]].arrays[0]
    summed = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}").split(",")
    return (
        2.0 * instruction.arrays[0].size * math.prod(left.dims[int(dim)] for dim in summed if dim)
    )


def _minors(text: str) -> dict[str, int]:
    """Return instruction → the dimension along which its elements lie side by side, of arrays with several."""
    found = re.finditer(
        r"^\s+(?:ROOT )?%?([\w.~-]+) = \w+\[([\d,]+)\]\{([\d,]+)", text, re.MULTILINE
    )
    arrays = ((name[1], name[2].split(","), name[3].split(",")) for name in found)
    return {
        name: next((int(dim) for dim in order if dims[int(dim)] != "1"), int(order[0]))
        for name, dims, order in arrays
    }


def _is_strided(
    computation: Computation, instruction: Instruction, minors: Mapping[str, int]
) -> bool:
    """Tell whether an instruction reads elements that do not lie side by side."""
    if instruction.opcode not in ("copy", "transpose") or instruction.name not in minors:
        return False
    source, minor = instruction.operands[0], minors[instruction.name]
    if permutation := instruction.attribute(r"dimensions=\{([\d,]+)\}"):
        minor = int(permutation.split(",")[minor])
    return minors.get(source, minor) != minor


def parse_mesh(text: str) -> MeshShape:
    """Return `"data=4,tensor=2"` as a mesh shape.

    Raises:
        ConfigError: It is no mesh of eight devices or of one.
    """
    sizes = dict[str, int]()
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in _AXES or axis in sizes or not size.isdigit() or not int(size):
            what = f"{part!r} is none of {', '.join(_AXES)} with its size, or is there twice"
            raise ConfigError("The mesh cannot be measured:", [Problem(text, what)])
        sizes[axis] = int(size)
    shape = MeshShape(**sizes)
    if (total := math.prod(shape.sizes.values())) not in (1, DEVICES):
        what = f"has {total} devices: rates are measured of {DEVICES} devices and of one"
        raise ConfigError("The mesh cannot be measured:", [Problem(text, what)])
    return shape


class Step:
    """The demo's step on a mesh, compiled.

    Raises:
        SpmdError: The demo cannot be split so.
    """

    def __init__(self, name: str) -> None:
        shape = parse_mesh(name)
        config = dataclasses.replace(DEMO, mesh=shape)
        setup = make_setup(config, mesh_of(shape, jax.devices()[: math.prod(shape.sizes.values())]))
        check_microbatches(setup)
        self.name, self.seconds, self.setup = name, Seconds(), setup
        compiled = setup.step.compile(abstract_batch(config))
        memory = compiled.memory_analysis()
        assert memory is not None
        self.devices, self.work = (
            setup.mesh.size,
            count(compiled.as_text() or "", memory.temp_size_in_bytes),
        )
        self._state = spmd.init_state(setup.plan)
        tokens = np.random.default_rng(0).integers(
            0, 256, (config.data.batch, config.data.sequence + 1), np.int32
        )
        weights = np.ones((config.data.batch, config.data.sequence), np.float32)
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
        self._batch = spmd.place_batch(setup, batch)
        self._state, _ = jax.block_until_ready(setup.step(self._state, self._batch))

    def run(self) -> None:
        """Take one step."""
        self._state, _ = self.seconds.measure(lambda: self.setup.step(self._state, self._batch))


def tau(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return Kendall's rank correlation."""
    return float(kendalltau(predicted, measured).statistic)


def report(rows: Mapping[str, tuple[float, float]]) -> tuple[list[str], bool]:
    """Return the lines on mesh → (predicted, measured) seconds, and whether the targets are met.

    The first mesh is the demo's own.
    """
    lines = [f"{'mesh':26}{'predicted':>12}{'measured':>12}{'error':>9}"]
    errors = {name: guess / seconds - 1 for name, (guess, seconds) in rows.items()}
    for name, (guess, seconds) in rows.items():
        lines.append(f"{name:26}{guess * 1e3:9.1f} ms{seconds * 1e3:9.1f} ms{errors[name]:+9.1%}")
    own, order = next(iter(rows)), tau(*zip(*rows.values(), strict=True)) if len(rows) > 1 else 1.0
    mean = statistics.mean(map(abs, errors.values()))
    lines.append(f"mean absolute error {mean:.1%}; {own}: {errors[own]:+.1%} (target {OFF:.0%})")
    lines.append(f"rank correlation τ of {len(rows)} meshes: {order:.2f} (target {TAU})")
    return lines, abs(errors[own]) <= OFF and order >= TAU


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mesh",
        action="append",
        help="such as fsdp=4,tensor=2; may be repeated (default: all eight)",
    )
    parser.add_argument(
        "--rounds", type=int, default=15, help="turns of all programs and steps (default: 15)"
    )
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="that decides on the exit code"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="print the rates, and what takes the predicted time"
    )
    options = parser.parse_args()
    names = tuple(dict.fromkeys((MESHES[0], *(options.mesh or MESHES))))
    spmd.simulate_devices(DEVICES)
    try:
        for name in names:
            parse_mesh(name)
        steps = [Step(name) for name in names]
    except SpmdError as problem:
        print(f"cpu_prediction: {problem}", file=sys.stderr)
        return 2
    start = time.perf_counter()
    calibrations = {
        devices: Calibration(devices) for devices in sorted({step.devices for step in steps})
    }
    calibrating = time.perf_counter() - start
    for _ in range(max(1, options.rounds)):
        start = time.perf_counter()
        for calibration in calibrations.values():
            calibration.run()
        calibrating += time.perf_counter() - start
        for step in steps:
            step.run()
    print(f"calibration: {calibrating:.0f} s (at most {CALIBRATION:.0f} s)")
    met = {}
    for clock in CLOCKS:
        rates = {devices: calibration.rates(clock) for devices, calibration in calibrations.items()}
        spent = {step.name: predict(step.work, rates[step.devices]) for step in steps}
        rows = {
            step.name: (sum(spent[step.name].values()), step.seconds.median(clock))
            for step in steps
        }
        lines, met[clock] = report(rows)
        print("\n".join([f"\nby the {clock} clock:", *lines]))
        if options.verbose:
            _explain(rates, spent)
    return 0 if met[options.clock] and calibrating <= CALIBRATION else 1


def _explain(rates: Mapping[int, CpuRates], spent: Mapping[str, Mapping[str, float]]) -> None:
    for devices, found in rates.items():
        speeds = ", ".join(f"{name} {speed / 1e9:.1f} GB/s" for name, speed in found.bytes.items())
        print(f"rates of {devices}: matmuls {found.matmul / 1e9:.0f} GFLOP/s, {speeds}")
        print(f"  an operation {found.operation * 1e6:.1f} µs")
        print(
            f"  temporaries {found.kept * 2**30:.3f} s/GiB if kept, {found.new * 2**30:.3f} s/GiB if new memory"
        )
        for (kind, size), (latency, speed) in sorted(found.collectives.items()):
            print(f"  {kind} of {size}: {latency * 1e6:.0f} µs and {speed / 1e9:.2f} GB/s")
    for name, parts in spent.items():
        print(
            f"{name}: "
            + ", ".join(f"{what} {seconds * 1e3:.1f} ms" for what, seconds in parts.items())
        )


if __name__ == "__main__":
    sys.exit(main())
