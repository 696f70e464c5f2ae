"""What is asked of compiled programs, in a process of its own: with XLA's optimisations, or for absent hardware."""

import gc
import json
import os
import subprocess
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FAST_XLA = "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_collective_call_terminate_timeout_seconds=300"
"""Flags for XLA with which it makes CPU code fastest: they change what it fuses, not what it computes or sends. And a
machine that stands still for 40 seconds, XLA's default, ends no process."""
# later ones have one kind of code; XLA ends the process for a flag that it lost
if version("jax").startswith("0.10."):
    FAST_XLA += " --xla_cpu_use_fusion_emitters=false"
FAST_TO_COMPILE = {
    "XLA_FLAGS": FAST_XLA,
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    # One line of source for each operation; a kept program with other lines is another one.
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "1",
    "JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY": "1",
}
"""Variables with which programs are made fastest, and kept where there is a folder for them. Before XLA makes machine
code of a program, it optimises it as ever."""

HEEDING_INTERRUPTS = [
    sys.executable,
    "-c",
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.executable, sys.argv[1:])",
]
"""Python that becomes the program of its arguments, and does not ignore interrupts as what a background job of a shell
starts does. The first argument is a name."""

LITTLE_EFFORT = {"JAX_EXEC_TIME_OPTIMIZATION_EFFORT": "-1.0"}
"""With it, the TPU's compiler searches less for the fastest program: five times sooner done with a model of 100 M
parameters. Where arrays are kept and what is sent stay as planned; temporaries can be larger."""


def forget_programs() -> None:
    """Forget compiled programs where there are many.

    Each has mappings of memory, of which Linux allows a process 65,530, and XLA aborts without one.
    """
    import jax  # after its variables are set

    mappings = Path("/proc/self/maps")
    if mappings.exists() and len(mappings.read_bytes().splitlines()) > 15_000:
        jax.clear_caches()
        gc.collect()


def run_script(script: str, *arguments: str, timeout: float = 1500, **environment: str) -> Any:
    """Runs a script at the root of the repository: the JSON value in the last line it prints, or None."""
    # audits read whole stacks
    environment = {**os.environ, "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "10", **environment}
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    printed = done.stdout.splitlines()
    return json.loads(printed[-1]) if printed else None
