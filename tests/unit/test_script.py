"""A script for a cluster holds what the run needs; a JobSet is what the published schema says, and nothing else."""

import copy
import dataclasses
import json
import re
import shlex
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from spmd.cli import main
from spmd.run.job_files import RESTARTED, KubernetesJob, SlurmJob
from tests.command_line import run, write_config

SCHEMA = json.loads((Path(__file__).parent / "jobset_schema.json").read_text(encoding="utf-8"))
TRAIN = ["tiny.py", "--steps", "9"]
SLURM = SlurmJob(out="runs/tiny", name="tiny", nodes=4, restarts=7)
JOBSET = KubernetesJob(
    out="runs/tiny",
    name="tiny",
    nodes=4,
    restarts=7,
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
            "processes_per_node": 2,
            "cpus_per_process": 4,
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


def test_jobset_meets_and_starts_again():
    """Every pod is told where pod 0 is, how many they are and which it is; only some exit codes start all again."""
    jobset = manifest(processes_per_node=2, gpus_per_node=8)
    job, pod, container = parts(jobset)
    command = container["command"]
    flags = command[command.index("--cluster") :]
    flags = dict(zip(flags[::2], flags[1::2], strict=True))
    assert flags["--coordinator"] == "tiny-workers-0-0.tiny:7777"
    assert jobset["spec"]["network"]["subdomain"] == jobset["metadata"]["name"] == "tiny"
    assert (flags["--processes"], flags["--process-id"]) == ("8", "$(PROCESS_ID)")
    assert job["completions"] == 8
    index = next(entry for entry in container["env"] if entry["name"] == "PROCESS_ID")
    assert "batch.kubernetes.io/job-completion-index" in index["valueFrom"]["fieldRef"]["fieldPath"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    rules = job["podFailurePolicy"]["rules"]
    assert rules[0]["action"] == "FailJob"
    assert 75 in rules[0]["onExitCodes"]["values"]
    assert {0, 1, 2}.isdisjoint(RESTARTED), "an end, an exception and a user's mistake are final"
    assert job["backoffLimit"] == 0
    policy = jobset["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 7
    assert [(rule["action"], rule.get("onJobFailureReasons")) for rule in policy["rules"]] == [
        ("RestartJobSet", ["PodFailurePolicy"]),
        ("FailJobSet", None),
    ]
    assert pod["terminationGracePeriodSeconds"] == JOBSET.save_seconds


def test_one_pod_meets_nobody():
    """A run of one process is not told of a coordinator, and does not look for others."""
    command = parts(manifest(nodes=1))[2]["command"]
    assert "--coordinator" not in command
    assert command[-2:] == ["--cluster", "none"]


def test_tpu_chips_are_shared_out():
    """The chips of a slice divide over its hosts, which are chosen by accelerator and topology."""
    _, pod, container = parts(manifest(tpu="tpu-v5p-slice:2x2x4"))
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    assert sorted(pod["nodeSelector"].values()) == ["2x2x4", "tpu-v5p-slice"]


def test_slurm_script():
    """The batch file asks for what was asked for, is signalled in time, and is requeued by itself."""
    changes = {
        "processes_per_node": 2,
        "gpus_per_node": 8,
        "cpus_per_process": 12,
        "save_seconds": 90,
    }
    job = dataclasses.replace(
        SLURM, **changes, setup="module load x", time="1:00:00", partition="gpu"
    )
    script = job.render(TRAIN)
    options = set(re.findall(r"^#SBATCH --(.*)$", script, re.M))
    assert options == {
        "job-name=tiny",
        "nodes=4",
        "ntasks-per-node=2",
        "cpus-per-task=12",
        "gpus-per-node=8",
        "time=1:00:00",
        *("partition=gpu", "output=tiny-%j.log", "open-mode=append", "signal=USR1@90", "requeue"),
    }
    assert "\nmodule load x\n" in script
    assert "--wait=60 --cpus-per-task=12 --gpus-per-task=4 \\\n  spmd train" in script
    assert (
        shlex.join(
            ["spmd", "train", "tiny.py", "--steps", "9", "--out", "runs/tiny", "--resume", "auto"]
        )
        in script
    )
    assert not re.search("[cg]pus", SLURM.render(TRAIN))


@pytest.mark.parametrize(
    ("status", "restarts", "code", "requeued"),
    [
        (0, "", 0, False),
        (75, "", 0, True),
        (143, "6", 0, True),
        (75, "7", 75, False),
        (2, "", 2, False),
    ],
)
def test_slurm_script_ends(status, restarts, code, requeued, tmp_path):
    """The end is final, a preempted job is requeued so many times, anything else fails with the code of srun."""
    programs = {"srun": f"exit {status}", "scontrol": f'echo "$@" > {tmp_path}/scontrol.txt'}
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_ID": "41",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }
    environment |= {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    done = subprocess.run(
        ["bash", "-c", SLURM.render(TRAIN)], env=environment, check=False, capture_output=True
    )
    assert done.returncode == code
    called = tmp_path / "scontrol.txt"
    assert (called.read_text() if called.exists() else "") == ("requeue 41\n" if requeued else "")


def script(config, *arguments, kind="slurm"):
    return run("script", kind, config, *arguments)


def test_script_goes_to_the_terminal_or_a_file(config, tmp_path, capsys):
    """A script is printed, or written to the file that is named, with the further flags in it."""
    assert script(config, "--nodes", "2", "--gpus-per-node", "4", "--", "--steps", "7") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("#!/bin/bash\n")
    assert f"spmd train {config} --steps 7 --out runs/tiny --resume auto" in printed
    file = tmp_path / "job.yaml"
    places = ("--image", "i", "--claim", "c", "--file", file, "--name", "other")
    assert script(config, "--nodes", "2", *places, kind="kubernetes") == 0
    assert capsys.readouterr().out == ""
    assert yaml.safe_load(file.read_text())["metadata"]["name"] == "other"


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
        ("slurm", ["--nodes", "2", "--", "--resume", "auto"], "(resume)"),
        ("slurm", ["--nodes", "2", "--", "--processes", "2"], "(launch_args)"),
        ("kubernetes", ["--nodes", "2"], "image: is missing"),
        ("kubernetes", ["--nodes", "2", "--mount", "runs", "--restarts", "-1"], "restarts: is -1"),
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
