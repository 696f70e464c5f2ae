"""A real Slurm on one machine: a controller and nodes with loopback addresses of their own, all in one folder.

Needs root, and the Debian packages that `make system` installs.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

PROGRAMS = (
    "slurmctld",
    "slurmd",
    "munged",
    "sbatch",
    "srun",
    "scontrol",
    "squeue",
    "sinfo",
    "scancel",
)
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={port}
SlurmUser=root
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=2
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
SchedulerParameters=sched_interval=1,sched_min_interval=100000,bf_interval=1
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs(programs: tuple[str, ...]) -> list[str]:
    """Those that are not installed."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    return [program for program in programs if shutil.which(program, path=path) is None]


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextlib.contextmanager
def slurm_cluster(
    folder: Path, nodes: int, cpus: int = 1, gpus: int = 0
) -> Iterator[Mapping[str, str]]:
    """Runs a cluster of so many nodes inside the block; the environment in which its commands find it.

    Nodes have as many CPUs and GPUs as they say, but there is no GPU: Slurm counts them only. Two clusters may run at
    the same time: their jobs have other numbers, from which the port of a job's processes follows.
    """
    absent = missing_programs(PROGRAMS)
    assert not absent, f"not installed: {', '.join(absent)}; run `make system` as root"
    assert os.geteuid() == 0, (
        "Slurm's daemons need root here: they start jobs in the name of their owners"
    )
    port, *ports = free_ports(nodes + 1)
    # addresses of the loopback interface, so every name resolves
    names = [f"127.0.0.{i + 1}" for i in range(nodes)]
    host = socket.gethostname()
    gres = f" Gres=gpu:{gpus}" if gpus else ""
    lines = [
        f"NodeName={name} NodeAddr={name} NodeHostname={host} Port={its_port} CPUs={cpus} "
        f"RealMemory=1000{gres}"
        for name, its_port in zip(names, ports, strict=True)
    ]
    (folder / "state").mkdir(parents=True)
    for name in names:
        (folder / f"spool-{name}").mkdir()
    configuration = folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(folder=folder, host=host, port=port, nodes="\n".join(lines))
    )
    if gpus:
        for gpu in range(gpus):
            (folder / f"gpu{gpu}").touch()
        listed = f"Name=gpu File={folder}/gpu[0-{gpus - 1}]\n"
        configuration.with_name("gres.conf").write_text(listed)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    environment = {
        **os.environ,
        "SLURM_CONF": str(configuration),
        "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
    }
    munge = [
        f"--{name}={folder}/munge.{name.split('-')[0]}"
        for name in ("key-file", "socket", "log-file", "pid-file")
    ]
    commands = [
        ["munged", "--foreground", "--force", *munge, f"--seed-file={folder}/munge.seed"],
        ["slurmctld", "-D", "-f", str(configuration)],
        *(["slurmd", "-D", "-N", name, "-f", str(configuration)] for name in names),
    ]
    daemons = []
    try:
        for command in commands:
            output = (folder / f"daemon-{len(daemons)}.txt").open("wb")
            daemons.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
            output.close()
            time.sleep(0.5)
        _wait_until_idle(environment, names, folder)
        yield environment
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                ["scancel", "--user=root"],
                env=environment,
                check=False,
                timeout=10,
                capture_output=True,
            )
            time.sleep(1)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _wait_until_idle(environment: Mapping[str, str], names: list[str], folder: Path) -> None:
    until = time.monotonic() + 30
    idle: set[str] = set()
    while time.monotonic() < until:
        listed = subprocess.run(
            ["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        idle = set(listed.stdout.split())
        if idle == set(names):
            return
        time.sleep(0.25)
    logs = "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in folder.glob("*.log"))
    raise AssertionError(f"of {names} only {sorted(idle)} became idle:\n{logs}")
