"""`spmd compile`."""

import dataclasses
import time
from typing import Generic

from spmd.analysis.topology import parse_topology
from spmd.commands.parsing import ConfigFields, parse_command
from spmd.errors import ConfigError, Problem
from spmd.observe.metrics import human_duration
from spmd.run.compile_ahead import compile_ahead
from spmd.run.config import M
from spmd.run.step_source import ConfigSource
from spmd.run.train import run_dir
from spmd.tree import human_bytes


@dataclasses.dataclass(frozen=True)
class CompileCommand(Generic[M]):
    """Compile the config's step for a machine that need not be present, and write it.

    The file is DIR/compiled_step of --out DIR, or that of --compiled-step FILE. `spmd train` with the
    same config, flags and versions loads it there, and begins without tracing and compiling.
    """

    config: ConfigFields
    topology: str = ""
    """Machine of the run, such as v5e:16x16, v4-32, h100:16x8 or cpu:8."""


def run_compile(arguments: list[str]) -> int:
    """Run `spmd compile`; return the exit code, 3 if the step does not fit."""
    command, file = parse_command(CompileCommand, arguments, "compile")
    if not command.topology:
        problem = Problem("--topology", "is missing", fix="--topology v5p:4x4x8, the run's machine")
        raise ConfigError("The step is compiled for a machine:", [problem])
    topology = parse_topology(command.topology)
    source = ConfigSource(command.config).with_devices(topology.devices)
    began = time.perf_counter()
    try:
        written = compile_ahead(source, topology, run_dir(command.config, file), file)
    except MemoryError as error:
        print(f"the compiler refuses the step: {error}")
        return 3
    seconds = human_duration(time.perf_counter() - began)
    print(f"compiled for {topology} in {seconds}")
    print(f"written to {written.path} ({human_bytes(written.size)})")
    return 0
