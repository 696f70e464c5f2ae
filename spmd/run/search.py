"""Search for the fastest layout of a config on a machine: meshes, ZeRO stages, remat, microbatches, pipelines, offload.

All settings are ranked by closed forms. From the fastest on, each is built and its memory estimated, until enough fit;
those are compiled. What was estimated or compiled is kept in a file, so that an interrupted search resumes.
"""

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from spmd.analysis.memory import CATEGORIES, MemoryReport
from spmd.analysis.topology import Topology, parse_topology
from spmd.errors import SpmdError
from spmd.run.build import applicable_compression, build_schedule, count_microbatches, make_setup
from spmd.run.config import PipelineConfig, TrainConfig, config_values
from spmd.run.preflight import check_config, check_planned_init, check_step, estimate_step
from spmd.run.step_time import ModelNumbers, count_model, time_compiled_step, workload
from spmd.settings.compress import NO_COMPRESSION
from spmd.sharding.mesh import AXES, BATCH_AXES, AnyMesh, MeshShape, abstract_mesh
from spmd.step_time.calibration import CLOSED, COMPILED
from spmd.step_time.closed_form import Workload, closed_form
from spmd.step_time.hardware import hardware_of
from spmd.step_time.network import Network, make_network
from spmd.tree import human_bytes

Settings = Mapping[str, Any]
"""Field of a config → value, such as `mesh`."""

REMATS = (
    "none",
    "save:attention_query,attention_key,attention_value,attention_out,mlp_gate,mlp_up",
    "save:attention_query,attention_key,attention_value,attention_out",
    "full",
)
"""Policies that are tried, besides the config's own."""

_MICROBATCHES = (1, 2, 4, 8, 16)
_MOST_TENSOR = 16
_TOO_LARGE = "does not fit"
_LONG = 32_768
"""Tokens of a sequence from which on it may be split over `sequence`."""


@dataclasses.dataclass
class Candidate:
    """Settings, and what is known of them.

    Attributes:
        spent: Predicted by closed forms: what a device does → seconds.
        memory: Bytes of a device by the ledger; None if it was not asked.
        compiled: Seconds of the compiled program.
        refused: Why it cannot run, or does not fit.
    """

    settings: Settings
    spent: dict[str, float]
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
        """Tell whether it needs less memory for certain: all else equal, its state is split further."""
        alike = ("remat", "accumulate", "pipeline", "offload")
        mine, theirs = self.settings["mesh"], other.settings["mesh"]
        same = all(self.settings[name] == other.settings[name] for name in alike) and all(
            mine.sizes[axis] == theirs.sizes[axis] for axis in ("pipe", "expert", "sequence", "tensor")
        )
        own, others = (mine.fsdp, self.settings["zero"]), (theirs.fsdp, other.settings["zero"])
        # ZeRO 1 on many devices may need more than ZeRO 3 on few: both have to be larger.
        return same and own != others and all(a >= b for a, b in zip(own, others, strict=True))

    def loses(self, best: "Candidate") -> str:
        """Return why it is not chosen: what it does not fit, or what takes longer than in the best one."""
        if self.refused:
            return self.refused
        more = {name: seconds - best.spent.get(name, 0.0) for name, seconds in self.spent.items()}
        name = max(more, key=more.__getitem__)
        if more[name] <= 0:
            return "slower when compiled" if self.compiled else "not compiled"
        return f"{name} +{more[name]:.3g} s"


