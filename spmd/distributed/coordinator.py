"""Address where process 0 coordinates the others, and their meeting there."""

import errno
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from spmd.distributed.cluster_env import split_address
from spmd.distributed.differences import differences
from spmd.distributed.launchers import ProcessGroup
from spmd.distributed.rendezvous import Meeting, Rendezvous, RendezvousError, Report, report_to
from spmd.errors import AgreementError, ConfigError, Problem

_BIND_FIXES = {
    errno.EADDRNOTAVAIL: (
        "start process 0 on that machine, or give --coordinator HOST:PORT of this one"
    ),
    errno.EADDRINUSE: ("give --coordinator another port, or stop the program that uses this one"),
}

_BACKLOG = 1024
# The name of a Kubernetes pod is published some seconds after the pod starts.
_DNS_TIMEOUT = 60


def meet(
    group: ProcessGroup,
    seconds: int,
    gpus: tuple[str, ...],
    variables: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Meeting, str | None]:
    """Meet the other processes; return the meeting, and where the coordinator is to listen.

    That is process 0's HOST:PORT; None for all of its interfaces, and on all other processes.

    Args:
        seconds: Time in which all processes must be there.
        gpus: GPUs visible to this process.
        variables: Variables that must be equal on all processes. They are compared here, as
            processes that differ in them may hang in the first collective.

    Raises:
        ConfigError: They do not meet: the reason, and those that are missing.
        AgreementError: Variables differ; every process raises it.
    """
    host = socket.gethostname()
    own = Report(
        group.process_id,
        group.processes or 1,
        host,
        machine_id(),
        gpus,
        tuple(variables.items()),
    )

    place = name_address(group)

    def missing(names: str) -> Problem:
        what = f"process 0 listened at {place}, and not all {group.processes} processes connected: "
        return _timeout_problem(f"{what}{names} did not", seconds)

    def unreachable(reason: str) -> Problem:
        what = f"process {group.process_id} tried {place} and found no process 0 ({reason})"
        return _timeout_problem(what, seconds)

    try:
        if group.process_id:
            address = split_address(group.coordinator)
            meeting, own_address = report_to(address, own, seconds, unreachable), None
        else:
            listener, own_address = listen(group)
            meeting = Rendezvous(listener, own, group).collect(seconds, missing)
    except RendezvousError as error:
        raise ConfigError("The processes cannot connect:", [error.problem]) from error
    problems = differences([{"environment": dict(each.variables)} for each in meeting.reports])
    if problems:
        raise AgreementError("Processes disagree, none starts:", problems)
    return meeting, own_address


def _timeout_problem(what: str, seconds: int) -> Problem:
    fix = "start the same command on every machine, and check that each can reach that port of "
    fix += "process 0; or raise --start-timeout; or --cluster none for a process that works alone"
    return Problem("coordinator", what, f"{seconds} s have passed", fix)


def machine_id() -> str:
    """Return the identity of the running kernel: machines may share a name."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    if boot_id.is_file():
        return boot_id.read_text().strip()
    return socket.gethostname()


def listen(group: ProcessGroup) -> tuple[socket.socket, str | None]:
    """Return process 0's listening socket, and its HOST:PORT, or None for all interfaces.

    At the address of a coordinator, process 0 listens on that interface. At a name, it listens on
    all: machines have several networks, and the others may resolve the name to another one of its
    addresses (jax#20562). The name must be one of this machine.
    """
    host, port = split_address(group.coordinator)
    family, address = _resolve(host, group)
    probed = socket.socket(family)
    try:
        # gRPC would share the port with another coordinator, and JAX crashes where it cannot
        # listen.
        probed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probed.bind((address, port))
        if address == host:
            probed.listen(_BACKLOG)
            return probed, _host_and_port(address, port)
        probed.close()
        return _listen_everywhere(port), None
    except OSError as error:
        probed.close()
        what = f"process 0 cannot listen at {name_address(group)}: {error.strerror}"
        fix = _BIND_FIXES.get(error.errno or 0, "")
        raise connection_error(what, f"{host} is {address}", fix) from error


def _listen_everywhere(port: int) -> socket.socket:
    """Return a listening socket on all interfaces."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
        )
    return socket.create_server(("", port), backlog=_BACKLOG)


def _host_and_port(address: str, port: int) -> str:
    if ":" in address:
        return f"[{address}]:{port}"
    return f"{address}:{port}"


def _resolve(host: str, group: ProcessGroup) -> tuple[socket.AddressFamily, str]:
    """Return the address family and the address of a host, once DNS knows it."""
    deadline = time.monotonic() + _DNS_TIMEOUT
    while True:
        try:
            family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
            return family, str(address[0])
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                what = f"{name_address(group)}: the name {host} has no address ({error.strerror})"
                fix = "give --coordinator a name or address that this machine can resolve"
                raise connection_error(what, fix=fix) from error
            time.sleep(1)


def connection_error(what: str, detail: str = "", fix: str = "") -> ConfigError:
    """Return the error of processes that cannot connect."""
    return ConfigError("The processes cannot connect:", [Problem("coordinator", what, detail, fix)])


def name_address(group: ProcessGroup) -> str:
    """Return the coordinator's address, with its source if a launcher gives it."""
    if group.source == "--coordinator":
        return group.coordinator
    return f"{group.coordinator} (as {group.source} says)"


def address_in(group: ProcessGroup) -> str:
    """Return the address of this host in the network of the coordinator, for the other processes.

    That of process 0 is the coordinator's, as the others know it.
    """
    host, port = split_address(group.coordinator)
    if group.process_id == 0:
        return host
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
