"""Sources of a train step: a config, or a file of one's own. Each makes its step on any mesh.

A file offers `make(mesh, **settings)`, which returns a step from `spmd.make_train_step` and a
batch, or a list of batches; shapes are enough to plan it. Its keyword arguments are settings of the
command line. Or it has a `step` and a `batch`, ready made, for the mesh of that step alone.
"""

import abc
import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from spmd.analysis.topology import Topology, missing_extra
from spmd.distributed.initialize import initialize
from spmd.distributed.xla_flags import Flag
from spmd.errors import (
    ConfigError,
    MeshError,
    Problem,
    check_type,
    describe_value,
)
from spmd.observe.spinner import spinner
from spmd.pipeline.schedule import Schedule
from spmd.run.build import (
    TrainSetup,
    applicable_compression,
    build_flags,
    make_setup,
    planned_mesh,
)
from spmd.run.config import TrainConfig, config_values
from spmd.run.describe import (
    exchange_line,
    execution_lines,
    experts_line,
    pipeline_line,
    plan_lines,
)
from spmd.run.load_config import (
    calling_file,
    find_file,
    load_function,
    local_target,
    read_file,
    split_target,
)
from spmd.run.planned_step import CompiledStep, PlannedStep, compile_step, topology_mesh
from spmd.run.preflight import check_planned_init, preflight
from spmd.run.step_time import estimate_time, estimate_traced_time, time_program, work_of
from spmd.sharding.mesh import AnyMesh, MeshShape, abstract_mesh, nontrivial_axes
from spmd.step_time.closed_form import Workload
from spmd.step_time.hardware import hardware_of
from spmd.step_time.report import StepTime, chrome_trace
from spmd.storage.output_file import write_output
from spmd.training.alternating import AlternatingStep
from spmd.training.step import TrainStep

_RETURNS = "return step, batch, with step from spmd.make_train_step"


class CompiledOn(NamedTuple):
    """A step on the devices of a machine, and its program, read."""

    planned: PlannedStep
    compiled: CompiledStep


class StepSource(abc.ABC):
    """Origin of a train step."""

    @abc.abstractmethod
    def with_devices(self, devices: int) -> "StepSource":
        """Return the source on a number of devices."""

    @abc.abstractmethod
    def with_settings(self, settings: Mapping[str, Any]) -> "StepSource":
        """Return the source with other settings: `mesh`, a shape, and further ones by name."""

    @abc.abstractmethod
    def values(self) -> Any:
        """Return all settings as values for a digest."""

    @abc.abstractmethod
    def planned_mesh(self) -> AnyMesh:
        """Return the mesh without devices."""

    @abc.abstractmethod
    def on(self, mesh: AnyMesh, chip: str = "") -> PlannedStep:
        """Make the step on a mesh, and check it; `chip` is the kind of absent devices."""

    def estimate_time(self, planned: PlannedStep, topology: Topology) -> StepTime:
        """Predict the time of a step without a compiler: by the roofline of its trace."""
        return estimate_traced_time(planned, topology)

    def workload(self, planned: PlannedStep) -> Workload | None:
        """Return the numbers of a transformer's step; None for another model."""
        return None

    def lines(self, planned: PlannedStep, device: tuple[str, str]) -> str:
        """Return lines for below the plan's text; `device` is a platform and a kind of devices."""
        return plan_lines(planned, device[1])

    def schedule(self, planned: PlannedStep) -> Schedule | None:
        """Return the schedule of the pipeline; None without one, or if it is not known."""
        return None

    def details(self, planned: PlannedStep, device: tuple[str, str]) -> dict[str, Any]:
        """Return JSON values of `lines` that a plan does not have."""
        return {}

    def flags(self, platform: str, kind: str) -> Sequence[Flag]:
        """Return XLA's flags for the step on a kind of device."""
        return ()

    def start(self, planned: PlannedStep) -> str:
        """Return a line about the initial parameters; empty for a seed."""
        return ""

    def on_topology(self, topology: Topology, slices: Mapping[str, int]) -> PlannedStep:
        """Make the step for the devices of a machine, absent or simulated, to be compiled.

        Args:
            slices: Axis → the number of slices along it.
        """
        if topology.platform == "cpu":
            initialize(topology.devices)
        else:
            initialize(target_platform=topology.platform)
        shape = MeshShape(**self.planned_mesh().shape)
        return self.on(topology_mesh(shape, topology, slices))


