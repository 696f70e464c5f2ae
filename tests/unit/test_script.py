"""A script for a cluster holds what the run needs; a JobSet is what the published schema says, and nothing else."""

import copy
import dataclasses
import itertools
import json
import re
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from spmd.cli import main
from spmd.job_files.job import RESTARTED
from spmd.job_files.kubernetes import KubernetesJob
from spmd.job_files.slurm import SlurmJob
from tests.command_line import run, write_config

SCHEMA = json.loads((Path(__file__).parent / "jobset_schema.json").read_text(encoding="utf-8"))
TRAIN = ["tiny.py", "--steps", "9"]
SLURM = SlurmJob(out="runs/tiny", name="tiny", nodes=4, max_restarts=7)
JOBSET = KubernetesJob(
    out="runs/tiny",
    name="tiny",
    nodes=4,
    max_restarts=7,
    image="registry.invalid/spmd:1",
    claim="shared",
)


@pytest.fixture
def config(tmp_path):
    """A config file of a tiny model on a small text."""
    return write_config(tmp_path)


def manifest(**changes):
    return dataclasses.replace(JOBSET, **changes).manifest(TRAIN)


def parts(jobset):
    """The Job, the pod and the container of a JobSet."""
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    return job, job["template"]["spec"], job["template"]["spec"]["containers"][0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"nodes": 1},
        {
            "gpus_per_node": 8,
            "efa": 32,
            "cpus_per_node": 96,
            "setup": 'echo "ü"; source x',
        },
        {"tpu": "tpu-v5-lite-podslice:4x4"},
    ],
    ids=["cpu", "one-node", "gpu", "tpu"],
)
def test_jobset_is_valid(changes):
    """The manifest is a JobSet by the published schema; the file is JSON, which YAML parsers read too."""
    jobset = manifest(**changes)
    jsonschema.Draft202012Validator(SCHEMA).validate(jobset)
    written = dataclasses.replace(JOBSET, **changes).render(TRAIN)
    assert yaml.safe_load(written) == json.loads(written) == jobset
    job, pod, _ = parts(jobset)
    # What the controllers check beside the schema.
    assert pod["restartPolicy"] == "Never", "a policy for failed pods asks for it"
    assert job["completions"] == job["parallelism"]
    assert job["completionMode"] == "Indexed"


BREAKS = [
    ("a field that is misspelt", lambda s: s["network"].update(enableDnsHostnames=True)),
    ("a number that is a text", lambda s: s["failurePolicy"].update(maxRestarts="7")),
    ("an unknown action", lambda s: s["failurePolicy"]["rules"][0].update(action="Restart")),
    ("a rule without a name", lambda s: s["failurePolicy"]["rules"][0].pop("name")),
    ("a Job's policy beside the Job", lambda s: s["replicatedJobs"][0]["template"].update(podFailurePolicy={})),
    ("a container without a name", lambda s: parts({"spec": s})[2].pop("name")),
    ("exit codes as texts", lambda s: parts({"spec": s})[0]["podFailurePolicy"]["rules"][0]["onExitCodes"].update(
        values=["75"]
    )),
    ("an unknown field of the pod", lambda s: parts({"spec": s})[1].update(gracePeriod=3)),
]  # fmt: skip


