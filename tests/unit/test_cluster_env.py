"""What a process is told by whoever detected it, and by its command line, becomes one group or one list of problems."""

import pytest

from spmd.distributed.cluster_env import LaunchArgs, ProcessGroup, detect_process_group
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
            "gpu07",
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
    ],
)
def test_found(environment, process_id, processes, host, cluster, is_local):
    """Each cluster's own words become a group: how many, which one, where process 0 is."""
    group = find(environment)
    assert group == ProcessGroup(processes, process_id, group.coordinator, cluster, is_local)
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
    ],
    ids=["nothing", "batch-script", "step-of-one-task", "mpirun-of-one", "tpu-of-one-host", "pod"],
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
    assert find(STEP, coordinator="10.0.0.9:7", processes=4, process_id=3) == ProcessGroup(
        4, 3, "10.0.0.9:7", "--coordinator"
    )
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