@dataclasses.dataclass(frozen=True)
class ConfigSource(StepSource):
    """Step of a config."""

    config: TrainConfig[Any]

    def with_devices(self, devices: int) -> "ConfigSource":
        """Return the config on a number of devices."""
        return ConfigSource(dataclasses.replace(self.config, devices=devices))

    def with_settings(self, settings: Mapping[str, Any]) -> "ConfigSource":
        """Return the config with other fields, compressed as they allow."""
        config = dataclasses.replace(self.config, **settings)
        config = dataclasses.replace(config, devices=config.mesh.total() or 0)
        return ConfigSource(dataclasses.replace(config, compress=applicable_compression(config)))

    def values(self) -> Any:
        """Return all fields of the config."""
        return config_values(self.config)

    def planned_mesh(self) -> AnyMesh:
        """Return the config's mesh without devices."""
        _count_devices(self.config.mesh, self.config.devices)
        return planned_mesh(self.config)

    def on(self, mesh: AnyMesh, chip: str = "") -> TrainSetup:
        """Return the config's setup on a mesh."""
        setup = make_setup(self.config, mesh, chip)
        preflight(setup)
        return setup

    def estimate_time(self, planned: PlannedStep, topology: Topology) -> StepTime:
        """Predict the time of a step by closed forms."""
        return estimate_time(_setup(planned), topology)

    def workload(self, planned: PlannedStep) -> Workload | None:
        """Return the numbers of a step of the config's model."""
        return work_of(_setup(planned))

    def lines(self, planned: PlannedStep, device: tuple[str, str]) -> str:
        """Return lines about pipeline, experts, exchange, slices and data."""
        return execution_lines(_setup(planned), device)

    def schedule(self, planned: PlannedStep) -> Schedule | None:
        """Return the schedule of the config's pipeline; None without one."""
        return _setup(planned).schedule

    def details(self, planned: PlannedStep, device: tuple[str, str]) -> dict[str, Any]:
        """Return pipeline, experts and exchange; None of each that there is not."""
        setup = _setup(planned)
        return {
            "pipeline": pipeline_line(setup).strip() or None,
            "experts": experts_line(setup, device).strip() or None,
            "exchange": exchange_line(setup).strip() or None,
        }

    def flags(self, platform: str, kind: str) -> Sequence[Flag]:
        """Return XLA's flags: the config's, and those for the machine."""
        return build_flags(self.config, platform, kind)

    def start(self, planned: PlannedStep) -> str:
        """Return a line about `init`."""
        return check_planned_init(_setup(planned))


def _setup(planned: PlannedStep) -> TrainSetup:
    assert isinstance(planned, TrainSetup), "from `ConfigSource.on`"
    return planned


