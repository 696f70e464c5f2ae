"""Steps compiled for absent TPUs hold, send and compute what they did when they were recorded, by `spmd diff`.

SPMD_UPDATE_GOLDEN=1 records them anew. Both ends of the range of dependencies have records: `make
test` compares with those of the oldest compiler, `make newest` with those of the newest; a compiler
that came later has wider limits.
"""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmd.analysis.compiled_difference import Limits, compare_compiled
from spmd.analysis.topology import compiler_versions
from tests.programs import ROOT
from tests.tiers import soak_but

RECORDED = Path(__file__).with_name("core_figures.json")
STEP = ("--mesh.data", "1", "--mesh.tensor", "1", "--precision", "bf16", "--remat", "full")
CORE = {
    "fsdp": ("demo", *STEP, "--mesh.fsdp", "8"),
    "sequence": ("demo", *STEP, "--mesh.fsdp", "2", "--mesh.sequence", "4"),
    "experts": ("mixtral-tiny", *STEP, "--mesh.fsdp", "4", "--mesh.expert", "2"),
}
"""Name → a config and its flags, on `v5e:2x4`."""
LIMITS = Limits(memory=1, bytes=1, compute=1, exposed=3, time=2, compilation=10_000)
"""The compiler's time is of another machine."""
WIDE = Limits(memory=20, bytes=20, compute=20, exposed=100, time=20, compilation=10_000)
"""For a compiler without a record, beside the record of the newest."""
KEPT = ("mesh", "precision", "compress", "remat", "zero", "xla", "compute", "versions", "topology")


def compile_record(name):
    """The record of a step, without what no total reads."""
    command = [sys.executable, "-m", "spmd_command", "plan", *CORE[name]]
    command += ["--topology", "v5e:2x4", "--compile", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout, done.stderr[-2000:]
    found = json.loads(done.stdout)
    record = {key: found[key] for key in KEPT}
    record["memory"] = {"compiled": found["memory"]["compiled"]}
    record["compilation"] = found["compilation"]
    of_collective = ("kind", "axes", "bytes", "cause")
    record["collectives"] = [
        {key: each[key] for key in of_collective} for each in found["collectives"]
    ]
    record["time"] = {key: found["time"][key] for key in ("seconds", "spent", "collectives")}
    return record


def installed():
    """The installed compiler, as a key of the records."""
    versions = compiler_versions()
    return f"jax {versions['jax']}, libtpu {versions['libtpu']}"


def recorded():
    """Compiler → name → the record."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))


@pytest.mark.compat
@pytest.mark.parametrize("name", soak_but(CORE, "fsdp"))
def test_no_total_grew(name):
    """Of memory, bytes, cycles, exposed communication and the predicted step, within 1 to 3 %."""
    records = recorded()
    found = compile_record(name)
    if os.environ.get("SPMD_UPDATE_GOLDEN"):
        records.setdefault(installed(), {})[name] = found
        text = json.dumps(records, indent=1, sort_keys=True)
        RECORDED.write_text(f"{text}\n", encoding="utf-8")
    before, limits = records.get(installed(), {}).get(name), LIMITS
    if before is None:
        newest = max(key for key, record in records.items() if name in record)
        before, limits = records[newest][name], WIDE
    difference = compare_compiled(before, found, limits)
    assert not difference.is_exceeded, str(difference)


def test_control_a_larger_program_is_above_its_limits():
    """Each total, by 4 %: as of a renamed axis, or of a newer compiler."""
    before = recorded()[installed()]["fsdp"]
    after = copy.deepcopy(before)
    after["memory"]["compiled"]["total"] *= 1.04
    after["compute"]["seconds"] *= 1.04
    after["time"]["seconds"] *= 1.04
    for each in (*after["collectives"], *after["time"]["collectives"]):
        for figure in ("bytes", "exposed"):
            each[figure] = each.get(figure, 0) * 1.04
    above = [total for total in compare_compiled(before, after, LIMITS).totals if total.is_exceeded]
    assert len(above) == 5


def test_the_compiler_of_make_test_is_recorded():
    """Another one has other programs: record them anew, and read what changed."""
    of_this = recorded()[installed()]
    assert of_this.keys() == CORE.keys()
    for record in of_this.values():
        assert record["versions"].items() <= compiler_versions().items()
