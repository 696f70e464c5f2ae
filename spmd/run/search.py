"""Search for the fastest layout of a step on a machine.

Layouts of a config differ in mesh, ZeRO stage, remat, microbatches, pipeline and offload; those of
a file in the axes that its table names, and in those of its settings with such a name. All settings
are ranked, by closed forms of a config or by the roofline of a traced step. From the fastest on,
each is built and its memory estimated, until enough fit; those are compiled. What was estimated or
compiled is kept in a file, so that an interrupted search resumes. On the mesh of a step that does
not fit, the same search finds settings that do.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax

from spmd.analysis.memory import CATEGORIES, MemoryReport
from spmd.analysis.topology import Topology, parse_topology
from spmd.errors import ConfigError, Problem, SpmdError
from spmd.model_interface.model_config import experts_of, heads_of, repeats_of
from spmd.run.build import (
    TrainSetup,
    build_schedule,
    count_microbatches,
    make_setup,
)
from spmd.run.config import KEPT, Kept, PipelineConfig, TrainConfig
from spmd.run.planned_step import PlannedStep, estimate_step
from spmd.run.preflight import check_config, check_planned_init
from spmd.run.step_source import ConfigSource, StepFile, StepSource, time_compiled_step
from spmd.run.step_time import ModelNumbers, count_model, workload
from spmd.settings.compress import NO_COMPRESSION
from spmd.sharding.mesh import (
    AXES,
    BATCH_AXES,
    AnyMesh,
    MeshShape,
    abstract_mesh,
    shards_of,
    spec_axes,
)
from spmd.sharding.rules import Rules
from spmd.step_time.closed_form import Workload, closed_form
from spmd.step_time.hardware import closed_rates, hardware_of
from spmd.step_time.network import Network, make_network
from spmd.tree import human_bytes

Settings = Mapping[str, Any]
"""Field of a config → value, such as `mesh`."""

_STATE, _STATE_AND_PARAMS = ("optimizer_state",), ("optimizer_state", "params")

REMATS = (
    "none",
    "save:attention_query,attention_key,attention_value,attention_out,mlp_gate,mlp_up",
    "save:attention_query,attention_key,attention_value,attention_out",
    "full",
)
"""Policies to try, besides the config's own."""

_MICROBATCHES = (1, 2, 4, 8, 16)

_STEP_SETTINGS: Mapping[str, Sequence[Any]] = {
    "offload": ((), _STATE, _STATE_AND_PARAMS),
    "remat": ("none", "full"),
    "accumulate": _MICROBATCHES,
    "zero": (3, 1),
}
"""Setting of a file's function → values to try, besides its own."""

_MOST_TENSOR = 16
_MOST_SEQUENCE = 16
_MOST_PIPE = 16
_TOO_LARGE = "does not fit"
_LONG = 32_768
"""Tokens of a sequence from which on it may be split over `sequence`."""


@dataclasses.dataclass
class Candidate:
    """Settings, with the results known of them.

    Attributes:
        spent: Prediction: what a device does → seconds.
        memory: Bytes of a device by the ledger; None if it was not asked.
        compiled: Seconds of the compiled program.
        refused: Why it cannot run, or does not fit.
    """

    settings: Settings
    spent: Mapping[str, float]
    memory: int | None = None
    compiled: float | None = None
    refused: str = ""

    @property
    def seconds(self) -> float:
        """Predicted step, from the compiled program if there is one."""
        return self.compiled or sum(self.spent.values())

    @property
    def flags(self) -> str:
        """Flags of the command line."""
        return " ".join(f"--{name} {value}" for name, value in _flags(self.settings).items())

    def holds_less_than(self, other: "Candidate") -> bool:
        """Return true if it certainly needs less memory than `other`.

        All else is equal, and its state is split further.
        """
        for name in self.settings:
            if name not in ("mesh", "zero") and self.settings[name] != other.settings[name]:
                return False
        mine = self.settings["mesh"]
        theirs = other.settings["mesh"]
        for axis in ("pipe", "expert", "sequence", "tensor"):
            if mine.sizes[axis] != theirs.sizes[axis]:
                return False
        own_zero = self.settings.get("zero", 0)
        other_zero = other.settings.get("zero", 0)
        if (mine.fsdp, own_zero) == (theirs.fsdp, other_zero):
            return False
        # ZeRO 1 on many devices may need more than ZeRO 3 on few: both have to be larger.
        return mine.fsdp >= theirs.fsdp and own_zero >= other_zero

    def loses(self, best: "Candidate") -> str:
        """Return the reason against it: a refusal, or the part with the most additional time."""
        if self.refused:
            return self.refused
        more = dict[str, float]()
        for name, seconds in self.spent.items():
            more[name] = seconds - best.spent.get(name, 0.0)
        name = max(more, key=more.__getitem__)
        if more[name] <= 0:
            return "slower when compiled" if self.compiled else "not compiled"
        return f"{name} +{more[name]:.3g} s"


