"""The shipped configs of eight devices, as the compilers of each chip make them: nothing is sent unasked."""

import json
import sys

import pytest

from benchmarks.pods import run
from spmd.analysis.topology import missing_extra, parse_topology

pytestmark = pytest.mark.soak

MACHINES = ("v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1", "h100:1x8")
CASES = [("mixtral-tiny", name) for name in MACHINES] + [("demo", "v5e:2x4"), ("demo", "h100:1x8")]


@pytest.mark.parametrize(
    ("config", "machine"),
    [case for case in CASES if missing_extra(parse_topology(case[1])) is None],
)
def test_no_warning(config, machine) -> None:
    """With all axes of the config's mesh, of which each has its own collectives."""
    done = run(
        [
            sys.executable,
            "-m",
            "spmd_command",
            "plan",
            config,
            "--topology",
            machine,
            "--compile",
            "--json",
        ]
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["collectives"]
    assert plan["warnings"] == []