@pytest.mark.parametrize(
    "change", [change for _, change in BREAKS], ids=[name for name, _ in BREAKS]
)
def test_jobset_control(change):
    """The schema refuses a manifest with a wrong field."""
    jobset = copy.deepcopy(manifest())
    change(jobset["spec"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(jobset)


def flags_of(command):
    """Each flag of a command with its value."""
    return {flag: value for flag, value in itertools.pairwise(command) if flag.startswith("--")}


def test_jobset_meets_and_starts_again():
    """Every pod is told where pod 0 is, how many they are and which it is; only some exit codes start all again."""
    jobset = manifest(gpus_per_node=8)
    job, pod, container = parts(jobset)
    flags = flags_of(container["command"])
    assert flags["--coordinator"] == "tiny-workers-0-0.tiny:7777"
    assert jobset["spec"]["network"]["subdomain"] == jobset["metadata"]["name"] == "tiny"
    assert (flags["--processes"], flags["--process-id"]) == ("4", "$(PROCESS_ID)")
    index = next(entry for entry in container["env"] if entry["name"] == "PROCESS_ID")
    assert "batch.kubernetes.io/job-completion-index" in index["valueFrom"]["fieldRef"]["fieldPath"]
    rules = job["podFailurePolicy"]["rules"]
    assert rules[0]["action"] == "FailJob"
    assert 75 in rules[0]["onExitCodes"]["values"]
    assert {0, 1, 2}.isdisjoint(RESTARTED), "an end, an exception and a user's mistake are final"
    assert job["backoffLimit"] == 0
    policy = jobset["spec"]["failurePolicy"]
    assert [(rule["action"], rule.get("onJobFailureReasons")) for rule in policy["rules"]] == [
        ("RestartJobSetAndIgnoreMaxRestarts", ["PodFailurePolicy"]),
        ("FailJobSet", None),
    ]
    assert flags["--max-restarts"] == "7", "the run counts restarts without progress"
    assert pod["terminationGracePeriodSeconds"] == JOBSET.save_seconds


@pytest.mark.parametrize(
    ("platform", "resource"), [("cuda", "nvidia.com/gpu"), ("rocm", "amd.com/gpu")]
)
def test_a_node_has_one_pod_with_all_of_its_gpus(platform, resource):
    """A pod has each GPU and adapter of its node, and shared memory of more than 64 MiB; it asks for them by count."""
    jobset = manifest(gpus_per_node=8, gpu_platform=platform, efa=4)
    job, pod, container = parts(jobset)
    assert job["completions"] == 4
    assert container["resources"] == {
        "limits": {resource: 8, "vpc.amazonaws.com/efa": 4, "hugepages-2Mi": "5120Mi"},
        "requests": {"memory": "8000Mi"},
    }
    flags = flags_of(container["command"])
    assert (flags["--platform"], flags["--expect-devices"]) == (platform, "32")
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounted["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}


def test_one_pod_meets_nobody():
    """A run of one process is not told of a coordinator, and does not look for others."""
    command = parts(manifest(nodes=1))[2]["command"]
    assert "--coordinator" not in command
    assert command[-2:] == ["--cluster", "none"]


def test_tpu_chips_are_shared_out():
    """The chips of a slice divide over its hosts, which are chosen by accelerator and topology, and are expected."""
    _, pod, container = parts(manifest(tpu="tpu-v5p-slice:2x2x4"))
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    assert sorted(pod["nodeSelector"].values()) == ["2x2x4", "tpu-v5p-slice"]
    flags = flags_of(container["command"])
    assert (flags["--platform"], flags["--expect-devices"]) == ("tpu", "16")
    _, _, container = parts(manifest(tpu="tpu7x:2x2x4"))
    flags = flags_of(container["command"])
    assert flags["--expect-devices"] == "32", "two devices in each chip"


def options_of(script):
    return set(re.findall(r"^#SBATCH --(.*)$", script, re.M))


def test_slurm_script():
    """The batch file asks for what was asked for, is signalled in time, and is requeued by itself."""
    changes = {
        "processes_per_node": 2,
        "gpus_per_node": 8,
        "cpus_per_node": 25,
        "save_seconds": 90,
    }
    job = dataclasses.replace(
        SLURM, **changes, setup="module load x", time="1:00:00", partition="gpu"
    )
    script = job.render(TRAIN)
    assert options_of(script) == {
        "job-name=tiny",
        "nodes=4",
        "ntasks-per-node=2",
        "cpus-per-task=12",
        "gpus-per-node=8",
        "time=1:00:00",
        *("partition=gpu", "output=tiny-%j.log", "open-mode=append", "signal=USR1@90", "requeue"),
    }
    assert "\nmodule load x\n" in script
    assert "\ncpus=12\n" in script
    assert '--wait=60 --cpus-per-task="$cpus" --gpu-bind=none \\\n  spmd train' in script
    command = "spmd train tiny.py --steps 9 --out runs/tiny --resume auto --max-restarts 7"
    assert f"{command} --devices 0 --platform cuda --expect-devices 32" in script
    assert f"{command} --platform cpu\n" in SLURM.render(TRAIN), "CPUs are not counted"


def test_slurm_starts_a_process_for_each_gpu():
    """Each sees all GPUs of its node, since NCCL needs its neighbours; without GPUs there is one process."""
    job = dataclasses.replace(SLURM, gpus_per_node=8)
    assert "ntasks-per-node=8" in options_of(job.render(TRAIN))
    assert job.processes == 32
    assert "gpus-per-task" not in job.render(TRAIN)
    assert "ntasks-per-node=1" in options_of(SLURM.render(TRAIN))


@pytest.mark.parametrize(
    ("cpus_of_nodes", "cpus"),
    [("208(x4)", 26), ("104", 12), ("96(x2),72,96", 8), ("8", 1), ("4", 1)],
)
def test_slurm_divides_the_cpus_of_whole_nodes(cpus_of_nodes, cpus, tmp_path):
    """By default the nodes are whole, and each process gets its share of the node with the fewest CPUs."""
    job = dataclasses.replace(SLURM, gpus_per_node=8)
    assert {"exclusive", "mem=0"} <= options_of(job.render(TRAIN))
    with_cpus = dataclasses.replace(job, cpus_per_node=8)
    assert {"exclusive", "mem=0"}.isdisjoint(options_of(with_cpus.render(TRAIN))), "the control"
    done, calls = run_batch_file(job, tmp_path, SLURM_JOB_CPUS_PER_NODE=cpus_of_nodes)
    assert done.returncode == 0, done.stderr
    assert f"--cpus-per-task={cpus} " in calls


def run_batch_file(job, folder, srun="exit 0", **variables):
    """Run a batch file with stubs of Slurm's commands; return the process and the calls of them."""
    programs = {"srun": srun, "scontrol": "exit 0"}
    calls = folder / "calls.txt"
    for name, line in programs.items():
        (folder / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {calls}\n{line}\n')
        (folder / name).chmod(0o755)
    environment = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "SLURM_JOB_ID": "41",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_NNODES": "4",
        **variables,
    }
    done = subprocess.run(
        ["bash", "-c", job.render(TRAIN)],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    return done, calls.read_text()


WRAPPED = dataclasses.replace(
    SLURM, wrapper="apptainer exec --nv $IMAGE", srun_options="--container-mounts=/data"
)


def test_a_wrapper_is_tried_on_every_node_first(tmp_path):
    """It comes before spmd, after the further options of srun; its words may be variables of the job."""
    done, calls = run_batch_file(WRAPPED, tmp_path, IMAGE="x.sif")
    tried, trained = calls.splitlines()
    assert done.returncode == 0, done.stderr
    assert tried == (
        "srun --ntasks-per-node=1 --ntasks=4 --container-mounts=/data "
        "apptainer exec --nv x.sif spmd --version"
    )
    assert "--container-mounts=/data apptainer exec --nv x.sif spmd train tiny.py" in trained


def test_a_wrapper_that_fails_starts_nothing(tmp_path):
    """One sentence names it, and the job ends for good."""
    done, calls = run_batch_file(WRAPPED, tmp_path, srun="exit 127", IMAGE="x.sif")
    assert done.returncode == 2
    assert len(calls.splitlines()) == 1
    assert "apptainer exec --nv $IMAGE spmd --version fails on a node" in done.stderr


@pytest.mark.parametrize(
    ("status", "code", "requeued"),
    [(0, 0, False), (75, 0, True), (143, 0, True), (69, 0, True), (1, 1, False), (2, 2, False)],
)
@pytest.mark.parametrize("restarts", ["", "400"])
def test_slurm_script_ends(status, restarts, code, requeued, tmp_path):
    """The end is final, a preempted job is requeued at any number, anything else fails with the code of srun."""
    variables = {}
    if restarts:
        variables["SLURM_RESTART_COUNT"] = restarts
    done, calls = run_batch_file(SLURM, tmp_path, srun=f"exit {status}", **variables)
    assert done.returncode == code
    assert ("scontrol requeue 41\n" in calls) == requeued


POD = ("--image", "i", "--claim", "c")


def script(config, *arguments, kind="slurm"):
    return run("script", kind, config, *arguments)


def test_script_goes_to_the_terminal_or_a_file(config, tmp_path, capsys):
    """A script is printed, or written to the file that is named, with the further flags in it."""
    assert (
        script(
            config,
            "--nodes",
            "2",
            "--gpus-per-node",
            "4",
            "--",
            "--steps",
            "7",
            "--start-timeout",
            "900",
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert printed.startswith("#!/bin/bash\n")
    assert f"spmd train {config} --steps 7 --start-timeout 900 --out runs/tiny" in printed
    file = tmp_path / "job.yaml"
    places = (*POD, "--file", file, "--name", "other")
    assert script(config, "--nodes", "2", *places, kind="kubernetes") == 0
    assert capsys.readouterr().out == ""
    assert yaml.safe_load(file.read_text())["metadata"]["name"] == "other"


@pytest.mark.parametrize(
    ("kind", "arguments", "flag"),
    [
        ("slurm", ["--nodes", "2"], "--heartbeat"),
        ("slurm", ["--nodes", "2"], "--coordinator"),
        ("slurm", ["--nodes", "2"], "--cluster"),
        ("kubernetes", ["--nodes", "1", *POD], "--start-timeout"),
    ],
)
def test_launch_flags_that_a_file_does_not_set_are_passed_on(kind, arguments, flag, config, capsys):
    """Which those are depends on the kind of file."""
    value = {"--coordinator": "node1:7777", "--cluster": "slurm"}.get(flag, "900")
    assert script(config, *arguments, "--", flag, value, kind=kind) == 0
    text = " ".join(re.findall(r"[^\s\",]+", capsys.readouterr().out))
    assert f"{flag} {value}" in text


def test_a_wrapper_that_is_not_here_is_noted(config, capsys):
    """The machine that writes a job need not have it; the control is one that is here."""
    assert (
        script(config, "--nodes", "2", "--gpus-per-node", "4", "--wrapper", "apptainer-x exec") == 0
    )
    assert "apptainer-x is not on this machine" in capsys.readouterr().err
    assert script(config, "--nodes", "2", "--gpus-per-node", "4", "--wrapper", "bash -c") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("kind", "arguments", "said"),
    [
        ("slurm", ["--nodes", "3", "--gpus-per-node", "1"], "= 8, and there are 3 devices"),
        (
            "slurm",
            ["--nodes", "0", "--processes-per-node", "0", "--save-seconds", "0"],
            "save_seconds: is 0",
        ),
        ("slurm", ["--nodes", "2", "--gpus-per-node", "8", "--processes-per-node", "3"], "8 / 3"),
        ("slurm", ["--nodes", "2", "--name", "My job"], "'My job' is not a valid name"),
        ("slurm", ["--nodes", "2", "--", "--resume", "auto"], "remove --resume"),
        ("slurm", ["--nodes", "2", "--", "--processes=2"], "remove --processes"),
        ("slurm", ["--nodes", "2", "--", "--max-restarts", "2"], "remove --max-restarts"),
        (
            "slurm",
            ["--nodes", "2", "--gpus-per-node", "4", "--", "--platform", "cpu"],
            "remove --platform",
        ),
        ("slurm", ["--nodes", "2", "--wrapper", "run 'it"], "no closing quotation"),
        (
            "slurm",
            ["--nodes", "2", "--gpus-per-node", "8", "--cpus-per-node", "4"],
            "each of 8 processes",
        ),
        ("kubernetes", ["--nodes", "2"], "image: is missing"),
        (
            "kubernetes",
            ["--nodes", "2", "--mount", "runs", "--max-restarts", "-1"],
            "max_restarts: is -1",
        ),
        (
            "kubernetes",
            ["--nodes", "2", *POD, "--", "--coordinator", "a:1"],
            "remove --coordinator",
        ),
        (
            "kubernetes",
            ["--nodes", "2", *POD, "--tpu", "a:2x2", "--efa", "1"],
            "efa: and tpu exclude",
        ),
        ("kubernetes", ["--nodes", "2", "--tpu", "v5e"], "'v5e' is not ACCELERATOR:TOPOLOGY"),
        ("kubernetes", ["--nodes", "3", "--tpu", "tpu-v6e-slice:2x4"], "8 / 3"),
        ("pbs", ["--nodes", "2"], "Unknown kind of script"),
    ],
)
def test_what_could_not_run_is_refused(kind, arguments, said, config, capsys):
    """Numbers that do not divide, names that no cluster takes and what is missing are found before the queue."""
    with pytest.raises(SystemExit) as caught:
        main(["script", kind, str(config), *arguments])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
