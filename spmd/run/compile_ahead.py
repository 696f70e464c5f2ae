"""Compilation of a config's step before a run, without the machine."""

from pathlib import Path
from typing import NamedTuple

from spmd.analysis.topology import Topology, missing_extra
from spmd.distributed.native_output import REMATERIALIZATION, compiler_log
from spmd.errors import ConfigError, Problem
from spmd.observe.spinner import spinner
from spmd.run.compiled_step import NONE, step_key, write_bytes
from spmd.run.run_dir import COMPILED_STEP, RunDir
from spmd.run.step_source import ConfigSource
from spmd.storage.address import Location
from spmd.training.compilation_cache import compilation_cache
from spmd.training.serialized_step import NotSerializableError, serialize_step


class Written(NamedTuple):
    """File of a compiled step, and its size in bytes."""

    path: Location
    size: int


def compile_ahead(
    source: ConfigSource, topology: Topology, folder: RunDir, file: Path | None
) -> Written:
    """Compile the step of a config for a machine, and write it for a run.

    It is written into the run folder, or to the config's `compiled_step`.

    Args:
        file: The file that defines the config.

    Raises:
        ConfigError: There is no compiler for the machine, or its programs cannot be written.
        MemoryError: The compiler finds no room for the step.
    """
    config = source.config
    if config.compiled_step == NONE:
        problem = Problem("compiled_step", "is none", fix="a file, or nothing for the run folder's")
        raise ConfigError("There is nowhere to write the step:", [problem])
    if topology.platform == "cuda":
        what = "are tuned by XLA on the GPU itself"
        fix = "spmd train writes its compiled step into the run folder, for its restarts"
        problem = Problem(f"programs for {topology}", what, fix=fix)
        raise ConfigError("The step cannot be compiled ahead:", [problem])
    absent = missing_extra(topology)
    if absent:
        raise ConfigError("The step cannot be compiled:", [absent])
    slices = source.on(source.planned_mesh(), topology.chip.device_kind).slices
    # A program that was read back from a cache cannot be written.
    with (
        spinner(f"compiling for {topology}"),
        compilation_cache(None),
        compiler_log(without=REMATERIALIZATION),
    ):
        planned = source.on_topology(topology, slices)
        key = step_key(planned.step, planned.batch, config, file)
        try:
            data = serialize_step(planned.step, planned.batch, key)
        except NotSerializableError as error:
            problem = Problem("compiled_step", f"is not written: {error}")
            raise ConfigError("The step cannot be compiled ahead:", [problem]) from None
    if config.compiled_step:
        path = Path(config.compiled_step).expanduser()
        write_bytes(path, data)
        return Written(path, len(data))
    write_bytes(folder.fetch_compiled_step(), data)  # the upload replaces what was fetched
    folder.upload_compiled_step()
    return Written(folder.location / COMPILED_STEP, len(data))
