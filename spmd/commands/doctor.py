"""`spmd doctor`."""

import dataclasses
import json

import jax

from spmd.commands.parsing import LaunchFields, parse_flags
from spmd.distributed.cluster_env import LaunchArgs
from spmd.distributed.initialize import initialize
from spmd.doctor.diagnosis import diagnose
from spmd.doctor.text import format_diagnosis
from spmd.errors import ConfigError, check_fields, check_local
from spmd.observe.spinner import spinner
from spmd.observe.wrap_text import wrap_to_terminal
from spmd.sharding.mesh import MeshShape, mesh_of


@dataclasses.dataclass(frozen=True)
class DoctorCommand:
    """Examine a machine before a run: drivers, network, memory, folder, and measured speeds.

    Start it as the run would be started, by srun, mpirun or on every worker. Every device computes
    alone, every mesh axis runs its collectives, and processes exchange data in pairs; slow devices,
    axes and links are named. Exit with 1 if there is a problem. It takes about a minute.
    """

    mesh: MeshShape = MeshShape(fsdp=-1)
    """Mesh of the run; each axis of more than one device is measured."""
    slices: MeshShape = MeshShape()
    """Parts of each axis that the slow network connects."""
    out: str = ""
    """Run folder that all processes must see."""
    devices: int = 0
    """CPU devices to simulate in each process; 0 uses the real ones."""
    megabytes: int = 64
    """MiB of the arrays that collectives send."""
    json: bool = False
    """Print one JSON object."""
    launch_args: LaunchFields = LaunchArgs()


def run_doctor(arguments: list[str]) -> int:
    """Print the diagnosis; return the exit code."""
    command: DoctorCommand = parse_flags(DoctorCommand, arguments, "spmd doctor")
    problems = check_fields(command, {"megabytes": "at least 1"})
    problems += check_local("out", command.out)
    if problems:
        raise ConfigError("Nothing can be measured:", problems)
    initialize(command.devices, command.launch_args)
    slices = command.slices.sizes
    mesh = mesh_of(command.mesh, jax.devices(), slices)
    with spinner("measuring devices, axes and links"):
        found = diagnose(mesh, slices, command.out, command.megabytes * 2**20)
    if jax.process_index() == 0:
        if command.json:
            print(json.dumps(found.to_json()))
        else:
            print(wrap_to_terminal(format_diagnosis(found)))
    return min(len(found.problems), 1)
