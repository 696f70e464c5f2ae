"""Job files in bash have none of the mistakes that shellcheck knows."""

import dataclasses
import subprocess

import pytest

from spmd.job_files.slurm import SlurmJob
from spmd.job_files.tpu_vm import TpuVmJob
from tests.slurm_cluster import missing_programs

SLURM = SlurmJob(name="tiny", out="runs/tiny", nodes=2, gpus_per_node=8)
TPU_VM = TpuVmJob(name="tiny", out="/runs/tiny", tpu="v4-16", zone="us-central2-b", package="spmd")
JOBS = {
    "slurm": SLURM,
    "slurm-wrapper": dataclasses.replace(
        SLURM, wrapper="apptainer exec image.sif", cpus_per_node=96, setup="module load x"
    ),
    "tpu-vm": TPU_VM,
    "tpu-vm-queued": dataclasses.replace(TPU_VM, slices=2, spot=True, keep=True, project="p"),
}


def complaints(text, tmp_path):
    absent = missing_programs(("shellcheck",))
    assert not absent, "shellcheck is not installed; run `make system` as root"
    (tmp_path / "job.sh").write_text(text)
    done = subprocess.run(
        ["shellcheck", "job.sh"],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_job_files(job, tmp_path):
    """The control is a variable without quotes."""
    text = job.render(["tiny.py", "--steps", "9"])
    assert not complaints(text, tmp_path)
    assert "SC2086" in complaints(f"{text}\nls $HOME/$1\n", tmp_path)