@dataclasses.dataclass
class Search:
    """Search for one config on one machine.

    Attributes:
        file: Where results are kept.
    """

    config: TrainConfig[Any]
    topology: Topology
    file: Path
    candidates: list[Candidate] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.hardware, self.rates = hardware_of(self.topology), CLOSED[self.topology.kind]
        self.model = self._count()
        self._networks: dict[tuple[int, ...], Network] = {}
        self.known: dict[str, dict[str, Any]] = self._load()
        self.candidates = sorted(self._rank(), key=lambda candidate: candidate.seconds)

    def _count(self) -> ModelNumbers:
        alone = dataclasses.replace(self.config, mesh=MeshShape(), slices=MeshShape(), pipeline=PipelineConfig())
        alone = dataclasses.replace(alone, compress=NO_COMPRESSION)
        setup = make_setup(alone, abstract_mesh(alone.mesh))
        check_config(setup)
        check_planned_init(setup)
        return count_model(setup)

    @property
    def key(self) -> str:
        """Digest of what the results depend on."""
        about = [str(self.topology), repr(self.rates), repr(COMPILED.get(self.topology.kind)), jax.__version__]
        text = json.dumps([config_values(self.config), *about], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _load(self) -> dict[str, dict[str, Any]]:
        try:
            saved = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return saved["known"] if isinstance(saved, dict) and saved.get("key") == self.key else {}

    def _save(self, candidate: Candidate) -> None:
        results = {"memory": candidate.memory, "compiled": candidate.compiled, "refused": candidate.refused}
        self.known[candidate.flags] = results
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps({"key": self.key, "known": self.known}, indent=2), encoding="utf-8")
        partial.replace(self.file)

    def _rank(self) -> Iterator[Candidate]:
        for settings in enumerate_settings(self.config, self.topology):
            shape = settings["mesh"]
            work = workload(dataclasses.replace(self.config, **settings), self.model, shape)
            sizes = tuple(shape.sizes.values())
            if sizes not in self._networks:
                slices = settings["slices"].sizes
                self._networks[sizes] = make_network(self.topology, shape, slices, self.hardware)
            candidate = Candidate(settings, closed_form(work, self._networks[sizes], self.rates))
            known = self.known.get(candidate.flags, {})
            candidate.memory, candidate.compiled = known.get("memory"), known.get("compiled")
            candidate.refused = known.get("refused", "")
            if not candidate.refused:
                self._refuse_large(candidate, work)
            yield candidate

    def _refuse_large(self, candidate: Candidate, work: Workload) -> None:
        """Refuse settings with which the training state alone does not fit."""
        limit, mesh = self.topology.memory, work.mesh
        shards = mesh["tensor"] * mesh["pipe"] * mesh["expert"]
        state = work.params * self.model.state_bytes / shards / (mesh["fsdp"] if work.zero else 1)
        if work.zero in (1, 2) and mesh["fsdp"] > 1:
            state += work.params * 4 / shards * (1 - 1 / mesh["fsdp"])
        if limit is not None and state > limit and not candidate.settings["offload"]:
            candidate.memory = int(state)
            candidate.refused = f"{_TOO_LARGE}: training state {human_bytes(int(state))} of {human_bytes(limit)}"

    def fitting(self, wanted: int) -> Iterator[Candidate]:
        """Yield candidates from the fastest on, each once its memory is known, until some of them fit."""
        found = 0
        for candidate in self.candidates:
            if found >= wanted:
                return
            if candidate.refused:
                continue
            smaller = (c for c in self.candidates if c.refused.startswith(_TOO_LARGE) and c.holds_less_than(candidate))
            if (other := next(smaller, None)) is not None:
                candidate.refused = f"{_TOO_LARGE}: more than with mesh.fsdp {other.settings['mesh'].fsdp}"
                continue
            if candidate.memory is None:
                self._ask_ledger(candidate)
                self._save(candidate)
            found += not candidate.refused
            yield candidate

    def _ask_ledger(self, candidate: Candidate) -> None:
        try:
            config = dataclasses.replace(self.config, devices=self.topology.devices, **candidate.settings)
            config = dataclasses.replace(config, compress=applicable_compression(config))
            setup = make_setup(config, abstract_mesh(config.mesh))
            check_step(setup)
            report = MemoryReport(self.topology, estimate_step(setup, self.topology.platform))
        except SpmdError as error:
            candidate.refused = f"cannot run: {_first_reason(error)}"
            return
        candidate.memory = report.total
        if report.fits is False:
            over = f"{human_bytes(report.total)} of {human_bytes(self.topology.memory or 0)}"
            candidate.refused = f"{_TOO_LARGE}: {over}, most of it {CATEGORIES[report.largest]}"

    def confirm(self, candidate: Candidate) -> None:
        """Compile a candidate, unless that is known."""
        if candidate.compiled is not None or candidate.refused:
            return
        try:
            config = dataclasses.replace(self.config, devices=self.topology.devices, **candidate.settings)
            found = time_compiled_step(config, self.topology)
            candidate.compiled = found.seconds
            if found.fits is False:
                over = f"{human_bytes(found.memory or 0)} of {human_bytes(self.topology.memory or 0)}"
                candidate.refused = f"does not fit when compiled: {over}"
        except SpmdError as error:
            candidate.refused = f"the compiler refuses it: {_first_reason(error)}"
        self._save(candidate)

    @property
    def best(self) -> Candidate | None:
        """Fastest of the candidates that fit, by the program if any were compiled."""
        fits = [c for c in self.candidates if c.memory is not None and not c.refused]
        confirmed = [c for c in fits if c.compiled is not None]
        return min(confirmed or fits, key=lambda c: c.seconds, default=None)

    @property
    def nearest(self) -> Candidate | None:
        """Candidate with the least memory of those that the ledger was asked for; None if it was asked for none."""
        asked = [c for c in self.candidates if c.memory is not None]
        return min(asked, key=lambda c: c.memory or 0, default=None)


