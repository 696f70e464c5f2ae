"""Hosts of TPU virtual machines come from the metadata server, which machines without a TPU do not ask."""

import socket

import pytest

from spmd.distributed import cluster_env, metadata_server
from spmd.distributed.cluster_env import LaunchArgs, detect_process_group
from spmd.distributed.metadata_server import has_tpu, on_compute_engine
from spmd.errors import ConfigError
from tests.metadata_servers import MetadataStub, workers

HOSTS = ["10.0.0.2", "10.0.0.3", "10.0.0.4"]
SLICES = {
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "10.0.9.2:8080",
}


@pytest.fixture(autouse=True)
def on_a_tpu_vm(monkeypatch):
    """This machine has no chips: that it has some is all that is pretended."""
    monkeypatch.setattr(cluster_env, "has_tpu", lambda: True)
    monkeypatch.setattr(metadata_server, "_PAUSE", 0.01)


def find(stub, launch_args=LaunchArgs(), **environment):
    return detect_process_group(launch_args, {**stub.environment, **environment})


@pytest.mark.parametrize("old_form", [True, False], ids=["triples", "names"])
def test_a_slice_of_several_hosts(old_form):
    """Worker number and endpoints, in both forms, become the group."""
    said = workers(HOSTS, old_form=old_form)
    for number in range(3):
        with MetadataStub(said[number]) as stub:
            group = find(stub)
        assert (group.processes, group.process_id, group.source) == (3, number, "tpu-vm")
        assert group.coordinator == "10.0.0.2:8482"
        assert group.hosts == tuple(HOSTS)


def test_several_slices():
    """Workers of the second slice are numbered after those of the first; the coordinator is the first slice's."""
    with MetadataStub(workers(HOSTS, SLICES)[2]) as stub:
        group = find(stub)
        assert (group.processes, group.process_id) == (6, 5)
        assert group.coordinator == "10.0.9.2:8482"
        assert group.hosts[3:] == tuple(HOSTS)
        assert group.hosts[1] == "worker 1 of slice 0"
        # variables of the environment come first
        assert find(stub, MEGASCALE_SLICE_ID="0").process_id == 2


def test_where_the_server_is():
    """GCE_METADATA_HOST and GCE_METADATA_IP say it, and a proxy is not asked."""
    with MetadataStub(workers(HOSTS)[1]) as stub:
        place = stub.environment["GCE_METADATA_HOST"]
        group = detect_process_group(
            LaunchArgs(), {"GCE_METADATA_IP": place, "http_proxy": "http://127.0.0.1:9"}
        )
        assert group.process_id == 1


@pytest.mark.parametrize(
    ("launch_args", "environment"),
    [
        (LaunchArgs(cluster="none"), {}),
        (LaunchArgs("h:1", 2, 0), {}),
        (LaunchArgs(), {"TPU_SKIP_MDS_QUERY": "1"}),
        (LaunchArgs(), {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}),
        (LaunchArgs(), {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}),
    ],
    ids=["cluster-none", "all-flags", "told-not-to", "on-gke", "another-launcher"],
)
def test_the_server_is_not_asked(launch_args, environment):
    """Where something else says how many processes there are, or that it is not to be asked."""
    with MetadataStub(workers(HOSTS)[1]) as stub:
        find(stub, launch_args, **environment)
        assert stub.asked == []
        find(stub)
        assert stub.asked  # the control


def test_machines_without_chips_do_not_ask(monkeypatch):
    """No request, and so no delay; `--cluster tpu-vm` asks on any machine."""
    monkeypatch.setattr(cluster_env, "has_tpu", has_tpu)
    with MetadataStub(workers(HOSTS)[1]) as stub:
        assert find(stub) is None
        assert stub.asked == []
        assert find(stub, LaunchArgs(cluster="tpu-vm")).process_id == 1


@pytest.mark.parametrize("values", [{}, workers(["10.0.0.2"])[0]], ids=["no-slice", "one-host"])
def test_one_host_trains_alone(values):
    """A machine that is no part of a slice, or all of it, is one process; asked for by name, that is an error."""
    with MetadataStub(values) as stub:
        assert find(stub) is None
        with pytest.raises(ConfigError, match="not one of several hosts of a TPU slice"):
            find(stub, LaunchArgs(cluster="tpu-vm"))


def test_a_server_that_does_not_answer_is_one_sentence():
    """Nothing listens, it fails, or it says something else: the place, the reason and the way out; nothing starts."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"does not answer: .*refused") as caught:
            detect_process_group(LaunchArgs(), {"GCE_METADATA_HOST": place})
    assert place in str(caught.value)
    assert "--cluster none" in str(caught.value)
    with MetadataStub(status=503) as stub, pytest.raises(ConfigError, match="answers 503"):
        find(stub)
    strange = {**workers(HOSTS)[0], "attributes/worker-network-endpoints": "a:b"}
    with MetadataStub(strange) as stub, pytest.raises(ConfigError, match="unknown form"):
        find(stub)
    nameless = {**workers(HOSTS)[0], "attributes/agent-worker-number": "x"}
    with MetadataStub(nameless) as stub, pytest.raises(ConfigError, match="'x'"):
        find(stub)


def test_flags_must_agree_with_the_server():
    """A number on the command line that the server contradicts is an error with both."""
    with MetadataStub(workers(HOSTS)[1]) as stub:
        with pytest.raises(ConfigError, match="is 2, but tpu-vm says 3"):
            find(stub, LaunchArgs(processes=2))
        moved = find(stub, LaunchArgs(coordinator="10.0.0.2:8476"))
        assert (moved.coordinator, moved.processes) == ("10.0.0.2:8476", 3)


def test_chips_are_found_by_device_files(tmp_path):
    """Up to v4 by their own files, later by those of VFIO, whose vendor must be Google."""
    dev, groups = tmp_path / "dev", tmp_path / "groups"
    (dev / "vfio").mkdir(parents=True)
    (dev / "vfio" / "vfio").touch()
    (dev / "vfio" / "7").touch()
    device = groups / "7" / "devices" / "0000:00:05.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x15b3\n")  # of a network card
    assert not has_tpu(dev, groups)
    (device / "vendor").write_text("0x1ae0\n")
    assert has_tpu(dev, groups)
    assert not has_tpu(tmp_path)
    (tmp_path / "accel0").touch()
    assert has_tpu(tmp_path)


def test_compute_engine_is_found_without_a_request():
    """By the name of the machine's model, or where a variable says the server's place."""
    assert on_compute_engine({"GCE_METADATA_IP": "169.254.169.254"})
    assert not on_compute_engine({})
