"""What is asked of compiled programs, in a process of its own: with XLA's optimisations, or for absent hardware."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).resolve().parent.parent
FAST_TO_COMPILE = "--xla_cpu_parallel_codegen_split_count=1"
"""Flags for XLA with which it makes CPU code fastest; they change neither what is computed nor what is sent."""
if jax.__version_info__ < (0, 11):  # later ones have one kind of code; XLA ends the process for a flag that it lost
    FAST_TO_COMPILE += " --xla_cpu_use_fusion_emitters=false"


def run_script(script: str, *arguments: str, xla_flags: str | None = None, timeout: float = 1500) -> Any:
    """Runs a script at the root of the repository: the JSON value in the last line it prints, or None.

    With `xla_flags=FAST_TO_COMPILE`, XLA optimises programs as ever and takes less time to make machine code of them.
    """
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    environment = os.environ if xla_flags is None else {**os.environ, "XLA_FLAGS": xla_flags}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    printed = done.stdout.splitlines()
    return json.loads(printed[-1]) if printed else None