def enumerate_settings(config: TrainConfig[Any], topology: Topology) -> Iterator[Settings]:
    """Yield all settings of a machine that a config's batch and model divide over."""
    model, data, slices = config.model, config.data, topology.slices
    heads = getattr(model, "heads", 1)
    kv_heads = getattr(model, "kv_heads", heads)
    experts = getattr(getattr(model, "router", None), "experts", 1)
    inside = topology.devices // slices
    remats = dict.fromkeys((*(r for r in REMATS if _knows(config, r)), config.remat))
    offloads = dict.fromkeys((config.offload, ("optimizer_state",)))
    tensors = [n for n in _divisors(inside) if n <= _MOST_TENSOR and heads % n == 0 and kv_heads % n == 0]
    sequences = [n for n in _divisors(inside) if n == 1 or (data.sequence >= _LONG and n <= 16)]
    pipes = [n for n in _divisors(inside) if n <= 16 and getattr(model, "layers", 1) % n == 0]
    experts_split = [n for n in _divisors(inside) if experts % n == 0]
    for tensor, sequence, pipe, expert in itertools.product(tensors, sequences, pipes, experts_split):
        rest, odd = divmod(inside, tensor * sequence * pipe * expert)
        if odd:
            continue
        for fsdp in _divisors(rest):
            replicas = slices * rest // fsdp
            shape = MeshShape(pipe, replicas, fsdp, expert, sequence, tensor)
            for zero, remat, parts, kind, offload in itertools.product(
                (3, 1) if fsdp > 1 else (0,), remats, _MICROBATCHES, ("1f1b", "interleaved")[: 1 + (pipe > 1)], offloads
            ):
                shards = replicas * fsdp * expert
                if data.batch % (shards * parts) or (pipe > 1 and parts < pipe):
                    continue
                chunks = config.pipeline.chunks if kind == "interleaved" else 0
                pipeline = PipelineConfig(kind, parts if pipe > 1 else 0, chunks)
                yield {
                    "mesh": shape,
                    "slices": MeshShape(data=slices),
                    "zero": zero,
                    "remat": remat,
                    "accumulate": 1 if pipe > 1 else parts,
                    "pipeline": pipeline,
                    "offload": offload,
                }


def _first_reason(error: SpmdError) -> str:
    """Return the start of the first problem of an error, on one line."""
    problem = error.problems[0] if error.problems else error
    return " ".join(str(problem).split())[:90]


def _knows(config: TrainConfig[Any], remat: str) -> bool:
    """Return whether a config's table has the activations that a policy names."""
    names = remat.partition(":")[2].split(",") if ":" in remat else []
    return set(names) <= {name for name, _ in config.rules.activations}


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def _flags(settings: Settings) -> dict[str, str]:
    """Return flag → value on a command line."""
    mesh, slices = settings["mesh"].sizes, settings["slices"].sizes
    shown = {axis for axis, size in mesh.items() if size > 1} | {"data", "fsdp", "tensor"}
    flags = {f"mesh.{axis}": str(mesh[axis]) for axis in AXES if axis in shown}
    flags |= {f"slices.{axis}": str(count) for axis, count in slices.items() if count > 1}
    flags |= {"zero": str(settings["zero"]), "remat": settings["remat"], "accumulate": str(settings["accumulate"])}
    if mesh["pipe"] > 1:
        pipeline = settings["pipeline"]
        flags |= {"pipeline.schedule": pipeline.schedule, "pipeline.microbatches": str(pipeline.microbatches)}
        flags |= {"pipeline.chunks": str(pipeline.chunks)} if pipeline.chunks else {}
    return flags | ({"offload": " ".join(settings["offload"])} if settings["offload"] else {})


def slice_sizes(topology: Topology) -> Iterator[Topology]:
    """Yield machines of a topology's kind, the smallest first."""
    if topology.platform == "cuda":
        for hosts in (2**n for n in range(10)):
            yield parse_topology(f"{topology.kind}:{hosts}x8")
        return
    shape, limit = [2, 2] if topology.chip.dims == 2 else [2, 2, 1], topology.chip.max_chips
    while math.prod(shape) <= limit:
        yield parse_topology(f"{topology.kind}:{'x'.join(map(str, shape))}")
        smallest = min(range(len(shape)), key=lambda dim: (shape[dim], -dim))
        shape[smallest] = 2 * shape[smallest]
        shape.sort()


def largest_batch(config: TrainConfig[Any], topology: Topology, mesh: AnyMesh) -> tuple[int, int]:
    """Return the largest batch that fits with a config's settings, and its bytes on a device; 0 if none fits.

    It is a multiple of the smallest batch that the mesh and the microbatches divide.
    """
    check_config(make_setup(config, mesh))
    microbatches = config.accumulate * count_microbatches(config, build_schedule(config, mesh))
    least = math.prod(mesh.shape[axis] for axis in BATCH_AXES) * microbatches

    def memory(times: int) -> int:
        data = dataclasses.replace(config.data, batch=least * times)
        setup = make_setup(dataclasses.replace(config, data=data), mesh)
        check_step(setup)
        return estimate_step(setup, topology.platform).total

    limit = topology.memory or 0
    if (found := memory(1)) > limit:
        return 0, found
    low, high = 1, 2
    while (more := memory(high)) <= limit:
        low, high, found = high, 2 * high, more
    while high - low > 1:
        middle = (low + high) // 2
        more = memory(middle)
        low, high, found = (middle, high, more) if more <= limit else (low, middle, found)
    return least * low, found
