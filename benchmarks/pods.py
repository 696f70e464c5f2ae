"""What the compilers of absent pods make of a train step, beside bars and beside MaxText's program for the same job.

    python -m benchmarks.pods
    python -m benchmarks.pods --only 8b 8b-tensor --json pods.json --maxtext maxtext/bin/python

Each job is compiled by `spmd plan --compile` in a process of its own: bf16, AdamW, full remat. A
figure is of one device: GiB of temporaries and arguments; GiB on the wire in one step, as
`spmd.analysis.collective_record` counts them (an all-reduce is twice its buffer); and the seconds
of the cycles that the compiler estimates for a step, without collectives and Pallas kernels.

MaxText's figures are stored, in up to four forms (`FORMS`); `--maxtext` compiles its programs anew
and reads them with the same readers. The exit code is 1 if a bar is missed, else 2 if a job was not
compiled.
"""

import argparse
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd.analysis.collective_audit import audit_collectives
from spmd.analysis.cycles import count_cycles
from spmd.analysis.hlo import parse
from spmd.analysis.topology import Topology, compiler_versions, missing_extra, parse_topology
from spmd.distributed.xla_flags import PRESET, flags_for
from spmd.run.step_time import program_timeline
from spmd.sharding.mesh import MeshShape, abstract_mesh

GIB = 2**30
ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Figures:
    """Figures of one program, or bars for them; None where there is none.

    Attributes:
        temporaries: GiB.
        gathered: GiB of all-gathers.
        reduced: GiB of all-reduces and reduce-scatters.
        sent: GiB of all collectives. Permutes of a matmul in windows are gathers and reductions,
            and only here.
        compute: Seconds.
        arguments: GiB of the training state and the batch.
        exchanged: GiB of the buffers of all-to-alls, ragged or not.
        routed: GiB of tokens in them with a balanced router, which leaves the rest of ragged buffers
            empty.
        exposed: Seconds of communication that nothing hides, by the program's schedule.
        step: Seconds of the step, by the program's schedule; none for GPUs.
    """

    temporaries: float | None = None
    gathered: float | None = None
    reduced: float | None = None
    sent: float | None = None
    compute: float | None = None
    arguments: float | None = None
    exchanged: float | None = None
    exposed: float | None = None
    step: float | None = None
    routed: float | None = None


_SECONDS = ("compute", "exposed", "step")
UNITS = {
    field.name: "s" if field.name in _SECONDS else "GiB" for field in dataclasses.fields(Figures)
}


@dataclasses.dataclass(frozen=True)
class Job:
    """A config on a machine.

    Attributes:
        maxtext: Form of MaxText's step (`FORMS`) → its figures, where it was compiled.
        maxtext_arguments: Of its `train_compile`, besides the common ones; empty where it is not
            compared.
        sequences: For each device.
        tokens: In a sequence.
        experts: Of a token; 0 for a dense model.
        model: Fields of the model that differ from the config's.
    """

    name: str
    config: str
    topology: str
    mesh: Mapping[str, int]
    bars: Figures
    maxtext: Mapping[str, Figures] = dataclasses.field(default_factory=dict)
    maxtext_arguments: Sequence[str] = ()
    sequences: float = 1
    tokens: int = 8192
    experts: int = 0
    model: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def machine(self) -> Topology:
        """The machine."""
        return parse_topology(self.topology)

    @property
    def copies(self) -> int:
        """Copies of a device's tokens for experts."""
        return round(self.sequences * self.tokens * self.experts)

    @property
    def arguments(self) -> list[str]:
        """Of `spmd plan`."""
        sizes = {"data": 1, "tensor": 1, **self.mesh}
        flags = {f"mesh.{axis}": size for axis, size in sizes.items()}
        batch = round(self.sequences * self.machine.devices)
        flags |= {"data.batch": batch, "data.sequence": self.tokens}
        flags |= {
            "precision": "bf16",
            "remat": "full",
            **{f"model.{name}": n for name, n in self.model.items()},
        }
        given = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
        return ["plan", self.config, "--topology", self.topology, *given, "--compile", "--json"]