@dataclasses.dataclass(frozen=True)
class StepFile(StepSource):
    """Step of a file with a function of a mesh.

    Attributes:
        file: The file.
        make: `(mesh, **settings)` → the step, and a batch or a list of batches.
        shape: Size of each mesh axis; one may be -1.
        devices: Number of devices; 0 for the product of the mesh.
    """

    file: Path
    make: Callable[..., Any]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shape: MeshShape = dataclasses.field(default_factory=lambda: MeshShape(fsdp=-1))
    devices: int = 0

    @property
    def name(self) -> str:
        """Name of the function."""
        return getattr(self.make, "__name__", "make")

    def arguments(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield name, type and default of each argument after the mesh.

        The type is the annotation, or that of the default; a required one has
        `dataclasses.MISSING`.
        """
        try:
            hints = typing.get_type_hints(getattr(self.make, "func", self.make))
        except (NameError, TypeError):  # names for type checkers alone, or an object with a call
            hints = {}
        _, *others = inspect.signature(self.make).parameters.values()
        for parameter in others:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            default: Any = dataclasses.MISSING
            kind: Any = str
            if parameter.default is not parameter.empty:
                default = parameter.default
                kind = type(default)
            yield parameter.name, hints.get(parameter.name, kind), default

    def with_devices(self, devices: int) -> "StepFile":
        """Return the function on a number of devices."""
        return dataclasses.replace(self, devices=devices)

    def with_settings(self, settings: Mapping[str, Any]) -> "StepFile":
        """Return the function with other arguments on another mesh."""
        changed = dict(settings)
        shape = changed.pop("mesh")
        others = {**self.settings, **changed}
        return dataclasses.replace(self, shape=shape, devices=shape.total() or 0, settings=others)

    def values(self) -> Any:
        """Return the arguments and the mesh."""
        return [self.name, dict(self.settings), self.shape.sizes]

    def planned_mesh(self) -> AnyMesh:
        """Return the mesh without devices."""
        return abstract_mesh(self.shape.resolve(_count_devices(self.shape, self.devices)))

    def on(self, mesh: AnyMesh, chip: str = "") -> PlannedStep:
        """Make the step with its first batch, and trace it."""
        step, batches = self.make_on(mesh)
        planned = PlannedStep(step=step, batch=jax.tree.map(_shape, batches[0]))
        with calling_file(self.file, f"The step of {self.name}(mesh) fails:"):
            planned.step.trace(planned.batch)
        return planned

    def make_on(self, mesh: AnyMesh) -> tuple[TrainStep, Sequence[Any]]:
        """Call the function on a mesh; return the step and its batches.

        Raises:
            ConfigError: It fails, or returns something else, or a step on another mesh.
        """
        with calling_file(self.file, f"{self.name}(mesh) fails:"):
            returned = self.make(mesh, **self.settings)
        return read_made(self.name, returned, mesh)


@dataclasses.dataclass(frozen=True)
class ReadyStep(StepSource):
    """Step of a file that has made it, on the mesh of that step or one of the same shape."""

    file: Path
    step: TrainStep
    batches: Sequence[Any]

    def with_devices(self, devices: int) -> "ReadyStep":
        """Return the step, if its mesh has this number of devices."""
        own = self.step.plan.mesh
        if devices != own.size:
            problem = Problem(
                "step",
                "was made for another number of devices",
                f"{_axes(own)} = {own.size}, not {devices}",
                f"def make(mesh): … {_RETURNS} in {self.file}, for any mesh",
            )
            raise MeshError("The step does not fit the devices:", [problem])
        return self

    def with_settings(self, settings: Mapping[str, Any]) -> "ReadyStep":
        """Return the step itself: it has no settings."""
        return self

    def values(self) -> Any:
        """Return the file."""
        return str(self.file)

    def planned_mesh(self) -> AnyMesh:
        """Return the mesh of the step, without devices."""
        return abstract_mesh(self.shape)

    def on(self, mesh: AnyMesh, chip: str = "") -> PlannedStep:
        """Return the step on the devices of a mesh of the same shape."""
        own = self.step.plan.mesh
        if dict(mesh.shape) != dict(own.shape):
            problem = Problem(
                "step",
                "was made for another mesh",
                f"{_axes(own)}, not {_axes(mesh)}",
                f"def make(mesh): … {_RETURNS} in {self.file}, for any mesh",
            )
            raise MeshError("The step does not fit the devices:", [problem])
        plan = dataclasses.replace(self.step.plan, mesh=mesh)
        step = dataclasses.replace(self.step, plan=plan)
        return PlannedStep(step=step, batch=jax.tree.map(_shape, self.batches[0]))

    @property
    def shape(self) -> MeshShape:
        """The mesh of the step."""
        return MeshShape(**self.step.plan.mesh.shape)

    @property
    def devices(self) -> int:
        """Number of devices to simulate: 0, as the step's are there."""
        return 0

    def make_on(self, mesh: AnyMesh) -> tuple[TrainStep, Sequence[Any]]:
        """Return the step on its mesh or, to compare with it, on one device; and its batches."""
        if mesh.size > 1:
            return self.on(mesh).step, self.batches
        plan = dataclasses.replace(self.step.plan, mesh=mesh)
        return dataclasses.replace(self.step, plan=plan), self.batches


def _count_devices(shape: MeshShape, devices: int) -> int:
    """Return the given number of devices, or that of a mesh; raise `MeshError` without any."""
    total = devices or shape.total()
    if total is None:
        what = "takes all devices of a machine, and none is named"
        fix = (
            "a machine, such as --topology v5e:4x4, a number, --devices 16, or a size of each axis"
        )
        raise MeshError("Unknown number of devices:", [Problem("mesh", what, fix=fix)])
    return total


def _axes(mesh: AnyMesh) -> str:
    split = [f"{axis} {size}" for axis, size in nontrivial_axes(mesh.shape).items()]
    return " × ".join(split) or "one device"


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def read_made(name: str, returned: Any, mesh: AnyMesh) -> tuple[TrainStep, Sequence[Any]]:
    """Return the step and the batches that a function of a mesh returned.

    Raises:
        ConfigError: It returned something else.
    """
    if not (isinstance(returned, tuple) and len(returned) == 2):
        problem = Problem(name, f"returns {describe_value(returned)}", fix=_RETURNS)
        raise ConfigError("No step:", [problem])
    step, batches = returned
    if isinstance(step, AlternatingStep):
        one = 'return step.isolate("name", batches), one network at a time'
        raise ConfigError("No step:", [Problem(f"{name}, step", "is of several networks", fix=one)])
    if not isinstance(batches, list):
        batches = [batches]
    problems = check_type(f"{name}, step", step, TrainStep, _RETURNS)
    if not batches:
        problems.append(Problem(f"{name}, batches", "are an empty list", fix="one batch or more"))
    for number, batch in enumerate(batches):
        problems += _batch_problems(f"{name}, batch {number}", batch)
    if not problems and dict(step.plan.mesh.shape) != dict(mesh.shape):
        what = f"is on another mesh: {_axes(step.plan.mesh)}, not {_axes(mesh)}"
        problems.append(Problem(f"{name}, step", what, fix="spmd.make_plan(mesh, …) with its own"))
    if problems:
        raise ConfigError("No step:", problems)
    return step, batches


def _batch_problems(where: str, batch: Any) -> list[Problem]:
    """Return the problem of the first leaf without a shape, or of a batch without leaves."""
    leaves = jax.tree.leaves(batch)
    if not leaves:
        return [Problem(where, f"is {describe_value(batch)}", fix="arrays or shapes")]
    for leaf in leaves:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            fix = "arrays or shapes (jax.ShapeDtypeStruct) as its leaves"
            return [Problem(where, f"has {describe_value(leaf)}", fix=fix)]
    return []


def shape_problems(batches: Sequence[Any]) -> list[Problem]:
    """Return the problem of batches that have shapes for arrays, where a step is to be run."""
    for leaf in jax.tree.leaves(batches):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return [Problem("batches", "are shapes, and the step is run", fix="arrays")]
    return []


Source = ConfigSource | StepFile | ReadyStep


def load_source(target: str) -> Source:
    """Execute a file and return what it offers: a config, a function of a mesh, or a ready step.

    `target` is a file, a shipped config such as `demo`, or `FILE.py:FUNCTION`.

    Raises:
        ConfigError: The file cannot be read, or offers none of these.
    """
    target = local_target(target)
    file, function = split_target(target)
    if function:
        return StepFile(Path(file), _checked(function, load_function(target)))
    read = read_file(find_file(target))
    config = read.names.get("config")
    has_own = "make" in read.names or "step" in read.names
    if isinstance(config, TrainConfig) or (config is not None and not has_own):
        return ConfigSource(read.config)
    if "make" in read.names:
        return StepFile(read.path, _checked("make", read.names["make"]))
    if "step" in read.names:
        return _ready_step(read.path, read.names)
    problem = Problem(
        str(read.path),
        "offers no step",
        fix=f"config = spmd.TrainConfig(…), or def make(mesh): … {_RETURNS}; or FILE.py:FUNCTION",
    )
    raise ConfigError("No step:", [problem])


def _checked(name: str, make: Any) -> Callable[..., Any]:
    """Return a function of a mesh; raise `ConfigError` if it cannot be called with one."""
    fix = f"def {name}(mesh): … {_RETURNS}"
    if not callable(make):
        problem = Problem(name, f"is {describe_value(make)}", fix=fix)
        raise ConfigError("No step:", [problem])
    if not inspect.signature(make).parameters:
        raise ConfigError("No step:", [Problem(name, "takes no mesh", fix=fix)])
    return make


def _ready_step(path: Path, defined: Mapping[str, Any]) -> ReadyStep:
    """Return the step and the batch of a file."""
    step = defined["step"]
    problems = check_type("step", step, TrainStep, "spmd.make_train_step(plan, loss_fn)")
    batches = defined.get("batches", defined.get("batch"))
    if batches is None:
        problems.append(Problem("batch", "is missing beside step", fix="batch = arrays or shapes"))
    if problems:
        raise ConfigError(f"Invalid step of {path}:", problems)
    step, batches = read_made(str(path), (step, batches), step.plan.mesh)
    return ReadyStep(path, step, batches)


def compile_on(source: StepSource, topology: Topology, slices: Mapping[str, int]) -> CompiledOn:
    """Compile a step for a machine; raise `MemoryError` if the compiler finds no room."""
    with spinner(f"compiling for {topology}"):
        planned = source.on_topology(topology, slices)
        return CompiledOn(planned, compile_step(planned))


def time_compiled_step(source: StepSource, topology: Topology, trace: str = "") -> StepTime:
    """Compile a step for a machine and predict its time.

    A trace is written if a file is named. Programs of GPUs have no cycles: their time is the
    source's estimate.

    Raises:
        ConfigError: There is no compiler or no speed for the machine, the step does not fit, or the
            trace cannot be written.
    """
    hardware_of(topology)  # before the compiler
    planned = source.on(source.planned_mesh(), topology.chip.device_kind)
    if topology.platform != "tpu":
        if trace:
            what = f"programs for {topology.kind} have no cycles"
            problem = Problem("--trace", what, fix="a TPU, or no --trace")
            raise ConfigError("Trace not written:", [problem])
        return source.estimate_time(planned, topology)
    absent = missing_extra(topology)
    if absent:
        raise ConfigError("The step cannot be compiled:", [absent])
    try:
        made, compiled = compile_on(source, topology, planned.slices)
    except MemoryError as error:
        what = f"has no room for the step: {error}"
        problem = Problem("topology", what, fix="spmd plan says what would fit")
        raise ConfigError("The step cannot be compiled:", [problem]) from None
    work = source.workload(made)
    found, line = time_program(made, topology, compiled, work, keep_spans=bool(trace))
    if trace:
        write_output("--trace", trace, chrome_trace(line.spans, str(topology)))
    return found
