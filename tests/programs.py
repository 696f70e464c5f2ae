"""What is asked of compiled programs, in a process of its own: with XLA's optimisations, or for absent hardware."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).resolve().parent.parent
FAST_TO_COMPILE = "--xla_cpu_parallel_codegen_split_count=1"
"""Flags for XLA with which programs compile fastest on a CPU, in which nothing but their numbers is looked at."""
if jax.__version_info__ < (0, 11):  # later ones have one kind of code; XLA ends the process for a flag that it lost
    FAST_TO_COMPILE += " --xla_cpu_use_fusion_emitters=false"


def run_script(script: str, *arguments: str, timeout: float = 1500) -> Any:
    """Runs a script at the root of the repository: the JSON value in the last line it prints, or None."""
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    printed = done.stdout.splitlines()
    return json.loads(printed[-1]) if printed else None
