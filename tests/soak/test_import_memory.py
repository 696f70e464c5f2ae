"""What an import takes beside the shards, and beside reading alone, as the benchmark measures it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_an_import_takes_no_more_than_its_largest_tensor(dtype):
    """Of a checkpoint of 1 GiB whose stacks of layers are far larger than that; a whole copy of one would be seen.

    So it is for what reads the shards, and for the command, which then writes a checkpoint of them.
    """
    command = [
        sys.executable,
        ROOT / "benchmarks" / "import_speed.py",
        "--gib",
        "1",
        "--repeats",
        "1",
        "--command",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--repeats", "1", "--command"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    over = json.loads(done.stdout.splitlines()[-1])["over_shards_of_largest_tensor"]
    assert over["ours"] < 1.25
    assert over["command"] < 1.25
