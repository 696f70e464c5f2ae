"""What a process is told by whoever detected it, and by its command line, becomes one group or one list of problems."""

import os
import subprocess

import pytest

from spmd.distributed.cluster_env import LaunchArgs, detect_process_group
from spmd.distributed.launchers import ProcessGroup, expand_nodes
from spmd.errors import ConfigError

# As a real srun, sbatch and mpirun set them, without what nothing here reads.
BATCH = {
    "SLURM_JOB_ID": "41",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
}
STEP = {
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_PROCID": "3",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "PMIX_NAMESPACE": "1453391873",
    "OMPI_MCA_orte_hnp_uri": "1453391872.0;tcp://192.0.2.2:57643;tcp6://[fd00::2]:36881",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "run",
}
EXPORTED = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "w-0", "MASTER_PORT": "23456"}
"""As a PyTorchJob sets them, and job scripts."""
MPICH = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_NUM_NODES": "2",
}
SAGEMAKER = {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2"}
TPU = {"TPU_WORKER_HOSTNAMES": "w-0.x,w-1.x", "TPU_WORKER_ID": "1"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}


def find(environment, **launch_args):
    """The group, with the port of the coordinator omitted where the job's number decides it."""
    return detect_process_group(LaunchArgs(**launch_args), environment)


def problems(environment, **launch_args):
    """What is wrong, by what it is wrong with."""
    with pytest.raises(ConfigError) as caught:
        find(environment, **launch_args)
    return {problem.where: str(problem) for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("environment", "process_id", "processes", "host", "cluster", "is_local"),
    [
        (STEP, 3, 4, "gpu07", "slurm", False),
        (
            {**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu07"},
            3,
            4,
            "127.0.0.1",
            "slurm",
            True,
        ),
        (MPI, 1, 2, "192.0.2.2", "openmpi", False),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 1, 2, "127.0.0.1", "openmpi", True),
        ({**STEP, **MPI}, 1, 2, "192.0.2.2", "openmpi", False),  # mpirun in a job of Slurm
        (TPU, 1, 2, "w-0.x", "tpu", False),
        ({**TPU, **POD}, 1, 2, "w-0.x", "tpu", False),  # on Kubernetes
        (
            {
                **TPU,
                "MEGASCALE_NUM_SLICES": "3",
                "MEGASCALE_SLICE_ID": "2",
                "MEGASCALE_COORDINATOR_ADDRESS": "s:8080",
            },
            *(5, 6, "s", "tpu", False),
        ),
        (TORCHRUN, 5, 8, "10.0.0.7", "torchrun", False),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, 5, 8, "127.0.0.1", "torchrun", True),
        # one agent of torchrun in each task
        ({**STEP, **TORCHRUN, "GROUP_WORLD_SIZE": "4"}, 5, 8, "10.0.0.7", "torchrun", False),
        ({**SKYPILOT, **TORCHRUN}, 5, 8, "10.0.0.7", "torchrun", False),
        (EXPORTED, 3, 4, "w-0", "torchrun", False),
        ({**STEP, **EXPORTED}, 3, 4, "gpu07", "slurm", False),  # they agree, and Slurm has nodes
        (MPICH, 3, 4, "gpu07", "mpich", False),
        ({**MPICH, "MPI_LOCALNRANKS": "4"}, 3, 4, "127.0.0.1", "mpich", True),
        # srun --mpi=pmi2
        ({**STEP, "PMI_RANK": "3", "PMI_SIZE": "4"}, 3, 4, "gpu07", "slurm", False),
        # daemons of MPICH, which srun started
        ({**STEP, **MPICH, "SLURM_STEP_NUM_TASKS": "2"}, 3, 4, "gpu07", "mpich", False),
        (SKYPILOT, 1, 2, "10.0.0.4", "skypilot", False),
        (SAGEMAKER, 1, 2, "algo-1", "sagemaker", False),
    ],
    ids=[
        "srun",
        "srun-one-node",
        "mpirun",
        "mpirun-one-node",
        "mpirun-in-slurm",
        "tpu",
        "tpu-on-gke",
        "tpu-slices",
        "torchrun",
        "torchrun-one-node",
        "torchrun-in-srun",
        "torchrun-in-skypilot",
        "exported",
        "exported-in-srun",
        "mpich",
        "mpich-one-node",
        "srun-with-pmi",
        "mpich-in-slurm",
        "skypilot",
        "sagemaker",
    ],
)
def test_found(environment, process_id, processes, host, cluster, is_local):
    """Each cluster's own words become a group: how many, which one, where process 0 is."""
    group = find(environment)
    assert (group.processes, group.process_id) == (processes, process_id)
    assert (group.source, group.is_local) == (cluster, is_local)
    assert group.coordinator.rpartition(":")[0] == host
    assert find(environment, cluster=cluster) == group


