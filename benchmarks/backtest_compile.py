"""Compiled programs of published rows, one process each, kept in a folder.

Rows that differ in the number of slices share the program of one slice: between slices a gradient
is reduced, whose time is added, and slices wait for the slowest.
"""

import dataclasses
import gzip
import hashlib
import json
import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import spmd
from benchmarks.published_rows import Rebuilt, windows
from spmd.analysis.hlo import parse
from spmd.analysis.topology import missing_extra, parse_topology
from spmd.chips import CHIPS, ClosedRates, Rates
from spmd.distributed.initialize import initialize
from spmd.distributed.xla_flags import PRESET, flags_for
from spmd.models.decoder import DecoderConfig, decoder_rules
from spmd.models.transformer import transformer
from spmd.observe.spinner import spin_until_each
from spmd.partition_rules.layouts import split_by_rows
from spmd.run.build import make_setup
from spmd.run.planned_step import compile_text, topology_mesh
from spmd.sharding.mesh import AXES, MeshShape, slice_numbers
from spmd.step_time.network import Network, make_network
from spmd.step_time.program import ProgramSchedule, read_program_schedule
from spmd.step_time.timeline import run_schedule

# say nothing of the program: it is compiled again
_STOPS = (signal.SIGINT, signal.SIGKILL, signal.SIGTERM)
# folders that read programs, and change none
_READERS = ("analysis", "commands", "observe", "step_time")
_MLPS = {"relu": "relu", "gelu": "gelu", "geglu": "geglu", "swiglu": "swiglu"}


@dataclasses.dataclass(frozen=True)
class CompiledRow:
    """Schedule of a row's program on one slice."""

    schedule: ProgramSchedule
    network: Network

    def tokens_per_second(self, job: Rebuilt, rates: Rates) -> float:
        """Return the tokens in a second on one chip."""
        network = dataclasses.replace(self.network, efficiency=rates.network)
        clock = network.topology.chip.clock
        assert clock is not None
        seconds = run_schedule(self.schedule, network, clock, rates).seconds
        if job.topology.slices > 1:
            shards = math.prod(size for axis, size in job.work.mesh.items() if axis != "data")
            group = job.network.axis_group(("data",))
            reduction = job.network.between(
                "all-reduce", job.work.params / shards * job.work.reduced_bytes, group
            )
            seconds += ClosedRates().exposed * reduction  # the rest beside the backward pass
            seconds += job.network.waiting(seconds, rates.straggling)
        return job.tokens_per_second(seconds)


