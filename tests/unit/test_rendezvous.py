"""Processes meet before JAX connects them: missing ones are named, and so is one that is gone later."""

import json
import socket
import threading
import time

import pytest

from spmd.distributed.launchers import ProcessGroup
from spmd.distributed.liveness import Liveness
from spmd.distributed.rendezvous import Meeting, Rendezvous, RendezvousError, Report, report_to
from spmd.errors import Problem


def own(process_id, processes=3, host=None):
    return Report(process_id, processes, host or f"host{process_id}", "machine", ("0",))


def problem(reason):
    return Problem("coordinator", reason)


class Processes:
    """Each process is a thread, with what it learns in `results`."""

    def __init__(self, processes=3, hosts=(), seconds=10.0):
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        group = ProcessGroup(processes, 0, "", "slurm", hosts=hosts)
        first = Rendezvous(listener, own(0, processes), group)
        self.results = {}
        self.threads = []
        self.start("first", lambda: first.collect(seconds, problem))

    def start(self, name, meet):
        def run():
            try:
                self.results[name] = meet()
            except RendezvousError as error:
                self.results[name] = error.problem

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def report(self, name, report, seconds=10.0):
        self.start(name, lambda: report_to(self.address, report, seconds, problem))

    def end(self):
        for thread in self.threads:
            thread.join(20)
        return self.results

    def close(self):
        for result in self.results.values():
            if isinstance(result, Meeting):
                for connection in result.connections.values():
                    connection.close()


def test_all_learn_of_all():
    """Every process gets the reports of all in order, and connections: process 0 to each, each to process 0."""
    processes = Processes()
    with socket.create_connection(processes.address) as scanner:
        scanner.sendall(
            b"GET / HTTP/1.1\r\n\r\n"
        )  # no process of the run: not counted, and no harm
        for number in (2, 1):
            processes.report(number, own(number))
        results = processes.end()
    for name in ("first", 1, 2):
        assert list(results[name].reports) == [own(0), own(1), own(2)]
    assert results["first"].connections.keys() == {1, 2}
    assert results[1].connections.keys() == {0}
    processes.close()


def test_the_missing_are_named_to_all_that_came():
    """Process 0's deadline passes: it and those that wait say the same, with hosts where they are known."""
    processes = Processes(hosts=("a", "b", "c"), seconds=0.6)
    processes.report(1, own(1))
    results = processes.end()
    assert results["first"] == results[1] == problem("process 2 on c")
    unknown = Processes(processes=20, seconds=0.1).end()["first"]
    assert unknown.what.startswith("process 1, process 2, ")
    assert unknown.what.endswith("process 8 and 11 more")


def test_one_that_ends_while_it_waits_is_missing():
    """A process that reported and was killed before all came is among the missing."""
    processes = Processes(seconds=1.0)
    with socket.create_connection(processes.address) as killed:
        killed.sendall(json.dumps(vars(own(1)) | {"gpus": ["0"]}).encode() + b"\n")
        time.sleep(0.2)
    processes.report(2, own(2))
    assert processes.end()["first"] == problem("process 1")


def test_one_number_for_two_processes_is_an_error():
    """The same command line on two machines, or processes of an earlier start: both hosts are named."""
    processes = Processes()
    processes.report(1, own(1, host="a"))
    processes.threads[-1].join(0.3)
    processes.report("again", own(1, host="b"))
    results = processes.end()
    assert "two processes are number 1: on a and on b" in results["first"].what
    assert results[1] == results["again"] == results["first"]


def test_processes_that_were_told_different_numbers_do_not_start():
    """One was started as one of three, another as one of four."""
    processes = Processes()
    processes.report(1, own(1, processes=4))
    results = processes.end()
    assert "as one of 4" in results["first"].what
    assert results[1] == results["first"]


def test_nobody_at_the_address():
    """Nothing listens, or another program answers: the reason is in the error."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()

        def answer():
            for _ in range(2):
                connection, _ = listener.accept()
                connection.sendall(b"220 mail.example ESMTP\r\n")
                connection.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(RendezvousError, match="another program answers"):
            report_to(address, own(1), 0.3, problem)
    with pytest.raises(RendezvousError, match="refused"):
        report_to(address, own(1), 0.3, problem)


@pytest.fixture
def met():
    """What each of three processes holds after they have met."""
    processes = Processes()
    for number in (1, 2):
        processes.report(number, own(number))
    results = processes.end()
    yield results["first"], results[1], results[2]
    processes.close()


def watch(meeting, number, ends, heartbeat=1):
    liveness = Liveness(
        meeting, number, heartbeat, 69, exit_process=lambda code: ends.append(number)
    )
    threading.Thread(target=liveness._watch, daemon=True).start()
    return liveness


def test_one_that_is_gone_ends_all_and_is_named(met, capfd):
    """Process 2's connection ends: process 0 and 1 end, after a while for what they write, and name it."""
    ends = []
    watch(met[0], 0, ends)
    watch(met[1], 1, ends)
    met[2].connections[0].close()
    began = time.monotonic()
    while len(ends) < 2:
        assert time.monotonic() - began < 10
        time.sleep(0.02)
    assert time.monotonic() - began > 0.9
    assert sorted(ends) == [0, 1]
    lines = capfd.readouterr().err.splitlines()
    assert (
        len([line for line in lines if "another process is gone, process 2 on host2" in line]) == 2
    )


def test_one_that_leaves_ends_nobody(met):
    """The control: a process that ends as it should says so, and the others go on."""
    ends = []
    watch(met[0], 0, ends)
    watch(met[1], 1, ends)
    Liveness(met[2], 2, 1, 69).leave()
    met[2].connections[0].close()
    time.sleep(1.5)
    assert ends == []