# MaxText 0.2.5 with JAX and jaxlib 0.12.0.1 and libtpu 0.0.50 (Python 3.12, `pip install
# 'maxtext[tpu]==0.2.5' 'jax[tpu]==0.12.0.1'`), 22 and 29 November 2026: `python -m benchmarks.pods
# --maxtext PYTHON --json FILE`. It reduces gradients in bfloat16. Its machines are named by their
# cores, of which a v5p has two.
_SPLIT = "allow_split_physical_axes=true"  # without it MaxText refuses two axes on these machines
# Most bars are within 3 % of what libtpu 0.0.42.1 makes of a step.
JOBS = (
    Job(
        "8b",
        "llama3-8b",
        "v5e:16x16",
        {"fsdp": 256},
        Figures(
            temporaries=6.27, gathered=26, reduced=14.4, compute=2.72, exposed=0.167, step=3.76
        ),
        {
            "default": Figures(8.085, 25.98, 29.97, 56.07, 3.393),
            "equal flags": Figures(
                temporaries=8.085,
                gathered=25.98,
                reduced=29.97,
                sent=56.08,
                compute=2.689,
                arguments=0.354,
                exposed=0.237,
                step=3.895,
            ),
            "recipe": Figures(
                temporaries=8.084,
                gathered=25.98,
                reduced=29.97,
                sent=56.08,
                compute=2.776,
                arguments=0.354,
                exposed=0.237,
                step=3.955,
            ),
            "recipe, head in parts": Figures(
                temporaries=6.617,
                gathered=40.66,
                reduced=43.67,
                sent=84.70,
                compute=2.831,
                arguments=0.354,
                exposed=0.449,
                step=4.225,
            ),
        },
        ("compile_topology=v5e-256", "model_name=llama3-8b", "ici_fsdp_parallelism=256"),
    ),
    Job(
        "8b-v6e",
        "llama3-8b",
        "v6e:16x16",
        {"fsdp": 256},
        Figures(temporaries=10.5, gathered=27.8, reduced=14.4, compute=1.61, step=2.49),
        {
            "equal flags": Figures(
                temporaries=14.455,
                gathered=26.99,
                reduced=14.96,
                sent=42.20,
                compute=1.633,
                arguments=0.354,
                exposed=0.0174,
                step=2.545,
            ),
            "recipe": Figures(
                temporaries=14.455,
                gathered=26.99,
                reduced=14.96,
                sent=42.20,
                compute=1.773,
                arguments=0.354,
                exposed=0.0174,
                step=2.667,
            ),
        },
        maxtext_arguments=(
            "compile_topology=v6e-256",
            "model_name=llama3-8b",
            "ici_fsdp_parallelism=256",
        ),
        sequences=2,
    ),
    Job(
        "70b",
        "llama3-70b",
        "v5p:4x4x8",
        {"fsdp": 128},
        Figures(temporaries=22.9, gathered=257, reduced=133, compute=10.3, step=13.56),
        {
            "default": Figures(28.16, 256.96, 258.92, 516.1, 11.87),
            "equal flags": Figures(
                temporaries=26.11,
                gathered=256.96,
                reduced=131.42,
                sent=388.63,
                compute=10.18,
                arguments=6.175,
                exposed=0.0169,
                step=13.485,
            ),
        },
        ("compile_topology=v5p-256", "model_name=llama3-70b", "ici_fsdp_parallelism=128"),
    ),
    Job(
        "8b-tensor",
        "llama3-8b",
        "v5e:16x16",
        {"fsdp": 64, "tensor": 4},
        Figures(temporaries=7.67, sent=109.3, compute=3.06, step=6.08),
        {
            "default": Figures(9.516, 47.25, 29.41, 109.3, 3.373),
            "equal flags": Figures(
                temporaries=9.6131,
                gathered=47.254,
                reduced=29.621,
                sent=109.72,
                compute=3.0842,
                arguments=0.35201,
                exchanged=0.0625,
                exposed=2.056,
                step=6.1194,
            ),
        },
        (
            "compile_topology=v5e-256",
            "model_name=llama3-8b",
            "ici_fsdp_parallelism=64",
            "ici_tensor_parallelism=4",
            _SPLIT,
        ),
    ),
    Job(
        "70b-tensor",
        "llama3-70b",
        "v5p:4x4x8",
        {"fsdp": 32, "tensor": 4},
        Figures(temporaries=24.4, sent=556, compute=10.4, step=15.0),
        {
            "default": Figures(31.265, 225.24, 52.36, 580.6, 12.64),
            "equal flags": Figures(
                temporaries=30.282,
                gathered=305.24,
                reduced=233.97,
                sent=539.47,
                compute=10.318,
                arguments=6.1643,
                exchanged=0.125,
                exposed=0.46977,
                step=14.262,
            ),
        },
        (
            "compile_topology=v5p-256",
            "model_name=llama3-70b",
            "ici_fsdp_parallelism=32",
            "ici_tensor_parallelism=4",
            _SPLIT,
        ),
    ),
    Job(
        "405b",
        "llama3-405b",
        "v5p:8x8x16",
        {"fsdp": 1024},
        Figures(temporaries=61.2, gathered=1500.3, reduced=1407, compute=58.3, step=74.4),
        {
            "default": Figures(63.60, 1500.2, 1504.1, 3004.8, 70.41),
            "equal flags": Figures(
                temporaries=69.21,
                gathered=1500.2,
                reduced=1370.2,
                sent=2870.9,
                compute=58.619,
                arguments=4.4766,
                exchanged=0.5,
                exposed=2.8033,
                step=74.451,
            ),
        },
        ("compile_topology=v5p-2048", "model_name=llama3.1-405b", "ici_fsdp_parallelism=1024"),
    ),
    Job(
        "mixtral",
        "mixtral-8x7b",
        "v5p:4x4x8",
        {"fsdp": 16, "expert": 8},
        Figures(temporaries=22.9, arguments=4.1, exchanged=47.2, compute=2.52, step=4.66),
        {
            "default": Figures(29.71, 28.76, 15.99, 165.0, 3.729, 4.081, 120.3),
            "equal flags": Figures(
                temporaries=34.208,
                gathered=28.756,
                reduced=13.247,
                sent=162.25,
                compute=3.6146,
                arguments=4.0812,
                exchanged=120.25,
                exposed=2.9834,
                step=8.1887,
                routed=24.25,
            ),
        },
        (
            "compile_topology=v5p-256",
            "model_name=mixtral-8x7b",
            "ici_fsdp_parallelism=16",
            "ici_expert_parallelism=8",
            _SPLIT,
        ),
        sequences=4,
        tokens=4096,
        experts=2,
    ),
    # Of DeepSeek-V3's size, with Mixtral's layers on both sides: 256 experts, 8 a token. With four
    # sequences a device MaxText needs 250 GiB of temporaries, for it has room for the worst load.
    Job(
        "deepseek",
        "mixtral-8x7b",
        "v5p:8x8x16",
        {"fsdp": 16, "expert": 64},
        Figures(
            temporaries=19.9,
            gathered=82.4,
            reduced=42.0,
            sent=278.9,
            compute=4.16,
            arguments=7.657,
            exchanged=154.5,
            step=9.46,
        ),
        {
            "default": Figures(90.89, 94.96, 65.59, 2803, 31.76, 7.658, 2642),
            "equal flags": Figures(
                temporaries=83.74,
                gathered=94.947,
                reduced=65.591,
                sent=2802.7,
                compute=31.542,
                arguments=7.658,
                exchanged=2642.2,
                exposed=67.531,
                step=110.97,
                routed=80.172,
            ),
        },
        (
            "compile_topology=v5p-2048",
            "ici_fsdp_parallelism=16",
            "ici_expert_parallelism=64",
            _SPLIT,
            "decoder_block=mixtral",
            "num_experts=256",
            "num_experts_per_tok=8",
            "base_emb_dim=7168",
            "base_num_query_heads=64",
            "base_num_kv_heads=32",
            "head_dim=112",
            "base_mlp_dim=2048",
            *("base_moe_mlp_dim=2048", "base_num_decoder_layers=61", "vocab_size=129280"),
            *("enable_dropout=False", "logits_via_embedding=False"),
        ),
        tokens=4096,
        experts=8,
        model={
            **{
                "vocab": 129_280,
                "d-model": 7168,
                "layers": 61,
                "heads": 64,
                "kv-heads": 32,
                "d-ff": 2048,
            },
            **{"router.experts": 256, "router.top-k": 8},
        },
    ),
    # The published model: latent attention, three dense layers, a shared expert and biases of routers.
    # By its own rules MaxText splits the ranks 1,536 and 512 of the latents over fsdp=16 ×
    # expert=64, which does not divide them. Its buffers are as large as ours, and drop what they do
    # not hold; with room for the worst load it needs 85 GiB of temporaries and 31.8 s. With libtpu
    # 0.0.50 ours has 3.14 s of cycles.
    Job(
        "deepseek-v3",
        "deepseek-v3",
        "v5p:8x8x16",
        {"fsdp": 16, "expert": 64},
        Figures(
            temporaries=22.5,
            gathered=103.7,
            reduced=53.3,
            sent=304,
            compute=5.2,
            arguments=7.40,
            exchanged=147,
            step=11.1,
        ),
        {"default": Figures(22.78, 117.17, 80.10, 368.7, 4.944, 9.705, 171.4)},
        (
            "compile_topology=v5p-2048",
            "model_name=deepseek3-671b",
            "ici_fsdp_parallelism=16",
            "ici_expert_parallelism=64",
            _SPLIT,
            *("n_routing_groups=8", "topk_routing_group=4"),
            *("rule:q_lora=fsdp", "rule:kv_lora=fsdp", "ragged_buffer_factor=1.25"),
        ),
        tokens=4096,
        experts=8,
    ),
    # MaxText's ragged all-to-all is refused by the compiler ("limited ICI routing"). Its figures
    # are with capacities of 1.25, which drop tokens: sparse_matmul=False megablox=False.
    Job(
        "mixtral-v5e",
        "mixtral-8x7b",
        "v5e:16x16",
        {"fsdp": 32, "expert": 8},
        Figures(
            temporaries=8.2,
            gathered=27.2,
            reduced=24.6,
            sent=64.8,
            compute=2.97,
            arguments=2.05,
            step=4.46,
        ),
        {"default": Figures(13.45, 197.7, 108.7, 306.6, 4.263, 2.042, 0.0625)},
        (
            *("compile_topology=v5e-256", "model_name=mixtral-8x7b", "ici_fsdp_parallelism=32"),
            "ici_expert_parallelism=8",
            _SPLIT,
            "sparse_matmul=False",
            "megablox=False",
            "capacity_factor=1.25",
        ),
        tokens=4096,
        experts=2,
    ),
    # One sequence for each 8 devices; a ring has 93.8 s of cycles.
    Job(
        "8b-long",
        "llama3-8b",
        "v5p:4x4x8",
        {"fsdp": 16, "sequence": 8},
        Figures(
            temporaries=14.2, gathered=62.4, reduced=31.7, compute=3.01, arguments=0.725, step=12.6
        ),
        sequences=1 / 8,
        tokens=131_072,
    ),
    Job(
        "mixtral-h100",
        "mixtral-8x7b",
        "h100:16x8",
        {"fsdp": 16, "expert": 8},
        Figures(temporaries=14.5, arguments=4.1, exchanged=100),
        sequences=4,
        tokens=4096,
        experts=2,
    ),
    Job(
        "70b-h100",
        "llama3-70b",
        "h100:16x8",
        {"fsdp": 128},
        Figures(temporaries=20.91, gathered=257, reduced=131),
    ),
)