@pytest.mark.parametrize(
    "environment",
    [
        {},
        BATCH,
        {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {**MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        {**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "4"},
        {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
    ],
    ids=[
        "nothing",
        "batch-script",
        "step-of-one-task",
        "mpirun-of-one",
        "tpu-of-one-host",
        "pod",
        "torchrun-of-one",
        "no-address",
        "sagemaker-of-one",
    ],
)
def test_alone(environment):
    """A process that was detected by itself trains by itself: a batch script or a shell in an allocation is no task."""
    assert find(environment) is None


@pytest.mark.parametrize("environment", [STEP, MPI, TPU, POD, {"SLURM_JOB_ID": "x", **STEP}])
def test_detection_switched_off(environment):
    """`--cluster none` takes no notice of anything, and flags alone decide."""
    assert find(environment, cluster="none") is None
    given = find(environment, cluster="none", coordinator="h:1", processes=9, process_id=7)
    assert given == ProcessGroup(9, 7, "h:1", "--coordinator")


def test_ports_of_steps_differ():
    """Two steps of one job, and two jobs, do not meet at the same port; processes of one step do."""
    first = find(STEP).coordinator
    assert find({**STEP, "SLURM_PROCID": "1"}).coordinator == first
    assert find({**STEP, "SLURM_STEP_ID": "1"}).coordinator != first
    assert find({**STEP, "SLURM_JOB_ID": "42"}).coordinator != first


def test_flags_complete_what_a_cluster_leaves_out():
    """A pod of an indexed Job knows its number; the command line adds the rest, and may move the coordinator."""
    assert find(POD, coordinator="w-0:7", processes=2) == ProcessGroup(
        2, 1, "w-0:7", "--coordinator"
    )
    moved = find(STEP, coordinator="10.0.0.9:7", processes=4, process_id=3)
    assert (moved.coordinator, moved.source) == ("10.0.0.9:7", "--coordinator")
    assert find({}, coordinator="[fd00::1]:7", processes=2, process_id=0) == ProcessGroup(
        2, 0, "[fd00::1]:7", "--coordinator"
    )


def test_contradictions():
    """What the flags and the cluster say must agree, and a difference is reported with both numbers, all at once."""
    found = problems(STEP, processes=2, process_id=1)
    assert "is 2, but slurm says 4" in found["processes"]
    assert "SLURM_STEP_NUM_TASKS=4" in found["processes"]
    assert "is 1, but slurm says 3" in found["process_id"]
    assert "is 1, but slurm says 4" in problems(STEP, processes=1)["processes"]
    assert (
        not {"processes", "process_id"}
        & problems(STEP, processes=4, process_id=3, heartbeat=0).keys()
    )


def test_incomplete():
    """What is missing or malformed is said, with all of it at once."""
    assert "is missing for 2 processes" in problems({}, processes=2)["coordinator"]
    assert problems({}, processes=2).keys() == {"coordinator", "process_id"}
    assert (
        problems({}, coordinator="h:1").keys() == problems({}, process_id=1).keys() == {"processes"}
    )
    assert problems({}, coordinator="h:1", processes=1).keys() == {"coordinator"}
    assert "is 2 of 2" in problems({}, coordinator="h:1", processes=2, process_id=2)["process_id"]
    wrong = problems(
        {},
        coordinator="h",
        processes=2,
        process_id=-1,
        cluster="slrm",
        heartbeat=0,
        start_timeout=0,
    )
    assert wrong.keys() == {"coordinator", "process_id", "cluster", "heartbeat", "start_timeout"}
    assert 'did you mean "slurm"?' in wrong["cluster"]


def test_pods_do_not_train_apart_by_mistake():
    """A pod of an indexed Job that is not told of the others does not start a run of its own."""
    assert "JOB_COMPLETION_INDEX=1" in problems(POD)["processes"]
    # Open MPI 5
    distributed = {name: value for name, value in MPI.items() if name != "OMPI_MCA_orte_hnp_uri"}
    assert "--coordinator HOST:PORT" in problems(distributed)["coordinator"]


def test_named_cluster_must_be_there():
    """A cluster that is asked for by name and did not start this process is an error, and so is a broken variable."""
    assert "SLURM_STEP_NUM_TASKS" in problems(BATCH, cluster="slurm")["cluster"]
    assert problems(MPI, cluster="slurm").keys() == {"cluster"}
    assert "'two'" in problems({**MPI, "OMPI_COMM_WORLD_SIZE": "two"})["cluster"]
    assert "'x'" in problems({**EXPORTED, "MASTER_PORT": "x"})["cluster"]
    assert "SKYPILOT_NUM_NODES is 3" in problems({**SKYPILOT, "SKYPILOT_NUM_NODES": "3"})["cluster"]
    assert "algo-3" in problems({**SAGEMAKER, "SM_CURRENT_HOST": "algo-3"})["cluster"]


@pytest.mark.parametrize(
    ("environment", "numbers"),
    [
        ({**STEP, **EXPORTED, "RANK": "0"}, ("process 0 of 4", "process 3 of 4")),
        ({**STEP, **EXPORTED, "WORLD_SIZE": "8"}, ("process 3 of 8", "process 3 of 4")),
        ({**STEP, "PMI_RANK": "0", "PMI_SIZE": "2"}, ("process 0 of 2", "process 3 of 4")),
        # torchrun alone in each task of srun: four runs
        ({**STEP, **TORCHRUN, "GROUP_WORLD_SIZE": "1"}, ("process 5 of 8", "process 3 of 4")),
        (
            {**SKYPILOT, **SAGEMAKER, "SKYPILOT_NODE_RANK": "0"},
            ("process 0 of 2", "process 1 of 2"),
        ),
    ],
    ids=["another-number", "another-count", "pmi", "torchrun-alone", "clouds"],
)
def test_launchers_that_contradict_each_other_start_nothing(environment, numbers):
    """Two launchers claim the process, and it is not one inside of the other: one error, with the numbers of both."""
    found = problems(environment)
    assert found.keys() == {"cluster"}
    assert "contradict each other" in found["cluster"]
    assert [number for number in numbers if number not in found["cluster"]] == []
    for name in ("torchrun", "pmi", "slurm", "skypilot", "sagemaker"):
        if f"--cluster {name}" in found["cluster"]:  # either alone is taken
            assert find(environment, cluster=name).source == name


def test_torchruns_own_port_is_not_taken():
    """Torchrun listens at MASTER_PORT itself; where nothing else does, the coordinator is there."""
    assert find(EXPORTED).coordinator == "w-0:23456"
    agent = find(TORCHRUN).coordinator
    assert agent != "10.0.0.7:29500"
    assert find({**TORCHRUN, "RANK": "0"}).coordinator == agent


def test_hosts_are_known_where_the_launcher_says_them():
    """The host of each process, so that a missing one can be named; nothing where it is uncertain."""
    counted = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "3,1"}
    assert find(counted).hosts == ("gpu07", "gpu07", "gpu07", "gpu08")
    assert find({**counted, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}).hosts[2] == "gpu08"
    assert find({**counted, "SLURM_DISTRIBUTION": "cyclic"}).hosts == ()
    assert find(STEP).hosts == ()
    assert find(SKYPILOT).hosts == ("10.0.0.4", "10.0.0.5")


def test_the_first_node_of_several_ranges():
    """Names with several ranges, as racks and nodes have; before, process 0 was looked for on `rack1n`."""
    step = {**STEP, "SLURM_STEP_NODELIST": "rack[1-2]n[01-16],login1"}
    assert find(step).coordinator.startswith("rack1n01:")


@pytest.mark.soak
@pytest.mark.parametrize(
    "nodes", ["a", "gpu[003-010,012]", "rack[1-2]n[01-16]", "r[1,3]n[09-11],z,login[1,7]"]
)
def test_node_lists_are_those_of_slurm(nodes, tmp_path):
    """The same names in the same order as `scontrol show hostnames`."""
    configuration = tmp_path / "slurm.conf"
    configuration.write_text(
        "ClusterName=x\nSlurmctldHost=x\nNodeName=x\nPartitionName=x Nodes=x\n"
    )
    done = subprocess.run(
        ["scontrol", "show", "hostnames", nodes],
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
        env={**os.environ, "SLURM_CONF": str(configuration)},
    )
    assert expand_nodes(nodes) == done.stdout.split()


def test_a_suffix_names_process_0_in_another_network():
    """`--coordinator-suffix i` acts on the name of the first node, before its domain; without one, it is an error."""
    assert find(STEP, coordinator_suffix="i").coordinator.startswith("gpu07i:")
    domain = {**STEP, "SLURM_STEP_NODELIST": "jwb[0001-0002].juwels"}
    assert find(domain, coordinator_suffix="i").coordinator.startswith("jwb0001i.juwels:")
    alone = {**STEP, "SLURM_STEP_NODELIST": "gpu07"}
    assert find(alone, coordinator_suffix="i").coordinator.startswith("127.0.0.1:")
    assert "10.0.0.4" in problems(SKYPILOT, coordinator_suffix="i")["coordinator_suffix"]
    given = problems({}, coordinator="h:1", processes=2, process_id=0, coordinator_suffix="i")
    assert given.keys() == {"coordinator_suffix"}


def test_pals_does_not_say_how_many():
    """Cray's launcher without PMI gives the number of a process alone; flags add the rest."""
    environment = {"PALS_RANKID": "1", "PALS_LOCAL_SIZE": "4"}
    assert "PALS_RANKID=1" in problems(environment)["processes"]
    assert find(environment, processes=8, coordinator="n0:7").process_id == 1
    with_pmi = {**environment, "PMI_RANK": "1", "PMI_SIZE": "4", "PMI_LOCAL_SIZE": "4"}
    assert (find(with_pmi).processes, find(with_pmi).source) == (4, "pmi")


def test_the_first_node_of_pbs(tmp_path):
    """MPICH in a job of PBS, as on Cray machines: process 0 is on the first node of the file."""
    (tmp_path / "nodes").write_text("x3001.hsn\nx3002.hsn\n")
    environment = {**MPICH, "PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_JOBID": "7.pbs"}
    assert find(environment).coordinator.startswith("x3001.hsn:")