class Prediction(NamedTuple):
    """Predicted step: what a device does → seconds; and bytes of parameters and optimizer state.

    The bytes are 0 where they are not known.
    """

    spent: Mapping[str, float]
    state_bytes: float


class Predictor(Protocol):
    """Predicts a step for settings, without a compiler."""

    @property
    def about(self) -> list[Any]:
        """Causes of the results, besides the source and the machine."""

    def predict(self, settings: Settings) -> Prediction:
        """Return the prediction; raise `SpmdError` for settings that cannot run."""


class ClosedFormPredictor:
    """Closed forms of one config's settings on one machine.

    Raises:
        ConfigError: The model does not count its FLOPs, or no rates are known of the machine.
    """

    def __init__(self, config: TrainConfig[Any], topology: Topology) -> None:
        self.config = config
        self.topology = topology
        self.hardware = hardware_of(topology)
        self.rates = closed_rates(topology)
        self.model = count_alone(config)
        self._networks: dict[tuple[int, ...], Network] = {}

    @property
    def about(self) -> list[Any]:
        """Rates of the machine."""
        return [repr(self.rates)]

    def predict(self, settings: Settings) -> Prediction:
        """Return the prediction."""
        network = self._network(settings["mesh"], settings["slices"])
        work = self._workload(settings)
        spent = closed_form(work, network, self.rates)
        if settings["offload"]:
            return Prediction(spent, 0)
        return Prediction(spent, self._state_bytes(work))

    def _workload(self, settings: Settings) -> Workload:
        config = dataclasses.replace(self.config, **settings)
        return workload(config, self.model, settings["mesh"], self.topology.platform)

    def _network(self, shape: MeshShape, slices: MeshShape) -> Network:
        """Return the network of a mesh; made once for each, as many settings share one."""
        sizes = tuple(shape.sizes.values())
        if sizes not in self._networks:
            network = make_network(self.topology, shape, slices.sizes, self.hardware)
            self._networks[sizes] = network
        return self._networks[sizes]

    def _state_bytes(self, work: Workload) -> float:
        parts = work.gathered_parts
        shards = work.mesh["tensor"] * work.mesh["pipe"] * work.mesh["expert"]
        state = work.params * self.model.state_bytes / shards
        if work.zero:
            state /= parts
        if work.zero in (1, 2) and parts > 1:
            # Parameters stay whole, at 4 bytes each.
            state += work.params * 4 / shards * (1 - 1 / parts)
        return state


@dataclasses.dataclass(frozen=True)
class TracedPredictor:
    """Rooflines of one file's step for settings on one machine; each is made and traced."""

    source: StepFile
    topology: Topology

    @property
    def about(self) -> list[Any]:
        """Texts of the file and of the modules beside it, which it may import."""
        beside = sorted(self.source.file.resolve().parent.glob("*.py"))
        return [path.read_text(encoding="utf-8", errors="replace") for path in beside]

    def predict(self, settings: Settings) -> Prediction:
        """Return the prediction."""
        source = self.source.with_settings(settings)
        planned = source.on(source.planned_mesh(), self.topology.chip.device_kind)
        found = source.estimate_time(planned, self.topology)
        return Prediction(found.spent, sum(planned.plan.bytes_per_device().values()))