def routed_bytes(records: Sequence[Mapping[str, Any]], copies: int) -> float:
    """Return the bytes of tokens in all-to-alls with a balanced router.

    A ragged one has room for more rows than the copies of a device's tokens.
    """
    total = 0.0
    for record in records:
        if record["kind"] == "all-to-all":
            total += record["bytes"]
        elif record["kind"] == "ragged-all-to-all":
            *rows, _ = map(int, re.findall(r"\d+", record["operand"].partition("[")[2]))
            total += record["bytes"] * min(1.0, copies / math.prod(rows))
    return total


def figures(
    memory: Mapping[str, int],
    records: Sequence[Mapping[str, Any]],
    seconds: float | None,
    exposed: float | None,
    step: float | None,
    copies: int,
) -> Figures:
    """Return the figures of a program.

    Args:
        records: Of collectives, from `CollectiveAudit.to_json`.
        seconds: Of the cycles.
        exposed: Seconds of collectives that nothing hides.
        step: Predicted seconds.
        copies: Copies of a device's tokens for experts.
    """

    def sent(*kinds: str) -> float:
        return (
            sum(record["bytes"] for record in records if not kinds or record["kind"] in kinds) / GIB
        )

    return Figures(
        temporaries=memory["temporaries"] / GIB,
        gathered=sent("all-gather"),
        reduced=sent("all-reduce", "reduce-scatter"),
        sent=sent(),
        compute=seconds,
        arguments=memory["arguments"] / GIB,
        exchanged=sent("all-to-all", "ragged-all-to-all"),
        exposed=exposed,
        step=step,
        routed=routed_bytes(records, copies) / GIB if copies else None,
    )