def describe(job: Rebuilt) -> dict[str, Any]:
    """Return what determines the program of one slice, as JSON values."""
    row, extra = job.row, job.row.get("extra") or {}
    topology = job.topology
    slices = job.slices if topology.slices > 1 else dict.fromkeys(AXES, 1)
    mesh = {axis: job.work.mesh[axis] // slices[axis] for axis in AXES}
    tied = bool(extra.get("tied_embeddings"))
    mlp = next(
        (name for word, name in _MLPS.items() if extra.get("mlp", "swiglu").startswith(word)),
        "swiglu",
    )
    shape = {
        name: row[name]
        for name in ("vocab", "d_model", "layers", "heads", "kv_heads", "d_ff", "head_dim")
    }
    # Recipes gather the keys of a sequence, and attend with a kernel; ours for whole sequences is
    # behind an all-to-all.
    context = {"context": "all-to-all"} if mesh["sequence"] > 1 else {}
    return {
        **context,
        "topology": f"{topology.kind}:{'x'.join(map(str, topology.shape))}",
        "model": {
            **shape,
            "mlp": mlp,
            "tied": tied,
            "windows": list(windows(row)),
            "qk_norm": "gemma3" in row["model"],
        },
        "mesh": mesh,
        "sequence": row["seq"],
        "batch": round(job.work.batch / topology.slices),
        "accumulate": job.work.microbatches,
        "remat": job.remat.policy,
        "xla": [
            str(flag)
            for flag in flags_for([PRESET], "tpu", topology.chip.device_kind, crossing=False)
        ],
    }


def compile_rows(
    jobs: Mapping[int, Rebuilt], folder: str, workers: int = 1
) -> tuple[dict[int, CompiledRow], dict[int, str]]:
    """Compile the dense rows of TPUs, several at a time.

    Return number → program, and number → why there is none.

    Programs that are in the folder are not compiled again, nor are those that the compiler refused.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    wanted, others = dict[int, Rebuilt](), dict[int, str]()
    for n, job in jobs.items():
        if job.topology.platform == "tpu" and job.kind == "dense":
            wanted[n] = job
        elif job.topology.platform == "tpu":
            others[n] = f"{job.kind}: only closed forms predict them"
    names = {n: _file(folder, job) for n, job in wanted.items()}
    missing = {
        names[n]: job
        for n, job in wanted.items()
        if not names[n].exists() and not _failed(names[n]).exists()
    }
    with ThreadPoolExecutor(workers) as pool:
        for what in spin_until_each(
            pool.map(_compile, missing, missing.values()), "compiling rows"
        ):
            print(f"compiled {what}", file=sys.stderr, flush=True)
    engine = engine_digest()
    if other := sum(file.exists() and _engine(file) != engine for file in set(names.values())):
        again = f"to compile them again, remove them from {folder}"
        print(f"{other} programs are of another version of this package; {again}", file=sys.stderr)
    programs = {file: _read(file, wanted[n]) for n, file in names.items() if file.exists()}
    failed = {n: f"not compiled: {_why(file)}" for n, file in names.items() if not file.exists()}
    return {n: programs[file] for n, file in names.items() if file in programs}, others | failed


def _compile(file: Path, job: Rebuilt) -> str:
    """Compile a row in a process of its own, and return what it was."""
    about, start = describe(job), time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.backtest_compile", json.dumps(about), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not file.exists() and -done.returncode not in _STOPS:
        reason = done.stderr.strip().splitlines()[-1:] or [
            f"the compiler ended with {done.returncode}"
        ]
        _failed(file).write_text(reason[0], encoding="utf-8")
    what = f"{job.row['model']} for {about['topology']} in {time.perf_counter() - start:.0f} s"
    return what if file.exists() else f"{what}: {_why(file)}"


def engine_digest() -> str:
    """Return a digest of this package's sources, of which a program depends on more than its description."""
    digest = hashlib.sha256()
    # some are links, which `rglob` does not follow
    for folder in sorted(Path(spmd.__file__).parent.iterdir()):
        for source in sorted(folder.rglob("*.py")) if folder.name not in _READERS else ():
            digest.update(source.read_bytes())
    for chip in CHIPS.values():
        # speeds and rates are for predictions alone
        compiled_for = dataclasses.replace(chip, speeds=None, closed=None, compiled=None)
        digest.update(repr(compiled_for).encode())
    return digest.hexdigest()[:16]


def _engine(file: Path) -> str:
    """Return the digest of the sources that a program was compiled from, empty if it is not known."""
    noted = file.with_suffix(".engine")
    return noted.read_text(encoding="utf-8") if noted.exists() else ""


def _why(file: Path) -> str:
    failed = _failed(file)
    return (
        failed.read_text(encoding="utf-8")
        if failed.exists()
        else "stopped, perhaps for its memory: --workers 1"
    )


def _file(folder: str, job: Rebuilt) -> Path:
    text = json.dumps(describe(job), sort_keys=True)
    model = re.sub(r"[^\w.-]", "-", str(job.row["model"]))
    return Path(folder, f"{model}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.hlo.gz")


def _failed(file: Path) -> Path:
    return file.with_suffix(".failed")


def _read(file: Path, job: Rebuilt) -> CompiledRow:
    about = describe(job)
    topology, shape = parse_topology(about["topology"]), MeshShape(**about["mesh"])
    program = parse(gzip.decompress(file.read_bytes()).decode())
    schedule = read_program_schedule(program, shape.sizes, {}, slice_numbers(shape.sizes, {}))
    return CompiledRow(schedule, make_network(topology, shape, {}, job.network.hardware))


def make_config(about: Mapping[str, Any]) -> spmd.TrainConfig[DecoderConfig]:
    """Return the config of a description."""
    model = transformer(**{**about["model"], "windows": tuple(about["model"]["windows"])})
    return spmd.TrainConfig(
        model=model,
        rules=split_by_rows(decoder_rules(model)),
        mesh=MeshShape(**about["mesh"]),
        remat=about["remat"],
        accumulate=about["accumulate"],
        precision="bf16",
        context=about.get("context", "ring"),
        xla=tuple(about["xla"]),
        data=spmd.DataConfig(sequence=about["sequence"], batch=about["batch"]),
    )


def main() -> None:
    """Compile the program of a description, and write its text: `DESCRIPTION FILE`."""
    about, file = json.loads(sys.argv[1]), Path(sys.argv[2])
    topology = parse_topology(about["topology"])
    if absent := missing_extra(topology):
        sys.exit(str(absent))
    initialize(0, target_platform=topology.platform)
    config = make_config(about)
    text = compile_text(
        make_setup(config, topology_mesh(config.mesh, topology, config.slices.sizes))
    )
    partial = file.with_suffix(".partial")
    file.with_suffix(".engine").write_text(engine_digest(), encoding="utf-8")
    partial.write_bytes(gzip.compress(text.encode()))
    partial.rename(file)


if __name__ == "__main__":
    main()