def count_alone(config: TrainConfig[Any]) -> ModelNumbers:
    """Count a model's numbers on one device, and check the config."""
    if config.diloco.every:
        problem = Problem("diloco.every", "is given, and no search knows replicas", fix="0")
        raise ConfigError("Nothing to search:", [problem])
    alone = dataclasses.replace(
        config,
        mesh=MeshShape(),
        slices=MeshShape(),
        pipeline=PipelineConfig(),
        compress=NO_COMPRESSION,
    )
    setup = make_setup(alone, abstract_mesh(alone.mesh))
    check_config(setup)
    check_planned_init(setup)
    return count_model(setup)


@dataclasses.dataclass
class Search:
    """Search for a step's settings on one machine.

    Attributes:
        settings: What to try.
        predictor: Predicts the step of each; without one, the order of `settings` stays.
        file: Where results are kept; None to keep none.
    """

    source: StepSource
    topology: Topology
    settings: dataclasses.InitVar[Iterable[Settings]]
    predictor: Predictor | None
    file: Path | None = None
    candidates: list[Candidate] = dataclasses.field(init=False)

    def __post_init__(self, settings: Iterable[Settings]) -> None:
        self.known: dict[str, dict[str, Any]] = self._load()
        # Sorting is stable: without predictions, the order is kept.
        ranked = map(self._candidate, settings)
        self.candidates = sorted(ranked, key=lambda each: (not each.spent, each.seconds))

    @property
    def key(self) -> str:
        """Digest of the causes of the results: source, machine, rates and version of JAX."""
        about = [
            self.source.values(),
            str(self.topology),
            *(self.predictor.about if self.predictor else []),
            repr(self.topology.chip.compiled),
            jax.__version__,
        ]
        text = json.dumps(about, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _load(self) -> dict[str, dict[str, Any]]:
        """Read the results of an earlier search; none if its causes were others."""
        if self.file is None:
            return {}
        try:
            saved = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        if isinstance(saved, dict) and saved.get("key") == self.key:
            return saved["known"]
        return {}

    def _save(self, candidate: Candidate) -> None:
        if self.file is None:
            return
        self.known[candidate.flags] = {
            "memory": candidate.memory,
            "compiled": candidate.compiled,
            "refused": candidate.refused,
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.file.with_suffix(".partial")
        text = json.dumps({"key": self.key, "known": self.known}, indent=2)
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.file)

    def _candidate(self, settings: Settings) -> Candidate:
        """Return settings with their predicted time, and what is known of them."""
        candidate = Candidate(settings, {})
        known = self.known.get(candidate.flags, {})
        candidate.memory = known.get("memory")
        candidate.compiled = known.get("compiled")
        candidate.refused = known.get("refused", "")
        if self.predictor is None:
            return candidate
        try:
            prediction = self.predictor.predict(settings)
        except SpmdError as error:
            candidate.refused = f"cannot run: {_first_reason(error)}"
            return candidate
        candidate.spent = prediction.spent
        state = int(prediction.state_bytes)
        limit = self.topology.memory
        if limit is not None and state > limit and not candidate.refused:
            candidate.memory = state
            candidate.refused = f"{_TOO_LARGE}: training state {self._share_of_memory(state)}"
        return candidate

    def fitting(self, wanted: int) -> Iterator[Candidate]:
        """Yield candidates from the fastest on, with their memory, until some of them fit."""
        found = 0
        for candidate in self.candidates:
            if found >= wanted:
                return
            if candidate.refused:
                continue
            smaller = self._smaller_refused(candidate)
            if smaller is not None:
                changed = changed_flags(candidate.settings, smaller.settings)
                candidate.refused = f"{_TOO_LARGE}: more than with {changed}"
                continue
            if candidate.memory is None:
                self._ask_ledger(candidate)
                self._save(candidate)
            if not candidate.refused:
                found += 1
            yield candidate

    def _smaller_refused(self, candidate: Candidate) -> Candidate | None:
        """Return a candidate of less memory, and yet too large; None if there is none."""
        for other in self.candidates:
            if other.refused.startswith(_TOO_LARGE) and other.holds_less_than(candidate):
                return other
        return None

    def _ask_ledger(self, candidate: Candidate) -> None:
        """Estimate the memory of a candidate; refuse a misfit."""
        try:
            source = self.source.with_settings(candidate.settings)
            planned = source.on(source.planned_mesh(), self.topology.chip.device_kind)
            report = MemoryReport(self.topology, estimate_step(planned, self.topology.platform))
        except SpmdError as error:
            candidate.refused = f"cannot run: {_first_reason(error)}"
            return
        candidate.memory = report.total
        if report.fits is False:
            over = self._share_of_memory(report.total)
            largest = CATEGORIES[report.largest]
            candidate.refused = f"{_TOO_LARGE}: {over}, most of it {largest}"

    def _share_of_memory(self, size: int) -> str:
        return f"{human_bytes(size)} of {human_bytes(self.topology.memory or 0)}"

    def confirm(self, candidate: Candidate) -> None:
        """Compile a candidate, unless its time is known."""
        if candidate.compiled is not None or candidate.refused:
            return
        try:
            source = self.source.with_settings(candidate.settings)
            found = time_compiled_step(source, self.topology)
            candidate.compiled = found.seconds
            if found.fits is False:
                over = self._share_of_memory(found.memory or 0)
                candidate.refused = f"does not fit when compiled: {over}"
        except SpmdError as error:
            candidate.refused = f"the compiler refuses it: {_first_reason(error)}"
        self._save(candidate)

    @property
    def best(self) -> Candidate | None:
        """Fastest fitting candidate, by the program if any were compiled."""
        fits = [c for c in self.candidates if c.memory is not None and not c.refused]
        confirmed = [c for c in fits if c.compiled is not None]
        return min(confirmed or fits, key=lambda c: c.seconds, default=None)

    @property
    def nearest(self) -> Candidate | None:
        """Candidate with the least memory by the ledger; None if it was asked for none."""
        asked = [c for c in self.candidates if c.memory is not None]
        return min(asked, key=lambda c: c.memory or 0, default=None)


def enumerate_settings(config: TrainConfig[Any], topology: Topology) -> Iterator[Settings]:
    """Yield all settings of a machine: they divide the batch, heads and experts of a config."""
    known = [remat for remat in REMATS if _has_activations_of(config, remat)]
    remats = dict.fromkeys((*known, config.remat))
    offloads = dict.fromkeys((config.offload, _STATE))
    for shape in _mesh_shapes(config, topology):
        zeros = (3, 1) if _splits_state(config, shape) else (0,)
        choices = itertools.product(zeros, remats, _MICROBATCHES, _schedules(shape), offloads)
        for zero, remat, parts, (schedule, keep), offload in choices:
            if not _takes_microbatches(config, shape, parts):
                continue
            yield {
                "mesh": shape,
                "slices": MeshShape(data=topology.slices),
                "zero": zero,
                "remat": remat,
                **_microbatch_settings(config, shape, schedule, keep, parts),
                "offload": offload,
            }


def _schedules(shape: MeshShape) -> list[tuple[str, Kept]]:
    """Return pairs of a schedule to try and a value of `PipelineConfig.keep`."""
    if shape.pipe == 1:
        return [("1f1b", "saved")]
    return list(itertools.product(("1f1b", "interleaved"), KEPT))


def make_search(source: StepSource, topology: Topology, file: Path | None) -> Search:
    """Return the search over all layouts of a step on a machine.

    Raises:
        ConfigError: No time of the step can be predicted, or it is made for one mesh.
    """
    if isinstance(source, ConfigSource):
        predictor: Predictor = ClosedFormPredictor(source.config, topology)
        settings = enumerate_settings(source.config, topology)
        return Search(source, topology, settings, predictor, file)
    if isinstance(source, StepFile):
        hardware_of(topology)
        source = source.with_devices(topology.devices)
        settings = enumerate_step_settings(source, topology)
        return Search(source, topology, settings, TracedPredictor(source, topology), file)
    problem = Problem("step", "is made for one mesh", fix="def make(mesh): … in the file")
    raise ConfigError("Nothing to search for:", [problem])


def suggest_memory_settings(
    source: StepSource, planned: PlannedStep, topology: Topology
) -> tuple[Settings, Search]:
    """Return a step's own settings, and the search for those with which it fits on its mesh.

    The fastest are asked first. Without closed forms of the model, it is those that change least.
    """
    if isinstance(planned, TrainSetup):
        predictor: Predictor | None = None
        # Models that do not count their FLOPs, and adapters, fit or not as any other.
        with contextlib.suppress(ConfigError):
            predictor = ClosedFormPredictor(planned.config, topology)
        own = own_settings(planned)
        return own, Search(source, topology, enumerate_on_mesh(planned), predictor)
    own = {"mesh": MeshShape(**planned.mesh.shape)}
    if not isinstance(source, StepFile):
        return own, Search(source, topology, (), None)
    own |= _searched_settings(source)
    others = (settings for settings in _variants(own, source) if settings != own)
    return own, Search(source, topology, others, TracedPredictor(source, topology))


def _searched_settings(source: StepFile) -> dict[str, Any]:
    """Return the settings of a file that the search knows, with their values."""
    found = dict[str, Any]()
    for name in _STEP_SETTINGS:
        if name in source.settings:
            found[name] = source.settings[name]
    return found


def _variants(own: Settings, source: StepFile) -> Iterator[Settings]:
    """Yield settings on one mesh: all values of those that the file has."""
    known = _searched_settings(source)
    choices = []
    for name, value in known.items():
        choices.append(_values_to_try(name, value, own["mesh"]))
    for values in itertools.product(*choices):
        yield {**own, **dict(zip(known, values, strict=True))}


def _values_to_try(name: str, value: Any, mesh: MeshShape) -> list[Any]:
    """Return the values of a file's setting to try, its own first: of the same type alone.

    Nothing returns to the device from host memory, since no flag says so.
    """
    values = [value]
    if name == "zero" and mesh.fsdp * mesh.sequence == 1:
        return values
    for other in _STEP_SETTINGS[name]:
        if type(other) is not type(value) or other in values:
            continue
        if name == "offload" and not set(value) <= set(other):
            continue
        values.append(other)
    return values


def enumerate_step_settings(source: StepFile, topology: Topology) -> Iterator[Settings]:
    """Yield all settings of a file's step on a machine.

    Meshes have the axes that the table of the file names, and `data`.
    """
    named = {"data"}
    for _, spec in _rules_of(source, topology).named_specs():
        named.update(spec_axes(spec))
    axes = [axis for axis in AXES if axis in named]
    for sizes in _splits(topology.devices, len(axes)):
        shape = MeshShape(**dict(zip(axes, sizes, strict=True)))
        if shape.pipe == 1 and shape.data % topology.slices == 0:
            yield from _variants({"mesh": shape}, source)


def _rules_of(source: StepFile, topology: Topology) -> Rules:
    """Return a file's table, by making its step on a mesh of `data` alone.

    A batch may be too small for it: then on the mesh of the command line. If both are refused, the
    first reason is raised.
    """
    alone = source.with_settings({"mesh": MeshShape(data=topology.devices)})
    try:
        return alone.on(alone.planned_mesh()).plan.rules
    except SpmdError as refused:
        try:
            return source.on(source.planned_mesh()).plan.rules
        except SpmdError:
            raise refused from None


def _splits(count: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every product of so many sizes.

    Example:
        >>> list(_splits(4, 2))
        [(1, 4), (2, 2), (4, 1)]
    """
    if parts == 1:
        yield (count,)
        return
    for first in _divisors(count):
        for others in _splits(count // first, parts - 1):
            yield (first, *others)


def own_settings(setup: TrainSetup) -> Settings:
    """Return the settings of a config."""
    config = setup.config
    sizes = {axis: setup.mesh.shape[axis] for axis in AXES}
    return {
        "mesh": MeshShape(**sizes),
        "slices": config.slices,
        "zero": config.zero,
        "remat": config.remat,
        "accumulate": config.accumulate,
        "pipeline": config.pipeline,
        "offload": config.offload,
    }


def enumerate_on_mesh(setup: TrainSetup) -> Iterator[Settings]:
    """Yield other settings on the mesh of a config, from the least change on."""
    config = setup.config
    own = own_settings(setup)
    known = [remat for remat in REMATS if _has_activations_of(config, remat)]
    remats = dict.fromkeys((config.remat, *known))
    offloads = dict.fromkeys((config.offload, _STATE, _STATE_AND_PARAMS))
    zeros = dict.fromkeys((config.zero, 3))
    if not _splits_state(config, own["mesh"]):
        zeros = dict.fromkeys((config.zero,))
    keeps: Sequence[Kept] = (config.pipeline.keep,)
    if setup.schedule is not None and setup.schedule.flush:
        keeps = tuple(dict.fromkeys((config.pipeline.keep, *KEPT)))
    choices = itertools.product(offloads, remats, _MICROBATCHES, zeros, keeps)
    for offload, remat, factor, zero, keep in choices:
        microbatches = _with_more_microbatches(setup, factor, keep)
        if microbatches is None:
            continue
        settings = {**own, "offload": offload, "remat": remat, "zero": zero, **microbatches}
        if settings != own:
            yield settings


def _with_more_microbatches(setup: TrainSetup, factor: int, keep: Kept) -> dict[str, Any] | None:
    """Return the settings for `factor` times the microbatches; None if the batch does not divide."""
    config = setup.config
    pipeline = dataclasses.replace(config.pipeline, keep=keep)
    if factor == 1:
        return {"pipeline": pipeline}
    parts = count_microbatches(config, setup.schedule) * factor
    shards = shards_of(BATCH_AXES, setup.mesh.shape)
    if config.data.batch % (shards * config.accumulate * parts):
        return None
    if setup.schedule is None:
        return {"accumulate": config.accumulate * factor}
    return {"pipeline": dataclasses.replace(pipeline, microbatches=parts)}


def _mesh_shapes(config: TrainConfig[Any], topology: Topology) -> Iterator[MeshShape]:
    """Yield the meshes of a machine; heads and experts divide over their axes, stages have layers."""
    model = config.model
    heads, kv_heads = heads_of(model)
    repeats = repeats_of(model)
    experts = experts_of(model)
    inside = topology.devices // topology.slices
    sizes = _divisors(inside)
    tensors = [
        size
        for size in sizes
        if size <= _MOST_TENSOR and heads % size == 0 and kv_heads % size == 0
    ]
    sequences = [1]
    if config.data.sequence >= _LONG:
        sequences = [size for size in sizes if size <= _MOST_SEQUENCE]
    pipes = [size for size in sizes if size <= min(_MOST_PIPE, repeats)]
    expert_sizes = [size for size in sizes if experts % size == 0]
    products = itertools.product(tensors, sequences, pipes, expert_sizes)
    for tensor, sequence, pipe, expert in products:
        rest, odd = divmod(inside, tensor * sequence * pipe * expert)
        if odd:
            continue
        for fsdp in _divisors(rest):
            yield MeshShape(
                pipe=pipe,
                data=topology.slices * rest // fsdp,
                fsdp=fsdp,
                expert=expert,
                sequence=sequence,
                tensor=tensor,
            )


def _splits_state(config: TrainConfig[Any], shape: MeshShape) -> bool:
    """Return whether a ZeRO stage changes anything on a mesh."""
    return any(shape.sizes[axis] > 1 for axis in config.rules.gathered_axes)


def _takes_microbatches(config: TrainConfig[Any], shape: MeshShape, parts: int) -> bool:
    """Return true if the batch divides into so many parts, and each stage gets one."""
    if config.data.batch % (shards_of(BATCH_AXES, shape.sizes) * parts):
        return False
    return shape.pipe == 1 or parts >= shape.pipe


def _microbatch_settings(
    config: TrainConfig[Any], shape: MeshShape, schedule: str, keep: Kept, parts: int
) -> dict[str, Any]:
    """Return the settings of microbatches: of a pipeline if there is one, else of accumulation."""
    chunks = config.pipeline.chunks if schedule == "interleaved" else 0
    if shape.pipe > 1:
        pipeline = PipelineConfig(schedule, parts, chunks, keep)
        return {"accumulate": 1, "pipeline": pipeline}
    return {"accumulate": parts, "pipeline": PipelineConfig(schedule, 0, chunks)}


def _first_reason(error: SpmdError) -> str:
    """Return the start of the first problem of an error, on one line."""
    problem = error.problems[0] if error.problems else error
    return " ".join(str(problem).split())[:90]


def _has_activations_of(config: TrainConfig[Any], remat: str) -> bool:
    """Return true if a config's table has the activations of a policy."""
    _, colon, names = remat.partition(":")
    if not colon:
        return True
    return set(names.split(",")) <= {name for name, _ in config.rules.activations}


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def changed_flags(settings: Settings, other: Settings) -> str:
    """Return the flags of `other` that differ from those of `settings`."""
    mine = _flags(settings)
    theirs = _flags(other)
    changed = [f"--{name} {value}" for name, value in theirs.items() if mine.get(name) != value]
    return " ".join(changed)


def _flags(settings: Settings) -> dict[str, str]:
    """Return flag → value on a command line."""
    mesh = settings["mesh"].sizes
    flags = dict[str, str]()
    for axis in AXES:
        if mesh[axis] > 1 or axis in ("data", "fsdp", "tensor"):
            flags[f"mesh.{axis}"] = str(mesh[axis])
    slices = settings.get("slices", MeshShape())
    for axis, count in slices.sizes.items():
        if count > 1:
            flags[f"slices.{axis}"] = str(count)
    for name in ("zero", "remat", "accumulate"):
        if name in settings:
            flags[name] = str(settings[name])
    if "pipeline" in settings and mesh["pipe"] > 1:
        flags |= _pipeline_flags(settings["pipeline"])
    if settings.get("offload"):
        flags["offload"] = " ".join(settings["offload"])
    return flags


def _pipeline_flags(pipeline: PipelineConfig) -> dict[str, str]:
    flags = {
        "pipeline.schedule": pipeline.schedule,
        "pipeline.microbatches": str(pipeline.microbatches),
    }
    if pipeline.chunks:
        flags["pipeline.chunks"] = str(pipeline.chunks)
    flags["pipeline.keep"] = pipeline.keep
    return flags


def slice_sizes(topology: Topology) -> Iterator[Topology]:
    """Yield machines of a topology's kind, the smallest first."""
    if not topology.chip.dims:
        gpus = topology.chip.example.split("x")[-1]
        for exponent in range(10):
            yield parse_topology(f"{topology.kind}:{2**exponent}x{gpus}")
        return
    shape = [2, 2] if topology.chip.dims == 2 else [2, 2, 1]
    while math.prod(shape) <= topology.chip.max_chips:
        size = "x".join(map(str, shape))
        yield parse_topology(f"{topology.kind}:{size}")
        smallest = min(range(len(shape)), key=lambda dim: (shape[dim], -dim))
        shape[smallest] = 2 * shape[smallest]
        shape.sort()


def largest_batch(config: TrainConfig[Any], topology: Topology, mesh: AnyMesh) -> tuple[int, int]:
    """Return the largest fitting batch for a config's settings, and its bytes on a device.

    It is a multiple of the smallest batch that the mesh and the microbatches divide; 0 if that does
    not fit.
    """
    microbatches = config.accumulate * count_microbatches(config, build_schedule(config, mesh))
    least = shards_of(BATCH_AXES, mesh.shape) * microbatches
    limit = topology.memory or 0
    found = _memory_of_batch(config, topology, mesh, least)
    if found > limit:
        return 0, found
    # In multiples of the smallest batch, `low` fits and `high` does not, once it is found.
    low = 1
    high = 2
    while (more := _memory_of_batch(config, topology, mesh, least * high)) <= limit:
        found = more
        low = high
        high = 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        more = _memory_of_batch(config, topology, mesh, least * middle)
        if more <= limit:
            low = middle
            found = more
        else:
            high = middle
    return least * low, found


def _memory_of_batch(
    config: TrainConfig[Any], topology: Topology, mesh: AnyMesh, batch: int
) -> int:
    """Return the bytes of a device for a batch by the ledger."""
    data = dataclasses.replace(config.data, batch=batch)
    planned = ConfigSource(dataclasses.replace(config, data=data)).on(mesh)
    return estimate_step(planned, topology.platform).total