def run(command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a process to its end; it may fail."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    given = {**os.environ, "PYTHONPATH": paths, **environment}
    given.pop("TPU_LIBRARY_PATH", None)  # JAX sets it to the library of this interpreter
    return subprocess.run(command, env=given, capture_output=True, text=True, check=False)


def measure(job: Job) -> Figures:
    """Compile the job's step with this package.

    Raises:
        RuntimeError: It was not compiled; the message is the end of what the command says.
    """
    done = run([sys.executable, "-m", "spmd_command", *job.arguments])
    plan = json.loads(done.stdout) if done.stdout else {}
    if "collectives" not in plan:
        raise RuntimeError(done.stderr[-2000:] or "the compiler refuses the step")
    time = plan.get("time", {})
    exposed = None
    if time:
        exposed = sum(each["exposed"] for each in time["collectives"])
    return figures(
        plan["memory"]["compiled"],
        plan["collectives"],
        plan.get("compute", {}).get("seconds"),
        exposed,
        time.get("seconds"),
        job.copies,
    )


def our_flags(job: Job) -> str:
    """Return the flags of our steps on the job's chip, as MaxText takes them."""
    chip = job.machine.chip
    flags = flags_for((PRESET,), chip.platform, chip.device_kind, crossing=False)
    return " ".join(f"--{flag}" for flag in flags)


_BLOCKS = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute")
RECIPE = (*(f"sa_block_{name}=2048" for name in _BLOCKS), "sa_use_fused_bwd_kernel=True")
"""Attention of Google's recipes of Llama 3.1 8B and 70B (tpu-recipes, training/trillium, and for v5e
benchmarks/maxtext_v5e_model_configs.py of MaxText)."""
FORMS = ("default", "equal flags", "recipe", "recipe, head in parts")
"""MaxText's step with the compiler's default flags, with the flags of ours, with `RECIPE` too, and
with a head in eight parts besides."""


def measure_maxtext(job: Job, python: str, form: str) -> Figures:
    """Compile the job's step with MaxText, and read it as ours is read; errors as of `measure`."""
    flags = ""
    if form != "default":
        flags = our_flags(job)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "step.json")
        common = ["compile_topology_num_slices=1", f"per_device_batch_size={job.sequences}"]
        common += [f"max_target_length={job.tokens}"]
        common += [
            "remat_policy=full",
            "enable_checkpointing=false",
            "dataset_type=synthetic",
            "run_name=pods",
        ]
        if flags:
            common += [f"compile_xla_flags={flags}"]
        if form.startswith("recipe"):
            common += RECIPE
        if form.endswith("in parts"):
            common += ["num_vocab_tiling=8"]
        common += [f"base_output_directory={folder}", *job.maxtext_arguments]
        script = [python, str(Path(__file__).with_name("maxtext_step.py")), str(file)]
        done = run([*script, *common], JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", PYTHONPATH="")
        if not file.exists():
            raise RuntimeError(done.stderr[-2000:])
        found = json.loads(file.read_text(encoding="utf-8"))
    shape = MeshShape(**job.mesh)
    program, mesh = parse(found["text"]), abstract_mesh(shape)
    cycles, clock = count_cycles(program, {}), job.machine.chip.clock
    audit = audit_collectives(program, mesh, backend=job.machine.platform)
    line = program_timeline(program, job.machine, shape, {})
    return figures(
        found["memory"],
        audit.to_json()["collectives"],
        cycles and cycles.to_json(clock)["seconds"],
        sum(line.exposed.values()),
        sum(line.spent.values()),
        job.copies,
    )


def measure_forms(job: Job, python: str, forms: Sequence[str]) -> dict[str, Figures]:
    """Return MaxText's step in the forms that its compiler takes, and print why it does not."""
    found = {}
    for form in forms:
        try:
            found[form] = measure_maxtext(job, python, form)
        except RuntimeError as error:
            print(f"MaxText, {form}: not compiled: {error}", flush=True)
    return found


def missed(found: Figures, bars: Figures) -> list[str]:
    """Return each figure that is above its bar, or unknown."""
    wrong = []
    for name, bar in dataclasses.asdict(bars).items():
        value = getattr(found, name)
        if bar is not None and (value is None or value > bar):
            wrong.append(f"{name} is {'unknown' if value is None else f'{value:.5g}'}, bar {bar:g}")
    return wrong


def line(label: str, row: Figures) -> str:
    cells = (
        "" if value is None else f"{value:.5g} {UNITS[name]}"
        for name, value in dataclasses.asdict(row).items()
    )
    return f"{label:32}" + "".join(f"{cell:>13}" for cell in cells)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[job.name for job in JOBS],
        metavar="NAME",
        help="of these jobs",
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument(
        "--maxtext", metavar="PYTHON", help="interpreter of an environment with MaxText"
    )
    parser.add_argument(
        "--forms", nargs="+", choices=FORMS, default=FORMS, help="of MaxText's step, to compile"
    )
    options = parser.parse_args()
    rows, code = [], 0
    print(f"{'of one device':32}" + "".join(f"{name:>13}" for name in UNITS))
    for job in JOBS:
        if options.only and job.name not in options.only:
            continue
        sizes = " × ".join(f"{axis}={size}" for axis, size in job.mesh.items())
        print(f"\n{job.name}: {job.config} on {job.topology}, {sizes}", flush=True)
        row: dict[str, Any] = {
            "job": job.name,
            "versions": compiler_versions(),
            "bars": dataclasses.asdict(job.bars),
        }
        try:
            if absent := missing_extra(job.machine):
                raise RuntimeError(str(absent))
            found = measure(job)
            row |= {"ours": dataclasses.asdict(found), "missed": missed(found, job.bars)}
            rows.append(row)
            print(line("ours", found), line("bar", job.bars), sep="\n", flush=True)
            if row["missed"]:
                print(f"missed: {'; '.join(row['missed'])}", flush=True)
                code = 1
            theirs = dict(job.maxtext)
            if options.maxtext and job.maxtext_arguments:
                theirs |= measure_forms(job, options.maxtext, options.forms)
            row["maxtext"] = {form: dataclasses.asdict(each) for form, each in theirs.items()}
            for form, each in theirs.items():
                print(line(f"MaxText, {form}", each), flush=True)
        except RuntimeError as error:
            print(f"not compiled: {error}", flush=True)
            code = code or 2
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
